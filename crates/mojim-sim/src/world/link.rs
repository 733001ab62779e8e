//! Listeners and connections as a process holds them.
//!
//! Owns crashes in the middle of a send. The net owns what arrives when.

use super::state::{HandleOwner, crashed, due};
use mojim_env::{Address, Conn, Memory};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

/// Where connections arrive.
pub struct SimListener {
    pub(super) place: HandleOwner,
    pub(super) at: Address,
    pub(super) id: u64,
}

impl SimListener {
    /// The next connection that has arrived, if there is one.
    pub fn accept(&self) -> io::Result<Option<Arc<dyn Conn>>> {
        let st = &mut *self.place.enter()?;
        let Some(id) = st.net.accept(&self.at, self.id)? else {
            return Ok(None);
        };
        Ok(Some(Arc::new(SimConn {
            place: self.place.clone(),
            id,
            end: 1,
            peer: format!("a caller of {}", self.at),
        })))
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        if let Ok(mut st) = self.place.enter() {
            let st = &mut *st;
            st.net.unlisten(&self.at, self.id, &mut st.ctx);
        }
    }
}

/// One end of a connection.
pub struct SimConn {
    pub(super) place: HandleOwner,
    pub(super) id: u64,
    pub(super) end: usize,
    pub(super) peer: String,
}

impl Conn for SimConn {
    fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let st = &mut *self.place.enter()?;
        let n = self.place.node;
        let node = &mut st.nodes[n];
        node.sends += 1;
        if let Some(kind) = due(&mut node.armed_send) {
            let all: usize = bufs.iter().map(|b| b.len()).sum();
            let some = match st.ctx.rng.below(3) {
                0 => 0,
                1 => all,
                _ => st.ctx.rng.between(0, all as u64) as usize,
            };
            let bytes: Vec<u8> = bufs.iter().flat_map(|b| b.iter().copied()).collect();
            let part = [IoSlice::new(&bytes[..some])];
            let _ = st.net.send(self.id, self.end, &part, &mut st.ctx);
            st.ctx.hit("crashes in send");
            st.crash(n, kind);
            return Err(crashed());
        }
        let sent = st.net.send(self.id, self.end, bufs, &mut st.ctx);
        st.trace(n, || format!("send on {}: {sent:?}", self.id));
        sent
    }

    fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let st = &mut *self.place.enter()?;
        let got = st.net.recv(self.id, self.end, bufs, &mut st.ctx);
        if !matches!(&got, Err(e) if e.kind() == ErrorKind::WouldBlock) {
            st.trace(self.place.node, || {
                format!("receive on {}: {got:?}", self.id)
            });
        }
        got
    }

    /// Never blocks: returns whether a blocking wait would return at once.
    fn wait(&self, to_send: bool, _timeout: Duration) -> io::Result<bool> {
        let st = &mut *self.place.enter()?;
        st.net.ready(self.id, self.end, to_send, &mut st.ctx)
    }

    fn close(&self) {
        if let Ok(mut st) = self.place.enter() {
            let st = &mut *st;
            st.trace(self.place.node, || format!("close {}", self.id));
            st.net.close(self.id, self.end, &mut st.ctx);
        }
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn send_memory(&self, memory: &Memory) -> io::Result<()> {
        let st = &mut *self.place.enter()?;
        st.net.send_memory(self.id, self.end, memory, &mut st.ctx)
    }

    fn recv_memory(&self, len: usize, _write: bool) -> io::Result<Memory> {
        let st = &mut *self.place.enter()?;
        st.net.recv_memory(self.id, self.end, len, st.ctx.now)
    }
}

impl Drop for SimConn {
    fn drop(&mut self) {
        self.close();
    }
}
