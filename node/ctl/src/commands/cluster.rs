//! `hearthctl cluster`: ownership, cluster information, register ticket, settings.

mod document;
mod edit;
mod settings;
mod unlock;

use std::path::Path;

use hearth_api::client::within;
use hearth_api::escrow::EscrowError;
use hearth_api::first_contact::FirstContactError;
use hearth_api::v1::GetRegisterTicketRequest;
use hearth_api::v1::management_client::ManagementClient;
use hearth_operator::unlock::Scope;
use hearth_operator::{Operator, OwnershipError};

use super::{INFO, cluster_info, print, print_json};
use crate::args::{Cluster, Format, Global};
use crate::context::{self, Contexts, KeyFile};
use crate::failure::{Failure, Kind};
use crate::{connection, keys, output};

pub(super) async fn run(global: &Global, command: Cluster) -> Result<(), Failure> {
    match command {
        Cluster::TakeOwnership {
            owner_key,
            first_contact_secret,
            name,
        } => take_ownership(global, &owner_key, &first_contact_secret, name).await,
        Cluster::Unlock {
            owner_key,
            recovery_key,
            all,
            wait,
            output,
        } => {
            let request = unlock::Request {
                owner_key: &owner_key,
                recovery_key: &recovery_key,
                scope: match all {
                    true => Scope::All,
                    false => Scope::Quorum,
                },
                wait,
                form: output.form,
            };
            unlock::run(global, request).await
        }
        Cluster::Info { output } => info(global, output.form).await,
        Cluster::Ticket { rotate, output } => ticket(global, rotate, output.form).await,
        Cluster::Get { settings, output } => settings::get(global, &settings, output.form).await,
        Cluster::Set {
            assignments,
            at_version,
            output,
        } => settings::set(global, &assignments, at_version, output.form).await,
        Cluster::Edit { output } => edit::edit(global, output.form).await,
        Cluster::Configure(command) => settings::configure(global, command).await,
    }
}

async fn ticket(global: &Global, rotate: bool, form: Format) -> Result<(), Failure> {
    let mut management = ManagementClient::new(connection::open(global).await?);
    let request = GetRegisterTicketRequest { rotate };
    let answer = within(global.timeout, management.get_register_ticket(request))
        .await
        .map_err(|status| Failure::call("get the register ticket", status))?;
    let ticket = hex::encode(&answer.get_ref().register_ticket);
    match form {
        Format::Table => print(&format!("{ticket}\n")),
        Format::Json => print_json(&output::Ticket {
            register_ticket: ticket,
        }),
    }
}

async fn info(global: &Global, form: Format) -> Result<(), Failure> {
    let mut management = ManagementClient::new(connection::open(global).await?);
    let info = cluster_info(global, &mut management, INFO).await?;
    let cluster = output::Cluster::from(&info);
    match form {
        Format::Table => print(&cluster.text()),
        Format::Json => print_json(&cluster),
    }
}

/// Makes first contact, exchanges the owner key for a certificate and saves the context. Each step
/// can be repeated; the context is written last.
async fn take_ownership(
    global: &Global,
    key_file: &Path,
    secret_file: &Path,
    name: Option<String>,
) -> Result<(), Failure> {
    // Check everything on this machine before the first call.
    let endpoints = connection::given_endpoints(global)?;
    let file = KeyFile::new(key_file)?;
    let key = keys::owner_key(key_file)?;
    let secret = keys::first_contact_secret(secret_file)?;
    name.as_deref().map(context::valid_name).transpose()?;
    Contexts::load(global.config.clone())?;

    let options = connection::options(global);
    let owned = Operator::take_ownership(&key, &secret, endpoints.to_vec(), options).await;
    let (operator, leaf) = owned.map_err(not_owned)?;
    let cluster = leaf.identity.cluster;
    let name = name.unwrap_or_else(|| context::default_name(cluster));
    let credentials = operator.credentials();
    // The context works without, and learns them later.
    let nodes = operator.nodes().await.unwrap_or_default();
    Contexts::change(global.config.clone(), |contexts| {
        contexts.add(&name, endpoints, credentials, &leaf, &file)?;
        contexts.learn(&name, &nodes);
        Ok(())
    })?;
    print(&format!(
        "logged in as {} of cluster {cluster}; current context is now {name}\n",
        leaf.identity.subject
    ))
}

/// A login that failed.
pub(super) fn not_owned(error: OwnershipError) -> Failure {
    match error {
        OwnershipError::NoCurator => {
            Failure::new(Kind::Local, "connect to the cluster").because(error)
        }
        OwnershipError::FirstContact(error) => not_met(error),
        OwnershipError::Escrow(error) => not_issued(error),
        OwnershipError::Tls(error) => Failure::new(Kind::Local, "set up TLS").because(error),
    }
}

fn not_met(error: FirstContactError) -> Failure {
    let what = "make first contact with the cluster";
    match error {
        FirstContactError::Ask { endpoint, source } => {
            Failure::call(format!("{what} at {endpoint}"), *source)
        }
        error @ FirstContactError::Connect { .. } => Failure::new(Kind::Unreachable, what)
            .because(error)
            .advise("check that the cluster is running and that the address is right"),
        error => Failure::new(Kind::Refused, what).because(error),
    }
}

fn not_issued(error: EscrowError) -> Failure {
    let step = error.to_string();
    match error {
        EscrowError::Tls(error) => Failure::new(Kind::Local, step).because(error),
        EscrowError::Call(status) => Failure::call(step, *status),
        EscrowError::Certificate(error) => Failure::new(Kind::Refused, step).because(error),
    }
}
