//! Keys of the mesh between the pods of different nodes: Curve25519, for WireGuard.
//!
//! They are not identities: the curators state which key belongs to which node. So no two nodes may
//! have the same key, and to enforce that each key must have exactly one encoding: non-canonical
//! encodings, and the points for which every shared secret is the same, are rejected.

use std::fmt;

use curve25519_dalek::montgomery::MontgomeryPoint;
use zeroize::Zeroizing;

use super::keys::KeyError;
use super::random_bytes;

/// A public key of the mesh.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MeshKey([u8; 32]);

impl MeshKey {
    /// Its 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl TryFrom<&[u8]> for MeshKey {
    type Error = KeyError;

    fn try_from(bytes: &[u8]) -> Result<Self, KeyError> {
        let found = bytes.len();
        let bytes = <[u8; 32]>::try_from(bytes).map_err(|_| KeyError::Length { found })?;
        if !is_reduced(&bytes) || is_weak(&bytes) {
            return Err(KeyError::NotAMeshKey);
        }
        Ok(Self(bytes))
    }
}

/// Whether eight times this point is zero. A private key is a multiple of eight, so with these
/// points it always yields the same shared secret. There are five: 0, 1, -1, and the two of order
/// eight.
fn is_weak(bytes: &[u8; 32]) -> bool {
    const OF_ORDER_EIGHT: [[u64; 4]; 2] = [
        [
            0xae_b8_41_3b_7c_7a_eb_e0,
            0x6a_c4_9f_f1_fa_e3_56_16,
            0xfd_b1_32_9c_eb_8d_09_da,
            0x00_b8_49_5f_16_05_62_86,
        ],
        [
            0x24_8c_50_a3_bc_95_9c_5f,
            0x5b_ef_83_9c_55_b1_d0_b1,
            0x86_8e_1c_58_c4_5c_44_04,
            0x57_11_9f_d0_dd_4e_22_d8,
        ],
    ];
    // Little-endian.
    let words: [u64; 4] = std::array::from_fn(|at| {
        let word = std::array::from_fn(|byte| bytes[at * 8 + byte]);
        u64::from_le_bytes(word)
    });
    let minus_one = [u64::MAX - 19, u64::MAX, u64::MAX, u64::MAX >> 1];
    let is_small = words[0] < 2 && words[1..] == [0; 3];
    is_small || words == minus_one || OF_ORDER_EIGHT.contains(&words)
}

/// Whether these little-endian bytes are below 2²⁵⁵ - 19.
fn is_reduced(bytes: &[u8; 32]) -> bool {
    let [first, middle @ .., last] = bytes;
    let is_high = *last >= 0x7f && middle.iter().all(|byte| *byte == 0xff);
    *last < 0x80 && !(is_high && *first >= 0xed)
}

impl fmt::Display for MeshKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(self.0))
    }
}

impl fmt::Debug for MeshKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A private key of the mesh. Wiped when dropped.
#[derive(Clone)]
pub struct MeshSecret(Zeroizing<[u8; 32]>);

impl MeshSecret {
    /// Generates a new one.
    pub fn generate() -> Self {
        Self(Zeroizing::new(random_bytes()))
    }

    /// Its public half.
    pub fn public(&self) -> MeshKey {
        MeshKey(MontgomeryPoint::mul_base_clamped(*self.0).0)
    }

    /// Its 32 bytes: for the kernel and for the data partition.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl TryFrom<&[u8]> for MeshSecret {
    type Error = KeyError;

    fn try_from(bytes: &[u8]) -> Result<Self, KeyError> {
        let found = bytes.len();
        let bytes = <[u8; 32]>::try_from(bytes).map_err(|_| KeyError::Length { found })?;
        Ok(Self(Zeroizing::new(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};

    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        hex::decode(hex).unwrap()
    }

    #[test]
    fn others_come_to_the_same_secret_by_the_public_half() {
        let ours = MeshSecret::generate();
        let random = ring::rand::SystemRandom::new();
        let theirs = EphemeralPrivateKey::generate(&X25519, &random).unwrap();
        let known = theirs.compute_public_key().unwrap();
        let known = <[u8; 32]>::try_from(known.as_ref()).unwrap();
        let found = MontgomeryPoint(known).mul_clamped(*ours.expose()).0;
        let public = UnparsedPublicKey::new(&X25519, ours.public().0);
        agree_ephemeral(theirs, &public, |secret| assert_eq!(secret, found)).unwrap();
        assert_ne!(ours.public(), MeshSecret::generate().public());
    }

    #[test]
    fn points_without_multiples_are_no_keys() {
        let last = format!("ec{}7f", "ff".repeat(30));
        for weak in [
            &"00".repeat(32)[..],
            &format!("01{}", "00".repeat(31)),
            "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
            "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
            &last,
        ] {
            let weak = bytes(weak);
            let refused = MeshKey::try_from(&weak[..]);
            assert_eq!(refused, Err(KeyError::NotAMeshKey), "{weak:x?}");
            let point = MontgomeryPoint(weak.try_into().unwrap());
            assert_eq!(point.mul_clamped([7; 32]).0, [0; 32], "it is one");
        }
        for length in [0, 31, 33] {
            let refused = MeshKey::try_from(&vec![9; length][..]);
            assert_eq!(refused, Err(KeyError::Length { found: length }));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_key_has_one_spelling(secret: [u8; 32], less in 0_u8..=18) {
            let public = MeshSecret::try_from(&secret[..]).unwrap().public();
            prop_assert_eq!(MeshKey::try_from(&public.as_bytes()[..]), Ok(public));
            let mut other = *public.as_bytes();
            other[31] |= 0x80;
            prop_assert_eq!(MeshKey::try_from(&other[..]), Err(KeyError::NotAMeshKey));
            // 2²⁵⁵ - 1 is another encoding of 18, and so on down to 2²⁵⁵ - 19 for zero.
            let mut other = [0xff; 32];
            (other[0], other[31]) = (0xff - less, 0x7f);
            prop_assert_eq!(MeshKey::try_from(&other[..]), Err(KeyError::NotAMeshKey));
        }
    }
}
