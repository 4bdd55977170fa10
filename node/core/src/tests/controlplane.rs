//! The control-plane worker of one node, with a real etcd and a real curator on their own ports.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use hearth_agent::testing::consensus_member;
use hearth_agent::{CuratorConnection, LocalControlPlane, rolefetch};
use hearth_api::client::{Curators, Options};
use hearth_api::identity::{NodeCredentials, OwnerKey};
use hearth_api::testing;
use hearth_api::tls::wall_clock;
use hearth_api::v1::node_roles::ConsensusMember;
use hearth_api::v1::{ClusterDirectory, NodeRoles};
use hearth_base::event::{self, Value, Writer};
use hearth_base::testing::{TestSupervisor, assert_never, next, until, until_ok, within_timeout};
use hearth_cluster::state;
use hearth_consensus::testing::{Site, etcd};
use hearth_consensus::{ConsensusUser, Handle, member_record};
use hearth_curator::Timing;
use hearth_curator::testing::bootstrap_data;
use hearth_host::cluster_state::State;
use hearth_host::handover::{BootstrapData, Disowned, Founded, MemberData};
use hearth_host::image::Image;
use hearth_host::{credentials, pki};

use crate::controlplane::{ASK_BOUND, Worker, run};

/// One boot of the node.
struct Boot {
    worker: TestSupervisor,
    bootstrap: Writer<Arc<BootstrapData>>,
    member: Writer<MemberData>,
    roles: Writer<NodeRoles>,
    founded: Value<Founded>,
    disowned: Writer<Disowned>,
    /// Connection to the curators; never set in these tests.
    #[expect(dead_code, reason = "held so that the value has a writer")]
    connection: Writer<CuratorConnection>,
    control_plane: Value<LocalControlPlane>,
    consensus: Value<Option<Handle>>,
    /// The address on which the curator listens.
    curator: SocketAddr,
}

/// A port that is free now, for a server that binds it at once.
fn free_port() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap()
}

fn boot(site: &Site) -> Boot {
    boot_with(site, free_port())
}

fn boot_with(site: &Site, curator: SocketAddr) -> Boot {
    let (bootstrap_writer, bootstrap) = event::value();
    let (member_writer, member) = event::value();
    let (founded_writer, founded) = event::value();
    let (roles_writer, local_roles) = event::value();
    let (disowned_writer, disowned) = event::value();
    let (connection_writer, connection) = event::value();
    let (control_plane_writer, control_plane) = event::value();
    let (consensus_writer, consensus) = event::value();
    let worker = Arc::new(Worker {
        root: site.root.clone(),
        image: Image {
            version: "1.2.3".into(),
            variant: String::new(),
            build_time: UNIX_EPOCH,
        },
        log_tree: site.log.clone(),
        bootstrap,
        member,
        founded: founded_writer,
        disowned,
        cluster_state: site.state.1.clone(),
        etcd_peers: site.config(false).peer_listen,
        curator,
        etcd: etcd(),
        etcd_quota: site.quota_bytes,
        etcd_hash_check: hearth_consensus::HASH_CHECK_INTERVAL,
        timing: Timing::default(),
        peer_proxy: None,
        local_roles,
        time: event::value().1,
        view: event::value().1,
        connection,
        ask_bound: ASK_BOUND,
        prover: None,
        control_plane: control_plane_writer,
        consensus: consensus_writer,
    });
    Boot {
        worker: TestSupervisor::run_restartable(move |ctx| run(ctx, worker.clone())),
        bootstrap: bootstrap_writer,
        member: member_writer,
        roles: roles_writer,
        founded,
        disowned: disowned_writer,
        connection: connection_writer,
        control_plane,
        consensus,
        curator,
    }
}

impl Boot {
    async fn reaches(
        &self,
        what: &str,
        wanted: impl FnMut(&LocalControlPlane) -> bool,
    ) -> LocalControlPlane {
        let mut control_plane = self.control_plane.watch();
        within_timeout(what, control_plane.wait_for(wanted))
            .await
            .unwrap()
    }

    async fn etcd_is(
        &self,
        what: &str,
        wanted: impl FnMut(&Option<Handle>) -> bool,
    ) -> Option<Handle> {
        within_timeout(what, self.consensus.watch().wait_for(wanted))
            .await
            .unwrap()
    }

    async fn serves(&self) -> LocalControlPlane {
        self.reaches("the control plane serves", |now| now.curator_port.is_some())
            .await
    }

    /// Waits until etcd and the curator have stopped.
    async fn ends(&self, site: &Site) {
        self.reaches("the curator stops", |now| now.curator_port.is_none())
            .await;
        self.etcd_is("the etcd handle is withdrawn", |handle| handle.is_none())
            .await;
        until("etcd exits", || site.etcd_pids().is_empty()).await;
    }
}

/// The cluster domain that the curator on this port returns.
async fn domain(site: &Site, node: &NodeCredentials, port: u16) -> String {
    let trust = testing::node_client_config(node, wall_clock());
    let curator = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let curators = Curators::new(vec![curator.into()], trust, Options::default());
    let connection = CuratorConnection::new(site.node_id, curators);
    within_timeout("an answer", connection.cluster_domain())
        .await
        .unwrap()
}

/// The create and mod revisions of the cluster record: they show whether it was written again.
async fn founding(site: &Site) -> (i64, i64) {
    let client = site.back_door(ConsensusUser::Curator);
    let read = || client.get(state::CLUSTER);
    let record = until_ok("a read", read).await.expect("a cluster");
    (record.create_revision, record.mod_revision)
}

fn member(credentials: &NodeCredentials) -> MemberData {
    MemberData {
        own: testing::own(credentials),
        directory: ClusterDirectory::default(),
        uses_tpm: false,
    }
}

/// Bootstraps a cluster on this site and stops it. Returns the credentials and the revisions of
/// the cluster record.
async fn founded(site: &Site) -> (Arc<NodeCredentials>, (i64, i64)) {
    let boot = boot(site);
    let data = bootstrap_data(site, &OwnerKey::generate());
    boot.bootstrap.set(Arc::new(data));
    let founded = next("the founding", &mut boot.founded.watch()).await;
    boot.serves().await;
    let when = founding(site).await;
    boot.worker.stop().await;
    assert!(site.etcd_pids().is_empty());
    (founded.credentials, when)
}

fn nothing() -> NodeRoles {
    NodeRoles::default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_founded_once() {
    let site = Site::new();
    let boot = boot(&site);
    let data = bootstrap_data(&site, &OwnerKey::generate());
    let (roles, wanted) = (data.roles, data.seed.configuration.cluster_domain.clone());
    boot.bootstrap.set(Arc::new(data));
    let founded = next("the founding", &mut boot.founded.watch()).await;

    // When `founded` is set, the result is on the disk and the curator is listening.
    let node = site.root.data.node();
    let saved = credentials::load(&node.credentials()).unwrap().unwrap();
    assert_eq!(saved.certificate, founded.credentials.certificate);
    let assigned = rolefetch::load(&node.roles()).unwrap();
    assert_eq!(assigned.map(|assigned| assigned.roles), Some(roles));
    assert!(!pki::has_authority_keys(&site.root.data.etcd()).unwrap());
    let control_plane = boot.control_plane.get().unwrap();
    assert_eq!(control_plane.curator_port, Some(boot.curator.port()));
    let found = domain(&site, &founded.credentials, boot.curator.port()).await;
    assert_eq!(found, wanted);
    founding(&site).await;

    // The worker restarts before enrolment sets the member data.
    boot.roles.set(roles);
    boot.worker.is_healthy().await;
    boot.worker.is_fine();
    boot.roles.set(nothing());
    boot.worker
        .restarts("role consensus-member was removed")
        .await;
    assert!(boot.consensus.get().flatten().is_none());
    boot.ends(&site).await;
    // It idles, and no etcd data are left that could be taken for those of a member or of the
    // bootstrap node.
    boot.worker.is_healthy().await;
    until_wiped(&site).await;
    let kept = credentials::load(&node.credentials()).unwrap().unwrap();
    assert_eq!(kept.certificate, saved.certificate);
    boot.roles.set(roles);
    boot.worker
        .restarts("role consensus-member was added")
        .await;
    assert_never("a second founding", async {
        until("etcd", || site.root.data.etcd().data().exists()).await;
    })
    .await;
    boot.worker.stop().await;
    assert!(site.etcd_pids().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_founding_whose_end_was_not_heard_of_is_found_again() {
    let site = Site::new();
    let (credentials, when) = founded(&site).await;
    // The power was cut before enrolment had recorded the membership.
    let boot = boot(&site);
    let mut data = bootstrap_data(&site, &OwnerKey::generate());
    data.seed.owner = OwnerKey::generate().public();
    boot.bootstrap.set(Arc::new(data));
    let founded = next("the founding", &mut boot.founded.watch()).await;
    assert_eq!(founded.credentials.certificate, credentials.certificate);
    boot.serves().await;
    assert_eq!(founding(&site).await, when);
    boot.worker.is_fine();
    boot.worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_starts_what_its_roles_on_disk_say() {
    let site = Site::new();
    let (credentials, when) = founded(&site).await;
    let boot = boot(&site);
    boot.member.set(member(&credentials));
    // Nothing is started before the roles are known.
    assert!(site.etcd_pids().is_empty());
    boot.roles.set(consensus_member());
    boot.serves().await;
    assert_eq!(founding(&site).await, when);
    domain(&site, &credentials, boot.curator.port()).await;
    assert!(boot.founded.get().is_none());

    // An etcd that dies is restarted, and clients are available again.
    site.state.0.set(State::Home).unwrap();
    let client = |handle: &Option<Handle>| {
        hearth_consensus::client(handle.as_ref(), ConsensusUser::Curator).is_ok()
    };
    let old = boot.etcd_is("clients", client).await.unwrap();
    site.signal_etcd(nix::sys::signal::Signal::SIGKILL);
    until("the old handle fails", || {
        old.client(ConsensusUser::Curator).is_err()
    })
    .await;
    boot.etcd_is("clients of the new etcd", client).await;
    boot.worker.is_fine();
    boot.worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_comes_and_goes_ends_as_it_was_left() {
    let site = Site::new();
    let (credentials, _) = founded(&site).await;
    // The curator cannot start: its port is taken.
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let boot = boot_with(&site, taken.local_addr().unwrap());
    boot.member.set(member(&credentials));
    boot.roles.set(consensus_member());
    boot.etcd_is("etcd serves", Option::is_some).await;
    // Removed while it starts.
    boot.roles.set(nothing());
    boot.ends(&site).await;
    until_wiped(&site).await;
    drop(taken);

    // Added, removed, added within a second: not at once, but while the previous change is still
    // in progress, waiting for curators that do not exist.
    for roles in [joiner(7), nothing(), joiner(8)] {
        boot.roles.set(roles);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // Added and removed at once.
    for _ in 0..10 {
        boot.roles.set(nothing());
        tokio::task::yield_now().await;
        boot.roles.set(joiner(9));
        tokio::task::yield_now().await;
    }
    boot.roles.set(nothing());
    boot.ends(&site).await;
    until_wiped(&site).await;
    boot.worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_of_another_member_never_starts_the_data_of_the_first() {
    let site = Site::new();
    let (credentials, _) = founded(&site).await;
    let boot = boot(&site);
    boot.member.set(member(&credentials));
    boot.roles.set(joiner(7));
    until_wiped(&site).await;
    boot.roles.set(consensus_member());
    // The role of the bootstrap node does not start etcd again.
    assert_never("an etcd", async {
        until("etcd", || !site.etcd_pids().is_empty()).await;
    })
    .await;
    boot.worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disowned_node_ends_consensus_and_keeps_nothing_of_it() {
    let site = Site::new();
    let (credentials, _) = founded(&site).await;
    let boot = boot(&site);
    boot.member.set(member(&credentials));
    boot.roles.set(consensus_member());
    boot.serves().await;
    boot.disowned.set(Disowned);
    boot.ends(&site).await;
    until_wiped(&site).await;
    boot.worker.is_healthy().await;
    boot.worker.stop().await;
}

/// The role of a node that joins as this etcd member.
fn joiner(member_id: u64) -> NodeRoles {
    NodeRoles {
        consensus_member: Some(ConsensusMember { member_id }),
        ..NodeRoles::default()
    }
}

async fn until_wiped(site: &Site) {
    let etcd = site.root.data.etcd();
    let left = || member_record::find(&etcd).unwrap().anything;
    until("nothing of etcd is left", || !left()).await;
}
