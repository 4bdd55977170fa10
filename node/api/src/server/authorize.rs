//! The layer in front of all services that authorizes calls.

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

/// The caller of a request. Every request that reaches a handler has one.
#[derive(Clone, Debug)]
pub struct Caller(ConnectionInfo);

impl Caller {
    /// The caller of this request.
    ///
    /// # Errors
    /// `Internal` if the service is not behind [`Authorize`].
    pub fn of<T>(request: &tonic::Request<T>) -> Result<&Self, Status> {
        request
            .extensions()
            .get::<Self>()
            .ok_or_else(|| Status::internal("the service has no authorization layer"))
    }

    /// What its connection has proven.
    pub fn peer(&self) -> &PeerCertificate {
        &self.0.peer
    }

    /// The caller's address.
    pub fn remote(&self) -> std::net::SocketAddr {
        self.0.remote
    }

    /// The caller's identity.
    ///
    /// # Errors
    /// `Unauthenticated` if it has no certificate of the cluster.
    pub fn identity(&self) -> Result<&Identity, Status> {
        self.peer().identity().ok_or_else(unnamed)
    }

    /// The caller's node ID.
    ///
    /// # Errors
    /// `Unauthenticated` if it has no certificate of the cluster, `PermissionDenied` if it is a
    /// user.
    pub fn node(&self) -> Result<NodeId, Status> {
        match &self.identity()?.subject {
            Subject::Node(id) => Ok(*id),
            user => Err(Status::permission_denied(format!(
                "{user} may not call this method: it is for nodes only"
            ))),
        }
    }

    /// The caller's user name.
    ///
    /// # Errors
    /// `Unauthenticated` if it has no certificate of the cluster, `PermissionDenied` if it is a
    /// node.
    pub fn user(&self) -> Result<&UserName, Status> {
        match &self.identity()?.subject {
            Subject::User(name) => Ok(name),
            node => Err(Status::permission_denied(format!(
                "{node} may not call this method: it is for users only"
            ))),
        }
    }

    /// The public key that the caller has proven to hold, with or without a certificate of the
    /// cluster.
    ///
    /// # Errors
    /// `Unauthenticated` if it presented no certificate.
    pub fn public_key(&self) -> Result<PublicKey, Status> {
        self.peer().public_key().ok_or_else(|| {
            Status::unauthenticated(
                "client certificate: expected a self-signed Ed25519 certificate, got none",
            )
        })
    }
}

fn unnamed() -> Status {
    Status::unauthenticated("client certificate: expected one issued by this cluster, got none")
}

/// A server's own check of each call, after the permissions: whether the calling node is still a
/// member, and whether the server's own state is fresh enough.
pub trait Admission: Send + Sync + 'static {
    /// Admits the call or rejects it. Must not block.
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), Status>;

    /// Rechecks a rejection by [`Self::admit`]: a server whose state may be slightly out of date
    /// can refresh it here before the caller is rejected. Admitted calls never wait for this. By
    /// default the rejection stands.
    ///
    /// # Errors
    /// The status that the caller gets.
    fn reconsider(
        self: Arc<Self>,
        caller: Caller,
        path: String,
        refusal: Status,
    ) -> BoxFuture<'static, Result<(), Status>> {
        drop((caller, path));
        Box::pin(std::future::ready(Err(refusal)))
    }

    /// Completes when this peer is no longer admitted, at once if it is not admitted now. A moment
    /// later its connection is closed, with all calls on it; until then [`Self::admit`] returns the
    /// reason. By default it never completes.
    ///
    /// Called once for each connection. A state that is not fresh enough to decide is not a reason
    /// to close a connection.
    fn revoked(self: Arc<Self>, peer: PeerCertificate) -> BoxFuture<'static, ()> {
        drop(peer);
        Box::pin(std::future::pending())
    }
}

/// The authorization layer. Rejects calls of methods without an authorization, and calls whose
/// caller lacks a permission that the method needs; turns a handler's panic into `Internal`.
/// Handlers run in the span that was current when the layer was created, so that their log entries
/// carry the name of the server's runnable.
#[derive(Clone)]
pub struct Authorize {
    clock: Clock,
    admission: Option<Arc<dyn Admission>>,
    span: Span,
}

impl Authorize {
    /// A layer that checks the expiry of certificates by this clock.
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
            .get::<Option<ConnectionInfo>>()
            .and_then(Option::as_ref)
            .ok_or_else(|| Status::internal("the call has no connection info"))?;
        let caller = Caller(info.clone());
        match permissions::authorization(path) {
            None => {
                return Err(Status::permission_denied(format!(
                    "{path}: unknown method, or one without an authorization"
                )));
            }
            Some(Authorization::Unauthenticated) => {}
            Some(Authorization::Need(need)) => self.check(&caller, path, need)?,
        }
        Ok(caller)
    }

    /// The server's own check: `None` if the call is admitted, otherwise the recheck to wait for.
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
        // The connection is closed when its certificate expires, but a call may come before that.
        if tls::now(&self.clock) > *not_after {
            return Err(Status::unauthenticated("client certificate has expired"));
        }
        match permissions::missing(&identity.subject, need) {
            None => Ok(()),
            Some(missing) => Err(Status::permission_denied(format!(
                "{} may not call {path}: permission {} is missing",
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

/// The status for the caller; the details go to the log.
fn panicked(path: &str, panic: &(dyn Any + Send)) -> Status {
    let why = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    error!(path, why, "handler panicked");
    Status::internal("internal error in the handler; see the node's log")
}

/// A response body that catches panics of its stream.
struct GuardedBody {
    /// `None` after a panic.
    body: Option<Body>,
    path: String,
    span: Span,
    /// The call counts as running as long as its response.
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
