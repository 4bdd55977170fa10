//! The table of settings, in the order of the fields in the proto file.

use super::Setting;
use super::kinds::{Authorities, Choice, Credentials, List, Number, Text};
use crate::hosts::{self, Host};
use crate::registries::{self, Credential, Mirror};
use crate::time_server::{self, TimeServer};
use crate::v1::{
    AdmissionPolicy, AuditLevel, ColdStartPolicy, ControlPlaneScheduling, DamagedMemberPolicy,
    PodNetwork, PodSecurityLevel, StorageSecurityPolicy, TpmMode,
};
use crate::{labels, ranges};

/// Maximum length of the cluster domain: a node's ID and the domain together form a host name.
const LONGEST_CLUSTER_DOMAIN: usize = 80;
/// Maximum number of patterns that select labels.
const MOST_LABEL_PATTERNS: usize = 64;
/// Maximum number of namespaces that are exempt from Pod Security.
const MOST_EXEMPT_NAMESPACES: usize = 64;

/// Maximum number of mirrors, credentials and exceptions from the proxy.
const MOST_REGISTRIES: usize = 64;
/// Maximum number of further names in the certificates of servers.
const MOST_CERTIFICATE_NAMES: usize = 32;
/// Address families, of which pods and services have one range each.
const FAMILIES: usize = 2;
/// Maximum number of private authorities of registries.
const MOST_REGISTRY_AUTHORITIES: usize = 32;

/// All settings.
pub static SETTINGS: &[Setting] = &[
    Setting {
        path: "cluster_domain",
        help: "Parent domain of the nodes' DNS names",
        fixed: Some("the names of all nodes end in it"),
        kind: &Text {
            field: |configuration| &mut configuration.cluster_domain,
            default: "cluster.internal",
            expected: "a lower-case DNS name of at most 80 characters",
            is_valid: |name| name.len() <= LONGEST_CLUSTER_DOMAIN && labels::is_dns_name(name),
        },
    },
    Setting {
        path: "tpm_mode",
        help: "Whether nodes seal their secrets with a TPM 2.0",
        fixed: Some("nodes have registered under it"),
        kind: &Choice {
            field: |configuration| &mut configuration.tpm_mode,
            name: |mode| Some(TpmMode::try_from(mode).ok()?.as_str_name()),
            default: TpmMode::BestEffort as i32,
            supported: &[
                TpmMode::Required as i32,
                TpmMode::BestEffort as i32,
                TpmMode::Disabled as i32,
            ],
        },
    },
    Setting {
        path: "storage_security_policy",
        help: "How nodes may protect their data partitions",
        fixed: Some("nodes have formatted their data partitions according to it"),
        kind: &Choice {
            field: |configuration| &mut configuration.storage_security_policy,
            name: |policy| Some(StorageSecurityPolicy::try_from(policy).ok()?.as_str_name()),
            default: StorageSecurityPolicy::NeedsEncryption as i32,
            supported: &[
                StorageSecurityPolicy::Permissive as i32,
                StorageSecurityPolicy::NeedsEncryption as i32,
                StorageSecurityPolicy::NeedsEncryptionAndAuthentication as i32,
                StorageSecurityPolicy::NeedsInsecure as i32,
            ],
        },
    },
    Setting {
        path: "cold_start_policy",
        help: "Who can unlock an encrypted node when no curator is running",
        fixed: None,
        kind: &Choice {
            field: |configuration| &mut configuration.cold_start_policy,
            name: |policy| Some(ColdStartPolicy::try_from(policy).ok()?.as_str_name()),
            // What is possible depends on the machine that creates the cluster, which therefore
            // decides where the parameters do not: `hearth_parameters::cold_start_policy`.
            default: 0,
            supported: &[
                ColdStartPolicy::Tpm as i32,
                ColdStartPolicy::Owner as i32,
                ColdStartPolicy::None as i32,
            ],
        },
    },
    Setting {
        path: "kubernetes.synchronized_labels",
        help: "Node labels to copy to Kubernetes nodes: keys, or key prefixes followed by *",
        fixed: None,
        kind: &List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.synchronized_labels
            },
            default: &[],
            max_length: MOST_LABEL_PATTERNS,
            expected: "the key of a label, or the beginning of one followed by \"*\"",
            is_valid: labels::is_pattern,
        },
    },
    Setting {
        path: "kubernetes.pod_security_level",
        help: "Pod Security level of namespaces that are not labelled with one",
        fixed: None,
        kind: &Choice {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.pod_security_level
            },
            name: |level| Some(PodSecurityLevel::try_from(level).ok()?.as_str_name()),
            default: PodSecurityLevel::Baseline as i32,
            supported: &[
                PodSecurityLevel::Privileged as i32,
                PodSecurityLevel::Baseline as i32,
                PodSecurityLevel::Restricted as i32,
            ],
        },
    },
    Setting {
        path: "kubernetes.pod_security_exempt_namespaces",
        help: "Namespaces without any Pod Security level, besides kube-system",
        fixed: None,
        kind: &List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.pod_security_exempt_namespaces
            },
            default: &[],
            max_length: MOST_EXEMPT_NAMESPACES,
            expected: "the name of a namespace",
            is_valid: labels::is_dns_label,
        },
    },
    Setting {
        path: "kubernetes.control_plane_scheduling",
        help: "Whether pods run on consensus members and Kubernetes controllers",
        fixed: None,
        kind: &Choice {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.control_plane_scheduling
            },
            name: |value| Some(ControlPlaneScheduling::try_from(value).ok()?.as_str_name()),
            default: ControlPlaneScheduling::Allowed as i32,
            supported: &[
                ControlPlaneScheduling::Allowed as i32,
                ControlPlaneScheduling::Tainted as i32,
            ],
        },
    },
    Setting {
        path: "kubernetes.pod_network",
        help: "The network of pods: the built-in one, or none, to install another",
        fixed: Some("pods keep the network that they have"),
        kind: &Choice {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.pod_network
            },
            name: |value| Some(PodNetwork::try_from(value).ok()?.as_str_name()),
            default: PodNetwork::BuiltIn as i32,
            supported: &[PodNetwork::BuiltIn as i32, PodNetwork::None as i32],
        },
    },
    Setting {
        path: "kubernetes.registry_mirrors",
        help: "Servers to ask for the images of a registry before itself: REGISTRY=URL",
        fixed: None,
        kind: &List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.registry_mirrors
            },
            default: &[],
            max_length: MOST_REGISTRIES,
            expected: registries::MIRROR,
            is_valid: |text| text.parse::<Mirror>().is_ok(),
        },
    },
    Setting {
        path: "kubernetes.registry_authorities",
        help: "Certificates of private authorities of registries, in PEM",
        fixed: None,
        kind: &Authorities(List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.registry_authorities
            },
            default: &[],
            max_length: MOST_REGISTRY_AUTHORITIES,
            expected: registries::AUTHORITY,
            is_valid: |text| registries::authority(text).is_ok(),
        }),
    },
    Setting {
        path: "kubernetes.registry_credentials",
        help: "Users and passwords for registries: REGISTRY=USER:PASSWORD",
        fixed: None,
        kind: &Credentials(List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.registry_credentials
            },
            default: &[],
            max_length: MOST_REGISTRIES,
            expected: registries::CREDENTIAL,
            is_valid: |text| text.parse::<Credential>().is_ok(),
        }),
    },
    Setting {
        path: "kubernetes.registry_proxy",
        help: "HTTP proxy by which workers reach registries",
        fixed: None,
        kind: &Text {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.registry_proxy
            },
            default: "",
            expected: registries::PROXY,
            is_valid: registries::is_proxy,
        },
    },
    Setting {
        path: "kubernetes.registry_proxy_exceptions",
        help: "Registries that are reached without the proxy: names, .domains, addresses, ranges",
        fixed: None,
        kind: &List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.registry_proxy_exceptions
            },
            default: &[],
            max_length: MOST_REGISTRIES,
            expected: registries::PROXY_EXCEPTION,
            is_valid: registries::is_proxy_exception,
        },
    },
    Setting {
        path: "kubernetes.api_address",
        help: "Virtual address of the API servers, which one Kubernetes controller at a time has",
        fixed: None,
        kind: &Text {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.api_address
            },
            default: "",
            expected: hosts::API_ADDRESS,
            is_valid: |text| hosts::api_address(text).is_some(),
        },
    },
    Setting {
        path: "kubernetes.api_endpoint",
        help: "HOST[:PORT] of a load balancer in front of the API servers",
        fixed: None,
        kind: &Text {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.api_endpoint
            },
            default: "",
            expected: hosts::API_ENDPOINT,
            is_valid: |text| hosts::api_endpoint(text).is_some(),
        },
    },
    Setting {
        path: "kubernetes.audit_level",
        help: "What API servers record of requests that change something",
        fixed: None,
        kind: &Choice {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.audit_level
            },
            name: |level| Some(AuditLevel::try_from(level).ok()?.as_str_name()),
            default: AuditLevel::Metadata as i32,
            supported: &[
                AuditLevel::None as i32,
                AuditLevel::Metadata as i32,
                AuditLevel::Request as i32,
                AuditLevel::RequestResponse as i32,
            ],
        },
    },
    Setting {
        path: "kubernetes.secrets_key_generation",
        help: "Number of the key that encrypts Secrets; a larger one replaces the key",
        fixed: None,
        kind: &Number {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.secrets_key_generation
            },
            default: 1,
            range: 1..=1_000_000,
        },
    },
    Setting {
        path: ranges::POD_RANGES,
        help: "Addresses of pods: an IPv4 range, and an IPv6 range for dual stack",
        fixed: Some("nodes and pods have addresses of it"),
        kind: &List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.pod_ranges
            },
            default: ranges::DEFAULT_POD_RANGES,
            max_length: FAMILIES,
            expected: ranges::POD_RANGE,
            is_valid: ranges::is_pod_range,
        },
    },
    Setting {
        path: ranges::SERVICE_RANGES,
        help: "Addresses of services: an IPv4 range, and an IPv6 range for dual stack",
        fixed: Some("services have addresses of it"),
        kind: &List {
            field: |configuration| {
                let kubernetes = configuration.kubernetes.get_or_insert_default();
                &mut kubernetes.service_ranges
            },
            default: ranges::DEFAULT_SERVICE_RANGES,
            max_length: FAMILIES,
            expected: ranges::SERVICE_RANGE,
            is_valid: ranges::is_service_range,
        },
    },
    Setting {
        path: "curator_session_seconds",
        help: "Seconds until a lost leader is replaced; for sessions that curators begin afterwards",
        fixed: None,
        kind: &Number {
            field: |configuration| &mut configuration.curator_session_seconds,
            default: 6,
            // Shorter ones would expire before a curator that has lost contact stops answering.
            range: 5..=60,
        },
    },
    Setting {
        path: "time_servers",
        help: "NTP servers of all nodes, as IP addresses with or without a port; none: those of DHCP",
        fixed: None,
        kind: &List {
            field: |configuration| &mut configuration.time_servers,
            default: &[],
            max_length: time_server::MOST,
            expected: time_server::EXPECTED,
            is_valid: |text| text.parse::<TimeServer>().is_ok(),
        },
    },
    Setting {
        path: "certificate_lifetime_seconds",
        help: "Seconds for which new certificates of nodes and users are valid",
        fixed: None,
        kind: &Number {
            field: |configuration| &mut configuration.certificate_lifetime_seconds,
            default: 7 * 24 * 3600,
            // They are renewed after half of it, and a curator that is busy may take a while.
            range: 120..=365 * 24 * 3600,
        },
    },
    Setting {
        path: "certificate_names",
        help: "Further DNS names and IP addresses in the certificates of curators and API servers",
        fixed: None,
        kind: &List {
            field: |configuration| &mut configuration.certificate_names,
            default: &[],
            max_length: MOST_CERTIFICATE_NAMES,
            expected: hosts::HOST,
            is_valid: |text| text.parse::<Host>().is_ok(),
        },
    },
    Setting {
        path: "admission_policy",
        help: "What machines have to prove before they get anything of the cluster",
        fixed: None,
        kind: &Choice {
            field: |configuration| &mut configuration.admission_policy,
            name: |policy| Some(AdmissionPolicy::try_from(policy).ok()?.as_str_name()),
            // Depends on another setting, whose clusters have had none: `admission_policy` of hearth-parameters.
            default: 0,
            supported: &[
                AdmissionPolicy::Any as i32,
                AdmissionPolicy::KnownImages as i32,
            ],
        },
    },
    Setting {
        path: "damaged_member_policy",
        help: "Whether the cluster replaces a consensus member whose data are damaged",
        fixed: None,
        kind: &Choice {
            field: |configuration| &mut configuration.damaged_member_policy,
            name: |policy| Some(DamagedMemberPolicy::try_from(policy).ok()?.as_str_name()),
            // etcd never removes a member by itself, and nor does what manages it, unless it is told to.
            default: DamagedMemberPolicy::Keep as i32,
            supported: &[
                DamagedMemberPolicy::Keep as i32,
                DamagedMemberPolicy::Replace as i32,
            ],
        },
    },
];
