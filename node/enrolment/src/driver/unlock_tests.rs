//! A member that gets its unlock key from curators, not all of which are right.

use hearth_api::testing::{Script, TestCluster, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::StorageSecurity;
use hearth_base::testing::within_timeout;

use super::super::testing::founding;
use super::tests::{Boot, Machine};
use super::*;

/// An encrypted member whose directory has these curators, in this order.
fn member(cluster: &TestCluster, curators: &[&TestCurator]) -> Machine {
    Machine::of_member(
        &founding(1, StorageSecurity::Encrypted),
        cluster.ca(),
        curators,
    )
}

async fn curator(cluster: &Arc<TestCluster>, unlock_key: Option<ClusterUnlockKey>) -> TestCurator {
    let script = Script {
        unlock_key,
        ..Script::default()
    };
    TestCurator::start(cluster, script, wall_clock()).await
}

/// What enrolment says in the end, and what it has reported.
async fn end_of(machine: &Machine) -> (EnrolmentStatus, Vec<String>) {
    let boot: Boot = machine.boot(Ok(None));
    let end = boot
        .until(|status| match status {
            EnrolmentStatus::Refused(_) => true,
            // The credentials were never made: the data partition is open.
            EnrolmentStatus::Retrying { .. } => true,
            _ => false,
        })
        .await;
    (end, boot.off().await)
}

#[tokio::test]
async fn a_wrong_key_from_one_curator_is_not_believed_while_another_has_the_right_one() {
    let cluster = Arc::new(TestCluster::new());
    let key = founding(1, StorageSecurity::Encrypted)
        .cluster_unlock_key
        .clone();
    let wrong = curator(&cluster, Some(ClusterUnlockKey::generate())).await;
    let right = curator(&cluster, Some(key)).await;
    for order in [[&wrong, &right], [&right, &wrong]] {
        let machine = member(&cluster, &order);
        let (end, reports) = end_of(&machine).await;
        assert_eq!(reports[0], "hearth: reached storage encrypted", "{end:?}");
    }
    assert!(wrong.calls().contains(&"JoinNode"), "it was never asked");
}

/// The cluster still hears another boot of the node: the console says so once, the node asks again
/// at the pace that the curator has asked for, and is up soon after the other boot has ended.
#[tokio::test]
async fn a_node_that_has_to_wait_says_why_and_asks_again_at_a_constant_pace() {
    let cluster = Arc::new(TestCluster::new());
    let script = Script {
        ask_again: Some(Duration::from_millis(100)),
        unlock_key: Some(
            founding(1, StorageSecurity::Encrypted)
                .cluster_unlock_key
                .clone(),
        ),
        ..Script::default()
    };
    let curator = TestCurator::start(&cluster, script, wall_clock()).await;
    let machine = member(&cluster, &[&curator]);
    let boot: Boot = machine.boot(Ok(None));
    let waiting = boot
        .until(|status| matches!(status, EnrolmentStatus::Waiting { .. }))
        .await;
    let why = "the cluster to admit this boot: the cluster still hears another boot of this node";
    let expected = EnrolmentStatus::Waiting {
        reason: why.into(),
        unapproved: None,
    };
    assert_eq!(waiting, expected);
    // With a backoff, this many attempts would take minutes.
    let asked = curator.until(|seen| seen.calls.len() >= 20);
    within_timeout("20 attempts", asked).await;
    curator.set_ask_again(None);
    // It has no credentials: the data partition is open.
    boot.until(|status| matches!(status, EnrolmentStatus::Refused(_)))
        .await;
    let reports = boot.off().await;
    let first = [
        &*format!("hearth: waiting for {why}"),
        "hearth: reached storage encrypted",
    ];
    assert_eq!(reports[..2], first);
}

#[tokio::test]
async fn a_wrong_key_is_final_only_if_every_curator_has_answered() {
    let cluster = Arc::new(TestCluster::new());
    let wrong = curator(&cluster, Some(ClusterUnlockKey::generate())).await;
    let machine = member(&cluster, &[&wrong]);
    let (end, _) = end_of(&machine).await;
    let EnrolmentStatus::Refused(reason) = end else {
        panic!("{end:?}");
    };
    assert!(reason.contains("cannot authenticate"), "{reason}");

    let silent = curator(&cluster, None).await;
    let machine = member(&cluster, &[&wrong, &silent]);
    let (end, _) = end_of(&machine).await;
    let EnrolmentStatus::Retrying { reason, .. } = end else {
        panic!("{end:?}");
    };
    assert!(
        reason.contains("1 of 2 curators did not answer"),
        "{reason}"
    );
}
