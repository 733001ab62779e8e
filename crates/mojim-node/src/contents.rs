//! A node's answers about the bytes of its data files: sums and pages for `mojim verify`, and
//! the rewriting of pages for `mojim repair`.
//!
//! A copy that is open here is read while nothing is applied to it, so that an answer is as
//! of one LSN. A copy that a program has open is read from outside, while the program applies
//! records to it: then the answer names two LSNs, one up to which everything was in the bytes
//! and one above which nothing was. Both come from the program's ring. An answer from a copy
//! that was opened after a crash names two LSNs as well. It does so until all records that
//! its files may show are applied again.
//!
//! A copy that is as of one LSN also says what the records since another LSN have changed. It
//! says so as far as its logs still hold them. A caller that compares it with an earlier
//! answer of another node thus knows which bytes must be equal.
//!
//! Invariants:
//! - Reading changes nothing, and holds up no sync point.
//! - A page is rewritten only on a node that follows, and only with bytes that
//!   `Store::rewrite` can show to be right.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use mojim_format::message::{COPY_PAGE, SUM_LEN};
use mojim_format::{Catalog, CatalogEntry, Op, OpKind, RecordView, State};
use mojim_protocol::History;
use serde_json::{Value, json};
use tracing::{info, warn};

use super::volume_state::{Listed, Opened};
use super::{Node, wait_for_last};
use mojim_config::Volume;
use mojim_env::{Address, Context, Env, Error, File, OpenHow, Result};
use mojim_format::catalog::MAX_CATALOG;
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::mirror::Mirror;
use mojim_replica::request::{Part, Request, Since};
use mojim_store::log::Live;
use mojim_store::stage::sum;
use mojim_store::store::{Page, Store, read_superblock};

/// Most pages whose sums are in one answer.
const MOST_PAGES: u64 = 2048;
/// How long a rewrite waits until the primary's files have what it needs.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most bytes of records that are searched for what changed since an LSN.
const MOST_RECORDS: usize = 4 << 20;
/// Most numbers and names of files that an answer says to have changed.
const MOST_CHANGED: usize = 4096;

/// About how many bytes of an answer are the list of files. What is asked for again, as far as a
/// number, is more if files came meanwhile.
const MOST_LISTED: usize = 192 << 10;
/// Most files of a list with sums.
const MOST_SUMMED: usize = 1024;
/// Most bytes of a file whose sums come with the list, and of all of them in one answer.
const SMALL: u64 = 64 << 10;
const MOST_SMALL: u64 = 4 << 20;
/// Most bytes of the names that an answer says to have changed.
const MOST_CHANGED_BYTES: usize = 128 << 10;
/// How long a copy stays open for the next look.
const LOOKS_AGAIN: Duration = Duration::from_millis(300);
/// How long a catalogue is kept for the next look.
const LISTS_AGAIN: Duration = Duration::from_secs(5);
/// How long no look occupies a copy that a program wants to open.
const GIVES_WAY: Duration = Duration::from_secs(3);

/// Which files' entries an answer needs.
#[derive(Clone, Copy)]
enum Want {
    One(u32),
    Part(Part),
}

impl Want {
    fn from(&self) -> u32 {
        match self {
            Want::One(id) => *id,
            Want::Part(p) => p.from,
        }
    }

    /// Takes what is wanted from the entries from that number on, and the number from which on
    /// it was too much.
    fn take<'a>(
        &self,
        all: impl Iterator<Item = &'a CatalogEntry>,
    ) -> (Vec<CatalogEntry>, Option<u32>) {
        let p = match self {
            Want::One(id) => return (all.take(1).filter(|e| e.id == *id).cloned().collect(), None),
            Want::Part(p) => p,
        };
        let (mut taken, mut bytes) = (Vec::new(), 0);
        let more = if p.until == 0 { 1 } else { 4 };
        for e in all.take_while(|e| p.until == 0 || e.id < p.until) {
            // As JSON a name may be longer.
            bytes += 64 + serde_json::to_string(&e.name).map_or(0, |n| n.len());
            let full = bytes > MOST_LISTED * more || p.sums && taken.len() >= MOST_SUMMED * more;
            if full && !taken.is_empty() {
                return (taken, Some(e.id));
            }
            taken.push(e.clone());
        }
        (taken, None)
    }
}

/// A copy at the moment of a request.
struct Seen<'a> {
    /// The files that are wanted, and the number of the first one that was too much.
    files: Vec<CatalogEntry>,
    next: Option<u32>,
    /// All records up to this LSN are in what is read.
    low: u64,
    last: u64,
    state: State,
    volume_id: u64,
    epoch: u64,
    open: &'a mut dyn FnMut(&CatalogEntry) -> Result<Arc<dyn File>>,
    /// No record above this LSN is in what has been read.
    high: &'a dyn Fn() -> u64,
    /// The epoch in which `low` was born.
    born: u64,
    /// Every record above the LSN that the request named and up to `low`, if the copy is
    /// as of `low` and of the same history. `None` also if one of them names a spill
    /// file.
    records: Option<Vec<u8>>,
}

impl Seen<'_> {
    fn file(&mut self, v: &Volume, id: u64) -> Result<Arc<dyn File>> {
        let e = self
            .files
            .iter()
            .find(|f| f.id as u64 == id)
            .ok_or_else(|| Error::NotFound(format!("volume {} has no file {id}", v.name)))?;
        (self.open)(e)
    }

    /// The bytes of a page, as far as the file reaches.
    fn read(&mut self, v: &Volume, id: u64, offset: u64) -> Result<Vec<u8>> {
        let file = self.file(v, id)?;
        let mut bytes = vec![0; COPY_PAGE as usize];
        let got = file
            .read_at(&mut bytes, offset)
            .context(|| format!("reading file {id} of volume {}", v.name))?;
        bytes.truncate(got);
        Ok(bytes)
    }

    /// The files as an answer lists them.
    fn list(&mut self, v: &Volume, sums: bool) -> Result<Vec<Value>> {
        let mut left = MOST_SMALL;
        let mut listed = Vec::new();
        for e in std::mem::take(&mut self.files) {
            let mut of = json!({ "id": e.id, "name": e.name, "size": e.size });
            if sums && e.size <= SMALL.min(left) {
                left -= e.size;
                of["sums"] = json!(self.all_sums(v, &e)?);
            }
            listed.push(of);
        }
        Ok(listed)
    }

    /// The sums of all pages of a file.
    fn all_sums(&mut self, v: &Volume, e: &CatalogEntry) -> Result<String> {
        if e.size == 0 {
            return Ok(String::new());
        }
        let file = (self.open)(e)?;
        sums_of(&*file, 0..e.size).context(|| format!("reading file {} of volume {}", e.id, v.name))
    }

    /// The ranges of a page, relative to its start and ascending, that the records since
    /// the request's LSN have written. `None` if that is not known.
    fn touched(&self, id: u64, offset: u64) -> Option<Vec<(u64, u64)>> {
        let page = offset..offset.checked_add(COPY_PAGE)?;
        let mut touched = Vec::new();
        let mut known = true;
        for_each_op(self.records.as_ref()?, |op, payload| {
            if u64::from(op.file) != id {
                return;
            }
            // A rename changes no byte; what other operations change is not known here.
            known &= matches!(op.kind, OpKind::Write | OpKind::Rename);
            let from = op.offset.max(page.start);
            let to = (op.offset + payload.len() as u64).min(page.end);
            if op.kind == OpKind::Write && from < to {
                touched.push((from - offset, to - offset));
            }
        })?;
        touched.sort_unstable();
        touched.dedup_by(|next, last| {
            let joins = next.0 <= last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
        known.then_some(touched)
    }

    /// The files, by number and by name, that `records` made, removed, renamed or
    /// resized. `None` if that is not known.
    fn changed(&self) -> Option<Value> {
        let (mut ids, mut names) = (BTreeSet::new(), BTreeSet::new());
        for_each_op(self.records.as_ref()?, |op, payload| {
            if op.kind == OpKind::Write {
                return;
            }
            ids.insert(op.file);
            if matches!(op.kind, OpKind::Create | OpKind::Rename) {
                names.insert(String::from_utf8_lossy(payload).into_owned());
            }
        })?;
        let bytes: usize = names.iter().map(String::len).sum();
        let few = ids.len() + names.len() <= MOST_CHANGED && bytes <= MOST_CHANGED_BYTES;
        few.then(|| json!({ "ids": ids, "names": names }))
    }
}

/// Calls `f` for each operation of consecutive records. `None` if the bytes are not all
/// records.
fn for_each_op(records: &[u8], mut f: impl FnMut(&Op, &[u8])) -> Option<()> {
    let mut rest = records;
    while !rest.is_empty() {
        let r = RecordView::trusted(rest).ok()?;
        r.ops().for_each(|(op, payload)| f(&op, payload));
        rest = &rest[r.bytes().len()..];
    }
    Some(())
}

/// What the caller has seen on another node: the LSN after which it wants records, and
/// the birth epoch of that LSN there.
#[derive(Debug, Clone, Copy)]
struct After {
    lsn: u64,
    epoch: u64,
}

impl After {
    fn of(since: Since) -> Option<After> {
        since.after.map(|lsn| After {
            lsn,
            epoch: since.after_born,
        })
    }
}

impl Node {
    /// Runs `f` on this node's copy of a volume, whichever process has it open.
    fn see<T>(
        self: &Arc<Node>,
        v: &Volume,
        want: Want,
        after: Option<After>,
        f: impl FnOnce(&mut Seen<'_>) -> Result<T>,
    ) -> Result<T> {
        let held = self.of(v);
        if let Some(m) = held.mirror() {
            self.await_applied(&m);
            return see_store(&m.store, m.tail(), want, after, f);
        }
        let meta = layout::meta_dir(&self.me, &v.name);
        if read_superblock(&*self.env, &meta)?.is_none() {
            return Err(Error::NotFound(format!(
                "node {} has no copy of volume {} yet",
                self.me.name, v.name
            )));
        }
        let mut opened = held.opened();
        if opened.is_none() {
            if self.in_use(v) || self.is_healing(v) {
                drop(opened);
                return self.see_from_outside(v, want, f);
            }
            *opened = Some(self.open_to_look(v)?);
        }
        let o = opened.as_mut().expect("just opened");
        o.last = self.env.now();
        // No program is attached. Records in the primary's ring count; those that are not
        // applied yet are compared by LSN.
        let seen = see_store(&o.store, o.store.tail(), want, after, f);
        let failed = o.store.check().is_err();
        drop(opened);
        if failed {
            self.end_look(v);
        }
        seen
    }

    /// Opens a copy that nobody uses; it counts as looked at until it is closed.
    fn open_to_look(&self, v: &Volume) -> Result<Opened> {
        let now = self.env.now();
        let mut known = self.of(v).known();
        if known.gave_way.is_some_and(|at| now - at < GIVES_WAY) {
            return Err(Error::Busy(format!(
                "volume {}: a program is attaching",
                v.name
            )));
        }
        known.looks += 1;
        drop(known);
        let store = self.open_noted(v);
        if store.is_err() {
            self.of(v).known().looks -= 1;
        }
        Ok(Opened {
            store: store?,
            last: now,
        })
    }

    /// Closes a copy that is open for looks. False if none is.
    pub(super) fn end_look(&self, v: &Volume) -> bool {
        let held = self.of(v);
        let mut opened = held.opened();
        let Some(o) = opened.take() else {
            return false;
        };
        // Otherwise the copy would look as a dead program leaves it.
        let closed = match o.store.was_clean() {
            true => o.store.close_clean(o.store.tail()),
            false => Ok(()),
        };
        if let Err(e) = closed {
            warn!(node = %self.me.name, volume = %v.name, "closing a copy: {}", e.cause());
        }
        drop(o);
        held.known().looks -= 1;
        true
    }

    /// Closes what was not looked at for a while.
    pub(super) fn end_old_look(&self, v: &Volume) {
        let now = self.env.now();
        let held = self.of(v);
        // A look that was waited for came later than that.
        let is_over = |last, time| now.saturating_sub(last) >= time;
        let is_old = |o: &Opened| is_over(o.last, LOOKS_AGAIN);
        if held.opened().as_ref().is_some_and(is_old) {
            self.end_look(v);
        }
        held.listed().take_if(|l| is_over(l.last, LISTS_AGAIN));
    }

    /// Waits until what is committed is applied, for a while: an answer as of an earlier LSN says
    /// so.
    fn await_applied(&self, m: &Mirror) {
        let limit = m.store.whole(m.apply_limit());
        let end = self.env.now() + PATIENCE;
        let is_over = || m.store.applied() >= limit || m.store.check().is_err() || m.is_closed();
        while !is_over() && self.env.now() < end {
            m.store.hurry();
            m.store
                .advanced
                .wait_unless(is_over, Duration::from_millis(10));
        }
    }

    /// [`Node::see`] while a program has the copy open.
    fn see_from_outside<T>(
        &self,
        v: &Volume,
        want: Want,
        f: impl FnOnce(&mut Seen<'_>) -> Result<T>,
    ) -> Result<T> {
        let busy = |why: &str| Error::Busy(format!("volume {}: {why}", v.name));
        let spec = self.spec(v);
        let live = |what: Live| {
            self.live(v)
                .map(|l| l[what as usize])
                .ok_or_else(|| busy("the program's ring cannot be read"))
        };
        // A program sets it as soon as it has begun its epoch; until then the value is an
        // earlier program's.
        let epoch = live(Live::Epoch)?;
        let low = live(Live::Applied)?;
        let catalog = || self.catalog_now(v, &spec.meta);
        let c = catalog()?;
        let first = c.files.partition_point(|e| e.id < want.from());
        let (files, next) = want.take(c.files[first..].iter());
        drop(c);
        let sb =
            read_superblock(&*self.env, &spec.meta)?.ok_or_else(|| busy("it is being made"))?;
        if sb.view.epoch != epoch || sb.state != State::Whole || epoch == 0 {
            return Err(busy("a program is attaching"));
        }
        let high = || live(Live::Limit).unwrap_or(u64::MAX);
        let mut open = |e: &CatalogEntry| {
            open_as(&*self.env, &spec.dir, e, catalog)?
                .ok_or_else(|| busy("the names of its files change"))
        };
        f(&mut Seen {
            files,
            next,
            low,
            last: live(Live::Last)?,
            state: sb.state,
            volume_id: sb.volume_id,
            epoch,
            open: &mut open,
            high: &high,
            born: History::from_entries(&sb.history)
                .and_then(|h| h.epoch_at(low))
                .unwrap_or(0),
            // The records are in another process's logs.
            records: None,
        })
    }

    /// The catalogue of a copy that a program has open; read again only if it is another one.
    fn catalog_now(&self, v: &Volume, meta: &Path) -> Result<Arc<Catalog>> {
        let is = self.catalog_is(meta)?;
        let now = self.env.now();
        if let Some(l) = self.of(v).listed().as_mut().filter(|l| l.is == is) {
            l.last = now;
            return Ok(l.catalog.clone());
        }
        // If it changes in between, it is read again the next time.
        let catalog = Arc::new(self.catalog(meta)?);
        *self.of(v).listed() = Some(Listed {
            is,
            catalog: catalog.clone(),
            last: now,
        });
        Ok(catalog)
    }

    /// What tells a catalogue from another one: its length, its first bytes, and its checksum.
    fn catalog_is(&self, meta: &Path) -> Result<(u64, Vec<u8>, Vec<u8>)> {
        let path = meta.join("catalog");
        let what = || format!("reading {}", path.display());
        let file = self.env.open(&path, OpenHow::default()).context(what)?;
        let len = file.len().context(what)?;
        let read = |at: u64, most: usize| {
            let mut bytes = vec![0; most];
            let got = file.read_at(&mut bytes, at).context(what)?;
            bytes.truncate(got);
            Ok::<_, Error>(bytes)
        };
        Ok((len, read(0, 48)?, read(len.saturating_sub(4), 4)?))
    }

    pub(super) fn catalog(&self, meta: &Path) -> Result<Catalog> {
        let path = meta.join("catalog");
        let what = || format!("reading {}", path.display());
        let file = self.env.open(&path, OpenHow::default()).context(what)?;
        let mut bytes = vec![0; file.len().context(what)?.min(MAX_CATALOG) as usize];
        let got = file.read_at(&mut bytes, 0).context(what)?;
        Catalog::decode(&bytes[..got]).map_err(|e| Error::Damaged {
            path: path.clone(),
            what: e.to_string(),
        })
    }

    /// The list of files. `since.after`: also what changed in it since. `since.since`:
    /// waits until all records up to this LSN are in the files.
    pub(super) fn files(self: &Arc<Node>, v: &Volume, since: Since, part: Part) -> Result<Value> {
        self.await_low(since.since, || {
            self.see(v, Want::Part(part), After::of(since), |s| {
                let files = s.list(v, part.sums)?;
                let answer = json!({
                    "low": s.low,
                    "high": (s.high)(),
                    "last_lsn": s.last,
                    "state": format!("{:?}", s.state).to_lowercase(),
                    "volume_id": s.volume_id,
                    "epoch": s.epoch,
                    "born": s.born,
                    "files": files,
                    "next": s.next,
                    "changed": s.changed(),
                });
                Ok((s.low, answer))
            })
        })
    }

    /// Repeats `look` until its LSN reaches `since`, or for `PATIENCE`.
    fn await_low(&self, since: u64, look: impl Fn() -> Result<(u64, Value)>) -> Result<Value> {
        let deadline = self.env.now() + PATIENCE;
        loop {
            let (low, answer) = look()?;
            if low >= since || self.env.now() >= deadline {
                return Ok(answer);
            }
            // The process that applies records may be another one, which does not notify.
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The sums of pages, and up to which offset the file has a hole behind them.
    pub(super) fn sums(
        self: &Arc<Node>,
        v: &Volume,
        id: u64,
        offset: u64,
        pages: u64,
    ) -> Result<Value> {
        self.see(v, one(id), None, |s| {
            let file = s.file(v, id)?;
            let what = || format!("reading file {id} of volume {}", v.name);
            let end = offset.saturating_add(pages.min(MOST_PAGES) * COPY_PAGE);
            let sums = sums_of(&*file, offset..end).context(what)?;
            let zero = zeros(&*file, end).context(what)?.start;
            Ok(json!({ "low": s.low, "high": (s.high)(), "sums": sums, "zero_until": zero }))
        })
    }

    /// One page's bytes. `since.since`: waits until all records up to this LSN are in
    /// them. `since.after`: says which of the bytes were written since.
    pub(super) fn page(
        self: &Arc<Node>,
        v: &Volume,
        id: u64,
        offset: u64,
        since: Since,
    ) -> Result<Value> {
        self.await_low(since.since, || {
            self.see(v, one(id), After::of(since), |s| {
                let bytes = s.read(v, id, offset)?;
                let mut text = String::new();
                hex(&mut text, &bytes);
                let answer = json!({
                    "low": s.low, "high": (s.high)(), "bytes": text,
                    "volume_id": s.volume_id, "epoch": s.epoch, "born": s.born,
                    "touched": s.touched(id, offset),
                });
                Ok((s.low, answer))
            })
        })
    }

    /// Replaces a page of this node's copy by the primary's bytes.
    pub(super) fn rewrite(self: &Arc<Node>, v: &Volume, id: u64, offset: u64) -> Result<Value> {
        let m = self.following(v)?;
        let sb = m.store.superblock();
        let primary = self
            .config
            .node(&sb.view.primary)
            .map_err(|e| Error::Config(e.to_string()))?;
        let mut other = Client::connect(
            &self.env,
            &Address::Tcp(primary.address),
            &self.config.cluster,
            PATIENCE * 3,
        )?;
        let id = u32::try_from(id).map_err(|_| Error::NotFound("no such file".into()))?;
        let offset = offset - offset % COPY_PAGE;
        let done = m.rewrite(sb.view.epoch, id, offset, |since| {
            let a = other.ask(&Request::Page {
                volume: v.name.clone(),
                id: id.into(),
                offset,
                since: Since {
                    since,
                    ..Since::default()
                },
            })?;
            let number = |k: &str| a[k].as_u64().unwrap_or(0);
            if number("volume_id") != sb.volume_id || number("epoch") != sb.view.epoch {
                return Err(Error::Busy(format!(
                    "node {} is not in epoch {} of volume {}",
                    primary.name, sb.view.epoch, v.name
                )));
            }
            Ok(Page {
                bytes: unhex(a["bytes"].as_str().unwrap_or("?"))
                    .ok_or_else(|| Error::Protocol("a page that is not hexadecimal".into()))?,
                low: number("low"),
                high: a["high"].as_u64().unwrap_or(u64::MAX),
            })
        })?;
        if done {
            let (file, from) = (self.file_named(v, id), &primary.name);
            info!(
                node = %self.me.name, volume = %v.name,
                "file {file}: `mojim repair` rewrote 4 KiB at {offset} with node {from}'s bytes"
            );
        }
        Ok(json!({ "done": done }))
    }

    /// A file's name for a log line, or its number if the catalogue does not have it.
    fn file_named(&self, v: &Volume, id: u32) -> String {
        let catalog = self.catalog(&layout::meta_dir(&self.me, &v.name));
        let mut files = catalog.into_iter().flat_map(|c| c.files);
        let found = files.find(|f| f.id == id);
        found.map_or_else(|| id.to_string(), |f| format!("{:?}", f.name))
    }

    /// Marks this node's copy to be given up as soon as the primary sends another. One that
    /// cannot be used is given up now, for that of a primary in `epoch`: nothing can be brought
    /// up to date in it.
    pub(super) fn copy_anew(self: &Arc<Node>, v: &Volume, epoch: u64) -> Result<Value> {
        let found = self.following(v).and_then(|m| m.store.check().map(|()| m));
        match found {
            Ok(m) => m.distrust(),
            // What passes by itself, or is the configuration's fault, is no reason.
            Err(e @ (Error::Damaged { .. } | Error::Poisoned(_))) => self.give_up(v, &e, epoch)?,
            Err(e) => return Err(e),
        }
        info!(
            node = %self.me.name, volume = %v.name,
            "the copy here is to be made anew: an operator asked for it"
        );
        Ok(json!(true))
    }

    /// Empties this node's copy, which cannot be used. What it acknowledged may be nowhere
    /// else: so it must be of no newer view than the primary, and there a program must have
    /// attached, which is refused where something acknowledged may be missing.
    fn give_up(self: &Arc<Node>, v: &Volume, why: &Error, epoch: u64) -> Result<()> {
        if epoch == 0 {
            return Err(Error::Invalid(format!(
                "the copy of node {} cannot be used ({}). It is given up only while a program runs on the primary, which then has all acknowledged sync points. Start the program there first. If it does not attach without this copy, `mojim promote` on the primary says why, or lets it go on alone",
                self.me.name,
                why.cause()
            )));
        }
        if self.of(v).known().doubt {
            return Err(Error::Busy(format!(
                "node {} does not know yet whether it was promoted: look again in some seconds",
                self.me.name
            )));
        }
        // The register may name this node before its superblock does.
        if let Some(views) = self.register(v)
            && let Some(primary) = views.read(&v.name)?.primary
            && primary.node == self.me.name
        {
            return Err(Error::Invalid(format!(
                "node {} is the primary of volume {} by the register: its copy is not given up",
                self.me.name, v.name
            )));
        }
        {
            // Nobody here opens it meanwhile.
            let held = self.of(v);
            let mut place = held.place();
            if let Some(m) = place.as_ref().filter(|m| m.store.check().is_ok()) {
                // It was mended and opened meanwhile.
                m.distrust();
                return Ok(());
            }
            if let Some(old) = place.take() {
                old.close();
                let unapplied = old.store.unapplied();
                if let Err(e) = wait_for_last(old) {
                    held.known().unopened = Some(unapplied);
                    return Err(e);
                }
            }
            Store::give_up(&self.env, &self.spec(v), epoch)?;
            held.known().unopened = None;
        }
        warn!(
            node = %self.me.name, volume = %v.name,
            "the copy here is given up, because an operator asked for it: {}", why.cause()
        );
        self.mirror(v).map(drop)
    }

    fn following(self: &Arc<Node>, v: &Volume) -> Result<Arc<mojim_replica::mirror::Mirror>> {
        let meta = layout::meta_dir(&self.me, &v.name);
        match read_superblock(&*self.env, &meta)? {
            Some(sb) if sb.view.epoch > 0 && sb.view.primary != self.me.name => self.mirror(v),
            Some(sb) if sb.view.epoch > 0 => Err(Error::Invalid(format!(
                "node {} was the primary of volume {} in epoch {}, the last that it knows, and follows no node. If another node is the primary now, it brings this copy up to date when it reaches it. If none is, the other copies are made equal to this one. If a program runs on another primary and this copy cannot be used: end the daemon of node {}, remove {} and all in {} that has the volume's name, and start the daemon again. It then gets a whole copy",
                self.me.name,
                v.name,
                sb.view.epoch,
                self.me.name,
                layout::data_dir(&self.me, &v.name).display(),
                self.me.directory.join(".mojim").display(),
            ))),
            _ => Err(Error::Invalid(format!(
                "node {} has no copy of volume {} yet, and follows nobody",
                self.me.name, v.name
            ))),
        }
    }
}

/// What is wanted of a file alone. No file has the number 0.
fn one(id: u64) -> Want {
    Want::One(u32::try_from(id).unwrap_or(0))
}

/// Opens the file of a catalogue's entry by its name; `None` if the name is no longer
/// that file's. `now` reads the present catalogue.
fn open_as(
    env: &dyn Env,
    dir: &Path,
    e: &CatalogEntry,
    now: impl FnOnce() -> Result<Arc<Catalog>>,
) -> Result<Option<Arc<dyn File>>> {
    let path = dir.join(&e.name);
    let file = env
        .open(&path, OpenHow::DATA)
        .context(|| format!("opening {}", path.display()))?;
    // Another file may have taken the name. The catalogue changes before the names do, so
    // it shows this.
    let now = now()?;
    let at = now.files.binary_search_by_key(&e.id, |f| f.id);
    let still = at.is_ok_and(|at| now.files[at].name == e.name);
    Ok(still.then_some(file))
}

fn see_store<T>(
    store: &Store,
    last: u64,
    want: Want,
    after: Option<After>,
    f: impl FnOnce(&mut Seen<'_>) -> Result<T>,
) -> Result<T> {
    // No record is above the largest LSN.
    let from = after.map_or(u64::MAX, |a| a.lsn);
    store.standing_still_since(from, MOST_RECORDS, |area, lsn, records| {
        // After a failed write the bytes may be anything.
        store.check()?;
        if area.is_torn() {
            let torn = "what is committed is applied in part, and waits for room";
            return Err(Error::Busy(torn.into()));
        }
        let sb = store.superblock();
        let (files, next) = want.take(area.files_from(want.from()));
        let history = store.history();
        let same = after.is_some_and(|a| history.epoch_at(a.lsn).unwrap_or(0) == a.epoch);
        f(&mut Seen {
            files,
            next,
            low: lsn,
            last,
            state: sb.state,
            volume_id: sb.volume_id,
            epoch: sb.view.epoch,
            open: &mut |e| area.file_by_name(e.id),
            high: &|| store.shows(),
            born: history.epoch_at(lsn).unwrap_or(0),
            records: records.filter(|_| store.shows() == lsn && same),
        })
    })
}

/// Where the pages end that a file has as a hole from `at` on, and where the bytes behind them end
/// that may be others than zero.
fn zeros(file: &dyn File, at: u64) -> io::Result<Range<u64>> {
    let data = file.next_data(at)?;
    // Of a file that was cut off there is no data. So its length counts, and a later one than that:
    // bytes that the file has got since were zero at first.
    let len = file.len()?;
    let [start, end] = data.map_or([len; 2], |d| [d.start.min(len), d.end.min(len)]);
    let start = start.max(at);
    Ok(start - (start - at) % COPY_PAGE..end.max(start))
}

/// The sums of the pages of a range, as far as the file reaches, in hexadecimal digits. A page of a
/// hole has the sum of a page of zeros, and is not read.
fn sums_of(file: &dyn File, range: Range<u64>) -> io::Result<String> {
    static OF_ZEROS: LazyLock<String> = LazyLock::new(|| {
        let mut text = String::new();
        hex(&mut text, &sum(&[0; COPY_PAGE as usize]));
        text
    });
    let len = range.end.saturating_sub(range.start);
    let mut sums = String::with_capacity(len.div_ceil(COPY_PAGE) as usize * 2 * SUM_LEN);
    let (mut at, mut bytes) = (range.start, Vec::new());
    while at < range.end {
        let data = zeros(file, at)?;
        let pages = (data.start.min(range.end) - at) / COPY_PAGE;
        (0..pages).for_each(|_| sums.push_str(&OF_ZEROS));
        at += pages * COPY_PAGE;
        // Whole pages, and also the one in which the file ends.
        let len = (data.end.saturating_sub(at))
            .max(1)
            .next_multiple_of(COPY_PAGE);
        bytes.resize(len.min(range.end - at) as usize, 0);
        let got = file.read_at(&mut bytes, at)?;
        for page in bytes[..got].chunks(COPY_PAGE as usize) {
            hex(&mut sums, &sum(page));
        }
        if got < bytes.len() {
            break;
        }
        at += got as u64;
    }
    Ok(sums)
}

fn hex(out: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for b in bytes {
        out.push(DIGITS[(b >> 4) as usize] as char);
        out.push(DIGITS[(b & 15) as usize] as char);
    }
}

/// The bytes that a text of hexadecimal digits stands for.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text
        .chars()
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect();
    let digits = digits.filter(|d| d.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_linux::Os;
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    /// A file with holes, which counts the bytes that are read.
    struct Sparse {
        len: u64,
        /// The pages with data, and each one's first byte.
        pages: BTreeMap<u64, u8>,
        /// Whether its file system knows holes.
        knows: bool,
        read: AtomicU64,
    }

    impl Sparse {
        fn new(len: u64, pages: &[(u64, u8)]) -> Sparse {
            Sparse {
                len,
                pages: pages.iter().copied().collect(),
                knows: true,
                read: AtomicU64::new(0),
            }
        }

        fn sums(&self, range: Range<u64>) -> String {
            sums_of(self, range).unwrap()
        }

        /// As a node that reads all of it answers.
        fn sums_read(&self, range: Range<u64>) -> String {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let got = self.read_at(&mut bytes, range.start).unwrap();
            let mut sums = String::new();
            let pages = bytes[..got].chunks(COPY_PAGE as usize);
            pages.for_each(|page| hex(&mut sums, &sum(page)));
            sums
        }
    }

    impl File for Sparse {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            let got = buf.len().min(self.len.saturating_sub(offset) as usize);
            self.read.fetch_add(got as u64, Relaxed);
            for (at, byte) in (offset..).zip(&mut buf[..got]) {
                let page = self.pages.get(&(at / COPY_PAGE));
                *byte = page.filter(|_| at % COPY_PAGE == 0).map_or(0, |b| *b);
            }
            Ok(got)
        }

        fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
            if offset >= self.len || !self.knows {
                return Ok((offset < self.len).then_some(offset..self.len));
            }
            let next = self.pages.range(offset / COPY_PAGE..).next();
            Ok(next.map(|(page, _)| {
                let mut end = page + 1;
                while self.pages.contains_key(&end) {
                    end += 1;
                }
                let start = (page * COPY_PAGE).max(offset);
                start..(end * COPY_PAGE).min(self.len)
            }))
        }

        fn len(&self) -> io::Result<u64> {
            Ok(self.len)
        }

        fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
            unreachable!()
        }

        fn sync(&self) -> io::Result<()> {
            unreachable!()
        }

        fn set_len(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }

        fn allocate(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }
    }

    /// `verify` read a sparse file of 4 GiB as if it were full of bytes: 65 seconds.
    #[test]
    fn a_hole_has_the_sums_of_zeros_and_is_not_read() {
        let page = |n: u64| n * COPY_PAGE;
        // Written or not, zeros are zeros: one in a hole, one beside data.
        let some = [(3, 7), (4, 0), (5, 9), (9, 0), (15, 1), (17, 2)];
        for len in [
            page(0),
            10,
            page(3),
            page(5) + 1,
            page(16),
            page(16) + 1,
            page(17) + 1,
            page(30) + 5,
        ] {
            let mut file = Sparse::new(len, &some);
            for knows in [true, false] {
                file.knows = knows;
                for range in [
                    page(0)..page(16),
                    page(4)..page(18),
                    page(6)..page(9),
                    0..len,
                    page(16)..page(40),
                ] {
                    let (found, read) = (file.sums(range.clone()), file.sums_read(range.clone()));
                    assert_eq!(found, read, "{range:?} of {len} bytes");
                }
                // Between two pages of data, and to the end.
                let ends = [6, 10, 18].map(|n| zeros(&file, page(n)).unwrap().start);
                let whole =
                    |to: u64, from: u64| page(to).min(len - len % COPY_PAGE).max(page(from));
                let expected = [whole(9, 6), whole(15, 10), whole(1 << 40, 18)];
                assert_eq!(
                    ends,
                    if knows {
                        expected
                    } else {
                        [6, 10, 18].map(page)
                    }
                );
            }
        }
        let file = Sparse::new(64 << 30, &[(3, 7), (2050, 1), (8 << 20, 9)]);
        let mut sums = 0;
        for from in [0, 2048, 8 << 20, 16 << 20] {
            sums += file.sums(page(from)..page(from + MOST_PAGES)).len();
        }
        assert_eq!(sums, 3 * MOST_PAGES as usize * 2 * SUM_LEN);
        assert_eq!(file.read.load(Relaxed), 3 * COPY_PAGE);
    }

    /// The list of some 25,000 files was one answer, larger than a frame may be: `verify` and
    /// `repair` failed for good.
    #[test]
    fn a_list_of_files_comes_in_parts_that_fit_a_frame() {
        let name = |id: u32| format!("{id}-{}", "\u{1}".repeat(40));
        let entry = |id| CatalogEntry {
            id,
            size: 1,
            name: name(id),
        };
        let all: Vec<_> = (1..=30_000).map(entry).collect();
        for sums in [false, true] {
            let (mut from, mut seen) = (0, 0);
            loop {
                let first = all.partition_point(|e| e.id < from);
                let part = Part {
                    from,
                    until: 0,
                    sums,
                };
                let (taken, next) = Want::Part(part).take(all[first..].iter());
                assert_eq!(taken, all[seen..seen + taken.len()]);
                seen += taken.len();
                let sums = "0".repeat(2 * SUM_LEN);
                let of = |e: &CatalogEntry| json!({ "id": e.id, "size": e.size, "name": e.name, "sums": sums });
                let text = json!(taken.iter().map(of).collect::<Vec<_>>()).to_string();
                assert!(
                    text.len() < mojim_format::frame::MAX_BODY / 2,
                    "{}",
                    text.len()
                );
                // Asked for again as far as that, it is all there.
                let until = next.unwrap_or(u32::MAX);
                let again = Want::Part(Part { until, ..part });
                assert_eq!(again.take(all[first..].iter()), (taken, None));
                match next {
                    Some(next) => from = next,
                    None => break,
                }
            }
            assert_eq!(seen, all.len());
        }
    }

    /// A file that took another's name between two reads was read in its place, and
    /// `verify` compared it, `repair` copied it.
    #[test]
    fn a_file_is_not_read_for_another_that_had_its_name() {
        let env = Os::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let entry = |id, name: &str| CatalogEntry {
            id,
            size: 3,
            name: name.into(),
        };
        let catalog = |files: [CatalogEntry; 2]| Catalog {
            files: files.into(),
            ..Catalog::default()
        };
        let put = |name: &str, bytes| std::fs::write(dir.path().join(name), bytes).unwrap();
        put("f", "one");
        put("g", "two");
        let first = catalog([entry(1, "f"), entry(2, "g")]);
        let turned = catalog([entry(1, "old"), entry(2, "f")]);
        let turn = || {
            let at = |name| dir.path().join(name);
            std::fs::rename(at("f"), at("old")).unwrap();
            std::fs::rename(at("g"), at("f")).unwrap();
        };

        // The names change just after the catalogue is read.
        let look = || {
            turn();
            Ok(Arc::new(first.clone()))
        };
        let file = open_as(&env, dir.path(), &entry(1, "f"), look).unwrap();
        let mut bytes = [0; 3];
        file.unwrap().read_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"one");
        // They have changed before: the catalogue that is made first says so.
        let read = open_as(&env, dir.path(), &entry(1, "f"), || {
            Ok(Arc::new(turned.clone()))
        });
        assert!(read.unwrap().is_none());
        let read = open_as(&env, dir.path(), &entry(2, "f"), || {
            Ok(Arc::new(turned.clone()))
        });
        assert!(read.unwrap().is_some());
    }
}
