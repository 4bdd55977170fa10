//! State that one boot leaves for the next: how many boots have failed in a row, and the time.
//!
//! If the core dies, PID 1 reboots the machine. A machine that keeps failing must not reboot at
//! full speed. PID 1 has no state of its own, so the core counts: each boot increments the counter,
//! and a node that has run without failure for a while resets it to zero. The core derives the
//! delay from the counter and writes it to a file for PID 1 before anything else can fail. The boot
//! does not wait until the counter is written: that takes two flushes of the disk.
//!
//! The time is saved for machines whose clock has no battery; [`clock`](crate::clock) says when it is believed.
//!
//! The boot record is best effort: if the ESP cannot be read or written, the boot continues, with
//! what could be read, and tries to write again.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::private::BootRecord;
use hearth_sys::slots::{FileSlot, Loaded, SlotError, SlotFormat, SlotPair};
use prost::Message;

use crate::clock::BootClock;
use crate::esp_writes::LastWrite;
use crate::layout::StateFile;

const VERSION: u32 = 1;
const FORMAT: SlotFormat = SlotFormat {
    magic: *b"HRTHBOOT",
    version: VERSION,
};
/// Consecutive boots without a delay: one or two power cuts are not a reason to wait.
const FREE_BOOTS: u32 = 3;
const LONGEST_DELAY: Duration = Duration::from_secs(60);

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The ID of this boot, random, from the kernel.
pub fn boot_id() -> std::io::Result<String> {
    let text = std::fs::read_to_string(BOOT_ID)?;
    Ok(text.trim().to_owned())
}

/// The boot record could not be written. What it should say is kept for the next write.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the boot record")]
pub struct NotWritten(#[source] SlotError);

/// The boot record on one ESP.
pub struct BootCounter {
    slots: SlotPair<FileSlot>,
    restless_boots: u32,
    clock: BootClock,
    /// The last time that may be believed, in seconds since 1970.
    saved: i64,
    last_write: LastWrite,
}

impl BootCounter {
    /// Reads the record, sets the clock to the saved time if that is ahead and can be believed, and
    /// counts this boot; [`Self::save`] writes that.
    ///
    /// # Errors
    ///
    /// Other software has written the record.
    pub fn begin(file: &StateFile, clock: BootClock) -> Result<Self, SlotError> {
        let mut slots = file.slots(&[FORMAT]);
        let record = match slots.load() {
            Ok(Loaded::Value { payload, .. }) => BootRecord::decode(payload.as_slice()).ok(),
            Ok(_) => None,
            Err(error @ SlotError::OtherVersion { .. }) => return Err(error),
            Err(error) => {
                // A lost counter and a lost time must not stop the boot.
                tracing::warn!(%error, "the boot record is corrupt; starting with an empty one");
                None
            }
        };
        let record = record.unwrap_or_default();
        let seconds = u64::try_from(record.saved_time).unwrap_or_default();
        let saved = match clock.believe(UNIX_EPOCH + Duration::from_secs(seconds)) {
            true => record.saved_time,
            false => 0,
        };
        let restless_boots = record.restless_boots.saturating_add(1);
        Ok(Self {
            slots,
            restless_boots,
            clock,
            saved,
            last_write: LastWrite::none(),
        })
    }

    /// How the last write ended.
    pub fn last_write(&self) -> &LastWrite {
        &self.last_write
    }

    /// How long PID 1 must wait before it reboots if the core dies in this boot.
    pub fn reboot_delay(&self) -> Duration {
        delay(self.restless_boots)
    }

    /// Resets the counter: the node has run without failure for a while, or shuts down cleanly.
    pub fn rest(&mut self) -> Result<(), NotWritten> {
        self.restless_boots = 0;
        self.save()
    }

    /// Saves the counter, and the current time if a boot may believe it.
    #[expect(
        clippy::disallowed_methods,
        reason = "the time that is saved is the system clock"
    )]
    pub fn save(&mut self) -> Result<(), NotWritten> {
        let now = SystemTime::now();
        if self.clock.may_save(now) {
            let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
            self.saved = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        }
        let record = BootRecord {
            version: VERSION,
            restless_boots: self.restless_boots,
            saved_time: self.saved,
        };
        let written = self.write(&record.encode_to_vec());
        self.last_write.note(written).map_err(NotWritten)
    }

    /// A record that cannot be read is overwritten: a lost counter and a lost time must not stop the boot.
    fn write(&mut self, record: &[u8]) -> Result<(), SlotError> {
        match self.slots.save(record) {
            Err(
                SlotError::Corrupt { .. }
                | SlotError::Contradiction { .. }
                | SlotError::LastGeneration,
            ) => {
                self.slots.erase()?;
                self.slots.save(record)
            }
            saved => saved,
        }
        .map(drop)
    }
}

/// Zero for the first boots, then one second, doubled with each further boot.
fn delay(restless_boots: u32) -> Duration {
    match restless_boots.checked_sub(FREE_BOOTS + 1) {
        None => Duration::ZERO,
        Some(exponent) => {
            let seconds = 1u64.checked_shl(exponent).unwrap_or(u64::MAX);
            Duration::from_secs(seconds).min(LONGEST_DELAY)
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;
    use hearth_sys::slots::{self, HEADER_LEN};

    use super::*;

    fn file(esp: &tempfile::TempDir) -> StateFile {
        StateFile {
            directory: esp.path().to_owned(),
            name: "boot_record",
        }
    }

    /// With the clock of this machine, which is right, and an image that was built in 2023.
    fn read(esp: &tempfile::TempDir) -> BootCounter {
        let built = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        BootCounter::begin(&file(esp), BootClock::begin(built)).unwrap()
    }

    fn begin(esp: &tempfile::TempDir) -> Result<BootCounter, NotWritten> {
        let mut keeper = read(esp);
        keeper.save()?;
        Ok(keeper)
    }

    #[test]
    fn the_delay_grows_and_is_bounded() {
        let delays: Vec<u64> = (0..=12).map(|boots| delay(boots).as_secs()).collect();
        assert_eq!(delays, [0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(delay(u32::MAX), LONGEST_DELAY);
    }

    #[test]
    fn boots_are_counted_until_the_node_rests() {
        let esp = tempfile::tempdir().unwrap();
        for _ in 0..FREE_BOOTS {
            assert_eq!(begin(&esp).unwrap().reboot_delay(), Duration::ZERO);
        }
        let mut keeper = begin(&esp).unwrap();
        assert_eq!(keeper.reboot_delay(), Duration::from_secs(1));
        keeper.rest().unwrap();
        assert_eq!(begin(&esp).unwrap().reboot_delay(), Duration::ZERO);
    }

    #[test]
    fn a_broken_record_begins_anew() {
        let esp = tempfile::tempdir().unwrap();
        for slot in file(&esp).paths() {
            std::fs::write(slot, b"garbage").unwrap();
        }
        let keeper = begin(&esp).unwrap();
        assert_eq!(keeper.restless_boots, 1);
    }

    /// A boot that cannot write its record has what could be read, and writes as soon as that is possible.
    #[test]
    fn a_record_that_cannot_be_written_is_written_later() {
        let esp = tempfile::tempdir().unwrap();
        for _ in 0..FREE_BOOTS {
            begin(&esp).unwrap();
        }
        let [a, _] = file(&esp).paths();
        let record = std::fs::read(&a).unwrap();
        std::fs::remove_file(&a).unwrap();
        std::fs::create_dir(&a).unwrap();
        let mut keeper = read(&esp);
        assert_eq!(keeper.reboot_delay(), Duration::from_secs(1));
        for _ in 0..2 {
            keeper.save().unwrap_err();
            assert!(keeper.last_write().failed());
        }
        std::fs::remove_dir(&a).unwrap();
        keeper.save().unwrap();
        assert!(!keeper.last_write().failed());
        assert_ne!(std::fs::read(&a).unwrap(), record);
        assert_eq!(begin(&esp).unwrap().restless_boots, FREE_BOOTS + 2);
    }

    #[test]
    fn a_time_that_is_years_ahead_is_forgotten() {
        let esp = tempfile::tempdir().unwrap();
        let ahead = BootRecord {
            version: VERSION,
            restless_boots: 0,
            // 2060.
            saved_time: 2_840_140_800,
        };
        let mut slots = file(&esp).slots(&[FORMAT]);
        slots.load().unwrap();
        slots.save(&ahead.encode_to_vec()).unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now = i64::try_from(now.as_secs()).unwrap();
        let keeper = begin(&esp).unwrap();
        assert!((now..now + 600).contains(&keeper.saved), "{}", keeper.saved);
    }

    /// The saved time is the current one, so the test replaces it before the comparison.
    #[test]
    fn the_stored_form_stays() {
        const SAVED: i64 = 1_700_000_000;
        let esp = tempfile::tempdir().unwrap();
        begin(&esp).unwrap();
        let [a, b] = file(&esp).paths().map(|path| std::fs::read(path).unwrap());
        assert_eq!(a, b);
        let (before, record) = a.split_at(HEADER_LEN);
        let mut record = BootRecord::decode(record).unwrap();
        assert!(
            record.saved_time >= SAVED,
            "the saved time is the current time"
        );
        assert_eq!(
            *slots::encode(&FORMAT, 1, &record.encode_to_vec()),
            a,
            "unexpected header: {before:?}"
        );
        record.saved_time = SAVED;
        let written = slots::encode(&FORMAT, 1, &record.encode_to_vec());
        let stored = stored_form!("boot-record.slot", written);

        for path in file(&esp).paths() {
            std::fs::write(path, &stored).unwrap();
        }
        let Loaded::Value { payload, .. } = file(&esp).slots(&[FORMAT]).load().unwrap() else {
            panic!("the stored slots were not read");
        };
        let wanted = BootRecord {
            version: 1,
            restless_boots: 1,
            saved_time: SAVED,
        };
        assert_eq!(BootRecord::decode(&payload[..]).unwrap(), wanted);
        assert_eq!(begin(&esp).unwrap().restless_boots, 2);
    }
}
