//! Mounts, and file systems that are as small as a test wants.
//!
//! A mount's requests come over /dev/fuse, or as the environment says (`MOJIM_URING`: `on`, `auto`).

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::home::Home;
use crate::{Process, await_or};

/// Whether this machine's kernel can have requests come over io_uring, and a test switch that on. If not,
/// that is said.
pub fn has_uring() -> bool {
    let has = fs::exists("/sys/module/fuse/parameters/enable_uring").unwrap_or(false);
    let may = rustix::process::getuid().is_root();
    if !has || !may {
        eprintln!("left out: FUSE over io_uring needs Linux 6.14 and root");
    }
    has && may
}

/// How the requests of a test's mounts come.
fn uring() -> String {
    match std::env::var("MOJIM_URING") {
        Ok(how) if how == "off" || has_uring() => format!("--uring={how}"),
        _ => "--uring=off".to_owned(),
    }
}

/// A mount, in the hands of a test.
pub struct Mount {
    pub process: Process,
    pub at: PathBuf,
    /// It has ended.
    pub over: bool,
}

impl Mount {
    /// One that waits until its node is the primary.
    pub fn waiting(home: &Home, node: &str) -> Mount {
        Mount::waiting_with(home, node, &[])
    }

    /// The same, with more arguments.
    pub fn waiting_with(home: &Home, node: &str, args: &[&str]) -> Mount {
        let at = home.dir.join(format!("at-{node}"));
        fs::create_dir_all(&at).unwrap();
        let uring = uring();
        let all = ["--name", node, "--wait", &uring, at.to_str().unwrap()];
        let all = [&all, args].concat();
        let process = home.start("mount", &all, &format!("mount-{node}"));
        let over = false;
        Mount { process, at, over }
    }

    pub fn new(c: &Home, node: &str, args: &[&str]) -> Mount {
        let at = c.dir.join(format!("at-{node}"));
        fs::create_dir_all(&at).unwrap();
        let uring = uring();
        let mut all = [&["--name", node, at.to_str().unwrap()], args].concat();
        // Mounts that read, and tests that say it themselves.
        if !args
            .iter()
            .any(|a| *a == "--read" || a.starts_with("--uring"))
        {
            all.push(&uring);
        }
        let last = RefCell::new(String::new());
        // The node's daemon has the copy open while it looks at what a killed mount left.
        let process = await_or(
            "the mount",
            || last.borrow().clone(),
            || {
                let mut p = c.start("mount", &all, &format!("mount-{node}"));
                match p.line() {
                    Some(line) => {
                        assert!(line.contains("is mounted at"), "{line}");
                        Some(p)
                    }
                    None => {
                        let said = p.errors();
                        let busy = said.contains("only one process can be attached");
                        assert!(busy, "{said}");
                        last.replace(said);
                        None
                    }
                }
            },
        );
        let over = false;
        Mount { process, at, over }
    }

    /// Ends it as a user does.
    pub fn end(self) {
        self.end_as(0);
    }

    /// The same, with another exit code. What it has said.
    pub fn end_as(mut self, code: i32) -> String {
        self.process.signal("TERM");
        let ended = self.process.wait();
        assert_eq!(ended, Some(code), "{}", self.process.errors());
        self.over = true;
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        assert!(!mounts.contains(self.at.to_str().unwrap()), "{mounts}");
        self.process.errors()
    }

    pub fn kill(mut self) {
        self.process.kill();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.over {
            self.process.kill();
        }
        // One that waits lies over an empty file system.
        let gone = || {
            let mut umount = Command::new("umount");
            umount.arg("-l").arg(&self.at).stderr(Stdio::null());
            umount.status().is_ok_and(|s| s.success())
        };
        while !self.over && gone() {}
    }
}

/// A file system of its own for a node, as small as a test wants. Needs root.
pub struct Small(PathBuf);

impl Small {
    /// `options` are those of tmpfs.
    pub fn at(dir: PathBuf, options: &str) -> Small {
        fs::create_dir_all(&dir).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("mode=755,{options}"), "small"]);
        assert!(mount.arg(&dir).status().unwrap().success());
        Small(dir)
    }

    /// An ext4 of `mib` MiB, with so many files at most, beside `dir`.
    pub fn ext4(dir: PathBuf, mib: u64, files: u64) -> Small {
        fs::create_dir_all(&dir).unwrap();
        let image = dir.with_extension("img");
        let made = fs::File::create(&image).unwrap();
        made.set_len(mib << 20).unwrap();
        let files = files.to_string();
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-b", "4096", "-N", &files])
            .arg(&image);
        assert!(mkfs.status().unwrap().success());
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop"]).arg(&image).arg(&dir);
        assert!(mount.status().unwrap().success());
        Small(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
