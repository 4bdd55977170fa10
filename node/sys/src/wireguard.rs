//! WireGuard interfaces: their keys and their peers.
//!
//! An interface is created and removed like any other ([`Netlink`](super::netlink::Netlink)); its
//! WireGuard configuration goes through generic netlink, here. The kernel does the rest: it
//! encrypts each packet for the peer whose networks contain the destination, and drops packets from
//! a peer with source addresses outside of that peer's networks.
//!
//! Peers are updated by their differences ([`Wireguard::set_peers`]), never by clearing the list
//! first: a peer that remains keeps its session, and no packets are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute,
    WireguardCmd, WireguardMessage, WireguardPeer, WireguardPeerAttribute, WireguardPeerFlags,
};
use rtnetlink::packet_core::{
    Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
    ParseableParametrized,
};
use rtnetlink::proto::sys::SocketAddr as Kernel;
use rtnetlink::proto::{ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_GENERIC;
use tokio::task::JoinHandle;

use super::cidr::Cidr;

/// Peers per message to the kernel, which accepts at most 64 KiB at a time.
const PEERS_PER_MESSAGE: usize = 64;

/// Why an interface cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum WireguardError {
    /// The netlink socket cannot be opened.
    #[error("cannot open a generic netlink socket")]
    Open(#[source] io::Error),
    /// The kernel does not support WireGuard.
    #[error("the kernel does not support WireGuard")]
    Absent,
    /// The kernel rejected an operation.
    #[error("cannot {step} of WireGuard interface {link}")]
    Refused {
        /// The operation, as a verb with its object.
        step: &'static str,
        /// The interface.
        link: String,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// A WireGuard peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The public key (Curve25519), which identifies the peer.
    pub key: [u8; 32],
    /// The address of the peer; `None` if the peer has to connect first.
    pub endpoint: Option<SocketAddr>,
    /// The networks of the peer: allowed as source, and routed to it.
    pub networks: BTreeSet<Cidr>,
}

/// A peer as reported by the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The configured peer; its endpoint may have changed since.
    pub peer: Peer,
    /// The time of the last handshake, if any.
    pub handshake: Option<SystemTime>,
}

/// Aborts the task on drop.
#[derive(Debug)]
struct Owned(JoinHandle<()>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A connection to the kernel's WireGuard.
#[derive(Clone, Debug)]
pub struct Wireguard {
    handle: ConnectionHandle<GenlMessage<WireguardMessage>>,
    /// The kernel's number of the netlink family.
    family: u16,
    _connection: Arc<Owned>,
}

impl Wireguard {
    /// Opens the connection. Must be called within a tokio runtime.
    pub async fn open() -> Result<Self, WireguardError> {
        let family = family().await?;
        let (handle, connection) = connect()?;
        Ok(Self {
            handle,
            family,
            _connection: Arc::new(connection),
        })
    }

    /// Sets an interface's private key (Curve25519) and UDP port.
    pub async fn set_device(
        &self,
        link: &str,
        key: &[u8; 32],
        port: u16,
    ) -> Result<(), WireguardError> {
        let attributes = vec![
            WireguardAttribute::PrivateKey(*key),
            WireguardAttribute::ListenPort(port),
        ];
        self.set(link, "set the key and the port", attributes).await
    }

    /// The public key of an interface, if it is set.
    pub async fn public_key(&self, link: &str) -> Result<Option<[u8; 32]>, WireguardError> {
        let attributes = self.get(link).await?;
        let mut keys = attributes.iter().filter_map(|attribute| match attribute {
            WireguardAttribute::PublicKey(key) => Some(*key),
            _ => None,
        });
        Ok(keys.next())
    }

    /// The peers of an interface, by key.
    pub async fn peers(&self, link: &str) -> Result<BTreeMap<[u8; 32], Seen>, WireguardError> {
        let mut peers = BTreeMap::new();
        for attribute in self.get(link).await? {
            let WireguardAttribute::Peers(some) = attribute else {
                continue;
            };
            for peer in some {
                take_in(&mut peers, &peer);
            }
        }
        Ok(peers)
    }

    /// Makes these the only peers of an interface.
    pub async fn set_peers(&self, link: &str, wanted: &[Peer]) -> Result<(), WireguardError> {
        let present = self.peers(link).await?;
        for some in changes(&present, wanted).chunks(PEERS_PER_MESSAGE) {
            let peers = vec![WireguardAttribute::Peers(some.to_vec())];
            self.set(link, "set the peers", peers).await?;
        }
        Ok(())
    }

    async fn set(
        &self,
        link: &str,
        step: &'static str,
        attributes: Vec<WireguardAttribute>,
    ) -> Result<(), WireguardError> {
        let flags = NLM_F_REQUEST | NLM_F_ACK;
        let sent = self.request(link, WireguardCmd::SetDevice, attributes, flags);
        sent.await.map(drop).map_err(refused(step, link))
    }

    async fn get(&self, link: &str) -> Result<Vec<WireguardAttribute>, WireguardError> {
        let flags = NLM_F_REQUEST | NLM_F_DUMP;
        let got = self.request(link, WireguardCmd::GetDevice, Vec::new(), flags);
        got.await.map_err(refused("read the state", link))
    }

    async fn request(
        &self,
        link: &str,
        cmd: WireguardCmd,
        mut attributes: Vec<WireguardAttribute>,
        flags: u16,
    ) -> io::Result<Vec<WireguardAttribute>> {
        attributes.insert(0, WireguardAttribute::IfName(link.to_owned()));
        let message = WireguardMessage { cmd, attributes };
        let answers = ask(&self.handle, message, self.family, flags).await?;
        Ok(answers.into_iter().flat_map(|m| m.attributes).collect())
    }
}

fn refused(step: &'static str, link: &str) -> impl FnOnce(io::Error) -> WireguardError {
    let link = link.to_owned();
    move |source| WireguardError::Refused { step, link, source }
}

#[expect(clippy::disallowed_methods, reason = "Owned aborts the task")]
fn connect<F>() -> Result<(ConnectionHandle<GenlMessage<F>>, Owned), WireguardError>
where
    F: GenlFamily
        + Emitable
        + ParseableParametrized<[u8], GenlHeader>
        + Clone
        + std::fmt::Debug
        + PartialEq
        + Eq
        + Send
        + Unpin
        + 'static,
{
    let connection = new_connection(NETLINK_GENERIC);
    let (connection, handle, _) = connection.map_err(WireguardError::Open)?;
    Ok((handle, Owned(tokio::spawn(connection))))
}

/// The kernel's number of the WireGuard family. It is assigned at boot and does not change.
async fn family() -> Result<u16, WireguardError> {
    let (handle, _connection) = connect::<GenlCtrl>()?;
    let name = WireguardMessage::family_name().to_owned();
    let message = GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName(name)],
    };
    // The controller itself has a fixed number.
    const CONTROLLER: u16 = 0x10;
    let answers = ask(&handle, message, CONTROLLER, NLM_F_REQUEST | NLM_F_ACK).await;
    let answers = answers.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => WireguardError::Absent,
        _ => WireguardError::Open(error),
    })?;
    let nlas = answers.into_iter().flat_map(|message| message.nlas);
    let mut ids = nlas.filter_map(|nla| match nla {
        GenlCtrlAttrs::FamilyId(id) => Some(id),
        _ => None,
    });
    ids.next().ok_or(WireguardError::Absent)
}

/// Sends a request; returns all answers.
async fn ask<F>(
    handle: &ConnectionHandle<GenlMessage<F>>,
    message: F,
    family: u16,
    flags: u16,
) -> io::Result<Vec<F>>
where
    F: GenlFamily
        + Emitable
        + ParseableParametrized<[u8], GenlHeader>
        + Clone
        + std::fmt::Debug
        + PartialEq
        + Eq,
{
    let mut message = GenlMessage::from_payload(message);
    message.set_resolved_family_id(family);
    let mut message = NetlinkMessage::from(message);
    message.header.flags = flags;
    message.finalize();
    let answers = handle.request(message, Kernel::new(0, 0));
    let mut answers = answers.map_err(io::Error::other)?;
    let mut found = Vec::new();
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => found.push(message.payload),
            // A code of 0 is an acknowledgement.
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            _ => {}
        }
    }
    Ok(found)
}

/// The messages that turn `present` into `wanted`: first removals, so that a network never belongs
/// to two peers; then new and changed peers.
fn changes(present: &BTreeMap<[u8; 32], Seen>, wanted: &[Peer]) -> Vec<WireguardPeer> {
    let stays = |key: &[u8; 32]| wanted.iter().any(|peer| peer.key == *key);
    let goes = present.keys().filter(|key| !stays(key)).map(|key| {
        WireguardPeer(vec![
            WireguardPeerAttribute::PublicKey(*key),
            WireguardPeerAttribute::Flags(WireguardPeerFlags::RemoveMe),
        ])
    });
    let differs = |peer: &&Peer| {
        present
            .get(&peer.key)
            .is_none_or(|seen| seen.peer != **peer)
    };
    goes.chain(wanted.iter().filter(differs).map(set)).collect()
}

fn set(peer: &Peer) -> WireguardPeer {
    let network = |network: &Cidr| {
        WireguardAllowedIp(vec![
            WireguardAllowedIpAttr::Family(match network.address() {
                IpAddr::V4(_) => WireguardAddressFamily::Ipv4,
                IpAddr::V6(_) => WireguardAddressFamily::Ipv6,
            }),
            WireguardAllowedIpAttr::IpAddr(network.address()),
            WireguardAllowedIpAttr::Cidr(network.prefix()),
        ])
    };
    let mut attributes = vec![
        WireguardPeerAttribute::PublicKey(peer.key),
        WireguardPeerAttribute::Flags(WireguardPeerFlags::ReplaceAllowedIps),
    ];
    attributes.extend(peer.endpoint.map(WireguardPeerAttribute::Endpoint));
    let networks = peer.networks.iter().map(network).collect();
    attributes.push(WireguardPeerAttribute::AllowedIps(networks));
    WireguardPeer(attributes)
}

/// Adds a peer of an answer. A peer with many networks is split over several answers.
fn take_in(peers: &mut BTreeMap<[u8; 32], Seen>, message: &WireguardPeer) {
    let mut keys = message.iter().filter_map(|attribute| match attribute {
        WireguardPeerAttribute::PublicKey(key) => Some(*key),
        _ => None,
    });
    let Some(key) = keys.next() else {
        return;
    };
    let seen = peers.entry(key).or_insert_with(|| Seen {
        peer: Peer {
            key,
            endpoint: None,
            networks: BTreeSet::new(),
        },
        handshake: None,
    });
    for attribute in message.iter() {
        match attribute {
            WireguardPeerAttribute::Endpoint(endpoint) => seen.peer.endpoint = Some(*endpoint),
            WireguardPeerAttribute::AllowedIps(networks) => {
                seen.peer
                    .networks
                    .extend(networks.iter().filter_map(network));
            }
            WireguardPeerAttribute::LastHandshake(at) => {
                let seconds = u64::try_from(at.seconds).unwrap_or(0);
                let since = Duration::from_secs(seconds);
                seen.handshake = (seconds > 0).then(|| SystemTime::UNIX_EPOCH + since);
            }
            _ => {}
        }
    }
}

fn network(message: &WireguardAllowedIp) -> Option<Cidr> {
    let (mut address, mut prefix) = (None, None);
    for attribute in message.iter() {
        match attribute {
            WireguardAllowedIpAttr::IpAddr(found) => address = Some(*found),
            WireguardAllowedIpAttr::Cidr(found) => prefix = Some(*found),
            _ => {}
        }
    }
    Cidr::new(address?, prefix?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8, endpoint: Option<&str>) -> Peer {
        Peer {
            key: [number; 32],
            endpoint: endpoint.map(|endpoint| endpoint.parse().unwrap()),
            networks: [format!("10.208.{number}.0/24").parse().unwrap()].into(),
        }
    }

    fn seen(peers: &[Peer]) -> BTreeMap<[u8; 32], Seen> {
        let seen = |peer: &Peer| {
            let peer = peer.clone();
            let handshake = None;
            (peer.key, Seen { peer, handshake })
        };
        peers.iter().map(seen).collect()
    }

    #[test]
    fn only_differences_are_sent() {
        let one = peer(1, Some("192.0.2.1:7839"));
        let two = peer(2, Some("192.0.2.2:7839"));
        let moved = peer(2, Some("[2001:db8::2]:7839"));
        let present = seen(&[one.clone(), two.clone()]);
        assert!(changes(&present, &[two.clone(), one.clone()]).is_empty());
        assert_eq!(
            changes(&present, &[one.clone(), moved.clone()]),
            [set(&moved)]
        );
        assert_eq!(changes(&seen(&[]), std::slice::from_ref(&one)), [set(&one)]);

        // Another key now has the network: the old peer is removed first.
        let other = Peer {
            key: [9; 32],
            ..two.clone()
        };
        let sent = changes(&present, &[one.clone(), other.clone()]);
        let gone = WireguardPeer(vec![
            WireguardPeerAttribute::PublicKey(two.key),
            WireguardPeerAttribute::Flags(WireguardPeerFlags::RemoveMe),
        ]);
        assert_eq!(sent, [gone, set(&other)]);
    }

    #[test]
    fn what_is_set_reads_back() {
        let mut peers = BTreeMap::new();
        let wanted = peer(1, Some("192.0.2.1:7839"));
        take_in(&mut peers, &set(&wanted));
        // The rest of the peer is in a message of its own.
        let mut rest = peer(1, None);
        rest.networks = ["2001:db8::/64".parse().unwrap()].into();
        take_in(&mut peers, &set(&rest));
        let mut both = wanted;
        both.networks.extend(rest.networks);
        assert_eq!(peers[&both.key].peer, both);
        take_in(&mut peers, &WireguardPeer(Vec::new()));
        assert_eq!(peers.len(), 1);
    }

    #[test]
    fn a_kernel_without_it_says_so() {
        crate::testing::in_own_network(async {
            // The test runs on kernels with and without WireGuard.
            match Wireguard::open().await {
                Ok(wireguard) => {
                    let error = wireguard.public_key("nothing").await.unwrap_err();
                    assert!(error.to_string().contains("nothing"), "{error}");
                }
                Err(error) => assert!(matches!(error, WireguardError::Absent), "{error:?}"),
            }
        });
    }
}
