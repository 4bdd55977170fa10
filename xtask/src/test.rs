//! `cargo xtask test`: runs all checks and tests.
//!
//! There are three stages: the rules of the repository (`tidy`), the tests of every crate (`unit`), and the end-to-end
//! tests on booted machines (`e2e`), for which this task builds the images and passes their paths in a manifest
//! (`hearth_qemu::artifacts`). The runner is `cargo test`, because every machine with Rust has it. Its lines are passed
//! through; a summary at the end has the duration of each stage, and for each failed test the path of its logs and the
//! command that repeats it.

mod report;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use hearth_build::cargo;
use hearth_qemu::artifacts;

use crate::checkout::root;
use crate::command::{Cmd, CommandError};
use crate::hearthctl;
use crate::image::{self, Flavour};
use crate::kubernetes;
use crate::program;
use crate::setup::{self, Needs};
use crate::target::{self, shown};
use crate::tidy;
use crate::ui::Ui;
use report::Report;

/// Run lints, unit tests and end-to-end tests
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Tests to run [default: lints, then both kinds]
    #[arg(value_enum)]
    part: Option<Part>,
    /// Only run tests whose name contains this; or a suite (e2e), or a crate (unit); or one of these, "::" and a name
    filter: Option<String>,
    /// Only list the tests
    #[arg(long)]
    list: bool,
    /// Continue after failures
    #[arg(long)]
    keep_going: bool,
    /// Also run the long end-to-end tests: power cuts at every step, cluster faults, Kubernetes conformance
    #[arg(long)]
    long: bool,
    /// Maximum number of machines that run at once [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: Option<u32>,
}

/// Kinds of tests.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The tests of every crate
    Unit,
    /// The tests on booted machines
    E2e,
}

/// The crate of the end-to-end tests.
const E2E: &str = "hearth-tests";

/// The environment variable with the path of the Kubernetes bundle.
const BUNDLE: &str = "HEARTH_KUBERNETES_BUNDLE";

/// The suite that needs Kubernetes.
const KUBERNETES: &str = "kubernetes";

/// The suite that also needs Kubernetes' own tests.
const CONFORMANCE: &str = "conformance";

/// A stage that has run.
struct Stage {
    name: &'static str,
    seconds: f64,
    report: Report,
    ok: bool,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let filter = args.filter.as_deref();
    let mut stages: Vec<Stage> = Vec::new();
    let mut go = |name, work: &mut dyn FnMut() -> Result<(Report, bool)>| -> Result<bool> {
        let started = Instant::now();
        ui.say(format_args!("== {name}"));
        let (report, ok) = work()?;
        stages.push(Stage {
            name,
            seconds: started.elapsed().as_secs_f64(),
            report,
            ok,
        });
        Ok(ok || args.keep_going)
    };
    let wanted = |part| args.part.is_none_or(|only| only == part);

    let mut on = true;
    if args.part.is_none() && !args.list {
        on = go("tidy", &mut || {
            let result = tidy::run(ui, tidy::Args {});
            if let Err(error) = &result {
                ui.say(format_args!("{error:#}"));
            }
            Ok((Report::default(), result.is_ok()))
        })?;
    }
    if on && wanted(Part::Unit) {
        if !args.list {
            setup::ensure(ui, Needs::ALL_BUT_BENCH)?;
        }
        on = go("unit", &mut || unit(ui, args, filter))?;
    }
    if on && wanted(Part::E2e) {
        let mut manifest = None;
        if !args.list {
            go("build the images", &mut || {
                manifest = Some(build(ui, args)?);
                Ok((Report::default(), true))
            })?;
        }
        go("e2e", &mut || e2e(ui, args, filter, manifest.as_deref()))?;
    }
    if args.list {
        return Ok(());
    }
    conclude(ui, &stages, args)
}

fn unit(ui: &Ui, args: &Args, filter: Option<&str>) -> Result<(Report, bool)> {
    let selection = Selection::of(filter, &packages()?, |krate, word| {
        krate == word || krate.strip_prefix("hearth-") == Some(word)
    });
    let mut cmd = cargo_test(args);
    if args.part.is_none() && !args.list {
        // The end-to-end tests need it anyhow; otherwise the unit tests use an existing one.
        cmd = cmd.env(BUNDLE, &kubernetes::ensure(ui, None)?.root);
    }
    cmd = match &selection.whole {
        Some(krate) => cmd.args(["--package", krate]),
        None => cmd.args(["--workspace", "--exclude", E2E]),
    };
    cmd = cmd.arg("--").args(selection.names);
    if args.list {
        cmd = cmd.arg("--list");
    }
    follow(ui, cmd)
}

fn e2e(
    ui: &Ui,
    args: &Args,
    filter: Option<&str>,
    manifest: Option<&Path>,
) -> Result<(Report, bool)> {
    let selection = Selection::of(filter, &suites()?, |suite, word| suite == word);
    let mut cmd = cargo_test(args).args(["--package", E2E]);
    if let Some(suite) = &selection.whole {
        cmd = cmd.args(["--test", suite]);
    }
    if let Some(path) = manifest {
        cmd = cmd.env(artifacts::ENVIRONMENT, path);
        // A failure ends with the machine's last console lines, not with a backtrace.
        cmd = cmd.env("RUST_LIB_BACKTRACE", "0");
    }
    let default = || available_parallelism().map_or(1, usize::from).min(4);
    let jobs = args.jobs.map_or_else(default, |jobs| jobs as usize);
    cmd = cmd
        .arg("--")
        .args(selection.names)
        .arg(format!("--test-threads={jobs}"));
    if args.long {
        cmd = cmd.arg("--include-ignored");
    }
    if args.list {
        cmd = cmd.arg("--list");
    }
    follow(ui, cmd)
}

fn cargo_test(args: &Args) -> Cmd {
    let cmd = cargo::command().dir(root()).args(["test", "--locked"]);
    match args.keep_going {
        true => cmd.arg("--no-fail-fast"),
        false => cmd,
    }
}

/// Runs the tests; false if any failed.
fn follow(ui: &Ui, cmd: Cmd) -> Result<(Report, bool)> {
    let mut report = Report::default();
    let result = cmd.stream(ui, |line| {
        report.observe(line);
        writeln!(std::io::stdout(), "{line}")
    });
    match result {
        Ok(()) => Ok((report, true)),
        // All of its output has been read.
        Err(CommandError::Failed { .. }) => Ok((report, false)),
        Err(error) => Err(error.into()),
    }
}

/// What a filter selects.
#[derive(Debug, Default, PartialEq, Eq)]
struct Selection {
    /// One crate or suite.
    whole: Option<String>,
    /// Parts of test names.
    names: Vec<String>,
}

impl Selection {
    fn of(filter: Option<&str>, wholes: &[String], is: impl Fn(&str, &str) -> bool) -> Selection {
        let Some(filter) = filter else {
            return Selection::default();
        };
        let (first, rest) = match filter.split_once("::") {
            Some((first, rest)) => (first, Some(rest)),
            None => (filter, None),
        };
        match wholes.iter().find(|whole| is(whole, first)) {
            Some(whole) => Selection {
                whole: Some(whole.clone()),
                names: rest.map(str::to_owned).into_iter().collect(),
            },
            None => Selection {
                whole: None,
                names: vec![filter.to_owned()],
            },
        }
    }
}

/// Our crates, except that of the end-to-end tests.
fn packages() -> Result<Vec<String>> {
    let names = hearth_tidy::crates().map(str::to_owned);
    Ok(names.filter(|name| name != E2E).collect())
}

/// The suites of the end-to-end tests: each file is one.
fn suites() -> Result<Vec<String>> {
    let folder = root().join("tests/tests");
    let context = || format!("cannot read {}", folder.display());
    let mut suites = Vec::new();
    for entry in fs::read_dir(&folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let is_suite = path.extension().is_some_and(|extension| extension == "rs")
            || path.join("main.rs").is_file();
        if let Some(name) = path.file_stem().filter(|_| is_suite) {
            suites.push(name.to_string_lossy().into_owned());
        }
    }
    suites.sort();
    Ok(suites)
}

/// Builds everything that the end-to-end tests boot and run; returns the path of the manifest. Kubernetes is only built
/// for its own tests: a first build takes minutes.
fn build(ui: &Ui, args: &Args) -> Result<std::path::PathBuf> {
    setup::ensure(ui, Needs::ALL_BUT_BENCH)?;
    let image = |artifacts: image::Artifacts| image::to_boot(&artifacts);
    let filter = args.filter.as_deref();
    let selection = Selection::of(filter, &suites()?, |suite, word| suite == word);
    let suite = selection.whole.as_deref();
    let conformance = args.long && suite.is_none_or(|suite| suite == CONFORMANCE);
    let kubernetes = match conformance || suite.is_none_or(|suite| suite == KUBERNETES) {
        true => {
            let mut bundle = kubernetes::ensure(ui, None)?;
            let mut program = None;
            if conformance {
                let with_tests = kubernetes::conformance::ensure(ui, &bundle)?;
                program = Some(with_tests.program);
                bundle = with_tests.bundle;
            }
            let extension = image::of_bundle(&bundle)?;
            Some(artifacts::Kubernetes {
                image: image(image::ensure_extended(ui, Flavour::Test, &[extension])?),
                kubectl: bundle.kubectl.context("the bundle has no kubectl")?,
                conformance: program,
            })
        }
        false => None,
    };
    let folder = target::folder("tests")?;
    let manifest = artifacts::Artifacts {
        release: image(image::ensure(ui, Flavour::Release)?),
        test: image(image::ensure(ui, Flavour::Test)?),
        kubernetes,
        extended: image(image::ensure_extended(
            ui,
            Flavour::Test,
            &[image::sample()?],
        )?),
        machine_check: image(image::ensure_example(ui, image::MACHINE_CHECK)?),
        hearthctl: hearthctl::build(ui)?,
        xtask: std::env::current_exe().context("cannot find this program")?,
        switch: program::switch(ui)?,
        logs: folder.clone(),
    };
    let path = folder.join("artifacts.json");
    let text = serde_json::to_string_pretty(&manifest)? + "\n";
    hearth_image::output::write(&path, text.as_bytes())?;
    Ok(path)
}

/// Prints the summary; an error if anything failed.
fn conclude(ui: &Ui, stages: &[Stage], args: &Args) -> Result<()> {
    ui.say("");
    for stage in stages {
        let ok = if stage.ok { "ok" } else { "FAILED" };
        let counts = stage.report.counts();
        ui.say(format_args!(
            "{:<22}{ok:<8}{counts:<28}{:>8.1} s",
            stage.name, stage.seconds
        ));
    }
    let logs = target::folder("tests")?;
    for stage in stages {
        for failed in stage.report.failed() {
            let again = match stage.name {
                "e2e" if args.long => format!("e2e {}::{} --long", failed.suite, failed.test),
                "e2e" => format!("e2e {}::{}", failed.suite, failed.test),
                name => format!("{name} {}", failed.test),
            };
            ui.say(format_args!("\n{}::{} failed", failed.suite, failed.test));
            ui.say(format_args!("  rerun: cargo xtask test {again}"));
            let logs = logs.join(&failed.suite).join(&failed.test);
            if stage.name == "e2e" && logs.is_dir() {
                ui.say(format_args!("  logs:  {}", shown(&logs)));
            }
        }
    }
    let failed: Vec<&str> = stages
        .iter()
        .filter(|stage| !stage.ok)
        .map(|stage| stage.name)
        .collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    let run: u64 = stages.iter().map(|stage| stage.report.run()).sum();
    if let Some(filter) = &args.filter
        && run == 0
    {
        bail!("no test matches {filter:?}; list all tests with --list");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(filter: &str) -> Selection {
        let wholes = ["boot".to_owned(), "hearth-base".to_owned()];
        Selection::of(Some(filter), &wholes, |whole, word| {
            whole == word || whole.strip_prefix("hearth-") == Some(word)
        })
    }

    #[test]
    fn a_filter_is_a_whole_or_a_name_or_both() {
        let selection = |whole: Option<&str>, names: &[&str]| Selection {
            whole: whole.map(str::to_owned),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        assert_eq!(select("boot"), selection(Some("boot"), &[]));
        assert_eq!(select("base"), selection(Some("hearth-base"), &[]));
        assert_eq!(
            select("boot::home::again"),
            selection(Some("boot"), &["home::again"])
        );
        assert_eq!(
            select("slots::tests::a"),
            selection(None, &["slots::tests::a"])
        );
    }

    #[test]
    fn crates_and_suites_are_found() {
        let packages = packages().unwrap();
        assert!(packages.contains(&"hearth-core".to_owned()), "{packages:?}");
        assert!(!packages.contains(&E2E.to_owned()));
        assert!(!suites().unwrap().is_empty());
    }
}
