//! The data partition: found, made, opened, mounted.
//!
//! | bytes | content |
//! |---|---|
//! | 0 – 1 MiB | [`header`]: whose it is, and how far its making has come |
//! | from 1 MiB | payload: XFS, raw or under dm-crypt |
//!
//! # Invariants
//! - The payload is only ever made anew behind a blank front or a header in
//!   phase INITIALISING of the same owner. [`DataPartition`] looks at the front
//!   again immediately before each step that writes, whatever its caller
//!   believes.
//! - A header in phase READY is written after the file system is on the disk,
//!   and nothing is mounted before.
//! - Nothing here writes to a front that it does not understand. Only
//!   [`DataPartition::erase`] does, which its caller needs a wipe token for.
//! - Each step may be repeated.
//!
//! What needs a kernel (device mapper, mkfs, mount) stands behind [`Machinery`],
//! so that all that decides about a disk runs against plain files in tests.

mod enrolment_id;
pub mod header;
pub mod keys;
mod system;

#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "test code: it fails as tests do"
)]
pub mod testing;
#[cfg(test)]
mod tests;

use std::{
    fs,
    path::{Path, PathBuf},
};

use hearth_api::identity::random_bytes;
use hearth_sys::files::FileError;

use crate::{failpoint, layout};

use header::{Front, FrontOf, Header, HeaderError, Owner, Phase};
use keys::{SALT_LEN, Secrets, VolumeKey};

pub use enrolment_id::{EnrolmentId, EnrolmentIdLength};
pub use keys::Mode;
pub use system::System;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a step failed at.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// What is in front is none of ours.
    #[error("the data partition holds something else: {0}")]
    Foreign(String),
    /// It is another node's, or of another life of this one.
    #[error("the data partition belongs to {found}; wanted that of {wanted}")]
    OtherOwner {
        /// Whose it is.
        found: Box<Owner>,
        /// Whose it should be.
        wanted: Box<Owner>,
    },
    /// Its header was made with other keys, or changed since.
    #[error("the header of the data partition was made with other keys, or altered")]
    NotAuthentic,
    /// Its making has not come to this step, or has gone beyond it.
    #[error("the data partition is {found}; wanted it {wanted}")]
    Phase {
        /// What it is.
        found: &'static str,
        /// What the step needs.
        wanted: &'static str,
    },
    /// Reading or writing the header failed.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The kernel or one of its tools failed.
    #[error("cannot {step}")]
    Machinery {
        /// The step, as a verb.
        step: &'static str,
        /// The cause.
        source: BoxError,
    },
    /// The fixed directories could not be made.
    #[error("cannot make the directories of the data partition")]
    Directories(#[from] FileError),
}

impl StorageError {
    /// Whether trying again is of no use, because it is the wrong disk.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Foreign(_)
            | Self::OtherOwner { .. }
            | Self::NotAuthentic
            | Self::Phase { .. } => true,
            Self::Header(_) | Self::Machinery { .. } | Self::Directories(_) => false,
        }
    }

    /// Wraps what a [`Machinery`] failed at.
    pub fn machinery(step: &'static str) -> impl FnOnce(BoxError) -> Self {
        move |source| Self::Machinery { step, source }
    }
}

/// A data partition as its node wants it.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Whose it is.
    pub owner: Owner,
    /// How to open it; `None` is INSECURE.
    pub secrets: Option<Secrets>,
}

impl Volume {
    fn key(&self, salt: &[u8; SALT_LEN]) -> Option<VolumeKey> {
        self.secrets
            .as_ref()
            .map(|secrets| secrets.volume_key(salt))
    }
}

/// What needs a kernel. Every step may be repeated, also by a process that
/// does not know how far an earlier one came.
pub trait Machinery: Send + 'static {
    /// The partition's device node.
    fn device(&mut self) -> Result<PathBuf, StorageError>;
    /// Makes the partition as large as its disk allows.
    fn grow(&mut self) -> Result<(), StorageError>;
    /// Writes what the mode needs on the device before it can be opened.
    /// Destroys the payload.
    fn prepare(&mut self, mode: Mode, device: &Path) -> Result<(), StorageError>;
    /// Makes the payload a device of its own: everything from
    /// [`header::REGION`] on, decrypted. `None` is INSECURE.
    fn open(&mut self, key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, StorageError>;
    /// Makes an empty file system. Destroys the payload.
    fn make_file_system(&mut self, payload: &Path) -> Result<(), StorageError>;
    /// Whether something is mounted there.
    fn is_mounted(&mut self, at: &Path) -> Result<bool, StorageError>;
    /// Mounts it.
    fn mount(&mut self, payload: &Path, at: &Path) -> Result<(), StorageError>;
}

/// The data partition of this machine.
#[derive(Debug)]
pub struct DataPartition<M> {
    machinery: M,
    data: layout::Data,
    front: Option<FrontOf>,
}

impl<M: Machinery> DataPartition<M> {
    /// The one that is mounted at `data`.
    pub fn new(machinery: M, data: layout::Data) -> Self {
        Self {
            machinery,
            data,
            front: None,
        }
    }

    /// Looks at what is in front of it.
    pub fn inspect(&mut self) -> Result<Front, StorageError> {
        Ok(self.front()?.read()?)
    }

    /// Gives up whatever it holds. Its front is blank afterwards.
    pub fn erase(&mut self) -> Result<(), StorageError> {
        Ok(self.front()?.erase()?)
    }

    /// Makes it the owner's, in phase INITIALISING, with a new salt.
    pub fn initialise(&mut self, volume: &Volume) -> Result<(), StorageError> {
        match self.front()?.read()? {
            Front::Blank | Front::Unfinished => {}
            Front::Header(header) => in_phase(&header, volume, Phase::Initialising)?,
            Front::Foreign(why) => return Err(StorageError::Foreign(why)),
        }
        self.machinery.grow()?;
        let header = Header::new(
            Phase::Initialising,
            volume.owner,
            random_bytes(),
            volume.secrets.as_ref(),
        );
        failpoint!("storage.header_initialising.before");
        self.front()?.write(&header)?;
        failpoint!("storage.header_initialising.after");
        Ok(())
    }

    /// Makes its file system, behind a header in phase INITIALISING.
    pub fn make_file_system(&mut self, volume: &Volume) -> Result<(), StorageError> {
        let (device, header) = self.header(volume, Phase::Initialising)?;
        failpoint!("storage.file_system.before");
        if let Some(secrets) = &volume.secrets {
            self.machinery.prepare(secrets.mode, &device)?;
        }
        let payload = self.machinery.open(volume.key(&header.salt), &device)?;
        self.machinery.make_file_system(&payload)?;
        // The header that says READY must not reach the disk before this.
        let sync = fs::File::open(&payload).and_then(|file| file.sync_all());
        sync.map_err(|error| StorageError::machinery("sync the new file system")(error.into()))?;
        failpoint!("storage.file_system.after");
        Ok(())
    }

    /// Says that its file system is made.
    pub fn mark_ready(&mut self, volume: &Volume) -> Result<(), StorageError> {
        if self.header(volume, Phase::Ready).is_ok() {
            return Ok(());
        }
        let (_, header) = self.header(volume, Phase::Initialising)?;
        let header = Header::new(
            Phase::Ready,
            volume.owner,
            header.salt,
            volume.secrets.as_ref(),
        );
        failpoint!("storage.header_ready.before");
        self.front()?.write(&header)?;
        failpoint!("storage.header_ready.after");
        Ok(())
    }

    /// Opens and mounts it, behind a header in phase READY. False if it was
    /// mounted before, by an enrolment that has been started again since.
    pub fn mount(&mut self, volume: &Volume) -> Result<bool, StorageError> {
        let (device, header) = self.header(volume, Phase::Ready)?;
        let at = self.data.path();
        let mounted = self.machinery.is_mounted(at)?;
        if !mounted {
            let payload = self.machinery.open(volume.key(&header.salt), &device)?;
            self.machinery.mount(&payload, at)?;
        }
        self.data.make_directories()?;
        Ok(!mounted)
    }

    /// The front of the device as it is named now.
    fn front(&mut self) -> Result<&mut FrontOf, StorageError> {
        let device = self.machinery.device()?;
        let known = self.front.take().filter(|front| front.device() == device);
        Ok(self
            .front
            .insert(known.unwrap_or_else(|| FrontOf::new(&device))))
    }

    fn header(&mut self, volume: &Volume, phase: Phase) -> Result<(PathBuf, Header), StorageError> {
        let wanted = phase_name(phase);
        let front = self.front()?;
        let device = front.device().to_owned();
        match front.read()? {
            Front::Header(header) => {
                in_phase(&header, volume, phase)?;
                Ok((device, header))
            }
            Front::Foreign(why) => Err(StorageError::Foreign(why)),
            Front::Blank | Front::Unfinished => Err(StorageError::Phase {
                found: "blank",
                wanted,
            }),
        }
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Initialising => "INITIALISING",
        Phase::Ready => "READY",
    }
}

fn in_phase(header: &Header, volume: &Volume, phase: Phase) -> Result<(), StorageError> {
    if header.owner != volume.owner {
        return Err(StorageError::OtherOwner {
            found: Box::new(header.owner),
            wanted: Box::new(volume.owner),
        });
    }
    if !header.is_authentic(volume.secrets.as_ref()) {
        return Err(StorageError::NotAuthentic);
    }
    if header.phase != phase {
        return Err(StorageError::Phase {
            found: phase_name(header.phase),
            wanted: phase_name(phase),
        });
    }
    Ok(())
}
