//! `cargo xtask test`: runs all checks and tests.
//!
//! There are three stages: the rules of the repository (`tidy`), the tests of every crate (`unit`), and the end-to-end
//! tests on booted machines (`e2e`), for which this task builds the images and passes their paths in a manifest
//! (`hearth_qemu::artifacts`). All test programs are compiled in one call of cargo, and several run at once
//! (`hearth_runner`). A summary at the end has the duration of each stage, and for each failed test the path of its logs
//! and the command that repeats it.

mod booted;
mod selection;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hearth_qemu::artifacts;
use hearth_runner::{Compilation, Options, Program, Report, Test};

use crate::checkout::root;
use crate::setup::{self, Needs};
use crate::target::{self, shown};
use crate::ui::Ui;
use crate::{programs, tidy};
use booted::{Kubernetes, Tests};
use selection::Selection;

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
    /// Maximum number of end-to-end tests that run at once [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: Option<u32>,
    /// Print the slowest tests, and the crates that took longest to compile
    #[arg(long)]
    timings: bool,
}

/// Kinds of tests.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The tests of every crate
    Unit,
    /// The tests on booted machines
    E2e,
}

/// The program of the end-to-end tests.
const E2E: &str = "e2e";

/// The environment variable with the path of the Kubernetes bundle.
const BUNDLE: &str = "HEARTH_KUBERNETES_BUNDLE";

/// The environment variable with the number of end-to-end tests that may have machines at once.
const JOBS: &str = "HEARTH_TEST_JOBS";

/// For how long a program of unit tests may print nothing: several times what the slowest test takes on a busy machine.
const SILENCE: Duration = Duration::from_secs(10 * 60);

/// Tests of one program that run at once, for each processor: the longest ones wait most of the time, for elections and for what is not
/// answered.
const THREADS: usize = 2;

/// Number of tests and of crates that `--timings` shows.
const SLOWEST: usize = 20;

/// More end-to-end tests than there are.
const ALL_TESTS: u32 = 1000;

/// A stage that has run.
struct Stage {
    name: &'static str,
    seconds: f64,
    report: Report,
}

/// Runs a stage.
fn stage(name: &'static str, work: impl FnOnce() -> Result<Report>) -> Result<Stage> {
    let started = Instant::now();
    let report = work()?;
    Ok(Stage {
        name,
        seconds: started.elapsed().as_secs_f64(),
        report,
    })
}

/// What is selected of each kind; none if that kind is not run.
struct Selected {
    unit: Option<Selection>,
    e2e: Option<Selection>,
}

/// Variables that an end-to-end test gets.
pub(crate) type Environment = Vec<(&'static str, OsString)>;

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    run_in(ui, args, &Vec::new())
}

/// Runs one long end-to-end test with these variables.
pub(crate) fn run_one(ui: &Ui, name: &str, environment: Environment) -> Result<()> {
    let args = Args {
        part: Some(Part::E2e),
        filter: Some(name.to_owned()),
        list: false,
        keep_going: false,
        long: true,
        jobs: None,
        timings: false,
    };
    run_in(ui, &args, &environment)
}

fn run_in(ui: &Ui, args: &Args, environment: &Environment) -> Result<()> {
    let filter = args.filter.as_deref();
    let selected = Selected {
        unit: (args.part != Some(Part::E2e)).then(|| Selection::of_unit_tests(filter)),
        e2e: match args.part {
            Some(Part::Unit) => None,
            Some(Part::E2e) | None => Some(Selection::of_suites(filter)?),
        },
    };
    if args.list {
        return list(ui, &selected);
    }
    let started = Instant::now();
    let mut stages = Vec::new();
    if args.part.is_none() {
        stages.push(stage("tidy", || lints(ui))?);
    }
    if args.keep_going || all_ok(&stages) {
        run_tests(ui, args, (&selected, environment), &mut stages)?;
    }
    if args.timings {
        print_slowest_tests(ui, &stages);
    }
    conclude(ui, &stages, args, started)
}

fn all_ok(stages: &[Stage]) -> bool {
    stages.iter().all(|stage| stage.report.is_ok())
}

fn lints(ui: &Ui) -> Result<Report> {
    let mut report = Report::default();
    if let Err(error) = tidy::run(ui, tidy::Args {}) {
        report.broke(format!("{error:#}"));
    }
    Ok(report)
}

/// Compiles the tests and runs them.
fn run_tests(
    ui: &Ui,
    args: &Args,
    (selected, environment): (&Selected, &Environment),
    stages: &mut Vec<Stage>,
) -> Result<()> {
    setup::ensure(ui, Needs::of_tests(args.long))?;
    // The unit tests of several crates run it.
    programs::etcd(ui)?;
    let programs = compile(ui, selected, args.timings)?;
    if args.timings {
        print_slowest_crates(ui)?;
    }
    // Before the unit tests: those of Kubernetes' crate run its programs. And not beside them: many of them run a real
    // etcd, which loses its leases on a host that is too busy.
    let (kubernetes, manifest) = match &selected.e2e {
        Some(selection) => {
            let tests = Tests::of(ui, end_to_end(&programs)?, selection, args.long)?;
            let kubernetes = Kubernetes::ensure(ui, &tests)?;
            let manifest = booted::build(ui, &tests, kubernetes.as_ref())?;
            (kubernetes, Some(manifest))
        }
        None => (None, None),
    };
    if let Some(selection) = &selected.unit {
        let bundle = kubernetes.as_ref().map(Kubernetes::root);
        let tests = || unit_tests(ui, args, &programs, selection, bundle);
        stages.push(stage("unit", tests)?);
    }
    if let (Some(selection), Some(manifest)) = (&selected.e2e, manifest)
        && (args.keep_going || all_ok(stages))
    {
        let variables = variables(args, manifest, environment);
        let program = end_to_end(&programs)?;
        let tests = || end_to_end_tests(ui, args, program, selection, variables);
        stages.push(stage("e2e", tests)?);
    }
    Ok(())
}

/// Compiles the selected tests. One crate is compiled alone, which is faster after a change of it; everything else with
/// the whole workspace, which shares its dependencies with the other tasks.
fn compile(ui: &Ui, selected: &Selected, timings: bool) -> Result<Vec<Program>> {
    let one = selected
        .unit
        .as_ref()
        .and_then(|unit| unit.whole.as_deref());
    let selection = match (&selected.unit, one) {
        (Some(_), Some(krate)) => vec!["--package", krate],
        (Some(_), None) => vec!["--workspace"],
        (None, _) => vec!["--workspace", "--test", E2E],
    };
    Ok(hearth_runner::compile(ui, &root(), &selection, timings)?)
}

fn is_end_to_end(program: &Program) -> bool {
    program.name == E2E
}

fn end_to_end(programs: &[Program]) -> Result<&Program> {
    let program = programs.iter().find(|program| is_end_to_end(program));
    program.context("cargo has not built the end-to-end tests")
}

fn unit_tests(
    ui: &Ui,
    args: &Args,
    programs: &[Program],
    selection: &Selection,
    bundle: Option<&Path>,
) -> Result<Report> {
    let at_once = thread::available_parallelism().map_or(1, usize::from);
    let mut arguments = vec![format!("--test-threads={}", at_once * THREADS)];
    arguments.extend(selection.name.iter().cloned());
    let options = Options {
        arguments,
        environment: bundle
            .map(|root| (BUNDLE, root.into()))
            .into_iter()
            .collect(),
        timings: args.timings,
        silence: Some(SILENCE),
    };
    let of_crates = programs.iter().filter(|program| !is_end_to_end(program));
    let of_crates: Vec<&Program> = of_crates.collect();
    let mut report = hearth_runner::run_all(ui, &of_crates, at_once, &options, args.keep_going)?;
    if *selection == Selection::default() && (args.keep_going || report.is_ok()) {
        report.add(hearth_runner::run_examples(ui, &root())?);
    }
    Ok(report)
}

/// What the end-to-end tests get.
fn variables(args: &Args, manifest: PathBuf, more: &Environment) -> Environment {
    let default = || {
        thread::available_parallelism()
            .map_or(1, usize::from)
            .min(4)
    };
    let jobs = args.jobs.map_or_else(default, |jobs| jobs as usize);
    let mut all = vec![
        (artifacts::ENVIRONMENT, manifest.into()),
        (JOBS, jobs.to_string().into()),
        // A failure ends with the machine's last console lines, not with a backtrace.
        ("RUST_LIB_BACKTRACE", "0".into()),
    ];
    all.extend(more.iter().cloned());
    all
}

fn end_to_end_tests(
    ui: &Ui,
    args: &Args,
    program: &Program,
    selection: &Selection,
    environment: Environment,
) -> Result<Report> {
    // All start at once and wait for their places, so that a cluster's test can come before others.
    let mut arguments = vec![format!("--test-threads={ALL_TESTS}")];
    if *selection != Selection::default() {
        let tests = program.tests(ui)?;
        arguments.push("--exact".to_owned());
        arguments.extend(tests.into_iter().filter(|test| selection.has(test)));
        if arguments.len() == 2 {
            return Ok(Report::default());
        }
    }
    if args.long {
        arguments.push("--include-ignored".to_owned());
    }
    let options = Options {
        arguments,
        environment,
        timings: args.timings,
        // Each test bounds its own waits.
        silence: None,
    };
    // Most tests that are said to run for long have only been waiting for their places.
    let is_shown = |line: &str| !line.ends_with("has been running for over 60 seconds");
    Ok(program.run(ui, &options, |line| match is_shown(line) {
        true => writeln!(io::stdout(), "{line}"),
        false => Ok(()),
    })?)
}

/// Prints the names of the selected tests.
fn list(ui: &Ui, selected: &Selected) -> Result<()> {
    let mut stdout = io::stdout().lock();
    for program in compile(ui, selected, false)? {
        let krate = &program.krate;
        for test in program.tests(ui)? {
            match (is_end_to_end(&program), &selected.unit, &selected.e2e) {
                (true, _, Some(selection)) if selection.has(&test) => {
                    writeln!(stdout, "e2e {test}")?;
                }
                (false, Some(selection), _) if selection.names(&test) => {
                    writeln!(stdout, "unit {krate}::{test}")?;
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Prints the slowest tests of all stages.
fn print_slowest_tests(ui: &Ui, stages: &[Stage]) {
    let durations = stages.iter().flat_map(|stage| stage.report.durations());
    let mut durations: Vec<&(Test, f64)> = durations.collect();
    durations.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    ui.say("\nslowest tests:");
    for (test, seconds) in durations.iter().take(SLOWEST) {
        ui.say(format_args!(
            "{seconds:>8.1} s  {} {}",
            test.krate, test.name
        ));
    }
}

/// Prints the compile time of each crate, from the report that cargo has just written.
fn print_slowest_crates(ui: &Ui) -> Result<()> {
    let compilation = Compilation::read(target::checkout()?.target())?;
    let total: f64 = compilation.crates.iter().map(|one| one.seconds).sum();
    ui.say(format_args!(
        "\nslowest crates to compile, of {total:.0} s of compilers' time ({}):",
        shown(&compilation.page)
    ));
    for one in compilation.crates.iter().take(SLOWEST) {
        let (seconds, name, units) = (one.seconds, &one.name, one.units);
        ui.say(format_args!("{seconds:>8.1} s  {name} ({units} units)"));
    }
    Ok(())
}

/// Prints the summary; an error if anything failed.
fn conclude(ui: &Ui, stages: &[Stage], args: &Args, started: Instant) -> Result<()> {
    ui.say("");
    for stage in stages {
        let ok = if stage.report.is_ok() { "ok" } else { "FAILED" };
        let counts = stage.report.counts();
        let (name, seconds) = (stage.name, stage.seconds);
        ui.say(format_args!("{name:<8}{ok:<8}{counts:<28}{seconds:>8.1} s"));
    }
    let total = started.elapsed().as_secs_f64();
    ui.say(format_args!(
        "{:<44}{total:>8.1} s",
        "total, with compiling"
    ));
    let logs = target::folder("tests")?;
    for stage in stages {
        for program in stage.report.broken() {
            ui.say(format_args!("\n{program}"));
        }
        for failed in stage.report.failed() {
            tell_failure(ui, stage.name, failed, args, &logs);
        }
    }
    let failed = stages.iter().filter(|stage| !stage.report.is_ok());
    let failed: Vec<&str> = failed.map(|stage| stage.name).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    let run: u64 = stages.iter().map(|stage| stage.report.run()).sum();
    let ignored: u64 = stages.iter().map(|stage| stage.report.ignored()).sum();
    match &args.filter {
        Some(filter) if run == 0 && ignored > 0 => {
            bail!("no test matches {filter:?} but long ones: run them with --long")
        }
        Some(filter) if run == 0 => {
            bail!("no test matches {filter:?}; list all tests with --list")
        }
        _ => Ok(()),
    }
}

fn tell_failure(ui: &Ui, stage: &str, failed: &Test, args: &Args, logs: &Path) {
    let Test { krate, name } = failed;
    if stage != E2E {
        ui.say(format_args!("\n{krate}::{name} failed"));
        ui.say(format_args!(
            "  rerun: cargo xtask test {stage} {krate}::{name}"
        ));
        return;
    }
    let long = if args.long { " --long" } else { "" };
    ui.say(format_args!("\n{name} failed"));
    ui.say(format_args!("  rerun: cargo xtask test e2e {name}{long}"));
    let logs = name
        .split_once("::")
        .map(|(suite, test)| logs.join(suite).join(test));
    if let Some(logs) = logs.filter(|logs| logs.is_dir()) {
        ui.say(format_args!("  logs:  {}", shown(&logs)));
    }
}
