//! Failpoints: named points at which a test image halts so that a test can cut its power there.
//!
//! Every durable step of enrolment has a failpoint before it and one after it. The test arms one of
//! them by a fw_cfg item, waits for its line on the console and cuts the power; the next boot must
//! continue from what was durable. A failpoint that is reached never returns: if it returned an
//! error, the test would cover error handling, not a power cut.
//!
//! Without the feature `failpoints`, [`failpoint!`](macro@crate::failpoint) generates no code; the name
//! is still checked at compile time.

#[cfg(feature = "failpoints")]
pub use armed::{ArmError, arm, arm_from_fw_cfg, reach};

/// The failpoints of a bootstrap, in order.
pub const BOOTSTRAP: &[&str] = &[
    "enrolment.sealed_founding.before",
    "enrolment.sealed_founding.after",
    "storage.header_initialising.before",
    "storage.header_initialising.after",
    "storage.file_system.before",
    "storage.file_system.after",
    "storage.header_ready.before",
    "storage.header_ready.after",
    "founding.authorities.before",
    "founding.authorities.after",
    "enrolment.sealed_authority.before",
    "enrolment.sealed_authority.after",
    "founding.transaction.before",
    "founding.transaction.after",
    "founding.credentials.before",
    "founding.credentials.after",
    "founding.authority_keys_removed.before",
    "founding.authority_keys_removed.after",
    "enrolment.sealed_member.before",
    "enrolment.sealed_member.after",
];

/// The failpoints of a registration, in order, on the node that registers. They include steps that
/// are durable in the cluster, possibly without the node's knowledge.
pub const REGISTER: &[&str] = &[
    "enrolment.sealed_registering.before",
    "enrolment.sealed_registering.after",
    "registering.asked.before",
    "registering.asked.after",
    "enrolment.sealed_answer.before",
    "enrolment.sealed_answer.after",
    "storage.header_initialising.before",
    "storage.header_initialising.after",
    "storage.file_system.before",
    "storage.file_system.after",
    "storage.header_ready.before",
    "storage.header_ready.after",
    "registering.committed.before",
    "registering.committed.after",
    "registering.credentials.before",
    "registering.credentials.after",
    "enrolment.sealed_member.before",
    "enrolment.sealed_member.after",
];

/// The failpoints of a node that its cluster has removed, in order.
pub const DISOWN: &[&str] = &[
    "enrolment.sealed_disowned.before",
    "enrolment.sealed_disowned.after",
    "disowning.wiped.before",
    "disowning.wiped.after",
];

/// The failpoints of etcd membership changes, on the leading curator.
pub const MEMBERSHIP: &[&str] = &[
    "membership.add.before",
    "membership.add.after",
    "membership.promote.before",
    "membership.promote.after",
    "membership.remove.before",
    "membership.remove.after",
];

/// In the middle of the wipe of an authenticated data partition.
pub const WIPE: &[&str] = &["storage.half_wiped"];

/// All failpoints. One that belongs to two procedures is in both lists.
pub const ALL: [&[&str]; 5] = [BOOTSTRAP, REGISTER, DISOWN, MEMBERSHIP, WIPE];

/// Whether a failpoint of this name exists.
pub const fn is_known(name: &str) -> bool {
    let mut list = 0;
    while list < ALL.len() {
        let mut index = 0;
        while index < ALL[list].len() {
            if equal(ALL[list][index].as_bytes(), name.as_bytes()) {
                return true;
            }
            index += 1;
        }
        list += 1;
    }
    false
}

/// `==` on slices is not available in constants.
const fn equal(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Halts the calling thread forever if this failpoint is armed.
///
/// The name is a literal from [`ALL`]; any other one fails to compile. The
/// thread is blocked in asynchronous code as well: nothing after the failpoint may run.
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {{
        const { assert!($crate::failpoint::is_known($name), "no such failpoint") };
        $crate::failpoint::reach($name);
    }};
}

/// Runs a durable step between the failpoints `NAME.before` and `NAME.after`. The step is a
/// `Result`; the macro evaluates to a `Result` with the same value.
#[macro_export]
macro_rules! around {
    ($name:literal, $step:expr) => {{
        const {
            assert!(
                $crate::failpoint::is_known(concat!($name, ".before")),
                "no such failpoint"
            )
        };
        const {
            assert!(
                $crate::failpoint::is_known(concat!($name, ".after")),
                "no such failpoint"
            )
        };
        $crate::failpoint::reach(concat!($name, ".before"));
        let done = $step?;
        $crate::failpoint::reach(concat!($name, ".after"));
        Ok(done)
    }};
}

/// Called by [`failpoint!`](macro@crate::failpoint); generates no code without the feature.
///
/// The feature is checked here and not in the macro, because the macro is expanded in crates that
/// do not have the feature.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn reach(_name: &str) {}

#[cfg(feature = "failpoints")]
mod armed {
    use std::sync::OnceLock;

    use hearth_api::console::Report;
    use hearth_api::names;
    use hearth_sys::fw_cfg::{FwCfg, FwCfgError};

    use super::is_known;

    /// Arms a failpoint where there is no fw_cfg: in tests of the node core on the developer's
    /// machine.
    const ENVIRONMENT: &str = "HEARTH_FAILPOINT";

    type Print = Box<dyn Fn(&Report) + Send + Sync>;

    static ARMED: OnceLock<Armed> = OnceLock::new();

    struct Armed {
        name: Option<String>,
        print: Print,
    }

    /// Why no failpoint could be armed.
    #[derive(Debug, thiserror::Error)]
    pub enum ArmError {
        /// The fw_cfg item cannot be read.
        #[error(transparent)]
        FwCfg(#[from] FwCfgError),
        /// The name is unknown. Ignoring a misspelt name would make the test meaningless.
        #[error("unknown failpoint {0:?}")]
        Unknown(String),
        /// A failpoint is armed once, at boot.
        #[error("a failpoint is already armed")]
        Again,
    }

    /// Arms the failpoint named by the fw_cfg item [`FAILPOINT`](names::fw_cfg::FAILPOINT), if the
    /// item exists, and returns its name. `print` prints a report on the console.
    pub fn arm_from_fw_cfg(
        fw_cfg: &FwCfg,
        print: impl Fn(&Report) + Send + Sync + 'static,
    ) -> Result<Option<String>, ArmError> {
        let Some(content) = fw_cfg.read(names::fw_cfg::FAILPOINT)? else {
            return Ok(None);
        };
        let name = String::from_utf8_lossy(&content).trim().to_owned();
        arm(&name, print)?;
        Ok(Some(name))
    }

    /// Arms the failpoint `name`.
    pub fn arm(
        name: &str,
        print: impl Fn(&Report) + Send + Sync + 'static,
    ) -> Result<(), ArmError> {
        if !is_known(name) {
            return Err(ArmError::Unknown(name.to_owned()));
        }
        let armed = Armed {
            name: Some(name.to_owned()),
            print: Box::new(print),
        };
        ARMED.set(armed).map_err(|_| ArmError::Again)
    }

    /// Called by [`failpoint!`](macro@crate::failpoint).
    pub fn reach(name: &str) {
        let armed = ARMED.get_or_init(|| Armed {
            name: std::env::var(ENVIRONMENT).ok(),
            print: Box::new(|report| println!("{report}")),
        });
        if armed.name.as_deref() == Some(name) {
            (armed.print)(&Report::Failpoint(name.to_owned()));
            loop {
                std::thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Collects the name of every `failpoint!("…")` in the node's sources except this file.
    fn used(directory: &Path, names: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                used(&path, names);
            } else if path.extension().is_some_and(|e| e == "rs")
                && path.file_name().is_some_and(|n| n != "failpoint.rs")
            {
                let source = fs::read_to_string(&path).unwrap();
                let named = |call: &str| call.split('"').next().unwrap().to_owned();
                names.extend(source.split("failpoint!(\"").skip(1).map(named));
                for step in source.split("around!(\"").skip(1).map(named) {
                    names.extend([format!("{step}.before"), format!("{step}.after")]);
                }
            }
        }
    }

    #[test]
    fn each_failpoint_stands_at_exactly_one_place() {
        let mut names = Vec::new();
        used(
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")),
            &mut names,
        );
        names.sort();
        let all: BTreeSet<_> = ALL.iter().copied().flatten().copied().collect();
        assert_eq!(names, all.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn names_are_unique_and_known() {
        for list in ALL {
            assert_eq!(list.iter().collect::<BTreeSet<_>>().len(), list.len());
            assert!(list.iter().all(|name| is_known(name)));
        }
        assert!(!is_known("enrolment.sealed_founding"));
        assert!(!is_known(""));
    }
}
