//! What a machine would do with its parameters, as it is printed.

mod install;
mod network;

use std::collections::BTreeMap;

use hearth_api::names::PORT_CURATOR;
use hearth_api::v1::{self, ColdStartPolicy, StorageSecurity, TpmUsage};
use hearth_parameters::{Bootstrap, Cluster, Parameters, Register, cold_start_policy, tpm_usage};
use serde::Serialize;

use install::Install;
use network::Network;

use super::settings::Configuration;
use super::{Member, member, roles, word};
use crate::table::printable;

/// Output of `parameters check`.
#[derive(Debug, Serialize)]
pub(crate) struct CheckedParameters {
    /// Null if the machine registers.
    bootstrap: Option<CheckedBootstrap>,
    /// Null if the machine founds a cluster.
    register: Option<CheckedRegister>,
    network: Network,
    time_servers: Vec<String>,
    /// The enrolment that is destroyed: 32 hexadecimal digits. Null for none.
    wipe: Option<String>,
    /// The disk of an installation. Null: it asks.
    install: Option<Install>,
}

#[derive(Debug, Serialize)]
struct CheckedBootstrap {
    owner_public_key: String,
    /// Null if there is none.
    recovery_recipient: Option<String>,
    accept_loss: bool,
    storage_security: String,
    with_tpm: Founding,
    without_tpm: Founding,
    /// Null if it depends on the image: consensus member, and the Kubernetes roles that it can run.
    roles: Option<Vec<&'static str>>,
    labels: BTreeMap<String, String>,
    /// The number of Kubernetes objects.
    manifests: usize,
    configuration: Configuration,
}

/// The part of founding that depends on whether the machine has a TPM that can seal its keys.
#[derive(Debug, Serialize)]
struct Founding {
    /// Null if the machine refuses to found the cluster.
    tpm_usage: Option<String>,
    /// Null if the machine refuses to found the cluster.
    cold_start_policy: Option<String>,
    /// Null if it does not.
    refusal: Option<String>,
}

#[derive(Debug, Serialize)]
struct CheckedRegister {
    curators: Vec<Member>,
    labels: BTreeMap<String, String>,
}

impl From<&Parameters> for CheckedParameters {
    fn from(parameters: &Parameters) -> Self {
        let (bootstrap, register) = match &parameters.cluster {
            Cluster::Bootstrap(bootstrap) => (Some(bootstrap.as_ref().into()), None),
            Cluster::Register(register) => (None, Some(register.into())),
        };
        let servers = parameters.time_servers.iter();
        Self {
            bootstrap,
            register,
            network: Network::from(&parameters.network),
            time_servers: servers.map(ToString::to_string).collect(),
            wipe: parameters.wipe.map(|id| id.to_string()),
            install: parameters.install.as_ref().map(Install::from),
        }
    }
}

impl From<&Bootstrap> for CheckedBootstrap {
    fn from(bootstrap: &Bootstrap) -> Self {
        let seed = &bootstrap.seed;
        Self {
            owner_public_key: seed.owner.to_string(),
            recovery_recipient: seed.recovery_recipient.map(|key| key.to_string()),
            accept_loss: bootstrap.accept_loss,
            storage_security: storage_word(bootstrap.storage_security),
            with_tpm: Founding::new(bootstrap, true),
            without_tpm: Founding::new(bootstrap, false),
            roles: bootstrap.roles.as_ref().map(|held| roles(Some(held))),
            labels: labels(&seed.labels),
            manifests: seed.manifests.len(),
            configuration: Configuration::from(&hearth_api::settings::without_secrets(
                seed.configuration.clone(),
            )),
        }
    }
}

impl Founding {
    /// What the first node decides by the same functions.
    fn new(bootstrap: &Bootstrap, has_tpm: bool) -> Self {
        let configuration = &bootstrap.seed.configuration;
        let Some(usage) = tpm_usage(configuration.tpm_mode(), has_tpm) else {
            return Self::refused("the TPM mode is REQUIRED".to_owned());
        };
        let policy = cold_start_policy(
            configuration.cold_start_policy(),
            bootstrap.storage_security,
            usage,
            bootstrap.seed.recovery_recipient.is_some(),
            bootstrap.accept_loss,
        );
        match policy {
            Ok(policy) => Self {
                tpm_usage: Some(word(usage.into(), TpmUsage::as_str_name, "TPM_USAGE_")),
                cold_start_policy: Some(word(
                    policy.into(),
                    ColdStartPolicy::as_str_name,
                    "COLD_START_POLICY_",
                )),
                refusal: None,
            },
            Err(error) => Self::refused(error.to_string()),
        }
    }

    fn refused(why: String) -> Self {
        Self {
            tpm_usage: None,
            cold_start_policy: None,
            refusal: Some(why),
        }
    }

    fn text(&self) -> String {
        let policy = self.cold_start_policy.iter();
        let policy = policy.map(|policy| format!("founds it, with cold-start policy {policy}"));
        let refusal = self.refusal.iter();
        let refusal = refusal.map(|why| format!("refuses to found it: {why}"));
        policy.chain(refusal).collect()
    }
}

impl From<&Register> for CheckedRegister {
    fn from(register: &Register) -> Self {
        Self {
            curators: register.directory.nodes.iter().map(curator).collect(),
            labels: labels(&register.labels),
        }
    }
}

/// With the ports to which the machine connects.
fn curator(node: &v1::cluster_directory::Node) -> Member {
    let mut node = node.clone();
    for address in &mut node.addresses {
        if address.port == 0 {
            address.port = PORT_CURATOR.into();
        }
    }
    member(&node)
}

fn labels(labels: &[v1::Label]) -> BTreeMap<String, String> {
    let labels = labels.iter();
    labels
        .map(|label| (label.key.clone(), label.value.clone()))
        .collect()
}

fn storage_word(security: StorageSecurity) -> String {
    word(
        security.into(),
        StorageSecurity::as_str_name,
        "STORAGE_SECURITY_",
    )
}

fn joined(labels: &BTreeMap<String, String>) -> String {
    let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
    labels.collect::<Vec<_>>().join(",")
}

impl CheckedParameters {
    /// As text for people.
    pub(crate) fn text(&self) -> String {
        let mut rows = Vec::new();
        if let Some(bootstrap) = &self.bootstrap {
            rows.extend(bootstrap.rows());
        }
        if let Some(register) = &self.register {
            rows.extend(register.rows());
        }
        rows.extend(self.network.rows());
        rows.push(("time servers", self.time_servers.join(",")));
        if let Some(id) = &self.wipe {
            rows.push(("destroys", format!("enrolment {id}")));
        }
        if let Some(install) = &self.install {
            rows.push(("installs on", install.text()));
        }
        let line = |(name, value): (&str, String)| match &value[..] {
            "" => format!("{name:18}  -\n"),
            value => format!("{name:18}  {}\n", printable(value)),
        };
        rows.into_iter().map(line).collect()
    }
}

impl CheckedBootstrap {
    fn rows(&self) -> Vec<(&'static str, String)> {
        let domain = self.configuration.text_of("cluster_domain");
        let roles = match &self.roles {
            Some(roles) => roles.join(","),
            None => "consensus-member, and the Kubernetes roles that the image can run".to_owned(),
        };
        vec![
            ("cluster", format!("founds a new one, {domain}")),
            ("owner public key", self.owner_public_key.clone()),
            (
                "recovery recipient",
                self.recovery_recipient.clone().unwrap_or_default(),
            ),
            ("storage security", self.storage_security.clone()),
            ("with a TPM", self.with_tpm.text()),
            ("without a TPM", self.without_tpm.text()),
            ("roles", roles),
            ("labels", joined(&self.labels)),
            ("manifests", self.manifests.to_string()),
        ]
    }
}

impl CheckedRegister {
    fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![("cluster", "registers with an existing one".to_owned())];
        for curator in &self.curators {
            rows.push((
                "curator",
                format!("{} at {}", curator.id, curator.addresses.join(",")),
            ));
        }
        rows.push(("storage security", "as the cluster decides".to_owned()));
        rows.push(("labels", joined(&self.labels)));
        rows
    }
}
