//! For examples in the documentation: a node of its own, in a temporary directory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A temporary directory with a configuration file: volume `v` on node `a`. Removed when dropped.
pub struct Example(PathBuf);

impl Example {
    /// # Panics
    /// If the directory cannot be made.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Example {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "mojim-example-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Relaxed)
        );
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).expect("a temporary directory");
        let text = format!(
            "cluster = \"example\"\n\
             [volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n\
             [node.a]\naddress = \"127.0.0.1:1\"\ndirectory = \"{0}/a\"\nring = \"{0}\"\n\
             log = {{ medium = \"disk\", size = \"1MiB\" }}\n",
            dir.display()
        );
        std::fs::write(dir.join("mojim.toml"), text).expect("a configuration file");
        Example(dir)
    }

    /// The path of its `mojim.toml`.
    pub fn config(&self) -> PathBuf {
        self.0.join("mojim.toml")
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
