//! What pods may ask for: the configuration of the API server's admission plugin PodSecurity.
//!
//! Without it whoever may create a pod owns the node on which it runs: a pod may be privileged, use
//! the host's namespaces, and mount any of its directories. A namespace can be labelled with a
//! level; the cluster's settings say which level the others have.

use hearth_api::v1::{KubernetesConfiguration, PodSecurityLevel};
use serde_json::{Value, json};

use crate::reconciler::objects::NAMESPACE;

/// The cluster's settings about pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodSecurity {
    /// The level of namespaces without a label, as Kubernetes names it.
    level: &'static str,
    /// Namespaces in which nothing is enforced.
    exempt: Vec<String>,
}

impl PodSecurity {
    pub(super) fn of(settings: &KubernetesConfiguration) -> Self {
        let level = match settings.pod_security_level() {
            PodSecurityLevel::Privileged => "privileged",
            PodSecurityLevel::Restricted => "restricted",
            // A cluster that was founded before there was the setting has the default.
            PodSecurityLevel::Baseline | PodSecurityLevel::Unspecified => "baseline",
        };
        let mut exempt = settings.pod_security_exempt_namespaces.clone();
        exempt.insert(0, NAMESPACE.to_owned());
        Self { level, exempt }
    }

    /// The file for `--admission-control-config-file`.
    pub(super) fn configuration(&self) -> Value {
        let Self { level, exempt } = self;
        json!({
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "AdmissionConfiguration",
            "plugins": [{
                "name": "PodSecurity",
                "configuration": {
                    "apiVersion": "pod-security.admission.config.k8s.io/v1",
                    "kind": "PodSecurityConfiguration",
                    "defaults": {
                        "enforce": level,
                        "enforce-version": "latest",
                        // Also for the pods of workloads: whoever creates those is told at once.
                        "warn": level,
                        "warn-version": "latest",
                    },
                    "exemptions": { "namespaces": exempt },
                },
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_baseline_and_the_system_is_exempt() {
        let mut settings = KubernetesConfiguration::default();
        let levels = |settings: &KubernetesConfiguration| {
            let file = PodSecurity::of(settings).configuration();
            let plugin = &file["plugins"][0]["configuration"];
            let exempt = plugin["exemptions"]["namespaces"].clone();
            (plugin["defaults"]["enforce"].clone(), exempt)
        };
        assert_eq!(
            levels(&settings),
            (json!("baseline"), json!(["kube-system"]))
        );
        settings.set_pod_security_level(PodSecurityLevel::Restricted);
        settings.pod_security_exempt_namespaces = vec!["storage".into()];
        let exempt = json!(["kube-system", "storage"]);
        assert_eq!(levels(&settings), (json!("restricted"), exempt));
    }
}
