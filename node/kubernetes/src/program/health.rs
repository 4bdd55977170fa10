//! When a program is ready, and when it has to be restarted.
//!
//! A [`HealthTracker`] has no process, no clock and no probe: it gets the result of each probe, the
//! time, and the CPU time that the program has used. So all limits are tested as a table, without
//! waiting.
//!
//! | the program | is restarted after |
//! |---|---|
//! | is starting | `ready_within`; while it is busy, `busy_after` more |
//! | answers that it is unhealthy | `unhealthy_after` since it was last healthy |
//! | does not answer and is idle | `silent_after` since it last answered or was busy |
//! | does not answer and is busy | `busy_after` since it last answered |
//!
//! A busy program gets more time, because in most cases the machine is overloaded, and a restart
//! would be additional load.

use std::time::Duration;

use tokio::time::Instant;

use super::ProbeFailure;

/// A program is busy if it uses at least this share of a processor.
const BUSY_SHARE: f64 = 0.1;
/// Minimum interval between two probes of a starting program.
const MIN_STARTING_PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// The longer a start takes, the less often it is probed, because each answer takes CPU time from
/// the start. Readiness is noticed late by at most this share of the duration of the start.
const STARTING_PROBE_SHARE: f64 = 0.02;

/// Time limits of a program.
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    /// Time to become ready. If the program is still busy then, it gets `busy_after` in addition: a
    /// restart would have to do the same work again.
    pub ready_within: Duration,
    /// Time without an answer while idle; after it was ready, or after `ready_within`.
    pub silent_after: Duration,
    /// Time without an answer while busy.
    pub busy_after: Duration,
    /// Time for which it may answer that it is unhealthy.
    pub unhealthy_after: Duration,
    /// Interval between two probes of a program that is ready.
    pub probe_every: Duration,
}

impl Thresholds {
    /// The limits of most programs.
    pub const USUAL: Self = Self {
        ready_within: Duration::from_secs(600),
        silent_after: Duration::from_secs(120),
        busy_after: Duration::from_secs(600),
        unhealthy_after: Duration::from_secs(120),
        probe_every: Duration::from_secs(10),
    };
}

/// What follows from the result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The state is the same as before.
    Unchanged,
    /// The program is ready for the first time.
    Ready,
    /// The program is healthy again.
    Recovered,
    /// The program has become unhealthy; it may recover.
    Failing {
        /// The result of the probe.
        why: String,
    },
    /// The program has not become ready in time.
    NotReady {
        /// The limit that it has exceeded.
        within: Duration,
        /// The result of the probe.
        why: String,
    },
    /// The program has been unhealthy for too long.
    Hung {
        /// The limit that it has exceeded.
        within: Duration,
        /// The result of the probe.
        why: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Starting,
    Well,
    Unhealthy,
}

/// Tracks the health of one process.
#[derive(Clone, Debug)]
pub struct HealthTracker {
    thresholds: Thresholds,
    phase: Phase,
    started: Instant,
    /// When it last answered that it was healthy; initially its start.
    last_well: Instant,
    /// When it last answered at all; initially its start.
    last_answer: Instant,
    /// When it was last busy, whatever it answered; initially its start.
    last_busy: Instant,
    /// The last sample of the CPU time.
    sample: (Instant, Duration),
}

impl HealthTracker {
    /// A tracker of a program that has just been started and has used `cpu_time` by now.
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

    /// Records the result of a probe. `NotReady` and `Hung` are final.
    pub fn judge(
        &mut self,
        now: Instant,
        cpu_time: Duration,
        answer: Result<(), ProbeFailure>,
    ) -> Verdict {
        self.look_at_work(now, cpu_time);
        let Err(ProbeFailure { answered, why }) = answer else {
            self.last_well = now;
            self.last_answer = now;
            let before = self.phase;
            self.phase = Phase::Well;
            return match before {
                Phase::Starting => Verdict::Ready,
                Phase::Well => Verdict::Unchanged,
                Phase::Unhealthy => Verdict::Recovered,
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
        if self.phase == Phase::Unhealthy {
            return Verdict::Unchanged;
        }
        self.phase = Phase::Unhealthy;
        Verdict::Failing { why }
    }

    /// The delay before the next probe.
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

    /// The limit that a starting program has exceeded, if any.
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

    /// The limit that a program that was ready has exceeded, if any. `answered`: it has just
    /// answered that it is unhealthy.
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
