//! Registration, commit and join of nodes.

use std::sync::Arc;

use futures::{StreamExt as _, stream};
use hearth_api::identity::{ClusterUnlockKey, JoinKey, NodeKey, Ticket};
use hearth_api::private::StoredNode;
use hearth_api::proofs;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::issue_certificate_request::{EtcdPeer, Kind};
use hearth_api::v1::join_node_response::Answer;
use hearth_api::v1::{
    ColdStartPolicy, CommitNodeRequest, IssueCertificateRequest, JoinNodeRequest, Label,
    NodeHealth, NodeState, RegisterNodeRequest, StorageSecurity, TpmUsage,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::decisions::registration::MOST_WAITING;
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write};
use prost::Message as _;
use tonic::Code;

use super::super::Timing;
use super::super::testing::{BOOT_ID, Pulse, Who, World, quick};
use super::machine::{Machine, approve, ask_ticket, by_key, copy, delete, ticket};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_becomes_a_node_and_comes_back() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    let ticket = ticket(&world).await;
    assert_eq!(
        machine.commit(&world).await.unwrap_err().code(),
        Code::NotFound
    );
    assert_eq!(
        machine.join(&world).await.unwrap_err().code(),
        Code::NotFound
    );

    let first = machine.register(&world, &ticket).await.unwrap();
    assert_eq!(first.state(), NodeState::New);
    assert_eq!(first.cluster_id, world.site.cluster_id.as_bytes());
    assert_eq!(first.node_id, machine.id().to_string());
    assert_eq!(first.tpm_usage(), TpmUsage::NotPresent);
    assert_eq!(first.storage_security(), StorageSecurity::Encrypted);
    assert!(first.ask_again_ms > 0 && first.configuration.is_some());
    // A second registration, even with other labels, gets the same answer and changes nothing.
    let again = RegisterNodeRequest {
        labels: Vec::new(),
        ..machine.request(&ticket)
    };
    assert_eq!(machine.send(&world, again).await.unwrap(), first);
    let shown = machine.shown(&world).await.unwrap();
    assert_eq!((shown.state(), shown.labels.len()), (NodeState::New, 1));
    assert_eq!(shown.health(), NodeHealth::Unknown);

    // Not before it is approved.
    for refused in [
        machine.commit(&world).await.err(),
        machine.join(&world).await.err(),
    ] {
        assert_eq!(refused.unwrap().code(), Code::FailedPrecondition);
    }
    for _ in 0..2 {
        let node = approve(&world, by_key(machine.key.public().as_bytes()))
            .await
            .unwrap();
        assert_eq!(node.state(), NodeState::Standby);
    }
    let approved = machine.register(&world, &ticket).await.unwrap();
    assert_eq!(approved.state(), NodeState::Standby);

    // A storage security that the policy does not permit, and a commit with another key.
    let weak = Machine {
        storage: StorageSecurity::Insecure,
        ..copy(&machine)
    };
    let refused = weak.commit(&world).await.unwrap_err();
    assert!(refused.message().contains("storage_security"), "{refused}");
    let other = Machine {
        key: NodeKey::generate(),
        ..copy(&machine)
    };
    assert_eq!(
        other.commit(&world).await.unwrap_err().code(),
        Code::NotFound
    );
    assert_eq!(machine.state(&world).await, Some(NodeState::Standby));

    let committed = machine.commit(&world).await.unwrap();
    assert_eq!(committed.ca_certificate, world.node.ca.to_vec());
    assert_eq!(committed.owner_public_key, world.data.seed.owner.as_bytes());
    let recipient = RecoveryRecipient::to_field(world.data.seed.recovery_recipient);
    assert_eq!(committed.recovery_recipient, recipient);
    assert_eq!(machine.commit(&world).await.unwrap(), committed);
    let other = Machine {
        unlock_key: ClusterUnlockKey::generate(),
        ..copy(&machine)
    };
    assert_eq!(
        other.commit(&world).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let other = Machine {
        storage: StorageSecurity::AuthenticatedEncrypted,
        ..copy(&machine)
    };
    assert_eq!(
        other.commit(&world).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let up = machine.register(&world, &ticket).await.unwrap();
    assert_eq!(up.state(), NodeState::Up);
    assert_eq!(
        approve(&world, machine.selector()).await.unwrap().state(),
        NodeState::Up
    );

    // It can call the methods of a node.
    let node = hearth_api::identity::NodeCredentials {
        key: machine.key.clone(),
        certificate: committed.node_certificate.into(),
        ca: committed.ca_certificate.into(),
    };
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    pulse.beat().await.unwrap();
    assert_eq!(world.health(machine.id()).await, NodeHealth::Healthy);

    let admitted = machine.join(&world).await.unwrap().answer.unwrap();
    let Answer::Admitted(admitted) = admitted else {
        panic!("{admitted:?}");
    };
    assert_eq!(admitted.cluster_unlock_key, machine.unlock_key.expose());
    assert_eq!(admitted.cold_start_policy(), ColdStartPolicy::None);
    assert_eq!(admitted.recovery_recipient, recipient);
    let changed = Machine {
        tpm: TpmUsage::PresentButUnused,
        ..copy(&machine)
    };
    let refused = changed.join(&world).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("PRESENT_BUT_UNUSED"),
        "{refused}"
    );
    let unknown = Machine {
        join_key: JoinKey::generate(),
        ..copy(&machine)
    };
    assert_eq!(
        unknown.join(&world).await.unwrap_err().code(),
        Code::NotFound
    );
    // JoinNode does not accept the node key.
    let wrong = Machine {
        join_key: JoinKey::from_seed(*machine.key.expose_seed()),
        ..copy(&machine)
    };
    assert_eq!(wrong.join(&world).await.unwrap_err().code(), Code::NotFound);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_node_is_told_so_and_nothing_of_it_is_used_again() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    machine.becomes_a_node(&world).await;
    let ticket = ticket(&world).await;
    let refused = delete(&world, machine.selector(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("decommission"), "{refused}");
    // A repeated call succeeds.
    for _ in 0..2 {
        delete(&world, machine.selector(), true).await.unwrap();
    }
    assert_eq!(machine.state(&world).await, None);
    machine.is_disowned(&world).await;
    let refused = machine.register(&world, &ticket).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("wipe"), "{refused}");
    let refused = machine.commit(&world).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let heir = Machine {
        key: NodeKey::generate(),
        ..copy(&machine)
    };
    let refused = heir.register(&world, &ticket).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    // With new keys it is another node.
    Machine::new().becomes_a_node(&world).await;

    // It gets this answer even with a ticket that has been rotated.
    ask_ticket(&world, true).await;
    let refused = machine.register(&world, &ticket).await.unwrap_err();
    assert!(refused.message().contains("deleted"), "{refused}");
    // No records of it are left but the tombstone and its join key.
    let listing = world.client().list("").await.unwrap();
    let id = machine.id().to_string();
    let left = listing.records.iter().filter(|r| r.key.contains(&id));
    let left: Vec<_> = left.map(|record| record.key.clone()).collect();
    assert_eq!(left, [format!("tombstones/{id}")]);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_machine_is_said() {
    let world = World::new(quick()).await;
    let (machine, other) = (Machine::new(), Machine::new());
    let ticket = ticket(&world).await;
    let good = || machine.request(&ticket);
    let label = |key: &str, value: &str| Label {
        key: key.into(),
        value: value.into(),
    };
    let node_key = machine.key.public();
    let wrong = [
        (
            RegisterNodeRequest {
                register_ticket: vec![],
                ..good()
            },
            "register_ticket",
        ),
        (
            RegisterNodeRequest {
                register_ticket: vec![1; 31],
                ..good()
            },
            "register_ticket",
        ),
        (
            RegisterNodeRequest {
                register_ticket: vec![1; 20 << 10],
                ..good()
            },
            "register_ticket",
        ),
        (
            RegisterNodeRequest {
                join_key: vec![],
                ..good()
            },
            "join_key",
        ),
        (
            RegisterNodeRequest {
                join_key: vec![0; 32],
                ..good()
            },
            "join_key",
        ),
        (
            RegisterNodeRequest {
                join_key_proof: vec![],
                ..good()
            },
            "join_key_proof",
        ),
        // The proof of another machine, replayed.
        (
            RegisterNodeRequest {
                ..other.request(&ticket)
            },
            "join_key_proof",
        ),
        (
            RegisterNodeRequest {
                join_key: node_key.as_bytes().to_vec(),
                join_key_proof: {
                    let same = JoinKey::from_seed(*machine.key.expose_seed());
                    proofs::prove_join_key(&node_key, &same).to_vec()
                },
                ..good()
            },
            "join_key",
        ),
        (
            RegisterNodeRequest {
                labels: vec![label("a b", "")],
                ..good()
            },
            "labels[0].key",
        ),
        (
            RegisterNodeRequest {
                labels: vec![label("a", ""); 2],
                ..good()
            },
            "labels[1].key",
        ),
        (
            RegisterNodeRequest {
                labels: vec![label("a", "é")],
                ..good()
            },
            "labels[0].value",
        ),
    ];
    for (request, field) in wrong {
        let refused = machine.send(&world, request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{field}: {refused}");
        assert!(refused.message().contains(field), "{field}: {refused}");
    }
    let huge = RegisterNodeRequest {
        register_ticket: vec![1; 10 << 20],
        ..good()
    };
    let refused = machine.send(&world, huge).await.unwrap_err();
    assert_ne!(refused.code(), Code::Ok);
    assert_eq!(
        machine.state(&world).await,
        None,
        "nothing has come of all that"
    );

    // Callers that cannot be machines.
    let owner = world.owner().await;
    for (who, code) in [
        (Who::Nobody, Code::Unauthenticated),
        (Who::Node(&world.node), Code::FailedPrecondition),
        (Who::User(&owner), Code::FailedPrecondition),
    ] {
        let mut client = CuratorClient::new(world.channel(&who));
        let refused = client.register_node(good()).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        let refused = client
            .commit_node(CommitNodeRequest::default())
            .await
            .unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        let refused = client
            .join_node(JoinNodeRequest::default())
            .await
            .unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }

    let mut client = CuratorClient::new(world.channel(&Who::HolderOf(&machine.key)));
    let key = machine.unlock_key.expose().to_vec();
    for (cluster_unlock_key, storage_security, field) in [
        (
            vec![],
            StorageSecurity::Encrypted.into(),
            "cluster_unlock_key",
        ),
        (
            vec![1; 33],
            StorageSecurity::Encrypted.into(),
            "cluster_unlock_key",
        ),
        (key.clone(), 0, "storage_security"),
        (key, 77, "storage_security"),
    ] {
        let request = CommitNodeRequest {
            cluster_unlock_key,
            storage_security,
        };
        let refused = client.commit_node(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(field), "{field}: {refused}");
    }
    let usage = TpmUsage::NotPresent.into();
    for (tpm_usage, boot_id, field) in [
        (0, BOOT_ID, "tpm_usage"),
        (9, BOOT_ID, "tpm_usage"),
        (usage, "", "boot_id"),
        (usage, "a/b", "boot_id"),
    ] {
        let boot_id = boot_id.into();
        let request = JoinNodeRequest {
            tpm_usage,
            boot_id,
            proof: None,
        };
        let refused = client.join_node(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(field), "{field}: {refused}");
    }
    world.stop().await;
}

/// An ID is the first half of a key, so two keys can have the same ID. Here the first of them is in
/// the records.
#[tokio::test(flavor = "multi_thread")]
async fn another_key_with_the_id_of_a_node_is_refused() {
    let world = World::new(quick()).await;
    let ticket = ticket(&world).await;
    let (first, second) = (Machine::new(), Machine::new());
    let key = state::node_key(second.id());
    let stored = StoredNode {
        version: state::VERSION,
        id: second.id().to_string(),
        public_key: first.key.public().as_bytes().to_vec(),
        join_key: first.join_key.public().as_bytes().to_vec(),
        state: NodeState::Standby.into(),
        ..Default::default()
    };
    let write = Write::when(Condition::Absent(key.clone()));
    let write = write.put(key.clone(), stored.encode_to_vec());
    let revision = world.client().write(write).await.unwrap();

    for refused in [
        second.register(&world, &ticket).await.err(),
        second.commit(&world).await.err(),
    ] {
        let refused = refused.unwrap();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
        assert!(refused.message().contains("another key"), "{refused}");
    }
    // Nothing has been written.
    let record = world.client().get(&key).await.unwrap().unwrap();
    assert_eq!(record.mod_revision, revision);
    world.stop().await;
}

/// A longer timeout for floods of calls.
fn patient() -> Timing {
    Timing {
        read_interval: quick().read_interval,
        ..Timing::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_tickets_are_refused_and_keep_nobody_else_out() {
    let world = World::new(patient()).await;
    // There is no ticket yet: every ticket is rejected.
    let early = Machine::new();
    let refused = early
        .register(&world, &Ticket::from_bytes([0; 32]))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);

    let old = ticket(&world).await;
    assert_eq!(ticket(&world).await, old, "asked for again, it is the same");
    let waiting = Machine::new();
    waiting.register(&world, &old).await.unwrap();
    let new = ask_ticket(&world, true).await;
    assert_ne!(new, old);
    let refused = early.register(&world, &old).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("operator"), "{refused}");
    // A registered machine keeps waiting, whatever ticket it presents.
    let answer = waiting.register(&world, &old).await.unwrap();
    assert_eq!(answer.state(), NodeState::New);

    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    let guesses = stream::iter(0..200_u32)
        .map(|_| async {
            let guess = Machine::new().register(&world, &Ticket::generate()).await;
            guess.unwrap_err().code()
        })
        .buffer_unordered(16);
    let flood = guesses.collect::<Vec<_>>();
    let others = async {
        for _ in 0..5 {
            pulse.beat().await.unwrap();
            assert_eq!(world.nodes().await.len(), 2);
        }
        // The right ticket is accepted during the flood.
        Machine::new().register(&world, &new).await.unwrap();
    };
    let (codes, ()) = tokio::join!(flood, others);
    let of = |code| codes.iter().filter(|c| **c == code).count();
    assert!(of(Code::ResourceExhausted) > 0, "{codes:?}");
    assert_eq!(
        of(Code::ResourceExhausted) + of(Code::PermissionDenied),
        200,
        "{codes:?}"
    );
    assert_eq!(world.nodes().await.len(), 3);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_machines_that_ask_are_too_many_and_harm_nobody() {
    let world = World::new(patient()).await;
    let ticket = ticket(&world).await;
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    let asking = stream::iter(0..1000_u32)
        .map(|_| async {
            let machine = Machine::new();
            let answer = machine.register(&world, &ticket).await;
            (machine, answer.map_err(|refused| refused.code()))
        })
        .buffer_unordered(24)
        .collect::<Vec<_>>();
    let members = async {
        for _ in 0..20 {
            pulse.beat().await.unwrap();
            assert!(!world.nodes().await.is_empty());
        }
    };
    let (answers, ()) = tokio::join!(asking, members);
    let (taken, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|(_, a)| a.is_ok());
    assert_eq!(taken.len(), MOST_WAITING);
    for (_, answer) in refused {
        // Or too many concurrent calls, on a busy machine.
        let code = answer.as_ref().unwrap_err();
        let bounded = [Code::ResourceExhausted, Code::Unavailable];
        assert!(bounded.contains(code), "{code:?}");
    }
    assert_eq!(world.nodes().await.len(), 1 + MOST_WAITING);
    // Waiting machines are served as before; deleting one makes room.
    let (one, another) = (&taken[0].0, &taken[1].0);
    one.register(&world, &ticket).await.unwrap();
    let late = Machine::new();
    let refused = late.register(&world, &ticket).await.unwrap_err();
    assert!(refused.message().contains("128 machines wait"), "{refused}");
    approve(&world, one.selector()).await.unwrap();
    late.register(&world, &ticket).await.unwrap();
    delete(&world, another.selector(), false).await.unwrap();
    Machine::new().register(&world, &ticket).await.unwrap();
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_step_may_be_asked_of_any_curator_and_of_all_at_once() {
    let world = World::new(quick()).await;
    let second_node = Arc::new(Machine::new().becomes_a_node(&world).await);
    let (second, ready) = world.curator_of(&second_node).await;
    let ports = [world.ready.get(), ready.get()];
    let machine = Machine::new();
    let at = |port: usize| Machine {
        curator: ports[port],
        ..copy(&machine)
    };
    let (here, there) = (at(0), at(1));
    let ticket = ticket(&world).await;

    let both = tokio::join!(
        here.register(&world, &ticket),
        there.register(&world, &ticket)
    );
    assert_eq!(both.0.unwrap(), both.1.unwrap());
    assert_eq!(world.nodes().await.len(), 3);
    approve(&world, machine.selector()).await.unwrap();
    // Each call is repeated at the other curator.
    let approved = there.register(&world, &ticket).await.unwrap();
    assert_eq!(approved.state(), NodeState::Standby);

    // Of two commits with different keys for the same machine, exactly one succeeds, completely.
    let forged = Machine {
        unlock_key: ClusterUnlockKey::generate(),
        ..at(1)
    };
    let (mine, theirs) = tokio::join!(here.commit(&world), forged.commit(&world));
    assert!(mine.is_ok() != theirs.is_ok(), "exactly one");
    let (winner, first) = match mine {
        Ok(answer) => (copy(&machine), answer),
        Err(refused) => {
            assert_eq!(refused.code(), Code::FailedPrecondition);
            (
                Machine {
                    curator: None,
                    ..copy(&forged)
                },
                theirs.unwrap(),
            )
        }
    };
    for port in ports {
        let again = Machine {
            curator: port,
            ..copy(&winner)
        };
        assert_eq!(again.commit(&world).await.unwrap(), first);
        let Some(Answer::Admitted(admitted)) = again.join(&world).await.unwrap().answer else {
            panic!("not admitted");
        };
        assert_eq!(admitted.cluster_unlock_key, winner.unlock_key.expose());
    }

    // A call whose reply was lost is repeated at any curator.
    let retried = Machine {
        curator: ports[1],
        ..Machine::new()
    };
    retried.register(&world, &ticket).await.unwrap();
    approve(&world, retried.selector()).await.unwrap();
    let lost = retried.commit(&world);
    let lost = tokio::time::timeout(std::time::Duration::from_millis(3), lost).await;
    drop(lost);
    let elsewhere = Machine {
        curator: ports[0],
        ..copy(&retried)
    };
    let answer = elsewhere.commit(&world).await.unwrap();
    assert_eq!(retried.commit(&world).await.unwrap(), answer);

    within_timeout("the second curator stops", second.shutdown()).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_consensus_get_certificates_for_their_peers() {
    let world = World::new(quick()).await;
    let other = Machine::new().becomes_a_node(&world).await;
    let peer = || IssueCertificateRequest {
        kind: Some(Kind::EtcdPeer(EtcdPeer {})),
    };
    let mut member = world.curator(&world.node);
    let issued = member.issue_certificate(peer()).await.unwrap().into_inner();
    let (_, leaf) = x509_parser::parse_x509_certificate(&issued.certificate).unwrap();
    let (_, ca) = x509_parser::parse_x509_certificate(&issued.ca_certificate).unwrap();
    assert_eq!(leaf.issuer(), ca.subject());
    assert_eq!(
        leaf.public_key().subject_public_key.data.as_ref(),
        world.node.key.public().as_bytes()
    );
    let names = leaf.subject_alternative_name().unwrap().unwrap();
    let name = world.site.node_id.to_string();
    let dns = x509_parser::extensions::GeneralName::DNSName(&name);
    assert_eq!(names.value.general_names, [dns]);
    assert_ne!(
        issued.ca_certificate,
        world.node.ca.to_vec(),
        "etcd's own CA"
    );

    let mut stranger = world.curator(&other);
    let refused = stranger.issue_certificate(peer()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let nothing = IssueCertificateRequest { kind: None };
    let refused = member.issue_certificate(nothing).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    world.stop().await;
}
