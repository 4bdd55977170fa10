//! Extensions: mounted if they are those that the image was built with, rejected otherwise, with the reason; the node
//! runs in any case.

use anyhow::{Context, ensure};
use hearth_api::extension::Admitted;
use hearth_tests::node::Node;
use hearth_tests::{Outcome, TestCtx, here};

const NAME: &str = "sample";

/// From the disk alone, by firmware: the hash comes with the kernel on the disk.
#[tokio::test]
async fn an_extension_is_there_before_the_node_is_home() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let image = test.artifacts().extended.clone();
    let node = test.node("node").image(image).uefi().install().await?;
    let vm = node.power_on().await?;
    ensure!(vm.extension(NAME).await?.is_none(), "it was rejected");
    vm.home().await?;
    vm.power_off().await?;
    test.passed()
}

/// FAULTS: an extension that was modified, exchanged, or removed.
#[tokio::test]
async fn what_the_image_was_not_built_with_is_refused_and_the_node_lives() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let image = test.artifacts().extended.clone();
    let found = Admitted::of_command_line(&image.cmdline).pop();
    let admitted = found.context("no extension in the command line")?;
    let admitted = admitted.map_err(|(_, error)| error)?;
    let mut node = test.node("node").image(image).raw_disk().install().await?;
    let disk = node.disk().await?;
    let start = disk.extension.start;

    // In the block of the file system's super block, which has no other data.
    disk.flip(start + 17)?;
    let vm = node.power_on().await?;
    let why = vm.extension(NAME).await?.context("it is mounted")?;
    ensure!(why.contains("no extension slot has the content"), "{why}");
    vm.home().await?;
    vm.power_off().await?;

    // The intact extension, in the other slot, and with an argument for another one.
    disk.flip(start + 17)?;
    disk.move_to_second_slot()?;
    ensure!(
        refusal(&node).await?.is_none(),
        "an intact extension was rejected"
    );
    let mut other = admitted.clone();
    other.root_hash[31] ^= 1;
    node.change_word(&admitted.to_string(), &other.to_string())?;
    let why = refusal(&node).await?.context("mounted by a wrong hash")?;
    ensure!(why.contains(&hex::encode(other.root_hash)), "{why}");
    let broken = format!("hearth.extension={NAME}:12");
    node.change_word(&other.to_string(), &broken)?;
    let why = refusal(&node)
        .await?
        .context("mounted with a malformed argument")?;
    ensure!(why.contains(&broken), "{why}");

    node.change_word(&broken, &admitted.to_string())?;
    disk.delete_slots().await?;
    let why = refusal(&node).await?.context("mounted without a slot")?;
    ensure!(why.contains("no extension slots"), "{why}");
    test.passed()
}

/// The result for the extension in the next boot.
async fn refusal(node: &Node) -> anyhow::Result<Option<String>> {
    let vm = node.power_on().await?;
    let said = vm.extension(NAME).await?;
    vm.cut().await?;
    Ok(said)
}
