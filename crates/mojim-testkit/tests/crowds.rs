//! Many files on a mount, and kills in the middle of it.
//!
//! A program makes files in batches, removes earlier batches, and asks for a sync point after each.
//! Node and mount of the primary are killed meanwhile, in turn on either node. The other one takes
//! over with names in its log that it has not applied. It must show:
//!
//! - each batch whose sync point returned is whole
//! - each batch whose removal was synced is gone
//!
//! Two variables set the size: CROWD_FILES (files, default 6,000) and CROWD_ROUNDS (rounds,
//! default 2). The long form is `CROWD_FILES=100000 CROWD_ROUNDS=4`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use mojim_testkit::await_or;
use mojim_testkit::mount::Mount;
use mojim_testkit::voters::Cluster;

/// Files of a batch: each batch has a directory.
const BATCH: u64 = 200;

fn from_env(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |v| v.parse().unwrap())
}

/// What the program was told.
#[derive(Default)]
struct Told {
    /// Batches whose sync point returned.
    made: BTreeSet<u64>,
    /// Batches of which a file may be removed.
    doomed: BTreeSet<u64>,
    /// Batches whose removal was synced.
    gone: BTreeSet<u64>,
}

fn directory(at: &Path, batch: u64) -> std::path::PathBuf {
    at.join(format!("batch-{batch}"))
}

fn content(batch: u64, file: u64) -> String {
    format!("file {file} of batch {batch}\n")
}

/// Makes batches from `next` on until a call fails, and removes every second one later.
fn make(at: &Path, next: &mut u64, told: &Mutex<Told>) -> io::Result<()> {
    loop {
        let batch = *next;
        *next += 1;
        let dir = directory(at, batch);
        fs::create_dir(&dir)?;
        for file in 0..BATCH {
            fs::write(dir.join(file.to_string()), content(batch, file))?;
        }
        File::open(&dir)?.sync_all()?;
        told.lock().unwrap().made.insert(batch);
        let Some(old) = batch.checked_sub(3).filter(|b| b % 2 == 0) else {
            continue;
        };
        // It may be one that a kill cut short.
        if told.lock().unwrap().made.contains(&old) {
            told.lock().unwrap().doomed.insert(old);
            fs::remove_dir_all(directory(at, old))?;
            File::open(at)?.sync_all()?;
            told.lock().unwrap().gone.insert(old);
        }
    }
}

/// Why a mount does not show what the program was told.
fn check(at: &Path, told: &Told) -> Result<(), String> {
    for batch in told.made.difference(&told.doomed) {
        let dir = directory(at, *batch);
        for file in 0..BATCH {
            let path = dir.join(file.to_string());
            let found = fs::read_to_string(&path);
            if found.as_ref().ok() != Some(&content(*batch, file)) {
                return Err(format!("{}: {found:?}", path.display()));
            }
        }
        let listed = fs::read_dir(&dir).map_err(|e| e.to_string())?.count() as u64;
        if listed != BATCH {
            return Err(format!("{} has {listed} names", dir.display()));
        }
    }
    let back = told.gone.iter().find(|b| directory(at, **b).exists());
    back.map_or(Ok(()), |b| Err(format!("batch {b} is back")))
}

/// Waits until this mount serves. Before anything is mounted there, not even what waits for the
/// volume, a file can be written into the directory below.
fn await_service(c: &Cluster, m: &Mount) {
    let device = |at: &Path| fs::metadata(at).map(|m| m.dev()).ok();
    let serves = || {
        let is_mounted = device(&m.at)? != device(m.at.parent()?)?;
        is_mounted.then_some(())?;
        fs::write(m.at.join("probe"), "").ok()?;
        File::open(m.at.join("probe")).ok()?.sync_all().ok()
    };
    await_or("the service", || c.logs(), serves);
}

#[test]
fn many_files_outlive_kills_in_the_middle() {
    let rounds = from_env("CROWD_ROUNDS", 2);
    let batches = from_env("CROWD_FILES", 6000) / BATCH / rounds;
    let c = Cluster::new("sync", "disk");
    let _w = c.node("w");
    let names = ["a", "b"];
    let mut nodes = names.map(|n| Some(c.node(n)));
    // A sync point of the mount's own may come between a file and its bytes.
    let mount = |node| {
        Some(Mount::waiting_with(
            &c,
            node,
            &["--commit-interval", "never"],
        ))
    };
    let mut mounts = names.map(mount);
    let told = Mutex::new(Told::default());
    let mut next = 0;
    for round in 0..rounds as usize {
        let (on, other) = (round % 2, 1 - round % 2);
        await_service(&c, mounts[on].as_ref().unwrap());
        c.await_view(names[on], names[on], Some(names[other]));
        let at = mounts[on].as_ref().unwrap().at.clone();
        let until = told.lock().unwrap().made.len() as u64 + batches;
        let mut killed = Instant::now();
        std::thread::scope(|s| {
            let maker = s.spawn(|| make(&at, &mut next, &told));
            while (told.lock().unwrap().made.len() as u64) < until {
                assert!(!maker.is_finished(), "{:?}\n{}", maker.join(), c.logs());
                std::thread::yield_now();
            }
            killed = Instant::now();
            nodes[on].take().unwrap().kill();
            mounts[on].take().unwrap().kill();
            maker.join().unwrap().unwrap_err();
        });
        let m = mounts[other].as_ref().unwrap();
        await_service(&c, m);
        let t = told.lock().unwrap();
        eprintln!(
            "{} batches of {BATCH} files, {} removed: served by {} after {:?}",
            t.made.len(),
            t.gone.len(),
            names[other],
            killed.elapsed()
        );
        assert_eq!(check(&m.at, &t), Ok(()), "{}", c.logs());
        drop(t);
        nodes[on] = Some(c.node(names[on]));
        mounts[on] = mount(names[on]);
    }
    // The look itself sees one file that is missing, and one batch that is back.
    let at = &mounts[rounds as usize % 2].as_ref().unwrap().at;
    let told = told.into_inner().unwrap();
    let (&one, &gone) = (told.made.last().unwrap(), told.gone.first().unwrap());
    fs::create_dir(directory(at, gone)).unwrap();
    assert!(check(at, &told).unwrap_err().contains("is back"));
    fs::remove_dir(directory(at, gone)).unwrap();
    fs::remove_file(directory(at, one).join("7")).unwrap();
    assert!(check(at, &told).unwrap_err().contains("/7: "));
    let [a, b] = mounts.map(Option::unwrap);
    a.end();
    b.end();
    c.assert_equal();
}
