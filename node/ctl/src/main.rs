//! `hearthctl`: the operator's tool.
//!
//! A thin program: it reads its arguments ([`args`]), finds out from the
//! contexts file which cluster is meant and who asks ([`context`]), calls the
//! cluster through `hearth-api`'s client, and prints what came back
//! ([`output`], [`table`]). What fails becomes a [`failure::Failure`], which
//! says what was wanted, what happened and what to do, and has one of a few
//! exit codes. Forms that programs rely on (JSON, exit codes, files) are in
//! `docs/hearthctl.md`.

mod args;
mod commands;
mod connection;
mod context;
mod failure;
mod files;
mod output;
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
