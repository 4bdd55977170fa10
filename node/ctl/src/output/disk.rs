//! A disk that was written, as it is printed.

use hearth_parameters::{Cluster, Parameters};
use serde::Serialize;

use super::CheckedParameters;
use crate::disk::{Device, Done, Target, size_text};

/// Output of `image write` and `image set-parameters`.
#[derive(Debug, Serialize)]
pub(crate) struct WrittenDisk {
    /// The path of the device or the file.
    target: String,
    /// Null for a file.
    device: Option<WrittenDevice>,
    /// The bytes of the image that are not zeros; null if no image was written.
    copied_bytes: Option<u64>,
    /// Whether parameters that the image or the disk had were replaced.
    replaced_parameters: bool,
    /// What the machine will do; null if there are no parameters.
    parameters: Option<CheckedParameters>,
    #[serde(skip)]
    next: String,
}

#[derive(Debug, Serialize)]
struct WrittenDevice {
    name: String,
    model: Option<String>,
    serial: Option<String>,
    size_bytes: u64,
    removable: bool,
}

impl From<&Device> for WrittenDevice {
    fn from(device: &Device) -> Self {
        Self {
            name: device.name.clone(),
            model: device.model.clone(),
            serial: device.serial.clone(),
            size_bytes: device.size,
            removable: device.is_removable,
        }
    }
}

impl WrittenDisk {
    /// `parameters` are those that a machine reads now.
    pub(crate) fn new(target: &Target, done: &Done, parameters: Option<&Parameters>) -> Self {
        Self {
            target: target.path().display().to_string(),
            device: match target {
                Target::Device(device) => Some(device.into()),
                Target::File { .. } => None,
            },
            copied_bytes: done.copied,
            replaced_parameters: done.has_replaced,
            parameters: parameters.map(CheckedParameters::from),
            next: next(parameters, done.is_installer),
        }
    }

    /// As text for people.
    pub(crate) fn text(&self) -> String {
        let mut text = match self.copied_bytes {
            Some(bytes) => format!("{}: image written, {}\n", self.target, size_text(bytes)),
            None => String::new(),
        };
        let parameters = match (&self.parameters, self.replaced_parameters) {
            (None, _) => "no parameters",
            (Some(_), true) => "parameters written; they replace those that were there",
            (Some(_), false) if self.copied_bytes.is_none() => "parameters written",
            (Some(_), false) => "with parameters",
        };
        text.push_str(&format!("{}: {parameters}\n{}\n", self.target, self.next));
        text
    }
}

/// What to do with it.
fn next(parameters: Option<&Parameters>, is_installer: bool) -> String {
    let then = match parameters.map(|parameters| &parameters.cluster) {
        None => {
            return "  give it parameters with `hearthctl image set-parameters`, unless the machine \
                    gets them from elsewhere"
                .to_owned();
        }
        Some(Cluster::Bootstrap(_)) => {
            "it founds the cluster: then `hearthctl cluster take-ownership --endpoint ADDRESS`"
        }
        Some(Cluster::Register(_)) => {
            "it shows its public key and waits: then `hearthctl node approve PUBLIC-KEY`"
        }
    };
    let asks = parameters.is_some_and(|parameters| parameters.install.is_none());
    let what = match (is_installer, asks) {
        (false, _) => "by UEFI",
        (true, false) => "by UEFI, and it installs the node on a disk",
        (true, true) => "by UEFI, and it asks on which disk to install the node",
    };
    format!("  boot the machine from it, {what}; {then}")
}
