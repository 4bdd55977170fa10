//! An issued certificate, with or without its key, and the time of its renewal.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hearth_api::identity::{PublicKey, SigningKey};
use hearth_sys::files;
use rustls_pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::KubernetesPkiError;
/// A certificate is renewed when this part of its lifetime remains, so that renewals may fail for
/// hours without consequences.
const RENEWAL_PART: u32 = 3;

/// Encodes a certificate in PEM, the format that Kubernetes' programs read.
pub fn to_pem(certificate: &[u8]) -> String {
    pem_of("CERTIFICATE", certificate)
}

pub(super) fn pem_of(kind: &str, der: &[u8]) -> String {
    let lines = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new(kind, der), lines)
}

/// A private key in PEM. Zeroized on drop; not printable.
#[derive(Clone)]
pub struct Pem(Zeroizing<String>);

impl Pem {
    pub(super) fn new(text: Zeroizing<String>) -> Self {
        Self(text)
    }

    fn of(key: &SigningKey) -> Self {
        Self(key.expose_plain_pkcs8_pem())
    }

    /// Returns the key, to be written for the program that uses it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pem(redacted)")
    }
}

/// A certificate and its expiry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    certificate: CertificateDer<'static>,
    public_key: PublicKey,
    not_after: SystemTime,
}

impl Issued {
    /// Parses a certificate in DER. Does not verify the issuer.
    pub fn parse(der: &[u8]) -> Result<Self, KubernetesPkiError> {
        let wrong = KubernetesPkiError::Issued;
        let (rest, parsed) =
            x509_parser::parse_x509_certificate(der).map_err(|_| wrong("is malformed"))?;
        if !rest.is_empty() {
            return Err(wrong("has trailing bytes"));
        }
        let public_key = PublicKey::try_from(&parsed.public_key().subject_public_key.data[..])
            .map_err(|_| wrong("is not for an Ed25519 key"))?;
        Ok(Self {
            certificate: CertificateDer::from(der.to_vec()),
            public_key,
            not_after: parsed.validity().not_after.to_datetime().into(),
        })
    }

    /// The certificate in DER.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The time of expiry.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }
}

/// A certificate and its private key.
#[derive(Clone, Debug)]
pub struct KeyAndCertificate {
    issued: Issued,
    key: Pem,
    lifetime: Duration,
}

impl KeyAndCertificate {
    /// Combines a key and the certificate (DER) issued for it, with the lifetime that such
    /// certificates have ([`Certificate::lifetime`](super::Certificate::lifetime)): it is not in the
    /// certificate, which is valid as long as its CA has been. Fails if the certificate is for
    /// another key.
    pub fn new(
        key: &SigningKey,
        certificate: &[u8],
        lifetime: Duration,
    ) -> Result<Self, KubernetesPkiError> {
        let issued = Issued::parse(certificate)?;
        if issued.public_key != key.public() {
            return Err(KubernetesPkiError::Issued("is for another key"));
        }
        Ok(Self {
            issued,
            key: Pem::of(key),
            lifetime,
        })
    }

    /// The certificate, PEM.
    pub fn certificate_pem(&self) -> String {
        to_pem(&self.issued.certificate)
    }

    /// The certificate, DER.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.issued.certificate
    }

    /// The private key in PKCS #8, PEM.
    pub fn key_pem(&self) -> &Pem {
        &self.key
    }

    /// The time of expiry.
    pub fn not_after(&self) -> SystemTime {
        self.issued.not_after
    }

    /// The time of renewal.
    pub fn renew_at(&self) -> SystemTime {
        self.issued.not_after - self.lifetime / RENEWAL_PART
    }

    /// The time until renewal; zero if it is due.
    pub fn renew_in(&self, now: SystemTime) -> Duration {
        self.renew_at().duration_since(now).unwrap_or_default()
    }

    /// Writes both files, each atomically and readable by root only. Blocks on disk I/O.
    ///
    /// Programs that watch their files may briefly see the new key with the old certificate; they
    /// keep the previous pair until both match.
    pub fn save(&self, certificate: &Path, key: &Path) -> Result<(), KubernetesPkiError> {
        files::write_atomic(key, self.key.expose().as_bytes(), files::PRIVATE_FILE)?;
        files::write_atomic(
            certificate,
            self.certificate_pem().as_bytes(),
            files::PRIVATE_FILE,
        )?;
        Ok(())
    }
}
