//! Shared by tests of an unreplicated volume: a directory, its configuration, a mapping, chance.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use mojim_config::Config;
use mojim_engine::{MapFlags, Mapping, Volume};

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

/// Ports at which nobody listens, on an address that no other test has: on 127.0.0.1 another
/// process's test takes such a port before a node is there, or knocks at it.
pub fn free_ports<const N: usize>() -> [SocketAddr; N] {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let (n, pid) = (NEXT.fetch_add(1, Relaxed), std::process::id());
    let (high, low) = ((pid / 250 % 100) as u8, (pid % 250) as u8);
    let host = Ipv4Addr::new(127, 128 + high, n, 1 + low);
    let held = [(); N].map(|()| TcpListener::bind((host, 0)).unwrap());
    held.map(|l| l.local_addr().unwrap())
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
    let mut rng = mojim_env::rng::Rng::new(seed);
    move |n| rng.index(n)
}
