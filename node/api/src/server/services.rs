//! The services of one server, by service name.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;
use tower::util::{BoxCloneSyncService, ServiceExt as _};

pub(super) type Handler = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// A set of gRPC services. tonic's own router would add a whole web framework for what is a map
/// lookup.
#[derive(Clone, Default)]
pub struct Services {
    by_name: Arc<HashMap<&'static str, Handler>>,
}

impl Services {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a service, such as a generated `ManagementServer`. It replaces an earlier one of the
    /// same name.
    #[must_use]
    pub fn with<S>(mut self, service: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        self.add(S::NAME, BoxCloneSyncService::new(service));
        self
    }

    /// The names of the services.
    pub(super) fn names(&self) -> Vec<&'static str> {
        self.by_name.keys().copied().collect()
    }

    /// Adds a service of this name.
    pub(super) fn add(&mut self, name: &'static str, service: Handler) {
        Arc::make_mut(&mut self.by_name).insert(name, service);
    }

    /// The service for a path such as `/hearth.v1.Management/GetNodes`.
    fn find(&self, path: &str) -> Option<Handler> {
        let (name, _method) = path.strip_prefix('/')?.split_once('/')?;
        self.by_name.get(name).cloned()
    }
}

impl Service<Request<Body>> for Services {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        match self.find(path) {
            Some(handler) => Box::pin(handler.oneshot(request)),
            None => {
                let status = Status::unimplemented(format!("{path}: service not available"));
                Box::pin(async move { Ok(status.into_http()) })
            }
        }
    }
}
