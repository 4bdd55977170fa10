//! The method `Curator.Watch`, as a layer in front of the generated service.
//!
//! The generated code of a service encodes each message for each subscriber. Thousands of
//! subscribers get the same nodes, and encoding them was most of the cost of a subscriber. So this
//! method answers with nodes that are encoded already. The encoding of the message is the same, but
//! its Rust type is another one ([`EncodedEvent`]), and the generated trait has only one type per
//! method, which clients need as well. So this layer handles the method, and the method of the
//! generated service is never called.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use hearth_api::server::Caller;
use hearth_api::v1::WatchRequest;
use hearth_api::v1::curator_server::CuratorServer;
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, ServerStreamingService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::Service;

use super::{LARGEST_NODE_REQUEST, curator, request};
use crate::core::Core;
use crate::streams::{self, EncodedEvent};

/// The path of the method in `curator.proto`; a test compares them.
const WATCH_PATH: &str = "/hearth.v1.Curator/Watch";

/// The service `Curator`, with this implementation of `Watch`.
#[derive(Clone)]
pub(super) struct WithWatch {
    core: Arc<Core>,
    rest: CuratorServer<curator::Service>,
}

impl WithWatch {
    pub(super) fn new(core: Arc<Core>, rest: CuratorServer<curator::Service>) -> Self {
        Self { core, rest }
    }
}

impl NamedService for WithWatch {
    const NAME: &'static str = <CuratorServer<curator::Service> as NamedService>::NAME;
}

impl Service<http::Request<Body>> for WithWatch {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() != WATCH_PATH {
            return self.rest.call(request);
        }
        let method = Watch {
            core: self.core.clone(),
        };
        async move {
            let codec = ProstCodec::<EncodedEvent, WatchRequest>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(LARGEST_NODE_REQUEST);
            Ok(grpc.server_streaming(method, request).await)
        }
        .boxed()
    }
}

struct Watch {
    core: Arc<Core>,
}

impl ServerStreamingService<WatchRequest> for Watch {
    type Response = EncodedEvent;
    type ResponseStream = BoxStream<'static, Result<EncodedEvent, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<WatchRequest>) -> Self::Future {
        watch(self.core.clone(), request).boxed()
    }
}

async fn watch(
    core: Arc<Core>,
    request: Request<WatchRequest>,
) -> Result<Response<BoxStream<'static, Result<EncodedEvent, Status>>>, Status> {
    let peer = Caller::of(&request)?.peer().clone();
    let only = match request.get_ref().node_id.as_str() {
        "" => None,
        id => Some(request::parse_node_id(id)?),
    };
    core.reads.linearizable().await?;
    let node = peer.identity().and_then(|identity| identity.node_id());
    let slot = node.map(|node| core.budgets.watch(node));
    let stream = streams::watch(core, peer, slot, only);
    Ok(Response::new(stream.boxed()))
}

#[cfg(test)]
mod tests {
    use hearth_api::permissions::{Authorization, Permission, authorization};
    use hearth_base::testing::within_timeout;

    use super::*;
    use crate::testing::{World, quick};

    #[test]
    fn the_path_is_that_of_the_method() {
        let read = Authorization::Need(&[Permission::ReadClusterStatus]);
        assert_eq!(authorization(WATCH_PATH), Some(read));
        assert_eq!(WATCH_PATH, format!("/{}/Watch", WithWatch::NAME));
    }

    /// Without the layer, the stub in the generated service would answer with an error.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_layer_is_in_front_of_the_service() {
        let world = World::new(quick()).await;
        let mut curator = world.curator(&world.node);
        let answer = within_timeout("Watch", curator.watch(WatchRequest::default())).await;
        let event = within_timeout("an event", answer.unwrap().into_inner().message()).await;
        assert_eq!(event.unwrap().unwrap().nodes.len(), 1);
        world.stop().await;
    }
}
