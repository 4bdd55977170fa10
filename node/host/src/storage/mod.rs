//! Volumes that belong to one node: the data partition, and further disks. Formats, opens and mounts them.
//!
//! | bytes | content |
//! |---|---|
//! | 0 – 1 MiB | [`header`]: the owner, and whether formatting has completed |
//! | from 1 MiB | payload: XFS, raw or on dm-crypt |
//!
//! # Invariants
//! - The payload is formatted only if the header region is blank or holds a header in phase
//!   INITIALISING with the same owner. [`OwnedVolume`] reads the header again immediately before
//!   each step that writes, whatever its caller assumes.
//! - A header in phase READY is written only after the file system is durable, and nothing is
//!   mounted before.
//! - Nothing here overwrites a header region with foreign content. Only [`OwnedVolume::erase`]
//!   does, for which its caller needs a wipe parameter.
//! - Each step can be repeated.
//!
//! Operations that need a kernel (device-mapper, mkfs, mount) are behind the trait
//! [`StorageBackend`], so that tests run all decisions about a disk on plain files.

pub mod header;
mod in_use;
pub mod keys;
mod system;
pub mod upkeep;
mod wipe;

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, reason = "test code may panic")]
pub mod testing;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use hearth_api::chain;
use hearth_api::identity::random_bytes;
use hearth_sys::block::BlockError;
use hearth_sys::files::FileError;

use crate::failpoint;
use header::{Header, HeaderError, HeaderRegion, HeaderState, Owner, Phase};
use keys::{SALT_LEN, Secrets, VolumeKey};

pub use in_use::InUse;
pub use keys::Mode;
pub use system::System;
pub use wipe::Progress;

/// Is told how far a wipe is.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The header region has foreign content.
    #[error("foreign content: {0}")]
    Foreign(String),
    /// The owner is another node, or another enrolment of this one.
    #[error("owner: expected {wanted}, got {found}")]
    OtherOwner {
        /// The actual owner.
        found: Box<Owner>,
        /// The expected owner.
        wanted: Box<Owner>,
    },
    /// The MAC of the header does not match: the keys differ, or the header was altered.
    #[error("cannot authenticate the header: the keys differ, or it was altered")]
    NotAuthentic,
    /// Formatting has not reached this step, or has gone beyond it.
    #[error("phase: expected {wanted}, got {found}")]
    Phase {
        /// The actual phase.
        found: &'static str,
        /// The phase that the step requires.
        wanted: &'static str,
    },
    /// It was made by a former release, with a cipher that this one does not use.
    #[error(
        "it has the format of a former release: decommission this node, and let it register again"
    )]
    FormerFormat(#[source] BoxError),
    /// The disk fails while it is wiped.
    #[error("cannot wipe bytes {from} to {to}")]
    Wipe {
        /// The first byte.
        from: u64,
        /// The end.
        to: u64,
        /// The error of the disk.
        source: BlockError,
    },
    /// The header cannot be read or written.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The kernel or one of its tools failed.
    #[error("cannot {step}")]
    StorageBackend {
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operation.
        source: BoxError,
    },
    /// The fixed directories cannot be created.
    #[error("cannot create its directories")]
    Directories(#[from] FileError),
}

impl StorageError {
    /// Whether retrying is pointless because it is the wrong disk.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Foreign(_)
            | Self::OtherOwner { .. }
            | Self::NotAuthentic
            | Self::Phase { .. }
            | Self::FormerFormat(_) => true,
            Self::Header(_)
            | Self::Wipe { .. }
            | Self::StorageBackend { .. }
            | Self::Directories(_) => false,
        }
    }

    /// Wraps the error of a [`StorageBackend`].
    pub fn machinery(step: &'static str) -> impl FnOnce(BoxError) -> Self {
        move |source| Self::StorageBackend { step, source }
    }
}

/// A volume as its node expects it.
#[derive(Clone, Debug)]
pub struct Volume {
    /// The expected owner.
    pub owner: Owner,
    /// The inputs of the key derivation; `None` for INSECURE.
    pub secrets: Option<Secrets>,
}

impl Volume {
    fn mode(&self) -> Option<Mode> {
        self.secrets.as_ref().map(|secrets| secrets.mode)
    }

    fn key(&self, salt: &[u8; SALT_LEN]) -> Option<VolumeKey> {
        self.secrets
            .as_ref()
            .map(|secrets| secrets.volume_key(salt))
    }
}

/// The operations that need a kernel. Each step can be repeated, even by a process that does not
/// know how far an earlier one got.
pub trait StorageBackend: Send + 'static {
    /// The path of the device node.
    fn device(&mut self) -> Result<PathBuf, StorageError>;
    /// Grows a partition to the maximum that its disk allows. It must not be open.
    fn grow(&mut self) -> Result<(), StorageError>;
    /// Formats the device before it can be opened with this key, and wipes it where that is needed to read it. Destroys the
    /// payload, unless it goes on with an earlier attempt with the same key.
    fn prepare(
        &mut self,
        key: VolumeKey,
        device: &Path,
        on_progress: OnProgress<'_>,
    ) -> Result<(), StorageError>;
    /// Opens the payload as a device of its own: everything from [`header::REGION`] on, decrypted.
    /// The key is `None` for INSECURE.
    fn open(&mut self, key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, StorageError>;
    /// Creates an empty file system. Destroys the payload.
    fn make_file_system(&mut self, payload: &Path) -> Result<(), StorageError>;
    /// Whether `at` is a mount point.
    fn is_mounted(&mut self, at: &Path) -> Result<bool, StorageError>;
    /// Mounts the payload.
    fn mount(&mut self, payload: &Path, at: &Path) -> Result<(), StorageError>;
    /// Unmounts it; it may not be mounted.
    fn unmount(&mut self, at: &Path) -> Result<(), StorageError>;
    /// Closes what [`StorageBackend::open`] has opened.
    fn close(&mut self) -> Result<(), StorageError>;
    /// Grows the mounted file system to the size of the payload. Where its new end has to be wiped first, this only
    /// begins; [`StorageBackend::grow_further`] does the rest.
    fn grow_file_system(
        &mut self,
        key: Option<VolumeKey>,
        payload: &Path,
        at: &Path,
    ) -> Result<(), StorageError>;
    /// The next step of growing the mounted file system; false if there is none.
    fn grow_further(
        &mut self,
        payload: &Path,
        at: &Path,
        on_progress: OnProgress<'_>,
    ) -> Result<bool, StorageError>;
    /// Tells the disk what the mounted file system does not use; returns the number of bytes, or `None` if that is not
    /// possible.
    fn discard_unused(&mut self, at: &Path) -> Result<Option<u64>, StorageError>;
    /// The parameters of the open payload's dm-crypt, as the kernel says; `None` if it has none.
    fn table(&mut self) -> Result<Option<String>, StorageError>;
}

/// The data partition of this machine, or another volume of it.
#[derive(Debug)]
pub struct OwnedVolume<M> {
    machinery: M,
    /// Where it is mounted.
    at: PathBuf,
    front: Option<HeaderRegion>,
    /// The volume on which this boot has made the file system: it is open, and need not be opened again to be mounted.
    made: Option<PathBuf>,
    /// The volume that is mounted.
    mounted: Option<PathBuf>,
}

impl<M: StorageBackend> OwnedVolume<M> {
    /// The volume, to be mounted at `at`.
    pub fn new(machinery: M, at: PathBuf) -> Self {
        Self {
            machinery,
            at,
            front: None,
            made: None,
            mounted: None,
        }
    }

    /// Reads the header.
    pub fn inspect(&mut self) -> Result<HeaderState, StorageError> {
        Ok(self.front()?.read()?)
    }

    /// Whether this volume's keys match the header. A header that cannot be used is not rejected here, but when the volume
    /// is mounted.
    pub fn is_opened_by(&mut self, volume: &Volume) -> Result<bool, StorageError> {
        Ok(match self.inspect()? {
            HeaderState::Header(header) => header.is_authentic(volume.secrets.as_ref()),
            _ => true,
        })
    }

    /// Erases the header, and with it all data. The header region is blank afterwards.
    pub fn erase(&mut self) -> Result<(), StorageError> {
        self.made = None;
        Ok(self.front()?.erase()?)
    }

    /// The salt of the header, which no other volume has.
    pub fn salt(&mut self) -> Result<[u8; SALT_LEN], StorageError> {
        Ok(present(self.inspect()?, Phase::Initialising)?.salt)
    }

    /// Unmounts and closes the volume. If it is in use, it stays as it is.
    pub fn unmount(&mut self) -> Result<(), StorageError> {
        self.machinery.unmount(&self.at)?;
        (self.made, self.mounted) = (None, None);
        self.machinery.close()
    }

    /// Writes a header for this owner, in phase INITIALISING, with a new salt. A wipe goes on where it was interrupted, so
    /// its salt is kept.
    pub fn initialise(&mut self, volume: &Volume) -> Result<(), StorageError> {
        let mut salt = random_bytes();
        match self.front()?.read()? {
            HeaderState::Blank | HeaderState::Unfinished => {}
            HeaderState::Header(header) => {
                is_owned(&header, volume)?;
                in_phase(&header, Phase::Initialising)?;
                if volume.mode() == Some(Mode::AuthenticatedEncrypted) {
                    salt = header.salt;
                }
            }
            HeaderState::Foreign(why) => return Err(StorageError::Foreign(why)),
        }
        self.machinery.grow()?;
        let header = Header::new(
            Phase::Initialising,
            volume.owner,
            salt,
            volume.secrets.as_ref(),
        );
        failpoint!("storage.header_initialising.before");
        self.front()?.write(&header)?;
        failpoint!("storage.header_initialising.after");
        Ok(())
    }

    /// Creates the file system; requires a header in phase INITIALISING. With authenticated encryption the whole partition
    /// is wiped before, which takes a while.
    pub fn make_file_system(
        &mut self,
        volume: &Volume,
        on_progress: OnProgress<'_>,
    ) -> Result<(), StorageError> {
        let (device, header) = self.header(volume, Phase::Initialising)?;
        failpoint!("storage.file_system.before");
        if let Some(key) = volume.key(&header.salt) {
            self.machinery.prepare(key, &device, on_progress)?;
        }
        self.made = None;
        let payload = self.machinery.open(volume.key(&header.salt), &device)?;
        self.machinery.make_file_system(&payload)?;
        // The header in phase READY must not reach the disk before the file system.
        let sync = fs::File::open(&payload).and_then(|file| file.sync_all());
        sync.map_err(|error| StorageError::machinery("sync the new file system")(error.into()))?;
        failpoint!("storage.file_system.after");
        self.made = Some(payload);
        Ok(())
    }

    /// Writes the header in phase READY.
    pub fn mark_ready(&mut self, volume: &Volume) -> Result<(), StorageError> {
        let (_, header) = self.owned(volume, Phase::Initialising)?;
        if header.phase == Phase::Ready {
            return Ok(());
        }
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

    /// Opens and mounts the volume; requires a header in phase READY. Returns false if it was
    /// already mounted, by an enrolment that has been restarted since.
    ///
    /// A disk that has been enlarged is used whole from then on, or, with authenticated encryption, when
    /// [`OwnedVolume::grow_further`] has wiped its new end. If that fails, the node runs with what it had: the reason is
    /// in the log.
    pub fn mount(&mut self, volume: &Volume) -> Result<bool, StorageError> {
        let (_, header) = self.header(volume, Phase::Ready)?;
        let at = self.at.clone();
        let mounted = self.machinery.is_mounted(&at)?;
        if !mounted {
            let payload = match self.made.take() {
                Some(payload) => payload,
                None => {
                    warn_of(self.machinery.grow());
                    let device = self.machinery.device()?;
                    self.machinery.open(volume.key(&header.salt), &device)?
                }
            };
            self.machinery.mount(&payload, &at)?;
            let key = volume.key(&header.salt);
            warn_of(self.machinery.grow_file_system(key, &payload, &at));
            self.mounted = Some(payload);
        }
        Ok(!mounted)
    }

    /// The next step of growing the mounted file system; false if there is none.
    pub fn grow_further(&mut self, on_progress: OnProgress<'_>) -> Result<bool, StorageError> {
        match &self.mounted {
            Some(payload) => self.machinery.grow_further(payload, &self.at, on_progress),
            None => Ok(false),
        }
    }

    /// Tells the disk what the mounted file system does not use; returns the number of bytes, or `None` if that is not
    /// possible.
    pub fn discard_unused(&mut self) -> Result<Option<u64>, StorageError> {
        self.machinery.discard_unused(&self.at)
    }

    /// How the open payload is encrypted, as the kernel says.
    pub fn in_use(&mut self) -> Result<InUse, StorageError> {
        Ok(InUse::of_table(self.machinery.table()?.as_deref()))
    }

    /// The header region of the device, under its current path.
    fn front(&mut self) -> Result<&mut HeaderRegion, StorageError> {
        let device = self.machinery.device()?;
        let known = self.front.take().filter(|front| front.device() == device);
        Ok(self
            .front
            .insert(known.unwrap_or_else(|| HeaderRegion::new(&device))))
    }

    /// The device and its header, which must be in this phase.
    fn header(&mut self, volume: &Volume, phase: Phase) -> Result<(PathBuf, Header), StorageError> {
        let (device, header) = self.owned(volume, phase)?;
        in_phase(&header, phase)?;
        Ok((device, header))
    }

    /// The device and its header, in any phase. `wanted`: the phase that the error names if there is none.
    fn owned(&mut self, volume: &Volume, wanted: Phase) -> Result<(PathBuf, Header), StorageError> {
        let front = self.front()?;
        let device = front.device().to_owned();
        let header = present(front.read()?, wanted)?;
        is_owned(&header, volume)?;
        Ok((device, header))
    }
}

/// The header, in any phase. `wanted`: the phase that the error names if there is none.
fn present(state: HeaderState, wanted: Phase) -> Result<Header, StorageError> {
    match state {
        HeaderState::Header(header) => Ok(header),
        HeaderState::Foreign(why) => Err(StorageError::Foreign(why)),
        HeaderState::Blank | HeaderState::Unfinished => Err(StorageError::Phase {
            found: "blank",
            wanted: phase_name(wanted),
        }),
    }
}

/// Logs the error of a step that may fail.
fn warn_of<E: std::error::Error + 'static>(step: Result<(), E>) {
    if let Err(error) = step {
        tracing::warn!("{}", chain(&error));
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Initialising => "INITIALISING",
        Phase::Ready => "READY",
    }
}

fn is_owned(header: &Header, volume: &Volume) -> Result<(), StorageError> {
    if header.owner != volume.owner {
        return Err(StorageError::OtherOwner {
            found: Box::new(header.owner),
            wanted: Box::new(volume.owner),
        });
    }
    if !header.is_authentic(volume.secrets.as_ref()) {
        return Err(StorageError::NotAuthentic);
    }
    Ok(())
}

fn in_phase(header: &Header, phase: Phase) -> Result<(), StorageError> {
    if header.phase != phase {
        return Err(StorageError::Phase {
            found: phase_name(header.phase),
            wanted: phase_name(phase),
        });
    }
    Ok(())
}
