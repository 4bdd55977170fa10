//! The layer in front of all services: who may call what.

use std::any::Any;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};
use tracing::{Instrument as _, Span, error};

use super::ConnectionInfo;
use super::places::RunningCall;
use crate::identity::{Identity, NodeId, PublicKey, Subject, UserName};
use crate::permissions::{self, Authorization};
use crate::tls::{self, Clock, PeerCertificate};

/// Who makes a call. Every request that reaches a handler has one.
#[derive(Clone, Debug)]
pub struct Caller(ConnectionInfo);

impl Caller {
    /// Of this request.
    ///
    /// # Errors
    /// `Internal` if the service is not behind [`Authorize`].
    pub fn of<T>(request: &tonic::Request<T>) -> Result<&Self, Status> {
        request
            .extensions()
            .get::<Self>()
            .ok_or_else(|| Status::internal("a service without authorisation in front of it"))
    }

    /// What its connection has proven.
    pub fn peer(&self) -> &PeerCertificate {
        &self.0.peer
    }

    /// Where it comes from.
    pub fn remote(&self) -> std::net::SocketAddr {
        self.0.remote
    }

    /// Who it is.
    ///
    /// # Errors
    /// `Unauthenticated` if the cluster has given it no name.
    pub fn identity(&self) -> Result<&Identity, Status> {
        self.peer().identity().ok_or_else(unnamed)
    }

    /// Which node it is.
    ///
    /// # Errors
    /// `Unauthenticated` if it has no name, `PermissionDenied` if it is a user.
    pub fn node(&self) -> Result<NodeId, Status> {
        match &self.identity()?.subject {
            Subject::Node(id) => Ok(*id),
            user => Err(Status::permission_denied(format!(
                "{user} calls what only nodes may call"
            ))),
        }
    }

    /// Which user it is.
    ///
    /// # Errors
    /// `Unauthenticated` if it has no name, `PermissionDenied` if it is a node.
    pub fn user(&self) -> Result<&UserName, Status> {
        match &self.identity()?.subject {
            Subject::User(name) => Ok(name),
            node => Err(Status::permission_denied(format!(
                "{node} calls what only users may call"
            ))),
        }
    }

    /// The key it has proven to hold, whether the cluster has named it or not.
    ///
    /// # Errors
    /// `Unauthenticated` if it came without any certificate.
    pub fn public_key(&self) -> Result<PublicKey, Status> {
        self.peer().public_key().ok_or_else(|| {
            Status::unauthenticated(
                "no client certificate: connect with one that is signed by its own Ed25519 key",
            )
        })
    }
}

fn unnamed() -> Status {
    Status::unauthenticated(
        "no certificate of this cluster: connect with one that the cluster has issued",
    )
}

/// A server's own say about each call, after the permissions: is the node
/// that calls still a member, is this server's own state fresh enough.
pub trait Admission: Send + Sync + 'static {
    /// Lets the call through or refuses it. Must not block.
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), Status>;

    /// Whether a refusal by [`Self::admit`] stands: a server whose knowledge
    /// may be a moment old can get newer here before it turns somebody away.
    /// Calls that are let through never wait for this. By default it stands.
    ///
    /// # Errors
    /// What the caller is told.
    fn reconsider(
        self: Arc<Self>,
        caller: Caller,
        path: String,
        refusal: Status,
    ) -> BoxFuture<'static, Result<(), Status>> {
        drop((caller, path));
        Box::pin(std::future::ready(Err(refusal)))
    }

    /// Ends when this peer is no longer welcome, at once if it is not now. A
    /// moment later its connection is cut, whatever runs on it; until then
    /// [`Self::admit`] tells it why. By default that never comes.
    ///
    /// Asked once for each connection; not being fresh enough to judge is no
    /// reason to cut anyone.
    fn revoked(self: Arc<Self>, peer: PeerCertificate) -> BoxFuture<'static, ()> {
        drop(peer);
        Box::pin(std::future::pending())
    }
}

/// The layer. Refuses calls whose method does not say who may call it, and
/// calls whose caller lacks what the method asks for; turns a handler's panic
/// into `Internal`. Handlers run in the span that was current when this was
/// made, so that their log entries bear the name of the server's runnable.
#[derive(Clone)]
pub struct Authorize {
    clock: Clock,
    admission: Option<Arc<dyn Admission>>,
    span: Span,
}

impl Authorize {
    /// Certificates are judged by this clock.
    pub fn new(clock: Clock, admission: Option<Arc<dyn Admission>>) -> Self {
        Self {
            clock,
            admission,
            span: Span::current(),
        }
    }

    fn decide(&self, request: &Request<Body>) -> Result<Caller, Status> {
        let path = request.uri().path();
        let info = request
            .extensions()
            .get::<ConnectionInfo>()
            .ok_or_else(|| Status::internal("a call without a connection"))?;
        let caller = Caller(info.clone());
        match permissions::authorization(path) {
            None => {
                return Err(Status::permission_denied(format!(
                    "{path} is not a method that anyone may call on this node"
                )));
            }
            Some(Authorization::Unauthenticated) => {}
            Some(Authorization::Need(need)) => self.check(&caller, path, need)?,
        }
        Ok(caller)
    }

    /// The server's own say; what comes of it later if it is against the call.
    fn refused(
        &self,
        caller: &Caller,
        path: &str,
    ) -> Option<BoxFuture<'static, Result<(), Status>>> {
        let admission = self.admission.as_ref()?;
        let refusal = admission.admit(caller, path).err()?;
        let admission = Arc::clone(admission);
        Some(admission.reconsider(caller.clone(), path.to_owned(), refusal))
    }

    fn check(
        &self,
        caller: &Caller,
        path: &str,
        need: &[permissions::Permission],
    ) -> Result<(), Status> {
        let PeerCertificate::Identified {
            identity,
            not_after,
            ..
        } = caller.peer()
        else {
            return Err(unnamed());
        };
        // The connection ends with its certificate, but a call may be quicker.
        if tls::now(&self.clock) > *not_after {
            return Err(Status::unauthenticated("your certificate has expired"));
        }
        match permissions::missing(&identity.subject, need) {
            None => Ok(()),
            Some(missing) => Err(Status::permission_denied(format!(
                "{} may not call {path}: it lacks {}",
                identity.subject,
                missing.as_str_name()
            ))),
        }
    }
}

impl<S> Layer<S> for Authorize {
    type Service = Authorized<S>;

    fn layer(&self, inner: S) -> Authorized<S> {
        Authorized {
            inner,
            authorize: self.clone(),
        }
    }
}

/// A service behind [`Authorize`].
#[derive(Clone)]
pub struct Authorized<S> {
    inner: S,
    authorize: Authorize,
}

impl<S> Service<Request<Body>> for Authorized<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let caller = match self.authorize.decide(&request) {
            Ok(caller) => caller,
            Err(status) => return Box::pin(async move { Ok(status.into_http()) }),
        };
        let path = request.uri().path().to_owned();
        let refused = self.authorize.refused(&caller, &path);
        let activity = Arc::clone(&caller.0.activity);
        request.extensions_mut().insert(caller);
        let span = self.authorize.span.clone();
        // The instance that was ready is the one to call.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let call = {
            let span = span.clone();
            async move {
                if let Some(refused) = refused
                    && let Err(status) = refused.await
                {
                    return Ok(status.into_http());
                }
                let running = activity.begin();
                match AssertUnwindSafe(async { inner.call(request).await })
                    .catch_unwind()
                    .await
                {
                    Ok(Ok(response)) => Ok(response.map(|body| {
                        Body::new(GuardedBody {
                            body: Some(body),
                            path,
                            span,
                            _running: running,
                        })
                    })),
                    Ok(Err(never)) => match never {},
                    Err(panic) => Ok(panicked(&path, &*panic).into_http()),
                }
            }
        };
        Box::pin(call.instrument(span))
    }
}

/// What the caller is told; what happened goes to the log.
fn panicked(path: &str, panic: &(dyn Any + Send)) -> Status {
    let why = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    error!(path, why, "a handler panicked");
    Status::internal("the handler of this call failed; its node's log says why")
}

/// A response body whose stream may panic too.
struct GuardedBody {
    /// `None` once it has panicked.
    body: Option<Body>,
    path: String,
    span: Span,
    /// A call runs as long as its answer.
    _running: RunningCall,
}

impl http_body::Body for GuardedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let _entered = this.span.enter();
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let poll = AssertUnwindSafe(|| Pin::new(body).poll_frame(cx));
        match std::panic::catch_unwind(poll) {
            Ok(polled) => polled,
            Err(panic) => {
                this.body = None;
                let status = panicked(&this.path, &*panic);
                let mut trailers = http::HeaderMap::new();
                Poll::Ready(Some(match status.add_header(&mut trailers) {
                    Ok(()) => Ok(Frame::trailers(trailers)),
                    Err(status) => Err(status),
                }))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body
            .as_ref()
            .is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body
            .as_ref()
            .map_or_else(http_body::SizeHint::default, http_body::Body::size_hint)
    }
}
