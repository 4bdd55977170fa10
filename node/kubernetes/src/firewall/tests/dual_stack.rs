//! The rules of a dual-stack cluster: the same network with IPv6.
//!
//! ```text
//!   one fd00:1:0:3::2 ─┐
//!                      ├─ hearth-pods fd00:1:0:3::1  node  2001:db8::1 lan0 ── outside 2001:db8::9, ::2
//!   two fd00:1:0:3::3 ─┘                               └── hearth-mesh ─────── far fd00:1:0:4::2
//! ```

use std::net::{Ipv6Addr, SocketAddrV6};

use hearth_api::testing::dual_stack_ranges;

use super::*;

const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 3, 0, 0, 0, 1);
const POD_ONE: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 3, 0, 0, 0, 2);
const POD_TWO: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 3, 0, 0, 0, 3);
const POD_FAR: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 4, 0, 0, 0, 2);
const SERVICE: Ipv6Addr = Ipv6Addr::new(0xfd00, 2, 0, 0, 0, 0, 0, 7);
const NODE_ADDRESS: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const OTHER_NODE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
const NEIGHBOUR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);

/// Whether rules see packets of IPv6 that pass a bridge.
const BRIDGED_V6: &str = "/proc/sys/net/bridge/bridge-nf-call-ip6tables";

/// `None`, with a message, if this is not permitted here.
fn net() -> Option<Net> {
    let net = Net::new()?;
    if !std::path::Path::new("/proc/net/if_inet6").exists() {
        testing::skipped("this requires a kernel with IPv6");
        return None;
    }
    let add = |namespace, address: Ipv6Addr, prefix: u8, link| {
        net.within(
            namespace,
            &format!("addr add {address}/{prefix} dev {link} nodad"),
        );
    };
    let default = |namespace, gateway: Ipv6Addr| {
        net.within(
            namespace,
            &format!("route add default via {gateway} dev eth0 onlink"),
        );
    };
    for namespace in [NODE, ONE, TWO, OUTSIDE, FAR] {
        net.inside(namespace, || {
            std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "0").unwrap();
        });
    }
    for (namespace, address) in [(ONE, POD_ONE), (TWO, POD_TWO)] {
        add(namespace, address, 64, "eth0");
        default(namespace, GATEWAY);
    }
    add(NODE, GATEWAY, 64, "hearth-pods");
    add(NODE, NODE_ADDRESS, 64, "lan0");
    add(NODE, GATEWAY, 128, "hearth-mesh");
    net.within(NODE, &format!("route add default via {NEIGHBOUR} dev lan0"));
    net.within(
        NODE,
        &format!("route add fd00:1::/48 dev hearth-mesh src {GATEWAY}"),
    );
    add(OUTSIDE, NEIGHBOUR, 64, "eth0");
    // Not the source of connections.
    let other = format!("addr add {OTHER_NODE}/64 dev eth0 nodad preferred_lft 0");
    net.within(OUTSIDE, &other);
    default(OUTSIDE, NODE_ADDRESS);
    add(FAR, POD_FAR, 64, "eth0");
    default(FAR, GATEWAY);
    net.inside(NODE, || {
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        let _ = std::fs::write(BRIDGED_V6, "1");
    });
    Some(net)
}

fn filters_bridges(net: &Net) -> bool {
    net.inside(NODE, || {
        std::fs::read_to_string(BRIDGED_V6).is_ok_and(|on| on.trim() == "1")
    })
}

fn rules(policy: Option<NodePolicy>) -> Rules {
    let subnets = NodeSubnets {
        v4: "10.208.3.0/24".parse().unwrap(),
        v6: "fd00:1:0:3::/64".parse().ok(),
    };
    let policy = policy.map(Arc::new);
    let nodes = [NODE_ADDRESS, OTHER_NODE].map(IpAddr::from);
    Rules::of(
        nodes,
        Some(dual_stack_ranges()),
        Pods::BuiltIn { subnets, policy },
    )
}

/// Rules of a cluster without policies.
fn open() -> Rules {
    rules(Some(NodePolicy::default()))
}

/// Translates connections to these ports, as kube-proxy and the portmap plugin do.
async fn translate(filter: &Filter) {
    let script = format!(
        "table ip6 services {{ chain c {{ type nat hook prerouting priority dstnat;
           ip6 daddr {SERVICE} tcp dport 80 dnat to [{POD_ONE}]:80;
           fib daddr type local tcp dport 8080 dnat to [{POD_ONE}]:80;
           fib daddr type local tcp dport 7835 dnat to [{POD_ONE}]:80; }}; }}"
    );
    filter.nftables.apply(&script).await.unwrap();
}

#[tokio::test]
async fn pods_are_reached_and_reach_others_as_by_ipv4() {
    let Some(net) = net() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(ONE, POD_ONE, 80);
    net.listen(OUTSIDE, NEIGHBOUR, 80);
    translate(&filter).await;
    let seen = |name: &str, address: Ipv6Addr| format!("{name} {address}");
    assert_eq!(net.answers(OUTSIDE, POD_ONE, 80), seen(ONE, NEIGHBOUR));
    assert_eq!(net.answers(ONE, NEIGHBOUR, 80), seen(OUTSIDE, POD_ONE));

    filter.set(open()).await.unwrap();
    net.refused(OUTSIDE, POD_ONE, 80);
    for (from, address) in [(TWO, POD_TWO), (FAR, POD_FAR), (NODE, GATEWAY)] {
        assert_eq!(net.answers(from, POD_ONE, 80), seen(ONE, address));
    }
    assert_eq!(net.answers(FAR, SERVICE, 80), seen(ONE, POD_FAR));
    // Host ports, which do not take the node's own ones.
    assert_eq!(
        net.answers(OUTSIDE, NODE_ADDRESS, 8080),
        seen(ONE, NEIGHBOUR)
    );
    net.listen(NODE, Ipv6Addr::UNSPECIFIED, 7835);
    assert_eq!(
        net.answers(OUTSIDE, NODE_ADDRESS, 7835),
        seen(NODE, NEIGHBOUR)
    );
    // Outside, a pod has the address of its node.
    assert_eq!(net.answers(ONE, NEIGHBOUR, 80), seen(OUTSIDE, NODE_ADDRESS));

    // In a cluster with IPv4 alone pods have none of this.
    filter
        .set(with_policy(Some(NodePolicy::default())))
        .await
        .unwrap();
    net.silent(ONE, NEIGHBOUR, 80);
    net.silent(ONE, NODE_ADDRESS, 7835);
}

#[tokio::test]
async fn packets_that_cannot_come_from_outside_are_dropped() {
    let Some(net) = net() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(NODE, Ipv6Addr::UNSPECIFIED, 10250);
    net.listen(ONE, POD_ONE, 80);
    translate(&filter).await;
    // The address of a pod in the network between the nodes.
    let forged = Ipv6Addr::new(0xfd00, 1, 0, 9, 0, 0, 0, 9);
    net.within(OUTSIDE, &format!("addr add {forged}/128 dev eth0 nodad"));
    net.within(NODE, &format!("route add {forged}/128 dev lan0"));
    net.within(
        OUTSIDE,
        &format!("route add 2001:db8::1/128 dev eth0 src {forged}"),
    );
    let seen = format!("node {forged}");
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 10250), seen);
    net.answers(OUTSIDE, SERVICE, 80);

    filter.set(open()).await.unwrap();
    net.silent(OUTSIDE, NODE_ADDRESS, 10250);
    net.within(OUTSIDE, "route del 2001:db8::1/128");
    net.answers(OUTSIDE, NODE_ADDRESS, 10250);
    net.silent(OUTSIDE, SERVICE, 80);
}

#[tokio::test]
async fn a_pod_has_no_other_address_than_its_own() {
    let Some(net) = net() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(OUTSIDE, NEIGHBOUR, 80);
    net.listen(NODE, Ipv6Addr::UNSPECIFIED, 10250);
    net.listen(TWO, Ipv6Addr::UNSPECIFIED, 80);
    // One of another node's pods.
    let forged = Ipv6Addr::new(0xfd00, 1, 0, 4, 0, 0, 0, 9);
    net.within(ONE, &format!("addr add {forged}/128 dev eth0 nodad"));
    net.within(NODE, &format!("route add {forged}/128 dev hearth-pods"));
    let to = |address: Ipv6Addr| format!("{address}/128 dev eth0 via {GATEWAY} src {forged}");
    net.within(ONE, &format!("route add {}", to(NEIGHBOUR)));
    // What every interface has, and no policy knows.
    let link_local = net.link_local(TWO);
    let number = net.inside(ONE, || nix::net::if_::if_nametoindex("eth0").unwrap());
    let link_local = SocketAddr::V6(SocketAddrV6::new(link_local, 80, 0, number));
    net.ask(ONE, NEIGHBOUR, 80, CONNECTS).unwrap();
    net.ask_at(ONE, link_local, CONNECTS).unwrap();

    filter.set(open()).await.unwrap();
    net.silent(ONE, NEIGHBOUR, 80);
    net.answers(TWO, NEIGHBOUR, 80);
    if filters_bridges(&net) {
        let error = net.ask_at(ONE, link_local, SILENCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error:?}");
    }
    // Neighbours are found by the addresses that pods have.
    for namespace in [NODE, ONE, TWO] {
        net.within(namespace, "-6 neigh flush all");
    }
    net.answers(TWO, GATEWAY, 10250);
    net.answers(ONE, POD_TWO, 80);
}

#[tokio::test]
async fn pods_reach_of_nodes_what_they_may() {
    let Some(net) = net() else { return };
    let (_directory, mut filter) = net.filter();
    let ports = [6443, 7835, 9100, 10250];
    for port in ports {
        net.listen(NODE, Ipv6Addr::UNSPECIFIED, port);
        net.listen(OUTSIDE, Ipv6Addr::UNSPECIFIED, port);
    }
    let all = [NODE_ADDRESS, OTHER_NODE, GATEWAY];
    for (address, port) in all.into_iter().flat_map(|at| ports.map(|port| (at, port))) {
        net.answers(ONE, address, port);
    }
    filter.set(open()).await.unwrap();
    for address in all {
        for port in [6443, 10250] {
            net.answers(ONE, address, port);
        }
        for port in [7835, 9100] {
            net.refused(ONE, address, port);
        }
    }
    // Machines that are no nodes are not the cluster's concern.
    net.answers(ONE, NEIGHBOUR, 7835);
}

#[tokio::test]
async fn nothing_for_pods_and_services_leaves_in_the_clear() {
    let Some(net) = net() else { return };
    let (_directory, mut filter) = net.filter();
    net.within(OUTSIDE, &format!("addr add {SERVICE}/128 dev eth0 nodad"));
    net.within(OUTSIDE, &format!("addr add {POD_FAR}/128 dev eth0 nodad"));
    net.listen(OUTSIDE, SERVICE, 81);
    net.listen(OUTSIDE, POD_FAR, 80);
    net.within(NODE, &format!("route add fd00:1:0:4::/64 via {NEIGHBOUR}"));
    for from in [ONE, NODE] {
        net.answers(from, SERVICE, 81);
        net.answers(from, POD_FAR, 80);
    }
    filter.set(open()).await.unwrap();
    for from in [ONE, NODE] {
        net.refused(from, SERVICE, 81);
        net.refused(from, POD_FAR, 80);
    }
}

/// A pod of both families that may be isolated, and one that is not.
fn isolated(ingress: Vec<Rule>, egress: Vec<Rule>) -> NodePolicy {
    let isolation = Isolation {
        ingress: Some(0),
        egress: Some(1),
    };
    let pods = [
        (IpAddr::from(POD_ONE), isolation),
        (IpAddr::from(super::POD_ONE), isolation),
        (IpAddr::from(POD_TWO), Isolation::default()),
    ];
    NodePolicy {
        enforced: true,
        pods: pods.into(),
        chains: vec![ingress, egress],
        sets: vec![[IpAddr::from(POD_FAR), IpAddr::from(super::POD_FAR)].into()],
    }
}

#[tokio::test]
async fn policies_hold_for_both_families() {
    let Some(net) = net() else { return };
    let (_directory, mut filter) = net.filter();
    let both = [IpAddr::from(POD_ONE), IpAddr::from(super::POD_ONE)];
    for port in [80, 81] {
        for address in both {
            net.listen(ONE, address, port);
        }
        net.listen(OUTSIDE, NEIGHBOUR, port);
        net.listen(OUTSIDE, super::NEIGHBOUR, port);
    }
    net.listen(TWO, POD_TWO, 80);
    net.listen(NODE, Ipv6Addr::UNSPECIFIED, 6443);
    net.echo(ONE, POD_ONE, 7);
    filter.set(open()).await.unwrap();
    net.answers(TWO, POD_ONE, 80);
    net.answers(ONE, NODE_ADDRESS, 6443);
    let held = net.hold(FAR, POD_ONE, 7);
    says(&held).unwrap();

    let ports = [(80, 80)];
    let policy = isolated(
        vec![permit(Peers::Set(0), &ports)],
        vec![permit(block("2001:db8::/64", "2001:db8::1/128"), &ports)],
    );
    filter.set(rules(Some(policy.clone()))).await.unwrap();
    for namespace in [NODE, ONE, TWO] {
        net.within(namespace, "-6 neigh flush all");
    }
    for address in both {
        net.answers(FAR, address, 80);
        net.refused(FAR, address, 81);
        // The probes of the node.
        net.answers(NODE, address, 81);
    }
    net.answers(ONE, NEIGHBOUR, 80);
    net.refused(ONE, NEIGHBOUR, 81);
    // The block is of one family.
    net.refused(ONE, super::NEIGHBOUR, 80);
    net.refused(ONE, NODE_ADDRESS, 6443);
    net.answers(ONE, POD_ONE, 81);
    if filters_bridges(&net) {
        net.refused(TWO, POD_ONE, 80);
    }
    says(&held).unwrap_err();
    // A pod that the policy does not know yet.
    let mut without_two = policy;
    without_two.pods.remove(&POD_TWO.into());
    filter.set(rules(Some(without_two))).await.unwrap();
    net.silent(TWO, NEIGHBOUR, 80);
    net.silent(FAR, POD_TWO, 80);

    // It may connect to everyone, and nobody to it.
    let policy = isolated(Vec::new(), vec![permit(Peers::Any, &[])]);
    filter.set(rules(Some(policy))).await.unwrap();
    net.answers(ONE, NEIGHBOUR, 81);
    net.answers(ONE, super::NEIGHBOUR, 81);
    net.refused(FAR, POD_ONE, 80);
    let everything = isolated(
        vec![permit(block("::/0", "fd00:1:0:5::/64"), &[])],
        Vec::new(),
    );
    filter.set(rules(Some(everything))).await.unwrap();
    net.answers(FAR, POD_ONE, 80);
    net.refused(FAR, super::POD_ONE, 80);
    // Before anything is known of the cluster's policies.
    filter.set(rules(None)).await.unwrap();
    net.silent(ONE, NEIGHBOUR, 80);
}
