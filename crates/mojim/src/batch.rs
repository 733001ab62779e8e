//! Several ranges as one sync point (`gmsync`).

use std::ops::RangeBounds;

use engine::Result;

use crate::alone::alone;
use crate::region::Region;

/// One sync point of several ranges of bytes, of one region or of several regions of one volume
/// (Mojim, Section 3.1): after any failure all of them are there, or none.
///
/// ```
/// # let example = mojim::example::Example::new();
/// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
/// let mut accounts = volume.map("accounts", 80)?;
/// let mut journal = volume.map("journal", 8)?;
/// let cents = accounts.as_mut_slice::<i64>();
/// (cents[2], cents[9]) = (-5, 5);
/// journal.as_mut_slice::<u64>()[0] += 1;
/// mojim::Batch::new()
///     .add(&accounts, 16..24)?
///     .add(&accounts, 72..80)?
///     .add(&journal, ..)?
///     .commit()?;
/// # Ok::<(), mojim::Error>(())
/// ```
/// One that is not committed is an error of a program that denies warnings:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # fn f(accounts: &mojim::Region) -> mojim::Result<()> {
/// mojim::Batch::new().add(accounts, 16..24)?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is committed before `commit`, or `begin`"]
#[derive(Debug, Default)]
pub struct Batch<'a> {
    ranges: Vec<(*const u8, usize)>,
    regions: std::marker::PhantomData<&'a Region>,
}

// SAFETY: it borrows its regions, which are `Sync`.
unsafe impl Send for Batch<'_> {}
// SAFETY: as above.
unsafe impl Sync for Batch<'_> {}

impl<'a> Batch<'a> {
    /// No range yet.
    pub fn new() -> Batch<'a> {
        Batch::default()
    }

    /// With this range of bytes of a region. Ranges may overlap, and be empty.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid): a range beyond the region.
    pub fn add(mut self, region: &'a Region, range: impl RangeBounds<usize>) -> Result<Batch<'a>> {
        self.ranges.push(region.part(range)?);
        Ok(self)
    }

    /// Makes the sync point, and waits until it is committed. Returns its LSN; 0 if nothing had
    /// changed.
    ///
    /// # Errors
    /// As [`Region::sync`]; [`Error::Invalid`](crate::Error::Invalid) if the regions are of
    /// different volumes, or the calling thread has a transaction open.
    pub fn commit(&self) -> Result<u64> {
        alone("commit")?;
        engine::gmsync(&self.ranges)
    }

    /// [`Batch::commit`] that does not wait, as [`Region::begin_sync`].
    ///
    /// # Errors
    /// Those of [`Batch::commit`].
    pub fn begin(&self) -> Result<u64> {
        alone("begin")?;
        engine::gmsync_async(&self.ranges)
    }
}
