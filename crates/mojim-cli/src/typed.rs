//! Commands that a message advises, as you can type them.
//!
//! Owns the configuration file that was given to this command. Messages come from all crates, and
//! from nodes. They name a command between backticks, without the file: where they are shown, the
//! file goes into them here.

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

fn with_file<'a>(text: &'a str, file: &str) -> Cow<'a, str> {
    let mut parts = text.split(BEGINS);
    let mut all = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        all.push_str(BEGINS);
        let (command, _) = part.split_once('`').unwrap_or((part, ""));
        let (name, more) = command.split_once(' ').unwrap_or((command, ""));
        if lacks_file(name, more) {
            all.push_str(&format!("{name} --config {file}{}", &part[name.len()..]));
        } else {
            all.push_str(part);
        }
    }
    match all == text {
        true => Cow::Borrowed(text),
        false => Cow::Owned(all),
    }
}

/// Whether a command cannot be typed for want of the file alone. One that is named without its
/// arguments is no advice to type it.
fn lacks_file(name: &str, more: &str) -> bool {
    let is_whole = match name {
        "run" => more.contains("--name"),
        name if COMPLETE.contains(&name) => true,
        name => WITH_FILE.contains(&name) && !more.is_empty(),
    };
    is_whole && !more.contains("--config")
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
        for same in [
            "programs under `mojim run`, `mojim run --preload`, your last `mojim promote`",
            "`mojim keys --config other.toml --renew b`",
            "`mojim heap check`, `mojim demo`, `keys`, `mojim`, mojim promote --name b",
            "",
        ] {
            is(same, same);
        }
        assert_eq!(quoted("/a/b.toml"), "/a/b.toml");
        assert_eq!(quoted("a b's"), r"'a b'\''s'");
    }

    /// A new subcommand with a configuration file is known here.
    #[test]
    fn all_commands_with_a_file_are_known() {
        let command = crate::command();
        let has_file = |c: &&clap::Command| c.get_arguments().any(|a| a.get_id() == "config");
        let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
        let mut names: Vec<&str> = shown
            .filter(has_file)
            .map(clap::Command::get_name)
            .collect();
        names.sort_unstable();
        names.retain(|n| !["clean", "run"].contains(n));
        assert_eq!(names, WITH_FILE);
    }
}
