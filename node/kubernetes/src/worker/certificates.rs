//! The worker's certificates for Kubernetes: keys are generated on the node, certificates are
//! issued by the curators.
//!
//! All of them are stored in memory. A worker needs an API server, and an API server needs the same
//! quorum as the curators, so certificates that outlive a boot would not help, and keys that are
//! not on a disk do not have to be wiped.
//!
//! They are renewed together, when the first one is due, and when the node's address changes, which
//! is in the serving certificate of the kubelet. The curators issue this certificate for the
//! address that they know; if that is outdated, the request is repeated until they know the new
//! one.
//!
//! The kubelet is restarted with renewed certificates, so its client certificate is embedded in its
//! kubeconfig. With certificate files, each of its connections to the API servers (it has one for
//! each group of objects) would check the files twice per second.

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hearth_agent::CuratorConnection;
use hearth_api::identity::SigningKey;
use hearth_api::v1::IssueCertificateRequest;
use hearth_api::v1::issue_certificate_request::kubernetes_worker::Purpose;
use hearth_api::v1::issue_certificate_request::{Kind, KubernetesWorker};
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::bundle::Binary;
use hearth_host::layout::{EphemeralWorker, KeyFiles};
use hearth_host::pki::kubernetes::{KeyAndCertificate, WORKER_LIFETIME, to_pem};
use hearth_kubernetes_api::Client;
use hearth_sys::files;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{GeneralName, ParsedExtension};

use crate::calendar::CertificateClock;
use crate::kubeconfig::{Credentials, Kubeconfig};
use crate::{access, balancer};

/// Delay between two attempts.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Timeout of an attempt.
const ASK_BOUND: Duration = Duration::from_secs(20);
/// Mode of files that are public.
const PUBLIC: u32 = 0o644;

/// Directory of the kubelet's serving key and certificate.
pub(crate) const KUBELET_SERVER: &str = "kubelet-server";
/// Directory of kube-proxy's client key and certificate.
pub(crate) const PROXY: &str = "kube-proxy";

/// Issued certificates that are not used from files.
struct Issued {
    /// CA certificate of the API servers.
    authority: CertificateDer<'static>,
    /// Client certificate of the node itself.
    node: KeyAndCertificate,
    /// When the first certificate is due for renewal.
    renew_at: SystemTime,
}

/// Inputs and outputs.
pub(crate) struct Worker {
    /// Directory of the files.
    pub files: EphemeralWorker,
    /// The clock for renewals.
    pub calendar: CertificateClock,
    /// Input: the curators.
    pub connection: Value<CuratorConnection>,
    /// Input: the address for the kubelet's serving certificate.
    pub address: Value<IpAddr>,
    /// Output: TLS configuration of the node's own client.
    pub tls: Writer<Arc<ClientConfig>>,
    /// Output: the node's own client of the API servers, through the balancer. It is set last, and
    /// again whenever the certificates have been renewed.
    pub client: Writer<Client>,
    /// Output: why there are no certificates yet.
    pub waits: Writer<String>,
}

/// Requests certificates, and renews them.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let servers = balancer::url();
    let work = async {
        let mut addresses = worker.address.watch();
        let mut address = addresses.next().await?;
        let health = Health::of(&ctx);
        loop {
            let issued = tokio::select! {
                issued = worker.get(address) => issued?,
                // The attempt was for the old address.
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
    /// Waits until a renewal is due; returns the address to request certificates for.
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

    /// Requests certificates from the curators, and retries until it succeeds.
    async fn get(&self, address: IpAddr) -> Result<Issued, event::Closed> {
        let mut said = String::new();
        loop {
            // For each attempt, because there is a new connection after a reconnect.
            self.connection.watch().next().await?;
            let why = match tokio::time::timeout(ASK_BOUND, self.ask(address)).await {
                Ok(Ok(issued)) => return Ok(issued),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {ASK_BOUND:?}"),
            };
            if said != why {
                tracing::info!("waiting for the certificates of this worker: {why}");
                self.waits.set(why.clone());
                said = why;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// One attempt. Files are written after all certificates have been issued.
    async fn ask(&self, address: IpAddr) -> Result<Issued, Failure> {
        let (authority, server) = self.issue(Purpose::KubeletServer).await?;
        if !proves(server.certificate(), address) {
            return Err(Failure::msg(format!(
                "the curators do not know the new address {address} of this node yet"
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

    /// Requests a certificate for a new key; with its CA certificate.
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
        let certificate = KeyAndCertificate::new(&key, &issued.certificate, WORKER_LIFETIME)?;
        Ok((issued.ca_certificate.into(), certificate))
    }
}

fn save(files: &KeyFiles, authority: &CertificateDer<'_>, issued: &KeyAndCertificate) -> Outcome {
    files::create_dir_durably(files.path(), 0o700)?;
    files::write_atomic(&files.ca(), to_pem(authority).as_bytes(), PUBLIC)?;
    issued.save(&files.certificate(), &files.key())?;
    Ok(())
}

/// Whether a serving certificate is valid for an address.
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
