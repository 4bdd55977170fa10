//! Which volumes to create and to delete: pure functions of claims and volumes.
//!
//! A volume is created for a claim once the scheduler has selected a node for its pod, in an
//! annotation of the claim. If a claim is refused, an event of the claim has the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hearth_api::identity::NodeId;
use hearth_kubernetes_api::fields::{Claim, Volume};
use serde_json::{Value as Json, json};

use super::{
    CLASS, NODE_LABEL, PROVISIONED_BY, PROVISIONER, Planned, VolumeName, is_released, release,
};

/// Annotation of a claim: the node that was selected for its pod.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// Minimum size; smaller requests are rounded up.
const MIN_BYTES: u64 = 1 << 20;
/// Maximum size: larger than any disk, and within the range of a quota.
const MAX_BYTES: u64 = 1 << 60;

/// The changes that are needed.
#[derive(Debug, Default, PartialEq)]
pub struct Work {
    /// Volumes to create.
    pub create: Vec<Planned>,
    /// Names of volumes to delete: their claims have been deleted.
    pub remove: Vec<String>,
    /// Merge patches that remove our finalizer from volumes whose nodes have left the cluster, by
    /// name.
    pub abandon: Vec<(String, Json)>,
    /// Names of volumes that are being deleted, by the node that has to release them.
    pub going: Going,
    /// Claims with a selected node that is not a worker (any more), and merge patches that make the
    /// scheduler select another one, which it would not do by itself.
    pub choose_again: Vec<(Reference, Json)>,
    /// Claims that are refused.
    pub refuse: Vec<Refusal>,
}

/// Namespace, name and UID of a claim.
pub type Reference = (String, String, String);

/// Names of volumes, by their node.
pub type Going = BTreeMap<NodeId, BTreeSet<String>>;

/// A claim that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The claim.
    pub claim: Reference,
    /// The reason, for its author.
    pub why: String,
}

/// The nodes of the cluster.
#[derive(Clone, Debug)]
pub struct Nodes<'a> {
    /// All nodes.
    pub all: &'a BTreeSet<NodeId>,
    /// The nodes that run pods.
    pub workers: BTreeSet<NodeId>,
    /// Directory of all volumes on each node.
    pub directory: &'a Path,
}

/// Returns a claim that needs a volume: it has our class, a selected node and no volume. Users can
/// write anything into a claim; labels and annotations that are not read are dropped.
pub fn waiting(mut claim: Claim) -> Option<Claim> {
    let metadata = &mut claim.metadata;
    metadata.labels.clear();
    metadata.annotations.retain(|key, _| key == SELECTED_NODE);
    let waits = metadata.deletion_timestamp.is_none()
        && !metadata.annotations.is_empty()
        && claim.spec.storage_class_name.as_deref() == Some(CLASS)
        && claim.spec.volume_name.is_empty();
    waits.then_some(claim)
}

/// Computes the changes. The claims are those that are [`waiting`].
pub fn plan<'a>(
    claims: impl Iterator<Item = &'a Claim>,
    volumes: impl Iterator<Item = &'a Volume>,
    nodes: &Nodes<'_>,
) -> Work {
    let mut work = Work::default();
    let mut there = BTreeSet::new();
    for volume in volumes {
        let metadata = &volume.metadata;
        there.insert(metadata.name.as_str());
        let by = metadata.annotations.get(PROVISIONED_BY);
        if by.map(String::as_str) != Some(PROVISIONER) {
            continue;
        }
        if metadata.deletion_timestamp.is_some() {
            let node = metadata.labels.get(NODE_LABEL);
            let node = node.and_then(|node| node.parse::<NodeId>().ok());
            let Some(patch) = release(volume) else {
                continue;
            };
            match node.filter(|node| nodes.all.contains(node)) {
                Some(_) if !is_released(volume) => {}
                Some(node) => {
                    let going = work.going.entry(node).or_default();
                    going.insert(metadata.name.clone());
                }
                None => work.abandon.push((metadata.name.clone(), patch)),
            }
        } else if is_over(volume) {
            work.remove.push(metadata.name.clone());
        }
    }
    for claim in claims {
        match serve(claim, nodes) {
            Ok(planned) if there.contains(planned.name.as_str()) => {}
            Ok(planned) if nodes.workers.contains(&planned.node) => work.create.push(planned),
            Ok(planned) => work.choose_again.push((planned.claim, choose_again(claim))),
            Err(why) => work.refuse.push(Refusal {
                claim: reference(claim),
                why,
            }),
        }
    }
    work
}

/// Whether the claim of a volume has been deleted, and the volume does not have to be kept.
fn is_over(volume: &Volume) -> bool {
    volume.spec.persistent_volume_reclaim_policy == "Delete"
        && matches!(volume.status.phase.as_str(), "Released" | "Failed")
}

fn choose_again(claim: &Claim) -> Json {
    json!({ "metadata": {
        "annotations": { SELECTED_NODE: null },
        "resourceVersion": claim.metadata.resource_version,
    }})
}

fn reference(claim: &Claim) -> Reference {
    let metadata = claim.metadata.clone();
    (metadata.namespace, metadata.name, metadata.uid)
}

/// The volume for a claim, on whatever node was selected; an error if the claim is refused.
fn serve(claim: &Claim, nodes: &Nodes<'_>) -> Result<Planned, String> {
    let node = claim.metadata.annotations.get(SELECTED_NODE);
    let node = node.and_then(|node| node.parse().ok());
    let node = node.ok_or("the selected node is not a node of the Hearth cluster")?;
    let spec = &claim.spec;
    if spec.volume_mode.as_deref().unwrap_or("Filesystem") != "Filesystem" {
        return Err(format!(
            "volumeMode: expected Filesystem; storage class {CLASS} does not support block volumes"
        ));
    }
    if let Some(mode) = spec.access_modes.iter().find(|mode| !is_of_one_node(mode)) {
        return Err(format!(
            "storage class {CLASS} does not support accessMode {mode}"
        ));
    }
    if spec.data_source.is_some() || spec.selector.is_some() {
        return Err(format!(
            "storage class {CLASS} supports neither dataSource nor selector"
        ));
    }
    let request = spec.resources.requests.get("storage");
    let request = request.ok_or("resources.requests.storage is required")?;
    let size = bytes(request).filter(|size| *size <= MAX_BYTES);
    let size = size.ok_or_else(|| {
        format!("resources.requests.storage: expected a size of at most 1Ei, got {request:?}")
    })?;
    let claim = reference(claim);
    let name = VolumeName::of_claim(&claim.2).ok_or("the claim has no UID")?;
    Ok(Planned {
        path: nodes.directory.join(name.as_str()),
        name,
        // The capacity in the object is the quota: a multiple of the block size.
        size: size.max(MIN_BYTES).next_multiple_of(4096),
        node,
        claim,
    })
}

fn is_of_one_node(mode: &str) -> bool {
    matches!(mode, "ReadWriteOnce" | "ReadWriteOncePod")
}

/// Parses a Kubernetes quantity, such as `10Gi`, `1.5G`, `2e9` or `1000`, as bytes, rounded up.
/// `None` if it is invalid, negative or too large.
pub fn bytes(quantity: &str) -> Option<u64> {
    let end = quantity.find(|c: char| !(c.is_ascii_digit() || c == '.'));
    let (number, suffix) = quantity.split_at(end.unwrap_or(quantity.len()));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || whole.len() + fraction.len() > 24 {
        return None;
    }
    let digits = format!("{whole}{fraction}");
    let digits: u128 = digits.parse().ok()?;
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let (times, over) = factor(suffix)?;
    let bytes = digits
        .checked_mul(times)?
        .div_ceil(scale.checked_mul(over)?);
    u64::try_from(bytes).ok()
}

/// The factor of a suffix, as a fraction.
fn factor(suffix: &str) -> Option<(u128, u128)> {
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    const DECIMAL: [&str; 6] = ["k", "M", "G", "T", "P", "E"];
    if suffix.is_empty() {
        return Some((1, 1));
    }
    let place = |of: [&str; 6]| of.iter().position(|name| *name == suffix);
    if let Some(at) = place(BINARY) {
        return Some((1 << (10 * (at + 1)), 1));
    }
    if let Some(at) = place(DECIMAL) {
        let power = u32::try_from(3 * (at + 1)).ok()?;
        return Some((10_u128.pow(power), 1));
    }
    match suffix {
        "m" => return Some((1, 1000)),
        "u" => return Some((1, 1_000_000)),
        "n" => return Some((1, 1_000_000_000)),
        _ => {}
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    let exponent: i32 = exponent.parse().ok()?;
    let power = 10_u128.checked_pow(exponent.unsigned_abs())?;
    Some(if exponent < 0 { (1, power) } else { (power, 1) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "0b2f8c4e-3f0a-4a7e-9d55-0123456789ab";

    fn id(digit: char) -> NodeId {
        let digits = String::from(digit).repeat(32);
        format!("hearth-{digits}").parse().unwrap()
    }

    fn claim(change: impl FnOnce(&mut Json)) -> Claim {
        let mut claim = json!({
            "metadata": {
                "namespace": "default", "name": "data", "uid": UID,
            },
            "spec": {
                "storageClassName": CLASS,
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        claim["metadata"]["annotations"] = json!({ SELECTED_NODE: id('a').to_string() });
        change(&mut claim);
        serde_json::from_value(claim).unwrap()
    }

    /// Of three nodes, one has left the cluster, and one is not a worker.
    fn work(claims: &[Claim], volumes: &[Volume]) -> Work {
        let nodes = Nodes {
            all: &BTreeSet::from([id('a'), id('c')]),
            workers: BTreeSet::from([id('a')]),
            directory: Path::new("/volumes"),
        };
        let waiting: Vec<_> = claims.iter().cloned().filter_map(waiting).collect();
        plan(waiting.iter(), volumes.iter(), &nodes)
    }

    fn made() -> Json {
        let [planned] = &work(&[claim(|_| {})], &[]).create[..] else {
            panic!("expected one volume");
        };
        planned.body()
    }

    fn read(volume: Json) -> Volume {
        serde_json::from_value(volume).unwrap()
    }

    #[test]
    fn a_claim_gets_one_volume_where_its_pod_is_to_run() {
        let volume = made();
        let path = format!("/volumes/pvc-{UID}");
        assert_eq!(volume["spec"]["local"]["path"], path);
        assert_eq!(volume["spec"]["claimRef"]["uid"], UID);
        assert_eq!(work(&[claim(|_| {})], &[read(volume)]), Work::default());
    }

    #[test]
    fn claims_of_others_and_those_that_wait_are_left_alone() {
        for other in [
            claim(|claim| claim["spec"]["storageClassName"] = json!("else")),
            claim(|claim| claim["spec"]["storageClassName"] = Json::Null),
            claim(|claim| claim["spec"]["volumeName"] = json!("pv")),
            claim(|claim| claim["metadata"]["annotations"] = json!({})),
            claim(|claim| {
                claim["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }),
        ] {
            assert_eq!(work(&[other], &[]), Work::default());
        }
    }

    #[test]
    fn who_runs_no_pods_gets_no_volumes_and_another_node_is_chosen() {
        for other in ['b', 'c'] {
            let claim = claim(|claim| {
                claim["metadata"]["resourceVersion"] = json!("7");
                claim["metadata"]["annotations"][SELECTED_NODE] = json!(id(other).to_string());
            });
            let mut volume = made();
            volume["metadata"]["labels"][NODE_LABEL] = json!(id(other).to_string());
            let work_of = work(std::slice::from_ref(&claim), &[]);
            let [(reference, patch)] = &work_of.choose_again[..] else {
                panic!("{work_of:?}");
            };
            assert_eq!(reference.1, "data");
            assert_eq!(
                patch["metadata"]["annotations"],
                json!({ SELECTED_NODE: null })
            );
            assert_eq!(patch["metadata"]["resourceVersion"], "7");
            assert_eq!((work_of.create, work_of.refuse), (vec![], vec![]));
            // It is about to be bound to a volume that was created before.
            assert_eq!(work(&[claim], &[read(volume)]), Work::default());
        }
    }

    #[test]
    fn of_a_claim_is_kept_what_is_read() {
        let kept = waiting(claim(|claim| {
            claim["metadata"]["annotations"]["long"] = json!("x".repeat(1000));
            claim["metadata"]["labels"] = json!({ "app": "web" });
        }));
        assert_eq!(kept, waiting(claim(|_| {})));
        let bound = claim(|claim| claim["spec"]["volumeName"] = json!("pv"));
        assert_eq!(waiting(bound), None);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        let storage = |claim: &mut Json, size: &str| {
            claim["spec"]["resources"]["requests"]["storage"] = json!(size);
        };
        for (claim, words) in [
            (
                claim(|claim| claim["spec"]["volumeMode"] = json!("Block")),
                "block",
            ),
            (
                claim(|claim| claim["spec"]["accessModes"] = json!(["ReadWriteMany"])),
                "ReadWriteMany",
            ),
            (claim(|claim| storage(claim, "8Ei")), "8Ei"),
            (claim(|claim| storage(claim, "-1")), "-1"),
            (
                claim(|claim| claim["spec"]["resources"] = json!({})),
                "is required",
            ),
            (
                claim(|claim| claim["metadata"]["annotations"][SELECTED_NODE] = json!("../x")),
                "not a node of the Hearth cluster",
            ),
        ] {
            let work = work(&[claim], &[]);
            assert!(work.create.is_empty());
            assert!(work.refuse[0].why.contains(words), "{:?}", work.refuse);
        }
    }

    #[test]
    fn volumes_go_with_their_claims_and_those_of_lost_nodes_are_let_go() {
        let with = |change: &dyn Fn(&mut Json)| -> Volume {
            let mut volume = made();
            change(&mut volume);
            read(volume)
        };
        let name = read(made()).metadata.name;
        let released = |volume: &mut Json| volume["status"]["phase"] = json!("Released");
        assert_eq!(
            work(&[], &[with(&released)]).remove,
            std::slice::from_ref(&name)
        );
        assert!(
            work(&[], &[with(&|_| {})]).remove.is_empty(),
            "it may be bound yet"
        );
        let kept = with(&|volume| {
            released(volume);
            volume["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
        });
        assert_eq!(work(&[], &[kept]), Work::default());
        let foreign = with(&|volume| {
            released(volume);
            volume["metadata"]["annotations"] = json!({});
        });
        assert_eq!(work(&[], &[foreign]), Work::default());

        let going = |volume: &mut Json| {
            volume["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        };
        // Its node removes the directory.
        let its = Work {
            going: BTreeMap::from([(id('a'), BTreeSet::from([name.clone()]))]),
            ..Work::default()
        };
        assert_eq!(work(&[], &[with(&going)]), its);
        let used = with(&|volume| {
            going(volume);
            volume["status"]["phase"] = json!("Bound");
        });
        assert_eq!(work(&[], &[used]), Work::default());
        let let_go = with(&|volume| {
            going(volume);
            volume["metadata"]["finalizers"] = json!(["kubernetes.io/pv-protection"]);
        });
        assert_eq!(work(&[], &[let_go]), Work::default());
        let lost = with(&|volume| {
            going(volume);
            volume["metadata"]["labels"][NODE_LABEL] = json!(id('b').to_string());
        });
        assert_eq!(work(&[], &[lost]).abandon[0].0, name);
    }

    #[test]
    fn quantities_are_bytes() {
        for (text, wanted) in [
            ("0", 0),
            ("1000", 1000),
            ("1Ki", 1024),
            ("10Gi", 10 << 30),
            ("1.5Gi", 3 << 29),
            ("1.5k", 1500),
            (".5M", 500_000),
            ("2e3", 2000),
            ("1E", 1_000_000_000_000_000_000),
            ("1E2", 100),
            ("1500m", 2),
            ("5e-1", 1),
        ] {
            assert_eq!(bytes(text), Some(wanted), "{text}");
        }
        for text in [
            "", "Gi", "-1", "+1", "1 Gi", "1gi", "1.2.3", "1e", "16Ei", "1e99", ".",
        ] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "\\PC{0,40}|[0-9.]{0,30}[eEkKMGTPmun]i?-?[0-9]{0,10}") {
            let _ = bytes(&text);
        }

        #[test]
        fn plain_numbers_are_themselves(number: u64) {
            prop_assert_eq!(bytes(&number.to_string()), Some(number));
        }
    }
}
