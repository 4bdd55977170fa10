use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::testing::{add_veth, in_own_network};

const METRIC: u32 = 5;

fn route(destination: &str, gateway: &str) -> Route {
    Route {
        destination: destination.parse().unwrap(),
        gateway: gateway.parse().ok(),
        metric: METRIC,
        source: None,
    }
}

fn addressing(addresses: &[&str], routes: &[(&str, &str)]) -> Addressing {
    Addressing {
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        routes: routes.iter().map(|(to, by)| route(to, by)).collect(),
        mtu: None,
    }
}

const DEFAULT: &str = "0.0.0.0/0";

#[test]
fn routes_are_put_into_the_order_that_the_kernel_wants() {
    type Routes = &'static [(&'static str, &'static str)];
    let table: [(&str, Routes, Routes); 7] = [
        (
            "10.0.0.5/24",
            &[(DEFAULT, "10.0.0.1")],
            &[(DEFAULT, "10.0.0.1")],
        ),
        // A host address alone, as some providers lease it: the gateway is on the link.
        (
            "10.0.0.5/32",
            &[(DEFAULT, "10.0.0.1")],
            &[("10.0.0.1/32", ""), (DEFAULT, "10.0.0.1")],
        ),
        (
            "10.0.0.4/31",
            &[(DEFAULT, "10.0.0.5")],
            &[(DEFAULT, "10.0.0.5")],
        ),
        // The route on the link comes after the one that needs it.
        (
            "10.0.0.5/32",
            &[(DEFAULT, "192.0.2.1"), ("192.0.2.0/24", "")],
            &[("192.0.2.0/24", ""), (DEFAULT, "192.0.2.1")],
        ),
        (
            "10.0.0.5/24",
            &[
                (DEFAULT, "10.0.0.1"),
                ("198.51.100.0/24", "10.0.0.2"),
                ("198.51.100.0/24", "10.0.0.2"),
            ],
            &[("198.51.100.0/24", "10.0.0.2"), (DEFAULT, "10.0.0.1")],
        ),
        (
            "2001:db8::5/128",
            &[("::/0", "fe80::1"), ("2001:db8:1::/48", "2001:db8:2::1")],
            &[
                ("2001:db8:2::1/128", ""),
                ("2001:db8:1::/48", "2001:db8:2::1"),
                ("::/0", "fe80::1"),
            ],
        ),
        // A gateway behind another gateway: the kernel takes it as one on the link only.
        (
            "10.0.0.5/24",
            &[
                ("203.0.113.0/24", "192.0.2.1"),
                ("192.0.2.0/24", "10.0.0.1"),
            ],
            &[
                ("192.0.2.1/32", ""),
                ("203.0.113.0/24", "192.0.2.1"),
                ("192.0.2.0/24", "10.0.0.1"),
            ],
        ),
    ];
    for (address, given, expected) in table {
        let planned = addressing(&[address], given).planned_routes();
        let expected: Vec<Route> = expected.iter().map(|(to, by)| route(to, by)).collect();
        assert_eq!(planned, expected, "{address} with {given:?}");
    }
}

fn any_route() -> impl Strategy<Value = Route> {
    let host = || (0..4_u8).prop_map(|last| IpAddr::from([192, 0, 2, last]));
    let gateway = prop_oneof![Just(None), host().prop_map(Some)];
    (host(), prop_oneof![Just(0), 28..=32_u8], gateway).prop_map(|(to, prefix, gateway)| Route {
        destination: Cidr::new(to, prefix).unwrap().network(),
        gateway,
        metric: METRIC,
        source: None,
    })
}

proptest! {
    /// Each route comes after one that reaches its gateway, whatever the order, and none is lost.
    #[test]
    fn every_gateway_is_reached_before_it_is_used(
        prefix in 29..=32_u8,
        mut routes in vec(any_route(), 0..6),
        turn in any::<usize>(),
    ) {
        let address = Cidr::new(IpAddr::from([192, 0, 2, 1]), prefix).unwrap();
        let plan = |routes: &[Route]| Addressing {
            addresses: vec![address],
            routes: routes.to_vec(),
            mtu: None,
        }.planned_routes();
        let planned = plan(&routes);
        let mut reached = vec![address];
        for route in &planned {
            match route.gateway {
                Some(gateway) => prop_assert!(reached.iter().any(|it| it.contains(gateway)), "{planned:?}"),
                None => reached.push(route.destination),
            }
        }
        for route in &routes {
            prop_assert_eq!(planned.iter().filter(|it| *it == route).count(), 1);
        }
        let key = |route: &Route| (route.destination, route.gateway);
        let mut turned = planned;
        turned.sort_by_key(key);
        if !routes.is_empty() {
            let turn = turn % routes.len();
            routes.rotate_left(turn);
        }
        let mut again = plan(&routes);
        again.sort_by_key(key);
        prop_assert_eq!(turned, again);
    }
}

fn routes_of_kernel() -> String {
    std::fs::read_to_string("/proc/thread-self/net/route").unwrap()
}

#[test]
fn it_is_applied_again_changed_and_removed() {
    in_own_network(async {
        if !add_veth("one", "other").await {
            return;
        }
        let netlink = Netlink::open().unwrap();
        for name in ["one", "other"] {
            let link = netlink.link_named(name).await.unwrap();
            netlink.set_up(link.index).await.unwrap();
        }
        let link = netlink.link_named("one").await.unwrap();
        let index = link.index;
        // A lease of some providers: one address, a gateway elsewhere, the default route first.
        let first = Addressing {
            mtu: Some(1400),
            ..addressing(
                &["10.0.0.5/32", "fd00::5/64"],
                &[
                    (DEFAULT, "192.0.2.1"),
                    ("192.0.2.0/24", ""),
                    ("::/0", "fd00:1::1"),
                ],
            )
        };
        let none = Addressing::default();
        for before in [&none, &first] {
            first.apply(&netlink, &link, before).await.unwrap();
            let addresses = netlink.addresses(index).await.unwrap();
            for address in &first.addresses {
                assert!(addresses.contains(address), "{addresses:?}");
            }
            let table = routes_of_kernel();
            assert_eq!(
                table.matches("one\t00000000\t010200C0").count(),
                1,
                "{table}"
            );
            assert_eq!(netlink.link(index).await.unwrap().mtu, 1400);
        }
        let second = addressing(&["10.0.0.6/24"], &[(DEFAULT, "10.0.0.1")]);
        second.apply(&netlink, &link, &first).await.unwrap();
        let addresses = netlink.addresses(index).await.unwrap();
        assert!(addresses.contains(&second.addresses[0]), "{addresses:?}");
        for old in &first.addresses {
            assert!(!addresses.contains(old), "{addresses:?}");
        }
        let table = routes_of_kernel();
        assert!(
            !table.contains("010200C0") && table.contains("one\t00000000\t0100000A"),
            "{table}"
        );

        second.remove(&netlink, index).await.unwrap();
        second.remove(&netlink, index).await.unwrap();
        assert!(!routes_of_kernel().contains("00000000\t0100000A"));
    });
}

#[test]
fn a_route_that_the_kernel_refuses_costs_no_other_one() {
    in_own_network(async {
        if !add_veth("one", "other").await {
            return;
        }
        let netlink = Netlink::open().unwrap();
        let link = netlink.link_named("one").await.unwrap();
        netlink.set_up(link.index).await.unwrap();
        // The broadcast address is no gateway.
        let odd = addressing(
            &["10.0.0.5/24"],
            &[("203.0.113.0/24", "10.0.0.255"), (DEFAULT, "10.0.0.1")],
        );
        let error = odd.apply(&netlink, &link, &Addressing::default()).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("203.0.113.0/24"), "{error}");
        assert!(routes_of_kernel().contains("00000000\t0100000A"));
    });
}
