//! A copy that is taken in from another node: staged beside what is here, and
//! put in its place once it is whole.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;

use mojim_env::locks;
use mojim_env::turns::lock;
use mojim_format::message::{CopyHave, CopySums, CopyWant};
use mojim_format::{CatalogEntry, EpochStart, State};
use mojim_protocol::History;

use super::applier::Applier;
use super::state::{Store, StoreSpec};
use crate::area::Area;
use crate::log::{Live, Log};
use crate::stage::{self, Stage};
use mojim_env::{Env, Error, Result};

impl Store {
    /// Begins to take in copy number `copy` of another node's store, with `bytes`
    /// bytes in its files.
    /// This node's own files are kept until `load_end`, in whatever state they are:
    /// bytes that are the same need not be sent. Nothing is applied to them meanwhile.
    pub fn load_begin(&self, copy: u64, volume_id: u64, bytes: u64) -> Result<()> {
        self.check()?;
        let sb = self.superblock();
        if sb.state != State::Whole && !sb.awaits_copy {
            self.update(|s| s.awaits_copy = true)?;
        }
        {
            let _a = self.applier.lock();
            self.loading.store(true, Release);
        }
        if self.mutations.replace_early.is_on() {
            self.update(|s| s.state = State::Empty)?;
            self.fail(lock(&self.area).reset(sb.volume_id))?;
        }
        if self.superblock().state != State::Whole && self.crowded.swap(false, Relaxed) {
            // This copy was discarded: its files are only a source of equal bytes.
            self.fail(lock(&self.area).reset(sb.volume_id))?;
        }
        let old = lock(&self.area)
            .files()
            .map(|f| (f.id, f.name.clone()))
            .collect();
        let spec = &self.spec;
        let stage = Stage::begin(
            &self.env,
            &spec.dir,
            &spec.meta,
            volume_id,
            copy,
            old,
            spec.max_open.min(self.env.most_open()),
        )?;
        *lock(&self.stage) = Some(stage);
        self.progress.begin(self.env.now(), true, bytes);
        Ok(())
    }

    /// Runs `f` on the stage. `from`: the copy of the calling stream; `None`: the
    /// session's own link.
    fn staging<T>(&self, from: Option<u64>, f: impl FnOnce(&mut Stage) -> Result<T>) -> Result<T> {
        let r = match (&mut *lock(&self.stage), from) {
            (Some(s), None) => f(s),
            (Some(s), Some(copy)) => s.takes(copy).and_then(|()| f(s)),
            (None, None) => Err(Error::Protocol("no copy was begun".into())),
            (None, Some(_)) => Err(stage::over()),
        };
        self.noted(r)
    }

    fn noted<T>(&self, r: Result<T>) -> Result<T> {
        if let Err(Error::Io { errno, .. }) = &r
            && *errno == libc::ENOSPC
        {
            self.crowded.store(true, Relaxed);
        }
        r
    }

    /// A stream is opened, over a link of `epoch`, for a part of copy number
    /// `copy`; refused if that is not the copy that is being taken in.
    pub fn stream_opens(&self, copy: u64, epoch: u64) -> Result<()> {
        if self.superblock().promised != epoch {
            return Err(stage::over());
        }
        self.staging(Some(copy), Stage::stream_opens)
    }

    /// A stream begins to carry bytes.
    pub fn stream_begins(&self, copy: u64) -> Result<()> {
        self.staging(Some(copy), |s| {
            s.stream_begins();
            Ok(())
        })
    }

    /// Everything that came over a stream is staged.
    pub fn stream_ends(&self, copy: u64) -> Result<()> {
        self.staging(Some(copy), |s| {
            s.stream_ends();
            Ok(())
        })
    }

    /// What came over a stream could not be taken in. The session's own link, idle
    /// meanwhile, reports it: the stream's report may be lost with what is on its way
    /// over that link.
    pub fn stream_fails(&self, copy: u64, e: &Error) {
        // A copy that is over needs no reason.
        let _ = self.staging(Some(copy), |s| {
            s.stream_fails(e.clone());
            Ok(())
        });
    }

    /// An error if a stream of the copy that is being taken in has failed.
    pub fn check_streams(&self) -> Result<()> {
        lock(&self.stage).as_ref().map_or(Ok(()), Stage::check)
    }

    /// An error if copy `copy` is no longer being taken in.
    pub fn stream_goes_on(&self, copy: u64) -> Result<()> {
        self.staging(Some(copy), |_| Ok(()))
    }

    /// One file of the copy. Returns how much of an older file can be compared.
    pub fn load_file(&self, e: CatalogEntry) -> Result<CopyHave> {
        let id = e.id;
        let size = self.staging(None, |s| s.file(e))?;
        Ok(CopyHave { id, size })
    }

    /// Compares sums of pages, from a stream or (`None`) the session's own link, with
    /// the older file. Takes the equal pages and returns which ones are to be sent.
    pub fn load_sums(&self, from: Option<u64>, m: &CopySums) -> Result<CopyWant> {
        let broken = self.mutations.keep_difference.is_on();
        let mut q = self.staging(from, |s| s.question(m))?;
        let found = self.noted(q.answer(m, broken))?;
        let at = self.staging(from, |s| s.answered(m, q, &found.wanted))?;
        self.progress.kept(found.kept);
        self.progress.at(at);
        Ok(CopyWant {
            id: m.id,
            offset: m.offset,
            pages: found.wanted,
        })
    }

    /// Writes bytes of the copy, from a stream or (`None`) the session's own link.
    pub fn load_data(&self, from: Option<u64>, id: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let overtakes = self.mutations.overtake.is_on();
        let to = self.staging(from, |s| {
            if from.is_none() && !overtakes {
                s.check_streams()?;
            }
            s.target(id, offset, bytes.len())
        })?;
        self.noted(to.write(offset, bytes))?;
        let range = offset..offset + bytes.len() as u64;
        let at = self.staging(from, |s| s.written(&to, range))?;
        self.progress.at(at);
        Ok(())
    }

    /// Whether a copy is being taken in.
    pub fn is_loading(&self) -> bool {
        // If it is locked, a thread is making the copy durable, which takes long.
        self.stage.try_lock().map_or(true, |s| s.is_some())
    }

    /// Whether a copy that was taken in is whole and being put in place.
    pub fn is_switching(&self) -> bool {
        let sealed = lock(&self.stage).as_ref().is_some_and(Stage::is_sealed);
        sealed || self.superblock().state == State::Switching
    }

    /// The copy will not become whole: what was here before goes on.
    pub fn load_abort(&self) {
        {
            let mut stage = lock(&self.stage);
            // Once sealed it may be the copy that counts.
            if stage.as_ref().is_none_or(Stage::is_sealed) {
                return;
            }
            *stage = None;
        }
        self.progress.end(self.env.now(), false);
        // If this fails, the staged files are removed when the next copy begins.
        let _ = Stage::clear(&*self.env, &self.spec.dir, &self.spec.meta);
        if self.superblock().state == State::Whole {
            let _a = self.applier.lock();
            self.loading.store(false, Release);
        }
    }

    /// The copy is complete and is the result of the records up to `lsn`: it
    /// replaces the copy that was here.
    pub fn load_end(&self, lsn: u64, history: &History) -> Result<()> {
        self.take_copy(lsn, history, self.env.random())
    }

    /// [`Store::load_end`] for a copy that goes on where the one here ends: this node
    /// still holds what it held, so the copy keeps its life number.
    pub fn load_more(&self, lsn: u64, history: &History) -> Result<()> {
        self.take_copy(lsn, history, self.superblock().life)
    }

    fn take_copy(&self, lsn: u64, history: &History, life: u64) -> Result<()> {
        let volume_id = self.staging(None, |s| s.seal(lsn).map(|()| s.volume()))?;
        let mut a = self.applier.lock();
        // Locked before `applied` changes: a reader in `standing_still` must not
        // take the old files for the new ones.
        let mut area = lock(&self.area);
        // From here on the staged copy is the one that counts.
        let of = (State::Switching, volume_id);
        self.restart_at(&mut a, lsn, of, history.entries(), life)?;
        // The copy may be as of the LSN that was here, and other in its bytes: a page that
        // was damaged is right now.
        self.rewritten.fetch_add(1, AcqRel);
        drop(a);
        let opened = Store::switch(&*self.env, &self.spec, &self.logs, volume_id, lsn)
            .and_then(|()| Area::open(&self.env, &self.spec.dir, &self.spec.meta, volume_id));
        let mut opened = self.fail(opened)?;
        opened.take_over(&self.open_files);
        *area = opened;
        area.keep_most_open(self.spec.max_open.min(self.env.most_open()));
        drop(area);
        self.update(|s| s.state = State::Whole)?;
        *lock(&self.stage) = None;
        self.progress.end(self.env.now(), true);
        self.loading.store(false, Release);
        self.advanced.notify();
        self.remove_stray_spills();
        Ok(())
    }

    /// Sets both the superblock and the state in memory: the data area is the result
    /// of the records up to `lsn`, and the logs begin behind that LSN, empty.
    pub(super) fn restart_at(
        &self,
        a: &mut Applier,
        lsn: u64,
        (state, volume_id): (State, u64),
        history: &[EpochStart],
        life: u64,
    ) -> Result<()> {
        let starts: Vec<u64> = self.logs.iter().map(Log::head).collect();
        self.update(|s| {
            s.volume_id = volume_id;
            s.checkpoint = lsn;
            s.logged = lsn;
            s.starts = starts.clone();
            s.history = history.to_vec();
            s.state = state;
            s.life = life;
            (s.ring_lost, s.renewed) = (false, false);
            s.awaits_copy = false;
            if state == State::Switching && s.view.mirror == s.node {
                // Not a member until it is told so again.
                s.view.mirror.clear();
            }
        })?;
        *locks::write(&self.history) = Arc::new(History::from_entries(history).unwrap_or_default());
        let mut durable = lock(&self.durable);
        for (log, &s) in self.logs.iter().zip(&starts) {
            log.release(s);
        }
        durable.clone_from(&starts);
        drop(durable);
        *a = Applier::at(starts, lsn);
        self.retained.store(lsn, Release);
        self.live(Live::Applied).store(lsn, SeqCst);
        self.live(Live::Limit).store(lsn, SeqCst);
        self.applied.store(lsn, Release);
        self.checkpoint.store(lsn, Release);
        self.tail.store(lsn, Release);
        self.shown.store(lsn, Release);
        self.known.store(lsn, Release);
        // What was missing belonged to the old copy.
        *lock(&self.missing) = None;
        self.has_part.store(false, Release);
        Ok(())
    }

    /// Puts a sealed copy in place; may be repeated after a crash.
    pub(super) fn switch(
        env: &dyn Env,
        spec: &StoreSpec,
        logs: &[Log],
        volume: u64,
        lsn: u64,
    ) -> Result<()> {
        // Old records above the copy's LSN, in epochs of its history, would look like
        // new ones.
        for log in logs {
            log.wipe()?;
        }
        stage::put_in_place(env, &spec.dir, &spec.meta, volume, lsn)
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use crate::log::LogSpec;
    use mojim_config::MediumKind;

    fn new_dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("mojim-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn open(dir: &Path) -> Store {
        let env: Arc<dyn Env> = Arc::new(mojim_linux::Os::new().unwrap());
        let log = LogSpec {
            lane: 0,
            medium: MediumKind::Dram,
            path: dir.join("log"),
            ring: dir.join("ring"),
            size: 64 << 10,
        };
        let spec = StoreSpec {
            cluster: "c".into(),
            volume: "v".into(),
            node: "b".into(),
            dir: dir.join("data"),
            meta: dir.join("meta"),
            logs: vec![log],
            rank: 1,
            holders: 2,
            max_open: 16,
            copy_streams: 1,
            by_hand: true,
            locker: mojim_env::Locker::Program,
        };
        Store::open(&env, spec).unwrap()
    }

    /// Readers that asked without a pause had the applier's lock again before whoever waited for
    /// it was awake: a mirror neither applied nor answered its links, and the primary's sync
    /// points failed with ETIMEDOUT. Here each reader leaves when somebody waits.
    #[test]
    fn readers_let_those_go_first_who_keep_the_node_going() {
        let dir = new_dir("readers");
        let store = open(&dir);
        let over = AtomicBool::new(false);
        let read = |look: &dyn Fn() -> Result<u32>| -> Result<()> {
            let mut left_at = None;
            while !over.load(Acquire) {
                let turns = look()?;
                assert_ne!(left_at, Some(turns), "it went before who waited");
                left_at = Some(turns);
            }
            Ok(())
        };
        let until_wanted = || {
            let turns = store.applier.turns();
            while !store.applier.is_wanted() && !over.load(Acquire) {
                std::thread::yield_now();
            }
            Ok(turns)
        };
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| read(&|| store.standing_still(|_, _| until_wanted())));
                s.spawn(|| read(&|| store.standing_still_since(0, 1, |_, _, _| until_wanted())));
            }
            for _ in 0..200 {
                store.apply(0, 1).unwrap();
                store.pressure();
            }
            over.store(true, Release);
        });
        drop(store);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// Takes in a copy as of `lsn` with one page of that number.
    fn take_in(store: &Store, lsn: u64) {
        let entry = CatalogEntry {
            id: 7,
            size: 4096,
            name: "f".into(),
        };
        store.load_begin(lsn, 1, entry.size).unwrap();
        store.load_file(entry).unwrap();
        store.load_data(None, 7, 0, &[lsn as u8; 4096]).unwrap();
        store.load_end(lsn, &History::default()).unwrap();
    }

    /// A reader went on with a damaged page after `mojim repair --anew`: the copy that
    /// mended it was as of the LSN that the reader showed.
    #[test]
    fn a_copy_as_of_the_same_lsn_is_told_from_the_one_before() {
        let dir = new_dir("same-lsn");
        let store = open(&dir);
        take_in(&store, 3);
        let before = store.rewritten();
        take_in(&store, 3);
        assert_ne!(store.rewritten(), before);
        drop(store);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A page was repaired, and the daemon ended before a reader that had the page asked
    /// again: in the next opening the reader went on with it.
    #[test]
    fn an_opening_is_told_from_the_one_before() {
        let dir = new_dir("openings");
        let seen: Vec<u64> = (0..3).map(|_| open(&dir).rewritten()).collect();
        assert!(
            seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2],
            "{seen:?}"
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// `mojim verify` once reported a right copy as wrong: it had waited for the
    /// applier's lock while a copy from another node was put in place, and then
    /// read the old files as of the new LSN.
    #[test]
    fn files_are_never_seen_as_of_an_lsn_that_is_not_theirs() {
        let dir = new_dir("load");
        let store = open(&dir);
        let over = AtomicBool::new(false);
        let copy = |lsn: u64| take_in(&store, lsn);
        copy(1);
        let looks = std::thread::scope(|s| {
            let look = || {
                let mut looks = 0;
                while !over.load(Acquire) {
                    let seen = store.standing_still(|area, lsn| {
                        let mut byte = [0];
                        area.file(7)?.read_at(&mut byte, 100).unwrap();
                        Ok((byte[0], lsn as u8))
                    });
                    let (byte, lsn) = seen.unwrap();
                    if byte != lsn {
                        return Err((byte, lsn));
                    }
                    looks += 1;
                    std::thread::sleep(Duration::from_micros(20));
                }
                Ok(looks)
            };
            let lookers: Vec<_> = (0..3).map(|_| s.spawn(look)).collect();
            (2..200).for_each(copy);
            over.store(true, Release);
            lookers
                .into_iter()
                .map(|l| l.join().unwrap())
                .collect::<Vec<_>>()
        });
        assert!(looks.iter().all(Result::is_ok), "{looks:?}");
        assert!(looks.iter().flatten().sum::<u32>() > 0, "{looks:?}");
        drop(store);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
