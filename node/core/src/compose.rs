//! The role server: the workers that live by what this node is.
//!
//! | worker | reads | writes |
//! |---|---|---|
//! | [`controlplane`] | bootstrap data, member data, local roles, curator connection, disowned | control plane, founded |
//! | [`rolefetch`] | member data, curator connection | local roles, refusals |
//! | [`membership`] | member data, control plane, directory, acknowledgements, disowned | curator connection, cluster state |
//! | [`heartbeat`] | curator connection | acknowledgements, refusals |
//! | [`statuspush`] | curator connection, own address, control plane, cluster state, directory saved, conditions | – |
//! | [`hosts`] | member data, curator connection, address, learned addresses | view, directory, directory saved |
//! | [`addresses`] | member data, address, directory, view, cluster state | own address, learned addresses |
//! | [`mesh`] | member data, local roles, curator connection, view, learned addresses, address | pod network |
//! | [`nodemgmt`] | member data, view, cluster state | – |
//! | [`kubernetes`] | member data, local roles, control plane, curator connection, view, own address, pod network, cluster state | conditions |
//!
//! Each value is one fact with one writer (refusals alone, a count, has two
//! that add to it), and a worker knows no other worker:
//! they are joined here and nowhere else. A worker that fails restarts alone;
//! the values keep what it wrote, so the others do not notice.
//!
//! Metrics, on port 7838, will be one more worker of this kind: it reads the
//! supervisor's tree and the control plane, and writes nothing.
//!
//! The first node and all later ones go the same way: a founding differs only
//! in where the control plane takes its data from.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hearth_agent::addresses::{self, Book};
use hearth_agent::{
    CuratorConnection, LocalControlPlane, Located, View, connection, heartbeat, hosts, nodemgmt,
    rolefetch, statuspush,
};
use hearth_api::names::{PORT_CURATOR, PORT_ETCD_PEER, PORT_NODE_MANAGEMENT, WATCH_SILENCE};
use hearth_api::tls;
use hearth_api::v1::{ClusterDirectory, NodeCondition, NodeRoles};
use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Outcome};
use hearth_host::cluster_state::{ClusterState, Desk};
use hearth_host::extensions::Extensions;
use hearth_host::handover::{
    BootstrapData, Disowned, Founded, MayHavePods, MemberData, PodNetwork, Refusals,
};
use hearth_host::image::Image;
use hearth_host::layout::Root;
use hearth_host::power::Power;
use hearth_kubernetes::calendar::Calendar;
use hearth_kubernetes::mesh;
use hearth_sys::hostname;
use tokio::time::Instant;

use crate::controlplane;

/// What the role server is given.
pub struct Inputs {
    /// Where things lie.
    pub root: Root,
    /// What runs.
    pub image: Image,
    /// Takes etcd's log lines.
    pub log_tree: LogTree,
    /// Under which others reach this node.
    pub address: Value<IpAddr>,
    /// From enrolment.
    pub bootstrap: Value<Arc<BootstrapData>>,
    /// From enrolment.
    pub member: Value<MemberData>,
    /// To enrolment.
    pub founded: Arc<Writer<Founded>>,
    /// From enrolment.
    pub disowned: Value<Disowned>,
    /// To enrolment.
    pub refusals: Arc<Writer<Refusals>>,
    /// Goes down when an operator asks for it.
    pub power: Power,
    /// Where the membership worker finds the cluster state's writer, once
    /// enrolment has laid it there.
    pub desk: Desk,
    /// The same state, to read.
    pub cluster_state: ClusterState,
    /// What rides along with the image. Does not change before the next boot.
    pub extensions: Arc<Extensions>,
}

/// Starts the workers.
pub async fn run(ctx: Context, inputs: Arc<Inputs>) -> Outcome {
    let (roles_writer, local_roles) = event::value::<NodeRoles>();
    let (control_plane_writer, control_plane) = event::value::<LocalControlPlane>();
    let (consensus_writer, consensus) = event::value();
    let (connection_writer, connection) = event::value::<CuratorConnection>();
    let (acknowledged_writer, acknowledged) = event::value::<Instant>();
    let (saved_writer, directory_saved) = event::value::<IpAddr>();
    let (directory_writer, directory) = event::value::<ClusterDirectory>();
    let (view_writer, view) = event::value::<Arc<View>>();
    let (own_writer, own_address) = event::value::<Located>();
    let (conditions_writer, conditions) = event::value::<Vec<NodeCondition>>();
    let (may_have_pods_writer, may_have_pods) = event::value::<MayHavePods>();
    let (pod_network_writer, pod_network) = event::value::<Option<PodNetwork>>();
    let (book, learned) = Book::new(tls::wall_clock());

    let any = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let worker = Arc::new(controlplane::Worker {
        inputs: inputs.clone(),
        etcd_peers: any(PORT_ETCD_PEER),
        curator: any(PORT_CURATOR),
        etcd: controlplane::ETCD.into(),
        etcd_quota: hearth_consensus::QUOTA,
        timing: hearth_curator::Timing::default(),
        peer_proxy: None,
        local_roles: local_roles.clone(),
        connection: connection.clone(),
        control_plane: control_plane_writer,
        consensus: consensus_writer,
    });
    ctx.run("controlplane", move |ctx| {
        controlplane::run(ctx, worker.clone())
    })?;
    let worker = Arc::new(rolefetch::Worker {
        roles_file: inputs.root.data.node().roles(),
        silence: WATCH_SILENCE,
        member: inputs.member.clone(),
        connection: connection.clone(),
        local_roles: roles_writer,
        refusals: inputs.refusals.clone(),
    });
    ctx.run("rolefetch", move |ctx| rolefetch::run(ctx, worker.clone()))?;
    let worker = Arc::new(connection::Worker {
        member: inputs.member.clone(),
        control_plane: control_plane.clone(),
        directory: directory.clone(),
        acknowledged,
        disowned: inputs.disowned.clone(),
        desk: inputs.desk.clone(),
        connection: connection_writer,
    });
    ctx.run("membership", move |ctx| {
        connection::run(ctx, worker.clone())
    })?;
    let worker = Arc::new(heartbeat::Worker {
        connection: connection.clone(),
        acknowledged: acknowledged_writer,
        refusals: inputs.refusals.clone(),
    });
    ctx.run("heartbeat", move |ctx| heartbeat::run(ctx, worker.clone()))?;
    let worker = Arc::new(hosts::Worker {
        root: inputs.root.clone(),
        set_hostname: hostname::set,
        rest: hosts::REST,
        silence: WATCH_SILENCE,
        writing: Arc::default(),
        member: inputs.member.clone(),
        connection: connection.clone(),
        address: inputs.address.clone(),
        learned: learned.clone(),
        view: view_writer,
        directory: directory_writer,
        directory_saved: saved_writer,
    });
    ctx.run("hosts", move |ctx| hosts::run(ctx, worker.clone()))?;
    let worker = Arc::new(addresses::Worker {
        file: inputs.root.data.node().address(),
        book: book.clone(),
        listen: any(PORT_NODE_MANAGEMENT),
        port: PORT_NODE_MANAGEMENT,
        each: addresses::EACH,
        link: addresses::link,
        member: inputs.member.clone(),
        address: inputs.address.clone(),
        directory,
        view: view.clone(),
        cluster_state: inputs.cluster_state.clone(),
        learned: learned.clone(),
        own_address: own_writer,
    });
    ctx.run("addresses", move |ctx| addresses::run(ctx, worker.clone()))?;
    let worker = Arc::new(mesh::Worker {
        file: inputs.root.data.node().mesh(),
        machine: mesh::machine::Kernel::default(),
        extensions: inputs.extensions.clone(),
        member: inputs.member.clone(),
        may_have_pods,
        connection: connection.clone(),
        view: view.clone(),
        learned: learned.clone(),
        address: inputs.address.clone(),
        pod_network: pod_network_writer,
    });
    ctx.run("mesh", move |ctx| mesh::run(ctx, worker.clone()))?;
    let parts = Arc::new(hearth_kubernetes::Parts {
        root: inputs.root.clone(),
        log_tree: inputs.log_tree.clone(),
        calendar: Calendar::of_this_machine(),
        extensions: inputs.extensions.clone(),
        cluster_state: inputs.cluster_state.clone(),
        member: inputs.member.clone(),
        connection: connection.clone(),
        consensus,
        local_roles: local_roles.clone(),
        view: view.clone(),
        learned: learned.clone(),
        address: inputs.address.clone(),
        pod_network,
        machine: Default::default(),
        may_have_pods: may_have_pods_writer,
        conditions: conditions_writer,
    });
    ctx.run("kubernetes", move |ctx| {
        hearth_kubernetes::run(ctx, parts.clone())
    })?;
    let worker = Arc::new(nodemgmt::Worker {
        listen: any(PORT_NODE_MANAGEMENT),
        log_tree: inputs.log_tree.clone(),
        power: inputs.power.clone(),
        book,
        member: inputs.member.clone(),
        view,
        cluster_state: inputs.cluster_state.clone(),
    });
    ctx.run("nodemgmt", move |ctx| nodemgmt::run(ctx, worker.clone()))?;
    let worker = Arc::new(statuspush::Worker {
        version: inputs.image.version.clone(),
        connection,
        own_address,
        control_plane,
        cluster_state: inputs.cluster_state.clone(),
        directory_saved,
        conditions,
    });
    ctx.run("statuspush", move |ctx| {
        statuspush::run(ctx, worker.clone())
    })?;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}
