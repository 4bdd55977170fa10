//! The key that signs for policies: its public half, by which a secret is bound to all images of one builder, and its
//! private half, with which the builder signs.
//!
//! The kinds are those that TPMs can verify: ECDSA over P-256, the default, and RSA with 2048 bits and the exponent 65537.
//! (No TPM has Ed25519.) A public key of either kind has exactly one encoding in DER, so it is recognized by the bytes
//! before the key itself, and what is accepted is what is written again.

use std::fmt;

use ring::rand::SystemRandom;
use ring::signature::{self, EcdsaKeyPair, KeyPair, RsaKeyPair, RsaPublicKeyComponents};
use zeroize::Zeroizing;

use super::pcr::{Digest, SHA256};
use super::wire::{Malformed, Reader, Writer};

/// SubjectPublicKeyInfo of an uncompressed point on P-256, up to its coordinates.
const ECDSA_PREFIX: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00, 0x04,
];
/// SubjectPublicKeyInfo of an RSA key with 2048 bits, up to RSAPublicKey.
const RSA_PREFIX: &[u8] = &[
    0x30, 0x82, 0x01, 0x22, 0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01,
    0x01, 0x05, 0x00, 0x03, 0x82, 0x01, 0x0f, 0x00,
];
/// RSAPublicKey with 2048 bits, up to the modulus.
const RSA_KEY_PREFIX: &[u8] = &[0x30, 0x82, 0x01, 0x0a, 0x02, 0x82, 0x01, 0x01, 0x00];
/// The rest of it: the exponent 65537.
const RSA_EXPONENT: &[u8] = &[0x02, 0x03, 0x01, 0x00, 0x01];

/// The bytes of a modulus with 2048 bits.
const MODULUS: usize = 256;
/// The bytes of both coordinates of a point on P-256.
const POINT: usize = 64;

/// Why a key is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not PEM, or not one block with the expected label.
    #[error("policy key: expected PEM with the label {expected}, got {got}")]
    Pem {
        /// The label.
        expected: &'static str,
        /// The label that was found, or what the parser says.
        got: String,
    },
    /// A key of another kind.
    #[error(
        "policy key: expected ECDSA over P-256 with an uncompressed point, or RSA with 2048 bits and the exponent 65537, got {0}"
    )]
    Kind(String),
}

/// The public key that verifies signed policies.
#[derive(Clone, PartialEq, Eq)]
pub enum PolicyKey {
    /// ECDSA with SHA-256: both coordinates of a point on P-256.
    EcdsaP256([u8; POINT]),
    /// RSASSA-PKCS1-v1_5 with SHA-256, exponent 65537: the modulus, whose highest bit is set.
    Rsa2048(Box<[u8; MODULUS]>),
}

impl PolicyKey {
    /// From PEM, such as the section `.pcrpkey` of a unified kernel image.
    pub fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        let der = contents("PUBLIC KEY", text)?;
        Self::from_der(&der)
    }

    /// From SubjectPublicKeyInfo in DER.
    pub fn from_der(der: &[u8]) -> Result<Self, KeyError> {
        let other = || KeyError::Kind(format!("a key of {} bytes: {}", der.len(), start(der)));
        if let Some(point) = der.strip_prefix(ECDSA_PREFIX) {
            return Ok(Self::EcdsaP256(point.try_into().map_err(|_| other())?));
        }
        let key = der.strip_prefix(RSA_PREFIX).ok_or_else(other)?;
        Self::from_rsa(key).ok_or_else(other)
    }

    /// From RSAPublicKey in DER.
    fn from_rsa(der: &[u8]) -> Option<Self> {
        let modulus = der.strip_prefix(RSA_KEY_PREFIX)?;
        let modulus: [u8; MODULUS] = modulus.strip_suffix(RSA_EXPONENT)?.try_into().ok()?;
        (modulus[0] & 0x80 != 0).then(|| Self::Rsa2048(Box::new(modulus)))
    }

    /// SubjectPublicKeyInfo in DER.
    pub fn to_der(&self) -> Vec<u8> {
        match self {
            Self::EcdsaP256(point) => [ECDSA_PREFIX, point].concat(),
            Self::Rsa2048(_) => [RSA_PREFIX, &self.key_bits()].concat(),
        }
    }

    /// PEM as in the section `.pcrpkey` of a unified kernel image.
    pub fn to_pem(&self) -> String {
        let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
        pem::encode_config(&pem::Pem::new("PUBLIC KEY", self.to_der()), config)
    }

    /// By which signatures name this key (`pkfp`): the SHA-256 digest of the key without its algorithm, that is of
    /// RSAPublicKey or of the uncompressed point.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&[&self.key_bits()])
    }

    fn key_bits(&self) -> Vec<u8> {
        match self {
            Self::EcdsaP256(point) => [&[4][..], point].concat(),
            Self::Rsa2048(modulus) => [RSA_KEY_PREFIX, &modulus[..], RSA_EXPONENT].concat(),
        }
    }

    /// Whether `signature` (DER for ECDSA, as OpenSSL makes them) is this key's over `message`.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let verified = match self {
            Self::EcdsaP256(_) => signature::UnparsedPublicKey::new(
                &signature::ECDSA_P256_SHA256_ASN1,
                self.key_bits(),
            )
            .verify(message, signature),
            Self::Rsa2048(modulus) => RsaPublicKeyComponents {
                n: &modulus[..],
                e: &[1, 0, 1][..],
            }
            .verify(&signature::RSA_PKCS1_2048_8192_SHA256, message, signature),
        };
        verified.is_ok()
    }

    /// TPMT_PUBLIC: a key that may sign, without a scheme of its own. Its name, and with it every policy, depends on each
    /// byte; the attributes are those that systemd gives to such keys.
    pub(crate) fn public_area(&self) -> Vec<u8> {
        const RSA: u16 = 0x0001;
        const ECC: u16 = 0x0023;
        const NULL: u16 = 0x0010;
        const P256: u16 = 0x0003;
        // userWithAuth, decrypt, sign.
        const ATTRIBUTES: u32 = 1 << 6 | 1 << 17 | 1 << 18;
        let start = |kind| {
            let writer = Writer::new().u16(kind).u16(SHA256).u32(ATTRIBUTES);
            // No policy, no symmetric cipher, no scheme.
            writer.sized(&[]).u16(NULL).u16(NULL)
        };
        let written = match self {
            Self::EcdsaP256(point) => {
                let (x, y) = point.split_at(POINT / 2);
                start(ECC).u16(P256).u16(NULL).sized(x).sized(y)
            }
            // The exponent zero means 65537.
            Self::Rsa2048(modulus) => start(RSA).u16(2048).u32(0).sized(&modulus[..]),
        };
        written.finish().to_vec()
    }

    /// The name by which a policy refers to the key: the hash's identifier and the digest of the public area.
    pub(crate) fn name(&self) -> [u8; 34] {
        name_of(&self.public_area())
    }

    /// TPMT_SIGNATURE of a signature by this key.
    pub(crate) fn tpm_signature(&self, signature: &[u8]) -> Result<Vec<u8>, Malformed> {
        const RSASSA: u16 = 0x0014;
        const ECDSA: u16 = 0x0018;
        let written = match self {
            Self::EcdsaP256(_) => {
                let (r, s) = ecdsa_parts(signature)?;
                Writer::new().u16(ECDSA).u16(SHA256).sized(&r).sized(&s)
            }
            Self::Rsa2048(_) => Writer::new().u16(RSASSA).u16(SHA256).sized(signature),
        };
        Ok(written.finish().to_vec())
    }
}

impl fmt::Debug for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyKey({})", self.fingerprint())
    }
}

/// The name of an object with this public area.
pub(crate) fn name_of(public_area: &[u8]) -> [u8; 34] {
    let mut name = [0; 34];
    name[..2].copy_from_slice(&SHA256.to_be_bytes());
    name[2..].copy_from_slice(&Digest::of(&[public_area]).0);
    name
}

/// The two numbers of Ecdsa-Sig-Value in DER, each with 32 bytes.
fn ecdsa_parts(der: &[u8]) -> Result<([u8; 32], [u8; 32]), Malformed> {
    let mut reader = Reader::new(der);
    reader.expect("ECDSA signature", &[0x30])?;
    let size = reader.u8("size of the ECDSA signature")?;
    let mut inner = Reader::new(reader.bytes("ECDSA signature", size.into())?);
    reader.end()?;
    let mut number = |field| {
        inner.expect(field, &[0x02])?;
        let size = inner.u8(field)?;
        let bytes = inner.bytes(field, size.into())?;
        let digits = bytes.strip_prefix(&[0]).unwrap_or(bytes);
        let mut padded = [0; 32];
        let start = padded
            .len()
            .checked_sub(digits.len())
            .ok_or_else(|| Malformed::new(field, "32 bytes at most", digits.len().to_string()))?;
        padded[start..].copy_from_slice(digits);
        Ok(padded)
    };
    let parts = (number("r of the signature")?, number("s of the signature")?);
    inner.end()?;
    Ok(parts)
}

/// Why something could not be signed.
#[derive(Debug, thiserror::Error)]
#[error("policy key: cannot sign")]
pub struct SignError;

/// The private key of an image builder.
pub struct SigningKey {
    key: PrivateKey,
    public: PolicyKey,
    random: SystemRandom,
}

enum PrivateKey {
    Ecdsa(Box<EcdsaKeyPair>),
    Rsa(Box<RsaKeyPair>),
}

impl SigningKey {
    /// From PKCS #8 in PEM, as `openssl genpkey` writes it.
    pub fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        let der = Zeroizing::new(contents("PRIVATE KEY", text)?);
        Self::from_pkcs8(&der)
    }

    /// From PKCS #8 in DER. An ECDSA key has to contain its public half.
    pub fn from_pkcs8(der: &[u8]) -> Result<Self, KeyError> {
        let random = SystemRandom::new();
        let scheme = &signature::ECDSA_P256_SHA256_ASN1_SIGNING;
        let (key, public) = match EcdsaKeyPair::from_pkcs8(scheme, der, &random) {
            Ok(pair) => {
                let point = pair.public_key().as_ref().strip_prefix(&[4]);
                let point = point.and_then(|point| point.try_into().ok());
                let public = point.map(PolicyKey::EcdsaP256);
                (PrivateKey::Ecdsa(Box::new(pair)), public)
            }
            Err(ecdsa) => {
                let pair = RsaKeyPair::from_pkcs8(der).map_err(|rsa| {
                    KeyError::Kind(format!("neither ECDSA ({ecdsa}) nor RSA ({rsa})"))
                })?;
                let public = PolicyKey::from_rsa(pair.public_key().as_ref());
                (PrivateKey::Rsa(Box::new(pair)), public)
            }
        };
        let other = || KeyError::Kind("RSA with other parameters".into());
        Ok(Self {
            key,
            public: public.ok_or_else(other)?,
            random,
        })
    }

    /// A new ECDSA key as PKCS #8 in PEM.
    pub fn generate() -> Result<Zeroizing<String>, SignError> {
        let scheme = &signature::ECDSA_P256_SHA256_ASN1_SIGNING;
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(scheme, &SystemRandom::new());
        let pkcs8 = pkcs8.map_err(|_| SignError)?;
        let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
        let block = pem::Pem::new("PRIVATE KEY", pkcs8.as_ref());
        Ok(Zeroizing::new(pem::encode_config(&block, config)))
    }

    /// The public half.
    pub fn public(&self) -> &PolicyKey {
        &self.public
    }

    /// Signs with SHA-256: DER for ECDSA, RSASSA-PKCS1-v1_5 for RSA.
    pub(crate) fn sign(&self, message: &[u8]) -> Result<Vec<u8>, SignError> {
        match &self.key {
            PrivateKey::Ecdsa(pair) => {
                let signature = pair.sign(&self.random, message).map_err(|_| SignError)?;
                Ok(signature.as_ref().to_vec())
            }
            PrivateKey::Rsa(pair) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(
                    &signature::RSA_PKCS1_SHA256,
                    &self.random,
                    message,
                    &mut signature,
                )
                .map_err(|_| SignError)?;
                Ok(signature)
            }
        }
    }
}

/// The bytes of the one PEM block in `text`.
fn contents(label: &'static str, text: &[u8]) -> Result<Vec<u8>, KeyError> {
    let error = |got| KeyError::Pem {
        expected: label,
        got,
    };
    // A section of an image may be padded with zero bytes.
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let block = pem::parse(text).map_err(|parse| error(parse.to_string()))?;
    if block.tag() != label {
        return Err(error(block.tag().to_owned()));
    }
    Ok(block.into_contents())
}

/// The first bytes, for a message.
fn start(bytes: &[u8]) -> String {
    hex::encode(&bytes[..bytes.len().min(RSA_PREFIX.len())])
}
