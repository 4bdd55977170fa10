//! Messages, and the state machine with servers that answer as a test wants.

use std::net::SocketAddr;
use std::time::Duration;

use hearth_base::event;
use proptest::prelude::*;
use tokio::time::sleep;

use super::message::Status;
use super::testing::{MAC, OfflineClient, association, granted, message, option};
use super::*;
use crate::sysctl;
use crate::testing::{cable, in_own_network};

const SOLICIT: u8 = 1;
const ADVERTISE: u8 = 2;
const REQUEST: u8 = 3;
const RENEW: u8 = 5;
const REBIND: u8 = 6;
const REPLY: u8 = 7;
const DECLINE: u8 = 9;
const INFORMATION_REQUEST: u8 = 11;

fn address(last: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 1, last)
}

/// T1, T2, and both lifetimes.
const TIMES: [u32; 4] = [100, 160, 200, 400];

/// An association with one address.
fn grant(last: u16, [first, second, preferred, valid]: [u32; 4]) -> Vec<u8> {
    association([first, second], &granted(address(last), [preferred, valid]))
}

fn status(code: u8) -> Vec<u8> {
    option(13, &[0, code])
}

/// A client in a network with servers.
struct World(OfflineClient);

impl World {
    fn new(offered: Offered) -> Self {
        Self(OfflineClient::new(offered))
    }

    /// Lets time pass until the next deadline, which must not be later than this.
    fn wait(&mut self, seconds: u64) {
        let waited = self.0.wait().expect("a deadline");
        assert!(waited <= Duration::from_secs(seconds), "{waited:?}");
    }

    /// The kind and the transaction of the last message.
    fn last(&self) -> (u8, [u8; 3]) {
        let message = self.0.sent().last().expect("a message");
        (message[0], [message[1], message[2], message[3]])
    }

    fn asks(&self, kind: u8) -> [u8; 3] {
        let (found, transaction) = self.last();
        assert_eq!(found, kind, "{:?}", self.0.sent().last());
        transaction
    }

    fn hears(&mut self, kind: u8, transaction: [u8; 3], server: u8, options: &[Vec<u8>]) {
        let message = message(kind, transaction, server, &options.concat());
        assert!(self.0.receive(&message));
    }

    fn address(&self) -> Option<Ipv6Addr> {
        self.0.lease()?.address
    }

    /// Has a lease of this address of server 1.
    fn bound() -> Self {
        let mut world = Self::new(Offered::Addresses);
        let transaction = world.asks(SOLICIT);
        world.hears(ADVERTISE, transaction, 1, &[grant(1, TIMES)]);
        world.wait(2);
        let transaction = world.asks(REQUEST);
        let servers = option(23, &address(53).octets());
        world.hears(REPLY, transaction, 1, &[grant(1, TIMES), servers]);
        assert_eq!(world.address(), Some(address(1)));
        world
    }
}

#[test]
fn an_address_is_solicited_requested_renewed_and_rebound() {
    let mut world = World::bound();
    let lease = world.0.lease().cloned().expect("a lease");
    assert_eq!(lease.name_servers, [address(53)]);
    world.wait(100);
    let transaction = world.asks(RENEW);
    world.hears(REPLY, transaction, 1, &[grant(1, TIMES)]);
    world.wait(100);
    world.asks(RENEW);
    // Nobody answers until T2.
    let renewals = world.0.sent().len();
    while world.last().0 == RENEW {
        world.wait(60);
    }
    assert!(world.0.sent().len() > renewals);
    let transaction = world.asks(REBIND);
    world.hears(REPLY, transaction, 2, &[grant(1, TIMES)]);
    world.wait(100);
    world.asks(RENEW);
}

#[test]
fn an_address_ends_with_its_time() {
    let mut world = World::bound();
    let mut waited = Duration::ZERO;
    while world.0.lease().is_some() {
        waited += world.0.wait().expect("a deadline");
    }
    assert_eq!(waited, Duration::from_secs(400));
    world.asks(SOLICIT);
}

#[test]
fn the_server_with_the_highest_preference_is_asked() {
    let mut world = World::new(Offered::Addresses);
    let transaction = world.asks(SOLICIT);
    for (server, preference) in [(1, 3), (2, 9), (3, 5)] {
        let options = [grant(server.into(), TIMES), option(7, &[preference])];
        world.hears(ADVERTISE, transaction, server, &options);
        world.asks(SOLICIT);
    }
    world.wait(2);
    world.asks(REQUEST);
    let asked = world.0.sent().last().expect("a request").clone();
    assert!(asked.windows(8).any(|part| part == option(2, &[2; 4])));
    // A perfect one is not compared.
    let mut world = World::new(Offered::Addresses);
    let transaction = world.asks(SOLICIT);
    let options = [grant(1, TIMES), option(7, &[255])];
    world.hears(ADVERTISE, transaction, 1, &options);
    world.asks(REQUEST);
}

#[test]
fn what_nobody_granted_is_not_used() {
    let mut world = World::new(Offered::Addresses);
    let transaction = world.asks(SOLICIT);
    // A reply to a solicitation, an answer to another transaction, one without an address.
    world.hears(REPLY, transaction, 1, &[grant(1, TIMES)]);
    world.hears(ADVERTISE, [9; 3], 1, &[grant(1, TIMES)]);
    world.hears(ADVERTISE, transaction, 1, &[status(2)]);
    world.wait(2);
    let transaction = world.asks(SOLICIT);
    // After the first pause the first one is good enough.
    world.hears(ADVERTISE, transaction, 1, &[grant(1, TIMES)]);
    let transaction = world.asks(REQUEST);
    // Of another server.
    world.hears(REPLY, transaction, 2, &[grant(1, TIMES)]);
    assert_eq!(world.0.lease(), None);
    let refused = [grant(1, TIMES), status(1)];
    world.hears(REPLY, transaction, 1, &refused);
    assert_eq!(world.0.lease(), None);
    world.asks(SOLICIT);
}

#[test]
fn servers_that_do_not_answer_are_given_up() {
    let mut world = World::new(Offered::Addresses);
    let transaction = world.asks(SOLICIT);
    world.hears(ADVERTISE, transaction, 1, &[grant(1, TIMES)]);
    world.wait(2);
    for _ in 0..10 {
        world.asks(REQUEST);
        world.wait(40);
    }
    world.asks(SOLICIT);
}

#[test]
fn a_server_that_has_forgotten_is_asked_as_if_it_was_new() {
    let mut world = World::bound();
    world.wait(100);
    let transaction = world.asks(RENEW);
    world.hears(REPLY, transaction, 1, &[status(3)]);
    let transaction = world.asks(REQUEST);
    assert_eq!(world.address(), Some(address(1)));
    world.hears(REPLY, transaction, 1, &[grant(1, TIMES)]);
    assert_eq!(world.address(), Some(address(1)));
}

#[test]
fn an_address_of_another_machine_is_given_back() {
    let mut world = World::bound();
    world.0.claim();
    assert_eq!(world.0.lease(), None);
    let transaction = world.asks(DECLINE);
    world.hears(REPLY, transaction, 1, &[]);
    // Not at once: the server may grant it again.
    world.asks(DECLINE);
    world.wait(10);
    world.asks(SOLICIT);
}

#[test]
fn an_address_that_the_server_ends_is_not_used_any_longer() {
    let mut world = World::bound();
    world.wait(100);
    let transaction = world.asks(RENEW);
    let ended = association([0, 0], &granted(address(1), [0, 0]));
    world.hears(REPLY, transaction, 1, &[ended]);
    assert_eq!(world.address(), None);
    world.asks(SOLICIT);
    // The network has new addresses.
    let mut world = World::bound();
    world.wait(100);
    let transaction = world.asks(RENEW);
    let both = [granted(address(1), [0, 0]), granted(address(2), [200, 400])];
    world.hears(
        REPLY,
        transaction,
        1,
        &[association([0, 0], &both.concat())],
    );
    assert_eq!(world.address(), Some(address(2)));
}

#[test]
fn after_an_interruption_the_lease_is_rebound_and_the_rest_begins_anew() {
    let mut world = World::bound();
    world.0.reconnect();
    let transaction = world.asks(REBIND);
    assert_eq!(world.address(), Some(address(1)));
    world.hears(REPLY, transaction, 2, &[grant(1, TIMES)]);
    world.wait(100);
    world.asks(RENEW);
    for offered in [Offered::Information, Offered::Addresses] {
        let mut world = World::new(offered);
        let (kind, first) = world.last();
        for _ in 0..10 {
            world.wait(3600);
        }
        world.0.reconnect();
        assert_ne!(world.asks(kind), first);
        world.wait(2);
    }
    let mut world = World::new(Offered::Nothing);
    world.0.reconnect();
    assert!(world.0.sent().is_empty());
}

#[test]
fn information_alone_is_asked_for_again() {
    let mut world = World::new(Offered::Information);
    let transaction = world.asks(INFORMATION_REQUEST);
    let options = [
        option(23, &address(53).octets()),
        option(24, b"\x03lan\0"),
        option(32, &1200_u32.to_be_bytes()),
    ];
    world.hears(REPLY, transaction, 1, &options);
    let lease = world.0.lease().cloned().expect("information");
    assert_eq!(
        (lease.address, lease.domains),
        (None, vec!["lan".to_owned()])
    );
    world.wait(1200);
    world.asks(INFORMATION_REQUEST);
    // Routers have addresses now.
    world.0.offered(Offered::Addresses);
    world.asks(SOLICIT);
}

#[test]
fn other_peoples_messages_are_not_for_this_client() {
    let (client, own) = identifiers(MAC);
    let decode = |bytes: &[u8]| Answer::decode(bytes, &client, own);
    let good = message(REPLY, [1; 3], 1, &grant(1, TIMES));
    let answer = decode(&good).expect("an answer");
    assert_eq!(answer.status, Status::Success);
    assert_eq!(Answer::decode(&good, b"other", own), None);
    let other = Answer::decode(&good, &client, 8).expect("an answer");
    assert_eq!(other.granted, None);
    for kind in [0, SOLICIT, REQUEST, 13, 255] {
        assert_eq!(decode(&message(kind, [1; 3], 1, &[])), None);
    }
    assert_eq!(decode(&good[..good.len() - 1]), None);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let (client, own) = identifiers(MAC);
        let _ = Answer::decode(&bytes, &client, own);
        let _ = Answer::decode(&message(REPLY, [1; 3], 1, &bytes), &client, own);
    }

    /// Whatever servers say, there is something left to do.
    #[test]
    fn no_server_stops_the_client(
        steps in proptest::collection::vec((0_u8..6, any::<u8>(), 0_u32..500, 0_u32..500), 1..60),
    ) {
        let mut world = World::new(Offered::Addresses);
        for (what, code, first, second) in steps {
            let (_, transaction) = world.last();
            let times = [first, second, first.max(second), first.max(second) + 1];
            let options = match what {
                0 => vec![grant(1, times)],
                1 => vec![status(code % 7)],
                _ => vec![grant(1, times), status(code % 7)],
            };
            match what {
                3 => world.wait(90_000),
                4 => world.0.claim(),
                5 => world.0.reconnect(),
                _ => {
                    world.hears(ADVERTISE, transaction, 1, &options);
                    let (_, transaction) = world.last();
                    world.hears(REPLY, transaction, 1, &options);
                }
            }
            prop_assert!(world.0.has_deadline());
        }
    }
}

/// A server on the other end of a cable.
struct Server {
    socket: tokio::net::UdpSocket,
    interface: u32,
    client: [u8; 6],
}

impl Server {
    fn new(link: &Link, client: [u8; 6]) -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket::socket(AddressFamily::Inet6, SockType::Datagram, flags, None).unwrap();
        let name = std::ffi::OsString::from(&link.name);
        socket::setsockopt(&socket, sockopt::BindToDevice, &name).unwrap();
        let address = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, SERVER_PORT, 0, 0);
        socket::bind(socket.as_raw_fd(), &SockaddrIn6::from(address)).unwrap();
        let socket = UdpSocket::from(socket);
        socket.join_multicast_v6(&ALL_SERVERS, link.index).unwrap();
        Self {
            socket: tokio::net::UdpSocket::from_std(socket).unwrap(),
            interface: link.index,
            client,
        }
    }

    /// Answers messages until one of this kind comes, which is answered, too.
    async fn serve(&self, address: Ipv6Addr, until: u8) {
        let (client, own) = identifiers(self.client);
        let mut buffer = [0; MOST_BYTES];
        loop {
            let (length, from) = self.socket.recv_from(&mut buffer).await.unwrap();
            let (asked, kind) = (&buffer[..length], buffer[0]);
            assert!(asked.windows(client.len()).any(|part| part == client));
            let mut answer = vec![if kind == SOLICIT { ADVERTISE } else { REPLY }];
            answer.extend(&asked[1..4]);
            answer.extend(option(1, &client));
            answer.extend(option(2, &[1; 4]));
            let mut content = own.to_be_bytes().to_vec();
            content.extend([0; 8]);
            content.extend(granted(address, [3600, 7200]));
            answer.extend(option(3, &content));
            answer.extend(option(23, &super::tests::address(53).octets()));
            self.socket.send_to(&answer, from).await.unwrap();
            let SocketAddr::V6(from) = from else {
                panic!("{from}");
            };
            assert_eq!(from.scope_id(), self.interface);
            if kind == until {
                return;
            }
        }
    }
}

/// The kernel has the address, it is published once it can be used, and it is given back where another machine has it.
#[test]
fn an_address_is_used_once_nobody_else_has_it() {
    in_own_network(async {
        let netlink = Netlink::open().unwrap();
        let Some([here, there]) = cable(&netlink).await else {
            return;
        };
        // The server can answer as soon as it has a cable again.
        sysctl::set_of_link("ipv6", "there", "accept_dad", "0").unwrap();
        let server = Server::new(&there, here.mac.unwrap());
        let (says, offered) = event::value();
        let reserved = event::value().1;
        let options = Options { offered, reserved };
        let mut client = Client::open(&here, options).unwrap();
        let (tell, mut leases) = tokio::sync::mpsc::unbounded_channel();
        let run = client.run(|lease| drop(tell.send(lease.cloned())));
        let test = async {
            says.set(Offered::Addresses);
            // Somebody has the first address that the server grants.
            let (taken, free) = (address(1), address(2));
            netlink
                .set_ipv6_addresses(there.index, &[host(taken)])
                .await
                .unwrap();
            server.serve(taken, DECLINE).await;
            server.serve(free, REQUEST).await;
            let lease = leases.recv().await.unwrap().expect("a lease");
            assert_eq!(lease.address, Some(free));
            assert_eq!(lease.name_servers, [address(53)]);
            let state = netlink.address_state(here.index, free).await.unwrap();
            assert_eq!(state, Some(AddressState::Usable));
            let state = netlink.address_state(here.index, taken).await.unwrap();
            assert_eq!(state, None);
            // The cable is interrupted, until the client has noticed, and the address stays the same.
            let interrupted = async {
                loop {
                    netlink.set_down(there.index).await.unwrap();
                    sleep(Duration::from_millis(100)).await;
                    netlink.set_up(there.index).await.unwrap();
                    sleep(Duration::from_millis(500)).await;
                }
            };
            tokio::select! {
                () = server.serve(free, REBIND) => {}
                () = interrupted => {}
            }
            netlink.set_up(there.index).await.unwrap();
            // The kernel forgets the address with the interface.
            netlink.set_down(here.index).await.unwrap();
            assert_eq!(leases.recv().await.unwrap(), None);
            netlink.set_up(here.index).await.unwrap();
            let lease = leases.recv().await.unwrap().expect("a lease");
            assert_eq!(lease.address, Some(free));
        };
        tokio::select! {
            error = run => panic!("{error}"),
            () = test => {}
        }
    });
}
