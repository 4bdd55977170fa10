//! Machines with a TPM: what a boot measures is what the image's `measurements.json` says, and a node's keys are sealed to
//! it.

use std::fs;

use anyhow::{Context, ensure};
use hearth_api::v1::{RevokeImageRequest, TpmMode};
use hearth_lab::record::Storage;
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::tpm;
use hearth_tests::node::Running;
use hearth_tests::{Cluster, Outcome, TestCtx, altered, here};
use hearth_tpm::images::TrustedImage;
use serde_json::Value;

use crate::storage::SEALED;

/// A node founds an encrypted cluster, loses its power, and opens its disk again by itself. With another TPM, it says why
/// it does not, and changes nothing. It boots through firmware, systemd-boot and the stub, as a real machine, and
/// measures what was computed.
#[tokio::test]
async fn a_node_opens_its_encrypted_disk_by_its_tpm_and_by_no_other() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let plan = test.node("node").release().uefi().tpm().raw_disk();
    let mut node = plan.install().await?;
    let configuration = Storage::Tpm.configuration();
    node.tell(&node.owner.parameters(configuration));
    let run_dir = RunDir::open(node.folder())?;
    let vm = node.power_on().await?;
    vm.home().await?;
    measures_what_was_computed(&test, &vm).await?;
    let id = vm.owned().await?.one_healthy_node().await?.id;
    vm.cut().await?;

    node.parameters = None;
    let vm = node.power_on().await?;
    vm.home().await?;
    ensure!(
        vm.owned().await?.one_healthy_node().await?.id == id,
        "another node"
    );
    ensure!(tpm::is_in_use(&run_dir)?, "nobody serves the TPM");
    vm.power_off().await?;
    ensure!(!tpm::is_in_use(&run_dir)?, "the TPM outlived its machine");

    let disk = node.disk().await?;
    let before = (disk.data_digest()?, disk.read_esp(SEALED[0]).await?);
    ensure!(before.1.starts_with(b"HRTHTPSC"), "the keys are not sealed");
    node.replace_tpm()?;
    let vm = node.power_on().await?;
    let why = vm.refusal().await?;
    ensure!(
        why.contains("another TPM, or one that was cleared"),
        "{why}"
    );
    vm.power_off().await?;
    let after = (disk.data_digest()?, disk.read_esp(SEALED[0]).await?);
    ensure!(before == after, "the disk has changed");
    test.passed()
}

/// In a cluster whose nodes need a TPM, machines join with the image of the first node. A machine with another image waits,
/// says why, and joins when its image is trusted; a node whose image is revoked does not come back.
#[tokio::test]
async fn machines_join_with_trusted_images_only() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 3, |number, plan| {
        let plan = plan.uefi().tpm();
        let plan = plan.configured(|configuration| configuration.set_tpm_mode(TpmMode::Required));
        Ok(if number == 3 { plan.release() } else { plan })
    })
    .await?;
    cluster.add_nodes(&[2]).await?;
    // It comes back, while the next one registers.
    let node = cluster.node(2);
    node.cut().await?;
    node.start().await?;

    let other = &test.artifacts().release.measurements;
    let other = fs::read(other).with_context(|| format!("cannot read {}", other.display()))?;
    let other = TrustedImage::parse(&other)?;
    cluster.register(&[3]).await?;
    let reason = format!("image {} is not trusted", other.parts);
    cluster.node(3).vm()?.says(&[&reason]).await?;
    cluster.node(2).home().await?;
    let owner = cluster.owner().once().clone();
    owner.trust_image(&other).await.context("TrustImage")?;
    cluster.approve(3).await?;
    cluster.node(3).home().await?;

    let parts = other.parts.0.to_vec();
    let mut management = owner.management();
    management
        .revoke_image(RevokeImageRequest { parts })
        .await
        .context("RevokeImage")?;
    let node = cluster.node(3);
    node.cut().await?;
    node.start().await?;
    node.vm()?.says(&[&reason]).await?;
    test.passed()
}

/// Machines with an altered copy of the trusted image do not join, whether one byte of the initramfs is another or a word of the
/// command line: their TPMs do not even seal keys to it, because its builder has signed another one. Neither does a member's
/// disk in a machine with another TPM, while its cluster lives.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn altered_images_and_stolen_disks_get_nothing() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 4, |number, plan| {
        let plan = plan.uefi().tpm();
        let plan = plan.configured(|configuration| configuration.set_tpm_mode(TpmMode::Required));
        Ok(if number > 2 { plan.raw_disk() } else { plan })
    })
    .await?;
    let image = &test.artifacts().test;
    let trusted = TrustedImage::parse(&fs::read(&image.measurements)?)?;
    let disk = cluster.node(3).node.disk().await?;
    disk.replace_image(&altered::initramfs(image)?).await?;
    let disk = cluster.node(4).node.disk().await?;
    let other = altered::command_line(image, "panic=-1", "panic=-2")?;
    disk.replace_image(&other).await?;
    for number in [3, 4] {
        cluster.register(&[number]).await?;
        let why = cluster.node(number).vm()?.refusal().await?;
        let expected = "expected a signature by key";
        ensure!(why.contains(expected) && why.contains("PCR 11"), "{why}");
        ensure!(!why.contains(&trusted.parts.to_string()), "{why}");
        cluster.node(number).cut().await?;
    }
    let known = cluster.cluster_status().await?.nodes;
    ensure!(known.len() == 1, "expected the founder, found {known:#?}");

    cluster.add_nodes(&[2]).await?;
    cluster.node(2).cut().await?;
    cluster.node(2).node.replace_tpm()?;
    cluster.node(2).start().await?;
    let why = cluster.node(2).vm()?.refusal().await?;
    ensure!(
        why.contains("another TPM, or one that was cleared"),
        "{why}"
    );
    cluster.wait_unreachable(2).await?;
    test.passed()
}

/// The registers that the node reads are those of the image's `measurements.json`.
async fn measures_what_was_computed(test: &TestCtx, vm: &Running) -> Outcome {
    let path = &test.artifacts().release.measurements;
    let json = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let json: Value = serde_json::from_slice(&json)?;
    ensure!(json["version"] == 1 && json["bank"] == "sha256", "{json}");
    let measurements = json["measurements"].as_array().context("no measurements")?;
    let line = vm.says(&["TPM", "version=2", "pcr7="]).await?;
    let mut compared = Vec::new();
    for measurement in measurements {
        let pcr = measurement["pcr"].as_u64().context("no number")?;
        let value = measurement["value"].as_str().context("no value")?;
        let expected = format!("pcr{pcr}={value}");
        ensure!(line.contains(&expected), "{expected} is not in {line:?}");
        compared.push(pcr);
    }
    ensure!(compared == [4, 11, 12], "{compared:?}");
    Ok(())
}
