//! From power-on to a cluster that only its owner can use.

mod stranger;

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hearth_api::first_contact::{self, FirstContactError};
use hearth_api::identity::{FirstContactSecret, NodeId, SigningKey};
use hearth_api::testing::TestCluster;
use hearth_api::v1::{GetLogsRequest, LogEntry, NodeState, PowerOffRequest};
use hearth_api::{certificates, names, tls};
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::tool;
use hearth_tests::node::{Node, Running};
use hearth_tests::{Operator, Outcome, TestCtx, bounds, here, secrets};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use stranger::{Answer, Stranger};

/// The release image through UEFI; its owner, with our library and with hearthctl; a wrong secret; the power button;
/// and the same node again, whose owner reads its log and shuts it down.
#[tokio::test]
async fn an_owner_takes_the_cluster_that_came_up_through_uefi() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").release().uefi().cpus(2).online();
    let node = node.install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;

    a_wrong_secret_proves_nothing(&vm).await?;
    let operator = vm.owned().await?;
    let listed = operator.one_healthy_node().await?;
    ensure!(listed.state() == NodeState::Up, "{listed:?}");
    let roles = listed.roles.unwrap_or_default();
    ensure!(roles.consensus_member.is_some(), "{listed:?}");
    let info = operator.info().await?;
    ensure!(
        info.ca_certificate == operator.credentials().ca.as_ref(),
        "the CA differs from that at first contact"
    );
    hearthctl_lists(&test, &node, &vm, &listed.id).await?;
    vm.power_off().await?;

    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let again = operator.one_healthy_node().await?;
    ensure!(again.id == listed.id, "{again:?} was {listed:?}");
    the_node_shows_its_log(&vm, &operator, &again.id).await?;
    let mut management = vm.management(&operator, &again.id)?;
    management.power_off(PowerOffRequest {}).await?;
    vm.goes_down().await?;

    for (path, text) in node.serial_logs()? {
        let texts = [(&*path.to_string_lossy(), &text[..])];
        secrets::in_none(
            "the first-contact secret",
            node.owner.secret.expose(),
            texts,
        )?;
    }
    test.passed()
}

async fn a_wrong_secret_proves_nothing(vm: &Running) -> Outcome {
    let secret = FirstContactSecret::generate();
    let (curator, clock) = (vm.curator()?, tls::wall_clock());
    match first_contact::fetch_ca(&curator, &secret, bounds::CALL, clock).await {
        Err(FirstContactError::Unproven { .. }) => Ok(()),
        Err(error) => Err(error).context("with a wrong secret"),
        Ok(_) => bail!("a wrong first-contact secret was accepted"),
    }
}

/// The node's own port, with the owner's certificate: as this node, and not as another one that is expected there.
async fn the_node_shows_its_log(vm: &Running, operator: &Operator, id: &str) -> Outcome {
    let request = GetLogsRequest {
        subtree: true,
        ..GetLogsRequest::default()
    };
    let mut management = vm.management(operator, id)?;
    let mut answers = management.get_logs(request.clone()).await?.into_inner();
    let mut entries = Vec::new();
    while let Some(answer) = answers.message().await? {
        entries.extend(answer.entries);
    }
    let known = |entry: &LogEntry| entry.time_ms > 0 && entry.dn.starts_with("root.");
    ensure!(entries.iter().any(known), "{entries:?}");

    let other = NodeId::from_public_key(&SigningKey::generate().public());
    let mut management = vm.management(operator, &other.to_string())?;
    match management.get_logs(request).await {
        Ok(_) => bail!("{id} answers for {other}"),
        Err(status) => ensure!(status.code() == Code::Unavailable, "{status:?}"),
    }
    Ok(())
}

/// hearthctl, used like a person would.
async fn hearthctl_lists(test: &TestCtx, node: &Node, vm: &Running, id: &str) -> Outcome {
    let hearthctl = Hearthctl {
        program: test.artifacts().hearthctl.clone(),
        config: test.folder().join("hearthctl.json"),
    };
    let curator = vm.forwarded(names::PORT_CURATOR).context("no curator")?;
    let take = hearthctl.take_ownership("test", node.folder(), &[curator]);
    let said = tool::run(&take).await?;
    ensure!(said.starts_with("logged in as "), "{take}:\n{said}");
    let list = hearthctl.call(["node", "list", "-o", "json"]);
    let nodes: serde_json::Value = serde_json::from_str(&tool::run(&list).await?)?;
    ensure!(
        nodes.as_array().is_some_and(|nodes| nodes.len() == 1)
            && nodes[0]["id"] == id
            && nodes[0]["health"] == "HEALTHY"
            && nodes[0]["cluster_state"] == "HOME",
        "{list}:\n{nodes}"
    );
    Ok(())
}

/// A client without a certificate of the cluster cannot list nodes, and the release image has no other open ports.
#[tokio::test]
async fn strangers_are_refused() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").release().install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let address = vm.forwarded(names::PORT_CURATOR).context("no curator")?;

    let owner = vm.owned().await?;
    let owner = owner.credentials();
    let known = Stranger::with(&owner.certificate, &owner.key);
    match known.lists_nodes(address).await? {
        Answer::Nodes(1) => {}
        other => bail!("the owner, by the same means: {other:?}"),
    }

    match Stranger::without_certificate().lists_nodes(address).await? {
        Answer::Unauthenticated => {}
        other => bail!("without a certificate: {other:?}"),
    }
    let key = SigningKey::generate();
    let self_signed = Stranger::with(&certificates::self_signed(&key), &key);
    match self_signed.lists_nodes(address).await? {
        Answer::Unauthenticated => {}
        other => bail!("with a self-signed certificate: {other:?}"),
    }
    let foreign = TestCluster::new();
    for credentials in [foreign.user("owner"), foreign.user("admin")] {
        let foreign = Stranger::with(&credentials.certificate, &credentials.key);
        match foreign.lists_nodes(address).await? {
            Answer::Alert(alert) if alert == "CertificateUnknown" => {}
            other => bail!("with another cluster's certificate: {other:?}"),
        }
    }
    let old = Stranger::with(&owner.certificate, &owner.key).over_tls_1_2();
    match old.lists_nodes(address).await? {
        Answer::Alert(alert) if alert == "ProtocolVersion" => {}
        other => bail!("the owner over TLS 1.2: {other:?}"),
    }
    the_debug_port_is_closed(&vm).await?;
    vm.power_off().await?;
    test.passed()
}

/// QEMU accepts every connection to a forwarded port, and drops it if the guest does not accept it.
async fn the_debug_port_is_closed(vm: &Running) -> Outcome {
    let address = vm.forwarded(names::PORT_DEBUG).context("no debug port")?;
    let mut stream = TcpStream::connect(address).await?;
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    let mut byte = [0];
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read(&mut byte)).await;
    match read {
        Ok(Ok(0) | Err(_)) => Ok(()),
        Ok(Ok(_)) => bail!("something answers on the debug port of a release image"),
        Err(_) => bail!("the debug port of a release image is open"),
    }
}
