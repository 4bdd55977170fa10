//! The node's file system as one typed tree.
//!
//! Every path that the node core writes or reads below `/esp`, `/data` and `/ephemeral` is defined
//! here and nowhere else. So a directory can be moved, or a test can place the tree in a temporary
//! directory, by a change in one place, and a reader sees at a glance what a node stores and where.
//!
//! | part | storage | content |
//! |---|---|---|
//! | [`Esp`] | the EFI system partition, FAT | parameters, and the state needed before the data partition is open |
//! | [`Data`] | the data partition, XFS | the persistent state of a member |
//! | [`Ephemeral`] | memory, for this boot | sockets, generated files |
//! | [`ExtensionMounts`] | partitions of their own, read-only | programs and files of the image |
//!
//! The tree only names paths. It creates no directory and opens no file, except for the
//! `make_directories` of the parts, which create the fixed directories.

use std::path::{Path, PathBuf};

use hearth_api::extension::ExtensionName;
use hearth_api::names;
use hearth_sys::files::{self, FileError};
use hearth_sys::slots::{FileSlot, SlotFormat, SlotPair};

/// The control group of the core and its children. The root group only divides the machine's
/// resources between its children.
pub const NODE_GROUP: &str = "hearth";

/// The file in which the core leaves for PID 1 how many seconds to wait before it reboots after the
/// core has died. PID 1 does not use the tree, only this path.
pub const REBOOT_DELAY: &str = "/ephemeral/reboot-delay";

/// The kernel command line.
pub const COMMAND_LINE: &str = "/proc/cmdline";

/// The paths in `/etc` that bundled programs read, and the targets of their symbolic links.
pub fn etc_links(ephemeral: &Ephemeral) -> [(&'static str, PathBuf); 3] {
    [
        ("/etc/hosts", ephemeral.hosts()),
        ("/etc/machine-id", ephemeral.machine_id()),
        ("/etc/resolv.conf", ephemeral.resolv_conf()),
    ]
}

/// Files of `/etc` that bundled programs read and that never change. The kubelet finds out in them for which user IDs
/// pods with a user namespace have room: there is one user.
pub const ETC_FILES: [(&str, &str); 2] = [
    ("/etc/group", "root:x:0:\n"),
    ("/etc/passwd", "root:x:0:0:root:/:/\n"),
];

/// Paths that container programs have compiled in, and the targets of their symbolic links.
pub fn container_links(root: &Root) -> [(&'static str, PathBuf); 3] {
    let kept = root.data.kubernetes();
    [
        ("/var/log", kept.log()),
        (
            "/var/lib/cni",
            root.ephemeral.kubernetes().worker().results(),
        ),
        ("/var/run", "/run".into()),
    ]
}

/// Paths at which a pod network that operators install puts its configuration and its plugins, and
/// the targets of their symbolic links.
pub fn network_links(root: &Root) -> [(&'static str, PathBuf); 2] {
    let configuration = root.ephemeral.kubernetes().worker().network();
    let plugins = root.data.kubernetes().network_plugins();
    [("/etc/cni/net.d", configuration), ("/opt/cni/bin", plugins)]
}

/// The directory of the state files on the ESP.
const STATE: &str = "hearth";

/// The whole tree.
#[derive(Clone, Debug)]
pub struct Root {
    /// The EFI system partition.
    pub esp: Esp,
    /// The data partition.
    pub data: Data,
    /// Memory; lost at the next boot.
    pub ephemeral: Ephemeral,
    /// The kubelet's root directory, with the volumes of pods, where storage drivers expect it: they have this path
    /// compiled in, or in their manifests. A mount of [`DataKubernetes::kubelet`], because unlike the rest of the data
    /// partition it contains executable files.
    pub kubelet: PathBuf,
    /// The mount points of the extensions.
    pub extensions: ExtensionMounts,
    /// What the loader's stub has added to the initramfs: the image builder's key for the TPM's policy, and its
    /// signatures.
    pub loader: PathBuf,
}

impl Root {
    /// The tree of a running node: `/esp`, `/data` and `/ephemeral`.
    pub fn system() -> Self {
        Self::under(Path::new("/"))
    }

    /// The same tree below the directory `base`.
    pub fn under(base: &Path) -> Self {
        Self {
            esp: Esp {
                path: base.join("esp"),
            },
            data: Data {
                path: base.join("data"),
            },
            ephemeral: Ephemeral {
                path: base.join("ephemeral"),
            },
            kubelet: base.join("var/lib/kubelet"),
            loader: base.join(".extra"),
            extensions: ExtensionMounts {
                path: base.join(names::extensions::FOLDER.trim_start_matches('/')),
            },
        }
    }
}

/// Where extensions are mounted.
#[derive(Clone, Debug)]
pub struct ExtensionMounts {
    path: PathBuf,
}

impl ExtensionMounts {
    /// The mount point of an extension.
    pub fn of(&self, name: &ExtensionName) -> PathBuf {
        self.path.join(name.as_str())
    }
}

/// The EFI system partition. Each state file is a pair of slots, because a rename on FAT is not
/// atomic.
#[derive(Clone, Debug)]
pub struct Esp {
    path: PathBuf,
}

impl Esp {
    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The node parameters, as written by the installer. The node never writes them.
    pub fn parameters(&self) -> PathBuf {
        self.path.join(names::disk::ESP_PARAMETERS)
    }

    /// The identity of the installation that has written the disk. The node does not read it.
    pub fn installation(&self) -> PathBuf {
        self.path.join(names::disk::ESP_INSTALLATION)
    }

    /// The payload, if this is an installation medium in the place of the ESP.
    pub fn payload(&self) -> PathBuf {
        self.path.join(names::installer::PAYLOAD)
    }

    /// The sealed configuration. Secret.
    pub fn sealed_configuration(&self) -> StateFile {
        self.state("sealed_configuration")
    }

    /// The cluster directory: the curators that the node contacts after a reboot.
    pub fn cluster_directory(&self) -> StateFile {
        self.state("cluster_directory")
    }

    /// The network configuration that an operator has set.
    pub fn network(&self) -> StateFile {
        self.state("network")
    }

    /// The state that one boot leaves for the next.
    pub fn boot_record(&self) -> StateFile {
        self.state("boot_record")
    }

    /// Creates the directory of the state files.
    pub fn make_directories(&self) -> Result<(), FileError> {
        files::create_dir_durably(&self.path.join(STATE), files::PRIVATE_DIRECTORY)
    }

    fn state(&self, name: &'static str) -> StateFile {
        StateFile {
            directory: self.path.join(STATE),
            name,
        }
    }
}

/// A state that is stored in two files with fixed names, `NAME.0` and `NAME.1`.
#[derive(Clone, Debug)]
pub struct StateFile {
    /// The directory of both files.
    pub directory: PathBuf,
    /// The files' common name, without the suffix.
    pub name: &'static str,
}

impl StateFile {
    /// The paths of both files.
    pub fn paths(&self) -> [PathBuf; 2] {
        [0, 1].map(|slot| self.directory.join(format!("{}.{slot}", self.name)))
    }

    /// The pair of slots in these files.
    pub fn slots(&self, formats: &'static [SlotFormat]) -> SlotPair<FileSlot> {
        let [a, b] = self.paths().map(FileSlot::new);
        SlotPair::new(formats, a, b)
    }
}

/// The data partition.
#[derive(Clone, Debug)]
pub struct Data {
    path: PathBuf,
}

impl Data {
    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files of etcd.
    pub fn etcd(&self) -> Etcd {
        Etcd {
            path: self.path.join("etcd"),
        }
    }

    /// containerd's `root` directory: images and their snapshots. Created by containerd.
    pub fn containerd(&self) -> PathBuf {
        self.path.join("containerd")
    }

    /// Exists while everything that containerd has unpacked is durable.
    pub fn containerd_written(&self) -> PathBuf {
        self.containerd().join("written")
    }

    /// The files of a Kubernetes worker.
    pub fn kubernetes(&self) -> DataKubernetes {
        DataKubernetes {
            path: self.path.join("kubernetes"),
        }
    }

    /// The audit log of the API server, in a directory of its own.
    pub fn audit_log(&self) -> PathBuf {
        self.path.join("audit/kubernetes.log")
    }

    /// The files of the node itself.
    pub fn node(&self) -> Node {
        Node {
            path: self.path.join("node"),
        }
    }

    /// The local volumes of pods, one directory each. Created by its user.
    pub fn volumes(&self) -> PathBuf {
        self.path.join("volumes")
    }

    /// Where the further disk with this name is mounted. Created by its user.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.path.join("disks").join(name)
    }

    /// Removes the mount points of further disks that are not mounted. One in which somebody has put files stays.
    pub fn remove_mount_points(&self) {
        let entries = std::fs::read_dir(self.path.join("disks")).into_iter();
        for entry in entries.flatten().flatten() {
            if let Err(error) = std::fs::remove_dir(entry.path())
                && error.kind() == std::io::ErrorKind::DirectoryNotEmpty
            {
                tracing::warn!("{}: there are files, and no disk", entry.path().display());
            }
        }
    }

    /// Creates the directories of a mounted data partition. They are durable with the first file in them that is synced,
    /// because XFS writes its log in order; until then nothing is lost with them, and each mount creates what is missing.
    pub fn make_directories(&self) -> Result<(), FileError> {
        for directory in [
            self.etcd().path,
            self.etcd().peer().path,
            self.etcd().founding(),
            self.node().path,
            self.node().credentials().path,
        ] {
            files::create_dir(&directory, files::PRIVATE_DIRECTORY)?;
        }
        Ok(())
    }
}

/// `etcd/`
#[derive(Clone, Debug)]
pub struct Etcd {
    path: PathBuf,
}

impl Etcd {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The `--data-dir` of etcd. Created by etcd.
    pub fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    /// etcd's write-ahead log, in its data directory. If it does not exist, neither does the
    /// member.
    pub fn log(&self) -> PathBuf {
        self.data().join("member").join("wal")
    }

    /// The minor version of etcd that made the data directory: a line of text.
    pub fn store_version(&self) -> PathBuf {
        self.path.join("store-version")
    }

    /// The etcd member as which the node joins or has joined: a `StoredMember`. The node that
    /// bootstrapped the cluster has none.
    pub fn member(&self) -> PathBuf {
        self.path.join("member")
    }

    /// Empty; exists once the member of [`Self::member`] has joined.
    pub fn joined(&self) -> PathBuf {
        self.path.join("joined")
    }

    /// Empty; exists once etcd must expect other members.
    pub fn company(&self) -> PathBuf {
        self.path.join("company")
    }

    /// How often etcd was started on these data: a `StoredStarts`.
    pub fn starts(&self) -> PathBuf {
        self.path.join("starts")
    }

    /// Empty; exists once the other members have found that this member's data are damaged.
    pub fn damaged(&self) -> PathBuf {
        self.path.join("damaged")
    }

    /// The certificate and key for etcd's peer connections.
    pub fn peer(&self) -> KeyFiles {
        KeyFiles {
            path: self.path.join("peer"),
        }
    }

    /// The directory used during a bootstrap.
    pub fn founding(&self) -> PathBuf {
        self.path.join("founding")
    }

    /// The two certificate authorities that the bootstrap created: a `StoredAuthorities`. Secret
    /// until etcd holds the private keys; then the private keys are removed from the file, and the
    /// certificates remain.
    pub fn authorities(&self) -> PathBuf {
        self.founding().join("authorities")
    }
}

/// `kubernetes/`: exists only while the node is a worker.
#[derive(Clone, Debug)]
pub struct DataKubernetes {
    path: PathBuf,
}

impl DataKubernetes {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content of [`Root::kubelet`].
    pub fn kubelet(&self) -> PathBuf {
        self.path.join("kubelet")
    }

    /// The directory for volume plugins; always empty.
    pub fn volume_plugins(&self) -> PathBuf {
        self.path.join("volume-plugins")
    }

    /// The CNI plugins that operators have installed. It has a mount of its own, because unlike the rest of the data
    /// partition it contains executable files.
    pub fn network_plugins(&self) -> PathBuf {
        self.path.join("network-plugins")
    }

    /// The logs of containers.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }
}

/// `node/`
#[derive(Clone, Debug)]
pub struct Node {
    path: PathBuf,
}

impl Node {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The node's certificate and key, and the CA of the cluster.
    pub fn credentials(&self) -> KeyFiles {
        KeyFiles {
            path: self.path.join("credentials"),
        }
    }

    /// The address that the node last announced: a `StoredAddress`.
    pub fn address(&self) -> PathBuf {
        self.path.join("address.pb")
    }

    /// The node's mesh key and pod network range: a `StoredMesh`. Secret.
    pub fn mesh(&self) -> PathBuf {
        self.path.join("mesh.pb")
    }

    /// The key with which a Kubernetes controller opens the keys of Secrets: a `StoredControllerKey`. Secret.
    pub fn controller_key(&self) -> PathBuf {
        self.path.join("secrets.pb")
    }

    /// Which disk is the volume with this name: a `StoredDisk`.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.path.join("disks").join(format!("{name}.pb"))
    }

    /// The last known roles of the node: a `StoredRoles`.
    pub fn roles(&self) -> PathBuf {
        self.path.join("roles.pb")
    }
}

/// A directory with a certificate, its key, and the CA that verifies the peers.
#[derive(Clone, Debug)]
pub struct KeyFiles {
    path: PathBuf,
}

impl KeyFiles {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The certificate of the CA.
    pub fn ca(&self) -> PathBuf {
        self.path.join("ca")
    }

    /// The certificate.
    pub fn certificate(&self) -> PathBuf {
        self.path.join("cert")
    }

    /// The private key of the certificate. Secret.
    pub fn key(&self) -> PathBuf {
        self.path.join("key")
    }
}

/// The files in memory.
#[derive(Clone, Debug)]
pub struct Ephemeral {
    path: PathBuf,
}

impl Ephemeral {
    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of etcd's client socket. Only root may access it: a process that can open the
    /// socket can write the cluster's records.
    pub fn consensus(&self) -> PathBuf {
        self.path.join("consensus")
    }

    /// The node ID without its prefix, 32 hexadecimal digits; `/etc/machine-id` links here.
    pub fn machine_id(&self) -> PathBuf {
        self.path.join("machine-id")
    }

    /// `/etc/hosts` links here.
    pub fn hosts(&self) -> PathBuf {
        self.path.join("hosts")
    }

    /// `/etc/resolv.conf` links here.
    pub fn resolv_conf(&self) -> PathBuf {
        self.path.join("resolv.conf")
    }

    /// containerd's `state` directory, valid for this boot. Created by containerd.
    pub fn containerd(&self) -> PathBuf {
        self.path.join("containerd")
    }

    /// The socket of containerd.
    pub fn containerd_socket(&self) -> PathBuf {
        self.containerd().join("containerd.sock")
    }

    /// The configuration and the temporary files of Kubernetes' programs in this boot.
    pub fn kubernetes(&self) -> EphemeralKubernetes {
        EphemeralKubernetes {
            path: self.path.join("kubernetes"),
        }
    }

    /// Where a config drive is mounted while the parameters on it are read.
    pub fn config_drive(&self) -> PathBuf {
        self.path.join("config-drive")
    }

    /// Where an installer mounts the ESP of a disk that it installs on, or looks at.
    pub fn target_esp(&self) -> Esp {
        Esp {
            path: self.path.join("target-esp"),
        }
    }

    /// See [`REBOOT_DELAY`].
    pub fn reboot_delay(&self) -> PathBuf {
        self.path.join("reboot-delay")
    }

    /// Creates the fixed directories.
    pub fn make_directories(&self) -> Result<(), FileError> {
        files::create_dir_durably(&self.path, 0o755)?;
        // Programs that are not root have directories in them.
        for directory in [self.kubernetes().path, self.kubernetes().working()] {
            files::create_dir_durably(&directory, 0o711)?;
        }
        files::create_dir_durably(&self.consensus(), files::PRIVATE_DIRECTORY)
    }
}

/// `kubernetes/` in memory. Its directories are created by their users, each accessible to one user
/// only.
#[derive(Clone, Debug)]
pub struct EphemeralKubernetes {
    path: PathBuf,
}

impl EphemeralKubernetes {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the etcd proxy's socket for the API server. A process that can open the
    /// socket can write everything that Kubernetes stores.
    pub fn store(&self) -> PathBuf {
        self.path.join("store")
    }

    /// The keys and certificates of the API server, the controller manager and the scheduler.
    /// Secret.
    pub fn controller(&self) -> EphemeralController {
        EphemeralController {
            path: self.path.join("controller"),
        }
    }

    /// The configuration and keys of containerd, kubelet and kube-proxy. Secret.
    pub fn worker(&self) -> EphemeralWorker {
        EphemeralWorker {
            path: self.path.join("worker"),
        }
    }

    /// The directory of the working directories.
    pub fn working(&self) -> PathBuf {
        self.path.join("work")
    }

    /// The working directory of a program.
    pub fn work(&self, program: &str) -> PathBuf {
        self.working().join(program)
    }
}

/// `kubernetes/controller/` in memory.
#[derive(Clone, Debug)]
pub struct EphemeralController {
    path: PathBuf,
}

impl EphemeralController {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The certificate and key of a client or server.
    pub fn keys(&self, whose: &str) -> KeyFiles {
        KeyFiles {
            path: self.path.join("keys").join(whose),
        }
    }

    /// The certificate of Kubernetes' CA.
    pub fn ca(&self) -> PathBuf {
        self.path.join("ca")
    }

    /// How the API server authenticates its clients.
    pub fn authentication(&self) -> PathBuf {
        self.path.join("authentication")
    }

    /// How the API server authorizes its clients.
    pub fn authorization(&self) -> PathBuf {
        self.path.join("authorization")
    }

    /// What the API server admits.
    pub fn admission(&self) -> PathBuf {
        self.path.join("admission")
    }

    /// What is recorded of requests.
    pub fn audit_policy(&self) -> PathBuf {
        self.path.join("audit-policy")
    }

    /// How the API server encrypts what it stores.
    pub fn encryption(&self) -> PathBuf {
        self.path.join("encryption")
    }

    /// The socket of the provider of keys, for the API server. A process that can open it can decrypt what the API
    /// server has stored.
    pub fn key_provider(&self) -> PathBuf {
        self.path.join("key-provider")
    }

    /// The certificate of the front-proxy CA.
    pub fn front_proxy_ca(&self) -> PathBuf {
        self.path.join("front-proxy-ca")
    }

    /// The public key that verifies service account tokens.
    pub fn service_accounts(&self) -> PathBuf {
        self.path.join("service-accounts")
    }

    /// The private key that signs service account tokens. Secret.
    pub fn service_account_key(&self) -> PathBuf {
        self.path.join("service-accounts-key")
    }

    /// The kubeconfig of a program: the API server's address and the program's credentials. Secret.
    pub fn kubeconfig(&self, whose: &str) -> PathBuf {
        self.path.join(format!("{whose}.kubeconfig"))
    }
}

/// `kubernetes/worker/` in memory.
#[derive(Clone, Debug)]
pub struct EphemeralWorker {
    path: PathBuf,
}

impl EphemeralWorker {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The certificate and key of a client or server, and the certificate of Kubernetes' CA.
    pub fn keys(&self, whose: &str) -> KeyFiles {
        KeyFiles {
            path: self.path.join("keys").join(whose),
        }
    }

    /// The directory of the CNI configuration.
    pub fn network(&self) -> PathBuf {
        self.path.join("cni")
    }

    /// The allocated pod addresses.
    pub fn addresses(&self) -> PathBuf {
        self.path.join("addresses")
    }

    /// The results that the CNI plugins cache for each pod.
    pub fn results(&self) -> PathBuf {
        self.path.join("results")
    }

    /// Where images come from: mirrors, authorities and credentials of registries. Secret.
    pub fn registries(&self) -> PathBuf {
        self.path.join("registries")
    }

    /// The programs that give the kubelet credentials for registries.
    pub fn credential_providers(&self) -> PathBuf {
        self.path.join("credential-providers")
    }

    /// Exists once the unpacked snapshots of containerd have been accepted for use in this boot.
    pub fn unpacked_believed(&self) -> PathBuf {
        self.path.join("unpacked-believed")
    }

    /// The configuration file of a program.
    pub fn config(&self, program: &str) -> PathBuf {
        self.path.join(format!("{program}.config"))
    }

    /// The kubeconfig of a program.
    pub fn kubeconfig(&self, program: &str) -> PathBuf {
        self.path.join(format!("{program}.kubeconfig"))
    }
}

/// The mounted Kubernetes extension. Never written.
#[derive(Clone, Debug)]
pub struct Bundle {
    path: PathBuf,
}

impl Bundle {
    /// The bundle mounted at `mounted`.
    pub fn under(mounted: &Path) -> Self {
        Self {
            path: mounted.to_owned(),
        }
    }

    /// The file with the versions of the programs.
    pub fn version(&self) -> PathBuf {
        self.path.join("VERSION")
    }

    /// The directory of the programs.
    pub fn programs(&self) -> PathBuf {
        self.path.join("bin")
    }

    /// The directory of the CNI plugins.
    pub fn network_plugins(&self) -> PathBuf {
        self.path.join("cni")
    }

    /// The directory of the container images.
    pub fn images(&self) -> PathBuf {
        self.path.join("images")
    }

    /// containerd's configuration directory for registries; optional.
    pub fn registries(&self) -> PathBuf {
        self.path.join("registries")
    }

    /// The CA certificates for registries, PEM; optional.
    pub fn authorities(&self) -> PathBuf {
        self.path.join("authorities.pem")
    }
}

#[cfg(test)]
mod tests;
