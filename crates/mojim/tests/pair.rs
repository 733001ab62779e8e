//! A primary and its mirror in one process: the ordinary life of a volume.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim::config::Config;
use mojim::node::Node;
use mojim::{MapFlags, Volume, gmsync, msync, unmap};

/// A directory of its own on the disk, and memory beside it; both go at the end.
struct Place {
    dir: PathBuf,
    shm: PathBuf,
}

impl Place {
    fn new(name: &str) -> Place {
        let id = format!("mojim-test-{}-{name}", std::process::id());
        let p = Place {
            dir: PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&id),
            shm: Path::new("/dev/shm").join(&id),
        };
        std::fs::create_dir_all(&p.dir).unwrap();
        std::fs::create_dir_all(&p.shm).unwrap();
        p
    }

    fn config(&self, mode: &str, transport: &str, connections: usize) -> Config {
        let port = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (a, b) = (port(), port());
        let text = format!(
            r#"
cluster = "test"
[volume.v]
mode = "{mode}"
primary = "a"
{mirror}
connections = {connections}
transport = "{transport}"
resend_timeout = "500ms"
[node.a]
address = "{a}"
directory = "{dir}/a"
ring = "{shm}"
log = {{ medium = "disk", size = "4MiB" }}
[node.b]
address = "{b}"
directory = "{dir}/b"
ring = "{shm}"
log = {{ medium = "dram", path = "{shm}/b", size = "4MiB" }}
"#,
            mirror = if mode == "unreplicated" {
                ""
            } else {
                "mirror = \"b\""
            },
            a = a.local_addr().unwrap(),
            b = b.local_addr().unwrap(),
            dir = self.dir.display(),
            shm = self.shm.display(),
        );
        Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"))
    }

    fn bytes(&self, node: &str, file: &str) -> Vec<u8> {
        std::fs::read(self.dir.join(node).join("v").join(file)).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_dir_all(&self.shm);
    }
}

fn attach(c: &Config, node: &str) -> Volume {
    Volume::attach_with(c, node, None, |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

const CREATE: MapFlags = MapFlags {
    create: true,
    atomic: false,
    read_only: false,
    offset: 0,
    fixed_at: 0,
};

/// Stores, then one sync point of two ranges, then a discovered one over all.
fn work(v: &Volume, round: u8) {
    let m = v.map("log", 1 << 20, CREATE).unwrap();
    // SAFETY: the region is mapped, and only this thread uses it.
    let all = unsafe { std::slice::from_raw_parts_mut(m.ptr, m.len) };
    for i in 0..200usize {
        let at = (i * 4096 + 100) % (1 << 20);
        all[at..at + 64].fill(round.wrapping_add(i as u8));
        all[0..8].copy_from_slice(&(i as u64).to_le_bytes());
        let lsn = gmsync(&[(all[at..].as_ptr(), 64), (all.as_ptr(), 8)]).unwrap();
        assert!(lsn > 0);
    }
    for i in 0..64usize {
        all[i * 16_384 + 5000] = round ^ 0x55;
    }
    assert!(msync(m.ptr, m.len).unwrap() > 0);
    // A sync point of 1 MiB, larger than one record.
    all.iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i as u8).wrapping_mul(round | 1));
    assert!(msync(m.ptr, m.len).unwrap() > 0);
    unmap(m.ptr, m.len).unwrap();
}

fn expected(round: u8) -> Vec<u8> {
    (0..1usize << 20)
        .map(|i| (i as u8).wrapping_mul(round | 1))
        .collect()
}

fn both(mode: &str, transport: &str, connections: usize) {
    let place = Place::new(&format!("{mode}-{transport}-{connections}"));
    let c = place.config(mode, transport, connections);
    let b: Option<Arc<Node>> = (mode != "unreplicated").then(|| {
        Node::start(&c, "b", None, |t| eprintln!("b: {t}")).unwrap_or_else(|e| panic!("{e}"))
    });
    for round in [3u8, 7] {
        let v = attach(&c, "a");
        work(&v, round);
        v.detach().unwrap_or_else(|e| panic!("{e}"));
        assert!(
            place.bytes("a", "log") == expected(round),
            "a, round {round}"
        );
    }
    if let Some(b) = b {
        b.stop();
        assert!(place.bytes("b", "log") == expected(7), "b");
    }
}

#[test]
fn unreplicated() {
    both("unreplicated", "tcp", 2);
}

#[test]
fn asynchronous() {
    both("async", "tcp", 2);
}

#[test]
fn sync_over_tcp() {
    both("sync", "tcp", 2);
}

#[test]
fn sync_over_shared_memory() {
    both("sync", "shm", 1);
}

#[test]
fn sync_flush() {
    both("sync-flush", "tcp", 1);
}
