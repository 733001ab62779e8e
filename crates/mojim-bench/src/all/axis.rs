//! An axis of a picture: its ends and its ticks.
//!
//! Invariant: an axis is logarithmic if its values span more than a factor of [`WIDE`], and all
//! are above 0.

/// The largest factor that a linear axis shows.
const WIDE: f64 = 20.0;

/// An axis: a coordinate is the value, or its logarithm to the base of ten.
pub(crate) struct Axis {
    pub(crate) is_log: bool,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) ticks: Vec<f64>,
}

impl Axis {
    /// One that shows all of `values`. `from_zero`: a linear one begins at 0.
    pub(crate) fn of(values: &[f64], from_zero: bool) -> Axis {
        let low = values.iter().copied().fold(f64::MAX, f64::min);
        let high = values.iter().copied().fold(f64::MIN, f64::max);
        if low > 0.0 && high / low > WIDE {
            let (low, high) = (low.log10(), high.log10());
            let decades = (low.floor() as i32)..=(high.ceil() as i32);
            return Axis {
                is_log: true,
                low: low.floor(),
                high: high.ceil(),
                ticks: decades.map(f64::from).collect(),
            };
        }
        let (low, high) = match from_zero {
            true => (low.min(0.0), high.max(0.0)),
            false => (low, high),
        };
        // One value alone has some room, too.
        let range = (high - low).max(high.abs() * 0.01).max(1e-9);
        let step = step(range);
        let (first, last) = ((low / step).floor() as i64, (high / step).ceil() as i64);
        let last = last.max(first + 1);
        Axis {
            is_log: false,
            low: first as f64 * step,
            high: last as f64 * step,
            ticks: (first..=last).map(|i| i as f64 * step).collect(),
        }
    }

    pub(crate) fn at(&self, value: f64) -> f64 {
        match self.is_log {
            true => value.log10(),
            false => value,
        }
    }

    pub(crate) fn value(&self, coordinate: f64) -> f64 {
        match self.is_log {
            true => 10f64.powf(coordinate),
            false => coordinate,
        }
    }

    /// The unit as it stands at the axis.
    pub(crate) fn unit(&self, unit: &str) -> String {
        match self.is_log {
            true => format!("{unit}, logarithmic"),
            false => unit.to_owned(),
        }
    }

    /// Where a value lies between both ends: 0 to 1.
    pub(crate) fn part(&self, value: f64) -> f64 {
        (self.at(value) - self.low) / (self.high - self.low)
    }
}

/// A round distance of ticks, of which some six fill a range.
fn step(range: f64) -> f64 {
    let power = 10f64.powf((range / 6.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * power);
    steps
        .into_iter()
        .find(|s| range / s <= 6.0)
        .unwrap_or(10.0 * power)
}

/// A number for people: about three digits.
pub(crate) fn shown(n: f64) -> String {
    let text = match n.abs() {
        0.0 => return "0".to_owned(),
        a if a >= 100.0 => return format!("{n:.0}"),
        a if a >= 10.0 => format!("{n:.1}"),
        a if a >= 0.1 => format!("{n:.2}"),
        _ => format!("{n:.4}"),
    };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wide_range_has_a_logarithmic_axis() {
        let narrow = Axis::of(&[1.0, 19.0], true);
        assert!(!narrow.is_log && narrow.low == 0.0);
        let wide = Axis::of(&[2.0, 3000.0], true);
        assert!(wide.is_log);
        assert_eq!((wide.low, wide.high), (0.0, 4.0));
        assert_eq!(wide.unit("us"), "us, logarithmic");
        assert_eq!(wide.value(wide.at(70.0)).round(), 70.0);
        assert!(!Axis::of(&[0.0, 3000.0], true).is_log, "0 has no logarithm");
        assert!(Axis::of(&[-2.0, 3.0], true).low <= -2.0);
        let one = Axis::of(&[0.0], true);
        assert!(one.high > one.low);
    }

    #[test]
    fn numbers_have_about_three_digits() {
        let all = [0.0, 1234.5, 12.34, 1.5, 0.0123, -3.0].map(shown);
        assert_eq!(all, ["0", "1234", "12.3", "1.5", "0.0123", "-3"]);
    }
}
