//! The disk that cuts leave, one after the other, for a machine.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hearth_qemu::disk::{Disk, Format, make_overlay};
use hearth_write_log::{Cut, Log, Replay};

use crate::node::copy;

/// A disk and its log.
pub(super) struct Left {
    path: PathBuf,
    replay: Replay<File, File>,
}

impl Left {
    /// A copy of the disk as it was before the log, at this path.
    pub(super) async fn of(base: &Path, log: &Path, path: PathBuf) -> anyhow::Result<Self> {
        copy(base, &path).await?;
        let disk = File::options().read(true).write(true).open(&path);
        let disk = disk.with_context(|| format!("cannot open {}", path.display()))?;
        let log = File::open(log).with_context(|| format!("cannot open {}", log.display()))?;
        Ok(Self {
            path,
            replay: Replay::new(log, disk),
        })
    }

    /// What this cut leaves, as an overlay that replaces the previous one. Cuts come in their order.
    pub(super) async fn by(&mut self, log: &Log, cut: Cut) -> anyhow::Result<Disk> {
        self.replay.cut(log, cut)?;
        self.overlay().await
    }

    /// The same once more, without what a machine has written since.
    pub(super) async fn overlay(&self) -> anyhow::Result<Disk> {
        let overlay = self.path.with_extension("qcow2");
        make_overlay(&self.path, &overlay, None).await?;
        Ok(Disk::new(overlay, Format::Qcow2))
    }
}
