//! The machine's own screen: a text terminal of the kernel, on which a page is shown.
//!
//! It is drawn line by line in place, without clearing, so that it does not flicker; what the kernel has written over it goes with the
//! next drawing. Control characters are replaced, since parts of a page may come from other machines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::termios::tcgetwinsize;

/// The terminal that the kernel shows when it starts.
pub const DEVICE: &str = "/dev/tty1";

/// The size of a terminal that does not know its own.
const USUAL: Size = Size {
    columns: 80,
    rows: 25,
};
/// Hides the cursor and clears the screen.
const BEGIN: &str = "\x1b[?25l\x1b[2J";
/// Black on white, and back.
const REVERSE: &str = "\x1b[30;107m";
const NORMAL: &str = "\x1b[0m";

/// The size of a screen in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Characters of a line.
    pub columns: usize,
    /// Lines.
    pub rows: usize,
}

/// A part of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Span {
    /// As usual.
    Plain(String),
    /// Black on white, as codes for cameras need it.
    Reversed(String),
}

impl Span {
    /// Its text.
    pub fn text(&self) -> &str {
        match self {
            Self::Plain(text) | Self::Reversed(text) => text,
        }
    }
}

/// A line.
pub type Line = Vec<Span>;

/// A screen.
#[derive(Debug)]
pub struct Screen {
    terminal: File,
    size: Size,
}

impl Screen {
    /// Opens a terminal, and clears it.
    ///
    /// # Errors
    /// If it does not exist, as in a kernel without virtual terminals.
    pub fn open(device: &Path) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(flags.bits() as i32);
        let mut terminal = options.open(device)?;
        let size = match tcgetwinsize(&terminal) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => Size {
                columns: size.ws_col.into(),
                rows: size.ws_row.into(),
            },
            _ => USUAL,
        };
        terminal.write_all(BEGIN.as_bytes())?;
        Ok(Self { terminal, size })
    }

    /// Its size.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Draws a page from the top; what is longer or wider than the screen is left out, and the rest of the screen is blank.
    ///
    /// # Errors
    /// If the terminal is gone. A part of the page may be drawn.
    pub fn draw(&mut self, page: &[Line]) -> io::Result<()> {
        let drawn = drawing(page, self.size);
        self.terminal.write_all(drawn.as_bytes())
    }
}

fn drawing(page: &[Line], size: Size) -> String {
    let mut drawn = String::new();
    for row in 0..size.rows {
        drawn.push_str(&format!("\x1b[{};1H", row + 1));
        let mut left = size.columns;
        for span in page.get(row).into_iter().flatten() {
            let text = plain(span.text(), left);
            left -= text.chars().count();
            match span {
                Span::Plain(_) => drawn.push_str(&text),
                Span::Reversed(_) => drawn.extend([REVERSE, &text, NORMAL]),
            }
        }
        if left > 0 {
            // To the end of the line.
            drawn.push_str("\x1b[K");
        }
    }
    drawn
}

fn plain(text: &str, width: usize) -> String {
    let character = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(width).map(character).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Terminal;

    fn line(text: &str) -> Line {
        vec![Span::Plain(text.to_owned())]
    }

    #[test]
    fn a_page_is_cut_to_the_screen_and_cannot_break_out() {
        let size = Size {
            columns: 5,
            rows: 3,
        };
        let page = [
            vec![
                Span::Plain("ab".into()),
                Span::Reversed("█▀ and more".into()),
            ],
            line("\x1b[2J"),
        ];
        assert_eq!(
            drawing(&page, size),
            "\x1b[1;1Hab\x1b[30;107m█▀ \x1b[0m\x1b[2;1H [2J\x1b[K\x1b[3;1H\x1b[K"
        );
        assert_eq!(
            drawing(&page[1..], Size { rows: 1, ..size }),
            "\x1b[1;1H [2J\x1b[K"
        );
    }

    #[test]
    fn a_terminal_shows_the_page() {
        let mut terminal = Terminal::new().unwrap();
        let mut screen = Screen::open(terminal.device()).unwrap();
        assert_eq!(screen.size(), USUAL);
        screen.draw(&[line("first"), line("second")]).unwrap();
        let shown = terminal.shown().unwrap();
        assert!(
            shown.starts_with(BEGIN) && shown.contains("second"),
            "{shown:?}"
        );
        let missing = Screen::open(Path::new("/dev/no-such-terminal"));
        assert!(missing.is_err());
    }
}
