//! The records of a connection after its handshake, sealed and opened on the path of a sync point.
//!
//! Owns the two directions of a TLS 1.3 connection (RFC 8446, section 5). Each has its key and
//! buffer, so that one thread can send while another receives. rustls made the handshake. It also
//! gives the keys and derives their successors. The keys are used here, because rustls' own
//! interface allocates for each record.
//!
//! With encryption off the first record of each direction is the only one. It carries the first
//! words, and all behind it is the bare stream. (A tag over plain records was tried: AES-GCM with
//! the content as additional data costs three times what encrypting it does.)
//! `docs/reference/protocol.md`, "Links and keys".
//!
//! Invariants:
//!
//! - No key seals two records with one number: the number grows by one each
//!   time, and the key changes long before it could wrap.
//! - A sealed record is sent whole and in order, before anything else is.
//! - The caller is told that bytes are sent when the kernel has their whole record.
//! - Nothing of a record is given out before its tag was checked. After an
//!   error no more is opened, and an alert tells the peer.
//! - A peer cannot keep this end at work for nothing: at most [`IDLE`] records in a row carry no
//!   content.
//! - Nothing allocates.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::words;
use mojim_env::wire::unfit;
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets;

use crate::error;

/// Type, version, length.
pub(super) const HEADER: usize = 5;
/// The longest content of a record.
const MAX_PLAIN: usize = 1 << 14;
const TAG: usize = 16;
/// The longest record that a peer may send (RFC 8446, 5.2).
pub(super) const MAX_RECORD: usize = HEADER + MAX_PLAIN + 256;
/// Records that are sealed before they are sent, at most; received likewise.
const BATCH: usize = 4;
/// Records under one key: well below the 2^24.5 that AES-GCM allows.
const KEY_LIFE: u64 = 1 << 23;

/// Records without content, in a row, at most: new keys, and nothing at all.
const IDLE: u32 = 32;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
/// A handshake message of one byte: the sender's key changes behind it; with 1
/// in that byte it asks the same of the receiver.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

/// Gives the successor of a direction's key.
pub(super) type Next<'a> = &'a dyn Fn() -> Result<ConnectionTrafficSecrets, rustls::Error>;

/// The key of one direction.
struct Cipher {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    number: u64,
}

/// The level of an alert that ends a connection, and what it says (RFC 8446, 6.2).
const FATAL: u8 = 2;
const UNEXPECTED: u8 = 10;
const BAD_TAG: u8 = 20;
const OVERFLOW: u8 = 22;

fn bad(text: impl Into<String>) -> io::Error {
    error(io::ErrorKind::InvalidData, text)
}

impl Cipher {
    fn new(secrets: &ConnectionTrafficSecrets, number: u64) -> io::Result<Cipher> {
        let ConnectionTrafficSecrets::Aes128Gcm { key, iv } = secrets else {
            return Err(bad("a suite that was not offered"));
        };
        let key = UnboundKey::new(&AES_128_GCM, key.as_ref()).map_err(|_| bad("an odd key"))?;
        let iv = iv.as_ref().try_into().map_err(|_| bad("an odd key"))?;
        Ok(Cipher {
            key: LessSafeKey::new(key),
            iv,
            number,
        })
    }

    /// The record's nonce; steps on to the next record.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (n, b) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.number.to_be_bytes())
        {
            *n ^= b;
        }
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Seals `record`: room for a header, the content with its type, room for
    /// a tag.
    #[inline]
    fn seal(&mut self, record: &mut [u8]) {
        let inner = record.len() - HEADER;
        record[..HEADER].copy_from_slice(&[DATA, 3, 3, (inner >> 8) as u8, inner as u8]);
        let nonce = self.nonce();
        let (front, tag_at) = record.split_at_mut(HEADER + inner - TAG);
        let (header, content) = front.split_at_mut(HEADER);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(&*header), content);
        tag_at.copy_from_slice(tag.expect("a record is short").as_ref());
    }

    /// Opens a whole record in place: where its content lies, with its type
    /// behind it.
    #[inline]
    fn open(&mut self, record: &mut [u8]) -> io::Result<Range<usize>> {
        let nonce = self.nonce();
        let end = record.len() - TAG;
        let (header, content) = record.split_at_mut(HEADER);
        self.key
            .open_in_place(nonce, Aad::from(&*header), content)
            .map_err(|_| bad("a record that was changed on its way"))?;
        Ok(HEADER..end)
    }
}

fn too_long() -> io::Error {
    error(io::ErrorKind::FileTooLarge, "a record that is too long")
}

/// The alert that tells the peer of an error that is its own.
fn alert_of(e: &io::Error) -> Option<u8> {
    match e.kind() {
        io::ErrorKind::InvalidData => Some(UNEXPECTED),
        io::ErrorKind::FileTooLarge => Some(OVERFLOW),
        _ => None,
    }
}

/// The length of the record at the front of `bytes`, if it is there as a whole.
fn whole(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some(header) = bytes.first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
    if header[0] != DATA || len < 1 + TAG {
        return Err(bad("no record of this connection"));
    }
    if len > MAX_RECORD - HEADER {
        return Err(too_long());
    }
    Ok((bytes.len() >= HEADER + len).then_some(HEADER + len))
}

/// The sending direction.
pub(super) struct Tx {
    cipher: Cipher,
    buf: Box<[u8]>,
    /// Sealed bytes that the kernel does not have yet.
    unsent: Range<usize>,
    /// How many of the caller's bytes are in them.
    held: usize,
    encrypt: bool,
    /// Whether a record was sealed: without encryption, the only one.
    begun: bool,
}

impl Tx {
    pub(super) fn new(secrets: &(u64, ConnectionTrafficSecrets), encrypt: bool) -> io::Result<Tx> {
        // The update of a key fits beside the records.
        let room = BATCH * (HEADER + MAX_PLAIN + 1 + TAG) + HEADER + KEY_UPDATE.len() + 2 + TAG;
        Ok(Tx {
            cipher: Cipher::new(&secrets.1, secrets.0)?,
            buf: vec![0; room].into_boxed_slice(),
            unsent: 0..0,
            held: 0,
            encrypt,
            begun: false,
        })
    }

    /// Whether all that follows is for the bare stream.
    #[inline]
    pub(super) fn is_bare(&self) -> bool {
        !self.encrypt && self.begun && self.held == 0 && self.unsent.is_empty()
    }

    fn push(&mut self, to: &mut dyn FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while !self.unsent.is_empty() {
            self.unsent.start += to(&self.buf[self.unsent.clone()])?;
        }
        Ok(())
    }

    /// Seals the front of `bufs` and hands it to `to`. `WouldBlock` until all that was
    /// sealed is taken: the caller must call again with the same bytes. `new_key`:
    /// whether the peer asked for one.
    #[inline]
    pub(super) fn send(
        &mut self,
        bufs: &[IoSlice<'_>],
        new_key: &AtomicBool,
        next: Next<'_>,
        to: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.push(to)?;
        if self.held > 0 {
            let have: usize = bufs.iter().map(|b| b.len()).sum();
            return Ok(std::mem::take(&mut self.held).min(have));
        }
        self.unsent = 0..0;
        if self.cipher.number >= KEY_LIFE || new_key.load(Relaxed) {
            new_key.store(false, Relaxed);
            self.change_key(next)?;
        }
        let most = if self.encrypt { BATCH } else { 1 } * MAX_PLAIN;
        let mut taken = 0;
        let mut fill = 0;
        'records: for b in bufs {
            let mut b = &b[..];
            while !b.is_empty() {
                if fill == MAX_PLAIN {
                    self.seal(fill, DATA);
                    fill = 0;
                    if taken == most {
                        break 'records;
                    }
                }
                let n = b.len().min(MAX_PLAIN - fill);
                let at = self.unsent.end + HEADER + fill;
                self.buf[at..at + n].copy_from_slice(&b[..n]);
                b = &b[n..];
                fill += n;
                taken += n;
            }
        }
        if fill > 0 {
            self.seal(fill, DATA);
        }
        self.begun |= taken > 0;
        self.held = taken;
        self.push(to)?;
        self.held = 0;
        Ok(taken)
    }

    /// Seals what lies behind the last sealed record and the room for a header.
    fn seal(&mut self, content: usize, kind: u8) {
        let start = self.unsent.end;
        let end = start + HEADER + content + 1 + TAG;
        self.buf[end - TAG - 1] = kind;
        self.cipher.seal(&mut self.buf[start..end]);
        self.unsent.end = end;
    }

    #[cold]
    fn change_key(&mut self, next: Next<'_>) -> io::Result<()> {
        // The update itself is the last record under the old key. No update is
        // asked of the peer (its last byte): it counts its own records.
        let mut message = [0; KEY_UPDATE.len() + 1];
        message[..KEY_UPDATE.len()].copy_from_slice(&KEY_UPDATE);
        let at = self.unsent.end + HEADER;
        self.buf[at..at + message.len()].copy_from_slice(&message);
        self.seal(message.len(), HANDSHAKE);
        let secrets = next().map_err(io::Error::other)?;
        self.cipher = Cipher::new(&secrets, 0)?;
        Ok(())
    }

    /// Tells the peer, as the last word, why this end goes. Where a record is only sent in part, or all
    /// is bare, it cannot be told.
    #[cold]
    pub(super) fn alert(&mut self, what: u8, to: &mut dyn FnMut(&[u8]) -> io::Result<usize>) {
        if !self.unsent.is_empty() || !self.encrypt && self.begun {
            return;
        }
        self.unsent = 0..0;
        self.buf[HEADER..HEADER + 2].copy_from_slice(&[FATAL, what]);
        self.seal(2, ALERT);
        // The connection ends anyway.
        let _ = self.push(to);
    }

    /// As if this many records had been sealed under the key.
    #[cfg(test)]
    pub(super) fn age(&mut self, records: u64) {
        self.cipher.number = records;
    }
}

#[cfg(test)]
impl Tx {
    /// Seals one record as no sound end does.
    pub(super) fn seal_any(&mut self, content: &[u8], kind: u8) -> Vec<u8> {
        self.unsent = 0..0;
        self.buf[HEADER..HEADER + content.len()].copy_from_slice(content);
        self.seal(content.len(), kind);
        self.buf[std::mem::replace(&mut self.unsent, 0..0)].to_vec()
    }

    /// Goes on with this key.
    pub(super) fn take_key(&mut self, secrets: &ConnectionTrafficSecrets) {
        self.cipher = Cipher::new(secrets, 0).unwrap();
    }
}

/// The receiving direction.
pub(super) struct Rx {
    cipher: Cipher,
    buf: Box<[u8]>,
    /// What was received and not opened.
    sealed: Range<usize>,
    /// What was opened and not given out; it lies before `sealed`.
    open: Range<usize>,
    /// The peer said that it sends no more.
    ended: bool,
    encrypt: bool,
    /// Whether a record was opened: without encryption, the only one.
    begun: bool,
    /// Why no more is opened.
    failed: Option<(io::ErrorKind, String)>,
    /// What the peer is to be told of that.
    alert: Option<u8>,
    /// Records in a row without content.
    idle: u32,
}

impl Rx {
    pub(super) fn new(secrets: &(u64, ConnectionTrafficSecrets), encrypt: bool) -> io::Result<Rx> {
        Ok(Rx {
            cipher: Cipher::new(&secrets.1, secrets.0)?,
            buf: vec![0; BATCH * MAX_RECORD].into_boxed_slice(),
            sealed: 0..0,
            open: 0..0,
            ended: false,
            encrypt,
            begun: false,
            failed: None,
            alert: None,
            idle: 0,
        })
    }

    /// As if this many records had been opened under the key.
    #[cfg(test)]
    pub(super) fn age(&mut self, records: u64) {
        self.cipher.number = records;
    }

    /// What the peer is to be told, once.
    pub(super) fn take_alert(&mut self) -> Option<u8> {
        self.alert.take()
    }

    /// Whether [`Rx::receive`] has something to return without receiving.
    pub(super) fn is_ready(&self) -> bool {
        self.failed.is_some()
            || self.ended
            || !self.open.is_empty()
            || match self.is_past_records() {
                true => !self.sealed.is_empty(),
                false => !matches!(whole(&self.buf[self.sealed.clone()]), Ok(None)),
            }
    }

    /// Whether what is received is the bare stream.
    fn is_past_records(&self) -> bool {
        !self.encrypt && self.begun
    }

    /// Whether all that follows comes from the bare stream.
    #[inline]
    pub(super) fn is_bare(&self) -> bool {
        self.is_past_records() && !self.is_ready()
    }

    /// Gives out what has come, and receives from `from` what is missing. `asked`: set if
    /// the peer asks this end for a new key.
    #[inline]
    pub(super) fn receive(
        &mut self,
        bufs: &mut [IoSliceMut<'_>],
        asked: &AtomicBool,
        next: Next<'_>,
        from: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if let Some((kind, why)) = &self.failed {
            return Err(error(*kind, why.clone()));
        }
        let mut given = 0;
        let r = self.try_receive(bufs, &mut given, asked, next, from);
        if let Err(e) = &r
            && e.kind() != io::ErrorKind::WouldBlock
        {
            self.alert = self.alert.or(alert_of(e));
            self.failed = Some((e.kind(), e.to_string()));
        }
        match r {
            // What was given out before is good.
            Err(_) if given > 0 => Ok(given),
            r => r.map(|()| given),
        }
    }

    fn try_receive(
        &mut self,
        bufs: &mut [IoSliceMut<'_>],
        given: &mut usize,
        asked: &AtomicBool,
        next: Next<'_>,
        from: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut bufs = bufs.iter_mut().map(|b| &mut b[..]);
        let mut room: &mut [u8] = &mut [];
        loop {
            while !self.open.is_empty() {
                while room.is_empty() {
                    match bufs.next() {
                        Some(b) => room = b,
                        None => return Ok(()),
                    }
                }
                let n = room.len().min(self.open.len());
                let (to, left) = room.split_at_mut(n);
                to.copy_from_slice(&self.buf[self.open.start..self.open.start + n]);
                room = left;
                self.open.start += n;
                *given += n;
            }
            if self.ended {
                return Ok(());
            }
            if self.is_past_records() {
                // Bytes behind the only record, which came with it.
                self.open = std::mem::replace(&mut self.sealed, 0..0);
                if !self.open.is_empty() {
                    continue;
                }
            } else if let Some(len) = whole(&self.buf[self.sealed.clone()])? {
                self.open_one(len, asked, next)?;
                continue;
            }
            if *given > 0 {
                return Ok(());
            }
            if self.sealed.is_empty() {
                self.sealed = 0..0;
            } else if self.buf.len() - self.sealed.start < MAX_RECORD {
                self.buf.copy_within(self.sealed.clone(), 0);
                self.sealed = 0..self.sealed.len();
            }
            self.open = 0..0;
            match from(&mut self.buf[self.sealed.end..])? {
                // Cut off or ended: the caller discards a frame that is not whole.
                0 => return Ok(()),
                n => self.sealed.end += n,
            }
        }
    }

    /// Opens the record of `len` bytes at the front.
    #[inline]
    fn open_one(&mut self, len: usize, asked: &AtomicBool, next: Next<'_>) -> io::Result<()> {
        let start = self.sealed.start;
        self.sealed.start += len;
        let inner = match self.cipher.open(&mut self.buf[start..start + len]) {
            Ok(inner) => inner,
            Err(e) => {
                self.alert = Some(BAD_TAG);
                return Err(e);
            }
        };
        let content = &self.buf[start + inner.start..start + inner.end];
        // The content is followed by its type, then by zeros, of which we send none.
        let Some(last) = content.iter().rposition(|b| *b != 0) else {
            return Err(bad("a record without a type"));
        };
        if last > MAX_PLAIN {
            return Err(too_long());
        }
        let has_content = content[last] == DATA && last > 0;
        self.idle = if has_content { 0 } else { self.idle + 1 };
        if self.idle > IDLE {
            return Err(bad("too many records without content"));
        }
        match (content[last], &content[..last]) {
            (DATA, data) => {
                self.open = start + inner.start..start + inner.start + data.len();
                self.begun = true;
                Ok(())
            }
            (ALERT, [_, 0]) => {
                self.ended = true;
                Ok(())
            }
            (ALERT, [_, what]) => Err(refused(*what)),
            (HANDSHAKE, [message @ .., answer @ (0 | 1)]) if *message == KEY_UPDATE => {
                if *answer == 1 {
                    asked.store(true, Relaxed);
                }
                let secrets = next().map_err(io::Error::other)?;
                self.cipher = Cipher::new(&secrets, 0)?;
                Ok(())
            }
            (kind, _) => Err(bad(format!("a record of type {kind} out of turn"))),
        }
    }
}

/// The peer's alert in words.
fn refused(alert: u8) -> io::Error {
    let why = rustls::AlertDescription::from(alert);
    error(
        io::ErrorKind::PermissionDenied,
        format!(
            "the other node {}: {}",
            unfit::CERTIFICATE_OR_LINK,
            words::alert(why)
        ),
    )
}
