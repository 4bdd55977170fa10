use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CustomExtension, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    SanType,
};

use super::*;
use crate::identity::{NodeId, P256Key, UserName};
use crate::testing::{self, NOT_AFTER, NOT_BEFORE, TestCluster, at};

const NOW: u64 = NOT_BEFORE + 1;

/// A cluster, and a node key with an identity.
struct Fixture {
    cluster: TestCluster,
    key: SigningKey,
    node: Identity,
    user: Identity,
}

impl Fixture {
    fn new() -> Self {
        let cluster = TestCluster::new();
        let key = SigningKey::generate();
        Self {
            node: Identity::node(cluster.id, NodeId::from_public_key(&key.public())),
            user: Identity::user(cluster.id, UserName::owner()),
            cluster,
            key,
        }
    }

    /// The result of verifying a leaf whose parameters are modified.
    fn judge(
        &self,
        identity: &Identity,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Result<Leaf, CertificateError> {
        let der = self.cluster.leaf(identity, self.key.public(), change);
        self.cluster.parsed_ca().verify(&der, at(NOW))
    }
}

#[test]
fn proper_leaves_are_believed() {
    let f = Fixture::new();
    for identity in [&f.node, &f.user] {
        let leaf = f.judge(identity, |_| {}).expect("believed");
        assert_eq!(leaf.identity, *identity);
        assert_eq!(leaf.public_key, f.key.public());
        assert_eq!(leaf.not_after, at(NOT_AFTER));
    }
}

#[test]
fn time_is_checked_at_both_ends() {
    let f = Fixture::new();
    let der = f.cluster.leaf(&f.node, f.key.public(), |params| {
        params.not_before += Duration::from_secs(100);
        params.not_after -= Duration::from_secs(100);
    });
    let ca = f.cluster.parsed_ca();
    let first = NOT_BEFORE + 100;
    let last = NOT_AFTER - 100;
    assert!(ca.verify(&der, at(first)).is_ok());
    let leaf = ca.verify(&der, at(last)).expect("valid in its last second");
    assert_eq!(leaf.not_after, at(last));
    assert_eq!(
        ca.verify(&der, at(first - 1)),
        Err(CertificateError::NotYetValid {
            not_before: first,
            now: first - 1
        })
    );
    assert_eq!(
        ca.verify(&der, at(last + 1)),
        Err(CertificateError::Expired {
            not_after: last,
            now: last + 1
        })
    );
    // The clock of a machine with an empty battery, and one far ahead.
    assert!(ca.verify(&der, at(0)).is_err());
    assert!(ca.verify(&der, at(u64::MAX)).is_err());
}

#[test]
fn a_leaf_is_no_better_than_its_ca() {
    let f = Fixture::new();
    let ca = f.cluster.parsed_ca();
    let der = f.cluster.leaf(&f.node, f.key.public(), |params| {
        params.not_before -= Duration::from_secs(100);
        params.not_after += Duration::from_secs(100);
    });
    assert_eq!(
        ca.verify(&der, at(NOW)).expect("valid").not_after,
        at(NOT_AFTER)
    );
    for (now, expired) in [(NOT_BEFORE - 1, false), (NOT_AFTER + 1, true)] {
        match ca.verify(&der, at(now)) {
            Err(CertificateError::Ca(inner)) => {
                assert_eq!(matches!(*inner, CertificateError::Expired { .. }), expired);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn names_are_exactly_one_identity() {
    let f = Fixture::new();
    let dns = || SanType::DnsName("node.example".try_into().expect("ASCII"));
    let names = |names: Vec<SanType>| {
        f.judge(&f.node, |params| params.subject_alt_names = names)
            .expect_err("refused")
    };
    assert!(matches!(names(vec![]), CertificateError::Names { .. }));
    assert!(matches!(names(vec![dns()]), CertificateError::Names { .. }));
    let node = || testing::uri(&f.node.to_string());
    let mail = || SanType::Rfc822Name("node@node.example".try_into().expect("ASCII"));
    assert!(matches!(
        names(vec![node(), mail()]),
        CertificateError::Names { .. }
    ));
    assert!(matches!(
        names(vec![node(), testing::uri(&f.user.to_string())]),
        CertificateError::Names { .. }
    ));
    assert!(matches!(
        names(vec![testing::uri("https://example.com/")]),
        CertificateError::Identity(_)
    ));
}

#[test]
fn uses_are_exactly_those_of_its_kind() {
    use ExtendedKeyUsagePurpose::{Any, ClientAuth, CodeSigning, ServerAuth};
    let f = Fixture::new();
    let judge = |identity: &Identity, uses: Vec<ExtendedKeyUsagePurpose>| {
        f.judge(identity, |params| params.extended_key_usages = uses)
    };
    assert!(judge(&f.node, vec![ClientAuth, ServerAuth]).is_ok());
    for uses in [
        vec![],
        vec![ClientAuth],
        vec![ServerAuth],
        vec![ServerAuth, ClientAuth, CodeSigning],
        vec![ServerAuth, ClientAuth, Any],
        vec![Any],
    ] {
        let refused = judge(&f.node, uses.clone());
        assert!(
            matches!(refused, Err(CertificateError::Usage { .. })),
            "{uses:?}"
        );
    }
    // Both usages where one is allowed: a user that could act as a server.
    for uses in [
        vec![],
        vec![ServerAuth],
        vec![ServerAuth, ClientAuth],
        vec![ClientAuth, Any],
    ] {
        let refused = judge(&f.user, uses.clone());
        assert!(
            matches!(refused, Err(CertificateError::Usage { .. })),
            "{uses:?}"
        );
    }
}

#[test]
fn a_ca_is_no_leaf_and_a_leaf_no_ca() {
    let f = Fixture::new();
    let ca = f.cluster.parsed_ca();
    assert_eq!(
        ca.verify(f.cluster.ca(), at(NOW)),
        Err(CertificateError::IsCa)
    );
    let with_constraints = f.judge(&f.node, |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    assert_eq!(with_constraints, Err(CertificateError::IsCa));
    let with_usage = f.judge(&f.node, |params| {
        params.key_usages.push(KeyUsagePurpose::KeyCertSign);
    });
    assert_eq!(with_usage, Err(CertificateError::IsCa));

    let leaf = f.cluster.leaf(&f.node, f.key.public(), |_| {});
    assert_eq!(ClusterCa::parse(&leaf).err(), Some(CertificateError::NotCa));
    let own = self_signed(&f.key);
    assert_eq!(ClusterCa::parse(&own).err(), Some(CertificateError::NotCa));
    let no_signing = TestCluster::with_ca(|params| {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    });
    assert_eq!(
        ClusterCa::parse(no_signing.ca()).err(),
        Some(CertificateError::NotCa)
    );
}

#[test]
fn other_cas_are_refused() {
    let f = Fixture::new();
    // Same name, same form, other key.
    let other = TestCluster::new();
    let der = other.leaf(&f.node, f.key.public(), |_| {});
    assert_eq!(
        f.cluster.parsed_ca().verify(&der, at(NOW)),
        Err(CertificateError::OtherIssuer)
    );
    let named = TestCluster::with_ca(|params| {
        *params = {
            let mut named = testing::params("another name");
            named.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            named
        }
    });
    let der = named.leaf(&f.node, f.key.public(), |_| {});
    assert_eq!(
        f.cluster.parsed_ca().verify(&der, at(NOW)),
        Err(CertificateError::OtherIssuer)
    );
    // The right CA, but the leaf is for another cluster.
    let stranger = Identity::node(ClusterId::generate(), NodeId::from_bytes([1; 16]));
    let leaf = f.judge(&stranger, |_| {}).expect("issued");
    assert!(matches!(
        leaf.of_cluster(f.cluster.id),
        Err(CertificateError::OtherCluster { .. })
    ));
}

#[test]
fn a_leaf_with_a_p256_key_names_the_key_of_its_holder() {
    let f = Fixture::new();
    let ca = f.cluster.parsed_ca();
    let p256 = P256Key::generate().public();
    for identity in [&f.node, &f.user] {
        let der = f.cluster.p256_leaf(identity, f.key.public(), p256, |_| {});
        let leaf = ca.verify(&der, at(NOW)).expect("believed");
        assert_eq!(leaf.identity, *identity);
        assert_eq!(leaf.public_key, f.key.public());
    }
    let (node, other) = (testing::uri(&f.node.to_string()), ClusterId::generate());
    let key = |uri: String| testing::uri(&uri);
    let proper = key_uri(f.cluster.id, &f.key.public());
    for names in [
        vec![node.clone()],
        vec![key(proper.clone())],
        vec![key(proper.clone()), node.clone()],
        vec![node.clone(), key(proper.clone()), key(proper.clone())],
        vec![node.clone(), key(proper.to_uppercase())],
        vec![node.clone(), key(key_uri(other, &f.key.public()))],
        vec![node.clone(), key(format!("{proper}00"))],
        vec![node.clone(), key(format!("hearth://{}/key/", f.cluster.id))],
        vec![node.clone(), node.clone()],
    ] {
        let der = f
            .cluster
            .p256_leaf(&f.node, f.key.public(), p256, |params| {
                params.subject_alt_names = names.clone();
            });
        let refused = ca.verify(&der, at(NOW));
        assert!(
            matches!(
                refused,
                Err(CertificateError::Names { .. } | CertificateError::Identity(_))
            ),
            "{names:?}: {refused:?}"
        );
    }
    // One with an Ed25519 key names no other key.
    let two = f.judge(&f.node, |params| {
        params.subject_alt_names = vec![node, key(proper)];
    });
    assert!(matches!(two, Err(CertificateError::Names { .. })));
}

#[test]
fn nodes_may_have_names_and_addresses_and_users_may_not() {
    let f = Fixture::new();
    for name in [
        SanType::DnsName("curator.hearth".try_into().expect("ASCII")),
        SanType::IpAddress([192, 0, 2, 1].into()),
    ] {
        let with_name = |identity: &Identity| {
            f.judge(identity, |params| {
                let own = testing::uri(&identity.to_string());
                params.subject_alt_names = vec![own, name.clone()];
            })
        };
        assert_eq!(with_name(&f.node).expect("believed").identity, f.node);
        assert!(matches!(
            with_name(&f.user),
            Err(CertificateError::Names { .. })
        ));
    }
}

#[test]
fn other_algorithms_are_refused() {
    let f = Fixture::new();
    let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).expect("a key");
    let p256 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("a key");
    let der = f.cluster.issue(&p384, |params| {
        params.subject_alt_names = vec![testing::uri(&f.node.to_string())];
    });
    assert_eq!(
        f.cluster.parsed_ca().verify(&der, at(NOW)),
        Err(CertificateError::NotEd25519 { what: "key" })
    );
    // Self-signed and CAs, too.
    let mut params = testing::params("p256");
    let own = params.self_signed(&p256).expect("a certificate");
    assert_eq!(
        verify_self_signed(own.der(), at(NOW)),
        Err(CertificateError::NotEd25519 { what: "signature" })
    );
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&p256).expect("a certificate");
    assert_eq!(
        ClusterCa::parse(ca.der()).err(),
        Some(CertificateError::NotEd25519 { what: "signature" })
    );
}

#[test]
fn an_rsa_certificate_is_refused() {
    // ring makes no RSA keys, so this one was made once, by `openssl req -x509
    // -newkey rsa:2048 -days 36500`.
    let der = include_bytes!("rsa.der");
    assert_eq!(
        verify_self_signed(der, at(NOW)),
        Err(CertificateError::NotEd25519 { what: "key" })
    );
    let f = Fixture::new();
    assert_eq!(
        f.cluster.parsed_ca().verify(der, at(NOW)),
        Err(CertificateError::NotEd25519 { what: "key" })
    );
}

#[test]
fn a_critical_extension_must_be_known() {
    let f = Fixture::new();
    let extension = |critical| {
        let mut extension = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
        extension.set_criticality(critical);
        extension
    };
    let judge = |critical| {
        f.judge(&f.node, |params| {
            params.custom_extensions = vec![extension(critical)];
        })
    };
    assert!(judge(false).is_ok());
    assert_eq!(
        judge(true),
        Err(CertificateError::CriticalExtension {
            oid: "1.2.3.4".to_owned()
        })
    );
}

#[test]
fn exactly_one_is_presented() {
    let f = Fixture::new();
    let leaf = f.cluster.leaf(&f.node, f.key.public(), |_| {});
    let chain = [leaf, f.cluster.ca().clone()];
    assert!(only_one(&chain[..1]).is_ok());
    for found in [0, 2] {
        assert_eq!(
            only_one(&chain[..found]),
            Err(CertificateError::Chain { found })
        );
    }
}

#[test]
fn a_possession_certificate_proves_its_key_and_nothing_else() {
    let f = Fixture::new();
    let der = self_signed(&f.key);
    for now in [NOT_BEFORE, 1_000_000_000, 4_000_000_000] {
        assert_eq!(verify_self_signed(&der, at(now)), Ok(f.key.public()));
    }
    // A call that needs an identity rejects it for what it is.
    assert_eq!(
        f.cluster.parsed_ca().verify(&der, at(NOW)),
        Err(CertificateError::SelfSigned)
    );
    // An issued certificate is not accepted as self-signed.
    let issued = f.cluster.leaf(&f.user, f.key.public(), |_| {});
    assert_eq!(
        verify_self_signed(&issued, at(NOW)),
        Err(CertificateError::Signature)
    );
    // A self-signed certificate cannot claim an identity.
    let pair = testing::pair(&f.key);
    let mut params = testing::params("self-made");
    params.subject_alt_names = vec![testing::uri(&f.user.to_string())];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let named = params.self_signed(&pair).expect("a certificate");
    assert!(matches!(
        verify_self_signed(named.der(), at(NOW)),
        Err(CertificateError::Names { .. })
    ));
}

#[test]
fn size_is_bounded() {
    let huge = vec![0x30; MAX_DER_SIZE + 1];
    assert!(matches!(
        verify_self_signed(&huge, at(NOW)),
        Err(CertificateError::Malformed { .. })
    ));
}

#[test]
fn no_bit_can_be_changed() {
    let f = Fixture::new();
    let ca = f.cluster.parsed_ca();
    let leaf = f.cluster.leaf(&f.node, f.key.public(), |_| {}).to_vec();
    let own = self_signed(&f.key).to_vec();
    let changed = |der: &[u8], bit: usize| {
        let mut der = der.to_vec();
        der[bit / 8] ^= 1 << (bit % 8);
        der
    };
    for bit in 0..leaf.len() * 8 {
        let judged = ca.verify(&changed(&leaf, bit), at(NOW));
        assert!(judged.is_err(), "bit {bit} of {}", hex::encode(&leaf));
    }
    for bit in 0..own.len() * 8 {
        let judged = verify_self_signed(&changed(&own, bit), at(NOW));
        assert!(judged.is_err(), "bit {bit} of {}", hex::encode(&own));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_byte_can_be_left_out(cut in any::<prop::sample::Index>()) {
        let f = Fixture::new();
        let der = f.cluster.leaf(&f.node, f.key.public(), |_| {});
        let ca = f.cluster.parsed_ca();
        prop_assert!(ca.verify(&der[..cut.index(der.len())], at(NOW)).is_err());
        prop_assert!(ca.verify(&[&der[..], &[0]].concat(), at(NOW)).is_err());
    }

    #[test]
    fn arbitrary_bytes_are_refused(bytes: Vec<u8>) {
        let f = Fixture::new();
        prop_assert!(f.cluster.parsed_ca().verify(&bytes, at(NOW)).is_err());
        prop_assert!(verify_self_signed(&bytes, at(NOW)).is_err());
        prop_assert!(ClusterCa::parse(&bytes).is_err());
    }
}
