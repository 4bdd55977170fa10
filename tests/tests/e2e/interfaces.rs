//! Machines with several network cards, and networks that are not as simple as the usual one.
//!
//! Which routes and leases a node takes is tested in network namespaces; here is what only a machine shows.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use hearth_api::console::{Milestone, Report};
use hearth_api::names::PORT_CURATOR;
use hearth_api::v1::NetworkConfig;
use hearth_api::v1::network_config::bond::Mode;
use hearth_api::v1::network_config::{Bond, Interface, Route};
use hearth_qemu::hardware::{Card, DiskBus};
use hearth_qemu::network::{Forward, Link, Mac, UserNetwork};
use hearth_qemu::switch::{Addressing, Faults, Lifetime, Network, NetworkOptions};
use hearth_tests::bounds::until_ok;
use hearth_tests::cluster::Machines;
use hearth_tests::node::Running;
use hearth_tests::{Operator, Outcome, TestCtx, bounds, here};

/// The address that QEMU's own network gives.
const LEASED: &str = "10.0.2.15/24";

/// Waits until the console of a machine names this address.
async fn named(vm: &Running, wanted: &str) -> Outcome {
    vm.wait_for_report(wanted, bounds::HOME, |report| {
        matches!(report, Report::Reached(Milestone::Network, address) if address == wanted)
    })
    .await?;
    Ok(())
}

/// A second card, put in after the node was founded and before, with nothing at its other end: the first one has an address, so the
/// node is HOME with it.
#[tokio::test]
async fn a_second_card_without_a_network_costs_nothing() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.power_off().await?;
    node.add_card(2);
    let vm = node.power_on().await?;
    named(&vm, LEASED).await?;
    vm.home().await?;
    vm.power_off().await?;
    test.passed()
}

/// Of two cards, the second one is the only one with a network.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn the_card_that_gets_an_address_is_the_nodes() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let plan = test.node("node").without_card().card(2, Link::Unplugged);
    let node = plan.card(1, user_network()).install().await?;
    let vm = node.power_on().await?;
    named(&vm, LEASED).await?;
    vm.home().await?;
    vm.power_off().await?;
    test.passed()
}

fn user_network() -> Link {
    Link::User(UserNetwork {
        restricted: true,
        forwards: vec![Forward::any(PORT_CURATOR)],
    })
}

/// A VLAN, an address without a network, and a gateway elsewhere whose route comes first: all of it is taken.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_host_address_in_a_vlan_with_a_gateway_elsewhere() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let route = |destination: &str, gateway: &str| Route {
        destination: destination.into(),
        gateway: gateway.into(),
    };
    let node = test.node("node").network_config(NetworkConfig {
        mac: Mac::of_machine(1).to_string(),
        vlan: 7,
        addresses: vec!["192.0.2.10/32".into()],
        routes: vec![
            route("0.0.0.0/0", "198.51.100.1"),
            route("203.0.113.0/24", "192.0.2.1"),
            route("192.0.2.1/32", ""),
        ],
        ..NetworkConfig::default()
    });
    let node = node.install().await?;
    let vm = node.power_on().await?;
    named(&vm, "192.0.2.10/32").await?;
    vm.home().await?;
    vm.power_off().await?;
    test.passed()
}

/// A node with an address of IPv6 alone, without a name server and without anybody else: HOME, and again after a power cut.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_node_of_ipv6_alone() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").network_config(NetworkConfig {
        addresses: vec!["2001:db8::10/64".into()],
        routes: vec![Route {
            destination: "::/0".into(),
            gateway: "fe80::1".into(),
        }],
        ..NetworkConfig::default()
    });
    let node = node.install().await?;
    for _ in 0..2 {
        let vm = node.power_on().await?;
        named(&vm, "2001:db8::10/64").await?;
        vm.home().await?;
        vm.cut().await?;
    }
    test.passed()
}

/// Two cards as one, each with a network of its own that gives the same address: when the first loses its cable, the node is
/// reached by the second.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_bond_goes_on_with_its_other_card() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let macs = [1, 2].map(|number| Mac::of_machine(number).to_string());
    let plan = test.node("node").card(2, user_network());
    let node = plan.network_config(NetworkConfig {
        interfaces: vec![Interface {
            bond: Some(Bond {
                macs: macs.to_vec(),
                mode: 0,
            }),
            ..Interface::default()
        }],
        ..NetworkConfig::default()
    });
    let node = node.install().await?;
    let vm = node.power_on().await?;
    named(&vm, LEASED).await?;
    vm.home().await?;
    let forwards = vm.forwards();
    let curators = forwards.iter().filter(|one| one.guest == PORT_CURATOR);
    let curators: Vec<SocketAddr> = curators.map(|one| one.host).collect();
    ensure!(curators.len() == 2, "one for each card: {forwards:?}");
    let owner = vm.owned().await?;
    vm.set_cable(0, false).await?;
    let first = vm.forwarded(PORT_CURATOR);
    let other = curators.iter().find(|host| Some(**host) != first);
    let other = *other.context("the port of the other card")?;
    let owner = owner.at(vec![other.into()])?;
    let status = owner.cluster_status().await?;
    ensure!(status.nodes.len() == 1, "{status:?}");
    vm.power_off().await?;
    test.passed()
}

/// In a network without IPv4, a machine has its address, its route and its name server from the router.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_machine_of_ipv6_alone_has_everything_from_its_router() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let options = NetworkOptions {
        addressing: Addressing::RouterAdvertisements,
        ..NetworkOptions::default()
    };
    let vm = &ipv6_alone(&test, &options).await?.members[0];
    let reached = vm.vm()?.reached(Milestone::Network, bounds::SOON).await?;
    let shown = reached.report.to_string();
    let prefix = "fd68:6561:7274:0:";
    ensure!(shown.contains(prefix) && shown.ends_with("/64"), "{shown}");
    test.passed()
}

/// The same where the router says that there is DHCPv6: the address is that of the server, and stays the machine's longer than
/// one lease.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_machine_of_ipv6_alone_has_its_address_by_dhcpv6() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let options = NetworkOptions {
        addressing: Addressing::Dhcp6,
        ..NetworkOptions::default()
    };
    let machines = ipv6_alone(&test, &options).await?;
    let vm = machines.members[0].vm()?;
    named(vm, &format!("{}/128", options.machine_address6(1))).await?;
    let network = &machines.network;
    until_ok("the lease is renewed", bounds::SOON, || is_renewed(network)).await?;
    let log = std::fs::read(vm.run_dir().serial_log())?;
    let log = String::from_utf8_lossy(&log);
    ensure!(!log.contains("lost the DHCPv6 lease"), "it was lost");
    test.passed()
}

/// Whether a machine has asked for its lease of DHCPv6 to be renewed, and was answered.
async fn is_renewed(network: &Network) -> Outcome {
    const RENEW: u8 = 5;
    const REPLY: u8 = 7;
    /// The ports of clients and servers.
    const TO_SERVER: [u8; 4] = [2, 34, 2, 35];
    const TO_CLIENT: [u8; 4] = [2, 35, 2, 34];
    let capture = network.status().await?.capture;
    let wire = std::fs::read(&capture.context("no packet capture")?.path)?;
    // A UDP header is the ports, four more bytes, and then comes the kind of message.
    let find = |wire: &[u8], ports: [u8; 4], kind: u8| {
        let mut found = wire.windows(9);
        found.position(|it| it[..4] == ports && it[8] == kind)
    };
    let renewal = find(&wire, TO_SERVER, RENEW).context("no renewal")?;
    find(&wire[renewal..], TO_CLIENT, REPLY).context("no answer")?;
    Ok(())
}

/// A machine that has reached HOME, and has the name server of such a network.
async fn ipv6_alone(test: &TestCtx, options: &NetworkOptions) -> Result<Machines> {
    let mut machines = Machines::install_in(test, options, 1, |_, plan| Ok(plan)).await?;
    let node = &mut machines.members[0];
    node.start().await?;
    node.home().await?;
    let server = format!("nameserver {}", options.gateway6);
    node.vm()?.says(&["resolv.conf: ", &server]).await?;
    Ok(machines)
}

/// Two cards as one by LACP: the switch and the machine agree, and when a link is cut, the other one carries everything.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_bond_by_lacp_goes_on_with_its_other_card() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let options = NetworkOptions::default();
    let (switch, folder) = (&test.artifacts().switch, test.folder().join("net"));
    let lifetime = Lifetime::KillWithParent;
    let network = Network::start(switch, &folder, options.clone(), lifetime).await?;
    let names = ["one", "two"];
    // The kernel aggregates only links whose speed it knows, which a virtio card does not tell.
    let plan = test.node("node").without_card();
    let mut plan = plan.hardware(DiskBus::Virtio, Card::E1000e);
    for (name, number) in names.into_iter().zip(1..) {
        let (mac, address) = (Mac::of_machine(number), options.machine_address(number));
        let port = network.add_port(name, mac, address).await?;
        let socket = port.socket;
        plan = plan.card(number, Link::Switch { socket });
    }
    let macs = [1, 2].map(|number| Mac::of_machine(number).to_string());
    let node = plan.network_config(NetworkConfig {
        interfaces: vec![Interface {
            bond: Some(Bond {
                macs: macs.to_vec(),
                mode: Mode::Lacp.into(),
            }),
            ..Interface::default()
        }],
        ..NetworkConfig::default()
    });
    let node = node.install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    // The address of the first card is that of both.
    named(&vm, &format!("{}/24", options.machine_address(1))).await?;
    let curator = network.forward(names[0], PORT_CURATOR).await?;
    let owner = Operator::take_ownership(&node.owner, curator.into()).await?;
    // The cards still have a carrier: only LACP tells the machine.
    let cut = Faults {
        cut: true,
        ..Faults::default()
    };
    for name in names {
        // Only a card that carries again can take over from the other.
        aggregated(&network, &names).await?;
        network.set_faults(name, cut).await?;
        owner.one_healthy_node().await?;
        network.set_faults(name, Faults::default()).await?;
        owner.one_healthy_node().await?;
    }
    vm.power_off().await?;
    test.passed()
}

/// Waits until the machine uses each of these ports as a part of its link, as it tells the switch.
async fn aggregated(network: &Network, names: &[&str]) -> Outcome {
    let is_one = || async {
        let status = network.status().await?;
        let carries = |name: &&str| status.port(name).is_some_and(|port| port.aggregated);
        ensure!(names.iter().all(carries), "{:?}", status.ports);
        Ok(())
    };
    until_ok("all cards carry", bounds::SOON, is_one).await
}
