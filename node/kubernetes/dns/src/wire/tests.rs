//! Messages on their way to a client: whatever they contain, and compared with the library's decoder.

use hickory_proto::op::{Message, MessageType, OpCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME, MX, NS, SOA, TXT};
use hickory_proto::rr::{RData, Record, RecordType};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;

const ASKED: &str = "www.example.com.";
const ALIAS: &str = "away.default.svc.cluster.local.";

fn library_name(text: &str) -> rr::Name {
    rr::Name::from_ascii(text).unwrap()
}

fn question_for(text: &str) -> Vec<u8> {
    question(&Query::query(library_name(text), RecordType::A))
}

fn recipient(question: &[u8], edns: Option<bool>, limit: u16) -> Recipient<'_> {
    Recipient {
        id: 99,
        question,
        recursion_desired: true,
        checking_disabled: false,
        edns,
        limit: limit.into(),
    }
}

/// Passes a response on in every way; a panic is a bug.
fn digest(bytes: &[u8]) {
    let Some((mut answer, _)) = Answer::read(bytes) else {
        return;
    };
    answer.age(7);
    answer.rotate(3);
    let own = bytes[HEADER_BYTES..answer.question].to_vec();
    let alias = [
        &name(&library_name(ALIAS))[..],
        &own[own.len() - KIND_BYTES..],
    ]
    .concat();
    let target = own[..own.len() - KIND_BYTES].to_vec();
    let between = name(&library_name("between.example."));
    for (question, answer) in [
        (&own, answer.clone()),
        (&alias, answer.behind(&alias, &[between, target], 5)),
    ] {
        let _ = (answer.nothing_else_for(), answer.has_what_was_asked());
        for limit in [PLAIN_DATAGRAM_BYTES, DATAGRAM_BYTES, u16::MAX] {
            for edns in [None, Some(false), Some(true)] {
                let encoded = answer.encode(&recipient(question, edns, limit));
                assert!(encoded.len() <= limit.into());
                let (again, is_whole) = Answer::read(&encoded).unwrap();
                assert!(is_whole, "the counts are those of the records");
                assert_eq!(Head::read(&encoded).unwrap().id, 99);
                assert_eq!(&encoded[HEADER_BYTES..again.question], &question[..]);
                let all = again.records.len() == answer.records.len();
                assert!(all || answer.size() + OPT_BYTES > limit.into());
            }
        }
    }
}

/// A header with these counts, the usual question, and more.
fn message(counts: [u16; 3], rest: &[u8]) -> Vec<u8> {
    let [answers, authorities, additional] = counts;
    let header = header(7, [RESPONSE, 0], [1, answers, authorities, additional]);
    [&header[..], &question_for(ASKED), rest].concat()
}

/// Types whose data have compressed names: what comes before them, and how many.
const WITH_NAMES: &[(u16, &[u8], usize)] = &[
    (2, &[], 1),
    (3, &[], 1),
    (4, &[], 1),
    (5, &[], 1),
    (6, &[], 2),
    (7, &[], 1),
    (8, &[], 1),
    (9, &[], 1),
    (12, &[], 1),
    (14, &[], 2),
    (15, &[0, 9], 1),
    (17, &[], 2),
    (18, &[0, 9], 1),
    (21, &[0, 9], 1),
    (24, &[9; 18], 1),
    (26, &[0, 9], 2),
    (30, &[], 1),
    (33, &[0, 1, 0, 2, 0, 3], 1),
    (35, &[0, 1, 0, 2, 1, b'u', 0, 3, b'x', b'y', b'z'], 1),
    (36, &[0, 9], 1),
    (39, &[], 1),
    (46, &[9; 18], 1),
    // Without names.
    (1, &[192, 0, 2, 1], 0),
    (16, &[2, 0xc0, 12], 0),
    (64, &[0, 1, 0xc0, 12], 0),
    (65_280, &[0xc0, 12, 0xc0, 0], 0),
];

/// A name: a label or none, then a pointer to a name before it, or the root.
type Written = (Option<u8>, Option<Index>);

fn written() -> impl Strategy<Value = Written> {
    let before = prop_oneof![3 => any::<Index>().prop_map(Some), 1 => Just(None)];
    (prop::option::of(b'a'..=b'z'), before)
}

/// Writes messages, and notes where their names are.
struct Writer {
    bytes: Vec<u8>,
    names: Vec<usize>,
}

impl Writer {
    fn new() -> Self {
        // `www.example.com.` and `example.com.` can be pointed to.
        Self {
            bytes: message([0; 3], &[]),
            names: vec![HEADER_BYTES, HEADER_BYTES + 4],
        }
    }

    fn name(&mut self, (label, before): Written) {
        let at = self.bytes.len();
        if let Some(letter) = label {
            self.bytes.extend([1, letter]);
        }
        match before {
            Some(before) => {
                let to = self.names[before.index(self.names.len())];
                self.bytes.extend(pointer_to(to).unwrap());
            }
            None => self.bytes.push(0),
        }
        self.names.push(at);
    }

    fn record(&mut self, &(kind, fixed, count): &(u16, &[u8], usize), names: [Written; 3]) {
        let [owner, data @ ..] = names;
        self.name(owner);
        self.bytes.extend(kind.to_be_bytes());
        self.bytes.extend([0, 1, 0, 0, 0, 60, 0, 0]);
        let start = self.bytes.len();
        self.bytes.extend_from_slice(fixed);
        for name in data.into_iter().take(count) {
            self.name(name);
        }
        let length = u16::try_from(self.bytes.len() - start).unwrap();
        self.bytes[start - 2..start].copy_from_slice(&length.to_be_bytes());
    }
}

/// The name at this offset, with its pointers followed.
fn followed(bytes: &[u8], mut at: usize) -> Vec<u8> {
    let mut name = Vec::new();
    loop {
        let length = usize::from(bytes[at]);
        match length {
            0 => return name,
            1..=63 => {
                name.extend_from_slice(&bytes[at..=at + length]);
                at += 1 + length;
            }
            _ => at = usize::from(number(bytes, at).unwrap() & !POINTER),
        }
    }
}

/// A record of a kind that the library encodes, whose names share their ends.
fn record() -> impl Strategy<Value = Record> {
    let names = select(vec![
        ASKED,
        "example.com.",
        "mail.example.com.",
        "a.b.example.org.",
        "b.example.org.",
        "x.",
    ]);
    let data = (0_u8..7, names.clone(), any::<u8>()).prop_map(|(kind, name, number)| {
        let name = library_name(name);
        match kind {
            0 => RData::A(A::new(192, 0, 2, number)),
            1 => RData::AAAA(AAAA::new(0xfd00, 0, 0, 0, 0, 0, 0, number.into())),
            2 => RData::CNAME(CNAME(name)),
            3 => RData::MX(MX::new(number.into(), name)),
            4 => RData::NS(NS(name)),
            5 => RData::SOA(SOA::new(name.clone(), name, 1, 2, 3, 4, number.into())),
            _ => RData::TXT(TXT::new(vec!["x".repeat(number.into())])),
        }
    });
    (names, 100_u32..1000, data)
        .prop_map(|(name, ttl, data)| Record::from_rdata(library_name(name), ttl, data))
}

/// A response of the library.
fn response() -> impl Strategy<Value = Message> {
    let sections = (
        vec(record(), 0..6),
        vec(record(), 0..3),
        vec(record(), 0..3),
    );
    (sections, any::<bool>()).prop_map(|((answers, authorities, additional), edns)| {
        let mut message = Message::new(7, MessageType::Response, OpCode::Query);
        message.add_query(Query::query(library_name(ASKED), RecordType::A));
        message.insert_answers(answers);
        message.insert_authorities(authorities);
        message.insert_additionals(additional);
        if edns {
            message.set_edns(hickory_proto::op::Edns::new());
        }
        message
    })
}

fn aged(records: &[Record], by: u32) -> Vec<Record> {
    let aged = |record: &Record| {
        let mut record = record.clone();
        record.ttl -= by;
        record
    };
    records.iter().map(aged).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_break_nothing(bytes in vec(any::<u8>(), 0..600)) {
        digest(&bytes);
    }

    #[test]
    fn arbitrary_records_break_nothing(
        counts in [0_u16..6, 0_u16..6, 0_u16..6],
        // Many short names, pointers and types that exist.
        rest in vec(prop_oneof![0_u8..50, Just(0xc0), Just(12), any::<u8>()], 0..500),
    ) {
        digest(&message(counts, &rest));
    }

    #[test]
    fn a_response_is_what_it_was(
        response in response(),
        age in 0_u32..100,
        edns in any::<Option<bool>>(),
        turn in 0_usize..5,
    ) {
        let bytes = response.to_vec().unwrap();
        let (mut answer, is_whole) = Answer::read(&bytes).unwrap();
        prop_assert!(is_whole);
        answer.age(age);
        let asked = question_for("wWw.Example.cOM.");
        let encoded = answer.encode(&recipient(&asked, edns, u16::MAX));
        let passed = Message::from_vec(&encoded).unwrap();
        prop_assert_eq!(passed.queries[0].name.to_ascii(), "wWw.Example.cOM.");
        prop_assert_eq!(&passed.answers, &aged(&response.answers, age));
        prop_assert_eq!(&passed.authorities, &aged(&response.authorities, age));
        prop_assert_eq!(&passed.additionals, &aged(&response.additionals, age));
        prop_assert_eq!(passed.edns.map(|edns| edns.flags().dnssec_ok), edns);

        // Rotated, it has the same records, and those that are not alike stay where they are.
        answer.rotate(turn);
        let encoded = answer.encode(&recipient(&asked, edns, u16::MAX));
        let rotated = Message::from_vec(&encoded).unwrap().answers;
        let shown = |records: &[Record]| {
            let mut shown: Vec<String> = records.iter().map(ToString::to_string).collect();
            shown.sort();
            shown
        };
        prop_assert_eq!(shown(&rotated), shown(&passed.answers));
        for (one, other) in rotated.iter().zip(&passed.answers) {
            let is_same = one.name == other.name && one.record_type() == other.record_type();
            prop_assert!(is_same);
        }
    }

    #[test]
    fn a_response_behind_aliases_is_what_it_was(
        response in response(),
        between in select(vec![vec![], vec!["b.example.net."], vec!["c.x.", "b.example.net."]]),
    ) {
        let (answer, _) = Answer::read(&response.to_vec().unwrap()).unwrap();
        let names: Vec<&str> = between.into_iter().chain([ASKED]).collect();
        let encoded: Vec<_> = names.iter().map(|text| name(&library_name(text))).collect();
        let alias = question_for(ALIAS);
        let moved = answer.behind(&alias, &encoded, 5);
        let passed = moved.encode(&recipient(&alias, None, u16::MAX));
        let passed = Message::from_vec(&passed).unwrap();

        let mut expected = Vec::new();
        let mut owner = ALIAS;
        for name in names {
            let data = RData::CNAME(CNAME(library_name(name)));
            expected.push(Record::from_rdata(library_name(owner), 5, data));
            owner = name;
        }
        expected.extend(response.answers);
        prop_assert_eq!(passed.answers, expected);
        prop_assert_eq!(passed.authorities, response.authorities);
        prop_assert_eq!(passed.additionals, response.additionals);
    }

    #[test]
    fn every_pointer_behind_an_alias_leads_to_the_same_name(
        records in vec((select(WITH_NAMES), [written(), written(), written()]), 0..20),
    ) {
        let mut writer = Writer::new();
        let count = u16::try_from(records.len()).unwrap();
        for (kind, names) in &records {
            writer.record(kind, *names);
        }
        writer.bytes[6..8].copy_from_slice(&count.to_be_bytes());
        let (answer, is_whole) = Answer::read(&writer.bytes).unwrap();
        prop_assert!(is_whole);
        let moved = answer.behind(&question_for(ALIAS), &[name(&library_name(ASKED))], 5);
        prop_assert_eq!(moved.records.len(), records.len() + 1);
        let by = moved.bytes.len() - writer.bytes.len();
        for at in writer.names.into_iter().skip(2) {
            prop_assert_eq!(followed(&moved.bytes, at + by), followed(&writer.bytes, at));
        }
        // Nothing else has changed: without its pointers, all is as it was.
        let start = answer.question;
        let differs = (start..writer.bytes.len())
            .filter(|at| writer.bytes[*at] != moved.bytes[at + by]);
        for at in differs {
            let is_pointer = writer.bytes[at] >= 0xc0 || writer.bytes[at - 1] >= 0xc0;
            prop_assert!(is_pointer);
        }
    }

    #[test]
    fn what_is_cut_off_anywhere_has_the_records_before(
        response in response(),
        cut in any::<Index>(),
    ) {
        let bytes = response.to_vec().unwrap();
        let question = HEADER_BYTES + question_for(ASKED).len();
        let cut = question + cut.index(bytes.len() - question + 1);
        let (answer, is_whole) = Answer::read(&bytes[..cut]).unwrap();
        prop_assert_eq!(is_whole, cut == bytes.len());
        let asked = question_for(ASKED);
        let passed = answer.encode(&recipient(&asked, None, u16::MAX));
        let passed = Message::from_vec(&passed).unwrap();
        prop_assert!(response.answers.starts_with(&passed.answers));
        prop_assert!(response.authorities.starts_with(&passed.authorities));
        prop_assert!(response.additionals.starts_with(&passed.additionals));
    }

    #[test]
    fn what_does_not_fit_is_omitted_from_the_end(
        response in response(),
        limit in PLAIN_DATAGRAM_BYTES..1400,
        edns in any::<Option<bool>>(),
    ) {
        let (answer, _) = Answer::read(&response.to_vec().unwrap()).unwrap();
        let asked = question_for(ASKED);
        let encoded = answer.encode(&recipient(&asked, edns, limit));
        prop_assert!(encoded.len() <= limit.into());
        let passed = Message::from_vec(&encoded).unwrap();
        let lacks = passed.answers.len() < response.answers.len()
            || passed.authorities.len() < response.authorities.len();
        prop_assert_eq!(passed.metadata.truncation, lacks);
        prop_assert!(response.answers.starts_with(&passed.answers));
        prop_assert!(response.authorities.starts_with(&passed.authorities));
        prop_assert!(response.additionals.starts_with(&passed.additionals));
    }
}

#[test]
fn questions_are_compared_without_letter_case_and_types_are_not() {
    let question = |name: &str, kind| [name.as_bytes(), &[0, 0, kind, 0, 1]].concat();
    assert!(is_same_question(
        &question("\u{3}wWw", 1),
        &question("\u{3}WwW", 1)
    ));
    // 65 and 97 are `A` and `a`.
    assert!(!is_same_question(
        &question("\u{3}www", 65),
        &question("\u{3}www", 97)
    ));
    assert!(!is_same_question(
        &question("\u{3}www", 1),
        &question("\u{3}wwx", 1)
    ));
    assert!(!is_same_question(
        &question("\u{3}www", 1),
        &question("\u{2}ww", 1)
    ));
    assert!(!is_same_question(&[], &[]));
}

#[test]
fn names_that_point_to_themselves_or_into_the_header_are_no_owners() {
    let fixed = [0, 1, 0, 1, 0, 0, 0, 60, 0, 0];
    let own = u16::try_from(message([0; 3], &[]).len()).unwrap();
    for to in [0, 11, own, own + 2] {
        let record = [&(POINTER | to).to_be_bytes()[..], &fixed].concat();
        let (answer, is_whole) = Answer::read(&message([1, 0, 0], &record)).unwrap();
        assert!(!is_whole && answer.records.is_empty());
    }
    let long = [[63; 64].repeat(4), vec![0], fixed.to_vec()].concat();
    let (_, is_whole) = Answer::read(&message([1, 0, 0], &long)).unwrap();
    assert!(!is_whole, "a name of more than 255 bytes");
}

#[test]
fn a_pointer_that_cannot_reach_its_name_any_more_ends_the_answer() {
    let record = |owner: &[u8], data: &[u8]| {
        let length = u16::try_from(data.len()).unwrap().to_be_bytes();
        [owner, &[0, 16, 0, 1, 0, 0, 0, 60], &length, data].concat()
    };
    // Its owner is the last name that a pointer can reach.
    let before = message([0; 3], &[]).len();
    let filling = record(&[0xc0, 12], &vec![0; 0x3fff - before - 12]);
    let last = record(&[1, b'x', 0], &[]);
    let points = record(&[0xff, 0xff], &[]);
    let bytes = message([3, 0, 0], &[filling, last, points].concat());
    let (answer, is_whole) = Answer::read(&bytes).unwrap();
    assert!(is_whole && !answer.is_truncated());
    let moved = answer.behind(&question_for(ALIAS), &[name(&library_name(ASKED))], 5);
    assert!(moved.is_truncated());
    // The alias and the two records before it.
    assert_eq!(moved.records.len(), 3);
    let asked = question_for(ALIAS);
    let encoded = moved.encode(&recipient(&asked, None, u16::MAX));
    assert!(Answer::read(&encoded).unwrap().1);
}

#[test]
fn of_the_opt_record_nothing_is_passed_on_but_the_code() {
    // BADCOOKIE is 23: 7, and 1 in the OPT record. A signature of this hop follows.
    let opt = [0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 4, 0, 10, 0, 0];
    let more = [0, 0, 16, 0, 1, 0, 0, 0, 60, 0, 1, 0];
    let mut bytes = message([0, 0, 3], &[&more[..], &opt, &more].concat());
    bytes[3] |= 7;
    let (answer, is_whole) = Answer::read(&bytes).unwrap();
    assert!(is_whole);
    assert_eq!((answer.code(), answer.records.len()), (23, 1));
    assert_eq!(answer.bytes.len(), message([0; 3], &more).len());
    // The code concerns the query of this hop.
    let asked = question_for(ASKED);
    let encoded = answer.encode(&recipient(&asked, Some(false), DATAGRAM_BYTES));
    assert_eq!(encoded[3] & CODE, SERVFAIL);
    // It has no place among the answers.
    assert!(!Answer::read(&message([1, 0, 0], &opt)).unwrap().1);
}
