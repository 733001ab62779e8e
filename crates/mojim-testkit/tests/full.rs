//! Disks that have no room: who asks for too much is told, what makes room is not refused, and
//! nobody has to do anything but make room. Needs root, for small file systems.

// Seen to fail, each by a defect made on purpose or found:
// - the mirror's room, or what waits, left out of the count
// - the catalogue not read again after there was no room
// - room for names that anything takes, or that is not kept again at once
// - a primary that waits for room without a word

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::mount::{Mount, Small};
use mojim_testkit::rng::Rng;
use mojim_testkit::{await_or, await_that};

fn is_root() -> bool {
    let is = rustix::process::getuid().is_root();
    if !is {
        eprintln!("only root can make a small file system: nothing was tested");
    }
    is
}

fn open(at: &Path) -> File {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true).open(at).unwrap()
}

/// How often `step` succeeded before it found no room.
fn until_full(mut step: impl FnMut(u64) -> std::io::Result<()>) -> u64 {
    let mut done = 0;
    loop {
        match step(done) {
            Ok(()) => done += 1,
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::ENOSPC), "after {done}: {e}");
                return done;
            }
        }
    }
}

/// What was made room for is used again, a mount comes up again after a kill, and the copies are
/// equal.
fn all_goes_on(c: &Cluster, m: Mount, f: &File) {
    f.set_len(0).unwrap();
    f.sync_all().unwrap();
    await_that("room", || f.write_all_at(&[1; 1 << 20], 0).ok());
    f.sync_all().unwrap();
    // Else the mirror still applies, and the next mount finds it silent.
    c.assert_equal();
    m.kill();
    let m = Mount::new(c, "a", &[]);
    assert_eq!(fs::metadata(m.at.join("f")).unwrap().len(), 1 << 20);
    m.end();
    c.assert_equal();
}

/// Room was counted in bytes: 40,000 bytes, each in a block of its own, were accepted where 10,000
/// blocks are free. Then nothing could be applied any more, on either node, nor removed, and no
/// mount came up again.
#[test]
fn a_byte_takes_a_block_on_both_nodes() {
    if !is_root() {
        return;
    }
    for node in ["a", "b"] {
        let c = Cluster::new(SYNC);
        let _small = Small::ext4(c.dir.join(node), 64, 2000);
        let _a = c.node("a");
        let _b = c.node("b");
        let m = Mount::new(&c, "a", &[]);
        let f = open(&m.at.join("f"));
        f.set_len(1 << 30).unwrap();
        let written = until_full(|n| {
            assert!(n < 40_000, "the disk of {node} has no such room");
            if n % 1000 == 999 {
                f.sync_all().unwrap();
            }
            f.write_all_at(&[1], n * 4096)
        });
        f.sync_all().unwrap();
        assert!((4000..12_000).contains(&written), "{node}: {written}");
        all_goes_on(&c, m, &f);
    }
}

/// The same with files of one byte: each takes a block, a file of the disk, and its name in a
/// catalogue that is written whole beside the old one.
#[test]
fn a_small_file_takes_a_file_and_a_block_on_both_nodes() {
    if !is_root() {
        return;
    }
    for (node, mib, files) in [("a", 40, 800), ("b", 40, 800), ("b", 72, 100_000)] {
        let c = Cluster::new(SYNC);
        let _small = Small::ext4(c.dir.join(node), mib, files);
        let _a = c.node("a");
        let _b = c.node("b");
        let m = Mount::new(&c, "a", &[]);
        let f = open(&m.at.join("f"));
        let dir = m.at.join("d");
        fs::create_dir(&dir).unwrap();
        let made = until_full(|n| {
            assert!(n < 20_000, "the disk of {node} has no such room");
            fs::write(dir.join(n.to_string()), b"x")
        });
        f.sync_all().unwrap();
        assert!((300..files).contains(&made), "{node}: {made} of {files}");
        fs::remove_dir_all(&dir).unwrap();
        all_goes_on(&c, m, &f);
    }
}

/// Writes to the disk below `dir` until it has nothing left, also for root.
fn fill(dir: &Path) -> PathBuf {
    let at = dir.join("filler");
    let f = open(&at);
    let mut len = 0;
    for piece in [1 << 20, 4096] {
        while rustix::fs::fallocate(&f, rustix::fs::FallocateFlags::empty(), len, piece).is_ok() {
            len += piece;
        }
    }
    at
}

/// Somebody else takes all room, also that of root. What is removed is applied all the same, from
/// room that the copy keeps. What was committed and found no room poisoned the volume: the mount
/// had to be ended, and no other came up before there was room.
#[test]
fn a_disk_that_others_fill_stops_nothing_for_good() {
    if !is_root() {
        return;
    }
    for node in ["a", "b"] {
        let c = Cluster::new(SYNC);
        let _small = Small::ext4(c.dir.join(node), 64, 2000);
        let a = c.node("a");
        let b = c.node("b");
        let m = Mount::new(&c, "a", &[]);
        let [f, g] = ["f", "g"].map(|n| open(&m.at.join(n)));
        for file in [&f, &g] {
            file.write_all_at(&[1; 1 << 20], 0).unwrap();
            file.sync_all().unwrap();
        }
        let kept = c.dir.join(node).join(".mojim/v/reserve.3");
        // What is committed and not applied would need the room that others take.
        await_that("what was written, applied", || {
            let has =
                |n: &str| fs::metadata(c.dir.join(node).join("v").join(n)).map(|m| m.blocks());
            let whole = |n: &str| has(n).is_ok_and(|blocks| blocks * 512 >= 1 << 20);
            (whole("f") && whole("g")).then_some(())
        });
        let is_kept = || fs::metadata(&kept).is_ok_and(|m| m.blocks() > 0);
        await_that("room that is kept", || is_kept().then_some(()));
        let filler = fill(&c.dir.join(node));
        drop(g);
        fs::remove_file(m.at.join("g")).unwrap();
        f.sync_all().unwrap();
        let gone = c.dir.join(node).join("v/g");
        await_that("the removal", || (!gone.exists()).then_some(()));
        // What takes the place of other bytes goes on.
        f.write_all_at(&[2; 4096], 0).unwrap();
        f.sync_all().unwrap();
        // The primary hears of the mirror's room now and then.
        await_that("the refusal", || {
            let refused = fs::write(m.at.join("new"), b"x").err()?;
            assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
            Some(())
        });
        let said = mojim_testkit::text(&c.mojim("status", &[]).stdout);
        assert!(said.contains("are kept for what makes room"), "{said}");
        fs::remove_file(&filler).unwrap();
        await_that("room", || fs::write(m.at.join("new"), b"x").ok());
        all_goes_on(&c, m, &f);
        for daemon in [a, b] {
            assert!(!daemon.errors().contains("poisoned"), "{}", daemon.errors());
        }
    }
}

/// Takes all that a disk has, again and again: its files, and its bytes.
fn take_all(dir: &Path, turn: u32) {
    let bytes = open(&dir.join("filler"));
    let is_made = |n: &u32| fs::write(dir.join(format!("filler-{turn}-{n}")), b"").is_ok();
    let _ = (0..).take_while(is_made).count();
    let mut len = bytes.metadata().unwrap().len();
    for piece in [1 << 20, 4096] {
        let none = rustix::fs::FallocateFlags::empty();
        while rustix::fs::fallocate(&bytes, none, len, piece).is_ok() {
            len += piece;
        }
    }
}

/// The first removal on a full disk took all room that was kept, for whatever came next, and it was
/// kept again only when the disk had plenty. Here others take all that each removal frees, bytes and
/// files: the next one found nothing, and with it all waited until the others made room.
#[test]
fn removals_go_on_where_others_take_what_they_free() {
    if !is_root() {
        return;
    }
    for node in ["a", "b"] {
        let c = Cluster::new(SYNC);
        let _small = Small::ext4(c.dir.join(node), 64, 600);
        let a = c.node("a");
        let b = c.node("b");
        let m = Mount::new(&c, "a", &[]);
        let dir = c.dir.join(node);
        let kept: Vec<_> = (0..4)
            .map(|n| dir.join(format!(".mojim/v/reserve.{n}")))
            .collect();
        let blocks = |at: &Path| fs::metadata(at).map_or(0, |m| m.blocks());
        let files: Vec<_> = (0..6).map(|n| format!("g{n}")).collect();
        let f = open(&m.at.join("f"));
        f.write_all_at(&[1; 1 << 20], 0).unwrap();
        for name in &files {
            fs::write(m.at.join(name), [1; 4096]).unwrap();
        }
        f.sync_all().unwrap();
        await_that("what was written, applied", || {
            let all = files.iter().all(|n| blocks(&dir.join("v").join(n)) > 0);
            (all && blocks(&dir.join("v/f")) > 2000).then_some(())
        });
        let is_kept = |which: &[PathBuf]| which.iter().all(|at| blocks(at) > 0).then_some(());
        await_that("room that is kept", || is_kept(&kept));
        for (turn, name) in files.iter().enumerate() {
            take_all(&dir, turn as u32);
            fs::remove_file(m.at.join(name)).unwrap();
            f.sync_all().unwrap();
            let gone = dir.join("v").join(name);
            await_that("the removal", || (!gone.exists()).then_some(()));
            await_that("room kept again", || is_kept(&kept[2..]));
        }
        take_all(&dir, 100);
        f.set_len(4096).unwrap();
        f.sync_all().unwrap();
        await_that("the cut", || (blocks(&dir.join("v/f")) < 100).then_some(()));
        for at in fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()) {
            if at.to_string_lossy().contains("filler") {
                fs::remove_file(at).unwrap();
            }
        }
        await_that("room", || fs::write(m.at.join("new"), b"x").ok());
        all_goes_on(&c, m, &f);
        for daemon in [a, b] {
            assert!(!daemon.errors().contains("poisoned"), "{}", daemon.errors());
        }
    }
}

/// While what was committed on the primary waited for room, `mojim status` said nothing of it, and no
/// event told of it.
#[test]
fn a_primary_that_waits_for_room_is_told() {
    if !is_root() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _small = Small::ext4(c.dir.join("a"), 64, 600);
    let a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let f = open(&m.at.join("f"));
    // Others have to be faster than whoever applies, which is a matter of luck.
    let filler = await_that("what waits for room", || {
        f.set_len(0).unwrap();
        f.sync_all().unwrap();
        f.write_all_at(&[1; 8 << 20], 0).ok()?;
        f.sync_all().unwrap();
        let filler = fill(&c.dir.join("a"));
        let now = || c.says("a")["waits_for_room"] == true;
        let waits = (0..20).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            now()
        });
        if !waits {
            fs::remove_file(&filler).unwrap();
        }
        waits.then_some(filler)
    });
    await_that("the event", || {
        let since = c.says("a")["since"]["disk_full"].as_u64();
        since.map(|_| ())
    });
    let said = mojim_testkit::text(&c.mojim("status", &[]).stdout);
    assert!(said.contains("waits in the log"), "{said}");
    await_that("the event in the log", || {
        a.errors().contains("disk_full").then_some(())
    });
    fs::remove_file(filler).unwrap();
    await_that("room", || {
        (c.says("a")["waits_for_room"].is_null()).then_some(())
    });
    all_goes_on(&c, m, &f);
}

/// What a file has: which content, and how long it is. `None`: there is none.
type Has = Option<(u64, u64)>;

/// Files that one thread changes, and what they have.
struct Files {
    dir: PathBuf,
    draws: Rng,
    has: Vec<Has>,
    contents: u64,
    refused: u64,
}

fn content(of: u64, len: u64) -> Vec<u8> {
    let word = |n: u64| (of.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ n).to_le_bytes();
    let mut all: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    all.truncate(len as usize);
    all
}

impl Files {
    fn new(dir: PathBuf, seed: u64) -> Files {
        fs::create_dir(&dir).unwrap();
        Files {
            dir,
            draws: Rng::new(seed),
            has: vec![None; 12],
            contents: seed << 32,
            refused: 0,
        }
    }

    /// Whether there was room, and the mirror went on. Nothing else may fail.
    fn may_lack<T>(&mut self, done: std::io::Result<T>) -> Option<T> {
        match done {
            Ok(done) => Some(done),
            Err(e) => {
                let code = e.raw_os_error();
                let lacks = [Some(libc::ENOSPC), Some(libc::ETIMEDOUT)].contains(&code);
                assert!(lacks, "{e}");
                self.refused += 1;
                None
            }
        }
    }

    /// What makes room: it may wait for the mirror, and is never refused for want of room.
    fn makes_room(&mut self, mut done: impl FnMut() -> std::io::Result<()>) {
        await_that("what makes room", || match done() {
            Ok(()) => Some(()),
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::ETIMEDOUT), "{e}");
                None
            }
        });
    }

    fn sync(&mut self) {
        let synced = File::open(&self.dir).unwrap().sync_all();
        self.may_lack(synced);
    }

    fn step(&mut self) {
        let k = self.draws.below(self.has.len() as u64) as usize;
        let at = self.dir.join(k.to_string());
        match (self.draws.below(10), self.has[k]) {
            (0..2, Some(_)) => {
                self.makes_room(|| fs::remove_file(&at));
                self.has[k] = None;
            }
            (2, Some((of, len))) => {
                let less = self.draws.below(len + 1);
                let f = open(&at);
                self.makes_room(|| f.set_len(less));
                self.has[k] = Some((of, less));
            }
            _ => self.replace(k, &at),
        }
        if self.draws.below(3) == 0 {
            self.sync();
        }
    }

    /// As programs replace a file: written beside it, and renamed.
    fn replace(&mut self, k: usize, at: &Path) {
        self.contents += 1;
        let (of, len) = (self.contents, self.draws.below(200_000));
        let beside = self.dir.join("new");
        let made = File::create(&beside);
        let Some(f) = self.may_lack(made) else {
            return;
        };
        let mut written = f.write_all_at(&content(of, len), 0);
        if written.is_ok() && self.draws.below(2) == 0 {
            written = f.sync_all();
        }
        drop(f);
        if self.may_lack(written).is_none() {
            return self.makes_room(|| fs::remove_file(&beside));
        }
        let renamed = fs::rename(&beside, at);
        if self.may_lack(renamed).is_some() {
            self.has[k] = Some((of, len));
        }
    }

    /// Every file has what it is to have.
    fn check(&self) -> Result<(), String> {
        for (k, has) in self.has.iter().enumerate() {
            let at = self.dir.join(k.to_string());
            let want = has.map(|(of, len)| content(of, len));
            let found = fs::read(&at).ok();
            if found != want {
                let len = |b: &Option<Vec<u8>>| b.as_ref().map(Vec::len);
                let (found, want) = (len(&found), len(&want));
                return Err(format!(
                    "{}: {found:?} bytes, {want:?} expected",
                    at.display()
                ));
            }
        }
        Ok(())
    }
}

/// Takes room or files of a disk, as many as it draws, and gives them back, until `end`.
fn compete(dir: &Path, seed: u64, end: Instant) {
    let mut draws = Rng::new(seed);
    let at = dir.join("others");
    while Instant::now() < end {
        fs::create_dir_all(&at).unwrap();
        let free = || rustix::fs::statvfs(&at).unwrap();
        match draws.below(3) {
            0 => {
                let leave = draws.below(200);
                (0..)
                    .take_while(|n| {
                        free().f_ffree > leave && File::create(at.join(n.to_string())).is_ok()
                    })
                    .for_each(drop);
            }
            kind => {
                let leave = if kind == 1 { 0 } else { draws.below(24 << 20) };
                let f = open(&at.join("room"));
                let piece = 256 << 10;
                (0..)
                    .take_while(|n| {
                        let flags = rustix::fs::FallocateFlags::empty();
                        free().f_bfree * 4096 > leave
                            && rustix::fs::fallocate(&f, flags, n * piece, piece).is_ok()
                    })
                    .for_each(drop);
            }
        }
        std::thread::sleep(Duration::from_millis(100 + draws.below(900)));
        fs::remove_dir_all(&at).unwrap();
        std::thread::sleep(Duration::from_millis(draws.below(400)));
    }
}

/// The disks of both nodes fill at random, with room or with files, and empty again, while programs
/// write, replace, cut and remove. Nothing is poisoned, nothing is lost, what makes room is never
/// refused, and nobody has to do anything. Half a minute; FULL_SECONDS says how long else.
#[test]
fn disks_that_fill_at_random_stop_nothing_for_good() {
    if !is_root() {
        return;
    }
    let seconds = std::env::var("FULL_SECONDS").map_or(24, |s| s.parse().unwrap());
    let c = Cluster::new(SYNC);
    let text = c.text(SYNC, "e2e").replace("\"5s\"", "\"200ms\"");
    c.configure(&text);
    let _small = ["a", "b"].map(|n| Small::ext4(c.dir.join(n), 96, 3000));
    let a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "0.2"]);
    let mut all: Vec<Files> = (1..4)
        .map(|n| Files::new(m.at.join(n.to_string()), n))
        .collect();
    let last = Instant::now() + Duration::from_secs(seconds);
    let mut round = 0;
    while Instant::now() < last {
        round += 2;
        let end = last.min(Instant::now() + Duration::from_secs(8));
        std::thread::scope(|s| {
            for (node, seed) in [("a", round), ("b", round + 1)] {
                let dir = c.dir.join(node);
                s.spawn(move || compete(&dir, seed, end));
            }
            for files in &mut all {
                s.spawn(move || {
                    while Instant::now() < end {
                        files.step();
                    }
                });
            }
        });
        await_or(
            "service",
            || c.logs(),
            || {
                let f = File::create(m.at.join("served")).ok()?;
                f.write_all_at(&[1; 1 << 16], 0).ok()?;
                f.sync_all().ok()
            },
        );
        all.iter().for_each(|f| f.check().unwrap());
    }
    let refused: u64 = all.iter().map(|f| f.refused).sum();
    let made: u64 = all.iter().map(|f| f.contents & u64::from(u32::MAX)).sum();
    println!("{made} files were written, and {refused} calls found no room");
    assert!(refused > 0, "no disk was full");
    // What was committed is there after a kill, on both nodes.
    let said = m.process.errors();
    // Else the mirror may still apply, and the next mount finds it silent.
    c.assert_equal();
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    all.iter().for_each(|f| f.check().unwrap());
    // Who checks notices a byte.
    let (k, _) = { all[0].has.iter().enumerate() }
        .find(|(_, has)| has.is_some_and(|(_, len)| len > 0))
        .unwrap();
    let f = open(&all[0].dir.join(k.to_string()));
    let mut byte = [0];
    f.read_exact_at(&mut byte, 0).unwrap();
    f.write_all_at(&[!byte[0]], 0).unwrap();
    assert!(all[0].check().is_err());
    drop(f);
    m.end();
    c.assert_equal();
    for said in [said, a.errors(), b.errors()] {
        assert!(!said.contains("poisoned"), "{said}");
    }
}
