//! Parameters from the metadata service of a cloud.
//!
//! | cloud | recognised by | asked for | form |
//! |---|---|---|---|
//! | Amazon EC2 | system vendor `Amazon EC2` | user data, by IMDSv2 | the message itself |
//! | Google Cloud | product `Google Compute Engine` | the instance's attribute `hearth-parameters` | base64 |
//!
//! The service is asked only in a machine whose SMBIOS table says that it is one of that cloud, so no
//! other machine waits for an address that nobody answers. It is asked as long as it does not answer:
//! the network may not be there yet, and a service that is out of order has not said that it has no
//! parameters. It says so with status 404.
//!
//! Both protocols are HTTP/1.1 without encryption at a link-local address, which only the hypervisor
//! answers. The token of IMDSv2, and the header of Google Cloud in both directions, keep out whoever
//! can make a program of the machine send requests elsewhere.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use hearth_api::chain;
use hearth_api::console::Report;
use hearth_base::event::{Closed, Value};
use hearth_parameters::{MAX_SIZE, Network};
use hearth_sys::smbios::{Smbios, SmbiosError};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::{Found, Loaded, ParametersError, Problem, Source, parse, text};

/// Where both clouds have their service.
const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), 80);
/// Of both requests of EC2 together.
const ANSWER_BOUND: Duration = Duration::from_secs(5);
/// The first of the pauses between attempts, each of which is twice as long as the one before, up to
/// the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(15)];
/// The longest answer: base64 has four characters for three bytes, and line breaks.
const LONGEST: usize = MAX_SIZE * 3 / 2;

/// A cloud whose metadata service is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cloud {
    /// Amazon EC2.
    Ec2,
    /// Google Cloud, its Compute Engine.
    Google,
}

impl fmt::Display for Cloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ec2 => "EC2 user data",
            Self::Google => "Google Cloud attribute hearth-parameters",
        })
    }
}

impl Cloud {
    /// The cloud of this machine, if it is one of these.
    pub fn of(smbios: &Smbios) -> Result<Option<Self>, SmbiosError> {
        if smbios.vendor()?.as_deref() == Some("Amazon EC2") {
            return Ok(Some(Self::Ec2));
        }
        let is_google = smbios.product()?.as_deref() == Some("Google Compute Engine");
        Ok(is_google.then_some(Self::Google))
    }
}

/// Why a metadata service gives no parameters.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    /// No answer in time.
    #[error("no answer from the metadata service within {} seconds", ANSWER_BOUND.as_secs())]
    Silent,
    /// There is no connection to it.
    #[error("cannot connect to the metadata service")]
    Connect(#[source] std::io::Error),
    /// The connection broke.
    #[error("cannot ask the metadata service")]
    Exchange(#[source] hyper::Error),
    /// The answer broke off.
    #[error("cannot read the answer of the metadata service")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is longer than any parameters.
    #[error("too large: expected at most {LONGEST} bytes")]
    TooLarge,
    /// It refuses, or cannot.
    #[error("{what}: expected status 200 or 404, got {status}")]
    Status {
        /// What it was asked for.
        what: &'static str,
        /// Its status.
        status: StatusCode,
    },
    /// Something else answers at its address.
    #[error("expected the header Metadata-Flavor: Google, which the metadata service sends")]
    NotTheService,
    /// The token cannot be sent back.
    #[error("session token: expected text for a header")]
    Token,
}

impl MetadataError {
    /// Whether the same request may be answered later.
    fn is_passing(&self) -> bool {
        match self {
            Self::Silent | Self::Connect(_) | Self::Exchange(_) | Self::Body(_) => true,
            Self::Status { status, .. } => {
                status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS
            }
            Self::TooLarge | Self::NotTheService | Self::Token => false,
        }
    }
}

/// Asks the service until it answers. `address` is the machine's own, once it has one; `report` shows
/// what is waited for.
pub async fn load(
    cloud: Cloud,
    address: &Value<IpAddr>,
    report: impl Fn(&Report),
) -> Result<Loaded, Closed> {
    address.watch().next().await?;
    Ok(load_from(SERVICE, cloud, PAUSES, report).await)
}

async fn load_from(
    service: SocketAddr,
    cloud: Cloud,
    [mut pause, longest]: [Duration; 2],
    report: impl Fn(&Report),
) -> Loaded {
    let source = Source::Cloud(cloud);
    let failed = |problem| ParametersError {
        from: source,
        problem,
    };
    let answer = loop {
        let error = match ask(service, cloud).await {
            Ok(answer) => break answer,
            Err(error) if error.is_passing() => error,
            Err(error) => return Err(failed(error.into())),
        };
        let why = format!("parameters from {source}: {}", chain(&error));
        tracing::warn!("{why}");
        report(&Report::Waiting(why));
        sleep(pause).await;
        pause = longest.min(pause * 2);
    };
    let Some(answer) = answer else {
        return Ok(None);
    };
    let bytes = match cloud {
        Cloud::Ec2 => answer,
        Cloud::Google => text::decode(&answer).map_err(|error| failed(error.into()))?,
    };
    let parameters = parse(source, &bytes)?;
    if parameters.network != Network::default() {
        return Err(failed(Problem::Network));
    }
    Ok(Some(Found {
        source,
        parameters,
        ignored: Vec::new(),
    }))
}

/// What the service has; `None` if it says that it has nothing.
async fn ask(service: SocketAddr, cloud: Cloud) -> Result<Option<Vec<u8>>, MetadataError> {
    let asked = async {
        match cloud {
            Cloud::Ec2 => ask_ec2(service).await,
            Cloud::Google => ask_google(service).await,
        }
    };
    timeout(ANSWER_BOUND, asked)
        .await
        .unwrap_or(Err(MetadataError::Silent))
}

/// IMDSv2: a token first, for as long as it is needed.
async fn ask_ec2(service: SocketAddr) -> Result<Option<Vec<u8>>, MetadataError> {
    const WHAT: &str = "session token";
    let host = HeaderValue::from_static("169.254.169.254");
    let mut request = request(Method::PUT, "/latest/api/token", host.clone());
    let lifetime = HeaderValue::from_static("60");
    let headers = request.headers_mut();
    headers.insert("x-aws-ec2-metadata-token-ttl-seconds", lifetime);
    let answer = exchange(service, request).await?;
    // A service without tokens is one that everybody's programs could be made to ask.
    if answer.status != StatusCode::OK {
        return Err(answer.refused(WHAT));
    }
    let token = HeaderValue::from_bytes(answer.body.trim_ascii());
    let mut token = token.map_err(|_| MetadataError::Token)?;
    token.set_sensitive(true);
    let mut request = self::request(Method::GET, "/latest/user-data", host);
    request
        .headers_mut()
        .insert("x-aws-ec2-metadata-token", token);
    exchange(service, request).await?.content("user data")
}

async fn ask_google(service: SocketAddr) -> Result<Option<Vec<u8>>, MetadataError> {
    const PATH: &str = "/computeMetadata/v1/instance/attributes/hearth-parameters";
    const FLAVOR: &str = "metadata-flavor";
    let google = HeaderValue::from_static("Google");
    let host = HeaderValue::from_static("metadata.google.internal");
    let mut request = request(Method::GET, PATH, host);
    request.headers_mut().insert(FLAVOR, google.clone());
    let answer = exchange(service, request).await?;
    if answer.headers.get(FLAVOR) != Some(&google) {
        return Err(MetadataError::NotTheService);
    }
    answer.content("attribute hearth-parameters")
}

type Empties = Empty<Bytes>;

fn request(method: Method, path: &'static str, host: HeaderValue) -> Request<Empties> {
    let mut request = Request::new(Empties::new());
    *request.method_mut() = method;
    *request.uri_mut() = hyper::Uri::from_static(path);
    request.headers_mut().insert(HOST, host);
    request
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn content(self, what: &'static str) -> Result<Option<Vec<u8>>, MetadataError> {
        match self.status {
            StatusCode::OK => Ok(Some(self.body)),
            StatusCode::NOT_FOUND => Ok(None),
            _ => Err(self.refused(what)),
        }
    }

    fn refused(&self, what: &'static str) -> MetadataError {
        MetadataError::Status {
            what,
            status: self.status,
        }
    }
}

/// One request over a connection of its own.
async fn exchange(service: SocketAddr, request: Request<Empties>) -> Result<Answer, MetadataError> {
    let stream = TcpStream::connect(service).await;
    let stream = stream.map_err(MetadataError::Connect)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(MetadataError::Exchange)?;
    let answer = async move {
        let response = sender.send_request(request).await;
        let (head, body) = response.map_err(MetadataError::Exchange)?.into_parts();
        let body = Limited::new(body, LONGEST).collect().await;
        let body = body.map_err(|error| match error.is::<LengthLimitError>() {
            true => MetadataError::TooLarge,
            false => MetadataError::Body(error),
        })?;
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes().into(),
        })
    };
    // The connection carries the answer, and has no error of its own that the answer has not.
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        _ = connection => answer.await,
    }
}

#[cfg(test)]
mod tests;
