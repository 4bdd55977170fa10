//! What has to hold for a secret to be released, and the digest by which a TPM knows it.
//!
//! A policy has one or two parts, in this order:
//!
//! 1. **signed**: some registers (PCR 11) have values for which the builder of images has signed. The TPM checks the
//!    registers and then replaces the policy so far by the name of the key (`PolicyAuthorize`), so the next image of the
//!    same builder opens what this one sealed.
//! 2. **literal**: other registers (PCR 7) have the values that they had when the secret was sealed.
//!
//! Order and meaning are those of systemd's credentials. The digests are computed here, without a TPM, so that the image
//! builder can sign for values that no machine has yet, and so that nothing is sealed to a policy that a TPM made up.

use super::key::PolicyKey;
use super::pcr::{Digest, PcrSelection, PcrValues};
use super::wire::Writer;

const POLICY_PCR: u32 = 0x0000_017f;
const POLICY_AUTHORIZE: u32 = 0x0000_016a;

/// A part of a policy without registers: it would hold always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("policy: expected at least one PCR, got none")]
pub struct EmptyPolicy;

/// The part of a policy that a signature can meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedPolicy {
    key: PolicyKey,
    pcrs: PcrSelection,
}

impl SignedPolicy {
    /// `pcrs` must have values for which `key` has signed.
    pub fn new(key: PolicyKey, pcrs: PcrSelection) -> Result<Self, EmptyPolicy> {
        if pcrs.is_empty() {
            return Err(EmptyPolicy);
        }
        Ok(Self { key, pcrs })
    }

    /// Whose signatures count.
    pub fn key(&self) -> &PolicyKey {
        &self.key
    }

    /// The registers, at least one.
    pub fn pcrs(&self) -> PcrSelection {
        self.pcrs
    }
}

/// What has to hold for a secret to be released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    pcrs: PcrSelection,
    signed: Option<SignedPolicy>,
}

impl Policy {
    /// `pcrs` must have the values that they have when the secret is sealed; empty only if there is a signed part.
    pub fn new(pcrs: PcrSelection, signed: Option<SignedPolicy>) -> Result<Self, EmptyPolicy> {
        if pcrs.is_empty() && signed.is_none() {
            return Err(EmptyPolicy);
        }
        Ok(Self { pcrs, signed })
    }

    /// The literal part.
    pub fn pcrs(&self) -> PcrSelection {
        self.pcrs
    }

    /// The signed part.
    pub fn signed(&self) -> Option<&SignedPolicy> {
        self.signed.as_ref()
    }

    /// The digest of this policy where the literal part has these values (`authPolicy` of the sealed object).
    pub(crate) fn digest(&self, literal: &PcrValues) -> Digest {
        let signed = match &self.signed {
            Some(signed) => after_authorize(&signed.key),
            None => Digest::ZERO,
        };
        if self.pcrs.is_empty() {
            return signed;
        }
        after_pcrs(&signed, literal)
    }
}

/// The digest of a policy which demands these values and nothing else. This is what the builder of an image signs, and
/// what `.pcrsig` calls `pol`.
pub fn pcr_policy(values: &PcrValues) -> Digest {
    after_pcrs(&Digest::ZERO, values)
}

/// PolicyPCR on top of `before`.
fn after_pcrs(before: &Digest, values: &PcrValues) -> Digest {
    let selection = values.selection().write(Writer::new()).finish();
    Digest::of(&[
        &before.0,
        &POLICY_PCR.to_be_bytes(),
        &selection,
        &values.digest().0,
    ])
}

/// PolicyAuthorize with an empty reference: it forgets what was before.
fn after_authorize(key: &PolicyKey) -> Digest {
    let named = Digest::of(&[
        &Digest::ZERO.0,
        &POLICY_AUTHORIZE.to_be_bytes(),
        &key.name(),
    ]);
    // The second hash is that of the reference, which is empty.
    Digest::of(&[&named.0])
}
