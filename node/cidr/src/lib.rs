//! An IP address with a prefix length, such as `10.0.0.5/24`.
//!
//! A crate of its own, because two need it of which neither may depend on the other: the kernel's
//! interfaces, and the decoder of a machine's parameters, which tools use as well. It has no IO.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An address and its prefix length, which is valid for the address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// The text or the prefix length is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an address with a prefix length such as 192.0.2.1/24, got {text:?}")]
pub struct CidrError {
    text: String,
}

impl Cidr {
    /// All of IPv4: the destination of a default route.
    pub const ALL_V4: Self = Self {
        address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        prefix: 0,
    };

    /// All of IPv6.
    pub const ALL_V6: Self = Self {
        address: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        prefix: 0,
    };

    /// Fails if the prefix is too long for the address family.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Self, CidrError> {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        if prefix > longest {
            return Err(CidrError {
                text: format!("{address}/{prefix}"),
            });
        }
        Ok(Self { address, prefix })
    }

    /// One address, with the longest prefix.
    pub const fn host(address: IpAddr) -> Self {
        let prefix = match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        };
        Self { address, prefix }
    }

    /// The address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The length of the prefix in bits.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether this is all of an address family: the destination of a default route.
    pub fn is_all(&self) -> bool {
        self.prefix == 0
    }

    /// Its network: the same prefix, and no other bits.
    pub fn network(&self) -> Self {
        let address = match self.address {
            IpAddr::V4(a) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix));
                IpAddr::from(Ipv4Addr::from_bits(a.to_bits() & mask.unwrap_or(0)))
            }
            IpAddr::V6(a) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix));
                IpAddr::from(Ipv6Addr::from_bits(a.to_bits() & mask.unwrap_or(0)))
            }
        };
        let prefix = self.prefix;
        Self { address, prefix }
    }

    /// Whether `other` is in the same network.
    pub fn contains(&self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix));
                (u32::from(a) ^ u32::from(b)) & mask.unwrap_or(0) == 0
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix));
                (u128::from(a) ^ u128::from(b)) & mask.unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl Cidr {
    /// Whether all addresses of `other`'s network are in this one.
    pub fn covers(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let error = || CidrError {
            text: text.to_owned(),
        };
        let (address, prefix) = text.split_once('/').ok_or_else(error)?;
        // Accept only digits: the integer parser would also accept a sign.
        if !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(error());
        }
        let address = address.parse().map_err(|_| error())?;
        let prefix = prefix.parse().map_err(|_| error())?;
        Self::new(address, prefix).map_err(|_| error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_and_written() {
        for text in ["10.0.2.15/24", "0.0.0.0/0", "2001:db8::1/64", "1.2.3.4/32"] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "10.0.0.1",
            "10.0.0.1/33",
            "::/129",
            "1.2.3.4/+8",
            "1.2.3.4/",
            "x/8",
        ] {
            let error = text.parse::<Cidr>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn a_network_has_no_bits_behind_its_prefix() {
        for (cidr, network) in [
            ("10.0.2.15/24", "10.0.2.0/24"),
            ("10.0.2.15/32", "10.0.2.15/32"),
            ("10.0.2.15/0", "0.0.0.0/0"),
            ("2001:db8:1::f/64", "2001:db8:1::/64"),
            ("2001:db8::f/0", "::/0"),
        ] {
            let cidr: Cidr = cidr.parse().unwrap();
            assert_eq!(cidr.network().to_string(), network);
        }
    }

    #[test]
    fn a_network_contains_its_addresses() {
        let contains = |cidr: &str, other: &str| {
            cidr.parse::<Cidr>()
                .unwrap()
                .contains(other.parse().unwrap())
        };
        assert!(contains("10.0.2.15/24", "10.0.2.2"));
        assert!(!contains("10.0.2.15/24", "10.0.3.2"));
        assert!(contains("0.0.0.0/0", "255.1.2.3"));
        assert!(!contains("1.2.3.4/32", "1.2.3.5"));
        assert!(contains("2001:db8::1/64", "2001:db8::2"));
        assert!(contains("::/0", "2001:db8::2"));
        assert!(!contains("0.0.0.0/0", "::1"));
    }
}
