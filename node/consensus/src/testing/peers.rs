//! A network between several etcds on one machine. Each reaches its peers, by name, through an HTTP
//! CONNECT proxy of its own, which knows their addresses and which of them are partitioned.
//!
//! When it joins, etcd first tries to resolve the names of its peers. Where mount namespaces are
//! available it gets an `/etc/hosts` with them, elsewhere it loses half a minute.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hearth_api::identity::NodeId;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::etcd;

/// Maximum length of a request that a proxy reads, in bytes.
const LONGEST: usize = 4096;

#[derive(Default)]
struct Shared {
    peers: Mutex<HashMap<NodeId, SocketAddr>>,
    cut: watch::Sender<HashSet<NodeId>>,
    stall: watch::Sender<()>,
}

/// See the module. Dropping it closes the connections that it carries.
pub struct Network {
    shared: Arc<Shared>,
    proxies: Mutex<JoinSet<()>>,
    directory: TempDir,
    has_names: bool,
}

impl Default for Network {
    fn default() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let hosts = directory.path().join("hosts");
        std::fs::write(&hosts, "").unwrap();
        let script = format!(
            "exec /usr/bin/unshare {} /bin/sh -c '/bin/mount --bind {} /etc/hosts && exec \"$0\" \"$@\"' \"$@\"",
            if nix::unistd::geteuid().is_root() {
                "-m"
            } else {
                "-rm"
            },
            hosts.display(),
        );
        let path = directory.path().join("etcd");
        std::fs::write(
            &path,
            format!("#!/bin/sh\nset -- {} \"$@\"\n{script}\n", etcd().display()),
        )
        .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let tried = std::process::Command::new(&path).arg("--version").output();
        Self {
            shared: Arc::default(),
            proxies: Mutex::default(),
            directory,
            has_names: tried.is_ok_and(|tried| tried.status.success()),
        }
    }
}

impl Network {
    /// An etcd binary that can resolve the names of all attached nodes.
    pub fn etcd(&self) -> PathBuf {
        if self.has_names {
            self.directory.path().join("etcd")
        } else {
            etcd()
        }
    }

    /// Registers where this node's etcd listens for peers. Returns the address of its proxy.
    pub async fn attach(&self, node: NodeId, peers: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut known = self
            .shared
            .peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        known.insert(node, peers);
        // These addresses are never connected to, but etcd compares peers by address.
        let names = known.keys().zip(1..);
        let names = names.map(|(node, host)| format!("127.0.7.{host} {node}\n"));
        std::fs::write(
            self.directory.path().join("hosts"),
            names.collect::<String>(),
        )
        .unwrap();
        let shared = self.shared.clone();
        let mut proxies = self.proxies.lock().unwrap_or_else(PoisonError::into_inner);
        proxies.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(shared.clone().carry(node, stream));
                while connections.try_join_next().is_some() {}
            }
        });
        address
    }

    /// Partitions these nodes from all others. Connections between the others stay.
    pub fn cut_off(&self, nodes: &[NodeId]) {
        self.shared
            .cut
            .send_replace(nodes.iter().copied().collect());
    }

    /// Carries nothing further on any open connection, without closing one, as a network does that has lost an address
    /// or its state. New connections work.
    pub fn stall(&self) {
        self.shared.stall.send_replace(());
    }
}

impl Shared {
    async fn carry(self: Arc<Self>, from: NodeId, mut near: TcpStream) {
        let Some(to) = wanted(&mut near).await else {
            return;
        };
        let peer = self
            .peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&to)
            .copied();
        let Some(peer) = peer else { return };
        let (mut cut, mut stall) = (self.cut.subscribe(), self.stall.subscribe());
        let work = async {
            let mut far = TcpStream::connect(peer).await.ok()?;
            let answer = b"HTTP/1.1 200 Connection established\r\n\r\n";
            near.write_all(answer).await.ok()?;
            tokio::select! {
                // The sockets stay open.
                _ = stall.changed() => std::future::pending().await,
                _ = copy_bidirectional(&mut near, &mut far) => {}
            }
            Some(())
        };
        tokio::select! {
            _ = cut.wait_for(|cut| cut.contains(&from) || cut.contains(&to)) => {}
            _ = work => {}
        }
    }
}

/// The node that the caller wants to connect to.
async fn wanted(stream: &mut TcpStream) -> Option<NodeId> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") && request.len() < LONGEST {
        request.push(stream.read_u8().await.ok()?);
    }
    let request = String::from_utf8(request).ok()?;
    let target = request.strip_prefix("CONNECT ")?.split(':').next()?;
    target.parse().ok()
}
