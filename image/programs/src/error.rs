//! Why programs could not be built: the step, with its cause.

use std::path::PathBuf;

use hearth_build::apt::AptError;
use hearth_build::cache::CacheError;
use hearth_build::command::CommandError;
use hearth_build::files::FileError;

/// Why programs could not be built, compared or updated.
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// A cache operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is no Go.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// A go.mod does not require the project.
    #[error("{}: expected a requirement of {module}, found none", file.display())]
    NotRequired {
        /// The go.mod.
        file: PathBuf,
        /// The project's Go module.
        module: &'static str,
    },
    /// Upstream has changed a file that is compiled in another form.
    #[error(
        "{}: expected the file with SHA-256 {expected}, found {found}: see whether our replacement is still needed",
        file.display()
    )]
    Replaced {
        /// Upstream's file.
        file: PathBuf,
        /// SHA-256 of the file that ours was written for.
        expected: &'static str,
        /// SHA-256 of this file.
        found: String,
    },
    /// A module could not be compiled.
    #[error("cannot build {name}; the full log is {}", log.display())]
    NotBuilt {
        /// The module.
        name: &'static str,
        /// The log of the build.
        log: PathBuf,
        /// The underlying error.
        source: Box<ProgramsError>,
    },
    /// A program would need a loader and libraries, which the node does not have.
    #[error("{name} is not linked statically: it needs the loader {loader}")]
    Dynamic {
        /// The program.
        name: &'static str,
        /// The loader that it names.
        loader: String,
    },
    /// A licence could not be determined.
    #[error(transparent)]
    Licence(#[from] LicenceError),
    /// The bill of materials could not be made.
    #[error(transparent)]
    Sbom(#[from] SbomError),
    /// An entry of the cache is incomplete.
    #[error("the cache entry is corrupt: {file} is missing; remove {}", entry.display())]
    Damaged {
        /// Its folder.
        entry: PathBuf,
        /// The missing file.
        file: String,
    },
    /// A second build from the same inputs gave different programs.
    #[error("not reproducible; these files differ between two builds: {}", .0.join(", "))]
    NotTheSame(Vec<String>),
    /// The output of a Go command is not as expected.
    #[error("`go {command}`: expected {expected}, found {found:?}")]
    Output {
        /// The command.
        command: &'static str,
        /// What was expected in its output.
        expected: &'static str,
        /// What was found.
        found: String,
    },
}

/// Why there is no Go toolchain.
#[derive(Debug, thiserror::Error)]
pub enum ToolchainError {
    /// The pinned version is malformed.
    #[error("{}: expected a version like go1.26.8, found {found:?}", file.display())]
    Pin {
        /// The file with the pin.
        file: PathBuf,
        /// What it has.
        found: String,
    },
    /// Neither PATH nor Debian's backports have a Go that can fetch the pinned one.
    #[error(
        "Go {oldest} or newer is needed: PATH has {found}, and Debian's backports do not provide one; \
         install Go, or check that this machine's apt has the sources of Debian bookworm"
    )]
    NotFetched {
        /// The oldest usable version.
        oldest: &'static str,
        /// What PATH has.
        found: String,
        /// The underlying error.
        source: CommandError,
    },
    /// Debian's package has no go command.
    #[error("no go command in Debian's package, unpacked in {}", .0.display())]
    Empty(PathBuf),
    /// The go command could not become the pinned version.
    #[error(
        "the go command cannot provide {pinned}: it fetches that toolchain through the Go module proxy (GOPROXY)"
    )]
    NotPinned {
        /// The pinned version.
        pinned: String,
        /// The underlying error.
        source: CommandError,
    },
    /// apt could not be prepared.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache folder is not available.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Why the licence of a module could not be determined.
#[derive(Debug, thiserror::Error)]
pub enum LicenceError {
    /// The module has no file with a licence.
    #[error("{module}: no licence file in {}", folder.display())]
    NoFile {
        /// The module.
        module: String,
        /// Its folder.
        folder: PathBuf,
    },
    /// The text is none of those that are accepted.
    #[error("{module}: the text of {} is none of the accepted licences", file.display())]
    Unknown {
        /// The module.
        module: String,
        /// The file.
        file: PathBuf,
    },
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Why a bill of materials could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum SbomError {
    /// The build information of a program is malformed.
    #[error("{program}: cannot read its build information")]
    BuildInformation {
        /// The program.
        program: &'static str,
        /// The underlying error.
        source: serde_json::Error,
    },
    /// A file with a bill of materials is malformed.
    #[error("{}: not a bill of materials", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The underlying error.
        source: serde_json::Error,
    },
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}
