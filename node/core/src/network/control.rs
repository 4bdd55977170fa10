//! Answers the calls of operators about the network, and says which configuration is used.
//!
//! [`trial`](super::trial) decides; this runnable has its clock and its disk. It is the only writer of the configuration,
//! which the network worker follows. When it restarts, a trial is over: what was saved is used.

use std::sync::Arc;

use hearth_api::chain;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_host::network_control::{
    Call, Calls, ControlError, DeviceReport, NetworkReport, Trial, TrialId,
};
use hearth_host::network_setting::{NetworkSetting, NetworkSettingStore};
use hearth_parameters::{Mac, Network};
use hearth_sys::netlink::{Link, LinkKind, Netlink, NetlinkError};
use tokio::time::{Instant, sleep_until};

use super::trial::{Configurations, ToSave};

/// The inputs and outputs of this runnable.
pub(crate) struct Control {
    /// The network configuration of the parameters, or the copy of it that was made at enrolment.
    pub parameters: Network,
    /// Where that of an operator is kept.
    pub store: NetworkSettingStore,
    /// The calls.
    pub calls: Calls,
    /// Written: what is to be used.
    pub network_configuration: Writer<Network>,
    /// Read: what the network worker follows.
    pub network_followed: Value<Network>,
    /// Read: the address at which other nodes reach this one.
    pub address: Value<std::net::IpAddr>,
    /// Read: what the interfaces lack.
    pub network_problems: Value<Vec<String>>,
}

/// Answers calls until it is cancelled.
pub(crate) async fn run(ctx: Context, control: Arc<Control>) -> Outcome {
    let mut calls = control.calls.take().await;
    let mut configurations = Configurations::new(control.parameters.clone(), control.saved());
    control.publish(&configurations);
    ctx.healthy();
    loop {
        let until = configurations.until();
        tokio::select! {
            // Every caller is a clone of one that lives as long as the node.
            Some(call) = calls.recv() => control.answer(&mut configurations, call).await,
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                if configurations.expire(Instant::now()) {
                    tracing::warn!("the network configuration that was tried has not been confirmed: the former one is used again");
                    control.publish(&configurations);
                }
            }
            () = ctx.cancelled() => return Ok(()),
        }
    }
}

impl Control {
    /// What an operator has set, if it is used.
    fn saved(&self) -> Option<NetworkSetting> {
        // The ESP is slow, and may not respond at all.
        match tokio::task::block_in_place(|| self.store.load()) {
            Ok(Some(setting)) if !setting.applies_to(&self.parameters) => {
                tracing::warn!(
                    "network_config of the parameters has changed since an operator has set another network \
                     configuration: that of the parameters is used"
                );
                None
            }
            Ok(saved) => saved,
            Err(error) => {
                tracing::warn!(
                    "{}: the network configuration of the parameters is used",
                    chain(&error)
                );
                None
            }
        }
    }

    fn publish(&self, configurations: &Configurations) {
        super::set_if_changed(&self.network_configuration, configurations.in_use().clone());
    }

    async fn answer(&self, configurations: &mut Configurations, call: Call) {
        // A caller that is gone has lost its answer.
        match call {
            Call::Report(answer) => drop(answer.send(self.report(configurations).await)),
            Call::Try(trial, answer) => {
                // Answered first: the connection may not survive it.
                drop(answer.send(self.begin(configurations, trial)));
                self.publish(configurations);
            }
            Call::Check(id, answer) => drop(answer.send(self.check(configurations, id))),
            Call::Confirm(id, answer) => drop(answer.send(self.confirm(configurations, id))),
        }
    }

    fn begin(&self, configurations: &mut Configurations, trial: Trial) -> Result<(), ControlError> {
        let timeout = trial.timeout.as_secs();
        configurations.begin(trial, Instant::now())?;
        tracing::info!(
            "trying another network configuration, for {timeout} s unless it is confirmed"
        );
        Ok(())
    }

    /// A call that has reached the node by the network before says nothing about the one that is tried.
    fn check(&self, configurations: &Configurations, id: TrialId) -> Result<(), ControlError> {
        let is_going = configurations.to_save(id)?.is_some();
        if is_going && self.network_followed.get().as_ref() != Some(configurations.in_use()) {
            return Err(ControlError::Changing);
        }
        Ok(())
    }

    fn confirm(
        &self,
        configurations: &mut Configurations,
        id: TrialId,
    ) -> Result<(), ControlError> {
        if let Some(ToSave(setting)) = configurations.to_save(id)? {
            tokio::task::block_in_place(|| self.store.save(setting.as_ref()))?;
            configurations.confirmed(ToSave(setting));
            tracing::info!("the network configuration that was tried is confirmed and saved");
        }
        Ok(())
    }

    async fn report(&self, configurations: &Configurations) -> Result<NetworkReport, ControlError> {
        Ok(NetworkReport {
            network: configurations.in_use().clone(),
            set_by_operator: configurations.is_operators(),
            trial: configurations.trial(Instant::now()),
            devices: devices().await?,
            problems: self.network_problems.get().unwrap_or_default(),
            address: self.address.get(),
        })
    }
}

async fn devices() -> Result<Vec<DeviceReport>, NetlinkError> {
    let netlink = Netlink::open()?;
    let links = netlink.list_links().await?;
    // The kernel has a bond from the start, without devices, which nobody uses.
    let has_devices = |bond: &Link| links.iter().any(|link| link.controller == Some(bond.index));
    let is_used = |link: &&Link| link.kind != LinkKind::Bond || has_devices(link);
    let mut devices = Vec::new();
    for link in links.iter().filter(|link| link.is_uplink()).filter(is_used) {
        let bond = |other: &&Link| Some(other.index) == link.controller;
        devices.push(DeviceReport {
            name: link.name.clone(),
            mac: link.permanent_mac.or(link.mac).map(Mac),
            carrier: link.carrier,
            mtu: link.mtu,
            addresses: netlink.addresses(link.index).await?,
            bond: links.iter().find(bond).map(|bond| bond.name.clone()),
        });
    }
    Ok(devices)
}
