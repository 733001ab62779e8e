//! Whether the records of a lane come from several threads of the program.
//!
//! Owns what a mirror concludes from the number of records that come at once. Each of several
//! threads waits for a processor now and then, and then the others' records come one by one:
//! so one record alone does not say that its thread is alone.

/// For so many steps with a record each after one that took several, a lane counts as one of
/// several threads.
const STEPS: u32 = 200;

/// What a lane's thread knows of the program's threads.
#[derive(Debug, Default)]
pub(crate) struct LaneConcurrency {
    /// Steps for which there is company still.
    left: u32,
    /// Times that nothing came.
    empty: u32,
}

impl LaneConcurrency {
    /// A step took so many records.
    #[inline]
    pub(crate) fn took(&mut self, records: u32) {
        self.left = match records {
            0 => self.left,
            1 => self.left.saturating_sub(1),
            _ => STEPS,
        };
    }

    /// Whether several threads wait for the lane.
    #[inline]
    pub(crate) fn is_there(&self) -> bool {
        self.left > 0
    }

    /// Nothing came: whether other threads should have the processor before the next poll. So
    /// it is after every `polls` where there is company, which may be on this machine, and
    /// needs the processor to make the next records.
    #[inline]
    pub(crate) fn gives_way(&mut self, polls: u32) -> bool {
        self.empty = self.empty.wrapping_add(1);
        self.is_there() && self.empty.is_multiple_of(polls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn company_is_there_until_records_have_come_one_by_one_for_long() {
        let mut c = LaneConcurrency::default();
        let ways = |c: &mut LaneConcurrency| (0..64).filter(|_| c.gives_way(16)).count();
        c.took(1);
        assert!(!c.is_there());
        assert_eq!(ways(&mut c), 0, "alone");
        c.took(2);
        (1..STEPS).for_each(|_| c.took(1));
        c.took(0);
        assert!(c.is_there());
        assert_eq!(ways(&mut c), 4);
        c.took(1);
        assert!(!c.is_there());
        assert_eq!(ways(&mut c), 0, "alone again");
    }
}
