//! What a TPM signs about its PCRs (TPMS_ATTEST of type quote).

use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};

use super::{AttestationKey, QUOTED};
use crate::pcr::{Digest, PcrSelection};
use crate::wire::{Malformed, Reader};

/// The start of everything that a TPM signs of itself, TPM_GENERATED_VALUE.
const GENERATED: [u8; 4] = [0xff, 0x54, 0x43, 0x47];
/// TPM_ST_ATTEST_QUOTE.
const IS_QUOTE: [u8; 2] = [0x80, 0x18];
/// The largest name, with room for hashes that are not used.
const MAX_NAME: usize = 66;
/// The largest structure that is accepted: a quote has less than 200 bytes.
const MAX_QUOTE: usize = 512;

/// Why a quote says nothing about its caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuoteError {
    /// The attestation key has not signed this.
    #[error("the signature of the quote is not that of the attestation key")]
    Signature,
    /// It is signed, but no quote.
    #[error("quote: {0}")]
    Malformed(#[from] Malformed),
    /// It was made for another question, or for another caller.
    #[error("the quote is for another challenge: expected {expected}, got {found}")]
    OtherChallenge {
        /// The digest over nonce and caller.
        expected: Digest,
        /// That of the quote, in hexadecimal.
        found: String,
    },
    /// It is about other PCRs.
    #[error("quote: expected {QUOTED}, got {0}")]
    OtherPcrs(PcrSelection),
}

/// A quote and its signature, as a TPM has made them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quote {
    /// TPMS_ATTEST.
    pub attested: Vec<u8>,
    /// ECDSA with SHA-256: r and s, 32 bytes each.
    pub signature: [u8; 64],
}

impl Quote {
    /// The digest over the values of [`QUOTED`].
    pub(crate) fn verify(
        &self,
        key: &AttestationKey,
        qualifying: &Digest,
    ) -> Result<Digest, QuoteError> {
        let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key.0.uncompressed());
        let verified = public.verify(&self.attested, &self.signature);
        verified.map_err(|_| QuoteError::Signature)?;
        let Quoted {
            qualifying: found,
            pcrs,
            digest,
        } = Quoted::parse(&self.attested)?;
        if found != qualifying.0 {
            return Err(QuoteError::OtherChallenge {
                expected: *qualifying,
                found: hex::encode(found),
            });
        }
        if pcrs != QUOTED {
            return Err(QuoteError::OtherPcrs(pcrs));
        }
        Ok(digest)
    }
}

/// The parts of a quote that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quoted<'a> {
    /// The qualifying data.
    pub qualifying: &'a [u8],
    /// Which registers.
    pub pcrs: PcrSelection,
    /// The digest over their values.
    pub digest: Digest,
}

impl<'a> Quoted<'a> {
    /// What bytes say that a TPM may have signed.
    ///
    /// # Errors
    /// If they are no quote.
    pub fn parse(attested: &'a [u8]) -> Result<Self, Malformed> {
        if attested.len() > MAX_QUOTE {
            let expected = format!("{MAX_QUOTE} bytes at most");
            return Err(Malformed::new("size", expected, attested.len().to_string()));
        }
        let mut reader = Reader::new(attested);
        reader.expect("magic number", &GENERATED)?;
        reader.expect("type", &IS_QUOTE)?;
        reader.sized("name of the signer", MAX_NAME)?;
        let qualifying = reader.sized("qualifying data", MAX_NAME)?;
        // Clock, counts of resets and restarts, whether the clock is safe; the version of the firmware.
        reader.bytes("clock and firmware", 8 + 4 + 4 + 1 + 8)?;
        let pcrs = PcrSelection::read(&mut reader)?;
        reader.expect("size of the digest", &[0, 32])?;
        let digest = Digest(reader.array("digest")?);
        reader.end()?;
        Ok(Self {
            qualifying,
            pcrs,
            digest,
        })
    }
}
