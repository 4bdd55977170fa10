//! A recorded boot: its log, the disk before it, its owner, and what was said.
//!
//! A folder has all of them, so that a cut can be repeated, and a sweep goes on, as long as it is there. `recording.json`
//! is written last. A recording is of one image: of the kernel, the initramfs, the command line. Another image records
//! anew, because it is its own writes that it has to survive; a single cut is tried with any image.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hearth_lab::Owner;
use hearth_lab::owner::{key_file, recovery_key_file, secret_file};
use hearth_qemu::artifacts::Image;
use hearth_write_log::{Cut, Log};
use ring::digest;
use serde::{Deserialize, Serialize};

use super::said::{Notes, Said, Statement};
use crate::TestCtx;
use crate::node::copy;

const RECORD: &str = "recording.json";
const BASE: &str = "base.img";
const LOG: &str = "writes.log";

/// What is known of a recording besides its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The digest of the image.
    image: String,
    /// The ID of the node, which it has chosen before anything was durable.
    node: String,
    said: Vec<Said>,
}

/// A recording.
pub(super) struct Recording {
    folder: PathBuf,
    record: Record,
    pub log: Log,
}

impl Recording {
    /// The one in this folder.
    pub(super) fn find(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join(RECORD);
        if !path.exists() {
            return Ok(None);
        }
        let context = || format!("cannot read {}", path.display());
        let text = fs::read(&path).with_context(context)?;
        let record = serde_json::from_slice(&text).with_context(context)?;
        let disk_bytes = fs::metadata(folder.join(BASE))?.len();
        let log = fs::File::open(folder.join(LOG))?;
        let log = Log::parse(&log, disk_bytes)
            .with_context(|| format!("{}", folder.join(LOG).display()))?;
        Ok(Some(Self {
            folder: folder.to_owned(),
            record,
            log,
        }))
    }

    /// Boots a machine that founds a cluster, and records that and some changes by its owner.
    pub(super) async fn of_first_bootstrap(test: &TestCtx, folder: &Path) -> anyhow::Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let node = test.node("recorded").logged().install().await?;
        let log = node.log_path()?;
        let mut notes = Notes::beside(log);
        let vm = node.power_on().await?;
        let id = vm.founding_node().await?;
        vm.home().await?;
        notes.note(Statement::Home)?;
        let owner = vm.owned().await?;
        notes.of_changes(&owner, &id).await?;
        // Paused, QEMU completes what it has begun: the log has no gap.
        vm.pause().await?;
        vm.cut().await?;

        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let image = &test.artifacts().test;
        copy(&image.disk, &folder.join(BASE)).await?;
        fs::rename(log, folder.join(LOG)).context("cannot keep the log")?;
        for file in [key_file, secret_file, recovery_key_file] {
            let (from, to) = (file(node.folder()), file(folder));
            fs::rename(&from, &to).with_context(|| format!("cannot keep {}", from.display()))?;
        }
        let record = Record {
            image: digest_of(image)?,
            node: id,
            said: notes.said,
        };
        let text = serde_json::to_string_pretty(&record)? + "\n";
        fs::write(folder.join(RECORD), text).context("cannot write what was recorded")?;
        fs::remove_dir_all(node.folder())?;
        Self::find(folder)?.context("the recording is not there")
    }

    pub(super) fn is_of(&self, image: &str) -> bool {
        self.record.image == image
    }

    /// The disk before the boot.
    pub(super) fn base(&self) -> PathBuf {
        self.folder.join(BASE)
    }

    pub(super) fn log_path(&self) -> PathBuf {
        self.folder.join(LOG)
    }

    pub(super) fn owner(&self) -> anyhow::Result<Owner> {
        Ok(Owner::load(&self.folder)?)
    }

    /// The ID of the node.
    pub(super) fn node(&self) -> &str {
        &self.record.node
    }

    /// What had been said at the latest moment that leaves the disk of this cut.
    pub(super) fn said_at(&self, cut: Cut) -> Vec<Statement> {
        let issued = self.log.issued(cut.after);
        let said = self.record.said.iter();
        let until = said.filter(|said| self.log.entries_before(said.log_bytes) <= issued);
        until.map(|said| said.statement.clone()).collect()
    }
}

/// Identifies what boots.
pub(super) fn digest_of(image: &Image) -> anyhow::Result<String> {
    let mut all = digest::Context::new(&digest::SHA256);
    for path in [&image.kernel, &image.initramfs] {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        all.update(digest::digest(&digest::SHA256, &bytes).as_ref());
    }
    all.update(image.cmdline.as_bytes());
    Ok(hex::encode(all.finish()))
}
