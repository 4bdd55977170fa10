//! A DHCP server (RFC 2131) with one fixed address for each machine.
//!
//! Leases are short, so that machines renew often: a changed address takes effect at the next renewal, which gets a
//! NAK, so that the machine requests a new lease. Unknown machines are not answered. Relays are not supported: there
//! are none on this network.
//!
//! A pure state machine: messages in, messages out, the clock is an input. Messages are encoded by smoltcp.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use smoltcp::wire::{DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress};

use super::learning::Address;

const RENEWAL_TIME: u8 = 58;
const REBINDING_TIME: u8 = 59;
const VENDOR_CLASS: u8 = 60;
const BOOT_FILE: u8 = 67;

/// How the vendor class of firmware begins that boots by HTTP, and that of the answers to it (UEFI, section 24.7).
const HTTP_CLIENT: &[u8] = b"HTTPClient";

/// Some clients and relays drop shorter messages.
const SHORTEST: usize = 300;

/// What the server tells.
#[derive(Debug)]
pub(super) struct Settings {
    /// Its address, and that of the router.
    pub address: Ipv4Addr,
    pub mask: Ipv4Addr,
    pub lease: Duration,
    /// Whether clients are told that this server's address is their resolver, too.
    pub resolves: bool,
    /// What firmware boots by HTTP.
    pub boot_url: Option<String>,
}

/// The server.
#[derive(Debug)]
pub(super) struct Server {
    settings: Settings,
    clients: HashMap<Address, Client>,
}

#[derive(Debug)]
struct Client {
    address: Ipv4Addr,
    lease: Option<Lease>,
    /// The client found its address in use (DECLINE); it is not offered again before this time.
    withheld: Option<Instant>,
    /// Whether the client is answered.
    served: bool,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    address: Ipv4Addr,
    until: Instant,
}

/// A message to a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// The destination; broadcast, if none.
    pub to: Option<(Address, Ipv4Addr)>,
    pub message: Vec<u8>,
}

/// Kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Offer,
    Ack,
    /// To a client that has an address by other means.
    Inform,
    Nak,
}

impl Server {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            clients: HashMap::new(),
        }
    }

    /// Sets the address of a client from now on.
    pub(super) fn assign(&mut self, mac: Address, address: Ipv4Addr) {
        let client = self.clients.entry(mac).or_insert(Client {
            address,
            lease: None,
            withheld: None,
            served: true,
        });
        client.address = address;
        client.withheld = None;
    }

    /// Sets whether this client is answered.
    pub(super) fn serve(&mut self, mac: Address, served: bool) {
        if let Some(client) = self.clients.get_mut(&mac) {
            client.served = served;
        }
    }

    /// Whether this is a client's Ethernet address.
    pub(super) fn knows(&self, mac: Address) -> bool {
        self.clients.contains_key(&mac)
    }

    /// Whether this client is answered.
    pub(super) fn serves(&self, mac: Address) -> bool {
        self.clients.get(&mac).is_some_and(|client| client.served)
    }

    /// The number of a client's address within the network, if the client is answered.
    pub(super) fn number(&self, mac: Address) -> Option<u32> {
        let client = self.clients.get(&mac).filter(|client| client.served)?;
        Some(u32::from(client.address) & !u32::from(self.settings.mask))
    }

    /// The last leased address of a client, while the lease is valid.
    pub(super) fn leased(&self, mac: Address, now: Instant) -> Option<Ipv4Addr> {
        let lease = self.clients.get(&mac)?.lease?;
        (now < lease.until).then_some(lease.address)
    }

    /// The address that a client is reached at: its leased one, or else its assigned one.
    pub(super) fn found_at(&self, mac: Address, now: Instant) -> Option<Ipv4Addr> {
        let assigned = self.clients.get(&mac)?.address;
        Some(self.leased(mac, now).unwrap_or(assigned))
    }

    /// Processes a message from a client. Anything but a valid message of a known client is not answered.
    pub(super) fn take(&mut self, bytes: &[u8], now: Instant) -> Option<Reply> {
        let packet = DhcpPacket::new_checked(bytes).ok()?;
        let query = DhcpRepr::parse(&packet).ok()?;
        if !query.relay_agent_ip.is_unspecified() {
            return None;
        }
        let mac = query.client_hardware_address.0;
        let kind = self.decide(mac, &query, now)?;
        let shown = EthernetAddress(mac);
        match kind {
            Kind::Nak => tracing::info!(mac = %shown, "sent DHCP NAK"),
            _ => tracing::debug!(mac = %shown, ?kind, "DHCP"),
        }
        let boots_by_http = packet
            .options()
            .any(|it| it.kind == VENDOR_CLASS && it.data.starts_with(HTTP_CLIENT));
        self.reply(kind, mac, &query, boots_by_http)
    }

    fn decide(&mut self, mac: Address, query: &DhcpRepr<'_>, now: Instant) -> Option<Kind> {
        let us = self.settings.address;
        let client = self.clients.get_mut(&mac).filter(|client| client.served)?;
        let ours = query.server_identifier.is_none_or(|server| server == us);
        match query.message_type {
            DhcpMessageType::Discover => match client.withheld {
                Some(until) if now < until => None,
                _ => Some(Kind::Offer),
            },
            // For another server; the client may accept that one's offer.
            DhcpMessageType::Request if !ours => None,
            DhcpMessageType::Request => {
                // Selecting and rebooting clients name the requested address; those that renew and rebind have it.
                let wanted = match query.requested_ip {
                    Some(wanted) => wanted,
                    None => query.client_ip,
                };
                if wanted != client.address {
                    // The client gives up its address when it gets the NAK.
                    client.lease = None;
                    return Some(Kind::Nak);
                }
                client.lease = Some(Lease {
                    address: wanted,
                    until: now + self.settings.lease,
                });
                Some(Kind::Ack)
            }
            DhcpMessageType::Decline if ours => {
                let mac = EthernetAddress(mac);
                tracing::warn!(%mac, address = %client.address, "DHCP DECLINE: the machine found its address in use");
                client.lease = None;
                client.withheld = Some(now + self.settings.lease);
                None
            }
            DhcpMessageType::Release if ours => {
                client.lease = None;
                None
            }
            DhcpMessageType::Inform => Some(Kind::Inform),
            _ => None,
        }
    }

    fn reply(
        &self,
        kind: Kind,
        mac: Address,
        query: &DhcpRepr<'_>,
        boots_by_http: bool,
    ) -> Option<Reply> {
        let address = self.clients.get(&mac)?.address;
        let seconds = u32::try_from(self.settings.lease.as_secs()).unwrap_or(u32::MAX);
        let renew = (seconds / 2).to_be_bytes();
        let rebind = (u64::from(seconds) * 7 / 8) as u32;
        let rebind = rebind.to_be_bytes();
        let leases = matches!(kind, Kind::Offer | Kind::Ack);
        let option = |kind: u8, data| DhcpOption { kind, data };
        let mut more = Vec::new();
        if leases {
            more.push(option(RENEWAL_TIME, &renew[..]));
            more.push(option(REBINDING_TIME, &rebind));
        }
        if let Some(url) = self
            .settings
            .boot_url
            .as_ref()
            .filter(|_| leases && boots_by_http)
        {
            more.push(option(VENDOR_CLASS, HTTP_CLIENT));
            more.push(option(BOOT_FILE, url.as_bytes()));
        }
        let tells = kind != Kind::Nak;
        let message = DhcpRepr {
            message_type: match kind {
                Kind::Offer => DhcpMessageType::Offer,
                Kind::Ack | Kind::Inform => DhcpMessageType::Ack,
                Kind::Nak => DhcpMessageType::Nak,
            },
            transaction_id: query.transaction_id,
            secs: 0,
            client_hardware_address: EthernetAddress(mac),
            client_ip: match kind {
                Kind::Ack | Kind::Inform => query.client_ip,
                _ => Ipv4Addr::UNSPECIFIED,
            },
            your_ip: if leases {
                address
            } else {
                Ipv4Addr::UNSPECIFIED
            },
            server_ip: Ipv4Addr::UNSPECIFIED,
            router: tells.then_some(self.settings.address),
            subnet_mask: tells.then_some(self.settings.mask),
            relay_agent_ip: Ipv4Addr::UNSPECIFIED,
            broadcast: query.broadcast,
            requested_ip: None,
            client_identifier: None,
            server_identifier: Some(self.settings.address),
            parameter_request_list: None,
            dns_servers: (tells && self.settings.resolves)
                .then(|| std::iter::once(self.settings.address).collect()),
            max_size: None,
            lease_duration: leases.then_some(seconds),
            renew_duration: None,
            rebind_duration: None,
            additional_options: &more,
        };
        let mut bytes = vec![0; message.buffer_len().max(SHORTEST)];
        // The buffer has the length that the message reported.
        message
            .emit(&mut DhcpPacket::new_unchecked(&mut bytes))
            .ok()?;
        // A client with an address is answered there; one without an address is answered at its Ethernet address,
        // unless it requested broadcast. A NAK is broadcast, since the client's address may belong to another.
        let to = match kind {
            Kind::Nak => None,
            _ if !query.client_ip.is_unspecified() => Some((mac, query.client_ip)),
            _ if query.broadcast => None,
            _ => Some((mac, address)),
        };
        Some(Reply { to, message: bytes })
    }
}

#[cfg(test)]
mod tests;
