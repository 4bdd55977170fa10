//! Calls to a node itself: logs, packet filter, reboot, power off. The control plane is needed only to look up the
//! node's address; with a full node ID and `--node-endpoint` it is not needed at all.

use hearth_api::client::{Channel, within};
use hearth_api::identity::NodeId;
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{
    self, GetLogsRequest, GetPacketFilterRequest, LogSeverity, NodeState, PowerOffRequest,
    RebootRequest,
};
use tonic::Status;

use super::super::{print, print_json, print_json_line};
use super::{change, find};
use crate::args::{Confirm, Format, Global, Node, NodeEndpointArg, Severity};
use crate::context::reported_address;
use crate::failure::{Failure, Kind};
use crate::{connection, output};

pub(super) async fn run(global: &Global, command: Node) -> Result<(), Failure> {
    match command {
        Node::Logs {
            which,
            at,
            follow,
            component,
            tail,
            severity,
            output,
        } => {
            let (node, channel) = open(global, &which.node, &at).await?;
            let request = GetLogsRequest {
                dn: component,
                subtree: true,
                follow,
                backlog: tail,
                min_severity: severity
                    .map_or(LogSeverity::Unspecified, of_severity)
                    .into(),
            };
            logs(global, &node.id, channel, request, output.form).await
        }
        Node::Firewall {
            which,
            at,
            all_tables,
            output,
        } => {
            let (node, channel) = open(global, &which.node, &at).await?;
            firewall(global, &node.id, channel, all_tables, output.form).await
        }
        Node::Reboot { which, at, sure } => power(global, &which.node, &at, sure, true).await,
        Node::PowerOff { which, at, sure } => power(global, &which.node, &at, sure, false).await,
        // The other commands call the control plane.
        _ => Ok(()),
    }
}

fn of_severity(severity: Severity) -> LogSeverity {
    match severity {
        Severity::Debug => LogSeverity::Debug,
        Severity::Info => LogSeverity::Info,
        Severity::Warning => LogSeverity::Warning,
        Severity::Error => LogSeverity::Error,
    }
}

/// The node, with the fields that are known, and a channel to it.
pub(super) async fn open(
    global: &Global,
    wanted: &str,
    at: &NodeEndpointArg,
) -> Result<(v1::Node, Channel), Failure> {
    let given = at.node_endpoint.as_ref();
    if let (Ok(id), Some(_)) = (wanted.parse::<NodeId>(), given) {
        let channel = connection::open_node(global, id, None, given).await?;
        let node = v1::Node {
            id: id.to_string(),
            // Assumed, because it is about to be called: `warn` applies to nodes that are UP.
            state: NodeState::Up.into(),
            ..v1::Node::default()
        };
        return Ok((node, channel));
    }
    let node = find::node(global, &connection::open(global).await?, wanted).await?;
    let id: NodeId = node.id.parse().map_err(|error| {
        Failure::new(Kind::Cluster, format!("call {}", output::safe(&node.id))).because(error)
    })?;
    let channel = connection::open_node(global, id, reported_address(&node), given).await?;
    Ok((node, channel))
}

async fn power(
    global: &Global,
    wanted: &str,
    at: &NodeEndpointArg,
    sure: Confirm,
    again: bool,
) -> Result<(), Failure> {
    let (node, channel) = open(global, wanted, at).await?;
    let (what, consequence, then) = match again {
        true => (
            "reboot",
            "its workloads stop, and it is unavailable until it has booted",
            "is rebooting",
        ),
        false => (
            "shut down",
            "its workloads stop, and the machine has to be powered on again by hand",
            "is shutting down",
        ),
    };
    change::warn(&node, what, consequence, sure)?;
    let mut management = NodeManagementClient::new(channel);
    let called: Result<(), Status> = within(global.timeout, async {
        match again {
            true => management.reboot(RebootRequest {}).await.map(drop),
            false => management.power_off(PowerOffRequest {}).await.map(drop),
        }
    })
    .await;
    called.map_err(|status| at_node(format!("{what} {}", node.id), status))?;
    print(&format!("{} {then}\n", output::safe(&node.id)))
}

async fn logs(
    global: &Global,
    id: &str,
    channel: Channel,
    request: GetLogsRequest,
    form: Format,
) -> Result<(), Failure> {
    let follow = request.follow;
    let failed = |status| at_node(format!("read the logs of {id}"), status);
    let mut management = NodeManagementClient::new(channel);
    let answers = within(global.timeout, management.get_logs(request)).await;
    let mut answers = answers.map_err(failed)?.into_inner();
    loop {
        // With --follow the next entry may take any time: no timeout.
        let next = match follow {
            true => answers.message().await,
            false => within(global.timeout, answers.message()).await,
        };
        let Some(answer) = next.map_err(failed)? else {
            return Ok(());
        };
        for entry in answer.entries.iter().map(output::LogLine::from) {
            match form {
                Format::Table => print(&entry.text())?,
                Format::Json => print_json_line(&entry)?,
            }
        }
        if answer.missed > 0 {
            eprintln!(
                "hearthctl: {} log entries were dropped here: they were written faster than read",
                answer.missed
            );
        }
    }
}

async fn firewall(
    global: &Global,
    id: &str,
    channel: Channel,
    all_tables: bool,
    form: Format,
) -> Result<(), Failure> {
    let mut management = NodeManagementClient::new(channel);
    let request = GetPacketFilterRequest { all_tables };
    let read = within(global.timeout, async {
        let mut parts = management.get_packet_filter(request).await?.into_inner();
        let mut rules = String::new();
        while let Some(part) = parts.message().await? {
            rules += &part.rules;
        }
        Ok(rules)
    });
    let failed = |status| at_node(format!("read the packet filter of {id}"), status);
    let rules = read.await.map_err(failed)?;
    let firewall = output::Firewall { rules };
    match form {
        Format::Table => print(&firewall.text()),
        Format::Json => print_json(&firewall),
    }
}

/// A failed call to the node itself.
pub(super) fn at_node(what: String, status: Status) -> Failure {
    let advice = "this command connects to the node itself: check that the node is running and \
                  that its address is reachable; --node-endpoint sets another address";
    match tonic::Code::Unavailable == status.code() {
        true => Failure::call(what, status).advise(advice),
        false => Failure::call(what, status),
    }
}
