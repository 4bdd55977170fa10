//! One question and its answer: pure functions from bytes to bytes.
//!
//! What comes from the network is anybody's: every pod can send anything. So a
//! message is looked at in steps, the cheap ones first. One that is no question
//! gets no answer at all (two servers could talk to each other for ever), one
//! that cannot be understood a short one. Only what has one question, no
//! records and at most a few additional ones is decoded.
//!
//! An answer never is longer than the one who asks can take; what does not fit
//! is left out, and the answer says so.

use std::net::Ipv4Addr;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::zone::{self, Found, TTL, Zone};

/// Of the header, with which every message begins.
const HEADER_BYTES: usize = 12;
/// Without EDNS, by UDP.
const PLAIN_DATAGRAM_BYTES: u16 = 512;
/// By UDP in one piece through every network, the mesh among them.
pub const DATAGRAM_BYTES: u16 = 1232;
/// Names outside to which names inside lead, one after the other.
const MAX_ALIASES: usize = 8;

/// How a question came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// In a datagram.
    Udp,
    /// On a stream, where everything has room.
    Tcp,
}

/// What has come.
pub enum Received {
    /// Nothing that may be answered.
    Noise,
    /// Nothing that can be answered better than by this.
    Wrong(Vec<u8>),
    /// A question.
    Question(Box<Question>),
}

/// A question of this server.
pub struct Question {
    message: Message,
    /// The one and only.
    pub query: Query,
    limit: usize,
}

/// What is said to it.
#[derive(Clone, Debug)]
pub struct Reply {
    /// How it went.
    pub code: ResponseCode,
    /// Whether it is ours to say.
    pub authoritative: bool,
    /// Records that were asked for.
    pub answers: Vec<Record>,
    /// Records about the absence of such.
    pub authorities: Vec<Record>,
}

/// What this server itself can say.
#[derive(Debug)]
pub enum Local {
    /// All there is.
    Reply(Reply),
    /// Others have to be asked.
    Foreign,
    /// These records lead to a name of which others have to be asked.
    Alias(Vec<Record>, Name),
}

impl Reply {
    /// One without records.
    pub fn bare(code: ResponseCode) -> Self {
        Self {
            code,
            authoritative: false,
            answers: Vec::new(),
            authorities: Vec::new(),
        }
    }
}

/// Looks at what came.
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
    // A question, nothing known, maybe EDNS and a cookie's signature.
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

    /// Whether others may be asked.
    pub fn recursion_desired(&self) -> bool {
        self.message.metadata.recursion_desired
    }

    /// Whether signatures are wanted.
    pub fn wants_signatures(&self) -> bool {
        self.edns().is_some_and(|edns| edns.flags().dnssec_ok)
    }

    /// Whether what others could not verify is wanted, too.
    pub fn checking_disabled(&self) -> bool {
        self.message.metadata.checking_disabled
    }

    /// The answer's bytes.
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
        // Which one of many comes first should not always be the same: most
        // take the first.
        if let Some(turn) = usize::from(asked.id).checked_rem(same(&message.answers)) {
            let first = message.answers.len() - same(&message.answers);
            message.answers[first..].rotate_left(turn);
        }
        fit(message, self.limit)
    }
}

/// How many records at the end are of one name and type.
fn same(answers: &[Record]) -> usize {
    let Some(last) = answers.last() else { return 0 };
    let alike =
        |record: &&Record| record.name == last.name && record.record_type() == last.record_type();
    answers.iter().rev().take_while(alike).count()
}

/// As many records as there is room for.
fn fit(mut message: Message, limit: usize) -> Vec<u8> {
    loop {
        // What does not encode came from outside: it is left out, as well.
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
            // A question alone always fits: it came with less room.
            return encoded_header(&message);
        }
        message.metadata.truncation = true;
    }
}

fn encoded_header(message: &Message) -> Vec<u8> {
    let [high, low] = message.metadata.id.to_be_bytes();
    refusal(&[high, low, 1, 0], ResponseCode::ServFail)
}

/// A header without anything, for a message that began with this one.
fn refusal(header: &[u8], code: ResponseCode) -> Vec<u8> {
    // A response, of the same operation, with the wish for recursion.
    let flags = [0x80 | (header[2] & 0x79), 0x80 | (code.low() & 0xf)];
    let mut bytes = vec![header[0], header[1], flags[0], flags[1]];
    bytes.resize(HEADER_BYTES, 0);
    bytes
}

fn is_transfer(kind: RecordType) -> bool {
    matches!(kind, RecordType::AXFR | RecordType::IXFR)
}

/// The name as the zone has it.
pub fn plain(name: &Name) -> String {
    let mut text = name.to_lowercase().to_ascii();
    if text.ends_with('.') {
        text.pop();
    }
    text
}

/// What is known here. Without a zone, which is to say before Kubernetes has
/// told everything for the first time, there is no answer about its names:
/// "no such name" would be believed.
pub fn look_up(zone: Option<&Zone>, query: &Query) -> Local {
    let mut answers = Vec::new();
    let mut name = query.name().clone();
    for _ in 0..MAX_ALIASES {
        let text = plain(&name);
        if let Some(address) = loopback(&text) {
            let mut reply = local_host(query, name, address);
            answers.append(&mut reply.answers);
            return Local::Reply(Reply { answers, ..reply });
        }
        if !zone::is_ours(&text) {
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
    // A circle.
    Local::Reply(Reply::bare(ResponseCode::ServFail))
}

/// There is nothing, or nothing at the end of `answers`.
fn nothing(code: ResponseCode, answers: Vec<Record>) -> Reply {
    let zone = Name::from_ascii(hearth_api::names::KUBERNETES_DOMAIN).unwrap_or_default();
    Reply {
        code,
        authoritative: true,
        answers,
        authorities: vec![Record::from_rdata(zone, TTL, RData::SOA(zone::authority()))],
    }
}

/// A name that leads to the one who asks, wherever that is.
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

/// Whether this is a response to a question, and to this one.
pub fn answers(response: &Message, id: u16, query: &Query) -> bool {
    response.metadata.id == id
        && response.metadata.message_type == MessageType::Response
        && matches!(&response.queries[..], [only] if only == query && only.name.eq_case(&query.name))
}
