use proptest::prelude::*;

use super::*;

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Limits of a program that may be unhealthy because it depends on others.
const PATIENT: Thresholds = Thresholds {
    unhealthy_after: secs(1800),
    ..Thresholds::USUAL
};

/// The behavior of a program for a while.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Answers that it is healthy.
    Well,
    /// Answers that it is unhealthy.
    Says,
    /// Does not answer, and uses this many hundredths of a processor.
    Silent(u32),
}

const IDLE: Does = Does::Silent(0);
const BUSY: Does = Does::Silent(100);

impl Does {
    fn answer(self) -> Result<(), ProbeFailure> {
        match self {
            Self::Well => Ok(()),
            Self::Says => Err(ProbeFailure::says("not well")),
            Self::Silent(_) => Err(ProbeFailure::silent("no answer")),
        }
    }

    fn cpu_share(self) -> u32 {
        match self {
            Self::Silent(hundredths) => hundredths,
            Self::Well | Self::Says => 0,
        }
    }
}

fn is_end(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::NotReady { .. } | Verdict::Hung { .. })
}

/// Probes every `step` a program whose behavior is given by start times, and returns the verdicts
/// other than `Unchanged`, up to the end of the program or of the day.
fn verdicts(thresholds: Thresholds, step: Duration, does: &[(u64, Does)]) -> Vec<(u64, Verdict)> {
    let start = Instant::now();
    let mut tracker = HealthTracker::new(thresholds, start, Duration::ZERO);
    let (mut passed, mut cpu_time) = (Duration::ZERO, Duration::ZERO);
    let mut told = Vec::new();
    while passed < secs(24 * 3600) {
        passed += step;
        let now = does.iter().rfind(|(from, _)| secs(*from) <= passed);
        let now = now.expect("something from the start").1;
        cpu_time += step * now.cpu_share() / 100;
        let verdict = tracker.judge(start + passed, cpu_time, now.answer());
        if verdict != Verdict::Unchanged {
            let is_over = is_end(&verdict);
            told.push((passed.as_secs(), verdict));
            if is_over {
                break;
            }
        }
    }
    told
}

fn failing(does: Does) -> Verdict {
    let why = does.answer().unwrap_err().why;
    Verdict::Failing { why }
}

fn not_ready(within: u64, does: Does) -> Verdict {
    let why = does.answer().unwrap_err().why;
    Verdict::NotReady {
        within: secs(within),
        why,
    }
}

fn hung(within: u64, does: Does) -> Verdict {
    let why = does.answer().unwrap_err().why;
    Verdict::Hung {
        within: secs(within),
        why,
    }
}

/// The behavior of a program by start time in seconds, and the expected verdicts.
type Row<'a> = (&'a str, &'a [(u64, Does)], &'a [(u64, Verdict)]);

fn check(thresholds: Thresholds, rows: &[Row<'_>]) {
    for (what, does, expected) in rows {
        assert_eq!(verdicts(thresholds, secs(10), does), *expected, "{what}");
    }
}

#[test]
fn a_start() {
    use Does::{Says, Silent, Well};
    check(
        Thresholds::USUAL,
        &[
            ("works", &[(0, IDLE), (100, Well)], &[(100, Verdict::Ready)]),
            ("works at once", &[(0, Well)], &[(10, Verdict::Ready)]),
            (
                "works late",
                &[(0, BUSY), (1200, Well)],
                &[(1200, Verdict::Ready)],
            ),
            ("does nothing", &[(0, IDLE)], &[(610, not_ready(600, IDLE))]),
            ("says why not", &[(0, Says)], &[(610, not_ready(600, Says))]),
            ("is busy", &[(0, BUSY)], &[(1210, not_ready(1200, BUSY))]),
            (
                "is hardly busy",
                &[(0, Silent(10))],
                &[(1210, not_ready(1200, IDLE))],
            ),
            (
                "is less than busy",
                &[(0, Silent(9))],
                &[(610, not_ready(600, IDLE))],
            ),
            (
                "stops shortly before its time is over",
                &[(0, BUSY), (560, IDLE)],
                &[(680, not_ready(600, IDLE))],
            ),
            (
                "stops later",
                &[(0, BUSY), (900, IDLE)],
                &[(1020, not_ready(600, IDLE))],
            ),
        ],
    );
}

#[test]
fn a_program_that_has_worked() {
    use Does::{Says, Silent, Well};
    let ready = || (10, Verdict::Ready);
    check(
        Thresholds::USUAL,
        &[
            (
                "hangs",
                &[(0, Well), (110, IDLE)],
                &[ready(), (110, failing(IDLE)), (230, hung(120, IDLE))],
            ),
            (
                "hangs, and is less than busy",
                &[(0, Well), (110, Silent(9))],
                &[ready(), (110, failing(IDLE)), (230, hung(120, IDLE))],
            ),
            (
                "has too much to do",
                &[(0, Well), (110, BUSY)],
                &[ready(), (110, failing(BUSY)), (710, hung(600, BUSY))],
            ),
            (
                "has too much to do, and gives up",
                &[(0, Well), (110, BUSY), (310, IDLE)],
                &[ready(), (110, failing(BUSY)), (430, hung(120, IDLE))],
            ),
            (
                "says that it is not well",
                &[(0, Well), (110, Says)],
                &[ready(), (110, failing(Says)), (230, hung(120, Says))],
            ),
            (
                "is well again in time, twice",
                &[
                    (0, Well),
                    (110, IDLE),
                    (220, Well),
                    (230, Says),
                    (340, Well),
                ],
                &[
                    ready(),
                    (110, failing(IDLE)),
                    (220, Verdict::Recovered),
                    (230, failing(Says)),
                    (340, Verdict::Recovered),
                ],
            ),
            (
                "says something once",
                &[(0, Well), (110, IDLE), (200, Says), (210, IDLE)],
                &[ready(), (110, failing(IDLE)), (330, hung(120, IDLE))],
            ),
        ],
    );
}

#[test]
fn a_program_that_may_lack_others_for_long() {
    use Does::{Says, Well};
    let ready = || (10, Verdict::Ready);
    check(
        PATIENT,
        &[
            (
                "says so for ever",
                &[(0, Well), (110, Says)],
                &[ready(), (110, failing(Says)), (1910, hung(1800, Says))],
            ),
            (
                "hangs at last",
                &[(0, Well), (110, Says), (1010, IDLE)],
                &[ready(), (110, failing(Says)), (1130, hung(120, IDLE))],
            ),
            (
                "is busy at last",
                &[(0, Well), (110, Says), (1010, BUSY)],
                &[ready(), (110, failing(Says)), (1610, hung(600, BUSY))],
            ),
            ("starts", &[(0, Says)], &[(610, not_ready(600, Says))]),
        ],
    );
}

#[test]
fn a_start_is_probed_ever_more_rarely() {
    let start = Instant::now();
    let mut tracker = HealthTracker::new(Thresholds::USUAL, start, Duration::ZERO);
    let mut next = |after: Duration, answer| {
        tracker.judge(start + after, Duration::ZERO, answer);
        tracker.next_probe_in(start + after)
    };
    let silent = || IDLE.answer();
    assert_eq!(next(secs(0), silent()), Duration::from_millis(250));
    assert_eq!(next(secs(10), silent()), Duration::from_millis(250));
    assert_eq!(next(secs(50), silent()), secs(1));
    assert_eq!(next(secs(500), silent()), secs(10));
    assert_eq!(next(secs(510), Ok(())), secs(10));
    assert_eq!(next(secs(520), silent()), secs(10));
}

fn anything() -> impl Strategy<Value = Does> {
    prop_oneof![
        Just(Does::Well),
        Just(Does::Says),
        (0_u32..30).prop_map(Does::Silent),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn whatever_a_program_does(
        does in prop::collection::vec((1_u64..200, anything()), 1..120),
    ) {
        let given = PATIENT;
        let start = Instant::now();
        let mut tracker = HealthTracker::new(given, start, Duration::ZERO);
        let (mut passed, mut cpu_time) = (Duration::ZERO, Duration::ZERO);
        let (mut was_ready, mut is_well) = (false, false);
        let (mut last_well, mut last_word) = (Duration::ZERO, Duration::ZERO);
        for (seconds, now) in does {
            passed += secs(seconds);
            cpu_time += secs(seconds) * now.cpu_share() / 100;
            let verdict = tracker.judge(start + passed, cpu_time, now.answer());
            match verdict {
                // Only a healthy answer makes it ready.
                Verdict::Ready => {
                    prop_assert!(!was_ready && matches!(now, Does::Well));
                    (was_ready, is_well) = (true, true);
                }
                Verdict::Recovered => {
                    prop_assert!(was_ready && !is_well && matches!(now, Does::Well));
                    is_well = true;
                }
                Verdict::Failing { .. } => {
                    prop_assert!(is_well && !matches!(now, Does::Well));
                    is_well = false;
                }
                Verdict::NotReady { within, .. } => {
                    prop_assert!(!was_ready && passed > within);
                    prop_assert!(within >= given.ready_within);
                    break;
                }
                Verdict::Hung { within, .. } => {
                    let since = match now {
                        Does::Says => last_well,
                        _ => last_word,
                    };
                    prop_assert!(was_ready && passed - since > within);
                    break;
                }
                Verdict::Unchanged => {
                    prop_assert_eq!(is_well, matches!(now, Does::Well));
                    // The limit is one of the configured ones.
                    let most = match now {
                        Does::Well => Duration::MAX,
                        _ if !was_ready => given.ready_within + given.busy_after,
                        Does::Says => given.unhealthy_after,
                        Does::Silent(_) => given.busy_after,
                    };
                    let since = match now {
                        _ if !was_ready => Duration::ZERO,
                        Does::Silent(_) => last_word,
                        _ => last_well,
                    };
                    prop_assert!(passed - since <= most);
                }
            }
            match now {
                Does::Well => (last_well, last_word) = (passed, passed),
                Does::Says => last_word = passed,
                Does::Silent(_) => {}
            }
        }
    }
}
