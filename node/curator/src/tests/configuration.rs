//! The settings of the cluster: read with their version, changed at that version.

use hearth_api::recovery::UnlockSettings;
use hearth_api::v1::join_node_response::Answer;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterConfiguration, ColdStartPolicy, ConfigureClusterRequest, ConfigureClusterResponse,
    GetClusterInfoRequest, KubernetesConfiguration, NodeRoles, NodeState, node_roles,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::state::{self, FullCluster};
use tonic::{Code, Status};

use super::super::testing::{Pulse, Who, World, quick};
use super::machine::Machine;

const LABELS: &str = "kubernetes.synchronized_labels";

/// The configuration and its version, as operators read them.
async fn read(world: &World) -> (ClusterConfiguration, u64) {
    let mut management = world.management().await;
    let call = management.get_cluster_info(GetClusterInfoRequest {});
    let info = within_timeout("info", call).await.unwrap().into_inner();
    (info.configuration.unwrap(), info.configuration_version)
}

async fn configure(
    world: &World,
    request: ConfigureClusterRequest,
) -> Result<ConfigureClusterResponse, Status> {
    let mut management = world.management().await;
    let call = management.configure_cluster(request);
    Ok(within_timeout("configure", call).await?.into_inner())
}

fn labels(version: u64, patterns: &[&str]) -> ConfigureClusterRequest {
    ConfigureClusterRequest {
        version,
        configuration: Some(ClusterConfiguration {
            kubernetes: Some(KubernetesConfiguration {
                synchronized_labels: patterns.iter().map(|&p| p.to_owned()).collect(),
                ..KubernetesConfiguration::default()
            }),
            ..ClusterConfiguration::default()
        }),
        field_mask: vec![LABELS.into()],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_workers_are_told_the_passwords_for_registries() {
    const CREDENTIALS: &str = "kubernetes.registry_credentials";
    let world = World::new(quick()).await;
    let (_, version) = read(&world).await;
    let of = |version, credential: &str| ConfigureClusterRequest {
        version,
        configuration: Some(ClusterConfiguration {
            kubernetes: Some(KubernetesConfiguration {
                registry_credentials: vec![credential.to_owned()],
                ..KubernetesConfiguration::default()
            }),
            ..ClusterConfiguration::default()
        }),
        field_mask: vec![CREDENTIALS.into()],
    };
    let shown = |configuration: Option<ClusterConfiguration>| {
        let kubernetes = configuration.unwrap().kubernetes.unwrap();
        kubernetes.registry_credentials.concat()
    };
    let (full, hidden) = ("a.example=anna:secret", "a.example=anna:REDACTED");
    let answer = configure(&world, of(version, full)).await.unwrap();
    assert_eq!(shown(answer.configuration), hidden);
    let (configuration, version) = read(&world).await;
    assert_eq!(shown(Some(configuration)), hidden);
    // What was read can be written.
    configure(&world, of(version, hidden)).await.unwrap();
    let node = world.add_node(NodeState::Up).await;
    let read_by_node = async || {
        let mut management = ManagementClient::new(world.channel(&Who::Node(&node)));
        let call = management.get_cluster_info(GetClusterInfoRequest {});
        let info = within_timeout("info", call).await.unwrap().into_inner();
        shown(info.configuration)
    };
    assert_eq!(read_by_node().await, hidden);
    let worker = NodeRoles {
        kubernetes_worker: Some(node_roles::KubernetesWorker {}),
        ..NodeRoles::default()
    };
    world.set_roles(&node, worker).await;
    assert_eq!(read_by_node().await, full);
    let unknown = configure(&world, of(version, "b.example=anna:REDACTED")).await;
    assert_eq!(unknown.unwrap_err().code(), Code::InvalidArgument);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_mask_changes_and_nothing_else() {
    let world = World::new(quick()).await;
    let stored = || async {
        let record = world.client().get(state::CLUSTER).await.unwrap().unwrap();
        let cluster = FullCluster::decode(state::CLUSTER, &record.value).unwrap();
        (record, cluster)
    };
    let (before, cluster) = stored().await;
    let old = cluster.configuration();
    let (shown, mut version) = read(&world).await;
    // What was never set has its default.
    assert_eq!(shown, state::definite(old.clone()));
    assert_ne!(shown, old);

    for patterns in [&["rack", "topology.example/*"][..], &[]] {
        let mut request = labels(version, patterns);
        let values = request.configuration.as_mut().unwrap();
        values.cluster_domain = "ignored.example".into();
        let mut expected = shown.clone();
        let kubernetes = expected.kubernetes.get_or_insert_default();
        kubernetes.synchronized_labels = patterns.iter().map(|&p| p.to_owned()).collect();
        let answer = configure(&world, request.clone()).await.unwrap();
        assert_eq!(answer.configuration.as_ref(), Some(&expected));
        assert_ne!(answer.version, version);
        assert_eq!(read(&world).await, (expected, answer.version));
        let (written, cluster) = stored().await;
        // Everything else is unchanged, byte for byte.
        assert_eq!(cluster.encode_with(old.clone())[..], before.value[..]);
        // A caller that has lost the answer gets it again, and nothing is written.
        assert_eq!(configure(&world, request).await.unwrap(), answer);
        assert_eq!(stored().await.0.mod_revision, written.mod_revision);
        version = answer.version;
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_will_not_do_is_refused_and_changes_nothing() {
    let world = World::new(quick()).await;
    let (shown, version) = read(&world).await;
    let masked = |paths: &[&str]| ConfigureClusterRequest {
        field_mask: paths.iter().map(|&path| path.to_owned()).collect(),
        ..labels(version, &["rack"])
    };
    let many: Vec<_> = (0..65).map(|n| format!("k{n}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let without_values = ConfigureClusterRequest {
        configuration: None,
        ..labels(version, &[])
    };
    let mut other_domain = masked(&[LABELS, "cluster_domain"]);
    other_domain.configuration.as_mut().unwrap().cluster_domain = "other.internal".into();
    for (request, code, parts) in [
        (
            ConfigureClusterRequest::default(),
            Code::InvalidArgument,
            &["field_mask: expected"][..],
        ),
        (without_values, Code::InvalidArgument, &["configuration:"]),
        (
            labels(0, &["rack"]),
            Code::InvalidArgument,
            &["version: expected"],
        ),
        (
            masked(&[LABELS, "kubernetes"]),
            Code::InvalidArgument,
            &["field_mask[1]: expected one of cluster_domain, ", LABELS],
        ),
        (
            labels(version, &["rack", "a*b"]),
            Code::InvalidArgument,
            &["kubernetes.synchronized_labels[1]: expected", "\"a*b\""],
        ),
        (
            labels(version, &many),
            Code::InvalidArgument,
            &["kubernetes.synchronized_labels: expected at most 64"],
        ),
        (
            other_domain,
            Code::FailedPrecondition,
            &["cluster_domain: expected cluster.internal, got other.internal: it is fixed"],
        ),
        (
            labels(version + 1000, &["rack"]),
            Code::Aborted,
            &["version: expected", "read it again"],
        ),
    ] {
        let refused = configure(&world, request).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        for part in parts {
            assert!(refused.message().contains(part), "{refused}");
        }
    }
    // A fixed setting may be in the mask with the value that it has, or with none if that is the
    // default.
    let unchanged = configure(&world, masked(&["cluster_domain"]))
        .await
        .unwrap();
    assert_eq!(unchanged.version, version);
    assert_eq!(read(&world).await, (shown, version));

    let node = world.add_node(NodeState::Up).await;
    let mut management = ManagementClient::new(world.channel(&Who::Node(&node)));
    let call = management.configure_cluster(labels(version, &["rack"]));
    let refused = within_timeout("configure", call).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_told_that_the_cold_start_policy_has_changed() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    let node = machine.becomes_a_node(&world).await;
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    let mut settings = UnlockSettings {
        cold_start_policy: ColdStartPolicy::None,
        recovery_recipient: world.data.seed.recovery_recipient,
        owner: Some(world.data.seed.owner),
    };
    let told = pulse.beat().await.unwrap().unlock_settings;
    assert_eq!(told, settings.digest());

    let (mut shown, version) = read(&world).await;
    shown.set_cold_start_policy(ColdStartPolicy::Owner);
    let request = ConfigureClusterRequest {
        version,
        configuration: Some(shown.clone()),
        field_mask: vec!["cold_start_policy".into()],
    };
    configure(&world, request).await.unwrap();
    settings.cold_start_policy = ColdStartPolicy::Owner;
    within_timeout("the new settings", async {
        while pulse.beat().await.unwrap().unlock_settings != settings.digest() {}
    })
    .await;
    let Some(Answer::Admitted(admitted)) = machine.join(&world).await.unwrap().answer else {
        panic!("not admitted");
    };
    assert_eq!(admitted.cold_start_policy(), ColdStartPolicy::Owner);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_who_configure_at_once_one_is_told_to_read_again() {
    let world = World::new(quick()).await;
    for round in 0..10 {
        let (_, version) = read(&world).await;
        let (a, b) = (format!("a{round}"), format!("b{round}"));
        let (one, two) = tokio::join!(
            configure(&world, labels(version, &[&a])),
            configure(&world, labels(version, &[&b])),
        );
        let (won, refused) = match (one, two) {
            (Ok(_), Err(refused)) => (a, refused),
            (Err(refused), Ok(_)) => (b, refused),
            other => panic!("expected one to succeed, got {other:?}"),
        };
        assert_eq!(refused.code(), Code::Aborted, "{refused}");
        let patterns = read(&world).await.0.kubernetes.unwrap();
        assert_eq!(patterns.synchronized_labels, [won]);
    }
    world.stop().await;
}
