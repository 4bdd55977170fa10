//! The mesh: an encrypted network between the pods of all nodes.
//!
//! While there may be pods on this node, it has a pod network: a range of IPv4 addresses that the
//! curators have assigned to it permanently, and in a dual-stack cluster the range of IPv6 that
//! belongs to it ([`PodRange::subnets`]). Its pods are connected to a bridge, [`BRIDGE`].
//! Packets to pods on other nodes go through one WireGuard interface, [`LINK`], whose peers are the
//! other workers. The allowed IPs of each peer are its ranges, so a node can only send packets from
//! addresses of its own pods. The network between the nodes is not trusted: nothing is forwarded before
//! the packet filter is in place ([`firewall`](crate::firewall)).
//!
//! Why WireGuard alone and not one of the usual overlays: it is in the kernel, needs no daemon, and
//! of the cluster it only needs what is in [`View`]. There is one route of each family for all
//! pods and not one for each node: WireGuard's allowed IPs select the node, and they have to be
//! correct in any case.
//!
//! The private key never leaves the node ([`key`]). The key is not an identity; the curators
//! publish which node it belongs to, and ensure that no two nodes have the same key or range. Their
//! answer is stored on disk, so that after a power cut the pods on one node can communicate before
//! a curator is reachable.
//!
//! In a cluster with another pod network (setting `kubernetes.pod_network`) there is none of this, and
//! this worker only lets the machine forward packets.
//!
//! This worker reads the member data, whether there may be pods, the curator connection, the view,
//! the addresses of other nodes and of this one, and writes the pod network. All changes of the
//! kernel's state go through one trait, [`Machine`]. They are idempotent: everything is set up
//! again after a failure, and removed as a whole when there are no pods any more. That is later
//! than the removal of the role: pods that are terminating may still need the network, and a pod
//! that is still running when the bridge is removed would not be connected to a new one.

mod key;
pub mod machine;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{
    CuratorConnection, MAX_RETRY_DELAY, PeerAddresses, PeerResolver, PeerWatcher, View,
    for_each_connection, refused,
};
use hearth_api::identity::{MeshSecret, NodeId};
use hearth_api::names::PORT_MESH;
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::{NodeRoles, UpdateNodeClusterNetworkingRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::handover::{MemberData, PacketFilter, PodNetwork, PodsPossible};
use hearth_host::networking::{Networking, PodRange};
use hearth_sys::wireguard::Peer;
use tonic::Code;

use key::Kept;
use machine::{Machine, Own};

/// The bridge to which this node's pods are connected.
pub const BRIDGE: &str = "hearth-pods";
/// The WireGuard interface to the pods of all other nodes.
pub const LINK: &str = "hearth-mesh";
/// What WireGuard over IPv6 adds to a packet, in bytes: 40 of IP, 8 of UDP, 32 of its own.
const OVERHEAD: u32 = 80;
/// The smallest MTU that every host of IPv4, and every link of IPv6 must support.
const MIN_MTU_V4: u32 = 576;
const MIN_MTU_V6: u32 = 1280;

/// Timeout of a request to a curator.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Connects the pods of this node with those of other nodes.
pub struct Worker<M> {
    /// Path of the stored key and range.
    pub file: PathBuf,
    /// The kernel.
    pub machine: M,
    /// Input: the identity of this node.
    pub member: Value<MemberData>,
    /// Input: which pods there may be; not set means none.
    pub may_have_pods: Value<PodsPossible>,
    /// Input: the curators, which assign the range.
    pub connection: Value<CuratorConnection>,
    /// Input: the nodes of the cluster, with keys and ranges.
    pub view: Value<Arc<View>>,
    /// Input: the addresses of other nodes.
    pub learned: Value<PeerAddresses>,
    /// Input: the address of this node.
    pub address: Value<IpAddr>,
    /// Input: the MTU of the interface with that address, in bytes.
    pub mtu: Value<u32>,
    /// Input: set once the packet filter is in place.
    pub packet_filter: Value<PacketFilter>,
    /// Output: the pod network. It is set after everything has been set up, and cleared before it
    /// is removed.
    pub pod_network: Writer<Option<PodNetwork>>,
}

/// Runs the mesh on this node while there may be pods.
pub async fn run<M: Machine>(ctx: Context, worker: Arc<Worker<M>>) -> Outcome {
    ctx.restart_within(Some(MAX_RETRY_DELAY));
    ctx.until_cancelled(follow_pods(&ctx, &worker)).await
}

/// Takes part in the mesh while there may be pods. Returns only on an error.
async fn follow_pods<M: Machine>(ctx: &Context, worker: &Worker<M>) -> Outcome {
    let member = worker.member.watch().next().await?;
    let mut news = worker.may_have_pods.watch();
    let mut pods = worker.may_have_pods.get().unwrap_or_default();
    let health = Health::of(ctx);
    loop {
        let work = async {
            if let PodsPossible::BuiltIn(ranges) = pods {
                return take_part(&health, worker, &member, ranges).await;
            }
            worker.tell(None);
            worker.machine.take_down().await?;
            if let PodsPossible::OtherNetwork(ranges) = pods {
                worker.filters(ranges).await?;
                worker.machine.forward(&ranges).await?;
            }
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

    /// Waits until the packet filter is in place, with rules about these ranges.
    async fn filters(&self, ranges: ClusterRanges) -> Result<(), event::Closed> {
        let mut filters = self.packet_filter.watch();
        let now = filters.wait_for(|filter| filter.ranges == Some(ranges));
        now.await.map(drop)
    }
}

fn is_worker(roles: &NodeRoles) -> bool {
    roles.kubernetes_worker.is_some()
}

async fn take_part<M: Machine>(
    health: &Health<'_>,
    worker: &Worker<M>,
    member: &MemberData,
    ranges: ClusterRanges,
) -> Outcome {
    let kept = key::load_or_make(&worker.file)?;
    let (assigned_writer, assigned) = event::value::<PodRange>();
    if let Some(range) = kept.range {
        assigned_writer.set(range);
    }
    let ask = |connection| ask(worker, &kept, connection, &assigned_writer);
    tokio::select! {
        outcome = for_each_connection(&worker.connection, ask) => outcome,
        outcome = keep(health, worker, member, (&kept.secret, ranges), assigned) => outcome,
    }
}

/// Why the curators have not assigned a range.
enum NoAnswer {
    /// A retry may succeed.
    Yet(Failure),
    /// This key belongs to another node; a new one has been generated.
    ForThisKey(Failure),
}

/// Publishes the key to the curators and gets the range from them; again whenever they do not have
/// it any more. With an earlier answer the mesh does not depend on them. Returns only on an error.
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
                tracing::debug!("the curators have not confirmed the pod range: {failure}");
                tokio::time::sleep(MAX_RETRY_DELAY).await;
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
            tracing::info!(%range, "pod range assigned");
            assigned.set(range);
        }
        // The curators may be restored from a backup that is older than the answer. A view that is
        // older than the answer causes one additional request.
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
        // Another node has this key, because a disk was copied: generate a new one.
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

/// Sets up the kernel for the range and the peers. Returns only on an error.
async fn keep<M: Machine>(
    health: &Health<'_>,
    worker: &Worker<M>,
    member: &MemberData,
    (secret, ranges): (&MeshSecret, ClusterRanges),
    assigned: Value<PodRange>,
) -> Outcome {
    let mut all_assigned = assigned.watch();
    let mut range = all_assigned.next().await?;
    let mut all_mtus = worker.mtu.watch();
    let mut uplink_mtu = all_mtus.next().await?;
    worker.filters(ranges).await?;
    loop {
        let subnets = range.subnets(&ranges)?;
        let mtu = mtu(uplink_mtu, &ranges);
        let own = Own {
            secret: secret.clone(),
            subnets,
            ranges,
            mtu,
        };
        worker.machine.set_up(&own).await?;
        worker.tell(Some(PodNetwork {
            ranges,
            subnets,
            mtu,
        }));
        tokio::select! {
            outcome = follow_peers(health, worker, member, &ranges) => return outcome,
            other = all_assigned.wait_for(|other| *other != range) => range = other?,
            other = all_mtus.wait_for(|other| *other != uplink_mtu) => uplink_mtu = other?,
        }
    }
}

/// The MTU of the mesh: its packets fit into those of the interface below it. Where they cannot, because that is smaller
/// than IP permits, the kernel fragments them.
fn mtu(uplink: u32, ranges: &ClusterRanges) -> u32 {
    let least = match ranges.v6 {
        Some(_) => MIN_MTU_V6,
        None => MIN_MTU_V4,
    };
    uplink.saturating_sub(OVERHEAD).max(least)
}

/// Keeps the peers and their endpoints up to date. Returns only on an error.
async fn follow_peers<M: Machine>(
    health: &Health<'_>,
    worker: &Worker<M>,
    member: &MemberData,
    ranges: &ClusterRanges,
) -> Outcome {
    let mut watcher = PeerWatcher::new(member, &worker.view, &worker.learned, &worker.address);
    let mut told: Option<Vec<Peer>> = None;
    loop {
        // Without a view the peers are not changed.
        let known = watcher.known();
        let peers = known.view.as_ref().map(|view| peers(known, view, ranges));
        if peers.is_some() && told != peers {
            worker
                .machine
                .set_peers(peers.as_deref().unwrap_or_default())
                .await?;
            told = peers;
        }
        health.good();
        watcher.changed().await?;
    }
}

/// The other workers of the cluster, ordered by ID. A peer without a known address can still
/// connect by itself.
fn peers(known: &PeerResolver, view: &View, ranges: &ClusterRanges) -> Vec<Peer> {
    let addresses = known.addresses();
    let peer = |id: &NodeId, networking: Networking| {
        let subnets = networking.range.subnets(ranges);
        let subnets = subnets
            .inspect_err(|error| tracing::warn!(%id, %error, "no peer"))
            .ok()?;
        Some(Peer {
            key: *networking.key.as_bytes(),
            endpoint: addresses
                .get(id)
                .map(|address| SocketAddr::new(*address, PORT_MESH)),
            networks: subnets.all().map(|subnet| subnet.range).collect(),
        })
    };
    let others = view
        .nodes
        .iter()
        .filter(|(id, node)| **id != known.own && is_worker(&node.roles) && view.has(id));
    others
        .filter_map(|(id, node)| peer(id, node.networking?))
        .collect()
}
