//! `mojim bench threads`, `mojim bench programs` and the programs of `mojim bench tx` in their shortest form: every case runs, beside its
//! limit, and every row says what it must. Nothing here depends on how long anything took.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::{Process, await_that, build_bench, libraries, mojim, text};

/// Mode, transport, and the limit of each of Mojim's cases.
const OURS: [(&str, &str, &str); 6] = [
    ("unreplicated", "-", "raw-log"),
    ("async", "tcp", "raw-log"),
    ("sync", "tcp", "raw-combining-tcp"),
    ("sync-flush", "tcp", "raw-log"),
    ("sync", "shm", "raw-combining-shm"),
    ("sync-flush", "shm", "raw-log"),
];

fn check(r: &Value, threads: u64) {
    assert_eq!(r["bench"], "threads", "{r}");
    assert_eq!(
        (&r["bytes"], &r["threads"]),
        (&64.into(), &threads.into()),
        "{r}"
    );
    for field in ["median_us", "p99_us", "p999_us", "per_second"] {
        assert!(r[field].as_f64().unwrap() >= 0.0, "{r}");
    }
    assert!(
        r["least"].as_u64().unwrap() <= r["most"].as_u64().unwrap(),
        "{r}"
    );
}

#[test]
fn every_case_runs_with_every_number_of_threads() {
    build_bench();
    let run = "bench threads --json --counts 1,3 --seconds 0.05 --rounds 2 --connections 0";
    let out = mojim(&run.split(' ').collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    let rows: Vec<Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let (one, three) = rows.split_at(rows.len() / 2);
    for (rows, threads) in [(one, 1), (three, 3)] {
        rows.iter().for_each(|r| check(r, threads));
        for limit in ["raw-log", "raw-combining-tcp", "raw-combining-shm"] {
            let of_limit = rows.iter().filter(|r| r["case"] == limit);
            assert_eq!(of_limit.count(), 1);
        }
        let rocksdb = rows.iter().any(|r| r["case"] == "rocksdb");
        let notices = text(&out.stderr).matches("no case rocksdb").count();
        assert_eq!(notices, usize::from(!rocksdb));
        let ours = rows.iter().filter(|r| r["case"] == "mojim");
        let ours: Vec<_> = ours
            .map(|r| {
                // A busy machine may have let no operation end in time.
                let limited = r["ratio_to"].as_str().unwrap_or("");
                assert_eq!(r["ratio"].is_f64(), !limited.is_empty(), "{r}");
                let word = |field: &str| r[field].as_str().unwrap();
                (word("mode"), word("transport"), limited)
            })
            .collect();
        assert_eq!(ours.len(), OURS.len());
        for (got, (mode, transport, limit)) in ours.iter().zip(OURS) {
            assert_eq!((got.0, got.1), (mode, transport));
            assert!(got.2 == limit || got.2.is_empty(), "{got:?}");
        }
    }
}

/// A durable write of the emulated disk takes its time, and each sync point waits for one.
#[test]
fn a_mirrors_log_is_on_an_emulated_disk() {
    build_bench();
    let run = "bench threads --json --counts 1 --seconds 2 --cases raw-combining-tcp,sync-tcp,sync-shm \
               --mirror-disk 3000";
    let out = mojim(&run.split_whitespace().collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    let rows = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .filter(|r: &Value| r["mode"] == "sync");
    let rows: Vec<Value> = rows.collect();
    assert_eq!(rows.len(), 2, "{lines}");
    for r in rows {
        assert!(r["median_us"].as_f64().unwrap() >= 3000.0, "{r}");
        assert!(r["ratio"].is_null(), "{r}");
    }
    let out = mojim(&["bench", "sync", "--mirror-disk", "0"]);
    assert_eq!(out.status.code(), Some(2));
}

/// Each flush of the emulated memory takes its time, in the baseline and where the primary flushes.
#[test]
fn sync_points_are_measured_on_emulated_memory() {
    build_bench();
    let run =
        "bench nvmm --json --rounds 2 --ops 20 --sizes 64,4096 --memory NVMM-Raw,PDRAM --strict";
    let out = mojim(&run.split_whitespace().collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    let rows: Vec<Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(rows.len(), 2 * 2 * 5, "{lines}");
    for r in &rows {
        // Also `sync` waits for one barrier: in the strict model the mirror flushes.
        let barrier = if r["memory"] == "NVMM-Raw" { 1.0 } else { 0.0 };
        assert!(r["median_us"].as_f64().unwrap() >= barrier, "{r}");
        assert_eq!(r["ratio"].is_f64(), r["case"] == "mojim", "{r}");
    }
    let out = mojim(&["bench", "nvmm", "--memory", "core"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        text(&out.stderr).contains("NVMM-Opt"),
        "{}",
        text(&out.stderr)
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    build_bench();
    for wrong in [
        ["--counts", "0"],
        ["--counts", "1,257"],
        ["--seconds", "0"],
        ["--seconds", "NaN"],
        ["--rounds", "0"],
        ["--bytes", "4097"],
        ["--cases", "pigeon"],
    ] {
        let out = mojim(&[&["bench", "threads"][..], &wrong].concat());
        assert_eq!(out.status.code(), Some(2), "{wrong:?}");
    }
}

/// Of operations, that is; programs of others need not be installed.
#[test]
fn operations_on_mounts_are_measured_beside_the_plain_file_system() {
    build_bench();
    let home = Home::new("benches", 0);
    let dir = on(&home);
    let at = dir.to_str().unwrap();
    let run = format!(
        "bench programs --json --only read-4k --rounds 1 --seconds 0.05 --mirror-disk 100 --dir {at}"
    );
    let out = mojim(&run.split(' ').collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    let rows: Vec<Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let places: Vec<_> = rows.iter().map(|r| r["place"].as_str().unwrap()).collect();
    // And over io_uring, where that is switched on.
    assert_eq!(places[..3], ["plain", "disk", "memory"]);
    assert!(
        ["emulated", "uring emulated"].contains(&places[3..].join(" ").as_str()),
        "{places:?}"
    );
    for r in &rows {
        assert_eq!(
            (&r["bench"], &r["case"]),
            (&"programs".into(), &"read-4k".into())
        );
        assert!(
            r["us"].as_f64().unwrap() > 0.0 && r["ratio"].as_f64().unwrap() > 0.0,
            "{r}"
        );
    }
    assert!(is_empty(&dir));
    let out = mojim(&["bench", "programs", "--seconds", "NaN"]);
    assert_eq!(out.status.code(), Some(2));
}

/// Captured blocks, and the poster's hash table with the same contents as Berkeley DB's; where that is
/// not installed, its package is named.
#[test]
fn programs_of_transactions_are_compiled_and_measured() {
    build_bench();
    libraries();
    let home = Home::new("benches", 0);
    let dir = on(&home);
    let at = dir.to_str().unwrap();
    for (case, rows_expected, first) in [("captured", 10, "begin+commit"), ("table", 8, "put")] {
        let run = format!("bench tx --json --case {case} --rounds 1 --ops 8 --dir {at}");
        let out = mojim(&run.split(' ').collect::<Vec<_>>());
        if case == "table" && text(&out.stderr).contains("package libdb-dev") {
            assert_eq!(out.status.code(), Some(1));
            continue;
        }
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let lines = text(&out.stdout);
        let rows = lines.lines().map(|l| serde_json::from_str(l).unwrap());
        let rows: Vec<Value> = rows.collect();
        assert_eq!(
            (rows.len(), &rows[0]["case"]),
            (rows_expected, &first.into())
        );
        for pair in rows.chunks(2) {
            assert_eq!(pair[0]["to"], pair[1]["of"], "{lines}");
            assert!(pair[0]["ratio"].as_f64().unwrap() > 0.0, "{lines}");
            assert!(pair[1]["median_ns"].as_f64().unwrap() > 0.0, "{lines}");
        }
    }
    assert!(is_empty(&dir));
}

/// What it has mounted and started would stay for ever. One that a shell had started in the background
/// did not end: SIGINT, which its script is ended by, is ignored there.
#[test]
fn who_ends_a_bench_of_programs_finds_nothing_left() {
    build_bench();
    for disposition in [libc::SIG_DFL, libc::SIG_IGN] {
        ended_bench_leaves_nothing(disposition);
    }
}

fn ended_bench_leaves_nothing(interrupt: libc::sighandler_t) {
    let home = Home::new("benches", 0);
    let dir = on(&home);
    let run = "bench programs --only read-4k --rounds 1000 --dir";
    let args: Vec<_> = run.split(' ').chain(dir.to_str()).collect();
    let mut bench = Process::start_with(&args, &home.dir.join("bench.txt"), |command| {
        let set = move || {
            // SAFETY: sets what a valid signal does, to nothing or to the default.
            unsafe { libc::signal(libc::SIGINT, interrupt) };
            Ok(())
        };
        // SAFETY: `set` makes one system call.
        unsafe { command.pre_exec(set) };
    });
    await_that("the first round", || {
        let at = fs::read_dir(&dir).unwrap().next()?.unwrap().path();
        at.join("plain/w").is_dir().then_some(())
    });
    bench.signal("TERM");
    assert_ne!(bench.wait(), Some(0));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
    assert!(is_empty(&dir), "{}", bench.errors());
}

/// The directory that is measured.
fn on(home: &Home) -> PathBuf {
    let dir = home.dir.join("measured");
    fs::create_dir(&dir).unwrap();
    dir
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}
