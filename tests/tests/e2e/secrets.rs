//! FAULTS 64: no log contains a key or a secret.

use anyhow::{Context, ensure};
use hearth_api::private::SealedConfiguration;
use hearth_tests::{Outcome, TestCtx, here, secrets};
use prost::Message;

/// At this point the sealed configuration has everything that it will ever have: afterwards most of it is removed.
const LAST_OF_FOUNDING: &str = "enrolment.sealed_member.before";
/// Length of a slot's header, which precedes its content.
const HEADER: usize = 56;

#[tokio::test]
async fn no_secret_stands_in_any_log() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").raw_disk().install().await?;
    node.failpoint = Some(LAST_OF_FOUNDING);
    let vm = node.power_on().await?;
    vm.failpoint(LAST_OF_FOUNDING).await?;
    let founding_log = vm.debug().await?.log("").await?.join("\n");
    vm.cut().await?;
    let slot = node
        .disk()
        .await?
        .read_esp("hearth/sealed_configuration.0")
        .await?;
    let sealed = sealed_configuration(&slot)?;

    node.failpoint = None;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    let member_log = vm.debug().await?.log("").await?.join("\n");
    vm.power_off().await?;

    let mut logs = node.serial_logs()?;
    ensure!(logs.len() == 2, "{} serial logs", logs.len());
    for log in [founding_log, member_log] {
        ensure!(log.contains("root.enrolment"), "an empty log: {log}");
        logs.push(("the log tree".into(), log.into_bytes()));
    }
    let founding = sealed.founding.context("no founding")?;
    for (what, secret) in [
        ("the node unlock key", &sealed.node_unlock_key),
        ("the cluster unlock key", &sealed.cluster_unlock_key),
        ("the node key", &sealed.node_key),
        ("the join key", &sealed.join_key),
        ("the first-contact secret", &founding.first_contact_secret),
    ] {
        let texts = logs
            .iter()
            .map(|(path, text)| (path.to_str().unwrap_or("a log"), &text[..]));
        secrets::in_none(what, secret, texts)?;
    }
    ensure!(
        founding.first_contact_secret == node.owner.secret.expose(),
        "this is not what was sealed"
    );
    test.passed()
}

/// The content of a slot: the length of the message, and the padded message.
fn sealed_configuration(slot: &[u8]) -> anyhow::Result<SealedConfiguration> {
    let record = slot.get(HEADER..).context("no record")?;
    let (length, rest) = record.split_at_checked(4).context("no length")?;
    let length = u32::from_le_bytes(length.try_into()?);
    let message = rest.get(..length as usize).context("no message")?;
    Ok(SealedConfiguration::decode(message)?)
}
