//! A counter that survives: `cargo run --release -p mojim --example counter`
use mojim::{MapFlags, Volume, msync};

fn main() -> mojim::Result<()> {
    let volume = Volume::attach("mojim.toml".as_ref(), "a", None)?;
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let n = volume.map("counter", 8, flags)?.ptr.cast::<u64>();
    // SAFETY: eight bytes of the mapping, which only this thread uses.
    let run = unsafe { (*n += 1, *n).1 };
    msync(n.cast(), 8)?; // atomic, durable, replicated
    println!("run {run}");
    volume.detach()
}
