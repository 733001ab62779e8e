//! The costs of the sync path besides its bytes: no allocation, and no system call but a link's.
//!
//! Over TCP, with keys or without, it makes no system call but send and receive. Over shared memory
//! it makes none at all.
//!
//! A process of its own attaches and commits until everything is warm. Then it lets the kernel trap
//! every system call of the calling thread that is not allowed (seccomp). Meanwhile it commits on,
//! and an allocator counts what the thread allocates. The check is itself checked: with a call too
//! many, it fails.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::*};

use mojim_config::Config;
use mojim_config::key_files;
use mojim_engine::{MapFlags, Volume, gmsync, msync};
use mojim_format::certificate::Subject;
use mojim_keys::{Authority, Validity};
use mojim_node::Node;

mod support;
use support::free_ports;

struct Counting;

thread_local!(static ALLOCATIONS: Cell<u64> = const { Cell::new(0) });

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|a| a.set(a.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(l) }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(p, l) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

static TRAPPED: AtomicU64 = AtomicU64::new(0);
static FIRST: AtomicI64 = AtomicI64::new(-1);

extern "C" fn on_sigsys(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    TRAPPED.fetch_add(1, SeqCst);
    // SAFETY: the kernel gives a valid siginfo; for SIGSYS the number of the
    // call stands at offset 24 on 64-bit Linux.
    let nr = unsafe { *(info as *const u8).add(24).cast::<i32>() };
    let _ = FIRST.compare_exchange(-1, nr as i64, SeqCst, SeqCst);
}

/// From here on, every system call of this thread but `allowed` is trapped.
fn trap_all_but(allowed: &[libc::c_long]) {
    const LD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut prog = vec![op(LD, 0, 0, 0)];
    let all: Vec<_> = allowed
        .iter()
        .copied()
        .chain([libc::SYS_exit_group, libc::SYS_rt_sigreturn])
        .collect();
    for (i, nr) in all.iter().enumerate() {
        prog.push(op(JEQ, (all.len() - i) as u8, 0, *nr as u32));
    }
    prog.push(op(RET, 0, 0, libc::SECCOMP_RET_TRAP));
    prog.push(op(RET, 0, 0, libc::SECCOMP_RET_ALLOW));
    let prog = libc::sock_fprog {
        len: prog.len() as u16,
        filter: Box::leak(prog.into_boxed_slice()).as_mut_ptr(),
    };
    // SAFETY: a valid handler and a valid program, leaked; both calls change
    // this thread or process only.
    unsafe {
        let mut sa: libc::sigaction = std::mem::zeroed();
        sa.sa_sigaction = on_sigsys as *const () as usize;
        sa.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSYS, &sa, std::ptr::null_mut()), 0);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let r = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &prog);
        assert_eq!(r, 0, "seccomp: {}", std::io::Error::last_os_error());
    }
}

/// `tls` and `plain` are TCP with keys, with and without encryption.
fn config(dir: &Path, transport: &str) -> Config {
    let [a, b] = free_ports();
    let keys = match transport {
        "tls" => format!("keys = \"{}/keys\"", dir.display()),
        "plain" => format!("keys = \"{}/keys\"\nencrypt = false", dir.display()),
        _ => String::new(),
    };
    let carrier = if transport == "shm" { "shm" } else { "tcp" };
    let text = format!(
        r#"
cluster = "test"
{keys}
[volume.v]
mode = "sync"
primary = "a"
mirror = "b"
transport = "{carrier}"
spin = "10s"
resend_timeout = "10s"
[node.a]
address = "{}"
directory = "{d}/a"
ring = "{d}/shm"
log = {{ medium = "disk", size = "64MiB" }}
[node.b]
address = "{}"
directory = "{d}/b"
ring = "{d}/shm"
log = {{ medium = "dram", path = "{d}/shm/b", size = "64MiB" }}
"#,
        a,
        b,
        d = dir.display(),
    );
    std::fs::write(dir.join("c.toml"), &text).unwrap();
    let c = Config::parse(&text, &dir.join("c.toml")).unwrap_or_else(|e| panic!("{e}"));
    if let Some(keys) = &c.keys {
        make_keys(keys);
    }
    c
}

fn make_keys(dir: &Path) {
    let put = |path: PathBuf, text: String| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    std::fs::create_dir_all(dir).unwrap();
    let new = Authority::make("test").unwrap();
    put(key_files::authority(dir), new.certificate);
    for name in ["a", "b"] {
        let s = Subject::Node(name.into());
        let text = new.authority.issue(&s, Validity::days(1)).unwrap();
        put(key_files::certificate(dir, &s), text);
    }
}

const COMMITS: u64 = 2000;

/// Exit status: 0 clean, 1 allocations, 2 system calls.
fn child(config: &Path, transport: &str, call_too_many: bool) -> ! {
    let v = Volume::attach(config, "a", None).unwrap_or_else(|e| panic!("{e}"));
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let m = v.map("f", 1 << 20, flags).unwrap();
    let commit = |i: u64| {
        let at = (i as usize * 4096) % (1 << 20);
        // SAFETY: inside the region.
        let p = unsafe { m.ptr.add(at) };
        for (len, fill) in [(64usize, 1u8), (4096, 2)] {
            // SAFETY: inside the region, as 4096 divides its length.
            unsafe { std::ptr::write_bytes(p, fill.wrapping_add(i as u8), len) };
            assert!(msync(p, len).unwrap() > 0);
        }
    };
    (0..COMMITS).for_each(commit);
    let allowed: &[libc::c_long] = match transport {
        "tcp" | "tls" | "plain" => &[
            libc::SYS_sendmsg,
            libc::SYS_sendto,
            libc::SYS_recvmsg,
            libc::SYS_recvfrom,
        ],
        _ => &[],
    };
    trap_all_but(allowed);
    let before = ALLOCATIONS.with(Cell::get);
    (0..COMMITS).for_each(commit);
    if call_too_many {
        // SAFETY: harmless; it is trapped.
        unsafe { libc::syscall(libc::SYS_getppid) };
        let _ = gmsync(&[(m.ptr, 8)]);
    }
    let allocated = ALLOCATIONS.with(Cell::get) - before;
    let trapped = TRAPPED.load(SeqCst);
    let code = match (allocated, trapped) {
        (0, 0) => 0,
        (_, 0) => 1,
        _ => 2,
    };
    // Printing is a system call that is trapped by now: the exit status tells,
    // and for people the number of the first call beside it.
    let first = FIRST.load(SeqCst);
    // SAFETY: ends the process.
    unsafe {
        libc::_exit(if code == 2 && !call_too_many {
            100 + (first as i32 % 100)
        } else {
            code
        })
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "child") {
        child(Path::new(&args[2]), &args[3], args[4] == "broken");
    }
    if args.iter().any(|a| a == "--list") {
        return;
    }
    let dir = PathBuf::from("/dev/shm").join(format!("mojim-sync-path-{}", std::process::id()));
    let mut failed = 0;
    let cases = [
        ("tcp", "sound"),
        ("shm", "sound"),
        ("tls", "sound"),
        ("plain", "sound"),
        ("tcp", "broken"),
        ("shm", "broken"),
        ("tls", "broken"),
    ];
    for (transport, kind) in cases {
        std::fs::create_dir_all(dir.join("shm")).unwrap();
        let c = config(&dir, transport);
        let node = Node::start(&c, "b", None).unwrap_or_else(|e| panic!("{e}"));
        let status = Command::new(std::env::current_exe().unwrap())
            .args([
                "child",
                &dir.join("c.toml").display().to_string(),
                transport,
                kind,
            ])
            .status()
            .unwrap();
        node.stop();
        let _ = std::fs::remove_dir_all(&dir);
        let code = status.code().unwrap_or(-1);
        let ok = (kind == "sound") == (code == 0) && code >= 0;
        println!(
            "test sync_path_{transport}_{kind} ... {} ({COMMITS} × 2 sync points, exit status {code})",
            if ok { "ok" } else { "FAILED" }
        );
        failed += !ok as u32;
    }
    println!("{} passed, {failed} failed", cases.len() as u32 - failed);
    std::process::exit((failed > 0) as i32);
}
