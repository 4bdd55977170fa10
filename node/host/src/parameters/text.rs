//! Parameters as text, where a source takes no bytes: the message in base64.
//!
//! It is the usual alphabet with its padding (RFC 4648, section 4). Line breaks are ignored, because
//! the usual programs write them; nothing else is.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Why text is not parameters. It says nothing of the content, which is secret.
#[derive(Debug, thiserror::Error)]
#[error("expected base64, got {found}")]
pub struct TextError {
    found: String,
}

/// The bytes.
pub(super) fn decode(text: &[u8]) -> Result<Vec<u8>, TextError> {
    use base64::DecodeError as Error;
    let is_break = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let text: Vec<u8> = text
        .iter()
        .copied()
        .filter(|byte| !is_break(byte))
        .collect();
    STANDARD.decode(&text).map_err(|error| TextError {
        found: match error {
            Error::InvalidByte(at, _) => format!("another character at position {at}"),
            Error::InvalidLength(length) => format!("{length} characters, which end too early"),
            Error::InvalidLastSymbol(at, _) => format!("an incomplete end at position {at}"),
            Error::InvalidPadding => "wrong padding at its end".to_owned(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_breaks_are_ignored_and_nothing_else() {
        assert_eq!(decode(b"").unwrap(), b"");
        assert_eq!(decode(b"c2VjcmV0").unwrap(), b"secret");
        assert_eq!(decode(b"c2Vj\r\ncmV0Lg==\n").unwrap(), b"secret.");
        for (text, wanted) in [
            (&b"c2Vj cmV0"[..], "another character at position 4"),
            (b"c2VjcmV0Lg", "wrong padding at its end"),
            (b"c2VjcmV0L", "9 characters"),
            (b"c2Vjcm_0", "position 6"),
            // Two texts, one after the other.
            (b"Lg==Lg==", "position 2"),
            (b"Lh==", "incomplete end"),
        ] {
            let error = decode(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text:?}: {error}");
            assert!(!error.contains("c2Vj"), "{error}");
        }
    }
}
