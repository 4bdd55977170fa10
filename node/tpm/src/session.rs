//! Sessions: what keeps a secret from whoever listens on the way to the TPM, or answers in its place.
//!
//! Both sides derive the session's key from a salt that is encrypted to the storage key (ECDH, KDFe) and from their
//! nonces (KDFa). With it they authenticate each command and response (HMAC) and encrypt its first parameter (AES-128 in
//! CFB mode). TPM 2.0 library, part 1, sections "Session-Based Authorizations" and "Session-based encryption".
//!
//! This holds as far as the storage key is the TPM's: see [`Tpm::expect_storage_key`](super::Tpm::expect_storage_key).

use aes::Aes128;
use cfb_mode::cipher::KeyIvInit;
use cfb_mode::{Decryptor, Encryptor};
use ring::agreement::{ECDH_P256, EphemeralPrivateKey, UnparsedPublicKey, agree_ephemeral};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use super::pcr::Digest;
use super::wire::{Malformed, Reader, Writer};

/// The bytes of a nonce, as many as the digest has.
const NONCE: usize = 32;

/// The session goes on after the command.
const CONTINUE: u8 = 0x01;
/// The first parameter of the command is encrypted.
const DECRYPT: u8 = 0x20;
/// The first parameter of the response is encrypted.
const ENCRYPT: u8 = 0x40;

/// Why a session cannot protect a command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The machine has no random numbers.
    #[error("the system has no random numbers")]
    Random,
    /// The key to which a secret was to be encrypted is none.
    #[error("the TPM's key is not a point on P-256")]
    NotAPoint,
    /// Something on the way to the TPM has changed the response, or answered in its place.
    #[error("the response is not authentic: its HMAC is wrong")]
    Hmac,
    /// The authorization area of the response has another format.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// A point on P-256, with the coordinates as the TPM wrote them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) x: Vec<u8>,
    pub(crate) y: Vec<u8>,
}

impl Point {
    /// TPMS_ECC_POINT.
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            x: reader.sized("x of the key", 32)?.to_vec(),
            y: reader.sized("y of the key", 32)?.to_vec(),
        })
    }

    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer.sized(&self.x).sized(&self.y)
    }

    /// SEC 1, uncompressed: each coordinate with 32 bytes. They have at most 32 when they were read.
    pub(crate) fn uncompressed(&self) -> [u8; 65] {
        let mut point = [0; 65];
        point[0] = 4;
        point[33 - self.x.len()..33].copy_from_slice(&self.x);
        point[65 - self.y.len()..].copy_from_slice(&self.y);
        point
    }
}

/// A secret that only the holder of the storage key learns.
pub(crate) struct Salt {
    pub(crate) secret: Zeroizing<[u8; 32]>,
    /// TPM2B_ENCRYPTED_SECRET without its size.
    pub(crate) encrypted: Vec<u8>,
}

impl Salt {
    /// A new salt for the holder of `key`.
    pub(crate) fn for_key(key: &Point) -> Result<Self, SessionError> {
        Self::new(key, b"SECRET\0")
    }

    /// A new secret for the holder of `key`. `use_of` ends with a zero byte: the purpose, by the specification.
    pub(crate) fn new(key: &Point, use_of: &[u8]) -> Result<Self, SessionError> {
        let random = SystemRandom::new();
        let own =
            EphemeralPrivateKey::generate(&ECDH_P256, &random).map_err(|_| SessionError::Random)?;
        let public = own.compute_public_key().map_err(|_| SessionError::Random)?;
        let (x, y) = public.as_ref()[1..].split_at(32);
        let peer = UnparsedPublicKey::new(&ECDH_P256, key.uncompressed());
        // KDFe: one round makes as many bits as are needed.
        let derive = |shared: &[u8]| {
            let counter = 1_u32.to_be_bytes();
            Zeroizing::new(Digest::of(&[&counter, shared, use_of, x, &key.x]).0)
        };
        let secret = agree_ephemeral(own, &peer, derive).map_err(|_| SessionError::NotAPoint)?;
        Ok(Self {
            secret,
            encrypted: Writer::new().sized(x).sized(y).finish().to_vec(),
        })
    }
}

/// A nonce that was never used before.
pub(crate) fn nonce() -> Result<[u8; NONCE], SessionError> {
    let mut nonce = [0; NONCE];
    let filled = SystemRandom::new().fill(&mut nonce);
    filled.map_err(|_| SessionError::Random)?;
    Ok(nonce)
}

/// Which of the first parameters is secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Secret {
    InCommand,
    InResponse,
}

/// A salted session that the TPM has started. What it authorizes has no authorization value of its own.
pub(crate) struct Session {
    pub(crate) handle: u32,
    key: Zeroizing<[u8; 32]>,
    nonce_tpm: Vec<u8>,
}

impl Session {
    /// The session after the TPM's response to TPM2_StartAuthSession.
    pub(crate) fn new(
        handle: u32,
        salt: &Salt,
        nonce_caller: &[u8; NONCE],
        nonce_tpm: &[u8],
    ) -> Self {
        Self {
            handle,
            key: kdfa(&*salt.secret, b"ATH\0", nonce_tpm, nonce_caller, 256),
            nonce_tpm: nonce_tpm.to_vec(),
        }
    }

    /// Encrypts the command's first parameter if that is the secret, and writes the authorization area. The session ends
    /// with the command.
    pub(crate) fn authorize(
        &self,
        command: u32,
        names: &[&[u8]],
        parameters: &mut [u8],
        secret: Secret,
    ) -> Result<Authorized<'_>, SessionError> {
        let nonce_caller = nonce()?;
        let attributes = match secret {
            Secret::InCommand => {
                let (key, iv) = self.cipher(&nonce_caller, &self.nonce_tpm);
                let cipher = Encryptor::<Aes128>::new((&*key).into(), (&*iv).into());
                cipher.encrypt(first_parameter(parameters)?);
                DECRYPT
            }
            Secret::InResponse => ENCRYPT,
        };
        let command = command.to_be_bytes();
        let mut parts: Vec<&[u8]> = vec![&command];
        parts.extend(names);
        parts.push(parameters);
        let hash = Digest::of(&parts);
        let hmac = self.hmac(&[&hash.0, &nonce_caller, &self.nonce_tpm, &[attributes]]);
        let area = Writer::new().u32(self.handle).sized(&nonce_caller);
        let area = area.u8(attributes).sized(hmac.as_ref()).finish().to_vec();
        Ok(Authorized {
            session: self,
            area,
            nonce_caller,
            attributes,
            command,
        })
    }

    fn hmac(&self, parts: &[&[u8]]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.hmac_key());
        parts.iter().for_each(|part| context.update(part));
        context.sign()
    }

    fn hmac_key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &*self.key)
    }

    /// Key and initialization vector for one direction.
    fn cipher(&self, newer: &[u8], older: &[u8]) -> (Zeroizing<[u8; 16]>, Zeroizing<[u8; 16]>) {
        let both = kdfa(&*self.key, b"CFB\0", newer, older, 256);
        let mut halves = (Zeroizing::new([0; 16]), Zeroizing::new([0; 16]));
        halves.0.copy_from_slice(&both[..16]);
        halves.1.copy_from_slice(&both[16..]);
        halves
    }
}

/// A command that was authorized, and how its response is checked.
pub(crate) struct Authorized<'a> {
    session: &'a Session,
    /// The authorization area, without its size.
    pub(crate) area: Vec<u8>,
    nonce_caller: [u8; NONCE],
    attributes: u8,
    command: [u8; 4],
}

impl Authorized<'_> {
    /// Verifies the response, and decrypts its first parameter if that is the secret.
    pub(crate) fn verify(&self, parameters: &mut [u8], area: &[u8]) -> Result<(), SessionError> {
        let mut reader = Reader::new(area);
        let nonce_tpm = reader.sized("nonce of the TPM", NONCE)?;
        let attributes = reader.u8("session attributes")?;
        let hmac = reader.sized("HMAC", 32)?;
        reader.end()?;
        let success = 0_u32.to_be_bytes();
        let hash = Digest::of(&[&success, &self.command, parameters]);
        let signed = [&hash.0, nonce_tpm, &self.nonce_caller, &[attributes]].concat();
        hmac::verify(&self.session.hmac_key(), &signed, hmac).map_err(|_| SessionError::Hmac)?;
        if attributes & !CONTINUE != self.attributes {
            return Err(SessionError::Hmac);
        }
        if self.attributes & ENCRYPT != 0 {
            let (key, iv) = self.session.cipher(nonce_tpm, &self.nonce_caller);
            let cipher = Decryptor::<Aes128>::new((&*key).into(), (&*iv).into());
            cipher.decrypt(first_parameter(parameters)?);
        }
        Ok(())
    }
}

/// The content of the TPM2B at the start.
fn first_parameter(parameters: &mut [u8]) -> Result<&mut [u8], Malformed> {
    let mut reader = Reader::new(parameters);
    let size = reader.u16("size of the first parameter")?;
    reader.bytes("first parameter", size.into())?;
    Ok(&mut parameters[2..2 + usize::from(size)])
}

/// KDFa for up to 256 bits, which one round of HMAC makes: the first `bits` of the result. `label` ends with a zero byte.
pub(crate) fn kdfa(
    key: &[u8],
    label: &[u8],
    context_u: &[u8],
    context_v: &[u8],
    bits: u32,
) -> Zeroizing<[u8; 32]> {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    let (counter, bits) = (1_u32.to_be_bytes(), bits.to_be_bytes());
    for part in [&counter[..], label, context_u, context_v, &bits] {
        context.update(part);
    }
    let mut derived = Zeroizing::new([0; 32]);
    derived.copy_from_slice(context.sign().as_ref());
    derived
}
