//! A program that runs where its volume's primary is.
//!
//! Owns the program's process. [`once`] starts it once. [`run`] starts it when the register of
//! views says that this node is the primary. It ends it when the register says that another node
//! is, and starts it again. The mirror and the register, not this module, ensure that a program on
//! the wrong node can commit nothing.
//!
//! Invariants:
//!
//! - The end of a program is this process's exit code, as a shell has it. Standard error says when
//!   a signal ended it.
//! - Signals for this process are passed on to the program. Signals that are typed at the terminal
//!   are not, since the program gets those itself.
//! - No wait is silent. After a second, standard error says what is waited for, where, and since
//!   when (`Wait`), and again when that changes. A wait for a daemon that is not started again ends
//!   with an error.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use mojim_config::{Config, Node, Volume};
use mojim_env::{Address, Env};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::request::{self, Request};
use rustix::process::{Pid, PidfdFlags, Signal, getpgid, getpgrp, pidfd_open, pidfd_send_signal};

use crate::ask::plain;
use crate::failure::{Done, Failure, say_on_stderr};
use crate::namespace;
use crate::runs_mount::{LATER, MountLease, Pause};
use crate::signals::{self, Came, OfChildren};

/// How long the daemon may take to answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long a question waits for this node to become primary.
const WAIT: Duration = Duration::from_millis(500);
/// How long a wait goes on before a person is told of it.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a daemon may be gone, while it is started again, before a wait for it
/// is given up; three times `failure_limit` where that is more.
const RESTART: Duration = Duration::from_secs(10);
/// The pause between two questions to the daemon.
const PAUSE: Duration = Duration::from_millis(1);
/// How long a program may take to end before it is killed.
const GRACE: Duration = Duration::from_secs(5);

enum Event {
    /// This process was asked to end, or got a signal that the program knows.
    Signal(Came),
    /// The program ended.
    Ended(std::io::Result<ExitStatus>),
}

/// A running program. The descriptor refers to this process only, also after the process
/// has ended and its ID was reused.
struct Program {
    process: OwnedFd,
    id: Pid,
}

impl Program {
    fn signal(&self, signal: Signal) {
        // A program that has ended needs no signal.
        let _ = pidfd_send_signal(&self.process, signal);
    }

    /// Whether it is in this process's group, as it is unless it has left it (`timeout`, `setsid`).
    fn is_in_my_group(&self) -> bool {
        // If it has ended, it is no matter.
        getpgid(Some(self.id)).is_ok_and(|group| group == getpgrp())
    }

    /// A signal that came to this process.
    fn pass_on(&self, came: Came) {
        if let Some(signal) = Signal::from_named_raw(came.number)
            && !(came.is_typed && self.is_in_my_group())
        {
            self.signal(signal);
        }
    }
}

/// Who is primary.
enum Who {
    Me,
    Another(String),
    /// This node is, but its copy is not free yet.
    Soon,
    /// The daemon or the voters do not answer.
    Unknown(String),
    /// There is no daemon.
    Gone(String),
}

/// Where a program may run, as its node's daemon knows it.
pub struct Post {
    env: Arc<dyn Env>,
    daemon: Address,
    cluster: String,
    me: String,
    volume: String,
}

impl Post {
    /// For `volume` on `node`.
    pub fn new(config: &Config, node: &Node, volume: &str) -> Result<Post, Failure> {
        Ok(Post {
            env: Arc::new(Os::new()?),
            daemon: Address::Unix(layout::socket(node)),
            cluster: config.cluster.clone(),
            me: node.name.clone(),
            volume: volume.to_owned(),
        })
    }

    /// Why this node, which is the primary by the register, does not become it, if that does not pass:
    /// its copy is gone.
    fn lacks(&self) -> Option<String> {
        let q = Request::Status {
            volume: Some(self.volume.clone()),
            register: false,
        };
        let client = Client::connect(&self.env, &self.daemon, &self.cluster, TIMEOUT);
        let answer = client.and_then(|mut c| c.ask(&q)).ok()?;
        let row = answer["volumes"].as_array()?.iter();
        let row = row.into_iter().find(|r| r["volume"] == *self.volume)?;
        gone(&self.me, row["state"].as_str()?)
    }

    /// Who is primary now.
    fn ask(&self) -> Who {
        self.ask_for(Duration::ZERO)
    }

    /// Whether the program may start here: known as soon as it may, or after
    /// `wait`.
    pub fn is_ready_within(&self, wait: Duration) -> bool {
        matches!(self.ask_for(wait), Who::Me)
    }

    fn ask_for(&self, wait: Duration) -> Who {
        let wait = wait.as_millis() as u64;
        let q = Request::Post {
            volume: self.volume.clone(),
            wait,
        };
        let client = Client::connect(&self.env, &self.daemon, &self.cluster, TIMEOUT);
        match client.and_then(|mut c| c.ask_for::<request::Post>(&q)) {
            Ok(a) if a.ready => Who::Me,
            Ok(a) => match a.primary {
                Some(p) if p == self.me => Who::Soon,
                Some(p) => Who::Another(p),
                None => Who::Another("the configuration's primary, first".into()),
            },
            Err(e) if [libc::ENOENT, libc::ECONNREFUSED].contains(&e.errno()) => {
                Who::Gone(plain(&e))
            }
            Err(e) => Who::Unknown(plain(&e)),
        }
    }
}

/// What is said of node `me`, the primary by the register, whose copy is in this state; None while it may
/// take over.
fn gone(me: &str, state: &str) -> Option<String> {
    ["new", "empty"].contains(&state).then(|| {
        format!(
            "node {me} is the primary by the register of views, and its copy is {state}: nobody takes over. `mojim status` says which node's copy is whole, and what to do"
        )
    })
}

/// What is waited for, and whether it was reported.
struct Wait<'a> {
    post: &'a Post,
    config: &'a Config,
    file: &'a Path,
    began: Instant,
    what: String,
    since: (Instant, SystemTime),
    said: bool,
    /// Why this node does not take over, though it should, and when that was asked last.
    lacks: Option<String>,
    looked: Instant,
}

impl<'a> Wait<'a> {
    fn new(post: &'a Post, config: &'a Config, file: &'a Path) -> Wait<'a> {
        Wait {
            post,
            config,
            file,
            began: Instant::now(),
            what: String::new(),
            since: (Instant::now(), SystemTime::now()),
            said: false,
            lacks: None,
            looked: Instant::now(),
        }
    }

    /// What is waited for, in words.
    fn describe(&self, who: &Who) -> String {
        let me = &self.post.me;
        let at = |name: &str| match self.config.node(name) {
            Ok(n) => format!("node {name} at {}", n.address),
            Err(_) => name.to_owned(),
        };
        match who {
            Who::Me => String::new(),
            Who::Another(other) => format!(
                "{} is the primary; the program starts here when node {me} takes over",
                at(other)
            ),
            Who::Soon => {
                let lacks = self.lacks.as_ref();
                lacks.map_or_else(|| format!("node {me} is taking over"), Clone::clone)
            }
            Who::Unknown(e) => format!(
                "the daemon of node {me} at {} cannot say who the primary is: {e}",
                self.post.daemon
            ),
            Who::Gone(e) => format!(
                "the daemon of node {me} is not there: {e}; start it: {}",
                self.command()
            ),
        }
    }

    fn command(&self) -> String {
        let file = self.file.display();
        format!("mojim node --config {file} --name {}", self.post.me)
    }

    /// Notes what is waited for now, and reports it once.
    fn is_for(&mut self, who: &Who, say: &impl Fn(String)) {
        if matches!(who, Who::Soon) && self.looked.elapsed() >= SILENCE {
            self.looked = Instant::now();
            self.lacks = self.post.lacks();
        }
        let what = self.describe(who);
        if what != self.what {
            self.what = what;
            self.since = (Instant::now(), SystemTime::now());
            self.said = false;
        }
        if !self.said && !self.what.is_empty() && self.began.elapsed() >= SILENCE {
            self.said = true;
            say(format!(
                "waiting, since {}: {}",
                clock(self.since.1),
                self.what
            ));
        }
    }

    /// Whether only a person can end this wait: there has been no daemon for longer than
    /// it takes to start one again.
    fn is_hopeless(&self, who: &Who) -> bool {
        matches!(who, Who::Gone(_))
            && self.since.0.elapsed() >= RESTART.max(self.config.failure_limit * 3)
    }

    /// The error that ends a hopeless wait.
    fn failure(&self) -> Failure {
        Failure::failed(format!(
            "volume {}: given up, after waiting since {}: {}",
            self.post.volume,
            clock(self.since.1),
            self.what
        ))
    }
}

/// The time of day.
fn clock(t: SystemTime) -> String {
    let s = t.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let s = s.as_secs() % 86400;
    format!("{:02}:{:02}:{:02} UTC", s / 3600, s / 60 % 60, s % 60)
}

/// Makes a start possible, and keeps it so while what it returns lives.
pub type Prepare<'a> = dyn FnMut(&mut Pause) -> Result<Option<MountLease>, Failure> + 'a;

/// What may have ended a program in this way.
pub type Why<'a> = dyn Fn(ExitStatus) -> Option<String> + 'a;

/// Has the program told what comes to this process, and this process hear of both. The program gets
/// `death` when this process dies.
fn listen(
    command: &mut Command,
    death: Signal,
) -> Result<(Sender<Event>, Receiver<Event>), Failure> {
    signals::block_passed_on()?;
    let of_children = OfChildren::hear()?;
    let me = rustix::process::getpid();
    // SAFETY: between fork and exec only the signal mask, an action and the parent-death signal are
    // changed, by one system call each.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(death))?;
            // Before that it got no signal.
            if rustix::process::getppid() != Some(me) {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            of_children.restore();
            signals::unblock_passed_on()
        });
    }
    let (tell, events) = channel();
    let signal = tell.clone();
    std::thread::spawn(move || {
        while let Ok(came) = signals::wait_passed_on() {
            if signal.send(Event::Signal(came)).is_err() {
                return;
            }
        }
    });
    Ok((tell, events))
}

/// Runs the command once; ends with it. `prepare` is called before; `why`: what may have ended it.
pub fn once(mut command: Command, prepare: &mut Prepare, why: &Why, volume: &str) -> Done {
    // Who kills this process means the program.
    let (tell, events) = listen(&mut command, Signal::KILL)?;
    let say = |text: String| say_on_stderr(&format!("volume {volume}: {text}"));
    let at_once = |f: Failure| match f.code {
        LATER => Failure { code: 1, ..f },
        _ => f,
    };
    let held = match prepare_until(prepare, &events) {
        Err(came) => return Ok(code_of(came)),
        Ok(held) => held.map_err(at_once)?,
    };
    let program = start(&mut command, &tell).map_err(at_once)?;
    drop(held);
    leave_input_and_output();
    loop {
        match events.recv() {
            Ok(Event::Signal(came)) => program.pass_on(came),
            Ok(Event::Ended(status)) => {
                let status = status?;
                if status.signal().is_some() {
                    say_end(status, why, &say);
                }
                return Ok(code(status));
            }
            Err(_) => unreachable!("this function can send"),
        }
    }
}

/// The program has them. Who reads what it writes sees the end when it closes them, and not when this
/// process ends.
fn leave_input_and_output() {
    let Ok(null) = File::options().read(true).write(true).open("/dev/null") else {
        return;
    };
    for of in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: changes two descriptors of this process that nothing here uses any more.
        unsafe { libc::dup2(null.as_raw_fd(), of) };
    }
}

/// Runs the command whenever `node` is the primary of `volume`; ends with it. `prepare` is
/// called before each start.
pub fn run(
    mut command: Command,
    prepare: &mut Prepare,
    why: &Why,
    config: &Config,
    file: &Path,
    node: &Node,
    volume: &Volume,
) -> Done {
    let (tell, events) = listen(&mut command, Signal::TERM)?;
    let post = Post::new(config, node, &volume.name)?;
    let say = |text: String| say_on_stderr(&format!("volume {}: {text}", volume.name));
    let beat = config.heartbeat;
    loop {
        let wait = Wait::new(&post, config, file);
        if let Some(came) = wait_until_primary(wait, &events, beat, &say)? {
            return Ok(code_of(came));
        }
        say(format!(
            "node {} is the primary; the program starts",
            node.name
        ));
        let started = match prepare_until(prepare, &events) {
            Err(came) => return Ok(code_of(came)),
            Ok(held) => held.and_then(|held| Ok((start(&mut command, &tell)?, held))),
        };
        let (program, held) = match started {
            // The view has changed again, or a dead process's copy is still looked at.
            Err(f) if f.code == LATER => {
                say(f.text);
                if let Ok(Event::Signal(came)) = events.recv_timeout(beat) {
                    return Ok(code_of(came));
                }
                continue;
            }
            started => started?,
        };
        drop(held);
        let wait = Wait::new(&post, config, file);
        let over = guard(&program, wait, &events, beat, &say)?;
        let wait = Wait::new(&post, config, file);
        let who = who_now(wait, over.is_asked_for, &events, beat, &say);
        if let Some(why) = over.waits_again(who) {
            say(format!("the program ended ({}); {why}", over.status));
            continue;
        }
        if !over.status.success() {
            say_end(over.status, why, &say);
        }
        return Ok(code(over.status));
    }
}

/// How a program ended.
struct Over {
    status: ExitStatus,
    /// Somebody asked this process to end.
    is_asked_for: bool,
    /// The node for whose sake this process ended it.
    gave_way_to: Option<String>,
}

impl Over {
    /// Why the program waits for its next turn, if it does. `who` is primary now, if that is known.
    fn waits_again(&self, who: Option<Who>) -> Option<String> {
        match (self.is_asked_for, who?) {
            (true, _) => None,
            (false, Who::Another(other)) => Some(format!("node {other} is the primary now")),
            (false, _) => {
                let other = self.gave_way_to.as_ref()?;
                Some(format!(
                    "it ended for node {other}, which is no longer the primary"
                ))
            }
        }
    }
}

fn say_end(status: ExitStatus, why: &Why, say: &impl Fn(String)) {
    let why = why(status).map_or(String::new(), |w| format!(": {w}"));
    say(format!("the program ended ({status}){why}"));
}

/// The exit code for the end of the program.
fn code(status: ExitStatus) -> u8 {
    match status.code() {
        Some(c) => c as u8,
        None => 128 + status.signal().unwrap_or(0) as u8,
    }
}

/// The exit code where a signal came and no program runs.
fn code_of(came: Came) -> u8 {
    128 + came.number as u8
}

/// What `prepare` makes of it; or the signal that came meanwhile.
fn prepare_until(
    prepare: &mut Prepare,
    events: &Receiver<Event>,
) -> Result<Result<Option<MountLease>, Failure>, Came> {
    let mut came = None;
    let held = prepare(&mut |time| {
        if let Ok(Event::Signal(signal)) = events.recv_timeout(time) {
            came = Some(signal);
        }
        came.is_some()
    });
    // Also one that came last: typed before the program is there, it is not the program's.
    if came.is_none()
        && let Ok(Event::Signal(signal)) = events.try_recv()
    {
        came = Some(signal);
    }
    match came {
        Some(came) => Err(came),
        None => Ok(held),
    }
}

/// Who is primary once the program has ended; None if that is given up. A program whose node was replaced
/// may end by itself, with an error of its sync points: that is no end of its work.
fn who_now(
    mut wait: Wait,
    is_asked_for: bool,
    events: &Receiver<Event>,
    beat: Duration,
    say: &impl Fn(String),
) -> Option<Who> {
    loop {
        let who = match wait.post.ask() {
            who @ (Who::Unknown(_) | Who::Gone(_)) if !is_asked_for => who,
            who => return Some(who),
        };
        wait.is_for(&who, say);
        if wait.is_hopeless(&who) {
            say(format!(
                "cannot find out whether another node is the primary now: {}; given up",
                wait.what
            ));
            return None;
        }
        if let Ok(Event::Signal(_)) = events.recv_timeout(beat) {
            return None;
        }
    }
}

fn start(command: &mut Command, tell: &Sender<Event>) -> Result<Program, Failure> {
    let mut child: Child = command.spawn().map_err(|e| {
        let name = command.get_program().to_string_lossy();
        let f = Failure::not_started(&e, format!("running {name}: {e}"));
        match e.raw_os_error() {
            // The mount has just ended.
            Some(namespace::ENDED) => Failure { code: LATER, ..f },
            _ => f,
        }
    })?;
    // The child has not been reaped yet, so its ID is still its own.
    let id = Pid::from_child(&child);
    let process = pidfd_open(id, PidfdFlags::empty());
    let tell = tell.clone();
    std::thread::spawn(move || {
        let ended = child.wait();
        let _ = tell.send(Event::Ended(ended));
    });
    let process = process.map_err(std::io::Error::from)?;
    Ok(Program { process, id })
}

/// The signal that came instead, if one did.
fn wait_until_primary(
    mut wait: Wait,
    events: &Receiver<Event>,
    beat: Duration,
    say: &impl Fn(String),
) -> Result<Option<Came>, Failure> {
    loop {
        let who = wait.post.ask_for(WAIT);
        if let Who::Me = who {
            return Ok(None);
        }
        wait.is_for(&who, say);
        if wait.is_hopeless(&who) {
            return Err(wait.failure());
        }
        // A daemon that is gone is not asked again at once.
        let pause = match who {
            Who::Gone(_) => beat,
            _ => beat.min(PAUSE),
        };
        if let Ok(Event::Signal(came)) = events.recv_timeout(pause) {
            return Ok(Some(came));
        }
    }
}

/// Waits for the program's end, and ends it when another node is the primary. Reports it while the
/// daemon or the voters do not answer.
fn guard(
    program: &Program,
    mut wait: Wait,
    events: &Receiver<Event>,
    beat: Duration,
    say: &impl Fn(String),
) -> Result<Over, Failure> {
    let mut is_asked_for = false;
    let mut asked: Option<(Instant, String)> = None;
    loop {
        match events.recv_timeout(beat) {
            Ok(Event::Ended(status)) => {
                return Ok(Over {
                    status: status?,
                    is_asked_for,
                    gave_way_to: asked.map(|(_, other)| other),
                });
            }
            Ok(Event::Signal(came)) => {
                is_asked_for |= came.asks_for_the_end();
                program.pass_on(came);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("this function's caller can send"),
        }
        match &asked {
            Some((since, _)) if since.elapsed() > GRACE => program.signal(Signal::KILL),
            Some(_) => {}
            None => match wait.post.ask() {
                Who::Another(other) => {
                    say(format!(
                        "node {other} is the primary now; the program is ended"
                    ));
                    program.signal(Signal::TERM);
                    asked = Some((Instant::now(), other));
                }
                who @ (Who::Unknown(_) | Who::Gone(_)) => wait.is_for(&who, say),
                Who::Me | Who::Soon => {
                    if wait.said {
                        say(format!("the daemon of node {} answers again", wait.post.me));
                    }
                    wait = Wait::new(wait.post, wait.config, wait.file);
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "Node b is taking over" was said without end by a node whose copy was gone.
    #[test]
    fn who_has_no_copy_is_not_said_to_take_over() {
        let text = "cluster = \"c\"\n[volume.v]\nprimary = \"b\"\nmode = \"unreplicated\"\n[node.b]\naddress = \"127.0.0.1:1\"\ndirectory = \"/nowhere\"\n";
        let file = Path::new("test.toml");
        let config = Config::parse(text, file).unwrap();
        let post = Post::new(&config, config.node("b").unwrap(), "v").unwrap();
        let mut wait = Wait::new(&post, &config, file);
        let mut said = |state: &str| {
            wait.lacks = gone("b", state);
            wait.describe(&Who::Soon)
        };
        for state in ["empty", "new"] {
            assert!(said(state).contains("nobody takes over"), "{}", said(state));
        }
        for state in ["whole", "loading", "damaged"] {
            assert_eq!(said(state), "node b is taking over");
        }
    }

    /// Another node was primary for a moment, and the program was ended for its sake. By then this node was the
    /// primary again: `mojim run` ended as well, and no node ran the program.
    #[test]
    fn a_program_that_gave_way_is_started_again() {
        let over = |is_asked_for, gave_way_to: Option<&str>| Over {
            status: ExitStatus::from_raw(libc::SIGTERM),
            is_asked_for,
            gave_way_to: gave_way_to.map(str::to_owned),
        };
        for who in [Who::Me, Who::Soon] {
            let said = over(false, Some("b")).waits_again(Some(who));
            assert!(said.is_some_and(|s| s.contains("ended for node b")));
        }
        // It is still; also where the program ended by itself, as its sync points fail.
        let another = || Some(Who::Another("b".into()));
        for gave_way_to in [Some("b"), None] {
            let said = over(false, gave_way_to).waits_again(another());
            assert_eq!(said.as_deref(), Some("node b is the primary now"));
        }
        // Its work is done, somebody ends it, or nothing is known.
        assert_eq!(over(false, None).waits_again(Some(Who::Me)), None);
        assert_eq!(over(true, Some("b")).waits_again(another()), None);
        assert_eq!(over(false, Some("b")).waits_again(None), None);
    }
}
