//! All targets.

mod boot_log;
mod certificate;
mod data_header;
mod dhcp;
mod dhcp6;
mod directory;
mod dns_query;
mod dns_response;
mod gpt;
mod network_setting;
mod node_address;
mod parameters;
mod payload;
mod pcr_signatures;
mod quote;
mod router_advertisement;
mod sealed_configuration;
mod sealed_record;
mod slots;
mod smbios;
mod tpm;
mod uki;
mod volume;

use crate::Target;

/// All targets, by name.
pub const TARGETS: &[Target] = &[
    boot_log::TARGET,
    certificate::TARGET,
    data_header::TARGET,
    dhcp::TARGET,
    dhcp6::TARGET,
    directory::TARGET,
    dns_query::TARGET,
    dns_response::TARGET,
    gpt::TARGET,
    network_setting::TARGET,
    node_address::TARGET,
    parameters::TARGET,
    payload::TARGET,
    pcr_signatures::TARGET,
    quote::TARGET,
    router_advertisement::TARGET,
    sealed_configuration::TARGET,
    sealed_record::TARGET,
    slots::TARGET,
    smbios::TARGET,
    tpm::TARGET,
    uki::TARGET,
    volume::TARGET,
];
