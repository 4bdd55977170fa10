//! What a boot measures into a TPM is what the image's `measurements.json` says.

use std::fs;

use anyhow::{Context, ensure};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::tpm;
use hearth_tests::{Outcome, TestCtx, here};
use serde_json::Value;

/// Through firmware, systemd-boot and the stub, as on a real machine; the node reads the registers.
#[tokio::test]
async fn a_boot_through_firmware_measures_what_was_computed() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let path = &test.artifacts().release.measurements;
    let json = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let json: Value = serde_json::from_slice(&json)?;
    ensure!(json["version"] == 1 && json["bank"] == "sha256", "{json}");
    let measurements = json["measurements"].as_array().context("no measurements")?;

    let node = test.node("node").release().uefi().tpm().install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
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

    let run_dir = RunDir::open(node.folder())?;
    ensure!(tpm::is_in_use(&run_dir)?, "nobody serves the TPM");
    vm.power_off().await?;
    ensure!(!tpm::is_in_use(&run_dir)?, "the TPM outlived its machine");
    test.passed()
}
