//! Queries and responses: pure functions from bytes to bytes.
//!
//! Input is not trusted: every pod can send anything. So a message is checked in steps, the cheap
//! ones first. A message that is a response is ignored (otherwise two servers could answer each
//! other forever), one that cannot be parsed gets a short error. Only messages with one question,
//! no records and at most a few additional records are decoded.
//!
//! A response is never longer than the client accepts; records that do not fit are omitted, and the
//! TC flag is set.

use std::net::Ipv4Addr;

use hearth_api::ranges::ClusterRanges;
use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::wire::{
    self, Answer, DATAGRAM_BYTES, HEADER_BYTES, PLAIN_DATAGRAM_BYTES, Recipient, Transport,
};
use super::zone::{self, Found, TTL, Zone};

/// Maximum length of a chain of CNAMEs.
const MAX_ALIASES: usize = 8;

/// A received message.
pub enum Received {
    /// Must not be answered.
    Noise,
    /// Is answered with this error response.
    Wrong(Vec<u8>),
    /// A valid query.
    Question(Box<Question>),
}

/// A query to this server.
pub struct Question {
    message: Message,
    /// Its only question.
    pub query: Query,
    limit: usize,
}

/// The content of a response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Response code.
    pub code: ResponseCode,
    /// Value of the AA flag.
    pub authoritative: bool,
    /// Answer section.
    pub answers: Vec<Record>,
    /// Authority section: the SOA record of a negative response.
    pub authorities: Vec<Record>,
}

/// The result of a lookup in the zone.
#[derive(Debug)]
pub enum Local {
    /// The complete response.
    Reply(Reply),
    /// The name is not in the zone: the query has to be forwarded.
    Foreign,
    /// CNAMEs to a name outside of the zone, for which a query has to be forwarded.
    Alias(Vec<Record>, Name),
}

impl Reply {
    /// A response without records.
    pub fn bare(code: ResponseCode) -> Self {
        Self {
            code,
            authoritative: false,
            answers: Vec::new(),
            authorities: Vec::new(),
        }
    }
}

/// Parses a received message.
pub fn read(bytes: &[u8], transport: Transport) -> Received {
    let Some(header) = bytes.get(..HEADER_BYTES) else {
        return Received::Noise;
    };
    let is_response = header[2] & 0x80 != 0;
    if is_response {
        return Received::Noise;
    }
    let count = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let wrong = |code| Received::Wrong(refusal(header, code));
    if (header[2] >> 3) & 0xf != 0 {
        return wrong(ResponseCode::NotImp);
    }
    // One question, no answers; additional records may be EDNS and a signature.
    if count(4) != 1 || count(6) != 0 || count(8) != 0 || count(10) > 2 {
        return wrong(ResponseCode::FormErr);
    }
    let Ok(message) = Message::from_vec(bytes) else {
        return wrong(ResponseCode::FormErr);
    };
    let Some(query) = message.queries.first().cloned() else {
        return wrong(ResponseCode::FormErr);
    };
    let limit = match (transport, &message.edns) {
        (Transport::Tcp, _) => u16::MAX,
        (Transport::Udp, Some(edns)) => edns
            .max_payload()
            .clamp(PLAIN_DATAGRAM_BYTES, DATAGRAM_BYTES),
        (Transport::Udp, None) => PLAIN_DATAGRAM_BYTES,
    };
    let question = Question {
        message,
        query,
        limit: limit.into(),
    };
    if question.edns().is_some_and(|edns| edns.version() != 0) {
        let reply = Reply::bare(ResponseCode::BADVERS);
        return Received::Wrong(question.encode(&reply));
    }
    if question.query.query_class() != DNSClass::IN || is_transfer(question.query.query_type()) {
        let reply = Reply::bare(ResponseCode::Refused);
        return Received::Wrong(question.encode(&reply));
    }
    Received::Question(Box::new(question))
}

impl Question {
    fn edns(&self) -> Option<&Edns> {
        self.message.edns.as_ref()
    }

    /// The RD flag: whether the query may be forwarded.
    pub fn recursion_desired(&self) -> bool {
        self.message.metadata.recursion_desired
    }

    /// The DO flag: whether the client wants DNSSEC signatures.
    pub fn wants_signatures(&self) -> bool {
        self.edns().is_some_and(|edns| edns.flags().dnssec_ok)
    }

    /// The CD flag: whether the client accepts data that was not validated.
    pub fn checking_disabled(&self) -> bool {
        self.message.metadata.checking_disabled
    }

    /// Encodes the response of a name server, which was cached for `age` seconds. `before` are CNAMEs
    /// of the zone that lead from this question to the one that it answers.
    pub fn pass_on(&self, answer: &Answer, age: u32, before: &[Record]) -> Vec<u8> {
        let question = wire::question(&self.query);
        let mut answer = answer.clone();
        answer.age(age);
        answer.rotate(self.message.metadata.id.into());
        if !before.is_empty() {
            let names = before.iter().filter_map(|record| match &record.data {
                RData::CNAME(target) => Some(wire::name(&target.0)),
                _ => None,
            });
            answer = answer.behind(&question, &names.collect::<Vec<_>>(), TTL);
        }
        answer.encode(&Recipient {
            id: self.message.metadata.id,
            question: &question,
            recursion_desired: self.recursion_desired(),
            checking_disabled: self.checking_disabled(),
            edns: self.edns().map(|edns| edns.flags().dnssec_ok),
            limit: self.limit,
        })
    }

    /// Encodes the response.
    pub fn encode(&self, reply: &Reply) -> Vec<u8> {
        let asked = &self.message.metadata;
        let mut message = Message::response(asked.id, OpCode::Query);
        message.metadata.recursion_desired = asked.recursion_desired;
        message.metadata.checking_disabled = asked.checking_disabled;
        message.metadata.recursion_available = true;
        message.metadata.authoritative = reply.authoritative;
        message.metadata.response_code = reply.code;
        message.add_query(self.query.clone());
        message.insert_answers(reply.answers.clone());
        message.insert_authorities(reply.authorities.clone());
        if let Some(asked) = self.edns() {
            let mut edns = Edns::new();
            edns.set_max_payload(DATAGRAM_BYTES);
            edns.set_dnssec_ok(asked.flags().dnssec_ok);
            message.set_edns(edns);
        }
        // Rotate the records, because most clients use the first one.
        if let Some(turn) = usize::from(asked.id).checked_rem(same(&message.answers)) {
            let first = message.answers.len() - same(&message.answers);
            message.answers[first..].rotate_left(turn);
        }
        fit(message, self.limit)
    }
}

/// How many records at the end have the same name and type.
fn same(answers: &[Record]) -> usize {
    let Some(last) = answers.last() else { return 0 };
    let alike =
        |record: &&Record| record.name == last.name && record.record_type() == last.record_type();
    answers.iter().rev().take_while(alike).count()
}

/// Encodes as many records as fit.
fn fit(mut message: Message, limit: usize) -> Vec<u8> {
    loop {
        // Records that cannot be encoded are omitted, too.
        let encoded = message.to_vec().ok();
        if let Some(bytes) = encoded.as_ref().filter(|bytes| bytes.len() <= limit) {
            return bytes.clone();
        }
        let size = encoded.map_or(usize::MAX, |bytes| bytes.len());
        if !message.authorities.is_empty() && size != usize::MAX {
            message.authorities.clear();
        } else if !message.answers.is_empty() {
            let count = message.answers.len();
            let room = count.saturating_mul(limit) / size;
            message.answers.truncate(room.min(count - 1));
            message.authorities.clear();
        } else {
            // Not expected: the question alone fits, because it was received in a message.
            return encoded_header(&message);
        }
        message.metadata.truncation = true;
    }
}

fn encoded_header(message: &Message) -> Vec<u8> {
    let [high, low] = message.metadata.id.to_be_bytes();
    refusal(&[high, low, 1, 0], ResponseCode::ServFail)
}

/// A response without sections, for a query with this header.
fn refusal(header: &[u8], code: ResponseCode) -> Vec<u8> {
    // QR is set; opcode and RD are copied from the query.
    let flags = [0x80 | (header[2] & 0x79), 0x80 | (code.low() & 0xf)];
    let mut bytes = vec![header[0], header[1], flags[0], flags[1]];
    bytes.resize(HEADER_BYTES, 0);
    bytes
}

fn is_transfer(kind: RecordType) -> bool {
    matches!(kind, RecordType::AXFR | RecordType::IXFR)
}

/// The name in the form of the zone: in lower case, without the final dot.
pub fn plain(name: &Name) -> String {
    let mut text = name.to_lowercase().to_ascii();
    if text.ends_with('.') {
        text.pop();
    }
    text
}

/// Looks up a question in the zone of a cluster with these ranges. Without a zone, that is before
/// services and endpoints have been listed once, names of the cluster get SERVFAIL, because NXDOMAIN
/// would be cached.
pub fn look_up(zone: Option<&Zone>, ranges: &ClusterRanges, query: &Query) -> Local {
    let mut answers = Vec::new();
    let mut name = query.name().clone();
    for _ in 0..MAX_ALIASES {
        let text = plain(&name);
        if let Some(address) = loopback(&text) {
            let mut reply = local_host(query, name, address);
            answers.append(&mut reply.answers);
            return Local::Reply(Reply { answers, ..reply });
        }
        if !zone::is_ours(&text, ranges) {
            return if answers.is_empty() {
                Local::Foreign
            } else {
                Local::Alias(answers, name)
            };
        }
        let Some(zone) = zone else {
            return Local::Reply(Reply::bare(ResponseCode::ServFail));
        };
        let records = match zone.find(&text) {
            Found::Records(records) => records,
            Found::NoSuchName => return Local::Reply(nothing(ResponseCode::NXDomain, answers)),
            Found::Foreign => return Local::Foreign,
        };
        let wanted = query.query_type();
        let mut target = None;
        for data in records.iter() {
            if let RData::CNAME(alias) = data {
                target = Some(alias.0.clone());
            }
            let kind = data.record_type();
            if wanted == RecordType::ANY || kind == wanted || kind == RecordType::CNAME {
                answers.push(Record::from_rdata(name.clone(), TTL, data.clone()));
            }
        }
        match target {
            Some(target) if !matches!(wanted, RecordType::CNAME | RecordType::ANY) => {
                name = target;
            }
            _ if answers.is_empty() => {
                return Local::Reply(nothing(ResponseCode::NoError, answers));
            }
            _ => {
                return Local::Reply(Reply {
                    code: ResponseCode::NoError,
                    authoritative: true,
                    answers,
                    authorities: Vec::new(),
                });
            }
        }
    }
    // A loop of CNAMEs.
    Local::Reply(Reply::bare(ResponseCode::ServFail))
}

/// A negative response, possibly after the CNAMEs in `answers`.
fn nothing(code: ResponseCode, answers: Vec<Record>) -> Reply {
    let zone = Name::from_ascii(hearth_api::names::KUBERNETES_DOMAIN).unwrap_or_default();
    Reply {
        code,
        authoritative: true,
        answers,
        authorities: vec![Record::from_rdata(zone, TTL, RData::SOA(zone::authority()))],
    }
}

/// The loopback address, if the name is `localhost` or below it.
fn loopback(name: &str) -> Option<Ipv4Addr> {
    let own = name == "localhost" || name.ends_with(".localhost");
    own.then_some(Ipv4Addr::LOCALHOST)
}

fn local_host(query: &Query, name: Name, address: Ipv4Addr) -> Reply {
    let data = match query.query_type() {
        RecordType::A => Some(RData::A(address.into())),
        RecordType::AAAA => Some(RData::AAAA(std::net::Ipv6Addr::LOCALHOST.into())),
        _ => None,
    };
    match data {
        Some(data) => Reply {
            code: ResponseCode::NoError,
            authoritative: true,
            answers: vec![Record::from_rdata(name, TTL, data)],
            authorities: Vec::new(),
        },
        None => nothing(ResponseCode::NoError, Vec::new()),
    }
}
