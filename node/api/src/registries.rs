//! Container registries, as the settings `kubernetes.registry_…` name them.
//!
//! | setting | an element |
//! |---|---|
//! | `registry_mirrors` | `REGISTRY=URL`: `docker.io=https://mirror.example:5000` |
//! | `registry_authorities` | the certificate of an authority: X.509 in DER, encoded in base64 |
//! | `registry_credentials` | `REGISTRY=USER:PASSWORD` |
//! | `registry_proxy` | a URL without path: `http://proxy.example:3128` |
//! | `registry_proxy_exceptions` | a host name, `.domain`, an IP address, or a range of them |
//!
//! The curators check the texts, and workers read them. What passes has no character that is special in
//! a TOML string, a path or an environment variable, so that workers can use it as it is.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use zeroize::Zeroizing;

use crate::labels;

/// What takes the place of a password where it is not shown.
pub const HIDDEN: &str = "REDACTED";

/// Maximum length of a name, a user, a password and a path.
const LONGEST: usize = 1024;

/// The name of a registry: a lower-case DNS name or an IPv4 address, with a port if it is not that of
/// HTTPS. The registry of Docker Hub is `docker.io`, as in the names of images.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Registry(String);

impl Registry {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A text that is not what it should be. The text is not repeated: it may be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}")]
pub struct RegistryError {
    /// What it should be.
    pub expected: &'static str,
}

const fn expected<T>(expected: &'static str) -> Result<T, RegistryError> {
    Err(RegistryError { expected })
}

impl FromStr for Registry {
    type Err = RegistryError;

    fn from_str(text: &str) -> Result<Self, RegistryError> {
        let (host, port) = match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        let port_is_valid = port.is_none_or(|port| {
            port.bytes().all(|b| b.is_ascii_digit()) && port.parse().is_ok_and(|port: u16| port > 0)
        });
        if host.len() <= 253 && labels::is_dns_name(host) && port_is_valid {
            Ok(Self(text.to_owned()))
        } else {
            expected("the name of a registry, with its port if it has one")
        }
    }
}

impl fmt::Display for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What an element of `registry_mirrors` should be.
pub const MIRROR: &str = "REGISTRY=URL with an http or https URL";

/// A server to ask for the images of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The registry.
    pub registry: Registry,
    /// URL of the mirror.
    pub url: String,
}

impl FromStr for Mirror {
    type Err = RegistryError;

    fn from_str(text: &str) -> Result<Self, RegistryError> {
        let parts = text.split_once('=');
        let mirror = parts.and_then(|(registry, url)| {
            let (_, rest) = scheme(url)?;
            let (host, path) = match rest.split_once('/') {
                Some((host, path)) => (host, path),
                None => (rest, ""),
            };
            host.parse::<Registry>().ok()?;
            let is_usual = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
            (path.len() <= LONGEST && path.bytes().all(is_usual)).then_some(())?;
            Some(Self {
                registry: registry.parse().ok()?,
                url: url.to_owned(),
            })
        });
        mirror.map_or(expected(MIRROR), Ok)
    }
}

/// The scheme of a URL, and what follows it.
fn scheme(url: &str) -> Option<(&str, &str)> {
    let parts = url.split_once("://");
    parts.filter(|(scheme, _)| matches!(*scheme, "http" | "https"))
}

/// What `registry_proxy` should be.
pub const PROXY: &str = "an http or https URL without user and path";

/// Whether this is the URL of a proxy.
pub fn is_proxy(url: &str) -> bool {
    scheme(url).is_some_and(|(_, host)| host.parse::<Registry>().is_ok())
}

/// What an element of `registry_proxy_exceptions` should be.
pub const PROXY_EXCEPTION: &str = "a host name, .domain, IP address or range of addresses";

/// Whether the proxy is not used for what this text names.
pub fn is_proxy_exception(text: &str) -> bool {
    let is_range = text.split_once('/').is_some_and(|(ip, length)| {
        let most = match ip.parse() {
            Ok(IpAddr::V4(_)) => 32,
            Ok(IpAddr::V6(_)) => 128,
            Err(_) => return false,
        };
        length.parse().is_ok_and(|length: u8| length <= most)
    });
    let name = text.strip_prefix('.').unwrap_or(text);
    is_range || text.parse::<IpAddr>().is_ok() || name.parse::<Registry>().is_ok()
}

/// What an element of `registry_authorities` should be.
pub const AUTHORITY: &str = "the certificate of a CA: PEM, or DER in base64";

/// The certificate of an authority in DER, from an element of `registry_authorities`.
pub fn authority(text: &str) -> Result<Vec<u8>, RegistryError> {
    let der = STANDARD.decode(text).ok();
    let is_authority = |der: &Vec<u8>| {
        X509Certificate::from_der(der).is_ok_and(|(rest, certificate)| {
            let constraints = certificate.basic_constraints().ok().flatten();
            rest.is_empty() && constraints.is_some_and(|constraints| constraints.value.ca)
        })
    };
    der.filter(is_authority).map_or(expected(AUTHORITY), Ok)
}

/// The elements of `registry_authorities` for the certificates of a PEM file. Other texts remain as
/// they are.
pub fn authorities_from_pem(text: &str) -> Option<Vec<String>> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let blocks = text.split(BEGIN).skip(1);
    let blocks: Vec<String> = blocks
        .map(|block| {
            let content = block.split(END).next().unwrap_or(block);
            content.split_whitespace().collect()
        })
        .collect();
    (!blocks.is_empty()).then_some(blocks)
}

/// What an element of `registry_credentials` should be.
pub const CREDENTIAL: &str =
    "REGISTRY=USER:PASSWORD, without blanks and commas, one for each registry";

/// User and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// The registry.
    pub registry: Registry,
    /// The user.
    pub user: String,
    /// The password, or a token in its place.
    pub password: Zeroizing<String>,
}

impl FromStr for Credential {
    type Err = RegistryError;

    fn from_str(text: &str) -> Result<Self, RegistryError> {
        let is_usual =
            |text: &str| (1..=LONGEST).contains(&text.len()) && text.bytes().all(is_visible);
        let credential = text.split_once('=').and_then(|(registry, login)| {
            let (user, password) = login.split_once(':')?;
            (is_usual(user) && is_usual(password)).then_some(())?;
            Some(Self {
                registry: registry.parse().ok()?,
                user: user.to_owned(),
                password: password.to_owned().into(),
            })
        });
        credential.map_or(expected(CREDENTIAL), Ok)
    }
}

/// Elements of a list are separated by commas.
fn is_visible(byte: u8) -> bool {
    byte.is_ascii_graphic() && byte != b','
}

impl Credential {
    /// The same without its password.
    pub fn hidden(&self) -> String {
        format!("{}={}:{HIDDEN}", self.registry, self.user)
    }

    /// Whether it is without its password.
    pub fn is_hidden(&self) -> bool {
        *self.password == HIDDEN
    }
}

/// Without the password.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hidden())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::certificates;
    use crate::identity::SigningKey;

    #[test]
    fn registries_are_names_with_or_without_a_port() {
        for name in [
            "docker.io",
            "registry.example:5000",
            "192.0.2.1:5000",
            "localhost",
        ] {
            assert_eq!(name.parse::<Registry>().unwrap().as_str(), name);
        }
        for text in [
            "",
            "Docker.io",
            "a:0",
            "a:70000",
            "a:+1",
            "a/b",
            "https://a",
            "a b",
            "..",
            "a:1:2",
        ] {
            assert!(text.parse::<Registry>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_mirror_has_a_registry_and_a_url() {
        let mirror: Mirror = "docker.io=https://mirror.example:5000/hub".parse().unwrap();
        assert_eq!(mirror.registry.as_str(), "docker.io");
        assert_eq!(mirror.url, "https://mirror.example:5000/hub");
        for text in [
            "docker.io",
            "docker.io=mirror.example",
            "docker.io=ftp://mirror.example",
            "docker.io=https://",
            "docker.io=https://user@mirror.example",
            "docker.io=https://mirror.example/\"]",
            "=https://mirror.example",
        ] {
            let error = text.parse::<Mirror>().unwrap_err();
            assert_eq!(
                error.to_string(),
                "expected REGISTRY=URL with an http or https URL"
            );
        }
    }

    #[test]
    fn a_proxy_and_what_does_without_it() {
        assert!(is_proxy("http://proxy.example:3128"));
        for text in [
            "proxy.example",
            "http://u:p@proxy.example",
            "http://proxy.example/",
            "socks5://a",
        ] {
            assert!(!is_proxy(text), "{text}");
        }
        for text in [
            "a.example",
            ".example",
            "a.example:5000",
            "192.0.2.0/24",
            "2001:db8::/32",
            "::1",
        ] {
            assert!(is_proxy_exception(text), "{text}");
        }
        for text in ["", ".", "*", "192.0.2.0/33", "a/24", "a b"] {
            assert!(!is_proxy_exception(text), "{text}");
        }
    }

    #[test]
    fn an_authority_is_a_certificate_of_one() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut parameters = rcgen::CertificateParams::new([]).unwrap();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = parameters.self_signed(&key).unwrap();
        let pem = format!("# ours\n{}{}", certificate.pem(), certificate.pem());
        let elements = authorities_from_pem(&pem).unwrap();
        assert_eq!(elements.len(), 2);
        assert_eq!(authority(&elements[0]).unwrap(), certificate.der().as_ref());
        assert_eq!(authorities_from_pem(&elements[0]), None);
        let leaf = certificates::self_signed(&SigningKey::from_seed([7; 32]));
        for text in ["", "AAAA", "é", &STANDARD.encode(leaf)] {
            assert!(authority(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        let credential: Credential = "registry.example:5000=anna:s3cret:=".parse().unwrap();
        assert_eq!(credential.user, "anna");
        assert_eq!(*credential.password, "s3cret:=");
        let hidden = credential.hidden();
        assert_eq!(format!("{credential:?}"), hidden);
        assert_eq!(hidden, "registry.example:5000=anna:REDACTED");
        assert!(hidden.parse::<Credential>().unwrap().is_hidden());
        for text in ["a", "a=b", "a=:c", "a=b:", "a=b:c d", "a=b:c,d", "=b:c"] {
            let error = text.parse::<Credential>().unwrap_err();
            assert!(!error.to_string().contains("=b"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_texts_are_judged_without_harm(text: String) {
            let _ = text.parse::<Mirror>();
            let _ = text.parse::<Credential>();
            let _ = authority(&text);
            is_proxy(&text);
            if is_proxy_exception(&text) {
                prop_assert!(!text.contains([',', ' ', '\n']));
            }
        }
    }
}
