//! Invalid parameters (FAULTS 65). Each message here is what the console shows: it names the source, the field, the
//! expected and the actual value, and nothing is changed.

use anyhow::{Context, ensure};
use hearth_api::v1::node_parameters::Cluster;
use hearth_api::v1::{
    ClusterRegister, NodeParameters, NodeRoles, StorageSecurityPolicy, node_roles,
};
use hearth_lab::owner::with_storage;
use hearth_tests::node::Node;
use hearth_tests::owner::parameters_for_domain;
use hearth_tests::{Outcome, TestCtx, here};
use prost::Message;

const FROM_FW_CFG: &str = "parameters from fw_cfg opt/dev.hearth/parameters.pb: ";
const FROM_ESP: &str = "parameters from ESP hearth/parameters.pb: ";
const ESP_FILE: &str = "hearth/parameters.pb";

/// The same machine with other parameters at each boot: a rejection leaves no trace that would affect the next boot.
async fn refuses(node: &mut Node, told: Option<Vec<u8>>, message: &str) -> Outcome {
    node.parameters = told;
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    ensure!(refusal == message, "expected {message:?}, got {refusal:?}");
    vm.cut().await?;
    Ok(())
}

fn good(node: &Node) -> Vec<u8> {
    let parameters = node
        .owner
        .parameters(with_storage(StorageSecurityPolicy::NeedsInsecure));
    parameters.encode_to_vec()
}

#[tokio::test]
async fn what_is_no_message_is_refused() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    refuses(
        &mut node,
        None,
        "no parameters in any source: they name the cluster to bootstrap or to \
         register with",
    )
    .await?;
    refuses(
        &mut node,
        Some(Vec::new()),
        &format!("{FROM_FW_CFG}empty: expected a hearth.v1.NodeParameters message, got no bytes"),
    )
    .await?;
    let mut truncated = good(&node);
    let announced = truncated.len() - 2;
    truncated.truncate(20);
    refuses(
        &mut node,
        Some(truncated),
        &format!(
            "{FROM_FW_CFG}cluster_bootstrap: not a hearth.v1.NodeParameters message: \
             expected {announced} bytes, got 18"
        ),
    )
    .await?;
    refuses(
        &mut node,
        Some(b"a configuration of something else\n".to_vec()),
        &format!("{FROM_FW_CFG}unknown field 12"),
    )
    .await?;
    refuses(
        &mut node,
        Some(vec![b'x'; 1 << 20]),
        &format!(
            "{FROM_FW_CFG}fw_cfg item opt/dev.hearth/parameters.pb: cannot read it: \
             /sys/firmware/qemu_fw_cfg/by_name/opt/dev.hearth/parameters.pb/raw: exceeds the \
             maximum size of 262144 bytes"
        ),
    )
    .await?;
    test.passed()
}

#[tokio::test]
async fn a_message_that_will_not_do_is_refused() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    let both = [
        good(&node),
        NodeParameters {
            cluster: Some(Cluster::ClusterRegister(ClusterRegister::default())),
            ..NodeParameters::default()
        }
        .encode_to_vec(),
    ];
    refuses(
        &mut node,
        Some(both.concat()),
        &format!("{FROM_FW_CFG}expected either cluster_bootstrap or cluster_register, got both"),
    )
    .await?;
    // Field 9, a number: one of a later release, perhaps.
    let unknown = [good(&node), vec![9 << 3, 1]].concat();
    refuses(
        &mut node,
        Some(unknown),
        &format!("{FROM_FW_CFG}unknown field 9"),
    )
    .await?;
    let mut parameters = node
        .owner
        .parameters(with_storage(StorageSecurityPolicy::NeedsInsecure));
    if let Some(Cluster::ClusterBootstrap(bootstrap)) = &mut parameters.cluster {
        bootstrap.owner_public_key.pop();
    }
    refuses(
        &mut node,
        Some(parameters.encode_to_vec()),
        &format!("{FROM_FW_CFG}cluster_bootstrap.owner_public_key: expected 32 bytes, got 31"),
    )
    .await?;
    // Finally valid parameters, and the node becomes HOME.
    node.parameters = Some(good(&node));
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.cut().await?;
    test.passed()
}

#[tokio::test]
async fn fw_cfg_goes_before_the_esp() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").raw_disk().install().await?;
    let on_esp = parameters_for_domain(&node.owner, "esp.example");
    let disk = node.disk().await?;
    disk.write_esp(ESP_FILE, b"not a message").await?;
    refuses(&mut node, None, &format!("{FROM_ESP}unknown field 13")).await?;
    // An error in fw_cfg never causes a fallback to the other source.
    disk.write_esp(ESP_FILE, &on_esp.encode_to_vec()).await?;
    refuses(
        &mut node,
        Some(Vec::new()),
        &format!("{FROM_FW_CFG}empty: expected a hearth.v1.NodeParameters message, got no bytes"),
    )
    .await?;
    let in_fw_cfg = parameters_for_domain(&node.owner, "fw-cfg.example");
    node.tell(&in_fw_cfg);
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.says(&[
        " W ",
        "using the parameters from fw_cfg opt/dev.hearth/parameters.pb",
        "ignoring those from ESP hearth/parameters.pb",
    ])
    .await?;
    let info = vm.owned().await?.info().await?;
    let domain = info
        .configuration
        .context("no configuration")?
        .cluster_domain;
    ensure!(domain == "fw-cfg.example", "{domain}");
    vm.power_off().await?;
    test.passed()
}

#[tokio::test]
async fn the_esp_alone_is_enough() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").raw_disk().install().await?;
    let mut parameters = parameters_for_domain(&node.owner, "esp.example");
    // Different from its defaults: this image has no Kubernetes.
    let roles = NodeRoles {
        consensus_member: Some(node_roles::ConsensusMember::default()),
        kubernetes_worker: Some(node_roles::KubernetesWorker {}),
        ..NodeRoles::default()
    };
    if let Some(Cluster::ClusterBootstrap(bootstrap)) = &mut parameters.cluster {
        bootstrap.initial_roles = Some(roles);
    }
    let disk = node.disk().await?;
    disk.write_esp(ESP_FILE, &parameters.encode_to_vec())
        .await?;
    node.parameters = None;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let listed = operator.one_healthy_node().await?;
    let held = listed.roles.context("no roles")?;
    ensure!(
        held.consensus_member.is_some()
            && held.kubernetes_worker.is_some()
            && held.kubernetes_controller.is_none(),
        "expected {roles:?}: {held:?}"
    );
    let info = operator.info().await?;
    let domain = info
        .configuration
        .context("no configuration")?
        .cluster_domain;
    ensure!(domain == "esp.example", "{domain}");
    vm.cut().await?;
    test.passed()
}
