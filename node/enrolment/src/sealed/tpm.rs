//! The part of the sealed configuration's store that needs a TPM.
//!
//!
//! # Policy
//! The TPM releases a node's keys where PCR 7 (Secure Boot: its state and its keys) has the value that it had when they
//! were sealed, and PCR 11 (the image: kernel, initramfs and command line) has a value that the builder of the image has
//! signed. So the next image of the same builder opens them, and an image that anyone else has changed does not. The
//! key of the builder and the signatures are in the image, and the loader's stub passes them on in `/.extra`; an image
//! without them cannot seal.
//!
//!
//! # Record
//! A TPM seals 128 bytes, and a configuration has a few KiB. Each save generates a key, has the TPM seal it, and encrypts
//! the configuration with it (AES-256-GCM):
//!
//! | bytes | field |
//! |---|---|
//! | 4 | length of the next field, little-endian |
//! | that | the sealed key, as [`hearth_tpm::Sealed`] encodes it |
//! | 4 | length of the next field, little-endian: 80, or 0 if the cluster has no recovery recipient |
//! | that | the same key, wrapped to the recovery recipient ([`WrappedRecordKey`]) |
//! | the rest | the encrypted configuration, with its tag; authenticated together with the fields before |
//!
//! A key encrypts one message, so the nonce is zero. A record is opened again before it is saved: one that the TPM would
//! not open, with the image that runs now, never replaces one that it does.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_api::identity::random_bytes;
use hearth_api::recovery::console::WrappedRecordKey;
use hearth_api::recovery::{RecoveryRecipient, WrappedKey};
use hearth_tpm::{
    DecodeError, KeyError, ParseError, Pcr, PcrSelection, PcrSignatures, Policy, PolicyKey,
    SealError, SignedPolicy, Tpm, UnsealError,
};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::error::Unspecified;
use zeroize::Zeroizing;

/// The state of Secure Boot.
const SECURE_BOOT: PcrSelection = PcrSelection::of([Pcr::SECURE_BOOT]);
/// The image.
const IMAGE: PcrSelection = PcrSelection::of([Pcr::KERNEL_IMAGE]);

const KEY_LEN: usize = 32;

/// Why this machine's TPM cannot be used for sealing.
#[derive(Debug, thiserror::Error)]
pub enum SealerError {
    /// The kernel has found a TPM, but it cannot be opened.
    #[error("cannot open the TPM")]
    Open(#[source] io::Error),
    /// A file that the loader passes on cannot be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The image is not signed, or was not started by its loader.
    #[error(
        "{}: expected the key of the image's builder, found no file: the image is not signed, or was not \
         started by its loader", .0.display()
    )]
    NoKey(PathBuf),
    /// The builder's key is malformed.
    #[error("{}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: KeyError,
    },
    /// The builder's signatures are malformed.
    #[error("{}", path.display())]
    Signatures {
        /// The file.
        path: PathBuf,
        /// What is wrong with them.
        source: ParseError,
    },
}

/// Why a record could not be sealed or opened.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// The TPM did not seal the key.
    #[error("the TPM did not seal the node's keys: {0}")]
    Seal(#[from] SealError),
    /// The TPM did not release the key.
    #[error("the TPM did not release the node's keys: {0}")]
    Unseal(#[from] UnsealError),
    /// The record is malformed.
    #[error("{0}")]
    Record(#[from] DecodeError),
    /// The record is malformed in its own fields, or was changed.
    #[error("record: expected {expected}, got {found}")]
    Content {
        /// The expected value.
        expected: &'static str,
        /// The actual value.
        found: String,
    },
}

impl TpmError {
    /// Whether the error may go away without anybody's help: the TPM was busy or not reached.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Seal(SealError::Command(_) | SealError::PcrsChanged { .. })
                | Self::Unseal(UnsealError::Command(_) | UnsealError::LockedOut(_))
        )
    }
}

/// Seals records with this machine's TPM and opens them.
pub struct Sealer {
    tpm: Mutex<Tpm>,
    policy: Policy,
    signatures: PcrSignatures,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealer")
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

impl Sealer {
    /// With the machine's TPM, if it has one, and what the loader has put into the directory `extra` of the initramfs.
    pub fn of_machine(extra: &Path) -> Result<Option<Self>, SealerError> {
        match Tpm::open() {
            Ok(tpm) => Self::new(tpm, extra).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(SealerError::Open(error)),
        }
    }

    /// With any TPM.
    pub fn new(tpm: Tpm, extra: &Path) -> Result<Self, SealerError> {
        let read = |name: &str| {
            let path = extra.join(name);
            match std::fs::read(&path) {
                Ok(content) => Ok((path, content)),
                Err(source) if source.kind() == io::ErrorKind::NotFound => {
                    Err(SealerError::NoKey(path))
                }
                Err(source) => Err(SealerError::Unreadable { path, source }),
            }
        };
        let (path, key) = read("tpm2-pcr-public-key.pem")?;
        let key = PolicyKey::from_pem(&key).map_err(|source| SealerError::Key { path, source })?;
        let (path, signatures) = read("tpm2-pcr-signature.json")?;
        let signatures = PcrSignatures::parse(&signatures)
            .map_err(|source| SealerError::Signatures { path, source })?;
        let signed = SignedPolicy::new(key, IMAGE).expect("a PCR is selected");
        Ok(Self {
            tpm: Mutex::new(tpm),
            policy: Policy::new(SECURE_BOOT, Some(signed)).expect("a PCR is selected"),
            signatures,
        })
    }

    /// The record with this message, which the holder of the recovery key can open as well.
    pub(super) fn seal(
        &self,
        message: &[u8],
        recipient: Option<&RecoveryRecipient>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let key = Zeroizing::new(random_bytes::<KEY_LEN>());
        let sealed = {
            let mut tpm = self.tpm();
            let sealed = tpm.seal(&*key, &self.policy)?;
            tpm.expect_storage_key(sealed.storage_key());
            sealed
        };
        let blob = sealed.encode();
        let wrapped = recipient.map(|to| WrappedRecordKey::new(to, digest(&blob), &key));
        let wrapped = wrapped
            .as_ref()
            .map_or(&[][..], |key| key.wrapped_key.as_bytes());
        let mut record = Zeroizing::new(Vec::with_capacity(
            8 + blob.len() + wrapped.len() + message.len() + AES_256_GCM.tag_len(),
        ));
        for field in [&blob[..], wrapped] {
            record.extend_from_slice(&(field.len() as u32).to_le_bytes());
            record.extend_from_slice(field);
        }
        let clear = record.len();
        record.extend_from_slice(message);
        let (header, content) = record.split_at_mut(clear);
        let tag = cipher(&key)
            .seal_in_place_separate_tag(nonce(), Aad::from(&*header), content)
            .map_err(|Unspecified| TpmError::Content {
                expected: "a message that can be encrypted",
                found: format!("{} bytes", message.len()),
            })?;
        record.extend_from_slice(tag.as_ref());
        if *self.unseal(&record)? != message {
            return Err(TpmError::Content {
                expected: "the message that was sealed",
                found: "another one".into(),
            });
        }
        Ok(record)
    }

    /// The message of a record.
    pub(super) fn unseal(&self, record: &[u8]) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let sealed = hearth_tpm::Sealed::decode(Header::of(record)?.sealed)?;
        let key = {
            let mut tpm = self.tpm();
            let key = tpm.unseal(&sealed, Some(&self.signatures))?;
            tpm.expect_storage_key(sealed.storage_key());
            key
        };
        let key = <&[u8; KEY_LEN]>::try_from(&**key).map_err(|_| TpmError::Content {
            expected: "a sealed key of 32 bytes",
            found: format!("{} bytes", key.len()),
        })?;
        open(record, key)
    }

    fn tpm(&self) -> MutexGuard<'_, Tpm> {
        // A call leaves nothing behind in the TPM; the next one starts over.
        self.tpm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is not encrypted of a record.
struct Header<'a> {
    /// All of it, with the lengths.
    bytes: &'a [u8],
    sealed: &'a [u8],
    /// Empty: there is none.
    wrapped: &'a [u8],
}

impl<'a> Header<'a> {
    fn of(record: &'a [u8]) -> Result<Self, TpmError> {
        let short = || TpmError::Content {
            expected: "a sealed and a wrapped key of the encoded lengths",
            found: format!("{} bytes", record.len()),
        };
        let field = |rest: &'a [u8]| {
            let (length, rest) = rest.split_first_chunk::<4>()?;
            rest.split_at_checked(u32::from_le_bytes(*length) as usize)
        };
        let (sealed, rest) = field(record).ok_or_else(short)?;
        let (wrapped, content) = field(rest).ok_or_else(short)?;
        Ok(Self {
            bytes: &record[..record.len() - content.len()],
            sealed,
            wrapped,
        })
    }
}

/// The key of a record for the owner, if the record has it.
pub(super) fn recovery(record: &[u8]) -> Result<Option<WrappedRecordKey>, TpmError> {
    let header = Header::of(record)?;
    if header.wrapped.is_empty() {
        return Ok(None);
    }
    let wrapped_key = WrappedKey::try_from(header.wrapped).map_err(|error| TpmError::Content {
        expected: "a wrapped key of 80 bytes",
        found: error.to_string(),
    })?;
    Ok(Some(WrappedRecordKey {
        record: digest(header.sealed),
        wrapped_key,
    }))
}

/// The message of a record whose key is known.
pub(super) fn open(record: &[u8], key: &[u8; KEY_LEN]) -> Result<Zeroizing<Vec<u8>>, TpmError> {
    let header = Header::of(record)?.bytes;
    let mut content = Zeroizing::new(record[header.len()..].to_vec());
    let opened = cipher(key).open_in_place(nonce(), Aad::from(header), &mut content);
    let length = opened
        .map_err(|Unspecified| TpmError::Content {
            expected: "what was encrypted with this key",
            found: "other content, or a wrong tag".into(),
        })?
        .len();
    content.truncate(length);
    Ok(content)
}

fn digest(sealed: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, sealed);
    *digest.as_ref().first_chunk().expect("SHA-256 has 32 bytes")
}

fn cipher(key: &[u8; KEY_LEN]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("the key has the right length"))
}

/// See the module: a key is used once.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}
