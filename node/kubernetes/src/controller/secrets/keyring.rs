//! The keys that this controller has opened, and the key that opens them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_api::identity::{ClusterId, NodeId, SecretLengthError, SecretsKey, random_bytes};
use hearth_api::private::StoredControllerKey;
use hearth_api::recovery::RecoveryError;
use hearth_api::secrets_keys::{ControllerKey, Generation};
use hearth_base::event::{self, Value, Writer};
use hearth_consensus::secrets_keys::{Known, SecretsKeys, SecretsKeysError};
use hearth_host::record::{self, Record as _, RecordError};
use ring::aead::{self, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroize as _;

/// Whether Secrets can be encrypted and decrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyStatus {
    /// All keys are open; the one of this generation encrypts.
    Ready(u32),
    /// The key of this generation is not wrapped for this controller.
    Missing(u32),
    /// An error, which will be retried.
    Failing(String),
}

/// Why a key cannot be opened or used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyError {
    #[error(transparent)]
    Stored(#[from] SecretsKeysError),
    #[error("the key of Secrets of generation {generation} does not open")]
    Wrapped {
        generation: u32,
        source: RecoveryError,
    },
    #[error("expected the key of Secrets {expected}, got {found}")]
    OtherKey { expected: String, found: String },
    #[error("expected a key of Secrets of this cluster, got {0:?}")]
    Unknown(String),
    #[error("there is no key of Secrets yet")]
    NoKey,
    #[error("the ciphertext is not one of the key {0}")]
    Ciphertext(String),
}

/// An opened key.
pub(crate) struct Key {
    /// Its generation.
    number: u32,
    /// Its name, which is that of no other key.
    pub id: String,
    secret: SecretsKey,
}

impl Key {
    fn cipher(&self) -> LessSafeKey {
        let key = UnboundKey::new(&aead::AES_256_GCM, self.secret.expose());
        LessSafeKey::new(key.expect("AES-256 has keys of 32 bytes"))
    }

    /// The nonce, the ciphertext and the tag. An API server asks for this once in its life, and at each change of the
    /// key, so that random nonces do not repeat.
    pub(super) fn encrypt(&self, plaintext: &[u8]) -> Vec<u8> {
        let nonce: [u8; NONCE_LEN] = random_bytes();
        let mut sealed = plaintext.to_vec();
        let done = self.cipher().seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(self.id.as_bytes()),
            &mut sealed,
        );
        done.expect("AES-GCM encrypts up to 64 GiB");
        [&nonce[..], &sealed].concat()
    }

    pub(super) fn decrypt(&self, ciphertext: &[u8]) -> Result<Vec<u8>, KeyError> {
        let wrong = || KeyError::Ciphertext(self.id.clone());
        let (nonce, sealed) = ciphertext
            .split_first_chunk::<NONCE_LEN>()
            .ok_or_else(wrong)?;
        let mut opened = sealed.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let aad = Aad::from(self.id.as_bytes());
        let plaintext = self.cipher().open_in_place(nonce, aad, &mut opened);
        let length = plaintext.map_err(|_| wrong())?.len();
        opened.truncate(length);
        Ok(opened)
    }
}

/// All keys of a controller.
pub(crate) struct Keyring {
    pub cluster: ClusterId,
    /// This node.
    pub node: NodeId,
    /// Opens the keys.
    pub own: ControllerKey,
    /// The keys in etcd.
    pub stored: SecretsKeys,
    opened: Mutex<BTreeMap<u32, Arc<Key>>>,
    /// Whether the keys can be used, written by `sharing`.
    pub status: Writer<KeyStatus>,
    /// The generation of the key with which the API server of this node encrypts; 0 until it does.
    used: Writer<u32>,
}

impl Keyring {
    pub(crate) fn new(
        cluster: ClusterId,
        node: NodeId,
        own: ControllerKey,
        stored: SecretsKeys,
    ) -> Self {
        let used = event::value().0;
        used.set(0);
        Self {
            cluster,
            node,
            own,
            stored,
            opened: Mutex::default(),
            status: event::value().0,
            used,
        }
    }

    /// See [`KeyStatus`]; it has no value until the keys were read.
    pub(crate) fn status(&self) -> Value<KeyStatus> {
        self.status.value()
    }

    /// The generation of the key with which the API server of this node encrypts; 0 until it does.
    pub(crate) fn used(&self) -> Value<u32> {
        self.used.value()
    }

    fn opened(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Key>>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which key of this cluster is meant.
    pub(crate) fn generation(&self, number: u32) -> Generation {
        Generation {
            cluster: self.cluster,
            number,
        }
    }

    /// Opens what is wrapped for this controller. Returns the first generation that is not.
    pub(crate) fn open(&self, known: &Known) -> Result<Option<u32>, KeyError> {
        let own = self.own.recipient();
        let mut missing = None;
        for (&number, read) in &known.keys {
            let stored = &read.content;
            let is_open = self.opened().get(&number).map(|key| key.id == stored.id);
            if is_open == Some(true) {
                continue;
            }
            let Some(wrapped) = stored.wrapped_for(&own) else {
                missing.get_or_insert(number);
                continue;
            };
            let generation = self.generation(number);
            let secret = generation.open(&self.own, wrapped);
            let secret = secret.map_err(|source| KeyError::Wrapped {
                generation: number,
                source,
            })?;
            let id = generation.id(&secret);
            if id != stored.id {
                return Err(KeyError::OtherKey {
                    expected: stored.id.clone(),
                    found: id,
                });
            }
            self.opened()
                .insert(number, Arc::new(Key { number, id, secret }));
        }
        Ok(missing)
    }

    /// The opened key of a generation.
    pub(crate) fn key(&self, number: u32) -> Option<Arc<Key>> {
        self.opened().get(&number).cloned()
    }

    /// The secret of a generation, to be wrapped for another controller.
    pub(crate) fn secret(&self, number: u32) -> Option<SecretsKey> {
        self.key(number).map(|key| key.secret.clone())
    }

    /// The key that encrypts: the latest one that is open. While another controller has not wrapped a newer one for this
    /// controller yet, that is an earlier one.
    pub(crate) fn current(&self) -> Result<Arc<Key>, KeyError> {
        let opened = self.opened();
        let (_, latest) = opened.last_key_value().ok_or(KeyError::NoKey)?;
        Ok(latest.clone())
    }

    /// Encrypts for the API server. Returns the ciphertext and the ID of the key.
    pub(super) fn encrypt(&self, plaintext: &[u8]) -> Result<(Vec<u8>, String), KeyError> {
        let key = self.current()?;
        let ciphertext = key.encrypt(plaintext);
        if self.used().get() != Some(key.number) {
            self.used.set(key.number);
        }
        Ok((ciphertext, key.id.clone()))
    }

    /// Decrypts for the API server. A key that another controller has generated a moment ago is read from etcd.
    pub(super) async fn decrypt(&self, id: &str, ciphertext: &[u8]) -> Result<Vec<u8>, KeyError> {
        let unknown = || KeyError::Unknown(id.to_owned());
        let number = number_in(id).ok_or_else(unknown)?;
        let known = || self.key(number).filter(|key| key.id == id);
        let key = match known() {
            Some(key) => key,
            None => {
                self.open(&self.stored.read().await?)?;
                known().ok_or_else(unknown)?
            }
        };
        key.decrypt(ciphertext)
    }
}

/// The generation in the ID of a key.
fn number_in(id: &str) -> Option<u32> {
    id.split_once('-')?.0.parse().ok()
}

/// The key of this controller. It is generated once, and stored before it is used.
pub(crate) fn load_or_generate(path: &Path) -> Result<ControllerKey, RecordError> {
    let kept = record::load(path, |mut stored: StoredControllerKey| {
        let found = stored.private_key.len();
        let bytes = <[u8; 32]>::try_from(&stored.private_key[..]);
        stored.private_key.zeroize();
        bytes
            .map(ControllerKey::from_bytes)
            .map_err(|_| SecretLengthError {
                what: "private_key",
                found,
            })
    })?;
    if let Some(kept) = kept {
        return Ok(kept);
    }
    let key = ControllerKey::generate();
    save(path, &key)?;
    Ok(key)
}

fn save(path: &Path, key: &ControllerKey) -> Result<(), RecordError> {
    let mut stored = StoredControllerKey {
        version: StoredControllerKey::VERSION,
        private_key: key.expose().to_vec(),
    };
    let saved = record::save(path, &stored);
    stored.private_key.zeroize();
    saved
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;

    use super::*;

    #[test]
    fn the_stored_form_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets.pb");
        save(&path, &ControllerKey::from_bytes([0x11; 32])).unwrap();
        let written = std::fs::read(&path).unwrap();
        std::fs::write(&path, stored_form!("controller-key.pb", written)).unwrap();
        assert_eq!(load_or_generate(&path).unwrap().expose(), &[0x11; 32]);
    }

    #[test]
    fn a_key_is_generated_once_and_what_is_corrupt_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets.pb");
        let made = load_or_generate(&path).unwrap();
        assert_eq!(load_or_generate(&path).unwrap().expose(), made.expose());
        std::fs::write(&path, b"\x08\x01\x12\x01\x05").unwrap();
        let error = hearth_api::chain(&load_or_generate(&path).unwrap_err());
        assert!(
            error.contains("private_key: expected 32 bytes, got 1"),
            "{error}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"\x08\x01\x12\x01\x05");
    }

    #[test]
    fn a_ciphertext_is_of_its_key() {
        let key = |id: &str| Key {
            number: 1,
            id: id.to_owned(),
            secret: SecretsKey::from_bytes([9; 32]),
        };
        let (one, renamed) = (key("1-aa"), key("2-aa"));
        let sealed = one.encrypt(b"seed");
        assert_eq!(one.decrypt(&sealed).unwrap(), b"seed");
        assert_ne!(one.encrypt(b"seed"), sealed);
        assert!(renamed.decrypt(&sealed).is_err());
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(one.decrypt(&changed).is_err());
            assert!(one.decrypt(&sealed[..at]).is_err());
        }
    }
}
