//! Applies the kernel settings that operators have set for this node.
//!
//! Names and values were checked by the curator and when they were read ([`hearth_api::node_settings`]); the kernel has the last
//! word. What it refuses becomes a condition of the node, and holds nothing else up. A setting that is deleted gets the value back
//! that it had before; these values last as long as the boot, as the settings of the kernel do.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hearth_api::chain;
use hearth_api::node_settings::NodeSettings;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_sys::sysctl::{self, SysctlError};

/// Applies kernel settings.
pub struct Worker {
    /// Where the kernel has its settings.
    pub proc_sys: PathBuf,
    /// The values before they were changed, by name.
    pub before: Mutex<BTreeMap<String, String>>,
    /// Read: this node's settings.
    pub node_settings: Value<Arc<NodeSettings>>,
    /// Written: what the kernel has refused.
    pub refused_settings: Writer<Vec<String>>,
}

/// Applies each change.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let mut all = worker.node_settings.watch();
    worker.refused_settings.set(Vec::new());
    ctx.healthy();
    ctx.until_cancelled(async {
        loop {
            let settings = all.next().await?;
            worker.refused_settings.set(worker.apply(&settings.sysctls));
        }
    })
    .await
}

impl Worker {
    /// Returns what was refused.
    fn apply(&self, wanted: &BTreeMap<String, String>) -> Vec<String> {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let mut refused = Vec::new();
        before.retain(|name, value| {
            if wanted.contains_key(name) {
                return true;
            }
            let restored = sysctl::set_under(&self.proc_sys, name, value);
            restored.map_err(|error| refused.push(error)).is_err()
        });
        for (name, value) in wanted {
            if let Err(error) = self.set(&mut before, name, value) {
                refused.push(error);
            }
        }
        let text = |error: &SysctlError| {
            let text = chain(error);
            tracing::warn!("{text}");
            text
        };
        refused.iter().map(text).collect()
    }

    fn set(
        &self,
        before: &mut BTreeMap<String, String>,
        name: &str,
        value: &str,
    ) -> Result<(), SysctlError> {
        let now = sysctl::get_under(&self.proc_sys, name)?;
        sysctl::set_under(&self.proc_sys, name, value)?;
        before.entry(name.to_owned()).or_insert(now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use hearth_base::event;

    use super::*;

    fn worker(proc_sys: &Path) -> Worker {
        Worker {
            proc_sys: proc_sys.to_owned(),
            before: Mutex::default(),
            node_settings: event::value().1,
            refused_settings: event::value().0,
        }
    }

    #[test]
    fn what_was_before_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("vm")).unwrap();
        let file = folder.path().join("vm/swappiness");
        let is = |expected: &str| assert_eq!(fs::read_to_string(&file).unwrap().trim(), expected);
        fs::write(&file, "60\n").unwrap();
        let worker = worker(folder.path());
        let wanted = |value: &str| BTreeMap::from([("vm.swappiness".to_owned(), value.to_owned())]);
        for value in ["10", "20", "20"] {
            assert_eq!(worker.apply(&wanted(value)), [""; 0]);
            is(value);
        }
        assert_eq!(worker.apply(&BTreeMap::new()), [""; 0]);
        is("60");
        // Nothing is left to be restored.
        fs::write(&file, "70\n").unwrap();
        assert_eq!(worker.apply(&BTreeMap::new()), [""; 0]);
        is("70");
    }

    #[test]
    fn what_the_kernel_has_not_is_said_and_the_rest_applied() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("vm")).unwrap();
        fs::write(folder.path().join("vm/swappiness"), "60\n").unwrap();
        let worker = worker(folder.path());
        let wanted = [("vm.dirty_ratio", "5"), ("vm.swappiness", "10")];
        let wanted = wanted.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let refused = worker.apply(&BTreeMap::from(wanted));
        assert_eq!(refused.len(), 1);
        assert!(
            refused[0].starts_with("cannot read vm.dirty_ratio"),
            "{refused:?}"
        );
        let applied = fs::read_to_string(folder.path().join("vm/swappiness")).unwrap();
        assert_eq!(applied.trim(), "10");
    }
}
