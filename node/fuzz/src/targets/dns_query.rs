//! Queries of pods, each answered from a zone with services of every kind.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hearth_api::ranges::ClusterRanges;
use hearth_kubernetes_dns::answer::{self, Local, Received, Reply, look_up};
use hearth_kubernetes_dns::wire::{DATAGRAM_BYTES, Transport};
use hearth_kubernetes_dns::zone::{Endpoint, Port, Service, Slice, Target as To, Zone};
use hickory_proto::op::{Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};

use crate::parts::Parts;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "dns_query",
    allocates: 512 << 10,
    check,
    seeds,
};

const RANGES: ClusterRanges = ClusterRanges::DEFAULT;

/// An address, many addresses, and aliases, one of which leads to itself.
static ZONE: LazyLock<Zone> = LazyLock::new(|| {
    let port = Port {
        name: "http".into(),
        protocol: "TCP".into(),
        number: 80,
    };
    let service = |name: &str, target| {
        let ports = vec![port.clone()];
        let key = ("default".to_owned(), name.to_owned());
        (key, Service { target, ports })
    };
    let services = BTreeMap::from([
        service("web", To::Addresses(vec![[10, 224, 0, 7].into()])),
        service("many", To::Headless),
        service("away", To::Elsewhere("www.example.com".into())),
        service(
            "circle",
            To::Elsewhere("circle.default.svc.cluster.local".into()),
        ),
    ]);
    let endpoint = |last: u8| Endpoint {
        address: [10, 208, 9, last].into(),
        hostname: Some(format!("pod-{last}")),
        ports: vec![port.clone()],
    };
    let slice = Slice {
        service: "many".to_owned(),
        endpoints: (1..=90).map(endpoint).collect(),
    };
    let slices = BTreeMap::from([(("default".to_owned(), "many-x".to_owned()), slice)]);
    Zone::new(&services, &slices, RANGES, [10, 208, 1, 1].into())
});

/// The transport; the query.
fn check(input: &[u8]) {
    let mut parts = Parts::of(input);
    let (transport, most) = match parts.byte() % 2 {
        0 => (Transport::Udp, usize::from(DATAGRAM_BYTES)),
        _ => (Transport::Tcp, usize::from(u16::MAX)),
    };
    let query = parts.rest();
    let response = match answer::read(query, transport) {
        Received::Noise => return,
        Received::Wrong(response) => response,
        Received::Question(question) => {
            let _ = look_up(None, &RANGES, &question.query);
            let reply = match look_up(Some(&ZONE), &RANGES, &question.query) {
                Local::Reply(reply) => reply,
                Local::Foreign => Reply::bare(ResponseCode::ServFail),
                Local::Alias(answers, _) => Reply {
                    answers,
                    ..Reply::bare(ResponseCode::NoError)
                },
            };
            question.encode(&reply)
        }
    };
    is_response(&response, query, most);
}

/// Whether a client understands the bytes as the response to its query.
fn is_response(response: &[u8], query: &[u8], most: usize) {
    assert!(response.len() <= most, "{} bytes", response.len());
    assert_eq!(response[..2], query[..2], "the ID");
    let message = Message::from_vec(response).expect("a response is a message");
    assert_eq!(message.metadata.message_type, MessageType::Response);
}

/// A query with the ID 7.
pub(super) fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let name = Name::from_ascii(name).expect("the name is one");
    let mut message = Message::query();
    message.metadata.id = 7;
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, kind));
    message.to_vec().expect("it can be encoded")
}

fn seeds() -> Seeds {
    let seed = |transport: u8, name: &str, kind| [&[transport][..], &query(name, kind)].concat();
    let mut edns = seed(0, "many.default.svc.cluster.local.", RecordType::A);
    // One additional record: EDNS with 1232 bytes and the flag DO.
    edns[12] = 1;
    edns.extend([0, 0, 41, 4, 208, 0, 0, 0x80, 0, 0, 0]);
    vec![
        (
            "web",
            seed(0, "web.default.svc.cluster.local.", RecordType::A),
        ),
        ("edns", edns),
        (
            "port",
            seed(
                1,
                "_http._tcp.many.default.svc.cluster.local.",
                RecordType::SRV,
            ),
        ),
        (
            "alias",
            seed(0, "away.default.svc.cluster.local.", RecordType::AAAA),
        ),
        (
            "circle",
            seed(0, "circle.default.svc.cluster.local.", RecordType::A),
        ),
        (
            "reverse",
            seed(1, "7.0.224.10.in-addr.arpa.", RecordType::PTR),
        ),
        ("localhost", seed(0, "localhost.", RecordType::ANY)),
        ("foreign", seed(0, "www.example.com.", RecordType::A)),
    ]
}
