//! The file that tells a program of Kubernetes where the API servers are, how
//! they prove themselves, and as whom it speaks.
//!
//! Kubernetes reads it as YAML, of which JSON is a part, so it is written as
//! JSON. With [`Credentials::Files`] the program reads its certificate anew
//! when the files change (client-go looks every five minutes), so a renewal
//! needs no restart; with [`Credentials::Embedded`] the file stands alone.

use std::path::Path;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use hearth_api::names::KUBERNETES_SERVER;
use hearth_host::pki::kubernetes::KeyAndCertificate;
use hearth_sys::files::{self, FileError};
use serde_json::Value;
use zeroize::Zeroizing;

/// Only root of this machine.
const PRIVATE: u32 = 0o600;

/// What stands in the file.
#[derive(Clone, Copy, Debug)]
pub struct Kubeconfig<'a> {
    /// Such as `https://127.0.0.1:6444`.
    pub server: &'a str,
    /// By which the server proves itself, PEM.
    pub ca_pem: &'a str,
    /// As whom the program speaks.
    pub credentials: Credentials<'a>,
}

/// As whom a program speaks.
#[derive(Clone, Copy, Debug)]
pub enum Credentials<'a> {
    /// In the file itself.
    Embedded(&'a KeyAndCertificate),
    /// In other files, PEM, by absolute paths.
    Files {
        /// The certificate.
        certificate: &'a Path,
        /// Its private key.
        key: &'a Path,
    },
}

impl Kubeconfig<'_> {
    /// The file's content. Holds the private key, if that is embedded.
    pub fn encode(&self) -> Zeroizing<String> {
        // Put together by hand, so that no copy of the key stays behind.
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

    /// Writes the file, at once and for root alone. Blocks on the disk.
    pub fn save(&self, path: &Path) -> Result<(), FileError> {
        files::write_atomic(path, self.encode().as_bytes(), PRIVATE)
    }
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use hearth_api::identity::SigningKey;

    use super::*;

    /// A certificate that nobody has to believe.
    fn some() -> KeyAndCertificate {
        let key = SigningKey::generate();
        let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
        parameters.not_after = (SystemTime::now() + Duration::from_secs(60)).into();
        let signer = rcgen::KeyPair::try_from(&key.expose_pkcs8_der()[..]).unwrap();
        let certificate = parameters.self_signed(&signer).unwrap();
        KeyAndCertificate::new(&key, certificate.der()).unwrap()
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
