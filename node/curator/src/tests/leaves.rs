//! Certificates of nodes and of the owner: their lifetime, and their renewal.

use std::time::Duration;

use hearth_api::certificates::Leaf;
use hearth_api::hosts::Host;
use hearth_api::identity::{NodeCredentials, P256Key, SigningKey};
use hearth_api::testing::{TestClock, at};
use hearth_api::tls::{self, Clock, wall_clock};
use hearth_api::v1::aaa_client::AaaClient;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::{
    ClusterConfiguration, ConfigureClusterRequest, EscrowRequest, GetClusterInfoRequest, NodeRoles,
    NodeState, RenewCertificatesRequest, RenewCertificatesResponse, node_roles,
};
use hearth_host::handover::{TimeProblem, TimeStatus};
use hearth_host::pki;
use tonic::{Code, Status};

use super::super::leaves;
use super::super::testing::{Who, World, id_of, quick};

const DAY: u64 = 24 * 3600;

fn now() -> u64 {
    tls::now(&wall_clock()).as_secs()
}

async fn renew(
    world: &World,
    who: &Who<'_>,
    p256: Option<&P256Key>,
) -> Result<RenewCertificatesResponse, Status> {
    let request = RenewCertificatesRequest {
        p256_public_key: p256
            .map(|key| key.public().as_bytes().to_vec())
            .unwrap_or_default(),
        proof: None,
    };
    let mut curator = CuratorClient::new(world.channel(who));
    Ok(curator.renew_certificates(request).await?.into_inner())
}

/// The content of a leaf of this node that is valid now.
fn leaf_of(world: &World, node: &NodeCredentials, der: &[u8]) -> Leaf {
    let leaf = world.ca().verify(der, at(now())).unwrap();
    assert_eq!(leaf.identity.node_id(), Some(id_of(node)));
    assert_eq!(leaf.public_key, node.key.public());
    leaf
}

/// Whether a leaf that was issued at most two minutes ago is valid for this many days.
fn is_for_days(leaf: &Leaf, days: u64) -> bool {
    let end = now() + days * DAY;
    (end - 120..=end).contains(&leaf.not_after.as_secs())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_renews_its_certificates_also_when_they_have_expired() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let p256 = P256Key::generate();
    let renewed = renew(&world, &Who::Node(&node), Some(&p256)).await.unwrap();
    assert!(is_for_days(
        &leaf_of(&world, &node, &renewed.certificate),
        7
    ));
    assert!(is_for_days(
        &leaf_of(&world, &node, &renewed.p256_certificate),
        7
    ));
    // A node whose leaf has expired presents a self-signed certificate of its key.
    let holder = Who::HolderOf(&node.key);
    let renewed = renew(&world, &holder, None).await.unwrap();
    leaf_of(&world, &node, &renewed.certificate);
    assert!(renewed.p256_certificate.is_empty());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_curator_has_the_names_and_addresses_of_the_settings() {
    let world = World::new(quick()).await;
    let (member, other) = (
        world.add_node(NodeState::Up).await,
        world.add_node(NodeState::Up).await,
    );
    let roles = NodeRoles {
        consensus_member: Some(node_roles::ConsensusMember { member_id: 7 }),
        ..NodeRoles::default()
    };
    world.set_roles(&member, roles).await;
    let mut management = world.management().await;
    let mut read = async || {
        let info = management.get_cluster_info(GetClusterInfoRequest {}).await;
        let info = info.unwrap().into_inner();
        (info.configuration.unwrap(), info.configuration_version)
    };
    let (before, version) = read().await;
    let names = ["api.example", "192.0.2.100"].map(str::to_owned).to_vec();
    let request = ConfigureClusterRequest {
        version,
        configuration: Some(ClusterConfiguration {
            certificate_names: names,
            ..ClusterConfiguration::default()
        }),
        field_mask: vec!["certificate_names".into()],
    };
    let mut configuring = world.management().await;
    configuring.configure_cluster(request).await.unwrap();
    let (now, _) = read().await;

    let leaf = renew(&world, &Who::Node(&member), None).await.unwrap();
    let found = pki::hosts(&leaf.certificate).unwrap();
    for name in ["api.example", "192.0.2.100"] {
        assert!(found.contains(&name.parse().unwrap()), "{found:?}");
    }
    let id = id_of(&member);
    assert!(!leaves::is_misnamed(&leaf.certificate, id, &now));
    assert!(leaves::is_misnamed(&leaf.certificate, id, &before));
    // Another node cannot pass for a curator.
    let leaf = renew(&world, &Who::Node(&other), None).await.unwrap();
    let found = pki::hosts(&leaf.certificate).unwrap();
    assert_eq!(found, [Host::Name(id_of(&other).to_string())]);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_gets_a_nodes_certificates() {
    let world = World::new(quick()).await;
    let (new, standby) = (
        world.add_node(NodeState::New).await,
        world.add_node(NodeState::Standby).await,
    );
    let stranger = SigningKey::generate();
    for key in [&stranger, &new.key, &standby.key] {
        let refused = renew(&world, &Who::HolderOf(key), None).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    }
    let owner = world.owner().await;
    let refused = renew(&world, &Who::User(&owner), None).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let mut curator = CuratorClient::new(world.channel(&Who::Nobody));
    let request = RenewCertificatesRequest::default();
    let refused = curator.renew_certificates(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    let node = world.add_node(NodeState::Up).await;
    let mut curator = world.curator(&node);
    let request = RenewCertificatesRequest {
        p256_public_key: vec![4; 64],
        proof: None,
    };
    let refused = curator.renew_certificates(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("p256_public_key"), "{refused}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_owner_gets_a_certificate_of_either_kind() {
    let world = World::new(quick()).await;
    let p256 = P256Key::generate();
    let request = EscrowRequest {
        identity: "owner".into(),
        p256_public_key: p256.public().as_bytes().to_vec(),
    };
    let mut aaa = AaaClient::new(world.channel(&Who::HolderOf(&world.owner_key)));
    let given = aaa.escrow(request).await.unwrap().into_inner();
    for der in [given.certificate, given.p256_certificate] {
        let leaf = world.ca().verify(&der, at(now())).unwrap();
        assert_eq!(leaf.public_key, world.owner_key.public());
        assert_eq!(
            leaf.identity.to_string(),
            format!("hearth://{}/user/owner", world.site.cluster_id)
        );
        assert!(is_for_days(&leaf, 7));
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_certificate_is_issued_while_the_clock_is_known_to_be_wrong() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let says = |problem| {
        world.time.set(TimeStatus {
            problem: Some(problem),
            ..TimeStatus::default()
        });
    };
    says(TimeProblem::Wrong("an hour ahead".into()));
    let refused = renew(&world, &Who::Node(&node), None).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(refused.message().contains("an hour ahead"), "{refused}");
    // That nobody knows the time is no reason.
    says(TimeProblem::Unknown("no answer".into()));
    renew(&world, &Who::Node(&node), None).await.unwrap();
    world.stop().await;
}

/// The clock of a cluster that was off for a year, and whose first curator starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_curator_whose_certificate_has_expired_renews_it_and_then_those_of_others() {
    let mut world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    world.stop_curator().await;
    let later = TestClock::new();
    later.set(now() + 365 * DAY);
    let clock: Clock = later;
    let (curator, ready) = world.curator_by(clock, &world.node).await;
    let port = ready.get().unwrap();
    let endpoint = std::net::SocketAddr::from(([127, 0, 0, 1], port)).into();
    let channel = world.channel_to(endpoint, &Who::HolderOf(&node.key));
    let renewed = CuratorClient::new(channel)
        .renew_certificates(RenewCertificatesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(is_for_days(
        &leaf_of(&world, &node, &renewed.certificate),
        365 + 7
    ));
    tokio::time::timeout(Duration::from_secs(30), curator.shutdown())
        .await
        .unwrap();
    world.etcd.stop().await;
}
