//! `hearthctl owner certificate`: files with which other gRPC clients act as the owner.
//!
//! Many libraries do not support Ed25519, so the key is ECDSA P-256. It is made here, and its
//! certificate is obtained with the owner key, like the one of `hearthctl` itself, and valid as long.

use std::error::Error;
use std::path::Path;

use hearth_api::certificates::ClusterCa;
use hearth_api::escrow;
use hearth_api::identity::{OwnerKey, P256Key};

use crate::args::Global;
use crate::commands::print;
use crate::connection::{self, Session};
use crate::context::to_pem;
use crate::failure::{Failure, Kind};
use crate::files;

/// The files, by name.
const KEY: &str = "key.pem";
const CERTIFICATE: &str = "certificate.pem";
const CA: &str = "ca.pem";

pub(super) async fn run(global: &Global, directory: &Path) -> Result<(), Failure> {
    let session = Session::new(global)?;
    let credentials = session.credentials();
    let ca =
        ClusterCa::parse(&credentials.ca).map_err(|error| failed(Kind::Local, error.into()))?;
    let owner = OwnerKey::from_seed(*credentials.key.expose_seed());
    let key = P256Key::generate();
    let (curators, options) = (session.curators(global)?, connection::options(global));
    let exchanged = escrow::exchange(curators, &owner, &ca, Some(key.public()), options).await;
    let exchanged = exchanged.map_err(|error| failed(Kind::Refused, error.into()))?;
    let certificate = exchanged.p256.ok_or_else(|| {
        failed(
            Kind::Cluster,
            "the curator returned no certificate for a P-256 key: its release is older".into(),
        )
    })?;
    let key = pem::encode(&pem::Pem::new("PRIVATE KEY", key.expose_pkcs8_der()));
    for (name, content) in [
        (KEY, key),
        (CERTIFICATE, to_pem(&certificate)),
        (CA, to_pem(&credentials.ca)),
    ] {
        let path = directory.join(name);
        files::write_private(&path, content.as_bytes()).map_err(|error| {
            Failure::new(Kind::Local, format!("write {}", path.display())).because(error)
        })?;
    }
    print(&format!(
        "wrote {KEY}, {CERTIFICATE} and {CA} to {}\n",
        directory.display()
    ))
}

fn failed(kind: Kind, error: Box<dyn Error + Send + Sync>) -> Failure {
    Failure::new(kind, "get a certificate for other clients").because(error)
}
