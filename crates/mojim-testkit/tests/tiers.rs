//! `mojim bench tiers` without its copies, in its short form: every scheme runs,
//! every rival's replicas hold all that was sent, and every row says what it must.
//! Nothing here depends on how long anything took.

use serde_json::Value;

use mojim_testkit::{build_bench, mojim, text};

fn rows(args: &[&str]) -> Vec<Value> {
    let out = mojim(&[&["bench", "tiers", "--json"], args].concat());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

/// Sync points of 64 B and 4 KiB, by each scheme, with as many nodes, over TCP
/// and over shared memory.
fn check_sync_points(rows: &[Value], nodes: u64, rounds: u64) {
    let (tcp, shm) = rows.split_at(rows.len() / 2);
    check_transport(tcp, "tcp", nodes, rounds);
    check_transport(shm, "shm", nodes, rounds);
}

fn check_transport(rows: &[Value], transport: &str, nodes: u64, rounds: u64) {
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    for r in rows {
        assert_eq!(r["bench"], "tiers");
        assert_eq!(
            (&r["transport"], &r["nodes"]),
            (&transport.into(), &nodes.into())
        );
        assert_eq!(r["cores"], cores);
        assert_eq!(r["claimed"], cores >= nodes);
    }
    let cases = [
        ("sync", None),
        ("sync-sec", Some("sync")),
        ("chain", Some("sync-sec")),
        ("broadcast", Some("sync-sec")),
        ("write-all", Some("sync-sec")),
        ("one-replica", Some("sync")),
    ];
    let (times, records) = rows.split_at(rows.len() - 4);
    assert_eq!(times.len(), 2 * cases.len());
    for (part, bytes) in times.chunks(cases.len()).zip([64, 4096]) {
        for (r, (case, to)) in part.iter().zip(cases) {
            assert_eq!((&r["case"], &r["bytes"]), (&case.into(), &bytes.into()));
            assert_eq!(r["count"], rounds * 40, "{r}");
            assert!(r["median_us"].as_f64().unwrap() > 0.0, "{r}");
            assert!(r["p99_us"].as_f64() >= r["median_us"].as_f64(), "{r}");
            assert_eq!(r["ratio_to"].as_str(), to, "{r}");
            assert_eq!(r["ratio"].is_f64(), to.is_some(), "{r}");
        }
    }
    // Both sizes, with what is not timed before each block; write-all says everything twice.
    let one = rounds * 44 * 2;
    for (r, (case, records)) in records.iter().zip([
        ("chain", one),
        ("broadcast", one),
        ("write-all", 2 * one),
        ("one-replica", one),
    ]) {
        assert_eq!((&r["case"], &r["records"]), (&case.into(), &records.into()));
    }
}

#[test]
fn sync_points_by_every_scheme() {
    build_bench();
    // One after the other: five nodes and their rivals are many processes.
    for (nodes, rounds) in [(3, 2), (5, 1)] {
        let of = (nodes.to_string(), rounds.to_string());
        let rows = rows(&["--rounds", "0", "--nodes", &of.0, "--sync-rounds", &of.1]);
        check_sync_points(&rows, nodes, rounds);
    }
}

/// By default nothing was measured at all: the volume had no mirror to begin with, and no
/// test ran the copies.
#[test]
fn copies_of_a_fresh_and_of_a_returning_mirror() {
    build_bench();
    let size = "150994944";
    let all = rows(&["--rounds", "1", "--size", size, "--sync-rounds", "1"]);
    let copies: Vec<&Value> = all.iter().filter(|r| r["rounds"] == 1).collect();
    assert!(copies.len() >= 3, "{all:?}");
    assert!(copies.iter().all(|r| r["bytes"] == 150994944), "{copies:?}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    build_bench();
    for wrong in [
        ["--nodes", "2"],
        ["--sync-rounds", "0"],
        ["--size", "4096"],
        ["--size", "8388608"],
    ] {
        let out = mojim(&[&["bench", "tiers"][..], &wrong].concat());
        assert_eq!(out.status.code(), Some(2), "{wrong:?}");
    }
}
