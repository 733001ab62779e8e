//! The image of the data area: writes are merged in memory and go to the files in runs.

use super::*;

/// What a page of the image takes beside its bytes, about.
const PAGE_OVERHEAD: usize = 64;

/// Most bytes of a page's parts: beyond that the whole page is read.
const MOST_PARTS: usize = 2048;

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
        if bytes.len() >= DIRECT
            && self
                .image
                .range((id, *pages.start())..=(id, *pages.end()))
                .next()
                .is_none()
        {
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
            self.write_in_page(id, page, within, &bytes[..n])?;
            offset += n as u64;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Merges bytes within one page into the image.
    fn write_in_page(&mut self, id: u32, page: u64, within: usize, bytes: &[u8]) -> Result<()> {
        let parts = match self.image.get_mut(&(id, page)) {
            Some(Image::Page(p)) => {
                p[within..within + bytes.len()].copy_from_slice(bytes);
                return Ok(());
            }
            Some(Image::Delta(parts)) => {
                if parts.overwrite(within, bytes) {
                    return Ok(());
                }
                parts
            }
            None => {
                self.image_bytes += PAGE_OVERHEAD;
                let image = Image::Delta(PageDelta::default());
                let Image::Delta(parts) = self.image.entry((id, page)).or_insert(image) else {
                    unreachable!("it was not there");
                };
                parts
            }
        };
        let taken = PART_OVERHEAD + bytes.len();
        if parts.len() + taken <= MOST_PARTS {
            parts.push(within, bytes);
            self.image_bytes += taken;
            return Ok(());
        }
        let parts = std::mem::take(parts);
        self.image_bytes += IMAGE_PAGE - parts.len();
        let mut p = Box::new([0u8; IMAGE_PAGE]);
        if bytes.len() < IMAGE_PAGE {
            self.read_run(id, page * IMAGE_PAGE as u64, &mut p[..])?;
        }
        parts.put(&mut p[..]);
        p[within..within + bytes.len()].copy_from_slice(bytes);
        self.image.insert((id, page), Image::Page(p));
        Ok(())
    }

    /// Memory that the image takes in bytes, about.
    pub fn image_bytes(&self) -> usize {
        self.image_bytes
    }

    /// Writes the image's pages to their files, each run of neighbours at once.
    pub fn flush(&mut self) -> Result<()> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        let mut image = std::mem::take(&mut self.image).into_iter().peekable();
        self.image_bytes = 0;
        let (mut run, mut pages) = (Vec::new(), Vec::new());
        while let Some(((id, page), first)) = image.next() {
            let at = page * IMAGE_PAGE as u64;
            pages.push(first);
            while pages.len() < MOST_RUN
                && let next = (id, page + pages.len() as u64)
                && let Some((_, more)) = image.next_if(|(key, _)| *key == next)
            {
                pages.push(more);
            }
            if let [Image::Delta(parts)] = &pages[..]
                && let Some((within, bytes)) = parts.only()
            {
                self.write_run(id, at + within as u64, bytes)?;
                pages.clear();
                continue;
            }
            run.resize(pages.len() * IMAGE_PAGE, 0);
            if pages.iter().any(|p| matches!(p, Image::Delta(_))) {
                self.read_run(id, at, &mut run)?;
            }
            for (image, page) in pages.drain(..).zip(run.chunks_mut(IMAGE_PAGE)) {
                match image {
                    Image::Delta(parts) => parts.put(page),
                    Image::Page(bytes) => page.copy_from_slice(&bytes[..]),
                }
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
