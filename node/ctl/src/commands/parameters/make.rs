//! Makes parameters of a file and flags.
//!
//! The file comes first, then each flag sets its field, whatever the file says: a list gets exactly
//! the values of the flags. Labels and settings are set one by one, so those that no flag names stay.
//! Values are not checked here, except where they could not be put into the message: the decoder
//! does, and names the field.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use hearth_api::client::within;
use hearth_api::owner::{KEY_FILE, RECOVERY_KEY_FILE, SECRET_FILE};
use hearth_api::settings::{SETTINGS, SettingError};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::node_parameters::Cluster;
use hearth_api::v1::{
    ClusterBootstrap, ClusterConfiguration, ClusterRegister, GetRegisterTicketRequest, Install,
    Label, NetworkConfig, NodeParameters, NodeRoles, Wipe, network_config, node_roles,
};
use serde_json::{Deserializer, Value as Json};

use super::super::cluster_info;
use super::failed;
use crate::args::{
    self, Assignment, Bootstrap, Global, Machine, NetworkFlags, Register, RoleName, Source,
};
use crate::failure::{Failure, Kind};
use crate::{connection, files, keys, parameters};

const MAKE: &str = "make the parameters";
/// Far more than the text form of the largest parameters has.
const LARGEST_TEXT: usize = 4 << 20;

/// The message of `parameters bootstrap`.
pub(super) fn bootstrap(wanted: &Bootstrap) -> Result<NodeParameters, Failure> {
    let mut message = begin(&wanted.source)?;
    let mut bootstrap = match message.cluster.take() {
        None => ClusterBootstrap::default(),
        Some(Cluster::ClusterBootstrap(bootstrap)) => bootstrap,
        Some(Cluster::ClusterRegister(_)) => {
            return Err(other_kind(&wanted.source, "cluster_bootstrap"));
        }
    };
    set_owner(&mut bootstrap, wanted)?;
    if wanted.accept_loss {
        bootstrap.accept_loss = true;
    }
    if !wanted.settings.is_empty() {
        let configuration = bootstrap.initial_cluster_configuration.take();
        let configuration = assigned(configuration.unwrap_or_default(), &wanted.settings);
        bootstrap.initial_cluster_configuration = Some(configuration.map_err(invalid)?);
    }
    if let Some(configuration) = &mut bootstrap.initial_cluster_configuration {
        has_its_secrets(configuration).map_err(invalid)?;
    }
    if !wanted.roles.is_empty() {
        bootstrap.initial_roles = Some(roles(&wanted.roles));
    }
    if !wanted.manifests.is_empty() {
        bootstrap.manifests = manifests(&wanted.manifests)?;
    }
    label(&mut bootstrap.labels, &wanted.machine.labels);
    message.cluster = Some(Cluster::ClusterBootstrap(bootstrap));
    configure(&mut message, &wanted.machine);
    Ok(message)
}

/// The message of `parameters register`.
pub(super) async fn register(
    global: &Global,
    wanted: &Register,
) -> Result<NodeParameters, Failure> {
    let mut message = begin(&wanted.source)?;
    let mut register = match message.cluster.take() {
        None => ClusterRegister::default(),
        Some(Cluster::ClusterRegister(register)) => register,
        Some(Cluster::ClusterBootstrap(_)) => {
            return Err(other_kind(&wanted.source, "cluster_register"));
        }
    };
    ask(global, &mut register).await?;
    label(&mut register.labels, &wanted.machine.labels);
    message.cluster = Some(Cluster::ClusterRegister(register));
    configure(&mut message, &wanted.machine);
    Ok(message)
}

/// The message in the file, or an empty one.
fn begin(source: &Source) -> Result<NodeParameters, Failure> {
    match &source.from {
        Some(path) => read_text(path),
        None => Ok(NodeParameters::default()),
    }
}

/// The message that somebody has written as text in this file.
pub(in crate::commands) fn read_text(path: &Path) -> Result<NodeParameters, Failure> {
    let text = String::from_utf8(written(path)?).map_err(|_| {
        failed("read", path)
            .because("it is not text")
            .advise("`hearthctl parameters show --show-secrets FILE` makes text of parameters")
    })?;
    parameters::read(&text).map_err(|error| failed("read", path).because(error))
}

/// The content of a file that somebody has written.
fn written(path: &Path) -> Result<Vec<u8>, Failure> {
    let content = files::read(path, LARGEST_TEXT)?;
    match content.len() > LARGEST_TEXT {
        true => Err(failed("read", path).because(format!("expected at most {LARGEST_TEXT} bytes"))),
        false => Ok(content),
    }
}

fn other_kind(source: &Source, expected: &str) -> Failure {
    let path = source.from.as_deref().unwrap_or(Path::new(""));
    failed("use", path).because(format!(
        "expected {expected}, got the other kind of parameters"
    ))
}

/// Owner key, first-contact secret and recovery key.
fn set_owner(message: &mut ClusterBootstrap, wanted: &Bootstrap) -> Result<(), Failure> {
    let of_owner = |name| wanted.owner.as_ref().map(|folder| folder.join(name));
    if let Some(key) = wanted.owner_public_key {
        message.owner_public_key = key.to_vec();
    } else if let Some(path) = wanted.owner_key.clone().or_else(|| of_owner(KEY_FILE)) {
        message.owner_public_key = keys::owner_key(&path)?.public().as_bytes().to_vec();
    }
    let secret = wanted.first_contact_secret.clone();
    if let Some(path) = secret.or_else(|| of_owner(SECRET_FILE)) {
        message.first_contact_secret = keys::first_contact_secret(&path)?.expose().to_vec();
    }
    let recovery_key = wanted.recovery_key.clone();
    if let Some(recipient) = wanted.recovery_recipient {
        message.recovery_recipient = recipient.to_vec();
    } else if let Some(path) = recovery_key.or_else(|| of_owner(RECOVERY_KEY_FILE)) {
        let recipient = keys::recovery_key(&path)?.recipient();
        message.recovery_recipient = recipient.as_bytes().to_vec();
    }
    Ok(())
}

fn assigned(
    mut configuration: ClusterConfiguration,
    assignments: &[Assignment],
) -> Result<ClusterConfiguration, SettingError> {
    for (index, Assignment { setting, text }) in assignments.iter().enumerate() {
        let mut former = assignments[..index].iter();
        if former.any(|other| other.setting.path == setting.path) {
            return Err(SettingError {
                field: setting.path.to_owned(),
                expected: "one value".to_owned(),
                found: "several".to_owned(),
            });
        }
        setting.assign(&mut configuration, text)?;
    }
    Ok(configuration)
}

/// Refuses words in the place of secrets, as `parameters show` prints them.
fn has_its_secrets(configuration: &mut ClusterConfiguration) -> Result<(), SettingError> {
    let nothing = ClusterConfiguration::default();
    if configuration.kubernetes.is_none() {
        return Ok(());
    }
    SETTINGS
        .iter()
        .try_for_each(|setting| setting.complete_secrets(configuration, &nothing))
}

fn invalid(error: SettingError) -> Failure {
    Failure::invalid(MAKE, error)
}

fn roles(names: &[RoleName]) -> NodeRoles {
    let has = |name| names.contains(&name);
    NodeRoles {
        consensus_member: has(RoleName::ConsensusMember).then(node_roles::ConsensusMember::default),
        kubernetes_controller: has(RoleName::KubernetesController)
            .then_some(node_roles::KubernetesController {}),
        kubernetes_worker: has(RoleName::KubernetesWorker)
            .then_some(node_roles::KubernetesWorker {}),
    }
}

/// The objects in these files, in their order. A `List`, as kubectl prints it, is taken apart.
fn manifests(paths: &[PathBuf]) -> Result<Vec<String>, Failure> {
    let mut objects = Vec::new();
    for path in paths {
        let content = written(path)?;
        for object in Deserializer::from_slice(&content).into_iter::<Json>() {
            let object = object.map_err(|error| {
                failed("read", path)
                    .because(format!("expected Kubernetes objects in JSON: {error}"))
                    .advise(format!(
                        "kubectl makes JSON of YAML: kubectl label --local -f {} -o json \
                         hearth.dev/none-",
                        files::read_from(path)
                    ))
            })?;
            match (object["kind"].as_str(), object["items"].as_array()) {
                (Some("List"), Some(items)) => objects.extend(items.iter().map(Json::to_string)),
                _ => objects.push(object.to_string()),
            }
        }
    }
    Ok(objects)
}

/// Sets labels in the order of the flags; those of the file stay in their places.
fn label(labels: &mut Vec<Label>, wanted: &[(String, String)]) {
    for (key, value) in wanted {
        match labels.iter_mut().find(|label| label.key == *key) {
            Some(label) => label.value.clone_from(value),
            None => labels.push(Label {
                key: key.clone(),
                value: value.clone(),
            }),
        }
    }
}

/// What is the same for all machines, but for labels.
fn configure(message: &mut NodeParameters, wanted: &Machine) {
    let given = message.network_config.take();
    let network = network(given.clone().unwrap_or_default(), &wanted.network);
    if given.is_some() || network != NetworkConfig::default() {
        message.network_config = Some(network);
    }
    if !wanted.time_servers.is_empty() {
        message.time_servers.clone_from(&wanted.time_servers);
    }
    if let Some(id) = wanted.wipe {
        message.wipe = Some(Wipe {
            enrolment_id: id.as_bytes().to_vec(),
        });
    }
    set_install(message, &wanted.install);
}

/// The configuration with the fields that the flags set.
pub(in crate::commands) fn network(
    mut network: NetworkConfig,
    wanted: &NetworkFlags,
) -> NetworkConfig {
    if !wanted.addresses.is_empty() {
        network.addresses.clone_from(&wanted.addresses);
    }
    if !wanted.gateways.is_empty() || !wanted.routes.is_empty() {
        let gateways = wanted.gateways.iter().map(|gateway| default_route(gateway));
        let routes = wanted.routes.iter().map(|route| further_route(route));
        network.routes = gateways.chain(routes).collect();
    }
    if !wanted.nameservers.is_empty() {
        network.nameservers.clone_from(&wanted.nameservers);
    }
    if let Some(mac) = &wanted.mac {
        network.mac.clone_from(mac);
    }
    if let Some(vlan) = wanted.vlan {
        network.vlan = vlan;
    }
    network
}

/// The disk of an installation. Any of its flags means that nobody is to be asked.
fn set_install(message: &mut NodeParameters, wanted: &args::Install) {
    let given = message.install.clone();
    let mut install = given.clone().unwrap_or_default();
    for (field, flag) in [
        (&mut install.serial, &wanted.install_serial),
        (&mut install.wwn, &wanted.install_wwn),
        (&mut install.device, &wanted.install_device),
        (&mut install.overwrite, &wanted.install_overwrite),
    ] {
        if let Some(value) = flag {
            field.clone_from(value);
        }
    }
    if let Some(bytes) = wanted.install_min_size {
        install.min_size_bytes = bytes;
    }
    if let Some(bytes) = wanted.install_max_size {
        install.max_size_bytes = bytes;
    }
    if wanted.install || given.is_some() || install != Install::default() {
        message.install = Some(install);
    }
}

/// Of what is no address, the decoder says so.
fn default_route(gateway: &str) -> network_config::Route {
    let is_v6 = gateway
        .parse::<IpAddr>()
        .is_ok_and(|address| address.is_ipv6());
    network_config::Route {
        destination: if is_v6 { "::/0" } else { "0.0.0.0/0" }.to_owned(),
        gateway: gateway.to_owned(),
    }
}

fn further_route(text: &str) -> network_config::Route {
    let (destination, gateway) = text.split_once('=').unwrap_or((text, ""));
    network_config::Route {
        destination: destination.to_owned(),
        gateway: gateway.to_owned(),
    }
}

/// Asks the cluster for what is missing; nothing, if nothing is.
async fn ask(global: &Global, register: &mut ClusterRegister) -> Result<(), Failure> {
    let has_directory = register.cluster_directory.is_some();
    let is_known = has_directory && !register.ca_certificate.is_empty();
    if is_known && !register.register_ticket.is_empty() {
        return Ok(());
    }
    let mut management = ManagementClient::new(connection::open(global).await?);
    if register.register_ticket.is_empty() {
        let request = GetRegisterTicketRequest { rotate: false };
        let answer = within(global.timeout, management.get_register_ticket(request)).await;
        let answer = answer.map_err(|status| Failure::call("get the register ticket", status))?;
        register.register_ticket = answer.into_inner().register_ticket;
    }
    if is_known {
        return Ok(());
    }
    let info = cluster_info(global, &mut management, MAKE).await?;
    if !has_directory {
        let known = info.directory.filter(|known| !known.nodes.is_empty());
        let silent = || {
            Failure::new(Kind::Unreachable, MAKE)
                .because("no curator has reported its address yet")
                .advise("repeat the command in a few seconds")
        };
        register.cluster_directory = Some(known.ok_or_else(silent)?);
    }
    if register.ca_certificate.is_empty() {
        register.ca_certificate = info.ca_certificate;
    }
    Ok(())
}
