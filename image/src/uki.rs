//! Unified kernel images (UAPI group specification 5): one EFI program of stub, kernel, command line, os-release and
//! initramfs, which the boot loader starts.
//!
//! The stub measures its sections into the TPM's PCR 11 before it uses them, in an order of its own ([`MEASURED`]) and not in
//! that of the file. A signed image also has the builder's public key, which is measured, and its signature over the
//! register's value, which cannot be ([`PcrSignatures`]). The stub passes both to user space, as
//! `/.extra/tpm2-pcr-public-key.pem` and `/.extra/tpm2-pcr-signature.json`.

use hearth_tpm::{Digest, Pcr, PcrSignatures, PcrValues, SignError, SigningKey};

use crate::kernel::{self, KernelError};
use crate::pe::{self, PeError, Section};

/// x86 kernels accept 2047 characters and a NUL.
const LONGEST_COMMAND_LINE: usize = 2047;

/// Why a unified kernel image could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum UkiError {
    #[error("kernel command line: expected printable ASCII, got {character:?} at {position}")]
    CommandLineCharacter { character: char, position: usize },
    #[error("kernel command line: expected at most {LONGEST_COMMAND_LINE} characters, got {0}")]
    CommandLineLength(usize),
    #[error("cannot use the kernel")]
    Kernel(#[from] KernelError),
    #[error("cannot use the EFI stub")]
    Stub(#[from] PeError),
    #[error("cannot sign the PCR policy")]
    Policy(#[from] SignError),
}

/// The sections that systemd's stub (252) measures, in its order; those that an image does not have are left out.
const MEASURED: [&str; 7] = [
    ".linux", ".osrel", ".cmdline", ".initrd", ".splash", ".dtb", ".pcrpkey",
];

/// A kernel command line that stub, firmware and kernel read alike: one line of printable ASCII.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine(String);

impl CommandLine {
    /// Checks `text`, after trimming blanks at both ends.
    pub fn parse(text: &str) -> Result<CommandLine, UkiError> {
        let text = text.trim_matches(' ');
        if let Some((position, character)) = text
            .chars()
            .enumerate()
            .find(|(_, c)| !matches!(c, ' '..='~'))
        {
            return Err(UkiError::CommandLineCharacter {
                character,
                position,
            });
        }
        if text.len() > LONGEST_COMMAND_LINE {
            return Err(UkiError::CommandLineLength(text.len()));
        }
        Ok(CommandLine(text.to_owned()))
    }

    /// The command line as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The parts of a unified kernel image.
#[derive(Debug, Clone, Copy)]
pub struct Uki<'a> {
    /// systemd's EFI stub, unsigned.
    pub stub: &'a [u8],
    /// os-release text.
    pub os_release: &'a str,
    /// The kernel's command line.
    pub command_line: &'a CommandLine,
    /// The initramfs, in a compression that the kernel supports.
    pub initramfs: &'a [u8],
    /// bzImage with an EFI stub.
    pub kernel: &'a [u8],
    /// The key that signs its PCR policy; none for an unsigned image.
    pub policy_key: Option<&'a SigningKey>,
}

/// A unified kernel image.
#[derive(Debug, Clone)]
pub struct Built {
    /// The EFI program.
    pub program: Vec<u8>,
    /// PCR 11 when it has been started.
    pub pcr_11: Digest,
}

impl Uki<'_> {
    /// Builds the EFI program.
    pub fn build(&self) -> Result<Built, UkiError> {
        kernel::check(self.kernel)?;
        let public = self.policy_key.map(|key| key.public().to_pem());
        let public = public.as_deref().unwrap_or_default();
        let mut sections = vec![
            (".osrel", self.os_release.as_bytes()),
            (".cmdline", self.command_line.0.as_bytes()),
            (".pcrpkey", public.as_bytes()),
            (".initrd", self.initramfs),
            // Last: old stubs let the kernel decompress in place, over the sections after it.
            (".linux", self.kernel),
        ];
        // An empty command line has no section, and neither has an absent key. Anything else that is empty is an error.
        sections
            .retain(|(name, data)| !data.is_empty() || ![".cmdline", ".pcrpkey"].contains(name));
        let pcr_11 = measure(&sections);
        let signature = self.policy_key.map(|key| sign(key, pcr_11)).transpose()?;
        if let Some(signature) = &signature {
            sections.insert(sections.len() - 2, (".pcrsig", signature.as_bytes()));
        }
        let sections: Vec<Section<'_>> = sections
            .into_iter()
            .map(|(name, data)| Section { name, data })
            .collect();
        Ok(Built {
            program: pe::append_sections(self.stub, &sections)?,
            pcr_11,
        })
    }
}

/// The section `.pcrsig` for this value of PCR 11.
fn sign(key: &SigningKey, pcr_11: Digest) -> Result<String, SignError> {
    let mut signatures = PcrSignatures::default();
    let values = PcrValues::from_iter([(Pcr::KERNEL_IMAGE, pcr_11)]);
    signatures.sign(key, &values)?;
    Ok(signatures.to_json())
}

/// PCR 11 after the stub has measured these sections.
fn measure(sections: &[(&str, &[u8])]) -> Digest {
    let mut pcr = Digest::ZERO;
    for measured in MEASURED {
        if let Some((name, data)) = sections.iter().find(|(name, _)| *name == measured) {
            pcr = pcr.measured(format!("{name}\0").as_bytes()).measured(data);
        }
    }
    pcr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines() {
        assert_eq!(
            CommandLine::parse(" console=ttyS0 quiet ")
                .unwrap()
                .as_str(),
            "console=ttyS0 quiet"
        );
        assert!(matches!(
            CommandLine::parse("a\nb"),
            Err(UkiError::CommandLineCharacter {
                character: '\n',
                position: 1
            })
        ));
        assert!(CommandLine::parse("é").is_err());
        assert!(CommandLine::parse(&"x".repeat(2047)).is_ok());
        assert!(matches!(
            CommandLine::parse(&"x".repeat(2048)),
            Err(UkiError::CommandLineLength(2048))
        ));
    }

    /// The values were computed by Debian's systemd-measure (252) from files with this content.
    #[test]
    fn sections_are_measured_in_the_order_of_the_stub() {
        let mut sections: Vec<(&str, &[u8])> = vec![
            (".osrel", b"ID=x\n"),
            (".cmdline", b"quiet"),
            (".initrd", b"initrd"),
            (".linux", b"linux"),
        ];
        let unsigned = measure(&sections).to_string();
        assert_eq!(
            unsigned,
            "c3fac044128cd85ccb6d6954c8b9ea2d43debd8fa8a0522ba07f303ad8d0ca5f"
        );
        sections.insert(2, (".pcrpkey", b"key\n"));
        sections.insert(3, (".pcrsig", b"not measured"));
        let signed = measure(&sections).to_string();
        assert_eq!(
            signed,
            "329864f643bfb97aa01f54a26a349126e5aa3ba1918f1b7e8f7d946a3c70cc21"
        );
    }
}
