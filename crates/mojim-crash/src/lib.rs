//! Whole-machine crashes of programs that acknowledge what they made durable.
//!
//! This crate takes the page cache, the disk's cache or the power away from such programs. Then
//! it compares every byte that they recover.
//!
//! Owns the workload (`workload.rs`), the subjects that run it (`subject.rs`), and five rungs of
//! `docs/reference/testing.md`:
//!
//! - page-cache loss: `cache_loss.rs`
//! - block history: `blocks.rs`
//! - power for clusters: `cluster.rs`, `cluster/`
//! - the pulled plug: `plug/`
//! - memory pressure: `plug/pressure.rs`
//!
//! `subjects.rs` opens a subject: `shipped.rs` is Mojim, `heap.rs` a program over its heap (with
//! `heap/`). `naive.rs` and `redo.rs` are other programs, the controls. `machine.rs` has the faults
//! of a broken Mojim. `cache.rs` is a processor's cache that loses its bytes, `forced.rs` a file
//! with forced unit access. `acks.rs` and `journal.rs` keep what was acknowledged. `device.rs` is a
//! disk, `sys.rs` has mounts and loop devices. `report.rs` says whether a rung counts.
//!
//! Invariant: a rung counts only if it catches the broken controls and every broken Mojim, and
//! finds no failure in `mojim` and `log`.

pub mod acks;
pub mod blocks;
mod cache;
pub mod cache_loss;
pub mod cluster;
pub mod device;
mod forced;
pub mod heap;
pub mod journal;
pub mod machine;
mod naive;
pub mod plug;
mod redo;
pub mod report;
mod shipped;
pub mod subject;
mod subjects;
pub mod sys;
pub mod workload;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use acks::Acks;
use subject::{Kind, SubjectPaths};
use workload::Model;

/// The pause between two write-backs of the page cache.
const WRITE_BACK_EVERY: Duration = Duration::from_micros(300);

/// The result of this crate's functions; any error.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Makes steps 1 to `steps`, and acknowledges each, and step 0 when everything is set up.
/// Meanwhile the page cache is written back now and then.
pub fn work(kind: Kind, place: &SubjectPaths, seed: u64, steps: u64, acks: &Acks) -> Result<()> {
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        let kernel = s.spawn(|| {
            while !over.load(Relaxed) {
                write_back(place)?;
                std::thread::sleep(WRITE_BACK_EVERY);
            }
            Ok(())
        });
        let made = make_steps(kind, place, seed, steps, acks);
        over.store(true, Relaxed);
        let wrote: std::io::Result<()> = kernel.join().expect("it does not panic");
        made?;
        Ok(wrote?)
    })
}

fn make_steps(kind: Kind, place: &SubjectPaths, seed: u64, steps: u64, acks: &Acks) -> Result<()> {
    let mut subject = subjects::open(kind, place, seed)?;
    acks.put(0)?;
    for step in 1..=steps {
        if workload::reopens(seed, step) {
            subject.close()?;
            subject = subjects::open(kind, place, seed)?;
        }
        subject.commit(&workload::changes(seed, step))?;
        acks.put(step)?;
    }
    subject.close()
}

/// Does what the kernel may do at any time: begins to write the page cache back, and
/// flushes nothing.
fn write_back(place: &SubjectPaths) -> std::io::Result<()> {
    let mut dirs = vec![place.dir.clone()];
    while let Some(dir) = dirs.pop() {
        let Some(entries) = there(std::fs::read_dir(dir))? else {
            continue;
        };
        for entry in entries {
            let entry = entry?;
            let Some(kind) = there(entry.file_type())? else {
                continue;
            };
            if kind.is_dir() {
                dirs.push(entry.path());
            // Closing any descriptor of a locked file would end its lock.
            } else if kind.is_file()
                && entry.file_name() != "lock"
                && let Some(file) = there(std::fs::File::open(entry.path()))?
            {
                sys::begin_writeback(&file)?;
            }
        }
    }
    Ok(())
}

/// `None` if the file or directory is gone, also if a file has its place, or does not exist yet.
fn there<T>(r: std::io::Result<T>) -> std::io::Result<Option<T>> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    match r {
        Ok(t) => Ok(Some(t)),
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Recovers, and returns the step after which the region is as found; it must be a step
/// from `acknowledged` to `started`.
pub fn check(
    kind: Kind,
    place: &SubjectPaths,
    model: &mut Model,
    acknowledged: u64,
    started: u64,
) -> std::result::Result<u64, String> {
    let found = subjects::recover(kind, place, model.seed())
        .map_err(|e| format!("lost: it does not open any more: {e}"))?;
    workload::judge(model, &found, acknowledged, started)
}
