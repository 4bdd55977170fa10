//! Shared by the builders of an image's costly parts: the kernel (`image/kernel`), the bundle of Kubernetes programs
//! (`image/bundle`), and everything else that runs programs and keeps their results.
//!
//! - [`command`]: external programs, none of which is ever left running; [`interrupt`]: how ^C reaches them.
//! - [`cache`]: results by a hash of their inputs, in the user's cache folder.
//! - [`cargo`]: programs compiled from a checkout, static ones reproducibly.
//! - [`source`]: revision and time of a checkout.
//! - [`apt`]: Debian packages, fetched but not installed.
//! - [`host`]: packages that this machine lacks, and how they are installed.
//! - [`files`]: file system calls, with errors that name the step and the path.
//! - [`progress`]: how a builder reports its progress.
//!
//! Nothing here prints, prompts, or knows what it builds for. A builder gets a [`progress::Progress`] and returns an
//! error; how both are shown on a terminal is up to its caller.

pub mod apt;
pub mod cache;
pub mod cargo;
pub mod command;
pub mod files;
pub mod host;
pub mod interrupt;
pub mod progress;
pub mod source;
