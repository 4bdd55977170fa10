//! The packet capture, in pcap format.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::CaptureStatus;

/// Buffered data is written when it has this size.
const BATCH: usize = 64 << 10;

const ETHERNET: u32 = 1;

/// A capture file. Frames are written in batches; [`Capture::flush`] writes the buffered ones.
#[derive(Debug)]
pub(super) struct Capture {
    file: File,
    path: PathBuf,
    limit: u64,
    size: u64,
    waiting: Vec<u8>,
    frames: u64,
    dropped: u64,
    failed: bool,
}

impl Capture {
    pub(super) fn create(path: &Path, limit: u64) -> io::Result<Self> {
        let mut header = Vec::with_capacity(24);
        // Microseconds, in this byte order.
        header.extend_from_slice(&0xa1b2_c3d4_u32.to_le_bytes());
        header.extend_from_slice(&2_u16.to_le_bytes());
        header.extend_from_slice(&4_u16.to_le_bytes());
        // Time zone and accuracy, which are always zero.
        header.extend_from_slice(&[0; 8]);
        header.extend_from_slice(&(super::framing::MAX_FRAME as u32).to_le_bytes());
        header.extend_from_slice(&ETHERNET.to_le_bytes());
        let mut file = File::create(path)?;
        file.write_all(&header)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            limit,
            size: header.len() as u64,
            waiting: Vec::with_capacity(BATCH),
            frames: 0,
            dropped: 0,
            failed: false,
        })
    }

    /// Records a frame. The capture may end with it.
    pub(super) fn write(&mut self, frame: &[u8], now: SystemTime) {
        let size = 16 + frame.len() as u64;
        if self.failed || self.size + size > self.limit {
            if self.dropped == 0 {
                tracing::warn!(
                    frames = self.frames,
                    bytes = self.size,
                    "the capture is full; later frames are not recorded"
                );
            }
            self.dropped += 1;
            // Recording later, smaller frames would leave gaps.
            self.limit = 0;
            return;
        }
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let length = (frame.len() as u32).to_le_bytes();
        self.waiting
            .extend_from_slice(&(now.as_secs() as u32).to_le_bytes());
        self.waiting
            .extend_from_slice(&now.subsec_micros().to_le_bytes());
        self.waiting.extend_from_slice(&length);
        self.waiting.extend_from_slice(&length);
        self.waiting.extend_from_slice(frame);
        self.size += size;
        self.frames += 1;
        if self.waiting.len() >= BATCH {
            self.flush();
        }
    }

    /// Writes the buffered frames.
    pub(super) fn flush(&mut self) {
        if self.waiting.is_empty() || self.failed {
            return;
        }
        if let Err(error) = self.file.write_all(&self.waiting) {
            tracing::error!(%error, path = %self.path.display(), "cannot write the capture; it is incomplete");
            self.failed = true;
        }
        self.waiting.clear();
    }

    pub(super) fn status(&self) -> CaptureStatus {
        CaptureStatus {
            path: self.path.clone(),
            frames: self.frames,
            dropped: self.dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn frames_are_kept_until_the_limit_and_counted_after_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("capture.pcap");
        let mut capture = Capture::create(&path, 24 + 2 * (16 + 100)).expect("a file");
        let at = UNIX_EPOCH + Duration::new(0x0102_0304, 5_000);
        capture.write(&[7; 100], at);
        // Does not fit, and ends the capture, though the next would fit.
        capture.write(&[8; 101], at);
        capture.write(&[9; 10], at);
        capture.flush();
        let bytes = std::fs::read(&path).expect("the file");
        assert_eq!(bytes.len(), 24 + 16 + 100);
        assert_eq!(bytes[..4], [0xd4, 0xc3, 0xb2, 0xa1]);
        assert_eq!(
            bytes[24..40],
            [4, 3, 2, 1, 5, 0, 0, 0, 100, 0, 0, 0, 100, 0, 0, 0]
        );
        let status = capture.status();
        assert_eq!((status.frames, status.dropped), (1, 2));
    }

    #[test]
    fn much_is_written_without_being_asked() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("capture.pcap");
        let mut capture = Capture::create(&path, 1 << 20).expect("a file");
        for _ in 0..100 {
            capture.write(&[0; 1500], UNIX_EPOCH);
        }
        assert!(std::fs::metadata(&path).expect("a file").len() > BATCH as u64);
    }
}
