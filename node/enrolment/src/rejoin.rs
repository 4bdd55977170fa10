//! Finds out whether a running member has been removed from its cluster.
//!
//! A node may be removed while it is away or while it runs. So JoinNode is called once after the
//! hand-over, and again whenever curators refuse the node's certificate (`Refusals`). Only an order
//! signed by the cluster CA ends the membership. "Unknown node" wipes nothing: after a restore from
//! a backup a cluster does not know its newer nodes.
//!
//! The answer tells who unlocks the node when no curator is running, and has the key that the node wraps or keeps for
//! that. So JoinNode is also called when the curators have other settings than the sealed configuration
//! (`UnlockSettingsDigest`), which is then saved anew. What is recorded is reported to the curators, and tells other
//! workers who the owner is.
//!
//! Reads `MemberData`, `Refusals`, `UnlockSettingsDigest` and the directory on the ESP. Writes `UnlockSettings`, and
//! `Disowned`, after the keys are wiped; the control plane then stops etcd and wipes the rest.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::console::Report;
use hearth_api::proofs::AfterRemoval;
use hearth_api::recovery::UnlockSettings;
use hearth_api::v1::{ClusterDirectory, ColdStartPolicy};
use hearth_base::event;
use hearth_base::supervisor::{Backoff, Context, Failure, Outcome, spawn_blocking};
use hearth_host::directory::DirectoryStore;
use hearth_host::handover::{Disowned, MemberData, Refusals, UnlockSettingsDigest};
use hearth_host::layout::Root;
use hearth_host::power::{Power, PowerRequest};
use hearth_host::storage::upkeep::Reporter;

use super::asking::{AskError, CuratorCaller, Joined};
use super::disowning::{self, WipeError};
use super::driver::{chain, is_final};
use super::machine;
use super::sealed::{self, Member, Sealed, SealedError, SealedStore, Stored};

/// Minimum interval between two calls, however often curators refuse the node.
const AT_MOST_EVERY: Duration = Duration::from_secs(5);

/// Interval of the attempts to repair the sealed configuration.
const REPAIR_EVERY: Duration = Duration::from_secs(60);

/// What this runnable works with.
pub struct Parts {
    /// All paths of the node.
    pub root: Root,
    /// The store of the sealed configuration.
    pub sealed: Arc<SealedStore>,
    /// The directory on the ESP.
    pub saved_directory: Arc<DirectoryStore>,
    /// The client of the curators.
    pub asker: Arc<CuratorCaller>,
    /// Prints on the console.
    pub report: Reporter,
    /// Restarts the machine.
    pub power: Power,
    /// Minimum interval between two calls; see [`AT_MOST_EVERY`].
    pub at_most_every: Duration,
    /// Read: the member, after enrolment.
    pub member: event::Value<MemberData>,
    /// Read: how often curators have refused this node.
    pub refusals: event::Value<Refusals>,
    /// Read: the cluster's settings for unlocking, as its curators have them.
    pub unlock_settings: event::Value<UnlockSettingsDigest>,
    /// Written: the settings that the sealed configuration has. None of them after the node was
    /// removed.
    pub recorded: event::Writer<UnlockSettings>,
    /// Written: after the keys are wiped.
    pub disowned: event::Writer<Disowned>,
}

impl Parts {
    /// The interval on a node.
    pub const AT_MOST_EVERY: Duration = AT_MOST_EVERY;
}

/// The runnable.
pub async fn run(ctx: Context, parts: Arc<Parts>) -> Outcome {
    let ended = tokio::select! {
        ended = parts.until_removed(&ctx) => ended?,
        () = ctx.cancelled() => return Ok(()),
    };
    match ended.afterwards {
        AfterRemoval::Wait => {
            let reason = machine::disowned(&ended);
            tracing::error!("disowned: waiting for {reason}");
            (parts.report)(&Report::Waiting(reason));
        }
        // The next boot destroys the rest.
        AfterRemoval::Reset => {
            let who = "the cluster, which has reset this node";
            parts.power.ask(PowerRequest::Reboot, who);
        }
    }
    parts.disowned.set(Disowned);
    ctx.cancelled().await;
    Ok(())
}

/// Why the state could not be read or the data not be wiped.
#[derive(Debug, thiserror::Error)]
enum RejoinError {
    #[error(transparent)]
    Sealed(#[from] SealedError),
    #[error(transparent)]
    Wipe(#[from] WipeError),
    #[error("internal error: expected a sealed configuration in phase MEMBER, got {0}")]
    NoMember(&'static str),
}

/// What the cluster says about this node.
enum Membership {
    /// It was removed.
    Removed(AfterRemoval),
    /// It is a member, and what it records of the cluster's settings has changed.
    Changed(Arc<Member>),
    /// It is a member, as far as is known.
    Same,
}

impl Parts {
    /// Returns once the node is removed and its keys are wiped.
    async fn until_removed(&self, ctx: &Context) -> Result<sealed::Disowned, Failure> {
        let handed_over = self.member.watch().next().await?;
        ctx.healthy();
        let mut member = match self.load().await? {
            // An earlier run was interrupted.
            Sealed::Disowned(disowned) => {
                self.recorded.set(UnlockSettings {
                    cold_start_policy: ColdStartPolicy::Unspecified,
                    recovery_recipient: None,
                    owner: None,
                });
                return self.disown(disowned).await;
            }
            Sealed::Member(member) => member,
            other => return Err(RejoinError::NoMember(other.phase()).into()),
        };
        self.recorded.set(member.reported_settings());
        let mut refusals = self.refusals.watch();
        let mut settings = self.unlock_settings.watch();
        loop {
            let told = self.unlock_settings.get();
            let seen = self.refusals.get().unwrap_or_default();
            match self.membership(&member, &handed_over.directory).await {
                Membership::Removed(afterwards) => {
                    return self.disown(member.into_disowned(afterwards)).await;
                }
                Membership::Changed(changed) => member = self.record(changed).await?,
                Membership::Same => {}
            }
            tokio::time::sleep(self.at_most_every).await;
            let differs = |digest: &UnlockSettingsDigest| {
                // Not again, if the answer to the same digest has changed nothing.
                told != Some(*digest) && member.unlock_settings().digest() != *digest
            };
            tokio::select! {
                never = self.keep_whole() => match never? {},
                more = refusals.wait_for(|refusals| *refusals > seen) => { more?; }
                other = settings.wait_for(differs) => { other?; }
            }
        }
    }

    /// Asks until a curator answers.
    async fn membership(&self, member: &Member, handed_over: &ClusterDirectory) -> Membership {
        let backoff = Backoff::default();
        let mut failures = 0;
        loop {
            match self.ask(member, handed_over).await {
                Ok(Joined::Admitted { key, settings, .. }) => {
                    tracing::info!("the cluster confirmed this node's membership");
                    let changed = settings.and_then(|settings| member.under(&settings, &key));
                    return match changed {
                        Some(changed) => Membership::Changed(Arc::new(changed)),
                        None => Membership::Same,
                    };
                }
                Ok(Joined::Removed(afterwards)) => return Membership::Removed(afterwards),
                Err(error) if is_final(&error) => {
                    tracing::warn!("membership is unconfirmed; not wiping: {}", chain(error));
                    return Membership::Same;
                }
                Err(AskError::NotYet {
                    message, ask_again, ..
                }) => {
                    tracing::debug!("waiting for the cluster to admit this boot: {message}");
                    failures = 0;
                    tokio::time::sleep(ask_again).await;
                    continue;
                }
                Err(error) => tracing::debug!("{}", chain(error)),
            }
            failures += 1;
            tokio::time::sleep(backoff.delay(failures)).await;
        }
    }

    async fn ask(
        &self,
        member: &Member,
        handed_over: &ClusterDirectory,
    ) -> Result<Joined, AskError> {
        let store = self.saved_directory.clone();
        let saved = spawn_blocking(move || store.load()).await;
        let mut known = handed_over.clone();
        if let Ok(Ok(Some(saved))) = saved {
            known.nodes.splice(0..0, saved.nodes);
        }
        self.asker.join(member, &known).await
    }

    /// Saves the settings of the cluster that have changed.
    async fn record(&self, member: Arc<Member>) -> Result<Arc<Member>, Failure> {
        let (store, sealed) = (self.sealed.clone(), Sealed::Member(member.clone()));
        spawn_blocking(move || store.save(&sealed)).await??;
        let settings = member.reported_settings();
        tracing::info!(
            cold_start_policy = settings.cold_start_policy.as_str_name(),
            recovery_recipient = ?settings.recovery_recipient,
            owner = ?settings.owner,
            "recorded new settings of the cluster"
        );
        self.recorded.set(settings);
        Ok(member)
    }

    /// Repairs the sealed configuration where a write, or the repair at the boot, has left it with one copy.
    async fn keep_whole(&self) -> Result<Infallible, Failure> {
        loop {
            tokio::time::sleep(REPAIR_EVERY).await;
            if self.sealed.last_write().failed() {
                let store = self.sealed.clone();
                spawn_blocking(move || store.repair()).await??;
            }
        }
    }

    async fn load(&self) -> Result<Sealed, Failure> {
        let store = self.sealed.clone();
        match spawn_blocking(move || store.load()).await?? {
            Stored::Sealed(sealed) => Ok(sealed),
            Stored::Absent | Stored::NeverCompleted => Err(RejoinError::NoMember("none").into()),
        }
    }

    async fn disown(&self, disowned: sealed::Disowned) -> Result<sealed::Disowned, Failure> {
        let (store, data) = (self.sealed.clone(), self.root.data.clone());
        let wiped = spawn_blocking(move || {
            disowning::seal(&store, disowned)?;
            Ok::<_, RejoinError>(disowning::forget(&data)?)
        });
        let wiped = wiped.await?;
        if let Err(error) = &wiped {
            (self.report)(&Report::Waiting(format!(
                "a retry: the cluster has removed this node, and its keys cannot be wiped: {}",
                hearth_api::chain(error)
            )));
        }
        wiped?;
        Ok(disowned)
    }
}

#[cfg(test)]
mod tests;
