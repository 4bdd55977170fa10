//! Whether the layers that containerd has unpacked are complete on the disk.
//!
//! containerd records that a layer has been unpacked before the layer's files are on the disk, and
//! does not check them later. So after a power cut an image may consist of empty files, in that
//! boot and in each later one. The compressed layers are not affected: they are synced, and
//! identified by their digests.
//!
//! So unpacked layers are trusted only if containerd was shut down cleanly and the file system was
//! synced after that, which is recorded by a marker file on the disk. Otherwise all of them are
//! deleted before they are used; an image is unpacked again when it is first needed.
//!
//! The marker is removed before containerd starts. That it existed, or that all layers were
//! deleted, is recorded in memory for as long as the role is assigned in this boot: containerd may
//! be restarted while its pods run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use hearth_api::client::within;
use hearth_host::layout::Root;
use hearth_sys::files::{self, FileError};
use tonic::{Code, Status};

use super::connection::{Connection, request};
use super::wire::snapshots::{
    Info, ListSnapshotsRequest, ListSnapshotsResponse, RemoveSnapshotRequest,
    RemoveSnapshotResponse,
};

const SNAPSHOTS: &str = "/containerd.services.snapshots.v1.Snapshots";
/// The only snapshotter that is enabled.
const SNAPSHOTTER: &str = "overlayfs";
/// Timeout of a call; emulated disks are slow, and a layer has thousands of files.
const CALL_BOUND: Duration = Duration::from_secs(60);
/// File mode: readable by root only.
const PRIVATE: u32 = 0o600;

/// The state of the unpacked layers.
#[derive(Clone, Debug)]
pub(super) struct Unpacked {
    /// containerd's directory.
    directory: PathBuf,
    /// Marker on the disk: all layers were synced.
    note: PathBuf,
    /// Marker in memory: the layers can be trusted.
    believed: PathBuf,
}

impl Unpacked {
    /// The state on this node.
    pub(super) fn of(root: &Root) -> Self {
        Self {
            directory: root.data.containerd(),
            note: root.data.containerd_written(),
            believed: root.ephemeral.kubernetes().worker().unpacked_believed(),
        }
    }

    /// To be called before containerd starts. Blocks on the disk.
    pub(super) fn begin(&self) -> Result<(), FileError> {
        if self.note.exists() {
            self.believe()?;
            files::remove_durably(&self.note)?;
        }
        Ok(())
    }

    /// Whether the unpacked layers can be trusted.
    pub(super) fn is_believed(&self) -> bool {
        self.believed.exists()
    }

    /// Records that the unpacked layers can be trusted from now on.
    pub(super) fn believe(&self) -> Result<(), FileError> {
        files::write_atomic(&self.believed, b"", PRIVATE)
    }

    /// To be called after containerd was shut down cleanly. Blocks until all data is on the disk.
    pub(super) fn end(&self) -> Result<(), FileError> {
        if !self.is_believed() {
            return Ok(());
        }
        files::sync_file_system(&self.directory)?;
        files::write_atomic(&self.note, b"", PRIVATE)
    }
}

/// Deletes all snapshots: unpacked layers, and the files that containers of earlier boots have
/// changed. Returns their number.
pub(super) async fn forget(connection: &Connection) -> Result<usize, Status> {
    let list = ListSnapshotsRequest {
        snapshotter: SNAPSHOTTER.to_owned(),
    };
    let listed = connection.list(format!("{SNAPSHOTS}/List"), request(list));
    let listed: Vec<ListSnapshotsResponse> = within(CALL_BOUND, listed).await?;
    let all = listed.into_iter().flat_map(|part| part.info).collect();
    let names = leaves_first(all);
    for name in &names {
        let remove = RemoveSnapshotRequest {
            snapshotter: SNAPSHOTTER.to_owned(),
            key: name.clone(),
        };
        let path = format!("{SNAPSHOTS}/Remove");
        let removed = connection.ask::<_, RemoveSnapshotResponse>(path, request(remove));
        match within(CALL_BOUND, removed).await {
            Err(status) if status.code() == Code::NotFound => {}
            removed => drop(removed?),
        }
    }
    Ok(names.len())
}

/// The names of the snapshots, each after its children.
fn leaves_first(all: Vec<Info>) -> Vec<String> {
    let mut above: HashMap<String, usize> = HashMap::new();
    for info in &all {
        *above.entry(info.parent.clone()).or_default() += 1;
    }
    let is_leaf = |info: &Info| !above.contains_key(&info.name);
    let mut ready: Vec<String> = all
        .iter()
        .filter(|info| is_leaf(info))
        .map(|info| info.name.clone())
        .collect();
    let parents: HashMap<_, _> = all
        .into_iter()
        .map(|info| (info.name, info.parent))
        .collect();
    let mut names = Vec::with_capacity(parents.len());
    while let Some(name) = ready.pop() {
        let parent = parents.get(&name).cloned().unwrap_or_default();
        if let Some(left) = above.get_mut(&parent) {
            *left -= 1;
            if *left == 0 && parents.contains_key(&parent) {
                ready.push(parent);
            }
        }
        names.push(name);
    }
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_believed_after_an_end_in_order_only() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::under(directory.path());
        let unpacked = Unpacked::of(&root);
        let boot = || {
            let memory = root.ephemeral.path();
            drop(std::fs::remove_dir_all(memory));
            std::fs::create_dir_all(root.ephemeral.kubernetes().worker().path()).unwrap();
        };
        std::fs::create_dir_all(root.data.containerd()).unwrap();
        boot();
        unpacked.begin().unwrap();
        assert!(!unpacked.is_believed(), "nobody knows what is there");
        // It ends before the layers were deleted.
        unpacked.end().unwrap();
        boot();
        unpacked.begin().unwrap();
        assert!(!unpacked.is_believed());
        unpacked.believe().unwrap();
        // containerd alone is restarted.
        unpacked.begin().unwrap();
        assert!(unpacked.is_believed());
        unpacked.end().unwrap();
        boot();
        unpacked.begin().unwrap();
        assert!(unpacked.is_believed());
        // A boot without a clean shutdown.
        boot();
        unpacked.begin().unwrap();
        assert!(!unpacked.is_believed());
    }

    proptest! {
        #[test]
        fn what_is_built_upon_goes_later(parents in prop::collection::vec(0..20_usize, 0..20)) {
            let info = |(at, parent): (usize, &usize)| Info {
                name: at.to_string(),
                parent: if *parent < at { parent.to_string() } else { String::new() },
            };
            let all: Vec<Info> = parents.iter().enumerate().map(info).collect();
            let names = leaves_first(all.clone());
            prop_assert_eq!(names.len(), all.len());
            let at = |name: &str| names.iter().position(|other| other == name);
            for info in all.iter().filter(|info| !info.parent.is_empty()) {
                prop_assert!(at(&info.name) < at(&info.parent));
            }
        }
    }
}
