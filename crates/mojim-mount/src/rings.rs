//! FUSE over io_uring: a queue of requests for each processor, and a thread on it that serves them.
//!
//! A request comes to the queue of the processor of its asker, so nobody has to be woken on another
//! one. Its answer takes the place of the call that asks for the next one: one system call a
//! request.
//!
//! Owns the rings, and the memory through which requests and answers go, in entries of one request
//! each.
//!
//! Invariants:
//!
//! - An entry is the kernel's or ours: ours from the moment that its request came until its answer
//!   is handed in. Only the thread of its queue looks at it, and hands in answers. The kernel gives
//!   the next request in the thread that handed in the last answer. A thread that has ended gets
//!   none.
//! - Calls that are answered later keep their entries. A queue that has few left gets more, up to
//!   [`TIMES`] as many as at first, so others can always be served. A queue without a free entry
//!   may have further requests. They are taken with the next answer of that queue, not by an entry
//!   that is added. So where its thread came too late, it asks for requests itself, and answers
//!   them ([`Drain`]). A queue that may have no more entries has all its further requests wait in
//!   the kernel, until a call is answered. No call fails for want of an entry.
//! - Either all first entries of all queues are the kernel's before the first call is served, or
//!   there are no rings. From the answer to FUSE_INIT on the kernel has every call wait until each
//!   queue has entries.
//! - A thread that serves a queue ends with the connection. If it ends otherwise, the process ends,
//!   which ends the connection. The calls of its processor would else wait for ever, and could not
//!   be killed.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use mojim_env::locks::lock;
use mojim_env::processors::home;
use mojim_format::bytes::Writer;
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::at_once::serve_alone;
use crate::calls::{Calls, Head, Raw, serve};
use crate::device::Device;
use crate::init::MOST;
use crate::reply::Transport;

/// Commands of the kernel, and one that it does not know.
const PROBE: u32 = 0;
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// First entries of a queue, and of all queues together where there are many.
const MOST_ENTRIES: usize = 1024;
const LEAST_ENTRIES: usize = 256;
const ALL_ENTRIES: usize = 32 << 10;
/// A queue has so many times its first entries at most.
const TIMES: usize = 16;
/// It gets more when fewer than this part of its first ones are left: more may come before its thread looks
/// again.
const FEW: usize = 4;
/// Room for what follows an argument, and for an answer: the kernel asks for so much.
const PAYLOAD: usize = MOST as usize;
/// Memory of an entry beyond this is given back after use, unless few entries have it.
const SMALL: usize = 64 << 10;
const WARM: usize = 8;
/// Commands that are handed in at once.
const BATCH: usize = 128;
/// What a completion is for that is for no entry.
const WAKE: u64 = u64::MAX;

/// What comes in front of a request's payload, and of an answer's.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    /// The header of a request or an answer.
    head: [u8; 128],
    argument: [u8; 128],
    flags: u64,
    commit: u64,
    payload: u32,
    padding: u32,
    reserved: u64,
}

const _: () = assert!(size_of::<Header>() == 288);

/// The memory of some entries. Only pages that are used take any.
struct Memory {
    at: NonNull<u8>,
    entries: usize,
}

impl Memory {
    const ENTRY: usize = PAYLOAD + size_of::<Header>();

    fn new(entries: usize) -> io::Result<Memory> {
        let len = entries * Memory::ENTRY;
        let (access, how) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new memory takes no other's place.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, access, how | MapFlags::NORESERVE)
        }?;
        let at = NonNull::new(at.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the range is the one that was just mapped. A huge page would be two entries'.
        let advised = unsafe { madvise(at.as_ptr().cast(), len, Advice::LinuxNoHugepage) };
        // A kernel without huge pages has no such advice.
        let _ = advised;
        Ok(Memory { at, entries })
    }

    /// The payload of an entry.
    fn payload(&self, entry: usize) -> *mut u8 {
        assert!(entry < self.entries);
        // SAFETY: payloads come first, `entries` of them.
        unsafe { self.at.as_ptr().add(entry * PAYLOAD) }
    }

    fn header(&self, entry: usize) -> *mut Header {
        assert!(entry < self.entries);
        // SAFETY: headers come behind all payloads, `entries` of them, and 288 is a multiple of their
        // alignment, as the payloads' length is.
        unsafe {
            let headers = self.at.as_ptr().add(self.entries * PAYLOAD);
            headers.cast::<Header>().add(entry)
        }
    }

    /// Gives back what an entry has beyond [`SMALL`].
    fn trim(&self, entry: usize) {
        // SAFETY: it lies within the payload, which is ours, and nobody refers to.
        let trimmed = unsafe {
            let at = self.payload(entry).add(SMALL);
            madvise(at.cast(), PAYLOAD - SMALL, Advice::LinuxDontNeed)
        };
        // Then it stays.
        let _ = trimmed;
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped so; the ring, whose thread alone lets the kernel use it, has gone before
        // (`Ring` drops in order).
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.entries * Memory::ENTRY) };
        debug_assert!(unmapped.is_ok());
    }
}

/// An answer that is to be handed in.
struct Answer {
    place: u32,
    unique: u64,
    error: i32,
    body: Vec<u8>,
}

/// What all threads know of a queue.
struct Queue {
    answers: Mutex<Vec<Answer>>,
    /// Its thread has to be woken for an answer.
    sleeps: AtomicBool,
    wakes: OwnedFd,
}

impl Queue {
    /// Moves all answers into `to`, which has none; its memory serves the next ones.
    fn answers(&self, to: &mut Vec<Answer>) {
        let mut answers = lock(&self.answers);
        std::mem::swap(&mut *answers, to);
    }

    fn has_answers(&self) -> bool {
        !lock(&self.answers).is_empty()
    }
}

impl Transport for Queue {
    fn answer(&self, place: u32, unique: u64, error: i32, body: Vec<u8>) {
        let mut answers = lock(&self.answers);
        answers.push(Answer {
            place,
            unique,
            error,
            body,
        });
        drop(answers);
        if self.sleeps.swap(false, SeqCst) {
            // It cannot be full: it is written to once for each sleep.
            let _ = rustix::io::write(&self.wakes, &1u64.to_ne_bytes());
        }
    }

    fn is_beside(&self) -> bool {
        true
    }
}

/// How many entries a queue has, and may have.
#[derive(Debug)]
struct Room {
    /// At first; and they come by so many.
    first: usize,
    all: usize,
    most: usize,
    /// Those that are ours, or of no use.
    taken: usize,
}

impl Room {
    fn new(first: usize) -> Room {
        Room {
            first,
            all: first,
            most: first * TIMES,
            taken: 0,
        }
    }

    /// The numbers of the entries that are to be added, if few are left.
    fn lacks(&self) -> Option<Range<usize>> {
        let few = self.all - self.taken < self.first / FEW;
        let end = self.all + self.first;
        (few && end <= self.most).then_some(self.all..end)
    }
}

/// What has come to a queue while it had no free entry, and is brought into those that were added: one by one,
/// by the answer to a request that the queue's thread has asked for.
#[derive(Debug, Default)]
struct Drain {
    /// There may be such requests.
    wanted: bool,
    /// The number of the one that is asked for, and has not come.
    asked: Option<u64>,
    /// The entry by which one came last, and whether another request came by it then.
    last: Option<usize>,
    came: bool,
    count: u64,
    /// One that the kernel knows.
    file: u64,
}

impl Drain {
    /// Numbers of the kernel's own requests are below.
    const FIRST: u64 = 1 << 62;

    /// The number of the next request that is to be asked for by the queue of this number, if one is. No
    /// two queues have the same numbers.
    fn next(&mut self, queue: u16) -> Option<u64> {
        if !self.wanted || self.asked.is_some() {
            return None;
        }
        // The last bit says something else to the kernel.
        self.count += 2;
        self.asked = Some(Drain::FIRST + (u64::from(queue) << 40) + self.count);
        self.asked
    }

    /// The kernel made no such request: what came to the queue waits until a call is answered. When more
    /// entries are added it is tried again.
    fn fails(&mut self) {
        (self.asked, self.wanted) = (None, false);
    }

    /// A request came by an entry. `asked`: its number, if a queue's thread asked for it.
    fn comes(&mut self, entry: usize, asked: Option<u64>) {
        if asked.is_none() {
            self.came |= self.last == Some(entry);
            return;
        }
        // Another queue's, whose thread is not on its processor.
        if asked != self.asked {
            return;
        }
        self.asked = None;
        // The answer to the last one brought nothing: there is nothing.
        let is_empty = self.last.is_some() && !self.came;
        self.wanted &= !is_empty;
        self.last = (!is_empty).then_some(entry);
        self.came = false;
    }
}

/// How a thread's life goes on.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Serves,
    /// The connection has ended.
    Ends,
}

/// What the thread of a queue has. The ring goes before the memory that it leads to.
struct Ring {
    ring: Rc<IoUring<Entry128>>,
    /// Each of [`Room::first`] entries.
    memory: Vec<Memory>,
    room: Room,
    drain: Drain,
    queue: Arc<Queue>,
    by: Arc<dyn Transport>,
    number: u16,
    /// By which the kernel knows the request of each entry.
    commits: Vec<u64>,
    /// Entries that are ours.
    ours: Vec<bool>,
    /// Whether more than [`SMALL`] of an entry was used, and how many are so.
    large: (Vec<bool>, usize),
    /// Commands that were not handed in yet.
    waiting: usize,
    /// Completions that came early.
    early: VecDeque<(u64, i32)>,
    /// Where the count of wakes is read to, which nobody looks at.
    woken: Box<[u8; 8]>,
}

impl Ring {
    fn new(number: u16, entries: usize) -> io::Result<Ring> {
        let mut how = IoUring::<Entry128, cqueue::Entry>::builder();
        how.dontfork().setup_submit_all().setup_single_issuer();
        // Requests are given to this thread when it asks for them, and show before.
        how.setup_defer_taskrun().setup_taskrun_flag();
        how.setup_clamp().setup_cqsize(2 * entries as u32);
        let queue = Arc::new(Queue {
            answers: Mutex::default(),
            sleeps: AtomicBool::new(false),
            wakes: eventfd(0, EventfdFlags::CLOEXEC)?,
        });
        Ok(Ring {
            ring: Rc::new(how.build(BATCH as u32)?),
            memory: vec![Memory::new(entries)?],
            room: Room::new(entries),
            drain: Drain::default(),
            by: queue.clone(),
            queue,
            number,
            commits: vec![0; entries],
            ours: vec![false; entries],
            large: (vec![false; entries], 0),
            waiting: 0,
            early: VecDeque::new(),
            woken: Box::new([0; 8]),
        })
    }

    /// Whether commands reach the connection, on which nothing was said yet: policies of the system may keep
    /// this process from them, and would do so once the kernel waits for entries.
    ///
    /// # Errors
    /// They do not.
    fn probe(&mut self, device: &Device) -> io::Result<()> {
        let command = self.command(device, PROBE, 0).build();
        self.push(command.user_data(WAKE))?;
        self.enter(1)?;
        let (_, result) = self.completion().ok_or(io::ErrorKind::TimedOut)?;
        match -result {
            // FUSE has seen it: a connection that has not begun takes none.
            libc::EAGAIN | libc::EINVAL => Ok(()),
            e => Err(io::Error::from_raw_os_error(e.max(0))),
        }
    }

    /// Gives the kernel the first entries; fails with what it says to the first that it refuses.
    fn begin(&mut self, device: &Device) -> io::Result<()> {
        self.register(device, 0..self.room.all)?;
        self.listen()?;
        self.submit()?;
        while let Some(came) = self.completion() {
            self.early.push_back(came);
        }
        let refused = self.early.iter().find(|c| c.0 != WAKE && c.1 < 0);
        refused.map_or(Ok(()), |c| Err(io::Error::from_raw_os_error(-c.1)))
    }

    /// Adds entries, if the system has memory for them. What the kernel says to them comes to `take`.
    fn grow(&mut self, device: &Device, added: Range<usize>) -> io::Result<()> {
        let memory = match Memory::new(added.len()) {
            Ok(memory) => memory,
            Err(e) => {
                tracing::warn!("queue {} gets no more entries: {e}", self.number);
                self.room.most = self.room.all;
                return Ok(());
            }
        };
        self.memory.push(memory);
        self.room.all = added.end;
        self.commits.resize(added.end, 0);
        self.ours.resize(added.end, false);
        self.large.0.resize(added.end, false);
        self.register(device, added)?;
        // All entries may have been taken before, though not all of them were looked at yet.
        self.drain.wanted = true;
        Ok(())
    }

    /// Gives the kernel new entries.
    fn register(&mut self, device: &Device, entries: Range<usize>) -> io::Result<()> {
        let parts_of = |entry| {
            let (memory, entry) = self.place(entry);
            let (header, payload) = (memory.header(entry), memory.payload(entry));
            let parts = [
                (header.cast::<u8>(), size_of::<Header>()),
                (payload, PAYLOAD),
            ];
            parts.map(|(at, len)| libc::iovec {
                iov_base: at.cast(),
                iov_len: len,
            })
        };
        let all: Vec<[libc::iovec; 2]> = entries.clone().map(parts_of).collect();
        for (entry, parts) in entries.zip(&all) {
            let mut command = self.command(device, REGISTER, 0);
            command = command.addr(Some(parts.as_ptr() as u64));
            let mut command = command.build().user_data(entry as u64);
            // SAFETY: this is the kernel's `struct io_uring_sqe` of 128 bytes, whose fourth part of
            // eight bytes begins with `len`: here the number of parts. The library has no name for it.
            unsafe { (&raw mut command).cast::<u32>().add(6).write(2) };
            self.push(command)?;
        }
        // The kernel reads `all` when they are handed in.
        self.submit()
    }

    /// The memory that has an entry, and its number there.
    fn place(&self, entry: usize) -> (&Memory, usize) {
        let first = self.room.first;
        (&self.memory[entry / first], entry % first)
    }

    fn command(&self, device: &Device, command: u32, commit: u64) -> opcode::UringCmd80 {
        let mut bytes = Vec::with_capacity(80);
        Writer(&mut bytes).u64(0).u64(commit).u16(self.number);
        let mut command_bytes = [0; 80];
        command_bytes[..bytes.len()].copy_from_slice(&bytes);
        opcode::UringCmd80::new(types::Fd(device.0.as_raw_fd()), command).cmd(command_bytes)
    }

    /// Asks for the next wake.
    fn listen(&mut self) -> io::Result<()> {
        let (at, len) = (self.woken.as_mut_ptr(), self.woken.len() as u32);
        let wakes = types::Fd(self.queue.wakes.as_raw_fd());
        let read = opcode::Read::new(wakes, at, len).build();
        self.push(read.user_data(WAKE).into())
    }

    fn push(&mut self, command: Entry128) -> io::Result<()> {
        if self.waiting == BATCH {
            self.submit()?;
        }
        // SAFETY: no other submission queue exists: each lives within one call of this thread. What the
        // command leads to lives as long as the ring (`Memory`, `woken`), or until it is handed in, which
        // is when the kernel reads it (`all` of `register`).
        let pushed = unsafe { self.ring.submission_shared().push(&command) };
        pushed.map_err(|_| io::Error::other("the ring has no room"))?;
        self.waiting += 1;
        Ok(())
    }

    /// Hands in what waits.
    fn submit(&mut self) -> io::Result<()> {
        if self.waiting > 0 {
            self.enter(0)?;
        }
        Ok(())
    }

    /// Hands in what waits, and waits for `want` completions.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(handed) => {
                    self.waiting -= handed.min(self.waiting);
                    if self.waiting == 0 {
                        return Ok(());
                    }
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN) => {}
                    // There are completions to be taken first.
                    Some(libc::EBUSY) => return Ok(()),
                    _ => return Err(e),
                },
            }
        }
    }

    fn completion(&mut self) -> Option<(u64, i32)> {
        // SAFETY: no other completion queue exists: each lives within one call of this thread.
        let came = unsafe { self.ring.completion_shared().next() }?;
        Some((came.user_data(), came.result()))
    }

    /// Whether anybody waits for this thread.
    fn others_ask(ring: &IoUring<Entry128>, queue: &Queue) -> bool {
        // SAFETY: as in `completion` and `push`; this is called by this thread, between those.
        let asked =
            unsafe { ring.submission_shared().taskrun() || !ring.completion_shared().is_empty() };
        asked || queue.has_answers()
    }

    /// Serves until the connection ends.
    fn run(&mut self, device: &Device, calls: &dyn Calls) -> io::Result<()> {
        let (ring, queue) = (self.ring.clone(), self.queue.clone());
        let asked = move || Ring::others_ask(&ring, &queue);
        serve_alone(Box::new(asked), || self.serve(device, calls))
    }

    fn serve(&mut self, device: &Device, calls: &dyn Calls) -> io::Result<()> {
        let mut answers = Vec::new();
        loop {
            self.queue.answers(&mut answers);
            for answer in answers.drain(..) {
                self.hand_in(device, answer)?;
            }
            match self.early.pop_front().or_else(|| self.completion()) {
                Some((WAKE, _)) => self.listen()?,
                Some((entry, result)) => {
                    // Nobody waits for an answer while others are served.
                    self.submit()?;
                    if self.take(calls, entry as usize, result)? == Next::Ends {
                        return Ok(());
                    }
                    if let Some(added) = self.room.lacks() {
                        self.grow(device, added)?;
                    }
                }
                None => {
                    if self.large.1 > WARM && self.waiting > 0 {
                        // The kernel has not read those answers yet, and may have a request for it.
                        self.submit()?;
                        continue;
                    }
                    self.give_back();
                    if let Some(unique) = self.drain.next(self.number) {
                        // What was answered is handed in before.
                        self.submit()?;
                        if device.ask(unique, self.drain.file).is_err() {
                            self.drain.fails();
                        }
                    }
                    self.queue.sleeps.store(true, SeqCst);
                    // An answer that comes later wakes.
                    if !self.queue.has_answers() {
                        self.enter(1)?;
                    }
                    self.queue.sleeps.store(false, SeqCst);
                }
            }
        }
    }

    /// An entry comes back: with a request, or for good.
    ///
    /// # Errors
    /// Its answer was not taken: whoever waits for that would do so for ever.
    fn take(&mut self, calls: &dyn Calls, entry: usize, result: i32) -> io::Result<Next> {
        if is_end(result) {
            return Ok(Next::Ends);
        }
        match -result {
            0 => {}
            // Nobody waited for the answer any more.
            libc::ENOENT => {
                tracing::error!("queue {} has an entry less", self.number);
                self.room.taken += 1;
                return Ok(Next::Serves);
            }
            // No request has come by it: it was added, and refused. Those that are there must do.
            e if self.commits[entry] == 0 => {
                if self.room.most > self.room.all {
                    let why = io::Error::from_raw_os_error(e);
                    tracing::warn!("queue {} gets no more entries: {why}", self.number);
                    self.room.most = self.room.all;
                }
                self.room.taken += 1;
                return Ok(Next::Serves);
            }
            e => return Err(io::Error::from_raw_os_error(e)),
        }
        self.room.taken += 1;
        self.ours[entry] = true;
        let (memory, at) = self.place(entry);
        // SAFETY: the entry is ours, and its header is written by nobody else.
        let header = unsafe { memory.header(at).read() };
        let payload = memory.payload(at);
        self.commits[entry] = header.commit;
        let len = (header.payload as usize).min(PAYLOAD);
        if len > SMALL {
            self.is_large(entry);
        }
        // SAFETY: the payload is ours, and is written to only by `hand_in`, on this thread, after this.
        let rest = unsafe { std::slice::from_raw_parts(payload, len) };
        let head = Head::read(&header.head).expect("it is shorter than its place");
        let asked = head.is_asked_for().then_some(head.unique);
        self.drain.comes(entry, asked);
        if head.is_of_bytes() {
            self.drain.file = head.ino;
        }
        let raw = Raw {
            head,
            argument: &header.argument[..head.argument()],
            rest,
        };
        if !serve(calls, &raw, &self.by, entry as u32) {
            self.by.answer(entry as u32, head.unique, 0, Vec::new());
        }
        Ok(Next::Serves)
    }

    /// Memory of large requests and answers, when there is nothing to do: all is handed in, and nothing has
    /// come. The kernel touches entries only in calls of this thread.
    fn give_back(&mut self) {
        if self.large.1 <= WARM {
            return;
        }
        for entry in 0..self.room.all {
            if self.large.1 > WARM && self.large.0[entry] && !self.ours[entry] {
                self.trim(entry);
            }
        }
    }

    fn trim(&mut self, entry: usize) {
        self.large.0[entry] = false;
        self.large.1 -= 1;
        let (memory, at) = self.place(entry);
        memory.trim(at);
    }

    fn is_large(&mut self, entry: usize) {
        let was = std::mem::replace(&mut self.large.0[entry], true);
        self.large.1 += usize::from(!was);
    }

    /// Puts an answer into its entry, which is the kernel's again as soon as that is handed in.
    fn hand_in(&mut self, device: &Device, answer: Answer) -> io::Result<()> {
        let entry = answer.place as usize;
        let (mut error, mut body) = (answer.error, &answer.body[..]);
        if body.len() > PAYLOAD {
            (error, body) = (libc::EIO, &[]);
        }
        if body.len() > SMALL {
            self.is_large(entry);
        } else if self.large.0[entry] && self.large.1 > WARM {
            self.trim(entry);
        }
        let mut head = Vec::with_capacity(16);
        let mut w = Writer(&mut head);
        w.u32((16 + body.len()) as u32).u32((-error) as u32);
        w.u64(answer.unique);
        let (memory, at) = self.place(entry);
        let (header, payload) = (memory.header(at), memory.payload(at));
        // SAFETY: the entry is ours, nobody refers to it (`take` is over), and both parts fit.
        unsafe {
            let at = (&raw mut (*header).head).cast::<u8>();
            at.copy_from_nonoverlapping(head.as_ptr(), head.len());
            (&raw mut (*header).payload).write(body.len() as u32);
            payload.copy_from_nonoverlapping(body.as_ptr(), body.len());
        }
        let command = self.command(device, COMMIT_AND_FETCH, self.commits[entry]);
        self.push(command.build().user_data(entry as u64))?;
        self.ours[entry] = false;
        self.room.taken -= 1;
        Ok(())
    }
}

/// Whether an entry came back since the connection has ended.
fn is_end(result: i32) -> bool {
    let ends = [
        libc::ENOTCONN,
        libc::ECONNABORTED,
        libc::ECANCELED,
        libc::ENODEV,
    ];
    ends.contains(&-result)
}

/// What a queue's thread is to serve.
type Work = (Arc<Device>, Arc<dyn Calls>);

/// A thread whose ring is made.
struct Ready {
    thread: JoinHandle<()>,
    begin: SyncSender<Work>,
    registered: Receiver<io::Result<()>>,
    go: SyncSender<()>,
}

/// A thread that serves a queue: unless it ends with the connection, the process does.
struct Serves {
    number: u16,
    why: Option<io::Error>,
    is_over: bool,
}

impl Drop for Serves {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let number = self.number;
        match &self.why {
            Some(e) => tracing::error!("queue {number} serves no more, the mount ends: {e}"),
            // It has panicked, and said so.
            None => tracing::error!("queue {number} serves no more, the mount ends"),
        }
        std::process::abort();
    }
}

/// Threads with rings, one for each processor, which serve nothing yet. Dropped, they end.
pub(crate) struct Rings(Vec<Ready>);

impl Rings {
    /// Makes them, for a connection on which nothing was said yet.
    ///
    /// # Errors
    /// The system has no rings, or no memory, for this process, or keeps it from using them.
    pub(crate) fn new(device: &Arc<Device>) -> io::Result<Rings> {
        let queues = processors(&std::fs::read_to_string(
            "/sys/devices/system/cpu/possible",
        )?);
        let queues = queues.ok_or_else(|| io::Error::other("the processors are not known"))?;
        let entries = (ALL_ENTRIES / queues).clamp(LEAST_ENTRIES, MOST_ENTRIES);
        let start = |number| Ready::start(number, entries, device.clone());
        let all: io::Result<Vec<Ready>> = (0..queues as u16).map(start).collect();
        Ok(Rings(all?))
    }

    /// Serves from now on; the kernel has taken the offer.
    ///
    /// # Errors
    /// It does not take all entries. Then the threads end, and the connection is of no use.
    pub(crate) fn begin(
        self,
        device: &Arc<Device>,
        calls: &Arc<dyn Calls>,
    ) -> io::Result<Vec<JoinHandle<()>>> {
        for ring in &self.0 {
            // A thread that has ended says so below.
            let _ = ring.begin.send((device.clone(), calls.clone()));
        }
        for ring in &self.0 {
            ring.registered.recv().map_err(io::Error::other)??;
        }
        let go = |ring: Ready| {
            ring.go.send(()).map_err(io::Error::other)?;
            Ok(ring.thread)
        };
        self.0.into_iter().map(go).collect()
    }
}

impl Ready {
    fn start(number: u16, entries: usize, device: Arc<Device>) -> io::Result<Ready> {
        let (made, is_made) = sync_channel(1);
        let (begin, work) = sync_channel::<Work>(1);
        let (say, registered) = sync_channel(1);
        let (go, goes) = sync_channel(1);
        let thread = std::thread::Builder::new().name(format!("mojim-ring-{number}"));
        let thread = thread.spawn(move || {
            stay_on(number);
            let ring = Ring::new(number, entries);
            let ring = ring.and_then(|mut r| r.probe(&device).map(|()| r));
            drop(device);
            let ring = ring.map_err(|e| drop(made.send(Err(e))));
            let Ok(mut ring) = ring else {
                return;
            };
            let _ = made.send(Ok(()));
            let Ok((device, calls)) = work.recv() else {
                return;
            };
            let _ = say.send(ring.begin(&device));
            if goes.recv().is_err() {
                // Another queue has failed, or this one.
                return;
            }
            let mut serves = Serves {
                number,
                why: None,
                is_over: false,
            };
            match ring.run(&device, &*calls) {
                Ok(()) => serves.is_over = true,
                Err(e) => serves.why = Some(e),
            }
        })?;
        is_made.recv().map_err(io::Error::other)??;
        Ok(Ready {
            thread,
            begin,
            registered,
            go,
        })
    }
}

/// Keeps the calling thread on a processor, if it may run there. One that is not there now has no programs
/// either.
fn stay_on(processor: u16) {
    let processor = usize::from(processor);
    let may = |all: CpuSet| processor < CpuSet::MAX_CPU && all.is_set(processor);
    if home().is_some_and(may) {
        let mut one = CpuSet::new();
        one.set(processor);
        // It is a matter of speed alone.
        let _ = sched_setaffinity(None, &one);
    }
}

/// How many processors a list has, as `0-3,8`.
fn processors(list: &str) -> Option<usize> {
    let parts = list.trim().split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        (first <= last).then(|| usize::from(last - first) + 1)
    });
    parts.sum()
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn processors_are_counted() {
        assert_eq!(processors("0\n"), Some(1));
        assert_eq!(processors("0-1\n"), Some(2));
        assert_eq!(processors("0-3,8,10-11"), Some(7));
        assert_eq!(processors(""), None);
        assert_eq!(processors("3-1"), None);
    }

    /// Where a policy keeps a process from the commands, or the file is another one, that was found after
    /// the kernel had been promised rings: it had every call wait for them.
    #[test]
    fn rings_that_no_command_passes_are_none() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(Rings::new(&Arc::new(Device(null.into()))).is_err());
        let file = tempfile::tempfile().unwrap();
        assert!(Rings::new(&Arc::new(Device(file.into()))).is_err());
    }

    /// A mount that was started on a part of the processors had threads on all of them.
    #[test]
    fn a_queues_thread_stays_where_it_may_run() {
        let all = sched_getaffinity(None).unwrap();
        let mut may = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
        let (one, other) = (may.next().unwrap(), may.next().unwrap_or(0));
        // In a thread of its own, since it is moved.
        let stays = std::thread::spawn(move || {
            let mut only = CpuSet::new();
            only.set(one);
            sched_setaffinity(None, &only).unwrap();
            for processor in [other, one, CpuSet::MAX_CPU] {
                stay_on(processor as u16);
                assert_eq!(sched_getaffinity(None).unwrap(), only);
            }
        });
        stays.join().unwrap();
        let moves = std::thread::spawn(move || {
            stay_on(other as u16);
            let now = sched_getaffinity(None).unwrap();
            assert!(now.is_set(other) && now.count() == 1);
        });
        moves.join().unwrap();
    }

    fn queue() -> Queue {
        Queue {
            answers: Mutex::default(),
            sleeps: AtomicBool::new(false),
            wakes: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
        }
    }

    /// Calls that waited had all entries of a queue, and a read beside them was not served. Later an fsync
    /// failed with ENOMEM beside 960 that waited.
    #[test]
    fn calls_that_wait_leave_entries_to_others() {
        let mut room = Room::new(LEAST_ENTRIES);
        for waiting in 0.. {
            room.taken = waiting;
            if let Some(added) = room.lacks() {
                assert_eq!(added, room.all..room.all + LEAST_ENTRIES);
                room.all = added.end;
            }
            assert!(room.all <= TIMES * LEAST_ENTRIES);
            if waiting == room.all {
                break;
            }
            let left = room.all - waiting;
            let may_more = room.all < TIMES * LEAST_ENTRIES;
            assert!(left >= LEAST_ENTRIES / FEW || !may_more, "{room:?}");
        }
        assert_eq!(room.all, TIMES * LEAST_ENTRIES);
    }

    #[test]
    fn requests_are_asked_for_until_an_answer_brings_none() {
        let mut d = Drain::default();
        assert_eq!(d.next(3), None);
        d.wanted = true;
        let first = d.next(3);
        assert_eq!((first.unwrap() % 2, d.next(3)), (0, None));
        d.comes(5, first);
        // Its answer brings a call that waits, by the same entry; one of another entry says nothing.
        d.comes(5, None);
        d.comes(6, None);
        let second = d.next(3);
        assert!(second > first);
        // Another queue's.
        d.comes(7, Some(Drain::FIRST + 2));
        assert_eq!(d.next(3), None);
        d.comes(7, second);
        d.comes(6, None);
        let third = d.next(3);
        assert!(third > second);
        d.comes(7, third);
        assert_eq!((d.next(3), d.wanted), (None, false));
    }

    /// One request that the kernel did not make ended the search of its queue for ever.
    #[test]
    fn after_a_request_that_was_not_made_another_is_asked_for() {
        let mut d = Drain {
            wanted: true,
            ..Drain::default()
        };
        let first = d.next(0);
        d.fails();
        assert_eq!(d.next(0), None);
        d.wanted = true;
        assert!(d.next(0) > first);
    }

    #[test]
    fn an_answer_wakes_a_thread_that_sleeps_once() {
        let q = queue();
        let woken = || rustix::io::read(&q.wakes, &mut [0; 8]).is_ok();
        q.answer(1, 2, 0, vec![]);
        assert!(!woken() && q.has_answers());
        q.sleeps.store(true, SeqCst);
        q.answer(3, 4, 0, vec![]);
        q.answer(5, 6, 0, vec![]);
        assert!(woken() && !woken());
        let mut answers = Vec::new();
        q.answers(&mut answers);
        let places = answers.iter().map(|a| a.place).collect::<Vec<_>>();
        assert_eq!(places, [1, 3, 5]);
        assert!(!q.has_answers());
    }

    #[test]
    fn entries_lie_apart() {
        let m = Memory::new(3).unwrap();
        for entry in 0..3 {
            let (payload, header) = (m.payload(entry), m.header(entry));
            // SAFETY: both are the test's.
            unsafe {
                payload.write_bytes(entry as u8 + 1, PAYLOAD);
                header
                    .cast::<u8>()
                    .write_bytes(entry as u8 + 11, size_of::<Header>());
            }
        }
        m.trim(1);
        for entry in 0..3 {
            // SAFETY: as above.
            let (payload, header) = unsafe {
                let bytes = std::slice::from_raw_parts(m.payload(entry), PAYLOAD);
                (bytes, m.header(entry).read())
            };
            let is_left = |b: &u8| *b == if entry == 1 { 0 } else { entry as u8 + 1 };
            assert!(payload[..SMALL].iter().all(|b| *b == entry as u8 + 1));
            assert!(payload[SMALL..].iter().all(is_left));
            assert_eq!(header.argument, [entry as u8 + 11; 128]);
        }
    }
}
