//! The client against a scripted server, because a real one compacts versions and ends watches at
//! times of its own.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use hearth_api::names::KUBERNETES_SERVER;
use http::{Response, StatusCode};
use proptest::prelude::*;
use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value as Json, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::fields::Node;
use super::store::{Event, Full, Kept, Known, NAMESPACE_LIMIT};
use super::watch::{Which, watch};
use super::{ApiError, Client, MAX_ANSWER_BYTES, kinds, message, segment};

/// The requests that a server has received: method and path.
type Asked = Arc<Mutex<Vec<String>>>;

/// A server that sends these responses one after the other, and then ends.
struct Server {
    client: Client,
    asked: Asked,
    _task: JoinSet<()>,
}

impl Server {
    async fn with(answers: Vec<(u16, String)>) -> Self {
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(vec![KUBERNETES_SERVER.to_owned()]).unwrap();
        let certificate = parameters.self_signed(&key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut serving = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], private)
            .unwrap();
        serving.alpn_protocols = vec![b"h2".to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let asked = Asked::default();
        let mut task = JoinSet::new();
        let acceptor = TlsAcceptor::from(Arc::new(serving));
        task.spawn(serve(listener, acceptor, answers, asked.clone()));
        Self {
            client: Client::new(&url, tls).unwrap(),
            asked,
            _task: task,
        }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

async fn serve(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    answers: Vec<(u16, String)>,
    asked: Asked,
) {
    let mut answers = answers.into_iter();
    let (stream, _) = listener.accept().await.unwrap();
    let stream = acceptor.accept(stream).await.unwrap();
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let path = request.uri().path_and_query().unwrap();
        let line = format!("{} {path}", request.method());
        asked.lock().unwrap().push(line);
        let Some((code, body)) = answers.next() else {
            return;
        };
        let answer = Response::builder().status(code).body(()).unwrap();
        let mut sending = respond.send_response(answer, false).unwrap();
        sending.send_data(Bytes::from(body), true).unwrap();
    }
}

fn status(code: u16, words: &str) -> Json {
    json!({ "kind": "Status", "code": code, "message": words })
}

fn node(name: &str, version: &str) -> Json {
    json!({
        "metadata": { "name": name, "resourceVersion": version, "creationTimestamp": null },
        "spec": { "unknown": [1, 2] },
    })
}

fn page(version: &str, more: &str, items: &[Json]) -> (u16, String) {
    let page = json!({
        "metadata": { "resourceVersion": version, "continue": more },
        "items": items,
    });
    (200, page.to_string())
}

fn told(events: &[(&str, Json)]) -> (u16, String) {
    let line = |(what, object): &(&str, Json)| json!({ "type": what, "object": object });
    let lines: Vec<String> = events.iter().map(|event| line(event).to_string()).collect();
    (200, lines.join("\n"))
}

/// Name and version of each object.
fn shown(event: Event<Node>) -> (&'static str, Vec<String>) {
    let show = |node: &Node| format!("{}@{}", node.metadata.name, node.metadata.resource_version);
    match event {
        Event::All(all) => ("all", all.objects().values().map(show).collect()),
        Event::Changed(_, node) => ("changed", vec![show(&node)]),
        Event::Gone((_, name)) => ("gone", vec![name]),
    }
}

fn nodes(server: &Server, which: Which) -> impl Stream<Item = Result<Event<Node>, ApiError>> {
    watch(
        server.client.all(kinds::NODES),
        which,
        Some,
        Full::default(),
    )
}

#[tokio::test]
async fn a_watch_goes_on_where_it_stood_and_begins_anew_when_it_must() {
    let server = Server::with(vec![
        page("7", "next", &[node("a", "3")]),
        page("7", "", &[node("b", "4")]),
        told(&[
            ("ADDED", node("c", "8")),
            ("BOOKMARK", node("", "9")),
            ("DELETED", node("a", "10")),
        ]),
        // The server has ended the watch, and has compacted the version.
        (410, status(410, "too old").to_string()),
        page("20", "", &[node("b", "4")]),
        told(&[("ERROR", status(410, "too old"))]),
        page("30", "", &[]),
        told(&[("ERROR", status(500, "broken")), ("ADDED", node("x", "99"))]),
        told(&[("MODIFIED", node("b", "31"))]),
    ])
    .await;
    let events = nodes(&server, Which::Labelled("a=b".to_owned()));
    let events: Vec<_> = events.take(7).collect().await;
    let [all, added, gone, again, empty, broken, changed] = <[_; 7]>::try_from(events).unwrap();
    assert_eq!(
        shown(all.unwrap()),
        ("all", vec!["a@3".into(), "b@4".into()])
    );
    assert_eq!(shown(added.unwrap()), ("changed", vec!["c@8".into()]));
    assert_eq!(shown(gone.unwrap()), ("gone", vec!["a".into()]));
    assert_eq!(shown(again.unwrap()), ("all", vec!["b@4".into()]));
    assert_eq!(shown(empty.unwrap()), ("all", vec![]));
    assert_eq!(
        broken.unwrap_err().to_string(),
        "broken (HTTP 500 Internal Server Error)"
    );
    assert_eq!(shown(changed.unwrap()), ("changed", vec!["b@31".into()]));

    let asked = server.asked();
    assert_eq!(asked[0], "GET /api/v1/nodes?labelSelector=a%3Db&limit=100");
    assert!(asked[1].ends_with("&limit=100&continue=next"), "{asked:?}");
    let since = |version: &str| format!("&resourceVersion={version}");
    for (place, version) in [(2, "7"), (3, "10"), (5, "20"), (7, "30"), (8, "30")] {
        assert!(asked[place].ends_with(&since(version)), "{asked:?}");
        assert!(asked[place].contains("watch=true"), "{asked:?}");
    }
}

#[tokio::test]
async fn large_objects_are_listed_few_at_a_time() {
    let server = Server::with(vec![
        (200, " ".repeat(MAX_ANSWER_BYTES + 1)),
        page("7", "next", &[node("a", "3")]),
        page("7", "", &[node("b", "4")]),
    ])
    .await;
    let events = nodes(&server, Which::All);
    let all: Vec<_> = events.take(1).collect().await;
    let all = all.into_iter().map(|event| shown(event.unwrap()));
    let wanted = [("all", vec!["a@3".to_owned(), "b@4".to_owned()])];
    assert_eq!(all.collect::<Vec<_>>(), wanted);
    let asked = server.asked();
    for (place, limit) in [(0, "limit=100"), (1, "limit=50"), (2, "limit=50&")] {
        assert!(asked[place].contains(limit), "{asked:?}");
    }
}

/// A third of what is kept of a namespace, and a little more.
#[derive(Debug, PartialEq)]
struct Third;

impl Kept for Third {
    fn bytes(&self) -> usize {
        NAMESPACE_LIMIT / 3
    }
}

/// When the watch ends.
#[tokio::test]
async fn what_was_ignored_is_looked_for_again() {
    let deleted = || told(&[("DELETED", node("a", "8"))]);
    let server = Server::with(vec![
        page("7", "", &[node("a", "3"), node("b", "4"), node("c", "5")]),
        deleted(),
        page("9", "", &[node("b", "4"), node("c", "5")]),
        deleted(),
        deleted(),
    ])
    .await;
    let mut known = Known::default();
    let all = server.client.all(kinds::NODES);
    let events = watch(all, Which::All, |_: Node| Some(Third), known.full());
    let mut events = std::pin::pin!(events);
    let mut next = async || {
        known.take(events.next().await.unwrap().unwrap());
        let names = known.all().unwrap().keys();
        names.map(|(_, name)| name.clone()).collect::<String>()
    };
    for wanted in ["ab", "b", "bc", "bc", "bc"] {
        assert_eq!(next().await, wanted);
    }
    let asked = server.asked();
    let lists: Vec<_> = asked
        .iter()
        .map(|asked| !asked.contains("watch=true"))
        .collect();
    assert_eq!(lists, [true, false, true, false, false]);
}

#[tokio::test]
async fn one_object_can_be_followed_that_comes_and_goes() {
    let server = Server::with(vec![
        page("7", "", &[]),
        told(&[("ADDED", node("a", "8")), ("DELETED", node("a", "9"))]),
    ])
    .await;
    let events = nodes(&server, Which::Named("a".to_owned()));
    let events: Vec<_> = events
        .take(3)
        .map(|event| shown(event.unwrap()))
        .collect()
        .await;
    let wanted = [
        ("all", vec![]),
        ("changed", vec!["a@8".to_owned()]),
        ("gone", vec!["a".to_owned()]),
    ];
    assert_eq!(events, wanted);
    for asked in server.asked() {
        let selector = "?fieldSelector=metadata.name%3Da&";
        assert!(asked.contains(selector), "{asked}");
    }
}

#[tokio::test]
async fn requests_say_what_is_meant_and_errors_are_the_servers_words() {
    let made = node("a", "1").to_string();
    let server = Server::with(vec![
        (201, made.clone()),
        (200, made.clone()),
        (200, made.clone()),
        (404, status(404, "not found").to_string()),
        (409, status(409, "changed").to_string()),
        (500, "[-]etcd failed".to_owned()),
        (200, "no JSON".to_owned()),
    ])
    .await;
    let client = &server.client;
    let (leases, roles) = (
        client.within("kube-system", kinds::LEASES),
        client.all(kinds::CLUSTER_ROLES),
    );
    let made = leases.create(json!({})).await.unwrap();
    assert_eq!(made["metadata"]["name"], "a");
    roles.apply("hearth:node", &json!({})).await.unwrap();
    leases.merge("a", &json!({})).await.unwrap();
    assert_eq!(leases.get::<Json>("b").await.unwrap(), None);
    let error = leases.delete("b").await.unwrap_err();
    assert!(error.is(StatusCode::CONFLICT), "{error}");
    let error = client.text("/readyz").await.unwrap_err();
    assert!(error.to_string().starts_with("[-]etcd failed"), "{error}");
    let error = leases.get::<Json>("b").await.unwrap_err();
    assert!(matches!(error, ApiError::Json(_)), "{error}");
    let below = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/hearth:node";
    assert_eq!(
        server.asked(),
        [
            format!("POST {below}?fieldManager=hearth"),
            format!("PATCH {role}?fieldManager=hearth&force=true"),
            format!("PATCH {below}/a"),
            format!("GET {below}/b"),
            format!("DELETE {below}/b"),
            "GET /readyz".to_owned(),
            format!("GET {below}/b"),
        ]
    );
    // It accepts no other connection.
    let error = client.text("/readyz").await.unwrap_err();
    assert!(matches!(error, ApiError::Connection(_)), "{error}");
}

#[test]
fn an_address_is_checked() {
    let tls = || {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth()
    };
    for wrong in [
        "",
        "x",
        "http://127.0.0.1:1",
        "https://127.0.0.1",
        "https://:1",
        "/x",
    ] {
        let error = Client::new(wrong, tls()).unwrap_err();
        assert!(
            error.to_string().contains("https://ADDRESS:PORT"),
            "{error}"
        );
    }
}

#[test]
fn no_name_makes_another_path() {
    for name in ["a", "hearth:node", "web.default", "pvc-0b2f8c4e"] {
        assert_eq!(segment(name).unwrap(), name);
    }
    for wrong in ["", ".", "..", "a/b", "a?b", "a#b", "a%2fb", "a b", "ä"] {
        assert!(matches!(segment(wrong), Err(ApiError::Name(_))), "{wrong}");
    }
}

proptest! {
    #[test]
    fn any_words_of_a_failure_are_told(said: Vec<u8>) {
        prop_assert!(message(&said).chars().count() <= super::MAX_SHOWN_CHARS);
    }
}
