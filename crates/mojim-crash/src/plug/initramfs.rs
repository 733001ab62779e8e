//! The machine's first file system: this program, its libraries, and the
//! modules of the kernel that it needs, as a cpio archive ("newc").

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::boot::MODULES;
use crate::Result;

/// In the order of loading. A module that is built into the kernel has no file.
const NEEDED: [&str; 15] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "libnvdimm",
    "nfit",
    "nd_btt",
    "nd_pmem",
    "crc32c_generic",
    "crc16",
    "mbcache",
    "jbd2",
    "ext4",
];

/// An unpacked package of a kernel.
pub(super) struct Kernel {
    pub(super) image: PathBuf,
    modules: Vec<PathBuf>,
}

impl Kernel {
    /// Finds the package below `dir`, or says what is missing.
    pub(super) fn find(dir: &Path) -> Result<Kernel> {
        let none = || format!("no kernel in {}", dir.display());
        let mut files = Vec::new();
        walk(dir, &mut files).map_err(|e| format!("{}: {e}", none()))?;
        let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
        let image = files
            .iter()
            .find(|p| name(p).is_some_and(|n| n.starts_with("vmlinuz")))
            .ok_or_else(none)?
            .clone();
        let modules: Vec<PathBuf> = NEEDED
            .iter()
            .filter_map(|module| {
                let is = |p: &&PathBuf| {
                    name(p).is_some_and(|n| n.split_once(".ko").is_some_and(|(n, _)| n == *module))
                };
                files.iter().find(is).cloned()
            })
            .collect();
        Ok(Kernel { image, modules })
    }
}

fn walk(dir: &Path, out: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), out)?;
        } else {
            out.push(entry.path());
        }
    }
    Ok(())
}

/// Builds the archive, with `program` as the init program. `scratch`: a directory for
/// intermediate files.
pub(super) fn build(kernel: &Kernel, program: &Path, scratch: &Path) -> Result<Vec<u8>> {
    let stripped = scratch.join("init");
    let strip = Command::new("strip")
        .args(["-o".as_ref(), stripped.as_os_str(), program.as_os_str()])
        .status();
    // Stripping only makes the program smaller, so it may fail.
    let init = match strip {
        Ok(s) if s.success() => stripped,
        _ => program.to_path_buf(),
    };
    let mut archive = Archive::default();
    archive.file("init", &std::fs::read(init)?, 0o755);
    for library in libraries(program)? {
        let name = library.strip_prefix("/")?.to_string_lossy().into_owned();
        archive.file(&name, &std::fs::read(&library)?, 0o755);
    }
    for (i, module) in kernel.modules.iter().enumerate() {
        let name = module.file_name().expect("a file").to_string_lossy();
        let name = format!("{}/{i:02}-{name}", &MODULES[1..]);
        archive.file(&name, &std::fs::read(module)?, 0o644);
    }
    Ok(archive.end())
}

fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let out = Command::new("ldd").arg(program).output()?;
    let text = String::from_utf8(out.stdout)?;
    let paths = text.split_ascii_whitespace().filter(|w| w.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}

/// A cpio archive under construction.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: Vec<String>,
}

impl Archive {
    fn file(&mut self, name: &str, bytes: &[u8], mode: u32) {
        for (end, _) in name.match_indices('/') {
            let dir = name[..end].to_string();
            if !self.directories.contains(&dir) {
                self.entry(&dir, &[], 0o040_755);
                self.directories.push(dir);
            }
        }
        self.entry(name, bytes, 0o100_000 | mode);
    }

    fn entry(&mut self, name: &str, bytes: &[u8], mode: u32) {
        self.entries += 1;
        let (size, name_size) = (bytes.len() as u32, name.len() as u32 + 1);
        // Inode, mode, owner, group, links, time, size, device (4), length of
        // the name, no sum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(bytes);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", &[], 0);
        self.bytes
    }
}
