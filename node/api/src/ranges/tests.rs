use proptest::prelude::*;

use super::*;

fn settings(pods: &str, services: &str) -> KubernetesConfiguration {
    let list = |text: &str| match text {
        "" => Vec::new(),
        text => text.split(',').map(str::to_owned).collect(),
    };
    KubernetesConfiguration {
        pod_ranges: list(pods),
        service_ranges: list(services),
        ..KubernetesConfiguration::default()
    }
}

fn of(pods: &str, services: &str) -> Result<ClusterRanges, String> {
    ClusterRanges::of(&settings(pods, services)).map_err(|error| error.to_string())
}

const PODS: &str = "10.208.0.0/12,fd00:1:2::/48";
const SERVICES: &str = "10.224.0.0/16,fd00:1:3::/108";

#[test]
fn a_cluster_has_ipv4_and_may_have_ipv6() {
    let usual = of("", "").unwrap();
    assert_eq!(usual, ClusterRanges::DEFAULT);
    assert_eq!(usual.pods_text(), DEFAULT_POD_RANGES.concat());
    assert_eq!(usual.services_text(), DEFAULT_SERVICE_RANGES.concat());
    assert_eq!(usual.api_service().to_string(), "10.224.0.1");
    assert_eq!(usual.dns_service().to_string(), "10.224.0.10");
    assert_eq!((usual.nodes(), usual.node_prefix_v6()), (4096, None));

    let dual = of(PODS, SERVICES).unwrap();
    assert_eq!(dual.v4, usual.v4);
    assert_eq!(dual.pods_text(), PODS);
    assert_eq!(dual.services_text(), SERVICES);
    assert_eq!(dual.node_prefix_v6(), Some(64));
    // In any order.
    let (pods, services) = (
        "fd00:1:2::/48,10.208.0.0/12",
        "fd00:1:3::/108,10.224.0.0/16",
    );
    assert_eq!(of(pods, services), Ok(dual));
    // Too small for a /64 each.
    let pods = "10.0.0.0/12,2001:db8:0:100::/56";
    assert_eq!(of(pods, SERVICES).unwrap().node_prefix_v6(), Some(68));
    let few = of("10.1.0.0/20", "").unwrap();
    assert_eq!(few.nodes(), 16);
}

#[test]
fn an_error_says_which_range_is_wrong_and_why() {
    for (pods, services, expected) in [
        (
            "fd00:1:2::/48",
            "fd00:1:3::/108",
            "kubernetes.pod_ranges: expected an IPv4 range, besides one of IPv6 (IPv6 alone is not \
             supported: ",
        ),
        (
            PODS,
            "fd00:1:3::/108",
            "kubernetes.service_ranges: expected an IPv4 range, besides one of IPv6",
        ),
        (
            PODS,
            "",
            "kubernetes.service_ranges: expected an IPv6 range, too, because kubernetes.pod_ranges \
             has one, got \"10.224.0.0/16\"",
        ),
        (
            "",
            SERVICES,
            "kubernetes.pod_ranges: expected an IPv6 range, too, because \
             kubernetes.service_ranges has one, got \"10.208.0.0/12\"",
        ),
        (
            "10.0.0.0/8",
            "",
            "kubernetes.service_ranges: expected a range that does not overlap with 10.0.0.0/8 of the \
             pods, got \"10.224.0.0/16\"",
        ),
        (
            "10.208.0.0/12,fd00:1::/48",
            "10.224.0.0/16,fd00:1::/112",
            "kubernetes.service_ranges: expected a range that does not overlap with fd00:1::/48",
        ),
        (
            "10.208.0.0/12,10.0.0.0/16",
            "",
            "kubernetes.pod_ranges[1]: expected one range of each family at most, got \"10.0.0.0/16\"",
        ),
        (
            "10.208.0.0/12,fd00:1::/47",
            SERVICES,
            "kubernetes.pod_ranges[1]: expected a range of unicast addresses by its first one: ",
        ),
        (
            PODS,
            "10.224.0.0/16,fd00:2::/64",
            "kubernetes.service_ranges[1]: expected a range of unicast addresses",
        ),
    ] {
        let found = of(pods, services).unwrap_err();
        assert!(found.starts_with(expected), "{found}");
    }
}

#[test]
fn only_ranges_of_machines_addresses_are_accepted() {
    for good in ["10.0.0.0/8", "100.64.0.0/10", "192.168.0.0/22", "fd00::/64"] {
        assert!(is_pod_range(good), "{good}");
    }
    for bad in [
        "",
        "10.0.0.0",
        "10.0.0.1/8",
        "10.0.0.0/08",
        "10.0.0.0/+8",
        "10.0.0.0/7",
        "10.0.0.0/24",
        "127.0.0.0/8",
        "126.0.0.0/7",
        "169.254.0.0/16",
        "169.0.0.0/8",
        "224.0.0.0/8",
        "0.0.0.0/8",
        "fe80::/64",
        "ff02::/64",
        "::/48",
        "fd00:0::/64",
        "FD00::/64",
        "fd00::1/64",
        "fd00::/65",
        "::ffff:10.0.0.0/48",
    ] {
        assert!(!is_pod_range(bad), "{bad}");
    }
    assert!(is_service_range("10.224.0.0/12") && !is_service_range("10.224.0.0/11"));
    assert!(is_service_range("2001:db8::/112") && !is_service_range("2001:db8::/104"));
}

proptest! {
    /// Parts are disjoint, in the range, and found again by their first address.
    #[test]
    fn parts_of_a_range(bits: u128, prefix in 48_u8..=64, longer in 0_u8..=16, index: u16) {
        let range = Range { first: Ipv6Addr::from_bits(bits), prefix };
        let range = Range { first: Ipv6Addr::from_bits(bits & range.mask()), prefix };
        let index = u32::from(index);
        let part = range.part(prefix + longer, index);
        prop_assert_eq!(part.is_some(), index < 1 << longer);
        if let Some(part) = part {
            prop_assert!(range.contains(part.first()) && range.contains(part.last()));
            prop_assert_eq!(range.index_of(part.first(), part.prefix()), Some(index));
            prop_assert_eq!(Range::parse(&part.to_string()), Some(part));
            if let Some(next) = range.part(prefix + longer, index + 1) {
                prop_assert!(!part.overlaps(next));
            }
        }
    }

    /// Every node that has an IPv4 range has one of IPv6.
    #[test]
    fn there_are_enough_parts_of_ipv6(v4 in 8_u8..=22, v6 in 48_u8..=64) {
        let pods = format!("10.0.0.0/{v4},fd00::/{v6}");
        let services = "192.168.0.0/24,fd01::/112";
        let ranges = of(&pods, services).unwrap();
        let prefix = ranges.node_prefix_v6().unwrap();
        let last = ranges.nodes() - 1;
        prop_assert!(ranges.v6.unwrap().pods.part(prefix, last).is_some());
        prop_assert!((64..=80).contains(&prefix));
        // What Kubernetes' own controller can number.
        prop_assert!(prefix - v6 <= 16);
    }

    #[test]
    fn arbitrary_texts_are_judged_without_harm(pods: String, services: String) {
        let _ = of(&pods, &services);
    }
}
