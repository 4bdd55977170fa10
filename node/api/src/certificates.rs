//! Verification of certificates.
//!
//! Hearth has three kinds: the cluster's CA, the *leaf* that the CA issues to a node or a user, and
//! the *possession* certificate, which a caller signs for itself before it has a leaf and which
//! only states "I hold this key". All are signed with Ed25519, and a peer presents exactly one.
//!
//! Keys are Ed25519, too. A leaf may have an ECDSA P-256 key instead, for TLS with programs that do
//! not offer Ed25519. It names the Ed25519 key of its holder in a second URI ([`key_uri`]), and that
//! key is what [`Leaf::public_key`] is: whoever compares it with a record need not know which of the
//! two leaves a peer has presented. The leaves of nodes may have DNS names, which clients of others
//! compare with the name that they have connected to. Nothing here depends on them.
//!
//! The general rules of web PKI allow far more: chains, name constraints, many algorithms. Here a
//! certificate is either exactly one of these kinds or rejected with the reason, so this module
//! checks the few properties itself instead of configuring a general verifier. Time is an argument:
//! nothing here reads a clock.

use std::time::Duration;

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose,
    PublicKeyData, SerialNumber,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_SIG_ED25519};
use x509_parser::prelude::FromDer;
use x509_parser::x509::{AlgorithmIdentifier, X509Version};

use crate::identity::{
    ClusterId, Identity, IdentityError, KeyError, PublicKey, SigningKey, Subject,
};

/// Larger certificates are rejected before they are parsed. Ours have a few hundred bytes.
const MAX_DER_SIZE: usize = 16 * 1024;

/// Why a certificate is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// Not exactly one certificate.
    #[error("expected exactly one certificate, got {found}")]
    Chain {
        /// The number of certificates.
        found: usize,
    },
    /// Not a certificate.
    #[error("not a certificate: {why}")]
    Malformed {
        /// What is wrong with it.
        why: &'static str,
    },
    /// Another algorithm than Ed25519, or than ECDSA P-256 for the key of a leaf.
    #[error("{what} is not Ed25519")]
    NotEd25519 {
        /// Key or signature.
        what: &'static str,
    },
    /// The key is invalid.
    #[error("certificate key")]
    Key(#[from] KeyError),
    /// Not valid yet.
    #[error("not valid before {not_before}, now {now} (Unix seconds)")]
    NotYetValid {
        /// Unix seconds.
        not_before: u64,
        /// Unix seconds.
        now: u64,
    },
    /// Expired.
    #[error("expired at {not_after}, now {now} (Unix seconds)")]
    Expired {
        /// Unix seconds.
        not_after: u64,
        /// Unix seconds.
        now: u64,
    },
    /// A CA certificate instead of a leaf.
    #[error("expected the certificate of a node or user, got a CA certificate")]
    IsCa,
    /// Not a CA certificate where one is required.
    #[error("not a CA certificate")]
    NotCa,
    /// Extended key usages other than those of its kind.
    #[error("extended key usage: expected exactly {wanted}, got {found}")]
    Usage {
        /// The usages of its kind.
        wanted: &'static str,
        /// Its usages.
        found: String,
    },
    /// A critical extension that is not supported.
    #[error("unsupported critical extension {oid}")]
    CriticalExtension {
        /// The extension's object identifier.
        oid: String,
    },
    /// Other names than those of its kind.
    #[error("subject alternative name: expected {wanted}, got {found}")]
    Names {
        /// The names of its kind.
        wanted: &'static str,
        /// The names in the certificate.
        found: String,
    },
    /// The name is not an identity.
    #[error("subject alternative name")]
    Identity(#[from] IdentityError),
    /// Of another cluster.
    #[error("identity: expected cluster {wanted}, got cluster {found}")]
    OtherCluster {
        /// The expected cluster.
        wanted: ClusterId,
        /// The certificate's cluster.
        found: ClusterId,
    },
    /// Another peer than the expected one.
    #[error("expected {wanted}, got {found}")]
    OtherPeer {
        /// The expected peer.
        wanted: String,
        /// The certificate's identity.
        found: Identity,
    },
    /// Issued by another CA.
    #[error("not issued by this cluster's CA")]
    OtherIssuer,
    /// A self-signed certificate where an issued one is required.
    #[error("self-signed certificate: expected one issued by the cluster")]
    SelfSigned,
    /// The signature is invalid.
    #[error("invalid certificate signature")]
    Signature,
    /// The CA certificate itself is not valid now.
    #[error("cluster CA certificate")]
    Ca(#[source] Box<CertificateError>),
}

/// The cluster's CA certificate: parsed, a CA, Ed25519, self-signed. Its validity is checked each
/// time a certificate is verified by it.
#[derive(Clone, Debug)]
pub struct ClusterCa {
    certificate: CertificateDer<'static>,
    public_key: PublicKey,
    subject: Vec<u8>,
    validity: Validity,
}

impl ClusterCa {
    /// Parses and checks everything but the validity.
    pub fn parse(der: &[u8]) -> Result<Self, CertificateError> {
        let parsed = Parsed::from_der(der)?;
        let basic = parsed
            .certificate
            .basic_constraints()
            .map_err(|_| malformed("basic constraints"))?;
        if !basic.is_some_and(|basic| basic.value.ca) {
            return Err(CertificateError::NotCa);
        }
        let usage = parsed
            .certificate
            .key_usage()
            .map_err(|_| malformed("key usage"))?;
        if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
            return Err(CertificateError::NotCa);
        }
        let public_key = parsed.ed25519()?;
        parsed.check_signature(&public_key)?;
        Ok(Self {
            certificate: CertificateDer::from(der.to_vec()),
            public_key,
            subject: parsed.certificate.subject().as_raw().to_vec(),
            validity: parsed.validity,
        })
    }

    /// The certificate, DER.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The CA's public key.
    pub fn public_key(&self) -> PublicKey {
        self.public_key
    }

    /// Last second of its validity.
    pub fn not_after(&self) -> UnixTime {
        self.validity.not_after()
    }

    /// Verifies a leaf: issued by this CA, valid now (as is the CA), with an identity and exactly
    /// the usages of its kind.
    pub fn verify(&self, der: &[u8], now: UnixTime) -> Result<Leaf, CertificateError> {
        self.validity
            .check(now)
            .map_err(|error| CertificateError::Ca(Box::new(error)))?;
        self.verify_issued(der, |validity| validity.check(now))
    }

    /// The same whatever the time is: for the holder of a leaf, who can renew it.
    pub fn verify_at_any_time(&self, der: &[u8]) -> Result<Leaf, CertificateError> {
        self.verify_issued(der, |_| Ok(()))
    }

    fn verify_issued(
        &self,
        der: &[u8],
        check: impl FnOnce(&Validity) -> Result<(), CertificateError>,
    ) -> Result<Leaf, CertificateError> {
        let parsed = Parsed::from_der(der)?;
        parsed.check_not_ca()?;
        if parsed.certificate.issuer().as_raw() != self.subject {
            return Err(if parsed.is_self_signed() {
                CertificateError::SelfSigned
            } else {
                CertificateError::OtherIssuer
            });
        }
        // The signature first, before anything that it covers.
        parsed
            .check_signature(&self.public_key)
            .map_err(|_| CertificateError::OtherIssuer)?;
        check(&parsed.validity)?;
        let (identity, public_key) = parsed.holder()?;
        parsed.check_usage(match identity.subject {
            Subject::Node(_) => Usage::NODE,
            Subject::User(_) => Usage::USER,
        })?;
        Ok(Leaf {
            identity,
            public_key,
            not_after: parsed.validity.min_end(&self.validity),
        })
    }
}

/// The content of a verified leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Its identity.
    pub identity: Identity,
    /// The public key of its holder: its own key, or the one that a leaf with a P-256 key names.
    pub public_key: PublicKey,
    /// Last second in which it is valid: the end of its own validity or of the CA's.
    pub not_after: UnixTime,
}

impl Leaf {
    /// Rejects a leaf of another cluster.
    pub fn of_cluster(self, wanted: ClusterId) -> Result<Self, CertificateError> {
        let found = self.identity.cluster;
        if found == wanted {
            Ok(self)
        } else {
            Err(CertificateError::OtherCluster { wanted, found })
        }
    }
}

/// The peer's certificate, if there is exactly one.
pub fn only_one<'a>(
    certificates: &'a [CertificateDer<'a>],
) -> Result<&'a CertificateDer<'a>, CertificateError> {
    match certificates {
        [one] => Ok(one),
        _ => Err(CertificateError::Chain {
            found: certificates.len(),
        }),
    }
}

/// The identity in a certificate that has been verified already.
pub(crate) fn identity(der: &[u8]) -> Result<Identity, CertificateError> {
    Ok(Parsed::from_der(der)?.holder()?.0)
}

/// Last second of the validity of a certificate that has been verified already.
pub(crate) fn not_after(der: &[u8]) -> Result<UnixTime, CertificateError> {
    Ok(Parsed::from_der(der)?.validity.not_after())
}

/// Makes a possession certificate: signed by its own key, without a name.
///
/// It never expires. Its holder proves in the handshake that it holds the key *now*; validity dates
/// would add nothing, and machines that need it may not know the time yet.
pub fn self_signed(key: &SigningKey) -> CertificateDer<'static> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, POSSESSION);
    params.not_before = rcgen::date_time_ymd(1975, 1, 1);
    params.not_after = rcgen::date_time_ymd(9999, 12, 31);
    params.serial_number = Some(SerialNumber::from(1));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params
        .self_signed(&Signer {
            key,
            public: key.public(),
        })
        .expect("fixed parameters and an in-memory key always make a certificate")
        .der()
        .clone()
}

/// Common name of possession certificates, to recognise them in packet captures.
const POSSESSION: &str = "hearth possession";

/// Verifies a possession certificate; returns the key that it proves.
pub fn verify_self_signed(der: &[u8], now: UnixTime) -> Result<PublicKey, CertificateError> {
    let parsed = Parsed::from_der(der)?;
    parsed.check_not_ca()?;
    let public_key = parsed.ed25519()?;
    parsed.check_signature(&public_key)?;
    parsed.validity.check(now)?;
    match parsed.alternative_names()? {
        [] => {}
        names => {
            return Err(CertificateError::Names {
                wanted: "none in a self-signed certificate",
                found: names.len().to_string(),
            });
        }
    }
    parsed.check_usage(Usage::USER)?;
    Ok(public_key)
}

/// The URI in a leaf with a P-256 key that names the Ed25519 key of its holder:
/// `hearth://CLUSTER/key/KEY`, the key in hexadecimal.
pub fn key_uri(cluster: ClusterId, key: &PublicKey) -> String {
    format!("hearth://{cluster}{KEY_PATH}{key}")
}

const KEY_PATH: &str = "/key/";

/// The key that such a URI names; `None` if it is not one.
fn key_of_uri(cluster: ClusterId, uri: &str) -> Option<PublicKey> {
    let (_, key) = uri.split_once(KEY_PATH)?;
    let key = PublicKey::try_from(&hex::decode(key).ok()?[..]).ok()?;
    // One spelling only.
    (key_uri(cluster, &key) == uri).then_some(key)
}

/// Our key in the form that rcgen requires, without copying the secret.
struct Signer<'a> {
    key: &'a SigningKey,
    public: PublicKey,
}

impl PublicKeyData for Signer<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.public.as_bytes()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

impl rcgen::SigningKey for Signer<'_> {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(self.key.sign(message).to_vec())
    }
}

/// Start and end of the validity in Unix seconds, both inclusive.
#[derive(Clone, Copy, Debug)]
struct Validity {
    not_before: u64,
    not_after: u64,
}

impl Validity {
    fn check(&self, now: UnixTime) -> Result<(), CertificateError> {
        let now = now.as_secs();
        if now < self.not_before {
            let not_before = self.not_before;
            Err(CertificateError::NotYetValid { not_before, now })
        } else if now > self.not_after {
            let not_after = self.not_after;
            Err(CertificateError::Expired { not_after, now })
        } else {
            Ok(())
        }
    }

    fn not_after(&self) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(self.not_after))
    }

    fn min_end(&self, other: &Self) -> UnixTime {
        self.not_after().min(other.not_after())
    }
}

/// The exact extended key usages of a kind of certificate.
#[derive(Clone, Copy)]
struct Usage {
    server: bool,
    client: bool,
}

impl Usage {
    const NODE: Self = Self {
        server: true,
        client: true,
    };
    const USER: Self = Self {
        server: false,
        client: true,
    };

    const fn name(self) -> &'static str {
        match (self.server, self.client) {
            (true, true) => "serverAuth and clientAuth",
            (true, false) => "serverAuth",
            (false, true) => "clientAuth",
            (false, false) => "none",
        }
    }
}

/// The key in a certificate.
#[derive(Clone, Copy)]
enum Key {
    Ed25519(PublicKey),
    /// Whether it is a point of the curve is checked with the signature of a handshake.
    P256,
}

/// A certificate that is well-formed; nothing else has been checked.
struct Parsed<'a> {
    certificate: X509Certificate<'a>,
    key: Key,
    validity: Validity,
}

const fn malformed(why: &'static str) -> CertificateError {
    CertificateError::Malformed { why }
}

impl<'a> Parsed<'a> {
    fn from_der(der: &'a [u8]) -> Result<Self, CertificateError> {
        if der.len() > MAX_DER_SIZE {
            return Err(malformed("larger than 16 KiB"));
        }
        let (rest, certificate) =
            X509Certificate::from_der(der).map_err(|_| malformed("not X.509 in DER"))?;
        if !rest.is_empty() {
            return Err(malformed("trailing data"));
        }
        if certificate.version() != X509Version::V3 {
            return Err(malformed("not version 3"));
        }
        let is_ed25519 = |algorithm: &AlgorithmIdentifier<'_>| {
            algorithm.algorithm == OID_SIG_ED25519 && algorithm.parameters.is_none()
        };
        let spki = certificate.public_key();
        let key = if is_ed25519(&spki.algorithm) {
            Key::Ed25519(PublicKey::try_from(spki.subject_public_key.data.as_ref())?)
        } else if is_p256(&spki.algorithm) {
            Key::P256
        } else {
            return Err(CertificateError::NotEd25519 { what: "key" });
        };
        if !is_ed25519(&certificate.signature_algorithm)
            || !is_ed25519(&certificate.tbs_certificate.signature)
        {
            return Err(CertificateError::NotEd25519 { what: "signature" });
        }
        let seconds = |time: x509_parser::time::ASN1Time| {
            // Times before 1970 are before any time that matters here.
            u64::try_from(time.timestamp()).unwrap_or(0)
        };
        let validity = Validity {
            not_before: seconds(certificate.validity().not_before),
            not_after: seconds(certificate.validity().not_after),
        };
        let parsed = Self {
            certificate,
            key,
            validity,
        };
        parsed.check_envelope(der)?;
        parsed.check_extensions()?;
        Ok(parsed)
    }

    /// The signature covers the inner part only, and the parser is lenient about the envelope. With
    /// Ed25519 there is exactly one valid encoding of it; checking it ensures that a certificate
    /// has no second encoding.
    fn check_envelope(&self, der: &[u8]) -> Result<(), CertificateError> {
        /// The algorithm identifier, and the header of a bit string of 64 bytes.
        const BETWEEN: [u8; 10] = [0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 65, 0];
        let inner = self.certificate.tbs_certificate.as_ref();
        let signature = self.certificate.signature_value.data.as_ref();
        let content = [inner, &BETWEEN, signature].concat();
        let [.., high, low] = content.len().to_be_bytes();
        let spelling = match content.len() {
            0..=0x7f => [&[0x30, low], &content[..]].concat(),
            0x80..=0xff => [&[0x30, 0x81, low], &content[..]].concat(),
            _ => [&[0x30, 0x82, high, low], &content[..]].concat(),
        };
        if der == spelling {
            Ok(())
        } else {
            Err(malformed(
                "not the canonical encoding of a signed certificate",
            ))
        }
    }

    /// Each extension at most once, and no critical one that is not checked here.
    fn check_extensions(&self) -> Result<(), CertificateError> {
        let extensions = self.certificate.extensions();
        for (index, extension) in extensions.iter().enumerate() {
            if extensions[..index].iter().any(|e| e.oid == extension.oid) {
                return Err(malformed("duplicate extension"));
            }
            let known = matches!(
                extension.parsed_extension(),
                ParsedExtension::BasicConstraints(_)
                    | ParsedExtension::KeyUsage(_)
                    | ParsedExtension::ExtendedKeyUsage(_)
                    | ParsedExtension::SubjectAlternativeName(_)
                    | ParsedExtension::SubjectKeyIdentifier(_)
                    | ParsedExtension::AuthorityKeyIdentifier(_)
            );
            if extension.critical && !known {
                let oid = extension.oid.to_id_string();
                return Err(CertificateError::CriticalExtension { oid });
            }
        }
        Ok(())
    }

    /// The key of a certificate that must have an Ed25519 key.
    fn ed25519(&self) -> Result<PublicKey, CertificateError> {
        match self.key {
            Key::Ed25519(key) => Ok(key),
            Key::P256 => Err(CertificateError::NotEd25519 { what: "key" }),
        }
    }

    fn check_signature(&self, key: &PublicKey) -> Result<(), CertificateError> {
        key.verify(
            self.certificate.tbs_certificate.as_ref(),
            self.certificate.signature_value.data.as_ref(),
        )
        .map_err(|_| CertificateError::Signature)
    }

    fn is_self_signed(&self) -> bool {
        self.certificate.issuer().as_raw() == self.certificate.subject().as_raw()
            && self
                .ed25519()
                .and_then(|key| self.check_signature(&key))
                .is_ok()
    }

    fn check_not_ca(&self) -> Result<(), CertificateError> {
        let basic = self
            .certificate
            .basic_constraints()
            .map_err(|_| malformed("basic constraints"))?;
        let usage = self
            .certificate
            .key_usage()
            .map_err(|_| malformed("key usage"))?;
        if basic.is_some_and(|basic| basic.value.ca)
            || usage.is_some_and(|usage| usage.value.key_cert_sign())
        {
            return Err(CertificateError::IsCa);
        }
        Ok(())
    }

    fn check_usage(&self, wanted: Usage) -> Result<(), CertificateError> {
        let usage = self
            .certificate
            .extended_key_usage()
            .map_err(|_| malformed("extended key usage"))?;
        let refuse = |found: String| CertificateError::Usage {
            wanted: wanted.name(),
            found,
        };
        let Some(usage) = usage else {
            return Err(refuse("none".to_owned()));
        };
        let found = Usage {
            server: usage.value.server_auth,
            client: usage.value.client_auth,
        };
        let others = usage.value.any
            || usage.value.code_signing
            || usage.value.email_protection
            || usage.value.time_stamping
            || usage.value.ocsp_signing
            || !usage.value.other.is_empty();
        if others {
            return Err(refuse(format!("{} and others", found.name())));
        }
        if (found.server, found.client) != (wanted.server, wanted.client) {
            return Err(refuse(found.name().to_owned()));
        }
        Ok(())
    }

    fn alternative_names(&self) -> Result<&[GeneralName<'a>], CertificateError> {
        let names = self
            .certificate
            .subject_alternative_name()
            .map_err(|_| malformed("subject alternative name"))?;
        Ok(names.map_or(&[], |names| &names.value.general_names))
    }

    /// Whom a leaf certifies, and the holder's key.
    fn holder(&self) -> Result<(Identity, PublicKey), CertificateError> {
        let names = self.alternative_names()?;
        let uris = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
        let uris: Vec<_> = uris.collect();
        let refuse = |wanted| CertificateError::Names {
            wanted,
            found: format!("{} URIs among {} names", uris.len(), names.len()),
        };
        let (identity, key): (Identity, PublicKey) = match (self.key, &uris[..]) {
            (Key::Ed25519(key), [identity]) => (identity.parse()?, key),
            (Key::P256, [identity, key]) => {
                let identity: Identity = identity.parse()?;
                let key = key_of_uri(identity.cluster, key);
                (identity, key.ok_or_else(|| refuse(OF_P256))?)
            }
            (Key::Ed25519(_), _) => return Err(refuse("one identity")),
            (Key::P256, _) => return Err(refuse(OF_P256)),
        };
        let may_have_names = matches!(identity.subject, Subject::Node(_));
        let is_known = |name: &GeneralName<'_>| match name {
            GeneralName::URI(_) => true,
            GeneralName::DNSName(_) | GeneralName::IPAddress(_) => may_have_names,
            _ => false,
        };
        match names.iter().all(is_known) {
            true => Ok((identity, key)),
            false if may_have_names => Err(refuse("URIs, DNS names and IP addresses")),
            false => Err(refuse("URIs")),
        }
    }
}

/// The names of a leaf with a P-256 key.
const OF_P256: &str = "one identity and the URI of an Ed25519 key";

/// Whether this is the algorithm of a P-256 key.
fn is_p256(algorithm: &AlgorithmIdentifier<'_>) -> bool {
    let curve = algorithm
        .parameters
        .as_ref()
        .and_then(|any| any.as_oid().ok());
    algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY && curve == Some(OID_EC_P256)
}

#[cfg(test)]
mod tests;
