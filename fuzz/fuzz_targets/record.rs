//! Any bytes as a record: no panic, and what is accepted encodes to itself.
//!
//! A checksum that matches is never found by chance, so each input is also
//! tried with magic, length, last operation, checksum and end mark put right.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mojim_format::record::{MAX_OPS, RECORD_END, RECORD_MAGIC};
use mojim_format::{
    FORMAT_VERSION, OP_LEN, RECORD_HEADER_LEN, RECORD_OVERHEAD, RecordHeader, RecordView,
    RecordWriter, crc32c,
};

fuzz_target!(|data: &[u8]| {
    check(data);
    let mut b = data.to_vec();
    seal(&mut b);
    check(&b);
});

fn check(b: &[u8]) {
    if let Ok(h) = RecordHeader::decode(b) {
        assert!(h.lsn != 0 && h.epoch != 0 && h.len as usize >= RECORD_OVERHEAD);
    }
    if let Ok(v) = RecordView::trusted(b) {
        // Bytes that only look valid: reading must end, whatever it yields.
        assert!(v.ops().count() <= v.header.ops as usize);
    }
    let Ok(v) = RecordView::decode(b) else { return };
    let ops: Vec<_> = v.ops().collect();
    assert_eq!(ops.len(), v.header.ops as usize);
    let payload = ops.iter().map(|(_, p)| p.len()).sum();
    let mut out = vec![0xAA; RecordWriter::len_for(ops.len(), payload)];
    let mut w = RecordWriter::new(&mut out, ops.len());
    for (op, p) in &ops {
        assert_eq!(op.len as usize, p.len());
        w.op(*op);
    }
    for (_, p) in &ops {
        w.payload(p);
    }
    let h = v.header;
    let n = w.finish(h.volume, h.lsn, h.epoch, h.part, h.end, h.committed);
    assert_eq!(&out[..n], v.bytes());
}

fn seal(b: &mut Vec<u8>) {
    b.resize(b.len().max(RECORD_OVERHEAD), 0);
    let len = b.len();
    b[..4].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
    b[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    b[32..36].copy_from_slice(&(len as u32).to_le_bytes());
    let most = ((len - RECORD_OVERHEAD) / OP_LEN).min(MAX_OPS);
    let ops = u32::from_le_bytes(b[36..40].try_into().unwrap()) as usize % (most + 1);
    b[36..40].copy_from_slice(&(ops as u32).to_le_bytes());
    // The last operation takes what the others leave.
    let mut left = (len - RECORD_OVERHEAD - ops * OP_LEN) as u32;
    for i in 0..ops {
        let at = RECORD_HEADER_LEN + i * OP_LEN + 16;
        let own = u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
        let n = if i + 1 == ops { left } else { own.min(left) };
        b[at..at + 4].copy_from_slice(&n.to_le_bytes());
        left -= n;
    }
    let crc = crc32c(&b[..len - 8]);
    b[len - 8..len - 4].copy_from_slice(&crc.to_le_bytes());
    b[len - 4..].copy_from_slice(&RECORD_END.to_le_bytes());
}
