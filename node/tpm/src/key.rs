//! The key that signs for policies: its public half, by which a secret is bound to all images of one builder, and its
//! private half, with which the builder signs.
//!
//! The kinds are those that TPMs can verify: ECDSA over P-256, the default, and RSA with 2048 bits and the exponent 65537.
//! (No TPM has Ed25519.) A public key of either kind has exactly one encoding in DER, so it is recognized by the bytes
//! before the key itself, and what is accepted is what is written again.
//!
//! Signatures are deterministic (RFC 6979; PKCS #1 v1.5), so whoever has the key can build a signed image again, bit for
//! bit. ring's ECDSA is not deterministic: that is why p256 signs.

use std::fmt;

use p256::ecdsa::signature::Signer;
use p256::pkcs8::{ObjectIdentifier, PrivateKeyInfoRef};
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

const ID_EC_PUBLIC_KEY: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const RSA_ENCRYPTION: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");

/// A block of PEM.
struct Block {
    label: &'static str,
    /// What the label stands for.
    content: &'static str,
}

const PUBLIC: Block = Block {
    label: "PUBLIC KEY",
    content: "SubjectPublicKeyInfo",
};
const PRIVATE: Block = Block {
    label: "PRIVATE KEY",
    content: "PKCS #8, not encrypted",
};

/// Why a key is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not PEM, or not one block with the expected label.
    #[error("policy key: expected one PEM block {label:?} ({content}), got {got}")]
    Pem {
        /// The label.
        label: &'static str,
        /// What such a block has.
        content: &'static str,
        /// The label that was found, or what the parser says.
        got: String,
    },
    /// The private key is not PKCS #8.
    #[error("policy key: expected PKCS #8 in DER, got {0}")]
    Pkcs8(String),
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
        let der = PUBLIC.read(text)?;
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
        PUBLIC.write(&self.to_der())
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
    name_with(&Digest::of(&[public_area]))
}

/// The name with this digest.
pub(crate) fn name_with(digest: &Digest) -> [u8; 34] {
    let mut name = [0; 34];
    name[..2].copy_from_slice(&SHA256.to_be_bytes());
    name[2..].copy_from_slice(&digest.0);
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

/// A key cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("policy key: expected random numbers from the system, got none")]
pub struct GenerateError;

/// Why something could not be signed: the algorithm that failed. The libraries give no reason.
#[derive(Debug, thiserror::Error)]
#[error("policy key: cannot sign by {0}")]
pub struct SignError(&'static str);

/// The private key of an image builder. Without a printable form.
pub struct SigningKey {
    key: PrivateKey,
    public: PolicyKey,
}

enum PrivateKey {
    Ecdsa(Box<p256::ecdsa::SigningKey>),
    Rsa(Box<RsaKeyPair>),
}

impl SigningKey {
    /// From PKCS #8 in PEM, as `openssl genpkey` writes it.
    pub fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        let der = Zeroizing::new(PRIVATE.read(text)?);
        Self::from_pkcs8(&der)
    }

    /// From PKCS #8 in DER.
    pub fn from_pkcs8(der: &[u8]) -> Result<Self, KeyError> {
        let info = PrivateKeyInfoRef::try_from(der);
        let info = info.map_err(|error| KeyError::Pkcs8(error.to_string()))?;
        match info.algorithm.oid {
            ID_EC_PUBLIC_KEY => Self::from_ecdsa(info),
            RSA_ENCRYPTION => Self::from_rsa(der),
            other => Err(KeyError::Kind(format!("the algorithm {other}"))),
        }
    }

    fn from_ecdsa(info: PrivateKeyInfoRef<'_>) -> Result<Self, KeyError> {
        let other = |error| KeyError::Kind(format!("an elliptic curve's key ({error})"));
        let key = p256::ecdsa::SigningKey::from(p256::SecretKey::try_from(info).map_err(other)?);
        let public = key.verifying_key().to_sec1_point(false);
        let mut point = [0; POINT];
        // The first byte says that both coordinates follow.
        point.copy_from_slice(&public.as_bytes()[1..]);
        Ok(Self {
            key: PrivateKey::Ecdsa(Box::new(key)),
            public: PolicyKey::EcdsaP256(point),
        })
    }

    fn from_rsa(pkcs8: &[u8]) -> Result<Self, KeyError> {
        let other = |what| KeyError::Kind(format!("an RSA key {what}"));
        let pair = RsaKeyPair::from_pkcs8(pkcs8).map_err(|error| other(format!("({error})")))?;
        let bytes = pair.public().modulus_len();
        if bytes != MODULUS {
            return Err(other(format!("with {} bits", 8 * bytes)));
        }
        let public = PolicyKey::from_rsa(pair.public_key().as_ref());
        Ok(Self {
            key: PrivateKey::Rsa(Box::new(pair)),
            public: public.ok_or_else(|| other("with another exponent".to_owned()))?,
        })
    }

    /// A new ECDSA key as PKCS #8 in PEM.
    pub fn generate() -> Result<Zeroizing<String>, GenerateError> {
        let scheme = &signature::ECDSA_P256_SHA256_ASN1_SIGNING;
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(scheme, &SystemRandom::new());
        let pkcs8 = pkcs8.map_err(|_| GenerateError)?;
        Ok(Zeroizing::new(PRIVATE.write(pkcs8.as_ref())))
    }

    /// The public half.
    pub fn public(&self) -> &PolicyKey {
        &self.public
    }

    /// Signs with SHA-256: DER for ECDSA, RSASSA-PKCS1-v1_5 for RSA. The same message has the same signature.
    pub(crate) fn sign(&self, message: &[u8]) -> Result<Vec<u8>, SignError> {
        match &self.key {
            PrivateKey::Ecdsa(key) => {
                let signature: p256::ecdsa::Signature =
                    key.try_sign(message).map_err(|_| SignError("ECDSA"))?;
                Ok(signature.to_der().as_bytes().to_vec())
            }
            PrivateKey::Rsa(pair) => {
                let mut signature = vec![0; MODULUS];
                // Random numbers blind the computation; the signature does not depend on them.
                let random = SystemRandom::new();
                pair.sign(
                    &signature::RSA_PKCS1_SHA256,
                    &random,
                    message,
                    &mut signature,
                )
                .map_err(|_| SignError("RSA"))?;
                Ok(signature)
            }
        }
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public.fingerprint())
    }
}

impl Block {
    /// The bytes of the one block in `text`.
    fn read(&self, text: &[u8]) -> Result<Vec<u8>, KeyError> {
        let error = |got| KeyError::Pem {
            label: self.label,
            content: self.content,
            got,
        };
        // A section of an image may be padded with zero bytes.
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        let block = pem::parse(text).map_err(|parse| error(parse.to_string()))?;
        if block.tag() != self.label {
            return Err(error(format!("{:?}", block.tag())));
        }
        Ok(block.into_contents())
    }

    fn write(&self, der: &[u8]) -> String {
        let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
        pem::encode_config(&pem::Pem::new(self.label, der), config)
    }
}

/// The first bytes, for a message.
fn start(bytes: &[u8]) -> String {
    hex::encode(&bytes[..bytes.len().min(RSA_PREFIX.len())])
}
