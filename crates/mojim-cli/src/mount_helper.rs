//! `mount -t fuse.mojim`: what mount(8) runs where this program has the name `mount.fuse.mojim`.
//!
//! Owns the helper's command line, which is mount(8)'s: the configuration's file as the source, the
//! directory, and options with `-o`. It starts `mojim mount` in the background and returns when the
//! volume is mounted.
//!
//! Invariant: what it mounts has the source that it was given in the table of mounts, too. `mount -a`
//! knows by source and directory what is mounted already.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use mojim_mount::Flags;

use crate::failure::{Done, Failure};

/// The name under which mount(8) finds it.
pub const NAME: &str = "mount.fuse.mojim";

/// mount(8)'s exit code for a mount that failed.
const FAILED: u8 = 32;

/// Options of the file system's table, which are not the mount's.
const PASSED_OVER: [&str; 13] = [
    "defaults", "auto", "noauto", "user", "nouser", "users", "owner", "group", "nofail", "_netdev",
    "async", "exec", "rw",
];

/// What the command line asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Asked {
    source: OsString,
    directory: OsString,
    /// Words of `mojim mount`.
    words: Vec<String>,
    /// Options of `mojim mount -o`.
    options: Vec<String>,
    /// Nothing is to be mounted.
    fake: bool,
}

impl Asked {
    fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Asked, Failure> {
        let mut asked = Asked::default();
        let mut places = Vec::new();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let flags = arg.to_str().filter(|a| a.starts_with('-') && a.len() > 1);
            match flags {
                None => places.push(arg),
                Some("-o") => {
                    let words = args.next().unwrap_or_default();
                    let words = words
                        .into_string()
                        .map_err(|_| wrong("options are UTF-8"))?;
                    for word in words.split(',').filter(|w| !w.is_empty()) {
                        asked.take(word)?;
                    }
                }
                // The type, and a namespace, which it is in.
                Some("-t" | "-N") => drop(args.next()),
                Some(flags) => asked.fake |= flags.contains('f'),
            }
        }
        let [source, directory] = <[OsString; 2]>::try_from(places).map_err(|_| {
            wrong("mount -t fuse.mojim -o name=NODE[,volume=VOLUME,…] CONFIGURATION DIRECTORY")
        })?;
        (asked.source, asked.directory) = (source, directory);
        if !asked.words.iter().any(|w| w == "--name") {
            return Err(wrong("the option name=NODE says on which node this is"));
        }
        Ok(asked)
    }

    fn take(&mut self, word: &str) -> Result<(), Failure> {
        let mut put = |words: &[&str]| self.words.extend(words.iter().map(|w| (*w).to_owned()));
        match word.split_once('=') {
            Some(("name", node)) => put(&["--name", node]),
            Some(("volume", volume)) => put(&["--volume", volume]),
            Some(("atomic", what)) => put(&["--atomic", what]),
            Some(("commit_interval", seconds)) => put(&["--commit-interval", seconds]),
            Some(("uring", when)) => put(&["--uring", when]),
            None if word == "read" => put(&["--read"]),
            None if word == "wait" => put(&["--wait"]),
            _ if PASSED_OVER.contains(&word) || word.starts_with("x-") => {}
            _ => {
                Flags::default().take(word).map_err(wrong)?;
                self.options.push(word.to_owned());
            }
        }
        Ok(())
    }
}

fn wrong(text: impl Into<String>) -> Failure {
    Failure {
        code: 1,
        text: text.into(),
    }
}

/// Runs it, with the words behind the program's name.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Done {
    let asked = Asked::parse(args)?;
    if asked.fake {
        return Ok(0);
    }
    let mut mount = Command::new(std::env::current_exe()?);
    mount.args(["mount", "--config"]).arg(&asked.source);
    mount.args(&asked.words);
    // A table has any bytes, an option of FUSE's text only.
    if let Some(source) = asked.source.to_str() {
        mount.arg(format!("--source={source}"));
    }
    if !asked.options.is_empty() {
        mount.args(["-o", &asked.options.join(",")]);
    }
    // What it says later goes where this helper's words go: a terminal, or a service's journal.
    mount
        .arg("--")
        .arg(&asked.directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: setsid is a system call, which may be made between fork and exec. The child is no group's
    // leader: this process was made its parent just now.
    unsafe {
        mount.pre_exec(|| Ok(rustix::process::setsid().map(drop)?));
    }
    let mut child = mount.spawn()?;
    let mut line = String::new();
    let out = child.stdout.take().expect("it is piped");
    BufReader::new(out).read_line(&mut line)?;
    if line.ends_with('\n') {
        return Ok(0);
    }
    // It has said why.
    child.wait()?;
    Ok(FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Asked, String> {
        let words = line.split_whitespace().map(OsString::from);
        Asked::parse(words).map_err(|f| f.text)
    }

    #[test]
    fn the_command_line_is_mounts() {
        let line = "/etc/m.toml /srv/v -n -s -o rw,nosuid,name=a,volume=v,noatime,_netdev,x-systemd.a -t fuse.mojim";
        let asked = parse(line).unwrap();
        assert_eq!(
            (asked.source.to_str(), asked.directory.to_str()),
            (Some("/etc/m.toml"), Some("/srv/v"))
        );
        assert_eq!(asked.words, ["--name", "a", "--volume", "v"]);
        assert_eq!(asked.options, ["nosuid", "noatime"]);
        assert!(parse("a b -f -o name=a,wait").unwrap().fake);
        for (line, why) in [
            ("a b", "name=NODE"),
            ("a -o name=a", "CONFIGURATION DIRECTORY"),
            ("a b -o name=a,allow_other", "allow_other"),
        ] {
            assert!(parse(line).unwrap_err().contains(why), "{line}");
        }
    }
}
