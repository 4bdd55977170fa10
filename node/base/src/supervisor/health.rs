//! A worker's word that it works.

use std::sync::Once;

use super::Context;

/// Tells the supervisor at the first call, as it wants to hear it once in a
/// run; a worker finds out anew over each connection.
pub struct Health<'a> {
    ctx: &'a Context,
    told: Once,
}

impl<'a> Health<'a> {
    /// Of this run.
    pub fn of(ctx: &'a Context) -> Self {
        Self {
            ctx,
            told: Once::new(),
        }
    }

    /// The worker works.
    pub fn good(&self) {
        self.told.call_once(|| self.ctx.healthy());
    }
}
