//! The calls about the node's network: their messages, and whether the cluster still hears the node.
//!
//! A configuration that is tried is confirmed by two: by the operator, whose call has reached the node, and by the cluster, which
//! has acknowledged a heartbeat that was sent after the call. An operator in the network of the node may reach it when
//! the other nodes do not.

use std::time::Duration;

use hearth_api::v1::get_network_response::Device;
use hearth_api::v1::{ConfirmNetworkRequest, GetNetworkResponse, TryNetworkRequest};
use hearth_base::event::Value;
use hearth_host::network_control::{
    ControlError, DeviceReport, Network as Configuration, NetworkControl, NetworkReport, Trial,
    TrialId,
};
use tokio::time::{Instant, timeout};
use tonic::Status;

/// How long a confirmation waits for a heartbeat to be acknowledged. Clients repeat the call.
const HEARD_WITHIN: Duration = Duration::from_secs(5);
/// The bounds of a trial, in seconds: long enough for a switch to learn, and for a person to wait.
const TIMEOUTS: std::ops::RangeInclusive<u32> = 10..=600;

/// Answers the calls.
pub(super) struct Network {
    pub control: NetworkControl,
    /// When the last acknowledged heartbeat was sent.
    pub acknowledged: Value<Instant>,
}

impl Network {
    pub(super) async fn get(&self) -> Result<GetNetworkResponse, Status> {
        let report = self.control.report().await;
        report.map(response).map_err(status)
    }

    pub(super) async fn begin(&self, request: TryNetworkRequest) -> Result<(), Status> {
        let trial = trial(request)?;
        self.control.begin(trial).await.map_err(status)
    }

    pub(super) async fn confirm(&self, request: ConfirmNetworkRequest) -> Result<(), Status> {
        let id = trial_id(&request.trial_id)?;
        self.control.check(id).await.map_err(status)?;
        if !request.without_cluster {
            self.heard().await?;
        }
        self.control.confirm(id).await.map_err(status)
    }

    async fn heard(&self) -> Result<(), Status> {
        let called = Instant::now();
        let mut acknowledged = self.acknowledged.watch();
        let heard = acknowledged.wait_for(|sent| *sent > called);
        match timeout(HEARD_WITHIN, heard).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Status::unavailable(format!(
                "no curator has acknowledged a heartbeat of this node within {} s: the cluster may not reach it by the new \
                 network configuration, or has no quorum",
                HEARD_WITHIN.as_secs()
            ))),
        }
    }
}

fn trial(request: TryNetworkRequest) -> Result<Trial, Status> {
    let id = trial_id(&request.trial_id)?;
    let network = request.network_config.map(Configuration::parse).transpose();
    let network = network.map_err(|problem| Status::invalid_argument(problem.to_string()))?;
    let seconds = request.timeout_seconds;
    if !TIMEOUTS.contains(&seconds) {
        return Err(Status::invalid_argument(format!(
            "timeout_seconds: expected {} to {}, got {seconds}",
            TIMEOUTS.start(),
            TIMEOUTS.end()
        )));
    }
    Ok(Trial {
        id,
        network,
        timeout: Duration::from_secs(seconds.into()),
    })
}

fn trial_id(bytes: &[u8]) -> Result<TrialId, Status> {
    bytes.try_into().map(TrialId).map_err(|_| {
        Status::invalid_argument(format!("trial_id: expected 16 bytes, got {}", bytes.len()))
    })
}

fn response(report: NetworkReport) -> GetNetworkResponse {
    let (trial_id, left) = match report.trial {
        Some((id, left)) => (id.0.to_vec(), left),
        None => (Vec::new(), Duration::ZERO),
    };
    GetNetworkResponse {
        network_config: report.network.to_message(),
        set_by_operator: report.set_by_operator,
        trial_id,
        trial_seconds_left: u32::try_from(left.as_secs()).unwrap_or(u32::MAX),
        devices: report.devices.into_iter().map(device).collect(),
        problems: report.problems,
        address: report.address.map(|it| it.to_string()).unwrap_or_default(),
    }
}

fn device(device: DeviceReport) -> Device {
    Device {
        name: device.name,
        mac: device.mac.map(|mac| mac.to_string()).unwrap_or_default(),
        carrier: device.carrier,
        mtu: device.mtu,
        addresses: device.addresses.iter().map(ToString::to_string).collect(),
        bond: device.bond.unwrap_or_default(),
    }
}

fn status(error: ControlError) -> Status {
    let text = hearth_api::chain(&error);
    match error {
        ControlError::Busy { .. } | ControlError::NoTrial => Status::failed_precondition(text),
        ControlError::Changing | ControlError::Restarting => Status::unavailable(text),
        ControlError::Save(_) | ControlError::Devices(_) => Status::internal(text),
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::NetworkConfig;
    use hearth_base::event;
    use hearth_host::network_control::{self, Call};
    use tonic::Code;

    use super::*;

    fn request() -> TryNetworkRequest {
        TryNetworkRequest {
            trial_id: vec![7; 16],
            network_config: None,
            timeout_seconds: 60,
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |change: fn(&mut TryNetworkRequest)| {
            let mut request = request();
            change(&mut request);
            trial(request).unwrap_err().message().to_owned()
        };
        assert_eq!(
            wrong(|request| request.trial_id.truncate(3)),
            "trial_id: expected 16 bytes, got 3"
        );
        assert_eq!(
            wrong(|request| request.timeout_seconds = 5),
            "timeout_seconds: expected 10 to 600, got 5"
        );
        let message = wrong(|request| {
            request.network_config = Some(NetworkConfig {
                addresses: vec!["192.0.2.1".into()],
                ..NetworkConfig::default()
            });
        });
        assert!(
            message.starts_with("network_config.addresses[0]"),
            "{message}"
        );
        assert!(trial(request()).is_ok());
    }

    /// The cluster has to hear the node after the call, unless the caller does without it.
    #[tokio::test(start_paused = true)]
    async fn a_confirmation_needs_the_cluster() {
        let (control, calls) = network_control::new();
        let (acknowledged_writer, acknowledged) = event::value();
        acknowledged_writer.set(Instant::now());
        let network = Network {
            control,
            acknowledged,
        };
        let answer = async {
            let mut calls = calls.take().await;
            while let Some(call) = calls.recv().await {
                let (Call::Check(id, answer) | Call::Confirm(id, answer)) = call else {
                    panic!("{call:?}");
                };
                assert_eq!(id, TrialId([7; 16]));
                answer.send(Ok(())).unwrap();
            }
        };
        let confirm = async {
            tokio::time::advance(Duration::from_secs(1)).await;
            let mut request = ConfirmNetworkRequest {
                trial_id: vec![7; 16],
                without_cluster: false,
            };
            let refused = network.confirm(request.clone()).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unavailable);
            let heard = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                acknowledged_writer.set(Instant::now());
            };
            let (confirmed, ()) = tokio::join!(network.confirm(request.clone()), heard);
            confirmed.unwrap();
            request.without_cluster = true;
            network.confirm(request).await.unwrap();
        };
        tokio::select! {
            () = answer => panic!("nobody calls any more"),
            () = confirm => {}
        }
    }
}
