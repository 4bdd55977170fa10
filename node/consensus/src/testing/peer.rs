//! A program that speaks to etcd's peer port, with a certificate that some etcd has or had.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use hearth_api::identity::NodeId;
use hearth_api::provider::provider;
use hearth_host::layout::KeyFiles;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// A certificate for peer connections and its key.
pub struct Peer(TlsConnector);

impl Peer {
    /// With these files, as they are now.
    pub fn with(files: &KeyFiles) -> Self {
        let certificate = CertificateDer::from_pem_file(files.certificate()).unwrap();
        let key = PrivateKeyDer::from_pem_file(files.key()).unwrap();
        let ca = CertificateDer::from_pem_file(files.ca()).unwrap();
        Self::new(ca, Some((certificate, key)))
    }

    /// One that trusts this CA, and may have a certificate and its key.
    pub fn new(
        ca: CertificateDer<'static>,
        own: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
    ) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(ca).unwrap();
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match own {
            Some((certificate, key)) => config.with_client_auth_cert(vec![certificate], key),
            None => Ok(config.with_no_client_auth()),
        };
        Self(TlsConnector::from(Arc::new(config.unwrap())))
    }

    /// A connection to the etcd of `node`.
    pub async fn connect(&self, node: NodeId, address: SocketAddr) -> io::Result<Connection> {
        let name = ServerName::try_from(node.to_string()).unwrap();
        let stream = TcpStream::connect(address).await?;
        Ok(Connection(self.0.connect(name, stream).await?))
    }

    /// What etcd answers on a new connection to the question for its members.
    pub async fn members(&self, node: NodeId, address: SocketAddr) -> io::Result<String> {
        self.connect(node, address).await?.members().await
    }
}

/// An open connection.
pub struct Connection(TlsStream<TcpStream>);

impl Connection {
    /// What etcd answers to the question for its members. The connection stays open.
    pub async fn members(&mut self) -> io::Result<String> {
        let request = b"GET /members HTTP/1.1\r\nHost: etcd\r\n\r\n";
        self.0.write_all(request).await?;
        self.0.flush().await?;
        let mut answer = String::new();
        // The list is the end of the answer.
        while !answer.trim_end().ends_with(']') {
            let mut part = [0; 4096];
            match self.0.read(&mut part).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => answer.push_str(&String::from_utf8_lossy(&part[..length])),
            }
        }
        Ok(answer)
    }

    /// Waits until the other side has closed the connection.
    pub async fn closed(mut self) {
        while !matches!(self.0.read(&mut [0; 4096]).await, Ok(0) | Err(_)) {}
    }
}
