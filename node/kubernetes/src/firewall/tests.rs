//! The rules with a real kernel and real connections, in network namespaces: a node with two pods,
//! the network between the nodes, and another node's pods behind a stand-in for the mesh.
//!
//! ```text
//!   one 10.208.3.2 ─┐
//!                   ├─ hearth-pods 10.208.3.1  node  192.0.2.1 lan0 ── outside 192.0.2.9, 192.0.2.2
//!   two 10.208.3.3 ─┘                            └── hearth-mesh ───── far 10.208.4.2
//! ```
//!
//! Every test first shows that the connection is possible without the rules.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use hearth_host::networking::NodeSubnets;
use hearth_network_policy::node::{Block, Isolation, Peers, Ports, Rule};
use hearth_network_policy::objects::Protocol;
use hearth_sys::cidr::Cidr;
use nix::sched::{CloneFlags, setns};

use super::*;
use crate::testing;

mod dual_stack;

/// How long a connection may take that is possible.
const CONNECTS: Duration = Duration::from_secs(10);
/// How long is waited for one that is not, where nothing answers.
const SILENCE: Duration = Duration::from_secs(1);

/// Whether rules see packets that pass a bridge.
const BRIDGED: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";

const NODE: &str = "node";
const ONE: &str = "one";
const TWO: &str = "two";
const OUTSIDE: &str = "outside";
const FAR: &str = "far";

const GATEWAY: [u8; 4] = [10, 208, 3, 1];
const POD_ONE: [u8; 4] = [10, 208, 3, 2];
const POD_FAR: [u8; 4] = [10, 208, 4, 2];
const NODE_ADDRESS: [u8; 4] = [192, 0, 2, 1];
const OTHER_NODE: [u8; 4] = [192, 0, 2, 2];
const NEIGHBOUR: [u8; 4] = [192, 0, 2, 9];
const LOOPBACK: [u8; 4] = [127, 0, 0, 1];

/// The namespaces of one test.
struct Net {
    prefix: String,
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in [NODE, ONE, TWO, OUTSIDE, FAR] {
            let name = self.name(name);
            let _ = Command::new("ip").args(["netns", "del", &name]).status();
        }
    }
}

impl Net {
    /// `None`, with a message, if this is not permitted here.
    fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("hearth-{}-{number}", std::process::id());
        if !nix::unistd::geteuid().is_root() {
            testing::skipped("this requires permission to create network namespaces");
            return None;
        }
        let net = Self { prefix };
        for name in [NODE, ONE, TWO, OUTSIDE, FAR] {
            net.ip(&format!("netns add {}", net.name(name)));
            net.within(name, "link set lo up");
        }
        net.within(NODE, "link add hearth-pods type bridge");
        for (name, address) in [(ONE, "10.208.3.2/24"), (TWO, "10.208.3.3/24")] {
            net.connect(name, address, "10.208.3.1");
            net.within(NODE, &format!("link set to-{name} master hearth-pods"));
        }
        net.within(NODE, "addr add 10.208.3.1/24 dev hearth-pods");
        net.within(NODE, "link set hearth-pods up");
        net.connect(OUTSIDE, "192.0.2.9/24", "192.0.2.1");
        net.within(OUTSIDE, "addr add 192.0.2.2/24 dev eth0");
        net.within(NODE, "link set to-outside down");
        net.within(NODE, "link set to-outside name lan0");
        net.within(NODE, "addr add 192.0.2.1/24 dev lan0");
        net.within(NODE, "link set lan0 up");
        net.within(NODE, "route add default via 192.0.2.9");
        net.connect(FAR, "10.208.4.2/24", "10.208.4.1");
        net.within(FAR, "route replace default via 10.208.3.1 dev eth0 onlink");
        net.within(NODE, "link set to-far down");
        net.within(NODE, "link set to-far name hearth-mesh");
        net.within(NODE, "addr add 10.208.3.1/32 dev hearth-mesh");
        net.within(NODE, "link set hearth-mesh up");
        net.within(
            NODE,
            "route add 10.208.0.0/12 dev hearth-mesh src 10.208.3.1",
        );
        net.inside(NODE, || {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
            // As on a node, if this kernel can filter what passes a bridge.
            let _ = std::fs::write(BRIDGED, "1");
        });
        Some(net)
    }

    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    fn ip(&self, arguments: &str) {
        let run = Command::new("ip").args(arguments.split(' ')).output();
        let run = run.expect("the program ip");
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "ip {arguments}: {said}");
    }

    fn within(&self, namespace: &str, arguments: &str) {
        self.ip(&format!("-n {} {arguments}", self.name(namespace)));
    }

    /// Connects a namespace with the node: its `eth0`, and `to-NAME` on the node.
    fn connect(&self, name: &str, address: &str, gateway: &str) {
        let (node, other) = (self.name(NODE), self.name(name));
        self.ip(&format!(
            "link add to-{name} netns {node} type veth peer name eth0 netns {other}"
        ));
        self.within(NODE, &format!("link set to-{name} up"));
        self.within(name, &format!("addr add {address} dev eth0"));
        self.within(name, "link set eth0 up");
        self.within(name, &format!("route add default via {gateway}"));
    }

    /// Runs `work` on a thread in the namespace.
    fn inside<T: Send>(&self, namespace: &str, work: impl FnOnce() -> T + Send) -> T {
        let file = format!("/run/netns/{}", self.name(namespace));
        thread::scope(|scope| {
            let run = || {
                setns(File::open(file).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
                work()
            };
            scope.spawn(run).join().unwrap()
        })
    }

    /// Answers connections to this address in the namespace with its name.
    fn listen(&self, namespace: &'static str, address: impl Into<IpAddr>, port: u16) {
        let address = SocketAddr::from((address, port));
        let listener = self.inside(namespace, || TcpListener::bind(address).unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let peer = stream.peer_addr().map(|peer| peer.ip().to_string());
                let _ = stream.write_all(format!("{namespace} {}", peer.unwrap()).as_bytes());
            }
        });
    }

    /// A connection from a namespace whose listener sends back what it gets.
    fn hold(&self, from: &str, to: impl Into<IpAddr>, port: u16) -> TcpStream {
        let to = SocketAddr::from((to, port));
        self.inside(from, || TcpStream::connect_timeout(&to, CONNECTS).unwrap())
    }

    /// Whether the rules see packets between two pods of the node.
    fn filters_bridges(&self) -> bool {
        self.inside(NODE, || {
            std::fs::read_to_string(BRIDGED).is_ok_and(|on| on.trim() == "1")
        })
    }

    /// The link-local address of a namespace's interface, once it has been probed for duplicates.
    fn link_local(&self, namespace: &str) -> std::net::Ipv6Addr {
        let own = self.name(namespace);
        let arguments = [
            "-n", &own, "-6", "-o", "addr", "show", "eth0", "scope", "link",
        ];
        for _ in 0..100 {
            let shown = Command::new("ip").args(arguments).output().unwrap();
            let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
            let mut words = shown.split_whitespace().skip_while(|word| *word != "inet6");
            let address = words
                .nth(1)
                .and_then(|word| word.split('/').next()?.parse().ok());
            match address {
                Some(address) if !shown.contains("tentative") => return address,
                _ => thread::sleep(Duration::from_millis(100)),
            }
        }
        panic!("{namespace} has no link-local address");
    }

    fn echo(&self, namespace: &'static str, address: impl Into<IpAddr>, port: u16) {
        let address = SocketAddr::from((address, port));
        let listener = self.inside(namespace, || TcpListener::bind(address).unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                thread::spawn(move || io::copy(&mut &stream, &mut &stream));
            }
        });
    }

    /// Connects from a namespace: what answers, and the address that it sees.
    fn ask(
        &self,
        from: &str,
        to: impl Into<IpAddr>,
        port: u16,
        bound: Duration,
    ) -> io::Result<String> {
        self.ask_at(from, SocketAddr::from((to, port)), bound)
    }

    fn ask_at(&self, from: &str, to: SocketAddr, bound: Duration) -> io::Result<String> {
        self.inside(from, || {
            let mut stream = TcpStream::connect_timeout(&to, bound)?;
            stream.set_read_timeout(Some(bound))?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        })
    }

    fn answers(&self, from: &str, to: impl Into<IpAddr>, port: u16) -> String {
        let to = to.into();
        match self.ask(from, to, port, CONNECTS) {
            Ok(answer) => answer,
            Err(error) => panic!("{from} to {to} port {port}: {error}"),
        }
    }

    /// The connection is refused at once, and not only dropped.
    fn refused(&self, from: &str, to: impl Into<IpAddr>, port: u16) {
        let to = to.into();
        let error = self.ask(from, to, port, CONNECTS).unwrap_err();
        let kinds = [
            io::ErrorKind::HostUnreachable,
            io::ErrorKind::NetworkUnreachable,
            io::ErrorKind::ConnectionRefused,
            io::ErrorKind::PermissionDenied,
        ];
        assert!(
            kinds.contains(&error.kind()),
            "{from} to {to} port {port}: {error:?}"
        );
    }

    fn silent(&self, from: &str, to: impl Into<IpAddr>, port: u16) {
        let to = to.into();
        let error = self.ask(from, to, port, SILENCE).unwrap_err();
        assert_eq!(
            error.kind(),
            io::ErrorKind::TimedOut,
            "{from} to {to} port {port}: {error:?}"
        );
    }

    /// A filter whose program runs in the node's namespace, and as on a node without names of protocols and ports.
    fn filter(&self) -> (tempfile::TempDir, Filter) {
        let own = format!(
            r#"#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin exec ip netns exec {} sh -c '
    for names in protocols services; do
        if test -e /etc/$names; then mount --bind /dev/null /etc/$names || exit; fi
    done
    exec nft "$@"' nft "$@"
"#,
            self.name(NODE)
        );
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("nft");
        std::fs::write(&program, own).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, executable).unwrap();
        (directory, Filter::new(program))
    }

    /// Translates connections to these ports of the node, as the portmap plugin does for host ports.
    async fn host_ports(&self, filter: &Filter, ports: &[(u16, u16)]) {
        let to = Ipv4Addr::from(POD_ONE);
        let rules: String = ports
            .iter()
            .map(|(port, of_pod)| format!("tcp dport {port} dnat to {to}:{of_pod};"))
            .collect();
        let script = format!(
            "table ip cni_hostport {{ chain hostports {{ {rules} }};
             chain prerouting {{ type nat hook prerouting priority dstnat;
               fib daddr type local jump hostports; }};
             chain output {{ type nat hook output priority -100;
               fib daddr type local jump hostports; }}; }}"
        );
        filter.nftables.apply(&script).await.unwrap();
    }
}

const RANGES: ClusterRanges = ClusterRanges::DEFAULT;

/// Rules of a node without pods.
fn nodes() -> Rules {
    rules(Pods::None)
}

fn rules(pods: Pods) -> Rules {
    let nodes = [NODE_ADDRESS, OTHER_NODE].map(IpAddr::from);
    Rules::of(nodes, Some(RANGES), pods)
}

/// With this policy of the node's pods.
fn with_policy(policy: Option<NodePolicy>) -> Rules {
    let v4 = "10.208.3.0/24".parse().unwrap();
    let subnets = NodeSubnets { v4, v6: None };
    let policy = policy.map(Arc::new);
    rules(Pods::BuiltIn { subnets, policy })
}

fn block(network: &str, except: &str) -> Peers {
    let of = |text: &str| text.parse::<Cidr>().unwrap().into();
    Peers::Block(Block {
        network: of(network),
        except: vec![of(except)],
    })
}

#[tokio::test]
async fn host_ports_do_not_take_the_nodes_own_ports() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    let own = [7834, 7835, 7836, 6443, 10250];
    for port in own {
        net.listen(NODE, [0, 0, 0, 0], port);
    }
    net.listen(NODE, LOOPBACK, 6444);
    net.listen(NODE, GATEWAY, 53);
    net.listen(ONE, POD_ONE, 80);
    let taken = own.into_iter().chain([6444, 53, 8080]);
    let taken: Vec<_> = taken.map(|port| (port, 80)).collect();
    net.host_ports(&filter, &taken).await;
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 7835), "one 192.0.2.9");
    assert_eq!(net.answers(TWO, GATEWAY, 53), "one 10.208.3.3");

    filter.set(nodes()).await.unwrap();
    for port in own {
        assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, port), "node 192.0.2.9");
        assert_eq!(net.answers(NODE, NODE_ADDRESS, port), "node 192.0.2.1");
    }
    assert_eq!(net.answers(NODE, LOOPBACK, 6444), "node 127.0.0.1");
    assert_eq!(net.answers(TWO, GATEWAY, 53), "node 10.208.3.3");
    assert_eq!(net.answers(FAR, GATEWAY, 53), "node 10.208.4.2");
    // Other ports are the pods' to take.
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 8080), "one 192.0.2.9");
    assert_eq!(net.answers(NODE, NODE_ADDRESS, 8080), "one 192.0.2.1");
}

/// With another pod network, packets of pods are up to that; the node's own ports remain its own.
#[tokio::test]
async fn another_pod_network_has_its_own_rules() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(NODE, [0, 0, 0, 0], 7835);
    net.listen(ONE, POD_ONE, 80);
    net.listen(OUTSIDE, NEIGHBOUR, 80);
    net.host_ports(&filter, &[(7835, 80), (8080, 80)]).await;
    filter.set(nodes()).await.unwrap();
    net.refused(OUTSIDE, POD_ONE, 80);
    net.refused(ONE, NODE_ADDRESS, 7835);

    filter.set(rules(Pods::OtherNetwork)).await.unwrap();
    assert_eq!(net.answers(OUTSIDE, POD_ONE, 80), "one 192.0.2.9");
    assert_eq!(net.answers(ONE, NEIGHBOUR, 80), "outside 10.208.3.2");
    assert_eq!(net.answers(ONE, NODE_ADDRESS, 7835), "node 10.208.3.2");
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 7835), "node 192.0.2.9");
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 8080), "one 192.0.2.9");
}

#[tokio::test]
async fn pods_are_reached_from_outside_through_host_ports_only() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(ONE, POD_ONE, 80);
    net.listen(OUTSIDE, NEIGHBOUR, 80);
    net.host_ports(&filter, &[(8080, 80)]).await;
    assert_eq!(net.answers(OUTSIDE, POD_ONE, 80), "one 192.0.2.9");
    assert_eq!(net.answers(ONE, NEIGHBOUR, 80), "outside 10.208.3.2");

    filter.set(nodes()).await.unwrap();
    net.refused(OUTSIDE, POD_ONE, 80);
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 8080), "one 192.0.2.9");
    for from in [TWO, NODE, FAR] {
        net.answers(from, POD_ONE, 80);
    }
    assert_eq!(net.answers(TWO, POD_ONE, 80), "one 10.208.3.3");
    // Outside, a pod has the address of its node.
    assert_eq!(net.answers(ONE, NEIGHBOUR, 80), "outside 192.0.2.1");
}

/// The API server reaches webhooks and other servers of the API through services.
#[tokio::test]
async fn the_node_reaches_pods_through_services() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(ONE, POD_ONE, 80);
    net.listen(FAR, [10, 208, 4, 2], 80);
    let service = "table ip services { chain c { type nat hook output priority -100;
                   ip daddr 10.224.0.7 tcp dport 1 dnat to 10.208.3.2:80;
                   ip daddr 10.224.0.7 tcp dport 2 dnat to 10.208.4.2:80; }; }";
    filter.nftables.apply(service).await.unwrap();
    filter.set(nodes()).await.unwrap();
    assert!(net.answers(NODE, [10, 224, 0, 7], 1).starts_with("one "));
    assert!(net.answers(NODE, [10, 224, 0, 7], 2).starts_with("far "));
    // Nothing translates this one.
    net.refused(NODE, [10, 224, 0, 7], 3);
    // Where the mesh has no route, packets to pods do not leave by another one.
    net.within(NODE, "route del 10.208.0.0/12");
    net.silent(NODE, [10, 224, 0, 7], 2);
    net.refused(NODE, [10, 208, 4, 2], 80);
}

#[tokio::test]
async fn packets_that_cannot_come_from_outside_are_dropped() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    net.listen(NODE, [0, 0, 0, 0], 10250);
    // The address of a pod, in the network between the nodes; a program that listens on loopback
    // only; a service.
    net.within(OUTSIDE, "addr add 10.208.9.9/32 dev eth0");
    net.within(OUTSIDE, "route add 10.224.0.0/16 via 192.0.2.1");
    net.within(NODE, "route add 10.208.9.9/32 dev lan0");
    net.within(NODE, "addr add 10.224.0.1/32 dev lo");
    // As a machine does that wants to reach what others have on loopback.
    net.inside(OUTSIDE, || {
        std::fs::write("/proc/sys/net/ipv4/conf/eth0/route_localnet", "1").unwrap();
    });
    for own in ["127.0.0.0/8", "127.0.0.1"] {
        net.within(
            OUTSIDE,
            &format!("route del local {own} dev lo table local"),
        );
    }
    net.within(OUTSIDE, "route add 127.0.0.1/32 via 192.0.2.1");
    let forged = || {
        net.within(
            OUTSIDE,
            "route replace 192.0.2.1/32 dev eth0 src 10.208.9.9",
        );
        let seen = net.ask(OUTSIDE, NODE_ADDRESS, 10250, SILENCE);
        net.within(OUTSIDE, "route del 192.0.2.1/32");
        seen
    };
    assert_eq!(forged().unwrap(), "node 10.208.9.9");
    assert_eq!(
        net.answers(OUTSIDE, [10, 224, 0, 1], 10250),
        "node 192.0.2.9"
    );

    filter.set(nodes()).await.unwrap();
    assert_eq!(forged().unwrap_err().kind(), io::ErrorKind::TimedOut);
    net.silent(OUTSIDE, LOOPBACK, 10248);
    let rules = filter.nftables.table_with_counters(TABLE).await.unwrap();
    let loopback = rules
        .lines()
        .find(|line| line.contains("ip daddr 127.0.0.0/8"));
    assert!(!loopback.unwrap().contains("packets 0"), "{rules}");
    net.silent(OUTSIDE, [10, 224, 0, 1], 10250);
    assert_eq!(net.answers(OUTSIDE, NODE_ADDRESS, 10250), "node 192.0.2.9");
}

#[tokio::test]
async fn pods_reach_a_list_of_ports_on_nodes() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    for port in [6443, 7835, 9100, 10250] {
        net.listen(NODE, NODE_ADDRESS, port);
        net.listen(OUTSIDE, OTHER_NODE, port);
    }
    net.listen(OUTSIDE, NEIGHBOUR, 7835);
    let service = "table ip services { chain c { type nat hook prerouting priority dstnat;
                   ip daddr 10.224.0.7 tcp dport 1 dnat to 192.0.2.2:9100;
                   ip daddr 10.224.0.7 tcp dport 2 dnat to 192.0.2.1:9100;
                   ip daddr 10.224.0.7 tcp dport 3 dnat to 192.0.2.2:7835; }; }";
    filter.nftables.apply(service).await.unwrap();
    for (address, port) in [(NODE_ADDRESS, 7835), (OTHER_NODE, 7835), (OTHER_NODE, 9100)] {
        net.answers(ONE, address, port);
    }
    assert_eq!(net.answers(ONE, [10, 224, 0, 7], 3), "outside 10.208.3.2");

    filter.set(nodes()).await.unwrap();
    for address in [NODE_ADDRESS, OTHER_NODE] {
        for port in [6443, 10250] {
            net.answers(ONE, address, port);
        }
        for port in [7835, 9100] {
            net.refused(ONE, address, port);
        }
    }
    // A service may lead to a port of a node, but not to one of the node's own.
    let service = [10, 224, 0, 7];
    assert_eq!(net.answers(ONE, service, 1), "outside 192.0.2.1");
    assert_eq!(net.answers(ONE, service, 2), "node 10.208.3.2");
    net.refused(ONE, service, 3);
    // Machines that are no nodes are not the cluster's concern.
    net.answers(ONE, NEIGHBOUR, 7835);
    // The addresses of the nodes change.
    filter
        .set(Rules::of(
            [IpAddr::from(NODE_ADDRESS)],
            Some(RANGES),
            Pods::None,
        ))
        .await
        .unwrap();
    net.answers(ONE, OTHER_NODE, 9100);
}

#[tokio::test]
async fn nothing_for_pods_and_services_leaves_in_the_clear() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    let service = [10, 224, 0, 9];
    net.within(OUTSIDE, "addr add 10.224.0.9/32 dev eth0");
    net.within(OUTSIDE, "addr add 10.208.4.2/32 dev eth0");
    net.listen(OUTSIDE, service, 80);
    net.listen(OUTSIDE, POD_FAR, 80);
    net.listen(FAR, POD_FAR, 80);
    let answer = |from| net.answers(from, POD_FAR, 80);
    for from in [ONE, NODE] {
        assert!(net.answers(from, service, 80).starts_with("outside"));
        assert!(answer(from).starts_with("far"));
    }
    // Without the mesh, and with a more specific route, as a DHCP server can give one.
    net.within(NODE, "route add 10.208.4.0/24 via 192.0.2.9");
    for from in [ONE, NODE] {
        assert!(answer(from).starts_with("outside"));
    }

    filter.set(nodes()).await.unwrap();
    for from in [ONE, NODE] {
        net.refused(from, service, 80);
        net.refused(from, POD_FAR, 80);
    }
    net.within(NODE, "route del 10.208.4.0/24");
    for from in [ONE, NODE] {
        assert!(answer(from).starts_with("far"));
    }
}

fn says(mut stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(CONNECTS))?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// A pod that may be isolated, and one that is not.
fn isolated(ingress: Vec<Rule>, egress: Vec<Rule>) -> NodePolicy {
    let isolation = Isolation {
        ingress: Some(0),
        egress: Some(1),
    };
    NodePolicy {
        enforced: true,
        pods: [
            (POD_ONE.into(), isolation),
            ([10, 208, 3, 3].into(), Isolation::default()),
        ]
        .into(),
        chains: vec![ingress, egress],
        sets: vec![[IpAddr::from(POD_FAR)].into()],
    }
}

fn permit(peers: Peers, ports: &[(u16, u16)]) -> Rule {
    let ports = Ports::new(Protocol::Tcp, ports.to_vec());
    let ports = Some(ports).filter(|ports| !ports.ranges.is_empty());
    Rule { peers, ports }
}

#[tokio::test]
async fn policies_hold_for_each_packet_of_a_pod() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    for port in [80, 81, 85] {
        net.listen(ONE, POD_ONE, port);
        net.listen(OUTSIDE, NEIGHBOUR, port);
    }
    net.listen(TWO, [10, 208, 3, 3], 80);
    net.listen(NODE, GATEWAY, 53);
    net.listen(NODE, NODE_ADDRESS, 6443);
    net.echo(ONE, POD_ONE, 7);
    net.echo(OUTSIDE, NEIGHBOUR, 7);
    let service = "table ip services { chain c { type nat hook prerouting priority dstnat;
                   ip daddr 10.224.0.7 tcp dport 80 dnat to 10.208.3.2:80; }; }";
    filter.nftables.apply(service).await.unwrap();
    // Without policies in the cluster.
    filter
        .set(with_policy(Some(NodePolicy::default())))
        .await
        .unwrap();
    for port in [80, 81] {
        net.answers(FAR, POD_ONE, port);
        net.answers(ONE, NEIGHBOUR, port);
    }
    net.answers(ONE, NODE_ADDRESS, 6443);
    net.answers(TWO, [10, 224, 0, 7], 80);
    let (to, from) = (net.hold(FAR, POD_ONE, 7), net.hold(ONE, NEIGHBOUR, 7));
    says(&to).unwrap();
    says(&from).unwrap();

    let block = block("192.0.2.0/24", "192.0.2.1/32");
    let ports = [(80, 80), (84, 90), (86, 86)];
    let policy = isolated(
        vec![permit(Peers::Set(0), &ports)],
        vec![permit(block, &ports)],
    );
    filter.set(with_policy(Some(policy.clone()))).await.unwrap();
    for port in [80, 85] {
        net.answers(FAR, POD_ONE, port);
        net.answers(ONE, NEIGHBOUR, port);
    }
    net.refused(FAR, POD_ONE, 81);
    if net.filters_bridges() {
        net.refused(TWO, [10, 224, 0, 7], 80);
    }
    net.refused(ONE, NEIGHBOUR, 81);
    net.refused(ONE, POD_FAR, 80);
    net.refused(ONE, NODE_ADDRESS, 6443);
    // Connections that existed have ended.
    says(&to).unwrap_err();
    says(&from).unwrap_err();
    // Itself, the resolver, and the probes of the node.
    net.answers(ONE, POD_ONE, 81);
    net.answers(ONE, GATEWAY, 53);
    net.answers(NODE, POD_ONE, 81);
    // A pod that the policy does not know yet.
    let two = Ipv4Addr::from([10, 208, 3, 3]);
    let mut without_two = policy;
    without_two.pods.remove(&two.into());
    filter.set(with_policy(Some(without_two))).await.unwrap();
    net.silent(TWO, NEIGHBOUR, 80);
    net.silent(FAR, two.octets(), 80);

    // It may connect to everyone, and nobody to it: answers pass.
    let policy = isolated(Vec::new(), vec![permit(Peers::Any, &[])]);
    filter.set(with_policy(Some(policy))).await.unwrap();
    net.answers(ONE, NEIGHBOUR, 81);
    net.answers(ONE, NODE_ADDRESS, 6443);
    net.refused(FAR, POD_ONE, 80);
    // Before anything is known of the cluster's policies.
    filter.set(with_policy(None)).await.unwrap();
    net.silent(ONE, NEIGHBOUR, 80);
    net.silent(FAR, POD_ONE, 80);
    net.answers(ONE, GATEWAY, 53);
}

/// A node that does not know the ranges of its cluster: other machines may have those of any.
#[tokio::test]
async fn without_ranges_nothing_is_forwarded_and_no_machine_is_shut_out() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    net.within(OUTSIDE, "addr add 10.208.9.9/32 dev eth0");
    net.within(NODE, "route add 10.208.9.9/32 dev lan0");
    net.listen(OUTSIDE, [10, 208, 9, 9], 80);
    net.listen(OUTSIDE, NEIGHBOUR, 80);
    net.answers(ONE, NEIGHBOUR, 80);

    filter.set(nodes()).await.unwrap();
    net.refused(NODE, [10, 208, 9, 9], 80);
    let nodes = [NODE_ADDRESS, OTHER_NODE].map(IpAddr::from);
    filter
        .set(Rules::of(nodes, None, Pods::None))
        .await
        .unwrap();
    net.answers(NODE, [10, 208, 9, 9], 80);
    net.silent(ONE, NEIGHBOUR, 80);
}

#[tokio::test]
async fn rules_that_another_program_changed_are_written_again() {
    let Some(net) = Net::new() else { return };
    let (_directory, mut filter) = net.filter();
    for _ in 0..2 {
        filter.set(nodes()).await.unwrap();
    }
    let whole = filter.nftables.table(TABLE).await.unwrap();
    for change in [
        "delete table inet hearth",
        "flush chain inet hearth passing",
        "insert rule inet hearth passing accept",
        "flush set inet hearth nodes",
        "flush ruleset",
    ] {
        filter.nftables.apply(change).await.unwrap();
        filter.restore().await.unwrap();
        assert_eq!(
            filter.nftables.table(TABLE).await.unwrap(),
            whole,
            "{change}"
        );
    }
    let other = "table ip other { chain c { }; }";
    filter.nftables.apply(other).await.unwrap();
    filter.restore().await.unwrap();
    assert!(
        filter
            .nftables
            .ruleset()
            .await
            .unwrap()
            .contains("table ip other")
    );
}
