//! A formed cluster that is powered off: its disks, its owner, the IDs of its nodes.
//!
//! The first test that needs a cluster of three forms it and saves it; that test and all later ones, also those of
//! later runs, boot copies of its disks. To form it takes several times as long as to boot it: machines register one
//! after the other, and consensus admits one learner at a time.
//!
//! The disks are saved and not the memory of the machines: a boot takes seconds, sets the clock, and does not depend on
//! QEMU. The disks are overlays on the image, so the name of the folder identifies the image; a cluster on another
//! image is removed.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hearth_lab::owner::{key_file, secret_file};

use super::{Cluster, Member};
use crate::{Outcome, TestCtx};

/// The IDs of the nodes; written last.
const IDS: &str = "ids.json";

/// A saved cluster.
#[derive(Debug)]
pub(super) struct Saved {
    folder: PathBuf,
    ids: Vec<String>,
}

impl Saved {
    /// The cluster of this size, on this image.
    pub(super) fn find(test: &TestCtx, nodes: u16) -> anyhow::Result<Option<Self>> {
        let folder = folder(test, nodes)?;
        let path = folder.join(IDS);
        if !path.exists() {
            return Ok(None);
        }
        let context = || format!("cannot read {}", path.display());
        let text = fs::read_to_string(&path).with_context(context)?;
        let ids = serde_json::from_str(&text).with_context(context)?;
        Ok(Some(Self { folder, ids }))
    }

    /// Shuts a cluster down and saves it.
    pub(super) async fn make(test: &TestCtx, mut cluster: Cluster) -> anyhow::Result<Self> {
        let number = u16::try_from(cluster.members.len())?;
        let folder = folder(test, number)?;
        remove_others(&folder)?;
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        // The followers first, so that consensus has a leader to the end.
        for member in cluster.members.iter_mut().rev() {
            member.power_off().await?;
        }
        for (index, member) in cluster.members.iter().enumerate() {
            place(member.node.disk_path(), &disk(&folder, index))?;
        }
        let founder = cluster.members[0].node.folder().to_owned();
        place(&key_file(&founder), &key_file(&folder))?;
        place(&secret_file(&founder), &secret_file(&folder))?;
        let ids = cluster.members.iter().map(|member| member.id.clone());
        let ids: Vec<String> = ids.collect();
        let machines: Vec<PathBuf> = cluster
            .members
            .iter()
            .map(|member| member.node.folder().to_owned())
            .collect();
        drop(cluster);
        // The test installs machines of the same names.
        for machine in machines {
            fs::remove_dir_all(&machine)
                .with_context(|| format!("cannot remove {}", machine.display()))?;
        }
        fs::write(folder.join(IDS), serde_json::to_string(&ids)?)
            .with_context(|| format!("cannot write {}", folder.display()))?;
        Ok(Self { folder, ids })
    }

    /// Makes a new machine the one with this index.
    pub(super) fn restore(&self, index: usize, member: &mut Member) -> Outcome {
        let id = self.ids.get(index).context("a larger cluster was saved")?;
        member.id.clone_from(id);
        member
            .node
            .restore(&disk(&self.folder, index), &self.folder)
    }
}

fn folder(test: &TestCtx, nodes: u16) -> anyhow::Result<PathBuf> {
    let image = &test.artifacts().test.disk;
    let file = fs::metadata(image)
        .with_context(|| format!("cannot read the metadata of {}", image.display()))?;
    let image = format!("{}.{}", file.mtime(), file.mtime_nsec());
    let all = test.artifacts().logs.join("formed");
    Ok(all.join(image).join(nodes.to_string()))
}

/// Removes a cluster that is saved here in part, and all on other images.
fn remove_others(folder: &Path) -> Outcome {
    let (image, all) = (folder.parent(), folder.parent().and_then(Path::parent));
    let images = all.map(fs::read_dir).and_then(Result::ok);
    let images = images.into_iter().flatten().map(|entry| Ok(entry?.path()));
    let images = images.collect::<std::io::Result<Vec<PathBuf>>>()?;
    let others = images
        .into_iter()
        .filter(|path| Some(path.as_path()) != image);
    for path in others.chain([folder.to_owned()]) {
        if path.exists() {
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

fn disk(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("disk-{}.qcow2", index + 1))
}

fn place(from: &Path, to: &Path) -> Outcome {
    fs::rename(from, to).with_context(|| format!("cannot move {}", from.display()))
}
