//! How a machine ended.
//!
//! QEMU's exit status is not sufficient: it is 0 after a guest's orderly shutdown, after its reset with `-no-reboot`,
//! and after a kernel's panic that resets. The reason is in the last SHUTDOWN event on QMP.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use crate::qmp::Event;

/// The end of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The cause.
    pub cause: Cause,
    /// QEMU's exit status.
    pub status: ExitStatus,
    /// When it was noticed, since QEMU's start.
    pub at: Duration,
}

/// Why a machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The guest powered it off.
    GuestShutdown,
    /// The guest reset it, and QEMU is configured to end then. A Linux that panics does the same: only its console
    /// shows the difference.
    GuestReset,
    /// The guest reported a panic.
    GuestPanic,
    /// The watchdog expired, and QEMU is configured to end then.
    Watchdog,
    /// QEMU got the command `quit`.
    Quit,
    /// Killed by this library: a power cut.
    PowerCut,
    /// Another process sent QEMU this signal.
    Signal(i32),
    /// QEMU failed with this status.
    Failed(i32),
    /// Another reason, as QEMU names it; empty if there is none.
    Other(String),
}

impl Cause {
    /// From QEMU's status, whether this library killed it, and its events.
    pub(crate) fn of(status: ExitStatus, cut: bool, events: &[Event]) -> Self {
        match status.signal() {
            Some(_) if cut => return Self::PowerCut,
            Some(signal) => return Self::Signal(signal),
            None => {}
        }
        let reason =
            last(events, "SHUTDOWN").map(|event| event.data["reason"].as_str().unwrap_or_default());
        if let Some(code) = status.code().filter(|code| *code != 0)
            && reason != Some("guest-panic")
        {
            return Self::Failed(code);
        }
        match reason.unwrap_or_default() {
            "guest-reset" | "guest-shutdown" if bitten(events) => Self::Watchdog,
            "guest-shutdown" => Self::GuestShutdown,
            "guest-reset" => Self::GuestReset,
            "guest-panic" => Self::GuestPanic,
            "host-qmp-quit" => Self::Quit,
            other => Self::Other(other.to_owned()),
        }
    }
}

fn last<'a>(events: &'a [Event], name: &str) -> Option<&'a Event> {
    events.iter().rev().find(|event| event.name == name)
}

/// Whether the watchdog caused the end: QEMU reports the guest's own reset and the watchdog's by the same reason. The
/// watchdog may have reset the guest before, and it may have ended later for another reason.
fn bitten(events: &[Event]) -> bool {
    let before = events
        .iter()
        .rev()
        .skip_while(|event| event.name != "SHUTDOWN")
        .nth(1);
    before.is_some_and(|event| event.name == "WATCHDOG")
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GuestShutdown => f.write_str("the guest powered off the machine"),
            Self::GuestReset => f.write_str("the guest reset the machine"),
            Self::GuestPanic => f.write_str("the guest panicked"),
            Self::Watchdog => f.write_str("the watchdog expired"),
            Self::Quit => f.write_str("QEMU was stopped by a quit command"),
            Self::PowerCut => f.write_str("power cut"),
            Self::Signal(signal) => write!(f, "QEMU was terminated by signal {signal}"),
            Self::Failed(code) => write!(f, "QEMU failed with exit status {code}"),
            Self::Other(reason) if reason.is_empty() => f.write_str("QEMU ended without a reason"),
            Self::Other(reason) => write!(f, "QEMU ended: {reason}"),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({:.1} s after its start)",
            self.cause,
            self.at.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn event(name: &str, reason: &str) -> Event {
        Event {
            name: name.to_owned(),
            data: match reason {
                "" => Value::Null,
                reason => json!({ "guest": true, "reason": reason }),
            },
            at: Duration::ZERO,
        }
    }

    fn code(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    #[test]
    fn the_last_reason_counts() {
        let events = [
            event("RESET", "guest-reset"),
            event("SHUTDOWN", "host-qmp-quit"),
            event("SHUTDOWN", "guest-shutdown"),
            event("STOP", ""),
        ];
        assert_eq!(Cause::of(code(0), false, &events), Cause::GuestShutdown);
        assert_eq!(Cause::of(code(0), false, &events[..2]), Cause::Quit);
        assert_eq!(Cause::of(code(0), false, &[]), Cause::Other(String::new()));
    }

    #[test]
    fn a_reset_by_the_watchdog_is_told_from_the_guests_own() {
        let events = [event("WATCHDOG", ""), event("SHUTDOWN", "guest-reset")];
        assert_eq!(Cause::of(code(0), false, &events), Cause::Watchdog);
        assert_eq!(Cause::of(code(0), false, &events[1..]), Cause::GuestReset);
        let events = [
            event("WATCHDOG", ""),
            event("RESET", "guest-reset"),
            event("SHUTDOWN", "guest-reset"),
        ];
        assert_eq!(Cause::of(code(0), false, &events), Cause::GuestReset);
    }

    #[test]
    fn signals_and_failures_come_before_reasons() {
        let killed = ExitStatus::from_raw(9);
        assert_eq!(Cause::of(killed, true, &[]), Cause::PowerCut);
        assert_eq!(Cause::of(killed, false, &[]), Cause::Signal(9));
        assert_eq!(Cause::of(code(1), true, &[]), Cause::Failed(1));
        // It ended by itself before our signal arrived.
        let events = [event("SHUTDOWN", "guest-shutdown")];
        assert_eq!(Cause::of(code(0), true, &events), Cause::GuestShutdown);
    }
}
