//! The simulated cluster of one seed, and who is who in it.
//!
//! Owns what was drawn, what the run has come to, and which nodes are taken for primary,
//! mirror and backup: by the register if there is one, else by the operator.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mojim_env::locks::lock;
use mojim_protocol::view::Register;
use mojim_replica::register::ViewRegister;

use super::counts::{Backups, Replacements, Spills};
use super::mutation::Mutation;
use super::node::{NAMES, Node, Role, node};
use super::setup::{REPLACES, Setup};
use crate::check::{Checker, Violation};
use crate::nodes::NODES;
use crate::rng::Rng;
use crate::rot::Rot;
use crate::views::{SimRegister, SimViews};
use crate::world::World;

pub(super) type Checked<T = ()> = Result<T, Violation>;

/// The simulated cluster of one seed.
pub struct Cluster {
    /// Its world.
    pub world: World,
    /// What each copy holds, and what it must hold.
    pub check: Checker,
    /// Sync points appended.
    pub appended: u64,
    /// Promotions.
    pub promotions: u64,
    /// The epoch of the last promotion after an attach that only an operator could
    /// settle.
    pub(super) word_of: u64,
    /// Restarts of processes.
    pub starts: u64,
    /// Copies that could not be opened, since their data areas had more than their
    /// damaged logs.
    pub unopened: u64,
    /// Runs at whose end copies differ for this reason.
    pub differ: u64,
    /// Whole copies received, and those that rest partly on older files.
    pub copies: [u64; 2],
    /// How many of these copies the processes of each node have counted.
    pub(super) counted: [[u64; 2]; NODES],
    /// What backups did.
    pub backups: Backups,
    /// What became of spill files.
    pub spilled: Spills,
    /// What became of nodes that were replaced.
    pub replaced: Replacements,
    /// What was drawn.
    pub setup: Setup,
    pub(super) rng: Rng,
    pub(super) nodes: [Node; NODES],
    /// The longest record so far, with what may lie before it in a ring.
    pub(super) longest: u64,
    /// The nodes that hold the volume, by their place in the configuration: primary,
    /// mirror, backups.
    pub(super) places: Vec<usize>,
    /// Each node's place at first, or that of the node that it replaced.
    pub(super) rank: [u64; NODES],
    /// The replacement of a node, in a seed that may have one.
    pub(super) replacing: Option<Replacing>,
    /// The register no longer names the replaced node, and no program goes by it.
    pub(super) left_gone: bool,
    /// Draws which of several backups a step is about.
    pub(super) which: Rng,
    /// The node on which the program runs: by the operator's will, or by the register.
    pub(super) primary: usize,
    /// The last primary that had a mirror, and the mirror.
    pub(super) pair: [usize; 2],
    /// The mirror, if it was a backup before.
    pub(super) risen: Option<usize>,
    pub(super) register: Arc<Mutex<SimRegister>>,
    /// The register as it was last looked at.
    pub(super) seen: Register,
    /// Draws when a mirror's copy is to be made anew.
    pub(super) anew: Rng,
    /// This mirror, which takes over if its primary is dead at the next trouble.
    pub(super) suspects: Option<usize>,
    /// Draws when disks become full; `None` if they never do.
    pub(super) full: Option<Rng>,
    /// Draws when bits rot on disks; `None` if they never do.
    pub(super) rot: Option<Rot>,
    /// Draws when a disk comes back as of an earlier time; `None` if none does.
    pub(super) earlier: Option<Earlier>,
    /// Draws sync points larger than the log; `None` if there are none.
    pub(super) spills: Option<Rng>,
    pub(super) mutation: Option<Mutation>,
    pub(super) calm: bool,
    /// No node can go on by itself: the nodes whose copies must have lost something to
    /// justify it.
    pub(super) nobody: Option<Vec<usize>>,
    /// How often a node had lost its power when the register first named this
    /// life of its copy; if its log is in memory, when this life was first seen: a loss of power
    /// ends it, also before the register names it.
    pub(super) named: BTreeMap<(usize, u64), u32>,
    /// The register's version, and how often each node had lost its power when this
    /// version came. A node named by the next version may have lost its power while that
    /// one was asked for.
    pub(super) version: (u64, [u32; NODES]),
    /// A node whose promotion failed at its end, and so may have happened.
    pub(super) half_promoted: Option<usize>,
    pub(super) names: u64,
}

/// What is to come back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) node: usize,
    /// The life of its copy, and its epoch.
    pub(super) life: u64,
    pub(super) epoch: u64,
    /// What names its logs' memory, since its last opening.
    pub(super) nonce: u64,
    /// The mirror was a member.
    pub(super) paired: bool,
}

/// Whose disk comes back as of an earlier time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Primarys,
    Mirrors,
}

/// A seed in which a disk may come back as of an earlier time.
pub(super) struct Earlier {
    pub(super) whose: Whose,
    pub(super) rng: Rng,
    pub(super) kept: Option<Kept>,
    /// How often it may still happen.
    pub(super) left: u32,
    /// A mirror whose disk came back, and whose primary dies as soon as it has greeted that mirror.
    pub(super) awaits: Option<usize>,
}

impl Earlier {
    /// Draws whether a seed has this: one of six, and each for the sake of `mutation`.
    pub(super) fn draw(seed: u64, setup: &Setup, mutation: Option<Mutation>) -> Option<Earlier> {
        let mut rng = Rng::new(seed ^ 0x6561_726c_6965_7200);
        let wanted = mutation == Some(Mutation::TellOld);
        let drawn = rng.below(6) == 0 || wanted;
        // What a backup goes on with by itself, and the replacement of a node that has less
        // than it had, are not modelled.
        let fits = setup.replicated() && !setup.spare && !setup.fallback;
        (drawn && fits).then_some(Earlier::new(Whose::Primarys, rng))
    }

    /// Draws whether a seed has this for the mirror's disk, one of six of those with a register,
    /// which knows what the mirror had promised, and each for the sake of `mutation`. Seeds of
    /// other mutations stay as they are.
    pub(super) fn draw_mirrors(
        seed: u64,
        setup: &Setup,
        mutation: Option<Mutation>,
    ) -> Option<Earlier> {
        let mut rng = Rng::new(seed ^ 0x6d69_7272_6f72_87a8);
        let drawn = match mutation {
            None => rng.below(6) == 0,
            Some(m) => m.needs_earlier_mirror(),
        };
        let fits = setup.views && !setup.spare && !setup.fallback;
        (drawn && fits).then_some(Earlier::new(Whose::Mirrors, rng))
    }

    fn new(whose: Whose, rng: Rng) -> Earlier {
        Earlier {
            whose,
            rng,
            kept: None,
            left: 3,
            awaits: None,
        }
    }
}

/// A seed in which a node may be replaced.
pub(super) struct Replacing {
    pub(super) rng: Rng,
    /// The node that was replaced, and the register's version then.
    pub(super) gone: Option<(usize, u64)>,
}

impl Replacing {
    /// A replacement still to come, which draws from `rng`.
    pub(super) fn new(rng: Rng) -> Replacing {
        Replacing { rng, gone: None }
    }
}

/// Draws which bytes are lost that were durable: one kind of lost bytes at a time.
fn draw_losses(
    seed: u64,
    setup: &Setup,
    mutation: Option<Mutation>,
) -> (Option<Rot>, Option<Earlier>) {
    let damage = Rot::draw(seed, mutation.is_some_and(Mutation::needs_damage));
    // The replacement of a node whose copy is damaged is not modelled.
    let damage = damage.filter(|_| !setup.spare);
    match (damage, Earlier::draw(seed, setup, mutation)) {
        (_, Some(earlier)) => (None, Some(earlier)),
        (None, None) => (None, Earlier::draw_mirrors(seed, setup, mutation)),
        (damage, None) => (damage, None),
    }
}

impl Cluster {
    /// A cluster that has not started.
    pub fn new(seed: u64, mutation: Option<Mutation>) -> Cluster {
        let replaces = seed & REPLACES != 0 || mutation == Some(Mutation::CallReplaced);
        let seed = seed & !REPLACES;
        let mut rng = Rng::new(seed ^ 0x6d6f_6a69_6d00);
        let mut setup = Setup::of_seed(seed, mutation, &mut rng);
        let mut spare = Rng::new(seed ^ 0x7370_6172_6500);
        if replaces {
            setup.draw_spare(&mut spare, mutation == Some(Mutation::CallReplaced));
        }
        let faults = setup.draw_faults(seed, mutation, &mut rng);
        let spills = setup.draw_spills(seed, mutation);
        let mut full = Rng::new(seed ^ 0x6675_6c6c);
        let full = (full.below(8) == 0 && !setup.sound).then_some(full);
        let (rot, earlier) = draw_losses(seed, &setup, mutation);
        let places = (0..setup.nodes()).collect();
        let register = SimRegister::new(rng.next_u64());
        Cluster {
            world: World::new(seed, faults),
            check: Checker::default(),
            appended: 0,
            promotions: 0,
            word_of: 0,
            starts: 0,
            unopened: 0,
            differ: 0,
            copies: [0; 2],
            counted: [[0; 2]; NODES],
            backups: Backups {
                pairs: u64::from(setup.second),
                ..Backups::default()
            },
            spilled: Spills {
                seeds: u64::from(spills.is_some()),
                ..Spills::default()
            },
            replaced: Replacements {
                seeds: u64::from(setup.spare),
                ..Replacements::default()
            },
            replacing: setup.spare.then(|| Replacing::new(spare)),
            left_gone: false,
            rank: std::array::from_fn(|n| n as u64),
            setup,
            rng,
            nodes: std::array::from_fn(|_| Node::new()),
            longest: 0,
            places,
            which: Rng::new(seed ^ 0x7365_636f_6e64),
            primary: 0,
            pair: [0, 1],
            risen: None,
            register: Arc::new(Mutex::new(register)),
            seen: Register::default(),
            anew: Rng::new(seed ^ 0x616e_6577),
            suspects: None,
            full,
            rot,
            earlier,
            spills,
            mutation,
            calm: false,
            nobody: None,
            named: BTreeMap::new(),
            version: (0, [0; NODES]),
            half_promoted: None,
            names: 0,
        }
    }

    /// The cluster in which `mutation` would be noticed, without it.
    pub fn sound(seed: u64, mutation: Mutation) -> Cluster {
        let mut cluster = Cluster::new(seed, Some(mutation));
        cluster.mutation = None;
        cluster
    }

    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        self.world.note(|| format!("--- {}", text()));
    }

    pub(super) fn views(&self, n: usize) -> Arc<dyn ViewRegister> {
        Arc::new(SimViews {
            node: n,
            register: self.register.clone(),
            world: self.world.env(NAMES[n]),
            note: self.world.clone(),
        })
    }

    /// The node to which an append goes: the primary, or node `n` if it takes itself for
    /// the primary.
    pub(super) fn runs(&self, n: usize) -> usize {
        match &self.nodes[n].role {
            Role::Primary(_) => n,
            _ => self.primary,
        }
    }

    /// Sets the primary to the one that the register names, if there is a register.
    pub(super) fn follow_register(&mut self) {
        if self.setup.views {
            let reg = lock(&self.register).now.clone();
            if let Some(p) = reg.primary {
                self.primary = node(&p.node);
            }
        }
    }

    /// Whether every node may have any role.
    pub(super) fn is_free(&self) -> bool {
        self.setup.views && self.setup.backup
    }

    /// The other node of the configured pair, seen from node `n`.
    pub(super) fn peer(&self, n: usize) -> usize {
        match self.places[0] == n {
            true => self.places[1],
            false => self.places[0],
        }
    }

    /// The mirror, or the node that is to be the mirror: the one that the register names,
    /// else the one to which the primary connects.
    pub(super) fn mirror(&self) -> usize {
        let named = lock(&self.register).now.mirror.clone();
        let named = named.map(|m| node(&m.node));
        if let Some(n) = named.filter(|n| *n != self.primary) {
            return n;
        }
        match &self.nodes[self.primary].role {
            Role::Primary(p) => node(p.session.peer()),
            _ => self.peer(self.primary),
        }
    }

    /// The nodes that are neither primary nor mirror.
    pub(super) fn backups(&self) -> Vec<usize> {
        let pair = [self.primary, self.mirror()];
        let mut others = self.places.clone();
        others.retain(|n| self.setup.backup && !pair.contains(n));
        others
    }

    /// One of the backups.
    pub(super) fn backup(&mut self) -> usize {
        let all = self.backups();
        match all[..] {
            [only] => only,
            _ => *self.which.pick(&all),
        }
    }

    /// One of the nodes that may be primary.
    pub(super) fn some_node(&mut self) -> usize {
        let most = match self.is_free() {
            true => self.places.len() as u64,
            false => 2,
        };
        self.places[self.rng.below(most) as usize]
    }

    /// Tells the checker of the view.
    pub(super) fn follow_view(&mut self) {
        let reg = lock(&self.register).now.clone();
        if reg.version != self.version.0 {
            let before = self.version.1;
            for m in [&reg.primary, &reg.mirror].into_iter().flatten() {
                let n = node(&m.node);
                self.named.entry((n, m.incarnation)).or_insert(before[n]);
            }
            self.version = (reg.version, self.check.failures());
            // Another node took over from the one that went on alone.
            let primary = reg.primary.as_ref().map(|m| node(&m.node));
            let sole = self.check.sole;
            self.check.sole = sole.filter(|s| primary.is_none_or(|p| p == *s));
        }
        if !self.is_free() {
            return;
        }
        let Some(primary) = reg.primary else {
            return;
        };
        let primary = node(&primary.node);
        self.check.view = std::array::from_fn(|n| n == primary);
        let Some(mirror) = reg.mirror.map(|m| node(&m.node)) else {
            return;
        };
        self.check.view[mirror] = true;
        if !self.pair.contains(&mirror) {
            self.note(|| format!("the backup {} is the mirror", NAMES[mirror]));
            self.backups.mirrors += 1;
            self.risen = Some(mirror);
        } else if self.risen != Some(mirror) {
            self.risen = None;
        }
        self.pair = [primary, mirror];
    }

    /// The node that was replaced.
    pub(super) fn gone(&self) -> Option<usize> {
        let gone = self.replacing.as_ref().and_then(|r| r.gone);
        gone.map(|(n, _)| n)
    }
}
