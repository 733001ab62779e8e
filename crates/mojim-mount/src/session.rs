//! A mount's life with the kernel: its begin, the threads that serve, and its end.
//!
//! Invariants:
//! - A session that could not begin leaves no mount behind.
//! - It ends when the kernel says so: the mount was taken away, and nobody uses it any more. Its threads
//!   live as long, also when whoever began it has gone.
//! - Over io_uring, /dev/fuse is served too: what was forgotten comes there, and everything if the kernel
//!   takes back its offer.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use mojim_env::{Context, Error, Result};
use rustix::mount::UnmountFlags;

use crate::calls::Calls;
use crate::device::{Came, Device, raw};
use crate::flags::Flags;
use crate::init;
use crate::mounting;
use crate::reply::Reply;
use crate::rings::Rings;
use crate::switch::Uring;

/// What a mount is to be.
pub(crate) struct Setup<'a> {
    pub(crate) directory: &'a Path,
    /// In the table of mounts.
    pub(crate) source: String,
    pub(crate) flags: Flags,
    /// What is wanted of what the kernel offers.
    pub(crate) wanted: u64,
    /// Most bytes of a write.
    pub(crate) most_write: u32,
    /// How many threads serve /dev/fuse.
    pub(crate) threads: usize,
    pub(crate) uring: Uring,
}

pub(crate) struct Session {
    device: Arc<Device>,
    threads: Vec<JoinHandle<()>>,
    is_over_uring: bool,
}

impl Session {
    /// Mounts, and serves from then on.
    ///
    /// # Errors
    /// The system does not let this process mount; a kernel of another protocol; io_uring was asked for,
    /// and is not there; no memory.
    pub(crate) fn begin(calls: Arc<dyn Calls>, setup: Setup<'_>) -> Result<Session> {
        setup.uring.prepare()?;
        let begun = Session::begin_once(&calls, &setup);
        match begun {
            Err(e) if setup.uring == Uring::Auto && e.is_by_rings => {
                tracing::warn!("requests do not come over io_uring: {}", e.why);
                let uring = Uring::Off;
                let without = Setup { uring, ..setup };
                Session::begin_once(&calls, &without).map_err(|e| e.why)
            }
            begun => begun.map_err(|e| e.why),
        }
    }

    fn begin_once(calls: &Arc<dyn Calls>, setup: &Setup<'_>) -> Result<Session, NotBegun> {
        let device = mounting::mount(setup.directory, &setup.source, setup.flags)?;
        let begun = serve(Arc::new(Device(device)), calls, setup);
        if begun.is_err() {
            // It is of no use; and that it could not be taken away, a person sees.
            let _ = mounting::take_away(setup.directory, UnmountFlags::DETACH);
        }
        begun
    }

    /// The way to tell the kernel something.
    pub(crate) fn device(&self) -> Arc<Device> {
        self.device.clone()
    }

    /// Whether requests come over io_uring.
    pub(crate) fn is_over_uring(&self) -> bool {
        self.is_over_uring
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }
}

/// Why a session has not begun.
struct NotBegun {
    why: Error,
    /// The kernel was promised rings, and has not taken them.
    is_by_rings: bool,
}

impl From<Error> for NotBegun {
    fn from(why: Error) -> NotBegun {
        let is_by_rings = false;
        NotBegun { why, is_by_rings }
    }
}

fn serve(
    device: Arc<Device>,
    calls: &Arc<dyn Calls>,
    setup: &Setup<'_>,
) -> Result<Session, NotBegun> {
    let what = || format!("mounting at {}", setup.directory.display());
    let rings = greet(&device, setup).context(what)?;
    let is_over_uring = rings.is_some();
    let begun = rings.map_or(Ok(Vec::new()), |rings| rings.begin(&device, calls));
    let mut threads = begun.map_err(|e| NotBegun {
        why: Error::io(what() + ": FUSE over io_uring", &e),
        is_by_rings: true,
    })?;
    let others = if is_over_uring { 1 } else { setup.threads };
    for _ in 0..others {
        let (device, calls) = (device.clone(), calls.clone());
        let thread = std::thread::Builder::new().name("mojim-fuse".into());
        let started = thread.spawn(move || device.serve(&*calls));
        threads.push(started.map_err(|e| Error::io("starting a thread", &e))?);
    }
    Ok(Session {
        device,
        threads,
        is_over_uring,
    })
}

/// Answers the first request. Returns the rings, if requests are to come over them.
fn greet(device: &Arc<Device>, setup: &Setup<'_>) -> io::Result<Option<Rings>> {
    let wrong = |text: &str| io::Error::other(text);
    let mut buffer = Device::buffer();
    let len = match device.receive(&mut buffer)? {
        Came::Request(len) => len,
        Came::End => return Err(wrong("it was unmounted at once")),
    };
    let request = raw(&buffer[..len]).filter(|r| r.head.is_init());
    let request = request.ok_or_else(|| wrong("the kernel does not begin with FUSE_INIT"))?;
    // If it is refused, the answer is EIO.
    let reply = Reply::new(device.clone(), 0, request.head.unique);
    let offer = init::offer(request.rest).map_err(|e| wrong(&e.to_string()))?;
    let rings = match setup.uring {
        Uring::Off => None,
        Uring::Auto if !offer.has(init::OVER_IO_URING) => None,
        Uring::On if !offer.has(init::OVER_IO_URING) => {
            return Err(wrong("the kernel does not offer FUSE over io_uring"));
        }
        // The kernel waits for the rings once it was answered: so they are made before.
        Uring::Auto | Uring::On => match Rings::new(device) {
            Ok(rings) => Some(rings),
            Err(e) if setup.uring == Uring::On => {
                return Err(wrong(&format!("FUSE over io_uring: {e}")));
            }
            Err(e) => {
                tracing::warn!("requests do not come over io_uring: {e}");
                None
            }
        },
    };
    let over = match rings {
        Some(_) => init::OVER_IO_URING,
        None => 0,
    };
    reply.data(init::answer(&offer, setup.wanted | over, setup.most_write));
    Ok(rings)
}
