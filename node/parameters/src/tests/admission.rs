//! The admission policy of a new cluster.

use hearth_api::v1::AdmissionPolicy;

use super::*;

#[test]
fn a_cluster_whose_nodes_need_a_tpm_asks_what_they_have_booted() {
    let policy = |mode: TpmMode, policy: AdmissionPolicy| {
        let configuration = ClusterConfiguration {
            tpm_mode: mode.into(),
            admission_policy: policy.into(),
            ..ClusterConfiguration::default()
        };
        let read = parsed(&founding(ClusterBootstrap {
            initial_cluster_configuration: Some(configuration),
            ..bootstrap()
        }));
        match read.unwrap().cluster {
            Cluster::Bootstrap(found) => found.seed.configuration.admission_policy(),
            Cluster::Register(_) => panic!("not a bootstrap"),
        }
    };
    let (any, known) = (AdmissionPolicy::Any, AdmissionPolicy::KnownImages);
    let unset = AdmissionPolicy::Unspecified;
    assert_eq!(policy(TpmMode::Required, unset), known);
    assert_eq!(policy(TpmMode::Required, any), any);
    for mode in [TpmMode::Unspecified, TpmMode::BestEffort, TpmMode::Disabled] {
        assert_eq!(policy(mode, unset), any);
        assert_eq!(policy(mode, known), known);
    }
}
