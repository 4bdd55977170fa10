//! The machine's TPM as the kernel shows it in sysfs: whether there is one, its version, and the values of its platform
//! configuration registers (PCRs).
//!
//! This is for messages. It sends no command of its own and proves nothing to anyone: a value that
//! others should believe has to be quoted by the TPM.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

/// The first TPM, below sysfs.
const DEVICE: &str = "class/tpm/tpm0";
/// Its registers in the bank sha256, one file each, below the device.
const BANK: &str = "pcr-sha256";

/// Why a TPM cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// A file in sysfs cannot be read.
    #[error("cannot read {path}")]
    Sysfs {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// An attribute has an invalid value.
    #[error("{path}: expected {expected}, got {got:?}")]
    Attribute {
        /// The file.
        path: PathBuf,
        /// What it should have.
        expected: &'static str,
        /// What it has.
        got: String,
    },
}

/// A TPM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tpm {
    /// The major version of the specification: 1 or 2.
    pub version: u32,
    /// The registers that were asked for, if the bank sha256 is active. A TPM 1.2 has no such bank.
    pub pcrs: Vec<Pcr>,
}

/// A register and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pcr {
    /// Its number.
    pub number: u8,
    /// Its value: 64 hexadecimal digits in lower case.
    pub value: String,
}

/// `version=2 pcr4=… pcr7=…`
impl fmt::Display for Tpm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version={}", self.version)?;
        for Pcr { number, value } in &self.pcrs {
            write!(f, " pcr{number}={value}")?;
        }
        Ok(())
    }
}

/// The machine's TPM with these registers; none if the kernel has found none. `sys` is `/sys` except
/// in tests. Blocks for as long as the TPM takes.
pub fn read(sys: &Path, pcrs: &[u8]) -> Result<Option<Tpm>, TpmError> {
    let device = sys.join(DEVICE);
    if !device.exists() {
        return Ok(None);
    }
    let path = device.join("tpm_version_major");
    let text = attribute(&path)?;
    let version = text.parse().map_err(|_| TpmError::Attribute {
        path,
        expected: "a number",
        got: text,
    })?;
    let bank = device.join(BANK);
    let pcrs = match bank.exists() {
        true => pcrs
            .iter()
            .map(|number| pcr(&bank, *number))
            .collect::<Result<_, _>>()?,
        false => Vec::new(),
    };
    Ok(Some(Tpm { version, pcrs }))
}

fn pcr(bank: &Path, number: u8) -> Result<Pcr, TpmError> {
    let path = bank.join(number.to_string());
    let text = attribute(&path)?;
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(TpmError::Attribute {
            path,
            expected: "64 hexadecimal digits",
            got: text,
        });
    }
    Ok(Pcr {
        number,
        value: text.to_ascii_lowercase(),
    })
}

fn attribute(path: &Path) -> Result<String, TpmError> {
    let text = fs::read_to_string(path).map_err(|source| TpmError::Sysfs {
        path: path.to_owned(),
        source,
    })?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = sys.path().join(DEVICE).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        sys
    }

    #[test]
    fn a_machine_without_one_is_no_error() {
        assert_eq!(read(with(&[]).path(), &[4]).unwrap(), None);
    }

    #[test]
    fn version_and_registers_are_shown() {
        let value = "AB".repeat(32);
        let sys = with(&[("tpm_version_major", "2"), ("pcr-sha256/11", &value)]);
        let tpm = read(sys.path(), &[11]).unwrap().unwrap();
        let shown = format!("version=2 pcr11={}", "ab".repeat(32));
        assert_eq!(tpm.to_string(), shown);
        let error = read(sys.path(), &[4]).unwrap_err().to_string();
        assert!(error.ends_with("tpm0/pcr-sha256/4"), "{error}");
    }

    #[test]
    fn one_without_the_bank_has_no_values() {
        let sys = with(&[("tpm_version_major", "1")]);
        let tpm = read(sys.path(), &[4]).unwrap().unwrap();
        assert_eq!(tpm.to_string(), "version=1");
    }

    #[test]
    fn nonsense_is_named() {
        let sys = with(&[("tpm_version_major", "two")]);
        let error = read(sys.path(), &[]).unwrap_err().to_string();
        assert!(error.ends_with("expected a number, got \"two\""), "{error}");
        let sys = with(&[("tpm_version_major", "2"), ("pcr-sha256/4", "ab")]);
        let error = read(sys.path(), &[4]).unwrap_err().to_string();
        assert!(
            error.contains("expected 64 hexadecimal digits, got \"ab\""),
            "{error}"
        );
    }
}
