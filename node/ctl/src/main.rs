//! `hearthctl`: the command-line tool for operators.
//!
//! It parses its arguments ([`args`]), selects the cluster and the user's credentials from the
//! contexts file ([`context`]), calls the cluster through `hearth-api`'s client, and prints the
//! result ([`output`], [`table`]). Some commands work on this machine alone: [`disk`]. Every error becomes a [`failure::Failure`], which states the
//! operation, the cause and what to do, and determines the exit code. The interfaces that scripts
//! rely on (JSON, exit codes, files) are documented in `docs/hearthctl.md`.
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests use plain files")
)]

mod args;
mod commands;
mod connection;
mod context;
mod disk;
mod failure;
mod files;
mod keys;
mod output;
mod parameters;
mod reference;
mod table;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let args = args::Args::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("hearthctl: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(commands::run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_closed_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("hearthctl: {failure}");
            failure.exit_code()
        }
    }
}
