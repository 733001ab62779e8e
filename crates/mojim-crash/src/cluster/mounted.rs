//! The program of a cluster that works in a mount: ordinary calls on files and names.
//!
//! Owns how each kind of step is made there. Each thread has a file and a directory of its own.
//! Invariant: a step is begun in the journal before its first call, and acknowledged after the
//! call has returned that commits it.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Mode, RenameFlags, XattrFlags};
use rustix::mm::{MsyncFlags, ProtFlags, mmap, munmap};

use super::names::{self, Call, Step, Sync, TOP, Tree};
use super::parts::{Work, in_threads};
use super::program::{Act, PART, Slip, act, changes};
use super::setup::{directory_of, file_of};
use super::shown::MARK;
use crate::Result;
use crate::journal::Journal;

/// Makes the steps of all threads on files in a mount, and stays until the process is killed.
pub fn run(w: &Work, at: &Path, slip: Option<Slip>) -> Result<()> {
    // The permissions that are found are those that were asked for.
    rustix::process::umask(Mode::empty());
    for thread in 0..w.threads {
        let dir = at.join(directory_of(thread));
        rustix::fs::mkdir(&dir, Mode::from_raw_mode(TOP))?;
        call(&dir, &Call::Mark(String::new(), 0))?;
    }
    // What is synced here has the directories too.
    for thread in 0..w.threads {
        let file = File::create(at.join(file_of(thread)))?;
        file.set_len(PART as u64)?;
        file.sync_all()?;
    }
    let journal = Journal::open(&w.journal)?;
    journal.ready();
    let work = |thread: usize| -> Result<()> {
        let dir = at.join(directory_of(thread));
        let mut tree = Tree::new();
        for step in 1..=w.steps {
            let open;
            match act(w.seed, thread, step) {
                Act::Names => {
                    let next = names::step(w.seed, thread, step, &tree);
                    journal.begin(thread, step);
                    open = make(&dir, &next, slip)?;
                    next.calls.iter().for_each(|c| tree.apply(c));
                }
                act => {
                    open = None;
                    journal.begin(thread, step);
                    let path = at.join(file_of(thread));
                    let all = pieces(w.seed, thread, step);
                    if slip == Some(Slip::HalfSteps) {
                        write_and_fsync(&path, &all[..1])?;
                    }
                    match act {
                        Act::Replace => rename_over(at, &path, &all)?,
                        Act::Store => store_and_msync(&path, &all)?,
                        _ => write_and_fsync(&path, &all)?,
                    }
                }
            }
            journal.acknowledge(thread, step);
            drop(open);
        }
        Ok(())
    };
    in_threads(w.threads, &work)
}

/// What a step writes into the thread's file.
fn pieces(seed: u64, thread: usize, step: u64) -> Vec<Piece> {
    let word = (0, step.to_le_bytes().to_vec());
    let more = changes(seed, thread, step);
    let more = more.into_iter().map(|c| (c.at, c.bytes));
    [word].into_iter().chain(more).collect()
}

/// Makes a step on names in the thread's directory. Returns a file that it removed, still open.
fn make(top: &Path, step: &Step, slip: Option<Slip>) -> Result<Option<File>> {
    let mut open = None;
    for (i, c) in step.calls.iter().enumerate() {
        if slip == Some(Slip::HalfNames) && i > 0 && i == step.calls.len() / 2 {
            File::open(top)?.sync_all()?;
        }
        open = call(top, c).map_err(|e| format!("{c:?}: {e}"))?.or(open);
    }
    match (&step.sync, slip) {
        // Only names: a later sync point has all of them.
        (Sync::Dir(_), Some(Slip::UnsyncedNames)) => {}
        (Sync::Dir(path) | Sync::File(path), _) => File::open(top.join(path))?.sync_all()?,
    }
    Ok(open)
}

/// Makes a call; if it removes a file that is to stay open, returns that.
fn call(top: &Path, call: &Call) -> Result<Option<File>> {
    let at = |path: &String| top.join(path);
    match call {
        Call::Mark(path, mark) => {
            let mark = mark.to_le_bytes();
            rustix::fs::setxattr(at(path), MARK, &mark, XattrFlags::empty())?;
        }
        Call::Mkdir(path, mode) => rustix::fs::mkdir(at(path), Mode::from_raw_mode(*mode))?,
        Call::Create(path, mode) => {
            let mut how = File::options();
            how.write(true).create_new(true).mode(*mode);
            how.open(at(path))?;
        }
        Call::Write(path, bytes) => {
            let file = File::options().write(true).open(at(path))?;
            file.write_all_at(bytes, 0)?;
            if file.metadata()?.len() > bytes.len() as u64 {
                file.set_len(bytes.len() as u64)?;
            }
        }
        Call::Unlink(path, stays_open) => {
            let open = match stays_open {
                true => Some(File::open(at(path))?),
                false => None,
            };
            std::fs::remove_file(at(path))?;
            return Ok(open);
        }
        Call::Rmdir(path) => std::fs::remove_dir(at(path))?,
        Call::Link(from, to) => std::fs::hard_link(at(from), at(to))?,
        Call::Symlink(to, path) => std::os::unix::fs::symlink(to, at(path))?,
        Call::Rename(from, to) => std::fs::rename(at(from), at(to))?,
        Call::Exchange(a, b) => {
            let (a, b, here) = (at(a), at(b), rustix::fs::CWD);
            rustix::fs::renameat_with(here, a, here, b, RenameFlags::EXCHANGE)?;
        }
        Call::Chmod(path, mode) => {
            std::fs::set_permissions(at(path), Permissions::from_mode(*mode))?;
        }
    }
    Ok(None)
}

/// Bytes, and where they go in a thread's file.
type Piece = (usize, Vec<u8>);

fn write_and_fsync(path: &Path, all: &[Piece]) -> Result<()> {
    let file = File::options().write(true).open(path)?;
    for (at, bytes) in all {
        file.write_all_at(bytes, *at as u64)?;
    }
    Ok(file.sync_data()?)
}

fn store_and_msync(path: &Path, all: &[Piece]) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new shared mapping of a file as long as a part, which only this thread changes.
    let part = unsafe {
        mmap(
            std::ptr::null_mut(),
            PART,
            prot,
            rustix::mm::MapFlags::SHARED,
            &file,
            0,
        )
    }?;
    for (at, bytes) in all {
        assert!(at + bytes.len() <= PART);
        // SAFETY: inside the mapping.
        unsafe {
            part.cast::<u8>()
                .add(*at)
                .copy_from(bytes.as_ptr(), bytes.len())
        };
    }
    // SAFETY: the mapping; it is not used afterwards.
    unsafe {
        let synced = rustix::mm::msync(part, PART, MsyncFlags::SYNC);
        munmap(part, PART)?;
        Ok(synced?)
    }
}

/// As editors do: the whole file under another name, which then takes the place of the old one.
fn rename_over(dir: &Path, path: &Path, all: &[Piece]) -> Result<()> {
    let mut whole = std::fs::read(path)?;
    for (at, bytes) in all {
        whole[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    let new = path.with_extension("new");
    std::fs::write(&new, whole)?;
    std::fs::rename(&new, path)?;
    Ok(File::open(dir)?.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::super::shown;
    use super::*;

    /// The model beside what the kernel makes of the same calls in a plain directory.
    #[test]
    fn the_model_is_as_a_plain_directory() {
        let top = std::env::temp_dir().join(format!("mojim-names-{}", std::process::id()));
        std::fs::create_dir(&top).unwrap();
        let marked = call(&top, &Call::Mark(String::new(), 0));
        if marked.is_ok() {
            let mask = rustix::process::umask(Mode::empty());
            std::fs::set_permissions(&top, Permissions::from_mode(TOP)).unwrap();
            let mut tree = Tree::new();
            for step in 1..=300 {
                let next = names::step(4, 2, step, &tree);
                make(&top, &next, None).unwrap();
                next.calls.iter().for_each(|c| tree.apply(c));
                let found = shown::read(&top).unwrap();
                let (Sync::Dir(path) | Sync::File(path)) = &next.sync;
                assert!(found.contains_key(path));
                assert_eq!(found, tree.entries(), "step {step}: {:?}", next.calls);
            }
            rustix::process::umask(mask);
        }
        std::fs::remove_dir_all(&top).unwrap();
        if let Err(e) = marked {
            // Said also by a test that passes.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "SKIPPED: extended attributes here: {e}");
        }
    }
}
