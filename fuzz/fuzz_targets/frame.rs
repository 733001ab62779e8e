//! Any bytes as a frame, and as the body of every message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mojim_format::frame::{FRAME_MAGIC, WIRE_VERSION};
use mojim_format::message::*;
use mojim_format::{FRAME_LEN, Frame, crc32c};

fuzz_target!(|data: &[u8]| {
    header(data);
    if data.len() >= 28 {
        let mut b = data[..28].to_vec();
        b[..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        b[4] = WIRE_VERSION;
        let crc = crc32c(&b);
        b.extend_from_slice(&crc.to_le_bytes());
        header(&b);
    }
    messages(data);
    let mut b = data.to_vec();
    let crc = crc32c(&b);
    b.extend_from_slice(&crc.to_le_bytes());
    messages(&b);
});

fn header(b: &[u8]) {
    if let Ok(f) = Frame::decode(b) {
        assert_eq!(f.encode(), b[..FRAME_LEN]);
    }
}

fn messages(b: &[u8]) {
    same::<Hello>(b);
    same::<Welcome>(b);
    same::<Start>(b);
    same::<Started>(b);
    same::<Alive>(b);
    same::<Lane>(b);
    same::<CopyBegin>(b);
    same::<CopyStream>(b);
    same::<CopyFile>(b);
    same::<CopyData>(b);
    same::<CopyHave>(b);
    same::<CopySums>(b);
    same::<CopyWant>(b);
    // An unknown code reads as `Protocol`, so only the second reading agrees.
    if let Ok(r) = Refuse::decode(b) {
        assert_eq!(Refuse::decode(&r.encode()).as_ref(), Ok(&r));
    }
}

fn same<M: Message>(b: &[u8]) {
    if let Ok(m) = M::decode(b) {
        assert_eq!(m.encode(), b);
    }
}
