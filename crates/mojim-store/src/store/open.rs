//! Opening a copy: lock, superblock, logs, data area, in this order.
//!
//! Also owns what it means if one of them contradicts another.
//!
//! Invariants:
//!
//! - Everything that is read is made durable, again, before anything relies on it. A process that
//!   died, or a sync that failed, may have left it in a cache only.
//! - A log that is gone empties the copy before anyone sees the copy
//!   (`docs/reference/invariants.md`, 1). The node's promise stays.
//! - A log's identity is durable in the superblock before anything is appended.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, OnceLock, RwLock};

use mojim_env::turns::lock;
use mojim_format::superblock::SUPERBLOCK_VERSION;
use mojim_format::{FormatError, SUPERBLOCK_LEN, State, Superblock, View};
use mojim_protocol::History;

use super::applier::Applier;
use super::gate::Gate;
use super::mutations::Mutations;
use super::state::{JOINING, Missing, Store, StoreSpec, SuperblockFile};
use crate::area::{Area, make_dirs, replace_file};
use crate::log::{Live, Log, LogIdentity, LogSpec, ScannedRecord, Survival};
use crate::progress::Progress;
use crate::room;
use crate::stage::Stage;
use mojim_config::MediumKind;
use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::{Context, Env, Error, File, OpenHow, Result};

/// Keeps other processes from a copy while it lives.
type CopyLock = Box<dyn Any + Send + Sync>;

fn is_there(env: &dyn Env, path: &Path) -> bool {
    env.open(path, OpenHow::default()).is_ok()
}

/// Reads the newer valid slot of a superblock file.
pub fn read_superblock(env: &dyn Env, meta: &Path) -> Result<Option<Superblock>> {
    let path = meta.join("superblock");
    let file = match env.open(&path, OpenHow::default()) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        r => r.context(|| format!("opening {}", path.display()))?,
    };
    let mut b = vec![0u8; 2 * SUPERBLOCK_LEN];
    let n = file
        .read_at(&mut b, 0)
        .context(|| format!("reading {}", path.display()))?;
    let slots: Vec<_> = b[..n]
        .chunks(SUPERBLOCK_LEN)
        .map(Superblock::decode)
        .collect();
    let other = |s: &Result<_, FormatError>| match s {
        Err(e @ FormatError::Version { .. }) => Some(e.to_string()),
        _ => None,
    };
    // Also if the other slot can be read: its contents may be older.
    if let Some(e) = slots.iter().find_map(other) {
        return Err(Error::Config(format!(
            "{}: {e}. A newer release of Mojim wrote it: open it with that one",
            path.display()
        )));
    }
    let newest = slots.iter().flatten().max_by_key(|s| s.sequence).cloned();
    match newest {
        Some(s) => Ok(Some(s)),
        None => Err(Error::Damaged {
            path,
            what: format!(
                "no valid superblock ({}); restore it, or remove this node's copy of the volume to have it copied from the other node",
                slots
                    .into_iter()
                    .find_map(|s| s.err())
                    .map_or("the file is empty".to_owned(), |e| e.to_string())
            ),
        }),
    }
}

/// Makes the copy's own directory and locks it.
fn lock_copy(env: &dyn Env, spec: &StoreSpec) -> Result<CopyLock> {
    let meta = &spec.meta;
    // A superblock is made only after the names of its directories are durable.
    if !is_there(env, &meta.join("superblock")) {
        make_dirs(env, meta, Path::new("/"))?;
    }
    // A process that died may have put a superblock or a catalogue in place
    // without making its name durable; from here on they are relied on.
    env.sync_dir(meta)
        .context(|| format!("syncing {}", meta.display()))?;
    let path = meta.join("lock");
    env.lock(&path, spec.locker).map_err(|e| {
        if e.kind() == std::io::ErrorKind::WouldBlock {
            Error::Busy(format!(
                "volume {} on node {} is in use ({e})",
                spec.volume, spec.node
            ))
        } else {
            Error::io(format!("locking {}", path.display()), &e)
        }
    })
}

/// The superblock that is there, or a new one.
fn superblock(env: &dyn Env, spec: &StoreSpec, align: u64) -> Result<Superblock> {
    let path = spec.meta.join("superblock");
    if let Some(sb) = read_superblock(env, &spec.meta)? {
        check_names(&sb, spec, &path)?;
        return Ok(sb);
    }
    let sb = Superblock {
        version: SUPERBLOCK_VERSION,
        sequence: 1,
        volume_id: 0,
        promised: 0,
        view: View::default(),
        checkpoint: 0,
        boot_id: [0; 16],
        incarnation: env.random(),
        state: State::Empty,
        log_size: spec.logs[0].size,
        align: align as u32,
        logs: 0,
        cluster: spec.cluster.clone(),
        volume: spec.volume.clone(),
        node: spec.node.clone(),
        starts: vec![0; spec.logs.len()],
        history: Vec::new(),
        life: env.random(),
        ring_lost: false,
        renewed: false,
        awaits_copy: false,
        nonce: 0,
        nonce_before: 0,
        logged: 0,
    };
    let mut b = sb.encode().to_vec();
    b.resize(2 * SUPERBLOCK_LEN, 0);
    b.rotate_right(SUPERBLOCK_LEN); // sequence 1 lies in slot 1
    replace_file(env, &path, &b)?;
    Ok(sb)
}

fn check_names(sb: &Superblock, spec: &StoreSpec, path: &Path) -> Result<()> {
    let names = [
        ("cluster", &sb.cluster, &spec.cluster),
        ("volume", &sb.volume, &spec.volume),
        ("node", &sb.node, &spec.node),
    ];
    match names.into_iter().find(|(_, found, wanted)| found != wanted) {
        None => Ok(()),
        Some((what, found, wanted)) => Err(Error::Damaged {
            path: path.to_owned(),
            what: format!(
                "it belongs to {what} {found:?}, not {wanted:?}; give this node a directory of its own"
            ),
        }),
    }
}

/// Writes the superblock again where it was read, and syncs it: after a sync that
/// failed, what was read may be in the page cache only, and this slot has to be on
/// the medium before the next update goes to the other slot.
fn make_durable(env: &dyn Env, meta: &Path, sb: &Superblock) -> Result<Arc<dyn File>> {
    let path = meta.join("superblock");
    let how = OpenHow {
        create: false,
        write: true,
        durable: false,
        plain: false,
    };
    let file = env
        .open(&path, how)
        .context(|| format!("opening {}", path.display()))?;
    file.write_at(&sb.encode()[..], (sb.sequence % 2) * SUPERBLOCK_LEN as u64)
        .and_then(|()| file.sync())
        .map_err(|e| Error::poisoned(format!("superblock {}", path.display()), &e))?;
    Ok(file)
}

/// What identifies a log's memory as this copy's.
fn known(sb: &Superblock) -> LogIdentity {
    LogIdentity {
        incarnation: sb.incarnation,
        nonce: sb.nonce,
        or: sb.nonce_before,
    }
}

/// Makes it the superblock of a copy that has nothing, in a new life.
fn empty(sb: &mut Superblock, env: &dyn Env, logs: usize) {
    sb.state = State::Empty;
    sb.life = env.random();
    if sb.view.mirror == sb.node {
        sb.view.mirror.clear();
    }
    sb.incarnation = env.random();
    sb.checkpoint = 0;
    sb.logged = 0;
    sb.history.clear();
    sb.starts = vec![0; logs];
}

/// A copy that is being opened.
struct Opening<'a> {
    env: &'a Arc<dyn Env>,
    spec: StoreSpec,
    /// The superblock as it will be written.
    sb: Superblock,
    align: u64,
    /// The logs are memory.
    in_memory: bool,
    /// The last process closed the copy cleanly: it needs no log.
    was_clean: bool,
    /// A copy from another node, as of this LSN, was being put in place of this one.
    switching: Option<u64>,
}

impl<'a> Opening<'a> {
    fn new(
        env: &'a Arc<dyn Env>,
        spec: StoreSpec,
        sb: Superblock,
        align: u64,
    ) -> Result<Opening<'a>> {
        if sb.logs != 0 && sb.logs != spec.logs_hash(align) {
            return Err(Error::Config(format!(
                "volume {} on node {}: its logs were configured otherwise when it was last used (or by another release's defaults) and still hold records. Start it once with the old `log` and `connections`, end it cleanly, then change them",
                spec.volume, spec.node
            )));
        }
        Ok(Opening {
            env,
            align,
            in_memory: spec.logs[0].medium == MediumKind::Dram,
            was_clean: sb.logs == 0,
            switching: (sb.state == State::Switching).then_some(sb.checkpoint),
            spec,
            sb,
        })
    }

    /// Opens the logs, and settles what it means for the copy if one is gone.
    fn open_logs(&mut self) -> Result<Vec<Log>> {
        let bound = self.sb.boot_id != [0; 16];
        // The machine was restarted, and the log was in memory.
        let mut lost = self.in_memory && bound && self.sb.boot_id != self.env.boot_id();
        let closed = self.was_clean.then(|| known(&self.sb));
        if self.was_clean {
            // The logs hold only leftovers from before the clean close.
            self.sb.starts = vec![0; self.spec.logs.len()];
            self.sb.incarnation = self.env.random();
            self.sb.log_size = self.spec.logs[0].size;
            self.sb.align = self.align as u32;
        }
        let mut logs = Vec::new();
        for (i, l) in self.spec.logs.iter().enumerate() {
            self.check_log(l)?;
            let (is, start) = (known(&self.sb), self.sb.starts[i]);
            let opened = Log::open(self.env, l.clone(), self.align, is, start, closed)?;
            // This log was in memory and is gone.
            lost |= opened.1 == Survival::Lost && self.sb.logs != 0;
            logs.push(opened);
        }
        let sb = &mut self.sb;
        let ring_lost = logs.iter().any(|(_, s)| *s == Survival::Medium);
        let paired = !sb.view.mirror.is_empty() && sb.view.mirror != JOINING;
        if ring_lost && sb.logs != 0 && sb.view.primary == sb.node && paired {
            // A life that no program has begun an epoch in need not change again.
            sb.renewed &= sb.ring_lost;
            sb.ring_lost = true;
        }
        if self.switching.is_some() {
            sb.state = State::Whole;
        }
        if lost {
            self.discard(&mut logs)?;
        }
        if self.in_memory {
            self.sb.boot_id = self.env.boot_id();
        }
        self.sb.logs = self.spec.logs_hash(self.align);
        Ok(logs.into_iter().map(|(log, _)| log).collect())
    }

    /// A log on a disk that holds records must exist and have its full length.
    fn check_log(&self, l: &LogSpec) -> Result<()> {
        let env = &**self.env;
        if let Some(dir) = l.path.parent()
            && l.medium != MediumKind::Dram
            && !is_there(env, &l.path)
        {
            make_dirs(env, dir, Path::new("/"))?;
        }
        if self.sb.logs == 0 || l.medium != MediumKind::Disk {
            return Ok(());
        }
        let len = env
            .open(&l.path, OpenHow::default())
            .and_then(|f| f.len())
            .unwrap_or(0);
        if len == l.size {
            return Ok(());
        }
        Err(Error::Damaged {
            path: l.path.clone(),
            what: format!(
                "the log is {len} bytes long, {} expected: it was removed or cut. Restore it, or remove this node's copy of the volume to have it copied from the other node",
                l.size
            ),
        })
    }

    /// Empties a copy that may lack records of a lost log: it is never served. The
    /// node's promise stays.
    fn discard(&mut self, logs: &mut [(Log, Survival)]) -> Result<()> {
        let sb = &mut self.sb;
        empty(sb, &**self.env, logs.len());
        for (slot, l) in logs.iter_mut().zip(&self.spec.logs) {
            // With the new incarnation the old memory is no longer known.
            *slot = Log::open(self.env, l.clone(), self.align, known(sb), 0, None)?;
        }
        Ok(())
    }

    fn open_area(&self, logs: &[Log]) -> Result<Area> {
        let (env, spec, sb) = (self.env, &self.spec, &self.sb);
        if let Some(lsn) = self.switching {
            // A crash interrupted the switch: complete it. Also for a copy that
            // was discarded, so that the catalogue knows its files.
            Store::switch(&**env, spec, logs, sb.volume_id, lsn)?;
        }
        let open = || Area::open(env, &spec.dir, &spec.meta, sb.volume_id);
        let opened = match open() {
            // A renaming that was cut off is completed.
            Err(e) if e.lacks_room() && room::release(&**env, &spec.meta) => open(),
            opened => opened,
        };
        let mut area = match opened {
            Ok(a) => a,
            // This copy will be replaced by another, or made anew.
            Err(Error::Damaged { .. } | Error::Config(_)) if sb.state != State::Whole => {
                Area::unknown(env, &spec.dir, &spec.meta, sb.volume_id)?
            }
            Err(e) => return Err(e),
        };
        if sb.state == State::Whole {
            area.check_catalog(sb.checkpoint)?;
        }
        area.keep_most_open(spec.max_open.min(env.most_open()));
        self.check_limit(&area)?;
        if self.in_memory && !self.was_clean && sb.state == State::Whole {
            // The checkpoints of a process that was killed synced nothing, and
            // the records that they released will not be applied again.
            area.doubt();
        }
        Ok(area)
    }

    /// A write beyond the process's limit would end the program by a signal.
    fn check_limit(&self, area: &Area) -> Result<()> {
        let logs = self.spec.logs.iter();
        let disks = logs.filter(|l| l.medium == MediumKind::Disk);
        let sizes = disks.map(|l| l.size).chain(area.files().map(|f| f.size));
        let (largest, limit) = (sizes.max().unwrap_or(0), self.env.file_size_limit());
        if largest <= limit {
            return Ok(());
        }
        Err(Error::Config(format!(
            "volume {} on node {}: its largest file or log has {largest} bytes, and this process may write {limit} (RLIMIT_FSIZE, `ulimit -f`); raise that limit",
            self.spec.volume, self.spec.node
        )))
    }

    /// Makes the store. It has recovered nothing yet.
    fn store(self, logs: Vec<Log>, area: Area, file: Arc<dyn File>, held: CopyLock) -> Store {
        let sb = self.sb;
        let history = History::from_entries(&sb.history).expect("a decoded superblock is ordered");
        Store {
            env: self.env.clone(),
            level: logs[0].level(),
            history: RwLock::new(Arc::new(history)),
            open_files: area.open_files().clone(),
            max_file: area.max_file(),
            longest: area.longest_names(),
            area: Mutex::new(area),
            applier: Gate::new(Applier::at(sb.starts.clone(), sb.checkpoint)),
            checkpointing: Mutex::new(()),
            durable: Mutex::new(sb.starts.clone()),
            moved: AtomicU64::new(self.env.now().as_nanos() as u64),
            hurried: AtomicBool::new(false),
            haste: Event::default(),
            laden: AtomicBool::new(false),
            applied: AtomicU64::new(sb.checkpoint),
            advanced: Event::default(),
            rewritten: AtomicU64::new(0),
            checkpoint: AtomicU64::new(sb.checkpoint),
            retained: AtomicU64::new(sb.checkpoint),
            holds: Mutex::new(Vec::new()),
            tail: AtomicU64::new(sb.checkpoint),
            shown: AtomicU64::new(sb.checkpoint),
            frozen: AtomicBool::new(false),
            pauses: Mutex::default(),
            paused: AtomicBool::new(false),
            watches: Mutex::default(),
            loading: AtomicBool::new(sb.state != State::Whole),
            stage: Mutex::new(None),
            crowded: AtomicBool::new(false),
            progress: Progress::default(),
            poison: OnceLock::new(),
            outlasts: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            short: Mutex::default(),
            reserved: AtomicU64::new(0),
            unapplied: OnceLock::new(),
            was_clean: self.was_clean,
            missing: Mutex::default(),
            has_hole: AtomicBool::new(false),
            has_part: AtomicBool::new(false),
            known: AtomicU64::new(sb.checkpoint),
            next_note: Mutex::default(),
            spills: Mutex::new(BTreeMap::new()),
            arriving: Mutex::default(),
            mutations: Mutations::default(),
            superblock: Mutex::new(SuperblockFile {
                file,
                now: sb,
                late: false,
            }),
            logs,
            spec: self.spec,
            held: Mutex::new(Some(held)),
        }
    }
}

impl Store {
    /// Empties a copy that follows and cannot be opened, by an operator's word, as one whose
    /// disk was replaced: in a new life, and no member. The node's promise stays. Its files
    /// remain as a source of equal bytes. Fails where this node is the primary, or was the last
    /// that it knows, and where it knows a later view than that of `epoch`, whose primary is to
    /// send the copy: what it has may be all there is.
    pub fn give_up(env: &Arc<dyn Env>, spec: &StoreSpec, epoch: u64) -> Result<()> {
        let _held = lock_copy(&**env, spec)?;
        let mut sb = Store::followed(&**env, spec)?;
        if sb.view.epoch > epoch {
            return Err(Error::Invalid(format!(
                "node {} knows epoch {} of volume {}, and the primary is in epoch {epoch}: its copy is not given up for an older one",
                spec.node, sb.view.epoch, spec.volume
            )));
        }
        make_durable(&**env, &spec.meta, &sb)?;
        sb.sequence += 1;
        empty(&mut sb, &**env, spec.logs.len());
        // The logs hold nothing that counts, and may be gone.
        sb.logs = 0;
        // Another node has a copy, so nothing is made anew in the place of this one.
        sb.awaits_copy = true;
        make_durable(&**env, &spec.meta, &sb)?;
        Ok(())
    }

    /// The superblock of a copy that a primary elsewhere has fed; an error of any other.
    pub fn followed(env: &dyn Env, spec: &StoreSpec) -> Result<Superblock> {
        if let Some(sb) = read_superblock(env, &spec.meta)? {
            check_names(&sb, spec, &spec.meta.join("superblock"))?;
            if sb.view.epoch > 0 && sb.view.primary != sb.node {
                return Ok(sb);
            }
        }
        Err(Error::Invalid(format!(
            "node {} follows nobody in volume {}: its copy is not given up",
            spec.node, spec.volume
        )))
    }

    /// Opens the copy, making what is missing, and recovers it: finds the
    /// contiguous prefix of whole sync points in the logs. Nothing is applied
    /// yet.
    pub fn open(env: &Arc<dyn Env>, spec: StoreSpec) -> Result<Store> {
        assert!(!spec.logs.is_empty());
        let held = lock_copy(&**env, &spec)?;
        let align = Log::align_for(&**env, &spec.logs[0])?;
        let sb = superblock(&**env, &spec, align)?;
        let file = make_durable(&**env, &spec.meta, &sb)?;
        let mut opening = Opening::new(env, spec, sb, align)?;
        let logs = opening.open_logs()?;
        let area = opening.open_area(&logs)?;
        let store = opening.store(logs, area, file, held);
        let sb = store.own_logs()?;
        store.rewritten.store(sb.nonce, Release);
        store.live(Live::Applied).store(sb.checkpoint, SeqCst);
        // What a killed process began to apply may show; `recover` sets the exact limit.
        store.live(Live::Limit).fetch_max(sb.checkpoint, SeqCst);
        if sb.state == State::Whole {
            store.recover(&sb)?;
        }
        store.keep_named_spills()?;
        // Last, once the copy was found to be right.
        Stage::clear(&**env, &store.spec.dir, &store.spec.meta)?;
        Ok(store)
    }

    /// Gives the logs' memory a new nonce for this opening. A ring that is put back
    /// after another was used in its place then has a nonce that the superblock no
    /// longer knows. Until every ring has the new nonce, the one before counts too; so
    /// rings that the last opening did not reach first get the present nonce.
    fn own_logs(&self) -> Result<Superblock> {
        let mut sb = self.superblock();
        for log in &self.logs {
            log.renew(sb.nonce);
        }
        let kept = self.logs.iter().filter(|log| log.was_known()).count();
        if sb.nonce == 0 && kept > 0 {
            // Written by a release without nonces. Zero cannot be the nonce before, so
            // the rings first get one that can.
            let first = self.env.random();
            self.update(|s| s.nonce_before = first)?;
            for log in &self.logs {
                log.renew(first);
            }
            sb.nonce = first;
        }
        sb.nonce_before = if kept > 0 { sb.nonce } else { 0 };
        sb.nonce = self.env.random();
        if self.was_clean {
            // A clean copy needs no log, so the memory is stamped before the superblock
            // counts on it. Otherwise a crash in between would count as the loss of a
            // log in memory.
            for log in &self.logs {
                log.own(known(&sb));
            }
        }
        // Durable before anything is appended or applied: the log's identity
        // and, for a log in memory, the boot that it belongs to.
        self.update(|s| {
            *s = Superblock {
                sequence: s.sequence,
                ..sb.clone()
            }
        })?;
        for log in &self.logs {
            log.own(known(&sb));
        }
        // From here on no ring has the nonce before; the next update says so. A ring that
        // is absent now may come back with that nonce; so if one is, that update is made now.
        lock(&self.superblock).now.nonce_before = 0;
        if kept > 0 && kept < self.logs.len() {
            self.update(|_| {})?;
        }
        Ok(sb)
    }

    fn recover(&self, sb: &Superblock) -> Result<()> {
        let history = self.history();
        let mut all: Vec<ScannedRecord> = Vec::new();
        for log in &self.logs {
            all.extend(log.recover(sb.volume_id, &history, sb.checkpoint));
        }
        all.sort_by_key(|f| f.lsn);
        let mut tail = sb.checkpoint;
        for (i, f) in all.iter().enumerate() {
            if f.lsn != sb.checkpoint + 1 + i as u64 {
                break;
            }
            if f.end {
                tail = f.lsn;
            }
        }
        self.tail.store(tail, Release);
        self.shown.store(tail, Release);
        self.live(Live::Limit).store(tail, SeqCst);
        // The logs may have begun with records kept for other nodes; these get a whole copy.
        let starts: Vec<u64> = self.logs.iter().map(Log::start).collect();
        if starts != sb.starts {
            self.update(|s| s.starts = starts.clone())?;
        }
        {
            let mut a = self.applier.lock();
            lock(&self.durable).clone_from(&starts);
            *a = Applier::at(starts, a.applied);
        }
        for log in &self.logs {
            let beyond = log.beyond(sb.volume_id, &history, sb.checkpoint);
            if beyond > tail {
                self.has_hole.store(true, Release);
            }
            let known = all.iter().map(|f| f.committed).chain([beyond]);
            let known = known.max().unwrap_or(0);
            self.known.fetch_max(known, AcqRel);
            let mut missing = lock(&self.missing);
            if known > tail && missing.as_ref().is_none_or(|m| known > m.known) {
                *missing = Some(Missing {
                    known,
                    path: log.path().to_owned(),
                    at: Some(log.head() % log.size()),
                });
            }
        }
        self.look_at_note(sb.logged, tail);
        self.look_at_catalog(&history, tail);
        // Records that only the memory of a killed process had count as persistent
        // from now on, so they are made so. So are those read from the medium: a
        // write that failed, or that was cut off, may be in the disk's cache only.
        self.persist_all()?;
        self.check_sizes()
    }

    /// The superblock says that the logs had everything up to `logged`, which was acknowledged.
    /// If they end before, they are of an earlier time, or their disk lost what was durable.
    fn look_at_note(&self, logged: u64, tail: u64) {
        if logged <= tail {
            return;
        }
        self.known.fetch_max(logged, AcqRel);
        let mut missing = lock(&self.missing);
        if missing.as_ref().is_none_or(|m| logged > m.known) {
            let log = &self.logs[0];
            *missing = Some(Missing {
                known: logged,
                path: log.path().to_owned(),
                at: Some(log.head() % log.size()),
            });
        }
    }

    /// What is applied is in the logs, without a gap, and committed, or all that a node that
    /// takes over has. So if the catalogue has a part of a sync point behind `tail`, the end of a
    /// log is damaged, which by itself looks torn.
    fn look_at_catalog(&self, history: &History, tail: u64) {
        let mut area = lock(&self.area);
        let (epoch, known) = area.begun();
        if history.epoch_at(known) != Some(epoch) {
            area.forget_begun();
            return;
        }
        if known <= tail {
            return;
        }
        self.has_part.store(true, Release);
        self.known.fetch_max(known, AcqRel);
        // The files show it, too.
        self.shown.fetch_max(known, AcqRel);
        self.live(Live::Limit).fetch_max(known, SeqCst);
        let mut missing = lock(&self.missing);
        if missing.as_ref().is_none_or(|m| known > m.known) {
            *missing = Some(Missing {
                known,
                path: area.catalog_path().to_owned(),
                at: None,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::LogSpec;
    use mojim_config::MediumKind;

    /// A copy that cannot be used may be the only one with something acknowledged: it is not
    /// given up for that of a primary in an older view, nor where this node led.
    #[test]
    fn a_copy_is_given_up_for_no_older_view() {
        let dir = std::env::temp_dir().join(format!("mojim-give-up-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
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
        let as_of = |primary: &str| {
            let store = Store::open(&env, spec.clone()).unwrap();
            store
                .update(|s| {
                    s.state = State::Whole;
                    (s.view.epoch, s.view.primary) = (3, primary.into());
                })
                .unwrap();
            store.superblock()
        };
        let now = || read_superblock(&*env, &spec.meta).unwrap().unwrap();
        as_of("b");
        assert!(Store::give_up(&env, &spec, 3).is_err());
        let had = as_of("a");
        assert!(Store::give_up(&env, &spec, 2).is_err());
        assert_eq!((now().state, now().life), (State::Whole, had.life));
        Store::give_up(&env, &spec, 3).unwrap();
        assert_eq!(now().state, State::Empty);
        assert!(now().awaits_copy && now().life != had.life);
        assert_eq!(now().promised, had.promised);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
