//! The host's instructions for one life of a machine, as the line that tells them.

use super::medium::Medium;
use crate::subject::Kind;

/// The instructions for one life of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) kind: Kind,
    pub(super) medium: Medium,
    /// This life's boot id: a saved state would always have the same.
    pub(super) boot: u64,
    pub(super) seed: u64,
    /// The step that was acknowledged on this disk, if the disk is not new.
    pub(super) acknowledged: Option<u64>,
    /// The last step to make.
    pub(super) steps: u64,
}

impl Order {
    /// The order as a line.
    pub(super) fn line(&self) -> String {
        let before = match self.acknowledged {
            Some(n) => n.to_string(),
            None => "new".into(),
        };
        format!(
            "{} {} {:016x} {} {before} {}\n",
            self.kind.name(),
            self.medium.name(),
            self.boot,
            self.seed,
            self.steps
        )
    }

    /// Parses a line.
    pub(super) fn parse(line: &str) -> Option<Order> {
        let mut words = line.split_ascii_whitespace();
        let mut next = || words.next();
        Some(Order {
            kind: Kind::of(next()?)?,
            medium: Medium::of(next()?).ok()?,
            boot: u64::from_str_radix(next()?, 16).ok()?,
            seed: next()?.parse().ok()?,
            acknowledged: match next()? {
                "new" => None,
                n => Some(n.parse().ok()?),
            },
            steps: next()?.parse().ok()?,
        })
    }
}

/// How many steps may be there without having been acknowledged: the one that was being
/// made.
pub(super) const AHEAD: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_read_as_written() {
        for acknowledged in [None, Some(0), Some(77)] {
            let order = Order {
                kind: Kind::Mojim(None),
                medium: Medium::Nvdimm,
                boot: 0xabc,
                seed: 9,
                acknowledged,
                steps: 100,
            };
            assert_eq!(Order::parse(&order.line()), Some(order));
        }
        assert_eq!(Order::parse("mojim disk 1"), None);
    }
}
