//! Which images a machine may have booted.
//!
//! An operator approves an image by what its boot measures, which is known without a boot: the image's builder computes it
//! ([`TrustedImage::parse`] reads its file). A machine's events are compared one by one, and not the values of the
//! registers: the same image is booted in several ways (the firmware may have tried another boot option before, and with
//! Secure Boot it passes no command line), and each way has other values.
//!
//! # Rules
//! - PCR 11 has the value that the parts of the unified kernel image give.
//! - Every program that the firmware was to start (PCR 4) is one of this image: its boot loader, the unified kernel image,
//!   its kernel. The unified kernel image is among them, because whoever writes the events of PCR 11 has to be measured
//!   first. Besides, PCR 4 has notes of the firmware that are the same everywhere.
//! - Every command line (PCR 12) is the image's own. There may be none: then the one in the unified kernel image holds,
//!   which PCR 11 has.
//!
//! Types of events are not authentic, so an event is a note of the firmware by its digest only.

use serde::Deserialize;

use super::boot_log::BootEvent;
use super::pcr::{Digest, Pcr};

/// The version of the file.
const VERSION: u32 = 1;
const BANK: &str = "sha256";

/// What firmware measures into PCR 4 besides programs: before and after each boot option, and where its own part ends. TCG
/// "PC Client Platform Firmware Profile", sections on EV_EFI_ACTION and EV_SEPARATOR.
const NOTES: [&[u8]; 3] = [
    b"Calling EFI Application from Boot Option",
    b"Returning from EFI Application from Boot Option",
    &[0; 4],
];

/// Why a file is not the measurements of an image.
#[derive(Debug, thiserror::Error)]
pub enum ParseImageError {
    /// Not JSON, or fields are missing.
    #[error("measurements: expected JSON with the fields of an image's measurements.json")]
    Json(#[from] serde_json::Error),
    /// The format of another release.
    #[error("measurements: version: expected {VERSION}, got {0}")]
    Version(u32),
    /// Another bank.
    #[error("measurements: bank: expected {BANK:?}, got {0:?}")]
    Bank(String),
    /// A digest is none.
    #[error("measurements: {field}: expected 64 hexadecimal digits, got {got:?}")]
    Digest {
        /// The field.
        field: &'static str,
        /// Its value.
        got: String,
    },
    /// PCR 11 is not among the registers.
    #[error("measurements: expected a value of {}, got none", Pcr::KERNEL_IMAGE)]
    NoImage,
    /// Made by a release that did not list them.
    #[error(
        "measurements: programs: expected the digests of boot loader, image and kernel, got none"
    )]
    NoPrograms,
}

/// Why a boot is not one of a trusted image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// The firmware has measured nothing: it has no TPM support, or a hypervisor has loaded the kernel.
    #[error("nothing of the image was measured")]
    NotMeasured,
    /// No trusted image has these parts.
    #[error("image {0} is not trusted")]
    Image(Digest),
    /// A program that is not part of the image was started before it.
    #[error("image {image} is trusted, but the firmware has also started the program {program}")]
    Program {
        /// The image.
        image: Digest,
        /// The digest of the program.
        program: Digest,
    },
    /// Something has measured the image's parts that the firmware has not started as the image.
    #[error("image {0} is trusted, but the firmware has not started it")]
    NotStarted(Digest),
    /// It was started with another command line.
    #[error("image {image} is trusted, but not with the command line {command_line}")]
    CommandLine {
        /// The image.
        image: Digest,
        /// The digest of the command line, in UTF-16.
        command_line: Digest,
    },
}

/// An image that machines may boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedImage {
    /// The value of PCR 11, by which the image is known.
    pub parts: Digest,
    /// The Authenticode digests of its programs, in the order in which they start: the last two are the unified kernel
    /// image and the kernel in it.
    pub programs: Vec<Digest>,
    /// The digests of its command line as it is measured: in UTF-16, with a NUL.
    pub command_lines: Vec<Digest>,
}

impl TrustedImage {
    /// From the file `measurements.json` of an image.
    ///
    /// # Errors
    /// If it is not such a file, or of a release that lists no programs.
    pub fn parse(json: &[u8]) -> Result<Self, ParseImageError> {
        let file: File = serde_json::from_slice(json)?;
        if file.version != VERSION {
            return Err(ParseImageError::Version(file.version));
        }
        if file.bank != BANK {
            return Err(ParseImageError::Bank(file.bank));
        }
        let parts = file
            .measurements
            .iter()
            .find(|row| row.pcr == Pcr::KERNEL_IMAGE.index());
        let parts = parts.ok_or(ParseImageError::NoImage)?;
        if file.programs.len() < 2 {
            return Err(ParseImageError::NoPrograms);
        }
        Ok(Self {
            parts: digest("value of PCR 11", &parts.value)?,
            programs: digests("programs", &file.programs)?,
            command_lines: digests("command_lines", &file.command_lines)?,
        })
    }

    /// The image that a machine with these events has booted, if it has started one: what the first node of a cluster
    /// trusts.
    pub fn booted(events: &[BootEvent]) -> Option<Self> {
        let programs: Vec<Digest> = programs(events).collect();
        let parts = value(events, Pcr::KERNEL_IMAGE);
        // Boot loader and stub measure the same one.
        let mut command_lines: Vec<Digest> = of(events, Pcr::COMMAND_LINE).collect();
        command_lines.dedup();
        (programs.len() >= 2 && parts != Digest::ZERO).then_some(Self {
            parts,
            programs,
            command_lines,
        })
    }

    /// This image with what `other` knows besides of the same one: programs that a machine's firmware starts before it,
    /// further command lines.
    pub fn with(&self, other: &Self) -> Self {
        let more = |known: &[Digest], others: &[Digest]| {
            let others = others.iter().filter(|digest| !known.contains(digest));
            others.chain(known).copied().collect()
        };
        Self {
            parts: self.parts,
            programs: more(&self.programs, &other.programs),
            command_lines: more(&self.command_lines, &other.command_lines),
        }
    }

    /// The unified kernel image as a program.
    fn itself(&self) -> Option<&Digest> {
        self.programs.iter().rev().nth(1)
    }

    /// Whether a machine with these events has booted this image, and nothing else.
    fn is_booted(&self, events: &[BootEvent]) -> Result<(), Untrusted> {
        let image = self.parts;
        let other = |known: &[Digest], found: Digest| (!known.contains(&found)).then_some(found);
        if let Some(program) = programs(events).find_map(|found| other(&self.programs, found)) {
            return Err(Untrusted::Program { image, program });
        }
        let itself = self.itself();
        if !programs(events).any(|found| Some(&found) == itself) {
            return Err(Untrusted::NotStarted(image));
        }
        let mut command_lines = of(events, Pcr::COMMAND_LINE);
        match command_lines.find_map(|found| other(&self.command_lines, found)) {
            Some(command_line) => Err(Untrusted::CommandLine {
                image,
                command_line,
            }),
            None => Ok(()),
        }
    }
}

/// Which of these images a machine with these events has booted.
///
/// # Errors
/// If it is none of them. Where several images have the same parts, the reason is that of the last one.
pub fn judge<'a>(
    trusted: impl IntoIterator<Item = &'a TrustedImage>,
    events: &[BootEvent],
) -> Result<&'a TrustedImage, Untrusted> {
    let parts = value(events, Pcr::KERNEL_IMAGE);
    let mut why = match parts {
        Digest::ZERO => Untrusted::NotMeasured,
        parts => Untrusted::Image(parts),
    };
    for image in trusted.into_iter().filter(|image| image.parts == parts) {
        match image.is_booted(events) {
            Ok(()) => return Ok(image),
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// What was measured into this register.
fn of(events: &[BootEvent], pcr: Pcr) -> impl Iterator<Item = Digest> {
    let into = move |event: &&BootEvent| event.pcr == pcr;
    events.iter().filter(into).map(|event| event.digest)
}

fn value(events: &[BootEvent], pcr: Pcr) -> Digest {
    of(events, pcr).fold(Digest::ZERO, |value, digest| value.extended(&digest))
}

/// What the firmware was to start.
fn programs(events: &[BootEvent]) -> impl Iterator<Item = Digest> {
    let notes = NOTES.map(|note| Digest::of(&[note]));
    of(events, Pcr::BOOT_PROGRAMS).filter(move |digest| !notes.contains(digest))
}

fn digests(field: &'static str, texts: &[String]) -> Result<Vec<Digest>, ParseImageError> {
    texts.iter().map(|text| digest(field, text)).collect()
}

fn digest(field: &'static str, text: &str) -> Result<Digest, ParseImageError> {
    Digest::from_hex(text).ok_or_else(|| ParseImageError::Digest {
        field,
        got: text.to_owned(),
    })
}

/// What is read of the file. New fields do not change its version.
#[derive(Deserialize)]
struct File {
    version: u32,
    bank: String,
    measurements: Vec<Row>,
    #[serde(default)]
    programs: Vec<String>,
    #[serde(default)]
    command_lines: Vec<String>,
}

#[derive(Deserialize)]
struct Row {
    pcr: u8,
    value: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_of(name: &str) -> Digest {
        Digest::of(&[name.as_bytes()])
    }

    fn event(pcr: Pcr, digest: Digest) -> BootEvent {
        BootEvent { pcr, digest }
    }

    /// A boot through a boot loader, as firmware logs it.
    fn boot(parts: &str, programs: &[&str], command_lines: &[&str]) -> Vec<BootEvent> {
        let note = |note: &[u8]| event(Pcr::BOOT_PROGRAMS, Digest::of(&[note]));
        let started = programs
            .iter()
            .map(|name| event(Pcr::BOOT_PROGRAMS, digest_of(name)));
        let passed = command_lines
            .iter()
            .map(|line| event(Pcr::COMMAND_LINE, digest_of(line)));
        let mut events = vec![note(NOTES[0]), note(NOTES[2])];
        events.extend(started);
        events.extend(passed);
        events.push(event(Pcr::KERNEL_IMAGE, digest_of(parts)));
        events
    }

    fn image(parts: &str, programs: &[&str], command_line: &str) -> TrustedImage {
        TrustedImage {
            parts: Digest::ZERO.extended(&digest_of(parts)),
            programs: programs.iter().map(|name| digest_of(name)).collect(),
            command_lines: vec![digest_of(command_line)],
        }
    }

    const PROGRAMS: [&str; 3] = ["loader", "image", "kernel"];

    #[test]
    fn each_way_to_boot_a_trusted_image_is_accepted() {
        let trusted = [
            image("a", &["loader", "a", "kernel"], "quiet"),
            image("b", &PROGRAMS, "quiet"),
        ];
        for (programs, command_lines) in [
            (&PROGRAMS[..], &["quiet", "quiet"][..]),
            // Without a boot loader; with Secure Boot.
            (&["image", "kernel"], &["quiet"]),
            (&PROGRAMS, &[]),
        ] {
            let found = judge(&trusted, &boot("b", programs, command_lines));
            assert_eq!(found, Ok(&trusted[1]), "{programs:?} {command_lines:?}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_the_reason() {
        let trusted = image("a", &PROGRAMS, "quiet");
        let name = trusted.parts;
        for (events, why) in [
            (Vec::new(), Untrusted::NotMeasured),
            (
                boot("b", &PROGRAMS, &["quiet"]),
                Untrusted::Image(Digest::ZERO.extended(&digest_of("b"))),
            ),
            (
                boot("a", &["rootkit", "loader", "image", "kernel"], &["quiet"]),
                Untrusted::Program {
                    image: name,
                    program: digest_of("rootkit"),
                },
            ),
            (
                boot("a", &["loader", "kernel"], &["quiet"]),
                Untrusted::NotStarted(name),
            ),
            (boot("a", &[], &[]), Untrusted::NotStarted(name)),
            (
                boot("a", &PROGRAMS, &["quiet", "quiet init=/bin/sh"]),
                Untrusted::CommandLine {
                    image: name,
                    command_line: digest_of("quiet init=/bin/sh"),
                },
            ),
        ] {
            assert_eq!(judge([&trusted], &events), Err(why));
        }
        assert_eq!(
            judge([], &boot("a", &PROGRAMS, &["quiet"])),
            Err(Untrusted::Image(name))
        );
    }

    #[test]
    fn a_machine_names_the_image_that_it_has_booted() {
        let events = boot("a", &PROGRAMS, &["quiet", "quiet"]);
        let booted = TrustedImage::booted(&events).unwrap();
        assert_eq!(booted.programs, image("a", &PROGRAMS, "quiet").programs);
        assert_eq!(judge([&booted], &events), Ok(&booted));
        assert_eq!(booted.command_lines, [digest_of("quiet")]);
        assert_eq!(TrustedImage::booted(&[]), None);
    }

    /// What a machine's firmware starts before the image stays trusted with what its builder says of it.
    #[test]
    fn an_image_that_is_trusted_again_keeps_what_is_known_of_it() {
        let own = boot("a", &["setup", "loader", "image", "kernel"], &["quiet"]);
        let booted = TrustedImage::booted(&own).unwrap();
        let built = image("a", &PROGRAMS, "verbose");
        let both = built.with(&booted);
        assert_eq!(both.with(&booted), both);
        for events in [own, boot("a", &PROGRAMS, &["verbose"])] {
            assert_eq!(judge([&both], &events), Ok(&both));
        }
        let without = boot("a", &["loader", "kernel"], &["quiet"]);
        assert_eq!(
            judge([&both], &without),
            Err(Untrusted::NotStarted(both.parts))
        );
    }

    #[test]
    fn a_file_that_is_no_measurements_is_an_error_with_the_field() {
        let file = |change: &dyn Fn(&mut serde_json::Value)| {
            let digest = "ab".repeat(32);
            let mut file = serde_json::json!({
                "version": 1,
                "uki_sha256": digest,
                "bank": "sha256",
                "measurements": [{ "pcr": 11, "value": digest }, { "pcr": 4, "value": digest }],
                "programs": [digest, digest, digest],
                "command_lines": [digest],
            });
            change(&mut file);
            TrustedImage::parse(file.to_string().as_bytes()).map_err(|error| error.to_string())
        };
        assert!(file(&|_| {}).is_ok());
        let error = |change: &dyn Fn(&mut serde_json::Value)| file(change).unwrap_err();
        assert!(error(&|file| file["version"] = 2.into()).contains("expected 1, got 2"));
        assert!(error(&|file| file["bank"] = "sha1".into()).contains("got \"sha1\""));
        assert!(error(&|file| file["programs"] = serde_json::json!([])).contains("programs"));
        assert!(error(&|file| file["programs"][1] = "x".into()).contains("got \"x\""));
        assert!(error(&|file| file["measurements"][0]["pcr"] = 12.into()).contains("PCR 11"));
        assert!(TrustedImage::parse(b"{}").is_err());
    }
}
