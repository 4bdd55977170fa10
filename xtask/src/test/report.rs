//! Parses the output of `cargo test`, as far as the summary needs it.

/// A failed test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FailedTest {
    /// Name of the test program: the file of a suite, or the crate.
    pub suite: String,
    /// The test's name in it.
    pub test: String,
}

/// A run of any number of test programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    suite: String,
    passed: u64,
    ignored: u64,
    failed: Vec<FailedTest>,
}

impl Report {
    /// Processes the next line.
    pub(super) fn observe(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            // Running unittests src/lib.rs (target/debug/deps/hearth_base-0123456789abcdef)
            ["Running", .., program] => self.suite = suite(program),
            ["Doc-tests", krate] => self.suite = krate.to_owned(),
            ["test", test, "...", "FAILED"] => self.failed.push(FailedTest {
                suite: self.suite.clone(),
                test: test.to_owned(),
            }),
            [
                "test",
                "result:",
                _,
                passed,
                "passed;",
                _,
                "failed;",
                ignored,
                "ignored;",
                ..,
            ] => {
                self.passed += passed.parse::<u64>().unwrap_or(0);
                self.ignored += ignored.parse::<u64>().unwrap_or(0);
            }
            _ => {}
        }
    }

    /// The tests that failed.
    pub(super) fn failed(&self) -> &[FailedTest] {
        &self.failed
    }

    /// Number of tests that were run.
    pub(super) fn run(&self) -> u64 {
        self.passed + self.failed.len() as u64
    }

    /// The counts as text; empty if no test was run.
    pub(super) fn counts(&self) -> String {
        let counts = [
            (self.passed, "passed"),
            (self.failed.len() as u64, "failed"),
            (self.ignored, "ignored"),
        ];
        let words = counts.iter().filter(|(count, _)| *count > 0);
        let words: Vec<String> = words.map(|(n, what)| format!("{n} {what}")).collect();
        words.join(", ")
    }
}

/// The program's name without folder and hash.
fn suite(program: &str) -> String {
    let file = program.trim_matches(['(', ')']).rsplit('/').next();
    let file = file.unwrap_or_default();
    let name = file.rsplit_once('-').map_or(file, |(name, _)| name);
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_counted_and_its_failures_named() {
        let mut report = Report::default();
        for line in [
            "   Compiling hearth-base v0.1.0",
            "     Running unittests src/lib.rs (target/debug/deps/hearth_base-0123456789abcdef)",
            "running 3 tests",
            "test slots::tests::a ... ok",
            "test slots::tests::b ... FAILED",
            "test slots::tests::c ... ignored",
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "     Running tests/boot.rs (/elsewhere/debug/deps/boot-fedcba9876543210)",
            "test home ... FAILED",
            "test result: FAILED. 40 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
            "   Doc-tests hearth_api",
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ] {
            report.observe(line);
        }
        let failed = |suite: &str, test: &str| FailedTest {
            suite: suite.to_owned(),
            test: test.to_owned(),
        };
        assert_eq!(
            report.failed(),
            [
                failed("hearth_base", "slots::tests::b"),
                failed("boot", "home")
            ]
        );
        assert_eq!(report.counts(), "43 passed, 2 failed, 1 ignored");
        assert_eq!(report.run(), 45);
        assert_eq!(Report::default().counts(), "");
    }
}
