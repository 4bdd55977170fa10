//! A real time server: Debian's chronyd, on the host.
//!
//! It serves the host's clock on a port of the loopback address and leaves that clock alone. A machine with a gateway
//! ([`Plan::online`](crate::node::Plan::online)) reaches it at [`Chrony::at_gateway`].

use std::net::UdpSocket;
use std::process::Stdio;

use anyhow::Context;
use hearth_api::v1::NodeParameters;
use prost::Message as _;
use tokio::process::{Child, Command};

use crate::node::Node;
use crate::{Outcome, TestCtx};

/// What the gateway of a single machine's network forwards to the host's loopback address.
const GATEWAY: &str = "10.0.2.2";

/// A running chronyd; it ends with this handle.
#[derive(Debug)]
pub struct Chrony {
    port: u16,
    _process: Child,
}

impl Chrony {
    /// Starts it; its files are in the test's folder.
    ///
    /// # Errors
    /// If it is not installed (package chrony).
    pub fn start(test: &TestCtx) -> anyhow::Result<Self> {
        let folder = test.folder();
        // Free now; that another program takes it in the next moment is unlikely among so many.
        let port = UdpSocket::bind("127.0.0.1:0")?.local_addr()?.port();
        let path = std::env::var("PATH").unwrap_or_default();
        let process = Command::new("chronyd")
            .env("PATH", format!("{path}:/usr/sbin:/sbin"))
            .args([
                "-d",
                "-x",
                "-U",
                "bindaddress 127.0.0.1",
                "allow 127.0.0.0/8",
            ])
            .args([
                "local stratum 5",
                "cmdport 0",
                "bindcmdaddress /",
                "user root",
            ])
            .arg(format!("port {port}"))
            .arg(format!("pidfile {}", folder.join("chronyd.pid").display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("cannot run chronyd (package chrony)")?;
        Ok(Self {
            port,
            _process: process,
        })
    }

    /// Its address for a machine, as in parameters and settings.
    pub fn at_gateway(&self) -> String {
        format!("{GATEWAY}:{}", self.port)
    }
}

impl Node {
    /// Adds time servers to its parameters.
    ///
    /// # Errors
    /// If it has no parameters.
    pub fn time_servers(&mut self, servers: Vec<String>) -> Outcome {
        let bytes = self.parameters.as_deref().context("no parameters")?;
        let parameters = NodeParameters {
            time_servers: servers,
            ..NodeParameters::decode(bytes)?
        };
        self.tell(&parameters);
        Ok(())
    }
}
