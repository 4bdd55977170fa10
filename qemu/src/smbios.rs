//! The SMBIOS table of a machine, as far as it is not QEMU's own.
//!
//! Strings for anybody (type 11) pass parameters to a machine, which contain secrets: they are passed in files in the
//! machine's folder, readable by its owner only, never on the command line. QEMU takes a file as one string.

use std::fmt;

/// Further content of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Smbios {
    /// Who has made the machine, and what it is; `None`: QEMU's own.
    pub system: Option<System>,
    /// Strings for anybody, in their order.
    pub oem_strings: Vec<OemString>,
}

/// What a machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct System {
    /// Its vendor.
    pub vendor: String,
    /// Its product name.
    pub product: String,
}

/// A string that may be secret. Not empty, no NUL.
#[derive(Clone, PartialEq, Eq)]
pub struct OemString(pub String);

impl fmt::Debug for OemString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OemString({} bytes)", self.0.len())
    }
}
