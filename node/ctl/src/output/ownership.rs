//! The result of `owner replace`, and what nodes have recorded of the owner.

use hearth_api::identity::ClusterId;
use hearth_api::owner::NewKeys;
use hearth_api::v1::{self, ColdStartPolicy, RecordedSettings};
use serde::Serialize;

use super::word;
use crate::table::{Table, printable};

/// What a node has recorded of its cluster's settings.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Recorded {
    /// Null if the data partition is not encrypted.
    cold_start_policy: Option<String>,
    recovery_recipient: Option<String>,
    owner_public_key: Option<String>,
}

impl From<&RecordedSettings> for Recorded {
    fn from(recorded: &RecordedSettings) -> Self {
        let digits = |bytes: &[u8]| (!bytes.is_empty()).then(|| hex::encode(bytes));
        let policy = recorded.cold_start_policy;
        let is_set = policy != i32::from(ColdStartPolicy::Unspecified);
        let policy = || word(policy, ColdStartPolicy::as_str_name, "COLD_START_POLICY_");
        Self {
            cold_start_policy: is_set.then(policy),
            recovery_recipient: digits(&recorded.recovery_recipient),
            owner_public_key: digits(&recorded.owner_public_key),
        }
    }
}

impl Recorded {
    /// Names and values for people.
    pub(super) fn rows(&self) -> [(&'static str, String); 3] {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        [
            ("cold start", text(&self.cold_start_policy)),
            ("recovery", text(&self.recovery_recipient)),
            ("owner", text(&self.owner_public_key)),
        ]
    }
}

/// Whether a node has recorded these keys. A node without encryption wraps no key.
pub(crate) fn follows(node: &v1::Node, keys: &NewKeys) -> bool {
    let status = node.status.as_ref();
    let Some(recorded) = status.and_then(|status| status.recorded_settings.as_ref()) else {
        return false;
    };
    let wraps = node.storage_security() != v1::StorageSecurity::Insecure;
    let recipient = keys.recovery.recipient();
    recorded.owner_public_key == keys.key.public().as_bytes()
        && (!wraps || recorded.recovery_recipient == recipient.as_bytes())
}

/// Output of `owner replace`.
#[derive(Debug, Serialize)]
pub(crate) struct Replaced {
    cluster_id: String,
    owner_public_key: String,
    recovery_recipient: String,
    nodes: Vec<Node>,
}

#[derive(Debug, Serialize)]
struct Node {
    id: String,
    /// It has recorded the new keys.
    follows: bool,
}

impl Replaced {
    /// After a replacement.
    pub(crate) fn new(cluster: ClusterId, keys: &NewKeys, nodes: &[v1::Node]) -> Self {
        let nodes = nodes.iter().map(|node| Node {
            id: node.id.clone(),
            follows: follows(node, keys),
        });
        Self {
            cluster_id: cluster.to_string(),
            owner_public_key: keys.key.public().to_string(),
            recovery_recipient: keys.recovery.recipient().to_string(),
            nodes: nodes.collect(),
        }
    }

    /// As text for people.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::new(&["NODE", "NEW KEYS"]);
        for node in &self.nodes {
            let follows = if node.follows {
                "recorded"
            } else {
                "not recorded"
            };
            table.row([printable(&node.id), follows.to_owned()]);
        }
        format!(
            "cluster             {}\n\
             owner public key    {}\n\
             recovery recipient  {}\n\
             \n\
             {table}",
            self.cluster_id, self.owner_public_key, self.recovery_recipient
        )
    }
}
