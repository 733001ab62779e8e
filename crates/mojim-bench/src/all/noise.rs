//! How steady the machine is: a short loop of a fixed length, timed again and again.
//!
//! The loop uses no memory and makes no system call. So its time changes with the processor's
//! clock, and with others that take the processor. Figures of a machine on which it changes much
//! are no ground for a claim.

use std::hint::black_box;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Turns of a loop: a fraction of a millisecond.
const TURNS: u64 = 250_000;
/// Loops at a point in time.
const LOOPS: usize = 40;
/// A spread or a drift above this is too much for a claim.
const MOST: f64 = 0.1;

/// The loop at one point in time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// `begin`, `end`, or the measurement that has just ended.
    pub(crate) at: String,
    pub(crate) median_us: f64,
    /// The time that lies between the tenth and the ninetieth percentile, divided by the median.
    pub(crate) spread: f64,
}

impl Point {
    /// Times the loop now.
    pub(crate) fn now(at: &str) -> Point {
        let times = (0..LOOPS).map(|_| {
            let begin = Instant::now();
            let mut sum = 1u64;
            for i in 0..TURNS {
                sum = black_box(sum.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(i));
            }
            black_box(sum);
            begin.elapsed().as_secs_f64() * 1e6
        });
        Point::of(at, times.collect())
    }

    fn of(at: &str, mut times: Vec<f64>) -> Point {
        times.sort_by(f64::total_cmp);
        let part = |tenths: usize| times[(times.len() - 1) * tenths / 10];
        Point {
            at: at.to_owned(),
            median_us: part(5),
            spread: (part(9) - part(1)) / part(5),
        }
    }
}

/// All points, and whether they allow a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Noise {
    pub(crate) points: Vec<Point>,
    /// The widest spread of a point.
    pub(crate) spread: f64,
    /// The slowest point's median divided by the quickest one's, less 1.
    pub(crate) drift: f64,
    /// Text for people, if either is too high.
    pub(crate) warning: Option<String>,
}

impl Noise {
    /// That of these points.
    pub(crate) fn of(points: Vec<Point>) -> Noise {
        let spread = points.iter().map(|p| p.spread).fold(0.0, f64::max);
        let medians = || points.iter().map(|p| p.median_us);
        let (least, most) = (
            medians().fold(f64::MAX, f64::min),
            medians().fold(0.0, f64::max),
        );
        let drift = match points.len() {
            0 => 0.0,
            _ => most / least - 1.0,
        };
        let warning = (spread > MOST || drift > MOST).then(|| {
            format!(
                "This machine is too noisy for claims. A loop of fixed length varies by {:.0} %, \
                 and its median drifts by {:.0} %. At most {:.0} % are fit for a claim.",
                spread * 100.0,
                drift * 100.0,
                MOST * 100.0
            )
        });
        Noise {
            points,
            spread,
            drift,
            warning,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(median_us: f64, spread: f64) -> Point {
        Point {
            at: "x".into(),
            median_us,
            spread,
        }
    }

    #[test]
    fn a_wide_spread_and_a_drift_each_warn() {
        assert_eq!(
            Noise::of(vec![point(10.0, 0.05), point(10.5, 0.1)]).warning,
            None
        );
        let wide = Noise::of(vec![point(10.0, 0.05), point(10.0, 0.3)]);
        assert_eq!(wide.spread, 0.3);
        assert!(wide.warning.unwrap().contains("30 %"));
        let drift = Noise::of(vec![point(10.0, 0.0), point(12.0, 0.0)]);
        assert!(drift.warning.unwrap().contains("20 %"));
        assert_eq!(Noise::of(Vec::new()).warning, None);
    }

    #[test]
    fn the_spread_leaves_single_disturbances_out() {
        let mut times = vec![10.0; 39];
        times.push(1000.0);
        assert_eq!(Point::of("x", times).spread, 0.0);
        let halves = [vec![10.0; 20], vec![15.0; 20]].concat();
        assert_eq!(Point::of("x", halves).spread, 0.5);
        assert!(Point::now("begin").median_us > 0.0);
    }
}
