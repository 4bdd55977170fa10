//! Which disk of a machine is meant.

use std::fmt;
use std::ops::RangeInclusive;

/// More than serial numbers and names of disks have.
pub const LONGEST: usize = 128;

/// The conditions for a disk; all that are given have to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConditions {
    /// Its serial number.
    pub serial: Option<String>,
    /// Its World Wide Name: hexadecimal digits, perhaps with a prefix.
    pub wwn: Option<String>,
    /// The kernel's name of it, without `/dev/`.
    pub device: Option<String>,
    /// Its size in bytes.
    pub sizes: RangeInclusive<u64>,
    /// Serial number or World Wide Name of a disk that may have something on it.
    pub overwrite: Option<String>,
}

impl Default for DiskConditions {
    /// Any disk.
    fn default() -> Self {
        Self {
            serial: None,
            wwn: None,
            device: None,
            sizes: 0..=u64::MAX,
            overwrite: None,
        }
    }
}

/// As they are given in parameters.
impl fmt::Display for DiskConditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = [
            ("serial", &self.serial),
            ("wwn", &self.wwn),
            ("device", &self.device),
            ("overwrite", &self.overwrite),
        ];
        let texts = texts
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name} {:?}", value.as_ref()?)));
        let mut all: Vec<String> = texts.collect();
        if *self.sizes.start() > 0 {
            all.push(format!("min_size_bytes {}", self.sizes.start()));
        }
        if *self.sizes.end() < u64::MAX {
            all.push(format!("max_size_bytes {}", self.sizes.end()));
        }
        match all.is_empty() {
            true => f.write_str("no further condition"),
            false => f.write_str(&all.join(" and ")),
        }
    }
}

/// Whether this can be the serial number or the name of a disk.
pub fn is_word_of_disk(text: &str) -> bool {
    let is_plain = text.chars().all(|c| c == ' ' || c.is_ascii_graphic());
    is_plain && text.len() <= LONGEST && text.trim() == text
}
