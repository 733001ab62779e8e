//! Each adapter with rows that the code of its measurement makes. Rows of private types are tested
//! beside these types.

use serde::Serialize;
use serde_json::json;

use super::*;
use crate::heap::HeapRow;
use crate::measure::{Ratio, State, Summary};
use crate::programs::ProgramRow;
use crate::report::Row as Own;

const SUMMARY: Summary = Summary {
    median_us: 2.5,
    p99_us: 9.0,
    p999_us: 12.0,
    per_second: 300_000.0,
    count: 40,
};

fn own(case: &str, bytes: usize) -> Own {
    Own::new("nvmm", case, bytes, SUMMARY)
}

const RATIO: Ratio = Ratio {
    ratio: 0.6,
    rounds: 4,
};

fn adapted(adapter: Adapter, label: &str, row: &impl Serialize) -> Vec<Row> {
    adapter(label, &serde_json::to_value(row).unwrap()).unwrap()
}

#[test]
fn a_row_by_bytes_is_a_time_with_the_ratio_and_a_rate() {
    let row = own("mojim", 4096).mode("sync").transport("shm");
    let row = row.memory("NVMM-Raw").ratio(RATIO, "s-unreplicated");
    let [time, rate] = &adapted(by_bytes, "strict", &row)[..] else {
        panic!("two rows");
    };
    assert_eq!(time.series, "NVMM-Raw: sync, shm, strict");
    assert_eq!((&time.x, &*time.x_unit), (&X::Number(4096.0), "B"));
    assert_eq!((time.y, &*time.unit, time.high), (2.5, "us", Some(9.0)));
    assert_eq!(
        (time.ratio, time.ratio_to.as_deref()),
        (Some(0.6), Some("s-unreplicated"))
    );
    assert_eq!((rate.y, &*rate.unit, rate.ratio), (300_000.0, "1/s", None));
    assert_eq!(time.count, Some(40));
    let limit = own("msync", 64).mode("large-folios").state(State::Slow);
    let rows = adapted(by_bytes, "", &limit);
    assert_eq!(rows[0].series, "msync, large-folios");
    assert!(rows.iter().all(|r| r.has(STATE) && r.has("slow")));
}

#[test]
fn a_row_by_threads_has_the_ratio_at_its_rate() {
    let row = own("mojim", 64).mode("sync").transport("tcp").threads(8);
    let rows = adapted(
        by_threads,
        "4 connections",
        &row.ratio(RATIO, "raw-combining-tcp"),
    );
    assert_eq!((rows[0].unit.as_str(), rows[0].ratio), ("us", None));
    assert_eq!((rows[1].unit.as_str(), rows[1].ratio), ("1/s", Some(0.6)));
    assert_eq!(rows[1].x, X::Number(8.0));
    assert_eq!(rows[1].series, "sync, tcp, 4 connections");
}

#[test]
fn an_allocator_is_compared_with_the_first_rival_that_is_there() {
    let row = HeapRow {
        bench: "heap",
        case: "16 to 256 bytes".into(),
        allocator: "mojim".into(),
        threads: 2,
        median: 18.0,
        unit: "ns",
        to_mimalloc: None,
        to_jemalloc: Some(1.5),
        to_store: None,
    };
    let rows = adapted(heap, "", &row);
    assert_eq!(rows[0].x, X::Word("16 to 256 bytes, 2 threads".into()));
    assert_eq!(
        (rows[0].ratio, rows[0].ratio_to.as_deref()),
        (Some(1.5), Some("jemalloc"))
    );
}

#[test]
fn a_program_in_c_and_scattered_words_are_both_transactions() {
    let row = ProgramRow {
        bench: "tx",
        case: "put".into(),
        bytes: 64,
        place: "shm".into(),
        of: "mojim".into(),
        median_ns: 1100.0,
        over_ns: None,
        ratio: Some(0.01),
        to: Some("berkeley-db".into()),
    };
    let rows = adapted(tx, "", &row);
    assert_eq!((rows[0].series.as_str(), rows[0].y), ("mojim, shm", 1100.0));
    assert_eq!(rows[0].x, X::Word("put, 64 B".into()));
    let words = own("transaction", 80).mode("warm").transport("memory");
    assert_eq!(
        adapted(tx, "", &words)[0].series,
        "transaction, warm, memory"
    );
}

/// As `tests/programs/bench.py` prints them.
#[test]
fn a_place_has_its_ratio_to_the_plain_file_system() {
    let time = json!({"bench": "programs", "case": "write+fsync", "place": "disk", "us": 340.0,
        "ratio": 1.56, "rounds": 3, "p99_us": 800.0});
    let row = &adapted(programs, "", &time)[0];
    assert_eq!((row.y, &*row.unit, row.ratio), (340.0, "us", Some(1.56)));
    assert_eq!(
        (row.high, row.ratio_to.as_deref()),
        (Some(800.0), Some("plain"))
    );
    let rate = json!({"bench": "programs", "case": "Redis", "place": "memory",
        "per_second": 9000.0, "ratio": 3.0, "rounds": 3});
    assert_eq!(adapted(programs, "", &rate)[0].unit, "1/s");
}

/// A link with keys, as `tls.rs` prints it.
#[test]
fn a_difference_is_marked() {
    let v = json!({"bench": "tls", "case": "difference", "transport": "tls", "to": "tcp",
        "bytes": 64, "more_us": -0.1, "rounds": 40});
    let rows = adapted(by_bytes, "", &v);
    assert_eq!((rows[0].series.as_str(), rows[0].y), ("tls less tcp", -0.1));
    assert!(rows[0].has("difference"));
}

#[test]
fn a_row_that_lacks_a_field_is_an_error() {
    let e = by_bytes("", &json!({"bench": "sync", "case": "mojim"})).unwrap_err();
    assert!(e.contains("`bytes`"), "{e}");
    assert!(fams("", &json!({})).is_err());
}
