//! The build of this source, as tests use it: the command and the shared libraries.
//!
//! `cargo test` builds no command and no shared library of another package. So this asks cargo for
//! them, in the profile and target directory of the test itself.
//!
//! Where MOJIM_BUILT is set, the whole workspace was built just now (`scripts/test`), and cargo is
//! not asked to build one of them by itself. It would build them with other features of what they
//! depend on, and all of that once more.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The root of the source tree.
pub fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Where the command `mojim` is.
pub fn mojim_path() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let dir = build(&["mojim-cli"], &["mojim"]);
        let path = dir.join("mojim").into_os_string();
        path.into_string().expect("the target directory is UTF-8")
    })
}

/// Builds `mojim-bench`, which `mojim bench` and `mojim demo` start, beside the command.
pub fn build_bench() {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build(&["mojim-cli", "mojim-bench"], &["mojim", "mojim-bench"]));
}

/// The directory with libmojim.so, libmojim_itm.so and libmojim_preload.so.
pub fn libraries() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        build(
            &["mojim-c", "mojim-itm", "mojim-preload"],
            &["libmojim.so", "libmojim_itm.so", "libmojim_preload.so"],
        )
    })
}

/// A directory on the disk of the build, for what a test writes.
pub fn temporary() -> PathBuf {
    let dir = profile().parent().expect("of a profile").join("tmp");
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Where what is built in the test's profile lies: the test itself is in `deps` there.
fn profile() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().parent().unwrap().to_owned()
}

/// Builds `packages`, unless that was done; where `files` are, which come of it.
fn build(packages: &[&str], files: &[&str]) -> PathBuf {
    let dir = profile();
    let name = match dir.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        other => other,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--profile", name, "--target-dir"]);
    cargo.arg(dir.parent().unwrap()).current_dir(source());
    for package in packages {
        cargo.args(["-p", package]);
    }
    if std::env::var_os("MOJIM_BUILT").is_none() {
        assert!(cargo.status().unwrap().success(), "it failed: {cargo:?}");
    }
    for file in files {
        let found = dir.join(file).exists();
        assert!(found, "{file} is not in {}: run {cargo:?}", dir.display());
    }
    dir
}
