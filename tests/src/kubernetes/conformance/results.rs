//! The results of a sweep, in a folder.
//!
//! `results.jsonl` has a line for each result, which is on the disk before the next case begins; the last one of a case
//! counts. From it follow the reports: `junit_01.xml`, as upstream's submission of conformance results wants it beside
//! `e2e.log`, and `summary.txt`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// How upstream's reporter names the suite.
const SUITE: &str = "Kubernetes e2e suite";

/// The result of a case.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CaseResult {
    /// Its name.
    pub case: String,
    pub passed: bool,
    pub seconds: f64,
}

impl CaseResult {
    fn line(&self) -> String {
        let line = json!({ "case": self.case, "passed": self.passed, "seconds": self.seconds });
        format!("{line}\n")
    }

    fn parse(line: &str) -> Option<Self> {
        let line: Value = serde_json::from_str(line).ok()?;
        Some(Self {
            case: line["case"].as_str()?.to_owned(),
            passed: line["passed"].as_bool()?,
            seconds: line["seconds"].as_f64()?,
        })
    }
}

/// All results that there are.
pub(super) struct Results {
    folder: PathBuf,
    file: File,
    all: BTreeMap<String, CaseResult>,
}

impl Results {
    /// Those in this folder, which is created if there is none.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let path = folder.join("results.jsonl");
        let known = match fs::read_to_string(&path) {
            Ok(known) => known,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let lines = known.lines().zip(1..).map(|(line, number)| {
            let result = CaseResult::parse(line).with_context(|| {
                let path = path.display();
                format!("{path}, line {number}: expected the result of a case, got {line:?}")
            })?;
            Ok((result.case.clone(), result))
        });
        let all = lines.collect::<Result<_>>()?;
        let file = OpenOptions::new().create(true).append(true).open(&path);
        Ok(Self {
            folder: folder.to_owned(),
            file: file.with_context(|| format!("cannot write {}", path.display()))?,
            all,
        })
    }

    pub(super) fn has_passed(&self, case: &str) -> bool {
        self.all.get(case).is_some_and(|result| result.passed)
    }

    pub(super) fn add(&mut self, result: CaseResult) -> Result<()> {
        self.file.write_all(result.line().as_bytes())?;
        self.file.sync_data()?;
        self.all.insert(result.case.clone(), result);
        Ok(())
    }

    /// Writes the reports about these cases.
    pub(super) fn write_reports(&self, cases: &[&str]) -> Result<()> {
        for (name, content) in [
            ("junit_01.xml", self.junit(cases)),
            ("summary.txt", self.summary(cases)),
        ] {
            let path = self.folder.join(name);
            fs::write(&path, content)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    fn of<'a>(&'a self, cases: &'a [&str]) -> impl Iterator<Item = &'a CaseResult> {
        cases.iter().filter_map(|case| self.all.get(*case))
    }

    fn junit(&self, cases: &[&str]) -> String {
        let count = self.of(cases).count();
        let failures = self.of(cases).filter(|result| !result.passed).count();
        let seconds: f64 = self.of(cases).map(|result| result.seconds).sum();
        let counts = format!("tests=\"{count}\" failures=\"{failures}\" time=\"{seconds:.3}\"");
        let mut xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites {counts}>\n  <testsuite name=\"{SUITE}\" {counts}>\n"
        );
        for result in self.of(cases) {
            let (name, seconds) = (escaped(&result.case), result.seconds);
            let (status, failure) = match result.passed {
                true => ("passed", ""),
                false => ("failed", "<failure message=\"see e2e.log\"></failure>"),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(
                xml,
                "    <testcase name=\"[It] {name}\" classname=\"{SUITE}\" status=\"{status}\" \
                 time=\"{seconds:.3}\">{failure}</testcase>"
            );
        }
        xml + "  </testsuite>\n</testsuites>\n"
    }

    fn summary(&self, cases: &[&str]) -> String {
        let passed = self.of(cases).filter(|result| result.passed).count();
        let done = self.of(cases).count();
        let seconds: f64 = self.of(cases).map(|result| result.seconds).sum();
        let all = cases.len();
        let mut text = format!(
            "{passed} of {all} cases passed, {} failed, {} have not run\n",
            done - passed,
            all - done
        );
        let _ = write!(text, "{:.0} minutes", seconds / 60.0);
        if done > 0 && done < all {
            let estimate = seconds / done as f64 * all as f64 / 3600.0;
            let _ = write!(text, "; all of them would take {estimate:.1} hours");
        }
        text.push('\n');
        for result in self.of(cases).filter(|result| !result.passed) {
            let _ = writeln!(text, "failed: {}", result.case);
        }
        text
    }
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_passed_is_remembered_and_reported() {
        let folder = std::env::temp_dir().join(format!("hearth-results-{}", std::process::id()));
        let result = |case: &str, passed| CaseResult {
            case: case.to_owned(),
            passed,
            seconds: 90.0,
        };
        let cases = ["a \"b\" <c>", "d", "e", "f"];
        let mut first = Results::open(&folder).unwrap();
        for (case, passed) in [(cases[0], true), ("d", false), ("of another version", true)] {
            first.add(result(case, passed)).unwrap();
        }
        drop(first);
        let mut second = Results::open(&folder).unwrap();
        let left: Vec<_> = cases
            .iter()
            .filter(|case| !second.has_passed(case))
            .collect();
        assert_eq!(left, [&"d", &"e", &"f"]);
        second.add(result("d", true)).unwrap();
        second.add(result("e", false)).unwrap();
        second.write_reports(&cases).unwrap();
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(
            read("summary.txt"),
            "2 of 4 cases passed, 1 failed, 1 have not run\n4 minutes; all of them would take 0.1 hours\nfailed: e\n"
        );
        let junit = read("junit_01.xml");
        assert!(junit.contains("tests=\"3\" failures=\"1\""), "{junit}");
        assert!(
            junit.contains("[It] a &quot;b&quot; &lt;c&gt;\""),
            "{junit}"
        );
        assert!(!junit.contains("another version"), "{junit}");

        fs::write(folder.join("results.jsonl"), "{}\n").unwrap();
        let error = Results::open(&folder).err().unwrap();
        assert!(format!("{error:#}").contains("line 1: expected the result of a case"));
        fs::remove_dir_all(folder).unwrap();
    }
}
