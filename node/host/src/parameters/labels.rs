//! Labels and the names they are made of: the one set of rules, for parameters
//! and for the curator.

use std::collections::BTreeSet;

use hearth_api::v1::{KubernetesConfiguration, Label};

use super::Problem;

/// More than anyone needs, few enough to send around with every node.
pub const MOST: usize = 64;
/// Patterns by which labels are picked.
const MOST_PATTERNS: usize = 64;
const LONGEST: usize = 63;
const LONGEST_PREFIX: usize = 253;

/// Checks them; `field` is what they are called in a message.
pub fn parse(field: &str, labels: Vec<Label>) -> Result<Vec<Label>, Problem> {
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

/// Checks patterns by which labels are picked: each a key, or the beginning of
/// one followed by "*", which stands for any rest. `field` is what they are
/// called in a message.
pub fn parse_patterns(field: &str, patterns: Vec<String>) -> Result<Vec<String>, Problem> {
    if patterns.len() > MOST_PATTERNS {
        return Err(Problem::unwanted(
            field,
            format!("at most {MOST_PATTERNS} patterns"),
            patterns.len().to_string(),
        ));
    }
    let mut known = BTreeSet::new();
    for (index, pattern) in patterns.iter().enumerate() {
        let wanted = match pattern.strip_suffix('*') {
            Some(beginning) if !is_beginning(beginning) => {
                "the beginning of a label's key before \"*\""
            }
            None if !is_key(pattern) => "the key of a label, or the beginning of one and \"*\"",
            _ if !known.insert(pattern) => "a pattern that is not there before",
            _ => continue,
        };
        return Err(Problem::unwanted(
            format!("{field}[{index}]"),
            wanted,
            quoted(pattern),
        ));
    }
    Ok(patterns)
}

/// Checks what Kubernetes is to take over from the cluster.
pub fn check_kubernetes(
    field: &str,
    configuration: KubernetesConfiguration,
) -> Result<KubernetesConfiguration, Problem> {
    let KubernetesConfiguration {
        synchronized_labels,
    } = configuration;
    let field = format!("{field}.synchronized_labels");
    Ok(KubernetesConfiguration {
        synchronized_labels: parse_patterns(&field, synchronized_labels)?,
    })
}

/// Whether something can follow so that the whole is a key.
fn is_beginning(text: &str) -> bool {
    // What may follow is a letter, or a DNS name's label and a name.
    text.is_empty()
        || is_key(&format!("{text}a"))
        || !text.contains('/') && is_key(&format!("{text}a/a"))
}

/// What was found instead, short enough for a console.
pub fn quoted(text: &str) -> String {
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
pub fn is_key(key: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(patterns: &[&str]) -> String {
        let patterns = patterns.iter().map(|&p| p.to_owned()).collect();
        parse_patterns("field", patterns).unwrap_err().to_string()
    }

    #[test]
    fn patterns_are_keys_or_beginnings_of_keys() {
        let good = [
            "rack",
            "rack*",
            "*",
            "topology.kubernetes.io/*",
            "topology.kubernetes.io/z*",
            "topology.*",
            "a-*",
            "example.org/role",
        ]
        .map(str::to_owned)
        .to_vec();
        assert_eq!(parse_patterns("field", good.clone()).unwrap(), good);
        for wrong in [
            "",
            "**",
            "a*b",
            "a b",
            "-*",
            "/*",
            "a/b/*",
            "topology.kubernetes.io/",
            "-",
            &"a".repeat(64),
            &format!("x/{}*", "a".repeat(63)),
        ] {
            assert!(refused(&["ok", wrong]).contains("field[1]"), "{wrong:?}");
        }
        assert!(refused(&["a*", "b", "a*"]).contains("field[2]"));
        let many: Vec<_> = (0..65).map(|n| format!("k{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert!(refused(&many).contains("at most 64"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn arbitrary_patterns_are_judged_without_harm(patterns: Vec<String>) {
            let _ = parse_patterns("field", patterns);
        }

        /// Every beginning of a key is one.
        #[test]
        fn beginnings_of_keys_are_patterns(
            key in "([a-z][a-z0-9]{0,3}(\\.[a-z][a-z0-9-]{0,3}[a-z0-9]){0,2}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,6}[A-Za-z0-9])?",
            at: prop::sample::Index,
        ) {
            prop_assert!(is_key(&key));
            let pattern = format!("{}*", &key[..at.index(key.len() + 1)]);
            prop_assert!(parse_patterns("field", vec![pattern]).is_ok());
        }
    }
}
