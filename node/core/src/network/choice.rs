//! Which interface leads, and what the node has from all of them.
//!
//! The first interface in the order of preference that has an address and leads out, that is, has a default route, leads. That
//! is also the one through which the kernel sends what goes elsewhere, since the metrics of the routes are in the same order. If none leads out,
//! the first with an address does: a cluster may live on one network.
//!
//! An address is not left for another of the same interface, and not published while an interface that would lead still asks
//! for its address: other nodes would have to learn that it has moved. The caller bounds the waiting.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use hearth_parameters::Network as Configuration;
use hearth_sys::cidr::Cidr;

/// The maximum number of name servers and of domains in `resolv.conf`: resolvers ignore more.
const MOST_NAMESERVERS: usize = 8;
const MOST_DOMAINS: usize = 6;

/// What an interface has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The name of the interface.
    pub interface: String,
    /// By which other machines can reach this one, in order of preference.
    pub addresses: Vec<Cidr>,
    /// Whether it has a default route.
    pub leads_out: bool,
    /// Whether it may get an address, or a better one, soon.
    pub is_asking: bool,
    /// In bytes.
    pub mtu: u32,
    pub nameservers: Vec<IpAddr>,
    pub domains: Vec<String>,
    pub time_servers: Vec<IpAddr>,
}

/// What the node has from its interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// The name of the interface that leads.
    pub interface: String,
    /// Its first address.
    pub address: Cidr,
    /// Its first address of the other family.
    pub second: Option<IpAddr>,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Of all interfaces, that which leads first.
    pub nameservers: Vec<IpAddr>,
    pub domains: Vec<String>,
    pub time_servers: Vec<IpAddr>,
}

/// Decides; `None` if there is no address, or if it is better to wait.
pub(super) fn choose(
    seen: &BTreeMap<usize, Seen>,
    current: Option<IpAddr>,
    may_wait: bool,
) -> Option<Choice> {
    let with_address = || seen.iter().filter(|(_, one)| !one.addresses.is_empty());
    let leads_out = |(_, one): &(&usize, &Seen)| one.leads_out;
    let (order, lead) = with_address()
        .find(leads_out)
        .or_else(|| with_address().next())?;
    let would_be_better = |(other, one): (&usize, &Seen)| {
        let is_preferred = other <= order || !lead.leads_out;
        one.is_asking && is_preferred
    };
    if may_wait && seen.iter().any(would_be_better) {
        return None;
    }
    let is_current = |cidr: &&Cidr| Some(cidr.address()) == current;
    let kept = lead.addresses.iter().find(is_current);
    let address = *kept.or(lead.addresses.first())?;
    let mut others = lead.addresses.iter().map(Cidr::address);
    let second = others.find(|other| other.is_ipv4() != address.address().is_ipv4());
    let rest = seen.values().filter(|one| !std::ptr::eq(*one, lead));
    let all: Vec<&Seen> = std::iter::once(lead).chain(rest).collect();
    Some(Choice {
        interface: lead.interface.clone(),
        address,
        second,
        mtu: lead.mtu,
        nameservers: each_once(all.iter().flat_map(|one| &one.nameservers)),
        domains: each_once(all.iter().flat_map(|one| &one.domains)),
        time_servers: each_once(all.iter().flat_map(|one| &one.time_servers)),
    })
}

fn each_once<'a, T: Clone + PartialEq + 'a>(all: impl Iterator<Item = &'a T>) -> Vec<T> {
    let mut found = Vec::new();
    for one in all {
        if !found.contains(one) {
            found.push(one.clone());
        }
    }
    found
}

impl Choice {
    /// The content of `resolv.conf`: what is configured, before what was leased.
    pub(super) fn resolv_conf(&self, configured: &Configuration) -> String {
        let nameservers = configured.nameservers.iter().chain(&self.nameservers);
        let domains = configured.search_domains.iter().chain(&self.domains);
        let mut nameservers = each_once(nameservers);
        let mut domains = each_once(domains);
        nameservers.truncate(MOST_NAMESERVERS);
        domains.truncate(MOST_DOMAINS);
        let mut text = String::new();
        for server in nameservers {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "nameserver {server}");
        }
        if !domains.is_empty() {
            let _ = writeln!(text, "search {}", domains.join(" "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn one(addresses: &[&str], leads_out: bool) -> Seen {
        Seen {
            interface: addresses.join("+"),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            leads_out,
            mtu: 1500,
            ..Seen::default()
        }
    }

    fn asking() -> Seen {
        Seen {
            is_asking: true,
            ..Seen::default()
        }
    }

    fn chosen(seen: &[Seen], current: Option<&str>, may_wait: bool) -> Option<String> {
        let seen = seen.iter().cloned().enumerate().collect();
        let current = current.map(|text| text.parse().unwrap());
        choose(&seen, current, may_wait).map(|choice| choice.address.to_string())
    }

    const A: &str = "192.0.2.1/24";
    const B: &str = "198.51.100.1/24";
    const SIX: &str = "2001:db8::1/64";

    #[test]
    fn the_first_that_leads_out_leads() {
        let here = || one(&[A], false);
        for (seen, expected) in [
            (vec![], None),
            (vec![asking()], None),
            (vec![here()], Some(A)),
            (vec![here(), one(&[B], true)], Some(B)),
            (vec![one(&[A], true), one(&[B], true)], Some(A)),
            (vec![here(), one(&[B], false)], Some(A)),
            (vec![Seen::default(), one(&[B], false)], Some(B)),
        ] {
            let found = chosen(&seen, None, false);
            assert_eq!(found.as_deref(), expected, "{seen:?}");
        }
    }

    #[test]
    fn whoever_would_lead_is_waited_for_but_nobody_else() {
        let leads = || one(&[A], true);
        let here = || one(&[A], false);
        let only_v6 = Seen {
            is_asking: true,
            ..one(&[SIX], true)
        };
        for (seen, waits) in [
            (vec![asking(), leads()], true),
            (vec![leads(), asking()], false),
            (vec![here(), asking()], true),
            (vec![asking(), here()], true),
            // Its own lease of IPv4.
            (vec![only_v6], true),
            (vec![leads()], false),
        ] {
            assert_eq!(chosen(&seen, None, true).is_none(), waits, "{seen:?}");
            assert!(chosen(&seen, None, false).is_some());
        }
    }

    #[test]
    fn an_address_is_not_left_for_another_of_its_interface() {
        let both = [one(&[A, SIX], true)];
        assert_eq!(chosen(&both, None, false).as_deref(), Some(A));
        let six = Some("2001:db8::1");
        assert_eq!(chosen(&both, six, false).as_deref(), Some(SIX));
        let seen = both.into_iter().enumerate().collect();
        let choice = choose(&seen, six.map(|text| text.parse().unwrap()), false).unwrap();
        assert_eq!(choice.second, "192.0.2.1".parse().ok());
        // But for one of an interface that is preferred.
        let both = [one(&[A], true), one(&[SIX], true)];
        assert_eq!(chosen(&both, six, false).as_deref(), Some(A));
    }

    #[test]
    fn what_is_configured_comes_before_what_was_leased() {
        let with = |server: &str, domain: &str| Seen {
            nameservers: vec![server.parse().unwrap()],
            domains: vec![domain.into()],
            ..one(&[A], server.ends_with('2'))
        };
        let seen = [
            with("192.0.2.1", "a.example"),
            with("192.0.2.2", "b.example"),
        ];
        let seen = seen.into_iter().enumerate().collect();
        let choice = choose(&seen, None, false).unwrap();
        let configured = Configuration {
            nameservers: vec!["192.0.2.53".parse().unwrap(), "192.0.2.1".parse().unwrap()],
            search_domains: vec!["example.org".into()],
            ..Configuration::default()
        };
        assert_eq!(
            choice.resolv_conf(&configured),
            "nameserver 192.0.2.53\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n\
             search example.org b.example a.example\n"
        );
        let many = Configuration {
            nameservers: (0..20)
                .map(|last| IpAddr::from([192, 0, 2, last]))
                .collect(),
            ..Configuration::default()
        };
        assert_eq!(choice.resolv_conf(&many).matches("nameserver").count(), 8);
    }

    fn any_seen() -> impl Strategy<Value = Seen> {
        let addresses = prop_oneof![
            Just(vec![]),
            Just(vec![A]),
            Just(vec![SIX]),
            Just(vec![B, SIX])
        ];
        (addresses, any::<bool>(), any::<bool>()).prop_map(|(addresses, leads_out, is_asking)| {
            Seen {
                is_asking,
                ..one(&addresses, leads_out)
            }
        })
    }

    proptest! {
        /// Waiting only delays: an address is published if there is one, and the decision is the same.
        #[test]
        fn there_is_an_address_if_any_interface_has_one(seen in vec(any_seen(), 0..4)) {
            let patient = chosen(&seen, None, true);
            let at_once = chosen(&seen, None, false);
            let any = seen.iter().any(|one| !one.addresses.is_empty());
            prop_assert_eq!(at_once.is_some(), any);
            prop_assert!(patient.is_none() || patient == at_once);
            if !seen.iter().any(|one| one.is_asking) {
                prop_assert_eq!(patient, at_once);
            }
        }

        /// What was chosen stays chosen as long as nothing changes.
        #[test]
        fn a_choice_is_stable(seen in vec(any_seen(), 1..4)) {
            if let Some(first) = chosen(&seen, None, false) {
                let address = first.split('/').next();
                prop_assert_eq!(chosen(&seen, address, false), Some(first.clone()));
            }
        }
    }
}
