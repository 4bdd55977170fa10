use std::fs;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_api::testing::Script;
use hearth_api::v1::{ClusterConfiguration, ClusterDirectory, Node, NodeRoles, WatchEvent};
use hearth_base::event::{self, Value, Writer};
use hearth_base::testing::{TestSupervisor, assert_never, fixed, next, until, within_timeout};
use hearth_host::directory::DirectoryStore;
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_sys::hostname::HostnameError;

use crate::CuratorConnection;
use crate::hosts::{Worker, run};
use crate::known::View;
use crate::learned::{AddressRecord, PeerAddresses};
use crate::testing::{Fake, consensus_member, record};

/// Timeout for anything in these tests.
const LONG: Duration = Duration::from_secs(3600);

static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn note_hostname(name: &str) -> Result<(), HostnameError> {
    NAMES.lock().unwrap().push(name.to_owned());
    Ok(())
}

fn refuse_hostname(name: &str) -> Result<(), HostnameError> {
    Err(HostnameError::Invalid(name.to_owned()))
}

/// A machine, and the curator of its cluster.
struct Machine {
    fake: Fake,
    root: Root,
    _directory: tempfile::TempDir,
}

/// The worker on it.
struct Hosts {
    worker: TestSupervisor,
    address: Writer<IpAddr>,
    connection: Writer<CuratorConnection>,
    learned: Writer<PeerAddresses>,
    view: Value<Arc<View>>,
    directory: Value<ClusterDirectory>,
    directory_saved: Value<IpAddr>,
}

impl Machine {
    /// Its cluster has this domain, and this node is a consensus member.
    async fn new(domain: &str, more_to_come: bool) -> Self {
        let fake = Fake::new(Script {
            configuration: ClusterConfiguration {
                cluster_domain: domain.into(),
                ..ClusterConfiguration::default()
            },
            more_to_come,
            ..Script::default()
        })
        .await;
        let own = record(&fake.node_id.to_string(), "", consensus_member());
        fake.curator.set_nodes(vec![own]);
        let directory = tempfile::tempdir().unwrap();
        let root = Root::under(directory.path());
        fs::create_dir(root.esp.path()).unwrap();
        root.ephemeral.make_directories().unwrap();
        Self {
            fake,
            root,
            _directory: directory,
        }
    }

    /// Starts the worker of this node at 192.0.2.1.
    fn start(&self, rest: Duration) -> Hosts {
        self.start_with(rest, note_hostname)
    }

    fn start_with(
        &self,
        rest: Duration,
        set_hostname: fn(&str) -> Result<(), HostnameError>,
    ) -> Hosts {
        self.start_worker(rest, set_hostname, true)
    }

    fn start_worker(
        &self,
        rest: Duration,
        set_hostname: fn(&str) -> Result<(), HostnameError>,
        in_touch: bool,
    ) -> Hosts {
        let (address_writer, address) = event::value();
        let (saved_writer, directory_saved) = event::value();
        let (connection_writer, connection) = event::value();
        let (learned_writer, learned) = event::value();
        let (view_writer, view) = event::value();
        let (directory_writer, live) = event::value();
        let member = MemberData {
            directory: DirectoryStore::new(&self.root.esp)
                .load()
                .unwrap_or_default()
                .unwrap_or_default(),
            ..self.fake.member()
        };
        address_writer.set("192.0.2.1".parse().unwrap());
        if in_touch {
            connection_writer.set(self.fake.connection());
        }
        let worker = Arc::new(Worker {
            root: self.root.clone(),
            set_hostname,
            rest,
            silence: LONG,
            saved_directory: Arc::new(DirectoryStore::new(&self.root.esp)),
            member: fixed(member),
            connection,
            address,
            learned,
            view: view_writer,
            directory: directory_writer,
            directory_saved: saved_writer,
        });
        Hosts {
            worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
            address: address_writer,
            connection: connection_writer,
            learned: learned_writer,
            view,
            directory: live,
            directory_saved,
        }
    }

    fn says(&self, nodes: Vec<Node>, tombstones: Vec<String>, backlog_complete: bool) {
        self.fake.curator.send(&WatchEvent {
            nodes,
            tombstones,
            backlog_complete,
            progress: 0,
        });
    }

    fn hosts(&self) -> Option<String> {
        fs::read_to_string(self.root.ephemeral.hosts()).ok()
    }

    /// The nodes in the directory on the ESP.
    fn on_esp(&self) -> Vec<String> {
        let directory = DirectoryStore::new(&self.root.esp).load();
        let directory = directory.unwrap_or_default();
        let nodes = directory.unwrap_or_default().nodes;
        let hosts = nodes.into_iter().flat_map(|node| node.addresses);
        hosts.map(|address| address.host).collect()
    }

    /// The state files as bytes, including the generation.
    fn slots(&self) -> [Vec<u8>; 2] {
        let paths = self.root.esp.cluster_directory().paths();
        paths.map(|path| fs::read(path).unwrap())
    }

    async fn hosts_name(&self, address: &str) {
        until(address, || {
            self.hosts()
                .is_some_and(|hosts| hosts.lines().any(|line| line.starts_with(address)))
        })
        .await;
    }
}

impl Hosts {
    async fn saves(&self) {
        next("the directory is saved", &mut self.directory_saved.watch()).await;
    }
}

fn ip(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

fn id(digit: char) -> String {
    format!("hearth-{}", String::from(digit).repeat(32))
}

#[tokio::test]
async fn the_node_and_all_others_have_names() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start(LONG);
    test.saves().await;
    let own = machine.fake.node_id;
    assert!(NAMES.lock().unwrap().contains(&own.to_string()));
    assert_eq!(
        fs::read_to_string(machine.root.ephemeral.machine_id()).unwrap(),
        format!("{}\n", own.bare())
    );
    let mut lines = vec![format!("192.0.2.1 {own}.cluster.internal {own}")];
    let hosts = |lines: &mut Vec<String>| {
        // Both IDs have the same length.
        lines.sort_by_key(|line| line.split(' ').next_back().map(str::to_owned));
        let lines = lines.join("\n");
        format!("127.0.0.1 localhost\n::1 localhost\n{lines}\n")
    };
    assert_eq!(machine.hosts().unwrap(), hosts(&mut lines));

    let (a, b) = (id('a'), id('b'));
    let nodes = vec![
        record(&a, "192.0.2.10", NodeRoles::default()),
        record(&b, "2001:db8::b", NodeRoles::default()),
        record(&id('c'), "", NodeRoles::default()),
        record("nonsense", "192.0.2.12", NodeRoles::default()),
    ];
    machine.says(nodes, vec![], false);
    machine.hosts_name("2001:db8::b").await;
    lines.push(format!("192.0.2.10 {a}.cluster.internal {a}"));
    lines.push(format!("2001:db8::b {b}.cluster.internal {b}"));
    assert_eq!(machine.hosts().unwrap(), hosts(&mut lines));

    // One is deleted, and this node has a new address.
    machine.says(vec![], vec![a.clone()], false);
    until("forgotten", || !machine.hosts().unwrap().contains(&a)).await;
    test.address.set("192.0.2.2".parse().unwrap());
    machine.hosts_name("192.0.2.2 ").await;
    assert!(!machine.hosts().unwrap().contains("192.0.2.1 "));
    test.worker.is_healthy().await;
    test.worker.all_is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn no_directory_is_saved_before_all_nodes_are_known() {
    let machine = Machine::new("cluster.internal", true).await;
    let test = machine.start(LONG);
    let watching = machine
        .fake
        .curator
        .until(|seen| seen.calls.contains(&"Watch"));
    within_timeout("the worker watches", watching).await;
    assert_never("a directory", test.directory_saved.watch().next()).await;
    assert_eq!(test.view.get(), None);
    assert_eq!(machine.on_esp(), Vec::<String>::new());
    let own = machine.fake.node_id;
    let hosts = machine.hosts().unwrap();
    assert!(hosts.contains(&format!("192.0.2.1 {own}\n")), "{hosts}");
    let other = record(&id('a'), "192.0.2.10", consensus_member());
    machine.says(vec![other], vec![], true);
    test.saves().await;
    assert_eq!(machine.on_esp().len(), 2);
    assert_eq!(test.directory_saved.get(), Some(ip(1)));
    test.worker.stop().await;
}

#[tokio::test]
async fn a_hosts_file_in_which_the_node_is_not_found_is_a_failure() {
    // What a curator would never accept.
    let machine = Machine::new("cluster # internal", false).await;
    let test = machine.start(LONG);
    test.worker.fails("expected 192.0.2.1").await;
    assert_eq!(test.directory_saved.get(), None);
    test.worker.stop().await;
}

#[tokio::test]
async fn a_machine_that_cannot_be_named_says_so() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start_with(LONG, refuse_hostname);
    test.worker.fails("host name: expected").await;
    assert!(!machine.root.ephemeral.machine_id().exists());
    assert!(machine.fake.curator.calls().is_empty());
    test.worker.stop().await;
}

#[tokio::test]
async fn the_directory_is_saved_before_anyone_relies_on_it() {
    let machine = Machine::new("cluster.internal", false).await;
    fs::remove_dir(machine.root.esp.path()).unwrap();
    fs::write(machine.root.esp.path(), "no directory").unwrap();
    let test = machine.start(LONG);
    test.worker.fails("the cluster directory on the ESP").await;
    test.worker.restarted(2).await;
    assert_eq!(test.directory_saved.get(), None);
    assert!(machine.hosts().is_some(), "names do not depend on the ESP");

    fs::remove_file(machine.root.esp.path()).unwrap();
    // The worker may have created it just now.
    fs::create_dir_all(machine.root.esp.path()).unwrap();
    test.saves().await;
    assert_eq!(machine.on_esp(), ["192.0.2.1"]);
    let [a, b] = machine.slots();
    assert_eq!(a, b, "in both slots");
    test.worker.stop().await;
}

#[tokio::test]
async fn the_esp_is_written_only_when_it_differs() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start(Duration::ZERO);
    test.saves().await;
    let before = machine.slots();

    // This node is not a consensus member.
    let other = record(&id('a'), "192.0.2.10", NodeRoles::default());
    machine.says(vec![other], vec![], false);
    machine.hosts_name("192.0.2.10").await;
    test.worker.stop().await;

    // A later boot finds what it would write, and does not write.
    let test = machine.start(Duration::ZERO);
    test.saves().await;
    assert_eq!(machine.slots(), before);

    test.address.set("192.0.2.2".parse().unwrap());
    until("the new address", || machine.on_esp() == ["192.0.2.2"]).await;
    let mut saved = test.directory_saved.watch();
    let with_it = saved.wait_for(|address| *address == ip(2));
    within_timeout("it says so", with_it).await.unwrap();
    assert_ne!(machine.slots(), before);
    test.worker.all_is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn another_curator_tells_everything_anew() {
    let machine = Machine::new("cluster.internal", false).await;
    let (a, b) = (id('a'), id('b'));
    machine
        .fake
        .curator
        .set_nodes(vec![record(&a, "192.0.2.10", consensus_member())]);
    let test = machine.start(LONG);
    test.saves().await;
    let second = machine.fake.another(Script::default()).await;
    second.set_nodes(vec![record(&b, "192.0.2.11", consensus_member())]);
    test.connection.set(machine.fake.connection_to(&second));
    machine.hosts_name("192.0.2.11").await;
    assert!(!machine.hosts().unwrap().contains(&a));
    test.worker.all_is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn names_are_kept_while_the_esp_rests() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start(LONG);
    test.saves().await;
    for address in ["192.0.2.2", "192.0.2.3"] {
        test.address.set(address.parse().unwrap());
        machine.hosts_name(&format!("{address} ")).await;
    }
    assert_eq!(machine.on_esp(), ["192.0.2.1"]);
    assert_eq!(test.directory_saved.get(), Some(ip(1)), "of no other yet");
    let live = test.directory.get().unwrap();
    assert_eq!(live.nodes[0].addresses[0].host, "192.0.2.3");
    test.worker.stop().await;
}

/// After a power cut a member has to find its peers before any curator can tell it their addresses.
#[tokio::test]
async fn what_was_saved_has_names_before_anyone_is_in_touch() {
    let machine = Machine::new("cluster.internal", false).await;
    let other = record(&id('a'), "192.0.2.10", consensus_member());
    let test = machine.start(Duration::ZERO);
    test.saves().await;
    machine.says(vec![other], vec![], false);
    until("both are saved", || machine.on_esp().len() == 2).await;
    test.worker.stop().await;
    fs::remove_file(machine.root.ephemeral.hosts()).unwrap();
    let before = machine.slots();

    let test = machine.start_worker(Duration::ZERO, note_hostname, false);
    machine.hosts_name(&format!("192.0.2.10 {}", id('a'))).await;
    machine.hosts_name("192.0.2.1 ").await;
    let live = next("a directory", &mut test.directory.watch()).await;
    assert_eq!(live.nodes.len(), 2);
    assert_never("a word of the ESP", test.directory_saved.watch().next()).await;
    assert_eq!(machine.slots(), before);

    // One node has a new address, and has sent its record.
    let host = ip(20);
    let moved = (id('a').parse().unwrap(), AddressRecord { host, counter: 3 });
    test.learned.set(Arc::new([moved].into_iter().collect()));
    machine.hosts_name("192.0.2.20 ").await;
    until("and it is saved", || {
        machine.on_esp().contains(&host.to_string())
    })
    .await;
    assert_eq!(test.directory_saved.get(), None);

    // Then the curators answer, which do not know that address yet.
    let own = record(&machine.fake.node_id.to_string(), "", consensus_member());
    let other = record(&id('a'), "192.0.2.10", consensus_member());
    machine.fake.curator.set_nodes(vec![own, other]);
    test.connection.set(machine.fake.connection());
    test.saves().await;
    let hosts = machine.hosts().unwrap();
    assert!(hosts.contains("192.0.2.20 "), "{hosts}");
    assert!(!hosts.contains("192.0.2.10 "), "{hosts}");
    test.worker.all_is_fine();
    test.worker.stop().await;
}

/// A view without members must not be saved: with an empty directory no node could rejoin.
#[tokio::test]
async fn the_saved_directory_never_becomes_empty() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start(Duration::ZERO);
    test.saves().await;
    let own = record(&machine.fake.node_id.to_string(), "", NodeRoles::default());
    machine.says(vec![own], vec![], false);
    let mut views = test.view.watch();
    let no_member = views.wait_for(|view| {
        view.nodes
            .values()
            .all(|node| node.roles.consensus_member.is_none())
    });
    within_timeout("the view", no_member).await.unwrap();
    machine.says(vec![], vec![machine.fake.node_id.to_string()], false);
    let empty = views.wait_for(|view| view.nodes.is_empty());
    within_timeout("the view", empty).await.unwrap();
    test.address.set(ip(2));
    machine.hosts_name("192.0.2.2 ").await;
    assert_eq!(machine.on_esp(), ["192.0.2.1"]);
    assert_eq!(test.directory_saved.get(), Some(ip(1)));
    assert_eq!(test.directory.get().unwrap().nodes.len(), 1);
    test.worker.all_is_fine();
    test.worker.stop().await;
}

/// Data from the curators are kept while they are unavailable.
#[tokio::test]
async fn a_watch_that_breaks_forgets_nothing() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start(Duration::ZERO);
    test.saves().await;
    let other = record(&id('a'), "192.0.2.10", NodeRoles::default());
    machine.says(vec![other], vec![], false);
    machine.hosts_name("192.0.2.10 ").await;
    machine.fake.curator.end_watches();
    test.worker.fails("the curator ended the watch").await;
    machine.hosts_name("192.0.2.10 ").await;
    assert_eq!(test.view.get().unwrap().nodes.len(), 2);
    test.worker.stop().await;
}

#[tokio::test]
async fn after_the_rest_the_newest_directory_is_saved() {
    let machine = Machine::new("cluster.internal", false).await;
    let test = machine.start(Duration::from_secs(2));
    test.saves().await;
    for address in ["192.0.2.2", "192.0.2.3"] {
        test.address.set(address.parse().unwrap());
        machine.hosts_name(&format!("{address} ")).await;
    }
    let mut between = Vec::new();
    until("the newest", || {
        between = machine.on_esp();
        assert_ne!(between, ["192.0.2.2"], "overtaken long ago");
        between == ["192.0.2.3"]
    })
    .await;
    test.worker.all_is_fine();
    test.worker.stop().await;
}
