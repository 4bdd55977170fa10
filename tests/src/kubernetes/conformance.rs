//! Kubernetes' own tests, run by its own program.
//!
//! `tests/conformance.txt` lists every conformance case of this version, and which of them are run;
//! `tests/network-policies.txt` those about network policies. The program may take an hour, so the bound applies to the
//! time without a result.
//!
//! An area of the list is a test; all cases that can run are a [`Sweep`].

mod progress;
mod results;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use hearth_lab::conformance::{LIST, NETWORK_POLICIES, RESULTS, SHARD};
use hearth_lab::shard::Shard;
use hearth_lab::tool;
use hearth_qemu::command::CommandLine;
use tokio::process::Command;

use super::Kubernetes;
use crate::{Outcome, TestCtx, bounds};
use progress::{Reports, words};
use results::{CaseResult, Results};

/// The list of all conformance cases.
const CONFORMANCE: &str = include_str!("../../conformance.txt");
/// The list of the cases for network policies.
const POLICIES: &str = include_str!("../../network-policies.txt");

/// Precedes a heading.
const HEADING: &str = "== ";

/// In the heading of cases that are run, before the area's name.
const RUN: &str = "run ";

/// In the heading of cases that only a sweep runs, before the reason.
const SWEEP: &str = "sweep: ";

/// The part that is a test of the sweep itself: four or five cases.
const SAMPLE: Shard = Shard::first_of(100);

/// The areas of the list.
///
/// # Errors
/// If the list is malformed.
pub fn areas() -> anyhow::Result<BTreeSet<&'static str>> {
    let list = Cases::all_lists()?;
    let headings = list.0.into_keys();
    Ok(headings
        .filter_map(|heading| heading.strip_prefix(RUN))
        .collect())
}

impl Kubernetes {
    /// Runs the cases of an area of the list on this many nodes.
    ///
    /// The program's output is in the test's folder; the results are also kept when all have passed.
    ///
    /// # Errors
    /// If a case fails, or the list does not match the cases of this version.
    pub async fn conforms(&self, test: &TestCtx, area: &str, nodes: u16) -> Outcome {
        let program = self.program(test).await?;
        let list = Cases::all_lists()?;
        let cases = list.of(area)?;

        let mut passed = BTreeMap::new();
        let log = self.folder.join("e2e.log");
        let mut take = |result: CaseResult| {
            passed.insert(result.case, result.passed);
            Ok(())
        };
        self.run(program, (cases, nodes), &log, &mut take).await?;
        let mut told = String::new();
        for case in cases {
            let result = match passed.get(*case) {
                Some(true) => "passed",
                Some(false) => "failed",
                None => "not run",
            };
            writeln!(told, "{result:<8}{case}")?;
        }
        let path = test
            .artifacts()
            .logs
            .join(format!("conformance-{area}.txt"));
        fs::write(&path, &told).with_context(|| format!("cannot write {}", path.display()))?;
        let failed: Vec<_> = told.lines().filter(|l| !l.starts_with("passed")).collect();
        ensure!(
            failed.is_empty(),
            "{} of {} cases did not pass:\n{}",
            failed.len(),
            cases.len(),
            failed.join("\n")
        );
        Ok(())
    }

    /// Runs the cases of a part of a sweep that have not passed yet.
    ///
    /// # Errors
    /// If a case fails, or the list does not match the cases of this version.
    pub async fn sweep(&self, test: &TestCtx, sweep: &Sweep, nodes: u16) -> Outcome {
        let program = self.program(test).await?;
        let list = Cases::parse(sweep.list)?;
        let cases = sweep.shard.select(&list.swept());
        let mut results = Results::open(&sweep.folder)?;
        let left: Vec<_> = cases
            .iter()
            .copied()
            .filter(|case| !results.has_passed(case))
            .collect();
        let (all, shard) = (cases.len(), sweep.shard);
        eprintln!(
            "conformance {shard}: {} of {all} cases are left",
            left.len()
        );
        if !left.is_empty() {
            let log = sweep.folder.join("e2e.log");
            let mut take = |result: CaseResult| {
                let word = if result.passed { "passed" } else { "FAILED" };
                eprintln!("{word} {:>6.1} s  {}", result.seconds, result.case);
                results.add(result)
            };
            self.run(program, (&left, nodes), &log, &mut take).await?;
        }
        results.write_reports(&list.swept())?;
        let failed: Vec<_> = cases
            .iter()
            .filter(|case| !results.has_passed(case))
            .collect();
        ensure!(
            failed.is_empty(),
            "{} of {all} cases did not pass: {failed:#?}",
            failed.len()
        );
        Ok(())
    }

    /// The program, whose conformance cases are those of the list.
    async fn program<'a>(&self, test: &'a TestCtx) -> anyhow::Result<&'a Path> {
        let program = test.kubernetes()?.conformance.as_deref();
        let program =
            program.context("Kubernetes' own tests were not built: --long builds them")?;
        self.names_all(program, &Cases::parse(CONFORMANCE)?).await?;
        Ok(program)
    }

    /// Checks that the list has exactly the program's conformance cases.
    async fn names_all(&self, program: &Path, list: &Cases<'_>) -> Outcome {
        let mut command = CommandLine::new(program);
        command.arg("--list-conformance-tests");
        let said = tool::run(&command).await?;
        let cases = upstream(&said);
        ensure!(!cases.is_empty(), "the program lists no cases:\n{said}");
        let listed: BTreeSet<String> = list.all().map(str::to_owned).collect();
        let missing: Vec<_> = cases.difference(&listed).collect();
        let unknown: Vec<_> = listed.difference(&cases).collect();
        ensure!(
            missing.is_empty() && unknown.is_empty(),
            "tests/conformance.txt lacks {missing:#?} and names unknown {unknown:#?}"
        );
        Ok(())
    }

    /// Runs the cases on this many nodes, appends the program's output to a log, and passes on each result.
    async fn run(
        &self,
        program: &Path,
        (cases, nodes): (&[&str], u16),
        log: &Path,
        take: &mut dyn FnMut(CaseResult) -> anyhow::Result<()>,
    ) -> Outcome {
        let reports = Reports::open().await?;
        let report = self.folder.join("report.json");
        let mut command = CommandLine::new(program);
        command
            .arg("--provider=skeleton")
            .arg(format!("--num-nodes={nodes}"))
            .arg("--ginkgo.noColor")
            .arg("--disable-log-dump")
            .arg("--dump-logs-on-failure=false")
            .arg(format!("--progress-report-url={}", reports.url()?))
            .arg(format!("--ginkgo.json-report={}", report.display()))
            .arg(format!("--kubeconfig={}", self.kubeconfig.display()))
            .arg(format!("--kubectl-path={}", self.kubectl.display()))
            .arg(format!("--e2e-output-dir={}", self.folder.display()))
            .arg(format!("--ginkgo.focus={}", focus(cases)));
        let log = fs::OpenOptions::new().create(true).append(true).open(log);
        let log = log.context("cannot open the log of the tests")?;
        let mut child = Command::from(command.to_std())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start Kubernetes' tests")?;
        let (mut known, mut begun) = (BTreeSet::new(), Instant::now());
        let status = loop {
            let report = tokio::select! {
                report = tokio::time::timeout(bounds::CASE, reports.next()) => report,
                status = child.wait() => break status?,
            };
            let report = report.with_context(|| {
                format!(
                    "no result for {:?}, after {} cases",
                    bounds::CASE,
                    known.len()
                )
            })??;
            if let Some((case, passed)) = report {
                // They run one after the other.
                let seconds = begun.elapsed().as_secs_f64();
                begun = Instant::now();
                known.insert(case.clone());
                take(CaseResult {
                    case,
                    passed,
                    seconds,
                })?;
            }
        };
        let all =
            progress::results(&report).with_context(|| format!("the tests ended: {status}"))?;
        if all.is_empty() {
            bail!("the program ran no cases: {status}");
        }
        for result in all {
            if known.insert(result.case.clone()) {
                take(result)?;
            }
        }
        Ok(())
    }
}

/// All cases of the list that can run, or a part of them. The results are kept, so that a sweep that was interrupted goes
/// on where it was.
#[derive(Debug)]
pub struct Sweep {
    list: &'static str,
    shard: Shard,
    folder: PathBuf,
}

impl Sweep {
    /// The one that `cargo xtask conformance` asks for, or else a small one with its results in the test's folder.
    ///
    /// # Errors
    /// If it asks for something that is no part.
    pub fn of(test: &TestCtx) -> anyhow::Result<Self> {
        let shard = match std::env::var(SHARD) {
            Ok(text) => text.parse().context(SHARD)?,
            Err(_) => SAMPLE,
        };
        let list = match std::env::var(LIST) {
            Ok(name) if name == NETWORK_POLICIES => POLICIES,
            Ok(other) => bail!("{LIST}: expected {NETWORK_POLICIES}, got {other:?}"),
            Err(_) => CONFORMANCE,
        };
        let folder = std::env::var_os(RESULTS);
        let folder = folder.map_or_else(|| test.folder().join("sweep"), PathBuf::from);
        Ok(Self {
            list,
            shard,
            folder,
        })
    }
}

/// A regular expression that matches exactly these names. The program applies it to the suite's name followed by the
/// case's.
fn focus(cases: &[&str]) -> String {
    let quoted = |case: &&str| {
        case.chars().fold(String::new(), |mut quoted, c| {
            if c.is_ascii_punctuation() {
                quoted.push('\\');
            }
            quoted.push(c);
            if c == ' ' {
                quoted.push('+');
            }
            quoted
        })
    };
    let cases: Vec<_> = cases.iter().map(quoted).collect();
    format!(" (?:{}) *$", cases.join("|"))
}

/// The names in the program's list: YAML, each a plain or a quoted scalar, which may continue on the next line.
fn upstream(listed: &str) -> BTreeSet<String> {
    let listed = listed.replace("\n    ", " ");
    let names = listed.lines().filter_map(|line| {
        let name = line.trim_start().strip_prefix("codename: ")?.trim();
        let quoted = |mark: char| name.strip_prefix(mark)?.strip_suffix(mark);
        Some(words(&match (quoted('\''), quoted('"')) {
            (Some(name), _) => name.replace("''", "'"),
            (None, Some(name)) => name.replace("\\\"", "\"").replace("\\\\", "\\"),
            (None, None) => name.to_owned(),
        }))
    });
    names.collect()
}

/// The parsed list.
struct Cases<'a>(BTreeMap<&'a str, Vec<&'a str>>);

impl<'a> Cases<'a> {
    /// Those of conformance and of network policies.
    fn all_lists() -> anyhow::Result<Self> {
        let mut all = Cases::parse(CONFORMANCE)?;
        all.0.extend(Cases::parse(POLICIES)?.0);
        Ok(all)
    }

    fn parse(text: &'a str) -> anyhow::Result<Self> {
        let (mut cases, mut seen, mut heading) = (BTreeMap::new(), BTreeSet::new(), None);
        let lines = text.lines().map(str::trim);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(next) = line.strip_prefix(HEADING) {
                heading = Some(next);
                continue;
            }
            let heading = heading.with_context(|| format!("{line:?} has no heading"))?;
            ensure!(seen.insert(line), "duplicate {line:?}");
            cases.entry(heading).or_insert_with(Vec::new).push(line);
        }
        Ok(Self(cases))
    }

    fn of(&self, area: &str) -> anyhow::Result<&[&'a str]> {
        let cases = self.0.get(&*format!("{RUN}{area}"));
        let cases = cases.with_context(|| format!("the list has no area {area:?}"))?;
        Ok(cases)
    }

    fn all(&self) -> impl Iterator<Item = &'a str> {
        self.0.values().flatten().copied()
    }

    /// The cases of a sweep, in the order of their names.
    fn swept(&self) -> Vec<&'a str> {
        let headings = self.0.iter();
        let swept =
            headings.filter(|(heading, _)| heading.starts_with(RUN) || heading.starts_with(SWEEP));
        let mut cases: Vec<_> = swept.flat_map(|(_, cases)| cases.iter().copied()).collect();
        cases.sort_unstable();
        cases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_one() {
        let list = Cases::all_lists().unwrap();
        for heading in list.0.keys() {
            let known = [RUN, SWEEP, "not run: "];
            let is_known = known.iter().any(|known| heading.starts_with(known));
            assert!(is_known, "{heading}");
        }
        assert!(Cases::parse("a case").is_err());
        assert!(Cases::parse("== run a\ncase\n== run b\ncase").is_err());
    }

    #[test]
    fn a_sweep_has_nearly_all_cases() {
        let list = Cases::parse(CONFORMANCE).unwrap();
        let (swept, all) = (list.swept().len(), list.all().count());
        assert!(swept < all && swept > all - 10, "{swept} of {all}");
        assert!(!SAMPLE.select(&list.swept()).is_empty());
    }

    #[test]
    fn names_are_read_and_quoted() {
        let listed = "- testname: One\n  codename: '[a]  it''s one\n    of two'\n- testname: Two\n  codename: \
                      \"[b] cat \\\"x\\\"\"\n- testname: Three\n  codename: plain\n";
        let names = ["[a] it's one of two", "[b] cat \"x\"", "plain"];
        assert_eq!(upstream(listed), names.map(str::to_owned).into());
        assert_eq!(focus(&["[a] b", "c*"]), r" (?:\[a\] +b|c\*) *$");
    }
}
