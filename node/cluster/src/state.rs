//! The cluster's records in etcd: keys, encoding and validation.
//!
//! | key | record | written |
//! |---|---|---|
//! | `cluster` | [`ClusterRecord`] | at bootstrap, and when it is configured |
//! | `pki/cluster`, `pki/etcd` | an authority with its key | at bootstrap |
//! | `nodes/ID` | [`NodeRecord`] | when a node's state, roles or labels change |
//! | `join_keys/HEX` | the ID of the node with this join key | with the node |
//! | `tombstones/ID` | [`Tombstone`] | when a node is deleted |
//! | `register_ticket` | a `Ticket` | when it is first requested, or rotated |
//! | `membership/ID` | [`Intent`] | while a change of etcd's members is pending |
//! | `departure` | the ID of the node last authorized to leave etcd | when a voter is to leave |
//! | `replaced` | the ID of the node whose damaged member was last replaced | then, with a lease |
//! | `status/ID` | `NodeStatus` | when it changes |
//! | `liveness/ID` | [`LivenessRecord`] | when heartbeats start or stop |
//! | `joins/ID` | the last `NodeJoin`s | when a boot of the node is admitted |
//! | `images/HEX` | a `TrustedImage`, by its value of PCR 11 | when an operator trusts or revokes it |
//! | `endorsements/ID` | [`Endorsement`] | when a node first proves what it has booted |
//! | `networking/ranges/RANGE` | the ID of the node with this pod range | at its first request |
//! | `networking/keys/HEX` | the ID of the node with this mesh key | with the node |
//! | `election/LEASE` | the ID of a curator that is a candidate | at its start |
//!
//! Every record has a version. A record of a newer version is a separate error
//! ([`RecordError::TooNew`]): a curator must not act on a record that it understands only partly.
//! Decoding validates a record, so that other code never gets a node without a key, for example.

mod admission;
mod full;

use hearth_api::identity::{ClusterId, FirstContactSecret, MeshKey, NodeId, PublicKey, Ticket};
use hearth_api::private::{
    StoredCandidate, StoredCluster, StoredIntent, StoredJoins, StoredLiveness, StoredNode,
    StoredStatus, StoredTicket, StoredTombstone,
};
use hearth_api::proofs::AfterRemoval;
use hearth_api::recovery::{RecoveryRecipient, UnlockSettings};
use hearth_api::settings;
use hearth_api::v1::membership_change::Kind;
use hearth_api::v1::{
    AdmissionPolicy, ClusterConfiguration, ColdStartPolicy, Label, NodeJoin, NodeRoles,
    NodeSetting, NodeState, NodeStatus, OwnerReplacement, StorageSecurity, TpmUsage,
};
use hearth_tpm::Digest;
use prost::Message;
use zeroize::{Zeroize as _, Zeroizing};

pub use admission::{Endorsement, Trusted};
pub use full::{FullCluster, FullRecord};

use hearth_host::networking::{Networking, PodRange};

/// The version of every record that this image writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// Key of the cluster's record.
pub const CLUSTER: &str = "cluster";
/// Key of the authority that signs certificates of nodes and users.
pub const CLUSTER_AUTHORITY: &str = "pki/cluster";
/// Key of the authority that signs certificates of etcd members.
pub const ETCD_AUTHORITY: &str = "pki/etcd";

/// Key of the register ticket.
pub const REGISTER_TICKET: &str = "register_ticket";
/// Prefix of the keys of [`intent_key`].
pub const MEMBERSHIP: &str = "membership/";
/// Key that names the last node that was authorized to leave etcd. Each authorization is written
/// on the condition that this key has not changed since the check.
pub const DEPARTURE: &str = "departure";
/// Key that names the last node whose damaged member the cluster has replaced by itself. It is attached to a lease: while
/// it exists, no other one is replaced.
pub const REPLACED: &str = "replaced";
/// Prefix of the keys of [`candidate_key`].
pub const ELECTION: &str = "election/";

/// Prefix of the keys of [`pod_range_key`] and of [`mesh_key_key`].
const NETWORKING: &str = "networking/";
const POD_RANGES: &str = "networking/ranges/";
const MESH_KEYS: &str = "networking/keys/";
const NODES: &str = "nodes/";
const STATUS: &str = "status/";
/// Prefix of the keys of [`liveness_key`].
pub const LIVENESS: &str = "liveness/";
const JOINS: &str = "joins/";
const IMAGES: &str = "images/";
const ENDORSEMENTS: &str = "endorsements/";
const TOMBSTONES: &str = "tombstones/";
const JOIN_KEYS: &str = "join_keys/";

/// Key of a node's record.
pub fn node_key(id: NodeId) -> String {
    format!("{NODES}{id}")
}

/// Key of a node's status.
pub fn status_key(id: NodeId) -> String {
    format!("{STATUS}{id}")
}

/// Key of a node's liveness record.
pub fn liveness_key(id: NodeId) -> String {
    format!("{LIVENESS}{id}")
}

/// Key of a node's last joins.
pub fn joins_key(id: NodeId) -> String {
    format!("{JOINS}{id}")
}

/// Key of a trusted image, by its value of PCR 11.
pub fn image_key(parts: &Digest) -> String {
    format!("{IMAGES}{parts}")
}

/// Key of what is known of a node's TPM.
pub fn endorsement_key(id: NodeId) -> String {
    format!("{ENDORSEMENTS}{id}")
}

/// Key that contains the ID of the node with this join key.
pub fn join_key_key(key: &PublicKey) -> String {
    format!("{JOIN_KEYS}{key}")
}

/// Key that contains the ID of the node with this pod range.
pub fn pod_range_key(range: PodRange) -> String {
    format!("{POD_RANGES}{range}")
}

/// Key that contains the ID of the node with this mesh key.
pub fn mesh_key_key(key: &MeshKey) -> String {
    format!("{MESH_KEYS}{key}")
}

/// Key of the tombstone of a deleted node.
pub fn tombstone_key(id: NodeId) -> String {
    format!("{TOMBSTONES}{id}")
}

/// Key of the intent that a node join or leave etcd.
pub fn intent_key(id: NodeId) -> String {
    format!("{MEMBERSHIP}{id}")
}

/// Key of the candidacy of a curator with this lease.
pub fn candidate_key(lease: i64) -> String {
    format!("{ELECTION}{lease:016x}")
}

/// Prefixes of all keys that the cache follows. Neither the authorities nor the endorsements are among them: they are read
/// for one call, and not kept in memory.
pub const FOLLOWED: [&str; 12] = [
    CLUSTER,
    NODES,
    JOIN_KEYS,
    NETWORKING,
    TOMBSTONES,
    REGISTER_TICKET,
    MEMBERSHIP,
    STATUS,
    LIVENESS,
    JOINS,
    IMAGES,
    ELECTION,
];

/// A parsed key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// See [`CLUSTER`].
    Cluster,
    /// See [`node_key`].
    Node(NodeId),
    /// See [`status_key`].
    Status(NodeId),
    /// See [`liveness_key`].
    Liveness(NodeId),
    /// See [`joins_key`].
    Joins(NodeId),
    /// See [`image_key`].
    Image(Digest),
    /// See [`candidate_key`].
    Candidate,
    /// See [`tombstone_key`].
    Tombstone(NodeId),
    /// See [`intent_key`].
    Intent(NodeId),
    /// See [`join_key_key`].
    JoinKey(PublicKey),
    /// See [`pod_range_key`].
    PodRange(PodRange),
    /// See [`mesh_key_key`].
    MeshKey(MeshKey),
    /// See [`REGISTER_TICKET`].
    RegisterTicket,
    /// A key that the cache does not follow.
    Other,
}

impl Key {
    /// Parses a key relative to the curators' namespace.
    pub fn parse(key: &str) -> Self {
        let of_node = |prefix, kind: fn(NodeId) -> Self| {
            let id = key.strip_prefix(prefix)?.parse().ok()?;
            Some(kind(id))
        };
        if key == CLUSTER {
            return Self::Cluster;
        }
        if key.starts_with(ELECTION) {
            return Self::Candidate;
        }
        if key == REGISTER_TICKET {
            return Self::RegisterTicket;
        }
        let join_key = || {
            let bytes = hex::decode(key.strip_prefix(JOIN_KEYS)?).ok()?;
            Some(Self::JoinKey(PublicKey::try_from(&bytes[..]).ok()?))
        };
        let image = || Some(Self::Image(Digest::from_hex(key.strip_prefix(IMAGES)?)?));
        let pod_range = || Some(Self::PodRange(key.strip_prefix(POD_RANGES)?.parse().ok()?));
        let mesh_key = || {
            let bytes = hex::decode(key.strip_prefix(MESH_KEYS)?).ok()?;
            Some(Self::MeshKey(MeshKey::try_from(&bytes[..]).ok()?))
        };
        of_node(NODES, Self::Node)
            .or_else(join_key)
            .or_else(image)
            .or_else(pod_range)
            .or_else(mesh_key)
            .or_else(|| of_node(TOMBSTONES, Self::Tombstone))
            .or_else(|| of_node(MEMBERSHIP, Self::Intent))
            .or_else(|| of_node(STATUS, Self::Status))
            .or_else(|| of_node(LIVENESS, Self::Liveness))
            .or_else(|| of_node(JOINS, Self::Joins))
            .unwrap_or(Self::Other)
    }
}

/// Why a record cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// A newer image has written it.
    #[error(
        "record {key}: version: expected at most {VERSION}, got {found}: update this node's image"
    )]
    TooNew {
        /// The record's key.
        key: String,
        /// The record's version.
        found: u32,
    },
    /// A field has a value that this image does not know.
    #[error("record {key}: {field}: expected {wanted}, got {found}")]
    Field {
        /// The record's key.
        key: String,
        /// The field's name.
        field: &'static str,
        /// The valid values.
        wanted: &'static str,
        /// The actual value.
        found: i32,
    },
    /// The record is invalid.
    #[error("record {key}: {why}")]
    Malformed {
        /// The record's key.
        key: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Decodes a record and checks its version.
fn decode<M: Message + Default>(
    key: &str,
    bytes: &[u8],
    version: fn(&M) -> u32,
) -> Result<M, RecordError> {
    let message = M::decode(bytes).map_err(|error| malformed(key)(error.to_string()))?;
    match version(&message) {
        0 => Err(malformed(key)("version is missing".into())),
        1..=VERSION => Ok(message),
        found => Err(RecordError::TooNew {
            key: key.to_owned(),
            found,
        }),
    }
}

fn malformed(key: &str) -> impl Fn(String) -> RecordError {
    let key = key.to_owned();
    move |why| RecordError::Malformed {
        key: key.clone(),
        why,
    }
}

/// Checks a node's state. Protobuf would read an unknown state as unspecified, which is not a
/// state of a node.
fn node_state(key: &str, stored: i32) -> Result<NodeState, RecordError> {
    match NodeState::try_from(stored) {
        Ok(NodeState::Unspecified) | Err(_) => Err(RecordError::Field {
            key: key.to_owned(),
            field: "state",
            wanted: "1 (NEW), 2 (STANDBY), 3 (UP) or 4 (DECOMMISSIONED)",
            found: stored,
        }),
        Ok(state) => Ok(state),
    }
}

/// A node's record, without its secrets.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeRecord {
    /// The node's ID.
    pub id: NodeId,
    /// Its identity key.
    pub public_key: PublicKey,
    /// The key with which it joins after a boot.
    pub join_key: PublicKey,
    /// Its state: NEW, STANDBY, UP or DECOMMISSIONED.
    pub state: NodeState,
    /// The roles that it has to run.
    pub roles: NodeRoles,
    /// Its labels, by operators.
    pub labels: Vec<Label>,
    /// Its settings, by operators.
    pub settings: Vec<NodeSetting>,
    /// How it uses its TPM.
    pub tpm_usage: TpmUsage,
    /// How it protects its data partition.
    pub storage_security: StorageSecurity,
    /// An operator is decommissioning it.
    pub decommissioning: bool,
    /// Its mesh key and pod range, once it has requested them.
    pub networking: Option<Networking>,
}

impl NodeRecord {
    /// Decodes and validates a stored record. Its secrets are wiped.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let mut stored: StoredNode = decode(key, bytes, |m: &StoredNode| m.version)?;
        stored.cluster_unlock_key.zeroize();
        Self::from_stored(key, stored)
    }

    /// Takes everything but the secrets.
    fn from_stored(key: &str, stored: StoredNode) -> Result<Self, RecordError> {
        let wrong = malformed(key);
        let id: NodeId = stored.id.parse().map_err(|e| wrong(format!("{e}")))?;
        if node_key(id) != key {
            return Err(wrong(format!("id: expected that of the key, got {id}")));
        }
        let networking = stored.networking.as_ref().map(Networking::try_from);
        let networking = networking.transpose().map_err(|e| wrong(e.to_string()))?;
        let state = node_state(key, stored.state)?;
        let key = |name: &str, bytes: &[u8]| {
            PublicKey::try_from(bytes).map_err(|e| wrong(format!("{name}: {e}")))
        };
        Ok(Self {
            id,
            public_key: key("public key", &stored.public_key)?,
            join_key: key("join key", &stored.join_key)?,
            state,
            tpm_usage: stored.tpm_usage(),
            storage_security: stored.storage_security(),
            roles: stored.roles.unwrap_or_default(),
            labels: stored.labels,
            settings: stored.settings,
            decommissioning: stored.decommissioning,
            networking,
        })
    }
}

/// What is kept of a deleted node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The node's ID.
    pub id: NodeId,
    /// Its identity key.
    pub public_key: PublicKey,
    /// The key with which it joins after a boot.
    pub join_key: PublicKey,
    /// What its machine is ordered to do.
    pub afterwards: AfterRemoval,
}

impl Tombstone {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let stored: StoredTombstone = decode(key, bytes, |m: &StoredTombstone| m.version)?;
        let wrong = malformed(key);
        let key = |name: &str, bytes: &[u8]| {
            PublicKey::try_from(bytes).map_err(|e| wrong(format!("{name}: {e}")))
        };
        Ok(Self {
            id: stored.id.parse().map_err(|e| wrong(format!("{e}")))?,
            public_key: key("public key", &stored.public_key)?,
            join_key: key("join key", &stored.join_key)?,
            afterwards: AfterRemoval::of(stored.reset),
        })
    }

    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        StoredTombstone {
            version: VERSION,
            id: self.id.to_string(),
            public_key: self.public_key.as_bytes().to_vec(),
            join_key: self.join_key.as_bytes().to_vec(),
            reset: self.afterwards.is_reset(),
        }
        .encode_to_vec()
    }
}

/// A requested change of etcd's members that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intent {
    /// The node.
    pub node: NodeId,
    /// Join or leave.
    pub wanted: Wanted,
    /// The number of failed attempts to add it.
    pub attempts: u32,
    /// The ID of its damaged member, which is removed before it joins.
    pub replaces: Option<u64>,
}

/// The requested etcd membership of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Become a voter.
    Join {
        /// The ID of the learner that was added for it.
        member: Option<u64>,
    },
    /// Leave etcd.
    Leave {
        /// Decommission the node after that.
        decommission: bool,
    },
}

impl Intent {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let stored: StoredIntent = decode(key, bytes, |m: &StoredIntent| m.version)?;
        let wrong = malformed(key);
        let node: NodeId = stored.node_id.parse().map_err(|e| wrong(format!("{e}")))?;
        if intent_key(node) != key {
            return Err(wrong(format!(
                "node_id: expected that of the key, got {node}"
            )));
        }
        let wanted = match stored.kind() {
            Kind::Join => Wanted::Join {
                member: Some(stored.member_id).filter(|id| *id != 0),
            },
            Kind::Leave => Wanted::Leave {
                decommission: stored.decommission,
            },
            Kind::Unspecified | Kind::Replace => {
                return Err(wrong("kind: expected JOIN or LEAVE".into()));
            }
        };
        Ok(Self {
            node,
            wanted,
            attempts: stored.attempts,
            replaces: Some(stored.replaces).filter(|id| *id != 0),
        })
    }

    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, member_id, decommission) = match self.wanted {
            Wanted::Join { member } => (Kind::Join, member.unwrap_or_default(), false),
            Wanted::Leave { decommission } => (Kind::Leave, 0, decommission),
        };
        StoredIntent {
            version: VERSION,
            node_id: self.node.to_string(),
            kind: kind.into(),
            member_id,
            decommission,
            attempts: self.attempts,
            replaces: self.replaces.unwrap_or_default(),
        }
        .encode_to_vec()
    }
}

/// The record of the cluster.
#[derive(Clone)]
pub struct ClusterRecord {
    /// The cluster's ID.
    pub id: ClusterId,
    /// The cluster's configuration; settings that were never set have their defaults. Cold-start
    /// and admission policy are never unspecified.
    pub configuration: ClusterConfiguration,
    /// The owner's public key.
    pub owner: PublicKey,
    /// The secret that proves the CA certificate to the owner.
    pub first_contact_secret: FirstContactSecret,
    /// To which nodes wrap their cluster unlock keys.
    pub recovery_recipient: Option<RecoveryRecipient>,
    /// All replacements of the owner so far, in order.
    pub owner_replacements: Vec<OwnerReplacement>,
}

impl ClusterRecord {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let mut stored: StoredCluster = decode(key, bytes, |m: &StoredCluster| m.version)?;
        let wrong = malformed(key);
        let secret = FirstContactSecret::try_from(&stored.first_contact_secret[..]);
        stored.first_contact_secret.zeroize();
        Ok(Self {
            id: ClusterId::try_from(&stored.cluster_id[..]).map_err(|e| wrong(e.to_string()))?,
            configuration: definite(stored.configuration.unwrap_or_default()),
            recovery_recipient: RecoveryRecipient::from_field(&stored.recovery_recipient)
                .map_err(|e| wrong(format!("recovery {e}")))?,
            owner: PublicKey::try_from(&stored.owner_public_key[..])
                .map_err(|e| wrong(format!("owner: {e}")))?,
            first_contact_secret: secret.map_err(|e| wrong(e.to_string()))?,
            owner_replacements: stored.owner_replacements,
        })
    }
}

impl ClusterRecord {
    /// The settings that nodes record with their keys.
    pub fn unlock_settings(&self) -> UnlockSettings {
        UnlockSettings {
            cold_start_policy: self.configuration.cold_start_policy(),
            recovery_recipient: self.recovery_recipient,
            owner: Some(self.owner),
        }
    }
}

/// Fills in defaults. Records without a cold-start policy are of releases in which that meant NONE, and those without an
/// admission policy of releases that asked for no proof.
pub fn definite(configuration: ClusterConfiguration) -> ClusterConfiguration {
    let mut configuration = settings::with_defaults(configuration);
    if configuration.cold_start_policy == 0 {
        configuration.set_cold_start_policy(ColdStartPolicy::None);
    }
    if configuration.admission_policy == 0 {
        configuration.set_admission_policy(AdmissionPolicy::Any);
    }
    configuration
}

/// Decodes a stored register ticket and wipes the decoded message.
pub fn decode_ticket(key: &str, bytes: &[u8]) -> Result<Ticket, RecordError> {
    let mut stored: StoredTicket = decode(key, bytes, |m: &StoredTicket| m.version)?;
    let ticket = Ticket::try_from(&stored.ticket[..]);
    stored.ticket.zeroize();
    ticket.map_err(|e| malformed(key)(e.to_string()))
}

/// Encodes a register ticket.
pub fn encode_ticket(ticket: &Ticket) -> Zeroizing<Vec<u8>> {
    let mut stored = StoredTicket {
        version: VERSION,
        ticket: ticket.expose().to_vec(),
    };
    let bytes = Zeroizing::new(stored.encode_to_vec());
    stored.ticket.zeroize();
    bytes
}

/// Decodes the node ID stored at [`join_key_key`], [`pod_range_key`] or [`mesh_key_key`].
pub fn decode_owner(key: &str, bytes: &[u8]) -> Result<NodeId, RecordError> {
    let wrong = malformed(key);
    let id = std::str::from_utf8(bytes).map_err(|e| wrong(e.to_string()))?;
    id.parse().map_err(|e| wrong(format!("{e}")))
}

/// Decodes a node's status.
pub fn decode_status(key: &str, bytes: &[u8]) -> Result<NodeStatus, RecordError> {
    let stored: StoredStatus = decode(key, bytes, |m: &StoredStatus| m.version)?;
    Ok(stored.status.unwrap_or_default())
}

/// Encodes a node's status.
pub fn encode_status(status: NodeStatus) -> Vec<u8> {
    StoredStatus {
        version: VERSION,
        status: Some(status),
    }
    .encode_to_vec()
}

/// Which curator receives a node's heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessRecord {
    /// The curator on this node; the record is attached to that curator's lease.
    HeardBy(NodeId),
    /// None: the heartbeats stopped, and the last curator has declared the node lost.
    GivenUp,
    /// None: the node has announced that it shuts down or reboots.
    Ended,
}

impl LivenessRecord {
    /// Decodes and validates a stored record. Also returns the boot ID of the node.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<(Self, String), RecordError> {
        let stored: StoredLiveness = decode(key, bytes, |m: &StoredLiveness| m.version)?;
        if stored.curator_id.is_empty() {
            let record = match stored.ended {
                true => Self::Ended,
                false => Self::GivenUp,
            };
            return Ok((record, stored.boot_id));
        }
        let curator = stored.curator_id.parse();
        let curator = curator.map_err(|e| malformed(key)(format!("{e}")))?;
        Ok((Self::HeardBy(curator), stored.boot_id))
    }

    /// Encodes the record; `boot_id` is that of the node.
    pub fn encode(self, boot_id: &str) -> Vec<u8> {
        StoredLiveness {
            version: VERSION,
            curator_id: match self {
                Self::HeardBy(curator) => curator.to_string(),
                Self::GivenUp | Self::Ended => String::new(),
            },
            boot_id: boot_id.to_owned(),
            ended: self == Self::Ended,
        }
        .encode_to_vec()
    }
}

/// Decodes the last joins of a node, the latest first.
pub fn decode_joins(key: &str, bytes: &[u8]) -> Result<Vec<NodeJoin>, RecordError> {
    let stored: StoredJoins = decode(key, bytes, |m: &StoredJoins| m.version)?;
    Ok(stored.joins)
}

/// Encodes the last joins of a node, the latest first.
pub fn encode_joins(joins: Vec<NodeJoin>) -> Vec<u8> {
    StoredJoins {
        version: VERSION,
        joins,
    }
    .encode_to_vec()
}

/// Decodes a stored candidate.
pub fn decode_candidate(key: &str, bytes: &[u8]) -> Result<NodeId, RecordError> {
    let stored: StoredCandidate = decode(key, bytes, |m: &StoredCandidate| m.version)?;
    let id = stored.curator_id.parse();
    id.map_err(|e| malformed(key)(format!("{e}")))
}

/// Encodes a candidate.
pub fn encode_candidate(curator: NodeId) -> Vec<u8> {
    StoredCandidate {
        version: VERSION,
        curator_id: curator.to_string(),
    }
    .encode_to_vec()
}

#[cfg(test)]
mod stored_forms;

#[cfg(test)]
mod tests;
