//! Threads that wait in `Primary::commit`, in orders drawn from seeds: the short
//! form of `mojim-sim --threads`.

// Logs are of 64 to 128 KiB on disk, on one to three lanes, which are streams or shared memory.
// Sync points have some bytes to three quarters of a log, so they go in one record, in parts or
// through a spill file. One in six does not wait. In one run of three a thread panics while it
// makes its record.
//
// Mutations: a durable write is reported as done one write too early, what is merely appended is
// acknowledged, acknowledgements are counted over a gap of another lane, what was appended is sent
// although a record before it is not made, the record of a thread that panicked is never made, or
// only its missing parts, nobody waits for what others are making. This suite does not interleave
// inside the engine's lock-free parts, which `mojim-protocol` and `mojim-store` test.

use mojim_sim::threads::{Broken, catch, run};

#[test]
fn what_a_call_acknowledged_is_there_whoever_ran_when() {
    let (mut acks, mut crashes, mut shared, mut deaths) = (0, 0, 0, 0);
    for seed in 1..=100 {
        let o = run(seed, None);
        assert_eq!(o.failure, None, "mojim-sim --threads --seed {seed}");
        acks += o.acks;
        crashes += o.crashes;
        shared += o.shared;
        deaths += o.deaths;
    }
    assert!(
        acks > 4000 && crashes > 30 && shared > 5 && deaths > 5,
        "{acks} {crashes} {shared} {deaths}"
    );
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in [3, 8, 24, 33] {
        let [a, b] = [run(seed, None), run(seed, None)];
        assert_eq!(format!("{a:?}"), format!("{b:?}"), "seed {seed}");
    }
}

#[test]
fn what_is_broken_is_found_out() {
    for (broken, name) in Broken::ALL {
        // No seed before 596 catches this one: the search begins shortly before.
        let first = match broken {
            Broken::CountFailed => 590,
            _ => 1,
        };
        assert!(catch(broken, first, 2500).is_some(), "{name}");
    }
}
