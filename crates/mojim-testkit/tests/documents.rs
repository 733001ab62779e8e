//! README and the documents tell a user to type the right commands.
//!
//! - README is run from its top.
//! - Each `mojim` command of any shell block is one that the command line takes.
//!
//! The blocks are read from the documents themselves. Owns its temporary directory, ports
//! and processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mojim_testkit::home::Home;
use mojim_testkit::{build_bench, libraries, mojim_path, source, text};

/// The blocks of a document in one language, in order.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    let all = text.split(&begin).skip(1);
    all.map(|b| b.split_once("```").expect("it ends").0.to_owned())
        .collect()
}

/// Every document, those at the top and all below `docs`: its name and its text.
fn documents() -> Vec<(String, String)> {
    let list = |dir: &Path| fs::read_dir(dir).unwrap().map(|f| f.unwrap().path());
    let mut paths: Vec<_> = list(&source()).collect();
    let mut dirs = vec![source().join("docs")];
    while let Some(dir) = dirs.pop() {
        let (below, files): (Vec<PathBuf>, Vec<PathBuf>) = list(&dir).partition(|p| p.is_dir());
        dirs.extend(below);
        paths.extend(files);
    }
    paths.retain(|p| p.extension().is_some_and(|e| e == "md"));
    let read = |p: &PathBuf| (p.display().to_string(), fs::read_to_string(p).unwrap());
    paths.iter().map(read).collect()
}

/// The words of each `mojim` command in a shell block, without what is the shell's, or
/// another program's.
fn commands(block: &str) -> Vec<Vec<String>> {
    let lines = block.lines().flat_map(|l| l.split("&&"));
    let mut found = Vec::new();
    for line in lines {
        let line = line.split('#').next().unwrap_or("");
        let mut words = line.split_whitespace();
        let is_mojim = |w: &str| w == "mojim" || w.ends_with("/mojim");
        if !words.next().is_some_and(is_mojim) {
            continue;
        }
        let words = words.take_while(|w| !["&", "|", ">", "--"].contains(w));
        found.push(words.map(str::to_owned).collect());
    }
    found
}

#[test]
fn every_command_of_the_documents_is_one() {
    build_bench();
    let mut seen = 0;
    for (name, text) in documents() {
        for words in blocks(&text, "sh").iter().flat_map(|b| commands(b)) {
            // An argument that is not known comes before the help.
            let out = Command::new(mojim_path())
                .args(&words)
                .arg("--help")
                .output();
            let out = out.unwrap();
            let says = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{name}: mojim {words:?}: {says}");
            seen += 1;
        }
    }
    assert!(seen >= 12, "{seen}");
}

/// Every code of an event that stands in the sources is in the documents, and the other way round.
#[test]
fn every_code_of_an_event_is_documented() {
    fn look(dir: &Path, codes: &mut std::collections::BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path, codes);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                for mark in ["code = \"", "=> \""] {
                    let events = mark == "code = \"" || path.ends_with("conditions.rs");
                    let found = text.split(mark).skip(1).filter(|_| events);
                    codes.extend(found.map(|t| t.split('"').next().unwrap().to_owned()));
                }
            }
        }
    }
    let mut codes = std::collections::BTreeSet::new();
    for name in ["node", "views", "mount", "cli"] {
        look(
            &source().join(format!("crates/mojim-{name}/src")),
            &mut codes,
        );
    }
    let text = fs::read_to_string(source().join("docs/reference/events.md")).unwrap();
    let table = text
        .split("## Codes")
        .nth(1)
        .unwrap()
        .split("## Events that last")
        .next()
        .unwrap();
    let cells = table.lines().filter(|l| l.starts_with("| `"));
    let first = cells.filter_map(|l| l.split('|').nth(1));
    let named: std::collections::BTreeSet<String> = first
        .flat_map(|c| c.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    assert_eq!(codes, named);
    assert!(codes.len() > 10);
}

/// Each kind of finding that `mojim status` lists has a page, and a row in the table of them. The page
/// opens with the text as it is printed, then says what to do.
#[test]
fn every_finding_of_status_has_a_page() {
    let out = Command::new(mojim_path())
        .args(["status", "--help"])
        .output();
    let help = text(&out.unwrap().stdout);
    let kinds = help
        .split("`kind` (")
        .nth(1)
        .expect("the help lists the kinds");
    let kinds = kinds.split(')').next().unwrap().split(',');
    let kinds: Vec<&str> = kinds.map(str::trim).collect();
    assert!(kinds.len() > 10, "{kinds:?}");
    let pages = source().join("docs/how-to/status");
    let index = fs::read_to_string(pages.join("index.md")).unwrap();
    for kind in kinds {
        let page = format!("{kind}.md");
        let opens = fs::read_to_string(pages.join(&page)).expect(&page);
        assert!(opens.starts_with(&format!("# `{kind}`: ")), "{page}");
        let before = opens.split("\n## What to do").next().unwrap();
        assert!(before.len() < opens.len(), "{page} says what to do");
        let printed = blocks(before, "text");
        assert!(
            printed.first().is_some_and(|b| b.starts_with("! ")),
            "{page} opens with the finding's text"
        );
        assert!(index.contains(&format!("[`{kind}`]({page})")), "{kind}");
    }
}

/// The rules of CONTRIBUTING for a line of help that a machine can see: what breaks one.
fn breaks_a_rule(line: &str) -> Option<String> {
    let ends = [". ", "? ", "! ", ": "];
    let mut sentences = vec![line];
    for end in ends {
        let parts = sentences.into_iter().flat_map(|s| s.split(end));
        sentences = parts.collect();
    }
    for sentence in sentences {
        let words = sentence.split_whitespace().count();
        if words > 25 {
            return Some(format!("{words} words: {sentence}"));
        }
        let begin = sentence.trim_start_matches(['-', ' ', '"']);
        let unnamed = ["What ", "Who ", "That "];
        if unnamed.iter().any(|w| begin.starts_with(w)) && !begin.starts_with("That is ") {
            return Some(format!("no subject is named: {sentence}"));
        }
    }
    line.contains(';').then(|| format!("a semicolon: {line}"))
}

/// The help of `mojim run` had sentences of 60 words, and that of `mojim status` a list of six conditions
/// in one sentence. The manual pages are made of the same texts.
#[test]
fn help_is_written_by_the_rules_for_documents() {
    build_bench();
    let home = Home::new("help", 0);
    let out = Command::new(mojim_path())
        .arg("man")
        .arg(&home.dir)
        .output();
    assert!(out.unwrap().status.success());
    let pages = fs::read_dir(&home.dir).unwrap();
    let pages = pages.map(|p| p.unwrap().path());
    let mut wrong = Vec::new();
    let mut seen = Vec::new();
    for page in pages.filter(|p| p.extension().is_some_and(|e| e == "1")) {
        let stem = page.file_stem().unwrap().to_str().unwrap().to_owned();
        let words: Vec<&str> = stem.split('-').skip(1).collect();
        if words.contains(&"help") || stem.contains("__") {
            continue;
        }
        let out = Command::new(mojim_path())
            .args(&words)
            .arg("--help")
            .output();
        let out = out.unwrap();
        assert!(out.status.success(), "{stem}");
        let help = text(&out.stdout);
        let lines = help.lines().filter(|l| !l.starts_with("Usage:"));
        wrong.extend(
            lines
                .filter_map(breaks_a_rule)
                .map(|w| format!("{stem}: {w}")),
        );
        seen.push(stem);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for page in [
        "mojim",
        "mojim-status",
        "mojim-heap-move",
        "mojim-bench-sync",
    ] {
        assert!(seen.iter().any(|s| s == page), "{page}: {seen:?}");
    }
}

#[test]
fn a_broken_rule_of_help_is_seen() {
    let fine = "Copy files. That is the mirror: it follows [default: 5]";
    assert_eq!(breaks_a_rule(fine), None);
    assert_eq!(breaks_a_rule(&"It ".repeat(25)), None);
    for broken in [
        &"It ".repeat(26),
        "Copy files. What has the name is an error",
        "- Who asks is told",
        "The configuration file; it is changed",
    ] {
        assert!(breaks_a_rule(broken).is_some(), "{broken}");
    }
}

/// The check of commands must see a command that is wrong.
#[test]
fn a_wrong_command_is_seen() {
    let block = "cd x && target/release/mojim status --colour red # why\n";
    let [words] = &commands(block)[..] else {
        panic!("it is not found")
    };
    assert_eq!(words, &["status", "--colour", "red"]);
    let out = Command::new(mojim_path())
        .args(words)
        .arg("--help")
        .output();
    assert!(!out.unwrap().status.success());
}

/// Three nodes, the C program, and what status says of them: the blocks of README one after the
/// other, but for what was built before, in a directory, at ports and with a build of this
/// test's. The program in Python is run by `bindings/python/tests/test_page.py`.
#[test]
fn readme_works_from_the_source() {
    let readme = fs::read_to_string(source().join("README.md")).unwrap();
    let home = Home::new("readme", 3);
    let cluster = format!("readme-{}", std::process::id());
    let _rings = Rings(format!("mojim-{cluster}-"));
    let built = libraries().display().to_string();
    let here = |block: &str| {
        let mut block = block.replace("/tmp/mojim", &home.dir.display().to_string());
        for (port, free) in ["7401", "7402", "7403"].iter().zip(&home.ports) {
            block = block.replace(port, &free.number.to_string());
        }
        block
            .replace("cluster = \"example\"", &format!("cluster = \"{cluster}\""))
            .replace("$PWD/target/release", &built)
            .replace("target/release", &built)
            .replace(
                "-Iinclude",
                &format!("-I{}", source().join("include").display()),
            )
            .replace(
                "examples/counter.c",
                &source().join("examples/counter.c").display().to_string(),
            )
    };
    let config = here(&blocks(&readme, "toml")[0]);
    fs::write(home.dir.join("mojim.toml"), config).unwrap();
    let shell = blocks(&readme, "sh");
    let [nodes, program] = &shell[..] else {
        panic!("README has other blocks: {shell:?}")
    };
    let nodes = nodes.replace("cargo build --release\n", "");
    assert!(nodes.matches("mojim node").count() == 3 && program.contains("cc examples"));
    let ready = "for n in a b w; do\n  until [ -S $n/.mojim/node.sock ]; do :; done\ndone\n";
    // Who asks too early, while the voters find each other, asks again.
    let (programs, status) = program
        .rsplit_once("target/release/mojim status")
        .expect("it ends with it");
    let again = format!(
        "for i in $(seq 100); do\n  target/release/mojim status{} && exit 0\n  sleep 0.2\ndone\nexit 1\n",
        status.trim_end()
    );
    let script = format!(
        "set -e\ntrap 'kill $(jobs -p)' EXIT\n{}{}{}{}",
        here(&nodes),
        ready,
        here(programs),
        here(&again)
    );
    let out = Command::new("bash")
        .arg("-c")
        .arg(&script)
        .current_dir(&home.dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = text(&out.stdout);
    assert!(
        out.status.success(),
        "{script}\n{said}\n{}",
        text(&out.stderr)
    );
    assert!(
        said.contains("run 1\n") && said.contains("run 2\n"),
        "{said}"
    );
    assert!(said.contains("volume orders  mode sync  well\n"), "{said}");
}

/// The rings of a cluster in shared memory, which outlive its programs; by how their
/// directories' names begin.
struct Rings(String);

impl Drop for Rings {
    fn drop(&mut self) {
        for d in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if d.file_name().to_string_lossy().starts_with(&self.0) {
                let _ = fs::remove_dir_all(d.path());
            }
        }
    }
}
