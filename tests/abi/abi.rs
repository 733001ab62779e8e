//! The header is what the library is: it compiles in C and C++, every function
//! of it is exported and nothing else is, and its numbers are Rust's.

use std::collections::BTreeSet;
use std::process::Command;

use mojim_testkit::interface::*;

/// The C headers of the library.
fn headers() -> Vec<String> {
    let all = std::fs::read_dir(source().join("include")).unwrap();
    let paths = all.map(|f| f.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|p| p.extension().is_some_and(|e| e == "h"))
        .collect();
    paths.sort();
    assert!(paths.len() > 2, "{paths:?}");
    let read = |p: &std::path::PathBuf| std::fs::read_to_string(p).unwrap();
    paths.iter().map(read).collect()
}

/// A header without comments, lines for the preprocessor, attributes and the bodies of functions.
fn code(header: &str) -> String {
    let mut text = header.replace("\\\n", " ");
    for of_cplusplus in ["extern \"C\" {", "}"] {
        text = text.replace(&format!("#ifdef __cplusplus\n{of_cplusplus}\n#endif"), "");
    }
    let mut plain = String::new();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once("/*") {
        plain.push_str(before);
        rest = after.split_once("*/").expect("a comment ends").1;
    }
    plain.push_str(rest);
    let lines = plain.lines().filter(|l| !l.starts_with('#'));
    let plain = lines.collect::<Vec<_>>().join("\n");
    let plain = without(&plain, "__attribute__", ('(', ')'), "");
    without(&plain, "", ('{', '}'), ";")
}

/// The text with each group of brackets behind `front` replaced.
fn without(text: &str, front: &str, (open, close): (char, char), by: &str) -> String {
    let begin = format!("{front}{open}");
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(&begin) {
        out.push_str(&rest[..at]);
        out.push_str(by);
        let from = at + front.len();
        let mut depth = 0;
        let end = rest[from..].char_indices().find(|(_, c)| {
            depth += i32::from(*c == open) - i32::from(*c == close);
            depth == 0
        });
        rest = &rest[from + end.expect("brackets close").0 + 1..];
    }
    out + rest
}

/// Names of the functions that the headers declare and do not define.
fn declared() -> BTreeSet<String> {
    let code: Vec<_> = headers().iter().map(|h| code(h)).collect();
    let code = code.join("\n");
    let statements = code.split(';').map(str::trim);
    statements
        .filter(|s| !s.starts_with("static") && !s.starts_with("typedef"))
        .filter_map(|s| s.split_once('('))
        .map(|(front, _)| {
            let front = front.trim_end();
            let start = front.rfind(|c: char| !(c.is_alphanumeric() || c == '_'));
            front[start.map_or(0, |p| p + 1)..].to_owned()
        })
        .collect()
}

#[test]
fn every_declaration_is_exported_and_nothing_else() {
    let text = succeed(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(libraries().join("libmojim.so")),
    );
    let exported: BTreeSet<String> = text
        .lines()
        .filter_map(|l| l.split_whitespace().nth(2))
        .map(|n| n.split('@').next().unwrap().to_owned())
        .collect();
    assert_eq!(declared(), exported);
    assert!(exported.len() > 20);
}

#[test]
fn the_library_has_its_name() {
    let text = succeed(
        Command::new("readelf")
            .arg("-d")
            .arg(libraries().join("libmojim.so")),
    );
    assert!(text.contains("soname: [libmojim.so]"), "{text}");
}

/// The preload library needs nothing that only libmojim has: a program that is
/// started with it alone still starts.
#[test]
fn the_preload_library_loads_alone() {
    succeed(Command::new("true").env("LD_PRELOAD", libraries().join("libmojim_preload.so")));
}

#[test]
fn the_header_is_clean_c_and_c_plus_plus() {
    let v = TestVolume::new("");
    let include = source().join("include");
    for (compiler, standard, extension) in [
        ("cc", "-std=c99", "c"),
        ("cc", "-std=c11", "c"),
        ("c++", "-std=c++11", "cc"),
        ("c++", "-std=c++17", "cc"),
    ] {
        for (before, after) in [
            (
                "",
                "struct msync_input i[1] = {{0, 0}}; return gmsync(i, 0, MS_MOJIM);",
            ),
            (
                "#define MOJIM_NO_STRUCT 1\n",
                "struct msync_input { void *address; int length; };\
                 struct msync_input i[1] = {{0, 0}}; return gmsync(i, 0, MS_MOJIM);",
            ),
        ] {
            let file = v.root.join(format!("h.{extension}"));
            let text = format!(
                "{before}#include <mojim.h>\n#include <mojim.h>\n#include <mojim_persistent.h>\nint main(void) {{ {after} }}\n"
            );
            std::fs::write(&file, text).unwrap();
            succeed(
                Command::new(compiler)
                    .args([
                        standard,
                        "-Wall",
                        "-Wextra",
                        "-pedantic",
                        "-Werror",
                        "-c",
                        "-I",
                    ])
                    .arg(&include)
                    .arg(&file)
                    .arg("-o")
                    .arg(v.root.join("h.o")),
            );
        }
    }
}

/// The flags and structs as the C compiler sees them, and as
/// `crates/mojim-c/src/lib.rs` and `crates/mojim-preload/src/api.rs` write them.
#[test]
fn numbers_are_the_same_on_both_sides() {
    let v = TestVolume::new("");
    let program = r#"
#include <mojim.h>
#include <stdio.h>
#define P(x) printf("%s %ld\n", #x, (long)(x))
int main(void) {
    P(MOJIM_CREATE); P(MOJIM_RDONLY); P(MOJIM_SHARED); P(MAP_ATOMIC); P(MS_MOJIM);
    P(MOJIM_NONE); P(MOJIM_RECEIVED); P(MOJIM_PMEM); P(MOJIM_DISK);
    P(sizeof(struct msync_input)); P(offsetof(struct msync_input, length));
    P(sizeof(struct mojim_copy)); P(offsetof(struct mojim_copy, level));
    P(sizeof(off_t)); P(sizeof(size_t));
    return 0;
}
"#;
    let file = v.root.join("p.c");
    std::fs::write(&file, program).unwrap();
    let bin = v.root.join("p");
    succeed(
        Command::new("cc")
            .arg("-I")
            .arg(source().join("include"))
            .arg(&file)
            .arg("-o")
            .arg(&bin),
    );
    let text = succeed(&mut Command::new(&bin));
    let c = |name: &str| -> i64 {
        let line = text.lines().find(|l| l.rsplit_once(' ').unwrap().0 == name);
        line.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    // Sizes: `lib.rs` asserts these same figures when it is compiled.
    assert_eq!(c("sizeof(struct msync_input)"), 16);
    assert_eq!(c("offsetof(struct msync_input, length)"), 8);
    assert_eq!(c("sizeof(struct mojim_copy)"), 72);
    assert_eq!(c("offsetof(struct mojim_copy, level)"), 68);
    assert_eq!((c("sizeof(off_t)"), c("sizeof(size_t)")), (8, 8));
    assert_eq!(
        [
            c("MOJIM_NONE"),
            c("MOJIM_RECEIVED"),
            c("MOJIM_PMEM"),
            c("MOJIM_DISK")
        ],
        [0, 1, 2, 3]
    );
    for rust in [
        "crates/mojim-c/src/lib.rs",
        "crates/mojim-preload/src/api.rs",
    ] {
        let rust = std::fs::read_to_string(source().join(rust)).unwrap();
        let mut seen = 0;
        for name in [
            "MOJIM_CREATE",
            "MOJIM_RDONLY",
            "MOJIM_SHARED",
            "MAP_ATOMIC",
            "MS_MOJIM",
        ] {
            let Some((_, rest)) = rust.split_once(&format!("const {name}: c_int = 0x")) else {
                continue;
            };
            let digits = rest.split_once(';').unwrap().0.replace('_', "");
            assert_eq!(c(name), i64::from_str_radix(&digits, 16).unwrap(), "{name}");
            seen += 1;
        }
        assert!(seen >= 3);
    }
    // No flag is one that the kernel knows, in the calls that take both.
    let mmap_flags = libc::MAP_SHARED
        | libc::MAP_PRIVATE
        | libc::MAP_FIXED
        | libc::MAP_ANONYMOUS
        | libc::MAP_GROWSDOWN
        | libc::MAP_LOCKED
        | libc::MAP_NORESERVE
        | libc::MAP_POPULATE
        | libc::MAP_NONBLOCK
        | libc::MAP_STACK
        | libc::MAP_HUGETLB
        | libc::MAP_SYNC
        | libc::MAP_FIXED_NOREPLACE
        | 0x0400_0000 // MAP_UNINITIALIZED
        | 0x3f << 26; // the size of a huge page
    assert_eq!(c("MAP_ATOMIC") & i64::from(mmap_flags as u32), 0);
    assert_eq!(c("MS_MOJIM") & 7, 0);
}

/// The examples compile without a warning, the direct ones as strict C99.
#[test]
fn examples_compile() {
    let v = TestVolume::new("");
    for (name, flags) in [
        ("fig1", &["-std=gnu99"][..]),
        ("log", &["-std=c99", "-pedantic"]),
        ("counter", &["-std=c99", "-pedantic"]),
    ] {
        compile(
            &format!("examples/{name}.c"),
            &v.root.join(name),
            flags,
            true,
        );
    }
}

/// Errors have an errno and a text; no argument makes the library crash.
#[test]
fn wrong_arguments_are_errors() {
    let v = TestVolume::new("");
    let bin = v.root.join("misuse");
    compile("tests/abi/misuse.c", &bin, &[], true);
    let out = succeed(Command::new(&bin).arg(v.config()));
    assert_eq!(out, "all refused\n");
}

/// `memory.c`, and a configuration with a second volume.
fn with_memory_program() -> (TestVolume, std::path::PathBuf) {
    let v = TestVolume::new("");
    let config = std::fs::read_to_string(v.config()).unwrap();
    let second = "[volume.w]\nmode = \"unreplicated\"\nprimary = \"a\"\n[node.a]";
    std::fs::write(v.config(), config.replace("[node.a]", second)).unwrap();
    let bin = v.root.join("memory");
    compile("tests/abi/memory.c", &bin, &[], true);
    (v, bin)
}

/// Under RLIMIT_AS a sync point ended the program: "memory allocation of 131072 bytes failed".
#[test]
fn a_call_that_gets_no_memory_fails_and_ends_nothing() {
    let (v, bin) = with_memory_program();
    // A process of its own for each: what it had once, it can use again.
    for (how, kib) in [
        ("limit", &[0, 300, 3000, 40_000][..]),
        ("full", &[0, 20, 500]),
    ] {
        for kib in kib {
            let args = [how, &kib.to_string()];
            let out = succeed(Command::new(&bin).arg(v.config()).args(args));
            let refused = if *kib == 0 {
                "some"
            } else {
                out.split(' ').next().unwrap()
            };
            assert_eq!(out, format!("{refused} refused, some done\n"), "{args:?}");
        }
    }
}

/// A thread with a small stack died of SIGSEGV in a call. The header says what a call needs.
#[test]
fn a_call_needs_no_more_stack_than_the_header_says() {
    let text = std::fs::read_to_string(source().join("include/mojim.h")).unwrap();
    let (before, _) = text
        .split_once(" KiB of stack")
        .expect("the header says it");
    let says: usize = before.rsplit(' ').next().unwrap().parse().unwrap();
    let (v, bin) = with_memory_program();
    // Half of it is left for another processor's registers and another C library.
    let stack = (says / 2).to_string();
    let out = succeed(Command::new(&bin).arg(v.config()).args(["stack", &stack]));
    assert_eq!(out, "none refused, some done\n");
}

/// The next name, or size, after chroot or setuid poisoned the copy: what the change needs was opened by its
/// path, when the change was acknowledged already.
#[test]
fn a_program_that_gives_up_its_root_or_its_user_poisons_nothing() {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return; // It takes a privilege to give it up.
    }
    let v = TestVolume::new("");
    let bin = v.root.join("confined");
    compile("tests/abi/confined.c", &bin, &[], true);
    for how in ["chroot", "setuid"] {
        let mut c = Command::new(&bin);
        c.arg(v.config()).arg(how).arg(v.root.join("ring"));
        assert_eq!(
            succeed(&mut c),
            "only names and sizes are refused\n",
            "{how}"
        );
        let out = succeed(Command::new(&bin).arg(v.config()).arg("look"));
        let made = if how == "chroot" { 1 } else { 0 };
        assert_eq!(out, format!("2 {made}\n"), "{how}");
    }
}

/// pthread_cancel of a thread in a call ended the process: its unwinding met frames of the
/// library that do not unwind.
#[test]
fn a_cancelled_thread_comes_back_from_its_call() {
    let v = TestVolume::new("");
    let config = std::fs::read_to_string(v.config()).unwrap();
    let second = "[volume.w]\nmode = \"unreplicated\"\nprimary = \"a\"\n[node.a]";
    std::fs::write(v.config(), config.replace("[node.a]", second)).unwrap();
    let bin = v.root.join("cancel");
    compile("tests/abi/cancel.c", &bin, &[], true);
    let out = succeed(Command::new(&bin).arg(v.config()));
    assert_eq!(out, "all came back\n");
}

/// exit is a sync point of what was mapped without MAP_ATOMIC, and finishes what
/// was begun, also where the program does not detach; stores of its own atexit
/// handlers count. _exit keeps what was begun, and nothing else.
#[test]
fn the_end_of_a_program_that_does_not_detach() {
    let v = TestVolume::new("");
    let bin = v.root.join("ends");
    compile("tests/abi/ends.c", &bin, &[], true);
    let run = |how: &str| {
        let out = output(Command::new(&bin).arg(v.config()).arg(how));
        assert!(out.status.success(), "{how}: {}", text(&out));
        // Also nothing on standard error.
        text(&out)
    };
    assert_eq!(run("exit"), "");
    assert_eq!(run("show"), "1 1 0 1\n");
    assert_eq!(run("_exit"), "");
    assert_eq!(run("show"), "1 1 0 2\n");
    assert_eq!(run("exit"), "");
    assert_eq!(run("show"), "2 2 0 3\n");
    // With the preload library beside it, which ends the program's attachment only.
    let out = output(v.preloaded(&bin).arg(v.config()).arg("exit"));
    assert!(
        out.status.success() && text(&out).is_empty(),
        "{}",
        text(&out)
    );
    assert_eq!(run("show"), "3 3 0 4\n");
}
