//! Programs that use one file of a mount past each other, beside a model of what each read must
//! find (`programs/foreign.c`). They use it buffered, past the page cache, by libaio, by io_uring
//! and through mappings, from several processes.
//!
//! A mount once asked for FUSE_ASYNC_DIO. With that, the kernel drops cached pages before a write
//! by libaio and O_DIRECT and not after it: a page that another program read meanwhile kept its old
//! bytes. Those were read on, also by programs that opened the file later. A byte that was stored
//! into a mapping of such a page wrote the whole page back. It overwrote what had been fsynced, on
//! both nodes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::mount::Mount;
use mojim_testkit::{await_or, interface::compile, text};

/// Steps of each process; `FOREIGN_STEPS=200000` is the long form.
fn steps() -> String {
    std::env::var("FOREIGN_STEPS").unwrap_or_else(|_| "1500".into())
}

/// `foreign.c`, compiled into `dir`.
fn program(dir: &Path) -> PathBuf {
    let to = dir.join("foreign");
    let source = "crates/mojim-testkit/programs/foreign.c";
    compile(source, &to, &["-O2"], false);
    to
}

fn foreign(program: &Path, how: &str, file: &Path, image: &Path, seed: u32, steps: &str) -> Output {
    let mut run = Command::new(program);
    run.arg(how).args([file, image]);
    run.args([&seed.to_string(), "4", steps]).output().unwrap()
}

#[test]
fn every_way_past_a_page_cache_agrees_with_a_model_of_bytes() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let (program, image) = (program(&c.dir), c.dir.join("image"));
    for seed in 1..4 {
        let file = m.at.join(format!("f{seed}"));
        let out = foreign(&program, "check", &file, &image, 10 * seed, &steps());
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stdout));
        eprintln!("seed {seed}: {}", text(&out.stdout).trim());
        let want = fs::read(&image).unwrap();
        assert!(
            fs::read(&file).unwrap() == want,
            "seed {seed}: in the mount"
        );
        for node in ["a", "b"] {
            let at = c.dir.join(node).join(format!("v/f{seed}"));
            await_or(
                "the file's bytes",
                || format!("seed {seed}, on node {node}"),
                || (fs::read(&at).ok()? == want).then_some(()),
            );
        }
    }
    // The model finds bytes that come back.
    let out = foreign(&program, "spoil", &m.at.join("g"), &image, 1, "1500");
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    assert!(text(&out.stdout).contains("stale: "));
    m.end();
    c.assert_equal();
}
