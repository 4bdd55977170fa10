//! Registration, commit and join of nodes (RegisterNode, CommitNode, JoinNode), and the
//! certificates that nodes request.
//!
//! Anyone may call the first three, so their cost is bounded: a ticket is compared in memory, and
//! wrong ones are limited by a [`Bucket`]; an unknown key is looked up in memory. Only a caller
//! with the ticket or a known key causes requests to etcd.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::{ClusterUnlockKey, Identity, NodeId, PublicKey, Ticket};
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::server::Caller;
use hearth_api::tls::{self, PeerCertificate};
use hearth_api::v1::issue_certificate_request::Kind;
use hearth_api::v1::{
    CommitNodeRequest, CommitNodeResponse, GetChallengeRequest, GetChallengeResponse,
    IssueCertificateRequest, IssueCertificateResponse, JoinNodeRequest, JoinNodeResponse,
    NodeState, RegisterNodeRequest, RegisterNodeResponse, RenewCertificatesRequest,
    RenewCertificatesResponse, StorageSecurity, TpmUsage, join_node_response,
};
use hearth_api::{labels, proofs, settings};
use hearth_cluster::decisions::commit::{self, Commit, Committed};
use hearth_cluster::decisions::join::{self, Boots, Join, Joined};
use hearth_cluster::decisions::registration::{
    self, Found, MOST_WAITING, Registered, Registration,
};
use hearth_cluster::decisions::{Rejection, admission};
use hearth_cluster::state::{self, Endorsement, LivenessRecord, NodeRecord, Wanted};
use hearth_consensus::fenced::Write;
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tonic::{Code, Request, Status};
use zeroize::Zeroizing;

use super::attestation::Attestation;
use super::kubernetes;
use super::request::{check_boot_id, known, p256_key, unspecified};
use crate::budget::{Bucket, Rate};
use crate::core::{Core, versioned};
use crate::status::unavailable;
use crate::{authorities, leaves};

/// Poll interval of a machine that waits for approval. It is short, because an operator may be
/// about to approve the machine, and grows with the number of waiting machines.
const ASK_AGAIN_DELAY: Duration = Duration::from_millis(250);
/// The number of waiting machines per [`ASK_AGAIN_DELAY`] of poll interval.
const MACHINES_PER_DELAY: usize = 4;

fn ask_again(waiting: usize) -> Duration {
    let share = u32::try_from(waiting / MACHINES_PER_DELAY).unwrap_or(u32::MAX);
    ASK_AGAIN_DELAY.saturating_mul(share.saturating_add(1))
}
/// Wrong tickets of all machines together.
const WRONG_TICKETS: Rate = Rate {
    burst: 16,
    every: Duration::from_millis(500),
};
/// Maximum number of concurrent calls with requests to etcd, and how long a call waits for a
/// permit.
const MOST_CONCURRENT_CALLS: usize = 16;
const TURN_BOUND: Duration = Duration::from_secs(5);

pub(super) struct Enrolment {
    core: Arc<Core>,
    wrong_tickets: Bucket,
    attestation: Attestation,
    places: Semaphore,
    /// Serializes registrations, so that the limit of waiting machines holds.
    taking_in: Mutex<()>,
}

impl Enrolment {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            attestation: Attestation::new(core.clone()),
            core,
            wrong_tickets: Bucket::new(WRONG_TICKETS),
            places: Semaphore::new(MOST_CONCURRENT_CALLS),
            taking_in: Mutex::default(),
        }
    }

    async fn turn(&self) -> Result<SemaphorePermit<'_>, Status> {
        let turn = timeout(TURN_BOUND, self.places.acquire()).await;
        // The semaphore is never closed.
        turn.ok().and_then(Result::ok).ok_or_else(busy)
    }

    pub(super) async fn challenge(
        &self,
        request: Request<GetChallengeRequest>,
    ) -> Result<GetChallengeResponse, Status> {
        self.attestation.challenge(request).await
    }

    pub(super) async fn register(
        &self,
        request: Request<RegisterNodeRequest>,
    ) -> Result<RegisterNodeResponse, Status> {
        let node_key = stranger(Caller::of(&request)?)?;
        let remote = Caller::of(&request)?.remote();
        let mut request = request.into_inner();
        let ticket = Zeroizing::new(std::mem::take(&mut request.register_ticket));
        let ticket = Ticket::try_from(&ticket[..]).map_err(|error| Rejection::Field {
            field: "register_ticket",
            wanted: "32 bytes",
            found: error.found.to_string(),
        })?;
        let id = registration::id_of(&node_key);
        let is_known = || {
            let node = self.core.cache.node(id).map(|(node, _)| node.public_key);
            let known = node.or_else(|| Some(self.core.cache.tombstone(id)?.public_key));
            known == Some(node_key)
        };
        let is_right = || {
            self.core
                .cache
                .ticket()
                .is_some_and(|t| t.content == ticket)
        };
        // The ticket may just have been rotated, so a wrong one is checked again after a
        // linearizable read. The bucket limits these reads.
        if !is_known() && !is_right() && !self.wrong_tickets.take() {
            return Err(Rejection::TooManyWrongTickets.into());
        }
        self.core.reads.linearizable().await?;
        if !is_known() && !is_right() {
            tracing::warn!(%remote, "registration rejected: wrong register ticket");
            return Err(Rejection::WrongTicket.into());
        }
        let proof = request.proof.take();
        let mut registration = check_registration(node_key, request)?;
        // Once registered, a machine only asks whether it is approved.
        if !is_known() {
            registration.admission = self.attestation.admit(&node_key, proof)?;
        }
        let node = self.take_in(registration, &ticket).await?;
        self.registered(node)
    }

    /// Finds the machine's record, or registers it.
    async fn take_in(
        &self,
        registration: Registration,
        ticket: &Ticket,
    ) -> Result<NodeRecord, Status> {
        let id = registration::id_of(&registration.node_key);
        if let Some((node, _)) = self.core.cache.node(id) {
            let (node_key, join_key) = (&registration.node_key, &registration.join_key);
            return Ok(registration::known(node, node_key, join_key)?);
        }
        if self.core.cache.tombstone(id).is_some() {
            return Err(Rejection::Deleted(id).into());
        }
        if let Some(full) = self.full() {
            return Err(full.into());
        }
        let _turn = timeout(TURN_BOUND, self.taking_in.lock())
            .await
            .map_err(|_| busy())?;
        let decide = || self.decide(&registration, ticket);
        let (node, revision) = self.core.write_with_retry(decide).await?;
        if revision.is_some() {
            tracing::info!(node = %id, "node registered; waiting for approval");
        }
        Ok(node)
    }

    fn full(&self) -> Option<Rejection> {
        let waiting = self.core.cache.count(NodeState::New);
        (waiting >= MOST_WAITING).then_some(Rejection::TooManyWaiting(waiting))
    }

    async fn decide(
        &self,
        registration: &Registration,
        ticket: &Ticket,
    ) -> Result<(NodeRecord, Option<Write>), Status> {
        self.core.reads.linearizable().await?;
        let cache = &self.core.cache;
        let id = registration::id_of(&registration.node_key);
        let cluster = self.core.cluster()?;
        let known = cache.ticket().filter(|known| known.content == *ticket);
        let ticket = known.ok_or(Rejection::WrongTicket)?.revision;
        let found = Found {
            node: cache.node(id).map(|(node, _)| node),
            deleted: cache.tombstone(id).is_some(),
            join_key_of: cache.join_key_of(&registration.join_key),
            waiting: cache.count(NodeState::New),
        };
        let configuration = cluster.map(|cluster| cluster.configuration);
        let registered = registration::decide(registration, found, &configuration, ticket)?;
        Ok(match registered {
            Registered::Before(node) => (node, None),
            Registered::Now(node, write) => (node, Some(write)),
        })
    }

    fn registered(&self, node: NodeRecord) -> Result<RegisterNodeResponse, Status> {
        let cluster = self.core.cluster()?.content;
        Ok(RegisterNodeResponse {
            cluster_id: cluster.id.as_bytes().to_vec(),
            node_id: node.id.to_string(),
            configuration: Some(settings::without_secrets(cluster.configuration)),
            tpm_usage: node.tpm_usage.into(),
            storage_security: node.storage_security.into(),
            state: node.state.into(),
            ask_again_ms: Core::millis(ask_again(self.core.cache.count(NodeState::New))),
            directory: Some(self.core.cache.directory()),
        })
    }

    pub(super) async fn commit(
        &self,
        request: Request<CommitNodeRequest>,
    ) -> Result<CommitNodeResponse, Status> {
        let node_key = stranger(Caller::of(&request)?)?;
        let commit = check_commit(node_key, request.into_inner())?;
        let id = registration::id_of(&node_key);
        self.core.reads.linearizable().await?;
        if self.core.cache.node(id).is_none() {
            let deleted = self.core.cache.tombstone(id).is_some();
            let configuration = self.core.cluster()?.content.configuration;
            commit::decide(&commit, None, deleted, &configuration)?;
        }
        let _place = self.turn().await?;
        let settled = self
            .core
            .write_with_retry(|| self.decide_commit(&commit))
            .await?;
        let (certificate, revision) = settled;
        if revision.is_some() {
            tracing::info!(node = %id, "node committed; it is a member of the cluster now");
        }
        let cluster = self.core.cluster()?.content;
        Ok(CommitNodeResponse {
            ca_certificate: self.core.ca.to_vec(),
            node_certificate: certificate,
            directory: Some(self.core.cache.directory()),
            owner_public_key: cluster.owner.as_bytes().to_vec(),
            recovery_recipient: RecoveryRecipient::to_field(cluster.recovery_recipient),
        })
    }

    /// The certificate, and the write that makes the machine a node.
    async fn decide_commit(&self, commit: &Commit) -> Result<(Vec<u8>, Option<Write>), Status> {
        let id = registration::id_of(&commit.node_key);
        let found = self.core.find(id).await?;
        // If the node has been deleted meanwhile, the cache has its tombstone after this.
        self.core.reads.linearizable().await?;
        let deleted = self.core.cache.tombstone(id).is_some();
        let cluster = self.core.cluster()?;
        let configuration = cluster.map(|cluster| cluster.configuration);
        let decided = commit::decide(commit, found.as_ref(), deleted, &configuration.content)?;
        if let Committed::Before(Some(certificate)) = decided {
            return Ok((certificate.to_vec(), None));
        }
        let leaves = leaves::of_node(&self.core, id, commit.node_key, None).await?;
        let certificate = leaves.certificate;
        let answer = certificate.to_vec();
        let write = match (decided, found) {
            (Committed::Now, Some(found)) => {
                Some(commit::write(commit, &found, certificate, &configuration)?)
            }
            // The bootstrap node, whose certificate is not stored: a new one does as well.
            _ => None,
        };
        Ok((answer, write))
    }

    pub(super) async fn join(
        &self,
        request: Request<JoinNodeRequest>,
    ) -> Result<JoinNodeResponse, Status> {
        let caller = Caller::of(&request)?;
        let (join_key, address) = (stranger(caller)?, caller.remote().ip());
        let mut request = request.into_inner();
        let proof = request.proof.take();
        let mut join = check_join(join_key, address, request)?;
        self.core.reads.linearizable().await?;
        let cache = &self.core.cache;
        let id = cache.join_key_of(&join.join_key);
        if let Some(id) = id {
            self.core.budgets.join(id)?;
        }
        let tombstone = id.and_then(|id| cache.tombstone(id));
        let is_member = match &tombstone {
            Some(tombstone) => self.is_member(tombstone.id).await?,
            None => false,
        };
        let found = join::Found {
            node: id.and_then(|id| Some(cache.node(id)?.0)),
            tombstone,
            is_member,
        };
        let joined = join::decide(&join, found)?;
        let _place = self.turn().await?;
        let answer = match joined {
            Joined::Admitted(id) => {
                join.admission = self.attestation.admit(&join_key, proof)?;
                self.admitted(id, &join).await?
            }
            Joined::Disowned(id, afterwards) => {
                tracing::info!(node = %id, ?afterwards, "removed node reconnected: sending disown order");
                let cluster = self.core.cluster()?.content.id;
                let authority = authorities::cluster(&self.core).await?;
                join_node_response::Answer::Disowned(authority.disown(cluster, id, afterwards))
            }
        };
        Ok(JoinNodeResponse {
            answer: Some(answer),
        })
    }

    /// Whether etcd has a member for this node, no earlier than the caller's linearizable read.
    async fn is_member(&self, id: NodeId) -> Result<bool, Status> {
        let _place = self.turn().await?;
        let members = self.core.members.list().await;
        let members = members.map_err(|error| unavailable(&error))?;
        Ok(members.iter().any(|member| member.node() == Some(id)))
    }

    /// Gives a node its key, after the join is recorded.
    async fn admitted(
        &self,
        id: NodeId,
        join: &Join,
    ) -> Result<join_node_response::Answer, Status> {
        let decide = || self.decide_admission(id, join);
        let admitted = self.core.write_with_retry(decide).await;
        let unlock_key = match admitted {
            Ok((unlock_key, _)) => unlock_key,
            // The node may be the etcd member that has to make space. Without its key it never
            // could, and nothing would be written any more.
            Err(full) if full.code() == Code::ResourceExhausted => {
                tracing::warn!(node = %id, "admitting a boot that cannot be recorded");
                self.decide_admission(id, join).await?.0
            }
            Err(status) => return Err(status),
        };
        let cluster = self.core.cluster()?.content;
        tracing::info!(node = %id, address = %join.address, boot = join.boot_id, "node joined");
        Ok(join_node_response::Answer::Admitted(
            join_node_response::Admitted {
                cluster_unlock_key: unlock_key.expose().to_vec(),
                directory: Some(self.core.cache.directory()),
                cold_start_policy: cluster.configuration.cold_start_policy,
                recovery_recipient: RecoveryRecipient::to_field(cluster.recovery_recipient),
                owner_public_key: cluster.owner.as_bytes().to_vec(),
                owner_replacements: cluster.owner_replacements,
            },
        ))
    }

    /// The node's unlock key, and the write that records the join.
    async fn decide_admission(
        &self,
        id: NodeId,
        join: &Join,
    ) -> Result<(ClusterUnlockKey, Option<Write>), Status> {
        let found = self.core.find(id).await?;
        let found = found.filter(|found| found.full.content.node.join_key == join.join_key);
        let unlock_key = found
            .as_ref()
            .and_then(|found| found.full.content.unlock_key.clone());
        // The record has changed since the decision: the caller learns the outcome by a retry.
        let (Some(found), Some(unlock_key)) = (found, unlock_key) else {
            let changed = format!("{id} has changed concurrently: retry");
            return Err(Status::unavailable(changed));
        };
        let boots = self.boots(id).await?;
        let silence = self.core.timing.heartbeat_bound;
        let now = tls::unix_seconds(&self.core.clock);
        let write = join::admit(join, &found, &boots, silence, now)?;
        Ok((unlock_key, write))
    }

    /// What is recorded of the node's boots, straight from etcd.
    async fn boots(&self, id: NodeId) -> Result<Boots, Status> {
        let keys = [
            state::liveness_key(id),
            state::joins_key(id),
            state::endorsement_key(id),
        ];
        let all = self
            .core
            .client
            .get_all(keys.each_ref().map(String::as_str));
        let all = all.await;
        let [liveness, joins, endorsement] = all.map_err(|error| unavailable(&error))?;
        Ok(Boots {
            liveness: versioned(liveness, LivenessRecord::decode)?,
            joins: versioned(joins, state::decode_joins)?,
            endorsement: versioned(endorsement, Endorsement::decode)?,
        })
    }

    pub(super) async fn issue_certificate(
        &self,
        request: Request<IssueCertificateRequest>,
    ) -> Result<IssueCertificateResponse, Status> {
        let caller = Caller::of(&request)?;
        let (id, key) = (caller.node()?, caller.public_key()?);
        self.core.budgets.certificate(id)?;
        let _place = self.turn().await?;
        match request.into_inner().kind {
            Some(Kind::EtcdPeer(_)) => self.issue_peer(id, key).await,
            Some(Kind::KubernetesWorker(wanted)) => {
                kubernetes::worker_certificate(&self.core, id, key, wanted).await
            }
            None => Err(unspecified("kind").into()),
        }
    }

    pub(super) async fn renew_certificates(
        &self,
        request: Request<RenewCertificatesRequest>,
    ) -> Result<RenewCertificatesResponse, Status> {
        let caller = Caller::of(&request)?;
        let key = caller.public_key()?;
        let id = match caller.peer().identity() {
            Some(identity) => identity.node_id().ok_or_else(|| {
                let subject = &identity.subject;
                Status::failed_precondition(format!("{subject} is no node: only nodes call this"))
            })?,
            None => registration::id_of(&key),
        };
        let p256 = p256_key(&request.get_ref().p256_public_key)?;
        // The caller may have no certificate, so nothing has checked yet that it is a member.
        if self.core.cache.node(id).is_none() {
            self.core.reads.linearizable().await?;
        }
        let node = Identity::node(self.core.loaded_cluster().await?.content.id, id);
        let admits = self.core.cache.admits(&node, &key);
        admits.map_err(|refused| Status::unauthenticated(refused.to_string()))?;
        self.core.budgets.certificate(id)?;
        let admission = self.attestation.admit(&key, request.into_inner().proof)?;
        let _place = self.turn().await?;
        if let Some(admission) = &admission {
            let known = self.boots(id).await?.endorsement;
            admission::is_own(id, admission, known.as_ref().map(|known| &known.content))?;
        }
        let leaves = leaves::of_node(&self.core, id, key, p256).await?;
        tracing::info!(node = %id, "renewed certificates");
        Ok(RenewCertificatesResponse {
            certificate: leaves.certificate.to_vec(),
            p256_certificate: leaves.p256.map(|leaf| leaf.to_vec()).unwrap_or_default(),
        })
    }

    async fn issue_peer(
        &self,
        id: NodeId,
        key: PublicKey,
    ) -> Result<IssueCertificateResponse, Status> {
        self.core.reads.linearizable().await?;
        let cache = &self.core.cache;
        let is_member = cache
            .node(id)
            .is_some_and(|(node, _)| node.roles.consensus_member.is_some());
        let is_added = || {
            let wanted = cache.intent(id).map(|intent| intent.content.wanted);
            matches!(wanted, Some(Wanted::Join { member: Some(_) }))
        };
        if !is_member && !is_added() {
            return Err(Rejection::NoMember(id).into());
        }
        let authority = authorities::etcd(&self.core).await?;
        let certificate = authority
            .issue_peer(id, key)
            .map_err(|error| authorities::cannot(&error))?;
        tracing::info!(node = %id, "issued etcd peer certificate");
        Ok(IssueCertificateResponse {
            certificate: certificate.to_vec(),
            ca_certificate: authority.certificate().to_vec(),
        })
    }
}

/// The key of a caller without a certificate of this cluster.
fn stranger(caller: &Caller) -> Result<PublicKey, Status> {
    if let PeerCertificate::Identified { identity, .. } = caller.peer() {
        return Err(Status::failed_precondition(format!(
            "{} has a certificate of this cluster: connect with a certificate that is self-signed \
             with its Ed25519 key",
            identity.subject
        )));
    }
    caller.public_key()
}

fn busy() -> Status {
    Status::unavailable("too many concurrent calls: retry")
}

fn check_registration(
    node_key: PublicKey,
    request: RegisterNodeRequest,
) -> Result<Registration, Status> {
    let field = |wanted: &'static str| {
        move |found: String| Rejection::Field {
            field: "join_key",
            wanted,
            found,
        }
    };
    let join_key = PublicKey::try_from(&request.join_key[..])
        .map_err(|error| field("an Ed25519 public key of 32 bytes")(error.to_string()))?;
    proofs::check_join_key(&node_key, &join_key, &request.join_key_proof)
        .map_err(|error| Status::invalid_argument(error.to_string()))?;
    if join_key == node_key {
        return Err(field("a key other than the node's")("the node's key".into()).into());
    }
    let labels = labels::parse("labels", request.labels)
        .map_err(|error| Rejection::Invalid(error.to_string()))?;
    Ok(Registration {
        node_key,
        join_key,
        tpm_is_present: request.tpm_is_present,
        labels,
        admission: None,
    })
}

fn check_join(
    join_key: PublicKey,
    address: IpAddr,
    request: JoinNodeRequest,
) -> Result<Join, Status> {
    let tpm_usage = known("tpm_usage", request.tpm_usage(), request.tpm_usage)?;
    if tpm_usage == TpmUsage::Unspecified {
        return Err(unspecified("tpm_usage").into());
    }
    check_boot_id(&request.boot_id)?;
    Ok(Join {
        join_key,
        tpm_usage,
        boot_id: request.boot_id,
        address,
        admission: None,
    })
}

fn check_commit(node_key: PublicKey, mut request: CommitNodeRequest) -> Result<Commit, Status> {
    let storage_security = request.storage_security();
    let storage_security = known(
        "storage_security",
        storage_security,
        request.storage_security,
    )?;
    let secret = Zeroizing::new(std::mem::take(&mut request.cluster_unlock_key));
    let unlock_key = ClusterUnlockKey::try_from(&secret[..]).map_err(|error| Rejection::Field {
        field: "cluster_unlock_key",
        wanted: "32 bytes",
        found: error.found.to_string(),
    })?;
    if storage_security == StorageSecurity::Unspecified {
        return Err(unspecified("storage_security").into());
    }
    Ok(Commit {
        node_key,
        unlock_key,
        storage_security,
    })
}
