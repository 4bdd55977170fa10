//! `hearthctl node network`: the network of a running node is changed, and a change that cuts the node off is taken back.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context, ensure};
use hearth_api::names::PORT_NODE_MANAGEMENT;
use hearth_api::v1::ClusterState;
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::tool;
use hearth_tests::{Cluster, Outcome, TestCtx, here};
use serde_json::Value as Json;

/// An address of the network that no machine has.
fn unused(address: Ipv4Addr) -> Ipv4Addr {
    let [a, b, c, d] = address.octets();
    Ipv4Addr::new(a, b, c, d + 100)
}

/// The change is confirmed only over the new network, lasts over a power cut, and can be taken back; a network on which nobody
/// hears the node is left again by itself.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_network_is_changed_or_left_again() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(2).await?;
    let hearthctl = cluster.hearthctl(&test).await?;
    let (id, leased) = (cluster.node(2).id().to_owned(), cluster.node(2).address());
    let new = unused(leased);
    let network = cluster.network();
    let shared = network.forward_shared(new, PORT_NODE_MANAGEMENT).await?;
    let forwarded = cluster.node(2).vm()?.forwarded(PORT_NODE_MANAGEMENT);
    let forwarded = forwarded.context("the management port is not forwarded")?;
    for (address, host) in [(new, shared), (leased, forwarded)] {
        let address = SocketAddrV4::new(address, PORT_NODE_MANAGEMENT);
        hearthctl.route(address, host).await?;
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
    is_at(&mut cluster, new).await?;
    cluster.node(2).cut().await?;
    cluster.node(2).comes_back().await?;
    is_at(&mut cluster, new).await?;

    let taken_back = change(&hearthctl, &id, &["--from-parameters"]).await?;
    ensure!(taken_back["set_by_operator"] == false, "{taken_back}");
    is_at(&mut cluster, leased).await?;
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

/// Waits until the cluster has this address for the second node.
async fn is_at(cluster: &mut Cluster, address: Ipv4Addr) -> Outcome {
    let id = cluster.node(2).id().to_owned();
    let (wanted, address) = (format!("{id} at {address}"), address.to_string());
    cluster
        .until(&wanted, hearth_tests::bounds::SETTLED, |status| {
            let node = status.nodes.iter().find(|node| node.id == id);
            let status = node.and_then(|node| node.status.as_ref());
            status.is_some_and(|status| status.external_address == address)
        })
        .await?;
    Ok(())
}
