//! The machine's package entries, in both of their forms, and what a private configuration takes of them.

use std::fs;
use std::path::Path;

use crate::files::{FileError, write};

/// How a file describes its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// One line for each (`NAME.list`).
    Lines,
    /// A stanza of fields for each (`NAME.sources`).
    Stanzas,
}

/// Copies the machine's entries from below `from`, each file as `entry` changes it; tells whether anything is left.
pub(super) fn copy(
    from: &Path,
    to: &Path,
    entry: impl Fn(&str, Form) -> String,
) -> Result<bool, FileError> {
    let mut files = vec![from.join("sources.list")];
    if let Ok(parts) = from.join("sources.list.d").read_dir() {
        files.extend(parts.flatten().map(|entry| entry.path()));
    }
    let mut any = false;
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let form = match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => Form::Lines,
            Some("sources") => Form::Stanzas,
            _ => continue,
        };
        let Ok(text) = fs::read_to_string(&file) else {
            // Absent, or not readable for this user.
            continue;
        };
        let text = entry(&text, form);
        any |= !text.trim().is_empty();
        write(&to.join(&*name), text)?;
    }
    Ok(any)
}

/// One suite at the mirrors that have `release` of Debian, with its binary packages.
pub(super) fn of_suite(text: &str, form: Form, release: &str, suite: &str) -> String {
    match form {
        Form::Lines => suite_of_lines(text, release, suite),
        Form::Stanzas => suite_of_stanzas(text, release, suite),
    }
}

/// What follows "deb" in the line of an entry of binary packages.
fn binaries(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("deb")?;
    rest.starts_with([' ', '\t']).then_some(rest)
}

/// Whether this is a mirror of Debian itself. Other repositories have suites of the same names, but not their
/// backports.
fn is_debian<'a>(uri: &str, mut components: impl Iterator<Item = &'a str>) -> bool {
    uri.trim_end_matches('/').ends_with("/debian") && components.any(|name| name == "main")
}

fn suite_of_lines(text: &str, release: &str, suite: &str) -> String {
    let mut lines = String::new();
    for rest in text.lines().filter_map(binaries) {
        let (options, entry) = match rest.split_once(']') {
            Some((options, entry)) => (format!("{options}]"), entry),
            None => (String::new(), rest),
        };
        let mut words = entry.split_whitespace();
        let (Some(uri), Some(of)) = (words.next(), words.next()) else {
            continue;
        };
        if of == release && is_debian(uri, words) {
            lines += &format!("deb{options} {uri} {suite} main\n");
        }
    }
    lines
}

fn suite_of_stanzas(text: &str, release: &str, suite: &str) -> String {
    let mut stanzas = String::new();
    for stanza in text.split("\n\n") {
        let lines = || stanza.lines().filter(|line| !line.starts_with('#'));
        let field = |wanted: &str| {
            let mut fields = lines().filter_map(|line| line.split_once(':'));
            let found = fields.find(|(name, _)| name.eq_ignore_ascii_case(wanted));
            found.map(|(_, value)| value.trim()).unwrap_or_default()
        };
        let mut uris = field("URIs").split_whitespace();
        let components = field("Components").split_whitespace();
        let has_release = field("Suites")
            .split_whitespace()
            .any(|name| name == release);
        if !has_release || !uris.next().is_some_and(|uri| is_debian(uri, components)) {
            continue;
        }
        for line in lines() {
            let name = line
                .split(':')
                .next()
                .unwrap_or_default()
                .to_ascii_lowercase();
            stanzas += &match name.as_str() {
                "types" => "Types: deb\n".to_owned(),
                "suites" => format!("Suites: {suite}\n"),
                "components" => "Components: main\n".to_owned(),
                _ => format!("{line}\n"),
            };
        }
        stanzas += "\n";
    }
    stanzas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_is_found_at_the_mirror_of_its_release() {
        let lines = "deb [signed-by=/k arch=amd64] http://mirror/debian/ bookworm main contrib\n\
                     deb http://mirror/debian bookworm-updates main\n\
                     deb https://elsewhere/linux/debian bookworm stable\n\
                     # deb http://other/debian bookworm main\n";
        assert_eq!(
            of_suite(lines, Form::Lines, "bookworm", "bookworm-backports"),
            "deb [signed-by=/k arch=amd64] http://mirror/debian/ bookworm-backports main\n"
        );
        let stanzas = "Types: deb deb-src\n# a comment\nURIs: http://mirror/debian\nSuites: bookworm bookworm-updates\n\
                       Components: main\nSigned-By: /k\n\nTypes: deb\nURIs: http://mirror/debian-security\n\
                       Suites: bookworm-security\nComponents: main\n";
        assert_eq!(
            of_suite(stanzas, Form::Stanzas, "bookworm", "bookworm-backports"),
            "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm-backports\nComponents: main\nSigned-By: /k\n\n"
        );
        assert_eq!(
            of_suite(lines, Form::Lines, "trixie", "trixie-backports"),
            ""
        );
    }
}
