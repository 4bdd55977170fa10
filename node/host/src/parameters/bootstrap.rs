//! `cluster_bootstrap`: create a new cluster.

use hearth_api::identity::{FirstContactSecret, KeyError, PublicKey};
use hearth_api::labels;
use hearth_api::v1::{
    ClusterBootstrap, ClusterConfiguration, ColdStartPolicy, KubernetesConfiguration, NodeRoles,
    StorageSecurity, StorageSecurityPolicy, TpmMode, node_roles,
};

use super::Problem;
use crate::handover::ClusterSeed;

/// The default cluster domain, the suffix of node names.
pub const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.internal";
/// A node name and the cluster domain together must fit into a host name.
const LONGEST_CLUSTER_DOMAIN: usize = 80;

/// The parameters of a bootstrap.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    /// The settings that are passed on unchanged.
    pub seed: ClusterSeed,
    /// The storage security of this node's data partition, according to the policy.
    pub storage_security: StorageSecurity,
    /// The same as in the cluster configuration.
    pub cold_start_policy: ColdStartPolicy,
    /// The roles of the first node, consensus member at least. `None`: all roles that its image can
    /// run.
    pub roles: Option<NodeRoles>,
}

impl Bootstrap {
    pub(super) fn parse(message: ClusterBootstrap) -> Result<Self, Problem> {
        let owner = PublicKey::try_from(&message.owner_public_key[..]).map_err(|error| {
            let field = "cluster_bootstrap.owner_public_key";
            match error {
                KeyError::Length { found } => {
                    Problem::unwanted(field, "32 bytes", found.to_string())
                }
                other => Problem::unwanted(field, "an Ed25519 public key", other.to_string()),
            }
        })?;
        let first_contact_secret = FirstContactSecret::try_from(&message.first_contact_secret[..])
            .map_err(|error| {
                Problem::unwanted(
                    "cluster_bootstrap.first_contact_secret",
                    "32 bytes",
                    error.found.to_string(),
                )
            })?;
        let settings = Settings::parse(message.initial_cluster_configuration.unwrap_or_default())?;
        let recipient = recipient(&message.recovery_recipient, settings.cold_start_policy)?;
        Ok(Self {
            seed: ClusterSeed {
                owner,
                first_contact_secret,
                recovery_recipient: recipient,
                configuration: ClusterConfiguration {
                    cluster_domain: settings.cluster_domain,
                    tpm_mode: settings.tpm_mode.into(),
                    storage_security_policy: settings.storage_security_policy.into(),
                    cold_start_policy: settings.cold_start_policy.into(),
                    kubernetes: settings.kubernetes,
                },
                labels: labels::parse("cluster_bootstrap.labels", message.labels)?,
            },
            storage_security: storage_security(settings.storage_security_policy),
            cold_start_policy: settings.cold_start_policy,
            roles: roles(message.initial_roles)?,
        })
    }
}

/// The cluster configuration with defaults filled in.
struct Settings {
    cluster_domain: String,
    tpm_mode: TpmMode,
    storage_security_policy: StorageSecurityPolicy,
    cold_start_policy: ColdStartPolicy,
    kubernetes: Option<KubernetesConfiguration>,
}

const CONFIGURATION: &str = "cluster_bootstrap.initial_cluster_configuration";

impl Settings {
    fn parse(message: ClusterConfiguration) -> Result<Self, Problem> {
        Ok(Self {
            tpm_mode: tpm_mode(message.tpm_mode)?,
            storage_security_policy: storage_security_policy(message.storage_security_policy)?,
            cold_start_policy: cold_start_policy(message.cold_start_policy)?,
            cluster_domain: cluster_domain(message.cluster_domain)?,
            kubernetes: match message.kubernetes {
                Some(kubernetes) => Some(labels::check_kubernetes(
                    &format!("{CONFIGURATION}.kubernetes"),
                    kubernetes,
                )?),
                None => None,
            },
        })
    }
}

fn tpm_mode(value: i32) -> Result<TpmMode, Problem> {
    let field = format!("{CONFIGURATION}.tpm_mode");
    match TpmMode::try_from(value) {
        Ok(TpmMode::Unspecified | TpmMode::BestEffort) => Ok(TpmMode::BestEffort),
        Ok(TpmMode::Disabled) => Ok(TpmMode::Disabled),
        Ok(TpmMode::Required) => Err(Problem::unwanted(
            field,
            "BEST_EFFORT or DISABLED (this release cannot seal with a TPM)",
            "REQUIRED",
        )),
        Err(_) => Err(unknown_value(field, value)),
    }
}

fn storage_security_policy(value: i32) -> Result<StorageSecurityPolicy, Problem> {
    match StorageSecurityPolicy::try_from(value) {
        Ok(StorageSecurityPolicy::Unspecified) => Ok(StorageSecurityPolicy::NeedsEncryption),
        Ok(policy) => Ok(policy),
        Err(_) => Err(unknown_value(
            format!("{CONFIGURATION}.storage_security_policy"),
            value,
        )),
    }
}

/// The storage security of a node under this policy. If the policy leaves a choice, the node
/// encrypts.
pub fn storage_security(policy: StorageSecurityPolicy) -> StorageSecurity {
    match policy {
        StorageSecurityPolicy::NeedsInsecure => StorageSecurity::Insecure,
        StorageSecurityPolicy::NeedsEncryptionAndAuthentication => {
            StorageSecurity::AuthenticatedEncrypted
        }
        StorageSecurityPolicy::Unspecified
        | StorageSecurityPolicy::Permissive
        | StorageSecurityPolicy::NeedsEncryption => StorageSecurity::Encrypted,
    }
}

/// Only NONE is supported. A cluster that relies on a cold start that does not work would be lost
/// at the first power cut.
fn cold_start_policy(value: i32) -> Result<ColdStartPolicy, Problem> {
    let field = format!("{CONFIGURATION}.cold_start_policy");
    let not_yet = |found: &str| {
        Problem::unwanted(
            field.clone(),
            "NONE (this release cannot cold-start an encrypted cluster)",
            found,
        )
    };
    match ColdStartPolicy::try_from(value) {
        Ok(ColdStartPolicy::Unspecified | ColdStartPolicy::None) => Ok(ColdStartPolicy::None),
        Ok(ColdStartPolicy::Tpm) => Err(not_yet("TPM")),
        Ok(ColdStartPolicy::Owner) => Err(not_yet("OWNER")),
        Err(_) => Err(unknown_value(field.clone(), value)),
    }
}

fn recipient(bytes: &[u8], policy: ColdStartPolicy) -> Result<Option<[u8; 32]>, Problem> {
    let field = "cluster_bootstrap.recovery_recipient";
    if policy != ColdStartPolicy::Owner {
        return match bytes.len() {
            0 => Ok(None),
            found => Err(Problem::unwanted(
                field,
                "no value (the cold-start policy is not OWNER)",
                format!("{found} bytes"),
            )),
        };
    }
    match <[u8; 32]>::try_from(bytes) {
        Ok(recipient) => Ok(Some(recipient)),
        Err(_) => Err(Problem::unwanted(
            field,
            "32 bytes",
            bytes.len().to_string(),
        )),
    }
}

fn cluster_domain(name: String) -> Result<String, Problem> {
    if name.is_empty() {
        return Ok(DEFAULT_CLUSTER_DOMAIN.to_owned());
    }
    let right = name.len() <= LONGEST_CLUSTER_DOMAIN && labels::is_dns_name(&name);
    if right {
        Ok(name)
    } else {
        Err(Problem::unwanted(
            format!("{CONFIGURATION}.cluster_domain"),
            format!("a lower-case DNS name of at most {LONGEST_CLUSTER_DOMAIN} characters"),
            labels::quoted(&name),
        ))
    }
}

impl Bootstrap {
    /// The roles of the first node. `can_run_kubernetes`: whether its image has the extension.
    pub fn roles(&self, can_run_kubernetes: bool) -> NodeRoles {
        self.roles.unwrap_or(NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember::default()),
            kubernetes_controller: can_run_kubernetes
                .then_some(node_roles::KubernetesController {}),
            kubernetes_worker: can_run_kubernetes.then_some(node_roles::KubernetesWorker {}),
        })
    }
}

fn roles(roles: Option<NodeRoles>) -> Result<Option<NodeRoles>, Problem> {
    let Some(roles) = roles else {
        return Ok(None);
    };
    let field = |name: &str| format!("cluster_bootstrap.initial_roles.{name}");
    match roles.consensus_member {
        None => {
            return Err(Problem::unwanted(
                field("consensus_member"),
                "the role (the first node must be a consensus member)",
                "no role",
            ));
        }
        Some(node_roles::ConsensusMember { member_id: 0 }) => {}
        Some(node_roles::ConsensusMember { member_id }) => {
            return Err(Problem::unwanted(
                field("consensus_member.member_id"),
                "0 (a new cluster has no members)",
                member_id.to_string(),
            ));
        }
    }
    Ok(Some(roles))
}

fn unknown_value(field: String, value: i32) -> Problem {
    Problem::unwanted(
        field,
        "a value that this release supports",
        value.to_string(),
    )
}
