//! What the message may say of several interfaces, bonds and VLANs. The fields' own values are tested with the
//! parameters.

use hearth_api::v1::network_config::{Bond, Interface as Message};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const MACS: [&str; 3] = [
    "52:54:00:00:00:01",
    "52:54:00:00:00:02",
    "52:54:00:00:00:03",
];

fn on(mac: &str) -> Message {
    Message {
        mac: mac.into(),
        ..Message::default()
    }
}

fn bond(macs: &[&str]) -> Message {
    Message {
        bond: Some(Bond {
            macs: macs.iter().map(ToString::to_string).collect(),
            mode: 0,
        }),
        ..Message::default()
    }
}

fn tagged(vlan: u32, interface: Message) -> Message {
    Message { vlan, ..interface }
}

fn several(interfaces: &[Message]) -> NetworkConfig {
    NetworkConfig {
        interfaces: interfaces.to_vec(),
        ..NetworkConfig::default()
    }
}

#[test]
fn a_device_alone_gets_its_addresses_by_dhcp() {
    let network = Network::parse(NetworkConfig {
        mac: MACS[0].into(),
        ..NetworkConfig::default()
    });
    let network = network.unwrap();
    assert!(network.interfaces[0].addresses.is_empty());
    let all = Network::parse(NetworkConfig {
        nameservers: vec!["192.0.2.53".into()],
        search_domains: vec!["example.org".into()],
        ..NetworkConfig::default()
    });
    let all = all.unwrap();
    assert!(all.interfaces.is_empty() && all.to_message().is_some());
    assert_eq!(
        Network::parse(NetworkConfig::default())
            .unwrap()
            .to_message(),
        None
    );
}

#[test]
fn what_contradicts_itself_is_refused_with_the_field() {
    let [one, two, three] = MACS;
    let mixed = NetworkConfig {
        vlan: 7,
        ..several(&[on(one)])
    };
    let with = |change: fn(&mut Message)| {
        let mut interface = on(MACS[0]);
        change(&mut interface);
        several(&[interface])
    };
    for (message, expected) in [
        (
            mixed,
            "network_config.interfaces: expected either these, or mac",
        ),
        (
            several(&[on(one), on("")]),
            "network_config.interfaces[1].mac: expected a MAC address or a bond",
        ),
        (
            several(&[on(one), on(one)]),
            "network_config.interfaces[1]: expected another device or VLAN",
        ),
        (
            several(&[bond(&[one, two]), on(two)]),
            "network_config.interfaces[1]: expected each device in one bond only",
        ),
        (
            several(&[on(two), tagged(7, bond(&[one, two]))]),
            "network_config.interfaces[1]: expected each device in one bond",
        ),
        (
            several(&[bond(&[one, two]), bond(&[two, three])]),
            "network_config.interfaces[1]: expected each device in one",
        ),
        (
            several(&[bond(&[one])]),
            "network_config.interfaces[0].bond.macs: expected two to eight different",
        ),
        (
            several(&[bond(&[one, one])]),
            "network_config.interfaces[0].bond.macs: expected two to eight different",
        ),
        (
            several(&[bond(&[one, "x"])]),
            "network_config.interfaces[0].bond.macs[1]: expected a MAC address such as",
        ),
        (
            several(&[Message {
                mac: one.into(),
                ..bond(&[two, three])
            }]),
            "network_config.interfaces[0].mac: expected none",
        ),
        (
            with(|it| it.mtu = 1279),
            "network_config.interfaces[0].mtu: expected 0 for none, or 1280 to 9216, got 1279",
        ),
        (
            with(|it| it.mtu = 9217),
            "network_config.interfaces[0].mtu: expected 0",
        ),
        (
            with(|it| {
                it.bond = Some(Bond {
                    macs: MACS.map(Into::into).to_vec(),
                    mode: 9,
                })
            }),
            "network_config.interfaces[0].mac: expected none",
        ),
        (
            several(&vec![on(one); 33]),
            "network_config.interfaces: expected at most 32 interfaces, got 33",
        ),
        (
            NetworkConfig {
                search_domains: vec!["a".into(); 7],
                ..NetworkConfig::default()
            },
            "network_config.search_domains: expected at most 6",
        ),
        (
            NetworkConfig {
                search_domains: vec!["A b".into()],
                ..NetworkConfig::default()
            },
            "network_config.search_domains[0]: expected a lower-case DNS name",
        ),
    ] {
        let refused = Network::parse(message.clone()).unwrap_err().to_string();
        assert!(refused.starts_with(expected), "{message:?}: {refused}");
    }
    let mut odd = bond(&[one, two]);
    odd.bond.as_mut().unwrap().mode = 9;
    let refused = Network::parse(several(&[odd])).unwrap_err().to_string();
    assert!(
        refused.ends_with("expected MODE_ACTIVE_BACKUP or MODE_LACP, got 9"),
        "{refused}"
    );
}

#[test]
fn a_device_may_carry_several_vlans() {
    let [one, two, _] = MACS;
    let message = several(&[
        bond(&[one, two]),
        tagged(7, bond(&[one, two])),
        tagged(8, bond(&[one, two])),
    ]);
    assert_eq!(Network::parse(message).unwrap().interfaces.len(), 3);
    let message = several(&[on(one), tagged(7, on(one))]);
    assert_eq!(Network::parse(message).unwrap().interfaces.len(), 2);
}

fn any_interface() -> impl Strategy<Value = Message> {
    let device = prop_oneof![
        Just(on("")),
        (0..3_usize).prop_map(|at| on(MACS[at])),
        (1..3_usize).prop_map(|at| bond(&MACS[at - 1..=at])),
    ];
    let address = (1..224_u8, any::<[u8; 3]>(), 0..=32_u8)
        .prop_map(|(a, [b, c, d], length)| format!("{a}.{b}.{c}.{d}/{length}"));
    let route =
        prop_oneof![Just(""), Just("192.0.2.1")].prop_map(|gateway| network_config::Route {
            destination: "0.0.0.0/0".into(),
            gateway: gateway.into(),
        });
    let mtu = prop_oneof![Just(0), 1280..9217_u32];
    (
        device,
        0..4095_u32,
        vec(address, 0..3),
        vec(route, 0..2),
        mtu,
    )
        .prop_map(|(device, vlan, addresses, routes, mtu)| Message {
            vlan,
            addresses,
            routes,
            mtu,
            ..device
        })
}

proptest! {
    #[test]
    fn what_is_accepted_is_written_and_read_again(interfaces in vec(any_interface(), 0..4)) {
        if let Ok(network) = Network::parse(several(&interfaces)) {
            let message = network.to_message();
            prop_assert_eq!(message.is_none(), interfaces.is_empty());
            let again = Network::parse(message.unwrap_or_default());
            prop_assert_eq!(again.map_err(|e| e.to_string()), Ok(network));
        }
    }
}
