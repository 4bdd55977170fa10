//! What Kubernetes' certificates say: who somebody is, to which group it
//! belongs, under which names it is reached, and for how long.
//!
//! The names and groups beginning with `system:` are Kubernetes' own, and its
//! roles are bound to them. Those beginning with `hearth:` are ours; the
//! reconciler binds them.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, SystemTime},
};

use hearth_api::{
    identity::{NodeId, UserName},
    names::pods,
};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, SanType};
use time::OffsetDateTime;

use super::super::{Lifetime, PkiError, ia5, parameters};

/// Of what the parts of Kubernetes and the nodes get. Long enough for a
/// cluster that sleeps over the holidays, short enough for one that cannot
/// revoke.
pub const LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// Of what operators get: they ask again with every command.
pub const OPERATOR_LIFETIME: Duration = Duration::from_secs(3600);

/// May do everything, and no rule of Kubernetes can take that away.
const MASTERS: &str = "system:masters";
/// The group of operators that are not the owner. Nothing is bound to it: what
/// they may do is for the owner to say, by roles of Kubernetes.
pub const OPERATORS: &str = "hearth:operators";
/// The group of the nodes' own clients.
pub const NODES: &str = "hearth:nodes";
/// The user that keeps the objects that a cluster needs.
pub const RECONCILER: &str = "hearth:reconciler";
/// Who may pass requests on: for `--requestheader-allowed-names`.
pub const FRONT_PROXY_CLIENT: &str = "front-proxy-client";

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certificate<'a> {
    /// An API server, towards its callers.
    ApiServer {
        /// Where it runs.
        node: NodeId,
        /// Of that node.
        address: IpAddr,
    },
    /// An API server, towards kubelets.
    ApiServerKubeletClient,
    /// An API server, when it passes a request on. Of the other authority.
    FrontProxyClient,
    /// The controller manager, towards API servers.
    ControllerManager,
    /// The scheduler, towards API servers.
    Scheduler,
    /// Who keeps the objects that a cluster needs.
    Reconciler,
    /// A kubelet, towards API servers.
    KubeletClient(NodeId),
    /// A kubelet, towards those who ask it.
    KubeletServer {
        /// Where it runs.
        node: NodeId,
        /// Of that node.
        address: IpAddr,
    },
    /// kube-proxy, towards API servers.
    Proxy,
    /// The node's own client: names, volumes.
    Node(NodeId),
    /// A person, towards API servers.
    Operator(&'a UserName),
}

impl Certificate<'_> {
    /// The common name, which is the user's name where it is a client.
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
            // Known by their names.
            Self::ApiServer { .. }
            | Self::FrontProxyClient
            | Self::ControllerManager
            | Self::Scheduler
            | Self::Proxy => None,
        }
    }

    /// For how long it is good.
    pub fn lifetime(&self) -> Duration {
        match self {
            Self::Operator(_) => OPERATOR_LIFETIME,
            _ => LIFETIME,
        }
    }

    /// It begins with its authority, so that it is good on a node whose clock
    /// is behind the issuer's.
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

    /// Under which it is reached.
    fn names(&self) -> Result<Vec<SanType>, PkiError> {
        let (mut names, mut addresses) = (Vec::new(), Vec::new());
        match self {
            Self::ApiServer { node, address } => {
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
                    pods::API_SERVICE.into(),
                    Ipv4Addr::LOCALHOST.into(),
                    Ipv6Addr::LOCALHOST.into(),
                    *address,
                ]);
            }
            Self::KubeletServer { node, address } => {
                names.push(node.to_string());
                addresses.push(*address);
            }
            _ => {}
        }
        addresses.dedup();
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
