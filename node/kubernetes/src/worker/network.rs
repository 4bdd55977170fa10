//! The CNI configuration: one bridge on the node, and an address of the node's range for each pod.
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
/// MTU of the mesh.
const MTU: u32 = 1420;

/// Name of the only file in the directory of the CNI configuration.
pub(super) const FILE: &str = "10-hearth.conflist";

/// The content of the file. `addresses` is the directory of allocated addresses.
pub(super) fn conflist(network: &PodNetwork, addresses: &Path) -> Value {
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
                "mtu": MTU,
                "ipam": {
                    "type": "host-local",
                    "dataDir": addresses,
                    "ranges": [[{
                        "subnet": network.range.to_string(),
                        "gateway": network.gateway,
                    }]],
                    "routes": [{ "dst": Cidr::ALL_V4.to_string() }],
                },
            },
            { "type": "portmap", "backend": "nftables", "capabilities": { "portMappings": true } },
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_get_addresses_of_the_nodes_range() {
        let network = PodNetwork {
            range: "10.208.3.0/24".parse().unwrap(),
            gateway: "10.208.3.1".parse().unwrap(),
        };
        let list = conflist(&network, Path::new("/e/addresses"));
        let bridge = &list["plugins"][0];
        assert_eq!(bridge["bridge"], BRIDGE);
        let range = &bridge["ipam"]["ranges"][0][0];
        assert_eq!(range["subnet"], "10.208.3.0/24");
        assert_eq!(range["gateway"], "10.208.3.1");
        assert_eq!(bridge["ipam"]["dataDir"], "/e/addresses");
        assert_eq!(bridge["ipam"]["routes"][0]["dst"], "0.0.0.0/0");
    }
}
