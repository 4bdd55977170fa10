//! The service that the API server of this node asks to encrypt and decrypt its keys: KMS v2 of Kubernetes, over a unix
//! socket.
//!
//! The API server asks for the ID of the current key each minute. When it is another than before, it generates a new
//! key of its own and has it encrypted. It asks to decrypt a key of its own once, and remembers it. So nothing here is
//! asked for each Secret.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_api::server::{Services, serve_local};
use hearth_base::supervisor::{Context, Failure, Outcome};
use serde_json::{Value as Json, json};
use tonic::{Request, Response, Status};

use super::keyring::{KeyError, Keyring};
use super::wire::key_management_service_server::{
    KeyManagementService, KeyManagementServiceServer,
};
use super::wire::{
    DecryptRequest, DecryptResponse, EncryptRequest, EncryptResponse, StatusRequest, StatusResponse,
};
use crate::store;

/// What the API server calls the provider. It is stored with each Secret, and must never change.
const NAME: &str = "hearth";
/// Version of the interface.
const VERSION: &str = "v2";
/// How long the API server waits for an answer. To decrypt, a key may have to be read from etcd.
const ANSWER_WITHIN: &str = "10s";
/// A request contains a key of the API server, which has a few dozen bytes.
const MAX_REQUEST_SIZE: usize = 64 << 10;

/// What the API server encrypts, and with which provider. Secrets that are not encrypted are readable.
pub(crate) fn encryption_configuration(socket: &Path) -> Json {
    json!({
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "EncryptionConfiguration",
        "resources": [{
            "resources": ["secrets"],
            "providers": [
                { "kms": {
                    "apiVersion": VERSION,
                    "name": NAME,
                    "endpoint": format!("unix://{}", socket.display()),
                    "timeout": ANSWER_WITHIN,
                } },
                { "identity": {} },
            ],
        }],
    })
}

/// Where the service is.
pub(crate) struct Provider {
    pub keyring: Arc<Keyring>,
    pub socket: PathBuf,
    /// Who may ask; `None`: the user of this process.
    pub user: Option<u32>,
}

/// Serves until it is cancelled.
pub(crate) async fn run(ctx: Context, provider: Arc<Provider>) -> Outcome {
    let listener = store::listen(&provider.socket, provider.user)?;
    let service = KeyManagementServiceServer::new(Service(provider.keyring.clone()))
        .max_decoding_message_size(MAX_REQUEST_SIZE);
    ctx.healthy();
    let services = Services::new().with(service);
    let serving = serve_local(listener, services, ctx.token());
    ctx.until_cancelled(async { serving.await.map_err(Failure::from) })
        .await
}

struct Service(Arc<Keyring>);

fn refused(error: KeyError) -> Status {
    let message = hearth_api::chain(&error);
    tracing::warn!("cannot answer the API server: {message}");
    match error {
        KeyError::NoKey | KeyError::Stored(_) => Status::unavailable(message),
        _ => Status::failed_precondition(message),
    }
}

#[tonic::async_trait]
impl KeyManagementService for Service {
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let key = self.0.current().map_err(refused)?;
        Ok(Response::new(StatusResponse {
            version: VERSION.to_owned(),
            healthz: "ok".to_owned(),
            key_id: key.id.clone(),
        }))
    }

    async fn encrypt(
        &self,
        request: Request<EncryptRequest>,
    ) -> Result<Response<EncryptResponse>, Status> {
        let request = request.into_inner();
        let (ciphertext, key_id) = self.0.encrypt(&request.plaintext).map_err(refused)?;
        Ok(Response::new(EncryptResponse {
            ciphertext,
            key_id,
            ..EncryptResponse::default()
        }))
    }

    async fn decrypt(
        &self,
        request: Request<DecryptRequest>,
    ) -> Result<Response<DecryptResponse>, Status> {
        let request = request.into_inner();
        let opened = self.0.decrypt(&request.key_id, &request.ciphertext);
        let plaintext = opened.await.map_err(refused)?;
        Ok(Response::new(DecryptResponse { plaintext }))
    }
}
