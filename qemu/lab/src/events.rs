//! What is told while a cluster is formed and looked after.
//!
//! Everything that a user should read passes here, as data: a terminal may draw it, a log may write it down, a test may
//! ignore it. An event's `Display` is its line for people.

use std::fmt;
use std::time::Duration;

use hearth_qemu::phases::{Passed, Phase};

use crate::boot::Trouble;
use crate::formation::{Candidate, Step};
use crate::{LabError, Standing};

/// Whoever is told.
pub trait Observer: Send + Sync {
    /// Something has happened. To be done with soon: consoles wait to be read meanwhile.
    fn event(&self, event: &Event<'_>);
}

/// For those who do not want to know.
pub struct Nobody;

impl Observer for Nobody {
    fn event(&self, _: &Event<'_>) {}
}

/// Something that has happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// A machine is about to be switched on.
    Starts {
        /// Which.
        machine: &'a str,
    },
    /// A machine boots from its disk, which holds an older image than the one that there is.
    OlderImage {
        /// Which.
        machine: &'a str,
    },
    /// A machine was switched on, and this part of its boot is the first.
    On {
        /// Which.
        machine: &'a str,
        /// The part.
        phase: Option<Phase>,
    },
    /// A part of its boot is over.
    Passed {
        /// Whose.
        machine: &'a str,
        /// Which part.
        passed: &'a Passed,
        /// The next.
        next: Option<Phase>,
    },
    /// It waits for something else than before.
    Waiting {
        /// Which.
        machine: &'a str,
        /// For what.
        why: &'a str,
    },
    /// It does without an extension.
    ExtensionRefused {
        /// Which.
        machine: &'a str,
        /// The extension.
        extension: &'a str,
        /// Why.
        why: &'a str,
    },
    /// It is home, and is asked over the network now.
    Asking {
        /// Which.
        machine: &'a str,
    },
    /// Of its boot nothing more is to be shown.
    Over {
        /// Whose.
        machine: &'a str,
    },
    /// Its owner was told that it is HOME and healthy.
    Answers {
        /// Since the first question.
        took: Duration,
    },
    /// A step towards the cluster that is wanted was taken.
    Took(&'a Step),
    /// A machine lacks something that it did not lack before, or something else.
    Lacks {
        /// Which.
        machine: &'a str,
        /// What.
        what: &'a str,
    },
    /// The nodes get their Kubernetes roles now.
    KubernetesBegins,
    /// A node has got Kubernetes roles.
    KubernetesRoles {
        /// Whose machine.
        machine: &'a str,
        /// Whether it is a controller from now on.
        controller: bool,
        /// Whether it is a worker from now on.
        worker: bool,
    },
    /// How Kubernetes is on a machine, where that has changed; of its pods, under `pods`.
    Kubernetes {
        /// Whose.
        machine: &'a str,
        /// How.
        how: &'a str,
    },
    /// A look at the cluster that is watched.
    Seen(&'a Snapshot<'a>),
    /// Something is wrong with a machine, and it goes on.
    Trouble {
        /// Which.
        machine: &'a str,
        /// What.
        trouble: &'a Trouble,
    },
    /// It has gone down in order.
    Down {
        /// Which.
        machine: &'a str,
        /// Since it was asked to, if this process did that.
        took: Option<Duration>,
    },
    /// It has ended in another way.
    Off {
        /// Which.
        machine: &'a str,
        /// How.
        exit: &'a hearth_qemu::vm::Exit,
    },
    /// All machines and their network have ended, by another process.
    AllOff,
    /// Machines are asked to go down.
    PoweringOff {
        /// Which.
        machines: &'a [&'a str],
    },
    /// A plug was pulled out of a machine in which nothing of ours ran yet.
    Unstarted {
        /// Which.
        machine: &'a str,
    },
    /// A plug was pulled because nobody wanted to wait any longer.
    Pulled {
        /// Which.
        machine: &'a str,
    },
    /// A question was not answered, and is asked again.
    AskingAgain(&'a LabError),
}

/// How a cluster is that is watched.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Its machines.
    pub candidates: &'a [Candidate],
    /// Which of them are switched on, in the same order.
    pub on: &'a [bool],
    /// How it stands, or stood last.
    pub standing: &'a Standing,
    /// Why nobody says how it stands now.
    pub silence: Option<&'a LabError>,
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Starts { machine } => write!(f, "{machine} starts"),
            Event::OlderImage { machine } => write!(
                f,
                "  {machine}'s disk holds an older image, and boots that; --fresh takes the new one"
            ),
            Event::On { machine, .. } => write!(f, "{machine} is on"),
            Event::Passed { passed, .. } => {
                let took = passed.took.as_secs_f64();
                let line = format!("{:<10} {took:>6.2} s  {}", passed.phase, passed.detail);
                f.write_str(line.trim_end())
            }
            Event::Waiting { why, .. } => write!(f, "… waiting for {why}"),
            Event::ExtensionRefused { extension, why, .. } => {
                write!(f, "extension {extension} is refused: {why}")
            }
            Event::Asking { machine } => write!(f, "{machine} is asked"),
            Event::Over { machine } => write!(f, "{machine} has booted"),
            Event::Answers { took } => {
                let took = took.as_secs_f64();
                write!(f, "  {:<10} {took:>6.2} s  HOME, healthy", "answers")
            }
            Event::Took(step) => write!(f, "  {step}"),
            Event::Lacks { machine, what } => write!(f, "  {machine}  … waiting for {what}"),
            Event::KubernetesBegins => f.write_str("the nodes get their Kubernetes roles"),
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
            Event::Trouble { machine, trouble } => write!(f, "{machine}: {trouble}"),
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
                "{machine} is off: {exit}; `cargo xtask power start {machine}` switches it on"
            ),
            Event::AllOff => f.write_str("all machines are off, and their network has ended"),
            Event::PoweringOff { machines } => write!(
                f,
                "powering off {}; another Ctrl-C pulls {}",
                machines.join(", "),
                if machines.len() == 1 {
                    "its plug"
                } else {
                    "their plugs"
                }
            ),
            Event::Unstarted { machine } => {
                write!(f, "{machine} is off; its kernel had not started")
            }
            Event::Pulled { machine } => write!(f, "{machine} is off: a power cut"),
            Event::AskingAgain(error) => {
                write!(f, "asking again: {}", hearth_api::chain(*error))
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
