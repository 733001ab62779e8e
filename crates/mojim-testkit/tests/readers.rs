//! Readers on the mirror and on a backup, as processes: an unmodified program
//! under `mojim run --read`, and one that uses the C interface.
//!
//! This process is the program on the primary: with each sync point, a gmsync,
//! it changes a counter in every page of two files. The programs
//! (`programs/reader.c`) look at all of them in a loop without a call, and end
//! with "mixed" if they see what was never committed. Owns its temporary
//! directories, shared memory and processes.

// Seen to fail, each by a defect made on purpose or found:
// - pages shown one by one, and the mirror's data files as they are: both mix states
// - zeros in locked memory
// - a signal handler that waits for ever

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mojim::{Config, MapFlags, Mapping, Volume, gmsync};
use mojim_heap::{Heap, HeapOptions};

use mojim_testkit::home::Home;
use mojim_testkit::{Process, await_that, interface::compile, libraries, temporary};

const PAGE: usize = 4096;
const FILES: [(&str, usize); 2] = [("f", 24), ("dir/g", 16)];
/// Longer than anything here takes, also on a machine with much else to do.
const DEADLINE: Duration = Duration::from_secs(120);

/// `reader.c`, unmodified and with the C interface, and the libraries.
fn programs() -> &'static [PathBuf; 2] {
    static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
    BUILT.get_or_init(|| {
        libraries();
        let source = "crates/mojim-testkit/programs/reader.c";
        [("plain", &["-O2"][..]), ("api", &["-O2", "-DAPI"])].map(|(kind, flags)| {
            let name = format!("mojim-reader-{kind}-{}", std::process::id());
            let to = temporary().join(name);
            compile(source, &to, flags, kind == "api");
            to
        })
    })
}

/// Primary `a`, mirror `b`, backup `c`; small logs, so that checkpoints happen
/// all the time.
struct Cluster {
    home: Home,
}

impl Cluster {
    fn new() -> Cluster {
        let home = Home::new("readers", 3);
        let mut t = String::from(
            "cluster = \"readers\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\n\
             backups = [\"c\"]\nfailover = \"manual\"\nresend_timeout = \"2s\"\n",
        );
        for (name, port) in ["a", "b", "c"].iter().zip(&home.ports) {
            t += &home.data_node(name, port.number, "size = \"1MiB\"");
        }
        home.configure(&t);
        Cluster { home }
    }

    /// The path of a file of the volume on a node.
    fn path(&self, node: &str, file: &str) -> String {
        let path = self.dir.join(node).join("v").join(file);
        path.to_str().unwrap().to_owned()
    }

    /// Whether both files are there on a node, as long as they will be: they come one after
    /// the other, and a reader opens both.
    fn has_files(&self, node: &str) -> bool {
        FILES.iter().all(|(name, pages)| {
            let file = fs::metadata(self.path(node, name));
            file.is_ok_and(|f| f.len() == (pages * PAGE) as u64)
        })
    }

    /// `mojim run --read` on `node`.
    fn run(&self, node: &str, args: &[&str]) -> Process {
        let program = programs()[0].to_str().unwrap();
        let all = [&["--read", "--name", node, "--", program], args].concat();
        self.start("run", &all, &format!("run-{node}"))
    }

    fn watch(&self, node: &str) -> Process {
        let [f, g] = FILES.map(|(name, _)| self.path(node, name));
        self.run(node, &["watch", &f, &g])
    }

    /// Any other program.
    fn start_program(&self, program: &Path, args: &[&str]) -> Process {
        Process::start_with(&[], &self.dir.join("reader.txt"), |c| {
            let mut own = Command::new(program);
            own.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
            *c = own;
        })
    }
}

impl Deref for Cluster {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}

/// The program on the primary.
struct Writer {
    volume: Volume,
    maps: [Mapping; 2],
    count: u64,
}

impl Writer {
    fn new(c: &Cluster) -> Writer {
        let config = Config::load(&c.file()).unwrap();
        let volume = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let create = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let maps = FILES.map(|(name, pages)| volume.map(name, pages * PAGE, create).unwrap());
        let mut w = Writer {
            volume,
            maps,
            count: 0,
        };
        w.write();
        w
    }

    /// Two heaps, whose root is their name.
    fn make_heaps(&self) {
        for name in ["one", "two"] {
            let options = HeapOptions::new(64 << 20, 0);
            let heap = Heap::open(&self.volume, name, &options).unwrap();
            let p = heap.malloc(4).unwrap();
            // SAFETY: a block of four bytes.
            unsafe { p.copy_from(format!("{name}\0").as_ptr(), 4) };
            heap.set_root("name", p, "char").unwrap();
            heap.sync().unwrap();
            heap.close().unwrap();
        }
    }

    /// One sync point; again and again while the mirror is away.
    fn write(&mut self) -> u64 {
        self.count += 1;
        let pages = self
            .maps
            .iter()
            .flat_map(|m| (0..m.len).step_by(PAGE).map(|at| (m.ptr, at)));
        let mut ranges = Vec::new();
        for (ptr, at) in pages {
            // SAFETY: a counter of a region that only this thread uses.
            unsafe {
                let p = ptr.add(at);
                p.cast::<u64>().write_volatile(self.count);
                ranges.push((p.cast_const(), 8));
            }
        }
        let begin = Instant::now();
        loop {
            match gmsync(&ranges) {
                Ok(lsn) => return lsn,
                Err(e) => assert!(begin.elapsed() < DEADLINE, "{e}"),
            }
        }
    }

    /// Writes until `f` says that it is enough.
    fn write_until(&mut self, what: &str, mut f: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !f() {
            assert!(begin.elapsed() < DEADLINE, "{what}");
            self.write();
            std::thread::yield_now();
        }
    }

    /// Writes while each of them says so often that it has seen 200 states.
    fn watched(&mut self, readers: Vec<(&str, &mut Process)>, times: usize) {
        let done: Vec<_> = readers.iter().map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|s| {
            for ((name, p), done) in readers.into_iter().zip(&done) {
                s.spawn(move || {
                    for _ in 0..times {
                        let line = p.line();
                        let seen = line.as_deref().is_some_and(|l| l.starts_with("seen "));
                        // 2 ends the writing, too.
                        done.store(if seen { 0 } else { 2 }, Ordering::SeqCst);
                        assert!(seen, "{name}: {line:?} {}", p.errors());
                    }
                    done.store(1, Ordering::SeqCst);
                });
            }
            let begin = Instant::now();
            while done.iter().any(|d| d.load(Ordering::SeqCst) == 0) && begin.elapsed() < DEADLINE {
                self.write();
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn programs_read_whole_sync_points() {
    let c = Cluster::new();
    let _nodes = ["a", "b", "c"].map(|n| c.node(n));
    let mut w = Writer::new(&c);
    w.make_heaps();
    w.write_until("a backup's copy", || c.has_files("c"));
    let config = c.file();
    let config = config.to_str().unwrap();
    let mut on_b = c.watch("b");
    let mut on_c = c.watch("c");
    let mut api = c.start_program(&programs()[1], &["api", config, "b"]);
    w.watched(
        vec![("b", &mut on_b), ("c", &mut on_c), ("api", &mut api)],
        1,
    );

    // One that stands still holds nobody up: many times the logs go by. Then it
    // goes on, with what is there by then.
    on_b.signal("STOP");
    for _ in 0..4000 {
        w.write();
    }
    on_b.signal("CONT");
    w.watched(vec![("b", &mut on_b), ("c", &mut on_c)], 1);
    api.kill();

    // What a reader may not do. A directory, a link or a pipe was made in the bare copy, where no
    // other node has it.
    let (new, directory) = (c.path("b", "new"), c.path("b", "directory"));
    fs::create_dir(&directory).unwrap();
    let mut refused = c.run("b", &["refused", &c.path("b", "f"), &new, &directory]);
    assert_eq!(
        refused.line().as_deref(),
        Some("refused"),
        "{}",
        refused.errors()
    );
    assert_eq!(refused.wait(), Some(0));
    assert!(
        refused.errors().contains("only read here"),
        "{}",
        refused.errors()
    );
    assert!(!Path::new(&new).exists());
    for p in [&mut on_b, &mut on_c] {
        p.kill();
    }
    w.volume.detach().unwrap();
}

/// The daemon of the readers' node is killed, and comes back; the readers stay.
#[test]
fn readers_outlive_their_node() {
    let c = Cluster::new();
    let _a = c.node("a");
    let mut b = c.node("b");
    let mut node_c = c.node("c");
    let mut w = Writer::new(&c);
    w.write_until("a backup's copy", || c.has_files("c"));
    let mut on_b = c.watch("b");
    let mut on_c = c.watch("c");
    w.watched(vec![("b", &mut on_b), ("c", &mut on_c)], 1);
    b.kill();
    let _b = c.node("b");
    w.watched(vec![("b", &mut on_b)], 1);
    node_c.kill();
    for _ in 0..2000 {
        w.write();
    }
    let _c = c.node("c");
    w.watched(vec![("b", &mut on_b), ("c", &mut on_c)], 1);
    for p in [&mut on_b, &mut on_c] {
        p.kill();
    }
    w.volume.detach().unwrap();
}

/// The test that tests the others: the same program, on the mirror's data files
/// as they are, sees what was never committed.
#[test]
fn without_mojim_a_mixture_is_seen() {
    let c = Cluster::new();
    let _nodes = ["a", "b"].map(|n| c.node(n));
    let mut w = Writer::new(&c);
    let [f, g] = FILES.map(|(name, _)| c.path("b", name));
    await_that("the files", || c.has_files("b").then_some(()));
    let mut plain = c.start_program(&programs()[0], &["watch", &f, &g]);
    let found = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let (plain, found) = (&mut plain, &found);
        s.spawn(move || {
            while let Some(line) = plain.line() {
                if line.starts_with("mixed") {
                    found.store(true, Ordering::SeqCst);
                    return;
                }
            }
        });
        let begin = Instant::now();
        while !found.load(Ordering::SeqCst) && begin.elapsed() < DEADLINE / 2 {
            w.write();
            std::thread::yield_now();
        }
        w.volume.detach().unwrap();
    });
    assert!(found.into_inner(), "no mixture was seen");
}
