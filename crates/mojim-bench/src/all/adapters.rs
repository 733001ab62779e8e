//! From a measurement's own rows to the report's: a function for each shape of rows.
//!
//! Invariant: a row that lacks a field which its measurement always writes is an error, so a shape
//! that changes is noticed.

use serde_json::Value;

use crate::all::rows::{Row, X};

/// The report's rows of one row of a measurement, of a part with this label.
pub(crate) type Adapter = fn(&str, &Value) -> Result<Vec<Row>, String>;

/// The mark of rows about some rounds only.
pub(crate) const STATE: &str = "state";
/// The mark of rows that repeat a case, beside other ones.
pub(crate) const AGAIN: &str = "again";
/// The mark of a figure whose machine has too few processors for it.
pub(crate) const NOT_CLAIMED: &str = "not claimed";
/// The marks of the two figures of a block of sync points.
pub(crate) const MEAN: &str = "mean";
pub(crate) const MEDIAN: &str = "median";

fn number(of: &Value, field: &str) -> Result<f64, String> {
    of[field]
        .as_f64()
        .ok_or_else(|| format!("a row has no number `{field}`: {of}"))
}

fn word(of: &Value, field: &str) -> Result<String, String> {
    let found = of[field].as_str().map(str::to_owned);
    found.ok_or_else(|| format!("a row has no word `{field}`: {of}"))
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// `ratio` and `ratio_to`, where the row has them.
fn with_ratio(mut row: Row, of: &Value) -> Row {
    row.ratio = of["ratio"].as_f64();
    row.ratio_to = of["ratio_to"].as_str().map(str::to_owned);
    row
}

/// Rows of `report.rs` by the bytes of an operation.
pub(crate) fn by_bytes(label: &str, v: &Value) -> Result<Vec<Row>, String> {
    if v["case"] == "difference" {
        return difference(v);
    }
    let x = (X::Number(number(v, "bytes")?), "B");
    let (time, rate) = both(label, v, x)?;
    Ok(vec![with_ratio(time, v), rate])
}

/// Rows of `report.rs` by the number of threads. Their ratios are those of the rates.
pub(crate) fn by_threads(label: &str, v: &Value) -> Result<Vec<Row>, String> {
    let x = (X::Number(number(v, "threads")?), "threads");
    let (time, rate) = both(label, v, x)?;
    let mut rate = with_ratio(rate, v);
    for field in ["least", "most"] {
        let of_one = v[field]
            .as_u64()
            .map(|n| format!("{field} of a thread {n}"));
        rate.marks.extend(of_one);
    }
    Ok(vec![time, rate])
}

/// The time of an operation and the rate of operations.
fn both(label: &str, v: &Value, (x, unit): (X, &str)) -> Result<(Row, Row), String> {
    let series = series(label, v)?;
    let mut time = Row::new(
        series.clone(),
        (x.clone(), unit),
        number(v, "median_us")?,
        "us",
    );
    time.high = Some(number(v, "p99_us")?);
    let mut rate = Row::new(series, (x, unit), number(v, "per_second")?, "1/s");
    for row in [&mut time, &mut rate] {
        row.count = v["count"].as_u64();
        if let Some(state) = v["state"].as_str() {
            row.marks = vec![STATE.to_owned(), state.to_owned()];
        }
    }
    Ok((time, rate))
}

/// The name of a row of `report.rs`: memory, then mode or case, transport, and the part's label.
fn series(label: &str, v: &Value) -> Result<String, String> {
    let (case, mode, transport) = (word(v, "case")?, word(v, "mode")?, word(v, "transport")?);
    let mut text = match v["memory"].as_str() {
        Some(memory) => format!("{memory}: "),
        None => String::new(),
    };
    text += match (&*case, &*mode) {
        ("mojim", mode) => mode,
        (case, _) => case,
    };
    let details = [
        if case == "mojim" { "-" } else { &*mode },
        &*transport,
        label,
    ];
    for detail in details.into_iter().filter(|d| !["-", ""].contains(d)) {
        text += &format!(", {detail}");
    }
    Ok(text)
}

/// What keys add to a sync point.
fn difference(v: &Value) -> Result<Vec<Row>, String> {
    let series = format!("{} less {}", word(v, "transport")?, word(v, "to")?);
    let x = (X::Number(number(v, "bytes")?), "B");
    let mut row = Row::new(series, x, number(v, "more_us")?, "us");
    row.count = v["rounds"].as_u64();
    row.marks = vec!["difference".to_owned()];
    Ok(vec![row])
}

/// Rows of `fams`: mean and median. Their ratio is that of the times, so it is the inverse.
pub(crate) fn fams(_: &str, v: &Value) -> Result<Vec<Row>, String> {
    let mut series = format!("{} {}", word(v, "case")?, word(v, "mode")?);
    if let Some(policy) = v["write_back"].as_str() {
        series += &format!(", write_back {policy}");
    }
    let x = X::Number(number(v, "pages")?);
    let think = format!("think {} us", number(v, "think_us")?);
    let row = |field: &str, mark: &str| {
        let mut r = Row::new(
            series.clone(),
            (x.clone(), "pages"),
            number(v, field)?,
            "us",
        );
        r.marks = vec![mark.to_owned(), think.clone()];
        Ok::<Row, String>(r)
    };
    let (mut mean, mut median) = (row("mean_us", MEAN)?, row("median_us", MEDIAN)?);
    median.high = Some(number(v, "p99_us")?);
    if let Some(faster) = v["faster_than_large"].as_f64().filter(|f| *f > 0.0) {
        mean.ratio = Some(rounded(1.0 / faster));
        mean.ratio_to = Some("msync large-folios".to_owned());
    }
    let mut rows = vec![mean, median];
    if let Some(bytes) = v["disk_bytes"].as_f64() {
        let mut disk = row("pages", "disk")?;
        (disk.y, disk.unit) = (bytes, "B".to_owned());
        rows.push(disk);
    }
    Ok(rows)
}

/// Rows of `tiers`: copies, then sync points. The count of audited records is no figure.
pub(crate) fn tiers(_: &str, v: &Value) -> Result<Vec<Row>, String> {
    let case = word(v, "case")?;
    if v["records"].is_u64() {
        return Ok(Vec::new());
    }
    let x = (X::Number(number(v, "bytes")?), "B");
    if v["seconds"].is_null() {
        let series = format!("{case}, {}", word(v, "transport")?);
        let mut row = with_ratio(Row::new(series, x, number(v, "median_us")?, "us"), v);
        row.high = Some(number(v, "p99_us")?);
        row.count = v["count"].as_u64();
        if v["claimed"] == false {
            row.marks.push(NOT_CLAIMED.to_owned());
        }
        return Ok(vec![row]);
    }
    let mut time = Row::new(case.clone(), x.clone(), number(v, "seconds")?, "s");
    time.count = v["rounds"].as_u64();
    // The row has the ratio of the rates.
    if let Some(of) = v["of_plain_copy"].as_f64().filter(|r| *r > 0.0) {
        (time.ratio, time.ratio_to) = (Some(rounded(1.0 / of)), Some("plain-copy".to_owned()));
    }
    let mut rows = vec![time];
    if let Some(sent) = v["sent"].as_f64() {
        let mut bytes = Row::new(case, x, sent, "B");
        if let Some(of) = v["of_full_copy"].as_f64() {
            (bytes.ratio, bytes.ratio_to) = (Some(of), Some("resync".to_owned()));
        }
        rows.push(bytes);
    }
    Ok(rows)
}

/// Rows of `failover`: the parts of the time without a primary.
pub(crate) fn failover(_: &str, v: &Value) -> Result<Vec<Row>, String> {
    let x = (X::Word(word(v, "part")?), "");
    let mut row = Row::new("failover", x, number(v, "median_us")? / 1e3, "ms");
    row.high = Some(number(v, "p99_us")? / 1e3);
    Ok(vec![row])
}

/// Rows of `heap`: the ratio is to mimalloc, else to jemalloc, else to a store alone.
pub(crate) fn heap(_: &str, v: &Value) -> Result<Vec<Row>, String> {
    let threads = number(v, "threads")?;
    let case = match word(v, "case")? {
        case if threads > 1.0 => format!("{case}, {threads} threads"),
        case => case,
    };
    let (y, unit) = (number(v, "median")?, word(v, "unit")?);
    let mut row = Row::new(word(v, "allocator")?, (X::Word(case), ""), y, &unit);
    let ratios = [
        ("to_mimalloc", "mimalloc"),
        ("to_jemalloc", "jemalloc"),
        ("to_store", "the store alone"),
    ];
    let mut found = ratios
        .iter()
        .filter_map(|(field, to)| Some((v[*field].as_f64()?, *to)));
    if let Some((ratio, to)) = found.next() {
        (row.ratio, row.ratio_to) = (Some(rounded(ratio)), Some(to.to_owned()));
    }
    Ok(vec![row])
}

/// Rows of `tx`: words by their number, and what a program in C found.
pub(crate) fn tx(label: &str, v: &Value) -> Result<Vec<Row>, String> {
    if v["median_ns"].is_null() {
        return by_bytes(label, v);
    }
    let (place, case) = (word(v, "place")?, word(v, "case")?);
    let series = format!("{}, {place}", word(v, "of")?);
    let bytes = number(v, "bytes")?;
    let x = X::Word(format!("{case}, {bytes} B"));
    let mut row = Row::new(series, (x, ""), number(v, "median_ns")?, "ns");
    row.ratio = v["ratio"].as_f64().map(rounded);
    row.ratio_to = v["to"].as_str().map(str::to_owned);
    Ok(vec![row])
}

/// Rows of `programs`: a time or a rate by place, with its ratio to the plain file system.
pub(crate) fn programs(_: &str, v: &Value) -> Result<Vec<Row>, String> {
    let (y, unit) = match v["us"].as_f64() {
        Some(us) => (us, "us"),
        None => (number(v, "per_second")?, "1/s"),
    };
    let x = (X::Word(word(v, "case")?), "");
    let mut row = Row::new(word(v, "place")?, x, y, unit);
    row.high = v["p99_us"].as_f64();
    row.count = v["rounds"].as_u64();
    (row.ratio, row.ratio_to) = (Some(number(v, "ratio")?), Some("plain".to_owned()));
    Ok(vec![row])
}

/// Rows of `large`: a sync point of a whole region, by its size.
pub(crate) fn large(_: &str, v: &Value) -> Result<Vec<Row>, String> {
    let x = (X::Number(number(v, "region_mib")?), "MiB");
    let mut row = Row::new(word(v, "tracker")?, x, number(v, "sync_us")?, "us");
    row.ratio = Some(number(v, "times")?);
    row.ratio_to = Some("the smallest region".to_owned());
    Ok(vec![row])
}

#[cfg(test)]
mod tests;
