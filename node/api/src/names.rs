//! Names and numbers that both sides of a boundary must agree on.

use std::time::Duration;

/// QEMU fw_cfg item with the serialised `NodeParameters`.
pub const FW_CFG_PARAMETERS: &str = "opt/dev.hearth/parameters.pb";
/// QEMU fw_cfg item that arms one failpoint by name. Test images only.
pub const FW_CFG_FAILPOINT: &str = "opt/dev.hearth/failpoint";

/// etcd peers, mutual TLS from the etcd CA.
pub const PORT_ETCD_PEER: u16 = 7834;
/// The curator.
pub const PORT_CURATOR: u16 = 7835;
/// Node management, and unlocking.
pub const PORT_NODE_MANAGEMENT: u16 = 7836;
/// The debug service, in debug images only.
pub const PORT_DEBUG: u16 = 7837;
/// Metrics.
pub const PORT_METRICS: u16 = 7838;
/// WireGuard of the node mesh, UDP.
pub const PORT_MESH: u16 = 7839;
/// Kubernetes' API servers, on every controller.
pub const PORT_KUBERNETES: u16 = 6443;
/// On this machine only: all API servers behind one address, for the node's
/// own clients.
pub const PORT_KUBERNETES_BALANCER: u16 = 6444;
/// The kubelet's own API.
pub const PORT_KUBELET: u16 = 10250;

/// Addresses of all pods; each node has a [`POD_RANGE_BITS`] part of it.
pub const POD_NETWORK: &str = "10.208.0.0/12";
/// Length of the prefix of one node's pods.
pub const POD_RANGE_BITS: u8 = 24;
/// Addresses of services.
pub const SERVICE_NETWORK: &str = "10.224.0.0/16";
/// The service that is the API servers.
pub const SERVICE_API: &str = "10.224.0.1";
/// The service that resolves names.
pub const SERVICE_DNS: &str = "10.224.0.10";
/// By this name each API server proves itself, whatever its address is, and
/// nobody else can: addresses are what nodes say themselves.
pub const KUBERNETES_SERVER: &str = "kubernetes";
/// Under which services and pods have names.
pub const KUBERNETES_DOMAIN: &str = "cluster.local";

/// Bytes of the message of a node's condition, which has no control characters.
pub const LONGEST_CONDITION: usize = 1024;
/// How the role of a Kubernetes controller stands on a node.
pub const CONDITION_KUBERNETES_CONTROLLER: &str = "KubernetesController";
/// How the role of a Kubernetes worker stands on a node.
pub const CONDITION_KUBERNETES_WORKER: &str = "KubernetesWorker";
/// Of a condition: the node's image lacks the extension that the role needs.
pub const REASON_NOT_INSTALLED: &str = "NotInstalled";
/// Of a condition: the extension is not the one that the image vouches for.
pub const REASON_EXTENSION_REFUSED: &str = "ExtensionRefused";

/// The extension with Kubernetes' programs.
pub const EXTENSION_KUBERNETES: &str = "kubernetes";
/// Partition type of an extension.
pub const EXTENSION_TYPE: &str = "6c5ab0f2-3d0e-4b5f-9d1c-686561727478";
/// Label of an extension's partition, before its name in capitals.
pub const EXTENSION_LABEL: &str = "HEARTH-EXT-";
/// Word of the kernel's command line that admits an extension, see
/// [`crate::extension::Admitted`].
pub const EXTENSION_WORD: &str = "hearth.extension=";
/// In a folder of extensions: where each is mounted on a node, by its name.
pub const EXTENSIONS: &str = "/ext";

/// A watcher hears from its curator at least so often, even if there is
/// nothing to tell.
pub const WATCH_MARK: Duration = Duration::from_secs(15);
/// Whoever has heard nothing for so long asks another curator: this one hangs,
/// though its connection lives.
pub const WATCH_SILENCE: Duration = Duration::from_secs(45);

/// Partition type of the EFI system partition.
pub const ESP_TYPE: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
/// Its label.
pub const ESP_LABEL: &str = "HEARTH-ESP";
/// Partition type of the data partition: Hearth's own, so that no other
/// system mounts it of itself.
pub const DATA_TYPE: &str = "6c5ab0f2-3d0e-4b5f-9d1c-68656172746a";
/// Its label.
pub const DATA_LABEL: &str = "HEARTH-DATA";
/// The parameters' path on the ESP.
pub const ESP_PARAMETERS: &str = "hearth/parameters.pb";
