//! The lines on a node's console that programs read.
//!
//! A machine that has just been switched on has one voice: its serial
//! console. Whoever boots it (`cargo xtask run`, the tests, a rack of real
//! machines behind a terminal server) follows its progress by a few lines of
//! fixed form. They are defined here once, printed by the node with
//! [`Report`]'s `Display` and read back with [`Report::parse`].
//!
//! Each stands on a line of its own and begins with `hearth: `. A line that
//! begins so but is not understood is none of the reader's business: newer
//! nodes may say more.

use std::fmt;

/// How far a boot has come. In this order, each at most once per boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Milestone {
    /// The kernel has started PID 1.
    Kernel,
    /// The node has an address.
    Network,
    /// The data partition is mounted.
    Storage,
    /// etcd serves this node.
    Consensus,
    /// The curator's port is open.
    Curator,
    /// The node is a member of its cluster.
    Home,
}

impl Milestone {
    /// All of them, in order.
    pub const ALL: [Self; 6] = [
        Self::Kernel,
        Self::Network,
        Self::Storage,
        Self::Consensus,
        Self::Curator,
        Self::Home,
    ];

    /// The word that stands for it on the console.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Network => "network",
            Self::Storage => "storage",
            Self::Consensus => "consensus",
            Self::Curator => "curator",
            Self::Home => "home",
        }
    }
}

/// One line for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// `hearth: reached network 10.0.2.15/24`: the detail may be empty.
    Reached(Milestone, String),
    /// `hearth: state HOME`: the cluster state has changed to this.
    State(String),
    /// `hearth: waiting for …`: enrolment retries, and this is why.
    Waiting(String),
    /// `hearth: refused …`: enrolment will not go on by itself, and why.
    Refused(String),
    /// `hearth: extension NAME mounted`, or `hearth: extension NAME refused: …`
    /// with the reason; one for each that the image has.
    Extension(String, Option<String>),
    /// `hearth: failpoint NAME`: a test image stands still at this point.
    Failpoint(String),
    /// `hearth: core ended: …`: the node core is gone; PID 1 reboots.
    CoreEnded(String),
    /// `hearth: power off` / `hearth: reboot`: the machine goes down in order.
    Down(String),
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reached(milestone, detail) if detail.is_empty() => {
                write!(f, "hearth: reached {}", milestone.word())
            }
            Self::Reached(milestone, detail) => {
                write!(f, "hearth: reached {} {detail}", milestone.word())
            }
            Self::State(state) => write!(f, "hearth: state {state}"),
            Self::Waiting(why) => write!(f, "hearth: waiting for {why}"),
            Self::Refused(why) => write!(f, "hearth: refused {why}"),
            Self::Extension(name, None) => write!(f, "hearth: extension {name} mounted"),
            Self::Extension(name, Some(why)) => {
                write!(f, "hearth: extension {name} refused: {why}")
            }
            Self::Failpoint(name) => write!(f, "hearth: failpoint {name}"),
            Self::CoreEnded(why) => write!(f, "hearth: core ended: {why}"),
            Self::Down(how) => write!(f, "hearth: down {how}"),
        }
    }
}

impl Report {
    /// Reads one console line; `None` if it is not a report. The line may
    /// carry a carriage return and text before the marker (a kernel message
    /// that was cut off by it).
    pub fn parse(line: &str) -> Option<Self> {
        let at = line.find("hearth: ")?;
        let rest = line[at + "hearth: ".len()..].trim_end();
        let (word, detail) = rest.split_once(' ').unwrap_or((rest, ""));
        match word {
            "reached" => {
                let (phase, detail) = detail.split_once(' ').unwrap_or((detail, ""));
                let milestone = Milestone::ALL.into_iter().find(|m| m.word() == phase)?;
                Some(Self::Reached(milestone, detail.to_owned()))
            }
            "state" => Some(Self::State(detail.to_owned())),
            "waiting" => Some(Self::Waiting(detail.strip_prefix("for ")?.to_owned())),
            "refused" => Some(Self::Refused(detail.to_owned())),
            "extension" => {
                let (name, how) = detail.split_once(' ')?;
                let why = match how.strip_prefix("refused: ") {
                    Some(why) => Some(why.to_owned()),
                    None if how == "mounted" => None,
                    None => return None,
                };
                Some(Self::Extension(name.to_owned(), why))
            }
            "failpoint" => Some(Self::Failpoint(detail.to_owned())),
            "core" => Some(Self::CoreEnded(detail.strip_prefix("ended: ")?.to_owned())),
            "down" => Some(Self::Down(detail.to_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_report_reads_back() {
        let reports = [
            Report::Reached(Milestone::Network, "10.0.2.15/24".into()),
            Report::Reached(Milestone::Home, String::new()),
            Report::State("HOME".into()),
            Report::Waiting("a DHCP lease on eth0".into()),
            Report::Refused("fw_cfg: field x: empty".into()),
            Report::Extension("kubernetes".into(), None),
            Report::Extension("kubernetes".into(), Some("no such partition".into())),
            Report::Failpoint("enrolment.sealed".into()),
            Report::CoreEnded("exit status 3".into()),
            Report::Down("power off".into()),
        ];
        for report in reports {
            assert_eq!(Report::parse(&format!("{report}\r")), Some(report));
        }
    }

    #[test]
    fn other_lines_are_not_reports() {
        for line in [
            "",
            "hearth",
            "hearth: ",
            "hearth: reached mars",
            "[ 1.0] I root: hello",
        ] {
            assert_eq!(Report::parse(line), None, "{line:?}");
        }
    }
}
