//! Commands that a message advises, as you can type them.
//!
//! Owns the configuration file that was given to this command. Messages come from all crates, and
//! from nodes. They name a command between backticks, without the file: where they are shown, the
//! file goes into them here. Beside other volumes, the volume's name does too.

use std::borrow::Cow;
use std::path::Path;
use std::sync::OnceLock;

/// The subcommands that need a configuration file.
const WITH_FILE: [&str; 11] = [
    "config", "export", "import", "keys", "mount", "node", "promote", "repair", "replace",
    "status", "verify",
];
/// Those that need no further argument.
const COMPLETE: [&str; 3] = ["config", "status", "verify"];
/// The subcommands that need the name of a volume, if the file has several.
const WITH_VOLUME: [&str; 7] = [
    "export", "import", "mount", "promote", "repair", "run", "verify",
];
/// Options that a message may name without their value: it advises no such command.
const VALUED: [&str; 5] = ["--name", "--same-name", "--with", "--address", "--renew"];
/// A command as a message has it.
const BEGINS: &str = "`mojim ";

static GIVEN: OnceLock<String> = OnceLock::new();

/// From now on the commands that this process advises name this file. A process is given one.
pub fn given(file: &Path) {
    GIVEN.get_or_init(|| quoted(&file.display().to_string()));
}

/// `text`, whose commands name the file that was given, if one was.
pub fn typed(text: &str) -> Cow<'_, str> {
    match GIVEN.get() {
        Some(file) => with_file(text, file),
        None => Cow::Borrowed(text),
    }
}

/// A word for the shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// `text`, whose commands name this volume.
pub fn with_volume<'a>(text: &'a str, volume: &str) -> Cow<'a, str> {
    inserted(
        text,
        &format!("--volume {}", quoted(volume)),
        |name, own| {
            WITH_VOLUME.contains(&name) && is_whole(name, own) && !own.contains(&"--volume")
        },
    )
}

fn with_file<'a>(text: &'a str, file: &str) -> Cow<'a, str> {
    inserted(text, &format!("--config {file}"), |name, own| {
        is_whole(name, own) && !own.contains(&"--config")
    })
}

/// `text` with `more` in each command for which `lacks` holds, by its subcommand and its own
/// arguments. Those behind `--` are another program's.
fn inserted<'a>(text: &'a str, more: &str, lacks: impl Fn(&str, &[&str]) -> bool) -> Cow<'a, str> {
    let mut parts = text.split(BEGINS);
    let mut all = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        all.push_str(BEGINS);
        let (command, _) = part.split_once('`').unwrap_or((part, ""));
        let mut words = command.split_whitespace();
        let name = words.next().unwrap_or("");
        let own: Vec<&str> = words.take_while(|w| *w != "--").collect();
        if part.starts_with(name) && lacks(name, &own) {
            all.push_str(&format!("{name} {more}{}", &part[name.len()..]));
        } else {
            all.push_str(part);
        }
    }
    match all == text {
        true => Cow::Borrowed(text),
        false => Cow::Owned(all),
    }
}

/// Whether a command cannot be typed for want of the file, or the volume, alone. One that is named
/// without its arguments is no advice to type it.
fn is_whole(name: &str, own: &[&str]) -> bool {
    let is_open = own.last().is_some_and(|last| VALUED.contains(last));
    let has_all = match name {
        "run" => own.contains(&"--name"),
        name if COMPLETE.contains(&name) => true,
        name => WITH_FILE.contains(&name) && !own.is_empty(),
    };
    has_all && !is_open
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Advice was to be pasted, and ended with "the following required arguments were not
    /// provided: --config <FILE>".
    #[test]
    fn advised_commands_name_the_file() {
        let is = |text: &str, typed: &str| assert_eq!(with_file(text, "/etc/m.toml"), typed);
        is(
            "run `mojim promote --name b --wait`: then `mojim verify`",
            "run `mojim promote --config /etc/m.toml --name b --wait`: then `mojim verify --config /etc/m.toml`",
        );
        is(
            "`mojim run --name a -- ./program`",
            "`mojim run --config /etc/m.toml --name a -- ./program`",
        );
        is(
            "`mojim run --name a -- ./program --config its.own`",
            "`mojim run --config /etc/m.toml --name a -- ./program --config its.own`",
        );
        for same in [
            "programs under `mojim run`, `mojim run --preload`, your last `mojim promote`",
            "`mojim keys --config other.toml --renew b`",
            "`mojim replace --same-name` with this node's name",
            "`mojim run -- ./program --name a`",
            "`mojim heap check`, `mojim demo`, `keys`, `mojim`, mojim promote --name b",
            "",
        ] {
            is(same, same);
        }
        assert_eq!(quoted("/a/b.toml"), "/a/b.toml");
        assert_eq!(quoted("a b's"), r"'a b'\''s'");
    }

    /// Beside another volume, advice that was pasted ended with the question which volume it is.
    #[test]
    fn advised_commands_name_the_volume() {
        let is = |text: &str, typed: &str| assert_eq!(with_volume(text, "v"), typed);
        is(
            "`mojim verify`, then `mojim promote --name b --wait`, `mojim import --name a FILE`",
            "`mojim verify --volume v`, then `mojim promote --volume v --name b --wait`, `mojim import --volume v --name a FILE`",
        );
        for same in [
            "`mojim repair --anew --name a --volume w`, your last `mojim promote`, `mojim run`",
            "`mojim node --name a`, `mojim replace --same-name w`, `mojim keys --renew a`",
        ] {
            is(same, same);
        }
    }

    /// A new subcommand with a configuration file, or a volume, is known here.
    #[test]
    fn all_commands_with_a_file_are_known() {
        let command = crate::command();
        let with = |argument: &str, but: &[&str]| {
            let has = |c: &&clap::Command| c.get_arguments().any(|a| a.get_id() == argument);
            let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
            let mut names: Vec<&str> = shown.filter(has).map(clap::Command::get_name).collect();
            names.sort_unstable();
            names.retain(|n| !but.contains(n));
            names
        };
        assert_eq!(with("config", &["clean", "run"]), WITH_FILE);
        // `status` shows all volumes.
        assert_eq!(with("volume", &["status"]), WITH_VOLUME);
    }
}
