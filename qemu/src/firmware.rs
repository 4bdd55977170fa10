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
const CANDIDATES: [(&str, &str); 6] = [
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
        "/usr/share/edk2/ovmf-4m/OVMF_CODE.fd",
        "/usr/share/edk2/ovmf-4m/OVMF_VARS.fd",
    ),
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

/// The environment variable with the path of another firmware's code.
pub const CODE: &str = "HEARTH_OVMF_CODE";

/// The environment variable with the path of its empty variable store.
pub const VARS: &str = "HEARTH_OVMF_VARS";

/// No firmware was found.
#[derive(Debug, thiserror::Error)]
pub enum NoFirmware {
    /// In none of the paths of the distributions.
    #[error(
        "no UEFI firmware on this host: install the package ovmf, or set {CODE} and {VARS} (searched for {0})"
    )]
    Nowhere(String),
    /// The environment names only one of the two files.
    #[error("{CODE} and {VARS}: expected both or neither, got only {0}")]
    Half(&'static str),
    /// A file that the environment names does not exist.
    #[error("{variable}: expected a file, got {}", path.display())]
    NoFile {
        /// The variable.
        variable: &'static str,
        /// Its value.
        path: PathBuf,
    },
}

impl Firmware {
    /// The firmware that the environment names, or the first in the paths of the distributions.
    ///
    /// # Errors
    /// If there is none; the error names the package and the variables.
    pub fn locate() -> Result<Self, NoFirmware> {
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        match Self::named(variable(CODE), variable(VARS))? {
            Some(pair) => Ok(pair),
            None => Self::locate_under(Path::new("/")),
        }
    }

    fn named(code: Option<PathBuf>, vars: Option<PathBuf>) -> Result<Option<Self>, NoFirmware> {
        let (code, vars) = match (code, vars) {
            (Some(code), Some(vars)) => (code, vars),
            (Some(_), None) => return Err(NoFirmware::Half(CODE)),
            (None, Some(_)) => return Err(NoFirmware::Half(VARS)),
            (None, None) => return Ok(None),
        };
        for (variable, path) in [(CODE, &code), (VARS, &vars)] {
            if !path.is_file() {
                let path = path.clone();
                return Err(NoFirmware::NoFile { variable, path });
            }
        }
        Ok(Some(Self { code, vars }))
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
            .ok_or_else(|| NoFirmware::Nowhere(CANDIDATES.map(|(code, _)| code).join(", ")))
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
    #[test]
    fn the_environment_names_both_files() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "").expect("a file");
            Some(path)
        };
        let (code, vars) = (file("code"), file("vars"));
        assert_eq!(Firmware::named(None, None).expect("nothing named"), None);
        let found = Firmware::named(code.clone(), vars.clone()).expect("two files");
        assert_eq!(found.map(|pair| pair.vars), vars);
        let error = Firmware::named(code.clone(), None).expect_err("half a pair");
        assert!(
            error.to_string().ends_with("got only HEARTH_OVMF_CODE"),
            "{error}"
        );
        let absent = Some(dir.path().join("absent"));
        let error = Firmware::named(code, absent).expect_err("no such file");
        assert!(
            error
                .to_string()
                .starts_with("HEARTH_OVMF_VARS: expected a file"),
            "{error}"
        );
    }
}
