//! The lines on a node's console that programs read.
//!
//! A machine that has just been powered on has only its serial console. Programs that boot it
//! (`cargo xtask run`, the tests, scripts behind a terminal server) follow its progress by a few
//! lines of fixed form. They are defined here once: the node prints them with [`Report`]'s
//! `Display`, readers parse them with [`Report::parse`].
//!
//! Each is on a line of its own and begins with `hearth: `. Readers ignore lines with this prefix
//! that they do not understand: newer nodes may print more.

use std::fmt;

/// Progress of a boot. In this order, each at most once per boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Milestone {
    /// The kernel has started PID 1.
    Kernel,
    /// The node has an address.
    Network,
    /// The data partition is mounted.
    Storage,
    /// etcd is ready on this node.
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

    /// Its word on the console.
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

/// A console line for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// `hearth: reached network 10.0.2.15/24`; the detail may be empty.
    Reached(Milestone, String),
    /// `hearth: state HOME`: the cluster state has changed.
    State(String),
    /// `hearth: waiting for …`: enrolment is retrying, and why.
    Waiting(String),
    /// `hearth: refused …`: enrolment has stopped, and why.
    Refused(String),
    /// `hearth: wiping 35 % of 512 MiB, about 20 s left`: how far the data partition is wiped.
    Wiping(String),
    /// `hearth: installing 35 % written to nvme0n1`: how far an installation is.
    Installing(String),
    /// `hearth: installed nvme0n1`: the disk has the node, and the machine boots from it next. Details may follow the name.
    Installed(String),
    /// `hearth: extension NAME mounted`, or `hearth: extension NAME refused: …` with the reason;
    /// one for each extension of the image.
    Extension(String, Option<String>),
    /// `hearth: failpoint NAME`: a test image has stopped at this failpoint.
    Failpoint(String),
    /// `hearth: core ended: …`: the core process has exited; PID 1 reboots.
    CoreEnded(String),
    /// `hearth: down power off` / `hearth: down reboot`: an orderly shutdown.
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
            Self::Wiping(progress) => write!(f, "hearth: wiping {progress}"),
            Self::Installing(progress) => write!(f, "hearth: installing {progress}"),
            Self::Installed(disk) => write!(f, "hearth: installed {disk}"),
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
    /// Parses one console line; `None` if it is not a report. The line may contain a carriage
    /// return, and text before the prefix (a kernel message that was interrupted).
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
            "wiping" => Some(Self::Wiping(detail.to_owned())),
            "installing" => Some(Self::Installing(detail.to_owned())),
            "installed" => Some(Self::Installed(detail.to_owned())),
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
            Report::Wiping("35 % of 512 MiB, about 20 s left".into()),
            Report::Installing("35 % written to nvme0n1".into()),
            Report::Installed("nvme0n1".into()),
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
