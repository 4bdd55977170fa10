//! What is done with each response, and that every query has an end.

use hickory_proto::rr::{Name, RecordType};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::wire;

const ID: u16 = 7;
const PLAIN: Way = Way {
    edns: false,
    by: Transport::Udp,
};
const EDNS: Way = Way {
    edns: true,
    by: Transport::Udp,
};
const STREAM: Way = Way {
    edns: true,
    by: Transport::Tcp,
};

fn question(name: &str) -> Vec<u8> {
    let name = Name::from_ascii(name).unwrap();
    wire::question(&Query::query(name, RecordType::A))
}

fn asked() -> Vec<u8> {
    question("www.example.com.")
}

/// A response with this code and as many addresses.
fn response(code: u8, addresses: u8) -> Vec<u8> {
    let mut bytes = vec![0, 7, 0x81, 0x80 | code, 0, 1, 0, addresses, 0, 0, 0, 0];
    bytes.extend(asked());
    for last in 0..addresses {
        bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, last]);
    }
    bytes
}

fn truncated(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[2] |= 2;
    bytes
}

/// A header, without the question.
fn bare(code: u8) -> Vec<u8> {
    let mut bytes = response(code, 0);
    bytes.truncate(12);
    bytes[5] = 0;
    bytes
}

/// An error whose upper bits are in an OPT record.
fn extended(upper: u8, lower: u8) -> Vec<u8> {
    let mut bytes = response(lower, 0);
    bytes[11] = 1;
    bytes.extend([0, 0, 41, 4, 208, upper, 0, 0, 0, 0, 0]);
    bytes
}

fn cut(mut bytes: Vec<u8>, by: usize) -> Vec<u8> {
    bytes.truncate(bytes.len() - by);
    bytes
}

fn verdict(way: Way, bytes: &[u8]) -> String {
    match judge(ID, &asked(), way, bytes) {
        Verdict::Ignore => "ignore".to_owned(),
        Verdict::WithoutEdns => "without EDNS".to_owned(),
        Verdict::ByStream(None) => "by stream".to_owned(),
        Verdict::ByStream(Some(answer)) => {
            assert!(answer.is_truncated());
            "by stream, or this".to_owned()
        }
        Verdict::Failure(answer) => format!("failure {}", answer.code()),
        Verdict::Answer(answer) => format!("answer {}", answer.code()),
    }
}

#[test]
fn each_response_has_its_consequence() {
    let rows: &[(Way, Vec<u8>, &str)] = &[
        (EDNS, response(0, 1), "answer 0"),
        (EDNS, response(0, 0), "answer 0"),
        (EDNS, response(3, 0), "answer 3"),
        (STREAM, response(0, 9), "answer 0"),
        // EDNS is refused.
        (EDNS, response(1, 0), "without EDNS"),
        (EDNS, response(4, 0), "without EDNS"),
        (EDNS, bare(1), "without EDNS"),
        (EDNS, bare(4), "without EDNS"),
        (EDNS, extended(1, 0), "without EDNS"),
        (STREAM, response(1, 0), "without EDNS"),
        (PLAIN, response(1, 0), "failure 1"),
        (PLAIN, bare(4), "failure 4"),
        // Errors.
        (EDNS, response(2, 0), "failure 2"),
        (EDNS, response(5, 0), "failure 5"),
        (EDNS, bare(5), "failure 5"),
        (EDNS, truncated(response(2, 0)), "failure 2"),
        (EDNS, extended(1, 7), "failure 23"),
        // There is more.
        (EDNS, truncated(response(0, 2)), "by stream, or this"),
        (
            PLAIN,
            truncated(cut(response(0, 2), 5)),
            "by stream, or this",
        ),
        (
            EDNS,
            truncated(cut(response(0, 1), 16)),
            "by stream, or this",
        ),
        (EDNS, truncated(response(0, 0)), "by stream, or this"),
        (EDNS, truncated(bare(0)), "by stream"),
        (EDNS, cut(response(0, 2), 5), "by stream"),
        (STREAM, truncated(response(0, 2)), "answer 0"),
        // Nothing that could be used.
        (STREAM, cut(response(0, 2), 5), "ignore"),
        (STREAM, truncated(bare(0)), "ignore"),
        (EDNS, bare(0), "ignore"),
        (EDNS, bare(3), "ignore"),
        (EDNS, cut(response(0, 0), 1), "ignore"),
    ];
    for (row, (way, bytes, expected)) in rows.iter().enumerate() {
        assert_eq!(verdict(*way, bytes), *expected, "row {row}");
    }
}

#[test]
fn what_belongs_to_another_query_is_ignored() {
    let right = response(0, 1);
    let changed = |change: fn(&mut Vec<u8>)| {
        let mut bytes = right.clone();
        change(&mut bytes);
        verdict(EDNS, &bytes)
    };
    assert_eq!(changed(|bytes| bytes[1] ^= 1), "ignore", "another ID");
    assert_eq!(changed(|bytes| bytes[2] &= !0x80), "ignore", "a query");
    assert_eq!(changed(|bytes| bytes[2] |= 0x28), "ignore", "an update");
    assert_eq!(changed(|bytes| bytes[5] = 2), "ignore", "two questions");
    assert_eq!(changed(|bytes| bytes[13] = b'x'), "ignore", "another name");
    assert_eq!(changed(|bytes| bytes[30] = 28), "ignore", "another type");
    // In another letter case it is the same name.
    assert_eq!(changed(|bytes| bytes[13] = b'W'), "answer 0");
}

/// A message that a name server may send.
fn any_message() -> impl Strategy<Value = Vec<u8>> {
    let code = select(vec![0_u8, 1, 2, 3, 4, 5, 9]);
    prop_oneof![
        (code.clone(), 0_u8..4).prop_map(|(code, count)| response(code, count)),
        (code.clone(), 0_u8..4).prop_map(|(code, count)| truncated(response(code, count))),
        (1_u8..4, 1_usize..20).prop_map(|(count, by)| cut(response(0, count), by)),
        (1_u8..4, 1_usize..20).prop_map(|(count, by)| truncated(cut(response(0, count), by))),
        code.prop_map(bare),
        Just(extended(1, 0)),
        vec(any::<u8>(), 0..60),
    ]
}

/// What one exchange brings.
fn exchange() -> impl Strategy<Value = Vec<Vec<u8>>> {
    vec(any_message(), 0..4)
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_judged(bytes in vec(any::<u8>(), 0..100), edns in any::<bool>()) {
        for by in [Transport::Udp, Transport::Tcp] {
            verdict(Way { edns, by }, &bytes);
        }
    }

    #[test]
    fn an_attempt_ends_after_three_exchanges_at_most(
        edns in any::<bool>(),
        exchanges in vec(exchange(), 4),
    ) {
        let mut attempt = Attempt::new(edns);
        let mut partial = false;
        for (turn, messages) in exchanges.iter().enumerate() {
            prop_assert!(turn < 3);
            let way = attempt.way();
            let mut step = Step::Wait;
            for bytes in messages {
                let verdict = judge(ID, &asked(), way, bytes);
                partial |= matches!(verdict, Verdict::ByStream(Some(_)));
                step = attempt.received(verdict);
                if !matches!(step, Step::Wait) {
                    break;
                }
            }
            if matches!(step, Step::Wait) {
                step = attempt.failed();
            }
            match step {
                Step::Wait => unreachable!(),
                Step::Again => prop_assert_ne!(attempt.way(), way),
                Step::End(outcome) => {
                    // What a server has said is not lost.
                    let is_less = matches!(outcome, Outcome::Failure(_) | Outcome::Silence);
                    prop_assert!(!(partial && is_less));
                    let known = attempt.needs_no_edns(&outcome);
                    prop_assert!(!known || (edns && !attempt.way().edns));
                    return Ok(());
                }
            }
        }
        prop_assert!(false, "no end");
    }

    #[test]
    fn a_search_asks_all_and_the_silent_ones_twice(
        first in any::<usize>(),
        outcomes in vec((0_u8..3, 0_u8..3), 1..5),
    ) {
        let servers = outcomes.len();
        let (failure, partial) = (response(2, 0), truncated(response(0, 1)));
        let answer = |bytes: &[u8]| Answer::read(bytes).unwrap().0;
        let mut search = Search::new(servers, first);
        let mut times = vec![0; servers];
        while let Some(server) = search.server() {
            let (now, then) = outcomes[server];
            let outcome = match if times[server] == 0 { now } else { then } {
                0 => Outcome::Silence,
                1 => Outcome::Failure(answer(&failure)),
                _ => Outcome::Partial(answer(&partial)),
            };
            times[server] += 1;
            prop_assert!(search.ended(outcome).is_none());
        }
        for (times, (now, _)) in times.iter().zip(&outcomes) {
            prop_assert!(*times >= 1 && (*times == 1 || *now == 0));
        }
        let has = |kind| outcomes.iter().zip(&times).any(|((now, then), times)| {
            *now == kind || (*times == 2 && *then == kind)
        });
        match search.best() {
            Some(best) if best.is_truncated() => prop_assert!(has(2)),
            Some(_) => prop_assert!(has(1) && !has(2)),
            None => prop_assert!(!has(1) && !has(2)),
        }
    }

    #[test]
    fn an_answer_ends_the_search(servers in 1_usize..5, silent in 0_usize..20) {
        let mut search = Search::new(servers, 0);
        for _ in 0..silent.min(2 * servers - 1) {
            prop_assert!(search.ended(Outcome::Silence).is_none());
        }
        let (answer, _) = Answer::read(&response(0, 1)).unwrap();
        prop_assert!(search.ended(Outcome::Answer(answer)).is_some());
    }
}
