//! Clusters and nodes as they are printed: tables and JSON.
//!
//! The JSON is an interface: fields are added, never renamed or removed. It is documented in
//! `docs/hearthctl.md`.

use std::collections::BTreeMap;

use hearth_api::client::Endpoint;
use hearth_api::identity::ClusterId;
use hearth_api::v1::{self, ClusterState, NodeHealth, NodeState};
use serde::Serialize;

mod clock;
mod consensus;
mod context;
mod disk;
mod firewall;
mod image;
mod kubernetes;
mod log;
mod network;
mod ownership;
mod parameters;
mod secrets_keys;
mod settings;
mod unlocking;

use clock::Clock;
pub(crate) use consensus::Consensus;
pub(crate) use context::{ListedContext, context_table};
pub(crate) use disk::WrittenDisk;
pub(crate) use firewall::Firewall;
pub(crate) use image::{Image, image_table};
pub(crate) use kubernetes::KubernetesStatus;
pub(crate) use log::{LogLine, rfc3339};
pub(crate) use network::NodeNetwork;
use ownership::Recorded;
pub(crate) use ownership::{Replaced, follows};
pub(crate) use parameters::CheckedParameters;
pub(crate) use secrets_keys::SecretsKeys;
use settings::Configuration;
pub(crate) use settings::Settings;
pub(crate) use unlocking::{Answers, Unlocking};

use crate::context::to_pem;
pub(crate) use crate::table::printable as safe;
use crate::table::{Table, printable};

/// A node.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Node {
    id: String,
    public_key: String,
    state: String,
    health: String,
    health_reason: String,
    /// The cluster state that the node last reported.
    cluster_state: Option<String>,
    roles: Vec<&'static str>,
    external_address: Option<String>,
    /// Of the other address family.
    second_address: Option<String>,
    curator_port: Option<u32>,
    version: Option<String>,
    boot_id: Option<String>,
    labels: BTreeMap<String, String>,
    settings: BTreeMap<String, String>,
    storage_security: String,
    tpm_usage: String,
    heartbeat_age_ms: Option<u64>,
    /// Conditions of the roles that a node can be assigned without being able to run them, as the
    /// node reports them.
    conditions: Vec<Condition>,
    /// The node is being decommissioned.
    decommissioning: bool,
    joins: Vec<Join>,
    /// Null if the node has not reported it yet.
    recorded_settings: Option<Recorded>,
    /// Null if the node has not reported it yet.
    time: Option<Clock>,
    /// Null if the node has not reported it yet.
    storage: Option<Storage>,
}

/// How the data partition is encrypted, as the node's kernel says.
#[derive(Clone, Debug, Serialize)]
struct Storage {
    security: String,
    /// Empty if it is not encrypted.
    cipher: String,
}

impl From<&v1::StorageStatus> for Storage {
    fn from(storage: &v1::StorageStatus) -> Self {
        Self {
            security: word(
                storage.security,
                v1::StorageSecurity::as_str_name,
                "STORAGE_SECURITY_",
            ),
            cipher: storage.cipher.clone(),
        }
    }
}

impl Storage {
    fn text(&self) -> String {
        format!("{} {}", self.security, self.cipher)
    }
}

/// A boot of a node that its cluster has admitted.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Join {
    /// Unix time in seconds.
    time: i64,
    address: String,
    boot_id: String,
    /// The image that it has proven to have booted; null if nothing was asked.
    image: Option<String>,
}

/// A condition of a node: whether it is met, and why not.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Condition {
    r#type: String,
    met: bool,
    /// One word; may be empty when met.
    reason: String,
    message: String,
}

impl From<&v1::NodeCondition> for Condition {
    fn from(condition: &v1::NodeCondition) -> Self {
        Self {
            r#type: condition.r#type.clone(),
            met: condition.met,
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        }
    }
}

impl Condition {
    /// One line of text.
    pub(crate) fn text(&self) -> String {
        match (self.met, &self.message[..]) {
            (true, "") => format!("{}: met", self.r#type),
            (true, message) => format!("{}: met: {message}", self.r#type),
            (false, "") => format!("{}: {}", self.r#type, self.reason),
            (false, message) => format!("{}: {}: {message}", self.r#type, self.reason),
        }
    }
}

/// A node after a change.
#[derive(Debug, Serialize)]
pub(crate) struct Changed<'a> {
    /// The node with the change.
    pub node: &'a Node,
    /// The change is not complete: an etcd membership change is in progress.
    pub pending: bool,
}

/// Output of `cluster ticket`.
#[derive(Debug, Serialize)]
pub(crate) struct Ticket {
    /// 64 hexadecimal digits.
    pub register_ticket: String,
}

/// The name of an enum value without its prefix (`UP` for `NODE_STATE_UP`). A value that this
/// version does not know is printed as a number.
fn word<E>(number: i32, name: fn(&E) -> &'static str, prefix: &str) -> String
where
    E: TryFrom<i32>,
{
    match E::try_from(number) {
        Ok(value) => {
            let name = name(&value);
            name.strip_prefix(prefix).unwrap_or(name).to_owned()
        }
        Err(_) => number.to_string(),
    }
}

fn present(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn roles(roles: Option<&v1::NodeRoles>) -> Vec<&'static str> {
    let Some(roles) = roles else {
        return Vec::new();
    };
    [
        ("consensus-member", roles.consensus_member.is_some()),
        (
            "kubernetes-controller",
            roles.kubernetes_controller.is_some(),
        ),
        ("kubernetes-worker", roles.kubernetes_worker.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, held)| held.then_some(name))
    .collect()
}

impl From<&v1::Node> for Node {
    fn from(node: &v1::Node) -> Self {
        let status = node.status.as_ref();
        Self {
            id: node.id.clone(),
            public_key: hex::encode(&node.public_key),
            state: word(node.state, NodeState::as_str_name, "NODE_STATE_"),
            health: word(node.health, NodeHealth::as_str_name, "NODE_HEALTH_"),
            health_reason: node.health_reason.clone(),
            cluster_state: status
                .map(|s| word(s.cluster_state, ClusterState::as_str_name, "CLUSTER_STATE_")),
            roles: roles(node.roles.as_ref()),
            external_address: status.and_then(|s| present(&s.external_address)),
            second_address: status.and_then(|s| present(&s.second_address)),
            curator_port: status.map(|s| s.curator_port).filter(|port| *port != 0),
            version: status.and_then(|s| present(&s.version)),
            boot_id: status.and_then(|s| present(&s.boot_id)),
            labels: node
                .labels
                .iter()
                .map(|label| (label.key.clone(), label.value.clone()))
                .collect(),
            settings: node
                .settings
                .iter()
                .map(|setting| (setting.name.clone(), setting.value.clone()))
                .collect(),
            storage_security: word(
                node.storage_security,
                v1::StorageSecurity::as_str_name,
                "STORAGE_SECURITY_",
            ),
            tpm_usage: word(node.tpm_usage, v1::TpmUsage::as_str_name, "TPM_USAGE_"),
            heartbeat_age_ms: node.heartbeat_age_ms,
            conditions: status
                .map(|status| status.conditions.iter().map(Condition::from).collect())
                .unwrap_or_default(),
            decommissioning: node.decommissioning,
            joins: node.joins.iter().map(Join::from).collect(),
            recorded_settings: status
                .and_then(|status| status.recorded_settings.as_ref())
                .map(Recorded::from),
            storage: status
                .and_then(|status| status.storage.as_ref())
                .map(Storage::from),
            time: status
                .and_then(|status| status.time.as_ref())
                .map(Clock::from),
        }
    }
}

impl From<&v1::NodeJoin> for Join {
    fn from(join: &v1::NodeJoin) -> Self {
        Self {
            time: join.time,
            address: join.address.clone(),
            boot_id: join.boot_id.clone(),
            image: (!join.image.is_empty()).then(|| hex::encode(&join.image)),
        }
    }
}

impl Join {
    /// One line of text.
    fn text(&self) -> String {
        let image = self.image.iter().map(|image| format!(", image {image}"));
        format!(
            "{} from {}, boot {}{}",
            rfc3339(self.time.saturating_mul(1000)),
            self.address,
            self.boot_id,
            image.collect::<String>()
        )
    }
}

impl Node {
    fn state_text(&self) -> String {
        match self.decommissioning {
            true => format!("{} (leaving)", self.state),
            false => self.state.clone(),
        }
    }

    fn health_text(&self) -> String {
        match &self.health_reason[..] {
            "" => self.health.clone(),
            reason => format!("{} ({})", self.health, printable(reason)),
        }
    }

    /// All fields as text, for people.
    pub(crate) fn text(&self) -> String {
        let some = |text: &Option<String>| text.clone().unwrap_or_default();
        let pairs = |pairs: &BTreeMap<String, String>| {
            let pairs = pairs.iter().map(|(name, value)| format!("{name}={value}"));
            pairs.collect::<Vec<_>>().join(",")
        };
        let port = self.curator_port.map(|port| port.to_string());
        let age = self.heartbeat_age_ms.map(|ms| format!("{ms} ms ago"));
        let mut text = String::new();
        let addresses = [&self.external_address, &self.second_address];
        let addresses = addresses.into_iter().flatten().cloned();
        let addresses = addresses.collect::<Vec<_>>().join(",");
        for (name, value) in [
            ("node", self.id.clone()),
            ("public key", self.public_key.clone()),
            ("state", self.state_text()),
            ("health", self.health_text()),
            ("cluster", self.cluster_text()),
            ("roles", self.roles.join(",")),
            ("labels", pairs(&self.labels)),
            ("settings", pairs(&self.settings)),
            ("address", addresses),
            ("curator port", some(&port)),
            ("last heartbeat", some(&age)),
            ("version", some(&self.version)),
            ("boot ID", some(&self.boot_id)),
            ("storage security", self.storage_security.clone()),
            (
                "storage in use",
                some(&self.storage.as_ref().map(Storage::text)),
            ),
            ("TPM", self.tpm_usage.clone()),
        ] {
            let value = match &value[..] {
                "" => "-".to_owned(),
                value => printable(value),
            };
            text.push_str(&format!("{name:16}  {value}\n"));
        }
        let clock = self.time.iter().flat_map(Clock::rows);
        for (name, value) in self
            .recorded_settings
            .iter()
            .flat_map(Recorded::rows)
            .chain(clock)
        {
            if !value.is_empty() {
                text.push_str(&format!("{name:16}  {}\n", printable(&value)));
            }
        }
        for (index, join) in self.joins.iter().enumerate() {
            let name = if index == 0 { "joins" } else { "" };
            text.push_str(&format!("{name:16}  {}\n", printable(&join.text())));
        }
        for condition in &self.conditions {
            let value = printable(&condition.text());
            text.push_str(&format!("{:16}  {value}\n", "condition"));
        }
        text
    }

    /// The last reported cluster state, marked where the node may have another one by now.
    fn cluster_text(&self) -> String {
        match &self.cluster_state {
            Some(state) if self.health == "HEALTHY" => state.clone(),
            Some(state) => format!("{state} (stale)"),
            None => String::new(),
        }
    }

    fn cells(&self) -> [String; 7] {
        let text = |text: &Option<String>| printable(text.as_deref().unwrap_or(""));
        [
            printable(&self.id),
            self.state_text(),
            self.health_text(),
            printable(&self.cluster_text()),
            self.roles.join(","),
            text(&self.external_address),
            text(&self.version),
        ]
    }
}

/// Nodes as a table.
pub(crate) fn node_table<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Table {
    let mut table = Table::new(&[
        "NODE", "STATE", "HEALTH", "CLUSTER", "ROLES", "ADDRESS", "VERSION",
    ]);
    for node in nodes {
        table.row(node.cells());
    }
    table
}

/// One line of `node list --watch -o json`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Change<'a> {
    /// A node at the start of the watch, a new one, or one that has changed.
    Node {
        /// The current state.
        node: &'a Node,
    },
    /// A node has been removed.
    Removed {
        /// Its ID.
        id: &'a str,
    },
    /// All nodes that existed at the start of the watch have been printed.
    Synced,
}

/// A cluster.
#[derive(Debug, Serialize)]
pub(crate) struct Cluster {
    cluster_id: String,
    version: String,
    ca_certificate: String,
    configuration: Configuration,
    /// The version of the configuration.
    configuration_version: u64,
    /// Null if the curator's image is older than this field.
    owner_public_key: Option<String>,
    /// Null if the cluster has none.
    recovery_recipient: Option<String>,
    directory: Vec<Member>,
}

#[derive(Debug, Serialize)]
struct Member {
    id: String,
    addresses: Vec<String>,
    roles: Vec<&'static str>,
}

impl From<&v1::GetClusterInfoResponse> for Cluster {
    fn from(info: &v1::GetClusterInfoResponse) -> Self {
        let members = info
            .directory
            .as_ref()
            .map(|directory| &directory.nodes[..]);
        Self {
            // An ID of a wrong length is shown, too, as it was received.
            cluster_id: ClusterId::try_from(&info.cluster_id[..])
                .map_or_else(|_| hex::encode(&info.cluster_id), |id| id.to_string()),
            version: info.version.clone(),
            ca_certificate: to_pem(&info.ca_certificate),
            configuration: Configuration::from(&info.configuration.clone().unwrap_or_default()),
            configuration_version: info.configuration_version,
            owner_public_key: present(&hex::encode(&info.owner_public_key)),
            recovery_recipient: present(&hex::encode(&info.recovery_recipient)),
            directory: members.unwrap_or_default().iter().map(member).collect(),
        }
    }
}

fn member(node: &v1::cluster_directory::Node) -> Member {
    let address = |address: &v1::cluster_directory::Address| {
        let port = u16::try_from(address.port).ok()?;
        Some(Endpoint::new(address.host.parse().ok()?, port).to_string())
    };
    Member {
        id: node.id.clone(),
        addresses: node.addresses.iter().filter_map(address).collect(),
        roles: roles(node.roles.as_ref()),
    }
}

impl Cluster {
    /// As text for people.
    pub(crate) fn text(&self) -> String {
        let none = || "-".to_owned();
        let mut text = format!(
            "cluster             {}\n\
             version             {}\n\
             owner public key    {}\n\
             recovery recipient  {}\n\
             \n\
             {}\n",
            self.cluster_id,
            printable(&self.version),
            self.owner_public_key.clone().unwrap_or_else(none),
            self.recovery_recipient.clone().unwrap_or_else(none),
            self.configuration.table(),
        );
        let mut table = Table::new(&["CONTROL PLANE", "ADDRESSES"]);
        for member in &self.directory {
            table.row([
                printable(&member.id),
                printable(&member.addresses.join(",")),
            ]);
        }
        text.push_str(&table.to_string());
        text
    }
}
