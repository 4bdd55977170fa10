//! This node's roles and settings: from the disk at first, then from the curators.
//!
//! The saved ones come first, because a consensus member must start before there is any curator to
//! ask. Roles from the curators are saved before they are published, so that a node has never
//! started a role that it does not remember after a power cut.
//!
//! If the curators do not know this node, it keeps its roles: they may have been restored from a
//! backup that is older than this node, and a deleted node gets an order of its own. The worker
//! logs a warning and counts a refusal, upon which enrolment asks whether there is such an order.
//!
//! If the file cannot be decoded, this worker fails and publishes nothing: empty roles would stop
//! the control plane.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::node_settings::NodeSettings;
use hearth_api::private::StoredRoles;
use hearth_api::v1::{NodeRoles, NodeSetting, WatchRequest};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use hearth_host::handover::{MemberData, Refusals};
use hearth_host::record::{self, Record as _, RecordError};

use super::heartbeat;
use crate::connection::{self, CuratorConnection, for_each_connection, next_event, refused};

/// Publishes this node's roles.
pub struct Worker {
    /// The saved roles, for a boot without curators.
    pub roles_file: PathBuf,
    /// Timeout of a watch without events, after which another curator is used.
    pub silence: Duration,
    /// Read: this node's identity.
    pub member: Value<MemberData>,
    /// Read: the connection to the curators.
    pub connection: Value<CuratorConnection>,
    /// Written: this node's roles.
    pub local_roles: Writer<NodeRoles>,
    /// Written: this node's settings.
    pub node_settings: Writer<Arc<NodeSettings>>,
    /// Written: incremented when the curators do not know this node.
    pub refusals: Arc<Writer<Refusals>>,
}

/// Publishes the roles from the disk, then those from the curators.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let saved = load(&worker.roles_file)?;
    if let Some(saved) = &saved {
        publish(&worker, saved);
    }
    let saved = Mutex::new(saved);
    ctx.restart_within(Some(connection::MAX_RETRY_DELAY));
    let health = Health::of(&ctx);
    let follow = |connection| follow(&health, &worker, connection, &member, &saved);
    ctx.until_cancelled(for_each_connection(&worker.connection, follow))
        .await
}

/// Follows the curators' record of this node; only returns errors.
async fn follow(
    health: &Health<'_>,
    worker: &Worker,
    connection: CuratorConnection,
    member: &MemberData,
    saved: &Mutex<Option<Assigned>>,
) -> Outcome {
    let own = member.own.node().to_string();
    let request = WatchRequest {
        node_id: own.clone(),
    };
    let events = connection.curator().watch(request).await;
    let mut events = events.map_err(refused)?.into_inner();
    loop {
        let event = next_event(&connection, &mut events, worker.silence).await?;
        health.good();
        if event.tombstones.contains(&own) {
            tracing::warn!("the curators do not know this node ({own}): keeping its roles");
            heartbeat::count(&worker.refusals);
        }
        for node in event.nodes.into_iter().filter(|node| node.id == own) {
            let assigned = Assigned {
                roles: node.roles.unwrap_or_default(),
                settings: node.settings,
            };
            let mut saved = saved.lock().unwrap_or_else(PoisonError::into_inner);
            if saved.as_ref() != Some(&assigned) {
                save(&worker.roles_file, &assigned)?;
                publish(worker, &assigned);
                *saved = Some(assigned);
            }
        }
    }
}

fn publish(worker: &Worker, assigned: &Assigned) {
    let roles = assigned.roles;
    if worker.local_roles.value().get().as_ref() != Some(&roles) {
        tracing::info!(
            consensus_member = roles.consensus_member.is_some(),
            kubernetes_controller = roles.kubernetes_controller.is_some(),
            kubernetes_worker = roles.kubernetes_worker.is_some(),
            "roles changed"
        );
        worker.local_roles.set(roles);
    }
    let settings = NodeSettings::of(&assigned.settings);
    let current = worker.node_settings.value().get();
    if current.as_deref() != Some(&settings) {
        worker.node_settings.set(Arc::new(settings));
    }
}

/// What the cluster has assigned to a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assigned {
    /// Its roles.
    pub roles: NodeRoles,
    /// Its settings, also those that this release does not know.
    pub settings: Vec<NodeSetting>,
}

/// Loads what was assigned last from the disk; `None` if nothing was saved.
pub fn load(path: &Path) -> Result<Option<Assigned>, RecordError> {
    let read = |stored: StoredRoles| {
        Ok::<_, Infallible>(Assigned {
            roles: stored.roles.unwrap_or_default(),
            settings: stored.settings,
        })
    };
    record::load(path, read)
}

/// Saves it durably.
pub fn save(path: &Path, assigned: &Assigned) -> Result<(), RecordError> {
    let stored = StoredRoles {
        version: StoredRoles::VERSION,
        roles: Some(assigned.roles),
        settings: assigned.settings.clone(),
    };
    record::save(path, &stored)
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;
    use hearth_api::v1::node_roles::{ConsensusMember, KubernetesController, KubernetesWorker};

    use super::*;

    fn settings() -> Vec<NodeSetting> {
        vec![NodeSetting {
            name: "of.a.later.release".into(),
            value: "7".into(),
        }]
    }

    #[test]
    fn roles_survive_and_nonsense_is_not_empty() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("roles.pb");
        assert_eq!(load(&path).unwrap(), None);
        let assigned = Assigned {
            roles: NodeRoles {
                consensus_member: Some(ConsensusMember::default()),
                ..NodeRoles::default()
            },
            settings: settings(),
        };
        save(&path, &assigned).unwrap();
        assert_eq!(load(&path).unwrap(), Some(assigned));

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
        let mut assigned = Assigned {
            roles,
            settings: Vec::new(),
        };
        save(&path, &assigned).unwrap();
        let stored = stored_form!("roles.pb", std::fs::read(&path).unwrap());
        std::fs::write(&path, stored).unwrap();
        assert_eq!(load(&path).unwrap(), Some(assigned.clone()));

        assigned.settings = settings();
        save(&path, &assigned).unwrap();
        let stored = stored_form!("roles-settings.pb", std::fs::read(&path).unwrap());
        std::fs::write(&path, stored).unwrap();
        assert_eq!(load(&path).unwrap(), Some(assigned));

        save(&path, &Assigned::default()).unwrap();
        let stored = stored_form!("roles-none.pb", std::fs::read(&path).unwrap());
        std::fs::write(&path, stored).unwrap();
        assert_eq!(load(&path).unwrap(), Some(Assigned::default()));
    }
}
