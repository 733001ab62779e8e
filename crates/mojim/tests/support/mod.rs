//! What tests of an unreplicated volume begin with: a directory, its configuration,
//! a mapping, chance.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use mojim::{MapFlags, Mapping, Volume};
use mojim_config::Config;

/// A temporary directory, removed when dropped.
pub struct Dir(pub PathBuf);

impl Dir {
    /// `name`: unlike that of any other test of this program.
    pub fn new(name: &str) -> Dir {
        let d = std::env::temp_dir().join(format!("mojim-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&d);
        std::fs::create_dir_all(&d).unwrap();
        Dir(d)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Volume `v` on node `a` alone, its log of the size `log`; `more`: the volume's other keys.
pub fn alone(dir: &Path, more: &str, log: &str) -> Config {
    let text = format!(
        r#"
cluster = "test"
[volume.v]
mode = "unreplicated"
primary = "a"
{more}
[node.a]
address = "127.0.0.1:1"
directory = "{0}/a"
ring = "{0}"
log = {{ medium = "disk", size = "{log}" }}
"#,
        dir.display()
    );
    Config::parse(&text, dir).unwrap()
}

/// File `f`, private.
pub fn map(v: &Volume, len: usize) -> Mapping {
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    v.map("f", len, flags).unwrap()
}

/// Numbers below what is asked, the same for the same seed.
pub fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |n| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as usize % n
    }
}
