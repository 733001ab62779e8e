//! The Rust interface: when an attachment ends, and what is refused so that slices stay sound.

use mojim::example::Example;
use mojim::{Batch, Error, Heap, MapOptions, Volume};

fn attach(example: &Example) -> Volume {
    Volume::attach(example.config(), "a", None).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_last_region_ends_the_attachment() {
    let example = Example::new();
    let volume = attach(&example);
    let mut region = volume.map("f", 16).unwrap();
    drop(volume);
    let cells = region.as_mut_slice::<u64>();
    cells[0] = 1;
    mojim::sync(&cells[0]).unwrap();
    cells[1] = 2; // in no sync point
    let busy = Volume::attach(example.config(), "a", None);
    assert!(matches!(busy, Err(Error::Busy(_))), "{busy:?}");
    drop(region);
    let volume = attach(&example);
    assert_eq!(volume.map("f", 16).unwrap().as_slice::<u64>(), [1, 0]);
    volume.detach().unwrap();
}

#[test]
fn a_batch_is_one_sync_point() {
    let example = Example::new();
    let volume = attach(&example);
    let mut a = volume.map("a", 8).unwrap();
    let mut b = volume.map("b", 8).unwrap();
    a.as_mut_slice::<u8>()[0] = 1;
    b.as_mut_slice::<u8>()[7] = 2;
    let batch = Batch::new().add(&a, 0..1).unwrap().add(&b, 7..).unwrap();
    let lsn = batch.commit().unwrap();
    assert_eq!(mojim::last_lsn(), lsn);
    assert!(Batch::new().add(&a, ..9).is_err());
    assert_eq!(Batch::new().commit().unwrap(), 0);
    volume.settle().unwrap();
    let bytes = |file| std::fs::read(volume.directory().join(file)).unwrap();
    assert_eq!((bytes("a")[0], bytes("b")[7]), (1, 2));
}

/// Two regions with the same bytes, or one whose bytes another process stores to, would be two
/// slices of them.
#[test]
fn bytes_are_shown_once() {
    let example = Example::new();
    let volume = attach(&example);
    let f = volume.map("f", 4096).unwrap();
    assert!(matches!(volume.map("f", 1), Err(Error::Busy(_))));
    // SAFETY: nothing is mapped.
    let shared = unsafe { volume.map_shared("f", &MapOptions::new()) };
    assert!(matches!(shared, Err(Error::Busy(_))));
    for changed in [
        volume.truncate("f", 1),
        volume.remove("f"),
        volume.rename("f", "g"),
    ] {
        assert!(matches!(changed, Err(Error::Busy(_))), "{changed:?}");
    }
    volume.create("g").unwrap();
    assert!(matches!(volume.rename("g", "f"), Err(Error::Busy(_))));
    drop(f);
    volume.rename("g", "f").unwrap();
    // SAFETY: no slices are made.
    let shared = unsafe { volume.map_shared("f", &MapOptions::new().len(8)) };
    assert_eq!(shared.unwrap().len(), 8);
    drop(volume);

    let path = example.config();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(
        &path,
        text.replace("[node.a]", "working = \"shared\"\n[node.a]"),
    )
    .unwrap();
    let volume = attach(&example);
    assert!(matches!(volume.map("f", 8), Err(Error::Unsupported(_))));
}

#[test]
fn a_region_replaces_memory_and_no_region() {
    let example = Example::new();
    let volume = attach(&example);
    // The addresses of a region that was dropped were another thread's by the time that they were
    // mapped over: the whole program crashed, once in ten runs.
    let (none, new) = (
        rustix::mm::ProtFlags::empty(),
        rustix::mm::MapFlags::PRIVATE,
    );
    // SAFETY: new memory, at an address of the system's choice.
    let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 4096, none, new) };
    let at = at.unwrap() as usize;
    // SAFETY: memory of this test alone.
    let mut f =
        unsafe { volume.map_fixed("f", at, &MapOptions::new().create(true).len(8)) }.unwrap();
    assert_eq!(f.as_mut_slice::<u8>().as_ptr() as usize, at);
    // SAFETY: it is refused.
    let again = unsafe { volume.map_fixed("g", at, &MapOptions::new().create(true).len(8)) };
    assert!(matches!(again, Err(Error::Busy(_))), "{again:?}");
    let at = volume.map_with("h", &MapOptions::new().create(true).len(8).at(at));
    assert!(matches!(at, Err(Error::Busy(_))), "{at:?}");
}

#[test]
#[should_panic(expected = "read only")]
fn a_region_to_be_read_has_no_mutable_slice() {
    let example = Example::new();
    let volume = attach(&example);
    drop(volume.map("f", 8).unwrap());
    let mut f = volume
        .map_with("f", &MapOptions::new().read_only(true))
        .unwrap();
    f.as_mut_slice::<u8>();
}

#[test]
fn a_region_without_tracking_commits_what_it_is_told() {
    let example = Example::new();
    let volume = attach(&example);
    let options = MapOptions::new().create(true).len(1 << 20).untracked(true);
    let mut f = volume.map_with("f", &options).unwrap();
    f.populate(..).unwrap();
    f.as_mut_slice::<u8>()[..100_000].fill(3);
    f.sync(10..20).unwrap();
    f.rollback(..).unwrap();
    let is: Vec<usize> = (0..f.len())
        .filter(|i| f.as_slice::<u8>()[*i] == 3)
        .collect();
    assert_eq!(is, (10..20).collect::<Vec<_>>());
}

#[test]
fn threads_may_have_all_but_transactions() {
    fn both<T: Send + Sync>() {}
    both::<Volume>();
    both::<mojim::Region>();
    both::<mojim::Heap>();
    both::<mojim::Reader>();
    both::<Batch<'_>>();
    both::<mojim::Ptr<str>>();
    both::<MapOptions>();
    both::<Error>();
}

/// A panic that leaves a transaction takes it back; the region can be used on.
#[test]
fn a_panic_takes_a_transaction_of_a_region_back() {
    let example = Example::new();
    let volume = attach(&example);
    let mut region = volume.map("f", 24).unwrap();
    let mut changed = |n: u64, ends: fn()| {
        region.atomically(|tx| {
            tx.as_mut_slice::<u64>(0..2)?.fill(n);
            tx.as_mut_slice::<u64>(1..)?.fill(n + 1);
            ends();
            Ok(())
        })
    };
    changed(1, || ()).unwrap();
    let panics = || changed(5, || std::panic::resume_unwind(Box::new("given up")));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"given up"));
    assert_eq!(region.as_slice::<u64>(), [1, 2, 2]);
    region
        .atomically(|tx| tx.as_mut_slice::<u64>(2..).map(|last| last.fill(9)))
        .unwrap();
    drop(region);
    assert_eq!(volume.map("f", 24).unwrap().as_slice::<u64>(), [1, 2, 9]);
}

/// A sync point within a transaction committed half of it: what failed was taken back in memory, and
/// was there in the next run.
#[test]
fn a_transaction_is_the_only_sync_point_of_its_thread() {
    let example = Example::new();
    let volume = attach(&example);
    let mut heap = Heap::open(&volume, "heap").unwrap();
    let mut region = volume.map("region", 16).unwrap();
    let mut other = volume.map("other", 16).unwrap();
    drop(volume.map("file", 8).unwrap());
    other.as_mut_slice::<u64>()[0] = 2;
    let pair = heap.root_or("pair", || [1u64, 1]).unwrap();
    let mut done = Vec::new();
    let failed = heap.atomically(|tx| {
        let pair = tx.get_mut(pair)?;
        pair[0] = 2;
        let batch = Batch::new().add(&other, ..)?;
        let by_another = std::thread::scope(|s| s.spawn(|| mojim::sync(&*pair)).join().unwrap());
        done.extend([mojim::sync(&pair[0]), by_another, mojim::sync(&[0u8; 0])]);
        done.extend([other.sync(..8), other.sync_all(), other.begin_sync(..8)]);
        done.extend([batch.commit(), batch.begin()]);
        let none = |()| 0;
        done.push(volume.create("made").map(u64::from));
        done.push(volume.truncate("file", 4).map(none));
        done.push(volume.rename("file", "made").map(none));
        done.push(volume.remove("file").map(none));
        done.push(volume.map("made", 8).map(|_| 0));
        done.push(volume.map("file", 16).map(|_| 0));
        done.push(Heap::open(&volume, "made").map(|_| 0));
        // What changes nothing is allowed.
        assert_eq!(volume.map("file", 8)?.as_slice::<u64>(), [0]);
        Err::<(), _>(Error::Invalid("given up".into()))
    });
    assert!(failed.is_err());
    let failed = region.atomically(|tx| {
        let numbers = tx.as_mut_slice::<u64>(..)?;
        numbers[1] = 2;
        done.extend([mojim::sync(&numbers[1]), other.sync(..)]);
        Err::<(), _>(Error::Invalid("given up".into()))
    });
    assert!(failed.is_err());
    let wrong = done
        .iter()
        .position(|d| !matches!(d, Err(Error::Invalid(_))));
    assert_eq!(wrong, None, "{done:?}");
    let e = done.swap_remove(0).unwrap_err().to_string();
    assert!(e.contains("a transaction is open in this thread"), "{e}");
    // Nor of the values that only transactions change.
    let of_heap = mojim::sync(heap.get(pair).unwrap());
    assert!(matches!(of_heap, Err(Error::Invalid(_))), "{of_heap:?}");

    drop((heap, region, other));
    volume.detach().unwrap();
    let volume = attach(&example);
    let heap = Heap::open(&volume, "heap").unwrap();
    assert_eq!(heap.get(pair).unwrap(), &[1, 1]);
    for (file, size) in [("region", 16), ("other", 16), ("file", 8)] {
        let bytes = volume.map(file, 0).unwrap();
        assert_eq!(bytes.as_slice::<u8>(), vec![0; size], "{file}");
    }
    assert_eq!(volume.size("made").unwrap(), None);
}

/// An error's text says what was wrong: each of these named other things.
#[test]
fn errors_say_what_was_wrong() {
    let example = Example::new();
    let volume = attach(&example);
    let mut region = volume.map("f", 80).unwrap();
    let says = |e: Error, part: &str| {
        let text = e.to_string();
        assert!(text.contains(part), "{text}");
        assert!(text.len() < 300, "{text}");
        // `main` shows an error that it returns in this way.
        assert_eq!(format!("{e:?}"), text);
    };
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let turned = 8..4;
    let e = region.sync(turned.clone()).unwrap_err();
    says(e, "8..4 begins behind its end");
    says(region.sync(8..81).unwrap_err(), "beyond the 80 bytes");
    let e = region.atomically(|tx| tx.as_mut_slice::<u64>(turned).map(drop));
    says(e.unwrap_err(), "8..4 begins behind its end");
    let e = region.atomically(|tx| tx.as_mut_slice::<u64>(8..11).map(drop));
    says(e.unwrap_err(), "beyond the 10 values");
    says(
        mojim::sync(&region).unwrap_err(),
        "sync takes the value itself",
    );
    says(volume.rename("f", "g").unwrap_err(), "drop them first");
    let long = "x".repeat(5000);
    says(volume.create(&long).unwrap_err(), "cannot name a file");
    says(volume.rename("f", &long).unwrap_err(), "drop them first");
    let options = MapOptions::new().create(true).len(8).at(1);
    let e = volume.map_with("g", &options).unwrap_err();
    says(e, "not a multiple of the page size");
    let e = volume.map("f", 8).unwrap_err();
    assert!(!e.to_string().contains("MOJIM_"), "{e}");
    says(e, "mapped already");
    drop(region);
    says(volume.rename("f", &long).unwrap_err(), "cannot name a file");
}
