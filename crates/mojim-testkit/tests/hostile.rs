//! A peer's words and the names of files reach an operator's screen as text.
//!
//! Such text has nothing that a terminal acts on, no line of its own, and no word about other
//! nodes.
//!
//! Owns the daemon that answers in the place of a node, with any words.

// Seen to fail, each by a defect made on purpose or found:
// - words printed as they are
// - numbers believed
// - orders taken from everybody (`operators.rs`)

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use mojim_format::{FRAME_LEN, Frame, FrameKind};
use serde_json::{Value, json};

use mojim_testkit::home::Home;
use mojim_testkit::{Process, await_that, text};

/// A daemon in the place of a node, which answers whatever it is asked with the same words.
struct Hostile {
    stop: Arc<AtomicBool>,
    port: u16,
    thread: Option<JoinHandle<()>>,
}

impl Hostile {
    fn at(port: u16, answer: Value) -> Hostile {
        // A connection of another test may have the port for a moment, as its own end.
        let listener = await_that("the port of the node", || {
            TcpListener::bind(("127.0.0.1", port)).ok()
        });
        let stop = Arc::new(AtomicBool::new(false));
        let stops = stop.clone();
        let thread = std::thread::spawn(move || {
            for conn in listener.incoming() {
                if stops.load(Ordering::Acquire) {
                    return;
                }
                let (mut conn, answer) = (conn.unwrap(), answer.clone());
                std::thread::spawn(move || {
                    let mut header = [0; FRAME_LEN];
                    while conn.read_exact(&mut header).is_ok() {
                        let asked = Frame::decode(&header).unwrap();
                        let mut body = vec![0; asked.body as usize];
                        if conn.read_exact(&mut body).is_err() {
                            return;
                        }
                        let mut body = answer.to_string().into_bytes();
                        let crc = mojim_format::crc32c(&body);
                        body.extend_from_slice(&crc.to_le_bytes());
                        let frame = Frame {
                            kind: FrameKind::Response,
                            flags: 0,
                            epoch: 0,
                            lsn: 0,
                            body: body.len() as u32,
                        };
                        let _ = conn.write_all(&[&frame.encode()[..], &body].concat());
                    }
                });
            }
        });
        Hostile {
            stop,
            port,
            thread: Some(thread),
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = std::net::TcpStream::connect(("127.0.0.1", self.port));
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A primary `a`, a mirror `b`, a backup `c` without a vote, and a witness `w`.
struct Cluster {
    home: Home,
}

impl Cluster {
    fn new() -> Cluster {
        let home = Home::new("hostile", 4);
        let mut t = "cluster = \"hostile\"\nfailure_limit = \"4s\"\n[volume.v]\nmode = \"sync\"\n\
                     primary = \"a\"\nmirror = \"b\"\nbackups = [\"c\"]\n"
            .to_owned();
        for (name, port) in ["a", "b", "c"].iter().zip(&home.ports) {
            t += &home.data_node(name, port.number, "size = \"4MiB\"");
        }
        t += "vote = false\n";
        t += &home.witness("w", home.ports[3].number);
        home.configure(&t);
        Cluster { home }
    }

    fn nodes(&self) -> [Process; 3] {
        ["a", "b", "w"].map(|n| self.home.node(n))
    }

    fn hostile(&self, answer: Value) -> Hostile {
        Hostile::at(self.home.ports[2].number, answer)
    }

    /// What a command prints, of which nothing but ends of lines may be a control character; and all
    /// lines of `status` that only this command may print.
    fn printed(&self, word: &str, args: &[&str]) -> String {
        let out = self.home.mojim(word, args);
        let all = text(&out.stdout) + &text(&out.stderr);
        let acts = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!all.contains(acts), "{word}: {all:?}");
        let volumes = all.lines().filter(|l| l.starts_with("volume v  mode"));
        assert!(volumes.count() <= 1, "{word}: {all}");
        all
    }
}

const WORDS: &str = "\x1b[2J\x1b[Hall is\nvolume v  mode sync  well\r\u{9b}1A\u{202e}\u{7f}";

/// A program that is attached and does nothing more, and the view's epoch once both nodes are in it.
fn at_work(c: &Cluster) -> (Process, u64) {
    let words = ["--entries", "20", "--linger"];
    let (mut program, found) = c.home.program("a", &words);
    program.acknowledged(found, found + 20);
    let epoch = await_that("the first view", || {
        let [a, b] = ["a", "b"].map(|n| c.home.says(n));
        let paired = b["link"]["up"] == true && a["view"]["mirror"] == "b";
        let epoch = a["epoch"].as_u64()?;
        (paired && b["epoch"] == epoch).then_some(epoch)
    });
    (program, epoch)
}

/// The stolen key of a backup was enough to rewrite an operator's screen: `mojim status` printed the
/// escape sequences of its answer, with a line that said that the volume is well; and to have it say
/// that nobody was primary, in epoch 18446744073709551615.
#[test]
fn a_hostile_peer_speaks_for_itself_alone_and_in_plain_words() {
    let c = Cluster::new();
    let _nodes = c.nodes();
    let (mut program, epoch) = at_work(&c);
    let of = |claims: Value| {
        let mut row = json!({
            "volume": "v", "mode": "sync", "node": "c", "role": "backup", "state": "whole",
            "epoch": epoch, "last_lsn": 1, "committed": 1, "attached": false,
        });
        row.as_object_mut()
            .unwrap()
            .extend(claims.as_object().unwrap().clone());
        json!({ "ok": { "node": "c", "config": 0, "volumes": [row] } })
    };
    let said = json!({ "error": WORDS, "errno": 5 });
    let words = json!({
        "error": WORDS, "role": WORDS, "state": WORDS, WORDS: WORDS,
        "strangers": { "path": WORDS, "unknown": [WORDS], "unknown_count": 1 },
        "link": { "up": true, "from": WORDS, "primary": WORDS },
    });
    let numbers = json!({ "epoch": u64::MAX });
    let percent = json!({ "copy": { "running": true, "done": u64::MAX, "total": 3, "moved": 1 } });
    let later = json!({ "epoch": 1u64 << 40, "role": "primary", "attached": true });
    let primary = json!({ "role": "primary", "attached": true });
    let lsn = json!({ "last_lsn": 1u64 << 40, "committed": 1u64 << 40 });
    for (answer, why) in [
        (said, "all is\\nvolume v"),
        (of(words), "all is\\nvolume v"),
        (of(numbers), "beyond sense: `epoch` is 18446744073709551615"),
        (of(percent), "beyond sense: `done` is 18446744073709551615"),
        (
            of(later),
            "node c has no vote, and claims epoch 1099511627776",
        ),
        (
            of(primary),
            "node c has no vote, and claims to be the primary",
        ),
        (of(lsn), "has LSN "),
    ] {
        let _hostile = c.hostile(answer.clone());
        let all = c.printed("status", &[]);
        let says = |name: &str, role: &str| {
            let cells = [name, role, &epoch.to_string()].map(str::to_owned);
            all.lines()
                .any(|l| l.split_whitespace().take(3).eq(cells.iter()))
        };
        assert!(all.contains(why), "{why}: {all}");
        assert!(says("a", "primary") && says("b", "mirror"), "{all}");
        for other in ["node a", "node b"] {
            let findings = all.lines().filter(|l| l.trim_start().starts_with("! "));
            let mut of_others = findings.filter(|l| l.contains(other) && !l.contains("node c"));
            assert_eq!(of_others.next(), None, "{answer}: {all}");
        }
        for (word, args) in [
            ("status", &["--json"][..]),
            ("verify", &["--wait", "0"]),
            ("verify", &["--wait", "0", "--json"]),
            ("promote", &["--name", "c", "--force", "--yes"]),
            ("promote", &["--name", "c", "--force", "--yes", "--json"]),
            ("repair", &["--name", "c", "--yes", "--wait", "0"]),
        ] {
            c.printed(word, args);
        }
    }
    program.kill();
}

/// An answer that was a JSON array ended whoever had asked by a panic: the commands, and the thread
/// of a daemon that was to be promoted, so that its promotion went on for ever.
#[test]
fn an_answer_that_is_no_object_is_an_error() {
    let c = Cluster::new();
    let _nodes = c.nodes();
    let (mut program, _) = at_work(&c);
    let others = [json!([[], {}]), json!(5), json!("x"), json!(null)];
    let empty = [json!({}), json!({ "ok": [[], {}] }), json!({ "ok": 5 })];
    for answer in others.iter().chain(&empty) {
        let _hostile = c.hostile(answer.clone());
        for (word, args) in [
            ("status", &[][..]),
            ("status", &["--json"]),
            ("verify", &["--wait", "0"]),
            ("repair", &["--name", "c", "--yes", "--wait", "0"]),
            ("promote", &["--name", "c", "--force", "--yes"]),
            ("promote", &["--name", "c", "--force", "--yes", "--json"]),
        ] {
            let out = c.home.mojim(word, args);
            let code = out.status.code();
            assert!(matches!(code, Some(1 | 2)), "{word}, {answer}: {code:?}");
            let said = text(&out.stderr);
            assert!(!said.contains("panicked"), "{word}, {answer}: {said}");
        }
    }
    program.kill();
    let _hostile = c.hostile(others[0].clone());
    let out = c.home.mojim("promote", &["--name", "b"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("no JSON object"), "{said}");
}

/// The name of a file that somebody put beside those of the volume reached the screen as
/// it is: with ESC, and with a line that looks like one of `mojim status`.
#[test]
fn names_of_files_are_printed_as_text() {
    let c = Cluster::new();
    let (_nodes, _c) = (c.nodes(), c.home.node("c"));
    let (mut program, _) = at_work(&c);
    let name = "\x1b[2J\nvolume v  mode sync  well\u{202e}";
    fs::write(c.home.dir.join("b/v").join(name), "x").unwrap();
    await_that("the unmanaged file", || {
        let all = c.printed("status", &[]);
        let name = "\\u{1b}[2J\\nvolume v  mode sync  well\\u{202e}";
        all.contains(name).then_some(())
    });
    for args in [&["--wait", "0"][..], &["--wait", "0", "--json"]] {
        let all = c.printed("verify", args);
        assert!(all.contains("u{1b}[2J"), "{all}");
    }
    program.kill();
}
