//! What the node keeps for itself: memory, process IDs and space on the data partition, so that pods
//! that take all they can get hurt only each other.
//!
//! | resource | how it is kept |
//! |---|---|
//! | memory | the kubelet limits the group of all pods to the rest (`kubeReserved`). What pods write to volumes in memory counts as theirs. The node's group keeps its part when memory is reclaimed (`memory.min`) |
//! | process IDs | the kubelet limits the group of all pods to the rest, and each pod |
//! | space and inodes of the data partition | images, containers, logs and volumes that end with their pod are in one XFS project, which is limited to the rest |
//!
//! Persistent volumes have limits of their own, one each. Their sum is not limited: claims may
//! promise more than there is.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use hearth_api::chain;
use hearth_api::node_settings::Reserved;
use hearth_host::layout::{NODE_GROUP, Root};
use hearth_sys::quota::{self, Amount, QuotaError};
use hearth_sys::{cgroups, memory};
use serde_json::{Value as Json, json};

const MIB: u64 = 1 << 20;
/// For the core, etcd and the kernel.
const NODE_MEMORY: u64 = 192 * MIB;
/// For containerd, kubelet and kube-proxy.
const WORKER_MEMORY: u64 = 224 * MIB;
/// For API server, controller-manager and scheduler, and what etcd needs for their objects.
const CONTROLLER_MEMORY: u64 = 512 * MIB;
/// For threads of all these.
const PROCESS_IDS: u32 = 4096;
/// The part of the data partition that is kept, and its bounds: etcd's quota is 1 GiB, and it needs
/// twice that while it defragments.
const DISK_PART: u64 = 10;
const DISK_BOUNDS: (u64, u64) = (256 * MIB, 2304 * MIB);
/// The XFS project of everything that pods leave on the disk, besides their persistent volumes,
/// whose projects begin at 1000.
const PROJECT: u32 = 1;

/// What the node keeps, with the roles that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reserve {
    /// Bytes.
    memory: u64,
    /// Thousandths of a CPU; 0 for none.
    millicpus: u32,
}

/// The size of a machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    /// Bytes.
    pub memory: u64,
    /// Thousandths of a CPU.
    pub millicpus: u32,
}

impl Reserve {
    /// On this machine, with what operators reserve in addition.
    pub(super) fn here(controller: bool, further: Reserved) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let machine = Machine {
            memory: memory::total(),
            millicpus: u32::try_from(cpus * 1000).unwrap_or(u32::MAX),
        };
        Self::of(controller, machine, further)
    }

    /// On a machine of this size. On a small one, pods get a third; whatever operators reserve, they get a tenth: the
    /// kubelet does not start without any.
    pub(super) fn of(controller: bool, machine: Machine, further: Reserved) -> Self {
        let controller = if controller { CONTROLLER_MEMORY } else { 0 };
        let memory = NODE_MEMORY + WORKER_MEMORY + controller;
        let memory = memory.min(machine.memory / 3 * 2) + further.memory;
        Self {
            memory: memory.min(machine.memory / 10 * 9),
            millicpus: further.millicpus.min(machine.millicpus / 10 * 9),
        }
    }

    /// The value of `kubeReserved` in the kubelet's configuration.
    pub(super) fn kube_reserved(self) -> Json {
        let mut reserved = json!({
            "memory": format!("{}Mi", self.memory / MIB),
            "pid": PROCESS_IDS.to_string(),
        });
        if self.millicpus > 0 {
            reserved["cpu"] = format!("{}m", self.millicpus).into();
        }
        reserved
    }

    /// Keeps memory for the node when the kernel reclaims some. Without it everything works, slower.
    pub(super) fn keep_memory(self) {
        let group = cgroups::Group::root().child(NODE_GROUP);
        if let Err(error) = group.set("memory.min", &self.memory.to_string()) {
            tracing::warn!("{}", chain(&error));
        }
    }
}

/// Limits what pods can use of the data partition, except for their persistent volumes. Without
/// quotas everything works until the disk is full.
pub(super) fn keep_disk(root: &Root) {
    let directories = [
        root.data.kubernetes().path().to_owned(),
        root.data.containerd(),
    ];
    let limited = directories.iter().try_for_each(|directory| join(directory));
    let limited = limited.and_then(|()| limit(root.data.path()));
    if let Err(error) = limited {
        tracing::warn!("pods can use all of the disk: {}", chain(&error));
    }
}

/// Why the disk is not limited.
#[derive(Debug, thiserror::Error)]
enum DiskError {
    #[error("cannot open {0}")]
    Open(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Quota(#[from] QuotaError),
}

fn open(path: &Path) -> Result<File, DiskError> {
    File::open(path).map_err(|error| DiskError::Open(path.to_owned(), error))
}

/// Makes a directory part of the project. New files in it inherit that.
fn join(path: &Path) -> Result<(), DiskError> {
    let directory = open(path)?;
    quota::available(&directory)?;
    if quota::project(&directory)? != PROJECT {
        quota::set_project(&directory, PROJECT)?;
    }
    Ok(())
}

fn limit(partition: &Path) -> Result<(), DiskError> {
    let file = open(partition)?;
    let limit = rest(quota::capacity(&file)?);
    Ok(quota::limit(&file, PROJECT, limit)?)
}

/// What is left for pods on a partition of this size.
fn rest(Amount { bytes, inodes }: Amount) -> Amount {
    let (least, most) = DISK_BOUNDS;
    let kept = (bytes / DISK_PART).clamp(least, most);
    Amount {
        bytes: bytes.saturating_sub(kept).max(bytes / 2),
        inodes: inodes - inodes / DISK_PART,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(memory: u64) -> Machine {
        Machine {
            memory,
            millicpus: 2000,
        }
    }

    #[test]
    fn operators_reserve_more_but_not_all() {
        let gib = 1 << 30;
        for (memory, millicpus, expected) in [
            (gib, 500, ("1440Mi", "500m")),
            (100 * gib, 64_000, ("3686Mi", "1800m")),
        ] {
            let further = Reserved { memory, millicpus };
            let reserved = Reserve::of(false, machine(4 * gib), further).kube_reserved();
            assert_eq!(
                (&reserved["memory"], &reserved["cpu"]),
                (&json!(expected.0), &json!(expected.1))
            );
        }
    }

    #[test]
    fn the_node_keeps_what_its_roles_need() {
        let gib = 1 << 30;
        for (controller, total, expected) in [
            (true, 2 * gib, "928Mi"),
            (false, 2 * gib, "416Mi"),
            (true, 64 * gib, "928Mi"),
            (true, gib, "682Mi"),
        ] {
            let reserved = Reserve::of(controller, machine(total), Reserved::default());
            assert_eq!(reserved.kube_reserved()["memory"], expected);
            assert!(reserved.kube_reserved()["cpu"].is_null());
        }
    }

    #[test]
    fn pods_get_the_rest_of_the_disk() {
        for (size, expected) in [
            (1024, 768),
            (20 * 1024, 18 * 1024),
            (1024 * 1024, 1024 * 1024 - 2304),
            (300, 150),
        ] {
            let partition = Amount {
                bytes: size * MIB,
                inodes: 1000,
            };
            let expected = Amount {
                bytes: expected * MIB,
                inodes: 900,
            };
            assert_eq!(rest(partition), expected, "{size} MiB");
        }
    }
}
