//! `cluster_register`: ask a cluster to take this machine in.

use std::net::IpAddr;

use hearth_api::{
    identity::{NodeId, Ticket},
    v1::{ClusterDirectory, ClusterRegister, Label},
};
use rustls_pki_types::CertificateDer;

use super::{Problem, labels};

/// The cluster that is to be asked.
#[derive(Clone, Debug)]
pub struct Register {
    /// Whom to ask: at least one node, each with an ID and at least one
    /// address that parses.
    pub directory: ClusterDirectory,
    /// The right to ask.
    pub ticket: Ticket,
    /// What the cluster's nodes are judged by.
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
    match x509_parser::parse_x509_certificate(&der) {
        Ok(([], certificate)) if certificate.is_ca() => {}
        Ok(([], _)) => {
            return Err(Problem::unwanted(
                field,
                "the certificate of an authority",
                "a certificate that is none",
            ));
        }
        _ => {
            return Err(Problem::unwanted(
                field,
                "a certificate in DER",
                format!("{} bytes that are none", der.len()),
            ));
        }
    }
    Ok(CertificateDer::from(der))
}
