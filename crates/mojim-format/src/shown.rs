//! Text of others, fit to be printed or logged: names of files, words of peers, of programs, and of errors.
//!
//! Invariants of what is returned:
//! - It has no control character, and no character that changes the direction of the text or is never
//!   seen: a terminal prints it as one line, and does nothing else.
//! - Text without such a character is unchanged, and what was returned once is not changed again.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a character does more on a terminal than to be seen there.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

fn replaced<'a>(
    text: &'a str,
    hidden: impl Fn(char) -> bool,
    put: impl Fn(&mut String, char),
) -> Cow<'a, str> {
    if !text.chars().any(&hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match hidden(c) {
            true => put(&mut out, c),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// A text as one line: `\n`, `\u{1b}` and the like stand for what a terminal would act on.
pub fn shown(text: &str) -> Cow<'_, str> {
    replaced(text, is_hidden, |out, c| out.extend(c.escape_default()))
}

/// As [`shown`], of lines of our own: their ends stay.
pub fn shown_lines(text: &str) -> Cow<'_, str> {
    let hidden = |c| c != '\n' && is_hidden(c);
    replaced(text, hidden, |out, c| out.extend(c.escape_default()))
}

/// A text of JSON, as a serializer made it: the characters that it leaves as they are, and a terminal
/// does not, are written as JSON's own escapes. The value is the same.
pub fn shown_json(text: &str) -> Cow<'_, str> {
    let hidden = |c| !matches!(c, '\n' | ' '..='~') && is_hidden(c);
    replaced(text, hidden, |out, c| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing into a string cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_that_a_terminal_acts_on() {
        let hostile = "a\x1b[2J\r\nvolume v  well\u{9b}1A\u{7f}\u{202e}b\u{2028}\u{e0041}";
        let seen = shown(hostile);
        assert_eq!(
            seen,
            "a\\u{1b}[2J\\r\\nvolume v  well\\u{9b}1A\\u{7f}\\u{202e}b\\u{2028}\\u{e0041}"
        );
        assert_eq!(shown(&seen), seen);
        assert_eq!(
            shown("Größe 1 µs, \"x\" \\ 日本"),
            "Größe 1 µs, \"x\" \\ 日本"
        );
        assert_eq!(shown_lines("one\ntwo\x1b"), "one\ntwo\\u{1b}");
    }

    #[test]
    fn json_stays_the_same_value() {
        let text = "{\n  \"a\\u001b\": \"\u{9b}\u{7f}\u{e0041}\"\n}";
        assert_eq!(
            shown_json(text),
            "{\n  \"a\\u001b\": \"\\u009b\\u007f\\udb40\\udc41\"\n}"
        );
    }
}
