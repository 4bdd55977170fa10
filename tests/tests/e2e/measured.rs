//! Machines with a TPM: what a boot measures is what the image's `measurements.json` says, and a node's keys are sealed to
//! it.

use std::fs;

use anyhow::{Context, ensure};
use hearth_api::v1::{RevokeImageRequest, TpmMode};
use hearth_lab::record::Storage;
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::tpm;
use hearth_tests::node::Running;
use hearth_tests::{Cluster, Outcome, TestCtx, here};
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
    // The next start makes a new one.
    fs::remove_dir_all(run_dir.tpm())?;
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
    let node = cluster.node(2);
    node.cut().await?;
    node.comes_back().await?;

    let other = &test.artifacts().release.measurements;
    let other = fs::read(other).with_context(|| format!("cannot read {}", other.display()))?;
    let other = TrustedImage::parse(&other)?;
    cluster.register(&[3]).await?;
    let reason = format!("image {} is not trusted", other.parts);
    cluster.node(3).vm()?.says(&[&reason]).await?;
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
