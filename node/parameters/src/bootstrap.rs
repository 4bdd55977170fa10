//! `cluster_bootstrap`: create a new cluster.

use hearth_api::identity::{FirstContactSecret, KeyError, PublicKey};
use hearth_api::manifests::Manifest;
use hearth_api::recovery::{RecoveryError, RecoveryRecipient};
use hearth_api::v1::{
    AdmissionPolicy, ClusterBootstrap, ClusterConfiguration, Label, NodeRoles, StorageSecurity,
    StorageSecurityPolicy, TpmMode, TpmUsage, node_roles,
};
use hearth_api::{labels, settings};

use super::{Problem, cold_start};

/// The owner's settings for a cluster to be bootstrapped. They are passed unchanged from the
/// parameters through the sealed configuration to the control plane.
#[derive(Clone, Debug)]
pub struct ClusterSeed {
    /// The owner's public key.
    pub owner: PublicKey,
    /// Proves the cluster's CA to the owner at the first contact.
    pub first_contact_secret: FirstContactSecret,
    /// To which the nodes wrap their cluster unlock keys; needed for cold-start policy OWNER.
    pub recovery_recipient: Option<RecoveryRecipient>,
    /// The cluster configuration, with all defaults filled in. In the parameters the cold-start
    /// policy may be unspecified; enrolment then decides it, see
    /// [`cold_start_policy`](crate::cold_start_policy).
    pub configuration: ClusterConfiguration,
    /// The labels of the first node.
    pub labels: Vec<Label>,
    /// Kubernetes objects, to be applied in this order.
    pub manifests: Vec<Manifest>,
}

/// The parameters of a bootstrap.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    /// The settings that are passed on unchanged.
    pub seed: ClusterSeed,
    /// The storage security of this node's data partition, according to the policy.
    pub storage_security: StorageSecurity,
    /// Whether the owner accepts that the cluster's data can be lost; see [`cold_start`].
    pub accept_loss: bool,
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
        let configuration = configuration(message.initial_cluster_configuration)?;
        let storage_security = storage_security(configuration.storage_security_policy());
        let recovery_recipient = recipient(&message.recovery_recipient)?;
        cold_start::check(
            configuration.cold_start_policy(),
            storage_security,
            recovery_recipient.is_some(),
            message.accept_loss,
        )?;
        Ok(Self {
            seed: ClusterSeed {
                owner,
                first_contact_secret,
                recovery_recipient,
                configuration,
                labels: labels::parse("cluster_bootstrap.labels", message.labels)?,
                manifests: manifests(&message.manifests)?,
            },
            storage_security,
            accept_loss: message.accept_loss,
            roles: roles(message.initial_roles)?,
        })
    }
}

/// Checks the settings of the new cluster, and gives those without a value their defaults. The
/// cold-start policy has none.
fn configuration(message: Option<ClusterConfiguration>) -> Result<ClusterConfiguration, Problem> {
    let completed = settings::complete(message.unwrap_or_default());
    let mut configuration = completed.map_err(|error| {
        let field = format!(
            "cluster_bootstrap.initial_cluster_configuration.{}",
            error.field
        );
        Problem::unwanted(field, error.expected, error.found)
    })?;
    let admission = admission_policy(configuration.admission_policy(), configuration.tpm_mode());
    configuration.set_admission_policy(admission);
    Ok(configuration)
}

/// The admission policy of a new cluster. Where each machine has a TPM, each can prove what it has booted.
fn admission_policy(wanted: AdmissionPolicy, mode: TpmMode) -> AdmissionPolicy {
    match (wanted, mode) {
        (AdmissionPolicy::Unspecified, TpmMode::Required) => AdmissionPolicy::KnownImages,
        (AdmissionPolicy::Unspecified, _) => AdmissionPolicy::Any,
        (wanted, _) => wanted,
    }
}

fn manifests(texts: &[String]) -> Result<Vec<Manifest>, Problem> {
    Manifest::parse_all(texts).map_err(|error| {
        let field = format!("cluster_bootstrap.{}", error.field);
        Problem::unwanted(field, error.expected, error.found)
    })
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

/// How a node uses its TPM in this mode; `None` if it cannot be part of the cluster. `is_present`: whether the machine has
/// a TPM that it can seal with.
pub fn tpm_usage(mode: TpmMode, is_present: bool) -> Option<TpmUsage> {
    match (mode, is_present) {
        (TpmMode::Required, false) => None,
        (_, false) => Some(TpmUsage::NotPresent),
        (TpmMode::Disabled, true) => Some(TpmUsage::PresentButUnused),
        (TpmMode::Unspecified | TpmMode::BestEffort | TpmMode::Required, true) => {
            Some(TpmUsage::PresentAndUsed)
        }
    }
}

/// Parses the recovery recipient; `None` if there is none.
fn recipient(bytes: &[u8]) -> Result<Option<RecoveryRecipient>, Problem> {
    let parsed = RecoveryRecipient::from_field(bytes);
    let field = "cluster_bootstrap.recovery_recipient";
    parsed.map_err(|error| match error {
        RecoveryError::Field {
            expected, found, ..
        } => Problem::unwanted(field, expected, found),
        other => Problem::unwanted(field, "an X25519 public key", other.to_string()),
    })
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
