//! Further disks as volumes: chosen by the conditions of the node's settings (`disk.NAME`), formatted and encrypted as the data
//! partition is, and mounted at `/data/disks/NAME`.
//!
//! # Which disk
//! The first time it is the one that the conditions mean ([`choose`]): an empty one, one that they name as to be overwritten, or one that
//! this node has formatted before. From then on it is the disk with the salt that is in the volume's record, wherever it is plugged
//! in. Conditions that the disk does not meet any more choose another one.
//!
//! # Invariants
//! - Nothing is written to a disk that is neither empty, nor this node's, nor named by `overwrite`.
//! - The record is durable before the file system is made, so that a power cut at any moment leaves a disk that is found again or one
//!   without data.
//! - A volume whose disk is missing or damaged has none: another disk never takes its place unasked.
//! - The mount point exists only while the disk is mounted, so that pods which need the volume do not start on the data partition.
//!
//! The keys are derived from those of the data partition ([`keys`](crate::storage::keys)) with a salt of the disk's own. A node that is
//! removed from its cluster erases the headers ([`erase_all`]), and with them the salts.
//!
//! One disk is formatted after the other. To wipe one for authentication takes a while; the problems say how far it is.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fs, io};

use hearth_api::chain;
use hearth_api::disk_conditions::DiskConditions;
use hearth_api::node_settings::NodeSettings;
use hearth_api::private::StoredDisk;
use hearth_base::event;
use hearth_base::supervisor::{Context, Failure, Outcome, spawn_blocking};
use hearth_sys::block::{self, BlockError, Blocks};
use hearth_sys::files;
use tokio::time::{Instant, sleep, sleep_until};

use super::Known;
use super::choice::{Candidate, Needs, NoChoice, choose};
use super::content::{Content, END};
use crate::layout;
use crate::record::{self, Record, RecordError};
use crate::storage::header::{Header, HeaderRegion, HeaderState, Owner, Phase};
use crate::storage::keys::SALT_LEN;
use crate::storage::upkeep::{WEEK, part_of_a_day};
use crate::storage::{OwnedVolume, Progress, StorageBackend, StorageError, System, Volume};

/// What a file system and its header need.
const NEEDS: Needs = Needs {
    size: 1 << 30,
    sector_size: None,
};
/// How often missing disks are looked for, and it is seen whether the others are still there.
const INTERVAL: Duration = Duration::from_secs(15);

/// Where the disks are.
pub trait Disks: Send + Sync + 'static {
    /// Formats, opens and mounts them.
    type Backend: StorageBackend;
    /// All disks that may be volumes.
    fn all(&self) -> Result<Vec<Known>, BlockError>;
    /// One of them, as the volume with this name.
    fn volume(&self, disk: &Known, name: &str) -> Self::Backend;
}

/// Those of this machine.
pub struct MachineDisks {
    /// The kernel's name of the disk that the node has booted from.
    pub boot_disk: String,
}

impl Disks for MachineDisks {
    type Backend = System;

    fn all(&self) -> Result<Vec<Known>, BlockError> {
        super::all_but(&Blocks::default(), &self.boot_disk)
    }

    fn volume(&self, disk: &Known, name: &str) -> System {
        System::whole_disk(&disk.disk.path, name)
    }
}

/// Why a volume has no disk.
#[derive(Debug, thiserror::Error)]
enum DiskError {
    #[error(transparent)]
    Choice(#[from] NoChoice),
    #[error(
        "expected the disk that it was formatted on, got none; other conditions choose another disk"
    )]
    Missing,
    #[error("expected one disk of this node that meets {wanted}, got {count}")]
    SeveralOwn { wanted: String, count: usize },
    #[error("its disk is gone")]
    Gone,
    #[error(transparent)]
    Disks(#[from] BlockError),
    #[error("cannot use {disk}")]
    Storage {
        disk: String,
        source: Box<StorageError>,
    },
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("cannot make its mount point")]
    MountPoint(#[source] io::Error),
}

impl Known {
    /// What could not be done with it.
    fn failed(&self) -> impl FnOnce(StorageError) -> DiskError + use<> {
        let disk = self.candidate.name.clone();
        |source| DiskError::Storage {
            disk,
            source: Box::new(source),
        }
    }
}

/// What this runnable works with.
pub struct Worker<D: Disks> {
    /// Where the disks are.
    pub disks: D,
    /// Where the volumes are mounted, and their records are.
    pub data: layout::Data,
    /// Read: this node's settings.
    pub node_settings: event::Value<Arc<NodeSettings>>,
    /// Read: owner and keys, once the data partition is mounted.
    pub data_volume: event::Value<Arc<Volume>>,
    /// Written: what the volumes lack.
    pub disk_problems: event::Writer<Vec<String>>,
    /// The volumes that are mounted, by name.
    pub mounted: Mutex<BTreeMap<String, Mounted<D::Backend>>>,
}

/// A volume that is mounted.
pub struct Mounted<M> {
    disk: Known,
    volume: OwnedVolume<M>,
}

/// The runnable.
pub async fn run<D: Disks>(ctx: Context, worker: Arc<Worker<D>>) -> Outcome {
    worker.disk_problems.set(Vec::new());
    ctx.healthy();
    ctx.until_cancelled(follow(&worker)).await
}

async fn follow<D: Disks>(worker: &Arc<Worker<D>>) -> Outcome {
    let volume = worker.data_volume.watch().next().await?;
    let mut all = worker.node_settings.watch();
    let mut settings = all.next().await?;
    let mut discard_at = Instant::now() + part_of_a_day();
    let mut problems = Vec::new();
    loop {
        let (wanted, owner) = (settings.clone(), volume.clone());
        let applied = blocking(worker, move |worker| worker.apply(&wanted.disks, &owner)).await?;
        for new in applied.iter().filter(|it| !problems.contains(*it)) {
            tracing::warn!("{new}");
        }
        problems = applied;
        worker.disk_problems.set(problems.clone());
        loop {
            tokio::select! {
                next = all.next() => {
                    settings = next?;
                    break;
                }
                () = sleep(INTERVAL), if !settings.disks.is_empty() => {
                    if !problems.is_empty() || !worker.are_all_there() {
                        break;
                    }
                }
                () = sleep_until(discard_at) => {
                    blocking(worker, |worker| worker.discard_unused()).await?;
                    discard_at = Instant::now() + WEEK;
                }
            }
        }
    }
}

/// Runs a step on a thread that may block.
async fn blocking<D: Disks, T: Send + 'static>(
    worker: &Arc<Worker<D>>,
    step: impl FnOnce(&Worker<D>) -> T + Send + 'static,
) -> Result<T, Failure> {
    let worker = worker.clone();
    Ok(spawn_blocking(move || step(&worker)).await?)
}

impl<D: Disks> Worker<D> {
    /// Mounts the volumes of the settings, and unmounts the others. Returns what is lacking.
    fn apply(&self, wanted: &BTreeMap<String, DiskConditions>, owner: &Volume) -> Vec<String> {
        let mut problems = Vec::new();
        let mut tell = |name: &str, error: &DiskError| {
            problems.push(format!("disk.{name}: {}", chain(error)));
        };
        let obsolete: BTreeSet<String> = self.with_mounted(|mounted| {
            let names = mounted.keys().filter(|name| !wanted.contains_key(*name));
            names.cloned().collect()
        });
        for name in &obsolete {
            if let Err(error) = self.unmount(name) {
                tell(name, &error);
            }
        }
        for (name, conditions) in wanted {
            if let Err(error) = self.ensure(name, conditions, owner) {
                tell(name, &error);
            }
        }
        problems
    }

    fn with_mounted<T>(
        &self,
        step: impl FnOnce(&mut BTreeMap<String, Mounted<D::Backend>>) -> T,
    ) -> T {
        step(&mut self.mounted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn are_all_there(&self) -> bool {
        self.with_mounted(|mounted| mounted.values().all(|one| one.disk.disk.path.exists()))
    }

    fn discard_unused(&self) {
        self.with_mounted(|mounted| {
            for (name, one) in mounted {
                match one.volume.discard_unused() {
                    Ok(Some(bytes)) => {
                        tracing::info!(name, bytes, "told the disk what the volume does not use")
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!("disk.{name}: {}", chain(&error)),
                }
            }
        });
    }

    /// Sees that a volume is mounted, from the right disk.
    fn ensure(
        &self,
        name: &str,
        conditions: &DiskConditions,
        owner: &Volume,
    ) -> Result<(), DiskError> {
        let meets = self.with_mounted(|mounted| {
            let one = mounted.get(name)?;
            let is_there = one.disk.disk.path.exists();
            Some((is_there, one.disk.candidate.is_meant_by(conditions)))
        });
        match meets {
            // It may have been plugged in elsewhere.
            Some((false, _)) => self.unmount(name).map_err(|_| DiskError::Gone)?,
            Some((true, true)) => return self.remount(name, owner),
            Some((true, false)) => self.unmount(name)?,
            None => {}
        }
        let found = self.find(name, conditions, owner)?;
        let at = self.data.disk(name);
        let what = found.disk.candidate.to_string();
        let backend = self.disks.volume(&found.disk, name);
        let mut volume = OwnedVolume::new(backend, at.clone());
        if found.stage == Stage::New {
            tracing::info!("disk.{name}: formatting {what}");
            begin(&mut volume, owner).map_err(found.disk.failed())?;
        }
        if matches!(found.stage, Stage::New | Stage::Adopted) {
            let salt = volume.salt().map_err(found.disk.failed())?;
            self.remember(name, conditions, &salt)?;
        }
        if matches!(found.stage, Stage::New | Stage::Begun) {
            let mut told = |progress: Progress| {
                tracing::info!("disk.{name}: wiping: {progress}");
                let problem = format!("disk.{name}: it is being wiped: {progress}");
                self.disk_problems.set(vec![problem]);
            };
            let made = volume.make_file_system(owner, &mut told);
            made.and_then(|()| volume.mark_ready(owner))
                .map_err(found.disk.failed())?;
        }
        fs::create_dir_all(&at).map_err(DiskError::MountPoint)?;
        if let Err(error) = volume.mount(owner) {
            self.data.remove_mount_points();
            return Err(found.disk.failed()(error));
        }
        tracing::info!("disk.{name}: mounted {what} at {}", at.display());
        let disk = found.disk;
        self.with_mounted(|mounted| mounted.insert(name.to_owned(), Mounted { disk, volume }));
        Ok(())
    }

    fn remember(
        &self,
        name: &str,
        conditions: &DiskConditions,
        salt: &[u8; SALT_LEN],
    ) -> Result<(), DiskError> {
        let stored = StoredDisk {
            version: StoredDisk::VERSION,
            salt: salt.to_vec(),
            conditions: conditions.to_string(),
        };
        let path = self.data.node().disk(name);
        if let Some(directory) = path.parent() {
            let made = files::create_dir_durably(directory, files::PRIVATE_DIRECTORY);
            made.map_err(RecordError::from)?;
        }
        Ok(record::save(&path, &stored)?)
    }

    /// Does nothing, unless it was unmounted while something still used it, so that it could not be closed.
    fn remount(&self, name: &str, owner: &Volume) -> Result<(), DiskError> {
        self.with_mounted(|mounted| match mounted.get_mut(name) {
            Some(one) => one.volume.mount(owner).map(drop).map_err(one.disk.failed()),
            None => Ok(()),
        })
    }

    fn unmount(&self, name: &str) -> Result<(), DiskError> {
        self.with_mounted(|mounted| {
            let Some(one) = mounted.get_mut(name) else {
                return Ok(());
            };
            one.volume.unmount().map_err(one.disk.failed())?;
            tracing::info!("disk.{name}: unmounted {}", one.disk.candidate);
            mounted.remove(name);
            self.data.remove_mount_points();
            Ok(())
        })
    }

    fn find(
        &self,
        name: &str,
        conditions: &DiskConditions,
        owner: &Volume,
    ) -> Result<Found, DiskError> {
        let mut free = Vec::new();
        let taken = self.salts_of_others(name)?;
        for disk in self.disks.all()? {
            let header = HeaderRegion::new(&disk.disk.path).peek();
            if !header
                .as_ref()
                .is_some_and(|it| taken.contains(&it.salt[..]))
            {
                free.push((disk, header));
            }
        }
        let stored: Option<StoredDisk> =
            record::load(&self.data.node().disk(name), Ok::<_, Infallible>)?;
        let Some(stored) = stored else {
            return choose_new(conditions, owner, free);
        };
        let is_it = |(_, header): &(Known, Option<Header>)| {
            header.as_ref().is_some_and(|it| it.salt[..] == stored.salt)
        };
        let is_same = stored.conditions == conditions.to_string();
        match free.iter().position(is_it) {
            Some(at) if is_same || free[at].0.candidate.is_meant_by(conditions) => {
                let (disk, header) = free.swap_remove(at);
                let stage = match header.is_some_and(|header| is_begun(&header, owner)) {
                    true => Stage::Begun,
                    false if is_same => Stage::Ready,
                    false => Stage::Adopted,
                };
                Ok(Found { disk, stage })
            }
            None if is_same => Err(DiskError::Missing),
            _ => choose_new(conditions, owner, free),
        }
    }

    /// Those of the disks of all other volumes.
    fn salts_of_others(&self, name: &str) -> Result<BTreeSet<Vec<u8>>, DiskError> {
        let own = self.data.node().disk(name);
        let Some(directory) = own.parent().filter(|directory| directory.exists()) else {
            return Ok(BTreeSet::new());
        };
        let mut salts = BTreeSet::new();
        let entries = fs::read_dir(directory).map_err(DiskError::MountPoint)?;
        for entry in entries {
            let path = entry.map_err(DiskError::MountPoint)?.path();
            if path != own
                && let Some(stored) = record::load(&path, Ok::<StoredDisk, Infallible>)?
            {
                salts.insert(stored.salt);
            }
        }
        Ok(salts)
    }
}

/// Writes the header, over whatever is on the disk: it was chosen.
fn begin<M: StorageBackend>(
    volume: &mut OwnedVolume<M>,
    owner: &Volume,
) -> Result<(), StorageError> {
    match volume.inspect()? {
        HeaderState::Blank | HeaderState::Unfinished => {}
        HeaderState::Header(header) if is_begun(&header, owner) => {}
        HeaderState::Header(_) | HeaderState::Foreign(_) => volume.erase()?,
    }
    volume.initialise(owner)
}

/// The disk of a volume.
struct Found {
    disk: Known,
    stage: Stage,
}

/// How far a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It is to be formatted.
    New,
    /// It has a record, and an earlier attempt has begun to format it.
    Begun,
    /// It has its file system, and the record is to say so.
    Adopted,
    /// It has both.
    Ready,
}

fn is_begun(header: &Header, owner: &Volume) -> bool {
    header.owner == owner.owner && header.phase == Phase::Initialising
}

fn choose_new(
    conditions: &DiskConditions,
    owner: &Volume,
    free: Vec<(Known, Option<Header>)>,
) -> Result<Found, DiskError> {
    let is_ready = |header: &Header| {
        header.owner == owner.owner
            && header.phase == Phase::Ready
            && header.is_authentic(owner.secrets.as_ref())
    };
    let (own, mut others): (Vec<_>, Vec<_>) = free.into_iter().partition(|(disk, header)| {
        header.as_ref().is_some_and(is_ready) && disk.candidate.is_meant_by(conditions)
    });
    let count = own.len();
    if let Some((disk, _)) = own.into_iter().next() {
        if count > 1 {
            let wanted = conditions.to_string();
            return Err(DiskError::SeveralOwn { wanted, count });
        }
        return Ok(Found {
            disk,
            stage: Stage::Adopted,
        });
    }
    for (disk, header) in &mut others {
        if header.as_ref().is_some_and(|it| is_begun(it, owner)) {
            disk.candidate.content = Content::Unfinished;
        }
    }
    let candidates: Vec<Candidate> = others.iter().map(|(it, _)| it.candidate.clone()).collect();
    let chosen = choose(conditions, &candidates, NEEDS)?.clone();
    let mut disks = others.into_iter().map(|(disk, _)| disk);
    let disk = disks.find(|disk| disk.candidate == chosen);
    Ok(Found {
        disk: disk.ok_or(NoChoice::NoDisk)?,
        stage: Stage::New,
    })
}

/// Erases every disk that has this owner, so that it is empty.
///
/// # Errors
/// The first one; the other disks are erased nevertheless.
pub fn erase_all(disks: &impl Disks, owner: &Owner) -> Result<(), StorageError> {
    let all = disks
        .all()
        .map_err(|error| StorageError::machinery("list the disks")(error.into()))?;
    let mut done = Ok(());
    for disk in all {
        let path = &disk.disk.path;
        let header = HeaderRegion::new(path).peek();
        if header.is_some_and(|header| header.owner == *owner) {
            let erased = erase(path, disk.disk.size);
            if erased.is_ok() {
                tracing::info!("erased {}", disk.candidate);
            }
            done = done.and(erased);
        }
    }
    done
}

/// First the end, so that a header remains as long as anything does.
fn erase(device: &Path, size: u64) -> Result<(), StorageError> {
    block::zero_range(device, size.saturating_sub(END), END)
        .map_err(|error| StorageError::machinery("erase the disk")(error.into()))?;
    Ok(HeaderRegion::new(device).erase()?)
}

#[cfg(test)]
mod tests;
