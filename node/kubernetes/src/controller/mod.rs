//! The Kubernetes control plane on this node: an API server on the local etcd, and
//! controller-manager and scheduler, which use this API server.
//!
//! Each program is a runnable of its own and starts, fails and renews its certificates
//! independently. Its certificates are issued when it starts, from the CAs in etcd, and are stored
//! in memory: a program is restarted when its certificates are two thirds through their lifetime,
//! or when the address of the node changes. Nothing of it is on the disk, so nothing is left when
//! the role has been removed.
//!
//! With several controllers, all API servers are active; of the other programs, and of the
//! [`reconciler`], one of each is the leader, elected with leases in the API. They use the API
//! server of their own node: a controller that is cut off cannot be leader.
//!
//! They are [confined](hearth_sys::confine), as a user of their own ([`CONTROL_PLANE_USER`]): the API
//! server reaches of etcd what [`store`] passes, and not etcd's socket or the files of the node.
//!
//! [`CONTROL_PLANE_USER`]: super::CONTROL_PLANE_USER
//!
//! The API server needs the local etcd, so the node has to be a consensus member. Until its etcd
//! serves, nothing is started, and the condition says so.

mod audit;
mod files;
mod pod_security;
mod programs;
mod secrets;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::SystemTime;

use hearth_api::hosts::Host;
use hearth_api::names::{self, ports};
use hearth_api::ranges::ClusterRanges;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::v1::{AuditLevel, KubernetesConfiguration};
use hearth_base::event::{self, Value, Writer};
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Context, Exit, Failure, Outcome};
use hearth_consensus::etcd_proxy::quota::Capacity;
use hearth_consensus::manifests::Manifests;
use hearth_consensus::{
    ConsensusUnavailable, ConsensusUser, Handle, NamespacedClient, kubernetes_authorities,
};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_host::pki::kubernetes::{Authorities, Certificate};
use hearth_sys::confine::Confinement;

use super::program::{self, Profile, Progress};
use super::reconciler::manifests::ManifestsStatus;
use super::virtual_address::{self, AddressStatus};
use super::{AUDIT_LOG, RoleCondition, Worker, reconciler, store};
use files::Files;
use pod_security::PodSecurity;
use secrets::KeyStatus;

/// The ports of the programs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub apiserver: u16,
    pub controller_manager: u16,
    pub scheduler: u16,
}

impl Default for Ports {
    fn default() -> Self {
        Self {
            apiserver: ports::KUBERNETES,
            controller_manager: ports::CONTROLLER_MANAGER,
            scheduler: ports::SCHEDULER,
        }
    }
}

/// The state that the parts of a controller share.
struct Controller {
    parts: Arc<Worker>,
    bundle: Arc<Bundle>,
    ports: Ports,
    member: MemberData,
    authorities: Authorities,
    files: Files,
    consensus: Handle,
    /// The namespace of Kubernetes in etcd.
    store: NamespacedClient,
    /// Held by the API server.
    store_in_use: ReadLock,
    /// Whether the store has free capacity.
    room: Writer<Capacity>,
    /// The state of the API server on this node.
    apiserver: Value<Progress>,
    /// The cluster's settings.
    settings: Value<Arc<KubernetesConfiguration>>,
    /// The further names and addresses in the certificate of the API server.
    hosts: Value<Arc<[Host]>>,
    /// Whether there are keys with which the API server can encrypt and decrypt Secrets.
    keys: Value<KeyStatus>,
}

/// What the API server reads of the cluster's settings when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rules {
    security: PodSecurity,
    audit: AuditLevel,
}

impl Rules {
    fn of(settings: &KubernetesConfiguration) -> Self {
        Self {
            security: PodSecurity::of(settings),
            audit: audit::level(settings.audit_level()),
        }
    }
}

/// What a controller shares with other parts of this worker.
pub(crate) struct Shared<'a> {
    /// The condition of the role.
    pub condition: &'a Writer<RoleCondition>,
    /// What this node has to do with the virtual address.
    pub address_status: &'a Arc<Writer<AddressStatus>>,
    /// Which of the objects that the cluster was founded with are left to apply.
    pub manifests_status: &'a Arc<Writer<ManifestsStatus>>,
    /// Input: further names and addresses in the certificate of the API server.
    pub server_hosts: &'a Value<Arc<[Host]>>,
    /// Input: the recovery recipient of the cluster, if it has one.
    pub recovery_recipient: &'a Value<Option<RecoveryRecipient>>,
}

impl Controller {
    /// Makes the files those of the user who reads them.
    fn hand_over_files(&self) -> Result<(), Failure> {
        match self.parts.control_plane_user {
            Some(user) => Ok(self.files.hand_over(user)?),
            None => Ok(()),
        }
    }

    /// Waits until the API server is ready. Earlier requests would take CPU time from its start.
    async fn serves(&self) -> Result<(), event::Closed> {
        let mut progress = self.apiserver.watch();
        let serves = progress.wait_for(|progress| *progress == Progress::Serving);
        serves.await.map(drop)
    }
}

/// Runs the parts of a controller as children of the role's supervisor. Returns only on an error.
pub(crate) async fn run(
    ctx: &Context,
    parts: &Arc<Worker>,
    bundle: Arc<Bundle>,
    ports: Ports,
    outer: Shared<'_>,
) -> Outcome {
    let condition = outer.condition;
    let member = parts.member.watch().next().await?;
    let Reached {
        consensus,
        pki,
        store,
        among_controllers,
        secrets_keys,
    } = reach_consensus(parts, condition).await?;
    let authorities = kubernetes_authorities::ensure(&pki, member.own.ca().certificate()).await?;
    let files = Files::new(&parts.root);
    let shared = {
        let (files, authorities) = (files.clone(), &authorities);
        let encryption = secrets::encryption_configuration(&files.key_provider());
        files.prepare(authorities, &encryption)?;
        files
    };

    let keyring = secrets::open_keyring(&parts.root, &member, secrets_keys)?;
    let profiles = [
        programs::APISERVER,
        programs::CONTROLLER_MANAGER,
        programs::SCHEDULER,
    ];
    let progresses = profiles.map(|_| Arc::new(event::value::<Progress>().0));
    let controller = Arc::new(Controller {
        parts: parts.clone(),
        bundle,
        ports,
        member,
        authorities,
        files: shared,
        consensus,
        store,
        store_in_use: ReadLock::default(),
        room: event::value().0,
        apiserver: progresses[0].value(),
        settings: parts.settings.value(),
        hosts: outer.server_hosts.clone(),
        keys: keyring.status(),
    });
    let all = controller.clone();
    ctx.run("store", move |ctx| {
        let all = all.clone();
        async move {
            let directory = all.parts.root.ephemeral.kubernetes().store();
            let user = all.parts.control_plane_user;
            // etcd ends after the API server, so that this one can sign off.
            let _held = all.consensus.hold().await;
            store::run(
                ctx,
                &directory,
                user,
                &all.store,
                &all.store_in_use,
                &all.room,
            )
            .await
        }
    })?;
    secrets::start(ctx, &controller, keyring, outer.recovery_recipient)?;
    let audit = Arc::new(audit::Worker {
        file: parts.root.data.audit_log(),
        user: parts.control_plane_user,
        log_tree: parts.log_tree.clone(),
    });
    audit.prepare()?;
    ctx.run_worker(AUDIT_LOG, &audit, audit::run)?;
    for (profile, progress) in profiles.into_iter().zip(&progresses) {
        let progress = progress.clone();
        let name = profile.binary.name().trim_start_matches("kube-");
        ctx.run_restartable(name, &controller, move |ctx, all| {
            keep(ctx, all, profile, progress.clone())
        })?;
    }
    let address = Arc::new(virtual_address::Worker {
        store: among_controllers.sub("virtual-address")?,
        node: controller.member.own.node(),
        lease: names::API_ADDRESS_LEASE,
        settings: controller.settings.clone(),
        own: parts.address.clone(),
        apiserver: controller.apiserver.clone(),
        address_status: outer.address_status.clone(),
    });
    ctx.run_worker("virtual-address", &address, virtual_address::run)?;
    let objects = Arc::new(event::value().0);
    let issuer = controller.clone();
    let reconciler = Arc::new(reconciler::controller::Worker {
        parts: parts.clone(),
        server: programs::url(Ipv4Addr::LOCALHOST.into(), ports.apiserver),
        authority: controller.authorities.ca().clone(),
        issue: Box::new(move || {
            let now = issuer.parts.calendar.now();
            Ok(issuer.authorities.issue(&Certificate::Reconciler, now)?)
        }),
        settings: controller.settings.clone(),
        manifests: Manifests::new(among_controllers),
        constants: objects.clone(),
        manifests_status: outer.manifests_status.clone(),
    });
    let all = controller.clone();
    ctx.run("reconciler", move |ctx| {
        let (all, reconciler) = (all.clone(), reconciler.clone());
        async move {
            tokio::select! {
                serves = all.serves() => serves?,
                () = ctx.cancelled() => return Ok(()),
            }
            reconciler::controller::on_controller(ctx, reconciler).await
        }
    })?;
    // All children are started; their state is reported by the condition.
    ctx.healthy();
    tell(
        profiles.map(|profile| profile.binary),
        progresses.map(|progress| progress.value()),
        (controller.keys.clone(), controller.room.value()),
        objects.value(),
        condition,
    )
    .await
}

/// Access to etcd.
struct Reached {
    consensus: Handle,
    /// The authorities.
    pki: NamespacedClient,
    /// The objects of Kubernetes.
    store: NamespacedClient,
    /// What the controllers agree on.
    among_controllers: NamespacedClient,
    /// The keys of Secrets.
    secrets_keys: NamespacedClient,
}

/// Waits until etcd serves on this node and the node belongs to its cluster.
async fn reach_consensus(
    parts: &Worker,
    condition: &Writer<RoleCondition>,
) -> Result<Reached, Failure> {
    let mut consensus = parts.consensus.watch();
    let mut states = parts.cluster_state.watch();
    loop {
        let handle = parts.consensus.get().flatten();
        let handle = handle.ok_or(ConsensusUnavailable::NoLocalConsensus);
        let clients = handle.and_then(|handle| {
            Ok(Reached {
                pki: handle.client(ConsensusUser::KubernetesPki)?,
                store: handle.client(ConsensusUser::Kubernetes)?,
                among_controllers: handle.client(ConsensusUser::KubernetesControllers)?,
                secrets_keys: handle.client(ConsensusUser::KubernetesSecrets)?,
                consensus: handle,
            })
        });
        match clients {
            Ok(reached) => return Ok(reached),
            Err(why) => condition.set(RoleCondition::unmet("WaitingForConsensus", why.to_string())),
        }
        tokio::select! {
            changed = consensus.next() => drop(changed?),
            changed = states.next() => drop(changed?),
        }
    }
}

/// Updates the condition of the role from the states of the keys of Secrets, the programs, the store, and the
/// objects that users rely on.
async fn tell(
    programs: [Binary; 3],
    progresses: [Value<Progress>; 3],
    (keys, room): (Value<KeyStatus>, Value<Capacity>),
    objects: Value<Progress>,
    condition: &Writer<RoleCondition>,
) -> Outcome {
    let mut watchers = progresses.each_ref().map(Value::watch);
    let (mut rooms, mut made, mut opened) = (room.watch(), objects.watch(), keys.watch());
    loop {
        let now = progresses.each_ref().map(Value::get);
        let programs = programs.into_iter().zip(now);
        condition.set(match keys.get().and_then(|keys| keys.condition()) {
            Some(unmet) => unmet,
            None => judge(programs, room.get(), objects.get()),
        });
        let [a, b, c] = &mut watchers;
        tokio::select! {
            changed = a.next() => drop(changed?),
            changed = b.next() => drop(changed?),
            changed = c.next() => drop(changed?),
            changed = rooms.next() => drop(changed?),
            changed = made.next() => drop(changed?),
            changed = opened.next() => drop(changed?),
        }
    }
}

/// The first program that fails; otherwise a full store; otherwise the first program that is
/// starting; last the objects, which depend on the programs.
fn judge(
    programs: impl Iterator<Item = (Binary, Option<Progress>)>,
    room: Option<Capacity>,
    objects: Option<Progress>,
) -> RoleCondition {
    let mut starting = None;
    for (binary, progress) in programs {
        match progress {
            Some(Progress::Serving) => {}
            Some(Progress::Failing(why)) => {
                return RoleCondition::unmet("Failing", format!("{}: {why}", binary.name()));
            }
            Some(Progress::Starting) | None => {
                starting.get_or_insert(binary);
            }
        }
    }
    if let Some(Capacity::Full { in_use, limit }) = room {
        let [in_use, limit] = [in_use, limit].map(|bytes| bytes >> 20);
        let message = format!(
            "writes of Kubernetes are rejected: {in_use} MiB of etcd are in use, the limit is \
             {limit} MiB. Delete objects; their space is free once the history has been compacted, \
             after five minutes"
        );
        return RoleCondition::unmet("StoreFull", message);
    }
    if let Some(binary) = starting {
        return RoleCondition::unmet("Starting", format!("{} is starting", binary.name()));
    }
    match objects {
        Some(Progress::Serving) => RoleCondition::Met,
        Some(Progress::Failing(why)) => {
            RoleCondition::unmet("Failing", format!("cannot apply {why}"))
        }
        Some(Progress::Starting) | None => {
            RoleCondition::unmet("Starting", "applying the objects of the cluster")
        }
    }
}

/// The control-plane programs have nothing of the node: not its keys, not the cluster's store, and
/// not what its pods have.
fn confinement(root: &Root, user: u32) -> Confinement {
    let (data, memory) = (&root.data, &root.ephemeral);
    Confinement {
        user,
        hidden: vec![
            root.esp.path().to_owned(),
            data.etcd().path().to_owned(),
            data.node().path().to_owned(),
            data.volumes(),
            data.containerd(),
            data.kubernetes().path().to_owned(),
            root.kubelet.clone(),
            memory.consensus(),
            memory.containerd(),
            memory.kubernetes().worker().path().to_owned(),
        ],
    }
}

/// Runs one program until its configuration is outdated.
async fn keep(
    ctx: Context,
    all: Arc<Controller>,
    profile: Profile,
    progress: Arc<Writer<Progress>>,
) -> Result<Exit, Failure> {
    let binary = profile.binary;
    let ready = async {
        if binary != Binary::Apiserver {
            // Without an API server they would exit. The controller-manager would do so even while
            // it is the leader, and the others would wait for its lease to expire.
            all.serves().await?;
        } else {
            // It would answer no request for a Secret.
            let mut keys = all.keys.watch();
            keys.wait_for(|keys| matches!(keys, KeyStatus::Ready(_)))
                .await?;
        }
        let address = all.parts.address.watch().next().await?;
        let settings = all.settings.watch().next().await?;
        let hosts = all.hosts.watch().next().await?;
        Ok::<_, Failure>((address, settings, hosts))
    };
    let (address, settings, hosts) = tokio::select! {
        ready = ready => ready?,
        () = ctx.cancelled() => return Ok(Exit::Done),
    };
    let mut prepared = programs::prepare(&all, profile, address, &settings, &hosts)?;
    all.hand_over_files()?;
    if let Some(user) = all.parts.control_plane_user {
        prepared.program.confinement = Some(confinement(&all.parts.root, user));
    }
    let _held = match binary {
        Binary::Apiserver => Some(all.store_in_use.hold().await),
        _ => None,
    };
    let outdated = outdated(
        &all,
        binary,
        (address, &*settings, hosts),
        prepared.renew_at,
    );
    let probe = || prepared.probe();
    let log = &all.parts.log_tree;
    program::run_until_outdated(&ctx, &prepared.program, log, &progress, probe, outdated).await
}

/// Waits until a program has to be restarted with new files; returns the reason.
async fn outdated(
    all: &Controller,
    binary: Binary,
    (address, settings, hosts): (IpAddr, &KubernetesConfiguration, Arc<[Host]>),
    renew_at: SystemTime,
) -> Result<&'static str, event::Closed> {
    let mut addresses = all.parts.address.watch();
    let rules = Rules::of(settings);
    let mut newer = all.settings.watch();
    tokio::select! {
        changed = newer.wait_for(|now| Rules::of(now) != rules),
            if binary == Binary::Apiserver =>
        {
            changed.map(|_| "the cluster's settings have changed")
        }
        // Only the API server is reached from other machines.
        moved = addresses.wait_for(|now| *now != address), if binary == Binary::Apiserver => {
            moved.map(|_| "the node's address has changed")
        }
        // Clients of the others compare them.
        renamed = follow_hosts(all, (address, settings), hosts), if binary == Binary::Apiserver => renamed,
        () = all.parts.calendar.reaches(renew_at) => Ok("its certificates are due for renewal"),
    }
}

/// Issues the certificate of the API server anew when other names and addresses belong into it. The server
/// reads it while it runs; returns only when it has to be restarted instead.
async fn follow_hosts(
    all: &Controller,
    (address, settings): (IpAddr, &KubernetesConfiguration),
    mut known: Arc<[Host]>,
) -> Result<&'static str, event::Closed> {
    let mut watched = all.hosts.watch();
    loop {
        known = watched.wait_for(|now| *now != known).await?;
        let ranges = ClusterRanges::of(settings).map_err(Failure::from);
        let issued = ranges.and_then(|ranges| {
            let issued = programs::issue_serving(all, address, &ranges, &known);
            issued.map_err(Failure::from)
        });
        match issued.and_then(|_| all.hand_over_files()) {
            Ok(()) => tracing::info!("issued the API server's certificate with other names"),
            Err(error) => {
                tracing::warn!("cannot issue the API server's certificate: {error}");
                return Ok("the names in its certificate have changed");
            }
        }
    }
}
