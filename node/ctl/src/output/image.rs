//! Trusted images as they are printed.

use hearth_api::v1;
use serde::Serialize;

use super::rfc3339;
use crate::table::Table;

/// An image that nodes may boot. Digests are hexadecimal.
#[derive(Debug, Serialize)]
pub(crate) struct Image {
    /// The value of PCR 11, by which the image is known.
    parts: String,
    /// Unix time in seconds.
    trusted_at: i64,
    programs: Vec<String>,
    command_lines: Vec<String>,
}

impl From<&v1::TrustedImage> for Image {
    fn from(image: &v1::TrustedImage) -> Self {
        Self {
            parts: hex::encode(&image.parts),
            trusted_at: image.trusted_at,
            programs: image.programs.iter().map(hex::encode).collect(),
            command_lines: image.command_lines.iter().map(hex::encode).collect(),
        }
    }
}

/// Images as a table.
pub(crate) fn image_table(images: &[Image]) -> Table {
    let mut table = Table::new(&["IMAGE", "TRUSTED SINCE"]);
    for image in images {
        let since = rfc3339(image.trusted_at.saturating_mul(1000));
        table.row([image.parts.clone(), since]);
    }
    table
}
