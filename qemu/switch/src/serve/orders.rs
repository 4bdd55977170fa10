//! Serves control requests.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

use super::way_out::Sockets;
use super::{ACCEPT_AGAIN, Entry, Machine, Shared, forwards, links};
use crate::control::{Answer, MAX_REQUEST, Reply, Request};
use crate::faults::Faults;
use crate::learning::is_group;
use crate::way_out::Router;
use crate::{
    GATEWAY_MAC, Mac, NetworkStatus, Port, PortForward, PortStatus, Refusal, WayOutStatus,
};

/// Serves clients of the control socket.
pub(super) async fn take_orders(shared: Rc<Shared>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => shared.spawn(converse(shared.clone(), stream)),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a control connection");
                sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn converse(shared: Rc<Shared>, stream: UnixStream) {
    if let Err(error) = answer_all(&shared, stream).await {
        tracing::debug!(%error, "a control connection failed");
    }
}

async fn answer_all(shared: &Rc<Shared>, mut stream: UnixStream) -> io::Result<()> {
    let (input, mut output) = stream.split();
    let mut input = BufReader::new(input);
    loop {
        let mut line = Vec::new();
        let length = (&mut input)
            .take(MAX_REQUEST as u64)
            .read_until(b'\n', &mut line)
            .await?;
        if length == 0 {
            return Ok(());
        }
        let request = serde_json::from_slice(&line);
        let stop = matches!(request, Ok(Request::Stop));
        let answer = match request {
            Ok(request) => shared.obey(request),
            Err(error) => Err(Refusal::Request(error.to_string())),
        };
        let mut answer = serde_json::to_vec(&answer)?;
        answer.push(b'\n');
        output.write_all(&answer).await?;
        if stop {
            // Not before the answer was sent.
            shared.stop.notify_one();
        }
    }
}

impl Shared {
    fn obey(self: &Rc<Self>, request: Request) -> Answer {
        match request {
            Request::AddPort { name, mac, address } => {
                self.add_port(name, mac, address).map(Reply::Port)
            }
            Request::Forward { name, guest } => self.forward(&name, guest).map(Reply::PortForward),
            Request::ForwardShared { address, guest } => {
                self.forward_shared(address, guest).map(Reply::PortForward)
            }
            Request::SetFaults { name, faults } => self.set_faults(&name, faults),
            Request::Block { a, b, on } => self.block(&a, &b, on),
            Request::Part { groups } => self.part(&groups),
            Request::SetAddress { name, address } => self.set_address(&name, address),
            Request::SetDhcp { name, on } => self.set_dhcp(&name, on),
            Request::Status => Ok(Reply::Status(Box::new(self.status()))),
            Request::Stop => Ok(Reply::Done),
        }
    }

    /// The index of a port.
    fn find(&self, name: &str) -> Result<usize, Refusal> {
        let entries = self.entries.borrow();
        let index = entries.iter().position(|entry| entry.name == name);
        index.ok_or_else(|| Refusal::NoPort(name.to_owned()))
    }

    fn add_port(
        self: &Rc<Self>,
        name: String,
        mac: Mac,
        address: Ipv4Addr,
    ) -> Result<Port, Refusal> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !(1..=32).contains(&name.len()) || !name.bytes().all(plain) {
            return Err(Refusal::Name(name));
        }
        if let Ok(index) = self.find(&name) {
            let entry = &self.entries.borrow()[index];
            if entry.mac != mac {
                return Err(Refusal::PortTaken {
                    name,
                    mac: entry.mac,
                });
            }
            return Ok(Port {
                socket: entry.socket.clone(),
                address: entry.address,
            });
        }
        if is_group(mac.0) || mac == GATEWAY_MAC || mac.0 == [0; 6] {
            return Err(Refusal::BadMac(mac));
        }
        if let Some(owner) = self.entries.borrow().iter().find(|entry| entry.mac == mac) {
            let owner = owner.name.clone();
            return Err(Refusal::MacTaken { mac, owner });
        }
        self.check_address(address, None)?;

        let file = format!("{name}.sock");
        // By its bare name: the working directory is the folder, and socket addresses are short.
        let listener = listen(Path::new(&file)).map_err(system("listen for the machine"))?;
        let port = Port {
            socket: self.dir.join(file),
            address,
        };
        let index = self.fabric.borrow_mut().add_link();
        self.gateway.borrow_mut().dhcp.assign(mac.0, address);
        self.entries.borrow_mut().push(Entry {
            name: name.clone(),
            mac,
            address,
            socket: port.socket.clone(),
            forwards: Vec::new(),
        });
        tracing::info!(port = name, %mac, %address, "added port");
        self.spawn(links::serve_port(self.clone(), index, name, listener));
        Ok(port)
    }

    fn check_address(&self, address: Ipv4Addr, of: Option<usize>) -> Result<(), Refusal> {
        if !self.options.may_have(address) {
            return Err(Refusal::BadAddress {
                address,
                gateway: self.options.gateway,
                prefix: self.options.prefix,
            });
        }
        let entries = self.entries.borrow();
        let mut others = entries.iter().enumerate();
        match others.find(|(index, entry)| entry.address == address && Some(*index) != of) {
            Some((_, owner)) => Err(Refusal::AddressTaken {
                address,
                owner: owner.name.clone(),
            }),
            None => Ok(()),
        }
    }

    fn forward(self: &Rc<Self>, name: &str, guest: u16) -> Result<SocketAddr, Refusal> {
        let index = self.find(name)?;
        let entries = self.entries.borrow();
        let known = entries[index]
            .forwards
            .iter()
            .find(|known| known.guest == guest);
        if let Some(known) = known {
            return Ok(known.host);
        }
        drop(entries);
        if guest == 0 {
            return Err(Refusal::GuestPort(name.to_owned()));
        }
        let machine = Machine {
            port: index,
            mac: self.entries.borrow()[index].mac,
        };
        let host = self.begin_forward(forwards::Target::Machine(machine), guest)?;
        tracing::info!(port = name, guest, %host, "added forward");
        let mut entries = self.entries.borrow_mut();
        entries[index].forwards.push(PortForward { guest, host });
        Ok(host)
    }

    fn forward_shared(
        self: &Rc<Self>,
        address: Ipv4Addr,
        guest: u16,
    ) -> Result<SocketAddr, Refusal> {
        self.check_address(address, None)?;
        let known = self
            .shared_forwards
            .borrow()
            .get(&(address, guest))
            .copied();
        if let Some(host) = known {
            return Ok(host);
        }
        if guest == 0 {
            return Err(Refusal::GuestPort(address.to_string()));
        }
        // From now on, so that the first connection need not ask.
        self.gateway.borrow_mut().share(address);
        let host = self.begin_forward(forwards::Target::Shared(address), guest)?;
        tracing::info!(%address, guest, %host, "added forward");
        let mut forwards = self.shared_forwards.borrow_mut();
        forwards.insert((address, guest), host);
        Ok(host)
    }

    fn begin_forward(
        self: &Rc<Self>,
        target: forwards::Target,
        guest: u16,
    ) -> Result<SocketAddr, Refusal> {
        let (listener, host) = forwards::listen().map_err(system("listen for the host"))?;
        self.spawn(forwards::serve_forward(
            self.clone(),
            target,
            guest,
            listener,
        ));
        Ok(host)
    }

    fn set_faults(&self, name: &str, faults: Faults) -> Answer {
        let index = self.find(name)?;
        faults.check()?;
        tracing::info!(port = name, ?faults, "set link faults");
        self.fabric.borrow_mut().set_faults(index, faults);
        Ok(Reply::Done)
    }

    fn block(&self, a: &str, b: &str, on: bool) -> Answer {
        let pair = (self.find(a)?, self.find(b)?);
        if pair.0 == pair.1 {
            return Err(Refusal::Itself(a.to_owned()));
        }
        tracing::info!(a, b, on, "set block");
        self.fabric.borrow_mut().block(pair.0, pair.1, on);
        Ok(Reply::Done)
    }

    fn part(&self, groups: &[Vec<String>]) -> Answer {
        let mut places = BTreeMap::new();
        for (group, names) in groups.iter().enumerate() {
            for name in names {
                if places.insert(self.find(name)?, group).is_some() {
                    return Err(Refusal::Itself(name.clone()));
                }
            }
        }
        tracing::info!(?groups, "set partition");
        let mut fabric = self.fabric.borrow_mut();
        for a in 0..self.entries.borrow().len() {
            for b in 0..a {
                let apart = match (places.get(&a), places.get(&b)) {
                    (Some(a), Some(b)) => a != b,
                    _ => false,
                };
                fabric.block(a, b, apart);
            }
        }
        Ok(Reply::Done)
    }

    fn set_address(&self, name: &str, address: Ipv4Addr) -> Answer {
        let index = self.find(name)?;
        self.check_address(address, Some(index))?;
        tracing::info!(port = name, %address, "set address");
        let entry = &mut self.entries.borrow_mut()[index];
        entry.address = address;
        self.gateway.borrow_mut().dhcp.assign(entry.mac.0, address);
        Ok(Reply::Done)
    }

    fn set_dhcp(&self, name: &str, on: bool) -> Answer {
        let index = self.find(name)?;
        tracing::info!(port = name, on, "DHCP");
        let mac = self.entries.borrow()[index].mac;
        self.gateway.borrow_mut().dhcp.serve(mac.0, on);
        Ok(Reply::Done)
    }

    fn status(&self) -> NetworkStatus {
        let mut fabric = self.fabric.borrow_mut();
        let gateway = self.gateway.borrow();
        let entries = self.entries.borrow();
        let now = Instant::now();
        let name = |index: usize| entries[index].name.clone();
        NetworkStatus {
            options: self.options.clone(),
            seed: self.seed,
            ports: (0..entries.len())
                .map(|index| {
                    let entry = &entries[index];
                    PortStatus {
                        name: entry.name.clone(),
                        mac: entry.mac,
                        address: entry.address,
                        leased: gateway.dhcp.leased(entry.mac.0, now),
                        dhcp: gateway.dhcp.serves(entry.mac.0),
                        connected: fabric.plugged(index),
                        aggregated: fabric.aggregated(index, now),
                        faults: fabric.faults(index),
                        counters: fabric.counters(index),
                        forwards: entry.forwards.clone(),
                    }
                })
                .collect(),
            blocks: fabric.blocks().map(|(a, b)| (name(a), name(b))).collect(),
            connections: forwards::MOST - self.places.available_permits(),
            way_out: WayOutStatus {
                connections: gateway.router.as_ref().map_or(0, Router::connections),
                flows: self.sockets.as_ref().map_or(0, Sockets::flows),
            },
            capture: fabric.capture().map(|capture| capture.status()),
        }
    }
}

fn system(step: &str) -> impl FnOnce(io::Error) -> Refusal {
    move |source| Refusal::System {
        step: step.to_owned(),
        source_text: source.to_string(),
    }
}

/// Listens on a socket of this name, which may be left from an earlier process.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = StdUnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}
