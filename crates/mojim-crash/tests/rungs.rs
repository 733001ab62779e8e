//! The rungs in their short forms: each finds out whoever is broken, and
//! nothing in whoever is not. They need root (mounts, loop devices), FUSE and
//! `mkfs.ext4`; where one is missing the tests say so and pass.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use mojim_crash::cluster::{self, Failures, setup::Mode};
use mojim_crash::report::{Extent, Report};
use mojim_crash::subject::Kind;
use mojim_crash::sys::{Lab, Loop, has_file_system};
use mojim_crash::{blocks, cache_loss};

/// Whether the machine has what is needed.
fn can(file_system: &str, fuse: bool) -> bool {
    let missing = if !has_file_system(file_system) {
        format!("mkfs.{file_system} is not installed")
    } else if fuse && !Path::new("/dev/fuse").exists() {
        "there is no /dev/fuse".to_owned()
    } else {
        let tried = Lab::new().and_then(|lab| {
            let image = lab.path("image");
            std::fs::write(&image, vec![0; 1 << 20])?;
            Loop::new(&image).map(drop)
        });
        match tried {
            Ok(()) => return true,
            Err(e) => e.to_string(),
        }
    };
    // Said also by a test that passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: no crashes here: {missing}");
    false
}

fn extent(states: u64) -> Extent {
    let all = Kind::ALL.map(|(kind, _)| kind).into_iter();
    Extent {
        kinds: all.collect(),
        states,
        tries: 2000,
        enough: 1,
        seed: 1,
    }
}

/// Without the heap, which block history has.
fn extent_of_regions(states: u64) -> Extent {
    let mut extent = extent(states);
    extent.kinds.retain(|k| !matches!(k, Kind::Heap(_)));
    extent
}

fn judge(report: &Report) {
    println!("{report}");
    assert!(report.is_right(), "{report}");
}

#[test]
fn page_cache_loss() {
    if can("ext4", false) {
        let report = cache_loss::run(&cache_loss::Options {
            exe: Path::new(env!("CARGO_BIN_EXE_mojim-crash")),
            extent: extent_of_regions(10),
            file_system: "ext4".into(),
        });
        judge(&report.unwrap());
    }
}

#[test]
fn page_cache_loss_on_xfs() {
    if can("xfs", false) {
        let report = cache_loss::run(&cache_loss::Options {
            exe: Path::new(env!("CARGO_BIN_EXE_mojim-crash")),
            extent: extent_of_regions(5),
            file_system: "xfs".into(),
        });
        judge(&report.unwrap());
    }
}

#[test]
fn block_history() {
    if can("ext4", true) {
        let report = blocks::run(&blocks::Options {
            extent: extent(40),
            of_each: 40,
            steps: 40,
            jobs: 2,
            keep: None,
        });
        judge(&report.unwrap());
    }
}

/// Some of the cluster's subjects, shortly.
fn clusters(subjects: &[&str], modes: &[Mode], states: u64) {
    let report = cluster::run(&cluster::Options {
        exe: env!("CARGO_BIN_EXE_mojim-crash").into(),
        subjects: subjects.iter().map(|s| (*s).to_owned()).collect(),
        modes: modes.to_vec(),
        registers: vec![false],
        failures: Failures::ALL
            .map(|(f, _)| f)
            .into_iter()
            .filter(|f| *f != Failures::BEmpty)
            .collect(),
        states,
        tries: 2000,
        enough: 1,
        of_each: 12,
        steps: 60,
        jobs: 2,
        seed: 1,
        limit: Duration::MAX,
        loud: true,
    });
    let report = report.unwrap();
    println!("{report}");
    assert!(report.is_right(), "{report}");
}

#[test]
fn power_for_clusters() {
    if can("ext4", true) {
        let subjects = ["mojim", "mirror-no-log-flush", "without-the-mirror"];
        clusters(&subjects, &[Mode::Async, Mode::Sync, Mode::SyncFlush], 40);
    }
}

/// With the command `mojim` beside this rung's, of this source: its mount serves the program.
#[test]
fn power_for_mounts() {
    if !can("ext4", true) {
        return;
    }
    mojim_testkit::mojim_path();
    clusters(
        &[
            "mount",
            "mount-without-the-mirror",
            "mount-half-steps",
            "mount-half-names",
            "mount-names-late",
        ],
        &[Mode::Sync, Mode::SyncFlush],
        24,
    );
}

/// The same where its requests come over io_uring. A test of a mount may have that switched on.
#[test]
fn power_for_mounts_over_uring() {
    if !can("ext4", true) {
        return;
    }
    mojim_testkit::mojim_path();
    let subjects = ["mount-uring", "mount-uring-half-steps"];
    clusters(&subjects, &[Mode::Sync, Mode::SyncFlush], 8);
}
