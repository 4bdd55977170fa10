//! Settings and networks of nodes.

use hearth_api::identity::NodeId;
use hearth_api::node_settings::SYSCTLS;
use hearth_api::server::Limits;
use hearth_api::testing::{Script, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::get_network_response::Device;
use hearth_api::v1::{GetNetworkResponse, NetworkConfig, NodeHealth};
use serde_json::json;

use super::{Fixture, machines, node};

#[tokio::test]
async fn settings_are_set_and_removed() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    curator.set_nodes(machines());
    let set = ["node", "setting", "set", "c3", "reserved.memory=512Mi"];
    let and = ["sysctl.net.ipv4.tcp_rmem=4096 131072 6291456", "-o", "json"];
    let shown = f.json(&[&set[..], &and].concat()).await;
    let settings = json!({
        "reserved.memory": "512Mi",
        "sysctl.net.ipv4.tcp_rmem": "4096 131072 6291456",
    });
    assert_eq!(shown["settings"], settings);
    let shown = f.ok(&["node", "describe", "c3"]).await;
    assert!(
        shown.contains("settings          reserved.memory=512Mi,sysctl"),
        "{shown}"
    );
    let remove = ["node", "setting", "remove", "c3", "reserved.memory"];
    let shown = f.json(&[&remove[..], &["-o", "json"]].concat()).await;
    assert_eq!(
        shown["settings"].as_object().map(serde_json::Map::len),
        Some(1)
    );

    // Invalid ones are not sent.
    let calls = curator.calls().len();
    let (code, why) = f
        .fails(&["node", "setting", "set", "c3", "sysctl.kernel.panic=1"])
        .await;
    assert_eq!(code, 1);
    assert!(
        why.contains("upsert[0].name: expected \"sysctl.\" and one of"),
        "{why}"
    );
    assert_eq!(
        f.fails(&["node", "setting", "set", "c3", "reserved.cpu"])
            .await
            .0,
        2
    );
    assert_eq!(curator.calls().len(), calls);
}

#[test]
fn the_page_names_each_kernel_setting() {
    let page = include_str!("../../../../docs/hearthctl.md");
    for name in SYSCTLS {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}

fn network(addresses: &[&str]) -> Option<NetworkConfig> {
    Some(NetworkConfig {
        addresses: addresses.iter().map(|&text| text.to_owned()).collect(),
        ..NetworkConfig::default()
    })
}

/// A fixture, and a curator that is also the management service of its only node, which the cluster knows at an address
/// that leads nowhere.
async fn managed(f: &Fixture, script: Script) -> (String, TestCurator) {
    let credentials = f.cluster.node();
    let id = NodeId::from_public_key(&credentials.key.public()).to_string();
    let script = Script {
        nodes: vec![node(&id, NodeHealth::Healthy)],
        network: GetNetworkResponse {
            network_config: network(&["192.0.2.1/24"]),
            devices: vec![Device {
                name: "eth0".into(),
                mac: "52:54:00:12:34:56".into(),
                carrier: true,
                mtu: 1500,
                addresses: vec!["192.0.2.1/24".into()],
                bond: String::new(),
            }],
            address: "192.0.2.1".into(),
            ..GetNetworkResponse::default()
        },
        ..script
    };
    let limits = Limits::default();
    let at = TestCurator::start_as(&f.cluster, &credentials, script, wall_clock(), limits).await;
    f.take_ownership(&at).await;
    let here = at.endpoint().to_string();
    f.ok(&["context", "route", "192.0.2.1:7836", &here]).await;
    (id, at)
}

#[tokio::test]
async fn a_network_is_shown() {
    let f = Fixture::new();
    let (id, _at) = managed(&f, f.script()).await;
    let shown = f.ok(&["node", "network", &id]).await;
    for line in [
        "Configuration:  from the machine's parameters\n",
        "eth0    52:54:00:12:34:56  yes      1500  -     192.0.2.1/24\n",
        "  - 192.0.2.1/24\n",
    ] {
        assert!(shown.contains(line), "{shown}");
    }
    let shown = f.json(&["node", "network", &id, "-o", "json"]).await;
    assert_eq!(
        shown["network_config"],
        json!({"addresses": ["192.0.2.1/24"]})
    );
    assert_eq!(shown["trial_seconds_left"], json!(null));
}

/// The node is confirmed at the address that it has after the change, though an answer is lost and the cluster hears it late.
#[tokio::test]
async fn a_network_is_changed_and_confirmed_at_the_new_address() {
    let f = Fixture::new();
    let script = Script {
        loses_answers: true,
        unheard: 1,
        ..f.script()
    };
    let (id, at) = managed(&f, script).await;
    let here = at.endpoint().to_string();
    f.ok(&["context", "route", "192.0.2.9:7836", &here]).await;
    let before = at.calls().len();
    // Nobody tells the cluster of another address here, so the wait for that ends with the timeout.
    let change = ["--timeout", "2s", "node", "network", &id, "--yes"];
    let flags = [
        "--address",
        "192.0.2.9/24",
        "--gateway",
        "192.0.2.254",
        "-o",
        "json",
    ];
    let shown = f.json(&[&change[..], &flags].concat()).await;
    assert_eq!(shown["set_by_operator"], true);
    let expected = json!({
        "addresses": ["192.0.2.9/24"],
        "routes": [{"destination": "0.0.0.0/0", "gateway": "192.0.2.254"}],
    });
    assert_eq!(shown["network_config"], expected);
    let calls = at.calls()[before..].to_vec();
    let count = |name: &str| calls.iter().filter(|call| **call == name).count();
    assert_eq!(
        (count("TryNetwork"), count("ConfirmNetwork")),
        (1, 2),
        "{calls:?}"
    );
}

#[tokio::test]
async fn a_network_that_nobody_reaches_is_not_confirmed() {
    let f = Fixture::new();
    let script = Script {
        unheard: u32::MAX,
        ..f.script()
    };
    let (id, at) = managed(&f, script).await;
    let change = [
        "node",
        "network",
        &id,
        "--yes",
        "--nameserver",
        "192.0.2.53",
    ];
    let (code, why) = f.fails(&[&change[..], &["--try-for", "2s"]].concat()).await;
    assert_eq!(code, 3);
    for words in [
        "the node tries the new configuration; it goes back in 2 s",
        "the cluster does not hear the node",
        "the node uses its former network configuration",
    ] {
        assert!(why.contains(words), "{why}");
    }
    assert!(!at.calls().is_empty());
}

#[tokio::test]
async fn a_network_that_cannot_be_is_not_tried() {
    let f = Fixture::new();
    let (id, at) = managed(&f, f.script()).await;
    let change = ["node", "network", &id, "--yes"];
    let (code, why) = f
        .fails(&[&change[..], &["--address", "192.0.2.9"]].concat())
        .await;
    assert_eq!(code, 1);
    assert!(
        why.contains("network_config.addresses[0]: expected"),
        "{why}"
    );
    let file = f.path("network.yaml");
    std::fs::write(&file, "time_servers: [192.0.2.1]\n").unwrap();
    let from = ["--from", super::text(&file)];
    let (code, why) = f.fails(&[&change[..], &from].concat()).await;
    assert_eq!(code, 1);
    assert!(why.contains("expected network_config alone"), "{why}");
    // What is used already is shown.
    let shown = f
        .ok(&[&change[..], &["--address", "192.0.2.1/24"]].concat())
        .await;
    assert!(shown.contains("Address:        192.0.2.1\n"), "{shown}");
    // At a terminal people confirm; here standard input is none.
    std::fs::write(&file, "network_config: {}\n").unwrap();
    f.ok(&["node", "network", &id, "--from", super::text(&file)])
        .await;
    assert!(at.calls().contains(&"TryNetwork"));
}
