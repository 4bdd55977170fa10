//! What each program of the control plane is told, and how it is asked whether
//! it works.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use hearth_api::names::{KUBERNETES_DOMAIN, SERVICE_NETWORK};
use hearth_base::supervisor::Failure;
use hearth_host::bundle::{Binary, Flag};
use hearth_host::pki::kubernetes::{Certificate, FRONT_PROXY_CLIENT};
use hearth_kubernetes_api::Client;

use super::super::access;
use super::super::kubeconfig::{Credentials, Kubeconfig};
use super::super::program::{Profile, Program, Thresholds, Unwell, probe};
use super::super::store;
use super::Controller;

/// Controllers that work on what only clouds or other ways to certificates
/// have.
const CONTROLLERS: &str = "*,-bootstrapsigner,-tokencleaner,-csrsigning,-csrapproving,-csrcleaner,\
                           -cloud-node-lifecycle,-route,-service,-ttl";
/// How long whoever leads may be silent, must be able to renew, and how often
/// it is tried: machines may be slow for a while.
const LEADING: [(&str, &str); 3] = [
    ("leader-elect-lease-duration", "45s"),
    ("leader-elect-renew-deadline", "35s"),
    ("leader-elect-retry-period", "5s"),
];
/// A node that has said nothing for so long is taken for gone.
const NODE_GRACE: &str = "60s";

/// Without a quorum no API server is ready, and none that starts becomes so; the
/// one that runs knows what it has read.
pub const APISERVER: Profile = Profile {
    health: Thresholds {
        unhealthy_after: Duration::from_secs(1800),
        ..Thresholds::USUAL
    },
    ..Profile::usual(Binary::Apiserver)
};
pub const CONTROLLER_MANAGER: Profile = Profile::usual(Binary::ControllerManager);
pub const SCHEDULER: Profile = Profile::usual(Binary::Scheduler);

/// A program that is ready to start.
pub struct Prepared {
    pub program: Program,
    /// When its certificates should be new ones.
    pub renew_at: SystemTime,
    asked: Client,
    path: &'static str,
}

impl Prepared {
    /// Asks whether it works.
    pub async fn probe(&self) -> Result<(), Unwell> {
        probe::https(&self.asked, self.path).await
    }
}

/// Issues and writes what the program needs.
pub fn prepare(all: &Controller, profile: Profile, address: IpAddr) -> Result<Prepared, Failure> {
    let now = all.parts.calendar.now();
    let work = all.parts.root.ephemeral.kubernetes();
    if profile.binary == Binary::Apiserver {
        // Its way to etcd is a name below its working directory.
        let program = Program::new(&all.bundle, profile, &work.store());
        apiserver(all, program, address, now)
    } else {
        let directory = work.work(profile.binary.name());
        companion(all, Program::new(&all.bundle, profile, &directory), now)
    }
}

fn apiserver(
    all: &Controller,
    mut program: Program,
    address: IpAddr,
    now: SystemTime,
) -> Result<Prepared, Failure> {
    let issue = |whose: &str, what: &Certificate<'_>| {
        let issued = all.authorities.issue(what, now)?;
        Ok::<_, Failure>((all.files.save(whose, &issued)?, issued.renew_at()))
    };
    let node = all.member.node_id;
    let (serving, renew_at) = issue("apiserver", &Certificate::ApiServer { node, address })?;
    let (kubelets, _) = issue("kubelets", &Certificate::ApiServerKubeletClient)?;
    let (front_proxy, _) = issue("front-proxy", &Certificate::FrontProxyClient)?;
    // Kept nowhere: it asks whether the server works, as somebody who may.
    let asker = all.authorities.issue(&Certificate::Reconciler, now)?;

    let issuer = format!("https://kubernetes.default.svc.{KUBERNETES_DOMAIN}");
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let files = &all.files;
    let certificates = all.parts.root.ephemeral.kubernetes().work(program.name());
    for (name, value) in [
        ("etcd-servers", OsString::from(store::url())),
        ("etcd-prefix", "/registry".into()),
        // The store is shared: it compacts itself.
        ("etcd-compaction-interval", "0".into()),
        ("advertise-address", address.to_string().into()),
        ("bind-address", any.to_string().into()),
        ("secure-port", all.ports.apiserver.to_string().into()),
        ("service-cluster-ip-range", SERVICE_NETWORK.into()),
        // Several API servers find each other by leases, however many.
        ("endpoint-reconciler-type", "lease".into()),
        ("tls-cert-file", serving.certificate().into()),
        ("tls-private-key-file", serving.key().into()),
        ("tls-min-version", "VersionTLS13".into()),
        ("client-ca-file", files.ca().into()),
        ("anonymous-auth", "false".into()),
        ("kubelet-certificate-authority", files.ca().into()),
        ("kubelet-client-certificate", kubelets.certificate().into()),
        ("kubelet-client-key", kubelets.key().into()),
        // Names of nodes are known to nodes, by a file that Go does not watch.
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
        ("authorization-mode", "Node,RBAC".into()),
        ("enable-admission-plugins", "NodeRestriction".into()),
        // What a pod may ask for is for the cluster's own rules to say.
        ("allow-privileged", "true".into()),
        ("profiling", "false".into()),
        // Where it would make a certificate, had it none.
        ("cert-dir", certificates.into()),
    ] {
        program = program.flag(name, value);
    }
    if all.bundle.has(Flag::ApiserverInsecurePort) {
        program = program.flag("insecure-port", "0");
    }
    Ok(Prepared {
        program,
        renew_at,
        asked: Client::new(
            &url(loopback(address), all.ports.apiserver),
            access::tls(all.authorities.ca(), Some(&asker))?,
        )?,
        path: "/readyz",
    })
}

/// controller-manager and scheduler differ in little.
fn companion(all: &Controller, mut program: Program, now: SystemTime) -> Result<Prepared, Failure> {
    let (what, port) = match program.profile.binary {
        Binary::ControllerManager => (Certificate::ControllerManager, all.ports.controller_manager),
        _ => (Certificate::Scheduler, all.ports.scheduler),
    };
    let name = program.name();
    let speaks = all.authorities.issue(&what, now)?;
    let kubeconfig = all.files.kubeconfig(name);
    let here: IpAddr = Ipv4Addr::LOCALHOST.into();
    Kubeconfig {
        server: &url(here, all.ports.apiserver),
        ca_pem: &all.authorities.ca_pem(),
        credentials: Credentials::Embedded(&speaks),
    }
    .save(&kubeconfig)?;
    // It serves nobody but this machine; the name of the machine's own server
    // is as good as any.
    let serving = all.authorities.issue(
        &Certificate::ApiServer {
            node: all.member.node_id,
            address: here,
        },
        now,
    )?;
    let serving = all.files.save(name, &serving)?;
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
    if all.bundle.has(Flag::ManagerInsecurePort) {
        program = program.flag("port", "0");
    }
    if program.profile.binary == Binary::ControllerManager {
        let files = &all.files;
        for (name, value) in [
            (
                "service-account-private-key-file",
                files.service_account_key().into_os_string(),
            ),
            ("root-ca-file", files.ca().into()),
            ("use-service-account-credentials", "true".into()),
            // The curators give each node its range.
            ("allocate-node-cidrs", "false".into()),
            ("node-monitor-grace-period", NODE_GRACE.into()),
            ("controllers", CONTROLLERS.into()),
        ] {
            program = program.flag(name, value);
        }
    }
    Ok(Prepared {
        program,
        renew_at: speaks.renew_at(),
        asked: Client::new(&url(here, port), access::tls(all.authorities.ca(), None)?)?,
        path: "/healthz",
    })
}

/// Of a server on this machine.
pub fn url(address: IpAddr, port: u16) -> String {
    format!("https://{}", SocketAddr::new(address, port))
}

/// Of the same family, which is all that the server listens on.
fn loopback(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}
