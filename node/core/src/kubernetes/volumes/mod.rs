//! Local volumes: a directory on the data partition of the node where the pod
//! runs, with a quota of the claim's size.
//!
//! | part | runs on | does |
//! |---|---|---|
//! | [`plan`] | controllers, by the reconciler | makes the object of a volume for a claim whose node is chosen, and removes that of a claim that is gone |
//! | [`disk`] | the volume's node | the directory and its quota |
//! | this module | the volume's node | has a directory for each object, and removes it with the object |
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
//! for an object that is being deleted; one without an object is left, and
//! named in the log: the API servers may have been restored from a backup.

pub mod disk;
pub mod plan;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use hearth_api::identity::NodeId;
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Outcome};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, ResourceExt as _};
use serde_json::{Value as Json, json};

use super::access::{Pauses, Watching};
use disk::{Disk, DiskError};

/// The class of claims that are served.
pub const CLASS: &str = "local";
/// Who serves them.
pub const PROVISIONER: &str = "hearth.dev/local";
/// Label of a volume's object: its node.
pub const NODE_LABEL: &str = "hearth.dev/node";
/// Holds a volume's object until its directory is gone.
pub const FINALIZER: &str = "hearth.dev/volume";
/// Annotation by which Kubernetes knows that the volume's end is ours, too.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// What failed on the disk is tried again after so long: a full disk, mostly.
const AGAIN: Duration = Duration::from_secs(10);
/// For a request to an API server.
const REQUEST: Duration = Duration::from_secs(30);

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
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": self.name.as_str(),
                "labels": { NODE_LABEL: node, "app.kubernetes.io/managed-by": "hearth" },
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
pub fn release(volume: &PersistentVolume) -> Option<Json> {
    let all = volume.finalizers();
    if !all.iter().any(|name| name == FINALIZER) {
        return None;
    }
    let others: Vec<_> = all.iter().filter(|name| *name != FINALIZER).collect();
    Some(json!({ "metadata": {
        "finalizers": others,
        "resourceVersion": volume.resource_version(),
    }}))
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
    let watching = Watching::of(&ctx);
    let directory = volumes.directory.clone();
    let opened = tokio::task::spawn_blocking(move || Disk::open(&directory)).await?;
    let disk = Arc::new(opened?);
    if let Some(why) = disk.without_quotas() {
        tracing::warn!("volumes have no limits on this node: {why}");
    }
    let mut clients = volumes.client.watch();
    let mut client = tokio::select! {
        client = clients.next() => client?,
        () = ctx.cancelled() => return Ok(()),
    };
    loop {
        client = tokio::select! {
            outcome = follow(client, &volumes, &disk, &watching) => return outcome,
            newer = clients.next() => newer?,
            () = ctx.cancelled() => return Ok(()),
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
    let api = Api::<PersistentVolume>::all(client);
    let own = watcher::Config::default().labels(&format!("{NODE_LABEL}={}", volumes.node));
    let events = watcher(api.clone(), own).backoff(Pauses);
    tokio::pin!(events);
    let mut listed = BTreeSet::new();
    // What could not be done, newest state by name.
    let mut undone = std::collections::BTreeMap::<String, PersistentVolume>::new();
    let mut again = tokio::time::interval(AGAIN);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = again.tick(), if !undone.is_empty() => {
                for (name, volume) in std::mem::take(&mut undone) {
                    keep(&api, volumes, disk, name, volume, &mut undone).await;
                }
                continue;
            }
        };
        match event {
            None => return Err(Failure::msg("the watch ended")),
            Some(Err(error)) => watching.failed("volumes", &error),
            Some(Ok(Event::Init)) => listed.clear(),
            Some(Ok(Event::InitDone)) => {
                name_strangers(disk, &listed).await;
                watching.good();
            }
            Some(Ok(Event::Delete(volume))) => drop(undone.remove(&volume.name_any())),
            Some(Ok(Event::InitApply(volume) | Event::Apply(volume))) => {
                let name = volume.name_any();
                listed.insert(name.clone());
                undone.remove(&name);
                keep(&api, volumes, disk, name, volume, &mut undone).await;
            }
        }
    }
}

async fn keep(
    api: &Api<PersistentVolume>,
    volumes: &Volumes,
    disk: &Arc<Disk>,
    name: String,
    volume: PersistentVolume,
    undone: &mut std::collections::BTreeMap<String, PersistentVolume>,
) {
    if let Err(error) = attempt(api, volumes, disk, &volume).await {
        let error = hearth_api::chain(&error);
        tracing::warn!("volume {name}: {error}");
        undone.insert(name, volume);
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
    Dropped(#[source] tokio::task::JoinError),
    #[error("let its object go")]
    Release(#[source] Box<kube::Error>),
    #[error("let its object go: the API server does not answer")]
    Silent,
}

async fn attempt(
    api: &Api<PersistentVolume>,
    volumes: &Volumes,
    disk: &Arc<Disk>,
    volume: &PersistentVolume,
) -> Result<(), VolumeError> {
    let name = VolumeName::parse(&volume.name_any()).ok_or(VolumeError::Foreign)?;
    if !is_ours(volume, &volumes.directory, &name) {
        return Err(VolumeError::Foreign);
    }
    let on = disk.clone();
    if volume.metadata.deletion_timestamp.is_none() {
        let size = size(volume).ok_or(VolumeError::Foreign)?;
        let made = tokio::task::spawn_blocking(move || on.ensure(&name, size));
        if made.await.map_err(VolumeError::Dropped)?? {
            tracing::info!(volume = volume.name_any(), bytes = size, "a volume is made");
        }
        return Ok(());
    }
    let Some(patch) = release(volume) else {
        return Ok(());
    };
    let removed = tokio::task::spawn_blocking(move || on.remove(&name));
    removed.await.map_err(VolumeError::Dropped)??;
    let object = volume.name_any();
    let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
    let released = api.patch(&object, &params, &patch);
    match tokio::time::timeout(REQUEST, released).await {
        Ok(Ok(_)) => tracing::info!(volume = object, "a volume is removed"),
        // Somebody else was quicker, or changes it: the watch tells.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {}
        Ok(Err(error)) => return Err(VolumeError::Release(Box::new(error))),
        Err(_) => return Err(VolumeError::Silent),
    }
    Ok(())
}

/// Made by us, for the directory of its name.
fn is_ours(volume: &PersistentVolume, directory: &Path, name: &VolumeName) -> bool {
    let local = volume.spec.as_ref().and_then(|spec| spec.local.as_ref());
    let path = directory.join(name.as_str());
    volume.annotations().get(PROVISIONED_BY).map(String::as_str) == Some(PROVISIONER)
        && local.is_some_and(|local| Path::new(&local.path) == path)
}

fn size(volume: &PersistentVolume) -> Option<u64> {
    let capacity = volume.spec.as_ref()?.capacity.as_ref()?;
    plan::bytes(&capacity.get("storage")?.0)
}

/// Says which directories belong to nothing.
async fn name_strangers(disk: &Arc<Disk>, listed: &BTreeSet<String>) {
    let on = disk.clone();
    let Ok(Ok(there)) = tokio::task::spawn_blocking(move || on.list()).await else {
        return;
    };
    for name in there.iter().filter(|name| !listed.contains(name.as_str())) {
        let name = name.as_str();
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

    fn object() -> PersistentVolume {
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
        let name = VolumeName::parse(&volume.name_any()).unwrap();
        assert!(is_ours(&volume, Path::new("/volumes"), &name));
        assert_eq!(size(&volume), Some(1 << 30));
        assert!(!is_ours(&volume, Path::new("/elsewhere"), &name));
        volume.metadata.annotations = None;
        assert!(!is_ours(&volume, Path::new("/volumes"), &name));
    }

    #[test]
    fn only_our_finalizer_is_taken_away() {
        let mut volume = object();
        let finalizers = volume.metadata.finalizers.as_mut().unwrap();
        finalizers.push("kubernetes.io/pv-protection".into());
        volume.metadata.resource_version = Some("7".into());
        let patch = release(&volume).unwrap();
        let metadata = &patch["metadata"];
        assert_eq!(
            metadata["finalizers"],
            json!(["kubernetes.io/pv-protection"])
        );
        assert_eq!(metadata["resourceVersion"], "7");
        volume.metadata.finalizers = None;
        assert_eq!(release(&volume), None);
    }
}
