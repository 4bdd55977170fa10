//! A minimal init that receives and sends bytes, for `cargo xtask bench network`.
//!
//! Packed as `/init`, it gets a DHCP lease and then connects, again and again, to the address in the fw_cfg item
//! `opt/dev.hearth/traffic`. At each connection the other end gives an order: a letter, and a number of bytes (64 bits,
//! most significant byte first).
//!
//! | order | what this init does |
//! |---|---|
//! | `R` | receives so many bytes, and answers with one |
//! | `S` | sends so many bytes, and ends its direction |
//!
//! It knows nothing of the network in between, so that two of them can be compared. It ends with a power cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hearth_base::supervisor::spawn_blocking;
use hearth_sys::dhcp::{self, Lease};
use hearth_sys::netlink::{self, Netlink};
use hearth_sys::{fw_cfg, mounts};
use tokio::sync::oneshot;

const PEER: &str = "opt/dev.hearth/traffic";
/// Bytes per system call.
const CHUNK: usize = 128 << 10;
/// Between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(50);

fn main() -> Result<()> {
    println!("hearth: reached kernel");
    if let Err(error) = run() {
        println!("hearth: core ended: {error:#}");
    }
    rustix::system::reboot(rustix::system::RebootCommand::PowerOff).context("power off")?;
    Ok(())
}

fn run() -> Result<()> {
    mounts::bring_up()?;
    let item = fw_cfg::read(PEER)?.with_context(|| format!("no fw_cfg item {PEER}"))?;
    let peer = String::from_utf8(item)?;
    let peer: SocketAddr = peer.parse().with_context(|| format!("{PEER}: {peer:?}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let (tell, leased) = oneshot::channel();
        let traffic = async {
            leased.await.context("no lease")?;
            spawn_blocking(move || serve(peer)).await?
        };
        // The lease is renewed meanwhile.
        tokio::select! {
            ended = network(tell) => ended,
            ended = traffic => ended,
        }
    })
}

/// Keeps the address.
async fn network(tell: oneshot::Sender<()>) -> Result<()> {
    let netlink = Netlink::open()?;
    let link = netlink::first_ethernet(&netlink).await?;
    let mut client = dhcp::Client::open(&link.name, dhcp::Options::default()).await?;
    let mut tell = Some(tell);
    let on_lease = |lease: Option<&Lease>| {
        if let (Some(_), Some(tell)) = (lease, tell.take()) {
            println!("hearth: reached network");
            // The receiver ends with this.
            let _ = tell.send(());
        }
    };
    Err(client.run(on_lease).await.into())
}

fn serve(peer: SocketAddr) -> Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match TcpStream::connect(peer) {
            Ok(mut stream) => obey(&mut stream, &mut buffer)?,
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
}

fn obey(stream: &mut TcpStream, buffer: &mut [u8]) -> Result<()> {
    let mut order = [0; 9];
    stream.read_exact(&mut order).context("read an order")?;
    let [letter, length @ ..] = order;
    let mut left = u64::from_be_bytes(length);
    match letter {
        b'R' => {
            while left > 0 {
                let read = stream.read(buffer).context("receive")?;
                ensure!(read > 0, "{left} bytes are missing");
                left = left.checked_sub(read as u64).context("too many bytes")?;
            }
            stream.write_all(b".").context("answer")?;
        }
        b'S' => {
            while left > 0 {
                let part = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
                stream.write_all(&buffer[..part]).context("send")?;
                left -= part as u64;
            }
            stream.shutdown(Shutdown::Write).context("end")?;
        }
        other => bail!("order {other}: expected 'R' or 'S'"),
    }
    // The other end has received everything when it ends its direction.
    stream.read(buffer).context("wait for the end")?;
    Ok(())
}
