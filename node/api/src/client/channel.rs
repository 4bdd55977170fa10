//! The channel that the generated clients call: it picks a connection for each call, and tracks by
//! the answer whether the server works.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, timeout_at};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Service, ServiceExt as _};

use super::{Line, Shared, no_answer};

/// For the generated clients: each call goes to a curator that is serving. Cheap to clone.
#[derive(Clone)]
pub struct Channel(pub(super) Arc<Shared>);

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Response<Body>, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(call(shared, request))
    }
}

async fn call(shared: Arc<Shared>, request: Request<Body>) -> Result<Response<Body>, Status> {
    let bound = shared.options.call_timeout;
    let deadline = Instant::now() + bound;
    let late = |_| no_answer(bound);
    let line = timeout_at(deadline, shared.line()).await.map_err(late)??;
    let mut judge = Judge {
        shared,
        line,
        judged: false,
    };
    let mut channel = judge.line.channel.clone();
    let answer = async { channel.ready().await?.call(request).await };
    let response = match timeout_at(deadline, answer).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            judge.shared.broken(&judge.line);
            return Err(Status::from_error(Box::new(error)));
        }
        Err(elapsed) => {
            judge.failed();
            return Err(late(elapsed));
        }
    };
    judge.look_at(response.headers());
    // The body holds the connection: running calls continue on it even if new ones use another.
    Ok(response.map(|body| Body::new(Judged { body, judge })))
}

/// Tracks the outcome of one call to judge its server.
struct Judge {
    shared: Arc<Shared>,
    line: Arc<Line>,
    judged: bool,
}

impl Judge {
    /// The server is not serving, or cannot be reached.
    fn failed(&mut self) {
        self.judged = true;
        self.shared.failed(&self.line);
    }

    fn works(&mut self) {
        if !self.judged {
            self.judged = true;
            self.shared.works(&self.line);
        }
    }

    /// Reads the status of a call from headers or trailers, if it is there.
    fn look_at(&mut self, headers: &HeaderMap) {
        let status = headers.get("grpc-status").map(|code| code.as_bytes());
        match status.map(Code::from_bytes) {
            Some(Code::Unavailable) => self.failed(),
            Some(_) => self.works(),
            None => {}
        }
    }
}

/// A response body that reports the outcome to the judge.
struct Judged {
    body: Body,
    judge: Judge,
}

impl http_body::Body for Judged {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => match frame.trailers_ref() {
                Some(trailers) => this.judge.look_at(trailers),
                None => this.judge.works(),
            },
            Poll::Ready(Some(Err(_))) => this.judge.failed(),
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
