//! The UEFI firmware (OVMF) of the host.
//!
//! OVMF consists of two files: the code, which all machines share read-only, and a template of the variables, of which
//! each machine gets a copy that it keeps over power cuts like any other disk. (With it the second boot is faster: the
//! firmware writes less.)

use std::path::{Path, PathBuf};

/// A matching pair: the sizes of the two must fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Firmware {
    /// Path of the code.
    pub code: PathBuf,
    /// Path of an empty variable store.
    pub vars: PathBuf,
}

/// The builds without Secure Boot. The 4 MiB ones first: newer releases do not have those of 2 MiB.
const CANDIDATES: [(&str, &str); 5] = [
    // Debian and Ubuntu
    (
        "/usr/share/OVMF/OVMF_CODE_4M.fd",
        "/usr/share/OVMF/OVMF_VARS_4M.fd",
    ),
    (
        "/usr/share/OVMF/OVMF_CODE.fd",
        "/usr/share/OVMF/OVMF_VARS.fd",
    ),
    // Arch
    (
        "/usr/share/edk2/x64/OVMF_CODE.4m.fd",
        "/usr/share/edk2/x64/OVMF_VARS.4m.fd",
    ),
    // Fedora
    (
        "/usr/share/edk2/ovmf/OVMF_CODE.fd",
        "/usr/share/edk2/ovmf/OVMF_VARS.fd",
    ),
    // openSUSE
    (
        "/usr/share/qemu/ovmf-x86_64-code.bin",
        "/usr/share/qemu/ovmf-x86_64-vars.bin",
    ),
];

/// No firmware was found.
#[derive(Debug, thiserror::Error)]
#[error("no UEFI firmware on this host: install the package ovmf (searched for {looked_for})")]
pub struct NoFirmware {
    looked_for: String,
}

impl Firmware {
    /// Searches the paths of the distributions.
    ///
    /// # Errors
    /// If there is none; the error names the package.
    pub fn locate() -> Result<Self, NoFirmware> {
        Self::locate_under(Path::new("/"))
    }

    fn locate_under(root: &Path) -> Result<Self, NoFirmware> {
        let under = |path: &str| root.join(path.trim_start_matches('/'));
        CANDIDATES
            .iter()
            .map(|(code, vars)| Self {
                code: under(code),
                vars: under(vars),
            })
            .find(|pair| pair.code.is_file() && pair.vars.is_file())
            .ok_or_else(|| NoFirmware {
                looked_for: CANDIDATES.map(|(code, _)| code).join(", "),
            })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn half_a_pair_is_not_taken() {
        let root = tempfile::tempdir().expect("a folder");
        let touch = |path: &str| {
            let path = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, "").expect("a file");
        };
        let error = Firmware::locate_under(root.path()).expect_err("nothing there");
        assert!(error.to_string().contains("package ovmf"), "{error}");
        touch(CANDIDATES[0].0);
        touch(CANDIDATES[1].0);
        touch(CANDIDATES[1].1);
        let found = Firmware::locate_under(root.path()).expect("the second pair");
        assert!(found.code.ends_with("OVMF_CODE.fd"), "{found:?}");
        touch(CANDIDATES[0].1);
        let found = Firmware::locate_under(root.path()).expect("the first pair");
        assert!(found.code.ends_with("OVMF_CODE_4M.fd"), "{found:?}");
    }
}
