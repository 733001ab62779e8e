//! Voters together: who wins a swap, who leads, what a minority cannot do,
//! what a start from disk brings back.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use mojim_env::locks::lock;
use mojim_env::{Address, Env, Error};
use mojim_linux::{Listener, Os};
use mojim_protocol::view::Register;
use mojim_protocol::{FAR, LAST_EPOCH};
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{RaftCall, Retired};

use super::daemons::{Cut, Daemons};
use super::failing::Failing;
use super::register;
use super::storage::as_format_1;
use crate::RegisterVoter;
use crate::net::{Links, numbered};
use crate::views::{Options, RaftViews, may_write, meet};

const ABC: [&str; 3] = ["a", "b", "c"];

/// What did not happen by then does not happen.
const DEADLINE: Duration = Duration::from_secs(180);

/// Swaps until its fate is known: true if this caller's was done. One that nothing was heard
/// of may still be done later: so it is asked for again, until it or another was.
fn swap(at: &RaftViews, volume: &str, new: &Register) -> bool {
    let mut in_doubt = false;
    let begun = Instant::now();
    loop {
        match at.swap(volume, new) {
            Ok(true) => return true,
            Ok(false) => return in_doubt && read(at, volume) == *new,
            Err(Error::Timeout(_)) if begun.elapsed() < DEADLINE => in_doubt = true,
            Err(e) => panic!("{e}"),
        }
    }
}

/// Reads until somebody leads: on a busy machine an election may take longer than a test's
/// short timeout.
fn read(at: &RaftViews, volume: &str) -> Register {
    let begun = Instant::now();
    loop {
        match at.read(volume) {
            Err(Error::Timeout(_)) if begun.elapsed() < DEADLINE => {}
            r => return r.unwrap(),
        }
    }
}

/// Fails with `Timeout`, and not much later than it may: this thread, or the one that answers
/// it, may stand still for seconds.
fn times_out<T: std::fmt::Debug>(bound: Duration, f: impl FnOnce() -> mojim_env::Result<T>) {
    let begun = Instant::now();
    let e = f().unwrap_err();
    assert!(matches!(e, Error::Timeout(_)), "{e}");
    assert!(begun.elapsed() < bound + Duration::from_secs(15));
}

#[test]
fn each_version_is_won_once() {
    const VERSIONS: u64 = 40;
    let d = Daemons::started(&ABC);
    let won: Mutex<BTreeMap<u64, Vec<Register>>> = Mutex::default();
    let seen: Mutex<Vec<Register>> = Mutex::default();
    let known = AtomicU64::new(0);
    std::thread::scope(|s| {
        for i in 0..6 {
            let at = d.at(ABC[i % 3]);
            let (won, seen, known) = (&won, &seen, &known);
            s.spawn(move || {
                loop {
                    let least = known.load(SeqCst);
                    let now = read(&at, "v");
                    assert!(now.version >= least, "a read went back");
                    known.fetch_max(now.version, SeqCst);
                    if now.version >= VERSIONS {
                        return;
                    }
                    let new = register(now.version + 1, &format!("thread {i}"));
                    if now.version > 0 {
                        lock(seen).push(now);
                    }
                    if swap(&at, "v", &new) {
                        known.fetch_max(new.version, SeqCst);
                        lock(won).entry(new.version).or_default().push(new);
                    }
                }
            });
        }
    });
    let won = won.into_inner().unwrap();
    assert!(won.keys().copied().eq(1..=VERSIONS));
    for (version, winners) in &won {
        assert_eq!(winners.len(), 1, "version {version}");
    }
    for r in seen.into_inner().unwrap() {
        assert_eq!(r, won[&r.version][0]);
    }
    for name in ABC {
        assert_eq!(read(&d.at(name), "v"), won[&VERSIONS][0]);
        assert_eq!(read(&d.at(name), "another"), Register::default());
    }
}

/// Without keys, any local user had a register take an epoch near the end of the numbers: only
/// a node that proved its name was bound, and only by the node that it asked.
#[test]
fn no_epoch_comes_far_after_another() {
    let d = Daemons::started(&ABC);
    let leader = d.leader("");
    let new = |version, epoch| Register {
        epoch,
        ..register(version, "x")
    };
    // Whatever the fate of others is, this one is refused.
    let refused = |new: &Register| {
        let begun = Instant::now();
        loop {
            match d.at(&leader).swap("v", new) {
                Err(Error::Timeout(_)) if begun.elapsed() < DEADLINE => {}
                r => return matches!(r, Err(Error::Invalid(_))),
            }
        }
    };
    assert!(refused(&new(1, LAST_EPOCH)));
    assert!(swap(&d.at(&leader), "v", &new(1, 7)));
    for far in [3 * FAR, LAST_EPOCH, u64::MAX] {
        assert!(refused(&new(2, far)));
        // Nor does a question that another voter passes on.
        assert!(d.at(&d.follower()).swap("v", &new(2, far)).is_err());
    }
    assert_eq!(read(&d.at(&leader), "v"), new(1, 7));
    assert!(swap(&d.at(&d.follower()), "v", &new(2, 7 + FAR)));
}

#[test]
fn another_leads_when_the_leader_stops() {
    let d = Daemons::started(&ABC);
    let first = d.leader("");
    assert!(swap(&d.at(&d.follower()), "v", &register(1, "x")));
    d.stop(&first);
    let second = d.leader(&first);
    assert_ne!(first, second);
    let third = ABC.into_iter().find(|n| **n != first && **n != second);
    let third = d.at(third.unwrap());
    assert_eq!(read(&third, "v"), register(1, "x"));
    assert!(swap(&third, "v", &register(2, "y")));
    assert!(!swap(&d.at(&second), "v", &register(2, "z")));
    // Back, the first one has missed nothing.
    let first = d.start(&first);
    assert_eq!(read(&first, "v"), register(2, "y"));
}

#[test]
fn a_minority_reads_and_swaps_nothing() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(2);
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    // One that does not lead when it is alone: what a leader has in its log may be done later.
    // (On a busy machine the one that was left was elected between the two stops.)
    let left = loop {
        let left = d.follower();
        for name in ABC.into_iter().filter(|n| *n != left) {
            d.stop(name);
        }
        if d.at(&left).leader().as_ref() != Some(&left) {
            break left;
        }
        for name in ABC.into_iter().filter(|n| *n != left) {
            d.start(name);
        }
    };
    let alone = d.at(&left);
    times_out(d.options.timeout, || alone.read("v"));
    times_out(d.options.timeout, || alone.swap("v", &register(2, "y")));
    for name in ABC.into_iter().filter(|n| *n != left) {
        d.start(name);
    }
    d.leader("");
    assert_eq!(read(&alone, "v"), register(1, "x"));
}

#[test]
fn a_cut_off_leader_answers_nothing() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(4);
    d.start_all();
    let old = d.leader("");
    let other = d.at(ABC.into_iter().find(|n| **n != old).unwrap());
    assert!(swap(&other, "v", &register(1, "x")));
    d.isolate(&old, Cut::Silent);
    // The others' swap waits for the old leader in vain, until there is a new one.
    assert!(swap(&other, "v", &register(2, "new")));
    let alone = d.at(&old);
    times_out(d.options.timeout, || alone.swap("v", &register(2, "old")));
    times_out(d.options.timeout, || alone.read("v"));
    d.heal();
    d.leader("");
    assert_eq!(read(&alone, "v"), register(2, "new"));
    assert!(swap(&alone, "v", &register(3, "back")));
    assert_eq!(read(&other, "v"), register(3, "back"));
}

#[test]
fn closed_links_are_made_again() {
    let d = Daemons::started(&ABC);
    let cut = d.follower();
    let at = d.at(&cut);
    assert!(swap(&at, "v", &register(1, "x")));
    d.isolate(&cut, Cut::Closed);
    let leader = d.leader(&cut);
    assert!(swap(&d.at(&leader), "v", &register(2, "y")));
    d.heal();
    assert_eq!(read(&at, "v"), register(2, "y"));
}

#[test]
fn all_start_from_their_disks() {
    let d = Daemons::started(&ABC);
    for version in 1..=30 {
        assert!(swap(&d.at("a"), "v", &register(version, "x")));
    }
    for round in 30..32 {
        d.stop_all();
        d.start_all();
        // The first read after it sees everything, whoever leads.
        assert_eq!(read(&d.at("b"), "v"), register(round, "x"));
        assert!(swap(&d.at("c"), "v", &register(round + 1, "x")));
    }
}

/// A leader that takes up its old term again has acknowledged more than the
/// other voter has, which it brings up to date piece by piece. What is committed
/// anew in between is old; openraft 0.9 alone answered reads from it.
#[test]
fn a_leader_that_comes_back_reads_nothing_old() {
    let d = Daemons::started(&ABC);
    let leader = d.leader("");
    let mut others = d.names();
    others.retain(|n| *n != leader);
    assert!(swap(&d.at(&leader), "v", &register(1, "x")));
    let behind = &others[0];
    d.at(behind)
        .until(|m| m.last_applied.is_some_and(|a| a.index >= 2));
    d.stop(behind);
    for version in 2..=150 {
        assert!(swap(&d.at(&leader), "v", &register(version, "x")));
    }
    // The other may have taken its place, where it stood still for too long: it has as much.
    let leader = d.leader(behind);
    d.stop_all();
    d.start(behind);
    let back = d.start(&leader);
    assert_eq!(read(&back, "v"), register(150, "x"));
}

#[test]
fn a_late_voter_gets_a_snapshot_in_pieces() {
    const VOLUMES: u64 = 60;
    let mut d = Daemons::new(&ABC);
    d.snapshots = (20, 5);
    let volume = |i| format!("a volume with a long name, number {i}");
    d.options.volumes = (0..VOLUMES).map(volume).collect();
    d.start("a");
    d.start("b");
    let (a, b) = (d.at("a"), d.at("b"));
    for i in 0..VOLUMES {
        assert!(swap(&a, &volume(i), &register(1, "somebody")));
    }
    for v in [&a, &b] {
        v.until(|m| m.purged.is_some_and(|p| p.index > 20));
    }
    let c = d.start("c");
    // Where `a` does not lead, it may have applied less than was acknowledged: what counts is
    // the last register.
    let (seen, last) = (c.clone(), volume(VOLUMES - 1));
    c.until(move |m| m.snapshot.is_some() && seen.here(&last) == register(1, "somebody"));
    for i in 0..VOLUMES {
        assert_eq!(c.here(&volume(i)), register(1, "somebody"));
    }
    // From snapshots and what is left of the logs.
    drop((a, b, c));
    d.stop_all();
    d.start_all();
    for i in [0, 20, 45, VOLUMES - 1] {
        assert_eq!(read(&d.at("c"), &volume(i)), register(1, "somebody"));
    }
}

#[test]
fn a_voter_whose_disk_failed_takes_no_part() {
    let d = Daemons::new(&ABC);
    let disks: Vec<_> = ABC.map(|n| (n, Arc::new(Failing::default()))).into();
    for (name, disk) in &disks {
        d.start_on(disk.clone(), name);
    }
    d.await_admitted(&d.names());
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    // The one that leads when its disk has failed: it cannot even give its place up without a
    // vote on that disk. (On a busy machine another may lead by then.)
    let (leader, failing) = loop {
        let leader = d.leader("");
        let failing = disks.iter().find(|(n, _)| **n == leader).unwrap();
        failing.1.fail(true);
        if d.at(&leader).leader() == Some(leader.clone()) {
            break (leader, failing);
        }
        failing.1.fail(false);
        d.stop(&leader);
        d.start_on(failing.1.clone(), &leader);
    };
    let broken = d.at(&leader);
    // Its fate is not known here: it may have reached the others.
    let e = broken.swap("v", &register(2, "broken")).unwrap_err();
    assert!(matches!(e, Error::Poisoned(_) | Error::Timeout(_)), "{e}");
    broken.until(|m| m.running_state.is_err());
    failing.1.fail(false);
    for r in [broken.read("v"), broken.read("v")] {
        assert!(matches!(r, Err(Error::Poisoned(_))), "{r:?}");
    }
    assert!(matches!(
        broken.swap("v", &register(2, "y")),
        Err(Error::Poisoned(_))
    ));
    let next = d.leader(&leader);
    let now = read(&d.at(&next), "v");
    assert!(now == register(1, "x") || now == register(2, "broken"));
    assert!(swap(&d.at(&next), "v", &register(now.version + 1, "z")));
    // Started again, it is looked at and goes on.
    d.stop(&leader);
    let well = d.start(&leader);
    assert_eq!(read(&well, "v"), register(now.version + 1, "z"));
}

/// Each line goes to a test. So does, in place of a line that the voter does not vote, that it
/// still has its part while it says so.
struct Lines {
    tell: Sender<String>,
    voter: Arc<OnceLock<Arc<RegisterVoter>>>,
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut text = String::from_utf8_lossy(line).into_owned();
        if text.contains("does not vote") && self.voter.wait().part().is_ok() {
            text = "too early: the voter has its part".into();
        }
        // The test may be over.
        let _ = self.tell.send(text);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A voter whose lines are sent to `tell`.
fn start_telling(disk: Arc<Failing>, options: Options, tell: Sender<String>) -> Arc<RegisterVoter> {
    let known = Arc::<OnceLock<_>>::default();
    let voter = known.clone();
    let lines = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_env_filter("mojim=info")
        .with_writer(move || Lines {
            tell: tell.clone(),
            voter: voter.clone(),
        })
        .finish();
    let start = || RegisterVoter::start(disk, options).unwrap();
    let started = tracing::subscriber::with_default(lines, start);
    known.get_or_init(|| started).clone()
}

/// Waits until the voter has said that it votes again. On a busy machine it was tried in vain
/// before, and said why.
fn votes_again(told: &Receiver<String>) {
    loop {
        let text = told.recv_timeout(DEADLINE).unwrap();
        if text.contains("votes on views again") {
            return;
        }
        assert!(text.contains("does not vote"), "{text}");
    }
}

/// A full disk ended a daemon's vote for as long as the daemon ran: with two of three
/// full for a while, nothing could attach any more, though both had room again.
///
/// The voter said that it does not vote before it had put its part aside. A question just then met
/// a part that was being stopped, which is another error.
#[test]
fn a_voter_whose_disk_is_well_again_votes_again() {
    let d = Daemons::new(&["a"]);
    let disk = Arc::new(Failing::default());
    let (tell, told) = std::sync::mpsc::channel();
    let voter = start_telling(disk.clone(), d.options_of("a"), tell);
    assert!(voter.swap("v", &register(1, "x")).unwrap());
    disk.fail(true);
    let e = voter.swap("v", &register(2, "y")).unwrap_err();
    assert!(matches!(e, Error::Poisoned(_)), "{e}");
    let text = told.recv_timeout(DEADLINE).unwrap();
    assert!(text.contains("does not vote"), "{text}");
    // Tried again, while the disk is as it was.
    let e = voter.read("v").unwrap_err();
    assert!(matches!(e, Error::Poisoned(_)), "{e}");
    disk.fail(false);
    votes_again(&told);
    let now = voter.read("v").unwrap();
    assert!(
        now == register(1, "x") || now == register(2, "y"),
        "{now:?}"
    );
    assert!(voter.swap("v", &register(now.version + 1, "z")).unwrap());
    voter.stop();
    assert!(matches!(voter.read("v"), Err(Error::Busy(_))));
}

/// The file system of a voter's directory was unmounted when its disk failed: within a
/// second the voter came back as a new one, without its votes, and nobody had decided that.
#[test]
fn a_voter_does_not_come_back_without_its_log() {
    let d = Daemons::new(&["a"]);
    let disk = Arc::new(Failing::default());
    let (tell, told) = std::sync::mpsc::channel();
    let options = d.options_of("a");
    let (dir, away) = (options.dir.clone(), options.dir.with_extension("away"));
    let voter = start_telling(disk.clone(), options, tell);
    assert!(voter.swap("v", &register(1, "x")).unwrap());
    disk.fail(true);
    voter.swap("v", &register(2, "y")).unwrap_err();
    let text = told.recv_timeout(DEADLINE).unwrap();
    assert!(text.contains("does not vote"), "{text}");
    std::fs::rename(&dir, &away).unwrap();
    disk.fail(false);
    let text = loop {
        let text = told.recv_timeout(DEADLINE).unwrap();
        assert!(!text.contains("votes on views again"), "{text}");
        if text.contains("is gone") {
            break text;
        }
    };
    assert!(text.contains("Keep this voter stopped"), "{text}");
    // Each try makes the directory: also one between these two.
    let begun = Instant::now();
    loop {
        let _ = std::fs::remove_dir_all(&dir);
        match std::fs::rename(&away, &dir) {
            Ok(()) => break,
            Err(e) => assert!(begun.elapsed() < DEADLINE, "{e}"),
        }
    }
    votes_again(&told);
    assert!(voter.read("v").unwrap().version >= 1);
    voter.stop();
}

#[test]
fn one_voter_is_enough() {
    let d = Daemons::started(&["a"]);
    assert_eq!(read(&d.at("a"), "v"), Register::default());
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    assert!(!swap(&d.at("a"), "v", &register(1, "x again")));
    d.stop("a");
    let a = d.start("a");
    assert_eq!(read(&a, "v"), register(1, "x"));
    assert_eq!(a.leader().as_deref(), Some("a"));
}

#[test]
fn of_two_voters_both_are_needed() {
    let mut d = Daemons::new(&["a", "b"]);
    d.options.timeout = Duration::from_secs(2);
    d.start_all();
    d.leader("");
    assert!(swap(&d.at("b"), "v", &register(1, "x")));
    d.stop("a");
    times_out(d.options.timeout, || d.at("b").read("v"));
    d.start("a");
    d.leader("");
    assert_eq!(read(&d.at("a"), "v"), register(1, "x"));
}

/// A second daemon of one name said only who held a file, and not what that means.
#[test]
fn what_a_start_refuses() {
    let d = Daemons::new(&["a"]);
    let a = d.start("a");
    assert!(swap(&a, "v", &register(1, "x")));
    let e = RaftViews::start(Arc::new(Os::new().unwrap()), d.options_of("a"))
        .err()
        .unwrap();
    assert!(matches!(e, Error::Busy(_)), "{e}");
    let process = format!("held by process {}", std::process::id());
    for words in ["node a already runs here: ", &process] {
        assert!(e.to_string().contains(words), "{e}");
    }
    d.stop("a");
    // A caller that still holds the stopped voter gets an error.
    let e = a.read("v").unwrap_err();
    assert!(matches!(e, Error::Busy(_)), "{e}");

    let config = |change: &dyn Fn(&mut crate::Options)| {
        let mut o = d.options_of("a");
        change(&mut o);
        let e = RaftViews::start(Arc::new(Os::new().unwrap()), o)
            .err()
            .unwrap();
        assert!(matches!(e, Error::Config(_)), "{e}");
    };
    config(&|o| o.me = "x".into());
    config(&|o| o.cluster = "another".into());
    config(&|o| o.heartbeat = Duration::ZERO);
    config(&|o| o.election.0 = o.heartbeat);
    config(&|o| {
        let address = o.voters["a"].clone();
        o.voters.insert("b".into(), address);
    });
    d.start("a");
    assert_eq!(read(&d.at("a"), "v"), register(1, "x"));
}

#[test]
fn a_name_too_long_for_a_question_is_refused() {
    let d = Daemons::started(&["a"]);
    let e = d.at("a").swap(&"x".repeat(5000), &register(1, "x"));
    assert!(matches!(e, Err(Error::Invalid(_))), "{e:?}");
    // Nor a register that no volume has: it would stay there for ever.
    let e = d.at("a").swap("stranger", &register(1, "x"));
    assert!(matches!(e, Err(Error::Invalid(_))), "{e:?}");
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
}

#[test]
fn calls_from_within_another_runtime_do_not_panic() {
    let d = Daemons::started(&["a"]);
    let a = d.at("a");
    let other = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    other.block_on(async {
        assert!(a.swap("v", &register(1, "x")).unwrap());
        assert_eq!(a.read("v").unwrap(), register(1, "x"));
        let call = RaftCall {
            to: "a".into(),
            from: "b".into(),
            voters: 0,
            life: Some(1),
            knows: None,
            rpc: "vote".into(),
            body: serde_json::Value::Null,
        };
        a.hear(call).unwrap_err();
    });
}

/// A voter is lost for good, and another takes its place while the others are started
/// with the new configuration, one after the other. The new voter counts: with it and one
/// of the old ones there is a majority. The voter that was replaced is heard by nobody,
/// and the old configuration is not taken any more.
#[test]
fn another_takes_the_place_of_a_lost_voter() {
    let mut d = Daemons::new(&["a", "b", "c", "d"]);
    d.snapshots = (8, 4);
    let at_d = d.options.voters.remove("d").unwrap();
    d.start_all();
    for version in 1..30 {
        assert!(swap(&d.at("a"), "v", &register(version, "x")));
    }
    let before = d.options.clone();
    d.stop("b");
    d.options.voters.remove("b");
    d.options.voters.insert("d".into(), at_d);
    d.options.replaced.insert("d".into(), vec!["b".into()]);
    // Alone, `d` begins no log of its own.
    d.start("d");
    for name in ["a", "c"] {
        d.stop(name);
        d.start(name);
    }
    let ids = ["a", "c", "d"].map(crate::types::number);
    for name in ["a", "c", "d"] {
        d.at(name).until(move |m| {
            let of = m.membership_config.membership();
            of.get_joint_config().as_slice() == [ids.into()]
        });
        let mut voters = d.at(name).voters().unwrap();
        voters.sort();
        assert_eq!(voters, ["a", "c", "d"]);
    }
    assert_eq!(read(&d.at("d"), "v"), register(29, "x"));
    // The one that was replaced comes back, and knows nothing of it.
    let old = as_before(&before, &d, "b");
    let b = RaftViews::start(Arc::new(Os::new().unwrap()), old).unwrap();
    d.stop("c");
    d.leader("c");
    assert!(swap(&d.at("d"), "v", &register(30, "y")));
    assert_eq!(read(&d.at("a"), "v"), register(30, "y"));
    assert!(b.read("v").is_err());
    b.stop();
    // The others refuse what it has in its file.
    let old = as_before(&before, &d, "c");
    match RaftViews::start(Arc::new(Os::new().unwrap()), old) {
        Err(Error::Config(e)) => assert!(e.contains("mojim replace"), "{e}"),
        other => panic!("{:?}", other.err()),
    }
    d.start("c");
    assert_eq!(read(&d.at("c"), "v"), register(30, "y"));
}

/// The first attempt is given up: its node was never started, and was a learner
/// for ever, which the leader tried to be rid of by proposing the same voters
/// over and over.
#[test]
fn an_attempt_that_is_given_up_leaves_nothing() {
    let mut d = Daemons::new(&["a", "b", "c", "d", "e"]);
    let at = ["d", "e"].map(|n| d.options.voters.remove(n).unwrap());
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.stop("b");
    d.options.voters.remove("b");
    d.options.voters.insert("d".into(), at[0].clone());
    d.options.replaced.insert("d".into(), vec!["b".into()]);
    let restart = |d: &Daemons| {
        for name in ["a", "c"] {
            d.stop(name);
            d.start(name);
        }
    };
    restart(&d);
    let learner = crate::types::number("d");
    d.at("a")
        .until(move |m| m.membership_config.nodes().any(|(n, _)| *n == learner));
    d.options.voters.remove("d");
    d.options.voters.insert("e".into(), at[1].clone());
    d.options.replaced.remove("d");
    d.options
        .replaced
        .insert("e".into(), vec!["b".into(), "d".into()]);
    restart(&d);
    d.start("e");
    let ids = ["a", "c", "e"].map(crate::types::number);
    for name in ["a", "c", "e"] {
        d.at(name).until(move |m| {
            let of = m.membership_config.membership();
            let nodes: std::collections::BTreeSet<u64> = of.nodes().map(|(n, _)| *n).collect();
            of.get_joint_config().as_slice() == [ids.into()] && nodes == ids.into()
        });
    }
    // The voters are proposed no more from now on. (On a busy machine another may lead, by an entry of its own.)
    let proposed = || *d.at("a").metrics().membership_config.log_id();
    let before = proposed();
    for version in 2..20 {
        assert!(swap(&d.at("e"), "v", &register(version, "y")));
    }
    assert_eq!(read(&d.at("a"), "v"), register(19, "y"));
    assert_eq!(proposed(), before);
}

/// A voter that had lost its log, or never had one, began a new one with the replacement of
/// another: two of three, while the third had the register.
#[test]
fn who_lost_its_log_makes_no_cluster_with_a_new_one() {
    let mut d = Daemons::new(&["a", "b", "c", "d"]);
    d.options.timeout = Duration::from_secs(3);
    let at_d = d.options.voters.remove("d").unwrap();
    for name in ["a", "b"] {
        d.start(name);
    }
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.stop("b");
    d.options.voters.remove("b");
    d.options.voters.insert("d".into(), at_d);
    d.options.replaced.insert("d".into(), vec!["b".into()]);
    d.stop("a");
    // `c` never had a log.
    let (c, new) = (d.start("c"), d.start("d"));
    times_out(Duration::from_secs(3), || c.read("v"));
    times_out(Duration::from_secs(3), || new.swap("v", &register(1, "y")));
    // Nor do `c` and `a`, which has the register: `b` does not know `c`.
    let a = d.start("a");
    times_out(Duration::from_secs(3), || a.read("v"));
}

/// Waits until a voter has heard why it does not vote.
fn await_refused(v: &RaftViews, why: &str) {
    let begun = Instant::now();
    loop {
        match v.voters() {
            Err(Error::Stale(said)) if said.contains(why) => return,
            said => assert!(begun.elapsed() < DEADLINE, "{said:?}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `b` was away while `a` and `c` changed a view; then `a` was away, and `c` lost its disk:
/// `b` and the empty `c` led, and read the view of before. What was acknowledged in between
/// was on no node.
#[test]
fn a_voter_that_lost_its_directory_votes_for_nobody() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(3);
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.stop("b");
    assert!(swap(&d.at("a"), "v", &register(2, "y")));
    d.stop("a");
    d.stop("c");
    let dir = d.options_of("c").dir;
    let old = dir.with_extension("old");
    std::fs::rename(&dir, &old).unwrap();
    let (b, c) = (d.start("b"), d.start("c"));
    await_refused(&c, "--same-name c");
    times_out(d.options.timeout, || b.read("v"));
    times_out(d.options.timeout, || c.read("v"));
    // Nobody may give `c`'s directory up without a majority of those that were admitted.
    times_out(d.options.timeout, || b.retire("c"));
    let a = d.start("a");
    assert_eq!(read(&b, "v"), register(2, "y"));
    await_refused(&c, "--same-name c");
    assert_eq!(retire(&b, "a"), Retired::Votes);
    gives_up(&b, "c");
    d.await_admitted(&d.names());
    assert_eq!(read(&c, "v"), register(2, "y"));
    c.voters().unwrap();
    // It counts again.
    d.stop("b");
    assert!(swap(&a, "v", &register(3, "z")));
    // The directory that was lost is another voter's by now.
    d.stop("c");
    let new = dir.with_extension("new");
    std::fs::rename(&dir, &new).unwrap();
    std::fs::rename(&old, &dir).unwrap();
    let c = d.start("c");
    await_refused(&c, "was given up");
    times_out(d.options.timeout, || a.read("v"));
    d.stop("c");
    std::fs::rename(&dir, &old).unwrap();
    std::fs::rename(&new, &dir).unwrap();
    d.start("c");
    assert_eq!(read(&a, "v"), register(3, "z"));
}

/// Two of three voters had lost their directories, which looks like a first start: they drew
/// the third one into their new register, and its log, the last one, was erased.
#[test]
fn who_has_the_register_is_drawn_into_no_new_one() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(3);
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.stop_all();
    let dirs = ["a", "b"].map(|n| d.options_of(n).dir);
    for dir in &dirs {
        std::fs::rename(dir, dir.with_extension("old")).unwrap();
    }
    let (c, a, b) = (d.start("c"), d.start("a"), d.start("b"));
    await_refused(&a, "--same-name a");
    await_refused(&b, "--same-name b");
    for v in [&a, &b, &c] {
        times_out(d.options.timeout, || v.read("v"));
    }
    for (name, dir) in ["a", "b"].into_iter().zip(&dirs) {
        d.stop(name);
        std::fs::rename(dir, dir.with_extension("new")).unwrap();
        std::fs::rename(dir.with_extension("old"), dir).unwrap();
        d.start(name);
    }
    assert_eq!(read(&c, "v"), register(1, "x"));
}

/// A leader forgot at each heartbeat that a voter had refused it, and looked just then; or that voter was late
/// with its next answer: two that had lost their directories began a register beside the third one's.
#[test]
fn whoever_has_refused_is_no_part_of_a_beginning_while_it_is_silent() {
    let d = Daemons::started(&ABC);
    for name in ["a", "b"] {
        d.stop(name);
    }
    // `a` has lost its directory, and leads.
    let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
    let voters = numbered(&d.options.voters).unwrap();
    let all: Vec<u64> = voters.keys().copied().collect();
    let links = Links::new(&env, "test", "a", voters, &BTreeMap::new());
    let links = Arc::new(links.of_directory(7, Arc::default()));
    links.confirm();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .build()
        .unwrap();
    let mut refusing = BTreeSet::new();
    // The answers of all voters but one that is down are enough.
    let mut meets = |patience| {
        let met = runtime.block_on(meet(&links, all.clone(), patience, &mut refusing));
        // As a heartbeat's success does, between the answers and the decision.
        links.counts_again();
        let may = may_write(&links, &met, &refusing, 3, true);
        let names: Vec<String> = met.into_keys().collect();
        (names.concat(), may)
    };
    for _ in 0..2 {
        assert_eq!(meets(DEADLINE), ("a".into(), false), "it is refused");
    }
    d.isolate("c", Cut::Silent);
    let late = Duration::from_millis(50);
    assert_eq!(meets(late), ("a".into(), false), "nobody has agreed");
    // With another directory it says something else.
    d.heal();
    d.stop("c");
    let dir = d.options_of("c").dir;
    std::fs::rename(&dir, dir.with_extension("old")).unwrap();
    d.start("c");
    let begun = Instant::now();
    loop {
        match meets(DEADLINE) {
            (names, true) if names == "ac" => break,
            // Its link of before is closed.
            met => assert!(begun.elapsed() < DEADLINE, "{met:?}"),
        }
    }
}

/// A voter's directory was put back as of before its first vote, and another one was lost: the two
/// began a register anew while the third voter was away. That one knows the leader's directory, and
/// so would have followed it. Its log, the last one of the old register, would have been erased.
#[test]
fn who_has_the_register_is_led_by_no_new_one() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(3);
    let soon = d.options.election;
    let late = (Duration::from_secs(600), Duration::from_secs(601));
    let [of_a, of_b] = ["a", "b"].map(|n| d.options_of(n).dir);
    let first = of_a.with_extension("first");
    d.options.election = late;
    d.start("a");
    d.stop("a");
    copy(&of_a, &first);
    d.options.election = soon;
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.stop_all();
    for dir in [&of_a, &of_b] {
        std::fs::rename(dir, dir.with_extension("old")).unwrap();
    }
    std::fs::rename(&first, &of_a).unwrap();
    let a = d.start("a");
    // `a` alone asks to lead.
    d.options.election = late;
    d.start("b");
    assert!(swap(&a, "v", &register(1, "y")));
    let c = d.start("c");
    await_refused(&c, "begun anew");
    // With the lost directory it has what it had.
    d.stop_all();
    std::fs::rename(&of_b, of_b.with_extension("new")).unwrap();
    std::fs::rename(of_b.with_extension("old"), &of_b).unwrap();
    d.options.election = soon;
    let c = d.start("c");
    d.start("b");
    assert_eq!(read(&c, "v"), register(1, "x"));
}

/// A leader that was cut off wrote that `w`'s directory is lost, and at once admitted `w`'s
/// new one: the two committed both entries, while the third voter and the old directory had
/// led and changed a view.
#[test]
fn a_cut_off_leader_gives_no_directory_up() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(4);
    d.start_all();
    let old = d.leader("");
    let others: Vec<_> = ABC.into_iter().filter(|n| **n != old).collect();
    let (b, w) = (others[0], others[1]);
    assert!(swap(&d.at(b), "v", &register(1, "x")));
    d.isolate(&old, Cut::Silent);
    assert!(swap(&d.at(b), "v", &register(2, "new")));
    // `w` is started anew, without its directory, where only the old leader is reached.
    let mut options = d.options_of(w);
    options.dir = options.dir.with_extension("twin");
    let nobody = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
    options.voters.insert(b.into(), nobody.local_address());
    let twin = RaftViews::start(Arc::new(Os::new().unwrap()), options).unwrap();
    d.mislead(&old, w, twin.clone());
    let alone = d.at(&old);
    times_out(d.options.timeout, || alone.retire(w));
    times_out(d.options.timeout, || alone.swap("v", &register(2, "old")));
    assert_eq!(alone.here("v"), register(1, "x"));
    twin.stop();
    d.heal();
    d.leader("");
    assert_eq!(read(&alone, "v"), register(2, "new"));
    assert!(swap(&d.at(w), "v", &register(3, "back")));
}

/// A voter that lost its directory is the first to ask to lead, each time, and the greatest of
/// those of one term: with a log that did not name it yet it heard no answer, and nobody led,
/// for as long as it ran, since all follow the greatest term.
#[test]
fn a_voter_that_is_admitted_anew_lets_others_lead() {
    let mut d = Daemons::new(&["a", "b", "w"]);
    let number = crate::types::number;
    assert!(number("w") > number("a").max(number("b")));
    d.options.timeout = Duration::from_secs(3);
    d.options.election = (Duration::from_millis(1500), Duration::from_millis(1600));
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    for round in 1..=3 {
        d.stop("w");
        let dir = d.options_of("w").dir;
        std::fs::rename(&dir, dir.with_extension(format!("old-{round}"))).unwrap();
        d.options.election = (Duration::from_millis(500), Duration::from_millis(510));
        let w = d.start("w");
        await_refused(&w, "--same-name w");
        // Its terms would become greater than the others' meanwhile.
        std::thread::sleep(Duration::from_secs(3));
        gives_up(&d.at("b"), "w");
        d.await_admitted(&d.names());
        assert_eq!(read(&w, "v"), register(round, "x"));
        assert!(swap(&w, "v", &register(round + 1, "x")));
    }
}

/// Of five voters, one was away while another lost its directory and was admitted anew. The one
/// that lagged heard nothing of a leader whose directory its log did not name: it never got the
/// entry, and the leader was told that it votes for nobody, and said so in `status`.
#[test]
fn a_voter_that_lags_is_led_by_one_that_was_admitted_anew() {
    let mut d = Daemons::new(&["a", "b", "c", "d", "e"]);
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    for name in ["d", "e"] {
        d.stop(name);
    }
    let dir = d.options_of("d").dir;
    std::fs::rename(&dir, dir.with_extension("old")).unwrap();
    let new = d.start("d");
    gives_up(&d.at("a"), "d");
    let rest = ["a", "b", "c", "d"].map(String::from);
    d.await_admitted(&rest);
    assert!(swap(&new, "v", &register(2, "y")));
    // `d` is to lead. (Another does, where `d` did not have all of the log yet.)
    for name in ["a", "b", "c", "d"] {
        d.stop(name);
    }
    let soon = d.options.election;
    d.options.election = (Duration::from_secs(3), Duration::from_secs(4));
    for name in ["a", "b", "c"] {
        d.start(name);
    }
    d.options.election = soon;
    d.start("d");
    let mut leader = d.leader("");
    while leader != "d" {
        d.stop(&leader);
        let next = d.leader(&leader);
        d.start(&leader);
        leader = next;
    }
    let late = d.start("e");
    let seen = late.clone();
    late.until(move |_| seen.here("v") == register(2, "y"));
    assert!(late.knows(&d.names()));
    let leader = d.leader("");
    for v in ["e", &leader] {
        assert_eq!(read(&d.at(v), "v"), register(2, "y"));
    }
    // Neither is refused any more.
    let begun = Instant::now();
    while d.names().iter().any(|n| d.at(n).voters().is_err()) {
        assert!(begun.elapsed() < DEADLINE);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Voters whose directories are of the format before go on with what they have, one after the
/// other, and are admitted as at a first start.
#[test]
fn voters_of_format_1_go_on() {
    let mut d = Daemons::new(&ABC);
    d.snapshots = (8, 4);
    d.start_all();
    for version in 1..=30 {
        assert!(swap(&d.at("a"), "v", &register(version, "x")));
    }
    d.stop_all();
    for name in ABC {
        as_format_1(&d.options_of(name).dir);
    }
    for name in ["a", "b"] {
        d.start(name);
    }
    assert_eq!(read(&d.at("b"), "v"), register(30, "x"));
    d.start("c");
    d.await_admitted(&d.names());
    d.stop("a");
    assert!(swap(&d.at("c"), "v", &register(31, "y")));
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// A voter's directory was put back from earlier. It voted on with what it had, and could vote
/// a second time in a term, or elect one that lacked what it had acknowledged itself.
#[test]
fn a_directory_of_an_earlier_time_votes_for_nobody() {
    let mut d = Daemons::new(&ABC);
    d.options.timeout = Duration::from_secs(3);
    d.start_all();
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.stop("c");
    let dir = d.options_of("c").dir;
    let (old, new) = (dir.with_extension("old"), dir.with_extension("new"));
    copy(&dir, &old);
    let c = d.start("c");
    assert!(swap(&c, "v", &register(2, "y")));
    let seen = c.clone();
    c.until(move |_| seen.here("v") == register(2, "y"));
    // A start with what it had last changes nothing.
    d.stop("c");
    let c = d.start("c");
    assert!(swap(&c, "v", &register(3, "z")));
    c.voters().unwrap();
    let seen = c.clone();
    c.until(move |_| seen.here("v") == register(3, "z"));
    drop(c);
    d.stop("c");
    std::fs::rename(&dir, &new).unwrap();
    std::fs::rename(&old, &dir).unwrap();
    await_refused(&d.start("c"), "of an earlier time");
    // Its own log says so from then on, whoever has forgotten it.
    d.stop_all();
    let (a, c) = (d.start("a"), d.start("c"));
    await_refused(&c, "of an earlier time");
    times_out(d.options.timeout, || a.read("v"));
    let b = d.start("b");
    assert_eq!(read(&a, "v"), register(3, "z"));
    d.stop("c");
    std::fs::remove_dir_all(&dir).unwrap();
    let c = d.start("c");
    gives_up(&b, "c");
    d.await_admitted(&d.names());
    assert_eq!(read(&c, "v"), register(3, "z"));
    c.voters().unwrap();
    d.stop("b");
    assert!(swap(&c, "v", &register(4, "w")));
}

/// A voter that is away keeps no other one from taking part after its start.
#[test]
fn who_hears_nothing_of_itself_takes_part_after_a_while() {
    let d = Daemons::started(&ABC);
    assert!(swap(&d.at("a"), "v", &register(1, "x")));
    d.isolate("a", Cut::Silent);
    for name in ["b", "c"] {
        d.stop(name);
    }
    let (b, c) = (d.start("b"), d.start("c"));
    assert!(swap(&b, "v", &register(2, "y")));
    assert_eq!(read(&c, "v"), register(2, "y"));
}

/// Gives a voter's directory up, as soon as a voter leads.
fn retire(at: &RaftViews, voter: &str) -> Retired {
    let begun = Instant::now();
    loop {
        match at.retire(voter) {
            Err(Error::Timeout(_)) if begun.elapsed() < DEADLINE => {}
            r => return r.unwrap(),
        }
    }
}

/// Gives a voter's directory up. Where an answer is lost the question is asked again, so what it
/// says may be of the directory that was admitted since: the voters' log is what counts.
fn gives_up(at: &RaftViews, voter: &str) {
    let _ = retire(at, voter);
}

/// What `name` was started with in another configuration.
fn as_before(of: &Options, d: &Daemons, name: &str) -> Options {
    Options {
        timeout: Duration::from_secs(3),
        dir: d.options_of(name).dir,
        me: name.into(),
        ..of.clone()
    }
}
