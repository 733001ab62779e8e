//! The shipped engine as a subject: an unreplicated volume with a small log.
//!
//! Owns the volume's configuration, which follows from the seed: logs of a few records,
//! so that they wrap and are released all the time, or larger logs.

use std::path::Path;
use std::sync::Arc;

use mojim::{Config, MapFlags, Mapping, Volume, gmsync, msync};
use mojim_sim::Rng;

use crate::Result;
use crate::machine::{Fault, Machine};
use crate::subject::{Subject, SubjectPaths};
use crate::workload::{Patch, region_len};

/// The one file of the volume.
pub(crate) const FILE: &str = "f";

/// An attached volume with its one region.
pub struct Shipped {
    volume: Volume,
    region: Mapping,
    /// Counts commits: the ways of committing take turns.
    turn: u64,
}

fn config(place: &SubjectPaths, seed: u64) -> Result<Config> {
    let mut rng = Rng::new(!seed);
    let text = format!(
        "cluster = \"crash\"\n\
         [volume.v]\n\
         mode = \"unreplicated\"\n\
         primary = \"a\"\n\
         connections = {}\n\
         checkpoint_threshold = {}\n\
         [node.a]\n\
         address = \"127.0.0.1:7401\"\n\
         directory = \"{}\"\n\
         ring = \"{}\"\n\
         log = {{ medium = \"{}\", size = \"{}KiB\" }}\n",
        rng.between(1, 2),
        rng.pick(&[1, 1, 4, 64]),
        place.dir.display(),
        place.ring.display(),
        place.medium,
        rng.pick(&[128, 128, 256, 1024]),
    );
    Ok(Config::parse(&text, Path::new("crash.toml"))?)
}

/// Attaches to the volume; `rebooted` after a crash.
pub(crate) fn attach(
    place: &SubjectPaths,
    seed: u64,
    fault: Option<Fault>,
    rebooted: bool,
) -> Result<Volume> {
    let over = |os| -> Arc<dyn mojim_env::Env> {
        Arc::new(Machine {
            os,
            newest: Arc::default(),
            boot: if rebooted { 0xff } else { 0 },
            fault,
            data: place.dir.join("v").join(FILE),
            forced: place.forced.clone(),
        })
    };
    let config = config(place, seed)?;
    Ok(Volume::attach_over(&config, "a", None, over, |_, _| {})?)
}

impl Shipped {
    /// Attaches to the volume and maps the region; `rebooted` after a crash.
    pub fn open(
        place: &SubjectPaths,
        seed: u64,
        fault: Option<Fault>,
        rebooted: bool,
    ) -> Result<Shipped> {
        let volume = attach(place, seed, fault, rebooted)?;
        let flags = MapFlags {
            create: true,
            atomic: true,
            // Half of the runs use each kind of working copy.
            shared: seed % 2 == 1,
            ..MapFlags::default()
        };
        let region = match volume.map(FILE, region_len(seed), flags) {
            Ok(m) => m,
            Err(e) => {
                volume.detach()?;
                return Err(e.into());
            }
        };
        Ok(Shipped {
            volume,
            region,
            turn: 0,
        })
    }

    /// Returns the region's bytes, and detaches.
    pub fn read(self) -> Result<Vec<u8>> {
        // SAFETY: mapped until the detach below; nobody stores.
        let bytes = unsafe { std::slice::from_raw_parts(self.region.ptr, self.region.len) };
        let bytes = bytes.to_vec();
        self.volume.detach()?;
        Ok(bytes)
    }
}

impl Subject for Shipped {
    fn commit(&mut self, changes: &[Patch]) -> Result<()> {
        let mut ranges: Vec<(*const u8, usize)> = Vec::new();
        for c in changes {
            // Programs do not store everything at once.
            std::thread::yield_now();
            assert!(c.at + c.bytes.len() <= self.region.len);
            // SAFETY: inside the region, as was just checked, which only this
            // thread uses.
            let ptr = unsafe { self.region.ptr.add(c.at) };
            // SAFETY: as above.
            unsafe { ptr.copy_from(c.bytes.as_ptr(), c.bytes.len()) };
            ranges.push((ptr, c.bytes.len()));
        }
        self.turn += 1;
        if self.turn % 2 == 1 {
            gmsync(&ranges)?;
        } else {
            msync(self.region.ptr, self.region.len)?;
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.volume.detach()?)
    }
}
