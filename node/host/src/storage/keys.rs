//! Derives the keys of a data partition from the two unlock keys.
//!
//! HKDF-SHA256 (RFC 5869):
//!
//! - input key material: node unlock key ‖ cluster unlock key, 64 bytes. One half alone is useless:
//!   each half is random, so the derived keys are random even to someone who knows the other half.
//! - salt: the 32 random bytes of the data header, new for each format, so that the same two keys
//!   never produce the same volume key twice.
//! - info, 60 bytes:
//!
//! | bytes | content |
//! |---|---|
//! | 21 | `hearth data partition` |
//! | 1 | version of this derivation: 1; 2 for the volume key of AUTHENTICATED_ENCRYPTED, which once was one for AES-GCM |
//! | 1 | purpose: 1 volume key, 2 header MAC |
//! | 1 | mode: the number of `StorageSecurity`, 2 ENCRYPTED, 3 AUTHENTICATED_ENCRYPTED |
//! | 16 | cluster ID |
//! | 16 | node ID |
//! | 4 | key epoch, little-endian |
//!
//! Output: 64 bytes for AES-256-XTS, 16 for AEGIS-128, 32 for the MAC. All parts of the info have
//! a fixed length, so the encoding is unambiguous.

use hearth_api::identity::{ClusterId, ClusterUnlockKey, NodeId, NodeUnlockKey};
use hearth_api::v1::StorageSecurity;
use ring::{hkdf, hmac};
use zeroize::Zeroizing;

const LABEL: &[u8; 21] = b"hearth data partition";

/// The length of the salt in bytes.
pub const SALT_LEN: usize = 32;

/// How a data partition is encrypted. INSECURE has no keys and is not represented here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// dm-crypt, AES-256-XTS.
    Encrypted,
    /// dm-crypt, AEGIS-128, on dm-integrity.
    AuthenticatedEncrypted,
}

impl Mode {
    fn number(self) -> u8 {
        let security = match self {
            Self::Encrypted => StorageSecurity::Encrypted,
            Self::AuthenticatedEncrypted => StorageSecurity::AuthenticatedEncrypted,
        };
        security as i32 as u8
    }
}

/// The inputs of the key derivation, except for the salt.
#[derive(Clone, Debug)]
pub struct Secrets {
    /// How the partition is encrypted.
    pub mode: Mode,
    /// The node's half of the key (NUK).
    pub node_unlock_key: NodeUnlockKey,
    /// The cluster's half of the key (CUK).
    pub cluster_unlock_key: ClusterUnlockKey,
    /// The cluster of the partition's owner.
    pub cluster_id: ClusterId,
    /// The node that owns the partition.
    pub node_id: NodeId,
    /// Incremented with each change of keys.
    pub key_epoch: u32,
}

/// The key for dm-crypt. Zeroized on drop; not printable.
pub enum VolumeKey {
    /// For [`Mode::Encrypted`]: two AES-256 keys.
    Xts(Zeroizing<[u8; 64]>),
    /// For [`Mode::AuthenticatedEncrypted`]: a key of AEGIS-128.
    Aead(Zeroizing<[u8; 16]>),
}

#[derive(Clone, Copy)]
enum Purpose {
    Volume = 1,
    HeaderMac = 2,
}

impl Secrets {
    /// Derives the volume key for this salt.
    pub fn volume_key(&self, salt: &[u8; SALT_LEN]) -> VolumeKey {
        match self.mode {
            Mode::Encrypted => VolumeKey::Xts(self.derive(salt, Purpose::Volume)),
            Mode::AuthenticatedEncrypted => VolumeKey::Aead(self.derive(salt, Purpose::Volume)),
        }
    }

    /// Derives the key of the header's MAC.
    pub(super) fn mac_key(&self, salt: &[u8; SALT_LEN]) -> hmac::Key {
        let key = self.derive::<32>(salt, Purpose::HeaderMac);
        hmac::Key::new(hmac::HMAC_SHA256, &key[..])
    }

    fn derive<const LENGTH: usize>(
        &self,
        salt: &[u8; SALT_LEN],
        purpose: Purpose,
    ) -> Zeroizing<[u8; LENGTH]> {
        // No two ciphers ever have the same key, whatever its length.
        let version = match (self.mode, purpose) {
            (Mode::AuthenticatedEncrypted, Purpose::Volume) => 2,
            (Mode::Encrypted, Purpose::Volume) | (_, Purpose::HeaderMac) => 1,
        };
        let mut input = Zeroizing::new([0; 64]);
        input[..32].copy_from_slice(self.node_unlock_key.expose());
        input[32..].copy_from_slice(self.cluster_unlock_key.expose());
        let mut output = Zeroizing::new([0; LENGTH]);
        hkdf::Salt::new(hkdf::HKDF_SHA256, salt)
            .extract(&input[..])
            .expand(
                &[
                    LABEL,
                    &[version, purpose as u8, self.mode.number()],
                    self.cluster_id.as_bytes(),
                    self.node_id.as_bytes(),
                    &self.key_epoch.to_le_bytes(),
                ],
                Length(LENGTH),
            )
            .and_then(|okm| okm.fill(&mut output[..]))
            .expect("64 bytes are far below HKDF's limit");
        output
    }
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(mode: Mode) -> Secrets {
        Secrets {
            mode,
            node_unlock_key: NodeUnlockKey::from_bytes(std::array::from_fn(|i| i as u8)),
            cluster_unlock_key: ClusterUnlockKey::from_bytes(std::array::from_fn(|i| {
                0x20 + i as u8
            })),
            cluster_id: ClusterId::from_bytes([0xc1; 16]),
            node_id: NodeId::from_bytes([0x0d; 16]),
            key_epoch: 7,
        }
    }

    const SALT: [u8; SALT_LEN] = [0x5a; SALT_LEN];

    fn bytes(key: &VolumeKey) -> &[u8] {
        match key {
            VolumeKey::Xts(key) => &key[..],
            VolumeKey::Aead(key) => &key[..],
        }
    }

    /// Computed by an independent implementation, in Python with `hmac` and `hashlib`.
    #[test]
    fn keys_are_those_of_an_independent_derivation() {
        let xts = secrets(Mode::Encrypted).volume_key(&SALT);
        assert_eq!(
            hex::encode(bytes(&xts)),
            "0999fa988e4ee1b22f856695bde31af970668d882ccd3171e30c073de1cfd5fb64eeaec971b721b86fe5ee54cc4d5712857a8a63724ad71397372c3441731bd6"
        );
        let aegis = secrets(Mode::AuthenticatedEncrypted).volume_key(&SALT);
        assert_eq!(
            hex::encode(bytes(&aegis)),
            "44a99d7da70e69e1181329a1469e641f"
        );
        let tag = hmac::sign(&secrets(Mode::Encrypted).mac_key(&SALT), b"hearth");
        assert_eq!(
            hex::encode(tag.as_ref()),
            "5bea6231422060e9f867720e9ac824ec152694c268d8cfbfa8ed20cf19f78e9b"
        );
    }

    #[test]
    fn every_part_counts() {
        let base = secrets(Mode::Encrypted);
        let mut variants = vec![base.clone(); 5];
        variants[0].node_unlock_key = NodeUnlockKey::from_bytes([9; 32]);
        variants[1].cluster_unlock_key = ClusterUnlockKey::from_bytes([9; 32]);
        variants[2].cluster_id = ClusterId::from_bytes([9; 16]);
        variants[3].node_id = NodeId::from_bytes([9; 16]);
        variants[4].key_epoch = 8;
        let key = base.volume_key(&SALT);
        for variant in &variants {
            let other = variant.volume_key(&SALT);
            assert_ne!(bytes(&other), bytes(&key), "{variant:?}");
        }
        assert_ne!(bytes(&base.volume_key(&[0; SALT_LEN])), bytes(&key));
        // Swapping the halves gives another key.
        let swapped = Secrets {
            node_unlock_key: NodeUnlockKey::from_bytes(*base.cluster_unlock_key.expose()),
            cluster_unlock_key: ClusterUnlockKey::from_bytes(*base.node_unlock_key.expose()),
            ..base.clone()
        };
        assert_ne!(bytes(&swapped.volume_key(&SALT)), bytes(&key));
    }
}
