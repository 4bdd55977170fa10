//! Contexts: the known clusters, with the user's credentials for each.
//!
//! They are stored in one JSON file. It contains no secrets: it has the path of the private key,
//! which stays where the user keeps it. The certificate is a file in the same directory.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use hearth_api::certificates::Leaf;
use hearth_api::client::{Endpoint, EndpointError};
use hearth_api::escrow::Exchanged;
use hearth_api::identity::{ClusterId, IdentityError, SigningKey, UserCredentials};
use hearth_api::names::PORT_CURATOR;
use hearth_api::owner;
use hearth_api::tls::{self, CertificateDer};
use hearth_api::v1::{Node, NodeState};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Kind};
use crate::files;

/// Version of the file format.
const VERSION: u32 = 1;

/// A cluster, and the user's credentials for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Context {
    /// 32 hexadecimal digits.
    pub cluster_id: String,
    /// The cluster's CA certificate, PEM.
    pub ca: String,
    /// Endpoints of its curators that the user has named, in the order in which they are tried.
    pub endpoints: Vec<String>,
    /// Those of all its curators, as the cluster knew them when the certificate was issued. They are tried
    /// afterwards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub learned: Vec<String>,
    /// Path of the user's certificate (PEM), relative to the contexts file.
    pub certificate: PathBuf,
    /// Path of the user's private key (PKCS #8, PEM), relative to the contexts file.
    pub key: PathBuf,
    /// When the certificate is to be renewed, Unix seconds; absent means at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_after: Option<u64>,
    /// Address mappings: connections to the key go to the value instead.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub routes: BTreeMap<String, String>,
}

/// Content of the contexts file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    current: Option<String>,
    contexts: BTreeMap<String, Context>,
}

/// The contexts file.
#[derive(Debug)]
pub(crate) struct Contexts {
    path: PathBuf,
    stored: Stored,
}

impl Contexts {
    /// Reads the file. A missing file has no contexts; an invalid one is an error.
    pub(crate) fn load(path: Option<PathBuf>) -> Result<Self, Failure> {
        let path = path.map_or_else(default_path, Ok)?;
        let failed = || Failure::new(Kind::Local, format!("read {}", path.display()));
        let stored = match fs::read(&path) {
            Ok(bytes) => {
                let stored: Stored =
                    serde_json::from_slice(&bytes).map_err(|error| failed().because(error))?;
                if stored.version > VERSION {
                    return Err(failed().because(format!(
                        "its version is {}; this hearthctl supports versions up to {VERSION}",
                        stored.version
                    )));
                }
                stored
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Stored {
                version: VERSION,
                current: None,
                contexts: BTreeMap::new(),
            },
            Err(error) => return Err(failed().because(error)),
        };
        Ok(Self { path, stored })
    }

    /// Changes the file. Other processes that do the same wait meanwhile, so nothing of theirs is lost.
    pub(crate) fn change<T>(
        path: Option<PathBuf>,
        change: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let path = path.map_or_else(default_path, Ok)?;
        let _lock = files::Lock::of(&path).map_err(|error| {
            Failure::new(Kind::Local, format!("lock {}", path.display())).because(error)
        })?;
        let mut contexts = Self::load(Some(path))?;
        let changed = change(&mut contexts)?;
        contexts.save()?;
        Ok(changed)
    }

    /// Writes the file.
    fn save(&self) -> Result<(), Failure> {
        let failed = || Failure::new(Kind::Local, format!("write {}", self.path.display()));
        let mut json =
            serde_json::to_vec_pretty(&self.stored).map_err(|error| failed().because(error))?;
        json.push(b'\n');
        files::write_private(&self.path, &json).map_err(|error| failed().because(error))
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// All contexts, by name.
    pub(crate) fn all(&self) -> &BTreeMap<String, Context> {
        &self.stored.contexts
    }

    /// Name of the current context.
    pub(crate) fn current(&self) -> Option<&str> {
        self.stored.current.as_deref()
    }

    /// The context of this name, or the current one.
    pub(crate) fn get<'a>(
        &'a self,
        name: Option<&'a str>,
    ) -> Result<(&'a str, &'a Context), Failure> {
        let Some(name) = name.or(self.current()) else {
            return Err(Failure::new(Kind::Local, "select a context")
                .because(format!("{} has no current context", self.path.display()))
                .advise(
                    "create one with `hearthctl cluster take-ownership`, or select one with \
                     --context or `hearthctl context use`",
                ));
        };
        match self.stored.contexts.get(name) {
            Some(context) => Ok((name, context)),
            None => {
                let known: Vec<_> = self.stored.contexts.keys().map(String::as_str).collect();
                Err(Failure::new(Kind::Local, format!("use context {name:?}"))
                    .because(format!("{} has no such context", self.path.display()))
                    .advise(format!("available contexts: {}", known.join(", "))))
            }
        }
    }

    /// Makes an existing context the current one.
    pub(crate) fn select(&mut self, name: &str) -> Result<(), Failure> {
        self.get(Some(name))?;
        self.stored.current = Some(name.to_owned());
        Ok(())
    }

    /// Adds a context, or replaces the one of this name, and makes it the current one. The
    /// certificate is written to a file of its own.
    pub(crate) fn add(
        &mut self,
        name: &str,
        endpoints: &[Endpoint],
        credentials: &UserCredentials,
        leaf: &Leaf,
        key: &KeyFile,
    ) -> Result<(), Failure> {
        let name = valid_name(name)?;
        let certificate = PathBuf::from(format!("{name}.certificate.pem"));
        self.write_certificate(&certificate, &credentials.certificate)?;
        // Routes do not depend on the certificate: they are kept.
        let before = self.stored.contexts.remove(name);
        let context = Context {
            routes: before.map(|before| before.routes).unwrap_or_default(),
            cluster_id: leaf.identity.cluster.to_string(),
            ca: to_pem(&credentials.ca),
            endpoints: endpoints.iter().map(Endpoint::to_string).collect(),
            learned: Vec::new(),
            certificate,
            renew_after: Some(renew_after(leaf)),
            key: key.0.clone(),
        };
        self.stored.contexts.insert(name.to_owned(), context);
        self.stored.current = Some(name.to_owned());
        Ok(())
    }

    /// Replaces the certificate of a context by a newer one.
    pub(crate) fn renew(&mut self, name: &str, exchanged: &Exchanged) -> Result<(), Failure> {
        let file = self.get(Some(name))?.1.certificate.clone();
        self.write_certificate(&file, &exchanged.credentials.certificate)?;
        if let Some(context) = self.stored.contexts.get_mut(name) {
            context.renew_after = Some(renew_after(&exchanged.leaf));
        }
        Ok(())
    }

    /// Replaces the curators of a context that the cluster has told of.
    pub(crate) fn learn(&mut self, name: &str, nodes: &[Node]) {
        if let Some(context) = self.stored.contexts.get_mut(name) {
            let curators = curators(nodes);
            context.learned = curators.map(|endpoint| endpoint.to_string()).collect();
        }
    }

    fn write_certificate(&self, file: &Path, der: &CertificateDer<'_>) -> Result<(), Failure> {
        let path = self.beside(file);
        files::write_private(&path, to_pem(der).as_bytes()).map_err(|error| {
            Failure::new(Kind::Local, format!("write {}", path.display())).because(error)
        })
    }

    /// Maps `address` to `via` in a context, or removes the mapping.
    pub(crate) fn route(
        &mut self,
        name: Option<&str>,
        address: &Endpoint,
        via: Option<&Endpoint>,
    ) -> Result<(), Failure> {
        let name = self.get(name)?.0.to_owned();
        if let Some(context) = self.stored.contexts.get_mut(&name) {
            match via {
                Some(via) => context.routes.insert(address.to_string(), via.to_string()),
                None => context.routes.remove(&address.to_string()),
            };
        }
        Ok(())
    }

    /// Reads key and certificates of the user of a context.
    pub(crate) fn credentials(
        &self,
        name: &str,
        context: &Context,
    ) -> Result<UserCredentials, Failure> {
        let wrong = |what: &str| Failure::new(Kind::Local, format!("{what} of context {name:?}"));
        let again = "get a new certificate with `hearthctl cluster take-ownership`";
        let key = owner::read_key(&self.beside(&context.key))
            .map_err(|error| wrong("read the private key").because(error))?;
        let path = self.beside(&context.certificate);
        let certificate = fs::read(&path).map_err(|error| {
            wrong("read the certificate")
                .because(format!("{}: {error}", path.display()))
                .advise(again)
        })?;
        Ok(UserCredentials {
            key: SigningKey::clone(&key),
            certificate: from_pem(&certificate).ok_or_else(|| {
                wrong("read the certificate")
                    .because(format!(
                        "{}: expected one certificate in PEM",
                        path.display()
                    ))
                    .advise(again)
            })?,
            ca: from_pem(context.ca.as_bytes()).ok_or_else(|| {
                wrong("read the CA certificate")
                    .because(format!(
                        "{}: expected one certificate in PEM",
                        self.path.display()
                    ))
                    .advise(again)
            })?,
        })
    }

    fn beside(&self, path: &Path) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(path)
    }
}

/// A private key file that a context can refer to.
#[derive(Clone, Debug)]
pub(crate) struct KeyFile(PathBuf);

impl KeyFile {
    /// Its links stay: a mounted secret is replaced by changing one of them.
    pub(crate) fn new(path: &Path) -> Result<Self, Failure> {
        let failed = || Failure::new(Kind::Local, format!("use the key {}", path.display()));
        let metadata = fs::metadata(path).map_err(|error| failed().because(error))?;
        if !metadata.is_file() {
            return Err(
                failed().because("expected a regular file: it is read again by each command")
            );
        }
        let path = std::path::absolute(path).map_err(|error| failed().because(error))?;
        Ok(Self(path))
    }
}

/// When a certificate that was just issued is to be renewed: after half of its time.
fn renew_after(leaf: &Leaf) -> u64 {
    let now = tls::now(&tls::wall_clock()).as_secs();
    now + leaf.not_after.as_secs().saturating_sub(now) / 2
}

impl Context {
    /// The endpoints of the curators, each once, in the order in which they are tried: those that the cluster has
    /// told of through the address mappings.
    pub(crate) fn endpoints(&self) -> Result<Vec<Endpoint>, Failure> {
        let parse = |text: &String| {
            text.parse()
                .map_err(|error| Failure::new(Kind::Local, "read the contexts").because(error))
        };
        let named: Result<Vec<Endpoint>, _> = self.endpoints.iter().map(parse).collect();
        let mut all = named?;
        for text in &self.learned {
            let reached = self.reach(parse(text)?)?;
            if !all.contains(&reached) {
                all.push(reached);
            }
        }
        Ok(all)
    }
}

/// The endpoints of the curators among the nodes of a cluster: of the consensus members that are UP and have reported
/// their addresses.
fn curators(nodes: &[Node]) -> impl Iterator<Item = Endpoint> {
    let members = nodes.iter().filter(|node| {
        let roles = node.roles.unwrap_or_default();
        node.state() == NodeState::Up && roles.consensus_member.is_some()
    });
    members.filter_map(|node| Some(Endpoint::new(reported_address(node)?, PORT_CURATOR)))
}

/// The address that a node has reported to the cluster.
pub(crate) fn reported_address(node: &Node) -> Option<IpAddr> {
    node.status.as_ref()?.external_address.parse().ok()
}

/// The name of a context for which none was given: the first 8 digits of the cluster ID.
pub(crate) fn default_name(cluster: ClusterId) -> String {
    cluster.to_string()[..8].to_owned()
}

impl Context {
    /// The parsed ID of the cluster.
    pub(crate) fn cluster(&self) -> Result<ClusterId, Failure> {
        let id = self.cluster_id.parse();
        id.map_err(|error: IdentityError| {
            Failure::new(Kind::Local, "read the contexts").because(error)
        })
    }

    /// The parsed address mappings.
    pub(crate) fn parsed_routes(&self) -> Result<BTreeMap<Endpoint, Endpoint>, Failure> {
        let routes = self.routes.iter();
        let parse = |(from, via): (&String, &String)| Ok((from.parse()?, via.parse()?));
        let parsed: Result<_, EndpointError> = routes.map(parse).collect();
        parsed.map_err(|error| Failure::new(Kind::Local, "read the contexts").because(error))
    }

    /// Applies the routes: the address to connect to instead of `address`.
    pub(crate) fn reach(&self, address: Endpoint) -> Result<Endpoint, Failure> {
        match self.routes.get(&address.to_string()) {
            Some(via) => via
                .parse()
                .map_err(|error| Failure::new(Kind::Local, "read the contexts").because(error)),
            None => Ok(address),
        }
    }
}

/// Checks the name of a context, because it becomes part of a file name.
pub(crate) fn valid_name(name: &str) -> Result<&str, Failure> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if (1..=63).contains(&name.len()) && name.bytes().all(good) && !name.starts_with('.') {
        Ok(name)
    } else {
        Err(
            Failure::new(Kind::Local, format!("create context {name:?}")).because(
                "expected 1 to 63 letters, digits, \"-\", \"_\" or \".\", no leading \".\"",
            ),
        )
    }
}

fn default_path() -> Result<PathBuf, Failure> {
    let absolute = |name: &str| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CONFIG_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".config")))
        .map(|folder| folder.join("hearth").join("config.json"))
        .ok_or_else(|| {
            Failure::new(Kind::Local, "find the contexts file")
                .because("neither XDG_CONFIG_HOME nor HOME is an absolute path")
                .advise("set the path with --config or HEARTH_CONFIG")
        })
}

/// Encodes a DER certificate as PEM with LF line endings.
pub(crate) fn to_pem(certificate: &[u8]) -> String {
    let pem = pem::Pem::new("CERTIFICATE", certificate);
    let lines = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem, lines)
}

fn from_pem(text: &[u8]) -> Option<CertificateDer<'static>> {
    match &pem::parse_many(text).ok()?[..] {
        [one] if one.tag() == "CERTIFICATE" => Some(CertificateDer::from(one.contents().to_vec())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::testing::TestCluster;
    use hearth_api::v1::{NodeRoles, NodeStatus};

    use super::*;

    #[test]
    fn contexts_read_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("hearth/config.json");
        let key_path = folder.path().join("key.pem");
        let key = owner::create_key(&key_path).expect("made");
        let cluster = TestCluster::new();
        let credentials = UserCredentials {
            certificate: cluster.user_certificate("owner", key.public()),
            ca: cluster.ca().clone(),
            key: SigningKey::clone(&key),
        };
        let key_file = KeyFile::new(&key_path).expect("a file");
        let now = tls::now(&tls::wall_clock());
        let leaf = cluster.parsed_ca().verify(&credentials.certificate, now);
        let leaf = leaf.expect("proper");
        let endpoint: Endpoint = "192.0.2.1".parse().expect("an endpoint");

        let mut contexts = Contexts::load(Some(path.clone())).expect("empty");
        assert!(contexts.get(None).is_err());
        contexts
            .add(
                "one",
                std::slice::from_ref(&endpoint),
                &credentials,
                &leaf,
                &key_file,
            )
            .expect("added");
        contexts
            .add("two", &[], &credentials, &leaf, &key_file)
            .expect("added");
        contexts.select("one").expect("there");
        assert!(contexts.select("three").is_err());
        let via: Endpoint = "127.0.0.1:7".parse().expect("an endpoint");
        contexts
            .route(None, &endpoint, Some(&via))
            .expect("the current one");
        // Routes are kept when the certificate is replaced.
        contexts
            .add(
                "one",
                std::slice::from_ref(&endpoint),
                &credentials,
                &leaf,
                &key_file,
            )
            .expect("added again");
        let node = |address: &str, is_member: bool, state: NodeState| Node {
            state: state.into(),
            roles: Some(NodeRoles {
                consensus_member: is_member.then(Default::default),
                ..NodeRoles::default()
            }),
            status: Some(NodeStatus {
                external_address: address.to_owned(),
                ..NodeStatus::default()
            }),
            ..Node::default()
        };
        let learned: Endpoint = "192.0.2.7:7835".parse().expect("an endpoint");
        contexts.learn(
            "one",
            &[
                node("192.0.2.7", true, NodeState::Up),
                node("192.0.2.8", true, NodeState::New),
                node("192.0.2.9", false, NodeState::Up),
                node("", true, NodeState::Up),
                // Reached through the mapping, which leads to the endpoint that was named.
                node("192.0.2.10", true, NodeState::Up),
            ],
        );
        let same: Endpoint = "192.0.2.10:7835".parse().expect("an endpoint");
        contexts
            .route(None, &same, Some(&endpoint))
            .expect("the current one");
        contexts.save().expect("saved");

        let again = Contexts::load(Some(path)).expect("read");
        let (name, context) = again.get(None).expect("the current one");
        assert_eq!(name, "one");
        assert_eq!(
            context.endpoints().expect("good"),
            [endpoint.clone(), learned]
        );
        assert_eq!(context.cluster_id, cluster.id.to_string());
        assert_eq!(context.reach(endpoint.clone()).expect("good"), via);
        assert_eq!(context.reach(via.clone()).expect("good"), via);
        let read = again.credentials(name, context).expect("good");
        assert_eq!(read.certificate, credentials.certificate);
        assert_eq!(read.ca, credentials.ca);
        assert_eq!(read.key.public(), key.public());
        assert_eq!(again.all().len(), 2);
        let (now, end) = (now.as_secs(), leaf.not_after.as_secs());
        assert!(
            context
                .renew_after
                .is_some_and(|at| (now..end).contains(&at))
        );
    }

    #[test]
    fn bad_files_are_errors_not_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.json");
        for (content, wanted) in [
            ("", "EOF"),
            ("{}", "version"),
            (r#"{"version":2,"contexts":{}}"#, "versions up to 1"),
            (r#"{"version":1,"contexts":{},"more":1}"#, "more"),
        ] {
            fs::write(&path, content).expect("written");
            let error = Contexts::load(Some(path.clone())).expect_err("bad");
            assert!(error.to_string().contains(wanted), "{content:?}: {error}");
        }
    }

    #[test]
    fn names_are_file_names() {
        for good in ["a", "a.b-c_D9"] {
            assert!(valid_name(good).is_ok());
        }
        for wrong in ["", ".", "..", "a/b", "a b", "\u{e9}", &"a".repeat(64)] {
            assert!(valid_name(wrong).is_err(), "{wrong:?}");
        }
    }
}
