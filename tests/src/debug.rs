//! Client of the debug service of test images, which shows the state of a node and injects faults.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use hearth_api::client::within;
use hearth_api::v1::node_debug_client::NodeDebugClient;
use hearth_api::v1::provoke_request::Kind;
use hearth_api::v1::{
    GetStateRequest, GetStateResponse, LogsRequest, ProvokeRequest, RunnableState,
};
use tonic::transport::{Channel, Endpoint};

use crate::{Outcome, bounds};

/// Between two queries. There is no subscription: the process table and the supervisor have no events.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A connection to the debug service.
#[derive(Clone, Debug)]
pub struct Debug(NodeDebugClient<Channel>);

impl Debug {
    /// Connects to the service at this address.
    ///
    /// # Errors
    /// If the connection fails.
    pub async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?
            .connect_timeout(bounds::CALL)
            .connect()
            .await
            .context("cannot connect to the debug service")?;
        Ok(Self(NodeDebugClient::new(channel)))
    }

    /// The current state.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn state(&self) -> anyhow::Result<GetStateResponse> {
        let mut client = self.0.clone();
        let call = client.get_state(GetStateRequest {});
        let state = within(bounds::CALL, call).await.context("GetState")?;
        Ok(state.into_inner())
    }

    /// Queries the state until it is as wanted.
    ///
    /// # Errors
    /// If that times out; the error shows the last state.
    pub async fn until(
        &self,
        wanted: &str,
        mut predicate: impl FnMut(&GetStateResponse) -> bool,
    ) -> anyhow::Result<GetStateResponse> {
        let mut last = None;
        let look = async {
            loop {
                let state = self.state().await?;
                if predicate(&state) {
                    return anyhow::Ok(state);
                }
                last = Some(state);
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        match tokio::time::timeout(bounds::SOON, look).await {
            Ok(found) => found,
            Err(_) => bail!(
                "{wanted}: timed out after {:?}; last state: {last:#?}",
                bounds::SOON
            ),
        }
    }

    /// The log of the runnable with this dotted name, and of all below it.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn log(&self, dn: &str) -> anyhow::Result<Vec<String>> {
        let request = LogsRequest {
            dn: dn.to_owned(),
            subtree: true,
            follow: false,
            backlog: 0,
        };
        let mut client = self.0.clone();
        let call = async {
            let mut stream = client.logs(request).await?.into_inner();
            let mut lines = Vec::new();
            while let Some(response) = stream.message().await? {
                lines.extend(response.lines);
            }
            Ok(lines)
        };
        within(bounds::CALL, call).await.context("Logs")
    }

    /// Injects a fault.
    ///
    /// # Errors
    /// If the service reports a failure.
    pub async fn inject_fault(&self, kind: Kind) -> Outcome {
        let call = self.ask(kind).await;
        call.map(drop)
            .with_context(|| format!("cannot inject {kind:?}"))
    }

    /// Injects a fault that may interrupt the answer.
    pub async fn provoke_end(&self, kind: Kind) {
        // The console shows the effect.
        let _ = self.ask(kind).await;
    }

    async fn ask(&self, kind: Kind) -> Result<(), tonic::Status> {
        let mut client = self.0.clone();
        let request = ProvokeRequest { kind: kind.into() };
        within(bounds::CALL, client.provoke(request)).await?;
        Ok(())
    }
}

/// The runnable with this dotted name.
pub fn runnable<'a>(state: &'a GetStateResponse, name: &str) -> Option<&'a RunnableState> {
    state
        .runnables
        .iter()
        .find(|runnable| runnable.name == name)
}
