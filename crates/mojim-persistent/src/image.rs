//! The running program, or shared library, that a section of persistent variables belongs to.
//!
//! Owns the reading of ELF: what the file says of the section. Everything here is read before a
//! variable changes its memory.
//!
//! Invariants:
//!
//! - Anything that is not certain is an error: a name that two variables have, a pointer among the
//!   initial values, other data in the section's last page.

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use mojim::{Error, Result};
use mojim_env::{Context, descriptors};
use mojim_format::persistent::{BUILD_ID, Variable};
use object::read::elf::{ElfFile64, FileHeader, SectionHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, ReadCache, SymbolKind, elf};

/// The section that the header's macro names.
pub const SECTION: &str = "mojim_persistent";
/// A symbol of no bytes that the header puts into the section, once for each source file. It is
/// local: where it is, the names of all variables are.
const ANCHOR: &str = "mojim_first_";

/// A loaded object.
struct Loaded {
    base: u64,
    path: PathBuf,
    is_program: bool,
    build_id: [u8; BUILD_ID],
    segments: Vec<Range<u64>>,
}

/// What is known of a section.
pub struct Image {
    /// Variables by offset and name; empty if the object has no symbol table.
    pub list: Vec<Variable>,
    /// Zeros if it has none.
    pub build_id: [u8; BUILD_ID],
    /// The file, for messages.
    pub path: PathBuf,
    /// The library's name, to keep it loaded; `None` for the program itself.
    pub library: Option<PathBuf>,
}

type Elf<'a> = ElfFile64<'a, Endianness, &'a ReadCache<File>>;

/// Reads what the object says of its section at `start`.
pub fn of(start: usize, len: usize) -> Result<Image> {
    let loaded = loaded(start as u64)?;
    let path = match loaded.is_program {
        true => PathBuf::from("/proc/self/exe"),
        false => loaded.path.clone(),
    };
    let what = || format!("reading {}", loaded.path.display());
    let open = || File::open(&path).map(OwnedFd::from);
    let file = File::from(descriptors::open(open).context(what)?);
    let inode = file.metadata().context(what)?.ino();
    let cache = ReadCache::new(file);
    let elf = Elf::parse(&cache).map_err(|e| unknown(&loaded, &e.to_string()))?;
    let at = start as u64 - loaded.base..(start + len) as u64 - loaded.base;
    check_file(&elf, inode, &loaded)?;
    check_section(&elf, &loaded, &at)?;
    let list = names(&elf, &loaded, &at)?;
    check_exported(&elf, &loaded, &at)?;
    check_pointers(&elf, &loaded, &at, &list)?;
    Ok(Image {
        list,
        build_id: loaded.build_id,
        library: (!loaded.is_program).then(|| loaded.path.clone()),
        path: loaded.path,
    })
}

fn unknown(loaded: &Loaded, what: &str) -> Error {
    Error::Unsupported(format!(
        "{}: {what}: where its persistent variables lie cannot be known",
        loaded.path.display()
    ))
}

fn refused<T>(loaded: &Loaded, what: String) -> Result<T> {
    Err(Error::Invalid(format!("{}: {what}", loaded.path.display())))
}

struct Search {
    address: u64,
    seen: usize,
    found: Option<Loaded>,
}

/// Finds the object whose segment holds the address.
fn loaded(address: u64) -> Result<Loaded> {
    let mut search = Search {
        address,
        seen: 0,
        found: None,
    };
    // SAFETY: the callback has this type, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    let text = || format!("{address:#x} is in no program and no library");
    search.found.ok_or_else(|| Error::Invalid(text()))
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: `loaded` passes a `Search`, and the C library an object that stays meanwhile.
    let (search, info) = unsafe { (&mut *data.cast::<Search>(), &*info) };
    search.seen += 1;
    // SAFETY: as many headers as the object says.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let span = |h: &libc::Elf64_Phdr| {
        let start = info.dlpi_addr.wrapping_add(h.p_vaddr);
        start..start.wrapping_add(h.p_memsz)
    };
    let segments = headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
    let segments: Vec<_> = segments.map(span).collect();
    if !segments.iter().any(|s| s.contains(&search.address)) {
        return 0;
    }
    let mut build_id = [0; BUILD_ID];
    for h in headers.iter().filter(|h| h.p_type == libc::PT_NOTE) {
        let at = info.dlpi_addr.wrapping_add(h.p_vaddr) as *const u8;
        let end = (at as u64).saturating_add(h.p_memsz);
        if !segments
            .iter()
            .any(|s| s.contains(&(at as u64)) && end <= s.end)
        {
            continue;
        }
        // SAFETY: memory of the object, which stays loaded meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(at, h.p_memsz as usize) };
        note(bytes, &mut build_id);
    }
    let name = match info.dlpi_name.is_null() {
        true => c"",
        // SAFETY: a C string that stays meanwhile.
        false => unsafe { CStr::from_ptr(info.dlpi_name) },
    };
    let name = name.to_string_lossy().into_owned();
    // The program comes first.
    let is_program = search.seen == 1;
    let path = match is_program {
        true => std::env::current_exe().unwrap_or_else(|_| PathBuf::from(&name)),
        false => PathBuf::from(name),
    };
    search.found = Some(Loaded {
        base: info.dlpi_addr,
        path,
        is_program,
        build_id,
        segments,
    });
    1
}

/// Finds a build id among notes.
fn note(mut bytes: &[u8], id: &mut [u8; BUILD_ID]) {
    const NT_GNU_BUILD_ID: u32 = 3;
    while bytes.len() >= 12 {
        let word = |n: usize| u32::from_ne_bytes(bytes[n * 4..n * 4 + 4].try_into().expect("four"));
        let (name, value, kind) = (word(0) as usize, word(1) as usize, word(2));
        let from = 12 + name.next_multiple_of(4);
        let Some(found) = bytes.get(from..from.saturating_add(value)) else {
            return;
        };
        if kind == NT_GNU_BUILD_ID && bytes[12..].starts_with(b"GNU\0") {
            let n = value.min(BUILD_ID);
            id[..n].copy_from_slice(&found[..n]);
            return;
        }
        let Some(rest) = bytes.get(from + value.next_multiple_of(4)..) else {
            return;
        };
        bytes = rest;
    }
}

/// The inode of the file that is mapped at an address. (The device's number that stands there is
/// not that of stat on some file systems.)
fn inode_at(maps: &str, address: u64) -> Option<u64> {
    maps.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let inode = words.nth(3)?.parse().ok()?;
        (hex(start)?..hex(end)?).contains(&address).then_some(inode)
    })
}

/// A library's file may have been replaced since it was loaded.
fn check_file(elf: &Elf<'_>, inode: u64, loaded: &Loaded) -> Result<()> {
    let mut id = [0; BUILD_ID];
    if let Ok(Some(found)) = elf.build_id() {
        let n = found.len().min(BUILD_ID);
        id[..n].copy_from_slice(&found[..n]);
    }
    let is_it = || -> Result<bool> {
        match id == [0; BUILD_ID] {
            false => Ok(id == loaded.build_id),
            // The first segment has the library's head, whose mapping nobody changes.
            true => {
                let what = || "reading /proc/self/maps".to_owned();
                let open = || File::open("/proc/self/maps").map(OwnedFd::from);
                let maps = File::from(descriptors::open(open).context(what)?);
                let maps = std::io::read_to_string(maps).context(what)?;
                let head = loaded.segments[0].start;
                Ok(id == loaded.build_id && inode_at(&maps, head) == Some(inode))
            }
        }
    };
    match loaded.is_program || is_it()? {
        true => Ok(()),
        false => Err(unknown(loaded, "its file was replaced since it was loaded")),
    }
}

/// The section is where it is in memory, and has its last page for itself.
fn check_section(elf: &Elf<'_>, loaded: &Loaded, at: &Range<u64>) -> Result<()> {
    let is_ours = |s: &object::read::elf::ElfSection64<'_, '_, Endianness, &ReadCache<File>>| {
        s.name() == Ok(SECTION) && s.address() == at.start && s.size() == at.end - at.start
    };
    if !elf.sections().any(|s| is_ours(&s)) {
        return Err(unknown(
            loaded,
            "its file has no section mojim_persistent of that size",
        ));
    }
    let page = rustix::param::page_size() as u64;
    let rest = at.end..at.end.next_multiple_of(page);
    let endian = elf.endian();
    for s in elf.sections() {
        let header = s.elf_section_header();
        let flags = header.sh_flags(endian);
        let thread = flags & elf::SHF_TLS == elf::SHF_TLS;
        let lies_in = s.address() < rest.end && rest.start < s.address() + s.size();
        if flags & elf::SHF_ALLOC == elf::SHF_ALLOC && !thread && s.size() > 0 && lies_in {
            let name = s.name().unwrap_or("?");
            return refused(
                loaded,
                format!(
                    "its section {name} begins in the last page of mojim_persistent: have it aligned to {page} bytes (__attribute__((aligned({page}))) at one variable of it)"
                ),
            );
        }
    }
    Ok(())
}

/// A symbol's name without what a compiler adds to a local one.
fn plain(mut name: &str) -> &str {
    while let Some((front, last)) = name.rsplit_once('.') {
        let added =
            last.bytes().all(|b| b.is_ascii_digit()) || ["lto_priv", "llvm"].contains(&last);
        match added && !front.is_empty() {
            true => name = front,
            false => break,
        }
    }
    name
}

/// The variables of the section, if the object has names.
fn names(elf: &Elf<'_>, loaded: &Loaded, at: &Range<u64>) -> Result<Vec<Variable>> {
    let mut list = Vec::new();
    let mut anchored = false;
    for s in elf.symbols() {
        let Ok(name) = s.name() else {
            continue;
        };
        let inside = at.contains(&s.address()) || (s.address() == at.end && s.size() == 0);
        if !inside || s.is_undefined() || s.kind() != SymbolKind::Data {
            continue;
        }
        anchored |= plain(name) == ANCHOR;
        if s.size() > 0 {
            list.push(Variable {
                offset: s.address() - at.start,
                size: s.size(),
                name: plain(name).to_owned(),
            });
        }
    }
    if !anchored {
        return Ok(Vec::new());
    }
    list.sort_by(|a, b| (a.offset, &a.name).cmp(&(b.offset, &b.name)));
    let mut names: Vec<_> = list.iter().map(|v| &v.name).collect();
    names.sort();
    match names.windows(2).find(|w| w[0] == w[1]) {
        None => Ok(list),
        Some(w) => refused(
            loaded,
            format!(
                "two persistent variables have the name {}: rename one",
                w[0]
            ),
        ),
    }
}

/// The name of the variable at an offset.
fn name_at(list: &[Variable], offset: u64) -> String {
    let found = list
        .iter()
        .find(|v| (v.offset..v.offset + v.size).contains(&offset));
    match found {
        Some(v) => v.name.clone(),
        None => format!("at offset {offset} of its section"),
    }
}

/// A variable that a library exports may be another one in the program.
fn check_exported(elf: &Elf<'_>, loaded: &Loaded, at: &Range<u64>) -> Result<()> {
    if loaded.is_program {
        return Ok(());
    }
    let exported = |s: &object::read::elf::ElfSymbol64<'_, '_, Endianness, &ReadCache<File>>| {
        s.size() > 0 && !s.is_undefined() && at.contains(&s.address())
    };
    match elf.dynamic_symbols().find(exported) {
        None => Ok(()),
        Some(s) => refused(
            loaded,
            format!(
                "the library exports its persistent variable {}: a program may get a copy of its own in its place. Declare it static, or __attribute__((visibility(\"hidden\")))",
                s.name().unwrap_or("?")
            ),
        ),
    }
}

/// Initial values that are addresses: of no use in the next run.
fn check_pointers(
    elf: &Elf<'_>,
    loaded: &Loaded,
    at: &Range<u64>,
    list: &[Variable],
) -> Result<()> {
    let pointer = match elf.kind() {
        object::ObjectKind::Executable if elf.elf_header().e_type(elf.endian()) == elf::ET_EXEC => {
            fixed_pointer(elf, loaded, at)?
        }
        _ => None,
    };
    let found = pointer.map_or_else(|| relocated(elf, loaded, at), |p| Ok(Some(p)))?;
    match found {
        None => Ok(()),
        Some(address) => refused(
            loaded,
            format!(
                "the initial value of the persistent variable {} is an address, which the next run cannot use: initialise it with NULL, and set it while the program runs (to memory of a heap, which stays where it is)",
                name_at(list, address - at.start)
            ),
        ),
    }
}

/// Of a program that is linked for fixed addresses: a word whose value lies in the program.
fn fixed_pointer(elf: &Elf<'_>, loaded: &Loaded, at: &Range<u64>) -> Result<Option<u64>> {
    let section = elf.section_by_name(SECTION);
    let data = section.map(|s| s.data()).transpose();
    let data = data.map_err(|e| unknown(loaded, &e.to_string()))?;
    let words = data.unwrap_or_default().chunks_exact(8);
    let value = |w: &[u8]| u64::from_ne_bytes(w.try_into().expect("eight bytes"));
    let mut hits = words.enumerate().filter(|(_, w)| {
        let v = value(w);
        loaded.segments.iter().any(|s| s.contains(&v))
    });
    Ok(hits.next().map(|(n, _)| at.start + n as u64 * 8))
}

/// The first address of the section that the dynamic linker changes.
fn relocated(elf: &Elf<'_>, loaded: &Loaded, at: &Range<u64>) -> Result<Option<u64>> {
    let mut all = elf.dynamic_relocations().into_iter().flatten();
    if let Some((address, _)) = all.find(|(address, _)| at.contains(address)) {
        return Ok(Some(address));
    }
    let wrong = |e: object::Error| unknown(loaded, &e.to_string());
    let endian = elf.endian();
    for s in elf.sections() {
        let header = s.elf_section_header();
        let packed = header.relr(endian, elf.data()).map_err(wrong)?;
        let mut packed = packed.into_iter().flatten();
        if let Some(address) = packed.find(|address| at.contains(address)) {
            return Ok(Some(address));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_in_the_source() {
        for (symbol, name) in [
            ("n", "n"),
            ("n.0", "n"),
            ("n.12", "n"),
            ("b.lto_priv.0", "b"),
            ("f.n", "f.n"),
            (".0", ".0"),
            ("_ZL1b", "_ZL1b"),
        ] {
            assert_eq!(plain(symbol), name);
        }
    }

    /// Of two libraries without a build id the ids were the same, all zeros: one that was put in
    /// the place of the loaded one was read for it.
    #[test]
    fn a_file_is_told_from_another_by_its_inode() {
        let maps = "7f00-7f10 r--p 00000000 fe:01 77 /lib/a b.so\n\
                    7f10-7f20 rw-p 00000000 00:00 0 \n7f20-7f30 rw-p 0 00:01 9 /x (deleted)\n";
        let all = [0x7eff, 0x7f00, 0x7f0f, 0x7f10, 0x7f2f, 0x7f30].map(|a| inode_at(maps, a));
        assert_eq!(all, [None, Some(77), Some(77), Some(0), Some(9), None]);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let own = std::fs::metadata("/proc/self/exe").unwrap().ino();
        assert_eq!(inode_at(&maps, inode_at as *const () as u64), Some(own));
    }

    #[test]
    fn notes_that_are_cut_are_passed_over() {
        let mut b = Vec::new();
        for word in [4u32, 20, 3] {
            b.extend_from_slice(&word.to_ne_bytes());
        }
        b.extend_from_slice(b"GNU\0");
        b.extend_from_slice(&[9; 20]);
        for n in 0..b.len() {
            let mut id = [0; BUILD_ID];
            note(&b[..n], &mut id);
            assert_eq!(id, [0; BUILD_ID]);
        }
        let mut id = [0; BUILD_ID];
        note(&b, &mut id);
        assert_eq!(id[..20], [9; 20]);
    }
}
