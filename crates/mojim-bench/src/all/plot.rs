//! Draws rows as a picture: lines over numbers, bars beside words.
//!
//! Invariant: text and axes have the colour of the page around them, so a picture is good on light
//! and dark.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::all::axis::{Axis, shown};
use crate::all::rows::{Row, X};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// What may go wrong in a picture: nothing that a reader could mend.
type Drawn = Result<(), String>;

const WIDTH: i32 = 760;
const LINE: i32 = 20;
const HEIGHT: i32 = 340;
/// Where bars begin.
const BARS_AT: i32 = 380;
/// Room for the value behind the longest bar.
const VALUE: i32 = 90;

/// Colours that are seen on light and on dark.
const PALETTE: [RGBColor; 10] = [
    RGBColor(59, 125, 216),
    RGBColor(217, 130, 43),
    RGBColor(46, 158, 91),
    RGBColor(200, 62, 94),
    RGBColor(138, 99, 210),
    RGBColor(150, 115, 75),
    RGBColor(26, 160, 168),
    RGBColor(215, 110, 190),
    RGBColor(130, 140, 150),
    RGBColor(160, 170, 40),
];
const GREY: RGBColor = RGBColor(128, 128, 128);

/// A range of coordinates with given ticks.
struct Scale {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (begin, end): (i32, i32)) -> i32 {
        let part = (value - self.range.start) / (self.range.end - self.range.start);
        begin + (part * f64::from(end - begin)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// How rows are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A line for each series over x.
    Lines,
    /// A bar for each row.
    Bars,
}

/// Text as it stands in HTML, also in an attribute.
pub(crate) fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// The series of rows, in their order.
fn series(rows: &[Row]) -> Vec<&str> {
    let mut all: Vec<&str> = Vec::new();
    for r in rows {
        if !all.contains(&&*r.series) {
            all.push(&r.series);
        }
    }
    all
}

/// The picture of rows, as SVG. There is at least one row.
pub(crate) fn draw(kind: Kind, title: &str, rows: &[Row]) -> Result<String, String> {
    let lines = match kind {
        Kind::Lines => series(rows).len(),
        Kind::Bars => rows.len(),
    };
    let height = match kind {
        Kind::Lines => HEIGHT + LINE * lines as i32,
        Kind::Bars => LINE * (lines as i32 + 3),
    };
    let mut svg = String::new();
    {
        let backend = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32));
        let area = backend.into_drawing_area();
        match kind {
            Kind::Lines => over_numbers(&area, rows)?,
            Kind::Bars => beside_words(&area, rows)?,
        }
        area.present().map_err(text_of)?;
    }
    Ok(finished(&svg, title))
}

fn text_of(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// With the page's colour for all that is black, a name for readers, and no size of its own.
fn finished(svg: &str, title: &str) -> String {
    let size = format!("<svg width=\"{WIDTH}\" height=\"");
    let rest = svg
        .trim_start()
        .strip_prefix(&size)
        .and_then(|r| r.split_once('"'));
    let rest = rest.map_or(svg, |(_, rest)| rest);
    let rest = rest.replace("#000000", "currentColor");
    let title = escaped(title);
    format!("<svg role=\"img\" aria-label=\"{title}\"{rest}")
}

fn font<'a>(size: i32) -> TextStyle<'a> {
    ("sans-serif", size).into_font().color(&BLACK)
}

/// Writes text whose left end, or another point, is at `at`.
fn write(area: &Area<'_>, text: &str, at: (i32, i32), from: HPos) -> Drawn {
    let style = font(16).pos(Pos::new(from, VPos::Center));
    let element = Text::new(text.to_owned(), at, style);
    area.draw(&element).map_err(text_of)
}

fn over_numbers(area: &Area<'_>, rows: &[Row]) -> Drawn {
    let number = |r: &Row| match r.x {
        X::Number(n) => n,
        X::Word(_) => 0.0,
    };
    let mut xs: Vec<f64> = rows.iter().map(number).collect();
    let ys: Vec<f64> = rows.iter().map(|r| r.y).collect();
    let (mut x, y) = (Axis::of(&xs, false), Axis::of(&ys, true));
    // What was measured are the ticks. A little room is beside the first and the last.
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    x.ticks = xs.iter().map(|v| x.at(*v)).collect();
    let (first, last) = (x.ticks[0], x.ticks[x.ticks.len() - 1]);
    let room = ((last - first) * 0.03).max(0.01);
    let (plot, legend) = area.split_vertically(HEIGHT);
    let mut chart = ChartBuilder::on(&plot)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(
            Scale {
                range: (first - room)..(last + room),
                ticks: x.ticks.clone(),
            },
            Scale {
                range: y.low..y.high,
                ticks: y.ticks.clone(),
            },
        )
        .map_err(text_of)?;
    chart
        .configure_mesh()
        .x_desc(&*rows[0].x_unit)
        .y_desc(y.unit(&rows[0].unit))
        .label_style(font(16))
        .axis_desc_style(font(16))
        .bold_line_style(GREY.mix(0.3))
        .x_label_formatter(&|v| shown(x.value(*v)))
        .y_label_formatter(&|v| shown(y.value(*v)))
        .draw()
        .map_err(text_of)?;
    for (i, name) in series(rows).into_iter().enumerate() {
        let color = PALETTE[i % PALETTE.len()];
        let of: Vec<&Row> = rows.iter().filter(|r| r.series == name).collect();
        let points = of.iter().map(|r| (x.at(number(r)), y.at(r.y)));
        let points: Vec<(f64, f64)> = points.collect();
        let line = PathElement::new(points.clone(), color.stroke_width(2));
        let dots = points
            .into_iter()
            .map(|p| Circle::new(p, 4, color.filled()));
        chart.draw_series([line]).map_err(text_of)?;
        chart.draw_series(dots).map_err(text_of)?;
        let at = LINE * i as i32 + LINE / 2;
        let mark = Circle::new((84, at), 5, color.filled());
        legend.draw(&mark).map_err(text_of)?;
        write(&legend, name, (98, at), HPos::Left)?;
    }
    Ok(())
}

fn beside_words(area: &Area<'_>, rows: &[Row]) -> Drawn {
    let ys: Vec<f64> = rows.iter().map(|r| r.y).collect();
    let axis = Axis::of(&ys, true);
    let room = WIDTH - BARS_AT - VALUE;
    let x = |value: f64| BARS_AT + (axis.part(value) * f64::from(room)) as i32;
    let bottom = LINE * rows.len() as i32 + 6;
    for tick in &axis.ticks {
        let value = axis.value(*tick);
        let line = vec![(x(value), 2), (x(value), bottom)];
        let line = PathElement::new(line, GREY.mix(0.3));
        area.draw(&line).map_err(text_of)?;
        write(
            area,
            &shown(value),
            (x(value), bottom + LINE / 2),
            HPos::Center,
        )?;
    }
    // A scheme has one colour on all memories.
    let scheme = |name: &'_ str| name.rsplit(": ").next().unwrap_or_default().to_owned();
    let mut schemes: Vec<String> = series(rows).into_iter().map(scheme).collect();
    schemes.sort();
    schemes.dedup();
    for (i, row) in rows.iter().enumerate() {
        let at = LINE * i as i32 + LINE / 2 + 2;
        let label = match &row.x {
            X::Word(w) => format!("{w}: {}", row.series),
            X::Number(_) => row.series.clone(),
        };
        let of = schemes.binary_search(&scheme(&row.series)).unwrap_or(0);
        let color = PALETTE[of % PALETTE.len()];
        write(area, &label, (BARS_AT - 8, at), HPos::Right)?;
        let zero = if axis.is_log { BARS_AT } else { x(0.0) };
        let ends = [(zero, at - 7), (x(row.y), at + 7)];
        area.draw(&Rectangle::new(ends, color.filled()))
            .map_err(text_of)?;
        write(
            area,
            &shown(row.y),
            (x(row.y).max(zero) + 6, at),
            HPos::Left,
        )?;
    }
    let unit = axis.unit(&rows[0].unit);
    write(
        area,
        &unit,
        (WIDTH - 8, bottom + LINE + LINE / 2),
        HPos::Right,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(series: &str, x: X, y: f64) -> Row {
        Row::new(series, (x, "B"), y, "us")
    }

    #[test]
    fn both_kinds_are_drawn_in_the_colours_of_the_page() {
        let numbers = [
            row("a <b>", X::Number(8.0), 1.0),
            row("a <b>", X::Number(4096.0), 200.0),
            row("c", X::Number(8.0), 3.0),
        ];
        let words = [row("a <b>", X::Word("w & x".into()), 1.0)];
        for (kind, rows) in [(Kind::Lines, &numbers[..]), (Kind::Bars, &words)] {
            let svg = draw(kind, "a \"title\"", rows).unwrap();
            let begin = "<svg role=\"img\" aria-label=\"a &quot;title&quot;\" viewBox=\"0 0 760 ";
            assert!(svg.starts_with(begin), "{svg}");
            assert!(svg.trim_end().ends_with("</svg>"));
            assert!(svg.contains("currentColor") && !svg.contains("#000000"));
            assert!(svg.contains("a &lt;b&gt;"), "{svg}");
        }
    }
}
