//! Mutations of valid encodings, from a seed: no decoder panics, and what one
//! accepts encodes to the very bytes that were read.
//!
//! The short form of `fuzz/`, for every test run. Half of the mutations get their checksum put
//! right, or nothing behind it would ever be reached. The same samples are the seeds in
//! `fuzz/seeds`. After a change of format,
//! `MOJIM_WRITE_SEEDS=1 cargo test -p mojim-format --test fuzz_short` writes them again.

use std::path::Path;

use mojim_format::frame::Frame;
use mojim_format::message::*;
use mojim_format::pad::{PAD_LEN, Pad};
use mojim_format::{
    Catalog, CatalogEntry, EpochStart, FRAME_LEN, FrameKind, Op, OpKind, RecordHeader, RecordView,
    RecordWriter, SUPERBLOCK_LEN, State, Superblock, View, crc32c,
};

/// Mutations of each kind of sample.
const ROUNDS: usize = if cfg!(miri) { 50 } else { 1_000_000 };

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// LSN, epoch, part, whether it is the last, committed LSN.
type Place = (u64, u64, u32, bool, u64);

fn record(ops: &[(u32, OpKind, u64, &[u8])], place: Place) -> Vec<u8> {
    let payload = ops.iter().map(|o| o.3.len()).sum();
    let mut b = vec![0xAA; RecordWriter::len_for(ops.len(), payload)];
    let mut w = RecordWriter::new(&mut b, ops.len());
    for &(file, kind, offset, p) in ops {
        let len = p.len() as u32;
        w.op(Op {
            file,
            kind,
            offset,
            len,
        });
    }
    for o in ops {
        w.payload(o.3);
    }
    let (lsn, epoch, part, end, committed) = place;
    w.finish(9, lsn, epoch, part, end, committed);
    b
}

fn records() -> Vec<Vec<u8>> {
    use OpKind::*;
    vec![
        record(&[], (1, 1, 0, true, 0)),
        record(
            &[(1, Write, 16, b"four"), (1, Write, 8, b"8 bytes.")],
            (7, 2, 0, true, 6),
        ),
        record(
            &[(5, Create, 0, b"dir/name"), (5, Resize, 4096, b"")],
            (8, 2, 0, true, 7),
        ),
        record(
            &[(5, Rename, 0, b"other"), (4, Remove, 0, b"")],
            (9, 2, 3, false, 5),
        ),
        record(
            &[(0, Spill, 1 << 30, &77u64.to_le_bytes())],
            (1 << 33, 2, 0, true, (1 << 33) - 9),
        ),
    ]
}

fn history() -> Vec<EpochStart> {
    vec![
        EpochStart {
            epoch: 1,
            first_lsn: 1,
        },
        EpochStart {
            epoch: 4,
            first_lsn: 900,
        },
    ]
}

fn messages() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        (
            "hello",
            Hello {
                cluster: "example".into(),
                volume: "orders".into(),
                from: "a".into(),
                to: "b".into(),
                volume_id: 5,
                view: 3,
                epoch: 6,
                attach: true,
                backup: false,
                lanes: 2,
                tail: 9,
                history: history(),
            }
            .encode(),
        ),
        (
            "welcome",
            Welcome {
                volume_id: 5,
                state: State::Whole,
                member: true,
                tail: 8,
                known: 9,
                level: 3,
                life: 6,
                max_file: 7,
                max_part: 255,
                max_name: 4000,
                history: history(),
            }
            .encode(),
        ),
        (
            "refuse",
            Refuse {
                code: RefuseCode::Busy,
                epoch: 3,
                text: "in use".into(),
            }
            .encode(),
        ),
        (
            "start",
            Start {
                epoch: 6,
                primary: "a".into(),
                volume_id: 5,
                member: true,
                keep: u64::MAX,
                history: history(),
            }
            .encode(),
        ),
        (
            "started",
            Started {
                session: 7,
                life: 9,
            }
            .encode(),
        ),
        (
            "alive",
            Alive {
                outbid: 0,
                applied: 8,
                bytes: 1 << 30,
                files: 1000,
                block: 4096,
            }
            .encode(),
        ),
        (
            "lane",
            Lane {
                cluster: "example".into(),
                volume: "orders".into(),
                lane: 1,
                session: 7,
                position: 512,
                ring: 65536,
                align: 64,
            }
            .encode(),
        ),
        (
            "copybegin",
            CopyBegin {
                volume_id: 5,
                lsn: 8,
                files: 1,
                bytes: 10,
                copy: 77,
                history: history(),
            }
            .encode(),
        ),
        (
            "copyfile",
            CopyFile {
                id: 1,
                size: 10,
                name: "dir/x".into(),
            }
            .encode(),
        ),
        (
            "copydata",
            CopyData {
                id: 1,
                offset: 4,
                bytes: b"012345".to_vec(),
            }
            .encode(),
        ),
        ("copyhave", CopyHave { id: 1, size: 9000 }.encode()),
        (
            "copysums",
            CopySums {
                id: 1,
                offset: 4096,
                sums: vec![[7; SUM_LEN], [9; SUM_LEN]],
            }
            .encode(),
        ),
        (
            "copystream",
            CopyStream {
                cluster: "example".into(),
                volume: "orders".into(),
                copy: 77,
            }
            .encode(),
        ),
        (
            "copywant",
            CopyWant {
                id: 1,
                offset: 4096,
                pages: vec![3],
            }
            .encode(),
        ),
    ]
}

fn frames() -> Vec<Vec<u8>> {
    [
        (FrameKind::Record, 104),
        (FrameKind::Ack, 0),
        (FrameKind::Hello, 80),
    ]
    .into_iter()
    .map(|(kind, body)| {
        Frame {
            kind,
            flags: 1,
            epoch: 4,
            lsn: 77,
            body,
        }
        .encode()
        .to_vec()
    })
    .collect()
}

fn superblock() -> Vec<u8> {
    Superblock {
        version: mojim_format::superblock::SUPERBLOCK_VERSION,
        sequence: 3,
        volume_id: 99,
        promised: 5,
        view: View {
            epoch: 4,
            primary: "a".into(),
            mirror: "b".into(),
        },
        checkpoint: 1000,
        boot_id: [7; 16],
        incarnation: 1,
        state: State::Whole,
        log_size: 1 << 20,
        align: 512,
        logs: 77,
        cluster: "example".into(),
        volume: "orders".into(),
        node: "a".into(),
        starts: vec![512, 1024],
        history: history(),
        life: 12,
        ring_lost: false,
        renewed: false,
        awaits_copy: false,
        nonce: 0x4e,
        nonce_before: 0,
        logged: 0,
    }
    .encode()
    .to_vec()
}

fn catalog() -> Vec<u8> {
    let file = |id, size, name: &str| CatalogEntry {
        id,
        size,
        name: name.into(),
    };
    Catalog {
        volume: 9,
        lsn: 8,
        begun: (2, 9),
        files: vec![file(1, 4096, "log"), file(4, 0, "sub/dir/file")],
    }
    .encode()
}

fn pad() -> Vec<u8> {
    let mut b = vec![0; PAD_LEN];
    Pad { volume: 9, lsn: 8 }.encode(&mut b);
    b
}

fn mutate(rng: &mut Rng, b: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=rng.below(4) {
        let n = b.len();
        let at = rng.below(n);
        match rng.below(8) {
            0 if n > 0 => b[at] ^= 1 << rng.below(8),
            1 if n > 0 => b[at] = [0, 1, 2, 0x7f, 0x80, 0xff, rng.next() as u8][rng.below(7)],
            2 | 3 if n > 0 => {
                // A whole number, where one may stand.
                let width = [2, 4, 8][rng.below(3)];
                let at = at / 2 * 2;
                let v = [0, 1, u64::MAX, 1 << 31, 1 << 63, n as u64, rng.next()][rng.below(7)];
                let to = n.min(at + width);
                b[at..to].copy_from_slice(&v.to_le_bytes()[..to - at]);
            }
            4 => b.truncate(at),
            5 => {
                let to = at + rng.below((n - at).min(64) + 1);
                let piece = b[at..to].to_vec();
                b.splice(at..at, piece);
            }
            6 => {
                let to = at + rng.below((n - at).min(64) + 1);
                b.drain(at..to);
            }
            _ => {
                let from = rng.below(other.len());
                let k = rng.below(other.len() - from).min(n - at.min(n));
                b[at..at + k].copy_from_slice(&other[from..from + k]);
            }
        }
    }
}

/// Mutates `samples`; `seal` puts right what the decoder checks first, `check`
/// says whether it accepted.
fn fuzz(
    seed: u64,
    samples: &[Vec<u8>],
    seal: impl Fn(&mut Vec<u8>),
    check: impl Fn(&[u8]) -> bool,
) {
    let mut rng = Rng(seed);
    assert!(samples.iter().all(|s| check(s)), "a sample is refused");
    let mut accepted = 0;
    for _ in 0..ROUNDS {
        let mut b = samples[rng.below(samples.len())].clone();
        let other = &samples[rng.below(samples.len())];
        mutate(&mut rng, &mut b, other);
        if rng.below(2) == 0 {
            seal(&mut b);
        }
        accepted += check(&b) as usize;
    }
    assert!(
        cfg!(miri) || accepted > ROUNDS / 100,
        "{accepted} accepted: too few to say anything"
    );
}

fn crc_at_end(b: &mut Vec<u8>) {
    let n = b.len().max(4) - 4;
    b.resize(n + 4, 0);
    let crc = crc32c(&b[..n]);
    b[n..].copy_from_slice(&crc.to_le_bytes());
}

fn check_record(b: &[u8]) -> bool {
    let _ = RecordHeader::decode(b);
    if let Ok(v) = RecordView::trusted(b) {
        assert!(v.ops().count() <= v.header.ops as usize);
    }
    let Ok(v) = RecordView::decode(b) else {
        return false;
    };
    let ops: Vec<_> = v
        .ops()
        .map(|(o, p)| (o.file, o.kind, o.offset, p))
        .collect();
    let h = v.header;
    let mut again = record(&ops, (h.lsn, h.epoch, h.part, h.end, h.committed));
    again[8..16].copy_from_slice(&h.volume.to_le_bytes());
    seal_record(&mut again);
    assert_eq!(again, v.bytes());
    true
}

fn seal_record(b: &mut Vec<u8>) {
    let n = b.len().max(8);
    b.resize(n, 0);
    let crc = crc32c(&b[..n - 8]);
    b[n - 8..n - 4].copy_from_slice(&crc.to_le_bytes());
    b[n - 4..].copy_from_slice(b"MJRE");
}

#[test]
fn mutated_records() {
    fuzz(1, &records(), seal_record, check_record);
}

#[test]
fn mutated_frames() {
    let check = |b: &[u8]| Frame::decode(b).is_ok_and(|f| f.encode() == b[..FRAME_LEN]);
    let seal = |b: &mut Vec<u8>| {
        b.truncate(FRAME_LEN);
        crc_at_end(b);
    };
    fuzz(2, &frames(), seal, |b| {
        assert_eq!(Frame::decode(b).is_ok(), check(b));
        check(b)
    });
}

fn same<M: Message>(b: &[u8]) -> bool {
    let Ok(m) = M::decode(b) else { return false };
    assert_eq!(m.encode(), b);
    true
}

#[test]
fn mutated_messages() {
    let samples: Vec<_> = messages().into_iter().map(|m| m.1).collect();
    fuzz(3, &samples, crc_at_end, |b| {
        // An unknown code reads as `Protocol`: only the second reading agrees.
        let refuse = Refuse::decode(b).ok();
        if let Some(r) = &refuse {
            assert_eq!(Refuse::decode(&r.encode()).as_ref(), Ok(r));
        }
        // No short circuit: every decoder sees every mutation.
        same::<Hello>(b)
            | same::<Welcome>(b)
            | same::<Start>(b)
            | same::<Started>(b)
            | same::<Lane>(b)
            | same::<CopyBegin>(b)
            | same::<CopyStream>(b)
            | same::<CopyFile>(b)
            | same::<CopyData>(b)
            | same::<CopyHave>(b)
            | same::<CopySums>(b)
            | same::<CopyWant>(b)
            | refuse.is_some()
    });
}

#[test]
fn mutated_superblocks() {
    let seal = |b: &mut Vec<u8>| {
        b.resize(SUPERBLOCK_LEN, 0);
        crc_at_end(b);
    };
    fuzz(4, &[superblock()], seal, |b| {
        let Ok(s) = Superblock::decode(b) else {
            return false;
        };
        assert_eq!(s.encode()[..], b[..SUPERBLOCK_LEN]);
        true
    });
}

#[test]
fn mutated_catalogues() {
    fuzz(5, &[catalog()], crc_at_end, |b| {
        let Ok(c) = Catalog::decode(b) else {
            return false;
        };
        match b[8] {
            // It is written in the present version.
            1 => assert_eq!(Catalog::decode(&c.encode()), Ok(c)),
            _ => assert_eq!(c.encode(), b),
        }
        true
    });
}

#[test]
fn mutated_pads() {
    let seal = |b: &mut Vec<u8>| {
        b.truncate(PAD_LEN);
        crc_at_end(b);
    };
    fuzz(6, &[pad()], seal, |b| {
        let Ok(p) = Pad::decode(b) else { return false };
        let mut again = [0xAA; PAD_LEN];
        p.encode(&mut again);
        assert_eq!(again, b[..PAD_LEN]);
        true
    });
}

#[test]
fn the_fuzzers_seeds_are_of_this_format() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
    let mut seeds = Vec::new();
    for (i, b) in records().into_iter().enumerate() {
        seeds.push((format!("record/{i}"), b));
    }
    for (i, b) in frames().into_iter().enumerate() {
        seeds.push((format!("frame/{i}"), b));
    }
    for (name, b) in messages() {
        // Without its checksum: the target adds one.
        seeds.push((format!("frame/{name}"), b[..b.len() - 4].to_vec()));
    }
    seeds.push(("superblock/superblock".into(), superblock()));
    seeds.push(("superblock/catalog".into(), catalog()));
    seeds.push(("superblock/pad".into(), pad()));
    let write = std::env::var_os("MOJIM_WRITE_SEEDS").is_some();
    for (name, b) in seeds {
        let path = root.join(name);
        if write {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &b).unwrap();
        }
        let found = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(
            found,
            b,
            "{}: run again with MOJIM_WRITE_SEEDS=1",
            path.display()
        );
    }
}
