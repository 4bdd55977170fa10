//! `cargo xtask fuzz`: runs the fuzz targets of `node/fuzz` under libFuzzer.
//!
//! libFuzzer sees which code an input reaches by counters and callbacks that a pass of LLVM adds. rustc runs that pass
//! when it is told to, its stable version as well. There is no sanitizer: targets are safe Rust, compiled with debug
//! assertions and checks for overflow (profile `fuzz`). The flags make other dependencies than those of any other build,
//! so they have a target folder of their own.
//!
//! Inputs that reach something new are kept in `target/hearth/fuzz/TARGET/corpus`, and the next run starts from them;
//! what breaks a promise is kept beside that folder.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Result, bail};
use hearth_build::cargo;
use hearth_build::command::CommandError;

use crate::checkout::root;
use crate::command::Cmd;
use crate::setup::{self, Needs};
use crate::target::{self, shown};
use crate::ui::Ui;

/// Fuzz what a node decodes, guided by coverage; keep what breaks a promise
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Targets, one after the other [default: all]
    targets: Vec<String>,
    /// How long to fuzz each target
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Only list the targets: the number of committed inputs, of inputs found by earlier runs, and what is decoded
    #[arg(long, conflicts_with = "input")]
    list: bool,
    /// Only run the target with this input, such as one that was found before
    #[arg(long, value_name = "FILE", requires = "targets")]
    input: Option<PathBuf>,
}

/// The machine that a node runs on. Cargo applies flags for a named target to nothing that runs while it builds.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const PROGRAM: &str = "hearth-fuzz";
/// The variable that names the target to the program.
const ENVIRONMENT: &str = "HEARTH_FUZZ_TARGET";

/// What libFuzzer needs: a counter at each edge, a table of their places, and the operands of comparisons. Branches
/// must not be folded into one, or they have one counter.
const FLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
];

/// An input that takes longer is a finding. All take milliseconds, but a busy or suspended machine takes its time.
const LONGEST_RUN: Duration = Duration::from_secs(60);
/// Memory of the program above which the input is a finding, in MiB.
const MAX_MEMORY: u32 = 1024;

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let known = names()?;
    if args.list {
        return list(&known);
    }
    if let Some(unknown) = args.targets.iter().find(|name| !known.contains(*name)) {
        let known: Vec<String> = known.into_iter().collect();
        bail!("no target {unknown:?}; there are {}", known.join(", "));
    }
    setup::ensure(ui, Needs::FUZZ)?;
    let program = compile(ui)?;
    if let Some(input) = &args.input {
        return args
            .targets
            .iter()
            .try_for_each(|name| run_input(ui, &program, name, input));
    }
    let targets = match args.targets.is_empty() {
        true => known.into_iter().collect(),
        false => args.targets.clone(),
    };
    let mut found = Vec::new();
    for name in &targets {
        if !fuzz(ui, &program, name, args.seconds)? {
            found.push(name.as_str());
        }
    }
    match found.is_empty() {
        true => Ok(()),
        false => bail!("promises are broken: {}", found.join(", ")),
    }
}

/// The names of all targets: the folders of their seeds.
fn names() -> Result<BTreeSet<String>> {
    let corpus = root().join("node/fuzz/corpus");
    let entries = fs::read_dir(&corpus).with_context(|| corpus.display().to_string())?;
    let name =
        |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    entries.map(name).collect()
}

/// The folders with committed inputs of a target that exist.
fn committed(name: &str) -> Vec<PathBuf> {
    let folders =
        ["corpus", "regressions"].map(|kind| root().join("node/fuzz").join(kind).join(name));
    folders
        .into_iter()
        .filter(|folder| folder.is_dir())
        .collect()
}

/// The folder with what was found for a target.
fn folder(name: &str) -> Result<PathBuf> {
    target::folder(&format!("fuzz/{name}"))
}

/// The folder with inputs that reach more than the committed ones.
fn found(name: &str) -> Result<PathBuf> {
    target::folder(&format!("fuzz/{name}/corpus"))
}

fn list(names: &BTreeSet<String>) -> Result<()> {
    let count = |folder: &Path| fs::read_dir(folder).map_or(0, Iterator::count);
    let mut stdout = io::stdout().lock();
    for name in names {
        let committed: usize = committed(name).iter().map(|folder| count(folder)).sum();
        let found = count(&found(name)?);
        writeln!(
            stdout,
            "{name:<22}{committed:>3} committed{found:>6} found  {}",
            purpose(name)?
        )?;
    }
    Ok(())
}

/// What a target decodes: the first line of its source.
fn purpose(name: &str) -> Result<String> {
    let source = root().join(format!("node/fuzz/src/targets/{name}.rs"));
    let text = fs::read_to_string(&source).with_context(|| source.display().to_string())?;
    let first = text.lines().next().unwrap_or_default();
    Ok(first.trim_start_matches("//! ").to_owned())
}

fn compile(ui: &Ui) -> Result<PathBuf> {
    let folder = target::folder("fuzz-build")?;
    let task = ui.quiet_task("compiling the fuzz targets");
    cargo::command()
        .dir(root())
        .args([
            "build",
            "--locked",
            "--package",
            PROGRAM,
            "--features",
            "libfuzzer",
        ])
        .args(["--profile", "fuzz", "--target", TARGET, "--target-dir"])
        .arg(&folder)
        .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"))
        .stream(ui, |line| {
            task.now(line.trim());
            Ok(())
        })?;
    Ok(folder.join(TARGET).join("fuzz").join(PROGRAM))
}

/// The program for a target, with an argument for each bound.
fn command(program: &Path, name: &str) -> Result<Cmd> {
    let kept = folder(name)?;
    Ok(Cmd::new(program)
        .env(ENVIRONMENT, name)
        .arg(format!("-timeout={}", LONGEST_RUN.as_secs()))
        .arg(format!("-rss_limit_mb={MAX_MEMORY}"))
        .arg(format!("-artifact_prefix={}/", kept.display())))
}

/// Runs one input, and shows what the program says.
fn run_input(ui: &Ui, program: &Path, name: &str, input: &Path) -> Result<()> {
    let ended = command(program, name)?.arg(input).stream(ui, |line| {
        ui.say(line);
        Ok(())
    });
    match ended {
        // Everything has been shown.
        Err(CommandError::Failed { status, .. }) => bail!("{name}: {status}"),
        ended => Ok(ended?),
    }
}

/// Fuzzes a target; returns whether no promise was broken.
fn fuzz(ui: &Ui, program: &Path, name: &str, seconds: u32) -> Result<bool> {
    let command = command(program, name)?
        .arg(format!("-max_total_time={seconds}"))
        .arg(found(name)?)
        .args(committed(name));
    let task = ui.task(format!("fuzzing {name}"));
    let mut report = Report::default();
    let ended = command.stream(ui, |line| {
        report.read(line);
        task.now(report.progress());
        Ok(())
    });
    match (ended, &report.finding) {
        (Ok(()), _) => {
            task.done();
            ui.say(format_args!("  {}", report.progress()));
            Ok(true)
        }
        (Err(CommandError::Failed { .. }), Some(finding)) => {
            drop(task);
            ui.say(format_args!("{name}: {}", report.reason.join("\n  ")));
            let finding = shown(finding);
            ui.say(format_args!(
                "  rerun: cargo xtask fuzz {name} --input {finding}"
            ));
            ui.say(format_args!(
                "  commit the input with the correction, in node/fuzz/regressions/{name}/"
            ));
            Ok(false)
        }
        // It did not start, was interrupted, or died without a trace.
        (Err(error), _) => Err(error.into()),
    }
}

/// What libFuzzer has said so far.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    runs: String,
    coverage: String,
    /// Why it stopped: the message of a panic, or libFuzzer's own.
    reason: Vec<String>,
    /// Whether the lines are those of a panic.
    is_panicking: bool,
    /// Where the input is that broke a promise.
    finding: Option<PathBuf>,
}

impl Report {
    fn read(&mut self, line: &str) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words[..] {
            [number, _, "cov:", coverage, ..] if number.starts_with('#') => {
                self.runs = number[1..].to_owned();
                self.coverage = coverage.to_owned();
            }
            ["Done", runs, "runs", ..] => self.runs = runs.to_owned(),
            [.., "Test", "unit", "written", "to", path] => self.finding = Some(path.into()),
            ["thread", ..] if line.contains(" panicked at ") => self.is_panicking = true,
            ["note:", ..] | ["stack", "backtrace:"] => self.is_panicking = false,
            [_, "ERROR:", ..] if self.reason.is_empty() => {
                self.is_panicking = false;
                self.reason.push(words[1..].join(" "));
            }
            _ if line.starts_with("==") => self.is_panicking = false,
            _ => {}
        }
        if self.is_panicking {
            self.reason.push(line.to_owned());
        }
    }

    fn progress(&self) -> String {
        format!("{} runs, coverage {}", self.runs, self.coverage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: &[&str]) -> Report {
        let mut report = Report::default();
        lines.iter().for_each(|line| report.read(line));
        report
    }

    #[test]
    fn progress_is_read() {
        let report = report(&[
            "INFO: Seed: 1",
            "#2\tINITED cov: 17 ft: 18 corp: 1/1b exec/s: 0 rss: 43Mb",
            "#4096\tpulse  cov: 31 ft: 40 corp: 9/120b lim: 43 exec/s: 2048 rss: 44Mb",
            "Done 9000 runs in 3 second(s)",
        ]);
        assert_eq!(report.progress(), "9000 runs, coverage 31");
        assert_eq!(report.finding, None);
    }

    #[test]
    fn a_finding_has_its_reason_and_its_input() {
        let report = report(&[
            "#2\tINITED cov: 17 ft: 18 corp: 1/1b exec/s: 0 rss: 43Mb",
            "",
            "thread '<unnamed>' (7) panicked at node/x.rs:1:2:",
            "attempt to add with overflow",
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace",
            "==7== ERROR: libFuzzer: deadly signal",
            "artifact_prefix='/t/'; Test unit written to /t/crash-01",
        ]);
        assert_eq!(report.finding, Some("/t/crash-01".into()));
        assert_eq!(
            report.reason,
            [
                "thread '<unnamed>' (7) panicked at node/x.rs:1:2:",
                "attempt to add with overflow"
            ]
        );
    }

    #[test]
    fn what_takes_too_long_is_a_finding() {
        let report = report(&[
            "==7== ERROR: libFuzzer: timeout after 10 seconds",
            "artifact_prefix='/t/'; Test unit written to /t/timeout-01",
        ]);
        assert_eq!(
            report.reason,
            ["ERROR: libFuzzer: timeout after 10 seconds"]
        );
        assert!(report.finding.is_some());
    }
}
