//! Follows a boot on the console: its progress, what it waits for, and what ends it.

use hearth_api::console::Report;
use hearth_qemu::console::Line;
use hearth_qemu::phases::{Passed, Phase, Timeline};

use crate::formation::shown_key;

/// A console line that ends the boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BootFailure {
    /// The node rejected its parameters or disk and does not continue; the reason.
    Refused(String),
    /// The node core has ended; the reason.
    CoreEnded(String),
    /// The kernel has panicked; its line.
    Panic(String),
    /// The machine rebooted without a request.
    Rebooted,
}

impl std::fmt::Display for BootFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BootFailure::Refused(why) => {
                write!(f, "the node rejected its parameters or disk: {why}")
            }
            BootFailure::CoreEnded(why) => write!(f, "the node core ended: {why}"),
            BootFailure::Panic(line) => write!(f, "the kernel panicked: {line}"),
            BootFailure::Rebooted => f.write_str("the machine rebooted by itself"),
        }
    }
}

/// What a line adds to the state of the boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A phase of the boot is complete.
    Passed(Passed),
    /// The node waits for something else.
    Waiting(String),
    /// The node runs without the extension of this name; the reason.
    ExtensionRefused(String, String),
    /// The boot has failed.
    BootFailure(BootFailure),
}

/// The progress of one boot.
#[derive(Debug, Default)]
pub struct Boot {
    timeline: Timeline,
    waiting: Option<String>,
    down: Option<String>,
    key: Option<Vec<u8>>,
}

impl Boot {
    /// The boot of a machine that is just being powered on.
    pub fn new() -> Boot {
        Boot::default()
    }

    /// Processes the next line of the console; returns what is new in it.
    pub fn observe(&mut self, line: &Line) -> Vec<Sign> {
        let mut signs = Vec::new();
        let reboots = self.timeline.reboots();
        if let Some(passed) = self.timeline.observe(line) {
            self.waiting = None;
            signs.push(Sign::Passed(passed));
        }
        if self.timeline.reboots() > reboots {
            signs.push(Sign::BootFailure(BootFailure::Rebooted));
        } else if let Some(at) = line.text.find("Kernel panic - ") {
            let line = line.text[at..].to_owned();
            signs.push(Sign::BootFailure(BootFailure::Panic(line)));
        } else if let Some(report) = Report::parse(&line.text) {
            signs.extend(self.told(report));
        }
        signs
    }

    fn told(&mut self, report: Report) -> Option<Sign> {
        match report {
            Report::Refused(why) => Some(Sign::BootFailure(BootFailure::Refused(why))),
            Report::CoreEnded(why) => Some(Sign::BootFailure(BootFailure::CoreEnded(why))),
            Report::Waiting(why) => {
                self.key = shown_key(&why).or(self.key.take());
                self.wait_for(&why).then_some(Sign::Waiting(why))
            }
            // The new end of a disk that was enlarged is wiped later, and nothing waits for it.
            Report::Wiping(progress) if self.timeline.get(Phase::Storage).is_none() => {
                let why = format!("its disk to be wiped: {progress}");
                self.wait_for(&why).then_some(Sign::Waiting(why))
            }
            Report::Extension(name, Some(why)) => Some(Sign::ExtensionRefused(name, why)),
            Report::Down(how) => {
                self.down = Some(how);
                None
            }
            Report::Reached(..)
            | Report::State(_)
            | Report::Wiping(_)
            | Report::Extension(_, None)
            | Report::Failpoint(_)
            | Report::Installing(_)
            | Report::Installed(_) => None,
        }
    }

    /// Sets what the node waits for, from a source other than the console. False: it is set already.
    pub fn wait_for(&mut self, why: &str) -> bool {
        let new = self.waiting.as_deref() != Some(why);
        self.waiting = Some(why.to_owned());
        new
    }

    /// The completed phases.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// What the node waits for, if it still does.
    pub fn waiting(&self) -> Option<&str> {
        self.waiting.as_deref()
    }

    /// The shutdown that the node has reported, if any.
    pub fn down(&self) -> Option<&str> {
        self.down.as_deref()
    }

    /// The public key on the console of a node that waits for approval.
    pub fn key(&self) -> Option<&[u8]> {
        self.key.as_deref()
    }

    /// Whether the node has reported that it is HOME.
    pub fn is_home(&self) -> bool {
        self.timeline.get(Phase::Home).is_some()
    }

    /// Whether Hearth runs in the machine, so that it can be asked to shut down.
    pub fn has_begun(&self) -> bool {
        self.timeline.reboots() > 0 || self.timeline.get(Phase::Kernel).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn see(boot: &mut Boot, at: u64, text: &str) -> Option<BootFailure> {
        let line = Line {
            at: Duration::from_millis(at),
            text: text.into(),
        };
        let signs = boot.observe(&line).into_iter();
        let mut troubles = signs.filter_map(|sign| match sign {
            Sign::BootFailure(trouble) => Some(trouble),
            _ => None,
        });
        troubles.next()
    }

    #[test]
    fn what_ends_a_boot_is_told_apart() {
        let mut boot = Boot::new();
        assert_eq!(see(&mut boot, 1, "hearth: reached kernel 6.12"), None);
        assert_eq!(
            see(&mut boot, 2, "hearth: refused field x: empty"),
            Some(BootFailure::Refused("field x: empty".to_owned()))
        );
        assert_eq!(
            see(&mut boot, 3, "hearth: core ended: exit code 3"),
            Some(BootFailure::CoreEnded("exit code 3".to_owned()))
        );
        assert_eq!(
            see(&mut boot, 4, "[ 1.0] Kernel panic - not syncing: x"),
            Some(BootFailure::Panic(
                "Kernel panic - not syncing: x".to_owned()
            ))
        );
        assert_eq!(
            see(&mut boot, 5, "BdsDxe: starting Boot0001"),
            Some(BootFailure::Rebooted)
        );
        // The new boot continues normally.
        assert_eq!(see(&mut boot, 6, "hearth: reached kernel"), None);
        assert_eq!(boot.timeline().reboots(), 1);
    }

    #[test]
    fn a_reason_to_wait_holds_until_a_phase_is_over() {
        let mut boot = Boot::new();
        assert!(!boot.has_begun());
        see(&mut boot, 1, "hearth: waiting for a DHCP lease");
        assert_eq!(boot.waiting(), Some("a DHCP lease"));
        assert!(!boot.wait_for("a DHCP lease") && boot.wait_for("an answer"));
        see(&mut boot, 2, "hearth: reached network 10.0.2.15/24");
        assert_eq!(boot.waiting(), None);
        assert_eq!(boot.down(), None);
        see(&mut boot, 3, "hearth: down power off");
        assert_eq!(boot.down(), Some("power off"));
    }

    #[test]
    fn a_key_that_was_shown_stays() {
        let mut boot = Boot::new();
        let key = "ab".repeat(32);
        see(
            &mut boot,
            1,
            &format!("hearth: waiting for approval: hearthctl node approve {key}"),
        );
        see(&mut boot, 2, "hearth: waiting for something else");
        assert_eq!(boot.key(), Some(&[0xab; 32][..]));
    }
}
