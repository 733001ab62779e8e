//! Clocks that jump, or that are those of different machines.
//!
//! They are the clocks of daemons and programs that replicate, with a register of views, without
//! keys and with.
//!
//! A library that is put before the C library (`programs/clock.c`) moves the time of day in each
//! process. A time namespace moves the monotonic clock. No other clock is read.
//!
//! Owns its temporary directories, shared memory and processes.

// The checks are checked: limits by the time of day, and certificates that never expire. It first
// checks both clocks with `date` and `/proc/uptime`. Without keys no process asks for the time of
// day, except for the time before each line of a daemon's log (the library counts). With keys the
// time of day decides over new links, and over a daemon that starts, and over nothing else.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::Value;

use mojim_testkit::interface::compile;
use mojim_testkit::voters::Cluster;
use mojim_testkit::{Counted, Process, await_or, await_that, text};

const DAY: i64 = 24 * 3600;
const YEAR: i64 = 365 * DAY;
const NODES: [&str; 3] = ["a", "b", "w"];

/// The time of day on each node of a cluster.
struct Clocks {
    files: HashMap<&'static str, File>,
}

impl Clocks {
    /// All processes of `c` that are started from now on have their node's clock.
    fn of(c: &Cluster) -> Clocks {
        let library = c.dir.join("clock.so");
        let source = "crates/mojim-testkit/programs/clock.c";
        compile(source, &library, &["-O2", "-shared", "-fPIC"], false);
        let mut files = HashMap::new();
        for node in NODES {
            let path = c.dir.join(format!("{node}.clock"));
            fs::write(&path, [0; 4096]).unwrap();
            let file = File::options().read(true).write(true).open(&path);
            files.insert(node, file.unwrap());
        }
        let dir = c.dir.clone();
        let put = move |node: &str, command: &mut Command| {
            command
                .env("LD_PRELOAD", &library)
                .env("MOJIM_TEST_CLOCK", dir.join(format!("{node}.clock")));
        };
        // It is in force, or nothing below shows anything.
        let clocks = Clocks { files };
        let year = || {
            let mut date = Command::new("date");
            put("a", date.arg("+%Y"));
            text(&date.output().unwrap().stdout).trim().parse::<i64>()
        };
        let now = year().unwrap();
        clocks.set("a", 100 * YEAR);
        let then = year().unwrap();
        assert!((99..=100).contains(&(then - now)), "{now}, then {then}");
        clocks.set("a", 0);
        c.prepare(put);
        clocks
    }

    /// The clock of a node is so many seconds fast from now on.
    fn set(&self, node: &str, seconds: i64) {
        let bytes = seconds.to_ne_bytes();
        self.files[node].write_all_at(&bytes, 0).unwrap();
    }

    fn word(&self, node: &str, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.files[node].read_exact_at(&mut bytes, at).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// How many processes have had this clock.
    fn processes(&self, node: &str) -> u64 {
        self.word(node, 8)
    }

    /// How often they asked for the time of day.
    fn asked(&self, node: &str) -> u64 {
        self.word(node, 16)
    }
}

/// Nobody here is silent or slow for so long, whatever else the machine does:
/// what is made anew has another reason.
fn be_patient(c: &Cluster) {
    c.rewrite("failure_limit = \"1s\"", "failure_limit = \"3s\"");
    c.rewrite("[volume.v]", "[volume.v]\nresend_timeout = \"60s\"");
}

/// The view of primary `a`, once it can be read.
fn view(c: &Cluster) -> Value {
    await_that("the register", || {
        Some(c.register("a")).filter(|r| r["primary"].is_object())
    })
}

/// The view and the mirror's sessions, once they stay as they are while sync points flow: at the start,
/// on a machine that stands still, the mirror may be given up at once and become a member again.
fn at_rest(c: &Cluster, b: &Process, p: &Counted) -> (Value, usize) {
    let mut last = (view(c), sessions(b));
    await_that("a view that stays", || {
        p.await_more(500);
        let now = (view(c), sessions(b));
        let stays = now == last;
        last = now;
        stays.then_some(())
    });
    last
}

/// The clocks jump, and nothing comes of it: the view and the mirror's session stay as they were.
///
/// A machine that stands still for 3 s breaks a session as well, whatever its clocks say: one was
/// seen to. So a round in which something changed is done again. What comes of a jump, comes of it
/// in every round.
fn nothing_comes_of(c: &Cluster, clocks: &Clocks, b: &Process, p: &Counted, jumps: impl Fn()) {
    let mut rounds = (0..4).map(|_| {
        NODES.iter().for_each(|n| clocks.set(n, 0));
        let before = at_rest(c, b, p);
        jumps();
        (before, (view(c), sessions(b)))
    });
    let last = rounds.by_ref().find(|(before, after)| before == after);
    assert!(last.is_some(), "{}", b.errors());
}

/// How often the mirror has begun to follow.
fn sessions(b: &Process) -> usize {
    b.errors().matches("following node a").count()
}

/// The primary's node dies: the other one takes over with everything that was
/// acknowledged. Its program.
fn take_over(c: &Cluster, mut old: Process, p: Counted, new: &str) -> Counted {
    let primary = if new == "b" { "a" } else { "b" };
    // The program stands still before the last look at the view: on a busy machine it may
    // give its mirror up, and then nobody takes over.
    await_that("a primary that stands still with its mirror", || {
        c.await_view(primary, primary, Some(new));
        p.signal("STOP");
        let is_member = c.register(primary)["mirror"]["node"] == new;
        if !is_member {
            p.signal("CONT");
        }
        is_member.then_some(())
    });
    old.kill();
    let acknowledged = p.stop();
    let (mut q, found) = c.program(new, &["--pace", "2000"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 50);
    q.read_on_counting()
}

/// The mirror takes over, and who was primary comes back and follows.
fn the_mirror_takes_over(c: &Cluster, a: Process, p: Counted) {
    let q = take_over(c, a, p, "b");
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    q.await_more(50);
    c.assert_equal();
    q.stop();
}

/// The time of day jumps by days and by decades, forwards and backwards, on one
/// node after the other, while sync points flow.
///
/// Nothing may come of it: no session is made anew, no view changes, no sync
/// point fails; and with three different times a take-over goes as always.
#[test]
fn the_time_of_day_means_nothing() {
    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let clocks = Clocks::of(&c);
    let a = c.node("a");
    let (b, w) = (c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 50);
    let here = NODES.map(|n| clocks.processes(n));
    // Twice `date`, the daemon and the program, which may have needed several tries; a
    // daemon; a daemon.
    assert!(here[0] >= 4 && here[1..] == [1, 1], "{here:?}");
    let p = p.read_on_counting();
    // A mirror that was late at the start becomes a member later, which is another view.
    c.await_mirror();
    nothing_comes_of(&c, &clocks, &b, &p, || {
        for (node, jump) in [
            ("a", DAY),
            ("b", DAY),
            ("a", -DAY),
            ("b", -30 * YEAR),
            ("w", 200 * YEAR),
            ("a", 30 * YEAR),
            ("b", 3600),
            ("a", 0),
            ("w", -20 * YEAR),
            ("a", -40 * YEAR),
        ] {
            clocks.set(node, jump);
            p.await_more(200);
        }
    });
    // Twice `date`; and a daemon for each line of its log, which begins with the time, and once
    // more where the line says that a state begins, for `since` in status.
    // Lines may come meanwhile: they are counted after who asked. And who has asked may
    // stand still before it writes its line.
    let count = || {
        let asked = NODES.map(|n| clocks.asked(n));
        let begins = |line: &&str| ["mirror_lost", "alone"].iter().any(|c| line.ends_with(c));
        let lines = [&a, &b, &w].map(|d| {
            let text = d.errors();
            (text.lines().count() + text.lines().filter(begins).count()) as u64
        });
        (asked, [lines[0] + 2, lines[1], lines[2]])
    };
    await_or(
        "a line for each time asked",
        || format!("times asked, and at most: {:?}", count()),
        || {
            let (asked, most) = count();
            let no_more = asked.iter().zip(&most).all(|(asked, most)| asked <= most);
            no_more.then_some(())
        },
    );
    the_mirror_takes_over(&c, a, p);
}

/// The same in a cluster with keys, whose certificates are valid for a time.
///
/// A jump within that time does nothing, also where links are made anew. Beyond
/// it, links that are up stay up, new ones are refused for as long as the clock
/// says so, and when it is right again everything is as before, by itself.
#[test]
fn the_time_of_day_decides_over_new_links_with_keys_and_over_nothing_else() {
    let c = Cluster::keyed("sync", "disk", true);
    be_patient(&c);
    let clocks = Clocks::of(&c);
    let a = c.node("a");
    let (mut b, _w) = (c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 50);
    let p = p.read_on_counting();
    c.await_mirror();
    nothing_comes_of(&c, &clocks, &b, &p, || {
        for (node, jump) in NODES.iter().flat_map(|n| [(n, 0), (n, DAY)]) {
            clocks.set(node, jump);
            p.await_more(200);
        }
    });
    // New links, all of them, while the clocks are a day fast.
    let begun = sessions(&b);
    b.kill();
    let b = c.node("b");
    await_that("the mirror's return", || {
        (sessions(&b) > begun).then_some(())
    });
    c.await_view("a", "a", Some("b"));

    // (A line that keeps coming is written seldom: of a later round only that nobody is answered counts.)
    let refused = |why: &str| {
        await_that(&format!("the refusal of a new link: {why}"), || {
            let reachable = c.says("b")["reachable"] == true;
            (!reachable && b.errors().contains(why)).then_some(())
        });
    };
    nothing_comes_of(&c, &clocks, &b, &p, || {
        for (jump, why) in [
            (20 * YEAR, "it expired"),
            (-10 * DAY, "it is not valid for another"),
        ] {
            clocks.set("b", jump);
            p.await_more(200);
            refused(why);
            p.await_more(200);
        }
        clocks.set("b", DAY);
        c.await_view("a", "a", Some("b"));
    });

    // A daemon that is started then says so; the primary goes on alone.
    let mut b = b;
    b.kill();
    clocks.set("b", 20 * YEAR);
    let mut late = c.start("node", &["--name", "b"], "b");
    assert_eq!(late.line(), None);
    // Its own keys are of no use.
    assert_eq!(late.wait(), Some(2));
    let said = late.errors();
    assert!(said.lines().last().unwrap().contains("expired"), "{said}");
    c.await_view("a", "a", None);
    p.await_more(200);
    clocks.set("b", 0);
    let _b = c.node("b");
    c.await_view("a", "a", Some("b"));
    the_mirror_takes_over(&c, a, p);
}

/// Puts a command on a machine that was started so many seconds earlier: its
/// monotonic clock is that much ahead.
fn started_earlier(seconds: u64, command: &mut Command) {
    let offsets = format!("monotonic {seconds} 0\nboottime {seconds} 0\n");
    // SAFETY: system calls with what was made before the fork.
    unsafe {
        command.pre_exec(move || {
            // The next program that this process executes is in the namespace.
            if libc::unshare(libc::CLONE_NEWTIME) != 0 {
                return Err(io::Error::last_os_error());
            }
            File::options()
                .write(true)
                .open("/proc/self/timens_offsets")?
                .write_all(offsets.as_bytes())
        });
    }
}

/// The monotonic clocks of the nodes differ by days, as those of machines do:
/// nothing may compare the times of two of them, or of two lives of one.
///
/// They form a cluster, the mirror takes over when the primary dies, and a node
/// whose clock begins anew, behind what it was, follows and takes over again.
#[test]
fn monotonic_clocks_are_each_machines_own() {
    let uptime = |earlier: u64| {
        let mut cat = Command::new("cat");
        started_earlier(earlier, cat.arg("/proc/uptime"));
        let out = cat.output()?;
        let words = text(&out.stdout);
        let seconds = words.split('.').next().and_then(|s| s.parse::<u64>().ok());
        seconds.ok_or_else(|| io::Error::other(words))
    };
    let far = (uptime(0), uptime(40 * DAY as u64));
    let (Ok(now), Ok(then)) = far else {
        // Said also by a test that passes.
        let _ = writeln!(io::stderr(), "SKIPPED: no time namespace here: {far:?}");
        return;
    };
    // It is in force, or nothing below shows anything.
    assert!(then - now >= 40 * DAY as u64, "{now}, {then}");

    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let days = Arc::new(Mutex::new(HashMap::from([("a", 40), ("b", 0), ("w", 3)])));
    let of = days.clone();
    c.prepare(move |node, command| {
        started_earlier(of.lock().unwrap()[node] * DAY as u64, command);
    });
    let a = c.node("a");
    let (b, _w) = (c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 300);
    let q = take_over(&c, a, p.read_on_counting(), "b");
    // That machine is started anew.
    days.lock().unwrap().insert("a", 1);
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    q.await_more(100);
    let p = take_over(&c, b, q, "a");
    days.lock().unwrap().insert("b", 90);
    let _b = c.node("b");
    c.await_view("a", "a", Some("b"));
    p.await_more(100);
    c.assert_equal();
    p.stop();
}
