//! Responses of other name servers to one query: judged, and passed on to the pod that has asked for it.

use hearth_kubernetes_dns::answer::{self, Received};
use hearth_kubernetes_dns::upstream::{self, Verdict, Way};
use hearth_kubernetes_dns::wire::{
    self, Answer, DATAGRAM_BYTES, Head, PLAIN_DATAGRAM_BYTES, Transport,
};
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::rdata::{A, CNAME, MX, SOA, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};

use super::dns_query::query;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "dns_response",
    allocates: 512 << 10,
    check,
    seeds,
};

const NAME: &str = "www.example.com.";
const ALIAS: &str = "away.default.svc.cluster.local.";
const WAYS: [(bool, Transport); 4] = [
    (true, Transport::Udp),
    (false, Transport::Udp),
    (true, Transport::Tcp),
    (false, Transport::Tcp),
];

fn name() -> Name {
    Name::from_ascii(NAME).expect("the name is one")
}

fn check(input: &[u8]) {
    let asked = wire::question(&Query::query(name(), RecordType::A));
    for (edns, by) in WAYS {
        match upstream::judge(7, &asked, Way { edns, by }, input) {
            Verdict::Ignore | Verdict::WithoutEdns | Verdict::ByStream(None) => {}
            Verdict::ByStream(Some(answer))
            | Verdict::Failure(answer)
            | Verdict::Answer(answer) => {
                passed_on(&answer);
            }
        }
    }
}

/// Passes a response on to clients with EDNS and without, to the name that was asked for and to an
/// alias of it.
fn passed_on(answer: &Answer) {
    let _ = (upstream::is_negative(answer), upstream::may_be_kept(answer));
    let _ = (answer.shortest_ttl(), answer.nothing_else_for());
    let alias = Name::from_ascii(ALIAS).expect("the name is one");
    let alias = [Record::from_rdata(alias, 5, RData::CNAME(CNAME(name())))];
    for (asked, before) in [(NAME, &[][..]), (ALIAS, &alias)] {
        let plain = query(asked, RecordType::A);
        let mut edns = plain.clone();
        // One additional record: EDNS with 1232 bytes and the flag DO.
        edns[11] = 1;
        edns.extend([0, 0, 41, 4, 208, 0, 0, 0x80, 0, 0, 0]);
        for (of_client, transport, most) in [
            (&plain, Transport::Udp, PLAIN_DATAGRAM_BYTES),
            (&edns, Transport::Udp, DATAGRAM_BYTES),
            (&edns, Transport::Tcp, u16::MAX),
        ] {
            let Received::Question(question) = answer::read(of_client, transport) else {
                panic!("the query is valid");
            };
            let response = question.pass_on(answer, 1, before);
            assert!(response.len() <= most.into(), "{} bytes", response.len());
            let head = Head::read(&response).expect("it has a header");
            assert!(head.id == 7 && head.is_response);
            let asked = &plain[wire::HEADER_BYTES..];
            assert_eq!(head.question, Some(asked));
            let (_, is_whole) = Answer::read(&response).expect("it has a question");
            assert!(is_whole, "its records are those that it counts");
        }
    }
}

fn seeds() -> Seeds {
    let response = |answers: Vec<RData>, authorities: Vec<RData>| {
        let asked = Message::from_vec(&query(NAME, RecordType::A)).expect("it is a query");
        let mut message = Message::response(7, asked.metadata.op_code);
        message.add_query(Query::query(name(), RecordType::A));
        let records = |data: Vec<RData>| {
            let record = |data| Record::from_rdata(name(), 60, data);
            data.into_iter().map(record).collect::<Vec<_>>()
        };
        message.insert_answers(records(answers));
        message.insert_authorities(records(authorities));
        message.to_vec().expect("it can be encoded")
    };
    let address = |last| RData::A(A::new(192, 0, 2, last));
    let soa = SOA::new(name(), name(), 1, 2, 3, 4, 5);
    let many = response((0..40).map(address).collect(), vec![]);
    // The flag TC, and half of the records.
    let mut truncated = many[..many.len() / 2].to_vec();
    truncated[2] |= 2;
    // FORMERR in a header without a question.
    let refused = vec![0, 7, 0x81, 0x81, 0, 0, 0, 0, 0, 0, 0, 0];
    // An A record without an address, and BADVERS in an OPT record.
    let mut odd = response(vec![address(1)], vec![]);
    odd.truncate(odd.len() - 4);
    let length = odd.len() - 2;
    odd[length..].fill(0);
    let mut version = response(vec![], vec![]);
    version[11] = 1;
    version.extend([0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0]);
    vec![
        ("address", response(vec![address(1)], vec![])),
        ("many", many),
        (
            "alias",
            response(vec![RData::CNAME(CNAME(name())), address(1)], vec![]),
        ),
        (
            "mail",
            response(vec![RData::MX(MX::new(1, name()))], vec![]),
        ),
        (
            "text",
            response(vec![RData::TXT(TXT::new(vec!["x".repeat(200)]))], vec![]),
        ),
        ("nothing", response(vec![], vec![RData::SOA(soa)])),
        ("odd", odd),
        ("refused", refused),
        ("truncated", truncated),
        ("version", version),
    ]
}
