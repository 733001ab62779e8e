//! Stored bytes that are not what they should be: each is reported by name,
//! nothing is changed by the report, and what was there comes back once the
//! damage is undone.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use mojim_config::Config;
use mojim_engine::{Error, MapFlags, Volume, msync};
use mojim_format::RecordView;

struct Place {
    dir: PathBuf,
    shm: PathBuf,
    config: Config,
}

impl Place {
    fn new(name: &str) -> Place {
        let id = format!("mojim-damage-{}-{name}", std::process::id());
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&id);
        let shm = Path::new("/dev/shm").join(&id);
        for d in [&dir, &shm] {
            // Of a process that had this number, and was killed.
            let _ = std::fs::remove_dir_all(d);
            std::fs::create_dir_all(d).unwrap();
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let text = format!(
            r#"
cluster = "test"
[volume.v]
mode = "unreplicated"
primary = "a"
[node.a]
address = "{}"
directory = "{}/a"
ring = "{}"
log = {{ medium = "disk", size = "1MiB" }}
"#,
            port.local_addr().unwrap(),
            dir.display(),
            shm.display(),
        );
        std::fs::write(dir.join("c.toml"), &text).unwrap();
        let config = Config::load(&dir.join("c.toml")).unwrap_or_else(|e| panic!("{e}"));
        Place { dir, shm, config }
    }

    fn attach(&self) -> mojim_engine::Result<Volume> {
        Volume::attach_with(&self.config, "a", None, |_, _| {})
    }

    /// A volume with a file of known bytes, closed in order.
    fn filled(name: &str) -> Place {
        let p = Place::new(name);
        let v = p.attach().unwrap();
        p.write(&v, 1);
        v.detach().unwrap();
        p
    }

    fn write(&self, v: &Volume, fill: u8) {
        let flags = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let m = v.map("f", 100_000, flags).unwrap();
        // SAFETY: the region is mapped, and only this thread uses it.
        unsafe { std::ptr::write_bytes(m.ptr, fill, m.len) };
        msync(m.ptr, m.len).unwrap();
        mojim_engine::unmap(m.ptr, m.len).unwrap();
    }

    /// Where the log on disk has records that no checkpoint covers, in their order.
    fn records(&self) -> Vec<usize> {
        let env = mojim_linux::Os::new().unwrap();
        let sb = mojim_store::store::read_superblock(&env, &self.dir.join("a/.mojim/v"));
        let checkpoint = sb.unwrap().unwrap().checkpoint;
        let bytes = std::fs::read(self.dir.join("a/.mojim/v.log.0")).unwrap();
        let record = |at: usize| {
            let lsn = RecordView::decode(&bytes[at..]).ok()?.header.lsn;
            (lsn > checkpoint).then_some((lsn, at))
        };
        let mut all: Vec<_> = (0..bytes.len()).step_by(512).filter_map(record).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, at)| at).collect()
    }

    fn meta(&self, file: &str) -> PathBuf {
        self.dir.join("a/.mojim/v").join(file)
    }

    /// The volume holds `fill` everywhere.
    fn expect(&self, fill: u8) {
        let v = self.attach().unwrap_or_else(|e| panic!("{e}"));
        let m = v.map("f", 0, MapFlags::default()).unwrap();
        // SAFETY: as in `write`.
        let bytes = unsafe { std::slice::from_raw_parts(m.ptr, m.len) };
        assert_eq!(m.len, 100_000);
        assert!(bytes.iter().all(|b| *b == fill));
        v.detach().unwrap();
    }

    /// Changes a file, expects attaching to fail with a text that has all of
    /// `texts`, puts the file back, and expects the bytes to be there.
    fn damaged(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>), texts: &[&str]) {
        let before = std::fs::read(path).unwrap();
        let mut bytes = before.clone();
        change(&mut bytes);
        std::fs::write(path, &bytes).unwrap();
        let e = self
            .attach()
            .err()
            .unwrap_or_else(|| panic!("{}: not noticed", path.display()));
        let text = e.to_string();
        for t in texts {
            assert!(text.contains(t), "{text:?} does not say {t:?}");
        }
        std::fs::write(path, &before).unwrap();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_dir_all(&self.shm);
    }
}

/// The thread that had synced a region remembered it after the volume was
/// detached, and with it all its open files: the file system on which they lay
/// could not be unmounted.
#[test]
fn a_detached_volume_has_no_file_open() {
    let p = Place::new("detached");
    let v = p.attach().unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let m = v.map("f", 100_000, flags).unwrap();
    msync(m.ptr, 100).unwrap();
    let open = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let all = all.filter_map(|e| std::fs::read_link(e.unwrap().path()).ok());
        let mine = all.filter(|f| f.starts_with(&p.dir) || f.starts_with(&p.shm));
        mine.collect::<Vec<_>>()
    };
    assert!(open().iter().any(|f| f.ends_with("v/f")), "{:?}", open());
    v.detach().unwrap();
    drop(v);
    assert_eq!(open(), Vec::<PathBuf>::new());
}

/// A daemon that looks for what dead programs left saw the copy while `mojim
/// verify` had it open, opened it when it was closed again, and left it as a
/// dead program does: with a log in memory, a clean copy would have been
/// discarded after the next boot. Whoever opens a copy can tell now.
#[test]
fn who_opens_a_copy_knows_whether_it_was_clean() {
    let p = Place::filled("clean");
    let env: std::sync::Arc<dyn mojim_env::Env> =
        std::sync::Arc::new(mojim_linux::Os::new().unwrap());
    let (node, volume) = (p.config.node("a").unwrap(), p.config.volume(None).unwrap());
    let open = || {
        let spec =
            mojim_replica::layout::store(&p.config, node, volume, mojim_env::Locker::Program);
        mojim_store::store::Store::open(&env, spec).unwrap()
    };
    for _ in 0..2 {
        let s = open();
        assert!(s.was_clean());
        s.close_clean(s.tail()).unwrap();
    }
    drop(open());
    assert!(!open().was_clean());
    p.expect(1);
}

/// The node's daemon looked for more than a second at what a killed program had left, on a busy disk, and was
/// late to say so: the next program was told that another one is attached.
#[test]
fn a_program_waits_for_the_nodes_own_look() {
    let p = Place::filled("look");
    let env: std::sync::Arc<dyn mojim_env::Env> =
        std::sync::Arc::new(mojim_linux::Os::new().unwrap());
    let (node, volume) = (p.config.node("a").unwrap(), p.config.volume(None).unwrap());
    let spec = mojim_replica::layout::store(&p.config, node, volume, mojim_env::Locker::Node);
    let look = std::cell::RefCell::new(Some(mojim_store::store::Store::open(&env, spec).unwrap()));
    let tries = std::cell::Cell::new(0);
    // It is asked before each try: so many take longer than a program waits for another one.
    let given_up = || {
        tries.set(tries.get() + 1);
        if tries.get() == 75
            && let Some(s) = look.take()
        {
            s.close_clean(s.tail()).unwrap();
        }
        false
    };
    let v = Volume::attach_unless(&p.config, "a", "v", &given_up);
    let v = v.unwrap_or_else(|e| panic!("after {} tries: {e}", tries.get()));
    v.detach().unwrap();
    p.expect(1);
}

#[test]
fn superblock() {
    let p = Place::filled("superblock");
    let path = p.meta("superblock");
    p.damaged(
        &path,
        |b| b.iter_mut().for_each(|x| *x ^= 0x10),
        &["superblock", "valid"],
    );
    p.damaged(&path, |b| b.truncate(100), &["superblock"]);
    p.damaged(&path, |b| b.fill(0), &["superblock", "foreign"]);
    // One slot is enough.
    let mut b = std::fs::read(&path).unwrap();
    let newer = (0..2)
        .max_by_key(|i| u64::from_le_bytes(b[i * 4096 + 16..i * 4096 + 24].try_into().unwrap()))
        .unwrap();
    b[(1 - newer) * 4096 + 200] ^= 1;
    std::fs::write(&path, &b).unwrap();
    p.expect(1);
}

#[test]
fn of_another_cluster() {
    let p = Place::filled("foreign");
    let text = std::fs::read_to_string(p.dir.join("c.toml")).unwrap();
    let other = text.replace("\"test\"", "\"other\"");
    let c = Config::parse(&other, Path::new("other.toml")).unwrap();
    let e = Volume::attach_with(&c, "a", None, |_, _| {})
        .err()
        .expect("refused");
    assert!(e.to_string().contains("belongs to cluster \"test\""), "{e}");
    p.expect(1);
}

#[test]
fn catalogue() {
    let p = Place::filled("catalogue");
    let path = p.meta("catalog");
    p.damaged(&path, |b| b[20] ^= 4, &["catalog", "checksum"]);
    p.damaged(&path, |b| b.truncate(10), &["catalog"]);
    p.expect(1);
}

/// A catalogue that was missing was taken for an empty one: with the mirror beside it, the primary
/// took the data file in as a new one, as of what had been applied, and 150 acknowledged entries
/// were 139 on both nodes.
#[test]
fn a_missing_catalogue_is_not_an_empty_one() {
    let p = Place::filled("no-catalogue");
    let path = p.meta("catalog");
    let before = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    for _ in 0..2 {
        let e = p.attach().err().expect("noticed").to_string();
        assert!(e.contains("catalogue is missing"), "{e}");
    }
    std::fs::write(&path, before).unwrap();
    p.expect(1);
    // A volume that has no files is used again and again.
    let q = Place::new("no-files");
    for _ in 0..3 {
        q.attach().unwrap().detach().unwrap();
    }
    q.write(&q.attach().unwrap(), 2);
}

#[test]
fn data_file_of_another_length_or_gone() {
    let p = Place::filled("data");
    let path = p.dir.join("a/v/f");
    p.damaged(&path, |b| b.truncate(5000), &["a/v/f", "5000", "100000"]);
    p.damaged(&path, |b| b.push(0), &["a/v/f", "100001"]);
    let before = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let e = p.attach().err().expect("noticed").to_string();
    assert!(e.contains("a/v/f") && e.contains("missing"), "{e}");
    std::fs::write(&path, before).unwrap();
    p.expect(1);
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that is killed after its sync points, so that the log counts.
/// Runs as a child: this test's own binary.
#[test]
fn child_that_commits_and_is_killed() {
    let Ok(config) = std::env::var("MOJIM_DAMAGE_CHILD") else {
        return;
    };
    let v = Volume::attach(Path::new(&config), "a", None).unwrap();
    let m = v.map("f", 0, MapFlags::default()).unwrap();
    for i in 0..20 {
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(m.ptr, 2, m.len) };
        // SAFETY: as in `write`; a region is aligned.
        unsafe { m.ptr.cast::<u32>().write(i) };
        msync(m.ptr, 4).unwrap();
    }
    // SAFETY: as in `write`.
    unsafe { std::ptr::write_bytes(m.ptr, 3, m.len) };
    msync(m.ptr, m.len).unwrap();
    // SAFETY: ends this process without any clean-up.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// Until its records count: a program that stands still for 50 ms, on a busy machine, writes a
/// checkpoint, and what is damaged below that nobody misses.
fn killed(p: &Place) {
    let begin = std::time::Instant::now();
    loop {
        killed_once(p);
        let records = p.records();
        if records.len() > 10 {
            return;
        }
        assert!(begin.elapsed().as_secs() < 120, "{records:?}");
    }
}

fn killed_once(p: &Place) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_that_commits_and_is_killed",
            "--test-threads=1",
        ])
        .env("MOJIM_DAMAGE_CHILD", p.dir.join("c.toml"))
        .stdout(std::process::Stdio::null())
        .spawn()
        .map(Killed)
        .unwrap()
        .0
        .wait()
        .unwrap();
    assert!(!status.success());
}

#[test]
fn log_removed_cut_or_of_another_configuration() {
    let p = Place::filled("log");
    killed(&p);
    // The memory is lost with the power; the log on disk is what is left.
    std::fs::remove_dir_all(&p.shm).unwrap();
    let log = p.dir.join("a/.mojim/v.log.0");
    p.damaged(
        &log,
        |b| b.truncate(4096),
        &["v.log.0", "4096", "removed or cut"],
    );
    let before = std::fs::read(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    let e = p.attach().err().expect("noticed").to_string();
    assert!(e.contains("v.log.0") && e.contains("removed or cut"), "{e}");
    std::fs::write(&log, &before).unwrap();
    let text = std::fs::read_to_string(p.dir.join("c.toml")).unwrap();
    let other = Config::parse(&text.replace("1MiB", "2MiB"), Path::new("x")).unwrap();
    let e = Volume::attach_with(&other, "a", None, |_, _| {})
        .err()
        .expect("noticed");
    assert!(matches!(e, Error::Config(_)), "{e}");
    p.expect(3);
}

/// Found by asking what a flipped bit in the middle of a log does: recovery took
/// it for the end of the log, and every acknowledged sync point behind it was
/// silently gone.
#[test]
fn bit_flipped_in_the_middle_of_the_log() {
    let p = Place::filled("flip");
    killed(&p);
    std::fs::remove_dir_all(&p.shm).unwrap();
    let log = p.dir.join("a/.mojim/v.log.0");
    let records = p.records();
    assert!(records.len() > 10);
    for at in [records[1], records[5]] {
        p.damaged(
            &log,
            |b| b[at + 60] ^= 1,
            &["v.log.0", "damaged", "acknowledged"],
        );
    }
    p.expect(3);
}

/// Somebody cuts a data file, or puts another in its place, while a program has
/// it mapped. Memory beyond the cut is a SIGBUS for whoever touches it, as of
/// any mapped file; a sync point that is to find what changed there touches none
/// of it and fails (it died once, in the comparison with what is committed), and
/// other sync points are taken. The next attach names the file.
#[test]
fn data_file_cut_or_replaced_under_its_mapping() {
    for tracker in ["uffd", "mprotect"] {
        for act in ["cut", "replace"] {
            let p = Place::filled(&format!("{act}-{tracker}"));
            let path = p.dir.join("c.toml");
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.replace("mode =", &format!("tracker = \"{tracker}\"\nmode ="));
            std::fs::write(&path, text).unwrap();
            let out = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child_whose_file_changes", "--nocapture"])
                .env("MOJIM_CHANGED_CHILD", &p.dir)
                .env("MOJIM_CHANGED_ACT", act)
                .output()
                .unwrap();
            let said = format!(
                "{}{}",
                String::from_utf8_lossy(&out.stdout),
                String::from_utf8_lossy(&out.stderr)
            );
            assert!(
                said.contains("all sync points were taken"),
                "{act}, {tracker}: {said}"
            );
            let e = p.attach().err().expect("noticed").to_string();
            assert!(e.contains("a/v/f") && e.contains("100000"), "{act}: {e}");
            let file = std::fs::File::options()
                .write(true)
                .open(p.dir.join("a/v/f"));
            file.unwrap().set_len(100_000).unwrap();
            let v = p.attach().unwrap_or_else(|e| panic!("{e}"));
            for (name, byte) in [("f", 9), ("g", 6)] {
                let m = v.map(name, 0, MapFlags::default()).unwrap();
                // SAFETY: mapped, and only this thread uses it.
                assert_eq!(unsafe { m.ptr.read() }, byte, "{act}: {name}");
            }
            v.detach().unwrap();
        }
    }
}

#[test]
fn child_whose_file_changes() {
    let Ok(dir) = std::env::var("MOJIM_CHANGED_CHILD") else {
        return;
    };
    let dir = Path::new(&dir);
    let v = Volume::attach(&dir.join("c.toml"), "a", None).unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let f = v.map("f", 0, MapFlags::default()).unwrap();
    let g = v.map("g", 8192, flags).unwrap();
    // SAFETY: inside the region, one thread; not beyond the cut once it is made.
    let store = |at: usize, byte: u8| unsafe { f.ptr.add(at).write(byte) };
    store(80_000, 7);
    let file = dir.join("a/v/f");
    let act = std::env::var("MOJIM_CHANGED_ACT").unwrap();
    match act.as_str() {
        "cut" => std::fs::File::options()
            .write(true)
            .open(&file)
            .and_then(|f| f.set_len(5000))
            .unwrap(),
        _ => {
            std::fs::write(dir.join("other"), "ten bytes.").unwrap();
            std::fs::rename(dir.join("other"), &file).unwrap();
        }
    }
    store(0, 9);
    // SAFETY: as above.
    unsafe { g.ptr.write(6) };
    msync(g.ptr, g.len).unwrap();
    msync(f.ptr, 4096).unwrap();
    let all = msync(f.ptr, f.len);
    match act.as_str() {
        "cut" => {
            let e = all.unwrap_err().to_string();
            assert!(e.contains("cut") && e.contains("5000"), "{e}");
        }
        _ => assert!(all.unwrap() > 0),
    }
    v.settle().unwrap();
    println!("all sync points were taken");
    // SAFETY: ends this process without any clean-up.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

#[test]
fn two_processes_and_two_handles() {
    let p = Place::filled("two");
    let v = p.attach().unwrap();
    let e = p.attach().err().expect("refused");
    assert!(matches!(e, Error::Busy(_)), "{e}");
    assert!(
        e.to_string().contains(&std::process::id().to_string()),
        "{e}"
    );
    v.detach().unwrap();
    p.expect(1);
}

/// A process that commits file contents of `fill` and is killed, in place of one that
/// attaches and ends in order: what it leaves has to be recovered.
#[test]
fn child_that_is_killed() {
    let Ok(dir) = std::env::var("MOJIM_KILLED_CHILD") else {
        return;
    };
    let config = Config::load(&Path::new(&dir).join("c.toml")).unwrap();
    let fill: u8 = std::env::var("MOJIM_FILL").unwrap().parse().unwrap();
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let m = v.map("f", 100_000, flags).unwrap();
    // SAFETY: the region is mapped, and only this thread uses it.
    unsafe { std::ptr::write_bytes(m.ptr, fill, m.len) };
    msync(m.ptr, m.len).unwrap();
    // SAFETY: ends this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

impl Place {
    fn killed_after(&self, fill: u8) {
        use std::os::unix::process::ExitStatusExt;
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_is_killed", "--nocapture"])
            .env("MOJIM_KILLED_CHILD", &self.dir)
            .env("MOJIM_FILL", fill.to_string())
            .output()
            .unwrap();
        assert_eq!(out.status.signal(), Some(libc::SIGKILL), "{out:?}");
    }

    /// The ring of its one log.
    fn ring(&self) -> PathBuf {
        let volume = self.config.volume(None).unwrap();
        let node = self.config.node("a").unwrap();
        mojim_replica::layout::logs(&self.config, node, volume)[0]
            .ring
            .clone()
    }
}

/// Who may change the directory of a ring moved it away, and put it back when another had
/// been used in its place: it was taken for what the last program had left.
#[test]
fn a_ring_that_is_put_back_is_not_taken_for_the_last() {
    let p = Place::new("stale");
    let aside = p.shm.join("aside");
    p.killed_after(1);
    std::fs::rename(p.ring(), &aside).unwrap();
    p.killed_after(2);
    std::fs::rename(&aside, p.ring()).unwrap();
    p.expect(2);
    // Nor a copy of one that was used since.
    p.killed_after(3);
    std::fs::copy(p.ring(), &aside).unwrap();
    p.killed_after(4);
    std::fs::rename(&aside, p.ring()).unwrap();
    p.expect(4);
}

/// The disk fills up under a volume: sync points fail with what the disk said once the log is
/// full, the program's memory stays, and what was acknowledged is there. A full disk had poisoned
/// the volume: when there was room, the program had to be started again. Needs the right to mount a small file system; without it
/// (a notice says so) the simulator's quota is what is left.
#[test]
fn a_full_disk() {
    let p = Place::new("full");
    let small = p.dir.join("a");
    std::fs::create_dir_all(&small).unwrap();
    let out = Command::new("unshare")
        .args(["-m", "sh", "-c"])
        // Not tmpfs, where a mere load from a hole of a full file system is a
        // SIGBUS, for every program.
        .arg("truncate -s 12M \"$1.img\" && mkfs.ext4 -q -F \"$1.img\" && mount -o loop \"$1.img\" \"$1\" && shift && \"$1\" --exact child_on_a_full_disk --nocapture && exec \"$1\" --exact child_after_a_full_disk --nocapture")
        .arg("sh")
        .arg(&small)
        .arg(std::env::current_exe().unwrap())
        .env("MOJIM_FULL_CHILD", &p.dir)
        .output();
    let text = match &out {
        Ok(o) => format!(
            "{}{}",
            String::from_utf8_lossy(&o.stdout),
            String::from_utf8_lossy(&o.stderr)
        ),
        Err(e) => e.to_string(),
    };
    let cannot = [
        "not permitted",
        "must be superuser",
        "not found",
        "failed to setup loop",
    ];
    if cannot.iter().any(|c| text.contains(c)) || out.is_err() {
        println!("left out: mounting is not permitted here: {text}");
        return;
    }
    assert!(text.contains("the full disk lost nothing"), "{text}");
}

#[test]
fn child_on_a_full_disk() {
    let Ok(dir) = std::env::var("MOJIM_FULL_CHILD") else {
        return;
    };
    let config = Config::load(&Path::new(&dir).join("c.toml")).unwrap();
    let attach = || Volume::attach_with(&config, "a", None, |_, _| {});
    let filler = Path::new(&dir).join("a/filler");
    std::fs::write(&filler, vec![1u8; 3 << 20]).unwrap();
    let v = attach().unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let m = v.map("f", 64 << 20, flags).unwrap();
    let page = 64 << 10;
    let mut acked = 0;
    let mut failed = None;
    for i in 0..m.len / page {
        // SAFETY: inside the region, one thread.
        let at = unsafe { m.ptr.add(i * page) };
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(at, i as u8 | 1, page) };
        match msync(at, page) {
            Ok(_) => acked = i + 1,
            Err(e) => {
                failed = Some(e);
                break;
            }
        }
    }
    let e = failed.expect("64 MiB do not fit 12");
    assert!(e.to_string().contains("No space"), "{e}");
    assert_eq!(e.errno(), libc::ENOSPC, "{e}");
    let home = filler.parent().unwrap().display().to_string();
    for part in [
        "waits for room: writing file \"f\"",
        &home,
        "make room on that disk",
    ] {
        assert!(e.to_string().contains(part), "{e}");
    }
    assert!(acked > 0);
    // The memory is the program's, whatever happens below it.
    // SAFETY: as above.
    unsafe { m.ptr.write(7) };
    std::fs::remove_file(&filler).unwrap();
    // SAFETY: inside the region.
    let at = unsafe { m.ptr.add(acked * page) };
    let start = std::time::Instant::now();
    while let Err(e) = msync(at, page) {
        assert_eq!(e.errno(), libc::ENOSPC, "{e}");
        assert!(start.elapsed().as_secs() < 60, "{e}");
    }
    std::fs::write(Path::new(&dir).join("acked"), (acked + 1).to_string()).unwrap();
    v.detach().unwrap();
}

#[test]
fn child_after_a_full_disk() {
    let Ok(dir) = std::env::var("MOJIM_FULL_CHILD") else {
        return;
    };
    let acked = std::fs::read_to_string(Path::new(&dir).join("acked")).unwrap();
    let acked: usize = acked.parse().unwrap();
    let config = Config::load(&Path::new(&dir).join("c.toml")).unwrap();
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = v.map("f", 0, MapFlags::default()).unwrap();
    for i in 0..acked {
        // SAFETY: inside the region, one thread.
        let b = unsafe { *m.ptr.add(i * (64 << 10) + 5) };
        assert_eq!(b, i as u8 | 1, "piece {i} of {acked}");
    }
    println!("the full disk lost nothing");
}
