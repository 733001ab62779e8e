//! A reader's questions to its node.
//!
//! Owns a connection to the daemon's Unix socket, which is made again after it
//! broke, and the form of the request `read` (`docs/reference/requests.md`, "Readers").

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::view::{File, Mark};
use mojim_config::{Config, ConfigError, Node, Volume};
use mojim_env::{Address, Context, Env, Error, Result};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::request::{Read, Request};

/// Pauses between two tries while the node does not answer.
pub const PAUSE: Duration = Duration::from_millis(20);
/// How long an attach waits for the node to have something to show.
pub const ATTACH: Duration = Duration::from_secs(5);
/// How long an answer may take, beyond the time that the question lets it wait.
const ANSWER: Duration = Duration::from_secs(3);

/// Which file a question is about.
#[derive(Debug, Clone, Copy)]
pub enum Which<'a> {
    /// None: the question is only for new records.
    None,
    /// By its name.
    Named(&'a str),
    /// By its number.
    Numbered(u32),
    /// The list of files, from this number on.
    From(u32),
}

/// An answer: the state of the node's copy as of one LSN.
#[derive(Debug)]
pub struct Answer {
    /// The state that the answer is as of; `life` is the view's, and not from the node.
    pub mark: Mark,
    /// The records from the state that the question named to this one; none if
    /// the view has to begin anew.
    pub records: Option<Vec<u8>>,
    /// The file that was asked for, with its number.
    pub file: Option<(u32, File)>,
    /// The bytes of the file that were asked for.
    pub bytes: Vec<u8>,
    /// The files of the list that was asked for, by ascending numbers.
    pub files: Vec<(u32, File)>,
}

/// The daemon and the volume that a reader asks about.
#[derive(Clone)]
pub struct Source {
    env: Arc<dyn Env>,
    address: Address,
    cluster: String,
    volume: String,
}

impl Source {
    /// Asks the daemon of `node`, on this host, about `volume`, which may be left out if there is
    /// only one.
    pub fn of<'a>(
        config: &'a Config,
        node: &str,
        volume: Option<&str>,
    ) -> Result<(Source, &'a Node, &'a Volume)> {
        let volume = config.volume(volume).map_err(wrong)?;
        let node = config.node(node).map_err(wrong)?;
        if !volume.data_nodes().contains(&node.name.as_str()) {
            return Err(Error::Invalid(format!(
                "node {} does not hold volume {}: its nodes are {}",
                node.name,
                volume.name,
                volume.data_nodes().join(", ")
            )));
        }
        let source = Source {
            env: Arc::new(Os::new().context(|| "reading".into())?),
            address: Address::Unix(layout::socket(node)),
            cluster: config.cluster.clone(),
            volume: volume.name.clone(),
        };
        Ok((source, node, volume))
    }

    /// The environment's clock.
    pub fn now(&self) -> Duration {
        self.env.now()
    }
}

/// A mistake in the configuration.
pub fn wrong(e: ConfigError) -> Error {
    Error::Config(e.to_string())
}

/// A connection to a source.
pub struct Link {
    source: Source,
    client: Option<Client>,
}

impl Link {
    /// Connects at the first question.
    pub fn new(source: &Source) -> Link {
        Link {
            source: source.clone(),
            client: None,
        }
    }

    /// Asks for the records since `mark`, and lets the node wait up to `wait` for one;
    /// and for `pages` pages of a file from `offset` on.
    pub fn ask(
        &mut self,
        mark: Mark,
        wait: Duration,
        which: Which<'_>,
        offset: u64,
        pages: u64,
    ) -> Result<Answer> {
        let s = &self.source;
        let (name, id) = match which {
            Which::None | Which::From(_) => (None, None),
            Which::Named(name) => (Some(name.to_owned()), None),
            Which::Numbered(id) => (None, Some(id)),
        };
        let q = Request::Read(Read {
            volume: s.volume.clone(),
            after: mark.lsn,
            epoch: mark.epoch,
            volume_id: mark.volume,
            rewritten: mark.rewritten,
            wait: wait.as_millis() as u64,
            name,
            id,
            offset,
            pages,
            files: match which {
                Which::From(number) => Some(number),
                _ => None,
            },
        });
        let mut client = match self.client.take() {
            Some(c) => c,
            None => Client::connect(&s.env, &s.address, &s.cluster, ANSWER)?,
        };
        let (v, bytes) = match client.ask_bytes(&q) {
            Ok(answer) => answer,
            Err(e) => {
                // A refusal by the node does not end the connection.
                if matches!(e, Error::Answered { .. }) {
                    self.client = Some(client);
                }
                return Err(e);
            }
        };
        let answer = parse(mark, &v, bytes)
            .ok_or_else(|| Error::Protocol("the node's answer to a reader is not one".into()))?;
        self.client = Some(client);
        Ok(answer)
    }
}

fn parse(asked: Mark, v: &Value, mut bytes: Vec<u8>) -> Option<Answer> {
    let number = |k: &str| v[k].as_u64();
    let mut mark = Mark {
        lsn: number("lsn")?,
        epoch: number("epoch")?,
        ..asked
    };
    let records = match number("records") {
        Some(n) => {
            let rest = bytes.split_off(usize::try_from(n).ok().filter(|n| *n <= bytes.len())?);
            Some(std::mem::replace(&mut bytes, rest))
        }
        None => {
            mark.volume = number("volume_id")?;
            mark.rewritten = number("rewritten")?;
            None
        }
    };
    let file = |id: &Value, name: &Value, size: &Value| {
        let (name, size) = (name.as_str()?.to_owned(), size.as_u64()?);
        Some((u32::try_from(id.as_u64()?).ok()?, File { name, size }))
    };
    let listed = v["files"].as_array();
    let listed = listed.into_iter().flatten();
    let files = listed.map(|f| file(&f[0], &f[1], &f[2]));
    let files = files.collect::<Option<_>>()?;
    let file = match &v["file"] {
        Value::Null => None,
        f => Some(file(&f["id"], &f["name"], &f["size"])?),
    };
    Some(Answer {
        mark,
        records,
        file,
        bytes,
        files,
    })
}

/// Whether asking again is of no use.
pub fn is_final(e: &Error) -> bool {
    match e {
        Error::Answered { errno, .. } => {
            [libc::ESTALE, libc::EINVAL, libc::ENOENT, libc::EACCES].contains(errno)
        }
        _ => false,
    }
}
