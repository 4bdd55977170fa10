//! The virtual address of the API servers (setting `kubernetes.api_address`): one Kubernetes controller
//! at a time has it, in addition to its own address, so that clients outside the cluster need to know only
//! this one.
//!
//! A controller stands for the address while the setting names one, its own API server is ready, and its
//! interface is in the network of that address. Whoever creates the key `holder` in etcd, attached to a
//! lease of etcd, has the address until it gives it up or the lease expires. Why a lease in etcd and not
//! one in Kubernetes, like those of the controller manager: the address must move when the holder's API server is
//! what has failed, and a lease in etcd expires by the clock of etcd's leader alone.
//!
//! ```text
//!  candidate ── nobody has it: grant, create the key ──► holder: renew each quarter of the lease
//!      ▲                                                   │   address on the interface, lent by the
//!      │                                                   │   kernel until the lease ends; announced
//!      └── API server not ready, setting changed, ─────────┘
//!          lease lost, role removed: address removed, then the lease revoked
//! ```
//!
//! Invariants:
//! - No two machines have the address at once, as far as their clocks run equally fast: each renewal lends the
//!   address until the lease can expire and no longer, counted from before the renewal was sent. The kernel removes it
//!   then, also if this process hangs ([`Netlink::lend_address`]).
//! - The address is removed before the lease is revoked.
//! - A lease that could not be revoked is not renewed, so the next holder waits for one lease at most.

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::names::conditions;
use hearth_api::v1::{KubernetesConfiguration, NodeCondition};
use hearth_base::event::{Closed, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::{ConsensusError, Lease, NamespacedClient};
use hearth_sys::announce::announce;
use hearth_sys::cidr::Cidr;
use hearth_sys::netlink::{Link, LinkKind, Netlink, NetlinkError};
use tokio::time::{Instant, sleep, timeout};

use crate::program::Progress;

/// The key of the holder, whose value is its node ID.
const HOLDER: &str = "holder";
/// Renewals of a lease during its lifetime.
const RENEWALS: u32 = 4;
/// After the address has come to this machine, it is announced with this many renewals: a frame can be lost.
const ANNOUNCED_AT_FIRST: u32 = 4;
/// Later it is announced with each so many-th renewal, for neighbours that have missed the first ones.
const ANNOUNCED_EVERY: u32 = 48;

/// What a controller has to do with the virtual address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AddressStatus {
    /// The cluster has no such address.
    None,
    /// This node has it.
    Holder(IpAddr),
    /// This node would take it over.
    Standby(IpAddr),
    /// The API server of this node is not ready.
    NotReady(IpAddr),
    /// This node's interface is not in the network of the address.
    OtherNetwork {
        /// The virtual address.
        address: IpAddr,
        /// The networks of the interface.
        networks: Vec<Cidr>,
    },
    /// An error, which will be retried.
    Failing(String),
}

impl AddressStatus {
    /// As a condition of the node; `None` if the cluster has no virtual address.
    pub(crate) fn condition(&self) -> Option<NodeCondition> {
        let (met, reason, message) = match self {
            Self::None => return None,
            Self::Holder(address) => (true, "Holder", format!("this node has {address}")),
            Self::Standby(address) => (true, "Standby", format!("another node has {address}")),
            Self::NotReady(address) => {
                let message = format!("cannot take {address}: the API server is not ready");
                (false, "NotReady", message)
            }
            Self::OtherNetwork { address, networks } => {
                let networks: Vec<_> = networks.iter().map(Cidr::to_string).collect();
                let networks = match &networks[..] {
                    [] => "none".to_owned(),
                    networks => networks.join(", "),
                };
                let message = format!(
                    "kubernetes.api_address: expected an address in a network of this node ({networks}), got {address}"
                );
                (false, "OtherNetwork", message)
            }
            Self::Failing(why) => (false, "Failing", why.clone()),
        };
        Some(NodeCondition {
            r#type: conditions::KUBERNETES_API_ADDRESS.to_owned(),
            met,
            reason: reason.to_owned(),
            message: hearth_api::names::conditions::printable(&message),
        })
    }
}

/// Inputs and outputs.
pub(crate) struct Worker {
    /// The namespace in etcd of this alone.
    pub store: NamespacedClient,
    /// This node.
    pub node: NodeId,
    /// Lifetime of the holder's lease, in whole seconds.
    pub lease: Duration,
    /// Input: the cluster's settings.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    /// Input: the node's own address, which leads to the interface.
    pub own: Value<IpAddr>,
    /// Input: the API server of this node.
    pub apiserver: Value<Progress>,
    /// Output.
    pub address_status: Arc<Writer<AddressStatus>>,
}

/// Where the address would be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    address: IpAddr,
    interface: u32,
    mac: [u8; 6],
}

/// The lease of a holder.
struct Held {
    lease: Lease,
    /// Until then it cannot have expired.
    until: Instant,
}

/// Why a holder or candidate has to begin anew.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    #[error("cannot announce the address")]
    Announce(#[source] std::io::Error),
    #[error("the lease has expired")]
    Expired,
    #[error("another node has created the key at the same time")]
    Overtaken,
}

/// Stands for the address, has it, and gives it up when it is cancelled.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let netlink = Netlink::open()?;
    let health = Health::of(&ctx);
    let mut inputs = Inputs::of(&worker);
    loop {
        let address_status = tokio::select! {
            address_status = worker.judge(&netlink) => address_status?,
            () = ctx.cancelled() => break,
        };
        health.good();
        let place = match address_status {
            Ok(place) => place,
            Err(address_status) => {
                worker.address_status.set(address_status);
                tokio::select! {
                    changed = inputs.changed() => changed?,
                    () = ctx.cancelled() => break,
                }
                continue;
            }
        };
        worker
            .address_status
            .set(AddressStatus::Standby(place.address));
        let mut held = None;
        let ended = tokio::select! {
            lost = worker.compete(&netlink, &place, &mut held) => Some(lost),
            outdated = worker.outdated(&netlink, &place, &mut inputs) => outdated.map(|()| None)?,
            () = ctx.cancelled() => None,
        };
        worker.give_up(&netlink, &place, held.take()).await;
        if let Some(lost) = ended {
            worker.report(&place, &lost);
            sleep(worker.lease / RENEWALS).await;
        }
    }
    worker.address_status.set(AddressStatus::None);
    Ok(())
}

/// What decides whether this node stands for the address.
struct Inputs {
    settings: Watcher<Arc<KubernetesConfiguration>>,
    own: Watcher<IpAddr>,
    apiserver: Watcher<Progress>,
}

impl Inputs {
    fn of(worker: &Worker) -> Self {
        Self {
            settings: worker.settings.watch(),
            own: worker.own.watch(),
            apiserver: worker.apiserver.watch(),
        }
    }

    async fn changed(&mut self) -> Result<(), Closed> {
        tokio::select! {
            changed = self.settings.next() => changed.map(drop),
            changed = self.own.next() => changed.map(drop),
            changed = self.apiserver.next() => changed.map(drop),
        }
    }
}

impl Worker {
    /// Where the address would be on this node, or why this node does not stand for it.
    async fn judge(&self, netlink: &Netlink) -> Result<Result<Place, AddressStatus>, NetlinkError> {
        let settings = self.settings.get();
        let Some(address) = settings.and_then(|settings| settings.virtual_address()) else {
            return Ok(Err(AddressStatus::None));
        };
        if self.apiserver.get() != Some(Progress::Serving) {
            return Ok(Err(AddressStatus::NotReady(address)));
        }
        let (link, mut networks) = match self.own.get() {
            Some(own) => interface_of(netlink, own).await?,
            None => (None, Vec::new()),
        };
        networks.retain(|network| match network.address() {
            // What this node has of it, if it has the address.
            _ if *network == Cidr::host(address) => false,
            IpAddr::V6(own) => !own.is_unicast_link_local(),
            IpAddr::V4(_) => true,
        });
        let is_in_network = networks.iter().any(|network| network.contains(address));
        Ok(match link {
            Some((interface, mac)) if is_in_network => Ok(Place {
                address,
                interface,
                mac,
            }),
            _ => Err(AddressStatus::OtherNetwork { address, networks }),
        })
    }

    /// Returns when this node does not stand for the address at this place any more.
    async fn outdated(&self, netlink: &Netlink, place: &Place, inputs: &mut Inputs) -> Outcome {
        loop {
            inputs.changed().await?;
            if self.judge(netlink).await?.as_ref() != Ok(place) {
                return Ok(());
            }
        }
    }

    /// Waits until nobody has the address, takes it, and keeps it. Returns only when that fails. `held` is what has
    /// to be given up then, or when this is dropped.
    async fn compete(&self, netlink: &Netlink, place: &Place, held: &mut Option<Held>) -> Lost {
        loop {
            let taken = async {
                self.wait_until_free().await?;
                self.take(held).await
            };
            match taken.await {
                Ok(()) => break,
                // The lease that this attempt was granted is not needed.
                Err(Lost::Overtaken) => self.revoke(held.take()).await,
                Err(lost) => return lost,
            }
        }
        match self.hold(netlink, place, held).await {
            Ok(never) => match never {},
            Err(lost) => lost,
        }
    }

    /// Returns when the key does not exist.
    async fn wait_until_free(&self) -> Result<(), Lost> {
        loop {
            let found = self.store.list("").await?;
            if !found.records.iter().any(|record| record.key == HOLDER) {
                return Ok(());
            }
            let mut changes = self.store.watch(found.revision + 1).await?;
            // Whether the key was deleted is read from etcd again. A watch that ends, or that hangs, costs no more than
            // a lease.
            let _ = timeout(self.lease, changes.next()).await;
        }
    }

    /// Creates the key, attached to a new lease.
    async fn take(&self, held: &mut Option<Held>) -> Result<(), Lost> {
        let until = Instant::now() + self.lease;
        let lease = self.store.grant(self.lease).await?;
        *held = Some(Held { lease, until });
        let node = self.node.to_string().into_bytes();
        let write = Write::when(Condition::Absent(HOLDER.to_owned()));
        match self
            .store
            .write(write.put_leased(HOLDER, node, lease))
            .await
        {
            Ok(_) => Ok(()),
            Err(WriteError::Conflict) => Err(Lost::Overtaken),
            Err(WriteError::Consensus(error)) => Err(error.into()),
        }
    }

    /// Has the address for as long as the lease can be renewed.
    async fn hold(
        &self,
        netlink: &Netlink,
        place: &Place,
        held: &mut Option<Held>,
    ) -> Result<Infallible, Lost> {
        let Some(held) = held else {
            return Err(Lost::Expired);
        };
        let each = self.lease / RENEWALS;
        let store = self.store.bounded(each);
        let mut renewals = 0;
        loop {
            lend(netlink, place, held.until).await?;
            if renewals < ANNOUNCED_AT_FIRST || renewals % ANNOUNCED_EVERY == 0 {
                announce(place.interface, place.mac, place.address).map_err(Lost::Announce)?;
            }
            if renewals == 0 {
                tracing::info!(address = %place.address, "this node has the virtual address of the API servers");
                self.address_status
                    .set(AddressStatus::Holder(place.address));
            }
            renewals += 1;
            sleep(each).await;
            held.until = self.renew(&store, held).await?;
        }
    }

    /// Renews the lease, again and again until it may have expired. Returns until when it has not.
    async fn renew(&self, store: &NamespacedClient, held: &Held) -> Result<Instant, Lost> {
        loop {
            let sent = Instant::now();
            match store.renew(held.lease).await {
                Ok(true) => return Ok(sent + self.lease),
                Ok(false) => return Err(Lost::Expired),
                Err(error) => tracing::debug!("cannot renew the virtual address: {error}"),
            }
            if Instant::now() >= held.until {
                return Err(Lost::Expired);
            }
            // etcd may have answered at once that it cannot.
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Removes the address, then the lease, so that another node can take it at once.
    async fn give_up(&self, netlink: &Netlink, place: &Place, held: Option<Held>) {
        if held.is_none() {
            return;
        }
        let removed = netlink.remove_address(place.interface, Cidr::host(place.address));
        if let Err(error) = removed.await {
            // The kernel removes it when the lease ends, and nobody can take it before that.
            tracing::warn!("cannot give up the virtual address: {error}");
            return;
        }
        self.revoke(held).await;
    }

    /// An error costs the others no more than waiting for the lease to expire.
    async fn revoke(&self, held: Option<Held>) {
        let Some(Held { lease, .. }) = held else {
            return;
        };
        let store = self.store.bounded(self.lease / RENEWALS);
        if let Err(error) = store.revoke(lease).await {
            tracing::debug!("cannot revoke the lease of the virtual address: {error}");
        }
    }

    fn report(&self, place: &Place, lost: &Lost) {
        let why = hearth_api::chain(lost);
        let had_it =
            self.address_status.value().get() == Some(AddressStatus::Holder(place.address));
        match had_it {
            true => tracing::warn!("lost the virtual address of the API servers: {why}"),
            // While etcd has no quorum, each attempt fails.
            false => tracing::debug!("cannot stand for the virtual address: {why}"),
        }
        self.address_status.set(AddressStatus::Failing(why));
    }
}

/// Lends the address to the interface until then, if that is at least a second away: the kernel counts whole seconds.
async fn lend(netlink: &Netlink, place: &Place, until: Instant) -> Result<(), Lost> {
    let remains = until.saturating_duration_since(Instant::now());
    if remains < Duration::from_secs(1) {
        return Err(Lost::Expired);
    }
    netlink
        .lend_address(place.interface, place.address, remains)
        .await?;
    Ok(())
}

/// The interface with an address of this node: its index and hardware address, and its networks.
async fn interface_of(
    netlink: &Netlink,
    own: IpAddr,
) -> Result<(Option<(u32, [u8; 6])>, Vec<Cidr>), NetlinkError> {
    for link in netlink.list_links().await? {
        let Link {
            index, kind, mac, ..
        } = link;
        let Some(mac) = mac.filter(|_| kind != LinkKind::Loopback) else {
            continue;
        };
        let networks = netlink.addresses(index).await?;
        if networks.iter().any(|network| network.address() == own) {
            return Ok((Some((index, mac)), networks));
        }
    }
    Ok((None, Vec::new()))
}
