//! Command lines, certificates and health probes of the control-plane programs.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use hearth_api::hosts::Host;
use hearth_api::names::KUBERNETES_DOMAIN;
use hearth_api::ranges::{ClusterRanges, NODE_PREFIX_V4};
use hearth_api::v1::{AuditLevel, KubernetesConfiguration, PodNetwork};
use hearth_base::supervisor::Failure;
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::layout::Root;
use hearth_host::pki::kubernetes::{Certificate, FRONT_PROXY_CLIENT, KubernetesPkiError};
use hearth_kubernetes_api::Client;

use super::super::kubeconfig::{Credentials, Kubeconfig};
use super::super::program::{ProbeFailure, Profile, Program, Thresholds, probe};
use super::super::{access, store};
use super::files::Files;
use super::{Controller, Ports, Rules, audit};

/// The enabled controllers: all without those for bootstrap tokens and certificate signing requests, and without
/// `ttl`.
const CONTROLLERS: &str = "*,-bootstrap-signer-controller,-token-cleaner-controller,\
                           -certificatesigningrequest-signing-controller,\
                           -certificatesigningrequest-approving-controller,\
                           -certificatesigningrequest-cleaner-controller,-ttl-controller";
/// Leader election: lease duration, renewal deadline and retry period. They are longer than the
/// defaults, because machines may be slow for a while.
const LEADING: [(&str, &str); 3] = [
    ("leader-elect-lease-duration", "45s"),
    ("leader-elect-renew-deadline", "35s"),
    ("leader-elect-retry-period", "5s"),
];
/// A node whose kubelet has not reported for this time is not ready.
const NODE_GRACE: &str = "60s";

/// Names of the API server's key pairs: its serving certificate, and its client certificates for
/// kubelets and for extension API servers. Those of controller-manager and scheduler have the names
/// of the programs.
const SERVING: &str = "apiserver";
const KUBELETS: &str = "kubelets";
const FRONT_PROXY: &str = "front-proxy";

/// Without a quorum no API server is ready, and a restarted one would not become ready; a running
/// one has its caches.
pub(super) const APISERVER: Profile = Profile {
    health: Thresholds {
        unhealthy_after: Duration::from_secs(1800),
        ..Thresholds::USUAL
    },
    ..Profile::usual(Binary::Apiserver)
};
pub(super) const CONTROLLER_MANAGER: Profile = Profile::usual(Binary::ControllerManager);
pub(super) const SCHEDULER: Profile = Profile::usual(Binary::Scheduler);

/// A program that can be started.
pub(super) struct Prepared {
    pub program: Program,
    /// When its certificates are due for renewal.
    pub renew_at: SystemTime,
    asked: Client,
    path: &'static str,
}

impl Prepared {
    /// Probes its health.
    pub(super) async fn probe(&self) -> Result<(), ProbeFailure> {
        probe::https(&self.asked, self.path).await
    }
}

/// Issues certificates and writes the files that the program needs.
pub(super) fn prepare(
    all: &Controller,
    profile: Profile,
    address: IpAddr,
    settings: &KubernetesConfiguration,
    hosts: &[Host],
) -> Result<Prepared, Failure> {
    let now = all.parts.calendar.now();
    let ranges = ClusterRanges::of(settings)?;
    if profile.binary == Binary::Apiserver {
        prepare_apiserver(all, (address, hosts), &Rules::of(settings), (ranges, now))
    } else {
        prepare_companion(all, profile, (settings.pod_network(), ranges), now)
    }
}

fn prepare_apiserver(
    all: &Controller,
    (address, hosts): (IpAddr, &[Host]),
    rules: &Rules,
    (ranges, now): (ClusterRanges, SystemTime),
) -> Result<Prepared, Failure> {
    let renew_at = issue_serving(all, address, &ranges, hosts)?;
    for (whose, what) in [
        (KUBELETS, Certificate::ApiServerKubeletClient),
        (FRONT_PROXY, Certificate::FrontProxyClient),
    ] {
        all.files.save(whose, &all.authorities.issue(&what, now)?)?;
    }
    all.files
        .save_access_rules(&rules.security, &audit::policy(rules.audit))?;
    // For the probe, which needs a user that may read `/readyz`. Not written to a file.
    let asker = all.authorities.issue(&Certificate::Reconciler, now)?;
    Ok(Prepared {
        program: apiserver(
            &all.bundle,
            &all.parts.root,
            all.ports,
            (address, &ranges),
            rules.audit,
        ),
        renew_at,
        asked: Client::new(
            &url(loopback(address), all.ports.apiserver),
            access::tls(all.authorities.ca(), Some(&asker))?,
        )?,
        path: "/readyz",
    })
}

/// Issues and writes the serving certificate of the API server, which reads the file again when it changes.
/// Returns when the certificate is due for renewal.
pub(super) fn issue_serving(
    all: &Controller,
    address: IpAddr,
    ranges: &ClusterRanges,
    hosts: &[Host],
) -> Result<SystemTime, KubernetesPkiError> {
    let certificate = Certificate::ApiServer {
        node: all.member.own.node(),
        address,
        service: ranges.api_service(),
        hosts,
    };
    let now = all.parts.calendar.now();
    let issued = all.authorities.issue(&certificate, now)?;
    all.files.save(SERVING, &issued)?;
    Ok(issued.renew_at())
}

/// The same for controller-manager or scheduler.
fn prepare_companion(
    all: &Controller,
    profile: Profile,
    (network, ranges): (PodNetwork, ClusterRanges),
    now: SystemTime,
) -> Result<Prepared, Failure> {
    let what = match profile.binary {
        Binary::ControllerManager => Certificate::ControllerManager,
        _ => Certificate::Scheduler,
    };
    let name = profile.binary.name();
    let speaks = all.authorities.issue(&what, now)?;
    let here: IpAddr = Ipv4Addr::LOCALHOST.into();
    Kubeconfig {
        server: &url(here, all.ports.apiserver),
        ca_pem: &all.authorities.ca_pem(),
        credentials: Credentials::Embedded(&speaks),
    }
    .save(&all.files.kubeconfig(name))?;
    // It serves on loopback only, so the kind of certificate does not matter: that of the API
    // server is used.
    let serving = all.authorities.issue(
        &Certificate::ApiServer {
            node: all.member.own.node(),
            address: here,
            service: ranges.api_service(),
            hosts: &[],
        },
        now,
    )?;
    all.files.save(name, &serving)?;
    let port = companion_port(profile, all.ports);
    let pods = (network, &ranges);
    Ok(Prepared {
        program: companion(&all.bundle, &all.parts.root, all.ports, profile, pods),
        renew_at: speaks.renew_at(),
        asked: Client::new(&url(here, port), access::tls(all.authorities.ca(), None)?)?,
        path: "/healthz",
    })
}

/// The command line of the API server, with the paths of its files.
fn apiserver(
    bundle: &Bundle,
    root: &Root,
    ports: Ports,
    (address, ranges): (IpAddr, &ClusterRanges),
    audit: AuditLevel,
) -> Program {
    let work = root.ephemeral.kubernetes();
    // The etcd socket is relative to its working directory.
    let mut program = Program::new(bundle, APISERVER, &work.store());
    let issuer = format!("https://kubernetes.default.svc.{KUBERNETES_DOMAIN}");
    let files = Files::new(root);
    let [serving, kubelets, front_proxy] =
        [SERVING, KUBELETS, FRONT_PROXY].map(|whose| files.pair(whose));
    for (name, value) in [
        ("etcd-servers", OsString::from(store::url())),
        ("etcd-prefix", "/registry".into()),
        // The store is shared and compacted by Hearth.
        ("etcd-compaction-interval", "0".into()),
        ("advertise-address", address.to_string().into()),
        // Of both address families.
        ("bind-address", Ipv6Addr::UNSPECIFIED.to_string().into()),
        ("secure-port", ports.apiserver.to_string().into()),
        // The first family is that of services that state none, and of the API servers' own.
        ("service-cluster-ip-range", ranges.services_text().into()),
        // The endpoints of the API servers follow from leases, however many servers there are.
        ("endpoint-reconciler-type", "lease".into()),
        ("tls-cert-file", serving.certificate().into()),
        ("tls-private-key-file", serving.key().into()),
        ("tls-min-version", "VersionTLS13".into()),
        ("client-ca-file", files.ca().into()),
        ("authentication-config", files.authentication().into()),
        ("kubelet-certificate-authority", files.ca().into()),
        ("kubelet-client-certificate", kubelets.certificate().into()),
        ("kubelet-client-key", kubelets.key().into()),
        // Hostnames of nodes are resolved on nodes only, from a file that Go does not reload.
        ("kubelet-preferred-address-types", "InternalIP".into()),
        ("service-account-key-file", files.service_accounts().into()),
        (
            "service-account-signing-key-file",
            files.service_account_key().into(),
        ),
        ("service-account-issuer", issuer.clone().into()),
        ("api-audiences", issuer.into()),
        (
            "requestheader-client-ca-file",
            files.front_proxy_ca().into(),
        ),
        ("requestheader-allowed-names", FRONT_PROXY_CLIENT.into()),
        ("requestheader-username-headers", "X-Remote-User".into()),
        ("requestheader-group-headers", "X-Remote-Group".into()),
        (
            "requestheader-extra-headers-prefix",
            "X-Remote-Extra-".into(),
        ),
        ("proxy-client-cert-file", front_proxy.certificate().into()),
        ("proxy-client-key-file", front_proxy.key().into()),
        ("authorization-config", files.authorization().into()),
        ("enable-admission-plugins", "NodeRestriction".into()),
        ("admission-control-config-file", files.admission().into()),
        ("encryption-provider-config", files.encryption().into()),
        // Which pods may be privileged is up to Pod Security.
        ("allow-privileged", "true".into()),
        ("profiling", "false".into()),
        // It would generate a certificate there if it had none.
        ("cert-dir", work.work(program.name()).into()),
    ] {
        program = program.flag(name, value);
    }
    for (name, value) in audit::flags(audit, files.audit_policy(), root.data.audit_log()) {
        program = program.flag(name, value);
    }
    program
}

/// The command line of controller-manager or scheduler.
fn companion(
    bundle: &Bundle,
    root: &Root,
    ports: Ports,
    profile: Profile,
    (network, ranges): (PodNetwork, &ClusterRanges),
) -> Program {
    let name = profile.binary.name();
    let work = root.ephemeral.kubernetes().work(name);
    let mut program = Program::new(bundle, profile, &work);
    let files = Files::new(root);
    let (kubeconfig, serving) = (files.kubeconfig(name), files.pair(name));
    let here = Ipv4Addr::LOCALHOST;
    let port = companion_port(profile, ports);
    for (name, value) in [
        ("kubeconfig", kubeconfig.clone().into_os_string()),
        ("authentication-kubeconfig", kubeconfig.clone().into()),
        ("authorization-kubeconfig", kubeconfig.into()),
        ("authentication-skip-lookup", "true".into()),
        ("bind-address", here.to_string().into()),
        ("secure-port", port.to_string().into()),
        ("tls-cert-file", serving.certificate().into()),
        ("tls-private-key-file", serving.key().into()),
        ("tls-min-version", "VersionTLS13".into()),
        ("leader-elect", "true".into()),
        ("profiling", "false".into()),
    ] {
        program = program.flag(name, value);
    }
    for (name, value) in LEADING {
        program = program.flag(name, value);
    }
    if profile.binary == Binary::ControllerManager {
        for (name, value) in [
            (
                "service-account-private-key-file",
                files.service_account_key().into_os_string(),
            ),
            ("root-ca-file", files.ca().into()),
            ("use-service-account-credentials", "true".into()),
            ("node-monitor-grace-period", NODE_GRACE.into()),
            ("controllers", CONTROLLERS.into()),
        ] {
            program = program.flag(name, value);
        }
        program = match network {
            // Most other networks take the ranges of the nodes from their Node objects.
            PodNetwork::None => {
                let program = program
                    .flag("allocate-node-cidrs", "true")
                    .flag("cluster-cidr", ranges.pods_text());
                match ranges.node_prefix_v6() {
                    None => program,
                    Some(prefix) => program
                        .flag("node-cidr-mask-size-ipv4", NODE_PREFIX_V4.to_string())
                        .flag("node-cidr-mask-size-ipv6", prefix.to_string()),
                }
            }
            // The curators assign the ranges.
            PodNetwork::BuiltIn | PodNetwork::Unspecified => {
                program.flag("allocate-node-cidrs", "false")
            }
        };
    }
    program
}

/// The port of controller-manager or scheduler.
const fn companion_port(profile: Profile, ports: Ports) -> u16 {
    match profile.binary {
        Binary::ControllerManager => ports.controller_manager,
        _ => ports.scheduler,
    }
}

/// URL of a server on this machine.
pub(super) fn url(address: IpAddr, port: u16) -> String {
    format!("https://{}", SocketAddr::new(address, port))
}

/// The loopback address of the same family: the server listens on this family only.
fn loopback(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}

#[cfg(test)]
mod tests;
