//! The kernel state of the mesh: two links, a route for each family, and the peers.

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use hearth_api::identity::MeshSecret;
use hearth_api::names::PORT_MESH;
use hearth_api::ranges::ClusterRanges;
use hearth_host::networking::{NodeSubnets, Subnet, cidr};
use hearth_sys::cidr::{Cidr, CidrError};
use hearth_sys::netlink::{Link, Netlink, NetlinkError, Route};
use hearth_sys::sysctl::{self, SysctlError};
use hearth_sys::wireguard::{Peer, Wireguard, WireguardError};

use super::{BRIDGE, LINK};

/// Why the kernel state cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Links, addresses or routes cannot be changed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Key or peers cannot be set.
    #[error(transparent)]
    Wireguard(#[from] WireguardError),
    /// Forwarding or reverse path filtering cannot be set.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// An address range is invalid.
    #[error(transparent)]
    Cidr(#[from] CidrError),
}

/// The configuration of this node.
#[derive(Clone)]
pub struct Own {
    /// Private key of the WireGuard interface.
    pub secret: MeshSecret,
    /// The addresses of the node's pods.
    pub subnets: NodeSubnets,
    /// The addresses of all pods.
    pub ranges: ClusterRanges,
    /// Of both interfaces, in bytes.
    pub mtu: u32,
}

/// The operations on the kernel state. Every call is idempotent, and may be interrupted: the next
/// one completes it.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// Sets up the bridge and the WireGuard interface.
    async fn set_up(&self, own: &Own) -> Result<(), MachineError>;
    /// Sets the peers; others are removed.
    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError>;
    /// Forwards packets of IPv4, and of IPv6 in a dual-stack cluster.
    async fn forward(&self, ranges: &ClusterRanges) -> Result<(), MachineError>;
    /// Removes everything.
    async fn take_down(&self) -> Result<(), MachineError>;
}

/// The real kernel.
#[derive(Default)]
pub struct Kernel {
    /// Whether the machine forwards packets. (The process runs as long as the machine, so at its
    /// start it does not.)
    forwards: AtomicBool,
    /// The same for IPv6.
    forwards_v6: AtomicBool,
}

#[async_trait]
impl Machine for Kernel {
    async fn set_up(&self, own: &Own) -> Result<(), MachineError> {
        let netlink = Netlink::open()?;
        let [a, b, c, d] = own.subnets.gateway().octets();
        // A locally administered MAC address, unique for each node.
        let mac = [0x0a, 0x58, a, b, c, d];
        let bridge = netlink.add_bridge(BRIDGE, mac).await?;
        netlink.set_mtu(bridge.index, own.mtu).await?;
        let link = netlink.add_wireguard(LINK).await?;
        netlink.set_mtu(link.index, own.mtu).await?;
        let wireguard = Wireguard::open().await?;
        wireguard
            .set_device(LINK, own.secret.expose(), PORT_MESH)
            .await?;
        connect(&netlink, &bridge, &link, own).await?;
        self.forward(&own.ranges).await
    }

    async fn forward(&self, ranges: &ClusterRanges) -> Result<(), MachineError> {
        self.forwards.store(true, Ordering::Relaxed);
        sysctl::set("net.ipv4.ip_forward", "1")?;
        if ranges.v6.is_some() {
            self.forwards_v6.store(true, Ordering::Relaxed);
            sysctl::set("net.ipv6.conf.all.forwarding", "1")?;
        }
        Ok(())
    }

    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError> {
        Ok(Wireguard::open().await?.set_peers(LINK, peers).await?)
    }

    async fn take_down(&self) -> Result<(), MachineError> {
        let netlink = Netlink::open()?;
        // This removes the route, too.
        netlink.remove_link(LINK).await?;
        netlink.remove_link(BRIDGE).await?;
        if self.forwards.load(Ordering::Relaxed) {
            sysctl::set("net.ipv4.ip_forward", "0")?;
            self.forwards.store(false, Ordering::Relaxed);
        }
        if self.forwards_v6.load(Ordering::Relaxed) {
            sysctl::set("net.ipv6.conf.all.forwarding", "0")?;
            self.forwards_v6.store(false, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Gives both links the node's own addresses, and routes packets to all pods through the mesh. Packets that the
/// node itself sends to pods on other nodes, and masqueraded ones, must have a source address of its
/// own range.
async fn connect(
    netlink: &Netlink,
    bridge: &Link,
    link: &Link,
    own: &Own,
) -> Result<(), MachineError> {
    let subnets: Vec<Subnet> = own.subnets.all().collect();
    let on_bridge = |it: &Subnet| Cidr::new(it.gateway, it.range.prefix());
    let on_bridge: Vec<Cidr> = subnets.iter().map(on_bridge).collect::<Result<_, _>>()?;
    let alone = subnets.iter().map(|it| Cidr::host(it.gateway));
    let alone: Vec<Cidr> = alone.collect();
    for (link, addresses) in [(bridge, on_bridge), (link, alone)] {
        netlink.set_ipv4_addresses(link.index, &addresses).await?;
        netlink.set_ipv6_addresses(link.index, &addresses).await?;
        // Strict reverse path filtering against forged source addresses. IPv6 does not have it: the
        // packet filter compares source addresses.
        sysctl::set_of_link("ipv4", &link.name, "rp_filter", "1")?;
        // A pod must not make routes of the node. These links have no routers.
        sysctl::set_of_link("ipv6", &link.name, "accept_ra", "0")?;
    }
    let v6 = own.ranges.v6.map(|ranges| cidr(ranges.pods));
    let pods = [cidr(own.ranges.v4.pods)].into_iter().chain(v6);
    for (destination, subnet) in pods.zip(subnets) {
        let route = Route {
            destination,
            gateway: None,
            metric: 0,
            source: Some(subnet.gateway),
        };
        netlink.replace_route(link.index, route).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hearth_api::testing::dual_stack_ranges;
    use hearth_host::networking::PodRange;
    use hearth_sys::testing::in_own_network;

    use super::*;

    fn own(ranges: ClusterRanges) -> Own {
        let range: PodRange = "10.208.3.0/24".parse().unwrap();
        Own {
            secret: MeshSecret::generate(),
            subnets: range.subnets(&ranges).unwrap(),
            ranges,
            mtu: 1420,
        }
    }

    /// A setting or a table of the test's network.
    fn read(path: &str) -> String {
        let path = format!("/proc/{path}");
        std::fs::read_to_string(&path).expect(&path)
    }

    /// With a bridge instead of WireGuard, which many kernels do not have.
    #[test]
    fn the_node_has_an_address_and_a_route_of_each_family() {
        in_own_network(async {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.add_bridge(BRIDGE, [2, 0, 0, 0, 0, 1]).await;
            let bridge = bridge.unwrap();
            let link = netlink.add_bridge(LINK, [2, 0, 0, 0, 0, 2]).await.unwrap();
            let addresses = async |link: &Link| {
                let all = netlink.addresses(link.index).await.unwrap().into_iter();
                let given = all.filter(|cidr| !cidr.to_string().starts_with("fe80"));
                let mut given: Vec<_> = given.map(|cidr| cidr.to_string()).collect();
                given.sort();
                given
            };
            let dual = own(dual_stack_ranges());
            for _ in 0..2 {
                connect(&netlink, &bridge, &link, &dual).await.unwrap();
                let both = ["10.208.3.1/24", "fd00:1:0:3::1/64"];
                assert_eq!(addresses(&bridge).await, both);
                let both = ["10.208.3.1/32", "fd00:1:0:3::1/128"];
                assert_eq!(addresses(&link).await, both);
            }
            // fd00:1::/48, and 10.208.0.0/12.
            let routes = read("thread-self/net/ipv6_route");
            let to_pods = format!("fd000001{} 30", "0".repeat(24));
            let to_pods = routes.lines().find(|line| line.starts_with(&to_pods));
            assert!(to_pods.is_some_and(|line| line.ends_with(LINK)), "{routes}");
            let routes = read("thread-self/net/route");
            assert!(routes.contains("hearth-mesh\t0000D00A"), "{routes}");
            for link in [BRIDGE, LINK] {
                let accepts = read(&format!("sys/net/ipv6/conf/{link}/accept_ra"));
                assert_eq!(accepts.trim(), "0");
            }

            let kernel = Kernel::default();
            kernel.forward(&ClusterRanges::DEFAULT).await.unwrap();
            let forwards = || read("sys/net/ipv6/conf/all/forwarding").trim().to_owned();
            assert_eq!(forwards(), "0");
            kernel.forward(&dual.ranges).await.unwrap();
            assert_eq!(forwards(), "1");
            kernel.take_down().await.unwrap();
            assert_eq!(forwards(), "0");
            assert_eq!(read("sys/net/ipv4/ip_forward").trim(), "0");
            let links = netlink.list_links().await.unwrap();
            assert!(
                links
                    .iter()
                    .all(|link| link.name != BRIDGE && link.name != LINK)
            );
        });
    }
}
