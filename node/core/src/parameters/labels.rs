//! Labels and the names they are made of: the one set of rules, for parameters
//! and for the curator.

use std::collections::BTreeSet;

use hearth_api::v1::Label;

use super::Problem;

/// More than anyone needs, few enough to send around with every node.
pub(crate) const MOST: usize = 64;
const LONGEST: usize = 63;
const LONGEST_PREFIX: usize = 253;

/// Checks them; `field` is what they are called in a message.
pub(crate) fn parse(field: &str, labels: Vec<Label>) -> Result<Vec<Label>, Problem> {
    if labels.len() > MOST {
        return Err(Problem::unwanted(
            field,
            format!("at most {MOST} labels"),
            labels.len().to_string(),
        ));
    }
    let mut keys = BTreeSet::new();
    for (index, label) in labels.iter().enumerate() {
        if !is_key(&label.key) {
            return Err(Problem::unwanted(
                format!("{field}[{index}].key"),
                "1 to 63 letters, digits, \"-\", \"_\" or \".\", beginning and ending with a \
                 letter or digit, after an optional DNS name and \"/\"",
                quoted(&label.key),
            ));
        }
        if !label.value.is_empty() && !is_word(&label.value) {
            return Err(Problem::unwanted(
                format!("{field}[{index}].value"),
                "nothing, or 1 to 63 letters, digits, \"-\", \"_\" or \".\", beginning and \
                 ending with a letter or digit",
                quoted(&label.value),
            ));
        }
        if !keys.insert(&label.key) {
            return Err(Problem::unwanted(
                format!("{field}[{index}].key"),
                "a key that no other label has",
                quoted(&label.key),
            ));
        }
    }
    Ok(labels)
}

/// What was found instead, short enough for a console.
pub(crate) fn quoted(text: &str) -> String {
    let start: String = text.chars().take(LONGEST).collect();
    if start.len() < text.len() {
        format!("{start:?}… ({} bytes)", text.len())
    } else {
        format!("{text:?}")
    }
}

/// A DNS name in lower case without a final dot.
pub(super) fn is_dns_name(name: &str) -> bool {
    name.split('.').all(|label| {
        (1..=LONGEST).contains(&label.len())
            && label
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

/// Whether a label may have this key.
pub(crate) fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => {
            prefix.len() <= LONGEST_PREFIX && is_dns_name(prefix) && is_word(name)
        }
        None => is_word(key),
    }
}

fn is_word(word: &str) -> bool {
    let bytes = word.as_bytes();
    (1..=LONGEST).contains(&bytes.len())
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && [bytes[0], bytes[bytes.len() - 1]]
            .iter()
            .all(u8::is_ascii_alphanumeric)
}
