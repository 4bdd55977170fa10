//! Addresses of machines, and of their ports on the host.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// An Ethernet address. As text, and in JSON: `52:54:00:48:00:01`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(into = "String", try_from = "String")]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address of the machine with this number in its cluster, with QEMU's own prefix, so that it cannot collide
    /// with real hardware. Derived from the number, so that a machine keeps it (and its DHCP lease) over restarts.
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

/// A text that is not an Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an Ethernet address such as 52:54:00:48:00:01, got {0:?}")]
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

/// A guest's port on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PortForward {
    /// Port of the guest.
    pub guest: u16,
    /// Address on the host.
    pub host: SocketAddr,
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
}
