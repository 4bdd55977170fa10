//! What a boot of an image measures into a TPM, computed from the image's bytes.
//!
//! The values are not recorded from a boot: an operator or a curator can decide which images a node may have booted
//! without having booted them, and a new release's values are known before it runs. The suite `measured` compares them
//! with a boot. All values are those of the bank sha256.
//!
//! | PCR | measured by | events, in their order |
//! |---|---|---|
//! | 4 | firmware | the text "Calling EFI Application from Boot Option"; a separator of four zero bytes; the Authenticode digests of systemd-boot, of the UKI, and of the kernel inside it, which the stub loads like any program |
//! | 11 | the UKI's stub | for each section, the name with its NUL, then the content ([`crate::uki`]) |
//! | 12 | systemd-boot, then the stub | the kernel's command line in UTF-16 with its NUL, twice: systemd-boot measures what it passes on, and the stub measures what it was passed |
//!
//! The order and the content are those of the event log of TianoCore's firmware (OVMF, Debian 12) with systemd 252, whose
//! replay gives the registers' values.
//!
//! PCR 11 depends on the UKI alone. PCR 4 and 12 depend on the way to it ([`BootPath`]): firmware that starts the UKI
//! itself measures no loader and passes no command line, and a boot option that was tried before adds its own events to
//! PCR 4. With Secure Boot the stub does not take a command line from outside and so measures none. A direct boot by a
//! hypervisor measures nothing.
//!
//! PCR 0 to 3 (firmware and its options), 5 (the partition table, with its GUIDs) and 7 (Secure Boot's keys) are the
//! machine's and not the image's.

use hearth_tpm::{Digest, Pcr};
use serde::Serialize;

use crate::authenticode::{self, AuthenticodeError};

/// The version of the format of [`Measurements::to_json`].
const VERSION: u32 = 1;

/// The event that firmware measures before it starts a boot option (EV_EFI_ACTION).
const BOOT_OPTION: &[u8] = b"Calling EFI Application from Boot Option";
/// The event that separates firmware from what it starts (EV_SEPARATOR).
const SEPARATOR: &[u8] = &[0; 4];

/// Why measurements could not be computed.
#[derive(Debug, thiserror::Error)]
#[error("cannot compute the measurement of the {what}")]
pub struct MeasurementError {
    /// The program that the firmware would load.
    pub what: &'static str,
    /// What is wrong with it.
    pub source: AuthenticodeError,
}

/// The way from the firmware to the kernel that a value holds for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BootPath {
    /// The firmware's first boot option starts systemd-boot on the ESP, which starts the UKI; without Secure Boot.
    SystemdBoot,
}

/// The value of a register after a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// The register.
    pub pcr: Pcr,
    /// Its value when the kernel starts; nothing in Hearth's user space extends it.
    pub value: Digest,
    /// The way to boot that it holds for; none: any by which the firmware starts the UKI.
    pub boot_path: Option<BootPath>,
}

/// What is booted.
#[derive(Clone, Copy, Debug)]
pub struct Booted<'a> {
    /// The boot loader on the ESP.
    pub loader: &'a [u8],
    /// The unified kernel image.
    pub uki: &'a [u8],
    /// The value that its sections give.
    pub pcr_11: Digest,
    /// The kernel inside it.
    pub kernel: &'a [u8],
    /// The kernel's command line: printable ASCII.
    pub command_line: &'a str,
}

/// The measurements of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measurements {
    /// By ascending number.
    registers: Vec<Measurement>,
    /// What the firmware measures of each program: boot loader, unified kernel image, kernel.
    programs: [Digest; 3],
    /// What boot loader and stub measure of the command line; none if it is empty.
    command_line: Option<Digest>,
}

impl Measurements {
    /// Of a boot of these parts.
    ///
    /// # Errors
    /// If one of them is no program that firmware could load.
    pub fn of(booted: &Booted<'_>) -> Result<Measurements, MeasurementError> {
        let boot_path = Some(BootPath::SystemdBoot);
        let programs = [
            program("boot loader", booted.loader)?,
            program("unified kernel image", booted.uki)?,
            program("kernel", booted.kernel)?,
        ];
        let command_line = command_line(booted.command_line);
        let registers = vec![
            Measurement {
                pcr: Pcr::BOOT_PROGRAMS,
                value: pcr_4(&programs),
                boot_path,
            },
            Measurement {
                pcr: Pcr::KERNEL_IMAGE,
                value: booted.pcr_11,
                boot_path: None,
            },
            Measurement {
                pcr: Pcr::COMMAND_LINE,
                value: pcr_12(command_line.as_ref()),
                boot_path,
            },
        ];
        Ok(Measurements {
            registers,
            programs,
            command_line,
        })
    }

    /// The measurements.
    pub fn iter(&self) -> impl Iterator<Item = &Measurement> {
        self.registers.iter()
    }

    /// As a file, with the digest of the UKI that it describes:
    ///
    /// ```text
    /// {
    ///   "version": 1,
    ///   "uki_sha256": "<hex>",
    ///   "bank": "sha256",
    ///   "measurements": [
    ///     { "pcr": 4, "value": "<hex>", "boot_path": "systemd-boot" },
    ///     { "pcr": 11, "value": "<hex>" }
    ///   ],
    ///   "programs": ["<hex>", "<hex>", "<hex>"],
    ///   "command_lines": ["<hex>"]
    /// }
    /// ```
    ///
    /// `programs` and `command_lines` are the single events of PCR 4 and 12, from which any way to boot the image can be
    /// recognized: [`hearth_tpm::images`].
    ///
    /// A reader refuses another version. New fields and further registers do not change the version.
    pub fn to_json(&self, uki: &[u8]) -> String {
        let rows = self.registers.iter().map(|measurement| Row {
            pcr: measurement.pcr.index(),
            value: measurement.value.to_string(),
            boot_path: measurement.boot_path,
        });
        let document = Document {
            version: VERSION,
            uki_sha256: Digest::of(&[uki]).to_string(),
            bank: "sha256",
            measurements: rows.collect(),
            programs: self.programs.each_ref().map(Digest::to_string),
            command_lines: self.command_line.iter().map(Digest::to_string).collect(),
        };
        // Numbers and text have no form that JSON lacks.
        serde_json::to_string_pretty(&document).unwrap_or_default() + "\n"
    }
}

#[derive(Serialize)]
struct Document {
    version: u32,
    uki_sha256: String,
    bank: &'static str,
    measurements: Vec<Row>,
    programs: [String; 3],
    command_lines: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    pcr: u8,
    value: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_path: Option<BootPath>,
}

fn program(what: &'static str, program: &[u8]) -> Result<Digest, MeasurementError> {
    authenticode::sha256(program).map_err(|source| MeasurementError { what, source })
}

fn pcr_4(programs: &[Digest]) -> Digest {
    let before = Digest::ZERO.measured(BOOT_OPTION).measured(SEPARATOR);
    programs
        .iter()
        .fold(before, |value, program| value.extended(program))
}

/// In UTF-16, with its NUL. Without one, the UKI has no section for it, and nothing is passed on.
fn command_line(text: &str) -> Option<Digest> {
    let with_nul = text.encode_utf16().chain([0]);
    let passed: Vec<u8> = with_nul.flat_map(u16::to_le_bytes).collect();
    (!text.is_empty()).then(|| Digest::of(&[&passed]))
}

/// Measured by the boot loader and by the stub.
fn pcr_12(command_line: Option<&Digest>) -> Digest {
    let each = command_line.into_iter().flat_map(|line| [line; 2]);
    each.fold(Digest::ZERO, |value, line| value.extended(line))
}
