//! kubeconfig files for the Kubernetes programs: API server, CA and client credentials.
//!
//! They are read as YAML, of which JSON is a subset, so they are written as JSON. With
//! [`Credentials::Files`] a program reloads its certificate when the files change (client-go checks
//! every five minutes), so a renewal needs no restart; with [`Credentials::Embedded`] the file is
//! self-contained.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hearth_api::names::KUBERNETES_SERVER;
use hearth_host::pki::kubernetes::KeyAndCertificate;
use hearth_sys::files::{self, FileError};
use serde_json::Value;
use zeroize::Zeroizing;

/// File mode: readable by root only.
const PRIVATE: u32 = 0o600;

/// The content of the file.
#[derive(Clone, Copy, Debug)]
pub struct Kubeconfig<'a> {
    /// URL of the API server, such as `https://127.0.0.1:6444`.
    pub server: &'a str,
    /// CA certificate of the API server, PEM.
    pub ca_pem: &'a str,
    /// Client credentials.
    pub credentials: Credentials<'a>,
}

/// Client credentials.
#[derive(Clone, Copy, Debug)]
pub enum Credentials<'a> {
    /// Embedded in the file.
    Embedded(&'a KeyAndCertificate),
    /// In PEM files with absolute paths.
    Files {
        /// Path of the certificate.
        certificate: &'a Path,
        /// Path of the private key.
        key: &'a Path,
    },
}

impl Kubeconfig<'_> {
    /// The content of the file. It contains the private key, if that is embedded.
    pub fn encode(&self) -> Zeroizing<String> {
        // Formatted by hand, so that no copy of the key remains in memory.
        let user = match self.credentials {
            Credentials::Embedded(embedded) => {
                let key = Zeroizing::new(BASE64.encode(embedded.key_pem().expose()));
                Zeroizing::new(format!(
                    r#"{{"client-certificate-data":"{}","client-key-data":"{}"}}"#,
                    BASE64.encode(embedded.certificate_pem()),
                    *key
                ))
            }
            Credentials::Files { certificate, key } => Zeroizing::new(format!(
                r#"{{"client-certificate":{},"client-key":{}}}"#,
                quoted(&certificate.to_string_lossy()),
                quoted(&key.to_string_lossy())
            )),
        };
        Zeroizing::new(format!(
            concat!(
                r#"{{"apiVersion":"v1","kind":"Config","#,
                r#""clusters":[{{"name":"hearth","cluster":"#,
                r#"{{"server":{},"tls-server-name":"{}","certificate-authority-data":"{}"}}}}],"#,
                r#""users":[{{"name":"hearth","user":{}}}],"#,
                r#""contexts":[{{"name":"hearth","context":{{"cluster":"hearth","user":"hearth"}}}}],"#,
                r#""current-context":"hearth"}}"#,
                "\n"
            ),
            quoted(self.server),
            KUBERNETES_SERVER,
            BASE64.encode(self.ca_pem),
            *user
        ))
    }

    /// Writes the file atomically with mode 0600. Blocks on the disk.
    pub fn save(&self, path: &Path) -> Result<(), FileError> {
        files::write_atomic(path, self.encode().as_bytes(), PRIVATE)
    }
}

/// Encodes a JSON string.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use hearth_api::identity::SigningKey;

    use super::*;

    /// A self-signed certificate.
    fn some() -> KeyAndCertificate {
        let key = SigningKey::generate();
        let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
        parameters.not_after = (SystemTime::now() + Duration::from_secs(60)).into();
        let signer = rcgen::KeyPair::try_from(&key.expose_pkcs8_der()[..]).unwrap();
        let certificate = parameters.self_signed(&signer).unwrap();
        KeyAndCertificate::new(&key, certificate.der(), Duration::from_secs(60)).unwrap()
    }

    /// The cluster and the user that the file names.
    fn read(written: &Kubeconfig<'_>) -> (Value, Value) {
        let read: Value = serde_json::from_str(&written.encode()).unwrap();
        assert_eq!(read["current-context"], "hearth");
        let context = &read["contexts"][0];
        assert_eq!(context["name"], "hearth");
        let named = |all: &str, one: &str| {
            let named = &read[all][0];
            assert_eq!(named["name"], context["context"][one]);
            named[one].clone()
        };
        (named("clusters", "cluster"), named("users", "user"))
    }

    fn decoded(data: &Value) -> Vec<u8> {
        BASE64.decode(data.as_str().unwrap()).unwrap()
    }

    #[test]
    fn a_reader_finds_what_was_written() {
        let credentials = some();
        let mut written = Kubeconfig {
            server: "https://127.0.0.1:6444",
            ca_pem: "the authority\n",
            credentials: Credentials::Embedded(&credentials),
        };
        let (cluster, user) = read(&written);
        assert_eq!(cluster["server"], "https://127.0.0.1:6444");
        assert_eq!(cluster["tls-server-name"], "kubernetes");
        let data = decoded(&cluster["certificate-authority-data"]);
        assert_eq!(data, b"the authority\n");
        let pem = credentials.certificate_pem();
        assert_eq!(decoded(&user["client-certificate-data"]), pem.as_bytes());
        let key = credentials.key_pem();
        assert_eq!(decoded(&user["client-key-data"]), key.expose().as_bytes());
        assert!(user["client-key"].is_null());

        written.credentials = Credentials::Files {
            certificate: Path::new("/a \"b\"/cert"),
            key: Path::new("/a/key"),
        };
        let (_, user) = read(&written);
        assert_eq!(user["client-certificate"], "/a \"b\"/cert");
        assert_eq!(user["client-key"], "/a/key");
        assert!(user["client-key-data"].is_null());
    }

    #[test]
    fn the_file_is_private() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let credentials = some();
        let kubeconfig = Kubeconfig {
            server: "https://127.0.0.1:6444",
            ca_pem: "",
            credentials: Credentials::Embedded(&credentials),
        };
        kubeconfig.save(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            *kubeconfig.encode()
        );
    }
}
