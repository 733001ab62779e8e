//! A program that runs where its volume's primary is.
//!
//! Owns the program's process: started when the register of views says that
//! this node is the primary, ended when it says another one is, and started
//! again. That a program on the wrong node can commit nothing is not its
//! affair: the mirror and the register see to that.

use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mojim::client::Client;
use mojim::config::{Config, Node, Volume};
use mojim::env::{Address, Env};
use mojim::layout;
use mojim::os::Os;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;

use crate::failure::{Done, Failure, say_on_stderr};
use crate::signals;

/// How long the daemon may take to answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long a question waits for this node to become primary.
const WAIT: Duration = Duration::from_millis(500);
/// Between two such questions.
const PAUSE: Duration = Duration::from_millis(1);
/// How long a program may take to end before it is killed.
const GRACE: Duration = Duration::from_secs(5);

enum Event {
    /// This process was asked to end.
    Signal(i32),
    /// The program ended.
    Ended(std::io::Result<ExitStatus>),
}

/// A running program. Its descriptor means this process and no other, also
/// after it has ended and its number was given to another one.
struct Program(OwnedFd);

impl Program {
    fn signal(&self, signal: Signal) {
        // One that has ended needs no signal.
        let _ = pidfd_send_signal(&self.0, signal);
    }
}

/// Who is primary.
enum Who {
    Me,
    Another(String),
    /// The daemon or the voters do not answer.
    Unknown(String),
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
    /// Asked about `volume` on `node`.
    pub fn new(config: &Config, node: &Node, volume: &str) -> Result<Post, Failure> {
        Ok(Post {
            env: Arc::new(Os::new()?),
            daemon: Address::Unix(layout::socket(node)),
            cluster: config.cluster.clone(),
            me: node.name.clone(),
            volume: volume.to_owned(),
        })
    }

    /// As it is now.
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
        let q = json!({
            "what": "post", "cluster": self.cluster, "volume": self.volume, "wait": wait,
        });
        let answer = Client::connect(&self.env, &self.daemon, TIMEOUT).and_then(|mut c| c.ask(&q));
        match answer {
            Ok(a) if a["ready"] == true => Who::Me,
            Ok(a) => match a["primary"].as_str() {
                Some(p) if p == self.me => Who::Unknown("this node is taking over".into()),
                Some(p) => Who::Another(p.to_owned()),
                None => Who::Another("the configuration's primary, first".into()),
            },
            Err(e) => Who::Unknown(e.to_string()),
        }
    }
}

/// Runs the command whenever `node` is the primary of `volume`; ends with it.
pub fn run(mut command: Command, config: &Config, node: &Node, volume: &Volume) -> Done {
    signals::block()?;
    // SAFETY: between fork and exec only the signal mask and the wish to be
    // told of the parent's end are changed, both by one system call each.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            signals::unblock()
        });
    }
    let (tell, events) = channel();
    let signal = tell.clone();
    std::thread::spawn(move || {
        while let Ok(s) = signals::wait() {
            if signal.send(Event::Signal(s)).is_err() {
                return;
            }
        }
    });
    let post = Post::new(config, node, &volume.name)?;
    let say = |text: String| say_on_stderr(&format!("volume {}: {text}", volume.name));
    let beat = config.heartbeat;
    loop {
        if let Some(signal) = wait_until_primary(&post, &events, beat, &say) {
            return Ok(128 + signal as u8);
        }
        say(format!(
            "node {} is the primary; the program starts",
            node.name
        ));
        let program = start(&mut command, &tell)?;
        let (status, signalled) = guard(&program, &post, &events, beat, &say)?;
        // A program whose node was replaced may end by itself, with an error
        // of its sync points: that is no end of its work.
        let who = loop {
            match post.ask() {
                Who::Unknown(_) if !signalled => match events.recv_timeout(beat) {
                    Ok(Event::Signal(_)) => break Who::Me,
                    _ => continue,
                },
                who => break who,
            }
        };
        match who {
            Who::Another(other) if !signalled => say(format!(
                "the program ended ({status}); node {other} is the primary now"
            )),
            _ => {
                return Ok(match status.code() {
                    Some(c) => c as u8,
                    None => 128 + status.signal().unwrap_or(0) as u8,
                });
            }
        }
    }
}

fn start(command: &mut Command, tell: &Sender<Event>) -> Result<Program, Failure> {
    let mut child: Child = command.spawn().map_err(|e| {
        Failure::failed(format!(
            "running {}: {e}",
            command.get_program().to_string_lossy()
        ))
    })?;
    // Nobody has waited for it yet, so the number is still its own.
    let program = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let tell = tell.clone();
    std::thread::spawn(move || {
        let ended = child.wait();
        let _ = tell.send(Event::Ended(ended));
    });
    Ok(Program(program.map_err(std::io::Error::from)?))
}

/// The number of the signal that came instead, if one did.
fn wait_until_primary(
    post: &Post,
    events: &Receiver<Event>,
    beat: Duration,
    say: &impl Fn(String),
) -> Option<i32> {
    let mut told = String::new();
    loop {
        let why = match post.ask_for(WAIT) {
            Who::Me => return None,
            Who::Another(other) => {
                format!("waiting: node {other} is the primary, not {}", post.me)
            }
            Who::Unknown(e) => format!("waiting: who is primary is not known: {e}"),
        };
        if why != told {
            say(why.clone());
            told = why;
        }
        // Who does not answer is not asked again at once.
        if let Ok(Event::Signal(s)) = events.recv_timeout(beat.min(PAUSE)) {
            return Some(s);
        }
    }
}

/// Waits for the program's end, and ends it when this node is primary no
/// longer. Returns its status, and whether this process was asked to end it.
fn guard(
    program: &Program,
    post: &Post,
    events: &Receiver<Event>,
    beat: Duration,
    say: &impl Fn(String),
) -> Result<(ExitStatus, bool), Failure> {
    let mut signalled = false;
    let mut asked: Option<Instant> = None;
    loop {
        match events.recv_timeout(beat) {
            Ok(Event::Ended(status)) => return Ok((status?, signalled)),
            Ok(Event::Signal(s)) => {
                signalled = true;
                if let Some(s) = Signal::from_named_raw(s) {
                    program.signal(s);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("this function's caller can send"),
        }
        match asked {
            Some(since) if since.elapsed() > GRACE => program.signal(Signal::KILL),
            Some(_) => {}
            None => {
                if let Who::Another(other) = post.ask() {
                    say(format!(
                        "node {other} is the primary now; the program is ended"
                    ));
                    program.signal(Signal::TERM);
                    asked = Some(Instant::now());
                }
            }
        }
    }
}
