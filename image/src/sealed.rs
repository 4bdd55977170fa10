//! Sealed partitions: a read-only file system with dm-verity's tree behind it, in one file, and the hash that vouches for
//! all of it.

use std::io;
use std::path::Path;

use crate::disk::Seed;
use crate::erofs::{self, ErofsError, Progress, Tree, Volume};
use crate::output::{Output, OutputError};
use crate::verity::{self, RootHash};

/// Why nothing was sealed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum SealError {
    #[error("cannot make the file system")]
    Erofs(#[from] ErofsError),
    #[error("cannot write the hash tree")]
    Verity(#[source] io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// What has to be known of a sealed file, in a place that is trusted, to open it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// Of [`verity`]'s tree.
    pub root_hash: RootHash,
    /// Blocks of 4096 bytes before the tree.
    pub blocks: u64,
}

/// Seals a tree into `destination`. `name` becomes the volume's; its UUID comes of name and content.
pub fn seal(
    tree: &Tree,
    name: &str,
    destination: &Path,
    progress: Progress<'_>,
) -> Result<Sealed, SealError> {
    let seed = Seed::of(&[name.as_bytes(), &tree.digest()?]);
    let volume = Volume {
        name: name.to_owned(),
        uuid: seed.guid("volume").into_bytes(),
    };
    let mut output = Output::create(destination)?;
    let blocks = erofs::write(tree, &volume, output.file(), progress)?;
    let root_hash = verity::append(output.file(), blocks).map_err(SealError::Verity)?;
    output.publish()?;
    Ok(Sealed { root_hash, blocks })
}
