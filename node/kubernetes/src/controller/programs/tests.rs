use std::time::Duration;

use hearth_api::testing::dual_stack_ranges;

use super::*;
use crate::snapshot::{EmptyBundle, KUBERNETES, check, difference, root};

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

/// The program is started as committed, in each version of [`KUBERNETES`].
#[track_caller]
fn is_as_committed(committed: &str, program: impl Fn(&Bundle) -> Program) {
    for version in KUBERNETES {
        let bundle = EmptyBundle::of(version);
        check(committed, &bundle.lines(&program(&bundle.bundle)));
    }
}

fn with_address(bundle: &Bundle, address: IpAddr) -> Program {
    with_ranges(bundle, address, &ClusterRanges::DEFAULT)
}

fn with_ranges(bundle: &Bundle, address: IpAddr, ranges: &ClusterRanges) -> Program {
    let ports = Ports::default();
    apiserver(
        bundle,
        &root(),
        ports,
        (address, ranges),
        AuditLevel::Metadata,
    )
}

#[test]
fn the_programs_are_started_as_committed() {
    let network = (PodNetwork::BuiltIn, &ClusterRanges::DEFAULT);
    let companion = |profile| {
        move |bundle: &Bundle| companion(bundle, &root(), Ports::default(), profile, network)
    };
    is_as_committed(
        include_str!("../../snapshot/kube-apiserver.txt"),
        |bundle| with_address(bundle, ADDRESS),
    );
    is_as_committed(
        include_str!("../../snapshot/kube-controller-manager.txt"),
        companion(CONTROLLER_MANAGER),
    );
    is_as_committed(
        include_str!("../../snapshot/kube-scheduler.txt"),
        companion(SCHEDULER),
    );
}

#[test]
fn another_pod_network_gets_the_ranges_of_the_nodes() {
    let bundle = EmptyBundle::of(KUBERNETES[0]);
    let with = |network, ranges| {
        let (root, ports, pods) = (root(), Ports::default(), (network, ranges));
        let program = companion(&bundle.bundle, &root, ports, CONTROLLER_MANAGER, pods);
        bundle.lines(&program)
    };
    let expected = "---allocate-node-cidrs=false\n+--allocate-node-cidrs=true\n\
                    +--cluster-cidr=10.208.0.0/12\n";
    let (usual, dual) = (&ClusterRanges::DEFAULT, &dual_stack_ranges());
    let built_in = with(PodNetwork::BuiltIn, usual);
    let other = with(PodNetwork::None, usual);
    assert_eq!(difference(&built_in, &other), expected);
    assert_eq!(with(PodNetwork::BuiltIn, dual), built_in);
    let expected = "---cluster-cidr=10.208.0.0/12\n+--cluster-cidr=10.208.0.0/12,fd00:1::/48\n\
                    +--node-cidr-mask-size-ipv4=24\n+--node-cidr-mask-size-ipv6=64\n";
    assert_eq!(difference(&other, &with(PodNetwork::None, dual)), expected);
}

#[test]
fn services_of_a_dual_stack_cluster_have_both_families() {
    let bundle = EmptyBundle::of(KUBERNETES[0]);
    let with = |ranges| bundle.lines(&with_ranges(&bundle.bundle, ADDRESS, ranges));
    let expected = "---service-cluster-ip-range=10.224.0.0/16\n\
                    +--service-cluster-ip-range=10.224.0.0/16,fd00:2::/112\n";
    let (one, both) = (with(&ClusterRanges::DEFAULT), with(&dual_stack_ranges()));
    assert_eq!(difference(&one, &both), expected);
}

#[test]
fn an_api_server_listens_on_both_families_whatever_its_address_is() {
    let bundle = EmptyBundle::of(KUBERNETES[0]);
    let at = |address| {
        let program = with_address(&bundle.bundle, address);
        bundle.lines(&program)
    };
    let expected = "---advertise-address=192.0.2.7\n+--advertise-address=2001:db8::7\n";
    let other = at("2001:db8::7".parse().unwrap());
    assert_eq!(difference(&at(ADDRESS), &other), expected);
}

/// Without a quorum the API server reports unhealthy for as long as there is none.
#[test]
fn only_the_api_server_may_be_unhealthy_for_long() {
    let limits = |profile: Profile| profile.health.unhealthy_after;
    assert_eq!(limits(APISERVER), Duration::from_secs(30 * 60));
    for other in [CONTROLLER_MANAGER, SCHEDULER] {
        assert_eq!(limits(other), Duration::from_secs(2 * 60));
    }
}
