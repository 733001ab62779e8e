//! `mojim bench all`: every measurement, one after the other, and one report of them.
//!
//! - `all/plan.rs` has the measurements and their options, `all/needs.rs` what they need.
//! - `all/runner.rs` runs one and keeps its rows. `all/child.rs` has its process and its limit.
//! - `all/noise.rs` says how steady the machine is.
//! - `all/adapters.rs` makes the rows of each into those of the report (`all/rows.rs`).
//! - `all/catalog.rs` has the figures (`all/figures.rs`). `all/plot.rs` draws them with the axes of
//!   `all/axis.rs`, and `all/page.rs` makes the page.
//! - `all/machine.rs` describes the machine. `all/origin.rs` tells rows of another one.
//! - `all/place.rs` has the directory of the report.
//!
//! Invariant: a measurement that fails or is skipped keeps no other one from its turn, and stands
//! in the report.

pub(crate) mod adapters;
mod axis;
mod catalog;
mod child;
mod figures;
mod machine;
mod needs;
mod noise;
mod origin;
mod page;
mod place;
pub(crate) mod plan;
mod plot;
mod rows;
mod runner;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::builder::PossibleValuesParser;
use mojim_cli::failure::{Done, Failure, say_on_stderr};

use adapters::{AGAIN, STATE};
use machine::Machine;
use noise::{Noise, Point};
use origin::Origin;
use place::{Place, remove};
use plan::{Length, PLAN, Planned};
use rows::{Measurement, Results, Row, Settings};
use runner::{Made, Runner};

/// Measure everything, and make one report: JSON, CSV, and a page with figures.
///
/// Each measurement leaves a file of rows as it ends. The same command takes the files that are
/// there and measures the rest. A measurement that needs something which is not here is skipped.
///
/// The report has results.json, results.csv and index.html, and the figures as SVG. The exit
/// status is 1 if a measurement failed.
#[derive(clap::Args)]
pub struct All {
    /// Take under three minutes.
    #[arg(long, group = "length")]
    quick: bool,
    /// Take under forty-five minutes. This is the default.
    #[arg(long, group = "length")]
    standard: bool,
    /// Take hours, with as many operations as the papers have.
    #[arg(long, group = "length")]
    paper: bool,
    /// Take the least of everything, for tests.
    #[arg(long, group = "length", hide = true)]
    tiny: bool,
    /// The directory of the report. It is made if it is not there.
    #[arg(long, value_name = "DIR", default_value = "mojim-report")]
    report: PathBuf,
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only these measurements, separated by commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = PossibleValuesParser::new(plan::names()))]
    only: Vec<String>,
    /// Not these measurements, separated by commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = PossibleValuesParser::new(plan::names()))]
    skip: Vec<String>,
    /// Measure again where a file of rows is there.
    #[arg(long)]
    anew: bool,
}

impl All {
    /// Runs it.
    pub fn run(self) -> Done {
        let begin = Instant::now();
        let dir = self.dir.clone().unwrap_or_else(std::env::temp_dir);
        child::end_on_signals()?;
        let place = Place::take(&self.report)?;
        let rows = place.directory("rows")?;
        let mut machine = Machine::here(&dir);
        let runner = Runner {
            origin: Origin::here(&machine)?,
            limit: self.length().limit(),
        };
        let mut points = vec![Point::now("begin")];
        let wanted: Vec<&Planned> = PLAN.iter().filter(|p| self.wants(p.name)).collect();
        let mut measurements = Vec::new();
        for (i, p) in wanted.iter().enumerate() {
            let so_far = begin.elapsed().as_secs();
            say(&format!(
                "{}, {} of {}, {so_far} s so far",
                p.name,
                i + 1,
                wanted.len()
            ));
            let (m, calm) = self.one(p, &dir, &rows, &runner);
            say(&ending(&m));
            measurements.push(m);
            points.extend(calm);
        }
        points.push(Point::now("end"));
        machine.load_end = machine::load();
        let results = Results {
            format: rows::FORMAT.to_owned(),
            version: rows::VERSION,
            machine,
            settings: self.settings(&dir),
            noise: Noise::of(points),
            measurements,
        };
        self.write(&results, &place)?;
        let failed = results.measurements.iter().any(|m| m.failed.is_some());
        Ok(u8::from(failed))
    }

    fn wants(&self, name: &str) -> bool {
        let among = |list: &[String]| list.iter().any(|n| n == name);
        (self.only.is_empty() || among(&self.only)) && !among(&self.skip)
    }

    fn length(&self) -> Length {
        match () {
            () if self.tiny => Length::Tiny,
            () if self.quick => Length::Quick,
            () if self.paper => Length::Paper,
            () => Length::Standard,
        }
    }

    fn settings(&self, dir: &Path) -> Settings {
        Settings {
            length: self.length().name().to_owned(),
            program: origin::program(),
            directory: dir.to_string_lossy().into_owned(),
            only: self.only.clone(),
            skip: self.skip.clone(),
        }
    }

    /// One measurement: taken, skipped, made or failed. Also how steady the machine was then.
    fn one(
        &self,
        p: &Planned,
        dir: &Path,
        rows: &Path,
        runner: &Runner,
    ) -> (Measurement, Option<Point>) {
        let parts = runner::parts(p, self.length(), dir);
        let file = rows.join(p.name).with_extension("json");
        let mut m = Measurement {
            name: p.name.to_owned(),
            command: runner::command(&parts),
            seconds: 0.0,
            taken: false,
            skipped: None,
            failed: None,
            notes: Vec::new(),
            rows: Vec::new(),
        };
        if self.anew
            && let Err(e) = remove(&file)
        {
            m.failed = Some(format!("{}: {e}", file.display()));
            return (m, None);
        }
        let earlier = runner.earlier(&file, &parts);
        m.taken = earlier.is_some();
        let made = match earlier {
            Some(made) => Ok(made),
            None if parts.is_empty() => {
                let length = self.length().name();
                m.skipped = Some(format!("takes too long for the length {length}"));
                return (m, None);
            }
            None => match p.needs.iter().find_map(|n| n.missing()) {
                Some(text) => {
                    m.skipped = Some(text);
                    return (m, None);
                }
                None => runner.measure(p.name, &parts, &file),
            },
        };
        match made.and_then(|made| Ok((adapted(p, &made)?, made))) {
            Ok((rows, made)) => {
                m.seconds = made.parts.iter().map(|part| part.seconds).sum();
                m.notes = made
                    .parts
                    .iter()
                    .flat_map(|part| part.notes.clone())
                    .collect();
                m.rows = rows;
                (m, Some(made.calm))
            }
            Err(why) => {
                m.failed = Some(why);
                (m, None)
            }
        }
    }

    /// Writes the report.
    fn write(&self, r: &Results, place: &Place) -> Result<(), Failure> {
        let figures = place.directory("figures")?;
        let page = page::page(r).map_err(Failure::failed)?;
        let (mut files, mut stale) = (Vec::new(), Vec::new());
        for f in catalog::figures() {
            let name = format!("{}.svg", f.id);
            match page.pictures.iter().find(|(id, _)| *id == f.id) {
                Some((_, svg)) => {
                    files.push((Path::new("figures").join(name), svg.clone().into_bytes()))
                }
                // That of an earlier run would be taken for one of this.
                None => stale.push(figures.join(name)),
            }
        }
        let csv = rows::csv(&r.measurements).into_bytes();
        files.push(("results.csv".into(), csv));
        files.push(("index.html".into(), page.html.into_bytes()));
        files.push(("results.json".into(), serde_json::to_vec_pretty(r)?));
        place.put(&files)?;
        for file in stale {
            remove(&file)?;
        }
        if let Some(warning) = &r.noise.warning {
            say(warning);
        }
        let index = self.report.join("index.html");
        say(&format!("the report is {}", index.display()));
        Ok(())
    }
}

fn say(text: &str) {
    say_on_stderr(text);
}

/// How a measurement ended, for people.
fn ending(m: &Measurement) -> String {
    let name = &m.name;
    match (&m.skipped, &m.failed) {
        (Some(why), _) => format!("{name}: skipped: {why}"),
        (_, Some(why)) => format!("{name}: failed: {why}"),
        _ if m.taken => format!("{name}: {} rows of an earlier run", m.rows.len()),
        _ => format!("{name}: {} rows in {:.1} s", m.rows.len(), m.seconds),
    }
}

/// The report's rows of a measurement.
fn adapted(p: &Planned, made: &Made) -> Result<Vec<Row>, String> {
    let mut all: Vec<Row> = Vec::new();
    for part in &made.parts {
        for row in &part.rows {
            all.extend((p.adapter)(&part.label, row)?);
        }
    }
    mark_repeats(&mut all);
    Ok(all)
}

/// Marks rows of a case that was measured before, beside other cases.
fn mark_repeats(all: &mut [Row]) {
    for i in 1..all.len() {
        let (before, rest) = all.split_at_mut(i);
        let row = &mut rest[0];
        let same = |r: &Row| {
            (&r.series, &r.x, &r.unit) == (&row.series, &row.x, &row.unit)
                && r.marks.iter().filter(|m| *m != AGAIN).eq(&row.marks)
        };
        if !row.has(STATE) && before.iter().any(same) {
            row.marks.push(AGAIN.to_owned());
        }
    }
}
