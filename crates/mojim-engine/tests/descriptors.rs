//! A program that has taken every descriptor. Alone in its process, whose limit it uses up.

mod support;

use mojim_engine::{Volume, msync};
use support::{Dir, alone, map};

/// Once, a change of names then failed behind its record: the volume was poisoned.
#[test]
fn names_change_while_no_descriptor_is_left() {
    let dir = Dir::new("descriptors");
    let config = alone(&dir.0, "", "1MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = map(&v, 4096);
    let mut all = Vec::new();
    while let Ok(f) = std::fs::File::open("/dev/null") {
        all.push(f);
    }
    for name in ["x", "d/y"] {
        v.create(name).unwrap();
        v.truncate(name, 4096).unwrap();
    }
    v.rename("x", "z").unwrap();
    v.remove("d/y").unwrap();
    // SAFETY: inside the mapping, which only this thread uses.
    unsafe { m.ptr.write_volatile(1) };
    msync(m.ptr, m.len).unwrap();
    drop(all);
    v.create("w").unwrap();
    v.detach().unwrap();
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let mut names: Vec<_> = v.files().into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, ["f", "w", "z"]);
    v.detach().unwrap();
}
