//! XFS project quotas: limits for the content of a directory.
//!
//! A project is a number stored in inodes; a directory can pass it on to everything created in it.
//! The file system counts the blocks and the inodes of each project and rejects writes over the
//! limits as if the disk were full. It must be mounted with `prjquota`. Blocks that contain inodes
//! belong to no project: without a limit on their number, empty files can fill the file system.
//!
//! The kernel is called with a descriptor of the file system and not with the path of its device,
//! which may be one of several layers of device-mapper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::raw;

/// Why a directory cannot be limited.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// The file system does not support project quotas, or was mounted without them.
    #[error("the file system does not support project quotas")]
    Unavailable(#[source] io::Error),
    /// The size of the file system cannot be read.
    #[error("cannot read the size of the file system")]
    Capacity(#[source] io::Error),
    /// The project of a directory cannot be read or set.
    #[error("cannot {step} the project of the directory")]
    Project {
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The limit of a project cannot be read or set.
    #[error("cannot {step} the limit of project {project}")]
    Limit {
        /// The operation, as a verb.
        step: &'static str,
        /// The project.
        project: u32,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// The limit or the usage of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount {
    /// Bytes in used or reserved blocks. A limit is rounded up to a multiple of 512; 0 means no
    /// limit.
    pub bytes: u64,
    /// Files, directories and links. As a limit, 0 means no limit.
    pub inodes: u64,
}

impl Amount {
    /// Zero; as a limit, no limit.
    pub const NONE: Self = Self {
        bytes: 0,
        inodes: 0,
    };
}

/// The state of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The limit of the project.
    pub limit: Amount,
    /// The current usage.
    pub used: Amount,
}

/// The unit in which the kernel counts bytes.
const UNIT: u64 = 512;

/// Checks whether the file system of this file enforces project quotas.
pub fn available(file: impl AsFd) -> Result<(), QuotaError> {
    let state = raw::quota_state(file.as_fd()).map_err(QuotaError::Unavailable)?;
    const ACCOUNTED: u16 = 1 << 4;
    const ENFORCED: u16 = 1 << 5;
    if state & (ACCOUNTED | ENFORCED) == ACCOUNTED | ENFORCED {
        return Ok(());
    }
    let error = io::Error::other("it was mounted without prjquota");
    Err(QuotaError::Unavailable(error))
}

/// The size of the file system of this file: bytes, and the number of inodes that it can have. (In a
/// directory of a limited project the kernel tells the project's limits.)
pub fn capacity(file: impl AsFd) -> Result<Amount, QuotaError> {
    let size = rustix::fs::fstatvfs(file).map_err(|errno| QuotaError::Capacity(errno.into()))?;
    Ok(Amount {
        bytes: size.f_blocks.saturating_mul(size.f_frsize),
        inodes: size.f_files,
    })
}

/// The project of a directory; 0 is the default project.
pub fn project(directory: impl AsFd) -> Result<u32, QuotaError> {
    let attributes = raw::inode_attributes(directory.as_fd());
    let attributes = attributes.map_err(|source| QuotaError::Project {
        step: "read",
        source,
    })?;
    Ok(attributes.project)
}

/// Sets the project of a directory, which new files in it inherit.
pub fn set_project(directory: impl AsFd, project: u32) -> Result<(), QuotaError> {
    const INHERIT: u32 = 0x200;
    let set = |directory: BorrowedFd<'_>| {
        let mut attributes = raw::inode_attributes(directory)?;
        attributes.project = project;
        attributes.flags |= INHERIT;
        raw::set_inode_attributes(directory, &attributes)
    };
    set(directory.as_fd()).map_err(|source| QuotaError::Project {
        step: "set",
        source,
    })
}

/// Sets the limit of a project in the file system of this file.
pub fn limit(file: impl AsFd, project: u32, limit: Amount) -> Result<(), QuotaError> {
    let limit = raw::QuotaAmount {
        units: limit.bytes.div_ceil(UNIT),
        inodes: limit.inodes,
    };
    raw::limit_project(file.as_fd(), project, limit).map_err(|source| QuotaError::Limit {
        step: "set",
        project,
        source,
    })
}

/// The limit and the usage of a project.
pub fn usage(file: impl AsFd, project: u32) -> Result<Usage, QuotaError> {
    let (limit, used) =
        raw::project_usage(file.as_fd(), project).map_err(|source| QuotaError::Limit {
            step: "read",
            project,
            source,
        })?;
    let amount = |counted: raw::QuotaAmount| Amount {
        bytes: counted.units.saturating_mul(UNIT),
        inodes: counted.inodes,
    };
    Ok(Usage {
        limit: amount(limit),
        used: amount(used),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine check tests quotas on our own kernel. Only their absence can be tested here.
    #[test]
    fn a_file_system_without_quotas_says_so() {
        let directory = std::fs::File::open("/proc").unwrap();
        assert!(matches!(
            available(&directory),
            Err(QuotaError::Unavailable(_))
        ));
        assert!(matches!(
            set_project(&directory, 7),
            Err(QuotaError::Project { .. })
        ));
    }
}
