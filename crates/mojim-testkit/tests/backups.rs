//! Backups with real processes: a primary, its mirror, and the nodes that the mirror forwards to.
//!
//! The tests check each backup's data files: whole sync points, in the end
//! the same bytes as the primary's. Owns its temporary directories, shared
//! memory and processes.

use std::fs;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::{Process, await_that, link, mojim};

/// Primary `a`, mirror `b`, backups `c` and `d`; no register.
struct Cluster {
    home: Home,
}

impl Cluster {
    fn new(mode: &str, extra: &str) -> Cluster {
        let home = Home::new("backups", 4);
        let mut t = match extra.contains("encrypt") {
            true => home.keys_line(),
            false => String::new(),
        };
        t += &format!(
            "cluster = \"backups\"\n[volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\nbackups = [\"c\", \"d\"]\nfailover = \"manual\"\n{extra}\n"
        );
        if !extra.contains("resend_timeout") {
            t += "resend_timeout = \"1s\"\nresend_attempts = 60\n";
        }
        for (name, port) in ["a", "b", "c", "d"].iter().zip(&home.ports) {
            t += &home.data_node(name, port.number, "size = \"4MiB\"");
        }
        home.configure(&t);
        if extra.contains("encrypt") {
            home.make_keys();
        }
        Cluster { home }
    }

    /// Until `node` has applied what `of` has, and so has `of`: their files are the same then.
    fn await_level(&self, node: &str, of: &str) {
        await_that(&format!("{node} as far as {of}"), || {
            let (x, y) = (self.says(node), self.says(of));
            let has = x["applied"] == y["last_lsn"] && x["state"] == "whole";
            // A copy that nobody has open was closed with all of it.
            let is_done = y["applied"].is_null() || y["applied"] == y["last_lsn"];
            (y["last_lsn"].is_u64() && has && is_done).then_some(())
        });
    }

    /// The program ends in order once the mirror and these backups have applied all that it made. Its last
    /// word, what is committed, gets half a second, and nobody says it once more.
    fn finish(&self, mut program: Process, backups: &[&str]) {
        let level = || backups.iter().for_each(|c| self.await_level(c, "b"));
        level();
        program.finish();
        level();
    }

    /// Whole copies that the mirror has sent to a backup, as soon as it says so.
    fn copies(&self, backup: &str) -> u64 {
        await_that("the mirror's word on its backups", || {
            let b = self.says("b");
            let mut rows = b["backups"].as_array().into_iter().flatten();
            rows.find(|r| r["node"] == backup)?["copies"].as_u64()
        })
    }

    fn log(&self, node: &str) -> Vec<u8> {
        fs::read(self.dir.join(node).join("v").join("log")).unwrap()
    }

    fn assert_same(&self, one: &str, other: &str) {
        assert!(self.log(one) == self.log(other), "{one} and {other} differ");
    }
}

impl Deref for Cluster {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}

/// A mirror forwards under its own name, over links as the volume says; the
/// lanes of a session are of the node that began it.
#[test]
fn backups_follow_with_keys() {
    for encrypt in ["encrypt = true", "encrypt = false"] {
        let c = Cluster::new("sync", encrypt);
        let nodes = ["a", "b", "c", "d"].map(|n| c.node(n));
        let (mut p, _) = c.program("a", &["--entries", "300", "--linger"]);
        p.acknowledged(0, 300);
        c.finish(p, &["c", "d"]);
        for node in ["c", "d"] {
            c.assert_same(node, "b");
        }
        drop(nodes);
    }
}

#[test]
fn backups_follow_the_mirror_and_come_back_by_log_and_by_copy() {
    let c = Cluster::new("sync", "");
    let _a = c.node("a");
    let _b = c.node("b");
    let mut backup = c.node("c");
    let _d = c.node("d");
    let (mut p, found) = c.program("a", &["--entries", "300", "--linger"]);
    assert_eq!(found, 0);
    p.acknowledged(0, 300);
    c.finish(p, &["c", "d"]);
    for node in ["c", "d"] {
        c.assert_same(node, "b");
        let role = await_that("its role", || {
            c.says(node)["role"].as_str().map(String::from)
        });
        assert_eq!(role, "backup");
    }

    let before = c.copies("c");
    // Few records while it is away: they are still in the mirror's log.
    backup.kill();
    let (mut p, found) = c.program("a", &["--entries", "100", "--linger"]);
    assert_eq!(found, 300);
    p.acknowledged(300, 400);
    let mut backup = c.node("c");
    c.await_level("c", "b");
    assert_eq!(c.copies("c"), before, "it was copied whole");
    c.finish(p, &["c"]);
    c.assert_same("c", "b");

    // More than any log holds, before it is back: it is copied, and the program goes on.
    backup.kill();
    let args = ["--entries", "10000", "--first", "8000", "--linger"];
    let (mut p, found) = c.program("a", &args);
    assert_eq!(found, 400);
    p.acknowledged(400, 8400);
    let _backup = c.node("c");
    await_that("a copy", || (c.copies("c") > before).then_some(()));
    p.go_on();
    p.acknowledged(8400, 10400);
    c.finish(p, &["c", "d"]);
    for node in ["c", "d"] {
        c.assert_same(node, "a");
    }
}

#[test]
fn a_primary_without_its_mirror_forwards_itself() {
    let c = Cluster::new("async", "");
    let _a = c.node("a");
    let mut b = c.node("b");
    let _c = c.node("c");
    let _d = c.node("d");
    let (mut p, _) = c.program("a", &["--entries", "100", "--linger"]);
    p.acknowledged(0, 100);
    p.finish();
    b.kill();
    // In `async` a primary begins without a mirror that does not answer.
    let (mut p, found) = c.program("a", &["--entries", "200", "--linger"]);
    assert_eq!(found, 100);
    p.acknowledged(100, 300);
    c.await_level("c", "a");
    c.await_level("d", "a");
    p.finish();
    for node in ["c", "d"] {
        c.await_level(node, "a");
        c.assert_same(node, "a");
    }
}

#[test]
fn a_backup_goes_on_when_primary_and_mirror_are_lost() {
    let c = Cluster::new("sync", "");
    let mut a = c.node("a");
    let mut b = c.node("b");
    let _c = c.node("c");
    let _d = c.node("d");
    let (mut p, _) = c.program("a", &["--entries", "100", "--linger"]);
    p.acknowledged(0, 100);
    c.await_level("c", "b");
    c.await_level("d", "b");
    let file = c.file();
    let words = [
        "promote",
        "--config",
        file.to_str().unwrap(),
        "--name",
        "c",
        "--force",
        "--yes",
    ];
    // Not while they live.
    let out = mojim(&words);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    p.kill();
    a.kill();
    b.kill();
    // Nor without the operator's word for what may be missing.
    await_that("the refusal of a backup", || {
        let out = mojim(&words[..5]);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1));
        text.contains("--force").then_some(())
    });
    let out = mojim(&words);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    let (mut p, found) = c.program("c", &["--entries", "50", "--linger"]);
    assert_eq!(found, 100);
    p.acknowledged(100, 150);
    c.await_level("d", "c");
    // The first primary comes back as the mirror of the new one.
    let _a = c.node("a");
    await_that("a follows", || {
        let is = c.says("a");
        (is["role"] == "mirror" && is["view"]["primary"] == "c").then_some(())
    });
    // While it is told: afterwards nobody is left who sends what it lacks.
    c.await_level("a", "c");
    p.finish();
    c.assert_same("a", "c");
    c.assert_same("d", "c");
}

/// A cluster whose backup `c` is reached over a slow link by whoever uses the
/// second configuration: each connection takes `burst` bytes in 2.2 s, at once.
fn with_slow_backup(mode: &str, threshold: u64, burst: usize, extra: &str) -> (Cluster, PathBuf) {
    let extra = format!("secondary_threshold = {threshold}\n{extra}");
    let c = Cluster::new(mode, &extra);
    let text = fs::read_to_string(c.file()).unwrap();
    let at = text.find("[node.c]\naddress = \"").unwrap() + "[node.c]\naddress = \"".len();
    let address = text[at..].split('"').next().unwrap().to_owned();
    let port = link::slow(address.clone(), burst, Duration::from_millis(2200));
    let slow = c.dir.join("slow.toml");
    fs::write(&slow, text.replace(&address, &format!("127.0.0.1:{port}"))).unwrap();
    (c, slow)
}

/// A backup that was slower than the program for longer than `resend_timeout`
/// made the primary suspect its link to the mirror: it made its session anew,
/// over and over, with it the one to the backup ended, nobody was held back
/// until that stood again, and in the end sync points failed.
#[test]
fn a_slow_backup_paces_the_primary_and_breaks_nothing() {
    const THRESHOLD: u64 = 64 << 10;
    const CONNECTIONS: u64 = 2;
    // Less than a busy machine's program does, about 150 KiB/s on each connection.
    const BURST: usize = 160 << 10;
    for transport in ["tcp", "shm"] {
        // A sync point suspects a link after one second, and fails after two;
        // for longer than that nothing goes to the backup, again and again.
        let extra = format!(
            "transport = \"{transport}\"\nconnections = {CONNECTIONS}\nresend_timeout = \"1s\"\nresend_attempts = 2"
        );
        let (c, slow) = with_slow_backup("sync", THRESHOLD, BURST, &extra);
        let _a = c.node("a");
        let _c = c.node("c");
        let _d = c.node("d");
        let args = ["node", "--config", slow.to_str().unwrap(), "--name", "b"];
        let mut b = Process::start(&args, &c.dir.join("b.txt"));
        assert!(b.line().unwrap().contains("is ready at"));

        let args = ["--entries", "1500", "--first", "1", "--linger"];
        let (mut p, _) = c.program("a", &args);
        p.acknowledged(0, 1);
        await_that("b forwards to c", || {
            b.errors().contains("forwarding to node c").then_some(())
        });
        // Nobody is held back for a backup that does not follow yet: until a busy machine had
        // made the links, the program did 1.5 MB.
        for backup in ["c", "d"] {
            c.await_level(backup, "b");
        }
        let before = b.peak();
        p.go_on();
        let mut most = 0;
        let p = std::thread::scope(|s| {
            let t = s.spawn(|| {
                p.acknowledged(1, 1500);
                p
            });
            while !t.is_finished() {
                let lag = c.says("b")["backup_lag"].as_u64();
                most = most.max(lag.unwrap_or(0));
            }
            t.join().unwrap()
        });
        // It came faster than the link takes it, or this shows nothing. (On a busy machine the program
        // does 20 KiB in a pause of the link, and each look is a command, which takes long.)
        assert!(most > THRESHOLD / 4, "{most} bytes behind at most");
        // An entry has at most 3000 bytes; records begin at sectors.
        assert!(
            most <= THRESHOLD + CONNECTIONS * 8192,
            "{most} bytes behind; {}",
            b.errors()
        );
        let more = b.peak() - before;
        assert!(more < 16 << 20, "{more} bytes more");
        c.finish(p, &["c"]);
        let said = b.errors();
        assert_eq!(said.matches("following node a").count(), 1, "{said}");
        assert!(!said.contains("not forwarding to node c"), "{said}");
        c.assert_same("c", "a");
    }
}

/// A spill file that took longer on its way to a backup than a link may be silent never
/// arrived: the answer to the last heartbeat was behind it, its link was given up, and it
/// was sent anew from the beginning, for ever.
#[test]
fn a_spill_file_reaches_a_slow_backup() {
    let (c, slow) = with_slow_backup("sync", 1 << 20, 640 << 10, "connections = 2");
    let _a = c.node("a");
    let _c = c.node("c");
    let _d = c.node("d");
    let args = ["node", "--config", slow.to_str().unwrap(), "--name", "b"];
    let mut b = Process::start(&args, &c.dir.join("b.txt"));
    assert!(b.line().unwrap().contains("is ready at"));
    let (mut p, _) = c.program("a", &["--entries", "10", "--linger"]);
    p.acknowledged(0, 10);
    c.finish(p, &["c"]);
    let copies = c.copies("c");
    // Sync points of 1 MiB: each takes four seconds on its way.
    let words = ["--entries", "1", "--ballast", "2097152", "--linger"];
    let (mut p, _) = c.program("a", &words);
    p.acknowledged(10, 11);
    c.await_level("c", "b");
    assert_eq!(c.copies("c"), copies, "it was copied whole");
    c.finish(p, &["c"]);
    c.assert_same("c", "a");
}

/// The same where the primary has no mirror and forwards itself.
#[test]
fn a_slow_backup_paces_a_primary_without_a_mirror() {
    const THRESHOLD: u64 = 64 << 10;
    const BURST: usize = 200 << 10;
    let (c, slow) = with_slow_backup("async", THRESHOLD, BURST, "");
    let _a = c.node("a");
    let mut b = c.node("b");
    let _c = c.node("c");
    let _d = c.node("d");
    // A volume begins with its mirror, which then goes.
    let (mut p, _) = c.program("a", &["--entries", "1", "--linger"]);
    p.acknowledged(0, 1);
    p.finish();
    b.kill();
    let errors = c.dir.join("program-a.txt");
    let file = slow.to_str().unwrap();
    let words = [
        "__append",
        "--config",
        file,
        "--node",
        "a",
        "--entries",
        "1501",
        "--first",
        "1",
        "--linger",
    ];
    let mut p = Process::start(&words, &errors);
    assert_eq!(p.line().as_deref().map(|l| l.ends_with(" 1")), Some(true));
    p.acknowledged(1, 2);
    // Nobody is held back for a backup that does not follow yet.
    c.await_level("c", "a");
    p.go_on();
    let lsn = |node: &str| c.says(node)["last_lsn"].as_u64();
    // Each record has 512 bytes at least. What `c` receives meanwhile counts for it. A node
    // that does not answer in time says nothing.
    let missing = || {
        let all = lsn("a").unwrap_or(0);
        lsn("c").map_or(0, |has| all.saturating_sub(has) * 512)
    };
    let mut most = 0;
    let mut p = std::thread::scope(|s| {
        let t = s.spawn(|| {
            p.acknowledged(2, 1502);
            p
        });
        while !t.is_finished() {
            most = most.max(missing());
        }
        t.join().unwrap()
    });
    // It came faster than the link takes it, or this shows nothing.
    assert!(most > THRESHOLD / 8, "{most} bytes behind at most");
    most = most.max(missing());
    assert!(
        most <= THRESHOLD + 8192,
        "it was not held back: {most} bytes"
    );
    // Its last words get half a second, which may not be enough for the rest.
    await_that("all entries at c", || {
        (entries(&c.log("c")) == 1502).then_some(())
    });
    p.finish();
    c.assert_same("c", "a");
}

/// The entries of a log, as `mojim __append` makes them: each begins with its
/// number and its length.
fn entries(log: &[u8]) -> u64 {
    let word = |at: usize| {
        let bytes = log.get(at..at + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().unwrap()))
    };
    let end = word(0).unwrap_or(0) as usize;
    let (mut at, mut n) = (64, 0);
    while at < 64 + end && word(at) == Some(n) {
        at += word(at + 8).unwrap_or(0).max(16) as usize;
        n += 1;
    }
    n
}

/// While a whole copy went to a backup nothing was applied by the node that
/// gave it: its log filled, and then every sync point waited for the copy's end.
#[test]
fn what_gives_a_copy_to_a_backup_goes_on() {
    let (c, slow) = with_slow_backup("sync", 256 << 10, 640 << 10, "");
    let _a = c.node("a");
    let args = ["node", "--config", slow.to_str().unwrap(), "--name", "b"];
    let mut b = Process::start(&args, &c.dir.join("b.txt"));
    assert!(b.line().unwrap().contains("is ready at"));
    let words = "--entries 5000 --first 10 --pace 1000 --ballast 3000000 --linger";
    let words: Vec<_> = words.split(' ').collect();
    let (mut p, _) = c.program("a", &words);
    p.acknowledged(0, 10);
    let _c = c.node("c");
    // The program has all its work still to do when the copy begins.
    await_that("a copy for c", || (c.copies("c") > 0).then_some(()));
    let p = std::thread::scope(|s| {
        let applied = |b: &Value| b["applied"].as_u64();
        let begun = await_that("what b has applied", || applied(&c.says("b")));
        p.go_on();
        let t = s.spawn(|| {
            p.acknowledged(10, 5000);
            p
        });
        await_that("sync points applied beside the copy", || {
            let b = c.says("b");
            let rows = b["backups"].as_array().cloned().unwrap_or_default();
            let row = rows.into_iter().find(|r| r["node"] == "c")?;
            assert_eq!(row["active"], false, "the copy was too fast");
            (applied(&b)? > begun + 200).then_some(())
        });
        t.join().unwrap()
    });
    c.finish(p, &["c"]);
    c.assert_same("c", "a");
    let ballast = |node: &str| fs::read(c.dir.join(node).join("v").join("ballast"));
    assert!(ballast("c").unwrap() == ballast("a").unwrap());
}
