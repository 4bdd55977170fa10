//! The client of containerd: one connection over its unix socket, the namespace that Kubernetes
//! uses, and the calls of the container runtime interface (CRI) that are needed.

use std::path::Path;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use futures::future::BoxFuture;
use hearth_api::client::within;
use hearth_api::transport::Connector;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};

use super::super::program::ProbeFailure;
use super::wire::cri::{
    ContainerFilter, ContainerState, ContainerStateValue, ListContainersRequest,
    ListContainersResponse, ListPodSandboxRequest, ListPodSandboxResponse, PodSandboxFilter,
    PodSandboxState, PodSandboxStateValue, StatusRequest, StatusResponse, StopContainerRequest,
    StopContainerResponse, StopPodSandboxRequest, StopPodSandboxResponse,
};

/// containerd's namespace of the kubelet's containers and images.
const NAMESPACE: &str = "k8s.io";
/// containerd's lease that protects the content of an import from garbage collection.
pub(super) const LEASE: &str = "hearth-import";
/// gRPC service of the container runtime.
const RUNTIME: &str = "/runtime.v1.RuntimeService";
/// Timeout of calls that only read. Emulated machines are slow.
const CALL_BOUND: Duration = Duration::from_secs(20);

/// A connection that is established when it is first used, and again when it was lost. Cheap to
/// clone.
#[derive(Clone)]
pub(crate) struct Connection {
    channel: Channel,
}

impl Connection {
    /// A connection to containerd at this socket, which does not have to serve yet.
    pub(crate) fn to(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let connector = Connector::new(move || UnixStream::connect(socket.clone()));
        Self {
            channel: connector.channel(&Endpoint::from_static("http://containerd.invalid")),
        }
    }

    /// The channel, for containerd's own services.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Whether the container runtime is ready. Whether the pod network is ready is reported by the
    /// kubelet in the Node object.
    pub(crate) async fn works(&self) -> Result<(), ProbeFailure> {
        let asked = self.runtime("Status", StatusRequest {});
        let asked: StatusResponse = asked
            .await
            .map_err(|status| ProbeFailure::silent(status.message()))?;
        let status = asked.status;
        let conditions = status.map(|status| status.conditions).unwrap_or_default();
        let ready = conditions
            .into_iter()
            .find(|condition| condition.r#type == "RuntimeReady");
        match ready {
            Some(condition) if condition.status => Ok(()),
            Some(condition) => {
                let why = format!("{}: {}", condition.reason, condition.message);
                Err(ProbeFailure::says(why))
            }
            None => Err(ProbeFailure::says("status without condition RuntimeReady")),
        }
    }

    /// IDs of the running containers.
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

    /// Sandbox IDs of the pods that are not stopped.
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

    /// Stops a container; it is killed after `grace`. The caller sets the timeout of the call.
    pub(super) async fn stop_container(&self, id: String, grace: Duration) -> Result<(), Status> {
        let request = StopContainerRequest {
            container_id: id,
            timeout: i64::try_from(grace.as_secs()).unwrap_or(i64::MAX),
        };
        let stopped = self.unbounded::<_, StopContainerResponse>("StopContainer", request);
        stopped.await.map(drop)
    }

    /// Kills what is left of a pod and removes its network. The caller sets the timeout of the
    /// call.
    pub(super) async fn stop_pod(&self, id: String) -> Result<(), Status> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id };
        let stopped = self.unbounded::<_, StopPodSandboxResponse>("StopPodSandbox", request);
        stopped.await.map(drop)
    }

    /// Calls a method of the container runtime.
    async fn runtime<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: Q,
    ) -> Result<A, Status> {
        within(CALL_BOUND, self.unbounded(method, question)).await
    }

    /// The same; the caller sets the timeout.
    async fn unbounded<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: Q,
    ) -> Result<A, Status> {
        let path = format!("{RUNTIME}/{method}");
        self.ask(path, tonic::Request::new(question)).await
    }

    /// Calls the method at this path.
    pub(super) async fn ask<Q: Message, A: Message + Default>(
        &self,
        path: String,
        question: tonic::Request<Q>,
    ) -> Result<A, Status> {
        let question = question.map(|question| Bytes::from(question.encode_to_vec()));
        let answer = self.exchange(path, question).await?;
        A::decode(answer).map_err(|error| Status::internal(error.to_string()))
    }

    /// Calls the server-streaming method at this path.
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

    /// A unary call on bytes. So the generic code of gRPC is compiled once and not for each type of
    /// message, which would be a fiftieth of the program.
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

/// A codec that passes encoded messages through.
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

/// A request to containerd's own services, which, unlike the CRI, need the namespace as metadata.
pub(super) fn request<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let metadata = request.metadata_mut();
    metadata.insert(
        "containerd-namespace",
        MetadataValue::from_static(NAMESPACE),
    );
    request
}

/// The same with the lease for imports.
pub(super) fn leased<T>(message: T) -> tonic::Request<T> {
    let mut request = request(message);
    let metadata = request.metadata_mut();
    metadata.insert("containerd-lease", MetadataValue::from_static(LEASE));
    request
}
