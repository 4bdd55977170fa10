//! Which addresses machines may send from, and which they reach.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{Target, WayOut};
use crate::NetworkOptions;

/// The rules for addresses.
#[derive(Debug)]
pub(crate) struct Policy {
    options: NetworkOptions,
    aliases: BTreeMap<IpAddr, IpAddr>,
}

impl Policy {
    pub(crate) fn new(options: &NetworkOptions, way_out: &WayOut) -> Self {
        Self {
            options: options.clone(),
            aliases: way_out.aliases.clone(),
        }
    }

    /// An alias that would not be reached, because it is an address of the subnet, or one that is never translated.
    pub(crate) fn bad_alias(&self) -> Option<IpAddr> {
        let mut aliases = self.aliases.keys();
        aliases.find(|alias| !self.is_outside(**alias)).copied()
    }

    /// Whether the sender's address is that of a machine of this network.
    pub(super) fn may_send(&self, from: IpAddr) -> bool {
        match from {
            IpAddr::V4(from) => self.options.may_have(from),
            IpAddr::V6(from) => self.options.may_have6(from),
        }
    }

    /// Where the host reaches a remote endpoint; `None` if machines do not.
    pub(super) fn target(&self, remote: SocketAddr) -> Option<Target> {
        if let Some(address) = self.aliases.get(&remote.ip()) {
            return Some(Target::Alias(SocketAddr::new(*address, remote.port())));
        }
        self.is_outside(remote.ip())
            .then_some(Target::Outside(remote))
    }

    fn is_outside(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => is_unicast_v4(address) && !self.options.is_inside(address),
            IpAddr::V6(address) => is_unicast_v6(address) && !self.options.is_inside6(address),
        }
    }
}

/// Whether an address is that of one host which is not this one and not on one of this host's links only.
fn is_unicast_v4(address: Ipv4Addr) -> bool {
    let [first, ..] = address.octets();
    // "This" network, and from multicast on: also reserved addresses and the broadcast address.
    first != 0 && first < 224 && !address.is_loopback() && !address.is_link_local()
}

/// The same. Addresses that contain an IPv4 address are excluded: a host may translate them back.
fn is_unicast_v6(address: Ipv6Addr) -> bool {
    let [first, ..] = address.segments();
    // 2000::/3 and the unique local addresses; neither loopback, mapped, link-local nor multicast.
    first & 0xe000 == 0x2000 && first != 0x2002 || address.is_unique_local()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy(aliases: &[(&str, &str)]) -> Policy {
        let parse = |text: &str| text.parse().expect("an address");
        let way_out = WayOut {
            aliases: aliases.iter().map(|(a, b)| (parse(a), parse(b))).collect(),
            ..WayOut::default()
        };
        Policy::new(&NetworkOptions::default(), &way_out)
    }

    fn reaches(policy: &Policy, address: &str) -> bool {
        let address = address.parse().expect("an address");
        policy.target(SocketAddr::new(address, 443)).is_some()
    }

    #[test]
    fn the_host_itself_and_what_is_no_single_host_are_not_reached() {
        let policy = policy(&[]);
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "127.255.0.53",
            "169.254.169.254",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "10.98.0.1",
            "10.98.0.10",
            "10.98.0.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::7f00:1",
            "fe80::1",
            "ff02::1",
            "2002:7f00:1::1",
            "64:ff9b::7f00:1",
            "fd68:6561:7274::1",
            "fd68:6561:7274::10",
            "fd68:6561:7274::ffff:ffff:ffff:ffff",
        ] {
            assert!(!reaches(&policy, address), "{address}");
        }
        for address in [
            "1.1.1.1",
            "10.98.1.1",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "223.255.255.1",
            "2001:db8::1",
            "fd00::1",
            "fd68:6561:7274:1::1",
        ] {
            assert!(reaches(&policy, address), "{address}");
        }
    }

    #[test]
    fn an_alias_is_the_way_to_the_loopback() {
        let policy = policy(&[("192.0.2.1", "127.0.0.1")]);
        let target = |text: &str| policy.target(text.parse().expect("an address"));
        assert_eq!(
            target("192.0.2.1:80"),
            Some(Target::Alias("127.0.0.1:80".parse().expect("an address")))
        );
        assert_eq!(
            target("192.0.2.2:80"),
            Some(Target::Outside("192.0.2.2:80".parse().expect("an address")))
        );
        assert_eq!(policy.bad_alias(), None);
        for wrong in ["10.98.0.7", "127.0.0.1", "224.0.0.1", "fd68:6561:7274::7"] {
            let policy = self::policy(&[(wrong, "127.0.0.1")]);
            assert_eq!(policy.bad_alias(), wrong.parse().ok());
        }
    }

    proptest! {
        #[test]
        fn without_aliases_the_target_is_what_was_addressed(address: u32, port: u16) {
            let remote = SocketAddr::new(Ipv4Addr::from(address).into(), port);
            match policy(&[]).target(remote) {
                None => {}
                Some(target) => prop_assert_eq!(target, Target::Outside(remote)),
            }
            let inside = Ipv4Addr::from(0x0a62_0000 | address & 0xff);
            prop_assert_eq!(policy(&[]).target(SocketAddr::new(inside.into(), port)), None);
            let loopback = Ipv4Addr::from(0x7f00_0000 | address & 0xff_ffff);
            prop_assert_eq!(policy(&[]).target(SocketAddr::new(loopback.into(), port)), None);
        }
    }
}
