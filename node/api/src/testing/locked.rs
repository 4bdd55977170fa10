//! A node that waits for its owner, as far as its unlock port is concerned.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::client::Endpoint;
use crate::identity::{ClusterId, ClusterUnlockKey, JoinKey, NodeId, PublicKey};
use crate::recovery::{Challenger, RecoveryError, RecoveryRecipient, WrappedFor, wrap};
use crate::server::{ServeError, Server, Services, Transport};
use crate::v1::node_unlock_server::{NodeUnlock, NodeUnlockServer};
use crate::v1::{
    ClusterDirectory, GetUnlockChallengeRequest, GetUnlockChallengeResponse, UnlockRequest,
    UnlockResponse,
};

/// What a [`TestLockedNode`] is.
#[derive(Clone)]
pub struct LockedNode {
    /// Its cluster.
    pub cluster_id: ClusterId,
    /// Its ID.
    pub node_id: NodeId,
    /// Whose answers it accepts.
    pub owner: PublicKey,
    /// To whom its key was encrypted.
    pub recipient: RecoveryRecipient,
    /// What it knows of its cluster.
    pub directory: ClusterDirectory,
    /// Whether another key opens its data partition than the one that was encrypted.
    pub other_disk: bool,
}

/// A locked node on a free local port; it stops when it is dropped, and when it is unlocked.
pub struct TestLockedNode {
    /// The address it listens on.
    pub address: SocketAddr,
    answering: Arc<Answering>,
    task: JoinHandle<Result<(), ServeError>>,
}

struct Answering {
    node: LockedNode,
    join_key: JoinKey,
    key: ClusterUnlockKey,
    state: Mutex<State>,
    cancel: CancellationToken,
}

struct State {
    challenger: Challenger,
    answers: usize,
    unlocked: bool,
}

impl TestLockedNode {
    /// Starts it.
    pub async fn start(node: LockedNode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (join_key, key) = (JoinKey::generate(), ClusterUnlockKey::generate());
        let cancel = CancellationToken::new();
        let answering = Arc::new(Answering {
            state: Mutex::new(State {
                challenger: challenger(&node, &join_key, &key),
                answers: 0,
                unlocked: false,
            }),
            node,
            join_key,
            key,
            cancel: cancel.clone(),
        });
        let services = Services::new().with(NodeUnlockServer::from_arc(Arc::clone(&answering)));
        let server = Server::new(Transport::Plain);
        let task = tokio::spawn(server.serve(listener, services, cancel));
        Self {
            address,
            answering,
            task,
        }
    }

    /// The endpoint it listens on.
    pub fn endpoint(&self) -> Endpoint {
        self.address.into()
    }

    /// Its ID.
    pub fn id(&self) -> NodeId {
        self.answering.node.node_id
    }

    /// Makes another challenge, as after a restart.
    pub fn restart(&self) {
        let Answering {
            node,
            join_key,
            key,
            ..
        } = &*self.answering;
        self.answering.state().challenger = challenger(node, join_key, key);
    }

    /// Whether it was unlocked.
    pub fn is_unlocked(&self) -> bool {
        self.answering.state().unlocked
    }

    /// How many answers it has received.
    pub fn answers(&self) -> usize {
        self.answering.state().answers
    }
}

impl Drop for TestLockedNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn challenger(node: &LockedNode, join_key: &JoinKey, key: &ClusterUnlockKey) -> Challenger {
    let node_for = WrappedFor {
        cluster_id: node.cluster_id,
        node_id: node.node_id,
        join_key: join_key.public(),
        key_epoch: 0,
    };
    let wrapped = wrap(&node.recipient, &node_for, key);
    Challenger::new(node_for, wrapped, join_key)
}

impl Answering {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl NodeUnlock for Answering {
    async fn get_unlock_challenge(
        &self,
        _: Request<GetUnlockChallengeRequest>,
    ) -> Result<Response<GetUnlockChallengeResponse>, Status> {
        Ok(Response::new(GetUnlockChallengeResponse {
            challenge: Some(self.state().challenger.challenge().to_message()),
            directory: Some(self.node.directory.clone()),
        }))
    }

    async fn unlock(
        &self,
        request: Request<UnlockRequest>,
    ) -> Result<Response<UnlockResponse>, Status> {
        let mut state = self.state();
        state.answers += 1;
        let accepted = state.challenger.accept(request.get_ref(), &self.node.owner);
        let key = accepted.map_err(|error| match error {
            RecoveryError::Answer => Status::permission_denied(error.to_string()),
            error => Status::invalid_argument(error.to_string()),
        })?;
        if self.node.other_disk || key != self.key {
            return Err(Status::invalid_argument("the key opens nothing"));
        }
        state.unlocked = true;
        self.cancel.cancel();
        Ok(Response::new(UnlockResponse {}))
    }
}
