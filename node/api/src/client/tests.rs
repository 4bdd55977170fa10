use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proptest::prelude::*;
use tokio::net::TcpListener;
use tonic::Code;

use super::*;
use crate::testing::{Script, TestClock, TestCluster, TestCurator};
use crate::tls::ExpectedServer;
use crate::v1::management_client::ManagementClient;
use crate::v1::{GetClusterInfoRequest, GetNodesRequest};

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

    fn curators(&self, endpoints: Vec<Endpoint>) -> Curators {
        let owner = self.cluster.user("owner");
        let config = tls::user_client_config(&owner, ExpectedServer::AnyNode, self.clock.clone());
        let options = Options {
            clock: self.clock.clone(),
            connect_timeout: LONG,
            call_timeout: LONG,
        };
        Curators::new(endpoints, config.expect("proper"), options)
    }
}

async fn info(curators: &Curators) -> Result<(), Status> {
    ManagementClient::new(curators.channel())
        .get_cluster_info(GetClusterInfoRequest {})
        .await
        .map(drop)
}

/// An address where nobody listens.
async fn dead() -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("an address").into()
}

/// An address where someone listens who never says a word.
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
    // The mute one alone would take the whole connect time-out.
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
    // The call that finds out may fail; one soon after does not.
    let mut failed = 0;
    while info(&curators).await.is_err() {
        failed += 1;
        assert!(failed < 3, "it does not fail over");
    }
    assert_eq!(curators.current(), Some(second.endpoint()));
}

#[tokio::test]
async fn an_endpoint_that_is_unlisted_while_it_is_connected_to_is_not_used() {
    let f = Fixture::new();
    let (first, second) = (f.curator().await, f.curator().await);
    // A way to the first one that opens only when it is told to.
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
    tokio::time::timeout(LONG, call)
        .await
        .expect("it ends")
        .expect("no panic")
        .expect_err("not by the first");
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
    let mut stream = ManagementClient::new(curators.channel())
        .get_nodes(GetNodesRequest {
            node_ids: vec!["wait".to_owned()],
            ..GetNodesRequest::default()
        })
        .await
        .expect("served")
        .into_inner();
    assert!(stream.message().await.expect("fine").is_some());

    // It stays while it is wanted, and ends when it is not.
    curators.set_endpoints(vec![second.endpoint(), first.endpoint()]);
    info(&curators).await.expect("still by the first");
    assert!(second.calls().is_empty());
    curators.set_endpoints(vec![second.endpoint()]);
    let end = tokio::time::timeout(LONG, stream.message()).await;
    end.expect("it ends").expect_err("it was cut");
    let mut failed = 0;
    while info(&curators).await.is_err() {
        failed += 1;
        assert!(failed < 3, "it does not follow the list");
    }
    assert_eq!(curators.current(), Some(second.endpoint()));
    assert_eq!(curators.endpoints(), [second.endpoint()]);
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
    let owner = f.cluster.user("owner");
    let config = tls::user_client_config(&owner, ExpectedServer::AnyNode, f.clock.clone());
    let options = Options {
        clock: f.clock.clone(),
        call_timeout: Duration::from_millis(500),
        ..Options::default()
    };
    let curators = Curators::new(vec![curator.endpoint()], config.expect("proper"), options);
    let silent = GetNodesRequest {
        node_ids: vec!["silent".to_owned()],
        ..GetNodesRequest::default()
    };
    let call = ManagementClient::new(curators.channel())
        .get_nodes(silent)
        .await;
    let code = call.err().map(|status| status.code());
    assert!(
        matches!(code, Some(Code::Cancelled | Code::DeadlineExceeded)),
        "{code:?}"
    );

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
