//! The content of Kubernetes' certificates: user, group, names, addresses and lifetime.
//!
//! Names and groups that begin with `system:` are defined by Kubernetes, which binds its roles to
//! them. Those that begin with `hearth:` are ours; the reconciler binds roles to them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use hearth_api::hosts::Host;
use hearth_api::identity::{NodeId, UserName};
use hearth_api::names::pods;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, SanType};
use time::OffsetDateTime;

use super::super::{Lifetime, PkiError, ia5, parameters};

/// The lifetime of certificates for the components of controllers, which get new ones at every start.
pub const LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// The lifetime of certificates for workers. Kubernetes cannot revoke certificates, so this is how
/// long a deleted worker that does not wipe its keys can still authenticate to API servers.
pub const WORKER_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// The lifetime of operators' certificates, which are requested anew with every command.
pub const OPERATOR_LIFETIME: Duration = Duration::from_secs(3600);

/// The group with unrestricted access, which no RBAC rule can limit.
const MASTERS: &str = "system:masters";
/// The group of operators other than the owner. No role is bound to it; the owner grants access by
/// Kubernetes' RBAC.
pub const OPERATORS: &str = "hearth:operators";
/// The group of the nodes' own clients.
pub const NODES: &str = "hearth:nodes";
/// The user that maintains the Kubernetes objects that a cluster needs.
pub const RECONCILER: &str = "hearth:reconciler";
/// The user that may act for other users: for `--requestheader-allowed-names`.
pub const FRONT_PROXY_CLIENT: &str = "front-proxy-client";

/// The purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certificate<'a> {
    /// The server certificate of an API server.
    ApiServer {
        /// The node on which it runs.
        node: NodeId,
        /// The address of that node.
        address: IpAddr,
        /// The address of the API servers' service.
        service: Ipv4Addr,
        /// Further names and addresses by which clients reach it.
        hosts: &'a [Host],
    },
    /// An API server as a client of kubelets.
    ApiServerKubeletClient,
    /// An API server that forwards a request. Issued by the front-proxy CA.
    FrontProxyClient,
    /// The controller manager as a client of API servers.
    ControllerManager,
    /// The scheduler as a client of API servers.
    Scheduler,
    /// The reconciler, which maintains the objects that a cluster needs.
    Reconciler,
    /// A kubelet as a client of API servers.
    KubeletClient(NodeId),
    /// The server certificate of a kubelet.
    KubeletServer {
        /// The node on which it runs.
        node: NodeId,
        /// The address of that node.
        address: IpAddr,
    },
    /// kube-proxy as a client of API servers.
    Proxy,
    /// The node's own client, for DNS and volumes.
    Node(NodeId),
    /// A person as a client of API servers.
    Operator(&'a UserName),
}

impl Certificate<'_> {
    /// The common name, which is the user name of a client.
    pub fn subject(&self) -> String {
        match self {
            Self::ApiServer { .. } => "kube-apiserver".into(),
            Self::ApiServerKubeletClient => "kube-apiserver-kubelet-client".into(),
            Self::FrontProxyClient => FRONT_PROXY_CLIENT.into(),
            Self::ControllerManager => "system:kube-controller-manager".into(),
            Self::Scheduler => "system:kube-scheduler".into(),
            Self::Reconciler => RECONCILER.into(),
            Self::KubeletClient(node) | Self::KubeletServer { node, .. } => {
                format!("system:node:{node}")
            }
            Self::Proxy => "system:kube-proxy".into(),
            Self::Node(node) => format!("hearth:node:{node}"),
            Self::Operator(name) => name.to_string(),
        }
    }

    /// The organisation, which is the group of a client.
    pub fn group(&self) -> Option<&'static str> {
        match self {
            Self::ApiServerKubeletClient | Self::Reconciler => Some(MASTERS),
            Self::Operator(name) if name.as_str() == UserName::OWNER => Some(MASTERS),
            Self::Operator(_) => Some(OPERATORS),
            Self::KubeletClient(_) | Self::KubeletServer { .. } => Some("system:nodes"),
            Self::Node(_) => Some(NODES),
            // Identified by their user names.
            Self::ApiServer { .. }
            | Self::FrontProxyClient
            | Self::ControllerManager
            | Self::Scheduler
            | Self::Proxy => None,
        }
    }

    /// How long the certificate is valid.
    pub fn lifetime(&self) -> Duration {
        match self {
            Self::Operator(_) => OPERATOR_LIFETIME,
            Self::KubeletClient(_) | Self::KubeletServer { .. } | Self::Proxy | Self::Node(_) => {
                WORKER_LIFETIME
            }
            Self::ApiServer { .. }
            | Self::ApiServerKubeletClient
            | Self::FrontProxyClient
            | Self::ControllerManager
            | Self::Scheduler
            | Self::Reconciler => LIFETIME,
        }
    }

    /// The certificate becomes valid with its CA, so that it is valid on a node whose clock is
    /// behind the issuer's.
    pub(super) fn parameters(
        &self,
        authority: Lifetime,
        now: SystemTime,
    ) -> Result<CertificateParams, PkiError> {
        let subject = self.subject();
        let begin = OffsetDateTime::from(now).max(authority.not_before);
        let begin = begin.replace_nanosecond(0).unwrap_or(begin);
        let lifetime = Lifetime {
            not_before: authority.not_before,
            not_after: (begin + self.lifetime()).min(authority.not_after),
        };
        let mut params = parameters(&subject, lifetime)?;
        if let Some(group) = self.group() {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![match self {
            Self::ApiServer { .. } | Self::KubeletServer { .. } => {
                ExtendedKeyUsagePurpose::ServerAuth
            }
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.subject_alt_names = self.names()?;
        Ok(params)
    }

    /// The names and addresses of the server.
    fn names(&self) -> Result<Vec<SanType>, PkiError> {
        let (mut names, mut addresses) = (Vec::new(), Vec::new());
        match self {
            Self::ApiServer {
                node,
                address,
                service,
                hosts,
            } => {
                names.extend(
                    [
                        "kubernetes",
                        "kubernetes.default",
                        "kubernetes.default.svc",
                        "localhost",
                    ]
                    .map(str::to_owned),
                );
                names.push(format!("kubernetes.default.svc.{}", pods::DOMAIN));
                names.push(node.to_string());
                addresses.extend([
                    (*service).into(),
                    Ipv4Addr::LOCALHOST.into(),
                    Ipv6Addr::LOCALHOST.into(),
                    *address,
                ]);
                for host in *hosts {
                    match host {
                        Host::Name(name) => names.push(name.clone()),
                        Host::Address(address) => addresses.push(*address),
                    }
                }
            }
            Self::KubeletServer { node, address } => {
                names.push(node.to_string());
                addresses.push(*address);
            }
            _ => {}
        }
        let (mut seen, mut seen_addresses) = (BTreeSet::new(), BTreeSet::new());
        names.retain(|name| seen.insert(name.clone()));
        addresses.retain(|address| seen_addresses.insert(*address));
        let names = names
            .iter()
            .map(|name| Ok(SanType::DnsName(ia5(name)?)))
            .collect::<Result<Vec<_>, PkiError>>()?;
        Ok(names
            .into_iter()
            .chain(addresses.into_iter().map(SanType::IpAddress))
            .collect())
    }
}
