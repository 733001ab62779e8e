//! Three nodes with a register of views, which nobody commands.
//!
//! Real daemons and programs are killed, stopped and started again, and nobody types a command.
//! Each test checks the history. An entry is acknowledged when its number was printed, and every
//! later primary must find it.
//!
//! Owns its temporary directories, shared memory and processes.

// Seen to fail, each by a defect made on purpose or found:
// - the silence of a primary was counted from the mirror's last look at a word half a second old,
//   not from the word, so a program whose memory took long to go delayed the take-over (`mojim
//   bench failover`)

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mojim_config::Config;
use mojim_env::wire::Wire;
use mojim_env::{Address, Env};
use mojim_format::FrameKind;
use mojim_format::message::{Hello, Message, Refuse};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::request::{Post, Request};
use rustix::fs::FlockOperation;

use mojim_testkit::interface::compile;
use mojim_testkit::link::{Late, Way};
use mojim_testkit::voters::Cluster;
use mojim_testkit::{
    DEADLINE, Process, await_or, await_that, continue_all, program_of, stop_all, text,
};

/// Every number that is still printed; the last one, if there was one.
fn rest(p: &mut Process) -> Option<u64> {
    let mut last = None;
    while let Some(line) = p.line() {
        last = line.parse().ok().or(last);
    }
    last
}

/// A backup goes on by itself.
fn falling_back() -> Cluster {
    let c = Cluster::larger("sync");
    c.rewrite(
        "backups = [\"c\"]",
        "backups = [\"c\"]\nfallback = \"automatic\"",
    );
    c
}

/// Greets node `to` as `from`, over a link that proves nothing; what it is refused with.
fn refusal(c: &Cluster, from: &str, to: &str, epoch: u64, backup: bool) -> String {
    let config = Config::load(&c.file()).unwrap();
    let conn = Os::new()
        .unwrap()
        .connect(&Address::Tcp(config.nodes[to].address))
        .unwrap();
    let mut wire = Wire::new(conn);
    let hello = Hello {
        cluster: "failover".into(),
        volume: "v".into(),
        from: from.into(),
        to: to.into(),
        volume_id: 0,
        view: epoch,
        epoch,
        attach: !backup,
        backup,
        lanes: config.volumes["v"].connections as u16,
        tail: 0,
        history: Vec::new(),
    };
    wire.send(FrameKind::Hello, epoch, &hello);
    loop {
        let sent = wire.flush().unwrap();
        if let Some((f, body)) = wire.take_frame().unwrap() {
            assert_eq!(f.kind, FrameKind::Refuse);
            return Refuse::decode(&body).unwrap().text;
        }
        wire.conn.wait(!sent, DEADLINE).unwrap();
    }
}

/// One greeting in the name of a backup, with a late epoch, ended the session of the mirror,
/// which promised that epoch; after one of epoch 2^63 - 1 no node could attach any more.
#[test]
fn a_backup_leads_nobody() {
    let c = Cluster::larger("sync");
    be_patient(&c);
    let _nodes = ["a", "b", "c", "w", "x"].map(|n| c.node(n));
    let (mut p, _) = c.program("a", &["--pace", "500"]);
    p.acknowledged(0, 50);
    let p = p.read_on_counting();
    c.await_mirror();
    c.await_backup();
    let promised = || c.says("b")["promised"].as_u64();
    let before = promised().unwrap();
    for (epoch, why) in [
        (before, "is not the primary"),
        (before + 100, "is not the primary"),
        (before + (1 << 41), "nobody can have come as far"),
        (u64::MAX / 2, "nobody can have come as far"),
    ] {
        let text = refusal(&c, "c", "b", epoch, false);
        assert!(text.contains(why), "{text}");
    }
    // Nor does it forward to others, and the mirror leads no primary.
    let text = refusal(&c, "c", "b", before + 100, true);
    assert!(text.contains("nor its mirror"), "{text}");
    let text = refusal(&c, "b", "c", before + 100, false);
    assert!(text.contains("is not the primary"), "{text}");
    assert_eq!(promised(), Some(before));
    p.await_more(50);
    p.stop();
}

/// Nobody is silent for so long, whatever else the machine does: what changes the view has
/// another reason.
fn be_patient(c: &Cluster) {
    c.rewrite("failure_limit = \"1s\"", "failure_limit = \"3s\"");
}

/// Has the program on `primary` stand still while the view has `mirror`. From then on nobody
/// changes the view for as long as the primary's daemon lives. (After a look at the register
/// alone, a busy machine may still make the primary give its mirror up: nobody would take
/// its place.)
fn hold(c: &Cluster, primary: &str, mirror: &str, signal: impl Fn(&str)) {
    await_that("a primary that stands still with its mirror", || {
        c.await_view(primary, primary, Some(mirror));
        signal("STOP");
        let is_member = c.register(primary)["mirror"]["node"] == mirror;
        if !is_member {
            signal("CONT");
        }
        is_member.then_some(())
    });
}

/// The program finds on this node what was acknowledged, and goes on.
fn goes_on_at(node: &str, c: &Cluster, acknowledged: u64) {
    let (mut p, found) = c.program(node, &["--entries", "1", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    p.acknowledged(found, found + 1);
    p.finish();
}

fn the_mirror_takes_over(c: &Cluster) {
    be_patient(c);
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let (mut p, found) = c.program("a", &[]);
    assert_eq!(found, 0);
    p.acknowledged(0, 300);
    hold(c, "a", "b", |s| p.signal(s));
    a.kill();
    p.kill();
    let acknowledged = rest(&mut p).map_or(300, |last| last + 1);
    let (mut q, found) = c.program("b", &["--entries", "200", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 200);
    // The old primary comes back and follows, without being told.
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    assert!(
        c.try_program("a", &["--entries", "1"]).is_err(),
        "a program attached where the primary is not"
    );
    q.finish();
    c.assert_equal();
}

/// Node `name` loses its copy and its ring. What it has as a voter stays.
fn lose_copy(c: &Cluster, name: &str) {
    let of = c.dir.join(name);
    fs::remove_dir_all(of.join("v")).unwrap();
    fs::remove_dir_all(of.join(".mojim/v")).unwrap();
    fs::remove_file(of.join(".mojim/v.log.0")).unwrap();
    for d in fs::read_dir(&c.memory).unwrap().map(Result::unwrap) {
        if d.file_name()
            .to_str()
            .unwrap()
            .contains(&format!("-{name}-"))
        {
            fs::remove_dir_all(d.path()).unwrap();
        }
    }
}

/// The register names it the primary, and its disk is new: where its daemon was back
/// before anybody took its place, `mojim run` waited for its copy, on both nodes, for ever.
#[test]
fn an_empty_primary_that_is_back_in_time_takes_the_copy_of_its_mirror() {
    let c = Cluster::new("sync", "disk");
    c.rewrite("failure_limit = \"1s\"", "failure_limit = \"10s\"");
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 300);
    c.await_mirror();
    a.kill();
    p.kill();
    let acknowledged = rest(&mut p).map_or(300, |last| last + 1);
    lose_copy(&c, "a");
    let _a = c.node("a");
    let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
    let a = Address::Tcp(([127, 0, 0, 1], c.ports[0].number).into());
    let (volume, wait) = ("v".to_owned(), 0);
    let q = Request::Post { volume, wait };
    let ready = || {
        let client = Client::connect(&env, &a, "failover", DEADLINE);
        let post = client.and_then(|mut a| a.ask_for::<Post>(&q));
        post.is_ok_and(|p| p.ready).then_some(())
    };
    await_that("that a program may start", ready);
    goes_on_at("a", &c, acknowledged);
}

/// The node that had taken over lost its copy. `mojim run` said there without end that it was taking over,
/// and the advice was to start the program on it.
#[test]
fn who_took_over_and_lost_its_copy_is_not_waited_for() {
    let c = Cluster::new("sync", "disk");
    let mut a = c.node("a");
    let mut b = c.node("b");
    let _w = c.node("w");
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 300);
    c.await_mirror();
    a.kill();
    p.kill();
    c.await_view("b", "b", None);
    let _a = c.node("a");
    let (mut q, _) = c.program("b", &["--entries", "1"]);
    q.wait();
    c.await_view("b", "b", Some("a"));
    b.kill();
    lose_copy(&c, "b");
    let _b = c.node("b");
    let run = c.start("run", &["--name", "b", "--preload", "--", "true"], "run-b");
    await_or(
        "the word of it",
        || format!("{}{}{}", run.errors(), c.status(), c.logs()),
        || run.errors().contains("nobody takes over").then_some(()),
    );
    await_or(
        "the advice",
        || c.status().to_string(),
        || {
            let all = text(&c.mojim("status", &[]).stdout);
            let advised = c.advised("promote", "--name a --wait");
            all.contains(&advised).then_some(())
        },
    );
    promotes(&c, &["--name", "a"]);
    goes_on_at("a", &c, 300);
}

#[test]
fn the_mirror_takes_over_and_the_old_primary_follows() {
    the_mirror_takes_over(&Cluster::new("sync", "disk"));
}

#[test]
fn the_mirror_takes_over_in_sync_flush() {
    the_mirror_takes_over(&Cluster::new("sync-flush", "disk"));
}

#[test]
fn the_mirror_takes_over_with_logs_in_memory() {
    the_mirror_takes_over(&Cluster::new("sync", "dram"));
}

#[test]
fn the_mirror_takes_over_with_keys() {
    the_mirror_takes_over(&Cluster::keyed("sync", "disk", true));
}

#[test]
fn the_mirror_takes_over_in_sync_flush_with_keys_without_encryption() {
    the_mirror_takes_over(&Cluster::keyed("sync-flush", "disk", false));
}

/// The primary goes on alone once the view says so, no sync point fails
/// meanwhile, and the mirror is a member again when it has everything.
#[test]
fn a_primary_goes_on_without_its_mirror_and_takes_it_back() {
    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let mut a = c.node("a");
    let mut b = c.node("b");
    let _w = c.node("w");
    let (mut p, _) = c.program("a", &["--pace", "200"]);
    p.acknowledged(0, 100);
    b.kill();
    p.acknowledged(100, 400);
    c.await_view("a", "a", None);
    let _b = c.node("b");
    await_that("the mirror's return", || {
        let r = c.register("a");
        (r["mirror"]["node"] == "b").then_some(())
    });
    p.acknowledged(400, 500);
    // It holds everything now: the primary may go.
    hold(&c, "a", "b", |s| p.signal(s));
    a.kill();
    p.kill();
    let acknowledged = rest(&mut p).map_or(500, |last| last + 1);
    let (_q, found) = c.program("b", &["--entries", "1"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
}

/// A backup takes the place of a mirror that stays away, and then that of the
/// primary; who comes back follows. At each time one node at least may be lost.
#[test]
fn a_backup_takes_the_place_of_a_lost_mirror() {
    let c = Cluster::larger("sync");
    be_patient(&c);
    let mut a = c.node("a");
    let mut b = c.node("b");
    let _c = c.node("c");
    let (_w, _x) = (c.node("w"), c.node("x"));
    let (mut p, _) = c.program("a", &["--pace", "200"]);
    p.acknowledged(0, 100);
    b.kill();
    let p = p.read_on_counting();
    c.await_view("a", "a", Some("c"));
    // What is acknowledged from here on is on c.
    p.await_more(200);
    hold(&c, "a", "c", |s| p.signal(s));
    a.kill();
    let acknowledged = p.stop();
    let (mut q, found) = c.program("c", &["--pace", "200"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 100);
    let q = q.read_on_counting();
    // Neither of the first two was told of anything.
    let mut b = c.node("b");
    c.await_view("c", "c", Some("b"));
    let _a = c.node("a");
    q.await_more(200);
    // The old primary is the backup now: it takes the mirror's place.
    b.kill();
    c.await_view("c", "c", Some("a"));
    q.await_more(200);
    let acknowledged = q.stop();
    let _b = c.node("b");
    let (mut q, found) = c.program("c", &["--entries", "100", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 100);
    c.await_view("c", "c", Some("a"));
    c.assert_equal();
    q.finish();
}

/// Primary and mirror are lost at once: the backup goes on with what it has,
/// as configured, and the two follow it when they come back. A primary that
/// cannot reach the voters has nothing acknowledged meanwhile.
#[test]
fn a_backup_goes_on_by_itself_where_that_is_configured() {
    let c = Cluster::larger("sync");
    be_patient(&c);
    c.rewrite(
        "backups = [\"c\"]",
        // The program waits for as long as the standstill takes to be seen.
        "backups = [\"c\"]\nfallback = \"automatic\"\nresend_attempts = 1200",
    );
    let mut a = c.node("a");
    let mut b = c.node("b");
    let _c = c.node("c");
    let (w, x) = (c.node("w"), c.node("x"));
    let (mut p, _) = c.program("a", &["--pace", "200"]);
    p.acknowledged(0, 200);
    // Three of five voters do not answer: the primary, whose mirror is well,
    // cannot know whether a backup has taken its place.
    let p = p.read_on_counting();
    for n in [&w, &x, &_c] {
        n.signal("STOP");
    }
    // Stands for so long that no slow moment of the machine looks like it: at
    // its pace it would commit some thousand entries.
    await_that("the primary's standstill", || {
        let before = p.count();
        std::thread::sleep(Duration::from_secs(2));
        (p.count() == before).then_some(())
    });
    for n in [&w, &x, &_c] {
        n.signal("CONT");
    }
    p.await_more(100);
    let on_backup = await_that("the backup's status", || c.applied("c"));
    p.stop();
    // In this order: the mirror of a primary that is gone would take over, if this thread
    // stood still in between, and the backup would not hear of that view.
    b.kill();
    a.kill();
    let (mut q, found) = c.program("c", &["--entries", "100", "--linger"]);
    // The first records make the file.
    assert!(found + 8 >= on_backup, "{found} of {on_backup} are there");
    q.acknowledged(found, found + 100);
    let (_a, _b) = (c.node("a"), c.node("b"));
    await_that("a mirror", || {
        let r = c.register("c");
        (r["primary"]["node"] == "c" && r["mirror"].is_object()).then_some(())
    });
    c.assert_equal();
    q.finish();
}

/// The backup alone was cut off from primary and mirror, and took the place of
/// two that were well: nothing told it that the voters still heard of them.
#[test]
fn a_backup_that_is_cut_off_leaves_a_primary_that_lives_alone() {
    let c = falling_back();
    be_patient(&c);
    // Whoever leads the voters is heard by `a` also when `c` is cut off (docs/reference/protocol.md,
    // "What it does not do"). A backup that led them itself, on a busy machine, once took
    // over: nobody else could write. So it has no vote.
    for data in ["[node.b]", "[node.c]"] {
        c.rewrite(data, &format!("{data}\nvote = false"));
    }
    let plain = fs::read_to_string(c.file()).unwrap();
    let mut ways = Vec::new();
    // What `node` reads: it reaches the others by ways that can be cut.
    let mut as_seen_by = |node: &str, others: &[usize]| {
        let mut text = plain.clone();
        for i in others {
            let (way, port) = Way::new(c.ports[*i].number);
            ways.push(way);
            let real = format!("address = \"127.0.0.1:{}\"", c.ports[*i].number);
            text = text.replace(&real, &format!("address = \"127.0.0.1:{port}\""));
        }
        let file = c.dir.join(format!("{node}.toml"));
        fs::write(&file, text).unwrap();
        file
    };
    let files = [
        as_seen_by("a", &[2]),
        as_seen_by("b", &[2]),
        as_seen_by("c", &[0, 1]),
    ];
    let (_w, _x) = (c.node("w"), c.node("x"));
    let start = |i: usize| c.node_as(&files[i], ["a", "b", "c"][i]);
    let (_a, _b) = (start(0), start(1));
    let (mut p, _) = c.program("a", &["--pace", "500"]);
    p.acknowledged(0, 100);
    let _c = start(2);
    c.await_backup();
    let p = p.read_on_counting();
    ways.iter().for_each(Way::cut);
    // A register that was read: the voters may not answer in time once.
    let read = || {
        let r = c.register("a");
        r["version"].as_u64().map(|version| (version, r))
    };
    // Four a limit: five limits, three of which are the backup's patience.
    let end = await_that("the register", read).0 + 20;
    let (_, last) = await_that("the primary's signs of life", || {
        read().filter(|(version, _)| *version >= end)
    });
    assert_eq!(last["primary"]["node"], "a", "{}", c.status());
    p.await_more(100);
    p.stop();
}

/// Primary and daemon sleep while a backup takes the place of both: when they
/// wake, nothing more is acknowledged. That each thread looks at the lease is
/// tested where it does (`primary.rs`).
#[test]
fn a_primary_whose_lease_ended_in_its_sleep_acknowledges_nothing() {
    let c = falling_back();
    let a = c.node("a");
    let mut b = c.node("b");
    let (_c, _w, _x) = (c.node("c"), c.node("w"), c.node("x"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 200);
    c.await_backup();
    let id = p.child.id();
    // In this order: without a program `a` gives nobody up, and while its daemon lives nobody
    // takes over, however long this thread stands still in between.
    hold(&c, "a", "b", |s| p.signal(s));
    b.kill();
    a.signal("STOP");
    c.await_view("c", "c", None);
    let before = p.read_on_counting();
    // What it had written before it was stopped; one more may have been
    // acknowledged and not yet said.
    let said = before.read_all();
    a.signal("CONT");
    before.signal("CONT");
    let all = before.end();
    assert!(all <= said + 1, "process {id}: {said} said, then {all}");
}

/// A backup looked for the primary only while the register answered. One that was
/// led meanwhile, and lost its leader before the first answer, took itself for the
/// first of all to come back, and never went on.
#[test]
fn a_backup_that_was_led_before_the_register_answered_goes_on() {
    let c = falling_back();
    let a = c.node("a");
    let mut b = c.node("b");
    let w = c.node("w");
    let (mut x, mut later) = (c.node("x"), c.node("c"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 200);
    c.await_view("a", "a", Some("b"));
    // A voter that was never admitted stands in for no other.
    ["c", "x"].iter().for_each(|n| c.await_admitted(n));
    let led = |b: &Process| {
        let all = b.errors();
        let led = all
            .lines()
            .filter(|l| l.ends_with(": forwarding to node c"));
        led.count()
    };
    x.kill();
    later.kill();
    // Two of five voters are left with the backup: no answer.
    a.signal("STOP");
    w.signal("STOP");
    let before = led(&b);
    let _c = c.node("c");
    // Not by its status, which would wait for the register, too.
    await_that("the backup is led", || (led(&b) > before).then_some(()));
    p.signal("STOP");
    b.kill();
    w.signal("CONT");
    let _x = c.node("x");
    c.await_view("c", "c", None);
}

/// Primary `a` stays the view's, which node `by` reads. Nothing tells that somebody
/// waits: looks for twice the time after which it would go on.
fn stays(c: &Cluster, by: &str) {
    let version = || c.register(by)["version"].as_u64();
    await_that("the register", version);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(7) {
        let primary = c.register(by)["primary"]["node"].take();
        assert!(primary.is_null() || primary == "a", "{}", c.status());
    }
}

/// A mirror that was cut off and given up took itself for a backup of the present view
/// when its primary was lost: all that was acknowledged since would have been given up.
#[test]
fn a_mirror_that_was_given_up_is_no_backup() {
    let c = falling_back();
    let mut a = c.node("a");
    let b = c.node("b");
    let (_w, _x) = (c.node("w"), c.node("x"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 200);
    b.signal("STOP");
    c.await_view("a", "a", None);
    // More than may have been under way.
    let before = p.read_on_counting();
    before.await_more(200);
    a.kill();
    let acknowledged = before.stop();
    b.signal("CONT");
    stays(&c, "b");
    let _a = c.node("a");
    goes_on_at("a", &c, acknowledged);
}

/// A backup that was just started may be the first of all to come back: it waits for
/// those who may have more.
#[test]
fn a_backup_that_has_met_nobody_waits() {
    let c = falling_back();
    let mut data: Vec<Process> = ["a", "b", "c"].map(|n| c.node(n)).into();
    let (_w, _x) = (c.node("w"), c.node("x"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 200);
    c.await_backup();
    // The primary's daemon last, and its program does nothing more: who of the others still
    // lives leaves the view as it is, however long this thread stands still in between.
    p.signal("STOP");
    data.iter_mut().rev().for_each(Process::kill);
    p.kill();
    let acknowledged = rest(&mut p).map_or(200, |last| last + 1);
    let _c = c.node("c");
    stays(&c, "c");
    let (_a, _b) = (c.node("a"), c.node("b"));
    goes_on_at("a", &c, acknowledged);
}

/// A mirror's copy that an operator wants made anew went on by itself, when its primary
/// was lost before it sent another.
#[test]
fn a_mirror_that_is_distrusted_waits_for_a_word() {
    let c = Cluster::new("sync", "disk");
    let (mut a, _b, _w) = (c.node("a"), c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 200);
    // Its daemon lives on: nobody takes over, and nobody sends a copy.
    hold(&c, "a", "b", |s| p.signal(s));
    let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
    let b = Address::Unix(c.dir.join("b/.mojim/node.sock"));
    let volume = "v".to_owned();
    let client = Client::connect(&env, &b, "failover", DEADLINE);
    let asked = client.and_then(|mut b| b.ask(&Request::CopyAnew { volume, epoch: 0 }));
    asked.unwrap_or_else(|e| panic!("{e}"));
    a.kill();
    p.kill();
    let acknowledged = rest(&mut p).map_or(200, |last| last + 1);
    stays(&c, "b");
    // The voters may not answer in time once.
    promotes(&c, &["--name", "b"]);
    goes_on_at("b", &c, acknowledged);
}

/// A cluster in which only backup `c` and the witnesses run, and the disk of mirror `b` has lost the end of
/// its log; and how many entries were acknowledged.
fn mirror_with_less() -> (Cluster, [Process; 3], u64) {
    let c = Cluster::larger("sync");
    be_patient(&c);
    // All records stay in the log.
    c.rewrite("[volume.v]", "[volume.v]\ncheckpoint_threshold = 1000000");
    let (mut a, mut b, left) = (c.node("a"), c.node("b"), c.node("c"));
    let (w, x) = (c.node("w"), c.node("x"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 300);
    let has_all = || {
        let (b, c) = (c.says("b"), c.says("c"));
        let last = b["last_lsn"].as_u64()?;
        (c["last_lsn"] == last && c["committed"].as_u64()? + 5 > last).then_some(())
    };
    // The mirror checkpoints when nothing comes for a while: then it lacks nothing.
    await_that("a backup that has all, and the mirror's log too", || {
        if c.waiting("b") < 60 {
            return None;
        }
        c.await_view("a", "a", Some("b"));
        p.signal("STOP");
        let has_all = (0..50).find_map(|_| has_all());
        b.signal("STOP");
        let is_member = c.register("a")["mirror"]["node"] == "b";
        let held = has_all.is_some() && is_member && c.waiting("b") > 40;
        if !held {
            b.signal("CONT");
            p.signal("CONT");
        }
        held.then_some(())
    });
    [&mut b, &mut a, &mut p].into_iter().for_each(Process::kill);
    let acknowledged = rest(&mut p).map_or(300, |last| last + 1);
    let (records, mut log) = c.records("b");
    let lost = &records[records.len() - 40..];
    assert!(c.checkpoint("b") < lost[0].0);
    for (_, at) in lost {
        log[*at..*at + 512].fill(0);
    }
    fs::write(c.log("b"), log).unwrap();
    (c, [left, w, x], acknowledged)
}

/// The same, with mirror `b` started again without its ring; and what it says of taking over.
fn mirror_with_less_says() -> (Cluster, [Process; 4], u64, String) {
    let (c, [left, w, x], acknowledged) = mirror_with_less();
    // Its ring went with its power.
    for d in fs::read_dir(&c.memory).unwrap().map(Result::unwrap) {
        if d.file_name().to_string_lossy().contains("-b-") {
            fs::remove_dir_all(d.path()).unwrap();
        }
    }
    let b = c.node("b");
    let said = await_or(
        "a mirror that says why it stays",
        || c.status().to_string(),
        || Some(c.says("b")["take_over_error"].as_str()?.to_owned()),
    );
    (c, [left, w, x, b], acknowledged, said)
}

/// A mirror whose disk had lost the end of its log took over while its primary was down: 40
/// acknowledged entries were lost, though a backup that had them all, and knew that they were
/// acknowledged, answered.
#[test]
fn a_mirror_that_has_less_than_a_backup_knows_of_does_not_take_over() {
    // Where it was about to apply what its log lacks now, its catalogue says so, and it stays for
    // that: then once more.
    let mut tries = 0;
    let (c, _running, acknowledged, said) = loop {
        let (c, running, acknowledged, said) = mirror_with_less_says();
        if !said.contains("its log is damaged") {
            break (c, running, acknowledged, said);
        }
        drop((running, c));
        tries += 1;
        assert!(tries < 10, "{said}");
    };
    assert!(said.contains("node c knows that sync points"), "{said}");
    stays(&c, "b");
    // The voters, or the backup, may not answer in time once.
    await_or(
        "the word of it",
        || text(&c.mojim("status", &[]).stdout),
        || {
            let all = text(&c.mojim("status", &[]).stdout);
            all.contains("node b does not take the place").then_some(())
        },
    );
    await_or(
        "the refusal",
        || c.logs(),
        || {
            let out = c.mojim("promote", &["--name", "b"]);
            let said = text(&out.stderr);
            assert_eq!(out.status.code(), Some(1), "{said}");
            let advised = c.advised("promote", "--force --volume v --name c");
            said.contains(&advised).then_some(())
        },
    );
    promotes(&c, &["--name", "c", "--force", "--yes"]);
    goes_on_at("c", &c, acknowledged);
}

/// `mojim promote` succeeds, at last.
fn promotes(c: &Cluster, args: &[&str]) {
    await_or(
        "the promotion",
        || text(&c.mojim("promote", args).stderr),
        || (c.mojim("promote", args).status.code() == Some(0)).then_some(()),
    );
}

/// With the other voters down, `promote` said "Connection refused", and nothing of what
/// that means or what to do.
#[test]
fn a_promotion_without_a_majority_says_what_it_lacks() {
    let c = Cluster::new("sync", "disk");
    let _b = c.node("b");
    for force in [&[][..], &["--force", "--yes"]] {
        let out = c.mojim("promote", &[&["--name", "b"], force].concat());
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(
            said.contains("a majority of the voters has to agree"),
            "{said}"
        );
        assert!(said.contains("start them, then promote again"), "{said}");
        let needs = "--force needs a majority too";
        assert_eq!(said.contains(needs), !force.is_empty(), "{said}");
    }
}

/// `promote` took whoever had the copy open for a program that serves it, and said
/// "already" of a primary that had lost its ring: its own daemon had had a look at it.
#[test]
fn who_only_holds_a_copy_does_not_vouch_for_it() {
    let c = Cluster::new("sync", "disk");
    let (mut a, mut b, _w) = (c.node("a"), c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 100);
    // Nobody is left who could take over or go on alone, at any moment.
    hold(&c, "a", "b", |s| p.signal(s));
    [&mut b, &mut a, &mut p].into_iter().for_each(Process::kill);
    fs::remove_dir_all(&c.memory).unwrap();
    fs::create_dir(&c.memory).unwrap();
    let lock = c.dir.join("a/.mojim/v/lock");
    let lock = fs::File::options().write(true).open(lock).unwrap();
    rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    let _a = c.node("a");
    let refused = |why: &str| {
        await_that(why, || {
            let out = c.mojim("promote", &["--name", "a"]);
            assert_ne!(out.status.code(), Some(0), "{}", text(&out.stdout));
            text(&out.stderr).contains(why).then_some(())
        });
    };
    refused("is not served yet");
    drop(lock);
    refused("--force");
    // The daemon may have the copy open once more.
    promotes(&c, &["--name", "a", "--force", "--yes"]);
    goes_on_at("a", &c, 0);
}

/// Stopped beyond every limit, then resumed: what it was about to do fails,
/// and nothing of it was acknowledged.
#[test]
fn a_primary_that_slept_commits_nothing_when_it_wakes() {
    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let (mut p, _) = c.program("a", &[]);
    p.acknowledged(0, 100);
    hold(&c, "a", "b", |s| p.signal(s));
    a.signal("STOP");
    c.await_view("b", "b", None);
    let (mut q, found) = c.program("b", &["--entries", "100", "--linger"]);
    q.acknowledged(found, found + 100);
    a.signal("CONT");
    p.signal("CONT");
    let acknowledged = rest(&mut p).map_or(100, |last| last + 1);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} were there when b took over"
    );
    assert_ne!(p.wait(), Some(0), "it went on as if nothing had happened");
    c.await_view("b", "b", Some("a"));
    q.finish();
    c.assert_equal();
}

/// A primary's daemon alone is no primary's death, nor is a program's.
#[test]
fn neither_a_daemon_nor_a_program_alone_moves_the_primary() {
    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let (mut p, _) = c.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 50);
    // A mirror that was late at the start becomes a member later, which is another version.
    c.await_mirror();
    let version = || await_that("the register", || c.register("b")["version"].as_u64());
    let before = version();
    a.kill();
    // Several limits' worth of entries.
    p.acknowledged(50, 5000);
    assert_eq!(version(), before);
    let _a = c.node("a");
    p.kill();
    let acknowledged = rest(&mut p).map_or(5000, |last| last + 1);
    let (_p, found) = c.program("a", &["--entries", "1"]);
    assert!(found >= acknowledged);
}

/// `mojim run` on both nodes: the program runs where the primary is. (With `--preload` it does in
/// `partitions.rs`.)
#[test]
fn mojim_run_follows_the_primary() {
    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let source = c.dir.join("count.c");
    fs::write(
        &source,
        r#"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
/* Counts in a mapped file, and says each number once it is committed. */
int main(int argc, char **argv) {
    int fd = open(argv[argc - 1], O_RDWR | O_CREAT, 0644);
    if (fd < 0) { perror("open"); return 1; }
    if (ftruncate(fd, 4096)) { perror("ftruncate"); return 1; }
    long *n = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (n == MAP_FAILED) { perror("mmap"); return 1; }
    for (;;) {
        n[0]++;
        if (msync(n, 8, MS_SYNC)) { perror("msync"); return 1; }
        printf("%ld\n", n[0]);
        fflush(stdout);
        usleep(200);
    }
}
"#,
    )
    .unwrap();
    let program = c.dir.join("count");
    let cc = Command::new("cc")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(cc.success());
    let run = |node: &str| {
        let file = c.file();
        let data = c.dir.join(node).join("v/count");
        let args = ["run", "--config", file.to_str().unwrap(), "--name", node];
        let command = ["--", program.to_str().unwrap(), data.to_str().unwrap()];
        let args = [&args[..], &command].concat();
        Process::start(&args, &c.dir.join(format!("run-{node}.txt")))
    };
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let mut on_a = run("a");
    let mut last = 0;
    while last < 100 {
        last = on_a.line().expect("it counts").parse::<u64>().unwrap();
    }
    let mut on_b = run("b");
    c.await_mirror();
    // All of node a dies; the program's parent takes it along.
    a.kill();
    on_a.kill();
    last = rest(&mut on_a).unwrap_or(last);
    let first = on_b.line().expect("it goes on").parse::<u64>().unwrap();
    assert!(
        first > last,
        "{last} was committed on a, b went on with {first}"
    );
    assert!(first <= last + 2, "{last}, then {first}");
    // And back: an operator would rather have it on a.
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    let waits = |on_a: &Process| on_a.errors().matches("waiting, since").count();
    let waited = waits(&on_a);
    let mut on_a = run("a");
    on_b.signal("TERM");
    let mut last = first;
    while let Some(line) = on_b.line() {
        last = line.parse().unwrap_or(last);
    }
    assert_eq!(on_b.wait(), Some(128 + 15));
    // It says so after a second. One that has hardly begun would end by any signal's default.
    await_that("that it waits", || (waits(&on_a) > waited).then_some(()));
    assert!(on_a.child.try_wait().unwrap().is_none(), "it waits");
    assert!(last >= first);
    on_a.signal("TERM");
    assert_eq!(on_a.wait(), Some(128 + 15));
}

/// A program that was linked with libmojim failed over under `mojim run --preload` only. `mojim run` on
/// both nodes runs it where the primary is, whether it attaches the volume itself or maps files.
#[test]
fn a_linked_program_goes_on_where_the_primary_is() {
    for how in ["files", "attach"] {
        let c = Cluster::new("sync", "disk");
        let program = c.dir.join("linked");
        compile("tests/e2e/linked.c", &program, &[], true);
        let run = |node: &str| {
            let file = c.file();
            let data = match how {
                "files" => c.dir.join(node).join("v/f").display().to_string(),
                _ => "f".to_owned(),
            };
            let args = ["run", "--config", file.to_str().unwrap(), "--name", node];
            let command = ["--", program.to_str().unwrap(), how, &data];
            let args = [&args[..], &command].concat();
            Process::start(&args, &c.dir.join(format!("run-{node}.txt")))
        };
        let mut a = c.node("a");
        let b = c.node("b");
        let _w = c.node("w");
        let mut on_a = run("a");
        let mut last = 0;
        while last < 100 {
            let line = on_a.line();
            let line = line.unwrap_or_else(|| panic!("{how}: {}", on_a.errors()));
            last = line.parse::<u64>().unwrap();
        }
        let mut on_b = run("b");
        c.await_mirror();
        // All of node a dies; the program's parent takes it along.
        a.kill();
        on_a.kill();
        last = rest(&mut on_a).unwrap_or(last);
        let line = on_b.line();
        let line = line.unwrap_or_else(|| panic!("{how}: {}{}", on_b.errors(), b.errors()));
        let first = line.parse::<u64>().unwrap();
        assert!(
            first > last && first <= last + 2,
            "{how}: {last} was committed on a, b went on with {first}"
        );
        on_b.signal("TERM");
        while on_b.line().is_some() {}
        assert_eq!(on_b.wait(), Some(128 + libc::SIGTERM), "{how}");
        let said = on_b.errors();
        assert!(said.contains("ended (signal: 15 (SIGTERM))"), "{said}");
    }
}

/// A signal that a program knows, and that asks nobody to end, had `mojim run` end with the program when
/// another node took over, in place of waiting for its turn.
#[test]
fn a_run_that_passed_a_signal_on_still_follows_the_primary() {
    let c = Cluster::new("sync", "disk");
    let program = c.dir.join("linked");
    compile("tests/e2e/linked.c", &program, &[], true);
    be_patient(&c);
    let a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let file = c.file();
    let args = ["run", "--config", file.to_str().unwrap(), "--name", "a"];
    let args = [&args[..], &["--", program.to_str().unwrap(), "attach", "f"]].concat();
    let mut run = Process::start(&args, &c.dir.join("run.txt"));
    assert_eq!(run.line().as_deref(), Some("1"), "{}", run.errors());
    // The program ignores it.
    run.signal("USR1");
    let program = [program_of(run.child.id())];
    hold(&c, "a", "b", |s| match s {
        "STOP" => stop_all(&program),
        _ => continue_all(&program),
    });
    a.signal("STOP");
    c.await_view("b", "b", None);
    a.signal("CONT");
    continue_all(&program);
    await_that("that it waits", || {
        let waits = run.errors().contains("; node b is the primary now");
        (waits && run.child.try_wait().unwrap().is_none()).then_some(())
    });
    run.signal("TERM");
    assert_eq!(run.wait(), Some(128 + libc::SIGTERM), "{}", run.errors());
}

/// A mirror that stood still for a part of the limit, worked for a moment, and
/// stood still again was never given up: each time the clock began anew, and
/// sync points stalled on and off without an end.
#[test]
fn a_mirror_that_comes_and_goes_is_given_up() {
    let c = Cluster::new("sync", "disk");
    be_patient(&c);
    let _a = c.node("a");
    let b = c.node("b");
    let _w = c.node("w");
    let (mut p, _) = c.program("a", &["--pace", "200"]);
    p.acknowledged(0, 100);
    c.await_mirror();
    let version = || await_that("the register", || c.register("a")["version"].as_u64());
    let before = version();
    // Sync points flow all the time: a program that nobody reads stands still by itself.
    let p = p.read_on_counting();
    let mut rounds = 0;
    let mut short = 0;
    while version() == before {
        rounds += 1;
        assert!(rounds < 20, "it is in the view for ever");
        let begin = Instant::now();
        b.signal("STOP");
        // Longer than a sync point waits before it suspects the link, at most: a quarter of
        // the limit and a second for round trips.
        std::thread::sleep(Duration::from_millis(1800));
        b.signal("CONT");
        await_that("the mirror's daemon", || {
            (c.says("b")["reachable"] == true).then_some(())
        });
        // A machine that stands still makes it a long one; its links may be still later than
        // its daemon's answer.
        short += usize::from(begin.elapsed() < Duration::from_millis(2200));
    }
    assert!(short != 1 || rounds > 1, "one short break is no failure");
    // No sync point failed meanwhile.
    p.await_more(1000);
    p.stop();
}

/// The views were changed by hand while `failover` was manual; when it was
/// automatic again, the register knew nothing of that, and the old primary
/// went on from where it had been.
#[test]
fn an_old_primary_hears_of_a_promotion_by_hand() {
    let c = Cluster::new("sync", "disk");
    let stop = |p: &mut Process| {
        p.signal("TERM");
        assert_eq!(p.wait(), Some(0));
    };
    // Nobody here goes on alone: not because the other node is late at an attach, either.
    c.rewrite("failure_limit = \"1s\"", "failure_limit = \"10s\"");
    let mut all = ["a", "b", "w"].map(|n| c.node(n));
    let (mut p, _) = c.program("a", &["--entries", "100", "--first", "1"]);
    p.acknowledged(0, 1);
    c.await_mirror();
    p.go_on();
    assert_eq!(rest(&mut p), Some(99));
    assert_eq!(p.wait(), Some(0));
    all.iter_mut().for_each(stop);
    let by_hand = "[volume.v]\nfailover = \"manual\"";
    c.rewrite("[volume.v]", by_hand);
    let mut b = c.node("b");
    let promote = |more: &[&str]| promotes(&c, &[&["--name", "b"][..], more].concat());
    promote(&[]);
    let (mut q, found) = c.program("b", &["--entries", "50"]);
    assert_eq!(found, 100);
    assert_eq!(rest(&mut q), Some(149));
    assert_eq!(q.wait(), Some(0));
    stop(&mut b);
    c.rewrite(by_hand, "[volume.v]");
    let _all = ["a", "b", "w"].map(|n| c.node(n));
    c.await_view("a", "a", Some("b"));
    // The voters may not answer in time once.
    await_that("the refusal", || {
        let said = c.try_program("a", &["--entries", "1"]).err();
        said.expect("it is refused")
            .contains("by hand")
            .then_some(())
    });
    assert!(c.try_program("b", &["--entries", "1"]).is_err());
    // A person says which one goes on.
    promote(&["--force", "--yes"]);
    let (mut q, found) = c.program("b", &["--entries", "1", "--linger"]);
    assert_eq!(found, 150);
    q.acknowledged(150, 151);
    c.await_view("b", "b", Some("a"));
    q.finish();
    c.assert_equal();
}

/// What a primary sent comes late, over links that it has replaced meanwhile,
/// and all of it comes again, word for word, over new ones: to the mirror in the
/// same epoch, and to the same node when it is the primary in the next.
///
/// Nothing of it counts: the copies are equal, and what is acknowledged stays.
#[test]
fn words_of_old_links_come_late_and_twice() {
    let c = Cluster::new("sync", "disk");
    // The mirror hears the primary's daemon alone at times.
    be_patient(&c);
    let mut a = c.node("a");
    let b = c.node("b");
    let _w = c.node("w");
    let plain = fs::read_to_string(c.file()).unwrap();
    let (late, port) = Late::new(c.ports[1].number);
    let near = format!("127.0.0.1:{}", c.ports[1].number);
    // Only programs go that way.
    let program = |args: &[&str]| {
        c.rewrite(&near, &format!("127.0.0.1:{port}"));
        let attached = c.program("a", args);
        fs::write(c.file(), &plain).unwrap();
        attached
    };
    let (mut p, _) = program(&["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();
    let sessions = || b.errors().matches("following node a").count();
    for _ in 0..3 {
        let before = sessions();
        late.keep();
        await_that("another session", || (sessions() > before).then_some(()));
        p.await_more(100);
        assert!(late.deliver() > 0, "nothing was late");
        p.await_more(100);
    }
    // And when nothing newer follows that would cover it.
    late.keep();
    let acknowledged = p.stop();
    let (mut p, found) = program(&["--entries", "50", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    p.acknowledged(found, found + 50);
    late.deliver();
    c.assert_equal();
    assert!(late.repeat() > 0);
    c.await_view("a", "a", Some("b"));
    c.assert_equal();
    hold(&c, "a", "b", |s| p.signal(s));
    a.kill();
    p.kill();
    let acknowledged = found + 50;
    let (mut q, found) = c.program("b", &["--pace", "2000"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 50);
    let q = q.read_on_counting();
    late.repeat();
    q.await_more(100);
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    late.repeat();
    q.await_more(100);
    c.assert_equal();
    q.stop();
}

/// One node of three cannot begin anything, and says why.
#[test]
fn what_has_no_majority_says_so() {
    let c = Cluster::new("sync", "disk");
    let _a = c.node("a");
    // A daemon that stands still for so long as its program waits cannot say so.
    await_that("the reason", || {
        let out = c.mojim("__append", &["--node", "a", "--entries", "1"]);
        assert_ne!(out.status.code(), Some(0));
        text(&out.stderr).contains("voter").then_some(())
    });
}
