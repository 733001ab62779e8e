//! The rungs in their short forms: each finds out whoever is broken, and nothing in whoever is not.
//! They need root (mounts, loop devices), FUSE and `mkfs.ext4`. Where one is missing the tests say
//! so and pass.

// Step `i` of the workload changes a few scattered places of a region, commits them as one and
// acknowledges `i`. Now and then it detaches and attaches again. What is recovered must be the
// region after one step from the last acknowledged to the last begun, every byte. The subjects:
//
// - `mojim`, the shipped engine (`unreplicated`, logs of 128 KiB to 1 MiB on one or two
//   connections, so that they wrap all the time), and `log`, a plain redo log, must stand.
// - `naive` (stores into a shared mapping, one msync) must be torn, `nosync` (acknowledges before
//   its flush) must lose.
// - `mojim-no-log-flush`, `mojim-no-data-flush`, `mojim-no-superblock-flush`, `mojim-data-first`
//   and `mojim-ack-early` must be found out.
// - `heap` must stand: each block is reached once from a root, and none besides. `heap-no-state`,
//   `heap-root-first`, `heap-halves` (a step in two parts) and `heap-other-early` (a step counts
//   what another thread is still committing) must be found out.
//
// A subject that must stand is checked as often as the command says, another one until it was found
// out three times (`--enough`). A thread begins all the time to write what is in the page cache, as
// the kernel may. States whose file system does not mount are counted apart. `--keep DIR` keeps the
// image of a state that should have stood.
//
// Power for clusters. Two nodes, in half of the histories (never in `async`) a witness besides.
// Logs are of 64 or 128 KiB. The table says which acknowledged steps are there: kept all, part
// without the last of them and only after an operator's word, lost none. Half of a step is there
// nowhere.
//
// - both lose their power: `async` kept, `sync` kept, `sync-flush` kept, `sync-disk` part
// - `b` loses its power, `a` is gone: part, kept, kept, lost
// - `a` loses its power, `b` is gone: kept, part, kept, part
// - `b` loses its power, `a` is back with an empty disk: part, kept, kept, lost
// - `a` loses its power, `b` is back with an empty disk: kept, part, kept, part
// - one loses its power, the other its processes: kept in all
//
// Subject `mount`: the program works on files under `mojim mount` by `write` and `fsync`, by a
// mapping and `msync`, by a new file renamed over the old one, and by changes of names
// (`names.rs`). Owners, times, special files and names that no catalogue can have are not among the
// steps. Subject `mount-uring`: the same over io_uring. Broken clusters: a mirror whose log or
// superblock is not synced, one that writes data before the log, a superblock that becomes durable
// late, a primary that does not wait for its mirror, a mount that commits every 10 ms also half of
// a step, a program that syncs in the middle of a step, a recovery that forgets that a ring was
// lost. With a register a state takes two to thirty seconds and next to no processor: `--jobs 14`.
//
// If the process is killed while it serves the device below its own file systems, it can end in the
// middle of a write, and every `sync` of the machine waits. `mount -t fusectl none DIR` and `echo 1
// > DIR/N/abort`, for the connections that nobody serves, end that.

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
