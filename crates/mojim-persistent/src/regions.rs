//! Persistent regions that are made at run time: always at the same address, so that pointers
//! between their bytes stay valid.
//!
//! Owns where they lie.
//!
//! Source: Mnemosyne, "Persistent memory regions" (dynamic, `pmap`).

use std::sync::{Mutex, MutexGuard};

use mojim::{Error, MapFlags, Mapping, Result, Volume, is_region, unmap};
use mojim_env::Context;
use mojim_env::locks::lock;
use mojim_format::persistent::{REGION_HEAD, RegionHead};
use mojim_memory::fork::check_fork;

use crate::file::{FileHead, look};

/// Where regions lie that are given no address: free under the layouts of x86-64 Linux.
const PLACES: std::ops::Range<u64> = 0x2000_0000_0000..0x3000_0000_0000;
const UNIT: u64 = 1 << 20;
/// Half of these addresses: a larger region would seldom find a place.
const MOST: usize = ((PLACES.end - PLACES.start) / 2) as usize;
/// Addresses tried, for a new region.
const TRIES: usize = 16;

/// Regions of this process.
static MAPPED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn mapped() -> MutexGuard<'static, Vec<(usize, usize)>> {
    lock(&MAPPED)
}

/// Maps a persistent region at its address, and makes it, of zeros, if it is not there. `size`:
/// bytes; 0 for a region that is there.
///
/// # Errors
/// `Invalid` if the region is there with another size, or is new and has none; `Io` with
/// EADDRINUSE if something else of this process is at its address; `Damaged` if the file is no
/// region; `Busy` if it is mapped; those of [`Volume::map`] and of a sync point.
pub fn pmap(volume: &Volume, file: &str, size: usize) -> Result<Mapping> {
    check_fork()?;
    let mapping = match look(volume, file, RegionHead::decode)? {
        FileHead::New => make(volume, file, size)?,
        FileHead::Old(head) => {
            let there = head.size as usize;
            if size != 0 && size != there {
                return Err(Error::Invalid(format!(
                    "{file}: the region has {there} bytes, {size} are asked for"
                )));
            }
            map(volume, file, there, head.address as usize)?
        }
    };
    let mut all = mapped();
    all.retain(|(start, _)| is_region(*start));
    all.push((mapping.ptr as usize, mapping.len));
    Ok(mapping)
}

fn flags(offset: usize, fixed_at: usize) -> MapFlags {
    MapFlags {
        create: true,
        atomic: true,
        offset: offset as u64,
        fixed_at,
        ..MapFlags::default()
    }
}

fn map(volume: &Volume, file: &str, size: usize, address: usize) -> Result<Mapping> {
    let taken = |e: Error| match e {
        Error::Busy(text) => Error::Io {
            what: format!("mapping {file} at {address:#x}, where it belongs"),
            errno: libc::EADDRINUSE,
            error: text,
        },
        e => e,
    };
    volume
        .map(file, size, flags(REGION_HEAD, address))
        .map_err(taken)
}

fn make(volume: &Volume, file: &str, size: usize) -> Result<Mapping> {
    if size == 0 {
        return Err(Error::Invalid(format!(
            "{file}: there is no such region, and a new one needs a size"
        )));
    }
    if size >= MOST {
        return Err(Error::Invalid(format!("{file}: {size} bytes are too many")));
    }
    let head = volume.map(file, REGION_HEAD, flags(0, 0))?;
    let done = place(volume, file, size).and_then(|mapping| {
        let bytes = RegionHead {
            address: mapping.ptr as u64,
            size: size as u64,
        };
        let bytes = bytes.encode();
        // SAFETY: the head's region, which was just mapped, has room for it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), head.ptr, bytes.len()) };
        match mojim::msync(head.ptr, bytes.len()) {
            Ok(_) => Ok(mapping),
            Err(e) => unmap(mapping.ptr, mapping.len).and(Err(e)),
        }
    });
    unmap(head.ptr, head.len)?;
    done
}

/// Maps the bytes of a new region at an address that is free.
fn place(volume: &Volume, file: &str, size: usize) -> Result<Mapping> {
    let room = PLACES.end - PLACES.start;
    let mut last = None;
    for _ in 0..TRIES {
        let mut bytes = [0; 8];
        // SAFETY: room for as many bytes.
        if unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) } != 8 {
            return Err(std::io::Error::last_os_error()).context(|| "a random number".into());
        }
        let at = u64::from_ne_bytes(bytes) % (room - size as u64) / UNIT * UNIT;
        match map(volume, file, size, (PLACES.start + at) as usize) {
            Err(e) if e.errno() == libc::EADDRINUSE => last = Some(e),
            done => return done,
        }
    }
    Err(last.expect("tried at least once"))
}

/// Ends the region that begins at `start`; what was not committed is discarded. The file stays.
///
/// # Errors
/// `Invalid` if no region of [`pmap`] begins there.
pub fn punmap(start: *const u8) -> Result<()> {
    let mut all = mapped();
    let found = all.iter().position(|(at, _)| *at == start as usize);
    let Some(n) = found.filter(|_| is_region(start as usize)) else {
        return Err(Error::Invalid(format!(
            "{start:p}: no region of mojim_pmap begins there"
        )));
    };
    unmap(start, all[n].1)?;
    all.swap_remove(n);
    Ok(())
}
