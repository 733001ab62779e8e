//! A region ten times larger than all the memory that its process may have is
//! changed, in a memory cgroup without swap. Beside it two controls: the same
//! without a bound is killed, and so would be one that does not commit, which gets
//! SIGBUS instead, with a message.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mojim_engine::{MapFlags, Volume, msync, msync_async};

mod support;
use support::alone;

const MIB: usize = 1 << 20;
/// What the process may have.
const LIMIT: usize = 64 * MIB;
const REGION: usize = 10 * LIMIT;
/// What is changed between two sync points.
const STEP: usize = 2 * MIB;

/// Removed when dropped, by when nobody is in it.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Of either version; says why not.
    fn new() -> Result<Cgroup, String> {
        let mounts = std::fs::read_to_string("/proc/mounts").map_err(|e| e.to_string())?;
        let mut why = "no memory cgroups are mounted".to_owned();
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [_, at, kind, options, ..] = fields[..] else {
                continue;
            };
            let first = kind == "cgroup" && options.split(',').any(|o| o == "memory");
            if !first && kind != "cgroup2" {
                continue;
            }
            let root = Path::new(at);
            let path = root.join(format!("mojim-test-{}", std::process::id()));
            if !first {
                // Where it cannot be set, it may be already.
                let _ = std::fs::write(root.join("cgroup.subtree_control"), "+memory");
            }
            if let Err(e) = std::fs::create_dir(&path) {
                why = format!("{}: {e}", path.display());
                continue;
            }
            let made = Cgroup(path.clone());
            let set = |name: &str, value: usize| {
                let path = path.join(name);
                let set = std::fs::write(&path, value.to_string());
                set.map_err(|e| format!("{}: {e}", path.display()))
            };
            let limited = match first {
                true => set("memory.limit_in_bytes", LIMIT).and_then(|()| {
                    // Not there where swap is not counted; then there is none to use.
                    let _ = set("memory.memsw.limit_in_bytes", LIMIT);
                    set("memory.swappiness", 0)
                }),
                false => set("memory.max", LIMIT).map(|()| {
                    let _ = set("memory.swap.max", 0);
                }),
            };
            match limited {
                Ok(()) => return Ok(made),
                Err(e) => why = e,
            }
        }
        Err(why)
    }

    /// This test's program as another process, in the cgroup.
    fn run(&self, what: &str, dir: &Path) -> Output {
        let procs = self.0.join("cgroup.procs");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--ignored", "--nocapture"]);
        command.env("MOJIM_TEST_CHILD", what);
        command.env("MOJIM_TEST_DIR", dir);
        let enter = move || std::fs::write(&procs, "0");
        // SAFETY: opens and writes a file, in a child whose parent holds no lock for
        // long that this needs.
        unsafe { command.pre_exec(enter) };
        command.output().unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last process was waited for; the kernel may need a moment more.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// What page `page` holds after so many passes.
fn word(page: usize, pass: u64) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ pass
}

/// The process in the cgroup; not a test by itself.
#[test]
#[ignore = "started by the test below"]
fn child() {
    let (Ok(what), Ok(dir)) = (
        std::env::var("MOJIM_TEST_CHILD"),
        std::env::var("MOJIM_TEST_DIR"),
    ) else {
        return;
    };
    let more = match &what[..] {
        "bounded" => "memory = \"16MiB\"\nmax_uncommitted = \"8MiB\"",
        "uncommitted" => "memory = \"16MiB\"\nmax_uncommitted = \"16MiB\"",
        _ => "",
    };
    let config = alone(Path::new(&dir), more, "16MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    let m = v.map("f", REGION, flags).unwrap();
    let page = 4096;
    // SAFETY: inside the mapping, which only this thread uses; a word is aligned.
    let at = |n: usize| unsafe { m.ptr.add(n * page) };
    let store = |n: usize, pass: u64| {
        for i in (0..page).step_by(512) {
            // SAFETY: as above.
            unsafe { at(n).add(i).cast::<u64>().write(word(n, pass)) };
        }
    };
    let check = |pages: std::ops::Range<usize>, pass: u64| {
        for n in pages {
            for i in (0..page).step_by(512) {
                // SAFETY: as above.
                let found = unsafe { at(n).add(i).cast::<u64>().read() };
                assert_eq!(found, word(n, pass), "page {n}");
            }
        }
    };
    for n in 0..REGION / page {
        store(n, 1);
        if (n + 1) * page % STEP == 0 && what != "uncommitted" {
            msync(m.ptr, REGION).unwrap();
        }
    }
    check(0..REGION / page, 1);
    // And a part by exact ranges, still more than there is room for.
    let (part, few) = (2 * LIMIT / page, mojim_memory::region::EXACT_MAX / page);
    for n in 0..part {
        store(n, 2);
        if (n + 1) % few == 0 {
            let (start, len) = (at(n + 1 - few), few * page);
            match (n + 1) % (16 * few) {
                0 => drop(msync(start, len).unwrap()),
                _ => drop(msync_async(start, len).unwrap()),
            }
        }
    }
    check(0..part, 2);
    check(part..REGION / page, 1);
    v.detach().unwrap();
    println!("all was there");
}

#[test]
fn a_region_ten_times_larger_than_memory_is_changed() {
    if !mojim_memory::track::uffd_available() {
        eprintln!("skipped: this kernel has no write tracking by userfaultfd");
        return;
    }
    let cgroup = match Cgroup::new() {
        Ok(cgroup) => cgroup,
        Err(why) => {
            eprintln!("skipped: no memory cgroup can be made here: {why}");
            return;
        }
    };
    let dir = std::env::temp_dir().join(format!("mojim-cgroup-{}", std::process::id()));
    let run = |what: &str| {
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let start = std::time::Instant::now();
        let done = cgroup.run(what, &dir);
        let _ = std::fs::remove_dir_all(&dir);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        eprintln!("{what}: {:?} {}\n{said}", start.elapsed(), done.status);
        (done, said)
    };
    let (done, _) = run("bounded");
    assert!(done.status.success());
    assert!(String::from_utf8_lossy(&done.stdout).contains("all was there"));
    // Without a bound the same does not fit.
    let (done, _) = run("unbounded");
    assert_eq!(done.status.signal(), Some(libc::SIGKILL));
    // Without sync points neither.
    let (done, said) = run("uncommitted");
    assert_eq!(done.status.signal(), Some(libc::SIGBUS));
    assert!(said.contains("volume v") && said.contains("max_uncommitted"));
}
