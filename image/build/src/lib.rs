//! What the builders of an image's costly parts share: the kernel (`image/kernel`), the bundle of Kubernetes' programs
//! (`image/bundle`), and whoever else runs programs and keeps what they made.
//!
//! - [`command`]: external programs, none of which is ever left behind; [`interrupt`]: how ^C reaches them.
//! - [`cache`]: results by a hash of their inputs, in the user's cache folder.
//! - [`cargo`]: programs compiled from a checkout, static ones reproducibly.
//! - [`source`]: revision and time of a checkout.
//! - [`apt`]: Debian packages, fetched and not installed.
//! - [`host`]: packages that this machine lacks, and how they are installed.
//! - [`files`]: the file system's calls, with errors that name the step and the path.
//! - [`progress`]: what a builder tells whoever waits for it.
//!
//! Nothing here prints, asks or knows what it builds for. A builder is given a [`progress::Progress`] and returns an error;
//! what becomes of both on a terminal is its caller's affair.

pub mod apt;
pub mod cache;
pub mod cargo;
pub mod command;
pub mod files;
pub mod host;
pub mod interrupt;
pub mod progress;
pub mod source;
