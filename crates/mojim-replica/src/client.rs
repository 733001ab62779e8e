//! Asks a node questions, for the command, programs, readers and other nodes.
//!
//! One request, one answer, both JSON inside a frame. Bytes follow the answer's text if
//! the request asks for them (`docs/reference/requests.md`, "Requests").

use std::sync::Arc;
use std::time::Duration;

use mojim_format::FrameKind;
use mojim_format::message::checked;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::request::{Question, Request};
use mojim_env::wire::Wire;
use mojim_env::{Address, Context, Env, Error, Result};

/// Most pages of 4 KiB in one answer to a reader.
pub const READ_PAGES: u64 = 16;

/// A connection to a node.
pub struct Client {
    wire: Wire,
    env: Arc<dyn Env>,
    cluster: String,
    timeout: Duration,
}

/// A request as the text that travels.
pub fn question(cluster: &str, request: &Request) -> String {
    let question = Question {
        cluster: cluster.to_owned(),
        request,
    };
    serde_json::to_string(&question).expect("a request is JSON: no map has other keys than text")
}

impl Client {
    /// Connects to a node of `cluster`, with the identity that `env` has; every answer is
    /// awaited for at most `timeout`.
    pub fn connect(
        env: &Arc<dyn Env>,
        to: &Address,
        cluster: &str,
        timeout: Duration,
    ) -> Result<Client> {
        let conn = env.connect(to).context(|| format!("connecting to {to}"))?;
        Ok(Client {
            wire: Wire::new(conn),
            env: env.clone(),
            cluster: cluster.to_owned(),
            timeout,
        })
    }

    /// Asks, and waits for the answer. What the node refuses is [`Error::Answered`].
    pub fn ask(&mut self, request: &Request) -> Result<Value> {
        self.ask_bytes(request).map(|(v, _)| v)
    }

    /// As [`Client::ask`], for an answer of type `T`.
    pub fn ask_for<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T> {
        let answer = self.ask(request)?;
        serde_json::from_value(answer)
            .map_err(|e| Error::Protocol(format!("an answer to something else: {e}")))
    }

    /// As [`Client::ask`], with the bytes that come behind the text.
    pub fn ask_bytes(&mut self, request: &Request) -> Result<(Value, Vec<u8>)> {
        let mut body = question(&self.cluster, request).into_bytes();
        let crc = mojim_format::crc32c(&body);
        body.extend_from_slice(&crc.to_le_bytes());
        self.wire.queue(FrameKind::Request, 0, 0, 0, &body);
        let deadline = self.env.now() + self.timeout;
        loop {
            let sent = self.wire.flush()?;
            if let Some((f, body)) = self.wire.take_frame()? {
                let text = checked(&body).map_err(|e| Error::Protocol(e.to_string()))?;
                if f.kind != FrameKind::Response {
                    return Err(Error::Protocol(format!(
                        "{:?} instead of an answer",
                        f.kind
                    )));
                }
                // No JSON text has a zero byte.
                let (text, bytes) = match text.iter().position(|b| *b == 0) {
                    Some(at) => (&text[..at], text[at + 1..].to_vec()),
                    None => (text, Vec::new()),
                };
                let v: Value = serde_json::from_slice(text)
                    .map_err(|e| Error::Protocol(format!("an answer that is not JSON: {e}")))?;
                if let Some(e) = v.get("error").and_then(Value::as_str) {
                    return Err(Error::Answered {
                        errno: v["errno"].as_i64().unwrap_or(libc::EIO as i64) as i32,
                        text: e.to_owned(),
                    });
                }
                let Value::Object(mut answer) = v else {
                    return Err(Error::Protocol("an answer that is no JSON object".into()));
                };
                return Ok((answer.remove("ok").unwrap_or_default(), bytes));
            }
            let left = deadline.saturating_sub(self.env.now());
            if left.is_zero() {
                return Err(Error::Timeout(format!(
                    "{} did not answer within {:?}",
                    self.wire.conn.peer(),
                    self.timeout
                )));
            }
            self.wire
                .conn
                .wait(!sent, left)
                .context(|| "waiting for an answer".into())?;
        }
    }
}
