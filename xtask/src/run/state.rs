//! What `cargo xtask run` keeps from one run to the next: `hearth/run/` in the target folder.
//!
//! | file | what |
//! |---|---|
//! | `founding.json` | what the cluster was founded with; its presence says that all else here belongs to one cluster |
//! | `owner-key.pem`, `first-contact-secret` | the owner's, which only this folder has |
//! | `parameters.pb` | what the first node was told |
//! | `register.pb` | what the others were told: the register ticket is in it |
//! | `hearthctl/` | hearthctl's configuration |
//! | `net/` | the network: its log and what was on the wire (`hearth_qemu::switch`) |
//! | `node-1/` … | the machines: disk, UEFI variables, logs, sockets (`hearth_qemu::run_dir`) |
//! | `run.lock` | held by the one `run` that is at work |
//!
//! `founding.json` is the first to go and the last to come: a start over that was interrupted is begun again by the next
//! run, and no disk is ever booted with the keys of another cluster.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hearth_api::owner;
use hearth_api::v1;
use hearth_qemu::cluster::{self, Cluster};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::target::{self, shown};

/// Under which nodes of this cluster have names.
const DOMAIN: &str = "cluster.internal";

const FOUNDING: &str = "founding.json";
const PARAMETERS: &str = "parameters.pb";
const REGISTER: &str = "register.pb";

/// How the data partition is protected.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// Raw: the next run can boot this cluster again
    Insecure,
    /// dm-crypt: a node that reboots gets its key from the others; once all are down, the cluster cannot be booted again
    /// yet
    Encrypted,
}

impl Storage {
    /// Its word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Storage::Insecure => "insecure",
            Storage::Encrypted => "encrypted",
        }
    }

    fn policy(self) -> v1::StorageSecurityPolicy {
        match self {
            Storage::Insecure => v1::StorageSecurityPolicy::NeedsInsecure,
            Storage::Encrypted => v1::StorageSecurityPolicy::NeedsEncryption,
        }
    }
}

/// What the user asked for, as far as it is settled by the founding.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Whatever is there goes.
    pub fresh: bool,
    /// None: as it is, or the default.
    pub storage: Option<Storage>,
    /// Parameters of the user's own.
    pub parameters: Option<Vec<u8>>,
    /// None: as it is, or the default.
    pub disk_bytes: Option<u64>,
    /// How many nodes. None: as many as there are, or one.
    pub nodes: Option<u16>,
    /// Its machines have Kubernetes.
    pub kubernetes: bool,
}

/// What a cluster was founded with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Founding {
    version: u32,
    /// None where the parameters are the user's own.
    pub storage: Option<Storage>,
    /// Of the parameters, where they are the user's own.
    parameters_sha256: Option<String>,
    /// Size of each node's disk.
    pub disk_bytes: u64,
    /// How many nodes it has, or is to have.
    pub nodes: u16,
    /// The nodes that have been members, by their machines' names.
    pub members: BTreeMap<String, String>,
    /// Whether the first node has been HOME.
    pub was_home: bool,
    /// Where the curators were found when the owner key was exchanged for a certificate.
    pub owned_at: Vec<SocketAddr>,
    /// What the machines were last made of.
    pub make: Option<Make>,
    /// What they last booted.
    pub built: Option<Built>,
}

/// What a run has built for its machines. A machine that is started again boots the same, whatever the sources have become.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Built {
    /// The disk.
    pub image: PathBuf,
    /// For direct boot.
    pub kernel: PathBuf,
    /// For direct boot.
    pub initramfs: PathBuf,
    /// For direct boot.
    pub cmdline: String,
    /// The program that is the network.
    pub switch: PathBuf,
}

/// What the machines of a run are made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Make {
    /// Of each.
    pub cpus: u32,
    /// Of each.
    pub memory_mib: u32,
    /// Whether QEMU loads the kernel.
    pub direct: bool,
    /// Whether they have the debug service.
    pub debug: bool,
    /// What they run on, as `--accel` has it.
    pub accel: String,
    /// Whether they have Kubernetes.
    #[serde(default)]
    pub kubernetes: bool,
    /// Of which bundle, where it is one of the user's.
    #[serde(default)]
    pub bundle: Option<PathBuf>,
}

impl Founding {
    const VERSION: u32 = 2;
    const DISK_BYTES: u64 = 4 << 30;

    fn new(wish: &Wish) -> Founding {
        let custom = wish.parameters.as_deref();
        Founding {
            version: Founding::VERSION,
            storage: match custom {
                Some(_) => None,
                None => Some(wish.storage.unwrap_or(Storage::Insecure)),
            },
            parameters_sha256: custom.map(sha256),
            disk_bytes: wish.disk_bytes.unwrap_or(Founding::DISK_BYTES),
            nodes: wish.nodes.unwrap_or(1),
            members: BTreeMap::new(),
            was_home: false,
            owned_at: Vec::new(),
            make: None,
            built: None,
        }
    }

    /// Whether this cluster is what is wished for. The errors say what is there.
    fn meets(&self, wish: &Wish) -> Result<()> {
        let over = "`cargo xtask run --fresh` starts over";
        if let Some(parameters) = &wish.parameters
            && self.parameters_sha256 != Some(sha256(parameters))
        {
            bail!("this cluster was founded with other parameters; {over} with these");
        }
        if let Some(storage) = wish.storage
            && self.storage != Some(storage)
        {
            let found = self.storage.map_or("parameters of your own", Storage::word);
            let wanted = storage.word();
            bail!(
                "this cluster was founded with {found}, not with --storage {wanted}; {over} with that"
            );
        }
        if let Some(bytes) = wish.disk_bytes
            && self.disk_bytes != bytes
        {
            bail!(
                "this cluster's disk has {} bytes, not {bytes}; {over} with that",
                self.disk_bytes
            );
        }
        // It is on the disks that were made with the cluster.
        if wish.kubernetes && self.make.as_ref().is_some_and(|make| !make.kubernetes) {
            bail!("this cluster's machines were made without Kubernetes; {over} with it");
        }
        if let Some(nodes) = wish.nodes {
            if nodes < self.nodes {
                bail!(
                    "this cluster has {} nodes, and --nodes {nodes} would forget some of them: leave --nodes out, take nodes out of the running cluster by `cargo xtask ctl -- node decommission` and `node delete`, or start over by `cargo xtask run --fresh --nodes {nodes}`",
                    self.nodes
                );
            }
            if nodes > 1 && self.storage.is_none() {
                bail!(
                    "this cluster's owner key is not here, which takes in further nodes: its parameters are your own; {over}"
                );
            }
        }
        if self.storage == Some(Storage::Encrypted) && self.was_home {
            bail!(
                "this cluster has encrypted storage and is down; an encrypted cluster cannot cold-start yet, so {over}"
            );
        }
        Ok(())
    }
}

/// The folder, for one run at a time.
pub struct State {
    folder: PathBuf,
    _lock: File,
}

impl State {
    /// Where it is, made.
    pub fn folder() -> Result<PathBuf> {
        target::folder("run")
    }

    /// Becomes the one run that is at work.
    pub fn open() -> Result<State> {
        State::at(State::folder()?)
    }

    fn at(folder: PathBuf) -> Result<State> {
        refuse_running(&folder)?;
        let path = folder.join("run.lock");
        let mut lock = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                // Its machine may have come up since.
                refuse_running(&folder)?;
                let mut holder = String::new();
                let _ = lock.read_to_string(&mut holder);
                bail!(
                    "another `cargo xtask run` is about to start a node (process {}); wait for it, or interrupt it",
                    holder.trim_end()
                );
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        // For the message above only, so it need not be whole.
        let holder = format!("{:<10}\n", std::process::id());
        let _ = lock.write_all_at(holder.as_bytes(), 0);
        Ok(State {
            folder,
            _lock: lock,
        })
    }

    /// The folder, which is the cluster's for `hearth_qemu`.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The owner key.
    pub fn owner_key(&self) -> PathBuf {
        self.folder.join("owner-key.pem")
    }

    /// The first-contact secret.
    pub fn first_contact_secret(&self) -> PathBuf {
        self.folder.join("first-contact-secret")
    }

    fn parameters(&self) -> PathBuf {
        self.folder.join(PARAMETERS)
    }

    /// What further nodes are told.
    pub fn register(&self) -> PathBuf {
        self.folder.join(REGISTER)
    }

    fn founding(&self) -> PathBuf {
        self.folder.join(FOUNDING)
    }

    /// Finds out, before anything is built or changed, whether the wish can be fulfilled. True: it takes a new cluster.
    pub fn check(&self, wish: &Wish) -> Result<bool> {
        match self.found(wish)? {
            Some(founding) => founding.meets(wish).map(|()| false),
            None => Ok(true),
        }
    }

    /// The cluster to boot, with its node's parameters: the one that is there, or a new one.
    pub fn prepare(&self, wish: &Wish) -> Result<(Founding, Vec<u8>)> {
        if let Some(mut founding) = self.found(wish)? {
            founding.meets(wish)?;
            founding.nodes = wish.nodes.unwrap_or(founding.nodes);
            let path = self.parameters();
            let parameters =
                fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            return Ok((founding, parameters));
        }
        self.clear()?;
        let founding = Founding::new(wish);
        let parameters = match (&wish.parameters, founding.storage) {
            (Some(parameters), _) => parameters.clone(),
            (None, storage) => self.bootstrap(storage.unwrap_or(Storage::Insecure))?,
        };
        // They hold the secret.
        write_private(&self.parameters(), &parameters)?;
        self.save(&founding)?;
        Ok((founding, parameters))
    }

    /// What the machines of the cluster that is there were last made of.
    pub fn make(&self, wish: &Wish) -> Result<Option<Make>> {
        Ok(self.found(wish)?.and_then(|founding| founding.make))
    }

    /// Records what has become of the cluster.
    pub fn save(&self, founding: &Founding) -> Result<()> {
        let text = serde_json::to_string_pretty(founding)? + "\n";
        write_private(&self.founding(), text.as_bytes())
    }

    /// What is there that the wish does not do away with anyhow.
    fn found(&self, wish: &Wish) -> Result<Option<Founding>> {
        if wish.fresh { Ok(None) } else { self.load() }
    }

    fn load(&self) -> Result<Option<Founding>> {
        load(&self.folder)
    }

    /// See [`parameters_of`].
    pub fn parameters_of(&self, founding: &Founding, number: u16) -> Result<Option<Vec<u8>>> {
        parameters_of(&self.folder, founding, number)
    }

    /// Removes the cluster that is here, if any.
    fn clear(&self) -> Result<()> {
        remove(&self.founding())?;
        Cluster::remove(&self.folder)?;
        for file in [
            self.owner_key(),
            self.first_contact_secret(),
            self.parameters(),
            self.register(),
        ] {
            remove(&file)?;
        }
        let folder = crate::hearthctl::folder(&self.folder);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", folder.display()))
            }
            _ => Ok(()),
        }
    }

    /// Parameters that found a cluster whose owner is this folder.
    fn bootstrap(&self, storage: Storage) -> Result<Vec<u8>> {
        let key = owner::create_key(&self.owner_key()).context("cannot make the owner key")?;
        let secret = owner::create_first_contact_secret(&self.first_contact_secret())
            .context("cannot make the first-contact secret")?;
        let configuration = v1::ClusterConfiguration {
            cluster_domain: DOMAIN.to_owned(),
            tpm_mode: v1::TpmMode::BestEffort.into(),
            storage_security_policy: storage.policy().into(),
            cold_start_policy: v1::ColdStartPolicy::None.into(),
            kubernetes: None,
        };
        let bootstrap = v1::ClusterBootstrap {
            owner_public_key: key.public().as_bytes().to_vec(),
            first_contact_secret: secret.expose().to_vec(),
            initial_cluster_configuration: Some(configuration),
            ..v1::ClusterBootstrap::default()
        };
        let parameters = v1::NodeParameters {
            cluster: Some(v1::node_parameters::Cluster::ClusterBootstrap(bootstrap)),
            ..v1::NodeParameters::default()
        };
        Ok(parameters.encode_to_vec())
    }
}

fn load(folder: &Path) -> Result<Option<Founding>> {
    let path = folder.join(FOUNDING);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        bytes => bytes.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let read = || -> Result<Founding> {
        let value: serde_json::Value = serde_json::from_slice(&bytes)?;
        if value["version"] != Founding::VERSION {
            bail!("version {}, wanted {}", value["version"], Founding::VERSION);
        }
        Ok(serde_json::from_value(value)?)
    };
    let over = "`cargo xtask run --fresh` starts over";
    match read() {
        Ok(founding) => Ok(Some(founding)),
        Err(error) => Err(error.context(format!("{} is not understood; {over}", shown(&path)))),
    }
}

/// The cluster that is kept in this folder, for those who only want to know.
pub fn founding(folder: &Path) -> Result<Founding> {
    load(folder)?.context("there is no cluster; `cargo xtask run` founds one")
}

/// What the node with this number is told when it is started again: nothing, if it was a member.
pub fn parameters_of(folder: &Path, founding: &Founding, number: u16) -> Result<Option<Vec<u8>>> {
    let name = super::machines::name(number);
    if founding.members.contains_key(&name) {
        return Ok(None);
    }
    let path = folder.join(if number == 1 { PARAMETERS } else { REGISTER });
    let parameters = fs::read(&path);
    parameters
        .with_context(|| format!("cannot read {}", path.display()))
        .map(Some)
}

/// Writes what further nodes are told, which is a secret, and returns it.
pub fn save_register(path: &Path, parameters: &v1::NodeParameters) -> Result<Vec<u8>> {
    let bytes = parameters.encode_to_vec();
    write_private(path, &bytes)?;
    Ok(bytes)
}

/// A node that runs is neither started again nor has its ground removed.
fn refuse_running(folder: &Path) -> Result<()> {
    if let Some(machine) = cluster::running(folder)?.first() {
        bail!(
            "{} is running already (QEMU is process {}); `cargo xtask stop` powers it off",
            machine.name,
            machine.pid
        );
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Writes a file that nobody else may read; it appears whole.
fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.as_file()
            .set_permissions(fs::Permissions::from_mode(0o600))?;
        file.write_all(bytes)?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(folder: &Path) -> State {
        State::at(folder.to_owned()).unwrap()
    }

    fn bootstrap(bytes: &[u8]) -> v1::ClusterBootstrap {
        let parameters = v1::NodeParameters::decode(bytes).unwrap();
        match parameters.cluster {
            Some(v1::node_parameters::Cluster::ClusterBootstrap(bootstrap)) => bootstrap,
            other => panic!("{other:?}"),
        }
    }

    fn policy(bytes: &[u8]) -> v1::StorageSecurityPolicy {
        let configuration = bootstrap(bytes).initial_cluster_configuration.unwrap();
        configuration.storage_security_policy()
    }

    #[test]
    fn the_next_run_has_the_same_cluster_and_a_fresh_one_another() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        assert!(state.check(&Wish::default()).unwrap());
        let (mut founding, parameters) = state.prepare(&Wish::default()).unwrap();
        assert_eq!(
            policy(&parameters),
            v1::StorageSecurityPolicy::NeedsInsecure
        );
        let key = owner::read_key(&state.owner_key()).unwrap();
        assert_eq!(
            bootstrap(&parameters).owner_public_key,
            key.public().as_bytes()
        );
        founding.owned_at = vec!["127.0.0.1:7835".parse().unwrap()];
        state.save(&founding).unwrap();
        assert!(!state.check(&Wish::default()).unwrap());
        let again = state.prepare(&Wish::default()).unwrap();
        assert_eq!(again, (founding, parameters.clone()));

        let fresh = Wish {
            fresh: true,
            storage: Some(Storage::Encrypted),
            ..Wish::default()
        };
        assert!(state.check(&fresh).unwrap());
        let (founding, other) = state.prepare(&fresh).unwrap();
        assert_eq!(founding.owned_at, []);
        assert_eq!(policy(&other), v1::StorageSecurityPolicy::NeedsEncryption);
        assert_ne!(
            bootstrap(&other).owner_public_key,
            bootstrap(&parameters).owner_public_key
        );
    }

    #[test]
    fn what_the_founding_has_settled_is_not_changed_silently() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let (founding, _) = state.prepare(&Wish::default()).unwrap();
        let refused = |wish: Wish| {
            let error = state.check(&wish).unwrap_err().to_string();
            assert!(error.contains("run --fresh"), "{error}");
            assert_eq!(state.prepare(&wish).unwrap_err().to_string(), error);
            error
        };
        let storage = |storage| Wish {
            storage: Some(storage),
            ..Wish::default()
        };
        let error = refused(storage(Storage::Encrypted));
        assert!(error.contains("founded with insecure"), "{error}");
        refused(Wish {
            parameters: Some(b"x".to_vec()),
            ..Wish::default()
        });
        refused(Wish {
            disk_bytes: Some(1 << 30),
            ..Wish::default()
        });
        state.check(&storage(Storage::Insecure)).unwrap();
        state
            .check(&Wish {
                disk_bytes: Some(founding.disk_bytes),
                ..Wish::default()
            })
            .unwrap();
    }

    #[test]
    fn a_cluster_grows_and_never_shrinks() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let nodes = |nodes| Wish {
            nodes: Some(nodes),
            ..Wish::default()
        };
        let (founding, _) = state.prepare(&nodes(3)).unwrap();
        assert_eq!(founding.nodes, 3);
        assert_eq!(state.prepare(&Wish::default()).unwrap().0.nodes, 3);
        let error = state.check(&nodes(2)).unwrap_err().to_string();
        assert!(error.contains("has 3 nodes"), "{error}");
        let (founding, _) = state.prepare(&nodes(4)).unwrap();
        assert_eq!(founding.nodes, 4);
        state.save(&founding).unwrap();
        assert_eq!(state.prepare(&Wish::default()).unwrap().0.nodes, 4);
    }

    #[test]
    fn further_nodes_need_an_owner_that_is_here() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let own = Wish {
            parameters: Some(b"anything".to_vec()),
            ..Wish::default()
        };
        state.prepare(&own).unwrap();
        let more = Wish {
            nodes: Some(2),
            ..Wish::default()
        };
        let error = state.check(&more).unwrap_err().to_string();
        assert!(error.contains("owner key is not here"), "{error}");
    }

    #[test]
    fn an_encrypted_cluster_goes_on_only_until_it_was_home() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let wish = Wish {
            storage: Some(Storage::Encrypted),
            ..Wish::default()
        };
        let (mut founding, _) = state.prepare(&wish).unwrap();
        state.check(&Wish::default()).unwrap();
        founding.was_home = true;
        state.save(&founding).unwrap();
        let error = state.check(&Wish::default()).unwrap_err().to_string();
        assert!(error.contains("cannot cold-start"), "{error}");
    }

    #[test]
    fn a_start_over_that_was_interrupted_is_begun_again() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let (_, before) = state.prepare(&Wish::default()).unwrap();
        remove(&state.founding()).unwrap();
        let (_, after) = state.prepare(&Wish::default()).unwrap();
        assert_ne!(
            bootstrap(&before).owner_public_key,
            bootstrap(&after).owner_public_key
        );
    }

    #[test]
    fn parameters_of_the_users_own_are_passed_on_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let wish = Wish {
            parameters: Some(b"anything".to_vec()),
            ..Wish::default()
        };
        let (founding, parameters) = state.prepare(&wish).unwrap();
        assert_eq!((founding.storage, parameters), (None, b"anything".to_vec()));
        assert!(!state.owner_key().exists());
        state.check(&wish).unwrap();
        state.check(&Wish::default()).unwrap();
    }

    #[test]
    fn there_is_one_run_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let held = state(folder.path());
        let error = State::at(folder.path().to_owned()).err().unwrap();
        let me = format!("(process {})", std::process::id());
        assert!(error.to_string().contains(&me), "{error}");
        drop(held);
        state(folder.path());
    }

    #[test]
    fn a_record_of_another_version_is_not_guessed_at() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        state.prepare(&Wish::default()).unwrap();
        fs::write(state.founding(), r#"{"version":1}"#).unwrap();
        let error = format!("{:#}", state.check(&Wish::default()).unwrap_err());
        assert!(error.contains("version 1, wanted 2"), "{error}");
        // Starting over does not read it.
        let fresh = Wish {
            fresh: true,
            ..Wish::default()
        };
        assert!(state.check(&fresh).unwrap());
        state.prepare(&fresh).unwrap();
        assert!(!state.check(&Wish::default()).unwrap());
    }
}
