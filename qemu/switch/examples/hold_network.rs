//! Starts a network, says which process it is, and stays with it:
//!
//! ```text
//! hold_network SWITCH DIR
//! ```
//!
//! with the program `hearth-switch` and the network's folder. The tests kill
//! it to see what becomes of its network.

use std::{env, path::PathBuf, time::Duration};

use anyhow::Context;
use hearth_switch::{Lifetime, Network, NetworkOptions};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = env::args_os().skip(1).map(PathBuf::from);
    let binary = args.next().context("wanted: SWITCH")?;
    let dir = args.next().context("wanted: DIR")?;
    let network = Network::start(&binary, &dir, NetworkOptions::default(), Lifetime::Tied).await?;
    println!("{}", network.pid());
    // Whoever started it ends it.
    tokio::time::sleep(Duration::from_secs(600)).await;
    network.stop().await?;
    Ok(())
}
