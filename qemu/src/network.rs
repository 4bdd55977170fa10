//! The network connection of a machine's card.
//!
//! [`Link`] separates the two kinds: QEMU's own user-mode network, a separate one for each machine, with ports
//! forwarded from the host; and a port of our switch ([`hearth_switch`]), which connects machines. Only this module and
//! the command builder depend on the difference.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;

pub use hearth_switch::{Mac, NotMac, PortForward};

/// One network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its Ethernet address.
    pub mac: Mac,
    /// Its connection.
    pub link: Link,
}

/// The connection of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// None: the card exists without a cable.
    Unplugged,
    /// A network of its own inside QEMU: DHCP gives the guest 10.0.2.15/24 with the gateway 10.0.2.2.
    User(UserNetwork),
    /// A port of a switch that listens on this socket ([`hearth_switch::Port::socket`]). The switch must be running:
    /// QEMU connects once, when it starts.
    Switch {
        /// Path of the port's socket, of any length.
        socket: PathBuf,
    },
}

/// QEMU's user-mode network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserNetwork {
    /// Blocks the guest's access to the host and the Internet; forwarded ports still work.
    pub restricted: bool,
    /// Ports of the guest that are forwarded to the host.
    pub forwards: Vec<Forward>,
}

/// A TCP port of the guest, reachable at 127.0.0.1 of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Port of the guest.
    pub guest: u16,
    /// Port of the host; 0 means any free one. QEMU itself binds it, so no other process can take it in between.
    pub host: u16,
}

impl Forward {
    /// A guest port at any free port of the host.
    pub fn any(guest: u16) -> Self {
        Self { guest, host: 0 }
    }
}

/// Whether this host port could be bound now. For an early, clear error; only QEMU's own attempt is authoritative.
pub(crate) fn is_free(port: u16) -> bool {
    port == 0 || TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Parses the monitor's `info usernet`, the only place where QEMU shows the ports that it chose. Other lines are
/// skipped.
pub(crate) fn parse_usernet(text: &str) -> Vec<PortForward> {
    text.lines().filter_map(parse_usernet_line).collect()
}

/// `TCP[HOST_FORWARD]  10  127.0.0.1 40789  10.0.2.15  7835  0  0`
fn parse_usernet_line(line: &str) -> Option<PortForward> {
    let mut words = line.split_whitespace();
    if words.next()? != "TCP[HOST_FORWARD]" {
        return None;
    }
    let (_descriptor, address, host_port) = (words.next()?, words.next()?, words.next()?);
    let (_guest_address, guest_port) = (words.next()?, words.next()?);
    // "*" means all addresses, which we never use.
    let address: IpAddr = address.parse().ok()?;
    Some(PortForward {
        guest: guest_port.parse().ok()?,
        host: SocketAddr::new(address, host_port.parse().ok()?),
    })
}

/// Parses the monitor's `info network`: whether the network card with this number is connected to its switch; `None`
/// while that is unknown.
pub(crate) fn parse_plugged(text: &str, card: usize) -> Option<bool> {
    let id = format!("net{card}: ");
    let (_, network) = text.lines().find_map(|line| line.split_once(&id))?;
    // `index=0,type=stream,unix:net0.sock` when connected; before that, and on failure, the end differs.
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
            [PortForward {
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
