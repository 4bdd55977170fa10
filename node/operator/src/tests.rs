use std::sync::Arc;

use hearth_api::testing::{Script, TestCluster, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::{ClusterDirectory, NodeState, cluster_directory};

use super::*;

fn script(key: &OwnerKey, secret: &FirstContactSecret) -> Script {
    Script {
        owner: Some(key.public()),
        first_contact_secret: Some(secret.clone()),
        register_ticket: vec![7; 32],
        nodes: vec![v1::Node {
            id: "hearth-1".into(),
            public_key: vec![1; 32],
            state: NodeState::New.into(),
            ..v1::Node::default()
        }],
        ..Script::default()
    }
}

#[tokio::test]
async fn an_owner_takes_a_cluster_and_lets_a_node_in() {
    let cluster = Arc::new(TestCluster::new());
    let (key, secret) = (OwnerKey::generate(), FirstContactSecret::generate());
    let mut script = script(&key, &secret);
    script.directory = ClusterDirectory {
        nodes: vec![cluster_directory::Node::default()],
    };
    let curator = TestCurator::start(&cluster, script, wall_clock()).await;
    // Nothing listens at the first of them.
    let curators = vec![([127, 0, 0, 1], 1).into(), curator.address];
    let curators: Vec<Endpoint> = curators.into_iter().map(Endpoint::from).collect();
    let taken = Operator::take_ownership(&key, &secret, curators, Options::default()).await;
    let (operator, leaf) = taken.expect("ownership");
    assert_eq!(leaf.identity.cluster, cluster.id);

    let approved = operator.approve(vec![1; 32]).await.expect("approved");
    assert_eq!(approved.state(), NodeState::Standby);
    let cluster_status = operator.cluster_status().await.expect("a standing");
    assert_eq!(cluster_status.nodes, [approved]);
    let parameters = operator.register_parameters().await.expect("parameters");
    let Some(node_parameters::Cluster::ClusterRegister(register)) = parameters.cluster else {
        panic!("{parameters:?}");
    };
    assert_eq!(register.register_ticket, [7; 32]);
    assert_eq!(register.ca_certificate, cluster.ca().to_vec());
}

#[tokio::test]
async fn a_cluster_that_has_not_said_where_it_is_takes_nobody_in() {
    let cluster = Arc::new(TestCluster::new());
    let (key, secret) = (OwnerKey::generate(), FirstContactSecret::generate());
    let curator = TestCurator::start(&cluster, script(&key, &secret), wall_clock()).await;
    let curators = vec![curator.endpoint()];
    let taken = Operator::take_ownership(&key, &secret, curators, Options::default()).await;
    let (operator, _) = taken.expect("ownership");
    let error = operator.register_parameters().await.expect_err("nobody");
    assert_eq!(error.code(), tonic::Code::Unavailable);
}

#[tokio::test]
async fn who_proves_nothing_gets_no_owner() {
    let cluster = Arc::new(TestCluster::new());
    let (key, secret) = (OwnerKey::generate(), FirstContactSecret::generate());
    let curator = TestCurator::start(&cluster, script(&key, &secret), wall_clock()).await;
    let other = FirstContactSecret::generate();
    let taken = |curators| Operator::take_ownership(&key, &other, curators, Options::default());
    let error = taken(vec![curator.endpoint()])
        .await
        .err()
        .expect("unproven");
    assert!(
        matches!(
            error,
            OwnershipError::FirstContact(FirstContactError::Unproven { .. })
        ),
        "{error}"
    );
    let error = taken(Vec::new()).await.err().expect("nobody");
    assert!(matches!(error, OwnershipError::NoCurator), "{error}");
}

#[test]
fn a_founder_is_told_who_owns_its_cluster() {
    let (key, secret) = (OwnerKey::generate(), FirstContactSecret::generate());
    let configuration = v1::ClusterConfiguration {
        cluster_domain: "example".into(),
        ..v1::ClusterConfiguration::default()
    };
    let bootstrap = cluster_bootstrap(&key.public(), &secret, configuration.clone());
    let told = parameters(node_parameters::Cluster::ClusterBootstrap(bootstrap));
    let Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)) = told.cluster else {
        panic!("{told:?}");
    };
    assert_eq!(bootstrap.owner_public_key, key.public().as_bytes());
    assert_eq!(bootstrap.first_contact_secret, secret.expose());
    assert_eq!(bootstrap.initial_cluster_configuration, Some(configuration));
}
