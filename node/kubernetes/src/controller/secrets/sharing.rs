//! Has every Kubernetes controller, and the recovery key, able to open the keys: announces this controller, wraps the
//! keys for the others, and generates a key when there is none or the cluster's settings ask for a new one.
//!
//! It is level-triggered: [`plan`] compares what is in etcd with what should be there, and whatever was written, all is
//! read again. All controllers do the same; of two who write the same record one succeeds, and the other finds it done.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_agent::View;
use hearth_api::identity::{NodeId, SecretsKey};
use hearth_api::recovery::{RecoveryError, RecoveryRecipient, WrappedKey};
use hearth_api::v1::{KubernetesConfiguration, NodeState};
use hearth_base::event::{Closed, Value, Watcher};
use hearth_base::supervisor::{Context, Health, Outcome};
use hearth_consensus::fenced::WriteError;
use hearth_consensus::secrets_keys::{Controller, Known, StoredKey};
use tokio::time::sleep;

use super::keyring::{KeyError, KeyStatus, Keyring};

/// Interval at which the records are read when nothing is known to have changed.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Delay after an error, or after another controller has written first.
const AGAIN: Duration = Duration::from_millis(500);

/// Inputs and the keys.
pub(crate) struct Sharing {
    pub keyring: Arc<Keyring>,
    /// Input: the nodes of the cluster.
    pub view: Value<Arc<View>>,
    /// Input: the cluster's settings.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    /// Input: the recovery recipient of the cluster.
    pub recovery_recipient: Value<Option<RecoveryRecipient>>,
}

#[derive(Debug, thiserror::Error)]
enum SharingError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("cannot write the keys of Secrets")]
    Write(#[from] WriteError),
    #[error("cannot wrap the key of Secrets")]
    Wrap(#[from] RecoveryError),
}

/// Shares the keys until it is cancelled.
pub(crate) async fn run(ctx: Context, sharing: Arc<Sharing>) -> Outcome {
    let health = Health::of(&ctx);
    ctx.until_cancelled(follow(&sharing, &health)).await
}

/// Returns only on an error.
async fn follow(sharing: &Sharing, health: &Health<'_>) -> Outcome {
    let mut inputs = Inputs::of(sharing);
    health.good();
    loop {
        match sharing.round(&sharing.wanted().await?).await {
            Ok(Some(known)) => {
                let keys = &sharing.keyring.stored;
                tokio::select! {
                    () = keys.changed(&known, LOOK_EVERY) => {}
                    changed = inputs.changed() => changed?,
                }
            }
            // Something was written.
            Ok(None) => {}
            Err(SharingError::Write(WriteError::Conflict)) => sleep(AGAIN).await,
            Err(error) => {
                sharing.report(&error);
                sleep(AGAIN).await;
            }
        }
    }
}

/// What decides who needs which keys.
struct Inputs {
    view: Watcher<Arc<View>>,
    settings: Watcher<Arc<KubernetesConfiguration>>,
    recovery_recipient: Watcher<Option<RecoveryRecipient>>,
    used: Watcher<u32>,
}

impl Inputs {
    fn of(sharing: &Sharing) -> Self {
        Self {
            view: sharing.view.watch(),
            settings: sharing.settings.watch(),
            recovery_recipient: sharing.recovery_recipient.watch(),
            used: sharing.keyring.used().watch(),
        }
    }

    async fn changed(&mut self) -> Result<(), Closed> {
        tokio::select! {
            changed = self.view.next() => changed.map(drop),
            changed = self.settings.next() => changed.map(drop),
            changed = self.recovery_recipient.next() => changed.map(drop),
            changed = self.used.next() => changed.map(drop),
        }
    }
}

/// What should be in etcd.
struct Wanted {
    /// The nodes with the role.
    controllers: BTreeSet<NodeId>,
    recovery_recipient: Option<RecoveryRecipient>,
    /// The least generation that there should be.
    generation: u32,
    /// The generation with which the API server of this node encrypts.
    used: u32,
}

/// The nodes with the role.
pub(super) fn controllers(view: &View) -> BTreeSet<NodeId> {
    let nodes = view.nodes.iter();
    let held = nodes.filter(|(_, node)| {
        node.state == NodeState::Up && node.roles.kubernetes_controller.is_some()
    });
    held.map(|(id, _)| *id).collect()
}

impl Sharing {
    /// The current inputs, once all are known.
    async fn wanted(&self) -> Result<Wanted, Closed> {
        let view = self.view.watch().next().await?;
        let settings = self.settings.watch().next().await?;
        Ok(Wanted {
            controllers: controllers(&view),
            recovery_recipient: self.recovery_recipient.watch().next().await?,
            generation: settings.secrets_key_generation.max(1),
            used: self.keyring.used().watch().next().await?,
        })
    }

    /// Reads the records and makes the first change that is needed. Returns the records if there is none.
    async fn round(&self, wanted: &Wanted) -> Result<Option<Known>, SharingError> {
        let ring = &self.keyring;
        let known = ring.stored.read().await.map_err(KeyError::from)?;
        let missing = ring.open(&known)?;
        let own = Own {
            node: ring.node,
            recipient: ring.own.recipient(),
            has_all: missing.is_none(),
        };
        let step = plan(&known, &own, wanted);
        if let Some(step) = step {
            self.take(&known, step).await?;
            return Ok(None);
        }
        let status = match missing {
            Some(generation) => KeyStatus::Missing(generation),
            None => KeyStatus::Ready(known.latest()),
        };
        if ring.status().get().as_ref() != Some(&status) {
            ring.status.set(status);
        }
        Ok(Some(known))
    }

    async fn take(&self, known: &Known, step: Step) -> Result<(), SharingError> {
        let ring = &self.keyring;
        let keys = &ring.stored;
        match step {
            Step::Announce(controller) => keys.announce(known, ring.node, &controller).await?,
            Step::Forget(node) => keys.forget(known, node).await?,
            Step::Generate(generation, recipients) => {
                let key = SecretsKey::generate();
                let of = ring.generation(generation);
                let wrapped = recipients
                    .into_iter()
                    .map(|to| Ok((to, of.wrap(&to, &key)?)));
                let stored = StoredKey {
                    id: of.id(&key),
                    wrapped: wrapped.collect::<Result<_, RecoveryError>>()?,
                    rewritten: false,
                };
                keys.put(known, generation, &stored).await?;
                tracing::info!(key = stored.id, "generated a key of Secrets");
            }
            Step::Wrap(generation, recipients) => {
                let (Some(read), Some(key)) =
                    (known.keys.get(&generation), ring.secret(generation))
                else {
                    return Ok(());
                };
                let of = ring.generation(generation);
                let wrapped = recipients.into_iter().map(|to| {
                    let kept: Option<&WrappedKey> = read.content.wrapped_for(&to);
                    Ok((
                        to,
                        kept.map_or_else(|| of.wrap(&to, &key), |kept| Ok(kept.clone()))?,
                    ))
                });
                let stored = StoredKey {
                    wrapped: wrapped.collect::<Result<_, RecoveryError>>()?,
                    ..read.content.clone()
                };
                keys.put(known, generation, &stored).await?;
                tracing::info!(
                    key = stored.id,
                    "wrapped a key of Secrets for those who need it"
                );
            }
        }
        Ok(())
    }

    /// A key that works goes on working while etcd does not answer, or when a record becomes unreadable.
    fn report(&self, error: &SharingError) {
        let why = hearth_api::chain(error);
        let status = self.keyring.status().get();
        if matches!(status, Some(KeyStatus::Ready(_))) {
            tracing::debug!("{why}");
            return;
        }
        if status != Some(KeyStatus::Failing(why.clone())) {
            tracing::warn!("{why}");
            self.keyring.status.set(KeyStatus::Failing(why));
        }
    }
}

/// This controller.
struct Own {
    node: NodeId,
    recipient: RecoveryRecipient,
    /// It has opened all keys that there are.
    has_all: bool,
}

/// A change of one record.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Write what this controller says of itself.
    Announce(Controller),
    /// Remove a controller that is none any more.
    Forget(NodeId),
    /// Generate the key of this generation, for these recipients.
    Generate(u32, Vec<RecoveryRecipient>),
    /// Have the key of this generation wrapped for exactly these recipients.
    Wrap(u32, Vec<RecoveryRecipient>),
}

/// The first change that is needed.
///
/// A controller that is not among those of the curators itself has outdated news of them, or will soon have no role: it
/// takes nothing from anybody.
fn plan(known: &Known, own: &Own, wanted: &Wanted) -> Option<Step> {
    let announced = Controller {
        recipient: own.recipient,
        generation: wanted.used,
    };
    if known.controllers.get(&own.node).map(|read| &read.content) != Some(&announced) {
        return Some(Step::Announce(announced));
    }
    let is_current = wanted.controllers.contains(&own.node);
    let mut all = known.controllers.keys();
    let former = all.find(|node| is_current && !wanted.controllers.contains(node));
    if let Some(former) = former {
        return Some(Step::Forget(*former));
    }
    if !own.has_all {
        return None;
    }
    let recipients = recipients(known, own, wanted);
    if known.latest() < wanted.generation {
        return Some(Step::Generate(wanted.generation, recipients));
    }
    for (generation, read) in &known.keys {
        let has = read.content.wrapped.iter().map(|(to, _)| to);
        let lacks = recipients
            .iter()
            .any(|to| read.content.wrapped_for(to).is_none());
        let mut more = has.filter(|to| !recipients.contains(to)).peekable();
        if lacks || (is_current && more.peek().is_some()) {
            let kept = more.filter(|_| !is_current).copied();
            let all = recipients.iter().copied().chain(kept);
            return Some(Step::Wrap(*generation, all.collect()));
        }
    }
    None
}

/// Who should be able to open the keys: the controllers that have announced themselves, this one, and the recovery key.
fn recipients(known: &Known, own: &Own, wanted: &Wanted) -> Vec<RecoveryRecipient> {
    let others = known
        .controllers
        .iter()
        .filter(|(node, _)| **node != own.node && wanted.controllers.contains(node));
    let others = others.map(|(_, read)| read.content.recipient);
    [own.recipient]
        .into_iter()
        .chain(others)
        .chain(wanted.recovery_recipient)
        .collect()
}
