use std::fs;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use hearth_api::certificates::{CertificateError, ClusterCa};
use hearth_api::hosts::Host;
use hearth_api::identity::P256Key;
use hearth_base::supervisor::Failure;
use proptest::prelude::*;
use rustls_pki_types::UnixTime;

use super::*;
use crate::layout::Root;

const DAY: u64 = 24 * 3600;
/// For how long leaves are issued here.
const VALID: Duration = Duration::from_secs(1000);

fn build_time() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

fn at(seconds_after_build: i64) -> UnixTime {
    let seconds = 1_800_000_000_i64 + seconds_after_build;
    UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(seconds).unwrap()))
}

/// A data partition in a temporary directory, and a node that bootstraps on it.
struct Site {
    _directory: tempfile::TempDir,
    etcd: layout::Etcd,
    node_key: NodeKey,
    cluster_id: ClusterId,
}

impl Site {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::under(directory.path());
        fs::create_dir(root.data.path()).unwrap();
        root.data.make_directories().unwrap();
        Self {
            etcd: root.data.etcd(),
            _directory: directory,
            node_key: NodeKey::from_seed([7; 32]),
            cluster_id: ClusterId::from_bytes([9; 16]),
        }
    }

    fn found(&self) -> Result<CertificateDer<'static>, PkiError> {
        self.found_as(self.cluster_id)
    }

    fn found_as(&self, cluster_id: ClusterId) -> Result<CertificateDer<'static>, PkiError> {
        let founder = Bootstrapper {
            cluster_id,
            node_id: NodeId::from_public_key(&self.node_key.public()),
            node_key: &self.node_key,
        };
        found(&self.etcd, &founder, || {
            NewCluster::make(&founder, Lifetime::since_build(build_time()))
        })
    }

    fn peer_files(&self) -> [PathBuf; 3] {
        let peer = self.etcd.peer();
        [peer.ca(), peer.certificate(), peer.key()]
    }
}

#[test]
fn what_is_issued_is_believed_for_what_it_is() {
    let site = Site::new();
    let ca = ClusterCa::parse(&site.found().unwrap()).unwrap();
    let authority = load(&site.etcd, site.cluster_id).unwrap().cluster;
    let key = SigningKey::from_seed([3; 32]).public();
    let id = NodeId::from_public_key(&key);

    let named = ["curator.hearth", "192.0.2.7", "2001:db8::7"];
    let named = named.map(|host| host.parse::<Host>().unwrap());
    let node = Holder::node(site.cluster_id, id, key, named.to_vec());
    let user = Holder::user(site.cluster_id, UserName::owner(), key);
    let p256 = P256Key::generate().public();
    let own = Host::Name(id.to_string());
    let of_node: Vec<Host> = std::iter::once(own).chain(named).collect();
    for (holder, identity, expected) in [
        (node, Identity::node(site.cluster_id, id), of_node),
        (
            user,
            Identity::user(site.cluster_id, UserName::owner()),
            Vec::new(),
        ),
    ] {
        let issued = authority.issue_leaf(&holder, build_time(), VALID).unwrap();
        let of_p256 = authority.issue_p256_leaf(&holder, p256, build_time(), VALID);
        for der in [issued, of_p256.unwrap()] {
            let leaf = ca.verify(&der, at(0)).unwrap();
            assert_eq!(leaf.identity, identity);
            assert_eq!(hosts(&der).unwrap(), expected);
            assert_eq!(leaf.public_key, key);
            assert_eq!(leaf.not_after, at(VALID.as_secs() as i64));
        }
    }
}

#[test]
fn a_leaf_ends_with_its_ca_at_the_latest() {
    let site = Site::new();
    let ca = ClusterCa::parse(&site.found().unwrap()).unwrap();
    let authority = load(&site.etcd, site.cluster_id).unwrap().cluster;
    let holder = Holder::user(site.cluster_id, UserName::owner(), site.node_key.public());
    let end = UNIX_EPOCH + Duration::from_secs(ca.not_after().as_secs());
    let last = end - Duration::from_secs(60);
    let leaf = authority.issue_leaf(&holder, last, VALID).unwrap();
    let leaf = ca.verify(&leaf, ca.not_after()).unwrap();
    assert_eq!(leaf.not_after, ca.not_after());
    // With such a clock nothing is issued, and it is said why.
    let (before, day) = (UNIX_EPOCH, Duration::from_secs(DAY));
    for implausible in [before, end, end + 40 * 365 * day] {
        let error = authority
            .issue_leaf(&holder, implausible, VALID)
            .unwrap_err();
        let said = error.to_string();
        let date = crate::date::date(implausible);
        assert!(
            said.starts_with(&format!("the clock says {date}, but")),
            "{said}"
        );
    }
}

#[test]
fn certificates_are_good_from_the_build_on_and_not_for_ever() {
    let site = Site::new();
    let ca = ClusterCa::parse(&site.found().unwrap()).unwrap();
    let authority = load(&site.etcd, site.cluster_id).unwrap().cluster;
    let holder = Holder::user(site.cluster_id, UserName::owner(), site.node_key.public());
    let years = Duration::from_secs(u64::from(CA_LIFETIME_YEARS) * 365 * DAY);
    let leaf = authority.issue_leaf(&holder, build_time(), years).unwrap();
    let years = i64::from(CA_LIFETIME_YEARS) * 365 * DAY as i64;
    // Valid even if a clock is some hours behind its image.
    assert!(ca.verify(&leaf, at(-3600)).is_ok());
    assert!(ca.verify(&leaf, at(years - 2 * DAY as i64)).is_ok());
    assert!(ca.verify(&leaf, at(-2 * DAY as i64)).is_err());
    assert!(ca.verify(&leaf, at(years)).is_err());
}

#[test]
fn the_two_authorities_do_not_mix() {
    let site = Site::new();
    let ca = ClusterCa::parse(&site.found().unwrap()).unwrap();
    let peer = pem::parse(fs::read(site.etcd.peer().certificate()).unwrap()).unwrap();
    assert_eq!(
        ca.verify(peer.contents(), at(0)),
        Err(CertificateError::OtherIssuer)
    );
}

#[test]
fn serial_numbers_differ() {
    let site = Site::new();
    site.found().unwrap();
    let authority = load(&site.etcd, site.cluster_id).unwrap().cluster;
    let holder = Holder::user(site.cluster_id, UserName::owner(), site.node_key.public());
    let serial = || {
        let der = authority.issue_leaf(&holder, build_time(), VALID).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).unwrap();
        parsed.raw_serial().to_vec()
    };
    let (first, second) = (serial(), serial());
    assert_ne!(first, second);
    assert_eq!(first.len(), 16);
}

#[test]
fn founding_again_finds_the_same_authorities() {
    let site = Site::new();
    let first = site.found().unwrap();
    // A power cut that left only a part of the peer files.
    for path in site.peer_files() {
        fs::remove_file(&path).unwrap();
        assert_eq!(site.found().unwrap(), first);
        assert!(path.exists(), "{} should be created again", path.display());
    }
    assert!(has_authority_keys(&site.etcd).unwrap());
}

#[test]
fn what_was_founded_is_never_founded_again() {
    let site = Site::new();
    let first = site.found().unwrap();
    remove_authority_keys(&site.etcd).unwrap();
    remove_authority_keys(&site.etcd).unwrap();
    assert!(!has_authority_keys(&site.etcd).unwrap());
    assert_eq!(site.found().unwrap(), first);
    assert!(matches!(
        load(&site.etcd, site.cluster_id),
        Err(PkiError::KeyRemoved { .. })
    ));

    fs::create_dir(site.etcd.data()).unwrap();
    assert_eq!(site.found().unwrap(), first);
    fs::remove_file(site.etcd.authorities()).unwrap();
    assert!(matches!(site.found(), Err(PkiError::Lost { .. })));
    assert!(!site.etcd.authorities().exists());
}

#[test]
fn the_disk_keeps_no_private_key_of_an_authority_after_the_founding() {
    let site = Site::new();
    site.found().unwrap();
    let keys = load(&site.etcd, site.cluster_id).unwrap();
    let secrets = [&keys.cluster, &keys.etcd].map(|a| a.key.expose_seed().to_vec());
    let holds = |secret: &[u8]| {
        let bytes = fs::read(site.etcd.authorities()).unwrap();
        bytes.windows(secret.len()).any(|window| window == secret)
    };
    assert!(secrets.iter().all(|secret| holds(secret)));
    remove_authority_keys(&site.etcd).unwrap();
    assert!(!secrets.iter().any(|secret| holds(secret)));
}

#[test]
fn another_clusters_authorities_are_not_taken_over() {
    let site = Site::new();
    site.found().unwrap();
    let other = ClusterId::from_bytes([1; 16]);
    let error = site.found_as(other).unwrap_err();
    assert!(matches!(error, PkiError::Foreign { wanted } if wanted == other));
    assert!(load(&site.etcd, other).is_err());
}

#[test]
fn a_newer_form_is_refused() {
    let site = Site::new();
    site.found().unwrap();
    let mut stored = read(&site.etcd.authorities()).unwrap().unwrap();
    stored.version = VERSION + 1;
    fs::write(site.etcd.authorities(), stored.encode_to_vec()).unwrap();
    assert!(matches!(site.found(), Err(PkiError::TooNew { found: 2 })));
}

#[test]
fn a_key_that_is_not_the_certificates_is_refused() {
    let site = Site::new();
    site.found().unwrap();
    let mut stored = load(&site.etcd, site.cluster_id)
        .unwrap()
        .cluster
        .to_stored();
    stored.private_key = SigningKey::generate().expose_pkcs8_der().to_vec();
    assert!(matches!(
        Authority::from_stored(&stored),
        Err(PkiError::Stored(_))
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Corrupt is never treated as absent.
    #[test]
    fn a_spoilt_file_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let site = Site::new();
        fs::write(site.etcd.authorities(), &bytes).unwrap();
        let error = Failure::from(site.found().unwrap_err());
        prop_assert!(!error.to_string().is_empty());
        prop_assert_eq!(fs::read(site.etcd.authorities()).unwrap(), bytes);
    }

    #[test]
    fn arbitrary_records_do_not_panic(certificate: Vec<u8>, private_key: Vec<u8>, version in 0_u32..3) {
        let stored = StoredAuthority { version, certificate, private_key };
        prop_assert!(Authority::from_stored(&stored).is_err());
    }
}
