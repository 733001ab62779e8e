//! How often a mount commits what no program syncs, as people say it.

use std::time::Duration;

/// How often is committed what no program syncs.
#[derive(Debug, Clone, Copy)]
pub struct Interval(pub Option<Duration>);

/// As on a command line.
pub fn interval(text: &str) -> Result<Interval, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.01..=86_400.0).contains(&s) => Ok(Interval(Some(Duration::from_secs_f64(s)))),
        Err(_) if text == "never" => Ok(Interval(None)),
        _ => Err("from 0.01 to 86400 seconds, or never".into()),
    }
}
