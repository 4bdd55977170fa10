//! `hearthctl node network`: the network of a running node is changed, and a change that cuts the node off is taken back.

use std::net::SocketAddrV4;

use anyhow::{Context, ensure};
use hearth_api::names::PORT_NODE_MANAGEMENT;
use hearth_api::v1::ClusterState;
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::tool;
use hearth_tests::{Outcome, TestCtx, here, owner};
use serde_json::Value as Json;

/// The change is confirmed only over the new network, lasts over a power cut, and can be taken back; a network on which nobody
/// hears the node is left again by itself.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_network_is_changed_or_left_again() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(2).await?;
    let hearthctl = cluster.hearthctl(&test).await?;
    let (id, leased) = (cluster.node(2).id().to_owned(), cluster.node(2).address());
    let new = cluster.node(2).unused_address();
    let network = cluster.network();
    let shared = network.forward_shared(new, PORT_NODE_MANAGEMENT).await?;
    let forwarded = cluster.node(2).vm()?.forwarded(PORT_NODE_MANAGEMENT);
    let forwarded = forwarded.context("the management port is not forwarded")?;
    for (address, host) in [(new, shared), (leased, forwarded)] {
        let address = SocketAddrV4::new(address, PORT_NODE_MANAGEMENT);
        hearthctl.route(owner::CONTEXT, address, host).await?;
    }

    // Nobody is there.
    let lost = ["--address", "192.0.2.9/24", "--try-for", "15s"];
    let refused = change(&hearthctl, &id, &lost).await;
    ensure!(refused.is_err(), "{refused:?}");
    let says = ["the network configuration that was tried has not been confirmed"];
    cluster.node(2).vm()?.says(&says).await?;
    cluster.wait_cluster_state(2, ClusterState::Home).await?;
    cluster.all_healthy().await?;

    let address = format!("{new}/24");
    let changed = change(&hearthctl, &id, &["--address", &address]).await?;
    ensure!(changed["set_by_operator"] == true, "{changed}");
    ensure!(
        changed["network_config"]["addresses"][0] == address,
        "{changed}"
    );
    cluster.is_at(&id, new).await?;
    cluster.node(2).cut().await?;
    cluster.node(2).comes_back().await?;
    cluster.is_at(&id, new).await?;

    let taken_back = change(&hearthctl, &id, &["--from-parameters"]).await?;
    ensure!(taken_back["set_by_operator"] == false, "{taken_back}");
    cluster.is_at(&id, leased).await?;
    cluster.all_healthy().await?;
    drop(cluster);
    test.passed()
}

/// What the tool prints of the network that it has changed.
async fn change(hearthctl: &Hearthctl, id: &str, flags: &[&str]) -> anyhow::Result<Json> {
    let words = ["node", "network", id, "--yes", "-o", "json"];
    let line = hearthctl.call(words.iter().chain(flags).copied());
    let printed = tool::run(&line).await?;
    serde_json::from_str(&printed).with_context(|| format!("{line}:\n{printed}"))
}
