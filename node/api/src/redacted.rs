//! `Debug` for messages that contain secrets.
//!
//! The generator skips these (see `build.rs`), because its own implementation would print every
//! field. Each is written by destructuring the message completely, so that a new field does not
//! compile until it has been decided whether it may be printed. Messages that only contain one of
//! these are printed by the generated code, which calls the implementations here.

use std::fmt;

use crate::private::{
    Founding, Registering, SealedConfiguration, StoredAuthority, StoredCluster,
    StoredControllerKey, StoredKubernetesAuthorities, StoredMesh, StoredNode, StoredTicket,
};
use crate::v1::join_node_response::Admitted;
use crate::v1::{
    ClusterBootstrap, ClusterRegister, CommitNodeRequest, GetRegisterTicketResponse,
    RegisterNodeRequest,
};

/// Placeholder for a secret: prints only whether it is set.
struct Redacted<'a>(&'a [u8]);

impl fmt::Debug for Redacted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() {
            "absent"
        } else {
            "redacted"
        })
    }
}

macro_rules! redacted_debug {
    ($message:ident { shown: $($shown:ident),*; secret: $($secret:ident),* }) => {
        impl fmt::Debug for $message {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Self { $($shown,)* $($secret,)* } = self;
                f.debug_struct(stringify!($message))
                    $(.field(stringify!($shown), $shown))*
                    $(.field(stringify!($secret), &Redacted($secret)))*
                    .finish()
            }
        }
    };
}

redacted_debug!(ClusterBootstrap {
    shown: owner_public_key, recovery_recipient, initial_cluster_configuration, initial_roles, labels,
        accept_loss, manifests;
    secret: first_contact_secret
});

redacted_debug!(ClusterRegister {
    shown: cluster_directory, ca_certificate, labels;
    secret: register_ticket
});

redacted_debug!(SealedConfiguration {
    shown: version, phase, enrolment_id, storage_security, tpm_usage, cluster_id, node_id,
        cluster_ca, owner_public_key, cold_start_policy, key_epoch, founding, network_config,
        registering, recovery, reset;
    secret: node_unlock_key, join_key, node_key, cluster_unlock_key
});

redacted_debug!(Founding {
    shown: recovery_recipient, configuration, roles, labels, manifests;
    secret: first_contact_secret
});

redacted_debug!(StoredNode {
    shown: version, id, public_key, join_key, state, roles, labels, tpm_usage, storage_security,
        decommissioning, certificate, networking, settings;
    secret: cluster_unlock_key
});

redacted_debug!(StoredCluster {
    shown: version, cluster_id, configuration, owner_public_key, recovery_recipient,
        owner_replacements;
    secret: first_contact_secret
});

redacted_debug!(StoredAuthority {
    shown: version, certificate;
    secret: private_key
});

redacted_debug!(StoredMesh {
    shown: version, pod_range;
    secret: private_key
});

redacted_debug!(StoredControllerKey {
    shown: version;
    secret: private_key
});

redacted_debug!(StoredKubernetesAuthorities {
    shown: version, kubernetes, front_proxy;
    secret: service_account_key
});

redacted_debug!(Registering {
    shown: directory, labels;
    secret: register_ticket
});

redacted_debug!(StoredTicket {
    shown: version;
    secret: ticket
});

redacted_debug!(GetRegisterTicketResponse {
    shown: ;
    secret: register_ticket
});

redacted_debug!(RegisterNodeRequest {
    shown: join_key, join_key_proof, tpm_is_present, labels, proof;
    secret: register_ticket
});

redacted_debug!(CommitNodeRequest {
    shown: storage_security;
    secret: cluster_unlock_key
});

redacted_debug!(Admitted {
    shown: directory, cold_start_policy, recovery_recipient, owner_public_key, owner_replacements;
    secret: cluster_unlock_key
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{NodeParameters, node_parameters};

    /// Asserts that the output contains the secret in none of the forms that `Debug` has for bytes.
    fn assert_no_secret(printed: &str) {
        for form in ["165, 165", "a5a5", "\\xa5"] {
            assert!(!printed.contains(form), "{printed}");
        }
        assert!(printed.contains("redacted"), "{printed}");
    }

    #[test]
    fn no_secret_prints() {
        let secret = || vec![0xa5; 32];
        let founding = Founding {
            first_contact_secret: secret(),
            ..Founding::default()
        };
        let sealed = SealedConfiguration {
            node_unlock_key: secret(),
            join_key: secret(),
            node_key: secret(),
            cluster_unlock_key: secret(),
            founding: Some(founding.clone()),
            ..SealedConfiguration::default()
        };
        let bootstrap = ClusterBootstrap {
            first_contact_secret: secret(),
            ..ClusterBootstrap::default()
        };
        let register = ClusterRegister {
            register_ticket: secret(),
            ..ClusterRegister::default()
        };
        let parameters = |cluster| NodeParameters {
            cluster: Some(cluster),
            ..NodeParameters::default()
        };
        let node = StoredNode {
            cluster_unlock_key: secret(),
            ..StoredNode::default()
        };
        let cluster = StoredCluster {
            first_contact_secret: secret(),
            ..StoredCluster::default()
        };
        let authority = StoredAuthority {
            private_key: secret(),
            ..StoredAuthority::default()
        };
        let kubernetes = StoredKubernetesAuthorities {
            service_account_key: secret(),
            kubernetes: Some(authority.clone()),
            ..StoredKubernetesAuthorities::default()
        };
        for printed in [
            format!("{kubernetes:?}"),
            format!("{founding:?}"),
            format!("{sealed:?}"),
            format!("{sealed:#?}"),
            format!(
                "{:?}",
                parameters(node_parameters::Cluster::ClusterBootstrap(bootstrap))
            ),
            format!(
                "{:?}",
                parameters(node_parameters::Cluster::ClusterRegister(register))
            ),
            format!("{node:?}"),
            format!("{cluster:?}"),
            format!("{authority:?}"),
        ] {
            assert_no_secret(&printed);
        }
        assert!(format!("{:?}", StoredNode::default()).contains("absent"));
    }
}
