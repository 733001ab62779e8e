//! Each mistake gives its key and its line, and no text makes the parser panic.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml_edit::Document;

use crate::syntax::guard;
use crate::*;

const EXAMPLE: &str = r#"cluster = "example"

[volume.orders]
mode = "sync"            # unreplicated | async | sync | sync-flush
primary = "a"
mirror = "b"
connections = 2
checkpoint_threshold = 1
msync_rounding = "exact" # exact | page
resend_timeout = "2s"
resend_attempts = 5

[node.a]
address = "127.0.0.1:7401"
directory = "/var/lib/mojim/a"
log = { medium = "disk", size = "64MiB" }

[node.b]
address = "127.0.0.1:7402"
directory = "/var/lib/mojim/b"
log = { medium = "dram", path = "/dev/shm/mojim-b", size = "64MiB" }
"#;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("mojim.toml"))
}

/// The mistakes of `text`, as (line, key).
fn mistakes(text: &str) -> Vec<(usize, String)> {
    let error = parse(text).expect_err(text);
    error
        .mistakes
        .into_iter()
        .map(|m| (m.line, m.key))
        .collect()
}

/// The example with the first `from` replaced must have one mistake, at this line and key,
/// whose message contains `says`.
#[track_caller]
fn wrong(from: &str, to: &str, line: usize, key: &str, says: &str) {
    assert!(EXAMPLE.contains(from), "{from}");
    let error = parse(&EXAMPLE.replacen(from, to, 1)).expect_err(to);
    assert_eq!(error.mistakes.len(), 1, "{error}");
    let mistake = &error.mistakes[0];
    assert_eq!((mistake.line, mistake.key.as_str()), (line, key), "{error}");
    assert!(mistake.message.contains(says), "{error}");
}

#[test]
fn the_example_reads_exactly() {
    let config = parse(EXAMPLE).unwrap();
    let volume = Volume {
        name: "orders".into(),
        mode: Mode::Sync,
        primary: "a".into(),
        mirror: Some("b".into()),
        backups: Vec::new(),
        secondary_threshold: 16 << 20,
        failover: Failover::Manual,
        fallback: Fallback::Manual,
        connections: 2,
        checkpoint_threshold: 1,
        write_back: WriteBack::Auto,
        write_back_pages: 128,
        rounding: Rounding::Exact,
        resend_timeout: Duration::from_secs(2),
        resend_attempts: 5,
        copy_streams: None,
        transport: Transport::Tcp,
        encrypt: false,
        spin: Duration::from_micros(30),
        tracker: TrackerKind::Auto,
        working: Working::Auto,
        memory: None,
        max_uncommitted: None,
    };
    let node = |name: &str, port, medium, path: Option<&str>, medium_line| Node {
        name: name.into(),
        address: SocketAddr::from(([127, 0, 0, 1], port)),
        directory: Path::new("/var/lib/mojim").join(name),
        role: Role::Data,
        rack: None,
        vote: true,
        ring: "/dev/shm".into(),
        log: LogConfig {
            medium,
            emulate: None,
            path: path.map(PathBuf::from),
            size: 64 << 20,
        },
        replaces: Vec::new(),
        medium_line,
    };
    let a = node("a", 7401, MediumKind::Disk, None, 16);
    let b = node("b", 7402, MediumKind::Dram, Some("/dev/shm/mojim-b"), 21);
    assert_eq!(config.peer_of(&volume, "a"), Some(&b));
    assert_eq!(config.peer_of(&volume, "b"), Some(&a));
    assert_eq!(config.peer_of(&volume, "c"), None);
    assert_eq!(config.volume(None), Ok(&volume));
    assert_eq!(config.volume(Some("orders")), Ok(&volume));
    assert_eq!(config.node("b"), Ok(&b));
    assert_eq!(config.check_media("a"), Ok(()));
    assert_eq!(a.log.share(3), (64 << 20) / 3 / LOG_UNIT * LOG_UNIT);
    let missing = config.volume(Some("order")).unwrap_err().to_string();
    assert_eq!(
        missing,
        "mojim.toml: key `volume.order`: there is no such volume; the file has orders"
    );
    let missing = config.node("c").unwrap_err().to_string();
    assert_eq!(
        missing,
        "mojim.toml: key `node.c`: there is no such node; the file has a, b"
    );
    let expected = Config {
        cluster: "example".into(),
        keys: None,
        insecure_network: false,
        heartbeat: Duration::from_millis(100),
        failure_limit: Duration::from_secs(3),
        volumes: BTreeMap::from([("orders".into(), volume)]),
        nodes: BTreeMap::from([("a".into(), a), ("b".into(), b)]),
        path: "mojim.toml".into(),
    };
    assert_eq!(config, expected);
}

#[test]
fn defaults_and_optional_keys() {
    let text = "cluster = \"c\"\n[volume.v]\nprimary = \"a\"\n\
                [node.a]\naddress = \"[::1]:1\"\ndirectory = \"/a//x/./\"\n";
    let config = parse(text).unwrap();
    let volume = config.volume(None).unwrap();
    assert_eq!(
        (volume.mode, volume.connections, volume.resend_attempts),
        (Mode::Unreplicated, 1, 5)
    );
    let node = config.node("a").unwrap();
    assert_eq!(
        (node.log.medium, node.log.size, &node.log.path),
        (MediumKind::Disk, crate::DEFAULT_LOG, &None)
    );
    assert_eq!(node.directory.to_str(), Some("/a/x"));

    let keys = "transport = \"shm\"\nspin = \"2s\"\ntracker = \"uffd\"\n";
    let text = EXAMPLE
        .replace("mode = \"sync\" ", keys)
        .replace("\"64MiB\"", "131072");
    let config = parse(&text.replace(
        "log = { medium = \"disk\"",
        "ring = \"/run\"\nlog = { medium = \"disk\"",
    ))
    .unwrap();
    let volume = config.volume(None).unwrap();
    let kinds = (volume.mode, volume.transport, volume.tracker);
    assert_eq!(kinds, (Mode::Sync, Transport::Shm, TrackerKind::Uffd));
    assert_eq!(volume.spin, Duration::from_secs(2));
    assert_eq!(config.node("a").unwrap().ring, Path::new("/run"));
    // Hosts apart may use one directory, and dotted keys are tables too.
    let text = "cluster = \"c\"\ninsecure_network = true\n\
                node.a.address = \"10.0.0.1:1\"\nnode.a.directory = \"/m\"\n\
                node.b.address = \"10.0.0.2:1\"\nnode.b.directory = \"/m\"\n";
    assert!(parse(text).unwrap().volume(None).is_err());
}

#[test]
fn words_are_those_of_the_file() {
    for word in Mode::WORDS {
        assert_eq!(word.parse::<Mode>().unwrap().to_string(), *word);
    }
    let error = "synch".parse::<Mode>().unwrap_err().to_string();
    assert_eq!(
        error,
        "`synch` is not one of unreplicated, async, sync, sync-flush, sync-disk, sync-sec, \
         sync-seceth"
    );
}

#[test]
fn a_mistake_in_a_volume_has_its_key_and_line() {
    let of = "volume.orders";
    let key = |key: &str| format!("{of}.{key}");
    wrong(
        "connections",
        "conections",
        7,
        &key("conections"),
        "did you mean `connections`?",
    );
    wrong(
        "connections = 2",
        "zebra = 2",
        7,
        &key("zebra"),
        "the keys here are mode, primary",
    );
    wrong(
        "connections = 2",
        "connections = \"2\"",
        7,
        &key("connections"),
        "an integer, not string",
    );
    wrong(
        "connections = 2",
        "connections = 65",
        7,
        &key("connections"),
        "between 1 and 64",
    );
    wrong(
        "connections = 2",
        "copy_streams = 17",
        7,
        &key("copy_streams"),
        "between 1 and 16",
    );
    wrong(
        "threshold = 1",
        "threshold = 0",
        8,
        &key("checkpoint_threshold"),
        "least is 1",
    );
    wrong(
        "attempts = 5",
        "attempts = 0",
        11,
        &key("resend_attempts"),
        "between 1",
    );
    wrong(
        "\"2s\"",
        "\"0ms\"",
        10,
        &key("resend_timeout"),
        "longer than zero",
    );
    wrong(
        "\"2s\"",
        "50",
        10,
        &key("resend_timeout"),
        "wants a duration",
    );
    wrong(
        "\"2s\"",
        "\"99999999999999999999s\"",
        10,
        &key("resend_timeout"),
        "not a duration",
    );
    wrong(
        "\"sync\"",
        "\"synch\"",
        4,
        &key("mode"),
        "unreplicated, async, sync, sync-flush",
    );
    wrong(
        "\"exact\"",
        "\"line\"",
        9,
        &key("msync_rounding"),
        "exact, page",
    );
    wrong(
        "mirror = \"b\"",
        "mirror = \"c\"",
        6,
        &key("mirror"),
        "no [node.c]; the file has a, b",
    );
    wrong(
        "mirror = \"b\"",
        "mirror = \"a\"",
        6,
        &key("mirror"),
        "the primary too",
    );
    wrong("mirror = \"b\"", "", 4, &key("mirror"), "mode sync sends");
    wrong(
        "\"sync\"",
        "\"unreplicated\"",
        6,
        &key("mirror"),
        "would never exist",
    );
    wrong("primary = \"a\"", "", 3, &key("primary"), "is missing");
    wrong(
        "volume.orders",
        "volume.\"or.ders\"",
        3,
        "volume.\"or.ders\"",
        "is no name",
    );
    // The daemon locked `.mojim/views` for the register of views, and no volume of that name could
    // be opened, for good.
    let (views, says) = ("volume.views", "is no name for a volume");
    wrong("volume.orders", views, 3, views, says);
    let long = format!("volume.{}", "x".repeat(65));
    wrong(
        of,
        &long,
        3,
        &format!("volume.\"{}...\"", "x".repeat(60)),
        "1 to 64",
    );
    wrong(
        "[volume.orders]",
        "[volume]\nx = 1\n[volume.orders]",
        4,
        "volume.x",
        "wants a table",
    );
    for mode in ["async", "sync-flush"] {
        let text = EXAMPLE.replace("\"disk\"", "\"dram\"");
        assert_eq!(
            mistakes(&text.replace("\"sync\"", &format!("\"{mode}\""))),
            [(4, key("mode"))]
        );
    }
    wrong(
        "connections",
        "memory = \"1KiB\"\nconnections",
        7,
        &key("memory"),
        "the least is 1MiB",
    );
    wrong(
        "connections",
        "tracker = \"uffd\"\nmax_uncommitted = \"1GiB\"\nconnections",
        7,
        &key("tracker"),
        "max_uncommitted needs that",
    );
    let text = EXAMPLE.replace("mode =", "transport = \"shm\"\nmode =");
    let text = text.replace("cluster", "insecure_network = true\ncluster");
    assert_eq!(
        mistakes(&text.replace("127.0.0.1:7402", "10.0.0.1:7402")),
        [(5, key("transport"))]
    );
}

#[test]
fn bounded_memory_is_tracked_in_two_levels() {
    let keys = "memory = \"1MiB\"\nmax_uncommitted = \"2GiB\"\nconnections";
    let config = parse(&EXAMPLE.replacen("connections", keys, 1)).unwrap();
    let volume = config.volume(None).unwrap();
    assert_eq!(volume.tracker, TrackerKind::TwoLevel);
    let bounds = (volume.memory, volume.max_uncommitted);
    assert_eq!(bounds, (Some(1 << 20), Some(2 << 30)));
}

#[test]
fn a_mistake_elsewhere_has_its_key_and_line() {
    wrong("cluster", "zone = 1\ncluster", 1, "zone", "unknown key");
    wrong("cluster = \"example\"", "", 1, "cluster", "is missing");
    wrong("\"example\"", "\"an example\"", 1, "cluster", "is no name");
    wrong(
        "7402",
        "7401",
        19,
        "node.b.address",
        "address of node a too (line 14)",
    );
    wrong(
        "127.0.0.1:7402",
        "localhost:7402",
        19,
        "node.b.address",
        "IP address and a port",
    );
    wrong(
        "127.0.0.1:7402",
        "0.0.0.0:7402",
        19,
        "node.b.address",
        "no node can be reached",
    );
    wrong(
        "127.0.0.1:7402",
        "10.0.0.1:7402",
        19,
        "node.b.address",
        "insecure_network = true",
    );
    wrong(
        "directory = \"/var/lib/mojim/a\"",
        "",
        13,
        "node.a.directory",
        "is missing",
    );
    let b = "/var/lib/mojim/b";
    wrong(b, "var/lib", 20, "node.b.directory", "absolute");
    wrong(b, "/var/../lib", 20, "node.b.directory", "..");
    wrong(
        b,
        "/var/lib/mojim/a/",
        20,
        "node.b.directory",
        "is the directory of node a (line 15)",
    );
    wrong(
        b,
        "/var/lib/mojim/a/b",
        20,
        "node.b.directory",
        "is inside the directory of node a",
    );
    wrong(
        b,
        "/var/lib",
        20,
        "node.b.directory",
        "contains the directory of node a",
    );
    wrong(
        "/dev/shm/mojim-b",
        "/var/lib/mojim/a/log",
        21,
        "node.b.log.path",
        "inside the directory",
    );
    wrong(
        "medium = \"disk\"",
        "media = \"disk\"",
        16,
        "node.a.log.media",
        "`medium`",
    );
    wrong(
        "\"64MiB\"",
        "\"64MB\"",
        16,
        "node.a.log.size",
        "KiB, MiB, GiB",
    );
    wrong(
        "\"64MiB\"",
        "\"2TiB\"",
        16,
        "node.a.log.size",
        "the most is 1TiB",
    );
    wrong("\"64MiB\"", "-1", 16, "node.a.log.size", "not a size");
    wrong(
        "\"64MiB\"",
        "131071",
        16,
        "node.a.log.size",
        "2 connections of volume orders, make it at least 128 KiB",
    );
    wrong(
        "log = { medium = \"disk\", size = \"64MiB\" }",
        "log = 3",
        16,
        "node.a.log",
        "wants a table",
    );
    let error = parse("cluster = \"c\"").unwrap_err();
    assert_eq!(error.mistakes.len(), 1);
    assert!(error.to_string().contains("neither a volume nor a node"));
}

#[test]
fn six_mistakes_are_reported_at_once_in_line_order() {
    let text = EXAMPLE
        .replace("mode = ", "mood = ")
        .replace("primary = \"a\"", "primary = \"z\"")
        .replace("connections = 2", "connections = true")
        .replace("\"2s\"", "\"fifty\"")
        .replace("7402", "7401")
        .replace("\"dram\"", "\"tape\"");
    let shown = parse(&text).unwrap_err().to_string();
    let expected = [
        "mojim.toml:4: key `volume.orders.mood`: ",
        "mojim.toml:5: key `volume.orders.primary`: ",
        "mojim.toml:7: key `volume.orders.connections`: ",
        "mojim.toml:10: key `volume.orders.resend_timeout`: ",
        "mojim.toml:19: key `node.b.address`: ",
        "mojim.toml:21: key `node.b.log.medium`: ",
    ];
    assert_eq!(shown.lines().count(), expected.len(), "{shown}");
    for (line, expected) in shown.lines().zip(expected) {
        assert!(line.starts_with(expected), "{shown}");
    }
}

#[test]
fn what_is_not_toml_gives_its_line() {
    assert_eq!(
        mistakes("cluster = \"c\"\n\nx = = 1\n"),
        [(3, String::new())]
    );
    let error = parse(&EXAMPLE.replace("mirror", "primary")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "mojim.toml:6: not TOML: duplicate key at `primary`"
    );
    let file = std::env::temp_dir().join(format!("mojim-config-{}", std::process::id()));
    let load = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        Config::load(&file).map_err(|error| error.to_string())
    };
    assert!(
        load(b"x = 1\n\xff")
            .unwrap_err()
            .contains(":2: the text is not UTF-8")
    );
    assert!(
        load(&vec![b'#'; MAX_TEXT + 1])
            .unwrap_err()
            .contains("larger than 1 MiB")
    );
    assert_eq!(load(EXAMPLE.as_bytes()).unwrap().path, file);
    std::fs::remove_file(&file).unwrap();
    assert!(
        Config::load(&file)
            .unwrap_err()
            .to_string()
            .contains("cannot read")
    );
    assert_eq!(mistakes(&"#".repeat(MAX_TEXT + 1)), [(0, String::new())]);
}

/// Inline tables of dotted keys, nested, overflowed the stack of a test thread.
#[test]
fn deep_or_crowded_text_is_refused_before_it_is_parsed() {
    let deep = format!("{}={{", ["a"; 79].join(".")).repeat(78);
    let crowded = "[x.a.a]\n".repeat(100_000);
    for text in [
        &deep,
        &"a.".repeat(400_000),
        &crowded,
        "a=[[[[[[[[[[[[[[[[[[",
    ] {
        assert!(guard(text.as_bytes()).is_err(), "{text:.40}");
        assert!(parse(text).is_err());
    }
    let quotes = "a=\"\"\"\n..........\"\"\"\"\"";
    let nested = "a=[\n{b.'c'=1.5e3,\"d\"={}}, # }\n2000-01-01 10:00:00.5,]\r\n[[x]]\n[ y . z ]";
    for fine in [
        "# ..........",
        "a='..........'",
        r#"a="\"..........""#,
        quotes,
        nested,
        "a='' # .'",
    ] {
        assert_eq!(guard(fine.as_bytes()), Ok(()), "{fine}");
        assert!(Document::parse(fine).is_ok(), "{fine}");
    }
    for odd in [
        "[",
        "a=[",
        "a={a=",
        "]",
        "\"",
        "'''",
        "\u{feff}",
        "=\n",
        "\0",
        "[]",
        "[[]]\n",
        "\"\\",
        "a= =1\na.b=1\n",
        "a={\na.=1\n",
    ] {
        assert!(parse(&odd.repeat(10_000)).is_err(), "{odd}");
        assert!(parse(odd).is_err(), "{odd}");
    }
}

#[test]
fn pmem_must_be_mapped_with_dax() {
    assert!(check_pmem(Path::new("/proc/self/none/there")).is_err());
    // /dev/shm is memory, but not DAX.
    let error = check_pmem(Path::new("/dev/shm/mojim-none/none")).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`/dev/shm` is not persistent memory"),
        "{error}"
    );
    let text = EXAMPLE.replace("\"dram\"", "\"pmem\"");
    let error = parse(&text).unwrap().check_media("b").unwrap_err();
    let key = "node.b.log.medium".to_owned();
    assert_eq!((error.mistakes[0].line, &error.mistakes[0].key), (21, &key));
}

#[test]
fn a_log_in_memory_can_be_as_slow_as_a_named_memory_and_one_on_a_disk_cannot() {
    let with = |medium: &str, more: &str| {
        let to = format!("\"{medium}\", {more}");
        parse(&EXAMPLE.replace("\"dram\"", to.trim_end_matches(", ")))
    };
    for medium in ["dram", "pmem"] {
        let c = with(medium, "emulate = \"NVMM-Raw\"").unwrap();
        let log = &c.node("b").unwrap().log;
        assert_eq!(log.emulate, Some(EmulatedMemory::NvmmRaw));
        // No persistent memory is needed.
        c.check_media("b").unwrap();
    }
    let key = |text: &str| {
        let mistakes = &with(text, "emulate = \"NVMM-Raw\"").unwrap_err().mistakes;
        (mistakes.len(), mistakes[0].key.clone())
    };
    assert_eq!(key("disk"), (1, "node.b.log.emulate".to_owned()));
    let unknown = with("dram", "emulate = \"PCM\"").unwrap_err().to_string();
    assert!(
        unknown.contains("PCM") && unknown.contains("NVMM-Opt"),
        "{unknown}"
    );
}

/// Every key that is about failures, none at its default but `failover`: nothing falls back
/// without it.
const TIERS: &str = r#"cluster = "tiers"
heartbeat = "20ms"
failure_limit = "80ms"

[volume.orders]
mode = "sync-sec"
primary = "a"
mirror = "b"
backups = ["d", "c"]
secondary_threshold = "64KiB"
failover = "automatic"
fallback = "automatic"

[node.a]
address = "127.0.0.1:7401"
directory = "/var/lib/mojim/a"
role = "data"
rack = "left"

[node.b]
address = "127.0.0.1:7402"
directory = "/var/lib/mojim/b"
rack = "right"

[node.c]
address = "127.0.0.1:7403"
directory = "/var/lib/mojim/c"
log = { medium = "dram", size = "1MiB" }

[node.d]
address = "127.0.0.1:7404"
directory = "/var/lib/mojim/d"
vote = false

[node.w]
address = "127.0.0.1:7405"
directory = "/var/lib/mojim/w"
role = "witness"
vote = true
"#;

/// `text` with the first of each `from` replaced.
#[track_caller]
fn with(text: &str, replaced: &[(&str, &str)]) -> String {
    replaced.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    })
}

/// TIERS with these replaced must have these mistakes: line, key, and a part of the message.
#[track_caller]
fn wrong_tiers(replaced: &[(&str, &str)], expected: &[(usize, &str, &str)]) {
    let error = parse(&with(TIERS, replaced)).expect_err(&format!("{replaced:?}"));
    assert_eq!(error.mistakes.len(), expected.len(), "{error}");
    for (mistake, (line, key, says)) in error.mistakes.iter().zip(expected) {
        assert_eq!(
            (mistake.line, mistake.key.as_str()),
            (*line, *key),
            "{error}"
        );
        assert!(mistake.message.contains(says), "{error}");
    }
}

#[test]
fn the_tiers_read_exactly() {
    let config = parse(TIERS).unwrap();
    assert_eq!(config.heartbeat, Duration::from_millis(20));
    assert_eq!(config.failure_limit, Duration::from_millis(80));
    let volume = config.volume(None).unwrap();
    assert_eq!(volume.mode, Mode::SyncSec);
    assert_eq!(volume.backups, ["d", "c"]);
    assert_eq!(volume.data_nodes(), ["a", "b", "d", "c"]);
    assert_eq!(volume.secondary_threshold, 64 << 10);
    assert_eq!(volume.failover, Failover::Automatic);
    assert_eq!(volume.fallback, Fallback::Automatic);
    let of = |name: &str| {
        let node = config.node(name).unwrap();
        (node.role, node.rack.as_deref(), node.vote)
    };
    assert_eq!(of("a"), (Role::Data, Some("left"), true));
    assert_eq!(of("c"), (Role::Data, None, true));
    assert_eq!(of("d"), (Role::Data, None, false));
    assert_eq!(of("w"), (Role::Witness, None, true));
    let voters: Vec<_> = config.voters().into_iter().map(|n| &*n.name).collect();
    assert_eq!(voters, ["a", "b", "c", "w"]);
    // A backup that was made primary has the first one for its peer.
    assert_eq!(config.peer_of(volume, "c").unwrap().name, "a");
    assert_eq!(config.peer_of(volume, "w"), None);

    let streams = with(TIERS, &[("fallback", "copy_streams = 3\nfallback")]);
    let config = parse(&streams).unwrap();
    assert_eq!(config.volume(None).unwrap().copy_streams, Some(3));

    let alone = "cluster = \"c\"\n[volume.v]\nprimary = \"a\"\nbackups = []\n\
                 [node.a]\naddress = \"[::1]:1\"\ndirectory = \"/a\"\nlog.size = \"80MiB\"\n";
    let config = parse(alone).unwrap();
    let volume = config.volume(None).unwrap();
    assert_eq!(volume.data_nodes(), ["a"]);
    assert_eq!(volume.secondary_threshold, 40 << 20);
    assert_eq!(volume.failover, Failover::Manual);
}

/// Every document for users: its name and its text.
fn documents() -> Vec<(String, String)> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // A directory for each purpose.
    let purposes = std::fs::read_dir(top.join("docs")).unwrap();
    let purposes = purposes.map(|d| d.unwrap().path()).filter(|p| p.is_dir());
    let docs = purposes.flat_map(|d| std::fs::read_dir(d).unwrap());
    let docs = docs.map(|d| d.unwrap().path());
    docs.chain([top.join("README.md"), top.join("ARCHITECTURE.md")])
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
        .map(|p| {
            (
                p.display().to_string(),
                std::fs::read_to_string(&p).unwrap(),
            )
        })
        .collect()
}

/// A document had only a part of a file, and a user who copied it was told of mistakes.
#[test]
fn every_configuration_of_the_documents_is_one() {
    let mut found = 0;
    for (name, text) in documents() {
        for block in text.split("```toml\n").skip(1) {
            let (text, _) = block.split_once("```").unwrap();
            // Of a Cargo.toml.
            if text.starts_with("[dependencies]") || text.starts_with("[package]") {
                continue;
            }
            assert_eq!(parse(text).map(|_| ()), Ok(()), "{name}: {text}");
            found += 1;
        }
    }
    assert!(found >= 4, "{found}");
}

/// Each key has its row in `docs/reference/configuration.md`, and each row is a key's.
#[test]
fn every_key_is_documented() {
    let documents = documents();
    let (_, text) = documents
        .iter()
        .find(|(name, _)| name.ends_with("/reference/configuration.md"))
        .unwrap();
    let rows: std::collections::BTreeSet<&str> = text
        .lines()
        .filter_map(|l| l.strip_prefix("| `")?.split('`').next())
        .collect();
    let keys = crate::read::KEYS.iter().copied().flatten().copied();
    let keys: std::collections::BTreeSet<&str> =
        keys.filter(|k| !["volume", "node"].contains(k)).collect();
    assert_eq!(rows, keys);
}

/// Key and default of each row in the tables of keys in `docs/reference/configuration.md`.
fn documented_defaults() -> Vec<(String, String)> {
    let documents = documents();
    let mut all = documents.iter();
    let is_it = |(name, _): &&(String, String)| name.ends_with("/reference/configuration.md");
    let (_, text) = all.find(is_it).unwrap();
    let row = |line: &str| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.split(" | ").collect();
        let key = cells[0].trim_end_matches('`');
        Some((key.to_owned(), cells[1].to_owned()))
    };
    text.lines().filter_map(row).collect()
}

/// As the document writes a time.
fn time(d: Duration) -> String {
    match d.as_micros() {
        n if n % 1_000_000 == 0 => format!("{} s", n / 1_000_000),
        n if n % 1000 == 0 => format!("{} ms", n / 1000),
        n => format!("{n} µs"),
    }
}

fn mib(n: u64) -> String {
    format!("{} MiB", n >> 20)
}

fn none_or<T>(none: &str, value: &Option<T>) -> String {
    assert!(value.is_none(), "it has a default");
    none.to_owned()
}

/// A file that names what is required only: three voters, and volumes with a mirror and without.
const REQUIRED: &str = r#"cluster = "c"
[volume.alone]
primary = "a"
[volume.pair]
primary = "a"
mirror = "b"
[node.a]
address = "127.0.0.1:1"
directory = "/a"
[node.b]
address = "127.0.0.1:2"
directory = "/b"
[node.w]
address = "127.0.0.1:3"
directory = "/w"
role = "witness"
"#;

/// `REQUIRED` with each `from` replaced.
fn required_with(replaced: &[(&str, &str)]) -> Config {
    let text = replaced
        .iter()
        .fold(REQUIRED.to_owned(), |text, (from, to)| {
            assert!(text.contains(from), "{from}");
            text.replace(from, to)
        });
    parse(&text).unwrap()
}

/// A default was changed in the code, and the document kept the old one.
#[test]
fn documented_defaults_are_those_of_the_code() {
    let config = required_with(&[]);
    let pair = config.volume(Some("pair")).unwrap();
    let alone = config.volume(Some("alone")).unwrap();
    let node = config.node("a").unwrap();
    let word = |w: &str| format!("`{w}`");
    let required = |from: &str| {
        parse(&REQUIRED.replacen(from, "", 1)).expect_err(from);
        "required".to_owned()
    };
    let keys = [("cluster = \"c\"\n", "cluster = \"c\"\nkeys = \"/k\"\n")];
    let open = [(
        "cluster = \"c\"\n",
        "cluster = \"c\"\nkeys = \"/k\"\nencrypt = false\n",
    )];
    let encrypts = |config: Config| config.volume(Some("pair")).unwrap().encrypt;
    let (as_given, else_not) = (
        encrypts(required_with(&keys)),
        encrypts(required_with(&open)),
    );
    assert!(!pair.encrypt && !else_not);
    for mode in ["mode = \"sync\"", "mirror = \"b\"\nmode = \"unreplicated\""] {
        parse(&REQUIRED.replacen("mirror = \"b\"", mode, 1)).expect_err(mode);
    }
    let mirror = "required, refused in `unreplicated`".to_owned();
    let by_hand = required_with(&[("role = \"witness\"\n", "vote = false\n")]);
    let by_hand = by_hand.volume(Some("pair")).unwrap().failover;
    assert_eq!(alone.failover, by_hand);
    let logs = ["\"/a\"\n", "\"/b\"\n"].map(|d| (d, format!("{d}log.size = \"1GiB\"\n")));
    let large = required_with(&logs.each_ref().map(|(from, to)| (*from, &**to)));
    let large = large.volume(Some("pair")).unwrap().secondary_threshold;
    assert_eq!(pair.secondary_threshold, node.log.size / 2);
    let bounded = required_with(&[("mirror", "memory = \"1MiB\"\nmirror")]);
    let bounded = bounded.volume(Some("pair")).unwrap().tracker;
    let log = format!(
        "`{{ medium = \"{}\", size = \"{}\" }}`",
        node.log.medium,
        mib(node.log.size).replace(' ', "")
    );
    let or = |word: &str, or: &str| format!("`{word}`, or `{or}` where memory is bounded");
    let expected = [
        ("cluster", required("cluster = \"c\"\n")),
        ("keys", none_or("none", &config.keys)),
        ("encrypt", format!("{as_given} with `keys`")),
        ("insecure_network", config.insecure_network.to_string()),
        ("heartbeat", time(config.heartbeat)),
        ("failure_limit", time(config.failure_limit)),
        (
            "mode",
            format!("`{}` with a mirror, else `{}`", pair.mode, alone.mode),
        ),
        ("primary", required("primary = \"a\"\n")),
        ("mirror", mirror),
        ("backups", none_or("none", &pair.backups.first())),
        (
            "secondary_threshold",
            format!(
                "{}, or half of the smallest log of a connection if that is less",
                mib(large)
            ),
        ),
        (
            "copy_streams",
            none_or("half of the sender's cores, at most 4", &pair.copy_streams),
        ),
        (
            "failover",
            format!(
                "`{}` with three voters and a mirror, else `{by_hand}`",
                pair.failover
            ),
        ),
        ("fallback", word(pair.fallback.as_str())),
        ("connections", pair.connections.to_string()),
        ("transport", word(pair.transport.as_str())),
        ("encrypt", "as at the top".to_owned()),
        ("spin", time(pair.spin)),
        ("resend_timeout", time(pair.resend_timeout)),
        ("resend_attempts", pair.resend_attempts.to_string()),
        (
            "checkpoint_threshold",
            pair.checkpoint_threshold.to_string(),
        ),
        ("write_back", word(pair.write_back.as_str())),
        ("write_back_pages", pair.write_back_pages.to_string()),
        ("msync_rounding", word(pair.rounding.as_str())),
        ("tracker", or(pair.tracker.as_str(), bounded.as_str())),
        ("working", word(pair.working.as_str())),
        ("memory", none_or("no bound", &pair.memory)),
        (
            "max_uncommitted",
            none_or("no bound", &pair.max_uncommitted),
        ),
        ("address", required("address = \"127.0.0.1:1\"\n")),
        ("directory", required("directory = \"/a\"\n")),
        ("role", word(node.role.as_str())),
        ("vote", node.vote.to_string()),
        ("rack", none_or("none", &node.rack)),
        ("ring", word(node.ring.to_str().unwrap())),
        ("log", log),
        ("replaces", none_or("none", &node.replaces.first())),
        ("medium", word(node.log.medium.as_str())),
        ("emulate", none_or("none", &node.log.emulate)),
        (
            "path",
            none_or("in `directory`, with `dram` in `ring`", &node.log.path),
        ),
        ("size", mib(node.log.size)),
    ];
    let expected: Vec<_> = expected.map(|(k, v)| (k.to_owned(), v)).into();
    assert_eq!(documented_defaults(), expected);
}

#[test]
fn silence_is_several_heartbeats() {
    let beat = "\"20ms\"";
    let limit = "\"80ms\"";
    for (given, says) in [
        ("\"9ms\"", "`9ms` is too short; the least is 10ms"),
        ("\"10001ms\"", "the most is 10s"),
        ("\"0s\"", "longer than zero"),
        ("100", "wants a duration"),
        ("\"1h\"", "not a duration"),
    ] {
        wrong_tiers(&[(beat, given)], &[(2, "heartbeat", says)]);
    }
    for (given, says) in [
        ("\"601s\"", "the most is 600s"),
        (
            "\"79ms\"",
            "failure_limit (79ms) is less than 4 times heartbeat (20ms)",
        ),
    ] {
        wrong_tiers(&[(limit, given)], &[(3, "failure_limit", says)]);
    }
    // Against the default of the other key, the mistake is that of the one which is given.
    wrong_tiers(
        &[(beat, "\"1s\""), ("failure_limit = \"80ms\"", "")],
        &[(
            2,
            "heartbeat",
            "(1s), so that a few late heartbeats would count as a failure; make failure_limit \
             at least 4s",
        )],
    );
    wrong_tiers(
        &[("heartbeat = \"20ms\"", ""), (limit, "\"399999us\"")],
        &[(3, "failure_limit", "(399999us) is less than 4 times")],
    );
    for (given, other) in [("\"10ms\"", "\"40ms\""), ("\"10s\"", "\"600s\"")] {
        parse(&with(TIERS, &[(beat, given), (limit, other)])).unwrap();
    }
}

#[test]
fn a_witness_votes_and_does_nothing_else() {
    let log = "log = { medium = \"disk\" }\nvote = true";
    wrong_tiers(&[("vote = true", log)], &[(39, "node.w.log", "no data")]);
    wrong_tiers(
        &[("vote = true", "log.size = 7\nring = \"x\"")],
        &[
            (39, "node.w.log", "stores no data"),
            (40, "node.w.ring", "stores no data"),
        ],
    );
    let key = "node.w.vote";
    wrong_tiers(
        &[("vote = true", "vote = false")],
        &[(39, key, "only votes")],
    );
    wrong_tiers(
        &[("vote = true", "vote = 1")],
        &[(39, key, "true or false")],
    );
    wrong_tiers(
        &[("\"witness\"", "\"wit\"")],
        &[(38, "node.w.role", "`wit` is not one of data, witness")],
    );
    let says = "node w is a witness (line 38), which stores no data; name a data node";
    for (from, line, key) in [
        ("primary = \"a\"", 7, "volume.orders.primary"),
        ("mirror = \"b\"", 8, "volume.orders.mirror"),
        ("backups = [\"d\", \"c\"]", 9, "volume.orders.backups"),
    ] {
        let to = from.replace(['a', 'b'], "w");
        let (name, _) = from.split_once(' ').unwrap();
        let to = match name {
            "backups" => "backups = [\"w\"]".to_owned(),
            _ => format!("{name} = {}", to.split_once("= ").unwrap().1),
        };
        wrong_tiers(&[(from, &to)], &[(line, key, says)]);
    }
}

#[test]
fn a_rack_is_a_short_text() {
    let rack = "rack = \"left\"";
    let long = format!("rack = \"{}\"", "é".repeat(33));
    let most = format!("rack = \"{}\"", "é".repeat(32));
    let key = "node.a.rack";
    wrong_tiers(&[(rack, &long)], &[(18, key, "the most is 64 bytes")]);
    wrong_tiers(&[(rack, "rack = \"\"")], &[(18, key, "is empty")]);
    wrong_tiers(&[(rack, "rack = 7")], &[(18, key, "wants a string")]);
    let config = parse(&with(TIERS, &[(rack, &most)])).unwrap();
    assert_eq!(config.node("a").unwrap().rack, Some("é".repeat(32)));
}

/// `fallback = "automatic"` was accepted beside `failover = "manual"`, with a warning, and no
/// backup fell back.
#[test]
fn backups_are_other_data_nodes() {
    let list = "[\"d\", \"c\"]";
    let key = "volume.orders.backups";
    for (given, says) in [
        (
            "\"c\"",
            "wants a list of nodes ([\"a\", \"b\"]), not string",
        ),
        ("[[\"c\"]]", "wants names of nodes, not array"),
        ("[\"c d\"]", "`c d` is no name"),
        ("[\"a\", \"c\"]", "a is the primary too"),
        ("[\"c\", \"b\"]", "b is the mirror too"),
        ("[\"c\", \"d\", \"c\"]", "c is listed twice"),
        ("[\"x\"]", "no [node.x]; the file has a, b, c, d, w"),
    ] {
        wrong_tiers(&[(list, given)], &[(9, key, says)]);
    }
    // Each element has its own line.
    wrong_tiers(
        &[(list, "[\n\"c\",\n3,\n\"y\",\n\"b\"]")],
        &[
            (11, key, "not integer"),
            (12, key, "no [node.y]"),
            (13, key, "the mirror"),
        ],
    );
    let fallback = ("fallback = \"automatic\"", "");
    let failover = ("failover = \"automatic\"", "");
    for mode in ["sync-sec", "sync-seceth"] {
        let mode = ("\"sync-sec\"", &*format!("\"{mode}\""));
        wrong_tiers(
            &[mode, fallback, (list, "[]")],
            &[(9, key, "names no node: in mode sync-sec")],
        );
        wrong_tiers(
            &[mode, fallback, ("backups = [\"d\", \"c\"]", "")],
            &[(6, key, "is missing: in mode sync-sec")],
        );
    }
    for mode in ["async", "sync", "sync-flush"] {
        let text = with(TIERS, &[("sync-sec", mode), failover, fallback]);
        assert_eq!(
            parse(&text).unwrap().volume(None).unwrap().backups,
            ["d", "c"]
        );
    }
    wrong_tiers(
        &[
            ("\"sync-sec\"", "\"unreplicated\""),
            ("mirror = \"b\"", ""),
            failover,
            fallback,
        ],
        &[(9, key, "no mirror that could forward")],
    );
    wrong_tiers(
        &[("\"sync-sec\"", "\"sync\""), (list, "[]")],
        &[(12, "volume.orders.fallback", "no backup to fall back to")],
    );
    wrong_tiers(
        &[("fallback = \"automatic\"", "fallback = true")],
        &[(12, "volume.orders.fallback", "wants a string")],
    );
    // This was accepted, and no backup ever fell back.
    let manual =
        "failover is \"manual\", so no backup acts by itself; set failover = \"automatic\"";
    let by_hand = ("failover = \"automatic\"", "failover = \"manual\"");
    wrong_tiers(&[by_hand], &[(12, "volume.orders.fallback", manual)]);
    // Also where that is the default.
    wrong_tiers(
        &[failover, ("sync-sec", "async")],
        &[(12, "volume.orders.fallback", manual)],
    );
    // Their logs are the volume's too.
    wrong_tiers(
        &[
            ("fallback", "connections = 17\nfallback"),
            ("secondary_threshold = \"64KiB\"", ""),
        ],
        &[(
            29,
            "node.c.log.size",
            "17 connections of volume orders, make it at least 1088 KiB",
        )],
    );
}

#[test]
fn the_secondary_threshold_fits_into_half_of_each_log() {
    let threshold = "secondary_threshold = \"64KiB\"";
    let key = "volume.orders.secondary_threshold";
    let give = |bytes: u64| format!("secondary_threshold = {bytes}");
    let half = 512 << 10;
    wrong_tiers(
        &[(threshold, &give(half + 1))],
        &[(
            10,
            key,
            "524289 bytes are more than half of the smallest log: that of each connection has \
             1048576 bytes on node c (line 28); make it at most 524288",
        )],
    );
    wrong_tiers(
        &[(threshold, &give(65535))],
        &[(10, key, "the least is 64 KiB")],
    );
    wrong_tiers(
        &[(threshold, "secondary_threshold = \"1MB\"")],
        &[(10, key, "not a size")],
    );
    let read = |replaced: &[(&str, &str)]| {
        let config = parse(&with(TIERS, replaced)).unwrap();
        config.volume(None).unwrap().secondary_threshold
    };
    assert_eq!(read(&[(threshold, &give(half))]), half);
    assert_eq!(read(&[(threshold, "")]), half);
    assert_eq!(read(&[(threshold, "connections = 16")]), 32 << 10);
    // What holds by default may be given, also where the logs leave no room for 64 KiB.
    let both = format!("connections = 16\n{}", give(32 << 10));
    assert_eq!(read(&[(threshold, &both)]), 32 << 10);
    let less = format!("connections = 16\n{}", give((32 << 10) - 1));
    wrong_tiers(&[(threshold, &less)], &[(11, key, "too few")]);
    let large = [("1MiB", "1GiB"), (threshold, "")];
    assert_eq!(read(&large), 8 << 20, "the others have 16 MiB");
}

#[test]
fn sync_disk_keeps_the_log_of_its_mirror_in_memory() {
    let mode = ("\"sync-sec\"", "\"sync-disk\"");
    wrong_tiers(
        &[mode],
        &[(6, "volume.orders.mode", "its mirror is on a disk (line 20)")],
    );
    let rack = "rack = \"right\"";
    for medium in ["dram", "pmem"] {
        let log = format!("log.medium = \"{medium}\"");
        let text = with(TIERS, &[mode, (rack, &log)]);
        assert_eq!(
            parse(&text).unwrap().volume(None).unwrap().mode,
            Mode::SyncDisk
        );
    }
    for word in ["sync-disk", "sync-sec", "sync-seceth"] {
        // As sync: the primary's own log may be in dram; and there is a mirror.
        let mode = ("\"sync-sec\"", &*format!("\"{word}\""));
        let dram = ("rack = \"left\"", "log.medium = \"dram\"");
        parse(&with(TIERS, &[mode, dram, (rack, "log.medium = \"dram\"")])).unwrap();
        wrong_tiers(
            &[mode, ("mirror = \"b\"", "")],
            &[(6, "volume.orders.mirror", &format!("mode {word} sends"))],
        );
    }
}

#[test]
fn failover_is_automatic_only_with_a_majority() {
    let read = |replaced: &[(&str, &str)]| {
        let config = parse(&with(TIERS, replaced)).unwrap();
        config.volume(None).unwrap().failover
    };
    let default = ("failover = \"automatic\"", "");
    let no_fallback = ("fallback = \"automatic\"", "");
    assert_eq!(read(&[default]), Failover::Automatic);
    assert_eq!(read(&[]), Failover::Automatic);
    let asynchronous = ("sync-sec", "async");
    assert_eq!(
        read(&[default, no_fallback, asynchronous]),
        Failover::Manual
    );

    // What a promotion would lose is the operator's to decide.
    let error = parse(&with(TIERS, &[asynchronous])).unwrap_err();
    assert!(error.to_string().contains("a person who knows"), "{error}");

    // Without c's vote a, b and w are left; without w, too few.
    let three = ("log = {", "vote = false\nlog = {");
    let (head, _) = TIERS.split_once("[node.w]").unwrap();
    assert_eq!(read(&[default, three]), Failover::Automatic);
    let manual = parse(&with(head, &[default, no_fallback, three])).unwrap();
    assert_eq!(manual.volume(None).unwrap().failover, Failover::Manual);
    let error = parse(&with(head, &[three])).unwrap_err();
    assert_eq!(error.mistakes.len(), 1, "{error}");
    let mistake = &error.mistakes[0];
    let place = (mistake.line, mistake.key.as_str());
    assert_eq!(place, (11, "volume.orders.failover"));
    assert!(
        mistake.message.contains("the file has 2; add a witness"),
        "{error}"
    );
    // A vote that cannot be read may be one.
    let error = parse(&with(head, &[("log = {", "vote = 3\nlog = {")])).unwrap_err();
    assert_eq!(error.mistakes.len(), 1, "{error}");

    let key = "volume.orders.failover";
    wrong_tiers(
        &[("failover = \"automatic\"", "failover = \"maybe\"")],
        &[(11, key, "automatic, manual")],
    );
    wrong_tiers(
        &[
            ("\"sync-sec\"", "\"unreplicated\""),
            ("mirror = \"b\"", ""),
            ("backups = [\"d\", \"c\"]", ""),
            ("fallback = \"automatic\"", ""),
        ],
        &[(11, key, "no mirror that could be promoted")],
    );
}

#[test]
fn mistakes_about_failures_are_reported_at_once() {
    let replaced = [
        ("\"20ms\"", "\"5ms\""),
        ("\"80ms\"", "\"11min\""),
        ("\"a\"", "\"w\""),
        ("[\"d\", \"c\"]", "[\"d\", \"d\"]"),
        ("\"64KiB\"", "1"),
        ("failover = \"automatic\"", "failover = \"no\""),
        ("\"automatic\"", "\"yes\""),
        ("\"data\"", "\"date\""),
        ("rack = \"left\"", "rack = []"),
        ("vote = false", "vote = \"no\""),
        ("vote = true", "vote = false\nring = \"/x\""),
    ];
    let expected = [
        (2, "heartbeat", "too short"),
        (3, "failure_limit", "not a duration"),
        (7, "volume.orders.primary", "is a witness"),
        (9, "volume.orders.backups", "listed twice"),
        (10, "volume.orders.secondary_threshold", "too few"),
        (11, "volume.orders.failover", "`no` is not one of"),
        (12, "volume.orders.fallback", "`yes` is not one of"),
        (17, "node.a.role", "data, witness"),
        (18, "node.a.rack", "wants a string"),
        (33, "node.d.vote", "true or false"),
        (39, "node.w.vote", "a witness only votes"),
        (40, "node.w.ring", "a witness stores no data"),
    ];
    wrong_tiers(&replaced, &expected);
    wrong_tiers(
        &[
            ("heartbeat", "heartbeats"),
            ("rack", "rak"),
            ("backups", "backup"),
        ],
        &[
            (2, "heartbeats", "did you mean `heartbeat`?"),
            (3, "failure_limit", "4 times heartbeat (100ms)"),
            (6, "volume.orders.backups", "is missing"),
            (9, "volume.orders.backup", "did you mean `backups`?"),
            (12, "volume.orders.fallback", "no backup"),
            (18, "node.a.rak", "did you mean `rack`?"),
        ],
    );
}

/// It acknowledged as persistent what is in memory alone, without a word.
#[test]
fn an_emulated_log_that_counts_as_persistent_is_warned_of() {
    let warned = |log: &str| {
        let c = parse(&EXAMPLE.replace("\"dram\"", log)).unwrap();
        let all = c.warnings();
        all.iter()
            .any(|w| w.starts_with("node b: its log is in memory and counts as persistent"))
    };
    assert!(warned("\"pmem\", emulate = \"NVMM-Raw\""));
    // A log of this medium is not taken for persistent.
    assert!(!warned("\"dram\", emulate = \"NVMM-Raw\""));
    assert!(!warned("\"dram\""));
}

#[test]
fn warnings_say_what_protects_less_than_it_seems() {
    let warnings =
        |text: &str, replaced: &[(&str, &str)]| parse(&with(text, replaced)).unwrap().warnings();
    assert_eq!(
        warnings(EXAMPLE, &[]),
        [
            "there are two data nodes and no witness, so promotion is manual; for an automatic \
             `failover`, add a [node.NAME] with role = \"witness\", until at least 3 nodes vote"
        ]
    );
    let silent = [("vote = false", ""), ("fallback = \"automatic\"", "")];
    assert_eq!(warnings(TIERS, &silent), [""; 0]);
    assert_eq!(
        warnings(TIERS, &[("\"right\"", "\"left\"")]),
        [
            "4 nodes vote, which outlive no more failures than 3 would; set vote = false in one \
             [node.NAME], or add one with role = \"witness\"",
            "volume.orders.primary and volume.orders.mirror are in one rack (node.a.rack and \
             node.b.rack are both `left`), whose failure takes both copies; choose nodes of \
             different racks",
            "volume.orders.fallback is automatic, but without nodes a and b only 2 of 4 voters \
             are left, which is no majority; add nodes that vote, or set vote = false in \
             [node.a] or [node.b]",
        ]
    );
    // c, d and w of five voters are a majority without a; so the pair may keep one vote.
    let outlives = [("vote = false", ""), ("rack = \"left\"", "vote = false")];
    let even = warnings(TIERS, &outlives);
    assert_eq!(even.len(), 1, "{even:?}");
    let default = ("failover = \"automatic\"", "");
    let asynchronous = [silent[0], silent[1], default, ("sync-sec", "async")];
    assert_eq!(warnings(TIERS, &asynchronous), [""; 0]);
    let one = with(EXAMPLE, &[("log = {", "vote = false\nlog = {")]);
    assert!(warnings(&one, &[])[0].starts_with("only 1 node votes, so"));
    let third = "[node.c]\naddress = \"127.0.0.1:1\"\ndirectory = \"/c\"\nvote = false\n[node.a]";
    let two = with(EXAMPLE, &[("[node.a]", third)]);
    assert!(warnings(&two, &[])[0].starts_with("only 2 nodes vote, so"));
    // Nothing to promote, nothing to say.
    let alone = with(
        EXAMPLE,
        &[("\"sync\"", "\"unreplicated\""), ("mirror = \"b\"", "")],
    );
    assert_eq!(warnings(&alone, &[]), [""; 0]);
}

#[test]
fn keys_open_the_network_and_set_the_rules() {
    let keyed = |more: &str| EXAMPLE.replace("cluster", &format!("keys = \"/k\"\n{more}cluster"));
    let config = parse(&keyed("")).unwrap();
    assert_eq!(config.keys.as_deref(), Some(Path::new("/k")));
    assert!(config.volume(None).unwrap().encrypt);
    let config = parse(&keyed("encrypt = false\n")).unwrap();
    assert!(!config.volume(None).unwrap().encrypt);
    let text = keyed("encrypt = false\n").replace("mode =", "encrypt = true\nmode =");
    assert!(parse(&text).unwrap().volume(None).unwrap().encrypt);
    assert!(!parse(EXAMPLE).unwrap().volume(None).unwrap().encrypt);
    // Any address, where everyone has to prove a name.
    parse(&keyed("").replace("127.0.0.1:7402", "10.0.0.1:7402")).unwrap();
    let text = keyed("insecure_network = true\n");
    assert_eq!(mistakes(&text), [(2, "insecure_network".into())]);
    for text in ["encrypt = true\ncluster", "encrypt = false\ncluster"] {
        let text = EXAMPLE.replace("cluster", text);
        assert_eq!(mistakes(&text), [(1, "encrypt".into())]);
    }
    let text = EXAMPLE.replace("mode =", "encrypt = true\nmode =");
    assert_eq!(mistakes(&text), [(4, "volume.orders.encrypt".into())]);
    let text = keyed("").replace("\"/k\"", "\"k\"");
    assert_eq!(mistakes(&text), [(1, "keys".into())]);
    // A name in a certificate is a DNS label.
    let long = "x".repeat(64);
    for bad in [&*long, "-a", "a-"] {
        let text = keyed("").replace("\"example\"", &format!("{bad:?}"));
        assert_eq!(mistakes(&text), [(2, "cluster".into())], "{bad}");
        let text = format!(
            "{}[node.{bad}]\naddress = \"127.0.0.1:9\"\ndirectory = \"/n\"\n",
            keyed("")
        );
        let line = text.lines().count() - 2;
        assert_eq!(mistakes(&text), [(line, format!("node.{bad}"))], "{bad}");
        parse(&text.replace("keys = \"/k\"\n", "")).unwrap();
    }
}

#[test]
fn a_place_is_one_node_s() {
    let b = "directory = \"/var/lib/mojim/b\"";
    let replaces = |names: &str| format!("{b}\nreplaces = {names}");
    let c = parse(&EXAMPLE.replacen(b, &replaces("[\"y\", \"z\"]"), 1)).unwrap();
    assert_eq!((c.nodes["b"].place(), c.nodes["a"].place()), ("y", "a"));
    assert_eq!(c.replacement_of("z").unwrap().name, "b");
    let v = &c.volumes["orders"];
    assert!(c.held(v, "a") && c.held(v, "z") && !c.held(v, "x"));

    let key = "node.b.replaces";
    wrong(b, &replaces("\"z\""), 21, key, "list");
    wrong(b, &replaces("[\"z/\"]"), 21, key, "no name");
    wrong(b, &replaces("[\"a\"]"), 21, key, "still in this file");
    wrong(b, &replaces("[\"z\", \"z\"]"), 21, key, "one node's");
    let many: Vec<_> = (0..65).map(|i| format!("\"n{i}\"")).collect();
    wrong(
        b,
        &replaces(&format!("[{}]", many.join(","))),
        21,
        key,
        "64",
    );
}

#[test]
fn the_sum_is_of_what_is_said() {
    let c = parse(EXAMPLE).unwrap();
    let spread = EXAMPLE.replace("\n\n", "\n# more\n\n\n");
    let other = Config::parse(&spread, Path::new("/elsewhere")).unwrap();
    assert_eq!(c.sum(), other.sum());
    let changed = parse(&EXAMPLE.replacen("7402", "7403", 1)).unwrap();
    assert_ne!(c.sum(), changed.sum());
}
