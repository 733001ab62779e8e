//! The rival schemes in a bench: their replicas as processes of their own, and
//! sync points by them as something to measure.
//!
//! Invariant: figures of a rival are worth nothing before [`Rival::finish`] has
//! found every byte that was sent in the log of each of its replicas.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::measure::Subject;
use mojim_config::MediumKind;
use mojim_env::{Address, Env};
use mojim_linux::{Listener, Os};
use mojim_rivals::Scheme;
use mojim_rivals::audit::check;
use mojim_rivals::order::Transport;
use mojim_rivals::primary::Primary;
use mojim_rivals::replica::{ReplicaSpec, serve};
use mojim_store::log::LogSpec;

use crate::processes::Process;
use crate::store::Store;
use mojim_cli::failure::{Done, Failure};

/// How long both ends poll: the default of `spin`.
const SPIN: Duration = Duration::from_micros(30);
/// A replica whose primary is gone ends at once.
const LIMIT: Duration = Duration::from_secs(10);

fn log(path: PathBuf, size: u64) -> LogSpec {
    LogSpec {
        lane: 0,
        medium: MediumKind::Dram,
        ring: path.clone(),
        path,
        size,
    }
}

/// One replica of a rival: says where it listens, and serves one run.
#[derive(clap::Args)]
pub struct Replica {
    /// Its log, in memory.
    #[arg(long)]
    log: PathBuf,
    /// Bytes of it.
    #[arg(long)]
    size: u64,
    /// It listens at this Unix socket, for shared memory [default: at a TCP port].
    #[arg(long)]
    socket: Option<PathBuf>,
}

impl Replica {
    /// Runs it.
    pub fn run(self) -> Done {
        let env: Arc<dyn Env> = Arc::new(Os::new()?);
        let at = match self.socket {
            Some(path) => Address::Unix(path),
            None => Address::Tcp(([127, 0, 0, 1], 0).into()),
        };
        let listener = Listener::bind(&at)?;
        let mut out = io::stdout().lock();
        writeln!(out, "{}", listener.local_address())?;
        out.flush()?;
        let spec = ReplicaSpec {
            log: log(self.log, self.size),
            spin: SPIN,
            mutation: None,
        };
        serve(&env, &listener, &spec)?;
        Ok(0)
    }
}

/// A rival at work.
pub struct Rival {
    name: String,
    env: Arc<dyn Env>,
    primary: Primary,
    replicas: Vec<(Process, LogSpec)>,
    store: Store,
}

impl Rival {
    /// Starts `n` replicas with logs of `size` bytes in `dir`, and connects to them.
    pub fn start(
        (name, scheme, n): (&str, Scheme, usize),
        transport: Transport,
        dir: &Path,
        size: u64,
        store: Store,
    ) -> Result<Rival, Failure> {
        let env: Arc<dyn Env> = Arc::new(Os::new()?);
        let dir = dir.join(name);
        std::fs::create_dir_all(&dir)?;
        let (mut replicas, mut addresses) = (Vec::new(), Vec::new());
        for i in 1..=n {
            let spec = log(dir.join(format!("replica-{i}")), size);
            let (path, size) = (spec.path.to_string_lossy(), size.to_string());
            let socket = dir.join(format!("socket-{i}"));
            let socket = socket.to_string_lossy();
            let at = ["--socket", &socket];
            let at = match transport {
                Transport::Tcp => &[],
                Transport::Shm => &at[..],
            };
            let args = [&["__replica", "--log", &path, "--size", &size], at].concat();
            let errors = dir.join(format!("replica-{i}.txt"));
            let mut p = Process::start_own(&format!("replica {i} of {name}"), args, &errors)?;
            addresses.push(p.ready()?);
            replicas.push((p, spec));
        }
        let own = log(dir.join("primary"), size);
        Ok(Rival {
            name: name.to_owned(),
            primary: Primary::start(&env, scheme, transport, &own, SPIN, &addresses)?,
            env,
            replicas,
            store,
        })
    }

    /// Its next sync points have this many bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.store.resize(bytes);
    }

    /// Ends it. Returns how many records each replica has, all of which are right.
    pub fn finish(self) -> Result<u64, Failure> {
        let run = self.primary.finish();
        let mut records = 0;
        for (mut process, log) in self.replicas {
            if !process.finish(LIMIT) {
                return Err(process.failure("failed"));
            }
            records = check(&self.env, &log, &run)?;
        }
        Ok(records)
    }
}

impl Subject for Rival {
    fn name(&self) -> &str {
        &self.name
    }

    fn prepare(&mut self) -> io::Result<()> {
        let (offset, bytes) = self.store.next();
        self.primary.store(offset as u64, bytes);
        Ok(())
    }

    fn op(&mut self) -> io::Result<()> {
        self.primary
            .commit()
            .map_err(|e| io::Error::other(format!("{}: {e}", self.name)))
    }
}
