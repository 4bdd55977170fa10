//! The enrolment ID. It is here, below all crates of a node, because parameters name it and tools
//! write parameters.

use std::fmt;

use super::random_bytes;

/// Identifies one enrolment of a machine: generated with its first sealed configuration, stored in
/// the header of its data partition, and named in the parameters that wipe it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnrolmentId([u8; 16]);

/// The enrolment ID does not have 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("enrolment ID: expected 16 bytes, got {found}")]
pub struct EnrolmentIdLength {
    /// The actual number of bytes.
    pub found: usize,
}

impl EnrolmentId {
    /// Generates a random ID.
    pub fn generate() -> Self {
        Self(random_bytes())
    }

    /// Creates the ID from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes of the ID.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl TryFrom<&[u8]> for EnrolmentId {
    type Error = EnrolmentIdLength;

    fn try_from(bytes: &[u8]) -> Result<Self, EnrolmentIdLength> {
        let found = bytes.len();
        <[u8; 16]>::try_from(bytes)
            .map(Self)
            .map_err(|_| EnrolmentIdLength { found })
    }
}

impl fmt::Display for EnrolmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for EnrolmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
