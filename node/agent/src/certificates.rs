//! Renews this node's certificates, and saves its leaf.
//!
//! New certificates are requested at each start, because the key of one of them is made anew then, and
//! when half of the lifetime of the current ones has passed. So a node can be without a curator for
//! half of a lifetime before its leaf expires. Even then it gets a new one: [`OwnCertificate`] then
//! presents a self-signed certificate of the node's key, with which curators renew the leaf.
//!
//! Where a curator runs on this node, it renews the certificates itself. The leaf is saved here in any
//! case. One that is lost in a power cut is requested again.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::Channel;
use hearth_api::identity::PublicKey;
use hearth_api::tls::{CertificateDer, OwnCertificate};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::{BootProof, RenewCertificatesRequest};
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::credentials;
use hearth_host::handover::MemberData;
use hearth_host::layout::KeyFiles;
use hearth_host::prover::Prover;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::connection::{CuratorConnection, for_each_connection, refused};

/// How often the clock is compared with the lifetime of the certificates: it may be set at any time.
const LOOK: Duration = Duration::from_secs(5);
/// Timeout of one request.
const BOUND: Duration = Duration::from_secs(10);

/// Renews this node's certificates.
pub struct Worker {
    /// Where the leaf is saved.
    pub files: KeyFiles,
    /// Read: this node's certificates, which are replaced.
    pub member: Value<MemberData>,
    /// Read: the connection to the curators.
    pub connection: Value<CuratorConnection>,
    /// Proves what this machine has booted; none without a TPM.
    pub prover: Option<Arc<Prover>>,
}

/// Renews the certificates once the node is a member.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let own = &member.own;
    ctx.healthy();
    tokio::select! {
        outcome = save(&worker.files, own) => outcome,
        outcome = for_each_connection(&worker.connection, |connection| {
            renew(own, worker.prover.as_ref(), connection)
        }) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Saves each new leaf, also one that was renewed before this began; only returns errors. Where the
/// credentials have been wiped, nothing is saved.
async fn save(files: &KeyFiles, own: &OwnCertificate) -> Outcome {
    let mut changes = own.changes();
    loop {
        let (saved, current) = (credentials::load(files)?, own.certificate());
        if saved.is_some_and(|saved| saved.certificate != current) {
            credentials::save_certificate(files, &current)?;
            let not_after = own.not_after().as_secs();
            tracing::info!(not_after, "renewed certificates");
        }
        changes.changed().await?;
    }
}

/// What this machine has booted, if the cluster asks.
async fn proof(
    prover: &Arc<Prover>,
    key: PublicKey,
    curator: &CuratorClient<Channel>,
) -> Result<Option<BootProof>, Failure> {
    let ask = |request| {
        let mut curator = curator.clone();
        async move {
            match timeout(BOUND, curator.get_challenge(request)).await? {
                Ok(challenge) => Ok(Some(challenge.into_inner())),
                Err(status) if status.code() == Code::Unimplemented => Ok(None),
                Err(status) => Err(refused(status)),
            }
        }
    };
    prover.proof(key, ask).await
}

/// Requests new certificates whenever they are due; only returns errors.
async fn renew(
    own: &OwnCertificate,
    prover: Option<&Arc<Prover>>,
    connection: CuratorConnection,
) -> Outcome {
    loop {
        while !own.is_due() {
            sleep(LOOK).await;
        }
        let mut curator = connection.curator();
        let proof = match prover {
            Some(prover) => proof(prover, own.key().public(), &curator).await?,
            None => None,
        };
        let request = RenewCertificatesRequest {
            p256_public_key: own.p256_public_key().as_bytes().to_vec(),
            proof,
        };
        let answer = timeout(BOUND, curator.renew_certificates(request)).await?;
        let answer = answer.map_err(refused)?.into_inner();
        let p256 = match &answer.p256_certificate[..] {
            [] => None,
            der => Some(CertificateDer::from(der.to_vec())),
        };
        own.replace(CertificateDer::from(answer.certificate), p256)?;
    }
}
