//! The replacement of a cluster's owner: of the owner key and the recovery key, together.
//!
//! The former owner signs who the new one is and to which recovery key nodes wrap their keys from
//! then on. The curators keep all replacements, and each node goes from the owner that it has recorded
//! to the present one by these signatures. So no curator can give a node an owner, or have it wrap
//! its keys to somebody else, whatever becomes of the curators: with the answers of a false owner, or
//! the recovery key of a false recipient, a stolen disk would open.
//!
//! The new owner key signs, too: a mistyped key would lock out everybody.

use crate::identity::{ClusterId, OwnerKey, PublicKey};
use crate::proofs::ProofError;
use crate::recovery::RecoveryRecipient;
use crate::v1;

const REPLACEMENT: &[u8] = b"hearth owner replacement v1\0";
const WHAT: &str = "owner replacement";

/// A replacement with valid signatures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// The owner before.
    pub former: PublicKey,
    /// The owner after.
    pub owner: PublicKey,
    /// To which nodes wrap their cluster unlock keys after it.
    pub recovery_recipient: RecoveryRecipient,
}

impl Replacement {
    /// Makes the replacement, signed by both keys.
    pub fn sign(
        cluster: ClusterId,
        former: &OwnerKey,
        owner: &OwnerKey,
        recovery_recipient: RecoveryRecipient,
    ) -> v1::OwnerReplacement {
        let replacement = Self {
            former: former.public(),
            owner: owner.public(),
            recovery_recipient,
        };
        let statement = replacement.statement(cluster);
        v1::OwnerReplacement {
            former_owner_public_key: replacement.former.as_bytes().to_vec(),
            owner_public_key: replacement.owner.as_bytes().to_vec(),
            recovery_recipient: recovery_recipient.as_bytes().to_vec(),
            former_owner_signature: former.sign(&statement).to_vec(),
            owner_signature: owner.sign(&statement).to_vec(),
        }
    }

    /// Verifies a replacement.
    ///
    /// # Errors
    /// If a field is malformed, or one of the signatures is invalid for this cluster.
    pub fn verify(cluster: ClusterId, message: &v1::OwnerReplacement) -> Result<Self, ProofError> {
        let key = |field, bytes: &[u8]| {
            PublicKey::try_from(bytes).map_err(|error| wrong(field, error.to_string()))
        };
        let recipient = RecoveryRecipient::try_from(&message.recovery_recipient[..]);
        let replacement = Self {
            former: key("former_owner_public_key", &message.former_owner_public_key)?,
            owner: key("owner_public_key", &message.owner_public_key)?,
            recovery_recipient: recipient
                .map_err(|error| wrong("recovery_recipient", error.to_string()))?,
        };
        if replacement.former == replacement.owner {
            let why = "expected another key than that of the former owner".to_owned();
            return Err(wrong("owner_public_key", why));
        }
        let statement = replacement.statement(cluster);
        let signatures = [
            (replacement.former, &message.former_owner_signature),
            (replacement.owner, &message.owner_signature),
        ];
        for (key, signature) in signatures {
            key.verify(&statement, signature)
                .map_err(|_| ProofError::Signature { what: WHAT })?;
        }
        Ok(replacement)
    }

    fn statement(&self, cluster: ClusterId) -> Vec<u8> {
        [
            REPLACEMENT,
            cluster.as_bytes(),
            self.former.as_bytes(),
            self.owner.as_bytes(),
            self.recovery_recipient.as_bytes(),
        ]
        .concat()
    }
}

/// The last replacement to which signatures lead from the owner that is known; `None` if that owner
/// has never been replaced.
///
/// # Errors
/// If a replacement of an owner on this way is malformed, or has an invalid signature.
pub fn follow(
    cluster: ClusterId,
    known: PublicKey,
    replacements: &[v1::OwnerReplacement],
) -> Result<Option<Replacement>, ProofError> {
    let mut last: Option<Replacement> = None;
    for message in replacements {
        let current = last.map_or(known, |replacement| replacement.owner);
        if message.former_owner_public_key == current.as_bytes() {
            last = Some(Replacement::verify(cluster, message)?);
        }
    }
    Ok(last)
}

fn wrong(field: &'static str, why: String) -> ProofError {
    ProofError::Field {
        what: WHAT,
        field,
        why,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::recovery::RecoveryKey;

    fn cluster() -> ClusterId {
        ClusterId::try_from(&[3; 16][..]).unwrap()
    }

    fn owner(number: u8) -> OwnerKey {
        OwnerKey::from_seed([number; 32])
    }

    fn recipient(number: u8) -> RecoveryRecipient {
        RecoveryKey::from_bytes([number; 32]).recipient()
    }

    fn replacement(former: u8, new: u8) -> v1::OwnerReplacement {
        Replacement::sign(cluster(), &owner(former), &owner(new), recipient(new))
    }

    #[test]
    fn a_node_follows_every_owner_that_its_own_has_led_to() {
        let all = [replacement(1, 2), replacement(2, 3), replacement(3, 1)];
        // The owner of the beginning is the owner again.
        for known in 1..=3 {
            let last = follow(cluster(), owner(known).public(), &all).unwrap();
            assert_eq!(last.unwrap().owner, owner(1).public(), "{known}");
        }
        let last = follow(cluster(), owner(1).public(), &all[..2]).unwrap();
        assert_eq!(last.unwrap().recovery_recipient, recipient(3));
        // Whoever is the owner already, and whoever never was, is led to nobody.
        for known in [3, 9] {
            let last = follow(cluster(), owner(known).public(), &all[..2]).unwrap();
            assert_eq!(last, None, "{known}");
        }
    }

    #[test]
    fn nobody_else_makes_an_owner() {
        let forged = v1::OwnerReplacement {
            former_owner_public_key: owner(1).public().as_bytes().to_vec(),
            ..replacement(9, 2)
        };
        let error = follow(cluster(), owner(1).public(), &[forged]).unwrap_err();
        assert_eq!(error.to_string(), "owner replacement: invalid signature");
        let other = ClusterId::try_from(&[4; 16][..]).unwrap();
        Replacement::verify(other, &replacement(1, 2)).unwrap_err();
        let same = Replacement::verify(cluster(), &replacement(1, 1)).unwrap_err();
        assert!(same.to_string().contains("another key"), "{same}");
    }

    proptest! {
        #[test]
        fn every_byte_of_a_replacement_counts(field in 0_usize..5, at: prop::sample::Index) {
            let mut message = replacement(1, 2);
            let fields = [
                &mut message.former_owner_public_key,
                &mut message.owner_public_key,
                &mut message.recovery_recipient,
                &mut message.former_owner_signature,
                &mut message.owner_signature,
            ];
            let bytes = fields.into_iter().nth(field).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1;
            prop_assert!(Replacement::verify(cluster(), &message).is_err());
        }
    }
}
