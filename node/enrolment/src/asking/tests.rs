//! The order in which curators are called, and the validation of responses.

use std::collections::BTreeSet;
use std::net::TcpListener;

use hearth_api::identity::JoinKey;
use hearth_api::tls::wall_clock;
use hearth_api::v1::ClusterConfiguration;
use hearth_api::v1::cluster_directory::{Address, Node};

use super::*;
use crate::testing;

fn node(id: u8, addresses: &[(&str, u32)]) -> Node {
    let address = |(host, port): &(&str, u32)| Address {
        host: (*host).into(),
        port: *port,
    };
    Node {
        id: format!("hearth-{}", hex::encode([id; 16])),
        addresses: addresses.iter().map(address).collect(),
        roles: None,
    }
}

fn shown(endpoints: &[Endpoint]) -> Vec<String> {
    endpoints.iter().map(ToString::to_string).collect()
}

#[test]
fn the_nodes_take_turns_and_no_address_is_asked_twice() {
    let directory = ClusterDirectory {
        nodes: vec![
            node(1, &[("192.0.2.1", 0), ("2001:db8::1", 1), ("192.0.2.9", 9)]),
            node(2, &[("192.0.2.2", 7835), ("192.0.2.1", 7835)]),
            node(3, &[]),
            node(4, &[("curator.example", 0), ("192.0.2.4", 70_000)]),
        ],
    };
    assert_eq!(
        shown(&endpoints(&directory)),
        [
            "192.0.2.1:7835",
            "192.0.2.2:7835",
            "[2001:db8::1]:1",
            "192.0.2.9:9"
        ]
    );
}

#[test]
fn every_address_begins_once() {
    let asker = CuratorCaller::new(wall_clock(), "boot".into(), None);
    let all: Vec<Endpoint> = (1..=3)
        .map(|last| Endpoint::new([192, 0, 2, last].into(), 0))
        .collect();
    let begins: BTreeSet<String> = (0..3)
        .map(|_| {
            let these = asker.next(all.clone());
            assert_eq!(these.len(), 3, "the others are asked, too");
            these[0].to_string()
        })
        .collect();
    assert_eq!(begins.len(), 3);

    // Of many, some in each call, and all within a few calls.
    let all: Vec<Endpoint> = (1..=100)
        .map(|last| Endpoint::new([192, 0, 2, last].into(), 0))
        .collect();
    let mut asked = BTreeSet::new();
    for _ in 0..100_usize.div_ceil(AT_ONCE) {
        let these = asker.next(all.clone());
        assert_eq!(these.len(), AT_ONCE);
        asked.extend(these);
    }
    assert_eq!(asked.len(), 100);
    assert!(asker.next(Vec::new()).is_empty());
}

/// An endpoint that accepts connections and never answers costs its timeout, and is named.
#[tokio::test]
async fn who_does_not_answer_is_named() {
    let refuses = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = refuses.local_addr().unwrap().port();
    drop(refuses);
    let asker = CuratorCaller::new(wall_clock(), "boot".into(), None);
    let cluster = hearth_api::testing::TestCluster::new();
    let mut registering = Registering::clone(&testing::registering(1, None));
    registering.cluster_ca = cluster.ca().clone();
    registering.asking.directory.nodes = vec![node(1, &[("127.0.0.1", port.into())])];
    let error = asker.register(&registering, false).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unavailable), "{error}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("127.0.0.1:{port}: cannot connect")),
        "{text}"
    );

    registering.asking.directory.nodes.clear();
    let error = asker.register(&registering, false).await.unwrap_err();
    assert!(matches!(error, AskError::Nobody), "{error}");
}

#[test]
fn a_curators_words_harm_no_terminal() {
    let status = Status::permission_denied(format!("no\n\x1b[2J{}", "x".repeat(1000)));
    let text = message(&status);
    assert!(text.starts_with("no  [2Jx"), "{text}");
    assert_eq!(text.chars().count(), LONGEST_MESSAGE);
}

#[test]
fn a_reply_is_complete_or_none() {
    let registering = testing::registering(1, None);
    let right = RegisterNodeResponse {
        cluster_id: vec![9; 16],
        node_id: registering.node_id.to_string(),
        configuration: Some(ClusterConfiguration::default()),
        tpm_usage: TpmUsage::NotPresent.into(),
        storage_security: StorageSecurity::Insecure.into(),
        state: NodeState::New.into(),
        ask_again_ms: 2000,
        directory: None,
    };
    let reply = reply_of(&registering, right.clone()).unwrap();
    assert_eq!(reply.answer.cold_start_policy, ColdStartPolicy::None);
    let ask_again = Duration::from_secs(2);
    assert_eq!(reply.approval, Approval::Waits { ask_again });
    let approved = RegisterNodeResponse {
        state: NodeState::Standby.into(),
        ..right.clone()
    };
    let reply = reply_of(&registering, approved).unwrap();
    assert_eq!(reply.approval, Approval::Given);

    type Change = fn(&mut RegisterNodeResponse);
    let changes: [(&str, Change); 8] = [
        ("cluster_id", |r| r.cluster_id.truncate(15)),
        ("node_id", |r| r.node_id.clear()),
        ("tpm_usage", |r| r.tpm_usage = 0),
        ("storage_security", |r| r.storage_security = 0),
        ("storage_security", |r| r.storage_security = 99),
        ("state", |r| r.state = 0),
        ("state", |r| r.state = NodeState::Decommissioned.into()),
        ("configuration.cold_start_policy", |r| {
            r.configuration.get_or_insert_default().cold_start_policy = 99;
        }),
    ];
    for (field, change) in changes {
        let mut wrong = right.clone();
        change(&mut wrong);
        let (found, _) = reply_of(&registering, wrong).unwrap_err();
        assert_eq!(found, field);
    }
}

/// A commit's response must be for this key and under this CA.
#[test]
fn a_commit_is_for_this_node_or_none() {
    use hearth_api::identity::{Identity, NodeId};

    let cluster = hearth_api::testing::TestCluster::new();
    let mut registering =
        Registering::clone(&testing::registering(1, Some(StorageSecurity::Insecure)));
    registering.cluster_ca = cluster.ca().clone();
    registering.answer.as_mut().unwrap().cluster_id = cluster.id;
    let (id, key) = (registering.node_id, registering.node_key.public());
    let entering = AnsweredRegistration::of(Arc::new(registering)).unwrap();
    let asker = CuratorCaller::new(wall_clock(), "boot".into(), None);
    let answer = |ca: &[u8], cluster_id, id: NodeId, key| {
        let identity = Identity::node(cluster_id, id);
        let response = CommitNodeResponse {
            ca_certificate: ca.to_vec(),
            node_certificate: cluster.leaf(&identity, key, |_| {}).to_vec(),
            directory: None,
            owner_public_key: Vec::new(),
            recovery_recipient: Vec::new(),
        };
        asker.committed(&entering, response)
    };
    let committed = answer(cluster.ca(), cluster.id, id, key).unwrap();
    assert_eq!(
        *committed.directory,
        entering.registering().asking.directory,
        "somebody is known at the next boot"
    );
    let other = JoinKey::generate().public();
    for (wrong, field) in [
        (answer(b"", cluster.id, id, key), "ca_certificate"),
        (
            answer(cluster.ca(), ClusterId::generate(), id, key),
            "node_certificate",
        ),
        (
            answer(cluster.ca(), cluster.id, NodeId::from_bytes([7; 16]), key),
            "node_certificate",
        ),
        (
            answer(cluster.ca(), cluster.id, id, other),
            "node_certificate",
        ),
    ] {
        assert_eq!(wrong.unwrap_err().0, field);
    }
}
