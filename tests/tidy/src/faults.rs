//! Checks that the tests that `tests/README.md` names for each fault exist.
//!
//! A name is `SUITE::TEST` or `CRATE::MODULE::TEST`, with the crate's `hearth-` omitted, and as it is written or as Rust
//! has it. Braces contain alternatives, as in a shell, and `…` stands for several tests, which are not checked. A test
//! exists if its name occurs as a word in a file of the suite, or in a source file of the crate, because macros define
//! tests, too.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::crates::Metadata;
use super::sources::Sources;
use super::words::has_word;

const TABLE: &str = "tests/README.md";

pub(super) fn are_tested_as_stated(
    root: &Path,
    sources: &Sources,
    metadata: &Metadata,
    wrong: &mut Vec<String>,
) -> Result<()> {
    let crates: BTreeMap<&str, &Path> = metadata
        .ours()
        .filter_map(|package| {
            let name = package.name.strip_prefix("hearth-")?;
            let folder = package.manifest_path.parent()?.strip_prefix(root).ok()?;
            Some((name, folder))
        })
        .collect();
    let mut known: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for name in named(sources.text(Path::new(TABLE))?) {
        let (first, test) = (first(&name), last(&name));
        let texts = known.entry(first.to_owned()).or_insert_with(|| {
            let of_crate = crates.get(first.replace('_', "-").as_str());
            texts(sources, first, of_crate.copied())
        });
        if texts.is_empty() {
            wrong.push(format!(
                "{TABLE}: {name}: {first} is neither a suite nor a crate"
            ));
        } else if test != "…" && !texts.iter().any(|text| has_word(text, test)) {
            wrong.push(format!("{TABLE}: {name}: no such test"));
        }
    }
    Ok(())
}

/// The sources of the suite of this name, and of the crate, if there is one, in this folder.
fn texts<'a>(sources: &'a Sources, name: &str, folder: Option<&Path>) -> Vec<&'a str> {
    let suite = Path::new("tests/tests/e2e").join(name);
    let of_suite = |path: &Path| path.with_extension("") == suite || path.starts_with(&suite);
    let of_crate = |path: &Path| folder.is_some_and(|folder| path.starts_with(folder));
    let texts = sources.rust();
    let texts = texts.filter(|(path, _)| of_suite(path) || of_crate(path));
    texts.map(|(_, text)| text).collect()
}

/// The names of tests in the table's rows.
fn named(table: &str) -> Vec<String> {
    let rows = table.lines().filter(|line| {
        let number = line
            .strip_prefix("| ")
            .and_then(|rest| rest.split(' ').next());
        number.is_some_and(is_number)
    });
    rows.flat_map(|row| row.split('`').skip(1).step_by(2))
        .filter(|name| name.contains("::"))
        .flat_map(alternatives)
        .collect()
}

/// Whether this is the first word of a row: a number, with or without a letter, or the dash of a row without one.
fn is_number(word: &str) -> bool {
    let digits = word.trim_end_matches(',');
    let digits = digits.strip_prefix(|first: char| first.is_ascii_uppercase());
    let digits = digits.unwrap_or(word);
    word == "–" || (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// `a{b,c}d` is `abd` and `acd`.
fn alternatives(name: &str) -> Vec<String> {
    let Some((before, rest)) = name.split_once('{') else {
        return vec![name.to_owned()];
    };
    let Some((inner, after)) = rest.split_once('}') else {
        return vec![name.to_owned()];
    };
    let all = inner.split(',');
    all.flat_map(|one| alternatives(&format!("{before}{one}{after}")))
        .collect()
}

fn first(name: &str) -> &str {
    name.split("::").next().unwrap_or(name)
}

fn last(name: &str) -> &str {
    let last = name.rsplit("::").next().unwrap_or(name);
    if last.ends_with('…') { "…" } else { last }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_in_rows_between_backquotes() {
        let table = "Text `a::b`.\n| number | fault |\n| 7 | cut | E `s::{x,y}_z`; U `c::m::t`, `d` (`e::…`) |\n\
            | H7, L1 | pod | U `f::g` |\n| – | other | U `h::i` |\n| A | `j::k` |\n| suite | `l::m` |\n";
        let names = ["s::x_z", "s::y_z", "c::m::t", "e::…", "f::g", "h::i"];
        assert_eq!(named(table), names);
        assert_eq!(alternatives("{a,b}{c,d}"), ["ac", "ad", "bc", "bd"]);
    }

    #[test]
    fn a_name_is_looked_for_as_a_word() {
        assert!(has_word("fn it_boots() {", "it_boots"));
        assert!(!has_word("fn it_boots_twice() {", "it_boots"));
        assert_eq!(last("boot::an_owner_…"), "…");
    }
}
