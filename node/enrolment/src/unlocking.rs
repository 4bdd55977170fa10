//! Lets the owner unlock this node while no curator can.
//!
//! A member whose data partition is locked asks the curators for its key ([`crate::driver`]). Where all of them are down,
//! as after a power cut of the whole cluster, nobody can answer. Under the cold-start policies OWNER and TPM this worker
//! then presents a challenge on a port of its own, and takes the owner's answer ([`hearth_api::recovery`]). It also shows
//! the challenge at the console of the machine, to whoever asks for it there. Whichever key comes first is used.
//!
//!
//! # Invariants
//! - The port is open exactly while the node waits for its key, and nothing else is served there.
//! - A key is passed on only if the owner key that the sealed configuration records has signed it for this challenge, or
//!   it was entered at the console, and it opens the data partition. Any other answer changes nothing.
//! - The challenge is new for each wait, and so for each boot.
//!
//! There is no TLS: before its data partition is open the node has no certificate. The messages protect themselves.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hearth_api::chain;
use hearth_api::identity::{ClusterUnlockKey, PublicKey};
use hearth_api::recovery::Challenger;
use hearth_api::server::{Caller, Server, Services, Transport};
use hearth_api::v1::node_unlock_server::{NodeUnlock, NodeUnlockServer};
use hearth_api::v1::{
    ClusterDirectory, GetUnlockChallengeRequest, GetUnlockChallengeResponse, UnlockRequest,
    UnlockResponse,
};
use hearth_base::event;
use hearth_base::supervisor::{Context, Failure, Outcome, spawn_blocking};
use hearth_host::directory::DirectoryStore;
use hearth_host::storage::{OwnedVolume, StorageBackend};
use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

use super::console;
use super::sealed::Member;

/// The member that waits for its key; `None` while there is none.
pub type Waiting = Option<Arc<Member>>;
/// The key that the owner has given for that member.
pub type OwnersKey = Option<ClusterUnlockKey>;

/// What this runnable works with.
pub struct Worker<M> {
    /// The listening address.
    pub listen: SocketAddr,
    /// The console of the machine.
    pub console: PathBuf,
    /// The data partition.
    pub data: Arc<Mutex<OwnedVolume<M>>>,
    /// The directory on the ESP: tells the owner where the other nodes are.
    pub saved_directory: Arc<DirectoryStore>,
    /// Read: the member that waits for its key.
    pub waiting: event::Value<Waiting>,
    /// Written: the key from the owner; `None` again when nobody waits for it any more.
    pub owners_key: event::Writer<OwnersKey>,
}

/// The runnable.
pub async fn run<M: StorageBackend>(ctx: Context, worker: Arc<Worker<M>>) -> Outcome {
    ctx.healthy();
    let mut waiting = worker.waiting.watch();
    loop {
        let member = tokio::select! {
            member = waiting.some() => member?,
            () = ctx.cancelled() => return Ok(()),
        };
        let Some(service) = Service::of(&worker, member) else {
            continue;
        };
        let service = Arc::new(service);
        let listener = TcpListener::bind(worker.listen).await?;
        let ended = ctx.token().child_token();
        let services = Services::new().with(NodeUnlockServer::from_arc(service.clone()));
        let serving = Server::new(Transport::Plain).serve(listener, services, ended.clone());
        tokio::pin!(serving);
        tokio::select! {
            served = &mut serving => {
                served?;
                return match ctx.is_cancelled() {
                    true => Ok(()),
                    false => Err(Failure::msg("the unlock server exited")),
                };
            }
            over = async {
                // A key from the console is one that is waited for no longer in a moment.
                let wanted = waiting.wait_for(Option::is_none);
                tokio::pin!(wanted);
                tokio::select! {
                    over = &mut wanted => over,
                    () = service.ask_at_console() => wanted.await,
                }
            } => { over?; }
        }
        // The response to the owner is still sent.
        ended.cancel();
        serving.await?;
        worker.owners_key.set(None);
    }
}

/// Serves the owner of one member.
struct Service<M> {
    worker: Arc<Worker<M>>,
    member: Arc<Member>,
    owner: PublicKey,
    challenger: Challenger,
}

impl<M: StorageBackend> Service<M> {
    /// `None` if the owner cannot unlock this member.
    fn of(worker: &Arc<Worker<M>>, member: Arc<Member>) -> Option<Self> {
        let (recovery, owner) = member.owner_unlocks()?;
        let identity = &member.identity;
        let wrapped = recovery.wrapped_key.clone();
        Some(Self {
            challenger: Challenger::new(identity.wrapped_for(), wrapped, &identity.join_key),
            worker: worker.clone(),
            owner,
            member,
        })
    }

    /// Returns once a key that was entered at the console was passed on.
    async fn ask_at_console(&self) {
        let challenge = self.challenger.console_challenge().to_text();
        let wants = "unlock this node";
        console::ask(
            &self.worker.console,
            wants,
            &challenge,
            |answer| async move {
                let key = self
                    .challenger
                    .accept_at_console(&answer)
                    .map_err(|error| chain(&error))?;
                match self.opens(&key).await {
                    Ok(true) => {}
                    Ok(false) => {
                        return Err("it does not open the data partition of this node".into());
                    }
                    Err(status) => return Err(status.message().to_owned()),
                }
                tracing::warn!("the owner has unlocked this node at the console");
                self.worker.owners_key.set(Some(key));
                Ok(())
            },
        )
        .await;
    }

    async fn opens(&self, key: &ClusterUnlockKey) -> Result<bool, Status> {
        let Some(volume) = self.member.identity.volume(Some(key)) else {
            return Ok(false);
        };
        let data = self.worker.data.clone();
        let opens = spawn_blocking(move || {
            // It has no state that a panic could leave inconsistent.
            let mut data = data.lock().unwrap_or_else(PoisonError::into_inner);
            data.is_opened_by(&volume)
        });
        let opens = opens
            .await
            .map_err(|error| Status::internal(chain(&error)))?;
        opens.map_err(|error| Status::unavailable(chain(&error)))
    }
}

#[tonic::async_trait]
impl<M: StorageBackend> NodeUnlock for Service<M> {
    async fn get_unlock_challenge(
        &self,
        _: Request<GetUnlockChallengeRequest>,
    ) -> Result<Response<GetUnlockChallengeResponse>, Status> {
        let store = self.worker.saved_directory.clone();
        let directory: Option<ClusterDirectory> = spawn_blocking(move || store.load())
            .await
            .map_err(|error| Status::internal(chain(&error)))?
            // The owner can name the other nodes.
            .unwrap_or_default();
        Ok(Response::new(GetUnlockChallengeResponse {
            challenge: Some(self.challenger.challenge().to_message()),
            directory,
        }))
    }

    async fn unlock(
        &self,
        request: Request<UnlockRequest>,
    ) -> Result<Response<UnlockResponse>, Status> {
        let remote = Caller::of(&request)?.remote();
        let key = self
            .challenger
            .accept(request.get_ref(), &self.owner)
            .map_err(|error| {
                tracing::warn!("refused an answer from {remote}: {}", chain(&error));
                Status::permission_denied(chain(&error))
            })?;
        if !self.opens(&key).await? {
            tracing::warn!(
                "refused an answer from {remote}: the key does not open the data partition"
            );
            return Err(Status::invalid_argument(
                "wrapped_key: expected the key that opens the data partition of this node, got another one",
            ));
        }
        tracing::warn!("the owner has unlocked this node from {remote}");
        self.worker.owners_key.set(Some(key));
        Ok(Response::new(UnlockResponse {}))
    }
}

#[cfg(test)]
mod tests;
