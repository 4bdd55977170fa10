//! The stored forms of CAs, compared with the fixtures.

use std::fs;

use hearth_api::{fixture, stored_form};

use super::*;
use crate::layout::Root;

const CLUSTER: ClusterId = ClusterId::from_bytes([0x55; 16]);

fn lifetime() -> Lifetime {
    Lifetime::since_build(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000))
}

/// The CA in a fixture. If the fixture does not exist yet, it is created from this seed, once: the
/// encoding of a certificate depends on a library and may change.
pub(in crate::pki) fn authority(fixture: &[u8], name: &str, seed: u8) -> Authority {
    let key = SigningKey::from_seed([seed; 32]);
    if fixture.is_empty() {
        let mut params = parameters(name, lifetime()).unwrap();
        params.serial_number = Some(SerialNumber::from_slice(&[seed; 16]));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&Signer(&key, key.public())).unwrap();
        return Authority {
            certificate: certificate.der().clone(),
            key,
            lifetime: lifetime(),
        };
    }
    let read = Authority::from_stored(&StoredAuthority::decode(fixture).unwrap()).unwrap();
    is_that(&read, name, seed);
    read
}

/// Asserts that this is the CA with this name and the key of this seed.
pub(in crate::pki) fn is_that(authority: &Authority, name: &str, seed: u8) {
    assert_eq!(*authority.key.expose_seed(), [seed; 32]);
    assert_eq!(authority.lifetime, lifetime());
    let (_, parsed) = x509_parser::parse_x509_certificate(&authority.certificate).unwrap();
    assert_eq!(parsed.subject().to_string(), format!("CN={name}"));
    assert_eq!(parsed.raw_serial(), [seed; 16]);
    assert!(parsed.is_ca());
}

fn cluster_name() -> String {
    format!("hearth cluster {CLUSTER}")
}

fn etcd_name() -> String {
    format!("hearth etcd {CLUSTER}")
}

fn both() -> Authorities {
    Authorities {
        cluster: authority(fixture!("authority-cluster.pb"), &cluster_name(), 0x21),
        etcd: authority(fixture!("authority-etcd.pb"), &etcd_name(), 0x23),
    }
}

/// As stored in etcd.
#[test]
fn the_stored_form_of_an_authority_stays() {
    let Authorities { cluster, etcd } = both();
    let encode = |authority: &Authority| authority.to_stored().encode_to_vec();
    stored_form!("authority-cluster.pb", encode(&cluster));
    stored_form!("authority-etcd.pb", encode(&etcd));
}

fn place() -> (tempfile::TempDir, layout::Etcd) {
    let directory = tempfile::tempdir().unwrap();
    let root = Root::under(directory.path());
    fs::create_dir(root.data.path()).unwrap();
    root.data.make_directories().unwrap();
    (directory, root.data.etcd())
}

/// As stored on the disk of the bootstrapping node, before and after the keys are removed.
#[test]
fn the_stored_form_of_a_founding_stays() {
    let node_key = NodeKey::from_seed([0x22; 32]);
    let founder = Bootstrapper {
        cluster_id: CLUSTER,
        node_id: NodeId::from_bytes([0x11; 16]),
        node_key: &node_key,
    };
    let (_directory, etcd) = place();
    let path = etcd.authorities();
    let cluster = NewCluster::with(both(), &founder).unwrap();
    write_all(&etcd, &founder, &cluster).unwrap();
    let whole = stored_form!("authorities.pb", fs::read(&path).unwrap());
    remove_authority_keys(&etcd).unwrap();
    let keyless = stored_form!("authorities-without-keys.pb", fs::read(&path).unwrap());

    let (_directory, etcd) = place();
    let path = etcd.authorities();
    fs::write(&path, whole).unwrap();
    assert!(has_authority_keys(&etcd).unwrap());
    let read = load(&etcd, CLUSTER).unwrap();
    is_that(&read.cluster, &cluster_name(), 0x21);
    is_that(&read.etcd, &etcd_name(), 0x23);
    let certificate = both().cluster.certificate;
    let make = || panic!("there are some");
    assert_eq!(found(&etcd, &founder, make).unwrap(), certificate);
    fs::write(&path, keyless).unwrap();
    assert!(!has_authority_keys(&etcd).unwrap());
    assert!(matches!(
        load(&etcd, CLUSTER),
        Err(PkiError::KeyRemoved { which: "cluster" })
    ));
    assert_eq!(found(&etcd, &founder, make).unwrap(), certificate);
}

/// The files for etcd's peer connections. etcd reads them.
#[test]
fn the_stored_form_of_peer_files_stays() {
    let (_directory, etcd) = place();
    let peer = etcd.peer();
    let key = NodeKey::from_seed([0x22; 32]);
    save_peer(&peer, &key, b"a certificate", b"an authority").unwrap();
    let read = |path| fs::read(path).unwrap();
    let ca = stored_form!("peer-ca.pem", read(peer.ca()));
    assert_eq!(pem::parse(ca).unwrap().contents(), b"an authority");
    let certificate = stored_form!("peer-certificate.pem", read(peer.certificate()));
    assert_eq!(
        pem::parse(certificate).unwrap().contents(),
        b"a certificate"
    );
    let stored = stored_form!("peer-key.pem", read(peer.key()));
    let stored = String::from_utf8(stored).unwrap();
    let read = NodeKey::from_pkcs8_pem(&stored).unwrap();
    assert_eq!(*read.expose_seed(), [0x22; 32]);
}
