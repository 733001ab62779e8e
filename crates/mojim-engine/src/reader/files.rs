//! All files of a volume as a node that follows shows them, for a process that reads them
//! without mappings (`mojim mount --read`).
//!
//! Owns what is known of the files, all as of one LSN: numbers, names and sizes, and the bytes
//! of one of them, which is kept. Nothing is asked while nobody wants to know.
//!
//! Invariants:
//!
//! - Everything in the [`Listing`] is as of its LSN. It advances by the records that come with
//!   answers. Where the node has none from there on, all is asked anew.
//! - The bytes that [`ReaderFiles::read`] gives are as of one LSN, as new as any that was shown
//!   when it was called.
//! - No lock on the listing is held while the node is asked.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use mojim_config::Config;
use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_format::{Op, OpKind};
use mojim_replica::client::READ_PAGES;
use mojim_replica::layout;

use super::source::{ATTACH, Answer, Link, PAUSE, Source, Which, is_final};
use super::view::{File, Mark, PAGE, for_each_op};

/// How long a question is repeated that the node refuses, or that does not reach it.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long if it is only slow: it applies what is committed first, and its disk may be slow.
const SLOW: Duration = Duration::from_secs(30);

/// A volume's files on a node that follows.
pub struct ReaderFiles {
    name: String,
    node: String,
    directory: PathBuf,
    source: Source,
    /// Connections that nobody uses now.
    links: Mutex<Vec<Link>>,
    listing: Mutex<Listing>,
    /// Held by who asks for everything.
    loading: Mutex<()>,
}

/// The files as of one LSN.
#[derive(Debug, Default)]
pub struct Listing {
    mark: Mark,
    /// The LSN as of which this is: that of `mark`, unless everything is to be asked anew.
    lsn: u64,
    whole: bool,
    version: u64,
    files: BTreeMap<u32, File>,
    keeps: String,
    kept: Option<Piece>,
}

/// Bytes of a file from an offset on, as of an LSN that advances.
#[derive(Debug)]
struct Piece {
    file: u32,
    from: u64,
    /// The file's size.
    size: u64,
    bytes: Vec<u8>,
}

/// What became of a question for bytes.
enum Got {
    Bytes(Piece),
    NoFile,
    /// The node has no records from the first answer on: begin anew.
    Interrupted,
}

impl Listing {
    /// The LSN as of which it is.
    pub fn lsn(&self) -> u64 {
        self.lsn
    }

    /// Another number whenever anything in it changed.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Numbers, names and sizes, by ascending numbers.
    pub fn files(&self) -> impl Iterator<Item = (u32, &str, u64)> {
        self.files.iter().map(|(id, f)| (*id, &f.name[..], f.size))
    }

    /// The file whose bytes are kept, if there is one.
    pub fn kept(&self) -> Option<(u32, &[u8])> {
        self.kept.as_ref().map(|p| (p.file, &p.bytes[..]))
    }

    /// Advances by records, which reach from what it shows, or before that, to `to`.
    fn advance(&mut self, records: &[u8], to: Mark) -> Result<()> {
        let at = self.mark;
        for_each_op(at, records, |op, payload| self.change(op, payload))?;
        (self.mark, self.lsn) = (
            Mark {
                life: at.life,
                ..to
            },
            to.lsn,
        );
        Ok(())
    }

    fn change(&mut self, op: Op, payload: &[u8]) {
        let id = op.file;
        let kept = self.kept.as_mut().filter(|k| k.file == id);
        if op.kind == OpKind::Write {
            if let Some(k) = kept {
                k.change(op, payload);
                self.version += 1;
            }
            return;
        }
        self.version += 1;
        if let Some(k) = kept {
            k.change(op, payload);
            k.bytes.resize(k.size as usize, 0);
        }
        let name = || String::from_utf8_lossy(payload).into_owned();
        // A name that somebody else gets, or loses, leaves the bytes that are kept behind.
        let is_kept = |n: &str| n == self.keeps;
        match op.kind {
            OpKind::Create => {
                self.whole &= !is_kept(&name());
                let name = name();
                self.files.insert(id, File { name, size: 0 });
            }
            OpKind::Resize => {
                if let Some(f) = self.files.get_mut(&id) {
                    f.size = op.offset;
                }
            }
            OpKind::Remove => {
                let gone = self.files.remove(&id);
                self.whole &= gone.is_none_or(|f| f.name != self.keeps);
            }
            OpKind::Rename => {
                let name = name();
                let was = self.files.get(&id).is_some_and(|f| is_kept(&f.name));
                self.whole &= !was && !is_kept(&name);
                // Over another one, which is gone.
                self.files.retain(|i, f| *i == id || f.name != name);
                if let Some(f) = self.files.get_mut(&id) {
                    f.name = name;
                }
            }
            OpKind::Write | OpKind::Spill => {}
        }
    }
}

impl Piece {
    fn change(&mut self, op: Op, payload: &[u8]) {
        match op.kind {
            OpKind::Write => {
                // As in the data area: what is cut off later in a prefix.
                let end = (op.offset + payload.len() as u64).min(self.size);
                let last = self.from + self.bytes.len() as u64;
                let part = op.offset.max(self.from)..end.min(last);
                if !part.is_empty() {
                    let at = |base: u64| (part.start - base) as usize..(part.end - base) as usize;
                    self.bytes[at(self.from)].copy_from_slice(&payload[at(op.offset)]);
                }
            }
            OpKind::Resize | OpKind::Remove => {
                self.size = if op.kind == OpKind::Remove {
                    0
                } else {
                    op.offset
                };
                let keeps = self.size.saturating_sub(self.from);
                let keeps = keeps.min(self.bytes.len() as u64) as usize;
                self.bytes[keeps..].fill(0);
            }
            _ => {}
        }
    }
}

impl ReaderFiles {
    /// What `node`, whose daemon must run on this host, shows of a volume, which may be left out
    /// if there is only one. The bytes of the file with the name `keeps` are part of the listing.
    ///
    /// # Errors
    /// As of [`Reader::attach`](crate::Reader::attach), without `Unsupported`.
    pub fn attach(config: &Config, node: &str, volume: Option<&str>, keeps: &str) -> Result<Self> {
        let (source, node, volume) = Source::of(config, node, volume)?;
        let files = ReaderFiles {
            name: volume.name.clone(),
            node: node.name.clone(),
            directory: layout::data_dir(node, &volume.name),
            source,
            links: Mutex::default(),
            listing: Mutex::new(Listing {
                keeps: keeps.to_owned(),
                ..Listing::default()
            }),
            loading: Mutex::default(),
        };
        files.refresh(ATTACH)?;
        Ok(files)
    }

    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's name.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Where the node keeps the volume's files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Shows `f` the files as of the LSN that the node shows now.
    ///
    /// # Errors
    /// What the node, or the system, says, if that is so for a second, or the node is silent for
    /// half a minute.
    pub fn look<T>(&self, f: impl FnOnce(&Listing) -> T) -> Result<T> {
        self.refresh(PATIENCE)?;
        Ok(f(&lock(&self.listing)))
    }

    /// Bytes of a file as of one LSN, up to its end; none if there is no such file any more.
    ///
    /// # Errors
    /// As of [`ReaderFiles::look`].
    pub fn read(&self, file: u32, range: Range<u64>) -> Result<Option<Vec<u8>>> {
        self.patiently(PATIENCE, |link| {
            let mut mark = lock(&self.listing).mark;
            let got = piece(link, &mut mark, file, range.clone(), |asked, answer| {
                self.take(asked, answer);
                Ok(true)
            })?;
            Ok(match got {
                Got::Bytes(p) => Some(Some(p.bytes)),
                Got::NoFile => Some(None),
                Got::Interrupted => None,
            })
        })
    }

    /// Whether there is such a file.
    ///
    /// # Errors
    /// As of [`ReaderFiles::look`].
    pub fn has(&self, file: u32) -> Result<bool> {
        self.patiently(PATIENCE, |link| {
            let asked = lock(&self.listing).mark;
            let answer = link.ask(asked, Duration::ZERO, Which::Numbered(file), 0, 0)?;
            self.take(asked, &answer);
            Ok(Some(answer.file.is_some()))
        })
    }

    /// Calls `f` with a link until it has an answer, for a bounded time.
    fn patiently<T>(
        &self,
        patience: Duration,
        mut f: impl FnMut(&mut Link) -> Result<Option<T>>,
    ) -> Result<T> {
        let link = lock(&self.links).pop();
        let mut link = link.unwrap_or_else(|| Link::new(&self.source));
        let begun = self.source.now();
        let done = loop {
            let late = self.source.now() >= begun + patience;
            let silent = self.source.now() >= begun + SLOW;
            match f(&mut link) {
                Ok(Some(t)) => break Ok(t),
                Ok(None) if late => {
                    break Err(Error::Busy(format!(
                        "volume {} changes on node {} faster than it is read",
                        self.name, self.node
                    )));
                }
                Ok(None) => {}
                Err(Error::Timeout(_)) if !silent => {}
                Err(e) if late || is_final(&e) => break Err(e),
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        lock(&self.links).push(link);
        done
    }

    fn refresh(&self, patience: Duration) -> Result<()> {
        self.patiently(patience, |link| {
            let asked = lock(&self.listing).mark;
            let answer = link.ask(asked, Duration::ZERO, Which::None, 0, 0)?;
            self.take(asked, &answer);
            if lock(&self.listing).whole {
                return Ok(Some(()));
            }
            let _one = lock(&self.loading);
            if !lock(&self.listing).whole && !self.load(link)? {
                return Ok(None);
            }
            Ok(Some(()))
        })
    }

    /// Takes in what an answer to a question that was asked at `asked` says of all files.
    fn take(&self, asked: Mark, answer: &Answer) {
        let mut l = lock(&self.listing);
        if asked.life != l.mark.life {
            return;
        }
        match &answer.records {
            Some(records) if l.whole && answer.mark.lsn > l.mark.lsn => {
                // If they are none, everything is asked anew.
                l.whole &= l.advance(records, answer.mark).is_ok();
            }
            Some(_) => {}
            None => {
                let life = l.mark.life + 1;
                l.mark = Mark {
                    life,
                    ..answer.mark
                };
                l.whole = false;
            }
        }
    }

    /// Asks for everything. False if the node's answers do not follow each other.
    fn load(&self, link: &mut Link) -> Result<bool> {
        let (before, keeps, version) = {
            let l = lock(&self.listing);
            (l.mark, l.keeps.clone(), l.version)
        };
        let mut new = Listing {
            keeps,
            version: version + 1,
            ..Listing::default()
        };
        // The node has other bytes than that, and says no more than where it is.
        let mut mark = Mark {
            rewritten: !before.rewritten,
            ..before
        };
        let mut from = Some(0);
        while let Some(number) = from {
            let answer = link.ask(mark, Duration::ZERO, Which::From(number), 0, 0)?;
            match &answer.records {
                Some(records) if number > 0 => new.advance(records, answer.mark)?,
                None if number == 0 => (new.mark, new.lsn) = (answer.mark, answer.mark.lsn),
                _ => return Ok(false),
            }
            mark = answer.mark;
            from = answer.files.last().and_then(|f| f.0.checked_add(1));
            new.files.extend(answer.files);
        }
        new.whole = true;
        let kept = new.files.iter().find(|(_, f)| f.name == new.keeps);
        if let Some((&id, _)) = kept {
            let got = piece(link, &mut mark, id, 0..u64::MAX, |_, a| match &a.records {
                Some(records) => new.advance(records, a.mark).map(|()| true),
                None => Ok(false),
            });
            let Got::Bytes(piece) = got? else {
                return Ok(false);
            };
            new.kept = Some(piece);
        }
        if !new.whole {
            return Ok(false);
        }
        let mut l = lock(&self.listing);
        new.mark.life = l.mark.life + 1;
        *l = new;
        Ok(true)
    }
}

/// Asks for bytes of a file, question by question, and moves those that came first on to the LSN
/// of those that come last. `heard` is told each answer, with what was shown when it was asked
/// for; false interrupts. `mark` is what is shown by then.
fn piece(
    link: &mut Link,
    mark: &mut Mark,
    file: u32,
    range: Range<u64>,
    mut heard: impl FnMut(Mark, &Answer) -> Result<bool>,
) -> Result<Got> {
    let (from, mut size) = (range.start, u64::MAX);
    let mut piece: Option<Piece> = None;
    loop {
        let at = from + piece.as_ref().map_or(0, |p| p.bytes.len() as u64);
        let left = range.end.min(size).saturating_sub(at);
        if let Some(mut p) = piece.take_if(|_| left == 0) {
            p.bytes.truncate(p.size.saturating_sub(from) as usize);
            return Ok(Got::Bytes(p));
        }
        let pages = left.div_ceil(PAGE as u64).min(READ_PAGES);
        let asked = *mark;
        let answer = link.ask(asked, Duration::ZERO, Which::Numbered(file), at, pages)?;
        *mark = answer.mark;
        if !heard(asked, &answer)? {
            return Ok(Got::Interrupted);
        }
        let Some((_, known)) = answer.file else {
            return Ok(Got::NoFile);
        };
        if let Some(p) = &mut piece {
            let Some(records) = &answer.records else {
                return Ok(Got::Interrupted);
            };
            for_each_op(asked, records, |op, payload| {
                if op.file == file {
                    p.change(op, payload);
                }
            })?;
        }
        let p = piece.get_or_insert(Piece {
            file,
            from,
            size: 0,
            bytes: Vec::new(),
        });
        size = known.size;
        p.size = size;
        let new = answer.bytes.len().min(left as usize);
        p.bytes.extend_from_slice(&answer.bytes[..new]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(file: u32, kind: OpKind, offset: u64, payload: &[u8]) -> Op {
        let len = payload.len() as u32;
        Op {
            file,
            kind,
            offset,
            len,
        }
    }

    /// A part of a file, and the file itself, through all lengths and places of what changes it.
    #[test]
    fn a_piece_is_what_the_file_has_there() {
        let old: Vec<u8> = (1..=20).collect();
        let range = 5..13;
        let changes = (0..=24).flat_map(|at| (0..=24).map(move |len| (at, len)));
        for (at, len) in changes {
            let mut file = old.clone();
            let mut piece = Piece {
                file: 1,
                from: range.start as u64,
                size: file.len() as u64,
                bytes: file[range.clone()].to_vec(),
            };
            // Written, cut, made longer, written again.
            for (size, fill) in [(20, 100), (at, 101), (24, 102)] {
                piece.change(op(1, OpKind::Resize, size as u64, b""), b"");
                file.resize(size, 0);
                let bytes = vec![fill; len];
                piece.change(op(1, OpKind::Write, at as u64, &bytes), &bytes);
                let end = (at + len).min(size);
                if at < end {
                    file[at..end].fill(fill);
                }
                let mut want = file.clone();
                want.resize(24, 0);
                assert_eq!(piece.bytes, want[range.clone()], "{at} {len} {size}");
            }
        }
    }

    #[test]
    fn a_listing_follows_names_and_sizes() {
        let mut l = Listing {
            whole: true,
            keeps: "kept".into(),
            ..Listing::default()
        };
        let mut change = |file, kind, offset, name: &str| {
            l.change(op(file, kind, offset, name.as_bytes()), name.as_bytes());
            let files = l.files().map(|(id, n, size)| format!("{id} {n} {size}"));
            (files.collect::<Vec<_>>().join(", "), l.whole, l.version())
        };
        let all = |s: &str, whole, version| (s.to_owned(), whole, version);
        assert_eq!(change(7, OpKind::Create, 0, "f"), all("7 f 0", true, 1));
        assert_eq!(change(7, OpKind::Resize, 9, ""), all("7 f 9", true, 2));
        // Other bytes are no part of it.
        assert_eq!(change(7, OpKind::Write, 0, "xy"), all("7 f 9", true, 2));
        let two = "3 g 0, 7 f 9";
        assert_eq!(change(3, OpKind::Create, 0, "g"), all(two, true, 3));
        assert_eq!(change(3, OpKind::Rename, 0, "f"), all("3 f 0", true, 4));
        assert!(!change(3, OpKind::Rename, 0, "kept").1);
        assert_eq!(change(3, OpKind::Remove, 0, ""), all("", false, 6));
    }
}
