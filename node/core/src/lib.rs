//! The Hearth node: PID 1, boot, and the wiring of a node's workers. `docs/architecture.md` gives
//! the overview.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod boot;
pub mod compose;
mod controlplane;
#[cfg(feature = "debug-service")]
pub mod debug;
mod network;
pub mod pid1;
mod screen;
#[cfg(test)]
mod tests;
