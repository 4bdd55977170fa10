use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proptest::prelude::*;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming};

use super::*;
use crate::identity::Identity;
use crate::testing::{NOT_BEFORE, Script, TestClock, TestCluster, TestCurator};
use crate::tls::{CertificateDer, ExpectedServer};
use crate::v1::curator_client::CuratorClient;
use crate::v1::management_client::ManagementClient;
use crate::v1::{GetClusterInfoRequest, GetNodesRequest, GetNodesResponse, WatchRequest};

const LONG: Duration = Duration::from_secs(30);

struct Fixture {
    cluster: Arc<TestCluster>,
    clock: Arc<TestClock>,
}

impl Fixture {
    fn new() -> Self {
        Self {
            cluster: Arc::new(TestCluster::new()),
            clock: TestClock::new(),
        }
    }

    async fn curator(&self) -> TestCurator {
        TestCurator::start(&self.cluster, Script::default(), self.clock.clone()).await
    }

    fn curators(&self, endpoints: impl Into<Endpoints>) -> Curators {
        self.curators_with(endpoints, patient())
    }

    fn curators_with(&self, endpoints: impl Into<Endpoints>, options: Options) -> Curators {
        let owner = self.cluster.user("owner");
        let config = tls::user_client_config(&owner, ExpectedServer::AnyNode, self.clock.clone());
        let options = Options {
            clock: self.clock.clone(),
            ..options
        };
        Curators::new(endpoints, config.expect("proper"), options)
    }
}

/// Everything takes longer on a busy host.
fn patient() -> Options {
    Options {
        connect_timeout: LONG,
        call_timeout: LONG,
        ..Options::default()
    }
}

async fn info(curators: &Curators) -> Result<(), Status> {
    ManagementClient::new(curators.channel())
        .get_cluster_info(GetClusterInfoRequest {})
        .await
        .map(drop)
}

/// A call that has begun and does not end.
async fn lasting(curators: &Curators) -> Streaming<GetNodesResponse> {
    let request = GetNodesRequest {
        node_ids: vec!["wait".to_owned()],
        ..GetNodesRequest::default()
    };
    let mut management = ManagementClient::new(curators.channel());
    let mut stream = management
        .get_nodes(request)
        .await
        .expect("served")
        .into_inner();
    assert!(stream.message().await.expect("fine").is_some());
    stream
}

/// Asserts that such a call has not ended.
async fn goes_on(stream: &mut Streaming<GetNodesResponse>) {
    let more = tokio::time::timeout(Duration::from_millis(200), stream.message()).await;
    more.expect_err("it goes on");
}

/// Repeats calls until this curator answers one.
async fn comes_to(curators: &Curators, wanted: &TestCurator) {
    let calls = async {
        while info(curators).await.is_err() || curators.current() != Some(wanted.endpoint()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let bound = tokio::time::timeout(LONG, calls).await;
    bound.expect("it comes there");
}

/// A leaf of this node that expires so many seconds after what the clock says.
fn expiring(f: &Fixture, own: &OwnCertificate, seconds: u64) -> CertificateDer<'static> {
    let identity = Identity::node(f.cluster.id, own.node());
    f.cluster.leaf(&identity, own.key().public(), |params| {
        params.not_after = params.not_before + Duration::from_secs(1000 + seconds);
    })
}

/// A client with such certificates.
fn node(f: &Fixture, own: &Arc<OwnCertificate>, curator: &TestCurator) -> Curators {
    let options = Options {
        clock: f.clock.clone(),
        presents: Some(Arc::clone(own)),
        ..patient()
    };
    let config = tls::node_client_config(own, ExpectedServer::AnyNode);
    Curators::new(vec![curator.endpoint()], config.expect("proper"), options)
}

/// Waits until the connection to the curator is replaced, and until the certificates of the old one have
/// expired.
async fn outlives(f: &Fixture, curators: &Curators, curator: &TestCurator) {
    let mut stream = lasting(curators).await;
    let mut renewals = curators.renewals();
    tokio::select! {
        never = curators.keep_renewed() => match never {},
        renewed = tokio::time::timeout(LONG, renewals.changed()) => {
            renewed.expect("in time").expect("open");
        }
    }
    assert_eq!(curators.current(), Some(curator.endpoint()));
    goes_on(&mut stream).await;
    f.clock.set(NOT_BEFORE + 1005);
    info(curators).await.expect("by the new connection");
}

#[tokio::test]
async fn a_connection_is_replaced_before_the_servers_certificate_expires() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let own = &curator.own;
    own.replace(expiring(&f, own, 4), None).expect("its own");
    let curators = f.curators(vec![curator.endpoint()]);
    info(&curators).await.expect("served");
    own.replace(expiring(&f, own, 4000), None).expect("its own");
    outlives(&f, &curators, &curator).await;
}

#[tokio::test]
async fn a_connection_is_replaced_before_the_clients_certificate_expires() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let own = OwnCertificate::new(&f.cluster.node(), f.clock.clone()).expect("proper");
    own.replace(expiring(&f, &own, 4), None).expect("its own");
    let curators = node(&f, &own, &curator);
    info(&curators).await.expect("served");
    own.replace(expiring(&f, &own, 4000), None)
        .expect("its own");
    outlives(&f, &curators, &curator).await;
}

#[tokio::test]
async fn a_connection_that_began_without_a_valid_certificate_is_replaced_when_there_is_one() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let own = OwnCertificate::new(&f.cluster.node(), f.clock.clone()).expect("proper");
    own.replace(expiring(&f, &own, 0), None).expect("its own");
    f.clock.set(NOT_BEFORE + 1001);
    let curators = node(&f, &own, &curator);
    // There is none yet.
    curators.present_renewed();
    let mut renewals = curators.renewals();
    let refused = info(&curators).await.expect_err("known by its key only");
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    own.replace(expiring(&f, &own, 4000), None)
        .expect("its own");
    curators.present_renewed();
    info(&curators).await.expect("by a new connection");
    assert!(renewals.has_changed().expect("open"));
    renewals.mark_unchanged();
    // What is new is as good as what this one began with.
    own.replace(expiring(&f, &own, 5000), None)
        .expect("its own");
    curators.present_renewed();
    info(&curators).await.expect("by the same");
    assert!(!renewals.has_changed().expect("open"));
}

#[tokio::test]
async fn one_that_is_doubted_is_left() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    let curators = f.curators(vec![first.endpoint(), second.endpoint()]);
    curators.mark_suspect();
    info(&curators).await.expect("served");
    assert_eq!(curators.current(), Some(first.endpoint()));
    curators.mark_suspect();
    comes_to(&curators, &second).await;
    // If there is no other one, a curator that is not serving is used.
    let alone = f.curators(vec![first.endpoint()]);
    info(&alone).await.expect("served");
    alone.mark_suspect();
    info(&alone).await.expect("still served");
}

/// Any node has a certificate; that does not make it a curator.
#[tokio::test]
async fn a_node_that_is_no_curator_is_asked_nothing() {
    let f = Fixture::new();
    let (curator, impostor) = (f.curator().await, f.curator().await);
    let both = vec![impostor.endpoint(), curator.endpoint()];
    let known = |servers: &[&TestCurator]| {
        let servers = servers.iter().map(|server| server.node_id).collect();
        Endpoints::from(both.clone()).only(Some(servers))
    };
    let curators = f.curators(known(&[&curator]));
    for _ in 0..3 {
        info(&curators).await.expect("by the curator");
    }
    assert_eq!(curators.current(), Some(curator.endpoint()));
    assert!(impostor.calls().is_empty());

    // If it is the only one, the call fails, and the error names it.
    let alone = Endpoints::from(vec![impostor.endpoint()]);
    let alone = f.curators(alone.only(Some([curator.node_id].into())));
    let refused = info(&alone).await.expect_err("nobody");
    assert_eq!(refused.code(), Code::Unavailable);
    let message = refused.message();
    assert!(
        message.contains(&impostor.node_id.to_string()) && message.contains("known to run"),
        "{message}"
    );

    // Two known curators may have exchanged their addresses.
    let curators = f.curators(known(&[&curator, &impostor]));
    info(&curators).await.expect("by either");
    assert_eq!(curators.current(), Some(impostor.endpoint()));
    // A connection to a node that is no longer listed is closed at once, with its calls.
    let mut stream = lasting(&curators).await;
    curators.set_endpoints(known(&[&curator]));
    let end = tokio::time::timeout(LONG, stream.message()).await;
    end.expect("it is cut").expect_err("by an error");
    info(&curators).await.expect("by the curator");
    assert_eq!(curators.current(), Some(curator.endpoint()));
}

/// An address on which nothing listens.
async fn dead() -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("an address").into()
}

/// An address on which a server listens that never answers.
async fn mute() -> (Endpoint, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = listener.local_addr().expect("an address").into();
    (endpoint, listener)
}

#[tokio::test]
async fn dead_and_mute_addresses_are_passed_over() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let (mute, _listener) = mute().await;
    let curators = f.curators(vec![dead().await, mute, dead().await, curator.endpoint()]);
    // The silent server alone would take the whole connect timeout.
    tokio::time::timeout(LONG / 2, info(&curators))
        .await
        .expect("soon")
        .expect("by the living one");
    assert_eq!(curators.current(), Some(curator.endpoint()));
}

#[tokio::test]
async fn the_first_that_answers_is_taken() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    let curators = f.curators(vec![first.endpoint(), second.endpoint()]);
    info(&curators).await.expect("served");
    assert_eq!(curators.current(), Some(first.endpoint()));
    assert!(second.calls().is_empty());
}

#[tokio::test]
async fn when_one_dies_the_next_serves() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    let curators = f.curators(vec![first.endpoint(), second.endpoint()]);
    info(&curators).await.expect("by the first");
    first.stop().await.expect("in order");
    // The call that notices may fail; one soon after does not.
    let mut failed = 0;
    while info(&curators).await.is_err() {
        failed += 1;
        assert!(failed < 3, "it does not fail over");
    }
    assert_eq!(curators.current(), Some(second.endpoint()));
}

#[tokio::test]
async fn a_stale_curator_is_left_though_its_connection_is_fine() {
    for says_so in [false, true] {
        let f = Fixture::new();
        let (own, other) = (f.curator().await, f.curator().await);
        let endpoints = Endpoints::balanced(Some(own.endpoint()), vec![other.endpoint()]);
        let curators = f.curators(endpoints);
        info(&curators).await.expect("by its own");
        assert_eq!(curators.current(), Some(own.endpoint()));
        let mut stream = lasting(&curators).await;
        own.set_stale(true, says_so).await;
        // The call that notices fails, because it may not be repeatable.
        let status = info(&curators).await.expect_err("stale");
        assert_eq!(status.code(), Code::Unavailable);
        info(&curators).await.expect("by the other");
        assert_eq!(curators.current(), Some(other.endpoint()));
        // Whether running calls end is up to their server.
        goes_on(&mut stream).await;
    }
}

/// The same timeout for an endpoint as for the call, as with a user's `--timeout`.
#[tokio::test]
async fn whoever_looks_for_a_better_one_has_time_left_to_ask() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let (mute, _listener) = mute().await;
    let curators = f.curators_with(
        Endpoints::balanced(Some(curator.endpoint()), vec![mute]),
        Options {
            connect_timeout: Duration::from_secs(6),
            call_timeout: Duration::from_secs(6),
            ..Options::default()
        },
    );
    info(&curators).await.expect("by the only one");
    curator.set_stale(true, false).await;
    info(&curators).await.expect_err("stale");
    curator.set_stale(false, false).await;
    info(&curators).await.expect("by the only one again");
}

#[tokio::test]
async fn a_stream_that_ends_as_stale_sends_the_next_one_elsewhere() {
    let f = Fixture::new();
    let (own, other) = (f.curator().await, f.curator().await);
    let curators = f.curators(vec![own.endpoint(), other.endpoint()]);
    let mut watcher = CuratorClient::new(curators.channel());
    let mut watch = watcher
        .watch(WatchRequest::default())
        .await
        .expect("served")
        .into_inner();
    assert!(watch.message().await.expect("fine").is_some());
    own.set_stale(true, false).await;
    let status = watch.message().await.expect_err("it ends");
    assert_eq!(status.code(), Code::Unavailable);
    watcher
        .watch(WatchRequest::default())
        .await
        .expect("by the other");
    assert_eq!(other.calls(), ["Watch"]);
}

#[tokio::test]
async fn a_curator_that_says_it_does_not_serve_is_passed_over_but_better_than_none() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    first.set_stale(true, true).await;
    let curators = f.curators(vec![first.endpoint(), second.endpoint()]);
    info(&curators).await.expect("by the second, at once");
    assert!(first.calls().is_empty());

    second.set_stale(true, true).await;
    let curators = f.curators(vec![first.endpoint(), second.endpoint()]);
    let status = info(&curators).await.expect_err("both are stale");
    assert!(status.message().contains("ask another one"), "{status}");
    // Not every call makes a connection to find out that no endpoint is better, and the first that
    // is serving again is found.
    second.set_stale(false, false).await;
    comes_to(&curators, &second).await;
}

#[tokio::test]
async fn new_calls_go_back_to_this_machines_own_in_time_and_old_ones_go_on() {
    let f = Fixture::new();
    let (own, other) = (f.curator().await, f.curator().await);
    let endpoints = Endpoints::balanced(Some(own.endpoint()), vec![other.endpoint()]);
    let rebalance = Duration::from_millis(100);
    let options = Options {
        rebalance,
        ..patient()
    };
    own.set_stale(true, true).await;
    let curators = f.curators_with(endpoints, options);
    info(&curators).await.expect("by the other");
    let mut stream = lasting(&curators).await;
    own.set_stale(false, false).await;
    comes_to(&curators, &own).await;
    goes_on(&mut stream).await;
}

#[tokio::test]
async fn clients_spread_over_the_curators_and_move_with_time() {
    let f = Fixture::new();
    let all = [f.curator().await, f.curator().await, f.curator().await];
    let endpoints: Vec<_> = all.iter().map(TestCurator::endpoint).collect();
    let balanced = || Endpoints::balanced(None, endpoints.clone());
    for _ in 0..60 {
        info(&f.curators(balanced())).await.expect("served");
    }
    for curator in &all {
        assert!(!curator.calls().is_empty(), "each has its share");
    }
    let options = Options {
        rebalance: Duration::ZERO,
        ..patient()
    };
    let curators = f.curators_with(balanced(), options);
    for curator in &all {
        comes_to(&curators, curator).await;
    }
}

/// A relay to a server that can be made to drop everything silently.
struct Relay {
    endpoint: Endpoint,
    /// Nothing passes any more; nothing is closed either.
    broken: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Relay {
    async fn to(curator: &TestCurator) -> Self {
        let (endpoint, listener) = mute().await;
        let broken = CancellationToken::new();
        let (to, ending) = (curator.address, broken.clone());
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut near, _) = listener.accept().await.expect("a connection");
                let mut far = TcpStream::connect(to).await.expect("TCP");
                let broken = ending.clone();
                connections.spawn(async move {
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        () = broken.cancelled() => std::future::pending().await,
                    }
                });
            }
        });
        Self {
            endpoint,
            broken,
            task,
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn a_peer_that_vanishes_without_a_word_is_found_by_keep_alive() {
    let f = Fixture::new();
    let (far, near) = (f.curator().await, f.curator().await);
    let relay = Relay::to(&far).await;
    let options = Options {
        keep_alive: Duration::from_millis(300),
        ..patient()
    };
    let curators = f.curators_with(vec![relay.endpoint.clone(), near.endpoint()], options);
    let mut stream = lasting(&curators).await;
    assert_eq!(curators.current(), Some(relay.endpoint.clone()));
    relay.broken.cancel();
    let end = tokio::time::timeout(LONG, stream.message()).await;
    end.expect("it is noticed").expect_err("it has vanished");
    // The relay still accepts connections, but nothing passes.
    comes_to(&curators, &near).await;
    assert_eq!(far.calls(), ["GetNodes"]);
}

#[tokio::test]
async fn an_endpoint_that_is_unlisted_while_it_is_connected_to_is_not_used() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    // A relay to the first one that opens only on request.
    let (slow, listener) = mute().await;
    let curators = f.curators(vec![slow]);
    let call = tokio::spawn({
        let curators = curators.clone();
        async move { info(&curators).await }
    });
    let (mut near, _) = listener.accept().await.expect("it connects");
    curators.set_endpoints(vec![second.endpoint()]);
    let mut far = TcpStream::connect(first.address).await.expect("TCP");
    let relay =
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
    let status = tokio::time::timeout(LONG, call)
        .await
        .expect("it ends")
        .expect("no panic")
        .expect_err("not by the first");
    assert!(status.message().contains("no longer in use"), "{status}");
    info(&curators).await.expect("by the second");
    assert_eq!(curators.current(), Some(second.endpoint()));
    assert!(first.calls().is_empty());
    relay.abort();
}

#[tokio::test]
async fn the_list_can_change_at_any_time() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    let curators = f.curators(vec![]);
    let status = info(&curators).await.expect_err("nobody to ask");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(crate::chain(&status).contains("no curator is known"));

    curators.set_endpoints(vec![first.endpoint()]);
    let mut stream = lasting(&curators).await;
    // Another one is preferred: new calls go there, running calls continue.
    curators.set_endpoints(vec![second.endpoint(), first.endpoint()]);
    info(&curators).await.expect("by the second");
    assert_eq!(first.calls(), ["GetNodes"]);
    goes_on(&mut stream).await;
    // It ends when its endpoint is removed from the list.
    curators.set_endpoints(vec![second.endpoint()]);
    let end = tokio::time::timeout(LONG, stream.message()).await;
    end.expect("it ends").expect_err("it was cut");
    let mut failed = 0;
    while info(&curators).await.is_err() {
        failed += 1;
        assert!(failed < 3, "it does not follow the list");
    }
    assert_eq!(curators.current(), Some(second.endpoint()));
    assert_eq!(curators.endpoints(), vec![second.endpoint()].into());
}

#[tokio::test]
async fn servers_of_other_clusters_are_refused() {
    let (ours, theirs) = (Fixture::new(), Fixture::new());
    let curator = theirs.curator().await;
    let curators = ours.curators(vec![curator.endpoint()]);
    let status = info(&curators).await.expect_err("refused");
    let why = crate::chain(&status);
    assert_eq!(status.code(), Code::Unavailable, "{why}");
    assert!(why.contains("not issued by this cluster's CA"), "{why}");
    assert!(why.contains(&curator.endpoint().to_string()), "{why}");
}

#[tokio::test]
async fn errors_name_every_endpoint() {
    let f = Fixture::new();
    let endpoints = vec![dead().await, dead().await];
    let status = info(&f.curators(endpoints.clone()))
        .await
        .expect_err("dead");
    let why = crate::chain(&status);
    for endpoint in endpoints {
        assert!(why.contains(&endpoint.to_string()), "{why}");
    }
    assert!(why.contains("refused"), "{why}");
}

#[tokio::test]
async fn calls_have_a_deadline() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let options = Options {
        call_timeout: Duration::from_millis(500),
        ..patient()
    };
    let curators = f.curators_with(vec![curator.endpoint()], options);
    let silent = GetNodesRequest {
        node_ids: vec!["silent".to_owned()],
        ..GetNodesRequest::default()
    };
    let call = ManagementClient::new(curators.channel())
        .get_nodes(silent)
        .await;
    let code = call.err().map(|status| status.code());
    assert_eq!(code, Some(Code::DeadlineExceeded));

    let bound = Duration::from_millis(10);
    let status = within(bound, std::future::pending::<Result<(), Status>>()).await;
    assert_eq!(status.expect_err("late").code(), Code::DeadlineExceeded);
}

#[test]
fn endpoints_have_these_forms() {
    for (text, shown) in [
        ("192.0.2.1:80", "192.0.2.1:80"),
        ("192.0.2.1", "192.0.2.1:7835"),
        ("2001:db8::1", "[2001:db8::1]:7835"),
        ("[2001:db8::1]", "[2001:db8::1]:7835"),
        ("[2001:db8::1]:80", "[2001:db8::1]:80"),
        ("node.example", "node.example:7835"),
        ("node.example:80", "node.example:80"),
    ] {
        let endpoint: Endpoint = text.parse().expect(text);
        assert_eq!(endpoint.to_string(), shown);
    }
    for wrong in [
        "", ":80", "a:", "a:b", "a:0", "a:65536", "a b", "http://a", "a/b", "[::1]x",
    ] {
        assert!(wrong.parse::<Endpoint>().is_err(), "{wrong:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn endpoints_round_trip(address: IpAddr, port in 1_u16..) {
        let endpoint = Endpoint::from(SocketAddr::new(address, port));
        prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
    }

    #[test]
    fn arbitrary_text_never_panics(text: String) {
        if let Ok(endpoint) = text.parse::<Endpoint>() {
            prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
        }
    }
}
