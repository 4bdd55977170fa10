//! Mesh keys and pod ranges of workers.

use std::collections::BTreeSet;

use futures::future::join_all;
use hearth_api::identity::{MeshKey, MeshSecret, NodeCredentials, NodeId};
use hearth_api::v1::node_roles::KubernetesWorker;
use hearth_api::v1::{
    ClusterNetworking, NodeRoles, NodeState, UpdateNodeClusterNetworkingRequest, WatchRequest,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::state::{self, FullRecord};
use hearth_consensus::fenced::{Condition, Write};
use tonic::{Code, Status};

use super::super::testing::{World, id_of, quick};
use super::machine::{by_id, delete};

async fn set_worker(world: &World, id: NodeId, held: bool) {
    let key = state::node_key(id);
    let record = world.client().get(&key).await.unwrap().unwrap();
    let mut full = FullRecord::decode(&key, &record.value).unwrap();
    full.node.roles = NodeRoles {
        kubernetes_worker: held.then(KubernetesWorker::default),
        ..full.node.roles
    };
    let write = Write::when(Condition::Unchanged(key.clone(), record.mod_revision));
    let write = write.put(key, full.encode().to_vec());
    world.client().write(write).await.unwrap();
}

async fn worker(world: &World) -> NodeCredentials {
    let node = world.add_node(NodeState::Up).await;
    set_worker(world, id_of(&node), true).await;
    node
}

async fn ask_as(
    world: &World,
    node: &NodeCredentials,
    node_id: &str,
    key: &[u8],
) -> Result<ClusterNetworking, Status> {
    let request = UpdateNodeClusterNetworkingRequest {
        node_id: node_id.into(),
        wireguard_public_key: key.to_vec(),
    };
    let mut curator = world.curator(node);
    let call = curator.update_node_cluster_networking(request);
    let answer = within_timeout("UpdateNodeClusterNetworking", call).await?;
    Ok(answer.into_inner().networking.unwrap())
}

async fn ask(
    world: &World,
    node: &NodeCredentials,
    key: &MeshKey,
) -> Result<ClusterNetworking, Status> {
    ask_as(world, node, &id_of(node).to_string(), key.as_bytes()).await
}

fn key() -> MeshKey {
    MeshSecret::generate().public()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_gets_a_range_and_keeps_it() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let id = id_of(&node).to_string();
    let first = key();
    let refused = ask(&world, &node, &first).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("not a Kubernetes worker"),
        "{refused}"
    );

    let mut curator = world.curator(&world.node);
    let request = WatchRequest {
        node_id: id.clone(),
    };
    let mut events = curator.watch(request).await.unwrap().into_inner();
    set_worker(&world, id_of(&node), true).await;
    let networking = ask(&world, &node, &first).await.unwrap();
    assert_eq!(networking.pod_range, "10.208.0.0/24");
    assert_eq!(networking.wireguard_public_key, first.as_bytes());
    assert_eq!(ask(&world, &node, &first).await.unwrap(), networking);
    // Watchers see it.
    within_timeout("it is watched", async {
        loop {
            let event = events.message().await.unwrap().unwrap();
            if event
                .nodes
                .iter()
                .any(|n| n.networking.as_ref() == Some(&networking))
            {
                return;
            }
        }
    })
    .await;

    // Another key: the old one is free for another node.
    let second = key();
    let changed = ask(&world, &node, &second).await.unwrap();
    assert_eq!(changed.pod_range, networking.pod_range);
    let other = worker(&world).await;
    let refused = ask(&world, &other, &second).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(refused.message().contains(&id), "{refused}");
    let of_other = ask(&world, &other, &first).await.unwrap();
    assert_eq!(of_other.pod_range, "10.208.1.0/24");

    // Without the role it cannot be requested, but is kept; it is deleted with the node.
    set_worker(&world, id_of(&node), false).await;
    assert!(ask(&world, &node, &second).await.is_err());
    let nodes = world.nodes().await;
    let shown = nodes.iter().find(|node| node.id == id).unwrap();
    assert_eq!(shown.networking, Some(changed));
    delete(&world, by_id(&id), true).await.unwrap();
    let third = worker(&world).await;
    let of_third = ask(&world, &third, &second).await.unwrap();
    assert_eq!(of_third.pod_range, "10.208.0.0/24");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_that_ask_at_once_get_ranges_of_their_own() {
    let world = World::new(quick()).await;
    let mut nodes = Vec::new();
    for _ in 0..8 {
        nodes.push(worker(&world).await);
    }
    let keys: Vec<_> = nodes.iter().map(|_| key()).collect();
    let asked = nodes
        .iter()
        .zip(&keys)
        .map(|(node, key)| ask(&world, node, key));
    // One of them asks twice.
    let twice = ask(&world, &nodes[0], &keys[0]);
    let (answers, twice) = tokio::join!(join_all(asked), twice);
    let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
    assert_eq!(twice.unwrap(), answers[0]);
    let ranges: BTreeSet<_> = answers.iter().map(|a| a.pod_range.clone()).collect();
    let lowest = (0..8).map(|number| format!("10.208.{number}.0/24"));
    assert_eq!(ranges, lowest.collect());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_is_judged() {
    let world = World::new(quick()).await;
    let node = worker(&world).await;
    let id = id_of(&node).to_string();
    let good = key();
    let other = world.site.node_id.to_string();
    for (node_id, key, code, said) in [
        ("", &good.as_bytes()[..], Code::InvalidArgument, "node_id"),
        (&other, good.as_bytes(), Code::PermissionDenied, "its own"),
        (&id, &[], Code::InvalidArgument, "wireguard_public_key"),
        (&id, &[9; 31], Code::InvalidArgument, "wireguard_public_key"),
        (
            &id,
            &[9; 4096],
            Code::InvalidArgument,
            "wireguard_public_key",
        ),
        (&id, &[0; 32], Code::InvalidArgument, "wireguard_public_key"),
        (
            &id,
            &[0xff; 32],
            Code::InvalidArgument,
            "wireguard_public_key",
        ),
    ] {
        let refused = ask_as(&world, &node, node_id, key).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.message().contains(said), "{said}: {refused}");
    }
    assert!(
        world
            .nodes()
            .await
            .iter()
            .all(|node| node.networking.is_none())
    );
    world.stop().await;
}
