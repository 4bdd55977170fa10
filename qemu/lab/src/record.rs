//! What a cluster was founded with, and whether that is what is wished for.
//!
//! A [`ClusterRecord`] is what is kept, [`RunOptions`] what a user asks for, and [`diff`] compares the two: nothing that the
//! founding has settled is changed silently.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use hearth_api::v1;
use serde::{Deserialize, Serialize};

/// What to do about a cluster that is not what is wished for.
pub(crate) const OVER: &str = "`cargo xtask run --fresh` starts over";

/// Under which nodes of a cluster have names.
const DOMAIN: &str = "cluster.internal";

/// How the data partition is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// Raw: the next run can boot this cluster again.
    Insecure,
    /// dm-crypt: a cluster that was HOME and is down cannot be booted again yet.
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

    /// The configuration with which such a cluster is founded.
    pub fn configuration(self) -> v1::ClusterConfiguration {
        let policy = match self {
            Storage::Insecure => v1::StorageSecurityPolicy::NeedsInsecure,
            Storage::Encrypted => v1::StorageSecurityPolicy::NeedsEncryption,
        };
        v1::ClusterConfiguration {
            cluster_domain: DOMAIN.to_owned(),
            tpm_mode: v1::TpmMode::BestEffort.into(),
            storage_security_policy: policy.into(),
            cold_start_policy: v1::ColdStartPolicy::None.into(),
            kubernetes: None,
        }
    }
}

/// What the user asks for, as far as it is settled by the founding.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
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

/// What a cluster was founded with, and what has become of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
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
    #[serde(rename = "make")]
    pub config: Option<MachineConfig>,
    /// What they last booted.
    #[serde(rename = "built")]
    pub artifacts: Option<Artifacts>,
}

/// What machines boot, and the program that joins them. A machine that is started again boots the same, whatever the
/// sources have become.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifacts {
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

/// What machines are made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
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

/// A record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It is of another release.
    #[error("version {found}, wanted {}", ClusterRecord::VERSION)]
    Version {
        /// Which.
        found: serde_json::Value,
    },
    /// It is no such record at all.
    #[error(transparent)]
    Content(#[from] serde_json::Error),
}

impl ClusterRecord {
    const VERSION: u32 = 2;
    const DISK_BYTES: u64 = 4 << 30;

    /// Of a cluster that is founded so.
    pub fn new(options: &RunOptions) -> ClusterRecord {
        let custom = options.parameters.as_deref();
        ClusterRecord {
            version: ClusterRecord::VERSION,
            storage: match custom {
                Some(_) => None,
                None => Some(options.storage.unwrap_or(Storage::Insecure)),
            },
            parameters_sha256: custom.map(sha256),
            disk_bytes: options.disk_bytes.unwrap_or(ClusterRecord::DISK_BYTES),
            nodes: options.nodes.unwrap_or(1),
            members: BTreeMap::new(),
            was_home: false,
            owned_at: Vec::new(),
            config: None,
            artifacts: None,
        }
    }

    /// Reads one.
    ///
    /// # Errors
    /// If it is none, or of another release.
    pub fn parse(bytes: &[u8]) -> Result<ClusterRecord, RecordError> {
        let value: serde_json::Value = serde_json::from_slice(bytes)?;
        if value["version"] != ClusterRecord::VERSION {
            let found = value["version"].clone();
            return Err(RecordError::Version { found });
        }
        Ok(serde_json::from_value(value)?)
    }

    /// As it is kept.
    ///
    /// # Errors
    /// If a path in it is not UTF-8.
    pub fn to_json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

/// A cluster is not what is wished for; what is there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// Founded with other parameters of the user's.
    #[error("this cluster was founded with other parameters; {OVER} with these")]
    Parameters,
    /// Its storage is protected in another way.
    #[error("this cluster was founded with {found}, not with --storage {wanted}; {OVER} with that")]
    Storage {
        /// What it has.
        found: &'static str,
        /// What it should have.
        wanted: &'static str,
    },
    /// Its disks are of another size.
    #[error("this cluster's disk has {found} bytes, not {wanted}; {OVER} with that")]
    Disk {
        /// What they have.
        found: u64,
        /// What they should have.
        wanted: u64,
    },
    /// Kubernetes is not on its disks.
    #[error("this cluster's machines were made without Kubernetes; {OVER} with it")]
    Kubernetes,
    /// It has more nodes.
    #[error(
        "this cluster has {has} nodes, and --nodes {wanted} would forget some of them: leave --nodes out, take nodes out of the running cluster by `cargo xtask ctl -- node decommission` and `node delete`, or start over by `cargo xtask run --fresh --nodes {wanted}`"
    )]
    Nodes {
        /// How many.
        has: u16,
        /// How many it should have.
        wanted: u16,
    },
    /// Nobody here can take in further nodes.
    #[error(
        "this cluster's owner key is not here, which takes in further nodes: its parameters are your own; {OVER}"
    )]
    NoOwner,
    /// It cannot come back.
    #[error(
        "this cluster has encrypted storage and is down; an encrypted cluster cannot cold-start yet, so {OVER}"
    )]
    ColdStart,
    /// There is nobody to join.
    #[error("--join-later {later}: this cluster has {nodes} nodes, and one of them founds it")]
    JoinLater {
        /// How many are to be left to the user.
        later: u16,
        /// How many it has.
        nodes: u16,
    },
}

/// The first thing in which a cluster is not what is wished for.
///
/// # Errors
/// If there is one.
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
    // It is on the disks that were made with the cluster.
    let config = record.config.as_ref();
    if options.kubernetes && config.is_some_and(|config| !config.kubernetes) {
        return Err(Conflict::Kubernetes);
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
    if record.storage == Some(Storage::Encrypted) && record.was_home {
        return Err(Conflict::ColdStart);
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
        let error = refused(storage(Storage::Encrypted));
        assert!(error.contains("founded with insecure"), "{error}");
        refused(RunOptions {
            parameters: Some(b"x".to_vec()),
            ..RunOptions::default()
        });
        refused(RunOptions {
            disk_bytes: Some(1 << 30),
            ..RunOptions::default()
        });
        diff(&record, &storage(Storage::Insecure)).unwrap();
        let same = RunOptions {
            disk_bytes: Some(record.disk_bytes),
            ..RunOptions::default()
        };
        diff(&record, &same).unwrap();
    }

    #[test]
    fn an_encrypted_cluster_goes_on_only_until_it_was_home() {
        let mut record = ClusterRecord::new(&storage(Storage::Encrypted));
        diff(&record, &RunOptions::default()).unwrap();
        record.was_home = true;
        let error = diff(&record, &RunOptions::default()).unwrap_err();
        assert_eq!(error, Conflict::ColdStart);
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

    /// As releases before this one have written it.
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
    fn what_was_kept_is_read_and_written_as_it_was() {
        let record = ClusterRecord::parse(KEPT.as_bytes()).unwrap();
        assert_eq!(record.members.len(), 1);
        assert!(record.config.as_ref().unwrap().direct);
        assert_eq!(record.to_json().unwrap(), KEPT);
        let other = KEPT.replace("\"version\": 2", "\"version\": 1");
        let error = ClusterRecord::parse(other.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "version 1, wanted 2");
    }
}
