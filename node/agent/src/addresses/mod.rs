//! Peer discovery: the addresses of all nodes, signed by the nodes themselves.
//!
//! Each node signs its address, together with a counter that grows with every change and is on disk
//! before the record is sent. A signed record can be verified whatever its source, so nodes pass on
//! all records that they have, directly to each other. This needs no quorum, and no node has to
//! keep its address: it works even after the addresses of all nodes change at once.
//!
//! | part | does |
//! |---|---|
//! | `own` | increments the counter and signs, when the address changes |
//! | [`learned`](crate::learned) | stores the newest record of each node |
//! | [`book`] | shares the store between workers; answers `ExchangeAddresses` |
//! | [`gossip`] | exchanges records with other nodes |
//! | [`broadcast`] | broadcasts this node's record on its link, when no node can be reached |
//!
//! The result is the addresses of the other nodes; the hosts worker combines them with what the
//! curators report.

mod book;
mod broadcast;
mod gossip;
mod own;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::proofs;
use hearth_api::v1::ClusterDirectory;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_host::cluster_state::ClusterState;
use hearth_host::handover::MemberData;

#[cfg(test)]
pub use book::Source;
pub use book::{AddressBook, Local};
pub use broadcast::link;

use crate::known::View;
use crate::learned::{AddressRecord, PeerAddresses};

/// Default of [`Worker::each`].
pub const EACH: Duration = Duration::from_secs(5);

/// What the parts of address exchange share.
pub struct Worker {
    /// File with this node's last address and counter.
    pub file: PathBuf,
    /// The address book, shared with the server that answers exchanges.
    pub book: Arc<AddressBook>,
    /// Where broadcasts are received.
    pub listen: SocketAddr,
    /// The port on all nodes for exchanges (TCP) and broadcasts (UDP).
    pub port: u16,
    /// Interval of exchanges, and of broadcasts.
    pub each: Duration,
    /// The destinations of a broadcast from this address.
    pub link: fn(IpAddr, u16) -> Vec<SocketAddr>,
    /// Read: this node's identity and credentials.
    pub member: Value<MemberData>,
    /// Read: this node's address.
    pub address: Value<IpAddr>,
    /// Read: the consensus members.
    pub directory: Value<ClusterDirectory>,
    /// Read: the nodes, from the curators.
    pub view: Value<Arc<View>>,
    /// Read: whether the node is in contact with its cluster.
    pub cluster_state: ClusterState,
    /// Read: addresses of the other nodes. The address book writes it.
    pub learned: Value<PeerAddresses>,
    /// Written: this node's signed record, once it is durable.
    pub own_address: Writer<AddressRecord>,
}

/// Signs this node's address, and exchanges addresses with the other nodes.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    // Once there is a member, the data partition is mounted.
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => Arc::new(member?),
        () = ctx.cancelled() => return Ok(()),
    };
    worker.book.open(&member.own);
    let (own, all) = (member.own.node(), worker.clone());
    ctx.run("announce", move |ctx| broadcast::run(ctx, all.clone(), own))?;
    let (who, all) = (member.clone(), worker.clone());
    ctx.run("rounds", move |ctx| {
        gossip::run(ctx, all.clone(), who.clone())
    })?;
    ctx.healthy();
    ctx.until_cancelled(update_own_record(&worker, &member))
        .await
}

/// Keeps this node's own record up to date; only returns errors.
async fn update_own_record(worker: &Worker, member: &MemberData) -> Outcome {
    let mut addresses = worker.address.watch();
    let mut lost_counter = worker.book.lost_counter().watch();
    let mut views = worker.view.watch();
    let mut renewals = member.own.changes();
    let mut host = None;
    let mut heard = 0;
    loop {
        tokio::select! {
            renewed = renewals.changed() => {
                renewed?;
                // The record contains the certificate. A record of the same address with a higher
                // counter takes its place at the other nodes.
                if let Some(last) = worker.own_address.value().get() {
                    heard = heard.max(last.counter);
                }
            }
            address = addresses.next() => host = Some(address?),
            counter = lost_counter.next() => heard = counter?,
            view = views.next() => {
                let view = view?;
                let nodes = view.nodes.keys().filter(|id| view.has(id));
                worker.book.set_members(nodes.copied().collect());
                continue;
            }
        }
        let Some(host) = host else {
            continue;
        };
        let located = own::word(&worker.file, host, heard)?;
        if worker.own_address.value().get() == Some(located) {
            continue;
        }
        let record = proofs::sign_address(&member.own, host, located.counter);
        worker.book.set_own(located, record);
        worker.own_address.set(located);
    }
}
