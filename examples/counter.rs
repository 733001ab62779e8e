//! A counter that survives: `cargo run --release -p mojim --example counter`
use mojim::Volume;

fn main() -> mojim::Result<()> {
    let volume = Volume::attach("mojim.toml", "a", None)?;
    let mut region = volume.map("counter", 8)?;
    let n = &mut region.as_mut_slice::<u64>()[0];
    *n += 1;
    mojim::sync(n)?; // atomic, durable, replicated
    println!("run {n}");
    drop(region);
    volume.detach()
}
