//! A small client of the Kubernetes API, with what Hearth needs of it.
//!
//! | part | content |
//! |---|---|
//! | this module | the client: requests for objects, and errors |
//! | [`kinds`] | the kinds of objects |
//! | [`Resource`] | objects of kinds that are known to the API server only |
//! | [`fields`] | the fields that are read |
//! | [`watch`] | list and watch: all objects of a kind, and each change |
//! | [`store`] | what is kept of them, within limits |
//!
//! Why not the library for it (kube, with k8s-openapi): its types deserialize every field of every
//! object, and the code for that made the node larger by more than all the rest of its Kubernetes
//! parts together. Some thirty fields are read here. What else is needed is JSON over HTTP/2 and a
//! connection that reconnects, and that is there already: tonic's channel, which is used for etcd
//! and containerd as well.
//!
//! Invariants: responses are bounded in time and in size; a name from outside can never change the
//! path of a request; errors of the API server are reported with its own message.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod fields;
pub mod kinds;
mod resources;
pub mod store;
#[cfg(test)]
mod tests;
pub mod watch;
mod watching;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hearth_api::manifests::is_segment;
use hearth_api::names::KUBERNETES_SERVER;
use hearth_api::transport::Connector;
use http::uri::{InvalidUri, PathAndQuery};
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::ServiceExt as _;

use kinds::Kind;
pub use resources::{Name, Resource};
pub use watching::Watching;

/// Timeout for the connection to an API server, or to the balancer before it.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Interval of HTTP/2 keepalive pings. A server that does not answer one within half of it is gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout of a whole request. It does not apply to watches.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Maximum size of a response: a page of a list has hundreds of objects, whose size etcd limits.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// How much of an error response is reported if it is not a `Status`.
const MAX_SHOWN_CHARS: usize = 300;

/// Field manager of server-side apply.
pub const MANAGER: &str = "hearth";

/// Content type of server-side apply.
const APPLY: &str = "application/apply-patch+yaml";

/// Query of server-side apply with `force`, by [`MANAGER`].
fn apply_query() -> String {
    format!("?fieldManager={MANAGER}&force=true")
}

/// The URL of an API server is invalid.
#[derive(Debug, thiserror::Error)]
#[error("API server: expected https://ADDRESS:PORT, got {url:?}")]
pub struct AddressError {
    /// The given URL.
    pub url: String,
}

/// Why a request has failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The name of an object or a namespace is invalid.
    #[error("{0:?} is not a valid object name")]
    Name(String),
    /// The path or query is not a valid URI.
    #[error("cannot make a request")]
    Request(#[from] InvalidUri),
    /// The connection cannot be established, or has been lost.
    #[error("cannot reach the API server")]
    Connection(#[source] tonic::transport::Error),
    /// The connection was lost while the response was read.
    #[error("the response of the API server was cut off")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// There was no response within the timeout.
    #[error("no response from the API server within {0:?}")]
    Silent(Duration),
    /// The response is too long.
    #[error("the response of the API server is longer than {MAX_ANSWER_BYTES} bytes")]
    Long,
    /// A body cannot be encoded or decoded.
    #[error("cannot decode the response of the API server")]
    Json(#[from] serde_json::Error),
    /// The API server has answered with an error status.
    #[error("{message} (HTTP {code})")]
    Refused {
        /// HTTP status.
        code: StatusCode,
        /// The API server's message.
        message: String,
    },
}

impl ApiError {
    /// Whether the API server has answered with this status.
    pub fn is(&self, expected: StatusCode) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == expected)
    }
}

/// A client of the API servers behind one address, with the identity of its certificate. It
/// connects when it is first used, and reconnects when needed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
}

impl Client {
    /// A client of the API servers at `url`, such as `https://127.0.0.1:6443`. Their certificates
    /// are verified for the name [`KUBERNETES_SERVER`]; `tls` has the trusted CA and the client's
    /// certificate.
    pub fn new(url: &str, mut tls: ClientConfig) -> Result<Self, AddressError> {
        let wrong = || AddressError {
            url: url.to_owned(),
        };
        let address: Uri = url.parse().map_err(|_| wrong())?;
        let authority = address.authority().ok_or_else(wrong)?;
        let at: SocketAddr = authority.as_str().parse().map_err(|_| wrong())?;
        if address.scheme_str() != Some("https") {
            return Err(wrong());
        }
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let tls = TlsConnector::from(Arc::new(tls));
        let name = ServerName::try_from(KUBERNETES_SERVER).map_err(|_| wrong())?;
        let connector = Connector::new(move || {
            let (tls, name) = (tls.clone(), name.clone());
            async move {
                let stream = TcpStream::connect(at).await?;
                stream.set_nodelay(true)?;
                tls.connect(name, stream).await
            }
        });
        let endpoint = Endpoint::from(address)
            .connect_timeout(CONNECT_WITHIN)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_INTERVAL / 2)
            .keep_alive_while_idle(true);
        Ok(Self {
            channel: connector.channel(&endpoint),
        })
    }

    /// The objects of a kind: cluster-scoped ones, or those in all namespaces.
    pub fn all(&self, kind: Kind) -> Objects {
        Objects {
            client: self.clone(),
            kind,
            namespace: None,
        }
    }

    /// The objects of a kind in one namespace.
    pub fn within(&self, namespace: &str, kind: Kind) -> Objects {
        Objects {
            namespace: Some(namespace.to_owned()),
            ..self.all(kind)
        }
    }

    /// Gets a path that is not an object, such as `/readyz`, as text.
    pub async fn text(&self, path: &str) -> Result<String, ApiError> {
        let answer = self.ask(Method::GET, path.parse()?, None).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Sends a request and reads the whole response.
    async fn ask(
        &self,
        method: Method,
        path: PathAndQuery,
        body: Option<(&'static str, &Json)>,
    ) -> Result<Bytes, ApiError> {
        let asked = async {
            let answer = self.begin(method, path, body).await?;
            read(answer.into_body()).await
        };
        timeout(ANSWER_WITHIN, asked)
            .await
            .unwrap_or(Err(ApiError::Silent(ANSWER_WITHIN)))
    }

    /// Sends a request and returns the response before its body is read, or an error if the status
    /// is not a success.
    async fn begin(
        &self,
        method: Method,
        path: PathAndQuery,
        body: Option<(&'static str, &Json)>,
    ) -> Result<Response<Body>, ApiError> {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = method;
        *request.uri_mut() = Uri::from(path);
        let headers = request.headers_mut();
        headers.insert(
            header::ACCEPT,
            header::HeaderValue::from_static("application/json"),
        );
        if let Some((of, body)) = body {
            headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(of));
            *request.body_mut() = Body::new(Full::from(serde_json::to_vec(body)?));
        }
        let answer = self.channel.clone().oneshot(request).await;
        let answer = answer.map_err(ApiError::Connection)?;
        let code = answer.status();
        if code.is_success() {
            return Ok(answer);
        }
        let said = read(answer.into_body()).await?;
        Err(ApiError::Refused {
            code,
            message: message(&said),
        })
    }
}

async fn read(body: Body) -> Result<Bytes, ApiError> {
    match Limited::new(body, MAX_ANSWER_BYTES).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::Long),
        Err(error) => Err(ApiError::Broken(error)),
    }
}

/// The message of an error response: that of a `Status` object, or the beginning of any other body.
fn message(said: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Status {
        message: String,
    }
    match serde_json::from_slice(said) {
        Ok(Status { message }) => message,
        Err(_) => {
            let said = String::from_utf8_lossy(said);
            said.chars().take(MAX_SHOWN_CHARS).collect()
        }
    }
}

/// The objects of one kind.
#[derive(Clone, Debug)]
pub struct Objects {
    client: Client,
    kind: Kind,
    /// `None`: all namespaces, or a cluster-scoped kind.
    namespace: Option<String>,
}

impl Objects {
    /// Their kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Gets the object of this name; `None` if there is none.
    pub async fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ApiError> {
        let path = self.path(Some(name), "")?;
        match self.client.ask(Method::GET, path, None).await {
            Ok(answer) => Ok(Some(serde_json::from_slice(&answer)?)),
            Err(error) if error.is(StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object. `kind` and `apiVersion` are added. Fails with [`StatusCode::CONFLICT`] if
    /// the name exists.
    pub async fn create(&self, mut object: Json) -> Result<Json, ApiError> {
        object["apiVersion"] = self.kind.api_version().into();
        object["kind"] = self.kind.name.into();
        let body = Some(("application/json", &object));
        let path = self.path(None, &format!("?fieldManager={MANAGER}"))?;
        let made = self.client.ask(Method::POST, path, body).await?;
        Ok(serde_json::from_slice(&made)?)
    }

    /// Changes an object with a merge patch. If the patch has a `resourceVersion` in its metadata,
    /// this fails with [`StatusCode::CONFLICT`] if the object has changed since.
    pub async fn merge(&self, name: &str, patch: &Json) -> Result<(), ApiError> {
        self.patch(name, "", ("application/merge-patch+json", patch))
            .await
    }

    /// Server-side apply with `force`: sets these fields, whoever manages them, and creates the
    /// object if there is none. Fields that this manager has set before and that are missing now
    /// are removed.
    pub async fn apply(&self, name: &str, object: &Json) -> Result<(), ApiError> {
        self.patch(name, &apply_query(), (APPLY, object)).await
    }

    /// Deletes an object. It is kept until its finalizers are removed.
    pub async fn delete(&self, name: &str) -> Result<(), ApiError> {
        let path = self.path(Some(name), "")?;
        self.client.ask(Method::DELETE, path, None).await.map(drop)
    }

    async fn patch(
        &self,
        name: &str,
        query: &str,
        body: (&'static str, &Json),
    ) -> Result<(), ApiError> {
        let path = self.path(Some(name), query)?;
        let patched = self.client.ask(Method::PATCH, path, Some(body)).await;
        patched.map(drop)
    }

    /// Path and query of one object, or of all.
    fn path(&self, name: Option<&str>, query: &str) -> Result<PathAndQuery, ApiError> {
        let (root, namespace) = (self.kind.root(), self.namespace.as_deref());
        path(&root, namespace, self.kind.plural, name, query)
    }
}

/// Path and query of one object, or of all; `root` is that of the API group and version.
fn path(
    root: &str,
    namespace: Option<&str>,
    plural: &str,
    name: Option<&str>,
    query: &str,
) -> Result<PathAndQuery, ApiError> {
    let mut path = root.to_owned();
    if let Some(namespace) = namespace {
        path.push_str("/namespaces/");
        path.push_str(segment(namespace)?);
    }
    path.push('/');
    path.push_str(plural);
    if let Some(name) = name {
        path.push('/');
        path.push_str(segment(name)?);
    }
    path.push_str(query);
    Ok(path.parse()?)
}

/// Checks that a name can be a segment of a path as it is.
fn segment(name: &str) -> Result<&str, ApiError> {
    is_segment(name)
        .then_some(name)
        .ok_or_else(|| ApiError::Name(name.to_owned()))
}
