//! Tests of the whole crate, and what they share: a directory that goes away.

mod cluster;
mod daemons;
mod failing;
mod storage;

use std::path::{Path, PathBuf};

use mojim_env::Env;
use mojim_linux::Os;
use mojim_protocol::view::{Member, Register};

/// A directory for one test.
pub(crate) struct Temp(PathBuf);

impl Temp {
    pub fn new() -> Temp {
        let name = format!("mojim-views-{:016x}", Os::new().unwrap().random());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Temp(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A register that tells who made it.
fn register(version: u64, who: &str) -> Register {
    Register {
        version,
        epoch: version,
        primary: Some(Member {
            node: who.into(),
            incarnation: version,
        }),
        mirror: None,
        promised: 0,
    }
}
