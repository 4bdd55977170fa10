//! The name of one life of a machine as a node. The sealed configuration and
//! the data partition bear it both, so it stands in the lower of the two.

use std::fmt;

use hearth_api::identity::random_bytes;

/// One life of a machine as a node: made with its first sealed configuration,
/// borne by its data partition, named by whoever wants to end it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnrolmentId([u8; 16]);

/// Not 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("enrolment ID of {found} bytes: wanted 16")]
pub struct EnrolmentIdLength {
    /// How many there are.
    pub found: usize,
}

impl EnrolmentId {
    /// A new one.
    pub fn generate() -> Self {
        Self(random_bytes())
    }

    /// From its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
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
