//! Why there is no bundle: the step, with its cause.

use std::path::PathBuf;

use hearth_build::cache::CacheError;
use hearth_build::command::CommandError;
use hearth_build::files::{FileError, Log};
use hearth_build::interrupt::Interrupted;

use crate::bundle::InvalidBundle;
use crate::compile::CompileError;
use crate::inputs::InputsError;
use crate::packages::PackagesError;
use crate::rootfs::ImageError;
use crate::tree::TreeError;

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The cache gives nothing.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A program was not to be run, or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The file system refused.
    #[error(transparent)]
    File(#[from] FileError),
    /// Interrupted between two programs.
    #[error("interrupted")]
    Interrupted(#[from] Interrupted),
    /// What it is made of is not there.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// Its programs were not compiled.
    #[error("the whole log is {}", log.display())]
    NotCompiled {
        /// What the compiler said.
        log: PathBuf,
        /// Why.
        source: CompileError,
    },
    /// Its tree was not laid out.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A package was not unpacked.
    #[error(transparent)]
    Packages(#[from] PackagesError),
    /// An image was not made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An entry of the cache is not whole.
    #[error("the cache is damaged: remove {}", entry.display())]
    Damaged {
        /// Its folder.
        entry: PathBuf,
        /// What is wrong with it.
        source: InvalidBundle,
    },
    /// A file that a package should hold.
    #[error("cannot take {path} out of the package {package}")]
    NotTaken {
        /// The file.
        path: String,
        /// The package.
        package: String,
        /// Why.
        source: std::io::Error,
    },
    /// The same inputs gave something else.
    #[error("built twice, the bundle is not the same: {}", .0.join(", "))]
    NotTheSame(Vec<String>),
}

impl BuildError {
    pub(crate) fn not_compiled(log: &Log, source: CompileError) -> BuildError {
        BuildError::NotCompiled {
            log: log.path().to_owned(),
            source,
        }
    }
}
