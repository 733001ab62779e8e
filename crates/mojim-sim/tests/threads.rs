//! Threads that wait in `Primary::commit`, in orders drawn from seeds: the short
//! form of `mojim-sim --threads`.

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
        assert!(catch(broken, 1, 2500).is_some(), "{name}");
    }
}
