//! The way itself: for each connection of the program one to etcd, and the
//! calls that go from the one to the other.
//!
//! A connection with all its calls is one task. What comes in on either side
//! wakes it once, and it does whatever follows: nothing is handed to another
//! task, which another thread would have to be woken for. An API server asks
//! etcd for something at nearly each request that it serves, one after the
//! other, so what a call costs here is what each request takes longer. That is
//! why the calls about keys and the watches are not a server's and a client's
//! of tonic, each with a task for the connection, one for the call and queues
//! between them; that has cost the node more processor time than the store
//! itself takes.
//!
//! When either side ends its connection the other one ends: the program sees
//! what it would see of etcd, and connects again by itself.

use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt as _};
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{RecvStream, client, server};
use http::{HeaderMap, Request};
use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::Status;

use super::super::wire::{
    DeleteRangeRequest, PutRequest, RangeRequest, TxnRequest, WatchRequest, WatchResponse,
};
use super::EtcdProxy;
use super::key_prefix::HasKeys;
use super::messages::{self, Messages};

/// What may be under way in one direction of one stream, and of a connection.
/// Lists of objects are megabytes.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Calls of one connection at a time; one more waits.
const MOST_CONCURRENT_CALLS: u32 = 4096;
/// When no connection can be taken, because the process has too many.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

const WATCH_PATH: &str = "/etcdserverpb.Watch/Watch";

/// Why a connection has ended before its time.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("etcd takes no connection")]
    Connect(#[from] io::Error),
    #[error("the connection to etcd")]
    Etcd(#[source] h2::Error),
    #[error("the connection of the program")]
    Program(#[source] h2::Error),
}

/// Takes connections until it is `over`, and then waits for the end of what is
/// under way on them.
pub(super) async fn serve(listener: UnixListener, proxy: EtcdProxy) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            taken = listener.accept() => match taken {
                Ok((program, _)) => {
                    let proxy = proxy.clone();
                    connections.spawn(async move { pass(program, &proxy).await });
                }
                Err(error) => {
                    tracing::warn!("a way to the store cannot be opened: {error}");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            },
            Some(ended) = connections.join_next() => tell(ended),
            () = proxy.over.cancelled() => break,
        }
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        tell(ended);
    }
}

fn tell(ended: Result<Result<(), ConnectionError>, tokio::task::JoinError>) {
    match ended {
        Ok(Ok(())) => {}
        // There are many, and what ended them says so once.
        Ok(Err(error)) => {
            let error = hearth_api::chain(&error);
            tracing::debug!("a way to the store has ended: {error}");
        }
        Err(error) => tracing::error!("a way to the store has failed: {error}"),
    }
}

/// Both sides of a way, and whom etcd is asked by.
type Opened = (
    server::Connection<UnixStream, Bytes>,
    client::Connection<UnixStream, Bytes>,
    SendRequest<Bytes>,
);

/// Waits for etcd, if it is away for a moment.
async fn open(program: UnixStream, proxy: &EtcdProxy) -> Result<Opened, ConnectionError> {
    let etcd = proxy.client.connect().await?;
    let upward = client::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .enable_push(false)
        .handshake(etcd);
    let (etcd, upward) = upward.await.map_err(ConnectionError::Etcd)?;
    let downward = server::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MOST_CONCURRENT_CALLS)
        .handshake(program);
    let downward = downward.await.map_err(ConnectionError::Program)?;
    Ok((downward, upward, etcd))
}

/// One connection, until either side ends it.
async fn pass(program: UnixStream, proxy: &EtcdProxy) -> Result<(), ConnectionError> {
    let mut over = pin!(proxy.over.cancelled());
    let (mut downward, upward, etcd) = tokio::select! {
        opened = open(program, proxy) => opened?,
        // Nothing is under way on it.
        () = &mut over => return Ok(()),
    };
    let connection = ProxyConnection { etcd, proxy };
    let mut calls = FuturesUnordered::new();
    let mut upward = pin!(upward);
    let mut ending = false;
    loop {
        tokio::select! {
            call = downward.accept() => match call {
                Some(call) => {
                    let (request, respond) = call.map_err(ConnectionError::Program)?;
                    calls.push(connection.call(request, respond));
                }
                None => return Ok(()),
            },
            Some(()) = calls.next() => {}
            ended = &mut upward => return ended.map_err(ConnectionError::Etcd),
            () = &mut over, if !ending => {
                ending = true;
                downward.graceful_shutdown();
            }
        }
    }
}

/// What the calls of one connection share.
struct ProxyConnection<'a> {
    etcd: SendRequest<Bytes>,
    proxy: &'a EtcdProxy,
}

impl ProxyConnection<'_> {
    /// One call, until it is answered or its caller has lost interest.
    async fn call(&self, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
        let (head, body) = request.into_parts();
        let (proxy, body) = (self.proxy, Messages::of(body));
        match head.uri.path() {
            RangeRequest::PATH => {
                self.about_keys::<RangeRequest>(&head.headers, body, respond)
                    .await
            }
            TxnRequest::PATH => {
                self.about_keys::<TxnRequest>(&head.headers, body, respond)
                    .await
            }
            PutRequest::PATH => {
                self.about_keys::<PutRequest>(&head.headers, body, respond)
                    .await
            }
            DeleteRangeRequest::PATH => {
                self.about_keys::<DeleteRangeRequest>(&head.headers, body, respond)
                    .await;
            }
            WATCH_PATH => self.watch(&head.headers, body, respond).await,
            "/etcdserverpb.Lease/LeaseGrant" => {
                asked(body, respond, |request| proxy.grant(request)).await;
            }
            "/etcdserverpb.Lease/LeaseRevoke" => {
                asked(body, respond, |request| proxy.revoke(request)).await;
            }
            "/etcdserverpb.Lease/LeaseTimeToLive" => {
                asked(body, respond, |request| proxy.time_to_live(request)).await;
            }
            "/etcdserverpb.Lease/LeaseLeases" => {
                asked(body, respond, |request| proxy.list_leases(request)).await;
            }
            "/etcdserverpb.Lease/LeaseKeepAlive" => self.keep_alive(body, respond).await,
            "/etcdserverpb.Maintenance/Status" => {
                asked(body, respond, |request| proxy.status(request)).await;
            }
            "/etcdserverpb.Maintenance/Alarm" => {
                asked(body, respond, |request| proxy.alarm(request)).await;
            }
            path => {
                let mut respond = respond;
                messages::refuse(&mut respond, super::not_here(path));
            }
        }
    }

    /// One question about keys, and etcd's answer.
    async fn about_keys<Q: HasKeys>(
        &self,
        head: &HeaderMap,
        body: Messages,
        respond: SendResponse<Bytes>,
    ) {
        let prefix = &self.proxy.prefix;
        let ask = async |mut question: Q| {
            let puts = question.may_put();
            question.up(prefix)?;
            if puts {
                self.proxy.has_capacity()?;
            }
            let mut answer = self.ask(head, &question).await?;
            Q::down(&mut answer, prefix)?;
            Ok(answer)
        };
        asked(body, respond, ask).await;
    }

    async fn ask<Q: HasKeys>(&self, head: &HeaderMap, question: &Q) -> Result<Q::Answer, Status> {
        let answer = async {
            let (answer, mut sink) = messages::call(&self.etcd, Q::PATH, head).await?;
            sink.send(question, true).await?;
            let mut answers = messages::answers(answer).await?;
            let answer = answers.next().await?;
            answers.ended().await?;
            answer.ok_or_else(|| Status::internal("etcd ended a call without an answer"))
        };
        super::answered(answer).await
    }

    /// Watches, of which one stream has many: requests go up as they come, and
    /// what etcd tells comes down. A caller that breaks off ends them above,
    /// too.
    async fn watch(&self, head: &HeaderMap, mut body: Messages, mut respond: SendResponse<Bytes>) {
        let (answer, mut up) = match messages::call(&self.etcd, WATCH_PATH, head).await {
            Ok(call) => call,
            Err(status) => return messages::refuse(&mut respond, status),
        };
        // etcd answers when the first watch is made, and its caller makes
        // the first when it likes.
        let Ok(mut down) = messages::begin(&mut respond) else {
            return;
        };
        let prefix = &self.proxy.prefix;
        let upward = async {
            while let Some(mut request) = body.next::<WatchRequest>().await? {
                prefix.watch_up(&mut request);
                up.send(&request, false).await?;
            }
            up.close();
            std::future::pending().await
        };
        let downward = async {
            let mut answers = messages::answers(answer).await?;
            loop {
                let answer = tokio::select! {
                    answer = answers.next::<WatchResponse>() => answer?,
                    () = down.abandoned() => return Err(Status::cancelled("it was broken off")),
                };
                let Some(mut answer) = answer else {
                    return answers.ended().await;
                };
                prefix.watch_down(&mut answer)?;
                down.send(&answer, false).await?;
            }
        };
        let ended: Result<(), Status> = tokio::select! {
            ended = upward => ended,
            ended = downward => ended,
            () = self.proxy.over.cancelled() => Ok(()),
        };
        down.end(ended);
    }

    /// Renewals: one call upwards for each, since their users renew rarely, if
    /// at all.
    async fn keep_alive(&self, mut body: Messages, mut respond: SendResponse<Bytes>) {
        let Ok(mut down) = messages::begin(&mut respond) else {
            return;
        };
        let renewals = async {
            while let Some(request) = body.next().await? {
                let renewed = self.proxy.renew(request).await?;
                down.send(&renewed, false).await?;
            }
            Ok(())
        };
        let ended: Result<(), Status> = tokio::select! {
            ended = renewals => ended,
            () = self.proxy.over.cancelled() => Ok(()),
        };
        down.end(ended);
    }
}

/// A call of one question and one answer.
async fn asked<Q, A, F>(
    mut body: Messages,
    mut respond: SendResponse<Bytes>,
    answer: impl FnOnce(Q) -> F,
) where
    Q: Message + Default,
    A: Message,
    F: Future<Output = Result<A, Status>>,
{
    let answered = async { answer(body.one().await?).await };
    let answered = tokio::select! {
        answered = answered => answered,
        () = messages::abandoned(&mut respond) => return,
    };
    match answered {
        Ok(answer) => {
            let Ok(mut sink) = messages::begin(&mut respond) else {
                return;
            };
            let sent = sink.send(&answer, false).await;
            sink.end(sent);
        }
        Err(status) => messages::refuse(&mut respond, status),
    }
}

#[cfg(test)]
mod tests;
