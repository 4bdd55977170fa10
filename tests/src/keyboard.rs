//! Somebody at the console of a machine.

use anyhow::Context;
use hearth_qemu::keyboard;
use hearth_qemu::vm::Vm;

use crate::node::Running;
use crate::{Outcome, bounds};

/// A connection to the console. Drop it before waits for lines of the log, in which a character may be repeated
/// meanwhile.
pub struct Keyboard(keyboard::Keyboard);

impl Running {
    /// Connects to its console, for typing.
    ///
    /// # Errors
    /// If that fails.
    pub async fn keyboard(&self) -> anyhow::Result<Keyboard> {
        Ok(Keyboard(Vm::keyboard(self).await?))
    }
}

impl Keyboard {
    /// Types this line, and Enter.
    ///
    /// # Errors
    /// If the machine is gone.
    pub async fn enter(&mut self, line: &str) -> Outcome {
        Ok(self.0.enter(line).await?)
    }

    /// Waits for the next line that contains this text.
    ///
    /// # Errors
    /// If it does not appear.
    pub async fn shows(&mut self, text: &str) -> anyhow::Result<String> {
        let shown = tokio::time::timeout(bounds::SOON, self.0.shows(text)).await;
        let shown = shown.with_context(|| format!("the console does not show {text:?}"))?;
        Ok(shown?)
    }
}
