//! `mojim keys`: a cluster's authority and the certificates of its nodes, as
//! files.
//!
//! Owns the writing of the directory of keys. `mojim-keys` owns the contents of a certificate.
//!
//! Invariants:
//!
//! - The directory appears as a whole or not at all.
//! - Only a renewal overwrites a file in it.
//! - Only its owner may read any file.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mojim_config::Config;
use mojim_config::key_files;
use mojim_format::certificate::Subject;
use mojim_keys::{Authority, DAYS, Validity};
use serde_json::json;

use crate::ask::load;
use crate::failure::{Done, Failure};

/// The longest validity of a certificate: no longer than its authority's.
const MOST_DAYS: i64 = mojim_keys::AUTHORITY_DAYS as i64;

/// Make the keys by which nodes prove their names: an authority, and a certificate for each node.
///
/// The command writes into the directory that `keys` names in the configuration. The directory
/// must be empty, except with `--renew` and `--renew-client`.
///
/// - `authority.pem` is the authority's certificate. Every node needs it.
///
/// - `authority.key` signs certificates. Keep it where you make certificates, and on no node.
///
/// - `node.NAME.pem` is for one node. Put it there under the same path.
///
/// - `client.pem` is for people who run commands such as `mojim status`.
#[derive(clap::Args)]
pub struct Keys {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Make only the certificate of this node, with the existing authority.
    #[arg(long, value_name = "NODE")]
    renew: Option<String>,
    /// Make only the clients' certificate, with the existing authority.
    #[arg(long, conflicts_with = "renew")]
    renew_client: bool,
    /// Days for which the certificates are valid. The authority is valid for ten years.
    #[arg(long, value_name = "DAYS", default_value_t = DAYS,
          value_parser = clap::value_parser!(u32).range(1..=MOST_DAYS))]
    days: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Keys {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let Some(dir) = &config.keys else {
            return Err(Failure::usage(format!(
                "{}: it names no directory for keys; add keys = \"/absolute/path\"",
                self.config.display()
            )));
        };
        let made = match (&self.renew, self.renew_client) {
            (None, false) => self.make(&config, dir)?,
            (None, true) => vec![self.renew(&config, dir, &Subject::Client)?],
            (Some(node), _) => {
                let subject = Subject::Node(config.node(node)?.name.clone());
                vec![self.renew(&config, dir, &subject)?]
            }
        };
        let mut out = io::stdout().lock();
        if self.json {
            let files: Vec<String> = made.iter().map(|f| f.display().to_string()).collect();
            let line = json!({ "cluster": config.cluster, "days": self.days, "files": files });
            writeln!(out, "{line}")?;
            return Ok(0);
        }
        for f in &made {
            writeln!(out, "made {}", f.display())?;
        }
        if self.renew.is_none() && !self.renew_client {
            writeln!(
                out,
                "Copy authority.pem and its own node.NAME.pem to each node, under {}. People who run commands such as `mojim status` need authority.pem and client.pem. Keep authority.key away from all of them: its holder can pose as any node.",
                dir.display()
            )?;
        } else {
            writeln!(
                out,
                "Put it in its place, and start the node and its programs again. Links that are up stay up."
            )?;
        }
        writeln!(out, "Valid for {} days.", self.days)?;
        Ok(0)
    }

    /// Makes everything, first beside its final place, so that it appears at once.
    fn make(&self, config: &Config, dir: &Path) -> Result<Vec<PathBuf>, Failure> {
        let here = |e: io::Error| Failure::failed(format!("{}: {e}", dir.display()));
        match std::fs::read_dir(dir).map(|mut all| all.next().is_some()) {
            Ok(true) => {
                return Err(Failure::failed(format!(
                    "{} is not empty. Nothing was written, because a new authority would shut every node out. `mojim keys --renew NODE` makes the certificate of one node",
                    dir.display()
                )));
            }
            Ok(false) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(here(e)),
        }
        let parent = dir.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(parent).map_err(here)?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let beside = parent.join(format!(".{name}.{}", std::process::id()));
        let mut closed = DirBuilder::new();
        closed.mode(0o700).create(&beside).map_err(here)?;
        let filled = self.fill(config, &beside).and_then(|files| {
            std::fs::rename(&beside, dir).map_err(here)?;
            sync(parent).map_err(here)?;
            Ok(files)
        });
        match filled {
            Ok(names) => Ok(names.into_iter().map(|n| dir.join(n)).collect()),
            Err(e) => {
                let _ = std::fs::remove_dir_all(&beside);
                Err(e)
            }
        }
    }

    /// Writes all files into `dir`; returns their names.
    fn fill(&self, config: &Config, dir: &Path) -> Result<Vec<PathBuf>, Failure> {
        let new = Authority::make(&config.cluster).map_err(failed)?;
        let mut all = vec![
            (key_files::authority(dir), new.certificate),
            (key_files::authority_key(dir), new.key),
        ];
        let nodes = config.nodes.keys().cloned().map(Subject::Node);
        for subject in nodes.chain([Subject::Client]) {
            let text = new.authority.issue(&subject, Validity::days(self.days));
            all.push((key_files::certificate(dir, &subject), text.map_err(failed)?));
        }
        for (path, text) in &all {
            write(path, text)?;
        }
        sync(dir)?;
        let names = all.iter().filter_map(|(p, _)| p.file_name());
        Ok(names.map(PathBuf::from).collect())
    }

    fn renew(&self, config: &Config, dir: &Path, subject: &Subject) -> Result<PathBuf, Failure> {
        let path = key_files::authority_key(dir);
        let key = std::fs::read_to_string(&path).map_err(|e| {
            Failure::failed(format!(
                "{}: {e}; a certificate is made where the authority's key is",
                path.display()
            ))
        })?;
        let authority = Authority::from_key(&config.cluster, &key).map_err(failed)?;
        let text = authority
            .issue(subject, Validity::days(self.days))
            .map_err(failed)?;
        let to = key_files::certificate(dir, subject);
        let beside = dir.join(format!(".new.{}", std::process::id()));
        let put = write(&beside, &text)
            .and_then(|()| std::fs::rename(&beside, &to).map_err(|e| at(&to, &e)))
            .and_then(|()| sync(dir).map_err(|e| at(dir, &e)));
        if put.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        put.map(|()| to)
    }
}

fn failed(e: mojim_keys::Error) -> Failure {
    Failure::failed(e.to_string())
}

fn at(path: &Path, e: &io::Error) -> Failure {
    Failure::failed(format!("{}: {e}", path.display()))
}

/// Writes a new file that only its owner may read, durably.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let mut new = OpenOptions::new();
    new.write(true).create_new(true).mode(0o600);
    new.open(path)
        .and_then(|mut f| f.write_all(text.as_bytes()).and_then(|()| f.sync_all()))
        .map_err(|e| at(path, &e))
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
