//! What a machine is told before its first boot: found a cluster, or ask one
//! to take it in; how to reach the network; what to give up.
//!
//! They come from the QEMU fw_cfg item [`names::fw_cfg::PARAMETERS`] or from the
//! ESP's [`names::disk::ESP_PARAMETERS`]. If both are there, fw_cfg is used and the
//! ESP is not looked into. *Absent* means that there is no such item and no
//! such file, nothing else: what is there and cannot be used is an error that
//! names the source, the field, what was wanted and what was found, and never
//! falls through to the other source, for a machine that was told something
//! must not act as if it had been told something else, or nothing.
//!
//! The bytes are read strictly (see [`wire`]) and turned into [`Parameters`],
//! whose types leave nothing to check; defaults are filled in on the way. What
//! this release cannot do is refused here, by name, and not at the point where
//! it would have been needed.
//!
//! | field | if unset |
//! |---|---|
//! | cluster domain | `cluster.internal` |
//! | TPM mode | BEST_EFFORT |
//! | storage security policy | NEEDS_ENCRYPTION |
//! | cold-start policy | NONE |
//! | roles of the first node | consensus member, and both of Kubernetes if the image can run them |
//! | network | DHCP |
//!
//! This release seals nothing by a TPM and cold-starts no encrypted cluster: TPM
//! mode REQUIRED and the cold-start policies TPM and OWNER are refused, and
//! BEST_EFFORT comes to a TPM that is present but unused.
//!
//! A machine that has a sealed configuration needs no parameters.

mod bootstrap;
mod network;
mod register;
mod wire;

#[cfg(test)]
mod tests;

use std::fmt;

use hearth_api::{
    chain,
    labels::LabelError,
    names,
    schema::NODE_PARAMETERS,
    v1::{NodeParameters, node_parameters},
};
use hearth_sys::files::{self, FileError};
use hearth_sys::fw_cfg::{self, FwCfg, FwCfgError};
use prost::Message;

use crate::{layout::Esp, storage::EnrolmentId};

pub use bootstrap::storage_security;
pub use bootstrap::{Bootstrap, DEFAULT_CLUSTER_DOMAIN};
pub use network::{Mac, Route, StaticNetwork};
pub use register::Register;

/// The largest parameters, in bytes, from either source.
pub const MAX_SIZE: u64 = fw_cfg::MAX_SIZE;

/// All that a machine may be told.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// What to become.
    pub cluster: Cluster,
    /// How to reach the network; `None` is DHCP.
    pub network: Option<StaticNetwork>,
    /// The life that is to be given up.
    pub wipe: Option<EnrolmentId>,
}

/// What to become.
#[derive(Clone, Debug)]
pub enum Cluster {
    /// The first node of a new cluster.
    Bootstrap(Bootstrap),
    /// One more node of a cluster there is.
    Register(Register),
}

/// Where parameters come from.
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

/// Parameters that were found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Where.
    pub source: Source,
    /// What they say.
    pub parameters: Parameters,
    /// A second source that was there too and is not used.
    pub ignored: Option<Source>,
}

/// What [`load`] comes to.
pub type Loaded = Result<Option<Found>, ParametersError>;

/// Parameters that are there and cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("parameters from {from}: {problem}")]
pub struct ParametersError {
    /// Where they are.
    pub from: Source,
    /// What is wrong with them.
    pub problem: Problem,
}

/// What can be wrong with parameters.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The fw_cfg item is there, its content cannot be had.
    #[error("{}", chain(.0))]
    FwCfg(FwCfgError),
    /// The file is there, its content cannot be had.
    #[error("{}", chain(.0))]
    File(FileError),
    /// It is there, with nothing in it.
    #[error("empty: wanted a hearth.v1.NodeParameters message, found no bytes")]
    Empty,
    /// Not the message.
    #[error("{path}not a hearth.v1.NodeParameters message: {what}")]
    Malformed {
        /// The field, with a colon and a space; empty at the top.
        path: String,
        /// What is wrong there.
        what: String,
    },
    /// A field that this release does not know.
    #[error(
        "{}field {number}: wanted only fields that this release knows, found this one",
        colon(.path)
    )]
    UnknownField {
        /// The message that has it; empty at the top.
        path: String,
        /// Its number.
        number: u32,
    },
    /// A field that stands twice.
    #[error("{field}: wanted once, found twice")]
    Twice {
        /// The field.
        field: String,
    },
    /// Two fields that exclude each other.
    #[error("wanted one of {first} and {second}, found both")]
    Both {
        /// The one.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A field with a content that will not do.
    #[error("{field}: wanted {wanted}, found {found}")]
    Unwanted {
        /// The field.
        field: String,
        /// What it should hold.
        wanted: String,
        /// What it holds. Never a secret.
        found: String,
    },
}

impl Problem {
    fn malformed(path: &str, what: impl Into<String>) -> Self {
        Self::Malformed {
            path: colon(path),
            what: what.into(),
        }
    }

    fn unwanted(
        field: impl Into<String>,
        wanted: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::Unwanted {
            field: field.into(),
            wanted: wanted.into(),
            found: found.into(),
        }
    }
}

fn colon(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!("{path}: ")
    }
}

impl From<LabelError> for Problem {
    fn from(error: LabelError) -> Self {
        Self::unwanted(error.field, error.expected, error.found)
    }
}

/// Reads this machine's parameters. `None` if there are none.
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
                "parameters from {} are used, those from {ignored} are not",
                Source::FwCfg
            );
        }
        return Ok(Some(Found {
            source: Source::FwCfg,
            parameters: parse(Source::FwCfg, &bytes)?,
            ignored,
        }));
    }
    let from_esp = files::read_limited(&on_esp, MAX_SIZE).map_err(|error| ParametersError {
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

/// Turns the bytes of a `NodeParameters` into parameters.
pub fn parse(from: Source, bytes: &[u8]) -> Result<Parameters, ParametersError> {
    parse_message(bytes).map_err(|problem| ParametersError { from, problem })
}

fn parse_message(bytes: &[u8]) -> Result<Parameters, Problem> {
    if bytes.is_empty() {
        return Err(Problem::Empty);
    }
    wire::check(&NODE_PARAMETERS, bytes)?;
    let message =
        NodeParameters::decode(bytes).map_err(|error| Problem::malformed("", error.to_string()))?;
    let cluster = match message.cluster {
        Some(node_parameters::Cluster::ClusterBootstrap(message)) => {
            Cluster::Bootstrap(Bootstrap::parse(message)?)
        }
        Some(node_parameters::Cluster::ClusterRegister(message)) => {
            Cluster::Register(Register::parse(message)?)
        }
        None => {
            return Err(Problem::unwanted(
                "cluster",
                "cluster_bootstrap or cluster_register",
                "neither",
            ));
        }
    };
    Ok(Parameters {
        cluster,
        network: message
            .network_config
            .map(StaticNetwork::parse)
            .transpose()?,
        wipe: message
            .wipe
            .map(|wipe| EnrolmentId::try_from(&wipe.enrolment_id[..]))
            .transpose()
            .map_err(|error| {
                Problem::unwanted("wipe.enrolment_id", "16 bytes", format!("{}", error.found))
            })?,
    })
}
