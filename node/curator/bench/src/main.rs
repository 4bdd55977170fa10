//! Benchmark of the curator, run by `cargo xtask bench curator`: a curator on the host, without
//! machines, and simulated nodes that call it.
//!
//! `serve FOLDER NODES BUDGET` bootstraps a cluster on a real etcd by the product's code, adds that many
//! nodes, writes all credentials to the folder, and serves until standard input is closed. The
//! curator's etcd listens only on its socket. A second etcd serves the same callers over the same
//! TLS, for comparison with the curator.
//!
//! `rates ROUNDS`, `crowd NODES SECONDS` and `hostile ROUNDS` start such a server as a separate process, so that its
//! CPU time is the curator's, and call it with real connections, mutual TLS and the product's
//! client. Results are printed as one JSON object per line; progress goes to standard error.
#![allow(clippy::disallowed_methods, reason = "a program of the host")]

mod crowd;
mod hostile;
mod rates;
mod serve;

use anyhow::{Context as _, Result, bail};

/// Prints one record with one or several samples.
pub fn report(name: &str, unit: &str, samples: &[f64]) {
    let record = serde_json::json!({ "name": name, "unit": unit, "samples": samples });
    println!("{record}");
}

fn main() -> Result<()> {
    raise_file_limit()?;
    // Standard output is reserved for records.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::ERROR)
        .init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |word: &str| {
        word.parse()
            .with_context(|| format!("expected a number, got {word}"))
    };
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    match words[..] {
        ["serve", folder, nodes, budget] => {
            let budget = serve::Budget::of(budget).context("expected unlimited or default")?;
            runtime.block_on(serve::run(folder.as_ref(), number(nodes)?, budget))
        }
        ["hostile", rounds] => runtime.block_on(hostile::run(number(rounds)?)),
        ["disturb", folder, server, node, mode] => {
            let mode = hostile::Mode::of(mode).context("expected quiet or hostile")?;
            runtime.block_on(hostile::disturb(folder.as_ref(), server, node, mode))
        }
        ["rates", rounds] => runtime.block_on(rates::run(number(rounds)?)),
        ["crowd", nodes, seconds] => {
            runtime.block_on(crowd::run(number(nodes)?, number(seconds)? as u64))
        }
        _ => bail!(
            "usage: serve FOLDER NODES BUDGET | rates ROUNDS | crowd NODES SECONDS | hostile ROUNDS"
        ),
    }
}

/// Raises the limit of open files: each node has one connection, in both processes.
fn raise_file_limit() -> Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let files = Resource::RLIMIT_NOFILE;
    let (_, hard) = getrlimit(files).context("cannot read the limit of open files")?;
    setrlimit(files, hard, hard).context("cannot raise the limit of open files")
}
