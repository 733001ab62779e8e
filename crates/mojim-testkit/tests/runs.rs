//! `mojim run`, end to end: programs for which the volume's directory is the volume, whatever way
//! they reach it by.
//!
//! The tests compare what a program was told with what is on the other node after a promotion.

// Seen to fail, each by a defect made on purpose or found:
// - a killed mount taken for a live one
// - a process with a copy of this machine's mounts kept every later program waiting
// - a program in a chroot, or ended together by a service manager, lost its mount
// - a mask of 002, or a link in the node's directory, made it refuse or never end
//
// The check is checked: the same program writes into the bare copy, and the mirror has no file
// (`outside_the_mount_a_program_writes_on_one_node_only`).

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::FromRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use rustix::fs::FlockOperation;

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::interface::compile;
use mojim_testkit::{
    Process, await_or, await_that, hear_signals, libraries, mojim_path, program_of, source, text,
};

/// Two nodes, and programs on them.
struct Runs {
    c: Cluster,
}

impl Runs {
    fn new() -> Runs {
        Runs {
            c: Cluster::new(SYNC),
        }
    }

    /// The volume's directory on a node.
    fn dir(&self, node: &str) -> PathBuf {
        self.c.dir.join(node).join("v")
    }

    /// Where the mount lies that the programs have in common.
    fn at(&self, node: &str) -> PathBuf {
        self.c.dir.join(node).join(".mojim/v/run/at")
    }

    fn args(&self, node: &str, more: &[&str]) -> Vec<String> {
        let file = self.c.file();
        let all = ["run", "--config", file.to_str().unwrap(), "--name", node];
        all.iter().chain(more).map(|s| (*s).to_owned()).collect()
    }

    /// A program, to its end.
    fn run(&self, node: &str, command: &[&str]) -> Output {
        self.c
            .mojim("run", &[&["--name", node, "--"], command].concat())
    }

    /// The output of one that must do well.
    fn says(&self, node: &str, command: &[&str]) -> String {
        let out = self.run(node, command);
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stdout)
    }

    /// A shell that does what it is told, line by line.
    fn shell(&self, node: &str, name: &str) -> Process {
        let errors = self.c.dir.join(format!("{name}.txt"));
        let args = self.args(node, &["--", "sh"]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Process::start(&args, &errors)
    }

    fn is_mounted(&self, node: &str) -> bool {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        mounts.contains(self.at(node).to_str().unwrap())
    }

    /// Until no program has the mount any more, and everything is committed.
    fn await_end(&self, node: &str) {
        await_that("the mount's end", || {
            (!self.is_mounted(node) && self.server(node).is_none()).then_some(())
        });
    }

    /// The process of the mount.
    fn server(&self, node: &str) -> Option<u32> {
        self.process_of(node, true)
    }

    /// The one that watches it.
    fn guard(&self, node: &str) -> Option<u32> {
        self.process_of(node, false)
    }

    fn process_of(&self, node: &str, guarded: bool) -> Option<u32> {
        let at = self.at(node);
        let all = fs::read_dir("/proc").unwrap().flatten();
        let mut ids = all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        ids.find(|id| {
            let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            let has = |word: &[u8]| line.split(|b| *b == 0).any(|arg| arg == word);
            has(b"--while-used")
                && has(b"--guarded") == guarded
                && line
                    .windows(at.as_os_str().len())
                    .any(|w| w == at.as_os_str().as_encoded_bytes())
        })
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        for node in ["a", "b"] {
            if let Some(id) = self.server(node) {
                kill(id, "KILL");
            }
            let mut umount = Command::new("umount");
            umount.arg("-l").arg(self.at(node)).stderr(Stdio::null());
            let _ = umount.status();
        }
    }
}

fn tell(shell: &mut Process, line: &str) {
    let to = shell.stdin.as_mut().unwrap();
    writeln!(to, "{line}").unwrap();
}

fn kill(id: u32, signal: &str) {
    let mut kill = Command::new("kill");
    // It may just have ended.
    let _ = kill
        .args(["-s", signal, &id.to_string()])
        .stderr(Stdio::null())
        .status();
}

/// A program that is linked statically and makes its system calls itself.
fn past_libc(dir: &Path) -> String {
    let program = dir.join("past_libc");
    let source = source().join("tests/e2e/past_libc.c");
    let mut cc = Command::new("cc");
    let cc = cc.arg("-static").arg(source).arg("-o").arg(&program);
    assert!(cc.status().unwrap().success());
    program.to_str().unwrap().to_owned()
}

/// A store in Go acknowledged 200 transactions under `mojim run`, and the mirror had no file, while
/// `status` said well. So did static programs, a cleaned environment and system calls past the C
/// library; `cp` and `>` over a file were refused after the truncation was committed; directories,
/// links and permissions stayed on one node.
#[test]
fn nothing_that_a_program_does_in_the_directory_stays_on_one_node() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let mut b = r.c.node("b");
    let program = past_libc(&r.c.dir);
    let dir = r.dir("a");
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    assert_eq!(r.says("a", &[&program, &at("static"), "one"]), "synced\n");
    let clean = ["env", "-i", &program, &at("static"), " two"];
    assert_eq!(r.says("a", &clean), "synced\n");
    let script = format!(
        "set -e; cd '{}'; mkdir d; echo 1 > d/f; echo 2 > d/f; ln -s f d/link; chmod 751 d; \
         cp -p d/f g; mv g h; rm -f none; sync d/f h d",
        dir.display()
    );
    r.says("a", &["sh", "-c", &script]);
    r.await_end("a");
    // Outside there is the node's copy, which knows nothing of links and permissions.
    assert_eq!(fs::read_to_string(dir.join("static")).unwrap(), "one two");
    r.c.assert_equal();
    r.c.promote("b");
    let dir = r.dir("b");
    let script = "cat static d/f d/link h; stat -c %a d; readlink d/link; ls";
    let script = format!("cd '{}'; {script}", dir.display());
    let shown = r.says("b", &["sh", "-c", &script]);
    assert_eq!(shown, "one two2\n2\n2\n751\nf\nd\nh\nstatic\n");
    r.await_end("b");
    b.kill();
}

/// What the test above would miss without the mount; and that it is said: `status` said well, and
/// `verify` that the copies are equal.
#[test]
fn outside_the_mount_a_program_writes_on_one_node_only() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    r.says("a", &["true"]);
    r.await_end("a");
    let file = r.dir("a").join("f");
    let mut program = Command::new(past_libc(&r.c.dir));
    let out = program.arg(&file).arg("one").output().unwrap();
    assert_eq!(text(&out.stdout), "synced\n", "{}", text(&out.stderr));
    assert!(file.exists() && !r.dir("b").join("f").exists());
    let said = |kind: &str| {
        let out = r.c.mojim("status", &[]);
        let said = text(&out.stdout);
        (out.status.code() == Some(1) && said.contains(kind)).then_some(said)
    };
    let unknown = "files that are not the volume's, on this node only";
    await_that("the unmanaged file to be said", || said(unknown));
    let out = r.c.mojim("verify", &["--wait", "60"]);
    assert_eq!(out.status.code(), Some(1));
    let verified = text(&out.stdout);
    assert!(
        verified.contains("are equal") && verified.contains("/a/v/f is not the volume's"),
        "{verified}"
    );
    fs::remove_file(&file).unwrap();
    r.c.assert_equal();
    // The volume's own file is cut, while it is in use and after.
    let mut shell = r.shell("a", "shell");
    tell(
        &mut shell,
        &format!("echo 12345 > {0}; sync {0}; echo up", file.display()),
    );
    assert_eq!(shell.line().as_deref(), Some("up"));
    await_that("the file", || {
        fs::read(&file).is_ok_and(|b| b == b"12345\n").then_some(())
    });
    fs::OpenOptions::new()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(2)
        .unwrap();
    let cut = "f has 2 bytes instead of 6";
    await_that("the cut file to be said", || said(cut));
    tell(&mut shell, "exit");
    shell.wait();
    r.await_end("a");
    fs::remove_file(&file).unwrap();
    await_that("the missing file to be said", || {
        said("the copy of node a cannot be used").filter(|text| text.contains("/a/v/f"))
    });
}

/// Whichever program opened the volume first was its owner: when a reader of a shell ended, the
/// database beside it could commit nothing more until it was started again.
#[test]
fn programs_come_and_go_and_those_that_stay_go_on() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = past_libc(&r.c.dir);
    let file = r.dir("a").join("f").to_str().unwrap().to_owned();
    let mut first = r.shell("a", "first");
    tell(&mut first, &format!("{program} {file} 1"));
    assert_eq!(first.line().as_deref(), Some("synced"));
    let mut second = r.shell("a", "second");
    tell(&mut second, &format!("{program} {file} 2"));
    assert_eq!(second.line().as_deref(), Some("synced"));
    let server = r.server("a").expect("the mount's process");
    tell(&mut first, "exit 7");
    assert_eq!(first.wait(), Some(7));
    tell(&mut second, &format!("{program} {file} 3"));
    assert_eq!(second.line().as_deref(), Some("synced"));
    // One that leaves a process behind.
    let left = format!(
        "(read x < {}; {program} {file} 4) > /dev/null 2>&1 &",
        file.clone() + ".go"
    );
    tell(&mut second, &format!("mkfifo {file}.go; {left} exit 0"));
    assert_eq!(second.wait(), Some(0));
    assert_eq!(r.says("a", &["cat", &file]), "123");
    assert_eq!(r.server("a"), Some(server));
    r.says("a", &["sh", "-c", &format!("echo > {file}.go")]);
    r.await_end("a");
    assert_eq!(fs::read_to_string(&file).unwrap(), "1234");
    r.c.assert_equal();
}

/// What was not synced is committed when the last program has ended, before another can come.
#[test]
fn the_end_of_the_last_program_commits_what_it_left() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let dir = r.dir("a");
    let file = dir.join("f");
    let mut args = r.args("a", &["--commit-interval", "never", "--", "sh", "-c"]);
    args.push(format!("echo unsynced > '{}'", file.display()));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let out = mojim_testkit::mojim(&args);
    assert!(out.status.success(), "{}", text(&out.stderr));
    r.await_end("a");
    assert_eq!(fs::read_to_string(&file).unwrap(), "unsynced\n");
    r.c.assert_equal();
    // Another that needs other settings comes once it has ended, and not before.
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, "echo up");
    assert_eq!(shell.line().as_deref(), Some("up"));
    let out = mojim_testkit::mojim(&args);
    let why = text(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{why}");
    assert!(
        why.contains("mounted already") && why.contains("--commit-interval=5"),
        "{why}"
    );
    tell(&mut shell, "exit");
    assert_eq!(shell.wait(), Some(0));
}

/// The volume's process is killed under the programs. They lived on with dead files: for a quarter of an
/// hour every connection to a database failed, and `status` said well. They are killed, too, and `status`
/// names it; what they were told is there, and the next `mojim run` brings the volume up again.
#[test]
fn a_killed_mount_ends_its_programs_and_the_next_finds_what_was_acknowledged() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = past_libc(&r.c.dir);
    let file = r.dir("a").join("f").to_str().unwrap().to_owned();
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, &format!("{program} {file} 1"));
    assert_eq!(shell.line().as_deref(), Some("synced"));
    // Of what `cp` made, one directory is synced: new files come with their names.
    let source = source().join("crates/mojim-cli/src");
    let (source, copy) = (source.to_str().unwrap(), r.dir("a").join("copy"));
    let copy = copy.to_str().unwrap();
    tell(
        &mut shell,
        &format!("cp -a {source} {copy} && sync {copy} && echo copied"),
    );
    assert_eq!(shell.line().as_deref(), Some("copied"));
    // Whoever the program has started, and does not use a file: it has the mount, too.
    tell(
        &mut shell,
        "setsid sleep 600 < /dev/null > /dev/null & echo $!",
    );
    let other = shell.line().unwrap();
    kill(r.server("a").unwrap(), "KILL");
    assert_eq!(shell.wait(), Some(128 + libc::SIGKILL), "it is killed");
    await_that("the end of what the program had started", || {
        let namespace = fs::read_link(format!("/proc/{other}/ns/mnt"));
        namespace.is_err().then_some(())
    });
    let log = fs::read_to_string(r.at("a").with_file_name("log")).unwrap();
    assert!(log.contains("ended (signal: 9 (SIGKILL))"), "{log}");
    let out = r.c.mojim("status", &[]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("the process of their mount died"), "{said}");
    let out = r.run("a", &[&program, &file, "3"]);
    assert_eq!(text(&out.stdout), "synced\n");
    let said = text(&out.stderr);
    assert!(said.contains("the process of their mount died"), "{said}");
    assert!(!text(&r.c.mojim("status", &[]).stdout).contains("mount died"));
    assert_eq!(r.says("a", &["cat", &file]), "13");
    assert_eq!(r.says("a", &["diff", "-r", source, copy]), "");
    r.await_end("a");
    r.c.assert_equal();
}

/// A `mojim run` was killed while it waited for its mirror: the process of its mount went on waiting for
/// 20 s, and the next `mojim run` was refused meanwhile.
#[test]
fn a_killed_run_that_waits_leaves_no_mount_behind() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let b = r.c.node("b");
    let b = [b.child.id()];
    mojim_testkit::stop_all(&b);
    let args = r.args("a", &["--", "true"]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let errors = r.c.dir.join("run.txt");
    let mut run = Process::start(&args, &errors);
    await_that("the wait", || {
        run.errors().contains("waiting").then_some(())
    });
    await_that("the mount's process", || r.server("a"));
    run.kill();
    await_that("the end of the mount's processes", || {
        (r.guard("a").is_none() && r.server("a").is_none()).then_some(())
    });
    let log = fs::read_to_string(r.at("a").with_file_name("log")).unwrap();
    assert!(log.contains("the `mojim run` that waited for it"), "{log}");
    assert!(!r.is_mounted("a"));
    mojim_testkit::continue_all(&b);
    assert_eq!(r.says("a", &["echo", "up"]), "up\n");
    r.await_end("a");
    r.c.assert_equal();
}

/// Somebody ends the mount's connection to the kernel, and its process lives: its programs are killed as
/// if it were dead.
#[test]
fn a_mount_that_is_cut_off_ends_its_programs() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, "echo up");
    assert_eq!(shell.line().as_deref(), Some("up"));
    // As `umount -f`: the connection is ended, whoever uses the mount.
    let _ = rustix::mount::unmount(r.at("a"), rustix::mount::UnmountFlags::FORCE);
    assert_eq!(shell.wait(), Some(128 + libc::SIGKILL), "it is killed");
    r.await_end("a");
    let log = fs::read_to_string(r.at("a").with_file_name("log")).unwrap();
    assert!(
        log.contains("the mount ends: somebody unmounted it"),
        "{log}"
    );
}

/// Files move in and out whole, with all that belongs to them, or not at all.
#[test]
fn directories_are_imported_and_exported() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let (home, out) = (r.c.dir.join("home"), r.c.dir.join("out"));
    fs::create_dir_all(home.join("data/deep")).unwrap();
    fs::create_dir(&out).unwrap();
    fs::write(home.join("data/deep/one"), vec![7; 3 << 20]).unwrap();
    fs::write(home.join(".hidden"), "h").unwrap();
    fs::hard_link(home.join("data/deep/one"), home.join("data/two")).unwrap();
    std::os::unix::fs::symlink("deep/none", home.join("data/link")).unwrap();
    let mut private = fs::metadata(home.join("data/two")).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut private, 0o640);
    fs::set_permissions(home.join("data/two"), private).unwrap();
    let path = |p: &Path| p.to_str().unwrap().to_owned();
    let (data, hidden) = (path(&home.join("data")), path(&home.join(".hidden")));
    let to = path(&out);
    let out_of = |word, args: &[&str]| r.c.mojim(word, &[&["--name", "a"], args].concat());

    let done = out_of("import", &["--json", &data, &hidden]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let said = text(&done.stdout);
    assert!(said.contains("\"copied\":6"), "{said}");
    // What is there is not written over, and nothing else comes in its place.
    let again = out_of("import", &[&data]);
    let why = text(&again.stderr);
    assert!(
        !again.status.success() && why.contains("there already"),
        "{why}"
    );
    // One of two cannot be read: none of them comes.
    fs::create_dir(home.join("new")).unwrap();
    let lacks = path(&home.join("none"));
    let half = out_of("import", &[&path(&home.join("new")), &lacks]);
    assert!(!half.status.success() && text(&half.stderr).contains(&lacks));
    r.await_end("a");
    let names = r.says("a", &["ls", "-A", &path(&r.dir("a"))]);
    assert_eq!(names, ".hidden\ndata\n");
    r.await_end("a");
    // What the other node has.
    r.c.assert_equal();
    let done = out_of("export", &[&to]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let mut same = Command::new("diff");
    same.args(["-r", "--no-dereference", "-xnew", &path(&home), &to]);
    let same = same.output().unwrap();
    assert_eq!(
        (text(&same.stdout), same.status.success()),
        (String::new(), true)
    );
    let of = |p: &str| fs::metadata(out.join(p)).unwrap();
    assert_eq!(
        (of("data/two").mode() & 0o777, of("data/two").nlink()),
        (0o640, 2)
    );
    assert_eq!(
        of("data/two").mtime(),
        fs::metadata(home.join("data/two")).unwrap().mtime()
    );
    let once = out_of("export", &["--path", "data/deep/", &to]);
    assert!(once.status.success(), "{}", text(&once.stderr));
    assert!(out.join("deep/one").is_file());
    for no in ["../x", ".", "", "/etc"] {
        let refused = out_of("export", &["--path", no, &to]);
        assert_eq!(refused.status.code(), Some(2), "{no}");
    }
    assert!(fs::read_dir(&out).unwrap().all(|e| {
        let name = e.unwrap().file_name();
        !name.to_str().unwrap().starts_with(".copy")
    }));
    // What a volume does not rename as one would come in parts.
    let many = home.join("many");
    fs::create_dir(&many).unwrap();
    (0..=1000).for_each(|n| fs::write(many.join(n.to_string()), "").unwrap());
    let refused = out_of("import", &[&path(&many)]);
    let why = text(&refused.stderr);
    assert!(
        refused.status.code() == Some(2) && why.contains("--in-parts"),
        "{why}"
    );
}

/// A writer to a volume, on any node, chooses modes and owners: an export by root made a
/// setuid file of root's and a device of that, where any user of the machine could use them.
#[test]
fn an_export_gives_no_rights_unless_they_are_asked_for() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let file = r.dir("a").join("f").to_str().unwrap().to_owned();
    let make = format!("cp /bin/true {file}; chmod 6755 {file}; mknod {file}.null c 1 3");
    r.says("a", &["sh", "-c", &make]);
    r.await_end("a");
    for (special, mode) in [(false, 0o755), (true, 0o6755)] {
        let out = r.c.dir.join(format!("out-{special}"));
        fs::create_dir(&out).unwrap();
        let keep = special.then_some("--special");
        let args = ["--name", "a", out.to_str().unwrap()];
        let args: Vec<&str> = args.into_iter().chain(keep).collect();
        let done = r.c.mojim("export", &args);
        let said = text(&done.stderr);
        assert!(done.status.success(), "{said}");
        assert_eq!(
            said.contains("1 devices") && said.contains("of 1 files"),
            !special
        );
        let found = fs::metadata(out.join("f")).unwrap().mode() & 0o7777;
        assert_eq!(found, mode);
        assert_eq!(out.join("f.null").exists(), special);
        r.await_end("a");
    }
}

/// Where the import below stands when everything on its node dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// All is copied, and has no name.
    BeforeNames,
    /// It has its name, which somebody else's sync point has committed.
    BehindNames,
    /// `mv` could not rename it, and copied it once more.
    BehindParts,
}

/// Imports a directory with a file, and kills everything on node `a` at that place. Returns what node
/// `b` shows then: the volume's names, and the file's bytes.
fn import_that_dies(at: Stands) -> (String, String) {
    let r = Runs::new();
    let mut a = r.c.node("a");
    let _b = r.c.node("b");
    let (home, tools) = (r.c.dir.join("home"), r.c.dir.join("tools"));
    fs::create_dir_all(home.join("data")).unwrap();
    fs::create_dir(&tools).unwrap();
    fs::write(home.join("data/f"), "first\n").unwrap();
    let reached = r.c.dir.join("reached");
    let wait = format!(
        "echo $$ > '{0}.new'; mv '{0}.new' '{0}'; exec sleep infinity",
        reached.display()
    );
    // A sync point that somebody else makes has the file's name, and a part of its bytes.
    let cp =
        "cp \"$@\"; for to; do :; done; sync \"$to\"data/f; echo rest >> \"$to\"data/f".to_owned();
    let mv = match at {
        Stands::BeforeNames => wait.clone(),
        Stands::BehindNames => {
            format!(
                "mv \"$@\"; for to; do :; done; echo > \"$to\".other; sync \"$to\".other; {wait}"
            )
        }
        Stands::BehindParts => {
            "for to; do :; done; rm -r \"$4\"; mkdir \"$to\"; echo first > \"$to\"/f; \
                                sync \"$to\"/f; echo rest >> \"$to\"/f"
                .to_owned()
        }
    };
    let path = std::env::var("PATH").unwrap();
    // Behind the names the directory of copies goes.
    for (name, script) in [("cp", cp), ("mv", mv), ("rmdir", wait)] {
        let script = format!("#!/bin/sh\nset -e\nPATH='{path}'\n{script}\n");
        fs::write(tools.join(name), script).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(tools.join(name), mode).unwrap();
    }
    let (file, data) = (r.c.file(), home.join("data"));
    let args = ["import", "--config", file.to_str().unwrap(), "--name", "a"];
    let args = [&args[..], &[data.to_str().unwrap()]].concat();
    let errors = r.c.dir.join("import.txt");
    let mut import = Process::start_with(&args, &errors, |command| {
        command.env("PATH", format!("{}:{path}", tools.display()));
    });
    let waits = await_that("the import to stand there", || {
        fs::read_to_string(&reached)
            .ok()?
            .trim()
            .parse::<u32>()
            .ok()
    });
    kill(r.server("a").unwrap(), "KILL");
    a.kill();
    kill(waits, "KILL");
    assert_ne!(import.wait(), Some(0), "{}", import.errors());
    r.c.promote("b");
    let show = format!(
        "cd '{}'; ls; cat data/f || cat .copy.*/data/f",
        r.dir("b").display()
    );
    let shown = r.says("b", &["sh", "-c", &show]);
    r.await_end("b");
    let (names, bytes) = shown.split_at(shown.find("first").expect("the file"));
    (names.to_owned(), bytes.to_owned())
}

/// What an import wrote to a file after a sync point of somebody else (the mount's clock, say) was in
/// no later one until its directory had its name: one sync of the directory does not commit it. Every
/// file is committed before anything has a name; and a name is never there with a part.
#[test]
fn an_import_that_dies_leaves_no_name_with_a_part() {
    let all = || "first\nrest\n".to_owned();
    assert_eq!(
        import_that_dies(Stands::BeforeNames),
        (String::new(), all())
    );
    let named = ("data\ndata.other\n".to_owned(), all());
    assert_eq!(import_that_dies(Stands::BehindNames), named);
    // An import in parts returned 0 with files that were not committed.
    let (names, bytes) = import_that_dies(Stands::BehindParts);
    assert!(names.ends_with("data\n"), "{names}");
    assert_eq!(bytes, all());
}

/// A killed mount that the kernel knew everything of was taken for a live one: every later program
/// started in a directory that nobody served.
#[test]
fn a_killed_mount_is_known_to_be_dead_without_a_question() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = past_libc(&r.c.dir);
    let file = r.dir("a").join("f").to_str().unwrap().to_owned();
    assert_eq!(r.says("a", &[&program, &file, "1"]), "synced\n");
    r.await_end("a");
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, &format!("{program} {file} 2"));
    assert_eq!(shell.line().as_deref(), Some("synced"));
    // And nobody ends its programs.
    let guard = r.guard("a").unwrap();
    kill(guard, "KILL");
    await_that("the end of who watches", || {
        r.guard("a").is_none().then_some(())
    });
    kill(r.server("a").unwrap(), "KILL");
    let serving = fs::File::open(r.at("a").with_file_name("serving")).unwrap();
    await_that("the kill", || {
        let free = rustix::fs::flock(&serving, FlockOperation::NonBlockingLockShared);
        free.is_ok().then_some(())
    });
    drop(serving);
    assert_eq!(r.says("a", &["cat", &file]), "12");
    tell(&mut shell, "exit");
    shell.wait();
}

/// A process that had copied the mounts of this machine, and had no file open, kept the mount for ever,
/// and every later program waiting.
#[test]
fn who_has_the_mount_and_does_not_use_it_keeps_nobody_waiting() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, "echo up");
    assert_eq!(shell.line().as_deref(), Some("up"));
    let mut bystander = Command::new("unshare")
        .args([
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            "echo up; read x",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let out = bystander.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    assert_eq!(line, "up\n");
    tell(&mut shell, "exit");
    shell.wait();
    r.await_end("a");
    let file = r.dir("a").join("f");
    let script = format!("echo 1 > '{0}'; sync '{0}'", file.display());
    r.says("a", &["sh", "-c", &script]);
    r.await_end("a");
    assert_eq!(fs::read_to_string(file).unwrap(), "1\n");
    drop(bystander.stdin.take());
    bystander.wait().unwrap();
}

/// A program whose root lies in the volume sees no mount, and nobody saw that it uses one. A service
/// manager that ends a service's processes all at once ended the mount under its programs.
#[test]
fn a_program_in_a_jail_and_one_that_still_has_to_end_keep_the_mount() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = past_libc(&r.c.dir);
    let mut shell = r.shell("a", "shell");
    let jail = r.dir("a").join("jail").to_str().unwrap().to_owned();
    tell(
        &mut shell,
        &format!("mkdir {jail}; exec {program} /f in wait {jail}"),
    );
    assert_eq!(shell.line().as_deref(), Some("waits"));
    let server = r.server("a").unwrap();
    kill(server, "TERM");
    // Longer than it takes to see that nobody uses it.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(r.server("a"), Some(server));
    tell(&mut shell, "");
    assert_eq!(shell.line().as_deref(), Some("synced"));
    assert_eq!(shell.wait(), Some(0));
    r.await_end("a");
    assert_eq!(fs::read_to_string(format!("{jail}/f")).unwrap(), "in");
    // A second signal does not wait.
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, "echo up");
    assert_eq!(shell.line().as_deref(), Some("up"));
    let server = r.server("a").unwrap();
    await_that("the mount's end", || {
        kill(server, "TERM");
        r.server("a").is_none().then_some(())
    });
    r.c.assert_equal();
}

/// With a mask of 002, as users have it, the directories that were made for the mount were refused; a
/// link in the node's directory had the mount count itself as a user.
#[test]
fn a_users_mask_and_a_link_on_the_way_are_no_hindrance() {
    let mojim = mojim_path();
    let r = Runs::new();
    let _b = r.c.node("b");
    let own = r.c.dir.join("a");
    fs::create_dir(&own).unwrap();
    std::os::unix::fs::symlink(&own, r.c.dir.join("linked")).unwrap();
    let t = fs::read_to_string(r.c.file()).unwrap();
    r.c.configure(&t.replace(
        &format!("{}\"", own.display()),
        &format!("{}/linked\"", r.c.dir.display()),
    ));
    let run = format!(
        "umask 002; '{mojim}' run --config '{}' --name a -- sh -c 'echo 1 > {1}/linked/v/f; sync {1}/linked/v/f'",
        r.c.file().display(),
        r.c.dir.display()
    );
    let out = Command::new("sh").args(["-c", &run]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    r.await_end("a");
    assert_eq!(fs::read_to_string(own.join("v/f")).unwrap(), "1\n");
}

/// A descriptor, or a working directory, from outside reached the node's bare copy.
#[test]
fn ways_past_the_mount_that_a_program_would_inherit_are_none() {
    let mojim = mojim_path();
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let dir = r.dir("a");
    fs::create_dir_all(&dir).unwrap();
    let (file, shown) = (r.c.file(), dir.display());
    let run = format!("'{mojim}' run --config '{}' --name a --", file.display());
    let sh = |script: String| Command::new("sh").args(["-c", &script]).output().unwrap();
    let out = sh(format!("{run} true > '{shown}/out'"));
    let why = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{why}");
    assert!(
        why.contains("/v/out is open already (descriptor 1)"),
        "{why}"
    );
    fs::remove_file(dir.join("out")).unwrap();
    let out = sh(format!(
        "cd '{shown}'; {run} sh -c 'echo in > f; sync f; ls'"
    ));
    assert_eq!(text(&out.stdout), "f\n", "{}", text(&out.stderr));
    r.await_end("a");
    assert_eq!(fs::read_to_string(dir.join("f")).unwrap(), "in\n");
    r.c.assert_equal();
    // A daemon, or a command that opens the copy, took the mount for the copy.
    let config = file.to_str().unwrap();
    let inner = ["node", "--config", config, "--name", "a"];
    let out = r.run("a", &[&[mojim_path()], &inner[..]].concat());
    let why = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{why}");
    assert!(why.contains("outside `mojim run`"), "{why}");
}

/// A user who is not root: the mount is made by fusermount3, the namespace in one of users.
#[test]
fn a_user_who_is_not_root_has_the_volume_too() {
    let mojim = mojim_path();
    let r = Runs::new();
    let helper = Command::new("fusermount3").arg("-V").output();
    let others = |p: &Path| fs::metadata(p).is_ok_and(|m| m.mode() & 0o001 != 0);
    if helper.is_err() || !Path::new(mojim_path()).ancestors().all(others) {
        let mut err = std::io::stderr();
        let _ = writeln!(
            err,
            "not run: needs fusermount3, and a path that all may go"
        );
        return;
    }
    const NOBODY: u32 = 65534;
    let [own, ring] = ["a", "ring"].map(|name| r.c.dir.join(name));
    for dir in [&own, &ring] {
        fs::create_dir(dir).unwrap();
        std::os::unix::fs::chown(dir, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    r.c.configure(&format!(
        "cluster = \"u\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n\
         [node.a]\naddress = \"127.0.0.1:{}\"\ndirectory = \"{}\"\nring = \"{}\"\n",
        r.c.ports[0].number,
        own.display(),
        ring.display()
    ));
    let program = past_libc(&r.c.dir);
    let (file, config) = (r.dir("a").join("f"), r.c.file());
    // Not everybody may open the device everywhere.
    let script = format!(
        "mount -t tmpfs none /mnt && mknod /mnt/fuse c 10 229 && chmod 666 /mnt/fuse && \
         mount --bind /mnt/fuse /dev/fuse && exec setpriv --reuid {NOBODY} --regid {NOBODY} \
         --clear-groups '{mojim}' run --config '{}' --name a -- '{program}' '{}' mine",
        config.display(),
        file.display()
    );
    let mut unshare = Command::new("unshare");
    let out = unshare.args(["-m", "sh", "-c", &script]).output().unwrap();
    assert_eq!(text(&out.stdout), "synced\n", "{}", text(&out.stderr));
    r.await_end("a");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    assert_eq!(fs::metadata(&file).unwrap().uid(), NOBODY);
}

/// Where nothing can be mounted, no program is started as if it were guarded.
#[test]
fn where_nothing_can_be_mounted_the_program_is_not_started() {
    let mojim = mojim_path();
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let run = format!(
        "'{mojim}' run --config '{}' --name a -- echo started",
        r.c.file().display()
    );
    // Without /dev/fuse.
    let script = format!("mount -t tmpfs none /dev && mknod /dev/null c 1 3 && {run}");
    let out = Command::new("unshare")
        .args(["-m", "sh", "-c", &script])
        .output()
        .unwrap();
    let why = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{why}");
    assert!(out.stdout.is_empty());
    assert!(
        why.contains("/dev/fuse") && why.contains("--preload"),
        "{why}"
    );
    // Without the right to mount.
    let drop = [
        "--bounding-set",
        "-sys_admin",
        "--inh-caps",
        "-sys_admin",
        "sh",
        "-c",
        &run,
    ];
    let out = Command::new("setpriv").args(drop).output().unwrap();
    let why = text(&out.stderr);
    assert_ne!(out.status.code(), Some(0), "{why}");
    assert!(out.stdout.is_empty());
    assert!(why.contains("--preload"), "{why}");
}

/// Programs on a node that is no longer the primary can change nothing, and soon read nothing, since
/// their mount kept the copy from following the new primary. A program that starts then is told.
#[test]
fn after_a_promotion_elsewhere_the_mount_makes_room_for_the_new_primary() {
    let r = Runs::new();
    let mut a = r.c.node("a");
    let _b = r.c.node("b");
    let program = past_libc(&r.c.dir);
    let file = r.dir("a").join("f").to_str().unwrap().to_owned();
    let mut shell = r.shell("a", "shell");
    tell(&mut shell, &format!("{program} {file} 1"));
    assert_eq!(shell.line().as_deref(), Some("synced"));
    // It stands still, as a whole node may.
    a.kill();
    let server = [r.server("a").unwrap()];
    mojim_testkit::stop_all(&server);
    r.c.promote("b");
    mojim_testkit::continue_all(&server);
    let _a = r.c.node("a");
    let last = std::cell::RefCell::new(String::new());
    await_or(
        "the error",
        || last.borrow().clone(),
        || {
            tell(&mut shell, &format!("{program} {file} 2; echo $?"));
            last.replace(shell.line().unwrap() + &shell.errors());
            let refused = shell.errors().contains("Read-only file system");
            refused.then_some(())
        },
    );
    await_that("the mount to be hidden", || {
        (!r.is_mounted("a")).then_some(())
    });
    let on_b = r.dir("b").join("f").to_str().unwrap().to_owned();
    assert_eq!(r.says("b", &["cat", &on_b]), "1");
    r.await_end("b");
    // The program on a still runs.
    r.c.assert_equal();
    // Equal they were all the time: `b` wrote nothing. Until it has come to `a`, the node there takes
    // itself for the primary, and `b` refuses it; after that it knows better. A program never starts.
    let why = std::cell::RefCell::new(String::new());
    await_or(
        "node a to know that it is not the primary",
        || why.borrow().clone(),
        || {
            let out = r.run("a", &["true"]);
            assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
            why.replace(text(&out.stderr));
            let told = why.borrow().contains("is not the primary");
            told.then_some(())
        },
    );
    tell(&mut shell, "exit");
    shell.wait();
}

/// A program that is linked with libmojim: `tests/e2e/linked.c`.
fn linked(r: &Runs) -> String {
    let program = r.c.dir.join("linked");
    compile("tests/e2e/linked.c", &program, &[], true);
    program.to_str().unwrap().to_owned()
}

/// What is still printed; the last number of it.
fn rest(p: &mut Process) -> Option<u64> {
    let mut last = None;
    while let Some(line) = p.line() {
        last = line.parse().ok().or(last);
    }
    last
}

/// Programs linked with libmojim got EACCES, or SIGBUS, for the mount was the volume's primary, unless
/// --preload was given. They run now as they do with it: what they commit together is there together
/// when they are killed in between, and what they did not commit is not.
#[test]
fn a_linked_program_that_is_killed_leaves_whole_sync_points() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = linked(&r);
    let path = r.dir("a").join("files");
    for (how, file) in [("files", path.to_str().unwrap()), ("attach", "attached")] {
        let args = r.args("a", &["--", &program, how, file]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut last = 0;
        for round in 0..3 {
            let errors = r.c.dir.join(format!("{how}-{round}.txt"));
            let mut run = Process::start(&args, &errors);
            let number = |line: Option<String>| {
                let line = line
                    .unwrap_or_else(|| panic!("{how}: {}", fs::read_to_string(&errors).unwrap()));
                line.parse::<u64>().unwrap()
            };
            let first = number(run.line());
            assert!(first > last, "{how}: {last} was committed, {first} follows");
            for _ in 0..50 {
                last = number(run.line());
            }
            kill(program_of(run.child.id()), "KILL");
            last = rest(&mut run).unwrap_or(last);
            assert_eq!(run.wait(), Some(128 + libc::SIGKILL), "{}", run.errors());
            let said = run.errors();
            assert!(said.contains("ended (signal: 9 (SIGKILL))"), "{said}");
        }
    }
    assert!(!r.is_mounted("a"));
}

/// Nobody said how a program ended that a signal had ended, and with what status.
#[test]
fn how_a_program_ended_is_said() {
    libraries();
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    // The volume's mount, and none.
    for more in [&["--"][..], &["--allow-unguarded", "--"]] {
        let shell = |script: &str| {
            let words = [&["--name", "a"], more, &["sh", "-c", script]].concat();
            r.c.mojim("run", &words)
        };
        let out = shell("exit 7");
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(7), "{said}");
        assert!(!said.contains("ended"), "{said}");
        for (name, number) in [("SEGV", libc::SIGSEGV), ("KILL", libc::SIGKILL)] {
            let out = shell(&format!("kill -s {name} $$"));
            let said = text(&out.stderr);
            assert_eq!(out.status.code(), Some(128 + number), "{said}");
            let line = format!("volume v: the program ended (signal: {number} (SIG{name})");
            assert!(said.contains(&line), "{said}");
        }
    }
    // A store beyond the end of a file, and what can be done.
    let out = r.run("a", &["sh", "-c", "kill -s BUS $$"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(128 + libc::SIGBUS), "{said}");
    assert!(
        said.contains("(SIGBUS)") && said.contains("--preload"),
        "{said}"
    );
}

/// `mojim run` is in the place of the program for whoever started it: it passes signals on, holds no
/// pipe that the program has closed, takes the program along when it is killed, and hears of its end
/// even where the ends of children are ignored.
#[test]
fn a_run_stands_for_its_program() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let mut shell = r.shell("a", "signals");
    let script = "for s in INT TERM HUP QUIT USR1 USR2; do trap \"echo $s\" $s; done; echo ready";
    tell(&mut shell, script);
    assert_eq!(shell.line().as_deref(), Some("ready"));
    for name in ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"] {
        kill(shell.child.id(), name);
        // A shell that reads sees its trap at the next line.
        await_that("the signal", || {
            tell(&mut shell, "echo .");
            (shell.line().unwrap() == name).then_some(())
        });
        while shell.line().as_deref() != Some(".") {}
    }
    tell(&mut shell, "exec >&-");
    assert_eq!(shell.line(), None, "its output is closed");
    let program = program_of(shell.child.id());
    shell.kill();
    await_that("the program's end", || {
        (!Path::new(&format!("/proc/{program}/ns/mnt")).exists()).then_some(())
    });
    r.await_end("a");

    let mut ignoring = Command::new(mojim_path());
    ignoring.args(r.args("a", &["--", "sh", "-c", "exit 7"]));
    // SAFETY: has a valid signal ignored, by a system call.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut ignoring, || {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            Ok(())
        });
    }
    let out = ignoring.output().unwrap();
    assert_eq!(out.status.code(), Some(7), "{}", text(&out.stderr));
}

/// A `mojim run` that is the first process of a terminal's session, what is typed there, and what the
/// program says.
fn at_a_terminal(r: &Runs, command: &[&str]) -> (Child, fs::File, Lines<BufReader<ChildStdout>>) {
    // No process of another test may have it, or its end would not be the terminal's.
    let how = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: system calls on a descriptor that was just opened, and is nobody else's.
    let [keys, terminal] = unsafe {
        let keys = libc::posix_openpt(how);
        assert!(keys >= 0 && libc::grantpt(keys) == 0 && libc::unlockpt(keys) == 0);
        let terminal = libc::ioctl(keys, libc::TIOCGPTPEER, how);
        assert!(terminal >= 0);
        [keys, terminal].map(|fd| fs::File::from_raw_fd(fd))
    };
    let mut run = Command::new(mojim_path());
    hear_signals(&mut run);
    run.args(r.args("a", &[&["--"], command].concat()));
    // Not to the terminal, which forgets what it has when its first process ends.
    run.stdin(terminal).stdout(Stdio::piped());
    // SAFETY: system calls that give the child a session with this terminal.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut run, || {
            libc::setsid();
            match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let mut child = run.spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(said.next().expect("it says so").unwrap(), "ready");
    (child, keys, said)
}

/// Where views change by themselves `mojim run` passed on what a terminal sends to all processes of a
/// group: a program that asks at the first Ctrl-C, and ends at the second, ended at the first.
#[test]
fn a_key_of_the_terminal_is_one_signal() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = r.c.dir.join("interrupts");
    compile("tests/e2e/interrupts.c", &program, &[], false);
    let (mut child, keys, mut said) = at_a_terminal(&r, &[program.to_str().unwrap()]);
    let mut line = || said.next().expect("it says more").unwrap();
    (&keys).write_all(b"\x03").unwrap();
    assert_eq!(line(), "interrupted 1 times");
    // The other process of the group takes its own off before the next signal, and would pass it on before.
    let waits = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let pending = status.lines().find(|l| l.starts_with("ShdPnd:")).unwrap();
        let pending = pending.split_whitespace().nth(1).unwrap();
        u64::from_str_radix(pending, 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
    };
    await_that("the key", || (!waits()).then_some(()));
    kill(child.id(), "USR1");
    assert_eq!(line(), "over");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A terminal sends its keys to the group in the foreground, and says that it is gone to the first process
/// of its session alone: a program in a group of its own heard of neither, and stayed the primary.
#[test]
fn a_program_of_another_group_hears_of_the_terminal() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let script =
        "trap 'echo interrupted' INT; trap 'exit 3' HUP; echo ready; while :; do sleep 0.05; done";
    let (mut child, keys, mut said) = at_a_terminal(&r, &["setsid", "sh", "-c", script]);
    (&keys).write_all(b"\x03").unwrap();
    assert_eq!(said.next().expect("it says more").unwrap(), "interrupted");
    drop(keys);
    assert_eq!(child.wait().unwrap().code(), Some(3));
    // Nor did one that stayed in the group.
    let script = "trap 'exit 4' HUP; echo ready; while :; do sleep 0.05; done";
    let (mut child, keys, _) = at_a_terminal(&r, &["sh", "-c", script]);
    drop(keys);
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

/// What a program is told that is linked with libmojim where it cannot be seen: started by a script, or
/// beside programs that have the mount.
#[test]
fn a_linked_program_that_the_mount_keeps_out_is_told_what_to_do() {
    let r = Runs::new();
    let _a = r.c.node("a");
    let _b = r.c.node("b");
    let program = linked(&r);
    let script = format!("exec '{program}' attach f");
    for command in [
        &["--", "sh", "-c", &script][..],
        &["--mount", "--", &program, "attach", "f"],
    ] {
        let mut run = Command::new(mojim_path());
        run.args(r.args("a", command));
        // It is told where it would attach.
        run.env_remove("MOJIM_CONFIG").env_remove("MOJIM_NODE");
        let out = run.output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("mojim run --preload"), "{said}");
        assert!(said.contains("Permission denied"), "{said}");
    }

    // A file that is long enough can be mapped, and is no memory of Mojim's.
    let path = r.dir("a").join("long");
    let script = format!(
        "truncate -s 40960 '{0}'; exec '{program}' files '{0}'",
        path.display()
    );
    let out = r.run("a", &["sh", "-c", &script]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(
        said.contains("gmsync") && said.contains("mojim run --preload"),
        "{said}"
    );

    let mut shell = r.shell("a", "shell");
    tell(&mut shell, "echo up");
    assert_eq!(shell.line().as_deref(), Some("up"));
    let out = r.run("a", &[&program, "attach", "f"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("mounted for other programs"), "{said}");
    assert!(said.contains("commits their stores ("), "{said}");
    // A mount that nobody uses is waited for.
    drop(shell.stdin.take());
    assert_eq!(shell.wait(), Some(0));
    let args = r.args("a", &["--", &program, "attach", "f"]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut run = Process::start(&args, &r.c.dir.join("run.txt"));
    assert_eq!(run.line().as_deref(), Some("1"), "{}", run.errors());
    run.kill();
}
