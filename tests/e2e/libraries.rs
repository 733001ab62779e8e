//! The shared libraries, as the tests of the C interface, of the preload library and of the
//! command use them.
//!
//! `cargo test` builds no shared library of another package, so this asks cargo for them, in
//! the profile and target directory of the test itself. Where MOJIM_BUILT is set, the whole
//! workspace was built just now (`scripts/test`): asked for by themselves they are built with
//! other features of what they depend on, and all of that once more.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The directory with libmojim.so, libmojim_itm.so and libmojim_preload.so, of this source.
pub fn libraries() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let dir = test.parent().unwrap().parent().unwrap().to_owned();
        let profile = match dir.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        if std::env::var_os("MOJIM_BUILT").is_none() {
            let ok = Command::new(env!("CARGO"))
                .args(["build", "--quiet", "-p", "mojim-c", "-p", "mojim-itm"])
                .args(["-p", "mojim-preload"])
                .args(["--profile", profile, "--target-dir"])
                .arg(dir.parent().unwrap())
                .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
                .status()
                .unwrap();
            assert!(ok.success(), "building the libraries failed");
        }
        for name in ["libmojim.so", "libmojim_itm.so", "libmojim_preload.so"] {
            assert!(
                dir.join(name).exists(),
                "{name} is not in {}",
                dir.display()
            );
        }
        dir
    })
}
