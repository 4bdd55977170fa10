//! The mesh of nodes: pods of different nodes reach each other, encrypted.
//!
//! While there may be pods on this node, they have a range of addresses
//! that the curators have given it for good, and live behind a bridge of their
//! own, [`BRIDGE`]. What they send to pods elsewhere leaves through one
//! WireGuard interface, [`LINK`], whose peers are the other workers, each with
//! its range as the only addresses that it may send from. So a node can speak
//! for its own pods only, whatever it sends, and what the network between the
//! nodes does is not believed at all ([`firewall`]).
//!
//! WireGuard by itself and not one of the usual overlays: the kernel has it,
//! it needs no daemon, and of the cluster it has to know just the table that
//! [`View`](hearth_agent::View) is. One route for all pods and not one for each
//! node: which node has a packet is decided by WireGuard's own table, which is
//! the one that has to be right anyhow.
//!
//! The key never leaves the node ([`key`]); it is no identity, but the curators
//! make known whose it is, and see to it that no two nodes have the same key or
//! range. What they have answered is kept on disk, so that after a power cut
//! pods talk on their node before a curator is to be found.
//!
//! This worker reads the member data, whether there may be pods, the curator
//! connection, view, learned addresses and own address, and writes the pod
//! network. What it wants of the kernel stands in one trait, [`Machine`]. All of
//! that can be said again at any time; so everything is done anew after a
//! failure, and taken away as a whole when there are no pods any more. That is
//! later than the role is gone: pods that end may have something left to say,
//! and one that outlived its bridge would have no network in the next one.

mod firewall;
mod key;
pub mod machine;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{ASK_AGAIN_WITHIN, CuratorConnection, Known, Learned, View, over_each, refused};
use hearth_api::identity::{MeshSecret, NodeId};
use hearth_api::names::{EXTENSION_KUBERNETES, PORT_MESH};
use hearth_api::v1::{NodeRoles, UpdateNodeClusterNetworkingRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::extensions::Extensions;
use hearth_host::handover::{MayHavePods, MemberData, PodNetwork};
use hearth_host::networking::{Networking, PodRange};
use hearth_sys::wireguard::Peer;
use tonic::Code;

use key::Kept;
use machine::{Machine, Own};

/// The bridge to which this node's pods are connected.
pub const BRIDGE: &str = "hearth-pods";
/// The way to all other nodes' pods.
pub const LINK: &str = "hearth-mesh";
/// Of both, in bytes: what is left of Ethernet's 1500 under WireGuard, by IPv6.
pub const MTU: u32 = 1420;

/// A curator answers within.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Connects the pods of this node with those of the others.
pub struct Worker<M> {
    /// Where the key is kept.
    pub file: PathBuf,
    /// The kernel.
    pub machine: M,
    /// One of them has the program for rules.
    pub extensions: Arc<Extensions>,
    /// Will be read: who this node is.
    pub member: Value<MemberData>,
    /// Will be read; not known is no.
    pub may_have_pods: Value<MayHavePods>,
    /// Will be read: who gives the range.
    pub connection: Value<CuratorConnection>,
    /// Will be read: who takes part.
    pub view: Value<Arc<View>>,
    /// Will be read: where the others are.
    pub learned: Value<Learned>,
    /// Will be read: where this node is.
    pub address: Value<IpAddr>,
    /// Will be written, once all of it is there, and before it goes.
    pub pod_network: Writer<Option<PodNetwork>>,
}

/// Keeps the mesh on this machine as the view of the nodes says, while there may be pods.
pub async fn run<M: Machine>(ctx: Context, worker: Arc<Worker<M>>) -> Outcome {
    ctx.restart_within(Some(ASK_AGAIN_WITHIN));
    ctx.until_cancelled(follow_pods(&ctx, &worker)).await
}

/// Takes part in the mesh while there may be pods. Ends by an error only.
async fn follow_pods<M: Machine>(ctx: &Context, worker: &Worker<M>) -> Outcome {
    let member = worker.member.watch().next().await?;
    let mut news = worker.may_have_pods.watch();
    let mut pods = worker.may_have_pods.get().unwrap_or(false);
    let health = Health::of(ctx);
    loop {
        let work = async {
            if pods {
                return take_part(&health, worker, &member).await;
            }
            worker.tell(None);
            worker.machine.take_down().await?;
            health.good();
            std::future::pending().await
        };
        tokio::select! {
            outcome = work => return outcome,
            now = news.wait_for(|now| *now != pods) => pods = now?,
        }
    }
}

impl<M> Worker<M> {
    fn tell(&self, network: Option<PodNetwork>) {
        if self.pod_network.value().get().flatten() != network {
            self.pod_network.set(network);
        }
    }
}

fn is_worker(roles: &NodeRoles) -> bool {
    roles.kubernetes_worker.is_some()
}

async fn take_part<M: Machine>(
    health: &Health<'_>,
    worker: &Worker<M>,
    member: &MemberData,
) -> Outcome {
    let mounted = worker.extensions.get(EXTENSION_KUBERNETES)?;
    let iptables = Bundle::open(mounted)?.program(Binary::Iptables);
    let kept = key::load_or_make(&worker.file)?;
    let (assigned_writer, assigned) = event::value::<PodRange>();
    if let Some(range) = kept.range {
        assigned_writer.set(range);
    }
    let ask = |connection| ask(worker, &kept, connection, &assigned_writer);
    tokio::select! {
        outcome = over_each(&worker.connection, ask) => outcome,
        outcome = keep(health, worker, member, &kept.secret, &iptables, assigned) => outcome,
    }
}

/// Why there is no answer.
enum NoAnswer {
    /// There may be one later.
    Yet(Failure),
    /// This key will never be this node's; there is another one now.
    ForThisKey(Failure),
}

/// Makes the key known to the curators and learns the range from them; again
/// whenever they do not know it any more. What works by an earlier answer does
/// not depend on them. Ends by an error only.
async fn ask<M>(
    worker: &Worker<M>,
    kept: &Kept,
    connection: CuratorConnection,
    assigned: &Writer<PodRange>,
) -> Outcome {
    let mut views = worker.view.watch();
    loop {
        let networking = match ask_once(worker, kept, &connection).await {
            Ok(networking) => networking,
            Err(NoAnswer::Yet(failure)) if assigned.value().get().is_some() => {
                tracing::debug!("the curators have not confirmed the pods' range: {failure}");
                tokio::time::sleep(ASK_AGAIN_WITHIN).await;
                continue;
            }
            Err(NoAnswer::Yet(failure) | NoAnswer::ForThisKey(failure)) => return Err(failure),
        };
        let range = networking.range;
        if assigned.value().get() != Some(range) {
            let kept = Kept {
                secret: kept.secret.clone(),
                range: Some(range),
            };
            key::save(&worker.file, &kept)?;
            tracing::info!(%range, "this node's pods have these addresses");
            assigned.set(range);
        }
        // They may have been restored from a backup that is older than this. A
        // view that is older than the answer costs one more question.
        let of = |view: &View| view.nodes.get(&connection.node_id)?.networking;
        while of(&*views.next().await?) == Some(networking) {}
    }
}

async fn ask_once<M>(
    worker: &Worker<M>,
    kept: &Kept,
    connection: &CuratorConnection,
) -> Result<Networking, NoAnswer> {
    let yet = |why: String| NoAnswer::Yet(Failure::msg(why));
    let key = kept.secret.public();
    let request = UpdateNodeClusterNetworkingRequest {
        node_id: connection.node_id.to_string(),
        wireguard_public_key: key.as_bytes().to_vec(),
    };
    let mut curator = connection.curator();
    let call = curator.update_node_cluster_networking(request);
    let answer = tokio::time::timeout(ANSWER_WITHIN, call).await;
    match answer.map_err(|_| yet(format!("no answer within {ANSWER_WITHIN:?}")))? {
        Ok(answer) => {
            let networking = answer.into_inner().networking.unwrap_or_default();
            let networking = Networking::try_from(&networking);
            let networking = networking.map_err(|error| yet(error.to_string()))?;
            if networking.key != key {
                return Err(yet("the curator has answered with another key".into()));
            }
            Ok(networking)
        }
        // A disk that was copied: this node needs a key of its own.
        Err(status) if status.code() == Code::AlreadyExists => {
            let secret = MeshSecret::generate();
            let range = kept.range;
            let saved = key::save(&worker.file, &Kept { secret, range });
            Err(NoAnswer::ForThisKey(match saved {
                Ok(()) => refused(status),
                Err(error) => error.into(),
            }))
        }
        Err(status) => Err(NoAnswer::Yet(refused(status))),
    }
}

/// Has the kernel be as the range and the other nodes demand. Ends by an error
/// only.
async fn keep<M: Machine>(
    health: &Health<'_>,
    worker: &Worker<M>,
    member: &MemberData,
    secret: &MeshSecret,
    iptables: &Path,
    assigned: Value<PodRange>,
) -> Outcome {
    let mut ranges = assigned.watch();
    let mut range = ranges.next().await?;
    loop {
        let own = Own {
            secret: secret.clone(),
            range,
            iptables: iptables.to_owned(),
        };
        worker.machine.set_up(&own).await?;
        worker.tell(Some(PodNetwork {
            range: range.cidr(),
            gateway: range.gateway().into(),
        }));
        tokio::select! {
            outcome = follow_peers(health, worker, member) => return outcome,
            other = ranges.wait_for(|other| *other != range) => range = other?,
        }
    }
}

/// Has the other nodes as peers, wherever they are. Ends by an error only.
async fn follow_peers<M: Machine>(
    health: &Health<'_>,
    worker: &Worker<M>,
    member: &MemberData,
) -> Outcome {
    let mut views = worker.view.watch();
    let mut learned = worker.learned.watch();
    let mut addresses = worker.address.watch();
    let mut known = Known {
        own: member.node_id,
        own_address: worker.address.get(),
        saved: member.directory.clone(),
        learned: worker.learned.get().unwrap_or_default(),
        view: worker.view.get(),
    };
    let mut told: Option<Vec<Peer>> = None;
    loop {
        // Nobody is no peer any more because nobody has told of any.
        let peers = known.view.as_ref().map(|view| peers(&known, view));
        if peers.is_some() && told != peers {
            worker
                .machine
                .set_peers(peers.as_deref().unwrap_or_default())
                .await?;
            told = peers;
        }
        health.good();
        tokio::select! {
            view = views.next() => known.view = Some(view?),
            news = learned.next() => known.learned = news?,
            address = addresses.next() => known.own_address = Some(address?),
        }
    }
}

/// The workers of the cluster, but this node, in the order of their names. One
/// whose address is not known may still come by itself.
fn peers(known: &Known, view: &View) -> Vec<Peer> {
    let addresses = known.addresses();
    let peer = |id: &NodeId, networking: Networking| Peer {
        key: *networking.key.as_bytes(),
        endpoint: addresses
            .get(id)
            .map(|address| SocketAddr::new(*address, PORT_MESH)),
        networks: [networking.range.cidr()].into(),
    };
    let others = view
        .nodes
        .iter()
        .filter(|(id, node)| **id != known.own && is_worker(&node.roles) && view.has(id));
    others
        .filter_map(|(id, node)| Some(peer(id, node.networking?)))
        .collect()
}
