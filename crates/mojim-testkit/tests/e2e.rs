//! The `mojim` command end to end: real nodes and programs on loopback,
//! killed and started again.
//!
//! Owns nothing but its own temporary directories, shared memory and processes, all gone when a
//! test ends. No test depends on how long something takes: it awaits what happens, with a generous
//! deadline.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use mojim_testkit::cluster::{Cluster, SYNC, Setup};
use mojim_testkit::home::Home;
use mojim_testkit::rng::Rng;
use mojim_testkit::{
    DEADLINE, Process, await_or, await_that, build_bench, libraries, link, mojim, mojim_path,
    source, temporary, text,
};

/// What the nodes say once all is well. A program says of its link what its background saw
/// at its last turn, which a busy machine keeps back.
fn await_well(c: &Cluster) -> Value {
    await_or(
        "a volume that is well",
        || c.status().to_string(),
        || Some(c.status()).filter(|s| s["ok"] == true),
    )
}

/// Two nodes, `b` with a log in memory; `more` is of the volume.
fn with_mirror_in_memory(cluster: &str, more: &str) -> Home {
    let home = Home::new(cluster, 2);
    let mut t = format!(
        "cluster = \"{cluster}\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\n{more}"
    );
    let nodes = [("a", "size"), ("b", "medium = \"dram\", size")];
    for ((name, log), port) in nodes.iter().zip(&home.ports) {
        t += &home.data_node(name, port.number, format!("{log} = \"1MiB\""));
    }
    home.configure(&t);
    home
}

/// The mirror knows that all it has is committed, and puts it into its data files at its
/// end. A program that detaches waits for that, but only for half a second.
fn await_last_word(home: &Home, mirror: &str) {
    await_or(
        "the program's last word",
        || home.status().to_string(),
        || {
            let n = home.says(mirror);
            let known = n["committed"].as_u64().or(n["checkpoint"].as_u64());
            (known? >= n["last_lsn"].as_u64()?).then_some(())
        },
    );
}

/// A directory of this process's, with nothing from a failed run of the same number.
fn empty_directory(name: &str) -> PathBuf {
    let name = format!("{name}-{}", std::process::id());
    let dir = temporary().join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn the_demonstration_loses_nothing_and_cleans_up() {
    build_bench();
    let dir = empty_directory("demo");
    let out = Command::new(mojim_path())
        .args(["demo", "--json"])
        .env("TMPDIR", &dir)
        .output()
        .unwrap();
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["ok"], true, "{v}");
    assert_eq!(v["lost"], 0);
    assert_eq!(v["torn"], Value::Null);
    assert_eq!(v["copies_equal"], true);
    assert!(v["acknowledged"].as_u64().unwrap() > 0);
    for mode in ["unreplicated", "async", "sync", "sync-flush", "msync"] {
        for size in [8, 64, 1024, 4096, 12288] {
            let row = v["latency"]
                .as_array()
                .unwrap()
                .iter()
                .find(|r| r["case"] == mode && r["bytes"] == size);
            assert!(row.unwrap()["median_us"].as_f64().unwrap() > 0.0);
        }
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn an_interrupted_demonstration_cleans_up() {
    build_bench();
    let dir = empty_directory("interrupt");
    let mut child = Command::new(mojim_path())
        .arg("demo")
        .env("TMPDIR", &dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let id = child.id();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.contains("Two nodes"), "{line}");
    let ok = Command::new("sh")
        .args(["-c", &format!("kill -INT {id}")])
        .status()
        .unwrap();
    assert!(ok.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    assert!(!Path::new(&format!("/dev/shm/mojim-demo-{id}")).exists());
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn from_new_nodes_to_a_promoted_mirror() {
    let c = Cluster::new(SYNC);
    let out = c.mojim("status", &[]);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stdout).contains("no answer"),
        "{}",
        text(&out.stdout)
    );

    let mut a = c.node("a");
    let mut b = c.node("b");
    await_well(&c);
    assert_eq!(c.mojim("status", &[]).status.code(), Some(0));

    let (mut program, found) = c.program("a", &["--entries", "50", "--linger"]);
    assert_eq!(found, 0);
    program.acknowledged(0, 50);
    let s = await_well(&c);
    let nodes = &s["volumes"][0]["nodes"];
    assert_eq!(nodes[0]["role"], "primary");
    assert_eq!(nodes[0]["attached"], true);
    assert_eq!(nodes[0]["pid"], program.child.id());
    assert_eq!(nodes[0]["link"]["up"], true);
    assert_eq!(nodes[1]["role"], "mirror");
    assert_eq!(nodes[1]["link"]["up"], true);
    assert!(text(&c.mojim("status", &[]).stdout).contains(&format!("pid {}", program.child.id())));

    // A primary with a program is not promoted away.
    for node in ["b", "a"] {
        let out = c.mojim("promote", &["--name", node]);
        assert_eq!(out.status.code(), Some(1));
        let why = text(&out.stderr);
        assert!(
            why.starts_with("mojim: ") && why.contains(&format!("node {node}")),
            "{why}"
        );
    }
    let why = text(&c.mojim("promote", &["--name", "b"]).stderr);
    assert!(
        why.contains("is alive") && why.contains("End it first"),
        "{why}"
    );

    // Also while a program is attached.
    c.assert_equal();
    program.finish();
    c.assert_equal();

    a.kill();
    let answer = c.promote("b");
    assert!(answer["epoch"].as_u64().unwrap() > 1, "{answer}");
    assert_eq!(c.promote("b")["already"], true);
    let out = c.mojim("status", &[]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("alone"), "{}", text(&out.stdout));
    let (mut program, found) = c.program("b", &["--entries", "10"]);
    assert_eq!(found, 50);
    program.acknowledged(50, 60);
    program.finish();

    b.signal("TERM");
    assert_eq!(b.wait(), Some(0));
}

/// Whoever started a node by `nohup`, and closed the terminal, found it ended: it waits for SIGHUP, and what is
/// waited for comes also where it is ignored.
#[test]
fn a_node_that_is_to_outlive_its_terminal_does() {
    let c = Cluster::new(SYNC);
    c.prepare(|_, command| {
        // SAFETY: has a valid signal ignored, by a system call.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGHUP, libc::SIG_IGN);
                Ok(())
            });
        }
    });
    let mut a = c.node("a");
    // Of two that wait, the one with the lower number comes first.
    a.signal("HUP");
    a.signal("TERM");
    assert_eq!(a.wait(), Some(0));
    let said = a.errors();
    assert!(said.contains("signal 15, stopping"), "{said}");
}

#[test]
fn only_one_program_is_attached() {
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let (mut first, _) = c.program("a", &["--entries", "5", "--linger"]);
    first.acknowledged(0, 5);
    let out = c.mojim("__append", &["--node", "a"]);
    assert_eq!(out.status.code(), Some(1));
    let why = text(&out.stderr);
    assert!(
        why.contains("volume v on node a is in use")
            && why.contains("only one process")
            && why.contains(&first.child.id().to_string()),
        "{why}"
    );
    let out = c.mojim("__append", &["--node", "b"]);
    assert_eq!(out.status.code(), Some(1));
    let why = text(&out.stderr);
    assert!(
        why.contains("node b is not the primary of volume v: a is"),
        "{why}"
    );
    first.finish();
    c.assert_equal();
}

fn a_killed_mirror_catches_up(setup: Setup) {
    let c = Cluster::new(setup);
    let _a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &["--entries", "2000", "--pace", "200", "--linger"]);
    program.acknowledged(0, 500);
    b.kill();
    let b = c.node("b");
    program.acknowledged(500, 2000);
    program.finish();
    c.assert_equal();
    await_well(&c);
    drop(b);
}

#[test]
fn a_killed_mirror_catches_up_from_its_disk() {
    a_killed_mirror_catches_up(SYNC);
}

#[test]
fn a_killed_mirror_catches_up_from_its_memory() {
    a_killed_mirror_catches_up(Setup {
        mirror_medium: "dram",
        ..SYNC
    });
}

#[test]
fn a_killed_mirror_catches_up_through_shared_memory() {
    a_killed_mirror_catches_up(Setup {
        mirror_medium: "dram",
        transport: "shm",
        ..SYNC
    });
}

#[test]
fn a_killed_mirror_catches_up_in_sync_flush() {
    a_killed_mirror_catches_up(Setup {
        mode: "sync-flush",
        ..SYNC
    });
}

#[test]
fn a_killed_mirror_catches_up_in_async() {
    a_killed_mirror_catches_up(Setup {
        mode: "async",
        ..SYNC
    });
}

#[test]
fn a_mirror_that_lost_its_memory_is_copied_anew() {
    let c = Cluster::new(Setup {
        mirror_medium: "dram",
        ..SYNC
    });
    let _a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &["--entries", "1500", "--pace", "200", "--linger"]);
    program.acknowledged(0, 500);
    b.kill();
    c.lose_memory("b");
    let _b = c.node("b");
    // It has nothing to serve, and says so, until it is copied; whichever
    // comes first, it is never promoted while the program lives.
    let out = c.mojim("promote", &["--name", "b"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    program.acknowledged(500, 1500);
    program.finish();
    c.assert_equal();
}

#[test]
fn the_old_primary_returns_as_the_mirror() {
    for transport in ["tcp", "shm"] {
        let c = Cluster::new(Setup {
            mirror_medium: "dram",
            transport,
            ..SYNC
        });
        let mut a = c.node("a");
        let _b = c.node("b");
        let (mut program, _) = c.program("a", &[]);
        program.acknowledged(0, 1000);
        program.kill();
        a.kill();
        let mut acknowledged = 1000;
        while let Some(line) = program.line() {
            assert_eq!(line, acknowledged.to_string());
            acknowledged += 1;
        }
        c.promote("b");
        let _a = c.node("a");
        let (mut program, found) = c.program("b", &["--entries", "300", "--linger"]);
        assert!(found >= acknowledged, "{found} of {acknowledged} entries");
        program.acknowledged(found, found + 300);
        await_that("the return of a", || {
            (c.says("b")["view"]["mirror"] == "a").then_some(())
        });
        await_well(&c);
        program.finish();
        c.assert_equal();
        assert_eq!(c.says("a")["role"], "mirror");

        // And nothing on it passes for the primary any more.
        let out = c.mojim("__append", &["--node", "a"]);
        assert_eq!(out.status.code(), Some(1));
        assert!(
            text(&out.stderr).contains("is not the primary"),
            "{}",
            text(&out.stderr)
        );
    }
}

#[test]
fn a_killed_program_loses_nothing_though_its_mirror_is_gone() {
    let c = Cluster::new(Setup {
        mirror_medium: "dram",
        ..SYNC
    });
    let _a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &[]);
    program.acknowledged(0, 500);
    b.kill();
    program.kill();
    let mut acknowledged = 500;
    while let Some(line) = program.line() {
        assert_eq!(line, acknowledged.to_string());
        acknowledged += 1;
    }
    // The operator says that b will not come back.
    c.promote("a");
    let (mut program, found) = c.program("a", &["--entries", "5"]);
    assert!(found >= acknowledged, "{found} of {acknowledged} entries");
    program.acknowledged(found, found + 5);
    program.finish();
}

/// Without a word of force `promote` gave up what is behind a damaged record of a
/// primary that lives alone: it took the copy up where its log could still be read.
#[test]
fn a_damaged_log_is_given_up_by_force_alone() {
    let c = Cluster::new(SYNC);
    let config = c.text(SYNC, "e2e");
    c.configure(&config.replace("[volume.v]", "[volume.v]\ncheckpoint_threshold = 1000000"));
    let mut a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &["--entries", "1"]);
    program.acknowledged(0, 1);
    program.finish();
    b.kill();
    c.promote("a");
    // It stands still with records that no checkpoint covers: a program that was killed a
    // moment after its last entry had taken one already, where the machine was busy.
    let (program, found) = c.program("a", &["--pace", "300"]);
    let program = program.read_on_counting();
    program.await_more(100);
    c.stop_with_records(&["a"], 60, &[program.id()]);
    a.kill();
    let acknowledged = program.stop();
    c.lose_memory("a");
    let (records, mut bytes) = c.records("a");
    let (lsn, at) = records[records.len() - 20];
    assert!(lsn > c.checkpoint("a"), "a checkpoint was taken");
    bytes[at + 60] ^= 1;
    fs::write(c.log("a"), bytes).unwrap();
    let _a = c.node("a");
    for _ in 0..2 {
        let out = c.mojim("promote", &["--name", "a"]);
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
        let said = text(&out.stderr);
        assert!(
            said.contains("v.log.0") && said.contains("--force"),
            "{said}"
        );
    }
    let out = c.mojim("promote", &["--name", "a", "--force", "--yes"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let (_program, left) = c.program("a", &["--entries", "1", "--linger"]);
    assert!(
        (found + 1..acknowledged).contains(&left),
        "{left} are there"
    );
}

/// The figures of a killed program stayed in the ring's memory. While the next
/// one was attaching, and its mirror was gone, `mojim status` said that all was
/// well and the link up: whoever waited for that went on too early. And what
/// was settled was told again after every `mojim verify`.
#[test]
fn a_program_that_attaches_has_no_link_of_the_one_before() {
    let c = Cluster::new(SYNC);
    let a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &[]);
    program.acknowledged(0, 50);
    await_that("the link", || {
        (c.says("a")["link"]["up"] == true).then_some(())
    });
    b.kill();
    program.kill();
    await_that("its end to be seen", || {
        a.errors().contains("ended without detaching").then_some(())
    });
    for _ in 0..20 {
        c.mojim("verify", &["--wait", "0"]);
    }
    let told = a.errors().matches("ended without detaching").count();
    let args = [
        "__append",
        "--config",
        c.file().to_str().unwrap(),
        "--node",
        "a",
    ]
    .map(String::from);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let _next = Process::start(&args, &c.dir.join("program-a.txt"));
    // It waits for its mirror for seconds. Until it has opened its ring it says nothing of a
    // link.
    let status = await_that("the next one", || {
        let s = c.status();
        let n = &s["volumes"][0]["nodes"][0];
        (n["attached"] == true && n["link"]["up"].is_boolean()).then_some(s)
    });
    assert_eq!(
        status["volumes"][0]["nodes"][0]["link"]["up"], false,
        "{status}"
    );
    assert_eq!(status["ok"], false);
    assert_eq!(told, 1, "{}", a.errors());
}

#[test]
fn a_program_that_was_killed_is_followed_by_another() {
    for mode in ["sync", "sync-flush", "async"] {
        let c = Cluster::new(Setup { mode, ..SYNC });
        let _nodes = [c.node("a"), c.node("b")];
        let mut acknowledged = 0;
        for _ in 0..3 {
            let (mut program, found) = c.program("a", &[]);
            assert!(found >= acknowledged, "{found} of {acknowledged} entries");
            program.acknowledged(found, found + 300);
            program.kill();
            acknowledged = found + 300;
            while let Some(line) = program.line() {
                assert_eq!(line, acknowledged.to_string());
                acknowledged += 1;
            }
        }
        let (mut program, found) = c.program("a", &["--entries", "1"]);
        assert!(found >= acknowledged, "{found} of {acknowledged} entries");
        program.acknowledged(found, found + 1);
        program.finish();
        c.assert_equal();
    }
}

#[test]
fn a_difference_is_found_to_the_byte() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &["--entries", "100"]);
    program.acknowledged(0, 100);
    program.finish();
    c.assert_equal();
    b.signal("TERM");
    assert_eq!(b.wait(), Some(0));
    let path = c.dir.join("b/v/log");
    let mut bytes = fs::read(&path).unwrap();
    bytes[20_000_001] ^= 0x10;
    fs::write(&path, bytes).unwrap();
    let _b = c.node("b");
    let out = c.mojim("verify", &["--json"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["equal"], false);
    assert_eq!(
        (&v["file"], &v["offset"]),
        (&"log".into(), &20_000_001.into()),
        "{v}"
    );
}

#[test]
fn every_mistake_of_a_configuration_is_reported() {
    let c = Cluster::new(SYNC);
    fs::write(
        c.file(),
        "cluster = \"x\"\n[volume.v]\nmode = \"quick\"\nprimary = \"c\"\n[node.a]\naddress = \"here\"\ndirectory = \"not/absolute\"\n",
    )
    .unwrap();
    for args in [
        &["config"][..],
        &["status"],
        &["verify"],
        &["node", "--name", "a"],
        &["promote", "--name", "a"],
        &["run", "--name", "a", "--", "true"],
    ] {
        let out = c.mojim(args[0], &args[1..]);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        let why = text(&out.stderr);
        for mistake in ["volume.v.mode", "node.a.address", "node.a.directory"] {
            let place = format!("{}:", c.file().display());
            let found = why
                .lines()
                .any(|l| l.starts_with("mojim: ") && l.contains(&place) && l.contains(mistake));
            assert!(found, "{args:?}: {mistake} is not in\n{why}");
        }
    }
    let out = mojim(&["config", "--config", "/nowhere/mojim.toml"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("/nowhere/mojim.toml"));
}

#[test]
fn what_is_asked_for_wrongly_is_a_usage_error() {
    let c = Cluster::new(SYNC);
    for args in [
        &["node", "--name", "z"][..],
        &["promote", "--name", "z"],
        &["promote", "--name", "a", "--volume", "w"],
        &["status", "--volume", "w"],
        &["verify", "--volume", "w"],
        &["run", "--name", "z", "--", "true"],
        &["run", "--name", "a"],
    ] {
        let out = c.mojim(args[0], &args[1..]);
        assert_eq!(
            out.status.code(),
            Some(2),
            "{args:?}: {}",
            text(&out.stderr)
        );
        assert!(!text(&out.stderr).contains("panicked"));
    }
    let out = mojim(&[]);
    assert_eq!(out.status.code(), Some(0));
    assert!(text(&out.stdout).contains("mojim demo"));
    assert_eq!(mojim(&["nonsense"]).status.code(), Some(2));
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let c = Cluster::new(SYNC);
    let script = format!(
        "'{0}' config --config '{1}' | true; '{0}' completions bash | true",
        mojim_path(),
        c.file().display()
    );
    let out = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(
        !text(&out.stderr).contains("panicked"),
        "{}",
        text(&out.stderr)
    );
}

/// The command alone, as it is copied to a node: it says where it looked for the measurements, and
/// its manual and completions leave their options out.
#[test]
fn without_the_measurements_the_rest_works() {
    let dir = empty_directory("alone");
    let alone = dir.join("mojim");
    fs::copy(mojim_path(), &alone).unwrap();
    let run = |words: &[&str]| Command::new(&alone).args(words).output().unwrap();
    for words in [
        &["bench", "sync"][..],
        &["demo", "--json"],
        &["help", "bench"],
    ] {
        let out = run(words);
        let (code, said) = (out.status.code(), text(&out.stderr));
        assert_eq!(code, Some(1), "{said}");
        let looked_for = dir.join("mojim-bench");
        assert!(said.contains(looked_for.to_str().unwrap()), "{said}");
    }
    let out = run(&["completions", "bash"]);
    assert!(out.status.success() && text(&out.stdout).contains("bench"));
    let pages = dir.join("man");
    assert!(run(&["man", pages.to_str().unwrap()]).status.success());
    assert!(pages.join("mojim-bench.1").exists() && pages.join("mojim-status.1").exists());
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_manual_covers_every_word() {
    build_bench();
    let c = Cluster::new(SYNC);
    let dir = c.dir.join("man");
    let out = mojim(&["man", dir.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let mut pages: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|f| f.unwrap().file_name().into_string().unwrap())
        .collect();
    pages.sort();
    for word in [
        "demo",
        "bench-sync",
        "bench-tiers",
        "node",
        "run",
        "status",
        "promote",
        "verify",
        "config",
        "bench",
        "man",
        "completions",
    ] {
        assert!(pages.contains(&format!("mojim-{word}.1")), "{pages:?}");
    }
    assert!(!pages.iter().any(|p| p.contains("__")), "{pages:?}");
    for shell in ["bash", "zsh", "fish"] {
        let out = mojim(&["completions", shell]);
        assert!(out.status.success() && text(&out.stdout).contains("sync-rounds"));
    }
}

#[test]
fn unknown_peers_are_refused_and_the_node_keeps_serving() {
    let c = Cluster::new(SYNC);
    let a = c.node("a");
    let b = c.node("b");
    let (mut program, _) = c.program("a", &["--entries", "1000", "--pace", "300", "--linger"]);
    program.acknowledged(0, 10);

    let mut rng = Rng::new(1);
    let mut noise = Vec::new();
    while noise.len() < 1 << 16 {
        noise.extend_from_slice(&rng.next().to_le_bytes());
    }
    let mut peers: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        b"SSH-2.0-OpenSSH_9.6\r\n".to_vec(),
        vec![0; 4096],
        vec![0xff; 4096],
        noise.clone(),
    ];
    peers.extend((1..40).map(|i| noise[i * 97..i * 97 + i * 31].to_vec()));
    for port in c.ports.iter().map(|p| p.number) {
        for words in &peers {
            let mut s = TcpStream::connect(("127.0.0.1", port)).unwrap();
            s.set_read_timeout(Some(DEADLINE)).unwrap();
            // The node may close while this is still being said.
            let _ = s.write_all(words);
            let _ = s.shutdown(std::net::Shutdown::Write);
            // It ends the link, with or without a word.
            let _ = s.read_to_end(&mut Vec::new());
        }
        // Silent ones, and many of them. (Each time others: a node ends them after a while.)
        await_that("an answer beside silent peers", || {
            let _silent: Vec<_> = (0..50)
                .map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap())
                .collect();
            let nodes = c.status()["volumes"][0]["nodes"].take();
            (nodes[0]["reachable"] == true && nodes[1]["reachable"] == true).then_some(())
        });
    }

    // Another cluster's command, and another cluster's program.
    let other = c.dir.join("other.toml");
    let t = c.text(SYNC, "other").replace("/a\"", "/other-a\"");
    fs::write(&other, t).unwrap();
    let out = mojim(&["status", "--config", other.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stdout).contains("this is cluster"),
        "{}",
        text(&out.stdout)
    );
    let out = mojim(&[
        "promote",
        "--config",
        other.to_str().unwrap(),
        "--name",
        "b",
    ]);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains("this is cluster"),
        "{}",
        text(&out.stderr)
    );
    let out = mojim(&[
        "__append",
        "--config",
        other.to_str().unwrap(),
        "--node",
        "a",
    ]);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains("this is cluster"),
        "{}",
        text(&out.stderr)
    );

    program.acknowledged(10, 1000);
    program.finish();
    c.assert_equal();
    assert!(
        !a.errors().contains("panicked") && !b.errors().contains("panicked"),
        "{}",
        c.logs()
    );
}

#[test]
fn run_says_what_it_lacks() {
    let c = Cluster::new(SYNC);
    let file = c.file();
    let out = Command::new(mojim_path())
        .args([
            "run",
            "--preload",
            "--config",
            file.to_str().unwrap(),
            "--name",
            "a",
            "--",
            "true",
        ])
        .env("MOJIM_LIB", c.dir.join("nothing-here"))
        .output()
        .unwrap();
    // Where the libraries have been built they are found beside the command.
    if out.status.code() != Some(0) {
        assert_eq!(out.status.code(), Some(1));
        let why = text(&out.stderr);
        assert!(
            why.contains("libmojim_preload.so") && why.contains("MOJIM_LIB"),
            "{why}"
        );
    }
}

/// Right after the primary's end a promotion was refused, since the primary had been heard a
/// moment ago, and an operator had to try again.
#[test]
fn a_promotion_waits_until_the_primary_counts_as_gone() {
    let c = Cluster::new(SYNC);
    let (mut a, _b) = (c.node("a"), c.node("b"));
    let (mut p, _) = c.program("a", &["--entries", "50", "--linger"]);
    p.acknowledged(0, 50);
    p.kill();
    a.kill();
    let out = c.mojim("promote", &["--name", "b", "--wait"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(c.says("b")["view"]["primary"], "b");
}

/// Static programs ran unguarded, and reached the volume's files past Mojim.
#[test]
fn run_starts_no_program_that_would_run_without_the_libraries() {
    libraries();
    let c = Cluster::new(SYNC);
    let program = c.dir.join("static");
    let source = source().join("tests/e2e/probe_static.c");
    let mut cc = Command::new("cc");
    let cc = cc.arg("-static").arg(source).arg("-o").arg(&program);
    assert!(cc.status().unwrap().success());
    let program = program.to_str().unwrap();
    let out = c.mojim("run", &["--name", "a", "--preload", "--", program]);
    assert_eq!(out.status.code(), Some(126), "{}", text(&out.stdout));
    let why = text(&out.stderr);
    assert!(
        why.contains("linked statically") && why.contains(program),
        "{why}"
    );
    let out = c.mojim("run", &["--name", "a", "--allow-unguarded", "--", program]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout), "unguarded\n");
    let out = c.mojim(
        "run",
        &["--name", "a", "--preload", "--", "nothing-of-that-name"],
    );
    assert_eq!(out.status.code(), Some(127), "{}", text(&out.stderr));
}

/// `mojim run` asked a daemon that was gone for minutes, and said nothing.
#[test]
fn run_says_what_it_waits_for_and_gives_up_a_daemon_that_nobody_starts() {
    libraries();
    let c = mojim_testkit::voters::Cluster::new("sync", "disk");
    let command = format!("mojim node --config {} --name a", c.file().display());
    // Before the program was started.
    let out = c.mojim("run", &["--name", "a", "--", "true"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    for what in [
        "waiting, since",
        "the daemon of node a",
        "given up",
        &command,
    ] {
        assert!(said.contains(what), "{what}: {said}");
    }
    // And after it has ended.
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let go = c.dir.join("go");
    assert!(Command::new("mkfifo").arg(&go).status().unwrap().success());
    let script = format!("echo up; read x < '{}'; exit 3", go.display());
    let file = c.file();
    let args = [
        "run",
        "--config",
        file.to_str().unwrap(),
        "--name",
        "a",
        "--",
    ];
    let args = [&args[..], &["sh", "-c", &script]].concat();
    let mut run = Process::start(&args, &c.dir.join("run.txt"));
    assert_eq!(run.line().as_deref(), Some("up"));
    a.kill();
    fs::write(&go, "go\n").unwrap();
    assert_eq!(run.wait(), Some(3), "{}", run.errors());
    let said = run.errors();
    for what in [
        "waiting, since",
        "the program ended",
        "cannot find out",
        &command,
    ] {
        assert!(said.contains(what), "{what}: {said}");
    }
}

/// Figure 1 of the Mojim paper, compiled with `cc` and run as printed under `mojim run`, replicated, twice;
/// then the mirror takes over and has it. Without --preload it was ended by SIGBUS: it stored beyond the end
/// of its new file, which a mapping in a mount does not make longer.
#[test]
fn figure_1_is_on_both_nodes() {
    // With ports that stay this test's: another test's connection could take one that was
    // free while the program was compiled.
    let home = with_mirror_in_memory("fig", "");
    let dir = &home.dir;
    let program = dir.join("fig1");
    let cc = Command::new("cc")
        .arg(source().join("examples/fig1.c"))
        .arg("-I")
        .arg(source().join("include"))
        .arg("-L")
        .arg(libraries())
        .args(["-lmojim", "-o"])
        .arg(&program)
        .status()
        .unwrap();
    assert!(cc.success());
    let mut node = home.node("b");
    let file = dir.join("a/v/mmapfile");
    let [program, file] = [&program, &file].map(|p| p.to_str().unwrap());
    for more in [&[][..], &["--preload"]] {
        let words = [&["--name", "a"], more, &["--", program, file]].concat();
        let run = home.mojim("run", &words);
        assert!(run.status.success(), "{}", text(&run.stderr));
    }
    await_last_word(&home, "b");
    node.signal("TERM");
    assert_eq!(node.wait(), Some(0));
    for n in ["a", "b"] {
        let bytes = fs::read(dir.join(n).join("v/mmapfile")).unwrap();
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let entry = |at: usize| i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(bytes.len(), 40960, "node {n}");
        assert_eq!((word(0), word(8)), (2, 2), "node {n}: accesses, entries");
        assert_eq!((entry(16), entry(20), entry(24)), (24, 24, 0), "node {n}");
    }
}

/// Over a link whose round trip was longer than `resend_timeout` every sync
/// point suspected the link and had its session made anew.
#[test]
fn a_link_that_is_only_long_is_not_suspected() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let b = c.node("b");
    // The program reaches b the long way.
    let near = format!("127.0.0.1:{}", c.ports[1].number);
    let port = link::long(near.clone(), Duration::from_millis(200));
    let text = fs::read_to_string(c.file()).unwrap();
    let far = text.replace(&near, &format!("127.0.0.1:{port}"));
    fs::write(c.file(), far.replace("\"5s\"", "\"250ms\"")).unwrap();
    let (mut p, _) = c.program("a", &["--entries", "30", "--linger"]);
    // Ten in a row over one session: on a machine that keeps an answer for a second more than
    // the way takes, a session is rightly made anew.
    let sessions = || b.errors().matches("following node a").count();
    let (mut last, mut row, mut longest) = (sessions(), 0, 0);
    for i in 0..30 {
        p.acknowledged(i, i + 1);
        let before = std::mem::replace(&mut last, sessions());
        row = if last == before { row + 1 } else { 0 };
        longest = longest.max(row);
    }
    assert!(longest >= 10, "{longest}: {}", b.errors());
    p.finish();
}

/// A mirror that stalls: sync points fail with ETIMEDOUT after the configured
/// bound, the memory stays usable, and everything goes on when it wakes.
#[test]
fn a_mirror_that_stalls_is_waited_for_and_no_longer() {
    // A sync point fails after 3 s. With 0.12 s one could fail before the stall, on a machine
    // that keeps the mirror waiting for as long.
    let home = with_mirror_in_memory("stall", "resend_timeout = \"500ms\"\nresend_attempts = 6\n");
    let mut node = home.node("b");
    let v = mojim::Volume::attach(&home.file(), "a", None).unwrap_or_else(|e| panic!("{e}"));
    let flags = mojim::MapFlags {
        create: true,
        ..Default::default()
    };
    let m = v.map("f", 4096, flags).unwrap();
    // SAFETY: inside the region, one thread; as everywhere below.
    let store = |b: u8| unsafe { std::ptr::write_bytes(m.ptr, b, m.len) };
    store(1);
    mojim::msync(m.ptr, m.len).unwrap();
    node.signal("STOP");
    await_that("every thread of the mirror to stand still", || {
        let tasks = fs::read_dir(format!("/proc/{}/task", node.child.id())).ok()?;
        tasks
            .map(|t| fs::read_to_string(t.ok()?.path().join("stat")).ok())
            .all(|s| s.is_some_and(|s| s.contains(") T ")))
            .then_some(())
    });
    store(2);
    let e = mojim::msync(m.ptr, m.len).expect_err("nobody acknowledged");
    assert_eq!(e.errno(), libc::ETIMEDOUT, "{e}");
    store(3);
    node.signal("CONT");
    await_that("the mirror to acknowledge again", || {
        mojim::msync(m.ptr, m.len).ok()
    });
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    await_last_word(&home, "b");
    node.signal("TERM");
    assert_eq!(node.wait(), Some(0));
    for n in ["a", "b"] {
        let bytes = fs::read(home.dir.join(n).join("v/f")).unwrap();
        assert!(bytes == [3; 4096], "{n}");
    }
}
