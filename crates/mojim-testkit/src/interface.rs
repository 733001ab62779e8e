//! Shared by the tests of the C interface and of the preload library: the built libraries, a C
//! compiler, and a volume in a directory of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub use crate::built::{libraries, source};

/// Runs a command to its end and gives its output, whatever it is.
pub fn output(c: &mut Command) -> Output {
    c.output().unwrap_or_else(|e| panic!("{c:?}: {e}"))
}

/// Runs a command that must succeed; gives its standard output.
#[track_caller]
pub fn succeed(c: &mut Command) -> String {
    let out = output(c);
    assert!(
        out.status.success(),
        "{c:?}: {}\n{}",
        out.status,
        text(&out)
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Both outputs of a command.
pub fn text(out: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    )
}

/// Compiles C to an executable, linked with libmojim.so if `link`.
#[track_caller]
pub fn compile(source_file: &str, to: &Path, flags: &[&str], link: bool) {
    let mut c = Command::new("cc");
    c.args(["-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(flags)
        .arg("-I")
        .arg(source().join("include"))
        .arg(source().join(source_file))
        .arg("-o")
        .arg(to);
    if link {
        let dir = libraries();
        c.arg("-L").arg(dir).arg("-lmojim");
        c.arg(format!("-Wl,-rpath,{}", dir.display()));
    }
    succeed(&mut c);
}

/// An unreplicated volume `v` on a node `a`, removed when dropped.
pub struct TestVolume {
    /// Everything of it, and a place for the test's own files.
    pub root: PathBuf,
}

impl TestVolume {
    /// A new one; `more` goes into the volume's part of the configuration.
    pub fn new(more: &str) -> TestVolume {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, Relaxed);
        let base = std::fs::canonicalize(std::env::temp_dir()).unwrap();
        let root = base.join(format!("mojim-preload-{}-{n}", std::process::id()));
        // Left behind by a run of the same number that failed.
        let _ = std::fs::remove_dir_all(&root);
        for d in ["node", "ring"] {
            std::fs::create_dir_all(root.join(d)).unwrap();
        }
        let at = root.display();
        let config = format!(
            "cluster = \"e2e\"\n\
             [volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n{more}\n\
             [node.a]\naddress = \"127.0.0.1:7401\"\ndirectory = \"{at}/node\"\n\
             ring = \"{at}/ring\"\nlog = {{ medium = \"disk\", size = \"1MiB\" }}\n"
        );
        std::fs::write(root.join("mojim.toml"), config).unwrap();
        TestVolume { root }
    }

    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.root.join("mojim.toml")
    }

    /// The directory of its files.
    pub fn dir(&self) -> PathBuf {
        self.root.join("node/v")
    }

    /// A command under the preload library, as `mojim run` starts it.
    pub fn preloaded(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let dir = libraries().display();
        let mut c = Command::new(program);
        c.env("MOJIM_CONFIG", self.config())
            .env("MOJIM_NODE", "a")
            .env("MOJIM_VOLUME", "v")
            .env(
                "LD_PRELOAD",
                format!("{dir}/libmojim_preload.so {dir}/libmojim.so"),
            );
        c
    }
}

impl Drop for TestVolume {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }
}
