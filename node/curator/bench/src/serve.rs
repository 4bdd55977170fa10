//! The server process, and how the process of the callers starts it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::identity::{NodeCredentials, NodeKey};
use hearth_api::tls::{self, ExpectedServer, OwnCertificate, wall_clock};
use hearth_api::transport::Connector;
use hearth_consensus::{ConsensusUser, NamespacedClient, RootClient};
use hearth_curator::Timing;
use hearth_curator::testing::{World, unlimited};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;

/// Timeout for the server's start; it issues thousands of certificates, on a slow machine, too.
const START_BOUND: Duration = Duration::from_secs(120);
/// Timeout for an etcd that has just been started.
const ETCD_BOUND: Duration = Duration::from_secs(20);

/// The budgets of nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Budget {
    /// None: what is measured is a curator at work, not one that makes a node wait.
    Unlimited,
    /// Those of a real cluster.
    Default,
}

impl Budget {
    const ALL: [Self; 2] = [Self::Unlimited, Self::Default];

    const fn name(self) -> &'static str {
        match self {
            Self::Unlimited => "unlimited",
            Self::Default => "default",
        }
    }

    /// The one of this name.
    pub(crate) fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|budget| budget.name() == name)
    }
}

/// Bootstraps a cluster and serves it until standard input is closed.
pub(crate) async fn run(folder: &Path, count: usize, budget: Budget) -> Result<()> {
    let mut timing = Timing::default();
    if budget == Budget::Unlimited {
        timing.budget = unlimited();
    }
    let world = World::new(timing).await;
    let mut nodes = vec![(*world.node).clone()];
    nodes.extend(world.add_nodes(count).await);
    let lines: Vec<_> = nodes
        .iter()
        .map(|node| {
            let seed = hex::encode(*node.key.expose_seed());
            format!("{seed} {}\n", hex::encode(&node.certificate))
        })
        .collect();
    std::fs::write(folder.join("nodes"), lines.concat()).context("cannot write credentials")?;
    std::fs::write(folder.join("ca.der"), &world.node.ca).context("cannot write ca.der")?;
    let (_etcd, raw) = other_etcd(folder, &world.node).await?;
    let port = world.ready.get().context("the curator is not listening")?;
    println!("{port} {raw}");
    let mut end = Vec::new();
    tokio::io::stdin().read_to_end(&mut end).await?;
    world.stop().await;
    Ok(())
}

/// Starts an etcd that serves clients over TLS with a node's credentials. It has those flags of the
/// curator's etcd that affect performance.
async fn other_etcd(folder: &Path, node: &NodeCredentials) -> Result<(Child, u16)> {
    let pem = |label: &str, der: &[u8]| pem::encode(&pem::Pem::new(label, der));
    let write = |name: &str, text: String| -> Result<PathBuf> {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    let certificate = write("etcd.pem", pem("CERTIFICATE", &node.certificate))?;
    let ca = write("ca.pem", pem("CERTIFICATE", &node.ca))?;
    let key = write("etcd.key", node.key.expose_pkcs8_pem().to_string())?;
    // Free now, and etcd binds it at once.
    let port = free_port()?;
    let url = format!("https://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{}", free_port()?);
    let child = Command::new(hearth_consensus::testing::etcd())
        .env_clear()
        .args([
            "--data-dir".into(),
            folder.join("etcd").display().to_string(),
        ])
        .args([
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--name", "raw", "--initial-cluster", &format!("raw={peer}")])
        .arg("--cert-file")
        .arg(certificate)
        .arg("--key-file")
        .arg(key)
        .arg("--trusted-ca-file")
        .arg(ca)
        .args([
            "--client-cert-auth",
            "--enable-grpc-gateway=false",
            "--pre-vote",
        ])
        .args(["--heartbeat-interval", "20", "--election-timeout", "100"])
        .args(["--snapshot-count", "10000", "--logger", "zap"])
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.join("etcd.log")).context("cannot create etcd.log")?)
        .kill_on_drop(true)
        .spawn()
        .context("cannot start etcd")?;
    Ok((child, port))
}

fn free_port() -> Result<u16> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(free.local_addr()?.port())
}

/// A server in a separate process.
pub(crate) struct Served {
    /// The credentials of all nodes; the first is the curator's own node.
    pub nodes: Vec<NodeCredentials>,
    curator: SocketAddr,
    etcd: SocketAddr,
    process: Child,
    /// The server stops when this is closed.
    _stdin: Option<ChildStdin>,
    folder: tempfile::TempDir,
}

impl Served {
    /// Starts a server with `count` nodes in addition to the first.
    pub(crate) async fn start(count: usize, budget: Budget) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot create a temporary directory")?;
        let mut process =
            Command::new(std::env::current_exe().context("cannot find this program")?)
                .arg("serve")
                .arg(folder.path())
                .arg(count.to_string())
                .arg(budget.name())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .context("cannot start the server")?;
        let stdout = process
            .stdout
            .take()
            .context("the server has no standard output")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(START_BOUND, lines.next_line()).await;
        let line = line.context("timeout: the server is not ready")??;
        let line = line.context("the server has exited")?;
        let (curator, etcd) = line
            .split_once(' ')
            .context("server output: expected two ports")?;
        let local = |port: &str| -> Result<SocketAddr> {
            Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port.parse()?)))
        };
        Ok(Self {
            nodes: read_nodes(folder.path())?,
            curator: local(curator)?,
            etcd: local(etcd)?,
            _stdin: process.stdin.take(),
            process,
            folder,
        })
    }

    /// A new connection to the curator.
    pub(crate) fn curator(&self, node: &NodeCredentials) -> Result<Channel> {
        connection(self.curator, node)
    }

    /// Connections of this node to both.
    pub(crate) fn handshakes(&self, node: &NodeCredentials) -> Result<Handshakes> {
        Ok(Handshakes {
            config: client_config(node)?,
            curator: self.curator,
            etcd: self.etcd,
        })
    }

    /// Where the curator listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.curator
    }

    /// The folder with the credentials.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A new connection to the other etcd.
    pub(crate) async fn etcd(&self, node: &NodeCredentials) -> Result<NamespacedClient> {
        let client = RootClient::over(etcd_channel(self.etcd, node)?);
        let client = client.namespaced(ConsensusUser::Curator);
        let ready = async {
            while client.get("x").await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(ETCD_BOUND, ready)
            .await
            .context("timeout: the other etcd is not ready")?;
        Ok(client)
    }

    /// CPU time of the curator's process in seconds. etcd is another process.
    pub(crate) fn cpu(&self) -> Result<f64> {
        let pid = self.process.id().context("the server has exited")?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name in parentheses may contain any character; the state is the next field.
        let (_, rest) = stat
            .rsplit_once(')')
            .context("/proc/PID/stat: no process name")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        ensure!(fields.len() > 12, "/proc/PID/stat: too short");
        let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
        let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?;
        Ok(ticks / per_second.context("CLK_TCK is not known")? as f64)
    }

    /// Resident memory of the curator's process in bytes.
    pub(crate) fn memory(&self) -> Result<f64> {
        let pid = self.process.id().context("the server has exited")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(kib.context("/proc/PID/status: no VmRSS")?.parse::<f64>()? * 1024.0)
    }

    /// Stops the server and waits until it has exited.
    pub(crate) async fn stop(mut self) -> Result<()> {
        drop(self._stdin.take());
        let status = timeout(START_BOUND, self.process.wait()).await;
        let status = status.context("timeout: the server does not exit")??;
        ensure!(status.success(), "the server failed: {status}");
        Ok(())
    }
}

/// Connections of one node that end after the handshake.
pub(crate) struct Handshakes {
    config: Arc<ClientConfig>,
    curator: SocketAddr,
    etcd: SocketAddr,
}

impl Handshakes {
    /// One with the curator.
    pub(crate) async fn curator(&self) -> Result<()> {
        handshake(&self.config, self.curator).await
    }

    /// One with the other etcd.
    pub(crate) async fn etcd(&self) -> Result<()> {
        handshake(&self.config, self.etcd).await
    }
}

/// Until the server, too, has accepted the certificate: it sends its HTTP/2 settings then.
async fn handshake(config: &Arc<ClientConfig>, server: SocketAddr) -> Result<()> {
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let connector = TlsConnector::from(config.clone());
    let mut stream = connector.connect(server.ip().into(), stream).await?;
    stream.read_u8().await?;
    Ok(())
}

fn client_config(node: &NodeCredentials) -> Result<Arc<ClientConfig>> {
    let own = OwnCertificate::new(node, wall_clock())?;
    Ok(tls::node_client_config(&own, ExpectedServer::AnyNode)?)
}

/// A new connection to a curator.
pub(crate) fn connection(curator: SocketAddr, node: &NodeCredentials) -> Result<Channel> {
    let config = client_config(node)?;
    let endpoint: Endpoint = curator.into();
    Ok(Curators::new(vec![endpoint], config, Options::default()).channel())
}

/// A connection with the settings of the curators' client, to another server.
fn etcd_channel(address: SocketAddr, node: &NodeCredentials) -> Result<tonic::transport::Channel> {
    let config = client_config(node)?;
    let connector = Connector::new(move || {
        let tls = TlsConnector::from(config.clone());
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            tls.connect(address.ip().into(), stream).await
        }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://etcd.invalid");
    Ok(connector.channel(&endpoint))
}

pub(crate) fn read_nodes(folder: &Path) -> Result<Vec<NodeCredentials>> {
    let ca: Arc<[u8]> = std::fs::read(folder.join("ca.der"))?.into();
    let text = std::fs::read_to_string(folder.join("nodes"))?;
    let node = |line: &str| -> Result<NodeCredentials> {
        let (seed, certificate) = line
            .split_once(' ')
            .context("nodes: expected a seed and a certificate per line")?;
        Ok(NodeCredentials {
            key: NodeKey::from_seed_slice(&hex::decode(seed)?)?,
            certificate: hex::decode(certificate)?.into(),
            ca: ca.to_vec().into(),
        })
    };
    text.lines().map(node).collect()
}
