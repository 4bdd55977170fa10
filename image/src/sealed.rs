//! Sealed partitions: a read-only file system followed by dm-verity's hash tree, in one file, and the root hash that
//! authenticates all of it.

use std::io;
use std::path::Path;

use crate::disk::Seed;
use crate::erofs::{self, ErofsError, Progress, Tree, Volume};
use crate::output::{Output, OutputError};
use crate::verity::{self, RootHash};

/// Why a partition could not be sealed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum SealError {
    #[error("cannot make the file system")]
    Erofs(#[from] ErofsError),
    #[error("cannot write the hash tree")]
    Verity(#[source] io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// What a trusted place has to hold for opening a sealed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// Root hash of [`verity`]'s tree.
    pub root_hash: RootHash,
    /// Number of data blocks of 4096 bytes, which the tree follows.
    pub blocks: u64,
}

/// Seals a tree into `destination`. `name` is the name of the volume; its UUID is derived from name and content.
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
