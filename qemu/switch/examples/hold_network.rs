//! Starts a network, prints its process ID, and waits:
//!
//! ```text
//! hold_network SWITCH DIR
//! ```
//!
//! with the program `hearth-switch` and the network's folder. The tests kill it and check what happens to its network.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use hearth_switch::{Lifetime, Network, NetworkOptions};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = env::args_os().skip(1).map(PathBuf::from);
    let binary = args.next().context("usage: SWITCH DIR")?;
    let dir = args.next().context("usage: SWITCH DIR")?;
    let network = Network::start(
        &binary,
        &dir,
        NetworkOptions::default(),
        Lifetime::KillWithParent,
    )
    .await?;
    println!("{}", network.pid());
    // The process that started it ends it.
    tokio::time::sleep(Duration::from_secs(600)).await;
    network.stop().await?;
    Ok(())
}
