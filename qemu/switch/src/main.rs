//! The process of a virtual network (the library of this name), which starts it:
//!
//! ```text
//! hearth-switch DIR OPTIONS
//! ```
//!
//! with the network's folder, its options as JSON, and, as standard input, a
//! listening socket that it is controlled through. Its log is its standard
//! error.

use std::{env, io, process::ExitCode};

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
            tracing::error!(%error, "the network ends");
            ExitCode::FAILURE
        }
    }
}
