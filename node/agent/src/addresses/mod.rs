//! Where nodes are, by their own word.
//!
//! Each node signs its address, with a counter that grows with every change
//! and is on disk before anyone hears of it. Such a word is worth its
//! signature, not its source, so nodes pass on what they know, to each other
//! directly: no quorum is needed for it, and no node has to be where it was
//! before. A change of address, of all of them at once even, thus harms
//! nothing.
//!
//! | part | does |
//! |---|---|
//! | `own` | raises the counter and signs, when the address changes |
//! | [`learned`](crate::learned) | keeps the newest word of each node |
//! | [`book`] | the store for all who share it; answers `ExchangeAddresses` |
//! | [`rounds`] | asks others, and tells them |
//! | [`announce`] | tells the whole link, when nobody can be found |
//!
//! What comes out of it is where the others are; it is for the hosts worker to
//! weigh that against what curators say.

mod announce;
mod book;
mod own;
mod rounds;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::proofs;
use hearth_api::v1::ClusterDirectory;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};

pub use announce::link;
#[cfg(test)]
pub use book::Brought;
pub use book::{Book, Local};

use crate::known::View;
use crate::learned::{Learned, Located};
use hearth_host::cluster_state::ClusterState;
use hearth_host::handover::MemberData;

/// See [`Worker::each`].
pub const EACH: Duration = Duration::from_secs(5);

/// What this node and the others know of addresses: its parts share it.
pub struct Worker {
    /// Where the own counter is kept.
    pub file: PathBuf,
    /// Shared with whoever answers exchanges.
    pub book: Arc<Book>,
    /// Where announcements are heard.
    pub listen: SocketAddr,
    /// Of all nodes: where exchanges are answered and announcements are heard.
    pub port: u16,
    /// Between two rounds, and two announcements.
    pub each: Duration,
    /// Whom an announcement from this address reaches.
    pub link: fn(IpAddr, u16) -> Vec<SocketAddr>,
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub address: Value<IpAddr>,
    /// Will be read.
    pub directory: Value<ClusterDirectory>,
    /// Will be read.
    pub view: Value<Arc<View>>,
    /// Will be read.
    pub cluster_state: ClusterState,
    /// Will be read: where the others are. The book writes it.
    pub learned: Value<Learned>,
    /// Will be written: this node's word, once it is durable.
    pub own_address: Writer<Located>,
}

/// Signs this node's address, and exchanges addresses with the other nodes.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    // The data partition is open from then on.
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => Arc::new(member?),
        () = ctx.cancelled() => return Ok(()),
    };
    worker.book.open(&member.credentials)?;
    let (own, all) = (member.node_id, worker.clone());
    ctx.run("announce", move |ctx| announce::run(ctx, all.clone(), own))?;
    let (who, all) = (member.clone(), worker.clone());
    ctx.run("rounds", move |ctx| {
        rounds::run(ctx, all.clone(), who.clone())
    })?;
    ctx.healthy();
    ctx.until_cancelled(keep_word(&worker, &member)).await
}

/// Keeps this node's own word true; ends by an error only.
async fn keep_word(worker: &Worker, member: &MemberData) -> Outcome {
    let mut addresses = worker.address.watch();
    let mut forgotten = worker.book.forgotten().watch();
    let mut views = worker.view.watch();
    let mut host = None;
    let mut heard = 0;
    loop {
        tokio::select! {
            address = addresses.next() => host = Some(address?),
            counter = forgotten.next() => heard = counter?,
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
        let (id, counter) = (member.node_id, located.counter);
        let record = proofs::sign_address(&member.credentials, id, host, counter);
        worker.book.set_own(located, record);
        worker.own_address.set(located);
    }
}
