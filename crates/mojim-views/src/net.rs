//! The way to the other voters: questions of kind `raft` to their daemons.
//!
//! ```text
//! {"what": "raft", "cluster": …, "to": name, "from": name, "voters": checksum,
//!  "life": incarnation, "knows": incarnation or absent, "rpc": …, "body": …}
//!
//! rpc            body                                answer
//! append         AppendEntriesRequest                {"Ok": …} or {"Err": …}
//! vote           VoteRequest                         the same
//! snapshot       InstallSnapshotRequest, its data    the same
//!                in hexadecimal digits
//! forward-read   {"volume", "ms"}                    {"done": register} or
//! forward-swap   {"volume", "new", "ms"}             {"elsewhere": why}: not done
//! forward-retire {"voter", "ms"}                     the same
//! who            {"lives": {voter: incarnation}}     {"incarnation": …, "lives": the same;
//!                                                    empty, unless the question's are}
//! heard          nothing                             {"heard": a promise, or null}
//! ```
//!
//! `voters` is the checksum of the names that had the voters' places first: two
//! configurations that differ in them must not make one log. It stays the same
//! while a voter is replaced.
//!
//! `life` is the incarnation of the sender's directory. `knows` is the incarnation that
//! votes, by the sender's log, under the name of the voter that is asked.
//!
//! - A voter whose incarnation is another one does not answer `append`, `vote` and
//!   `snapshot`. So nobody counts what a voter says that lost its directory.
//! - A sender under whose name another directory votes is told so: `{"unknown": why}`. It is
//!   not told so where this may be due to a log that is behind (`Links::may_lag`).
//! - Where no voter was admitted yet (a first start), `knows` is absent and every answer
//!   counts. A voter whose log names some answers such a question with `{"waits": why}`.
//! - A voter that the log does not name is asked `who` alone until the leader's entry names
//!   it.
//!
//! A voter remembers, while it runs, the most that each other voter's directory has promised
//! it ([`Promised`]). It tells that with each question of Raft's (`heard` in its body), and
//! when it is asked for it. A voter whose directory promises less is given up: it was put
//! back from earlier. After its start a voter asks all others, and takes no part until they
//! have answered, or for an election's time.
//!
//! Owns the connections: some for each voter, each used by one question at a
//! time, dropped after any error. Invariants:
//! - A question is no longer than a daemon takes ([`MOST`]). Everything that will have to
//!   travel is measured against that before it enters the log.
//! - Every question is bounded in time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_env::{Address, Env, Error, Result};
use mojim_replica::client::{Client, question};
use mojim_replica::request::{RaftCall, Request};
use openraft::error::{
    InstallSnapshotError, NetworkError, PayloadTooLarge, RPCError, RaftError, RemoteError,
    Unreachable,
};
use openraft::network::{Backoff, RPCOption};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use openraft::{AnyError, EntryPayload, LeaderId, RaftNetwork, RaftNetworkFactory};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing::{error, info};

use crate::store::Now;
use crate::types::{
    Entry, Lives, LogId, Membership, Promised, RegisterCommand, SnapshotMeta, Swap, TypeConfig,
    Vote, Voter, number,
};

/// Longest question that a daemon takes, in bytes: a request's body less its
/// checksum. A test holds it against `mojim-format`.
pub(crate) const MOST: usize = 4096 - 4;

/// Most bytes of a snapshot: registers of a few thousand volumes with the
/// longest names. What is received is kept in memory until its end has come.
const MOST_SNAPSHOT: u64 = 4 << 20;

/// Fewest bytes of a snapshot that are worth a question.
const LEAST_CHUNK: usize = 256;

/// How long a trouble with a voter is reported: a follower asks nobody, so it does not
/// notice that a trouble is over.
const RECENT: Duration = Duration::from_secs(5);

/// Connections to one voter that are kept for the next question of one kind.
const IDLE: usize = 4;

/// The voters, and the connections to them.
pub(crate) struct Links {
    env: Arc<dyn Env>,
    cluster: String,
    me: String,
    voters: BTreeMap<u64, (String, Address)>,
    /// Former voters, with the number of the voter that has their place now.
    former: BTreeMap<String, u64>,
    checksum: u32,
    /// The incarnation of this voter's directory.
    life: u64,
    /// The voters' incarnations, by this voter's log.
    lives: Arc<Mutex<Lives>>,
    /// Why this voter votes for nobody, once another has told it.
    refused: Mutex<Option<String>>,
    /// Why this voter's directory counts for nothing any more.
    outdated: OnceLock<String>,
    /// Whether the others were asked what they know of this voter's directory.
    is_confirmed: AtomicBool,
    /// The most that a voter's directory has promised to this one, with its incarnation.
    heard: Mutex<HashMap<u64, (u64, Promised)>>,
    /// When this voter, whose log names nobody, last heard that another's names some.
    outside: Mutex<Option<Duration>>,
    /// Idle connections, by voter and by timeout.
    idle: Mutex<HashMap<(u64, Duration), Vec<Client>>>,
    /// What last went wrong with a voter, and when, until something goes right.
    troubles: Mutex<BTreeMap<u64, (Duration, String)>>,
}

/// What can travel in one question.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Bytes of entries, as JSON.
    pub entries: usize,
    /// Bytes of a snapshot.
    pub chunk: usize,
}

/// What a voter says of itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Said {
    /// The incarnation of its directory.
    pub incarnation: u64,
    /// To a voter whose log names nobody: the incarnations that its own log names.
    pub lives: BTreeMap<String, u64>,
}

/// How asking once ended.
pub(crate) enum Asked {
    Answer(Value),
    /// The question never left.
    NotSent(Error),
    /// The question may have been heard.
    Unknown(Error),
}

impl Links {
    /// `voters` by their numbers, this node among them; `replaced`: for some of them, the
    /// names that had their place before, the first first.
    pub fn new(
        env: &Arc<dyn Env>,
        cluster: &str,
        me: &str,
        voters: BTreeMap<u64, (String, Address)>,
        replaced: &BTreeMap<String, Vec<String>>,
    ) -> Links {
        let place = |name: &String| replaced.get(name).and_then(|r| r.first()).cloned();
        let places = voters.iter().map(|(n, (name, _))| match place(name) {
            Some(first) => (number(&first), first),
            None => (*n, name.clone()),
        });
        let places: BTreeMap<u64, String> = places.collect();
        let names = json!(places.values().collect::<Vec<_>>()).to_string();
        let former = replaced.iter().flat_map(|(now, before)| {
            let now = number(now);
            before.iter().map(move |b| (b.clone(), now))
        });
        Links {
            env: env.clone(),
            cluster: cluster.to_owned(),
            me: me.to_owned(),
            checksum: mojim_format::crc32c(names.as_bytes()),
            former: former.collect(),
            voters,
            life: u64::MAX,
            lives: Arc::default(),
            refused: Mutex::default(),
            outdated: OnceLock::new(),
            is_confirmed: AtomicBool::new(false),
            heard: Mutex::default(),
            outside: Mutex::default(),
            idle: Mutex::default(),
            troubles: Mutex::default(),
        }
    }

    /// With this voter's directory: its incarnation, and those that its log names.
    pub fn of_directory(self, life: u64, lives: Arc<Mutex<Lives>>) -> Links {
        Links {
            life,
            lives,
            ..self
        }
    }

    /// What a voter's directory with this incarnation promised to this one.
    pub fn hear(&self, voter: u64, life: u64, promised: Promised) {
        let mut heard = lock(&self.heard);
        match heard.get_mut(&voter) {
            Some((l, most)) if *l == life => *most = promised.max(*most),
            _ => drop(heard.insert(voter, (life, promised))),
        }
    }

    /// The most that [`Links::hear`] was told of it.
    pub fn heard(&self, voter: u64, life: u64) -> Option<Promised> {
        let heard = lock(&self.heard);
        heard.get(&voter).filter(|h| h.0 == life).map(|h| h.1)
    }

    /// What another voter has heard of this one's directory. None if it knows nothing: it
    /// runs no more, or did not take part. An error if it may know something.
    pub fn ask_heard(&self, of: u64, timeout: Duration) -> Result<Option<Promised>> {
        let q = self.question(self.name(of), None, "heard", Value::Null);
        match self.ask(of, &q, timeout) {
            Ok(answer) => from_value(&answer["heard"]),
            Err(Error::Answered { .. }) => Ok(None),
            Err(e) if e.errno() == libc::ECONNREFUSED => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The other voters, by their numbers.
    pub fn others(&self) -> Vec<u64> {
        let me = number(&self.me);
        self.voters.keys().copied().filter(|n| *n != me).collect()
    }

    /// This voter may take part: the others were asked for what they have heard of it.
    pub fn confirm(&self) {
        self.is_confirmed.store(true, SeqCst);
    }

    /// This voter's directory is of earlier: it takes part no more.
    pub fn give_up(&self, why: &str) {
        if self.outdated.set(why.to_owned()).is_ok() {
            error!(node = %self.me, code = "votes_lost", "this node does not vote on views: {why}");
        }
    }

    /// Whether [`Links::give_up`] was called.
    pub fn is_outdated(&self) -> bool {
        self.outdated.get().is_some()
    }

    /// What to give the directory up for, once `teller` knows more of it.
    pub fn outdated(&self, teller: &str) -> String {
        format!(
            "its directory of votes (`.mojim/views`) is of an earlier time: node {teller} heard it promise more. Later promises are lost, so it votes for no node. If the directory of now still exists, end node {me} and put that one back. Only if it is lost for good, end node {me}, move this one elsewhere and keep it, and start node {me}. Then have the others admit it anew: `mojim replace --same-name {me}`",
            me = self.me
        )
    }

    /// Fails unless this voter may take part.
    pub fn check_part(&self) -> Result<()> {
        if let Some(why) = self.outdated.get() {
            return Err(Error::Stale(why.clone()));
        }
        match self.is_confirmed.load(SeqCst) {
            true => Ok(()),
            false => Err(Error::Busy(format!(
                "node {} asks the other voters what they have heard of it",
                self.me
            ))),
        }
    }

    /// The incarnation that votes under this name, by this voter's log.
    pub fn present(&self, voter: &str) -> Option<u64> {
        lock(&self.lives).present(voter)
    }

    /// Whether a directory may be admitted under this name: none votes under it, and all
    /// that the log says of it is committed. An entry that gives a directory up, and is in
    /// this log alone, is none yet: the others may count that directory, and go on with it.
    pub fn is_vacant(&self, voter: &str, now: &Now) -> bool {
        let lives = lock(&self.lives).clone();
        lives.present(voter).is_none() && now.has_all_of(voter, &lives)
    }

    /// Whether no voter was admitted yet.
    pub fn is_founding(&self) -> bool {
        lock(&self.lives).is_empty()
    }

    /// Why this voter votes for nobody, if others have said so.
    pub fn refused(&self) -> Option<String> {
        let outdated = self.outdated.get().cloned();
        outdated.or_else(|| lock(&self.refused).clone())
    }

    /// Whether this voter may ask to lead. One that its own log does not name gets nobody's
    /// vote, nor hears whose log is longer, and so would try again and again. With its terms it
    /// would keep the others, which have to follow the greatest, from choosing a leader that
    /// sends it the log. One that heard for `patience` of no register that others have may
    /// begin one.
    pub fn may_stand(&self, patience: Duration) -> bool {
        if self.check_part().is_err() {
            return false;
        }
        let lives = lock(&self.lives);
        if !lives.is_empty() {
            return lives.present(&self.me) == Some(self.life);
        }
        let heard = *lock(&self.outside);
        let is_outside = heard.is_some_and(|at| self.env.now().saturating_sub(at) < patience);
        !is_outside && self.refused().is_none()
    }

    /// Others have a register, and this voter's log names nobody yet.
    fn hear_of_others(&self) {
        *lock(&self.outside) = Some(self.env.now());
    }

    /// Another voter says why this one does not count.
    fn refuse(&self, why: &str) {
        let mut refused = lock(&self.refused);
        if refused.as_deref() != Some(why) {
            error!(node = %self.me, code = "votes_lost", "this node does not vote on views: {why}");
            *refused = Some(why.to_owned());
        }
    }

    fn another_votes(&self, voter: &str) -> String {
        format!(
            "node {voter} was admitted as a voter with another directory of votes (`.mojim/views`). If that one is lost, its promises are lost with it, and node {voter} votes for no node. `mojim replace --same-name {voter}` has a majority of the other voters admit it anew"
        )
    }

    /// The incarnation that `to` must have so that what it answers counts; none where every
    /// answer counts.
    fn counts(&self, to: u64) -> Result<Option<u64>> {
        self.check_part()?;
        let (lives, name) = (lock(&self.lives), self.name(to));
        if lives.is_empty() {
            return match self.refused() {
                None => Ok(None),
                Some(why) => Err(Error::Stale(why)),
            };
        }
        if lives.present(&self.me) != Some(self.life) {
            let why = format!("node {} is not admitted as a voter yet", self.me);
            return Err(Error::Stale(why));
        }
        let known = lives.present(name).map(Some);
        known.ok_or_else(|| Error::Stale(format!("node {name} is not admitted as a voter yet")))
    }

    /// A leader has this voter's directory in its log, or this voter leads.
    pub fn counts_again(&self) {
        if lock(&self.refused).take().is_some() {
            info!(node = %self.me, code = "votes_back", "this node votes on views: it is admitted");
        }
    }

    /// Whether a question may be heard though this voter's log, which says `lives`, excludes the
    /// sender's directory. The sender's log names this directory, so both logs are of one
    /// register, and they differ by entries that this one lacks, or that nobody committed.
    /// - Whom a voter follows is decided by Raft's terms alone. A directory that was given up
    ///   led in earlier terms only, unless the entry that gives it up is in this log alone.
    /// - A directory that this log does not know asks for votes by a log that admits it, so it
    ///   is committed that the one before is given up, and too few have not got that entry for
    ///   the one before to be elected. One that this log gives up gets no vote: the others may
    ///   have committed that.
    fn may_lag(&self, lives: &Lives, call: &RaftCall) -> bool {
        let is_given_up = call.life.is_some_and(|l| lives.is_retired(&call.from, l));
        call.knows == Some(self.life)
            && match &*call.rpc {
                "append" | "snapshot" => true,
                "vote" => !is_given_up,
                _ => false,
            }
    }

    /// Whether a question of Raft's may be answered; an answer that says why not.
    pub fn check_lives(&self, call: &RaftCall) -> Result<Option<Value>> {
        let from = &call.from;
        let Some(life) = call.life else {
            return Err(Error::Invalid(format!(
                "node {from} runs an earlier version of mojim: it does not say with which directory it votes"
            )));
        };
        let lives = lock(&self.lives);
        if lives.excludes(from, life) && !self.may_lag(&lives, call) {
            let why = match lives.is_retired(from, life) {
                false => self.another_votes(from),
                true => format!(
                    "this directory of votes (`.mojim/views`) of node {from} was given up by `mojim replace --same-name`: another has its place"
                ),
            };
            return Ok(Some(json!({ "unknown": why })));
        }
        if call.rpc == "who" {
            return Ok(None);
        }
        self.check_part()?;
        match call.knows {
            Some(known) if known == self.life => {
                if lives.is_empty() {
                    self.hear_of_others();
                }
                self.counts_again();
                Ok(None)
            }
            // The sender's log lacks an entry that this one has.
            Some(known) if lives.is_retired(&self.me, known) => Err(Error::Stale(format!(
                "node {from} knows an earlier directory of votes of node {}: its log is behind",
                self.me
            ))),
            Some(_) => {
                let why = self.another_votes(&self.me);
                self.refuse(&why);
                Err(Error::Stale(why))
            }
            None if !lives.is_empty() => {
                let why = format!(
                    "node {from} has no log, and node {} has one: it waits to be admitted",
                    self.me
                );
                Ok(Some(json!({ "waits": why })))
            }
            None => match self.refused() {
                None => Ok(None),
                Some(why) => Err(Error::Stale(why)),
            },
        }
    }

    /// Tells a leader, whose log names these voters, with which directory this one votes.
    pub fn say_who(&self, body: &Value) -> Result<Value> {
        if let Some(why) = self.outdated.get() {
            return Err(Error::Stale(why.clone()));
        }
        let theirs: BTreeMap<String, u64> = from_value(&body["lives"])?;
        let lives = lock(&self.lives);
        if let Some((other, _)) = theirs.iter().find(|(n, i)| lives.excludes(n, **i)) {
            let why = format!(
                "the voters' log knows another directory of votes of node {other} than the log of node {}: a register was begun anew beside this one",
                self.me
            );
            self.refuse(&why);
            return Err(Error::Stale(why));
        }
        value(&self.said(theirs.is_empty(), &lives))
    }

    fn said(&self, is_new: bool, lives: &Lives) -> Said {
        Said {
            incarnation: self.life,
            lives: match is_new {
                true => lives.all(),
                false => BTreeMap::new(),
            },
        }
    }

    /// Whether the voters that are to be named first, by what they said, would begin a
    /// register beside another one. A voter whose log names directories may have that entry
    /// alone; it may be committed, unless too many of those directories are here without it.
    pub fn is_beside(&self, said: &BTreeMap<String, Said>, majority: usize) -> bool {
        if !self.is_founding() {
            return false;
        }
        let lacks = |(n, i): (&String, &u64)| {
            let one = said.get(n);
            one.is_some_and(|s| s.incarnation == *i && s.lives.is_empty())
        };
        let mut beside = self.refused().is_some();
        for named in said.values().map(|s| &s.lives) {
            if named.get(&self.me).is_some_and(|i| *i != self.life) {
                self.refuse(&self.another_votes(&self.me));
                return true;
            }
            beside |= named.iter().filter(|x| !lacks(*x)).count() >= majority;
        }
        beside
    }

    /// With which directory a voter votes. `Stale`: its log knows another directory of this one.
    pub fn who(&self, voter: u64, timeout: Duration) -> Result<Said> {
        let lives = lock(&self.lives).clone();
        if self.name(voter) == self.me {
            return Ok(self.said(lives.is_empty(), &lives));
        }
        let body = json!({ "lives": lives.all() });
        let q = self.question(self.name(voter), None, "who", body);
        let answer = self.ask(voter, &q, timeout)?;
        if let Some(why) = answer["unknown"].as_str() {
            self.refuse(why);
            return Err(Error::Stale(why.to_owned()));
        }
        from_value(&answer)
    }

    /// Whether the voter with this directory may be admitted.
    pub fn may_admit(&self, voter: &str, life: u64) -> bool {
        !lock(&self.lives).excludes(voter, life)
    }

    /// A voter's name.
    pub fn name(&self, voter: u64) -> &str {
        self.voters.get(&voter).map_or("?", |(name, _)| name)
    }

    /// The voters as the log names them.
    pub fn members(&self) -> BTreeMap<u64, Voter> {
        let named = |(n, (name, _)): (&u64, &(String, Address))| (*n, Voter { name: name.clone() });
        self.voters.iter().map(named).collect()
    }

    /// The voter that has the place of the node that the log calls `name`.
    pub fn place_of(&self, name: &str) -> Option<u64> {
        let id = number(name);
        let now = self.voters.contains_key(&id).then_some(id);
        now.or_else(|| self.former.get(name).copied())
    }

    /// What went wrong with which voter of late, for messages.
    pub fn troubles(&self) -> String {
        self.troubles_at(self.env.now())
    }

    fn troubles_at(&self, now: Duration) -> String {
        let all = lock(&self.troubles);
        let recent = all
            .iter()
            .filter(|(_, (at, _))| now.saturating_sub(*at) <= RECENT);
        let texts = recent.map(|(n, (_, why))| format!("; {}: {why}", self.name(*n)));
        texts.collect()
    }

    /// Whether a question was meant for this node, and its sender is a voter and counts the
    /// same voters. Any node's certificate gets a question as far as this.
    pub fn check(&self, call: &RaftCall) -> Result<()> {
        let RaftCall { to, from, .. } = call;
        if *to != self.me {
            return Err(Error::Invalid(format!(
                "this is node {}, not {to:?}: two nodes share an address",
                self.me
            )));
        }
        if call.voters != self.checksum {
            let names: Vec<&str> = self.voters.values().map(|(n, _)| &**n).collect();
            return Err(Error::Config(format!(
                "node {from} counts other voters than node {}, for which they are {}: the configurations \
                 differ",
                self.me,
                names.join(", ")
            )));
        }
        if self.former.contains_key(from) {
            return Err(Error::Stale(format!(
                "node {from} was replaced: another has its place among the voters"
            )));
        }
        if !self.voters.contains_key(&number(from)) {
            return Err(Error::Invalid(format!(
                "node {from} is no voter by the configuration of node {}",
                self.me
            )));
        }
        Ok(())
    }

    fn question(&self, to: &str, knows: Option<u64>, rpc: &str, body: Value) -> Request {
        Request::Raft(RaftCall {
            to: to.to_owned(),
            from: self.me.clone(),
            voters: self.checksum,
            life: Some(self.life),
            knows,
            rpc: rpc.to_owned(),
            body,
        })
    }

    /// What fits into one question to any voter; an error if not even the list of voters
    /// does.
    pub fn room(&self) -> Result<Room> {
        let id = LogId::new(LeaderId::new(u64::MAX, u32::MAX.into()), u64::MAX);
        let vote = Vote::new_committed(u64::MAX, u32::MAX.into());
        let append = AppendEntriesRequest::<TypeConfig> {
            vote,
            prev_log_id: Some(id),
            entries: vec![],
            leader_commit: Some(id),
        };
        // While a voter is replaced, an entry names both sets.
        let mut nodes = self.members();
        let before: BTreeSet<u64> = nodes.keys().copied().collect();
        let name = "x".repeat(mojim_format::MAX_NAME);
        nodes.insert(u32::MAX.into(), Voter { name });
        let after: BTreeSet<u64> = nodes.keys().copied().collect();
        let voters = openraft::Membership::new(vec![before, after], nodes);
        let snapshot = InstallSnapshotRequest::<TypeConfig> {
            vote,
            meta: SnapshotMeta {
                last_log_id: Some(id),
                last_membership: Membership::new(Some(id), voters.clone()),
                snapshot_id: id.to_string(),
            },
            offset: u64::MAX,
            data: vec![],
            done: false,
        };
        let without = |rpc: &str, body: Value| {
            let body = with_longest(body);
            let lens = self.voters.values().map(|(to, _)| {
                let q = self.question(to, Some(u64::MAX), rpc, body.clone());
                question(&self.cluster, &q).len()
            });
            MOST.saturating_sub(lens.max().unwrap_or(MOST))
        };
        let room = Room {
            entries: without("append", value(&append)?),
            chunk: without("snapshot", hex_snapshot(snapshot)?) / 2,
        };
        let all = self.voters.values().map(|(n, _)| (n.clone(), u64::MAX));
        let admit = RegisterCommand::Admit(all.collect());
        let first = entry_len(&EntryPayload::Membership(voters))?
            .max(entry_len(&EntryPayload::Normal(admit))?);
        if first > room.entries || room.chunk < LEAST_CHUNK {
            return Err(Error::Config(format!(
                "{} voters with names this long are too many: a question among them has {MOST} bytes",
                self.voters.len()
            )));
        }
        Ok(room)
    }

    fn connect(&self, to: u64, timeout: Duration) -> Result<Client> {
        let (_, address) = self
            .voters
            .get(&to)
            .ok_or_else(|| Error::NotFound(format!("there is no voter {to}")))?;
        Client::connect(&self.env, address, &self.cluster, timeout)
    }

    fn note<T>(&self, to: u64, r: &Result<T>) {
        let mut all = lock(&self.troubles);
        match r {
            Ok(_) => all.remove(&to),
            Err(e) => all.insert(to, (self.env.now(), e.to_string())),
        };
    }

    /// Asks a question that may be heard twice. Blocks for at most twice `timeout`.
    fn ask(&self, to: u64, q: &Request, timeout: Duration) -> Result<Value> {
        let kept = lock(&self.idle).get_mut(&(to, timeout)).and_then(Vec::pop);
        let over_kept = kept.map(|mut c| (c.ask(q), c));
        let (r, client) = match over_kept {
            Some((r @ (Ok(_) | Err(Error::Timeout(_))), c)) => (r, Some(c)),
            // The kept connection was closed, most often because it was idle for long.
            _ => match self.connect(to, timeout) {
                Ok(mut c) => (c.ask(q), Some(c)),
                Err(e) => (Err(e), None),
            },
        };
        self.note(to, &r);
        if let (Ok(_), Some(c)) = (&r, client) {
            let mut idle = lock(&self.idle);
            let same = idle.entry((to, timeout)).or_default();
            if same.len() < IDLE {
                same.push(c);
            }
        }
        r
    }

    /// Asks something, once, over a connection of its own. Blocks for at most
    /// `timeout`.
    pub fn ask_once(&self, to: u64, rpc: &str, body: Value, timeout: Duration) -> Asked {
        let q = self.question(self.name(to), None, rpc, body);
        let r = self.connect(to, timeout).map(|mut c| c.ask(&q));
        let (r, sent) = match r {
            Ok(r) => (r, true),
            Err(e) => (Err(e), false),
        };
        self.note(to, &r);
        match r {
            Ok(v) => Asked::Answer(v),
            // `connect` returns before the connection is made, and only that can be
            // refused.
            Err(e) if !sent || e.errno() == libc::ECONNREFUSED => Asked::NotSent(e),
            Err(e) => Asked::Unknown(e),
        }
    }
}

fn value<T: Serialize>(v: &T) -> Result<Value> {
    serde_json::to_value(v).map_err(|e| Error::Protocol(e.to_string()))
}

/// Bytes of an entry with this payload among others, as JSON, at most.
fn entry_len(payload: &EntryPayload<TypeConfig>) -> Result<usize> {
    let entry = Entry {
        log_id: LogId::new(LeaderId::new(u64::MAX, u32::MAX.into()), u64::MAX),
        payload: payload.clone(),
    };
    Ok(value(&entry)?.to_string().len() + 1)
}

impl Room {
    /// Whether a swap fits, alone, into a question. A swap that does not must not enter
    /// the log: no entry behind it could be sent.
    pub fn check(&self, s: &Swap) -> Result<()> {
        let len = entry_len(&EntryPayload::Normal(RegisterCommand::Swap(s.clone())))?;
        if len > self.entries {
            return Err(Error::Invalid(format!(
                "a register of volume {:?} with names this long: {len} bytes in the log, {} at most",
                s.volume, self.entries
            )));
        }
        Ok(())
    }
}

/// A question's body with the longest promise that it may have.
fn with_longest(mut body: Value) -> Value {
    let (term, entries) = (u64::MAX, u64::MAX);
    let node = u32::MAX.into();
    body["heard"] = json!(Promised {
        term,
        node,
        entries
    });
    body
}

/// The request with its data in hexadecimal digits: a list of numbers is twice
/// as long.
fn hex_snapshot(mut q: InstallSnapshotRequest<TypeConfig>) -> Result<Value> {
    let data = std::mem::take(&mut q.data);
    let mut v = value(&q)?;
    v["data"] = Value::String(data.iter().map(|b| format!("{b:02x}")).collect());
    Ok(v)
}

/// What [`hex_snapshot`] made.
pub(crate) fn unhex_snapshot(body: &Value) -> Result<InstallSnapshotRequest<TypeConfig>> {
    let bad = || Error::Protocol("a snapshot's data are not hexadecimal digits".into());
    let text = body["data"].as_str().ok_or_else(bad)?;
    let byte = |pair: &[u8]| {
        let digit = |b: Option<&u8>| (*b? as char).to_digit(16);
        Some((digit(pair.first())? * 16 + digit(pair.get(1))?) as u8)
    };
    let data: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
    let mut body = body.clone();
    body["data"] = json!([]);
    let mut q: InstallSnapshotRequest<TypeConfig> = from_value(&body)?;
    q.data = data.ok_or_else(bad)?;
    Ok(q)
}

/// Fails if a part of a snapshot must not be kept: a part with a great offset would make
/// this voter fill its memory up to there.
pub(crate) fn check_snapshot(q: &InstallSnapshotRequest<TypeConfig>) -> Result<()> {
    let end = q.offset.checked_add(q.data.len() as u64);
    if end.is_none_or(|end| end > MOST_SNAPSHOT) {
        return Err(Error::Invalid(format!(
            "a snapshot of more than {MOST_SNAPSHOT} bytes"
        )));
    }
    Ok(())
}

/// The body of a question, or of an answer.
pub(crate) fn from_value<T: DeserializeOwned>(v: &Value) -> Result<T> {
    T::deserialize(v).map_err(|e| Error::Protocol(format!("another voter's words: {e}")))
}

/// Makes the links that openraft asks for.
pub(crate) struct Network {
    pub links: Arc<Links>,
    /// How long a voter that was not reached is left alone.
    pub pause: Duration,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Link;

    async fn new_client(&mut self, target: u64, _: &Voter) -> Link {
        Link {
            links: self.links.clone(),
            target,
            pause: self.pause,
        }
    }
}

/// One voter, as openraft reaches it.
pub(crate) struct Link {
    links: Arc<Links>,
    target: u64,
    pause: Duration,
}

type RpcError<E = openraft::error::Infallible> = RPCError<u64, Voter, RaftError<u64, E>>;

impl Link {
    /// `promises`: what the answer promises of the other voter's directory.
    async fn call<A, E>(
        &self,
        rpc: &'static str,
        body: Result<Value>,
        ttl: Duration,
        promises: impl FnOnce(&A) -> Option<Promised>,
    ) -> std::result::Result<A, RpcError<E>>
    where
        A: DeserializeOwned,
        E: std::error::Error + DeserializeOwned,
    {
        let away = |e: String| RPCError::Unreachable(Unreachable::new(&AnyError::error(e)));
        let (links, to) = (self.links.clone(), self.target);
        let asked = tokio::task::spawn_blocking(move || {
            let knows = links.counts(to)?;
            let mut body = body?;
            if let Some(heard) = knows.and_then(|life| links.heard(to, life)) {
                body["heard"] = value(&heard)?;
            }
            let q = links.question(links.name(to), knows, rpc, body);
            let answer = links.ask(to, &q, ttl)?;
            if let Some(why) = answer["unknown"].as_str() {
                links.refuse(why);
                return Err(Error::Stale(why.to_owned()));
            }
            if let Some(why) = answer["waits"].as_str() {
                links.hear_of_others();
                let waits = Err(Error::Stale(why.to_owned()));
                links.note(to, &waits);
                return waits;
            }
            Ok((knows, answer))
        });
        let (knows, answer) = asked
            .await
            .map_err(|e| away(e.to_string()))?
            .map_err(|e| away(e.to_string()))?;
        let answer = from_value::<std::result::Result<A, RaftError<u64, E>>>(&answer)
            .map_err(|e| RPCError::Network(NetworkError::new(&e)))?
            .map_err(|e| RPCError::RemoteError(RemoteError::new(to, e)))?;
        if let (Some(life), Some(promised)) = (knows, promises(&answer)) {
            self.links.hear(to, life, promised);
        }
        Ok(answer)
    }
}

impl RaftNetwork<TypeConfig> for Link {
    async fn append_entries(
        &mut self,
        q: AppendEntriesRequest<TypeConfig>,
        how: RPCOption,
    ) -> std::result::Result<AppendEntriesResponse<u64>, RpcError> {
        // The store measures what it hands out, so this is only a safety net.
        let body = value(&q);
        let len = body.as_ref().map_or(0, |b| {
            let to = self.links.name(self.target);
            let b = with_longest(b.clone());
            let q = self.links.question(to, Some(u64::MAX), "append", b);
            question(&self.links.cluster, &q).len()
        });
        if len > MOST && q.entries.len() > 1 {
            return Err(PayloadTooLarge::new_entries_hint(q.entries.len() as u64 / 2).into());
        }
        let all = q.entries.last().map(|e| e.log_id);
        let promises = |a: &AppendEntriesResponse<u64>| match a {
            AppendEntriesResponse::Success => Some(Promised::new(&q.vote, all)),
            AppendEntriesResponse::PartialSuccess(some) => Some(Promised::new(&q.vote, *some)),
            AppendEntriesResponse::Conflict => Some(Promised::new(&q.vote, None)),
            AppendEntriesResponse::HigherVote(_) => None,
        };
        self.call("append", body, how.hard_ttl(), promises).await
    }

    async fn install_snapshot(
        &mut self,
        q: InstallSnapshotRequest<TypeConfig>,
        how: RPCOption,
    ) -> std::result::Result<InstallSnapshotResponse<u64>, RpcError<InstallSnapshotError>> {
        let body = hex_snapshot(q);
        self.call("snapshot", body, how.hard_ttl(), |_| None).await
    }

    async fn vote(
        &mut self,
        q: VoteRequest<u64>,
        how: RPCOption,
    ) -> std::result::Result<VoteResponse<u64>, RpcError> {
        let promises = |a: &VoteResponse<u64>| a.vote_granted.then(|| Promised::new(&q.vote, None));
        self.call("vote", value(&q), how.hard_ttl(), promises).await
    }

    fn backoff(&self) -> Backoff {
        Backoff::new(std::iter::repeat(self.pause))
    }
}

/// The voters by their numbers; an error if two names have the same number.
pub(crate) fn numbered(
    voters: &BTreeMap<String, Address>,
) -> Result<BTreeMap<u64, (String, Address)>> {
    let mut out = BTreeMap::new();
    for (name, address) in voters {
        let before = out.insert(number(name), (name.clone(), address.clone()));
        if let Some((other, _)) = before {
            return Err(Error::Config(format!(
                "the names of the voters {other} and {name} have the same checksum: rename one"
            )));
        }
    }
    Ok(out)
}

/// Whether what node `from` says is in its own name: a candidate's, or a leader's.
pub(crate) fn check_vote(vote: &Vote, from: &str) -> Result<()> {
    match vote.leader_id.node_id == number(from) {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "node {from} speaks as voter number {}",
            vote.leader_id.node_id
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_format::{Frame, FrameKind};
    use mojim_protocol::view::{Member, Register};

    fn links(voters: usize, name_len: usize) -> Links {
        let voter = |i: usize| {
            let name = format!("{i:0name_len$}");
            (name, Address::Unix("/nowhere".into()))
        };
        let all: BTreeMap<String, Address> = (0..voters).map(voter).collect();
        let env: Arc<dyn Env> = Arc::new(mojim_linux::Os::new().unwrap());
        let me = all.keys().next().unwrap().clone();
        let none = BTreeMap::new();
        let links = Links::new(&env, "cluster", &me, numbered(&all).unwrap(), &none);
        links.confirm();
        links
    }

    #[test]
    fn a_question_is_no_longer_than_a_daemon_takes() {
        let frame = |body: usize| {
            let f = Frame {
                kind: FrameKind::Request,
                flags: 0,
                epoch: 0,
                lsn: 0,
                body: body as u32,
            };
            Frame::decode(&f.encode())
        };
        assert!(frame(MOST + 4).is_ok());
        assert!(frame(MOST + 5).is_err());
    }

    #[test]
    fn room_for_the_longest_names_of_a_few_voters() {
        let room = links(9, mojim_format::MAX_NAME).room().unwrap();
        let long = "x".repeat(mojim_format::MAX_NAME);
        let member = Some(Member {
            node: long.clone(),
            incarnation: u64::MAX,
        });
        let new = Register {
            version: u64::MAX,
            epoch: u64::MAX,
            primary: member.clone(),
            mirror: member,
            promised: u64::MAX,
        };
        let mut s = Swap { volume: long, new };
        room.check(&s).unwrap();
        s.volume = "x".repeat(MOST);
        assert!(matches!(room.check(&s), Err(Error::Invalid(_))));
        assert!(matches!(links(60, 64).room(), Err(Error::Config(_))));
    }

    #[test]
    fn a_full_chunk_travels() {
        let links = links(5, 64);
        let room = links.room().unwrap();
        let data: Vec<u8> = (0..room.chunk).map(|i| i as u8).collect();
        let q = InstallSnapshotRequest::<TypeConfig> {
            vote: Vote::new_committed(7, u32::MAX.into()),
            meta: SnapshotMeta::default(),
            offset: 9,
            data,
            done: true,
        };
        let body = with_longest(hex_snapshot(q.clone()).unwrap());
        let text = question(
            "cluster",
            &links.question(&links.me, Some(u64::MAX), "snapshot", body),
        );
        assert!(text.len() <= MOST);
        let back: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(unhex_snapshot(&back["body"]).unwrap(), q);
        assert!(unhex_snapshot(&json!({ "data": "abc" })).is_err());
    }

    /// One question of a few hundred bytes, with an offset near 2^64 or only
    /// gigabytes away, had the voter fill its memory up to there.
    #[test]
    fn a_snapshot_does_not_begin_far_away() {
        let at = |offset| InstallSnapshotRequest::<TypeConfig> {
            vote: Vote::new_committed(7, u32::MAX.into()),
            meta: SnapshotMeta::default(),
            offset,
            data: vec![1; 8],
            done: false,
        };
        check_snapshot(&at(0)).unwrap();
        check_snapshot(&at(MOST_SNAPSHOT - 8)).unwrap();
        for far in [MOST_SNAPSHOT - 7, 1 << 40, u64::MAX - 7, u64::MAX] {
            assert!(check_snapshot(&at(far)).is_err());
        }
    }

    /// A daemon that was started a little earlier than another said of it, half a minute
    /// later and when a third one was lost, that it refused connections.
    #[test]
    fn a_trouble_that_is_long_over_is_not_told() {
        let links = links(3, 4);
        let other = *links.voters.keys().next().unwrap();
        links.note::<()>(other, &Err(Error::Timeout("refused".into())));
        let now = links.env.now();
        assert!(links.troubles_at(now).contains("refused"));
        assert_eq!(links.troubles_at(now + 2 * RECENT), "");
    }

    /// Who has one voter's certificate, or only that of a node without a vote, led the others
    /// under another voter's number.
    #[test]
    fn a_voter_votes_and_leads_as_itself_only() {
        let vote = Vote::new(7, number("0001"));
        check_vote(&vote, "0001").unwrap();
        assert!(matches!(check_vote(&vote, "0002"), Err(Error::Invalid(_))));
    }

    /// What a voter said after it had lost its directory counted as what it had promised.
    #[test]
    fn a_name_with_another_directory_is_refused() {
        let a = links(3, 4);
        let lives = || {
            let all = ["0000", "0001"].map(|n| (n.to_owned(), 7));
            let mut lives = Lives::default();
            lives.change(&RegisterCommand::Admit(all.into()));
            Arc::new(Mutex::new(lives))
        };
        let call = |rpc: &str, life, knows| RaftCall {
            to: "0000".into(),
            from: "0001".into(),
            voters: a.checksum,
            life,
            knows,
            rpc: rpc.into(),
            body: Value::Null,
        };
        // A first start.
        assert_eq!(a.counts(number("0001")).unwrap(), None);
        let first = call("vote", Some(7), None);
        assert_eq!(a.check_lives(&first).unwrap(), None);
        assert!(a.check_lives(&call("vote", None, None)).is_err());
        let b = links(3, 4).of_directory(7, lives());
        assert_eq!(b.counts(number("0001")).unwrap(), Some(7));
        // A voter that the log does not name does not count, nor does one that is new here.
        assert!(b.counts(number("0002")).is_err());
        let waits = b.check_lives(&first).unwrap().unwrap();
        assert!(waits["waits"].is_string());
        assert_eq!(
            b.check_lives(&call("vote", Some(7), Some(7))).unwrap(),
            None
        );
        let other = b.check_lives(&call("append", Some(8), Some(9))).unwrap();
        assert!(other.unwrap()["unknown"].is_string());
        // Who is asked under another's name does not answer, and has nobody vote for it.
        assert!(a.check_lives(&call("append", Some(7), Some(7))).is_err());
        assert!(a.refused().is_some() && a.counts(number("0001")).is_err());
        assert!(a.check_lives(&first).is_err());
        // Until it is admitted.
        let named = call("append", Some(7), Some(u64::MAX));
        assert_eq!(a.check_lives(&named).unwrap(), None);
        assert_eq!(a.refused(), None);
        // A register that was begun anew beside this voter's does not take it in.
        b.say_who(&json!({ "lives": { "0001": 7, "0002": 9 } }))
            .unwrap();
        let e = b.say_who(&json!({ "lives": { "0001": 8 } })).unwrap_err();
        assert!(e.to_string().contains("begun anew"), "{e}");
        // A sender that names this directory may have a later log. Nobody votes for a directory
        // that was given up, but it may lead: that entry need not be committed.
        let heard = |rpc: &str, life| b.check_lives(&call(rpc, Some(life), Some(7))).unwrap();
        assert_eq!([heard("append", 8), heard("vote", 8)], [None, None]);
        lock(&b.lives).change(&RegisterCommand::Retire {
            voter: "0001".into(),
            incarnation: 7,
        });
        assert_eq!(heard("append", 7), None);
        assert!(heard("vote", 7).unwrap()["unknown"].is_string());
        // Whose log is behind says nothing of this directory.
        for c in [
            RegisterCommand::Retire {
                voter: "0000".into(),
                incarnation: 7,
            },
            RegisterCommand::Admit([("0000".to_owned(), 9)].into()),
        ] {
            lock(&b.lives).change(&c);
        }
        let b = Links { life: 9, ..b };
        b.counts_again();
        assert!(b.check_lives(&call("append", Some(8), Some(7))).is_err());
        assert_eq!(b.refused(), None);
    }

    /// A promise counts for the directory that made it alone.
    #[test]
    fn the_most_that_a_directory_promised_is_remembered() {
        let a = links(3, 4);
        let of = |term, entries| Promised {
            term,
            node: 1,
            entries,
        };
        assert_eq!(a.heard(1, 7), None);
        for p in [of(2, 3), of(2, 5), of(1, 9), of(2, 4)] {
            a.hear(1, 7, p);
        }
        assert_eq!(a.heard(1, 7), Some(of(2, 5)));
        assert_eq!((a.heard(1, 8), a.heard(2, 7)), (None, None));
        a.hear(1, 8, of(1, 0));
        assert_eq!((a.heard(1, 8), a.heard(1, 7)), (Some(of(1, 0)), None));
    }

    /// Whether a leader whose log names nobody may write the first names, though the log of
    /// `0001` names some: if these cannot be committed, it alone has them.
    #[test]
    fn a_first_start_goes_on_beside_names_that_one_voter_has() {
        let all = |lives: [u64; 3]| -> BTreeMap<String, u64> {
            let names = ["0000", "0001", "0002"].map(String::from);
            names.into_iter().zip(lives).collect()
        };
        let says = |incarnation, lives| Said { incarnation, lives };
        let is_beside = |named: [u64; 3], third: Option<u64>| {
            let me = links(3, 4).of_directory(5, Arc::default());
            let mut said = BTreeMap::new();
            said.insert("0000".to_owned(), says(5, BTreeMap::new()));
            said.insert("0001".to_owned(), says(6, all(named)));
            said.extend(third.map(|t| ("0002".to_owned(), says(t, BTreeMap::new()))));
            (me.is_beside(&said, 2), me.refused().is_some())
        };
        assert_eq!(is_beside([5, 6, 7], Some(7)), (false, false));
        assert_eq!(is_beside([5, 6, 7], None), (true, false));
        assert_eq!(is_beside([5, 6, 7], Some(8)), (true, false));
        assert_eq!(is_beside([4, 6, 7], Some(7)), (true, true));
    }

    #[test]
    fn unknown_peers_are_refused() {
        let (a, b) = (links(3, 4), links(4, 4));
        let Request::Raft(mut call) = a.question(&a.me, None, "vote", Value::Null) else {
            panic!("a voter asks a voter");
        };
        a.check(&call).unwrap();
        assert!(matches!(b.check(&call), Err(Error::Config(_))));
        call.to = "0001".into();
        assert!(matches!(a.check(&call), Err(Error::Invalid(_))));
        // A node of the cluster without a vote, which knows the voters.
        (call.to, call.from) = (a.me.clone(), "data".into());
        let e = a.check(&call).unwrap_err();
        assert!(e.to_string().contains("is no voter"), "{e}");
    }
}
