//! Operators' commands for nodes.

use std::net::Ipv4Addr;
use std::sync::Arc;

use hearth_api::client::Endpoint;
use hearth_api::proofs::AfterRemoval;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::{
    DecommissionNodeRequest, DecommissionNodeResponse, DeleteNodeRequest, Label, NodeSetting,
    NodeState, UpdateNodeLabelsRequest, UpdateNodeRolesRequest, UpdateNodeRolesResponse,
    UpdateNodeSettingsRequest, WatchRequest,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::decisions::labelling::Changes;
use hearth_cluster::state::{self, FullRecord, Wanted};
use hearth_consensus::fenced::EPOCH;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::super::testing::{Pulse, Who, World, quick};
use super::machine::{Machine, approve, by_id, by_key, delete, ticket};

async fn roles(
    world: &World,
    request: UpdateNodeRolesRequest,
) -> Result<UpdateNodeRolesResponse, Status> {
    let mut management = world.management().await;
    let call = management.update_node_roles(request);
    within_timeout("UpdateNodeRoles", call)
        .await
        .map(|a| a.into_inner())
}

async fn decommission(world: &World, id: &str) -> Result<DecommissionNodeResponse, Status> {
    let mut management = world.management().await;
    let request = DecommissionNodeRequest { node: by_id(id) };
    let call = management.decommission_node(request);
    within_timeout("DecommissionNode", call)
        .await
        .map(|a| a.into_inner())
}

async fn full(world: &World, machine: &Machine) -> FullRecord {
    let key = state::node_key(machine.id());
    let record = world.client().get(&key).await.unwrap().unwrap();
    FullRecord::decode(&key, &record.value).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_named_by_its_id_or_its_key() {
    let world = World::new(quick()).await;
    let stranger = Machine::new();
    for (node, code, said) in [
        (
            None,
            Code::InvalidArgument,
            "node: expected node_id or public_key",
        ),
        (by_id(""), Code::InvalidArgument, "node_id"),
        (by_id("hearth-"), Code::InvalidArgument, "node_id"),
        (by_key(&[1; 5]), Code::InvalidArgument, "node.public_key"),
        (stranger.selector(), Code::NotFound, "GetNodes"),
        (
            by_key(stranger.key.public().as_bytes()),
            Code::NotFound,
            "node.public_key",
        ),
    ] {
        let refused = approve(&world, node.clone()).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.message().contains(said), "{said}: {refused}");
        assert_eq!(
            delete(&world, node.clone(), true).await.unwrap_err().code(),
            code
        );
        let request = UpdateNodeRolesRequest {
            node: node.clone(),
            ..Default::default()
        };
        assert_eq!(roles(&world, request).await.unwrap_err().code(), code);
        let mut management = world.management().await;
        let request = UpdateNodeLabelsRequest {
            node: node.clone(),
            ..Default::default()
        };
        let refused = management.update_node_labels(request).await.unwrap_err();
        assert_eq!(refused.code(), code);
        let refused = management.decommission_node(DecommissionNodeRequest { node });
        assert_eq!(refused.await.unwrap_err().code(), code);
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_is_wanted_until_consensus_has_followed() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    let member = |wanted| UpdateNodeRolesRequest {
        node: machine.selector(),
        consensus_member: Some(wanted),
        ..Default::default()
    };
    machine
        .register(&world, &ticket(&world).await)
        .await
        .unwrap();
    let refused = roles(&world, member(true)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("is NEW: expected UP"),
        "{refused}"
    );
    machine.becomes_a_node(&world).await;

    let controller_alone = UpdateNodeRolesRequest {
        kubernetes_controller: Some(true),
        ..member(false)
    };
    let refused = roles(&world, controller_alone).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("Kubernetes controller"),
        "{refused}"
    );
    // There is no role to remove.
    let answer = roles(&world, member(false)).await.unwrap();
    assert!(!answer.pending && answer.node.is_some());

    // etcd has no peers here, so the intent stays pending.
    let intent = || async {
        let key = state::intent_key(machine.id());
        world.client().get(&key).await.unwrap()
    };
    let answer = roles(&world, member(true)).await.unwrap();
    assert!(answer.pending);
    assert!(
        answer
            .node
            .unwrap()
            .roles
            .unwrap()
            .consensus_member
            .is_none()
    );
    let first = intent().await.unwrap();
    let wanted = state::Intent::decode(&first.key, &first.value)
        .unwrap()
        .wanted;
    assert_eq!(wanted, Wanted::Join { member: None });
    assert!(roles(&world, member(true)).await.unwrap().pending);
    assert!(intent().await.unwrap().mod_revision == first.mod_revision);
    let refused = delete(&world, machine.selector(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    // It can be withdrawn.
    assert!(!roles(&world, member(false)).await.unwrap().pending);
    assert!(intent().await.is_none());

    // The last voter cannot leave, by any request.
    let own = world.site.node_id.to_string();
    let request = UpdateNodeRolesRequest {
        node: by_id(&own),
        ..member(false)
    };
    for refused in [
        roles(&world, request).await.err(),
        decommission(&world, &own).await.err(),
        delete(&world, by_id(&own), true).await.err(),
    ] {
        let refused = refused.unwrap();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    }
    world.stop().await;
}

/// A curator, and a machine that has registered.
async fn registered() -> (World, Machine) {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    machine
        .register(&world, &ticket(&world).await)
        .await
        .unwrap();
    (world, machine)
}

/// Settings are kept with the node's record, by name.
#[tokio::test(flavor = "multi_thread")]
async fn settings_of_a_node_are_set_and_taken_away() {
    let (world, machine) = registered().await;
    let setting = |name: &str, value: &str| NodeSetting {
        name: name.into(),
        value: value.into(),
    };
    let update = async |upsert: Vec<NodeSetting>, delete: &[&str]| {
        let request = UpdateNodeSettingsRequest {
            node: machine.selector(),
            upsert,
            delete: delete.iter().map(|&name| name.to_owned()).collect(),
        };
        let mut management = world.management().await;
        let call = management.update_node_settings(request);
        let answer = within_timeout("UpdateNodeSettings", call).await?;
        Ok::<_, Status>(answer.into_inner().node.unwrap().settings)
    };
    let cpu = setting("reserved.cpu", "500m");
    let swap = setting("sysctl.vm.swappiness", "10");
    let settings = update(vec![swap.clone(), cpu.clone()], &["none"]).await;
    assert_eq!(settings.unwrap(), [cpu.clone(), swap]);
    let settings = update(Vec::new(), &["sysctl.vm.swappiness"]).await;
    assert_eq!(settings.unwrap(), [cpu]);
    let refused = update(vec![setting("sysctl.kernel.panic", "1")], &[])
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let names_it = refused.message().starts_with("upsert[0].name: expected");
    assert!(names_it, "{refused}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_are_set_and_taken_away_at_once() {
    let (world, machine) = registered().await;
    let label = |key: &str, value: &str| Label {
        key: key.into(),
        value: value.into(),
    };
    let update = |upsert: Vec<Label>, delete: Vec<&str>| {
        let request = UpdateNodeLabelsRequest {
            node: machine.selector(),
            upsert,
            delete: delete.into_iter().map(Into::into).collect(),
        };
        let world = &world;
        async move {
            let mut management = world.management().await;
            let call = management.update_node_labels(request);
            let node = within_timeout("UpdateNodeLabels", call)
                .await?
                .into_inner()
                .node;
            Ok::<_, Status>(node.unwrap().labels)
        }
    };
    let labels = update(vec![label("b", "2"), label("a", "1")], vec!["rack", "none"]).await;
    assert_eq!(labels.unwrap(), [label("a", "1"), label("b", "2")]);
    let epoch = || async {
        world
            .client()
            .get(EPOCH)
            .await
            .unwrap()
            .unwrap()
            .mod_revision
    };
    let before = epoch().await;
    update(vec![label("b", "2")], vec!["rack"]).await.unwrap();
    assert_eq!(epoch().await, before, "nothing was written");

    let many: Vec<_> = (0..63).map(|n| label(&format!("k{n}"), "")).collect();
    let long = "k".repeat(64 << 10);
    for (upsert, delete, said) in [
        (vec![label("c", "")], vec!["c"], "delete[0]"),
        (
            vec![label("c", "1"), label("c", "2")],
            vec![],
            "upsert[1].key",
        ),
        (vec![label(&long, "")], vec![], "65536 bytes"),
        (vec![], vec![&long[..]], "65536 bytes"),
        (vec![label("c", &long)], vec![], "65536 bytes"),
        (vec![], vec![""], "delete[0]"),
        (many.clone(), vec![], "65 labels"),
        (vec![], vec!["x"; 65], "delete: expected at most 64"),
    ] {
        let refused = update(upsert, delete).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{said}");
        assert!(refused.message().contains(said), "{said}: {refused}");
    }
    // Removed labels do not count towards the limit.
    let labels = update(many, vec!["a"]).await.unwrap();
    assert_eq!(labels.len(), 64);
    world.stop().await;
}

/// A machine that is reset need not be decommissioned: it destroys what it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_reset_is_ordered_to_begin_anew() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    machine.becomes_a_node(&world).await;
    let request = DeleteNodeRequest {
        node: machine.selector(),
        reset: true,
        ..Default::default()
    };
    let mut management = world.management().await;
    let call = management.delete_node(request);
    within_timeout("DeleteNode", call).await.unwrap();
    let afterwards = machine.is_disowned(&world).await;
    assert_eq!(afterwards, AfterRemoval::Reset);
    world.stop().await;
}

/// Every curator ends the streams and the connection of a node that is deleted or decommissioned.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_removed_is_cut_off_everywhere() {
    let world = World::new(quick()).await;
    let (deleted, retired) = (Machine::new(), Machine::new());
    let second_node = Arc::new(Machine::new().becomes_a_node(&world).await);
    let (second, ready) = world.curator_of(&second_node).await;
    let there = Endpoint::new(Ipv4Addr::LOCALHOST.into(), ready.get().unwrap());
    let mut open = Vec::new();
    for machine in [&deleted, &retired] {
        let node = machine.becomes_a_node(&world).await;
        for endpoint in [world.endpoint(), there.clone()] {
            let channel = world.channel_to(endpoint, &Who::Node(&node));
            let mut client = CuratorClient::new(channel.clone());
            let call = client.watch(WatchRequest::default());
            let mut events = within_timeout("a watch", call).await.unwrap().into_inner();
            within_timeout("the backlog", events.message())
                .await
                .unwrap();
            // This stream is public, so it ends only with the connection.
            let mut health = HealthClient::new(channel);
            let call = health.watch(HealthCheckRequest::default());
            let mut health = within_timeout("health", call).await.unwrap().into_inner();
            within_timeout("health", health.message()).await.unwrap();
            open.push((client, events, health));
        }
        let mut pulse = Pulse::open(&world, &node).await.unwrap();
        pulse.beat().await.unwrap();
    }
    delete(&world, deleted.selector(), true).await.unwrap();
    let answer = decommission(&world, &retired.id().to_string())
        .await
        .unwrap();
    assert!(!answer.pending);
    for (client, events, health) in &mut open {
        let end = within_timeout("the end of a watch", async {
            loop {
                if let Err(status) = events.message().await {
                    return status;
                }
            }
        });
        assert_eq!(end.await.code(), Code::PermissionDenied);
        within_timeout("the end of the connection", async {
            while health.message().await.is_ok_and(|answer| answer.is_some()) {}
        })
        .await;
        // Calls on a new connection are refused; the old one may still be closing.
        within_timeout("a refusal", async {
            while client
                .watch(WatchRequest::default())
                .await
                .unwrap_err()
                .code()
                != Code::PermissionDenied
            {}
        })
        .await;
    }

    // Its unlock key is gone, and it is disowned.
    let record = full(&world, &retired).await;
    assert_eq!(record.node.state, NodeState::Decommissioned);
    assert!(record.unlock_key.is_none() && record.certificate.is_none());
    assert_eq!(retired.is_disowned(&world).await, AfterRemoval::Wait);
    let ticket = ticket(&world).await;
    let refused = retired.register(&world, &ticket).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let refused = approve(&world, retired.selector()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let again = decommission(&world, &retired.id().to_string())
        .await
        .unwrap();
    assert!(!again.pending);
    delete(&world, retired.selector(), false).await.unwrap();
    assert_eq!(retired.is_disowned(&world).await, AfterRemoval::Wait);

    // Nodes that were never UP are not decommissioned but deleted.
    let waiting = Machine::new();
    waiting.register(&world, &ticket).await.unwrap();
    let refused = decommission(&world, &waiting.id().to_string())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("delete it"), "{refused}");
    delete(&world, waiting.selector(), false).await.unwrap();
    within_timeout("the second curator stops", second.shutdown()).await;
    world.stop().await;
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_labels_are_judged_without_harm(
        upsert: Vec<(String, String)>, delete: Vec<String>,
    ) {
        let label = |(key, value)| Label { key, value };
        let _ = Changes::new(upsert.into_iter().map(label).collect(), delete);
    }
}
