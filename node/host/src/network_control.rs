//! Calls by which an operator sees and changes the network of a running node: from node management, which has the
//! operator, to the part of the core that has the network.
//!
//! A wrong network configuration cannot be corrected over the network that it has broken. So a new one is only *tried*:
//! the node uses it for a while, and goes back to the former one unless a *confirmation* arrives, which shows that
//! somebody still reaches the node. Only what was confirmed is saved, so that a reboot ends a trial as well.
//!
//! The operator's tool chooses the ID of the trial. When the network changes, answers are lost: with the same ID both calls
//! can be repeated.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_parameters::Mac;
use hearth_sys::cidr::Cidr;
use tokio::sync::{Mutex, MutexGuard, mpsc, oneshot};

use crate::network_setting::NetworkSettingError;

/// A network configuration, as in the parameters.
pub use hearth_parameters::Network;

/// The ID of a trial: 16 random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialId(pub [u8; 16]);

/// A network configuration that is to be tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Names it.
    pub id: TrialId,
    /// What to use; `None` is that of the machine's parameters.
    pub network: Option<Network>,
    /// How long to wait for the confirmation.
    pub timeout: Duration,
}

/// The network of a node as it is.
#[derive(Clone, Debug)]
pub struct NetworkReport {
    /// The configuration that is used.
    pub network: Network,
    /// It was set by an operator, as opposed to the parameters.
    pub set_by_operator: bool,
    /// The trial that goes on, and how long it still does.
    pub trial: Option<(TrialId, Duration)>,
    /// Ethernet devices, bonds and VLANs.
    pub devices: Vec<DeviceReport>,
    /// What the interfaces lack.
    pub problems: Vec<String>,
    /// The address at which other nodes reach this one.
    pub address: Option<IpAddr>,
}

/// A device as it is.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// The kernel's name.
    pub name: String,
    /// Its own hardware address.
    pub mac: Option<Mac>,
    /// It is up and has a carrier.
    pub carrier: bool,
    /// In bytes.
    pub mtu: u32,
    /// Its addresses.
    pub addresses: Vec<Cidr>,
    /// The name of the bond to which it belongs.
    pub bond: Option<String>,
}

/// Why a call is refused.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another trial goes on.
    #[error(
        "another network configuration is being tried: confirm it, or wait {} s until the node has gone back",
        left.as_secs()
    )]
    Busy {
        /// For how long.
        left: Duration,
    },
    /// There is no trial with this ID.
    #[error(
        "no network configuration with this trial ID is being tried: the node has gone back to the former one, or has \
         rebooted"
    )]
    NoTrial,
    /// The network does not follow the configuration yet.
    #[error("the node is still changing its network: try again")]
    Changing,
    /// The confirmed configuration cannot be saved. The trial goes on.
    #[error(transparent)]
    Save(#[from] NetworkSettingError),
    /// The kernel does not tell about the devices.
    #[error("cannot read the network devices")]
    Devices(#[from] hearth_sys::netlink::NetlinkError),
    /// The part of the node that has the network restarts.
    #[error("the node is restarting its network service: try again")]
    Restarting,
}

/// What answers a call.
pub type Answer<T> = oneshot::Sender<Result<T, ControlError>>;

/// A call, with what answers it.
#[derive(Debug)]
pub enum Call {
    /// Tells about the network.
    Report(Answer<NetworkReport>),
    /// Begins a trial; one with the same ID is not begun again.
    Try(Trial, Answer<()>),
    /// Tells whether a trial goes on and the network follows its configuration, or it was just confirmed.
    Check(TrialId, Answer<()>),
    /// Ends a trial and keeps its configuration; that of a trial which was just confirmed is kept already.
    Confirm(TrialId, Answer<()>),
}

/// The calling side. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NetworkControl(mpsc::Sender<Call>);

/// The answering side: its user may restart and go on with it.
#[derive(Clone, Debug)]
pub struct Calls(Arc<Mutex<mpsc::Receiver<Call>>>);

/// Both sides.
pub fn new() -> (NetworkControl, Calls) {
    let (caller, calls) = mpsc::channel(4);
    (NetworkControl(caller), Calls(Arc::new(Mutex::new(calls))))
}

impl Calls {
    /// Waits until nobody else answers calls.
    pub async fn take(&self) -> MutexGuard<'_, mpsc::Receiver<Call>> {
        self.0.lock().await
    }
}

impl NetworkControl {
    /// Tells about the network.
    pub async fn report(&self) -> Result<NetworkReport, ControlError> {
        self.call(Call::Report).await
    }

    /// Begins a trial. The network has not changed yet when this returns.
    pub async fn begin(&self, trial: Trial) -> Result<(), ControlError> {
        self.call(|answer| Call::Try(trial, answer)).await
    }

    /// Tells whether a trial can be confirmed.
    pub async fn check(&self, id: TrialId) -> Result<(), ControlError> {
        self.call(|answer| Call::Check(id, answer)).await
    }

    /// Ends a trial and keeps its configuration, durably.
    pub async fn confirm(&self, id: TrialId) -> Result<(), ControlError> {
        self.call(|answer| Call::Confirm(id, answer)).await
    }

    async fn call<T>(&self, call: impl FnOnce(Answer<T>) -> Call) -> Result<T, ControlError> {
        let (answer, answered) = oneshot::channel();
        if self.0.send(call(answer)).await.is_err() {
            return Err(ControlError::Restarting);
        }
        answered.await.unwrap_or(Err(ControlError::Restarting))
    }
}
