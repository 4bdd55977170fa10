//! A formed cluster that is powered off: its disks, its owner, the IDs of its nodes.
//!
//! The first test that needs a cluster of three forms it and saves it; that test and all later ones, also those of
//! later runs, boot copies of its disks. To form it takes several times as long as to boot it: machines register one
//! after the other, and consensus admits one learner at a time.
//!
//! The disks are saved and not the memory of the machines: a boot takes seconds, sets the clock, and does not depend on
//! QEMU. The disks are overlays on the image, so a cluster on another image is not used. There is one saved cluster, that
//! of the last size; all tests need the same.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hearth_lab::owner::{key_file, recovery_key_file, secret_file};

use super::{Cluster, Member};
use crate::{Outcome, TestCtx};

/// The image, and the IDs of the nodes; written last.
const RECORD: &str = "cluster.json";

/// A saved cluster.
#[derive(Debug)]
pub(super) struct Saved {
    folder: PathBuf,
    ids: Vec<String>,
}

impl Saved {
    /// The cluster of this size, on this image.
    pub(super) fn find(test: &TestCtx, nodes: u16) -> anyhow::Result<Option<Self>> {
        let folder = folder(test);
        let path = folder.join(RECORD);
        if !path.exists() {
            return Ok(None);
        }
        let context = || format!("cannot read {}", path.display());
        let text = fs::read_to_string(&path).with_context(context)?;
        let (of_image, ids): (String, Vec<String>) =
            serde_json::from_str(&text).with_context(context)?;
        let fits = of_image == image(test)? && ids.len() == usize::from(nodes);
        Ok(fits.then_some(Self { folder, ids }))
    }

    /// Shuts a cluster down and saves it, instead of the one before.
    pub(super) async fn make(test: &TestCtx, mut cluster: Cluster) -> anyhow::Result<Self> {
        let folder = folder(test);
        if folder.exists() {
            remove(&folder)?;
        }
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        for member in cluster.members.iter_mut().rev() {
            member.power_off().await?;
        }
        for (index, member) in cluster.members.iter().enumerate() {
            place(member.node.disk_path(), &disk(&folder, index))?;
        }
        let founder = cluster.members[0].node.folder().to_owned();
        place(&key_file(&founder), &key_file(&folder))?;
        place(&secret_file(&founder), &secret_file(&folder))?;
        place(&recovery_key_file(&founder), &recovery_key_file(&folder))?;
        let members = cluster.members.iter();
        let (machines, ids): (Vec<PathBuf>, Vec<String>) = members
            .map(|member| (member.node.folder().to_owned(), member.id.clone()))
            .unzip();
        drop(cluster);
        // The test installs machines of the same names.
        machines.iter().try_for_each(|machine| remove(machine))?;
        let record = serde_json::to_string(&(image(test)?, &ids))?;
        fs::write(folder.join(RECORD), record)
            .with_context(|| format!("cannot write {}", folder.display()))?;
        Ok(Self { folder, ids })
    }

    /// Makes a new machine the one with this index.
    pub(super) async fn restore(&self, index: usize, member: &mut Member) -> Outcome {
        let id = self.ids.get(index).context("a larger cluster was saved")?;
        member.id.clone_from(id);
        // The owner of the machine's parameters is another one, whose cluster was never founded.
        let machine = member.node.folder();
        for file in [key_file, secret_file, recovery_key_file] {
            fs::copy(file(&self.folder), file(machine)).context("cannot copy the owner's files")?;
        }
        member
            .node
            .restore(&disk(&self.folder, index), &self.folder)
            .await
    }
}

fn folder(test: &TestCtx) -> PathBuf {
    test.artifacts().logs.join("formed")
}

/// Identifies the image: it is only written when it changes.
fn image(test: &TestCtx) -> anyhow::Result<String> {
    let image = &test.artifacts().test.disk;
    let file = fs::metadata(image)
        .with_context(|| format!("cannot read the metadata of {}", image.display()))?;
    Ok(format!("{}.{}", file.mtime(), file.mtime_nsec()))
}

fn remove(folder: &Path) -> Outcome {
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

fn disk(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("disk-{}.qcow2", index + 1))
}

fn place(from: &Path, to: &Path) -> Outcome {
    fs::rename(from, to).with_context(|| format!("cannot move {}", from.display()))
}
