//! What a node is asked itself. It needs no control plane but to find out where
//! the node is; who names it by its whole ID and says where it is, needs none.

use std::net::IpAddr;

use hearth_api::client::{Channel, within};
use hearth_api::identity::NodeId;
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{
    self, GetLogsRequest, LogSeverity, NodeState, PowerOffRequest, RebootRequest,
};
use tonic::Status;

use super::super::{print, print_json_line};
use super::{change, find};
use crate::args::{At, Form, Global, Node, Severity, Sure};
use crate::connection;
use crate::failure::{Failure, Kind};
use crate::output;

pub(super) async fn run(global: &Global, command: Node) -> Result<(), Failure> {
    match command {
        Node::Logs {
            which,
            at,
            follow,
            dn,
            backlog,
            severity,
            output,
        } => {
            let (node, channel) = open(global, &which.node, &at).await?;
            let request = GetLogsRequest {
                dn,
                subtree: true,
                follow,
                backlog,
                min_severity: severity
                    .map_or(LogSeverity::Unspecified, of_severity)
                    .into(),
            };
            logs(global, &node.id, channel, request, output.form).await
        }
        Node::Reboot { which, at, sure } => power(global, &which.node, &at, sure, true).await,
        Node::PowerOff { which, at, sure } => power(global, &which.node, &at, sure, false).await,
        // The others are the control plane's.
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

/// The node, as far as it is known, and a channel to it.
async fn open(global: &Global, wanted: &str, at: &At) -> Result<(v1::Node, Channel), Failure> {
    let given = at.node_endpoint.as_ref();
    if let (Ok(id), Some(_)) = (wanted.parse::<NodeId>(), given) {
        let channel = connection::open_node(global, id, None, given)?;
        let node = v1::Node {
            id: id.to_string(),
            // As far as we know, for it is there to be asked.
            state: NodeState::Up.into(),
            ..v1::Node::default()
        };
        return Ok((node, channel));
    }
    let node = find::node(global, &connection::open(global)?, wanted).await?;
    let id: NodeId = node.id.parse().map_err(|error| {
        Failure::new(Kind::Cluster, format!("ask {}", output::safe(&node.id))).because(error)
    })?;
    let status = node.status.as_ref();
    let address = status.and_then(|status| status.external_address.parse::<IpAddr>().ok());
    let channel = connection::open_node(global, id, address, given)?;
    Ok((node, channel))
}

async fn power(
    global: &Global,
    wanted: &str,
    at: &At,
    sure: Sure,
    again: bool,
) -> Result<(), Failure> {
    let (node, channel) = open(global, wanted, at).await?;
    let (what, consequence, then) = match again {
        true => (
            "reboot",
            "what runs on it stops, and it is away until it has booted",
            "reboots",
        ),
        false => (
            "switch off",
            "what runs on it stops, and somebody has to switch it on again",
            "switches itself off",
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
    form: Form,
) -> Result<(), Failure> {
    let follow = request.follow;
    let failed = |status| at_node(format!("read the log of {id}"), status);
    let mut management = NodeManagementClient::new(channel);
    let answers = within(global.timeout, management.get_logs(request)).await;
    let mut answers = answers.map_err(failed)?.into_inner();
    loop {
        // Who follows waits for what is yet to be said, however long it takes.
        let next = match follow {
            true => answers.message().await,
            false => within(global.timeout, answers.message()).await,
        };
        let Some(answer) = next.map_err(failed)? else {
            return Ok(());
        };
        for entry in answer.entries.iter().map(output::LogLine::from) {
            match form {
                Form::Table => print(&entry.text())?,
                Form::Json => print_json_line(&entry)?,
            }
        }
        if answer.missed > 0 {
            eprintln!(
                "hearthctl: {} entries are missing here: they came faster than they were read",
                answer.missed
            );
        }
    }
}

/// A call to a node itself has failed.
fn at_node(what: String, status: Status) -> Failure {
    let advice = "the node itself was asked: check that it runs and that its address can be \
                  reached from here; --node-endpoint names another";
    match tonic::Code::Unavailable == status.code() {
        true => Failure::call(what, status).advise(advice),
        false => Failure::call(what, status),
    }
}
