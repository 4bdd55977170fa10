//! Signals health once per run.

use std::sync::Once;

use super::Context;

/// Signals healthy to the supervisor at the first call only: the supervisor accepts the signal once
/// per run, while a worker notices again over each new connection.
pub struct Health<'a> {
    ctx: &'a Context,
    told: Once,
}

impl<'a> Health<'a> {
    /// For this run.
    pub fn of(ctx: &'a Context) -> Self {
        Self {
            ctx,
            told: Once::new(),
        }
    }

    /// The worker is healthy.
    pub fn good(&self) {
        self.told.call_once(|| self.ctx.healthy());
    }
}
