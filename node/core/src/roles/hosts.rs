//! Names: this node's own, those of all others, and the way back after a
//! power cut.
//!
//! As soon as the node knows who it is, it has a host name and a machine-id.
//! From the curators' nodes it keeps the hosts file, and on the ESP the
//! cluster directory: the consensus members and their addresses, by which a
//! rebooting node finds its cluster. The ESP is slow and wears, so it is
//! written only when what is on it differs, and not more often than [`REST`]
//! allows; what comes meanwhile waits, and only the newest of it is written.

use std::fs;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::v1::cluster_directory::{self, Address};
use hearth_api::v1::{ClusterDirectory, Node, WatchRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_base::sys::files;
use hearth_base::sys::hostname::HostnameError;

use super::health::Health;
use super::membership::{CuratorConnection, over_each, refused};
use super::names::{self, Addresses};
use crate::enrolment::directory;
use crate::handover::MemberData;
use crate::layout::Root;

/// See [`Worker::rest`].
pub(super) const REST: Duration = Duration::from_secs(5);
const PUBLIC: u32 = 0o644;

pub(super) struct Worker {
    pub root: Root,
    /// Gives the machine its name.
    pub set_hostname: fn(&str) -> Result<(), HostnameError>,
    /// At least so long between two writes to the ESP.
    pub rest: Duration,
    /// Held while the ESP is written: by a thread, which ends later than a
    /// worker that is cancelled.
    pub writing: Arc<Mutex<()>>,
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub connection: Value<CuratorConnection>,
    /// Will be read.
    pub address: Value<IpAddr>,
    /// Will be written, when the directory is on the ESP for the first time.
    pub directory_saved: Writer<()>,
}

pub(super) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    tokio::select! {
        outcome = work(&ctx, &worker) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

async fn work(ctx: &Context, worker: &Worker) -> Outcome {
    let member = worker.member.watch().next().await?;
    name_machine(worker, &member.node_id)?;
    let (found, wanted) = event::value();
    let health = Health::of(ctx);
    let keep = keep_directory(worker, wanted);
    let follow = |connection| follow(&health, worker, &member, connection, &found);
    tokio::select! {
        outcome = keep => outcome,
        outcome = over_each(&worker.connection, follow) => outcome,
    }
}

/// Host name and machine-id.
fn name_machine(worker: &Worker, node_id: &NodeId) -> Outcome {
    (worker.set_hostname)(&node_id.to_string())?;
    let machine_id = format!("{}\n", node_id.bare());
    let path = worker.root.ephemeral.machine_id();
    files::write_atomic(&path, machine_id.as_bytes(), PUBLIC)?;
    Ok(())
}

/// What is known of the cluster's nodes. Those that are gone are forgotten.
#[derive(Default)]
struct Known {
    nodes: std::collections::BTreeMap<NodeId, Node>,
}

impl Known {
    fn apply(&mut self, nodes: Vec<Node>, tombstones: &[String]) {
        for node in nodes {
            match node.id.parse() {
                Ok(id) => drop(self.nodes.insert(id, node)),
                Err(error) => tracing::warn!(id = node.id, %error, "a node without a usable ID"),
            }
        }
        for id in tombstones.iter().filter_map(|id| id.parse().ok()) {
            self.nodes.remove(&id);
        }
    }

    /// Where each node stands; what this node knows of itself goes before what
    /// the cluster has heard of it.
    fn addresses(&self, own: (NodeId, IpAddr)) -> Addresses {
        let status = |node: &Node| node.status.as_ref()?.external_address.parse().ok();
        let others = self
            .nodes
            .iter()
            .filter_map(|(id, node)| Some((*id, status(node)?)));
        let mut addresses: Addresses = others.collect();
        addresses.insert(own.0, own.1);
        addresses
    }

    /// Those that can be asked for the cluster.
    fn directory(&self, addresses: &Addresses) -> ClusterDirectory {
        let members = self.nodes.iter().filter(|(_, node)| {
            node.roles
                .as_ref()
                .is_some_and(|roles| roles.consensus_member.is_some())
        });
        let entry = |(id, node): (&NodeId, &Node)| {
            Some(cluster_directory::Node {
                id: id.to_string(),
                addresses: vec![Address {
                    host: addresses.get(id)?.to_string(),
                    port: 0,
                }],
                roles: node.roles,
            })
        };
        ClusterDirectory {
            nodes: members.filter_map(entry).collect(),
        }
    }
}

/// Follows the nodes: writes the hosts file and says what the directory is now.
/// Ends by an error only.
async fn follow(
    health: &Health<'_>,
    worker: &Worker,
    member: &MemberData,
    connection: CuratorConnection,
    found: &Writer<ClusterDirectory>,
) -> Outcome {
    let domain = connection.cluster_domain().await?;
    let mut addresses = worker.address.watch();
    let mut own = (member.node_id, addresses.next().await?);
    let mut curator = connection.curator();
    let events = curator.watch(WatchRequest::default()).await;
    let mut events = events.map_err(refused)?.into_inner();
    let mut known = Known::default();
    let mut complete = false;
    loop {
        tokio::select! {
            event = events.message() => {
                let event = event.map_err(refused)?.ok_or_else(|| Failure::msg("the curator ended the watch"))?;
                known.apply(event.nodes, &event.tombstones);
                if event.backlog_complete {
                    complete = true;
                    health.good();
                }
            }
            address = addresses.next() => own.1 = address?,
        }
        if !complete {
            continue;
        }
        let addresses = known.addresses(own);
        write_hosts(&worker.root, &addresses, &domain, own)?;
        let directory = known.directory(&addresses);
        if found.value().get().as_ref() != Some(&directory) {
            found.set(directory);
        }
    }
}

fn write_hosts(
    root: &Root,
    addresses: &Addresses,
    domain: &str,
    (node_id, address): (NodeId, IpAddr),
) -> Outcome {
    let path = root.ephemeral.hosts();
    let text = names::hosts(addresses, domain);
    if fs::read_to_string(&path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    files::write_atomic(&path, text.as_bytes(), PUBLIC)?;
    // What counts is what readers of the file will find.
    let found = names::resolve(&fs::read_to_string(&path)?, &node_id.to_string());
    if found != [address] {
        let path = path.display();
        return Err(Failure::msg(format!(
            "{path}: {node_id} is {found:?}, wanted {address}"
        )));
    }
    Ok(())
}

/// Keeps the newest directory on the ESP; ends by an error only.
async fn keep_directory(worker: &Worker, wanted: Value<ClusterDirectory>) -> Outcome {
    let mut wanted = wanted.watch();
    loop {
        // Of an empty one nobody could ask for the cluster.
        let directory = wanted.wait_for(|wanted| !wanted.nodes.is_empty()).await?;
        let wrote = save_directory(worker, directory).await?;
        if worker.directory_saved.value().get().is_none() {
            worker.directory_saved.set(());
        }
        if wrote {
            tokio::time::sleep(worker.rest).await;
        }
    }
}

/// Makes this the directory on the ESP, durably; tells whether another one, or
/// none, was there.
async fn save_directory(worker: &Worker, directory: ClusterDirectory) -> Result<bool, Failure> {
    let (esp, writing) = (worker.root.esp.clone(), worker.writing.clone());
    // The ESP is mounted synchronously; the write takes as long as the disk.
    let save = move || {
        let _writing = writing.lock().unwrap_or_else(PoisonError::into_inner);
        match directory::load(&esp) {
            Ok(Some(saved)) if saved == directory => return Ok(false),
            Ok(_) => {}
            Err(error) => {
                let error = hearth_api::chain(&error);
                tracing::warn!("replaced, for it cannot be read: {error}");
            }
        }
        directory::save(&esp, &directory).map(|()| true)
    };
    Ok(tokio::task::spawn_blocking(save).await??)
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::node_roles::ConsensusMember;
    use hearth_api::v1::{NodeRoles, NodeStatus};

    use super::*;

    fn node(digit: char, address: &str, member: bool) -> Node {
        Node {
            id: format!("hearth-{}", String::from(digit).repeat(32)),
            status: Some(NodeStatus {
                external_address: address.into(),
                ..NodeStatus::default()
            }),
            roles: Some(NodeRoles {
                consensus_member: member.then_some(ConsensusMember::default()),
                ..NodeRoles::default()
            }),
            ..Node::default()
        }
    }

    #[test]
    fn the_directory_is_of_members_with_an_address() {
        let mut known = Known::default();
        let (a, b, c) = (
            node('a', "", true),
            node('b', "192.0.2.2", true),
            node('c', "192.0.2.3", false),
        );
        let own = (a.id.parse().unwrap(), "192.0.2.1".parse().unwrap());
        let gone = b.id.clone();
        known.apply(vec![a, b, c], &[]);
        let hosts = |known: &Known| -> Vec<String> {
            let directory = known.directory(&known.addresses(own));
            directory
                .nodes
                .iter()
                .map(|node| node.addresses[0].host.clone())
                .collect()
        };
        assert_eq!(hosts(&known), ["192.0.2.1", "192.0.2.2"]);
        known.apply(vec![], &[gone]);
        assert_eq!(hosts(&known), ["192.0.2.1"]);
        assert_eq!(known.addresses(own).len(), 2);
    }
}
