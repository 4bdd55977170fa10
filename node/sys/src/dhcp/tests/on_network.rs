//! The whole client on a pair of virtual Ethernet devices.
//!
//! The server has a network namespace of its own; otherwise packets from the client to the server's
//! address would never leave the kernel.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, mpsc};
use std::thread;

use hearth_base::event;
use hearth_base::supervisor::{self, Supervisor};
use rtnetlink::LinkUnspec;

use super::*;
use crate::testing::{add_veth, in_own_network};

/// How the server behaves from now on.
#[derive(Clone, Copy)]
struct Behaviour {
    seconds: u32,
    refuses: bool,
    /// The server's machine uses the address that it grants.
    has_address: bool,
    /// It grants a route to 10.208.0.0/13.
    leads_astray: bool,
}

const USUAL: Behaviour = Behaviour {
    seconds: 600,
    refuses: false,
    has_address: false,
    leads_astray: false,
};

/// The received messages: the type, and whether by unicast.
type Seen = (Kind, bool);

struct Server {
    behaviour: Arc<Mutex<Behaviour>>,
    seen: tokio::sync::watch::Receiver<Vec<Seen>>,
    /// Sets the server's end up or down.
    cable: mpsc::Sender<bool>,
}

/// Creates both ends and starts the server on the other one. `None` if that is not possible.
async fn serve(behaviour: Behaviour) -> Option<Server> {
    let (tell_namespace, namespace) = mpsc::channel();
    let (tell_ready, ready) = mpsc::channel();
    let (go, gone) = mpsc::channel();
    let (cable, cable_commands) = mpsc::channel();
    let (tell_seen, seen) = tokio::sync::watch::channel(Vec::new());
    let behaviour = Arc::new(Mutex::new(behaviour));
    let shared = behaviour.clone();
    thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        tell_namespace.send(namespace).unwrap();
        if gone.recv().is_err() {
            return;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let netlink = Netlink::open().unwrap();
            let link = netlink.link_named("server").await.unwrap();
            netlink.set_up(link.index).await.unwrap();
            let address = Cidr::new(SERVER.into(), 24).unwrap();
            netlink.add_address(link.index, address).await.unwrap();
            if shared.lock().unwrap().has_address {
                let granted = Cidr::new(ADDRESS.into(), 24).unwrap();
                netlink.add_address(link.index, granted).await.unwrap();
            }
            let mut filter = wire::FILTER;
            filter[8].3 = u32::from(wire::SERVER_PORT);
            let socket = raw::packet_socket(link.index, wire::ETHERTYPE, &filter).unwrap();
            let socket = Watched::new(socket).unwrap();
            tell_ready.send(()).unwrap();
            loop {
                let frame = tokio::time::timeout(Duration::from_millis(20), receive(&socket));
                if let Ok(frame) = frame.await {
                    let frame = frame.unwrap();
                    handle(&socket, &frame, *shared.lock().unwrap(), &tell_seen);
                }
                match cable_commands.try_recv() {
                    Ok(true) => netlink.set_up(link.index).await.unwrap(),
                    Ok(false) => set_down(link.index).await,
                    Err(mpsc::TryRecvError::Empty) => {}
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
        });
    });
    let namespace = namespace.recv().unwrap();
    if !add_veth("client", "server").await {
        return None;
    }
    let (connection, handle, _) = rtnetlink::new_connection().unwrap();
    let connection = tokio::spawn(connection);
    let moved = LinkUnspec::new_with_name("server").setns_by_fd(namespace.as_fd().as_raw_fd());
    handle.link().set(moved.build()).execute().await.unwrap();
    connection.abort();
    go.send(()).unwrap();
    ready.recv().unwrap();
    Some(Server {
        behaviour,
        seen,
        cable,
    })
}

async fn set_down(index: u32) {
    let (connection, handle, _) = rtnetlink::new_connection().unwrap();
    let connection = tokio::spawn(connection);
    let message = LinkUnspec::new_with_index(index).down().build();
    handle.link().set(message).execute().await.unwrap();
    connection.abort();
}

fn handle(
    socket: &Watched,
    frame: &[u8],
    behaviour: Behaviour,
    seen: &tokio::sync::watch::Sender<Vec<Seen>>,
) {
    let query = decode(wire::payload_for(frame, wire::SERVER_PORT).unwrap());
    let kind = query.kind.unwrap();
    seen.send_modify(|seen| seen.push((kind, frame[0] != 0xff)));
    let kind = match kind {
        Kind::Discover => Kind::Offer,
        Kind::Request if behaviour.refuses => Kind::Nak,
        Kind::Request => Kind::Ack,
        Kind::Decline => return,
        other => panic!("{other:?}"),
    };
    let mut answer = answer(&query, kind, behaviour.seconds);
    if behaviour.leads_astray {
        let [a, b, c, d] = ROUTER.octets();
        let routes = [0, a, b, c, d, 13, 10, 208, a, b, c, d];
        answer.set(code::CLASSLESS_ROUTES, &routes);
    }
    let answer = answer.encode();
    let mac = query.mac;
    let from = ([2, 0, 0, 0, 0, 1], SERVER, wire::SERVER_PORT);
    let frame = wire::frame(from, (mac, ADDRESS, wire::CLIENT_PORT), &answer);
    socket.write(&frame).unwrap();
}

const BOUND: Duration = Duration::from_secs(30);

async fn within<T>(what: &str, wait: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(BOUND, wait).await;
    result.unwrap_or_else(|_| panic!("timed out after {BOUND:?}: {what}"))
}

#[test]
fn a_lease_is_obtained_configured_renewed_kept_and_given_up() {
    in_own_network(async {
        let first = Behaviour {
            seconds: 3,
            ..USUAL
        };
        let Some(mut server) = serve(first).await else {
            return;
        };
        let (writer, leases) = event::value();
        let writer = Arc::new(writer);
        let root = supervisor::runnable(move |ctx| {
            let writer = writer.clone();
            async move { run(ctx, "client", Options::default(), writer).await }
        });
        let supervisor = Supervisor::start(root, supervisor::Options::default());
        let mut leases = leases.watch();

        let began = Instant::now();
        let lease = within("the lease", leases.next()).await.unwrap().unwrap();
        assert_eq!(lease.address, "10.77.0.5/24".parse().unwrap());
        eprintln!("got the lease after {:?}", began.elapsed());
        let netlink = Netlink::open().unwrap();
        let link = netlink.link_named("client").await.unwrap();
        let addresses = netlink.addresses(link.index).await.unwrap();
        assert!(addresses.contains(&lease.address), "{addresses:?}");
        let table = std::fs::read_to_string("/proc/thread-self/net/route").unwrap();
        assert!(table.contains("00000000\tFE004D0A"), "{table}");

        // Renewed with the same server only.
        let renewal = |seen: &Vec<Seen>| seen.contains(&(Kind::Request, true));
        within("the renewal", server.seen.wait_for(renewal))
            .await
            .unwrap();
        within("the renewed lease", leases.next())
            .await
            .unwrap()
            .unwrap();

        // The carrier is lost briefly: the address is kept and verified by broadcast.
        server.behaviour.lock().unwrap().seconds = 600;
        let before = server.seen.borrow().len();
        server.cable.send(false).unwrap();
        let mut monitor = LinkMonitor::open().unwrap();
        let down = async {
            while netlink.link(link.index).await.unwrap().carrier {
                monitor.changed().await.unwrap();
            }
        };
        within("the loss of the carrier", down).await;
        server.cable.send(true).unwrap();
        let check = |seen: &Vec<Seen>| seen[before..].contains(&(Kind::Request, false));
        within("the check", server.seen.wait_for(check))
            .await
            .unwrap();
        let long = leases.wait_for(|lease| {
            let duration = lease.as_ref().and_then(|lease| lease.duration);
            duration == Some(Duration::from_secs(600))
        });
        within("the checked lease", long).await.unwrap();

        // The carrier is lost again, and the server sends a NAK: the address is removed.
        server.behaviour.lock().unwrap().refuses = true;
        server.cable.send(false).unwrap();
        let down = async {
            while netlink.link(link.index).await.unwrap().carrier {
                monitor.changed().await.unwrap();
            }
        };
        within("the loss of the carrier", down).await;
        server.cable.send(true).unwrap();
        let lost = leases.wait_for(|lease| lease.is_none());
        within("the loss of the lease", lost).await.unwrap();
        let addresses = netlink.addresses(link.index).await.unwrap();
        assert!(!addresses.contains(&lease.address), "{addresses:?}");
        supervisor.shutdown().await;
    });
}

#[test]
fn an_address_that_another_machine_uses_is_declined() {
    in_own_network(async {
        let careless = Behaviour {
            has_address: true,
            ..USUAL
        };
        let Some(mut server) = serve(careless).await else {
            return;
        };
        let mut client = Client::open("client", Options::default()).await.unwrap();
        let told = tokio::sync::watch::Sender::new(Vec::new());
        let mut leases = told.subscribe();
        let declined = async {
            let declined = |seen: &Vec<Seen>| seen.contains(&(Kind::Decline, false));
            within("the refusal of the address", server.seen.wait_for(declined))
                .await
                .unwrap();
            let lost = |leases: &Vec<bool>| leases[..] == [true, false];
            within("the loss of the lease", leases.wait_for(lost))
                .await
                .unwrap();
        };
        tokio::select! {
            error = client.run(|lease| told.send_modify(|all| all.push(lease.is_some()))) => panic!("{error}"),
            () = declined => {}
        }
    });
}

/// The networks of pods become known after the lease.
#[test]
fn routes_to_reserved_networks_go_when_they_are_known() {
    in_own_network(async {
        let astray = Behaviour {
            leads_astray: true,
            ..USUAL
        };
        let Some(_server) = serve(astray).await else {
            return;
        };
        let (known, reserved) = event::value();
        let options = Options {
            reserved,
            ..Options::default()
        };
        let mut client = Client::open("client", options).await.unwrap();
        let told = tokio::sync::watch::Sender::new(0);
        let mut leases = told.subscribe();
        let routes = || std::fs::read_to_string("/proc/thread-self/net/route").unwrap();
        let checked = async {
            within("the lease", leases.wait_for(|count| *count == 1))
                .await
                .unwrap();
            let table = routes();
            assert!(table.contains("0000D00A\tFE004D0A"), "{table}");
            known.set(vec!["10.208.0.0/12".parse().unwrap()]);
            within("its routes", leases.wait_for(|count| *count == 2))
                .await
                .unwrap();
            let table = routes();
            assert!(
                !table.contains("0000D00A") && table.contains("00000000\tFE004D0A"),
                "{table}"
            );
        };
        tokio::select! {
            error = client.run(|_| told.send_modify(|count| *count += 1)) => panic!("{error}"),
            () = checked => {}
        }
    });
}

#[test]
fn an_interface_that_cannot_be_used_is_named() {
    in_own_network(async {
        let missing = Client::open("nosuch0", Options::default()).await;
        assert!(matches!(missing.err(), Some(DhcpError::Netlink { .. })));
    });
}
