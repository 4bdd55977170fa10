//! Generated histories: those of a register that works are accepted, those of one that does not are refused, and small
//! ones of any kind are judged as by trying all orders.

use std::time::Duration;

use proptest::prelude::*;

use crate::judge::judge;
use crate::search::Found;
use crate::{Action, Answer, CheckError, History, Operation, Register, Value};

fn history(operations: Vec<Operation>) -> History {
    History {
        registers: vec![Register {
            name: "x".into(),
            initial: None,
        }],
        operations,
    }
}

fn millis(time: u64) -> Duration {
    Duration::from_millis(time)
}

fn operation(times: (u64, u64), action: Action, answer: Answer) -> Operation {
    Operation {
        client: 0,
        register: 0,
        action,
        answer,
        invoked: millis(times.0),
        returned: Some(millis(times.1)),
    }
}

fn write(times: (u64, u64), new: u64) -> Operation {
    operation(times, Action::Write(new), Answer::Done)
}

fn unknown_write(begin: u64, new: u64) -> Operation {
    Operation {
        returned: None,
        ..operation((begin, 0), Action::Write(new), Answer::Unknown)
    }
}

fn read(times: (u64, u64), value: u64) -> Operation {
    operation(times, Action::Read, Answer::Value(Some(value)))
}

fn exchange(times: (u64, u64), expected: u64, new: u64, answer: Answer) -> Operation {
    let expected = Some(expected);
    operation(times, Action::Exchange { expected, new }, answer)
}

fn accepts(operations: &[Operation]) -> bool {
    match history(operations.to_vec()).check() {
        Ok(_) => true,
        Err(CheckError::NotLinearizable(_)) => false,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn what_overlaps_may_be_in_either_order() {
    let writes = [write((0, 10), 1), write((0, 10), 2)];
    for value in [1, 2] {
        assert!(accepts(&[writes[0], writes[1], read((11, 12), value)]));
    }
    let both = [read((11, 12), 1), read((13, 14), 2)];
    assert!(!accepts(&[writes[0], writes[1], both[0], both[1]]));
}

#[test]
fn an_unknown_write_may_happen_late_or_never_but_not_before_it_began() {
    let late = [
        unknown_write(0, 1),
        write((1, 2), 2),
        read((3, 4), 2),
        read((5, 6), 1),
    ];
    assert!(accepts(&late));
    // Not undone.
    assert!(!accepts(&[&late[..], &[read((7, 8), 2)][..]].concat()));
    assert!(!accepts(&[unknown_write(5, 1), read((0, 4), 1)]));
}

#[test]
fn what_failed_for_certain_is_seen_by_nobody() {
    let failed = operation((0, 1), Action::Write(1), Answer::Failed);
    assert!(accepts(&[failed]));
    assert!(!accepts(&[failed, read((2, 3), 1)]));
}

#[test]
fn an_exchange_is_refused_only_if_the_value_differs() {
    let first = write((0, 1), 1);
    assert!(!accepts(&[first, exchange((2, 3), 1, 2, Answer::Differs)]));
    // Unless somebody may have changed it, whom nobody saw.
    let unseen = unknown_write(0, 3);
    let refused = exchange((2, 3), 1, 2, Answer::Differs);
    assert!(accepts(&[first, unseen, refused]));
    assert!(!accepts(&[first, unseen, refused, read((4, 5), 1)]));
    let other = exchange((0, 1), 1, 3, Answer::Unknown);
    assert!(accepts(&[first, other, refused]));
    let not_that = exchange((0, 1), 7, 3, Answer::Unknown);
    assert!(!accepts(&[first, not_that, refused]));
}

#[test]
fn errors_of_a_test_are_named() {
    let twice = history(vec![write((0, 1), 1), write((2, 3), 1)]).check();
    assert!(
        matches!(twice, Err(CheckError::SetTwice { .. })),
        "{twice:?}"
    );
    let read = operation((0, 1), Action::Read, Answer::Done);
    let mismatched = history(vec![read]).check();
    assert!(
        matches!(mismatched, Err(CheckError::Mismatched { .. })),
        "{mismatched:?}"
    );
}

/// A generated operation: its client, the pause before it, the time from its begin to its effect and from there to its
/// answer, what it does, and what becomes of it.
type Draft = (usize, u64, u64, u64, u8, u8);

fn drafts(clients: usize, most: usize) -> impl Strategy<Value = Vec<Draft>> {
    let draft = (
        0..clients,
        0..20_u64,
        0..30_u64,
        0..30_u64,
        0..8_u8,
        0..12_u8,
    );
    proptest::collection::vec(draft, 0..most)
}

/// The history of a register that works, whose clients lose some answers.
fn of_a_sound_register(drafts: &[Draft]) -> Vec<Operation> {
    let mut clocks = [0; 8];
    // When each takes effect, if it does.
    let mut planned = Vec::new();
    for (number, (client, pause, ahead, after, kind, fate)) in drafts.iter().enumerate() {
        let invoked = clocks[*client] + pause;
        let (happens, answer) = match fate {
            0 => (None, Answer::Failed),
            1 => (None, Answer::Unknown),
            // An effect long after the client has given up.
            2 => (Some(invoked + ahead * 40), Answer::Unknown),
            _ => (Some(invoked + ahead), Answer::Done),
        };
        clocks[*client] = invoked + ahead + after;
        let returned = clocks[*client];
        planned.push((happens, number, *client, *kind, answer, (invoked, returned)));
    }
    planned.sort_by_key(|(happens, number, ..)| (happens.is_none(), *happens, *number));
    let (mut value, mut former): (Value, Value) = (None, None);
    let mut operations = Vec::new();
    for (happens, number, client, kind, answer, times) in planned {
        let new = u64::try_from(number).unwrap() + 1;
        let action = match kind {
            0..=3 => Action::Read,
            4 | 5 => Action::Write(new),
            6 => Action::Exchange {
                expected: value,
                new,
            },
            _ => Action::Exchange {
                expected: former,
                new,
            },
        };
        let (after, known) = match action {
            Action::Read => (value, Answer::Value(value)),
            Action::Exchange { expected, .. } if expected != value => (value, Answer::Differs),
            Action::Write(new) | Action::Exchange { new, .. } => (Some(new), Answer::Done),
        };
        if happens.is_some() && after != value {
            former = std::mem::replace(&mut value, after);
        }
        operations.push(Operation {
            client,
            ..operation(
                times,
                action,
                if answer == Answer::Done {
                    known
                } else {
                    answer
                },
            )
        });
    }
    operations.sort_by_key(|operation| operation.invoked);
    operations
}

/// Tries all orders of certain operations and of any of the others.
fn has_an_order(operations: &[Operation], value: Value) -> bool {
    let is_certain =
        |operation: &Operation| !matches!(operation.answer, Answer::Unknown | Answer::Failed);
    if !operations.iter().any(is_certain) {
        return true;
    }
    (0..operations.len()).any(|number| {
        let next = &operations[number];
        let mut rest = operations.to_vec();
        rest.remove(number);
        let is_first = rest
            .iter()
            .all(|other| !is_certain(other) || other.returned >= Some(next.invoked));
        let after = match (next.action, next.answer) {
            (_, Answer::Failed) => None,
            (Action::Read, Answer::Value(seen)) => (seen == value).then_some(value),
            (Action::Read, _) => Some(value),
            (Action::Write(new), _) => Some(Some(new)),
            (Action::Exchange { expected, .. }, Answer::Differs) => {
                (expected != value).then_some(value)
            }
            (Action::Exchange { expected, new }, _) => (expected == value).then_some(Some(new)),
        };
        is_first && after.is_some_and(|after| has_an_order(&rest, after))
    })
}

/// A few operations with any answers.
fn any_history() -> impl Strategy<Value = Vec<Operation>> {
    let any = (0..12_u64, 0..8_u64, 0..4_u8, 0..4_u64, 0..6_u8);
    proptest::collection::vec(any, 0..7).prop_map(|drafts| {
        let operations = drafts.into_iter().zip(1..);
        let operations = operations.map(|((invoked, length, kind, seen, fate), new)| {
            let seen = Some(seen).filter(|seen| *seen > 0);
            let action = match kind {
                0 | 1 => Action::Read,
                2 => Action::Write(new),
                _ => Action::Exchange {
                    expected: seen,
                    new,
                },
            };
            let answer = match (fate, action) {
                (0, _) => Answer::Unknown,
                (1, Action::Exchange { .. }) => Answer::Differs,
                (_, Action::Read) => Answer::Value(seen),
                _ => Answer::Done,
            };
            operation((invoked, invoked + length), action, answer)
        });
        operations.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_history_of_a_register_that_works_is_accepted(drafts in drafts(5, 200)) {
        let operations = of_a_sound_register(&drafts);
        prop_assert_eq!(judge(&operations, None), Found::Order);
    }

    #[test]
    fn stale_reads_lost_updates_and_values_from_nowhere_are_refused(
        drafts in drafts(4, 80), flaw in 0..4_u8,
    ) {
        let mut operations = of_a_sound_register(&drafts);
        let end = |operations: &[Operation]| {
            let returned = operations.iter().filter_map(|operation| operation.returned);
            u64::try_from(returned.max().unwrap_or_default().as_millis()).unwrap()
        };
        let now = end(&operations) + 1;
        let at = |step: u64| (now + 2 * step, now + 2 * step + 1);
        let flawed = match flaw {
            0 => vec![write(at(0), 1001), write(at(1), 1002), read(at(2), 1001)],
            // Both exchanges were acknowledged, so one of them was overwritten unseen.
            1 => vec![
                write(at(0), 1001),
                exchange(at(1), 1001, 1002, Answer::Done),
                exchange(at(1), 1001, 1003, Answer::Done),
            ],
            2 => vec![read(at(0), 1001)],
            // Seen, and then gone again.
            _ => vec![unknown_write(0, 1001), write(at(0), 1002), read(at(1), 1001), read(at(2), 1002)],
        };
        operations.extend(&flawed);
        match history(operations.clone()).check() {
            Err(CheckError::NotLinearizable(excerpt)) => {
                prop_assert!(excerpt.operations.len() <= flawed.len(), "{}", excerpt);
                prop_assert_eq!(judge(&excerpt.operations, None), Found::Contradiction);
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn what_is_shown_is_a_contradiction_that_the_history_has(operations in any_history()) {
        if let Err(CheckError::NotLinearizable(excerpt)) = history(operations.clone()).check() {
            prop_assert!(!has_an_order(&excerpt.operations, None), "{}", excerpt);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_small_history_is_judged_as_by_trying_all_orders(operations in any_history()) {
        let expected = match has_an_order(&operations, None) {
            true => Found::Order,
            false => Found::Contradiction,
        };
        prop_assert_eq!(judge(&operations, None), expected);
    }
}

/// The bound that the check's documentation states, with room for a busy machine.
#[test]
fn ten_thousand_operations_of_eight_clients_are_checked() {
    let mut random = fastrand::Rng::with_seed(7);
    let drafts: Vec<Draft> = (0..10_000)
        .map(|_| {
            let mut below = |bound: u64| random.u64(..bound);
            let client = usize::try_from(below(8)).unwrap();
            let (pause, ahead, after) = (below(20), below(30), below(30));
            let kind = u8::try_from(below(8)).unwrap();
            // One in two hundred is unknown, one in four hundred failed.
            let fate = match below(400) {
                fate @ 0..3 => u8::try_from(fate).unwrap(),
                _ => 9,
            };
            (client, pause, ahead, after, kind, fate)
        })
        .collect();
    let mut operations = of_a_sound_register(&drafts);
    assert_eq!(judge(&operations, None), Found::Order);
    // An acknowledged write is lost in the middle of it.
    let reads = operations.iter().enumerate().skip(5000);
    let mut reads = reads.filter(|(_, operation)| matches!(operation.answer, Answer::Value(_)));
    let (at, _) = reads.next().unwrap();
    operations[at].answer = Answer::Value(None);
    let excerpt = match history(operations).check() {
        Err(CheckError::NotLinearizable(excerpt)) => excerpt,
        other => panic!("{other:?}"),
    };
    assert!(excerpt.operations.len() <= 2, "{excerpt}");
}
