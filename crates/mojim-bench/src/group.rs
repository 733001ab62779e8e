//! `mojim bench threads`: how sync points of many threads share a write.
//!
//! For each number of threads, the cases take turns in rounds, each for some seconds:
//!
//! - Mojim's modes over both transports, each thread on its own part of one region
//! - the best that threads can share: a log or a link whose leader writes for all who wait
//! - RocksDB, whose durable puts share writes, too
//!
//! The threads are of one process. The mirror is a process of its own. So is the peer of a raw
//! link, which lives for the time of its case only. Nothing is pinned.
//!
//! A ratio is that of the operations per second, of the same number of threads and the same round:
//! 0.5 says half as many as the limit.
//!
//! Invariant: one case runs at a time, and all begin with the same warm-up.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim::Volume;
use mojim_config::Config;

use crate::cluster::{NodeProcess, REGION, VolumeOf, config_text_with, part_subject, target};
use crate::measure::{Ratio, prepared};
use crate::raw::{
    Carrier, Combining, CombiningShm, CombiningTcp, MOST_MEMBERS, Member, RECORD, RawLog, RawLogs,
};
use crate::report::{self, Row, write_table};
use crate::rocksdb::{Database, Library, PACKAGE};
use crate::scratch::Scratch;
use crate::threads::{self, Plan, Threads};

/// Numbers of threads.
pub const COUNTS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Most threads.
pub const MOST_THREADS: usize = MOST_MEMBERS;
/// Most bytes of a sync point.
pub const MOST_BYTES: usize = 4096;
/// Up to so many bytes the record of a sync point is no larger than that of a raw limit.
const LIKE_A_RECORD: usize = 64;
/// Bytes of the raw log: those of Mojim's.
const LOG: u64 = 64 << 20;
/// Time at the beginning of each case in which nothing is recorded.
const WARM_UP: Duration = Duration::from_millis(100);

const RAW_LOG: &str = "raw-log";
/// Two logs on one disk at once: what `sync-flush` writes where the mirror's log is on that disk, too
/// (here it is in memory).
const RAW_LOGS: &str = "raw-logs";
const RAW_TCP: &str = "raw-combining-tcp";
const RAW_SHM: &str = "raw-combining-shm";
const ROCKSDB: &str = "rocksdb";

/// What takes turns.
struct Case {
    /// How `--cases` calls it: a raw limit, RocksDB, or Mojim's volume.
    name: &'static str,
    /// Of Mojim.
    mode: &'static str,
    transport: &'static str,
    /// The case that it is compared with.
    limit: Option<&'static str>,
}

const fn other(name: &'static str, transport: &'static str) -> Case {
    Case {
        name,
        mode: "-",
        transport,
        limit: None,
    }
}

const fn ours((name, mode, transport): VolumeOf, limit: &'static str) -> Case {
    Case {
        name,
        mode,
        transport,
        limit: Some(limit),
    }
}

const CASES: [Case; 11] = [
    other(RAW_LOG, "-"),
    other(RAW_LOGS, "-"),
    other(RAW_TCP, "tcp"),
    other(RAW_SHM, "shm"),
    other(ROCKSDB, "-"),
    ours(("unreplicated", "unreplicated", "-"), RAW_LOG),
    ours(("async", "async", "tcp"), RAW_LOG),
    ours(("sync-tcp", "sync", "tcp"), RAW_TCP),
    ours(("sync-flush-tcp", "sync-flush", "tcp"), RAW_LOG),
    ours(("sync-shm", "sync", "shm"), RAW_SHM),
    ours(("sync-flush-shm", "sync-flush", "shm"), RAW_LOG),
];

impl Case {
    fn is_ours(&self) -> bool {
        self.limit.is_some()
    }
}

/// The names of all cases.
pub fn case_names() -> impl Iterator<Item = &'static str> {
    CASES.iter().map(|c| c.name)
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct ThreadsOptions {
    /// One JSON object a line instead of tables.
    pub json: bool,
    /// Where the files go: a directory on the disk to be measured. Default: the temporary
    /// directory.
    pub dir: Option<PathBuf>,
    /// Numbers of threads, at most [`MOST_THREADS`]; empty: 1 to 32.
    pub counts: Vec<usize>,
    /// Time of each case, after the warm-up.
    pub time: Duration,
    /// Rounds for each number of threads.
    pub rounds: usize,
    /// Connections of each volume; 0: as many as is the default.
    pub connections: usize,
    /// Bytes of a sync point, at most [`MOST_BYTES`].
    pub bytes: usize,
    /// Names of [`case_names`]; empty: all.
    pub cases: Vec<String>,
    /// How long a durable write of the mirror's emulated disk takes, if its log is on one.
    pub mirror_disk: Option<Duration>,
}

impl Default for ThreadsOptions {
    fn default() -> Self {
        ThreadsOptions {
            json: false,
            dir: None,
            counts: Vec::new(),
            time: Duration::from_secs(3),
            rounds: 1,
            connections: 1,
            bytes: 64,
            cases: Vec::new(),
            mirror_disk: None,
        }
    }
}

/// Runs the benchmark and prints it, each number of threads when it is measured.
pub fn run(o: &ThreadsOptions) -> io::Result<()> {
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let bench = Bench::start(o, &parent)?;
    let counts = match o.counts.is_empty() {
        true => &COUNTS[..],
        false => &o.counts,
    };
    if !o.json {
        println!(
            "{} rounds of {:.1} s for each case; ratios are of operations per second",
            o.rounds,
            o.time.as_secs_f64()
        );
    }
    for &n in counts {
        let rows = bench.rows(o, n)?;
        report::print(o.json, &rows, |rows, out| {
            writeln!(out)?;
            write_table(rows, out)
        })?;
    }
    bench.end()
}

/// Mojim's part.
struct Cluster {
    /// A volume with the name of its case, and where its region is.
    volumes: Vec<(&'static str, Volume, usize)>,
    _mirror: Option<NodeProcess>,
    _memory: Scratch,
}

impl Cluster {
    /// With a volume for each of `cases` that is Mojim's.
    fn start(
        cases: &[&'static Case],
        dir: &Path,
        connections: usize,
        disk: Option<Duration>,
    ) -> io::Result<Cluster> {
        let memory = Scratch::new_in(Path::new("/dev/shm"))?;
        let ours = || cases.iter().filter(|c| c.is_ours());
        let link = |c: &Case| {
            if c.transport == "-" {
                "tcp"
            } else {
                c.transport
            }
        };
        let of: Vec<VolumeOf> = ours().map(|c| (c.name, c.mode, link(c))).collect();
        let path = dir.join("bench.toml");
        let connections = (connections > 0).then_some(connections);
        let text = config_text_with(dir, memory.path(), &of, connections, disk)?;
        fs::write(&path, text)?;
        let config = Config::load(&path).map_err(io::Error::other)?;
        let mirror = match ours().any(|c| c.mode != "unreplicated") {
            true => Some(NodeProcess::mirror(&path, disk)?),
            false => None,
        };
        let attach = |c: &&'static Case| {
            let v = Volume::attach_with(&config, "a", Some(c.name), |_, _| {})
                .map_err(io::Error::other)?;
            let base = target(&v)?;
            Ok((c.name, v, base))
        };
        let volumes = ours().map(attach).collect::<io::Result<_>>()?;
        Ok(Cluster {
            volumes,
            _mirror: mirror,
            _memory: memory,
        })
    }

    fn base(&self, name: &str) -> io::Result<usize> {
        let found = self.volumes.iter().find(|v| v.0 == name);
        found
            .map(|v| v.2)
            .ok_or_else(|| io::Error::other(format!("no volume {name}")))
    }
}

/// What the cases need.
struct Bench {
    cases: Vec<&'static Case>,
    plan: Plan,
    bytes: usize,
    log: Option<Combining<RawLog>>,
    logs: Option<Combining<RawLogs>>,
    rocksdb: Option<Library>,
    cluster: Option<Cluster>,
    // The last: its files are removed when nothing uses them any more.
    scratch: Scratch,
}

impl Bench {
    fn start(o: &ThreadsOptions, parent: &Path) -> io::Result<Bench> {
        check(o)?;
        let wanted = |c: &Case| o.cases.is_empty() || o.cases.iter().any(|n| n == c.name);
        let mut cases: Vec<&'static Case> = CASES.iter().filter(|c| wanted(c)).collect();
        let has = |name: &str| cases.iter().any(|c| c.name == name);
        let scratch = Scratch::new_in(parent)?;
        let dir = scratch.path();
        let log = match has(RAW_LOG) {
            true => Some(Combining::new(RawLog::create(dir, LOG)?)),
            false => None,
        };
        let logs = match has(RAW_LOGS) {
            true => Some(Combining::new(RawLogs::create(dir, LOG)?)),
            false => None,
        };
        let rocksdb = match has(ROCKSDB).then(Library::load) {
            Some(Err(e)) => {
                eprintln!("no case rocksdb: {e}: install {PACKAGE}");
                cases.retain(|c| c.name != ROCKSDB);
                None
            }
            Some(Ok(library)) => Some(library),
            None => None,
        };
        let cluster = match cases.iter().any(|c| c.is_ours()) {
            true => Some(Cluster::start(&cases, dir, o.connections, o.mirror_disk)?),
            false => None,
        };
        Ok(Bench {
            cases,
            plan: Plan {
                warm_up: WARM_UP,
                duration: o.time,
            },
            bytes: o.bytes,
            log,
            logs,
            rocksdb,
            cluster,
            scratch,
        })
    }

    /// Measures `n` threads: a row for each case.
    fn rows(&self, o: &ThreadsOptions, n: usize) -> io::Result<Vec<Row>> {
        let mut taken: Vec<Vec<Threads>> = self.cases.iter().map(|_| Vec::new()).collect();
        for _ in 0..o.rounds {
            for (case, taken) in self.cases.iter().zip(&mut taken) {
                let of = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", case.name));
                taken.push(self.one(case, n).map_err(of)?);
            }
        }
        let of_case = |name: &str| self.cases.iter().position(|c| c.name == name);
        let row = |(case, taken_here): (&&'static Case, &Vec<Threads>)| {
            // What waits for an emulated disk has no limit here.
            let is_slow = o.mirror_disk.is_some() && case.mode.starts_with("sync");
            let limit = case
                .limit
                .filter(|_| self.bytes <= LIKE_A_RECORD && !is_slow);
            let limit = limit.and_then(|name| Some((name, &*taken[of_case(name)?])));
            row_of(case, (self.bytes, n), taken_here, limit)
        };
        Ok(self.cases.iter().zip(&taken).filter_map(row).collect())
    }

    /// One case with `n` threads.
    fn one(&self, case: &Case, n: usize) -> io::Result<Threads> {
        if let (RAW_LOGS, Some(logs)) = (case.name, &self.logs) {
            return shared(logs, n, self.plan);
        }
        match (case.name, &self.log, self.rocksdb, &self.cluster) {
            (RAW_LOG, Some(log), ..) => shared(log, n, self.plan),
            (RAW_TCP, ..) => shared(&Combining::new(CombiningTcp::start()?), n, self.plan),
            (RAW_SHM, ..) => shared(&Combining::new(CombiningShm::start()?), n, self.plan),
            (ROCKSDB, _, Some(library), _) => self.puts(library, n),
            (name, _, _, Some(cluster)) => {
                let base = cluster.base(name)?;
                let part = |i| part_subject(name.to_owned(), base, self.bytes, (i, n));
                threads::run((0..n).map(part).collect(), self.plan)
            }
            _ => Err(io::Error::other("not prepared")),
        }
    }

    /// Puts to a new RocksDB, each under a key of its own.
    fn puts(&self, library: Library, n: usize) -> io::Result<Threads> {
        let dir = Scratch::new_in(self.scratch.path())?;
        let db = Database::create(library, &dir.path().join("rocksdb"))?;
        let db = &db;
        let one = |i: usize| {
            let value = vec![0x5a; self.bytes];
            let key = (i as u64, 0_u64);
            prepared(
                ROCKSDB,
                key,
                |key: &mut (u64, u64)| {
                    key.1 += 1;
                    Ok(())
                },
                move |key: &mut (u64, u64)| {
                    let mut bytes = [0; 16];
                    bytes[..8].copy_from_slice(&key.0.to_be_bytes());
                    bytes[8..].copy_from_slice(&key.1.to_be_bytes());
                    db.put(&bytes, &value)
                },
            )
        };
        threads::run((0..n).map(one).collect(), self.plan)
    }

    fn end(self) -> io::Result<()> {
        // The mirror and the memory stay until the volumes are gone.
        let Some(mut cluster) = self.cluster else {
            return Ok(());
        };
        let mut volumes = std::mem::take(&mut cluster.volumes).into_iter();
        volumes.try_for_each(|(_, v, _)| v.detach().map_err(io::Error::other))
    }
}

fn check(o: &ThreadsOptions) -> io::Result<()> {
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if let Some(n) = o.counts.iter().find(|n| !(1..=MOST_THREADS).contains(*n)) {
        return wrong(format!("{n} is not 1 to {MOST_THREADS} threads"));
    }
    if !(1..=MOST_BYTES).contains(&o.bytes) {
        return wrong(format!("{} is not 1 to {MOST_BYTES} bytes", o.bytes));
    }
    if let Some(name) = o.cases.iter().find(|n| case_names().all(|c| c != **n)) {
        let all: Vec<_> = case_names().collect();
        return wrong(format!("no case {name}: there are {}", all.join(", ")));
    }
    if o.rounds == 0 || o.time.is_zero() {
        return wrong("at least one round of some time".into());
    }
    Ok(())
}

// A part of a region holds the largest sync point.
const _: () = assert!(REGION / MOST_THREADS > MOST_BYTES);

/// `n` threads that share a raw limit.
fn shared<C: Carrier + Send>(of: &Combining<C>, n: usize, plan: Plan) -> io::Result<Threads> {
    let one = |i: usize| {
        let member = of.member()?;
        let record = [i as u8; RECORD];
        let put = move |m: &mut Member<'_, C>| m.put(&record);
        Ok(prepared("raw", member, |_: &mut Member<'_, C>| Ok(()), put))
    };
    let all: io::Result<Vec<_>> = (0..n).map(one).collect();
    threads::run(all?, plan)
}

/// The round with the median of the operations per second, and the median of the rounds' ratios to
/// the limit; nothing if there is no round.
fn row_of(
    case: &Case,
    (bytes, n): (usize, usize),
    taken: &[Threads],
    limit: Option<(&str, &[Threads])>,
) -> Option<Row> {
    let mut by_speed: Vec<&Threads> = taken.iter().collect();
    by_speed.sort_by(|a, b| a.total.per_second.total_cmp(&b.total.per_second));
    let median = by_speed.get((by_speed.len().max(1) - 1) / 2)?;
    let name = if case.is_ours() { "mojim" } else { case.name };
    let row = Row::new("threads", name, bytes, median.total)
        .mode(case.mode)
        .transport(case.transport)
        .threads(n)
        .spread(median);
    let Some((to, limits)) = limit else {
        return Some(row);
    };
    let mut ratios: Vec<f64> = taken
        .iter()
        .zip(limits)
        .filter(|(_, limit)| limit.total.per_second > 0.0)
        .map(|(t, limit)| t.total.per_second / limit.total.per_second)
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let rounds = ratios.len();
    let Some(&high) = ratios.get(rounds / 2) else {
        return Some(row);
    };
    let ratio = (high + ratios[(rounds - 1) / 2]) / 2.0;
    Some(row.ratio(Ratio { ratio, rounds }, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(cases: &[&str]) -> ThreadsOptions {
        ThreadsOptions {
            time: Duration::from_millis(30),
            rounds: 3,
            cases: cases.iter().map(|c| (*c).to_owned()).collect(),
            ..ThreadsOptions::default()
        }
    }

    /// Without the cases that need a mirror, whose program this is not.
    #[test]
    fn rows_have_their_fields() {
        let cases = [RAW_LOG, RAW_TCP, RAW_SHM, ROCKSDB, "unreplicated"];
        let o = tiny(&cases);
        let bench = Bench::start(&o, &std::env::temp_dir()).unwrap();
        let rows = bench.rows(&o, 2).unwrap();
        bench.end().unwrap();
        let row = |case: &str| rows.iter().find(|r| r.case == case);
        for r in &rows {
            assert_eq!((&*r.bench, r.bytes, r.threads), ("threads", 64, 2));
            assert!(r.p999_us.is_some() && r.least <= r.most && r.most.is_some());
        }
        for case in [RAW_LOG, RAW_TCP, RAW_SHM] {
            assert_eq!(row(case).unwrap().ratio, None);
        }
        assert_eq!(row(ROCKSDB).is_some(), Library::load().is_ok());
        let ours = row("mojim").unwrap();
        assert_eq!((&*ours.mode, &*ours.transport), ("unreplicated", "-"));
        assert_eq!(ours.ratio_to.as_deref(), Some(RAW_LOG));
        assert!(ours.ratio.is_some());
    }

    fn made(per_second: f64) -> Threads {
        let mut times = crate::measure::histogram();
        times.saturating_record(1000);
        let mut total = crate::measure::Summary::of(&times, Duration::from_secs(1));
        total.per_second = per_second;
        Threads {
            total,
            counts: vec![3, 1, 2],
        }
    }

    #[test]
    fn the_median_round_is_the_row_and_ratios_pair_the_rounds() {
        let taken = [made(30.0), made(10.0), made(20.0)];
        let limits = [made(60.0), made(10.0), made(80.0)];
        let row = row_of(&CASES[4], (64, 3), &taken, Some((RAW_LOG, &limits))).unwrap();
        assert_eq!((row.per_second, row.ratio), (20.0, Some(0.5)));
        assert_eq!((row.least, row.most), (Some(1), Some(3)));
        let row = row_of(&CASES[4], (64, 3), &taken[..2], Some((RAW_LOG, &limits))).unwrap();
        assert_eq!((row.per_second, row.ratio), (10.0, Some(0.75)));
        assert!(row_of(&CASES[4], (64, 3), &[], None).is_none());
    }

    #[test]
    fn what_cannot_be_measured_is_an_error() {
        let with = |change: fn(&mut ThreadsOptions)| {
            let mut o = tiny(&[RAW_LOG]);
            change(&mut o);
            check(&o).is_err()
        };
        assert!(!with(|_| ()));
        assert!(with(|o| o.counts = vec![1, 0]));
        assert!(with(|o| o.counts = vec![MOST_THREADS + 1]));
        assert!(with(|o| o.bytes = MOST_BYTES + 1));
        assert!(with(|o| o.cases = vec!["pigeon".into()]));
        assert!(with(|o| o.rounds = 0));
    }
}
