//! The network between nodes: byte streams that are late, cut or silent.
//!
//! Owns connections, listeners and partitions.
//!
//! Invariants:
//! - One end receives a prefix of what the other sent, in order,
//!   whatever happens to the connection.
//! - Time moves only in [`Net::run`].
//! - A byte arrives at the time that was drawn for it when it was sent, never earlier than
//!   the byte before it.
//! - A machine without power answers nothing. Once it runs again, it answers bytes of its
//!   old connections with a reset.

use crate::ctx::Ctx;
use crate::rng::Rng;
use mojim_env::{Address, Memory};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::path::PathBuf;
use std::time::Duration;

/// Later than everything: the time of bytes that wait for a partition to heal.
const NEVER: Duration = Duration::MAX;
/// The time after which a connection attempt is repeated.
const RETRY: Duration = Duration::from_secs(1);

/// An address that can be sorted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Tcp(std::net::SocketAddr),
    Unix(PathBuf),
}

impl From<&Address> for Key {
    fn from(address: &Address) -> Key {
        match address {
            Address::Tcp(a) => Key::Tcp(*a),
            Address::Unix(p) => Key::Unix(p.clone()),
        }
    }
}

#[derive(Debug)]
struct Chunk {
    at: Duration,
    bytes: Vec<u8>,
    read: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Flow {
    Open,
    /// Everything sent vanishes, for good.
    Silent,
    /// A partition has held everything up since this time.
    Held(Duration),
}

/// What is on its way to one end.
struct Pipe {
    chunks: VecDeque<Chunk>,
    memories: VecDeque<(Duration, Memory)>,
    /// Bytes sent and not yet received by the process, or vanished.
    queued: usize,
    /// When the last of them arrives.
    last: Duration,
    flow: Flow,
    eof: Option<Duration>,
    /// A partition holds up the end of the stream.
    eof_held: bool,
}

impl Pipe {
    fn new() -> Pipe {
        Pipe {
            chunks: VecDeque::new(),
            memories: VecDeque::new(),
            queued: 0,
            last: Duration::ZERO,
            flow: Flow::Open,
            eof: None,
            eof_held: false,
        }
    }

    fn ready(&self, now: Duration) -> bool {
        self.chunks.front().is_some_and(|c| c.at <= now)
    }

    /// Loses the bytes in flight, from a random byte on.
    fn cut(&mut self, now: Duration, rng: &mut Rng) {
        while self.chunks.back().is_some_and(|c| c.at == NEVER) {
            self.chunks.pop_back();
        }
        let flying = |c: &&Chunk| c.at > now;
        let total: usize = self
            .chunks
            .iter()
            .filter(flying)
            .map(|c| c.bytes.len())
            .sum();
        let mut left = rng.between(0, total as u64) as usize;
        self.chunks.retain_mut(|c| {
            if c.at <= now {
                return true;
            }
            let n = left.min(c.bytes.len());
            c.bytes.truncate(n);
            left -= n;
            n > 0
        });
        self.last = self.chunks.back().map_or(now, |c| c.at.max(now));
        self.memories.retain(|(at, _)| *at <= now);
    }

    /// Sends the first `n` bytes of `bufs`, in one piece or several.
    fn take(&mut self, bufs: &[IoSlice<'_>], n: usize, ctx: &mut Ctx) {
        let mut slices = bufs.iter().map(|b| &b[..]);
        let mut slice: &[u8] = &[];
        let mut left = n;
        while left > 0 {
            let mut m = left;
            if left > 1 && ctx.fault(ctx.faults.split, "split sends") {
                m = ctx.rng.between(1, left as u64 - 1) as usize;
            }
            let at = match self.flow {
                Flow::Held(_) => NEVER,
                _ => self.last.max(ctx.now + delay(ctx)),
            };
            let mut bytes = Vec::with_capacity(m);
            while bytes.len() < m {
                if slice.is_empty() {
                    slice = slices.next().expect("n bytes in all");
                    continue;
                }
                let k = slice.len().min(m - bytes.len());
                bytes.extend_from_slice(&slice[..k]);
                slice = &slice[k..];
            }
            if ctx.faults.rot > 0 && ctx.fault(ctx.faults.rot, "flipped bits") {
                let bit = ctx.rng.below(8 * m as u64) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            self.chunks.push_back(Chunk { at, bytes, read: 0 });
            if at != NEVER {
                self.last = at;
            }
            left -= m;
        }
    }

    fn clear(&mut self) {
        self.chunks.clear();
        self.memories.clear();
    }
}

struct End {
    node: usize,
    /// A process holds it.
    open: bool,
    /// Its machine lost power since the connection was made.
    powered_off: bool,
    /// When its handshake is complete.
    connected: Duration,
    broken: Option<(Duration, ErrorKind)>,
    inbox: Pipe,
}

impl End {
    fn new(node: usize, open: bool, connected: Duration) -> End {
        End {
            node,
            open,
            powered_off: false,
            connected,
            broken: None,
            inbox: Pipe::new(),
        }
    }

    fn error(&self, now: Duration) -> Option<io::Error> {
        match self.broken {
            Some((at, kind)) if at <= now => Some(kind.into()),
            _ => None,
        }
    }
}

struct Connection {
    /// The caller's end, and the listener's.
    ends: [End; 2],
    to: Key,
    begun: Duration,
}

struct Listener {
    node: usize,
    id: u64,
    queue: VecDeque<u64>,
}

/// All connections of a world.
#[derive(Default)]
pub(crate) struct Net {
    /// By number; never reused.
    conns: Vec<Option<Box<Connection>>>,
    listeners: BTreeMap<Key, Listener>,
    next_listener: u64,
    owners: BTreeMap<Key, usize>,
    up: Vec<bool>,
    blocked: BTreeSet<(usize, usize)>,
    /// Connection attempts, with the time at which each arrives.
    attempts: BTreeSet<(Duration, u64)>,
}

/// A chunk's time on the wire.
fn delay(ctx: &mut Ctx) -> Duration {
    let f = &ctx.faults;
    let (low, high) = (f.delay_min.as_nanos() as u64, f.delay_max.as_nanos() as u64);
    let slow = f.slow;
    let mut d = match low < high {
        true => ctx.rng.between(low, high),
        false => low,
    };
    if ctx.fault(slow, "delays") {
        d = d.saturating_mul(ctx.rng.between(10, 1000));
    }
    Duration::from_nanos(d)
}

impl Net {
    pub(crate) fn add_node(&mut self) {
        self.up.push(true);
    }

    fn conn(&mut self, id: u64) -> Option<&mut Connection> {
        self.conns.get_mut(id as usize)?.as_deref_mut()
    }

    fn live(&mut self, id: u64, e: usize) -> io::Result<&mut Connection> {
        match self.conn(id) {
            Some(c) if c.ends[e].open => Ok(c),
            _ => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Whether a packet of end `e` gets to the other end's machine.
    fn reaches(&self, c: &Connection, e: usize) -> bool {
        let (from, to) = (&c.ends[e], &c.ends[1 - e]);
        !self.blocked.contains(&(from.node, to.node))
            && self.up[from.node]
            && self.up[to.node]
            && to.inbox.flow != Flow::Silent
    }

    pub(crate) fn listen(&mut self, node: usize, at: &Address) -> io::Result<u64> {
        let key = Key::from(at);
        if self.listeners.contains_key(&key) {
            return Err(ErrorKind::AddrInUse.into());
        }
        self.next_listener += 1;
        let id = self.next_listener;
        self.owners.insert(key.clone(), node);
        let queue = VecDeque::new();
        self.listeners.insert(key, Listener { node, id, queue });
        Ok(id)
    }

    /// The next connection that has arrived.
    pub(crate) fn accept(&mut self, at: &Address, id: u64) -> io::Result<Option<u64>> {
        let listener = self.listeners.get_mut(&Key::from(at));
        let Some(listener) = listener.filter(|l| l.id == id) else {
            return Err(ErrorKind::NotConnected.into());
        };
        while let Some(conn) = listener.queue.pop_front() {
            if let Some(Some(_)) = self.conns.get(conn as usize) {
                return Ok(Some(conn));
            }
        }
        Ok(None)
    }

    pub(crate) fn unlisten(&mut self, at: &Address, id: u64, ctx: &mut Ctx) {
        let key = Key::from(at);
        if self.listeners.get(&key).is_some_and(|l| l.id == id) {
            let listener = self.listeners.remove(&key).expect("just found");
            for conn in listener.queue {
                self.close(conn, 1, ctx);
            }
        }
    }

    pub(crate) fn connect(&mut self, node: usize, to: &Address, ctx: &mut Ctx) -> u64 {
        let id = self.conns.len() as u64;
        let mut ends = [End::new(node, true, NEVER), End::new(node, false, NEVER)];
        let at = ctx.now + delay(ctx);
        if ctx.fault(ctx.faults.connect_refused, "refused connects") {
            ends[0].broken = Some((at, ErrorKind::ConnectionRefused));
        } else {
            self.attempts.insert((at, id));
        }
        self.conns.push(Some(Box::new(Connection {
            ends,
            to: to.into(),
            begun: ctx.now,
        })));
        self.run(ctx);
        id
    }

    /// Lets everything happen that is due by now.
    pub(crate) fn run(&mut self, ctx: &mut Ctx) {
        let now = ctx.now;
        while let Some((at, id)) = self.attempts.first().copied() {
            if at > now {
                break;
            }
            self.attempts.pop_first();
            ctx.now = at;
            self.attempt(id, ctx);
        }
        ctx.now = now;
    }

    fn attempt(&mut self, id: u64, ctx: &mut Ctx) {
        let now = ctx.now;
        let Some(c) = self.conn(id).filter(|c| c.ends[0].open) else {
            return;
        };
        let (from, begun, key) = (c.ends[0].node, c.begun, c.to.clone());
        let owner = match self.listeners.get(&key) {
            Some(l) => Some(l.node),
            None => self.owners.get(&key).copied(),
        };
        if let Some(to) = owner {
            let cut = self.blocked.contains(&(from, to)) || self.blocked.contains(&(to, from));
            if cut || !self.up[to] {
                ctx.hit("lost connects");
                if now.saturating_sub(begun) < ctx.faults.retransmit_limit {
                    self.attempts.insert((now + RETRY, id));
                } else if let Some(c) = self.conn(id) {
                    c.ends[0].broken = Some((now, ErrorKind::TimedOut));
                }
                return;
            }
        }
        let back = now + delay(ctx);
        if let Some(listener) = self.listeners.get_mut(&key) {
            listener.queue.push_back(id);
            let node = listener.node;
            let c = self.conn(id).expect("found above");
            c.ends[0].connected = back;
            c.ends[1] = End::new(node, true, now);
        } else {
            let c = self.conn(id).expect("found above");
            c.ends[0].broken = Some((back, ErrorKind::ConnectionRefused));
        }
    }

    /// The time of the next event after `now`, if there is one.
    pub(crate) fn next_event(&self, now: Duration) -> Option<Duration> {
        let mut next = NEVER;
        let mut see = |at: Duration| {
            if at > now && at < next {
                next = at;
            }
        };
        if let Some((at, _)) = self.attempts.first() {
            see(*at);
        }
        for end in self.conns.iter().flatten().flat_map(|c| &c.ends) {
            if end.open {
                see(end.connected);
                end.broken.iter().for_each(|b| see(b.0));
                end.inbox.eof.iter().for_each(|at| see(*at));
                // Chunks are in order, so the first that is still to come is the
                // earliest.
                let coming = end.inbox.chunks.iter().find(|c| c.at > now);
                coming.iter().for_each(|c| see(c.at));
                end.inbox.memories.iter().for_each(|m| see(m.0));
            }
        }
        (next != NEVER).then_some(next)
    }

    /// Breaks a connection that was held up for longer than TCP repeats its bytes.
    fn time_out(&mut self, id: u64, e: usize, ctx: &mut Ctx) {
        let limit = ctx.faults.retransmit_limit;
        if let Some(c) = self.conn(id)
            && let Flow::Held(since) = c.ends[1 - e].inbox.flow
            && c.ends[e].broken.is_none()
            && since + limit <= ctx.now
        {
            c.ends[e].broken = Some((since + limit, ErrorKind::TimedOut));
            let pipe = &mut c.ends[1 - e].inbox;
            pipe.cut(ctx.now, &mut ctx.rng);
            pipe.flow = Flow::Open;
            pipe.eof_held = false;
            ctx.hit("time-outs");
        }
    }

    pub(crate) fn send(
        &mut self,
        id: u64,
        e: usize,
        bufs: &[IoSlice<'_>],
        ctx: &mut Ctx,
    ) -> io::Result<usize> {
        self.time_out(id, e, ctx);
        let now = ctx.now;
        let c = self.live(id, e)?;
        if let Some(error) = c.ends[e].error(now) {
            return Err(error);
        }
        if c.ends[e].connected > now {
            return Err(ErrorKind::WouldBlock.into());
        }
        let total: usize = bufs.iter().map(|b| b.len()).sum();
        let room = ctx.faults.buffer.saturating_sub(c.ends[1 - e].inbox.queued);
        let mut n = total.min(room);
        if total == 0 {
            return Ok(0);
        }
        if n == 0 {
            ctx.hit("full buffers");
            return Err(ErrorKind::WouldBlock.into());
        }
        if n > 1 && ctx.fault(ctx.faults.short_send, "short sends") {
            n = ctx.rng.between(1, n as u64 - 1) as usize;
        }
        if ctx.fault(ctx.faults.half_open, "half-open") {
            c.ends[1 - e].inbox.flow = Flow::Silent;
            if ctx.rng.coin() {
                c.ends[e].inbox.flow = Flow::Silent;
            }
        }
        let (from, to) = (c.ends[e].node, c.ends[1 - e].node);
        let blocked = self.blocked.contains(&(from, to));
        let c = self.live(id, e)?;
        let peer = &mut c.ends[1 - e];
        if !peer.open {
            peer.inbox.queued += n;
            self.answer_reset(id, e, ctx);
            return Ok(n);
        }
        let pipe = &mut peer.inbox;
        pipe.queued += n;
        if pipe.flow == Flow::Silent {
            ctx.add("bytes vanished", n as u64);
            return Ok(n);
        }
        if blocked && pipe.flow == Flow::Open {
            pipe.flow = Flow::Held(now);
            ctx.hit("held streams");
        }
        pipe.take(bufs, n, ctx);
        if ctx.fault(ctx.faults.reset, "resets") {
            self.break_off(id, ctx);
        }
        Ok(n)
    }

    /// Bytes that `e` sent met no socket: the peer's machine answers with a reset, if it
    /// can.
    fn answer_reset(&mut self, id: u64, e: usize, ctx: &mut Ctx) {
        let Some(Some(c)) = self.conns.get(id as usize) else {
            return;
        };
        if !self.reaches(c, e) || !self.reaches(c, 1 - e) || c.ends[e].broken.is_some() {
            return;
        }
        let at = ctx.now + delay(ctx) + delay(ctx);
        let c = self.conn(id).expect("found above");
        let at = at.max(c.ends[e].inbox.last);
        c.ends[e].broken = Some((at, ErrorKind::ConnectionReset));
        ctx.hit("answered resets");
    }

    /// Resets a connection; bytes in flight are lost, from a random byte on.
    fn break_off(&mut self, id: u64, ctx: &mut Ctx) {
        for e in [0, 1] {
            let at = ctx.now + delay(ctx);
            let Some(c) = self.conn(id) else {
                return;
            };
            let end = &mut c.ends[e];
            end.inbox.cut(ctx.now, &mut ctx.rng);
            let at = at.max(end.inbox.last);
            end.inbox.eof = end.inbox.eof.filter(|eof| *eof <= ctx.now);
            end.inbox.eof_held = false;
            end.inbox.flow = Flow::Silent;
            if end.broken.is_none() {
                end.broken = Some((at, ErrorKind::ConnectionReset));
            }
        }
    }

    pub(crate) fn recv(
        &mut self,
        id: u64,
        e: usize,
        bufs: &mut [IoSliceMut<'_>],
        ctx: &mut Ctx,
    ) -> io::Result<usize> {
        self.time_out(id, e, ctx);
        let now = ctx.now;
        let end = &mut self.live(id, e)?.ends[e];
        let total: usize = bufs.iter().map(|b| b.len()).sum();
        if total == 0 {
            return Ok(0);
        }
        if !end.inbox.ready(now) || (end.connected > now && end.broken.is_none()) {
            if let Some(error) = end.error(now) {
                return Err(error);
            }
            return match end.inbox.eof {
                Some(at) if at <= now && end.connected <= now => Ok(0),
                _ => Err(ErrorKind::WouldBlock.into()),
            };
        }
        let mut limit = total;
        if limit > 1 && ctx.fault(ctx.faults.short_recv, "short receives") {
            let there = end
                .inbox
                .chunks
                .front()
                .map_or(0, |c| c.bytes.len() - c.read);
            limit = ctx.rng.between(1, limit.min(there) as u64) as usize;
        }
        let mut done = 0;
        let mut bufs = bufs.iter_mut();
        let mut buf: &mut [u8] = &mut [];
        while done < limit {
            if buf.is_empty() {
                match bufs.next() {
                    Some(next) => buf = next,
                    None => break,
                }
                continue;
            }
            let Some(chunk) = end.inbox.chunks.front_mut().filter(|c| c.at <= now) else {
                break;
            };
            let there = &chunk.bytes[chunk.read..];
            let n = there.len().min(buf.len()).min(limit - done);
            let (to, rest) = buf.split_at_mut(n);
            to.copy_from_slice(&there[..n]);
            buf = rest;
            done += n;
            chunk.read += n;
            if chunk.read == chunk.bytes.len() {
                end.inbox.chunks.pop_front();
            }
        }
        end.inbox.queued = end.inbox.queued.saturating_sub(done);
        Ok(done)
    }

    /// Whether a call would return something other than `WouldBlock` now.
    pub(crate) fn ready(
        &mut self,
        id: u64,
        e: usize,
        to_send: bool,
        ctx: &mut Ctx,
    ) -> io::Result<bool> {
        self.time_out(id, e, ctx);
        let (now, buffer) = (ctx.now, ctx.faults.buffer);
        let Ok(c) = self.live(id, e) else {
            return Ok(true);
        };
        let end = &c.ends[e];
        if end.error(now).is_some() {
            return Ok(true);
        }
        if end.connected > now {
            return Ok(false);
        }
        Ok(end.inbox.ready(now)
            || end.inbox.eof.is_some_and(|at| at <= now)
            || end.inbox.memories.front().is_some_and(|m| m.0 <= now)
            || (to_send && c.ends[1 - e].inbox.queued < buffer))
    }

    pub(crate) fn send_memory(
        &mut self,
        id: u64,
        e: usize,
        memory: &Memory,
        ctx: &mut Ctx,
    ) -> io::Result<()> {
        let at = ctx.now + delay(ctx);
        let c = self.live(id, e)?;
        if let Some(error) = c.ends[e].error(ctx.now) {
            return Err(error);
        }
        if c.ends[e].connected > ctx.now {
            return Err(ErrorKind::WouldBlock.into());
        }
        let (from, to) = (c.ends[e].node, c.ends[1 - e].node);
        let blocked = self.blocked.contains(&(from, to));
        let c = self.live(id, e)?;
        if !c.ends[1 - e].open {
            self.answer_reset(id, e, ctx);
            return Ok(());
        }
        let pipe = &mut c.ends[1 - e].inbox;
        if blocked && pipe.flow == Flow::Open {
            pipe.flow = Flow::Held(ctx.now);
        }
        let last = pipe.memories.back().map_or(at, |m| m.0.max(at));
        match pipe.flow {
            Flow::Silent => {}
            Flow::Held(_) => pipe.memories.push_back((NEVER, memory.clone())),
            Flow::Open => pipe.memories.push_back((last, memory.clone())),
        }
        Ok(())
    }

    pub(crate) fn recv_memory(
        &mut self,
        id: u64,
        e: usize,
        len: usize,
        now: Duration,
    ) -> io::Result<Memory> {
        let end = &mut self.live(id, e)?.ends[e];
        match end.inbox.memories.front() {
            Some((at, _)) if *at <= now => {}
            _ => {
                if let Some(error) = end.error(now) {
                    return Err(error);
                }
                return match end.inbox.eof {
                    Some(at) if at <= now => Err(ErrorKind::UnexpectedEof.into()),
                    _ => Err(ErrorKind::WouldBlock.into()),
                };
            }
        }
        let (_, memory) = end.inbox.memories.pop_front().expect("seen above");
        if memory.len() != len {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(memory)
    }

    pub(crate) fn close(&mut self, id: u64, e: usize, ctx: &mut Ctx) {
        let Ok(c) = self.live(id, e) else {
            return;
        };
        let unread = c.ends[e].inbox.ready(ctx.now);
        self.gone(id, e, unread, ctx);
    }

    /// No process holds end `e` any more; its machine tells the peer.
    fn gone(&mut self, id: u64, e: usize, reset: bool, ctx: &mut Ctx) {
        let at = ctx.now + delay(ctx);
        let Some(c) = self.conn(id) else {
            return;
        };
        c.ends[e].open = false;
        c.ends[e].inbox.clear();
        c.ends[e].inbox.queued = 0;
        let was_broken = c.ends[e].error(ctx.now).is_some();
        let (from, to) = (c.ends[e].node, c.ends[1 - e].node);
        let blocked = self.blocked.contains(&(from, to));
        let now = ctx.now;
        let Some(c) = self.conn(id) else {
            return;
        };
        let peer = &mut c.ends[1 - e];
        if peer.open && !was_broken {
            let pipe = &mut peer.inbox;
            if blocked && pipe.flow == Flow::Open {
                pipe.flow = Flow::Held(now);
            }
            let at = at.max(pipe.last);
            match pipe.flow {
                Flow::Silent => {}
                Flow::Held(_) => pipe.eof_held = true,
                Flow::Open if reset => {
                    if peer.broken.is_none() {
                        peer.broken = Some((at, ErrorKind::ConnectionReset));
                    }
                }
                Flow::Open => pipe.eof = Some(at),
            }
        }
        self.free(id);
    }

    fn free(&mut self, id: u64) {
        if self
            .conn(id)
            .is_some_and(|c| c.ends.iter().all(|e| !e.open))
        {
            self.conns[id as usize] = None;
        }
    }

    fn ids_of(&self, node: usize) -> Vec<(u64, usize)> {
        let conns = self.conns.iter().enumerate();
        conns
            .filter_map(|(id, c)| Some((id, c.as_ref()?)))
            .flat_map(|(id, c)| [0, 1].map(|e| (id as u64, e, &c.ends[e])))
            .filter(|(_, _, end)| end.open && end.node == node)
            .map(|(id, e, _)| (id, e))
            .collect()
    }

    /// The node's process dies; its kernel closes the process's connections.
    pub(crate) fn kill(&mut self, node: usize, ctx: &mut Ctx) {
        self.listeners.retain(|_, l| l.node != node);
        for (id, e) in self.ids_of(node) {
            let reset = ctx.rng.coin();
            ctx.hit(if reset {
                "resets by kill"
            } else {
                "ends by kill"
            });
            self.gone(id, e, reset, ctx);
        }
    }

    /// The node loses power: no peer is told.
    pub(crate) fn power_loss(&mut self, node: usize, ctx: &mut Ctx) {
        self.listeners.retain(|_, l| l.node != node);
        self.up[node] = false;
        // Also ends whose process had died before: their kernel is gone now.
        for c in self.conns.iter_mut().flatten() {
            for e in [0, 1] {
                if c.ends[e].node != node || (e == 1 && c.ends[1].connected == NEVER) {
                    continue;
                }
                let end = &mut c.ends[e];
                let flying = end.inbox.chunks.iter().filter(|c| c.at > ctx.now);
                end.inbox.queued = flying.map(|c| c.bytes.len()).sum();
                end.inbox.clear();
                end.open = false;
                end.powered_off = true;
                let peer = &mut c.ends[1 - e];
                let pipe = &mut peer.inbox;
                pipe.cut(ctx.now, &mut ctx.rng);
                pipe.eof = pipe.eof.filter(|at| *at <= ctx.now);
                pipe.eof_held = false;
                if let Flow::Held(_) = pipe.flow {
                    pipe.flow = Flow::Open;
                }
                // A reset that was still on its way is lost too.
                if peer.broken.is_some_and(|b| b.0 > ctx.now) {
                    peer.broken = None;
                }
                ctx.hit("silenced streams");
            }
        }
        for id in 0..self.conns.len() as u64 {
            self.free(id);
        }
    }

    /// The node's machine runs again: it answers bytes that its peers repeat.
    pub(crate) fn restart(&mut self, node: usize, ctx: &mut Ctx) {
        if std::mem::replace(&mut self.up[node], true) {
            return;
        }
        for id in 0..self.conns.len() as u64 {
            for e in [0, 1] {
                let repeats = self.conn(id).is_some_and(|c| {
                    let dead = &c.ends[1 - e];
                    c.ends[e].open && dead.powered_off && dead.node == node && dead.inbox.queued > 0
                });
                if repeats {
                    self.answer_reset(id, e, ctx);
                }
            }
        }
    }

    /// Whether packets from `a` to `b` are blocked.
    pub(crate) fn is_partitioned(&self, a: usize, b: usize) -> bool {
        self.blocked.contains(&(a, b))
    }

    /// Blocks packets from `a` to `b`, or lets them pass again.
    pub(crate) fn partition(&mut self, a: usize, b: usize, on: bool, ctx: &mut Ctx) {
        if on {
            if self.blocked.insert((a, b)) {
                ctx.hit("partitions");
            }
            return;
        }
        if !self.blocked.remove(&(a, b)) {
            return;
        }
        for id in 0..self.conns.len() as u64 {
            for e in [0, 1] {
                self.heal(id, e, a, b, ctx);
            }
        }
    }

    /// What end `e` sent into a partition arrives, or its connection breaks.
    fn heal(&mut self, id: u64, e: usize, a: usize, b: usize, ctx: &mut Ctx) {
        let now = ctx.now;
        let Some(c) = self.conn(id) else {
            return;
        };
        if (c.ends[e].node, c.ends[1 - e].node) != (a, b) {
            return;
        }
        let peer = &mut c.ends[1 - e];
        if !peer.open {
            if peer.inbox.queued > 0 {
                self.answer_reset(id, e, ctx);
            }
            return;
        }
        let Flow::Held(since) = peer.inbox.flow else {
            return;
        };
        if now.saturating_sub(since) >= ctx.faults.retransmit_limit
            || ctx.fault(250, "reset at heal")
        {
            self.break_off(id, ctx);
            return;
        }
        let pipe = &mut peer.inbox;
        pipe.flow = Flow::Open;
        for chunk in pipe.chunks.iter_mut().filter(|c| c.at == NEVER) {
            chunk.at = pipe.last.max(now + delay(ctx));
            pipe.last = chunk.at;
        }
        for memory in pipe.memories.iter_mut().filter(|m| m.0 == NEVER) {
            memory.0 = pipe.last.max(now + delay(ctx));
        }
        if std::mem::take(&mut pipe.eof_held) {
            pipe.eof = Some(pipe.last.max(now + delay(ctx)));
        }
    }

    /// Resets every connection between two nodes.
    pub(crate) fn reset(&mut self, a: usize, b: usize, ctx: &mut Ctx) {
        for id in 0..self.conns.len() as u64 {
            let between = self.conn(id).is_some_and(|c| {
                let (x, y) = (c.ends[0].node, c.ends[1].node);
                c.ends[1].connected != NEVER && ((x, y) == (a, b) || (y, x) == (a, b))
            });
            if between {
                ctx.hit("resets");
                self.break_off(id, ctx);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Faults, Rng, SimListener, World};
    use mojim_env::{Address, Conn, Env};
    use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;

    fn at() -> SocketAddr {
        "10.0.0.2:9".parse().unwrap()
    }

    fn pass(world: &World) {
        world.advance(Duration::from_secs(1));
    }

    /// Nodes `a` and `b`, and a connection from `a` to `b`.
    fn pair(world: &World) -> (Arc<dyn Conn>, Arc<dyn Conn>, SimListener) {
        world.env("b");
        let listener = world.listen("b", at()).unwrap();
        let a = world.env("a").connect(&Address::Tcp(at())).unwrap();
        world.advance(Duration::from_secs(10));
        let b = listener.accept().unwrap().unwrap();
        world.advance(Duration::from_secs(10));
        (a, b, listener)
    }

    fn send(conn: &Arc<dyn Conn>, bytes: &[u8]) -> io::Result<usize> {
        conn.send(&[IoSlice::new(bytes)])
    }

    fn recv(conn: &Arc<dyn Conn>) -> io::Result<Vec<u8>> {
        let mut buf = vec![0; 100_000];
        let n = conn.recv(&mut [IoSliceMut::new(&mut buf)])?;
        buf.truncate(n);
        Ok(buf)
    }

    fn kind<T>(result: io::Result<T>) -> ErrorKind {
        result.err().expect("an error").kind()
    }

    /// Both directions carry the bytes of numbers. What arrives is a prefix, and all of
    /// it if nothing breaks.
    #[test]
    fn streams_are_in_order_and_without_gaps() {
        let (mut broken, mut whole) = (0, 0);
        for seed in 0..150 {
            let mut rng = Rng::new(seed);
            let breaks = seed % 3 == 0;
            let faults = Faults {
                delay_max: Duration::from_millis(5),
                slow: 5,
                split: 300,
                short_send: 200,
                short_recv: 300,
                reset: if breaks { 20 } else { 0 },
                buffer: 5000,
                ..Faults::none()
            };
            let world = World::new(seed, faults);
            let (a, b, _listener) = pair(&world);
            let ends = [a, b];
            let stream: Vec<u8> = (0..60_000u32).map(|i| (i * 7 / 3) as u8).collect();
            let (mut sent, mut got) = ([0; 2], [0; 2]);
            let mut failed = [false; 2];
            for _ in 0..200_000 {
                let e = rng.below(2) as usize;
                if rng.coin() {
                    let end = (sent[e] + rng.below(3000) as usize).min(stream.len());
                    let mid = rng.between(sent[e] as u64, end as u64) as usize;
                    let bufs = [
                        IoSlice::new(&stream[sent[e]..mid]),
                        IoSlice::new(&stream[mid..end]),
                    ];
                    match ends[e].send(&bufs) {
                        Ok(n) => sent[e] += n,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(_) => failed[e] = true,
                    }
                } else {
                    let (mut x, mut y) = ([0; 100], [0; 3000]);
                    let mut bufs = [IoSliceMut::new(&mut x), IoSliceMut::new(&mut y)];
                    match ends[e].recv(&mut bufs) {
                        Ok(n) => {
                            let all = [&x[..], &y[..]].concat();
                            assert_eq!(all[..n], stream[got[e]..got[e] + n], "seed {seed}");
                            got[e] += n;
                            assert!(n > 0 && got[e] <= sent[1 - e]);
                        }
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                            failed[e] = true;
                        }
                    }
                }
                world.advance(Duration::from_micros(rng.below(1000)));
                if failed == [true; 2] || got == [stream.len(); 2] {
                    break;
                }
            }
            if breaks && failed[0] {
                broken += 1;
            } else if !breaks {
                assert_eq!(got, [stream.len(); 2], "seed {seed}");
                whole += 1;
            }
        }
        assert!(broken > 30 && whole == 100);
    }

    #[test]
    fn a_reset_loses_bytes_in_flight_from_some_point_on() {
        let (mut all, mut part) = (0, 0);
        for seed in 0..50 {
            let world = World::new(seed, Faults::none());
            let (a, b, _listener) = pair(&world);
            for _ in 0..3 {
                send(&a, b"x").unwrap();
            }
            world.reset_connections("b", "a");
            pass(&world);
            match recv(&b) {
                Ok(bytes) if bytes.len() == 3 => all += 1,
                Ok(bytes) => part += bytes.len(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            }
            assert_eq!(kind(recv(&b)), ErrorKind::ConnectionReset);
            assert_eq!(kind(send(&a, b"x")), ErrorKind::ConnectionReset);
        }
        assert!(all > 0 && part > 0);
    }

    #[test]
    fn bytes_take_their_time_and_a_full_buffer_blocks() {
        let world = World::new(1, Faults::none());
        let (a, b, _listener) = pair(&world);
        assert_eq!(send(&a, b"hello").unwrap(), 5);
        assert_eq!(kind(recv(&b)), ErrorKind::WouldBlock);
        assert!(!b.wait(false, Duration::from_secs(9)).unwrap());
        assert_eq!(
            world.next_event(),
            Some(world.now() + Duration::from_micros(20))
        );
        world.advance(Duration::from_micros(19));
        assert_eq!(kind(recv(&b)), ErrorKind::WouldBlock);
        world.advance(Duration::from_micros(1));
        assert!(b.wait(false, Duration::ZERO).unwrap());
        assert_eq!(recv(&b).unwrap(), b"hello");
        assert_eq!(world.next_event(), None);
        let big = vec![0; 300_000];
        assert_eq!(send(&a, &big).unwrap(), 256 << 10);
        assert_eq!(kind(send(&a, &big)), ErrorKind::WouldBlock);
        assert!(!a.wait(true, Duration::ZERO).unwrap());
        pass(&world);
        assert_eq!(recv(&b).unwrap().len(), 100_000);
        assert_eq!(send(&a, &big).unwrap(), 100_000);
    }

    #[test]
    fn a_close_is_the_end_after_all_bytes() {
        let world = World::new(1, Faults::none());
        let (a, b, _listener) = pair(&world);
        send(&a, b"bye").unwrap();
        drop(a);
        pass(&world);
        assert_eq!(recv(&b).unwrap(), b"bye");
        assert_eq!(recv(&b).unwrap(), b"");
        // `b` learns that nobody listens when it sends.
        send(&b, b"?").unwrap();
        pass(&world);
        assert_eq!(kind(send(&b, b"?")), ErrorKind::ConnectionReset);
        b.close();
        assert_eq!(kind(send(&b, b"?")), ErrorKind::NotConnected);
    }

    #[test]
    fn nobody_there_refuses_and_a_dead_machine_says_nothing() {
        let world = World::new(1, Faults::none());
        let env = world.env("a");
        let conn = env.connect(&Address::Tcp(at())).unwrap();
        assert_eq!(kind(send(&conn, b"x")), ErrorKind::WouldBlock);
        pass(&world);
        assert_eq!(kind(recv(&conn)), ErrorKind::ConnectionRefused);

        world.env("b");
        let _listener = world.listen("b", at()).unwrap();
        assert_eq!(kind(world.listen("a", at())), ErrorKind::AddrInUse);
        world.power_loss("b");
        let conn = env.connect(&Address::Tcp(at())).unwrap();
        pass(&world);
        assert_eq!(kind(recv(&conn)), ErrorKind::WouldBlock);
        // The attempt is repeated, and arrives once a process listens again.
        world.env("b");
        let listener = world.listen("b", at()).unwrap();
        for _ in 0..3 {
            pass(&world);
        }
        assert_eq!(send(&conn, b"x").unwrap(), 1);
        assert!(listener.accept().unwrap().is_some());
        assert!(listener.accept().unwrap().is_none());
    }

    #[test]
    fn a_killed_process_ends_its_connections() {
        let mut kinds = [0; 2];
        for seed in 0..40 {
            let world = World::new(seed, Faults::none());
            let (a, b, _listener) = pair(&world);
            send(&b, b"last").unwrap();
            world.kill("b");
            assert!(crate::is_crash(&send(&b, b"x").unwrap_err()));
            pass(&world);
            assert_eq!(recv(&a).unwrap(), b"last");
            match recv(&a) {
                Ok(bytes) if bytes.is_empty() => kinds[0] += 1,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => kinds[1] += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(kinds[0] > 0 && kinds[1] > 0);
    }

    #[test]
    fn a_machine_without_power_is_silent_until_it_runs_again() {
        let world = World::new(1, Faults::none());
        let (a, _b, _listener) = pair(&world);
        world.power_loss("b");
        for _ in 0..5 {
            assert_eq!(send(&a, b"anybody?").unwrap(), 8);
            pass(&world);
            assert_eq!(kind(recv(&a)), ErrorKind::WouldBlock);
        }
        world.env("b");
        pass(&world);
        assert_eq!(kind(recv(&a)), ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_short_partition_delays_or_resets_and_a_long_one_resets() {
        let (mut arrived, mut reset) = (0, 0);
        for seed in 0..60 {
            let long = seed % 2 == 0;
            let world = World::new(seed, Faults::none());
            let (a, b, listener) = pair(&world);
            world.partition("a", "b", true, true);
            send(&a, b"one").unwrap();
            send(&b, b"back").unwrap();
            pass(&world);
            assert_eq!(kind(recv(&b)), ErrorKind::WouldBlock);
            assert_eq!(recv(&a).unwrap(), b"back");
            let late = world.env("a").connect(&Address::Tcp(at())).unwrap();
            pass(&world);
            assert!(listener.accept().unwrap().is_none());
            world.advance(Duration::from_secs(if long { 20 } else { 1 }));
            if long {
                assert_eq!(kind(send(&a, b"two")), ErrorKind::TimedOut);
            }
            world.partition("a", "b", true, false);
            pass(&world);
            pass(&world);
            match recv(&b) {
                Ok(bytes) if bytes == b"one" => arrived += u32::from(!long),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => reset += 1,
                Err(_) => assert!(long),
                other => panic!("{other:?}"),
            }
            assert_eq!(
                late.wait(true, Duration::ZERO).unwrap(),
                !long || seed % 2 == 0
            );
        }
        assert!(arrived > 0 && reset > 0);
    }

    #[test]
    fn a_half_open_connection_swallows_bytes_and_fills_up() {
        let world = World::new(1, Faults::none());
        let (a, b, _listener) = pair(&world);
        world.set_faults(Faults {
            half_open: 1000,
            ..Faults::none()
        });
        send(&a, b"lost").unwrap();
        world.set_faults(Faults::none());
        for _ in 0..300 {
            let _ = send(&a, &[0; 1000]);
        }
        pass(&world);
        assert_eq!(kind(send(&a, b"x")), ErrorKind::WouldBlock);
        assert_eq!(kind(recv(&b)), ErrorKind::WouldBlock);
        a.close();
        pass(&world);
        assert_eq!(kind(recv(&b)), ErrorKind::WouldBlock);
        assert_eq!(world.counts()["half-open"], 1);
    }

    #[test]
    fn memory_passes_through_a_connection() {
        let world = World::new(1, Faults::none());
        world.env("b");
        let path = Address::Unix("/run/b".into());
        let listener = world.listen_at("b", &path).unwrap();
        let env = world.env("a");
        let a = env.connect(&path).unwrap();
        pass(&world);
        let b = listener.accept().unwrap().unwrap();
        let memory = env.anonymous_memory(4096).unwrap();
        a.send_memory(&memory).unwrap();
        assert_eq!(kind(b.recv_memory(4096, true)), ErrorKind::WouldBlock);
        pass(&world);
        assert_eq!(b.recv_memory(4096, true).unwrap().ptr(), memory.ptr());
        a.send_memory(&memory).unwrap();
        a.close();
        pass(&world);
        assert_eq!(kind(b.recv_memory(1, true)), ErrorKind::InvalidData);
        assert_eq!(kind(b.recv_memory(1, true)), ErrorKind::UnexpectedEof);
    }
}
