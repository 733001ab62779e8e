//! The shipped engine as a system to be cut off: one unreplicated volume with its logs in
//! persistent memory.
//!
//! Owns the steps that the engine is made to take, and the model of each.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mojim_config::{MediumKind, WriteBack};
use mojim_env::locks::lock;
use mojim_env::{Env, Locker};
use mojim_format::State;
use mojim_protocol::AckRule;
use mojim_replica::pace::Pace;
use mojim_replica::piece::Piece;
use mojim_replica::primary::{Primary, PrimarySpec};
use mojim_store::log::LogSpec;
use mojim_store::store::{Store, StoreSpec};

use super::medium::Shadow;
use super::model::{Broken, Content, Model, Named, System};
use crate::rng::Rng;

const LANES: usize = 2;
/// So small that the log wraps after some dozens of sync points.
const LOG: u64 = 8192;
const MAX_RECORD: usize = 1024;
/// The greatest length of a file, in bytes.
const FILE: u64 = 6144;
const FILES: u64 = 5;

pub(super) struct Engine {
    primary: Primary,
    /// Sync points that were appended and not waited for.
    open: Vec<u64>,
    next_file: u32,
}

fn spec() -> StoreSpec {
    let root = PathBuf::from("/a");
    let log = |lane| LogSpec {
        lane,
        medium: MediumKind::Pmem,
        path: root.join(format!("logs/log.{lane}")),
        ring: PathBuf::new(),
        size: LOG,
    };
    StoreSpec {
        cluster: "c".into(),
        volume: "v".into(),
        node: "a".into(),
        dir: root.join("data"),
        meta: root.join("meta"),
        logs: (0..LANES).map(log).collect(),
        rank: 0,
        holders: 2,
        max_open: 3,
        copy_streams: 1,
        by_hand: true,
        locker: Locker::Program,
    }
}

fn primary_spec() -> PrimarySpec {
    PrimarySpec {
        rule: AckRule::LOCAL,
        background_send: false,
        spin: Duration::ZERO,
        resend_timeout: Duration::from_millis(1),
        resend_attempts: 1,
        max_record: MAX_RECORD,
        checkpoint_threshold: 4,
        write_back: WriteBack::Eager,
        write_back_pages: 1,
        smallest_log: LOG,
        secondary_threshold: 0,
    }
}

/// One change, which owns its bytes.
enum OwnedPiece {
    Write(u32, u64, Vec<u8>),
    Create(u32, String),
    Resize(u32, u64),
    Remove(u32),
    Rename(u32, String),
}

impl OwnedPiece {
    fn piece(&self) -> Piece<'_> {
        match self {
            OwnedPiece::Write(file, offset, bytes) => Piece::Write {
                file: *file,
                offset: *offset,
                ptr: bytes.as_ptr(),
                len: bytes.len(),
            },
            OwnedPiece::Create(file, name) => Piece::Create { file: *file, name },
            OwnedPiece::Resize(file, size) => Piece::Resize {
                file: *file,
                size: *size,
            },
            OwnedPiece::Remove(file) => Piece::Remove { file: *file },
            OwnedPiece::Rename(file, name) => Piece::Rename { file: *file, name },
        }
    }

    fn apply(&self, content: &mut Content) {
        let name_of = |content: &Content, file: u32| {
            let mut found = content.iter().filter(|(_, f)| f.id == file);
            found.next().expect("a file that is there").0.clone()
        };
        let bytes_of = |content: &mut Content, file: u32, f: &dyn Fn(&mut Vec<u8>)| {
            let name = name_of(content, file);
            f(Arc::make_mut(
                &mut content.get_mut(&name).expect("found").bytes,
            ));
        };
        match self {
            OwnedPiece::Write(file, offset, new) => bytes_of(content, *file, &|b| {
                b[*offset as usize..][..new.len()].copy_from_slice(new);
            }),
            OwnedPiece::Resize(file, size) => bytes_of(content, *file, &|b| {
                b.resize(*size as usize, 0);
            }),
            OwnedPiece::Create(id, name) => {
                let file = Named {
                    id: *id,
                    bytes: Arc::default(),
                };
                content.insert(name.clone(), file);
            }
            OwnedPiece::Remove(file) => {
                content.remove(&name_of(content, *file));
            }
            OwnedPiece::Rename(file, name) => {
                let file = content.remove(&name_of(content, *file)).expect("found");
                content.insert(name.clone(), file);
            }
        }
    }
}

pub(super) fn text(e: mojim_env::Error) -> String {
    format!("lost: refused: {e}")
}

fn found(store: &Store) -> Result<(u64, Content), String> {
    let mut area = store.area();
    let files: Vec<_> = area.files().cloned().collect();
    let mut content = Content::new();
    for f in files {
        let mut bytes = vec![0; f.size as usize];
        let n = area.read(f.id, 0, &mut bytes).map_err(text)?;
        if n < bytes.len() {
            return Err(format!("torn: {} has {n} of {} bytes", f.name, f.size));
        }
        let bytes = Arc::new(bytes);
        content.insert(f.name, Named { id: f.id, bytes });
    }
    Ok((store.applied(), content))
}

/// Starts a primary over what is there.
pub(super) fn start(env: &Arc<Shadow>) -> Result<Primary, String> {
    start_broken(env, None)
}

fn start_broken(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<Primary, String> {
    let env: Arc<dyn Env> = env.clone();
    let store = Store::open(&env, spec()).map_err(text)?;
    match broken {
        Some(Broken::AckEarly) => store.mutations.ack_early.set(true),
        Some(Broken::ApplyBeforeLog) => store.mutations.apply_before_log.set(true),
        _ => {}
    }
    let primary = Primary::new(Arc::new(store), primary_spec());
    primary.begin_unreplicated("a").map_err(text)?;
    Ok(primary)
}

/// What a recovery finds. Does everything that touches the medium, except to begin an epoch: making
/// a primary's own tables would cost more time than the rest.
pub(super) fn read_back(env: &Arc<Shadow>) -> Result<(u64, Content), String> {
    let env: Arc<dyn Env> = env.clone();
    let store = Store::open(&env, spec()).map_err(text)?;
    store.check_complete().map_err(text)?;
    if store.superblock().state == State::Empty {
        return Ok((0, Content::new()));
    }
    store.apply_all(store.tail()).map_err(text)?;
    found(&store)
}

impl System for Engine {
    fn open(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<Engine, String> {
        let primary = start_broken(env, broken)?;
        let next_file = primary.store.area().next_id();
        Ok(Engine {
            primary,
            open: Vec::new(),
            next_file,
        })
    }

    fn found(&self) -> Result<(u64, Content), String> {
        found(&self.primary.store)
    }

    fn recovered(env: &Arc<Shadow>, _: Option<Broken>) -> Result<(u64, Content), String> {
        read_back(env)
    }

    fn step(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String> {
        let now = lock(model).last().clone();
        if now.is_empty() {
            return self.commit(&[self.create(rng), self.size(rng)], rng, model);
        }
        match rng.below(20) {
            0..=8 => {
                let changes: Vec<_> = (0..rng.between(1, 3))
                    .filter_map(|_| write(&now, 1, 24, rng))
                    .collect();
                self.commit(&changes, rng, model)
            }
            9 | 10 => self.write(&now, 1, 100, 900, rng, model),
            11 => self.write(&now, 2, 700, 1200, rng, model),
            12 | 13 => {
                let changes = self.names(&now, rng);
                self.commit(&changes, rng, model)
            }
            14 | 15 => {
                let idle = rng.coin();
                self.primary
                    .checkpoint_step(if idle { Pace::Idle } else { Pace::Busy })
                    .map_err(text)?;
                Ok(())
            }
            16 | 17 => {
                let lane = rng.below(LANES as u64) as usize;
                self.primary.persist_wait(lane).map_err(text)
            }
            18 => self.wait_all(model),
            _ => self.spill(&now, rng, model),
        }
    }

    fn end(&mut self, model: &Model) -> Result<(), String> {
        self.wait_all(model)?;
        let p = &self.primary;
        while p.store.applied() < p.last() {
            p.checkpoint_step(Pace::Idle).map_err(text)?;
        }
        p.store.close_clean(p.last()).map_err(text)
    }
}

fn write(now: &Content, least: u64, most: u64, rng: &mut Rng) -> Option<OwnedPiece> {
    let files: Vec<_> = now.values().filter(|f| !f.bytes.is_empty()).collect();
    if files.is_empty() {
        return None;
    }
    let f = rng.pick(&files);
    let size = f.bytes.len() as u64;
    let len = rng.between(least, most).min(size);
    let at = rng.between(0, size - len);
    let bytes = (0..len).map(|_| rng.next_u64() as u8).collect();
    Some(OwnedPiece::Write(f.id, at, bytes))
}

impl Engine {
    fn create(&self, rng: &mut Rng) -> OwnedPiece {
        OwnedPiece::Create(self.next_file, format!("f{}", rng.below(FILES)))
    }

    fn size(&self, rng: &mut Rng) -> OwnedPiece {
        OwnedPiece::Resize(self.next_file, rng.between(1, FILE))
    }

    /// Draws a change of names or sizes.
    fn names(&mut self, now: &Content, rng: &mut Rng) -> Vec<OwnedPiece> {
        let files: Vec<_> = now.iter().collect();
        let (name, file) = *rng.pick(&files);
        let free = (0..FILES).map(|n| format!("f{n}"));
        let free: Vec<_> = free.filter(|n| !now.contains_key(n)).collect();
        match rng.below(4) {
            0 if !free.is_empty() => vec![
                OwnedPiece::Create(self.next_file, rng.pick(&free).clone()),
                self.size(rng),
            ],
            1 if files.len() > 1 => vec![OwnedPiece::Remove(file.id)],
            2 => {
                // The new name may be that of another file, which is then replaced.
                let to = format!("f{}", rng.below(FILES));
                match to == *name {
                    true => vec![OwnedPiece::Resize(file.id, rng.between(1, FILE))],
                    false => vec![OwnedPiece::Rename(file.id, to)],
                }
            }
            _ => vec![OwnedPiece::Resize(file.id, rng.between(1, FILE))],
        }
    }

    fn write(
        &mut self,
        now: &Content,
        pieces: u64,
        least: u64,
        most: u64,
        rng: &mut Rng,
        model: &Model,
    ) -> Result<(), String> {
        let changes: Vec<_> = (0..pieces)
            .filter_map(|_| write(now, least, most, rng))
            .collect();
        self.commit(&changes, rng, model)
    }

    /// Makes one sync point, and waits for it at once or later.
    fn commit(
        &mut self,
        changes: &[OwnedPiece],
        rng: &mut Rng,
        model: &Model,
    ) -> Result<(), String> {
        if changes.is_empty() {
            return Ok(());
        }
        let pieces: Vec<_> = changes.iter().map(OwnedPiece::piece).collect();
        let lane = rng.below(LANES as u64) as usize;
        let mut appended = None;
        for _ in 0..3 {
            appended = self.primary.try_append_now(&pieces, lane).map_err(text)?;
            if appended.is_some() {
                break;
            }
            self.wait_all(model)?;
            self.primary.checkpoint_step(Pace::Idle).map_err(text)?;
        }
        let lsn = appended.ok_or("stuck: no room after a checkpoint")?.lsn;
        self.note(lsn, changes, model);
        self.open.push(lsn);
        match rng.below(5) {
            0 | 1 => Ok(()),
            _ => self.wait(lsn, model),
        }
    }

    fn note(&mut self, lsn: u64, changes: &[OwnedPiece], model: &Model) {
        let mut m = lock(model);
        let mut content = m.last().clone();
        for c in changes {
            c.apply(&mut content);
            if let OwnedPiece::Create(id, _) = c {
                self.next_file = id + 1;
            }
        }
        m.states.push((lsn, content));
    }

    /// Makes a sync point that is larger than the log can take, which goes through a
    /// spill file.
    fn spill(&mut self, now: &Content, rng: &mut Rng, model: &Model) -> Result<(), String> {
        let changes: Vec<_> = (0..2).filter_map(|_| write(now, 2000, 3000, rng)).collect();
        let len: usize = changes.iter().map(|c| c.piece().len()).sum();
        if !self.primary.is_too_large(len) {
            return Ok(());
        }
        self.wait_all(model)?;
        self.primary.checkpoint_step(Pace::Idle).map_err(text)?;
        // The sync point is on its way before its LSN is known here.
        self.note(self.primary.last() + 1, &changes, model);
        let pieces: Vec<_> = changes.iter().map(OwnedPiece::piece).collect();
        let begun = self.primary.begin_commit(&pieces).map_err(text)?;
        self.primary.finish_commit(&begun).map_err(text)?;
        lock(model).acked = begun.lsn;
        Ok(())
    }

    fn wait(&mut self, lsn: u64, model: &Model) -> Result<(), String> {
        self.primary.wait(lsn).map_err(text)?;
        let mut m = lock(model);
        m.acked = m.acked.max(lsn);
        Ok(())
    }

    fn wait_all(&mut self, model: &Model) -> Result<(), String> {
        for lsn in std::mem::take(&mut self.open) {
            self.wait(lsn, model)?;
        }
        Ok(())
    }
}
