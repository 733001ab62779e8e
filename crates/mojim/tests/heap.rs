//! The heap's Rust interface: what a pointer may lead to, and that a transaction is whole or not
//! at all, also over several runs.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mojim::example::Example;
use mojim::{Error, Heap, Ptr, Volume, persistent};

persistent! {
    struct Queue { first: Option<Ptr<Cell>>, count: u64 }
}
persistent! {
    struct Cell { number: u64, text: Ptr<str>, next: Option<Ptr<Cell>> }
}

fn attach(example: &Example) -> Volume {
    Volume::attach(example.config(), "a", None).unwrap_or_else(|e| panic!("{e}"))
}

fn contents(heap: &Heap, queue: Ptr<Queue>) -> Vec<(u64, String)> {
    let mut all = Vec::new();
    let mut at = heap.get(queue).unwrap().first;
    while let Some(cell) = at {
        let cell = heap.get(cell).unwrap();
        all.push((cell.number, heap.get(cell.text).unwrap().to_owned()));
        at = cell.next;
    }
    assert_eq!(all.len() as u64, heap.get(queue).unwrap().count);
    all
}

/// Pushes at the front and takes from there, beside a model; every third transaction fails or
/// panics, and every fiftieth the volume is attached anew.
#[test]
fn a_list_is_what_a_model_says() {
    let example = Example::new();
    let mut volume = attach(&example);
    let mut heap = Heap::open(&volume, "queue").unwrap();
    let mut model = VecDeque::new();
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for n in 0..300u64 {
        let queue = heap
            .root_or("queue", || Queue {
                first: None,
                count: 0,
            })
            .unwrap();
        let mut next = model.clone();
        let pops = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 == 0;
        let done = catch_unwind(AssertUnwindSafe(|| {
            heap.atomically(|tx| {
                for n in [n, n + 1000] {
                    let first = tx.get(queue)?.first;
                    match first {
                        Some(cell) if pops => {
                            let (text, after) = (tx.get(cell)?.text, tx.get(cell)?.next);
                            tx.free(text)?;
                            tx.free(cell)?;
                            let q = tx.get_mut(queue)?;
                            (q.first, q.count) = (after, q.count - 1);
                            next.pop_front();
                        }
                        next_one => {
                            let text = "x".repeat(n as usize % 90);
                            next.push_front((n, text.clone()));
                            let text = tx.alloc_str(&text)?;
                            let cell = tx.alloc(Cell {
                                number: n,
                                text,
                                next: next_one,
                            })?;
                            let q = tx.get_mut(queue)?;
                            (q.first, q.count) = (Some(cell), q.count + 1);
                        }
                    }
                }
                match n % 6 {
                    0 => Err(Error::Invalid("given up".into())),
                    3 => panic!("given up"),
                    _ => Ok(()),
                }
            })
        }));
        if matches!(done, Ok(Ok(()))) {
            model = next;
        }
        assert_eq!(matches!(done, Ok(Ok(()))), n % 3 != 0, "{done:?}");
        if n % 50 == 49 {
            drop(heap);
            volume.detach().unwrap();
            volume = attach(&example);
            heap = Heap::open(&volume, "queue").unwrap();
        }
        if n % 10 == 9 {
            let queue = heap.root("queue").unwrap().unwrap();
            assert_eq!(contents(&heap, queue), Vec::from(model.clone()), "{n}");
        }
    }
    std::panic::set_hook(quiet);
    assert!(model.len() > 50);
}

#[test]
fn a_pointer_leads_to_its_type_or_nowhere() {
    persistent! {
        struct Other { number: u64, text: Ptr<str>, next: Option<Ptr<Other>> }
    }
    let example = Example::new();
    let volume = attach(&example);
    let mut heap = Heap::open(&volume, "f").unwrap();
    let mut stray = None;
    let failed = heap.atomically(|tx| {
        stray = Some(tx.alloc([1u64; 4])?);
        Err::<(), _>(Error::Invalid("given up".into()))
    });
    assert!(failed.is_err());
    let stray = stray.unwrap();
    assert!(heap.get(stray).is_err(), "it was taken back");
    // The same block, or one of its size, for values of another type.
    let texts = heap.atomically(|tx| (0..1000).map(|_| tx.alloc_str(&"y".repeat(32))).collect());
    let texts: Vec<Ptr<str>> = texts.unwrap();
    assert!(heap.get(stray).is_err(), "it is of another type");
    assert_eq!(heap.get(texts[999]).unwrap().len(), 32);

    let slice = heap.atomically(|tx| tx.alloc_slice(&[1u8, 2, 3])).unwrap();
    assert!(
        heap.atomically(|tx| tx.at_mut(slice, 3).map(|_| ()))
            .is_err()
    );
    let empty = heap.atomically(|tx| tx.alloc_slice::<u64>(&[])).unwrap();
    assert_eq!(heap.get(empty).unwrap(), [0u64; 0]);

    // Names tell what a root leads to; a changed struct is another type.
    heap.root_or("q", || Queue {
        first: None,
        count: 0,
    })
    .unwrap();
    let other = heap.root::<Cell>("q");
    assert!(matches!(other, Err(Error::Invalid(_))), "{other:?}");
    let cell = heap.atomically(|tx| {
        let text = tx.alloc_str("")?;
        let cell = tx.alloc(Cell {
            number: 0,
            text,
            next: None,
        })?;
        tx.set_root("cell", cell)?;
        Ok(cell)
    });
    cell.unwrap();
    let changed = heap.root::<Other>("cell");
    assert!(matches!(changed, Err(Error::Invalid(_))), "{changed:?}");
    // So is one with a field whose type has changed, though all sizes are the same.
    mod before {
        mojim::persistent! {
            #[derive(Clone, Copy)]
            pub struct Point { pub x: i32, pub y: i32 }
        }
        mojim::persistent! {
            pub struct Line { pub ends: [Point; 2] }
        }
    }
    mod after {
        mojim::persistent! {
            pub struct Point { pub y: i32, pub x: i32 }
        }
        mojim::persistent! {
            pub struct Line { pub ends: [Point; 2] }
        }
    }
    let ends = [before::Point { x: 1, y: 2 }; 2];
    heap.root_or("line", || before::Line { ends }).unwrap();
    assert!(heap.root::<before::Line>("line").unwrap().is_some());
    assert!(heap.root::<after::Line>("line").is_err());
    heap.atomically(|tx| tx.remove_root("cell")).unwrap();
    assert_eq!(heap.root::<Cell>("cell").unwrap(), None);
}

/// A transaction within one would be taken back under references that safe code holds.
#[test]
fn transactions_do_not_nest_and_heaps_keep_their_volume() {
    let example = Example::new();
    let volume = attach(&example);
    let mut a = Heap::open(&volume, "a").unwrap();
    let mut b = Heap::open(&volume, "b").unwrap();
    let mut region = volume.map("r", 8).unwrap();
    assert!(matches!(Heap::open(&volume, "a"), Err(Error::Busy(_))));
    assert!(matches!(volume.remove("a"), Err(Error::Busy(_))));
    let n = a.root_or("n", || 1u64).unwrap();
    a.atomically(|tx| {
        assert!(b.atomically(|_| Ok(())).is_err());
        assert!(region.atomically(|_| Ok(())).is_err());
        *tx.get_mut(n)? += 1;
        Ok(())
    })
    .unwrap();
    assert!(matches!(b.get(n), Err(Error::Invalid(_))));
    assert!(matches!(volume.detach(), Err(Error::Busy(_))));
    assert_eq!(*a.get(n).unwrap(), 2);
    let taken = region.atomically(|tx| {
        tx.as_mut_slice::<u8>(3..5)?.fill(7);
        assert!(tx.as_mut_slice::<u64>(1..2).is_err());
        assert_eq!(tx.as_slice::<u8>()[4], 7);
        Err::<(), _>(Error::Invalid("given up".into()))
    });
    assert!(taken.is_err());
    assert_eq!(region.as_slice::<u8>(), [0; 8]);
    drop((a, b, region));
    let volume = attach(&example);
    let heap = Heap::open(&volume, "a").unwrap();
    assert_eq!(heap.root::<u64>("n").unwrap(), Some(n));
}

/// Threads take turns at a heap; each transaction is seen whole.
#[test]
fn threads_share_a_heap() {
    let example = Example::new();
    let volume = attach(&example);
    let mut heap = Heap::open(&volume, "f").unwrap();
    let cells = heap.atomically(|tx| tx.alloc_slice(&[100i64; 10])).unwrap();
    let heap = std::sync::RwLock::new(heap);
    std::thread::scope(|s| {
        for t in 0..3 {
            let heap = &heap;
            s.spawn(move || {
                for n in 0..50 {
                    let mut heap = heap.write().unwrap();
                    heap.atomically(|tx| {
                        *tx.at_mut(cells, (n + t) % 10)? -= 1;
                        *tx.at_mut(cells, n % 7)? += 1;
                        Ok(())
                    })
                    .unwrap();
                }
            });
        }
        for _ in 0..50 {
            let heap = heap.read().unwrap();
            assert_eq!(heap.get(cells).unwrap().iter().sum::<i64>(), 1000);
        }
    });
}

/// Through a region of its file safe code could change a heap under references to it, or make
/// pointers.
#[test]
fn a_file_has_regions_or_a_heap() {
    let example = Example::new();
    let volume = attach(&example);
    let mut heap = Heap::open(&volume, "h").unwrap();
    heap.root_or("n", || 1u64).unwrap();
    let region = volume.map("r", 8).unwrap();
    assert!(matches!(Heap::open(&volume, "r"), Err(Error::Busy(_))));
    // Also behind what the heap has mapped, and when it is closed.
    let behind = mojim::MapOptions::new().offset(1 << 30).len(8);
    let refused = || {
        assert!(matches!(volume.map("h", 0), Err(Error::Invalid(_))));
        let mapped = volume.map_with("h", &behind);
        assert!(matches!(mapped, Err(Error::Invalid(_))));
    };
    refused();
    drop(heap);
    refused();
    drop(Heap::open(&volume, "h").unwrap());
    drop(region);
    volume.map("r", 8).unwrap();
}

/// A block that a transaction allocates and frees was named twice among those that the heap gets
/// back: two values got the same block.
#[test]
fn a_block_is_given_back_once() {
    let example = Example::new();
    let volume = attach(&example);
    let mut heap = Heap::open(&volume, "h").unwrap();
    heap.atomically(|tx| {
        let kept = tx.alloc(0u64)?;
        for n in 1..9 {
            let freed = tx.alloc(n)?;
            tx.free(freed)?;
        }
        tx.free(kept)
    })
    .unwrap();
    let alloc = |n| heap.atomically(|tx| tx.alloc(n)).unwrap();
    let mut all: Vec<_> = (0..20u64).map(alloc).collect();
    all.sort_by_key(|p| format!("{p:?}"));
    all.dedup();
    assert_eq!(all.len(), 20);
}

/// A heap, or a region, that is dropped within another one's transaction.
#[test]
fn what_is_dropped_in_a_transaction_is_closed() {
    let example = Example::new();
    let volume = attach(&example);
    let mut a = Heap::open(&volume, "a").unwrap();
    let mut b = Heap::open(&volume, "b").unwrap();
    let c = Heap::open(&volume, "c").unwrap();
    let mut region = volume.map("r", 8).unwrap();
    region.as_mut_slice::<u8>()[0] = 1;
    let n = b.root_or("n", || 7u64).unwrap();
    let m = a.root_or("m", || 1u64).unwrap();
    a.atomically(|tx| {
        *tx.get_mut(m)? = 2;
        drop((b, region));
        // By another thread, which would wait for this transaction for ever.
        std::thread::scope(|s| s.spawn(move || drop(c)).join().unwrap());
        *tx.get_mut(m)? = 3;
        Ok(())
    })
    .unwrap();
    let b = Heap::open(&volume, "b").unwrap();
    assert_eq!(*b.get(n).unwrap(), 7);
    drop(Heap::open(&volume, "c").unwrap());
    assert_eq!(volume.map("r", 8).unwrap().as_slice::<u8>()[0], 0);
    drop((a, b));
    volume.detach().unwrap();
    let volume = attach(&example);
    assert_eq!(*Heap::open(&volume, "a").unwrap().get(m).unwrap(), 3);
}

/// A heap's struct is never freed, and kept its volume: its files stayed open, so that their file system
/// could not be unmounted.
#[test]
fn a_closed_heap_keeps_no_file_of_its_volume_open() {
    let example = Example::new();
    let home = example.config().parent().unwrap().to_owned();
    let open = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = all.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        links.filter(|to| to.starts_with(&home)).count()
    };
    let volume = attach(&example);
    let mut heap = Heap::open(&volume, "h").unwrap();
    heap.atomically(|tx| tx.alloc(1u64)).unwrap();
    assert!(open() > 0);
    drop(heap);
    drop(volume);
    assert_eq!(open(), 0);
}

/// 1000 bytes were taken, and 16 MiB made of them and of 2 MiB, without a word.
#[test]
fn a_heap_has_the_capacity_and_the_address_that_it_was_made_with() {
    const MIB: usize = 1 << 20;
    let example = Example::new();
    let volume = attach(&example);
    for (capacity, address) in [(1000, 0), (2 * MIB, 0), (16 * MIB + 1, 0), (0, 4096)] {
        let refused = Heap::open_at(&volume, "h", capacity, address).map(drop);
        let refused = refused.unwrap_err();
        assert!(matches!(refused, Error::Invalid(_)), "{refused}");
        assert!(refused.to_string().contains("1 MiB"), "{refused}");
    }
    let address = 0x2100_0000_0000;
    let mut heap = Heap::open_at(&volume, "h", 17 * MIB, address).unwrap();
    let n = heap.root_or("n", || 1u64).unwrap();
    let at = std::ptr::from_ref(heap.get(n).unwrap()) as usize;
    assert!((address..address + 17 * MIB).contains(&at), "{at:#x}");
    let bytes = vec![0u8; 20 * MIB];
    assert!(heap.atomically(|tx| tx.alloc_slice(&bytes)).is_err());
    drop(heap);
    // Of one that exists they are as they were.
    let heap = Heap::open_at(&volume, "h", 64 * MIB, 2 * address).unwrap();
    assert_eq!(std::ptr::from_ref(heap.get(n).unwrap()) as usize, at);
}
