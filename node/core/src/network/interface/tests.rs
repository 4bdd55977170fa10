use hearth_parameters::{Mac, Network as Configuration};
use hearth_sys::testing::{add_veth, in_own_network};

use super::*;

fn interface(device: parameters::Device, vlan: Option<u16>) -> Interface {
    Interface {
        device,
        vlan,
        addresses: Vec::new(),
        routes: vec![parameters::Route {
            destination: Cidr::ALL_V4,
            gateway: "192.0.2.1".parse().ok(),
        }],
        mtu: None,
    }
}

#[test]
fn interfaces_are_named_and_ordered_as_they_are_configured() {
    let mac = |last| Mac([2, 0, 0, 0, 0, last]);
    let bond = |first| parameters::Device::Bond {
        macs: vec![mac(first), mac(first + 1)],
        mode: parameters::BondMode::Lacp,
    };
    let configured = Configuration {
        interfaces: vec![
            interface(parameters::Device::WithMac(mac(1)), None),
            interface(bond(2), None),
            interface(bond(2), Some(7)),
            interface(bond(4), None),
        ],
        ..Configuration::default()
    };
    let all = &configured.interfaces;
    let names: Vec<String> = (0..all.len())
        .map(|order| Followed::configured(order, all).name())
        .collect();
    assert_eq!(
        names,
        [
            "with MAC address 02:00:00:00:00:01",
            "uplink1 (a bond)",
            "uplink1 (a bond), VLAN 7",
            "uplink3 (a bond)"
        ]
    );
    let second = Followed::configured(1, all);
    let default = Route::default_through("192.0.2.1".parse().unwrap(), METRIC + 1);
    assert_eq!(routes(&all[1], second.metric()), [default]);
}

#[test]
fn link_local_addresses_are_for_links_alone() {
    let addresses =
        |texts: &[&str]| -> Vec<Cidr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
    let given = addresses(&["fe80::1/64", "192.0.2.1/24", "169.254.0.1/16", "fd00::1/64"]);
    let expected = addresses(&["192.0.2.1/24", "fd00::1/64"]);
    assert_eq!(reachable(&given), expected);
    let alone = addresses(&["169.254.0.1/16"]);
    assert_eq!(reachable(&alone), alone);
}

#[test]
fn a_router_accepts_the_advertisements_of_others_on_the_interfaces_that_are_followed() {
    in_own_network(async {
        if !add_veth("one", "pod").await {
            return;
        }
        let netlink = Netlink::open().unwrap();
        accept_advertisements(&netlink.link_named("one").await.unwrap());
        let accepts = |link: &str| {
            let path = format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
            std::fs::read_to_string(path).unwrap().trim().to_owned()
        };
        assert_eq!((&accepts("one")[..], &accepts("pod")[..]), ("2", "1"));
    });
}
