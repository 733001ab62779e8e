//! Whether a program is linked with Mojim's library for C.
//!
//! Owns what is read of an ELF file for that: the names of the shared libraries that the dynamic loader
//! has to find for it. It looks at the file alone: a script's interpreter, and libraries of libraries,
//! are not followed.
//!
//! Invariant: a file that cannot be read, or is no program of this kind of machine, is not linked with
//! it. What is wrong with it, its start says.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Libraries that attach volumes in the program's own process.
const OURS: [&[u8]; 2] = [b"libmojim.so", b"libmojim_itm.so"];

const HEADER: usize = 64;
/// An entry of the table of segments.
const SEGMENT: usize = 56;
/// An entry of the dynamic section.
const ENTRY: usize = 16;
/// A larger dynamic section is not looked at.
const MOST: u64 = 1 << 20;
/// A longer name of a library is cut.
const NAME: usize = libc::PATH_MAX as usize;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;

/// Whether the program in `path` needs libmojim.so, or libmojim_itm.so.
pub fn with_libmojim(path: &Path) -> bool {
    needed(path).unwrap_or_default().iter().any(|name| {
        // Who links by a path, and a library without a name of its own, has the path here.
        let name = name.rsplit(|b| *b == b'/').next().unwrap_or_default();
        OURS.iter().any(|ours| name.starts_with(ours))
    })
}

/// The libraries that the program needs. None: it is not known.
fn needed(path: &Path) -> Option<Vec<Vec<u8>>> {
    let file = File::open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let segments = segments(&file)?;
    let dynamic = segments.iter().find(|s| s.kind == PT_DYNAMIC)?;
    let mut section = vec![0; dynamic.size.min(MOST) as usize];
    file.read_exact_at(&mut section, dynamic.offset).ok()?;
    let entries = || {
        let all = section.chunks_exact(ENTRY);
        all.map(|e| (word(e, 0), word(e, 8)))
    };
    let (_, strings) = entries().find(|(tag, _)| *tag == DT_STRTAB)?;
    // The loader's address; where it lies in the file, a segment says.
    let strings = segments.iter().find_map(|s| s.place_of(strings))?;
    let names = entries().filter(|(tag, _)| *tag == DT_NEEDED);
    Some(
        names
            .map(|(_, at)| name(&file, strings.saturating_add(at)))
            .collect(),
    )
}

struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    size: u64,
}

impl Segment {
    /// Where a byte at `address` lies in the file, if it is one of this segment.
    fn place_of(&self, address: u64) -> Option<u64> {
        let within = address.checked_sub(self.address)?;
        let is_here = self.kind == PT_LOAD && within < self.size;
        is_here.then(|| self.offset.saturating_add(within))
    }
}

fn segments(file: &File) -> Option<Vec<Segment>> {
    let mut head = [0; HEADER];
    file.read_exact_at(&mut head, 0).ok()?;
    let is_elf = head.starts_with(b"\x7fELF\x02\x01"); // 64 bits, low byte first
    let [size, count] = [54, 56].map(|at| u16::from_le_bytes([head[at], head[at + 1]]) as usize);
    if !is_elf || size != SEGMENT {
        return None;
    }
    let mut table = vec![0; count * SEGMENT];
    file.read_exact_at(&mut table, word(&head, 32)).ok()?;
    let all = table.chunks_exact(SEGMENT).map(|s| Segment {
        kind: word(s, 0) as u32,
        offset: word(s, 8),
        address: word(s, 16),
        size: word(s, 32),
    });
    Some(all.collect())
}

fn name(file: &File, at: u64) -> Vec<u8> {
    let mut name = vec![0; NAME];
    let len = file.read_at(&mut name, at).unwrap_or(0);
    let end = name[..len].iter().position(|b| *b == 0).unwrap_or(len);
    name.truncate(end);
    name
}

/// The eight bytes at `at`, which are there.
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test itself is such a file, and is linked with the C library.
    #[test]
    fn a_programs_libraries_are_found() {
        let me = std::env::current_exe().unwrap();
        let names = needed(&me).unwrap();
        assert!(names.iter().any(|n| n.starts_with(b"libc.so")), "{names:?}");
        assert!(!with_libmojim(&me));
    }

    #[test]
    fn what_is_no_program_is_not_linked() {
        let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/linked.rs"));
        for path in [source, Path::new("/proc/self"), Path::new("/nowhere")] {
            assert!(needed(path).is_none(), "{}", path.display());
        }
    }

    /// Whatever a file says of itself is no reason to panic, or to take all memory.
    #[test]
    fn a_spoilt_program_is_not_linked_or_is_as_before() {
        let me = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let path = std::env::temp_dir().join(format!("mojim-linked-{}", std::process::id()));
        let is_linked = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            with_libmojim(&path)
        };
        // The header, and the table of segments behind it, byte by byte.
        let mut bytes = me[..me.len().min(1 << 16)].to_vec();
        for at in 4..HEADER + 14 * SEGMENT {
            let was = std::mem::replace(&mut bytes[at], 0xff);
            assert!(!is_linked(&bytes), "byte {at}");
            bytes[at] = was;
        }
        assert!(!is_linked(&me[..100]));
        std::fs::remove_file(&path).unwrap();
    }
}
