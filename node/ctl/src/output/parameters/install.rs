//! The disk of an installation, as it is printed.

use hearth_api::disk_conditions::DiskConditions;
use serde::Serialize;

/// Null and 0 are no conditions.
#[derive(Debug, Serialize)]
pub(super) struct Install {
    serial: Option<String>,
    wwn: Option<String>,
    device: Option<String>,
    min_size_bytes: u64,
    /// Null for any.
    max_size_bytes: Option<u64>,
    /// Serial number or WWN of a disk that need not be empty.
    overwrite: Option<String>,
}

impl From<&DiskConditions> for Install {
    fn from(install: &DiskConditions) -> Self {
        let max = *install.sizes.end();
        Self {
            serial: install.serial.clone(),
            wwn: install.wwn.clone(),
            device: install.device.clone(),
            min_size_bytes: *install.sizes.start(),
            max_size_bytes: (max < u64::MAX).then_some(max),
            overwrite: install.overwrite.clone(),
        }
    }
}

impl Install {
    /// On one line.
    pub(super) fn text(&self) -> String {
        let names = [
            ("serial", &self.serial),
            ("WWN", &self.wwn),
            ("device", &self.device),
        ];
        let names = names.into_iter();
        let mut words: Vec<String> = names
            .filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)))
            .collect();
        if self.min_size_bytes > 0 {
            words.push(format!("at least {} bytes", self.min_size_bytes));
        }
        words.extend(
            self.max_size_bytes
                .map(|max| format!("at most {max} bytes")),
        );
        match (&self.overwrite, words.is_empty()) {
            (Some(name), _) => words.insert(0, format!("disk {name}, whatever is on it")),
            (None, true) => words.push("the only empty disk".to_owned()),
            (None, false) => words.insert(0, "an empty disk".to_owned()),
        }
        words.join(", ")
    }
}
