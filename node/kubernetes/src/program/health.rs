//! When a program counts as working, and when it has to be started again.
//!
//! A [`HealthTracker`] knows no process, no clock and no probe: it is told what
//! the probe has answered, when, and how much processor time the program has
//! had by then, and judges. So every limit is tested as a table, in no time.
//!
//! | the program | is given up after |
//! |---|---|
//! | starts | `ready_within`, but not while it is busy, and then for `busy_after` more |
//! | says that it is not well | `unhealthy_after` since it last was |
//! | says nothing and does nothing | `silent_after` since it last said or did something |
//! | says nothing and is busy | `busy_after` since it last said something |
//!
//! A program that is busy is given longer because it mostly has more to do than
//! the machine can, and a start would be still more.

use std::time::Duration;

use tokio::time::Instant;

use super::Unwell;

/// A program is busy if it has this part of a processor.
const BUSY_SHARE: f64 = 0.1;
/// At least so long lies between two probes of a program that starts.
const MIN_STARTING_PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// The longer a start takes, the rarer it is probed, for each answer takes
/// processors from what it makes ready: that the program works is seen late by
/// at most this part of its start.
const STARTING_PROBE_SHARE: f64 = 0.02;

/// How long a program is given in which situation.
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    /// To begin to work. If it is still busy then, it is given `busy_after` on
    /// top: the next start would have to do the same again.
    pub ready_within: Duration,
    /// To say nothing and do nothing; once it works, or beyond `ready_within`.
    pub silent_after: Duration,
    /// To be busy and say nothing.
    pub busy_after: Duration,
    /// To say of itself that it is not well.
    pub unhealthy_after: Duration,
    /// Between two probes of a program that works.
    pub probe_every: Duration,
}

impl Thresholds {
    /// Of a program that is not special.
    pub const USUAL: Self = Self {
        ready_within: Duration::from_secs(600),
        silent_after: Duration::from_secs(120),
        busy_after: Duration::from_secs(600),
        unhealthy_after: Duration::from_secs(120),
        probe_every: Duration::from_secs(10),
    };
}

/// What follows from an answer of the probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing that has not been said.
    Unchanged,
    /// It works, for the first time.
    Ready,
    /// It works again.
    Recovered,
    /// It does not work any more; it may recover.
    Failing {
        /// The probe's answer.
        why: String,
    },
    /// It has not begun to work in time.
    NotReady {
        /// What it was given.
        within: Duration,
        /// The probe's answer.
        why: String,
    },
    /// It has not worked for too long.
    Hung {
        /// What it was given.
        within: Duration,
        /// The probe's answer.
        why: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Starting,
    Well,
    Unwell,
}

/// Judges one process of a program by its probe's answers.
#[derive(Clone, Debug)]
pub struct HealthTracker {
    thresholds: Thresholds,
    phase: Phase,
    started: Instant,
    /// It last said that it was well; before that, its start.
    last_well: Instant,
    /// It last said anything; before that, its start.
    last_answer: Instant,
    /// It was last busy, whatever it said; before that, its start.
    last_busy: Instant,
    /// When the processor time was last looked at, and how much it was.
    sample: (Instant, Duration),
}

impl HealthTracker {
    /// Of a program that has just been started. `cpu_time` is what it has had of
    /// processors by now.
    pub fn new(thresholds: Thresholds, now: Instant, cpu_time: Duration) -> Self {
        Self {
            thresholds,
            phase: Phase::Starting,
            started: now,
            last_well: now,
            last_answer: now,
            last_busy: now,
            sample: (now, cpu_time),
        }
    }

    /// Takes in what the probe has answered. After `NotReady` or `Hung` there is
    /// nothing more to judge.
    pub fn judge(
        &mut self,
        now: Instant,
        cpu_time: Duration,
        answer: Result<(), Unwell>,
    ) -> Verdict {
        self.look_at_work(now, cpu_time);
        let Err(Unwell { answered, why }) = answer else {
            self.last_well = now;
            self.last_answer = now;
            let before = self.phase;
            self.phase = Phase::Well;
            return match before {
                Phase::Starting => Verdict::Ready,
                Phase::Well => Verdict::Unchanged,
                Phase::Unwell => Verdict::Recovered,
            };
        };
        if answered {
            self.last_answer = now;
        }
        if self.phase == Phase::Starting {
            return match self.exceeded_start(now) {
                Some(within) => Verdict::NotReady { within, why },
                None => Verdict::Unchanged,
            };
        }
        if let Some(within) = self.exceeded(now, answered) {
            return Verdict::Hung { within, why };
        }
        if self.phase == Phase::Unwell {
            return Verdict::Unchanged;
        }
        self.phase = Phase::Unwell;
        Verdict::Failing { why }
    }

    /// How long to wait before the next probe.
    pub fn next_probe_in(&self, now: Instant) -> Duration {
        if self.phase == Phase::Starting {
            let share = (now - self.started).mul_f64(STARTING_PROBE_SHARE);
            MIN_STARTING_PROBE_INTERVAL.max(share)
        } else {
            self.thresholds.probe_every
        }
    }

    fn look_at_work(&mut self, now: Instant, cpu_time: Duration) {
        let (before, had_before) = self.sample;
        self.sample = (now, cpu_time);
        let had_since = cpu_time.saturating_sub(had_before);
        if had_since >= (now - before).mul_f64(BUSY_SHARE) {
            self.last_busy = now;
        }
    }

    /// The limit that a program that starts has exceeded.
    fn exceeded_start(&self, now: Instant) -> Option<Duration> {
        let given = &self.thresholds;
        let taken = now - self.started;
        let at_most = given.ready_within + given.busy_after;
        if taken > at_most {
            return Some(at_most);
        }
        let is_busy = now - self.last_busy <= given.silent_after;
        (taken > given.ready_within && !is_busy).then_some(given.ready_within)
    }

    /// The limit that a program that has worked has exceeded, given whether it
    /// has just said something.
    fn exceeded(&self, now: Instant, answered: bool) -> Option<Duration> {
        let given = &self.thresholds;
        let over = |since: Instant, within| (now - since > within).then_some(within);
        if answered {
            return over(self.last_well, given.unhealthy_after);
        }
        let last_stirred = self.last_answer.max(self.last_busy);
        over(last_stirred, given.silent_after).or_else(|| over(self.last_answer, given.busy_after))
    }
}

#[cfg(test)]
mod tests;
