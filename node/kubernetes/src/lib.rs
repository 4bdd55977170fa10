//! Kubernetes on a node: the roles Kubernetes controller and Kubernetes worker.
//!
//! | part | content |
//! |---|---|
//! | this module | starts and stops the parts of the two roles when the roles are assigned or removed, and reports their conditions |
//! | [`balancer`] | a local TCP load balancer for all API servers |
//! | [`hearth_host::bundle`] | the programs of the extension, and which flags their versions have |
//! | [`calendar`] | renewal times of certificates |
//! | [`program`] | a program of the extension as a supervised child process |
//! | [`kubeconfig`] | kubeconfig files of the programs |
//! | [`store`] | the API server's access to etcd |
//! | [`controller`] | API server, controller-manager, scheduler |
//! | [`virtual_address`] | on controllers: the address that one API server has for all |
//! | [`hearth_kubernetes_api`] | the client of the Kubernetes API |
//! | [`access`] | TLS configuration of our own clients |
//! | [`reconciler`] | on controllers: the objects that Hearth maintains in a cluster |
//! | [`labels`] | synchronization of labels to Kubernetes nodes |
//! | [`settings`] | the cluster's settings for Kubernetes |
//! | [`addresses`] | the addresses by which Kubernetes knows this node, and what a dual-stack cluster lacks of them |
//! | [`services`] | on workers: starts DNS, volumes and the receiver of the network policy |
//! | [`policy`] | the way of network policies to the nodes |
//! | [`hearth_network_policy`] | network policies as rules of the packet filter |
//! | [`hearth_kubernetes_dns`] | on workers: DNS for pods |
//! | [`volumes`] | on workers: local volumes with quotas |
//! | [`registries`] | on workers: where images come from |
//! | [`containerd`] | the container runtime, and the images of the extension |
//! | [`worker`] | the parts of a worker |
//! | [`mesh`] | the encrypted network between the pods of all nodes; a worker of its own |
//! | [`firewall`] | the packet filter of the node; a worker of its own |
//!
//! Each role is a runnable of its own ([`RoleSupervisor`]) with the parts of the role below it. The
//! children of a runnable are fixed once it is healthy, so assigning or removing a role restarts
//! its supervisor; this is possible at any time, also while the parts are starting, and does not
//! affect the other role. Everything below a supervisor has ended before it runs again, and work on
//! the disk that it had started has finished before new work is started there ([`worker`]). What a
//! role leaves on the machine besides its processes is cleaned up by the supervisor at each start
//! without the role; so a node that lost power while it had a role, and has lost the role since, is
//! cleaned up the same way. If the role was assigned again before that, its start begins with the
//! cleanup.
//!
//! The state of an assigned role is reported as a condition of the node ([`RoleCondition`]). A role
//! whose extension is missing in the image is assigned and not met.
//!
//! Invariants: no other part of the node depends on Kubernetes; nothing is started for a role that
//! is not assigned; the conditions have one writer, this worker.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod access;
mod addresses;
pub(crate) mod balancer;
pub mod calendar;
mod containerd;
mod controller;
pub mod firewall;
#[cfg(test)]
mod identities;
pub mod kubeconfig;
pub mod labels;
pub mod mesh;
mod policy;
pub mod program;
pub mod reconciler;
pub mod registries;
mod services;
mod settings;
#[cfg(test)]
mod snapshot;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod toml;
mod virtual_address;
pub mod volumes;
mod worker;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearth_agent::{CuratorConnection, PeerAddresses, View};
use hearth_api::hosts::Host;
use hearth_api::names;
use hearth_api::node_settings::NodeSettings;
use hearth_api::ranges::ClusterRanges;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::v1::{KubernetesConfiguration, NodeCondition, NodeRoles};
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Exit, Failure, Outcome};
use hearth_host::bundle::Bundle;
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::extensions::{Extensions, Missing};
use hearth_host::handover::{MemberData, PodNetwork, PodsPossible};
use hearth_host::layout::Root;
use hearth_network_policy::node::NodePolicy;
use hearth_sys::tree;

use calendar::CertificateClock;
use reconciler::manifests::ManifestsStatus;
use virtual_address::AddressStatus;

/// The user of API server, controller-manager and scheduler. Below 65536, where the users of pods with
/// user namespaces begin.
pub const CONTROL_PLANE_USER: u32 = 64_001;

/// The last part of the name under which the audit log of the API server is in the node's log.
pub const AUDIT_LOG: &str = "audit";

/// The worker that runs the Kubernetes roles of this node. Everything below it shares these inputs
/// and outputs.
pub struct Worker {
    /// Paths of the node.
    pub root: Root,
    /// Receives the log lines of the programs.
    pub log_tree: LogTree,
    /// The clock for the renewal of certificates.
    pub calendar: CertificateClock,
    /// The mounted extensions; one of them contains the programs.
    pub extensions: Arc<Extensions>,
    /// The user of the control-plane programs, [`CONTROL_PLANE_USER`]. `None`: that of this process,
    /// which tests need whose files are in directories of others.
    pub control_plane_user: Option<u32>,
    /// Input. A disowned node stops everything; a SPLIT node keeps running.
    pub cluster_state: ClusterState,
    /// Input: the node's identity. It is set once the data partition is mounted.
    pub member: Value<MemberData>,
    /// Input: the curators, which issue the certificates of workers and have the cluster
    /// configuration for the reconciler.
    pub connection: Value<CuratorConnection>,
    /// Input of controllers: etcd, while it runs on this node.
    pub consensus: Value<Option<hearth_consensus::Handle>>,
    /// Input: the roles of this node.
    pub local_roles: Value<NodeRoles>,
    /// Input: the settings of this node.
    pub node_settings: Value<Arc<NodeSettings>>,
    /// Input: all nodes of the cluster and their roles.
    pub view: Value<Arc<View>>,
    /// Input: the addresses of other nodes.
    pub learned: Value<PeerAddresses>,
    /// Input: the current address of this node.
    pub address: Value<IpAddr>,
    /// Input: its address of the other family, if it has one.
    pub second_address: Value<Option<IpAddr>>,
    /// Input of workers: the pod network of this node.
    pub pod_network: Value<Option<PodNetwork>>,
    /// Serializes changes of this machine for pods.
    pub machine: worker::MachineLock,
    /// Output, written by [`settings`] and read by the parts of the roles and the packet filter: the cluster's
    /// settings for Kubernetes, once they are known.
    pub settings: Writer<Arc<KubernetesConfiguration>>,
    /// Output, written by the supervisor of the worker role: which pods may run, or may still be
    /// terminating.
    pub may_have_pods: Writer<PodsPossible>,
    /// Output: the network policy of this node's pods; `None` while it is not known.
    pub network_policy: Writer<Option<Arc<NodePolicy>>>,
    /// Output: the conditions of the assigned roles.
    pub conditions: Writer<Vec<NodeCondition>>,
}

/// A Kubernetes role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// API server, controller-manager and scheduler.
    Controller,
    /// containerd, kubelet and what pods need.
    Worker,
}

impl Role {
    const fn is_held(self, roles: &NodeRoles) -> bool {
        match self {
            Self::Controller => roles.kubernetes_controller.is_some(),
            Self::Worker => roles.kubernetes_worker.is_some(),
        }
    }

    /// The type of the role's condition.
    const fn condition(self) -> &'static str {
        match self {
            Self::Controller => names::CONDITION_KUBERNETES_CONTROLLER,
            Self::Worker => names::CONDITION_KUBERNETES_WORKER,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Controller => "Kubernetes controller",
            Self::Worker => "Kubernetes worker",
        }
    }
}

/// The state of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RoleCondition {
    /// The role is not assigned.
    NotHeld,
    /// All parts of the role are ready.
    Met,
    /// Not all parts are ready, not yet or not any more.
    Unmet {
        /// In CamelCase, for programs.
        reason: &'static str,
        /// For operators.
        message: String,
    },
}

impl RoleCondition {
    /// A role that is not ready.
    pub(crate) fn unmet(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Unmet {
            reason,
            message: message.into(),
        }
    }

    /// Something has failed and will be retried.
    fn failing(failure: &Failure) -> Self {
        Self::unmet("Failing", failure.to_string())
    }

    fn condition(self, role: Role) -> Option<NodeCondition> {
        let (met, reason, message) = match self {
            Self::NotHeld => return None,
            Self::Met => (true, "", String::new()),
            Self::Unmet { reason, message } => (false, reason, message),
        };
        Some(NodeCondition {
            r#type: role.condition().to_owned(),
            met,
            reason: reason.to_owned(),
            message: names::conditions::printable(&message),
        })
    }
}

impl From<&Missing> for RoleCondition {
    fn from(missing: &Missing) -> Self {
        let reason = match missing {
            Missing::NotInstalled { .. } => names::REASON_NOT_INSTALLED,
            Missing::Refused { .. } => names::REASON_EXTENSION_REFUSED,
        };
        Self::unmet(reason, missing.to_string())
    }
}

/// Runs the supervisors of the two roles, and reports the conditions.
pub async fn run(ctx: Context, parts: Arc<Worker>) -> Outcome {
    let mut roles = Vec::new();
    let (address_status, mut address_statuses) = watched();
    let mut address = AddressStatus::None;
    let (manifests_status, mut manifests_statuses) = watched();
    let mut manifests = ManifestsStatus::Done;
    let (hosts_writer, server_hosts) = event::value();
    let (recipient_writer, recovery_recipient) = event::value();
    for (name, role) in [("controller", Role::Controller), ("worker", Role::Worker)] {
        let (condition, conditions) = watched();
        let gate = Arc::new(RoleSupervisor {
            role,
            parts: parts.clone(),
            condition,
            address_status: address_status.clone(),
            manifests_status: manifests_status.clone(),
            server_hosts: server_hosts.clone(),
            recovery_recipient: recovery_recipient.clone(),
            lost: AtomicBool::new(false),
        });
        roles.push((role, conditions, RoleCondition::NotHeld));
        ctx.run_restartable(name, &gate, pass)?;
    }
    let settings = Arc::new(settings::Worker {
        parts: parts.clone(),
        server_hosts: hosts_writer,
        recovery_recipient: recipient_writer,
    });
    ctx.run_worker("settings", &settings, settings::run)?;
    ctx.healthy();
    let [controller, worker] = &mut roles[..] else {
        return Err(Failure::msg("internal error: expected two roles"));
    };
    let mut all_settings = parts.settings.value().watch();
    let mut all_roles = parts.local_roles.watch();
    let mut addresses = parts.address.watch();
    let mut second_addresses = parts.second_address.watch();
    loop {
        tokio::select! {
            condition = controller.1.next() => controller.2 = condition?,
            condition = worker.1.next() => worker.2 = condition?,
            status = address_statuses.next() => address = status?,
            status = manifests_statuses.next() => manifests = status?,
            changed = all_settings.next() => changed.map(drop)?,
            changed = all_roles.next() => changed.map(drop)?,
            changed = addresses.next() => changed.map(drop)?,
            changed = second_addresses.next() => changed.map(drop)?,
            () = ctx.cancelled() => return Ok(()),
        }
        let all = [&*controller, &*worker].map(|(role, _, now)| now.clone().condition(*role));
        let all = all.into_iter();
        let all = all.chain([
            address.condition(),
            manifests.condition(),
            dual_stack_condition(&parts),
        ]);
        parts.conditions.set(all.flatten().collect());
    }
}

/// What this node lacks for a dual-stack cluster; `None` if this is no such cluster, or not known yet.
fn dual_stack_condition(parts: &Worker) -> Option<NodeCondition> {
    let ranges = ClusterRanges::of(&*parts.settings.value().get()?).ok()?;
    let addresses = (parts.address.get(), parts.second_address.get().flatten());
    addresses::condition(&ranges, &parts.local_roles.get()?, addresses)
}

/// A value with several writers, and its only reader.
fn watched<T: Clone + Send + Sync + 'static>() -> (Arc<Writer<T>>, Watcher<T>) {
    let (writer, value) = event::value();
    (Arc::new(writer), value.watch())
}

/// The supervisor of one role on this node.
struct RoleSupervisor {
    role: Role,
    parts: Arc<Worker>,
    /// Output, written here and by the parts of the role.
    condition: Arc<Writer<RoleCondition>>,
    /// Output of the controller: what it has to do with the virtual address.
    address_status: Arc<Writer<AddressStatus>>,
    /// Output of the controller: which of the objects that the cluster was founded with are left to apply.
    manifests_status: Arc<Writer<ManifestsStatus>>,
    /// Input of the controller: further names and addresses in the certificate of its API server.
    server_hosts: Value<Arc<[Host]>>,
    /// Input of the controller: the recovery recipient of the cluster.
    recovery_recipient: Value<Option<RecoveryRecipient>>,
    /// The role has been removed since the last cleanup.
    lost: AtomicBool,
}

/// Runs the parts of the role while the role is assigned; restarts when this changes.
async fn pass(ctx: Context, gate: Arc<RoleSupervisor>) -> Result<Exit, Failure> {
    let work = async {
        // Once this is set, the data partition is mounted.
        gate.parts.member.watch().next().await?;
        let mut roles = gate.parts.local_roles.watch();
        let disowned = async {
            let mut states = gate.parts.cluster_state.watch();
            while states.next().await? != State::Disowning {}
            Ok(Exit::restart("the cluster has disowned this node"))
        };
        let disowning = gate.parts.cluster_state.get() == State::Disowning;
        let held = !disowning && gate.role.is_held(&roles.next().await?);
        let changed = async {
            let changed = roles.wait_for(|roles| gate.role.is_held(roles) != held);
            changed.await?;
            gate.lost.fetch_or(held, Ordering::Relaxed);
            let (role, now) = (gate.role.name(), if held { "removed" } else { "assigned" });
            Ok(Exit::restart(format_args!("role {role} has been {now}")))
        };
        tokio::select! {
            outcome = serve(&ctx, &gate, held) => outcome.map(|()| Exit::Done),
            // Without the role there is nothing to stop.
            ended = disowned, if held => ended,
            changed = changed, if !disowning => changed,
        }
    };
    tokio::select! {
        exit = work => exit,
        () = ctx.cancelled() => Ok(Exit::Done),
    }
}

/// One run, with or without the role. Returns only on an error.
async fn serve(ctx: &Context, gate: &RoleSupervisor, held: bool) -> Outcome {
    if !held || gate.lost.load(Ordering::Relaxed) {
        let cleared = clear(gate).await;
        if let Err(failure) = &cleared {
            gate.condition.set(RoleCondition::failing(failure));
        }
        cleared?;
        gate.lost.store(false, Ordering::Relaxed);
    }
    if !held {
        if gate.role == Role::Worker {
            gate.parts.may_have_pods.set(PodsPossible::None);
            gate.parts.network_policy.set(None);
        }
        if gate.role == Role::Controller {
            gate.address_status.set(AddressStatus::None);
            gate.manifests_status.set(ManifestsStatus::Done);
        }
        gate.condition.set(RoleCondition::NotHeld);
        ctx.healthy();
        return std::future::pending().await;
    }
    let mounted = match gate.parts.extensions.get(names::EXTENSION_KUBERNETES) {
        Ok(mounted) => mounted,
        Err(missing) => {
            tracing::warn!("cannot run role {}: {missing}", gate.role.name());
            gate.condition.set(RoleCondition::from(&missing));
            ctx.healthy();
            return std::future::pending().await;
        }
    };
    let bundle = match Bundle::open(mounted) {
        Ok(bundle) => Arc::new(bundle),
        Err(error) => {
            let failure = Failure::from(error);
            let refused = RoleCondition::unmet("ExtensionRefused", failure.to_string());
            gate.condition.set(refused);
            return Err(failure);
        }
    };
    let mut unsuitable = addresses::unsuitable(&gate.parts);
    if unsuitable.is_some() {
        ctx.healthy();
        while let Some((reason, why)) = &unsuitable {
            tracing::warn!("cannot run role {}: {why}", gate.role.name());
            gate.condition
                .set(RoleCondition::unmet(reason, why.clone()));
            unsuitable = addresses::other_than(&gate.parts, &unsuitable).await?;
        }
        return Err(Failure::msg(
            "Kubernetes can use the address of this node now",
        ));
    }
    let outcome = tokio::select! {
        outcome = start(ctx, gate, bundle) => outcome,
        moved = addresses::other_than(&gate.parts, &None) => {
            moved?;
            Err(Failure::msg("Kubernetes cannot use the address of this node any more"))
        }
    };
    if let Err(failure) = &outcome {
        // The last condition that the parts have set is outdated.
        gate.condition.set(RoleCondition::failing(failure));
    }
    outcome
}

/// Starts the parts of the role as children of this runnable. Returns only on an error.
async fn start(ctx: &Context, gate: &RoleSupervisor, bundle: Arc<Bundle>) -> Outcome {
    match gate.role {
        Role::Controller => {
            let ports = controller::Ports::default();
            let shared = controller::Shared {
                condition: &gate.condition,
                address_status: &gate.address_status,
                manifests_status: &gate.manifests_status,
                server_hosts: &gate.server_hosts,
                recovery_recipient: &gate.recovery_recipient,
            };
            controller::run(ctx, &gate.parts, bundle, ports, shared).await
        }
        Role::Worker => worker::run(ctx, &gate.parts, bundle, &gate.condition).await,
    }
}

/// Cleans up what the role has left on the machine; does nothing if it never ran.
async fn clear(gate: &RoleSupervisor) -> Outcome {
    let made = match gate.role {
        Role::Controller => gate.parts.root.ephemeral.kubernetes().controller(),
        Role::Worker => return worker::clear(&gate.parts).await,
    };
    let made = made.path().to_owned();
    let turn = &gate.parts.machine;
    Ok(turn.take(move || tree::remove(&made)).await??)
}
