//! Every snippet of a page in docs/ and its directories is compiled and run, and prints what the
//! page says.
//!
//! A block is marked by words behind its language, which no reader of the page sees:
//!
//! ````text
//! ```c run                 a whole program: compiled, linked with libmojim, run; it ends with 0
//! ```c fragment            what a main could hold, in which `m` is the attached volume; likewise
//! ```rust build as=todo    compiled, and kept under this name for `sh` blocks that follow
//! ```c refused             the compiler refuses it
//! ```c file=todo.c         kept under this name, for the blocks that follow
//! ```sh run                commands, as a user types them (`cc todo.c -lmojim -o todo && ./todo`)
//! ```text output           what the block before prints on standard output, exactly; of one that
//!                          is refused, lines of the compiler's message, each of them a part of one
//! ```c run flags=-O2,-fgnu-tm,-lmojim_itm      more for the compiler, before -lmojim
//! ```cpp run needs=google/dense_hash_map       left out where /usr/include lacks a header
//! ````
//!
//! Languages: c, cpp, rust (without `refused`; crates of this workspace may be used), python.
//! The blocks of one page run in order, in one directory with a `mojim.toml` whose node is `a`
//! and whose only volume is `v`, unreplicated. What they leave is there for the next block.
//! Headers, libraries, `mojim` of Python and the Rust crates are found without more flags.
//! A page with a marked block has no other blocks in these languages. PAGES=c,tutorial/rust runs
//! the pages of these names alone. `scripts/python` brings Python with NumPy, where a page needs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mojim_testkit::interface::*;

const LANGUAGES: [&str; 4] = ["c", "cpp", "rust", "python"];
/// The pages that have blocks to run.
const MARKED: [&str; 12] = [
    "how-to/c-failover",
    "how-to/commit-many-files-at-once",
    "reference/c",
    "reference/cpp",
    "reference/python",
    "reference/rust",
    "reference/transactions",
    "reference/variables",
    "tutorial/c",
    "tutorial/cpp",
    "tutorial/python",
    "tutorial/rust",
];
const MARKS: [&str; 5] = ["run", "build", "fragment", "refused", "file="];

/// One block of a page.
#[derive(Debug)]
struct Block {
    /// Where it begins, for messages.
    line: usize,
    /// The words of its first line: the language, then the marks.
    words: Vec<String>,
    text: String,
}

impl Block {
    fn language(&self) -> &str {
        self.words.first().map_or("", |w| w)
    }

    fn has(&self, mark: &str) -> bool {
        self.words[1..].iter().any(|w| w == mark)
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.words[1..].iter().find_map(|w| w.strip_prefix(key))
    }

    /// The header that is not here, of those that it needs.
    fn lacks(&self) -> Option<&str> {
        let mut needs = self.value("needs=").unwrap_or_default().split(',');
        needs.find(|h| !Path::new("/usr/include").join(h).exists())
    }

    fn is_marked(&self) -> bool {
        let mut marks = self.words.iter().skip(1);
        marks.any(|w| MARKS.iter().any(|m| w.starts_with(m)))
    }
}

/// The fenced blocks of a page, in order.
fn blocks(page: &str) -> Vec<Block> {
    let mut all = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let Some(words) = line.strip_prefix("```") else {
            continue;
        };
        let words = words.split_whitespace().map(str::to_owned).collect();
        let body = lines.by_ref().map(|(_, l)| l);
        let body: Vec<&str> = body.take_while(|l| *l != "```").collect();
        all.push(Block {
            line: at + 1,
            words,
            text: body.iter().flat_map(|l| [l, "\n"]).collect(),
        });
    }
    all
}

/// Where the blocks of one page run.
struct Place {
    volume: TestVolume,
    done: usize,
}

impl Place {
    fn new() -> Place {
        Place {
            volume: TestVolume::new(""),
            done: 0,
        }
    }

    /// A command in the place, for which everything of ours is where a system has it.
    fn command(&self, program: &str) -> Command {
        let (include, libraries) = (source().join("include"), libraries());
        let python = source().join("bindings/python/src");
        let mut path = libraries.as_os_str().to_owned();
        path.push(":");
        path.push(source().join("target/python/bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut c = Command::new(program);
        c.current_dir(&self.volume.root)
            .env("C_INCLUDE_PATH", &include)
            .env("CPLUS_INCLUDE_PATH", &include)
            .env("LIBRARY_PATH", libraries)
            .env("LD_LIBRARY_PATH", libraries)
            .env("PYTHONPATH", python)
            .env("MOJIM_LIBRARY", libraries.join("libmojim.so"))
            .env("PATH", path);
        c
    }

    /// Runs a block, if it is one to run; gives what is compared with the page.
    fn run(&mut self, block: &Block) -> Result<String, String> {
        if let Some(name) = block.value("file=") {
            fs::write(self.volume.root.join(name), &block.text).unwrap();
            return Ok(String::new());
        }
        self.done += 1;
        let name = match block.value("as=") {
            Some(name) => name.to_owned(),
            None => format!("snippet{}", self.done),
        };
        let mut run = match block.language() {
            "sh" => {
                let mut c = self.command("bash");
                c.args(["-ec", &block.text]);
                c
            }
            "python" => {
                fs::write(self.volume.root.join(&name), whole(block)).unwrap();
                let python = source().join("scripts/python");
                let mut c = self.command(python.to_str().unwrap());
                c.arg(&name);
                c
            }
            _ => {
                let out = output(&mut self.compiler(block, &name));
                match (out.status.success(), block.has("refused")) {
                    (true, false) if block.has("build") => return Ok(String::new()),
                    (true, false) => self.command(&format!("./{name}")),
                    (false, true) => return Ok(text(&out)),
                    (true, true) => return Err("it compiles".to_owned()),
                    (false, false) => return Err(text(&out)),
                }
            }
        };
        let out: Output = output(&mut run);
        match out.status.success() {
            true => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
            false => Err(format!("{}\n{}", out.status, text(&out))),
        }
    }

    fn compiler(&self, block: &Block, name: &str) -> Command {
        let language = block.language();
        let extension = if language == "rust" { "rs" } else { language };
        let file = format!("{name}.{extension}");
        fs::write(self.volume.root.join(&file), whole(block)).unwrap();
        let flags = block.value("flags=").unwrap_or_default();
        let flags = flags.split(',').filter(|f| !f.is_empty());
        let compiler = match language {
            "c" => "cc",
            "cpp" => "c++",
            _ => "rustc",
        };
        let mut c = self.command(compiler);
        // Its messages have the quotes of ASCII then.
        c.env("LC_ALL", "C");
        c.args(flags.clone().filter(|f| !f.starts_with("-l")));
        if language == "rust" {
            c.args(["--edition", "2024", "-D", "warnings"]);
            c.args(externs());
            c.args([&file, "-o", name]);
            return c;
        }
        if language == "cpp" && !flags.clone().any(|f| f.starts_with("-std")) {
            c.arg("-std=c++17");
        }
        c.args(["-Wall", "-Wextra", "-Werror", "-pthread", &file, "-o", name]);
        if flags.clone().any(|f| f == "-fgnu-tm") {
            // gcc warns of what a block does not change, since the block's begin returns twice.
            c.arg("-Wno-clobbered");
        }
        c.args(flags.filter(|f| f.starts_with("-l"))).arg("-lmojim");
        c
    }
}

/// The block as a program of its own.
fn whole(block: &Block) -> String {
    if !block.has("fragment") {
        return block.text.clone();
    }
    let text = &block.text;
    match block.language() {
        "c" | "cpp" => {
            let headers = ["mojim", "mojim_heap", "mojim_tx", "mojim_persistent"];
            let headers = headers.map(|h| format!("#include <{h}.h>\n")).concat();
            format!(
                "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <errno.h>\n\
                 {headers}int main(void)\n{{\n\
                 mojim_t *m = mojim_attach(\"mojim.toml\", \"a\", NULL);\n\
                 if (!m) {{ fprintf(stderr, \"%s\\n\", mojim_last_error()); return 1; }}\n\
                 {{\n{text}}}\n\
                 if (mojim_detach(m) != 0) {{ fprintf(stderr, \"%s\\n\", mojim_last_error()); return 1; }}\n\
                 return 0;\n}}\n"
            )
        }
        "rust" => format!(
            "use mojim::*;\nfn main() -> Result<()> {{\n\
             let m = Volume::attach(\"mojim.toml\", \"a\", None)?;\n\
             {{\n{text}}}\nm.detach()\n}}\n"
        ),
        _ => format!(
            "import mojim\nimport numpy as np\nm = mojim.attach(\"mojim.toml\", \"a\")\n{text}"
        ),
    }
}

/// For rustc: where the crates of this workspace are that a program uses.
fn externs() -> Vec<String> {
    static BUILT: std::sync::Once = std::sync::Once::new();
    let dir = libraries();
    let crates = ["mojim", "mojim-heap", "mojim-persistent", "mojim-tx"];
    BUILT.call_once(|| {
        if std::env::var_os("MOJIM_BUILT").is_none() {
            let profile = if dir.ends_with("debug") {
                "dev"
            } else {
                "release"
            };
            let mut c = Command::new(env!("CARGO"));
            c.args(["build", "--quiet", "--profile", profile, "--target-dir"]);
            c.arg(dir.parent().unwrap());
            c.args(crates.iter().flat_map(|name| ["-p", name]));
            succeed(c.current_dir(source()));
        }
    });
    let mut all = vec![
        "-L".to_owned(),
        format!("dependency={}/deps", dir.display()),
    ];
    for name in crates.map(|c| c.replace('-', "_")) {
        let file = dir.join(format!("lib{name}.rlib"));
        all.extend(["--extern".to_owned(), format!("{name}={}", file.display())]);
    }
    all
}

/// Runs a page; gives how many blocks ran, or the first that is wrong.
fn check(name: &str, page: &str) -> Result<usize, String> {
    let blocks = blocks(page);
    if !blocks.iter().any(Block::is_marked) {
        return Ok(0);
    }
    if blocks.iter().any(|b| b.language() == "python") {
        let python = source().join("scripts/python");
        let out = output(Command::new(python).args(["-c", ""]));
        if !out.status.success() {
            eprintln!("SKIPPED: {name}: no Python with NumPy here: {}", text(&out));
            return Ok(0);
        }
    }
    let mut place = Place::new();
    let mut said = String::new();
    let (mut refused, mut left_out) = (false, false);
    for block in &blocks {
        let at = format!("{name}:{}", block.line);
        left_out = match block.lacks() {
            Some(header) => {
                eprintln!("SKIPPED: {at}: there is no {header} here");
                true
            }
            None => left_out && !block.is_marked(),
        };
        if left_out {
            continue;
        }
        if block.is_marked() {
            said = place.run(block).map_err(|e| format!("{at}: {e}"))?;
            refused = block.has("refused");
        } else if block.words == ["text", "output"] {
            let lines = |l: &str| said.contains(l.trim());
            let is = match refused {
                true => block.text.lines().all(lines),
                false => said == block.text,
            };
            if !is {
                return Err(format!(
                    "{at}: the page says\n{}and it is\n{said}",
                    block.text
                ));
            }
        } else if LANGUAGES.contains(&block.language()) {
            return Err(format!("{at}: this block has no mark"));
        }
    }
    Ok(place.done)
}

/// Every page: its path in docs/ without the extension, and its path.
fn pages() -> Vec<(String, PathBuf)> {
    let docs = source().join("docs");
    let mut dirs = vec![docs.clone()];
    let mut found = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "md") {
                let name = path.strip_prefix(&docs).unwrap().with_extension("");
                found.push((name.to_string_lossy().into_owned(), path));
            }
        }
    }
    found.sort();
    found
}

/// Whether a page is meant: by its path in docs/, or by the last part of that.
fn is_named(page: &str, name: &str) -> bool {
    page == name || page.rsplit('/').next() == Some(name)
}

#[test]
fn every_snippet_of_the_pages_does_what_the_page_says() {
    let only = std::env::var("PAGES").ok();
    let only = only.as_ref().map(|o| o.split(',').collect::<Vec<_>>());
    let mut pages = pages();
    if let Some(only) = &only {
        pages.retain(|(page, _)| only.iter().any(|name| is_named(page, name)));
    }
    // Of a page that is not there, or lost its marks, nothing would be wrong.
    for name in only.as_deref().unwrap_or(&MARKED) {
        let mut asked = pages.iter().filter(|(page, _)| is_named(page, name));
        let there = asked.clone().next().is_some();
        assert!(there, "there is no page {name} in docs/");
        let marked = asked.all(|(_, path)| {
            let all = blocks(&fs::read_to_string(path).unwrap());
            all.iter().any(Block::is_marked)
        });
        assert!(marked, "{name} has no block to run");
    }
    let results: Vec<(String, Result<usize, String>)> = std::thread::scope(|s| {
        let all = pages.iter().map(|(name, path)| {
            s.spawn(move || {
                let done = check(name, &fs::read_to_string(path).unwrap());
                (name.clone(), done)
            })
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut wrong = Vec::new();
    for (name, result) in results {
        match result {
            Ok(0) => {}
            Ok(n) => println!("{name}: {n} blocks"),
            Err(e) => wrong.push(e),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What the test above would see.
#[test]
fn a_page_that_is_wrong_is_seen() {
    let page = |mark: &str, body: &str, output: &str| {
        let page = format!("Text.\n\n```{mark}\n{body}\n```\n\n```text output\n{output}\n```\n");
        check("page", &page)
    };
    let main = |body: &str| format!("#include <stdio.h>\nint main(void) {{ {body} }}");
    assert_eq!(page("c run", &main("puts(\"1\"); return 0;"), "1"), Ok(1));
    let wrong = [
        page("c run", &main("puts(\"2\"); return 0;"), "1"),
        page("c run", &main("puts(\"1\"); return 1;"), "1"),
        page("c run", &main("puts(1); return 0;"), "1"),
        page("c refused", &main("puts(\"1\"); return 0;"), "1"),
        page("c refused", &main("return nothing;"), "something else"),
        page("sh run", "echo 1; false; echo 2", "1"),
        page(
            "c fragment",
            "if (mojim_size(m, \"none\") < 0) exit(3);",
            "",
        ),
        page("c file=a.c", "int main", "1"),
        page("c run needs=stdio.h", "nothing", "1"),
        check("page", "```sh run\n:\n```\n```c\nint a;\n```\n"),
    ];
    for (i, result) in wrong.iter().enumerate() {
        assert!(result.is_err(), "{i}: {result:?}");
    }
    assert_eq!(
        page("c refused", &main("return nothing;"), "undeclared"),
        Ok(1)
    );
    assert_eq!(page("c run needs=none.h", "nothing", "1"), Ok(0));
    assert_eq!(
        check("page", "```c\nint a;\n```\n"),
        Ok(0),
        "a page without marks"
    );
}

#[test]
fn each_language_finds_what_is_built() {
    let rust = "```rust fragment\nm.map(\"f\", 8)?;\n```\n";
    let cpp = "```cpp fragment\nif (mojim_size(m, \"f\") != 8) exit(1);\n```\n";
    let sh = "```c file=a.c\n#include <mojim.h>\nint main(void) { return !*mojim_version(); }\n```\n\
              ```sh run\ncc a.c -lmojim -o a && ./a\n```\n";
    assert_eq!(check("page", &format!("{rust}{cpp}{sh}")), Ok(3));
}
