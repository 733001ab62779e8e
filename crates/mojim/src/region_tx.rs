//! Transactions of a region.

use std::ops::{Bound, RangeBounds};

use bytemuck::{AnyBitPattern, NoUninit};
use engine::{Error, Result};

use crate::alone::{alone, wrong_range};
use crate::region::Region;

impl Region {
    /// Runs `f` in a transaction of the region: what it changed is committed as one sync point if it
    /// returns `Ok`, and taken back if it returns an error or panics.
    ///
    /// With `f`'s other calls it is as with [`Heap::atomically`](crate::Heap::atomically): none of them
    /// commits anything. A thread that `f` starts, and that calls [`sync`](crate::sync) of what `f` is changing,
    /// is not stopped: that is committed before the transaction is.
    ///
    /// # Errors
    /// As there. While the mirror does not answer, it does not return.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut accounts = volume.map("accounts", 80)?;
    /// accounts.atomically(|tx| {
    ///     tx.as_mut_slice::<i64>(2..3)?[0] -= 5;
    ///     tx.as_mut_slice::<i64>(9..10)?[0] += 5;
    ///     Ok(())
    /// })?;
    /// assert_eq!(accounts.as_slice::<i64>()[9], 5);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    /// The region stays until the transaction has ended:
    ///
    /// ```compile_fail,E0505
    /// # fn f(mut accounts: mojim::Region) {
    /// let _ = accounts.atomically(|tx| {
    ///     drop(accounts);
    ///     tx.as_mut_slice::<i64>(..)?[0] = 5;
    ///     Ok(())
    /// });
    /// # }
    /// ```
    pub fn atomically<R>(&mut self, f: impl FnOnce(&mut RegionTx<'_>) -> Result<R>) -> Result<R> {
        alone("atomically")?;
        mojim_tx::atomically(|log| f(&mut RegionTx { region: self, log }))
    }
}

/// A transaction of a region: what [`Region::atomically`] passes to its closure.
pub struct RegionTx<'r> {
    region: &'r mut Region,
    log: &'r mojim_tx::Tx,
}

impl std::fmt::Debug for RegionTx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegionTx({})", self.region.file())
    }
}

impl RegionTx<'_> {
    /// All of the region, to be read.
    pub fn as_slice<T: AnyBitPattern>(&self) -> &[T] {
        self.region.as_slice()
    }

    /// Some values of the region, to be changed: they are noted as they are, and committed. `range`
    /// counts values.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the region has not so many; `Io` with ENOMEM.
    ///
    /// # Panics
    /// If the region was mapped to be read only.
    pub fn as_mut_slice<T: AnyBitPattern + NoUninit>(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<&mut [T]> {
        let all = self.region.as_mut_slice::<T>();
        let count = all.len();
        let bounds = (range.start_bound().cloned(), range.end_bound().cloned());
        let Some(part) = all.get_mut::<(Bound<usize>, Bound<usize>)>(bounds) else {
            return Err(Error::Invalid(format!(
                "a range {}",
                wrong_range(bounds, count, "values of the region")
            )));
        };
        // SAFETY: bytes of the region, which stays until the transaction's end, since that borrows
        // it.
        unsafe { self.log.add(part.as_mut_ptr().cast(), size_of_val(part))? };
        Ok(part)
    }
}
