//! Vectors in a heap are what a twin in `Vec` says: after each transaction, committed or taken
//! back, and after the program was killed at any moment.
//!
//! - VEC_SEED repeats a run, as far as the moments of its kills can be.
//! - VEC_KILLS says how often the program is killed (default 6).

use std::fmt::Debug;
use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::time::Duration;

use mojim::example::Example;
use mojim::{Error, Heap, PVec, Persistent, Ptr, Tx, Volume, persistent};
use mojim_env::rng::Rng;

fn attach(config: &std::path::Path) -> Volume {
    Volume::attach(config, "a", None).unwrap_or_else(|e| panic!("{e}"))
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |v| v.parse().unwrap())
}

fn seed() -> u64 {
    let seed = number("VEC_SEED", std::process::id().into());
    println!("VEC_SEED={seed}");
    seed
}

/// One change of a vector and of its twin.
fn change<T: Persistent + Copy + PartialEq + Debug>(
    tx: &mut Tx<'_>,
    vec: Ptr<PVec<T>>,
    twin: &mut Vec<T>,
    chance: &mut Rng,
    value: T,
) -> mojim::Result<()> {
    let (len, at) = (twin.len(), chance.index(twin.len() + 1));
    match chance.index(12) {
        0..5 => (tx.push(vec, value)?, twin.push(value)).0,
        5..7 => (tx.insert(vec, at, value)?, twin.insert(at, value)).0,
        7 => assert_eq!(tx.pop(vec)?, twin.pop()),
        8 if at < len => assert_eq!(tx.remove(vec, at)?, twin.remove(at)),
        9 if at < len => assert_eq!(tx.swap_remove(vec, at)?, twin.swap_remove(at)),
        8 | 9 => {
            assert!(tx.remove(vec, at).is_err() && tx.swap_remove(vec, at).is_err());
            assert!(tx.insert(vec, len + 1, value).is_err());
            assert!(tx.at_mut(vec, len).is_err());
        }
        10 if at < len => (*tx.at_mut(vec, at)?, twin[at]) = (value, value),
        10 => (tx.get_mut(vec)?.reverse(), twin.reverse()).0,
        _ => {
            let left = len.saturating_sub(chance.index(4));
            (tx.truncate(vec, left)?, twin.truncate(left)).0
        }
    }
    assert_eq!(tx.get(vec)?, &twin[..]);
    Ok(())
}

/// Transactions of a few changes, of which every third is taken back, by an error or a panic.
fn as_its_twin<T: Persistent + Copy + PartialEq + Debug>(seed: u64, make: fn(u64) -> T) {
    let example = Example::new();
    let mut volume = attach(&example.config());
    let mut heap = Heap::open(&volume, "vec").unwrap();
    let (mut twin, mut chance) = (Vec::new(), Rng::new(seed));
    for n in 0..200 {
        let vec = heap.root_vec::<T>("vec").unwrap();
        let mut next = twin.clone();
        let done = catch_unwind(AssertUnwindSafe(|| {
            heap.atomically(|tx| {
                for _ in 0..chance.index(5) {
                    let value = make(chance.next());
                    change(tx, vec, &mut next, &mut chance, value)?;
                }
                match n % 6 {
                    0 => Err(Error::Invalid("given up".into())),
                    // Says nothing on standard error, unlike `panic!`.
                    3 => std::panic::resume_unwind(Box::new("given up")),
                    _ => Ok(()),
                }
            })
        }));
        match (n % 3, done) {
            (0, Ok(Err(Error::Invalid(text)))) => assert_eq!(text, "given up"),
            (0, Err(panic)) => assert_eq!(panic.downcast_ref(), Some(&"given up")),
            (_, Ok(Ok(()))) => twin = next,
            (_, done) => panic!("transaction {n}: {done:?}"),
        }
        assert_eq!(heap.get(vec).unwrap(), &twin[..], "transaction {n}");
        if n % 60 == 59 {
            drop(heap);
            volume.detach().unwrap();
            volume = attach(&example.config());
            heap = Heap::open(&volume, "vec").unwrap();
        }
    }
}

#[test]
fn a_vector_is_as_its_twin() {
    let seed = seed();
    as_its_twin(seed, |n| n);
    as_its_twin(seed, |n| [n as u8; 5]);
    as_its_twin(seed, |n| [n; 200]); // several to a page
    as_its_twin(seed, |_| [0u64; 0]);
}

#[test]
fn what_a_vector_was_leads_nowhere() {
    let example = Example::new();
    let volume = attach(&example.config());
    let mut heap = Heap::open(&volume, "f").unwrap();
    let vec = heap.root_vec::<u32>("vec").unwrap();
    assert!(heap.root::<PVec<i32>>("vec").is_err());
    assert!(heap.root::<[u32]>("vec").is_err());
    let mut taken_back = None;
    let failed = heap.atomically(|tx| {
        let vec = tx.alloc_vec::<u64>()?;
        (0..100).try_for_each(|n| tx.push(vec, n))?;
        taken_back = Some(vec);
        Err::<(), _>(Error::Invalid("given up".into()))
    });
    assert!(failed.is_err() && heap.get(taken_back.unwrap()).is_err());
    heap.atomically(|tx| {
        tx.push(vec, 1)?;
        tx.free(vec)?;
        assert!(tx.push(vec, 2).is_err() && tx.free(vec).is_err() && tx.get(vec).is_err());
        tx.remove_root("vec")
    })
    .unwrap();
    assert!(heap.get(vec).is_err());
    drop(heap);
    // What vectors had is used again: all these do not fit beside each other.
    let mut heap = Heap::open_at(&volume, "small", 16 << 20, 0).unwrap();
    for _ in 0..200 {
        heap.atomically(|tx| {
            let vec = tx.alloc_vec()?;
            (0..200).try_for_each(|n| tx.push(vec, [n as u64; 64]))?;
            tx.free(vec)
        })
        .unwrap();
    }
}

persistent! {
    struct Node { name: Ptr<str>, children: Ptr<PVec<Ptr<Node>>> }
}

/// A tree is there after the volume was attached anew; one of another type is refused.
#[test]
fn vectors_are_fields() {
    fn node(tx: &mut Tx<'_>, name: &str, depth: u8) -> mojim::Result<Ptr<Node>> {
        let (text, children) = (tx.alloc_str(name)?, tx.alloc_vec()?);
        for n in 0..depth {
            let child = node(tx, &format!("{name}{n}"), n)?;
            tx.push(children, child)?;
        }
        let name = text;
        tx.alloc(Node { name, children })
    }
    fn names(heap: &Heap, at: Ptr<Node>, all: &mut Vec<String>) {
        let node = heap.get(at).unwrap();
        all.push(heap.get(node.name).unwrap().to_owned());
        for child in heap.get(node.children).unwrap() {
            names(heap, *child, all);
        }
    }
    let example = Example::new();
    let volume = attach(&example.config());
    let mut heap = Heap::open(&volume, "tree").unwrap();
    heap.atomically(|tx| {
        let root = node(tx, "n", 3)?;
        tx.set_root("tree", root)
    })
    .unwrap();
    drop((heap, volume));
    let volume = attach(&example.config());
    let heap = Heap::open(&volume, "tree").unwrap();
    let mut all = Vec::new();
    names(&heap, heap.root("tree").unwrap().unwrap(), &mut all);
    assert_eq!(all, ["n", "n0", "n1", "n10", "n2", "n20", "n21", "n210"]);
    assert!(heap.root::<PVec<Ptr<Node>>>("tree").is_err());
}

/// The two vectors of the program that is killed, and their twins.
#[derive(Default, Debug, PartialEq)]
struct Twins(Vec<u64>, Vec<String>);

/// The `n`-th transaction of that program.
fn transaction(n: u64, heap: &mut Heap) {
    let vec = heap.root_vec::<u64>("numbers").unwrap();
    let texts = heap.root_vec::<Ptr<str>>("texts").unwrap();
    let count = heap.root_or("count", || 0u64).unwrap();
    heap.atomically(|tx| {
        let mut chance = Rng::new(n);
        for k in 0..3 {
            let at = chance.index(tx.get(vec)?.len() + 1);
            match at < tx.get(vec)?.len() && chance.index(5) < 2 {
                true => tx.remove(vec, at).map(drop)?,
                false => tx.insert(vec, at, n * 10 + k)?,
            }
        }
        let at = chance.index(tx.get(texts)?.len() + 1);
        match at < tx.get(texts)?.len() && chance.index(5) < 2 {
            true => {
                let text = tx.swap_remove(texts, at)?;
                tx.free(text)?;
            }
            false => {
                let text = tx.alloc_str(&format!("the {n}th text"))?;
                tx.push(texts, text)?;
            }
        }
        *tx.get_mut(count)? = n + 1;
        Ok(())
    })
    .unwrap();
}

impl Twins {
    /// What [`transaction`] makes of them.
    fn changed(n: u64, mut twins: Twins) -> Twins {
        let mut chance = Rng::new(n);
        for k in 0..3 {
            let at = chance.index(twins.0.len() + 1);
            match at < twins.0.len() && chance.index(5) < 2 {
                true => drop(twins.0.remove(at)),
                false => twins.0.insert(at, n * 10 + k),
            }
        }
        let at = chance.index(twins.1.len() + 1);
        match at < twins.1.len() && chance.index(5) < 2 {
            true => drop(twins.1.swap_remove(at)),
            false => twins.1.push(format!("the {n}th text")),
        }
        twins
    }
}

/// Goes on until it is killed; says how many transactions were committed. For the next test.
#[test]
fn program() {
    let Some(config) = std::env::var_os("VEC_PROGRAM") else {
        return;
    };
    let volume = attach(config.as_ref());
    let mut heap = Heap::open(&volume, "vec").unwrap();
    let count = heap.root_or("count", || 0u64).unwrap();
    println!("\nbegins");
    for n in *heap.get(count).unwrap().. {
        transaction(n, &mut heap);
        println!("committed {}", n + 1);
    }
}

#[test]
fn a_killed_program_has_what_its_twin_had() {
    let mut chance = Rng::new(seed());
    let example = Example::new();
    let (mut twins, mut counted) = (Twins::default(), 0);
    for kill in 0..number("VEC_KILLS", 6) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["program", "--exact", "--nocapture", "--test-threads=1"])
            .env("VEC_PROGRAM", example.config())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|l| l.unwrap() == "begins"));
        // A kill at any moment is right: this is no wait for something.
        std::thread::sleep(Duration::from_micros(chance.next() % 50_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let said = |l: std::io::Result<String>| l.unwrap().strip_prefix("committed ")?.parse().ok();
        let acknowledged: u64 = lines.filter_map(said).last().unwrap_or(0);

        let volume = attach(&example.config());
        let mut heap = Heap::open(&volume, "vec").unwrap();
        let count = *heap
            .get(heap.root::<u64>("count").unwrap().unwrap())
            .unwrap();
        assert!(count >= acknowledged && count >= counted, "kill {kill}");
        for n in counted..count {
            twins = Twins::changed(n, twins);
        }
        counted = count;
        let numbers = heap.root_vec("numbers").unwrap();
        let texts = heap.root_vec("texts").unwrap();
        let texts = heap.get::<PVec<Ptr<str>>>(texts).unwrap().iter();
        let texts = texts.map(|t| heap.get(*t).unwrap().to_owned()).collect();
        let found = Twins(heap.get(numbers).unwrap().to_vec(), texts);
        assert_eq!(found, twins, "kill {kill}, {count} transactions");
        println!("kill {kill}: {count} transactions");
    }
}

/// `insert` said that an empty vector has a value.
#[test]
fn an_index_behind_the_end_is_refused_with_the_length() {
    let example = Example::new();
    let volume = Volume::attach(example.config(), "a", None).unwrap();
    let mut heap = Heap::open(&volume, "f").unwrap();
    let list = heap.root_vec::<u64>("list").unwrap();
    let text = |done: Result<(), mojim::Error>| done.unwrap_err().to_string();
    let inserted = heap.atomically(|tx| tx.insert(list, 5, 7));
    assert_eq!(text(inserted), "index 5 of 0 values");
    let removed = heap.atomically(|tx| tx.remove(list, 0).map(drop));
    assert_eq!(text(removed), "index 0 of 0 values");
    heap.atomically(|tx| tx.insert(list, 0, 7)).unwrap();
    assert_eq!(heap.get(list).unwrap(), [7]);
}
