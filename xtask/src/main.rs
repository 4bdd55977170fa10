//! `cargo xtask`: all tasks of a developer of Hearth, in one command.
//!
//! This file only dispatches; each task is a file beside it. The work is done by the libraries below `image/` and
//! `qemu/`.

mod bench;
mod bundle;
mod checkout;
mod command;
mod completion;
mod conformance;
mod ctl;
mod events;
mod fuzz;
mod hearthctl;
mod image;
mod kernel;
mod link;
mod power;
mod power_cuts;
mod program;
mod programs;
mod promises;
mod run;
mod setup;
mod sizes;
mod stop;
mod target;
mod test;
mod tidy;
mod ui;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Build, boot and test Hearth.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    version,
    max_term_width = 100
)]
struct Cli {
    /// Print every external command before it runs
    #[arg(short, long, global = true)]
    verbose: bool,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install the packages that are missing on this machine
    Setup(setup::Args),
    /// Build the kernel unless it is cached; print its path
    Kernel(kernel::Args),
    Bundle(bundle::Args),
    /// Build the disk image; print its path
    Image(image::Args),
    Run(run::Args),
    Test(test::Args),
    Conformance(conformance::Args),
    PowerCuts(power_cuts::Args),
    Fuzz(fuzz::Args),
    Ctl(ctl::Args),
    Stop(stop::Args),
    Power(power::Args),
    Link(link::Args),
    /// Show the sizes of the image's parts; fail if one is over its budget
    Sizes(sizes::Args),
    /// Run benchmarks; print a table, optionally write JSON
    Bench(bench::Args),
    /// Write a disk image of an existing unified kernel image
    #[command(hide = true)]
    Assemble(image::AssembleArgs),
    /// Check the rules of the repository that a program can check
    Tidy(tidy::Args),
    Completion(completion::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ui = ui::Ui::new(cli.verbose);
    events::show(&ui);
    let ready = checkout::check().and_then(|()| Ok(command::handle_interrupts()?));
    match ready.and_then(|()| cli.task.run(&ui)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if command::is_interrupt(&error) => {
            ExitCode::from(command::INTERRUPTED_EXIT_CODE)
        }
        Err(error) => {
            tell(&ui, &error);
            ExitCode::FAILURE
        }
    }
}

/// Prints the error and its causes; the backtrace is only useful for work on xtask itself.
fn tell(ui: &ui::Ui, error: &anyhow::Error) {
    if ui.verbose() {
        eprintln!("error: {error:?}");
        return;
    }
    eprintln!("error: {error}");
    for cause in error.chain().skip(1) {
        eprintln!("  caused by: {cause}");
    }
}

impl Task {
    fn run(self, ui: &ui::Ui) -> anyhow::Result<()> {
        match self {
            Task::Setup(args) => setup::run(ui, &args),
            Task::Kernel(args) => kernel::run(ui, &args),
            Task::Bundle(args) => bundle::run(ui, &args),
            Task::Image(args) => image::run(ui, &args),
            Task::Run(args) => run::run(ui, &args),
            Task::Test(args) => test::run(ui, &args),
            Task::Conformance(args) => conformance::run(ui, &args),
            Task::PowerCuts(args) => power_cuts::run(ui, &args),
            Task::Fuzz(args) => fuzz::run(ui, &args),
            Task::Ctl(args) => ctl::run(ui, &args),
            Task::Stop(args) => stop::run(ui, &args),
            Task::Power(args) => power::run(ui, &args),
            Task::Link(args) => link::run(ui, &args),
            Task::Sizes(args) => sizes::run(ui, &args),
            Task::Bench(args) => bench::run(ui, &args),
            Task::Assemble(args) => image::assemble(&args),
            Task::Tidy(args) => tidy::run(ui, args),
            Task::Completion(args) => completion::run(&args, Cli::command()),
        }
    }
}
