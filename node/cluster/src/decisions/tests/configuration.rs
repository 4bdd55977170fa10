//! Changes of the configuration by several operators who have read it at different versions.

use std::collections::BTreeSet;

use hearth_api::private::StoredCluster;
use hearth_api::settings::{self, SETTINGS, Setting, Value};
use hearth_api::v1::{
    ClusterConfiguration, ColdStartPolicy, ConfigureClusterRequest, KubernetesConfiguration,
};
use prost::Message as _;

use super::super::configuration::{Change, Configured, version};
use super::*;
use crate::state::FullCluster;

fn founded(configuration: ClusterConfiguration, has_recipient: bool) -> Records {
    let stored = StoredCluster {
        version: state::VERSION,
        cluster_id: vec![1; 16],
        configuration: Some(configuration),
        owner_public_key: node_key(0).as_bytes().to_vec(),
        first_contact_secret: vec![2; 32],
        recovery_recipient: match has_recipient {
            true => vec![3; 32],
            false => Vec::new(),
        },
        owner_replacements: Vec::new(),
    };
    let mut records = Records::default();
    let write = Write::when(Condition::Absent(state::CLUSTER.into()));
    assert!(records.apply(&write.put(state::CLUSTER, stored.encode_to_vec())));
    records
}

fn cluster(records: &Records) -> Versioned<FullCluster> {
    let key = state::CLUSTER.to_owned();
    records.at(key, FullCluster::decode).expect("the cluster")
}

/// An operator's request; `at` selects one of the versions that there have been.
#[derive(Clone, Debug)]
struct Asked {
    at: prop::sample::Index,
    mask: BTreeSet<usize>,
    values: ClusterConfiguration,
}

fn values() -> impl Strategy<Value = ClusterConfiguration> {
    let domain = prop::sample::select(vec!["", "cluster.internal", "example.internal"]);
    let patterns = prop::collection::btree_set("[ab]\\*?", 0..3);
    let policies = (0..3_i32, 1..4_i32, 1..3_i32);
    (domain, policies, prop::option::of(patterns)).prop_map(
        |(domain, (policy, cold_start_policy, admission_policy), patterns)| ClusterConfiguration {
            cluster_domain: domain.to_owned(),
            storage_security_policy: policy,
            cold_start_policy,
            admission_policy,
            kubernetes: patterns.map(|patterns| KubernetesConfiguration {
                synchronized_labels: patterns.into_iter().collect(),
                ..KubernetesConfiguration::default()
            }),
            ..ClusterConfiguration::default()
        },
    )
}

fn asked() -> impl Strategy<Value = Asked> {
    let mask = prop::collection::btree_set(0..SETTINGS.len(), 1..=2);
    (any::<prop::sample::Index>(), mask, values()).prop_map(|(at, mask, values)| Asked {
        at,
        mask,
        values,
    })
}

fn all_values(configuration: &ClusterConfiguration) -> Vec<Value> {
    SETTINGS.iter().map(|s| s.value(configuration)).collect()
}

fn decide(records: &Records, version: u64, asked: &Asked) -> Result<Configured, Rejection> {
    let paths = asked.mask.iter().map(|index| SETTINGS[*index].path);
    let request = ConfigureClusterRequest {
        version,
        configuration: Some(asked.values.clone()),
        field_mask: paths.map(str::to_owned).collect(),
    };
    Change::new(request)?.decide(&cluster(records))
}

/// Asks for another cold-start policy.
fn ask_policy(records: &Records, policy: i32) -> Result<Configured, Rejection> {
    let request = ConfigureClusterRequest {
        version: version(&cluster(records)),
        configuration: Some(ClusterConfiguration {
            cold_start_policy: policy,
            ..ClusterConfiguration::default()
        }),
        field_mask: vec!["cold_start_policy".into()],
    };
    Change::new(request)?.decide(&cluster(records))
}

#[test]
fn the_owner_unlocks_only_with_a_recovery_key() {
    use ColdStartPolicy::{None as Nobody, Owner, Tpm};
    for (from, to, has_recipient, is_right) in [
        (Nobody, Owner, false, false),
        (Tpm, Owner, false, false),
        (Nobody, Owner, true, true),
        (Nobody, Tpm, false, true),
        (Owner, Nobody, true, true),
        // No change.
        (Owner, Owner, false, true),
    ] {
        let first = ClusterConfiguration {
            cold_start_policy: from.into(),
            ..ClusterConfiguration::default()
        };
        let decided = ask_policy(&founded(first, has_recipient), to.into());
        match decided {
            Ok(decided) => {
                assert!(is_right, "{from:?} {to:?}");
                assert_eq!(decided.configuration.cold_start_policy(), to);
            }
            Err(rejection) => {
                assert!(!is_right, "{rejection}");
                assert_eq!(rejection, Rejection::NoRecoveryRecipient);
                assert_eq!(rejection.code(), Code::FailedPrecondition);
            }
        }
    }
}

/// Also where a former release has stored none.
#[test]
fn a_cluster_always_has_a_cold_start_policy() {
    let records = founded(ClusterConfiguration::default(), true);
    let rejection = ask_policy(&records, 0).err().map(|r| r.to_string());
    let expected = "cold_start_policy: expected TPM, OWNER or NONE, got no value";
    assert!(rejection.is_some_and(|text| text.starts_with(expected)));
    let unchanged = ask_policy(&records, ColdStartPolicy::None.into()).unwrap();
    assert_eq!(
        unchanged.configuration.cold_start_policy(),
        ColdStartPolicy::None
    );
    assert!(unchanged.write.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_in_the_mask_changes_at_its_version_and_nothing_else(
        first in values(),
        requests in prop::collection::vec(asked(), 1..8),
    ) {
        let mut records = founded(first, true);
        let mut versions = vec![version(&cluster(&records))];
        for asked in requests {
            let before = cluster(&records);
            let now = all_values(&before.content.configuration());
            let expected: Vec<Value> = SETTINGS
                .iter()
                .enumerate()
                .map(|(index, setting)| match asked.mask.contains(&index) {
                    true => setting.value(&asked.values),
                    false => now[index].clone(),
                })
                .collect();
            let changed = |setting: &&Setting| {
                let index = SETTINGS.iter().position(|s| s.path == setting.path);
                index.is_some_and(|index| now[index] != expected[index])
            };
            let known = versions[asked.at.index(versions.len())];
            let decided = decide(&records, known, &asked);
            if SETTINGS.iter().filter(changed).any(|setting| setting.fixed.is_some()) {
                let code = decided.err().map(|rejection| rejection.code());
                prop_assert_eq!(code, Some(Code::FailedPrecondition));
                continue;
            }
            let is_stale = known != version(&before);
            let decided = match decided {
                Err(rejection) => {
                    prop_assert!(is_stale && now != expected, "{}", rejection);
                    prop_assert_eq!(rejection.code(), Code::Aborted);
                    continue;
                }
                Ok(decided) => decided,
            };
            prop_assert_eq!(&all_values(&decided.configuration), &expected);
            let paths: Vec<_> = SETTINGS.iter().filter(changed).map(|s| s.path).collect();
            prop_assert_eq!(&decided.changed, &paths);
            prop_assert_eq!(decided.write.is_some(), now != expected);
            let Some(write) = decided.write else { continue };
            prop_assert!(!is_stale);
            prop_assert!(records.apply(&write));
            // Written late, or twice, it has no effect.
            prop_assert!(!records.apply(&write));
            let after = cluster(&records);
            prop_assert_eq!(all_values(&after.content.configuration()), expected);
            // Nothing else in the record has changed.
            let old = before.content.configuration();
            prop_assert_eq!(after.content.encode_with(old.clone()), before.content.encode_with(old));
            versions.push(version(&after));
            // A caller that has lost the answer gets it again, without another write.
            let again = decide(&records, known, &asked);
            let again = again.map_err(|rejection| TestCaseError::fail(rejection.to_string()))?;
            prop_assert!(again.write.is_none());
            prop_assert_eq!(again.configuration, decided.configuration);
        }
    }

    #[test]
    fn arbitrary_requests_are_judged_without_harm(
        version: u64, field_mask: Vec<String>, cluster_domain: String, tpm_mode: i32,
        patterns: Vec<String>, index in 0..SETTINGS.len(),
    ) {
        let records = founded(ClusterConfiguration::default(), false);
        let mut field_mask = field_mask;
        field_mask.push(SETTINGS[index].path.to_owned());
        let configuration = Some(ClusterConfiguration {
            cluster_domain,
            tpm_mode,
            kubernetes: Some(KubernetesConfiguration { synchronized_labels: patterns, ..Default::default() }),
            ..ClusterConfiguration::default()
        });
        let request = ConfigureClusterRequest { version, configuration, field_mask };
        if let Ok(change) = Change::new(request)
            && let Ok(configured) = change.decide(&cluster(&records))
        {
            prop_assert!(settings::complete(configured.configuration).is_ok());
        }
    }
}
