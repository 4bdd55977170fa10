//! `cargo xtask`: everything a developer of Hearth does, by one command.
//!
//! This file only dispatches; each task is a file beside it. What does work
//! of its own lives in the libraries `image` and `qemu`.

mod tidy;
mod ui;

use clap::{Parser, Subcommand};

/// Builds, boots and proves Hearth.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, max_term_width = 100)]
struct Cli {
    /// Print every external command before it runs
    #[arg(short, long, global = true)]
    verbose: bool,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the rules of the repository that a program can check
    Tidy(tidy::Args),
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let ui = ui::Ui::new(cli.verbose);
    match cli.task {
        Task::Tidy(args) => tidy::run(&ui, args),
    }
}
