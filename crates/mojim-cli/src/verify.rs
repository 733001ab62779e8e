//! `mojim verify`: whether the copies of a volume are equal, byte by byte.
//!
//! Owns the command's output; the comparison is `compare`.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::ask::load;
use crate::compare::{compare_all, count};
use crate::failure::{Done, Failure};

/// Compare the copies of a volume on its nodes, also while a program is attached.
///
/// Exit code 0 if they are equal; 1 if they differ (the first difference is printed) or a node
/// does not answer; 2 if it could not be said of all bytes, because they changed too fast or a
/// copy is not whole: try again, or with a longer --wait. What changes while it is compared is
/// looked at again, until both nodes show what must be the same on both, or it is equal. See `mojim repair`.
#[derive(clap::Args)]
pub struct Verify {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume; may be left out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Seconds after which what is still in motion is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Verify {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        if volume.mirror.is_none() {
            return Err(Failure::usage(format!(
                "{}: volume {} has one copy only; there is nothing to compare",
                self.config.display(),
                volume.name
            )));
        }
        let found = compare_all(&config, volume, Duration::from_secs(self.wait))?;
        let (code, json, text) = if let Some(d) = found.differences.first() {
            let n = found.differences.len();
            (
                1,
                json!({
                    "equal": false, "file": d.file, "offset": d.offset, "what": d.what,
                    "differences": n,
                }),
                match n {
                    1 => d.what.clone(),
                    _ => format!("{} ({n} pages or files differ in all)", d.what),
                },
            )
        } else if let Some(why) = &found.undecided {
            (
                2,
                json!({ "equal": null, "what": why }),
                format!("cannot be compared now: {why}"),
            )
        } else {
            let (files, bytes, lsn) = (found.files, found.bytes, found.lsn);
            (
                0,
                json!({ "equal": true, "files": files, "bytes": bytes, "lsn": lsn }),
                format!(
                    "the copies are equal: {}, {bytes} bytes, at LSN {lsn}",
                    count(files, "file")
                ),
            )
        };
        let mut out = std::io::stdout().lock();
        if self.json {
            let mut json = json;
            json["volume"] = json!(volume.name);
            writeln!(out, "{json}")?;
        } else {
            writeln!(out, "volume {}: {text}", volume.name)?;
        }
        Ok(code)
    }
}
