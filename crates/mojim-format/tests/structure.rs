//! The house: no crate imports one above it, and within a crate no two files import
//! each other, not even by way of others.
//!
//! `cargo test -p mojim-format --test structure -- --nocapture` prints what there is:
//! lines of each crate, circles, the longest functions. It stands in the crate at the
//! bottom since it needs none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// From the ground. A crate imports only from rows below its own.
const ROWS: &[&[&str]] = &[
    &["format", "undo"],
    &["env", "config", "protocol", "keys"],
    &["linux", "store"],
    &["memory", "copy", "emulate"],
    &["replica"],
    &["views", "rivals", "engine"],
    &["heap", "persistent"],
    &["tx"],
    &["sim", "node", "c", "itm", "mojim"],
    &["crash", "mount", "preload"],
    &["cli", "testkit"],
    &["bench"],
];

/// Most lines in a crate that is shipped, without its tests.
const MOST_LINES: usize = 10_000;
/// Most lines of a function, without its comments.
const MOST_FUNCTION: usize = 70;
/// Most lines of README.md. Its words and columns, as those of the other documents, are
/// measured by `sentences.rs`.
const MOST_README: usize = 120;
/// These are evidence, and no part of what is shipped.
const EVIDENCE: &[&str] = &["bench", "crash", "rivals", "sim", "testkit"];

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A crate's name without the product's.
fn short(name: &str) -> &str {
    name.strip_prefix("mojim-").unwrap_or(name)
}

fn row(name: &str) -> usize {
    ROWS.iter()
        .position(|row| row.contains(&name))
        .unwrap_or_else(|| panic!("{name} has no row"))
}

fn crates() -> Vec<(String, PathBuf)> {
    let dirs = fs::read_dir(top().join("crates")).unwrap();
    let mut all: Vec<_> = dirs
        .map(|d| d.unwrap().path())
        .filter(|d| d.join("Cargo.toml").exists())
        .map(|d| {
            (
                short(d.file_name().unwrap().to_str().unwrap()).to_owned(),
                d,
            )
        })
        .collect();
    all.sort_by_key(|(name, _)| (row(name), name.clone()));
    all
}

/// Which crates of ours a manifest's text imports.
fn imports(manifest: &str) -> BTreeSet<String> {
    let mut wanted = false;
    let mut found = BTreeSet::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            wanted = line == "[dependencies]";
        }
        let name = line.split([' ', '.', '=']).next().unwrap_or("");
        // Our crates have the engine as `mojim`: the workspace's manifest says so.
        if wanted && (name == "mojim" || line.contains("package = \"mojim-engine\"")) {
            found.insert("engine".to_owned());
        } else if wanted && name.starts_with("mojim-") {
            found.insert(short(name).to_owned());
        }
    }
    found
}

/// The imports of a crate that its row does not allow, or that the simulator, which runs
/// it over another world, could not follow.
fn upward(name: &str, manifest: &str) -> Vec<String> {
    let mine = row(name);
    let simulated = ["copy", "replica", "views", "sim"].contains(&name);
    let all = imports(manifest).into_iter();
    all.filter(|i| row(i) >= mine || simulated && ["linux", "memory"].contains(&i.as_str()))
        .collect()
}

#[test]
fn no_crate_imports_one_beside_or_above_it() {
    for (name, dir) in crates() {
        let manifest = fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let found = upward(&name, &manifest);
        assert!(found.is_empty(), "mojim-{name} imports {found:?}");
    }
}

/// The switches that break the engine are compiled into the simulator alone.
#[test]
fn no_program_that_is_shipped_can_be_broken_by_a_switch() {
    for (name, dir) in crates() {
        let manifest = fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let asks = manifest.contains("\"mutations\"");
        assert_eq!(asks, name == "sim", "mojim-{name}");
        let sim = imports(&manifest).contains("sim");
        assert!(!sim || name == "crash", "mojim-{name}");
    }
    // Features are one for all that is built at once: `cargo build --release` of the
    // workspace had them in the `mojim` command, because the simulator was built beside it.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let list = |key: &str| -> BTreeSet<String> {
        let at = text.find(&format!("\n{key} = [")).expect("it is there");
        let list = &text[at..at + text[at..].find(']').unwrap()];
        let names = list.split('"').skip(1).step_by(2);
        names.map(|n| n.replace("crates/mojim-", "")).collect()
    };
    let mut all = list("members");
    all.retain(|n| !["sim", "crash", "testkit"].contains(&&**n));
    assert_eq!(list("default-members"), all);
}

/// Of the command, which every node has: measurements are the program beside it.
#[test]
fn what_is_shipped_to_nodes_contains_no_measurement() {
    for (name, dir) in crates() {
        let manifest = fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let of = imports(&manifest);
        let measures = of.contains("bench") || of.contains("rivals");
        assert_eq!(measures, name == "bench", "mojim-{name}");
    }
}

#[test]
fn an_import_upward_is_seen() {
    let manifest = "[dependencies]\nmojim-replica.workspace = true\nlibc.workspace = true\n";
    assert_eq!(upward("store", manifest), ["replica"]);
    assert_eq!(upward("node", manifest), [""; 0]);
    let manifest = "[dependencies]\nengine = { package = \"mojim-engine\", path = \"../x\" }\n";
    assert_eq!(upward("linux", manifest), ["engine"]);
    assert_eq!(upward("c", manifest), [""; 0]);
}

/// What a file says without comments and its tests.
fn product(text: &str) -> String {
    let mark = "\n#[cfg(test)]\n";
    let begins = |at: &usize| {
        let mut rest = text[at + mark.len()..].lines();
        let item = rest.find(|l| !l.starts_with("#["));
        item.is_some_and(|l| l.ends_with("mod tests {") || l == "mod tests;")
    };
    let mut marks = text.match_indices(mark).map(|(at, _)| at);
    let end = marks.find(begins).unwrap_or(text.len());
    let lines = text[..end].lines();
    lines
        .filter(|l| !l.trim_start().starts_with("//"))
        .map(|l| format!("{l}\n"))
        .collect()
}

/// The files of a crate by their module's path.
fn modules(dir: &Path) -> BTreeMap<Vec<String>, String> {
    let mut all = BTreeMap::new();
    let mut dirs = vec![(dir.join("src"), Vec::new())];
    while let Some((dir, path)) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap().path();
            let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
            if entry.is_dir() && name == "tests" {
                continue;
            }
            if entry.is_dir() {
                dirs.push((entry, [&path[..], &[name]].concat()));
            } else if entry.extension().is_some_and(|e| e == "rs") && name != "tests" {
                let text = product(&fs::read_to_string(&entry).unwrap());
                let module = match &*name {
                    "lib" | "main" | "mod" => path.clone(),
                    _ => [&path[..], &[name]].concat(),
                };
                all.insert(module, text);
            }
        }
    }
    all
}

/// The paths that a text names from its crate's root, each a list of names: of
/// `crate::a::{b, c::d}` those of `a::b` and `a::c::d`.
fn named(text: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let starts = ["crate::", "super::"];
    let mut rest = text;
    while let Some((at, start)) = starts
        .iter()
        .filter_map(|s| rest.find(s).map(|at| (at, *s)))
        .min()
    {
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let begins = !rest[..at].ends_with(is_word);
        rest = &rest[at + start.len()..];
        if !begins {
            continue;
        }
        let mut base = match start {
            "super::" => module[..module.len().saturating_sub(1)].to_vec(),
            _ => Vec::new(),
        };
        while let Some(more) = rest.strip_prefix("super::") {
            base.pop();
            rest = more;
        }
        tree(rest, &base, &mut found);
    }
    found
}

/// Reads one tree of a `use` behind `base`; returns how many bytes it is.
fn tree(text: &str, base: &[String], found: &mut Vec<Vec<String>>) -> usize {
    if let Some(list) = text.strip_prefix('{') {
        let mut at = 0;
        loop {
            let rest = &list[at..];
            let blank = rest.len() - rest.trim_start_matches([',', ' ', '\n']).len();
            at += blank;
            if list[at..].is_empty() || list[at..].starts_with('}') {
                return (at + 2).min(text.len());
            }
            at += tree(&list[at..], base, found);
        }
    }
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let len = text.find(|c| !word(c)).unwrap_or(text.len());
    if len == 0 {
        found.push(base.to_vec());
        return text.chars().next().map_or(0, char::len_utf8);
    }
    let path = [base, &[text[..len].to_owned()]].concat();
    match text[len..].strip_prefix("::") {
        Some(more) => len + 2 + tree(more, &path, found),
        None => {
            found.push(path);
            len
        }
    }
}

type Graph = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

fn graph(all: &BTreeMap<Vec<String>, String>) -> Graph {
    let target = |path: &Vec<String>| {
        (0..=path.len())
            .rev()
            .map(|n| path[..n].to_vec())
            .find(|p| all.contains_key(p))
    };
    all.iter()
        .map(|(module, text)| {
            let mut to: BTreeSet<_> = named(text, module).iter().filter_map(target).collect();
            // What a parent has of its children.
            let children = all
                .keys()
                .filter(|c| c.len() == module.len() + 1 && c.starts_with(module));
            for child in children {
                let name = child.last().expect("it has one");
                if text.contains(&format!("{name}::")) && !module.is_empty() {
                    to.insert(child.clone());
                }
            }
            to.remove(module);
            // The root only lists its modules.
            to.remove(&Vec::new());
            (module.clone(), to)
        })
        .collect()
}

/// Sets of modules that reach each other.
fn circles(graph: &Graph) -> Vec<BTreeSet<Vec<String>>> {
    let reach = |from: &Vec<String>| {
        let mut seen = BTreeSet::new();
        let mut todo: Vec<_> = graph[from].iter().collect();
        while let Some(m) = todo.pop() {
            if seen.insert(m.clone()) {
                todo.extend(graph.get(m).into_iter().flatten());
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = graph.keys().map(|m| (m, reach(m))).collect();
    let mut found: Vec<BTreeSet<Vec<String>>> = Vec::new();
    for (m, seen) in &reached {
        let circle: BTreeSet<_> = seen
            .iter()
            .filter(|o| reached.get(o).is_some_and(|r| r.contains(*m)))
            .cloned()
            .collect();
        if circle.len() > 1 && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

fn text_of(circle: &BTreeSet<Vec<String>>) -> Vec<String> {
    circle.iter().map(|m| m.join("/")).collect()
}

#[test]
fn files_import_in_no_circle() {
    for (name, dir) in crates() {
        let found = circles(&graph(&modules(&dir)));
        let found: Vec<Vec<String>> = found.iter().map(text_of).collect();
        assert!(found.is_empty(), "mojim-{name}: {found:?}");
    }
}

#[test]
fn a_circle_is_seen() {
    let module = |name: &str, text: &str| (vec![name.to_owned()], text.to_owned());
    let all = [
        module("a", "use crate::{x::X, b::{B, C}};\n"),
        module("b", "use crate::c;\n"),
        module("c", "fn f() { crate::a::f() }\n"),
        module("x", ""),
    ];
    let found = circles(&graph(&all.into_iter().collect()));
    assert_eq!(found.len(), 1);
    assert_eq!(text_of(&found[0]), ["a", "b", "c"]);
}

/// Functions of a formatted text with their lines.
fn functions(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (i, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let Some((before, after)) = line.split_once("fn ") else {
            continue;
        };
        let words = [
            "pub", "unsafe", "const", "extern", "async", "(", ")", "\"C\"",
        ];
        let is = before
            .split_whitespace()
            .all(|w| words.iter().any(|k| w.starts_with(k)));
        let end = format!("{}}}", " ".repeat(indent));
        if let (true, Some(n)) = (is, lines[i..].iter().position(|l| *l == end)) {
            let name = after.split(['(', '<']).next().unwrap_or("");
            found.push((n + 1, name.to_owned()));
        }
    }
    found
}

#[test]
fn no_crate_is_larger_than_a_reader_holds_in_mind() {
    let mut longest = Vec::new();
    println!("lines of product code");
    for (name, dir) in crates() {
        let all = modules(&dir);
        let lines: usize = all.values().map(|t| t.lines().count()).sum();
        println!("{lines:>7} {name}");
        let shipped = !EVIDENCE.contains(&&*name);
        assert!(
            !shipped || lines <= MOST_LINES,
            "mojim-{name} has {lines} lines"
        );
        for (module, text) in &all {
            let of = |(n, f)| (n, format!("{name} {}: {f}", module.join("/")));
            longest.extend(functions(text).into_iter().map(of));
        }
    }
    longest.sort_unstable_by(|a, b| b.cmp(a));
    assert!(longest[0].0 <= MOST_FUNCTION, "{:?}", longest[0]);
    println!("lines of the longest functions");
    for (n, f) in longest.iter().take(10) {
        println!("{n:>7} {f}");
    }
    let readme = fs::read_to_string(top().join("README.md")).unwrap();
    let lines = readme.lines().count();
    println!("{lines:>7} lines of README.md");
    assert!(lines <= MOST_README, "{lines} lines of README.md");
    assert!(longest.len() > 1000, "too few functions were found");
}

/// README shows the examples as they are, and as they are compiled.
#[test]
fn the_programs_of_the_readme_are_the_examples() {
    let readme = fs::read_to_string(top().join("README.md")).unwrap();
    let programs = [
        ("counter.c", "#include"),
        ("counter.rs", "use mojim"),
        ("counter.py", "import mojim"),
    ];
    for (name, begins) in programs {
        let text = fs::read_to_string(top().join("examples").join(name)).unwrap();
        let (_, program) = text.split_at(text.find(begins).unwrap());
        assert!(readme.contains(program), "{name}");
    }
}

/// Every document, those at the top and all below `docs`, by its path.
fn documents() -> Vec<(PathBuf, String)> {
    let list = |dir: &Path| fs::read_dir(dir).unwrap().map(|d| d.unwrap().path());
    let mut paths: Vec<_> = list(&top()).collect();
    let mut dirs = vec![top().join("docs")];
    while let Some(dir) = dirs.pop() {
        let (below, files): (Vec<PathBuf>, Vec<PathBuf>) = list(&dir).partition(|p| p.is_dir());
        dirs.extend(below);
        paths.extend(files);
    }
    paths.retain(|p| p.extension().is_some_and(|e| e == "md"));
    let read = |p: PathBuf| (p.clone(), fs::read_to_string(&p).unwrap());
    paths.into_iter().map(read).collect()
}

/// How a heading is named in a link.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

/// The links of a document that lead nowhere.
fn dangling(from: &Path, text: &str) -> Vec<String> {
    let links = text.split("](").skip(1).filter_map(|l| l.split(')').next());
    let local = links.filter(|l| !l.contains("://"));
    let leads = |link: &&str| {
        let (file, place) = link.split_once('#').unwrap_or((link, ""));
        let path = match file {
            "" => from.to_owned(),
            file => from.parent().unwrap().join(file),
        };
        let found = match place {
            "" => return !path.exists(),
            _ => fs::read_to_string(path).unwrap_or_default(),
        };
        let headings = found.lines().filter_map(|l| l.strip_prefix("#"));
        !headings
            .map(|h| anchor(h.trim_start_matches('#').trim()))
            .any(|a| a == place)
    };
    local.filter(leads).map(str::to_owned).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut links = 0;
    for (path, text) in documents() {
        links += text.matches("](").count();
        assert_eq!(dangling(&path, &text), [""; 0], "{}", path.display());
    }
    assert!(links > 20, "{links}");
    let here = top().join("README.md");
    let broken = "[a](docs/none.md) [b](docs/reference/limits.md#none) [c](docs/reference/limits.md#network)";
    assert_eq!(
        dangling(&here, broken),
        ["docs/none.md", "docs/reference/limits.md#none"]
    );
}

/// ARCHITECTURE.md has a row for each crate, and every file that it names is there.
#[test]
fn the_architecture_names_what_is_here() {
    let text = fs::read_to_string(top().join("ARCHITECTURE.md")).unwrap();
    let mut files = Vec::new();
    for (_, dir) in crates() {
        let name = dir.file_name().unwrap().to_str().unwrap();
        assert!(text.contains(&format!("| `{name}` |")), "{name}");
        let mut dirs = vec![dir.join("src")];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                files.push(path.display().to_string());
                if path.is_dir() {
                    dirs.push(path);
                }
            }
        }
    }
    let spans = text.split('`').skip(1).step_by(2);
    let named = spans.filter(|s| s.ends_with(".rs") || s.ends_with('/'));
    let mut seen = 0;
    for name in named {
        let end = format!("/{}", name.trim_end_matches('/'));
        let elsewhere = top().join(name).exists();
        assert!(
            elsewhere || files.iter().any(|f| f.ends_with(&end)),
            "{name}"
        );
        seen += 1;
    }
    assert!(seen > 50, "{seen}");
}

/// A page that SUMMARY.md does not name is not in the book. The name there is the page's title.
#[test]
fn every_page_is_in_the_book() {
    let docs = top().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let mut pages = 0;
    for (path, text) in documents() {
        let Ok(name) = path.strip_prefix(&docs) else {
            continue;
        };
        let name = name.to_str().unwrap();
        if !["SUMMARY.md", "404.md"].contains(&name) {
            pages += 1;
            let title = match name {
                "introduction.md" => "Introduction",
                _ => text.lines().next().unwrap().trim_start_matches("# "),
            };
            let row = format!("[{title}]({name})");
            assert!(summary.contains(&row), "docs/{name}: {row}");
        }
    }
    assert!(pages > 40, "{pages}");
}

/// What a picture draws in a colour that is not of the page's scheme.
fn without_scheme(picture: &str) -> Vec<String> {
    let (style, drawn) = picture.split_once("</style>").unwrap_or(("", picture));
    let (light, dark) = style
        .split_once("(prefers-color-scheme: dark)")
        .unwrap_or((style, ""));
    let has_both = |class: &str| {
        let rule = format!(".{class}{{");
        light.contains(&rule) && dark.contains(&rule)
    };
    let follows = |line: &&str| {
        let class = line.split("class=\"").nth(1);
        let class = class.and_then(|c| c.split('"').next());
        let is_text = line.trim_start().starts_with("<text");
        !line.contains("=\"#") && class.map_or(is_text, has_both)
    };
    let shapes = ["<rect", "<circle", "<path", "<polygon", "<text"];
    let lines = drawn.lines();
    let drawn = lines.filter(|l| shapes.iter().any(|s| l.trim_start().starts_with(s)));
    drawn.filter(|l| !follows(l)).map(str::to_owned).collect()
}

/// A page is light or dark. A shape in a fixed colour, or a picture without a ground of its own, cannot
/// be read on one of the two.
#[test]
fn pictures_are_drawn_for_light_and_for_dark_pages() {
    let pages: String = documents().into_iter().map(|(_, text)| text).collect();
    let mut pictures = 0;
    for entry in fs::read_dir(top().join("docs/pictures")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(without_scheme(&text), [""; 0], "{name}");
        assert!(text.contains("<rect class=\"bg\""), "{name} has no ground");
        assert!(text.contains("<desc id=\"desc\">"), "{name} says nothing");
        let shown = format!("pictures/{name})");
        assert!(pages.contains(&shown), "no page shows {name}");
        pictures += 1;
    }
    assert!(pictures > 5, "{pictures}");
    let style = ".a{} @media (prefers-color-scheme: dark) {.a{}}</style>";
    let seen = "<rect/>\n<text fill=\"#fff\">\n<path class=\"b\"/>";
    let fine = "<text>\n<rect class=\"a\"/>";
    let found = without_scheme(&format!("{style}\n{seen}\n{fine}"));
    assert_eq!(found.join("\n"), seen);
}

/// Who reads this tree has nothing else.
#[test]
fn nothing_refers_to_a_document_that_is_not_here() {
    let words = ["DESIGN.md", "FEATURES.md", "HOUSE.md", "TESTING.md"];
    let mut files = 0;
    for (_, dir) in crates() {
        let mut dirs = vec![dir];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    dirs.push(path);
                    continue;
                }
                let is_this = path.ends_with("mojim-format/tests/structure.rs");
                if path.extension().is_none_or(|e| e != "rs") || is_this {
                    continue;
                }
                files += 1;
                let text = fs::read_to_string(&path).unwrap();
                let found: Vec<_> = words.iter().filter(|w| text.contains(**w)).collect();
                assert!(found.is_empty(), "{}: {found:?}", path.display());
            }
        }
    }
    assert!(files > 100, "{files}");
}
