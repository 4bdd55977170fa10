//! A client of Kubernetes' API: as much of it as Hearth asks for.
//!
//! | part | does |
//! |---|---|
//! | this module | requests about objects, and what may go wrong with them |
//! | [`kinds`] | which kinds there are, and where their objects are found |
//! | [`fields`] | the fields that are read |
//! | [`watch`] | all objects of a kind, and each change of them |
//!
//! Why not the library for it (kube, with k8s-openapi): its types read every
//! field of every object, and what that takes made the node larger by more than
//! all the rest of Kubernetes' parts in it together. Some thirty fields are
//! read here. What is left besides is JSON over HTTP/2, and a connection that
//! is made again when it was lost is there already: tonic's channel, by which
//! etcd and containerd are spoken to as well.
//!
//! Invariants: an answer is bounded in time and in size; a name that came from
//! elsewhere never makes another path; what the API server says of a failure is
//! told in its own words.

pub mod fields;
pub mod kinds;
#[cfg(test)]
mod tests;
pub mod watch;
mod watching;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
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
pub use watching::Watching;

/// To reach an API server, or what stands before it.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// A server that is silent for so long, and then for half as long when it is
/// asked for a sign of life, is gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// For the whole of an answer. A watch is none.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// An answer has at most so many bytes: a page of a list has hundreds of
/// objects, each of which etcd bounds.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// As much of an answer that nobody understands is told on.
const MAX_SHOWN_CHARS: usize = 300;

/// By whom the fields are managed that are applied.
pub const MANAGER: &str = "hearth";

/// An address at which there can be no API server.
#[derive(Debug, thiserror::Error)]
#[error("{url:?} is not the address of an API server: https://ADDRESS:PORT is wanted")]
pub struct AddressError {
    /// As it was given.
    pub url: String,
}

/// Why the API server has not done what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// Nothing of Kubernetes is called so.
    #[error("{0:?} is no name of an object")]
    Name(String),
    /// Names make no path.
    #[error("no request can be made")]
    Request(#[from] InvalidUri),
    /// No connection, or it has ended.
    #[error("no connection to the API server")]
    Connection(#[source] tonic::transport::Error),
    /// In the middle of the answer.
    #[error("the API server's answer broke off")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Nothing within the time.
    #[error("the API server does not answer within {0:?}")]
    Silent(Duration),
    /// More than is read.
    #[error("the API server's answer is longer than {MAX_ANSWER_BYTES} bytes")]
    Long,
    /// It is understood otherwise.
    #[error("the API server's answer is not as expected")]
    Json(#[from] serde_json::Error),
    /// In the API server's own words.
    #[error("{message} (HTTP {code})")]
    Refused {
        /// As of HTTP.
        code: StatusCode,
        /// What it says.
        message: String,
    },
}

impl ApiError {
    /// Whether the API server has refused with this code.
    pub fn is(&self, expected: StatusCode) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == expected)
    }
}

/// Speaks with the API servers behind an address, as whoever its certificate
/// names. Connects when it is first used, and again when it has to. Cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
}

impl Client {
    /// Of the servers at `url`, such as `https://127.0.0.1:6443`, that prove
    /// themselves by [`KUBERNETES_SERVER`]; `tls` says whom we believe and who
    /// we are.
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

    /// Those of a kind: in all namespaces, or in none if the kind has none.
    pub fn all(&self, kind: Kind) -> Objects {
        Objects {
            client: self.clone(),
            kind,
            namespace: None,
        }
    }

    /// Those of a kind in one namespace.
    pub fn within(&self, namespace: &str, kind: Kind) -> Objects {
        Objects {
            namespace: Some(namespace.to_owned()),
            ..self.all(kind)
        }
    }

    /// What stands at a path, such as `/readyz`.
    pub async fn text(&self, path: &str) -> Result<String, ApiError> {
        let answer = self.ask(Method::GET, path.parse()?, None).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Asks, and reads the whole answer.
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

    /// Asks, and gives the answer as soon as it begins; an error, if it is one.
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

/// The words of a failure: of a `Status`, or of whatever it is.
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

/// Objects of one kind.
#[derive(Clone, Debug)]
pub struct Objects {
    client: Client,
    kind: Kind,
    /// `None`: of all, or the kind has none.
    namespace: Option<String>,
}

impl Objects {
    /// The object of this name; `None` if there is none.
    pub async fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ApiError> {
        let path = self.path(Some(name), "")?;
        match self.client.ask(Method::GET, path, None).await {
            Ok(answer) => Ok(Some(serde_json::from_slice(&answer)?)),
            Err(error) if error.is(StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes an object. Kind and version are added. Refused with
    /// [`StatusCode::CONFLICT`] if there is one of its name.
    pub async fn create(&self, mut object: Json) -> Result<Json, ApiError> {
        object["apiVersion"] = self.kind.api_version().into();
        object["kind"] = self.kind.name.into();
        let body = Some(("application/json", &object));
        let path = self.path(None, &format!("?fieldManager={MANAGER}"))?;
        let made = self.client.ask(Method::POST, path, body).await?;
        Ok(serde_json::from_slice(&made)?)
    }

    /// Changes an object by a merge patch. With a `resourceVersion` in its
    /// metadata it is refused with [`StatusCode::CONFLICT`] if the object has
    /// changed since.
    pub async fn merge(&self, name: &str, patch: &Json) -> Result<(), ApiError> {
        self.patch(name, "", ("application/merge-patch+json", patch))
            .await
    }

    /// Makes the fields of an object what they are here, whoever has set them,
    /// and the object if there is none. What is left out and was ours goes.
    pub async fn apply(&self, name: &str, object: &Json) -> Result<(), ApiError> {
        let query = format!("?fieldManager={MANAGER}&force=true");
        self.patch(name, &query, ("application/apply-patch+yaml", object))
            .await
    }

    /// Removes an object. It stays until its finalizers are gone.
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

    /// Of one of them, or of all.
    fn path(&self, name: Option<&str>, query: &str) -> Result<PathAndQuery, ApiError> {
        let mut path = self.kind.root();
        if let Some(namespace) = &self.namespace {
            path.push_str("/namespaces/");
            path.push_str(segment(namespace)?);
        }
        path.push('/');
        path.push_str(self.kind.plural);
        if let Some(name) = name {
            path.push('/');
            path.push_str(segment(name)?);
        }
        path.push_str(query);
        Ok(path.parse()?)
    }
}

/// A name as a part of a path: as it is, or not at all. No name of Kubernetes
/// has any other character.
fn segment(name: &str) -> Result<&str, ApiError> {
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':' | '_');
    let is_name = !matches!(name, "" | "." | "..") && name.chars().all(known);
    is_name
        .then_some(name)
        .ok_or_else(|| ApiError::Name(name.to_owned()))
}
