//! A voter's files keep every promise, and each broken promise is noticed.
//!
//! A promise is made by a call, or by what a start has read. It is there after whatever comes.

use mojim_sim::voter::{Broken, catch, run};

/// A voter whose sync had failed, or that was killed before it, started again and acknowledged
/// what only the page cache had. The next loss of power took the register back to an older view.
/// A voter now writes anew what it reads at its start.
#[test]
fn what_a_voter_has_promised_or_read_stays() {
    let failed: Vec<_> = (1..=1000)
        .filter_map(|seed| Some((seed, run(seed, None, false).1.err()?)))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn every_broken_promise_is_noticed() {
    for (broken, name) in Broken::ALL {
        match catch(broken, 1, 1000) {
            Some((seed, why)) => println!("{name}: seed {seed}: {why}"),
            None => panic!("{name} went unnoticed"),
        }
    }
}
