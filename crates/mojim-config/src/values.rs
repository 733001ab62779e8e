//! One value of a document each: text, numbers with units, paths, addresses.

use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use toml_edit::{Item, Value};

use crate::types::*;

const MAX_PATH: usize = 4095; // PATH_MAX without its NUL

pub(crate) fn read_str(item: &Item) -> Result<&str, String> {
    item.as_str()
        .ok_or_else(|| format!("wants a string, not {}", item.type_name()))
}

pub(crate) fn read_bool(item: &Item) -> Result<bool, String> {
    item.as_bool()
        .ok_or_else(|| format!("wants true or false, not {}", item.type_name()))
}

pub(crate) fn read_name(item: &Item) -> Result<String, String> {
    let name = read_str(item)?;
    checked_name(name).map(|()| name.to_owned())
}

pub(crate) fn read_rack(item: &Item) -> Result<String, String> {
    match read_str(item)? {
        "" => Err("is empty; name the rack, or remove the key".to_owned()),
        text if text.len() > MAX_NAME => Err(format!(
            "{} is too long; the most is {MAX_NAME} bytes",
            quoted(text)
        )),
        text => Ok(text.to_owned()),
    }
}

/// An element of a list: its offset in the text, and the name or what is wrong with it.
pub(crate) type Element = (usize, Result<String, String>);

pub(crate) fn read_list(item: &Item) -> Result<Vec<Element>, String> {
    let wants = |have| format!("wants a list of nodes ([\"a\", \"b\"]), not {have}");
    let list = item.as_array().ok_or_else(|| wants(item.type_name()))?;
    let element = |value: &Value| {
        let name = match value.as_str() {
            Some(name) => checked_name(name).map(|()| name.to_owned()),
            None => Err(format!("wants names of nodes, not {}", value.type_name())),
        };
        (value.span().map_or(0, |span| span.start), name)
    };
    Ok(list.iter().map(element).collect())
}

pub(crate) fn read_word<T: FromStr<Err = UnknownWord>>(item: &Item) -> Result<T, String> {
    read_str(item)?
        .parse()
        .map_err(|error: UnknownWord| error.to_string())
}

pub(crate) fn read_int(item: &Item, range: RangeInclusive<i64>) -> Result<u64, String> {
    let value = item
        .as_integer()
        .ok_or_else(|| format!("wants an integer, not {}", item.type_name()))?;
    match u64::try_from(value) {
        Ok(valid) if range.contains(&value) => Ok(valid),
        _ if *range.end() == i64::MAX => Err(format!(
            "{value} is too small; the least is {}",
            range.start()
        )),
        _ => Err(format!(
            "{value} is not between {} and {}",
            range.start(),
            range.end()
        )),
    }
}

/// An absolute path, without `.`, doubled slashes, or a slash at its end.
pub(crate) fn read_path(item: &Item) -> Result<PathBuf, String> {
    let text = read_str(item)?;
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err(format!(
            "{} is not an absolute path; begin it with /",
            quoted(text)
        ));
    }
    if text.contains('\0') || text.len() > MAX_PATH {
        return Err(format!("a path has at most {MAX_PATH} bytes and no NUL"));
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(format!(
            "{} has `..` in it; write the path without it",
            quoted(text)
        ));
    }
    Ok(path.components().collect())
}

/// The decimal number at the beginning of `text`, and the unit after it.
fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    Some((text[..end].parse().ok()?, text[end..].trim_start()))
}

pub(crate) fn read_size(item: &Item) -> Result<u64, String> {
    let bytes = match (item.as_integer(), item.as_str()) {
        (Some(bytes), _) => u64::try_from(bytes).map_err(|_| format!("{bytes} is not a size"))?,
        (_, Some(text)) => {
            let size = number_and_unit(text.trim()).and_then(|(number, unit)| {
                let shift = match unit {
                    "" | "B" => 0,
                    "KiB" => 10,
                    "MiB" => 20,
                    "GiB" => 30,
                    "TiB" => 40,
                    _ => return None,
                };
                number.checked_mul(1 << shift)
            });
            let what = "is not a size; write bytes, or a number with KiB, MiB, GiB or TiB";
            size.ok_or_else(|| format!("{} {what}", quoted(text)))?
        }
        _ => {
            return Err(format!(
                "wants a size such as \"64MiB\", not {}",
                item.type_name()
            ));
        }
    };
    if bytes > MAX_LOG {
        return Err(format!("{bytes} bytes is too large; the most is 1TiB"));
    }
    Ok(bytes)
}

pub(crate) fn read_memory(item: &Item) -> Result<u64, String> {
    let bytes = read_size(item)?;
    if bytes < MIN_MEMORY {
        return Err(format!("{bytes} bytes are too few; the least is 1MiB"));
    }
    Ok(bytes)
}

pub(crate) fn read_duration(
    item: &Item,
    range: RangeInclusive<Duration>,
) -> Result<Duration, String> {
    let Some(text) = item.as_str() else {
        return Err(format!(
            "wants a duration such as \"50ms\", not {}",
            item.type_name()
        ));
    };
    let time = number_and_unit(text.trim()).and_then(|(number, unit)| match unit {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    });
    match time {
        None => Err(format!(
            "{} is not a duration; write a number with us, ms or s",
            quoted(text)
        )),
        Some(time) if time.is_zero() => Err("must be longer than zero".to_owned()),
        Some(time) if time < *range.start() => Err(format!(
            "{} is too short; the least is {}",
            quoted(text),
            shown_time(*range.start())
        )),
        Some(time) if time > *range.end() => Err(format!(
            "{} is too long; the most is {}",
            quoted(text),
            shown_time(*range.end())
        )),
        Some(time) => Ok(time),
    }
}
