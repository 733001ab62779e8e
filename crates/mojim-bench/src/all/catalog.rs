//! The figures: those of the Mojim paper, of failure-atomic msync (FAMS), of the slides and of
//! Mnemosyne's poster that this machine can show, and our own.

mod fams;
mod mojim;
mod own;

use crate::all::figures::Figure;

/// All figures, in the order of the page.
pub(crate) fn figures() -> impl Iterator<Item = &'static Figure> {
    [mojim::NVMM, mojim::COPIES, fams::FAMS, own::OWN]
        .into_iter()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all::plan::names;

    #[test]
    fn each_measurement_has_a_figure_and_each_figure_a_measurement() {
        let mut ids: Vec<_> = figures().map(|f| f.id).collect();
        for name in names() {
            assert!(figures().any(|f| f.measurement == name), "{name}");
        }
        for f in figures() {
            let known = names().any(|n| n == f.measurement);
            assert!(known || f.measurement.starts_with("scripts/"), "{}", f.id);
        }
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
}
