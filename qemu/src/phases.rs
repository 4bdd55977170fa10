//! The timeline of a boot: its progress, and the duration of each phase.
//!
//! The input is the lines of a console, one after the other. From [`Milestone::Kernel`] on, the node itself reports its
//! progress. Before that, the firmware's phase ends with OVMF's message that it starts a boot option, or, if there is
//! none, with the kernel's first line. A quiet kernel that QEMU loads directly prints nothing, and then firmware and
//! kernel are one phase, counted as the kernel's.

use std::fmt;
use std::time::Duration;

use hearth_api::console::{Milestone, Report};

use crate::console::Line;

/// A phase of a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// From QEMU's start until the firmware starts a boot option.
    Firmware,
    /// Until PID 1 runs.
    Kernel,
    /// Until the node has an address.
    Network,
    /// Until the data partition is mounted.
    Storage,
    /// Until etcd serves the node.
    Consensus,
    /// Until the curator's port is open.
    Curator,
    /// Until the node is a member of its cluster.
    Home,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Self; 7] = [
        Self::Firmware,
        Self::Kernel,
        Self::Network,
        Self::Storage,
        Self::Consensus,
        Self::Curator,
        Self::Home,
    ];

    /// Its name for display and for benchmark records.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Firmware => "firmware",
            Self::Kernel => Milestone::Kernel.word(),
            Self::Network => Milestone::Network.word(),
            Self::Storage => Milestone::Storage.word(),
            Self::Consensus => Milestone::Consensus.word(),
            Self::Curator => Milestone::Curator.word(),
            Self::Home => Milestone::Home.word(),
        }
    }

    /// The phase that this milestone ends.
    pub const fn ended_by(milestone: Milestone) -> Self {
        match milestone {
            Milestone::Kernel => Self::Kernel,
            Milestone::Network => Self::Network,
            Milestone::Storage => Self::Storage,
            Milestone::Consensus => Self::Consensus,
            Milestone::Curator => Self::Curator,
            Milestone::Home => Self::Home,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// The end of a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The phase.
    pub phase: Phase,
    /// When it ended, since QEMU's start.
    pub at: Duration,
    /// Its duration: since the end of the previous phase.
    pub took: Duration,
    /// The node's detail of it, an address for instance; may be empty.
    pub detail: String,
}

/// The completed phases of a boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    passed: Vec<Passed>,
    /// When this boot began, since QEMU's start.
    begun: Duration,
    /// How often the machine has rebooted since.
    reboots: u32,
}

impl Timeline {
    /// The timeline of a machine that is just being powered on.
    pub fn new() -> Self {
        Self::default()
    }

    /// Processes the next line; returns the phase that ended with it, if any. A line from the beginning of a boot,
    /// after the kernel's phase has ended, restarts the timeline.
    pub fn observe(&mut self, line: &Line) -> Option<Passed> {
        if let Some(sign) = Sign::of(&line.text) {
            return self.begin(sign, line.at);
        }
        let Report::Reached(milestone, detail) = Report::parse(&line.text)? else {
            return None;
        };
        let phase = Phase::ended_by(milestone);
        if self.get(phase).is_some() {
            if milestone != Milestone::Kernel {
                // Each occurs at most once in a boot; the first counts.
                return None;
            }
            self.start_anew(line.at);
        }
        Some(self.pass(phase, line.at, detail))
    }

    /// The end of this phase, if it has ended.
    pub fn get(&self, phase: Phase) -> Option<&Passed> {
        self.passed.iter().find(|passed| passed.phase == phase)
    }

    /// All ended phases, in the order in which they ended.
    pub fn passed(&self) -> &[Passed] {
        &self.passed
    }

    /// The first phase that has not ended; none when the node is HOME. A firmware phase that was not seen ends with the
    /// kernel's.
    pub fn current(&self) -> Option<Phase> {
        let after_firmware = !self.passed.is_empty();
        Phase::ALL
            .into_iter()
            .skip(usize::from(after_firmware))
            .find(|phase| self.get(*phase).is_none())
    }

    /// When this boot began, since QEMU's start.
    pub fn begun(&self) -> Duration {
        self.begun
    }

    /// How often the machine has rebooted.
    pub fn reboots(&self) -> u32 {
        self.reboots
    }

    fn begin(&mut self, sign: Sign, at: Duration) -> Option<Passed> {
        if self.get(Phase::Kernel).is_some() {
            self.start_anew(at);
        }
        match (sign, self.get(Phase::Firmware)) {
            // It tried another boot option before this one.
            (Sign::FirmwareStarts, Some(_)) => self.passed.clear(),
            (Sign::FirmwareStarts, None) | (Sign::KernelSpeaks, None) => {}
            (Sign::KernelSpeaks, Some(_)) => return None,
        }
        Some(self.pass(Phase::Firmware, at, String::new()))
    }

    fn start_anew(&mut self, at: Duration) {
        self.passed.clear();
        self.begun = at;
        self.reboots += 1;
    }

    fn pass(&mut self, phase: Phase, at: Duration, detail: String) -> Passed {
        let before = self.passed.last().map_or(self.begun, |last| last.at);
        let passed = Passed {
            phase,
            at,
            took: at.saturating_sub(before),
            detail,
        };
        self.passed.push(passed.clone());
        passed
    }
}

/// Lines at the beginning of a boot.
#[derive(Clone, Copy)]
enum Sign {
    /// The firmware starts a boot option; it may return and start another.
    FirmwareStarts,
    /// The first line of the kernel.
    KernelSpeaks,
}

impl Sign {
    fn of(line: &str) -> Option<Self> {
        if line.contains("BdsDxe: starting Boot") {
            return Some(Self::FirmwareStarts);
        }
        let kernel = line.starts_with("EFI stub:") || line.contains("] Linux version ");
        kernel.then_some(Self::KernelSpeaks)
    }
}

impl fmt::Display for Timeline {
    /// A table: each phase, its duration, and when it ended.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, passed) in self.passed.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(
                f,
                "{:<10} {:>7.2} s  at {:>7.2} s",
                passed.phase,
                passed.took.as_secs_f64(),
                passed.at.as_secs_f64()
            )?;
            if !passed.detail.is_empty() {
                write!(f, "  {}", passed.detail)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(at: u64, text: &str) -> Line {
        Line {
            at: Duration::from_millis(at),
            text: text.into(),
        }
    }

    fn observe(timeline: &mut Timeline, at: u64, text: &str) -> Option<(Phase, u64)> {
        let passed = timeline.observe(&line(at, text))?;
        Some((
            passed.phase,
            u64::try_from(passed.took.as_millis()).expect("short"),
        ))
    }

    #[test]
    fn a_boot_through_uefi() {
        let mut timeline = Timeline::new();
        let mut see = |at, text| observe(&mut timeline, at, text);
        assert_eq!(see(100, "BdsDxe: loading Boot0001 \"x\""), None);
        assert_eq!(
            see(4000, "BdsDxe: starting Boot0001 \"x\""),
            Some((Phase::Firmware, 4000))
        );
        assert_eq!(
            see(5000, "BdsDxe: starting Boot0002 \"y\""),
            Some((Phase::Firmware, 5000))
        );
        assert_eq!(see(5100, "EFI stub: loaded"), None);
        assert_eq!(see(5200, "[    0.000000] Linux version 6.12"), None);
        assert_eq!(
            see(6000, "hearth: reached kernel"),
            Some((Phase::Kernel, 1000))
        );
        // Storage may be ready first.
        assert_eq!(
            see(6500, "hearth: reached storage ENCRYPTED"),
            Some((Phase::Storage, 500))
        );
        assert_eq!(
            see(6700, "hearth: reached network 10.0.2.15/24"),
            Some((Phase::Network, 200))
        );
        assert_eq!(see(6800, "hearth: reached network again"), None);
        assert_eq!(see(9000, "hearth: reached home"), Some((Phase::Home, 2300)));
        assert_eq!(timeline.reboots(), 0);
        let table = timeline.to_string();
        assert_eq!(table.lines().count(), 5);
        assert!(table.contains("10.0.2.15/24"), "{table}");
    }

    #[test]
    fn a_quiet_direct_boot_has_no_firmware() {
        let mut timeline = Timeline::new();
        assert_eq!(timeline.current(), Some(Phase::Firmware));
        assert_eq!(
            observe(&mut timeline, 2000, "hearth: reached kernel"),
            Some((Phase::Kernel, 2000))
        );
        assert_eq!(timeline.current(), Some(Phase::Network));
        assert_eq!(timeline.get(Phase::Firmware), None);
    }

    #[test]
    fn a_reboot_starts_anew() {
        let mut timeline = Timeline::new();
        for (at, text) in [(1000, "] Linux version "), (2000, "hearth: reached kernel")] {
            timeline.observe(&line(at, text));
        }
        assert_eq!(
            observe(&mut timeline, 9000, "BdsDxe: starting Boot0001"),
            Some((Phase::Firmware, 0))
        );
        assert_eq!(
            observe(&mut timeline, 9500, "hearth: reached kernel"),
            Some((Phase::Kernel, 500))
        );
        assert_eq!(
            (timeline.reboots(), timeline.begun()),
            (1, Duration::from_secs(9))
        );
        // And a quiet one.
        assert_eq!(
            observe(&mut timeline, 12000, "hearth: reached kernel"),
            Some((Phase::Kernel, 0))
        );
        assert_eq!(timeline.reboots(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// For lines in any order: the phases add up to the length of the boot, and each occurs at most once.
        #[test]
        fn the_parts_add_up(steps in proptest::collection::vec((0usize..8, 1u64..1000), 0..30)) {
            let mut timeline = Timeline::new();
            let mut at = 0;
            for (what, step) in steps {
                at += step;
                let text = match what {
                    0 => "BdsDxe: starting Boot0001".to_owned(),
                    1 => "] Linux version 6".to_owned(),
                    n => Report::Reached(Milestone::ALL[n - 2], String::new()).to_string(),
                };
                timeline.observe(&line(at, &text));
                let sum: Duration = timeline.passed().iter().map(|passed| passed.took).sum();
                let end = timeline.passed().last().map_or(timeline.begun(), |last| last.at);
                prop_assert_eq!(timeline.begun() + sum, end);
                let mut phases: Vec<Phase> = timeline.passed().iter().map(|passed| passed.phase).collect();
                phases.sort_unstable();
                phases.dedup();
                prop_assert_eq!(phases.len(), timeline.passed().len());
            }
        }
    }
}
