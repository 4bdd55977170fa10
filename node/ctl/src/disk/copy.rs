//! Copies an image to a file or a device.
//!
//! Holes of the image, and blocks of it that are zeros, are left out in a file. On a device they are
//! made zeros: by the device itself where it can do that without being sent them, otherwise by reading
//! and writing only what is not zero yet, for flash memory is read much faster than it is written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use super::esp::{EspError, write_parameters};
use super::layout::Layout;

/// What is read and written at once. A multiple of the block sizes of file systems, so that what is
/// left out becomes a hole.
const BLOCK: usize = 128 << 10;
/// What a device is asked to make zeros at once, and how much is written to one before it is synced:
/// an interruption waits for either.
const PIECE: u64 = 64 << 20;
/// At the end of a device, where backups of partition tables are, and what marks members of RAIDs.
const TAIL: u64 = 1 << 20;

/// Why an image was not copied. Steps are what was done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// The image cannot be read.
    #[error("cannot read the image")]
    Read(#[source] io::Error),
    /// The target cannot be written.
    #[error("cannot {step}")]
    Write {
        step: &'static str,
        source: io::Error,
    },
    /// The parameters cannot be written.
    #[error(transparent)]
    Esp(#[from] EspError),
    /// The user does not want to wait.
    #[error("interrupted")]
    Interrupted,
}

impl CopyError {
    fn write(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write { step, source }
    }
}

/// An image that is copied.
pub(crate) struct Job<'a> {
    pub image: &'a File,
    pub layout: &'a Layout,
    pub target: &'a File,
    /// The size of the device that the target is; `None` for an empty file.
    pub device: Option<u64>,
    /// Parameters instead of those of the image.
    pub parameters: Option<&'a [u8]>,
    /// Set by whoever wants it to end.
    pub stop: &'a AtomicBool,
    /// Called with the number of bytes of the image that are done.
    pub progress: &'a dyn Fn(u64),
}

#[derive(Default)]
struct State {
    /// Bytes that are not zeros, in whole blocks.
    copied: u64,
    /// Written to a device since it was synced.
    unsynced: u64,
    /// The device does not make zeros by itself.
    cannot_punch: bool,
}

impl Job<'_> {
    /// Copies the image and syncs it. Returns how many bytes were copied, which are not zeros.
    pub(crate) fn run(&self) -> Result<u64, CopyError> {
        let mut state = State::default();
        self.all(&mut state)?;
        Ok(state.copied)
    }

    fn all(&self, state: &mut State) -> Result<(), CopyError> {
        let Layout { size, head, .. } = *self.layout;
        match self.device {
            Some(device) => {
                // Until the end the device has no partition table, neither the former one nor this.
                self.clear(0..head, state)?;
                self.clear(size.max(device.saturating_sub(TAIL))..device, state)?;
                self.sync("sync the device")?;
            }
            None => self
                .target
                .set_len(size)
                .map_err(CopyError::write("set the size of the file"))?,
        }
        self.copy(head..size, state)?;
        if let Some(parameters) = self.parameters {
            write_parameters(self.target, self.layout, parameters)?;
        }
        if self.device.is_some() {
            self.sync("sync the device")?;
        }
        self.copy(0..head, state)?;
        self.sync("sync what was written")
    }

    fn sync(&self, step: &'static str) -> Result<(), CopyError> {
        self.target.sync_all().map_err(CopyError::write(step))
    }

    fn copy(&self, range: Range<u64>, state: &mut State) -> Result<(), CopyError> {
        let mut at = range.start;
        while at < range.end {
            let data = self.data(at, range.end).map_err(CopyError::Read)?;
            self.zeros(at..data.start, state)?;
            self.data_of(data.clone(), state)?;
            at = data.end;
        }
        Ok(())
    }

    /// The next part of the image, before `end`, that is not a hole; an empty one at `end` if there
    /// is none.
    fn data(&self, at: u64, end: u64) -> io::Result<Range<u64>> {
        let start = match seek(self.image, SeekFrom::Data(at)) {
            Ok(start) => start.min(end),
            Err(Errno::NXIO) => end,
            // A file system that knows of no holes.
            Err(Errno::INVAL) => return Ok(at..end),
            Err(error) => return Err(error.into()),
        };
        if start == end {
            return Ok(end..end);
        }
        let hole = seek(self.image, SeekFrom::Hole(start))?;
        Ok(start..hole.min(end))
    }

    /// Copies a part of the image that may be anything.
    fn data_of(&self, range: Range<u64>, state: &mut State) -> Result<(), CopyError> {
        let mut buffer = vec![0; BLOCK];
        for part in pieces(range, BLOCK as u64) {
            self.go_on()?;
            let block = &mut buffer[..(part.end - part.start) as usize];
            self.image
                .read_exact_at(block, part.start)
                .map_err(CopyError::Read)?;
            if is_zero(block) {
                self.zeros(part, state)?;
                continue;
            }
            self.write(block, part.start, state)?;
            state.copied += block.len() as u64;
            (self.progress)(part.end);
        }
        Ok(())
    }

    /// Makes a part of the target what the image is there: zeros.
    fn zeros(&self, range: Range<u64>, state: &mut State) -> Result<(), CopyError> {
        for part in pieces(range, PIECE) {
            let end = part.end;
            if self.device.is_some() {
                // A new file has zeros.
                self.clear(part, state)?;
            }
            (self.progress)(end);
        }
        Ok(())
    }

    fn clear(&self, range: Range<u64>, state: &mut State) -> Result<(), CopyError> {
        for part in pieces(range, PIECE) {
            self.go_on()?;
            // In the kernel's words: only if it is no slower than to write zeros.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let length = part.end - part.start;
            state.cannot_punch =
                state.cannot_punch || fallocate(self.target, flags, part.start, length).is_err();
            if state.cannot_punch {
                self.overwrite(part.clone(), state)?;
            }
        }
        Ok(())
    }

    /// Writes zeros where there are none.
    fn overwrite(&self, range: Range<u64>, state: &mut State) -> Result<(), CopyError> {
        let zeros = vec![0; BLOCK];
        let mut buffer = vec![0; BLOCK];
        for part in pieces(range, BLOCK as u64) {
            self.go_on()?;
            let length = (part.end - part.start) as usize;
            self.target
                .read_exact_at(&mut buffer[..length], part.start)
                .map_err(CopyError::write("read the device"))?;
            if !is_zero(&buffer[..length]) {
                self.write(&zeros[..length], part.start, state)?;
            }
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64, state: &mut State) -> Result<(), CopyError> {
        self.target
            .write_all_at(bytes, at)
            .map_err(CopyError::write("write"))?;
        if self.device.is_some() {
            state.unsynced += bytes.len() as u64;
            if state.unsynced >= PIECE {
                self.sync("sync the device")?;
                state.unsynced = 0;
            }
        }
        Ok(())
    }

    fn go_on(&self) -> Result<(), CopyError> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(CopyError::Interrupted),
            false => Ok(()),
        }
    }
}

fn pieces(range: Range<u64>, length: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = range.clone().step_by(length as usize);
    starts.map(move |start| start..(start + length).min(range.end))
}

fn is_zero(bytes: &[u8]) -> bool {
    // Whole words first: this looks at every byte of an image.
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// An image of 8 MiB with two holes and a block of zeros.
    fn image() -> (File, Layout) {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8 * MIB).expect("a size");
        for (at, byte) in [
            (0, 1),
            (2 * MIB, 2),
            (2 * MIB + BLOCK as u64, 0),
            (7 * MIB, 3),
        ] {
            file.write_all_at(&[byte; BLOCK], at).expect("written");
        }
        let layout = Layout {
            size: 8 * MIB,
            sector_size: 512,
            head: MIB,
            esp: MIB..2 * MIB,
            is_installer: false,
        };
        (file, layout)
    }

    /// A file in the place of a device, with something everywhere.
    fn device(size: u64) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&vec![0xee; size as usize], 0)
            .expect("written");
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; file.metadata().expect("there").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }

    #[test]
    fn a_file_has_what_the_image_has_and_no_more_blocks() {
        let (image, layout) = image();
        let target = tempfile::tempfile().expect("a file");
        let job = Job {
            image: &image,
            layout: &layout,
            target: &target,
            device: None,
            parameters: None,
            stop: &AtomicBool::new(false),
            progress: &|_| {},
        };
        assert_eq!(job.run().expect("copied"), 3 * BLOCK as u64);
        assert!(content(&target) == content(&image));
        let blocks = target.metadata().expect("there").blocks();
        assert!(blocks * 512 < MIB, "{blocks} blocks");
    }

    #[test]
    fn a_device_has_zeros_where_the_image_has_and_at_its_end() {
        for cannot_punch in [false, true] {
            let (image, layout) = image();
            let target = device(12 * MIB);
            let done = Cell::new(0);
            let job = Job {
                image: &image,
                layout: &layout,
                target: &target,
                device: Some(12 * MIB),
                parameters: None,
                stop: &AtomicBool::new(false),
                progress: &|now| done.set(now),
            };
            let mut state = State {
                cannot_punch,
                ..State::default()
            };
            job.all(&mut state).expect("copied");
            let found = content(&target);
            assert!(found[..8 * MIB as usize] == content(&image));
            assert!(
                found[8 * MIB as usize..11 * MIB as usize]
                    .iter()
                    .all(|byte| *byte == 0xee)
            );
            assert!(is_zero(&found[11 * MIB as usize..]));
            assert_eq!(state.cannot_punch, cannot_punch);
            assert_eq!(done.get(), MIB, "the table comes last");
        }
    }

    #[test]
    fn what_is_interrupted_has_no_table() {
        let (image, layout) = image();
        let target = device(8 * MIB);
        let stop = AtomicBool::new(false);
        let job = Job {
            image: &image,
            layout: &layout,
            target: &target,
            device: Some(8 * MIB),
            parameters: None,
            stop: &stop,
            progress: &|done| stop.store(done > 6 * MIB, Ordering::Relaxed),
        };
        let error = job.run().expect_err("interrupted");
        assert!(matches!(error, CopyError::Interrupted), "{error}");
        assert!(is_zero(&content(&target)[..MIB as usize]));
    }
}
