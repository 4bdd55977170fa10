//! The power button, as reported by the kernel's input devices.
//!
//! ACPI machines, including emulated ones, expose the button as an input device with the key
//! "power", and so do some keyboards. Sysfs says which devices have that key; others are not
//! opened.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rustix::fs::OFlags;

use super::raw::Watched;

/// Type and code of the event, as in the kernel's `input-event-codes.h`.
const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;

/// The length of the kernel's `struct input_event` on 64-bit machines: two words of time, type,
/// code, value.
const EVENT_LENGTH: usize = 24;

/// Why the power button cannot be watched.
#[derive(Debug, thiserror::Error)]
#[error("power button: cannot {step} {path}")]
pub struct PowerButtonError {
    step: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// All power buttons of the machine.
#[derive(Debug)]
pub struct PowerButton {
    devices: Vec<(PathBuf, Watched)>,
}

impl PowerButton {
    /// Opens the power buttons of the machine; `None` if it has none.
    ///
    /// Must be called within a tokio runtime.
    pub fn open() -> Result<Option<Self>, PowerButtonError> {
        let mut devices = Vec::new();
        for name in names(Path::new("/sys"))? {
            let path = Path::new("/dev/input").join(name);
            let failed = |step| {
                let path = path.clone();
                move |source| PowerButtonError { step, path, source }
            };
            let device = OpenOptions::new()
                .read(true)
                .custom_flags(OFlags::NONBLOCK.bits() as i32)
                .open(&path)
                .map_err(failed("open"))?;
            let device = Watched::new(device).map_err(failed("watch"))?;
            devices.push((path, device));
        }
        Ok((!devices.is_empty()).then_some(Self { devices }))
    }

    /// Waits until a button is pressed.
    ///
    /// Cancel safe.
    pub async fn pressed(&self) -> Result<(), PowerButtonError> {
        let mut waiting: FuturesUnordered<_> = self
            .devices
            .iter()
            .map(|(path, device)| pressed_on(path, device))
            .collect();
        // There is at least one device, and each future ends with a result.
        waiting.next().await.unwrap_or(Ok(()))
    }
}

async fn pressed_on(path: &Path, device: &Watched) -> Result<(), PowerButtonError> {
    let failed = |source| PowerButtonError {
        step: "read",
        path: path.to_owned(),
        source,
    };
    // The kernel returns only whole events.
    let mut buffer = [0; EVENT_LENGTH * 16];
    loop {
        let length = device.read(&mut buffer).await.map_err(failed)?;
        if length == 0 {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        if buffer[..length].chunks_exact(EVENT_LENGTH).any(is_press) {
            return Ok(());
        }
    }
}

fn is_press(event: &[u8]) -> bool {
    let u16_at = |at| u16::from_ne_bytes([event[at], event[at + 1]]);
    let value: [u8; 4] = std::array::from_fn(|i| event[20 + i]);
    // Neither a release nor a repeat.
    u16_at(16) == EV_KEY && u16_at(18) == KEY_POWER && i32::from_ne_bytes(value) == 1
}

/// The input devices with the key, such as `event0`.
fn names(sys: &Path) -> Result<Vec<String>, PowerButtonError> {
    let directory = sys.join("class/input");
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| PowerButtonError {
            step: "read",
            path,
            source,
        }
    };
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        // A kernel without input devices.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(&directory)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed(&directory))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("event") {
            continue;
        }
        let keys = entry.path().join("device/capabilities/key");
        let keys = fs::read_to_string(&keys).map_err(failed(&keys))?;
        if has_key(&keys, KEY_POWER) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// The kernel's bitmap: words of 64 bits in hexadecimal, the highest one first.
fn has_key(bitmap: &str, key: u16) -> bool {
    let word = bitmap.split_whitespace().rev().nth(usize::from(key / 64));
    word.and_then(|word| u64::from_str_radix(word, 16).ok())
        .is_some_and(|word| word & (1 << (key % 64)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: i32) -> Vec<u8> {
        let mut event = vec![0; 16];
        event.extend(kind.to_ne_bytes());
        event.extend(code.to_ne_bytes());
        event.extend(value.to_ne_bytes());
        event
    }

    #[test]
    fn only_devices_with_the_key_are_taken() {
        // An ACPI power button, and a keyboard without one.
        assert!(has_key("10000000000000 0\n", KEY_POWER));
        assert!(!has_key("0 0 fffffffffffffffe", KEY_POWER));
        for bitmap in ["", "0", "zz 0", "70000 0 0 0 0"] {
            assert!(!has_key(bitmap, KEY_POWER), "{bitmap:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(names(dir.path()).unwrap().is_empty());
        for (name, keys) in [
            ("event0", "10000000000000 0"),
            ("event1", "0"),
            ("mice", ""),
        ] {
            let device = dir.path().join("class/input").join(name);
            fs::create_dir_all(device.join("device/capabilities")).unwrap();
            fs::write(device.join("device/capabilities/key"), keys).unwrap();
        }
        assert_eq!(names(dir.path()).unwrap(), ["event0"]);
    }

    #[tokio::test]
    async fn a_press_is_told_and_nothing_else() {
        use std::fs::File;
        use std::io::Write;
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let mut write = File::from(write);
        let device = Watched::new(read).unwrap();
        let button = PowerButton {
            devices: vec![("pipe".into(), device)],
        };
        write.write_all(&event(EV_KEY, KEY_POWER, 0)).unwrap();
        write.write_all(&event(EV_KEY, KEY_POWER, 2)).unwrap();
        write.write_all(&event(EV_KEY, 30, 1)).unwrap();
        write.write_all(&event(0, KEY_POWER, 1)).unwrap();
        let mut pressed = std::pin::pin!(button.pressed());
        assert!(futures::poll!(&mut pressed).is_pending());
        write.write_all(&event(EV_KEY, KEY_POWER, 1)).unwrap();
        pressed.await.unwrap();
        drop(write);
        assert!(button.pressed().await.is_err());
    }
}
