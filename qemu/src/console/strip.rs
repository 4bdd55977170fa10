//! Converts a terminal's bytes to lines of text.
//!
//! Firmware paints its console: colours, cleared screens, texts at a row and column, often without a single line feed.
//! Programs need lines. Control sequences (ECMA-48) are dropped; those that move the cursor elsewhere or clear the
//! screen end the current line, and so does a carriage return that is followed by more text.
//!
//! Any bytes are accepted, and no input can block the processing of later input: sequences end at their final byte, at
//! a line feed, or when they exceed the length of any real one. The result does not depend on how the bytes are split
//! into pieces.

/// Longer lines are truncated, so that a machine that never ends one cannot use up memory.
const MAX_LINE: usize = 8192;
/// Longer sequences are not treated as such.
const MAX_SEQUENCE: usize = 256;

/// Splits bytes into lines.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    line: Vec<u8>,
    state: State,
    /// Bytes of the current sequence so far.
    length: usize,
    /// The last byte was a carriage return.
    returned: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Text.
    #[default]
    Text,
    /// After ESC.
    Escape,
    /// After ESC and an intermediate byte: one more byte follows.
    Intermediate,
    /// After ESC `[`, up to a final byte.
    Control,
    /// After ESC `]`, `P`, `X`, `^` or `_`: up to BEL or ESC `\`.
    String,
    /// ESC inside a string.
    StringEscape,
}

const ESC: u8 = 0x1b;
const BEL: u8 = 0x07;

impl Splitter {
    /// Processes more bytes; calls `each` with each line that ends in them, without its end and with invalid UTF-8
    /// replaced.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(String)) {
        for &byte in bytes {
            self.byte(byte, &mut each);
        }
    }

    /// The unfinished line, if there is one.
    pub(crate) fn finish(mut self) -> Option<String> {
        (!self.line.is_empty()).then(|| self.take())
    }

    fn byte(&mut self, byte: u8, each: &mut impl FnMut(String)) {
        if byte == b'\n' {
            // Ends everything: a line matters more than a sequence.
            self.state = State::Text;
            self.returned = false;
            let line = self.take();
            return each(line);
        }
        self.length += 1;
        if self.state != State::Text && self.length > MAX_SEQUENCE {
            self.state = State::Text;
        }
        match self.state {
            State::Text => self.text(byte, each),
            State::Escape => self.escape(byte),
            State::Intermediate => match byte {
                0x20..=0x2f => {}
                ESC => self.enter(State::Escape),
                _ => self.state = State::Text,
            },
            State::Control => self.control(byte, each),
            State::String => match byte {
                BEL => self.state = State::Text,
                ESC => self.state = State::StringEscape,
                _ => {}
            },
            State::StringEscape => match byte {
                b'\\' => self.state = State::Text,
                // The string was ended by another sequence.
                _ => {
                    self.enter(State::Escape);
                    self.escape(byte);
                }
            },
        }
    }

    fn text(&mut self, byte: u8, each: &mut impl FnMut(String)) {
        match byte {
            ESC => self.enter(State::Escape),
            b'\r' => self.returned = true,
            // Other control characters do not matter here.
            0x00..=0x08 | 0x0b..=0x1f | 0x7f => {}
            _ => {
                if std::mem::take(&mut self.returned) || self.line.len() >= MAX_LINE {
                    self.end(each);
                }
                self.line.push(byte);
            }
        }
    }

    fn escape(&mut self, byte: u8) {
        self.state = match byte {
            b'[' => State::Control,
            b']' | b'P' | b'X' | b'^' | b'_' => State::String,
            0x20..=0x2f => State::Intermediate,
            ESC => State::Escape,
            _ => State::Text,
        };
    }

    fn control(&mut self, byte: u8, each: &mut impl FnMut(String)) {
        match byte {
            // Parameters and intermediate bytes.
            0x20..=0x3f => {}
            0x40..=0x7e => {
                self.state = State::Text;
                // Moves the cursor, or clears the screen.
                if matches!(byte, b'H' | b'f' | b'd' | b'A' | b'B' | b'E' | b'F' | b'J') {
                    self.returned = false;
                    self.end(each);
                }
            }
            ESC => self.enter(State::Escape),
            // Not a sequence after all.
            _ => self.state = State::Text,
        }
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.length = 0;
    }

    /// Ends the line unless it is empty.
    fn end(&mut self, each: &mut impl FnMut(String)) {
        if !self.line.is_empty() {
            let line = self.take();
            each(line);
        }
    }

    fn take(&mut self) -> String {
        let line = std::mem::take(&mut self.line);
        String::from_utf8(line)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(bytes: &[u8]) -> Vec<String> {
        lines_of_pieces([bytes])
    }

    fn lines_of_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let mut splitter = Splitter::default();
        let mut lines = Vec::new();
        for piece in pieces {
            splitter.feed(piece, |line| lines.push(line));
        }
        lines.extend(splitter.finish());
        lines
    }

    #[test]
    fn firmware_is_read_as_lines() {
        let painted =
            b"\x1b[2J\x1b[01;01H\x1b[=3h\x1b[2J\x1b[01;01HBdsDxe: loading Boot0001 \"x\"\r\n\
            \x1b[1m\x1b[33m\x1b[40mMapping table\x1b[0m\x1b[37m\x1b[40m\r\n\
            \x1b[05;01HPress ESC in 2 seconds\x1b[05;01HPress ESC in 1 seconds\r\nShell> ";
        assert_eq!(
            lines(painted),
            [
                "BdsDxe: loading Boot0001 \"x\"",
                "Mapping table",
                "Press ESC in 2 seconds",
                "Press ESC in 1 seconds",
                "Shell> ",
            ]
        );
    }

    #[test]
    fn kernel_lines_stay_as_they_are() {
        let text = "[    0.000000] Linux version 6.12\r\n\r\n\ttabbed \u{e4}\u{20ac}\n";
        assert_eq!(
            lines(text.as_bytes()),
            [
                "[    0.000000] Linux version 6.12",
                "",
                "\ttabbed \u{e4}\u{20ac}"
            ]
        );
    }

    #[test]
    fn a_lone_carriage_return_starts_over() {
        assert_eq!(lines(b"10%\r20%\r\r\ndone"), ["10%", "20%", "done"]);
    }

    #[test]
    fn strings_and_broken_sequences_do_not_eat_the_log() {
        assert_eq!(lines(b"a\x1b]0;title\x07b\x1bPdata\x1b\\c"), ["abc"]);
        assert_eq!(lines(b"a\x1b]0;never ended\nb\n"), ["a", "b"]);
        assert_eq!(lines(b"a\x1b[12\nb\n"), ["a", "b"]);
        assert_eq!(lines(b"a\x1b\x1b[1mb\x1b(Bc\x1b[\x00d"), ["abcd"]);
        assert_eq!(lines(b"a\x1b]x\x1b[1mb"), ["ab"]);
        let mut endless = b"\x1b]".to_vec();
        endless.extend([b'x'; 3 * MAX_SEQUENCE]);
        assert!(!lines(&endless).concat().is_empty());
    }

    #[test]
    fn endless_lines_are_cut() {
        let lines = lines(&[b'x'; 3 * MAX_LINE]);
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.len() == MAX_LINE));
    }

    /// Bytes with as many special characters as others.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            any::<u8>(),
            proptest::sample::select(b"\x1b[]P\\\x07\r\nHJm;1 a".to_vec())
        ];
        proptest::collection::vec(byte, 0..300)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn any_bytes_become_plain_lines(bytes in bytes()) {
            for line in lines(&bytes) {
                prop_assert!(line.chars().all(|c| c == '\t' || !c.is_ascii_control()), "{line:?}");
            }
        }

        #[test]
        fn pieces_do_not_matter(bytes in bytes(), size in 1usize..9) {
            prop_assert_eq!(lines(&bytes), lines_of_pieces(bytes.chunks(size)));
        }

        #[test]
        fn plain_text_passes_unchanged(text in "[ -~\u{a1}-\u{2fff}\t]{0,60}(\n[ -~]{0,60}){0,5}") {
            let mut wanted: Vec<&str> = text.split('\n').collect();
            if wanted.last() == Some(&"") {
                wanted.pop();
            }
            prop_assert_eq!(lines(text.as_bytes()), wanted);
        }

        /// What follows a line feed is read, whatever preceded it.
        #[test]
        fn a_marker_is_never_lost(bytes in bytes()) {
            let marked = [&bytes[..], b"\nhearth: state HOME\r\n"].concat();
            let lines = lines(&marked);
            prop_assert_eq!(lines.last().map(String::as_str), Some("hearth: state HOME"));
        }
    }
}
