//! `hearthctl owner replace`: gives a cluster another owner key and another recovery key.
//!
//! The new keys are files before the cluster hears of them, and each step finds out whether it was
//! done before: an attempt that was interrupted is continued by the same command.

use std::path::Path;
use std::time::Duration;

use hearth_api::certificates::Leaf;
use hearth_api::client::Endpoint;
use hearth_api::escrow::EscrowError;
use hearth_api::identity::{ClusterId, FirstContactSecret, OwnerKey};
use hearth_api::owner::{KEY_FILE, NewKeys, RECOVERY_KEY_FILE};
use hearth_api::ownership::Replacement;
use hearth_api::v1::{Node, NodeState};
use hearth_operator::{Operator, OwnershipError};
use tonic::Code;

use super::super::cluster::not_owned;
use super::super::{or_interrupted, passing, print, print_json, tell};
use super::failed;
use crate::args::{Format, Global};
use crate::context::{self, Contexts, KeyFile};
use crate::failure::{Failure, Kind};
use crate::{connection, keys, output};

/// Polling interval while nodes record the new keys.
const LOOK: Duration = Duration::from_secs(1);

/// The flags of the command.
pub(super) struct Request<'a> {
    pub folder: &'a Path,
    pub owner_key: &'a Path,
    pub first_contact_secret: &'a Path,
    pub wait: Duration,
    pub form: Format,
}

/// What this machine knows of the cluster.
struct Known<'a> {
    global: &'a Global,
    endpoints: Vec<Endpoint>,
    secret: FirstContactSecret,
}

pub(super) async fn run(global: &Global, request: Request<'_>) -> Result<(), Failure> {
    // Check everything on this machine before the first call.
    let former = keys::owner_key(request.owner_key)?;
    let secret = keys::first_contact_secret(request.first_contact_secret)?;
    let contexts = Contexts::load(global.config.clone())?;
    let known = Known {
        global,
        endpoints: endpoints(global, &contexts)?,
        secret,
    };
    let new = NewKeys::create_or_read(request.folder).map_err(failed("create the new keys"))?;
    if new.key.public() == former.public() {
        return Err(present(request.folder, KEY_FILE, "owner key"));
    }

    let (operator, leaf) = match known.log_in(&new.key).await {
        // An earlier attempt has replaced the owner.
        Ok(logged_in) => logged_in,
        Err(error) if is_refused(&error) => {
            known.replace(&former, &new, request.folder).await?;
            known.log_in(&new.key).await.map_err(not_owned)?
        }
        Err(error) => return Err(not_owned(error)),
    };
    let cluster = leaf.identity.cluster;
    let name = name(global, &contexts, cluster);
    let key_file = KeyFile::new(&request.folder.join(KEY_FILE))?;
    Contexts::change(global.config.clone(), |contexts| {
        let credentials = operator.credentials();
        contexts.add(&name, &known.endpoints, credentials, &leaf, &key_file)
    })?;
    eprintln!("hearthctl: logged in with the new owner key; context {name}");

    let (nodes, waited) = wait(&operator, &new, request.wait).await;
    let replaced = output::Replaced::new(cluster, &new, &nodes);
    match request.form {
        Format::Table => print(&replaced.text())?,
        Format::Json => print_json(&replaced)?,
    }
    waited
}

/// Those on the command line, or those of the context.
fn endpoints(global: &Global, contexts: &Contexts) -> Result<Vec<Endpoint>, Failure> {
    match &global.endpoints[..] {
        [] => {
            let selected = contexts.get(global.context.as_deref());
            let (_, context) = selected.map_err(|failure| {
                failure.also_advise("name a node of the cluster: --endpoint HOST[:PORT]")
            })?;
            context.endpoints()
        }
        given => Ok(given.to_vec()),
    }
}

/// The selected context, if it is of this cluster.
fn name(global: &Global, contexts: &Contexts, cluster: ClusterId) -> String {
    match contexts.get(global.context.as_deref()) {
        Ok((name, context)) if context.cluster_id == cluster.to_string() => name.to_owned(),
        _ => context::default_name(cluster),
    }
}

impl Known<'_> {
    async fn log_in(&self, key: &OwnerKey) -> Result<(Operator, Leaf), OwnershipError> {
        let (endpoints, options) = (self.endpoints.clone(), connection::options(self.global));
        Operator::take_ownership(key, &self.secret, endpoints, options).await
    }

    /// Has the former owner name the new one.
    async fn replace(
        &self,
        former: &OwnerKey,
        new: &NewKeys,
        folder: &Path,
    ) -> Result<(), Failure> {
        let what = "replace the owner";
        let call = |status| Failure::call(what, status);
        let (operator, leaf) = self.log_in(former).await.map_err(not_owned)?;
        let cluster = leaf.identity.cluster;
        let recipient = new.recovery.recipient();
        let info = operator.info().await.map_err(call)?;
        if info.recovery_recipient == recipient.as_bytes() {
            return Err(present(folder, RECOVERY_KEY_FILE, "recovery key"));
        }
        let replacement = Replacement::sign(cluster, former, &new.key, recipient);
        operator.replace_owner(replacement).await.map_err(call)
    }
}

/// Whether the cluster has another owner.
fn is_refused(error: &OwnershipError) -> bool {
    matches!(
        error,
        OwnershipError::Escrow(EscrowError::Call(status)) if status.code() == Code::PermissionDenied
    )
}

fn present(folder: &Path, file: &str, key: &str) -> Failure {
    Failure::new(Kind::Local, "create the new keys")
        .because(format!(
            "{} is the present {key} of the cluster",
            folder.join(file).display()
        ))
        .advise("name another directory")
}

/// Waits until all nodes have recorded the new keys. Returns the nodes, and whether they have.
async fn wait(
    operator: &Operator,
    new: &NewKeys,
    bound: Duration,
) -> (Vec<Node>, Result<(), Failure>) {
    let what = "wait until all nodes have recorded the new keys";
    let keep = "keep the former keys: nodes that have not recorded the new ones open with the \
                former ones only; repeat the command to wait again";
    let mut nodes = Vec::new();
    let work = or_interrupted(what, keep, follow(operator, new, &mut nodes));
    let waited = tokio::time::timeout(bound, work).await;
    let waited = match waited {
        Ok(waited) => waited,
        Err(_) if bound.is_zero() => Ok(()),
        Err(_) => Err(Failure::new(Kind::Unreachable, what)
            .because(format!("they have not within {bound:?}"))
            .advise(keep)),
    };
    (nodes, waited)
}

async fn follow(operator: &Operator, new: &NewKeys, nodes: &mut Vec<Node>) -> Result<(), Failure> {
    let mut looks = tokio::time::interval(LOOK);
    let mut told = String::new();
    loop {
        looks.tick().await;
        match operator.nodes().await {
            Ok(all) => {
                *nodes = all;
                nodes.retain(|node| node.state() == NodeState::Up);
                let missing = nodes.iter().filter(|node| !output::follows(node, new));
                match missing.count() {
                    0 => return Ok(()),
                    count => {
                        let all = nodes.len();
                        let progress =
                            format!("waiting for {count} of {all} nodes to record the new keys");
                        tell(&mut told, progress);
                    }
                }
            }
            Err(status) if passing(&status) => {
                let progress = format!("no answer: {}", output::safe(status.message()));
                tell(&mut told, progress);
            }
            Err(status) => return Err(Failure::call("list the nodes", status)),
        }
    }
}
