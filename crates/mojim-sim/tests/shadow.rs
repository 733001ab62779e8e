//! The shadow durable image in its short form: the states of a few seeds pass,
//! a seed repeats, the broken programs and the broken engine are noticed.

// With at most 4,096 subsets of what is pending all are checked, else 256: none, all, only one, all
// but one, each prefix and rest, and random ones of five densities. Not seen: the value that a word
// had for a moment between two stores to it. A record in that state fails its checksum.
//
// Controls: `naive` stores in place, `nosync` acknowledges before its flush, `log` is a correct
// redo log and must pass. Mutations: one flush writes nothing back, or all but its last line, or is
// not fenced, one sync of a file does nothing, and the engine's `ack_early` and `apply_before_log`.
// For the heap: a state byte is not committed, a slab's entry comes after its blocks, a root before
// its block, state bytes before the contents of the blocks. A recovery that takes records of any
// epoch that it knows (by hand, a line of `Log::recover`) is found by seed 23.

use mojim_sim::run::catch_panics;
use mojim_sim::shadow::{Broken, catch, run, run_states};

#[test]
fn states_pass() {
    catch_panics();
    let shown = run_states(30_000, 1, 1, |_| ());
    assert!(shown.failures.is_empty(), "{:#?}", shown.failures);
    let l = shown.looked;
    assert!(l.exhaustive > 0 && l.sampled > 0, "{l:?}");
    assert!(l.states() >= 30_000 && l.recoveries >= l.states(), "{l:?}");
}

#[test]
fn a_seed_repeats() {
    catch_panics();
    assert_eq!(run(1, None).looked, run(1, None).looked);
}

#[test]
fn what_is_broken_is_noticed_and_what_is_not_is_not() {
    catch_panics();
    for (broken, name, must) in Broken::ALL {
        let seeds = match (must, broken) {
            (true, _) => 20,
            // Each of its states is a copy of a MiB.
            (false, Broken::Heap(_)) => 1,
            (false, _) => 3,
        };
        let (looked, caught) = catch(broken, 1, seeds);
        assert_eq!(caught.is_some(), must, "{name}: {caught:?} of {looked:?}");
        assert!(looked.states() > 0, "{name}");
    }
}
