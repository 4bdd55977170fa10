//! What a certificate must be to be believed.
//!
//! Hearth has three kinds: the cluster's CA, the *leaf* that the CA issues to
//! a node or a user, and the *possession* certificate, which a caller signs
//! for itself before it has a leaf and which says nothing but "I hold this
//! key". All are Ed25519, and a peer presents exactly one.
//!
//! The general rules of web PKI allow far more than that: chains, name
//! constraints, many algorithms. Here a certificate is either exactly of one
//! of these kinds or refused with the reason, so this module checks the few
//! things there are by itself instead of configuring a general verifier.
//! Time is an argument: nothing here reads a clock.

use std::time::Duration;

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose,
    PublicKeyData, SerialNumber,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::OID_SIG_ED25519;
use x509_parser::prelude::FromDer;
use x509_parser::x509::{AlgorithmIdentifier, X509Version};

use crate::identity::{
    ClusterId, Identity, IdentityError, KeyError, PublicKey, SigningKey, Subject,
};

/// A certificate larger than this is refused before it is parsed. Ours have a
/// few hundred bytes.
const MAX_DER_SIZE: usize = 16 * 1024;

/// Why a certificate is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// Not one certificate.
    #[error("{found} certificates: wanted exactly one")]
    Chain {
        /// How many.
        found: usize,
    },
    /// Not a certificate.
    #[error("not a certificate: {why}")]
    Malformed {
        /// Which part of it is not what.
        why: &'static str,
    },
    /// Another algorithm than Ed25519.
    #[error("{what} is not Ed25519")]
    NotEd25519 {
        /// Key or signature.
        what: &'static str,
    },
    /// The key is none.
    #[error("certificate's key")]
    Key(#[from] KeyError),
    /// Its time has not come.
    #[error("not valid before {not_before} (Unix seconds), and it is {now}")]
    NotYetValid {
        /// Unix seconds.
        not_before: u64,
        /// Unix seconds.
        now: u64,
    },
    /// Its time is over.
    #[error("expired at {not_after} (Unix seconds), and it is {now}")]
    Expired {
        /// Unix seconds.
        not_after: u64,
        /// Unix seconds.
        now: u64,
    },
    /// A CA's certificate in the place of a leaf.
    #[error("a CA certificate where a node's or user's is wanted")]
    IsCa,
    /// A leaf in the place of a CA's certificate.
    #[error("not a CA certificate")]
    NotCa,
    /// For other uses than those of its kind.
    #[error("extended key usage {found}: wanted exactly {wanted}")]
    Usage {
        /// What the kind of certificate has.
        wanted: &'static str,
        /// What this one has.
        found: String,
    },
    /// An extension that must be understood and is not.
    #[error("critical extension {oid} is not known")]
    CriticalExtension {
        /// Its object identifier.
        oid: String,
    },
    /// Not exactly one name, or not a URI.
    #[error("subject alternative name: wanted exactly one URI, found {found}")]
    Names {
        /// What there is.
        found: String,
    },
    /// The name is no identity.
    #[error("subject alternative name")]
    Identity(#[from] IdentityError),
    /// Of another cluster.
    #[error("identity of cluster {found}: wanted cluster {wanted}")]
    OtherCluster {
        /// The cluster it should be of.
        wanted: ClusterId,
        /// The one it is of.
        found: ClusterId,
    },
    /// Another peer than the one that was wanted.
    #[error("{found}: wanted {wanted}")]
    OtherPeer {
        /// Who should be there.
        wanted: String,
        /// Who is.
        found: Identity,
    },
    /// Issued by another CA.
    #[error("not issued by this cluster's CA")]
    OtherIssuer,
    /// A self-signed certificate where an issued one is wanted.
    #[error("self-signed: wanted one that the cluster has issued")]
    SelfSigned,
    /// The signature does not hold.
    #[error("the certificate's signature does not hold")]
    Signature,
    /// The CA itself cannot be relied on.
    #[error("the cluster's CA certificate")]
    Ca(#[source] Box<CertificateError>),
}

/// The cluster's CA certificate: parsed, a CA, Ed25519, signed by itself.
/// Whether it is valid now is asked each time something is judged by it.
#[derive(Clone, Debug)]
pub struct ClusterCa {
    certificate: CertificateDer<'static>,
    public_key: PublicKey,
    subject: Vec<u8>,
    validity: Validity,
}

impl ClusterCa {
    /// Parses and checks, all but the time.
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
        parsed.check_signature(&parsed.public_key)?;
        Ok(Self {
            certificate: CertificateDer::from(der.to_vec()),
            public_key: parsed.public_key,
            subject: parsed.certificate.subject().as_raw().to_vec(),
            validity: parsed.validity,
        })
    }

    /// DER.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The key it signs with.
    pub fn public_key(&self) -> PublicKey {
        self.public_key
    }

    /// Its last second.
    pub fn not_after(&self) -> UnixTime {
        self.validity.not_after()
    }

    /// Judges a leaf: one that this CA has issued, valid now (as is the CA),
    /// with an identity and exactly the uses that its kind has.
    pub fn verify(&self, der: &[u8], now: UnixTime) -> Result<Leaf, CertificateError> {
        self.validity
            .check(now)
            .map_err(|error| CertificateError::Ca(Box::new(error)))?;
        let parsed = Parsed::from_der(der)?;
        parsed.check_not_ca()?;
        if parsed.certificate.issuer().as_raw() != self.subject {
            return Err(if parsed.is_self_signed() {
                CertificateError::SelfSigned
            } else {
                CertificateError::OtherIssuer
            });
        }
        // The signature before anything that it vouches for.
        parsed
            .check_signature(&self.public_key)
            .map_err(|_| CertificateError::OtherIssuer)?;
        parsed.validity.check(now)?;
        let identity: Identity = parsed.uri()?.parse()?;
        parsed.check_usage(match identity.subject {
            Subject::Node(_) => Usage::NODE,
            Subject::User(_) => Usage::USER,
        })?;
        Ok(Leaf {
            identity,
            public_key: parsed.public_key,
            not_after: parsed.validity.min_end(&self.validity),
        })
    }
}

/// What a verified leaf says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Who.
    pub identity: Identity,
    /// With which key.
    pub public_key: PublicKey,
    /// Last second in which it is good: its own end or that of the CA.
    pub not_after: UnixTime,
}

impl Leaf {
    /// Refuses another cluster's.
    pub fn of_cluster(self, wanted: ClusterId) -> Result<Self, CertificateError> {
        let found = self.identity.cluster;
        if found == wanted {
            Ok(self)
        } else {
            Err(CertificateError::OtherCluster { wanted, found })
        }
    }
}

/// The only one of a peer's certificates.
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

/// The last second of a certificate that has been judged already.
/// Whom one is about that has been judged already.
pub(crate) fn identity(der: &[u8]) -> Result<Identity, CertificateError> {
    Ok(Parsed::from_der(der)?.uri()?.parse()?)
}

pub(crate) fn not_after(der: &[u8]) -> Result<UnixTime, CertificateError> {
    Ok(Parsed::from_der(der)?.validity.not_after())
}

/// Makes a possession certificate: signed by its own key, without a name.
///
/// It is valid for all time. Whoever presents it proves in the handshake that
/// it holds the key *now*; the certificate's dates would add nothing, and
/// machines that need it may not know the time yet.
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
        .expect("a fixed form and a key at hand make a certificate")
        .der()
        .clone()
}

/// Common name of possession certificates, for those who look at captures.
const POSSESSION: &str = "hearth possession";

/// Judges a possession certificate; the key that it proves.
pub fn verify_self_signed(der: &[u8], now: UnixTime) -> Result<PublicKey, CertificateError> {
    let parsed = Parsed::from_der(der)?;
    parsed.check_not_ca()?;
    parsed.check_signature(&parsed.public_key)?;
    parsed.validity.check(now)?;
    match parsed.alternative_names()? {
        [] => {}
        names => {
            return Err(CertificateError::Names {
                found: format!("{} in a certificate without an issuer", names.len()),
            });
        }
    }
    parsed.check_usage(Usage::USER)?;
    Ok(parsed.public_key)
}

/// Our key in the form that rcgen asks for, without a copy of the secret.
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

/// From when to when, in Unix seconds, both included.
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

/// What a kind of certificate may be used for: exactly that.
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

/// A certificate whose form has been checked, and nothing else.
struct Parsed<'a> {
    certificate: X509Certificate<'a>,
    public_key: PublicKey,
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
            return Err(malformed("something follows it"));
        }
        if certificate.version() != X509Version::V3 {
            return Err(malformed("not version 3"));
        }
        let is_ed25519 = |algorithm: &AlgorithmIdentifier<'_>| {
            algorithm.algorithm == OID_SIG_ED25519 && algorithm.parameters.is_none()
        };
        let spki = certificate.public_key();
        if !is_ed25519(&spki.algorithm) {
            return Err(CertificateError::NotEd25519 { what: "key" });
        }
        if !is_ed25519(&certificate.signature_algorithm)
            || !is_ed25519(&certificate.tbs_certificate.signature)
        {
            return Err(CertificateError::NotEd25519 { what: "signature" });
        }
        let public_key = PublicKey::try_from(spki.subject_public_key.data.as_ref())?;
        let seconds = |time: x509_parser::time::ASN1Time| {
            // Times before 1970 are times before anything that matters here.
            u64::try_from(time.timestamp()).unwrap_or(0)
        };
        let validity = Validity {
            not_before: seconds(certificate.validity().not_before),
            not_after: seconds(certificate.validity().not_after),
        };
        let parsed = Self {
            certificate,
            public_key,
            validity,
        };
        parsed.check_envelope(der)?;
        parsed.check_extensions()?;
        Ok(parsed)
    }

    /// The signature covers the inner part alone, and the parser is lenient
    /// about what is around it. With Ed25519 there is exactly one right
    /// spelling of that, so that a certificate has no second one.
    fn check_envelope(&self, der: &[u8]) -> Result<(), CertificateError> {
        /// The algorithm's identifier, and the head of a bit string of 64 bytes.
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
            Err(malformed("not the one spelling of a signed certificate"))
        }
    }

    /// Each extension at most once, and none critical that nobody here looks at.
    fn check_extensions(&self) -> Result<(), CertificateError> {
        let extensions = self.certificate.extensions();
        for (index, extension) in extensions.iter().enumerate() {
            if extensions[..index].iter().any(|e| e.oid == extension.oid) {
                return Err(malformed("an extension twice"));
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

    fn check_signature(&self, key: &PublicKey) -> Result<(), CertificateError> {
        key.verify(
            self.certificate.tbs_certificate.as_ref(),
            self.certificate.signature_value.data.as_ref(),
        )
        .map_err(|_| CertificateError::Signature)
    }

    fn is_self_signed(&self) -> bool {
        self.certificate.issuer().as_raw() == self.certificate.subject().as_raw()
            && self.check_signature(&self.public_key).is_ok()
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

    fn uri(&self) -> Result<&'a str, CertificateError> {
        match self.alternative_names()? {
            [GeneralName::URI(uri)] => Ok(uri),
            [_] => Err(CertificateError::Names {
                found: "a name of another kind".to_owned(),
            }),
            names => Err(CertificateError::Names {
                found: names.len().to_string(),
            }),
        }
    }
}

#[cfg(test)]
mod tests;
