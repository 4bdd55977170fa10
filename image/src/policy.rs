//! Signed PCR policies: a builder's signature over the value of PCR 11 that its image gives.
//!
//! A secret that a TPM has sealed under the builder's public key is unsealed by every image that carries such a
//! signature for itself, so the next release of the same builder opens it and no other image does. The UKI has the key in
//! its section `.pcrpkey` (PEM) and the signature in `.pcrsig`, in systemd's JSON:
//!
//! ```text
//! {"sha256":[{"pcrs":[11],"pkfp":"<hex>","pol":"<hex>","sig":"<base64>"}]}
//! ```
//!
//! `pol` is the digest of the policy ([`Pcr::policy`]), `sig` the signature with these 32 bytes as message, `pkfp` the
//! SHA-256 digest of the public key without its algorithm, that is of the content of SubjectPublicKeyInfo's bit string,
//! as in systemd. The stub passes both sections to the kernel as `/.extra/tpm2-pcr-signature.json` and
//! `/.extra/tpm2-pcr-public-key.pem`.
//!
//! The keys are those that every TPM 2.0 can verify with: ECDSA over P-256, and RSA with 2048 bits and the exponent 65537.
//! Signatures are deterministic (RFC 6979; PKCS #1 v1.5), so a signed image is as reproducible as an unsigned one for
//! whoever has the key. ring's ECDSA is not deterministic; that is why P-256 is the crate p256's here.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use p256::ecdsa::signature::Signer;
use p256::pkcs8::der::Encode;
use p256::pkcs8::der::asn1::{AnyRef, BitStringRef};
use p256::pkcs8::spki::{AlgorithmIdentifierRef, SubjectPublicKeyInfoRef};
use p256::pkcs8::{EncodePublicKey, ObjectIdentifier, PrivateKeyInfoRef};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};

use crate::pcr::{Pcr, sha256};

/// The register that the stub measures the UKI's sections into.
const UKI_PCR: u8 = 11;
/// Bytes of the only RSA modulus that is accepted.
const MODULUS: usize = 256;
/// The end of RSAPublicKey in DER with the exponent 65537.
const EXPONENT: &[u8] = &[2, 3, 1, 0, 1];

const ID_EC_PUBLIC_KEY: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const RSA_ENCRYPTION: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");

const PRIVATE_KEY: &str = "PRIVATE KEY";
const PUBLIC_KEY: &str = "PUBLIC KEY";

/// Why a key cannot sign policies.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file is not one PEM block.
    #[error("expected one PEM block \"{PRIVATE_KEY}\" (PKCS #8, not encrypted), got {0}")]
    Pem(String),
    /// The block is not PKCS #8.
    #[error("expected PKCS #8 in the PEM block, got {0}")]
    Pkcs8(String),
    /// A key that not every TPM can verify with.
    #[error(
        "expected a key of ECDSA P-256, or of RSA with 2048 bits and the exponent 65537, got {0}"
    )]
    Kind(String),
    /// The random number generator or the encoder failed.
    #[error("cannot make a key: {0}")]
    Generate(&'static str),
    /// The signature failed.
    #[error("cannot sign: {0}")]
    Sign(&'static str),
}

/// The builder's key. Without a printable form.
pub struct PolicyKey {
    private: Private,
    /// SubjectPublicKeyInfo in DER.
    public: Vec<u8>,
    /// The content of its bit string.
    bits: Vec<u8>,
}

enum Private {
    P256(Box<p256::ecdsa::SigningKey>),
    Rsa(Box<RsaKeyPair>),
}

impl fmt::Debug for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyKey({})", self.fingerprint())
    }
}

impl PolicyKey {
    /// Makes a new P-256 key, in the form that [`PolicyKey::parse`] reads.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn generate() -> Result<String, KeyError> {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)
            .map_err(|_| KeyError::Generate("no random numbers"))?;
        Ok(to_pem(PRIVATE_KEY, key.as_ref()))
    }

    /// Reads a private key: PKCS #8 in PEM.
    ///
    /// # Errors
    /// If it is in another form, or of another kind.
    pub fn parse(text: &[u8]) -> Result<PolicyKey, KeyError> {
        let block = pem::parse(text).map_err(|error| KeyError::Pem(error.to_string()))?;
        if block.tag() != PRIVATE_KEY {
            return Err(KeyError::Pem(format!("\"{}\"", block.tag())));
        }
        let info = PrivateKeyInfoRef::try_from(block.contents())
            .map_err(|error| KeyError::Pkcs8(error.to_string()))?;
        match info.algorithm.oid {
            ID_EC_PUBLIC_KEY => PolicyKey::of_p256(info),
            RSA_ENCRYPTION => PolicyKey::of_rsa(block.contents()),
            other => Err(KeyError::Kind(format!("the algorithm {other}"))),
        }
    }

    fn of_p256(info: PrivateKeyInfoRef<'_>) -> Result<PolicyKey, KeyError> {
        let other = |error: &dyn fmt::Display| KeyError::Kind(format!("another curve ({error})"));
        let secret = p256::SecretKey::try_from(info).map_err(|error| other(&error))?;
        let key = p256::ecdsa::SigningKey::from(secret);
        let point = key.verifying_key();
        let public = point.to_public_key_der().map_err(|error| other(&error))?;
        Ok(PolicyKey {
            bits: point.to_sec1_point(false).as_bytes().to_vec(),
            public: public.as_bytes().to_vec(),
            private: Private::P256(Box::new(key)),
        })
    }

    fn of_rsa(der: &[u8]) -> Result<PolicyKey, KeyError> {
        let other = |what: String| KeyError::Kind(format!("an RSA key {what}"));
        let key = RsaKeyPair::from_pkcs8(der).map_err(|error| other(format!("({error})")))?;
        let bytes = key.public().modulus_len();
        if bytes != MODULUS {
            return Err(other(format!("with {} bits", 8 * bytes)));
        }
        let bits = key.public().as_ref().to_vec();
        if !bits.ends_with(EXPONENT) {
            return Err(other("with another exponent".to_owned()));
        }
        let unencodable = |error: p256::pkcs8::der::Error| other(format!("({error})"));
        let public = SubjectPublicKeyInfoRef {
            algorithm: AlgorithmIdentifierRef {
                oid: RSA_ENCRYPTION,
                parameters: Some(AnyRef::NULL),
            },
            subject_public_key: BitStringRef::from_bytes(&bits).map_err(unencodable)?,
        };
        Ok(PolicyKey {
            public: public.to_der().map_err(unencodable)?,
            bits,
            private: Private::Rsa(Box::new(key)),
        })
    }

    /// The public key, for the section `.pcrpkey`.
    pub fn public_pem(&self) -> String {
        to_pem(PUBLIC_KEY, &self.public)
    }

    /// By which signatures name the key.
    fn fingerprint(&self) -> String {
        hex::encode(sha256(&self.bits))
    }

    /// The signature for this value of PCR 11, for the section `.pcrsig`.
    ///
    /// # Errors
    /// If the library cannot sign.
    pub fn sign(&self, pcr_11: Pcr) -> Result<String, KeyError> {
        let policy = pcr_11.policy(UKI_PCR);
        let signature = self.signature(&policy)?;
        let entry = serde_json::json!({
            "pcrs": [UKI_PCR],
            "pkfp": self.fingerprint(),
            "pol": hex::encode(policy),
            "sig": STANDARD.encode(signature),
        });
        Ok(serde_json::json!({ "sha256": [entry] }).to_string())
    }

    fn signature(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        match &self.private {
            Private::P256(key) => {
                let signature: p256::ecdsa::Signature = key
                    .try_sign(message)
                    .map_err(|_| KeyError::Sign("ECDSA failed"))?;
                Ok(signature.to_der().as_bytes().to_vec())
            }
            Private::Rsa(key) => {
                let mut signature = vec![0; MODULUS];
                // Random numbers blind the computation; the signature does not depend on them.
                key.sign(
                    &RSA_PKCS1_SHA256,
                    &SystemRandom::new(),
                    message,
                    &mut signature,
                )
                .map_err(|_| KeyError::Sign("RSA failed"))?;
                Ok(signature)
            }
        }
    }
}

fn to_pem(tag: &str, der: &[u8]) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new(tag, der), config)
}
