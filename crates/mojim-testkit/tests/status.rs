//! `mojim status` tells the truth, with real nodes and programs.
//!
//! For each finding its exit code is 1 and its text names what is wrong. The exit code is 0 when
//! that is mended. There is never another finding, once it has settled.
//!
//! Each look is printed as a row of a table (`--nocapture`). Owns its temporary
//! directories, mounts, shared memory and processes.

// A primary `a`, a mirror `b`, a backup `c` and a witness `w`. Each case waits until the command
// names just that finding, by kind and in words, and mends it. Full disks are ext4 on loop devices,
// which need root. Poison comes from a disk of the test's own. The cases:
//
// - none, no program has attached yet, all daemons started again. With a program: well. Without:
//   well.
// - `b`, `c` or `w` killed. With a program: does not answer (`b`, `w`: it has a vote, and how many
//   voters answer). Without: the same.
// - daemon of `a` killed. With a program: does not answer, its program goes on, by who hears it.
//   Without: the same, `b` took over and is alone, and how much `c` has.
// - `b` and `w` killed. With a program: both, 1 of 3 voters answers, nobody takes over, no program
//   can attach, `a`'s link is down and it cannot go on alone, `c` follows nobody. Without: both,
//   the voters.
// - disk of `a`, `b` or `c` full. With a program: 0 MiB are free there. Without: the same.
// - that disk, once it was needed. With a program also: its copy takes nothing meanwhile, `a` is alone, and `c`
//   follows it, a voter there cannot read the register. Without: the same, with room again it is
//   well by itself.
// - disk of `w` full. With a program: 0 KiB are free in its directory (it has a vote). Without: the
//   same after a promotion: it does not vote.
// - superblocks, or the catalogue, damaged. With a program: the copy cannot be used, of `b` also:
//   link down, `c` follows nobody. Without: the copy cannot be used.
// - `b`'s disk failed for the last sync point. Without a program: the copy cannot be
//   used, poisoned.
// - `a` lost its memory and its last records, or one. Without a program: it ends before its
//   mirror. For one: the log is damaged.
// - `c` cut off. With a program: `c` follows nobody. Without: the same, if it lacks something.
// - `c` slower than the program. With a program: `c` lags, and the program is held back. Without:
//   not made.
// - `c` runs with another cluster's configuration. Without a program: it answers that it
//   is of another cluster.

use std::fs;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use mojim_testkit::disk::{Disk, Work};
use mojim_testkit::home::Home;
use mojim_testkit::link::{self, Way};
use mojim_testkit::small::Small;
use mojim_testkit::{DEADLINE, Process, await_or, await_that, text};

/// A primary `a`, a mirror `b`, a backup `c` and a witness `w`.
struct Cluster {
    home: Home,
}

impl Cluster {
    fn new() -> Cluster {
        // A busy machine may stand still for seconds: whoever takes over then is a finding of
        // its own.
        Cluster::with("failure_limit = \"4s\"\nheartbeat = \"200ms\"\n", "")
    }

    /// Nobody promotes but an operator.
    fn by_hand(volume: &str) -> Cluster {
        Cluster::with("", &format!("failover = \"manual\"\n{volume}"))
    }

    fn with(cluster: &str, volume: &str) -> Cluster {
        let home = Home::new("status", 4);
        let mut t = format!(
            "cluster = \"status\"\n{cluster}[volume.v]\nmode = \"sync\"\nprimary = \"a\"\n\
             mirror = \"b\"\nbackups = [\"c\"]\n{volume}"
        );
        let ports: Vec<u16> = home.ports.iter().map(|p| p.number).collect();
        for (name, port) in ["a", "b", "c"].iter().zip(&ports) {
            t += &home.data_node(name, *port, "size = \"4MiB\"");
        }
        // Three vote: a majority is two.
        t += "vote = false\n";
        t += &home.witness("w", ports[3]);
        home.configure(&t);
        Cluster { home }
    }

    fn nodes(&self) -> Nodes {
        Nodes(["a", "b", "c", "w"].map(|n| Some(self.node(n))))
    }

    /// What is said now, as programs read it.
    fn look(&self) -> Said {
        let out = self.mojim("status", &["--json"]);
        let all: Value = serde_json::from_slice(&out.stdout).unwrap();
        let findings = all["volumes"][0]["ills"].as_array().unwrap();
        let word = |i: &Value, key: &str| i[key].as_str().unwrap_or("").to_owned();
        let findings = findings.iter().map(|i| (word(i, "node"), word(i, "kind")));
        let findings: Vec<_> = findings.collect();
        let code = out.status.code().unwrap();
        assert_eq!(code, i32::from(!findings.is_empty()), "{all}");
        Said { code, findings }
    }

    /// Until the findings are these and no others, which the text must name by `words`.
    /// All is not well from the first look on.
    fn await_findings(&self, scenario: &str, findings: &[Known], words: &[&str]) {
        self.await_said(scenario, (findings, &[]), words, 1);
    }

    /// The same of findings that are not seen at once.
    fn await_late(&self, scenario: &str, findings: &[Known], words: &[&str]) {
        self.await_said(scenario, (findings, &[]), words, 0);
    }

    /// The same where those of `may` come and go.
    fn await_among(&self, scenario: &str, findings: &[Known], may: &[Known], words: &[&str]) {
        self.await_said(scenario, (findings, may), words, 1);
    }

    fn await_well(&self, scenario: &str) {
        self.await_said(scenario, (&[], &[]), &[], 0);
    }

    fn await_said(
        &self,
        scenario: &str,
        (must, may): (&[Known], &[Known]),
        words: &[&str],
        least: i32,
    ) {
        let begin = Instant::now();
        loop {
            let said = self.look();
            assert!(said.code >= least, "{scenario}: all is said to be well");
            let all = must.iter().all(|finding| said.holds(finding));
            let known = |(n, k): &(String, String)| {
                let mut known = must.iter().chain(may);
                known.any(|(node, kind)| n == node && k == kind)
            };
            let only = said.findings.iter().all(known);
            let out = self.mojim("status", &[]);
            let text = text(&out.stdout);
            let named = words.iter().all(|w| text.contains(w));
            let code = out.status.code().unwrap();
            if all && only && named && code == i32::from(!must.is_empty()) {
                row(scenario, code, &text);
                return;
            }
            if begin.elapsed() >= DEADLINE {
                panic!(
                    "{scenario}: {must:?} with {words:?} is not said, but {:?}:\n{text}",
                    said.findings
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn program(&self, node: &str) -> Process {
        let words = ["--entries", "20", "--linger"];
        let (mut p, found) = await_that(&format!("attaching on {node}"), || {
            self.try_program(node, &words).ok()
        });
        p.acknowledged(found, found + 20);
        p
    }

    /// Whether a sync point is left that waits for a program, once all else is well but, at
    /// most, a's copy. That is known only when a's daemon has looked at what the last program
    /// left.
    fn waits_for_a_program(&self) -> bool {
        await_that("a's look, and nothing but what it finds", || {
            let says = self.says("a");
            let has_looked = says["last_lsn"].is_u64() && says["settling"] != true;
            let said = self.look();
            let known = |(n, k): &(String, String)| {
                let finding = (n.as_str(), k.as_str());
                finding == WAITS || finding == ("a", "copy")
            };
            let only = said.findings.iter().all(known);
            // A copy that a full disk kept closed is opened by a program, too, as the status says.
            (has_looked && only).then(|| said.holds(&WAITS) || said.holds(&("a", "copy")))
        })
    }

    /// As after a loss of power: what a node had in memory is gone.
    fn lose_memory(&self, node: &str) {
        let mine = format!("mojim-status-{node}-");
        for d in fs::read_dir(&self.memory).unwrap() {
            let d = d.unwrap();
            if d.file_name().to_str().unwrap().starts_with(&mine) {
                fs::remove_dir_all(d.path()).unwrap();
            }
        }
    }

    /// A file that only this node's copy consists of.
    fn meta(&self, node: &str, name: &str) -> PathBuf {
        self.dir.join(node).join(".mojim/v").join(name)
    }
}

impl Deref for Cluster {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}

/// A node, and the kind of its finding.
type Known = (&'static str, &'static str);

/// What was said.
struct Said {
    code: i32,
    findings: Vec<(String, String)>,
}

impl Said {
    fn holds(&self, finding: &Known) -> bool {
        self.findings
            .iter()
            .any(|(node, kind)| node == finding.0 && kind == finding.1)
    }
}

/// A row of the table: what the volume is called and each finding, without what to do.
fn row(scenario: &str, code: i32, text: &str) {
    let lines = text.lines();
    let said = lines.filter(|l| l.starts_with("volume ") || l.starts_with("  ! "));
    let said: Vec<_> = said.map(|l| l.trim_start_matches(' ')).collect();
    println!("| {scenario} | {code} | {} |", said.join("<br>"));
}

/// The daemons of `a`, `b`, `c` and `w`.
struct Nodes([Option<Process>; 4]);

impl Nodes {
    fn at(&mut self, name: &str) -> &mut Option<Process> {
        &mut self.0[["a", "b", "c", "w"]
            .iter()
            .position(|n| *n == name)
            .unwrap()]
    }

    fn kill(&mut self, name: &str) {
        drop(self.at(name).take());
    }

    /// Ends it in order.
    fn end(&mut self, name: &str) {
        let mut p = self.at(name).take().unwrap();
        p.signal("TERM");
        assert_eq!(p.wait(), Some(0));
    }

    fn start(&mut self, c: &Cluster, name: &str) {
        *self.at(name) = Some(c.node(name));
    }
}

/// It was said of every healthy volume with a backup that the backup is not reached:
/// who follows was asked, too.
#[test]
fn what_is_well_is_said_to_be() {
    let c = Cluster::new();
    let mut nodes = c.nodes();
    c.await_well("nobody has attached yet");
    let mut p = c.program("a");
    c.await_well("a program is attached");
    // It is the mirror that forwards to it.
    await_that("whom c follows", || {
        let said = text(&c.mojim("status", &[]).stdout);
        said.contains("  backup c: follows node b, has LSN")
            .then_some(())
    });
    p.finish();
    c.await_well("the program has ended");
    for n in ["a", "b", "c", "w"] {
        nodes.end(n);
        nodes.start(&c, n);
    }
    c.await_well("every daemon was started again");
    // It forwards to c, which kept it from handing its copy over.
    await_that("the promotion", || {
        let out = c.mojim("promote", &["--name", "b"]);
        let said = text(&out.stderr);
        assert!(!said.contains("did not end"), "{said}");
        // The voters may be choosing who leads them.
        (out.status.code() == Some(0)).then_some(())
    });
    c.await_well("b promoted, without a program");
}

/// Each daemon is killed while a program is attached.
#[test]
fn a_dead_node_is_named_beside_a_program() {
    let c = Cluster::new();
    let mut nodes = c.nodes();
    let _p = c.program("a");
    c.await_well("a program is attached");
    for (n, word) in [
        ("c", "node c at"),
        ("w", "does not answer: link to"),
        ("a", "node a at"),
    ] {
        nodes.kill(n);
        let kind = if n == "w" { "voter" } else { "unreachable" };
        let what = format!("{n} killed, with a program");
        let heard = if n == "a" {
            "node b heard its program"
        } else {
            ""
        };
        c.await_findings(&what, &[(n, kind)], &[word, heard]);
        nodes.start(&c, n);
        c.await_well(&format!("{n} back, with a program"));
    }
    // The backup takes the mirror's place, and who comes back is the backup.
    nodes.kill("b");
    c.await_findings(
        "b killed, with a program",
        &[("b", "unreachable")],
        &["node b at"],
    );
    nodes.start(&c, "b");
    c.await_well("b back, with a program");
}

/// The same where no program is attached.
#[test]
fn a_dead_node_is_named_without_a_program() {
    let c = Cluster::new();
    let mut nodes = c.nodes();
    c.program("a").finish();
    c.await_well("no program is attached");
    // One may be late.
    await_that("the votes of all", || {
        let said = text(&c.mojim("status", &[]).stdout);
        let votes = "  voters: a, b, w; without an answer: none; 2 of 3 are needed\n";
        said.contains(votes).then_some(())
    });
    for (n, word) in [
        ("b", "node b at"),
        ("c", "node c at"),
        ("w", "does not answer: link to"),
    ] {
        nodes.kill(n);
        let kind = if n == "w" { "voter" } else { "unreachable" };
        let what = format!("{n} killed, without a program");
        c.await_findings(&what, &[(n, kind)], &[word]);
        nodes.start(&c, n);
        c.await_well(&format!("{n} back, without a program"));
    }
    // The mirror takes over.
    nodes.kill("a");
    let findings = [("a", "unreachable"), ("b", "alone")];
    // Nobody heard a program that is not there.
    let said = text(&c.mojim("status", &[]).stdout);
    assert!(!said.contains("heard its program"), "{said}");
    c.await_findings(
        "a killed, without a program",
        &findings,
        &[
            "node a at",
            "node b is alone: it has no mirror; node c has LSN",
        ],
    );
    nodes.start(&c, "a");
    c.await_well("a back, without a program");
}

/// Two of three voters are dead: nobody can take over any more.
#[test]
fn a_lost_quorum_is_named() {
    for with in [true, false] {
        let c = Cluster::new();
        let mut nodes = c.nodes();
        let mut p = c.program("a");
        let has = if with { "with" } else { "without" };
        if !with {
            p.finish();
        }
        c.await_well(&format!("three voters, {has} a program"));
        nodes.kill("w");
        nodes.kill("b");
        let mut findings = vec![("", "quorum"), ("b", "unreachable"), ("w", "voter")];
        let mut words =
            vec!["! 1 of 3 voters answer, and 2 are needed: meanwhile nobody takes over"];
        if with {
            findings.extend([("a", "link"), ("c", "backup-away")]);
            words.push("it reaches too few voters to go on alone");
        }
        c.await_findings(
            &format!("b and w killed, {has} a program"),
            &findings,
            &words,
        );
        nodes.start(&c, "w");
        nodes.start(&c, "b");
        c.await_well(&format!("b and w back, {has} a program"));
    }
}

/// A program that ended when its disk was full may leave a sync point that its own log has
/// and the mirror has not (this depends on which of its threads meets the full disk first):
/// it was acknowledged to nobody, and waits for a program.
const WAITS: Known = ("b", "behind");

/// The disk of one node is full: first nobody needs it, then what is stored fails there.
/// `may`: what else is then said at times.
fn a_full_disk(node: &'static str, may: &[Known]) {
    let c = Cluster::new();
    let Some(disk) = Small::mount_or_skip(&c.dir.join(node), 48) else {
        return;
    };
    let mut nodes = c.nodes();
    let mut p = c.program("a");
    let words = [&*format!("node {node}: 0 MiB are free")];
    let full = [(node, "room")];
    c.await_well(&format!("{node} has room, with a program"));
    disk.fill();
    let what = format!("the disk of {node} full, with a program");
    c.await_findings(&what, &full, &words);
    disk.empty();
    c.await_well(&format!("room at {node} again, with a program"));
    p.finish();
    disk.fill();
    let what = format!("the disk of {node} full, without a program");
    c.await_findings(&what, &full, &words);
    let (mut p, found) = c
        .try_program("a", &["--linger", "--entries", "9000"])
        .unwrap();
    if node == "a" {
        while p.line().is_some() {}
        assert!(p.errors().contains("No space left"), "{}", p.errors());
    } else {
        // It goes on.
        p.acknowledged(found, found + 9000);
        // What a backup is sent reaches it later than the program is told.
        let daemon = nodes.at(node).as_ref().unwrap();
        await_that("its daemon's word that there is no room", || {
            daemon.errors().contains("No space left").then_some(())
        });
        let what = format!("{node} could not take what was stored, with a program");
        let words = [words[0], "its copy takes nothing meanwhile"];
        c.await_among(&what, &full, may, &words);
        p.finish();
    }
    let what = format!("{node} could not take what was stored, without a program");
    let takes_nothing = match node {
        "a" => "",
        _ => "its copy takes nothing meanwhile",
    };
    c.await_among(&what, &full, may, &[words[0], takes_nothing]);
    disk.empty();
    if node == "a" && c.waits_for_a_program() {
        c.program("a").finish();
        c.await_well(&format!("room at {node} again, and a program came"));
    } else {
        c.await_well(&format!("room at {node} again, by itself"));
    }
}

/// A block of a small disk, and the least bytes of a view in a voter's log.
const BLOCK: usize = 4096;
const ENTRY: usize = 128;

/// A witness has no copy, and nothing said that its votes have no room.
#[test]
fn a_full_disk_of_the_witness_is_named() {
    let c = Cluster::new();
    let Some(disk) = Small::mount_or_skip(&c.dir.join("w"), 48) else {
        return;
    };
    let _nodes = c.nodes();
    let mut p = c.program("a");
    c.await_well("w has room");
    disk.fill();
    let words = ["node w: 0 KiB are free in"];
    c.await_findings("the disk of w full", &[("w", "voter")], &words);
    p.finish();
    // Views that are to be stored there, too: it answers, and does not vote. The first ones may
    // still fit into the last block of its log, which it has.
    let words = [
        "it does not vote on views meanwhile: ",
        "  voters: a, b; answer and do not vote: w; without an answer: none; 2 of 3 are needed\n",
    ];
    let votes = || {
        let text = text(&c.mojim("status", &[]).stdout);
        !text.contains(words[0])
    };
    for to in ["b", "a"].into_iter().cycle().take(BLOCK / ENTRY) {
        await_that("the promotion", || {
            let out = c.mojim("promote", &["--name", to]);
            (out.status.code() == Some(0)).then_some(())
        });
        if !votes() {
            break;
        }
    }
    let may = [
        ("a", "stale"),
        ("a", "copy"),
        ("a", "alone"),
        ("b", "stale"),
        ("b", "copy"),
        ("b", "alone"),
        ("", "quorum"),
    ];
    c.await_among("w does not vote", &[("w", "voter")], &may, &words);
    disk.empty();
    c.await_well("room at w again");
}

/// A daemon voted, and its votes lay in a directory that others may write to, before it
/// was refused for that.
#[test]
fn a_witness_writes_nothing_where_others_may() {
    use std::os::unix::fs::PermissionsExt;
    let c = Cluster::new();
    let dir = c.dir.join("w");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    let out = c.mojim("node", &["--name", "w"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("others may write"), "{said}");
    assert!(!dir.join(".mojim/views").exists());
}

#[test]
fn a_full_disk_of_the_primary_is_named() {
    a_full_disk(
        "a",
        &[("a", "copy"), ("a", "quorum"), ("a", "voter"), WAITS],
    );
}

#[test]
fn a_full_disk_of_the_mirror_is_named() {
    let may = [
        ("b", "copy"),
        ("b", "quorum"),
        ("b", "voter"),
        ("a", "alone"),
        ("a", "link"),
    ];
    a_full_disk(
        "b",
        &[&may[..], &[("c", "backup-away"), ("c", "copy")]].concat(),
    );
}

/// Such a backup was greeted again and again, and the program stood still for minutes.
#[test]
fn a_full_disk_of_a_backup_is_named() {
    let may = [("c", "copy"), ("c", "backup-away"), ("c", "backup-lag")];
    a_full_disk("c", &may);
}

/// Both superblocks of a copy, then its catalogue, are damaged while its node is down.
fn a_damaged_copy(node: &'static str) {
    for with in [false, true] {
        if with && node == "a" {
            continue;
        }
        let c = Cluster::by_hand("");
        let mut nodes = c.nodes();
        let mut p = c.program("a");
        let has = if with { "with" } else { "without" };
        if !with {
            p.finish();
        }
        c.await_well(&format!("whole copies, {has} a program"));
        for (file, at, word) in [
            ("superblock", [100, 4096 + 100], "no valid superblock"),
            ("catalog", [20, 20], "catalog"),
        ] {
            nodes.end(node);
            let path = c.meta(node, file);
            let whole = fs::read(&path).unwrap();
            let mut bytes = whole.clone();
            bytes[at[0]] ^= 1;
            if at[0] != at[1] {
                bytes[at[1]] ^= 1;
            }
            fs::write(&path, bytes).unwrap();
            nodes.start(&c, node);
            let what = format!("the {file} of {node} damaged, {has} a program");
            let mut findings = vec![(node, "copy")];
            if with && node == "b" {
                // Nobody forwards.
                findings.extend([("a", "link"), ("c", "backup-away")]);
            }
            c.await_findings(
                &what,
                &findings,
                &[&format!("the copy of node {node} cannot be used"), word],
            );
            // One is mended, the other made anew from the primary's.
            nodes.end(node);
            if file == "superblock" || node == "a" {
                fs::write(&path, whole).unwrap();
            } else {
                fs::remove_dir_all(c.dir.join(node)).unwrap();
            }
            nodes.start(&c, node);
            c.await_well(&format!("the {file} of {node} mended, {has} a program"));
        }
    }
}

#[test]
fn a_damaged_copy_of_the_primary_is_named() {
    a_damaged_copy("a");
}

#[test]
fn a_damaged_copy_of_the_mirror_is_named() {
    a_damaged_copy("b");
}

#[test]
fn a_damaged_copy_of_a_backup_is_named() {
    a_damaged_copy("c");
}

/// The disk of the mirror fails once, for the last thing that a program has stored: nobody
/// is left who would have the copy opened again.
#[test]
fn a_poisoned_copy_is_named() {
    let c = Cluster::by_hand("");
    let Some(disk) = Disk::mount_or_skip(&c.dir.join("b")) else {
        return;
    };
    let mut nodes = c.nodes();
    c.program("a").finish();
    c.await_well("no program is attached, b on its disk");
    // Or what is held is what an attach waits for.
    await_that("b to have applied all", || {
        let says = c.says("b");
        (says["applied"].is_u64() && says["applied"] == says["last_lsn"]).then_some(())
    });
    // What is stored last is in b's log, and on its way from there to its data.
    let held = disk.hold(Work::Write, "/v/log");
    let mut p = c.program("a");
    await_that("work for b's disk", || disk.is_holding().then_some(()));
    p.finish();
    disk.fail(Work::Sync, "/v/log");
    drop(held);
    await_that("the fault", || disk.has_failed().then_some(()));
    // What b had not forwarded by then c does not have.
    let findings: [&[Known]; 2] = [&[("b", "copy")], &[("c", "backup-away")]];
    c.await_said(
        "the copy of b poisoned, without a program",
        findings.into(),
        &[
            "the copy of node b cannot be used: poisoned: ",
            "Input/output error",
        ],
        0,
    );
    nodes.end("b");
    nodes.start(&c, "b");
    // What c lacks it gets while a program is attached.
    let _p = c.program("a");
    c.await_well("b started again, with a program");
}

/// A backup whose daemon answers, and to which nothing comes.
#[test]
fn a_backup_that_is_cut_off_or_lags_is_named() {
    let c = Cluster::by_hand("secondary_threshold = 65536\n");
    let plain = fs::read_to_string(c.file()).unwrap();
    let real = format!("127.0.0.1:{}", c.ports[2].number);
    let as_b = |port: u16| {
        let file = c.dir.join("b.toml");
        fs::write(&file, plain.replace(&real, &format!("127.0.0.1:{port}"))).unwrap();
        file
    };
    let (way, port) = Way::new(c.ports[2].number);
    let mut nodes = c.nodes();
    nodes.end("b");
    *nodes.at("b") = Some(c.node_as(&as_b(port), "b"));
    let mut p = c.program("a");
    c.await_well("the backup follows, with a program");
    // Forwarding takes its time: it is level before it is cut off.
    let level = || {
        await_that("all of it at c", || {
            let (a, c) = (c.says("a"), c.says("c"));
            (c["last_lsn"].is_u64() && c["last_lsn"] == a["last_lsn"]).then_some(())
        })
    };
    level();
    way.cut();
    c.await_late(
        "c cut off, with a program",
        &[("c", "backup-away")],
        &["backup c follows nobody"],
    );
    p.finish();
    c.await_well("c cut off and level, without a program");
    let mut p = c.program("a");
    p.finish();
    c.await_findings(
        "c cut off and behind, without a program",
        &[("c", "backup-away")],
        &["backup c follows nobody"],
    );

    nodes.end("b");
    let slow = link::slow(real.clone(), 16 << 10, Duration::from_millis(500));
    *nodes.at("b") = Some(c.node_as(&as_b(slow), "b"));
    let args = ["--entries", "9000", "--first", "1"];
    let (mut p, found) = c.try_program("a", &args).unwrap();
    p.acknowledged(found, found + 1);
    // Nobody is held back for a backup that does not follow yet: one that is left behind by
    // more than the logs hold gets a whole copy.
    level();
    p.go_on();
    let p = p.read_on_counting();
    c.await_late(
        "c lags",
        &[("c", "backup-lag")],
        &["backup c lags by", "the program is held back"],
    );
    p.stop();
    nodes.end("b");
    nodes.start(&c, "b");
    let _p = c.program("a");
    c.await_well("c reached again, with a program");
}

/// A daemon that answers, and not as the configuration says, is not said to be away.
#[test]
fn a_node_with_another_configuration_is_named() {
    let c = Cluster::by_hand("");
    let mut nodes = c.nodes();
    c.program("a").finish();
    c.await_well("one configuration");
    let other = c.dir.join("other.toml");
    let text = fs::read_to_string(c.file()).unwrap();
    fs::write(&other, text.replace("\"status\"", "\"other\"")).unwrap();
    nodes.end("c");
    *nodes.at("c") = Some(c.node_as(&other, "c"));
    c.await_findings(
        "c of another cluster",
        &[("c", "refused")],
        &["this is cluster \"other\""],
    );
    nodes.end("c");
    nodes.start(&c, "c");
    c.await_well("c of this cluster again");
    // A limit of its own, by which it would act at another time than the others, went unnoticed.
    let limit = "failure_limit = \"7s\"\n[volume.v]";
    fs::write(&other, text.replacen("[volume.v]", limit, 1)).unwrap();
    nodes.end("c");
    *nodes.at("c") = Some(c.node_as(&other, "c"));
    c.await_findings(
        "c with another failure_limit",
        &[("c", "configuration")],
        &["node c runs with another configuration: failure_limit 7000 ms"],
    );
    nodes.end("c");
    nodes.start(&c, "c");
    c.await_well("c with this failure_limit again");
    // Nor was it noticed that a node had the places of primary and mirror exchanged, or other links.
    let text = fs::read_to_string(c.file()).unwrap();
    let places = "primary = \"a\"\nmirror = \"b\"";
    let exchanged = "primary = \"b\"\nmirror = \"a\"\nconnections = 3";
    assert!(text.contains(places), "{text}");
    fs::write(&other, text.replacen(places, exchanged, 1)).unwrap();
    // A log that still holds records keeps its number of connections.
    await_or(
        "c with all that is committed",
        || c.status().to_string(),
        || {
            let (b, c) = (c.says("b"), c.says("c"));
            let is = c["applied"].is_u64() && c["applied"] == b["last_lsn"];
            is.then_some(())
        },
    );
    nodes.end("c");
    *nodes.at("c") = Some(c.node_as(&other, "c"));
    c.await_findings(
        "c with the places exchanged",
        &[("c", "configuration")],
        &[
            "connections 3 (here 1)",
            "primary b and mirror a (here the other way round)",
        ],
    );
    nodes.end("c");
    nodes.start(&c, "c");
    c.await_well("c with these places again");
}

/// A primary and its program are killed, its memory is lost, and its log has not all that
/// was acknowledged: a record was never written, or has another bit. The mirror has it.
#[test]
fn a_primary_that_lost_something_is_named() {
    let behind = ("a", "behind");
    let lacks = "the copy of node a ends at LSN ";
    for (what, findings, words) in [
        ("nothing", &[][..], &[][..]),
        ("the last records", &[behind], &[lacks]),
        (
            "a record",
            &[behind, ("a", "copy")],
            &[lacks, "its log is damaged: "],
        ),
    ] {
        let c = Cluster::by_hand("");
        let mut nodes = c.nodes();
        let ends = ["--entries", "300", "--linger"];
        let goes_on = ["--entries", "1000000000", "--pace", "300"];
        let args: &[&str] = if what == "nothing" { &ends } else { &goes_on };
        let (mut p, _) = c.try_program("a", args).unwrap();
        p.acknowledged(0, 300);
        if what == "nothing" {
            c.await_well("a program is attached");
            await_that("all to be in the log, on its disk", || {
                let says = c.says("a");
                let is_said = says["persisted"].is_u64();
                (is_said && says["persisted"] == says["last_lsn"]).then_some(())
            });
            p.kill();
            nodes.kill("a");
        } else {
            // Of what a checkpoint covers nothing would be missing.
            let p = p.read_on_counting();
            c.stop_with_records(&["a"], 3, &[p.id()]);
            nodes.kill("a");
            p.stop();
        }
        c.lose_memory("a");
        let (mut all, mut bytes) = c.records("a");
        all.drain(..all.len() - 3);
        match what {
            "nothing" => {}
            "a record" => bytes[all[0].1 + 60] ^= 1,
            _ => all.iter().for_each(|(_, at)| bytes[*at..*at + 512].fill(0)),
        }
        fs::write(c.log("a"), bytes).unwrap();
        nodes.start(&c, "a");
        if what == "nothing" {
            c.await_well("a without its memory, its log whole");
            continue;
        }
        c.await_late(&format!("a without its memory and {what}"), findings, words);
        // The program takes it from the mirror.
        let _p = c.program("a");
        c.await_well(&format!("a has {what} again, with a program"));
    }
}
