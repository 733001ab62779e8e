//! The shadow durable image in its short form: the states of a few seeds pass,
//! a seed repeats, the broken programs and the broken engine are noticed.

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
