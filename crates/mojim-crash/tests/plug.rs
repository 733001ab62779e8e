//! The pulled plug in its short form. It needs QEMU and a kernel, which
//! `scripts/guest-kernel` fetches; where one is missing the test says so and
//! passes.

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
