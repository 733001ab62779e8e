//! The events that daemons tell, as alerts need them.
//!
//! Each event has a code and a level. Nothing that looks like an event is told while all is well.

// Seen to fail, each by a defect made on purpose or found:
// - no limit, and a limit that counts nothing

use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::{Process, await_that};

/// A primary `a`, a mirror `b`, and a witness `w`.
struct Cluster {
    home: Home,
}

impl Cluster {
    fn new() -> Cluster {
        let home = Home::new("events", 3);
        let mut t = "cluster = \"events\"\nfailure_limit = \"2s\"\n[volume.v]\nmode = \"sync\"\n\
                     primary = \"a\"\nmirror = \"b\"\n"
            .to_owned();
        for (name, port) in ["a", "b"].iter().zip(&home.ports) {
            t += &home.data_node(name, port.number, "size = \"4MiB\"");
        }
        t += &home.witness("w", home.ports[2].number);
        home.configure(&t);
        Cluster { home }
    }

    fn nodes(&self) -> [Process; 3] {
        ["a", "b", "w"].map(|n| self.home.node(n))
    }

    fn program(&self) -> Process {
        let (mut p, found) = self.home.program("a", &["--entries", "20", "--linger"]);
        p.acknowledged(found, found + 20);
        p
    }

    /// Until the register has both nodes in the view, and both are linked.
    fn await_pair(&self) {
        await_that("the pair", || {
            let [a, b] = ["a", "b"].map(|n| self.home.says(n));
            (a["view"]["mirror"] == "b" && b["link"]["up"] == true).then_some(())
        });
    }
}

/// The lines of a node that an operator is to look at.
fn alarms(p: &Process) -> Vec<String> {
    let all = p.errors();
    let bad = all
        .lines()
        .filter(|l| l.contains(" WARN ") || l.contains(" ERROR "));
    bad.map(str::to_owned).collect()
}

/// A healthy restart logged ERROR "Can not initialize", each election dozens of lines of openraft's, and
/// a program that detached WARN "node a is gone": no alert could stand on a level.
#[test]
fn nothing_is_alarming_while_all_is_well() {
    // A machine that stands still for longer than a link may be silent is not well: then it is done again. What
    // comes of health comes each time.
    let said: Vec<_> = (0..4).map_while(|_| alarms_while_all_is_well()).collect();
    assert!(said.len() < 4, "{said:#?}");
}

/// What is alarming of the second life of the nodes, if anything is.
fn alarms_while_all_is_well() -> Option<Vec<String>> {
    let c = Cluster::new();
    let mut nodes = c.nodes();
    let mut program = c.program();
    c.await_pair();
    program.finish();
    await_that("word of the program's end", || {
        let said = nodes[1].errors();
        let ended = |l: &&str| l.contains(" INFO ") && l.contains("code=primary_ended");
        said.lines().find(ended).map(drop)
    });
    for p in &mut nodes {
        p.signal("TERM");
        assert_eq!(p.wait(), Some(0));
    }
    let nodes = c.nodes();
    let mut program = c.program();
    c.await_pair();
    let all: Vec<_> = nodes.iter().flat_map(alarms).collect();
    program.finish();
    (!all.is_empty()).then_some(all)
}

/// A primary that lost its mirror and went on alone wrote nothing at all.
#[test]
fn each_event_has_its_code_and_status_since_when() {
    let c = Cluster::new();
    let [mut a, mut b, _w] = c.nodes();
    let mut program = c.program();
    c.await_pair();
    let await_code = |p: &Process, level: &str, code: &str| {
        let (level, code) = (format!(" {level} "), format!("code={code}"));
        await_that(&code, || {
            let said = p.errors();
            let is = |l: &&str| l.contains(&level) && l.contains(&code);
            said.lines().find(is).map(drop)
        });
    };
    b.kill();
    await_code(&a, "WARN", "alone");
    // The voters may be choosing who leads them.
    let all = await_that("the finding", || {
        let all = c.home.status();
        let is = |i: &Value| i["kind"] == "alone" && i["since"].is_u64();
        all["volumes"][0]["ills"]
            .as_array()?
            .iter()
            .any(is)
            .then_some(all)
    });
    let findings = all["volumes"][0]["ills"].as_array().unwrap();
    let alone = findings.iter().find(|i| i["kind"] == "alone").unwrap();
    assert_eq!(alone["code"], "alone", "{all:#}");
    assert_eq!(c.home.says("a")["since"]["alone"], alone["since"]);
    assert_eq!(all["version"], 1);
    b = c.home.node("b");
    await_code(&a, "INFO", "mirror_back");
    await_that("nothing but health", || {
        let a = c.home.says("a");
        (a["reachable"] == true && a["since"].is_null()).then_some(())
    });
    c.await_pair();
    program.kill();
    a.kill();
    await_code(&b, "WARN", "primary_lost");
    await_code(&b, "WARN", "took_over");
}
