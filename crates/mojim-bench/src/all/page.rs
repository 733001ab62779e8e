//! The page of a report: all figures with their tables, in one file without scripts or links.
//!
//! Invariants:
//!
//! - Each figure carries its rows as JSON, the same ones that `results.json` has.
//! - Text of measurements is escaped wherever it stands.

use crate::all::axis::shown;
use crate::all::catalog::figures;
use crate::all::figures::{Claim, Data, Figure, Ours};
use crate::all::origin::DEBUG;
use crate::all::plot::{draw, escaped};
use crate::all::rows::{Measurement, Results, Row};

const STYLE: &str = "
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h2 { margin-top: 3rem; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; margin: 1rem 0; }
th, td { text-align: left; padding: 0.15rem 0.8rem 0.15rem 0; border-bottom: 1px solid var(--line); }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--soft); padding: 0.6rem; overflow-x: auto; white-space: pre-wrap; }
figure { margin: 1rem 0; }
.told { border-left: 4px solid #d9822b; padding-left: 0.8rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } }
";

/// The style of a picture in a file of its own.
const ALONE: &str = "<style>svg { color: #222; background: #fff } \
     @media (prefers-color-scheme: dark) { svg { color: #ddd; background: #181818 } }</style>";

/// A page, and the pictures in it by the names of their figures.
pub(crate) struct Page {
    pub(crate) html: String,
    pub(crate) pictures: Vec<(&'static str, String)>,
}

/// The page of these results.
pub(crate) fn page(r: &Results) -> Result<Page, String> {
    let mut pictures = Vec::new();
    let mut body = format!("<h1>Mojim: the evaluation</h1>\n{}{}", told(r), machine(r));
    body += &measured(&r.measurements);
    body += &emulator(&r.measurements);
    body += &contents(r);
    for f in figures() {
        let data = f.data(&r.measurements);
        let svg = match data.rows.is_empty() {
            true => None,
            false => Some(draw(f.kind, f.title, &data.rows)?),
        };
        body += &section(f, &data, svg.as_deref(), &r.measurements)?;
        pictures.extend(svg.map(|svg| (f.id, alone(&svg))));
    }
    let html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Mojim: the evaluation</title>\n<style>{STYLE}</style>\n</head>\n\
         <body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    );
    Ok(Page { html, pictures })
}

/// A picture as a file: it names its language, and has colours of its own.
fn alone(svg: &str) -> String {
    match svg.split_once('>') {
        Some((begin, rest)) => format!("{begin}>{ALONE}{rest}"),
        None => svg.to_owned(),
    }
}

/// The warnings that hold for all figures.
fn told(r: &Results) -> String {
    let debug = r.settings.program.ends_with(DEBUG);
    let debug =
        debug.then(|| "A debug build measured this, so it is slower than the product.".to_owned());
    let all = r.noise.warning.iter().chain(&debug);
    all.map(|text| paragraph("told", text)).collect()
}

fn paragraph(class: &str, text: &str) -> String {
    format!("<p class=\"{class}\">{}</p>\n", escaped(text))
}

/// A table without headings: words beside values.
fn pairs(rows: &[(&str, String)]) -> String {
    let row = |(name, value): &(&str, String)| {
        format!(
            "<tr><th>{}</th><td>{}</td></tr>\n",
            escaped(name),
            escaped(value)
        )
    };
    format!(
        "<table>\n{}</table>\n",
        rows.iter().map(row).collect::<String>()
    )
}

fn machine(r: &Results) -> String {
    let m = &r.machine;
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let is_virtual = if m.is_virtual { "yes" } else { "not seen" };
    pairs(&[
        ("processor", m.cpu.clone()),
        ("processors for this process", m.cores.to_string()),
        (
            "memory",
            format!("{:.1} GiB", m.memory_bytes as f64 / (1u64 << 30) as f64),
        ),
        ("kernel", m.kernel.clone()),
        ("file system that is measured", m.file_system.clone()),
        ("clock", m.clock_source.clone()),
        ("virtual machine", is_virtual.to_owned()),
        (
            "load, begin and end",
            format!("{} and {}", m.load_begin, m.load_end),
        ),
        ("spread of a loop of fixed length", percent(r.noise.spread)),
        ("drift of its median", percent(r.noise.drift)),
        ("length", r.settings.length.clone()),
        ("version", r.settings.program.clone()),
    ])
}

/// The measurements: which there are, and which not.
fn measured(all: &[Measurement]) -> String {
    let mut text = String::from(
        "<h2>Measurements</h2>\n<table>\n\
         <tr><th>name</th><th>rows</th><th>seconds</th><th>remarks</th></tr>\n",
    );
    for m in all {
        let remark = match (&m.skipped, &m.failed) {
            (Some(why), _) => format!("skipped: {why}"),
            (_, Some(why)) => format!("failed: {why}"),
            _ if m.taken => "taken from an earlier run".to_owned(),
            _ => String::new(),
        };
        let (name, rows, remark) = (escaped(&m.name), m.rows.len(), escaped(&remark));
        text += &format!(
            "<tr><td>{name}</td><td class=\"n\">{rows}</td><td class=\"n\">{}</td>\
             <td>{remark}</td></tr>\n",
            m.seconds
        );
    }
    text + "</table>\n"
}

/// The model of the emulated memory, in the emulator's own words.
fn emulator(all: &[Measurement]) -> String {
    let of = all.iter().filter(|m| m.name.starts_with("nvmm"));
    let notes: Vec<&str> = of.flat_map(|m| &m.notes).map(|n| &**n).collect();
    if notes.is_empty() {
        return String::new();
    }
    format!(
        "<h2>The emulated memory</h2>\n<p>No non-volatile memory is in this machine. A software \
         model adds its delays. The names and their figures are those of the slides \
         (&quot;Evaluation Configurations&quot;), and PMEP&#39;s those of the Mojim paper (6.1). Where a \
         flush instruction costs nothing here, the read latency of PDRAM stands in for a line \
         by clflush, and a ninth of it for the others (Intel&#39;s optimization manual).</p>\n\
         <pre>{}</pre>\n",
        escaped(&notes.join("\n"))
    )
}

fn contents(r: &Results) -> String {
    let line = |f: &Figure| {
        let count = f.data(&r.measurements).rows.len();
        let rows = if count == 0 { " (no rows)" } else { "" };
        let (title, source) = (escaped(f.title), escaped(f.source));
        format!(
            "<li><a href=\"#{}\">{title}</a>, {source}{rows}</li>\n",
            f.id
        )
    };
    let all: String = figures().map(line).collect();
    format!("<h2>Figures</h2>\n<ol>\n{all}</ol>\n")
}

fn section(
    f: &Figure,
    data: &Data,
    svg: Option<&str>,
    all: &[Measurement],
) -> Result<String, String> {
    let mut text = format!(
        "<section id=\"{}\">\n<h2>{}</h2>\n<p>Source: {}.</p>\n",
        f.id,
        escaped(f.title),
        escaped(f.source)
    );
    match svg {
        Some(svg) => text += &format!("<figure>\n{svg}</figure>\n"),
        None => text += &paragraph("told", &f.missing(all)),
    }
    if !f.claims.is_empty() {
        text += &claims(f.claims, &data.rows);
    }
    if !data.rows.is_empty() {
        text += &table(&data.rows);
    }
    text += &format!("<p>Not like for like: {}</p>\n", escaped(f.unlike));
    if let Some(m) = f.found(all) {
        text += &format!("<pre>{}</pre>\n", escaped(&m.command));
    }
    // In a script only the end of its element is special.
    let json = serde_json::to_string(data).map_err(|e| e.to_string())?;
    let json = json.replace('<', "\\u003c");
    text += &format!(
        "<script type=\"application/json\" id=\"data-{}\">{json}</script>\n</section>\n",
        f.id
    );
    Ok(text)
}

/// The documents' values beside ours.
fn claims(all: &[Claim], rows: &[Row]) -> String {
    let row = |c: &Claim| {
        let ours = match (c.here(rows), c.ours) {
            (Some(n), _) => shown(n),
            (None, Ours::Nothing) => "not comparable".to_owned(),
            (None, _) => "not measured".to_owned(),
        };
        let (text, paper) = (escaped(c.text), escaped(c.paper));
        format!("<tr><td>{text}</td><td>{paper}</td><td>{ours}</td></tr>\n")
    };
    let rows: String = all.iter().map(row).collect();
    format!(
        "<table>\n<tr><th>what is compared</th><th>in the document</th><th>here</th></tr>\n\
         {rows}</table>\n"
    )
}

fn table(rows: &[Row]) -> String {
    let number = |n: Option<f64>| n.map_or(String::new(), shown);
    let row = |r: &Row| {
        let x = format!("{} {}", r.x, r.x_unit);
        let y = format!("{} {}", shown(r.y), r.unit);
        let cells = [
            ("", r.series.clone()),
            (" class=\"n\"", x),
            (" class=\"n\"", y),
            (" class=\"n\"", number(r.low)),
            (" class=\"n\"", number(r.high)),
            (" class=\"n\"", number(r.ratio)),
            ("", r.ratio_to.clone().unwrap_or_default()),
            ("", r.marks.join(", ")),
        ];
        let cells = cells.map(|(class, text)| format!("<td{class}>{}</td>", escaped(text.trim())));
        format!("<tr>{}</tr>\n", cells.concat())
    };
    let all: String = rows.iter().map(row).collect();
    format!(
        "<details>\n<summary>Numbers</summary>\n<table>\n<tr><th>series</th><th>x</th><th>y</th>\
         <th>low</th><th>high</th><th>ratio</th><th>to</th><th>marks</th></tr>\n{all}</table>\n\
         </details>\n"
    )
}
