//! Calls to the curators before the node has a certificate: register, commit and join.
//!
//! The node proves possession of a key with a self-signed certificate; the server's certificate is
//! verified with the cluster CA. Responses are validated here: outside this module a response is
//! complete, and a disown order has been signed by the CA.
//!
//! A directory may name several nodes with several addresses and ports each, and any of them may be
//! dead, or accept connections and never answer. A call therefore tries a few of them with a short
//! delay in between, with a timeout, and each call starts with another address, so that all are
//! tried in turn.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hearth_api::certificates::{CertificateError, ClusterCa};
use hearth_api::client::{Channel, Curators, Endpoint, Endpoints, Options};
use hearth_api::identity::{
    ClusterId, ClusterUnlockKey, NodeCredentials, PublicKey, SigningKey, Subject,
};
use hearth_api::proofs::{self, AfterRemoval, ProofError};
use hearth_api::recovery::{RecoveryRecipient, UnlockSettings};
use hearth_api::tls::{self, Clock, ExpectedServer, TlsError};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::{
    BootProof, ClusterDirectory, ColdStartPolicy, CommitNodeRequest, CommitNodeResponse,
    GetChallengeRequest, JoinNodeRequest, NodeState, RegisterNodeRequest, RegisterNodeResponse,
    StorageSecurity, TpmUsage, join_node_response,
};
use hearth_api::{chain, ownership, pushback};
use hearth_host::directory;
use hearth_host::prover::{Prover, ProverError};
use rustls_pki_types::CertificateDer;
use tonic::{Code, Status};
use zeroize::Zeroizing;

use super::machine::{AnsweredRegistration, Approval, Committed, Reply};
use super::sealed::{Answer, Member, Registering};

/// Maximum number of addresses tried in one call.
const AT_ONCE: usize = 16;
/// A curator's message is truncated to this number of characters.
const LONGEST_MESSAGE: usize = 400;
/// Limits of the delay that a curator asks for, so that it can cause neither a busy loop nor silence.
const SOONEST: Duration = Duration::from_millis(100);
/// See [`SOONEST`].
const LATEST: Duration = Duration::from_secs(10);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The directory is empty.
    #[error("no address of a curator is known")]
    Nobody,
    /// The CA or the key cannot be used for TLS.
    #[error("cannot configure TLS with this CA")]
    Tls(#[from] TlsError),
    /// The CA certificate is invalid.
    #[error("invalid CA certificate of the cluster")]
    Ca(#[source] CertificateError),
    /// No curator answered, or one returned an error.
    #[error("{call}: {code:?}: {message}")]
    Refused {
        /// The gRPC method.
        call: &'static str,
        /// The gRPC status code.
        code: Code,
        /// The message of the status.
        message: String,
    },
    /// A curator refused the call for now, and has said when to ask again.
    #[error("{call}: not yet: {message}")]
    NotYet {
        /// The gRPC method.
        call: &'static str,
        /// The curator's reason.
        message: String,
        /// The delay until then.
        ask_again: Duration,
    },
    /// The cluster asks what this machine has booted, and that cannot be proven.
    #[error("cannot prove what was booted")]
    Prove(#[from] ProverError),
    /// The response is invalid.
    #[error("{call}: invalid response: {field}: {why}")]
    Answer {
        /// The gRPC method.
        call: &'static str,
        /// The field of the response.
        field: &'static str,
        /// What is wrong with the field.
        why: String,
    },
    /// A disown order that the cluster CA has not signed.
    #[error("JoinNode: invalid disown order")]
    Order(#[from] ProofError),
}

impl AskError {
    /// The gRPC status code, if a curator returned an error or none was reached.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    fn status(call: &'static str) -> impl FnOnce(Status) -> Self {
        move |status| match pushback::of(&status) {
            Some(ask_again) if status.code() == Code::Unavailable => Self::NotYet {
                call,
                message: message(&status),
                ask_again: ask_again.clamp(SOONEST, LATEST),
            },
            _ => Self::Refused {
                call,
                code: status.code(),
                message: message(&status),
            },
        }
    }

    fn answer(call: &'static str, field: &'static str, why: impl ToString) -> Self {
        Self::Answer {
            call,
            field,
            why: why.to_string(),
        }
    }
}

/// The message of a status in one line without control characters. If no curator was reached, the
/// reasons are in the error's sources.
fn message(status: &Status) -> String {
    let text = match std::error::Error::source(status) {
        Some(source) => chain(source),
        None => status.message().to_owned(),
    };
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(LONGEST_MESSAGE)
        .collect()
}

/// The cluster's response to JoinNode.
#[derive(Clone, Debug)]
pub enum Joined {
    /// The node may rejoin.
    Admitted {
        /// The cluster's half of the data partition's key.
        key: ClusterUnlockKey,
        /// Addresses of curators, if any are named.
        directory: Option<Arc<ClusterDirectory>>,
        /// The cluster's present settings, as far as this node may follow them; `None` if the curator
        /// has not told them.
        settings: Option<UnlockSettings>,
    },
    /// The node was removed; the CA's order is verified.
    Removed(AfterRemoval),
}

/// The client for these calls. A node has one instance, so that all addresses are tried in turn,
/// whatever the call.
pub struct CuratorCaller {
    clock: Clock,
    boot_id: String,
    /// None if the machine has no TPM.
    prover: Option<Arc<Prover>>,
    turn: AtomicUsize,
}

impl CuratorCaller {
    /// `clock` verifies certificates; `boot_id` identifies this boot to the curators.
    pub fn new(clock: Clock, boot_id: String, prover: Option<Arc<Prover>>) -> Self {
        Self {
            clock,
            boot_id,
            prover,
            turn: AtomicUsize::new(0),
        }
    }

    /// RegisterNode: registers the node, or asks whether it is approved by now.
    pub async fn register(
        &self,
        registering: &Registering,
        tpm_is_present: bool,
    ) -> Result<Reply, AskError> {
        const CALL: &str = "RegisterNode";
        let key = &registering.node_key;
        let asking = &registering.asking;
        let mut client = self.client(key, &registering.cluster_ca, &asking.directory)?;
        let join_key_proof = proofs::prove_join_key(&key.public(), &registering.join_key);
        // Once the machine is registered, it only asks whether it is approved.
        let proof = match registering.answer {
            None => self.proof(&client, key.public()).await?,
            Some(_) => None,
        };
        let request = RegisterNodeRequest {
            register_ticket: asking.ticket.expose().to_vec(),
            join_key: registering.join_key.public().as_bytes().to_vec(),
            join_key_proof: join_key_proof.to_vec(),
            tpm_is_present,
            labels: asking.labels.clone(),
            proof,
        };
        let reply = client
            .register_node(request)
            .await
            .map_err(AskError::status(CALL))?;
        reply_of(registering, reply.into_inner())
            .map_err(|(field, why)| AskError::answer(CALL, field, why))
    }

    /// CommitNode: gives the cluster unlock key to the cluster, and gets the certificate.
    pub async fn commit(&self, entering: &AnsweredRegistration) -> Result<Committed, AskError> {
        const CALL: &str = "CommitNode";
        let registering = entering.registering();
        let key = &registering.node_key;
        let directory = &registering.asking.directory;
        let mut client = self.client(key, &registering.cluster_ca, directory)?;
        let request = CommitNodeRequest {
            cluster_unlock_key: registering.cluster_unlock_key.expose().to_vec(),
            storage_security: entering.answer().storage_security.into(),
        };
        let committed = client
            .commit_node(request)
            .await
            .map_err(AskError::status(CALL))?;
        self.committed(entering, committed.into_inner())
            .map_err(|(field, why)| AskError::answer(CALL, field, why))
    }

    /// JoinNode: asks for the cluster unlock key after a boot.
    pub async fn join(
        &self,
        member: &Member,
        directory: &ClusterDirectory,
    ) -> Result<Joined, AskError> {
        const CALL: &str = "JoinNode";
        let identity = &member.identity;
        let mut client = self.client(&identity.join_key, &member.cluster_ca, directory)?;
        let key = identity.join_key.public();
        let request = JoinNodeRequest {
            tpm_usage: identity.tpm_usage.into(),
            boot_id: self.boot_id.clone(),
            proof: self.proof(&client, key).await?,
        };
        let answer = client
            .join_node(request)
            .await
            .map_err(AskError::status(CALL))?;
        match answer.into_inner().answer {
            Some(join_node_response::Answer::Admitted(mut admitted)) => {
                let key = Zeroizing::new(std::mem::take(&mut admitted.cluster_unlock_key));
                Ok(Joined::Admitted {
                    key: key[..]
                        .try_into()
                        .map_err(|error| AskError::answer(CALL, "cluster_unlock_key", error))?,
                    settings: unlock_settings(member, &admitted)
                        .map_err(|(field, why)| AskError::answer(CALL, field, why))?,
                    directory: named(admitted.directory),
                })
            }
            Some(join_node_response::Answer::Disowned(order)) => {
                let ca = ClusterCa::parse(&member.cluster_ca).map_err(AskError::Ca)?;
                let (cluster, node) = (identity.cluster_id, identity.node_id);
                let checked = proofs::check_disown(&order, &ca.public_key(), cluster, node);
                Ok(Joined::Removed(checked?))
            }
            None => Err(AskError::answer(CALL, "answer", "missing")),
        }
    }

    /// The proof for the next call of this client with this key, if the cluster asks for one.
    async fn proof(
        &self,
        client: &CuratorClient<Channel>,
        key: PublicKey,
    ) -> Result<Option<BootProof>, AskError> {
        const CALL: &str = "GetChallenge";
        let Some(prover) = &self.prover else {
            return Ok(None);
        };
        let ask = |request: GetChallengeRequest| {
            let mut client = client.clone();
            async move {
                match client.get_challenge(request).await {
                    Ok(asked) => Ok(Some(asked.into_inner())),
                    Err(status) if status.code() == Code::Unimplemented => Ok(None),
                    Err(status) => Err(AskError::status(CALL)(status)),
                }
            }
        };
        prover.proof(key, ask).await
    }

    /// A client of the curators in this directory, for a few calls.
    fn client(
        &self,
        key: &SigningKey,
        ca: &CertificateDer<'_>,
        directory: &ClusterDirectory,
    ) -> Result<CuratorClient<Channel>, AskError> {
        let endpoints = self.next(endpoints(directory));
        if endpoints.is_empty() {
            return Err(AskError::Nobody);
        }
        let ca = ClusterCa::parse(ca).map_err(AskError::Ca)?;
        let clock = Arc::clone(&self.clock);
        let tls = tls::possession_client_config(key, ca, ExpectedServer::AnyNode, clock)?;
        let options = Options {
            clock: Arc::clone(&self.clock),
            ..Options::default()
        };
        // If the directory names nodes, only these are accepted as servers.
        let endpoints = Endpoints::from(endpoints).only(directory::nodes(directory));
        let curators = Curators::new(endpoints, tls, options);
        Ok(CuratorClient::new(curators.channel()))
    }

    /// The endpoints for this call, in order.
    fn next(&self, mut endpoints: Vec<Endpoint>) -> Vec<Endpoint> {
        let many = endpoints.len();
        if many == 0 {
            return endpoints;
        }
        // Few endpoints: start with the next one. Many: try the next group.
        let step = if many > AT_ONCE { AT_ONCE } else { 1 };
        let turn = self.turn.fetch_add(step, Ordering::Relaxed);
        endpoints.rotate_left(turn % many);
        endpoints.truncate(AT_ONCE);
        endpoints
    }

    fn committed(
        &self,
        entering: &AnsweredRegistration,
        response: CommitNodeResponse,
    ) -> Result<Committed, Wrong> {
        let registering = entering.registering();
        if response.ca_certificate != registering.cluster_ca.as_ref() {
            return Err(wrong(
                "ca_certificate",
                "not the CA with which this node registered",
            ));
        }
        let certificate = CertificateDer::from(response.node_certificate);
        let now = tls::now(&self.clock);
        let leaf = ClusterCa::parse(&registering.cluster_ca)
            .and_then(|ca| ca.verify(&certificate, now))
            .and_then(|leaf| leaf.of_cluster(entering.answer().cluster_id))
            .map_err(|error| wrong("node_certificate", chain(&error)))?;
        if leaf.identity.subject != Subject::Node(registering.node_id)
            || leaf.public_key != registering.node_key.public()
        {
            return Err(wrong("node_certificate", "issued for another node or key"));
        }
        let owner = PublicKey::from_field(&response.owner_public_key)
            .map_err(|error| wrong("owner_public_key", error))?;
        let recipient = recipient(&response.recovery_recipient)?;
        let recovery = registering.recovery(entering.answer(), recipient);
        Ok(Committed {
            recovery,
            credentials: Arc::new(NodeCredentials {
                key: registering.node_key.clone(),
                certificate,
                ca: registering.cluster_ca.clone(),
            }),
            // The next boot needs the address of a curator.
            directory: named(response.directory)
                .unwrap_or_else(|| Arc::new(registering.asking.directory.clone())),
            owner,
        })
    }
}

/// The field, and what is wrong with it.
type Wrong = (&'static str, String);

fn wrong(field: &'static str, why: impl ToString) -> Wrong {
    (field, why.to_string())
}

/// The cluster's recovery recipient, if it has one.
fn recipient(bytes: &[u8]) -> Result<Option<RecoveryRecipient>, Wrong> {
    RecoveryRecipient::from_field(bytes).map_err(|error| wrong("recovery_recipient", error))
}

/// The settings that the member has to record. A curator of a release before the settings could
/// change does not tell them.
fn unlock_settings(
    member: &Member,
    admitted: &join_node_response::Admitted,
) -> Result<Option<UnlockSettings>, Wrong> {
    let cold_start_policy = match ColdStartPolicy::try_from(admitted.cold_start_policy) {
        Err(_) => return Err(wrong("cold_start_policy", "unknown value")),
        Ok(ColdStartPolicy::Unspecified) => return Ok(None),
        Ok(policy) => policy,
    };
    let Some(known) = member.owner else {
        // A former release has registered the node and has not told it who the owner is.
        let owner = PublicKey::from_field(&admitted.owner_public_key);
        return Ok(Some(UnlockSettings {
            cold_start_policy,
            recovery_recipient: recipient(&admitted.recovery_recipient)?,
            owner: owner.map_err(|error| wrong("owner_public_key", error))?,
        }));
    };
    let cluster = member.identity.cluster_id;
    let replacement = ownership::follow(cluster, known, &admitted.owner_replacements);
    let settings = UnlockSettings {
        cold_start_policy,
        ..member.unlock_settings()
    };
    Ok(Some(
        match replacement.map_err(|error| wrong("owner_replacements", error))? {
            None => settings,
            Some(replacement) => UnlockSettings {
                recovery_recipient: Some(replacement.recovery_recipient),
                owner: Some(replacement.owner),
                ..settings
            },
        },
    ))
}

/// The directory, if it has at least one address.
fn named(directory: Option<ClusterDirectory>) -> Option<Arc<ClusterDirectory>> {
    let directory = directory.filter(|directory| !endpoints(directory).is_empty());
    directory.map(Arc::new)
}

/// All addresses: first the first one of each node, then the second ones, and so on.
fn endpoints(directory: &ClusterDirectory) -> Vec<Endpoint> {
    let most = directory.nodes.iter().map(|node| node.addresses.len());
    let mut endpoints = Vec::new();
    for index in 0..most.max().unwrap_or(0) {
        let addresses = directory.nodes.iter();
        for address in addresses.filter_map(|node| node.addresses.get(index)) {
            let host: Option<IpAddr> = address.host.parse().ok();
            let endpoint = host.zip(u16::try_from(address.port).ok());
            let endpoint = endpoint.map(|(host, port)| Endpoint::new(host, port));
            endpoints.extend(endpoint.filter(|endpoint| !endpoints.contains(endpoint)));
        }
    }
    endpoints
}

fn reply_of(registering: &Registering, response: RegisterNodeResponse) -> Result<Reply, Wrong> {
    let known = |field, given: bool| match given {
        true => Ok(()),
        false => Err(wrong(field, "unknown value")),
    };
    if response.node_id != registering.node_id.to_string() {
        return Err(wrong("node_id", "not the ID of this node"));
    }
    let storage_security = response.storage_security();
    known(
        "storage_security",
        storage_security != StorageSecurity::Unspecified,
    )?;
    let tpm_usage = response.tpm_usage();
    known("tpm_usage", tpm_usage != TpmUsage::Unspecified)?;
    let configuration = response.configuration.as_ref();
    // As in the parameters, an unset policy means NONE.
    let cold_start_policy = match configuration.map(|c| c.cold_start_policy()) {
        None | Some(ColdStartPolicy::Unspecified) => ColdStartPolicy::None,
        Some(policy) => policy,
    };
    let number = configuration.map_or(0, |c| c.cold_start_policy);
    known(
        "configuration.cold_start_policy",
        ColdStartPolicy::try_from(number).is_ok(),
    )?;
    let approval = match response.state() {
        NodeState::New => Approval::Waits {
            ask_again: Duration::from_millis(response.ask_again_ms.into()),
        },
        NodeState::Standby | NodeState::Up => Approval::Given,
        state @ (NodeState::Decommissioned | NodeState::Unspecified) => {
            return Err(wrong("state", state.as_str_name()));
        }
    };
    let cluster_id = ClusterId::try_from(&response.cluster_id[..]);
    Ok(Reply {
        answer: Answer {
            cluster_id: cluster_id.map_err(|error| wrong("cluster_id", error))?,
            storage_security,
            tpm_usage,
            cold_start_policy,
        },
        approval,
        directory: response.directory.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests;
