//! Parses the output of test programs, as far as the summary needs it.

use std::process::ExitStatus;

use hearth_build::command::CommandError;

/// A test, with its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    /// The package.
    pub krate: String,
    /// The test's name in its program.
    pub name: String,
}

/// The result of any number of test programs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    krate: String,
    passed: u64,
    ignored: u64,
    failed: Vec<Test>,
    /// Tests that have not ended, of those that libtest has named as slow.
    slow: Vec<Test>,
    /// What failed and is no test: programs that ended without the result of every test, with the reason.
    broken: Vec<String>,
    /// Durations in seconds; only with `--timings`.
    durations: Vec<(Test, f64)>,
}

impl Report {
    /// Of a program of this package, which has not begun.
    pub fn of(krate: &str) -> Report {
        Report {
            krate: krate.to_owned(),
            ..Report::default()
        }
    }

    /// Processes the next line.
    pub fn observe(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
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
            ["test", name, "has", "been", "running", ..] => self.slow.push(self.test(name)),
            ["test", name, "...", result, ref rest @ ..] => {
                self.slow.retain(|test| test.name != name);
                if let [time] = rest
                    && let Some(seconds) = seconds(time)
                {
                    self.took(name, seconds);
                }
                if result == "FAILED" {
                    self.failed.push(self.test(name));
                }
            }
            // A test with machines, without its wait for a place.
            ["time", name, seconds, "s"] => {
                if let Ok(seconds) = seconds.parse() {
                    self.took(name, seconds);
                }
            }
            _ => {}
        }
    }

    fn test(&self, name: &str) -> Test {
        Test {
            krate: self.krate.clone(),
            name: name.to_owned(),
        }
    }

    /// The first duration of a test is its own.
    fn took(&mut self, name: &str, seconds: f64) {
        let test = self.test(name);
        if self.durations.iter().all(|(known, _)| *known != test) {
            self.durations.push((test, seconds));
        }
    }

    /// Its program has failed. If no test has, the program itself did.
    pub fn ended(&mut self, program: &str, status: ExitStatus) {
        if self.failed.is_empty() {
            self.broke(format!("{program}: {status}"));
        }
    }

    /// Its program was killed because it printed nothing for too long: the tests that had not ended have failed.
    pub fn hung(&mut self, program: &str, error: &CommandError) {
        self.failed.append(&mut self.slow);
        self.broke(format!("{program}: {error}"));
    }

    /// Something other than a test has failed.
    pub fn broke(&mut self, reason: String) {
        self.broken.push(reason);
    }

    /// Adds another report.
    pub fn add(&mut self, other: Report) {
        self.passed += other.passed;
        self.ignored += other.ignored;
        self.failed.extend(other.failed);
        self.broken.extend(other.broken);
        self.durations.extend(other.durations);
    }

    /// Whether nothing failed.
    pub fn is_ok(&self) -> bool {
        self.failed.is_empty() && self.broken.is_empty()
    }

    /// The tests that failed.
    pub fn failed(&self) -> &[Test] {
        &self.failed
    }

    /// What failed and is no test.
    pub fn broken(&self) -> &[String] {
        &self.broken
    }

    /// Durations of tests, in seconds.
    pub fn durations(&self) -> &[(Test, f64)] {
        &self.durations
    }

    /// Number of tests that were run.
    pub fn run(&self) -> u64 {
        self.passed + self.failed.len() as u64
    }

    /// Number of tests that were not run because they are long.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// The counts as text; empty if no test was run.
    pub fn counts(&self) -> String {
        let counts = [
            (self.passed, "passed"),
            (self.failed.len() as u64, "failed"),
            (self.broken.len() as u64, "broken"),
            (self.ignored, "ignored"),
        ];
        let words = counts.iter().filter(|(count, _)| *count > 0);
        let words: Vec<String> = words.map(|(n, what)| format!("{n} {what}")).collect();
        words.join(", ")
    }
}

/// `<1.234s>`.
fn seconds(time: &str) -> Option<f64> {
    let time = time.strip_prefix('<')?.strip_suffix("s>")?;
    time.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::time::Duration;

    use super::*;

    fn test(krate: &str, name: &str) -> Test {
        Test {
            krate: krate.to_owned(),
            name: name.to_owned(),
        }
    }

    fn observed(krate: &str, lines: &[&str]) -> Report {
        let mut report = Report::of(krate);
        lines.iter().for_each(|line| report.observe(line));
        report
    }

    #[test]
    fn a_run_is_counted_and_its_failures_named() {
        let mut total = Report::default();
        total.add(observed("hearth-base", &[
            "running 3 tests",
            "test slots::tests::a ... ok",
            "test slots::tests::b ... FAILED",
            "test slots::tests::c ... ignored",
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ]));
        total.add(observed("hearth-tests", &[
            "time boot::home 61.2 s",
            "test boot::home ... FAILED <91.250s>",
            "test boot::off ... ok <1.500s>",
            "test result: FAILED. 40 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ]));
        let failed = [
            test("hearth-base", "slots::tests::b"),
            test("hearth-tests", "boot::home"),
        ];
        assert_eq!(total.failed(), failed);
        assert_eq!(total.counts(), "41 passed, 2 failed, 1 ignored");
        assert_eq!(total.run(), 43);
        assert!(!total.is_ok());
        assert_eq!(
            total.durations(),
            [
                (test("hearth-tests", "boot::home"), 61.2),
                (test("hearth-tests", "boot::off"), 1.5)
            ]
        );
        assert_eq!(Report::default().counts(), "");
    }

    #[test]
    fn a_program_that_crashes_is_a_failure_of_its_own() {
        let mut report = observed("hearth-base", &["test a ... ok"]);
        report.ended("hearth_base", ExitStatus::from_raw(9));
        assert!(!report.is_ok());
        assert_eq!(report.broken(), ["hearth_base: signal: 9 (SIGKILL)"]);
        let mut report = observed("hearth-base", &["test a ... FAILED"]);
        report.ended("hearth_base", ExitStatus::from_raw(101 << 8));
        assert!(report.broken().is_empty() && !report.is_ok());
    }

    #[test]
    fn the_slow_tests_of_a_program_that_hangs_have_failed() {
        let mut report = observed(
            "hearth-switch",
            &[
                "test a has been running for over 60 seconds",
                "test b has been running for over 60 seconds",
                "test a ... ok <61.012s>",
            ],
        );
        let error = CommandError::Silent {
            line: "switch".to_owned(),
            bound: Duration::from_secs(600),
        };
        report.hung("switch", &error);
        assert_eq!(report.failed(), [test("hearth-switch", "b")]);
        let broken = ["switch: `switch` printed nothing for 600 s"];
        assert_eq!(report.broken(), broken);
    }
}
