//! The debug service of test images: a look inside a node, and ways to hurt
//! it.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use hearth_api::{
    client::within,
    v1::{
        GetStateRequest, GetStateResponse, LogsRequest, ProvokeRequest, RunnableState,
        node_debug_client::NodeDebugClient, provoke_request::Kind,
    },
};
use tonic::transport::{Channel, Endpoint};

use crate::{Outcome, bounds};

/// Between two looks. There is nothing to subscribe to: what is looked at is
/// the process table and the supervisor, not an event.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A connection to the debug service.
#[derive(Clone, Debug)]
pub struct Debug(NodeDebugClient<Channel>);

impl Debug {
    /// Connects to the service at this address.
    ///
    /// # Errors
    /// If nobody answers.
    pub async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?
            .connect_timeout(bounds::CALL)
            .connect()
            .await
            .context("connect to the debug service")?;
        Ok(Self(NodeDebugClient::new(channel)))
    }

    /// What is going on.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn state(&self) -> anyhow::Result<GetStateResponse> {
        let mut client = self.0.clone();
        let call = client.get_state(GetStateRequest {});
        let state = within(bounds::CALL, call).await.context("GetState")?;
        Ok(state.into_inner())
    }

    /// Looks until what is seen is as wanted.
    ///
    /// # Errors
    /// If it does not become so; the error shows the last look.
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
            Err(_) => bail!("{wanted}: not within {:?}, but {last:#?}", bounds::SOON),
        }
    }

    /// The log of the runnable of this dotted name, and of all below it.
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

    /// Hurts the node.
    ///
    /// # Errors
    /// If it answers that it did not.
    pub async fn provoke(&self, kind: Kind) -> Outcome {
        let call = self.ask(kind).await;
        call.map(drop).with_context(|| format!("provoke {kind:?}"))
    }

    /// Hurts it in a way that may cut off the answer.
    pub async fn provoke_end(&self, kind: Kind) {
        // The console tells what came of it.
        let _ = self.ask(kind).await;
    }

    async fn ask(&self, kind: Kind) -> Result<(), tonic::Status> {
        let mut client = self.0.clone();
        let request = ProvokeRequest { kind: kind.into() };
        within(bounds::CALL, client.provoke(request)).await?;
        Ok(())
    }
}

/// The runnable of this dotted name.
pub fn runnable<'a>(state: &'a GetStateResponse, name: &str) -> Option<&'a RunnableState> {
    state
        .runnables
        .iter()
        .find(|runnable| runnable.name == name)
}
