//! The parameters of a machine: what it is configured with before its first boot. They say whether to
//! create a cluster or to register with one, how to reach the network, and which state to wipe.
//!
//! [`parse`] is the only decoder of them. Nodes call it for the bytes that they find (in
//! `hearth_host::parameters`), and tools for those that they write or are asked about, so a tool
//! accepts exactly what a node of the same release accepts, with the same words. The crate reads
//! nothing and knows no text form: a node has neither JSON nor YAML.
//!
//! The bytes are decoded strictly (see [`wire`]) into [`Parameters`], whose types need no further
//! validation; defaults are filled in on the way. Parameters that cannot be used are a [`Problem`],
//! which names the field, the expected and the actual value. Those that this release does not support
//! are rejected here, by name, and not only when they would be needed.
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
//! | disk of an installation | the installer asks; with an empty `install`, the only empty disk |
//!
//! For an encrypted cluster, a recovery recipient is required, unless `accept_loss` says that its data
//! may be lost. The cold-start policy NONE requires `accept_loss` in any case.

mod bootstrap;
mod cold_start;
mod install;
mod network;
mod register;
mod wire;

#[cfg(test)]
mod tests;

use hearth_api::disk_conditions::DiskConditions;
use hearth_api::identity::EnrolmentId;
use hearth_api::labels::{LabelError, quoted};
use hearth_api::ranges::ClusterRanges;
use hearth_api::schema::NODE_PARAMETERS;
use hearth_api::time_server::{self, TimeServer};
use hearth_api::v1::{NodeParameters, node_parameters};
use hearth_cidr::Cidr;
use prost::Message;

pub use bootstrap::{Bootstrap, ClusterSeed, storage_security, tpm_usage};
pub use cold_start::{ColdStartError, cold_start_policy};
pub use network::{BondMode, Device, Interface, Mac, Network, Route};
pub use register::Register;

/// Maximum size of the parameters in bytes.
pub const MAX_SIZE: usize = 256 << 10;

/// The parameters of a machine.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Whether to create a cluster or to register with one.
    pub cluster: Cluster,
    /// How the machine reaches its networks.
    pub network: Network,
    /// The enrolment whose state is to be wiped.
    pub wipe: Option<EnrolmentId>,
    /// The time servers of this machine, instead of those of the cluster and of DHCP; may be empty.
    pub time_servers: Vec<TimeServer>,
    /// The disk on which an installer puts the node; `None`: it asks.
    pub install: Option<DiskConditions>,
}

/// How the machine becomes part of a cluster.
#[derive(Clone, Debug)]
pub enum Cluster {
    /// As the first node of a new cluster.
    Bootstrap(Box<Bootstrap>),
    /// As a further node of an existing cluster.
    Register(Register),
}

/// What is wrong with parameters.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// There are no bytes.
    #[error("empty: expected a hearth.v1.NodeParameters message, got no bytes")]
    Empty,
    /// There are too many bytes.
    #[error("too large: expected at most {MAX_SIZE} bytes, got {found}")]
    TooLarge {
        /// The actual number of bytes.
        found: usize,
    },
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

/// The first node of a cluster has no address among those of pods and services.
fn outside_of_ranges(network: &Network, bootstrap: &Bootstrap) -> Result<(), Problem> {
    let settings = bootstrap.seed.configuration.kubernetes.clone();
    let Ok(ranges) = ClusterRanges::of(&settings.unwrap_or_default()) else {
        // What is wrong with them was said when the settings were checked.
        return Ok(());
    };
    let all = network.interfaces.iter().flat_map(|one| &one.addresses);
    match all
        .map(Cidr::address)
        .find(|address| ranges.contains(*address))
    {
        None => Ok(()),
        Some(address) => {
            let (pods, services) = (ranges.pods_text(), ranges.services_text());
            let expected = format!(
                "addresses outside of the ranges of pods ({pods}) and services ({services})"
            );
            Err(Problem::unwanted(
                "network_config",
                expected,
                address.to_string(),
            ))
        }
    }
}

/// Parses an encoded `NodeParameters` message.
///
/// # Errors
/// If a machine must not act on it.
pub fn parse(bytes: &[u8]) -> Result<Parameters, Problem> {
    check_fields(bytes)?;
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
    let network = Network::parse(message.network_config.unwrap_or_default())?;
    if let Cluster::Bootstrap(bootstrap) = &cluster {
        outside_of_ranges(&network, bootstrap)?;
    }
    Ok(Parameters {
        cluster,
        network,
        wipe: message
            .wipe
            .map(|wipe| EnrolmentId::try_from(&wipe.enrolment_id[..]))
            .transpose()
            .map_err(|error| {
                Problem::unwanted("wipe.enrolment_id", "16 bytes", format!("{}", error.found))
            })?,
        time_servers: time_servers(&message.time_servers)?,
        install: message.install.map(install::parse).transpose()?,
    })
}

/// Checks only that the bytes are a `NodeParameters` message whose fields are known and unique, so that
/// a protobuf decoder skips nothing; not what their values are.
///
/// # Errors
/// As [`parse`].
pub fn check_fields(bytes: &[u8]) -> Result<(), Problem> {
    if bytes.is_empty() {
        return Err(Problem::Empty);
    }
    if bytes.len() > MAX_SIZE {
        let found = bytes.len();
        return Err(Problem::TooLarge { found });
    }
    wire::check(&NODE_PARAMETERS, bytes)
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
