//! Every subject keeps what it acknowledged where nothing crashes, and its
//! recovery repeats nothing and loses nothing.

use std::path::PathBuf;

use mojim_crash::acks::Acks;
use mojim_crash::subject::{Kind, SubjectPaths};
use mojim_crash::workload::Model;
use mojim_crash::{check, work};

struct Dirs(PathBuf);

impl Drop for Dirs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn what_is_not_crashed_is_all_there() {
    let tmp = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let top = Dirs(tmp.join(format!("mojim-crash-{}", std::process::id())));
    for (i, (kind, name)) in Kind::ALL.into_iter().enumerate() {
        let seed = i as u64;
        let mut place = SubjectPaths {
            dir: top.0.join(name),
            ring: top.0.join(format!("{name}.ring")),
            medium: "disk".into(),
            forced: None,
        };
        std::fs::create_dir_all(&place.dir).unwrap();
        let sink = top.0.join(format!("{name}.acks"));
        std::fs::write(&sink, [0; 4096]).unwrap();
        let acks = Acks::open(&format!("{}@0", sink.display())).unwrap();
        work(kind, &place, seed, 40, &acks).unwrap();
        let said = mojim_crash::acks::of_sector(&std::fs::read(&sink).unwrap());
        assert_eq!(said, Some(40));
        let mut model = Model::new(seed);
        for again in 0..2 {
            place.ring = top.0.join(format!("{name}.ring.{again}"));
            assert_eq!(check(kind, &place, &mut model, 40, 40), Ok(40), "{name}");
        }
        let e = check(kind, &place, &mut model, 41, 42).unwrap_err();
        assert!(e.starts_with("lost"), "{name}: {e}");
    }
}
