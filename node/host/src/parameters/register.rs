//! `cluster_register`: ask a cluster to take this machine in.

use std::net::IpAddr;

use hearth_api::{
    certificates::ClusterCa,
    chain,
    identity::{NodeId, Ticket},
    labels,
    v1::{ClusterDirectory, ClusterRegister, Label},
};
use rustls_pki_types::CertificateDer;

use super::Problem;

/// More curators than a cluster has, few enough to keep in the sealed
/// configuration.
const MOST_NODES: usize = 64;
/// Of one node.
const MOST_ADDRESSES: usize = 8;
/// In bytes, as above.
const LARGEST_CA: usize = 4096;

/// The cluster that is to be asked.
#[derive(Clone, Debug)]
pub struct Register {
    /// Whom to ask: at least one node, each with an ID and at least one
    /// address that parses.
    pub directory: ClusterDirectory,
    /// The right to ask.
    pub ticket: Ticket,
    /// What the cluster's nodes are judged by; [`ClusterCa`] has parsed it.
    pub ca: CertificateDer<'static>,
    /// Of this node.
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
            "the certificate of a cluster's authority in DER",
            format!("{} bytes: {}", der.len(), chain(&error)),
        ));
    }
    Ok(CertificateDer::from(der))
}
