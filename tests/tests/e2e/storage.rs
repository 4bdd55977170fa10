//! The data partition: created, grown, encrypted, and not changed if the content of the disk is unexpected.

use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Context, ensure};
use hearth_api::identity::ClusterId;
use hearth_api::names::disk::ESP_STATE_FILES;
use hearth_api::ownership::Replacement;
use hearth_api::recovery::console::{BEGIN, ConsoleChallenge};
use hearth_api::v1::{
    self, NodeSetting, StorageSecurity, StorageSecurityPolicy, UpdateNodeSettingsRequest,
};
use hearth_lab::Owner;
use hearth_lab::record::Storage;
use hearth_operator::by_id;
use hearth_operator::unlock::{Keys, UnlockError};
use hearth_tests::node::{Node, Running, SECOND_DISK};
use hearth_tests::{Operator, Outcome, TestCtx, bounds, here, retry_unavailable};

/// The slots of the sealed configuration on the ESP.
pub(crate) const SEALED: [&str; 2] = [
    "hearth/sealed_configuration.0",
    "hearth/sealed_configuration.1",
];

/// Offset of the file system in the data partition.
const PAYLOAD: u64 = 1 << 20;

/// Boots it to HOME and powers it off; returns its ID.
async fn found(node: &Node) -> anyhow::Result<String> {
    let vm = node.power_on().await?;
    vm.home().await?;
    let listed = vm.owned().await?.one_healthy_node().await?;
    vm.power_off().await?;
    Ok(listed.id)
}

/// Replaces the owner of the cluster that this node has founded, and waits until the node has recorded the new one.
async fn replace_owner(vm: &Running, former: &Owner) -> anyhow::Result<Owner> {
    let operator = vm.owned().await?;
    let cluster = ClusterId::try_from(&operator.info().await?.cluster_id[..])?;
    let new = Owner {
        secret: former.secret.clone(),
        ..Owner::generate()
    };
    let keys = new.keys().context("no recovery key")?;
    let recipient = keys.recovery.recipient();
    let replacement = Replacement::sign(cluster, &former.key, &new.key, recipient);
    operator.once().replace_owner(replacement).await?;
    ensure!(
        operator.once().info().await.is_err(),
        "the former owner is admitted"
    );
    let operator = Operator::take_ownership(&new, vm.curator()?).await?;
    let recorded = |node: &v1::Node| {
        let settings = node
            .status
            .as_ref()
            .and_then(|status| status.recorded_settings.as_ref());
        settings.is_some_and(|settings| {
            settings.owner_public_key == new.key.public().as_bytes()
                && settings.recovery_recipient == recipient.as_bytes()
        })
    };
    operator.one_healthy_node_that(recorded).await?;
    Ok(new)
}

/// An encrypted node founds its cluster, and its owner is replaced. After a power cut no node can unlock it: it waits for
/// its owner, who needs both keys, the new ones.
#[tokio::test]
async fn an_encrypted_node_is_unlocked_by_its_owner_after_a_power_cut() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    node.tell(&node.owner.parameters(Storage::Encrypted.configuration()));
    let vm = node.power_on().await?;
    vm.home().await?;
    let listed = vm.owned().await?.one_healthy_node().await?;
    ensure!(listed.storage_security() == StorageSecurity::Encrypted);
    let former = node.owner.keys().context("no recovery key")?;
    node.owner = replace_owner(&vm, &node.owner).await?;
    vm.cut().await?;

    node.parameters = None;
    let vm = node.power_on().await?;
    vm.waiting().await?;
    let keys = node.owner.keys().context("no recovery key")?;
    let recovery_key_only = Keys {
        owner: former.owner.clone(),
        ..keys.clone()
    };
    for (wrong, outcome) in [
        ("the former keys", vm.unlock(&former).await?),
        ("the former owner key", vm.unlock(&recovery_key_only).await?),
    ] {
        let is_expected = match outcome.failures().next() {
            Some((_, UnlockError::RecoveryKey(_))) => wrong == "the former keys",
            Some((_, UnlockError::OwnerKey { .. })) => wrong == "the former owner key",
            _ => false,
        };
        ensure!(is_expected, "{wrong}: {outcome:?}");
    }

    let outcome = vm.unlock(&keys).await?;
    ensure!(outcome.quorum.is_reached(), "{outcome:?}");
    vm.home().await?;
    let again = vm.owned().await?.one_healthy_node().await?;
    ensure!(again.id == listed.id, "another node");
    vm.power_off().await?;
    test.passed()
}

/// A node whose every sector is authenticated, too. The wipe of its disk goes on after a power cut. As long as it waits, it
/// says for what, and changes nothing. Then its owner opens it at its console, with the recovery key alone, and the new end
/// of its disk, which was enlarged, is wiped while it is HOME.
#[tokio::test]
async fn an_authenticated_node_founds_and_waits_after_a_power_cut() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let plan = test.node("node").raw_disk();
    let mut node = plan
        .configured(|settings| {
            settings.set_storage_security_policy(
                StorageSecurityPolicy::NeedsEncryptionAndAuthentication,
            );
        })
        .install()
        .await?;
    // One chunk of 32 MiB, in percent.
    const CHUNK: u64 = 7;
    const MORE: u64 = 96 << 20;
    const HALF: &str = "storage.half_wiped";
    node.failpoint = Some(HALF);
    let vm = node.power_on().await?;
    vm.failpoint(HALF).await?;
    vm.cut().await?;
    node.failpoint = None;
    let vm = node.power_on().await?;
    let resumed = vm.wiped(0).await?;
    ensure!(
        (50 - CHUNK..=50).contains(&resumed),
        "half was wiped, and the next boot begins with {resumed} %"
    );
    vm.home().await?;
    let listed = vm.owned().await?.one_healthy_node_that(has_storage).await?;
    ensure!(
        listed.storage_security() == StorageSecurity::AuthenticatedEncrypted
            && storage(&listed) == Some(("capi:aegis128-random", listed.storage_security())),
        "{listed:?}"
    );
    vm.cut().await?;
    waits_for_its_cluster(&node).await?;

    let file = fs::File::options().write(true).open(node.disk_path())?;
    file.set_len(file.metadata()?.len() + MORE)?;
    drop(file);
    let vm = node.power_on().await?;
    vm.waiting().await?;
    let mut keyboard = vm.keyboard().await?;
    keyboard.enter("").await?;
    let shown = keyboard.shows(BEGIN).await?;
    let recovery = node.owner.recovery.as_ref().context("no recovery key")?;
    keyboard.enter("a word").await?;
    keyboard.shows("The answer was not accepted").await?;
    let answer = ConsoleChallenge::parse(&shown)?.answered(recovery)?;
    keyboard.enter(&answer).await?;
    keyboard.shows("unlocked this node at the console").await?;
    drop(keyboard);
    vm.home().await?;
    vm.wiped(100).await?;
    let grown = |line: &str| line.contains("grew the file system to the size of the volume");
    vm.wait_for("a larger file system", bounds::SOON, grown)
        .await?;
    vm.power_off().await?;
    test.passed()
}

/// A second disk becomes a volume by the node's settings: encrypted with keys that the node has only after it was unlocked, the same
/// one at the next boot, and none when the disk is missing.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_second_disk_is_an_encrypted_volume() -> Outcome {
    const SETTING: &str = "disk.scratch";
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").second_disk(2 << 30).install().await?;
    node.tell(&node.owner.parameters(Storage::Encrypted.configuration()));
    let vm = node.power_on().await?;
    vm.home().await?;
    let owner = vm.owned().await?;
    let id = owner.one_healthy_node().await?.id;
    let set = NodeSetting {
        name: SETTING.to_owned(),
        value: "size:1G..3G".to_owned(),
    };
    change_settings(&owner, &id, vec![set], Vec::new()).await?;
    vm.says(&["disk.scratch: formatting vdb"]).await?;
    vm.says(&["disk.scratch: mounted vdb", "/data/disks/scratch"])
        .await?;
    vm.power_off().await?;
    let mut bytes = [0; 4];
    let disk = fs::File::open(node.file(SECOND_DISK))?;
    disk.read_exact_at(&mut bytes, PAYLOAD)?;
    ensure!(&bytes != b"XFSB", "the file system is not encrypted");

    node.parameters = None;
    let keys = node.owner.keys().context("no recovery key")?;
    let vm = node.power_on().await?;
    vm.waiting().await?;
    vm.unlock(&keys).await?;
    vm.home().await?;
    vm.says(&["disk.scratch: mounted vdb"]).await?;
    let log = fs::read(vm.run_dir().serial_log())?;
    let formatted = String::from_utf8_lossy(&log).contains("disk.scratch: formatting");
    ensure!(!formatted, "it was formatted again");
    change_settings(&vm.owned().await?, &id, Vec::new(), vec![SETTING.into()]).await?;
    vm.says(&["disk.scratch: unmounted vdb"]).await?;
    let set = NodeSetting {
        name: SETTING.to_owned(),
        value: "size:1G..3G".to_owned(),
    };
    change_settings(&vm.owned().await?, &id, vec![set], Vec::new()).await?;
    vm.power_off().await?;

    node.remove_second_disk();
    let vm = node.power_on().await?;
    vm.waiting().await?;
    vm.unlock(&keys).await?;
    vm.home().await?;
    let is_missed = |node: &v1::Node| {
        let conditions = node.status.iter().flat_map(|status| &status.conditions);
        let mut disks = conditions.filter(|condition| condition.r#type == "Disks");
        disks.any(|condition| {
            condition
                .message
                .contains("the disk that it was formatted on")
        })
    };
    let owner = vm.owned().await?;
    owner.one_healthy_node_that(is_missed).await?;
    vm.power_off().await?;
    test.passed()
}

async fn change_settings(
    owner: &Operator,
    node: &str,
    upsert: Vec<NodeSetting>,
    delete: Vec<String>,
) -> Outcome {
    let request = UpdateNodeSettingsRequest {
        node: Some(by_id(node)),
        upsert,
        delete,
    };
    let change = || async {
        let mut management = owner.once().management();
        management.update_node_settings(request.clone()).await
    };
    retry_unavailable(change).await?;
    Ok(())
}

fn has_storage(node: &v1::Node) -> bool {
    storage(node).is_some()
}

/// How its data partition is encrypted, as its kernel says.
fn storage(node: &v1::Node) -> Option<(&str, StorageSecurity)> {
    let storage = node.status.as_ref()?.storage.as_ref()?;
    Some((&storage.cipher, storage.security()))
}

async fn waits_for_its_cluster(node: &Node) -> Outcome {
    let disk = node.disk().await?;
    let before = disk.data_digest()?;
    ensure!(
        disk.xfs_size(PAYLOAD).is_err(),
        "the file system is not encrypted"
    );
    let vm = node.power_on().await?;
    let what = vm.waiting().await?;
    ensure!(
        what.contains("cannot get the unlock key from the cluster"),
        "{what}"
    );
    vm.power_off().await?;
    ensure!(
        disk.data_digest()? == before,
        "the data partition has changed"
    );
    Ok(())
}

/// FAULTS 11: given bootstrap parameters, a node whose sealed configuration is lost does not change its data partition.
/// One slot is enough to continue.
#[tokio::test]
async fn a_corrupt_sealed_configuration_never_leads_to_a_formatted_disk() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().install().await?;
    let id = found(&node).await?;
    let disk = node.disk().await?;

    let good = disk.read_esp(SEALED[0]).await?;
    disk.write_esp(SEALED[0], &flipped(&good)).await?;
    ensure!(found(&node).await? == id, "another node");
    ensure!(
        disk.read_esp(SEALED[0]).await? == disk.read_esp(SEALED[1]).await?,
        "the corrupt slot was not repaired"
    );

    let before = disk.data_digest()?;
    for slot in SEALED {
        disk.write_esp(slot, &flipped(&good)).await?;
    }
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    ensure!(
        refusal.starts_with("the sealed configuration on the ESP is damaged: ")
            && refusal.contains("wipe.enrolment_id = "),
        "{refusal}"
    );
    vm.power_off().await?;
    ensure!(
        disk.data_digest()? == before,
        "the data partition has changed"
    );

    // Nor if it is missing altogether.
    for slot in SEALED {
        disk.remove_esp(slot).await?;
    }
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    ensure!(
        refusal
            .starts_with("the ESP has no sealed configuration, but the data partition belongs to ")
            && refusal.contains(&id),
        "{refusal}"
    );
    vm.power_off().await?;
    ensure!(
        disk.data_digest()? == before,
        "the data partition has changed"
    );

    // All data is still there.
    for slot in SEALED {
        disk.write_esp(slot, &good).await?;
    }
    ensure!(found(&node).await? == id, "another node");
    test.passed()
}

/// Inverts a bit in the middle of what is not blank: a state is followed by zeros.
fn flipped(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let end = bytes.iter().rposition(|byte| *byte != 0);
    let middle = end.unwrap_or_default() / 2;
    bytes[middle] ^= 1;
    bytes
}

/// FAULTS 15: a data partition of another node of another cluster.
#[tokio::test]
async fn the_data_partition_of_another_node_is_refused() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().install().await?;
    let other = test.node("other").raw_disk().install().await?;
    let (id, other_id) = (found(&node).await?, found(&other).await?);
    let (disk, other_disk) = (node.disk().await?, other.disk().await?);
    disk.take_data_of(&other_disk)?;
    let before = disk.data_digest()?;
    ensure!(before == other_disk.data_digest()?, "not copied");
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    ensure!(
        refusal.contains(&id) && refusal.contains(&other_id),
        "it does not name both: {refusal}"
    );
    vm.power_off().await?;
    ensure!(
        disk.data_digest()? == before,
        "the data partition has changed"
    );
    test.passed()
}

/// FAULTS 16: a disk that is larger than the image.
#[tokio::test]
async fn the_data_partition_grows_to_the_end_of_the_disk() -> Outcome {
    const MORE: u64 = 1 << 30;
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().larger_by(MORE);
    let node = node.install().await?;
    let before = node.disk().await?;
    found(&node).await?;
    let after = node.disk().await?;
    after.check_table().await?;
    ensure!(after.esp == before.esp, "the ESP has moved");
    ensure!(
        after.data.start == before.data.start && after.data.length >= before.data.length + MORE,
        "{:?} was {:?}",
        after.data,
        before.data
    );
    let (xfs, room) = (after.xfs_size(PAYLOAD)?, after.data.length - PAYLOAD);
    ensure!(xfs <= room && room - xfs < 1 << 20, "{xfs} of {room} bytes");

    // The disk is enlarged after the node was installed.
    let file = fs::File::options().write(true).open(node.disk_path())?;
    file.set_len(file.metadata()?.len() + MORE)?;
    drop(file);
    found(&node).await?;
    let grown = node.disk().await?;
    grown.check_table().await?;
    ensure!(
        grown.data.length >= after.data.length + MORE,
        "{:?} was {:?}",
        grown.data,
        after.data
    );
    let (xfs, room) = (grown.xfs_size(PAYLOAD)?, grown.data.length - PAYLOAD);
    ensure!(xfs <= room && room - xfs < 1 << 20, "{xfs} of {room} bytes");
    test.passed()
}

/// FAULTS 16: a disk that is smaller than the image.
#[tokio::test]
async fn a_disk_that_is_too_small_is_told() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().install().await?;
    let disk = node.disk().await?;
    let file = fs::File::options().write(true).open(node.disk_path())?;
    file.set_len(disk.data.start + disk.data.length / 2)?;
    drop(file);
    let vm = node.power_on().await?;
    let what = vm.waits_in_the_end().await?;
    let says = [
        "cannot find a disk with an EFI system partition",
        "disk size: expected at least ",
        " sectors, got ",
    ];
    ensure!(says.iter().all(|part| what.contains(part)), "{what}");
    vm.cut().await?;
    test.passed()
}

/// A file that takes all free space of an ESP.
const FILLER: &str = "filler";

/// A full ESP costs a node nothing: an image has the files for its state.
#[tokio::test]
async fn a_full_esp_has_room_for_the_state() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().install().await?;
    node.disk().await?.fill_esp(FILLER).await?;
    found(&node).await?;
    test.passed()
}

/// FAULTS 12: no space for the sealed configuration, on a disk of an image without files for it. No cluster is founded that
/// would be lost at the next boot, and the reason is shown.
#[tokio::test]
async fn a_full_esp_is_told_and_nothing_is_made() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().install().await?;
    let disk = node.disk().await?;
    for path in ESP_STATE_FILES {
        disk.remove_esp(path).await?;
    }
    disk.fill_esp(FILLER).await?;
    let before = disk.data_digest()?;
    let vm = node.power_on().await?;
    let what = vm.waiting().await?;
    ensure!(
        what.contains("save the sealed configuration") && what.contains("No space left on device"),
        "{what}"
    );
    vm.power_off().await?;
    ensure!(
        disk.data_digest()? == before,
        "the data partition has changed"
    );
    disk.remove_esp(FILLER).await?;
    found(&node).await?;
    test.passed()
}
