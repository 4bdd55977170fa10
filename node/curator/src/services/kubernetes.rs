//! Certificates of Kubernetes' own authority: for workers, with keys that are generated on the
//! node, and for operators, with a new key for each use.

use hearth_api::identity::{NodeId, PublicKey, UserName};
use hearth_api::v1::issue_certificate_request::KubernetesWorker;
use hearth_api::v1::{
    GetKubernetesAccessRequest, GetKubernetesAccessResponse, IssueCertificateResponse,
};
use hearth_cluster::decisions::{Rejection, kubernetes};
use hearth_host::pki::kubernetes::Certificate;
use tonic::Status;

use super::request::known;
use crate::authorities;
use crate::core::Core;

/// Issues a certificate to a worker. `own` is its identity key in the cluster.
pub(super) async fn worker_certificate(
    core: &Core,
    id: NodeId,
    own: PublicKey,
    wanted: KubernetesWorker,
) -> Result<IssueCertificateResponse, Status> {
    let purpose = known(
        "kubernetes_worker.purpose",
        wanted.purpose(),
        wanted.purpose,
    )?;
    let key = parse_key("kubernetes_worker.public_key", &wanted.public_key)?;
    if key == own {
        return Err(Rejection::Field {
            field: "kubernetes_worker.public_key",
            wanted: "a key generated for this certificate",
            found: "the node's identity key".into(),
        }
        .into());
    }
    core.reads.linearizable().await?;
    let node = core.cache.node(id).map(|(node, _)| node);
    let status = core.cache.status(id);
    let address = status.as_ref().and_then(kubernetes::address);
    let others = core
        .cache
        .nodes(|node| address.is_some_and(|address| kubernetes::reports(node, address)));
    let holder = (node.as_ref(), status.as_ref());
    let what = kubernetes::worker(id, purpose, holder, &others, &core.reserved()?)?;
    let (certificate, ca_certificate) = issue(core, &what, key).await?;
    tracing::info!(node = %id, purpose = purpose.as_str_name(), "issued Kubernetes certificate");
    Ok(IssueCertificateResponse {
        certificate,
        ca_certificate,
    })
}

/// Issues a certificate to an operator and returns the API servers.
pub(super) async fn access(
    core: &Core,
    user: &UserName,
    request: GetKubernetesAccessRequest,
) -> Result<GetKubernetesAccessResponse, Status> {
    let key = parse_key("public_key", &request.public_key)?;
    core.reads.linearizable().await?;
    let configuration = core.cluster()?.content.configuration;
    let controllers = core.cache.nodes(kubernetes::is_controller);
    let servers = kubernetes::servers(&controllers, configuration.kubernetes.as_ref())?;
    let (certificate, ca_certificate) = issue(core, &Certificate::Operator(user), key).await?;
    tracing::info!(%user, "issued Kubernetes certificate");
    Ok(GetKubernetesAccessResponse {
        certificate,
        ca_certificate,
        servers,
    })
}

/// Issues a certificate. Returns it and the authority's certificate, in DER.
async fn issue(
    core: &Core,
    what: &Certificate<'_>,
    key: PublicKey,
) -> Result<(Vec<u8>, Vec<u8>), Status> {
    let authorities = authorities::kubernetes(core).await?;
    let issued = authorities
        .certify(what, key, core.now())
        .map_err(|error| authorities::cannot(&error))?;
    Ok((issued.certificate().to_vec(), authorities.ca().to_vec()))
}

fn parse_key(field: &'static str, bytes: &[u8]) -> Result<PublicKey, Rejection> {
    PublicKey::try_from(bytes).map_err(|error| Rejection::Field {
        field,
        wanted: "an Ed25519 public key of 32 bytes",
        found: error.to_string(),
    })
}
