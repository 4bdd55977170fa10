//! Kubernetes on this node: what the roles of controller and worker mean.
//!
//! | part | does |
//! |---|---|
//! | this module | starts and ends the two roles' parts as the roles come and go, and tells their conditions |
//! | [`balancer`] | one address on this machine, behind which all API servers are |
//! | [`hearth_host::bundle`] | what the extension offers, and what its versions understand |
//! | [`calendar`] | when certificates are due |
//! | [`program`] | one program of it as a supervised child |
//! | [`hearth_sys::iptables`] | the kernel's packet rules, by the extension's program |
//! | [`kubeconfig`] | the file by which such a program finds API servers |
//! | [`store`] | the API server's way to etcd |
//! | [`controller`] | API server, controller-manager, scheduler |
//! | [`hearth_kubernetes_api`] | Kubernetes' API, as much of it as we use |
//! | [`access`] | our own clients of it |
//! | [`reconciler`] | on controllers: the objects that a cluster has from us |
//! | [`labels`] | what Kubernetes' nodes bear of the cluster's labels |
//! | [`services`] | on workers: starts names and volumes |
//! | [`hearth_kubernetes_dns`] | on workers: names for pods |
//! | [`volumes`] | on workers: local volumes with quotas |
//! | [`containerd`] | runs containers, and has the extension's images |
//! | [`worker`] | what a worker runs |
//! | [`mesh`] | a worker of its own: the way between the pods of different nodes |
//!
//! Each role is a runnable of its own (a *gate*) with the role's parts below
//! it. The children of a runnable are fixed once it is healthy, so a role that
//! comes or goes is a restart of its gate, at any time, while its parts still
//! start, too; the other role does not notice. All that ran below a gate has
//! ended before it runs again, and what it had begun on the disk is over before
//! more is begun there ([`worker`]). What a role leaves on the machine beyond
//! its processes is undone by the gate of the role that is not held, at each
//! start: a node that lost power with a role and has lost the role meanwhile is
//! cleaned the same way. A role that has come back before that begins with it.
//!
//! What stands in the way of a role is told as a condition of the node, by
//! [`Standing`], and nothing pretends: a role whose extension the image does
//! not have is held, and not met.
//!
//! Invariants: no part of the node depends on Kubernetes; nothing here is
//! started for a role that is not held; the conditions have one writer, this
//! worker.

pub mod access;
pub(crate) mod balancer;
pub mod calendar;
mod containerd;
mod controller;
#[cfg(test)]
mod identities;
pub mod kubeconfig;
pub mod labels;
pub mod mesh;
pub mod program;
pub mod reconciler;
mod services;
#[cfg(test)]
mod snapshot;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod volumes;
mod worker;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearth_agent::{CuratorConnection, Learned, View};
use hearth_api::names;
use hearth_api::v1::{NodeCondition, NodeRoles};
use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Exit, Failure, Outcome};
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::extensions::{Extensions, Missing};
use hearth_host::handover::{MayHavePods, MemberData, PodNetwork};
use hearth_host::layout::Root;
use hearth_sys::tree;

use calendar::Calendar;
use hearth_host::bundle::Bundle;

/// Runs Kubernetes on this node as the node's roles demand. All that runs below
/// it shares this.
pub struct Worker {
    /// Where things lie.
    pub root: Root,
    /// Takes the programs' log lines.
    pub log_tree: LogTree,
    /// By which certificates are renewed.
    pub calendar: Calendar,
    /// The programs are one of them.
    pub extensions: Arc<Extensions>,
    /// Will be read: a node that is disowned runs nothing, and one that is cut
    /// off goes on with what it runs.
    pub cluster_state: ClusterState,
    /// Will be read: who this node is, and that its data partition is open.
    pub member: Value<MemberData>,
    /// Will be read: whom workers ask for certificates, and the reconciler for
    /// the cluster.
    pub connection: Value<CuratorConnection>,
    /// Will be read, by controllers: etcd, while it runs here.
    pub consensus: Value<Option<hearth_consensus::Handle>>,
    /// Will be read: what is to run here.
    pub local_roles: Value<NodeRoles>,
    /// Will be read: who else is a controller or worker.
    pub view: Value<Arc<View>>,
    /// Will be read: where the others are.
    pub learned: Value<Learned>,
    /// Will be read: this node's address of the moment.
    pub address: Value<IpAddr>,
    /// Will be read, by workers: the addresses of this node's pods.
    pub pod_network: Value<Option<PodNetwork>>,
    /// By whom this machine is changed for pods.
    pub machine: worker::Turn,
    /// Will be written, by the worker's gate: whether pods may run, or have
    /// something left to say.
    pub may_have_pods: Writer<MayHavePods>,
    /// Will be written: how the roles stand that are held.
    pub conditions: Writer<Vec<NodeCondition>>,
}

/// A role that this worker is for.
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

    /// The type of its condition.
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

/// How a role stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is not held.
    NotHeld,
    /// All that belongs to it works.
    Met,
    /// It does not, yet or any more.
    Unmet {
        /// In CamelCase, for programs.
        reason: &'static str,
        /// For people.
        message: String,
    },
}

impl Standing {
    /// A role that does not work.
    pub(crate) fn unmet(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Unmet {
            reason,
            message: message.into(),
        }
    }

    /// Something has failed, and is tried again.
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
            message: printable(&message),
        })
    }
}

/// What a program said, in one line that curators take.
fn printable(message: &str) -> String {
    let mut line: String = message
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    line.truncate(line.floor_char_boundary(names::LONGEST_CONDITION));
    line
}

impl From<&Missing> for Standing {
    fn from(missing: &Missing) -> Self {
        let reason = match missing {
            Missing::NotInstalled { .. } => names::REASON_NOT_INSTALLED,
            Missing::Refused { .. } => names::REASON_EXTENSION_REFUSED,
        };
        Self::unmet(reason, missing.to_string())
    }
}

/// Runs the gates, and tells how the roles stand.
pub async fn run(ctx: Context, parts: Arc<Worker>) -> Outcome {
    let mut standings = Vec::new();
    for (name, role) in [("controller", Role::Controller), ("worker", Role::Worker)] {
        let (writer, standing) = event::value();
        let gate = Arc::new(Gate {
            role,
            parts: parts.clone(),
            standing: Arc::new(writer),
            lost: AtomicBool::new(false),
        });
        standings.push((role, standing.watch(), Standing::NotHeld));
        ctx.run_restartable(name, &gate, pass)?;
    }
    ctx.healthy();
    let [controller, worker] = &mut standings[..] else {
        return Err(Failure::msg("there are two roles"));
    };
    loop {
        tokio::select! {
            standing = controller.1.next() => controller.2 = standing?,
            standing = worker.1.next() => worker.2 = standing?,
            () = ctx.cancelled() => return Ok(()),
        }
        let all = [&*controller, &*worker].map(|(role, _, now)| now.clone().condition(*role));
        parts.conditions.set(all.into_iter().flatten().collect());
    }
}

/// One role on this node.
struct Gate {
    role: Role,
    parts: Arc<Worker>,
    /// Will be written, here and by what runs below.
    standing: Arc<Writer<Standing>>,
    /// The role has gone since what it leaves was last cleared away.
    lost: AtomicBool,
}

/// Lets the role's parts run while the role is held.
async fn pass(ctx: Context, gate: Arc<Gate>) -> Result<Exit, Failure> {
    let work = async {
        // The data partition is open from then on.
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
            let (role, now) = (gate.role.name(), if held { "no" } else { "a" });
            Ok(Exit::restart(format_args!("this node is {now} {role} now")))
        };
        tokio::select! {
            outcome = serve(&ctx, &gate, held) => outcome.map(|()| Exit::Done),
            // Without a role there is nothing to end.
            ended = disowned, if held => ended,
            changed = changed, if !disowning => changed,
        }
    };
    tokio::select! {
        exit = work => exit,
        () = ctx.cancelled() => Ok(Exit::Done),
    }
}

/// What is to be done with the role or without it; ends by an error only.
async fn serve(ctx: &Context, gate: &Gate, held: bool) -> Outcome {
    if !held || gate.lost.load(Ordering::Relaxed) {
        let cleared = clear(gate).await;
        if let Err(failure) = &cleared {
            gate.standing.set(Standing::failing(failure));
        }
        cleared?;
        gate.lost.store(false, Ordering::Relaxed);
    }
    if !held {
        if gate.role == Role::Worker {
            gate.parts.may_have_pods.set(false);
        }
        gate.standing.set(Standing::NotHeld);
        ctx.healthy();
        return std::future::pending().await;
    }
    let mounted = match gate.parts.extensions.get(names::EXTENSION_KUBERNETES) {
        Ok(mounted) => mounted,
        Err(missing) => {
            tracing::warn!("this node is to be a {}: {missing}", gate.role.name());
            gate.standing.set(Standing::from(&missing));
            ctx.healthy();
            return std::future::pending().await;
        }
    };
    let bundle = match Bundle::open(mounted) {
        Ok(bundle) => Arc::new(bundle),
        Err(error) => {
            let failure = Failure::from(error);
            let refused = Standing::unmet("ExtensionRefused", failure.to_string());
            gate.standing.set(refused);
            return Err(failure);
        }
    };
    let outcome = start(ctx, gate, bundle).await;
    if let Err(failure) = &outcome {
        // What its parts have said last is not true any more.
        gate.standing.set(Standing::failing(failure));
    }
    outcome
}

/// Starts the role's parts below this runnable; ends by an error only.
async fn start(ctx: &Context, gate: &Gate, bundle: Arc<Bundle>) -> Outcome {
    match gate.role {
        Role::Controller => {
            let ports = controller::Ports::default();
            controller::run(ctx, &gate.parts, bundle, ports, &gate.standing).await
        }
        Role::Worker => worker::run(ctx, &gate.parts, bundle, &gate.standing).await,
    }
}

/// Undoes what the role has left on the machine; nothing if it never ran.
async fn clear(gate: &Gate) -> Outcome {
    let made = match gate.role {
        Role::Controller => gate.parts.root.ephemeral.kubernetes().controller(),
        Role::Worker => return worker::clear(&gate.parts).await,
    };
    let made = made.path().to_owned();
    let turn = &gate.parts.machine;
    Ok(turn.take(move || tree::remove(&made)).await??)
}
