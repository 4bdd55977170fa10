//! Project quotas of XFS: how much may be below a directory.
//!
//! A project is a number that inodes bear; a directory can hand it down to all
//! that is made in it. The file system counts the blocks and the inodes of each
//! project and refuses those over its limits as if the disk were full. It must
//! be mounted with `prjquota`. Blocks of inodes themselves are nobody's: without
//! a limit of their number, empty files take as much room as there is for any.
//!
//! The kernel is asked by a descriptor of the file system and not by the path
//! of its device, which may be one of several layers of device-mapper.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use super::raw;

/// Why a directory is not limited.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// The file system has no such quotas, or was mounted without.
    #[error("the file system has no project quotas")]
    Unavailable(#[source] io::Error),
    /// A directory's project.
    #[error("{step} the project of the directory")]
    Project {
        /// As a verb.
        step: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A project's limit.
    #[error("{step} the limit of project {project}")]
    Limit {
        /// As a verb.
        step: &'static str,
        /// The project.
        project: u32,
        /// The cause.
        source: io::Error,
    },
}

/// What a project may have, or has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount {
    /// In blocks that are in use or reserved. As a limit it is rounded up to
    /// 512; 0 is none.
    pub bytes: u64,
    /// Files, directories, links. As a limit 0 is none.
    pub inodes: u64,
}

impl Amount {
    /// Nothing; as a limit, none.
    pub const NONE: Self = Self {
        bytes: 0,
        inodes: 0,
    };
}

/// How a project stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// What it may have.
    pub limit: Amount,
    /// What it has.
    pub used: Amount,
}

/// The unit in which the kernel counts.
const UNIT: u64 = 512;

/// Whether the file system of this file limits projects.
pub fn available(file: impl AsFd) -> Result<(), QuotaError> {
    let state = raw::quota_state(file.as_fd()).map_err(QuotaError::Unavailable)?;
    const ACCOUNTED: u16 = 1 << 4;
    const ENFORCED: u16 = 1 << 5;
    if state & (ACCOUNTED | ENFORCED) == ACCOUNTED | ENFORCED {
        return Ok(());
    }
    let error = io::Error::other("it was mounted without");
    Err(QuotaError::Unavailable(error))
}

/// The project that a directory bears; 0 is nobody's.
pub fn project(directory: impl AsFd) -> Result<u32, QuotaError> {
    let attributes = raw::inode_attributes(directory.as_fd());
    let attributes = attributes.map_err(|source| QuotaError::Project {
        step: "read",
        source,
    })?;
    Ok(attributes.project)
}

/// Gives a directory a project, and whatever will be made in it.
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

/// Limits a project of the file system of this file.
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

/// How much of it is used.
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

    /// What the machine check sees on our own kernel cannot be seen here; but
    /// that a file system without quotas is found out can.
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
