//! Names and numbers that both sides of an interface must agree on.

use std::time::Duration;

/// The DNS name that the certificates of all curators have, in every cluster.
pub const CURATOR_NAME: &str = "curator.hearth";

/// Ports of a node.
pub mod ports {
    /// etcd peers, mutual TLS from the etcd CA.
    pub const ETCD_PEER: u16 = 7834;
    /// The curator.
    pub const CURATOR: u16 = 7835;
    /// Node management, and the exchange of addresses.
    pub const NODE_MANAGEMENT: u16 = 7836;
    /// The debug service, in debug images only.
    pub const DEBUG: u16 = 7837;
    /// Metrics.
    pub const METRICS: u16 = 7838;
    /// WireGuard of the node mesh, UDP.
    pub const MESH: u16 = 7839;
    /// Unlocking by the owner, while a node's data partition is locked.
    pub const UNLOCK: u16 = 7840;
    /// Kubernetes' API servers, on every controller.
    pub const KUBERNETES: u16 = 6443;
    /// On this machine only: one local address for all API servers, for the node's own clients.
    pub const KUBERNETES_BALANCER: u16 = 6444;
    /// The kubelet's own API.
    pub const KUBELET: u16 = 10250;
    /// On this machine only: the health of the kubelet.
    pub const KUBELET_HEALTH: u16 = 10248;
    /// On this machine only: the metrics of kube-proxy.
    pub const PROXY_METRICS: u16 = 10249;
    /// On this machine only: the health of kube-proxy.
    pub const PROXY_HEALTH: u16 = 10256;
    /// On this machine only: the controller-manager.
    pub const CONTROLLER_MANAGER: u16 = 10257;
    /// On this machine only: the scheduler.
    pub const SCHEDULER: u16 = 10259;
}

/// Names of pods and services. Their addresses are settings of the cluster: [`crate::ranges`].
pub mod pods {
    /// The name in the certificate of each API server, whatever its address: the addresses are
    /// reported by the nodes themselves and prove nothing.
    pub const API_SERVER_NAME: &str = "kubernetes";
    /// The DNS domain of services and pods.
    pub const DOMAIN: &str = "cluster.local";
}

/// Conditions that nodes report about themselves.
pub mod conditions {
    /// Maximum bytes of a condition's message, which has no control characters.
    pub const MAX_MESSAGE_LENGTH: usize = 1024;
    /// Condition of a consensus member while its etcd does not run because of what is on the disk, or its data differ from
    /// those of the other members.
    pub const ETCD_DATA: &str = "EtcdData";
    /// Condition of a consensus member while its disk keeps etcd waiting.
    pub const ETCD_DISK: &str = "EtcdDisk";
    /// Condition of a node while a state file on its EFI system partition cannot be written.
    pub const ESP: &str = "Esp";
    /// Reason: the node's address is in a range of pods or services.
    pub const ADDRESS_IN_RANGES: &str = "AddressInRanges";
    /// Reason: the node's first address is not of IPv4.
    pub const NO_IPV4_ADDRESS: &str = "NoIpv4Address";
    /// Condition of a node while a network interface does not have what it should.
    pub const NETWORK: &str = "Network";
    /// Settings of the node that its kernel refuses.
    pub const SETTINGS: &str = "Settings";
    /// Further disks of the node that are not what its settings want.
    pub const DISKS: &str = "Disks";
    /// Condition of the Kubernetes controller role on a node.
    pub const KUBERNETES_CONTROLLER: &str = "KubernetesController";
    /// Condition of the Kubernetes worker role on a node.
    pub const KUBERNETES_WORKER: &str = "KubernetesWorker";
    /// Condition of a Kubernetes controller in a cluster whose API servers have a virtual address.
    pub const KUBERNETES_API_ADDRESS: &str = "KubernetesApiAddress";
    /// Condition of a Kubernetes controller while objects of `cluster_bootstrap.manifests` are not applied.
    pub const KUBERNETES_MANIFESTS: &str = "KubernetesManifests";
    /// Condition of a node with a Kubernetes role in a dual-stack cluster.
    pub const KUBERNETES_DUAL_STACK: &str = "KubernetesDualStack";
    /// Reason: the node lacks an address of one of the two families.
    pub const NO_ADDRESS_OF_BOTH_FAMILIES: &str = "NoAddressOfBothFamilies";
    /// Reason: the node's image lacks the extension that the role needs.
    pub const NOT_INSTALLED: &str = "NotInstalled";
    /// Reason: the extension does not match the image's root hash.
    pub const EXTENSION_REFUSED: &str = "ExtensionRefused";

    /// A message as one line of at most the length that curators accept.
    pub fn printable(message: &str) -> String {
        let mut line: String = message
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        line.truncate(line.floor_char_boundary(MAX_MESSAGE_LENGTH));
        line
    }
}

/// Extensions of the image.
pub mod extensions {
    /// The extension with Kubernetes' programs.
    pub const KUBERNETES: &str = "kubernetes";
    /// Kernel argument that admits an extension, see [`Admitted`](crate::extension::Admitted).
    pub const KERNEL_WORD: &str = "hearth.extension=";
    /// The folder in which a node mounts each extension, by its name.
    pub const FOLDER: &str = "/ext";
}

/// The disk that a machine boots from.
pub mod disk {
    use uuid::{Uuid, uuid};

    /// Partition type of the EFI system partition.
    pub const ESP_TYPE: Uuid = uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
    /// Its label.
    pub const ESP_LABEL: &str = "HEARTH-ESP";
    /// The parameters' path on it.
    pub const ESP_PARAMETERS: &str = "hearth/parameters.pb";
    /// The identity of the installation that has written the disk: 64 hexadecimal digits and a newline. A disk that was
    /// written otherwise has no such file.
    pub const ESP_INSTALLATION: &str = "hearth/installation";
    /// The files in which a node keeps its state, in the ESP's root. An image has them, blank.
    pub const ESP_STATE_FILES: [&str; 8] = [
        "hearth/boot_record.0",
        "hearth/boot_record.1",
        "hearth/cluster_directory.0",
        "hearth/cluster_directory.1",
        "hearth/network.0",
        "hearth/network.1",
        "hearth/sealed_configuration.0",
        "hearth/sealed_configuration.1",
    ];
    /// Partition type of the data partition: Hearth's own, so that no other system mounts it
    /// automatically.
    pub const DATA_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-68656172746a");
    /// Its label.
    pub const DATA_LABEL: &str = "HEARTH-DATA";
    /// Partition type of an extension slot.
    pub const EXTENSION_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-686561727478");
    /// Labels of the extension slots.
    pub const SLOT_LABELS: [&str; 2] = ["HEARTH-EXT-A", "HEARTH-EXT-B"];
    /// An extension in a slot begins at a multiple of this many bytes.
    pub const SLOT_BLOCK: u64 = 4096;
}

/// QEMU's `fw_cfg` items.
pub mod fw_cfg {
    /// The serialised `NodeParameters`.
    pub const PARAMETERS: &str = "opt/dev.hearth/parameters.pb";
    /// The name of the failpoint to arm. Test images only.
    pub const FAILPOINT: &str = "opt/dev.hearth/failpoint";
}

/// Strings in the SMBIOS table, structures of type 11.
pub mod smbios {
    /// What a string begins with, before `=`, that has parameters in base64, or a part of them.
    pub const PARAMETERS: &str = "dev.hearth.parameters";
}

/// A volume that is attached beside the boot disk.
pub mod config_drive {
    /// Its label: as long as FAT allows.
    pub const LABEL: &str = "HEARTH-CONF";
    /// The parameters' path on it.
    pub const PARAMETERS: &str = "parameters.pb";
}

/// Lifetime of the lease by which a Kubernetes controller has the virtual address of the API servers. etcd has no
/// shorter ones than 3 s with its election timeout in clusters.
pub const API_ADDRESS_LEASE: Duration = Duration::from_secs(5);
/// The medium from which a machine installs a node.
pub mod installer {
    /// Kernel argument that makes a node an installer.
    pub const KERNEL_WORD: &str = "hearth.installer";
    /// The label of the volume with the payload, and of a stick's partition.
    pub const LABEL: &str = "HEARTH-INST";
    /// The payload's path on it.
    pub const PAYLOAD: &str = "hearth/payload.bin";
}

/// Maximum interval between the events of a curator to a watcher, even if nothing has changed.
pub const WATCH_MARK: Duration = Duration::from_secs(15);
/// A watcher that has received nothing for this long switches to another curator: this one hangs,
/// though its connection is open.
pub const WATCH_SILENCE: Duration = Duration::from_secs(45);

// Aliases from before the modules above, for users that have not migrated yet. A test compares the
// texts with the typed values.

pub use conditions::{
    EXTENSION_REFUSED as REASON_EXTENSION_REFUSED,
    KUBERNETES_CONTROLLER as CONDITION_KUBERNETES_CONTROLLER,
    KUBERNETES_WORKER as CONDITION_KUBERNETES_WORKER, MAX_MESSAGE_LENGTH as LONGEST_CONDITION,
    NOT_INSTALLED as REASON_NOT_INSTALLED,
};
pub use disk::{DATA_LABEL, ESP_LABEL, ESP_PARAMETERS};
pub use extensions::{
    FOLDER as EXTENSIONS, KERNEL_WORD as EXTENSION_WORD, KUBERNETES as EXTENSION_KUBERNETES,
};
pub use fw_cfg::{FAILPOINT as FW_CFG_FAILPOINT, PARAMETERS as FW_CFG_PARAMETERS};
pub use pods::{API_SERVER_NAME as KUBERNETES_SERVER, DOMAIN as KUBERNETES_DOMAIN};
pub use ports::{
    CURATOR as PORT_CURATOR, DEBUG as PORT_DEBUG, ETCD_PEER as PORT_ETCD_PEER,
    KUBELET as PORT_KUBELET, KUBERNETES as PORT_KUBERNETES,
    KUBERNETES_BALANCER as PORT_KUBERNETES_BALANCER, MESH as PORT_MESH,
    NODE_MANAGEMENT as PORT_NODE_MANAGEMENT, UNLOCK as PORT_UNLOCK,
};

/// [`disk::ESP_TYPE`] as text.
pub const ESP_TYPE: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
/// [`disk::DATA_TYPE`] as text.
pub const DATA_TYPE: &str = "6c5ab0f2-3d0e-4b5f-9d1c-68656172746a";
/// [`disk::EXTENSION_TYPE`] as text.
pub const EXTENSION_TYPE: &str = "6c5ab0f2-3d0e-4b5f-9d1c-686561727478";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_the_values() {
        assert_eq!(ESP_TYPE, disk::ESP_TYPE.to_string());
        assert_eq!(DATA_TYPE, disk::DATA_TYPE.to_string());
        assert_eq!(EXTENSION_TYPE, disk::EXTENSION_TYPE.to_string());
    }
}
