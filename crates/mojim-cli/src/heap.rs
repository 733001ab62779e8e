//! `mojim heap`: what is in a persistent heap, whether it is sound, and other addresses for it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim::{MapFlags, Volume, msync};
use mojim_heap::{HeapReport, check, check_file, move_heap};
use serde_json::{Value, json};

use crate::ask::load;
use crate::failure::{Done, Failure};
use crate::output;

/// How often a file that a program may be changing is read, before what is found counts.
const LOOKS: u32 = 5;
const BETWEEN: Duration = Duration::from_millis(300);

/// Inspect persistent heaps, and move them to other addresses.
#[derive(clap::Args)]
pub struct HeapCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Info(Info),
    Check(Check),
    Move(Move),
}

/// Show the addresses, the roots, and the number of blocks by size of a heap.
///
/// The command reads the file as the node has it on disk. The last sync points of a running
/// program may be missing in it.
#[derive(clap::Args)]
struct Info {
    /// The heap's file, in the volume's directory of a node, or a copy of it.
    file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Check that a heap is sound: its header, its slab tables, its blocks and its roots.
///
/// Exit code 1: the heap is not sound. A program may use the heap meanwhile. A part that looks
/// wrong is read again several times, because the file may be in the middle of a change.
#[derive(clap::Args)]
struct Check {
    /// The heap's file, in the volume's directory of a node, or a copy of it.
    file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Move a heap to other addresses, for a program that cannot map its present ones.
///
/// The command attaches to the volume, so no program may be attached. The move is one sync point.
///
/// In each allocated block, it changes every aligned word of 8 bytes whose value is an address of
/// the heap. It does not find pointers in another form: packed, compressed, or stored as a
/// difference. It also changes a number that has such a value by chance.
#[derive(clap::Args)]
struct Move {
    /// The name of the heap's file in the volume.
    file: String,
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node, which must be the volume's primary.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// The volume, if the configuration has several.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// The new first address, for example 0x200000000000. It is a multiple of 1 MiB.
    #[arg(long, value_name = "ADDRESS", value_parser = number)]
    to: u64,
    /// Bytes of addresses that the heap may use in future [default: as before].
    #[arg(long, value_name = "BYTES", value_parser = number)]
    capacity: Option<u64>,
    /// Only print how much would change.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(&hex.replace('_', ""), 16),
        None => text.parse(),
    };
    parsed.map_err(|e| e.to_string())
}

/// What is in a file; what is wrong is there each time that it is read.
fn look(path: &Path) -> Result<HeapReport, Failure> {
    let mut looks = 0;
    loop {
        looks += 1;
        let found = check_file(path);
        let sound = found.as_ref().is_ok_and(|r| r.problems.is_empty());
        if sound || looks == LOOKS {
            return Ok(found?);
        }
        std::thread::sleep(BETWEEN);
    }
}

fn as_json(r: &HeapReport) -> Value {
    let classes = r.classes.iter().map(|c| {
        json!({"size": (c.size > 0).then_some(c.size), "slabs": c.slabs, "blocks": c.blocks,
               "used": c.used, "bytes": c.bytes, "used_bytes": c.used_bytes})
    });
    let roots = r
        .roots
        .iter()
        .map(|r| json!({"name": r.name, "type": r.kind, "address": format!("{:#x}", r.pointer)}));
    json!({
        "address": format!("{:#x}", r.base), "capacity": r.capacity, "size": r.size,
        "chunks": r.chunks, "tables": r.tables, "used_blocks": r.used_blocks(),
        "used_bytes": r.used_bytes(), "free": r.free, "longest_free": r.longest_free,
        "classes": classes.collect::<Vec<_>>(), "roots": roots.collect::<Vec<_>>(),
        "problems": r.problems,
    })
}

impl HeapCommand {
    /// Runs it.
    pub fn run(self) -> Done {
        match self.what {
            What::Info(w) => w.run(),
            What::Check(w) => w.run(),
            What::Move(w) => w.run(),
        }
    }
}

impl Info {
    fn run(self) -> Done {
        let r = look(&self.file)?;
        match self.json {
            true => output::json(&as_json(&r))?,
            false => output::text(&r.to_string())?,
        }
        Ok(0)
    }
}

impl Check {
    fn run(self) -> Done {
        let r = look(&self.file)?;
        let sound = r.problems.is_empty();
        if self.json {
            output::json(&json!({"sound": sound, "problems": r.problems}))?;
        } else if sound {
            output::text(&format!(
                "sound: {} blocks, {} roots\n",
                r.used_blocks(),
                r.roots.len()
            ))?;
        } else {
            output::text(&(r.problems.join("\n") + "\n"))?;
        }
        Ok(u8::from(!sound))
    }
}

impl Move {
    fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = Volume::attach_with(&config, &self.name, self.volume.as_deref(), |_, _| {})?;
        let moved = self.within(&volume);
        let detached = volume.detach();
        let report = moved?;
        detached?;
        match self.json {
            true => output::json(&report)?,
            false => output::text(&format!(
                "{} {} pointers ({} of them not into a block) and {} roots\n",
                if self.dry_run {
                    "would change"
                } else {
                    "changed"
                },
                report["pointers"],
                report["stray"],
                report["roots"]
            ))?,
        }
        Ok(0)
    }

    fn within(&self, volume: &Volume) -> Result<Value, Failure> {
        let flags = MapFlags {
            atomic: true,
            read_only: self.dry_run,
            ..MapFlags::default()
        };
        let m = volume.map(&self.file, 0, flags)?;
        // SAFETY: the mapping has so many bytes, and stays until the volume is detached. The stores
        // below go through the pointer, to words that are not read again.
        let bytes = unsafe { std::slice::from_raw_parts(m.ptr, m.len) };
        let found = check(bytes).map_err(|e| Failure::failed(format!("{}: {e}", self.file)))?;
        let capacity = self.capacity.unwrap_or(found.capacity);
        let mut changes: Vec<(usize, Vec<u8>)> = Vec::new();
        let moved = move_heap(bytes, self.to, capacity, &mut |at, new| {
            changes.push((at, new.to_vec()));
        });
        let moved = moved.map_err(|e| Failure::failed(format!("{}: {e}", self.file)))?;
        if !self.dry_run {
            for (at, new) in changes {
                // SAFETY: inside the mapping, which nobody else uses, and `bytes` is not used any more.
                unsafe { std::ptr::copy_nonoverlapping(new.as_ptr(), m.ptr.add(at), new.len()) };
            }
            msync(m.ptr, m.len)?;
        }
        Ok(
            json!({"pointers": moved.pointers, "stray": moved.stray, "roots": moved.roots,
                  "from": format!("{:#x}", found.base), "to": format!("{:#x}", self.to),
                  "capacity": capacity, "changed": !self.dry_run}),
        )
    }
}
