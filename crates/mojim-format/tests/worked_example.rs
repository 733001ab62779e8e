//! `docs/reference/format.md` against the code: its hex dumps are what the encoders
//! yield and the decoders read, its tables have the code's sizes and no gaps.

use std::collections::BTreeMap;

use mojim_format::frame::{MAX_BODY, WIRE_VERSION};
use mojim_format::message::{Message, Started};
use mojim_format::pad::{PAD_LEN, Pad};
use mojim_format::record::{MAX_OPS, MAX_RECORD};
use mojim_format::superblock::{MAX_HISTORY, SUPERBLOCK_VERSION};
use mojim_format::*;

const DOCUMENT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/reference/format.md"
);
const VOLUME: u64 = 0x1122_3344_5566_7788;

fn document() -> String {
    std::fs::read_to_string(DOCUMENT).expect("the document is there")
}

/// The bytes of the block that begins with "```text NAME".
fn hex(name: &str) -> Vec<u8> {
    let text = document();
    let head = format!("```text {name}\n");
    let block = text
        .split_once(&head)
        .unwrap_or_else(|| panic!("no block {name}"))
        .1;
    let block = block.split_once("```").expect("the block ends").0;
    let mut out = Vec::new();
    for line in block.lines() {
        let mut words = line.split(';').next().unwrap().split_whitespace();
        let at = usize::from_str_radix(words.next().expect("an offset"), 16).unwrap();
        assert_eq!(at, out.len(), "{name}: {line}");
        out.extend(words.map(|w| u8::from_str_radix(w, 16).unwrap()));
    }
    out
}

#[test]
fn the_record() {
    let b = hex("record");
    let v = RecordView::decode(&b).unwrap();
    let h = v.header;
    assert_eq!((h.volume, h.lsn, h.epoch), (VOLUME, 7, 2));
    assert_eq!((h.part, h.end, h.committed), (0, true, 6));
    let ops: Vec<_> = v.ops().collect();
    let value = 42u32.to_le_bytes();
    let pointer = 16u64.to_le_bytes();
    let op = |offset, len| Op {
        file: 1,
        kind: OpKind::Write,
        offset,
        len,
    };
    assert_eq!(ops, [(op(16, 4), &value[..]), (op(8, 8), &pointer[..])]);

    let mut out = vec![0xAA; RecordWriter::len_for(2, 12)];
    let mut w = RecordWriter::new(&mut out, 2);
    w.op(op(16, 4));
    w.op(op(8, 8));
    w.payload(&value);
    w.payload(&pointer);
    assert_eq!(w.finish(VOLUME, 7, 2, 0, true, 6), b.len());
    assert_eq!(out, b);
}

#[test]
fn the_frames() {
    let record = Frame {
        kind: FrameKind::Record,
        flags: 0,
        epoch: 3,
        lsn: 6,
        body: hex("record").len() as u32,
    };
    let ack = Frame {
        kind: FrameKind::Ack,
        flags: Level::Disk as u16,
        epoch: 3,
        lsn: 7,
        body: 0,
    };
    for (name, f) in [("frame", record), ("acknowledgement", ack)] {
        assert_eq!(Frame::decode(&hex(name)), Ok(f));
        assert_eq!(f.encode()[..], hex(name));
    }
}

#[test]
fn the_pad() {
    let pad = Pad {
        volume: VOLUME,
        lsn: 7,
    };
    assert_eq!(Pad::decode(&hex("pad")), Ok(pad));
    let mut out = [0xAA; PAD_LEN];
    pad.encode(&mut out);
    assert_eq!(out[..], hex("pad"));
}

#[test]
fn the_catalogue_and_the_message() {
    let c = Catalog {
        volume: VOLUME,
        lsn: 5,
        begun: (3, 6),
        files: vec![CatalogEntry {
            id: 1,
            size: 4096,
            name: "list".into(),
        }],
    };
    assert_eq!(Catalog::decode(&hex("catalogue")), Ok(c.clone()));
    assert_eq!(c.encode(), hex("catalogue"));
    let s = Started {
        session: 0x0102_0304_0506_0708,
        life: 9,
    };
    assert_eq!(Started::decode(&hex("started")), Ok(s));
    assert_eq!(s.encode(), hex("started"));
}

#[test]
fn the_superblock() {
    let s = Superblock {
        version: mojim_format::superblock::SUPERBLOCK_VERSION,
        sequence: 9,
        volume_id: VOLUME,
        promised: 3,
        view: View {
            epoch: 3,
            primary: "a".into(),
            mirror: "b".into(),
        },
        checkpoint: 5,
        boot_id: [0; 16],
        incarnation: 0xab_cdef,
        state: State::Whole,
        log_size: 1 << 20,
        align: 512,
        logs: 0x1234_5678,
        cluster: "example".into(),
        volume: "orders".into(),
        node: "b".into(),
        starts: vec![1024],
        history: vec![
            EpochStart {
                epoch: 2,
                first_lsn: 1,
            },
            EpochStart {
                epoch: 3,
                first_lsn: 8,
            },
        ],
        life: 0,
        ring_lost: false,
        renewed: false,
        awaits_copy: false,
        nonce: 0x4e,
        nonce_before: 0,
        logged: 0,
    };
    let b = s.encode();
    let shown = hex("superblock");
    assert_eq!(shown.len(), 128);
    assert_eq!(shown, b[..128]);
    // What is not shown stands where the table says.
    assert_eq!(b[169..176], *b"\x06orders");
    assert_eq!(b[234..236], *b"\x01b");
    assert_eq!(b[299..301], *b"\x01a");
    assert_eq!(b[364..366], *b"\x01b");
    assert_eq!(b[432..440], 1024u64.to_le_bytes());
    assert_eq!(b[944 + 16 + 8..944 + 32], 8u64.to_le_bytes());
    assert_eq!(b[3008..3016], 0x4eu64.to_le_bytes());
    assert_eq!(b[4092..], crc32c(&b[..4092]).to_le_bytes());
    assert_eq!(Superblock::decode(&b[..]), Ok(s));
}

/// The rows of the first table behind `mark`, as their cells.
fn table(text: &str, mark: &str) -> Vec<Vec<String>> {
    let rest = text
        .split_once(mark)
        .unwrap_or_else(|| panic!("no {mark:?}"))
        .1;
    rest.lines()
        .skip_while(|l| !l.starts_with('|'))
        .take_while(|l| l.starts_with('|'))
        .skip(2)
        .map(|l| {
            l.trim_matches('|')
                .split('|')
                .map(|c| c.trim().to_owned())
                .collect()
        })
        .collect()
}

#[test]
fn the_constants_are_the_codes() {
    let told: BTreeMap<String, u64> = table(&document(), "# Formats")
        .into_iter()
        .filter_map(|r| Some((r[0].trim_matches('`').to_owned(), r[1].parse().ok()?)))
        .collect();
    let ours = [
        ("FORMAT_VERSION", FORMAT_VERSION as usize),
        ("SUPERBLOCK_VERSION", SUPERBLOCK_VERSION as usize),
        ("WIRE_VERSION", WIRE_VERSION as usize),
        ("RECORD_HEADER_LEN", RECORD_HEADER_LEN),
        ("OP_LEN", OP_LEN),
        ("RECORD_TRAILER_LEN", RECORD_TRAILER_LEN),
        ("RECORD_OVERHEAD", RECORD_OVERHEAD),
        ("MAX_OPS", MAX_OPS),
        ("MAX_RECORD", MAX_RECORD),
        ("FRAME_LEN", FRAME_LEN),
        ("MAX_BODY", MAX_BODY),
        ("PAD_LEN", PAD_LEN),
        ("SUPERBLOCK_LEN", SUPERBLOCK_LEN),
        ("MAX_HISTORY", MAX_HISTORY),
        ("MAX_LANES", MAX_LANES),
        ("MAX_NAME", MAX_NAME),
        ("MAX_FILE_NAME", MAX_FILE_NAME),
    ];
    let ours: BTreeMap<String, u64> = ours
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v as u64))
        .collect();
    assert_eq!(told, ours);
}

#[test]
fn the_layouts_have_no_gaps_and_the_codes_sizes() {
    let text = document();
    let sizes = BTreeMap::from([
        ("record header", RECORD_HEADER_LEN),
        ("operation", OP_LEN),
        ("record trailer", RECORD_TRAILER_LEN),
        ("log control page", 4096),
        ("pad", PAD_LEN),
        ("superblock", SUPERBLOCK_LEN),
        ("frame", FRAME_LEN),
    ]);
    let mut seen = 0;
    for mark in text.lines().filter(|l| l.starts_with("<!-- layout: ")) {
        let inner = mark
            .trim_start_matches("<!-- layout: ")
            .trim_end_matches(" -->");
        let (name, total) = inner.split_once(", ").expect("name, size");
        assert_eq!(sizes.get(name), Some(&total.parse().unwrap()), "{name}");
        let mut at = 0;
        for row in table(&text, mark) {
            let (offset, size): (usize, usize) = (row[0].parse().unwrap(), row[1].parse().unwrap());
            assert_eq!(offset, at, "{name}: {}", row[2]);
            at += size;
        }
        assert_eq!(at, sizes[name], "{name}");
        seen += 1;
    }
    assert_eq!(seen, sizes.len());
}

#[test]
fn the_kinds_are_the_codes() {
    let text = document();
    let rows = table(&text, "before the body's length is used");
    assert_eq!(rows.len(), FrameKind::CopyStream as usize);
    for row in rows {
        let number: u8 = row[0].parse().unwrap();
        let mut b = Frame {
            kind: FrameKind::Ack,
            flags: 0,
            epoch: 1,
            lsn: 1,
            body: 0,
        }
        .encode();
        b[5] = number;
        let crc = crc32c(&b[..28]);
        b[28..].copy_from_slice(&crc.to_le_bytes());
        let f = Frame::decode(&b).expect("a kind that the code knows");
        assert_eq!(format!("{:?}", f.kind), row[1]);
    }
}
