//! An unauthenticated client of the curator: a TLS client without the checks that ours makes.

use std::io;
use std::net::SocketAddr;

use anyhow::Context as _;
use hearth_api::client::within;
use hearth_api::identity::SigningKey;
use hearth_api::testing::insecure_client_config;
use hearth_api::tls::CertificateDer;
use hearth_api::v1::GetNodesRequest;
use hearth_api::v1::management_client::ManagementClient;
use hearth_tests::bounds;
use hyper_util::rt::TokioIo;
use rustls::SupportedProtocolVersion;
use rustls::pki_types::ServerName;
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::Code;
use tonic::transport::Endpoint;

/// The result of a call.
#[derive(Debug)]
pub(crate) enum Answer {
    /// This many nodes were listed.
    Nodes(usize),
    /// The server accepted the connection, and rejected the call as unauthenticated.
    Unauthenticated,
    /// The server ended the connection with this alert.
    Alert(String),
}

/// A client.
pub(crate) struct Stranger {
    own: Option<(CertificateDer<'static>, SigningKey)>,
    version: &'static SupportedProtocolVersion,
}

impl Stranger {
    /// Without a certificate.
    pub(crate) fn without_certificate() -> Self {
        Self {
            own: None,
            version: &TLS13,
        }
    }

    /// With this certificate.
    pub(crate) fn with(certificate: &CertificateDer<'static>, key: &SigningKey) -> Self {
        Self {
            own: Some((certificate.clone(), key.clone())),
            version: &TLS13,
        }
    }

    /// With TLS 1.2 at most.
    pub(crate) fn over_tls_1_2(self) -> Self {
        Self {
            version: &TLS12,
            ..self
        }
    }

    /// Tries to list the nodes at this address.
    pub(crate) async fn lists_nodes(&self, address: SocketAddr) -> anyhow::Result<Answer> {
        let stream = match self.connect(address).await {
            Ok(stream) => stream,
            Err(error) => return refused(error.into()),
        };
        // A TLS 1.3 server that rejects a client's certificate reports it after the client's side of the handshake. Any other
        // begins with its settings. Who wrote first would get a reset of the closed connection in the place of the report.
        let mut stream = BufReader::new(stream);
        let begun = tokio::time::timeout(bounds::CALL, stream.fill_buf()).await;
        if let Err(error) = begun.context("the server does not begin")? {
            return refused(error.into());
        }
        let mut stream = Some(TokioIo::new(stream));
        let once = tower::service_fn(move |_| {
            let stream = stream.take();
            async move { stream.ok_or_else(|| io::Error::other("the connection has ended")) }
        });
        let endpoint = Endpoint::from_static("http://curator.hearth");
        let channel = match endpoint.connect_with_connector(once).await {
            Ok(channel) => channel,
            Err(error) => return refused(error.into()),
        };
        let mut management = ManagementClient::new(channel);
        let call = async {
            let request = GetNodesRequest::default();
            let mut stream = management.get_nodes(request).await?.into_inner();
            let mut count = 0;
            while let Some(response) = stream.message().await? {
                count += response.nodes.len();
            }
            Ok(count)
        };
        match within(bounds::CALL, call).await {
            Ok(count) => Ok(Answer::Nodes(count)),
            Err(status) if status.code() == Code::Unauthenticated => Ok(Answer::Unauthenticated),
            Err(status) => refused(status.into()),
        }
    }

    async fn connect(&self, address: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
        let own = self.own.as_ref();
        let own = own.map(|(certificate, key)| (vec![certificate.clone()], key));
        let config = insecure_client_config(own, self.version);
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::IpAddress(address.ip().into());
        TlsConnector::from(config).connect(name, stream).await
    }
}

/// The alert of an error; any other error is returned. By rustls's message, because HTTP/2 keeps only the text of an
/// error.
fn refused(error: anyhow::Error) -> anyhow::Result<Answer> {
    let alert = error.chain().find_map(|cause| {
        let text = cause.to_string();
        text.strip_prefix("received fatal alert: ")
            .map(str::to_owned)
    });
    alert.map(Answer::Alert).ok_or(error)
}
