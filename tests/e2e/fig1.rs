//! The paper's Figure 1: unmodified under the preload library, and through
//! libmojim itself, on one file, in turns; and killed after its sync points.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use mojim_testkit::interface::*;

/// The access count, the log's size, and its entries, from the data file.
fn state(v: &TestVolume) -> (u64, u64, Vec<u32>) {
    let bytes = std::fs::read(v.dir().join("mmapfile")).unwrap();
    assert_eq!(bytes.len(), 40960);
    let word = |i: usize| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
    let entries = bytes[16..]
        .chunks_exact(4)
        .map(|c| u32::from_ne_bytes(c.try_into().unwrap()));
    let used = entries.clone().take(word(1) as usize).collect();
    assert!(entries.skip(word(1) as usize).all(|e| e == 0));
    (word(0), word(1), used)
}

#[test]
fn twice_preloaded_and_twice_directly() {
    let v = TestVolume::new("");
    let (fig1, log) = (v.root.join("fig1"), v.root.join("log"));
    compile("examples/fig1.c", &fig1, &[], true);
    compile("examples/log.c", &log, &["-std=gnu99"], true);
    let file = v.dir().join("mmapfile");
    for n in 1..=4 {
        if n % 2 == 1 {
            let out = output(v.preloaded(&fig1).arg(&file));
            assert!(out.status.success(), "{}", text(&out));
            assert_eq!(text(&out), "");
        } else {
            succeed(Command::new(&log).arg(v.config()).arg("a"));
        }
        assert_eq!(state(&v), (n, n, vec![24; n as usize]));
    }
}

#[test]
fn the_path_may_come_through_links_and_the_environment() {
    let v = TestVolume::new("");
    let fig1 = v.root.join("fig1");
    compile("examples/fig1.c", &fig1, &[], true);
    std::os::unix::fs::symlink(v.root.join("node"), v.root.join("short")).unwrap();
    let mut all = Vec::new();
    all.push(("relative", "../short/v/../v/./mmapfile"));
    all.push(("again", "../node/v/mmapfile"));
    for (i, (_, path)) in all.iter().enumerate() {
        succeed(
            v.preloaded(&fig1)
                .current_dir(v.root.join("ring"))
                .env("FIG1_FILE", path),
        );
        assert_eq!(state(&v).0, i as u64 + 1);
    }
}

#[test]
fn what_was_synced_survives_a_kill_and_what_was_not_does_not() {
    let v = TestVolume::new("");
    let probe = v.root.join("probe");
    compile("tests/e2e/probe.c", &probe, &[], true);
    for round in 1..=3 {
        let mut child = v
            .preloaded(&probe)
            .arg("until_killed")
            .arg(v.dir())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "synced\n");
        child.kill().unwrap();
        child.wait().unwrap();
        let out = succeed(v.preloaded(&probe).arg("show").arg(v.dir()));
        assert_eq!(out, format!("{round} {round} 0\n"));
    }
}

#[test]
fn without_a_configuration_the_figure_runs_as_on_plain_linux() {
    let v = TestVolume::new("");
    let fig1 = v.root.join("fig1");
    compile("examples/fig1.c", &fig1, &[], true);
    let file = v.root.join("plain");
    std::fs::write(&file, vec![0u8; 40960]).unwrap();
    let out = output(v.preloaded(&fig1).arg(&file).env_remove("MOJIM_CONFIG"));
    // gmsync is Mojim's; all before it is the kernel's.
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out).starts_with("gmsync: "), "{}", text(&out));
    assert_eq!(std::fs::read(&file).unwrap()[0], 1);
}
