//! The node's own file system as one typed tree.
//!
//! Every path that the node core writes or reads below `/esp`, `/data` and
//! `/ephemeral` is spelled here and nowhere else, so that a directory can be
//! moved, or placed in a temporary directory by a test, in one place, and so
//! that a reader sees at a glance what a node keeps and where.
//!
//! | part | lives | content |
//! |---|---|---|
//! | [`Esp`] | on the EFI system partition, FAT | parameters, and the state needed before the data partition is open |
//! | [`Data`] | on the data partition, XFS | what the node keeps as a member |
//! | [`Ephemeral`] | in memory, for this boot | sockets, generated files |
//! | [`ExtensionPlaces`] | on partitions of their own, read-only | programs and files of the image |
//!
//! The tree names things; it makes no directory and opens no file, except for
//! the `make_directories` of the parts, which make what is fixed.

use std::path::{Path, PathBuf};

use hearth_api::extension::ExtensionName;
use hearth_api::names;
use hearth_sys::files::{self, FileError};
use hearth_sys::slots::{FileSlot, SlotFormat, SlotPair};

/// Where the core leaves for PID 1 how many seconds to wait before it reboots
/// after the core's death. PID 1 has no tree, only this.
pub const REBOOT_DELAY: &str = "/ephemeral/reboot-delay";

/// What the kernel was started with.
pub const COMMAND_LINE: &str = "/proc/cmdline";

/// The names in `/etc` that programs which ride along look at, and where their
/// content lies.
pub fn etc_links(ephemeral: &Ephemeral) -> [(&'static str, PathBuf); 3] {
    [
        ("/etc/hosts", ephemeral.hosts()),
        ("/etc/machine-id", ephemeral.machine_id()),
        ("/etc/resolv.conf", ephemeral.resolv_conf()),
    ]
}

/// Names that programs of containers have built in, and what lies there.
pub fn container_links(root: &Root) -> [(&'static str, PathBuf); 4] {
    let kept = root.data.kubernetes();
    [
        ("/var/lib/kubelet", kept.kubelet()),
        ("/var/log", kept.log()),
        (
            "/var/lib/cni",
            root.ephemeral.kubernetes().worker().results(),
        ),
        ("/var/run", "/run".into()),
    ]
}

/// The directory of the state files on the ESP.
const STATE: &str = "hearth";

/// All of it.
#[derive(Clone, Debug)]
pub struct Root {
    /// The EFI system partition.
    pub esp: Esp,
    /// The data partition.
    pub data: Data,
    /// Gone with the next boot.
    pub ephemeral: Ephemeral,
    /// What rides along with the image.
    pub extensions: ExtensionPlaces,
}

impl Root {
    /// A running node's: `/esp`, `/data` and `/ephemeral`.
    pub fn system() -> Self {
        Self::under(Path::new("/"))
    }

    /// The same tree below another directory.
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
            extensions: ExtensionPlaces {
                path: base.join(names::extensions::FOLDER.trim_start_matches('/')),
            },
        }
    }
}

/// Where extensions are mounted.
#[derive(Clone, Debug)]
pub struct ExtensionPlaces {
    path: PathBuf,
}

impl ExtensionPlaces {
    /// An extension's own place.
    pub fn of(&self, name: &ExtensionName) -> PathBuf {
        self.path.join(name.as_str())
    }
}

/// The EFI system partition. Its state files are pairs of slots, because a
/// FAT rename is not atomic.
#[derive(Clone, Debug)]
pub struct Esp {
    path: PathBuf,
}

impl Esp {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The node parameters, as written by the installer. Never written here.
    pub fn parameters(&self) -> PathBuf {
        self.path.join(names::disk::ESP_PARAMETERS)
    }

    /// The sealed configuration. Secret.
    pub fn sealed_configuration(&self) -> StateFile {
        self.state("sealed_configuration")
    }

    /// The cluster directory: whom a rebooting node asks for its cluster.
    pub fn cluster_directory(&self) -> StateFile {
        self.state("cluster_directory")
    }

    /// What one boot tells the next.
    pub fn boot_record(&self) -> StateFile {
        self.state("boot_record")
    }

    /// Makes the directory of the state files.
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

/// A state that is kept in two files of fixed names, `NAME.0` and `NAME.1`.
#[derive(Clone, Debug)]
pub struct StateFile {
    /// Where both of them are.
    pub directory: PathBuf,
    /// What their names begin with.
    pub name: &'static str,
}

impl StateFile {
    /// The files themselves.
    pub fn paths(&self) -> [PathBuf; 2] {
        [0, 1].map(|slot| self.directory.join(format!("{}.{slot}", self.name)))
    }

    /// The state in them.
    pub fn slots(&self, format: SlotFormat) -> SlotPair<FileSlot> {
        let [a, b] = self.paths().map(FileSlot::new);
        SlotPair::new(format, a, b)
    }
}

/// The data partition.
#[derive(Clone, Debug)]
pub struct Data {
    path: PathBuf,
}

impl Data {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// etcd's part.
    pub fn etcd(&self) -> Etcd {
        Etcd {
            path: self.path.join("etcd"),
        }
    }

    /// containerd's own directory, its `root`: images and their snapshots.
    /// Made by containerd.
    pub fn containerd(&self) -> PathBuf {
        self.path.join("containerd")
    }

    /// Is there while all that containerd has unpacked is on the disk.
    pub fn containerd_written(&self) -> PathBuf {
        self.containerd().join("written")
    }

    /// What a Kubernetes worker keeps.
    pub fn kubernetes(&self) -> DataKubernetes {
        DataKubernetes {
            path: self.path.join("kubernetes"),
        }
    }

    /// The node's part.
    pub fn node(&self) -> Node {
        Node {
            path: self.path.join("node"),
        }
    }

    /// The pods' local volumes, a directory each. Made by who uses it.
    pub fn volumes(&self) -> PathBuf {
        self.path.join("volumes")
    }

    /// Makes the directories of a mounted data partition.
    pub fn make_directories(&self) -> Result<(), FileError> {
        for directory in [
            self.etcd().path,
            self.etcd().peer().path,
            self.etcd().founding(),
            self.node().path,
            self.node().credentials().path,
        ] {
            files::create_dir_durably(&directory, files::PRIVATE_DIRECTORY)?;
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

    /// etcd's own directory, its `--data-dir`. Made by etcd.
    pub fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    /// etcd's log, in its own directory: without it there is no member.
    pub fn log(&self) -> PathBuf {
        self.data().join("member").join("wal")
    }

    /// As which member the node joins, or has joined: a `StoredMember`. A
    /// founder has none.
    pub fn member(&self) -> PathBuf {
        self.path.join("member")
    }

    /// Empty; there once the member of [`Self::member`] has taken part.
    pub fn joined(&self) -> PathBuf {
        self.path.join("joined")
    }

    /// Empty; there once other members are to be expected.
    pub fn company(&self) -> PathBuf {
        self.path.join("company")
    }

    /// What this member shows its peers.
    pub fn peer(&self) -> KeyFiles {
        KeyFiles {
            path: self.path.join("peer"),
        }
    }

    /// The founding's own directory.
    pub fn founding(&self) -> PathBuf {
        self.path.join("founding")
    }

    /// The two certificate authorities that the founding made: a
    /// `StoredAuthorities`. Secret until etcd holds the private keys; then
    /// they are taken out, and the certificates stay.
    pub fn authorities(&self) -> PathBuf {
        self.founding().join("authorities")
    }
}

/// `kubernetes/`: there only while the node is a worker.
#[derive(Clone, Debug)]
pub struct DataKubernetes {
    path: PathBuf,
}

impl DataKubernetes {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kubelet's own directory, with the volumes of pods. Has a mount of
    /// its own, for unlike the rest of the data partition it holds programs.
    pub fn kubelet(&self) -> PathBuf {
        self.path.join("kubelet")
    }

    /// Plugins for volumes, of which there are none.
    pub fn volume_plugins(&self) -> PathBuf {
        self.path.join("volume-plugins")
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

    /// The node's certificate and key, and the cluster's CA.
    pub fn credentials(&self) -> KeyFiles {
        KeyFiles {
            path: self.path.join("credentials"),
        }
    }

    /// Where the node last said that it was: a `StoredAddress`.
    pub fn address(&self) -> PathBuf {
        self.path.join("address.pb")
    }

    /// The node's key of the mesh, and its pods' addresses: a `StoredMesh`.
    /// Secret.
    pub fn mesh(&self) -> PathBuf {
        self.path.join("mesh.pb")
    }

    /// The roles that the node last knew it had: a `StoredRoles`.
    pub fn roles(&self) -> PathBuf {
        self.path.join("roles.pb")
    }
}

/// A directory with a certificate, its key, and the CA that judges others'.
#[derive(Clone, Debug)]
pub struct KeyFiles {
    path: PathBuf,
}

impl KeyFiles {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The CA's certificate.
    pub fn ca(&self) -> PathBuf {
        self.path.join("ca")
    }

    /// The certificate.
    pub fn certificate(&self) -> PathBuf {
        self.path.join("cert")
    }

    /// Its private key. Secret.
    pub fn key(&self) -> PathBuf {
        self.path.join("key")
    }
}

/// What lives in memory.
#[derive(Clone, Debug)]
pub struct Ephemeral {
    path: PathBuf,
}

impl Ephemeral {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of etcd's client socket. Root only: whoever can open the
    /// socket can write the cluster's records.
    pub fn consensus(&self) -> PathBuf {
        self.path.join("consensus")
    }

    /// The bare part of the node ID, 32 hex digits; `/etc/machine-id` points
    /// here.
    pub fn machine_id(&self) -> PathBuf {
        self.path.join("machine-id")
    }

    /// `/etc/hosts` points here.
    pub fn hosts(&self) -> PathBuf {
        self.path.join("hosts")
    }

    /// `/etc/resolv.conf` points here.
    pub fn resolv_conf(&self) -> PathBuf {
        self.path.join("resolv.conf")
    }

    /// What containerd keeps of this boot, its `state`. Made by containerd.
    pub fn containerd(&self) -> PathBuf {
        self.path.join("containerd")
    }

    /// Where containerd serves.
    pub fn containerd_socket(&self) -> PathBuf {
        self.containerd().join("containerd.sock")
    }

    /// What the programs of Kubernetes are given and make in this boot.
    pub fn kubernetes(&self) -> EphemeralKubernetes {
        EphemeralKubernetes {
            path: self.path.join("kubernetes"),
        }
    }

    /// See [`REBOOT_DELAY`].
    pub fn reboot_delay(&self) -> PathBuf {
        self.path.join("reboot-delay")
    }

    /// Makes the fixed directories.
    pub fn make_directories(&self) -> Result<(), FileError> {
        files::create_dir_durably(&self.path, 0o755)?;
        files::create_dir_durably(&self.consensus(), files::PRIVATE_DIRECTORY)
    }
}

/// `kubernetes/` in memory. Its directories are made by who uses them, for
/// root alone.
#[derive(Clone, Debug)]
pub struct EphemeralKubernetes {
    path: PathBuf,
}

impl EphemeralKubernetes {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the API server's way to etcd. Whoever can open the
    /// socket in it can write all that Kubernetes keeps.
    pub fn store(&self) -> PathBuf {
        self.path.join("store")
    }

    /// What the API server and its two companions show and trust: secret.
    pub fn controller(&self) -> EphemeralController {
        EphemeralController {
            path: self.path.join("controller"),
        }
    }

    /// What containerd, kubelet and kube-proxy are given: secret.
    pub fn worker(&self) -> EphemeralWorker {
        EphemeralWorker {
            path: self.path.join("worker"),
        }
    }

    /// A program's working directory.
    pub fn work(&self, program: &str) -> PathBuf {
        self.path.join("work").join(program)
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

    /// What one of its clients or servers shows.
    pub fn keys(&self, whose: &str) -> KeyFiles {
        KeyFiles {
            path: self.path.join("keys").join(whose),
        }
    }

    /// Kubernetes' authority.
    pub fn ca(&self) -> PathBuf {
        self.path.join("ca")
    }

    /// The authority of those who pass requests on.
    pub fn front_proxy_ca(&self) -> PathBuf {
        self.path.join("front-proxy-ca")
    }

    /// Proves the tokens of service accounts.
    pub fn service_accounts(&self) -> PathBuf {
        self.path.join("service-accounts")
    }

    /// Signs the tokens of service accounts. Secret.
    pub fn service_account_key(&self) -> PathBuf {
        self.path.join("service-accounts-key")
    }

    /// Where the API server is, for a program, and as whom it speaks. Secret.
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

    /// What one of its clients or servers shows, and Kubernetes' authority.
    pub fn keys(&self, whose: &str) -> KeyFiles {
        KeyFiles {
            path: self.path.join("keys").join(whose),
        }
    }

    /// The directory of the pods' network, as its plugins are told.
    pub fn network(&self) -> PathBuf {
        self.path.join("cni")
    }

    /// Which addresses of the pods' network are taken.
    pub fn addresses(&self) -> PathBuf {
        self.path.join("addresses")
    }

    /// What the network's plugins remember of each pod.
    pub fn results(&self) -> PathBuf {
        self.path.join("results")
    }

    /// Is there once what containerd has unpacked can be used in this boot.
    pub fn unpacked_believed(&self) -> PathBuf {
        self.path.join("unpacked-believed")
    }

    /// What a program is told, beside its flags.
    pub fn config(&self, program: &str) -> PathBuf {
        self.path.join(format!("{program}.config"))
    }

    /// How a program reaches the API servers.
    pub fn kubeconfig(&self, program: &str) -> PathBuf {
        self.path.join(format!("{program}.kubeconfig"))
    }
}

/// The extension with Kubernetes' programs, as mounted. Never written.
#[derive(Clone, Debug)]
pub struct Bundle {
    path: PathBuf,
}

impl Bundle {
    /// One that is mounted there.
    pub fn under(mounted: &Path) -> Self {
        Self {
            path: mounted.to_owned(),
        }
    }

    /// Which versions it holds.
    pub fn version(&self) -> PathBuf {
        self.path.join("VERSION")
    }

    /// The directory of the programs.
    pub fn programs(&self) -> PathBuf {
        self.path.join("bin")
    }

    /// The directory of the plugins for the pods' network.
    pub fn network_plugins(&self) -> PathBuf {
        self.path.join("cni")
    }

    /// The directory of the container images.
    pub fn images(&self) -> PathBuf {
        self.path.join("images")
    }

    /// How registries are reached, as containerd reads it; not in every
    /// bundle.
    pub fn registries(&self) -> PathBuf {
        self.path.join("registries")
    }

    /// By which authorities registries prove themselves, PEM; not in every
    /// bundle.
    pub fn authorities(&self) -> PathBuf {
        self.path.join("authorities.pem")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_node_keeps_things_where_the_design_says() {
        let root = Root::system();
        let shown = |path: PathBuf| path.display().to_string();
        assert_eq!(shown(root.esp.parameters()), "/esp/hearth/parameters.pb");
        assert_eq!(
            root.esp.sealed_configuration().paths().map(shown),
            [
                "/esp/hearth/sealed_configuration.0",
                "/esp/hearth/sealed_configuration.1"
            ]
        );
        let credentials = root.data.node().credentials();
        assert_eq!(shown(credentials.ca()), "/data/node/credentials/ca");
        assert_eq!(
            shown(credentials.certificate()),
            "/data/node/credentials/cert"
        );
        assert_eq!(shown(credentials.key()), "/data/node/credentials/key");
        assert_eq!(shown(root.data.node().roles()), "/data/node/roles.pb");
        assert_eq!(root.data.etcd().path(), Path::new("/data/etcd"));
        assert_eq!(root.ephemeral.reboot_delay(), Path::new(REBOOT_DELAY));
    }

    #[test]
    fn what_holds_secrets_is_made_for_root_alone() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        std::fs::create_dir_all(root.data.path()).unwrap();
        std::fs::create_dir_all(root.esp.path()).unwrap();
        root.esp.make_directories().unwrap();
        root.data.make_directories().unwrap();
        root.ephemeral.make_directories().unwrap();
        for directory in [
            root.data.node().credentials().path().to_owned(),
            root.data.etcd().founding(),
            root.ephemeral.consensus(),
        ] {
            let mode = std::fs::metadata(&directory).unwrap().permissions().mode();
            assert_eq!(
                mode & 0o777,
                files::PRIVATE_DIRECTORY,
                "{}",
                directory.display()
            );
        }
    }
}
