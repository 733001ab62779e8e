//! Persistent variables under every way to link a program, and what is refused: changed layouts
//! by `mojim_variables`, with the name of what changed; what cannot persist, by the compiler.
//!
//! `VARIABLES_LINKERS`: linkers to try beside the compiler's own (bfd, gold, lld), separated by
//! commas; `scripts/test-long` names all three.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mojim_testkit::interface::*;

/// Counts its runs in `a`, in a file of the volume.
const MAIN: &str = r#"
#include <mojim_persistent.h>
#include <stdio.h>
#include <errno.h>
DECLARATIONS
int main(int argc, char **argv)
{
    mojim_t *m = mojim_attach(argv[1], "a", NULL);
    if (!m || mojim_variables(m, argv[argc - 1]) != 0)
        return fprintf(stderr, "errno %d: %s\n", errno, mojim_last_error()), 1;
    a += 1;
    if (mojim_variables_sync() != 0)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    printf("%ld\n", (long)a);
    return mojim_detach(m) != 0;
}
"#;

fn build(v: &TestVolume, name: &str, declarations: &str, flags: &[&str]) -> PathBuf {
    let (file, bin) = (v.root.join(format!("{name}.c")), v.root.join(name));
    std::fs::write(&file, MAIN.replace("DECLARATIONS", declarations)).unwrap();
    compile(file.to_str().unwrap(), &bin, flags, true);
    bin
}

fn run(v: &TestVolume, bin: &Path, file: &str) -> Command {
    let mut c = Command::new(bin);
    c.arg(v.config()).arg(file);
    c
}

/// The text with which a program is refused.
#[track_caller]
fn refusal(v: &TestVolume, bin: &Path, file: &str, errno: i32) -> String {
    let out = output(&mut run(v, bin, file));
    let all = text(&out);
    assert_eq!(out.status.code(), Some(1), "{all}");
    assert!(all.contains(&format!("errno {errno}: ")), "{all}");
    all
}

const BASE: &str = "MOJIM_PERSISTENT int a = 0; MOJIM_PERSISTENT long b = 1;
MOJIM_PERSISTENT char c[24] = \"text\"; static MOJIM_PERSISTENT short d;
MOJIM_PERSISTENT struct { int x; double y; } s = {1, 2};
int count(void) { static MOJIM_PERSISTENT int e = 1; return e++ + d++; }";

/// Every way to link: the values are kept over three runs, the last of them of the stripped
/// program; and it is seen that the program was relinked with another layout.
#[test]
fn values_are_kept_however_the_program_was_linked() {
    let mut ways = vec![
        vec!["-O0"],
        vec![
            "-O2",
            "-fPIE",
            "-pie",
            "-Wl,--gc-sections",
            "-fdata-sections",
        ],
        vec!["-O2", "-no-pie", "-fno-pie"],
        vec!["-O2", "-flto"],
    ];
    let linkers = std::env::var("VARIABLES_LINKERS").unwrap_or_default();
    let linkers: Vec<_> = linkers.split(',').filter(|l| !l.is_empty()).collect();
    let names: Vec<_> = linkers.iter().map(|l| format!("-fuse-ld={l}")).collect();
    for linker in &names {
        ways.push(vec!["-O1", linker]);
        ways.push(vec!["-O2", "-no-pie", "-fno-pie", linker]);
        ways.push(vec!["-O2", "-Wl,--gc-sections", linker]);
        if !linker.ends_with("lld") {
            ways.push(vec!["-O2", "-flto", linker]);
        }
    }
    let v = TestVolume::new("");
    for (n, flags) in ways.iter().enumerate() {
        let file = format!("file{n}");
        let bin = build(&v, "p", BASE, flags);
        assert_eq!(succeed(&mut run(&v, &bin, &file)), "1\n", "{flags:?}");
        assert_eq!(succeed(&mut run(&v, &bin, &file)), "2\n", "{flags:?}");
        succeed(Command::new("strip").arg(&bin));
        assert_eq!(succeed(&mut run(&v, &bin, &file)), "3\n", "{flags:?}");
        let other = build(
            &v,
            "q",
            &format!("{BASE} MOJIM_PERSISTENT long more;"),
            flags,
        );
        let said = refusal(&v, &other, &file, libc::EINVAL);
        assert!(said.contains("more is new"), "{flags:?}: {said}");
        // Stripped, it cannot be told what changed; only that it may have.
        succeed(Command::new("strip").arg(&other));
        let said = refusal(&v, &other, &file, libc::EINVAL);
        assert!(said.contains("stripped"), "{flags:?}: {said}");
    }
}

#[test]
fn ten_changed_layouts_are_refused_by_name() {
    let v = TestVolume::new("");
    let bin = build(&v, "base", BASE, &["-O2"]);
    assert_eq!(succeed(&mut run(&v, &bin, "file")), "1\n");
    for (n, (from, to, said)) in [
        ("short d;", "short d; MOJIM_PERSISTENT int f;", "f is new"),
        ("MOJIM_PERSISTENT long b = 1;", "", "b is gone"),
        (
            "long b = 1",
            "long bb = 1",
            "b is gone, and bb is in its place",
        ),
        ("c[24]", "c[32]", "c has 32 bytes, 24 in the file"),
        ("int a = 0", "long a = 0", "a has 8 bytes, 4 in the file"),
        (
            "short d;",
            "__attribute__((aligned(64))) short d;",
            " lies at offset ",
        ),
        (
            "double y; } s = {1, 2}",
            "double y, z; } s = {1, 2, 3}",
            "s has 24 bytes, 16 in the file",
        ),
        ("int e = 1", "char e = 1", "e has 1 bytes, 4 in the file"),
        (
            "static MOJIM_PERSISTENT short d;",
            "static short d;",
            "d is gone",
        ),
        (
            "MOJIM_PERSISTENT int a = 0; MOJIM_PERSISTENT long b = 1;",
            "MOJIM_PERSISTENT long b = 1; MOJIM_PERSISTENT int a = 0;",
            " lies at offset ",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let changed = BASE.replace(from, to);
        assert_ne!(changed, BASE, "{n}");
        let bin = build(&v, "changed", &changed, &["-O2"]);
        let text = refusal(&v, &bin, "file", libc::EINVAL);
        assert!(text.contains(said), "{n}: {text}");
    }
    // What stays: the initial values, what is no persistent variable, and the optimisation of code.
    let same = BASE.replace("long b = 1", "long b = 9") + " int other[1000];";
    let bin = build(&v, "same", &same, &["-O2", "-g"]);
    assert_eq!(succeed(&mut run(&v, &bin, "file")), "2\n");
    // A stripped program of another build, whatever its layout is.
    assert_eq!(succeed(&mut run(&v, &bin, "file")), "3\n");
    succeed(Command::new("strip").arg(&bin));
    assert_eq!(succeed(&mut run(&v, &bin, "file")), "4\n");
}

/// Two source files, and a shared library with variables and a file of its own.
#[test]
fn source_files_share_a_section_and_a_library_has_its_own() {
    let v = TestVolume::new("");
    let dir = v.root.display().to_string();
    let library = v.root.join("l.c");
    let text = "#include <mojim_persistent.h>
static MOJIM_PERSISTENT long calls;
int open_library(mojim_t *m, const char *file) { return mojim_variables(m, file); }
long call_library(void) { calls++; return mojim_variables_sync() ? -1 : calls; }";
    std::fs::write(&library, text).unwrap();
    let so = v.root.join("libl.so");
    compile(library.to_str().unwrap(), &so, &["-shared", "-fPIC"], true);
    let second = v.root.join("second.c");
    let text = "#include <mojim_persistent.h>
MOJIM_PERSISTENT int second = 5;
int filler[3000];";
    std::fs::write(&second, text).unwrap();
    let declarations = "extern int second;
static MOJIM_PERSISTENT int a;
int open_library(mojim_t *m, const char *file);
long call_library(void);
__attribute__((destructor)) static void end(void) { printf(\"%d %d after\\n\", a, second); }
#define mojim_variables(m, file) \\
    (mojim_variables(m, file) || (second += 2, open_library(m, getenv(\"LIBRARY\"))) \\
     || printf(\"library %ld, second %d\\n\", call_library(), second) < 0)";
    let declarations = format!("#include <stdlib.h>\n{declarations}");
    let flags = [
        "-Wl,--no-as-needed",
        second.to_str().unwrap(),
        so.to_str().unwrap(),
        &format!("-Wl,-rpath,{dir}"),
    ];
    let bin = build(&v, "p", &declarations, &flags);
    for n in 1..3 {
        let out = succeed(run(&v, &bin, "program").env("LIBRARY", "library"));
        let second = 5 + 2 * n;
        // `end` runs after the detach: ordinary variables, with their last values.
        let must = format!("library {n}, second {second}\n{n}\n{n} {second} after\n");
        assert_eq!(out, must);
    }
    // The same file for both.
    let out = output(run(&v, &bin, "program").env("LIBRARY", "program"));
    let said = mojim_testkit::interface::text(&out);
    assert!(
        said.contains(&format!("errno {}: program is mapped already", libc::EBUSY)),
        "{said}"
    );
    // A variable that the library exports.
    let text = std::fs::read_to_string(&library).unwrap();
    std::fs::write(&library, text.replace("static MOJIM", "MOJIM")).unwrap();
    compile(library.to_str().unwrap(), &so, &["-shared", "-fPIC"], true);
    let out = output(run(&v, &bin, "program").env("LIBRARY", "exported"));
    assert!(
        mojim_testkit::interface::text(&out).contains("exports its persistent variable calls"),
        "{out:?}"
    );
}

#[test]
fn what_cannot_persist_is_refused_with_its_name() {
    let v = TestVolume::new("");
    let with = |more: &str| format!("MOJIM_PERSISTENT int a; {more}");
    for flags in [["-fPIE", "-pie"], ["-no-pie", "-fno-pie"]] {
        for (n, more) in [
            "int target; MOJIM_PERSISTENT int *p = &target;",
            "MOJIM_PERSISTENT const char *p = \"text\";",
            "int f(void); int f(void) { return 0; }
             MOJIM_PERSISTENT struct { int n; int (*g)(void); } p = {1, f};",
        ]
        .into_iter()
        .enumerate()
        {
            let bin = build(&v, "pointer", &with(more), &flags);
            let said = refusal(&v, &bin, &format!("p{n}"), libc::EINVAL);
            assert!(said.contains("variable p is an address"), "{said}");
        }
    }
    let more = "MOJIM_PERSISTENT int *p = 0; MOJIM_PERSISTENT long numbers[] = {1, -1, 4096};";
    let bin = build(&v, "null", &with(more), &["-no-pie", "-fno-pie"]);
    assert_eq!(succeed(&mut run(&v, &bin, "null")), "1\n");
    let more = "void f(void); void f(void) { static MOJIM_PERSISTENT int n; n++; }
        void g(void); void g(void) { static MOJIM_PERSISTENT int n; n++; }";
    let bin = build(&v, "twice", &with(more), &[]);
    let said = refusal(&v, &bin, "twice", libc::EINVAL);
    assert!(said.contains("have the name n"), "{said}");
}

#[test]
fn the_compiler_refuses_the_rest() {
    let v = TestVolume::new("");
    for (extension, declaration, said) in [
        (
            "c",
            "MOJIM_PERSISTENT const int k = 3;",
            "section type conflict",
        ),
        (
            "c",
            "MOJIM_PERSISTENT _Thread_local int k = 3;",
            "section type conflict",
        ),
        (
            "cc",
            "MOJIM_PERSISTENT const int k = 3;",
            "section type conflict",
        ),
        (
            "cc",
            "int f(); MOJIM_PERSISTENT int k = f();",
            "constant initializer",
        ),
        (
            "cc",
            "struct S { S(); }; MOJIM_PERSISTENT S k;",
            "constant initializer",
        ),
        (
            "cc",
            "struct S { int n = 3; }; static MOJIM_PERSISTENT S k;",
            "",
        ),
    ] {
        let file = v.root.join(format!("k.{extension}"));
        std::fs::write(
            &file,
            format!("#include <mojim_persistent.h>\n{declaration}\n"),
        )
        .unwrap();
        let compiler = if extension == "c" { "cc" } else { "c++" };
        let mut c = Command::new(compiler);
        c.arg("-c")
            .arg("-I")
            .arg(source().join("include"))
            .arg(&file);
        let out = output(c.arg("-o").arg(v.root.join("k.o")));
        assert_eq!(out.status.success(), said.is_empty(), "{declaration}");
        assert!(text(&out).contains(said), "{}", text(&out));
    }
}

/// A file that holds something else; one that a process left that died before it committed the
/// first state; kills while the first state is made, at moments from a seed.
#[test]
fn files_that_are_not_whole() {
    let v = TestVolume::new("");
    let bin = build(&v, "p", BASE, &["-O1"]);
    let other = "MOJIM_PERSISTENT int a; __attribute__((constructor)) static void first(void)
        { mojim_t *m = mojim_attach(getenv(\"CONFIG\"), \"a\", NULL);
          char *p = (char *)mojim_map(m, getenv(\"MAKE\"), 65600, MOJIM_CREATE);
          p[atoi(getenv(\"AT\"))] = (char)atoi(getenv(\"BYTE\"));
          mojim_detach(m); _exit(0); }";
    let other = format!("#include <stdlib.h>\n#include <unistd.h>\n{other}");
    let other = build(&v, "other", &other, &[]);
    let make = |file: &str, at: &str, byte: &str| {
        let mut c = run(&v, &other, "none");
        c.env("CONFIG", v.config()).env("MAKE", file);
        succeed(c.env("AT", at).env("BYTE", byte));
    };
    make("zeros", "0", "0");
    assert_eq!(succeed(&mut run(&v, &bin, "zeros")), "1\n");
    make("strange", "65590", "1");
    let said = refusal(&v, &bin, "strange", libc::EUCLEAN);
    assert!(said.contains("holds something else"), "{said}");
    assert_eq!(succeed(&mut run(&v, &bin, "whole")), "1\n");
    make("whole", "80", "77");
    let said = refusal(&v, &bin, "whole", libc::EUCLEAN);
    assert!(said.contains("checksum"), "{said}");

    let seed = std::process::id() as u64;
    println!("seed {seed}");
    for n in 0..12u64 {
        let file = format!("killed{n}");
        let mut child = run(&v, &bin, &file).stdout(Stdio::null()).spawn().unwrap();
        let wait = (seed.wrapping_mul(n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 30_000;
        std::thread::sleep(Duration::from_micros(wait));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = succeed(&mut run(&v, &bin, &file));
        assert!(found == "1\n" || found == "2\n", "{n}: {found}");
    }
}
