//! Where a volume is attached, and how a process becomes its primary there.
//!
//! Owns the way from a configuration to an epoch: the node's role in the volume, the lock of its
//! copy, what is agreed with the mirror and the register of views.
//!
//! Invariant: no process begins an epoch on a node whose own copy names another primary. This is
//! checked before the lock is taken, since on a node that follows the daemon holds the lock, and
//! again under the lock.

use std::sync::Arc;
use std::time::Duration;

use mojim_config::{Config, Failover, Fallback, Mode, Node, Volume as VolumeConfig};
use mojim_copy::stream::StreamThreads;
use mojim_env::{Address, Context, Env, Error, Locker, Result};
use mojim_format::certificate::Subject;
use mojim_format::{State, View};
use mojim_linux::rings;
use mojim_linux::{Os, trust};
use mojim_replica::attach::{Attach, AttachPolicy, Attaching};
use mojim_replica::client::Client;
use mojim_replica::holders::{Holders, Peer};
use mojim_replica::layout;
use mojim_replica::primary::Primary;
use mojim_replica::register::{RegisterWorker, RemoteRegister, VIEW_TIMEOUT, ViewRegister};
use mojim_replica::request::{Request, Standing};
use mojim_replica::session::Session;
use mojim_replica::told::Told;
use mojim_replica::view_client::ViewClient;
use mojim_store::store::{Store, read_superblock};

/// How long a program waits until a daemon gives way that brings the mirror up to date, or makes
/// persistent what a program left.
const GIVES_WAY: Duration = Duration::from_secs(30);

/// How long another node may take to say which view it knows.
const PATIENCE: Duration = Duration::from_millis(500);

/// For whom a volume is attached.
#[derive(Clone, Copy)]
pub(super) struct Attacher<'a> {
    /// A program; otherwise the node's daemon, to bring the mirror up to date.
    pub is_program: bool,
    /// Whether nobody waits for the attach any more.
    pub given_up: &'a dyn Fn() -> bool,
}

impl Attacher<'_> {
    fn check(&self) -> Result<()> {
        match (self.given_up)() {
            true => Err(Error::Busy("the attach is given up".into())),
            false => Ok(()),
        }
    }
}

/// Which volume is attached, on which node, over which environment.
pub(super) struct AttachTarget {
    pub config: Config,
    pub volume: VolumeConfig,
    pub node: Node,
    pub os: Os,
    /// Made from `os`.
    pub env: Arc<dyn Env>,
}

impl AttachTarget {
    /// Finds node and volume by name; `volume` may be left out if the configuration has only one.
    pub fn of(
        config: &Config,
        node: &str,
        volume: Option<&str>,
        over: impl FnOnce(Os) -> Arc<dyn Env>,
    ) -> Result<AttachTarget> {
        let wrong = |e: mojim_config::ConfigError| Error::Config(e.to_string());
        let volume = config.volume(volume).map_err(wrong)?.clone();
        let node = config.node(node).map_err(wrong)?.clone();
        config.check_media(&node.name).map_err(wrong)?;
        if !volume.data_nodes().contains(&node.name.as_str()) {
            return Err(Error::Invalid(format!(
                "node {} does not hold volume {}: its nodes are {}",
                node.name,
                volume.name,
                volume.data_nodes().join(", ")
            )));
        }
        let os = Os::of(config, &Subject::Node(node.name.clone()))?;
        let os = os.encrypting(volume.encrypt);
        let env = over(os.clone());
        Ok(AttachTarget {
            config: config.clone(),
            volume,
            node,
            os,
            env,
        })
    }

    /// Opens the node's copy for its primary, and so takes its lock.
    pub fn open(&self, who: Attacher) -> Result<Store> {
        // Before the lock: on a node that follows, its daemon holds that.
        self.check_known()?;
        let store = self.open_store(who)?;
        let sb = store.superblock();
        self.check_primary(&sb.view)?;
        if sb.state == State::Whole && store.poisoned().is_none() {
            store.area().find(""); // the area is open
        }
        Ok(store)
    }

    /// Fails unless this node is the primary, as its own copy knows now.
    fn check_known(&self) -> Result<()> {
        let view = read_superblock(&*self.env, &layout::meta_dir(&self.node, &self.volume.name))?
            .map(|sb| sb.view)
            .unwrap_or_default();
        self.check_primary(&view)
    }

    /// Fails unless this node is the primary by `view`, the view that its own copy knows.
    fn check_primary(&self, view: &View) -> Result<()> {
        let (node, volume) = (&self.node, &self.volume);
        let (primary, epoch) = if view.epoch == 0 {
            (&volume.primary, String::new())
        } else {
            (&view.primary, format!(", in epoch {}", view.epoch))
        };
        if *primary == node.name {
            return Ok(());
        }
        // A backup's copy need not know the view's mirror.
        let mirror = Some(&view.mirror).filter(|m| !m.is_empty());
        let mirror = mirror.or(volume.mirror.as_ref()).filter(|m| *m != primary);
        let then = instead(volume.failover, primary, mirror.map(String::as_str));
        Err(Error::Stale(format!(
            "node {} is not the primary of volume {}: {primary} is{epoch}, as far as is known here. Run the program there{then}",
            node.name, volume.name
        )))
    }

    /// The node's daemon holds the lock while it handles the ring of a program that died, and
    /// while it brings the mirror up to date. It is asked to give way, and waited for.
    fn open_store(&self, who: Attacher) -> Result<Store> {
        let (config, node, volume, env) = (&self.config, &self.node, &self.volume, &self.env);
        let start = env.now();
        const SECOND: Duration = Duration::from_secs(1);
        let (mut patience, mut asked) = (SECOND, start);
        let dirs = layout::own_dirs(node, &volume.name);
        let check = || trust::check(&dirs).context(|| format!("volume {}", volume.name));
        check()?;
        trust::check_bare(&layout::data_dir(node, &volume.name))
            .context(|| format!("volume {}", volume.name))?;
        rings::note(config, node)?;
        let locker = match who.is_program {
            true => Locker::Program,
            false => Locker::Node,
        };
        loop {
            match Store::open(env, layout::store(config, node, volume, locker)) {
                // Again, for directories that `open` has made.
                Ok(store) => return check().map(|()| store),
                Err(Error::Busy(e)) => {
                    if !who.is_program {
                        return Err(Error::Busy(e));
                    }
                    who.check()?;
                    // The daemon is asked again: who has the lock by now may be a program.
                    let now = env.now();
                    if patience < GIVES_WAY || now - asked > SECOND {
                        asked = now;
                        // The lock says it, too, where the daemon is late with its answer.
                        let is_program = self.is_a_programs();
                        patience = match self.gives_way(SECOND) || !is_program {
                            true => GIVES_WAY,
                            false if patience < GIVES_WAY => patience,
                            false => now - start + SECOND,
                        };
                    }
                    if env.now() - start > patience {
                        // The daemon has it, perhaps, which has learnt of another primary.
                        if let Err(e @ Error::Stale(_)) = self.check_known() {
                            return Err(e);
                        }
                        return Err(Error::Busy(match self.is_a_programs() {
                            true => format!(
                                "{e}; only one process can be attached as primary, on the node that `mojim status` names"
                            ),
                            false => format!("{e}, the daemon of node {}: try again", node.name),
                        }));
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                r => return r,
            }
        }
    }

    /// Asks the node's daemon to give way. Whether it says, in time, that it has the copy.
    fn gives_way(&self, time: Duration) -> bool {
        let daemon = Address::Unix(layout::socket(&self.node));
        let q = Request::GiveWay {
            volume: self.volume.name.clone(),
        };
        let client = Client::connect(&self.env, &daemon, &self.config.cluster, time);
        client.and_then(|mut c| c.ask_for(&q)).unwrap_or(false)
    }

    /// Whether a program has the copy, as far as its lock tells.
    fn is_a_programs(&self) -> bool {
        let lock = layout::meta_dir(&self.node, &self.volume.name).join("lock");
        !matches!(self.env.locker(&lock), Ok(None | Some(Locker::Node)))
    }

    /// Begins an epoch: in the modes with a mirror together with it, over the returned session.
    pub fn begin(
        &self,
        primary: &Arc<Primary>,
        holders: &Arc<Holders>,
        progress: &mut dyn FnMut(u64, u64),
        who: Attacher,
    ) -> Result<Option<Session>> {
        let (node, volume) = (&self.node, &self.volume);
        let Some(peer) = layout::peer(&self.config, node, volume) else {
            primary.begin_unreplicated(&node.name)?;
            return Ok(None);
        };
        let explained = |e| match who.is_program {
            true => explained(e, &volume.name),
            // A daemon heals, and tries again by itself.
            false => e,
        };
        let view = primary.store.superblock().view;
        let by_hand = volume.failover == Failover::Manual;
        let others = layout::others(&self.config, node, volume);
        let answers = self.ask(&others);
        if by_hand {
            self.check_views(&answers, &peer.name, &view)?;
        }
        let told = answers.iter().filter_map(|(n, s)| Told::of(n, s)).collect();
        let mut s = Session::attach(primary.clone(), &node.name, peer).with_told(told);
        if volume.failover == Failover::Automatic {
            s = self.with_register(s, primary, holders).map_err(explained)?;
        }
        let policy = AttachPolicy {
            asynchronous: volume.mode == Mode::Async,
            failure_limit: (volume.failover == Failover::Automatic)
                .then_some(self.config.failure_limit),
            patience: volume.resend_timeout * volume.resend_attempts,
            may_go_alone: who.is_program,
        };
        wait_attached(&mut s, primary, policy, progress, who).map_err(explained)?;
        Ok(Some(s))
    }

    /// Fails if another node knows a later view than this node's copy, `view`, in which this one
    /// is not the primary: a node was promoted while this one was away, and would replace what it
    /// acknowledges now. Or in which this one, now new, was: it would begin an empty volume, and
    /// make the other copy one of that. What `mirror` knows itself, it tells over its session;
    /// where there is a register, that knows.
    fn check_views(&self, answers: &[(&str, Standing)], mirror: &str, view: &View) -> Result<()> {
        // Another node's numbers may be absurd.
        let sane = answers.iter().filter(|(_, s)| s.is_credible(view.epoch));
        let Some((teller, latest)) = sane.max_by_key(|(p, s)| (s.epoch, *p == mirror)) else {
            return Ok(());
        };
        let (me, name) = (&self.node.name, &self.volume.name);
        if latest.epoch <= view.epoch || *teller == mirror {
            return Ok(());
        }
        if latest.primary != *me {
            return Err(Error::Stale(format!(
                "node {} has been primary of volume {name} since epoch {}, as node {teller} says; node {me} knows epoch {} only. Run the program there, or promote a node: `mojim promote --name NODE`",
                latest.primary, latest.epoch, view.epoch
            )));
        }
        match view.epoch {
            0 => Err(Error::Stale(format!(
                "this node's copy of volume {name} is new, and the mirror may lack sync points of node {teller}, which is in epoch {}. Go on with that copy: `mojim promote --force --name {teller}`, and start the program there. To begin an empty volume instead, remove that copy",
                latest.epoch
            ))),
            _ => Ok(()),
        }
    }

    /// What other nodes say of their copies. A node that does not answer, or not in these
    /// words, is left out.
    fn ask<'a>(&self, others: &'a [Peer]) -> Vec<(&'a str, Standing)> {
        let mut answers = Vec::new();
        std::thread::scope(|s| {
            let mut asked = Vec::new();
            for p in others {
                let thread = std::thread::Builder::new().name("mojim-ask".into());
                // Without a thread for it, a node counts as one that does not answer.
                if let Ok(t) = thread.spawn_scoped(s, move || self.standing_of(p)) {
                    asked.push((p.name.as_str(), t));
                }
            }
            for (name, t) in asked {
                answers.extend(t.join().ok().flatten().map(|standing| (name, standing)));
            }
        });
        answers
    }

    /// What a node says of its copy, if it answers.
    fn standing_of(&self, peer: &Peer) -> Option<Standing> {
        mojim_env::threads::block_signals();
        let (to, cluster) = (&peer.tcp, &self.config.cluster);
        let mut c = Client::connect(&self.env, to, cluster, PATIENCE).ok()?;
        let volume = self.volume.name.clone();
        c.ask_for(&Request::Standing { volume }).ok()
    }

    /// A session that takes its views from the register, through the node's daemon.
    fn with_register(
        &self,
        s: Session,
        primary: &Arc<Primary>,
        holders: &Arc<Holders>,
    ) -> Result<Session> {
        let daemon = Address::Unix(layout::socket(&self.node));
        let (cluster, limit) = (&self.config.cluster, self.config.failure_limit);
        let advice = format!(
            "Volume {} is not attached. Start `mojim node --name {}`: a program asks the daemon of its node which node is the primary",
            self.volume.name, self.node.name
        );
        let views = RemoteRegister::new(&self.env, vec![daemon], cluster, VIEW_TIMEOUT);
        let views = views.advising(advice);
        let views: Arc<dyn ViewRegister> = Arc::new(views);
        let p = primary.clone();
        let errands = RegisterWorker::start(views.clone(), move || p.link_work.notify())?;
        let claim = ViewClient::new(views, Box::new(errands), limit);
        let s = s.with_views(claim, holders.clone())?;
        Ok(match self.volume.fallback {
            Fallback::Automatic => s.leased(),
            Fallback::Manual => s,
        })
    }
}

/// Steps the session and the attach policy until the primary has begun its epoch.
fn wait_attached(
    s: &mut Session,
    primary: &Primary,
    policy: AttachPolicy,
    progress: &mut dyn FnMut(u64, u64),
    who: Attacher,
) -> Result<()> {
    let mut attach = Attach::new(s, policy);
    // The threads end with their copy, also if the attach is given up.
    let mut streams = StreamThreads::default();
    loop {
        let moved = s.step();
        streams.start(s.take_streams());
        for lane in 0..primary.lanes.len() {
            primary.drive(lane)?;
        }
        if attach.step(s, progress)? == Attaching::Done {
            return Ok(());
        }
        who.check()?;
        if moved {
            continue;
        }
        match s.conn() {
            Some(c) => {
                let _ = c.wait(s.copies() == Some(true), Duration::from_millis(1));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The error of an attach, with what to do if a majority of the voters was not reached.
fn explained(e: Error, volume: &str) -> Error {
    match e {
        Error::Answered { errno, text } if errno == libc::ETIMEDOUT => Error::Answered {
            errno,
            text: format!(
                "{text}. Volume {volume} is attached once more than half of the voters vote: `mojim status` says which do not; start those, then the program"
            ),
        },
        e => e,
    }
}

/// Where else than at its primary a volume may go on, as far as is known here.
fn instead(failover: Failover, primary: &str, mirror: Option<&str>) -> String {
    let by_hand = mirror.map_or("promote its mirror (`mojim status`)".to_owned(), |m| {
        format!(
            "`mojim promote --name {m}`, and run it on node {m} (`mojim status` says who is the mirror now)"
        )
    });
    match failover {
        Failover::Automatic => format!(
            ". If the program and the daemon of node {primary} are both dead, its mirror takes over by itself, in seconds (`mojim status` says whether): run it there then. Otherwise end the program on node {primary}, then {by_hand}"
        ),
        Failover::Manual => format!(", or, if node {primary} is dead, {by_hand}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "`mojim promote`, if node a is dead" was said where the mirror takes over by itself (a
    /// new user).
    #[test]
    fn a_mirror_that_takes_over_by_itself_is_not_said_to_need_a_promotion() {
        let by_hand = instead(Failover::Manual, "a", Some("b"));
        assert!(by_hand.starts_with(", or, if node a is dead, `mojim promote --name b`"));
        for mirror in [None, Some("b")] {
            let said = instead(Failover::Automatic, "a", mirror);
            assert!(said.contains("its mirror takes over by itself"), "{said}");
            assert!(!said.contains("if node a is dead"), "{said}");
        }
    }

    /// Nothing said what to do without a majority (a new user).
    #[test]
    fn who_cannot_attach_is_told_what_to_start() {
        let away = Error::Answered {
            errno: libc::ETIMEDOUT,
            text: "no voter leads".into(),
        };
        let said = explained(away, "v");
        assert_eq!(said.errno(), libc::ETIMEDOUT);
        assert!(
            said.to_string()
                .contains("Volume v is attached once more than half")
        );
    }
}
