//! How long a sync point waits for its mirror: as long as that moves on, and
//! for seconds where it stands still. Two real nodes on loopback, with a
//! program that ends at its first sync point that fails.
//!
//! Owns its temporary directories, shared memory and processes.

// Seen to fail, each by a defect made on purpose or found:
// - a time limit that ignored the mirror's progress: 7 of 128 sync points of 16 MiB failed on a
//   busy machine, and every one during a whole copy. The limit is on standstill now, in seconds

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use mojim::{Error, MapFlags, Volume, msync};
use mojim_config::Config;
use rustix::process::{Resource, Rlimit, setrlimit};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::disk::{Disk, Work};
use mojim_testkit::{await_that, link, text};

/// A cluster whose configuration says of its waits what `waits` says.
fn cluster(waits: &str) -> Cluster {
    let c = Cluster::new(SYNC);
    let text = fs::read_to_string(c.file()).unwrap();
    let usual = "resend_timeout = \"5s\"\n";
    assert!(text.contains(usual));
    c.configure(&text.replace(usual, waits));
    c
}

/// The program reaches b over a link that takes `burst` bytes each 10 ms.
/// Returns the configuration of the nodes themselves.
fn slow(c: &Cluster, burst: usize) -> PathBuf {
    let near = c.file().with_extension("near");
    fs::copy(c.file(), &near).unwrap();
    let address = format!("127.0.0.1:{}", c.ports[1].number);
    let port = link::slow(address.clone(), burst, Duration::from_millis(10));
    let text = fs::read_to_string(c.file()).unwrap();
    c.configure(&text.replace(&address, &format!("127.0.0.1:{port}")));
    near
}

/// With the bounds that a volume has where nothing is said, a mirror that stood
/// still for a second ended the program.
#[test]
fn a_mirror_that_stands_still_for_seconds_fails_no_sync_point() {
    let c = cluster("");
    let _a = c.node("a");
    let b = c.node("b");
    let args = ["--entries", "400", "--first", "50", "--pace", "500"];
    let (mut p, _) = c.program("a", &args);
    p.acknowledged(0, 50);
    b.signal("STOP");
    p.go_on();
    // Longer than a quarter of a second and five times three round trips of a
    // busy machine; the time is what the test is about.
    sleep(Duration::from_secs(2));
    b.signal("CONT");
    p.acknowledged(50, 400);
    p.finish();
    c.assert_equal();
}

/// A sync point of 16 MiB failed on a mirror that was taking it in all the
/// time, in parts, as a spill file, or as both.
#[test]
fn a_large_sync_point_is_waited_for_while_it_moves() {
    for size in ["4MiB", "64MiB"] {
        // A sync point takes 5 s, more than twice as long as a mirror may stand still; a
        // record of 1 MiB takes 0.3 s, a third of the time after which it is sent again.
        // (With 400 ms five times, a busy machine sent one again before it was through, each
        // time.)
        let c = cluster("resend_timeout = \"1s\"\nresend_attempts = 2\n");
        let text = fs::read_to_string(c.file()).unwrap();
        c.configure(&text.replace("4MiB", size));
        let _a = c.node("a");
        let _b = c.node("b");
        slow(&c, 32 << 10);
        let ballast = (16 << 20).to_string();
        let args = ["--entries", "10", "--ballast", &ballast];
        let (mut p, _) = c.program("a", &args);
        p.acknowledged(0, 10);
        p.finish();
        c.assert_equal();
    }
}

/// While a mirror that came back without anything got its copy, every sync
/// point failed.
#[test]
fn a_whole_copy_under_load_fails_no_sync_point() {
    let c = cluster("resend_timeout = \"1s\"\nresend_attempts = 7\ncopy_streams = 1\n");
    let _a = c.node("a");
    let mut b = c.node("b");
    let ballast = (24 << 20).to_string();
    // The copy takes longer, fifteen seconds, than a sync point waits for a mirror that stands
    // still; and that is longer than a busy machine takes until the copy begins.
    let near = slow(&c, 16 << 10);
    let args = "--entries 400 --first 50 --pace 500 --ballast";
    let args: Vec<_> = args.split(' ').chain([&*ballast]).collect();
    let (mut p, _) = c.program("a", &args);
    p.acknowledged(0, 50);
    b.kill();
    p.go_on();
    fs::remove_dir_all(c.dir.join("b")).unwrap();
    c.lose_memory("b");
    let _b = c.node_as(&near, "b");
    p.acknowledged(50, 400);
    p.finish();
    c.assert_equal();
}

/// A mirror that could not take in the spill file of a large sync point refused it,
/// and was linked to again 10 ms later, which counted as progress: that call never
/// returned, and each other large one waited behind it. Where the limit was the
/// process's own there was no refusal: a signal ended the mirror's daemon. And each
/// try left what had come of its file behind.
#[test]
fn a_large_sync_point_fails_where_the_mirror_cannot_take_it_in() {
    // What others commit waits for a mirror that a busy machine does not let go on.
    let c = cluster("resend_timeout = \"800ms\"\nresend_attempts = 5\n");
    const SIZE: usize = 16 << 20;
    // The file fits, the spill file of all of it has some bytes more.
    c.prepare(|_, command| {
        let limit = Rlimit {
            current: Some(SIZE as u64),
            maximum: Some(SIZE as u64),
        };
        // SAFETY: one system call.
        unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Fsize, limit)?)) };
    });
    let b = c.node("b");
    let config = Config::load(&c.file()).unwrap();
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let large = ["f", "g"].map(|name| v.map(name, SIZE, flags).unwrap());
    let small = v.map("h", 4096, flags).unwrap();
    for (i, m) in large.iter().enumerate() {
        // SAFETY: the mapping, which only this thread uses.
        unsafe { std::ptr::write_bytes(m.ptr, i as u8 + 7, SIZE) };
    }
    std::thread::scope(|s| {
        let calls = large.each_ref().map(|m| {
            let at = m.ptr as usize;
            s.spawn(move || msync(at as *const u8, SIZE))
        });
        // What others commit goes on.
        for i in 0..20 {
            // SAFETY: as above.
            unsafe { small.ptr.write_volatile(i) };
            msync(small.ptr, 1).unwrap_or_else(|e| panic!("{e} {}", b.errors()));
        }
        for call in calls {
            let e = call.join().unwrap().unwrap_err();
            assert!(matches!(e, Error::Timeout(_)), "{e}");
            let text = e.to_string();
            assert!(text.contains("node b") && text.contains("too large"), "{e}");
        }
    });
    let left = || {
        let names = fs::read_dir(c.dir.join("b/.mojim/v")).unwrap();
        let names = names.map(|n| n.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with("spill.")).count()
    };
    // Of the last try, where that was given up between two pieces.
    assert!(left() <= 1, "{}", left());
    // The same bytes in what it can take, by the same daemon.
    for m in &large {
        for half in [0, SIZE / 2] {
            msync(m.ptr.wrapping_add(half), SIZE / 2).unwrap_or_else(|e| panic!("{e}"));
        }
    }
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    await_that("the mirror's end of the session", || {
        let same = ["f", "g"].iter().enumerate().all(|(i, name)| {
            let bytes = fs::read(c.dir.join("b/v").join(name)).unwrap();
            bytes.len() == SIZE && bytes.iter().all(|x| *x == i as u8 + 7)
        });
        same.then_some(())
    });
}

/// What a mirror had acknowledged lay in the primary's memory only when the mirror was lost,
/// and nobody said how much that was, and for how long.
#[test]
fn what_the_loss_of_a_mirror_puts_at_risk_is_said() {
    // No sync point fails before the mirror is back.
    let c = cluster("resend_timeout = \"2s\"\nresend_attempts = 60\n");
    let Some(disk) = Disk::mount_or_skip(&c.dir.join("a")) else {
        return;
    };
    let _a = c.node("a");
    let mut b = c.node("b");
    // It stays attached, so that it sees the loss whenever that comes.
    let args = "--entries 300 --first 20 --pace 2000 --linger";
    let args: Vec<_> = args.split(' ').collect();
    let (mut p, _) = c.program("a", &args);
    p.acknowledged(0, 20);
    let says = c.says("a");
    assert!(says["last_risk"].is_null(), "{says}");
    let held = disk.hold(Work::Write, "/v.log.0");
    p.go_on();
    await_that("work for the log's disk", || {
        disk.is_holding().then_some(())
    });
    p.acknowledged(20, 60);
    b.kill();
    let risk = await_that("bytes at risk", || c.says("a")["at_risk_bytes"].as_u64());
    assert!(risk > 0);
    let words = format!("node a: {risk} B that its lost mirror had acknowledged are in its memory");
    await_that(&words, || {
        let said = text(&c.mojim("status", &[]).stdout);
        said.contains(&words).then_some(())
    });
    // For so long, at least.
    sleep(Duration::from_millis(200));
    drop(held);
    let last = await_that("the end of that", || {
        let says = c.says("a");
        let over = says["at_risk_bytes"].is_null() && says["last_risk"].is_object();
        over.then(|| says["last_risk"].clone())
    });
    assert_eq!(last["bytes"], risk);
    assert!(last["milliseconds"].as_f64().unwrap() >= 200.0, "{last}");
    let words = format!("volume v: the mirror was lost; {risk} bytes that it had acknowledged");
    await_that("the daemon's word", || {
        c.logs().contains(&words).then_some(())
    });
    let _b = c.node("b");
    p.acknowledged(60, 300);
    p.finish();
    c.assert_equal();
}
