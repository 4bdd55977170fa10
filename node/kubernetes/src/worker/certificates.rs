//! What this node shows in Kubernetes: keys made here, certificates that the
//! curators issue for them.
//!
//! All of it lies in memory. A worker needs an API server to be of use, and an
//! API server needs the same quorum that the curators need, so certificates
//! that outlive a boot would gain nothing, and keys that are on no disk need
//! no wiping.
//!
//! They are renewed together, at the time of the first that is due, and when
//! the node's address changes, which the kubelet's own server proves. The
//! curators put the address into that certificate that they know, so one with
//! an old address is asked for again until they have heard of the new one.
//!
//! The kubelet starts again with renewed ones, so its own stands in its
//! kubeconfig. It has a connection to the API servers of its own for each group
//! of objects, and would look after files that it is named at each of them,
//! twice a second.

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hearth_agent::CuratorConnection;
use hearth_api::identity::SigningKey;
use hearth_api::v1::IssueCertificateRequest;
use hearth_api::v1::issue_certificate_request::{
    Kind, KubernetesWorker, kubernetes_worker::Purpose,
};
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::bundle::Binary;
use hearth_host::layout::{EphemeralWorker, KeyFiles};
use hearth_host::pki::kubernetes::{KeyAndCertificate, to_pem};
use hearth_kubernetes_api::Client;
use hearth_sys::files;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{GeneralName, ParsedExtension};

use crate::access;
use crate::balancer;
use crate::calendar::Calendar;
use crate::kubeconfig::{Credentials, Kubeconfig};

/// Between two attempts to get them.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// One attempt may take so long.
const ASK_BOUND: Duration = Duration::from_secs(20);
/// What is public.
const PUBLIC: u32 = 0o644;

/// Whose keys are in which directory: the kubelet's, as a server.
pub(crate) const KUBELET_SERVER: &str = "kubelet-server";
/// The same, of kube-proxy.
pub(crate) const PROXY: &str = "kube-proxy";

/// What there is besides files.
struct Issued {
    /// By which API servers prove themselves.
    authority: CertificateDer<'static>,
    /// Of the node's own client.
    node: KeyAndCertificate,
    /// When the next ones are due.
    renew_at: SystemTime,
}

/// What gets them.
pub(crate) struct Worker {
    /// Where they are written.
    pub files: EphemeralWorker,
    /// By which they are renewed.
    pub calendar: Calendar,
    /// Will be read: whom to ask.
    pub connection: Value<CuratorConnection>,
    /// Will be read: what the kubelet's server is to prove.
    pub address: Value<IpAddr>,
    /// Will be written: the node's own, for TLS.
    pub tls: Writer<Arc<ClientConfig>>,
    /// Will be written when all the rest is: the node's own client of the API
    /// servers, behind the balancer. Anew, whenever the certificates are.
    pub client: Writer<Client>,
    /// Will be written: why there are none yet.
    pub waits: Writer<String>,
}

/// Gets them, and renews them.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let servers = balancer::url();
    let work = async {
        let mut addresses = worker.address.watch();
        let mut address = addresses.next().await?;
        let health = Health::of(&ctx);
        loop {
            let issued = tokio::select! {
                issued = worker.get(address) => issued?,
                // What curators would certify is another one.
                moved = addresses.wait_for(|now| *now != address) => {
                    address = moved?;
                    continue;
                }
            };
            let tls = access::tls(&issued.authority, Some(&issued.node))?;
            worker.tls.set(Arc::new(tls.clone()));
            worker.client.set(Client::new(&servers, tls)?);
            health.good();
            address = worker.due(issued.renew_at, &mut addresses, address).await?;
        }
    };
    ctx.until_cancelled(work).await
}

impl Worker {
    /// Waits until new ones are due, and gives the address that they are for.
    async fn due(
        &self,
        renew_at: SystemTime,
        addresses: &mut Watcher<IpAddr>,
        address: IpAddr,
    ) -> Result<IpAddr, event::Closed> {
        tokio::select! {
            changed = addresses.wait_for(|now| *now != address) => changed,
            () = self.calendar.reaches(renew_at) => Ok(address),
        }
    }

    /// Asks the curators for as long as it takes.
    async fn get(&self, address: IpAddr) -> Result<Issued, event::Closed> {
        let mut said = String::new();
        loop {
            // Before each attempt: it is another one after a reconnection.
            self.connection.watch().next().await?;
            let why = match tokio::time::timeout(ASK_BOUND, self.ask(address)).await {
                Ok(Ok(issued)) => return Ok(issued),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer for {ASK_BOUND:?}"),
            };
            if said != why {
                tracing::info!("no certificates for this worker yet: {why}");
                self.waits.set(why.clone());
                said = why;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// One attempt. Written are all or none, but for a failing disk.
    async fn ask(&self, address: IpAddr) -> Result<Issued, Failure> {
        let (authority, server) = self.issue(Purpose::KubeletServer).await?;
        if !proves(server.certificate(), address) {
            return Err(Failure::msg(format!(
                "the curators have not heard yet that this node is at {address}"
            )));
        }
        let (_, client) = self.issue(Purpose::KubeletClient).await?;
        let (_, proxy) = self.issue(Purpose::Proxy).await?;
        let (_, node) = self.issue(Purpose::Node).await?;
        let all = [&server, &client, &proxy];
        let renewals = all.into_iter().map(KeyAndCertificate::renew_at);
        let renew_at = renewals.fold(node.renew_at(), Ord::min);
        for (whose, issued) in [(KUBELET_SERVER, &server), (PROXY, &proxy)] {
            save(&self.files.keys(whose), &authority, issued)?;
        }
        Kubeconfig {
            server: &balancer::url(),
            ca_pem: &to_pem(&authority),
            credentials: Credentials::Embedded(&client),
        }
        .save(&self.files.kubeconfig(Binary::Kubelet.name()))?;
        Ok(Issued {
            authority,
            node,
            renew_at,
        })
    }

    /// A certificate for a new key, and the authority that vouches for it.
    async fn issue(
        &self,
        purpose: Purpose,
    ) -> Result<(CertificateDer<'static>, KeyAndCertificate), Failure> {
        let key = SigningKey::generate();
        let request = IssueCertificateRequest {
            kind: Some(Kind::KubernetesWorker(KubernetesWorker {
                purpose: purpose.into(),
                public_key: key.public().as_bytes().to_vec(),
            })),
        };
        let connection = self.connection.get().ok_or(event::Closed)?;
        let issued = connection.curator().issue_certificate(request).await;
        let issued = issued
            .map_err(|status| Failure::msg(format!("{:?}: {}", status.code(), status.message())))?;
        let issued = issued.into_inner();
        let certificate = KeyAndCertificate::new(&key, &issued.certificate)?;
        Ok((issued.ca_certificate.into(), certificate))
    }
}

fn save(files: &KeyFiles, authority: &CertificateDer<'_>, issued: &KeyAndCertificate) -> Outcome {
    files::create_dir_durably(files.path(), 0o700)?;
    files::write_atomic(&files.ca(), to_pem(authority).as_bytes(), PUBLIC)?;
    issued.save(&files.certificate(), &files.key())?;
    Ok(())
}

/// Whether a server's certificate is good for an address.
fn proves(certificate: &[u8], address: IpAddr) -> bool {
    let octets = match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return false;
    };
    parsed.extensions().iter().any(|extension| {
        matches!(extension.parsed_extension(), ParsedExtension::SubjectAlternativeName(names)
        if names.general_names.iter().any(|name| {
            matches!(name, GeneralName::IPAddress(bytes) if *bytes == octets)
        }))
    })
}
