//! Why a bundle could not be built: the step, with its cause.

use std::path::PathBuf;

use hearth_build::cache::CacheError;
use hearth_build::command::CommandError;
use hearth_build::files::FileError;
use hearth_build::interrupt::Interrupted;
use hearth_programs::ProgramsError;

use crate::bundle::InvalidBundle;
use crate::inputs::InputsError;
use crate::packages::PackagesError;
use crate::rootfs::ImageError;
use crate::tree::TreeError;

/// Why a bundle could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A cache operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Interrupted between two programs.
    #[error("interrupted")]
    Interrupted(#[from] Interrupted),
    /// The inputs are not available.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// Its programs could not be compiled.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// Its tree could not be laid out.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A package could not be unpacked.
    #[error(transparent)]
    Packages(#[from] PackagesError),
    /// An image could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An entry of the cache is incomplete.
    #[error("the cache entry is corrupt: remove {}", entry.display())]
    Damaged {
        /// Its folder.
        entry: PathBuf,
        /// The underlying error.
        source: InvalidBundle,
    },
    /// An expected file of a package could not be copied.
    #[error("cannot copy {path} from package {package}")]
    NotTaken {
        /// The file, by its path in the package.
        path: String,
        /// The package.
        package: String,
        /// The underlying I/O error.
        source: std::io::Error,
    },
    /// A second build from the same inputs gave a different result.
    #[error("the bundle is not reproducible; these files differ: {}", .0.join(", "))]
    NotTheSame(Vec<String>),
}
