//! Names and numbers that both sides of a boundary must agree on.

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
