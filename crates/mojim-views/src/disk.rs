//! A voter's files: its vote, its log, its snapshot.
//!
//! Owns one directory, and every byte in it:
//!
//! ```text
//! lock          held while a voter runs on this directory; empty
//! log           a head frame, then frames of entries
//! vote          one frame: the last vote, as JSON
//! snapshot      one frame: {"meta": …, "agreed": {"registers": {volume: register},
//!                "lives": {voter: {"present": incarnation or null, "retired": […]}}}}
//! *.new         what is about to take another file's place, or was in a crash
//!
//! frame         offset  bytes
//!                    0      4  F7 'M' 'J' 'V': F7 is in no UTF-8 text, so no
//!                              frame begins inside of a body
//!                    4      4  length of the body, little-endian
//!                    8      4  CRC-32C of the 8 bytes before and of the body
//!                   12         the body, JSON
//! head          {"format": 2, "cluster": "…", "node": "…", "incarnation": number,
//!                "purged": id or null, "outdated": why, or absent}
//! entries       a list of openraft's entries, one frame for each append
//! ```
//!
//! An entry's id is `{"leader_id": {"term", "node_id"}, "index"}`. The log's first entry follows
//! `purged` (or is entry 0). Each other entry follows the one before. An entry's payload is blank,
//! a set of voters, or a change: `{"swap": …}`, `{"admit": {voter: incarnation}}`,
//! `{"retire": {"voter", "incarnation"}}`.
//!
//! The incarnation in the head is a random number that is made with the directory. `outdated`
//! is there once another voter knew of a later state of the directory ([`Disk::give_up`]).
//!
//! Format 1 is read, and replaced by the first opening. It differs in three points:
//!
//! - Its head has no incarnation.
//! - The payload is a swap itself.
//! - Its snapshot has the registers in the place of `agreed`.
//!
//! A voter that comes from format 1 has the incarnation that it is given then. Its log names no
//! directory, as at a first start. Readers refuse any other `format`.
//!
//! Invariants:
//!
//! - Anything that a call here reports as done is durable. So is what [`Disk::open`] has read when
//!   it returns. It has written all of it anew, since what can be read may lie in the page cache
//!   alone.
//! - `vote` and `snapshot` are only ever replaced: a new file is written and synced, renamed, and
//!   the directory synced.
//! - The log is appended to and synced. When it loses entries at either end it is replaced too.
//! - An append is one frame and is synced before the next. So power that fails
//!   during it leaves at most one broken frame, the last. Such an end was
//!   acknowledged to nobody: it is cut off. A broken frame before a whole one
//!   is damage, and the directory is refused.
//! - After a write or a sync has failed nothing more is read or written here
//!   ([`Disk::poison`]). The next open looks at what is on the medium.
//!
//! Limit: damage to the last frame of the log is not noticed. It looks as if that
//! frame had never been written whole.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use mojim_env::locks::lock;
use mojim_env::{Env, Error, File, Locker, OpenHow, Result};
use openraft::{EntryPayload, RaftLogId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::types::{Agreed, Entry, Lives, LogId, Membership, Promised, SnapshotMeta, Vote, number};

const MAGIC: [u8; 4] = [0xF7, b'M', b'J', b'V'];
const HEAD_LEN: usize = 12;
const FORMAT: u32 = 2;
/// The one before, without incarnations.
const FORMAT_1: u32 = 1;
/// Most bytes of a file that is read.
const MOST: u64 = 1 << 30;

/// What to do about a directory that cannot be used.
const ADVICE: &str = "Keep this voter stopped and its directory as it is; while a majority of the \
    other voters runs, nothing is lost. If it cannot be mended, move the directory elsewhere and \
    keep it, start this voter, and run `mojim replace --same-name` with this node's name";

/// The first frame of a log.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    format: u32,
    cluster: String,
    node: String,
    /// None in format 1.
    incarnation: Option<u64>,
    purged: Option<LogId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outdated: Option<String>,
}

/// The first frame of a log, of whichever format.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// A snapshot: all that was agreed on, and the last entry that is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub meta: SnapshotMeta,
    pub agreed: Agreed,
}

/// The durable state, as openraft may see it.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub vote: Option<Vote>,
    /// The last entry that was dropped at the log's beginning.
    pub purged: Option<LogId>,
    pub entries: BTreeMap<u64, Entry>,
    pub snapshot: Option<Saved>,
    /// The number that was made with the directory.
    pub incarnation: u64,
    /// Why the directory counts for nothing any more.
    pub outdated: Option<String>,
}

impl Kept {
    /// The voters' incarnations, after the last entry.
    fn lives(&self) -> Lives {
        let saved = self.snapshot.as_ref();
        let mut lives = saved.map_or_else(Lives::default, |s| s.agreed.lives.clone());
        let last = saved.and_then(|s| s.meta.last_log_id);
        let from = last.map_or(0, |l| l.index + 1);
        for e in self.entries.range(from..).map(|(_, e)| e) {
            if let EntryPayload::Normal(c) = &e.payload {
                lives.change(c);
            }
        }
        lives
    }

    /// The last entry's id, dropped ones included.
    pub fn last(&self) -> Option<LogId> {
        match self.entries.values().next_back() {
            Some(e) => Some(*e.get_log_id()),
            None => self.purged,
        }
    }

    /// What others may count on. A snapshot may be ahead of the log, until the log is cut.
    pub fn promised(&self) -> Promised {
        let vote = self.vote.unwrap_or_default();
        let in_snapshot = self.snapshot.as_ref().and_then(|s| s.meta.last_log_id);
        let last = [self.last(), in_snapshot].map(|l| Promised::new(&vote, l));
        last[0].max(last[1])
    }

    /// The voters, as the last entry or the snapshot that names them says.
    pub fn membership(&self) -> Option<Membership> {
        let in_log = self.entries.values().rev().find_map(|e| match &e.payload {
            EntryPayload::Membership(m) => Some(Membership::new(Some(e.log_id), m.clone())),
            _ => None,
        });
        in_log.or_else(|| {
            let m = self.snapshot.as_ref()?.meta.last_membership.clone();
            (m.voter_ids().count() > 0).then_some(m)
        })
    }
}

/// The log's file, and where its next frame goes.
struct LogFile {
    file: Arc<dyn File>,
    end: u64,
}

/// An open directory. All calls block for the disk.
pub(crate) struct Disk {
    env: Arc<dyn Env>,
    dir: PathBuf,
    cluster: String,
    node: String,
    /// Held during every write of the directory. `kept` is locked after it, and
    /// only for a moment, unless the log is replaced.
    log: Mutex<LogFile>,
    kept: Mutex<Kept>,
    /// [`Kept::lives`], locked last of all.
    lives: Arc<Mutex<Lives>>,
    poison: Arc<OnceLock<String>>,
    _lock: Box<dyn Any + Send + Sync>,
}

fn frame<T: Serialize>(body: &T) -> io::Result<Vec<u8>> {
    let mut out = MAGIC.to_vec();
    out.resize(HEAD_LEN, 0);
    serde_json::to_writer(&mut out, body)?;
    let len = u32::try_from(out.len() - HEAD_LEN)
        .map_err(|_| io::Error::other("a frame of more than 4 GiB"))?;
    out[4..8].copy_from_slice(&len.to_le_bytes());
    let crc = checksum(&out);
    out[8..12].copy_from_slice(&crc.to_le_bytes());
    Ok(out)
}

/// The checksum of a whole frame.
fn checksum(f: &[u8]) -> u32 {
    mojim_format::crc32c(&[&f[..8], &f[HEAD_LEN..]].concat())
}

/// The body of the whole frame that `b` begins with, if it does.
fn unframe(b: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?))
    };
    let end = HEAD_LEN.checked_add(word(4)? as usize)?;
    let whole = b.get(..end)?;
    (whole.starts_with(&MAGIC) && word(8)? == checksum(whole)).then(|| &whole[HEAD_LEN..])
}

fn damaged(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::Damaged {
        path: path.to_owned(),
        what: format!("{what}. {ADVICE}"),
    }
}

fn decode<T: DeserializeOwned>(path: &Path, what: &str, body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|e| damaged(path, format_args!("{what}: {e}")))
}

/// All bytes of a file; none if it is not there.
fn contents(env: &dyn Env, path: &Path) -> Result<Option<Vec<u8>>> {
    let read = || -> io::Result<Vec<u8>> {
        let file = env.open(path, OpenHow::default())?;
        let len = file.len()?;
        if len > MOST {
            let text = format!("{len} bytes; a register's file has {MOST} at most");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut bytes = vec![0; len as usize];
        let got = file.read_at(&mut bytes, 0)?;
        bytes.truncate(got);
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("reading {}", path.display()), &e)),
    }
}

/// The only frame of a file; none if there is no file.
fn single<T: DeserializeOwned>(env: &dyn Env, path: &Path, what: &str) -> Result<Option<T>> {
    let Some(bytes) = contents(env, path)? else {
        return Ok(None);
    };
    match unframe(&bytes) {
        Some(body) if HEAD_LEN + body.len() == bytes.len() => decode(path, what, body).map(Some),
        _ => Err(damaged(path, format_args!("{what} is not whole"))),
    }
}

/// As the body of a frame of entries was written in format 1 it is returned as in this one.
fn entries_of_1(mut entries: Value) -> Value {
    for e in entries.as_array_mut().into_iter().flatten() {
        if let Some(swap) = e["payload"].get_mut("Normal") {
            *swap = json!({ "swap": swap.take() });
        }
    }
    entries
}

/// The snapshot of a directory, of either format.
fn take_snapshot(env: &dyn Env, path: &Path) -> Result<Option<Saved>> {
    let Some(mut saved) = single::<Value>(env, path, "the snapshot")? else {
        return Ok(None);
    };
    if let Some(registers) = saved.get_mut("registers").map(Value::take) {
        let lives = Lives::default();
        saved["agreed"] = json!({ "registers": registers, "lives": lives });
    }
    let saved = Saved::deserialize(&saved);
    let saved = saved.map_err(|e| damaged(path, format_args!("the snapshot: {e}")))?;
    Ok(Some(saved))
}

/// The contents of a log.
struct Read {
    head: Head,
    entries: BTreeMap<u64, Entry>,
}

fn read_log(path: &Path, bytes: &[u8]) -> Result<Read> {
    let head = unframe(bytes).ok_or_else(|| damaged(path, "the log's first frame is not whole"))?;
    let mut at = HEAD_LEN + head.len();
    let Format { format } = decode(path, "the log's first frame", head)?;
    if ![FORMAT_1, FORMAT].contains(&format) {
        return Err(Error::Unsupported(format!(
            "{}: format {format}, this program knows {FORMAT_1} and {FORMAT}",
            path.display(),
        )));
    }
    let head: Head = decode(path, "the log's first frame", head)?;
    if head.incarnation.is_none() && format != FORMAT_1 {
        return Err(damaged(path, "the log's first frame has no incarnation"));
    }
    let mut entries: BTreeMap<u64, Entry> = BTreeMap::new();
    let mut next = head.purged.map_or(0, |p| p.index + 1);
    while at < bytes.len() {
        let Some(body) = unframe(&bytes[at..]) else {
            let whole = |i: &usize| bytes[*i] == MAGIC[0] && unframe(&bytes[*i..]).is_some();
            if let Some(later) = (at + 1..bytes.len()).find(whole) {
                return Err(damaged(
                    path,
                    format_args!(
                        "the frame at byte {at}, with entry {next}, is damaged: at byte {later} \
                         follows a whole one"
                    ),
                ));
            }
            break;
        };
        let what = format!("the frame at byte {at}, with entry {next}");
        let all: Vec<Entry> = match format {
            FORMAT_1 => serde_json::from_value(entries_of_1(decode(path, &what, body)?))
                .map_err(|e| damaged(path, format_args!("{what}: {e}")))?,
            _ => decode(path, &what, body)?,
        };
        for e in all {
            if e.log_id.index != next {
                return Err(damaged(
                    path,
                    format_args!("{what}, holds entry {}", e.log_id.index),
                ));
            }
            next += 1;
            entries.insert(e.log_id.index, e);
        }
        at += HEAD_LEN + body.len();
    }
    Ok(Read { head, entries })
}

/// Puts `bytes` in the place of a file, durably.
fn replace(env: &dyn Env, dir: &Path, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>> {
    let (path, new) = (dir.join(name), dir.join(format!("{name}.new")));
    let how = OpenHow {
        create: true,
        write: true,
        durable: false,
        plain: false,
    };
    let file = env.open(&new, how)?;
    file.set_len(0)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    env.rename(&new, &path)?;
    env.sync_dir(dir)?;
    Ok(file)
}

/// Replaces the log by a new one with what is kept.
fn write_log(
    env: &dyn Env,
    dir: &Path,
    cluster: &str,
    node: &str,
    kept: &Kept,
) -> io::Result<LogFile> {
    let mut bytes = frame(&Head {
        format: FORMAT,
        cluster: cluster.to_owned(),
        node: node.to_owned(),
        incarnation: Some(kept.incarnation),
        purged: kept.purged,
        outdated: kept.outdated.clone(),
    })?;
    for e in kept.entries.values() {
        bytes.extend(frame(&[e])?);
    }
    Ok(LogFile {
        file: replace(env, dir, "log", &bytes)?,
        end: bytes.len() as u64,
    })
}

fn io(what: String) -> impl FnOnce(io::Error) -> Error {
    move |e| Error::io(what, &e)
}

/// Reads the log of a directory, if it has one, into `kept`; the log must be this
/// voter's, `(cluster, node)`.
fn take_log(
    env: &dyn Env,
    dir: &Path,
    (cluster, node): (&str, &str),
    again: bool,
    kept: &mut Kept,
) -> Result<()> {
    let log = dir.join("log");
    match contents(env, &log)? {
        Some(bytes) => {
            let read = read_log(&log, &bytes)?;
            let h = &read.head;
            if (&*h.cluster, &*h.node) != (cluster, node) {
                return Err(Error::Config(format!(
                    "{} belongs to node {} of cluster {:?}, not to node {node} of {cluster:?}",
                    dir.display(),
                    h.node,
                    h.cluster
                )));
            }
            kept.purged = h.purged;
            kept.incarnation = h.incarnation.unwrap_or(kept.incarnation);
            kept.outdated = read.head.outdated;
            kept.entries = read.entries;
            Ok(())
        }
        None if kept.vote.is_some() || kept.snapshot.is_some() => Err(damaged(
            &log,
            "there is no log, but what was written after it",
        )),
        None if again => Err(damaged(
            &log,
            "this voter's log was here, and is gone; is its file system mounted?",
        )),
        None => Ok(()),
    }
}

/// A vote is durable before an entry of its leader is, and a snapshot before the entries in
/// it are dropped: what contradicts that is damage.
fn check_order(dir: &Path, kept: &Kept) -> Result<()> {
    let leader = kept.vote.unwrap_or_default().leader_id;
    if let Some(last) = kept.last()
        && last.leader_id > leader
    {
        return Err(damaged(
            &dir.join("vote"),
            format_args!(
                "the log's last entry is of {}, the vote of {leader}",
                last.leader_id
            ),
        ));
    }
    let in_snapshot = kept.snapshot.as_ref().and_then(|s| s.meta.last_log_id);
    if kept.purged > in_snapshot {
        return Err(damaged(
            &dir.join("snapshot"),
            "the log begins after entries that are not in the snapshot",
        ));
    }
    Ok(())
}

/// Writes what was read once more, and opens the log for what comes.
///
/// What was read need not be on the medium. A process that died before its
/// sync, or whose sync failed, leaves bytes in the page cache that the next
/// loss of power takes, and another sync of that file may find nothing to
/// write. openraft acknowledges entries that it finds here without writing
/// them again, and repeats a vote that it finds. So everything is written
/// anew, in the order in which it first was, and an error ends the start.
fn write_anew(
    env: &dyn Env,
    dir: &Path,
    (cluster, node): (&str, &str),
    kept: &Kept,
) -> Result<LogFile> {
    let writing = |name: &str| io(format!("writing {}", dir.join(name).display()));
    if let Some(v) = &kept.vote {
        frame(v)
            .and_then(|f| replace(env, dir, "vote", &f))
            .map_err(writing("vote"))?;
    }
    if let Some(s) = &kept.snapshot {
        frame(s)
            .and_then(|f| replace(env, dir, "snapshot", &f))
            .map_err(writing("snapshot"))?;
    }
    write_log(env, dir, cluster, node, kept).map_err(writing("log"))
}

impl Disk {
    /// Opens node `node`'s directory in cluster `cluster`; makes it if there is
    /// none. Blocks for the disk only.
    pub fn open(env: Arc<dyn Env>, dir: &Path, cluster: &str, node: &str) -> Result<Disk> {
        Disk::open_as(env, dir, cluster, node, false)
    }

    /// As [`Disk::open`]. `again`: this process voted from the directory before, so that
    /// a directory without a log is not a new voter's, but another file system's, say.
    pub fn open_as(
        env: Arc<dyn Env>,
        dir: &Path,
        cluster: &str,
        node: &str,
        again: bool,
    ) -> Result<Disk> {
        env.create_dir_all(dir)
            .map_err(io(format!("making {}", dir.display())))?;
        let path = dir.join("lock");
        let lock = env.lock(&path, Locker::Node).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => Error::Busy(format!(
                "node {node} already runs here: {} is {e}",
                path.display()
            )),
            _ => Error::io(format!("locking {}", path.display()), &e),
        })?;
        let mut kept = Kept {
            vote: single(&*env, &dir.join("vote"), "the vote")?,
            snapshot: take_snapshot(&*env, &dir.join("snapshot"))?,
            incarnation: env.random(),
            ..Kept::default()
        };
        take_log(&*env, dir, (cluster, node), again, &mut kept)?;
        check_order(dir, &kept)?;
        // A leader that comes back asks for votes again. Taking up an old term,
        // openraft 0.9 answers reads once the first entry of that term is
        // applied again, though later ones were acknowledged; a new term begins
        // behind all of them. Such a vote promises neither less nor more.
        if let Some(v) = &mut kept.vote
            && v.leader_id.node_id == number(node)
        {
            v.committed = false;
        }
        let log = write_anew(&*env, dir, (cluster, node), &kept)?;
        Ok(Disk {
            env,
            dir: dir.to_owned(),
            cluster: cluster.to_owned(),
            node: node.to_owned(),
            log: Mutex::new(log),
            lives: Arc::new(Mutex::new(kept.lives())),
            kept: Mutex::new(kept),
            poison: Arc::new(OnceLock::new()),
            _lock: lock,
        })
    }

    /// Why the directory failed, once it has.
    pub fn poison(&self) -> Arc<OnceLock<String>> {
        self.poison.clone()
    }

    /// The number that was made with this directory.
    pub fn incarnation(&self) -> u64 {
        lock(&self.kept).incarnation
    }

    /// The voters' incarnations, after the last entry of the log, as they change.
    pub fn lives(&self) -> Arc<Mutex<Lives>> {
        self.lives.clone()
    }

    fn check(&self) -> Result<()> {
        match self.poison.get() {
            Some(why) => Err(Error::Poisoned(why.clone())),
            None => Ok(()),
        }
    }

    /// Runs `f`, and poisons the directory if it fails. Nothing is tried again: what a
    /// failed write or sync left is not known.
    fn guard<T>(&self, what: &str, f: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.check()?;
        f().map_err(|e| {
            let why = format!("{}: {what}: {e}", self.dir.display());
            Error::Poisoned(self.poison.get_or_init(|| why).clone())
        })
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>> {
        replace(&*self.env, &self.dir, name, bytes)
    }

    /// Looks at what is kept.
    pub fn kept<T>(&self, f: impl FnOnce(&Kept) -> T) -> Result<T> {
        self.check()?;
        Ok(f(&lock(&self.kept)))
    }

    /// Notes that the directory is one of earlier, so that no later opening uses it either.
    pub fn give_up(&self, why: &str) -> Result<()> {
        self.shorten(|k| k.outdated = Some(why.to_owned()))
    }

    /// Saves the vote.
    pub fn vote(&self, v: Vote) -> Result<()> {
        let _log = lock(&self.log);
        self.guard("writing the vote", || self.replace("vote", &frame(&v)?))?;
        lock(&self.kept).vote = Some(v);
        Ok(())
    }

    /// Appends entries, which follow the last one.
    pub fn append(&self, entries: Vec<Entry>) -> Result<()> {
        if entries.is_empty() {
            return self.check();
        }
        let mut log = lock(&self.log);
        let mut last = lock(&self.kept).last().map(|l| l.index);
        for e in &entries {
            assert!(
                last.is_none_or(|l| l + 1 == e.log_id.index),
                "entry {} after {last:?}",
                e.log_id.index
            );
            last = Some(e.log_id.index);
        }
        let len = self.guard("appending to the log", || {
            let bytes = frame(&entries)?;
            log.file.write_at(&bytes, log.end)?;
            log.file.sync()?;
            Ok(bytes.len())
        })?;
        log.end += len as u64;
        let mut kept = lock(&self.kept);
        let mut lives = lock(&self.lives);
        for e in entries {
            if let EntryPayload::Normal(c) = &e.payload {
                lives.change(c);
            }
            kept.entries.insert(e.log_id.index, e);
        }
        Ok(())
    }

    /// Drops the entries from `from` on.
    pub fn truncate(&self, from: u64) -> Result<()> {
        self.shorten(|k| {
            k.entries.split_off(&from);
        })
    }

    /// Drops the entries up to `upto`, which are in the snapshot.
    pub fn purge(&self, upto: LogId) -> Result<()> {
        self.shorten(|k| {
            if k.purged < Some(upto) {
                k.purged = Some(upto);
                k.entries = k.entries.split_off(&(upto.index + 1));
            }
        })
    }

    /// Replaces the log by what `f` leaves of it.
    fn shorten(&self, f: impl FnOnce(&mut Kept)) -> Result<()> {
        let mut log = lock(&self.log);
        self.check()?;
        let mut kept = lock(&self.kept);
        f(&mut kept);
        *log = self.guard("replacing the log", || {
            write_log(&*self.env, &self.dir, &self.cluster, &self.node, &kept)
        })?;
        *lock(&self.lives) = kept.lives();
        Ok(())
    }

    /// Saves a snapshot, unless there is a later one.
    pub fn snapshot(&self, s: Saved) -> Result<()> {
        let _log = lock(&self.log);
        self.check()?;
        let present = lock(&self.kept)
            .snapshot
            .as_ref()
            .map(|s| s.meta.last_log_id);
        if present > Some(s.meta.last_log_id) {
            return Ok(());
        }
        self.guard("writing the snapshot", || {
            self.replace("snapshot", &frame(&s)?)
        })?;
        let mut kept = lock(&self.kept);
        kept.snapshot = Some(s);
        *lock(&self.lives) = kept.lives();
        Ok(())
    }
}
