//! Which roles this node holds: those on disk at once, those of the curators
//! as soon as they can be asked.
//!
//! The persisted roles come first, because a consensus member must start
//! before there is any curator to ask. What the curators say is saved before
//! it is published, so that a power cut cannot leave a node with roles that it
//! does not know of.
//!
//! That the curators know no such node changes nothing here: they may have been
//! restored from a backup that is older than this node, and what a deleted node
//! has to do it is told in an order of its own. So there is a warning, the
//! roles stay, and it counts as a refusal, upon which enrolment asks whether
//! there is such an order.
//!
//! A file that is there and cannot be understood stops this worker, visibly,
//! and publishes nothing: empty roles would stop the control plane.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_api::private::StoredRoles;
use hearth_api::v1::{NodeRoles, WatchRequest};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use hearth_host::handover::{MemberData, Refusals};
use hearth_host::record::{self, Record as _, RecordError};

use super::heartbeat;
use crate::connection::{self, CuratorConnection, next_event, over_each, refused};

/// Finds out what this node's roles are.
pub struct Worker {
    /// Where they are kept for a boot without curators.
    pub roles_file: PathBuf,
    /// A curator that says nothing for so long is left for another one.
    pub silence: Duration,
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub connection: Value<CuratorConnection>,
    /// Will be written.
    pub local_roles: Writer<NodeRoles>,
    /// Will be written: one more when the curators know of no such node.
    pub refusals: Arc<Writer<Refusals>>,
}

/// Publishes the roles from the disk, then as curators tell them.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    if let Some(roles) = load(&worker.roles_file)? {
        publish(&worker.local_roles, roles);
    }
    ctx.restart_within(Some(connection::ASK_AGAIN_WITHIN));
    let health = Health::of(&ctx);
    let follow = |connection| follow(&health, &worker, connection, &member);
    ctx.until_cancelled(over_each(&worker.connection, follow))
        .await
}

/// Follows the curators' record of this node; ends by an error only.
async fn follow(
    health: &Health<'_>,
    worker: &Worker,
    connection: CuratorConnection,
    member: &MemberData,
) -> Outcome {
    let own = member.node_id.to_string();
    let request = WatchRequest {
        node_id: own.clone(),
    };
    let events = connection.curator().watch(request).await;
    let mut events = events.map_err(refused)?.into_inner();
    loop {
        let event = next_event(&connection, &mut events, worker.silence).await?;
        health.good();
        if event.tombstones.contains(&own) {
            tracing::warn!("the curators know of no node {own}: it keeps its roles");
            heartbeat::count(&worker.refusals);
        }
        for node in event.nodes.into_iter().filter(|node| node.id == own) {
            let roles = node.roles.unwrap_or_default();
            if worker.local_roles.value().get().as_ref() != Some(&roles) {
                save(&worker.roles_file, &roles)?;
                publish(&worker.local_roles, roles);
            }
        }
    }
}

fn publish(local_roles: &Writer<NodeRoles>, roles: NodeRoles) {
    if local_roles.value().get().as_ref() != Some(&roles) {
        tracing::info!(
            consensus_member = roles.consensus_member.is_some(),
            kubernetes_controller = roles.kubernetes_controller.is_some(),
            kubernetes_worker = roles.kubernetes_worker.is_some(),
            "roles"
        );
        local_roles.set(roles);
    }
}

/// The roles on disk; `None` if none were ever saved.
pub fn load(path: &Path) -> Result<Option<NodeRoles>, RecordError> {
    let read = |stored: StoredRoles| Ok::<_, Infallible>(stored.roles.unwrap_or_default());
    record::load(path, read)
}

/// Saves them, durably.
pub fn save(path: &Path, roles: &NodeRoles) -> Result<(), RecordError> {
    let stored = StoredRoles {
        version: StoredRoles::VERSION,
        roles: Some(*roles),
    };
    record::save(path, &stored)
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;
    use hearth_api::v1::node_roles::{ConsensusMember, KubernetesController, KubernetesWorker};

    use super::*;

    #[test]
    fn roles_survive_and_nonsense_is_not_empty() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("roles.pb");
        assert_eq!(load(&path).unwrap(), None);
        let roles = NodeRoles {
            consensus_member: Some(ConsensusMember::default()),
            ..NodeRoles::default()
        };
        save(&path, &roles).unwrap();
        assert_eq!(load(&path).unwrap(), Some(roles));

        std::fs::write(&path, b"\xff\xff").unwrap();
        assert!(matches!(load(&path), Err(RecordError::Message { .. })));
        std::fs::write(&path, b"").unwrap();
        assert!(matches!(
            load(&path),
            Err(RecordError::Version { found: 0, .. })
        ));
    }

    #[test]
    fn the_stored_form_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("roles.pb");
        let roles = NodeRoles {
            consensus_member: Some(ConsensusMember {
                member_id: 0x0102_0304_0506_0708,
            }),
            kubernetes_controller: Some(KubernetesController {}),
            kubernetes_worker: Some(KubernetesWorker {}),
        };
        save(&path, &roles).unwrap();
        let stored = stored_form!("roles.pb", std::fs::read(&path).unwrap());
        std::fs::write(&path, stored).unwrap();
        assert_eq!(load(&path).unwrap(), Some(roles));

        save(&path, &NodeRoles::default()).unwrap();
        let stored = stored_form!("roles-none.pb", std::fs::read(&path).unwrap());
        std::fs::write(&path, stored).unwrap();
        assert_eq!(load(&path).unwrap(), Some(NodeRoles::default()));
    }
}
