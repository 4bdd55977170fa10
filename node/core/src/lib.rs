//! The Hearth node: what PID 1 does, and how the parts of a node are put together. `docs/architecture.md` says how they
//! fit.

pub mod boot;
pub mod compose;
mod controlplane;
#[cfg(feature = "debug-service")]
pub mod debug;
mod network;
pub mod pid1;
#[cfg(test)]
mod tests;
