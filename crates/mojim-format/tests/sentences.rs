//! How documents are written: the rules of CONTRIBUTING.md that a machine can see.
//!
//! Owns the limits of each page. These are measured:
//!
//! - README, ARCHITECTURE and CONTRIBUTING
//! - the pages of the book that people read from top to bottom
//!
//! The reference is as long as it must be.
//! `cargo test -p mojim-format --test sentences -- --nocapture` prints what each page has.

use std::fs;
use std::path::{Path, PathBuf};

/// Most columns of a line of prose.
const COLUMNS: usize = 100;
/// Most words of a sentence.
const SENTENCE: usize = 25;

/// Words that have a better one. The table in CONTRIBUTING.md names it.
const RETIRED: &[&str] = &[
    "ill",
    "ills",
    "stranger",
    "strangers",
    "whoever",
    "whatever",
    "give way",
    "gives way",
    "giving way",
    "in vain",
    "operator's word",
    "secondary tier",
    "courtesy",
    "outbid",
];

/// What was counted in a page, or how much of it there may be.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    words: usize,
    /// Lines of prose of more than `COLUMNS` columns.
    wide: usize,
    semicolons: usize,
    /// Sentences of more than `SENTENCE` words.
    long: usize,
    /// Sentences that begin with "What" or "Who" and ask nothing.
    unnamed: usize,
    retired: usize,
}

impl Count {
    const fn of(words: usize) -> Count {
        Count {
            words,
            wide: 0,
            semicolons: 0,
            long: 0,
            unnamed: 0,
            retired: 0,
        }
    }

    /// Of a page as long as it must be.
    const fn old(semicolons: usize, unnamed: usize, retired: usize) -> Count {
        Count {
            semicolons,
            unnamed,
            retired,
            ..Count::of(usize::MAX)
        }
    }

    fn each(&self) -> [usize; 6] {
        let Count {
            words,
            wide,
            semicolons,
            long,
            unnamed,
            retired,
        } = *self;
        [words, wide, semicolons, long, unnamed, retired]
    }

    fn is_within(&self, most: &Count) -> bool {
        let mut both = self.each().into_iter().zip(most.each());
        both.all(|(found, most)| found <= most)
    }
}

/// Pages that break a rule, with what they have. A number here only falls.
const OLD: &[(&str, Count)] = &[
    ("docs/reference/guarantees.md", Count::old(0, 11, 1)),
    ("docs/reference/invariants.md", Count::old(0, 1, 1)),
    ("docs/reference/mount.md", Count::old(0, 0, 1)),
    // Its rows name what the suites print.
    ("docs/reference/programs.md", Count::old(2, 0, 0)),
    // The cells of its tables are what `pairs` reads.
    ("docs/reference/two-failures.md", Count::old(102, 7, 2)),
    ("docs/reference/views.md", Count::old(0, 0, 1)),
];

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// How much a page may have, by where it is.
fn allowed(name: &str) -> Count {
    match name {
        "README.md" => Count::of(900),
        "ARCHITECTURE.md" => Count::of(2_200),
        "CONTRIBUTING.md" => Count::of(1_000),
        _ if name.starts_with("docs/explanation/") => Count::of(1_200),
        // As long as it must be.
        _ if name.starts_with("docs/reference/") => Count::of(usize::MAX),
        _ => Count::of(600),
    }
}

/// The text without blocks of code, comments and the targets of links.
fn prose(text: &str) -> String {
    let mut code = false;
    let mut kept = String::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        if !code && !fence {
            kept += line;
        }
        code ^= fence;
        kept.push('\n');
    }
    let kept = without(&kept, "<!--", "-->", "");
    without(&kept, "](", ")", "]")
}

/// The text with `instead` in place of everything from `begin` to `end`.
fn without(text: &str, begin: &str, end: &str, instead: &str) -> String {
    let mut parts = text.split(begin);
    let mut kept = parts.next().unwrap_or("").to_owned();
    for part in parts {
        kept += instead;
        kept += part.split_once(end).map_or("", |(_, rest)| rest);
    }
    kept
}

/// The prose with a letter in place of each span of code.
fn without_code(prose: &str) -> String {
    let parts = prose.split('`').enumerate();
    parts
        .map(|(i, part)| if i % 2 == 0 { part } else { "X" })
        .collect()
}

/// Paragraphs, items of lists and cells of tables; of each whether it is a cell.
fn units(plain: &str) -> Vec<(bool, String)> {
    let mut all = Vec::new();
    let mut paragraph = String::new();
    for line in plain.lines().chain([""]) {
        let text = line.trim();
        let (row, heading) = (text.starts_with('|'), line.starts_with('#'));
        let marker = text.split(' ').next().unwrap_or("");
        let number = marker.strip_suffix('.').unwrap_or("-");
        let item = ["-", "*"].contains(&marker)
            || !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
        if row || heading || item || text.is_empty() {
            all.push((false, std::mem::take(&mut paragraph)));
        }
        if row {
            all.extend(text.split('|').map(|cell| (true, cell.trim().to_owned())));
        } else if !heading {
            paragraph = format!("{paragraph} {text}");
        }
    }
    all.retain(|(_, unit)| !unit.trim().is_empty());
    all
}

/// The sentences of a unit: they end with a mark that a space follows.
fn sentences(unit: &str) -> Vec<&str> {
    let mut all = Vec::new();
    let mut begin = 0;
    for (at, pair) in unit.as_bytes().windows(2).enumerate() {
        if b".!?:".contains(&pair[0]) && pair[1] == b' ' {
            all.push(unit[begin..=at].trim());
            begin = at + 1;
        }
    }
    all.push(unit[begin..].trim());
    all
}

/// The words of a text, as they are looked for.
fn words(text: &str) -> Vec<String> {
    let apart = |c: char| !(c.is_alphanumeric() || "_'’".contains(c));
    let all = text.split(apart).filter(|w| !w.is_empty());
    all.map(|w| w.to_lowercase().replace('’', "'")).collect()
}

/// How many words a page has: a path or a number with its unit is one.
fn length(prose: &str) -> usize {
    let apart = |c: char| !(c.is_alphanumeric() || "_'’./-".contains(c));
    let begins = |c: char| c.is_ascii_alphanumeric();
    prose.split(apart).filter(|w| w.contains(begins)).count()
}

/// A sentence with a subject that it does not name. A lead-in in bold is none.
fn is_unnamed(sentence: &str) -> bool {
    let begin = sentence.trim_start_matches(['-', '*', ' ', '"', '(']);
    let bold = sentence.contains("**What") || sentence.contains("**Who");
    let unnamed = begin.starts_with("What ") || begin.starts_with("Who ");
    unnamed && !bold && !sentence.ends_with('?')
}

/// What a page has, and where.
fn count(text: &str, rows_too: bool) -> (Count, Vec<String>) {
    let mut at = Vec::new();
    let mut found = Count::default();
    let mut code = false;
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        let counts = !code && !fence && (rows_too || !line.trim_start().starts_with('|'));
        if counts && line.chars().count() > COLUMNS {
            found.wide += 1;
            at.push(format!("wide: {line}"));
        }
    }
    let prose = prose(text);
    found.words = length(&prose);
    let plain = without_code(&prose);
    found.semicolons = plain.matches(';').count();
    let with = plain.lines().filter(|l| l.contains(';'));
    at.extend(with.map(|l| format!("semicolon: {l}")));
    for (cell, unit) in units(&plain) {
        for sentence in sentences(&unit) {
            if words(sentence).len() > SENTENCE {
                found.long += 1;
                at.push(format!("long: {sentence}"));
            }
            if !cell && is_unnamed(sentence) {
                found.unnamed += 1;
                at.push(format!("unnamed: {sentence}"));
            }
        }
    }
    let all = format!(" {} ", words(&plain).join(" "));
    for word in RETIRED {
        let times = all.matches(&format!(" {word} ")).count();
        found.retired += times;
        if times > 0 {
            at.push(format!("retired: {word}"));
        }
    }
    (found, at)
}

/// The pages that are measured, by their paths from the top.
fn pages() -> Vec<String> {
    let mut all: Vec<String> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
        .map(str::to_owned)
        .into();
    all.push("docs/introduction.md".to_owned());
    let parts = ["tutorial", "how-to", "reference", "explanation"];
    let mut dirs = parts.map(|part| format!("docs/{part}")).to_vec();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(top().join(&dir)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{dir}/{}", entry.file_name().to_str().unwrap());
            if entry.path().is_dir() {
                dirs.push(name);
            } else if name.ends_with(".md") {
                all.push(name);
            }
        }
    }
    all.sort();
    all
}

#[test]
fn documents_are_written_by_the_rules() {
    let mut failed = Vec::new();
    println!("words, wide lines, semicolons, long sentences, unnamed subjects, retired words");
    for name in pages() {
        let text = fs::read_to_string(top().join(&name)).unwrap();
        let (found, at) = count(&text, !name.contains('/'));
        println!("{:?} {name}", found.each());
        let old = OLD.iter().find(|(page, _)| *page == name);
        let most = old.map_or(allowed(&name), |(_, most)| *most);
        if !found.is_within(&most) {
            failed.push(format!(
                "{name}: {:?} of {:?}\n{}\n",
                found.each(),
                most.each(),
                at.join("\n")
            ));
        }
        // A page that is mended leaves the list.
        assert!(
            old.is_none() || !found.is_within(&allowed(&name)),
            "{name} is not old any more"
        );
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The `//!` lines at the top of a source file.
fn head(text: &str) -> String {
    let lines = text.lines().skip_while(|l| !l.starts_with("//!"));
    let lines = lines.map_while(|l| l.strip_prefix("//!"));
    let lines = lines.map(|l| l.strip_prefix(' ').unwrap_or(l));
    lines.map(|l| format!("{l}\n")).collect()
}

/// The heads of source files have no long sentence, none without a subject, and no semicolon.
#[test]
fn heads_of_files_are_written_by_the_rules() {
    let (mut dirs, mut files, mut failed) = (vec![top().join("crates")], 0, Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let (found, at) = count(&head(&fs::read_to_string(&path).unwrap()), false);
                files += 1;
                if found.semicolons + found.long + found.unnamed > 0 {
                    failed.push(format!("{}: {at:?}", path.display()));
                }
            }
        }
    }
    assert!(files > 500, "{files}");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The list in CONTRIBUTING.md is the one that is looked for.
#[test]
fn the_retired_words_are_named_for_contributors() {
    let text = fs::read_to_string(top().join("CONTRIBUTING.md")).unwrap();
    for word in RETIRED {
        assert!(text.contains(&format!("`{word}`")), "{word}");
    }
}

#[test]
fn a_broken_rule_is_seen() {
    let of = |text: &str| count(text, false).0.each();
    let long = "It ".repeat(26);
    let wide = "word ".repeat(25).replace("d w", "d. w");
    assert_eq!(of("One idea a sentence.\n"), [4, 0, 0, 0, 0, 0]);
    assert_eq!(of(&format!("{}.\n", long.trim())), [26, 0, 0, 1, 0, 0]);
    assert_eq!(
        of(&format!("| a | {} |\n", long.trim())),
        [27, 0, 0, 1, 0, 0]
    );
    assert_eq!(of(&wide), [25, 1, 0, 0, 0, 0]);
    assert_eq!(of("It ends; it begins.\n"), [4, 0, 1, 0, 0, 0]);
    assert_eq!(of("Go on. What is left is kept.\n"), [7, 0, 0, 0, 1, 0]);
    assert_eq!(of("- Who asks is told.\n"), [4, 0, 0, 0, 1, 0]);
    assert_eq!(
        of("The node\ngives way, Whoever asks.\n"),
        [6, 0, 0, 0, 0, 2]
    );
    // A sentence ends with its paragraph, its item and its cell.
    let items = "- It is one of several items of a list\n".repeat(9);
    assert_eq!(of(&items)[3], 0);
    // What is code, a link's target, a heading or a question breaks none.
    let fine = "# What is; `a;b` ill\n\n[x](docs/a;b.md) Why? What is it?\n\n```sh\na; b\n```\n";
    assert_eq!(of(fine)[1..3], [0, 1], "of the heading");
    assert_eq!(of(&fine.replace("is;", "is"))[1..5], [0; 4]);
    let row = format!("| {} |\n", "word. ".repeat(30));
    assert_eq!(
        (count(&row, false).0.wide, count(&row, true).0.wide),
        (0, 1)
    );
    assert!(!Count::of(601).is_within(&allowed("docs/how-to/keys.md")));
}
