//! Checks that each decision has a number of its own and is in the index, `docs/decisions.md`, and that what the index has
//! exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const INDEX: &str = "docs/decisions.md";
const FOLDER: &str = "docs/decisions";

pub(super) fn are_in_the_index(files: &[PathBuf], index: &str, wrong: &mut Vec<String>) {
    let decisions: BTreeSet<&str> = files
        .iter()
        .filter(|path| path.parent() == Some(Path::new(FOLDER)))
        .filter_map(|path| path.file_name()?.to_str())
        .collect();
    let mut numbers: BTreeMap<&str, &str> = BTreeMap::new();
    for &file in &decisions {
        if !index.contains(&format!("(decisions/{file})")) {
            wrong.push(format!("{FOLDER}/{file}: is not in {INDEX}"));
        }
        let number = file.split('-').next().unwrap_or_default();
        if let Some(other) = numbers.insert(number, file) {
            wrong.push(format!("{FOLDER}/{file}: {other} has the same number"));
        }
    }
    let links = index.split("(decisions/").skip(1);
    for file in links.filter_map(|rest| rest.split([')', '#']).next()) {
        if !decisions.contains(file) {
            wrong.push(format!("{INDEX}: there is no {FOLDER}/{file}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(files: &[&str], index: &str) -> Vec<String> {
        let files: Vec<PathBuf> = files
            .iter()
            .map(|name| Path::new(FOLDER).join(name))
            .collect();
        let mut wrong = Vec::new();
        are_in_the_index(&files, index, &mut wrong);
        wrong
    }

    #[test]
    fn files_and_index_agree() {
        let index =
            "| 1 | [One](decisions/0001-one.md) |\n| 2 | [Two](decisions/0002-two.md#why) |";
        assert!(wrong(&["0001-one.md"], "[One](decisions/0001-one.md)").is_empty());
        let found = wrong(&["0001-one.md", "0001-other.md"], index);
        assert_eq!(
            found,
            [
                "docs/decisions/0001-other.md: is not in docs/decisions.md",
                "docs/decisions/0001-other.md: 0001-one.md has the same number",
                "docs/decisions.md: there is no docs/decisions/0002-two.md",
            ]
        );
    }
}
