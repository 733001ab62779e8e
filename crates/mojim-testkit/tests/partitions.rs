//! Clusters of three and five nodes, each node in a network namespace of its
//! own: killed, cut off, slowed down, and healed, while programs under
//! `mojim run` commit on whichever node is primary. Nobody types a command.
//!
//! After each fault somebody must serve again where a majority and a whole copy are left. After
//! each heal there must be one primary, its mirror a member, and the copies equal. Then the
//! histories of all clients are checked (`src/history.rs`): nothing acknowledged is lost or torn,
//! the order holds, and no two primaries had anything acknowledged in overlapping time.
//!
//! Where namespaces or nft are not permitted or not there, a test says so and passes.
//! `PARTITION_ROUNDS` is the number of rounds of random faults for each set (default 2). With more
//! than that, the scenarios run in every mode and with every log medium. `PARTITION_SEED` repeats
//! the choices, not the timing.

// Faults of replication, and the tests that cover them. `P` is this file, with the scenario's
// words, `F` is `failover.rs`, `E` `e2e.rs`, `D` `disks.rs`, `C` `clocks.rs`, `O` `promotions.rs`,
// `K` the kill loop, `S` the simulator, `M` the model.
//
// - the mirror killed before, while and after it persists: S (in the middle of any disk operation),
//   K "mirror", at random moments P "the mirror's daemon is killed".
// - the mirror killed after its acknowledgement left: S, K "mirror restarted, its log gone", P "the
//   mirror dies and returns, then the primary dies", F `a_primary_goes_on_without_its_mirror_…`.
// - the primary killed at the same points: S, K "primary", "primary, mirror promoted", P "the
//   primary's program", "… daemon", "… daemon and program", F `the_mirror_takes_over_…`.
// - both at once: K "both", P "all die and come back", in random order.
// - one of them missing for good: P "all die, the primary (the mirror, a witness) stays away".
// - both by power cut, and only one comes back: S, P "both lose their power, only the mirror (the
//   primary) comes back at first". P takes shared memory and the boot id away, but not the page
//   cache: S and power for clusters (`mojim-crash cluster`) cover what was not flushed.
// - one by power cut: S, power for clusters, P "the mirror (the primary) loses its power", also
//   within the limit, with logs on disk and in memory, E
//   `a_mirror_that_lost_its_memory_is_copied_anew`.
// - partitions: S, P "the primary (the mirror) is alone", "primary and mirror are apart, both with
//   the witnesses", "the witnesses are apart", five nodes split two and three both ways.
// - one-way partitions: S, P: ten scenarios, between each two kinds of nodes and of one with all.
// - flapping: P "primary and mirror are apart and together, by turns", random faults.
// - half-open TCP: S, P "the primary is alone, dies there, comes back there, and is heard again",
//   and every one-way loss.
// - resets: S, P "connections are reset, again and again".
// - duplicate and late packets: P "packets are late, overtake each other and come twice" (TCP sorts
//   them), F `words_of_old_links_come_late_and_twice`: what was sent over links that were replaced
//   arrives then, and all of it again over new links, records that are sent twice over new links:
//   S, K.
// - old-epoch frames after a reconnect: M, S (mutation `no_fence`), P "the primary stops beyond
//   every limit and wakes", F `words_of_old_links_come_late_and_twice`, also to the node that is
//   primary in the next epoch.
// - SIGSTOP beyond every limit, then resume and store: F
//   `a_primary_that_slept_commits_nothing_when_it_wakes`, P "the primary (the mirror) stops beyond
//   every limit and wakes", without a register E `a_mirror_that_stalls_…`.
// - clock jumps: C `the_time_of_day_means_nothing`,
//   `the_time_of_day_decides_over_new_links_with_keys_…`, clocks of machines, and of two lives of
//   one machine: C `monotonic_clocks_are_each_machines_own`.
// - a mirror a thousand times slower: P "the mirror stands still nineteen twentieths of the time",
//   "links are slow", S (delays), its disk: D `a_mirror_whose_disk_is_slow_…`,
//   `a_mirror_with_its_log_in_memory_and_a_slow_disk_…`.
// - a mirror's disk that fails once, then works: S, D
//   `a_disk_that_fails_once_is_not_believed_any_more`: log, data files, superblock, and while it
//   takes over.
// - `mojim promote --force` that fails halfway: O: before the register is read, before it is
//   changed, by a change meanwhile, by EIO, and with an outcome that is not known.
// - a round trip longer than `resend_timeout`: P, E `a_link_that_is_only_long_is_not_suspected`: no
//   session is made anew for it.
// - a backup far behind: S (back-pressure, outrun logs, copies), `backups.rs` with real processes:
//   a backup that is slower than the program for seconds costs no sync point and no session, and
//   lags by the threshold and a record for each connection.
// - a backup, or the node that forwards to it, killed, without power, cut off: S, killed: F
//   `a_backup_takes_the_place_of_a_lost_mirror`, cut off: F `a_backup_that_is_cut_off_…`.
// - two nodes that forward to one backup: S.
// - resynchronisation under load: S, `backups.rs` `what_gives_a_copy_to_a_backup_goes_on`, P "the
//   mirror loses its power and comes back" (with logs in memory a whole copy), F
//   `a_primary_goes_on_…`.
// - asymmetric loss, several faults at once: P, random faults.
//
// Each node has a boot id and a network namespace of its own, joined by a veth pair to a bridge in
// another namespace. The namespaces have no names, so they end with the test. Links are cut in
// either direction by nft where packets arrive. Slow links are a TUN device in each node and a
// thread that delays, reorders, repeats, drops and paces packets, since netem is not in every
// kernel.

use std::time::Duration;

use mojim_testkit::network::Slow;
use mojim_testkit::nodes::{Nodes, notice};
use mojim_testkit::rng::Rng;

const SHORT: u64 = 1;
/// Rounds of random faults on one cluster: its log must hold their entries.
const ROUNDS: u64 = 12;

/// The number in an environment variable.
fn number(name: &str, otherwise: u64) -> u64 {
    let given = std::env::var(name).ok().and_then(|v| v.parse().ok());
    given.unwrap_or(otherwise)
}

fn rounds() -> u64 {
    number("PARTITION_ROUNDS", SHORT)
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    number("PARTITION_SEED", now.unwrap().as_nanos() as u64 % 1_000_000)
}

/// A fault, given the primary and its mirror, and what must be so while it
/// lasts.
type Scenario = (&'static str, fn(&mut Nodes, usize, usize));

/// A volume's mode, and the medium of its logs.
type Kind = (&'static str, &'static str);

const KINDS: [Kind; 3] = [("sync", "disk"), ("sync", "dram"), ("sync-flush", "disk")];

/// Runs scenarios one after the other, healing after each, on a cluster of
/// `kind`; in the long form on one of every kind.
fn run(witnesses: usize, kind: Kind, scenarios: &[&[Scenario]]) {
    let all = if rounds() > SHORT {
        &KINDS[..]
    } else {
        &[kind]
    };
    for &kind in all {
        let Some(mut n) = Nodes::start(witnesses, kind, seed()) else {
            return;
        };
        for (name, fault) in scenarios.iter().copied().flatten() {
            n.say(format!("== {name}"));
            n.busy();
            // After that: a busy machine may have changed the view.
            let (p, m) = n.pair();
            fault(&mut n, p, m);
            n.converge();
        }
        println!("{}", n.story.join("\n"));
    }
}

const KILLS: &[Scenario] = &[
    ("the primary's program is killed", |n, p, _| {
        n.kill_program(p);
        n.await_service(Some(p));
    }),
    ("the primary's daemon is killed", |n, p, _| {
        n.kill_daemon(p);
        n.await_service(Some(p));
    }),
    ("the primary's daemon and program are killed", |n, p, m| {
        n.succeed(p, m);
        n.await_service(Some(m));
    }),
    ("the mirror's daemon is killed", |n, p, m| {
        n.kill_daemon(m);
        n.await_service(Some(p));
    }),
    ("a witness is killed", |n, p, _| {
        n.kill_node(n.witnesses().start);
        n.await_service(Some(p));
    }),
    (
        "the mirror dies and returns, then the primary dies",
        |n, p, m| {
            n.kill_node(m);
            n.await_answer(Some(p));
            n.start_node(m);
            n.succeed(p, m);
        },
    ),
    (
        "the primary stops beyond every limit and wakes",
        |n, p, m| {
            n.hold(p, m);
            n.stop_node(p, true);
            n.await_answer(Some(m));
            n.stop_node(p, false);
            n.await_service(Some(m));
        },
    ),
    (
        "the mirror stops beyond every limit and wakes",
        |n, p, m| {
            n.stop_node(m, true);
            n.await_answer(Some(p));
            n.stop_node(m, false);
            n.await_service(Some(p));
        },
    ),
];

const CUTS: &[Scenario] = &[
    ("the primary is alone", |n, p, m| {
        n.split(&[p]);
        n.await_service(Some(m));
    }),
    ("the mirror is alone", |n, p, m| {
        n.split(&[m]);
        n.await_service(Some(p));
    }),
    (
        "primary and mirror are apart, both with the witnesses",
        |n, p, m| {
            n.net.cut(p, m);
            n.await_service(None);
        },
    ),
    (
        "the witnesses are apart: the pair goes on, without the mirror it does not",
        |n, p, m| {
            let witnesses: Vec<usize> = n.witnesses().collect();
            n.net.split(&witnesses);
            n.await_service(Some(p));
            n.kill_node(m);
            n.assert_no_service();
        },
    ),
    (
        "the primary is alone, dies there, comes back there, and is heard again",
        |n, p, m| {
            n.split(&[p]);
            n.kill_node(p);
            n.await_answer(Some(m));
            n.start_node(p);
            n.await_service(Some(m));
        },
    ),
    (
        "primary and mirror are apart and together, by turns",
        |n, p, m| {
            for _ in 0..8 {
                n.net.cut(p, m);
                let t = 100 + n.rng.below(1100);
                n.last(Duration::from_millis(t));
                n.net.heal().unwrap();
                let t = n.rng.below(300);
                n.last(Duration::from_millis(t));
            }
            n.await_service(None);
        },
    ),
    ("connections are reset, again and again", |n, p, m| {
        for _ in 0..8 {
            n.net.reset(p, m);
            let t = n.rng.below(200);
            n.last(Duration::from_millis(t));
            n.net.heal().unwrap();
            let t = n.rng.below(200);
            n.last(Duration::from_millis(t));
        }
        n.await_service(None);
    }),
];

const ONE_WAY: &[Scenario] = &[
    (
        "what the primary sends does not reach the mirror",
        |n, p, m| {
            n.net.cut_one_way(p, m);
            n.await_service(None);
        },
    ),
    (
        "what the mirror sends does not reach the primary",
        |n, p, m| {
            n.net.cut_one_way(m, p);
            n.await_service(None);
        },
    ),
    ("what the primary sends reaches no witness", |n, p, _| {
        n.witnesses().for_each(|w| n.net.cut_one_way(p, w));
        n.await_service(None);
    }),
    (
        "what the witnesses send does not reach the primary",
        |n, p, _| {
            n.witnesses().for_each(|w| n.net.cut_one_way(w, p));
            n.await_service(None);
        },
    ),
    ("what the mirror sends reaches no witness", |n, _, m| {
        n.witnesses().for_each(|w| n.net.cut_one_way(m, w));
        n.await_service(None);
    }),
    (
        "what the witnesses send does not reach the mirror",
        |n, _, m| {
            n.witnesses().for_each(|w| n.net.cut_one_way(w, m));
            n.await_service(None);
        },
    ),
    // In these four the other node with data is the last, as in `Nodes::split`.
    ("nobody hears the primary", |n, p, m| {
        let others = (0..n.count()).rev().filter(|&i| i != p);
        others.for_each(|i| n.net.cut_one_way(p, i));
        n.await_service(Some(m));
    }),
    ("the primary hears nobody", |n, p, m| {
        let others = (0..n.count()).rev().filter(|&i| i != p);
        others.for_each(|i| n.net.cut_one_way(i, p));
        n.await_service(Some(m));
    }),
    ("nobody hears the mirror", |n, p, m| {
        let others = (0..n.count()).rev().filter(|&i| i != m);
        others.for_each(|i| n.net.cut_one_way(m, i));
        n.await_service(Some(p));
    }),
    ("the mirror hears nobody", |n, p, m| {
        let others = (0..n.count()).rev().filter(|&i| i != m);
        others.for_each(|i| n.net.cut_one_way(i, m));
        n.await_service(Some(p));
    }),
];

const GOOD: Slow = Slow {
    delay: Duration::from_micros(500),
    jitter: Duration::ZERO,
    loss: 0,
    twice: 0,
    rate: 50_000_000,
};

const SLOW: &[Scenario] = &[
    (
        "packets are late, overtake each other and come twice",
        |n, _, _| {
            let late = Slow {
                delay: Duration::from_millis(10),
                jitter: Duration::from_millis(5),
                twice: 50,
                ..GOOD
            };
            if n.slow(late) {
                n.await_service(None);
            }
        },
    ),
    ("packets are lost", |n, _, _| {
        if n.slow(Slow { loss: 50, ..GOOD }) {
            n.await_service(None);
        }
    }),
    ("links are slow", |n, _, _| {
        let thin = Slow {
            rate: 100_000,
            ..GOOD
        };
        if n.slow(thin) {
            n.await_service(None);
        }
    }),
    ("a round trip is longer than resend_timeout", |n, _, _| {
        let far = Slow {
            delay: Duration::from_millis(40),
            ..GOOD
        };
        if n.slow(far) {
            n.await_service(None);
        }
    }),
    ("the primary dies on slow links", |n, p, m| {
        let late = Slow {
            delay: Duration::from_millis(5),
            jitter: Duration::from_millis(5),
            ..GOOD
        };
        if n.slow(late) {
            n.await_answer(Some(p));
            n.succeed(p, m);
        }
    }),
    (
        "the mirror stands still nineteen twentieths of the time",
        |n, _, m| {
            for _ in 0..25 {
                n.signal_node(m, "STOP");
                n.last(Duration::from_millis(95));
                n.signal_node(m, "CONT");
                n.last(Duration::from_millis(5));
            }
            n.await_service(None);
        },
    ),
];

/// All nodes die at once and come back in random order, `missing` never.
fn all_at_once(n: &mut Nodes, missing: Option<usize>) {
    let left = missing.filter(|m| !n.witnesses().contains(m));
    if let Some(away) = left {
        // It may not go on without the other while those die whom that takes.
        n.stop_node(away, true);
    }
    let mut all: Vec<usize> = (0..n.count()).collect();
    n.rng.shuffle(&mut all);
    for &i in &all {
        n.kill_node(i);
    }
    n.rng.shuffle(&mut all);
    for &i in all.iter().filter(|&&i| Some(i) != missing) {
        n.start_node(i);
    }
    n.await_service(left.map(|m| 1 - m));
}

const AT_ONCE: &[Scenario] = &[
    ("all die and come back", |n, _, _| all_at_once(n, None)),
    ("all die, the primary stays away", |n, p, _| {
        all_at_once(n, Some(p));
    }),
    ("all die, the mirror stays away", |n, _, m| {
        all_at_once(n, Some(m));
    }),
    ("all die, a witness stays away", |n, _, _| {
        all_at_once(n, Some(n.witnesses().start));
    }),
];

const POWER: &[Scenario] = &[
    ("the mirror loses its power and comes back", |n, p, m| {
        n.cut_power(m);
        n.await_answer(Some(p));
        n.start_node(m);
        // With a log in memory it gets a whole copy, under load.
        n.busy();
        n.await_member(m);
        n.await_service(Some(p));
    }),
    ("the primary loses its power and comes back", |n, p, m| {
        n.hold(p, m);
        n.cut_power(p);
        n.await_answer(Some(m));
        n.start_node(p);
        n.await_service(Some(m));
    }),
    (
        "the mirror loses its power and is back within the limit",
        |n, p, m| {
            n.cut_power(m);
            n.start_node(m);
            n.await_service(Some(p));
        },
    ),
    (
        "the primary loses its power and is back within the limit",
        |n, p, _| {
            n.cut_power(p);
            n.start_node(p);
            n.await_service(None);
        },
    ),
    (
        "both lose their power, only the mirror comes back at first",
        |n, p, m| {
            if n.kind.1 == "dram" {
                return; // nothing of the volume is left, as the guarantees say
            }
            n.cut_power(p);
            n.cut_power(m);
            n.start_node(m);
            n.await_service(Some(m));
        },
    ),
    (
        "both lose their power, only the primary comes back at first",
        |n, p, m| {
            if n.kind.1 == "dram" {
                return;
            }
            n.hold(p, m);
            n.cut_power(m);
            n.cut_power(p);
            n.start_node(p);
            if n.kind.0 == "sync-flush" {
                n.await_service(Some(p));
            } else {
                // Its ring is lost; what was acknowledged may be at the mirror only.
                n.assert_no_service();
                n.start_node(m);
                n.await_service(None);
            }
        },
    ),
];

/// What takes five nodes: a majority is three.
const FIVE: &[Scenario] = &[
    (
        "the primary is with one witness, the mirror with two",
        |n, p, m| {
            let w = n.witnesses().start;
            n.split(&[p, w]);
            n.await_service(Some(m));
        },
    ),
    (
        "the mirror is with one witness, the primary with two",
        |n, p, m| {
            let w = n.witnesses().start;
            n.split(&[m, w]);
            n.await_service(Some(p));
        },
    ),
    (
        "two witnesses are dead, then the primary dies",
        |n, p, m| {
            let w = n.witnesses().start;
            n.kill_node(w);
            n.kill_node(w + 1);
            n.await_service(Some(p));
            n.hold(p, m);
            n.kill_node(p);
            // Two of five are no majority: nothing changes until one is back.
            n.assert_no_service();
            n.start_node(w);
            n.await_service(Some(m));
        },
    ),
];

#[test]
fn three_nodes_killed() {
    run(1, ("sync", "disk"), &[KILLS]);
}

#[test]
fn three_nodes_cut_off() {
    run(1, ("sync", "disk"), &[CUTS]);
}

#[test]
fn three_nodes_that_hear_one_way() {
    run(1, ("sync-flush", "disk"), &[ONE_WAY]);
}

#[test]
fn three_nodes_on_slow_links() {
    run(1, ("sync", "dram"), &[SLOW]);
}

#[test]
fn three_nodes_all_at_once() {
    run(1, ("sync", "dram"), &[AT_ONCE]);
}

#[test]
fn three_nodes_without_power() {
    run(1, ("sync", "disk"), &[POWER]);
}

#[test]
fn three_nodes_without_power_whose_logs_are_memory() {
    run(1, ("sync", "dram"), &[POWER]);
}

#[test]
fn five_nodes_killed() {
    run(3, ("sync", "dram"), &[KILLS, AT_ONCE]);
}

#[test]
fn five_nodes_cut_off() {
    run(3, ("sync", "disk"), &[CUTS, FIVE]);
}

#[test]
fn five_nodes_without_power() {
    run(3, ("sync-flush", "disk"), &[POWER]);
}

/// A program detached as its link broke, and its mirror never learned that the last record was
/// committed: `verify` said "after the end of a program without a detach" for ever
/// (PARTITION_SEED=469590, once).
#[test]
fn five_nodes_that_hear_one_way() {
    run(3, ("sync", "disk"), &[ONE_WAY]);
}

#[test]
fn five_nodes_on_slow_links() {
    run(3, ("sync-flush", "disk"), &[SLOW]);
}

/// One fault of any kind, on top of those that there are.
fn any_fault(n: &mut Nodes, stopped: &mut Vec<usize>) {
    let count = n.count();
    let (i, d) = (n.rng.below(count as u64) as usize, n.rng.below(2) as usize);
    let j = (i + 1 + n.rng.below(count as u64 - 1) as usize) % count;
    match n.rng.below(14) {
        0 => n.kill_program(d),
        1 => n.kill_daemon(i),
        2 | 3 => n.kill_node(i),
        4 => n.kill_node(d),
        5 | 6 => {
            if let Some(i) = (0..count).find(|&i| !n.is_up(i)) {
                n.start_node(i);
            }
        }
        7 => {
            n.stop_node(i, true);
            stopped.push(i);
        }
        8 => {
            let one = n.name(i);
            n.say(format!("{one} is cut off"));
            n.net.isolate(i);
        }
        9 => {
            let (from, to) = (n.name(i), n.name(j));
            n.say(format!("{to} does not hear {from}"));
            n.net.cut_one_way(i, j);
        }
        10 => {
            n.say("primary and mirror are cut off from each other");
            n.net.cut(0, 1);
        }
        11 => {
            let bits = n.rng.next();
            let side: Vec<usize> = (0..count).filter(|i| bits >> i & 1 == 1).collect();
            n.say(format!(
                "{side:?} and the others are cut off from each other"
            ));
            n.net.split(&side);
        }
        12 => {
            let how = Slow {
                delay: Duration::from_micros(n.rng.below(20_000)),
                jitter: Duration::from_micros(n.rng.below(10_000)),
                loss: n.rng.pick(&[0, 10, 50, 200]),
                twice: n.rng.pick(&[0, 0, 50]),
                rate: n.rng.pick(&[100_000, 1_000_000, 50_000_000]),
            };
            n.slow(how);
        }
        _ => {
            n.say("the network is whole");
            n.net.heal().unwrap();
        }
    }
}

/// Random faults, several at once, for a random time; then everything heals.
fn random_faults(witnesses: usize) {
    let seed = seed();
    let mut choices = Rng::new(seed);
    let (mut left, mut sound) = (rounds(), None);
    while left > 0 {
        let kind = choices.pick(&KINDS);
        let Some(mut n) = Nodes::start(witnesses, kind, choices.next() % 1_000_000) else {
            return;
        };
        n.say(format!("of the random faults with PARTITION_SEED={seed}"));
        for round in 0..left.min(ROUNDS) {
            n.say(format!("== round {round}"));
            n.busy();
            // Only while both nodes hold everything: a node that is alone, with
            // a log in memory, may lose it with its power.
            if n.rng.below(4) == 0 && n.is_whole() {
                let i = n.rng.below(n.count() as u64) as usize;
                n.cut_power(i);
            }
            let mut stopped = Vec::new();
            for _ in 0..1 + n.rng.below(5) {
                any_fault(&mut n, &mut stopped);
                let t = n.rng.pick(&[0, 50, 400, 1500, 3000]);
                let t = n.rng.below(t + 1);
                n.last(Duration::from_millis(t));
            }
            for i in stopped {
                n.stop_node(i, false);
            }
            sound = Some(n.converge());
        }
        left -= left.min(ROUNDS);
        println!("{}", n.story.join("\n"));
    }
    notice(&format!(
        "{} rounds of random faults with {} nodes, PARTITION_SEED={seed}; the last cluster: {sound:?}",
        rounds(),
        witnesses + 2
    ));
}

#[test]
fn three_nodes_with_random_faults() {
    random_faults(1);
}

#[test]
fn five_nodes_with_random_faults() {
    random_faults(3);
}
