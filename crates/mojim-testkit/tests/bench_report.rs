//! `mojim bench all` in its tiniest length: the report has every field, every figure has the rows of
//! results.json, and what was skipped or failed is told. Nothing here depends on how long anything took.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::{build_bench, mojim_path, text};

/// The fields of objects in results.json, by `docs/reference/bench-report.md`.
const TOP: &str = "format version machine settings noise measurements";
const MACHINE: &str =
    "cpu cores memory_bytes kernel file_system clock_source virtual load_begin load_end";
const SETTINGS: &str = "length program directory only skip";
const NOISE: &str = "points spread drift warning";
const MEASUREMENT: &str = "name command seconds taken skipped failed notes rows";
const ROW: &str = "series x x_unit y unit low high count ratio ratio_to marks";

fn all(home: &Home, report: &Path, only: &str) -> Command {
    let mut c = Command::new(mojim_path());
    c.args(["bench", "all", "--tiny", "--only", only, "--report"]);
    c.arg(report).arg("--dir").arg(&home.dir);
    c
}

fn results(report: &Path) -> Value {
    let text = fs::read_to_string(report.join("results.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The object has exactly these fields.
fn has(object: &Value, fields: &str) {
    let found: BTreeSet<&str> = object.as_object().unwrap().keys().map(|k| &**k).collect();
    assert_eq!(found, fields.split(' ').collect(), "{object}");
}

fn measurements(of: &Value) -> &Vec<Value> {
    of["measurements"].as_array().unwrap()
}

fn status(out: &Output) -> Option<i32> {
    out.status.code()
}

/// The rows of every figure of a page, by the figure's name.
fn figures(page: &str) -> Vec<Value> {
    let begin = "<script type=\"application/json\" id=\"data-";
    let scripts = page.split(begin).skip(1).map(|rest| {
        let (json, _) = rest.split_once("</script>").unwrap();
        serde_json::from_str(json.split_once('>').unwrap().1).unwrap()
    });
    scripts.collect()
}

fn check_fields(results: &Value) {
    has(results, TOP);
    assert_eq!(
        (&results["format"], &results["version"]),
        (&"mojim-bench-report".into(), &1.into())
    );
    has(&results["machine"], MACHINE);
    has(&results["settings"], SETTINGS);
    has(&results["noise"], NOISE);
    for m in measurements(results) {
        has(m, MEASUREMENT);
        for row in m["rows"].as_array().unwrap() {
            has(row, ROW);
            assert!(row["y"].is_f64() && row["series"].is_string(), "{row}");
            assert!(row["x"].is_number() || row["x"].is_string(), "{row}");
        }
    }
}

/// Every figure of the page has rows of results.json, and its picture; returns the rows' number.
fn check_figures(report: &Path, results: &Value) -> usize {
    let page = fs::read_to_string(report.join("index.html")).unwrap();
    let mut rows = 0;
    let mut pictures = 0;
    for figure in figures(&page) {
        let of = measurements(results)
            .iter()
            .find(|m| m["name"] == figure["measurement"]);
        let shown = figure["rows"].as_array().unwrap();
        let file = format!("{}.svg", figure["figure"].as_str().unwrap());
        assert_eq!(
            report.join("figures").join(file).exists(),
            !shown.is_empty()
        );
        pictures += usize::from(!shown.is_empty());
        for row in shown {
            let all = of.unwrap()["rows"].as_array().unwrap();
            assert!(all.contains(row), "{row}");
            rows += 1;
        }
    }
    assert_eq!(page.matches("</svg>").count(), pictures);
    rows
}

#[test]
fn one_report_has_all_and_the_next_run_takes_what_is_there() {
    build_bench();
    let home = Home::new("bench-report", 0);
    let report = home.dir.join("report");
    let mut command = all(&home, &report, "nvmm,fams,failover");
    let out = command.output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(status(&out), Some(0), "{said}");
    for told in [
        "nvmm, 1 of 3",
        "fams, 2 of 3",
        "failover, 3 of 3",
        "index.html",
    ] {
        assert!(said.contains(told), "{told}: {said}");
    }
    let first = results(&report);
    check_fields(&first);
    let names = measurements(&first).iter().map(|m| &m["name"]);
    assert!(names.eq(["nvmm", "fams", "failover"]));
    assert!(
        measurements(&first)
            .iter()
            .all(|m| m["taken"] == false && m["failed"].is_null())
    );
    assert!(check_figures(&report, &first) > 20);
    // The model of the emulated memory is in the page.
    let page = fs::read_to_string(report.join("index.html")).unwrap();
    assert!(page.contains("NVMM-Raw: read latency 300 ns"), "{page}");
    let rows: usize = measurements(&first)
        .iter()
        .map(|m| m["rows"].as_array().unwrap().len())
        .sum();
    let csv = fs::read_to_string(report.join("results.csv")).unwrap();
    assert_eq!(csv.matches("\r\n").count(), rows + 1);

    fs::remove_file(report.join("rows/fams.json")).unwrap();
    let out = command.output().unwrap();
    assert_eq!(status(&out), Some(0), "{}", text(&out.stderr));
    let second = results(&report);
    for (a, b) in measurements(&first).iter().zip(measurements(&second)) {
        assert_eq!(b["taken"], a["name"] != "fams", "{b}");
        assert!(a["rows"] == b["rows"] || b["taken"] == false);
    }
    let out = command.arg("--anew").output().unwrap();
    assert_eq!(status(&out), Some(0), "{}", text(&out.stderr));
    assert!(
        measurements(&results(&report))
            .iter()
            .all(|m| m["taken"] == false)
    );
}

/// `fams` has no directory, `table` no compiler. The measurement between them needs neither.
#[test]
fn a_failed_and_a_skipped_measurement_are_told_and_the_others_go_on() {
    build_bench();
    let home = Home::new("bench-report", 0);
    let report = home.dir.join("report");
    let mut command = Command::new(mojim_path());
    command.args([
        "bench",
        "all",
        "--tiny",
        "--only",
        "fams,tx,table",
        "--report",
    ]);
    command.arg(&report).args(["--dir", "/is/not/here"]);
    let out = command.env("PATH", "").output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(status(&out), Some(1), "{said}");
    assert!(said.contains("fams: failed: "), "{said}");
    assert!(said.contains("table: skipped: needs gcc"), "{said}");
    let results = results(&report);
    check_fields(&results);
    check_figures(&report, &results);
    let [fams, tx, table] = &measurements(&results)[..] else {
        panic!("{results}");
    };
    assert!(
        fams["failed"].as_str().unwrap().contains("/is/not/here"),
        "{fams}"
    );
    assert!(
        tx["failed"].is_null() && !tx["rows"].as_array().unwrap().is_empty(),
        "{tx}"
    );
    assert!(
        table["skipped"].as_str().unwrap().contains("gcc"),
        "{table}"
    );
    let page = fs::read_to_string(report.join("index.html")).unwrap();
    assert!(page.contains("The measurement fams failed: "), "{page}");
    assert!(page.contains("The measurement table was skipped: needs gcc"));
    assert!(page.contains("The measurement nvmm was left out of this run."));
    for wrong in [["--quick", "--paper"], ["--only", "pigeon"]] {
        let out = Command::new(mojim_path())
            .args(["bench", "all"])
            .args(wrong)
            .output();
        assert_eq!(status(&out.unwrap()), Some(2), "{wrong:?}");
    }
}
