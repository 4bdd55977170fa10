//! The commands below `hearthctl image`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Output;

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Trust an image
    ///
    /// Under the admission policy KNOWN_IMAGES, nodes may boot trusted images
    /// only. Trust a new image before the first node boots it.
    Trust {
        /// The file measurements.json, which is beside the image; "-" for
        /// standard input
        file: PathBuf,
    },
    /// List trusted images
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Revoke an image
    ///
    /// Nodes that run it go on until they boot, or until their certificates end.
    Revoke {
        /// The image, or the beginning of its name
        image: String,
    },
    /// Write an image to a disk, a USB stick or a file
    ///
    /// Shows what the disk is and what is on it, and asks before everything on
    /// it is lost. A disk that is mounted or in use is never written. A file
    /// appears, or is replaced, when it is complete.
    ///
    /// The parameters are checked as the machine will check them, and written
    /// only if it would accept them.
    Write(Write),
    /// Write parameters to a disk, or to a file, that has an image
    ///
    /// Replaces the parameters that are there. The disk must not be in use, not
    /// by its node either.
    SetParameters(SetParameters),
}

#[derive(Debug, Args)]
pub(crate) struct Write {
    /// The image that `cargo xtask image` has built, in raw format
    pub image: PathBuf,
    /// The disk, such as /dev/sdb, or the file
    pub target: PathBuf,
    /// File with the parameters of the machine, which `hearthctl parameters`
    /// has made; "-" for standard input [default: those of the image, if it has
    /// any]
    #[arg(long, value_name = "FILE")]
    pub parameters: Option<PathBuf>,
    #[command(flatten)]
    pub sure: Sure,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct SetParameters {
    /// File with the parameters of the machine, which `hearthctl parameters`
    /// has made; "-" for standard input
    pub parameters: PathBuf,
    /// The disk, such as /dev/sdb, or the file
    pub target: PathBuf,
    #[command(flatten)]
    pub sure: Sure,
    #[command(flatten)]
    pub output: Output,
}

/// The answer to the question that is asked otherwise.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Sure {
    /// Do not ask; required where standard input is not a terminal
    #[arg(long)]
    pub yes: bool,
}
