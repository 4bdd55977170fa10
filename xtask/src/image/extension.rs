//! Extensions as specified on the command line, and the extension of the tests.

use std::fs;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use hearth_api::extension::{ExtensionError, ExtensionName};
use hearth_api::names;
use hearth_extension::Extension;
use hearth_image::output::write_if_changed;

use crate::bundle::{self, Bundle};
use crate::target;
use crate::ui::Ui;

/// A requested extension: `NAME` or `NAME=DIR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    name: ExtensionName,
    folder: Option<PathBuf>,
}

impl FromStr for Request {
    type Err = ExtensionError;

    fn from_str(text: &str) -> Result<Request, ExtensionError> {
        let (name, folder) = match text.split_once('=') {
            Some((name, folder)) => (name, Some(folder.into())),
            None => (text, None),
        };
        Ok(Request {
            name: name.parse()?,
            folder,
        })
    }
}

impl Request {
    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The extension, sealed if it is not in the cache.
    pub(crate) fn ensure(&self, ui: &Ui) -> Result<Extension> {
        match &self.folder {
            // An incomplete bundle is refused here, not by the node.
            folder if self.name() == names::EXTENSION_KUBERNETES => {
                let bundle = bundle::ensure(ui, folder.as_deref())?;
                Ok(Extension::ensure(ui, &self.name, &bundle.root)?)
            }
            Some(folder) => Ok(Extension::ensure(ui, &self.name, folder)?),
            None => bail!(
                "unknown extension {0}: give its folder with --extension {0}=DIR",
                self.name
            ),
        }
    }
}

/// A bundle of Kubernetes programs as the extension of an image.
pub(crate) fn of_bundle(bundle: &Bundle) -> Result<Request> {
    let name = names::EXTENSION_KUBERNETES;
    Ok(format!("{name}={}", bundle.root.display()).parse()?)
}

/// The extension of the tests, `sample`: a few files of every kind, with recognisable content.
pub(crate) fn sample() -> Result<Request> {
    let folder = target::folder("sample-extension")?;
    for inner in ["bin", "data"] {
        let inner = folder.join(inner);
        fs::create_dir_all(&inner).with_context(|| format!("cannot create {}", inner.display()))?;
    }
    write_if_changed(&folder.join("VERSION"), b"sample 1\n")?;
    let link = folder.join("bin/lines");
    if fs::read_link(&link).is_err() {
        std::os::unix::fs::symlink("../data/lines", &link)
            .with_context(|| format!("cannot create {}", link.display()))?;
    }
    // Lines that contain their own numbers, many chunks of them.
    let lines: String = (0..100_000_u32).map(|n| format!("{n:015}\n")).collect();
    write_if_changed(&folder.join("data/lines"), lines.as_bytes())?;
    // Random bytes followed by their complements, which cannot be compressed.
    let mut state = 4_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_le_bytes()[7]
    };
    let mut noise: Vec<u8> = (0..300_000).map(|_| random()).collect();
    noise.extend_from_within(..);
    noise[300_000..].iter_mut().for_each(|byte| *byte = !*byte);
    write_if_changed(&folder.join("data/noise"), &noise)?;
    Ok(Request {
        name: "sample".parse()?,
        folder: Some(folder),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_a_name_and_perhaps_a_folder() {
        let request = |text: &str| text.parse::<Request>();
        assert_eq!(request("kubernetes").unwrap().folder, None);
        let with = request("a-1=/some/folder=1").unwrap();
        assert_eq!(with.name(), "a-1");
        assert_eq!(with.folder, Some("/some/folder=1".into()));
        assert!(request("=x").is_err());
        assert!(request("A").is_err());
    }
}
