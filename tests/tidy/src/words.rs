//! Retired words stay out.
//!
//! Hearth once had a vocabulary of its own for things that the field has words for. Each entry of [`RETIRED`] is a word or
//! phrase that was replaced, and what is written instead. It must not come back in source, protocol buffers or
//! documentation; a word counts as a whole word, in this spelling. The terms that Hearth does define are in the glossary of
//! `docs/architecture.md`.

use std::path::Path;

use super::sources::Sources;

/// What is not written any more, and what is instead.
const RETIRED: &[(&str, &str)] = &[
    ("Company", "PeerReadiness"),
    ("Desk", "a value with one writer"),
    ("Dialect", "LogFormat"),
    ("Front", "HeaderState"),
    ("Hearing", "HeartbeatTracker"),
    ("Keeper", "the name of what it does"),
    ("Machinery", "StorageBackend"),
    ("Outlets", "Outputs"),
    ("Passage", "ProxyConnection"),
    ("Rider", "BundledProgram"),
    ("SealedFound", "SealedState"),
    (
        "Standing",
        "RoleCondition, EnrolmentStatus, NodeView or ClusterStatus",
    ),
    ("Stays", "CannotLeave"),
    ("Told", "ParametersInput, Stopped"),
    ("Unwell", "ProbeFailure"),
    ("Wish", "RoleChange, DesiredState"),
    ("Workshop", "BuildEnv"),
    ("another life", "a new enrolment"),
    ("are wanted", "expected …, got …"),
    ("as it lies", "as stored"),
    ("begins anew", "starts a new enrolment"),
    ("by its word", "according to it"),
    ("comes home", "becomes HOME"),
    ("credulous", "insecure"),
    ("farewell", "revocation grace"),
    ("in vain", "without success"),
    ("is wanted", "expected …, got …"),
    ("let go of", "released"),
    ("of no use", "not usable"),
    ("pull its plug", "cut its power"),
    ("ride along", "are bundled"),
    ("rides along", "is bundled"),
    ("spoilt", "corrupt"),
    ("stands in", "is in, is documented in"),
    ("the daemon speaks", "it uses the protocol"),
    ("vouches", "attests"),
];

/// This list itself.
const LIST: &str = "tests/tidy/src/words.rs";

pub(super) fn none_is_retired(sources: &Sources, wrong: &mut Vec<String>) {
    for (path, text) in sources.texts().filter(|(path, _)| *path != Path::new(LIST)) {
        for (number, line) in text.lines().enumerate() {
            for (word, instead) in retired(line) {
                wrong.push(format!(
                    "{}:{}: \"{word}\" was retired: write {instead}",
                    path.display(),
                    number + 1
                ));
            }
        }
    }
}

fn retired(line: &str) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    RETIRED.iter().filter(|(word, _)| has_word(line, word))
}

/// Whether `word` is in `text` with no letter, digit or underscore beside it.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retired_word_is_found_as_a_word() {
        let found = |line| retired(line).map(|(word, _)| *word).collect::<Vec<_>>();
        assert_eq!(found("fn take(desk: Desk, Desktop)"), ["Desk"]);
        assert_eq!(found("it rides along in the image"), ["rides along"]);
        assert_eq!(found("the node is HOME; Standings"), [""; 0]);
    }
}
