//! The syntax of a configuration, checked before the TOML parser sees it.
//!
//! Invariant: a text that [`guard`] lets pass is safe to parse, whoever wrote it: it follows the
//! grammar of TOML down to words and strings, and its nesting and its size are bounded.

const MAX_PUNCTUATION: usize = 65_536;
const MAX_DOTS: usize = 8;
const MAX_DEPTH: usize = 8;

/// What [`guard`] expects next.
#[derive(Clone, Copy, PartialEq)]
enum Expect {
    /// A header, a key, or an empty line.
    Line,
    /// A part of a key.
    Key,
    /// A dot, or the end of the key.
    KeyEnd,
    /// A value.
    Value,
    /// A value, or the end of the array.
    Element,
    /// A key, or the end of the inline table.
    Member,
    /// More of a bare value (`1.5`), or what follows a value.
    Bare,
    /// What follows a value: a comma, a closing bracket, the end of the line.
    End,
}

/// How far a text was followed.
struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    expect: Expect,
    /// The brackets that close what is open.
    open: Vec<u8>,
    /// How many brackets open and close the header that `at` is in; 0 in none.
    header: usize,
    /// Dots, brackets and the like in all, and dots of the key that `at` is in.
    punctuation: usize,
    dots: usize,
}

/// Refuses what the TOML parser would answer with a panic, or with more stack or memory than any
/// configuration is worth.
///
/// - After an error of syntax the parser goes on, and may assert what the error has made untrue. So
///   this follows the grammar of lines, keys and brackets, and no text that breaks it is parsed.
/// - The parser bounds the parts of a key and the depth of brackets by 80 each, but not their
///   product; 6,000 levels overflow a thread's stack when the tables are dropped.
/// - Each dot and bracket may cost it a kilobyte.
///
/// Words and strings end exactly where they do for the parser, also where they are ill-formed.
pub(crate) fn guard(text: &[u8]) -> Result<(), (usize, String)> {
    let mut scan = Scan {
        text,
        at: if text.starts_with("\u{feff}".as_bytes()) {
            3
        } else {
            0
        },
        expect: Expect::Line,
        open: Vec::new(),
        header: 0,
        punctuation: 0,
        dots: 0,
    };
    while scan.at < text.len() {
        let start = scan.at;
        scan.at = end_of_token(text, start);
        scan.count(start)?;
        scan.expect = scan.follow(start)?;
    }
    match scan.expect {
        Expect::Line | Expect::Bare | Expect::End if scan.open.is_empty() => Ok(()),
        _ => Err(unexpected(scan.expect, text.len())),
    }
}

/// The offset after the word, string, comment or sign that begins at `start`.
fn end_of_token(text: &[u8], start: usize) -> usize {
    let first = text[start];
    let until = |ends: &[u8]| {
        let length = text[start..].iter().position(|byte| ends.contains(byte));
        length.map_or(text.len(), |length| start + length)
    };
    match first {
        b'"' | b'\'' => end_of_string(text, start, first),
        b'#' => until(b"\r\n"),
        b'\r' if text.get(start + 1) == Some(&b'\n') => start + 2,
        b'.' | b'=' | b',' | b'[' | b']' | b'{' | b'}' | b' ' | b'\t' | b'\r' | b'\n' => start + 1,
        // A bare word. A quote within it does not open a string.
        _ => until(b".=,[]{} \t#\r\n"),
    }
}

impl Scan<'_> {
    /// Counts the token at `start` against what a text may have.
    fn count(&mut self, start: usize) -> Result<(), (usize, String)> {
        let first = self.text[start];
        self.dots = if matches!(self.expect, Expect::Key | Expect::KeyEnd) {
            self.dots + usize::from(first == b'.')
        } else {
            0
        };
        self.punctuation += usize::from(b".=,[{".contains(&first));
        if self.dots > MAX_DOTS || self.open.len() > MAX_DEPTH {
            return Err((
                start,
                "nested too deeply; no configuration needs it".to_owned(),
            ));
        }
        if self.punctuation > MAX_PUNCTUATION {
            return Err((
                start,
                format!("more than {MAX_PUNCTUATION} keys and values; no cluster needs them"),
            ));
        }
        Ok(())
    }

    /// What is expected after the token at `start`, if that token was expected. The
    /// brackets of a header are one token, whose end this finds.
    fn follow(&mut self, start: usize) -> Result<Expect, (usize, String)> {
        use Expect::*;
        let (text, expect, first) = (self.text, self.expect, self.text[start]);
        let double = |bracket| text.get(start + 1) == Some(&bracket);
        let inside = self.open.last().copied();
        Ok(match (expect, first) {
            (_, b' ' | b'\t') => expect,
            (Line, b'[') => {
                self.header = if double(b'[') { 2 } else { 1 };
                self.at = start + self.header;
                Key
            }
            (KeyEnd, b']') if self.header == 1 || self.header == 2 && double(b']') => {
                self.at = start + self.header;
                self.header = 0;
                End
            }
            (Line | Element | Member, b'#' | b'\n' | b'\r') => expect,
            (Bare | End, b'#' | b'\n' | b'\r') => {
                if inside.is_some() {
                    End
                } else {
                    Line
                }
            }
            (KeyEnd, b'.') => Key,
            (KeyEnd, b'=') if self.header == 0 => Value,
            (Value | Element, b'[') => {
                self.open.push(b']');
                Element
            }
            (Value | Element, b'{') => {
                self.open.push(b'}');
                Member
            }
            (Bare | End, b',') if inside.is_some() => {
                if inside == Some(b']') {
                    Element
                } else {
                    Member
                }
            }
            (Bare | End | Element | Member, b']' | b'}') if inside == Some(first) => {
                self.open.pop();
                End
            }
            (Bare, b'.') => Bare,
            (_, b'.' | b'=' | b',' | b'[' | b']' | b'{' | b'}' | b'\r' | b'\n' | b'#') => {
                return Err(unexpected(expect, start));
            }
            (Line | Key | Member, b'"' | b'\'') if text[start..].starts_with(&[first; 3]) => {
                return Err(unexpected(expect, start));
            }
            (Line | Key | Member, _) => KeyEnd,
            (Value | Element, b'"' | b'\'') => End,
            (Bare, b'"' | b'\'') => return Err(unexpected(expect, start)),
            (Value | Element | Bare, _) => Bare,
            (KeyEnd | End, _) => return Err(unexpected(expect, start)),
        })
    }
}

fn unexpected(expect: Expect, at: usize) -> (usize, String) {
    let wants = match expect {
        Expect::Line => "a [header] or a key",
        Expect::Key => "a key",
        Expect::KeyEnd => "= after the key, or ] after a header",
        Expect::Value => "a value",
        Expect::Element => "a value or ]",
        Expect::Member => "a key or }",
        Expect::Bare | Expect::End => "the end of the value, of its line or of its brackets",
    };
    (at, format!("not TOML: expected {wants}"))
}

/// The offset after the string, of one line or of several, that `quote` opens at `start`.
fn end_of_string(text: &[u8], start: usize, quote: u8) -> usize {
    let triple = [quote; 3];
    let multi = text[start..].starts_with(&triple);
    let mut at = start + if multi { 3 } else { 1 };
    while at < text.len() {
        match text[at] {
            b'\\' if quote == b'"' => {
                at += 1;
                if matches!(text.get(at), Some(b'\\' | b'"')) {
                    at += 1;
                }
            }
            b'\n' if !multi => return at,
            byte if byte == quote && !multi => return at + 1,
            _ if multi && text[at..].starts_with(&triple) => {
                let extra = text[at + 3..]
                    .iter()
                    .take(2)
                    .take_while(|&&byte| byte == quote);
                return at + 3 + extra.count();
            }
            _ => at += 1,
        }
    }
    text.len()
}
