//! A client of TPM 2.0 that seals small secrets, proves what was booted and counts, and the signed policies that images
//! bring for it.
//!
//! The node seals a key so that only this machine, with the Secure Boot state that it had (PCR 7), booted from an image
//! that the builder has signed for (PCR 11), gets it back. [`Tpm::seal`] and [`Tpm::unseal`] do that; [`Sealed`] is what is
//! stored. The image builder uses [`SigningKey`], [`PcrSignatures`] and [`pcr_policy`], none of which needs a TPM. The proof
//! to others is documented in [`attestation`], what they compare it with in [`images`].
//!
//! Invariants:
//!
//! - Nothing stays loaded in the TPM after a call, whatever failed; what could not be flushed is flushed before the next
//!   call.
//! - A sealed secret never passes in clear, in neither direction: sessions are salted with the storage key, and encrypt it.
//! - No response of a TPM, and no bytes that claim to be a record, cause a panic or an allocation beyond a few KiB.
//! - Everything is synchronous: a command takes up to a second on real TPMs, and the kernel's device does not poll. Use a
//!   thread that may block.
//!
//! The commands are marshalled here, twenty of them with the structures that they need. The libraries in C do not
//! fit into one static Rust binary, and a crate that only marshals would leave the larger part, sessions and policies,
//! here all the same.

pub mod attestation;
pub mod boot_log;
mod channel;
mod code;
mod commands;
mod counter;
pub mod images;
mod key;
mod pcr;
mod pcrsig;
mod policy;
mod sealed;
mod session;
mod tpm;
mod transport;
mod wire;

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, reason = "helpers whose names say it")]
#[allow(clippy::unwrap_used, reason = "test code")]
pub mod testing;
#[cfg(test)]
mod tests;

pub use channel::{Command, Error, Retries};
pub use code::{ResponseCode, Subject};
pub use commands::MAX_SECRET;
pub use key::{GenerateError, KeyError, PolicyKey, SignError, SigningKey};
pub use pcr::{Digest, Pcr, PcrDifference, PcrSelection, PcrValues};
pub use pcrsig::{ParseError, PcrSignature, PcrSignatures};
pub use policy::{EmptyPolicy, Policy, SignedPolicy, pcr_policy};
pub use sealed::{DecodeError, Sealed, StorageKeyName};
pub use session::SessionError;
pub use tpm::{Identity, Lockout, OtherTpm, SealError, Tpm, UnsealError};
pub use transport::{Device, SwtpmSocket, Transport};
pub use wire::Malformed;
