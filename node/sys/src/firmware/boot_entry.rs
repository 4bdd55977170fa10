//! Boot entries of the firmware: the next boot, and all later ones, from a partition.
//!
//! A boot entry is a variable `BootNNNN` with a *load option*, and `BootOrder` lists their numbers in the order in which the
//! firmware tries them. `BootNext` is one number that it tries first, once. Both are set: firmware may put media that are
//! attached before all entries again, but `BootNext` is its user's wish.
//!
//! The kernel has each variable as a file: four bytes of attributes, then the value, in a single write.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::{ATTRIBUTES, GLOBAL, text, u16_at};

/// Kept without power, accessible at boot and at run time.
const ATTRIBUTE_BITS: u32 = 7;
/// Of a load option: the firmware may use it without being asked.
const ACTIVE: u32 = 1;
/// The end of a device path.
const END: [u8; 4] = [0x7f, 0xff, 4, 0];

/// Why the firmware was not told from what to boot.
#[derive(Debug, thiserror::Error)]
#[error("EFI variable {variable}: cannot {step}")]
pub struct BootEntryError {
    /// The variable, or the directory of all.
    variable: PathBuf,
    step: &'static str,
    source: io::Error,
}

/// A program on a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// How the firmware shows the entry.
    pub description: &'static str,
    /// Number of the partition, from 1.
    pub number: u32,
    /// Its first sector.
    pub first: u64,
    /// Its length in sectors.
    pub sectors: u64,
    /// Its GUID.
    pub guid: Uuid,
    /// Path of the program on it, with `\` between its parts.
    pub path: &'static str,
}

impl Program {
    /// The load option: attributes, length of the device path, description, device path. The path begins with the partition,
    /// which the firmware looks for on all disks.
    pub fn load_option(&self) -> Vec<u8> {
        let mut device = vec![4, 1, 42, 0];
        device.extend(self.number.to_le_bytes());
        device.extend(self.first.to_le_bytes());
        device.extend(self.sectors.to_le_bytes());
        device.extend(self.guid.to_bytes_le());
        // Of a GPT, and identified by a GUID.
        device.extend([2, 2]);
        let path = utf16(self.path);
        device.extend([4, 4]);
        device.extend((path.len() as u16 + 4).to_le_bytes());
        device.extend(path);
        device.extend(END);
        let mut option = ACTIVE.to_le_bytes().to_vec();
        option.extend((device.len() as u16).to_le_bytes());
        option.extend(utf16(self.description));
        option.extend(device);
        option
    }

    /// Makes the firmware boot it next, and before all others from then on. Entries with its description are replaced: they
    /// are of former installations. `efivars` is [`super::EFIVARS`] except in tests. Returns the number of the entry, `None`
    /// for a machine without such variables.
    pub fn boot_first(&self, efivars: &Path) -> Result<Option<u16>, BootEntryError> {
        let entries = match entries(efivars)? {
            Some(entries) => entries,
            None => return Ok(None),
        };
        let ours = |(_, option): &&(u16, Vec<u8>)| {
            let description = option.get(6..).and_then(text);
            description.as_deref() == Some(self.description)
        };
        let number = match entries.iter().find(ours) {
            Some((number, _)) => *number,
            None => {
                let is_free = |number: &u16| entries.iter().all(|(used, _)| used != number);
                (0..=u16::MAX).find(is_free).unwrap_or(u16::MAX)
            }
        };
        write(efivars, &entry_name(number), &self.load_option())?;
        let mut order = vec![number];
        let known = value(efivars, "BootOrder")?.unwrap_or_default();
        let known = known.chunks_exact(2).filter_map(|bytes| u16_at(bytes, 0));
        order.extend(known.filter(|other| *other != number));
        let order: Vec<u8> = order.into_iter().flat_map(u16::to_le_bytes).collect();
        write(efivars, "BootOrder", &order)?;
        write(efivars, "BootNext", &number.to_le_bytes())?;
        Ok(Some(number))
    }
}

fn entry_name(number: u16) -> String {
    format!("Boot{number:04X}")
}

fn utf16(text: &str) -> Vec<u8> {
    let units = text.encode_utf16().chain([0]);
    units.flat_map(u16::to_le_bytes).collect()
}

fn failed(variable: &Path, step: &'static str) -> impl FnOnce(io::Error) -> BootEntryError {
    let variable = variable.to_owned();
    move |source| BootEntryError {
        variable,
        step,
        source,
    }
}

fn path(efivars: &Path, name: &str) -> PathBuf {
    efivars.join(format!("{name}-{GLOBAL}"))
}

/// The value of a variable of the firmware.
fn value(efivars: &Path, name: &str) -> Result<Option<Vec<u8>>, BootEntryError> {
    let path = path(efivars, name);
    match fs::read(&path) {
        Ok(bytes) => Ok(bytes.get(ATTRIBUTES..).map(<[u8]>::to_vec)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&path, "read it")(error)),
    }
}

/// The number of an entry, and the value of its variable.
type Entry = (u16, Vec<u8>);

/// All entries, by their numbers; `None` without such variables.
fn entries(efivars: &Path) -> Result<Option<Vec<Entry>>, BootEntryError> {
    let listed = match fs::read_dir(efivars) {
        Ok(listed) => listed,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(efivars, "list them")(error)),
    };
    let suffix = format!("-{GLOBAL}");
    let mut entries = Vec::new();
    let mut has_variables = false;
    for file in listed {
        has_variables = true;
        let name = file.map_err(failed(efivars, "list them"))?.file_name();
        let number = name.to_str().and_then(|name| {
            let digits = name.strip_suffix(&suffix)?.strip_prefix("Boot")?;
            let number = u16::from_str_radix(digits, 16).ok()?;
            (entry_name(number) == format!("Boot{digits}")).then_some(number)
        });
        if let Some(number) = number {
            let option = value(efivars, &entry_name(number))?;
            entries.push((number, option.unwrap_or_default()));
        }
    }
    entries.sort();
    Ok(has_variables.then_some(entries))
}

fn write(efivars: &Path, name: &str, value: &[u8]) -> Result<(), BootEntryError> {
    let path = path(efivars, name);
    let mut bytes = ATTRIBUTE_BITS.to_le_bytes().to_vec();
    bytes.extend(value);
    // Not truncated: the kernel replaces the value with each write, and removes the variable with an empty one.
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    options
        .open(&path)
        .and_then(|mut file| file.write_all(&bytes))
        .map_err(failed(&path, "write it"))
}

#[cfg(test)]
mod tests {
    use uuid::uuid;

    use super::*;

    fn program() -> Program {
        Program {
            description: "Hearth",
            number: 1,
            first: 2048,
            sectors: 2_097_152,
            guid: uuid!("a3f2c8d1-4b5e-4f60-8a7b-9c0d1e2f3a4b"),
            path: "\\EFI\\BOOT\\BOOTX64.EFI",
        }
    }

    #[test]
    fn a_load_option_is_what_the_specification_says() {
        let option = program().load_option();
        assert_eq!(option[..4], [1, 0, 0, 0]);
        let length = usize::from(u16_at(&option, 4).unwrap());
        assert_eq!(option[6..20], *b"H\0e\0a\0r\0t\0h\0\0\0");
        let device = &option[20..];
        assert_eq!(device.len(), length);
        // A node of 42 bytes, whose GUID is mixed-endian, and a path of 21 characters and a zero.
        assert_eq!(device[..4], [4, 1, 42, 0]);
        assert_eq!(device[24..28], [0xd1, 0xc8, 0xf2, 0xa3]);
        assert_eq!(device[40..42], [2, 2]);
        assert_eq!(device[42..46], [4, 4, 48, 0]);
        assert_eq!(device[length - 4..], END);
        assert_eq!(device.len(), 42 + 48 + 4);
    }

    #[test]
    fn the_entry_is_the_first_and_the_next_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str| value(folder.path(), name).unwrap();
        assert_eq!(program().boot_first(folder.path()).unwrap(), None);
        let absent = folder.path().join("absent");
        assert_eq!(program().boot_first(&absent).unwrap(), None);
        for (name, content) in [
            ("Boot0000", &b"another"[..]),
            ("Boot0002", b"a third"),
            ("BootOrder", &[2, 0, 0, 0]),
            ("BootCurrent", &[0, 0]),
        ] {
            write(folder.path(), name, content).unwrap();
        }
        assert_eq!(program().boot_first(folder.path()).unwrap(), Some(1));
        assert_eq!(read("BootOrder").unwrap(), [1, 0, 2, 0, 0, 0]);
        assert_eq!(read("BootNext").unwrap(), [1, 0]);
        assert_eq!(read("Boot0001").unwrap(), program().load_option());
        // Again: the same entry.
        let other = Program {
            first: 4096,
            ..program()
        };
        assert_eq!(other.boot_first(folder.path()).unwrap(), Some(1));
        assert_eq!(read("BootOrder").unwrap(), [1, 0, 2, 0, 0, 0]);
        assert_eq!(read("Boot0001").unwrap(), other.load_option());
        assert_eq!(read("Boot0000").unwrap(), b"another");
    }
}
