//! Whoever comes to the curator with the wrong papers: a TLS client without
//! any of the scruples that ours has.

use std::{io, net::SocketAddr, sync::Arc};

use hearth_api::{
    client::within,
    identity::SigningKey,
    tls::CertificateDer,
    v1::{GetNodesRequest, management_client::ManagementClient},
};
use hearth_tests::bounds;
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme, SupportedProtocolVersion,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring::default_provider,
    pki_types::{ServerName, UnixTime},
    version::{TLS12, TLS13},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{Code, transport::Endpoint};

/// What came of a call.
#[derive(Debug)]
pub enum Answer {
    /// So many nodes were listed.
    Nodes(usize),
    /// The server talked, and refused this call for want of an identity.
    Unauthenticated,
    /// The server ended the connection with this alert.
    Alert(String),
}

/// A client.
pub struct Stranger {
    own: Option<(CertificateDer<'static>, SigningKey)>,
    version: &'static SupportedProtocolVersion,
}

impl Stranger {
    /// Shows no certificate.
    pub fn without_certificate() -> Self {
        Self {
            own: None,
            version: &TLS13,
        }
    }

    /// Shows this one.
    pub fn with(certificate: &CertificateDer<'static>, key: &SigningKey) -> Self {
        Self {
            own: Some((certificate.clone(), key.clone())),
            version: &TLS13,
        }
    }

    /// Speaks nothing newer than TLS 1.2.
    pub fn over_tls_1_2(self) -> Self {
        Self {
            version: &TLS12,
            ..self
        }
    }

    /// Tries to list the nodes of whoever answers there.
    pub async fn lists_nodes(&self, address: SocketAddr) -> anyhow::Result<Answer> {
        let stream = match self.connect(address).await {
            Ok(stream) => stream,
            Err(error) => return refused(error.into()),
        };
        let mut stream = Some(TokioIo::new(stream));
        let once = tower::service_fn(move |_| {
            let stream = stream.take();
            async move { stream.ok_or_else(|| io::Error::other("the connection has ended")) }
        });
        // A server that refuses a client's certificate in TLS 1.3 says so
        // after the client's side of the handshake, on whatever comes next.
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
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[self.version])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anyone));
        let mut config = match &self.own {
            Some((certificate, key)) => builder
                .with_client_auth_cert(vec![certificate.clone()], key.to_private_key_der())
                .map_err(io::Error::other)?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::IpAddress(address.ip().into());
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
    }
}

/// The alert behind an error; any other error is none of the answers. Told by
/// rustls's words, for HTTP/2 keeps no more of an error than those.
fn refused(error: anyhow::Error) -> anyhow::Result<Answer> {
    let alert = error.chain().find_map(|cause| {
        let text = cause.to_string();
        text.strip_prefix("received fatal alert: ")
            .map(str::to_owned)
    });
    alert.map(Answer::Alert).ok_or(error)
}

/// Believes every server.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
