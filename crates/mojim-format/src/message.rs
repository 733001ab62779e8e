//! The bodies of all frames but records: small messages of a session.
//!
//! Each body ends with the CRC-32C of the bytes before it. Texts are bounded.
//! Nothing is allocated in proportion to a number that was merely read.
//! `docs/reference/protocol.md` describes what the messages mean.

use crate::bytes::{Reader, Writer, u32_at};
use crate::superblock::{EpochStart, MAX_HISTORY, State};
use crate::{FormatError, MAX_FILE_NAME, MAX_NAME, crc32c};

const WHAT: &str = "message";

/// A message that can be a frame's body.
pub trait Message: Sized {
    /// Appends the fields, without the checksum.
    fn put(&self, w: &mut Writer<'_>);
    /// Reads the fields; the caller checks for trailing bytes.
    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError>;

    /// The body's bytes, checksum included.
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut Writer(&mut out));
        let crc = crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out
    }

    /// Validates and reads a body.
    fn decode(b: &[u8]) -> Result<Self, FormatError> {
        let fields = checked(b)?;
        let mut r = Reader::new(WHAT, fields);
        let m = Self::get(&mut r)?;
        if r.left() != 0 {
            return Err(FormatError::Field {
                what: WHAT,
                field: "length",
                value: b.len() as u64,
            });
        }
        Ok(m)
    }
}

/// Checks a body's checksum and returns its fields.
pub fn checked(b: &[u8]) -> Result<&[u8], FormatError> {
    let Some(n) = b.len().checked_sub(4) else {
        return Err(FormatError::Short {
            what: WHAT,
            have: b.len(),
            need: 4,
        });
    };
    let (found, expected) = (u32_at(b, n), crc32c(&b[..n]));
    if found != expected {
        return Err(FormatError::Checksum {
            what: WHAT,
            found,
            expected,
        });
    }
    Ok(&b[..n])
}

fn put_history(w: &mut Writer<'_>, history: &[EpochStart]) {
    assert!(history.len() <= MAX_HISTORY);
    w.u16(history.len() as u16);
    for e in history {
        w.u64(e.epoch).u64(e.first_lsn);
    }
}

fn get_history(r: &mut Reader<'_>) -> Result<Vec<EpochStart>, FormatError> {
    let n = r.u16()? as usize;
    if n > MAX_HISTORY {
        return Err(FormatError::Field {
            what: WHAT,
            field: "history",
            value: n as u64,
        });
    }
    let mut out = Vec::with_capacity(n);
    for _ in 0..n {
        out.push(EpochStart {
            epoch: r.u64()?,
            first_lsn: r.u64()?,
        });
    }
    Ok(out)
}

/// First on a control link: the primary asks the mirror to follow it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The cluster's name, which both must share.
    pub cluster: String,
    /// The volume's name.
    pub volume: String,
    /// The node that asks.
    pub from: String,
    /// The node to which it believes it speaks.
    pub to: String,
    /// Identity of its copy; 0 if it has none.
    pub volume_id: u64,
    /// The epoch of the last view it knows.
    pub view: u64,
    /// The epoch that the receiver is to promise.
    pub epoch: u64,
    /// Whether this is an attach, which begins a new epoch, and not a reconnect.
    pub attach: bool,
    /// The records are forwarded in the background: the receiver is a backup.
    pub backup: bool,
    /// Connections that will be opened.
    pub lanes: u16,
    /// Last LSN of its contiguous prefix.
    pub tail: u64,
    /// First LSNs of its epochs.
    pub history: Vec<EpochStart>,
}

impl Message for Hello {
    fn put(&self, w: &mut Writer<'_>) {
        w.text(&self.cluster)
            .text(&self.volume)
            .text(&self.from)
            .text(&self.to)
            .u64(self.volume_id)
            .u64(self.view)
            .u64(self.epoch)
            .u8(self.attach as u8)
            .u8(self.backup as u8)
            .u16(self.lanes)
            .u64(self.tail);
        put_history(w, &self.history);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Hello {
            cluster: r.text("cluster", MAX_NAME)?.into(),
            volume: r.text("volume", MAX_NAME)?.into(),
            from: r.text("from", MAX_NAME)?.into(),
            to: r.text("to", MAX_NAME)?.into(),
            volume_id: r.u64()?,
            view: r.u64()?,
            epoch: r.u64()?,
            attach: r.bool("attach")?,
            backup: r.bool("backup")?,
            lanes: r.u16()?,
            tail: r.u64()?,
            history: get_history(r)?,
        })
    }
}

/// The mirror has promised the epoch and says what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// Identity of its copy; 0 if it has none.
    pub volume_id: u64,
    /// Whether its copy can be used.
    pub state: State,
    /// Whether it held every acknowledged sync point when it was last linked,
    /// or is a primary itself.
    pub member: bool,
    /// Last LSN of its contiguous prefix.
    pub tail: u64,
    /// The last LSN acknowledged according to its logs; beyond the tail if one of
    /// them is damaged.
    pub known: u64,
    /// The level at which it acknowledges.
    pub level: u16,
    /// Number of the life of its copy.
    pub life: u64,
    /// The most bytes that a file can have on the mirror.
    pub max_file: u64,
    /// The most bytes of one component of a file's name there.
    pub max_part: u16,
    /// The most bytes of a file's name there.
    pub max_name: u16,
    /// First LSNs of its epochs.
    pub history: Vec<EpochStart>,
}

impl Message for Welcome {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.volume_id)
            .u8(self.state as u8)
            .u8(self.member as u8)
            .u64(self.tail)
            .u64(self.known)
            .u16(self.level)
            .u64(self.life)
            .u64(self.max_file)
            .u16(self.max_part)
            .u16(self.max_name);
        put_history(w, &self.history);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Welcome {
            volume_id: r.u64()?,
            state: match r.u8()? {
                0 => State::Empty,
                1 => State::Whole,
                3 => State::Switching,
                v => {
                    return Err(FormatError::Field {
                        what: WHAT,
                        field: "state",
                        value: v as u64,
                    });
                }
            },
            member: r.bool("member")?,
            tail: r.u64()?,
            known: r.u64()?,
            level: r.u16()?,
            life: r.u64()?,
            max_file: r.u64()?,
            max_part: r.u16()?,
            max_name: r.u16()?,
            history: get_history(r)?,
        })
    }
}

/// Why a link was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum RefuseCode {
    /// Another cluster, volume, node or version was meant.
    UnknownPeer = 1,
    /// The epoch is below the promised one, or the session that was named is over.
    StaleEpoch = 2,
    /// The node knows a newer view than the sender, or another primary.
    Superseded = 3,
    /// The node's copy is in use by a local primary.
    Busy = 4,
    /// The copies are of different volumes, or of rivals that were both promoted.
    Foreign = 5,
    /// The node's disk or log failed.
    Poisoned = 6,
    /// The frame was not expected or not valid.
    Protocol = 7,
}

impl RefuseCode {
    /// The code of this number; `Protocol` for an unknown number.
    pub fn from_number(number: u16) -> RefuseCode {
        use RefuseCode::*;
        [UnknownPeer, StaleEpoch, Superseded, Busy, Foreign, Poisoned]
            .into_iter()
            .find(|c| *c as u16 == number)
            .unwrap_or(Protocol)
    }
}

/// A refusal, with its reason. The link closes behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refuse {
    /// For programs. An unknown number reads as `Protocol`.
    pub code: RefuseCode,
    /// The epoch that the refusing node has promised.
    pub epoch: u64,
    /// For people.
    pub text: String,
}

impl Message for Refuse {
    fn put(&self, w: &mut Writer<'_>) {
        let mut end = self.text.len().min(1024);
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        w.u16(self.code as u16)
            .u64(self.epoch)
            .text(&self.text[..end]);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Refuse {
            code: RefuseCode::from_number(r.u16()?),
            epoch: r.u64()?,
            text: r.text("text", 1024)?.into(),
        })
    }
}

/// The session's terms: from here on the mirror follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// The epoch that the mirror promised.
    pub epoch: u64,
    /// The primary of the view.
    pub primary: String,
    /// Identity of the volume.
    pub volume_id: u64,
    /// Whether the mirror holds every acknowledged sync point, and so counts
    /// as a member of the view from now on.
    pub member: bool,
    /// The mirror keeps exactly the records up to this LSN before it goes on.
    pub keep: u64,
    /// First LSNs of the primary's epochs, the present one included.
    pub history: Vec<EpochStart>,
}

impl Message for Start {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.epoch)
            .text(&self.primary)
            .u64(self.volume_id)
            .u8(self.member as u8)
            .u64(self.keep);
        put_history(w, &self.history);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Start {
            epoch: r.u64()?,
            primary: r.text("primary", MAX_NAME)?.into(),
            volume_id: r.u64()?,
            member: r.bool("member")?,
            keep: r.u64()?,
            history: get_history(r)?,
        })
    }
}

/// First on a lane link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// The cluster's name.
    pub cluster: String,
    /// The volume's name.
    pub volume: String,
    /// The log to which the records of this link go.
    pub lane: u16,
    /// The session to which the link belongs; distinguishes it from an older one
    /// of the same epoch.
    pub session: u64,
    /// Where a shared-memory lane's ring has its next record; 0 on other lanes.
    pub position: u64,
    /// Bytes of that ring; 0 if the link itself carries the records.
    pub ring: u64,
    /// Alignment of records in that ring.
    pub align: u32,
}

impl Message for Lane {
    fn put(&self, w: &mut Writer<'_>) {
        w.text(&self.cluster)
            .text(&self.volume)
            .u16(self.lane)
            .u64(self.session)
            .u64(self.position)
            .u64(self.ring)
            .u32(self.align);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Lane {
            cluster: r.text("cluster", MAX_NAME)?.into(),
            volume: r.text("volume", MAX_NAME)?.into(),
            lane: r.u16()?,
            session: r.u64()?,
            position: r.u64()?,
            ring: r.u64()?,
            align: r.u32()?,
        })
    }
}

/// The session's number, by which its lanes are recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// The session's number, chosen by the mirror.
    pub session: u64,
    /// Number of the life of the mirror's copy.
    pub life: u64,
}

impl Message for Started {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.session).u64(self.life);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Started {
            session: r.u64()?,
            life: r.u64()?,
        })
    }
}

/// A mirror's answer to a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alive {
    /// An epoch above the link's that a node has promised to which the mirror forwards; 0: none.
    pub outbid: u64,
    /// The records up to this LSN are in the mirror's data files, which the following takes
    /// into account.
    pub applied: u64,
    /// Bytes that the file system of its data files has free.
    pub bytes: u64,
    /// Files that can still be made there.
    pub files: u64,
    /// The unit in which files take bytes there.
    pub block: u32,
}

impl Message for Alive {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.outbid)
            .u64(self.applied)
            .u64(self.bytes)
            .u64(self.files)
            .u32(self.block);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Alive {
            outbid: r.u64()?,
            applied: r.u64()?,
            bytes: r.u64()?,
            files: r.u64()?,
            block: r.u32()?,
        })
    }
}

/// A whole copy of a volume follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyBegin {
    /// Identity of the volume.
    pub volume_id: u64,
    /// LSN of the sender's files when the copy begins. `CopyEnd` names the LSN of the
    /// finished copy.
    pub lsn: u64,
    /// Files that follow.
    pub files: u32,
    /// Bytes of all files, for progress.
    pub bytes: u64,
    /// Chosen by the sender at random: the links that carry parts of this copy
    /// name it.
    pub copy: u64,
    /// First LSNs of the sender's epochs.
    pub history: Vec<EpochStart>,
}

impl Message for CopyBegin {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.volume_id)
            .u64(self.lsn)
            .u32(self.files)
            .u64(self.bytes)
            .u64(self.copy);
        put_history(w, &self.history);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(CopyBegin {
            volume_id: r.u64()?,
            lsn: r.u64()?,
            files: r.u32()?,
            bytes: r.u64()?,
            copy: r.u64()?,
            history: get_history(r)?,
        })
    }
}

/// First on a link that carries a part of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyStream {
    /// The cluster's name.
    pub cluster: String,
    /// The volume's name.
    pub volume: String,
    /// The copy, as its [`CopyBegin`] named it.
    pub copy: u64,
}

impl Message for CopyStream {
    fn put(&self, w: &mut Writer<'_>) {
        w.text(&self.cluster).text(&self.volume).u64(self.copy);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(CopyStream {
            cluster: r.text("cluster", MAX_NAME)?.into(),
            volume: r.text("volume", MAX_NAME)?.into(),
            copy: r.u64()?,
        })
    }
}

/// One file of a copy; all its bytes are zero until `CopyData` says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyFile {
    /// Its number.
    pub id: u32,
    /// Its size.
    pub size: u64,
    /// Its name.
    pub name: String,
}

impl Message for CopyFile {
    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.id).u64(self.size).text(&self.name);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(CopyFile {
            id: r.u32()?,
            size: r.u64()?,
            name: r.text("name", MAX_FILE_NAME)?.into(),
        })
    }
}

/// Bytes of a file of a copy, or of a spill file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyData {
    /// The file's number; for a spill file the random number in its name.
    pub id: u64,
    /// Where the bytes go.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Message for CopyData {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.id).u64(self.offset).raw(&self.bytes);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(CopyData {
            id: r.u64()?,
            offset: r.u64()?,
            bytes: r.rest().to_vec(),
        })
    }
}

impl CopyData {
    /// Bytes before the data in a body, and behind it.
    pub const AROUND: (usize, usize) = (16, 4);

    /// Reads a body's file number, offset and bytes in place.
    pub fn view(b: &[u8]) -> Result<(u64, u64, &[u8]), FormatError> {
        let mut r = Reader::new(WHAT, checked(b)?);
        Ok((r.u64()?, r.u64()?, r.rest()))
    }

    /// Completes a body in place: its data is already there, with [`CopyData::AROUND`]
    /// bytes before and behind it.
    pub fn seal(body: &mut [u8], id: u64, offset: u64) {
        body[0..8].copy_from_slice(&id.to_le_bytes());
        body[8..16].copy_from_slice(&offset.to_le_bytes());
        let (fields, crc) = body.split_at_mut(body.len() - 4);
        crc.copy_from_slice(&crc32c(fields).to_le_bytes());
    }
}

/// Bytes of a page of a copy; each page has one sum.
pub const COPY_PAGE: u64 = 4096;
/// Most pages in one [`CopySums`].
pub const COPY_PAGES: usize = 256;
/// Bytes of a page's sum: the first bytes of its BLAKE3 hash.
pub const SUM_LEN: usize = 16;

/// How much of a file the receiver of a copy has, in whatever state: the answer
/// to each [`CopyFile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyHave {
    /// The file's number.
    pub id: u32,
    /// Bytes that can be compared; 0: the whole file is to be sent.
    pub size: u64,
}

impl Message for CopyHave {
    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.id).u64(self.size);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(CopyHave {
            id: r.u32()?,
            size: r.u64()?,
        })
    }
}

/// Sums of consecutive pages of a file of a copy; the file's last page may be
/// shorter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopySums {
    /// The file's number.
    pub id: u32,
    /// Where the first page lies, a multiple of [`COPY_PAGE`].
    pub offset: u64,
    /// One for each page, 1 to [`COPY_PAGES`].
    pub sums: Vec<[u8; SUM_LEN]>,
}

impl Message for CopySums {
    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.id)
            .u64(self.offset)
            .raw(self.sums.as_flattened());
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        let (id, offset) = (r.u32()?, r.u64()?);
        let (sums, left) = r.rest().as_chunks::<SUM_LEN>();
        let field = |field, value| FormatError::Field {
            what: WHAT,
            field,
            value,
        };
        if !left.is_empty() || sums.is_empty() || sums.len() > COPY_PAGES {
            return Err(field("sums", (sums.len() * SUM_LEN + left.len()) as u64));
        }
        if !offset.is_multiple_of(COPY_PAGE) {
            return Err(field("offset", offset));
        }
        Ok(CopySums {
            id,
            offset,
            sums: sums.to_vec(),
        })
    }
}

/// The answer to a [`CopySums`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyWant {
    /// The file's number, as in the [`CopySums`].
    pub id: u32,
    /// Where the first page lies, as in the [`CopySums`].
    pub offset: u64,
    /// A bit for each page, beginning with the lowest bit of the first byte: whether
    /// the page is to be sent.
    pub pages: Vec<u8>,
}

impl Message for CopyWant {
    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.id).u64(self.offset).raw(&self.pages);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        let (id, offset) = (r.u32()?, r.u64()?);
        let pages = r.rest().to_vec();
        if pages.is_empty() || pages.len() > COPY_PAGES / 8 {
            return Err(FormatError::Field {
                what: WHAT,
                field: "pages",
                value: pages.len() as u64,
            });
        }
        Ok(CopyWant { id, offset, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round<M: Message + PartialEq + std::fmt::Debug>(m: M) {
        let b = m.encode();
        assert_eq!(M::decode(&b).unwrap(), m);
        for bit in 0..b.len() * 8 {
            let mut c = b.clone();
            c[bit / 8] ^= 1 << (bit % 8);
            assert!(M::decode(&c).is_err(), "bit {bit}");
        }
        for n in 0..b.len() {
            assert!(M::decode(&b[..n]).is_err(), "{n} bytes");
        }
    }

    #[test]
    fn what_is_written_is_read_and_damage_is_found() {
        let history = vec![EpochStart {
            epoch: 1,
            first_lsn: 1,
        }];
        round(Hello {
            cluster: "c".into(),
            volume: "v".into(),
            from: "a".into(),
            to: "b".into(),
            volume_id: 5,
            view: 3,
            epoch: 6,
            attach: true,
            backup: false,
            lanes: 2,
            tail: 9,
            history: history.clone(),
        });
        round(Welcome {
            volume_id: 5,
            state: State::Whole,
            member: true,
            tail: 8,
            known: 9,
            level: 1,
            life: 6,
            max_file: 7,
            max_part: 255,
            max_name: 4000,
            history: history.clone(),
        });
        round(Refuse {
            code: RefuseCode::Busy,
            epoch: 3,
            text: "held by process 12".into(),
        });
        round(Start {
            epoch: 6,
            primary: "a".into(),
            volume_id: 5,
            member: true,
            keep: 8,
            history: history.clone(),
        });
        round(Started {
            session: 7,
            life: 9,
        });
        round(Alive {
            outbid: 4,
            applied: 9,
            bytes: 1 << 40,
            files: 1 << 20,
            block: 4096,
        });
        round(Lane {
            cluster: "c".into(),
            volume: "v".into(),
            lane: 1,
            session: 6,
            position: 512,
            ring: 65536,
            align: 64,
        });
        round(CopyBegin {
            volume_id: 5,
            lsn: 8,
            files: 1,
            bytes: 10,
            copy: 77,
            history,
        });
        round(CopyStream {
            cluster: "c".into(),
            volume: "v".into(),
            copy: 77,
        });
        round(CopyFile {
            id: 1,
            size: 10,
            name: "x".into(),
        });
        round(CopyData {
            id: 1,
            offset: 0,
            bytes: b"0123456789".to_vec(),
        });
        round(CopyHave { id: 1, size: 9000 });
        round(CopyWant {
            id: 1,
            offset: 4096,
            pages: vec![5],
        });
        let sums = CopySums {
            id: 1,
            offset: 8192,
            sums: vec![[7; SUM_LEN], [8; SUM_LEN]],
        };
        round(sums.clone());
        let none = CopySums {
            sums: Vec::new(),
            ..sums.clone()
        };
        let many = CopySums {
            sums: vec![[0; SUM_LEN]; COPY_PAGES + 1],
            ..sums.clone()
        };
        let beside = CopySums { offset: 1, ..sums };
        for wrong in [none, many, beside] {
            assert!(CopySums::decode(&wrong.encode()).is_err());
        }
    }

    #[test]
    fn data_is_read_and_written_where_it_lies() {
        let m = CopyData {
            id: 3,
            offset: 77,
            bytes: b"abc".to_vec(),
        };
        let b = m.encode();
        assert_eq!(CopyData::view(&b).unwrap(), (3, 77, &b"abc"[..]));
        let mut c = vec![0; b.len()];
        c[16..19].copy_from_slice(b"abc");
        CopyData::seal(&mut c, 3, 77);
        assert_eq!(c, b);
    }
}
