//! The forwarding: one connection to etcd for each connection of the program, and the calls between
//! the two.
//!
//! A connection with all its calls is one task. An event on either side wakes it once, and it does
//! all the work that follows: nothing is handed to another task, for which another thread would
//! have to be woken. An API server calls etcd for nearly every request that it serves, one call
//! after the other, so the latency added here is added to every request. That is why the calls
//! about keys and the watches do not use a tonic server and a tonic client, each with a task for
//! the connection, one for the call and queues between them: that used more CPU time on the node
//! than etcd itself.
//!
//! When either side closes its connection, the other one is closed: the program sees what it would
//! see of etcd, and reconnects by itself.

use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt as _};
use h2::RecvStream;
use h2::client::{self, SendRequest};
use h2::server::{self, SendResponse};
use http::Request;
use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::Status;

use super::EtcdProxy;
use super::key_prefix::HasKeys;
use super::messages::{self, Call as _, Messages, Upward};
use super::wire::{
    AlarmRequest, DeleteRangeRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest,
    LeaseRevokeRequest, LeaseTimeToLiveRequest, PutRequest, RangeRequest, StatusRequest,
    TxnRequest, WatchRequest, WatchResponse,
};

/// HTTP/2 flow-control windows of a stream and of a connection. Lists of objects are megabytes.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Maximum number of concurrent calls per connection; further calls wait.
const MOST_CONCURRENT_CALLS: u32 = 4096;
/// Delay after a failed accept, because the process has too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

const WATCH_PATH: &str = "/etcdserverpb.Watch/Watch";

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("cannot connect to etcd")]
    Connect(#[from] io::Error),
    #[error("the connection to etcd failed")]
    Etcd(#[source] h2::Error),
    #[error("the client's connection failed")]
    Program(#[source] h2::Error),
}

/// Accepts connections until `over` is cancelled, and then waits for the calls on them to end.
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
                    tracing::warn!("etcd proxy: cannot accept a connection: {error}");
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
        // There are many of these, and their common cause is logged elsewhere.
        Ok(Err(error)) => {
            let error = hearth_api::chain(&error);
            tracing::debug!("etcd proxy: connection closed: {error}");
        }
        Err(error) => tracing::error!("etcd proxy: connection task failed: {error}"),
    }
}

/// The program's connection, etcd's connection, and the handle for requests to etcd.
type Opened = (
    server::Connection<UnixStream, Bytes>,
    client::Connection<UnixStream, Bytes>,
    SendRequest<Bytes>,
);

/// Opens both connections. Waits for etcd if it is not available for a moment.
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

/// Serves one connection until either side closes it.
async fn pass(program: UnixStream, proxy: &EtcdProxy) -> Result<(), ConnectionError> {
    let mut over = pin!(proxy.over.cancelled());
    let (mut downward, upward, etcd) = tokio::select! {
        opened = open(program, proxy) => opened?,
        // No call is pending on it.
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

/// State shared by the calls of one connection.
struct ProxyConnection<'a> {
    etcd: SendRequest<Bytes>,
    proxy: &'a EtcdProxy,
}

impl ProxyConnection<'_> {
    /// Handles one call until it is answered or its caller cancels it.
    async fn call(&self, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
        let (head, body) = request.into_parts();
        let (proxy, body) = (self.proxy, Messages::requests(body));
        let up = Upward::new(&self.etcd, &head.headers, &proxy.answers);
        match head.uri.path() {
            RangeRequest::PATH => self.about_keys::<RangeRequest>(&up, body, respond).await,
            TxnRequest::PATH => self.about_keys::<TxnRequest>(&up, body, respond).await,
            PutRequest::PATH => self.about_keys::<PutRequest>(&up, body, respond).await,
            DeleteRangeRequest::PATH => {
                self.about_keys::<DeleteRangeRequest>(&up, body, respond)
                    .await;
            }
            WATCH_PATH => self.watch(&up, body, respond).await,
            LeaseGrantRequest::PATH => asked(body, respond, |it| proxy.grant(&up, it)).await,
            LeaseRevokeRequest::PATH => asked(body, respond, |it| proxy.revoke(&up, it)).await,
            LeaseTimeToLiveRequest::PATH => {
                asked(body, respond, |it| proxy.time_to_live(&up, it)).await;
            }
            LeaseLeasesRequest::PATH => asked(body, respond, |it| proxy.list_leases(&up, it)).await,
            LeaseKeepAliveRequest::PATH => self.keep_alive(&up, body, respond).await,
            StatusRequest::PATH => {
                let status = async |it: StatusRequest| up.ask(&it).await;
                asked(body, respond, status).await;
            }
            AlarmRequest::PATH => asked(body, respond, |it| proxy.alarm(&up, it)).await,
            path => {
                let mut respond = respond;
                messages::refuse(&mut respond, super::not_here(path));
            }
        }
    }

    /// Forwards one unary call about keys.
    async fn about_keys<Q: HasKeys>(
        &self,
        up: &Upward<'_>,
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
            let mut answer = up.ask(&question).await?;
            Q::down(&mut answer, prefix)?;
            Ok(answer)
        };
        asked(body, respond, ask).await;
    }

    /// Forwards a watch stream, which may contain many watches: requests to etcd as they arrive,
    /// responses to the program. If the caller cancels the stream, the watches end in etcd as well.
    async fn watch(&self, up: &Upward<'_>, mut body: Messages, mut respond: SendResponse<Bytes>) {
        let (answer, mut questions) = match up.call(WATCH_PATH).await {
            Ok(call) => call,
            Err(status) => return messages::refuse(&mut respond, status),
        };
        // etcd answers once the first watch is created, which the caller may do at any time later.
        let Ok(mut down) = messages::begin(&mut respond) else {
            return;
        };
        let prefix = &self.proxy.prefix;
        let upward = async {
            while let Some(mut request) = body.next::<WatchRequest>().await? {
                prefix.watch_up(&mut request);
                questions.send(&request, false).await?;
            }
            questions.close();
            std::future::pending().await
        };
        let downward = async {
            let mut answers = up.answers(answer).await?;
            loop {
                let answer = tokio::select! {
                    answer = answers.next::<WatchResponse>() => answer?,
                    () = down.abandoned() => return Err(Status::cancelled("caller cancelled")),
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

    /// Forwards lease renewals with one call to etcd for each, since their users renew rarely, if
    /// at all.
    async fn keep_alive(
        &self,
        up: &Upward<'_>,
        mut body: Messages,
        mut respond: SendResponse<Bytes>,
    ) {
        let Ok(mut down) = messages::begin(&mut respond) else {
            return;
        };
        let renewals = async {
            while let Some(request) = body.next().await? {
                let renewed = self.proxy.renew(up, request).await?;
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

/// Handles a unary call.
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
