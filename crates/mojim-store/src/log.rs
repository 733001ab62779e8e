//! The log: a ring of records in memory, and where it is made persistent.
//!
//! Owns the ring's bytes and three positions in it, `start <= persisted <=
//! head` (except that `persisted` stays behind if nothing calls `persist`). The records that
//! several threads append behind `head` are counted in `reservations.rs`.
//! Positions never wrap. A byte lies at `position % size`.
//! The same ring is send buffer, metadata log (Mojim 4.2) and, byte for byte, image of the
//! log on disk. So a record is encoded once.
//!
//! Invariants:
//!
//! - Records begin at multiples of `align` and never cross the ring's end. A
//!   pad fills what is left there. On a disk no two records share a sector, so
//!   a torn write never touches an older record.
//! - `[start, head)` is never overwritten. `start` moves only past records
//!   whose effects are as durable as this log (`docs/reference/invariants.md`, "The
//!   order of a record's life").
//! - Nothing tells where the log ends: recovery reads from `start` for as long
//!   as records validate, ascend in LSN and belong to their epoch.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

use mojim_format::bytes::u64_at;
use mojim_format::pad::{PAD_LEN, PAD_MAGIC, Pad};
use mojim_format::record::RECORD_MAGIC;
use mojim_format::{Level, RecordView};
use mojim_protocol::History;

use mojim_config::MediumKind;
use mojim_env::alone::Alone;
use mojim_env::{Context, Env, Error, File, Memory, OpenHow, Result};

/// Bytes before the ring in its memory: identity and live figures.
pub const CONTROL_LEN: usize = 4096;
const CONTROL_MAGIC: u64 = u64::from_le_bytes(*b"MJRING01");

/// Index of the boot id in the identity's words.
const BOOT_AT: usize = 4;
/// Index of the nonce in the identity's words.
const NONCE_AT: usize = 5;
const IDENTITY_LEN: usize = 6;

/// What distinguishes a log's memory from any other memory, also from the same memory
/// that was moved away while other memory was used in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogIdentity {
    /// The copy's incarnation.
    pub incarnation: u64,
    /// The nonce that the memory was given when it was last opened.
    pub nonce: u64,
    /// If not 0: another nonce that the memory may have instead.
    pub or: u64,
}

/// Live figures, as `AtomicU64` at `LIVE_AT + 8 × index` of lane 0's control
/// page, for `mojim status`.
pub const LIVE_AT: usize = 1024;
/// Index of each live figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Live {
    /// Process that is attached as primary; 0 for none, and until it takes sync points.
    Pid = 0,
    /// The epoch of this process.
    Epoch,
    /// Last LSN given out.
    Last,
    /// Committed LSN.
    Committed,
    /// LSN up to which the mirror acknowledged.
    Acked,
    /// LSN up to which this node's log is persistent.
    Persisted,
    /// LSN up to which the data area is current.
    Applied,
    /// Round trip of the link, in nanoseconds, smoothed.
    RoundTrip,
    /// 1 while the link to the mirror is up.
    LinkUp,
    /// Bytes of records that the mirror has not acknowledged.
    BytesBehind,
    /// No record above this LSN has reached the data area, not even in part.
    Limit,
    /// Bytes that were acknowledged by a mirror that is lost, and are in the
    /// primary's memory only.
    AtRisk,
    /// Bytes that were at risk the last time a mirror was lost.
    LastRisk,
    /// How long these bytes were at risk, in microseconds.
    LastRiskTime,
    /// How often a mirror was lost, not counting a loss that still lasts.
    Losses,
    /// 1 once the copy has failed: a process that has it open commits nothing more.
    Failed,
    /// 1 while what is committed waits for room in the data files.
    NoRoom,
}

/// Those that end with the process that was attached.
const OF_A_PROCESS: [Live; 5] = [
    Live::Pid,
    Live::LinkUp,
    Live::AtRisk,
    Live::Failed,
    Live::NoRoom,
];

/// How many live figures there are.
pub const LIVE_COUNT: usize = Live::NoRoom as usize + 1;

/// Where and how one log is kept.
#[derive(Debug, Clone)]
pub struct LogSpec {
    /// Which lane's log this is.
    pub lane: usize,
    /// What the log is kept on.
    pub medium: MediumKind,
    /// The log's own file: on disk, on DAX, or in a memory file system.
    pub path: PathBuf,
    /// For a disk: the ring's memory, which outlives the process.
    pub ring: PathBuf,
    /// Bytes of the ring, a multiple of 4096.
    pub size: u64,
}

enum Medium {
    Dram,
    Pmem,
    Disk(Arc<dyn File>),
}

/// A record found in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScannedRecord {
    /// Its number.
    pub lsn: u64,
    /// Where it begins.
    pub at: u64,
    /// Where the next one begins.
    pub next: u64,
    /// Which part of its sync point it is.
    pub part: u32,
    /// Whether it closes its sync point.
    pub end: bool,
    /// The committed LSN when it was made.
    pub committed: u64,
}

/// A record that is part of a log, and where it lies.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    view: RecordView<'a>,
    /// Where it begins.
    pub at: u64,
    /// Where the next one begins, or the pad before it.
    pub next: u64,
}

impl<'a> Deref for Placed<'a> {
    type Target = RecordView<'a>;

    #[inline]
    fn deref(&self) -> &RecordView<'a> {
        &self.view
    }
}

/// A walk over a log's records, in their order. It ends at the log's head, and goes on
/// when records were appended meanwhile.
pub struct Records<'a> {
    log: &'a Log,
    at: u64,
}

impl<'a> Records<'a> {
    /// Where the walk is: behind the last record that it took.
    #[inline]
    pub fn position(&self) -> u64 {
        self.at
    }

    /// The next record, if `takes` says so of it; else the walk stays before it.
    #[inline]
    pub fn next_if(&mut self, takes: impl FnOnce(&Placed<'a>) -> bool) -> Option<Placed<'a>> {
        let r = self.log.record(self.at).filter(takes)?;
        self.at = r.next;
        Some(r)
    }

    /// Takes records for as long as `takes` says so. Returns where the walk is then.
    #[inline]
    pub fn pass(mut self, takes: impl Fn(&Placed<'a>) -> bool) -> u64 {
        while self.next_if(&takes).is_some() {}
        self.at
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Placed<'a>;

    #[inline]
    fn next(&mut self) -> Option<Placed<'a>> {
        self.next_if(|_| true)
    }
}

fn control_word(memory: &Memory, at: usize) -> &AtomicU64 {
    assert!(at + 8 <= CONTROL_LEN && CONTROL_LEN <= memory.len() && at.is_multiple_of(8));
    // SAFETY: inside the control page, aligned, only ever used as AtomicU64.
    unsafe { &*(memory.ptr().add(at) as *const AtomicU64) }
}

/// One lane's log.
pub struct Log {
    spec: LogSpec,
    env: Arc<dyn Env>,
    memory: Memory,
    medium: Medium,
    align: u64,
    // Whoever appends, persists and releases are different threads.
    head: Alone<AtomicU64>,
    persisted: Alone<AtomicU64>,
    start: Alone<AtomicU64>,
    /// The log held no records that count when it was opened.
    fresh: bool,
    /// The memory was this log's before it was opened.
    known: bool,
    /// The environment is told of the bytes that a link brings: those that no flush tells it of.
    counts_arrivals: bool,
}

/// Whether the bytes of a log were still there when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survival {
    /// Its memory outlived the last process: nothing is missing.
    Memory,
    /// Read from the medium: what was persistent is there.
    Medium,
    /// Nothing of it is left (a log in memory after a reboot).
    Lost,
}

impl Log {
    /// The alignment of records that a log at this place needs.
    pub fn align_for(env: &dyn Env, spec: &LogSpec) -> Result<u64> {
        match spec.medium {
            MediumKind::Disk => {
                let dir = spec.path.parent().expect("a log has a directory");
                let s = env
                    .sector(dir)
                    .context(|| format!("finding the sector size of {}", dir.display()))?;
                Ok(s as u64)
            }
            MediumKind::Dram | MediumKind::Pmem => Ok(64),
        }
    }

    /// Opens the log, making and preallocating it if it is not there. Positions
    /// are set to `start`; `recover` finds the records. `known` distinguishes
    /// this log's memory from memory that another log left. `closed`: the log's
    /// identity when it was closed clean, without a record that counts; then
    /// nothing is read. Memory that is not known is not stamped before [`Log::own`].
    pub fn open(
        env: &Arc<dyn Env>,
        spec: LogSpec,
        align: u64,
        known: LogIdentity,
        start: u64,
        closed: Option<LogIdentity>,
    ) -> Result<(Log, Survival)> {
        assert!(align.is_power_of_two());
        assert!(spec.size.is_multiple_of(align) && spec.size.is_multiple_of(4096));
        let len = CONTROL_LEN + spec.size as usize;
        let (memory, medium, mut survival) = match spec.medium {
            MediumKind::Dram => (
                env.memory(&spec.path, len)
                    .context(|| format!("log {}", spec.path.display()))?,
                Medium::Dram,
                Survival::Lost,
            ),
            MediumKind::Pmem => {
                let what = || format!("log {}", spec.path.display());
                let memory = env.persistent_memory(&spec.path, len).context(what)?;
                if let Some(dir) = spec.path.parent() {
                    env.sync_dir(dir).context(what)?;
                }
                (memory, Medium::Pmem, Survival::Lost)
            }
            MediumKind::Disk => {
                let file = Self::open_disk(&**env, &spec)?;
                let what = || format!("ring {}", spec.ring.display());
                let mut memory = env.memory(&spec.ring, len).context(what)?;
                if let Some(last) = closed
                    && !Self::is_of(&**env, &spec, &memory, last, false)
                {
                    // Another use left bytes here, and nothing will be read over them.
                    env.remove_memory(&spec.ring).context(what)?;
                    memory = env.memory(&spec.ring, len).context(what)?;
                }
                (memory, Medium::Disk(file), Survival::Medium)
            }
        };
        let mut log = Log {
            counts_arrivals: env.counts_arrivals() && matches!(medium, Medium::Dram),
            env: env.clone(),
            memory,
            medium,
            align,
            head: Alone(AtomicU64::new(start)),
            persisted: Alone(AtomicU64::new(start)),
            start: Alone(AtomicU64::new(start)),
            fresh: closed.is_some(),
            known: false,
            spec,
        };
        let is = |any_boot| Self::is_of(&*log.env, &log.spec, &log.memory, known, any_boot);
        let (this_boot, any_boot) = (is(false), is(true));
        match &log.medium {
            _ if this_boot => survival = Survival::Memory,
            // Persistent memory outlives a boot, but not what was in caches.
            Medium::Pmem if any_boot => survival = Survival::Medium,
            Medium::Disk(_) if log.fresh => {}
            Medium::Disk(file) => log.load_from(&**file)?,
            Medium::Pmem | Medium::Dram => {}
        }
        log.known = this_boot || matches!(log.medium, Medium::Pmem) && any_boot;
        // The process that was attached is gone; its other figures stay visible.
        for gone in OF_A_PROCESS {
            log.live(gone).store(0, Release);
        }
        if !matches!(log.medium, Medium::Pmem) {
            env.populate(&log.memory);
        }
        Ok((log, survival))
    }

    fn identity_of(env: &dyn Env, spec: &LogSpec, known: LogIdentity) -> [u64; IDENTITY_LEN] {
        let boot = u64_at(&env.boot_id(), 0);
        [
            CONTROL_MAGIC,
            known.incarnation,
            spec.size,
            spec.lane as u64,
            boot,
            known.nonce,
        ]
    }

    /// Whether `memory` is this log's, of this boot or (`any_boot`) of any boot.
    fn is_of(
        env: &dyn Env,
        spec: &LogSpec,
        memory: &Memory,
        known: LogIdentity,
        any_boot: bool,
    ) -> bool {
        let identity = Self::identity_of(env, spec, known);
        identity.iter().enumerate().all(|(i, want)| {
            let found = control_word(memory, i * 8).load(Acquire);
            let before = i == NONCE_AT && known.or != 0 && found == known.or;
            found == *want || before || i == BOOT_AT && any_boot
        })
    }

    /// Whether the memory was this log's before it was opened.
    pub fn was_known(&self) -> bool {
        self.known
    }

    /// Gives memory that is known the nonce that is durable in the superblock.
    pub fn renew(&self, nonce: u64) {
        if !self.known {
            return;
        }
        self.control(NONCE_AT * 8).store(nonce, Release);
        // Also if the nonce was there: the process that stored it may have been killed
        // before it flushed.
        if let Medium::Pmem = self.medium {
            self.env.flush(&self.memory, 0, CONTROL_LEN);
        }
    }

    /// Stamps the memory as this log's, in this boot, with the nonce. Called only when the
    /// superblock durably has this nonce, and what the loss of the old memory meant. For a
    /// copy that was closed clean it is called before the superblock counts on the memory.
    pub fn own(&self, known: LogIdentity) {
        let identity = Self::identity_of(&*self.env, &self.spec, known);
        if (0..identity.len()).all(|i| self.control(i * 8).load(Acquire) == identity[i]) {
            return;
        }
        self.stamp(&identity, known);
    }

    fn stamp(&self, identity: &[u64; IDENTITY_LEN], known: LogIdentity) {
        if !Self::is_of(&*self.env, &self.spec, &self.memory, known, false) {
            for i in 0..LIVE_COUNT {
                self.control(LIVE_AT + i * 8).store(0, Relaxed);
            }
        }
        // The magic goes last, so that a half-written page is not known.
        for i in (0..identity.len()).rev() {
            self.control(i * 8).store(identity[i], Release);
        }
        if let Medium::Pmem = self.medium {
            self.env.flush(&self.memory, 0, CONTROL_LEN);
        }
    }

    /// The log's file: preallocated and written over once, since a write into
    /// an unwritten extent changes the file system's metadata (29 µs
    /// instead of 19).
    fn open_disk(env: &dyn Env, spec: &LogSpec) -> Result<Arc<dyn File>> {
        let what = || format!("log {}", spec.path.display());
        let plain = env
            .open(
                &spec.path,
                OpenHow {
                    create: true,
                    write: true,
                    durable: false,
                    plain: false,
                },
            )
            .context(what)?;
        if plain.len().context(what)? != spec.size {
            plain.set_len(0).context(what)?;
            plain.allocate(spec.size).context(what)?;
            let zeros = vec![0u8; 1 << 20];
            let mut at = 0;
            while at < spec.size {
                let n = zeros.len().min((spec.size - at) as usize);
                plain.write_at(&zeros[..n], at).context(what)?;
                at += n as u64;
            }
        }
        // Also if the whole file is there: a process that died may have made it
        // and not synced it.
        plain.sync().context(what)?;
        if let Some(dir) = spec.path.parent() {
            env.sync_dir(dir).context(what)?;
        }
        drop(plain);
        env.open(
            &spec.path,
            OpenHow {
                create: false,
                write: true,
                durable: true,
                plain: false,
            },
        )
        .context(what)
    }

    fn load_from(&self, file: &dyn File) -> Result<()> {
        let mut at = 0usize;
        while at < self.spec.size as usize {
            let n = (1usize << 20).min(self.spec.size as usize - at);
            // SAFETY: the range lies in the ring, which no one else uses before
            // `open` returns.
            let buf = unsafe { std::slice::from_raw_parts_mut(self.ring().add(at), n) };
            let got = file
                .read_at(buf, at as u64)
                .context(|| format!("log {}", self.spec.path.display()))?;
            if got < n {
                return Err(Error::Damaged {
                    path: self.spec.path.clone(),
                    what: format!("{} bytes, {} expected", at + got, self.spec.size),
                });
            }
            at += n;
        }
        Ok(())
    }

    fn control(&self, at: usize) -> &AtomicU64 {
        control_word(&self.memory, at)
    }

    /// A live figure.
    pub fn live(&self, what: Live) -> &AtomicU64 {
        self.control(LIVE_AT + what as usize * 8)
    }

    /// The ring's memory, control page included. A peer with shared memory maps it.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn ring(&self) -> *mut u8 {
        // SAFETY: the memory is CONTROL_LEN + size bytes long.
        unsafe { self.memory.ptr().add(CONTROL_LEN) }
    }

    /// Ring size in bytes.
    pub fn size(&self) -> u64 {
        self.spec.size
    }

    /// Alignment of records.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// The level of safety that `persist` gives.
    pub fn level(&self) -> Level {
        match self.medium {
            Medium::Dram => Level::Received,
            Medium::Pmem => Level::Pmem,
            Medium::Disk(_) => Level::Disk,
        }
    }

    /// End of the last record.
    #[inline]
    pub fn head(&self) -> u64 {
        self.head.load(SeqCst)
    }

    /// Everything before this position is as persistent as the medium makes it.
    #[inline]
    pub fn persisted(&self) -> u64 {
        self.persisted.load(Acquire)
    }

    /// Everything before this position may be overwritten.
    #[inline]
    pub fn start(&self) -> u64 {
        self.start.load(Acquire)
    }

    /// Releases everything before `to`.
    pub fn release(&self, to: u64) {
        let old = self.start.swap(to, AcqRel);
        assert!(
            old <= to && to <= self.head(),
            "a log is released forwards, up to its head"
        );
    }

    /// Largest record that this log takes: an eighth of it, at most 1 MiB, so
    /// that a split sync point moves in pieces that other threads can share.
    pub fn max_record(size: u64) -> usize {
        ((size / 8).min(1 << 20) as usize) & !4095
    }

    /// Where a record of `len` bytes would begin, at or after position `from`, or
    /// `None` if there is no room for it now.
    #[inline]
    pub fn place(&self, from: u64, len: usize) -> Option<u64> {
        let at = self.fit(from, len);
        (self.end_of(at, len) - self.start() <= self.spec.size).then_some(at)
    }

    /// Where a record of `len` bytes begins that comes behind position `from`.
    #[inline]
    pub fn fit(&self, from: u64, len: usize) -> u64 {
        self.fit_at(from, from % self.spec.size, len)
    }

    /// As `fit`, where position `from` is known to lie at `off` of the ring.
    #[inline]
    pub(crate) fn fit_at(&self, from: u64, off: u64, len: usize) -> u64 {
        let need = self.rounded(len);
        assert!(
            need <= self.spec.size / 2,
            "a record larger than its log takes"
        );
        match off + need > self.spec.size {
            true => from + (self.spec.size - off),
            false => from,
        }
    }

    /// The room of a record of `len` bytes. Each record on its way asks for it some times, and a
    /// division takes as long as a locked instruction.
    #[inline]
    fn rounded(&self, len: usize) -> u64 {
        (len as u64 + self.align - 1) & !(self.align - 1)
    }

    /// Where the room of a record ends that begins at `at` and has `len` bytes.
    #[inline]
    pub fn end_of(&self, at: u64, len: usize) -> u64 {
        at + self.rounded(len)
    }

    /// The memory for a record at `at`, found by `place` or `fit`. Writes the pad if
    /// there is one between `from`, where the record before ends, and `at`.
    ///
    /// # Safety
    /// The room from `from` to the record's end is free, and the caller's alone: it is
    /// the one thread that appends to this log, and `place` returned `at` for the
    /// present head; or it has taken the room (`reservations.rs`). The slice is dropped
    /// before the record becomes part of the log.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slot(&self, from: u64, at: u64, len: usize, volume: u64, lsn: u64) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { self.slot_at(from, at, at % self.spec.size, len, volume, lsn) }
    }

    /// As `slot`, where position `at` is known to lie at `off` of the ring: a division takes as long
    /// as the rest.
    ///
    /// # Safety
    /// As `slot`.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slot_at(
        &self,
        from: u64,
        at: u64,
        off: u64,
        len: usize,
        volume: u64,
        lsn: u64,
    ) -> &mut [u8] {
        if at != from {
            let off = (from % self.spec.size) as usize;
            // SAFETY: `[from, at)` is the caller's and ends at the ring's end;
            // at least `align` >= 64 bytes lie there.
            let pad = unsafe { std::slice::from_raw_parts_mut(self.ring().add(off), PAD_LEN) };
            Pad { volume, lsn }.encode(pad);
        }
        let off = off as usize;
        assert!(off + len <= self.spec.size as usize);
        // SAFETY: `[at, at + len)` lies in the ring and outside `[start, head)`;
        // only the caller touches that part.
        unsafe { std::slice::from_raw_parts_mut(self.ring().add(off), len) }
    }

    /// Prefetches the cache lines of the next record, of about `len` bytes. A
    /// thread calls this while it waits anyway.
    #[inline]
    pub fn prefetch(&self, len: usize) {
        let off = (self.head() % self.spec.size) as usize;
        let end = (off + len.min(8 << 10)).min(self.spec.size as usize);
        #[cfg(target_arch = "x86_64")]
        for line in (off..end).step_by(64) {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            // SAFETY: a prefetch changes nothing; the address lies in the ring.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(self.ring().add(line).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = end;
    }

    /// Makes the record `[at, at + len)` part of the log, for the one thread that appends.
    #[inline]
    pub fn publish(&self, at: u64, len: usize) -> u64 {
        let head = self.end_of(at, len);
        self.head.store(head, Release);
        head
    }

    /// Makes the records from `from` to `to` part of the log, if they follow the last one there.
    #[inline]
    pub fn move_head(&self, from: u64, to: u64) -> bool {
        let moved = self.head.compare_exchange(from, to, SeqCst, SeqCst);
        moved.is_ok()
    }

    /// A walk over the records from position `from` on, where a record or a pad begins,
    /// which is not before `start`.
    #[inline]
    pub fn records(&self, from: u64) -> Records<'_> {
        Records {
            log: self,
            at: from,
        }
    }

    /// The record at `at`, if `at` is before `head`. Skips a pad.
    #[inline]
    pub fn record(&self, at: u64) -> Option<Placed<'_>> {
        let head = self.head();
        let mut at = at;
        loop {
            if at >= head {
                return None;
            }
            let off = (at % self.spec.size) as usize;
            // SAFETY: `[at, head)` is published and, since the caller holds a
            // position at or after `start`, not overwritten.
            let rest = unsafe {
                std::slice::from_raw_parts(self.ring().add(off), self.spec.size as usize - off)
            };
            if rest[..4] == PAD_MAGIC.to_le_bytes() {
                at += self.spec.size - off as u64;
                continue;
            }
            let view = RecordView::trusted(rest).expect("a published record is valid");
            let next = self.end_of(at, view.header.len as usize);
            return Some(Placed { view, at, next });
        }
    }

    /// Reads the log from `start` and returns the valid records above
    /// `checkpoint`. Puts the head behind the last valid record, and the start
    /// before the first one returned (at the head if there is none). Records
    /// before that were kept for a reader or, if the log was empty, are of an
    /// earlier lap; they are no longer needed. The caller makes the new start
    /// durable before anything is appended.
    pub fn recover(&self, volume: u64, history: &History, checkpoint: u64) -> Vec<ScannedRecord> {
        let mut out = Vec::new();
        if self.fresh {
            return out;
        }
        let start = self.start();
        let mut at = start;
        let mut last = 0u64;
        let mut pad_lsn = None;
        let mut head = at;
        loop {
            let off = (at % self.spec.size) as usize;
            let left = (start + self.spec.size).saturating_sub(at);
            let n = (self.spec.size as usize - off).min(left as usize);
            // SAFETY: inside the ring; nobody appends during recovery.
            let rest = unsafe { std::slice::from_raw_parts(self.ring().add(off), n) };
            if let Ok(p) = Pad::decode(rest)
                && p.volume == volume
                && p.lsn > last
                && pad_lsn.is_none()
            {
                pad_lsn = Some(p.lsn);
                at += self.spec.size - off as u64;
                continue;
            }
            let Ok(r) = RecordView::decode(rest) else {
                break;
            };
            let h = r.header;
            // A leftover of an earlier lap has a lower LSN, an LSN up to the
            // checkpoint, or an epoch that the history has replaced. The history
            // may have forgotten the epoch of a record up to the checkpoint.
            if h.volume != volume
                || h.lsn <= last
                || pad_lsn.is_some_and(|l| l != h.lsn)
                || h.lsn > checkpoint && history.epoch_at(h.lsn) != Some(h.epoch)
            {
                break;
            }
            let next = self.end_of(at, h.len as usize);
            last = h.lsn;
            pad_lsn = None;
            if h.lsn > checkpoint {
                out.push(ScannedRecord {
                    lsn: h.lsn,
                    at,
                    next,
                    part: h.part,
                    end: h.end,
                    committed: h.committed,
                });
            }
            at = next;
            head = next;
        }
        self.head.store(head, Release);
        self.start
            .store(out.first().map_or(head, |f| f.at), Release);
        out
    }

    /// After recovery: the largest committed LSN that a valid record behind the
    /// head states. If it is above the LSNs that were found, the record at the
    /// head is damaged, not torn.
    pub fn beyond(&self, volume: u64, history: &History, checkpoint: u64) -> u64 {
        let end = self.start() + self.spec.size;
        let mut at = self.head();
        let mut known = 0;
        while at < end && !self.fresh {
            let off = (at % self.spec.size) as usize;
            let n = (self.spec.size as usize - off).min((end - at) as usize);
            // SAFETY: inside the ring; nobody appends during recovery.
            let rest = unsafe { std::slice::from_raw_parts(self.ring().add(off), n) };
            if rest[..4] == RECORD_MAGIC.to_le_bytes()
                && let Ok(r) = RecordView::decode(rest)
                && r.header.volume == volume
                && r.header.lsn > checkpoint
                && history.epoch_at(r.header.lsn) == Some(r.header.epoch)
            {
                known = known.max(r.header.committed);
            }
            at += self.align;
        }
        known
    }

    /// Overwrites everything with zeros, on the medium too.
    pub fn wipe(&self) -> Result<()> {
        let size = self.spec.size as usize;
        // SAFETY: the whole ring; the caller has stopped every thread that appends.
        unsafe { std::ptr::write_bytes(self.ring(), 0, size) };
        match &self.medium {
            Medium::Dram => {}
            Medium::Pmem => self.env.flush(&self.memory, CONTROL_LEN, size),
            Medium::Disk(file) => {
                for at in (0..size).step_by(1 << 20) {
                    let n = (1 << 20).min(size - at);
                    // SAFETY: inside the ring.
                    let bytes = unsafe { std::slice::from_raw_parts(self.ring().add(at), n) };
                    file.write_at(bytes, at as u64).map_err(|e| {
                        Error::poisoned(format!("log {}", self.spec.path.display()), &e)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Where the log is kept, for messages.
    pub fn path(&self) -> &std::path::Path {
        &self.spec.path
    }

    /// Forgets the records from `head` on: the next record will be written there.
    pub fn rewind(&self, head: u64) {
        assert!(self.start() <= head && head <= self.head());
        self.head.store(head, Release);
        self.persisted.fetch_min(head, AcqRel);
    }

    /// A link has brought what is appended up to `to`. Makes it persistent.
    #[inline]
    pub fn persist_arrived(&self, to: u64) -> Result<()> {
        if self.counts_arrivals {
            let bytes = to.saturating_sub(self.persisted());
            self.env.arrived(bytes as usize);
        }
        self.persist(to)
    }

    /// Makes everything up to `to` persistent. One thread at a time.
    pub fn persist(&self, to: u64) -> Result<()> {
        let mut at = self.persisted();
        match &self.medium {
            Medium::Dram => {}
            Medium::Pmem => {
                while at < to {
                    let off = at % self.spec.size;
                    let n = (to - at).min(self.spec.size - off);
                    self.env
                        .flush(&self.memory, CONTROL_LEN + off as usize, n as usize);
                    at += n;
                }
            }
            Medium::Disk(file) => {
                while at < to {
                    let off = at % self.spec.size;
                    let n = (to - at).min(self.spec.size - off);
                    // SAFETY: `[persisted, head)` is published and, being
                    // after `start`, not overwritten.
                    let bytes = unsafe {
                        std::slice::from_raw_parts(self.ring().add(off as usize), n as usize)
                    };
                    file.write_at(bytes, off).map_err(|e| {
                        Error::poisoned(format!("log {}", self.spec.path.display()), &e)
                    })?;
                    at += n;
                }
            }
        }
        self.count_persisted(to);
        Ok(())
    }

    /// Everything up to `to` is as persistent as the medium makes it.
    pub fn count_persisted(&self, to: u64) {
        self.persisted.fetch_max(to, AcqRel);
    }

    /// Removes the ring's memory of a log on a disk; for a log that is empty and
    /// closed. Does nothing on media where the memory is the log.
    pub fn remove_ring(&self) {
        if let Medium::Disk(_) = self.medium {
            // The memory is only a cache by now; a leftover is recognised as stale.
            let _ = self.env.remove_memory(&self.spec.ring);
        }
    }
}
