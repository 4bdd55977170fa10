//! `hearthctl node network`: shows the network of a node, and changes it without losing the node.
//!
//! A change breaks connections to the node, and a wrong one makes it unreachable. So the node tries the new configuration for a
//! while, and this command confirms it over a new connection, at any of the addresses that the node may have then: those
//! of the new configuration, the one that the cluster knows, and the former one. Without a confirmation the node
//! goes back. The answer to either call may be lost with the connection; both can be repeated, because the ID of the
//! trial is chosen here.

use std::net::IpAddr;
use std::time::Duration;

use hearth_api::client::{Channel, Endpoint, within};
use hearth_api::identity::NodeId;
use hearth_api::names::{PORT_CURATOR, PORT_NODE_MANAGEMENT};
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{
    self, ConfirmNetworkRequest, GetNetworkRequest, GetNetworkResponse, NetworkConfig,
    TryNetworkRequest,
};
use hearth_parameters::Network;
use hearth_sys::random;
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

use super::super::{or_interrupted, parameters, passing, print, print_json, tell};
use super::{all, change, local};
use crate::args::{Format, Global, NodeNetwork};
use crate::connection::{self, Session};
use crate::context::{Contexts, reported_address};
use crate::failure::{Failure, Kind};
use crate::output;

/// How long one attempt to confirm may take: connecting, and the time in which the node waits for the cluster.
const ATTEMPT: Duration = Duration::from_secs(8);
/// How long after one attempt the next one begins.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long the curators may take to say where the node is.
const LOOK_UP: Duration = Duration::from_secs(2);

/// What the command is to do.
enum Wanted {
    Show,
    Set(Option<NetworkConfig>),
}

pub(super) async fn run(global: &Global, wanted: &NodeNetwork) -> Result<(), Failure> {
    let (node, channel) = local::open(global, &wanted.which.node, &wanted.at).await?;
    let current = get(global, &node.id, &channel).await?;
    let form = wanted.output.form;
    let new = match of_command_line(wanted, &current)? {
        Wanted::Show => return show(&node.id, current, form),
        Wanted::Set(new) => new,
    };
    let what = format!("change the network of {}", output::safe(&node.id));
    let parsed = Network::parse(new.clone().unwrap_or_default());
    let parsed = parsed.map_err(|problem| Failure::invalid(&what, problem))?;
    if new.is_some() && new == current.network_config && current.trial_id.is_empty() {
        eprintln!("hearthctl: the node uses this network configuration already");
        return show(&node.id, current, form);
    }
    let consequence = "connections to it and to its pods may break";
    change::warn(&node, "change the network of", consequence, wanted.sure)?;
    let change = Change {
        global,
        id: node
            .id
            .parse()
            .map_err(|error| Failure::new(Kind::Cluster, &what).because(error))?,
        addresses: addresses(&parsed),
        former: reported_address(&node),
        given: wanted.at.node_endpoint.clone(),
        request: TryNetworkRequest {
            trial_id: [random::number(), random::number()]
                .map(u64::to_be_bytes)
                .concat(),
            network_config: new,
            timeout_seconds: u32::try_from(wanted.try_for.as_secs()).unwrap_or(u32::MAX),
        },
        without_cluster: wanted.without_cluster,
        what,
    };
    let channel = change.run(channel).await?;
    change.tell_context().await;
    show(&node.id, get(global, &node.id, &channel).await?, form)
}

/// What the flags say.
fn of_command_line(wanted: &NodeNetwork, current: &GetNetworkResponse) -> Result<Wanted, Failure> {
    if wanted.from_parameters {
        return Ok(Wanted::Set(None));
    }
    let before = match &wanted.from {
        None => current.network_config.clone().unwrap_or_default(),
        Some(path) => {
            let read = parameters::read_text(path)?;
            let network = read.network_config.clone();
            let rest = v1::NodeParameters {
                network_config: None,
                ..read
            };
            if rest != v1::NodeParameters::default() {
                return Err(Failure::invalid(
                    format!("use {}", path.display()),
                    "expected network_config alone, got other parameters of a machine, too",
                ));
            }
            network.unwrap_or_default()
        }
    };
    let new = parameters::network(before.clone(), &wanted.network);
    match wanted.from.is_none() && new == before {
        true => Ok(Wanted::Show),
        false => Ok(Wanted::Set(Some(new))),
    }
}

async fn get(global: &Global, id: &str, channel: &Channel) -> Result<GetNetworkResponse, Failure> {
    let mut management = NodeManagementClient::new(channel.clone());
    let got = within(global.timeout, management.get_network(GetNetworkRequest {})).await;
    got.map(tonic::Response::into_inner).map_err(|status| {
        local::at_node(format!("read the network of {}", output::safe(id)), status)
    })
}

fn show(id: &str, network: GetNetworkResponse, form: Format) -> Result<(), Failure> {
    let network = output::NodeNetwork::of(id, network);
    match form {
        Format::Table => print(&network.text()),
        Format::Json => print_json(&network),
    }
}

/// The addresses in a configuration.
fn addresses(network: &Network) -> Vec<IpAddr> {
    let interfaces = network.interfaces.iter();
    let addresses = interfaces.flat_map(|interface| &interface.addresses);
    addresses.map(|cidr| cidr.address()).collect()
}

/// A change of a node's network.
struct Change<'a> {
    global: &'a Global,
    id: NodeId,
    /// Those of the new configuration.
    addresses: Vec<IpAddr>,
    /// The one before.
    former: Option<IpAddr>,
    /// The endpoint on the command line, instead of all others.
    given: Option<Endpoint>,
    request: TryNetworkRequest,
    without_cluster: bool,
    what: String,
}

impl Change<'_> {
    /// Tries the configuration and confirms it; returns a channel to the node by the new configuration.
    async fn run(&self, channel: Channel) -> Result<Channel, Failure> {
        let until = Instant::now() + Duration::from_secs(self.request.timeout_seconds.into());
        let is_begun = self.begin(channel).await?;
        eprintln!(
            "hearthctl: the node tries the new configuration; it goes back in {} s if it is not reached",
            self.request.timeout_seconds
        );
        let advice = "the node goes back to its former network configuration by itself";
        or_interrupted(&self.what, advice, self.confirm(until, is_begun)).await
    }

    /// Returns whether the node has answered.
    async fn begin(&self, channel: Channel) -> Result<bool, Failure> {
        let mut management = NodeManagementClient::new(channel);
        let call = management.try_network(self.request.clone());
        match within(self.global.timeout, call).await {
            Ok(_) => Ok(true),
            // The network may have changed before the answer was sent.
            Err(status) if passing(&status) => Ok(false),
            Err(status) => Err(local::at_node(self.what.clone(), status)),
        }
    }

    async fn confirm(&self, until: Instant, mut is_begun: bool) -> Result<Channel, Failure> {
        let mut told = String::new();
        loop {
            let channel = self.reach().await?;
            let status = match self.attempt(channel.clone()).await {
                Ok(()) => return Ok(channel),
                Err(status) => status,
            };
            if status.code() == Code::FailedPrecondition && !is_begun {
                // The call that was not answered has not arrived either.
                is_begun = self.begin(channel).await?;
            } else if !passing(&status) || Instant::now() >= until {
                return Err(Failure::call(&self.what, status)
                    .advise("the node uses its former network configuration"));
            } else {
                tell(
                    &mut told,
                    format!("waiting for the node: {}", output::safe(status.message())),
                );
            }
            sleep(INTERVAL).await;
        }
    }

    async fn attempt(&self, channel: Channel) -> Result<(), Status> {
        let request = ConfirmNetworkRequest {
            trial_id: self.request.trial_id.clone(),
            without_cluster: self.without_cluster,
        };
        let mut management = NodeManagementClient::new(channel);
        within(ATTEMPT, management.confirm_network(request)).await?;
        Ok(())
    }

    /// A channel to the node at each address that it may have now.
    async fn reach(&self) -> Result<Channel, Failure> {
        // Anew for each attempt: the one before may have renewed the certificate.
        let session = Session::new(self.global)?;
        let endpoints = match &self.given {
            Some(given) => vec![given.clone()],
            None => {
                let nodes = self.nodes(&session).await;
                let known = self.known_address(&nodes);
                let mut all: Vec<IpAddr> = Vec::new();
                let configured = self.addresses.iter().copied();
                for address in configured.chain(known).chain(self.former) {
                    if !all.contains(&address) {
                        all.push(address);
                    }
                }
                let at = |address| Endpoint::new(address, PORT_NODE_MANAGEMENT);
                all.into_iter().map(at).collect()
            }
        };
        connection::open_node_at(self.global, &session, self.id, endpoints).await
    }

    /// The address of the node that the curators know.
    fn known_address(&self, nodes: &[v1::Node]) -> Option<IpAddr> {
        let id = self.id.to_string();
        reported_address(nodes.iter().find(|node| node.id == id)?)
    }

    /// All nodes, if the curators answer. The node that changes may be the only one.
    async fn nodes(&self, session: &Session) -> Vec<v1::Node> {
        self.list(session).await.unwrap_or_default()
    }

    async fn list(&self, session: &Session) -> Option<Vec<v1::Node>> {
        let mut curators = session.curators(self.global).ok()?;
        for address in &self.addresses {
            curators.push(
                session
                    .context
                    .reach(Endpoint::new(*address, PORT_CURATOR))
                    .ok()?,
            );
        }
        let channel = connection::open_at(self.global, session, curators)
            .await
            .ok()?;
        let nodes = tokio::time::timeout(LOOK_UP, all(self.global, &channel)).await;
        nodes.ok()?.ok()
    }

    /// The context learns the new address, if the node is a curator.
    async fn tell_context(&self) {
        let Ok(session) = Session::new(self.global) else {
            return;
        };
        let until = Instant::now() + self.global.timeout;
        loop {
            let nodes = self.nodes(&session).await;
            let now = self.known_address(&nodes);
            let is_new =
                now.is_some_and(|now| self.addresses.is_empty() || self.addresses.contains(&now));
            if is_new {
                let learned = Contexts::change(Some(session.file.clone()), |contexts| {
                    contexts.learn(&session.name, &nodes);
                    Ok(())
                });
                if let Err(failure) = learned {
                    eprintln!("hearthctl: {failure}");
                }
                return;
            }
            if Instant::now() >= until {
                eprintln!("hearthctl: the cluster does not know the new address of the node yet");
                return;
            }
            sleep(INTERVAL).await;
        }
    }
}
