//! Wires up a running node: enrolment, the workers, and the values through which they communicate.
//!
//! Each value is one fact with one writer (except `refusals`, a count that two workers increment).
//! No worker depends on another worker; they are connected only here. The fields of its `Worker`
//! declare what each one reads and writes, and the table in `docs/architecture.md` is generated
//! from them. A worker that fails restarts alone; the values keep what it wrote, so the others are
//! not affected.
//!
//! The first node and all later ones run the same workers: bootstrap differs only in where the
//! control plane takes its data from.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use hearth_agent::addresses::{self, AddressBook};
use hearth_agent::{
    certificates, connection, heartbeat, hosts, nodemgmt, rolefetch, statuspush, sysctls, time,
};
use hearth_api::names::{
    EXTENSION_KUBERNETES, PORT_CURATOR, PORT_ETCD_PEER, PORT_NODE_MANAGEMENT, PORT_UNLOCK,
    WATCH_SILENCE,
};
use hearth_api::tls;
use hearth_api::v1::KubernetesConfiguration;
use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_enrolment::asking::CuratorCaller;
use hearth_enrolment::sealed::SealedStore;
use hearth_enrolment::{driver, rejoin, unlocking};
use hearth_host::cluster_state::{self, ClusterState};
use hearth_host::console::report;
use hearth_host::directory::DirectoryStore;
use hearth_host::disks::volumes::{self, MachineDisks};
use hearth_host::esp_writes::EspWrites;
use hearth_host::extensions::Extensions;
use hearth_host::handover::{MemberData, TimeStatus};
use hearth_host::image::Image;
use hearth_host::layout::Root;
use hearth_host::network_control::NetworkControl;
use hearth_host::power::Power;
use hearth_host::prover::Prover;
use hearth_host::storage::{OwnedVolume, System, upkeep};
use hearth_host::{boot_record, parameters, pki};
use hearth_kubernetes::calendar::CertificateClock;
use hearth_kubernetes::{firewall, mesh};
use hearth_sys::block::Disk;
use hearth_sys::clock::Kernel;
use hearth_sys::{console, hostname, sysctl};
use tokio::time::Instant;

use crate::{controlplane, screen};

/// What boot has determined before the workers start.
pub struct Inputs {
    /// The paths of this node's files.
    pub root: Root,
    /// Version and build time of the running image.
    pub image: Image,
    /// The disk from which this machine was booted.
    pub boot_disk: Disk,
    /// Receives the log lines of child programs.
    pub log_tree: LogTree,
    /// Takes an operator's requests to reboot or power off.
    pub power: Power,
    /// The node parameters, or why they were rejected.
    pub parameters: Arc<parameters::Loaded>,
    /// The store of the sealed configuration on the ESP.
    pub sealed: Arc<SealedStore>,
    /// Proves what this machine has booted; none without a TPM.
    pub prover: Option<Arc<Prover>>,
    /// The extensions of the image, mounted or rejected.
    pub extensions: Arc<Extensions>,
    /// The address at which other nodes reach this node; written by the network worker.
    pub address: Value<IpAddr>,
    /// Its address of the other family, if it has one; written by the network worker.
    pub second_address: Value<Option<IpAddr>>,
    /// The MTU of the interface with the address, in bytes; written by the network worker.
    pub mtu: Value<u32>,
    /// What its network interfaces lack; written by the network worker.
    pub network_problems: Value<Vec<String>>,
    /// Calls of operators about the network.
    pub network_control: NetworkControl,
    /// The cluster's settings for Kubernetes; the network worker reads them, too.
    pub settings: Writer<Arc<KubernetesConfiguration>>,
    /// The time servers that DHCP names; written by the network worker.
    pub dhcp_time_servers: Value<Vec<IpAddr>>,
    /// How the last write of the boot record ended; none if it is not kept.
    pub boot_record: Option<Value<Option<String>>>,
    /// The writer of the state of the clock.
    pub time: Writer<TimeStatus>,
    /// The writer of the cluster state.
    pub cluster_state: cluster_state::Writer,
}

/// The workers below the runnable `role`.
struct RoleServer {
    controlplane: Arc<controlplane::Worker>,
    rolefetch: Arc<rolefetch::Worker>,
    connection: Arc<connection::Worker>,
    certificates: Arc<certificates::Worker>,
    heartbeat: Arc<heartbeat::Worker>,
    hosts: Arc<hosts::Worker>,
    addresses: Arc<addresses::Worker>,
    mesh: Arc<mesh::Worker<mesh::machine::Kernel>>,
    firewall: Arc<firewall::Worker>,
    kubernetes: Arc<hearth_kubernetes::Worker>,
    nodemgmt: Arc<nodemgmt::Worker>,
    statuspush: Arc<statuspush::Worker>,
    sysctls: Arc<sysctls::Worker>,
    volumes: Arc<volumes::Worker<MachineDisks>>,
}

/// Starts all workers below the root runnable. Returns the member data, which the debug service
/// shows.
pub fn start(ctx: &Context, inputs: Inputs) -> Result<Value<MemberData>, Failure> {
    let Inputs {
        root,
        image,
        boot_disk,
        log_tree,
        power,
        parameters,
        sealed,
        prover,
        extensions,
        address,
        second_address,
        mtu,
        network_problems,
        network_control,
        dhcp_time_servers,
        settings: settings_writer,
        boot_record: boot_record_written,
        time: time_writer,
        cluster_state: cluster_state_writer,
    } = inputs;
    let cluster_state: ClusterState = cluster_state_writer.value();
    let (bootstrap_writer, bootstrap) = event::value();
    let (member_writer, member) = event::value();
    let (founded_writer, founded) = event::value();
    let (status_writer, status) = event::value();
    let (waiting_writer, waiting) = event::value();
    let (owners_key_writer, owners_key) = event::value();
    let (refusals_writer, refusals) = event::value();
    let (unlock_settings_writer, unlock_settings) = event::value();
    let (recorded_writer, recorded) = event::value();
    let (disowned_writer, disowned) = event::value();
    let (enrolment_phase_writer, enrolment_phase) = event::value();
    let (connectivity_writer, connectivity) = event::value();
    let (local_roles_writer, local_roles) = event::value();
    let (node_settings_writer, node_settings) = event::value();
    let (refused_settings_writer, refused_settings) = event::value();
    let (disk_problems_writer, disk_problems) = event::value();
    let (data_volume_writer, data_volume) = event::value();
    let (control_plane_writer, control_plane) = event::value();
    let (consensus_writer, consensus) = event::value();
    let (connection_writer, connection) = event::value();
    let (acknowledged_writer, acknowledged) = event::value();
    let (curator_time_writer, curator_time) = event::value();
    let (storage_writer, storage) = event::value();
    let time_status = time_writer.value();
    let (directory_saved_writer, directory_saved) = event::value();
    let (directory_writer, directory) = event::value();
    let (view_writer, view) = event::value();
    let (own_address_writer, own_address) = event::value();
    let (conditions_writer, conditions) = event::value();
    let (may_have_pods_writer, may_have_pods) = event::value();
    let (pod_network_writer, pod_network) = event::value();
    let (network_policy_writer, network_policy) = event::value();
    let (packet_filter_writer, packet_filter) = event::value();
    let (book, learned) = AddressBook::new(tls::wall_clock());
    let refusals_writer = Arc::new(refusals_writer);
    // Of both families.
    let any = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let saved_directory = Arc::new(DirectoryStore::new(&root.esp));
    let esp_writes = EspWrites {
        boot_record: boot_record_written,
        directory: saved_directory.last_write().value(),
        sealed: sealed.last_write().value(),
    };
    let can_run_kubernetes = extensions.get(EXTENSION_KUBERNETES).is_ok();
    let asker = Arc::new(CuratorCaller::new(
        tls::wall_clock(),
        boot_record::boot_id()?,
        prover.clone(),
    ));

    let lifetime = pki::Lifetime::since_build(image.build_time);
    let time = Arc::new(time::Worker {
        clock: Arc::new(Kernel),
        build_time: image.build_time,
        end: lifetime.end(),
        parameters: match &*parameters {
            Ok(Some(found)) => found.parameters.time_servers.clone(),
            Ok(None) | Err(_) => Vec::new(),
        },
        port: PORT_NODE_MANAGEMENT,
        dhcp_time_servers,
        member: member.clone(),
        control_plane: control_plane.clone(),
        directory: directory.clone(),
        connection: connection.clone(),
        curator_time,
        time: time_writer,
    });
    let state = Arc::new(cluster_state::Worker {
        enrolment_phase,
        connectivity,
        disowned: disowned.clone(),
        address: address.clone(),
        cluster_state: cluster_state_writer,
    });
    let screen = Arc::new(screen::Worker {
        version: image.version.clone(),
        clock: tls::wall_clock(),
        started: Instant::now(),
        member: member.clone(),
        cluster_state: cluster_state.clone(),
        status,
        address: address.clone(),
        second_address: second_address.clone(),
        network_problems: network_problems.clone(),
        conditions: conditions.clone(),
    });
    let roles = Arc::new(RoleServer {
        controlplane: Arc::new(controlplane::Worker {
            root: root.clone(),
            image: image.clone(),
            log_tree: log_tree.clone(),
            etcd_peers: any(PORT_ETCD_PEER),
            curator: any(PORT_CURATOR),
            etcd: controlplane::ETCD.into(),
            etcd_quota: hearth_consensus::QUOTA,
            etcd_hash_check: hearth_consensus::HASH_CHECK_INTERVAL,
            timing: hearth_curator::Timing::default(),
            peer_proxy: None,
            bootstrap,
            member: member.clone(),
            local_roles: local_roles.clone(),
            cluster_state: cluster_state.clone(),
            disowned: disowned.clone(),
            time: time_status.clone(),
            view: view.clone(),
            connection: connection.clone(),
            ask_bound: controlplane::ASK_BOUND,
            prover: prover.clone(),
            founded: founded_writer,
            control_plane: control_plane_writer,
            consensus: consensus_writer,
        }),
        rolefetch: Arc::new(rolefetch::Worker {
            roles_file: root.data.node().roles(),
            silence: WATCH_SILENCE,
            member: member.clone(),
            connection: connection.clone(),
            local_roles: local_roles_writer,
            node_settings: node_settings_writer,
            refusals: refusals_writer.clone(),
        }),
        connection: Arc::new(connection::Worker {
            member: member.clone(),
            control_plane: control_plane.clone(),
            directory: directory.clone(),
            acknowledged: acknowledged.clone(),
            disowned,
            connectivity: connectivity_writer,
            connection: connection_writer,
        }),
        heartbeat: Arc::new(heartbeat::Worker {
            connection: connection.clone(),
            acknowledged: acknowledged_writer,
            refusals: refusals_writer,
            unlock_settings: unlock_settings_writer,
            curator_time: curator_time_writer,
        }),
        hosts: Arc::new(hosts::Worker {
            root: root.clone(),
            set_hostname: hostname::set,
            rest: hosts::REST,
            silence: WATCH_SILENCE,
            saved_directory: saved_directory.clone(),
            member: member.clone(),
            connection: connection.clone(),
            address: address.clone(),
            learned: learned.clone(),
            view: view_writer,
            directory: directory_writer,
            directory_saved: directory_saved_writer,
        }),
        addresses: Arc::new(addresses::Worker {
            file: root.data.node().address(),
            book: book.clone(),
            listen: any(PORT_NODE_MANAGEMENT),
            port: PORT_NODE_MANAGEMENT,
            each: addresses::EACH,
            link: addresses::link,
            member: member.clone(),
            address: address.clone(),
            directory,
            view: view.clone(),
            cluster_state: cluster_state.clone(),
            learned: learned.clone(),
            own_address: own_address_writer,
        }),
        mesh: Arc::new(mesh::Worker {
            file: root.data.node().mesh(),
            machine: mesh::machine::Kernel::default(),
            member: member.clone(),
            may_have_pods: may_have_pods.clone(),
            connection: connection.clone(),
            view: view.clone(),
            learned: learned.clone(),
            address: address.clone(),
            mtu,
            packet_filter: packet_filter.clone(),
            pod_network: pod_network_writer,
        }),
        firewall: Arc::new(firewall::Worker {
            extensions: extensions.clone(),
            member: member.clone(),
            view: view.clone(),
            learned: learned.clone(),
            address: address.clone(),
            may_have_pods,
            pod_network: pod_network.clone(),
            network_policy,
            settings: settings_writer.value(),
            packet_filter: packet_filter_writer,
        }),
        kubernetes: Arc::new(hearth_kubernetes::Worker {
            root: root.clone(),
            log_tree: log_tree.clone(),
            calendar: CertificateClock::of_this_machine(),
            extensions,
            control_plane_user: Some(hearth_kubernetes::CONTROL_PLANE_USER),
            cluster_state: cluster_state.clone(),
            member: member.clone(),
            connection: connection.clone(),
            consensus,
            local_roles,
            node_settings: node_settings.clone(),
            view: view.clone(),
            learned,
            address: address.clone(),
            second_address: second_address.clone(),
            pod_network,
            machine: Default::default(),
            may_have_pods: may_have_pods_writer,
            network_policy: network_policy_writer,
            settings: settings_writer,
            conditions: conditions_writer,
        }),
        nodemgmt: Arc::new(nodemgmt::Worker {
            listen: any(PORT_NODE_MANAGEMENT),
            log_tree,
            power: power.clone(),
            network_control,
            book,
            acknowledged: acknowledged.clone(),
            member: member.clone(),
            view: view.clone(),
            cluster_state: cluster_state.clone(),
            recorded: recorded.clone(),
            packet_filter,
        }),
        certificates: Arc::new(certificates::Worker {
            files: root.data.node().credentials(),
            member: member.clone(),
            connection: connection.clone(),
            prover: prover.clone(),
        }),
        sysctls: Arc::new(sysctls::Worker {
            proc_sys: sysctl::PROC_SYS.into(),
            before: Mutex::default(),
            node_settings: node_settings.clone(),
            refused_settings: refused_settings_writer,
        }),
        volumes: Arc::new(volumes::Worker {
            disks: MachineDisks {
                boot_disk: boot_disk.name.clone(),
            },
            data: root.data.clone(),
            node_settings,
            data_volume,
            disk_problems: disk_problems_writer,
            mounted: Mutex::default(),
        }),
        statuspush: Arc::new(statuspush::Worker {
            version: image.version.clone(),
            connection,
            own_address,
            control_plane,
            cluster_state,
            second_address,
            directory_saved,
            conditions,
            esp_writes,
            network_problems,
            refused_settings,
            disk_problems,
            view,
            recorded,
            time: time_status.clone(),
            storage: storage.clone(),
        }),
    });
    let rejoin = Arc::new(rejoin::Parts {
        root: root.clone(),
        sealed: sealed.clone(),
        saved_directory: saved_directory.clone(),
        asker: asker.clone(),
        report: Arc::new(report),
        power: power.clone(),
        at_most_every: rejoin::Parts::AT_MOST_EVERY,
        member: member.clone(),
        refusals,
        unlock_settings,
        recorded: recorded_writer,
        disowned: disowned_writer,
    });
    let further = MachineDisks {
        boot_disk: boot_disk.name.clone(),
    };
    let data = OwnedVolume::new(
        System::data_partition(boot_disk, can_run_kubernetes),
        root.data.path().to_owned(),
    );
    let data = Arc::new(Mutex::new(data));
    let upkeep = Arc::new(upkeep::Worker {
        data: data.clone(),
        report: Arc::new(report),
        storage,
    });
    let unlocking = Arc::new(unlocking::Worker {
        listen: any(PORT_UNLOCK),
        console: console::DEVICE.into(),
        data: data.clone(),
        saved_directory: saved_directory.clone(),
        waiting,
        owners_key: owners_key_writer,
    });
    let enrolment = Arc::new(driver::Parts {
        parameters,
        root,
        sealed,
        saved_directory,
        asker,
        prover,
        data,
        erase_disks: Arc::new(move |owner| volumes::erase_all(&further, owner)),
        lifetime,
        new_cluster: driver::ClusterPreparation::default(),
        can_run_kubernetes,
        report: Arc::new(report),
        console: console::DEVICE.into(),
        power,
        waiting: waiting_writer,
        owners_key,
        address,
        time: time_status,
        founded,
        storage: storage_writer,
        data_volume: data_volume_writer,
        bootstrap: bootstrap_writer,
        member: member_writer,
        status: status_writer,
        enrolment_phase: enrolment_phase_writer,
    });
    ctx.run_worker("state", &state, cluster_state::run)?;
    ctx.run_worker("screen", &screen, screen::run)?;
    ctx.run_worker("time", &time, time::run)?;
    ctx.run_worker("role", &roles, serve_roles)?;
    ctx.run_worker("rejoin", &rejoin, rejoin::run)?;
    ctx.run_worker("unlock", &unlocking, unlocking::run)?;
    ctx.run_worker("storage", &upkeep, upkeep::run)?;
    ctx.run_worker("enrolment", &enrolment, driver::run)?;
    Ok(member)
}

/// Starts the workers of [`RoleServer`].
async fn serve_roles(ctx: Context, roles: Arc<RoleServer>) -> Outcome {
    ctx.run_restartable("controlplane", &roles.controlplane, controlplane::run)?;
    ctx.run_worker("rolefetch", &roles.rolefetch, rolefetch::run)?;
    ctx.run_worker("membership", &roles.connection, connection::run)?;
    ctx.run_worker("certificates", &roles.certificates, certificates::run)?;
    ctx.run_worker("heartbeat", &roles.heartbeat, heartbeat::run)?;
    ctx.run_worker("hosts", &roles.hosts, hosts::run)?;
    ctx.run_worker("addresses", &roles.addresses, addresses::run)?;
    ctx.run_worker("firewall", &roles.firewall, firewall::run)?;
    ctx.run_worker("mesh", &roles.mesh, mesh::run)?;
    ctx.run_worker("kubernetes", &roles.kubernetes, hearth_kubernetes::run)?;
    ctx.run_worker("nodemgmt", &roles.nodemgmt, nodemgmt::run)?;
    ctx.run_worker("statuspush", &roles.statuspush, statuspush::run)?;
    ctx.run_worker("sysctls", &roles.sysctls, sysctls::run)?;
    ctx.run_worker("volumes", &roles.volumes, volumes::run)?;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}
