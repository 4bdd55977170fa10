//! A data partition in a plain file, for tests.
//!
//! The kernel's operations are reduced to what a test can verify: a file system is a few bytes in
//! the payload that also record the key with which it was created, and mounting checks them. Header
//! and logic are the real ones.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hearth_api::identity::{ClusterId, ClusterUnlockKey, EnrolmentId, NodeId, NodeUnlockKey};
use ring::digest;

use super::header::{Owner, REGION};
use super::keys::{Mode, Secrets, VolumeKey};
use super::{BoxError, OnProgress, StorageBackend, StorageError, Volume};

/// A volume of this enrolment of the node 2 in the cluster 3.
pub fn volume(mode: Option<Mode>, enrolment: u8) -> Volume {
    let owner = Owner {
        enrolment_id: EnrolmentId::from_bytes([enrolment; 16]),
        node_id: NodeId::from_bytes([2; 16]),
        cluster_id: ClusterId::from_bytes([3; 16]),
    };
    Volume {
        owner,
        secrets: mode.map(|mode| Secrets {
            mode,
            node_unlock_key: NodeUnlockKey::from_bytes([4; 32]),
            cluster_unlock_key: ClusterUnlockKey::from_bytes([5; 32]),
            cluster_id: owner.cluster_id,
            node_id: owner.node_id,
            key_epoch: 0,
        }),
    }
}

/// A partition in a file of 4 MiB.
#[derive(Clone, Debug)]
pub struct Files {
    device: PathBuf,
    payload: PathBuf,
    mounted: Option<PathBuf>,
    grown: Arc<AtomicU32>,
    /// Decremented by each step of the backend; at zero, steps fail.
    steps_left: Arc<AtomicU32>,
    /// How many steps the file system needs to grow further.
    to_grow: Arc<AtomicU32>,
    discards: Arc<AtomicU32>,
}

impl Files {
    /// A blank partition in this directory.
    pub fn new(directory: &Path) -> Self {
        let device = directory.join("data-partition");
        File::create(&device)
            .and_then(|file| file.set_len(4 * REGION))
            .expect("cannot create the device file");
        Self {
            device,
            payload: directory.join("payload"),
            mounted: None,
            grown: Arc::default(),
            steps_left: Arc::new(AtomicU32::new(u32::MAX)),
            to_grow: Arc::default(),
            discards: Arc::default(),
        }
    }

    /// The same disk after a power cut: nothing is open or mounted.
    pub fn rebooted(&self) -> Self {
        Self {
            mounted: None,
            ..self.clone()
        }
    }

    /// The file that holds the partition.
    pub fn device_path(&self) -> &Path {
        &self.device
    }

    /// How often the partition was grown.
    pub fn grown(&self) -> u32 {
        self.grown.load(Ordering::Relaxed)
    }

    /// Lets the file system grow further in so many steps.
    pub fn grow_in(&self, steps: u32) {
        self.to_grow.store(steps, Ordering::Relaxed);
    }

    /// How many steps of growing are left.
    pub fn to_grow(&self) -> u32 {
        self.to_grow.load(Ordering::Relaxed)
    }

    /// How often the disk was told what is unused.
    pub fn discards(&self) -> u32 {
        self.discards.load(Ordering::Relaxed)
    }

    /// Lets all steps after this many fail.
    pub fn fail_after(&self, steps: u32) {
        self.steps_left.store(steps, Ordering::Relaxed);
    }

    fn step(&self) -> Result<(), StorageError> {
        let take = |left: u32| left.checked_sub(1);
        let taken = self
            .steps_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        match taken {
            Ok(_) => Ok(()),
            Err(_) => Err(StorageError::machinery("access the disk")(
                "injected".into(),
            )),
        }
    }

    fn fingerprint(key: Option<VolumeKey>) -> Vec<u8> {
        let key = match &key {
            None => [].as_slice(),
            Some(VolumeKey::Xts(key)) => &key[..],
            Some(VolumeKey::Aead(key)) => &key[..],
        };
        digest::digest(&digest::SHA256, key).as_ref().to_vec()
    }

    /// Where its files are while it is not mounted, after it was.
    fn unmounted(&self) -> PathBuf {
        self.device.with_extension("unmounted")
    }

    fn device_file(&self) -> File {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(&self.device)
            .expect("cannot open the device file")
    }
}

const MAGIC: &[u8] = b"a file system";
/// The byte is 1 until the file system is mounted for the first time.
const EMPTY_AT: u64 = 2 * REGION;

impl StorageBackend for Files {
    fn device(&mut self) -> Result<PathBuf, StorageError> {
        self.step()?;
        Ok(self.device.clone())
    }

    fn grow(&mut self) -> Result<(), StorageError> {
        self.step()?;
        self.grown.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn prepare(&mut self, _: VolumeKey, _: &Path, _: OnProgress<'_>) -> Result<(), StorageError> {
        self.step()
    }

    /// Writes the fingerprint of the key to the payload's file.
    fn open(&mut self, key: Option<VolumeKey>, _: &Path) -> Result<PathBuf, StorageError> {
        self.step()?;
        fs::write(&self.payload, Self::fingerprint(key)).expect("the payload");
        Ok(self.payload.clone())
    }

    fn make_file_system(&mut self, payload: &Path) -> Result<(), StorageError> {
        self.step()?;
        let key = fs::read(payload).expect("an open payload");
        let content = [MAGIC, &key].concat();
        let device = self.device_file();
        device.write_all_at(&content, REGION).expect("the payload");
        device.write_all_at(&[1], EMPTY_AT).expect("the payload");
        Ok(())
    }

    fn is_mounted(&mut self, at: &Path) -> Result<bool, StorageError> {
        Ok(self.mounted.as_deref() == Some(at))
    }

    fn mount(&mut self, payload: &Path, at: &Path) -> Result<(), StorageError> {
        self.step()?;
        let wanted = [MAGIC, &fs::read(payload).expect("an open payload")].concat();
        let mut found = vec![0; wanted.len()];
        let device = self.device_file();
        device
            .read_exact_at(&mut found, REGION)
            .expect("the payload");
        if found != wanted {
            let error: BoxError = "no file system for this key".into();
            return Err(StorageError::machinery("mount the volume")(error));
        }
        let mut empty = [0];
        device
            .read_exact_at(&mut empty, EMPTY_AT)
            .expect("the payload");
        if empty == [1] && at.exists() {
            fs::remove_dir_all(at).expect("the mount point");
        }
        device.write_all_at(&[0], EMPTY_AT).expect("the payload");
        fs::create_dir_all(at).expect("the mount point");
        if self.unmounted().exists() {
            fs::rename(self.unmounted(), at).expect("the mount point");
        }
        self.mounted = Some(at.to_owned());
        Ok(())
    }

    fn unmount(&mut self, at: &Path) -> Result<(), StorageError> {
        self.step()?;
        if self.mounted.take().is_some() {
            fs::rename(at, self.unmounted()).expect("the files");
            fs::create_dir(at).expect("the mount point");
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), StorageError> {
        self.step()
    }

    fn grow_file_system(
        &mut self,
        _: Option<VolumeKey>,
        _: &Path,
        _: &Path,
    ) -> Result<(), StorageError> {
        self.step()
    }

    fn grow_further(
        &mut self,
        _: &Path,
        _: &Path,
        _: OnProgress<'_>,
    ) -> Result<bool, StorageError> {
        self.step()?;
        let take = |left: u32| left.checked_sub(1);
        let left = self
            .to_grow
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Ok(left.is_ok())
    }

    fn discard_unused(&mut self, _: &Path) -> Result<Option<u64>, StorageError> {
        self.step()?;
        self.discards.fetch_add(1, Ordering::Relaxed);
        Ok(Some(4096))
    }

    fn table(&mut self) -> Result<Option<String>, StorageError> {
        Ok(None)
    }
}
