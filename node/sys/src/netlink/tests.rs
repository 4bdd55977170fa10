use super::*;
use crate::testing::in_own_network;

#[test]
fn links_addresses_and_routes_come_and_go() {
    in_own_network(async {
        let netlink = Netlink::open().unwrap();
        netlink.set_loopback_up().await.unwrap();
        let mut monitor = LinkMonitor::open().unwrap();
        let lo = netlink.link_named("lo").await.unwrap();
        assert_eq!(lo.kind, LinkKind::Loopback);
        assert!(lo.up && lo.carrier);
        // The kernel rejects this VLAN; the error names it.
        let error = netlink.add_vlan(9999, "v", 5).await.unwrap_err();
        assert!(error.to_string().contains("VLAN 5 on interface 9999"));

        netlink.set_mtu(lo.index, 9000).await.unwrap();
        monitor.changed().await.unwrap();
        assert_eq!(netlink.link(lo.index).await.unwrap().mtu, 9000);

        let address: Cidr = "10.9.8.7/24".parse().unwrap();
        for _ in 0..2 {
            netlink.add_address(lo.index, address).await.unwrap();
        }
        let addresses = netlink.addresses(lo.index).await.unwrap();
        assert!(addresses.contains(&address), "{addresses:?}");

        // A lent address is not the concern of whoever configures the interface, and goes by itself.
        for text in ["10.9.8.100", "2001:db8::100"] {
            let lent: IpAddr = text.parse().unwrap();
            let lend = |seconds| netlink.lend_address(lo.index, lent, Duration::from_secs(seconds));
            lend(3600).await.unwrap();
            netlink
                .set_ipv4_addresses(lo.index, &[address])
                .await
                .unwrap();
            let has_it = async || {
                let addresses = netlink.addresses(lo.index).await.unwrap();
                addresses.contains(&Cidr::host(lent))
            };
            assert!(has_it().await);
            lend(1).await.unwrap();
            while has_it().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }

        let gateway = "10.9.8.1".parse().unwrap();
        let default = Route::default_through(gateway, 100);
        for _ in 0..2 {
            netlink.replace_route(lo.index, default).await.unwrap();
        }
        let table = std::fs::read_to_string("/proc/thread-self/net/route").unwrap();
        assert!(table.contains("00000000\t0108090A"), "{table}");
        for _ in 0..2 {
            netlink.remove_route(lo.index, default).await.unwrap();
            netlink.remove_address(lo.index, address).await.unwrap();
        }
        let addresses = netlink.addresses(lo.index).await.unwrap();
        assert!(!addresses.contains(&address), "{addresses:?}");
        let mac = [0x0a, 0x58, 10, 9, 8, 1];
        for _ in 0..2 {
            let bridge = netlink.add_bridge("pods", mac).await.unwrap();
            assert!(bridge.up && bridge.kind == LinkKind::Virtual);
            assert_eq!(bridge.mac, Some(mac));
            netlink.add_address(bridge.index, address).await.unwrap();
            // A route to addresses behind the bridge, with the bridge's own address as the
            // source.
            let route = Route {
                destination: "10.208.0.0/12".parse().unwrap(),
                gateway: None,
                metric: 0,
                source: Some(address.address()),
            };
            netlink.replace_route(bridge.index, route).await.unwrap();
        }
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("10.208.3.2:9").unwrap();
        assert_eq!(socket.local_addr().unwrap().ip(), address.address());
        for _ in 0..2 {
            netlink.remove_link("pods").await.unwrap();
        }
        let error = netlink.link_named("pods").await.unwrap_err();
        assert!(error.to_string().contains("pods"));
        let error = netlink.link_named("eth77").await.unwrap_err();
        assert!(error.to_string().contains("eth77"));
    });
}

#[test]
fn only_ethernet_devices_and_what_is_made_of_them_lead_to_other_machines() {
    let leads_out = |kind| {
        let link = Link {
            index: 1,
            name: "x".into(),
            mac: None,
            permanent_mac: None,
            controller: None,
            kind,
            up: true,
            carrier: true,
            mtu: 1500,
        };
        link.is_uplink()
    };
    use LinkKind::{Bond, Ethernet, Loopback, Other, Virtual, Vlan};
    assert!([Ethernet, Bond, Vlan].into_iter().all(leads_out));
    assert!(![Loopback, Virtual, Other].into_iter().any(leads_out));
}
