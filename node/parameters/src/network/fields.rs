//! The values of fields of `network_config`, and the names of the fields in errors.

use std::net::IpAddr;

use hearth_api::labels::{self, quoted};
use hearth_cidr::Cidr;

use super::{Mac, Problem};

/// The MTU that every IPv6 link has, and the largest one that Ethernet devices commonly support.
const MTU: std::ops::RangeInclusive<u32> = 1280..=9216;
const LONGEST_DOMAIN: usize = 253;

/// The name of a field, e.g. `network_config.interfaces[0].mac`.
pub(super) struct Field(String);

impl Field {
    pub(super) fn root() -> Self {
        Self("network_config".to_owned())
    }

    pub(super) fn field(&self, name: &str) -> Self {
        Self(format!("{}.{name}", self.0))
    }

    pub(super) fn nth(&self, name: &str, index: usize) -> Self {
        Self(format!("{}.{name}[{index}]", self.0))
    }

    /// Each value of a list, with its field.
    pub(super) fn each<M, T>(
        &self,
        name: &str,
        messages: &[M],
        parse: impl Fn(Self, &M) -> Result<T, Problem>,
    ) -> Result<Vec<T>, Problem> {
        let indexed = messages.iter().enumerate();
        indexed
            .map(|(index, message)| parse(self.nth(name, index), message))
            .collect()
    }

    /// The same for text.
    pub(super) fn each_text<T>(
        &self,
        name: &str,
        texts: &[String],
        parse: impl Fn(Self, &str) -> Result<T, Problem>,
    ) -> Result<Vec<T>, Problem> {
        self.each(name, texts, |field, text| parse(field, text))
    }

    pub(super) fn unwanted(&self, expected: &'static str, found: impl Into<String>) -> Problem {
        Problem::unwanted(self.0.clone(), expected, found)
    }

    pub(super) fn at_most(&self, most: usize, found: usize, what: &str) -> Result<(), Problem> {
        if found > most {
            let expected = format!("at most {most} {what}");
            return Err(Problem::unwanted(
                self.0.clone(),
                expected,
                found.to_string(),
            ));
        }
        Ok(())
    }

    pub(super) fn cidr(&self, text: &str) -> Result<Cidr, Problem> {
        let expected = "an address with its prefix length, such as \"192.0.2.10/24\"";
        text.parse()
            .map_err(|_| self.unwanted(expected, quoted(text)))
    }

    /// An address that a machine can have, with its prefix length.
    pub(super) fn host(self, text: &str) -> Result<Cidr, Problem> {
        let cidr = self.cidr(text)?;
        let address = cidr.address();
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            let expected = "a host address (not unspecified, multicast or loopback)";
            return Err(self.unwanted(expected, quoted(text)));
        }
        Ok(cidr)
    }

    pub(super) fn address(self, text: &str) -> Result<IpAddr, Problem> {
        text.parse()
            .map_err(|_| self.unwanted("an IP address", quoted(text)))
    }

    pub(super) fn mac(self, text: &str) -> Result<Mac, Problem> {
        let expected = "a MAC address such as \"52:54:00:12:34:56\"";
        text.parse()
            .map_err(|()| self.unwanted(expected, quoted(text)))
    }

    pub(super) fn domain(self, text: &str) -> Result<String, Problem> {
        if text.len() > LONGEST_DOMAIN || !labels::is_dns_name(text) {
            let expected = "a lower-case DNS name of at most 253 characters";
            return Err(self.unwanted(expected, quoted(text)));
        }
        Ok(text.to_owned())
    }

    pub(super) fn vlan(self, tag: u32) -> Result<Option<u16>, Problem> {
        match u16::try_from(tag) {
            Ok(0) => Ok(None),
            Ok(tag) if tag <= 4094 => Ok(Some(tag)),
            _ => Err(self.unwanted("0 for none, or 1 to 4094", tag.to_string())),
        }
    }

    pub(super) fn mtu(self, bytes: u32) -> Result<Option<u16>, Problem> {
        match u16::try_from(bytes) {
            Ok(0) => Ok(None),
            Ok(mtu) if MTU.contains(&bytes) => Ok(Some(mtu)),
            _ => Err(self.unwanted("0 for none, or 1280 to 9216", bytes.to_string())),
        }
    }
}
