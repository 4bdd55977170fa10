//! Lines on the machine's console, for people and tests.
//!
//! A console must never block the node: lines are written without blocking, and what does not fit
//! is dropped, for example on a serial line that nobody reads. Each line is one write. Control
//! characters are replaced, since parts of a line may come from other machines.
//!
//! What is typed is read by lines ([`Input`]); the terminal itself echoes it, and handles backspace.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::OFlags;
use rustix::termios::{QueueSelector, tcflush};

use crate::raw::Watched;

/// All consoles of the kernel.
pub const DEVICE: &str = "/dev/console";

/// Maximum length of a line in characters; the rest is dropped.
const MAX_LINE: usize = 1000;
/// Maximum length of what is typed, in bytes: that of a terminal's line.
const MAX_TYPED: usize = 4096;

/// A console.
#[derive(Debug)]
pub struct Console {
    file: Mutex<File>,
}

impl Console {
    /// Opens a console, without making it the controlling terminal.
    pub fn open(device: &Path) -> io::Result<Self> {
        let file = open(OpenOptions::new().write(true), device)?;
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

/// Lines that are typed at a console.
#[derive(Debug)]
pub struct Input {
    terminal: Watched,
    /// Of a line that is not complete, or of several.
    typed: Vec<u8>,
}

impl Input {
    /// Opens a console, which must be a terminal, without making it the controlling terminal. What
    /// was typed before is dropped.
    pub fn open(device: &Path) -> io::Result<Self> {
        let file = open(OpenOptions::new().read(true), device)?;
        tcflush(&file, QueueSelector::IFlush)?;
        Ok(Self {
            terminal: Watched::new(file)?,
            typed: Vec::new(),
        })
    }

    /// The next line, without its end, and without what is beyond 4 KiB. Nothing is lost if this is
    /// dropped.
    ///
    /// # Errors
    /// At the end of the input: after Ctrl-D, or if the console is gone.
    pub async fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.typed.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.typed.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let mut buffer = [0; 1024];
            match self.terminal.read(&mut buffer).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => self.add(&buffer[..read]),
            }
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte == b'\n' || self.typed.len() < MAX_TYPED {
                self.typed.push(*byte);
            }
        }
    }
}

fn open(options: &mut OpenOptions, device: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    options.custom_flags(flags.bits() as i32).open(device)
}

fn plain(text: &str) -> String {
    let character = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_LINE).map(character).collect()
}

#[cfg(test)]
mod tests {
    use hearth_base::testing::within_timeout;

    use super::*;
    use crate::testing::Terminal;

    #[tokio::test]
    async fn lines_are_read_as_they_are_typed() {
        let mut terminal = Terminal::new().unwrap();
        terminal.enter("typed before").unwrap();
        let mut input = Input::open(terminal.device()).unwrap();
        terminal.enter("one").unwrap();
        terminal.enter("").unwrap();
        terminal
            .enter(&format!("wro\u{7f}{}", "x".repeat(300)))
            .unwrap();
        for expected in ["one", "", &format!("wr{}", "x".repeat(300))] {
            let line = within_timeout("a line", input.line()).await.unwrap();
            assert_eq!(line, expected);
        }
        drop(terminal);
        let gone = within_timeout("the end", input.line()).await;
        assert!(gone.is_err(), "{gone:?}");
    }

    #[tokio::test]
    async fn what_is_no_terminal_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Input::open(file.path()).is_err());
    }

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
