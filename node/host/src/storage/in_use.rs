//! How the data partition is encrypted, as the kernel says.
//!
//! The sealed configuration says how it should be. What operators are shown is read back from device-mapper instead, so that
//! a mistake on the way from one to the other would be seen.

use hearth_api::v1::{StorageSecurity, StorageStatus};

/// The encryption of the open data partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    /// The mode.
    pub security: StorageSecurity,
    /// The kernel's name of the cipher; empty for INSECURE.
    pub cipher: String,
}

impl InUse {
    /// From the parameters of dm-crypt, `CIPHER KEY IV-OFFSET DEVICE OFFSET [NUMBER OPTION...]`; `None`: there is none.
    pub(super) fn of_table(table: Option<&str>) -> Self {
        let mut words = table.unwrap_or_default().split_whitespace();
        let cipher = words.next().unwrap_or_default().to_owned();
        let security = match table {
            None => StorageSecurity::Insecure,
            Some(_) if words.any(|word| word.starts_with("integrity:")) => {
                StorageSecurity::AuthenticatedEncrypted
            }
            Some(_) => StorageSecurity::Encrypted,
        };
        Self { security, cipher }
    }
}

impl From<&InUse> for StorageStatus {
    fn from(in_use: &InUse) -> Self {
        Self {
            security: in_use.security.into(),
            cipher: in_use.cipher.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_says_what_is_in_use() {
        let of = |table| {
            let InUse { security, cipher } = InUse::of_table(table);
            (security, cipher)
        };
        assert_eq!(of(None), (StorageSecurity::Insecure, String::new()));
        let encrypted = "capi:xts(aes)-plain64 :64:logon:hearth:hearth-data 0 253:0 0 2 allow_discards sector_size:4096";
        assert_eq!(
            of(Some(encrypted)),
            (
                StorageSecurity::Encrypted,
                "capi:xts(aes)-plain64".to_owned()
            )
        );
        let authenticated = "capi:gcm(aes)-random :32:logon:hearth:hearth-data 0 253:1 0 2 integrity:28:aead sector_size:4096";
        assert_eq!(
            of(Some(authenticated)),
            (
                StorageSecurity::AuthenticatedEncrypted,
                "capi:gcm(aes)-random".to_owned()
            )
        );
    }
}
