//! The way to containerd: one connection over its unix socket, the namespace
//! in which Kubernetes keeps its things, and the few questions that are asked
//! of the container runtime.

use std::path::Path;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use futures::future::BoxFuture;
use hearth_api::transport::Connector;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};

use super::super::program::Unwell;
use super::wire::cri::{
    ContainerFilter, ContainerState, ContainerStateValue, ListContainersRequest,
    ListContainersResponse, ListPodSandboxRequest, ListPodSandboxResponse, PodSandboxFilter,
    PodSandboxState, PodSandboxStateValue, StatusRequest, StatusResponse, StopContainerRequest,
    StopContainerResponse, StopPodSandboxRequest, StopPodSandboxResponse,
};

/// Where the kubelet looks for containers and images.
const NAMESPACE: &str = "k8s.io";
/// What is content for an image in the making, in containerd's books.
pub(super) const LEASE: &str = "hearth-import";
/// Where the runtime's methods are.
const RUNTIME: &str = "/runtime.v1.RuntimeService";
/// For calls that only look. Emulated machines are slow.
const CALL_BOUND: Duration = Duration::from_secs(20);

/// A connection that is made when it is first used, and again whenever it was
/// lost. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Connection {
    channel: Channel,
}

impl Connection {
    /// To the containerd that serves, or will, on a socket.
    pub(crate) fn to(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let connector = Connector::new(move || UnixStream::connect(socket.clone()));
        Self {
            channel: connector.channel(&Endpoint::from_static("http://containerd.invalid")),
        }
    }

    /// For containerd's own services.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Whether the runtime can run containers; `Err` says why not. Whether
    /// pods have a network is told by the kubelet, on the node's object.
    pub(crate) async fn works(&self) -> Result<(), Unwell> {
        let asked = self.runtime("Status", StatusRequest {});
        let asked: StatusResponse = asked
            .await
            .map_err(|status| Unwell::silent(status.message()))?;
        let status = asked.status;
        let conditions = status.map(|status| status.conditions).unwrap_or_default();
        let ready = conditions
            .into_iter()
            .find(|condition| condition.r#type == "RuntimeReady");
        match ready {
            Some(condition) if condition.status => Ok(()),
            Some(condition) => {
                let why = format!("{}: {}", condition.reason, condition.message);
                Err(Unwell::says(why))
            }
            None => Err(Unwell::says("it does not say whether it is ready")),
        }
    }

    /// The containers that run, by ID.
    pub(super) async fn running(&self) -> Result<Vec<String>, Status> {
        let request = ListContainersRequest {
            filter: Some(ContainerFilter {
                state: Some(ContainerStateValue {
                    state: ContainerState::Running.into(),
                }),
            }),
        };
        let answer: ListContainersResponse = self.runtime("ListContainers", request).await?;
        Ok(answer.containers.into_iter().map(|c| c.id).collect())
    }

    /// The pods that are not stopped, by the ID of their sandbox.
    pub(super) async fn ready_pods(&self) -> Result<Vec<String>, Status> {
        let request = ListPodSandboxRequest {
            filter: Some(PodSandboxFilter {
                state: Some(PodSandboxStateValue {
                    state: PodSandboxState::Ready.into(),
                }),
            }),
        };
        let answer: ListPodSandboxResponse = self.runtime("ListPodSandbox", request).await?;
        Ok(answer.items.into_iter().map(|pod| pod.id).collect())
    }

    /// Asks a container to end and kills it if it has not after `grace`. The
    /// caller bounds the call.
    pub(super) async fn stop_container(&self, id: String, grace: Duration) -> Result<(), Status> {
        let request = StopContainerRequest {
            container_id: id,
            timeout: i64::try_from(grace.as_secs()).unwrap_or(i64::MAX),
        };
        let stopped = self.unbounded::<_, StopContainerResponse>("StopContainer", request);
        stopped.await.map(drop)
    }

    /// Kills what is left of a pod and takes its network away. The caller
    /// bounds the call.
    pub(super) async fn stop_pod(&self, id: String) -> Result<(), Status> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id };
        let stopped = self.unbounded::<_, StopPodSandboxResponse>("StopPodSandbox", request);
        stopped.await.map(drop)
    }

    /// Asks the runtime by one of its methods.
    async fn runtime<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: Q,
    ) -> Result<A, Status> {
        within(CALL_BOUND, self.unbounded(method, question)).await
    }

    /// The same; the caller bounds the call.
    async fn unbounded<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: Q,
    ) -> Result<A, Status> {
        let path = format!("{RUNTIME}/{method}");
        self.ask(path, tonic::Request::new(question)).await
    }

    /// Asks by the method at this path.
    pub(super) async fn ask<Q: Message, A: Message + Default>(
        &self,
        path: String,
        question: tonic::Request<Q>,
    ) -> Result<A, Status> {
        let question = question.map(|question| Bytes::from(question.encode_to_vec()));
        let answer = self.exchange(path, question).await?;
        A::decode(answer).map_err(|error| Status::internal(error.to_string()))
    }

    /// Asks by the method at this path, which answers in parts.
    pub(super) async fn list<Q: Message, A: Message + Default>(
        &self,
        path: String,
        question: tonic::Request<Q>,
    ) -> Result<Vec<A>, Status> {
        let question = question.map(|question| Bytes::from(question.encode_to_vec()));
        let mut grpc = Grpc::new(self.channel());
        let path = path_of(path)?;
        is_ready(&mut grpc).await?;
        let mut answers = grpc
            .server_streaming(question, path, Raw)
            .await?
            .into_inner();
        let mut parts = Vec::new();
        while let Some(part) = answers.message().await? {
            let part = A::decode(part).map_err(|error| Status::internal(error.to_string()))?;
            parts.push(part);
        }
        Ok(parts)
    }

    /// Bytes for bytes. What gRPC takes to do that is thus in the program once,
    /// and not for each kind of message: a fiftieth of it.
    fn exchange(
        &self,
        path: String,
        question: tonic::Request<Bytes>,
    ) -> BoxFuture<'static, Result<Bytes, Status>> {
        let mut grpc = Grpc::new(self.channel());
        Box::pin(async move {
            let path = path_of(path)?;
            is_ready(&mut grpc).await?;
            Ok(grpc.unary(question, path, Raw).await?.into_inner())
        })
    }
}

fn path_of(path: String) -> Result<PathAndQuery, Status> {
    PathAndQuery::try_from(path).map_err(|error| Status::internal(error.to_string()))
}

async fn is_ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::unavailable(hearth_api::chain(&error)))
}

/// Messages as the bytes that they are.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// A request of containerd's own services: these, unlike the runtime's, want
/// to be told the namespace.
pub(super) fn request<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let metadata = request.metadata_mut();
    metadata.insert(
        "containerd-namespace",
        MetadataValue::from_static(NAMESPACE),
    );
    request
}

/// The same for what is made under the lease for imports.
pub(super) fn leased<T>(message: T) -> tonic::Request<T> {
    let mut request = request(message);
    let metadata = request.metadata_mut();
    metadata.insert("containerd-lease", MetadataValue::from_static(LEASE));
    request
}

/// The answer's message, or an error when it takes too long.
pub(super) async fn within<T>(
    bound: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(bound, call).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::deadline_exceeded(format!(
            "no answer within {bound:?}"
        ))),
    }
}
