//! Encryption of Secrets: the provider that the API server of this node asks for keys (KMS v2), and the keys.
//!
//! ```text
//!  API server ── encrypts each Secret with a key of its own, which is stored with the Secret, encrypted
//!      │ unix socket: Encrypt, Decrypt                                                   with ▼
//!  provider ◄── Keyring: the secrets keys of all generations, in memory
//!                   ▲ opens with the controller key, on the data partition
//!  etcd: each secrets key, wrapped for every controller and for the recovery key  ◄── sharing
//! ```
//!
//! | part | content |
//! |---|---|
//! | [`keyring`] | the opened keys |
//! | [`provider`] | the service for the API server |
//! | [`sharing`] | generates keys and wraps them for other controllers |
//! | [`rewriting`] | encrypts all Secrets again after a change of the key |
//!
//! The first controller of a cluster generates the first key. A further one announces to which key it can open, and any
//! controller that has the keys wraps them for it; until then its API server does not start. A larger number in the
//! setting `kubernetes.secrets_key_generation` makes the controllers generate the next key. Secrets that were written
//! before there was any key are readable, and rewritten as after each change of the key.
//!
//! Invariants:
//! - A key is used only when it is in etcd, wrapped for this controller and, if the cluster has one, for the recovery
//!   key.
//! - A key is never deleted: what is encrypted with it may be in a watch, a cache or a backup. An earlier key protects
//!   nothing once the Secrets are rewritten.
//! - No secrets key is on a disk unwrapped, and besides root only the user of the control-plane programs can open the
//!   socket.

mod keyring;
mod provider;
mod rewriting;
mod sharing;
#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;
use std::sync::Arc;

use hearth_api::recovery::RecoveryRecipient;
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure};
use hearth_consensus::NamespacedClient;
use hearth_consensus::secrets_keys::SecretsKeys;
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_host::pki::kubernetes::Certificate;
use hearth_host::record::RecordError;

use super::{Controller, RoleCondition, programs};
use crate::access;
use keyring::Keyring;
use provider::Provider;
use rewriting::Rewriter;
use sharing::Sharing;

pub(super) use keyring::KeyStatus;
pub(super) use provider::encryption_configuration;

/// The keys of a controller, none of which is open yet.
pub(super) fn open_keyring(
    root: &Root,
    member: &MemberData,
    client: NamespacedClient,
) -> Result<Arc<Keyring>, RecordError> {
    let own = keyring::load_or_generate(&root.data.node().controller_key())?;
    Ok(Arc::new(Keyring::new(
        member.own.cluster(),
        member.own.node(),
        own,
        SecretsKeys::new(client),
    )))
}

/// Starts the parts as children of the role's supervisor.
pub(super) fn start(
    ctx: &Context,
    controller: &Arc<Controller>,
    keyring: Arc<Keyring>,
    recovery_recipient: &Value<Option<RecoveryRecipient>>,
) -> Result<(), Failure> {
    let parts = &controller.parts;
    let provider = Arc::new(Provider {
        keyring: keyring.clone(),
        socket: controller.files.key_provider(),
        user: parts.control_plane_user,
    });
    ctx.run_worker("key-provider", &provider, provider::run)?;
    let sharing = Arc::new(Sharing {
        keyring: keyring.clone(),
        view: parts.view.clone(),
        settings: controller.settings.clone(),
        recovery_recipient: recovery_recipient.clone(),
    });
    ctx.run_worker("secrets-keys", &sharing, sharing::run)?;
    let all = controller.clone();
    let rewriter = Arc::new(Rewriter {
        keyring,
        view: parts.view.clone(),
        apiserver: controller.apiserver.clone(),
        connect: Box::new(move || {
            let now = all.parts.calendar.now();
            let own = all.authorities.issue(&Certificate::Reconciler, now)?;
            let server = programs::url(Ipv4Addr::LOCALHOST.into(), all.ports.apiserver);
            Ok(access::client(&server, all.authorities.ca(), &own)?)
        }),
    });
    ctx.run_worker("secrets-rewriter", &rewriter, rewriting::run)?;
    Ok(())
}

impl KeyStatus {
    /// Why the role is not ready; `None` if the keys are.
    pub(super) fn condition(&self) -> Option<RoleCondition> {
        match self {
            Self::Ready(_) => None,
            Self::Missing(generation) => {
                let message = format!(
                    "this node has no access to the key of Secrets of generation {generation}: it gets access from a \
                     Kubernetes controller that has it. If there is none, assign the role to a node that had it, or \
                     run hearthctl kubernetes recover-secrets-key"
                );
                Some(RoleCondition::unmet("SecretsKeyMissing", message))
            }
            Self::Failing(why) => Some(RoleCondition::unmet("Failing", why.clone())),
        }
    }
}

/// The messages and the service of the API servers' key provider.
#[allow(missing_docs, unreachable_pub, clippy::all)] // Generated; documented in the proto file.
mod wire {
    tonic::include_proto!("v2");
}
