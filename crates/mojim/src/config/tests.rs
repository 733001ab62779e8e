//! Each mistake gives its key and its line; no text makes the parser panic.

use super::syntax::guard;
use super::*;

const EXAMPLE: &str = r#"cluster = "example"

[volume.orders]
mode = "sync"            # unreplicated | async | sync | sync-flush
primary = "a"
mirror = "b"
connections = 2
checkpoint_threshold = 1
msync_rounding = "exact" # exact | page
resend_timeout = "50ms"
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
        connections: 2,
        checkpoint_threshold: 1,
        rounding: Rounding::Exact,
        resend_timeout: Duration::from_millis(50),
        resend_attempts: 5,
        transport: Transport::Tcp,
        spin: Duration::from_micros(30),
        tracker: TrackerKind::Auto,
    };
    let node = |name: &str, port, medium, path: Option<&str>, medium_line| Node {
        name: name.into(),
        address: SocketAddr::from(([127, 0, 0, 1], port)),
        directory: Path::new("/var/lib/mojim").join(name),
        ring: "/dev/shm".into(),
        log: LogConfig {
            medium,
            path: path.map(PathBuf::from),
            size: 64 << 20,
        },
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
        insecure_network: false,
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
        (MediumKind::Disk, 64 << 20, &None)
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
        "`synch` is not one of unreplicated, async, sync, sync-flush"
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
        "\"50ms\"",
        "\"0ms\"",
        10,
        &key("resend_timeout"),
        "longer than zero",
    );
    wrong(
        "\"50ms\"",
        "50",
        10,
        &key("resend_timeout"),
        "wants a duration",
    );
    wrong(
        "\"50ms\"",
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
    let text = EXAMPLE.replace("mode =", "transport = \"shm\"\nmode =");
    let text = text.replace("cluster", "insecure_network = true\ncluster");
    assert_eq!(
        mistakes(&text.replace("127.0.0.1:7402", "10.0.0.1:7402")),
        [(5, key("transport"))]
    );
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
        .replace("\"50ms\"", "\"fifty\"")
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
