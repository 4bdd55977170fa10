//! What a machine shows on its screen.

use std::path::Path;

use serde_json::json;

use super::Vm;
use crate::qmp::QmpError;

impl Vm {
    /// Saves what the screen shows, as a PPM picture; QEMU writes the file.
    ///
    /// # Errors
    /// If the command fails, as for a machine without a graphics card.
    pub async fn photograph(&self, path: &Path) -> Result<(), QmpError> {
        let file = json!({ "filename": path });
        self.qmp().execute("screendump", file).await.map(drop)
    }
}
