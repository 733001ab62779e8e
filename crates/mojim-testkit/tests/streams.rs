//! Copies that go over several links at once, with real processes.
//!
//! The receiver is reached through a tap that counts what each connection carries, or cuts
//! one off. The tests count bytes, never time.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::link::Tap;
use mojim_testkit::{Process, await_that};

const STREAMS: usize = 3;
const BALLAST: u64 = 48 << 20;
/// Longer than any test takes.
const MANY: &str = "1000000";
/// Microseconds between two entries. What comes to a backup behind its copy stays far below
/// what a stream carries, and the log below its size.
const PACE: &str = "5000";

/// Nodes `a` and `b`, in some tests a backup `c`.
struct Cluster {
    home: Home,
    tap: Tap,
    /// The configuration of those who speak to the last node through the tap.
    tapped: PathBuf,
}

impl Cluster {
    /// `encrypt`: where there are keys, whether links are encrypted. The last node
    /// is reached at `burst` bytes every `pause` on each connection.
    fn new(
        mode: &str,
        nodes: usize,
        encrypt: Option<bool>,
        burst: usize,
        pause: Duration,
    ) -> Cluster {
        let home = Home::new("streams", nodes);
        let names = &["a", "b", "c"][..nodes];
        let backups = &names[2..];
        let mut t = match encrypt {
            Some(on) => format!("{}encrypt = {on}\n", home.keys_line()),
            None => String::new(),
        };
        t += &format!(
            "cluster = \"streams\"\n[volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\n\
             backups = {backups:?}\nfailover = \"manual\"\nresend_timeout = \"1s\"\nresend_attempts = 60\n\
             copy_streams = {STREAMS}\n"
        );
        for (name, port) in names.iter().zip(&home.ports) {
            t += &home.data_node(name, port.number, "size = \"4MiB\"");
        }
        home.configure(&t);
        if encrypt.is_some() {
            home.make_keys();
        }
        let last = format!("127.0.0.1:{}", home.ports[nodes - 1].number);
        let (tap, port) = Tap::new(last.clone(), burst, pause);
        let tapped = home.dir.join("tapped.toml");
        fs::write(&tapped, t.replace(&last, &format!("127.0.0.1:{port}"))).unwrap();
        Cluster { home, tap, tapped }
    }

    fn program(&self, args: &[&str]) -> Process {
        let file = self.tapped.to_str().unwrap();
        let ballast = BALLAST.to_string();
        let words = ["__append", "--config", file, "--node", "a"];
        let words = [&words[..], &["--ballast", &ballast], args].concat();
        let mut p = Process::start(&words, &self.home.dir.join("program-a.txt"));
        let line = p.line().unwrap_or_else(|| panic!("{}", p.errors()));
        assert!(line.starts_with("attached "), "{line}");
        p
    }

    /// The copy that `node` took in last, once it has all of it and follows behind it. One
    /// that was cut off is over, too, until the next one begins.
    fn came(&self, node: &str) -> Value {
        await_that("the copy", || {
            let mut n = self.home.says(node);
            let copy = &n["copy"];
            let is_whole = copy["running"] == false && copy["done"] == copy["total"];
            (is_whole && n["link"]["up"] == true).then(|| n["copy"].take())
        })
    }

    /// Whole copies that the mirror has begun to send to the backup.
    fn copies(&self) -> u64 {
        await_that("the mirror's word on its backup", || {
            self.home.says("b")["backups"][0]["copies"].as_u64()
        })
    }

    fn assert_same_files(&self, one: &str, other: &str) {
        for file in ["log", "ballast"] {
            let [x, y] =
                [one, other].map(|n| fs::read(self.home.dir.join(n).join("v").join(file)).unwrap());
            assert!(x == y, "{file} of {one} and {other}");
        }
    }
}

#[test]
fn a_backup_is_copied_to_over_streams_while_the_program_commits() {
    // Where a machine stands still for longer than links may be silent, the copy begins anew, rightly, and it
    // is done again. What comes of a copy comes each time.
    for encrypt in [true, false] {
        let mut rounds = (0..4).map(|_| a_backup_is_copied_to(encrypt));
        assert!(rounds.any(|once| once), "no copy was over by itself");
    }
}

/// Whether one copy was enough.
fn a_backup_is_copied_to(encrypt: bool) -> bool {
    // A copy takes three seconds: a stream that stands still for one has its part all the same.
    let pause = Duration::from_millis(200);
    let c = Cluster::new("sync", 3, Some(encrypt), 1 << 20, pause);
    let _a = c.home.node("a");
    let _b = c.home.node_as(&c.tapped, "b");
    let mut p = c.program(&["--entries", MANY, "--pace", PACE]);
    p.acknowledged(0, 200);
    let p = p.read_on();
    let _c = c.home.node("c");
    let copy = c.came("c");
    if c.copies() > 1 {
        p.stop();
        return false;
    }
    // Not one of them alone, and nothing of it over the session's own link. On a machine that
    // stands still for a while one may not be open in time: the others carry its part.
    let busy = c.tap.busy(BALLAST / 16);
    let carried = c.tap.carried();
    assert!(
        (2..=STREAMS).contains(&busy),
        "{carried:?}\n{}",
        c.home.logs()
    );
    assert!(copy["moved"].as_u64().unwrap() > BALLAST, "{copy}");
    c.home.assert_equal();
    p.stop();
    true
}

#[test]
fn a_stream_that_is_cut_off_begins_the_copy_anew() {
    // It takes four seconds from when a stream may be cut until the copy is there.
    let c = Cluster::new("sync", 3, None, 1 << 20, Duration::from_millis(300));
    let _a = c.home.node("a");
    let _b = c.home.node_as(&c.tapped, "b");
    let mut p = c.program(&["--entries", MANY, "--pace", PACE]);
    p.acknowledged(0, 200);
    let p = p.read_on();
    let _c = c.home.node("c");
    await_that("a stream to cut", || {
        c.tap.cut_busiest(BALLAST / 16).then_some(())
    });
    await_that("another copy", || (c.copies() > 1).then_some(()));
    c.came("c");
    c.home.assert_equal();
    p.stop();
}

#[test]
fn a_mirror_gets_what_differs_over_streams() {
    let c = Cluster::new("async", 2, None, 1 << 20, Duration::ZERO);
    let _a = c.home.node("a");
    let mut b = c.home.node("b");
    let mut program = c.program(&["--entries", "12000", "--first", "50", "--linger"]);
    program.acknowledged(0, 50);
    b.kill();
    // More than the log holds, all of it without b.
    program.go_on();
    program.acknowledged(50, 12000);
    let before = c.tap.busy(1);
    let _b = c.home.node("b");
    let copy = c.came("b");
    let n = |k: &str| copy[k].as_u64().unwrap();
    assert!(n("moved") < n("total") / 4, "{copy}");
    assert!(n("kept") > 0, "{copy}");
    // The session's own link, its streams, and its lane, which is opened last.
    let links = || c.tap.busy(1) - before;
    await_that("all links", || (links() >= 2 + STREAMS).then_some(()));
    assert_eq!(links(), 2 + STREAMS);
    program.finish();
    c.home.assert_equal();
    c.assert_same_files("a", "b");
}
