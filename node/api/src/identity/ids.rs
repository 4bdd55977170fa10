//! Names of clusters, nodes and users, and their form in a certificate.

use std::fmt;
use std::str::FromStr;

use super::PublicKey;

/// Why a name is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Not a node ID.
    #[error("node ID {found:?}: expected \"hearth-\" and 32 lower-case hexadecimal digits")]
    NodeId {
        /// The text (shortened).
        found: String,
    },
    /// Not a cluster ID as text.
    #[error("cluster ID {found:?}: expected 32 lower-case hexadecimal digits")]
    ClusterId {
        /// The text (shortened).
        found: String,
    },
    /// Not a cluster ID as bytes.
    #[error("cluster ID: expected 16 bytes, got {found}")]
    ClusterIdLength {
        /// Its length.
        found: usize,
    },
    /// Not a user name.
    #[error(
        "user name {found:?}: expected 1 to 63 of the characters a-z, 0-9, \"-\", \".\", \
         the first and the last of them a letter or digit"
    )]
    UserName {
        /// The text (shortened).
        found: String,
    },
    /// Not an identity.
    #[error(
        "identity: expected hearth://CLUSTER/node/NAME or hearth://CLUSTER/user/NAME, got {found:?}"
    )]
    Uri {
        /// The text (shortened).
        found: String,
    },
}

/// Enough of an invalid name to recognise it, not enough to fill a log.
fn shorten(found: &str) -> String {
    const MAX_QUOTED_CHARS: usize = 80;
    match found.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((at, _)) => format!("{}…", &found[..at]),
        None => found.to_owned(),
    }
}

/// 16 bytes from exactly 32 lower-case hexadecimal digits.
fn parse_hex16(text: &str) -> Option<[u8; 16]> {
    if text.bytes().any(|b| b.is_ascii_uppercase()) {
        return None; // lowercase only: each name has exactly one text
    }
    let mut bytes = [0; 16];
    hex::decode_to_slice(text, &mut bytes).ok()?;
    Some(bytes)
}

/// A node's name: `hearth-` and the hexadecimal form of 16 bytes.
///
/// The bytes are the beginning of the node's public key at its registration. The name outlives that
/// key, so neither may be derived from the other later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId([u8; 16]);

impl NodeId {
    const PREFIX: &'static str = "hearth-";

    /// The name of a node that registers with this key.
    pub fn from_public_key(key: &PublicKey) -> Self {
        let mut id = [0; 16];
        id.copy_from_slice(&key.as_bytes()[..16]);
        Self(id)
    }

    /// From its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The 32 hexadecimal digits alone, as in the machine-id.
    pub fn bare(&self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}{}", Self::PREFIX, hex::encode(self.0)))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for NodeId {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        text.strip_prefix(Self::PREFIX)
            .and_then(parse_hex16)
            .map(Self)
            .ok_or_else(|| IdentityError::NodeId {
                found: shorten(text),
            })
    }
}

/// A cluster's name: 16 random bytes, generated at bootstrap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId([u8; 16]);

impl ClusterId {
    /// Generates a new one.
    pub fn generate() -> Self {
        Self(super::random_bytes())
    }

    /// From its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl TryFrom<&[u8]> for ClusterId {
    type Error = IdentityError;

    fn try_from(bytes: &[u8]) -> Result<Self, IdentityError> {
        let found = bytes.len();
        <[u8; 16]>::try_from(bytes)
            .map(Self)
            .map_err(|_| IdentityError::ClusterIdLength { found })
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(self.0))
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ClusterId {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        parse_hex16(text)
            .map(Self)
            .ok_or_else(|| IdentityError::ClusterId {
                found: shorten(text),
            })
    }
}

/// A user's name, such as `owner`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UserName(String);

impl UserName {
    /// The user name of the holder of the owner key.
    pub const OWNER: &'static str = "owner";

    /// The user name of the holder of the owner key.
    pub fn owner() -> Self {
        Self(Self::OWNER.to_owned())
    }

    /// Checks and wraps a name.
    pub fn new(name: &str) -> Result<Self, IdentityError> {
        let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = name.as_bytes();
        let ends = [bytes.first(), bytes.last()];
        if bytes.len() <= 63
            && bytes
                .iter()
                .all(|&b| alphanumeric(b) || b == b'-' || b == b'.')
            && ends
                .into_iter()
                .all(|end| end.is_some_and(|&b| alphanumeric(b)))
        {
            Ok(Self(name.to_owned()))
        } else {
            Err(IdentityError::UserName {
                found: shorten(name),
            })
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// A node or user within a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    /// One of its nodes.
    Node(NodeId),
    /// One of its users.
    User(UserName),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(id) => write!(f, "node {id}"),
            Self::User(name) => write!(f, "user {name}"),
        }
    }
}

/// A globally unique identity: the one URI in the subject alternative name of a certificate,
/// `hearth://CLUSTER/node/NAME` or `hearth://CLUSTER/user/NAME`.
///
/// Each identity has exactly one spelling; anything else does not parse.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The cluster that has issued the certificate.
    pub cluster: ClusterId,
    /// The node or user within it.
    pub subject: Subject,
}

impl Identity {
    /// A node of the cluster.
    pub const fn node(cluster: ClusterId, id: NodeId) -> Self {
        Self {
            cluster,
            subject: Subject::Node(id),
        }
    }

    /// A user of the cluster.
    pub const fn user(cluster: ClusterId, name: UserName) -> Self {
        Self {
            cluster,
            subject: Subject::User(name),
        }
    }

    /// The node's ID, if it is a node.
    pub const fn node_id(&self) -> Option<NodeId> {
        match self.subject {
            Subject::Node(id) => Some(id),
            Subject::User(_) => None,
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            Subject::Node(id) => write!(f, "hearth://{}/node/{id}", self.cluster),
            Subject::User(name) => write!(f, "hearth://{}/user/{name}", self.cluster),
        }
    }
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let malformed = || IdentityError::Uri {
            found: shorten(text),
        };
        let rest = text.strip_prefix("hearth://").ok_or_else(malformed)?;
        let (cluster, rest) = rest.split_once('/').ok_or_else(malformed)?;
        let (kind, name) = rest.split_once('/').ok_or_else(malformed)?;
        let cluster = cluster.parse()?;
        let subject = match kind {
            "node" => Subject::Node(name.parse()?),
            "user" => Subject::User(UserName::new(name)?),
            _ => return Err(malformed()),
        };
        Ok(Self { cluster, subject })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::identity::SigningKey;

    fn user_name() -> impl Strategy<Value = UserName> {
        "[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?".prop_map(|s| UserName::new(&s).expect("valid"))
    }

    fn subject() -> impl Strategy<Value = Subject> {
        prop_oneof![
            any::<[u8; 16]>().prop_map(|b| Subject::Node(NodeId::from_bytes(b))),
            user_name().prop_map(Subject::User),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn identities_round_trip(cluster: [u8; 16], subject in subject()) {
            let identity = Identity { cluster: ClusterId::from_bytes(cluster), subject };
            prop_assert_eq!(identity.to_string().parse::<Identity>(), Ok(identity));
        }

        #[test]
        fn what_parses_is_the_one_spelling(text in "(hearth://)?[0-9a-fA-F]{30,33}/(node|user|)/.{0,70}") {
            if let Ok(identity) = text.parse::<Identity>() {
                prop_assert_eq!(identity.to_string(), text);
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text: String) {
            let _ = text.parse::<Identity>();
            let _ = text.parse::<NodeId>();
            let _ = text.parse::<ClusterId>();
            let _ = UserName::new(&text);
            let _ = ClusterId::try_from(text.as_bytes());
        }

        #[test]
        fn node_ids_round_trip(bytes: [u8; 16]) {
            let id = NodeId::from_bytes(bytes);
            prop_assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
            prop_assert_eq!(format!("hearth-{}", id.bare()), id.to_string());
        }
    }

    #[test]
    fn a_node_is_named_after_its_key() {
        let key = SigningKey::from_seed([3; 32]).public();
        let id = NodeId::from_public_key(&key);
        assert_eq!(id.bare(), hex::encode(&key.as_bytes()[..16]));
        assert_eq!(id.bare().len(), 32);
    }

    #[test]
    fn close_to_right_is_wrong() {
        let right = "hearth://000102030405060708090a0b0c0d0e0f/user/owner";
        assert!(right.parse::<Identity>().is_ok());
        for wrong in [
            "",
            "hearth://",
            "HEARTH://000102030405060708090a0b0c0d0e0f/user/owner",
            "http://000102030405060708090a0b0c0d0e0f/user/owner",
            "hearth://000102030405060708090A0B0C0D0E0F/user/owner",
            "hearth://000102030405060708090a0b0c0d0e/user/owner",
            "hearth://000102030405060708090a0b0c0d0e0f/group/owner",
            "hearth://000102030405060708090a0b0c0d0e0f/user/",
            "hearth://000102030405060708090a0b0c0d0e0f/user/owner/",
            "hearth://000102030405060708090a0b0c0d0e0f/user/owner?x",
            "hearth://000102030405060708090a0b0c0d0e0f/node/owner",
            "hearth://000102030405060708090a0b0c0d0e0f:1/user/owner",
        ] {
            assert!(wrong.parse::<Identity>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn errors_stay_short() {
        let error = "é"
            .repeat(10_000)
            .parse::<NodeId>()
            .expect_err("no node ID");
        assert!(error.to_string().len() < 400, "{error}");
    }
}
