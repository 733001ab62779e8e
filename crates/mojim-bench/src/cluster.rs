//! The cluster that benchmarks measure, and regions to store to.
//!
//! The cluster has two nodes. `a` is the program's, and its log is on the disk. The mirror `b` is a
//! process of its own, and its log is in memory, or on an emulated disk.
//!
//! Invariant: a node process ends when its value is dropped, and when the thread that started it
//! ends.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mojim::{MapFlags, Volume, msync};
use mojim_cli::beside::mojim;

use crate::emulated;
use crate::measure::{Subject, prepared};
use crate::orphan::ends_with_us;

/// A node process that ends with its starter.
pub(crate) struct NodeProcess(Child);

impl NodeProcess {
    pub(crate) fn start(config: &Path, name: &str) -> io::Result<NodeProcess> {
        let mut command = Command::new(mojim()?);
        command.args(["node", "--config"]).arg(config);
        command.args(["--name", name]);
        NodeProcess::of(command)
    }

    /// The mirror of [`config_text_with`].
    pub(crate) fn mirror(config: &Path, disk: Option<Duration>) -> io::Result<NodeProcess> {
        match disk {
            Some(takes) => NodeProcess::of(emulated::command(config, "b", takes)?),
            None => NodeProcess::start(config, "b"),
        }
    }

    fn of(mut command: Command) -> io::Result<NodeProcess> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // A measurement that is killed drops nothing.
        ends_with_us(&mut command, libc::SIGKILL);
        Ok(NodeProcess(command.stderr(Stdio::null()).spawn()?))
    }

    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        // It may have ended already; either way it is waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A volume: its name, mode and transport.
pub(crate) type VolumeOf = (&'static str, &'static str, &'static str);

/// Addresses on loopback that were free a moment ago.
pub(crate) fn free_addresses<const N: usize>() -> io::Result<[SocketAddr; N]> {
    // All at once, so that no two are alike.
    let held: io::Result<Vec<_>> = (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect();
    let all: io::Result<Vec<_>> = held?.iter().map(TcpListener::local_addr).collect();
    Ok(all?.try_into().expect("as many as were bound"))
}

/// Bytes of each log of [`config_text`].
pub(crate) const LOG: usize = 64 << 20;

/// The configuration with these volumes, with files in `dir` and `shm`; without `connections` each
/// volume has as many as is the default.
pub(crate) fn config_text(
    dir: &Path,
    shm: &Path,
    volumes: &[VolumeOf],
    connections: Option<usize>,
) -> io::Result<String> {
    config_text_with(dir, shm, volumes, connections, None)
}

/// The same; with `disk` the mirror's log is on an emulated disk, whose durable writes take so long.
pub(crate) fn config_text_with(
    dir: &Path,
    shm: &Path,
    volumes: &[VolumeOf],
    connections: Option<usize>,
    disk: Option<Duration>,
) -> io::Result<String> {
    let mirror = if disk.is_some() { "disk" } else { "dram" };
    let logs = [
        r#"medium = "disk""#.to_owned(),
        format!("medium = {mirror:?}"),
    ];
    config_text_of(dir, shm, volumes, connections, logs)
}

/// The configuration of two nodes that emulate a memory. The primary flushes its log. The mirror flushes
/// its own if `strict`.
pub(crate) fn config_text_emulated(
    dir: &Path,
    shm: &Path,
    volumes: &[VolumeOf],
    (memory, strict): (&str, bool),
) -> io::Result<String> {
    let of = |medium: &str| format!("medium = {medium:?}, emulate = {memory:?}");
    let mirror = if strict { "pmem" } else { "dram" };
    config_text_of(dir, shm, volumes, Some(1), [of("pmem"), of(mirror)])
}

/// The configuration with these keys of the primary's and the mirror's log.
fn config_text_of(
    dir: &Path,
    shm: &Path,
    volumes: &[VolumeOf],
    connections: Option<usize>,
    [primary_log, mirror_log]: [String; 2],
) -> io::Result<String> {
    let [a, b] = free_addresses()?;
    let connections = match connections {
        Some(n) => format!("connections = {n}\n"),
        None => String::new(),
    };
    let mut t = String::from("cluster = \"bench\"\n");
    for (name, mode, transport) in volumes {
        let mirror = if *mode == "unreplicated" {
            ""
        } else {
            "mirror = \"b\"\n"
        };
        t += &format!(
            "[volume.{name}]\nmode = \"{mode}\"\nprimary = \"a\"\n{mirror}transport = \"{transport}\"\n{connections}checkpoint_threshold = 1\nresend_timeout = \"2s\"\n"
        );
    }
    t += &format!(
        "[node.a]\naddress = \"{}\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {{ {primary_log}, size = {LOG} }}\n",
        a,
        dir.join("a").display(),
        shm.display()
    );
    t += &format!(
        "[node.b]\naddress = \"{}\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {{ {mirror_log}, path = \"{}\", size = {LOG} }}\n",
        b,
        dir.join("b").display(),
        shm.display(),
        shm.join("b").display()
    );
    Ok(t)
}

/// Bytes of a region.
pub(crate) const REGION: usize = 16 << 20;

/// Maps a new region of the volume; where it is.
pub(crate) fn target(volume: &Volume) -> io::Result<usize> {
    let m = volume
        .map(
            "data",
            REGION,
            MapFlags {
                create: true,
                ..MapFlags::default()
            },
        )
        .map_err(io::Error::other)?;
    Ok(m.ptr as usize)
}

/// A part of a mapped region and where the next sync point goes.
struct Target {
    base: usize,
    span: usize,
    at: usize,
    len: usize,
    fill: u8,
}

impl Target {
    fn store(&mut self) {
        // Page after page in a scattered order, the same for every subject.
        self.at = ((self.at + 4096 * 17) % (self.span - self.len).max(1)) & !7;
        self.fill = self.fill.wrapping_add(1);
        // SAFETY: inside the region, which stays mapped for the whole run.
        unsafe {
            std::ptr::write_bytes((self.base + self.at) as *mut u8, self.fill, self.len);
        }
    }

    fn sync(&self) -> io::Result<()> {
        msync((self.base + self.at) as *const u8, self.len)
            .map(drop)
            .map_err(io::Error::other)
    }
}

/// Sync points of `len` bytes in the region at `base`.
pub(crate) fn mojim_subject<'a>(
    name: String,
    base: usize,
    len: usize,
) -> Box<dyn Subject + Send + 'a> {
    Box::new(part_subject(name, base, len, (0, 1)))
}

/// Sync points of `len` bytes in part `i` of the `n` parts of the region at `base`.
pub(crate) fn part_subject(
    name: String,
    base: usize,
    len: usize,
    (i, n): (usize, usize),
) -> impl Subject + Send {
    let span = (REGION / n) & !4095;
    assert!(i < n && len <= span);
    let t = Target {
        base: base + i * span,
        span,
        at: 0,
        len,
        fill: i as u8,
    };
    prepared(
        name,
        t,
        |t: &mut Target| {
            t.store();
            Ok(())
        },
        |t: &mut Target| t.sync(),
    )
}
