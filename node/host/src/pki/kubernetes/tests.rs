use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hearth_api::hosts::Host;
use hearth_api::identity::{NodeId, UserName};
use hearth_api::{fixture, stored_form};
use rcgen::PublicKeyData as _;
use x509_parser::prelude::{GeneralName, ParsedExtension, X509Certificate};

use super::*;

const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

fn node() -> NodeId {
    NodeId::from_bytes([5; 16])
}

fn build_time() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

fn authorities() -> Authorities {
    Authorities::make(Lifetime::since_build(build_time())).unwrap()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let names =
        certificate
            .extensions()
            .iter()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) => Some(names),
                _ => None,
            });
    let names = names.map(|names| &names.general_names[..]).unwrap_or(&[]);
    names
        .iter()
        .map(|name| match name {
            GeneralName::DNSName(name) => (*name).to_owned(),
            GeneralName::IPAddress(octets) => match **octets {
                [a, b, c, d] => format!("{a}.{b}.{c}.{d}"),
                _ => format!("{} octets", octets.len()),
            },
            other => panic!("{other:?}"),
        })
        .collect()
}

/// Every kind of certificate, with the subject that Kubernetes must see.
fn all(operator: &UserName) -> Vec<(Certificate<'_>, &'static str)> {
    let (node, address) = (node(), ADDRESS);
    vec![
        (
            Certificate::ApiServer {
                node,
                address,
                service: [10, 224, 0, 1].into(),
                hosts: &[],
            },
            "CN=kube-apiserver",
        ),
        (
            Certificate::ApiServerKubeletClient,
            "CN=kube-apiserver-kubelet-client, O=system:masters",
        ),
        (Certificate::FrontProxyClient, "CN=front-proxy-client"),
        (
            Certificate::ControllerManager,
            "CN=system:kube-controller-manager",
        ),
        (Certificate::Scheduler, "CN=system:kube-scheduler"),
        (
            Certificate::Reconciler,
            "CN=hearth:reconciler, O=system:masters",
        ),
        (
            Certificate::KubeletClient(node),
            "CN=system:node:hearth-05050505050505050505050505050505, O=system:nodes",
        ),
        (
            Certificate::KubeletServer { node, address },
            "CN=system:node:hearth-05050505050505050505050505050505, O=system:nodes",
        ),
        (Certificate::Proxy, "CN=system:kube-proxy"),
        (
            Certificate::Node(node),
            "CN=hearth:node:hearth-05050505050505050505050505050505, O=hearth:nodes",
        ),
        (
            Certificate::Operator(operator),
            "CN=eve, O=hearth:operators",
        ),
    ]
}

#[test]
fn each_says_who_it_is_and_serves_or_calls() {
    let authorities = authorities();
    let eve = UserName::new("eve").unwrap();
    for (what, subject) in all(&eve) {
        let issued = authorities.issue(&what, build_time()).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(issued.certificate()).unwrap();
        assert_eq!(parsed.subject().to_string(), subject);
        let usage = parsed.extended_key_usage().unwrap().unwrap().value;
        let serves = matches!(
            what,
            Certificate::ApiServer { .. } | Certificate::KubeletServer { .. }
        );
        assert_eq!((usage.server_auth, usage.client_auth), (serves, !serves));
        assert_eq!(names(&parsed).is_empty(), !serves, "{what:?}");
        let authority = match what {
            Certificate::FrontProxyClient => &authorities.front_proxy,
            _ => &authorities.kubernetes,
        };
        let (_, ca) = x509_parser::parse_x509_certificate(authority.certificate()).unwrap();
        assert_eq!(parsed.issuer(), ca.subject());
        assert_ne!(parsed.issuer(), parsed.subject());
    }
    let owner = UserName::owner();
    assert_eq!(
        Certificate::Operator(&owner).group(),
        Some("system:masters")
    );
}

#[test]
fn servers_are_known_by_every_name_that_leads_to_them() {
    let authorities = authorities();
    let names_of = |what: Certificate<'_>| {
        let issued = authorities.issue(&what, build_time()).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(issued.certificate()).unwrap();
        names(&parsed)
    };
    let (node, address) = (node(), ADDRESS);
    let id = node.to_string();
    // Each is in the certificate once.
    let hosts = ["api.example", "localhost", "192.0.2.100", "192.0.2.7"];
    let hosts = hosts.map(|host| host.parse::<Host>().unwrap());
    assert_eq!(
        names_of(Certificate::ApiServer {
            node,
            address,
            service: [10, 224, 0, 1].into(),
            hosts: &hosts,
        }),
        [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "localhost",
            "kubernetes.default.svc.cluster.local",
            &id,
            "api.example",
            "10.224.0.1",
            "127.0.0.1",
            "16 octets",
            "192.0.2.7",
            "192.0.2.100",
        ]
    );
    assert_eq!(
        names_of(Certificate::KubeletServer { node, address }),
        [&id, "192.0.2.7"]
    );
}

#[test]
fn they_begin_with_their_authority_and_end_before_it() {
    let authorities = authorities();
    let lifetime = authorities.kubernetes.lifetime;
    let begin = SystemTime::from(lifetime.not_before);
    let end = SystemTime::from(lifetime.not_after);
    let week = Duration::from_secs(7 * 24 * 3600);
    for (now, wanted) in [
        (build_time(), build_time() + LIFETIME),
        // No clock is behind the build time of its image; if one is, nothing breaks.
        (begin - week, begin + LIFETIME),
        (end - week, end),
    ] {
        let issued = authorities.issue(&Certificate::Scheduler, now).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(issued.certificate()).unwrap();
        let not_before = parsed.validity().not_before.timestamp();
        assert_eq!(u64::try_from(not_before).unwrap(), seconds(begin));
        assert_eq!(seconds(issued.not_after()), seconds(wanted));
        let two_thirds = Duration::from_secs(20 * 24 * 3600);
        assert_eq!(
            seconds(issued.renew_at()),
            seconds(wanted - LIFETIME + two_thirds)
        );
        assert_eq!(
            issued.renew_in(issued.renew_at() - week),
            week,
            "a week before it is due"
        );
        assert_eq!(issued.renew_in(issued.not_after()), Duration::ZERO);
    }
    let owner = UserName::owner();
    let issued = authorities
        .issue(&Certificate::Operator(&owner), build_time())
        .unwrap();
    assert_eq!(issued.not_after(), build_time() + OPERATOR_LIFETIME);
    // A worker's are short, because they are all that a deleted one still has.
    let node = NodeId::from_bytes([7; 16]);
    for what in [
        Certificate::KubeletClient(node),
        Certificate::Proxy,
        Certificate::Node(node),
    ] {
        let issued = authorities.issue(&what, build_time()).unwrap();
        let hours = |hours: u64| build_time() + Duration::from_secs(hours * 3600);
        assert_eq!(
            (issued.renew_at(), issued.not_after()),
            (hours(16), hours(24))
        );
    }
}

#[test]
fn a_certificate_belongs_to_its_key() {
    let authorities = authorities();
    let (mine, other) = (SigningKey::generate(), SigningKey::generate());
    let issued = authorities
        .certify(&Certificate::Proxy, mine.public(), build_time())
        .unwrap();
    assert!(KeyAndCertificate::new(&mine, issued.certificate(), LIFETIME).is_ok());
    let error = KeyAndCertificate::new(&other, issued.certificate(), LIFETIME).unwrap_err();
    assert!(error.to_string().contains("another key"), "{error}");
    let longer = [issued.certificate().as_ref(), b"x"].concat();
    assert!(KeyAndCertificate::new(&mine, &longer, LIFETIME).is_err());
    assert!(KeyAndCertificate::new(&mine, b"", LIFETIME).is_err());
}

#[test]
fn what_is_stored_reads_back_or_is_refused() {
    let authorities = authorities();
    let bytes = authorities.encode();
    let again = Authorities::decode(&bytes).unwrap();
    assert_eq!(again.ca_pem(), authorities.ca_pem());
    assert_eq!(again.front_proxy_ca_pem(), authorities.front_proxy_ca_pem());
    assert_eq!(
        again.service_accounts().private_pem().expose(),
        authorities.service_accounts().private_pem().expose()
    );

    let stored = StoredKubernetesAuthorities::decode(&bytes[..]).unwrap();
    let refused = |change: fn(&mut StoredKubernetesAuthorities)| {
        let mut stored = stored.clone();
        change(&mut stored);
        Authorities::decode(&stored.encode_to_vec())
            .err()
            .unwrap()
            .to_string()
    };
    // The format of existing records: ring wrote them, which rcgen uses to generate keys.
    let ring = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let mut older = stored.clone();
    older.service_account_key = ring.serialize_der();
    let older = Authorities::decode(&older.encode_to_vec()).unwrap();
    assert_eq!(
        older.service_accounts().public_pem(),
        pem_of("PUBLIC KEY", &ring.subject_public_key_info())
    );

    assert!(refused(|s| s.version = 0).contains("empty"));
    assert!(refused(|s| s.version = 2).contains("version 2"));
    assert!(refused(|s| s.front_proxy = None).contains("missing"));
    assert!(refused(|s| s.service_account_key.clear()).contains("service accounts"));
    assert!(
        refused(|s| {
            let front_proxy = s.front_proxy.as_ref().unwrap().private_key.clone();
            s.kubernetes.as_mut().unwrap().private_key = front_proxy;
        })
        .contains("do not match")
    );
    assert!(Authorities::decode(b"\xff").is_err());
}

#[test]
fn no_private_key_prints() {
    let issued = authorities()
        .issue(&Certificate::Proxy, build_time())
        .unwrap();
    let secret = issued.key_pem().expose().lines().nth(1).unwrap().to_owned();
    let printed = format!("{issued:?}");
    assert!(printed.contains("redacted") && !printed.contains(&secret));
}

fn openssl(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("openssl").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

/// Checks chains, purposes, names and keys with another implementation.
#[test]
fn openssl_believes_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let write = |name: &str, text: &str| {
        std::fs::write(path(name), text).unwrap();
        path(name)
    };
    let authorities = Authorities::make(Lifetime::since_build(SystemTime::now())).unwrap();
    let ca = write("ca", &authorities.ca_pem());
    let front_proxy_ca = write("front-proxy-ca", &authorities.front_proxy_ca_pem());
    let (certificate, key) = (path("cert"), path("key"));
    let issue = |what: &Certificate<'_>| {
        let issued = authorities.issue(what, SystemTime::now()).unwrap();
        issued
            .save(Path::new(&certificate), Path::new(&key))
            .unwrap();
    };

    let (id, address) = (node(), ADDRESS);
    let public = |from: &[&str]| openssl(&[from, &["-noout", "-pubkey"]].concat()).unwrap();
    for server in [
        Certificate::ApiServer {
            node: id,
            address,
            service: [10, 224, 0, 1].into(),
            hosts: &[],
        },
        Certificate::KubeletServer { node: id, address },
    ] {
        issue(&server);
        let verify = |more: &[&str]| {
            let most = [
                "verify",
                "-x509_strict",
                "-purpose",
                "sslserver",
                "-CAfile",
                &ca,
            ];
            openssl(&[&most[..], more, &[&certificate]].concat())
        };
        verify(&["-verify_hostname", &id.to_string()]).unwrap();
        verify(&["-verify_ip", "192.0.2.7"]).unwrap();
        verify(&["-verify_hostname", "example.org"]).unwrap_err();
        let client = [
            "verify",
            "-purpose",
            "sslclient",
            "-CAfile",
            &ca,
            &certificate,
        ];
        openssl(&client).unwrap_err();
        assert_eq!(
            public(&["x509", "-in", &certificate]),
            openssl(&["pkey", "-in", &key, "-pubout"]).unwrap()
        );
    }
    issue(&Certificate::FrontProxyClient);
    let client = |ca: &str| {
        openssl(&[
            "verify",
            "-purpose",
            "sslclient",
            "-CAfile",
            ca,
            &certificate,
        ])
    };
    client(&front_proxy_ca).unwrap();
    client(&ca).unwrap_err();
    issue(&Certificate::KubeletClient(id));
    client(&ca).unwrap();
    client(&front_proxy_ca).unwrap_err();

    let accounts = authorities.service_accounts();
    let private = write("sa", accounts.private_pem().expose());
    assert_eq!(
        openssl(&["pkey", "-in", &private, "-pubout"]).unwrap(),
        accounts.public_pem().replace("\r\n", "\n")
    );
}

/// As stored in etcd, under the prefix for Kubernetes' keys.
#[test]
fn the_stored_form_stays() {
    use crate::pki::stored_forms::{authority, is_that};

    const NAMES: [&str; 2] = ["hearth kubernetes", "hearth kubernetes front proxy"];
    let fixture = fixture!("etcd-kubernetes-authorities.pb");
    let made = if fixture.is_empty() {
        let service_accounts = p256::SecretKey::from_slice(&[0x29; 32]).unwrap();
        let service_accounts = service_accounts.to_pkcs8_der().unwrap();
        Authorities {
            kubernetes: authority(b"", NAMES[0], 0x25),
            front_proxy: authority(b"", NAMES[1], 0x27),
            service_accounts: ServiceAccountKey::from_pkcs8(service_accounts.as_bytes()).unwrap(),
        }
    } else {
        Authorities::decode(fixture).unwrap()
    };
    is_that(&made.kubernetes, NAMES[0], 0x25);
    is_that(&made.front_proxy, NAMES[1], 0x27);
    let service_accounts = made.service_accounts.private_pem();
    let read = p256::SecretKey::from_pkcs8_pem(service_accounts.expose()).unwrap();
    assert_eq!(read.to_bytes()[..], [0x29; 32]);
    // A new key is encoded in the same form as this one.
    let written = read.to_pkcs8_der().unwrap();
    assert_eq!(written.as_bytes(), &made.service_accounts.pkcs8[..]);
    stored_form!("etcd-kubernetes-authorities.pb", made.encode());
}
