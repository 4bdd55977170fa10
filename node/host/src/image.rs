//! The identity of the running image, which the image builder wrote into `/etc/os-release`.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const PATH: &str = "/etc/os-release";

/// The running image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// `IMAGE_VERSION`, as shown to operators.
    pub version: String,
    /// `VARIANT_ID`: empty in a release image, otherwise `debug` or `test`.
    pub variant: String,
    /// `HEARTH_BUILD_TIME`: the clock is never set to an earlier time.
    pub build_time: SystemTime,
}

/// Why the image cannot be identified. This is an error of the image builder.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file cannot be read.
    #[error("cannot read {PATH}: {0}")]
    Unreadable(#[source] std::io::Error),
    /// A field is missing or malformed.
    #[error("{PATH}: {field}: expected {wanted}, got {found:?}")]
    Field {
        /// The name of the field.
        field: &'static str,
        /// The expected value.
        wanted: &'static str,
        /// The actual value; empty if the field is missing.
        found: String,
    },
}

impl Image {
    /// Reads the file of the running system.
    pub fn of_system() -> Result<Self, ImageError> {
        Self::parse(&fs::read_to_string(PATH).map_err(ImageError::Unreadable)?)
    }

    fn parse(text: &str) -> Result<Self, ImageError> {
        let field = |name: &str| {
            let prefix = format!("{name}=");
            let value = text.lines().find_map(|line| line.strip_prefix(&prefix));
            value
                .unwrap_or_default()
                .trim_matches(['"', '\''])
                .to_owned()
        };
        let version = field("IMAGE_VERSION");
        if version.is_empty() {
            return Err(ImageError::Field {
                field: "IMAGE_VERSION",
                wanted: "a version",
                found: version,
            });
        }
        let build_time = field("HEARTH_BUILD_TIME");
        let Ok(seconds) = build_time.parse() else {
            return Err(ImageError::Field {
                field: "HEARTH_BUILD_TIME",
                wanted: "Unix seconds",
                found: build_time,
            });
        };
        Ok(Self {
            version,
            variant: field("VARIANT_ID"),
            build_time: UNIX_EPOCH + Duration::from_secs(seconds),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_builder_writes() {
        let text = "NAME=Hearth\nIMAGE_VERSION=\"0.1.0\"\nVARIANT_ID=debug\nHEARTH_BUILD_TIME=1700000000\n";
        let image = Image::parse(text).unwrap();
        assert_eq!(image.version, "0.1.0");
        assert_eq!(image.variant, "debug");
        assert_eq!(
            image.build_time,
            UNIX_EPOCH + Duration::from_secs(1_700_000_000)
        );
    }

    #[test]
    fn says_which_field_is_wrong() {
        let error = Image::parse("IMAGE_VERSION=1\nHEARTH_BUILD_TIME=yesterday\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"/etc/os-release: HEARTH_BUILD_TIME: expected Unix seconds, got "yesterday""#
        );
        assert!(
            Image::parse("")
                .unwrap_err()
                .to_string()
                .contains("IMAGE_VERSION")
        );
    }
}
