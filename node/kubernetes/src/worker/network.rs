//! How containerd's plugins connect pods: one bridge on the node, an address
//! of the node's range for each.
//!
//! The bridge is the mesh's, which has made it before this is written. The
//! addresses that are taken are remembered in memory, for no pod outlives the
//! boot. Nothing is masqueraded here: pods see each other's addresses, and the
//! mesh does it for what leaves the pods' network.

use std::path::Path;

use hearth_host::handover::PodNetwork;
use hearth_sys::cidr::Cidr;
use serde_json::{Value, json};

/// The bridge that the mesh makes.
const BRIDGE: &str = "hearth-pods";
/// What fits into the mesh's packets.
const MTU: u32 = 1420;

/// The name of the file in the plugins' directory; there is one only.
pub(super) const FILE: &str = "10-hearth.conflist";

/// The file's content. `addresses` is the directory in which the taken ones
/// are remembered.
pub(super) fn conflist(network: &PodNetwork, addresses: &Path) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "hearth",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": true,
                // A pod that reaches its own service reaches itself.
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
            { "type": "portmap", "capabilities": { "portMappings": true } },
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
