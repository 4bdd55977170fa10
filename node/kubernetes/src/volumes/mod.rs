//! Local volumes: a directory on the data partition of the node where the pod
//! runs, with a quota of the claim's size.
//!
//! | part | runs on | does |
//! |---|---|---|
//! | [`plan`] | controllers, by the reconciler | makes the object of a volume for a claim whose node is chosen, and removes that of a claim that is gone |
//! | [`disk`] | the volume's node | the directory and its quota |
//! | this module | the volume's node | has a directory for each object, and removes it with the object; what was in it goes after that |
//!
//! The two sides meet in the object alone. It bears [`FINALIZER`] from its
//! beginning, so it cannot vanish before its node has removed the directory;
//! and its name, which is made of the claim's UID, is the directory's name. So
//! nothing has to be remembered beside what Kubernetes and the disk hold, and
//! each step can be repeated.
//!
//! Why objects are not made by the nodes: whoever may make volumes can make one
//! of any directory of any node. A node may only read them, and take away the
//! finalizer.
//!
//! Invariants: a directory is where it is by the volume's name, which is
//! checked, never by a path that came from outside. A directory is only removed
//! for an object that is being deleted, that no claim is bound to any more, and
//! of which nobody has said that its data are to be kept
//! (`persistentVolumeReclaimPolicy: Retain`). One without an object is left, and
//! named in the log: it was kept, or the API servers have been restored from a
//! backup.

pub mod disk;
pub mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use hearth_api::identity::NodeId;
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_kubernetes_api::fields::Volume;
use hearth_kubernetes_api::watch::{Event, Which, watch};
use hearth_kubernetes_api::{ApiError, Client, MANAGER, Objects, kinds};
use http::StatusCode;
use serde_json::{Value as Json, json};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{MissedTickBehavior, sleep};
use tokio_util::sync::CancellationToken;

use hearth_kubernetes_api::Watching;

use disk::{Disk, DiskError};

/// The class of claims that are served.
pub const CLASS: &str = "local";
/// Who serves them.
pub const PROVISIONER: &str = "hearth.dev/local";
/// Label of a volume's object: its node.
pub const NODE_LABEL: &str = "hearth.dev/node";
/// Holds a volume's object until its directory has lost its name.
pub const FINALIZER: &str = "hearth.dev/volume";
/// Kubernetes' own finalizer of a volume, for as long as a claim is bound to it.
const IN_USE: &str = "kubernetes.io/pv-protection";
/// Annotation by which Kubernetes knows that the volume's end is ours, too.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// What failed on the disk is tried again after so long: a full disk, mostly.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// The name of a volume, and of its directory: `pvc-` and a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeName(String);

impl VolumeName {
    /// Of the claim with this UID; `None` if it is none.
    pub fn of_claim(uid: &str) -> Option<Self> {
        Self::parse(&format!("pvc-{uid}"))
    }

    /// A name that came from elsewhere.
    pub fn parse(name: &str) -> Option<Self> {
        let uid = name.strip_prefix("pvc-")?;
        let parsed = uuid::Uuid::try_parse(uid).ok()?;
        // Only in the one form: there must be no two names for one directory.
        (parsed.hyphenated().to_string() == uid).then(|| Self(name.to_owned()))
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A volume that is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Of the object and the directory.
    pub name: VolumeName,
    /// In bytes.
    pub size: u64,
    /// Where.
    pub node: NodeId,
    /// Namespace, name and UID.
    pub claim: (String, String, String),
    /// On that node.
    pub path: PathBuf,
}

impl Planned {
    /// The object.
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

/// The patch that takes our finalizer from an object; nothing if it has none.
/// Fails at the API server if the object is not as it was seen.
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

/// Whether an object is being deleted and nothing of Kubernetes needs it. Who
/// deletes the object of a volume that is bound means the time after that, by
/// Kubernetes' rules.
pub fn is_let_go(volume: &Volume) -> bool {
    let metadata = &volume.metadata;
    metadata.deletion_timestamp.is_some()
        && !metadata.finalizers.iter().any(|name| name == IN_USE)
        && volume.status.phase != "Bound"
}

/// What its object asks of a volume's node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wish {
    /// A directory, limited to so many bytes.
    Have(u64),
    /// Nothing for now: it is in use, or others have to agree to its end.
    Wait,
    /// Let the object go, by this patch; first remove the directory, unless it
    /// is to be kept.
    End { patch: Json, keep: bool },
}

/// `None` if its size is no size.
fn wish(volume: &Volume) -> Option<Wish> {
    if volume.metadata.deletion_timestamp.is_none() {
        return size(volume).map(Wish::Have);
    }
    let patch = release(volume).filter(|_| is_let_go(volume));
    Some(match patch {
        None => Wish::Wait,
        Some(patch) => Wish::End {
            patch,
            keep: volume.spec.persistent_volume_reclaim_policy != "Delete",
        },
    })
}

/// What this node's volumes are made of.
pub struct Volumes {
    /// This node.
    pub node: NodeId,
    /// Where the directories are.
    pub directory: PathBuf,
    /// Will be read: speaks with API servers, as one of the nodes.
    pub client: Value<Client>,
}

/// Keeps a directory for each volume of this node.
pub async fn run(ctx: Context, volumes: Arc<Volumes>) -> Outcome {
    let directory = volumes.directory.clone();
    let disk = Arc::new(spawn_blocking(move || Disk::open(&directory)).await??);
    if let Some(why) = disk.without_quotas() {
        tracing::warn!("volumes have no limits on this node: {why}");
    }
    tokio::select! {
        outcome = keep_all(&ctx, &volumes, &disk) => outcome,
        outcome = sweep(&disk) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Empties what has been removed, beside everything else: it may be a lot. Ends
/// by an error only; what is at work for it stops when this is dropped.
async fn sweep(disk: &Arc<Disk>) -> Outcome {
    let over = CancellationToken::new();
    let _over = over.clone().drop_guard();
    loop {
        let (on, over) = (disk.clone(), over.clone());
        let swept = spawn_blocking(move || on.sweep(&|| over.is_cancelled())).await?;
        if let Err(error) = &swept {
            let why = hearth_api::chain(error);
            tracing::warn!("what is left of removed volumes: {why}");
        }
        tokio::select! {
            () = disk.removed() => {}
            () = sleep(RETRY_DELAY), if swept.is_err() => {}
        }
    }
}

/// With each newer client from the beginning. Ends by an error only.
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

/// Follows this node's volumes. Ends by an error only.
async fn follow(
    client: Client,
    volumes: &Volumes,
    disk: &Arc<Disk>,
    watching: &Watching<'_>,
) -> Outcome {
    let objects = client.all(kinds::VOLUMES);
    let own = format!("{NODE_LABEL}={}", volumes.node);
    let events = watch::<Volume>(objects.clone(), Which::Labelled(own));
    tokio::pin!(events);
    // What could not be done, newest state by name.
    let mut undone = BTreeMap::new();
    let mut again = tokio::time::interval(RETRY_DELAY);
    // Not once for each time that there was nothing to do.
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
                name_strangers(disk, &all).await;
                for volume in all {
                    keep(&objects, volumes, disk, volume, &mut undone).await;
                }
                watching.good();
            }
            Some(Ok(Event::Gone(volume))) => drop(undone.remove(&volume.metadata.name)),
            Some(Ok(Event::Changed(volume))) => {
                undone.remove(&volume.metadata.name);
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
            // The right to do it comes with the removal, and may come later.
            VolumeError::Release(error) if error.is(StatusCode::FORBIDDEN) => {
                tracing::debug!("volume {name}: {why}");
            }
            _ => tracing::warn!("volume {name}: {why}"),
        }
        undone.insert(name.clone(), volume);
    }
}

/// Why a volume is not as it should be.
#[derive(Debug, thiserror::Error)]
enum VolumeError {
    #[error("it is not one of ours")]
    Foreign,
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error("the work on the disk was dropped")]
    Dropped(#[source] JoinError),
    #[error("let its object go")]
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
    let (patch, keep) = match wish(volume).ok_or(VolumeError::Foreign)? {
        Wish::Wait => return Ok(()),
        Wish::Have(size) => {
            let made = spawn_blocking(move || on.ensure(&name, size));
            if made.await.map_err(VolumeError::Dropped)?? {
                tracing::info!(volume = object, bytes = size, "a volume is made");
            }
            return Ok(());
        }
        Wish::End { patch, keep } => (patch, keep),
    };
    if !keep {
        let removed = spawn_blocking(move || on.remove(&name));
        removed.await.map_err(VolumeError::Dropped)??;
    }
    match objects.merge(object, &patch).await {
        Ok(()) if keep => tracing::info!(volume = object, "a volume ends, its directory is kept"),
        Ok(()) => tracing::info!(volume = object, "a volume is removed"),
        // Somebody else was quicker, or changes it: the watch tells.
        Err(error) if error.is(StatusCode::NOT_FOUND) || error.is(StatusCode::CONFLICT) => {}
        Err(error) => return Err(VolumeError::Release(error)),
    }
    Ok(())
}

/// Made by us, for the directory of its name.
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

/// Says which directories belong to nothing.
async fn name_strangers(disk: &Arc<Disk>, volumes: &[Volume]) {
    let on = disk.clone();
    let Ok(Ok(there)) = spawn_blocking(move || on.list()).await else {
        return;
    };
    let known = volumes.iter().map(|volume| volume.metadata.name.as_str());
    let known: BTreeSet<&str> = known.collect();
    for name in there.iter().map(VolumeName::as_str) {
        if known.contains(name) {
            continue;
        }
        tracing::warn!("directory {name} of the volumes belongs to no volume: it is left as it is");
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
        assert_eq!(wish(&volume), Some(Wish::Have(1 << 30)));
        // By hand, while a pod writes to it.
        volume.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
        volume.metadata.finalizers.push(IN_USE.into());
        volume.status.phase = "Bound".into();
        assert_eq!(wish(&volume), Some(Wish::Wait));
        // Before Kubernetes has said that it agrees, and after.
        volume.status.phase = "Released".into();
        assert_eq!(wish(&volume), Some(Wish::Wait));
        volume.metadata.finalizers.pop();
        let patch = release(&volume).unwrap();
        let end = |keep| {
            let patch = patch.clone();
            Some(Wish::End { patch, keep })
        };
        assert_eq!(wish(&volume), end(false));
        for kept in ["Retain", "Recycle", ""] {
            volume.spec.persistent_volume_reclaim_policy = kept.into();
            assert_eq!(wish(&volume), end(true));
        }
        volume.metadata.finalizers.clear();
        assert_eq!(wish(&volume), Some(Wish::Wait));
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
