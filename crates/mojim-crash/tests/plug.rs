//! The pulled plug in its short form.
//!
//! It needs QEMU and a kernel, which `scripts/guest-kernel` fetches. Where one is missing the test
//! says so and passes.

// Pulled plug. The workload is the only process of a machine in QEMU, on ext4 on a virtio disk or,
// with DAX and MAP_SYNC, on an emulated NVDIMM. It acknowledges each step by a line on a serial
// port. QEMU is killed after a random line and a random moment more, and the next machine mounts
// the image, recovers, compares and goes on. After eight times the image is replaced. All machines
// begin at one saved state just before the mount, with a boot id of their own. The disk makes 400
// requests a second, so that many moments lie between two. What the disk was given stays, flushed
// or not (`mojim-crash blocks` covers that), and an emulated processor has no cache, so on the
// NVDIMM the broken engines store into a copy that only flushes bring to the memory (`cache.rs`).
// The two engines without a sync of files are left out there, since writes to files on DAX are
// there at once. The guest's kernel (6.1) has no write tracking by userfaultfd: the mprotect
// tracker runs.
//
// Memory pressure (`scripts/pressure`, no short form). The machine (Linux 6.12) has 144 MiB of
// memory, a disk to swap to, and a program with a region of 96 MiB. A step stores to an eighth up
// to half of its pages and is committed as a whole, in ranges, or taken back. Half of the images
// have a private working copy and `memory = "8MiB"`, the others shared memory. The program checks
// its whole region, that no page of a step is in the data file before the commit, and that it holds
// no more than the bound. A run in which no step had 8 MiB in swap fails. Seen to fail: page tables
// in which only pages in memory count as stored to.

use std::io::Write;
use std::path::Path;

use mojim_crash::plug::{KERNEL, Medium, Options, missing, run};
use mojim_crash::report::Extent;
use mojim_crash::subject::Kind;

#[test]
fn the_plug_is_pulled() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let kernel = top.join(KERNEL);
    if let Some(what) = missing(&kernel) {
        // Said also by a test that passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no plug to pull: {what}");
        return;
    }
    let kinds = ["mojim", "log", "naive", "nosync"];
    let reports = run(&Options {
        exe: Path::new(env!("CARGO_BIN_EXE_mojim-crash")),
        extent: Extent {
            kinds: kinds.map(|name| Kind::of(name).unwrap()).to_vec(),
            states: 4,
            tries: 200,
            enough: 1,
            seed: 1,
        },
        media: &Medium::ALL,
        jobs: 2,
        kernel: &kernel,
    });
    for report in reports.unwrap() {
        println!("{report}");
        assert!(report.is_right(), "{report}");
    }
}
