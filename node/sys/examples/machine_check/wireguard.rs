//! Two network namespaces connected by WireGuard, each with a range of addresses: packets from the
//! own range arrive, encrypted; packets with a source address outside of it do not.
//!
//! A network namespace belongs to the thread that entered it, so the other end is a thread with a
//! runtime of its own.

use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use hearth_sys::cidr::Cidr;
use hearth_sys::netlink::{Netlink, Route};
use hearth_sys::wireguard::{Peer, Wireguard};
use rtnetlink::{LinkUnspec, LinkVeth};
use tokio::net::UdpSocket;
use tokio::sync::oneshot;
use tokio::time::timeout;

const LINK: &str = "check-mesh";
const PORT: u16 = 7839;
/// Timeout for an answer; a handshake takes a second under emulation.
const BOUND: Duration = Duration::from_secs(30);
const ALL_PODS: &str = "10.208.0.0/12";

/// One end of the connection.
struct End {
    /// The interface to the underlying network.
    cable: &'static str,
    outer: &'static str,
    inner: &'static str,
    range: &'static str,
    secret: [u8; 32],
}

const HERE: End = End {
    cable: "check-here",
    outer: "198.51.100.1",
    inner: "10.208.1.1",
    range: "10.208.1.0/24",
    secret: [1; 32],
};
const THERE: End = End {
    cable: "check-there",
    outer: "198.51.100.2",
    inner: "10.208.2.1",
    range: "10.208.2.0/24",
    secret: [2; 32],
};

impl End {
    /// Creates the interface, without a peer. Returns its public key.
    async fn set_up(&self) -> Result<[u8; 32]> {
        let netlink = Netlink::open()?;
        netlink.set_loopback_up().await?;
        let cable = netlink.link_named(self.cable).await?;
        let outer = Cidr::new(self.outer.parse()?, 30)?;
        netlink.add_address(cable.index, outer).await?;
        netlink.set_up(cable.index).await?;
        let wireguard = Wireguard::open().await?;
        for _ in 0..2 {
            let link = netlink.add_wireguard(LINK).await?;
            netlink.set_mtu(link.index, 1420).await?;
            wireguard.set_device(LINK, &self.secret, PORT).await?;
            let inner = Cidr::new(self.inner.parse()?, 32)?;
            netlink.set_ipv4_addresses(link.index, &[inner]).await?;
            let route = Route {
                destination: ALL_PODS.parse()?,
                gateway: None,
                metric: 0,
                source: Some(self.inner.parse()?),
            };
            netlink.replace_route(link.index, route).await?;
        }
        let key = wireguard.public_key(LINK).await?;
        key.context("the interface has no key")
    }

    /// Makes the other end the only peer.
    async fn meet(&self, other: &Self, key: [u8; 32]) -> Result<()> {
        let wireguard = Wireguard::open().await?;
        let peer = Peer {
            key,
            endpoint: Some(SocketAddr::new(other.outer.parse()?, PORT)),
            networks: [other.range.parse()?].into(),
        };
        let strange = Peer {
            key: [9; 32],
            endpoint: None,
            networks: ["10.208.9.0/24".parse()?].into(),
        };
        // Adding and removing another peer does not affect this one.
        wireguard
            .set_peers(LINK, std::slice::from_ref(&peer))
            .await?;
        wireguard.set_peers(LINK, &[strange, peer.clone()]).await?;
        wireguard
            .set_peers(LINK, std::slice::from_ref(&peer))
            .await?;
        let peers = wireguard.peers(LINK).await?;
        let seen: Vec<_> = peers.into_values().map(|seen| seen.peer).collect();
        ensure!(seen == [peer], "peers: {seen:?}");
        Ok(())
    }
}

/// Runs the check.
pub(crate) async fn check() -> Result<((), String)> {
    let (space, entered) = oneshot::channel();
    let (keys_here, key_from_here) = oneshot::channel();
    let (keys_there, key_from_there) = oneshot::channel();
    let there = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let fd = std::fs::File::open("/proc/thread-self/ns/net")?;
        runtime.block_on(answer(fd, space, key_from_here, keys_there))
    });
    let asked = timeout(BOUND, ask(entered, keys_here, key_from_there)).await;
    let note = asked.map_err(|_| anyhow!("timed out after {BOUND:?}"))?;
    // Its waits are bounded, or end with a message from this end.
    let answered = tokio::task::spawn_blocking(move || there.join()).await?;
    let answered = answered.map_err(|_| anyhow!("the other end has panicked"))?;
    answered.context("the other end")?;
    Netlink::open()?.remove_link(LINK).await?;
    Ok(((), note?))
}

async fn ask(
    entered: oneshot::Receiver<std::fs::File>,
    tell_key: oneshot::Sender<[u8; 32]>,
    key: oneshot::Receiver<[u8; 32]>,
) -> Result<String> {
    let space = entered.await?;
    let (connection, handle, _) = rtnetlink::new_connection()?;
    let connection = tokio::spawn(connection);
    let veth = LinkVeth::new(HERE.cable, THERE.cable).build();
    handle.link().add(veth).execute().await?;
    let other = Netlink::open()?.link_named(THERE.cable).await?;
    let moved = LinkUnspec::new_with_index(other.index).setns_by_fd(space.as_raw_fd());
    handle.link().set(moved.build()).execute().await?;
    connection.abort();
    let own = HERE.set_up().await?;
    tell_key
        .send(own)
        .map_err(|_| anyhow!("the other end is gone"))?;
    HERE.meet(&THERE, key.await?).await?;

    // From a source address outside of this end's range.
    let netlink = Netlink::open()?;
    let lo = netlink.link_named("lo").await?;
    netlink
        .add_address(lo.index, "10.208.7.7/32".parse()?)
        .await?;
    let liar = UdpSocket::bind("10.208.7.7:0").await?;
    let to = SocketAddr::new(THERE.inner.parse()?, PORT + 1);
    liar.send_to(b"a lie", to).await?;
    let socket = UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(to).await?;
    let from = socket.local_addr()?;
    ensure!(
        from.ip().to_string() == HERE.inner,
        "unexpected source address {from}"
    );
    socket.send(b"hello").await?;
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer).await?;
    let said = String::from_utf8_lossy(&answer[..length]).into_owned();
    netlink
        .remove_address(lo.index, "10.208.7.7/32".parse()?)
        .await?;
    ensure!(said == format!("hello from {from}"), "answered: {said:?}");
    let peers = Wireguard::open().await?.peers(LINK).await?;
    ensure!(
        peers.values().all(|seen| seen.handshake.is_some()),
        "no handshake: {peers:?}"
    );
    Ok(said)
}

/// The other end: answers the first packet with its content and its source address.
async fn answer(
    space: std::fs::File,
    entered: oneshot::Sender<std::fs::File>,
    key: oneshot::Receiver<[u8; 32]>,
    tell_key: oneshot::Sender<[u8; 32]>,
) -> Result<()> {
    let gone = |_| anyhow!("the first end is gone");
    entered
        .send(space)
        .map_err(|_| anyhow!("the first end is gone"))?;
    let key = key.await?;
    let own = THERE.set_up().await?;
    THERE.meet(&HERE, key).await?;
    let socket = UdpSocket::bind((THERE.inner, PORT + 1)).await?;
    tell_key.send(own).map_err(gone)?;
    let mut heard = [0; 64];
    let (length, from) = timeout(BOUND, socket.recv_from(&mut heard)).await??;
    let heard = String::from_utf8_lossy(&heard[..length]);
    let answer = format!("{heard} from {from}");
    socket.send_to(answer.as_bytes(), from).await?;
    Ok(())
}
