//! Asks whether a member still is one, once it is up.
//!
//! A node that was removed while it was away must find out, and one that is
//! removed while it runs, too. So JoinNode is called once after the hand-over,
//! and again whenever curators refuse the node's certificate (`Refusals`). Only
//! an order by the cluster's CA ends the membership. "Unknown node" wipes
//! nothing: after a restored backup a cluster does not know its newer nodes.
//!
//! *Will be read*: `MemberData`, `Refusals`, the directory on the ESP.
//! *Will be written*: `Disowned`, after the keys are wiped. Who runs etcd wipes
//! the rest then, once it has ended it.

use std::{sync::Arc, time::Duration};

use hearth_api::{console::Report, v1::ClusterDirectory};
use hearth_base::{
    event,
    supervisor::{Backoff, Context, Failure, Outcome},
};
use hearth_host::directory;
use hearth_host::handover::{Disowned, MemberData, Refusals};
use hearth_host::layout::Root;

use super::asking::{AskError, Asker, Joined};
use super::disowning::{self, WipeError};
use super::driver::{Reporter, chain, is_final};
use super::machine;
use super::sealed::{self, Member, Sealed, SealedError, SealedStore, Stored};

/// However fast refusals come, it is not asked more often.
const AT_MOST_EVERY: Duration = Duration::from_secs(5);

/// What it works with.
pub struct Parts {
    /// Where everything is.
    pub root: Root,
    /// The sealed configuration.
    pub sealed: Arc<SealedStore>,
    /// The way to the curators.
    pub asker: Arc<Asker>,
    /// The console.
    pub report: Reporter,
    /// See [`AT_MOST_EVERY`].
    pub at_most_every: Duration,
    /// Will be read.
    pub member: event::Value<MemberData>,
    /// Will be read.
    pub refusals: event::Value<Refusals>,
    /// Will be written.
    pub disowned: event::Writer<Disowned>,
}

impl Parts {
    /// As a node uses it.
    pub const AT_MOST_EVERY: Duration = AT_MOST_EVERY;
}

/// The runnable.
pub async fn run(ctx: Context, parts: Arc<Parts>) -> Outcome {
    let ended = tokio::select! {
        ended = parts.until_removed(&ctx) => ended?,
        () = ctx.cancelled() => return Ok(()),
    };
    let reason = machine::disowned(&ended);
    tracing::error!("this node was removed: waits for {reason}");
    (parts.report)(&Report::Waiting(reason));
    parts.disowned.set(Disowned);
    ctx.cancelled().await;
    Ok(())
}

/// Why it could not be found out, or not be obeyed.
#[derive(Debug, thiserror::Error)]
enum RejoinError {
    #[error(transparent)]
    Sealed(#[from] SealedError),
    #[error(transparent)]
    Wipe(#[from] WipeError),
    #[error("a member whose sealed configuration is {0}: this is a bug")]
    NoMember(&'static str),
}

impl Parts {
    /// Returns when the node is removed and its keys are gone.
    async fn until_removed(&self, ctx: &Context) -> Result<sealed::Disowned, Failure> {
        let handed_over = self.member.watch().next().await?;
        ctx.healthy();
        let member = match self.load().await? {
            // An earlier run of this was not done.
            Sealed::Disowned(disowned) => return self.disown(disowned).await,
            Sealed::Member(member) => member,
            other => return Err(RejoinError::NoMember(other.phase()).into()),
        };
        let mut refusals = self.refusals.watch();
        loop {
            let seen = self.refusals.get().unwrap_or_default();
            if self.is_removed(&member, &handed_over.directory).await {
                return self.disown(member.into_disowned()).await;
            }
            tokio::time::sleep(self.at_most_every).await;
            refusals.wait_for(|refusals| *refusals > seen).await?;
        }
    }

    /// Asks until there is an answer.
    async fn is_removed(&self, member: &Member, handed_over: &ClusterDirectory) -> bool {
        let backoff = Backoff::default();
        let mut failures = 0;
        loop {
            match self.ask(member, handed_over).await {
                Ok(Joined::Admitted { .. }) => {
                    tracing::info!("the cluster knows this node");
                    return false;
                }
                Ok(Joined::Removed) => return true,
                Err(error) if is_final(&error) => {
                    tracing::warn!("nothing is wiped: {}", chain(error));
                    return false;
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
        let esp = self.root.esp.clone();
        // Who owns it saves it while this runs.
        let saved = tokio::task::spawn_blocking(move || directory::look(&esp)).await;
        let mut known = handed_over.clone();
        if let Ok(Ok(Some(saved))) = saved {
            known.nodes.splice(0..0, saved.nodes);
        }
        self.asker.join(member, &known).await
    }

    async fn load(&self) -> Result<Sealed, Failure> {
        let store = self.sealed.clone();
        match tokio::task::spawn_blocking(move || store.load()).await?? {
            Stored::Sealed(sealed) => Ok(sealed),
            Stored::Absent | Stored::NeverCompleted => Err(RejoinError::NoMember("gone").into()),
        }
    }

    async fn disown(&self, disowned: sealed::Disowned) -> Result<sealed::Disowned, Failure> {
        let (store, data) = (self.sealed.clone(), self.root.data.clone());
        let wiped = tokio::task::spawn_blocking(move || {
            disowning::seal(&store, disowned)?;
            Ok::<_, RejoinError>(disowning::forget(&data)?)
        });
        wiped.await??;
        Ok(disowned)
    }
}

#[cfg(test)]
mod tests;
