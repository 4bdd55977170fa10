//! The sources of a machine's parameters. [`hearth_parameters`] has their decoder and their rules.
//!
//! The sources, in their order, are the variants of [`Source`]; `docs/hearthctl.md` has them as a
//! table. The first that exists is used, and the others are not read. *Absent* means only that there is
//! no such item, file, string, volume or attribute. Parameters that exist but cannot be used are an
//! error that names the source, the field, the expected and the actual value. Such an error never
//! falls back to another source: a machine must not act on parameters other than the intended ones, or
//! on none.
//!
//! [`Sources`] are those that this machine has itself, which are read at boot. The metadata service of
//! a cloud is asked only where there are none, and needs the network ([`cloud`]).
//!
//! A machine that has a sealed configuration needs no parameters.

pub mod cloud;
pub mod config_drive;
mod text;

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::{Duration, Instant};

use hearth_api::{chain, names};
use hearth_parameters::{MAX_SIZE, Parameters};
use hearth_sys::block::Blocks;
use hearth_sys::files::{self, FileError};
use hearth_sys::fw_cfg::{self, FwCfg, FwCfgError};
use hearth_sys::smbios::{Smbios, SmbiosError};
use hearth_sys::uevents::Uevents;

use crate::layout::{Esp, Root};
use cloud::{Cloud, MetadataError};
use config_drive::{ConfigDrive, DriveError};
use text::TextError;

// What the decoder accepts can be passed through fw_cfg.
const _: () = assert!(MAX_SIZE as u64 <= fw_cfg::MAX_SIZE);

/// How long a config drive may take to appear after the boot disk has. One on USB takes two seconds.
const DRIVE_BOUND: Duration = Duration::from_secs(5);

/// The source of parameters, in the order in which they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// QEMU's fw_cfg device.
    FwCfg,
    /// The EFI system partition.
    Esp,
    /// The OEM strings in the SMBIOS table.
    Smbios,
    /// A volume that is attached beside the boot disk.
    ConfigDrive,
    /// The metadata service of a cloud.
    Cloud(Cloud),
}

impl Source {
    /// Those that need no network.
    const LOCAL: [Self; 4] = [Self::FwCfg, Self::Esp, Self::Smbios, Self::ConfigDrive];
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FwCfg => write!(f, "fw_cfg {}", names::fw_cfg::PARAMETERS),
            Self::Esp => write!(f, "ESP {}", names::disk::ESP_PARAMETERS),
            Self::Smbios => write!(f, "SMBIOS {}", names::smbios::PARAMETERS),
            Self::ConfigDrive => write!(
                f,
                "config drive {} {}",
                names::config_drive::LABEL,
                names::config_drive::PARAMETERS
            ),
            Self::Cloud(cloud) => cloud.fmt(f),
        }
    }
}

/// Parameters that were read.
#[derive(Clone, Debug)]
pub struct Found {
    /// Their source.
    pub source: Source,
    /// The parsed parameters.
    pub parameters: Parameters,
    /// Further sources that also exist and were ignored.
    pub ignored: Vec<Source>,
}

/// The result of [`Sources::load`]; `None` if there are no parameters.
pub type Loaded = Result<Option<Found>, ParametersError>;

/// Parameters that exist but cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("parameters from {from}: {problem}")]
pub struct ParametersError {
    /// Their source.
    pub from: Source,
    /// What is wrong with them.
    pub problem: Problem,
}

/// What is wrong with parameters.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The fw_cfg item exists but cannot be read.
    #[error("{}", chain(.0))]
    FwCfg(#[from] FwCfgError),
    /// The file exists but cannot be read.
    #[error("{}", chain(.0))]
    File(#[from] FileError),
    /// It is unknown whether there are strings.
    #[error("{}", chain(.0))]
    Smbios(#[from] SmbiosError),
    /// The config drive cannot be read.
    #[error("{}", chain(.0))]
    ConfigDrive(#[from] DriveError),
    /// The metadata service gives no parameters, and does not say that it has none.
    #[error("{}", chain(.0))]
    Cloud(#[from] MetadataError),
    /// The text is not the text form of bytes.
    #[error(transparent)]
    Text(#[from] TextError),
    /// They came over a network that they change.
    #[error(
        "network_config: expected none, because they were fetched with what DHCP has configured"
    )]
    Network,
    /// The content cannot be used.
    #[error(transparent)]
    Content(hearth_parameters::Problem),
}

/// Where parameters may be in this machine.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The items of the hypervisor.
    pub fw_cfg: FwCfg,
    /// The EFI system partition.
    pub esp: Esp,
    /// What firmware or hypervisor say.
    pub smbios: Smbios,
    /// Further disks.
    pub config_drive: ConfigDrive,
}

impl Sources {
    /// Those of this machine, which was booted from the disk of this name.
    pub fn of_machine(root: &Root, boot_disk: &str) -> Self {
        Self {
            fw_cfg: FwCfg::default(),
            esp: root.esp.clone(),
            smbios: Smbios::default(),
            config_drive: ConfigDrive {
                blocks: Blocks::default(),
                boot_disk: boot_disk.to_owned(),
                mount_point: root.ephemeral.config_drive(),
            },
        }
    }

    /// Reads the parameters of this machine; `None` if there are none.
    ///
    /// Blocks its thread.
    pub fn load(&self) -> Loaded {
        let mut sources = Source::LOCAL.into_iter();
        while let Some(source) = sources.next() {
            let read = self.read(source).map_err(|problem| ParametersError {
                from: source,
                problem,
            })?;
            let Some(bytes) = read else { continue };
            let ignored: Vec<Source> = sources.filter(|other| self.exists(*other)).collect();
            for ignored in &ignored {
                tracing::warn!("using the parameters from {source}; ignoring those from {ignored}");
            }
            return Ok(Some(Found {
                source,
                parameters: parse(source, &bytes)?,
                ignored,
            }));
        }
        Ok(None)
    }

    /// The same for a machine that cannot go on without parameters: gives a config drive that the
    /// kernel is still detecting time to appear.
    ///
    /// Blocks its thread.
    pub fn load_when_detected(&self) -> Loaded {
        // Opened before the first look, so that no drive appears unnoticed between the two.
        let events = Uevents::open().inspect_err(|error| {
            tracing::warn!(%error, "cannot wait for a config drive to appear");
        });
        let deadline = Instant::now() + DRIVE_BOUND;
        loop {
            let loaded = self.load();
            let is_worth_waiting = matches!(loaded, Ok(None))
                && events.as_ref().is_ok_and(|events| {
                    // An error is one of the socket: nothing more will be heard.
                    events.changed(deadline).unwrap_or(false)
                });
            if !is_worth_waiting {
                return loaded;
            }
        }
    }

    /// The bytes of one source, unparsed; secret. Of a cloud none.
    ///
    /// # Errors
    /// If there are some, or may be, and they cannot be read.
    pub fn read(&self, source: Source) -> Result<Option<Vec<u8>>, Problem> {
        match source {
            Source::FwCfg => Ok(self.fw_cfg.read(names::fw_cfg::PARAMETERS)?),
            Source::Esp => Ok(files::read_limited(
                &self.esp.parameters(),
                MAX_SIZE as u64,
            )?),
            Source::Smbios => match self.smbios_text()? {
                Some(text) => Ok(Some(text::decode(&text)?)),
                None => Ok(None),
            },
            Source::ConfigDrive => Ok(self.config_drive.read()?),
            Source::Cloud(_) => Ok(None),
        }
    }

    /// Whether there are parameters, whatever they are. What cannot be read may be.
    fn exists(&self, source: Source) -> bool {
        match source {
            Source::FwCfg | Source::Cloud(_) => false,
            Source::Esp => self.esp.parameters().exists(),
            Source::Smbios => !matches!(self.smbios_text(), Ok(None)),
            Source::ConfigDrive => !matches!(self.config_drive.find(), Ok(None)),
        }
    }

    /// The values of all strings of ours, one after the other: a string may be too short for one.
    fn smbios_text(&self) -> Result<Option<Vec<u8>>, SmbiosError> {
        let strings = self.smbios.oem_strings()?;
        let values = strings.iter().filter_map(|string| {
            let value = string.strip_prefix(names::smbios::PARAMETERS.as_bytes())?;
            value.strip_prefix(b"=")
        });
        let values: Vec<&[u8]> = values.collect();
        Ok((!values.is_empty()).then(|| values.concat()))
    }
}

/// Parses the parameters from this source.
pub fn parse(from: Source, bytes: &[u8]) -> Result<Parameters, ParametersError> {
    hearth_parameters::parse(bytes).map_err(|problem| ParametersError {
        from,
        problem: Problem::Content(problem),
    })
}
