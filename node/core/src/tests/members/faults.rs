use hearth_consensus::fenced::WriteError;
use hearth_consensus::testing::compact;

use super::*;

/// A cluster of four nodes, three of them voters.
async fn three_of_four() -> Cluster {
    let cluster = Cluster::new(4, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_dies_in_the_middle_of_a_role_change_is_continued_by_the_next() {
    let mut cluster = three_of_four().await;
    // The delays are spread over the steps of a change.
    for (round, delay) in [300, 900, 1600, 2400].into_iter().enumerate() {
        let wanted = round % 2 == 0;
        let leader = cluster.leader(&[0, 1, 2]).await;
        cluster.set_member(3, wanted).await.unwrap();
        tokio::time::sleep(Duration::from_millis(delay)).await;
        cluster.cut_power(leader).await;
        let voters: &[usize] = if wanted { &[0, 1, 2, 3] } else { &[0, 1, 2] };
        // The others complete the change, unless etcd needs the dead member, because it changes
        // members only while all are connected.
        cluster.boot(leader);
        cluster.becomes(voters).await;
    }
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_cut_off_changes_nothing_and_comes_back() {
    let cluster = three_of_four().await;
    let old = cluster.leader(&[0, 1, 2]).await;
    let others: Vec<_> = (0..3).filter(|number| *number != old).collect();
    // The condition on which the old leader fences its writes.
    let candidates = cluster.etcd(old).list(state::ELECTION).await.unwrap();
    let oldest = candidates.records.iter().min_by_key(|r| r.create_revision);
    let key = oldest.unwrap().key.clone();
    let led = Condition::Created(key, oldest.unwrap().create_revision);

    cluster.network.cut_off(&[cluster.nodes[old].id()]);
    let new = cluster.leader(&others).await;
    assert_ne!(new, old);
    // A minority writes nothing.
    let isolated = cluster.etcd(old).bounded(Duration::from_secs(2));
    let write = Write::when(led.clone()).put("status/x", vec![]);
    assert!(isolated.write(write).await.is_err());
    // The majority accepts an operator's request. etcd adds no member while a voter is not
    // connected, so it is not executed yet.
    cluster.set_member(3, true).await.unwrap();

    cluster.network.cut_off(&[]);
    cluster.becomes(&[0, 1, 2, 3]).await;
    // Its late writes arrive now and are refused.
    let write = Write::when(led).put("status/x", vec![]);
    let late = within_timeout("an answer", async {
        loop {
            match cluster.etcd(old).write(write.clone()).await {
                Err(WriteError::Consensus(_)) => tokio::time::sleep(LOOK).await,
                done => return done,
            }
        }
    })
    .await;
    assert!(matches!(late, Err(WriteError::Conflict)), "{late:?}");
    cluster.end().await;
}

/// One changed bit of a member's log: its node says what to do, and comes back as a new member. At first that is up to the
/// operator. Then the cluster may do it by itself: with the founder, whose role names no member, and with the next one,
/// though not at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_with_a_damaged_log_is_replaced_by_an_operator_or_by_the_cluster() {
    let mut cluster = Cluster::new(3, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    cluster.stop(2).await;
    cluster.nodes[2].site.damage_log();
    cluster.boot(2);
    let damaged = cluster.nodes[2].boot.as_ref().unwrap();
    damaged.control.fails("etcd's log is damaged").await;
    cluster.set_member(2, false).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;

    let founder = cluster.member(0).await.unwrap();
    let next = cluster.member(1).await.unwrap();
    cluster.stop(0).await;
    cluster.nodes[0].site.damage_log();
    cluster.boot(0);
    let damaged = cluster.nodes[0].boot.as_ref().unwrap();
    damaged.control.fails("etcd's log is damaged").await;
    // It is left as it is, unless the cluster is told otherwise.
    cluster.knows_damage(0).await;
    assert_eq!(cluster.member(0).await, Some(founder));
    cluster.replaces_damaged_members().await;
    cluster.replaces(0, founder).await;
    cluster.becomes(&[0, 1, 2]).await;

    cluster.stop(1).await;
    cluster.nodes[1].site.damage_log();
    cluster.boot(1);
    cluster.knows_damage(1).await;
    assert_eq!(cluster.member(1).await, Some(next));
    cluster.ends_the_pause(2).await;
    cluster.replaces(1, next).await;
    cluster.becomes(&[0, 1, 2]).await;
    cluster.end().await;
}

/// A value that differs on one of three: nothing notices it at the start.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_whose_values_differ_leaves_the_others_in_peace() {
    const VALUE: &[u8] = b"what the store has to keep";
    let mut cluster = Cluster::new(3, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    let put = |value: &[u8]| {
        Write::when(Condition::Absent("nothing".into())).put("status/x", value.into())
    };
    cluster.etcd(0).write(put(VALUE)).await.unwrap();
    let there = async {
        while cluster.etcd(2).get("status/x").await.unwrap().is_none() {
            tokio::time::sleep(LOOK).await;
        }
    };
    within_timeout("the value", there).await;
    let damaged = cluster.member(2).await.unwrap();
    cluster.stop(2).await;
    cluster.nodes[2]
        .site
        .change_value(VALUE, b"what the disk has made of ");
    cluster.boot(2);
    let read = async {
        loop {
            match cluster.etcd(2).get("status/x").await {
                Ok(Some(found)) => return found.value,
                _ => tokio::time::sleep(LOOK).await,
            }
        }
    };
    assert_ne!(within_timeout("the value", read).await, VALUE);

    let store = cluster.nodes[0].site.store();
    let revision = store.members().status().await.unwrap().revision;
    compact(&store, revision).await;
    let control = &cluster.nodes[2].boot.as_ref().unwrap().control;
    control
        .fails("values in etcd's database are damaged: ")
        .await;
    // The others accept writes again, and operators can act.
    within_timeout("a write", async {
        while cluster.etcd(0).write(put(b"1")).await.is_err() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    // It stays off, until it is replaced.
    cluster.stop(2).await;
    cluster.boot(2);
    let control = &cluster.nodes[2].boot.as_ref().unwrap().control;
    control
        .fails("values in etcd's database are damaged: ")
        .await;
    assert_eq!(cluster.member(2).await, Some(damaged));
    cluster.replaces_damaged_members().await;
    cluster.replaces(2, damaged).await;
    cluster.becomes(&[0, 1, 2]).await;
    let found = cluster.etcd(2).get("status/x").await.unwrap().unwrap();
    assert_eq!(found.value, b"1");
    cluster.end().await;
}

/// A value that differs between two: both go on, and both say so.
#[tokio::test(flavor = "multi_thread")]
async fn where_no_majority_agrees_about_a_value_writes_go_on() {
    const VALUE: &[u8] = b"what the store has to keep";
    let mut cluster = Cluster::new(2, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    let put = |value: &[u8]| {
        Write::when(Condition::Absent("nothing".into())).put("status/x", value.into())
    };
    cluster.etcd(0).write(put(VALUE)).await.unwrap();
    let there = async {
        while cluster.etcd(1).get("status/x").await.unwrap().is_none() {
            tokio::time::sleep(LOOK).await;
        }
    };
    within_timeout("the value", there).await;
    cluster.stop(1).await;
    let site = &cluster.nodes[1].site;
    site.change_value(VALUE, b"what the disk has made of ");
    cluster.boot(1);
    cluster.becomes(&[0, 1]).await;
    let store = cluster.nodes[0].site.store();
    let revision = store.members().status().await.unwrap().revision;
    compact(&store, revision).await;
    for number in 0..2 {
        let control = &cluster.nodes[number].boot.as_ref().unwrap().control;
        let why = "etcd's members have different data, and no majority agrees";
        control.says(Severity::Error, why).await;
    }
    within_timeout("a write", async {
        while cluster.etcd(0).write(put(b"1")).await.is_err() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_carry_nothing_are_replaced() {
    let cluster = Cluster::new(3, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    cluster.network.stall();
    let put = || Write::when(Condition::Absent("nothing".into())).put("status/x", vec![]);
    // Followers hear nothing of their leader, and candidates reach nobody, except by new connections.
    within_timeout("a write", async {
        while cluster.etcd(0).write(put()).await.is_err() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_sleeps_is_replaced_and_wakes_up_as_one_of_them() {
    let cluster = three_of_four().await;
    let old = cluster.leader(&[0, 1, 2]).await;
    let others: Vec<_> = (0..3).filter(|number| *number != old).collect();
    cluster.nodes[old].site.pause_etcd().await;
    let new = cluster.leader(&others).await;
    assert_ne!(new, old);
    cluster.set_member(3, true).await.unwrap();
    cluster.nodes[old].site.signal_etcd(Signal::SIGCONT);
    cluster.becomes(&[0, 1, 2, 3]).await;
    // All curators agree on one leader.
    within_timeout("one leader for all", async {
        loop {
            let mut seen = BTreeSet::new();
            for number in 0..4 {
                seen.insert(cluster.leader_by(number).await);
            }
            if seen.len() == 1 && !seen.contains(&None) && !seen.contains(&Some(old)) {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_full_of_history_is_written_to_again_by_all() {
    static VALUE: [u8; 256 << 10] = [7; 256 << 10];
    let small = 32 << 20;
    let cluster = Cluster::with_quota(3, quick(), small).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    let put = || Write::when(Condition::Absent("nothing".into())).put("large", VALUE.into());
    // An etcd notices that it is full on a write; here only one is written to.
    let full = async {
        loop {
            match cluster.etcd(0).write(put()).await {
                Err(WriteError::Consensus(error)) if error.is_full() => return,
                done => done.map(drop).unwrap(),
            }
        }
    };
    within_timeout("a full store", full).await;
    // The databases of the others are as large; they notice it now.
    for number in 0..3 {
        within_timeout("room in the store", async {
            while cluster.etcd(number).write(put()).await.is_err() {
                tokio::time::sleep(LOOK).await;
            }
        })
        .await;
    }
    let status = cluster.status().await;
    assert!(status.members.iter().all(|member| member.alarms.is_empty()));
    let large = cluster.etcd(2).get("large").await.unwrap().unwrap();
    assert_eq!(large.value, VALUE);
    // Curators can write again, too.
    cluster.set_member(2, false).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    cluster.end().await;
}
