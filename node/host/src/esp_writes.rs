//! Whether the state files on the ESP can be written.
//!
//! A node needs the ESP when it boots, and writes to it seldom. It works without that, so an ESP that takes no writes any
//! more would show at the boot that misses what was not saved: an address, a setting, a key that should be gone. So each
//! store of a state file publishes how its last write ended ([`LastWrite`]), and while one has failed the node reports the
//! condition [`ESP`]. What could not be written is tried again by whoever wanted it written; the boot record is
//! written at every boot, so that a boot finds out by itself.

use std::error::Error;

use hearth_api::chain;
use hearth_api::names::conditions::{self, ESP};
use hearth_api::v1::NodeCondition;
use hearth_base::event::{self, Closed, Value, Watcher, Writer};

/// How the last write of one state file ended.
#[derive(Debug)]
pub struct LastWrite(Writer<Option<String>>);

impl LastWrite {
    /// Before the first write, which is as good as one that succeeded.
    pub fn none() -> Self {
        let (writer, _) = event::value();
        writer.set(None);
        Self(writer)
    }

    /// Takes note of a write, or a repair.
    pub fn note<T, E: Error + 'static>(&self, written: Result<T, E>) -> Result<T, E> {
        self.set(written.as_ref().err().map(|error| chain(error)));
        written
    }

    /// Takes note of a slot that could not be repaired: it has only one copy.
    pub fn note_repair(&self, whole: bool) {
        let why = || "one of its two copies is damaged and cannot be repaired".to_owned();
        self.set((!whole).then(why));
    }

    /// Whether it failed.
    pub fn failed(&self) -> bool {
        self.0.value().get().flatten().is_some()
    }

    /// Why it failed; `None` if it did not.
    pub fn value(&self) -> Value<Option<String>> {
        self.0.value()
    }

    fn set(&self, failure: Option<String>) {
        if self.0.value().get().as_ref() != Some(&failure) {
            self.0.set(failure);
        }
    }
}

/// How the last writes of all state files ended.
#[derive(Clone, Debug)]
pub struct EspWrites {
    /// Of the boot record; none if it cannot be kept, as one of other software.
    pub boot_record: Option<Value<Option<String>>>,
    /// Of the cluster directory.
    pub directory: Value<Option<String>>,
    /// Of the sealed configuration.
    pub sealed: Value<Option<String>>,
}

impl EspWrites {
    /// Follows them.
    pub fn watch(&self) -> EspWatcher {
        EspWatcher {
            all: self.clone(),
            boot_record: self.boot_record.as_ref().map(Value::watch),
            directory: self.directory.watch(),
            sealed: self.sealed.watch(),
        }
    }
}

/// Follows [`EspWrites`].
pub struct EspWatcher {
    all: EspWrites,
    boot_record: Option<Watcher<Option<String>>>,
    directory: Watcher<Option<String>>,
    sealed: Watcher<Option<String>>,
}

impl EspWatcher {
    /// Waits for a write that ended otherwise than the one before. Nothing is lost if the future is dropped before.
    ///
    /// # Errors
    ///
    /// The writer of a value has ended.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        let Self {
            boot_record,
            directory,
            sealed,
            ..
        } = self;
        let of_record = async {
            match boot_record {
                Some(boot_record) => boot_record.next().await,
                None => std::future::pending().await,
            }
        };
        let changed = tokio::select! {
            changed = of_record => changed,
            changed = directory.next() => changed,
            changed = sealed.next() => changed,
        };
        changed.map(drop)
    }

    /// Whether the cluster directory could not be saved.
    pub fn directory_failed(&self) -> bool {
        self.all.directory.get().flatten().is_some()
    }

    /// The condition of the node, while a write has failed.
    pub fn condition(&self) -> Option<NodeCondition> {
        let failures = [
            ("the boot record", self.all.boot_record.as_ref()),
            ("the cluster directory", Some(&self.all.directory)),
            ("the sealed configuration", Some(&self.all.sealed)),
        ];
        let failed = failures
            .into_iter()
            .filter_map(|(file, value)| Some(format!("{file}: {}", value?.get().flatten()?)));
        let failed: Vec<String> = failed.collect();
        (!failed.is_empty()).then(|| NodeCondition {
            r#type: ESP.to_owned(),
            met: false,
            reason: "WriteFailed".to_owned(),
            message: conditions::printable(&format!(
                "the EFI system partition cannot be written, and the node tries again: reboot it if its disk is well, \
                 or replace the disk and register it again. Not saved: {}",
                failed.join("; ")
            )),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn io_error() -> Result<(), io::Error> {
        Err(io::Error::from_raw_os_error(5))
    }

    #[tokio::test]
    async fn the_condition_holds_while_the_last_write_of_a_file_has_failed() {
        let (boot_record, directory, sealed) =
            (LastWrite::none(), LastWrite::none(), LastWrite::none());
        let writes = EspWrites {
            boot_record: Some(boot_record.value()),
            directory: directory.value(),
            sealed: sealed.value(),
        };
        let mut watcher = writes.watch();
        assert_eq!(watcher.condition(), None);
        directory.note(io_error()).unwrap_err();
        boot_record.note(io_error()).unwrap_err();
        watcher.changed().await.unwrap();
        assert!(watcher.directory_failed());
        let condition = watcher.condition().unwrap();
        assert_eq!(
            (condition.met, &condition.reason[..]),
            (false, "WriteFailed")
        );
        for part in ["the boot record: ", "the cluster directory: ", "error 5"] {
            assert!(condition.message.contains(part), "{condition:?}");
        }
        boot_record.note(Ok::<_, io::Error>(())).unwrap();
        assert!(watcher.condition().is_some());
        directory.note(Ok::<_, io::Error>(())).unwrap();
        assert_eq!(watcher.condition(), None);
        sealed.note_repair(false);
        assert!(watcher.condition().unwrap().message.contains("sealed"));
        sealed.note_repair(true);
        assert_eq!(watcher.condition(), None);
    }
}
