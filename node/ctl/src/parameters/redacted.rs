//! Parameters as text without their secrets.

use hearth_api::registries::HIDDEN;
use hearth_api::settings;
use hearth_api::v1::{NodeParameters, node_parameters};

use super::Notation;
use super::tree::Tree;

/// The secret fields. What `hearth-api` does not print of messages is what belongs here.
const SECRETS: &[&[&str]] = &[
    &["cluster_bootstrap", "first_contact_secret"],
    &["cluster_register", "register_ticket"],
];

/// Writes the text form with a word in the place of each secret. It cannot be read as parameters.
pub(crate) fn redacted(message: &NodeParameters, notation: Notation) -> String {
    let mut message = message.clone();
    if let Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)) = &mut message.cluster
        && let Some(configuration) = &mut bootstrap.initial_cluster_configuration
        && let Some(kubernetes) = &mut configuration.kubernetes
        && !kubernetes.registry_credentials.is_empty()
    {
        // Passwords for registries.
        *configuration = settings::without_secrets(configuration.clone());
    }
    let mut tree = Tree::of(&message);
    for path in SECRETS {
        if let Some(secret) = tree.at_mut(path) {
            *secret = Tree::Text(HIDDEN.to_owned());
        }
    }
    tree.text(notation)
}
