use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

use super::*;
use crate::client::{self, Channel, Curators, Options};
use crate::identity::{Identity, NodeCredentials, P256Key, SigningKey, UserCredentials, UserName};
use crate::testing::{
    self, NOT_AFTER, NOT_BEFORE, Script, TestClock, TestCluster, TestCurator,
    insecure_client_config, p256_client_config,
};
use crate::tls::ExpectedServer;
use crate::v1::curator_client::CuratorClient;
use crate::v1::curator_local_client::CuratorLocalClient;
use crate::v1::management_client::ManagementClient;
use crate::v1::{
    GetClusterInfoRequest, GetCurrentLeaderRequest, GetNodesRequest, UpdateNodeStatusRequest,
};

mod handshakes;
mod http2;

/// Longer than anything here takes, even on a busy machine.
const LONG: Duration = Duration::from_secs(30);

struct Fixture {
    cluster: Arc<TestCluster>,
    clock: Arc<TestClock>,
    curator: TestCurator,
}

impl Fixture {
    async fn new() -> Self {
        Self::with_limits(Limits::default()).await
    }

    async fn with_limits(limits: Limits) -> Self {
        let cluster = Arc::new(TestCluster::new());
        let clock = TestClock::new();
        let node = cluster.node();
        let curator =
            TestCurator::start_as(&cluster, &node, Script::default(), clock.clone(), limits).await;
        Self {
            cluster,
            clock,
            curator,
        }
    }

    fn channel(&self, config: Arc<ClientConfig>) -> Channel {
        let options = Options {
            clock: self.clock.clone(),
            call_timeout: LONG,
            connect_timeout: LONG,
            ..Options::default()
        };
        Curators::new(vec![self.curator.endpoint()], config, options).channel()
    }

    fn as_user(&self, user: &UserCredentials) -> Channel {
        let config = tls::user_client_config(user, ExpectedServer::AnyNode, self.clock.clone());
        self.channel(config.expect("proper credentials"))
    }

    fn as_owner(&self) -> Channel {
        self.as_user(&self.cluster.user("owner"))
    }

    fn as_stranger(&self) -> Channel {
        let config = tls::possession_client_config(
            &SigningKey::generate(),
            self.cluster.parsed_ca(),
            ExpectedServer::AnyNode,
            self.clock.clone(),
        );
        self.channel(config.expect("proper"))
    }

    /// Presents any given certificates.
    fn presenting(&self, certificates: Vec<CertificateDer<'static>>, key: &SigningKey) -> Channel {
        self.channel(insecure_client_config(
            Some((certificates, key)),
            &rustls::version::TLS13,
        ))
    }

    async fn silent_stranger(&self) -> tokio_rustls::client::TlsStream<TcpStream> {
        let (config, _) = tls::first_contact_client_config(self.clock.clone()).expect("proper");
        silent(self.curator.address, config).await
    }

    fn anonymous(&self) -> Channel {
        let (config, _) = tls::first_contact_client_config(self.clock.clone()).expect("proper");
        self.channel(config)
    }
}

async fn info(channel: Channel) -> Result<(), tonic::Status> {
    ManagementClient::new(channel)
        .get_cluster_info(GetClusterInfoRequest {})
        .await
        .map(drop)
}

async fn leader(channel: Channel) -> Result<(), tonic::Status> {
    CuratorLocalClient::new(channel)
        .get_current_leader(GetCurrentLeaderRequest {})
        .await
        .map(drop)
}

fn nodes(trouble: &str) -> GetNodesRequest {
    GetNodesRequest {
        node_ids: vec![trouble.to_owned()],
        ..GetNodesRequest::default()
    }
}

#[tokio::test]
async fn each_may_call_what_it_may() {
    let f = Fixture::new().await;
    let code = |result: Result<(), tonic::Status>| result.err().map(|status| status.code());

    assert_eq!(code(info(f.as_owner()).await), None);
    assert_eq!(code(leader(f.as_owner()).await), None);
    // Without a certificate, and with a possession certificate.
    for stranger in [f.anonymous(), f.as_stranger()] {
        assert_eq!(
            code(info(stranger.clone()).await),
            Some(Code::Unauthenticated)
        );
        assert_eq!(code(leader(stranger).await), None);
    }
    // A user calls a node's method, a node its own.
    let credentials = f.cluster.node();
    let node_id = NodeId::from_public_key(&credentials.key.public()).to_string();
    let update = |channel| {
        let request = UpdateNodeStatusRequest {
            node_id: node_id.clone(),
            ..UpdateNodeStatusRequest::default()
        };
        async move {
            CuratorClient::new(channel)
                .update_node_status(request)
                .await
                .map(drop)
        }
    };
    assert_eq!(
        code(update(f.as_owner()).await),
        Some(Code::PermissionDenied)
    );
    let node = f.channel(testing::node_client_config(&credentials, f.clock.clone()));
    assert_eq!(code(update(node).await), None);
    assert_eq!(
        f.curator.calls(),
        [
            "GetClusterInfo",
            "GetCurrentLeader",
            "GetCurrentLeader",
            "GetCurrentLeader",
            "UpdateNodeStatus"
        ],
        "nothing refused reaches a handler"
    );
}

#[tokio::test]
async fn unknown_methods_are_refused_and_absent_services_say_so() {
    let f = Fixture::new().await;
    let call = |path: &'static str| {
        let mut grpc = tonic::client::Grpc::new(f.as_owner());
        async move {
            grpc.ready().await.expect("connected");
            let codec =
                tonic_prost::ProstCodec::<GetClusterInfoRequest, GetClusterInfoRequest>::default();
            grpc.unary(
                tonic::Request::new(GetClusterInfoRequest {}),
                path.parse().expect("a path"),
                codec,
            )
            .await
            .expect_err("refused")
            .code()
        }
    };
    assert_eq!(
        call("/hearth.v1.Management/DropEverything").await,
        Code::PermissionDenied
    );
    assert_eq!(
        call("/grpc.reflection.v1.ServerReflection/X").await,
        Code::PermissionDenied
    );
    assert_eq!(
        call("/hearth.v1.NodeDebug/GetState").await,
        Code::Unimplemented
    );
}

#[tokio::test]
async fn certificates_that_are_not_ours_end_the_handshake() {
    let f = Fixture::new().await;
    let key = SigningKey::generate();
    let owner = Identity::user(f.cluster.id, UserName::owner());
    let own =
        |change: fn(&mut rcgen::CertificateParams)| f.cluster.leaf(&owner, key.public(), change);
    let proper = own(|_| {});
    let other_cluster = TestCluster::new();
    let cases = [
        ("a chain", vec![proper.clone(), f.cluster.ca().clone()]),
        (
            "another CA's",
            vec![other_cluster.leaf(&owner, key.public(), |_| {})],
        ),
        (
            "expired",
            vec![own(|params| params.not_after = params.not_before)],
        ),
        (
            "not yet valid",
            vec![own(|params| params.not_before = params.not_after)],
        ),
        (
            "for servers too",
            vec![own(|params| {
                params
                    .extended_key_usages
                    .push(rcgen::ExtendedKeyUsagePurpose::ServerAuth);
            })],
        ),
        (
            "without a name",
            vec![own(|params| params.subject_alt_names = vec![])],
        ),
        (
            "of another cluster, by this CA",
            vec![f.cluster.leaf(
                &Identity::user(other_cluster.id, UserName::owner()),
                key.public(),
                |_| {},
            )],
        ),
    ];
    for (what, certificates) in cases {
        let channel = f.presenting(certificates, &key);
        // Not even methods that need no authentication.
        let status = leader(channel).await.expect_err(what);
        let why = crate::chain(&status);
        assert!(why.contains("alert"), "{what}: {why}");
    }
    assert_eq!(f.curator.calls(), [""; 0]);
    // The fixture itself was not what was rejected.
    leader(f.presenting(vec![proper], &key))
        .await
        .expect("let in");
}

#[tokio::test]
async fn tls_1_2_is_refused() {
    let f = Fixture::new().await;
    // A client hello of TLS 1.2, without the extension that would offer more:
    // version, random, no session, one suite (ECDHE-ECDSA-AES128-GCM-SHA256),
    // no compression, and the extensions for X25519 and Ed25519.
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]);
    let extensions = [[0, 10, 0, 4, 0, 2, 0, 29], [0, 13, 0, 4, 0, 2, 8, 7]].concat();
    body.extend([0, 16]);
    body.extend(extensions);
    let length = |n: usize| u8::try_from(n).expect("short");
    let mut record = vec![
        22,
        3,
        1,
        0,
        length(body.len() + 4),
        1,
        0,
        0,
        length(body.len()),
    ];
    record.extend(body);

    let mut stream = TcpStream::connect(f.curator.address).await.expect("TCP");
    stream.write_all(&record).await.expect("sent");
    let mut answer = Vec::new();
    tokio::time::timeout(LONG, stream.read_to_end(&mut answer))
        .await
        .expect("it hangs up")
        .expect("in order");
    // A fatal alert: protocol version.
    assert_eq!(answer, [21, 3, 3, 0, 2, 2, 70]);
}

#[tokio::test]
async fn plain_text_is_no_connection() {
    let f = Fixture::new().await;
    let mut stream = TcpStream::connect(f.curator.address).await.expect("TCP");
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .expect("sent");
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut answer))
        .await
        .expect("it hangs up");
    assert_eq!(f.curator.calls(), [""; 0]);
    info(f.as_owner()).await.expect("others are served");
}

#[tokio::test]
async fn a_connection_ends_with_its_certificate() {
    let f = Fixture::new().await;
    let now = NOT_BEFORE + 1000;
    let key = SigningKey::generate();
    let owner = Identity::user(f.cluster.id, UserName::owner());
    let certificate = f.cluster.leaf(&owner, key.public(), |params| {
        params.not_after -= Duration::from_secs(NOT_AFTER - now);
    });
    let user = UserCredentials {
        key,
        certificate,
        ca: f.cluster.ca().clone(),
    };
    let channel = f.as_user(&user);
    let mut stream = ManagementClient::new(channel)
        .get_nodes(nodes("wait"))
        .await
        .expect("valid in its last second")
        .into_inner();
    assert!(stream.next().await.expect("an answer").is_ok());
    f.clock.set(now + 1);
    let end = tokio::time::timeout(LONG, stream.next()).await;
    assert!(end.expect("it ends").is_some_and(|end| end.is_err()));
    // The client does not even start a connection with an expired certificate.
    let config = tls::user_client_config(&user, ExpectedServer::AnyNode, f.clock.clone());
    assert!(matches!(
        config,
        Err(TlsError::Own(CertificateError::Expired { .. }))
    ));
}

#[tokio::test]
async fn strangers_do_not_take_the_places_of_members() {
    let f = Fixture::with_limits(Limits {
        anonymous: 2,
        ..Limits::default()
    })
    .await;
    let mut held = Vec::new();
    for _ in 0..5 {
        let mut client = CuratorLocalClient::new(f.as_stranger());
        client
            .get_current_leader(GetCurrentLeaderRequest {})
            .await
            .expect("a place");
        held.push(client);
    }
    info(f.as_owner())
        .await
        .expect("members have their own places");
    leader(f.anonymous())
        .await
        .expect("and strangers always find one");
}

/// Asserts that nothing more happens on the connection until it is closed.
async fn hung_up(stream: &mut (impl tokio::io::AsyncRead + Unpin)) {
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut rest))
        .await
        .expect("it is hung up on");
}

#[tokio::test]
async fn a_stranger_who_comes_late_takes_the_place_of_the_oldest() {
    let f = Fixture::with_limits(Limits {
        anonymous: 2,
        ..Limits::default()
    })
    .await;
    let mut silent = f.silent_stranger().await;
    let second = f.as_stranger();
    leader(second.clone()).await.expect("the second place");
    leader(f.as_stranger()).await.expect("the first place");
    hung_up(&mut silent).await;
    leader(second).await.expect("who was not the oldest stays");
}

#[tokio::test]
async fn one_address_does_not_take_the_places_of_all() {
    let f = Fixture::with_limits(Limits {
        anonymous: 3,
        anonymous_per_address: 2,
        ..Limits::default()
    })
    .await;
    let mut first = f.silent_stranger().await;
    let second = f.silent_stranger().await;
    let third = f.silent_stranger().await;
    hung_up(&mut first).await;
    drop((second, third));
}

/// Admits every caller until it is set to refuse.
#[derive(Default)]
struct Members {
    deleted: CancellationToken,
}

impl Admission for Members {
    fn admit(&self, _: &Caller, _: &str) -> Result<(), tonic::Status> {
        match self.deleted.is_cancelled() {
            true => Err(tonic::Status::permission_denied("deleted")),
            false => Ok(()),
        }
    }

    fn revoked(self: Arc<Self>, peer: PeerCertificate) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            match peer.identity().and_then(crate::identity::Identity::node_id) {
                Some(_) => self.deleted.cancelled().await,
                None => std::future::pending().await,
            }
        })
    }
}

#[tokio::test]
async fn the_connection_of_a_peer_that_is_no_longer_admitted_is_cut() {
    let cluster = Arc::new(TestCluster::new());
    let clock = TestClock::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let own = OwnCertificate::new(&cluster.node(), clock.clone()).expect("proper");
    let transport = Transport::of_node(&own).expect("proper");
    let members = Arc::new(Members::default());
    let cancel = CancellationToken::new();
    let server = Server::new(transport)
        .admission(members.clone())
        .limits(Limits {
            revocation_grace: Duration::from_millis(500),
            ..Limits::default()
        });
    let serving = tokio::spawn(server.serve(listener, Services::new(), cancel.clone()));
    let deleted = cluster.node();
    let node = testing::node_client_config(&deleted, clock.clone());
    let user = tls::user_client_config(
        &cluster.user("owner"),
        ExpectedServer::AnyNode,
        clock.clone(),
    );
    // By hand, because a channel would reconnect.
    let mut of_node = silent(address, node.clone()).await;
    let mut of_user = silent(address, user.expect("proper")).await;
    members.deleted.cancel();
    hung_up(&mut of_node).await;
    // A caller that connects again gets the reason before that connection is closed, too.
    let options = Options {
        clock: clock.clone(),
        ..Options::default()
    };
    let curators = Curators::new(vec![address.into()], node, options);
    let status = info(curators.channel()).await.expect_err("deleted");
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    // Others are not cut off: after the settings nothing arrives, not even the end of the stream.
    let mut rest = Vec::new();
    let end = of_user.read_to_end(&mut rest);
    let end = tokio::time::timeout(Duration::from_millis(200), end).await;
    end.expect_err("it is open");
    cancel.cancel();
    let ended = serving.await.expect("no panic");
    ended.expect("in order");
}

/// Knows no caller at first, and every caller after a recheck, of which there may be only one.
#[derive(Default)]
struct Forgetful {
    knows: AtomicBool,
}

impl Admission for Forgetful {
    fn admit(&self, _: &Caller, _: &str) -> Result<(), tonic::Status> {
        match self.knows.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(tonic::Status::permission_denied("not known")),
        }
    }

    fn reconsider(
        self: Arc<Self>,
        caller: Caller,
        path: String,
        refusal: tonic::Status,
    ) -> BoxFuture<'static, Result<(), tonic::Status>> {
        assert_eq!(refusal.message(), "not known");
        Box::pin(async move {
            tokio::task::yield_now().await;
            assert!(!self.knows.swap(true, Ordering::SeqCst), "a second look");
            self.admit(&caller, &path)
        })
    }
}

#[tokio::test]
async fn a_refusal_can_be_reconsidered() {
    let (server, address, cancel) = {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let cancel = CancellationToken::new();
        let server = Server::new(Transport::Plain).admission(Arc::new(Forgetful::default()));
        let serving = server.serve(listener, Services::new(), cancel.clone());
        (tokio::spawn(serving), address, cancel)
    };
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
    let channel = endpoint
        .expect("proper")
        .connect()
        .await
        .expect("it listens");
    for _ in 0..3 {
        // The call has passed all checks to where its service would be.
        let mut client = CuratorLocalClient::new(channel.clone());
        let call = client.get_current_leader(GetCurrentLeaderRequest {});
        let status = call.await.expect_err("nothing is served");
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
    }
    cancel.cancel();
    let ended = server.await.expect("no panic");
    ended.expect("in order");
}

/// A TLS connection on which not even HTTP/2 is spoken.
async fn silent(
    address: SocketAddr,
    config: Arc<ClientConfig>,
) -> tokio_rustls::client::TlsStream<TcpStream> {
    let tcp = TcpStream::connect(address).await.expect("TCP");
    let name = rustls_pki_types::ServerName::try_from("x").expect("a name");
    let mut stream = tokio_rustls::TlsConnector::from(config)
        .connect(name, tcp)
        .await
        .expect("TLS");
    // The server sends its settings once it has a slot for the connection.
    stream.read_u8().await.expect("its settings");
    stream
}

#[tokio::test]
async fn strangers_leave_after_a_while() {
    let f = Fixture::with_limits(Limits {
        anonymous: 1,
        anonymous_lifetime: Duration::from_millis(200),
        ..Limits::default()
    })
    .await;
    // Silent after the handshake: no request, no HTTP/2.
    hung_up(&mut f.silent_stranger().await).await;
    leader(f.as_stranger()).await.expect("its place is free");
}

#[tokio::test]
async fn one_node_does_not_take_the_places_of_all() {
    let f = Fixture::with_limits(Limits {
        identified: 4,
        per_node: 2,
        per_node_delay: Duration::from_millis(100),
        ..Limits::default()
    })
    .await;
    let greedy = f.cluster.node();
    let as_node =
        |node: &NodeCredentials| f.channel(testing::node_client_config(node, f.clock.clone()));
    let first = as_node(&greedy);
    let second = as_node(&greedy);
    info(first.clone()).await.expect("the first place");
    info(second.clone()).await.expect("the second place");
    info(as_node(&greedy)).await.expect_err("no third place");
    info(as_node(&f.cluster.node()))
        .await
        .expect("another node");
    // A released slot is free again.
    drop(first);
    tokio::time::timeout(LONG, async {
        while info(as_node(&greedy)).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("its turn comes");
    info(second).await.expect("who is in stays in");
}

#[tokio::test]
async fn a_panic_in_a_handler_is_an_answer() {
    let f = Fixture::new().await;
    let mut client = ManagementClient::new(f.as_owner());
    let status = client.get_nodes(nodes("panic")).await.expect_err("panics");
    assert_eq!(status.code(), Code::Internal);
    assert!(!status.message().contains("asked for"), "{status}");

    let mut stream = client
        .get_nodes(nodes("panic-late"))
        .await
        .expect("begins well")
        .into_inner();
    assert!(stream.next().await.expect("an answer").is_ok());
    let status = stream.next().await.expect("an end").expect_err("panics");
    assert_eq!(status.code(), Code::Internal);
    assert!(stream.next().await.is_none());

    // The same connection still works.
    client.get_nodes(nodes("")).await.expect("served");
}

#[tokio::test]
async fn oversized_messages_are_refused() {
    let f = Fixture::new().await;
    let mut client = ManagementClient::new(f.as_owner());
    let huge = "x".repeat(10 << 20);
    let status = client.get_nodes(nodes(&huge)).await.expect_err("too large");
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    client.get_nodes(nodes("")).await.expect("served");
}

#[tokio::test]
async fn it_ends_with_calls_that_do_not() {
    let f = Fixture::with_limits(Limits {
        shutdown_grace: Duration::from_millis(200),
        ..Limits::default()
    })
    .await;
    let address = f.curator.address;
    let mut client = ManagementClient::new(f.as_owner());
    let mut stream = client
        .get_nodes(nodes("wait"))
        .await
        .expect("served")
        .into_inner();
    assert!(stream.next().await.expect("an answer").is_ok());
    tokio::time::timeout(LONG, f.curator.stop())
        .await
        .expect("it ends")
        .expect("in order");
    assert!(stream.next().await.is_some_and(|end| end.is_err()));
    assert!(
        TcpStream::connect(address).await.is_err(),
        "the port is shut"
    );
}

#[tokio::test]
async fn nothing_goes_on_when_it_is_dropped() {
    let f = Fixture::new().await;
    let channel = f.as_owner();
    let mut stream = ManagementClient::new(channel)
        .get_nodes(nodes("wait"))
        .await
        .expect("served")
        .into_inner();
    assert!(stream.next().await.expect("an answer").is_ok());
    drop(f.curator);
    let end = tokio::time::timeout(LONG, stream.next()).await;
    assert!(end.expect("it ends").is_some_and(|end| end.is_err()));
}

#[tokio::test]
async fn a_client_that_offers_no_ed25519_is_served_with_p256() {
    let f = Fixture::new().await;
    let own = &f.curator.own;
    let (identity, key) = (Identity::node(f.cluster.id, own.node()), own.key().public());
    let owner = SigningKey::generate();
    let user = Identity::user(f.cluster.id, UserName::owner());
    let p256 = P256Key::generate();
    let owners = f
        .cluster
        .p256_leaf(&user, owner.public(), p256.public(), |_| {});
    let as_owner = || f.channel(p256_client_config(&owners, &p256));

    let status = info(as_owner())
        .await
        .expect_err("there is no such leaf yet");
    assert!(
        crate::chain(&status).contains("TLS handshake failed"),
        "{status}"
    );
    let served = f
        .cluster
        .p256_leaf(&identity, key, own.p256_public_key(), |_| {});
    let leaf = f.cluster.leaf(&identity, key, |_| {});
    own.replace(leaf.clone(), Some(served.clone()))
        .expect("its own");
    info(as_owner()).await.expect("served");

    // What was presented, and what a client that offers both gets.
    let config = p256_client_config(&owners, &p256);
    let stream = silent(f.curator.address, config).await;
    let presented = stream.get_ref().1.peer_certificates().map(<[_]>::to_vec);
    assert_eq!(presented, Some(vec![served]));
    let config = insecure_client_config(None, &rustls::version::TLS13);
    let stream = silent(f.curator.address, config).await;
    let presented = stream.get_ref().1.peer_certificates().map(<[_]>::to_vec);
    assert_eq!(presented, Some(vec![leaf]));
}

#[tokio::test]
async fn its_certificate_can_be_renewed() {
    let f = Fixture::new().await;
    let own = &f.curator.own;
    let (identity, key) = (Identity::node(f.cluster.id, own.node()), own.key().public());
    let until = |seconds: u64| {
        f.cluster.leaf(&identity, key, |params| {
            params.not_after = params.not_before + Duration::from_secs(seconds);
        })
    };
    own.replace(until(2000), None).expect("its own");
    let channel = f.as_owner();
    info(channel.clone()).await.expect("valid");
    f.clock.set(NOT_BEFORE + 2001);
    let status = info(f.as_owner()).await.expect_err("expired");
    assert!(crate::chain(&status).contains("expired"), "{status}");
    own.replace(until(3000), None).expect("its own");
    info(f.as_owner()).await.expect("valid again");
}

struct Closed;

impl Admission for Closed {
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), tonic::Status> {
        // Not in the form that it has on a socket of IPv6.
        assert_eq!(caller.remote().ip(), Ipv4Addr::LOCALHOST);
        Err(tonic::Status::unavailable(format!("{path} is closed")))
    }
}

#[tokio::test]
async fn a_server_has_its_own_say_and_may_be_plain() {
    let listener = match TcpListener::bind("[::]:0").await {
        Ok(listener) => listener,
        // A kernel without IPv6.
        Err(_) => TcpListener::bind("0.0.0.0:0").await.expect("a port"),
    };
    let port = listener.local_addr().expect("an address").port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let cancel = CancellationToken::new();
    let server = Server::new(Transport::Plain).admission(Arc::new(Closed));
    let serving = tokio::spawn(server.serve(listener, Services::new(), cancel.clone()));
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"))
        .expect("a URI")
        .connect()
        .await
        .expect("connected");
    let status = CuratorLocalClient::new(channel.clone())
        .get_current_leader(GetCurrentLeaderRequest {})
        .await
        .expect_err("closed");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("is closed"), "{status}");
    // Permissions are checked first, and plain text proves nothing.
    let status = ManagementClient::new(channel)
        .get_cluster_info(GetClusterInfoRequest {})
        .await
        .expect_err("refused");
    assert_eq!(status.code(), Code::Unauthenticated);
    cancel.cancel();
    let ended = client::within(LONG, async { Ok(serving.await) }).await;
    ended
        .expect("in time")
        .expect("no panic")
        .expect("in order");
}
