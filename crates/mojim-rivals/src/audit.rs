//! Whether every replica holds every byte: compares each replica's log after a run with
//! what the program had stored.
//!
//! The log is read from its medium, as a recovery would read it, and compared with what
//! was kept aside before it was encoded: the number, order and place of every sync point,
//! its parts, and all of its bytes.

use std::sync::Arc;

use mojim_env::Env;
use mojim_env::{Error, Result};
use mojim_format::OpKind;
use mojim_store::log::{LogSpec, Survival};

use crate::primary::{FILE, Run};
use crate::{history, open};

/// Compares the log of a replica that has ended with what was sent to it.
/// Returns how many records there were.
pub fn check(env: &Arc<dyn Env>, log: &LogSpec, run: &Run) -> Result<u64> {
    let wrong = |what: String| Error::Damaged {
        path: log.path.clone(),
        what: format!("a replica of {}: {what}", run.scheme.name()),
    };
    let (log, survival) = open(env, log, run.volume)?;
    if survival == Survival::Lost {
        return Err(wrong("it has no log of this run".into()));
    }
    let found = log.recover(run.volume, &history(), 0);
    let rounds = run.scheme.rounds();
    let due = run.sent.len() as u64 * u64::from(rounds);
    let mut had = found.iter();
    for lsn in 1..=due {
        let f = had
            .next()
            .filter(|f| f.lsn == lsn)
            .ok_or_else(|| wrong(format!("record {lsn} of {due} is missing")))?;
        let sent = &run.sent[(lsn - 1) as usize / rounds as usize];
        let part = ((lsn - 1) % u64::from(rounds)) as u32;
        let r = log.record(f.at).expect("it was found there");
        let mut ops = r.ops();
        let data = match part {
            0 => ops.next().is_some_and(|(op, bytes)| {
                (op.file, op.kind, op.offset) == (FILE, OpKind::Write, sent.offset)
                    && bytes == sent.bytes
            }),
            _ => true,
        };
        if !data || ops.next().is_some() || (f.part, f.end) != (part, part + 1 == rounds) {
            return Err(wrong(format!("record {lsn} is not what was sent")));
        }
    }
    match had.next() {
        None => Ok(due),
        Some(f) => Err(wrong(format!("record {} was never sent", f.lsn))),
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use mojim_config::MediumKind;
    use mojim_env::Address;
    use mojim_linux::Listener;
    use mojim_linux::Os;

    use crate::Scheme;
    use crate::order::Transport;
    use crate::primary::Primary;
    use crate::replica::{Mutation, ReplicaSpec, serve};

    use super::*;

    /// A directory of this test alone, which is removed with it.
    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let name = format!("mojim-rivals-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Dir(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn log(dir: &Path, name: &str, medium: MediumKind) -> LogSpec {
        LogSpec {
            lane: 0,
            medium,
            path: dir.join(format!("{name}.log")),
            ring: dir.join(format!("{name}.ring")),
            size: 1 << 20,
        }
    }

    /// A run of 100 sync points with `n` replicas, of which the last has the mutation;
    /// returns the audit's result for each.
    fn run(
        scheme: Scheme,
        transport: Transport,
        medium: MediumKind,
        n: usize,
        mutation: Option<Mutation>,
    ) -> Vec<Result<u64>> {
        let name = scheme.name();
        let dir = Dir::new(&format!("{name}-{transport:?}-{medium}-{n}-{mutation:?}"));
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let spin = Duration::from_micros(30);
        let specs: Vec<ReplicaSpec> = (0..n)
            .map(|i| ReplicaSpec {
                log: log(&dir.0, &i.to_string(), medium),
                spin,
                mutation: mutation.filter(|_| i + 1 == n),
            })
            .collect();
        let done = std::thread::scope(|s| {
            let mut addresses = Vec::new();
            for (i, spec) in specs.iter().enumerate() {
                let listener = Listener::bind(&match transport {
                    Transport::Tcp => Address::Tcp(([127, 0, 0, 1], 0).into()),
                    Transport::Shm => Address::Unix(dir.0.join(format!("{i}.socket"))),
                })
                .unwrap();
                addresses.push(listener.local_address().to_string());
                let env = env.clone();
                s.spawn(move || serve(&env, &listener, spec).unwrap());
            }
            let own = log(&dir.0, "primary", MediumKind::Dram);
            let mut p = Primary::start(&env, scheme, transport, &own, spin, &addresses).unwrap();
            for i in 0..100u64 {
                let bytes: Vec<u8> = (0..1 + i * 37 % 4096).map(|b| (b + i) as u8).collect();
                p.store(i * 4096, &bytes);
                p.commit().unwrap();
            }
            p.finish()
        });
        specs.iter().map(|r| check(&env, &r.log, &done)).collect()
    }

    const TRANSPORTS: [Transport; 2] = [Transport::Tcp, Transport::Shm];

    #[test]
    fn every_replica_holds_every_byte() {
        for transport in TRANSPORTS {
            for scheme in Scheme::ALL {
                for (n, medium) in [
                    (1, MediumKind::Dram),
                    (2, MediumKind::Dram),
                    (4, MediumKind::Dram),
                    (3, MediumKind::Disk),
                ] {
                    for records in run(scheme, transport, medium, n, None) {
                        assert_eq!(records.unwrap(), 100 * u64::from(scheme.rounds()));
                    }
                }
            }
        }
    }

    #[test]
    fn a_replica_that_drops_or_changes_a_record_is_found() {
        for transport in TRANSPORTS {
            for scheme in Scheme::ALL {
                // The last record: no record behind it shows the gap.
                let last = 100 * u64::from(scheme.rounds());
                for (mutation, what) in [
                    (Mutation::Drop(1), "record 1 of".to_owned()),
                    (Mutation::Drop(51), "record 51 of".to_owned()),
                    (
                        Mutation::Drop(last),
                        format!("record {last} of {last} is missing"),
                    ),
                    (
                        Mutation::Change(51),
                        "record 51 is not what was sent".to_owned(),
                    ),
                ] {
                    let mut found = run(scheme, transport, MediumKind::Dram, 2, Some(mutation));
                    let e = found.pop().unwrap().unwrap_err().to_string();
                    assert!(e.contains(&what) && e.contains(scheme.name()), "{e}");
                    found.pop().unwrap().unwrap();
                }
            }
        }
    }
}
