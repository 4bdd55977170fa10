//! Certificates and keys of the control-plane programs, as files in memory.

use std::io;
use std::path::PathBuf;

use hearth_host::layout::{EphemeralController, KeyFiles, Root};
use hearth_host::pki::kubernetes::{Authorities, KeyAndCertificate, KubernetesPkiError};
use hearth_sys::files::{self, FileError};
use serde_json::{Value, json};

use super::pod_security::PodSecurity;

/// File mode: readable by the owner only.
const PRIVATE: u32 = 0o600;

/// The directory of the files.
#[derive(Clone, Debug)]
pub(super) struct Files {
    directory: EphemeralController,
}

impl Files {
    pub(super) fn new(root: &Root) -> Self {
        Self {
            directory: root.ephemeral.kubernetes().controller(),
        }
    }

    /// Writes the files that do not change while the role is assigned.
    pub(super) fn prepare(
        &self,
        authorities: &Authorities,
        encryption: &Value,
    ) -> Result<(), FileError> {
        files::create_dir_durably(self.directory.path(), 0o700)?;
        let key = authorities.service_accounts();
        let private = key.private_pem();
        for (path, content) in [
            (self.ca(), authorities.ca_pem()),
            (self.front_proxy_ca(), authorities.front_proxy_ca_pem()),
            (self.service_accounts(), key.public_pem()),
        ] {
            files::write_atomic(&path, content.as_bytes(), PRIVATE)?;
        }
        files::write_atomic(
            &self.encryption(),
            encryption.to_string().as_bytes(),
            PRIVATE,
        )?;
        let path = self.service_account_key();
        files::write_atomic(&path, private.expose().as_bytes(), PRIVATE)
    }

    /// Makes all of them the files of the user who reads them.
    pub(super) fn hand_over(&self, user: u32) -> io::Result<()> {
        let mut waiting = vec![self.directory.path().to_owned()];
        while let Some(path) = waiting.pop() {
            if path.is_dir() {
                for entry in std::fs::read_dir(&path)? {
                    waiting.push(entry?.path());
                }
            }
            std::os::unix::fs::chown(&path, Some(user), Some(user))?;
        }
        Ok(())
    }

    /// Writes a certificate and its key under a name.
    pub(super) fn save(
        &self,
        whose: &str,
        issued: &KeyAndCertificate,
    ) -> Result<(), KubernetesPkiError> {
        let keys = self.directory.keys(whose);
        files::create_dir_durably(keys.path(), 0o700)?;
        issued.save(&keys.certificate(), &keys.key())
    }

    /// Writes who may call the API server, who decides what they may do, what pods may ask for, and what is
    /// recorded of all that. A client has a certificate, which is
    /// configured apart, or the token of a service account; nobody is anonymous. There are no webhooks and no foreign
    /// issuers of tokens.
    pub(super) fn save_access_rules(
        &self,
        security: &PodSecurity,
        audit: &Value,
    ) -> Result<(), FileError> {
        let authentication = json!({
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "AuthenticationConfiguration",
            "anonymous": { "enabled": false },
        });
        let authorization = json!({
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "AuthorizationConfiguration",
            "authorizers": [
                { "type": "Node", "name": "node" },
                { "type": "RBAC", "name": "rbac" },
            ],
        });
        let admission = security.configuration();
        for (path, content) in [
            (self.authentication(), &authentication),
            (self.authorization(), &authorization),
            (self.admission(), &admission),
            (self.audit_policy(), audit),
        ] {
            files::write_atomic(&path, content.to_string().as_bytes(), PRIVATE)?;
        }
        Ok(())
    }

    /// Who may call the API server.
    pub(super) fn authentication(&self) -> PathBuf {
        self.directory.authentication()
    }

    /// Who decides what they may do.
    pub(super) fn authorization(&self) -> PathBuf {
        self.directory.authorization()
    }

    /// What pods may ask for.
    pub(super) fn admission(&self) -> PathBuf {
        self.directory.admission()
    }

    /// What is recorded of requests.
    pub(super) fn audit_policy(&self) -> PathBuf {
        self.directory.audit_policy()
    }

    /// What is encrypted.
    pub(super) fn encryption(&self) -> PathBuf {
        self.directory.encryption()
    }

    /// Socket of the provider of keys.
    pub(super) fn key_provider(&self) -> PathBuf {
        self.directory.key_provider()
    }

    /// Paths of a certificate and its key.
    pub(super) fn pair(&self, whose: &str) -> KeyFiles {
        self.directory.keys(whose)
    }

    /// Certificate of the Kubernetes CA.
    pub(super) fn ca(&self) -> PathBuf {
        self.directory.ca()
    }

    /// Certificate of the front-proxy CA.
    pub(super) fn front_proxy_ca(&self) -> PathBuf {
        self.directory.front_proxy_ca()
    }

    /// Public key that verifies service account tokens.
    pub(super) fn service_accounts(&self) -> PathBuf {
        self.directory.service_accounts()
    }

    /// Private key that signs service account tokens. Secret.
    pub(super) fn service_account_key(&self) -> PathBuf {
        self.directory.service_account_key()
    }

    /// kubeconfig of a program. Secret.
    pub(super) fn kubeconfig(&self, whose: &str) -> PathBuf {
        self.directory.kubeconfig(whose)
    }
}
