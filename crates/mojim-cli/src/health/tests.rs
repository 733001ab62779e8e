//! The rules of `health`, by rows as daemons give them.

use super::*;

fn row(name: &str, role: &str) -> Value {
    json!({
        "node": name, "role": role, "reachable": true, "state": "whole", "epoch": 5,
        "last_lsn": 90, "attached": false, "view": { "primary": "a", "mirror": "b" },
    })
}

/// A primary with its program, its mirror, and two backups. Like a real
/// daemon of an older build, the backups say that they reach nobody.
fn cluster() -> Vec<Value> {
    let mut nodes = vec![
        row("a", "primary"),
        row("b", "mirror"),
        row("c", "backup"),
        row("d", "backup"),
    ];
    nodes[0]["attached"] = json!(true);
    for n in &mut nodes {
        n["link"] = json!({ "up": true });
        n["room"] = json!({ "free": 1 << 30, "needs": 64 << 20, "path": "/x" });
        n["register"] = json!({ "version": 3, "epoch": 5, "primary": { "node": "a" } });
    }
    let rows = |active: bool, of: [&str; 2]| {
        json!(of.map(|n| json!({ "node": n, "active": active, "acked": 90, "lag": 0 })))
    };
    nodes[1]["backups"] = rows(true, ["c", "d"]);
    nodes[2]["backups"] = rows(false, ["b", "d"]);
    nodes[3]["backups"] = rows(false, ["b", "c"]);
    nodes
}

fn expected(voters: &[Voter]) -> Expected<'_> {
    Expected {
        mirrored: true,
        waits: true,
        threshold: 1000,
        voters,
    }
}

/// Three voters: `a`, `b` and, without a copy, `w`, which may be in a bad way.
fn voters(error: Option<&str>) -> [Voter; 3] {
    ["a", "b", "w"].map(|n| Voter {
        name: n.to_owned(),
        answers: n != "w" || error.is_none(),
        refuses: false,
        error: error.filter(|_| n == "w").map(str::to_owned),
        unread: None,
        down: None,
    })
}

/// The texts of what is not well.
fn texts(nodes: &[Value], voters: &[Voter]) -> Vec<String> {
    findings(&expected(voters), nodes)
        .into_iter()
        .map(|i| i.text)
        .collect()
}

fn judge_with(nodes: &[Value], voters: &[Voter]) -> Vec<(String, String)> {
    let expected = expected(voters);
    let found = findings(&expected, nodes);
    let top = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for i in &found {
        assert!(!i.text.is_empty() && !i.todo.is_empty(), "{i:?}");
        let page = i.to_json("v")["page"].as_str().map(|p| top.join(p));
        assert!(page.is_some_and(|p| p.exists()), "{i:?}");
    }
    found
        .into_iter()
        .map(|i| (i.node, i.kind.to_owned()))
        .collect()
}

fn judge(nodes: &[Value]) -> Vec<(String, String)> {
    judge_with(nodes, &voters(None))
}

/// What is to be done first, where there are no voters.
fn todo(nodes: &[Value]) -> Cow<'static, str> {
    let expected = expected(&[]);
    findings(&expected, nodes).remove(0).todo
}

fn one(node: &str, kind: &str) -> Vec<(String, String)> {
    vec![(node.to_owned(), kind.to_owned())]
}

/// No rule judged such a node: it is not a backup, and another node is the mirror.
#[test]
fn who_came_back_and_has_no_place_in_the_view_is_not_well() {
    let mut nodes = cluster();
    nodes.push(row("e", "mirror"));
    nodes[4]["link"] = json!({ "up": false });
    assert_eq!(judge(&nodes), one("e", "backup-away"));
    nodes[4]["link"]["up"] = json!(true);
    assert_eq!(judge(&nodes), []);
}

#[test]
fn a_healthy_volume_with_backups_is_well() {
    let mut nodes = cluster();
    assert_eq!(judge(&nodes), []);
    // The program has ended, and the mirror's daemon was started again.
    nodes[0]["attached"] = json!(false);
    for n in &mut nodes {
        n["link"] = json!({ "up": false });
    }
    nodes[1]["backups"][0]["active"] = json!(false);
    nodes[1]["backups"][1]["active"] = json!(false);
    assert_eq!(judge(&nodes), []);
    // Nobody has ever attached.
    for n in &mut nodes {
        *n = json!({ "node": n["node"], "role": n["role"], "reachable": true, "state": "new" });
    }
    assert_eq!(judge(&nodes), []);
}

#[test]
fn a_node_that_does_not_answer_or_cannot_use_its_copy_is_an_ill() {
    for attached in [true, false] {
        let mut nodes = cluster();
        nodes[0]["attached"] = json!(attached);
        let whole = nodes.clone();
        nodes[2] = json!({ "node": "c", "reachable": false, "error": "no answer" });
        assert_eq!(judge(&nodes), one("c", "unreachable"));
        for i in 0..4 {
            let mut nodes = whole.clone();
            nodes[i]["error"] = json!("poisoned: no space left");
            let name = text(&whole[i], "node");
            assert_eq!(judge(&nodes), one(name, "copy"));
            let mut nodes = whole.clone();
            nodes[i]["room"]["free"] = json!(1 << 20);
            assert_eq!(judge(&nodes), one(name, "room"));
            let mut nodes = whole.clone();
            nodes[i]["state"] = json!("empty");
            assert_eq!(judge(&nodes), one(name, "copy"));
        }
        nodes = whole.clone();
        nodes[1] = json!({ "node": "b", "reachable": true, "error": "this is cluster x" });
        assert_eq!(judge(&nodes), one("b", "refused"));
        // Before anybody has attached, too.
        let new = |n: &Value| json!({ "node": n["node"], "role": n["role"], "reachable": true, "state": "new" });
        nodes = whole.iter().map(new).collect();
        nodes[3]["error"] = json!("no space");
        assert_eq!(judge(&nodes), one("d", "copy"));
    }
}

#[test]
fn a_dead_witness_and_a_lost_quorum_are_ills() {
    let mut nodes = cluster();
    assert_eq!(
        judge_with(&nodes, &voters(Some("refused"))),
        one("w", "voter")
    );
    nodes[1]["register"] = json!({ "error": "no majority" });
    assert_eq!(judge(&nodes), one("b", "quorum"));
    // No node can read the register: reported once, and by how many voters answer.
    for n in &mut nodes {
        n["register"] = json!({ "error": "no majority" });
    }
    assert_eq!(judge(&nodes), one("", "quorum"));
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(said.starts_with("3 of 3 voters answer, and the register of views cannot be read"));
    let mut away = voters(Some("refused"));
    away[1].answers = false;
    let said = texts(&nodes, &away);
    assert!(said[0].ends_with("refused; it has a vote"), "{said:?}");
    assert!(
        said[1].starts_with("1 of 3 voters answer, and 2 are needed: meanwhile nobody"),
        "{said:?}"
    );
    for n in &mut nodes {
        n["register"] = json!({ "version": 3, "epoch": 5, "primary": { "node": "a" } });
    }
    nodes[1]["register"] =
        json!({ "version": 4, "epoch": 6, "primary": { "node": "b" }, "mirror": null });
    assert_eq!(judge(&nodes), one("b", "promotion"));
}

#[test]
fn a_backup_that_lags_or_follows_nobody_is_an_ill() {
    let mut nodes = cluster();
    nodes[1]["backups"][0]["lag"] = json!(1000);
    assert_eq!(judge(&nodes), []);
    nodes[1]["backups"][0]["lag"] = json!(1001);
    assert_eq!(judge(&nodes), one("c", "backup-lag"));
    nodes = cluster();
    nodes[1]["backups"][1]["active"] = json!(false);
    nodes[3]["link"] = json!({ "up": false });
    assert_eq!(judge(&nodes), one("d", "backup-away"));
    // No program sends any more, and the backup lacks something.
    nodes[0]["attached"] = json!(false);
    assert_eq!(judge(&nodes), []);
    nodes[3]["last_lsn"] = json!(89);
    assert_eq!(judge(&nodes), one("d", "backup-away"));
}

/// A program whose disk had been full failed at each sync point, and all was well.
#[test]
fn a_program_that_can_commit_nothing_is_an_ill() {
    let mut nodes = cluster();
    nodes[0]["failed"] = json!(true);
    assert_eq!(judge(&nodes), one("a", "failed"));
}

/// While what a program had committed waited for room, nothing said so.
#[test]
fn a_program_whose_disk_has_no_room_is_an_ill() {
    let mut nodes = cluster();
    nodes[0]["waits_for_room"] = json!(true);
    assert_eq!(judge(&nodes), one("a", "room"));
    let said = texts(&nodes, &[]).concat();
    // "Each sync point waits" was said of calls that return, and are acknowledged.
    let waits = "committed data waits in the log, and sync points of its program go on";
    assert!(said.contains(waits), "{said}");
}

/// A mirror that came back empty, and is the configuration's primary, was said to be
/// the primary whose copy is gone.
#[test]
fn an_empty_mirror_is_not_the_primary() {
    let mut nodes = cluster();
    nodes[0] = row("a", "primary");
    nodes[0]["epoch"] = json!(4);
    nodes[1]["role"] = json!("primary");
    nodes[1]["view"]["primary"] = json!("b");
    nodes[1]["attached"] = json!(true);
    for state in ["empty", "loading"] {
        nodes[0]["state"] = json!(state);
        let expected = expected(&[]);
        let of_a = findings(&expected, &nodes);
        let of_a: Vec<_> = of_a.iter().filter(|i| i.node == "a").collect();
        assert!(
            of_a.iter().all(|i| i.kind == "copy" && i.todo != TAKE),
            "{of_a:?}"
        );
    }
}

/// "Nothing, if this passes" was said of the primary itself, which nobody heals.
#[test]
fn a_primary_whose_copy_is_gone_does_not_pass() {
    let mut nodes = cluster();
    for state in ["new", "empty"] {
        nodes[0]["state"] = json!(state);
        nodes[0]["attached"] = json!(false);
        let expected = expected(&[]);
        let all = findings(&expected, &nodes);
        let copy = all.iter().find(|i| i.kind == "copy").expect("it is named");
        assert_eq!((copy.node.as_str(), &*copy.todo), ("a", TAKE));
    }
}

/// Nobody takes over by itself without a register, and nothing said who could.
#[test]
fn where_no_register_decides_the_operator_is_told_how_to_go_on() {
    let mut nodes = cluster();
    nodes[0] = json!({ "node": "a", "reachable": false, "error": "node a is away" });
    assert_eq!(todo(&nodes), START);
    for n in &mut nodes[1..] {
        n["register"] = Value::Null;
    }
    assert!(todo(&nodes).contains("`mojim promote --name b`"));
    // The silent node is not the primary.
    nodes[1]["view"]["primary"] = json!("d");
    assert_eq!(todo(&nodes), START);
    // A register decides, but not who takes the place of both.
    let mut nodes = cluster();
    for n in &mut nodes {
        n["register"]["mirror"] = json!({ "node": "b" });
    }
    let away = |name| json!({ "node": name, "reachable": false, "error": "is away" });
    nodes[0] = away("a");
    assert_eq!(todo(&nodes), START);
    nodes[1] = away("b");
    nodes[3]["last_lsn"] = json!(95);
    assert!(todo(&nodes).contains("`mojim promote --force --name d`"));
}

/// A primary went on alone, and died; its mirror came back. "Takes over in seconds if that stays so" was
/// said of that mirror for as long as the primary was away: the register has no mirror then.
#[test]
fn nobody_takes_over_from_a_primary_that_was_alone() {
    let mut nodes = cluster();
    nodes.truncate(3);
    nodes[0] = json!({ "node": "a", "reachable": false, "error": "node a is away" });
    let register = |mirror: Value| json!({ "version": 9, "epoch": 6, "primary": { "node": "a" }, "mirror": mirror });
    for n in &mut nodes[1..] {
        n["register"] = register(Value::Null);
    }
    nodes[2]["last_lsn"] = json!(80);
    let away = |nodes: &[Value]| {
        let all = findings(&expected(&voters(None)), nodes);
        all.into_iter().find(|i| i.kind == "unreachable").unwrap()
    };
    let a = away(&nodes);
    assert!(
        a.text.contains("since epoch 6: its copy is the newest"),
        "{a:?}"
    );
    assert!(a.text.contains("nobody takes over"), "{a:?}");
    assert!(
        a.todo.contains("`mojim node --name a` on node a again"),
        "{a:?}"
    );
    assert!(a.todo.contains("start the program there"), "{a:?}");
    let force = "lost for good, `mojim promote --force --name b`";
    assert!(a.todo.contains(force), "{a:?}");
    // One that is the mirror by the register, too, does.
    for n in &mut nodes[1..] {
        n["register"] = register(json!({ "node": "b" }));
    }
    let a = away(&nodes);
    assert!(a.text.contains("takes over in seconds"), "{a:?}");
    assert_eq!(a.todo, START);
}

/// A command without `keys` was advised to end the daemon of a node that has them, as one whose key may be
/// in other hands. One with keys, or with those of another authority, was advised to start the daemon,
/// which ran. Where that node is the primary, an operator was told how to go on without it.
#[test]
fn keys_that_do_not_fit_are_told_from_a_daemon_that_is_not_there() {
    use mojim_env::wire::unfit;
    let seen = |error: String, more: Value| {
        let mut nodes = cluster();
        nodes[0] = json!({ "node": "a", "reachable": false, "error": error });
        nodes[0]
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        for n in &mut nodes[1..] {
            n["register"] = Value::Null;
        }
        let i = findings(&expected(&[]), &nodes).remove(0);
        (i.kind, i.todo.into_owned())
    };
    let answered = json!({ "reachable": true, "beyond": true });
    let (kind, todo) = seen(
        format!("node a: 1.2.3.4 {}", unfit::SPEAKS_TLS),
        answered.clone(),
    );
    assert_eq!(kind, "beyond");
    assert!(
        todo.contains("use the file that the nodes have") && !todo.contains("end "),
        "{todo}"
    );
    let (kind, todo) = seen("node a: its answer is beyond sense".into(), answered);
    assert_eq!((kind, &*todo), ("beyond", BEYOND));
    let (kind, todo) = seen(format!("node a: it {}", unfit::SPEAKS_NO_TLS), json!({}));
    assert_eq!(kind, "unreachable");
    assert!(
        todo.contains("this command's configuration names `keys`"),
        "{todo}"
    );
    assert!(!todo.contains("promote"), "{todo}");
    for words in [unfit::CERTIFICATE, unfit::LINK, unfit::CERTIFICATE_OR_LINK] {
        let (_, todo) = seen(format!("node a: {words}"), json!({}));
        assert!(todo.contains("`mojim keys --renew a`"), "{todo}");
        assert!(!todo.contains("promote"), "{todo}");
    }
    let nobody = std::io::Error::from_raw_os_error(libc::ECONNREFUSED);
    let (_, todo) = seen(format!("node a: {nobody}"), json!({}));
    assert!(todo.starts_with("nobody listens at that address"), "{todo}");
    assert!(todo.contains("`mojim promote --name b`"), "{todo}");
}

/// Advice about a daemon did not name its node, and so could not be typed.
#[test]
fn commands_of_a_finding_name_the_node() {
    let finding = Finding::new("b", "unreachable", "node b is away".to_owned(), START);
    let said = finding.to_json("v")["do"].clone();
    let says = [
        "`mojim node --name b`",
        "`mojim replace --name b --with NEW --address IP:PORT`",
    ];
    for command in says {
        assert!(said.as_str().unwrap().contains(command), "{said}");
    }
}

/// The advice was to mend a disk and to make room, of a voter with another directory of votes. Then it was
/// to bring an earlier directory back, also of one whose directory was damaged or outdated.
#[test]
fn a_directory_of_votes_that_does_not_count_has_its_advice() {
    let todo = |why: &str| {
        let mut voters = voters(None);
        voters[2].down = Some(why.to_owned());
        let all = findings(&expected(&voters), &cluster());
        let i = all.into_iter().find(|i| i.kind == "voter").unwrap();
        assert_eq!(i.node, "w");
        let todo = i.todo.into_owned();
        assert!(!todo.contains("room") && !todo.contains("empty"), "{todo}");
        let never = "Never put a backup or a snapshot of a directory of votes back";
        assert!(todo.ends_with(never), "{todo}");
        todo
    };
    let top = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../mojim-views/src");
    let views = ["net.rs", "disk.rs"].map(|f| std::fs::read_to_string(top.join(f)).unwrap());
    let printed = |words: &'static str| {
        assert!(views.iter().any(|v| v.contains(words)), "{words}");
        todo(words)
    };
    let replace = "Only if it is lost for good, run `mojim replace --same-name w`";
    let says = printed("was admitted as a voter with another directory of votes");
    assert!(says.contains("bring that directory back, and start the daemon"));
    assert!(says.contains(replace), "{says}");
    let says = printed("was given up by `mojim replace --same-name`: another has its place");
    assert!(says.contains("elsewhere, keep it"), "{says}");
    for words in [
        "is of an earlier time: node {teller} heard it promise more",
        "Keep this voter stopped and its directory as it is",
    ] {
        let says = printed(words);
        let away = "move `.mojim/views` of its directory elsewhere, keep it, and start the daemon. Then run `mojim replace --same-name w`";
        assert!(says.contains(away), "{says}");
        assert!(!says.contains("bring that directory back"), "{says}");
    }
    let says = printed("a register was begun anew beside this one");
    let keeps = "remove nothing. Keep the directories of votes (`.mojim/views`) of all voters";
    assert!(says.starts_with(keeps), "{says}");
    assert!(says.contains("docs/how-to/status/voter.md"), "{says}");
}

/// The advice was to make room "on that file system".
#[test]
fn a_full_disk_is_named_with_the_room_that_it_lacks() {
    let mut nodes = cluster();
    let of_a = |nodes: &[Value]| {
        let all = findings(&expected(&voters(None)), nodes);
        all.into_iter().find(|i| i.kind == "room").unwrap()
    };
    nodes[0]["room"] = json!({ "free": 10 << 20, "needs": 64 << 20, "path": "/x" });
    let i = of_a(&nodes);
    let says = "make room on the file system of /x on node a: at least 54 MiB are lacking";
    assert_eq!(i.todo, says);
    nodes[0]["room"]["files"] = json!(3);
    nodes[0]["room"]["needs_files"] = json!(64);
    assert_eq!(
        of_a(&nodes).todo,
        format!("{says}, and 61 files have to go")
    );
    // A program that waits says not for how much.
    nodes[0]["room"] = json!({ "free": 65 << 20, "needs": 64 << 20, "path": "/x" });
    nodes[0]["waits_for_room"] = json!(true);
    let i = of_a(&nodes);
    let says = "node a: the disk of /x has no room, 65 MiB are free there";
    assert!(i.text.starts_with(says), "{i:?}");
    assert_eq!(i.todo, "make room on the file system of /x on node a");
    // A follower goes on by itself, and the advice says so.
    let mut nodes = cluster();
    nodes[1]["room"] = json!({ "free": 0, "needs": 64 << 20, "path": "/y" });
    nodes[1]["error"] = json!("no space left");
    nodes[1]["full"] = json!(true);
    let todo = of_a(&nodes).todo;
    let says =
        "make room on the file system of /y on node b: at least 64 MiB are lacking. It goes on";
    assert!(todo.starts_with(says), "{todo}");
}

/// `mojim repair` was advised on the primary, whose changed bytes all other copies then got. Then it was
/// `truncate` under a running program, which committed the zeros of pages that had been cut off.
#[test]
fn files_that_were_changed_on_the_primary_are_not_spread() {
    let todo = |nodes: &[Value]| {
        let all = findings(&expected(&voters(None)), nodes);
        let i = all.into_iter().find(|i| i.kind == "strangers").unwrap();
        assert!(!i.todo.contains("truncate"), "{i:?}");
        i.todo.into_owned()
    };
    let changed = json!({ "path": "/x", "changed": ["f"], "changed_count": 1 });
    let mut nodes = cluster();
    nodes[0]["strangers"] = changed.clone();
    let says = todo(&nodes);
    let steps = [
        "`mojim verify`",
        "Repair no other node now",
        "End the volume's program",
        "`mojim promote --name b --wait`",
        "`mojim repair --anew --name a`",
    ];
    let at = steps.map(|s| says.find(s).unwrap_or_else(|| panic!("{s}: {says}")));
    assert!(at.is_sorted(), "{says}");
    let mut nodes = cluster();
    nodes[1]["strangers"] = changed.clone();
    assert!(todo(&nodes).contains("`mojim repair --name b` takes the primary's bytes"));
    nodes[1]["strangers"] = json!({ "path": "/x", "unknown": ["f"], "unknown_count": 1 });
    assert!(todo(&nodes).contains("on node a, the primary: `mojim import --name a FILE`"));
    // Without another copy there is nothing to promote, or to repair from.
    nodes.truncate(1);
    nodes[0]["strangers"] = changed;
    let says = todo(&nodes);
    assert!(says.contains("Keep a copy of /x"), "{says}");
    assert!(says.contains("or from a backup"), "{says}");
    assert!(!says.contains("`mojim"), "{says}");
}

/// A mirror whose files were changed too, or which lacked something, was to be promoted.
#[test]
fn where_no_copy_is_known_to_be_right_changed_files_are_decided_by_hand() {
    let changed = json!({ "path": "/x", "changed": ["f"], "changed_count": 1 });
    let is_open = |at: usize, worsen: &dyn Fn(&mut [Value])| {
        let mut nodes = cluster();
        nodes[at]["strangers"] = changed.clone();
        worsen(&mut nodes);
        let all = findings(&expected(&voters(None)), &nodes);
        let of_files = all.into_iter().filter(|i| i.kind == "strangers");
        let all: Vec<Finding> = of_files.collect();
        assert!(!all.is_empty());
        for i in all {
            assert_eq!(i.todo, DECIDE_CHANGED);
        }
    };
    assert!(DECIDE_CHANGED.contains("Keep a copy of the volume's directory of each node"));
    assert!(DECIDE_CHANGED.contains(CHANGED_PAGE));
    is_open(0, &|nodes| nodes[1]["strangers"] = changed.clone());
    is_open(1, &|nodes| nodes[2]["strangers"] = changed.clone());
    is_open(0, &|nodes| nodes[1]["last_lsn"] = json!(80));
    is_open(0, &|nodes| nodes[1]["error"] = json!("damaged"));
    is_open(0, &|nodes| nodes[0]["view"]["mirror"] = json!(""));
    is_open(1, &|nodes| nodes[0]["error"] = json!("damaged"));
}

/// "Nothing, if this passes" was said of a copy that a program kept from following. Then it was not said
/// that what only this copy has is lost, nor that the primary's daemon has to be started.
#[test]
fn a_program_that_keeps_a_former_primary_from_following_is_to_end() {
    let mut nodes = cluster();
    let of_d = |nodes: &[Value]| {
        let all = findings(&expected(&voters(None)), nodes);
        let i = all.into_iter().find(|i| i.kind == "stale").unwrap();
        i.todo.into_owned()
    };
    nodes[3]["role"] = json!("primary");
    nodes[3]["epoch"] = json!(4);
    assert!(of_d(&nodes).starts_with("nothing, if this passes"));
    nodes[3]["attached"] = json!(true);
    nodes[3]["pid"] = json!(77);
    let says = "if you want what only this node has, copy its directory first. Then end the program on node d (process 77)";
    assert!(of_d(&nodes).starts_with(says), "{}", of_d(&nodes));
    let then = "After that: nothing, if this passes: the program on node a";
    assert!(of_d(&nodes).contains(then), "{}", of_d(&nodes));
    let mut away = nodes.clone();
    away[0] = json!({ "node": "a", "reachable": false, "error": "gone" });
    let then = "After that: start `mojim node --name a` on node a, the primary";
    assert!(of_d(&away).contains(then), "{}", of_d(&away));
    nodes[3]["copy_error"] = json!({ "text": "no space left", "seconds_ago": 3 });
    assert_eq!(of_d(&nodes), ROOM_TO_COPY);
}

/// Of two nodes with swapped addresses it was said that their keys differ, or that the
/// configurations do.
#[test]
fn another_node_at_an_address_is_told_from_other_keys() {
    use mojim_env::wire::unfit;
    for (reachable, error) in [
        (
            true,
            "node a at 1.2.3.4:5 says that it is node \"b\"".to_owned(),
        ),
        (
            false,
            format!(
                "node a: {}: node b answers where node a should",
                unfit::CERTIFICATE
            ),
        ),
    ] {
        let mut nodes = cluster();
        nodes[0] = json!({ "node": "a", "reachable": reachable, "error": error });
        let all = findings(&expected(&[]), &nodes);
        let i = all.iter().find(|i| i.node == "a").unwrap();
        assert!(i.todo.contains("two may be swapped"), "{i:?}");
        assert!(!i.todo.contains("promote"), "{i:?}");
    }
}

/// One of two primaries had an empty copy. The advice was to start the program on one of them, where it did
/// not start, and of the empty copy that nothing is to be done.
#[test]
fn where_a_primary_lost_its_copy_the_whole_one_is_named() {
    let mut nodes = cluster();
    nodes.truncate(2);
    nodes[0]["attached"] = json!(false);
    nodes[0]["state"] = json!("empty");
    nodes[1]["backups"] = Value::Null;
    let advice = "`mojim promote --name b --wait`: the copy of node b is whole";
    for role in ["primary", "backup"] {
        nodes[1]["role"] = json!(role);
        nodes[0]["role"] = json!(if role == "primary" { role } else { "mirror" });
        let all = findings(&expected(&voters(None)), &nodes);
        for kind in ["primaries", "copy"] {
            let i = all.iter().find(|i| i.kind == kind).unwrap();
            assert!(i.todo.contains(advice), "{role}: {i:?}");
        }
    }
    // Which of two whole copies counts is not known here.
    for n in &mut nodes {
        (n["role"], n["state"]) = (json!("primary"), json!("whole"));
    }
    let all = findings(&expected(&voters(None)), &nodes);
    let i = all.iter().find(|i| i.kind == "primaries").unwrap();
    assert!(i.todo.contains("your last `mojim promote`"), "{i:?}");
}

/// A mirror whose disk is full forwards nothing any more, and said that a backup
/// which has everything lags by as much as was ever sent.
#[test]
fn a_lag_is_known_by_who_forwards() {
    let mut nodes = cluster();
    nodes[1]["backups"][0] = json!({ "node": "c", "active": false, "acked": 0, "lag": 5000 });
    nodes[2]["link"] = json!({ "up": true });
    assert!(judge(&nodes).iter().all(|(_, kind)| kind != "backup-lag"));
    nodes[1]["backups"][0]["active"] = json!(true);
    assert_eq!(judge(&nodes), one("c", "backup-lag"));
}

/// "Nothing, if this passes" was said of what a daemon had refused.
#[test]
fn what_a_daemon_could_not_heal_is_not_said_to_pass() {
    let mut nodes = cluster();
    nodes[0]["attached"] = json!(false);
    nodes[1]["state"] = json!("empty");
    nodes[3]["last_lsn"] = json!(80);
    let daemon = "nothing, if this passes: the daemon of node a, the primary, brings";
    assert!(todo(&nodes).starts_with(daemon));
    // The error of a node that does not lead.
    nodes[2]["heal_error"] = json!("old");
    assert!(todo(&nodes).starts_with(daemon));
    nodes[0]["heal_error"] = json!("what a had was lost; `mojim promote --force`");
    assert!(todo(&nodes).contains("could not: what a had was lost; `mojim promote --force`"));
}

#[test]
fn a_primary_without_its_mirror_is_an_ill() {
    let mut nodes = cluster();
    nodes[0]["link"] = json!({ "up": false });
    assert_eq!(judge(&nodes), one("a", "link"));
    nodes[0]["view"]["mirror"] = json!("");
    assert_eq!(judge(&nodes), one("a", "alone"));
    // A mirror that lacks what is committed, and nobody sends.
    nodes = cluster();
    nodes[0]["attached"] = json!(false);
    nodes[0]["committed"] = json!(95);
    for n in &mut nodes[2..] {
        n["last_lsn"] = json!(95);
    }
    assert_eq!(judge(&nodes), one("b", "behind"));
    // A primary that lost what it had, and one that was not looked at yet.
    nodes = cluster();
    nodes[0]["attached"] = json!(false);
    nodes[0]["last_lsn"] = json!(80);
    assert_eq!(judge(&nodes), one("a", "behind"));
    nodes[0]["settling"] = json!(true);
    assert_eq!(judge(&nodes), []);
    // LSNs that were given out and never committed are no loss.
    nodes = cluster();
    nodes[0]["attached"] = json!(false);
    nodes[0]["last_lsn"] = json!(99);
    nodes[0]["committed"] = json!(90);
    assert_eq!(judge(&nodes), []);
}

#[test]
fn who_has_a_sync_point_and_how_safe() {
    let mut nodes = cluster();
    nodes[0]["persisted"] = json!(80);
    nodes[0]["applied"] = json!(70);
    nodes[0]["checkpoint"] = json!(60);
    nodes[1]["level"] = json!("persistent");
    nodes[1]["applied"] = json!(90);
    nodes[3]["last_lsn"] = json!(79);
    let levels = |lsn: u64, nodes: &[Value]| -> Vec<String> {
        let all = copies(lsn, nodes, |n| n == "a");
        let word = |c: &Value| match c["applied"] == true {
            true => format!("{}, applied", text(c, "level")),
            false => text(c, "level").to_owned(),
        };
        all.as_array().unwrap().iter().map(word).collect()
    };
    let all = ["received", "persistent, applied", "received", "none"];
    assert_eq!(levels(90, &nodes), all);
    let all = ["persistent", "persistent, applied", "received", "none"];
    assert_eq!(levels(80, &nodes), all);
    let all = [
        "persistent, applied",
        "persistent, applied",
        "received",
        "received",
    ];
    assert_eq!(levels(60, &nodes), all);
    assert_eq!(levels(91, &nodes), ["none"; 4]);
    // What an older view had under this number may be another sync point.
    nodes[2]["epoch"] = json!(4);
    nodes[3]["error"] = json!("damaged");
    assert_eq!(levels(60, &nodes)[2..], ["none", "none"]);
}

#[test]
fn an_old_primary_that_is_back_is_an_ill() {
    let mut nodes = cluster();
    nodes[1]["role"] = json!("primary");
    nodes[1]["epoch"] = json!(6);
    nodes[1]["view"] = json!({ "primary": "b", "mirror": "" });
    let found = judge(&nodes);
    let expected = [("a", "stale"), ("b", "alone")].map(|(n, k)| (n.into(), k.into()));
    assert_eq!(found, expected);
}

/// "What it commits has one copy" was said of a primary that a backup follows directly,
/// and not that this backup takes the mirror's place (a new user).
#[test]
fn who_follows_a_primary_without_a_mirror_is_named() {
    let mut nodes = cluster();
    nodes[0]["view"]["mirror"] = json!("");
    nodes[1] = json!({ "node": "b", "reachable": false, "error": "node b is away" });
    nodes[3]["link"]["up"] = json!(false);
    nodes[2]["link"] = json!({ "up": true, "primary": "a", "from": "a" });
    nodes[2]["last_lsn"] = json!(88);
    let all = findings(&expected(&voters(None)), &nodes);
    let alone = all.iter().find(|i| i.kind == "alone").unwrap();
    assert!(
        alone.text.contains("node c follows and has LSN 88 of 90"),
        "{alone:?}"
    );
    assert!(
        !alone.text.contains("one copy") && !alone.text.contains("node d"),
        "{alone:?}"
    );
    assert!(
        alone.todo.starts_with("mend the other finding of node b")
            && alone.todo.contains("takes the mirror's place"),
        "{alone:?}"
    );
    assert_eq!(
        backup_line(&nodes[2], &nodes).unwrap(),
        "backup c: follows node a, has LSN 88 of 90"
    );
    assert_eq!(
        backup_line(&nodes[3], &nodes).unwrap(),
        "backup d: follows nobody, has LSN 90 of 90"
    );
    // The backup follows the mirror that was given up.
    nodes[2]["link"]["from"] = json!("b");
    let said = texts(&nodes, &voters(None));
    let one = |t: &String| t.starts_with("node a is alone: its sync points have one copy");
    assert!(said.iter().any(one), "{said:?}");
}

/// A copy whose disk was full was "whole", "cannot be used", and to be started again, while
/// it heals by itself; one cause had four findings with three cures (a new user).
#[test]
fn a_full_copy_is_one_ill_and_the_others_point_to_it() {
    let mut nodes = cluster();
    nodes[1]["room"]["free"] = json!(0);
    nodes[1]["error"] = json!("no space left");
    nodes[1]["full"] = json!(true);
    nodes[0]["link"]["up"] = json!(false);
    nodes[2]["link"]["up"] = json!(false);
    nodes[1]["backups"] = Value::Null;
    nodes[3]["link"]["up"] = json!(true);
    let all = findings(&expected(&voters(None)), &nodes);
    let kinds: Vec<_> = all.iter().map(|i| (&*i.node, i.kind)).collect();
    assert_eq!(kinds, [("b", "room"), ("a", "link"), ("c", "backup-away")]);
    assert!(
        all[0].text.contains("no space left") && all[0].todo.ends_with("by itself within seconds"),
        "{all:?}"
    );
    for i in &all[1..] {
        assert!(
            i.todo.starts_with("mend the other finding of node b"),
            "{i:?}"
        );
    }
    // The cause is not room.
    nodes[1]["full"] = Value::Null;
    let all = findings(&expected(&voters(None)), &nodes);
    assert!(
        all[0].kind == "copy" && all[0].todo.starts_with(DISK),
        "{all:?}"
    );
    assert!(all[0].todo.contains("repair --anew --name b"), "{all:?}");
}

/// Two nodes were called `mirror`, one of them by a view that is long over (a new user).
#[test]
fn a_role_of_an_older_view_is_said_to_be_over() {
    let mut nodes = cluster();
    nodes[1]["epoch"] = json!(4);
    let roles = |nodes: &[Value]| -> Vec<String> {
        nodes.iter().map(|n| role(n, nodes).to_owned()).collect()
    };
    assert_eq!(roles(&nodes), ["primary", "was mirror", "backup", "backup"]);
    nodes[0]["epoch"] = json!(4);
    assert_eq!(roles(&nodes)[..2], ["was primary", "was mirror"]);
    // Nobody has attached: they are what the configuration says, and follow nobody yet.
    for n in &mut nodes {
        *n = json!({ "node": n["node"], "role": n["role"], "reachable": true, "state": "new" });
    }
    assert_eq!(roles(&nodes)[..2], ["primary", "mirror"]);
    assert!(nodes.iter().all(|n| backup_line(n, &nodes).is_none()));
}

/// `a` was getting a whole copy from `b`, which led alone by the register and then died. Status said
/// "node a is the primary", and nothing but that `b` does not answer.
#[test]
fn the_register_ends_the_role_of_a_primary_that_knows_no_later_view() {
    let mut nodes = cluster();
    nodes.truncate(2);
    nodes[0]["attached"] = json!(false);
    nodes[0]["register"] = json!({ "version": 9, "epoch": 8, "primary": { "node": "b" } });
    nodes[1] = json!({ "node": "b", "reachable": false, "error": "node b is away" });
    let found = judge(&nodes);
    let expected = [("b", "unreachable"), ("a", "stale")].map(|(n, k)| (n.into(), k.into()));
    assert_eq!(found, expected);
    assert_eq!(role(&nodes[0], &nodes), "was primary");
    assert_eq!(unused_line(&nodes), None);
    let all = findings(&super::tests::expected(&[]), &nodes);
    let stale = all.iter().find(|i| i.kind == "stale").unwrap();
    let since = "the register names node b the primary since epoch 8";
    assert!(stale.text.contains(since), "{stale:?}");
    assert!(
        stale.todo.contains("`mojim node --name b` on node b"),
        "{stale:?}"
    );
    // "Its own copy" was the lost node's, by the words.
    let or = "If that node is lost for good, `mojim promote --force --name a` goes on with the copy of node a";
    assert!(stale.todo.ends_with(or), "{stale:?}");
    // An attach is in the register before the copies know its epoch.
    nodes[0]["register"]["primary"]["node"] = json!("a");
    assert_eq!(role(&nodes[0], &nodes), "primary");
    assert!(unused_line(&nodes).is_some());
}

/// Nothing said what becomes of the program (a new user).
#[test]
fn what_becomes_of_the_program_is_said() {
    let mut nodes = cluster();
    nodes[0] = json!({ "node": "a", "reachable": false, "error": "node a is away" });
    nodes[1]["link"] = json!({ "up": true, "primary": "a", "from": "a", "heard_ms": 7 });
    // The backup hears of the program through the mirror, also when the program is long
    // gone.
    nodes[2]["link"] = json!({ "up": true, "primary": "a", "from": "b", "heard_ms": 1 });
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(said.contains("node b heard its program 7 ms ago"), "{said}");
    nodes[1]["link"]["up"] = json!(false);
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(
        said.contains("hears no program there, and takes over"),
        "{said}"
    );
    assert!(!said.contains("heard"), "{said}");
    let mut away = voters(Some("refused"));
    away[0].answers = false;
    let said = texts(&nodes, &away).remove(0);
    assert!(
        said.contains("hears no program there, and cannot take over"),
        "{said}"
    );
    // The mirror is away, and the backup heard its daemon, which forwards.
    let mut nodes = cluster();
    nodes[1] = json!({ "node": "b", "reachable": false, "error": "node b is away" });
    nodes[2]["link"] = json!({ "up": true, "primary": "a", "from": "b", "heard_ms": 1 });
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(!said.contains("heard its program"), "{said}");
    assert!(!said.contains("hears no program"), "{said}");
    let mut nodes = cluster();
    nodes[0]["link"]["up"] = json!(false);
    let link = |nodes: &[Value], voters: &[Voter]| {
        let all = findings(&expected(voters), nodes);
        all.into_iter().find(|i| i.kind == "link").unwrap().text
    };
    assert!(link(&nodes, &voters(None)).ends_with("wait until it goes on alone, in seconds"));
    assert!(link(&nodes, &[]).ends_with("wait, and fail if it stays so"));
    nodes[0]["register"] = json!({ "error": "no majority" });
    assert!(link(&nodes, &voters(None)).contains("too few voters to go on alone"));
}

/// Low room, which has caused nothing yet, was taken for the cause of a cut link.
#[test]
fn low_room_is_no_cause() {
    let mut nodes = cluster();
    nodes[0]["link"]["up"] = json!(false);
    nodes[1]["room"]["free"] = json!(0);
    let all = findings(&expected(&voters(None)), &nodes);
    assert!(all.iter().any(|i| i.kind == "room"));
    let link = all.iter().find(|i| i.kind == "link").unwrap();
    assert!(link.todo.starts_with("look at the network"), "{link:?}");
    // Its quota is full, or a file system other than that of its data.
    nodes[1]["room"]["free"] = json!(1 << 30);
    nodes[1]["error"] = json!("quota exceeded");
    nodes[1]["full"] = json!(true);
    let all = findings(&expected(&voters(None)), &nodes);
    assert_eq!((all[0].kind, &*all[0].todo), ("copy", ROOM));
    let by_hand = findings(&expected(&[]), &nodes);
    assert_eq!((by_hand[0].kind, &*by_hand[0].todo), ("copy", ROOM_BY_HAND));
}

/// LSNs that an old primary had given out, and that were never committed, were counted as
/// committed.
#[test]
fn an_older_view_counts_for_nothing() {
    let mut nodes = cluster();
    nodes[3]["epoch"] = json!(4);
    nodes[3]["last_lsn"] = json!(95);
    assert_eq!(most(&nodes), 90);
    let line = backup_line(&nodes[3], &nodes).unwrap();
    assert!(line.ends_with("has LSN 95 of an older view"), "{line}");
}

/// A voter that answers as one of another cluster was counted as one that votes.
#[test]
fn who_refuses_does_not_vote() {
    let mut nodes = cluster();
    for n in &mut nodes {
        n["register"] = json!({ "error": "no majority" });
    }
    let mut all = voters(Some("this is cluster x"));
    all[2].refuses = true;
    all[1].answers = false;
    let found = findings(&expected(&all), &nodes);
    assert_eq!(&*found[0].todo, REFUSED);
    assert!(
        found[1].text.starts_with("1 of 3 voters answer"),
        "{found:?}"
    );
}

/// A program that was stopped (SIGSTOP) kept its link up, by its own word (a new user).
#[test]
fn a_program_that_its_mirror_does_not_hear_is_an_ill() {
    let mut nodes = cluster();
    nodes[0]["pid"] = json!(7);
    nodes[1]["link"]["up"] = json!(false);
    assert_eq!(judge(&nodes), one("a", "link"));
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(
        said.contains("node b, the mirror, hears nothing") && said.contains("process 7"),
        "{said}"
    );
    nodes[0]["attached"] = json!(false);
    assert_eq!(judge(&nodes), []);
}

/// Room was made, as advised, and not enough of it for a copy: why was in a log only (a new
/// user).
#[test]
fn a_copy_that_finds_no_room_is_said_to() {
    let mut nodes = cluster();
    nodes[2]["link"]["up"] = json!(false);
    nodes[1]["backups"][0]["active"] = json!(false);
    nodes[2]["last_lsn"] = json!(80);
    nodes[2]["copy_error"] = json!({ "text": "no space left", "seconds_ago": 4 });
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(
        said.ends_with("data for it that came 4 s ago found no room: no space left"),
        "{said}"
    );
}

/// A former mirror does not know which node is the mirror now, and two were shown (a new
/// user).
#[test]
fn the_primary_says_who_is_the_mirror() {
    let mut nodes = cluster();
    nodes[2]["role"] = json!("mirror");
    nodes[2]["view"] = json!({ "primary": "a", "mirror": "" });
    let roles: Vec<&str> = nodes.iter().map(|n| role(n, &nodes)).collect();
    assert_eq!(roles, ["primary", "mirror", "backup", "backup"]);
    assert!(backup_line(&nodes[2], &nodes).is_some());
    assert_eq!(unused_line(&nodes), None);
    nodes[0]["attached"] = json!(false);
    for n in &mut nodes {
        n["link"]["up"] = json!(false);
    }
    let line = unused_line(&nodes).unwrap();
    assert_eq!(line, "no program is attached; node a is the primary");
}

/// "Nothing, if this passes" was said of what a killed program had begun, which the daemon
/// leaves to the next one; and that a primary goes on alone in seconds, while a voter that was
/// needed was full (a new user).
#[test]
fn what_waits_for_a_program_or_for_voters_is_said_to() {
    let mut nodes = cluster();
    nodes[0]["attached"] = json!(false);
    nodes[0]["committed"] = json!(95);
    for (checkpoint, says) in [
        (90, "start the program on node a: an earlier program began"),
        (91, "nothing, if this passes: the daemon of node a"),
    ] {
        nodes[0]["checkpoint"] = json!(checkpoint);
        let all = findings(&expected(&voters(None)), &nodes);
        let behind = all.iter().find(|i| i.kind == "behind").unwrap();
        assert!(behind.todo.starts_with(says), "{behind:?}");
    }
    let mut nodes = cluster();
    nodes[0]["link"]["up"] = json!(false);
    let mut full = voters(None);
    full[2].error = Some("0 KiB are free".into());
    let said = texts(&nodes, &full);
    let link = said.iter().find(|t| t.starts_with("the link of node a"));
    assert!(link.unwrap().ends_with("if enough voters agree"));
}

/// A former primary was said to have been primary until the epoch of another's view (a new
/// user).
#[test]
fn a_former_primary_was_that_in_its_own_epoch() {
    let mut nodes = cluster();
    nodes[0]["role"] = json!("backup");
    nodes[0]["epoch"] = json!(20);
    nodes[1]["role"] = json!("primary");
    nodes[1]["epoch"] = json!(13);
    nodes[2]["role"] = json!("primary");
    nodes[2]["epoch"] = json!(20);
    let said = texts(&nodes, &voters(None));
    let b = said.iter().find(|t| t.starts_with("node b was primary"));
    assert!(
        b.unwrap()
            .starts_with("node b was primary, in epoch 13; the volume is in epoch 20 now"),
        "{said:?}"
    );
}

/// Voters that answered, and said in their own lines that they do not vote, were counted
/// (a new user).
#[test]
fn who_answers_and_does_not_vote_is_no_vote() {
    let mut nodes = cluster();
    let mut all = voters(None);
    all[0].down = Some("no space left".into());
    nodes[0]["register"] = json!({ "error": "no space left" });
    assert_eq!(judge_with(&nodes, &all), one("a", "voter"));
    let said = texts(&nodes, &all).remove(0);
    assert_eq!(said, "node a does not vote on views: no space left");
    // The lack of room is named already.
    nodes[0]["room"]["free"] = json!(0);
    assert_eq!(judge_with(&nodes, &all), one("a", "room"));
    let said = texts(&nodes, &all).remove(0);
    assert!(
        said.ends_with("; it does not vote on views meanwhile: no space left"),
        "{said}"
    );
    for n in &mut nodes {
        n["register"] = json!({ "error": "no majority" });
    }
    let said = texts(&nodes, &all).remove(1);
    assert!(
        said.starts_with("2 of 3 voters vote (a answers, and does not), and the register")
            && !said.contains("choose"),
        "{said}"
    );
    all[2].down = Some("no space left".into());
    let found = findings(&expected(&all), &nodes);
    let quorum = found.iter().find(|i| i.kind == "quorum").unwrap();
    assert!(
        quorum
            .text
            .starts_with("1 of 3 voters vote (a, w answers, and does not), and 2 are needed")
            && quorum.todo == format!("{VOTERS}{BEFORE}"),
        "{quorum:?}"
    );
}

/// A backup was said to come back with a node, and waited for a program (a new user).
#[test]
fn a_backup_that_waits_for_a_program_is_said_to() {
    let mut nodes = cluster();
    nodes[0]["attached"] = json!(false);
    nodes[0]["error"] = json!("damaged");
    nodes[0]["view"]["mirror"] = json!("");
    nodes[2]["link"] = json!({ "up": false });
    nodes[2]["last_lsn"] = json!(80);
    nodes[1]["backups"] = Value::Null;
    let away = |nodes: &[Value]| {
        let all = findings(&expected(&voters(None)), nodes);
        all.into_iter()
            .find(|i| i.node == "c" && i.kind == "backup-away")
            .unwrap()
            .todo
    };
    let says =
        "start the program on node a: a backup gets missing data while a program is attached";
    let todo = away(&nodes);
    assert!(
        todo.starts_with("mend the other finding of node a: this one passes with it")
            && todo.ends_with(says),
        "{todo}"
    );
    nodes[0]["error"] = Value::Null;
    assert!(away(&nodes).ends_with(says), "{}", away(&nodes));
}

/// "The daemon of the primary brings the other copies up to date" was said beside a program,
/// which does it (a new user).
#[test]
fn beside_a_program_it_is_the_program_that_brings_copies_up_to_date() {
    let mut nodes = cluster();
    for (i, state) in [(1, "empty"), (2, "new")] {
        nodes[i]["state"] = json!(state);
        let says = "nothing, if this passes: the program on node a, and the mirror, bring";
        assert!(todo(&nodes).starts_with(says), "{}", todo(&nodes));
        nodes[i]["state"] = json!("whole");
    }
    // Without one, the daemon looks after the mirror alone.
    nodes[0]["attached"] = json!(false);
    nodes[2]["state"] = json!("empty");
    assert!(
        todo(&nodes).contains("start the program on node a"),
        "{}",
        todo(&nodes)
    );
}

/// Another node was to take the place of one of two (a new user).
#[test]
fn nobody_takes_a_place_where_there_is_no_other() {
    let mut nodes = cluster();
    nodes[0]["link"]["up"] = json!(false);
    nodes[1] = json!({ "node": "b", "reachable": false, "error": "node b is away" });
    let todo = |nodes: &[Value], voters: &[Voter]| {
        let all = findings(&expected(voters), nodes);
        let link = all.into_iter().find(|i| i.kind == "link").unwrap();
        link.todo.into_owned()
    };
    let another = "mend the other finding of node b: this one passes with it, or when another takes its place";
    let alone = "mend the other finding of node b: this one passes with it";
    assert_eq!(todo(&nodes, &voters(None)), another);
    // An operator decides.
    assert_eq!(todo(&nodes, &[]), alone);
    let mut unused = nodes.clone();
    unused[0]["attached"] = json!(false);
    unused[0]["view"]["mirror"] = json!("");
    let all = findings(&expected(&voters(None)), &unused);
    let finding = all.iter().find(|i| i.kind == "alone").unwrap();
    let until = ", or, at the latest while a program is attached, when another takes its place";
    assert!(finding.todo.contains(until), "{finding:?}");
    nodes.truncate(2);
    assert_eq!(todo(&nodes, &voters(None)), alone);
}

/// A mirror that was stopped left the link up, and nothing said that the program waits (a
/// new user).
#[test]
fn a_program_waits_for_a_mirror_that_does_not_answer() {
    let mut nodes = cluster();
    nodes[1] = json!({ "node": "b", "reachable": false, "error": "node b is away" });
    let said = texts(&nodes, &voters(None)).remove(0);
    assert!(
        said.starts_with(
            "node b is away; it is the mirror of node a: unless that node hears it, sync points of its program wait until it goes on alone, in seconds"
        ),
        "{said}"
    );
    // The finding of the link says so.
    nodes[0]["link"]["up"] = json!(false);
    let said = texts(&nodes, &voters(None)).remove(0);
    assert_eq!(said, "node b is away; it has a vote");
}

/// A backup that took nothing had no line, and held the program back unsaid (a new user).
#[test]
fn a_backup_that_takes_nothing_is_named_and_so_is_who_waits_for_it() {
    let mut nodes = cluster();
    nodes[2]["error"] = json!("no space left");
    assert_eq!(
        backup_line(&nodes[2], &nodes).unwrap(),
        "backup c: takes nothing, its copy cannot be used"
    );
    nodes[1]["backups"][0] = json!({ "node": "c", "active": false, "counts": true, "lag": 1001 });
    let kinds = |nodes: &[Value]| judge(nodes).into_iter().map(|(_, kind)| kind);
    assert!(kinds(&nodes).eq(["copy", "backup-lag"]));
    let said = texts(&nodes, &voters(None)).remove(1);
    assert!(said.contains("sync points wait until it goes on"), "{said}");
    // It is lost by now.
    nodes[1]["backups"][0]["counts"] = json!(false);
    assert!(kinds(&nodes).eq(["copy"]));
}

/// Where the primary's disk is full no program can attach, and nothing said what is left (a
/// new user).
#[test]
fn an_unused_primary_without_room_may_be_left() {
    let mut nodes = cluster();
    nodes[0]["room"]["free"] = json!(0);
    let says = ". Or run `mojim promote --name b`, and start the program on node b";
    let room = |nodes: &[Value]| findings(&expected(&voters(None)), nodes).remove(0);
    assert!(!room(&nodes).todo.ends_with(says));
    nodes[0]["attached"] = json!(false);
    assert!(
        room(&nodes).todo.ends_with(says) && room(&nodes).text.contains("no other node takes over"),
        "{:?}",
        room(&nodes)
    );
    nodes[0]["error"] = json!("no space left");
    nodes[0]["room"] = Value::Null;
    assert!(room(&nodes).todo.ends_with(says), "{:?}", room(&nodes));
    // The mirror cannot go on.
    nodes[1]["error"] = json!("no space left");
    assert!(!room(&nodes).todo.ends_with(says));
}

/// While a program attached, the link to the mirror was called down, with a network to be
/// looked at: one look in twenty at a cluster in which nothing was amiss.
#[test]
fn a_program_that_attaches_misses_nothing_yet() {
    let mut nodes = cluster();
    nodes[0]["link"]["up"] = json!(false);
    for n in &mut nodes[2..] {
        n["link"]["up"] = json!(false);
    }
    for row in nodes[1]["backups"].as_array_mut().unwrap() {
        row["active"] = json!(false);
    }
    assert!(texts(&nodes, &voters(None)).len() >= 3);
    nodes[0]["attaching"] = json!(true);
    assert_eq!(texts(&nodes, &voters(None)), [] as [String; 0]);
}

/// Whenever a program attached, for some milliseconds, a backup followed nobody, and the volume
/// was not well (a new user). One that lacks something is looked at once.
#[test]
fn a_backup_that_lacks_nothing_may_follow_nobody_for_a_moment() {
    let mut nodes = cluster();
    nodes[2]["link"]["up"] = json!(false);
    nodes[1]["backups"][0]["active"] = json!(false);
    let passes = |nodes: &[Value]| {
        let all = findings(&expected(&voters(None)), nodes);
        assert_eq!(all.len(), 1, "{all:?}");
        all[0].passes()
    };
    assert!(passes(&nodes));
    nodes[2]["last_lsn"] = json!(80);
    assert!(!passes(&nodes));
}

/// The primary was down and its mirror had come back empty: it was advised to wait for the
/// primary, which did not come, and not said that nobody takes over (a new user).
#[test]
fn an_empty_mirror_of_a_lost_primary_takes_nothing_over() {
    let mut nodes = cluster();
    nodes[0] = json!({ "node": "a", "reachable": false, "error": "node a does not answer" });
    let view = json!({ "version": 3, "primary": { "node": "a" }, "mirror": { "node": "b" } });
    for n in &mut nodes[1..] {
        n["register"] = view.clone();
        n["link"]["up"] = json!(false);
    }
    for key in ["epoch", "last_lsn", "view"] {
        nodes[1][key] = Value::Null;
    }
    nodes[1]["state"] = json!("empty");
    nodes[3]["last_lsn"] = json!(80);
    let all = findings(&expected(&voters(None)), &nodes);
    let of = |node: &str, kind: &str| {
        let mut found = all.iter().filter(|i| i.node == node && i.kind == kind);
        found.next().unwrap_or_else(|| panic!("{all:?}"))
    };
    let a = &of("a", "unreachable").text;
    assert!(
        a.contains("node b, its mirror, has no whole copy, and nobody takes over"),
        "{a}"
    );
    let b = &of("b", "copy").todo;
    assert!(
        b.starts_with("start `mojim node --name a` on node a, the primary."),
        "{b}"
    );
    assert!(b.contains("promote --force --name c"), "{b}");
}

/// While nobody could take a place, and no program could attach, the advice was to wait for
/// the one and to do the other (a new user).
#[test]
fn without_a_majority_nothing_is_advised_that_needs_one() {
    let mut nodes = cluster();
    for n in &mut nodes {
        n["register"] = json!({ "error": "no majority" });
    }
    nodes[0]["link"]["up"] = json!(false);
    nodes[1] = json!({ "node": "b", "reachable": false, "error": "node b is away" });
    nodes[2]["link"]["up"] = json!(false);
    nodes[2]["last_lsn"] = json!(80);
    let mut away = voters(Some("refused"));
    away[1].answers = false;
    let of = |nodes: &[Value], kind: &str| {
        let all = findings(&expected(&away), nodes);
        all.into_iter().find(|i| i.kind == kind).unwrap()
    };
    let quorum = of(&nodes, "quorum").text;
    assert!(quorum.ends_with("and no program can attach"), "{quorum}");
    let waits =
        "this one passes with it, or, once enough voters vote, when another takes its place";
    for kind in ["link", "backup-away"] {
        let finding = of(&nodes, kind);
        assert!(finding.todo.contains(waits), "{finding:?}");
    }
    nodes[0]["attached"] = json!(false);
    let todo = of(&nodes, "backup-away").todo;
    assert!(todo.contains("start the program on node a"), "{todo}");
    assert!(of(&nodes, "quorum").todo.ends_with(BEFORE));
    // With enough voters it needs no such words.
    let all = findings(&expected(&voters(None)), &nodes);
    assert!(all.iter().all(|i| !i.todo.ends_with(BEFORE)), "{all:?}");
}

/// A backup was said to have the last LSN, while the table beside it showed a greater one
/// (a new user).
#[test]
fn how_much_a_backup_has_is_said_by_the_last_lsn_of_all() {
    let mut nodes = cluster();
    nodes[0]["committed"] = json!(90);
    nodes[0]["last_lsn"] = json!(91);
    assert_eq!(
        backup_line(&nodes[2], &nodes).unwrap(),
        "backup c: follows, has LSN 90 of 91"
    );
    assert!(is_level(&nodes[2], &nodes));
}

/// Where one of three voters answered, it was said that nobody takes over; where none did, it
/// was not (a new user).
#[test]
fn where_no_voter_answers_that_is_said_too() {
    let away = |n: &str| json!({ "node": n, "reachable": false, "error": "is away" });
    let nodes = ["a", "b", "c"].map(away);
    let mut none = voters(Some("is away"));
    none.iter_mut().for_each(|v| v.answers = false);
    let quorum = |voters: &[Voter]| {
        let all = findings(&expected(voters), &nodes);
        all.into_iter().find(|i| i.kind == "quorum")
    };
    let said = quorum(&none).unwrap().text;
    assert!(
        said.starts_with("0 of 3 voters answer, and 2 are needed: if they"),
        "{said}"
    );
    // They refuse this command, and may vote.
    none[0].refuses = true;
    assert_eq!(quorum(&none), None);
    assert_eq!(quorum(&[]), None);
}

/// "Start the voters that do not answer" was all the advice, and one that answers needed
/// room; it "has a vote", which it could not give (a new user).
#[test]
fn voters_that_are_down_and_voters_that_do_not_vote_are_both_named() {
    let mut nodes = cluster();
    for n in &mut nodes {
        n["register"] = json!({ "error": "no majority" });
    }
    let mut all = voters(Some("node w: 0 KiB are free"));
    all[2].answers = true;
    let said = texts(&nodes, &all).remove(0);
    assert!(
        said.ends_with("cannot give it where it finds no room"),
        "{said}"
    );
    all[1].answers = false;
    all[2].down = Some("no space left".into());
    let found = findings(&expected(&all), &nodes);
    let todo = &found.iter().find(|i| i.kind == "quorum").unwrap().todo;
    assert!(
        todo.starts_with("start the voters") && todo.contains("answer and do not vote: mend"),
        "{todo}"
    );
}

/// "It" was the mirror by the words, and the other node by what was meant (a new user).
#[test]
fn who_lacks_something_is_named() {
    let mut nodes = cluster();
    nodes.push(row("e", "mirror"));
    nodes[4]["link"] = json!({ "up": false });
    nodes[4]["last_lsn"] = json!(80);
    let said = texts(&nodes, &voters(None)).remove(0);
    assert_eq!(
        said,
        "node b is the mirror, and node e follows nobody: node e has LSN 80 of 90"
    );
}

/// Texts were changed, and their pages went on to quote the old ones: who searched for what was
/// printed found no page.
#[test]
fn a_page_opens_with_words_that_are_printed() {
    let top = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &std::path::Path| std::fs::read_to_string(path).expect("a file of this tree");
    let in_one_line = |t: &str| t.split_whitespace().collect::<Vec<_>>().join(" ");
    let sources = [
        "cli/src/health.rs",
        "cli/src/heard.rs",
        "cli/src/status.rs",
        "cli/src/guard.rs",
        "node/src/requests.rs",
        "env/src/wire.rs",
    ];
    let sources = sources.map(|f| read(&top.join(format!("crates/mojim-{f}"))));
    let printed = in_one_line(&sources.concat().replace("\\\n", " ").replace("{}", ""));
    // What the examples, and the system, put into the texts, beside names, numbers and paths. "it"
    // and "claims" are where one text holds another.
    let given = [
        "empty",
        "sync-sec",
        "sync",
        "test",
        "shop",
        "notes.txt",
        "it",
        "claims",
    ];
    let of_system = [
        "no space left on device",
        "Connection refused (os error 111)",
    ];
    let is_given = |w: &&str| {
        w.len() == 1 || given.contains(w) || w.contains(|c: char| c.is_ascii_digit() || c == '/')
    };
    let (mut pages, mut stale) = (0, Vec::new());
    for entry in std::fs::read_dir(top.join("docs/how-to/status")).unwrap() {
        let path = entry.unwrap().path();
        let page = read(&path);
        let block = page.split("```").nth(1);
        let Some(head) = block.and_then(|b| b.strip_prefix("text\n! ")) else {
            continue; // The list of pages, and those of events.
        };
        pages += 1;
        let head = of_system
            .iter()
            .fold(in_one_line(head), |h, s| h.replace(s, ""));
        for part in head.split([':', ';', ',', '(', ')', '"']) {
            let words: Vec<&str> = part.split_whitespace().collect();
            let runs = words.split(is_given).map(|run| run.join(" "));
            stale.extend(
                runs.filter(|r| !printed.contains(r))
                    .map(|r| (path.clone(), r)),
            );
        }
    }
    assert!(pages > 10, "{pages}");
    assert!(stale.is_empty(), "{stale:?}");
}
