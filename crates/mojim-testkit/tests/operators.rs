//! The users that may give a node orders, where there are no keys: its own user, and root.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::{await_or, mojim_path, text};

/// The user of the nodes, and one who has nothing to do with them.
const OURS: u32 = 65534;
const OTHER: u32 = 65533;

fn promote(c: &Cluster, user: u32) -> Output {
    let mut command = Command::new(mojim_path());
    command.args([
        "promote",
        "--config",
        c.file().to_str().unwrap(),
        "--name",
        "b",
    ]);
    command
        .uid(user)
        .gid(user)
        .current_dir("/")
        .output()
        .unwrap()
}

/// Without keys, any user of the host could promote a node, rewrite pages of a copy, or have it given up:
/// a node believed whoever reached its address, which on loopback everybody does.
#[test]
fn orders_are_taken_from_the_nodes_user_and_root_only() {
    if !rustix::process::getuid().is_root() {
        eprintln!("left out: other users need root");
        return;
    }
    for who in [OURS, 0] {
        let c = Cluster::new(SYNC);
        for dir in [&c.dir, &c.memory] {
            chown(dir, Some(OURS), Some(OURS)).unwrap();
        }
        c.prepare(|_, command| {
            command.uid(OURS).gid(OURS);
        });
        let (mut a, _b) = (c.node("a"), c.node("b"));
        let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
        program.acknowledged(found, found + 20);
        program.kill();
        a.kill();
        let out = promote(&c, OTHER);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(
            said.contains("node.sock only, from its own user or root"),
            "{said}"
        );
        let last = std::cell::RefCell::new(String::new());
        // A mirror notices within its heartbeat that the primary has died.
        await_or(
            "the promotion",
            || last.borrow().clone(),
            || {
                let out = promote(&c, who);
                last.replace(text(&out.stderr));
                out.status.success().then_some(())
            },
        );
    }
}
