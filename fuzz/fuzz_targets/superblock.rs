//! Any bytes as a superblock, a catalogue and a pad.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mojim_format::catalog::{CATALOG_MAGIC, valid_file_name};
use mojim_format::pad::{PAD_LEN, PAD_MAGIC, Pad};
use mojim_format::superblock::SUPERBLOCK_MAGIC;
use mojim_format::{Catalog, FORMAT_VERSION, SUPERBLOCK_LEN, Superblock, crc32c};

fuzz_target!(|data: &[u8]| {
    superblock(data);
    catalog(data);
    pad(data);

    let mut b = data.to_vec();
    b.resize(SUPERBLOCK_LEN, 0);
    b[..8].copy_from_slice(&SUPERBLOCK_MAGIC);
    b[8..12].copy_from_slice(&(FORMAT_VERSION as u32).to_le_bytes());
    b[12..16].copy_from_slice(&(SUPERBLOCK_LEN as u32).to_le_bytes());
    seal(&mut b, SUPERBLOCK_LEN - 4);
    superblock(&b);

    let mut b = data.to_vec();
    b.resize(b.len().max(36), 0);
    b[..8].copy_from_slice(&CATALOG_MAGIC);
    b[8..10].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    let end = b.len() - 4;
    seal(&mut b, end);
    catalog(&b);

    let mut b = data.to_vec();
    b.resize(b.len().max(PAD_LEN), 0);
    b[..4].copy_from_slice(&PAD_MAGIC.to_le_bytes());
    b[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    seal(&mut b, PAD_LEN - 4);
    pad(&b);
});

fn seal(b: &mut [u8], at: usize) {
    let crc = crc32c(&b[..at]);
    b[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

fn superblock(b: &[u8]) {
    if let Ok(s) = Superblock::decode(b) {
        assert_eq!(s.encode()[..], b[..SUPERBLOCK_LEN]);
    }
}

fn catalog(b: &[u8]) {
    if let Ok(c) = Catalog::decode(b) {
        assert!(c.files.iter().all(|f| valid_file_name(&f.name)));
        match b[8] {
            // It is written in the present version.
            1 => assert_eq!(Catalog::decode(&c.encode()), Ok(c)),
            _ => assert_eq!(c.encode(), b),
        }
    }
}

fn pad(b: &[u8]) {
    if let Ok(p) = Pad::decode(b) {
        let mut out = [0xAA; PAD_LEN];
        p.encode(&mut out);
        assert_eq!(out, b[..PAD_LEN]);
    }
}
