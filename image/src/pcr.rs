//! Values of a TPM's platform configuration registers (PCRs), in the bank sha256.
//!
//! A register can only be extended: its new value is the digest of the old one and of what is measured. So a value
//! stands for one sequence of measurements, and whoever knows the sequence can compute the value.

use std::fmt;

use ring::digest::{Context, SHA256, digest};

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// The SHA-256 digest of `data`.
pub fn sha256(data: &[u8]) -> Digest {
    finish(digest(&SHA256, data))
}

fn finish(value: ring::digest::Digest) -> Digest {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(value.as_ref());
    bytes
}

/// The value of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pcr(Digest);

impl Pcr {
    /// After the machine's reset.
    pub const RESET: Pcr = Pcr([0; 32]);

    /// After an event with this digest.
    #[must_use]
    pub fn extend(self, event: &Digest) -> Pcr {
        let mut context = Context::new(&SHA256);
        context.update(&self.0);
        context.update(event);
        Pcr(finish(context.finish()))
    }

    /// After an event with the digest of `data`.
    #[must_use]
    pub fn measure(self, data: &[u8]) -> Pcr {
        self.extend(&sha256(data))
    }

    /// The digest of a policy (TPM2_PolicyPCR) that is met while the register with this number has this value.
    /// Numbers are below 24.
    pub fn policy(self, number: u8) -> Digest {
        /// TPM_CC_PolicyPCR.
        const POLICY_PCR: u32 = 0x0000_017f;
        /// TPM_ALG_SHA256.
        const ALG_SHA256: u16 = 0x000b;
        let mut selected = [0u8; 3];
        selected[usize::from(number / 8)] = 1 << (number % 8);

        let mut context = Context::new(&SHA256);
        // The digest of the empty policy.
        context.update(&[0; 32]);
        context.update(&POLICY_PCR.to_be_bytes());
        // TPML_PCR_SELECTION with one bank.
        context.update(&1u32.to_be_bytes());
        context.update(&ALG_SHA256.to_be_bytes());
        context.update(&[selected.len() as u8]);
        context.update(&selected);
        context.update(&sha256(&self.0));
        finish(context.finish())
    }
}

/// In hexadecimal, lower case.
impl fmt::Display for Pcr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
