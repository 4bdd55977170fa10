//! Validation of labels and of patterns that select labels: one set of rules for a machine's
//! parameters, for the curator, and for operator tools that check before they call the curator.

use std::collections::BTreeSet;

use crate::v1::Label;

/// Maximum labels of one node: few enough to be sent along with it.
pub const MAX_LABELS: usize = 64;
/// Maximum bytes of a name or a value.
const MAX_WORD_LENGTH: usize = 63;
/// Maximum bytes of the DNS name before a key's "/".
const MAX_PREFIX_LENGTH: usize = 253;

/// Invalid labels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {found}")]
pub struct LabelError {
    /// The field, by its name in the message.
    pub field: String,
    /// What it should contain.
    pub expected: String,
    /// What it contains.
    pub found: String,
}

impl LabelError {
    fn new(
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }
}

/// Checks labels; `field` is their name in the message.
pub fn parse(field: &str, labels: Vec<Label>) -> Result<Vec<Label>, LabelError> {
    check(field, &labels)?;
    Ok(labels)
}

fn check(field: &str, labels: &[Label]) -> Result<(), LabelError> {
    if labels.len() > MAX_LABELS {
        return Err(LabelError::new(
            field,
            format!("at most {MAX_LABELS} labels"),
            labels.len().to_string(),
        ));
    }
    let mut keys = BTreeSet::new();
    for (index, label) in labels.iter().enumerate() {
        if !is_key(&label.key) {
            return Err(LabelError::new(
                format!("{field}[{index}].key"),
                "1 to 63 letters, digits, \"-\", \"_\" or \".\", beginning and ending with a \
                 letter or digit, after an optional DNS name and \"/\"",
                quoted(&label.key),
            ));
        }
        if !label.value.is_empty() && !is_word(&label.value) {
            return Err(LabelError::new(
                format!("{field}[{index}].value"),
                "nothing, or 1 to 63 letters, digits, \"-\", \"_\" or \".\", beginning and \
                 ending with a letter or digit",
                quoted(&label.value),
            ));
        }
        if !keys.insert(&label.key) {
            return Err(LabelError::new(
                format!("{field}[{index}].key"),
                "a key that no other label has",
                quoted(&label.key),
            ));
        }
    }
    Ok(())
}

/// Checks a change of a node's labels: the labels to set, and the keys of the labels to delete.
pub fn check_changes(upsert: &[Label], delete: &[String]) -> Result<(), LabelError> {
    check("upsert", upsert)?;
    if delete.len() > MAX_LABELS {
        return Err(LabelError::new(
            "delete",
            format!("at most {MAX_LABELS} keys"),
            delete.len().to_string(),
        ));
    }
    for (index, key) in delete.iter().enumerate() {
        let expected = if !is_key(key) {
            "the key of a label"
        } else if upsert.iter().any(|label| label.key == *key) {
            "a key that is not in upsert"
        } else {
            continue;
        };
        return Err(LabelError::new(
            format!("delete[{index}]"),
            expected,
            quoted(key),
        ));
    }
    Ok(())
}

/// Whether this is a valid pattern that selects labels: a key, or the beginning of one followed by
/// "*", which stands for any rest.
pub fn is_pattern(pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => is_beginning(beginning),
        None => is_key(pattern),
    }
}

/// Whether the text can be continued to a key.
fn is_beginning(text: &str) -> bool {
    // It can be continued by a letter, or by a DNS label and a name.
    text.is_empty()
        || is_key(&format!("{text}a"))
        || !text.contains('/') && is_key(&format!("{text}a/a"))
}

/// The text quoted, short enough for a console.
pub fn quoted(text: &str) -> String {
    let start: String = text.chars().take(MAX_WORD_LENGTH).collect();
    if start.len() < text.len() {
        format!("{start:?}… ({} bytes)", text.len())
    } else {
        format!("{text:?}")
    }
}

/// A DNS name in lower case without a final dot.
pub fn is_dns_name(name: &str) -> bool {
    name.split('.').all(|label| {
        (1..=MAX_WORD_LENGTH).contains(&label.len())
            && label
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

/// One label of such a name, as the names of Kubernetes' namespaces are.
pub fn is_dns_label(name: &str) -> bool {
    !name.contains('.') && is_dns_name(name)
}

/// Whether this is a valid key of a label.
pub fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => {
            prefix.len() <= MAX_PREFIX_LENGTH && is_dns_name(prefix) && is_word(name)
        }
        None => is_word(key),
    }
}

/// Whether this is a valid value of a label that is not empty.
pub fn is_word(word: &str) -> bool {
    let bytes = word.as_bytes();
    (1..=MAX_WORD_LENGTH).contains(&bytes.len())
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && [bytes[0], bytes[bytes.len() - 1]]
            .iter()
            .all(u8::is_ascii_alphanumeric)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn patterns_are_keys_or_beginnings_of_keys() {
        for good in [
            "rack",
            "rack*",
            "*",
            "topology.kubernetes.io/*",
            "topology.kubernetes.io/z*",
            "topology.*",
            "a-*",
            "example.org/role",
        ] {
            assert!(is_pattern(good), "{good:?}");
        }
        for wrong in [
            "",
            "**",
            "a*b",
            "a b",
            "a,b",
            "-*",
            "/*",
            "a/b/*",
            "topology.kubernetes.io/",
            "-",
            &"a".repeat(64),
            &format!("x/{}*", "a".repeat(63)),
        ] {
            assert!(!is_pattern(wrong), "{wrong:?}");
        }
    }

    fn label(key: &str, value: &str) -> Label {
        Label {
            key: key.to_owned(),
            value: value.to_owned(),
        }
    }

    #[test]
    fn changes_name_the_field_that_is_wrong() {
        let many: Vec<_> = (0..65).map(|n| format!("k{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let table: &[(&[Label], &[&str], &str)] = &[
            (&[label("zone", "b"), label("rack", "")], &["row"], ""),
            (&[], &[], ""),
            (
                &[label("zone", "a=b")],
                &[],
                "upsert[0].value: expected nothing, or 1 to 63",
            ),
            (
                &[label("a", ""), label("-", "")],
                &[],
                "upsert[1].key: expected 1 to 63",
            ),
            (
                &[label("a", ""), label("a", "b")],
                &[],
                "upsert[1].key: expected a key that no other label has, got \"a\"",
            ),
            (
                &[],
                &["a", "a b"],
                "delete[1]: expected the key of a label, got \"a b\"",
            ),
            (
                &[label("a", "")],
                &["a"],
                "delete[0]: expected a key that is not in upsert, got \"a\"",
            ),
            (&[], &many, "delete: expected at most 64 keys, got 65"),
        ];
        for (upsert, delete, expected) in table {
            let delete: Vec<_> = delete.iter().map(|&key| key.to_owned()).collect();
            let told = match check_changes(upsert, &delete) {
                Ok(()) => String::new(),
                Err(error) => error.to_string(),
            };
            assert!(told.starts_with(expected), "{told}");
            assert_eq!(told.is_empty(), expected.is_empty(), "{told}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn arbitrary_changes_are_judged_without_harm(
            upsert: Vec<(String, String)>,
            delete: Vec<String>,
        ) {
            let upsert: Vec<_> = upsert.iter().map(|(key, value)| label(key, value)).collect();
            let _ = check_changes(&upsert, &delete);
        }

        #[test]
        fn arbitrary_patterns_are_judged_without_harm(pattern: String) {
            let _ = is_pattern(&pattern);
        }

        /// Every beginning of a key is a valid pattern.
        #[test]
        fn beginnings_of_keys_are_patterns(
            key in "([a-z][a-z0-9]{0,3}(\\.[a-z][a-z0-9-]{0,3}[a-z0-9]){0,2}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,6}[A-Za-z0-9])?",
            at: prop::sample::Index,
        ) {
            prop_assert!(is_key(&key));
            let pattern = format!("{}*", &key[..at.index(key.len() + 1)]);
            prop_assert!(is_pattern(&pattern), "{pattern:?}");
        }
    }
}
