//! Throughput of the switch's way out, compared with QEMU's own user-mode network (slirp).
//!
//! Two machines that differ in nothing but what their card is connected to run at the same time, and all but one are
//! idle: they wait for an order. The same program on this host gives both their orders, so the path is the same but for
//! the network in between: the guest's TCP, the card, the network, and a TCP connection on the host's loopback. A round
//! is one transfer of each machine in each direction; every other round runs in the opposite order.
//!
//! `node/sys/examples/traffic_init.rs` is the init, and defines the orders.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_qemu::artifacts::Image;
use hearth_qemu::command::Machine;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::network::{Link, Mac, Nic, UserNetwork};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::switch::{self, Network, NetworkOptions, ProxySettings, WayOut};
use hearth_qemu::vm::{Lifetime, Vm};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{BOOT_BOUND, Lab, MEMORY, clear};
use crate::{LabError, Result};

/// Bytes of a transfer: about a second.
const BYTES: u64 = 64 << 20;
/// Bytes per system call.
const CHUNK: usize = 256 << 10;
/// Bound for a transfer.
const BOUND: Duration = Duration::from_secs(120);
/// The fw_cfg item with the address of this process.
const PEER: &str = "opt/dev.hearth/traffic";
/// The host's loopback, as slirp's machines see it.
const HOST_OF_SLIRP: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The same for those of the switch: an address for documentation.
const HOST_OF_SWITCH: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);

/// Directions of a transfer, as the machine sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the machine.
    Download,
    /// From the machine to the host.
    Upload,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Download, Self::Upload];

    /// Its name in records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Download => "download",
            Self::Upload => "upload",
        }
    }
}

/// A machine that takes orders.
struct Station {
    vm: Vm,
    listener: TcpListener,
}

/// Both machines, ready.
pub struct Stations {
    switch: Station,
    slirp: Station,
    // Ends with this.
    _network: Network,
}

/// Bytes a second of one transfer by each network.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Through the switch.
    pub switch: f64,
    /// Through slirp.
    pub slirp: f64,
}

impl Stations {
    /// Boots both. `switch` is the path of the program `hearth-switch`.
    ///
    /// # Errors
    /// If one of them, or the network, does not start.
    pub async fn start(lab: &Lab, image: &Image, switch: &Path) -> Result<Self> {
        let folder = lab.folder.join("net");
        clear(&folder)?;
        let options = NetworkOptions {
            way_out: Some(WayOut {
                resolvers: Some(Vec::new()),
                proxy: Some(ProxySettings::default()),
                aliases: BTreeMap::from([(
                    IpAddr::from(HOST_OF_SWITCH),
                    Ipv4Addr::LOCALHOST.into(),
                )]),
            }),
            // slirp has none.
            capture_limit: 0,
            ..NetworkOptions::default()
        };
        let address = options.machine_address(1);
        let mac = Mac::of_machine(1);
        let kill = switch::Lifetime::KillWithParent;
        let network = Network::start(switch, &folder, options, kill).await?;
        let socket = network.add_port("switch", mac, address).await?.socket;
        let through_switch = Link::Switch { socket };
        let through_slirp = Link::User(UserNetwork::default());
        Ok(Self {
            switch: Station::boot(lab, image, "switch", through_switch, HOST_OF_SWITCH).await?,
            slirp: Station::boot(lab, image, "slirp", through_slirp, HOST_OF_SLIRP).await?,
            _network: network,
        })
    }

    /// One transfer of each machine.
    ///
    /// # Errors
    /// If one fails or times out.
    pub async fn round(&self, direction: Direction, swapped: bool) -> Result<Rates> {
        let (switch, slirp) = match swapped {
            false => {
                let switch = self.switch.transfer(direction).await?;
                (switch, self.slirp.transfer(direction).await?)
            }
            true => {
                let slirp = self.slirp.transfer(direction).await?;
                (self.switch.transfer(direction).await?, slirp)
            }
        };
        Ok(Rates { switch, slirp })
    }
}

impl Station {
    async fn boot(
        lab: &Lab,
        image: &Image,
        name: &str,
        link: Link,
        host: Ipv4Addr,
    ) -> Result<Self> {
        let folder = lab.folder.join(name);
        clear(&folder)?;
        let run_dir = RunDir::create(&folder)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(LabError::process("listen on the loopback"))?;
        let port = listener.local_addr();
        let port = port.map_err(LabError::process("listen on the loopback"))?;
        let peer = SocketAddr::new(host.into(), port.port());
        let told = vec![Item::text(PEER, peer.to_string())?];
        let machine = Machine {
            nics: vec![Nic {
                mac: Mac::of_machine(1),
                link,
            }],
            ..lab.machine(name.to_owned(), MEMORY, image.direct(), told)
        };
        let vm = Vm::start(&machine, &run_dir, Lifetime::KillWithParent).await?;
        let station = Self { vm, listener };
        // It has booted when it has carried something, which also warms the host's caches.
        for direction in Direction::ALL {
            station.transfer(direction).await?;
        }
        Ok(station)
    }

    /// Bytes a second of one transfer.
    async fn transfer(&self, direction: Direction) -> Result<f64> {
        let connected = self.listener.accept();
        let connected = self
            .vm
            .while_running("a connection of the machine", BOOT_BOUND, connected);
        let connected = connected.await?.map_err(failed)?;
        let carried = carry(connected.0, direction);
        let carried = self
            .vm
            .while_running("the end of a transfer", BOUND, carried);
        let took = carried.await?.map_err(failed)?;
        Ok(BYTES as f64 / took.as_secs_f64())
    }
}

fn failed(error: std::io::Error) -> LabError {
    LabError::process("transfer bytes")(error)
}

/// From the order until the last byte has arrived, at whichever end.
async fn carry(mut stream: TcpStream, direction: Direction) -> std::io::Result<Duration> {
    let letter = match direction {
        Direction::Download => b'R',
        Direction::Upload => b'S',
    };
    let mut order = [letter; 9];
    order[1..].copy_from_slice(&BYTES.to_be_bytes());
    let mut buffer = vec![0; CHUNK];
    let mut left = BYTES;
    let began = Instant::now();
    stream.write_all(&order).await?;
    match direction {
        Direction::Download => {
            while left > 0 {
                let part = left.min(CHUNK as u64);
                stream.write_all(&buffer[..part as usize]).await?;
                left -= part;
            }
            stream.read_u8().await?;
        }
        Direction::Upload => {
            while left > 0 {
                match stream.read(&mut buffer).await? {
                    0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                    read => left = left.saturating_sub(read as u64),
                }
            }
        }
    }
    Ok(began.elapsed())
}
