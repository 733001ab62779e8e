//! Whether a program is linked with Mojim's library for C.
//!
//! Owns what is read of an ELF file for that: the names of the shared libraries that the dynamic
//! loader has to find for it. It looks at the file alone. A script's interpreter, and libraries of
//! libraries, are not followed.
//!
//! Invariant: a file that cannot be read, or is no program of 64 bits, is not linked with it. The
//! start of such a file says what is wrong with it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
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
const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;

/// Whether the program in `path` needs libmojim.so, or libmojim_itm.so.
pub fn with_libmojim(path: &Path) -> bool {
    let is_ours = |name: &[u8]| {
        // Who links by a path, and a library without a name of its own, has the path here.
        let name = name.rsplit(|b| *b == b'/').next().unwrap_or_default();
        OURS.iter().any(|ours| name.starts_with(ours))
    };
    any_needed(path, is_ours).unwrap_or(false)
}

/// Whether `is` holds for the name of a library that the program needs. None: it is not known.
fn any_needed(path: &Path, mut is: impl FnMut(&[u8]) -> bool) -> Option<bool> {
    let mut how = OpenOptions::new();
    // Another thing may have that name, as a pipe.
    let file = how
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = file.open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let segments = segments(&file)?;
    let dynamic = segments.iter().find(|s| s.kind == PT_DYNAMIC)?;
    let mut section = vec![0; dynamic.size.min(MOST) as usize];
    file.read_exact_at(&mut section, dynamic.offset).ok()?;
    let entries = || {
        let all = section.chunks_exact(ENTRY);
        let all = all.map(|e| (word(e, 0), word(e, 8)));
        all.take_while(|(tag, _)| *tag != DT_NULL)
    };
    let (_, strings) = entries().find(|(tag, _)| *tag == DT_STRTAB)?;
    // The loader's address; where it lies in the file, a segment says.
    let strings = segments.iter().find_map(|s| s.place_of(strings))?;
    let mut room = vec![0; NAME];
    let mut names = entries().filter(|(tag, _)| *tag == DT_NEEDED);
    Some(names.any(|(_, at)| is(name(&file, strings.saturating_add(at), &mut room))))
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

fn name<'a>(file: &File, at: u64, room: &'a mut [u8]) -> &'a [u8] {
    let len = file.read_at(room, at).unwrap_or(0);
    let end = room[..len].iter().position(|b| *b == 0).unwrap_or(len);
    &room[..end]
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
        let is_c = |name: &[u8]| name.starts_with(b"libc.so");
        assert_eq!(any_needed(&me, is_c), Some(true));
        assert!(!with_libmojim(&me));
    }

    #[test]
    fn what_is_no_program_is_not_linked() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o700.into()).unwrap();
        let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/linked.rs"));
        for path in [
            source,
            Path::new("/proc/self"),
            Path::new("/nowhere"),
            &pipe,
        ] {
            assert!(any_needed(path, |_| true).is_none(), "{}", path.display());
        }
    }

    /// A program that needs `libraries`, as small as it can be: its header, two segments, the dynamic
    /// section, and the names.
    fn program(libraries: &[&str]) -> Vec<u8> {
        const BASE: u64 = 0x40_0000;
        let dynamic = HEADER + 2 * SEGMENT;
        let strings = dynamic + (libraries.len() + 2) * ENTRY;
        let mut names = vec![0];
        let mut entries = Vec::new();
        for library in libraries {
            entries.push((DT_NEEDED, names.len() as u64));
            names.extend_from_slice(library.as_bytes());
            names.push(0);
        }
        entries.extend([(DT_STRTAB, BASE + strings as u64), (DT_NULL, 0)]);
        let mut all = b"\x7fELF\x02\x01\x01".to_vec();
        all.resize(HEADER, 0);
        all[32] = HEADER as u8;
        all[54] = SEGMENT as u8;
        all[56] = 2;
        let end = (strings + names.len()) as u64;
        let section = ((libraries.len() + 2) * ENTRY) as u64;
        for (kind, offset, len) in [(PT_LOAD, 0, end), (PT_DYNAMIC, dynamic as u64, section)] {
            let words = [kind.into(), offset, BASE + offset, 0, len, len, 8];
            all.extend(words.iter().flat_map(|w: &u64| w.to_le_bytes()));
        }
        all.extend(
            entries
                .iter()
                .flat_map(|e| [e.0, e.1])
                .flat_map(u64::to_le_bytes),
        );
        all.extend(names);
        all
    }

    /// Whatever a file says of itself is no reason to panic, or to take all memory.
    #[test]
    fn a_linked_program_is_known_and_a_spoilt_one_does_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let is_linked = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            with_libmojim(&path)
        };
        for ours in [
            "libmojim.so",
            "libmojim.so.0",
            "/opt/lib/libmojim.so",
            "libmojim_itm.so",
        ] {
            assert!(is_linked(&program(&["libc.so.6", ours])), "{ours}");
        }
        for others in ["libmojimx.so", "libmojim.so/libc.so.6", "mojim"] {
            assert!(!is_linked(&program(&["libc.so.6", others])), "{others}");
        }
        let whole = program(&["libc.so.6", "libmojim.so"]);
        let name = whole.len() - 1;
        for len in 0..name {
            assert!(!is_linked(&whole[..len]), "{len} bytes");
        }
        for at in 0..whole.len() {
            for with in [0x00, 0x01, 0x7f, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = with;
                is_linked(&bytes);
            }
        }
        // Behind the last entry there are none.
        let mut bytes = whole;
        bytes[HEADER + 2 * SEGMENT] = DT_NULL as u8;
        assert!(!is_linked(&bytes));
    }
}
