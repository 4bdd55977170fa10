//! The curator on the host, without any machine, and nodes that call it:
//! what `cargo xtask bench curator` runs.
//!
//! `serve FOLDER NODES` founds a cluster by the product's own code on a real
//! etcd, adds that many nodes, serves, and leaves everybody's credentials in
//! the folder. Beside the curator's etcd, which listens on its socket alone,
//! there is another one that serves the same callers over the same TLS, to
//! hold the curator against. It ends when its standard input does.
//!
//! `rates ROUNDS` and `crowd NODES SECONDS` start such a server as a process of
//! its own, so that its CPU time is the curator's, and are the callers: real
//! connections, mutual TLS, the product's own client. What they measured comes
//! out as one JSON object per line; what they are doing goes to standard error.

mod crowd;
mod rates;
mod serve;

use anyhow::{Context as _, Result, bail};

/// One number or several of the same kind.
pub fn report(name: &str, unit: &str, samples: &[f64]) {
    let record = serde_json::json!({ "name": name, "unit": unit, "samples": samples });
    println!("{record}");
}

fn main() -> Result<()> {
    raise_file_limit()?;
    // Standard output is for records.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::ERROR)
        .init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |word: &str| word.parse().with_context(|| format!("{word}: no number"));
    let runtime = tokio::runtime::Runtime::new().context("the runtime")?;
    match words[..] {
        ["serve", folder, nodes] => runtime.block_on(serve::run(folder.as_ref(), number(nodes)?)),
        ["rates", rounds] => runtime.block_on(rates::run(number(rounds)?)),
        ["crowd", nodes, seconds] => {
            runtime.block_on(crowd::run(number(nodes)?, number(seconds)? as u64))
        }
        _ => bail!("wanted: serve FOLDER NODES, rates ROUNDS, or crowd NODES SECONDS"),
    }
}

/// Each node is a connection here and one there.
fn raise_file_limit() -> Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let files = Resource::RLIMIT_NOFILE;
    let (_, hard) = getrlimit(files).context("the limit of open files")?;
    setrlimit(files, hard, hard).context("raise the limit of open files")
}
