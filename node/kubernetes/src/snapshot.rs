//! Compares command lines and configuration files of programs with the committed snapshots in
//! `snapshot/`: one file for each program, for both versions in [`KUBERNETES`].

use std::fs;
use std::path::Path;

use hearth_host::bundle::Bundle;
use hearth_host::layout::Root;
use serde_json::Value;
use tempfile::TempDir;

use super::program::Program;

/// The versions that the node supports.
pub(crate) const KUBERNETES: [&str; 2] = ["1.36.3", "1.37.2"];

/// A bundle without programs.
pub(crate) struct EmptyBundle {
    directory: TempDir,
    pub bundle: Bundle,
}

impl EmptyBundle {
    /// A bundle of this Kubernetes version.
    pub(crate) fn of(kubernetes: &str) -> Self {
        Self::with(kubernetes, |_| {})
    }

    /// The same, with files that `make` creates.
    pub(crate) fn with(kubernetes: &str, make: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let versions = format!("kubernetes {kubernetes}\ncontainerd 2.4.2\n");
        fs::write(directory.path().join("VERSION"), versions).unwrap();
        make(directory.path());
        let bundle = Bundle::open(directory.path()).unwrap();
        Self { directory, bundle }
    }

    /// How the program is started, a line each: directory, environment, file and
    /// arguments. The bundle is at `/bundle`.
    pub(crate) fn lines(&self, program: &Program) -> String {
        let mut lines = vec![format!("in {}", program.directory.display())];
        for (name, value) in &program.environment {
            lines.push(format!("{name}={}", value.display()));
        }
        lines.push(program.file.display().to_string());
        for argument in &program.arguments {
            lines.push(argument.display().to_string());
        }
        let text = lines.join("\n") + "\n";
        text.replace(&self.directory.path().display().to_string(), "/bundle")
    }
}

/// The node's files, below `/node`.
pub(crate) fn root() -> Root {
    Root::under(Path::new("/node"))
}

/// Fails unless the text is as committed, and shows the lines that differ.
#[track_caller]
pub(crate) fn check(committed: &str, now: &str) {
    assert!(
        committed == now,
        "differs from the snapshot (- committed, + actual):\n{}\nactual:\n{now}",
        difference(committed, now)
    );
}

/// The same for JSON, independent of the order of fields.
#[track_caller]
pub(crate) fn check_json(committed: &str, now: &Value) {
    let committed: Value = serde_json::from_str(committed).unwrap();
    if committed != *now {
        let [committed, now] =
            [&committed, now].map(|value| serde_json::to_string_pretty(value).unwrap());
        check(&committed, &now);
    }
}

/// The lines by which two texts differ, in their order: `-` before those of the
/// first, `+` before those of the second.
pub(crate) fn difference(first: &str, second: &str) -> String {
    let (first, second): (Vec<_>, Vec<_>) = (first.lines().collect(), second.lines().collect());
    // Length of the longest common subsequence of the remaining lines.
    let mut common = vec![vec![0; second.len() + 1]; first.len() + 1];
    for i in (0..first.len()).rev() {
        for j in (0..second.len()).rev() {
            common[i][j] = if first[i] == second[j] {
                common[i + 1][j + 1] + 1
            } else {
                common[i + 1][j].max(common[i][j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut told = String::new();
    while i < first.len() || j < second.len() {
        let is_same = i < first.len() && j < second.len() && first[i] == second[j];
        if is_same {
            (i, j) = (i + 1, j + 1);
        } else if j == second.len() || (i < first.len() && common[i + 1][j] >= common[i][j + 1]) {
            told += &format!("-{}\n", first[i]);
            i += 1;
        } else {
            told += &format!("+{}\n", second[j]);
            j += 1;
        }
    }
    told
}

#[test]
fn only_lines_that_differ_are_shown() {
    assert_eq!(difference("a\nb\nc\n", "a\nb\nc\n"), "");
    assert_eq!(difference("a\nb\nc\n", "a\nx\nc\ny\n"), "-b\n+x\n+y\n");
    assert_eq!(difference("", "a\n"), "+a\n");
    assert_eq!(difference("a\nb\n", "b\na\n"), "-a\n+a\n");
}
