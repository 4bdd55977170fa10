//! The port on which the etcd of this node is reached by its peers: TLS, and the question who is a
//! member.
//!
//! etcd itself accepts every certificate of the etcd CA, for as long as that lives, and takes the
//! caller for the member that it says it is. A node that was a member once could read the log of the
//! cluster, with all keys in it, and write to it. So etcd listens for its peers on a unix socket, and
//! this port is in front of it: it knows the node by its certificate, and forwards the bytes of
//! members only.
//!
//! # Who is a member
//! Whom etcd on this node lists, and whom the curators list. Neither is sufficient:
//! - etcd's list is as of the log entries that this member has applied. A member that was away while
//!   another one was added learns of it from the curators, and maybe its log only from that member.
//! - A node whose role was removed is a member until the others have agreed that it is not, and one
//!   of two members cannot be removed without its own agreement.
//!
//! A member that was away, reaches no curator, and finds only members that were added meanwhile,
//! waits until another one of those that it knows is back.
//!
//! # Invariants
//! - etcd reads nothing from a node that is not a member.
//! - The connections of a node end within [`LOOK_EVERY`] after both lists have lost it.
//! - Handshakes and connections are limited for each source, so that no source takes those of
//!   another.
//!
//! A node that is not a member gets no answer. etcd would tell it that it has been removed, which ends
//! the etcd over there for good: that is for the curators to say, who know it, and not for a member
//! whose list may be old.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hearth_api::identity::NodeId;
use hearth_api::provider::provider;
use hearth_api::shares::{Share, Shares, block};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::{Config, members, process};

/// How often etcd is asked for its members, while one of them is connected.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Timeout of that question, which etcd answers from memory.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Maximum size of the answer, in bytes: a member takes about 200.
const LONGEST_ANSWER: usize = 1 << 20;
/// A handshake that takes longer is aborted.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// A connection whose peer takes no bytes for this long is closed. etcd does the same on its own
/// listener, but not on a unix socket, and a write that blocks blocks all that it has for the peer.
const WRITE_WITHIN: Duration = Duration::from_secs(5);
/// Concurrent handshakes. Each source can have all of them, until another one needs one.
const HANDSHAKES: usize = 64;
/// Connections of all members, and of one of them. etcd has less than ten to each peer.
const CONNECTIONS: usize = 512;
const CONNECTIONS_OF_ONE: usize = 64;
const BUFFER: usize = 16 << 10;

/// Whether the curators count a node as a consensus member; `false` while they have not said.
pub type MemberOfCurators = Arc<dyn Fn(&NodeId) -> bool + Send + Sync>;

/// The port cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum PeerPortError {
    /// The address cannot be listened on.
    #[error("cannot listen for etcd's peers on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The I/O error.
        source: io::Error,
    },
    /// A file for the peer connections cannot be read.
    #[error("{path}: expected PEM")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// The CA is unusable.
    #[error("cannot verify peers with the etcd CA")]
    Verifier(#[from] VerifierBuilderError),
    /// rustls rejects CA, certificate or key.
    #[error("cannot build the TLS configuration of the etcd peer port")]
    Tls(#[from] rustls::Error),
}

/// The open port.
pub(crate) struct PeerPort {
    listener: TcpListener,
    door: Arc<Door>,
}

impl PeerPort {
    /// Opens the port.
    pub(crate) async fn open(config: &Config) -> Result<Self, PeerPortError> {
        let tls = tls(&config.etcd.peer())?;
        let address = config.peer_listen;
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|source| PeerPortError::Listen { address, source })?;
        let membership = Membership {
            etcd: process::peer_socket(&config.socket_dir),
            listed: watch::Sender::default(),
            of_curators: config.member_of_curators.clone(),
            rejected: Mutex::default(),
        };
        let door = Door {
            tls: TlsAcceptor::from(Arc::new(tls)),
            membership,
            connections: Shares::new(CONNECTIONS, CONNECTIONS_OF_ONE),
        };
        Ok(Self {
            listener,
            door: Arc::new(door),
        })
    }

    /// Forwards the connections of members. They end when this is dropped.
    pub(crate) async fn serve(self) -> Infallible {
        let handshakes = Shares::new(HANDSHAKES, HANDSHAKES);
        let mut running = JoinSet::new();
        let accept = async {
            loop {
                tokio::select! {
                    Some(_) = running.join_next() => {}
                    accepted = self.listener.accept() => match accepted {
                        Ok((stream, remote)) => {
                            // A listener of both families has IPv4 addresses in those of IPv6.
                            let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
                            let place = handshakes.take(block(remote.ip()));
                            running.spawn(Arc::clone(&self.door).run(stream, remote, place));
                        }
                        Err(error) => {
                            // Mostly out of file descriptors.
                            tracing::warn!(%error, "cannot accept connections of etcd's peers");
                            tokio::time::sleep(Duration::from_millis(100)).await;
                        }
                    }
                }
            }
        };
        tokio::select! {
            never = accept => never,
            never = self.door.membership.keep() => never,
        }
    }
}

/// TLS 1.3 with the node's etcd certificate, for clients with one of the same CA.
fn tls(files: &hearth_host::layout::KeyFiles) -> Result<ServerConfig, PeerPortError> {
    let of = |path: PathBuf| move |source| PeerPortError::File { path, source };
    let ca = CertificateDer::from_pem_file(files.ca()).map_err(of(files.ca()))?;
    let certificate = CertificateDer::from_pem_file(files.certificate());
    let certificate = certificate.map_err(of(files.certificate()))?;
    let key = PrivateKeyDer::from_pem_file(files.key()).map_err(of(files.key()))?;
    let mut roots = RootCertStore::empty();
    roots.add(ca)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier.build()?)
        .with_single_cert(vec![certificate], key)?;
    // A resumed session would not be verified.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Why a connection is not forwarded, or not any more.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error("no TLS handshake within {HANDSHAKE_WITHIN:?}")]
    Slow,
    #[error("another connection has taken the place of this one")]
    Replaced,
    #[error("the certificate is of no node: {0}")]
    Nobody(String),
    #[error("{0} is not a consensus member")]
    NotMember(NodeId),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What each connection passes.
struct Door {
    tls: TlsAcceptor,
    membership: Membership,
    connections: Arc<Shares<NodeId>>,
}

impl Door {
    async fn run(self: Arc<Self>, stream: TcpStream, remote: SocketAddr, place: Share<IpAddr>) {
        match self.forward(stream, place).await {
            Ok(()) => {}
            Err(why @ Closed::NotMember(node)) if self.membership.is_news(node) => {
                tracing::warn!(%remote, "connection of an etcd peer rejected: {why}");
            }
            Err(why) => tracing::debug!(%remote, "connection of an etcd peer ended: {why}"),
        }
    }

    async fn forward(&self, stream: TcpStream, place: Share<IpAddr>) -> Result<(), Closed> {
        stream.set_nodelay(true)?;
        let handshake = timeout(HANDSHAKE_WITHIN, self.tls.accept(stream));
        let stream = tokio::select! {
            biased;
            () = place.lost() => return Err(Closed::Replaced),
            stream = handshake => stream.map_err(|_| Closed::Slow)??,
        };
        drop(place);
        let node = node(stream.get_ref().1.peer_certificates().unwrap_or_default())?;
        if !self.membership.admit(&node).await {
            return Err(Closed::NotMember(node));
        }
        let place = self.connections.take(node);
        tokio::select! {
            () = place.lost() => Err(Closed::Replaced),
            () = self.membership.ends(&node) => Err(Closed::NotMember(node)),
            carried = carry(stream, &self.membership.etcd) => Ok(carried?),
        }
    }
}

/// The node that a verified certificate was issued to: the only name in it.
fn node(certificates: &[CertificateDer<'_>]) -> Result<NodeId, Closed> {
    let nobody = |why: &dyn std::fmt::Display| Closed::Nobody(why.to_string());
    let certificate = certificates.first().ok_or_else(|| nobody(&"none"))?;
    let certificate = webpki::EndEntityCert::try_from(certificate).map_err(|why| nobody(&why))?;
    let names: Vec<&str> = certificate.valid_dns_names().collect();
    match names[..] {
        [name] => name.parse().map_err(|why| nobody(&why)),
        _ => Err(nobody(&format!("expected one name, got {names:?}"))),
    }
}

/// Who is a member.
struct Membership {
    /// The socket of etcd's peers.
    etcd: PathBuf,
    /// The members that etcd has listed last. Set at every look, so that those who wait also learn
    /// what the curators say now.
    listed: watch::Sender<BTreeSet<NodeId>>,
    of_curators: MemberOfCurators,
    /// Nodes that were rejected since they were members last, so that the log says so once.
    rejected: Mutex<BTreeSet<NodeId>>,
}

impl Membership {
    fn has(&self, node: &NodeId) -> bool {
        self.listed.borrow().contains(node) || (self.of_curators)(node)
    }

    /// Whether this is a member now. One that neither list has may have been added just before, and
    /// without connections the list is old.
    async fn admit(&self, node: &NodeId) -> bool {
        if !self.has(node) || self.listed.receiver_count() == 0 {
            self.look().await;
        }
        let member = self.has(node);
        if member {
            self.rejected().remove(node);
        }
        member
    }

    /// Waits until the node is not a member any more.
    async fn ends(&self, node: &NodeId) {
        let mut looks = self.listed.subscribe();
        while self.has(node) && looks.changed().await.is_ok() {}
    }

    fn is_news(&self, node: NodeId) -> bool {
        self.rejected().insert(node)
    }

    fn rejected(&self) -> std::sync::MutexGuard<'_, BTreeSet<NodeId>> {
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks regularly while there are connections.
    async fn keep(&self) -> Infallible {
        loop {
            if self.listed.receiver_count() > 0 {
                self.look().await;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Asks etcd. While it does not answer, because it starts or ends, the earlier answer holds.
    async fn look(&self) {
        let answer = timeout(ANSWER_WITHIN, listed(&self.etcd)).await;
        match answer {
            Ok(Ok(members)) => drop(self.listed.send_replace(members)),
            Ok(Err(error)) => tracing::debug!("etcd does not list its members: {error}"),
            Err(_) => tracing::debug!("etcd has not listed its members within {ANSWER_WITHIN:?}"),
        }
    }
}

/// A member in etcd's answer.
#[derive(Deserialize)]
struct ListedMember {
    #[serde(rename = "peerURLs", default)]
    peer_urls: Vec<String>,
}

/// The nodes of etcd's members, as of the entries that it has applied. This is what members that
/// join ask each other; unlike the call of clients, learners answer it as well.
async fn listed(etcd: &Path) -> Result<BTreeSet<NodeId>, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TokioIo::new(UnixStream::connect(etcd).await?);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
    let request = http::Request::get("/members")
        .header(http::header::HOST, "etcd")
        .body(Empty::<Bytes>::new())?;
    let ask = async {
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        let body = http_body_util::Limited::new(answer.into_body(), LONGEST_ANSWER);
        let body = body.collect().await?.to_bytes();
        if !status.is_success() {
            return Err(format!("GET /members: {status}").into());
        }
        let members: Vec<ListedMember> = serde_json::from_slice(&body)?;
        let nodes = members
            .iter()
            .filter_map(|member| members::node(&member.peer_urls));
        Ok(nodes.collect())
    };
    tokio::select! {
        answer = ask => answer,
        // It drives the request, and ends with the connection only.
        ended = connection => Err(ended.err().map_or("connection closed".into(), Into::into)),
    }
}

/// Forwards in both directions, until etcd or the peer ends the connection.
async fn carry(stream: impl AsyncRead + AsyncWrite, etcd: &Path) -> io::Result<()> {
    let (mut from_peer, mut to_peer) = tokio::io::split(stream);
    let mut first = vec![0; BUFFER];
    // At its end etcd waits for connections on which nothing has come yet.
    let length = from_peer.read(&mut first).await?;
    if length == 0 {
        return Ok(());
    }
    let (mut from_etcd, mut to_etcd) = UnixStream::connect(etcd).await?.into_split();
    let up = async {
        to_etcd.write_all(&first[..length]).await?;
        drop(first);
        tokio::io::copy(&mut from_peer, &mut to_etcd).await?;
        to_etcd.shutdown().await?;
        std::future::pending().await
    };
    tokio::select! {
        failed = up => failed,
        down = answer(&mut from_etcd, &mut to_peer) => down,
    }
}

async fn answer(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = from.read(&mut buffer).await?;
        let write = async {
            match length {
                0 => to.shutdown().await,
                _ => {
                    to.write_all(&buffer[..length]).await?;
                    to.flush().await
                }
            }
        };
        timeout(WRITE_WITHIN, write).await??;
        if length == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests;
