use super::*;
use crate::testing::{TestClock, TestCluster};

#[test]
fn credentials_that_do_not_belong_together_are_refused() {
    let cluster = TestCluster::new();
    let clock: Clock = TestClock::new();
    let now = now(&clock);
    let proper = cluster.node();
    assert!(Trust::of_node(&proper, now).is_ok());

    let other_key = NodeCredentials {
        key: cluster.node().key,
        ..proper.clone()
    };
    assert!(matches!(
        Trust::of_node(&other_key, now),
        Err(TlsError::OtherKey { .. })
    ));
    assert!(matches!(
        OwnCertificate::new(&other_key),
        Err(TlsError::Rustls(_))
    ));
    let other_ca = NodeCredentials {
        ca: TestCluster::new().ca().clone(),
        ..proper.clone()
    };
    assert!(matches!(
        node_client_config(&other_ca, ExpectedServer::AnyNode, clock.clone()),
        Err(TlsError::Own(CertificateError::OtherIssuer))
    ));
    let no_ca = NodeCredentials {
        ca: proper.certificate.clone(),
        ..proper.clone()
    };
    assert!(matches!(
        Trust::of_node(&no_ca, now),
        Err(TlsError::Ca(CertificateError::NotCa))
    ));
    let name = crate::identity::UserName::owner();
    let user = NodeCredentials {
        certificate: cluster.leaf(
            &Identity::user(cluster.id, name),
            proper.key.public(),
            |_| {},
        ),
        ..proper
    };
    assert!(matches!(
        Trust::of_node(&user, now),
        Err(TlsError::Own(CertificateError::OtherPeer { .. }))
    ));
}

#[test]
fn a_peer_is_what_it_has_proven() {
    let cluster = TestCluster::new();
    let clock: Clock = TestClock::new();
    let node = cluster.node();
    let (trust, id) = Trust::of_node(&node, now(&clock)).expect("proper");
    let judge = |certificates: &[CertificateDer<'_>]| trust.judge(certificates, now(&clock));

    assert_eq!(judge(&[]), Ok(PeerCertificate::None));
    let key = SigningKey::generate();
    assert_eq!(
        judge(&[certificates::self_signed(&key)]),
        Ok(PeerCertificate::Possession(key.public()))
    );
    let peer = judge(std::slice::from_ref(&node.certificate)).expect("a member");
    assert_eq!(peer.identity().and_then(Identity::node_id), Some(id));
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
    let user = Identity::user(ours, crate::identity::UserName::owner());

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
