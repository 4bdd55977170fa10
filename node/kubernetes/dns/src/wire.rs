//! Messages of name servers as bytes: queries to them, and their responses on the way to a client.
//!
//! A response is passed on as it came. Its records are not decoded, because a record that this
//! server cannot decode, of a type that it does not know or encoded wrongly, may be one that the
//! client never looks at, and because what is encoded again is not always the same. Only the header,
//! the question, where each record begins and ends, its type and its TTL are read.
//!
//! What is changed on the way, and nothing else: the ID; the flags (RA is set, AA and AD are cleared,
//! because this server is neither an authority nor a validator; RD and CD are those of the query);
//! the letter case of the question; TTLs, by the time for which a response was cached; the order of
//! addresses at the end of an answer; the OPT record, which concerns one hop only and is replaced.
//! Records that a client has no room for are omitted, beginning with the last one.
//!
//! A name in a message may end with a pointer to another one, by its offset. So the bytes stay where
//! they are: a question that differs by its letter case has the same length, addresses have no names
//! within them, and other records are only cut off at the end. The one exception is a response that
//! is put behind aliases ([`Answer::behind`]): there the pointers are moved. The alternative, to write
//! all names in full, needs the same list of types that have names, and a message could become much
//! longer: a name may have 255 bytes, a pointer has two.
//!
//! Invariants, for any bytes: nothing panics; the time is linear in their number, because pointers
//! are never followed; an [`Answer`] has a question and whole records only, so what is encoded of it
//! is a message with boundaries where its counts say, and is never longer than the client accepts.

mod alias;
#[cfg(test)]
mod tests;

use std::ops::Range;

use hickory_proto::op::Query;
use hickory_proto::rr;

/// Length of the header of every message.
pub const HEADER_BYTES: usize = 12;
/// Maximum length over UDP without EDNS.
pub const PLAIN_DATAGRAM_BYTES: u16 = 512;
/// Maximum length over UDP with EDNS: it is not fragmented in any network, the mesh included.
pub const DATAGRAM_BYTES: u16 = 1232;

/// Flags in the third byte of the header.
const RESPONSE: u8 = 0x80;
const OPCODE: u8 = 0x78;
const TRUNCATED: u8 = 0x02;
const RECURSION_DESIRED: u8 = 0x01;
/// Flags in the fourth byte of the header.
const RECURSION_AVAILABLE: u8 = 0x80;
const CHECKING_DISABLED: u8 = 0x10;
const CODE: u8 = 0x0f;

/// A response code.
const SERVFAIL: u8 = 2;

/// Types of records.
const A: u16 = 1;
const CNAME: u16 = 5;
const SOA: u16 = 6;
const AAAA: u16 = 28;
const OPT: u16 = 41;
const ANY: u16 = 255;
const INTERNET: u16 = 1;

/// Type and class, at the end of a question.
const KIND_BYTES: usize = 4;
/// Type, class, TTL and length of the data, after the owner of a record.
const FIXED_BYTES: usize = 10;
/// An OPT record without options.
const OPT_BYTES: usize = 11;
/// Maximum length of a name, with the root.
const NAME_BYTES: usize = 255;
/// The bits that make a pointer out of two bytes; the others are the offset.
const POINTER: u16 = 0xc000;

/// The transport of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// UDP: the length of messages is limited.
    Udp,
    /// TCP: messages of any length fit.
    Tcp,
}

/// The header of a message, and its question.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The ID.
    pub id: u16,
    /// Whether it is a response to a query, and not to an update or a notification.
    pub is_response: bool,
    /// The TC flag: there is more than this message has.
    pub truncated: bool,
    /// Its number of questions.
    pub questions: u16,
    /// The first question: name, type and class. `None` if there is none, or if it cannot be read.
    pub question: Option<&'a [u8]>,
    code: u8,
    /// Numbers of answers, authorities and additional records.
    counts: [u16; 3],
}

/// A part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    /// What was asked for.
    Answer,
    /// The SOA record of a negative response, or name servers.
    Authority,
    /// What may be useful as well.
    Additional,
}

const SECTIONS: [Section; 3] = [Section::Answer, Section::Authority, Section::Additional];

/// Where a record is.
#[derive(Clone, Debug)]
struct Place {
    section: Section,
    kind: u16,
    owner: usize,
    /// End of the owner: type, class, TTL, length and data follow.
    body: usize,
    end: usize,
}

/// A response that is passed on.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The message up to the end of the last record that is passed on. Its header is not used.
    bytes: Vec<u8>,
    /// End of the question.
    question: usize,
    /// Without OPT records.
    records: Vec<Place>,
    code: u16,
    truncated: bool,
}

/// What a client may be sent.
#[derive(Clone, Copy, Debug)]
pub struct Recipient<'a> {
    /// The ID of its query.
    pub id: u16,
    /// Its question, with the letter case that it has chosen.
    pub question: &'a [u8],
    /// Value of the RD flag.
    pub recursion_desired: bool,
    /// Value of the CD flag.
    pub checking_disabled: bool,
    /// Value of the DO flag; `None` without EDNS.
    pub edns: Option<bool>,
    /// Maximum length, at least [`PLAIN_DATAGRAM_BYTES`].
    pub limit: usize,
}

/// Encodes a query, for which recursion is desired. `edns` is the value of the DO flag.
pub fn query(id: u16, question: &[u8], checking_disabled: bool, edns: Option<bool>) -> Vec<u8> {
    let flags = [
        RECURSION_DESIRED,
        u8::from(checking_disabled) * CHECKING_DISABLED,
    ];
    let counts = [1, 0, 0, u16::from(edns.is_some())];
    let mut bytes = Vec::with_capacity(HEADER_BYTES + question.len() + OPT_BYTES);
    bytes.extend(header(id, flags, counts));
    bytes.extend_from_slice(question);
    if let Some(signatures) = edns {
        bytes.extend(opt(signatures));
    }
    bytes
}

/// Encodes a question.
pub fn question(query: &Query) -> Vec<u8> {
    let mut bytes = name(query.name());
    bytes.extend(u16::from(query.query_type()).to_be_bytes());
    bytes.extend(u16::from(query.query_class()).to_be_bytes());
    bytes
}

/// Encodes a name, in full and with its letter case.
pub fn name(name: &rr::Name) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.iter() {
        // A label has at most 63 bytes.
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label);
    }
    bytes.push(0);
    bytes
}

/// Whether two questions differ by the letter case of their names at most. Lengths of labels, types
/// and classes are compared apart from it: type 65 is not type 97.
pub fn is_same_question(one: &[u8], other: &[u8]) -> bool {
    let parts = |question: &'_ [u8]| question.len().checked_sub(KIND_BYTES);
    let (Some(at), Some(end)) = (parts(one), parts(other)) else {
        return false;
    };
    at == end && one[..at].eq_ignore_ascii_case(&other[..at]) && one[at..] == other[at..]
}

fn header(id: u16, flags: [u8; 2], counts: [u16; 4]) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..2].copy_from_slice(&id.to_be_bytes());
    bytes[2..4].copy_from_slice(&flags);
    for (place, count) in bytes[4..].chunks_exact_mut(2).zip(counts) {
        place.copy_from_slice(&count.to_be_bytes());
    }
    bytes
}

fn opt(signatures: bool) -> [u8; OPT_BYTES] {
    let [high, low] = DATAGRAM_BYTES.to_be_bytes();
    let [_, kind] = OPT.to_be_bytes();
    let flags = u8::from(signatures) << 7;
    [0, 0, kind, high, low, 0, 0, flags, 0, 0, 0]
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn seconds(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A name that was stepped over.
#[derive(Clone, Copy)]
struct Name {
    end: usize,
    /// Where its pointer is, and to where, if it ends with one.
    pointer: Option<(usize, usize)>,
}

/// Steps over the name at this offset. `None` if it is none.
fn step_over(bytes: &[u8], start: usize) -> Option<Name> {
    let mut at = start;
    while at - start < NAME_BYTES {
        let length = *bytes.get(at)?;
        match length {
            0 => {
                return Some(Name {
                    end: at + 1,
                    pointer: None,
                });
            }
            1..=63 => at += 1 + usize::from(length),
            0xc0.. => {
                let to = usize::from(number(bytes, at)? & !POINTER);
                return Some(Name {
                    end: at + 2,
                    pointer: Some((at, to)),
                });
            }
            _ => return None,
        }
    }
    None
}

impl<'a> Head<'a> {
    /// Reads the header and the question. `None` if there are too few bytes for a header.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let count = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let questions = count(4);
        Some(Self {
            id: count(0),
            is_response: header[2] & (RESPONSE | OPCODE) == RESPONSE,
            truncated: header[2] & TRUNCATED != 0,
            questions,
            question: (questions > 0).then(|| first_question(bytes)).flatten(),
            code: header[3] & CODE,
            counts: [count(6), count(8), count(10)],
        })
    }

    /// The response without records, for the case that its question cannot be read.
    pub fn bare(&self, question: &[u8]) -> Answer {
        Answer {
            bytes: [&[0; HEADER_BYTES], question].concat(),
            question: HEADER_BYTES + question.len(),
            records: Vec::new(),
            code: self.code.into(),
            truncated: self.truncated,
        }
    }
}

/// The first question. Its name comes first, so there is nothing that it can point to.
fn first_question(bytes: &[u8]) -> Option<&[u8]> {
    let name = step_over(bytes, HEADER_BYTES)?;
    let end = name.end + KIND_BYTES;
    let question = bytes.get(HEADER_BYTES..end)?;
    name.pointer.is_none().then_some(question)
}

impl Answer {
    /// Reads the records of a response with one question. Those before the first one that has no
    /// boundaries are passed on; the second value is whether these are all that the header claims.
    /// `None` without a header and a question.
    pub fn read(bytes: &[u8]) -> Option<(Self, bool)> {
        let head = Head::read(bytes)?;
        let question = HEADER_BYTES + head.question?.len();
        let mut answer = Self {
            bytes: Vec::new(),
            question,
            records: Vec::new(),
            code: head.code.into(),
            truncated: head.truncated,
        };
        let is_whole = answer.read_records(bytes, head.counts).is_some();
        answer.bytes = bytes[..answer.end()].to_vec();
        Some((answer, is_whole))
    }

    fn read_records(&mut self, bytes: &[u8], counts: [u16; 3]) -> Option<()> {
        let mut at = self.question;
        for (section, count) in SECTIONS.into_iter().zip(counts) {
            for _ in 0..count {
                let place = Place::read(bytes, section, at)?;
                at = place.end;
                if place.kind != OPT {
                    self.records.push(place);
                    continue;
                }
                if section != Section::Additional {
                    return None;
                }
                // The upper bits of the response code. What follows, such as the signature of this
                // hop, would move if it were passed on without this record.
                let upper = *bytes.get(place.body + 4)?;
                self.code |= u16::from(upper) << 4;
                return Some(());
            }
        }
        Some(())
    }

    fn end(&self) -> usize {
        self.records.last().map_or(self.question, |last| last.end)
    }

    /// The response code, with the upper bits of EDNS.
    pub fn code(&self) -> u16 {
        self.code
    }

    /// Whether it is incomplete.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// Its length.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is a record of the type that was asked for.
    pub fn has_what_was_asked(&self) -> bool {
        let asked = number(&self.bytes, self.question - KIND_BYTES);
        let mut kinds = self.section(Section::Answer).map(|place| place.kind);
        kinds.any(|kind| Some(kind) == asked || asked == Some(ANY))
    }

    /// The smallest TTL among the answers; `None` if there are none.
    pub fn shortest_ttl(&self) -> Option<u32> {
        let answers = self.section(Section::Answer);
        answers.filter_map(|place| self.ttl(place)).min()
    }

    /// For how many seconds there is nothing else, according to the SOA record (RFC 2308); `None`
    /// without one.
    pub fn nothing_else_for(&self) -> Option<u32> {
        let mut authorities = self.section(Section::Authority);
        let soa = authorities.find(|place| place.kind == SOA)?;
        // Two names, then five numbers, the minimum last.
        let first = step_over(&self.bytes, soa.data().start)?;
        let numbers = step_over(&self.bytes, first.end)?.end;
        if numbers + 20 != soa.end {
            return None;
        }
        Some(seconds(&self.bytes, numbers + 16)?.min(self.ttl(soa)?))
    }

    fn section(&self, section: Section) -> impl Iterator<Item = &Place> {
        let places = self.records.iter();
        places.filter(move |place| place.section == section)
    }

    fn ttl(&self, place: &Place) -> Option<u32> {
        seconds(&self.bytes, place.ttl().start)
    }

    /// Subtracts the time for which it was cached from its TTLs.
    pub fn age(&mut self, by: u32) {
        for place in &self.records {
            let Some(ttl) = seconds(&self.bytes, place.ttl().start) else {
                continue;
            };
            let left = ttl.saturating_sub(by);
            self.bytes[place.ttl()].copy_from_slice(&left.to_be_bytes());
        }
    }

    /// Rotates the addresses of one name at the end of the answers, because most clients use the
    /// first one.
    pub fn rotate(&mut self, by: usize) {
        let answers: Vec<Range<usize>> = {
            let mut answers: Vec<&Place> = self.section(Section::Answer).collect();
            let Some(last) = answers.last().copied() else {
                return;
            };
            let is_alike = |place: &Place| {
                place.kind == last.kind
                    && matches!(last.kind, A | AAAA)
                    && place.end - place.body == last.end - last.body
            };
            let alike = answers.iter().rev().take_while(|place| is_alike(place));
            answers.drain(..answers.len() - alike.count());
            // From the last one on that is written like those after it.
            let differs = |pair: &[&Place]| !self.have_one_owner(pair[0], pair[1]);
            let first = answers.windows(2).rposition(differs).map_or(0, |at| at + 1);
            let bodies = answers[first..].iter();
            bodies.map(|place| place.body..place.end).collect()
        };
        let Some(turn) = by.checked_rem(answers.len()) else {
            return;
        };
        let bodies = answers.iter().map(|body| self.bytes[body.clone()].to_vec());
        let mut bodies: Vec<Vec<u8>> = bodies.collect();
        bodies.rotate_left(turn);
        for (place, body) in answers.into_iter().zip(bodies) {
            self.bytes[place].copy_from_slice(&body);
        }
    }

    /// Whether two owners are the same bytes, or the second is a pointer to the first.
    fn have_one_owner(&self, one: &Place, other: &Place) -> bool {
        let owner = |place: &Place| &self.bytes[place.owner..place.body];
        let second = owner(other);
        owner(one) == second
            || pointer_to(one.owner).is_some_and(|pointer| second == pointer.as_slice())
    }

    /// Encodes the response for a client. The TC flag says whether it lacks answers or authorities;
    /// a client can do without additional records.
    pub fn encode(&self, to: &Recipient<'_>) -> Vec<u8> {
        let room = to.limit.saturating_sub(match to.edns {
            Some(_) => OPT_BYTES,
            None => 0,
        });
        let fitting = self.records.partition_point(|place| place.end <= room);
        let (records, omitted) = self.records.split_at(fitting);
        let end = records.last().map_or(self.question, |last| last.end);
        let mut bytes = self.bytes[..end].to_vec();
        let question = &mut bytes[HEADER_BYTES..self.question];
        if is_same_question(question, to.question) {
            question.copy_from_slice(to.question);
        }
        let lacks = |place: &Place| place.section != Section::Additional;
        let truncated = self.truncated || omitted.iter().any(lacks);
        // The codes of EDNS concern the query of this hop.
        let code = match self.code {
            0..=15 => self.code.to_be_bytes()[1],
            _ => SERVFAIL,
        };
        let set = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let flags = [
            RESPONSE | set(truncated, TRUNCATED) | set(to.recursion_desired, RECURSION_DESIRED),
            RECURSION_AVAILABLE | set(to.checking_disabled, CHECKING_DISABLED) | code,
        ];
        let count = |section| {
            let records = records.iter();
            let count = records.filter(|place| place.section == section).count();
            u16::try_from(count).unwrap_or(u16::MAX)
        };
        let [answers, authorities, additional] = SECTIONS.map(count);
        let additional = additional.saturating_add(to.edns.is_some().into());
        let counts = [1, answers, authorities, additional];
        bytes[..HEADER_BYTES].copy_from_slice(&header(to.id, flags, counts));
        if let Some(signatures) = to.edns {
            bytes.extend(opt(signatures));
        }
        bytes
    }
}

/// A pointer to this offset; `None` if it is too far.
fn pointer_to(offset: usize) -> Option<[u8; 2]> {
    let offset = u16::try_from(offset).ok()?;
    (offset < !POINTER + 1).then(|| (POINTER | offset).to_be_bytes())
}

impl Place {
    /// Reads the boundaries of the record at this offset.
    fn read(bytes: &[u8], section: Section, owner: usize) -> Option<Self> {
        let name = step_over(bytes, owner)?;
        // A pointer leads to a name before it, and there is none in the header.
        let is_before = |&(_, to): &(usize, usize)| (HEADER_BYTES..owner).contains(&to);
        if name.pointer.is_some_and(|pointer| !is_before(&pointer)) {
            return None;
        }
        let body = name.end;
        let length = number(bytes, body + FIXED_BYTES - 2)?;
        let end = body + FIXED_BYTES + usize::from(length);
        (end <= bytes.len()).then_some(Self {
            section,
            kind: number(bytes, body)?,
            owner,
            body,
            end,
        })
    }

    fn ttl(&self) -> Range<usize> {
        self.body + 4..self.body + 8
    }

    fn data(&self) -> Range<usize> {
        self.body + FIXED_BYTES..self.end
    }
}
