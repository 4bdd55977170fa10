//! Clusters whose pods, services and machines have IPv6, too.
//!
//! Nothing on the emulated network gives machines an IPv6 address, so each one has both of its addresses in its
//! parameters: the IPv4 address that DHCP would have given it, by which this host reaches it, and one of the network's
//! IPv6 subnet.

use std::net::{Ipv4Addr, Ipv6Addr};

use hearth_api::ranges::{DEFAULT_POD_RANGES, DEFAULT_SERVICE_RANGES};
use hearth_api::v1::network_config::Route;
use hearth_api::v1::{ClusterConfiguration, NetworkConfig};
use hearth_qemu::switch::NetworkOptions;

/// The range of pods in IPv6, beside the network's subnet. Those of IPv4 are the default ones.
const PODS: &str = "fd68:6561:7275::/48";
/// The same of services.
const SERVICES: &str = "fd68:6561:7276::/112";

/// Gives a cluster that is to be founded ranges of both families.
pub fn configure(configuration: &mut ClusterConfiguration) {
    let kubernetes = configuration.kubernetes.get_or_insert_default();
    let both = |v4: &[&str], v6| v4.iter().chain([&v6]).map(|&it| it.to_owned()).collect();
    kubernetes.pod_ranges = both(DEFAULT_POD_RANGES, PODS);
    kubernetes.service_ranges = both(DEFAULT_SERVICE_RANGES, SERVICES);
}

/// The network configuration of the machine with this number: an address of each family, and routes and a resolver by
/// the gateway.
pub fn network_config(options: &NetworkOptions, number: u16) -> NetworkConfig {
    let route = |destination: String, gateway: String| Route {
        destination,
        gateway,
    };
    NetworkConfig {
        addresses: vec![
            format!("{}/{}", options.machine_address(number), options.prefix),
            format!(
                "{}/{}",
                options.machine_address6(number),
                NetworkOptions::PREFIX6
            ),
        ],
        routes: vec![
            route(
                format!("{}/0", Ipv4Addr::UNSPECIFIED),
                options.gateway.to_string(),
            ),
            route(
                format!("{}/0", Ipv6Addr::UNSPECIFIED),
                options.gateway6.to_string(),
            ),
        ],
        nameservers: options
            .way_out
            .iter()
            .map(|_| options.gateway.to_string())
            .collect(),
        ..NetworkConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::ranges::ClusterRanges;
    use hearth_qemu::switch::WayOut;

    use super::*;

    #[test]
    fn ranges_are_valid_and_no_machine_is_in_them() {
        let mut configuration = ClusterConfiguration::default();
        configure(&mut configuration);
        let ranges = ClusterRanges::of(&configuration.kubernetes.unwrap()).unwrap();
        assert!(ranges.v6.is_some());
        let options = NetworkOptions::default();
        for address in [options.gateway6, options.machine_address6(32)] {
            assert!(!ranges.contains(address.into()), "{address}");
        }
    }

    #[test]
    fn a_machine_has_an_address_of_each_family() {
        let options = NetworkOptions {
            way_out: Some(WayOut::default()),
            ..NetworkOptions::default()
        };
        let config = network_config(&options, 2);
        assert_eq!(config.addresses, ["10.98.0.12/24", "fd68:6561:7274::c/64"]);
        assert_eq!(config.routes[1].destination, "::/0");
        assert_eq!(config.routes[1].gateway, "fd68:6561:7274::1");
        assert_eq!(config.nameservers, ["10.98.0.1"]);
        let offline = network_config(&NetworkOptions::default(), 2);
        assert!(offline.nameservers.is_empty());
    }
}
