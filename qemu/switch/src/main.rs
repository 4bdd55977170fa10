//! The process of a virtual network, which the library of this name starts:
//!
//! ```text
//! hearth-switch DIR OPTIONS
//! ```
//!
//! with the network's folder, its options as JSON, and a listening control socket as standard input. Its log is its
//! standard error.

use std::process::ExitCode;
use std::{env, io};

use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(false)
        .init();
    match hearth_switch::run(env::args_os().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the network failed");
            ExitCode::FAILURE
        }
    }
}
