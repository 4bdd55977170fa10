//! The way to containerd: one connection over its unix socket, the namespace
//! in which Kubernetes keeps its things, and the few questions that are asked
//! of the container runtime.

use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};

use super::wire::cri::runtime_service_client::RuntimeServiceClient;
use super::wire::cri::{
    ContainerFilter, ContainerState, ContainerStateValue, ListContainersRequest,
    ListPodSandboxRequest, PodSandboxFilter, PodSandboxState, PodSandboxStateValue, StatusRequest,
    StopContainerRequest, StopPodSandboxRequest,
};

/// Where the kubelet looks for containers and images.
const NAMESPACE: &str = "k8s.io";
/// What is content for an image in the making, in containerd's books.
pub const LEASE: &str = "hearth-import";
/// For calls that only look. Emulated machines are slow.
const CALL_BOUND: Duration = Duration::from_secs(20);

/// A connection that is made when it is first used, and again whenever it was
/// lost. Cheap to clone.
#[derive(Clone)]
pub struct Connection {
    channel: Channel,
}

impl Connection {
    /// To the containerd that serves, or will, on a socket.
    pub fn to(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move {
                let stream = UnixStream::connect(&socket).await?;
                Ok::<_, io::Error>(TokioIo::new(stream))
            }
        });
        let endpoint = Endpoint::from_static("http://containerd.invalid");
        Self {
            channel: endpoint.connect_with_connector_lazy(connector),
        }
    }

    /// For containerd's own services.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Whether the runtime can run containers; `Err` says why not. Whether
    /// pods have a network is told by the kubelet, on the node's object.
    pub async fn works(&self) -> Result<(), String> {
        let mut client = self.runtime();
        let asked = within(CALL_BOUND, client.status(StatusRequest {})).await;
        let status = asked.map_err(|status| status.message().to_owned())?.status;
        let conditions = status.map(|status| status.conditions).unwrap_or_default();
        let ready = conditions
            .into_iter()
            .find(|condition| condition.r#type == "RuntimeReady");
        match ready {
            Some(condition) if condition.status => Ok(()),
            Some(condition) => Err(format!("{}: {}", condition.reason, condition.message)),
            None => Err("it does not say whether it is ready".to_owned()),
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
        let mut client = self.runtime();
        let answer = within(CALL_BOUND, client.list_containers(request)).await?;
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
        let mut client = self.runtime();
        let answer = within(CALL_BOUND, client.list_pod_sandbox(request)).await?;
        Ok(answer.items.into_iter().map(|pod| pod.id).collect())
    }

    /// Asks a container to end and kills it if it has not after `grace`. The
    /// caller bounds the call.
    pub(super) async fn stop_container(&self, id: String, grace: Duration) -> Result<(), Status> {
        let request = StopContainerRequest {
            container_id: id,
            timeout: i64::try_from(grace.as_secs()).unwrap_or(i64::MAX),
        };
        self.runtime().stop_container(request).await.map(drop)
    }

    /// Kills what is left of a pod and takes its network away. The caller
    /// bounds the call.
    pub(super) async fn stop_pod(&self, id: String) -> Result<(), Status> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id };
        self.runtime().stop_pod_sandbox(request).await.map(drop)
    }

    fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel())
    }
}

/// A request of containerd's own services: these, unlike the runtime's, want
/// to be told the namespace, and under which lease they work.
pub fn request<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let metadata = request.metadata_mut();
    metadata.insert(
        "containerd-namespace",
        MetadataValue::from_static(NAMESPACE),
    );
    metadata.insert("containerd-lease", MetadataValue::from_static(LEASE));
    request
}

/// The answer's message, or an error when it takes too long.
pub async fn within<T>(
    bound: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(bound, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "no answer within {bound:?}"
        ))),
    }
}
