use super::*;
use crate::identity::{NodeCredentials, P256Key, UserName};
use crate::testing::{NOT_BEFORE, TestClock, TestCluster};

#[test]
fn credentials_that_do_not_belong_together_are_refused() {
    let cluster = TestCluster::new();
    let own = |credentials: &NodeCredentials| OwnCertificate::new(credentials, TestClock::new());
    let proper = cluster.node();
    assert!(own(&proper).is_ok());

    let other_key = NodeCredentials {
        key: cluster.node().key,
        ..proper.clone()
    };
    assert!(matches!(own(&other_key), Err(TlsError::OtherKey { .. })));
    let other_ca = NodeCredentials {
        ca: TestCluster::new().ca().clone(),
        ..proper.clone()
    };
    assert!(matches!(
        own(&other_ca),
        Err(TlsError::Own(CertificateError::OtherIssuer))
    ));
    let no_ca = NodeCredentials {
        ca: proper.certificate.clone(),
        ..proper.clone()
    };
    assert!(matches!(
        own(&no_ca),
        Err(TlsError::Ca(CertificateError::NotCa))
    ));
    let user = NodeCredentials {
        certificate: cluster.leaf(
            &Identity::user(cluster.id, UserName::owner()),
            proper.key.public(),
            |_| {},
        ),
        ..proper
    };
    assert!(matches!(
        own(&user),
        Err(TlsError::Own(CertificateError::OtherPeer { .. }))
    ));
}

#[test]
fn leaves_are_replaced_by_leaves_of_the_same_node() {
    let (cluster, clock) = (TestCluster::new(), TestClock::new());
    let node = cluster.node();
    let own = OwnCertificate::new(&node, clock.clone()).expect("proper");
    let mut changes = own.changes();
    let (identity, key) = (Identity::node(cluster.id, own.node()), own.key().public());
    let leaf = cluster.leaf(&identity, key, |_| {});
    let p256 =
        |key: &P256Key| cluster.p256_leaf(&identity, own.key().public(), key.public(), |_| {});

    let other = own.replace(cluster.node().certificate, None).unwrap_err();
    assert!(matches!(
        other,
        TlsError::Own(CertificateError::OtherPeer { .. })
    ));
    let expired = cluster.leaf(&identity, key, |params| {
        params.not_after = params.not_before
    });
    let expired = own.replace(expired, None).unwrap_err();
    assert!(matches!(
        expired,
        TlsError::Own(CertificateError::Expired { .. })
    ));
    let other_key = own.replace(leaf.clone(), Some(p256(&P256Key::generate())));
    assert!(
        matches!(other_key, Err(TlsError::Rustls(_))),
        "{other_key:?}"
    );
    assert_eq!(own.certificate(), node.certificate);
    assert!(!own.has_p256() && !changes.has_changed().expect("open"));

    let of_own_key = cluster.p256_leaf(&identity, key, own.p256_public_key(), |_| {});
    own.replace(leaf.clone(), Some(of_own_key))
        .expect("its own");
    assert_eq!(own.certificate(), leaf);
    assert!(own.has_p256() && changes.has_changed().expect("open"));
    // The next one comes without: the former stays.
    changes.mark_unchanged();
    own.replace(leaf, None).expect("its own");
    assert!(own.has_p256() && changes.has_changed().expect("open"));
}

#[test]
fn leaves_are_due_at_half_of_their_time_and_when_the_clock_is_set_back() {
    let (cluster, clock) = (TestCluster::new(), TestClock::new());
    let own = OwnCertificate::new(&cluster.node(), clock.clone()).expect("proper");
    assert!(own.is_due(), "there is none with a P-256 key");
    let (identity, key) = (Identity::node(cluster.id, own.node()), own.key().public());
    let until = |params: &mut rcgen::CertificateParams| {
        params.not_after = params.not_before + std::time::Duration::from_secs(2000);
    };
    clock.set(NOT_BEFORE + 1000);
    let p256 = cluster.p256_leaf(&identity, key, own.p256_public_key(), until);
    own.replace(cluster.leaf(&identity, key, until), Some(p256))
        .expect("its own");
    let due_at = |seconds| {
        clock.set(NOT_BEFORE + seconds);
        own.is_due()
    };
    assert!(!due_at(1000) && !due_at(1500));
    assert!(due_at(1501) && due_at(5000) && due_at(999));
}

#[test]
fn a_peer_is_what_it_has_proven() {
    let cluster = TestCluster::new();
    let clock: Clock = TestClock::new();
    let node = cluster.node();
    let own = OwnCertificate::new(&node, clock.clone()).expect("proper");
    let trust = Trust::of_node(&own);
    let judge = |certificates: &[CertificateDer<'_>]| trust.judge(certificates, now(&clock));

    assert_eq!(judge(&[]), Ok(PeerCertificate::None));
    let key = SigningKey::generate();
    assert_eq!(
        judge(&[certificates::self_signed(&key)]),
        Ok(PeerCertificate::Possession(key.public()))
    );
    let peer = judge(std::slice::from_ref(&node.certificate)).expect("a member");
    assert_eq!(
        peer.identity().and_then(Identity::node_id),
        Some(own.node())
    );
    assert_eq!(peer.public_key(), Some(node.key.public()));
    assert_eq!(
        judge(&[node.certificate.clone(), node.ca.clone()]),
        Err(CertificateError::Chain { found: 2 })
    );
    assert_eq!(
        judge(std::slice::from_ref(&node.ca)),
        Err(CertificateError::IsCa)
    );
}

#[test]
fn a_server_is_expected_by_name() {
    let (ours, theirs) = (
        ClusterId::from_bytes([1; 16]),
        ClusterId::from_bytes([2; 16]),
    );
    let (one, other) = (NodeId::from_bytes([1; 16]), NodeId::from_bytes([2; 16]));
    let node = Identity::node(ours, one);
    let user = Identity::user(ours, UserName::owner());

    assert_eq!(ExpectedServer::AnyNode.check(&node, Some(ours)), Ok(()));
    assert_eq!(ExpectedServer::AnyNode.check(&node, None), Ok(()));
    assert_eq!(ExpectedServer::Node(one).check(&node, None), Ok(()));
    for (expected, identity) in [
        (ExpectedServer::AnyNode, &user),
        (ExpectedServer::Node(one), &user),
        (ExpectedServer::Node(other), &node),
    ] {
        assert!(matches!(
            expected.check(identity, None),
            Err(CertificateError::OtherPeer { .. })
        ));
    }
    assert!(matches!(
        ExpectedServer::AnyNode.check(&node, Some(theirs)),
        Err(CertificateError::OtherCluster { .. })
    ));
}
