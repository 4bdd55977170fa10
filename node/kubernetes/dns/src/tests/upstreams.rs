//! Name servers as they are: old, or behind devices that change messages. They answer with bytes, on real
//! sockets of both transports.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use super::*;

/// The response to a query, given the question, whether it has EDNS, and the transport. By TCP `None`
/// closes the connection.
type Script = fn(&Asking<'_>) -> Option<Vec<u8>>;

/// The queries to a name server: by which transport, and whether with EDNS.
type Log = Arc<Mutex<Vec<(Transport, bool)>>>;

/// A query as a name server has received it.
struct Asking<'a> {
    bytes: &'a [u8],
    by: Transport,
}

impl Asking<'_> {
    /// Every query of the forwarder ends with an OPT record, or with its question.
    fn edns(&self) -> bool {
        self.bytes[11] == 1
    }

    fn question(&self) -> &[u8] {
        let end = self.bytes.len() - usize::from(self.edns()) * 11;
        &self.bytes[12..end]
    }

    /// A response with this question.
    fn response_with(&self, flags: u8, code: u8, question: &[u8], more: &[&[u8]]) -> Vec<u8> {
        let mut bytes = self.bytes[..2].to_vec();
        bytes.extend([0x81 | flags, 0x80 | code, 0, 1]);
        bytes.extend([0, u8::try_from(more.len()).unwrap(), 0, 0, 0, 0]);
        bytes.extend_from_slice(question);
        bytes.extend(more.concat());
        bytes
    }

    fn response(&self, flags: u8, code: u8, answers: &[&[u8]]) -> Vec<u8> {
        self.response_with(flags, code, self.question(), answers)
    }
}

/// A name server that does everything right.
fn right(asking: &Asking<'_>) -> Option<Vec<u8>> {
    Some(asking.response(0, 0, &[ADDRESS]))
}

/// The TC flag.
const MORE: u8 = 2;
/// 192.0.2.80, for an hour; the owner is the name of the question.
const ADDRESS: &[u8] = &[0xc0, 12, 0, 1, 0, 1, 0, 0, 14, 16, 0, 4, 192, 0, 2, 80];

/// Name servers at addresses of this machine, all at one port. They note what they were asked.
struct Upstreams {
    resolv_conf: String,
    port: u16,
    asked: Vec<Log>,
    _tasks: JoinSet<()>,
}

impl Upstreams {
    async fn with(scripts: &[Script]) -> Self {
        loop {
            if let Some(upstreams) = Self::try_with(scripts).await {
                return upstreams;
            }
        }
    }

    /// `None` if the port is not free everywhere.
    async fn try_with(scripts: &[Script]) -> Option<Self> {
        let mut upstreams = Self {
            resolv_conf: String::new(),
            port: 0,
            asked: Vec::new(),
            _tasks: JoinSet::new(),
        };
        for (last, script) in (1..).zip(scripts.iter().copied()) {
            let address = IpAddr::from([127, 0, 0, last]);
            let socket = UdpSocket::bind((address, upstreams.port)).await.ok()?;
            upstreams.port = socket.local_addr().unwrap().port();
            let listener = TcpListener::bind((address, upstreams.port)).await.ok()?;
            upstreams.resolv_conf += &format!("nameserver {address}\n");
            let asked = Log::default();
            upstreams.asked.push(asked.clone());
            upstreams
                ._tasks
                .spawn(datagrams(socket, script, asked.clone()));
            upstreams._tasks.spawn(streams(listener, script, asked));
        }
        Some(upstreams)
    }

    async fn served(&self) -> Served {
        Served::with(&self.resolv_conf, self.port).await
    }

    fn asked(&self, server: usize) -> Vec<(Transport, bool)> {
        let asked = self.asked[server].lock();
        asked.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn datagrams(socket: UdpSocket, script: Script, asked: Log) {
    let mut buffer = vec![0; 4096];
    loop {
        let (size, from) = socket.recv_from(&mut buffer).await.unwrap();
        let (bytes, by) = (&buffer[..size], Transport::Udp);
        let asking = Asking { bytes, by };
        asked.lock().unwrap().push((by, asking.edns()));
        if let Some(response) = script(&asking) {
            socket.send_to(&response, from).await.unwrap();
        }
    }
}

async fn streams(listener: TcpListener, script: Script, asked: Log) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let size = stream.read_u16().await.unwrap();
        let mut bytes = vec![0; size.into()];
        stream.read_exact(&mut bytes).await.unwrap();
        let (bytes, by) = (&bytes[..], Transport::Tcp);
        let asking = Asking { bytes, by };
        asked.lock().unwrap().push((by, asking.edns()));
        if let Some(response) = script(&asking) {
            let size = u16::try_from(response.len()).unwrap();
            stream.write_u16(size).await.unwrap();
            stream.write_all(&response).await.unwrap();
        }
    }
}

const UDP: Transport = Transport::Udp;
const TCP: Transport = Transport::Tcp;

#[tokio::test]
async fn a_name_server_without_edns_is_asked_without_and_remembered() {
    fn format_error(asking: &Asking<'_>) -> Option<Vec<u8>> {
        // Some return the header only.
        let header = [&asking.bytes[..2], &[0x81, 0x81, 0, 0, 0, 0, 0, 0, 0, 0]].concat();
        if asking.edns() {
            Some(header)
        } else {
            right(asking)
        }
    }
    fn not_implemented(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let refusal = asking.response(0, 4, &[]);
        if asking.edns() {
            Some(refusal)
        } else {
            right(asking)
        }
    }
    fn bad_version(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let mut refusal = asking.response(0, 0, &[]);
        refusal[11] = 1;
        refusal.extend([0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0]);
        if asking.edns() {
            Some(refusal)
        } else {
            right(asking)
        }
    }
    for script in [format_error, not_implemented, bad_version] {
        let upstreams = Upstreams::with(&[script]).await;
        let served = upstreams.served().await;
        for name in ["a.example.", "b.example.", "c.example."] {
            assert_eq!(served.resolve(name).await.unwrap(), ["192.0.2.80"]);
        }
        let without = (UDP, false);
        assert_eq!(upstreams.asked(0), [(UDP, true), without, without, without]);
    }
}

#[tokio::test]
async fn the_next_name_server_is_asked_when_one_answers_with_an_error() {
    let scripts: [Script; 4] = [
        |asking| Some(asking.response(0, 1, &[])),
        |asking| Some(asking.response(0, 2, &[])),
        |asking| Some(asking.response(0, 4, &[])),
        |asking| Some(asking.response(0, 5, &[])),
    ];
    for (script, code) in scripts.into_iter().zip([
        ResponseCode::FormErr,
        ResponseCode::ServFail,
        ResponseCode::NotImp,
        ResponseCode::Refused,
    ]) {
        let upstreams = Upstreams::with(&[script, right]).await;
        let served = upstreams.served().await;
        assert_eq!(served.resolve("a.example.").await.unwrap(), ["192.0.2.80"]);
        assert_eq!(upstreams.asked(1), [(UDP, true)]);
        // It is not EDNS that the query failed for: without it is the same.
        let alone = Upstreams::with(&[script]).await;
        let served = alone.served().await;
        for _ in 0..2 {
            assert_eq!(served.resolve("a.example.").await, Err(code));
        }
        let last = alone.asked(0).len() / 2;
        assert_eq!(alone.asked(0)[last], (UDP, true));
    }
}

#[tokio::test]
async fn a_name_server_that_lower_cases_the_question_is_understood() {
    fn lower(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let question = asking.question().to_ascii_lowercase();
        Some(asking.response_with(0, 0, &question, &[ADDRESS]))
    }
    let upstreams = Upstreams::with(&[lower]).await;
    let served = upstreams.served().await;
    for name in ["wWw.Example.", "WWW.example.", "www.example."] {
        let answer = served.ask(&question(name, RecordType::A)).await;
        assert_eq!(shown(&answer.answers[0]), "192.0.2.80");
        // The client has its own letter case back, in the owner as well.
        assert_eq!(answer.queries[0].name.to_ascii(), name);
        assert_eq!(answer.answers[0].name.to_ascii(), name);
    }
    assert_eq!(upstreams.asked(0).len(), 1, "kept for any letter case");
}

#[tokio::test]
async fn what_is_cut_off_anywhere_is_asked_for_by_stream() {
    fn whole(asking: &Asking<'_>) -> Option<Vec<u8>> {
        Some(asking.response(0, 0, &[ADDRESS; 100]))
    }
    fn within_a_record(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let mut half = asking.response(MORE, 0, &[ADDRESS; 100]);
        half.truncate(505);
        if asking.by == TCP {
            whole(asking)
        } else {
            Some(half)
        }
    }
    fn the_question_only(asking: &Asking<'_>) -> Option<Vec<u8>> {
        // The count is still that of the whole.
        let mut none = asking.response(MORE, 0, &[ADDRESS; 100]);
        none.truncate(12 + asking.question().len());
        if asking.by == TCP {
            whole(asking)
        } else {
            Some(none)
        }
    }
    fn nothing_at_all(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let none = asking.response(MORE, 0, &[]);
        if asking.by == TCP {
            whole(asking)
        } else {
            Some(none)
        }
    }
    fn without_saying_so(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let mut half = asking.response(0, 0, &[ADDRESS; 100]);
        half.truncate(505);
        if asking.by == TCP {
            whole(asking)
        } else {
            Some(half)
        }
    }
    for script in [
        within_a_record,
        the_question_only,
        nothing_at_all,
        without_saying_so,
    ] {
        let upstreams = Upstreams::with(&[script]).await;
        let served = upstreams.served().await;
        let asked = question("a.example.", RecordType::A);
        let answer = served.ask_by_stream(&asked).await;
        assert_eq!(answer.answers.len(), 100);
        assert!(!answer.metadata.truncation);
        assert_eq!(upstreams.asked(0), [(UDP, true), (TCP, true)]);
        // By UDP the client gets what fits.
        let answer = served.ask(&asked).await;
        assert!(answer.metadata.truncation && answer.answers.len() > 20);
    }
}

/// A record of this type and with these data, for the name of the question.
fn record(kind: u16, ttl: u32, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).unwrap().to_be_bytes();
    let (kind, ttl) = (kind.to_be_bytes(), ttl.to_be_bytes());
    [&[0xc0, 12][..], &kind, &[0, 1], &ttl, &length, data].concat()
}

/// An address, and records that decoders reject.
fn odd_records(ttl: u32) -> Vec<Vec<u8>> {
    let odd: [(u16, &[u8]); 7] = [
        (1, &[192, 0, 2, 80]),
        // An empty A record.
        (1, &[]),
        // CAA with a tag that is not ASCII.
        (257, &[0, 5, b'i', 0xc3, 0xbc, b's', b'e', b'x']),
        // SVCB whose parameters are not in order, and HTTPS that ends early.
        (
            64,
            &[0, 1, 0, 0, 3, 0, 2, 1, 187, 0, 1, 0, 3, 2, b'h', b'2'],
        ),
        (65, &[0]),
        // An empty TXT record.
        (16, &[]),
        // A type that nobody knows.
        (65_280, &[0xc0, 0xff, 0xee]),
    ];
    odd.iter()
        .map(|(kind, data)| record(*kind, ttl, data))
        .collect()
}

const ODD: u8 = 7;

#[tokio::test]
async fn records_that_cannot_be_decoded_are_passed_on() {
    // As answers, again as additional records, and an OPT record.
    fn odd(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let odd = odd_records(3600);
        let records: Vec<&[u8]> = odd.iter().map(|record| &record[..]).collect();
        let mut response = asking.response(0, 0, &records);
        response[11] = ODD + 1;
        response.extend(records.concat());
        response.extend([0, 0, 41, 2, 0, 0, 0, 0, 0, 0, 0]);
        Some(response)
    }
    let upstreams = Upstreams::with(&[odd]).await;
    let served = upstreams.served().await;
    let asked = question("a.example.", RecordType::A).to_vec().unwrap();
    let passed = |age: u32| {
        let records = odd_records(3600 - age).concat();
        let header = [0, 7, 0x81, 0x80, 0, 1, 0, ODD, 0, 0, 0, ODD];
        [&header[..], &asked[12..], &records, &records].concat()
    };
    assert!(Message::from_vec(&passed(0)).is_err(), "nothing is odd");
    // From the name server, then from the cache.
    for _ in 0..2 {
        let answer = served.raw(&asked).await;
        assert!((0..60).any(|age| answer == passed(age)), "{answer:x?}");
    }
    assert_eq!(upstreams.asked(0).len(), 1);

    // Behind an alias of the zone they are the same, and belong to the name that it leads to.
    let name = "away.default.svc.cluster.local.";
    let alias = question(name, RecordType::A).to_vec().unwrap();
    let answer = served.raw(&alias).await;
    assert_eq!(answer[12..alias.len()], alias[12..]);
    assert_eq!((answer[7], answer[11]), (ODD + 1, ODD));
    let target = b"\x03www\x07example\x03com\0";
    let at = alias.len() + 12;
    assert!(answer[at..].starts_with(target));
    let owner = u8::try_from(at).unwrap();
    let moved = odd_records(3600).into_iter().map(|mut record| {
        record[1] = owner;
        record
    });
    let moved = moved.collect::<Vec<_>>().concat();
    assert_eq!(answer[at + target.len()..], [&moved[..], &moved].concat());
}

#[tokio::test]
async fn a_truncated_answer_is_handed_on_if_there_is_no_other() {
    fn half(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let mut half = asking.response(MORE, 0, &[ADDRESS; 3]);
        half.truncate(half.len() - 5);
        (asking.by == UDP).then_some(half)
    }
    let has_two = |answer: &Message| {
        assert!(answer.metadata.truncation);
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
        assert_eq!(answer.answers.len(), 2, "those that are whole");
    };
    let asked = question("a.example.", RecordType::A);
    // The connection is closed without a word.
    let upstreams = Upstreams::with(&[half]).await;
    let served = upstreams.served().await;
    for _ in 0..2 {
        has_two(&served.ask(&asked).await);
    }
    // It is not kept.
    let once = [(UDP, true), (TCP, true)];
    assert_eq!(upstreams.asked(0), [once, once].concat());

    // Nobody listens.
    fn no_listener(question: Message) -> Option<Message> {
        let mut reply = good(question)?;
        reply.answers.push(reply.answers[0].clone());
        reply.metadata.truncation = true;
        Some(reply)
    }
    let (port, _) = other(no_listener).await;
    let served = Served::with("nameserver 127.0.0.1", port).await;
    has_two(&served.ask(&asked).await);

    // Another name server has the whole answer, or an error only.
    let upstreams = Upstreams::with(&[half, right]).await;
    let answer = upstreams.served().await.ask(&asked).await;
    assert!(!answer.metadata.truncation && answer.answers.len() == 1);
    let upstreams = Upstreams::with(&[half, |asking| Some(asking.response(0, 2, &[]))]).await;
    has_two(&upstreams.served().await.ask(&asked).await);
}

#[tokio::test]
async fn a_negative_answer_with_an_alias_is_not_kept_for_the_time_of_the_alias() {
    // A CNAME for an hour to a name without the record, and an SOA record that forbids to keep that.
    fn nothing_behind(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let alias = record(5, 3600, &[1, b'b', 0xc0, 14]);
        let soa = record(6, 0, &[0; 22]);
        let mut response = asking.response(0, 0, &[&alias]);
        response[9] = 1;
        response.extend(soa);
        Some(response)
    }
    let upstreams = Upstreams::with(&[nothing_behind]).await;
    let served = upstreams.served().await;
    for _ in 0..3 {
        let answer = served.ask(&question("a.example.", RecordType::A)).await;
        assert_eq!(answer.answers.len(), 1);
    }
    assert_eq!(upstreams.asked(0).len(), 3);
    // The alias itself is an answer.
    for _ in 0..3 {
        let answer = served.ask(&question("a.example.", RecordType::CNAME)).await;
        assert_eq!(shown(&answer.answers[0]), "b.example.");
    }
    assert_eq!(upstreams.asked(0).len(), 4);
}

/// A name server that answers, with a TTL of 0, what it was asked until now when it is told to.
async fn reluctant() -> (u16, watch::Receiver<usize>, watch::Sender<bool>) {
    let socket = UdpSocket::bind((HOME, 0)).await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let (count, asked) = watch::channel(0);
    let (release, mut released) = watch::channel(false);
    tokio::spawn(async move {
        let mut waiting = Vec::new();
        let mut buffer = vec![0; 4096];
        loop {
            tokio::select! {
                received = socket.recv_from(&mut buffer) => {
                    let (size, from) = received.unwrap();
                    waiting.push((Message::from_vec(&buffer[..size]).unwrap(), from));
                    count.send_modify(|count| *count += 1);
                }
                changed = released.changed() => if changed.is_err() { return },
            }
            if *released.borrow() {
                for (message, from) in waiting.drain(..) {
                    let mut reply = good(message).unwrap();
                    reply.answers[0].ttl = 0;
                    socket
                        .send_to(&reply.to_vec().unwrap(), from)
                        .await
                        .unwrap();
                }
            }
        }
    });
    (port, asked, release)
}

#[tokio::test]
async fn equal_questions_are_asked_once() {
    let (port, asked, release) = reluctant().await;
    let served = Served::with("nameserver 127.0.0.1", port).await;
    let mut sockets = Vec::new();
    for number in 0..30 {
        let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 1, number), 0))
            .await
            .unwrap();
        socket.connect(served.at).await.unwrap();
        // In any letter case.
        let name = ["www.example.", "WWW.example."][usize::from(number) % 2];
        let bytes = question(name, RecordType::A).to_vec().unwrap();
        socket.send(&bytes).await.unwrap();
        sockets.push((socket, name));
    }
    // When this is answered, the server has read all before it.
    served.resolve("localhost.").await.unwrap();
    let another_type = question("www.example.", RecordType::AAAA);
    tokio::join!(served.ask(&another_type), async {
        release.send(true).unwrap();
    });
    for (socket, name) in sockets {
        let mut buffer = [0; 512];
        let size = within_timeout("an answer", socket.recv(&mut buffer))
            .await
            .unwrap();
        let answer = Message::from_vec(&buffer[..size]).unwrap();
        assert_eq!(shown(&answer.answers[0]), "192.0.2.80");
        assert_eq!(answer.queries[0].name.to_ascii(), name);
    }
    assert_eq!(*asked.borrow(), 2, "one for each type");
    // What was answered is asked again: its TTL is 0.
    served.resolve("www.example.").await.unwrap();
    assert_eq!(*asked.borrow(), 3);
}

#[tokio::test]
async fn who_has_joined_a_question_keeps_it_when_the_first_has_gone() {
    let (port, mut asked, release) = reluctant().await;
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("resolv.conf");
    std::fs::write(&path, "nameserver 127.0.0.1").unwrap();
    let forwarder = Arc::new(Forwarder::at_port(path, port, RANGES));
    let asks = |client: [u8; 4], name: String| {
        let forwarder = forwarder.clone();
        let asked = Asked {
            query: Query::query(Name::from_ascii(name).unwrap(), RecordType::A),
            signatures: false,
            checking_disabled: false,
        };
        async move { forwarder.ask(client.into(), &asked).await }
    };
    let mut greedy = JoinSet::new();
    let mut patient = JoinSet::new();
    greedy.spawn(asks([10, 208, 1, 2], "www.example.".to_owned()));
    within_timeout("the first query", asked.wait_for(|count| *count == 1))
        .await
        .unwrap();
    patient.spawn(asks([10, 208, 1, 3], "www.example.".to_owned()));
    // So many that the first one of this client loses its place.
    for number in 0..64 {
        greedy.spawn(asks([10, 208, 1, 2], format!("n{number}.example.")));
    }
    let first = within_timeout("the end of the first", greedy.join_next()).await;
    assert!(matches!(
        &*first.unwrap().unwrap().unwrap_err(),
        ForwardError::Busy
    ));
    release.send(true).unwrap();
    let answer = within_timeout("the answer", patient.join_next()).await;
    assert_eq!(answer.unwrap().unwrap().unwrap().answer.code(), 0);
    let rest = within_timeout("the others", greedy.join_all()).await;
    assert!(rest.iter().all(Result::is_ok));
    assert_eq!(*asked.borrow(), 65);
}

#[tokio::test]
async fn addresses_take_turns_also_from_the_cache() {
    fn three(asking: &Asking<'_>) -> Option<Vec<u8>> {
        let address = |last| record(1, 3600, &[192, 0, 2, last]);
        let [one, two, three] = [1, 2, 3].map(address);
        Some(asking.response(0, 0, &[&one, &two, &three]))
    }
    let upstreams = Upstreams::with(&[three]).await;
    let served = upstreams.served().await;
    let mut asked = question("a.example.", RecordType::A);
    let mut first = Vec::new();
    for id in 0..3 {
        asked.metadata.id = id;
        let answer = served.ask(&asked).await;
        assert_eq!(answer.answers.len(), 3);
        first.push(shown(&answer.answers[0]));
    }
    first.sort();
    assert_eq!(first, ["192.0.2.1", "192.0.2.2", "192.0.2.3"]);
    assert_eq!(upstreams.asked(0).len(), 1);
}
