//! What a machine's network card is plugged into.
//!
//! [`Link`] is the seam: there is QEMU's own user-mode network, a separate one
//! for each machine, with ports forwarded from the host; and there is a port
//! of our switch ([`crate::switch`]), which joins machines. Nothing but this
//! module and the command builder needs to know the difference.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    str::FromStr,
};

/// An Ethernet address. As text, and in JSON: `52:54:00:48:00:01`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(into = "String", try_from = "String")]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address of the machine with this number in its cluster: QEMU's
    /// own prefix, so that it cannot meet real hardware. Fixed by the number,
    /// so that a machine keeps it (and its DHCP lease) over restarts.
    pub fn of_machine(number: u16) -> Self {
        let [high, low] = number.to_be_bytes();
        Self([0x52, 0x54, 0x00, 0x48, high, low])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.to_string()
    }
}

/// A text is no Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found {0:?}, wanted an Ethernet address as 52:54:00:48:00:01")]
pub struct NotMac(String);

impl FromStr for Mac {
    type Err = NotMac;

    fn from_str(text: &str) -> Result<Self, NotMac> {
        let byte = |part: &str| {
            let plain = part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            plain.then(|| u8::from_str_radix(part, 16).ok()).flatten()
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or_else(|| NotMac(text.to_owned()))
    }
}

impl TryFrom<String> for Mac {
    type Error = NotMac;

    fn try_from(text: String) -> Result<Self, NotMac> {
        text.parse()
    }
}

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
    /// ([`crate::switch::Port::socket`]). The switch must run first: QEMU
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

/// Where a guest's port is found on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Forwarded {
    /// Port of the guest.
    pub guest: u16,
    /// Address on the host.
    pub host: SocketAddr,
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
    fn addresses_differ_by_number() {
        assert_eq!(Mac::of_machine(0).to_string(), "52:54:00:48:00:00");
        assert_eq!(Mac::of_machine(258).to_string(), "52:54:00:48:01:02");
        // Neither multicast nor globally assigned.
        assert_eq!(Mac::of_machine(7).0[0] & 0b11, 0b10);
    }

    #[test]
    fn an_address_is_read_back_and_nothing_else_is() {
        let mac = Mac::of_machine(258);
        assert_eq!(mac.to_string().parse(), Ok(mac));
        let json = serde_json::to_string(&mac).expect("JSON");
        assert_eq!(json, "\"52:54:00:48:01:02\"");
        assert_eq!(serde_json::from_str::<Mac>(&json).expect("read back"), mac);
        for text in [
            "",
            "52:54:00:48:01",
            "52:54:00:48:01:02:03",
            "+1:54:00:48:01:02",
            "1:2:3:4:5:6",
        ] {
            assert_eq!(text.parse::<Mac>(), Err(NotMac(text.to_owned())));
        }
    }

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
