//! A machine in QEMU's software emulation, and how its plug is pulled.
//!
//! Owns the process: it is killed when this is dropped, and when the thread that started
//! it ends. Invariant: what the machine said before the plug was pulled is read to its
//! end.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::Result;

/// The emulator.
pub(super) const QEMU: &str = "qemu-system-x86_64";
/// Size of each of the two file systems, in bytes.
pub(super) const FS_LEN: u64 = 32 << 20;
/// The length of what is before the file system on the NVDIMM: see `guest::make_fsdax`.
pub(super) const NVDIMM_FS_AT: u64 = 2 << 20;
const NVDIMM_LEN: u64 = NVDIMM_FS_AT + FS_LEN;

/// The two images of a machine.
pub(super) struct Images {
    pub(super) disk: PathBuf,
    pub(super) nvdimm: PathBuf,
}

impl Images {
    /// The images' paths in a directory.
    pub(super) fn in_dir(dir: &Path) -> Images {
        Images {
            disk: dir.join("disk"),
            nvdimm: dir.join("nvdimm"),
        }
    }

    /// Makes both, with empty file systems.
    pub(super) fn make(&self) -> Result<()> {
        make_ext4(&self.disk, 0, FS_LEN)?;
        make_ext4(&self.nvdimm, NVDIMM_FS_AT, FS_LEN)
    }

    /// A machine with both.
    pub(super) fn hardware(&self) -> Hardware<'_> {
        Hardware {
            memory: "256,slots=2,maxmem=1G",
            disks: vec![(&self.disk, "cache=writeback,throttling.iops-total=400")],
            nvdimm: Some(&self.nvdimm),
            says: "",
        }
    }

    /// Makes both as copies of others.
    pub(super) fn copy_from(&self, others: &Images) -> Result<()> {
        std::fs::copy(&others.disk, &self.disk)?;
        std::fs::copy(&others.nvdimm, &self.nvdimm)?;
        Ok(())
    }
}

/// What a machine is made of.
pub(super) struct Hardware<'a> {
    /// Its memory, in MiB, and what else `-m` takes.
    pub(super) memory: &'a str,
    /// Its virtio disks, with what else `-drive` takes.
    pub(super) disks: Vec<(&'a Path, &'a str)>,
    pub(super) nvdimm: Option<&'a Path>,
    /// What else its kernel is told.
    pub(super) says: &'a str,
}

/// Makes a file with an empty file system of `len` bytes from `at` on.
pub(super) fn make_ext4(path: &Path, at: u64, len: u64) -> Result<()> {
    File::create(path)?.set_len(at + len)?;
    let out = Command::new("mkfs.ext4")
        // DAX needs blocks of one page. All tables are written at once.
        .args(["-q", "-F", "-b", "4096", "-E"])
        .arg(format!(
            "offset={at},lazy_itable_init=0,lazy_journal_init=0"
        ))
        .arg(path)
        .arg(format!("{}k", len >> 10))
        .env("PATH", path_with_sbin())
        .output()
        .map_err(|e| format!("mkfs.ext4: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!("mkfs.ext4: {}", String::from_utf8_lossy(&out.stderr)).into()),
    }
}

fn path_with_sbin() -> String {
    format!(
        "{}:/usr/sbin:/sbin",
        std::env::var("PATH").unwrap_or_default()
    )
}

fn uri(command: &str, program: &str, state: &Path) -> String {
    format!(
        "{{\"execute\":\"{command}\",\"arguments\":{{\"uri\":\"exec:{program}{}\"}}}}",
        state.display()
    )
}

/// How a machine starts.
pub(super) enum Start<'a> {
    /// It boots.
    Boot {
        image: &'a Path,
        initramfs: &'a Path,
    },
    /// It resumes from a saved state.
    Saved(&'a Path),
}

/// The command line of the emulator. The console goes to `dir`; `monitor` is the
/// descriptor of its control connection.
fn command(dir: &Path, hardware: &Hardware, start: &Start, monitor: RawFd) -> Command {
    let mut command = Command::new(QEMU);
    command
        .args(["-accel", "tcg,thread=single", "-cpu", "max", "-nodefaults"])
        .args(["-M", "q35,nvdimm=on", "-m", hardware.memory])
        .args(["-display", "none", "-no-reboot"])
        .arg("-chardev")
        .arg(format!(
            "file,id=console,path={}",
            dir.join("console").display()
        ))
        .args(["-serial", "chardev:console", "-serial", "stdio"])
        .arg("-chardev")
        .arg(format!("socket,id=monitor,fd={monitor}"))
        .args(["-mon", "chardev=monitor,mode=control"]);
    for (disk, how) in &hardware.disks {
        let disk = disk.display();
        command
            .arg("-drive")
            .arg(format!("file={disk},format=raw,if=virtio,{how}"));
    }
    if let Some(nvdimm) = hardware.nvdimm {
        command
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=nv,share=on,mem-path={},size={NVDIMM_LEN}",
                nvdimm.display()
            ))
            .args(["-device", "nvdimm,memdev=nv,id=nv0"]);
    }
    match start {
        Start::Boot { image, initramfs } => command
            .arg("-kernel")
            .arg(image)
            .arg("-initrd")
            .arg(initramfs)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check {}",
                hardware.says
            )),
        Start::Saved(_) => command.args(["-incoming", "defer"]),
    };
    command
}

/// A running machine.
pub(super) struct Machine {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    monitor: BufReader<UnixStream>,
    dir: PathBuf,
}

impl Machine {
    /// Starts a machine; its console goes to `dir`.
    pub(super) fn start(dir: &Path, hardware: &Hardware, start: &Start) -> Result<Machine> {
        let (monitor, theirs) = UnixStream::pair()?;
        let theirs_fd = theirs.as_raw_fd();
        let mut command = command(dir, hardware, start, theirs_fd);
        // SAFETY: between fork and exec it only makes two system calls, on a
        // descriptor that is open until `spawn` has returned.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::fcntl(theirs_fd, libc::F_SETFD, 0);
                Ok(())
            });
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(dir.join("errors"))?)
            .spawn()
            .map_err(|e| format!("{QEMU}: {e}"))?;
        drop(theirs);
        let to = child.stdin.take().expect("piped");
        let from = BufReader::new(child.stdout.take().expect("piped"));
        let mut machine = Machine {
            child,
            to,
            from,
            monitor: BufReader::new(monitor),
            dir: dir.to_path_buf(),
        };
        machine.tell("{\"execute\":\"qmp_capabilities\"}")?;
        // The NVDIMM's bytes are in its file, so the saved state omits them.
        machine.tell(
            "{\"execute\":\"migrate-set-capabilities\",\"arguments\":{\"capabilities\":[\
             {\"capability\":\"x-ignore-shared\",\"state\":true},\
             {\"capability\":\"events\",\"state\":true}]}}",
        )?;
        if let Start::Saved(state) = start {
            machine.tell(&uri("migrate-incoming", "cat ", state))?;
            // Input before this event is overwritten.
            machine.await_event(&["\"RESUME\""])?;
        }
        Ok(machine)
    }

    /// Sends a command to the monitor.
    fn tell(&mut self, command: &str) -> Result<()> {
        Ok(writeln!(self.monitor.get_mut(), "{command}")?)
    }

    /// Reads the monitor's output until a line contains one of `words`.
    fn await_event(&mut self, words: &[&str]) -> Result<String> {
        let mut all = String::new();
        loop {
            let before = all.len();
            if self.monitor.read_line(&mut all)? == 0 {
                return Err(format!("{}: {all}{}", words[0], self.last_words()).into());
            }
            if words.iter().any(|w| all[before..].contains(w)) {
                return Ok(all);
            }
        }
    }

    /// The next line from the machine; `None` when the machine has ended.
    pub(super) fn line(&mut self) -> Result<Option<String>> {
        let mut line = Vec::new();
        self.from.read_until(b'\n', &mut line)?;
        // An incomplete line does not count.
        Ok((line.pop() == Some(b'\n'))
            .then(|| String::from_utf8_lossy(&line).trim_end().to_string()))
    }

    /// Reads the next line, which must be `expected`.
    pub(super) fn expect(&mut self, expected: &str) -> Result<()> {
        let got = self.line()?;
        if got.as_deref() == Some(expected) {
            return Ok(());
        }
        Err(format!(
            "the machine said {got:?} instead of {expected}; {}",
            self.last_words()
        )
        .into())
    }

    /// Sends a line to the machine.
    pub(super) fn say(&mut self, line: &str) -> Result<()> {
        Ok(self.to.write_all(line.as_bytes())?)
    }

    /// The last lines of its console, and of QEMU's output.
    pub(super) fn last_words(&self) -> String {
        let mut all = String::new();
        for name in ["console", "errors"] {
            let text = std::fs::read(self.dir.join(name)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            all += &format!(
                "{name}: {}\n",
                lines[lines.len().saturating_sub(12)..].join("\n")
            );
        }
        all
    }

    /// Saves the machine's state, and ends the machine.
    pub(super) fn save(mut self, state: &Path) -> Result<()> {
        self.tell(&uri("migrate", "cat >", state))?;
        let said = self.await_event(&["\"completed\"", "\"failed\""])?;
        if said.contains("\"failed\"") {
            return Err(format!("no state was saved: {said}{}", self.last_words()).into());
        }
        Ok(())
    }

    /// Pulls the plug, and returns the lines that the machine had sent by then.
    pub(super) fn pull(mut self) -> Result<Vec<String>> {
        self.child.kill()?;
        self.child.wait()?;
        let mut said = Vec::new();
        while let Some(line) = self.line()? {
            said.push(line);
        }
        Ok(said)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
