//! Events while a cluster is formed and watched.
//!
//! Everything that a user should read is an event, as data: a terminal can draw it, a log can record it, a test can
//! ignore it. An event's `Display` is its line of text.

use std::fmt;
use std::time::Duration;

use hearth_qemu::phases::{Passed, Phase};

use crate::boot::BootFailure;
use crate::formation::{Candidate, Step};
use crate::{ClusterStatus, LabError};

/// Receives events.
pub trait Observer: Send + Sync {
    /// Called for each event. Must return quickly: consoles are not read meanwhile.
    fn event(&self, event: &Event<'_>);
}

/// Ignores all events.
pub struct NullObserver;

impl Observer for NullObserver {
    fn event(&self, _: &Event<'_>) {}
}

/// An event.
#[derive(Debug)]
pub enum Event<'a> {
    /// A machine is about to be powered on.
    Starts {
        /// Name of the machine.
        machine: &'a str,
    },
    /// A machine boots from its disk, whose image is older than the current one.
    OlderImage {
        /// Name of the machine.
        machine: &'a str,
    },
    /// A machine was powered on.
    On {
        /// Name of the machine.
        machine: &'a str,
        /// The first phase of its boot.
        phase: Option<Phase>,
    },
    /// A phase of its boot is complete.
    Passed {
        /// Name of the machine.
        machine: &'a str,
        /// The completed phase.
        passed: &'a Passed,
        /// The next phase.
        next: Option<Phase>,
    },
    /// The node waits for something else than before.
    Waiting {
        /// Name of the machine.
        machine: &'a str,
        /// What it waits for.
        why: &'a str,
    },
    /// The node runs without an extension.
    ExtensionRefused {
        /// Name of the machine.
        machine: &'a str,
        /// Name of the extension.
        extension: &'a str,
        /// The reason.
        why: &'a str,
    },
    /// The node is HOME, and is now called over the network.
    Asking {
        /// Name of the machine.
        machine: &'a str,
    },
    /// The rest of its boot is not shown.
    Over {
        /// Name of the machine.
        machine: &'a str,
    },
    /// The owner has seen that it is HOME and healthy.
    Answers {
        /// Time since the first call.
        took: Duration,
    },
    /// A node that waited for its owner was unlocked.
    Unlocked {
        /// Name of the machine, or the ID of a node whose machine is not known.
        machine: &'a str,
    },
    /// The cluster waits until the user unlocks it.
    OwnerNeeded {
        /// What to run.
        command: &'a str,
    },
    /// A step towards the requested cluster was taken.
    Took(&'a Step),
    /// What is missing on a machine has changed.
    Lacks {
        /// Name of the machine.
        machine: &'a str,
        /// What is missing.
        what: &'a str,
    },
    /// The nodes are about to get their Kubernetes roles.
    KubernetesBegins,
    /// A node has got Kubernetes roles.
    KubernetesRoles {
        /// Name of its machine.
        machine: &'a str,
        /// Whether it has become a controller.
        controller: bool,
        /// Whether it has become a worker.
        worker: bool,
    },
    /// The Kubernetes status of a machine has changed; that of its pods under the name `pods`.
    Kubernetes {
        /// Name of the machine, or `pods`.
        machine: &'a str,
        /// The status.
        how: &'a str,
    },
    /// A snapshot of a watched cluster.
    Seen(&'a Snapshot<'a>),
    /// A machine has a problem, and watching continues.
    BootFailure {
        /// Name of the machine.
        machine: &'a str,
        /// The problem.
        trouble: &'a BootFailure,
    },
    /// It has shut down cleanly.
    Down {
        /// Name of the machine.
        machine: &'a str,
        /// Time since the request, if this process made it.
        took: Option<Duration>,
    },
    /// It has ended in another way.
    Off {
        /// Name of the machine.
        machine: &'a str,
        /// How it ended.
        exit: &'a hearth_qemu::vm::Exit,
    },
    /// All machines and their network have been ended by another process.
    AllOff,
    /// Machines are being shut down.
    PoweringOff {
        /// Their names.
        machines: &'a [&'a str],
    },
    /// The power of a machine was cut before Hearth ran in it.
    Unstarted {
        /// Name of the machine.
        machine: &'a str,
    },
    /// The power of a machine was cut because the user did not want to wait.
    Pulled {
        /// Name of the machine.
        machine: &'a str,
    },
    /// A call failed and will be repeated.
    AskingAgain(&'a LabError),
}

/// A snapshot of a watched cluster.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Its machines.
    pub candidates: &'a [Candidate],
    /// Which of them are powered on, in the same order.
    pub on: &'a [bool],
    /// The latest known status.
    pub cluster_status: &'a ClusterStatus,
    /// Why the current status is unknown.
    pub silence: Option<&'a LabError>,
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Starts { machine } => write!(f, "starting {machine}"),
            Event::OlderImage { machine } => write!(
                f,
                "  {machine} boots the older image on its disk; use --fresh for the new one"
            ),
            Event::On { machine, .. } => write!(f, "{machine} is on"),
            Event::Passed { passed, .. } => {
                let took = passed.took.as_secs_f64();
                let line = format!("{:<10} {took:>6.2} s  {}", passed.phase, passed.detail);
                f.write_str(line.trim_end())
            }
            Event::Waiting { why, .. } => write!(f, "… waiting for {why}"),
            Event::ExtensionRefused { extension, why, .. } => {
                write!(f, "extension {extension} rejected: {why}")
            }
            Event::Asking { machine } => write!(f, "querying {machine}"),
            Event::Over { machine } => write!(f, "{machine} has booted"),
            Event::Answers { took } => {
                let took = took.as_secs_f64();
                write!(f, "  {:<10} {took:>6.2} s  HOME, healthy", "answers")
            }
            Event::Unlocked { machine } => {
                write!(f, "  {machine}: unlocked with the recovery key")
            }
            Event::OwnerNeeded { command } => {
                write!(
                    f,
                    "the cluster is locked and waits for its owner; run: {command}"
                )
            }
            Event::Took(step) => write!(f, "  {step}"),
            Event::Lacks { machine, what } => write!(f, "  {machine}  … waiting for {what}"),
            Event::KubernetesBegins => f.write_str("assigning Kubernetes roles"),
            Event::KubernetesRoles {
                machine,
                controller,
                worker,
            } => {
                let roles = match (controller, worker) {
                    (true, true) => "controller and worker",
                    (true, false) => "controller",
                    _ => "worker",
                };
                write!(f, "  {machine}: Kubernetes {roles}")
            }
            Event::Kubernetes { machine, how } => write!(f, "  {machine}  {how}"),
            Event::Seen(snapshot) => write!(f, "{} machines", snapshot.candidates.len()),
            Event::BootFailure { machine, trouble } => write!(f, "{machine}: {trouble}"),
            Event::Down {
                machine,
                took: None,
            } => write!(f, "{machine} is down"),
            Event::Down {
                machine,
                took: Some(took),
            } => write!(f, "{machine} is down: {:.1} s", took.as_secs_f64()),
            Event::Off { machine, exit } => write!(
                f,
                "{machine} is off: {exit}; start it with `cargo xtask power start {machine}`"
            ),
            Event::AllOff => f.write_str("all machines are off, and their network has stopped"),
            Event::PoweringOff { machines } => write!(
                f,
                "powering off {}; press Ctrl-C again to cut {}",
                machines.join(", "),
                if machines.len() == 1 {
                    "its power"
                } else {
                    "their power"
                }
            ),
            Event::Unstarted { machine } => {
                write!(f, "{machine} is off; its kernel had not started")
            }
            Event::Pulled { machine } => write!(f, "{machine} is off: power cut"),
            Event::AskingAgain(error) => {
                write!(f, "retrying: {}", hearth_api::chain(*error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_one_line() {
        let line = |detail: &str| {
            let passed = Passed {
                phase: Phase::Network,
                at: Duration::from_secs(4),
                took: Duration::from_millis(1230),
                detail: detail.to_owned(),
            };
            let event = Event::Passed {
                machine: "node-2",
                passed: &passed,
                next: Some(Phase::Storage),
            };
            event.to_string()
        };
        assert_eq!(line("10.0.2.15/24"), "network      1.23 s  10.0.2.15/24");
        assert_eq!(line(""), "network      1.23 s");
    }
}
