//! The preload library's promises, each on a fresh volume, and programs that
//! know nothing of it.

// Seen to fail, each by a defect made on purpose or found:
// - an fsync that commits one process's mappings only
// - a descriptor taken for its name
// - an open that fails after it has truncated the file, or truncates although its write is refused
// - writes with O_DSYNC and `syncfs` that commit nothing
// - a program that goes on without its configuration
// - static programs and empty environments
// - a handler's call that passes
// - a private mapping over a region
// - ways past the log through `/proc`
// - children that wait for a thread that they do not have

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use mojim_testkit::interface::*;

/// `probe.c`, compiled once.
fn probe() -> &'static PathBuf {
    static PROBE: OnceLock<PathBuf> = OnceLock::new();
    PROBE.get_or_init(|| {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let to = dir.join(format!("probe-{}", std::process::id()));
        compile("tests/e2e/probe.c", &to, &[], true);
        to
    })
}

/// One function of the probe, which must succeed; gives its standard error.
#[track_caller]
fn holds(v: &TestVolume, name: &str) -> String {
    let out = output(v.preloaded(probe()).arg(name).arg(v.dir()));
    assert!(
        out.status.success(),
        "{name}: {}\n{}",
        out.status,
        text(&out)
    );
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn open_truncate_and_allocate_mean_what_they_mean() {
    holds(&TestVolume::new(""), "opening");
}

#[test]
fn sync_points_of_any_range_and_msync_elsewhere() {
    holds(&TestVolume::new(""), "syncing");
}

#[test]
fn sync_points_with_the_other_tracker() {
    holds(&TestVolume::new("tracker = \"mprotect\""), "syncing");
}

#[test]
fn mappings_of_parts_and_rounded_lengths() {
    holds(&TestVolume::new(""), "partial_pages");
}

#[test]
fn mappings_of_one_file_show_the_same() {
    holds(&TestVolume::new(""), "aliases");
}

#[test]
fn a_private_working_copy_is_of_one_mapping() {
    let said = holds(&TestVolume::new("working = \"private\""), "private_copy");
    for what in ["is mapped already", "forked"] {
        assert!(said.contains(what), "{what}: {said}");
    }
}

#[test]
fn what_is_refused_says_so_once() {
    let said = holds(&TestVolume::new(""), "refusals");
    let write = "mojim: write(2) to file of volume v is not supported unless it is mapped there\n";
    assert_eq!(said.matches(write).count(), 1, "{said}");
    for what in ["mremap", "munmap of 4096 bytes", "mprotect", "no links"] {
        assert!(said.contains(what), "{what}: {said}");
    }
}

#[test]
fn reads_see_stores_and_writes_reach_the_memory() {
    holds(&TestVolume::new(""), "coherence");
}

#[test]
fn duplicates_and_numbers_used_again() {
    holds(&TestVolume::new(""), "descriptors");
}

/// pthread_cancel of a thread in any interposed call, also in one that passed, ended the process.
#[test]
fn a_cancelled_thread_ends_and_no_more() {
    holds(&TestVolume::new(""), "cancelled");
}

#[test]
fn rename_and_unlink() {
    holds(&TestVolume::new(""), "names");
}

#[test]
fn the_end_of_the_program_commits_what_is_not_atomic() {
    let v = TestVolume::new("");
    holds(&v, "atomic_map");
    holds(&v, "atomic_show");
}

#[test]
fn every_flag_of_msync_and_both_fsyncs() {
    holds(&TestVolume::new(""), "flags");
    holds(&TestVolume::new("tracker = \"mprotect\""), "flags");
    // Nothing is applied but where it must be.
    holds(&TestVolume::new("checkpoint_threshold = 1000000"), "flags");
    holds(&TestVolume::new("msync_rounding = \"page\""), "rounded");
    holds(&TestVolume::new(""), "two_mappings");
}

/// What MS_ASYNC returned from outlives the program, as it was then.
#[test]
fn what_was_begun_survives_a_kill_as_it_was_then() {
    use std::io::BufRead;
    let v = TestVolume::new("");
    for round in 1..=3 {
        let mut child = v
            .preloaded(probe())
            .args(["async_until_killed".as_ref(), v.dir().as_os_str()])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(line, "begun\n");
        let out = output(v.preloaded(probe()).arg("async_show").arg(v.dir()));
        assert_eq!(text(&out), format!("{round} {round} {round}\n"));
    }
}

#[test]
fn a_forked_child_can_commit_nothing_of_a_copy() {
    let said = holds(&TestVolume::new("working = \"private\""), "forking");
    assert!(said.contains("forked"), "{said}");
}

#[test]
fn a_child_that_was_forked_before_is_a_process_like_any_other() {
    assert_eq!(holds(&TestVolume::new(""), "fork_first"), "");
}

#[test]
fn a_child_forked_amid_sync_points_of_other_threads_waits_for_none_of_their_locks() {
    holds(&TestVolume::new("working = \"private\""), "forking_amid");
    holds(&TestVolume::new(""), "forking_amid_shared");
}

#[test]
fn a_forked_child_shares_the_memory() {
    assert_eq!(holds(&TestVolume::new(""), "forking_shares"), "");
}

#[test]
fn a_forked_child_shares_the_memory_with_the_other_trackers() {
    for tracker in ["mprotect", "two-level"] {
        holds(
            &TestVolume::new(&format!("tracker = \"{tracker}\"")),
            "forking_shares",
        );
    }
}

#[test]
fn two_processes_share_a_file_and_its_locks() {
    let said = holds(&TestVolume::new(""), "sharing");
    assert!(said.contains("has ended"), "{said}");
}

/// fsync committed what its own process had mapped, and returned 0 while bytes that
/// another process had stored into the file elsewhere were committed nowhere.
#[test]
fn fsync_commits_what_other_processes_have_stored() {
    holds(&TestVolume::new(""), "fsync_of_others");
}

/// A descriptor stood for a name: after another process had renamed a file over it,
/// ftruncate of the descriptor cut the new file, which the program had never opened.
#[test]
fn a_descriptor_is_never_taken_for_the_file_that_has_its_name_now() {
    let said = holds(&TestVolume::new(""), "replaced_by_another");
    assert!(said.contains("was replaced or removed"), "{said}");
}

/// An open with O_TRUNC that failed for want of a descriptor had emptied the file.
#[test]
fn an_open_that_fails_cuts_nothing() {
    holds(&TestVolume::new(""), "opening_fails");
}

/// A private mapping of a file of the volume at the address of a region took its
/// place: what was stored there from then on went nowhere.
#[test]
fn no_mapping_takes_a_regions_place() {
    holds(&TestVolume::new(""), "fixed_over_a_region");
}

/// A handler that interrupted a call of the library was taken for the engine: its
/// fsync went to the data file, which had nothing of what was stored, and returned 0.
#[test]
fn a_handler_that_interrupts_a_call_is_told_so() {
    holds(&TestVolume::new(""), "in_a_handler");
}

/// `/proc/self/fd/N` was none of the volume's paths: opened for writing, it gave the
/// data file itself, past the log. So did freopen without a path.
#[test]
fn no_way_leads_past_the_log() {
    let v = TestVolume::new("");
    holds(&v, "ways_back");
    // Across exec, a descriptor is known by nothing but its path.
    let script =
        "exec 3< \"$1/file\"; sh -c 'echo x > /dev/fd/3 || echo refused'; wc -c < \"$1/file\"";
    let mut c = v.preloaded("sh");
    let said = text(&output(c.args(["-c", script, "sh"]).arg(v.dir())));
    assert!(said.contains("refused"), "{said}");
}

/// A child that was forked while another thread read the configuration waited in its
/// first open for that thread, which it does not have.
#[test]
fn a_child_forked_while_another_thread_begins_waits_for_nobody() {
    let v = TestVolume::new("");
    let real = v.root.join("mojim.toml.real");
    std::fs::rename(v.config(), real).unwrap();
    succeed(Command::new("mkfifo").arg(v.config()));
    holds(&v, "fork_amid_start");
}

/// So it did where another thread was in the middle of a read.
#[test]
fn a_child_forked_while_another_thread_reads_waits_for_nobody() {
    holds(&TestVolume::new(""), "fork_amid_reads");
}

/// cp, dd and redirections had emptied a file on every node by the time that their
/// writes were refused; mv had removed it. Others left an empty file behind.
#[test]
fn what_is_refused_destroys_nothing_and_leaves_nothing_half_made() {
    let v = TestVolume::new("");
    holds(&v, "atomic_map"); // makes `file` and `other`
    let (file, outside) = (v.dir().join("file"), v.root.join("outside"));
    let before = std::fs::read(&file).unwrap();
    std::fs::write(&outside, "from outside").unwrap();
    for (n, script) in [
        "cp outside \"$1/NAME\"",
        "dd if=outside of=\"$1/NAME\" status=none",
        "echo x > \"$1/NAME\"",
        "echo x >> \"$1/NAME\"",
        "tee \"$1/NAME\" < outside",
        "mv outside \"$1/NAME\"",
        "mkdir -p t && cp outside t/NAME && tar cf t.tar -C t NAME && tar xf t.tar -C \"$1\"",
        "cp -a outside \"$1/NAME\"",
        "python3 -c 'import sys; f = open(sys.argv[1], \"w+b\"); f.write(b\"x\"); f.close()' \"$1/NAME\"",
        "python3 -c 'import sys; open(sys.argv[1], \"wb\").write(b\"x\")' \"$1/NAME\"",
    ]
    .into_iter()
    .enumerate()
    {
        // What was asked for by an open with O_CREAT and O_RDWR is there, and empty.
        let opens_both = script.contains("w+b");
        for name in ["file", &format!("new{n}")] {
            let mut c = v.preloaded("sh");
            c.args(["-c", &script.replace("NAME", name), "sh"])
                .arg(v.dir())
                .current_dir(&v.root);
            let out = output(&mut c);
            assert!(!out.status.success(), "{script}: {}", text(&out));
            assert!(text(&out).contains("not supported"), "{}", text(&out));
            assert_eq!(std::fs::read(&file).unwrap(), before, "{script}");
            assert!(outside.exists(), "{script}");
            let there = v.dir().join(format!("new{n}")).exists();
            assert_eq!(there, opens_both && name != "file", "{script}");
        }
    }
    // A file that is made beside and renamed becomes the volume's, whole.
    let mut c = v.preloaded("sh");
    c.args(["-c", "sed -i s/^.*$/new/ \"$1/file\"", "sh"])
        .arg(v.dir());
    succeed(&mut c);
    assert_eq!(std::fs::read(&file).unwrap(), b"new");
}

/// Writes by O_DSYNC and O_SYNC, sync, syncfs, sync_file_range and aio_fsync returned 0
/// and committed nothing.
#[test]
fn what_says_that_it_is_durable_is_committed() {
    holds(&TestVolume::new(""), "durable");
    holds(&TestVolume::new("tracker = \"mprotect\""), "durable");
}

/// A program whose configuration could not be read went on without Mojim, and wrote
/// past it.
#[test]
fn without_its_configuration_nothing_is_opened() {
    let v = TestVolume::new("");
    holds(&v, "atomic_map");
    let file = v.dir().join("file");
    let before = std::fs::read(&file).unwrap();
    let script = "printf x > \"$1/file\"; printf x > \"$1/more\"; printf x > elsewhere";
    let run = || {
        let mut c = v.preloaded("sh");
        c.args(["-c", script, "sh"]).arg(v.dir());
        output(c.current_dir(&v.root))
    };
    let untouched = |out: &std::process::Output| {
        assert!(!out.status.success(), "{}", text(out));
        assert_eq!(std::fs::read(&file).unwrap(), before);
        assert!(!v.dir().join("more").exists() && !v.root.join("elsewhere").exists());
    };
    // One that cannot be read: the program does not start.
    let kept = v.root.join("kept");
    std::fs::rename(v.config(), &kept).unwrap();
    let out = run();
    untouched(&out);
    assert_eq!(out.status.code(), Some(126));
    assert!(text(&out).contains("not started"), "{}", text(&out));
    // One that is none: its calls fail.
    std::fs::write(v.config(), "cluster = 7\n").unwrap();
    let out = run();
    untouched(&out);
    assert!(text(&out).contains("can open no file"), "{}", text(&out));
    std::fs::rename(&kept, v.config()).unwrap();
    // Behind another root it could not be read, nor files be told by their names.
    let said = holds(&v, "another_root");
    assert!(said.contains("chroot is refused"), "{said}");
}

/// Programs that run without the library reached the volume's files past it: those
/// that are linked statically, those with privileges, and all that was executed with an
/// environment without LD_PRELOAD.
#[test]
fn what_is_executed_runs_with_the_library_or_not_at_all() {
    let v = TestVolume::new("");
    holds(&v, "atomic_map");
    let fixed = v.root.join("static");
    compile("tests/e2e/probe_static.c", &fixed, &["-static"], false);
    std::fs::write(v.root.join("script"), "#!./static -x\n").unwrap();
    succeed(Command::new("chmod").arg("+x").arg(v.root.join("script")));
    let run = |allow: bool| {
        let mut c = v.preloaded(probe());
        c.arg("executes").arg(v.dir()).current_dir(&v.root);
        if allow {
            c.env("MOJIM_ALLOW_UNGUARDED", "1");
        }
        output(&mut c)
    };
    let out = run(false);
    assert!(out.status.success(), "{}", text(&out));
    assert!(text(&out).contains("linked statically"), "{}", text(&out));
    // Its first exec is of the static program, which says so.
    assert_eq!(text(&run(true)), "unguarded\n");
    // A shell says what it says of any program that may not be executed.
    for command in ["./static", "./script", "env -i ./static", "nice ./static"] {
        let out = output(v.preloaded("sh").args(["-c", command]).current_dir(&v.root));
        assert_eq!(out.status.code(), Some(126), "{command}: {}", text(&out));
    }
    let command = "env -i sh -c 'echo x > \"$1/file\" || echo refused' sh \"$1\"";
    let mut c = v.preloaded("sh");
    let said = text(&output(c.args(["-c", command, "sh"]).arg(v.dir())));
    assert!(said.contains("refused"), "{said}");
    assert_eq!(std::fs::read(v.dir().join("file")).unwrap().len(), 4096);
    // Another user's bit takes LD_PRELOAD away; only root can give a file away here.
    let other = v.root.join("privileged");
    std::fs::copy("/bin/true", &other).unwrap();
    if std::os::unix::fs::chown(&other, Some(65534), None).is_ok() {
        succeed(Command::new("chmod").arg("u+s").arg(&other));
        let out = output(
            v.preloaded("sh")
                .args(["-c", "./privileged"])
                .current_dir(&v.root),
        );
        assert_eq!(out.status.code(), Some(126), "{}", text(&out));
        assert!(text(&out).contains("LD_PRELOAD"), "{}", text(&out));
    }
}

#[test]
fn a_file_made_shorter_under_its_mapping() {
    holds(&TestVolume::new(""), "shrinking");
}

#[test]
fn a_file_made_shorter_with_the_other_tracker_and_rounding() {
    let more = "tracker = \"mprotect\"\nmsync_rounding = \"page\"";
    holds(&TestVolume::new(more), "shrinking");
}

#[test]
fn threads_sync_read_and_map_at_once() {
    holds(&TestVolume::new(""), "threads");
}

#[test]
fn a_second_process_that_shares_nothing_gets_ebusy() {
    let v = TestVolume::new("working = \"private\"");
    let mut first = v
        .preloaded(probe())
        .args(["until_killed".as_ref(), v.dir().as_os_str()])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(first.stdout.take().unwrap()),
        &mut line,
    )
    .unwrap();
    let out = output(v.preloaded(probe()).arg("show").arg(v.dir()));
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(!out.status.success());
    assert!(
        text(&out).contains("Device or resource busy"),
        "{}",
        text(&out)
    );
}

/// Programs that use no volume do the same with the library and without.
#[test]
fn ordinary_programs_run_unharmed() {
    let v = TestVolume::new("");
    let plain = v.root.join("plain");
    std::fs::create_dir(&plain).unwrap();
    let lines: String = (0..20000)
        .map(|i| format!("{}\n", i * 7919 % 20011))
        .collect();
    std::fs::write(plain.join("lines"), lines).unwrap();
    for script in [
        "sort -n lines -o sorted && md5sum sorted && wc sorted",
        "cp -a sorted copy && cmp sorted copy && mv copy moved && ls && rm moved",
        "ls -l / > /dev/null && head -c 100000 /dev/zero | gzip | gunzip | wc -c",
        "python3 -c 'import mmap,json,subprocess,threading;f=open(\"m\",\"w+b\");f.truncate(9999);m=mmap.mmap(f.fileno(),0);m[5]=9;m.flush();m.close();f.close();print(open(\"m\",\"rb\").read()[5], subprocess.run([\"echo\",\"hi\"],capture_output=True).stdout)'",
        "tar cf t.tar lines && tar tf t.tar && rm -f t.tar m",
    ] {
        let run = |preload: bool| {
            let mut c = if preload {
                v.preloaded("sh")
            } else {
                Command::new("sh")
            };
            c.arg("-c")
                .arg(script)
                .current_dir(&plain)
                .env("LC_ALL", "C");
            let out = output(&mut c);
            assert!(out.status.success(), "{script}: {}", text(&out));
            text(&out)
        };
        let (bare, with) = (run(false), run(true));
        assert_eq!(bare, with, "{script}");
    }
    assert!(!v.dir().exists(), "nothing was attached");
}

/// Python's own mmap, on a volume's file.
#[test]
fn python_maps_a_file_of_the_volume() {
    let v = TestVolume::new("");
    let program = "\
import mmap, os, sys
path = sys.argv[1]
fd = os.open(path, os.O_CREAT | os.O_RDWR)
if os.fstat(fd).st_size == 0: os.ftruncate(fd, 10000)
m = mmap.mmap(fd, 0)
m[0] += 1
m.flush()
m[9999] += 1
os.fsync(fd)
print(m[0], m[9999], os.pread(fd, 1, 0)[0])
m.close()
os.close(fd)
print(len(open(path, 'rb').read()), sorted(os.listdir(os.path.dirname(path))))
";
    for n in 1..=2 {
        let out = output(
            v.preloaded("python3")
                .args(["-c", program])
                .arg(v.dir().join("file")),
        );
        assert_eq!(text(&out), format!("{n} {n} {n}\n10000 ['file']\n"));
    }
}

/// A shell closes 0 and has dup2 put a file there. Where the engine's thread that
/// waits for other processes had begun to, it kept 0 to itself meanwhile: dup2 failed
/// with EBUSY, and the shell's child ran without a standard input. Descriptors of the
/// engine's lay at 3 and up, where a script's `exec 3<file` ended them.
#[test]
fn the_programs_numbers_are_its_own() {
    holds(&TestVolume::new(""), "numbers");
    let v = TestVolume::new("");
    holds(&v, "atomic_map");
    let script = "for i in 1 2 3 4 5 6 7 8 9; do wc -c < \"$1/other\"; done; \
                  exec 3< \"$1/other\" 4< \"$1/file\" 5< /dev/null 6< /dev/null 7< /dev/null; \
                  wc -c <&3; wc -c < \"$1/file\"";
    let mut c = v.preloaded("sh");
    let out = output(c.args(["-c", script, "sh"]).arg(v.dir()));
    assert_eq!(text(&out), "4096\n".repeat(11));
}

/// The shell's redirections and coreutils on a volume's file: reading works,
/// writing says that it does not.
#[test]
fn coreutils_read_the_volume() {
    let v = TestVolume::new("");
    holds(&v, "atomic_map");
    let script = "cmp \"$1/file\" \"$1/other\"; cp \"$1/file\" copy && wc -c < copy; \
                  cat \"$1/file\" | wc -c; wc -c < \"$1/other\"; ls \"$1\"; rm \"$1/other\"; ls \"$1\"; \
                  echo x > \"$1/file2\" || echo refused";
    let mut c = v.preloaded("sh");
    c.args(["-c", script, "sh"])
        .arg(v.dir())
        .current_dir(&v.root);
    let out = output(&mut c);
    let said = text(&out);
    assert!(
        said.contains("4096\n4096\n4096\nfile\nother\nfile\n"),
        "{said}"
    );
    assert!(said.contains("refused"), "{said}");
}
