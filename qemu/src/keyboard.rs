//! Typing at a machine's serial console.
//!
//! A [`Keyboard`] also has what the machine writes from then on, complete. The machine's log has it
//! as well, but while somebody is connected, QEMU repeats a character in it now and then: whatever
//! it could not send at once, it logs again when it tries again.

use std::io;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// A connection to the console of a running machine. Closed when dropped: what the machine has not
/// read by then is lost.
#[derive(Debug)]
pub struct Keyboard {
    keys: OwnedWriteHalf,
    screen: mpsc::UnboundedReceiver<String>,
    // Read at once, whether or not anybody asks for it: QEMU waits for a client that does not read.
    _reader: AbortOnDropHandle<()>,
}

impl Keyboard {
    pub(crate) fn of(console: UnixStream) -> Self {
        let (output, keys) = console.into_split();
        let (lines, screen) = mpsc::unbounded_channel();
        let reader = tokio::spawn(read(output, lines));
        Self {
            keys,
            screen,
            _reader: AbortOnDropHandle::new(reader),
        }
    }

    /// Types this line, and Enter.
    ///
    /// # Errors
    /// If the machine is gone.
    pub async fn enter(&mut self, line: &str) -> io::Result<()> {
        self.keys.write_all(format!("{line}\r").as_bytes()).await
    }

    /// Waits for the next line that contains this text.
    ///
    /// # Errors
    /// If the machine ends before.
    pub async fn shows(&mut self, text: &str) -> io::Result<String> {
        while let Some(line) = self.screen.recv().await {
            if line.contains(text) {
                return Ok(line);
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Passes on all lines, until the machine or the keyboard is gone.
async fn read(output: OwnedReadHalf, lines: mpsc::UnboundedSender<String>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(output.read_until(b'\n', &mut line).await, Ok(read) if read > 0) {
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if lines.send(text).is_err() {
            return;
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_typed_arrives_and_what_is_shown_is_found() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut keyboard = Keyboard::of(ours);
        keyboard.enter("a word").await.unwrap();
        let mut machine = BufReader::new(theirs);
        let mut typed = Vec::new();
        machine.read_until(b'\r', &mut typed).await.unwrap();
        assert_eq!(typed, b"a word\r");
        machine.write_all(b"one\r\ntwo\r\nthree").await.unwrap();
        assert_eq!(keyboard.shows("tw").await.unwrap(), "two");
        drop(machine);
        assert_eq!(keyboard.shows("th").await.unwrap(), "three");
        keyboard.shows("four").await.unwrap_err();
    }
}
