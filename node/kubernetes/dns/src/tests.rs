//! The server on real sockets: valid and invalid queries, and upstream name servers that misbehave.

mod upstreams;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use hearth_api::ranges::ClusterRanges;
use hearth_base::event::{self, Writer};
use hearth_base::testing::within_timeout;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::answer::{self, Received};
use super::forward::{ForwardError, Forwarder};
use super::serve::{self, Server};
use super::upstream::Asked;
use super::wire::Transport;
use super::zone::{Endpoint, Port, Service, Slice, Target, Zone};

const RANGES: ClusterRanges = ClusterRanges::DEFAULT;
const HOME: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Endpoints of the large service: too many for a datagram.
const MANY: u8 = 120;

fn zone(server: Ipv4Addr) -> Zone {
    let (mut services, mut slices) = (BTreeMap::new(), BTreeMap::new());
    let mut service = |name: &str, target| {
        let ports = vec![Port {
            name: "http".into(),
            protocol: "TCP".into(),
            number: 80,
        }];
        let key = ("default".to_owned(), name.to_owned());
        services.insert(key, Service { target, ports });
    };
    service("web", Target::Addresses(vec![[10, 224, 0, 7].into()]));
    service("large", Target::Headless);
    service("away", Target::Elsewhere("www.example.com".into()));
    service(
        "near",
        Target::Elsewhere("web.default.svc.cluster.local".into()),
    );
    service("here", Target::Elsewhere("localhost".into()));
    let circle = "circle.default.svc.cluster.local";
    service("circle", Target::Elsewhere(circle.into()));
    let pods = (1..=MANY).map(|last| Endpoint {
        address: [10, 208, 9, last].into(),
        hostname: None,
        ports: Vec::new(),
    });
    let slice = Slice {
        service: "large".to_owned(),
        endpoints: pods.collect(),
    };
    slices.insert(("default".to_owned(), "large-x".to_owned()), slice);
    Zone::new(&services, &slices, RANGES, server)
}

/// A server on this machine.
struct Served {
    at: SocketAddr,
    zone: Writer<Arc<Zone>>,
    _tasks: JoinSet<()>,
    _files: tempfile::TempDir,
}

impl Served {
    /// A server with these objects and this `resolv.conf`; all name servers use this port.
    async fn with(resolv_conf: &str, port: u16) -> Self {
        let served = Self::ignorant(resolv_conf, port).await;
        served.zone.set(Arc::new(zone([10, 208, 1, 1].into())));
        served
    }

    async fn ignorant(resolv_conf: &str, port: u16) -> Self {
        let files = tempfile::tempdir().unwrap();
        let path = files.path().join("resolv.conf");
        std::fs::write(&path, resolv_conf).unwrap();
        let (zone, value) = event::value();
        let server = Arc::new(Server {
            zone: value,
            forwarder: Arc::new(Forwarder::at_port(path, port, RANGES)),
            ranges: RANGES,
            admits: |_, _| true,
        });
        let (socket, listener) = loop {
            let socket = UdpSocket::bind((HOME, 0)).await.unwrap();
            let at = socket.local_addr().unwrap();
            if let Ok(listener) = TcpListener::bind(at).await {
                break (socket, listener);
            }
        };
        let at = socket.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        let both = server.clone();
        tasks.spawn(async move { serve::datagrams(&both, socket).await.unwrap() });
        tasks.spawn(async move { serve::streams(server, listener).await.unwrap() });
        Self {
            at,
            zone,
            _tasks: tasks,
            _files: files,
        }
    }

    async fn raw(&self, question: &[u8]) -> Vec<u8> {
        let socket = UdpSocket::bind((HOME, 0)).await.unwrap();
        socket.connect(self.at).await.unwrap();
        socket.send(question).await.unwrap();
        let mut buffer = vec![0; 65536];
        let size = within_timeout("an answer", socket.recv(&mut buffer))
            .await
            .unwrap();
        buffer.truncate(size);
        buffer
    }

    async fn ask(&self, question: &Message) -> Message {
        let bytes = self.raw(&question.to_vec().unwrap()).await;
        Message::from_vec(&bytes).unwrap()
    }

    async fn ask_by_stream(&self, question: &Message) -> Message {
        let mut stream = TcpStream::connect(self.at).await.unwrap();
        let bytes = question.to_vec().unwrap();
        // In two segments, as in a real network.
        let mut framed = u16::try_from(bytes.len()).unwrap().to_be_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        stream.write_all(&framed[..3]).await.unwrap();
        stream.flush().await.unwrap();
        stream.write_all(&framed[3..]).await.unwrap();
        let answer = async {
            let size = stream.read_u16().await.unwrap();
            let mut bytes = vec![0; size.into()];
            stream.read_exact(&mut bytes).await.unwrap();
            bytes
        };
        Message::from_vec(&within_timeout("an answer", answer).await).unwrap()
    }

    /// The addresses of a name.
    async fn resolve(&self, name: &str) -> Result<Vec<String>, ResponseCode> {
        let answer = self.ask(&question(name, RecordType::A)).await;
        match answer.metadata.response_code {
            ResponseCode::NoError => Ok(answer.answers.iter().map(shown).collect()),
            code => Err(code),
        }
    }
}

fn shown(record: &Record) -> String {
    record.data.to_string()
}

fn question(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

/// A scripted upstream name server; it counts its queries.
async fn other(reply: fn(Message) -> Option<Message>) -> (u16, Arc<std::sync::atomic::AtomicU32>) {
    let socket = UdpSocket::bind((HOME, 0)).await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let asked = Arc::<std::sync::atomic::AtomicU32>::default();
    let count = asked.clone();
    tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        loop {
            let (size, from) = socket.recv_from(&mut buffer).await.unwrap();
            count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let message = Message::from_vec(&buffer[..size]).unwrap();
            if let Some(reply) = reply(message) {
                let bytes = reply.to_vec().unwrap();
                socket.send_to(&bytes, from).await.unwrap();
            }
        }
    });
    (port, asked)
}

fn good(question: Message) -> Option<Message> {
    let name = question.queries[0].name.clone();
    let mut reply = question.into_response();
    let data = RData::A(Ipv4Addr::new(192, 0, 2, 80).into());
    reply.add_answer(Record::from_rdata(name, 60, data));
    Some(reply)
}

#[tokio::test]
async fn services_are_resolved_by_datagram_and_by_stream() {
    let served = Served::with("", 1).await;
    let name = "WeB.default.svc.cluster.local.";
    let asked = question(name, RecordType::A);
    for answer in [served.ask(&asked).await, served.ask_by_stream(&asked).await] {
        assert_eq!(answer.metadata.id, 7);
        assert!(answer.metadata.authoritative && answer.metadata.recursion_available);
        assert_eq!(
            answer.answers.iter().map(shown).collect::<Vec<_>>(),
            ["10.224.0.7"]
        );
        // The letter case of the question is preserved.
        assert_eq!(answer.queries[0].name.to_ascii(), name);
        assert_eq!(answer.answers[0].ttl, 5);
    }
    let near = served.resolve("near.default.svc.cluster.local.").await;
    let near = near.unwrap();
    assert_eq!(near, ["web.default.svc.cluster.local.", "10.224.0.7"]);
    assert_eq!(served.resolve("localhost.").await.unwrap(), ["127.0.0.1"]);
    let here = served.resolve("here.default.svc.cluster.local.").await;
    assert_eq!(here.unwrap(), ["localhost.", "127.0.0.1"]);
}

#[tokio::test]
async fn nothing_and_no_such_name_are_told_apart() {
    let served = Served::with("", 1).await;
    let web = "web.default.svc.cluster.local.";
    let nothing = served.ask(&question(web, RecordType::AAAA)).await;
    assert_eq!(nothing.metadata.response_code, ResponseCode::NoError);
    assert!(nothing.answers.is_empty());
    assert_eq!(nothing.authorities[0].record_type(), RecordType::SOA);
    let absent = "nobody.default.svc.cluster.local.";
    let absent = served.ask(&question(absent, RecordType::A)).await;
    assert_eq!(absent.metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(absent.authorities[0].record_type(), RecordType::SOA);
    let circle = served.resolve("circle.default.svc.cluster.local.").await;
    assert_eq!(circle, Err(ResponseCode::ServFail));
}

#[tokio::test]
async fn what_does_not_fit_says_so_and_comes_by_stream() {
    let served = Served::with("", 1).await;
    let mut asked = question("large.default.svc.cluster.local.", RecordType::A);
    for (payload, limit) in [(None, 512), (Some(65_000), 1232), (Some(600), 600)] {
        if let Some(payload) = payload {
            let mut edns = Edns::new();
            edns.set_max_payload(payload);
            asked.set_edns(edns);
        }
        let bytes = served.raw(&asked.to_vec().unwrap()).await;
        assert!(bytes.len() <= limit, "{} for {payload:?}", bytes.len());
        let answer = Message::from_vec(&bytes).unwrap();
        assert!(answer.metadata.truncation);
        assert!(answer.answers.len() > 10);
        assert_eq!(answer.edns.is_some(), payload.is_some());
    }
    let whole = served.ask_by_stream(&asked).await;
    assert!(!whole.metadata.truncation);
    assert_eq!(whole.answers.len(), usize::from(MANY));
}

#[tokio::test]
async fn before_anything_is_known_our_names_fail_and_others_work() {
    let (port, _) = other(good).await;
    let served = Served::ignorant("nameserver 127.0.0.1", port).await;
    let web = "web.default.svc.cluster.local.";
    assert_eq!(served.resolve(web).await, Err(ResponseCode::ServFail));
    assert_eq!(served.resolve("a.example.").await.unwrap(), ["192.0.2.80"]);
    let zone = zone(HOME);
    served.zone.set(Arc::new(zone));
    assert_eq!(served.resolve(web).await.unwrap(), ["10.224.0.7"]);
}

#[tokio::test]
async fn names_of_others_are_asked_of_them_and_kept() {
    let (port, asked) = other(good).await;
    let served = Served::with("nameserver 127.0.0.1", port).await;
    for _ in 0..3 {
        assert_eq!(served.resolve("a.example.").await.unwrap(), ["192.0.2.80"]);
    }
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 1);
    let away = served.resolve("away.default.svc.cluster.local.").await;
    assert_eq!(away.unwrap(), ["www.example.com.", "192.0.2.80"]);
    // Without the RD flag the query is refused.
    let mut alone = question("b.example.", RecordType::A);
    alone.metadata.recursion_desired = false;
    let answer = served.ask(&alone).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::Refused);
    // Queries for the cluster domain are never forwarded.
    let absent = served.resolve("nobody.default.svc.cluster.local.").await;
    assert_eq!(absent, Err(ResponseCode::NXDomain));
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 2);
}

#[tokio::test]
async fn what_is_large_is_told_and_not_kept() {
    fn large(question: Message) -> Option<Message> {
        let mut reply = good(question)?;
        let one = reply.answers[0].clone();
        reply.answers.extend(vec![one; 99]);
        Some(reply)
    }
    let (port, asked) = other(large).await;
    let served = Served::with("nameserver 127.0.0.1", port).await;
    let question = question("a.example.", RecordType::A);
    for _ in 0..2 {
        let answer = served.ask_by_stream(&question).await;
        assert_eq!(answer.answers.len(), 100);
    }
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 2);
}

#[tokio::test]
async fn without_name_servers_there_is_no_waiting() {
    for resolv_conf in ["", "nameserver 10.208.1.1\nnameserver nonsense\n"] {
        let served = Served::with(resolv_conf, 1).await;
        let began = std::time::Instant::now();
        let answer = served.resolve("a.example.").await;
        assert_eq!(answer, Err(ResponseCode::ServFail));
        assert!(began.elapsed() < Duration::from_secs(1));
    }
}

#[tokio::test]
async fn a_name_server_that_lies_or_is_silent_harms_nobody() {
    fn liar(question: Message) -> Option<Message> {
        let mut reply = good(question)?;
        reply.metadata.id ^= 1;
        Some(reply)
    }
    fn other_question(mut question: Message) -> Option<Message> {
        question.queries[0].set_name(Name::from_ascii("other.example.").unwrap());
        good(question)
    }
    for reply in [liar, other_question, |_| None] {
        let (port, _) = other(reply).await;
        let served = Served::with("nameserver 127.0.0.1", port).await;
        let began = std::time::Instant::now();
        // Meanwhile other queries are answered.
        let (bad, fine) = tokio::join!(
            served.resolve("a.example."),
            served.resolve("web.default.svc.cluster.local.")
        );
        assert_eq!(bad, Err(ResponseCode::ServFail));
        assert_eq!(fine.unwrap(), ["10.224.0.7"]);
        assert!(began.elapsed() < Duration::from_secs(8));
    }
}

#[tokio::test]
async fn the_next_name_server_is_asked_when_one_is_dead() {
    // There is no server at the same port of another address of this machine.
    let (port, _) = other(good).await;
    let servers = "nameserver 127.0.0.99\nnameserver 127.0.0.1\n";
    let served = Served::with(servers, port).await;
    assert_eq!(served.resolve("a.example.").await.unwrap(), ["192.0.2.80"]);
    let began = std::time::Instant::now();
    assert_eq!(served.resolve("b.example.").await.unwrap(), ["192.0.2.80"]);
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "asks the good one first"
    );
}

#[tokio::test]
async fn strangers_get_nothing() {
    let (_zone, value) = event::value();
    let server = Server {
        zone: value,
        forwarder: Arc::new(Forwarder::new("/nonexistent".into(), RANGES)),
        ranges: RANGES,
        admits: serve::pods,
    };
    let socket = UdpSocket::bind((HOME, 0)).await.unwrap();
    let at = socket.local_addr().unwrap();
    let asking = async {
        let socket = UdpSocket::bind((HOME, 0)).await.unwrap();
        let question = question("localhost.", RecordType::A).to_vec().unwrap();
        socket.send_to(&question, at).await.unwrap();
        let mut buffer = [0; 512];
        let answer = socket.recv(&mut buffer);
        tokio::time::timeout(Duration::from_millis(300), answer).await
    };
    tokio::select! {
        outcome = serve::datagrams(&server, socket) => panic!("{outcome:?}"),
        answer = asking => assert!(answer.is_err()),
    }
}

#[tokio::test]
async fn streams_that_talk_nonsense_end_and_others_go_on() {
    let served = Served::with("", 1).await;
    let mut bad = TcpStream::connect(served.at).await.unwrap();
    bad.write_all(&[0, 3, 1, 2, 3]).await.unwrap();
    let mut rest = Vec::new();
    let end = within_timeout("the end", bad.read_to_end(&mut rest)).await;
    assert_eq!(end.unwrap(), 0);
    let web = question("web.default.svc.cluster.local.", RecordType::A);
    assert_eq!(served.ask_by_stream(&web).await.answers.len(), 1);
}

static ZONE: LazyLock<Zone> = LazyLock::new(|| zone(HOME));

/// Feeds bytes to the parser; a panic is a bug.
fn digest(bytes: &[u8]) {
    for transport in [Transport::Udp, Transport::Tcp] {
        match answer::read(bytes, transport) {
            Received::Noise => {}
            Received::Wrong(answer) => {
                assert!(answer.len() <= 1232);
                assert!(answer[2] & 0x80 != 0, "an answer is not a query");
            }
            Received::Question(question) => {
                let local = answer::look_up(Some(&*ZONE), &RANGES, &question.query);
                if let answer::Local::Reply(reply) = local {
                    let encoded = question.encode(&reply);
                    let answer = Message::from_vec(&encoded).unwrap();
                    assert_eq!(answer.queries, std::slice::from_ref(&question.query));
                    assert!(transport == Transport::Tcp || encoded.len() <= 1232);
                }
            }
        }
    }
}

#[test]
fn odd_questions_get_short_answers() {
    let wrong = |bytes: &[u8]| match answer::read(bytes, Transport::Udp) {
        Received::Wrong(answer) => ResponseCode::from(0, answer[3] & 0xf),
        Received::Noise => panic!("noise"),
        Received::Question(_) => panic!("a question"),
    };
    let name = "web.default.svc.cluster.local.";
    let mut update = question(name, RecordType::A);
    update.metadata.op_code = OpCode::Update;
    assert_eq!(wrong(&update.to_vec().unwrap()), ResponseCode::NotImp);
    let mut two = question(name, RecordType::A);
    two.add_query(Query::query(Name::root(), RecordType::A));
    assert_eq!(wrong(&two.to_vec().unwrap()), ResponseCode::FormErr);
    let all = question("cluster.local.", RecordType::AXFR);
    assert_eq!(wrong(&all.to_vec().unwrap()), ResponseCode::Refused);
    let mut chaos = question("version.bind.", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert_eq!(wrong(&chaos.to_vec().unwrap()), ResponseCode::Refused);

    let reply = question(name, RecordType::A).into_response();
    let noise = answer::read(&reply.to_vec().unwrap(), Transport::Udp);
    assert!(matches!(noise, Received::Noise), "answers are not answered");
    assert!(matches!(
        answer::read(&[0; 11], Transport::Udp),
        Received::Noise
    ));
}

#[test]
fn a_name_that_points_at_itself_is_refused_quickly() {
    // One question, whose name is a pointer to that very pointer; then one that
    // points to a chain of pointers, each to the one before.
    let mut itself = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    itself.extend([0xc0, 12, 0, 1, 0, 1]);
    digest(&itself);
    let mut chain = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
    for at in (12..4000_u16).step_by(2) {
        chain.extend((0xc000 | at.saturating_sub(2).max(12)).to_be_bytes());
    }
    digest(&chain);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_break_nothing(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        digest(&bytes);
    }

    #[test]
    fn a_header_with_arbitrary_bytes_breaks_nothing(
        additional in 0_u8..3,
        rest in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, additional];
        bytes.extend(rest);
        digest(&bytes);
    }

    #[test]
    fn a_damaged_question_breaks_nothing(
        at in 0_usize..60,
        with in any::<u8>(),
        cut in 0_usize..60,
        name in "[a-z_*.-]{0,40}",
    ) {
        let Ok(name) = Name::from_ascii(&name) else { return Ok(()) };
        let mut message = question("x.", RecordType::A);
        message.queries[0].set_name(name);
        message.set_edns(Edns::new());
        let Ok(mut bytes) = message.to_vec() else { return Ok(()) };
        if let Some(byte) = bytes.get_mut(at) {
            *byte = with;
        }
        bytes.truncate(bytes.len().saturating_sub(cut.saturating_sub(20)));
        digest(&bytes);
    }

    #[test]
    fn any_name_of_ours_has_an_answer_that_is_ours(name in "([a-z0-9_-]{1,12}\\.){0,6}cluster\\.local") {
        let Ok(name) = Name::from_ascii(&name) else { return Ok(()) };
        for kind in [RecordType::A, RecordType::SRV, RecordType::ANY, RecordType::PTR] {
            let local = answer::look_up(Some(&*ZONE), &RANGES, &Query::query(name.clone(), kind));
            prop_assert!(!matches!(local, answer::Local::Foreign));
        }
    }
}

/// Answers for one name only, and is silent about all others.
fn good_for_one(question: Message) -> Option<Message> {
    let name = question.queries[0].name.to_ascii();
    (name == "answered.example.").then(|| good(question))?
}

#[tokio::test]
async fn a_client_that_asks_for_much_keeps_nobody_from_asking() {
    let (port, asked) = other(good_for_one).await;
    let served = Served::with("nameserver 127.0.0.1\n", port).await;
    let greedy = UdpSocket::bind(("127.0.0.2", 0)).await.unwrap();
    greedy.connect(served.at).await.unwrap();
    for number in 0..1000 {
        let name = format!("n{number}.silent.example.");
        let bytes = question(&name, RecordType::A).to_vec().unwrap();
        greedy.send(&bytes).await.unwrap();
        tokio::task::yield_now().await;
    }
    let mut streams = Vec::new();
    for _ in 0..40 {
        let from = tokio::net::TcpSocket::new_v4().unwrap();
        from.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        streams.push(from.connect(served.at).await.unwrap());
    }
    // It has as many as one may have: the oldest has ended.
    let ended = within_timeout("the end of the oldest", streams[0].read_u8()).await;
    assert!(ended.is_err());

    let wanted = question("answered.example.", RecordType::A);
    for answer in [
        served.ask(&wanted).await,
        served.ask_by_stream(&wanted).await,
    ] {
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
        assert_eq!(shown(&answer.answers[0]), "192.0.2.80");
    }
    assert!(asked.load(std::sync::atomic::Ordering::SeqCst) >= 1);
}
