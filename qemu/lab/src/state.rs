//! What `cargo xtask run` keeps from one run to the next, in one folder.
//!
//! | file | what |
//! |---|---|
//! | `founding.json` | what the cluster was founded with ([`ClusterRecord`]); its presence means that everything else here belongs to one cluster |
//! | `owner-key.pem`, `first-contact-secret`, `recovery-key` | the owner's secrets, which exist only here |
//! | `parameters.pb` | parameters of the first node |
//! | `register.pb` | parameters of the others, with the register ticket |
//! | `hearthctl/` | hearthctl's configuration |
//! | `net/` | the network: its log and packet captures (`hearth_qemu::switch`) |
//! | `node-1/` … | the machines: disk, UEFI variables, logs, sockets (`hearth_qemu::run_dir`) |
//! | `run.lock` | locked by the active `run` |
//!
//! `founding.json` is removed first and written last: if starting over is interrupted, the next run begins it again,
//! and no disk is ever booted with the keys of another cluster.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hearth_api::v1;
use hearth_qemu::cluster::{self, Cluster};
use prost::Message;

use crate::owner::{self, Owner};
use crate::record::{ClusterRecord, Conflict, MachineConfig, RunOptions, Storage, diff};
use crate::{LabError, Result, dual_stack, hearthctl, machines};

const FOUNDING: &str = "founding.json";
const PARAMETERS: &str = "parameters.pb";
const REGISTER: &str = "register.pb";

/// The state folder, locked by one run at a time.
pub struct State {
    folder: PathBuf,
    _lock: File,
}

/// The start of a run: the existing cluster, or a new one.
#[derive(Debug)]
pub struct Begin {
    options: RunOptions,
    found: Option<ClusterRecord>,
}

impl Begin {
    /// Whether a new cluster has to be founded.
    pub fn is_new(&self) -> bool {
        self.found.is_none()
    }

    /// The hardware of the existing cluster's machines.
    pub fn config(&self) -> Option<&MachineConfig> {
        self.found.as_ref()?.config.as_ref()
    }
}

impl State {
    /// Locks the folder for this run.
    ///
    /// # Errors
    /// If another run is active, or machines are running.
    pub fn open(folder: PathBuf) -> Result<State> {
        refuse_running(&folder)?;
        let path = folder.join("run.lock");
        let mut lock = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(LabError::file("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                // Its machine may have started since.
                refuse_running(&folder)?;
                let mut holder = String::new();
                let _ = lock.read_to_string(&mut holder);
                let holder = holder.trim_end().to_owned();
                return Err(LabError::Busy { holder });
            }
            Err(TryLockError::Error(error)) => return Err(LabError::file("lock", &path)(error)),
        }
        // Only used for the message above, so it need not be complete.
        let holder = format!("{:<10}\n", std::process::id());
        let _ = lock.write_all_at(holder.as_bytes(), 0);
        Ok(State {
            folder,
            _lock: lock,
        })
    }

    /// The folder, which is also the cluster folder of `hearth_qemu` and that of its owner.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    fn founding(&self) -> PathBuf {
        self.folder.join(FOUNDING)
    }

    /// Checks, before anything is built or changed, whether the options can be met.
    ///
    /// # Errors
    /// If the existing cluster does not match the options, or cannot be read.
    pub fn begin(&self, options: RunOptions) -> Result<Begin> {
        let found = match options.fresh {
            true => None,
            false => load(&self.folder)?,
        };
        if let Some(record) = &found {
            diff(record, &options)?;
            let needs_key = record.storage == Some(Storage::Encrypted);
            if needs_key && !owner::recovery_key_file(&self.folder).exists() {
                return Err(Conflict::NoRecoveryKey.into());
            }
        }
        Ok(Begin { options, found })
    }

    /// The cluster to boot, with its first node's parameters. A new one replaces an existing one, and gets these
    /// Kubernetes objects, each in JSON, unless its parameters are the user's own.
    ///
    /// # Errors
    /// If its files cannot be read or written.
    pub fn settle(&self, begin: Begin, manifests: Vec<String>) -> Result<(ClusterRecord, Vec<u8>)> {
        let path = self.folder.join(PARAMETERS);
        if let Some(mut record) = begin.found {
            record.nodes = begin.options.nodes.unwrap_or(record.nodes);
            let parameters = fs::read(&path).map_err(LabError::file("read", &path))?;
            return Ok((record, parameters));
        }
        self.clear()?;
        let record = ClusterRecord::new(&begin.options);
        let parameters = match begin.options.parameters {
            Some(parameters) => parameters,
            None => {
                let mut configuration = record.storage.unwrap_or_default().configuration();
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                kubernetes.api_address = machines::api_address().to_string();
                if record.dual_stack {
                    dual_stack::configure(&mut configuration);
                }
                let owner = Owner::create(&self.folder)?;
                owner.founding(configuration, manifests).encode_to_vec()
            }
        };
        // They contain the secret.
        write_private(&path, &parameters)?;
        self.save(&record)?;
        Ok((record, parameters))
    }

    /// Writes the record of the cluster.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, record: &ClusterRecord) -> Result<()> {
        let path = self.founding();
        let text = record.to_json();
        let text = text.map_err(|error| LabError::file("write", &path)(error.into()))?;
        write_private(&path, text.as_bytes())
    }

    /// See [`parameters_of`].
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn parameters_of(&self, record: &ClusterRecord, number: u16) -> Result<Option<Vec<u8>>> {
        parameters_of(&self.folder, record, number)
    }

    /// Writes the parameters of further nodes, which are secret, and returns them.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save_register(&self, parameters: &v1::NodeParameters) -> Result<Vec<u8>> {
        let bytes = parameters.encode_to_vec();
        write_private(&self.folder.join(REGISTER), &bytes)?;
        Ok(bytes)
    }

    /// Removes the existing cluster, if any.
    fn clear(&self) -> Result<()> {
        remove(&self.founding())?;
        Cluster::remove(&self.folder)?;
        for file in [
            owner::key_file(&self.folder),
            owner::secret_file(&self.folder),
            owner::recovery_key_file(&self.folder),
            self.folder.join(PARAMETERS),
            self.folder.join(REGISTER),
        ] {
            remove(&file)?;
        }
        let folder = hearthctl::folder(&self.folder);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(LabError::file("remove", &folder)(error))
            }
            _ => Ok(()),
        }
    }
}

fn load(folder: &Path) -> Result<Option<ClusterRecord>> {
    let path = folder.join(FOUNDING);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(LabError::file("read", &path))?,
    };
    match ClusterRecord::parse(&bytes) {
        Ok(record) => Ok(Some(record)),
        Err(source) => Err(LabError::Record { path, source }),
    }
}

/// The record of the cluster in this folder, for read-only use.
///
/// # Errors
/// If there is no cluster, or its record cannot be read.
pub fn record(folder: &Path) -> Result<ClusterRecord> {
    load(folder)?.ok_or(LabError::NoCluster)
}

/// The parameters of the node with this number when it is started again: none, if it was a member.
///
/// # Errors
/// If they cannot be read.
pub fn parameters_of(
    folder: &Path,
    record: &ClusterRecord,
    number: u16,
) -> Result<Option<Vec<u8>>> {
    if record.members.contains_key(&machines::name(number)) {
        return Ok(None);
    }
    let path = folder.join(if number == 1 { PARAMETERS } else { REGISTER });
    let parameters = fs::read(&path).map_err(LabError::file("read", &path));
    parameters.map(Some)
}

/// Fails if a node is running: it must not be started again, and its files must not be removed.
fn refuse_running(folder: &Path) -> Result<()> {
    match cluster::running(folder)?.into_iter().next() {
        Some(machine) => Err(LabError::Running {
            machine: machine.name,
            pid: machine.pid,
        }),
        None => Ok(()),
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(LabError::file("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Writes a file that only its owner can read; it appears when it is complete.
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
    write().map_err(LabError::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(folder: &Path) -> State {
        State::open(folder.to_owned()).unwrap()
    }

    fn prepare(state: &State, options: RunOptions) -> (ClusterRecord, Vec<u8>) {
        let manifests = vec!["{}".to_owned()];
        state
            .settle(state.begin(options).unwrap(), manifests)
            .unwrap()
    }

    fn is_new(state: &State) -> bool {
        state.begin(RunOptions::default()).unwrap().is_new()
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
        assert!(is_new(&state));
        let (mut record, parameters) = prepare(&state, RunOptions::default());
        assert_eq!(
            policy(&parameters),
            v1::StorageSecurityPolicy::NeedsEncryption
        );
        let owner = Owner::load(state.path()).unwrap();
        let told = bootstrap(&parameters);
        assert_eq!(told.owner_public_key, owner.key.public().as_bytes());
        let recipient = owner.recovery.unwrap().recipient();
        assert_eq!(told.recovery_recipient, recipient.as_bytes());
        assert_eq!(told.manifests, ["{}"]);
        record.owned_at = vec!["127.0.0.1:7835".parse().unwrap()];
        state.save(&record).unwrap();
        assert!(!is_new(&state));
        let again = prepare(&state, RunOptions::default());
        assert_eq!(again, (record, parameters.clone()));

        let fresh = RunOptions {
            fresh: true,
            storage: Some(Storage::Insecure),
            ..RunOptions::default()
        };
        assert!(state.begin(fresh.clone()).unwrap().is_new());
        let (record, other) = prepare(&state, fresh);
        assert_eq!(record.owned_at, []);
        assert_eq!(policy(&other), v1::StorageSecurityPolicy::NeedsInsecure);
        assert_ne!(
            bootstrap(&other).owner_public_key,
            bootstrap(&parameters).owner_public_key
        );
    }

    #[test]
    fn a_cluster_is_founded_with_both_families_or_never_has_them() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let dual = |fresh| RunOptions {
            fresh,
            dual_stack: true,
            ..RunOptions::default()
        };
        let (record, _) = prepare(&state, RunOptions::default());
        assert!(!record.dual_stack);
        let error = state.begin(dual(false)).unwrap_err().to_string();
        assert!(error.contains("--dual-stack"), "{error}");
        let (record, parameters) = prepare(&state, dual(true));
        assert!(record.dual_stack);
        let configuration = bootstrap(&parameters)
            .initial_cluster_configuration
            .unwrap();
        let kubernetes = configuration.kubernetes.unwrap();
        assert_eq!(
            (kubernetes.pod_ranges.len(), kubernetes.service_ranges.len()),
            (2, 2)
        );
        // The next run need not repeat it.
        assert!(prepare(&state, RunOptions::default()).0.dual_stack);
        state.begin(dual(false)).unwrap();
    }

    #[test]
    fn an_encrypted_cluster_of_an_earlier_release_is_not_booted() {
        for (storage, boots) in [
            (Storage::Encrypted, false),
            (Storage::Tpm, true),
            (Storage::Insecure, true),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let state = state(folder.path());
            let options = RunOptions {
                storage: Some(storage),
                ..RunOptions::default()
            };
            prepare(&state, options);
            remove(&owner::recovery_key_file(state.path())).unwrap();
            match state.begin(RunOptions::default()) {
                Ok(begin) => assert!(boots && !begin.is_new(), "{storage:?}"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!boots && error.contains("run --fresh"), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_cluster_grows_and_never_shrinks() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let nodes = |nodes| RunOptions {
            nodes: Some(nodes),
            ..RunOptions::default()
        };
        assert_eq!(prepare(&state, nodes(3)).0.nodes, 3);
        assert_eq!(prepare(&state, RunOptions::default()).0.nodes, 3);
        let error = state.begin(nodes(2)).unwrap_err().to_string();
        assert!(error.contains("has 3 nodes"), "{error}");
        let (record, _) = prepare(&state, nodes(4));
        assert_eq!(record.nodes, 4);
        state.save(&record).unwrap();
        assert_eq!(prepare(&state, RunOptions::default()).0.nodes, 4);
    }

    #[test]
    fn a_start_over_that_was_interrupted_is_begun_again() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let (_, before) = prepare(&state, RunOptions::default());
        remove(&state.founding()).unwrap();
        let (_, after) = prepare(&state, RunOptions::default());
        assert_ne!(
            bootstrap(&before).owner_public_key,
            bootstrap(&after).owner_public_key
        );
    }

    #[test]
    fn parameters_of_the_users_own_are_passed_on_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        let own = RunOptions {
            parameters: Some(b"anything".to_vec()),
            ..RunOptions::default()
        };
        let (record, parameters) = prepare(&state, own.clone());
        assert_eq!((record.storage, parameters), (None, b"anything".to_vec()));
        assert!(!owner::key_file(state.path()).exists());
        state.begin(own).unwrap();
        assert!(!is_new(&state));
    }

    #[test]
    fn there_is_one_run_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let held = state(folder.path());
        let error = State::open(folder.path().to_owned()).err().unwrap();
        let me = format!("(process {})", std::process::id());
        assert!(error.to_string().contains(&me), "{error}");
        drop(held);
        state(folder.path());
    }

    #[test]
    fn a_record_of_another_version_is_not_guessed_at() {
        let folder = tempfile::tempdir().unwrap();
        let state = state(folder.path());
        prepare(&state, RunOptions::default());
        fs::write(state.founding(), r#"{"version":1}"#).unwrap();
        let error = state.begin(RunOptions::default()).unwrap_err();
        let error = hearth_api::chain(&error);
        assert!(error.contains("version: expected 2, got 1"), "{error}");
        // Starting over does not read it.
        let fresh = RunOptions {
            fresh: true,
            ..RunOptions::default()
        };
        prepare(&state, fresh);
        assert!(!is_new(&state));
    }
}
