//! What a machine's network card is plugged into.
//!
//! [`Link`] is the seam: there is QEMU's own user-mode network, a separate one
//! for each machine, with ports forwarded from the host; and there is a port
//! of our switch ([`hearth_switch`]), which joins machines. Nothing but this
//! module and the command builder needs to know the difference.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
};

pub use hearth_switch::{Forwarded, Mac, NotMac};

/// One network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its address.
    pub mac: Mac,
    /// What it is plugged into.
    pub link: Link,
}

/// What a card can be plugged into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing: the card is there and its cable is not.
    Unplugged,
    /// A network of its own inside QEMU: DHCP gives the guest 10.0.2.15/24
    /// with the gateway 10.0.2.2.
    User(UserNetwork),
    /// A port of a switch that listens at this socket
    /// ([`hearth_switch::Port::socket`]). The switch must run first: QEMU
    /// plugs in once, when it starts.
    Switch {
        /// The port's socket; its path may be of any length.
        socket: PathBuf,
    },
}

/// QEMU's user-mode network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserNetwork {
    /// Cuts the guest off from the host and the world; forwarded ports still
    /// work.
    pub restricted: bool,
    /// Ports of the guest that the host can reach.
    pub forwards: Vec<Forward>,
}

/// A TCP port of the guest, reachable at 127.0.0.1 of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Port of the guest.
    pub guest: u16,
    /// Port of the host; 0 lets the host choose a free one. QEMU itself binds
    /// it, so there is no moment at which another process can take it.
    pub host: u16,
}

impl Forward {
    /// A guest port at any free port of the host.
    pub fn any(guest: u16) -> Self {
        Self { guest, host: 0 }
    }
}

/// Whether this host port could be bound now. For an early, clear error; only
/// QEMU's own attempt counts.
pub(crate) fn is_free(port: u16) -> bool {
    port == 0 || TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Reads the monitor's `info usernet`: QEMU tells the ports that it chose
/// nowhere else. Lines that are not forwards are passed over.
pub(crate) fn parse_usernet(text: &str) -> Vec<Forwarded> {
    text.lines().filter_map(parse_usernet_line).collect()
}

/// `TCP[HOST_FORWARD]  10  127.0.0.1 40789  10.0.2.15  7835  0  0`
fn parse_usernet_line(line: &str) -> Option<Forwarded> {
    let mut words = line.split_whitespace();
    if words.next()? != "TCP[HOST_FORWARD]" {
        return None;
    }
    let (_descriptor, address, host_port) = (words.next()?, words.next()?, words.next()?);
    let (_guest_address, guest_port) = (words.next()?, words.next()?);
    // "*" stands for all addresses; we never ask for that.
    let address: IpAddr = address.parse().ok()?;
    Some(Forwarded {
        guest: guest_port.parse().ok()?,
        host: SocketAddr::new(address, host_port.parse().ok()?),
    })
}

/// Reads the monitor's `info network`: whether the network card with this
/// number is plugged into its switch; `None` while that is not known.
pub(crate) fn parse_plugged(text: &str, card: usize) -> Option<bool> {
    let id = format!("net{card}: ");
    let (_, network) = text.lines().find_map(|line| line.split_once(&id))?;
    // `index=0,type=stream,unix:net0.sock`, with something else at the end
    // before that and instead of it.
    let (_, state) = network.split_once("type=stream,")?;
    if state.contains("error") {
        return Some(false);
    }
    state.contains("unix:").then_some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_are_read_from_the_monitor() {
        let text = "Hub -1 (net0):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  \
                    TCP[HOST_FORWARD]  10       127.0.0.1 40789       10.0.2.15  7835     0     0\r\n  \
                    TCP[ESTABLISHED]   12       127.0.0.1 40789       10.0.2.15  7835     0     0\r\n  \
                    UDP[236 sec]       34       10.0.2.15 53        10.0.2.3    53     0     0\r\n  \
                    TCP[HOST_FORWARD]   9               * 40899       10.0.2.15  7836     0     0\r\n";
        assert_eq!(
            parse_usernet(text),
            [Forwarded {
                guest: 7835,
                host: "127.0.0.1:40789".parse().expect("an address"),
            }]
        );
    }

    #[test]
    fn a_card_that_is_not_plugged_in_is_found() {
        let text = |state: &str| {
            format!(
                "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:48:00:00\r\n \
                 \\ net1: index=0,type=stream,{state}\r\n"
            )
        };
        assert_eq!(parse_plugged(&text("unix:net1.sock"), 1), Some(true));
        assert_eq!(parse_plugged(&text("connection error"), 1), Some(false));
        assert_eq!(parse_plugged(&text("initializing"), 1), None);
        assert_eq!(parse_plugged(&text("unix:net1.sock"), 0), None);
        assert_eq!(parse_plugged("", 0), None);
    }

    #[test]
    fn a_bound_port_is_not_free() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        assert!(!is_free(port));
        assert!(is_free(0));
    }
}
