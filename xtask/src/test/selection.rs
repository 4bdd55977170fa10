//! Which tests a filter selects.

use std::fs;

use anyhow::{Context, Result};

use super::E2E;
use crate::checkout::root;

/// What a filter selects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Selection {
    /// One crate or suite.
    pub whole: Option<String>,
    /// A part of the names of tests.
    pub name: Option<String>,
}

impl Selection {
    /// Unit tests: a crate, with or without its `hearth-`, or a part of a name, or both.
    pub(super) fn of_unit_tests(filter: Option<&str>) -> Selection {
        let crates: Vec<String> = hearth_tidy::crates().map(str::to_owned).collect();
        Selection::of(filter, &crates, |krate, word| {
            krate == word || krate.strip_prefix("hearth-") == Some(word)
        })
    }

    /// End-to-end tests: a suite, or a part of a name, or both.
    pub(super) fn of_suites(filter: Option<&str>) -> Result<Selection> {
        Ok(Selection::of(filter, &suites()?, |suite, word| {
            suite == word
        }))
    }

    fn of(filter: Option<&str>, wholes: &[String], is: impl Fn(&str, &str) -> bool) -> Selection {
        let Some(filter) = filter else {
            return Selection::default();
        };
        let (first, rest) = match filter.split_once("::") {
            Some((first, rest)) => (first, Some(rest)),
            None => (filter, None),
        };
        match wholes.iter().find(|whole| is(whole, first)) {
            Some(whole) => Selection {
                whole: Some(whole.clone()),
                name: rest.map(str::to_owned),
            },
            None => Selection {
                whole: None,
                name: Some(filter.to_owned()),
            },
        }
    }

    /// Whether it selects a test of this name, if that is in the whole.
    pub(super) fn names(&self, test: &str) -> bool {
        self.name.as_ref().is_none_or(|part| test.contains(part))
    }

    /// Whether it selects this end-to-end test, `SUITE::NAME`.
    pub(super) fn has(&self, test: &str) -> bool {
        let (suite, name) = test.split_once("::").unwrap_or(("", test));
        match &self.whole {
            Some(whole) => whole == suite && self.names(name),
            None => self.names(test),
        }
    }
}

/// The suites of the end-to-end tests: each file is one.
fn suites() -> Result<Vec<String>> {
    let folder = root().join("tests/tests").join(E2E);
    let context = || format!("cannot read {}", folder.display());
    let mut suites = Vec::new();
    for entry in fs::read_dir(&folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        if let Some(name) = path.file_stem().filter(|name| is_source && *name != "main") {
            suites.push(name.to_string_lossy().into_owned());
        }
    }
    suites.sort();
    Ok(suites)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(filter: &str) -> (Option<String>, Option<String>) {
        let wholes = ["boot".to_owned(), "hearth-base".to_owned()];
        let selection = Selection::of(Some(filter), &wholes, |whole, word| {
            whole == word || whole.strip_prefix("hearth-") == Some(word)
        });
        (selection.whole, selection.name)
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn a_filter_is_a_whole_or_a_name_or_both() {
        assert_eq!(select("boot"), (some("boot"), None));
        assert_eq!(select("base"), (some("hearth-base"), None));
        assert_eq!(
            select("boot::home::again"),
            (some("boot"), some("home::again"))
        );
        assert_eq!(select("slots::tests::a"), (None, some("slots::tests::a")));
    }

    #[test]
    fn suites_are_the_modules_of_their_program() {
        let selects = |filter, test| Selection::of_suites(filter).unwrap().has(test);
        assert!(selects(None, "boot::home"));
        assert!(selects(Some("boot"), "boot::home"));
        assert!(!selects(Some("boot"), "bootstrap_cuts::boot"));
        assert!(selects(Some("boot::om"), "boot::home"));
        assert!(!selects(Some("boot::om"), "boot::off"));
        assert!(selects(Some("me"), "boot::home"));

        let main = root().join("tests/tests").join(E2E).join("main.rs");
        let main = fs::read_to_string(main).unwrap();
        for suite in suites().unwrap() {
            assert!(main.contains(&format!("mod {suite};")), "{suite}");
        }
    }
}
