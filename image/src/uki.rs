//! Unified kernel images (UAPI group specification 5): one EFI program of stub, kernel, command line, os-release and
//! initramfs, which the boot loader starts.

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
}

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
}

impl Uki<'_> {
    /// Builds the EFI program.
    pub fn build(&self) -> Result<Vec<u8>, UkiError> {
        kernel::check(self.kernel)?;
        let all = [
            (".osrel", self.os_release.as_bytes()),
            (".cmdline", self.command_line.0.as_bytes()),
            (".initrd", self.initramfs),
            // Last: old stubs let the kernel decompress in place, over the sections after it.
            (".linux", self.kernel),
        ];
        let sections: Vec<Section<'_>> = all
            .into_iter()
            // An empty command line has no section.
            .filter(|(name, data)| *name != ".cmdline" || !data.is_empty())
            .map(|(name, data)| Section { name, data })
            .collect();
        Ok(pe::append_sections(self.stub, &sections)?)
    }
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
}
