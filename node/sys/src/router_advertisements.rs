//! What IPv6 routers advertise beside addresses and routes: name servers and search domains (RFC 8106), and whether there are
//! servers of DHCPv6 (RFC 4861, section 4.2).
//!
//! The kernel makes addresses and routes of router advertisements (RFC 4861, RFC 4862) and leaves the rest to others. So
//! the same messages are read here, from a packet socket that passes nothing else.
//!
//! ```text
//! frame ─► [`decode`] ─► [`Learned`]: each entry with the time until which it holds ─► [`Listener`]
//! ```
//!
//! - What a neighbour cannot have sent is not believed: the hop limit is 255, so no router has forwarded the message, and its source is
//!   an address of the link.
//! - A lifetime of zero ends an entry at once, and so does its end. There are never more entries than a resolver uses.
//! - A router advertises by itself only every few minutes, so it is asked when this begins, as the kernel does when a cable comes.
//! - Of DHCPv6, the last word of each router counts, and of several routers the one that says most. A router's silence says nothing.
//! - A server with an address of the link is left out: name servers are written down without the interface.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use hearth_base::deadline;

use crate::announce::{self, ICMPV6, IPV6};
use crate::dhcp::domains;
use crate::raw::{self, FilterStep, Watched};

/// Most name servers, as of a lease.
pub(crate) const MOST_SERVERS: usize = 8;
/// Most routers whose word counts.
const MOST_ROUTERS: usize = 8;
/// The group of all routers of a link, and its Ethernet address.
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
const ALL_ROUTERS_HARDWARE: [u8; 6] = [0x33, 0x33, 0, 0, 0, 2];
/// How often routers are asked, and how long each has for its answer (RFC 4861, section 10).
const SOLICITATIONS: u32 = 3;
const SOLICITATION_INTERVAL: Duration = Duration::from_secs(4);

/// No Ethernet frame of the usual kind is longer. What is in a longer one of another kind is cut off, and then not valid.
const FRAME: usize = 1514;
const ETHERNET: usize = 14;
const IP: usize = 40;
const ADVERTISEMENT: u8 = 134;
const SOLICITATION: u8 = 133;
const HOP_LIMIT: u8 = 255;
/// Bytes of the message before its options.
const FIXED: usize = 16;
/// Where the flags of the message are, and the two that speak of DHCPv6.
const FLAGS: usize = 5;
const MANAGED: u8 = 0x80;
const OTHER: u8 = 0x40;
const RDNSS: u8 = 25;
const DNSSL: u8 = 31;
/// A lifetime without an end.
const INFINITE: u32 = u32::MAX;

/// What routers say of DHCPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Offered {
    /// Nothing.
    #[default]
    Nothing,
    /// Servers know name servers and the like.
    Information,
    /// Servers have addresses, too.
    Addresses,
}

/// What an advertisement says. Name servers and domains have the seconds for which they hold from then on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advertisement {
    /// Who has sent it.
    pub router: Ipv6Addr,
    /// Of DHCPv6.
    pub offered: Offered,
    /// Name servers, in order of preference.
    pub servers: Vec<(Ipv6Addr, u32)>,
    /// Domains in which names are looked up, in their order.
    pub domains: Vec<(String, u32)>,
}

/// Decodes an Ethernet frame. `None` for what is not a valid advertisement.
pub fn decode(frame: &[u8]) -> Option<Advertisement> {
    let ip = frame.get(ETHERNET..)?;
    let header: &[u8; IP] = ip.first_chunk()?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let address = |at: usize| {
        let octets: Option<[u8; 16]> = header[at..at + 16].try_into().ok();
        octets.map(Ipv6Addr::from)
    };
    let (from, to) = (address(8)?, address(24)?);
    let is_of_neighbour =
        header[0] >> 4 == 6 && header[6..8] == [ICMPV6, HOP_LIMIT] && from.is_unicast_link_local();
    let message = ip.get(IP..IP + length)?;
    let is_valid = is_of_neighbour
        && message.len() >= FIXED
        && message[..2] == [ADVERTISEMENT, 0]
        && announce::icmpv6_checksum(from, to, message) == 0;
    if !is_valid {
        return None;
    }
    let mut advertisement = Advertisement {
        router: from,
        offered: match message[FLAGS] {
            flags if flags & MANAGED != 0 => Offered::Addresses,
            flags if flags & OTHER != 0 => Offered::Information,
            _ => Offered::Nothing,
        },
        servers: Vec::new(),
        domains: Vec::new(),
    };
    let mut rest = &message[FIXED..];
    while !rest.is_empty() {
        let units = usize::from(*rest.get(1)?);
        // With a length of zero, nothing of the message is valid.
        let option = rest.get(..8 * units).filter(|_| units > 0)?;
        rest = &rest[option.len()..];
        advertisement.add(option);
    }
    Some(advertisement)
}

impl Advertisement {
    /// Takes an option; one that is malformed or of another kind has no part in it.
    fn add(&mut self, option: &[u8]) {
        let Some((head, content)) = option.split_first_chunk::<8>() else {
            return;
        };
        let lifetime = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        match head[0] {
            RDNSS => {
                let servers = servers(content).map(|it| (it, lifetime));
                self.servers.extend(servers);
            }
            DNSSL => {
                let domains = domains::list(content).into_iter();
                self.domains.extend(domains.map(|it| (it, lifetime)));
            }
            _ => {}
        }
    }
}

/// The usable servers of a list of addresses.
pub(crate) fn servers(content: &[u8]) -> impl Iterator<Item = Ipv6Addr> + '_ {
    let addresses = content.as_chunks::<16>().0.iter().copied();
    addresses
        .map(Ipv6Addr::from)
        .filter(|it| !it.is_unicast_link_local() && !it.is_multicast() && !it.is_unspecified())
}

/// What holds of all advertisements so far.
#[derive(Debug, Default)]
pub struct Learned {
    routers: BTreeMap<Ipv6Addr, Offered>,
    servers: Entries<Ipv6Addr>,
    domains: Entries<String>,
}

impl Learned {
    /// Takes an advertisement. Whether what holds has changed.
    pub fn take(&mut self, advertisement: &Advertisement, now: Instant) -> bool {
        let Advertisement {
            router,
            offered,
            servers,
            domains,
        } = advertisement;
        let before = self.offered();
        if self.routers.len() < MOST_ROUTERS || self.routers.contains_key(router) {
            self.routers.insert(*router, *offered);
        }
        let servers = self.servers.take(servers, MOST_SERVERS, now);
        let domains = self.domains.take(domains, domains::MOST, now);
        before != self.offered() || servers || domains
    }

    /// Forgets what holds no more. Whether there was something.
    pub fn expire(&mut self, now: Instant) -> bool {
        let servers = self.servers.expire(now);
        let domains = self.domains.expire(now);
        servers || domains
    }

    /// When the next entry ends.
    pub fn next_end(&self) -> Option<Instant> {
        let ends = [self.servers.next_end(), self.domains.next_end()];
        ends.into_iter().flatten().min()
    }

    /// What there is of DHCPv6.
    pub fn offered(&self) -> Offered {
        let all = self.routers.values().copied();
        all.max().unwrap_or_default()
    }

    /// The name servers, in order of preference.
    pub fn servers(&self) -> Vec<Ipv6Addr> {
        self.servers.values()
    }

    /// The domains in which names are looked up, in their order.
    pub fn domains(&self) -> Vec<String> {
        self.domains.values()
    }
}

/// Values in the order in which they were heard of, and when each ends; never, if there is no time.
#[derive(Debug)]
struct Entries<T>(Vec<(T, Option<Instant>)>);

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone + Eq> Entries<T> {
    fn take(&mut self, heard: &[(T, u32)], most: usize, now: Instant) -> bool {
        let before = self.values();
        self.expire(now);
        for (value, lifetime) in heard {
            let end = match *lifetime {
                INFINITE => None,
                seconds => Some(now + Duration::from_secs(seconds.into())),
            };
            let known = self.0.iter().position(|(known, _)| known == value);
            match (known, lifetime) {
                (Some(at), 0) => drop(self.0.remove(at)),
                (Some(at), _) => self.0[at].1 = end,
                (None, 0) => {}
                (None, _) if self.0.len() < most => self.0.push((value.clone(), end)),
                // A flood of servers does not push out those that are in use.
                (None, _) => {}
            }
        }
        before != self.values()
    }

    fn expire(&mut self, now: Instant) -> bool {
        let before = self.0.len();
        self.0.retain(|(_, end)| end.is_none_or(|end| end > now));
        before != self.0.len()
    }

    fn next_end(&self) -> Option<Instant> {
        self.0.iter().filter_map(|(_, end)| *end).min()
    }

    fn values(&self) -> Vec<T> {
        self.0.iter().map(|(value, _)| value.clone()).collect()
    }
}

/// Hears what the routers at one interface advertise.
pub struct Listener {
    socket: Watched,
    learned: Learned,
    solicitation: Vec<u8>,
    /// How often routers are still asked, and when the next time.
    left: u32,
    ask_at: Instant,
}

impl Listener {
    /// Starts to listen at the interface with this index and hardware address. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the interface does not exist or is down, or this process may not open packet sockets.
    pub fn open(interface: u32, mac: [u8; 6]) -> io::Result<Self> {
        let socket = raw::packet_socket(interface, IPV6, &ADVERTISEMENTS)?;
        let message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        Ok(Self {
            socket: Watched::new(socket)?,
            learned: Learned::default(),
            solicitation: announce::icmpv6(
                (ALL_ROUTERS_HARDWARE, mac),
                (Ipv6Addr::UNSPECIFIED, ALL_ROUTERS),
                message,
            ),
            left: SOLICITATIONS,
            ask_at: Instant::now(),
        })
    }

    /// What holds now.
    pub fn learned(&self) -> &Learned {
        &self.learned
    }

    /// Waits until that changes. Cancel safe.
    ///
    /// # Errors
    /// If the socket fails.
    pub async fn changed(&mut self) -> io::Result<()> {
        let mut frame = [0; FRAME];
        loop {
            let ask_at = (self.left > 0).then_some(self.ask_at);
            let next = [ask_at, self.learned.next_end()]
                .into_iter()
                .flatten()
                .min();
            let length = tokio::select! {
                read = self.socket.read(&mut frame) => match read {
                    Ok(length) => length,
                    // Reported once when the interface goes down. What routers have said before counts until it ends.
                    Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => continue,
                    Err(error) => return Err(error),
                },
                () = deadline::passed(next.map(Into::into)) => 0,
            };
            let now = Instant::now();
            let mut has_changed = self.learned.expire(now);
            if let Some(advertisement) = decode(&frame[..length]) {
                self.left = 0;
                has_changed |= self.learned.take(&advertisement, now);
            } else if self.left > 0 && self.ask_at <= now {
                self.ask(now);
            }
            if has_changed {
                return Ok(());
            }
        }
    }

    /// Asks the routers for an advertisement. A link that is down asks nobody.
    fn ask(&mut self, now: Instant) {
        self.left -= 1;
        self.ask_at = now + SOLICITATION_INTERVAL;
        if let Err(error) = self.socket.write(&self.solicitation) {
            tracing::debug!(%error, "cannot ask for router advertisements");
        }
    }
}

/// Passes the advertisements of neighbours only: IPv6 packets without extension headers.
const ADVERTISEMENTS: [FilterStep; 8] = [
    (0x30, 0, 0, (ETHERNET + 6) as u32), // next header
    (0x15, 0, 5, ICMPV6 as u32),
    (0x30, 0, 0, (ETHERNET + 7) as u32),
    (0x15, 0, 3, HOP_LIMIT as u32),
    (0x30, 0, 0, (ETHERNET + IP) as u32), // type
    (0x15, 0, 1, ADVERTISEMENT as u32),
    (0x06, 0, 0, FRAME as u32), // pass
    (0x06, 0, 0, 0),            // drop
];

/// For tests and fuzz targets.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use super::*;

    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    const MACS: ([u8; 6], [u8; 6]) = ([0x33, 0x33, 0, 0, 0, 1], [2, 0, 0, 0, 0, 1]);

    /// A frame with an advertisement of this router with these flags, valid if its options are.
    pub fn frame_of(router: Ipv6Addr, flags: u8, options: &[u8]) -> Vec<u8> {
        let mut message = vec![ADVERTISEMENT, 0, 0, 0, 64, flags, 0x07, 0x08];
        message.extend([0; 8]);
        message.extend(options);
        announce::icmpv6(MACS, (router, ALL_NODES), message)
    }
}

#[cfg(test)]
mod tests;
