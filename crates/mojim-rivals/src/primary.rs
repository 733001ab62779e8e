//! The program's end of a rival: one sync point at a time, to all replicas.
//!
//! Owns:
//!
//! - the primary's log, which is its send buffer as in Mojim
//! - the links to the replicas
//! - a copy of what was sent, for [`crate::audit`]
//!
//! Invariant: a sync point has succeeded when all answering replicas have acknowledged
//! the last round of its scheme. Then it is in every replica's log.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mojim_env::Env;
use mojim_env::wire::Wire;
use mojim_env::{Error, Result};
use mojim_format::{FrameKind, RecordWriter};
use mojim_replica::link::{Carrier, PAGE_LEN, Page, Rx, Tx};
use mojim_replica::piece::{Piece, encode};
use mojim_replica::spinner::Spinner;
use mojim_store::log::{Log, LogSpec};

use crate::order::{LIMIT, Order, Ring, Transport, hear, pass, say};
use crate::replica::connect;
use crate::{EPOCH, Scheme, open};

/// How long a blocked sync point waits before it looks again, as in Mojim.
const SLICE: Duration = Duration::from_millis(2);

/// The number of the one file that is written.
pub(crate) const FILE: u32 = 1;

/// One sync point, as the program stored it.
pub(crate) struct Sent {
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

/// What a run sent, for the audit.
pub struct Run {
    pub(crate) scheme: Scheme,
    pub(crate) volume: u64,
    pub(crate) sent: Vec<Sent>,
}

/// A replica that acknowledges to the primary.
struct Answers {
    rx: Rx,
    acked: u64,
}

/// A primary whose sync points go to all replicas by one scheme.
pub struct Primary {
    env: Arc<dyn Env>,
    run: Run,
    log: Log,
    /// The replicas that get records from the primary.
    tx: Vec<Tx>,
    answers: Vec<Answers>,
    /// The links of all replicas, which stay open as long as the run.
    links: Vec<Wire>,
    lsn: u64,
    committed: u64,
    spinner: Spinner,
}

impl Primary {
    /// Sets the run up. `replicas` are the addresses at which they listen, `log` is the
    /// primary's own log, as large as theirs, and `spin` is how long the primary polls.
    pub fn start(
        env: &Arc<dyn Env>,
        scheme: Scheme,
        transport: Transport,
        log: &LogSpec,
        spin: Duration,
        replicas: &[String],
    ) -> Result<Primary> {
        let volume = env.random();
        let (log, _) = open(env, log, volume)?;
        let pages = shared_pages(env, transport, replicas.len())?;
        let orders = orders(scheme, transport, volume, replicas);
        let mut links = Vec::new();
        for (i, (address, order)) in replicas.iter().zip(&orders).enumerate() {
            let mut wire = Wire::new(connect(env, address)?);
            let pages = pages.get(i..).unwrap_or(&[]);
            give(&mut wire, &**env, order, pages, &log)?;
            links.push(wire);
        }
        let (mut tx, mut answers) = (Vec::new(), Vec::new());
        for (i, (wire, order)) in links.iter_mut().zip(&orders).enumerate() {
            match hear(wire, &**env)? {
                (f, _) if f.kind == FrameKind::LaneOk => {}
                (f, _) => return Err(Error::Protocol(format!("{:?} came first", f.kind))),
            }
            let conn = || wire.conn.clone();
            let carrier = || match pages.get(i) {
                Some(page) => Carrier::Shared(page.clone()),
                None => Carrier::Stream,
            };
            if order.first {
                tx.push(Tx::new(conn(), carrier(), 0));
            }
            if order.answers {
                let rx = Rx::new(conn(), carrier(), 0);
                answers.push(Answers { rx, acked: 0 });
            }
        }
        Ok(Primary {
            env: env.clone(),
            run: Run {
                scheme,
                volume,
                sent: Vec::new(),
            },
            log,
            tx,
            answers,
            links,
            lsn: 0,
            committed: 0,
            spinner: Spinner::new(spin),
        })
    }

    /// Stores `bytes` for the next sync point. This is not part of the sync point, as
    /// stores into mapped memory are not.
    pub fn store(&mut self, offset: u64, bytes: &[u8]) {
        let bytes = bytes.to_vec();
        self.run.sent.push(Sent { offset, bytes });
    }

    /// Makes the sync point of what was stored last.
    pub fn commit(&mut self) -> Result<()> {
        let rounds = self.run.scheme.rounds();
        for part in 0..rounds {
            let len = self.append(part, part + 1 == rounds)?;
            for tx in &mut self.tx {
                tx.pump(&self.log, EPOCH, self.committed)
                    .map_err(|e| Error::io("sending to a replica", &e))?;
            }
            self.log.prefetch(len);
            self.wait()?;
        }
        self.committed = self.lsn;
        Ok(())
    }

    /// Encodes one record into the log; only the first part has bytes.
    fn append(&mut self, part: u32, end: bool) -> Result<usize> {
        let data = self.run.sent.last().filter(|_| part == 0);
        let piece = data.map(|s| Piece::Write {
            file: FILE,
            offset: s.offset,
            ptr: s.bytes.as_ptr(),
            len: s.bytes.len(),
        });
        let payload = piece.map_or(0, |p| p.len());
        let len = RecordWriter::len_for(piece.iter().len(), payload);
        let head = self.log.head();
        let at = self
            .log
            .place(head, len)
            .ok_or_else(|| Error::Invalid("the log is too small for the run".into()))?;
        self.lsn += 1;
        // SAFETY: this value alone appends to its log, through `&mut self`;
        // `at` is of the present head.
        let slot = unsafe { self.log.slot(head, at, len, self.run.volume, self.lsn) };
        encode(
            slot,
            piece.as_slice(),
            self.run.volume,
            self.lsn,
            EPOCH,
            part,
            end,
            self.committed,
        );
        self.log.publish(at, len);
        Ok(len)
    }

    /// Waits until all answering replicas have the last record: polls for a bounded time,
    /// then blocks, as a sync point of Mojim does.
    fn wait(&mut self) -> Result<()> {
        while !self.poll()? {
            if !self.spinner.spin(&*self.env) {
                return self.wait_blocked();
            }
            std::hint::spin_loop();
        }
        self.spinner.hit(&*self.env);
        Ok(())
    }

    #[cold]
    fn wait_blocked(&mut self) -> Result<()> {
        let end = self.env.now() + LIMIT;
        while !self.poll()? {
            if self.env.now() > end {
                return Err(Error::Timeout(format!(
                    "{}: LSN {} is not acknowledged by all",
                    self.run.scheme.name(),
                    self.lsn
                )));
            }
            for tx in &mut self.tx {
                tx.pump(&self.log, EPOCH, self.committed)
                    .map_err(|e| Error::io("sending to a replica", &e))?;
            }
            let lsn = self.lsn;
            if let Some(a) = self.answers.iter_mut().find(|a| a.acked < lsn) {
                a.rx.wait(SLICE);
            }
        }
        Ok(())
    }

    /// Receives acknowledgements. True if all answering replicas have everything.
    fn poll(&mut self) -> Result<bool> {
        let mut all = true;
        for a in &mut self.answers {
            if a.acked < self.lsn
                && let Some(ack) = a.rx.poll()?
            {
                a.acked = ack.lsn;
            }
            all &= a.acked >= self.lsn;
        }
        Ok(all)
    }

    /// Ends the run: a replica ends when the sender of its records has closed the link.
    pub fn finish(self) -> Run {
        for link in &self.links {
            link.conn.close();
        }
        self.run
    }
}

/// For each replica, the page that it shares with the sender of its records; none over
/// streams.
fn shared_pages(env: &Arc<dyn Env>, transport: Transport, replicas: usize) -> Result<Vec<Page>> {
    match transport {
        Transport::Tcp => Ok(Vec::new()),
        Transport::Shm => (0..replicas)
            .map(|_| Ok(Page::new(env.anonymous_memory(PAGE_LEN)?)))
            .collect::<io::Result<_>>()
            .map_err(|e| Error::io("shared pages", &e)),
    }
}

/// The order of each replica. In a chain only the first gets records from the primary,
/// and only the last answers.
fn orders(scheme: Scheme, transport: Transport, volume: u64, replicas: &[String]) -> Vec<Order> {
    let chain = scheme == Scheme::Chain;
    (0..replicas.len())
        .map(|i| Order {
            volume,
            transport,
            first: !chain || i == 0,
            next: replicas.get(i + 1).filter(|_| chain).cloned(),
            answers: !chain || i + 1 == replicas.len(),
        })
        .collect()
}

/// Gives a replica its order and, over shared memory, what it shares: `pages` are its own
/// page and those of the replicas behind it.
fn give(wire: &mut Wire, env: &dyn Env, order: &Order, pages: &[Page], log: &Log) -> Result<()> {
    say(wire, env, FrameKind::Request, order)?;
    if let Some(page) = pages.first() {
        pass(&*wire.conn, page.memory())?;
        if order.next.is_some() {
            pass(&*wire.conn, pages[1].memory())?;
        }
    }
    if order.first {
        say(wire, env, FrameKind::Lane, &Ring::of(log))?;
        if order.transport == Transport::Shm {
            pass(&*wire.conn, log.memory())?;
        }
    }
    Ok(())
}
