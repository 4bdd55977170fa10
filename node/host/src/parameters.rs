//! The sources of a machine's parameters. [`hearth_parameters`] has their decoder and their rules.
//!
//! They come from the QEMU fw_cfg item [`names::fw_cfg::PARAMETERS`] or from the ESP's
//! [`names::disk::ESP_PARAMETERS`]. If both exist, fw_cfg is used and the ESP's are not read.
//! *Absent* means only that there is no such item and no such file. Parameters that exist but
//! cannot be used are an error that names the source, the field, the expected and the actual value.
//! Such an error never falls back to the other source: a machine must not act on parameters other
//! than the intended ones, or on none.
//!
//! A machine that has a sealed configuration needs no parameters.

#[cfg(test)]
mod tests;

use std::fmt;

use hearth_api::{chain, names};
use hearth_parameters::{MAX_SIZE, Parameters};
use hearth_sys::files::{self, FileError};
use hearth_sys::fw_cfg::{self, FwCfg, FwCfgError};

use crate::layout::Esp;

// What the decoder accepts can be passed through fw_cfg.
const _: () = assert!(MAX_SIZE as u64 <= fw_cfg::MAX_SIZE);

/// The source of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// QEMU's fw_cfg device.
    FwCfg,
    /// The EFI system partition.
    Esp,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FwCfg => write!(f, "fw_cfg {}", names::fw_cfg::PARAMETERS),
            Self::Esp => write!(f, "ESP {}", names::disk::ESP_PARAMETERS),
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
    /// A second source that also exists and was ignored.
    pub ignored: Option<Source>,
}

/// The result of [`load`]; `None` if there are no parameters.
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
    FwCfg(FwCfgError),
    /// The file exists but cannot be read.
    #[error("{}", chain(.0))]
    File(FileError),
    /// The content cannot be used.
    #[error(transparent)]
    Content(hearth_parameters::Problem),
}

/// Reads the parameters of this machine; `None` if there are none.
pub fn load(fw_cfg: &FwCfg, esp: &Esp) -> Loaded {
    let from_fw_cfg = fw_cfg
        .read(names::fw_cfg::PARAMETERS)
        .map_err(|error| ParametersError {
            from: Source::FwCfg,
            problem: Problem::FwCfg(error),
        })?;
    let on_esp = esp.parameters();
    if let Some(bytes) = from_fw_cfg {
        let ignored = on_esp.exists().then_some(Source::Esp);
        if let Some(ignored) = ignored {
            tracing::warn!(
                "using the parameters from {}; ignoring those from {ignored}",
                Source::FwCfg
            );
        }
        return Ok(Some(Found {
            source: Source::FwCfg,
            parameters: parse(Source::FwCfg, &bytes)?,
            ignored,
        }));
    }
    let limit = MAX_SIZE as u64;
    let from_esp = files::read_limited(&on_esp, limit).map_err(|error| ParametersError {
        from: Source::Esp,
        problem: Problem::File(error),
    })?;
    let Some(bytes) = from_esp else {
        return Ok(None);
    };
    Ok(Some(Found {
        source: Source::Esp,
        parameters: parse(Source::Esp, &bytes)?,
        ignored: None,
    }))
}

/// Parses the parameters from this source.
pub fn parse(from: Source, bytes: &[u8]) -> Result<Parameters, ParametersError> {
    hearth_parameters::parse(bytes).map_err(|problem| ParametersError {
        from,
        problem: Problem::Content(problem),
    })
}
