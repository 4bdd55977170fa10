//! What a cluster was founded with, and its comparison with the requested options.
//!
//! A [`ClusterRecord`] is kept in the state folder, [`RunOptions`] are the user's, and [`diff`] compares the two:
//! nothing that was fixed by the founding is changed silently.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use hearth_api::v1;
use hearth_qemu::command::Rtc;
use hearth_qemu::hardware::{Card, DiskBus};
use serde::{Deserialize, Serialize};

/// The remedy for a cluster that does not match the options.
pub(crate) const OVER: &str = "start over with `cargo xtask run --fresh`";

/// Namespace of node names in a cluster.
const DOMAIN: &str = "cluster.internal";

/// How the data partition is protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// Unencrypted: the next run can boot this cluster again.
    Insecure,
    /// dm-crypt: the next run boots this cluster again, and unlocks it with the owner's recovery key.
    #[default]
    Encrypted,
    /// dm-crypt, opened by each node's own TPM: the next run can boot this cluster again.
    Tpm,
}

impl Storage {
    /// Its name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Storage::Insecure => "insecure",
            Storage::Encrypted => "encrypted",
            Storage::Tpm => "tpm",
        }
    }

    /// The configuration that such a cluster is founded with.
    pub fn configuration(self) -> v1::ClusterConfiguration {
        let policy = match self {
            Storage::Insecure => v1::StorageSecurityPolicy::NeedsInsecure,
            Storage::Encrypted | Storage::Tpm => v1::StorageSecurityPolicy::NeedsEncryption,
        };
        let (tpm_mode, cold_start_policy) = match self {
            Storage::Insecure => (v1::TpmMode::BestEffort, v1::ColdStartPolicy::None),
            Storage::Encrypted => (v1::TpmMode::BestEffort, v1::ColdStartPolicy::Owner),
            Storage::Tpm => (v1::TpmMode::Required, v1::ColdStartPolicy::Tpm),
        };
        v1::ClusterConfiguration {
            cluster_domain: DOMAIN.to_owned(),
            tpm_mode: tpm_mode.into(),
            storage_security_policy: policy.into(),
            cold_start_policy: cold_start_policy.into(),
            ..v1::ClusterConfiguration::default()
        }
    }
}

/// The user's options that are fixed by the founding.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Replace an existing cluster.
    pub fresh: bool,
    /// None: as it is, or the default.
    pub storage: Option<Storage>,
    /// Parameters given by the user.
    pub parameters: Option<Vec<u8>>,
    /// None: as it is, or the default.
    pub disk_bytes: Option<u64>,
    /// Number of nodes. None: as many as there are, or one.
    pub nodes: Option<u16>,
    /// Whether its machines have Kubernetes.
    pub kubernetes: bool,
    /// Whether machines, pods and services have IPv6, too.
    pub dual_stack: bool,
}

/// What a cluster was founded with, and its current state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    version: u32,
    /// None if the parameters are the user's.
    pub storage: Option<Storage>,
    /// Hash of the parameters, if they are the user's.
    parameters_sha256: Option<String>,
    /// Whether its machines, pods and services have IPv6, too.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub dual_stack: bool,
    /// Size of each node's disk.
    pub disk_bytes: u64,
    /// Current or requested number of nodes.
    pub nodes: u16,
    /// The node IDs of nodes that have been members, by machine name.
    pub members: BTreeMap<String, String>,
    /// Whether the first node has been HOME.
    pub was_home: bool,
    /// Addresses of the curators when the owner key was last exchanged for a certificate.
    pub owned_at: Vec<SocketAddr>,
    /// Hardware of the machines at the last run.
    #[serde(rename = "make")]
    pub config: Option<MachineConfig>,
    /// What they last booted.
    #[serde(rename = "built")]
    pub artifacts: Option<Artifacts>,
}

/// What machines boot, and the program of their network. A machine that is started again boots the same, even if the
/// sources have changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifacts {
    /// Path of the disk image.
    pub image: PathBuf,
    /// Path of the kernel, for direct boot.
    pub kernel: PathBuf,
    /// Path of the initramfs, for direct boot.
    pub initramfs: PathBuf,
    /// The kernel command line, for direct boot.
    pub cmdline: String,
    /// Path of the network's program.
    pub switch: PathBuf,
}

/// Hardware and options of machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Virtual CPUs of each machine.
    pub cpus: u32,
    /// Memory of each machine.
    pub memory_mib: u32,
    /// Whether QEMU loads the kernel.
    pub direct: bool,
    /// Whether they have the debug service.
    pub debug: bool,
    /// Their accelerator, as in `--accel`.
    pub accel: String,
    /// How their disks are attached.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub disk_bus: DiskBus,
    /// The kind of their network cards.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub card: Card,
    /// Their hardware clocks when they are powered on.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub clock: Rtc,
    /// Whether they have a TPM.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub tpm: bool,
    /// Whether they reach no other networks by this host.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub offline: bool,
    /// Whether they have Kubernetes.
    #[serde(default)]
    pub kubernetes: bool,
    /// Path of the bundle, if it is the user's.
    #[serde(default)]
    pub bundle: Option<PathBuf>,
}

/// Whether a value is the default, which records leave out.
fn is_usual<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It was written by another release.
    #[error("version: expected {}, got {found}", ClusterRecord::VERSION)]
    Version {
        /// Its version.
        found: serde_json::Value,
    },
    /// It is malformed.
    #[error(transparent)]
    Content(#[from] serde_json::Error),
}

impl ClusterRecord {
    const VERSION: u32 = 2;
    const DISK_BYTES: u64 = 4 << 30;

    /// The record of a cluster founded with these options.
    pub fn new(options: &RunOptions) -> ClusterRecord {
        let custom = options.parameters.as_deref();
        ClusterRecord {
            version: ClusterRecord::VERSION,
            storage: match custom {
                Some(_) => None,
                None => Some(options.storage.unwrap_or_default()),
            },
            parameters_sha256: custom.map(sha256),
            dual_stack: options.dual_stack,
            disk_bytes: options.disk_bytes.unwrap_or(ClusterRecord::DISK_BYTES),
            nodes: options.nodes.unwrap_or(1),
            members: BTreeMap::new(),
            was_home: false,
            owned_at: Vec::new(),
            config: None,
            artifacts: None,
        }
    }

    /// Parses a record.
    ///
    /// # Errors
    /// If it is malformed, or was written by another release.
    pub fn parse(bytes: &[u8]) -> Result<ClusterRecord, RecordError> {
        let value: serde_json::Value = serde_json::from_slice(bytes)?;
        if value["version"] != ClusterRecord::VERSION {
            let found = value["version"].clone();
            return Err(RecordError::Version { found });
        }
        Ok(serde_json::from_value(value)?)
    }

    /// The record as it is stored.
    ///
    /// # Errors
    /// If a path in it is not UTF-8.
    pub fn to_json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

/// The difference between an existing cluster and the options.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// It was founded with other parameters of the user.
    #[error("this cluster was founded with other parameters; {OVER} to use these")]
    Parameters,
    /// Its storage is protected differently.
    #[error(
        "this cluster was founded with {found}, not with --storage {wanted}; {OVER} to use that"
    )]
    Storage {
        /// The actual protection.
        found: &'static str,
        /// The requested protection.
        wanted: &'static str,
    },
    /// Its disks have another size.
    #[error("this cluster's disk has {found} bytes, not {wanted}; {OVER} to use that")]
    Disk {
        /// Their actual size.
        found: u64,
        /// The requested size.
        wanted: u64,
    },
    /// Its disks do not have Kubernetes.
    #[error("this cluster's machines were made without Kubernetes; {OVER} to add it")]
    Kubernetes,
    /// Its ranges of pods and services are of IPv4 alone.
    #[error("this cluster was founded with IPv4 alone; {OVER} --dual-stack to have both")]
    DualStack,
    /// It has more nodes than requested.
    #[error(
        "this cluster has {has} nodes, which is more than --nodes {wanted}: omit --nodes, remove nodes from the running cluster with `cargo xtask ctl -- node decommission` and `node delete`, or start over by `cargo xtask run --fresh --nodes {wanted}`"
    )]
    Nodes {
        /// Actual number.
        has: u16,
        /// Requested number.
        wanted: u16,
    },
    /// Further nodes cannot be registered from here.
    #[error(
        "cannot add nodes: the owner key of this cluster is not here, because its parameters are your own; {OVER}"
    )]
    NoOwner,
    /// It cannot be unlocked.
    #[error(
        "this cluster has encrypted storage, and its owner has no recovery key to unlock it, because an earlier release has made it; {OVER}"
    )]
    NoRecoveryKey,
    /// No node would found the cluster.
    #[error(
        "--join-later {later}: expected fewer than the cluster's {nodes} nodes, because one of them founds it"
    )]
    JoinLater {
        /// Number of nodes that are left for the user.
        later: u16,
        /// Number of nodes in the cluster.
        nodes: u16,
    },
}

/// Returns the first difference between a cluster and the options.
///
/// # Errors
/// If there is a difference.
pub fn diff(record: &ClusterRecord, options: &RunOptions) -> Result<(), Conflict> {
    if let Some(parameters) = &options.parameters
        && record.parameters_sha256 != Some(sha256(parameters))
    {
        return Err(Conflict::Parameters);
    }
    if let Some(storage) = options.storage
        && record.storage != Some(storage)
    {
        return Err(Conflict::Storage {
            found: record
                .storage
                .map_or("parameters of your own", Storage::word),
            wanted: storage.word(),
        });
    }
    if let Some(wanted) = options.disk_bytes
        && record.disk_bytes != wanted
    {
        let found = record.disk_bytes;
        return Err(Conflict::Disk { found, wanted });
    }
    // It is on the disks, which are made with the cluster.
    let config = record.config.as_ref();
    if options.kubernetes && config.is_some_and(|config| !config.kubernetes) {
        return Err(Conflict::Kubernetes);
    }
    if options.dual_stack && !record.dual_stack {
        return Err(Conflict::DualStack);
    }
    if let Some(wanted) = options.nodes {
        if wanted < record.nodes {
            let has = record.nodes;
            return Err(Conflict::Nodes { has, wanted });
        }
        if wanted > 1 && record.storage.is_none() {
            return Err(Conflict::NoOwner);
        }
    }
    Ok(())
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(storage: Storage) -> RunOptions {
        RunOptions {
            storage: Some(storage),
            ..RunOptions::default()
        }
    }

    #[test]
    fn what_the_founding_has_settled_is_not_changed_silently() {
        let record = ClusterRecord::new(&RunOptions::default());
        let refused = |options: RunOptions| {
            let error = diff(&record, &options).unwrap_err().to_string();
            assert!(error.contains("run --fresh"), "{error}");
            error
        };
        let error = refused(storage(Storage::Insecure));
        assert!(error.contains("founded with encrypted"), "{error}");
        refused(RunOptions {
            parameters: Some(b"x".to_vec()),
            ..RunOptions::default()
        });
        refused(RunOptions {
            disk_bytes: Some(1 << 30),
            ..RunOptions::default()
        });
        diff(&record, &storage(Storage::Encrypted)).unwrap();
        let same = RunOptions {
            disk_bytes: Some(record.disk_bytes),
            ..RunOptions::default()
        };
        diff(&record, &same).unwrap();
    }

    #[test]
    fn each_kind_of_storage_has_a_cold_start() {
        let founded = |storage: Storage| {
            let configuration = storage.configuration();
            let policy = configuration.storage_security_policy();
            (
                policy,
                configuration.tpm_mode(),
                configuration.cold_start_policy(),
            )
        };
        use v1::{ColdStartPolicy, StorageSecurityPolicy, TpmMode};
        let encrypted = StorageSecurityPolicy::NeedsEncryption;
        assert_eq!(
            founded(Storage::default()),
            (encrypted, TpmMode::BestEffort, ColdStartPolicy::Owner)
        );
        assert_eq!(
            founded(Storage::Tpm),
            (encrypted, TpmMode::Required, ColdStartPolicy::Tpm)
        );
        let (policy, _, _) = founded(Storage::Insecure);
        assert_eq!(policy, StorageSecurityPolicy::NeedsInsecure);
    }

    #[test]
    fn further_nodes_need_an_owner_that_is_here() {
        let own = RunOptions {
            parameters: Some(b"anything".to_vec()),
            ..RunOptions::default()
        };
        let more = RunOptions {
            nodes: Some(2),
            ..RunOptions::default()
        };
        let error = diff(&ClusterRecord::new(&own), &more).unwrap_err();
        assert_eq!(error, Conflict::NoOwner);
    }

    /// As written by earlier releases.
    const KEPT: &str = r#"{
  "version": 2,
  "storage": "insecure",
  "parameters_sha256": null,
  "disk_bytes": 4294967296,
  "nodes": 2,
  "members": {
    "node-1": "hearth-00112233445566778899aabbccddeeff"
  },
  "was_home": true,
  "owned_at": [
    "127.0.0.1:40001"
  ],
  "make": {
    "cpus": 2,
    "memory_mib": 512,
    "direct": true,
    "debug": false,
    "accel": "auto",
    "kubernetes": false,
    "bundle": null
  },
  "built": {
    "image": "/a/hearth.img",
    "kernel": "/a/bzImage",
    "initramfs": "/a/initramfs.zst",
    "cmdline": "quiet",
    "switch": "/a/hearth-switch"
  }
}
"#;

    #[test]
    fn other_hardware_is_kept() {
        let mut record = ClusterRecord::parse(KEPT.as_bytes()).unwrap();
        let config = record.config.as_mut().unwrap();
        (config.disk_bus, config.card) = (DiskBus::Nvme, Card::E1000e);
        (config.tpm, config.offline) = (true, true);
        config.clock = "2060-01-01T00:00:00".parse().unwrap();
        let json = record.to_json().unwrap();
        assert!(json.contains("\"tpm\": true"), "{json}");
        assert!(json.contains("\"offline\": true"), "{json}");
        assert!(json.contains("\"disk_bus\": \"nvme\""), "{json}");
        assert_eq!(ClusterRecord::parse(json.as_bytes()).unwrap(), record);
    }

    #[test]
    fn what_was_kept_is_read_and_written_as_it_was() {
        let record = ClusterRecord::parse(KEPT.as_bytes()).unwrap();
        assert_eq!(record.members.len(), 1);
        assert!(record.config.as_ref().unwrap().direct);
        assert_eq!(record.to_json().unwrap(), KEPT);
        let other = KEPT.replace("\"version\": 2", "\"version\": 1");
        let error = ClusterRecord::parse(other.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "version: expected 2, got 1");
    }
}
