//! The leaves of nodes and users: for how long they are issued, with which names, and the renewal of
//! those of the node on which this curator runs.
//!
//! A leaf is valid for the time of the cluster's setting from the moment at which it is issued, by this
//! curator's clock. Its holder renews it after half of that. A curator renews its own without anybody's
//! help, from the authority in etcd, so that a cluster that was off until all leaves had expired comes
//! back: the curators first, then, through them, the others.
//!
//! Names and addresses are for clients of others, which compare them with those to which they connect. Only a
//! consensus member has those of a curator, so that no other node can pass for one. When the cluster's settings
//! give the curators other names, each renews its own leaf at once.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use hearth_api::hosts::Host;
use hearth_api::identity::{NodeId, P256PublicKey, PublicKey, UserName};
use hearth_api::names::CURATOR_NAME;
use hearth_api::tls::{self, CertificateDer, OwnCertificate};
use hearth_api::v1::ClusterConfiguration;
use hearth_cluster::state::ClusterRecord;
use hearth_host::pki::{Authority, Holder, PkiError, hosts};
use tonic::Status;

use crate::authorities;
use crate::core::Core;

/// How often the clock is compared with the end of the own leaf: it may be set at any time.
const LOOK: Duration = Duration::from_secs(5);

/// The certificates of a node or user.
pub struct Leaves {
    /// That of its Ed25519 key.
    pub certificate: CertificateDer<'static>,
    /// That of its P-256 key, if there is one.
    pub p256: Option<CertificateDer<'static>>,
}

/// Issues the leaves of a node.
pub async fn of_node(
    core: &Core,
    id: NodeId,
    key: PublicKey,
    p256: Option<P256PublicKey>,
) -> Result<Leaves, Status> {
    let cluster = core.loaded_cluster().await?.content;
    let node = core.cache.node(id);
    let is_member = node.is_some_and(|(node, _)| node.roles.consensus_member.is_some());
    let names = match is_member || id == core.node_id {
        true => curator_hosts(&cluster.configuration),
        false => Vec::new(),
    };
    let holder = Holder::node(cluster.id, id, key, names);
    issue(core, &cluster, &holder, p256).await
}

/// Issues the leaves of the owner.
pub async fn of_owner(
    core: &Core,
    key: PublicKey,
    p256: Option<P256PublicKey>,
) -> Result<Leaves, Status> {
    let cluster = core.loaded_cluster().await?.content;
    let holder = Holder::user(cluster.id, UserName::owner(), key);
    issue(core, &cluster, &holder, p256).await
}

async fn issue(
    core: &Core,
    cluster: &ClusterRecord,
    holder: &Holder,
    p256: Option<P256PublicKey>,
) -> Result<Leaves, Status> {
    let authority = authorities::cluster(core).await?;
    let valid = lifetime(&cluster.configuration);
    sign(&authority, holder, p256, core.now(), valid).map_err(|error| authorities::cannot(&error))
}

fn sign(
    authority: &Authority,
    holder: &Holder,
    p256: Option<P256PublicKey>,
    now: SystemTime,
    valid: Duration,
) -> Result<Leaves, PkiError> {
    let p256 = p256.map(|key| authority.issue_p256_leaf(holder, key, now, valid));
    Ok(Leaves {
        certificate: authority.issue_leaf(holder, now, valid)?,
        p256: p256.transpose()?,
    })
}

/// For how long a leaf is issued.
pub fn lifetime(configuration: &ClusterConfiguration) -> Duration {
    Duration::from_secs(configuration.certificate_lifetime_seconds.into())
}

/// The names and addresses of a curator.
pub fn curator_hosts(configuration: &ClusterConfiguration) -> Vec<Host> {
    let in_domain = format!("curator.{}", configuration.cluster_domain);
    let mut hosts = vec![Host::Name(in_domain), Host::Name(CURATOR_NAME.to_owned())];
    hosts.extend(configuration.server_hosts());
    hosts
}

/// Whether the leaf of a node has other names and addresses than those of a curator with these settings.
pub fn is_misnamed(leaf: &[u8], id: NodeId, configuration: &ClusterConfiguration) -> bool {
    let own_name = Host::Name(id.to_string());
    let wanted = curator_hosts(configuration);
    let found = hosts(leaf);
    found.is_ok_and(|found| !found.iter().eq([own_name].iter().chain(&wanted)))
}

/// Renews the leaves of this node.
pub async fn renew_own(core: &Core, own: &OwnCertificate) -> Result<(), Status> {
    let (id, key) = (own.node(), own.key().public());
    let leaves = of_node(core, id, key, Some(own.p256_public_key())).await?;
    own.replace(leaves.certificate, leaves.p256)
        .map_err(|error| Status::internal(hearth_api::chain(&error)))
}

/// Waits until this node has a valid leaf: with another one, nobody would use this curator.
pub async fn begin_own(core: &Core, own: &OwnCertificate) {
    let mut changes = own.changes();
    while tls::now(&core.clock) > own.not_after() {
        // `keep_own` renews it; the sender is in `own`.
        let _ = changes.changed().await;
    }
}

/// Renews the leaves of this node in time, and when they should have other names.
pub async fn keep_own(core: &Core, own: &OwnCertificate) -> Infallible {
    core.cache.loaded().await;
    let is_misnamed = || {
        let cluster = core.cluster();
        cluster.is_ok_and(|cluster| {
            let configuration = cluster.content.configuration;
            is_misnamed(&own.certificate(), own.node(), &configuration)
        })
    };
    loop {
        while !own.is_due() && !is_misnamed() {
            tokio::time::sleep(LOOK).await;
        }
        if let Err(status) = renew_own(core, own).await {
            tracing::warn!(
                "cannot renew the certificate of this node: {}",
                status.message()
            );
        }
        // The settings in memory may be older than those by which it was renewed.
        tokio::time::sleep(LOOK).await;
    }
}
