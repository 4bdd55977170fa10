//! The command `hearthctl node network`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{Confirm, NetworkFlags, NodeArg, NodeEndpointArg, Output, duration};

#[derive(Debug, Args)]
pub(crate) struct NodeNetwork {
    #[command(flatten)]
    pub which: NodeArg,
    #[command(flatten)]
    pub at: NodeEndpointArg,
    /// File with network_config, as in the parameters of a machine, in YAML or
    /// JSON; "-" for standard input. Without it, the flags change the present
    /// configuration of the node
    #[arg(long, short = 'f', value_name = "FILE")]
    pub from: Option<PathBuf>,
    #[command(flatten)]
    pub network: NetworkFlags,
    /// Use network_config of the machine's parameters again
    #[arg(long, conflicts_with_all = ["from", "addresses", "gateways", "routes", "nameservers", "mac", "vlan"])]
    pub from_parameters: bool,
    /// How long the node waits to be reached by the new configuration before it
    /// goes back, from 10s to 10m
    #[arg(long, default_value = "1m", value_parser = duration, value_name = "TIME")]
    pub try_for: Duration,
    /// Confirm the new configuration even if the cluster does not hear the node
    /// by it: for clusters that move to another network, or have no quorum
    #[arg(long)]
    pub without_cluster: bool,
    #[command(flatten)]
    pub sure: Confirm,
    #[command(flatten)]
    pub output: Output,
}
