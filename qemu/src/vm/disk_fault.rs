//! Faults of a disk, for as long as a machine runs.
//!
//! A fault is a filter between the disk's file and its device, which QEMU takes in and out without the guest's
//! noticing. So a machine needs no other configuration to have one, and a disk is well again without a restart.

use rustix::io::Errno;
use serde_json::{Value, json};

use super::Vm;
use crate::command::{disk_device_id, disk_node};
use crate::qmp::QmpError;

/// What is wrong with a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// It is slow: it performs this many writes in a second, whatever their sizes, and further ones wait. Reads and
    /// flushes take no longer than before.
    SlowWrites {
        /// At least 1.
        per_second: u32,
    },
    /// Writes that touch one of these sectors, of 512 bytes from the disk's beginning, fail with an I/O error. They can
    /// be read.
    FailingWrites {
        /// In any order.
        sectors: Vec<u64>,
    },
}

impl Vm {
    /// Gives a disk, by its index, another fault, or none.
    ///
    /// # Errors
    /// If a command fails, as for a disk that the machine does not have.
    pub async fn set_disk_fault(
        &self,
        disk: usize,
        fault: Option<&DiskFault>,
    ) -> Result<(), QmpError> {
        let node = disk_node(disk);
        let (filter, limits) = (format!("{node}-fault"), format!("{node}-limits"));
        // QEMU 7.2 ends if a device is given the node that it has.
        if self.drive(disk).await? != node {
            self.set_drive(disk, &node).await?;
            let filter = json!({ "node-name": filter });
            self.qmp().execute("blockdev-del", filter).await?;
            // Only a slow disk had limits.
            let limits = json!({ "id": limits });
            let _ = self.qmp().execute("object-del", limits).await;
        }
        let options = match fault {
            None => return Ok(()),
            Some(DiskFault::SlowWrites { per_second }) => {
                let group = json!({
                    "qom-type": "throttle-group",
                    "id": limits,
                    "limits": { "iops-write": per_second },
                });
                self.qmp().execute("object-add", group).await?;
                json!({ "driver": "throttle", "throttle-group": limits, "file": node, "node-name": filter })
            }
            Some(DiskFault::FailingWrites { sectors }) => {
                let rule = |sector: &u64| {
                    // Event "none" is the creation of the filter: the rules are in force from then on.
                    json!({ "event": "none", "iotype": "write", "errno": Errno::IO.raw_os_error(), "sector": sector })
                };
                let rules: Vec<Value> = sectors.iter().map(rule).collect();
                json!({ "driver": "blkdebug", "image": node, "inject-error": rules, "node-name": filter })
            }
        };
        self.qmp().execute("blockdev-add", options).await?;
        self.set_drive(disk, &filter).await
    }

    /// The block device that a disk is read from and written to.
    async fn drive(&self, disk: usize) -> Result<String, QmpError> {
        let drive = json!({ "path": path(disk), "property": "drive" });
        match self.qmp().execute("qom-get", drive).await? {
            Value::String(node) => Ok(node),
            other => Err(QmpError::Answer {
                command: "qom-get".to_owned(),
                answer: other.to_string(),
            }),
        }
    }

    async fn set_drive(&self, disk: usize, node: &str) -> Result<(), QmpError> {
        let drive = json!({ "path": path(disk), "property": "drive", "value": node });
        self.qmp().execute("qom-set", drive).await.map(drop)
    }
}

fn path(disk: usize) -> String {
    format!("/machine/peripheral/{}", disk_device_id(disk))
}
