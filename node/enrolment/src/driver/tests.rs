//! The driver with a real ESP directory, a data partition in a file, real certificate authorities,
//! and a fake control plane that writes to the disk what the real one does.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex as StdMutex;
use std::time::{SystemTime, UNIX_EPOCH};

use hearth_api::proofs::AfterRemoval;
use hearth_api::recovery::RecoveryKey;
use hearth_api::testing::TestCurator;
use hearth_api::tls::wall_clock;
use hearth_api::v1::{
    ClusterBootstrap, ClusterConfiguration, ColdStartPolicy, NodeParameters, StorageSecurity,
    StorageSecurityPolicy, TpmMode, cluster_directory, node_parameters,
};
use hearth_base::supervisor::{Options, Supervisor, runnable};
use hearth_base::testing::within_timeout;
use hearth_host::cluster_state::{self, ClusterState, State};
use hearth_host::parameters::{Found, Source};
use hearth_host::pki::Holder;
use hearth_host::storage::header::HeaderState;
use hearth_host::storage::testing::Files;
use prost::Message as _;
use rustls_pki_types::CertificateDer;

use super::super::testing;
use super::*;
use crate::sealed::Stored;
use crate::unlocking;

/// The state that survives a power cut.
pub(crate) struct Machine {
    _dir: tempfile::TempDir,
    pub(crate) root: Root,
    pub(crate) files: Files,
    /// Where the owner can unlock it.
    pub(crate) unlock_at: SocketAddr,
    /// A file that is not there, unless a test sets another.
    pub(crate) console: PathBuf,
    /// That of the certificates that its image makes.
    lifetime: pki::Lifetime,
}

/// One boot of the machine.
pub(crate) struct Boot {
    supervisor: Supervisor,
    reports: Arc<StdMutex<Vec<Report>>>,
    pub(crate) state: ClusterState,
    pub(crate) member: event::Value<MemberData>,
    status: event::Value<EnrolmentStatus>,
    address: Option<event::Writer<IpAddr>>,
    power: Power,
}

/// An address of this machine at which nobody listens.
fn free_address() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

impl Machine {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::under(dir.path());
        fs::create_dir(root.esp.path()).unwrap();
        Self {
            files: Files::new(dir.path()),
            console: dir.path().join("console"),
            unlock_at: free_address(),
            lifetime: pki::Lifetime::since_build(SystemTime::now()),
            root,
            _dir: dir,
        }
    }

    /// A member of the cluster with this CA, powered off, whose directory has these curators, in this order. It has no
    /// credentials.
    pub(crate) fn of_member(
        founding: &Founding,
        ca: &CertificateDer<'static>,
        curators: &[&TestCurator],
    ) -> Self {
        let machine = Self::new();
        let volume = founding.volume();
        let mut data = OwnedVolume::new(
            machine.files.rebooted(),
            machine.root.data.path().to_owned(),
        );
        data.initialise(&volume).unwrap();
        data.make_file_system(&volume, &mut |_| {}).unwrap();
        data.mark_ready(&volume).unwrap();
        let member = founding.into_member(ca.clone());
        SealedStore::new(&machine.root.esp, None)
            .save(&Sealed::Member(Arc::new(member)))
            .unwrap();
        let nodes = curators.iter().map(|curator| cluster_directory::Node {
            id: curator.node_id.to_string(),
            addresses: vec![cluster_directory::Address {
                host: curator.address.ip().to_string(),
                port: curator.address.port().into(),
            }],
            roles: None,
        });
        let directory = ClusterDirectory {
            nodes: nodes.collect(),
        };
        DirectoryStore::new(&machine.root.esp)
            .save(&directory)
            .unwrap();
        machine
    }

    /// Powers it on with these parameters; the network has an address at once.
    pub(crate) fn boot(&self, parameters: parameters::Loaded) -> Boot {
        let boot = self.boot_without_address(parameters);
        let address = IpAddr::from([192, 0, 2, 1]);
        boot.address.as_ref().unwrap().set(address);
        boot
    }

    fn boot_without_address(&self, parameters: parameters::Loaded) -> Boot {
        let (cluster_state, state) = cluster_state::new();
        let (phase_writer, enrolment_phase) = event::value();
        let (address_writer, address) = event::value();
        let (bootstrap_writer, bootstrap) = event::value();
        let (founded_writer, founded) = event::value();
        let (member_writer, member) = event::value();
        let (standing_writer, status) = event::value();
        let (waiting, waits) = event::value();
        let (owners_key_writer, owners_key) = event::value();
        let reports = Arc::new(StdMutex::new(Vec::new()));
        let power = Power::default();
        let data = Arc::new(Mutex::new(OwnedVolume::new(
            self.files.rebooted(),
            self.root.data.path().to_owned(),
        )));
        let unlocking = Arc::new(unlocking::Worker {
            listen: self.unlock_at,
            console: self.console.clone(),
            data: data.clone(),
            saved_directory: Arc::new(DirectoryStore::new(&self.root.esp)),
            waiting: waits,
            owners_key: owners_key_writer,
        });
        let parts = Arc::new(Parts {
            parameters: Arc::new(parameters),
            root: self.root.clone(),
            sealed: Arc::new(SealedStore::new(&self.root.esp, None)),
            saved_directory: Arc::new(DirectoryStore::new(&self.root.esp)),
            asker: Arc::new(CuratorCaller::new(wall_clock(), "boot".into(), None)),
            prover: None,
            data,
            erase_disks: Arc::new(|_| Ok(())),
            lifetime: self.lifetime,
            new_cluster: ClusterPreparation::default(),
            can_run_kubernetes: false,
            report: {
                let reports = reports.clone();
                Arc::new(move |report| reports.lock().unwrap().push(report.clone()))
            },
            console: self.console.clone(),
            power: power.clone(),
            waiting,
            owners_key,
            address: address.clone(),
            time: event::value().1,
            founded,
            storage: event::value().0,
            data_volume: event::value().0,
            bootstrap: bootstrap_writer,
            member: member_writer,
            status: standing_writer,
            enrolment_phase: phase_writer,
        });
        let state_worker = Arc::new(cluster_state::Worker {
            enrolment_phase,
            connectivity: event::value().1,
            disowned: event::value().1,
            address: address.clone(),
            cluster_state,
        });
        let root = self.root.clone();
        let founded = Arc::new(founded_writer);
        let top = runnable(move |ctx: Context| {
            let (parts, root) = (parts.clone(), root.clone());
            let (bootstrap, founded) = (bootstrap.clone(), founded.clone());
            let state_worker = state_worker.clone();
            let unlocking = unlocking.clone();
            async move {
                ctx.run_worker("unlock", &unlocking, unlocking::run)?;
                ctx.run("state", move |ctx| {
                    cluster_state::run(ctx, state_worker.clone())
                })?;
                ctx.run("enrolment", move |ctx| run(ctx, parts.clone()))?;
                ctx.run("controlplane", move |ctx| {
                    control_plane(ctx, root.clone(), bootstrap.clone(), founded.clone())
                })?;
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
        });
        Boot {
            supervisor: Supervisor::start(top, Options::default()),
            reports,
            state,
            member,
            status,
            address: Some(address_writer),
            power,
        }
    }

    pub(crate) fn sealed(&self) -> Sealed {
        match SealedStore::new(&self.root.esp, None).load().unwrap() {
            Stored::Sealed(sealed) => sealed,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn header(&self) -> HeaderState {
        let mut data = OwnedVolume::new(self.files.rebooted(), self.root.data.path().to_owned());
        data.inspect().unwrap()
    }

    fn disk(&self) -> Vec<u8> {
        fs::read(self.files.device_path()).unwrap()
    }
}

/// What the control plane leaves on the disk after a bootstrap.
async fn control_plane(
    ctx: Context,
    root: Root,
    bootstrap: event::Value<Arc<BootstrapData>>,
    founded: Arc<event::Writer<Founded>>,
) -> Outcome {
    ctx.healthy();
    let mut bootstrap = bootstrap.watch();
    let data = tokio::select! {
        data = bootstrap.next() => data?,
        () = ctx.cancelled() => return Ok(()),
    };
    let (etcd, files) = (root.data.etcd(), root.data.node().credentials());
    let credentials = match credentials::load(&files)? {
        Some(credentials) => credentials,
        None => {
            let authority = pki::load(&etcd, data.cluster_id)?.cluster;
            let key = data.node_key.public();
            let holder = Holder::node(data.cluster_id, data.node_id, key, Vec::new());
            let valid = Duration::from_secs(3600);
            let credentials = NodeCredentials {
                key: data.node_key.clone(),
                certificate: authority.issue_leaf(&holder, SystemTime::now(), valid)?,
                ca: authority.certificate().clone(),
            };
            credentials::save(&files, &credentials)?;
            credentials
        }
    };
    pki::remove_authority_keys(&etcd)?;
    founded.set(Founded {
        own: hearth_api::testing::own(&credentials),
        credentials: Arc::new(credentials),
    });
    ctx.cancelled().await;
    Ok(())
}

impl Boot {
    /// Waits for a status of enrolment.
    pub(crate) async fn until(
        &self,
        wanted: impl FnMut(&EnrolmentStatus) -> bool,
    ) -> EnrolmentStatus {
        let mut status = self.status.watch();
        let reached = status.wait_for(wanted);
        tokio::time::timeout(Duration::from_secs(60), reached)
            .await
            .expect("enrolment should reach this status")
            .unwrap()
    }

    pub(crate) async fn settled(&self) -> MemberData {
        self.until(|status| *status == EnrolmentStatus::Settled)
            .await;
        self.member.get().unwrap()
    }

    pub(crate) async fn becomes(&self, state: State) {
        let mut states = self.state.watch();
        let reached = states.wait_for(|now| *now == state);
        within_timeout("the cluster state", reached).await.unwrap();
    }

    /// The console output, after a power cut.
    pub(crate) async fn off(self) -> Vec<String> {
        self.supervisor.shutdown().await;
        let reports = self.reports.lock().unwrap();
        reports.iter().map(Report::to_string).collect()
    }
}

fn input(policy: StorageSecurityPolicy, wipe: Option<u8>) -> parameters::Loaded {
    Ok(Some(Found {
        source: Source::FwCfg,
        parameters: testing::bootstrap(policy, wipe),
        ignored: Vec::new(),
    }))
}

#[tokio::test]
async fn a_machine_founds_its_cluster_and_returns_to_it() {
    let machine = Machine::new();
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    let first = boot.settled().await;
    boot.becomes(State::Home).await;
    assert_eq!(boot.off().await, ["hearth: reached storage insecure"]);

    let Sealed::Member(member) = machine.sealed() else {
        panic!("not a member");
    };
    assert_eq!(member.cluster_ca, *first.own.ca().certificate());
    assert_eq!(member.identity.cluster_id, first.own.cluster());
    assert!(!pki::has_authority_keys(&machine.root.data.etcd()).unwrap());

    // A reboot without parameters, and one with invalid parameters.
    let bad = parameters::parse(Source::Esp, b"?").unwrap_err();
    for parameters in [Ok(None), Err(bad)] {
        let boot = machine.boot(parameters);
        let again = boot.settled().await;
        assert_eq!(again.own.node(), first.own.node());
        assert_eq!(again.own.certificate(), first.own.certificate());
        assert_eq!(
            boot.state.get(),
            State::Unknown,
            "until its cluster answers"
        );
        boot.off().await;
    }
}

#[tokio::test]
async fn a_clock_past_the_end_of_certificates_is_told() {
    let year = Duration::from_secs(365 * 24 * 3600);
    let mut machine = Machine::new();
    machine.lifetime = pki::Lifetime::since_build(UNIX_EPOCH + year);
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    let refused = |status: &EnrolmentStatus| match status {
        EnrolmentStatus::Refused(why) => why.contains("would create end on 1990-12-"),
        _ => false,
    };
    boot.until(refused).await;
    boot.off().await;
    assert_eq!(machine.header(), HeaderState::Blank);
    let store = SealedStore::new(&machine.root.esp, None);
    assert!(matches!(store.load().unwrap(), Stored::Absent));

    let founding = testing::founding(1, StorageSecurity::Insecure);
    let founder = pki::Bootstrapper {
        cluster_id: founding.identity.cluster_id,
        node_id: founding.identity.node_id,
        node_key: &founding.node_key,
    };
    let make = || pki::NewCluster::make(&founder, machine.lifetime);
    let etcd = machine.root.data.etcd();
    machine.root.data.make_directories().unwrap();
    let ca = pki::found(&etcd, &founder, make).unwrap();
    let machine = Machine::of_member(&founding, &ca, &[]);
    let boot = machine.boot(Ok(None));
    let waits = |status: &EnrolmentStatus| match status {
        EnrolmentStatus::Retrying { reason, .. } => {
            reason.contains("the certificates of its cluster end on 1990-12-")
        }
        _ => false,
    };
    boot.until(waits).await;
    boot.off().await;
}

#[tokio::test]
async fn nothing_is_made_before_there_is_an_address() {
    let machine = Machine::new();
    let boot = machine.boot_without_address(input(StorageSecurityPolicy::NeedsInsecure, None));
    let waits = EnrolmentStatus::Working("get an address".into());
    boot.until(|status| *status == waits).await;
    assert_eq!(machine.header(), HeaderState::Blank);
    let store = SealedStore::new(&machine.root.esp, None);
    assert!(matches!(store.load().unwrap(), Stored::Absent));
    let address = IpAddr::from([192, 0, 2, 1]);
    boot.address.as_ref().unwrap().set(address);
    boot.settled().await;
    boot.off().await;
}

/// Parameters for an encrypted cluster.
fn encrypted(change: impl FnOnce(&mut ClusterBootstrap)) -> parameters::Loaded {
    let message = testing::bootstrap_message(StorageSecurityPolicy::NeedsEncryption, None);
    let mut message = NodeParameters::decode(&message[..]).unwrap();
    match &mut message.cluster {
        Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)) => change(bootstrap),
        other => panic!("{other:?}"),
    }
    Ok(Some(Found {
        source: Source::FwCfg,
        parameters: parameters::parse(Source::FwCfg, &message.encode_to_vec()).unwrap(),
        ignored: Vec::new(),
    }))
}

fn configuration(bootstrap: &mut ClusterBootstrap) -> &mut ClusterConfiguration {
    bootstrap
        .initial_cluster_configuration
        .get_or_insert_default()
}

#[tokio::test]
async fn a_machine_without_a_tpm_founds_nothing_where_one_is_required() {
    let required = encrypted(|b| configuration(b).tpm_mode = TpmMode::Required.into());
    let undecided = encrypted(|b| configuration(b).cold_start_policy = 0);
    let is_refused = |status: &EnrolmentStatus| matches!(status, EnrolmentStatus::Refused(_));
    for (parameters, expected) in [
        (required, "tpm_mode: expected a TPM "),
        (undecided, "cold_start_policy: expected a TPM "),
    ] {
        let machine = Machine::new();
        let boot = machine.boot(parameters);
        let EnrolmentStatus::Refused(reason) = boot.until(is_refused).await else {
            panic!("not refused");
        };
        assert!(reason.starts_with(expected), "{reason}");
        boot.off().await;
        assert_eq!(machine.header(), HeaderState::Blank);
        let store = SealedStore::new(&machine.root.esp, None);
        assert!(matches!(store.load().unwrap(), Stored::Absent));
    }
}

#[tokio::test]
async fn a_machine_without_a_tpm_founds_with_the_owner_where_no_policy_is_configured() {
    let machine = Machine::new();
    let boot = machine.boot(encrypted(|bootstrap| {
        configuration(bootstrap).cold_start_policy = 0;
        bootstrap.accept_loss = false;
        let recipient = RecoveryKey::generate().recipient();
        bootstrap.recovery_recipient = recipient.as_bytes().to_vec();
    }));
    boot.settled().await;
    boot.off().await;
    let Sealed::Member(member) = machine.sealed() else {
        panic!("not a member");
    };
    assert_eq!(member.identity.cold_start_policy, ColdStartPolicy::Owner);
}

/// No curator that has the key can be reached.
#[tokio::test]
async fn an_encrypted_member_without_a_cluster_says_what_it_lacks() {
    let machine = Machine::new();
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsEncryption, None));
    boot.settled().await;
    assert_eq!(boot.off().await, ["hearth: reached storage encrypted"]);
    let boot = machine.boot(Ok(None));
    boot.until(|status| matches!(status, EnrolmentStatus::Retrying { .. }))
        .await;
    assert_eq!(boot.state.get(), State::Unknown);
    assert_eq!(
        boot.off().await,
        [
            "hearth: waiting for a retry: cannot get the unlock key from the cluster: \
             no address of a curator is known. Only the running cluster can unlock this node: its cold-start policy is NONE"
        ]
    );
}

/// A machine that is off, and has founded a cluster.
async fn insecure_member() -> (Machine, Arc<Member>) {
    let machine = Machine::new();
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    boot.settled().await;
    boot.off().await;
    match machine.sealed() {
        Sealed::Member(member) => (machine, member),
        other => panic!("{other:?}"),
    }
}

/// The keys are wiped, then the power is cut: the next boot wipes the rest and reports it.
#[tokio::test]
async fn a_boot_in_phase_disowned_wipes_and_does_nothing_else() {
    let (machine, member) = insecure_member().await;
    disowning::seal(
        &SealedStore::new(&machine.root.esp, None),
        member.into_disowned(AfterRemoval::Wait),
    )
    .unwrap();
    let key = machine.root.data.node().credentials().key();
    assert!(key.exists());
    // Twice, with the parameters of the first enrolment.
    for _ in 0..2 {
        let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
        boot.until(|status| matches!(status, EnrolmentStatus::Waiting { .. }))
            .await;
        boot.becomes(State::Disowning).await;
        assert!(boot.member.get().is_none());
        let reports = boot.off().await;
        let wanted = "hearth: waiting for new parameters: cluster ";
        assert!(reports[0].starts_with(wanted), "{reports:?}");
        assert!(!key.exists() && !machine.root.data.etcd().path().exists());
        assert!(matches!(machine.sealed(), Sealed::Disowned(_)));
    }
}

/// The order to reset it was recorded, then the power was cut: the next boot destroys everything, and the one after that enrols.
#[tokio::test]
async fn a_machine_that_is_reset_enrols_like_a_new_one() {
    let (machine, member) = insecure_member().await;
    let store = || SealedStore::new(&machine.root.esp, None);
    disowning::seal(&store(), member.into_disowned(AfterRemoval::Reset)).unwrap();
    let key = machine.root.data.node().credentials().key();
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    let asked = within_timeout("a restart", boot.power.asked()).await;
    assert_eq!(asked, PowerRequest::Reboot);
    boot.becomes(State::Disowning).await;
    assert!(!key.exists());
    boot.off().await;
    let stored = store().load().unwrap();
    assert!(matches!(stored, Stored::Absent), "{stored:?}");
    assert_eq!(machine.header(), HeaderState::Blank);
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    boot.settled().await;
    boot.off().await;
    let enrolment = machine.sealed().enrolment_id();
    assert_ne!(enrolment, member.identity.enrolment_id);
}

/// FAULTS 11: with bootstrap parameters present.
#[tokio::test]
async fn a_corrupt_sealed_configuration_is_refused_and_the_disk_not_touched() {
    let machine = Machine::new();
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    boot.settled().await;
    boot.off().await;
    let enrolment = machine.sealed().enrolment_id();
    let paths = machine.root.esp.sealed_configuration().paths();
    for path in &paths {
        fs::write(path, [0x55; 700]).unwrap();
    }
    let before = machine.disk();
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsInsecure, None));
    boot.until(|status| matches!(status, EnrolmentStatus::Refused(_)))
        .await;
    let reports = boot.off().await;
    assert!(reports[0].starts_with("hearth: refused "), "{reports:?}");
    assert!(
        reports[0].ends_with(&format!(
            "set wipe.enrolment_id = {enrolment} in the parameters"
        )),
        "{reports:?}"
    );
    assert!(machine.disk() == before, "untouched");
    for path in &paths {
        assert_eq!(fs::read(path).unwrap(), [0x55; 700], "untouched");
    }

    // A wipe token with the ID in the message.
    let mut wiping = testing::bootstrap(StorageSecurityPolicy::NeedsInsecure, None);
    wiping.wipe = Some(enrolment);
    let boot = machine.boot(Ok(Some(Found {
        source: Source::Esp,
        parameters: wiping,
        ignored: Vec::new(),
    })));
    boot.settled().await;
    boot.off().await;
    assert_ne!(machine.sealed().enrolment_id(), enrolment);
}

#[tokio::test]
async fn no_parameters_or_bad_ones_are_refused_with_the_reason() {
    let machine = Machine::new();
    let bad = parameters::parse(Source::FwCfg, b"").unwrap_err();
    for (parameters, wanted) in [
        (Ok(None), "hearth: refused no parameters in any source"),
        (
            Err(bad),
            "hearth: refused parameters from fw_cfg opt/dev.hearth/parameters.pb: empty",
        ),
    ] {
        let boot = machine.boot(parameters);
        boot.until(|status| matches!(status, EnrolmentStatus::Refused(_)))
            .await;
        let reports = boot.off().await;
        assert!(reports[0].starts_with(wanted), "{reports:?}");
    }
    assert_eq!(machine.header(), HeaderState::Blank);
}

/// The disk fails at each step in turn, and recovers: the reason is shown, and enrolment completes.
#[tokio::test]
async fn a_failing_disk_is_reported_and_tried_again() {
    // Concurrently, because each waits half a second before it retries.
    futures::future::join_all((0..13).map(fails_after)).await;
}

async fn fails_after(steps: u32) {
    let machine = Machine::new();
    machine.files.fail_after(steps);
    let boot = machine.boot(input(StorageSecurityPolicy::NeedsEncryption, None));
    let status = boot
        .until(|status| {
            matches!(
                status,
                EnrolmentStatus::Retrying { .. } | EnrolmentStatus::Settled
            )
        })
        .await;
    machine.files.fail_after(u32::MAX);
    boot.settled().await;
    let reports = boot.off().await;
    if status == EnrolmentStatus::Settled {
        assert!(steps > 10, "{steps} steps are not enough");
    } else {
        let tried = "hearth: waiting for a retry: cannot ";
        assert!(reports[0].starts_with(tried), "{reports:?}");
        assert!(reports[0].contains("injected"), "{reports:?}");
    }
}

/// Power cuts between all tasks, with the real stores: a boot is ended at each status in turn, and
/// the next one continues.
#[tokio::test]
async fn a_boot_that_ends_anywhere_is_continued_by_the_next() {
    let machine = Machine::new();
    let input = || {
        input(
            StorageSecurityPolicy::NeedsEncryptionAndAuthentication,
            None,
        )
    };
    let stops = [
        "generate keys",
        "save the sealed configuration",
        "initialise the data partition",
        "create the file system",
        "mark the data partition ready",
        "mount the data partition",
        "create the certificate authorities",
        "bootstrap the cluster",
    ];
    for stop in stops {
        let boot = machine.boot(input());
        boot.until(|status| {
            *status == EnrolmentStatus::Working(stop.into()) || *status == EnrolmentStatus::Settled
        })
        .await;
        boot.off().await;
        if matches!(machine.sealed_if_any(), Some(Sealed::Member(_))) {
            return;
        }
    }
    let boot = machine.boot(input());
    boot.settled().await;
    boot.off().await;
    assert!(matches!(machine.sealed(), Sealed::Member(_)));
}

impl Machine {
    pub(crate) fn sealed_if_any(&self) -> Option<Sealed> {
        match SealedStore::new(&self.root.esp, None).load().unwrap() {
            Stored::Sealed(sealed) => Some(sealed),
            _ => None,
        }
    }
}

#[test]
fn delays_grow_and_begin_anew_with_other_work() {
    let mut retries = Retries {
        backoff: Backoff {
            jitter: 0.0,
            ..Backoff::default()
        },
        ..Retries::default()
    };
    retries.working_on(&Work::Inspect);
    let delays: Vec<_> = (0..20).map(|_| retries.delay(Pace::Growing)).collect();
    assert_eq!(delays[0], Duration::from_millis(500));
    assert_eq!(delays[1], Duration::from_millis(750));
    assert_eq!(delays[19], Duration::from_secs(60));
    retries.working_on(&Work::Inspect);
    assert_eq!(
        retries.delay(Pace::Growing),
        Duration::from_secs(60),
        "the same again"
    );
    retries.working_on(&Work::AwaitAddress);
    assert_eq!(retries.delay(Pace::Growing), Duration::from_millis(500));
}
