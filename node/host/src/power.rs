//! Who wants the machine to go down, and how.
//!
//! Several parts may ask: the power button, Ctrl-Alt-Del and SIGTERM (both
//! come through PID 1), later an operator's call. All of them ask [`Power`],
//! and `boot` alone acts on it. The first request wins.

use std::process::ExitStatus;
use std::sync::Arc;

use hearth_base::supervisor::{Context, Outcome};
use hearth_sys::power_button::PowerButton;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// What the core's exit code asks of PID 1. Any other is a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Everything is unmounted: switch the machine off.
    PowerOff,
    /// Everything is unmounted: start again.
    Reboot,
}

impl Ending {
    /// The core's exit code that means this.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::PowerOff => 80,
            Self::Reboot => 81,
        }
    }

    /// What the core's exit asks for, if it was asked in order.
    pub fn of(status: ExitStatus) -> Option<Self> {
        let asked = |ending: &Self| status.code() == Some(i32::from(ending.exit_code()));
        [Self::PowerOff, Self::Reboot].into_iter().find(asked)
    }
}

/// Where to ask. Cheap to clone.
#[derive(Clone)]
pub struct Power(Arc<watch::Sender<Option<Ending>>>);

impl Default for Power {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Power {
    /// Asks for the machine to go down in order.
    pub fn ask(&self, ending: Ending, who: &str) {
        self.0.send_if_modified(|asked| {
            if asked.is_some() {
                return false;
            }
            tracing::info!(?ending, by = who, "the machine goes down");
            *asked = Some(ending);
            true
        });
    }

    /// Waits until somebody has asked.
    pub async fn asked(&self) -> Ending {
        let mut receiver = self.0.subscribe();
        loop {
            if let Some(ending) = *receiver.borrow_and_update() {
                return ending;
            }
            if receiver.changed().await.is_err() {
                // `self` holds the sender.
                unreachable!("the sender lives as long as this call");
            }
        }
    }
}

/// Listens to the power button and to PID 1's signals.
pub async fn run(ctx: Context, power: Power) -> Outcome {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let button = power.clone();
    ctx.run("button", move |ctx| listen_to_button(ctx, button.clone()))?;
    ctx.healthy();
    loop {
        tokio::select! {
            _ = terminate.recv() => power.ask(Ending::PowerOff, "SIGTERM"),
            _ = interrupt.recv() => power.ask(Ending::Reboot, "Ctrl-Alt-Del"),
            () = ctx.cancelled() => return Ok(()),
        }
    }
}

/// Apart from the signals: a machine without a power button is not broken.
async fn listen_to_button(ctx: Context, power: Power) -> Outcome {
    let Some(button) = PowerButton::open()? else {
        tracing::info!("this machine has no power button");
        ctx.healthy();
        ctx.done();
        return Ok(());
    };
    ctx.healthy();
    loop {
        tokio::select! {
            pressed = button.pressed() => {
                pressed?;
                power.ask(Ending::PowerOff, "the power button");
            }
            () = ctx.cancelled() => return Ok(()),
        }
    }
}
