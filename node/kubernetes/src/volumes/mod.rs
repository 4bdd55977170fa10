//! Local volumes: directories on the data partition of the pod's node, with a quota of the size
//! that the claim requests.
//!
//! | part | runs on | content |
//! |---|---|---|
//! | [`plan`] | controllers, in the reconciler | creates the PersistentVolume for a claim whose node has been selected, and deletes it when the claim has been deleted |
//! | [`disk`] | the volume's node | the directory and its quota |
//! | this module | the volume's node | creates the directory for each PersistentVolume, and removes it when the object is deleted; the content is deleted afterwards |
//!
//! The object is the only interface between the two sides. It has [`FINALIZER`] from its creation,
//! so it exists until its node has removed the directory; its name is derived from the claim's UID
//! and is the name of the directory. So there is no state besides that of Kubernetes and of the
//! disk, and each step can be repeated.
//!
//! Why nodes do not create the objects: a node that may create PersistentVolumes can create one for
//! any directory of any node. A node may only read them, and remove the finalizer.
//!
//! Invariants: the path of a directory follows from the name of the volume, which is validated,
//! never from a path in the object. A directory is only removed if its object is being deleted, no
//! claim is bound to it any more, and its data does not have to be kept
//! (`persistentVolumeReclaimPolicy: Retain`). A directory without an object is kept, and reported
//! in the log: its volume was retained, or etcd has been restored from a backup.

pub mod disk;
pub mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use hearth_api::identity::NodeId;
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Outcome, spawn_blocking};
use hearth_kubernetes_api::fields::Volume;
use hearth_kubernetes_api::store::{Event, Full};
use hearth_kubernetes_api::watch::{Which, watch};
use hearth_kubernetes_api::{ApiError, Client, MANAGER, Objects, Watching, kinds};
use http::StatusCode;
use serde_json::{Value as Json, json};
use tokio::task::JoinError;
use tokio::time::{MissedTickBehavior, sleep};
use tokio_util::sync::CancellationToken;

use disk::{Disk, DiskError};

/// Name of the storage class.
pub const CLASS: &str = "local";
/// Name of the provisioner.
pub const PROVISIONER: &str = "hearth.dev/local";
/// Label of a PersistentVolume: its node.
pub const NODE_LABEL: &str = "hearth.dev/node";
/// Finalizer of a PersistentVolume, until its directory has been removed.
pub const FINALIZER: &str = "hearth.dev/volume";
/// Kubernetes' own finalizer of a PersistentVolume, while a claim is bound to it.
const IN_USE: &str = "kubernetes.io/pv-protection";
/// Annotation of a PersistentVolume: the provisioner, which also deletes it.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// Delay before a failed step is retried; the usual cause is a full disk.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// The name of a volume, and of its directory: `pvc-` and a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeName(String);

impl VolumeName {
    /// The name for the claim with this UID; `None` if it is not a UUID.
    pub fn of_claim(uid: &str) -> Option<Self> {
        Self::parse(&format!("pvc-{uid}"))
    }

    /// Validates a name.
    pub fn parse(name: &str) -> Option<Self> {
        let uid = name.strip_prefix("pvc-")?;
        let parsed = uuid::Uuid::try_parse(uid).ok()?;
        // Only the canonical form: one directory must not have two names.
        (parsed.hyphenated().to_string() == uid).then(|| Self(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A volume to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Name of the object and of the directory.
    pub name: VolumeName,
    /// Size in bytes.
    pub size: u64,
    /// The node.
    pub node: NodeId,
    /// Namespace, name and UID of the claim.
    pub claim: (String, String, String),
    /// Path of the directory on the node.
    pub path: PathBuf,
}

impl Planned {
    /// The PersistentVolume.
    pub fn body(&self) -> Json {
        let node = self.node.to_string();
        let (namespace, name, uid) = &self.claim;
        let here = json!([{ "matchExpressions": [
            { "key": "kubernetes.io/hostname", "operator": "In", "values": [node] },
        ]}]);
        json!({
            "metadata": {
                "name": self.name.as_str(),
                "labels": { NODE_LABEL: node, "app.kubernetes.io/managed-by": MANAGER },
                "annotations": { PROVISIONED_BY: PROVISIONER },
                "finalizers": [FINALIZER],
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": { "storage": self.size.to_string() },
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": namespace,
                    "name": name,
                    "uid": uid,
                },
                "local": { "path": self.path },
                "nodeAffinity": { "required": { "nodeSelectorTerms": here } },
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": CLASS,
                "volumeMode": "Filesystem",
            },
        })
    }
}

/// The patch that removes our finalizer; `None` if the object does not have it. The API server
/// rejects it if the object has changed.
pub fn release(volume: &Volume) -> Option<Json> {
    let all = &volume.metadata.finalizers;
    if !all.iter().any(|name| name == FINALIZER) {
        return None;
    }
    let others: Vec<_> = all.iter().filter(|name| *name != FINALIZER).collect();
    Some(json!({ "metadata": {
        "finalizers": others,
        "resourceVersion": volume.metadata.resource_version,
    }}))
}

/// Whether an object is being deleted and is not in use any more. Kubernetes postpones the deletion
/// of a volume that is bound.
pub fn is_released(volume: &Volume) -> bool {
    let metadata = &volume.metadata;
    metadata.deletion_timestamp.is_some()
        && !metadata.finalizers.iter().any(|name| name == IN_USE)
        && volume.status.phase != "Bound"
}

/// The desired state of a volume on its node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DesiredState {
    /// A directory with a quota of this many bytes.
    Have(u64),
    /// No change for now: the volume is in use, or has other finalizers.
    Wait,
    /// Remove the finalizer with this patch; before that, remove the directory unless it has to be
    /// kept.
    End { patch: Json, keep: bool },
}

/// The desired state; `None` if the size in the object is invalid.
fn desired_state(volume: &Volume) -> Option<DesiredState> {
    if volume.metadata.deletion_timestamp.is_none() {
        return size(volume).map(DesiredState::Have);
    }
    let patch = release(volume).filter(|_| is_released(volume));
    Some(match patch {
        None => DesiredState::Wait,
        Some(patch) => DesiredState::End {
            patch,
            keep: volume.spec.persistent_volume_reclaim_policy != "Delete",
        },
    })
}

/// Configuration and inputs.
pub struct Volumes {
    /// This node.
    pub node: NodeId,
    /// Directory of all volumes.
    pub directory: PathBuf,
    /// Input: a client of the API servers with the node's certificate.
    pub client: Value<Client>,
}

/// Maintains the directories of the volumes of this node.
pub async fn run(ctx: Context, volumes: Arc<Volumes>) -> Outcome {
    let directory = volumes.directory.clone();
    let disk = Arc::new(spawn_blocking(move || Disk::open(&directory)).await??);
    if let Some(why) = disk.without_quotas() {
        tracing::warn!("volumes on this node have no quotas: {why}");
    }
    tokio::select! {
        outcome = keep_all(&ctx, &volumes, &disk) => outcome,
        outcome = sweep(&disk) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Deletes the content of removed volumes, concurrently with everything else, because it may take
/// long. Returns only on an error; the blocking task stops when this is dropped.
async fn sweep(disk: &Arc<Disk>) -> Outcome {
    let over = CancellationToken::new();
    let _over = over.clone().drop_guard();
    loop {
        let (on, over) = (disk.clone(), over.clone());
        let swept = spawn_blocking(move || on.sweep(&|| over.is_cancelled())).await?;
        if let Err(error) = &swept {
            let why = hearth_api::chain(error);
            tracing::warn!("cannot delete the content of removed volumes: {why}");
        }
        tokio::select! {
            () = disk.removed() => {}
            () = sleep(RETRY_DELAY), if swept.is_err() => {}
        }
    }
}

/// Restarts with each new client. Returns only on an error.
async fn keep_all(ctx: &Context, volumes: &Volumes, disk: &Arc<Disk>) -> Outcome {
    let watching = Watching::of(ctx);
    let mut clients = volumes.client.watch();
    let mut client = clients.next().await?;
    loop {
        client = tokio::select! {
            outcome = follow(client, volumes, disk, &watching) => return outcome,
            newer = clients.next() => newer?,
        };
    }
}

/// Watches the volumes of this node. Returns only on an error.
async fn follow(
    client: Client,
    volumes: &Volumes,
    disk: &Arc<Disk>,
    watching: &Watching<'_>,
) -> Outcome {
    let objects = client.all(kinds::VOLUMES);
    let own = format!("{NODE_LABEL}={}", volumes.node);
    let own = Which::Labelled(own);
    let events = watch(objects.clone(), own, Some::<Volume>, Full::default());
    tokio::pin!(events);
    // Volumes to retry by name, in their latest state.
    let mut undone = BTreeMap::new();
    let mut again = tokio::time::interval(RETRY_DELAY);
    // No burst of ticks after a time without retries.
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = again.tick(), if !undone.is_empty() => {
                for volume in std::mem::take(&mut undone).into_values() {
                    keep(&objects, volumes, disk, volume, &mut undone).await;
                }
                continue;
            }
        };
        match event {
            None => return Err(Failure::msg("the watch ended")),
            Some(Err(error)) => watching.failed("volumes", &error),
            Some(Ok(Event::All(all))) => {
                undone.clear();
                let all = all.into_objects();
                log_orphaned(disk, all.values()).await;
                for volume in all.into_values() {
                    keep(&objects, volumes, disk, volume, &mut undone).await;
                }
                watching.good();
            }
            Some(Ok(Event::Gone((_, name)))) => drop(undone.remove(&name)),
            Some(Ok(Event::Changed((_, name), volume))) => {
                undone.remove(&name);
                keep(&objects, volumes, disk, volume, &mut undone).await;
            }
        }
    }
}

async fn keep(
    objects: &Objects,
    volumes: &Volumes,
    disk: &Arc<Disk>,
    volume: Volume,
    undone: &mut BTreeMap<String, Volume>,
) {
    if let Err(error) = attempt(objects, volumes, disk, &volume).await {
        let (name, why) = (&volume.metadata.name, hearth_api::chain(&error));
        match error {
            // The permission is granted when the volume is deleted, and may come later.
            VolumeError::Release(error) if error.is(StatusCode::FORBIDDEN) => {
                tracing::debug!("volume {name}: {why}");
            }
            _ => tracing::warn!("volume {name}: {why}"),
        }
        undone.insert(name.clone(), volume);
    }
}

/// Why a step for a volume has failed.
#[derive(Debug, thiserror::Error)]
enum VolumeError {
    #[error("not a volume of Hearth")]
    Foreign,
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error("task failed")]
    Dropped(#[source] JoinError),
    #[error("cannot remove the finalizer")]
    Release(#[source] ApiError),
}

async fn attempt(
    objects: &Objects,
    volumes: &Volumes,
    disk: &Arc<Disk>,
    volume: &Volume,
) -> Result<(), VolumeError> {
    let object = &volume.metadata.name;
    let name = VolumeName::parse(object).ok_or(VolumeError::Foreign)?;
    if !is_ours(volume, &volumes.directory, &name) {
        return Err(VolumeError::Foreign);
    }
    let on = disk.clone();
    let (patch, keep) = match desired_state(volume).ok_or(VolumeError::Foreign)? {
        DesiredState::Wait => return Ok(()),
        DesiredState::Have(size) => {
            let made = spawn_blocking(move || on.ensure(&name, size));
            if made.await.map_err(VolumeError::Dropped)?? {
                tracing::info!(volume = object, bytes = size, "created volume");
            }
            return Ok(());
        }
        DesiredState::End { patch, keep } => (patch, keep),
    };
    if !keep {
        let removed = spawn_blocking(move || on.remove(&name));
        removed.await.map_err(VolumeError::Dropped)??;
    }
    match objects.merge(object, &patch).await {
        Ok(()) if keep => tracing::info!(volume = object, "released volume; directory is kept"),
        Ok(()) => tracing::info!(volume = object, "removed volume"),
        // The object does not exist any more, or has changed: the watch will report it.
        Err(error) if error.is(StatusCode::NOT_FOUND) || error.is(StatusCode::CONFLICT) => {}
        Err(error) => return Err(VolumeError::Release(error)),
    }
    Ok(())
}

/// Whether the object is Hearth's and its path is the directory of its name.
fn is_ours(volume: &Volume, directory: &Path, name: &VolumeName) -> bool {
    let path = directory.join(name.as_str());
    let by = volume.metadata.annotations.get(PROVISIONED_BY);
    let local = volume.spec.local.as_ref();
    by.is_some_and(|by| by == PROVISIONER)
        && local.is_some_and(|local| Path::new(&local.path) == path)
}

fn size(volume: &Volume) -> Option<u64> {
    plan::bytes(volume.spec.capacity.get("storage")?)
}

/// Logs the directories that do not belong to a volume.
async fn log_orphaned(disk: &Arc<Disk>, volumes: impl Iterator<Item = &Volume>) {
    let on = disk.clone();
    let Ok(Ok(there)) = spawn_blocking(move || on.list()).await else {
        return;
    };
    let known = volumes.map(|volume| volume.metadata.name.as_str());
    let known: BTreeSet<&str> = known.collect();
    for name in there.iter().map(VolumeName::as_str) {
        if known.contains(name) {
            continue;
        }
        tracing::warn!("volume directory {name} does not belong to any volume; keeping it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b2f8c4e-3f0a-4a7e-9d55-0123456789ab";

    #[test]
    fn a_name_is_a_claims_and_no_path() {
        let name = VolumeName::of_claim(UID).unwrap();
        assert_eq!(name.as_str(), format!("pvc-{UID}"));
        for wrong in [
            "",
            "pvc-",
            "pvc-..",
            "pvc-../../etc",
            "../pvc-0b2f8c4e-3f0a-4a7e-9d55-0123456789ab",
            "pvc-0B2F8C4E-3f0a-4a7e-9d55-0123456789ab",
            "pvc-0b2f8c4e3f0a4a7e9d550123456789ab",
            "pvc-{0b2f8c4e-3f0a-4a7e-9d55-0123456789ab}",
            "pvc-0b2f8c4e-3f0a-4a7e-9d55-0123456789ab/",
        ] {
            assert_eq!(VolumeName::parse(wrong), None, "{wrong}");
        }
    }

    fn object() -> Volume {
        let planned = Planned {
            name: VolumeName::of_claim(UID).unwrap(),
            size: 1 << 30,
            node: format!("hearth-{}", "a".repeat(32)).parse().unwrap(),
            claim: ("default".into(), "data".into(), UID.into()),
            path: Path::new("/volumes").join(format!("pvc-{UID}")),
        };
        serde_json::from_value(planned.body()).unwrap()
    }

    #[test]
    fn the_node_knows_the_object_that_the_controller_made() {
        let mut volume = object();
        let name = VolumeName::parse(&volume.metadata.name).unwrap();
        assert!(is_ours(&volume, Path::new("/volumes"), &name));
        assert_eq!(size(&volume), Some(1 << 30));
        assert!(!is_ours(&volume, Path::new("/elsewhere"), &name));
        volume.metadata.annotations.clear();
        assert!(!is_ours(&volume, Path::new("/volumes"), &name));
    }

    #[test]
    fn nothing_is_removed_that_is_in_use_or_to_be_kept() {
        let mut volume = object();
        assert_eq!(desired_state(&volume), Some(DesiredState::Have(1 << 30)));
        // Deleted by hand, while a pod writes to it.
        volume.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
        volume.metadata.finalizers.push(IN_USE.into());
        volume.status.phase = "Bound".into();
        assert_eq!(desired_state(&volume), Some(DesiredState::Wait));
        // Before Kubernetes has removed its finalizer, and after.
        volume.status.phase = "Released".into();
        assert_eq!(desired_state(&volume), Some(DesiredState::Wait));
        volume.metadata.finalizers.pop();
        let patch = release(&volume).unwrap();
        let end = |keep| {
            let patch = patch.clone();
            Some(DesiredState::End { patch, keep })
        };
        assert_eq!(desired_state(&volume), end(false));
        for kept in ["Retain", "Recycle", ""] {
            volume.spec.persistent_volume_reclaim_policy = kept.into();
            assert_eq!(desired_state(&volume), end(true));
        }
        volume.metadata.finalizers.clear();
        assert_eq!(desired_state(&volume), Some(DesiredState::Wait));
    }

    #[test]
    fn only_our_finalizer_is_taken_away() {
        let mut volume = object();
        let metadata = &mut volume.metadata;
        metadata.finalizers.push(IN_USE.into());
        metadata.resource_version = "7".into();
        let patch = release(&volume).unwrap();
        let metadata = &patch["metadata"];
        assert_eq!(
            metadata["finalizers"],
            json!(["kubernetes.io/pv-protection"])
        );
        assert_eq!(metadata["resourceVersion"], "7");
        volume.metadata.finalizers.clear();
        assert_eq!(release(&volume), None);
    }
}
