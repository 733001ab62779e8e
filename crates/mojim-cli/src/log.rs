//! The lines of a daemon on standard error: one for each event, as text or as JSON.
//!
//! Owns the `tracing` subscriber of `mojim node`: which events are shown, what a line looks like,
//! and how often the same one is written. Other commands have no subscriber, and report by
//! `failure`.
//!
//! Invariants:
//!
//! - An event is one line, whatever a peer or an error has in its text.
//! - A text that came `OFTEN` times within a minute is from then on written once a minute, with how
//!   often it was left out. Only a hash of a text is kept, for at most `MOST_TEXTS` texts.
//! - Where standard error is closed nothing is written, and the daemon goes on.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use mojim_env::locks::lock;
use mojim_format::shown::{shown, shown_json};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use crate::failure::Failure;

/// What is shown if neither variable is set.
const DEFAULT: &str = "info,openraft=off";
/// The variables that choose what is shown; the first that is set counts.
const VARIABLES: [&str; 2] = [OURS, "RUST_LOG"];
const OURS: &str = "MOJIM_LOG";

/// How often a text may come within `A_WHILE` before it is left out.
const OFTEN: usize = 5;
/// The time between two lines of a text that comes again and again.
const A_WHILE: Duration = Duration::from_secs(60);
/// How many texts are remembered: those that came last.
const MOST_TEXTS: usize = 256;

/// How an event is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// A line for people.
    Text,
    /// A JSON object, on one line.
    Json,
}

/// From here on this process's events are written, as those of node `node`.
pub fn install(node: &str, form: Form) -> Result<(), Failure> {
    let filter = filter(|name| std::env::var_os(name))?;
    let lines = subscriber(node, form, filter, std::io::stderr);
    tracing::subscriber::set_global_default(lines)
        .map_err(|e| Failure::failed(format!("the daemon's lines: {e}")))
}

fn subscriber<W>(node: &str, form: Form, filter: EnvFilter, to: W) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(to)
        // Internal errors would go to standard error, too, and end the thread if it is
        // closed.
        .log_internal_errors(false)
        .event_format(Lines {
            node: node.to_owned(),
            form,
            limit: Mutex::default(),
        })
        .finish()
}

/// Which events are shown, by what the environment says.
fn filter(variable: impl Fn(&str) -> Option<OsString>) -> Result<EnvFilter, Failure> {
    for name in VARIABLES {
        let said = variable(name).unwrap_or_default();
        let text = said.to_string_lossy();
        if text.trim().is_empty() {
            continue;
        }
        // In RUST_LOG a word alone names a part of the program, of which all is shown.
        return parse(&text, name == OURS).ok_or_else(|| {
            Failure::usage(format!(
                "{name}={text} is no filter: write a level (off, error, warn, info, debug or trace), or PART=LEVEL, or several with commas between, as in {OURS}=warn,openraft=debug"
            ))
        });
    }
    Ok(parse(DEFAULT, true).expect("it is one"))
}

/// `levels_alone`: a word that is not a level is a mistake. If no level is given for all
/// parts, the default holds for the rest.
fn parse(text: &str, levels_alone: bool) -> Option<EnvFilter> {
    let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
    let mut parts: Vec<&str> = parts.collect();
    let is_level = |p: &&str| p.parse::<LevelFilter>().is_ok();
    let is_word = |p: &&str| !p.contains(['=', '[']) && !is_level(p);
    if levels_alone && parts.iter().any(is_word) {
        return None;
    }
    let level = parts
        .iter()
        .filter_map(|p| p.parse::<LevelFilter>().ok())
        .next_back();
    match level {
        None => parts.insert(0, DEFAULT),
        // What openraft says of its elections is for who looks for a mistake in them.
        Some(level) if level < LevelFilter::DEBUG => parts.insert(0, "openraft=off"),
        Some(_) => {}
    }
    EnvFilter::builder().parse(parts.join(",")).ok()
}

/// Writes events.
struct Lines {
    /// The node of events that name none: openraft's.
    node: String,
    form: Form,
    limit: Mutex<Limit>,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut said = Said::default();
        event.record(&mut said);
        let of = event.metadata();
        let text = self.text(of, &said);
        let mut limit = lock(&self.limit);
        let Some(left_out) = limit.pass(&compared(of, &text), Instant::now()) else {
            return Ok(());
        };
        drop(limit);
        match self.form {
            Form::Json => {
                let line = self.json(of, said, left_out).to_string();
                writeln!(to, "{}", shown_json(&line))
            }
            Form::Text => {
                let more = match left_out {
                    0 => String::new(),
                    1 => " (1 more time since)".to_owned(),
                    n => format!(" ({n} more times since)"),
                };
                writeln!(to, "{} {text}{more}", now())
            }
        }
    }
}

impl Lines {
    /// A line without its time.
    fn text(&self, of: &Metadata<'_>, said: &Said) -> String {
        let node = said.node.as_ref().unwrap_or(&self.node);
        let mut text = format!("{} node {node}: ", of.level());
        if let Some(v) = &said.volume {
            text += &format!("volume {v}: ");
        }
        if !is_ours(of) {
            text += &format!("{}: ", of.target());
        }
        text += &said.message;
        for (name, value) in &said.more {
            text += &format!(" {name}={}", plain(value.clone()));
        }
        shown(&text).into_owned()
    }

    fn json(&self, of: &Metadata<'_>, said: Said, left_out: u64) -> Value {
        let mut all: Map<String, Value> = said.more.into_iter().collect();
        let mut put = |name: &str, value: Value| all.insert(name.to_owned(), value);
        put("time", now().into());
        put("level", of.level().as_str().into());
        put("target", of.target().into());
        put(
            "node",
            said.node.unwrap_or_else(|| self.node.clone()).into(),
        );
        if let Some(v) = said.volume {
            put("volume", v.into());
        }
        put("message", said.message.into());
        if left_out > 0 {
            put("left_out", left_out.into());
        }
        Value::Object(all)
    }
}

fn is_ours(of: &Metadata<'_>) -> bool {
    of.target().starts_with("mojim")
}

/// The text by which lines are compared. openraft's warnings contain numbers that differ
/// each time: of requests, of waits.
fn compared<'a>(of: &Metadata<'_>, text: &'a str) -> Cow<'a, str> {
    if is_ours(of) || *of.level() > Level::WARN {
        return Cow::Borrowed(text);
    }
    let rest = text.chars().filter(|c| !c.is_ascii_digit());
    Cow::Owned(rest.collect())
}

/// The time of day in UTC, by RFC 3339, to the millisecond.
fn now() -> String {
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    match text.split_once('.') {
        Some((seconds, rest)) => format!("{seconds}.{:.3}Z", rest),
        None => text,
    }
}

/// What an event says.
#[derive(Default)]
struct Said {
    node: Option<String>,
    volume: Option<String>,
    message: String,
    more: Vec<(String, Value)>,
}

/// A value as people read it.
fn plain(value: Value) -> String {
    match value {
        Value::String(s) => s,
        other => other.to_string(),
    }
}

impl Said {
    fn put(&mut self, field: &Field, value: Value) {
        match field.name() {
            "node" => self.node = Some(plain(value)),
            "volume" => self.volume = Some(plain(value)),
            "message" => self.message = plain(value),
            name => self.more.push((name.to_owned(), value)),
        }
    }
}

impl Visit for Said {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }
}

/// How often the same text is written.
#[derive(Default)]
struct Limit {
    hash: RandomState,
    texts: HashMap<u64, SeenText>,
}

/// A text that came.
struct SeenText {
    /// The last `OFTEN` times that it came.
    came: VecDeque<Instant>,
    written: Instant,
    /// How often it was left out since then.
    left_out: u64,
}

impl Limit {
    /// Takes a text that comes. Returns how often it was left out since it was last
    /// written, or `None` if it is left out now, too.
    fn pass(&mut self, text: &str, now: Instant) -> Option<u64> {
        let key = self.hash.hash_one(text);
        if self.texts.len() >= MOST_TEXTS && !self.texts.contains_key(&key) {
            self.forget_one();
        }
        let known = self.texts.entry(key).or_insert_with(|| SeenText {
            came: VecDeque::with_capacity(OFTEN + 1),
            written: now,
            left_out: 0,
        });
        let of_late = |then: Instant| now.saturating_duration_since(then) < A_WHILE;
        let often = known.came.len() == OFTEN && of_late(known.came[0]);
        known.came.push_back(now);
        if known.came.len() > OFTEN {
            known.came.pop_front();
        }
        if often && of_late(known.written) {
            known.left_out += 1;
            return None;
        }
        known.written = now;
        Some(std::mem::take(&mut known.left_out))
    }

    /// Forgets the text that has not come for the longest time.
    fn forget_one(&mut self) {
        let oldest = self.texts.iter().min_by_key(|(_, known)| known.came.back());
        if let Some(key) = oldest.map(|(key, _)| *key) {
            self.texts.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Write};
    use std::sync::Arc;
    use tracing::{error, info, warn};

    /// What was written.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines that node `a` writes of what `f` does.
    fn lines(form: Form, said: &str, f: impl FnOnce()) -> Vec<String> {
        let written = Written::default();
        let to = written.clone();
        let filter = parse(said, true).unwrap();
        let s = subscriber("a", form, filter, move || to.clone());
        tracing::subscriber::with_default(s, f);
        let bytes = written.0.lock().unwrap().clone();
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn several() {
        info!(node = %"a", volume = %"v", code = "following", "following node b, epoch 3");
        warn!(node = %"a", "refused \"x\"\nnode a: all is well\x1b[2J");
        error!(target: "openraft::core", attempt = 7u64, "no leader");
        tracing::debug!(node = %"a", "not shown");
    }

    #[test]
    fn a_line_has_time_level_node_volume_and_message() {
        let found = lines(Form::Text, "openraft=warn", several);
        let (times, rest): (Vec<_>, Vec<_>) =
            found.iter().map(|l| l.split_once(' ').unwrap()).unzip();
        assert_eq!(
            rest,
            [
                "INFO node a: volume v: following node b, epoch 3 code=following",
                "WARN node a: refused \"x\"\\nnode a: all is well\\u{1b}[2J",
                "ERROR node a: openraft::core: no leader attempt=7",
            ]
        );
        for t in times {
            // 2026-11-24T23:26:12.345Z
            assert_eq!(t.len(), 24, "{t}");
            assert!(
                t.ends_with('Z') && &t[10..11] == "T" && &t[19..20] == ".",
                "{t}"
            );
            assert!(t[20..23].bytes().all(|b| b.is_ascii_digit()), "{t}");
        }
    }

    #[test]
    fn json_has_the_same_by_key() {
        let found = lines(Form::Json, "openraft=warn", several);
        let found: Vec<Value> = found
            .iter()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(found.len(), 3);
        let first = &found[0];
        for (key, value) in [
            ("level", "INFO"),
            ("node", "a"),
            ("volume", "v"),
            ("message", "following node b, epoch 3"),
            ("code", "following"),
        ] {
            assert_eq!(first[key], value, "{first}");
        }
        assert_eq!(first["time"].as_str().unwrap().len(), 24);
        assert_eq!(found[1].get("volume"), None);
        assert!(found[1]["message"].as_str().unwrap().contains('\n'));
        assert_eq!(found[2]["node"], "a");
        assert_eq!(found[2]["target"], "openraft::core");
        assert_eq!(found[2]["attempt"], 7);
    }

    /// A full disk had a daemon write 1,408 lines in ten seconds.
    #[test]
    fn the_same_line_comes_five_times_and_then_once_a_minute() {
        let again = || {
            for i in 0..1000 {
                warn!(node = %"a", volume = %"v", "node b is gone: no space left");
                if i % 500 == 0 {
                    info!(node = %"a", volume = %"v", "following node b, epoch {i}");
                }
            }
        };
        for form in [Form::Text, Form::Json] {
            let found = lines(form, DEFAULT, again);
            let gone = found.iter().filter(|l| l.contains("is gone")).count();
            let following = found.iter().filter(|l| l.contains("following")).count();
            assert_eq!((gone, following), (OFTEN, 2), "{found:#?}");
        }
    }

    /// With one of three voters away the leader's daemon wrote 220 lines in twelve seconds, of
    /// which none was the same as another.
    #[test]
    fn the_numbers_in_openrafts_warnings_do_not_count() {
        let again = || {
            for i in 0..100u64 {
                warn!(target: "openraft::replication", request_id = i, "no answer in {i}.5ms");
                tracing::debug!(target: "openraft::replication", request_id = i, "sent");
            }
        };
        let found = lines(Form::Text, "openraft=debug", again);
        let count = |what: &str| found.iter().filter(|l| l.contains(what)).count();
        assert_eq!((count("no answer"), count("sent")), (OFTEN, 100));
    }

    #[test]
    fn what_was_left_out_is_counted_and_told() {
        let (mut limit, begun) = (Limit::default(), Instant::now());
        let mut told = Vec::new();
        // Once a second for three minutes.
        for s in 0..180 {
            let now = begun + Duration::from_secs(s);
            if let Some(n) = limit.pass("again", now) {
                told.push((s, n));
            }
        }
        let first = [0, 1, 2, 3, 4].map(|s| (s, 0));
        assert_eq!(told, [&first[..], &[(64, 59), (124, 59)]].concat());
        // Much later: nothing more is left out, and what was is told.
        let late = begun + Duration::from_secs(1000);
        assert_eq!(limit.pass("again", late), Some(55));
        assert_eq!(limit.pass("again", late), Some(0));
        // A text that comes every quarter of a minute is never left out.
        for s in 0..100 {
            let now = late + Duration::from_secs(s * 15);
            assert_eq!(limit.pass("rarely", now), Some(0), "{s}");
        }
    }

    #[test]
    fn only_so_many_texts_are_known() {
        let (mut limit, now) = (Limit::default(), Instant::now());
        for i in 0..10_000u64 {
            let now = now + Duration::from_millis(i);
            assert_eq!(limit.pass(&format!("text {i}"), now), Some(0));
            // This one comes all the time, and is not forgotten.
            assert_eq!(limit.pass("again", now).is_some(), i < OFTEN as u64, "{i}");
        }
        assert_eq!(limit.texts.len(), MOST_TEXTS);
        let known = limit.texts.values().next().unwrap();
        assert!(known.came.capacity() <= 4 * OFTEN);
    }

    #[test]
    fn a_filter_is_a_list_of_levels_and_of_parts_with_theirs() {
        for bad in ["loud", "openraft=loud", "info,openraft", "=info=", "warn;x"] {
            let set = |name: &str| (name == OURS).then(|| OsString::from(bad));
            let e = filter(set)
                .err()
                .unwrap_or_else(|| panic!("{bad} was taken"));
            assert_eq!(e.code, 2);
            assert!(e.text.contains(OURS) && e.text.contains(bad), "{}", e.text);
        }
        let of = |ours: &str, other: &str| {
            let set = |name: &str| Some(OsString::from(if name == OURS { ours } else { other }));
            filter(set).unwrap().to_string()
        };
        let sorted = |text: String| {
            let mut parts: Vec<_> = text.split(',').map(str::to_owned).collect();
            parts.sort();
            parts.join(",")
        };
        for (ours, other, is) in [
            ("", " ", "info,openraft=off"),
            ("debug", "off", "debug"),
            ("", "hyper", "hyper=trace,info,openraft=off"),
            ("openraft=debug", "", "info,openraft=debug"),
            (" warn , openraft=off", "", "openraft=off,warn"),
        ] {
            assert_eq!(sorted(of(ours, other)), is, "{ours:?} {other:?}");
        }
    }

    #[test]
    fn who_asks_for_a_part_sees_the_rest_as_before() {
        let events = || {
            info!(node = %"a", "one");
            tracing::debug!(target: "openraft::core", "two");
            tracing::debug!(node = %"a", "three");
        };
        let found = lines(Form::Text, "openraft=debug", events);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].ends_with("one") && found[1].ends_with("openraft::core: two"));
        assert!(lines(Form::Text, "error", events).is_empty());
    }
}
