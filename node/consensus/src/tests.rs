use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Instant;

use hearth_api::identity::NodeKey;
use hearth_base::logtree::{Query, Severity};
use hearth_base::testing::within_timeout;
use hearth_host::cluster_state::State;
use nix::sys::signal::Signal;

use super::fenced::{Condition, EPOCH, Write, WriteError};
use super::testing::Site;
use super::*;

fn put_new(key: &str, value: &str) -> Write {
    Write::when(Condition::Absent(key.into())).put(key, value.into())
}

/// What the node does once a bootstrap is acknowledged.
fn acknowledge(site: &Site) {
    fs::write(site.root.data.node().credentials().certificate(), "x").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_serves_soon_and_keeps_what_was_written() {
    let site = Site::new();
    let begin = Instant::now();
    let first = site.start(true).await;
    println!("new etcd serves after {:?}", begin.elapsed());
    first.client().write(put_new("a", "1")).await.unwrap();
    acknowledge(&site);
    first.stop().await;

    let begin = Instant::now();
    let second = site.start(true).await;
    println!("existing etcd serves after {:?}", begin.elapsed());
    let record = second.client().get("a").await.unwrap().unwrap();
    assert_eq!(record.value, b"1");
    second.stop().await;

    // Its log is in the log tree, under a name of its own.
    let mut query = Query::exact("root.consensus.etcd");
    query.min_severity = Severity::Debug;
    let entries = site.log.read(query).backlog;
    assert!(
        entries.iter().any(|e| e.message.contains("became leader")),
        "{} entries",
        entries.len()
    );
    // A start and a stop log no errors.
    let loud: Vec<_> = entries
        .iter()
        .filter(|e| e.severity >= Severity::Error)
        .map(|e| e.concise(200))
        .collect();
    assert!(loud.is_empty(), "{loud:#?}");
}

/// A learner reports its own progress, and a curator believes it: etcd does not.
#[tokio::test(flavor = "multi_thread")]
async fn etcd_promotes_no_learner_without_the_log() {
    let site = Site::new();
    let running = site.start(true).await;
    let members = running.handle().root().members();
    let node = NodeId::from_public_key(&NodeKey::generate().public());
    let learner = members.add_learner(node).await.unwrap();
    let refused = hearth_api::chain(&members.promote(learner).await.unwrap_err());
    assert!(refused.contains("in sync with leader"), "{refused}");
    let found = members.list().await.unwrap();
    assert!(found.iter().any(|m| m.id == learner && m.learner));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_holds_etcd_can_write_a_last_time() {
    let site = Site::new();
    let running = site.start(true).await;
    let client = running.client();
    let held = running.handle().handle().hold().await;
    let shutdown = running.supervisor.shutdown();
    tokio::pin!(shutdown);
    let early = tokio::time::timeout(Duration::from_secs(1), &mut shutdown).await;
    assert!(early.is_err(), "it does not wait");
    client.write(put_new("last", "1")).await.unwrap();
    drop(held);
    within_timeout("shutdown", shutdown).await;
    assert!(site.etcd_pids().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_founding_that_nobody_heard_of_begins_anew() {
    let site = Site::new();
    // A power cut may leave a write-ahead log that etcd cannot read.
    let wal = site.root.data.etcd().data().join("member/wal");
    fs::create_dir_all(&wal).unwrap();
    fs::write(wal.join("0000000000000000-0000000000000000.wal"), "torn").unwrap();
    let running = site.start(true).await;
    running.client().write(put_new("a", "1")).await.unwrap();
    running.stop().await;

    let running = site.start(true).await;
    assert!(running.client().get("a").await.unwrap().is_none());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_never_becomes_a_new_cluster() {
    // A member whose data are lost.
    let site = Site::new();
    acknowledge(&site);
    let running = site.start_anyhow(false);
    assert!(running.failure().await.contains("member/wal is missing"));
    running.stop().await;
    assert!(!site.root.data.etcd().data().exists());

    // So is a founder whose credentials say that the bootstrap is complete.
    let running = site.start_anyhow(true);
    assert!(running.failure().await.contains("member/wal is missing"));
    running.stop().await;

    // A member whose peer certificates are lost.
    fs::remove_file(site.root.data.etcd().peer().key()).unwrap();
    let running = site.start_anyhow(false);
    assert!(running.failure().await.contains("peer/key is missing"));
    running.stop().await;
    assert!(!site.root.data.etcd().data().exists());

    // A founder whose certificate authorities are lost or have no keys.
    let site = Site::new();
    hearth_host::pki::remove_authority_keys(&site.root.data.etcd()).unwrap();
    let running = site.start_anyhow(true);
    assert!(running.failure().await.contains("member/wal is missing"));
    running.stop().await;
}

/// One changed bit is enough. Nothing is made worse: when it is changed back, etcd starts.
#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_cannot_use_its_data_says_what_is_damaged() {
    let site = Site::new();
    let running = site.start(true).await;
    running.client().write(put_new("a", "1")).await.unwrap();
    acknowledge(&site);
    running.stop().await;
    let damages = [
        ("log", Site::damage_log as fn(&Site)),
        ("log", Site::damage_length),
        ("database", Site::damage_database),
    ];
    for (what, damage) in damages {
        damage(&site);
        let running = site.start_anyhow(false);
        let failure = running.failure().await;
        let expected = format!("etcd's {what} is damaged: ");
        assert!(failure.contains(&expected), "{failure}");
        assert!(failure.contains("remove the role"), "{failure}");
        let report = running.data_reports.get().flatten();
        let Some(DataReport::Damaged(damaged)) = report else {
            panic!("{report:?}");
        };
        assert!(damaged.to_string().contains(&expected), "{damaged}");
        running.stop().await;
        damage(&site);
    }
    let running = site.start(false).await;
    running.client().write(put_new("b", "1")).await.unwrap();
    assert_eq!(running.data_reports.get(), Some(None));
    running.stop().await;
    // As a power cut may leave it.
    site.tear_log();
    let running = site.start(false).await;
    assert!(running.client().get("a").await.unwrap().is_some());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_etcd_is_started_again_and_its_clients_go_on() {
    let site = Site::new();
    let running = site.start(true).await;
    let client = running.client();
    // The bootstrap is not acknowledged yet, but is in progress.
    client.write(put_new("a", "1")).await.unwrap();
    site.state.0.set(State::Home).unwrap();
    let handle = running.handle().handle();
    assert!(handle.client(ConsensusUser::Curator).is_ok());

    let mut handles = running.handles.watch();
    handles.next().await.unwrap();
    site.signal_etcd(Signal::SIGKILL);
    within_timeout("a new handle", handles.next())
        .await
        .unwrap();
    assert!(running.failure().await.contains("etcd exited with"));
    assert!(matches!(
        handle.client(ConsensusUser::Curator),
        Err(ConsensusUnavailable::NotConnected)
    ));
    // An earlier client reconnects to the new process.
    let record = within_timeout("a read", async {
        loop {
            if let Ok(record) = client.get("a").await {
                return record;
            }
        }
    })
    .await;
    assert_eq!(record.unwrap().value, b"1");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_are_for_members_and_keep_to_their_part() {
    let site = Site::new();
    let running = site.start(true).await;
    let handle = running.handle();
    let refused = |handle: &Handle| handle.client(ConsensusUser::Curator).err();
    assert_eq!(
        refused(&handle.handle()),
        Some(ConsensusUnavailable::RefusedState(State::Unknown))
    );
    site.state.0.set(State::Home).unwrap();
    assert_eq!(refused(&handle.handle()), None);
    site.state.0.set(State::Split).unwrap();
    assert_eq!(refused(&handle.handle()), None);
    site.state.0.set(State::Disowning).unwrap();
    assert_eq!(
        refused(&handle.handle()),
        Some(ConsensusUnavailable::RefusedState(State::Disowning))
    );
    assert_eq!(
        client(None, ConsensusUser::Curator).err(),
        Some(ConsensusUnavailable::NoLocalConsensus)
    );

    let [curator, kubernetes, ..] = ConsensusUser::ALL.map(|user| handle.root().namespaced(user));
    curator.write(put_new("a", "mine")).await.unwrap();
    kubernetes.write(put_new("a", "yours")).await.unwrap();
    let below = curator.sub("x").unwrap().sub("y").unwrap();
    below.write(put_new("b", "deep")).await.unwrap();
    let value = |client: NamespacedClient, key: &'static str| async move {
        let record = client.get(key).await.unwrap();
        record.map(|record| String::from_utf8(record.value).unwrap())
    };
    assert_eq!(value(curator.clone(), "a").await.as_deref(), Some("mine"));
    assert_eq!(
        value(kubernetes.clone(), "a").await.as_deref(),
        Some("yours")
    );
    assert_eq!(
        value(curator.clone(), "x/y/b").await.as_deref(),
        Some("deep")
    );
    assert_eq!(value(below.clone(), "../a").await, None);
    let keys: Vec<_> = curator.list("").await.unwrap().records;
    let keys: Vec<_> = keys.into_iter().map(|record| record.key).collect();
    assert_eq!(keys, ["a", "epoch", "x/y/b"]);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_are_fenced_and_move_the_epoch() {
    let site = Site::new();
    let running = site.start(true).await;
    let client = running.client();
    let epoch = || async { client.get(EPOCH).await.unwrap().map(|r| r.mod_revision) };

    let created = client.write(put_new("a", "1")).await.unwrap();
    assert_eq!(epoch().await, Some(created));
    assert!(matches!(
        client.write(put_new("a", "2")).await,
        Err(WriteError::Conflict)
    ));
    let written = client
        .sub("deep")
        .unwrap()
        .write(Write::when(Condition::Absent("b".into())).put("b", vec![]))
        .await
        .unwrap();
    assert_eq!(
        epoch().await,
        Some(written),
        "a sub-client moves its user's epoch"
    );

    let unchanged = |revision| Condition::Unchanged("a".into(), revision);
    let changed = client
        .write(Write::when(unchanged(created)).put("a", b"3".to_vec()))
        .await
        .unwrap();
    let stale = Write::when(unchanged(created)).delete("a");
    assert!(matches!(
        client.write(stale).await,
        Err(WriteError::Conflict)
    ));
    // `Created` holds after changes, and not after a deletion.
    let since = |revision| Write::when(Condition::Created("a".into(), revision));
    client.write(since(created).put("c", vec![])).await.unwrap();
    client
        .write(Write::when(unchanged(changed)).delete("a"))
        .await
        .unwrap();
    client.write(put_new("a", "4")).await.unwrap();
    assert!(matches!(
        client.write(since(created).put("d", vec![])).await,
        Err(WriteError::Conflict)
    ));
    let [a, d] = client.get_all(["a", "d"]).await.unwrap();
    let a = a.unwrap();
    assert_eq!((&a.key[..], &a.value[..]), ("a", &b"4"[..]));
    assert!(d.is_none());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watches_and_leases_tell_what_happens() {
    let site = Site::new();
    let running = site.start(true).await;
    let client = running.client();
    let start = client.list("").await.unwrap().revision;
    let mut changes = client.watch(start + 1).await.unwrap();

    let lease = client.grant(Duration::from_secs(60)).await.unwrap();
    let write = Write::when(Condition::Absent("l".into())).put_leased("l", b"v".to_vec(), lease);
    let revision = client.write(write).await.unwrap();
    let seen = within_timeout("a change", changes.next()).await.unwrap();
    assert!(seen.iter().all(|change| change.revision() == revision));
    assert!(
        seen.iter().any(
            |change| matches!(change, Change::Put(r) if r.key == "l" && r.lease == lease.id())
        )
    );

    assert!(client.renew(lease).await.unwrap());
    client.revoke(lease).await.unwrap();
    let seen = within_timeout("a change", changes.next()).await.unwrap();
    assert!(matches!(&seen[..], [Change::Deleted { key, .. }] if key == "l"));
    assert!(!client.renew(lease).await.unwrap());
    assert!(client.revoke(lease).await.unwrap_err().lease_is_gone());
    let write = Write::when(Condition::Absent("l".into())).put_leased("l", vec![], lease);
    let Err(WriteError::Consensus(error)) = client.write(write).await else {
        panic!("a key was attached to an expired lease");
    };
    assert!(error.lease_is_gone(), "{error:?}");

    // More than one page, at one revision.
    for batch in 0..6 {
        let mut write = Write::when(Condition::Absent(format!("many/{batch}-0")));
        for number in 0..100 {
            write = write.put(format!("many/{batch}-{number}"), vec![0; 10]);
        }
        client.write(write).await.unwrap();
    }
    assert_eq!(client.list("many/").await.unwrap().records.len(), 600);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_etcd_is_waited_for_within_a_bound() {
    let site = Site::new();
    let running = site.start(true).await;
    let client = running.client().bounded(Duration::from_millis(200));
    client.get("a").await.unwrap();
    site.pause_etcd().await;
    let begin = Instant::now();
    let answer = client.get("a").await;
    site.signal_etcd(Signal::SIGCONT);
    let answer = answer.map(|record| record.is_some());
    assert!(
        matches!(answer, Err(ConsensusError::TimedOut { .. })),
        "{answer:?}"
    );
    assert!(begin.elapsed() < Duration::from_secs(5));
    running.client().get("a").await.unwrap();
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_becomes_patient_once_and_for_ever_when_peers_are_expected() {
    let site = Site::new();
    let running = site.start(true).await;
    acknowledge(&site);
    let patient = |pid: i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        line.split(|byte| *byte == 0).any(|word| word == b"2000")
    };
    assert!(!patient(site.etcd_pid()) && !running.peers.is_peer_timing_ready());
    let client = running.client();
    client.write(put_new("a", "1")).await.unwrap();

    let mut handles = running.handles.watch();
    handles.next().await.unwrap();
    running.peers.expect_peers();
    running.peers.expect_peers();
    within_timeout("a new handle", handles.next())
        .await
        .unwrap();
    within_timeout("readiness", running.peers.peer_timing_ready()).await;
    assert!(patient(site.etcd_pid()));
    assert!(client.get("a").await.unwrap().is_some());
    // It was not a failure: the supervisor counted no restart.
    assert!(
        running
            .supervisor
            .tree()
            .snapshot()
            .iter()
            .all(|node| node.restarts == 0)
    );
    running.stop().await;

    let running = site.start(true).await;
    assert!(patient(site.etcd_pid()));
    within_timeout("readiness", running.peers.peer_timing_ready()).await;
    running.stop().await;
}

/// The data directory below `node/fixtures` that etcd of the minor version before has made, on a site of a member.
fn restore_store_of_before(site: &Site) {
    let etcd = site.root.data.etcd();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/etcd-3.6");
    for part in ["member/snap", "member/wal"] {
        let folder = etcd.data().join(part);
        fs::create_dir_all(&folder).unwrap();
        for compressed in fs::read_dir(fixture.join(part)).unwrap() {
            let compressed = compressed.unwrap().path();
            let file = folder.join(compressed.file_stem().unwrap());
            let (from, to) = (fs::File::open(&compressed), fs::File::create(file));
            zstd::stream::copy_decode(from.unwrap(), to.unwrap()).unwrap();
        }
    }
    fs::set_permissions(etcd.data(), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(etcd.store_version(), "3.6\n").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_of_the_minor_version_before_is_taken_over() {
    let site = Site::new();
    restore_store_of_before(&site);
    let running = site.start(false).await;
    let client = running.client();
    let listing = client.list("numbers/").await.unwrap();
    assert_eq!(listing.records.len(), 39);
    let value = async |key| client.get(key).await.unwrap().map(|record| record.value);
    assert_eq!(value("numbers/1").await.unwrap(), b"one");
    assert_eq!(value("numbers/2").await, None);
    assert_eq!(value("numbers/40").await.unwrap(), b"40");
    let leased = client.get("leased").await.unwrap().unwrap();
    assert!(client.renew(Lease::from_id(leased.lease)).await.unwrap());
    let written = client.write(put_new("a", "1")).await.unwrap();
    assert!(written > listing.revision);

    // The members have agreed on the new version, and etcd has changed the store.
    let mut maintenance = running.handle().root().etcd.maintenance_client();
    within_timeout("the new storage version", async {
        while !maintenance
            .status()
            .await
            .unwrap()
            .storage_version()
            .starts_with("3.7")
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    running.stop().await;

    let note = fs::read_to_string(site.root.data.etcd().store_version());
    assert_eq!(note.unwrap(), "3.7\n");
    let running = site.start(false).await;
    assert!(running.client().get("a").await.unwrap().is_some());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_is_not_started_on_a_store_of_another_version() {
    let site = Site::new();
    let etcd = site.root.data.etcd();
    fs::create_dir_all(etcd.log()).unwrap();
    // An image before the first note, and a later image.
    for (note, version) in [(None, "3.4"), (Some("3.8\n"), "3.8")] {
        if let Some(note) = note {
            fs::write(etcd.store_version(), note).unwrap();
        }
        let running = site.start_anyhow(false);
        let failure = running.failure().await;
        running.stop().await;
        assert!(
            failure.contains(&format!("is of etcd {version}, which")),
            "{failure}"
        );
        assert!(site.etcd_pids().is_empty());
        assert_eq!(fs::read_dir(etcd.log()).unwrap().count(), 0);
    }
}
