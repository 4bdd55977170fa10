//! A TLS client without our client's checks.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme, SupportedProtocolVersion};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::identity::{P256Key, SigningKey};

/// Accepts every server, uses this version of TLS, and presents any given certificates.
pub fn insecure_client_config(
    own: Option<(Vec<CertificateDer<'static>>, &SigningKey)>,
    version: &'static SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[version])
        .expect("a version")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous(
            default_provider()
                .signature_verification_algorithms
                .supported_schemes(),
        )));
    let mut config = match own {
        Some((certificates, key)) => builder
            .with_client_auth_cert(certificates, key.to_private_key_der())
            .expect("rustls does not look into it"),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// The same with TLS 1.3 for a client that offers ECDSA P-256 only, and presents this certificate.
pub fn p256_client_config(
    certificate: &CertificateDer<'static>,
    key: &P256Key,
) -> Arc<ClientConfig> {
    let schemes = vec![SignatureScheme::ECDSA_NISTP256_SHA256];
    let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("a version")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous(schemes)))
        .with_client_auth_cert(vec![certificate.clone()], key.to_private_key_der().into())
        .expect("rustls does not look into it");
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// Offers these signatures, and does not verify them.
#[derive(Debug)]
struct Credulous(Vec<SignatureScheme>);

impl ServerCertVerifier for Credulous {
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
        self.0.clone()
    }
}
