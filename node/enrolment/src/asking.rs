//! Asks the curators for what a node needs before it has a certificate: to be
//! taken in, and to be let in again.
//!
//! The node proves that it holds a key by a self-signed certificate; the
//! server is judged by the cluster's CA. What is answered is checked here, at
//! the edge: behind this module an answer is complete, and an order to go has
//! been given by the CA.
//!
//! A directory may name several nodes with several addresses and ports each,
//! and any of them may be dead, or accept connections and never answer. So a
//! call tries a few of them a little apart, within a bound, and each next call
//! begins with another one: all get their turn.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use hearth_api::{
    certificates::{CertificateError, ClusterCa},
    chain,
    client::{Channel, Curators, Endpoint, Endpoints, Options},
    identity::{ClusterId, ClusterUnlockKey, NodeCredentials, PublicKey, SigningKey, Subject},
    proofs::{self, ProofError},
    tls::{self, Clock, ExpectedServer, TlsError},
    v1::{
        ClusterDirectory, ColdStartPolicy, CommitNodeRequest, CommitNodeResponse, JoinNodeRequest,
        NodeState, RegisterNodeRequest, RegisterNodeResponse, StorageSecurity, TpmUsage,
        curator_client::CuratorClient, join_node_response,
    },
};
use hearth_host::directory;
use rustls_pki_types::CertificateDer;
use tonic::{Code, Status};

use super::machine::{Approval, Committed, Entering, Reply};
use super::sealed::{Answer, Member, Registering};

/// So many addresses get their turn in one call.
const AT_ONCE: usize = 16;
/// What a curator says is shown, up to so many characters.
const LONGEST_MESSAGE: usize = 400;

/// Why there is no answer, or none that will do.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// There is nobody to ask.
    #[error("no address of a curator is known")]
    Nobody,
    /// The CA or the key cannot be used.
    #[error("cannot speak TLS with this CA")]
    Tls(#[from] TlsError),
    /// The CA cannot be used.
    #[error("the cluster's CA certificate")]
    Ca(#[source] CertificateError),
    /// No curator answered, or one that does not want it.
    #[error("{call}: {code:?}: {message}")]
    Refused {
        /// The method.
        call: &'static str,
        /// What kind of refusal.
        code: Code,
        /// The curator's words.
        message: String,
    },
    /// An answer that is not one.
    #[error("{call}: the answer's {field}: {why}")]
    Answer {
        /// The method.
        call: &'static str,
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// An order to go that nobody gave who may.
    #[error("JoinNode: an order that this node will not obey")]
    Order(#[from] ProofError),
}

impl AskError {
    /// What kind of refusal, if a curator refused, or none was reached.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    fn status(call: &'static str) -> impl FnOnce(Status) -> Self {
        move |status| Self::Refused {
            call,
            code: status.code(),
            message: message(&status),
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

/// The curator's words on one line that harms no terminal. Where there was no
/// curator, the reasons are below tonic's own words.
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

/// What a cluster says to a node that comes back.
#[derive(Clone, Debug)]
pub enum Joined {
    /// It may.
    Admitted {
        /// The cluster's half of the data partition's key.
        key: ClusterUnlockKey,
        /// Curators, if any are named.
        directory: Option<Arc<ClusterDirectory>>,
    },
    /// Never again: the CA's order has been checked.
    Removed,
}

/// Asks. There is one of these in a node, so that all addresses get their
/// turn, whatever they are asked for.
#[derive(Debug)]
pub struct Asker {
    clock: Clock,
    boot_id: String,
    turn: AtomicUsize,
}

impl Asker {
    /// By this clock, in this boot.
    pub fn new(clock: Clock, boot_id: String) -> Self {
        Self {
            clock,
            boot_id,
            turn: AtomicUsize::new(0),
        }
    }

    /// RegisterNode: asks to be taken in, or what has become of that.
    pub async fn register(
        &self,
        registering: &Registering,
        tpm_is_present: bool,
    ) -> Result<Reply, AskError> {
        const CALL: &str = "RegisterNode";
        let key = &registering.node_key;
        let asking = &registering.asking;
        let mut client = self.client(key, &registering.cluster_ca, &asking.directory)?;
        let proof = proofs::prove_join_key(&key.public(), &registering.join_key);
        let request = RegisterNodeRequest {
            register_ticket: asking.ticket.expose().to_vec(),
            join_key: registering.join_key.public().as_bytes().to_vec(),
            join_key_proof: proof.to_vec(),
            tpm_is_present,
            labels: asking.labels.clone(),
        };
        let reply = client
            .register_node(request)
            .await
            .map_err(AskError::status(CALL))?;
        reply_of(registering, reply.into_inner())
            .map_err(|(field, why)| AskError::answer(CALL, field, why))
    }

    /// CommitNode: hands the unlock key over.
    pub async fn commit(&self, entering: &Entering) -> Result<Committed, AskError> {
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

    /// JoinNode: asks to be let in again.
    pub async fn join(
        &self,
        member: &Member,
        directory: &ClusterDirectory,
    ) -> Result<Joined, AskError> {
        const CALL: &str = "JoinNode";
        let identity = &member.identity;
        let mut client = self.client(&identity.join_key, &member.cluster_ca, directory)?;
        let request = JoinNodeRequest {
            tpm_usage: identity.tpm_usage.into(),
            boot_id: self.boot_id.clone(),
        };
        let answer = client
            .join_node(request)
            .await
            .map_err(AskError::status(CALL))?;
        match answer.into_inner().answer {
            Some(join_node_response::Answer::Admitted(admitted)) => Ok(Joined::Admitted {
                key: admitted.cluster_unlock_key[..]
                    .try_into()
                    .map_err(|error| AskError::answer(CALL, "cluster_unlock_key", error))?,
                directory: named(admitted.directory),
            }),
            Some(join_node_response::Answer::Disowned(order)) => {
                let ca = ClusterCa::parse(&member.cluster_ca).map_err(AskError::Ca)?;
                let (cluster, node) = (identity.cluster_id, identity.node_id);
                proofs::check_disown(&order, &ca.public_key(), cluster, node)?;
                Ok(Joined::Removed)
            }
            None => Err(AskError::answer(CALL, "answer", "none")),
        }
    }

    /// A client of the curators in this directory, for one call.
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
        // Of a directory with names, no other node of the cluster will do.
        let endpoints = Endpoints::from(endpoints).only(directory::nodes(directory));
        let curators = Curators::new(endpoints, tls, options);
        Ok(CuratorClient::new(curators.channel()))
    }

    /// Those whose turn it is, in order.
    fn next(&self, mut endpoints: Vec<Endpoint>) -> Vec<Endpoint> {
        let many = endpoints.len();
        if many == 0 {
            return endpoints;
        }
        // Of a few, another one begins; of many, others are tried at all.
        let step = if many > AT_ONCE { AT_ONCE } else { 1 };
        let turn = self.turn.fetch_add(step, Ordering::Relaxed);
        endpoints.rotate_left(turn % many);
        endpoints.truncate(AT_ONCE);
        endpoints
    }

    fn committed(
        &self,
        entering: &Entering,
        response: CommitNodeResponse,
    ) -> Result<Committed, Wrong> {
        let registering = entering.registering();
        if response.ca_certificate != registering.cluster_ca.as_ref() {
            return Err(wrong(
                "ca_certificate",
                "not the CA that this node judges by",
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
            return Err(wrong("node_certificate", "that of somebody else"));
        }
        let owner = match &response.owner_public_key[..] {
            [] => None,
            bytes => {
                let key = PublicKey::try_from(bytes);
                Some(key.map_err(|error| wrong("owner_public_key", error))?)
            }
        };
        Ok(Committed {
            credentials: Arc::new(NodeCredentials {
                key: registering.node_key.clone(),
                certificate,
                ca: registering.cluster_ca.clone(),
            }),
            // Somebody must be known at the next boot.
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

/// A directory that names somebody.
fn named(directory: Option<ClusterDirectory>) -> Option<Arc<ClusterDirectory>> {
    let directory = directory.filter(|directory| !endpoints(directory).is_empty());
    directory.map(Arc::new)
}

/// All addresses: the first one of each node, then the second ones, and so on.
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
        false => Err(wrong(field, "no value that this release knows")),
    };
    if response.node_id != registering.node_id.to_string() {
        return Err(wrong("node_id", "that of somebody else"));
    }
    let storage_security = response.storage_security();
    known(
        "storage_security",
        storage_security != StorageSecurity::Unspecified,
    )?;
    let tpm_usage = response.tpm_usage();
    known("tpm_usage", tpm_usage != TpmUsage::Unspecified)?;
    let configuration = response.configuration.as_ref();
    // As in the parameters, where it is not set it is NONE.
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
