//! Running machines, without a connection to them.
//!
//! [`attach`](super::attach) connects to QEMU, which serves one client at a time and may not answer any more. For
//! listing running machines, and for ending unresponsive ones, the records and the kernel are sufficient.

use std::path::Path;

use hearth_process::process::Process;

use super::{ClusterError, find, records};
use crate::network::PortForward;

/// A running machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Name of the machine.
    pub name: String,
    /// QEMU's process ID.
    pub pid: i32,
    /// Its ports that are forwarded to the host.
    pub forwards: Vec<PortForward>,
}

/// The running machines of the cluster in this folder, sorted by name. Empty if there is no such folder.
///
/// # Errors
/// If the cluster cannot be read.
pub fn running(state: &Path) -> Result<Vec<Running>, ClusterError> {
    Ok(processes(state)?
        .into_iter()
        .map(|(running, _)| running)
        .collect())
}

/// The names of the machines that were ever started, whether they are running or not.
///
/// # Errors
/// If the cluster cannot be read.
pub fn known(state: &Path) -> Result<Vec<String>, ClusterError> {
    let records = records(state)?.into_iter();
    Ok(records.map(|(name, _)| name).collect())
}

/// Cuts the power of all running machines, and ends their network. When this returns, they have ended.
///
/// # Errors
/// If the cluster cannot be read, or a process cannot be killed.
pub async fn cut(state: &Path) -> Result<Vec<Running>, ClusterError> {
    let failed = |source| ClusterError::File {
        step: "kill a machine of",
        path: state.to_owned(),
        source,
    };
    let processes = processes(state)?;
    // All at once: a power cut.
    for (_, process) in &processes {
        process.kill().map_err(failed)?;
    }
    let mut cut = Vec::new();
    for (running, process) in processes {
        process.ended().await.map_err(failed)?;
        cut.push(running);
    }
    super::end_network(state).await?;
    Ok(cut)
}

/// Cuts the power of the machine of this name. When this returns, it has ended. False: it was not running.
///
/// # Errors
/// If the cluster cannot be read, or the process cannot be killed.
pub async fn cut_one(state: &Path, name: &str) -> Result<bool, ClusterError> {
    let failed = |source| ClusterError::File {
        step: "kill a machine of",
        path: state.to_owned(),
        source,
    };
    let found = processes(state)?;
    let Some((_, process)) = found.into_iter().find(|(running, _)| running.name == name) else {
        return Ok(false);
    };
    process.kill().map_err(failed)?;
    process.ended().await.map_err(failed)?;
    Ok(true)
}

fn processes(state: &Path) -> Result<Vec<(Running, Process)>, ClusterError> {
    let mut found = Vec::new();
    for (name, record) in records(state)? {
        if let Some(process) = find(&record)? {
            let running = Running {
                name,
                pid: process.pid(),
                forwards: record.forwards,
            };
            found.push((running, process));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cluster::record::Record;

    #[test]
    fn machines_that_were_ever_started_are_known_and_other_folders_are_not() {
        let state = tempfile::tempdir().expect("a folder");
        for name in ["node-2", "net"] {
            fs::create_dir(state.path().join(name)).expect("made");
        }
        let folder = state.path().join("node-2");
        Record::default().save(&folder).expect("saved");
        assert_eq!(known(state.path()).expect("read"), ["node-2"]);
        assert_eq!(running(state.path()).expect("read"), []);
        let nowhere = state.path().join("nowhere");
        assert_eq!(known(&nowhere).expect("read"), Vec::<String>::new());
    }
}
