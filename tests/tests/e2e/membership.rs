//! Members of consensus and of the cluster: leaving, joining and rejoining.
//!
//! Some are not run by default; `cargo xtask test e2e membership --long` runs all of them.

use anyhow::{Context, bail, ensure};
use hearth_api::console::{Milestone, Report};
use hearth_api::v1::{
    ClusterState, DeleteNodeRequest, NodeState, StorageSecurityPolicy, UpdateNodeRolesRequest, Wipe,
};
use hearth_lab::formation::shown_key;
use hearth_lab::tool;
use hearth_tests::{Cluster, Operator, Outcome, TestCtx, bounds, here, retry_unavailable};
use tonic::{Code, Status};

const ALL: [u16; 3] = [1, 2, 3];

/// Requests that a node leaves consensus, which must be rejected.
async fn may_not_leave(cluster: &mut Cluster, number: u16, why: &str) -> Outcome {
    let request = UpdateNodeRolesRequest {
        node: Some(cluster.node(number).selector()),
        consensus_member: Some(false),
        ..UpdateNodeRolesRequest::default()
    };
    let owner = cluster.owner().once();
    match retry_unavailable(|| owner.update_roles(request.clone())).await {
        Ok(_) => bail!("node-{number} was allowed to leave: {why}"),
        Err(status) => ensure!(
            status.code() == Code::FailedPrecondition,
            "expected FailedPrecondition, for {why}: {status:?}"
        ),
    }
    Ok(())
}

async fn delete(owner: &Operator, request: &DeleteNodeRequest) -> Result<(), Status> {
    retry_unavailable(|| owner.once().delete(request.clone())).await
}

/// Waits until a node does not run etcd any more.
async fn runs_no_etcd(cluster: &mut Cluster, number: u16) -> Outcome {
    let debug = cluster.node(number).debug().await?;
    let none = debug.until("no etcd", |state| {
        let mut names = state.runnables.iter().map(|runnable| &runnable.name);
        !names.any(|name| name.ends_with(".controlplane.consensus"))
    });
    none.await.map(drop)
}

/// Members leave, the leader first, while enough remain; and rejoin with new data. Everything acknowledged meanwhile is
/// kept.
#[tokio::test]
async fn members_leave_and_return_and_the_last_one_stays() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(2).await?;
    let leader = cluster.leader().await?;
    let rest = cluster.others(leader);

    cluster.set_consensus_member(leader, false).await?;
    cluster.voters_with(&rest).await?;
    runs_no_etcd(&mut cluster, leader).await?;
    writer.goes_on().await?;
    // If one of two is lost, the other one is the last.
    cluster.node(rest[1]).cut().await?;
    let cut = cluster.node(rest[1]).id().to_owned();
    cluster.node(rest[1]).comes_back().await?;
    ensure!(cluster.node(rest[1]).id() == cut, "another node");
    cluster.all_healthy().await?;

    cluster.set_consensus_member(rest[1], false).await?;
    cluster.voters_with(&rest[..1]).await?;
    may_not_leave(&mut cluster, rest[0], "it is the last voter").await?;
    writer.goes_on().await?;

    cluster.set_consensus_member(leader, true).await?;
    cluster.set_consensus_member(rest[1], true).await?;
    cluster.voters_with(&ALL).await?;
    cluster.all_healthy().await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;

    // With new data they count as before.
    cluster.node(rest[0]).cut().await?;
    cluster.led_by_another_than(rest[0]).await?;
    let writer = cluster.writer(leader).await?;
    may_not_leave(&mut cluster, leader, "one of two living would be left").await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// A learner that never starts is not promoted, however long the wait, and is removed when the role is.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_learner_that_never_starts_votes_never() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    cluster.add_nodes(&[2]).await?;
    cluster.all_healthy().await?;
    cluster.node(2).cut().await?;

    cluster.set_consensus_member(2, true).await?;
    cluster
        .until("a learner", bounds::SETTLED, |cluster_status| {
            let members = &cluster_status.consensus.members;
            members
                .iter()
                .any(|member| member.learner && !member.started)
        })
        .await?;
    // The node's own curator continues, with the only vote.
    let writer = cluster.writer(1).await?;
    writer.goes_on().await?;
    let cluster_status = cluster.cluster_status().await?;
    let voters = cluster_status
        .consensus
        .members
        .iter()
        .filter(|m| !m.learner);
    ensure!(voters.count() == 1, "{cluster_status:#?}");

    cluster.set_consensus_member(2, false).await?;
    cluster.voters_with(&[1]).await?;
    // And the machine restarts as what it was.
    cluster.node(2).comes_back().await?;
    cluster.all_healthy().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The node that carries out a change of roles loses its power during it: another one completes the change.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_change_outlives_the_leader_that_began_it() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    let leader = cluster.leader().await?;
    let rest = cluster.others(leader);
    cluster.set_consensus_member(rest[1], false).await?;
    cluster.node(leader).cut().await?;
    // One or two of the two running ones are voters, depending on the progress. With the former leader back it is
    // complete either way.
    cluster.node(leader).comes_back().await?;
    let mut wanted = vec![leader, rest[0]];
    wanted.sort_unstable();
    cluster.voters_with(&wanted).await?;
    cluster.all_healthy().await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// A node is decommissioned and deleted: it leaves consensus, wipes its keys and is not admitted any more. With a wipe
/// token its machine registers again, as another node.
#[tokio::test]
async fn a_node_that_is_taken_out_forgets_its_keys_and_may_begin_anew() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    let former = cluster.node(3).id().to_owned();
    let selector = cluster.node(3).selector();

    let owner = cluster.owner().once();
    retry_unavailable(|| owner.decommission(selector.clone())).await?;
    cluster
        .until("decommissioned", bounds::FORMED, |cluster_status| {
            let mut nodes = cluster_status.nodes.iter();
            nodes.any(|n| n.id == former && n.state() == NodeState::Decommissioned)
        })
        .await?;
    cluster.voters_with(&[1, 2]).await?;
    cluster
        .wait_cluster_state(3, ClusterState::Disowning)
        .await?;
    runs_no_etcd(&mut cluster, 3).await?;
    let request = DeleteNodeRequest {
        node: Some(selector.clone()),
        ..DeleteNodeRequest::default()
    };
    delete(cluster.owner(), &request).await?;
    let cluster_status = cluster.cluster_status().await?;
    ensure!(
        !cluster_status.nodes.iter().any(|n| n.id == former),
        "{cluster_status:#?}"
    );

    // Permanently: a reboot changes nothing, and the message says how to start over.
    cluster.node(3).cut().await?;
    cluster.node(3).start().await?;
    let why = cluster.node(3).vm()?.waiting().await?;
    ensure!(why.contains(&former), "{why}");
    let (_, enrolment) = why
        .split_once("wipe.enrolment_id = ")
        .context(why.clone())?;
    let enrolment_id = hex::decode(enrolment.get(..32).context(why.clone())?)?;
    cluster
        .wait_cluster_state(3, ClusterState::Disowning)
        .await?;
    cluster.node(3).cut().await?;

    let mut parameters = cluster.owner().register_parameters().await?;
    parameters.wipe = Some(Wipe { enrolment_id });
    cluster.node(3).node.tell(&parameters);
    cluster.node(3).start().await?;
    cluster.approve(3).await?;
    ensure!(cluster.node(3).id() != former, "the same node");
    cluster.node(3).home().await?;
    cluster.set_consensus_member(3, true).await?;
    cluster.voters_with(&ALL).await?;
    cluster.all_healthy().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// A node is deleted while it is UP and connected: it is disconnected, gets the order, and is removed from consensus.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_node_that_is_deleted_alive_is_cut_off() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let selector = cluster.node(3).selector();
    let refused = |answer: Result<(), Status>| match answer {
        Ok(_) => bail!("a node that is UP was deleted without an error"),
        Err(status) => {
            ensure!(status.code() == Code::FailedPrecondition, "{status:?}");
            Ok(())
        }
    };
    let mut request = DeleteNodeRequest {
        node: Some(selector),
        ..DeleteNodeRequest::default()
    };
    refused(delete(cluster.owner(), &request).await)?;
    request.bypass_not_decommissioned = true;
    refused(delete(cluster.owner(), &request).await)?;
    request.bypass_has_roles = true;
    delete(cluster.owner(), &request).await?;
    cluster
        .wait_cluster_state(3, ClusterState::Disowning)
        .await?;
    cluster.voters_with(&[1, 2]).await?;
    let writer = cluster.writer(1).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// A machine that is reset destroys what it has, and registers as another node with the parameters that it still has.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_machine_that_is_reset_registers_as_another_node() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 2, |_, plan| {
        Ok(plan.configured(|configuration| {
            let policy = StorageSecurityPolicy::NeedsEncryption;
            configuration.set_storage_security_policy(policy);
        }))
    })
    .await?;
    cluster.add_nodes(&[2]).await?;
    let former = cluster.node(2).id().to_owned();
    let hearthctl = cluster.hearthctl(&test).await?;
    tool::run(&hearthctl.call(["node", "reset", &former])).await?;
    // The second boot destroys the data, and the third one starts a new enrolment.
    let vm = cluster.node(2).vm()?;
    let (mut boot, mut key) = (0, None);
    vm.wait_for_report("a key in the third boot", bounds::HOME, |report| {
        match report {
            Report::Reached(Milestone::Kernel, _) => boot += 1,
            Report::Waiting(what) if boot == 3 => key = shown_key(what),
            _ => {}
        }
        key.is_some()
    })
    .await?;
    let key = key.context("no key")?;
    let owner = cluster.owner().once().clone();
    retry_unavailable(|| owner.approve(key.clone())).await?;
    cluster.node(2).vm()?.home_in_boot(3).await?;
    let known = cluster.cluster_status().await?.nodes;
    let ids: Vec<_> = known.iter().map(|node| node.id.as_str()).collect();
    ensure!(ids.len() == 2 && !ids.contains(&&*former), "{ids:?}");
    test.passed()
}
