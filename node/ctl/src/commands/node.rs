//! `hearthctl node`: lists and manages nodes.

mod change;
mod find;
mod local;
mod network;
mod wait;
mod watch;

use hearth_api::client::{Channel, within};
use hearth_api::v1::GetNodesRequest;
use hearth_api::v1::management_client::ManagementClient;

use super::{or_interrupted, passing, print, print_json, tell};
use crate::args::{Format, Global, Node};
use crate::connection;
use crate::failure::Failure;
use crate::output::{self, node_table};

pub(super) async fn run(global: &Global, command: Node) -> Result<(), Failure> {
    match command {
        Node::List { output, watch } if watch => watch::run(global, output.form).await,
        Node::List { output, .. } => list(global, output.form).await,
        Node::Describe { which, output } => {
            let channel = connection::open(global).await?;
            let node = find::node(global, &channel, &which.node).await?;
            show(&output::Node::from(&node), output.form)
        }
        Node::Network(wanted) => network::run(global, &wanted).await,
        Node::Logs { .. } | Node::Firewall { .. } | Node::Reboot { .. } | Node::PowerOff { .. } => {
            local::run(global, command).await
        }
        command => change::run(global, command).await,
    }
}

async fn list(global: &Global, form: Format) -> Result<(), Failure> {
    let nodes = all(global, &connection::open(global).await?).await?;
    let nodes: Vec<_> = nodes.iter().map(output::Node::from).collect();
    match form {
        Format::Table => print(&node_table(&nodes).to_string()),
        Format::Json => print_json(&nodes),
    }
}

/// Fetches all nodes.
pub(super) async fn all(
    global: &Global,
    channel: &Channel,
) -> Result<Vec<hearth_api::v1::Node>, Failure> {
    let management = ManagementClient::new(channel.clone());
    let call = hearth_operator::nodes(management, GetNodesRequest::default());
    let nodes = within(global.timeout, call).await;
    nodes.map_err(|status| Failure::call("list the nodes", status))
}

fn show(node: &output::Node, form: Format) -> Result<(), Failure> {
    match form {
        Format::Table => print(&node.text()),
        Format::Json => print_json(node),
    }
}
