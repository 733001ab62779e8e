//! The standard output of commands: text and JSON, with nothing in it that a terminal acts on.

use std::io::{self, Write};

use mojim_format::shown::{shown_json, shown_lines};
use serde_json::Value;

use crate::typed::typed;

/// Prints lines.
pub fn text(lines: &str) -> io::Result<()> {
    let lines = typed(lines);
    io::stdout()
        .lock()
        .write_all(shown_lines(&lines).as_bytes())
}

/// Prints a JSON document on one line.
pub fn json(v: &Value) -> io::Result<()> {
    text_of(&v.to_string())
}

/// Prints a JSON document on several lines.
pub fn json_lines(v: &Value) -> io::Result<()> {
    text_of(&format!("{v:#}"))
}

fn text_of(json: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{}", shown_json(json))
}
