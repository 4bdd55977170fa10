use std::time::Duration;

use super::*;
use crate::snapshot::{EmptyBundle, KUBERNETES, check, difference, root};

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

/// The command lines of a program for each version in [`KUBERNETES`].
fn by_version(program: impl Fn(&Bundle) -> Program) -> [String; 3] {
    KUBERNETES.map(|version| {
        let bundle = EmptyBundle::of(version);
        bundle.lines(&program(&bundle.bundle))
    })
}

fn companions(profile: Profile) -> [String; 3] {
    by_version(|bundle| companion(bundle, &root(), Ports::default(), profile))
}

#[test]
fn the_api_server_is_started_as_committed() {
    let [oldest, no_plain_http, newest] =
        by_version(|bundle| apiserver(bundle, &root(), Ports::default(), ADDRESS));
    check(include_str!("../../snapshot/kube-apiserver.txt"), &oldest);
    assert_eq!(difference(&oldest, &no_plain_http), "---insecure-port=0\n");
    assert_eq!(difference(&no_plain_http, &newest), "");
}

#[test]
fn an_api_server_at_an_ipv6_address_listens_on_that_family() {
    let bundle = EmptyBundle::of(KUBERNETES[0]);
    let at = |address| {
        let program = apiserver(&bundle.bundle, &root(), Ports::default(), address);
        bundle.lines(&program)
    };
    let expected = "---advertise-address=192.0.2.7\n---bind-address=0.0.0.0\n\
                    +--advertise-address=2001:db8::7\n+--bind-address=::\n";
    let other = at("2001:db8::7".parse().unwrap());
    assert_eq!(difference(&at(ADDRESS), &other), expected);
}

#[test]
fn the_controller_manager_is_started_as_committed() {
    let [oldest, no_plain_http, newest] = companions(CONTROLLER_MANAGER);
    let committed = include_str!("../../snapshot/kube-controller-manager.txt");
    check(committed, &oldest);
    assert_eq!(difference(&oldest, &no_plain_http), "---port=0\n");
    assert_eq!(difference(&no_plain_http, &newest), "");
}

#[test]
fn the_scheduler_is_started_as_committed() {
    let [oldest, no_plain_http, newest] = companions(SCHEDULER);
    check(include_str!("../../snapshot/kube-scheduler.txt"), &oldest);
    assert_eq!(difference(&oldest, &no_plain_http), "---port=0\n");
    assert_eq!(difference(&no_plain_http, &newest), "");
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
