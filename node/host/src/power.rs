//! Requests to power off or reboot the machine.
//!
//! Several parts may request it: the power button, Ctrl-Alt-Del and SIGTERM (both forwarded by PID
//! 1), and an operator. All of them call [`Power`], and only `boot` acts on it. The first request
//! wins.

use std::process::ExitStatus;
use std::sync::Arc;

use hearth_base::supervisor::{Context, Outcome};
use hearth_sys::power_button::PowerButton;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// What the core's exit code requests from PID 1. Any other exit code is a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Everything is unmounted: power off the machine.
    PowerOff,
    /// Everything is unmounted: reboot the machine.
    Reboot,
}

impl PowerRequest {
    /// The core's exit code for this request.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::PowerOff => 80,
            Self::Reboot => 81,
        }
    }

    /// The request that the core's exit status stands for; `None` for a failure.
    pub fn of(status: ExitStatus) -> Option<Self> {
        let asked = |ending: &Self| status.code() == Some(i32::from(ending.exit_code()));
        [Self::PowerOff, Self::Reboot].into_iter().find(asked)
    }
}

/// The handle for requests. Cheap to clone.
#[derive(Clone)]
pub struct Power(Arc<watch::Sender<Option<PowerRequest>>>);

impl Default for Power {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Power {
    /// Requests an orderly shutdown or reboot; `who` is for the log.
    pub fn ask(&self, ending: PowerRequest, who: &str) {
        self.0.send_if_modified(|asked| {
            if asked.is_some() {
                return false;
            }
            tracing::info!(?ending, by = who, "shutting down");
            *asked = Some(ending);
            true
        });
    }

    /// Waits for the first request.
    pub async fn asked(&self) -> PowerRequest {
        let mut receiver = self.0.subscribe();
        loop {
            if let Some(ending) = *receiver.borrow_and_update() {
                return ending;
            }
            if receiver.changed().await.is_err() {
                // `self` holds the sender.
                unreachable!("the sender lives for the duration of this call");
            }
        }
    }
}

/// Handles the power button and the signals from PID 1.
pub async fn run(ctx: Context, power: Power) -> Outcome {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let button = power.clone();
    ctx.run("button", move |ctx| listen_to_button(ctx, button.clone()))?;
    ctx.healthy();
    loop {
        tokio::select! {
            _ = terminate.recv() => power.ask(PowerRequest::PowerOff, "SIGTERM"),
            _ = interrupt.recv() => power.ask(PowerRequest::Reboot, "Ctrl-Alt-Del"),
            () = ctx.cancelled() => return Ok(()),
        }
    }
}

/// A runnable of its own, because a machine without a power button is not an error.
async fn listen_to_button(ctx: Context, power: Power) -> Outcome {
    let Some(button) = PowerButton::open()? else {
        tracing::info!("no power button found");
        ctx.healthy();
        ctx.done();
        return Ok(());
    };
    ctx.healthy();
    loop {
        tokio::select! {
            pressed = button.pressed() => {
                pressed?;
                power.ask(PowerRequest::PowerOff, "the power button");
            }
            () = ctx.cancelled() => return Ok(()),
        }
    }
}
