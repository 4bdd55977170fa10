//! The UDP and TCP sockets, at the gateway address of the node's pod network.
//!
//! Only pods and nodes are answered: other clients that can send packets here (a machine in the
//! same network with a route to the pods) get no response, so that no node is an open resolver.
//! Queries that the zone can answer are answered at once; queries that are forwarded wait in tasks
//! of their own, as many as [`Forwarder`] allows. There are at most [`MAX_STREAMS`] streams, which
//! clients share fairly ([`Shares`]): a pod that opens many does not keep others from theirs.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hearth_api::ranges::ClusterRanges;
use hearth_api::shares::Shares;
use hearth_base::event::Value;
use hickory_proto::op::ResponseCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::answer::{self, Local, Question, Received, Reply};
use super::forward::{ForwardError, Forwarder};
use super::upstream::Asked;
use super::wire::Transport;
use super::zone::Zone;

/// Maximum number of open streams, and of those of one client.
const MAX_STREAMS: usize = 256;
const MAX_STREAMS_OF_ONE: usize = 16;
/// Idle timeout of a stream, and timeout for writing a response.
const STREAM_WAITS_FOR: Duration = Duration::from_secs(10);
/// The largest datagram that is read; longer ones are cut off.
const MAX_DATAGRAM_BYTES: usize = 4096;

/// The state that both sockets share.
pub struct Server {
    /// The zone; not set before services and endpoints have been listed once.
    pub zone: Value<Arc<Zone>>,
    /// Forwards queries for other domains.
    pub forwarder: Arc<Forwarder>,
    /// The addresses of pods and services.
    pub ranges: ClusterRanges,
    /// Decides whether a client address is answered.
    pub admits: fn(&ClusterRanges, IpAddr) -> bool,
}

/// Admits the addresses of the pod networks: pods and nodes.
pub fn pods(ranges: &ClusterRanges, address: IpAddr) -> bool {
    ranges.has_pod(address)
}

/// What to do with a received message: ignore it, send a response, or forward a query.
enum Next {
    Nothing,
    Say(Vec<u8>),
    Ask(Box<Question>, Asked, Vec<hickory_proto::rr::Record>),
}

impl Server {
    fn consider(&self, bytes: &[u8], transport: Transport) -> Next {
        let question = match answer::read(bytes, transport) {
            Received::Noise => return Next::Nothing,
            Received::Wrong(bytes) => return Next::Say(bytes),
            Received::Question(question) => question,
        };
        let zone = self.zone.get();
        let (before, query) = match answer::look_up(zone.as_deref(), &self.ranges, &question.query)
        {
            Local::Reply(reply) => return Next::Say(question.encode(&reply)),
            Local::Foreign if !question.recursion_desired() => {
                let reply = Reply::bare(ResponseCode::Refused);
                return Next::Say(question.encode(&reply));
            }
            Local::Foreign => (Vec::new(), question.query.clone()),
            Local::Alias(before, name) => {
                let mut query = question.query.clone();
                query.set_name(name);
                (before, query)
            }
        };
        let asked = Asked {
            query,
            signatures: question.wants_signatures(),
            checking_disabled: question.checking_disabled(),
        };
        Next::Ask(question, asked, before)
    }
}

async fn ask(
    forwarder: Arc<Forwarder>,
    client: IpAddr,
    question: Box<Question>,
    asked: Asked,
    before: Vec<hickory_proto::rr::Record>,
) -> Vec<u8> {
    match forwarder.ask(client, &asked).await {
        Ok(forwarded) => question.pass_on(&forwarded.answer, forwarded.age, &before),
        Err(error) => {
            if !matches!(*error, ForwardError::NoServers) {
                let error = hearth_api::chain(&*error);
                tracing::debug!(name = %asked.query.name(), "cannot resolve: {error}");
            }
            question.encode(&Reply::bare(ResponseCode::ServFail))
        }
    }
}

/// Serves UDP. Returns only on an error.
pub async fn datagrams(server: &Server, socket: UdpSocket) -> Result<(), io::Error> {
    let socket = Arc::new(socket);
    let mut asking = JoinSet::new();
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    loop {
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => received,
            Some(done) = asking.join_next() => {
                gone(done);
                continue;
            }
        };
        let (size, from) = match received {
            Ok(received) => received,
            Err(error) if is_of_one(&error) => continue,
            Err(error) => return Err(error),
        };
        if !(server.admits)(&server.ranges, from.ip()) {
            continue;
        }
        match server.consider(&buffer[..size], Transport::Udp) {
            Next::Nothing => {}
            // A response that cannot be sent is lost, as any datagram may be.
            Next::Say(bytes) => drop(socket.send_to(&bytes, from).await),
            Next::Ask(question, asked, before) => {
                let (forwarder, socket) = (server.forwarder.clone(), socket.clone());
                asking.spawn(async move {
                    let bytes = ask(forwarder, from.ip(), question, asked, before).await;
                    drop(socket.send_to(&bytes, from).await);
                });
            }
        }
    }
}

/// Serves TCP. Returns only on an error.
pub async fn streams(server: Arc<Server>, listener: TcpListener) -> Result<(), io::Error> {
    let places = Shares::new(MAX_STREAMS, MAX_STREAMS_OF_ONE);
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(done) = open.join_next() => {
                gone(done);
                continue;
            }
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_one(&error) => continue,
            Err(error) => return Err(error),
        };
        if (server.admits)(&server.ranges, from.ip()) {
            let server = server.clone();
            let place = places.take(from.ip());
            open.spawn(async move {
                let served = tokio::select! {
                    biased;
                    () = place.lost() => Err(io::ErrorKind::QuotaExceeded.into()),
                    served = stream_of_one(&server, from.ip(), stream) => served,
                };
                if let Err(error) = served {
                    tracing::trace!(%from, %error, "stream closed");
                }
            });
        }
    }
}

async fn stream_of_one(server: &Server, client: IpAddr, mut stream: TcpStream) -> io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let length = timeout(STREAM_WAITS_FOR, stream.read_u16()).await??;
        bytes.resize(length.into(), 0);
        timeout(STREAM_WAITS_FOR, stream.read_exact(&mut bytes)).await??;
        let answer = match server.consider(&bytes, Transport::Tcp) {
            // Not a query: close the stream.
            Next::Nothing => return Ok(()),
            Next::Say(bytes) => bytes,
            Next::Ask(question, asked, before) => {
                ask(server.forwarder.clone(), client, question, asked, before).await
            }
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        let mut framed = length.to_be_bytes().to_vec();
        framed.extend_from_slice(&answer);
        timeout(STREAM_WAITS_FOR, stream.write_all(&framed)).await??;
    }
}

/// Logs a task that panicked; other queries are not affected.
fn gone(done: Result<(), tokio::task::JoinError>) {
    if let Err(error) = done {
        tracing::error!(%error, "task of a query failed");
    }
}

/// Whether the error concerns one packet or stream, not the socket.
fn is_of_one(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::Interrupted
    )
}

/// Binds both sockets.
pub async fn bind(at: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    Ok((UdpSocket::bind(at).await?, TcpListener::bind(at).await?))
}
