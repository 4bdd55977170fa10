//! A minimal init with etcd on a disk, as a baseline for `cargo xtask bench boot`.
//!
//! Packed as `/init`, with `/usr/bin/etcd` and `/sbin/mkfs.xfs`, it gets a DHCP lease, creates a
//! file system on the data partition (the last partition of the boot disk, first grown to the end
//! of the disk), starts etcd on it and does one put. Independent steps run concurrently on one
//! thread, with the same code that the node uses, and etcd gets the same flags as on a node, except
//! for TLS among peers. There are no keys, no certificates, no supervisor and no log.
//!
//! It reports progress in the same console lines as a node; `consensus` is reached when the put has
//! been acknowledged. Then it waits for a power cut. If the fw_cfg item `opt/dev.hearth/bare-init`
//! contains `off`, it powers the machine off immediately: the time that this takes is the minimum
//! that emulator, firmware and kernel need.

use std::fs::DirBuilder;
use std::future::Future;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use hearth_sys::block::Blocks;
use hearth_sys::child::Child;
use hearth_sys::dhcp::{self, Lease};
use hearth_sys::firmware::{self, Booted};
use hearth_sys::mounts::{self, MountFlags};
use hearth_sys::netlink::{self, Netlink};
use hearth_sys::{fw_cfg, mkfs};
use tokio::net::UnixStream;
use tokio::process::Command;
use uuid::{Uuid, uuid};

const MODE: &str = "opt/dev.hearth/bare-init";
/// The type of the data partition.
const DATA_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-68656172746a");
const DATA: &str = "/data";
const ETCD_DATA: &str = "/data/etcd";
/// The directory of etcd's client socket, which is etcd's working directory.
const SOCKET_DIRECTORY: &str = "/ephemeral";
const SOCKET: &str = "client:0";
const PEER_PORT: u16 = 7834;
/// Emulated and loaded machines are slow.
const BOUND: Duration = Duration::from_secs(300);

fn main() -> Result<()> {
    reached("kernel", "");
    if let Err(error) = run() {
        println!("hearth: core ended: {error:#}");
    }
    rustix::fs::sync();
    rustix::system::reboot(rustix::system::RebootCommand::PowerOff).context("power off")?;
    Ok(())
}

fn reached(what: &str, detail: &str) {
    println!("{}", format!("hearth: reached {what} {detail}").trim_end());
}

fn run() -> Result<()> {
    mounts::bring_up()?;
    match fw_cfg::read(MODE)?.as_deref() {
        None => {}
        Some(b"off") => return Ok(()),
        Some(_) => bail!("fw_cfg item {MODE}: expected no item or \"off\""),
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let etcd = tokio::time::timeout(BOUND, come_up());
        let _etcd = etcd.await.context("start within the time limit")??;
        std::future::pending().await
    })
}

/// Starts everything; returns etcd after it has acknowledged a put.
async fn come_up() -> Result<Child> {
    let (address, ()) = tokio::try_join!(network(), storage())?;
    let etcd = start_etcd(address).await?;
    let socket = Path::new(SOCKET_DIRECTORY).join(SOCKET);
    put(connect(&socket).await).await.context("put")?;
    reached("consensus", "");
    Ok(etcd)
}

async fn network() -> Result<IpAddr> {
    let netlink = Netlink::open()?;
    netlink.set_loopback_up().await?;
    let link = netlink::first_ethernet(&netlink).await?;
    let mut client = dhcp::Client::open(&link.name, dhcp::Options::default()).await?;
    let (tell, leased) = tokio::sync::oneshot::channel();
    let mut tell = Some(tell);
    let on_lease = |lease: Option<&Lease>| {
        if let (Some(lease), Some(tell)) = (lease, tell.take()) {
            // The receiver is right below.
            let _ = tell.send(lease.address);
        }
    };
    let cidr = tokio::select! {
        error = client.run(on_lease) => return Err(error.into()),
        leased = leased => leased?,
    };
    reached("network", &cidr.to_string());
    Ok(cidr.address())
}

async fn storage() -> Result<()> {
    let blocks = Blocks::default();
    let booted = Booted::read(Path::new(firmware::EFIVARS))?;
    let esp = blocks.boot_partition(&booted, DATA_TYPE)?;
    let partitions = blocks.partitions(&esp.disk)?;
    let last = partitions.into_iter().max_by_key(|p| p.entry.first);
    let data = last.context("no partition")?;
    ensure!(data.entry.guid != esp.entry.guid, "no data partition");
    let data = blocks.grow(&data)?;
    mkfs::xfs(&data.path).await?;
    let flags = MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID;
    mounts::mount(&data.path, Path::new(DATA), "xfs", flags, "")?;
    // etcd requires a directory that is not accessible to others.
    let made = DirBuilder::new().mode(0o700).create(ETCD_DATA);
    made.context("create etcd's directory")?;
    reached("storage", "");
    Ok(())
}

/// The same flags as on a node that bootstraps a cluster, except for TLS.
async fn start_etcd(address: IpAddr) -> Result<Child> {
    let peer = format!("http://{address}:{PEER_PORT}");
    let client = format!("unix://{SOCKET}");
    let arguments = [
        ("name", "bare"),
        ("data-dir", ETCD_DATA),
        ("listen-client-urls", &client),
        ("advertise-client-urls", &client),
        ("listen-client-http-urls", "unix://http:0"),
        ("listen-peer-urls", &peer),
        ("initial-advertise-peer-urls", &peer),
        ("initial-cluster", &format!("bare={peer}")),
        ("initial-cluster-state", "new"),
        ("heartbeat-interval", "20"),
        ("election-timeout", "100"),
        ("quota-backend-bytes", "1073741824"),
        ("auto-compaction-mode", "periodic"),
        ("auto-compaction-retention", "1h"),
        ("snapshot-count", "10000"),
        ("pre-vote", "true"),
        ("enable-grpc-gateway", "false"),
        ("logger", "zap"),
        ("log-outputs", "stderr"),
    ]
    .map(|(flag, value)| format!("--{flag}={value}"));
    let mut command = Command::new("/usr/bin/etcd");
    command
        .args(arguments)
        .env_clear()
        .current_dir(SOCKET_DIRECTORY);
    Ok(Child::spawn(command, |_, _| {}).await?)
}

/// etcd listens long before it serves; requests wait in the socket until then. The caller's timeout
/// covers an etcd that never serves.
async fn connect(socket: &Path) -> UnixStream {
    loop {
        match UnixStream::connect(socket).await {
            Ok(stream) => return stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// One gRPC put, without a library for it.
async fn put(stream: UnixStream) -> Result<()> {
    // PutRequest { key: "k", value: "v" }, preceded by one byte for "not compressed" and four bytes
    // for the length.
    const MESSAGE: &[u8] = b"\0\0\0\0\x06\x0a\x01k\x12\x01v";
    let (client, connection) = h2::client::handshake(stream).await?;
    let call = async {
        let mut client = client.ready().await?;
        let request = http::Request::post("http://etcd/etcdserverpb.KV/Put")
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())?;
        let (response, mut body) = client.send_request(request, false)?;
        body.send_data(Bytes::from_static(MESSAGE), true)?;
        let mut body = response.await?.into_body();
        while let Some(data) = body.data().await {
            let length = data?.len();
            body.flow_control().release_capacity(length)?;
        }
        let trailers = body.trailers().await?.context("no trailers")?;
        let status = trailers.get("grpc-status").map(|status| status.as_bytes());
        ensure!(status == Some(b"0"), "unexpected trailers: {trailers:?}");
        Ok(())
    };
    driven_by(connection, call).await
}

/// Runs `call` while driving the connection.
async fn driven_by(
    connection: impl Future<Output = Result<(), h2::Error>>,
    call: impl Future<Output = Result<()>>,
) -> Result<()> {
    tokio::select! {
        biased;
        done = call => done,
        ended = connection => bail!("the connection was closed: {ended:?}"),
    }
}
