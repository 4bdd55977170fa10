//! The test programs: compiled by cargo, run by this task.
//!
//! `cargo test` runs one program after the other. Most of ours spend their time waiting: for an election, a retry, a
//! lease. So cargo only compiles them, and several run at once, beside whatever else this machine has to do. The
//! largest start first: they have the most tests.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use hearth_build::cargo;
use serde::Deserialize;

use super::report::Report;
use crate::checkout::root;
use crate::command::{Cmd, CommandError};
use crate::ui::Ui;

/// A compiled test program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    /// Its package.
    pub krate: String,
    /// Its name: that of the library, the program or the file that it tests.
    pub name: String,
    executable: PathBuf,
    /// The package's folder, where it runs.
    folder: PathBuf,
}

/// What a run of programs has in common.
#[derive(Debug, Default)]
pub(super) struct Options {
    /// Arguments for each program.
    pub arguments: Vec<String>,
    /// Environment variables.
    pub environment: Vec<(&'static str, OsString)>,
    /// Whether the duration of each test is measured.
    pub timings: bool,
}

/// Compiles the test programs that `selection`, arguments of `cargo test`, selects.
pub(super) fn compile(ui: &Ui, selection: &[&str], timings: bool) -> Result<Vec<Program>> {
    let task = ui.task("compiling the tests");
    let mut cmd = cargo::command()
        .dir(root())
        .args(["test", "--locked", "--no-run"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(selection);
    if timings {
        cmd = cmd.arg("--timings");
    }
    let messages = cmd.output_and(ui, |line| {
        match line.trim_start().split_once(' ') {
            // Known from the messages.
            Some(("Compiling" | "Executable" | "Fresh" | "Finished", _)) => task.now(line.trim()),
            _ => ui.say(line),
        }
        Ok(())
    });
    let messages = match messages {
        Ok(messages) => messages,
        // The compiler's messages are above.
        Err(CommandError::Failed { .. }) => bail!("the tests do not compile"),
        Err(error) => return Err(error.into()),
    };
    task.done();
    let mut programs = Vec::new();
    for line in messages.lines() {
        programs.extend(program(line)?);
    }
    let size = |program: &Program| fs::metadata(&program.executable).map_or(0, |file| file.len());
    programs.sort_by_key(|program| (std::cmp::Reverse(size(program)), program.executable.clone()));
    Ok(programs)
}

/// The test program that cargo reports in this message, if it reports one.
fn program(message: &str) -> Result<Option<Program>> {
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        manifest_path: Option<PathBuf>,
        executable: Option<PathBuf>,
        target: Option<Target>,
        profile: Option<Profile>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    #[derive(Deserialize)]
    struct Profile {
        test: bool,
    }
    let context = || format!("cannot read cargo's message {message}");
    let parsed: Message = serde_json::from_str(message).with_context(context)?;
    let is_test = parsed.profile.is_some_and(|profile| profile.test);
    let (true, true, Some(executable)) = (
        parsed.reason == "compiler-artifact",
        is_test,
        parsed.executable,
    ) else {
        return Ok(None);
    };
    let manifest = parsed.manifest_path.with_context(context)?;
    let folder = manifest.parent().with_context(context)?.to_owned();
    Ok(Some(Program {
        krate: package(&manifest)?,
        name: parsed.target.with_context(context)?.name,
        executable,
        folder,
    }))
}

/// The package's name.
fn package(manifest: &Path) -> Result<String> {
    let text = fs::read_to_string(manifest)
        .with_context(|| format!("cannot read {}", manifest.display()))?;
    let name = text.lines().find_map(|line| line.strip_prefix("name = "));
    let name = name.with_context(|| format!("{} has no name", manifest.display()))?;
    Ok(name.trim_matches('"').to_owned())
}

impl Program {
    /// Runs it; `each` gets every line of its output.
    fn run(
        &self,
        ui: &Ui,
        options: &Options,
        mut each: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<Report> {
        let mut report = Report::of(&self.krate);
        let result = self.command(options).stream(ui, |line| {
            report.observe(line);
            each(line)
        });
        match result {
            Ok(()) => {}
            // All of its output has been read.
            Err(CommandError::Failed { status, .. }) => report.ended(&self.name, status),
            Err(error) => return Err(error.into()),
        }
        Ok(report)
    }

    /// Runs it and prints its output as it comes.
    pub(super) fn show(&self, ui: &Ui, options: &Options) -> Result<Report> {
        self.run(ui, options, |line| {
            // Most of them have only been waiting for their places.
            match line.ends_with("has been running for over 60 seconds") {
                true => Ok(()),
                false => writeln!(io::stdout(), "{line}"),
            }
        })
    }

    /// The names of its tests.
    pub(super) fn tests(&self, ui: &Ui) -> Result<Vec<String>> {
        let listed = self.command(&Options::default());
        let listed = listed.args(["--list", "--format", "terse"]).output(ui)?;
        let names = listed
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    fn command(&self, options: &Options) -> Cmd {
        let mut cmd = Cmd::new(&self.executable)
            .dir(&self.folder)
            // What cargo would tell it.
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("CARGO_PKG_NAME", &self.krate)
            .args(&options.arguments);
        for (name, value) in &options.environment {
            cmd = cmd.env(name, value);
        }
        if options.timings {
            cmd = cmd
                .env(cargo::UNSTABLE, "1")
                .args(["-Z", "unstable-options", "--report-time"]);
        }
        cmd
    }
}

/// Runs the programs, this many at once. Each is a line when it has ended, and its whole output if it has failed; after
/// a failure no other program starts, unless `keep_going`.
pub(super) fn run_all(
    ui: &Ui,
    programs: &[&Program],
    at_once: usize,
    options: &Options,
    keep_going: bool,
) -> Result<Report> {
    let waiting: Mutex<VecDeque<&Program>> = Mutex::new(programs.iter().copied().collect());
    let total: Mutex<Report> = Mutex::new(Report::default());
    let task = ui.counted_task("unit tests", programs.len() as u64);
    let work = || -> Result<()> {
        while let Some(program) = lock(&waiting).pop_front() {
            let started = Instant::now();
            let mut output = Vec::new();
            let report = program.run(ui, options, |line| {
                output.push(line.to_owned());
                Ok(())
            })?;
            let name = &program.name;
            if !report.is_ok() || ui.verbose() {
                ui.say(format_args!("{name}:\n{}", output.join("\n")));
            }
            if !report.is_ok() && !keep_going {
                lock(&waiting).clear();
            }
            let (counts, took) = (report.counts(), started.elapsed().as_secs_f64());
            if !counts.is_empty() {
                ui.say(format_args!("{name:<22}{counts:<36}{took:>8.1} s"));
            }
            lock(&total).add(report);
            task.step();
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            let ended = worker.join();
            ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    drop(task);
    Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Compiles the examples in doc comments, and runs those that can be run.
pub(super) fn run_examples(ui: &Ui) -> Result<Report> {
    let mut report = Report::default();
    let mut output = Vec::new();
    let cmd = cargo::command().dir(root());
    let cmd = cmd.args(["test", "--locked", "--quiet", "--workspace", "--doc"]);
    let result = cmd.stream(ui, |line| {
        report.observe(line);
        output.push(line.to_owned());
        Ok(())
    });
    match result {
        Ok(()) => {}
        Err(CommandError::Failed { status, .. }) => {
            ui.say(output.join("\n"));
            report.ended("examples in doc comments", status);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(report)
}

/// Both values are consistent after a panic, which is passed on anyhow.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_names_the_programs() {
        let manifest = root().join("node/base/Cargo.toml");
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"x","manifest_path":"{}","target":{{"kind":["lib"],"name":"hearth_base"}},"profile":{{"opt_level":"0","test":{test}}},"executable":{executable},"fresh":true}}"#,
                manifest.display()
            )
        };
        let found = program(&message(true, r#""/t/hearth_base-1""#))
            .unwrap()
            .unwrap();
        assert_eq!(found.krate, "hearth-base");
        assert_eq!(found.name, "hearth_base");
        assert_eq!(found.folder, root().join("node/base"));
        // A library, and a program that is no test.
        assert_eq!(program(&message(true, "null")).unwrap(), None);
        assert_eq!(program(&message(false, r#""/t/x""#)).unwrap(), None);
        let end = r#"{"reason":"build-finished","success":true}"#;
        assert_eq!(program(end).unwrap(), None);
        assert!(program("no JSON").is_err());
    }
}
