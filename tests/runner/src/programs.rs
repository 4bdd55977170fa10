//! Test programs: compiled by cargo, run by this crate.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use hearth_build::cargo;
use hearth_build::command::{Cmd, CommandError};
use hearth_build::progress::{Length, Progress};
use serde::Deserialize;

use crate::RunnerError;
use crate::report::Report;

/// A compiled test program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
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
pub struct Options {
    /// Arguments for each program.
    pub arguments: Vec<String>,
    /// Environment variables.
    pub environment: Vec<(&'static str, OsString)>,
    /// Whether the duration of each test is measured.
    pub timings: bool,
    /// For how long a program may print nothing; then it is killed, and the tests that have not ended have failed.
    pub silence: Option<Duration>,
}

/// Compiles the test programs that `selection`, arguments of `cargo test`, selects in the workspace at `root`; the
/// largest first: they have the most tests.
///
/// # Errors
/// If they do not compile; the compiler's messages have been shown.
pub fn compile(
    progress: &dyn Progress,
    root: &Path,
    selection: &[&str],
    timings: bool,
) -> Result<Vec<Program>, RunnerError> {
    let task = progress.start("compiling the tests", Length::Unknown);
    let mut cmd = cargo::command()
        .dir(root)
        .args(["test", "--locked", "--no-run"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(selection);
    if timings {
        cmd = cmd.arg("--timings");
    }
    let messages = cmd.output_and(progress, |line| {
        match line.trim_start().split_once(' ') {
            // Known from the messages.
            Some(("Compiling" | "Executable" | "Fresh" | "Finished", _)) => task.now(line.trim()),
            _ => progress.say(line),
        }
        Ok(())
    });
    let messages = match messages {
        Ok(messages) => messages,
        Err(CommandError::Failed { .. }) => return Err(RunnerError::DoesNotCompile),
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
fn program(message: &str) -> Result<Option<Program>, RunnerError> {
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
    let unreadable = || RunnerError::Message(message.to_owned());
    let parsed: Message = serde_json::from_str(message).map_err(|_| unreadable())?;
    let is_test = parsed.profile.is_some_and(|profile| profile.test);
    let (true, true, Some(executable)) = (
        parsed.reason == "compiler-artifact",
        is_test,
        parsed.executable,
    ) else {
        return Ok(None);
    };
    let manifest = parsed.manifest_path.ok_or_else(unreadable)?;
    let folder = manifest.parent().ok_or_else(unreadable)?.to_owned();
    Ok(Some(Program {
        krate: package(&manifest)?,
        name: parsed.target.ok_or_else(unreadable)?.name,
        executable,
        folder,
    }))
}

/// The package's name.
fn package(manifest: &Path) -> Result<String, RunnerError> {
    let read = |source| RunnerError::Read {
        path: manifest.to_owned(),
        source,
    };
    let text = fs::read_to_string(manifest).map_err(read)?;
    let name = text.lines().find_map(|line| line.strip_prefix("name = "));
    let name = name.ok_or_else(|| RunnerError::NoName(manifest.to_owned()))?;
    Ok(name.trim_matches('"').to_owned())
}

impl Program {
    /// Runs it; `each` gets every line of its output.
    ///
    /// # Errors
    /// If it does not start. A failed test is no error.
    pub fn run(
        &self,
        progress: &dyn Progress,
        options: &Options,
        each: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<Report, RunnerError> {
        let report = Report::of(&self.krate);
        observed(progress, self.command(options), &self.name, report, each)
    }

    /// The names of its tests.
    ///
    /// # Errors
    /// If it does not run.
    pub fn tests(&self, progress: &dyn Progress) -> Result<Vec<String>, RunnerError> {
        self.list(&["--list", "--format", "terse"], progress)
    }

    /// The names of those of its tests that are only run with `--ignored` or `--include-ignored`.
    ///
    /// # Errors
    /// If it does not run.
    pub fn ignored_tests(&self, progress: &dyn Progress) -> Result<Vec<String>, RunnerError> {
        self.list(&["--list", "--ignored", "--format", "terse"], progress)
    }

    fn list(
        &self,
        arguments: &[&str],
        progress: &dyn Progress,
    ) -> Result<Vec<String>, RunnerError> {
        let listed = self.command(&Options::default());
        let listed = listed.args(arguments).output(progress)?;
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
        if let Some(bound) = options.silence {
            cmd = cmd.silent_at_most(bound);
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
///
/// # Errors
/// If one does not start.
pub fn run_all(
    progress: &(dyn Progress + Sync),
    programs: &[&Program],
    at_once: usize,
    options: &Options,
    keep_going: bool,
) -> Result<Report, RunnerError> {
    let waiting: Mutex<VecDeque<&Program>> = Mutex::new(programs.iter().copied().collect());
    let total: Mutex<Report> = Mutex::new(Report::default());
    let task = progress.start("unit tests", Length::Steps(programs.len() as u64));
    // Not in the condition of a loop, which would hold the lock while the program runs.
    let next = || lock(&waiting).pop_front();
    let work = || -> Result<(), RunnerError> {
        while let Some(program) = next() {
            let started = Instant::now();
            let mut output = Vec::new();
            let report = program.run(progress, options, |line| {
                output.push(line.to_owned());
                Ok(())
            })?;
            let name = &program.name;
            let output = format!("{name}:\n{}", output.join("\n"));
            match report.is_ok() {
                true => progress.detail(&output),
                false => progress.say(&output),
            }
            if !report.is_ok() && !keep_going {
                lock(&waiting).clear();
            }
            let (counts, took) = (report.counts(), started.elapsed().as_secs_f64());
            if !counts.is_empty() {
                progress.say(&format!("{name:<22}{counts:<36}{took:>8.1} s"));
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
///
/// # Errors
/// If cargo does not run.
pub fn run_examples(progress: &dyn Progress, root: &Path) -> Result<Report, RunnerError> {
    let cmd = cargo::command().dir(root);
    let cmd = cmd.args(["test", "--locked", "--quiet", "--workspace", "--doc"]);
    let mut output = Vec::new();
    let name = "examples in doc comments";
    let report = observed(progress, cmd, name, Report::default(), |line| {
        output.push(line.to_owned());
        Ok(())
    })?;
    if !report.is_ok() {
        progress.say(&output.join("\n"));
    }
    Ok(report)
}

/// Runs a command that runs tests, and adds what it prints to the report; `each` gets every line.
fn observed(
    progress: &dyn Progress,
    cmd: Cmd,
    name: &str,
    mut report: Report,
    mut each: impl FnMut(&str) -> io::Result<()>,
) -> Result<Report, RunnerError> {
    let result = cmd.stream(progress, |line| {
        report.observe(line);
        each(line)
    });
    match result {
        Ok(()) => {}
        // All of its output has been read.
        Err(CommandError::Failed { status, .. }) => report.ended(name, status),
        Err(error @ CommandError::Silent { .. }) => report.hung(name, &error),
        Err(error) => return Err(error.into()),
    }
    Ok(report)
}

/// Both values are consistent after a panic, which is passed on anyhow.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

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
