//! Node parameters: what a machine is configured with before its first boot. They say whether to
//! create a cluster or to register with one, how to reach the network, and which state to wipe.
//!
//! They come from the QEMU fw_cfg item [`names::fw_cfg::PARAMETERS`] or from the ESP's
//! [`names::disk::ESP_PARAMETERS`]. If both exist, fw_cfg is used and the ESP's are not read.
//! *Absent* means only that there is no such item and no such file. Parameters that exist but
//! cannot be used are an error that names the source, the field, the expected and the actual value.
//! Such an error never falls back to the other source: a machine must not act on parameters other
//! than the intended ones, or on none.
//!
//! The bytes are decoded strictly (see [`wire`]) into [`Parameters`], whose types need no further
//! validation; defaults are filled in on the way. Parameters that this release does not support are
//! rejected here, by name, and not only when they would be needed.
//!
//! | field | default |
//! |---|---|
//! | cluster domain | `cluster.internal` |
//! | TPM mode | BEST_EFFORT |
//! | storage security policy | NEEDS_ENCRYPTION |
//! | cold-start policy | decided when the cluster is created: TPM if the machine can seal with its TPM, otherwise OWNER if there is a recovery recipient; see [`cold_start_policy`] |
//! | roles of the first node | consensus member, and both Kubernetes roles if the image can run them |
//! | network | DHCP |
//! | time servers | those of the cluster, or else of DHCP |
//!
//! For an encrypted cluster, a recovery recipient is required, unless `accept_loss` says that its data
//! may be lost. The cold-start policy NONE requires `accept_loss` in any case.
//!
//! A machine that has a sealed configuration needs no parameters.

mod bootstrap;
mod cold_start;
mod network;
mod register;
mod wire;

#[cfg(test)]
mod tests;

use std::fmt;

use hearth_api::labels::{LabelError, quoted};
use hearth_api::schema::NODE_PARAMETERS;
use hearth_api::time_server::{self, TimeServer};
use hearth_api::v1::{NodeParameters, node_parameters};
use hearth_api::{chain, names};
use hearth_sys::files::{self, FileError};
use hearth_sys::fw_cfg::{self, FwCfg, FwCfgError};
use prost::Message;

use crate::layout::Esp;
use crate::storage::EnrolmentId;

pub use bootstrap::{Bootstrap, storage_security, tpm_usage};
pub use cold_start::{ColdStartError, cold_start_policy};
pub use network::{Mac, Route, StaticNetwork};
pub use register::Register;

/// Maximum size of the parameters in bytes, from either source.
pub const MAX_SIZE: u64 = fw_cfg::MAX_SIZE;

/// The parameters of a machine.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Whether to create a cluster or to register with one.
    pub cluster: Cluster,
    /// The static network configuration; `None` means DHCP.
    pub network: Option<StaticNetwork>,
    /// The enrolment whose state is to be wiped.
    pub wipe: Option<EnrolmentId>,
    /// The time servers of this machine, instead of those of the cluster and of DHCP; may be empty.
    pub time_servers: Vec<TimeServer>,
}

/// How the machine becomes part of a cluster.
#[derive(Clone, Debug)]
pub enum Cluster {
    /// As the first node of a new cluster.
    Bootstrap(Box<Bootstrap>),
    /// As a further node of an existing cluster.
    Register(Register),
}

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
    /// The item or file is empty.
    #[error("empty: expected a hearth.v1.NodeParameters message, got no bytes")]
    Empty,
    /// The bytes are not the expected message.
    #[error("{path}not a hearth.v1.NodeParameters message: {what}")]
    Malformed {
        /// The field, followed by a colon and a space; empty for the top-level message.
        path: String,
        /// What is wrong with the field.
        what: String,
    },
    /// A field that this release does not support.
    #[error(
        "{}unknown field {number}",
        colon(.path)
    )]
    UnknownField {
        /// The message that contains the field; empty for the top-level message.
        path: String,
        /// The field's number.
        number: u32,
    },
    /// A field that is set twice.
    #[error("{field}: expected one value, got several")]
    Twice {
        /// The path of the field.
        field: String,
    },
    /// Two fields that are mutually exclusive.
    #[error("expected either {first} or {second}, got both")]
    Both {
        /// The field that came first.
        first: &'static str,
        /// The field that came second.
        second: &'static str,
    },
    /// A field with an invalid value.
    #[error("{field}: expected {wanted}, got {found}")]
    Unwanted {
        /// The path of the field.
        field: String,
        /// The expected value.
        wanted: String,
        /// The actual value. Never a secret.
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

/// Parses an encoded `NodeParameters` message.
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
            Cluster::Bootstrap(Box::new(Bootstrap::parse(message)?))
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
        time_servers: time_servers(&message.time_servers)?,
    })
}

fn time_servers(texts: &[String]) -> Result<Vec<TimeServer>, Problem> {
    if texts.len() > time_server::MOST {
        let wanted = format!("at most {} servers", time_server::MOST);
        let found = texts.len().to_string();
        return Err(Problem::unwanted("time_servers", wanted, found));
    }
    let parse = |(index, text): (usize, &String)| {
        let field = format!("time_servers[{index}]");
        let unwanted = |_| Problem::unwanted(field, time_server::EXPECTED, quoted(text));
        text.parse().map_err(unwanted)
    };
    texts.iter().enumerate().map(parse).collect()
}
