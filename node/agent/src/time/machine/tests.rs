use proptest::prelude::*;

use super::super::agreement::tests::sample;
use super::super::packet::tests::{BUILD, at};
use super::*;

const SECOND: i64 = 1_000_000_000;
const HOUR: i64 = 3600 * SECOND;
const YEAR: i64 = 365 * 24 * HOUR;

fn bounds() -> Range<SystemTime> {
    at(BUILD)..at(BUILD + 20 * 365 * 24 * 3600)
}

fn now() -> SystemTime {
    at(BUILD + 4 * 365 * 24 * 3600)
}

fn round(machine: &mut Machine, offsets: &[i64]) -> Decision {
    let named = |(number, offset): (usize, &i64)| sample(&format!("s{number}"), *offset);
    let samples: Vec<_> = offsets.iter().enumerate().map(named).collect();
    machine.round(now(), &bounds(), samples.len(), &samples)
}

fn step(decision: Decision) -> i64 {
    match decision {
        Decision::Step(agreement) => agreement.offset,
        other => panic!("expected a step, got {other:?}"),
    }
}

fn begun() -> Machine {
    let mut machine = Machine::new();
    assert!(matches!(round(&mut machine, &[0]), Decision::Slew(_)));
    machine
}

#[test]
fn the_first_answer_sets_the_clock() {
    for offset in [STEP, -STEP, HOUR, -HOUR, -3 * YEAR, YEAR] {
        assert_eq!(step(round(&mut Machine::new(), &[offset])), offset);
    }
    let slewed = round(&mut Machine::new(), &[STEP - 1]);
    assert!(matches!(slewed, Decision::Slew(agreement) if agreement.offset == STEP - 1));
}

#[test]
fn later_a_correction_is_confirmed() {
    for offset in [STEP, -900 * SECOND, HOUR, -3 * YEAR] {
        let mut machine = begun();
        assert!(matches!(
            round(&mut machine, &[offset]),
            Decision::Confirm(_)
        ));
        assert_eq!(machine.interval(), FAST);
        assert_eq!(step(round(&mut machine, &[offset])), offset);
        // One wrong answer has no effect, nor have two that contradict each other.
        assert!(matches!(
            round(&mut machine, &[offset]),
            Decision::Confirm(_)
        ));
        assert!(matches!(round(&mut machine, &[0]), Decision::Slew(_)));
        assert!(matches!(
            round(&mut machine, &[offset]),
            Decision::Confirm(_)
        ));
        assert!(matches!(
            round(&mut machine, &[-offset]),
            Decision::Confirm(_)
        ));
        assert!(matches!(round(&mut machine, &[]), Decision::Nothing(_)));
        assert!(matches!(
            round(&mut machine, &[-offset]),
            Decision::Confirm(_)
        ));
    }
}

#[test]
fn a_large_correction_needs_all_and_a_smaller_one_most() {
    let mut machine = begun();
    let offsets = [2 * HOUR, 2 * HOUR, 0];
    for _ in 0..3 {
        let decision = round(&mut machine, &offsets);
        let Decision::Nothing(reason) = decision else {
            panic!("{decision:?}");
        };
        assert_eq!(
            reason.to_string(),
            "s0, s1 say that the clock is wrong by 7200 s, but 1 of 3 do not agree, and a correction \
             of more than 1000 s needs them all"
        );
    }
    let offsets = [900 * SECOND, 900 * SECOND, 0];
    assert!(matches!(
        round(&mut machine, &offsets),
        Decision::Confirm(_)
    ));
    assert_eq!(step(round(&mut machine, &offsets)), 900 * SECOND);
    // At first a majority is enough for any.
    let offsets = [-YEAR, 0, -YEAR];
    assert_eq!(step(round(&mut Machine::new(), &offsets)), -YEAR);
}

#[test]
fn a_time_that_cannot_be_is_not_believed() {
    for offset in [-5 * YEAR, 17 * YEAR, i64::MIN, i64::MAX] {
        for mut machine in [Machine::new(), begun()] {
            let decision = round(&mut machine, &[offset]);
            let out = matches!(decision, Decision::Nothing(Reason::OutOfBounds { .. }));
            assert!(out, "{decision:?}");
            // It counts as an answer.
            let decision = round(&mut machine, &[offset, 0]);
            assert!(matches!(decision, Decision::Nothing(_)), "{decision:?}");
            let decision = round(&mut machine, &[offset, 0, 0]);
            assert!(matches!(decision, Decision::Slew(_)), "{decision:?}");
        }
    }
    let none = round(&mut Machine::new(), &[HOUR, -HOUR]);
    assert_eq!(
        none,
        Decision::Nothing(Reason::Contradiction { answered: 2 })
    );
}

#[test]
fn rounds_become_rare_while_the_clock_is_good() {
    let mut machine = Machine::new();
    let mut intervals = Vec::new();
    for _ in 0..40 {
        assert!(matches!(round(&mut machine, &[0]), Decision::Slew(_)));
        intervals.push(machine.interval().as_secs());
    }
    intervals.dedup();
    assert_eq!(intervals, [2, 64, 128, 256, 512, 1024]);
    assert!(matches!(round(&mut machine, &[GOOD]), Decision::Slew(_)));
    assert_eq!(machine.interval(), LONGEST);
    assert!(matches!(round(&mut machine, &[-POOR]), Decision::Slew(_)));
    assert_eq!(machine.interval(), SHORTEST);
}

#[test]
fn silence_is_asked_less_and_less_and_at_last_shown() {
    let mut machine = begun();
    let mut intervals = Vec::new();
    for count in 1..=10 {
        let silence = machine.round(now(), &bounds(), 2, &[]);
        assert_eq!(silence, Decision::Nothing(Reason::Silence { asked: 2 }));
        assert_eq!(machine.is_deserted(), count >= SILENT_ROUNDS);
        intervals.push(machine.interval().as_secs());
    }
    assert_eq!(intervals, [2, 4, 8, 16, 32, 64, 64, 64, 64, 64]);
    assert!(matches!(round(&mut machine, &[0]), Decision::Slew(_)));
    assert!(!machine.is_deserted());
}

/// What one source says in a simulated round.
#[derive(Clone, Debug)]
enum Behaviour {
    /// The truth, with an error within its own bounds, in nanoseconds.
    Honest(i64),
    /// Anything.
    Lies(i64),
    Silent,
}

fn behaviours() -> impl Strategy<Value = Vec<Behaviour>> {
    let one = prop_oneof![
        4 => (-4_000_000i64..4_000_000).prop_map(Behaviour::Honest),
        1 => any::<i64>().prop_map(Behaviour::Lies),
        1 => (-2 * YEAR..2 * YEAR).prop_map(Behaviour::Lies),
        1 => Just(Behaviour::Silent),
    ];
    proptest::collection::vec(one, 1..6)
}

/// A round against a clock with this error; returns the error after it.
fn simulate(machine: &mut Machine, error: i64, sources: &[Behaviour]) -> (i64, Decision) {
    let clock = shifted(now(), error);
    let samples: Vec<_> = sources
        .iter()
        .enumerate()
        .filter_map(|(number, behaviour)| {
            let offset = match behaviour {
                Behaviour::Honest(jitter) => jitter - error,
                Behaviour::Lies(offset) => *offset,
                Behaviour::Silent => return None,
            };
            Some(sample(&format!("s{number}"), offset))
        })
        .collect();
    let decision = machine.round(clock, &bounds(), sources.len(), &samples);
    let corrected = match &decision {
        Decision::Step(agreement) | Decision::Slew(agreement) => error + agreement.offset,
        Decision::Confirm(_) | Decision::Nothing(_) => error,
    };
    (corrected, decision)
}

fn are_mostly_honest(sources: &[Behaviour]) -> bool {
    let honest = sources.iter().filter(|s| matches!(s, Behaviour::Honest(_)));
    let silent = sources.iter().filter(|s| matches!(s, Behaviour::Silent));
    honest.count() * 2 > sources.len() - silent.count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever the sources say, the clock is set to no time outside of the bounds.
    #[test]
    fn no_answer_sets_the_clock_out_of_bounds(
        error in -3 * YEAR..15 * YEAR,
        rounds in proptest::collection::vec(behaviours(), 1..12),
    ) {
        let mut machine = Machine::new();
        let mut error = error;
        for sources in rounds {
            let (corrected, decision) = simulate(&mut machine, error, &sources);
            if matches!(decision, Decision::Step(_) | Decision::Slew(_)) {
                prop_assert!(bounds().contains(&shifted(now(), corrected)));
            }
            error = corrected;
        }
    }

    /// A clock that is right stays right as long as most of those that answer are honest.
    #[test]
    fn a_minority_does_not_move_the_clock(rounds in proptest::collection::vec(behaviours(), 1..12)) {
        let mut machine = begun();
        let mut error = 0;
        for sources in rounds.iter().filter(|sources| are_mostly_honest(sources)) {
            let (corrected, decision) = simulate(&mut machine, error, sources);
            prop_assert!(!matches!(decision, Decision::Step(_)));
            prop_assert!(corrected.abs() < STEP, "{corrected} ns");
            error = corrected;
        }
    }

    /// However wrong the clock was at the begin, the first round of honest sources corrects it, and later two do.
    #[test]
    fn honest_sources_correct_any_clock(
        error in -3 * YEAR..15 * YEAR,
        later in -3 * YEAR..15 * YEAR,
        jitter in proptest::collection::vec(-4_000_000i64..4_000_000, 1..5),
    ) {
        let honest: Vec<_> = jitter.into_iter().map(Behaviour::Honest).collect();
        let mut machine = Machine::new();
        let (corrected, _) = simulate(&mut machine, error, &honest);
        prop_assert!(corrected.abs() < 5_000_000, "{corrected} ns");
        let (first, _) = simulate(&mut machine, later, &honest);
        let (second, _) = simulate(&mut machine, first, &honest);
        prop_assert!(second.abs() < 5_000_000, "{second} ns");
    }

    /// After the first synchronisation no single round sets the clock.
    #[test]
    fn no_single_round_sets_the_clock(lies in behaviours()) {
        let mut machine = begun();
        let (_, decision) = simulate(&mut machine, 0, &lies);
        prop_assert!(!matches!(decision, Decision::Step(_)), "{decision:?}");
    }

    #[test]
    fn the_next_round_is_within_a_tenth(random: u64, rounds in 0usize..30) {
        let mut machine = Machine::new();
        for _ in 0..rounds {
            round(&mut machine, &[0]);
        }
        let (next, interval) = (machine.next(random), machine.interval());
        prop_assert!(next >= interval - interval / 10 && next <= interval + interval / 10);
    }
}
