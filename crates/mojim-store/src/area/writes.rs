//! How writes reach the files: merged in the image, then in runs of neighbouring pages.
//!
//! Invariants:
//! - Bytes go past the image only where it has none of their pages. So what came later wins.
//! - Nothing is written beyond the size that the catalogue has for the file.

use super::*;

/// Most pages that are written at once.
const MOST_RUN: usize = 256;

/// Extents of at least this many bytes go to their file directly, if the image has
/// none of their pages.
const DIRECT: usize = 1024;

impl Area {
    pub(super) fn write(&mut self, id: u32, offset: u64, mut bytes: &[u8]) -> Result<()> {
        let Some(entry) = self.files.get(id) else {
            return Ok(()); // removed later in the prefix, seen while replaying
        };
        // While replaying, the file may be shorter than when this was written;
        // the resize that shortened it comes later and wins.
        let size = entry.size;
        if offset >= size {
            return Ok(());
        }
        bytes = &bytes[..bytes.len().min((size - offset) as usize)];
        let pages = offset / IMAGE_PAGE as u64..=(offset + bytes.len() as u64) / IMAGE_PAGE as u64;
        // Merging pays where many small extents meet in a page; a large one
        // costs less as it is.
        if bytes.len() >= DIRECT && !self.image.has(id, pages) {
            let f = self.file(id)?;
            self.unsynced.dirty.insert(id);
            return f
                .write_at(bytes, offset)
                .context(|| format!("writing {} at {offset}", self.called(id)));
        }
        let mut offset = offset;
        while !bytes.is_empty() {
            let page = offset / IMAGE_PAGE as u64;
            let within = (offset % IMAGE_PAGE as u64) as usize;
            let n = bytes.len().min(IMAGE_PAGE - within);
            if let Err(TooMany) = self.image.put((id, page), within, &bytes[..n]) {
                let mut whole = Box::new([0u8; IMAGE_PAGE]);
                self.read_run(id, page * IMAGE_PAGE as u64, &mut whole[..])?;
                self.image.read((id, page), whole);
            }
            offset += n as u64;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Memory that the image takes in bytes, about.
    pub fn image_bytes(&self) -> usize {
        self.image.bytes()
    }

    /// Writes the image's pages to their files, each run of neighbours at once.
    pub fn flush(&mut self) -> Result<()> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        let mut image = std::mem::take(&mut self.image).into_pages();
        let (mut run, mut pages) = (Vec::new(), Vec::new());
        while let Some(((id, page), first)) = image.next() {
            let at = page * IMAGE_PAGE as u64;
            pages.push(first);
            while pages.len() < MOST_RUN
                && let Some(more) = image.next_if((id, page + pages.len() as u64))
            {
                pages.push(more);
            }
            if let [page] = &pages[..]
                && let Some((within, bytes)) = image.only(page)
            {
                self.write_run(id, at + within as u64, bytes)?;
                pages.clear();
                continue;
            }
            run.resize(pages.len() * IMAGE_PAGE, 0);
            if !pages.iter().all(Page::is_whole) {
                self.read_run(id, at, &mut run)?;
            }
            for (page, bytes) in pages.drain(..).zip(run.chunks_mut(IMAGE_PAGE)) {
                image.write_over(&page, bytes);
            }
            self.write_run(id, at, &run)?;
        }
        Ok(())
    }

    /// Reads what the file has, and zeros beyond its end.
    fn read_run(&mut self, id: u32, at: u64, bytes: &mut [u8]) -> Result<()> {
        let got = self
            .file(id)?
            .read_at(bytes, at)
            .map_err(|e| Error::poisoned(format!("reading {}", self.called(id)), &e))?;
        bytes[got..].fill(0);
        Ok(())
    }

    pub(super) fn write_run(&mut self, id: u32, at: u64, bytes: &[u8]) -> Result<()> {
        let Some(size) = self.files.get(id).map(|e| e.size) else {
            return Ok(());
        };
        if at >= size {
            return Ok(());
        }
        let n = bytes.len().min((size - at) as usize);
        let f = self.file(id)?;
        self.unsynced.dirty.insert(id);
        f.write_at(&bytes[..n], at)
            .context(|| format!("writing {} at {at}", self.called(id)))
    }
}
