//! Kubernetes objects in YAML or JSON, as JSON for the parameters of a cluster's first node.
//!
//! kubectl reads them, so that they mean here what they mean to it: numbers with a leading zero, lists, several objects
//! in one file. A change of labels that changes nothing is what makes it print all objects without asking a cluster.

use std::path::{Path, PathBuf};

use hearth_api::manifests::{Manifest, ManifestError};
use hearth_qemu::command::CommandLine;
use serde_json::{Deserializer, Value as Json};

use crate::tool::{self, ToolError};

/// A label that no object has, to be removed.
const NO_LABEL: &str = "hearth.dev/none-";

/// Why objects were not read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestsError {
    /// kubectl has not read a file.
    #[error("cannot read {}", path.display())]
    Kubectl {
        /// The file.
        path: PathBuf,
        /// kubectl's error.
        source: ToolError,
    },
    /// kubectl has printed something else than JSON.
    #[error("expected JSON from kubectl for {}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The underlying error.
        source: serde_json::Error,
    },
    /// A node would not accept them.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

/// The objects in these files, in their order, as nodes accept them.
///
/// # Errors
/// If kubectl cannot read a file, or nodes would not accept the objects.
pub async fn read(kubectl: &Path, files: &[PathBuf]) -> Result<Vec<String>, ManifestsError> {
    let mut objects = Vec::new();
    for path in files {
        let mut label = CommandLine::new(kubectl);
        label
            .arg("label")
            .arg("--local")
            .option("--output", "json")
            .option("--filename", path)
            .arg(NO_LABEL);
        let path = path.clone();
        let printed = match tool::run(&label).await {
            Ok(printed) => printed,
            Err(source) => return Err(ManifestsError::Kubectl { path, source }),
        };
        for object in Deserializer::from_str(&printed).into_iter::<Json>() {
            match object {
                Ok(object) => objects.push(object.to_string()),
                Err(source) => return Err(ManifestsError::Json { path, source }),
            }
        }
    }
    Manifest::parse_all(&objects)?;
    Ok(objects)
}
