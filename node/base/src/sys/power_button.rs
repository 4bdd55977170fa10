//! The power button: an input device of the kernel that sends `KEY_POWER`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tokio::io::unix::AsyncFd;

const CLASS: &str = "/sys/class/input";
const DEVICES: &str = "/dev/input";
/// `struct input_event` of a 64-bit kernel: two words of time, type, code, value.
const EVENT: usize = 24;
const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;
const PRESSED: i32 = 1;

/// Why the button cannot be listened to.
#[derive(Debug, thiserror::Error)]
pub enum PowerButtonError {
    /// The machine has none, or the kernel does not know it.
    #[error("no input device with a power key in {CLASS}")]
    None,
    /// The device cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The device.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The machine's power button.
#[derive(Debug)]
pub struct PowerButton {
    path: PathBuf,
    device: AsyncFd<File>,
}

impl PowerButton {
    /// Finds and opens the device. Needs a tokio runtime.
    pub fn open() -> Result<Self, PowerButtonError> {
        let name = find(Path::new(CLASS)).ok_or(PowerButtonError::None)?;
        let path = Path::new(DEVICES).join(name);
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
            .open(&path)
            .and_then(AsyncFd::register);
        match opened {
            Ok(device) => Ok(Self { path, device }),
            Err(source) => Err(PowerButtonError::Io { path, source }),
        }
    }

    /// Waits until it is pressed.
    pub async fn pressed(&mut self) -> Result<(), PowerButtonError> {
        let wrap = |source| PowerButtonError::Io {
            path: self.path.clone(),
            source,
        };
        let mut events = [0; EVENT * 16];
        loop {
            let mut ready = self.device.readable().await.map_err(wrap)?;
            match ready.try_io(|device| device.get_ref().read(&mut events)) {
                Ok(read) => {
                    let read = read.map_err(wrap)?;
                    if events[..read].chunks_exact(EVENT).any(is_press) {
                        return Ok(());
                    }
                }
                Err(_would_block) => {}
            }
        }
    }
}

/// The first event device whose keys include the power key. The kernel shows
/// the keys as words of a bit field in hexadecimal, the highest first.
fn find(class: &Path) -> Option<String> {
    let mut devices: Vec<String> = fs::read_dir(class)
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("event"))
        .collect();
    devices.sort();
    devices.into_iter().find(|name| {
        let keys = fs::read_to_string(class.join(name).join("device/capabilities/key"));
        keys.is_ok_and(|keys| has_key(&keys, KEY_POWER))
    })
}

fn has_key(keys: &str, key: u16) -> bool {
    let word = keys.split_whitespace().rev().nth(usize::from(key / 64));
    let word = word.and_then(|word| u64::from_str_radix(word, 16).ok());
    word.is_some_and(|word| word >> (key % 64) & 1 == 1)
}

fn is_press(event: &[u8]) -> bool {
    let number = |at: usize| u16::from_ne_bytes([event[at], event[at + 1]]);
    let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
    number(16) == EV_KEY && number(18) == KEY_POWER && value == PRESSED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_button_is_found_among_other_devices() {
        let class = tempfile::tempdir().unwrap();
        for (name, keys) in [
            ("event0", "fffe"),
            ("event1", "10000000000000 0"),
            ("mouse0", "0"),
        ] {
            let directory = class.path().join(name).join("device/capabilities");
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("key"), format!("{keys}\n")).unwrap();
        }
        assert_eq!(find(class.path()), Some("event1".to_owned()));
    }

    #[test]
    fn only_a_press_of_the_power_key_counts() {
        let event = |kind: u16, code: u16, value: i32| {
            let mut event = [0; EVENT];
            event[16..18].copy_from_slice(&kind.to_ne_bytes());
            event[18..20].copy_from_slice(&code.to_ne_bytes());
            event[20..].copy_from_slice(&value.to_ne_bytes());
            event
        };
        assert!(is_press(&event(EV_KEY, KEY_POWER, 1)));
        assert!(!is_press(&event(EV_KEY, KEY_POWER, 0)));
        assert!(!is_press(&event(EV_KEY, 30, 1)));
        assert!(!is_press(&event(0, 0, 0)));
    }
}
