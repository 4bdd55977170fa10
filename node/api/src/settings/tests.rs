use std::collections::BTreeSet;

use proptest::prelude::*;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, MessageDescriptor, ReflectMessage as _};

use super::*;
use crate::v1::{
    AuditLevel, ControlPlaneScheduling, DamagedMemberPolicy, KubernetesConfiguration, PodNetwork,
    PodSecurityLevel, StorageSecurityPolicy, TpmMode,
};

fn configuration_descriptor() -> MessageDescriptor {
    DescriptorPool::decode(crate::FILE_DESCRIPTOR_SET)
        .expect("descriptors")
        .get_message_by_name("hearth.v1.ClusterConfiguration")
        .expect("the configuration")
}

/// Paths of all fields that are not messages around others.
fn leaves(message: &MessageDescriptor, prefix: &str, paths: &mut Vec<String>) {
    for field in message.fields() {
        let path = format!("{prefix}{}", field.name());
        match field.kind() {
            Kind::Message(inner) if !field.is_list() && !field.is_map() => {
                leaves(&inner, &format!("{path}."), paths);
            }
            _ => paths.push(path),
        }
    }
}

/// Paths of all fields that are set.
fn set_leaves(message: &DynamicMessage, prefix: &str, paths: &mut Vec<String>) {
    for (field, value) in message.fields() {
        let path = format!("{prefix}{}", field.name());
        match value.as_message() {
            Some(inner) => set_leaves(inner, &format!("{path}."), paths),
            None => paths.push(path),
        }
    }
}

/// `openssl req -x509 -new -key … -days 36500 -subj /CN=a -outform DER -addext
/// basicConstraints=critical,CA:TRUE`, of a key on P-256 that was not kept.
const AUTHORITY: &str = "MIIBcDCCARWgAwIBAgIUVnG0eOOJWqQVFjyBacMMWF00TxswCgYIKoZIzj0EAwIwDDEKMAgGA1UEAwwBYTAgFw0y\
     NjExMjgxNDExMTNaGA8yMTI2MTEwNDE0MTExM1owDDEKMAgGA1UEAwwBYTBZMBMGByqGSM49AgEGCCqGSM49AwEH\
     A0IABKlErYTuhkV9gWZgCloqsXZ1NXZyxUU0lRyYS9AMMzyuMynmgVDPi58h5m7X1+btIPWOpMQf2gNpfEbbRLxm\
     /kSjUzBRMB0GA1UdDgQWBBReM8776S2KNhr4gOkqdQNUF8c+/DAfBgNVHSMEGDAWgBReM8776S2KNhr4gOkqdQNU\
     F8c+/DAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0kAMEYCIQDMVNeJpP/aJ7r3N7d8rBT73NNYg7v9YPTq\
     mrLmd9NBLwIhAJXlGnQxk0NmqPU6iL5ZwLOoHb5SGsM6G9q/TgQSpUom";

fn example(setting: &Setting) -> &'static str {
    match setting.path {
        "cluster_domain" => "example.internal",
        "tpm_mode" => "DISABLED",
        "storage_security_policy" => "PERMISSIVE",
        "cold_start_policy" => "NONE",
        "kubernetes.pod_security_level" => "RESTRICTED",
        "kubernetes.pod_security_exempt_namespaces" => "storage,monitoring",
        "kubernetes.control_plane_scheduling" => "TAINTED",
        "kubernetes.pod_network" => "NONE",
        "kubernetes.registry_mirrors" => "docker.io=https://mirror.example:5000",
        "kubernetes.registry_authorities" => AUTHORITY,
        "kubernetes.registry_credentials" => "registry.example=anna:secret",
        "kubernetes.registry_proxy" => "http://proxy.example:3128",
        "kubernetes.registry_proxy_exceptions" => ".example,192.0.2.0/24",
        "kubernetes.api_address" => "192.0.2.100",
        "kubernetes.api_endpoint" => "api.example:443",
        "kubernetes.audit_level" => "REQUEST",
        "kubernetes.secrets_key_generation" => "7",
        "kubernetes.pod_ranges" => "10.0.0.0/16,fd00:1::/48",
        "kubernetes.service_ranges" => "10.1.0.0/16,fd00:2::/112",
        "certificate_names" => "curators.example,192.0.2.101",
        "admission_policy" => "KNOWN_IMAGES",
        "damaged_member_policy" => "REPLACE",
        "curator_session_seconds" => "20",
        "time_servers" => "192.0.2.1,[2001:db8::1]:1123",
        "certificate_lifetime_seconds" => "3600",
        _ => "rack,topology.example/*",
    }
}

#[test]
fn every_field_of_the_configuration_has_a_row() {
    let mut fields = Vec::new();
    leaves(&configuration_descriptor(), "", &mut fields);
    let rows: Vec<_> = SETTINGS.iter().map(|setting| setting.path).collect();
    assert_eq!(rows, fields, "see node/api/src/settings/table.rs");
    for setting in SETTINGS {
        // Completion scripts of shells cannot quote it otherwise.
        assert!(!setting.help.contains(['\n', '"']), "{setting:?}");
    }
}

#[test]
fn a_row_reads_and_writes_the_field_of_its_path() {
    let descriptor = configuration_descriptor();
    for setting in SETTINGS {
        let mut configuration = ClusterConfiguration::default();
        setting
            .assign(&mut configuration, example(setting))
            .expect(setting.path);
        assert_eq!(
            setting.value(&configuration).to_string(),
            example(setting),
            "{setting:?}"
        );
        let bytes = configuration.encode_to_vec();
        let message = DynamicMessage::decode(descriptor.clone(), &bytes[..]).expect("the message");
        assert_eq!(message.descriptor(), descriptor);
        let mut paths = Vec::new();
        set_leaves(&message, "", &mut paths);
        assert_eq!(paths, [setting.path]);
    }
}

#[test]
fn defaults_are_valid_and_fill_what_has_no_value() {
    let filled = with_defaults(ClusterConfiguration::default());
    assert_eq!(
        complete(ClusterConfiguration::default()),
        Ok(filled.clone())
    );
    let expected = ClusterConfiguration {
        cluster_domain: "cluster.internal".into(),
        tpm_mode: TpmMode::BestEffort.into(),
        storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
        // The first node decides.
        cold_start_policy: 0,
        kubernetes: Some(KubernetesConfiguration {
            pod_security_level: PodSecurityLevel::Baseline.into(),
            control_plane_scheduling: ControlPlaneScheduling::Allowed.into(),
            pod_network: PodNetwork::BuiltIn.into(),
            audit_level: AuditLevel::Metadata.into(),
            secrets_key_generation: 1,
            pod_ranges: vec!["10.208.0.0/12".into()],
            service_ranges: vec!["10.224.0.0/16".into()],
            ..KubernetesConfiguration::default()
        }),
        curator_session_seconds: 6,
        time_servers: Vec::new(),
        certificate_lifetime_seconds: 604_800,
        certificate_names: Vec::new(),
        // Decided by the machine that creates the cluster.
        admission_policy: 0,
        damaged_member_policy: DamagedMemberPolicy::Keep.into(),
    };
    assert_eq!(filled, expected);
    for setting in SETTINGS {
        setting.check(&filled).expect(setting.path);
        let Some(default) = setting.default_value() else {
            assert!(["cold_start_policy", "admission_policy"].contains(&setting.path));
            continue;
        };
        setting.check_definite(&filled).expect(setting.path);
        assert_eq!(setting.value(&filled), default);
        // The text of a default can be written, and so can no text.
        for text in ["", &default.to_string()] {
            let mut configuration = filled.clone();
            setting
                .assign(&mut configuration, text)
                .expect(setting.path);
            assert_eq!(setting.value(&configuration), default);
        }
    }
}

fn refused(path: &str, text: &str) -> String {
    let setting = find("setting", path).expect(path);
    let mut configuration = ClusterConfiguration::default();
    let error = setting.assign(&mut configuration, text).unwrap_err();
    error.to_string()
}

#[test]
fn an_error_names_the_setting_what_it_expects_and_what_it_got() {
    for (path, text, expected) in [
        (
            "cluster_domain",
            "A.example",
            "cluster_domain: expected a lower-case DNS name of at most 80 characters, got \
             \"A.example\"",
        ),
        (
            "tpm_mode",
            "always",
            "tpm_mode: expected REQUIRED, BEST_EFFORT or DISABLED, got \"always\"",
        ),
        (
            "tpm_mode",
            "2",
            "tpm_mode: expected REQUIRED, BEST_EFFORT or DISABLED, got \"2\"",
        ),
        (
            "cold_start_policy",
            "UNSPECIFIED",
            "cold_start_policy: expected TPM, OWNER or NONE, got \"UNSPECIFIED\"",
        ),
        (
            "cold_start_policy",
            "",
            "cold_start_policy: expected TPM, OWNER or NONE, got no value, and this setting has no \
             default",
        ),
        (
            "curator_session_seconds",
            "4",
            "curator_session_seconds: expected a number from 5 to 60, got 4",
        ),
        (
            "curator_session_seconds",
            "0",
            "curator_session_seconds: expected a number from 5 to 60, got 0",
        ),
        (
            "curator_session_seconds",
            "6s",
            "curator_session_seconds: expected a number from 5 to 60, got \"6s\"",
        ),
        (
            "kubernetes.synchronized_labels",
            "a, b c",
            "kubernetes.synchronized_labels[1]: expected the key of a label, or the beginning of \
             one followed by \"*\", got \"b c\"",
        ),
        (
            "kubernetes.synchronized_labels",
            "a*,b,a*",
            "kubernetes.synchronized_labels[2]: expected a value that is not listed before, got \
             \"a*\"",
        ),
        (
            "time_servers",
            "192.0.2.1, pool.ntp.org",
            "time_servers[1]: expected the IP address of a time server (names are not resolved), \
             got \"pool.ntp.org\"",
        ),
        (
            "kubernetes.synchronized_labels",
            ",",
            "kubernetes.synchronized_labels[0]: expected the key",
        ),
    ] {
        let found = refused(path, text);
        assert!(found.starts_with(expected), "{found}");
    }
    let long = format!("{}.a", "a".repeat(79));
    assert!(refused("cluster_domain", &long).contains("at most 80"));
    let many: Vec<_> = (0..65).map(|n| format!("k{n}")).collect();
    let found = refused("kubernetes.synchronized_labels", &many.join(","));
    assert_eq!(
        found,
        "kubernetes.synchronized_labels: expected at most 64 values, got 65"
    );
    let unknown = find("field_mask[0]", "kubernetes").unwrap_err().to_string();
    assert_eq!(
        unknown,
        "field_mask[0]: expected one of cluster_domain, tpm_mode, storage_security_policy, \
         cold_start_policy, kubernetes.synchronized_labels, kubernetes.pod_security_level, \
         kubernetes.pod_security_exempt_namespaces, kubernetes.control_plane_scheduling, \
         kubernetes.pod_network, kubernetes.registry_mirrors, kubernetes.registry_authorities, \
         kubernetes.registry_credentials, kubernetes.registry_proxy, \
         kubernetes.registry_proxy_exceptions, kubernetes.api_address, kubernetes.api_endpoint, \
         kubernetes.audit_level, kubernetes.secrets_key_generation, kubernetes.pod_ranges, \
         kubernetes.service_ranges, curator_session_seconds, time_servers, \
         certificate_lifetime_seconds, certificate_names, admission_policy, \
         damaged_member_policy, got \"kubernetes\""
    );
}

#[test]
fn settings_that_are_valid_alone_are_checked_together() {
    let of = |pods: &str, address: &str| ClusterConfiguration {
        kubernetes: Some(KubernetesConfiguration {
            pod_ranges: vec![pods.to_owned()],
            api_address: address.to_owned(),
            ..KubernetesConfiguration::default()
        }),
        ..ClusterConfiguration::default()
    };
    for (pods, address, expected) in [
        ("10.208.0.0/12", "192.0.2.100", None),
        ("10.0.0.0/16", "10.208.0.1", None),
        (
            "10.208.0.0/12",
            "10.208.0.1",
            Some("kubernetes.api_address: "),
        ),
        (
            "10.0.0.0/16",
            "10.224.0.100",
            Some("kubernetes.api_address: "),
        ),
        (
            "fd00::/48",
            "",
            Some("kubernetes.pod_ranges: expected an IPv4 range"),
        ),
    ] {
        let found = complete(of(pods, address)).map_err(|error| error.to_string());
        match (found, expected) {
            (Ok(_), None) => {}
            (Err(found), Some(expected)) if found.starts_with(expected) => {}
            (found, _) => panic!("{pods} {address}: {found:?}"),
        }
    }
}

#[test]
fn passwords_are_told_to_those_only_who_need_them() {
    let setting = find("setting", "kubernetes.registry_credentials").unwrap();
    let of = |text: &str| {
        let mut configuration = ClusterConfiguration::default();
        setting
            .assign(&mut configuration, text)
            .map(|()| configuration)
    };
    let known = of("a.example=anna:secret,b.example=bert:other").unwrap();
    let mut read = without_secrets(known.clone());
    let hidden = "a.example=anna:REDACTED,b.example=bert:REDACTED";
    assert_eq!(setting.value(&read).to_string(), hidden);
    // Who writes back what it was told changes nothing.
    setting.complete_secrets(&mut read, &known).unwrap();
    assert_eq!(read, known);
    let mut changed = of("c.example=carl:new,b.example=bert:REDACTED").unwrap();
    setting.complete_secrets(&mut changed, &known).unwrap();
    let expected = "c.example=carl:new,b.example=bert:other";
    assert_eq!(setting.value(&changed).to_string(), expected);
    let mut other = of("a.example=anna:x,b.example=carl:REDACTED").unwrap();
    let error = setting.complete_secrets(&mut other, &known).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kubernetes.registry_credentials[1]: expected a password, because the cluster has none for \
         this registry and user, got REDACTED"
    );
    // No error repeats a secret.
    for text in [
        "a.example=anna:se cret",
        "a.example=anna:secret,a.example=bert:secret",
    ] {
        let error = of(text).unwrap_err().to_string();
        assert!(
            error.starts_with("kubernetes.registry_credentials["),
            "{error}"
        );
        assert!(!error.contains("anna"), "{error}");
    }
}

#[test]
fn authorities_are_written_as_a_pem_file() {
    let setting = find("setting", "kubernetes.registry_authorities").unwrap();
    let pem = format!("-----BEGIN CERTIFICATE-----\n{AUTHORITY}\n-----END CERTIFICATE-----\n");
    let mut configuration = ClusterConfiguration::default();
    setting.assign(&mut configuration, &pem).unwrap();
    assert_eq!(
        setting.value(&configuration),
        Value::List(vec![AUTHORITY.to_owned()])
    );
    let torn = pem.replace("MII", "MI");
    assert!(setting.assign(&mut configuration, &torn).is_err());
}

#[test]
fn values_of_a_newer_release_are_shown_and_kept_but_not_accepted() {
    let newer = ClusterConfiguration {
        tpm_mode: 77,
        ..ClusterConfiguration::default()
    };
    let setting = find("setting", "tpm_mode").expect("a setting");
    assert_eq!(setting.value(&newer), Value::Text("77".into()));
    assert_eq!(with_defaults(newer.clone()).tpm_mode, 77);
    let error = complete(newer).unwrap_err();
    assert!(error.to_string().ends_with("got 77"), "{error}");
}

fn configurations() -> impl Strategy<Value = ClusterConfiguration> {
    let patterns = prop::option::of(prop::collection::btree_set("[a-z]{1,3}\\*?", 0..4));
    let policies = (0..5_i32, 1..4_i32, 1..3_i32);
    ("([a-z]{1,5}\\.[a-z]{1,5})?", policies, patterns).prop_map(
        |(
            cluster_domain,
            (storage_security_policy, cold_start_policy, admission_policy),
            patterns,
        )| {
            ClusterConfiguration {
                cluster_domain,
                storage_security_policy,
                cold_start_policy,
                admission_policy,
                kubernetes: patterns.map(|patterns: BTreeSet<String>| KubernetesConfiguration {
                    synchronized_labels: patterns.into_iter().collect(),
                    ..KubernetesConfiguration::default()
                }),
                ..ClusterConfiguration::default()
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// What is printed can be read, and a copy has the same value.
    #[test]
    fn values_survive_text_and_copies(from in configurations(), to in configurations()) {
        prop_assert!(complete(from.clone()).is_ok());
        for setting in SETTINGS {
            let mut written = to.clone();
            let text = setting.value(&from).to_string();
            prop_assert_eq!(setting.assign(&mut written, &text), Ok(()));
            let mut copied = to.clone();
            setting.copy(&from, &mut copied);
            for changed in [written, copied] {
                prop_assert_eq!(setting.value(&changed), setting.value(&from));
                for other in SETTINGS.iter().filter(|other| other.path != setting.path) {
                    prop_assert_eq!(other.value(&changed), other.value(&to));
                }
            }
        }
    }

    #[test]
    fn arbitrary_texts_are_judged_without_harm(text: String) {
        for setting in SETTINGS {
            let mut configuration = ClusterConfiguration::default();
            if setting.assign(&mut configuration, &text).is_ok() {
                prop_assert_eq!(setting.check_definite(&configuration), Ok(()));
            }
        }
    }
}
