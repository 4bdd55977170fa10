//! Responses of other name servers to one query, each encoded again for the pod that has asked.

use hearth_kubernetes_dns::answer::{
    self, DATAGRAM_BYTES, Received, Reply, Transport, response_to,
};
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::rdata::{A, CNAME, SOA, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};

use super::dns_query::{is_response, query};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "dns_response",
    allocates: 512 << 10,
    check,
    seeds,
};

const NAME: &str = "www.example.com.";

fn name() -> Name {
    Name::from_ascii(NAME).expect("the name is one")
}

fn check(input: &[u8]) {
    let asked = Query::query(name(), RecordType::A);
    let Some(message) = response_to(7, &asked, input) else {
        return;
    };
    let reply = Reply {
        code: message.metadata.response_code,
        authoritative: false,
        answers: message.answers,
        authorities: message.authorities,
    };
    let of_client = query(NAME, RecordType::A);
    for (transport, most) in [(Transport::Udp, DATAGRAM_BYTES), (Transport::Tcp, u16::MAX)] {
        let Received::Question(question) = answer::read(&of_client, transport) else {
            panic!("the query is valid");
        };
        is_response(&question.encode(&reply), &of_client, most.into());
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
    vec![
        ("address", response(vec![address(1)], vec![])),
        ("many", response((0..40).map(address).collect(), vec![])),
        (
            "alias",
            response(vec![RData::CNAME(CNAME(name())), address(1)], vec![]),
        ),
        (
            "text",
            response(vec![RData::TXT(TXT::new(vec!["x".repeat(200)]))], vec![]),
        ),
        ("nothing", response(vec![], vec![RData::SOA(soa)])),
    ]
}
