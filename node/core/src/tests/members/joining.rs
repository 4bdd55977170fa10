use std::sync::atomic::{AtomicUsize, Ordering};

use hearth_api::v1::{Label, UpdateNodeLabelsRequest};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_are_made_members_at_once_become_voters_one_after_the_other() {
    let cluster = Cluster::new(3, quick()).await;
    cluster.becomes(&[0]).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    // Each of them runs a curator, and all agree on one leader.
    let leader = cluster.leader(&[0, 1, 2]).await;
    for number in 0..3 {
        within_timeout("a curator", async {
            while cluster.leader_by(number).await != Some(leader) {
                tokio::time::sleep(LOOK).await;
            }
        })
        .await;
    }

    // The leader leaves: the next leader completes its removal.
    cluster.set_member(leader, false).await.unwrap();
    let stay: Vec<_> = (0..3).filter(|number| *number != leader).collect();
    cluster.becomes(&stay).await;
    let left = &cluster.nodes[leader];
    within_timeout("nothing of etcd is left", async {
        while !left.is_blank() || !left.site.etcd_pids().is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    // It joins again, as a new member.
    cluster.set_member(leader, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_learner_that_never_starts_is_not_promoted_and_can_be_removed() {
    let timing = Timing {
        learner: Duration::from_secs(4),
        ..quick()
    };
    let mut cluster = Cluster::new(3, timing).await;
    cluster.becomes(&[0]).await;
    cluster.stop(1).await;
    cluster.set_member(1, true).await.unwrap();
    let attempt = |status: &GetConsensusStatusResponse| {
        let learner = status.members.iter().find(|m| m.learner);
        assert!(status.members.iter().all(|m| m.learner || m.started));
        learner.map(|m| (m.member_id, m.started))
    };
    // The join is retried, as a new member each time.
    let mut seen = BTreeSet::new();
    within_timeout("a second attempt", async {
        while seen.len() < 2 {
            if let Some((member, started)) = attempt(&cluster.status().await) {
                assert!(!started);
                seen.insert(member);
            }
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    // Nodes that can join do not wait for it indefinitely.
    cluster.set_member(2, true).await.unwrap();
    within_timeout("the other one votes", async {
        loop {
            let status = cluster.status().await;
            let id = cluster.nodes[2].id().to_string();
            if status.members.iter().any(|m| m.node_id == id && !m.learner) {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    cluster.set_member(1, false).await.unwrap();
    cluster.becomes(&[0, 2]).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_needed_does_not_leave() {
    let mut cluster = Cluster::new(3, quick()).await;
    let refused = cluster.set_member(0, false).await.unwrap_err();
    assert!(
        refused.message().contains("last voting member"),
        "{refused}"
    );
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;

    // One is dead: neither of the others can be removed, only the dead one.
    cluster.cut_power(2).await;
    let dead = cluster.nodes[2].id().to_string();
    within_timeout("a refusal", async {
        loop {
            // No removal is requested until the node is known to be dead.
            let nodes = cluster.records().await;
            let health = nodes.iter().find(|node| node.id == dead).unwrap().health();
            if health != NodeHealth::Healthy {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    let refused = cluster.set_member(1, false).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains(&dead), "{refused}");
    cluster.set_member(2, false).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    // It reconnects to a cluster of which it is not a consensus member any more.
    cluster.boot(2);
    let left = &cluster.nodes[2];
    within_timeout("nothing of etcd is left", async {
        while !left.is_blank() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;

    // Each of two can be removed, but not both.
    let (first, second) = tokio::join!(cluster.set_member(0, false), cluster.set_member(1, false));
    assert_ne!(first.is_ok(), second.is_ok(), "{first:?} {second:?}");
    let (stays, refused) = match first {
        Ok(()) => (1, second.unwrap_err()),
        Err(refused) => (0, refused),
    };
    assert!(
        refused.message().contains("last voting member"),
        "{refused}"
    );
    cluster.becomes(&[stays]).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_neighbour_keeps_nobody_from_leaving() {
    let cluster = Cluster::new(2, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.becomes(&[0, 1]).await;

    // The record of the one that stays changes all the time.
    let mut labels = JoinSet::new();
    let written = Arc::new(AtomicUsize::new(0));
    for writer in 0..4 {
        let mut client = ManagementClient::new(cluster.channel(cluster.endpoints()));
        let (node, written) = (Some(cluster.selector(0)), written.clone());
        labels.spawn(async move {
            for value in 0.. {
                let label = Label {
                    key: format!("writer-{writer}"),
                    value: format!("{value}"),
                };
                let request = UpdateNodeLabelsRequest {
                    node: node.clone(),
                    upsert: vec![label],
                    ..Default::default()
                };
                if client.update_node_labels(request).await.is_ok() {
                    written.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    within_timeout("labels", async {
        while written.load(Ordering::Relaxed) < 20 {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;

    // A request about roles does not fail because of the concurrent label changes.
    within_timeout("an answer about roles", async {
        while let Err(status) = cluster.ask_for_member(1, false).await {
            let held_up = status.message().contains("keep changing");
            assert!(passing(&status) && !held_up, "{status}");
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    labels.shutdown().await;
    cluster.becomes(&[0]).await;
    cluster.end().await;
}
