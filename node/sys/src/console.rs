//! Lines on the machine's console, for people and tests.
//!
//! A console must never block the node: lines are written without blocking, and what does not fit
//! is dropped, for example on a serial line that nobody reads. Each line is one write. Control
//! characters are replaced, since parts of a line may come from other machines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::OFlags;

/// All consoles of the kernel.
pub const DEVICE: &str = "/dev/console";

/// Maximum length of a line in characters; the rest is dropped.
const MAX_LINE: usize = 1000;

/// A console.
#[derive(Debug)]
pub struct Console {
    file: Mutex<File>,
}

impl Console {
    /// Opens a console, without making it the controlling terminal.
    pub fn open(device: &Path) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(flags.bits() as i32)
            .open(device)?;
        Ok(Self {
            file: Mutex::new(file),
        })
    }

    /// Writes a line, or as much of it as fits without blocking.
    pub fn line(&self, text: &str) {
        let line = plain(text) + "\r\n";
        let mut file = self
            .file
            .lock()
            .unwrap_or_else(|broken| broken.into_inner());
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            match file.write(rest) {
                Ok(0) => return,
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The console is full or gone. The error cannot be reported anywhere.
                Err(_) => return,
            }
        }
    }
}

fn plain(text: &str) -> String {
    let character = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_LINE).map(character).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_of_plain_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        std::fs::write(&path, b"").unwrap();
        let console = Console::open(&path).unwrap();
        console.line("state \u{1b}[2J\nhearth: reached HOME");
        console.line(&"x".repeat(5000));
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.split("\r\n").collect();
        assert_eq!(lines[0], "state  [2J hearth: reached HOME");
        assert_eq!(lines[1].len(), MAX_LINE);
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn a_console_that_nobody_reads_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let _reader = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&path)
            .unwrap();
        let console = Console::open(&path).unwrap();
        for _ in 0..200 {
            console.line(&"x".repeat(1000));
        }
    }
}
