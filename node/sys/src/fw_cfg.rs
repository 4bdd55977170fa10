//! Items that QEMU passes to its guest through the fw_cfg device.
//!
//! The kernel exposes each item as `by_name/NAME/raw` under `/sys/firmware/qemu_fw_cfg`. If the
//! device or the item does not exist, as on a machine that is not emulated, reading returns `None`.
//! An item that exists but cannot be read is an error: a fallback to another source of parameters
//! would hide the operator's intent.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::files::{self, FileError};

/// The directory in which the kernel's `qemu_fw_cfg` driver exposes the items.
pub const SYSFS: &str = "/sys/firmware/qemu_fw_cfg";

/// The maximum size of an item, in bytes. Ours have a few KiB.
pub const MAX_SIZE: u64 = 256 * 1024;

/// Why an item cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FwCfgError {
    /// The name is invalid: empty, absolute, or with empty or dot components.
    #[error("fw_cfg: invalid item name {name:?}")]
    BadName {
        /// The requested name.
        name: String,
    },
    /// It is unknown whether the item exists.
    #[error("fw_cfg item {name}: cannot look it up")]
    Lookup {
        /// The requested name.
        name: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The item exists, but its content cannot be read.
    #[error("fw_cfg item {name}: cannot read it")]
    Read {
        /// The requested name.
        name: String,
        /// The error of the file; also for an item that is too large.
        source: FileError,
    },
    /// The item exists, but the file with its content does not.
    #[error("fw_cfg item {name}: the item exists, but has no content file")]
    NoContent {
        /// The requested name.
        name: String,
    },
}

/// The fw_cfg items of this machine.
#[derive(Clone, Debug)]
pub struct FwCfg {
    base: PathBuf,
}

impl Default for FwCfg {
    fn default() -> Self {
        Self::at(SYSFS)
    }
}

impl FwCfg {
    /// The items under `base`, which is [`SYSFS`] except in tests.
    pub fn at(base: impl Into<PathBuf>) -> Self {
        Self { base: base.into() }
    }

    /// Reads an item, such as `opt/dev.example/settings`.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, FwCfgError> {
        let item = self.base.join("by_name").join(checked(name)?);
        match fs::metadata(&item) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(FwCfgError::Lookup {
                    name: name.to_owned(),
                    source,
                });
            }
        }
        match files::read_limited(&item.join("raw"), MAX_SIZE) {
            Ok(Some(content)) => Ok(Some(content)),
            Ok(None) => Err(FwCfgError::NoContent {
                name: name.to_owned(),
            }),
            Err(source) => Err(FwCfgError::Read {
                name: name.to_owned(),
                source,
            }),
        }
    }
}

/// Reads an item of this machine; see [`FwCfg::read`].
pub fn read(name: &str) -> Result<Option<Vec<u8>>, FwCfgError> {
    FwCfg::default().read(name)
}

fn checked(name: &str) -> Result<&Path, FwCfgError> {
    let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
    if name.split('/').all(plain) {
        Ok(Path::new(name))
    } else {
        Err(FwCfgError::BadName {
            name: name.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "opt/dev.example/settings";

    /// Creates an item as the kernel does: the name is a link to the key.
    fn with_item(content: Option<&[u8]>) -> (tempfile::TempDir, FwCfg) {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("by_key/41");
        let by_name = dir.path().join("by_name/opt/dev.example");
        fs::create_dir_all(&key).unwrap();
        fs::create_dir_all(&by_name).unwrap();
        if let Some(content) = content {
            fs::write(key.join("raw"), content).unwrap();
        }
        std::os::unix::fs::symlink(&key, by_name.join("settings")).unwrap();
        let fw_cfg = FwCfg::at(dir.path());
        (dir, fw_cfg)
    }

    #[test]
    fn content_is_read_even_if_empty() {
        let (_dir, fw_cfg) = with_item(Some(b"abc"));
        assert_eq!(fw_cfg.read(NAME).unwrap().unwrap(), b"abc");
        let (_dir, fw_cfg) = with_item(Some(b""));
        assert_eq!(fw_cfg.read(NAME).unwrap().unwrap(), b"");
    }

    #[test]
    fn no_device_and_no_item_are_absence() {
        let (dir, fw_cfg) = with_item(Some(b"abc"));
        assert!(fw_cfg.read("opt/dev.example/other").unwrap().is_none());
        assert!(fw_cfg.read("etc/other").unwrap().is_none());
        let nothing = FwCfg::at(dir.path().join("nothing"));
        assert!(nothing.read(NAME).unwrap().is_none());
    }

    #[test]
    fn an_item_without_content_is_an_error() {
        let (_dir, fw_cfg) = with_item(None);
        let error = fw_cfg.read(NAME).unwrap_err();
        assert!(matches!(error, FwCfgError::NoContent { .. }), "{error}");
    }

    #[test]
    fn an_item_beyond_the_bound_is_an_error() {
        let (_dir, fw_cfg) = with_item(Some(&vec![0; MAX_SIZE as usize + 1]));
        let error = fw_cfg.read(NAME).unwrap_err();
        assert!(error.to_string().contains(NAME), "{error}");
        let (_dir, fw_cfg) = with_item(Some(&vec![0; MAX_SIZE as usize]));
        assert_eq!(fw_cfg.read(NAME).unwrap().unwrap().len() as u64, MAX_SIZE);
    }

    #[test]
    fn names_that_leave_the_tree_are_refused() {
        let (_dir, fw_cfg) = with_item(Some(b"abc"));
        for name in ["", "/etc/passwd", "opt/../../x", "opt//x", "opt/.", "a\0b"] {
            assert!(
                matches!(fw_cfg.read(name), Err(FwCfgError::BadName { .. })),
                "{name:?}"
            );
        }
    }
}
