//! `cluster_register`: ask a cluster to admit this machine.

use std::net::IpAddr;

use hearth_api::certificates::ClusterCa;
use hearth_api::identity::{NodeId, Ticket};
use hearth_api::v1::{ClusterDirectory, ClusterRegister, Label};
use hearth_api::{chain, labels};
use rustls_pki_types::CertificateDer;

use super::Problem;

/// More curators than a cluster has, and few enough to store in the sealed configuration.
const MOST_NODES: usize = 64;
/// The maximum number of addresses per node.
const MOST_ADDRESSES: usize = 8;
/// The maximum size of the CA certificate in bytes.
const LARGEST_CA: usize = 4096;

/// The parameters of a registration.
#[derive(Clone, Debug)]
pub struct Register {
    /// The curators to contact: at least one node, each with an ID and at least one address that
    /// parses.
    pub directory: ClusterDirectory,
    /// The register ticket.
    pub ticket: Ticket,
    /// The CA that verifies the cluster's nodes; [`ClusterCa`] has parsed it.
    pub ca: CertificateDer<'static>,
    /// The labels of this node.
    pub labels: Vec<Label>,
}

impl Register {
    pub(super) fn parse(message: ClusterRegister) -> Result<Self, Problem> {
        Ok(Self {
            directory: directory(message.cluster_directory.unwrap_or_default())?,
            ticket: Ticket::try_from(&message.register_ticket[..]).map_err(|error| {
                Problem::unwanted(
                    "cluster_register.register_ticket",
                    "32 bytes",
                    error.found.to_string(),
                )
            })?,
            ca: ca(message.ca_certificate)?,
            labels: labels::parse("cluster_register.labels", message.labels)?,
        })
    }
}

fn directory(directory: ClusterDirectory) -> Result<ClusterDirectory, Problem> {
    let field = "cluster_register.cluster_directory.nodes";
    if directory.nodes.is_empty() {
        return Err(Problem::unwanted(field, "at least one node", "none"));
    }
    let found = directory.nodes.len();
    if found > MOST_NODES {
        let wanted = format!("at most {MOST_NODES} nodes");
        return Err(Problem::unwanted(field, wanted, found.to_string()));
    }
    for (index, node) in directory.nodes.iter().enumerate() {
        let field = format!("{field}[{index}]");
        if let Err(error) = node.id.parse::<NodeId>() {
            return Err(Problem::unwanted(
                format!("{field}.id"),
                "a node ID",
                error.to_string(),
            ));
        }
        if node.addresses.is_empty() {
            return Err(Problem::unwanted(
                format!("{field}.addresses"),
                "at least one address",
                "none",
            ));
        }
        let found = node.addresses.len();
        if found > MOST_ADDRESSES {
            return Err(Problem::unwanted(
                format!("{field}.addresses"),
                format!("at most {MOST_ADDRESSES} addresses"),
                found.to_string(),
            ));
        }
        for (index, address) in node.addresses.iter().enumerate() {
            let field = format!("{field}.addresses[{index}]");
            if address.host.parse::<IpAddr>().is_err() {
                return Err(Problem::unwanted(
                    format!("{field}.host"),
                    "an IP address",
                    labels::quoted(&address.host),
                ));
            }
            if u16::try_from(address.port).is_err() {
                return Err(Problem::unwanted(
                    format!("{field}.port"),
                    "0 for the default port, or a port",
                    address.port.to_string(),
                ));
            }
        }
    }
    Ok(directory)
}

fn ca(der: Vec<u8>) -> Result<CertificateDer<'static>, Problem> {
    let field = "cluster_register.ca_certificate";
    if der.len() > LARGEST_CA {
        return Err(Problem::unwanted(
            field,
            format!("at most {LARGEST_CA} bytes"),
            der.len().to_string(),
        ));
    }
    if let Err(error) = ClusterCa::parse(&der) {
        return Err(Problem::unwanted(
            field,
            "a cluster CA certificate in DER",
            format!("{} bytes: {}", der.len(), chain(&error)),
        ));
    }
    Ok(CertificateDer::from(der))
}
