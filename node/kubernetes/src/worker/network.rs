//! The CNI configuration: one bridge on the node, and for each pod an address of the node's range of each
//! family.
//!
//! The bridge belongs to the mesh, which creates it before this file is written. Allocated
//! addresses are stored in memory, because no pod outlives the boot. There is no masquerading here:
//! pods see each other's addresses, and the packet filter masquerades traffic that leaves the pod network.

use std::path::Path;

use hearth_host::handover::PodNetwork;
use hearth_sys::cidr::Cidr;
use serde_json::{Value, json};

/// The bridge that the mesh creates.
const BRIDGE: &str = "hearth-pods";

/// Name of the only file in the directory of the CNI configuration.
pub(super) const FILE: &str = "10-hearth.conflist";

/// The content of the file. `addresses` is the directory of allocated addresses.
pub(super) fn conflist(network: &PodNetwork, addresses: &Path) -> Value {
    let subnets = network.subnets.all();
    let ranges = subnets.map(|subnet| {
        json!([{
            "subnet": subnet.range.to_string(),
            "gateway": subnet.gateway,
        }])
    });
    let all = [Some(Cidr::ALL_V4), network.subnets.v6.map(|_| Cidr::ALL_V6)];
    let routes = all.into_iter().flatten();
    let routes = routes.map(|all| json!({ "dst": all.to_string() }));
    json!({
        "cniVersion": "0.4.0",
        "name": "hearth",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": true,
                // A pod can reach itself through its service.
                "hairpinMode": true,
                "mtu": network.mtu,
                "ipam": {
                    "type": "host-local",
                    "dataDir": addresses,
                    "ranges": ranges.collect::<Vec<_>>(),
                    "routes": routes.collect::<Vec<_>>(),
                },
            },
            { "type": "portmap", "backend": "nftables", "capabilities": { "portMappings": true } },
        ],
    })
}

#[cfg(test)]
mod tests {
    use hearth_api::ranges::ClusterRanges;
    use hearth_host::networking::NodeSubnets;

    use super::*;

    #[test]
    fn pods_get_addresses_of_the_nodes_range() {
        let mut network = PodNetwork {
            ranges: ClusterRanges::DEFAULT,
            subnets: NodeSubnets {
                v4: "10.208.3.0/24".parse().unwrap(),
                v6: None,
            },
            mtu: 1420,
        };
        let list = conflist(&network, Path::new("/e/addresses"));
        let bridge = &list["plugins"][0];
        assert_eq!(bridge["bridge"], BRIDGE);
        assert_eq!(bridge["mtu"], 1420);
        let range = &bridge["ipam"]["ranges"][0][0];
        assert_eq!(range["subnet"], "10.208.3.0/24");
        assert_eq!(range["gateway"], "10.208.3.1");
        assert_eq!(bridge["ipam"]["dataDir"], "/e/addresses");
        assert_eq!(bridge["ipam"]["ranges"][1], Value::Null);
        assert_eq!(bridge["ipam"]["routes"], json!([{ "dst": "0.0.0.0/0" }]));

        network.subnets.v6 = "fd00:1:2:3::/64".parse().ok();
        let list = conflist(&network, Path::new("/e/addresses"));
        let ipam = &list["plugins"][0]["ipam"];
        let second = json!([{ "subnet": "fd00:1:2:3::/64", "gateway": "fd00:1:2:3::1" }]);
        assert_eq!(ipam["ranges"][1], second);
        let routes = json!([{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }]);
        assert_eq!(ipam["routes"], routes);
    }
}
