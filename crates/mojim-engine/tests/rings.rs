//! Rings of nodes and volumes that are gone are found, and removed by a person.

use mojim_config::Config;
use mojim_config::ring_files::memory_dir;
use mojim_engine::Volume;
use mojim_linux::rings::{left_in, note};
use tempfile::TempDir;

#[test]
fn rings_of_what_is_gone_are_found() {
    let dir = TempDir::new().unwrap();
    let text = format!(
        "cluster = \"test\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n\
         [volume.w]\nmode = \"unreplicated\"\nprimary = \"a\"\n\
         [node.a]\naddress = \"127.0.0.1:1\"\ndirectory = \"{0}/a\"\nring = \"{0}\"\n\
         log = {{ medium = \"disk\", size = \"1MiB\" }}\n",
        dir.path().display()
    );
    let config = Config::parse(&text, dir.path()).unwrap();
    for v in ["v", "w"] {
        let v = Volume::attach_with(&config, "a", Some(v), |_, _| {}).unwrap();
        v.detach().unwrap();
    }
    // As programs that end without a detach leave them.
    let memory = memory_dir(&config, &config.nodes["a"]);
    for v in ["v", "w"] {
        std::fs::write(memory.join(format!("{v}.ring.0")), vec![0; 1 << 20]).unwrap();
    }
    let left = || left_in(dir.path()).unwrap();
    assert!(left().is_empty(), "{:?}", left());
    // A note that was cut off names no one.
    let file = memory.join("directory");
    let whole = std::fs::read(&file).unwrap();
    for n in [0, 1, whole.len() - 1] {
        std::fs::write(&file, &whole[..n]).unwrap();
        assert!(left().is_empty(), "{:?}", left());
    }
    note(&config, &config.nodes["a"]).unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), whole);
    std::fs::remove_dir_all(dir.path().join("a/.mojim/w")).unwrap();
    let found = left();
    assert_eq!(found.len(), 1);
    assert!(found[0].path.ends_with("w.ring.0") && found[0].bytes == 1 << 20);
    found[0].remove().unwrap();
    assert!(left().is_empty());
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    let found = left();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].remove().unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
