//! Extensions of an image: a folder's content, sealed, and the kernel command line argument that admits
//! it.
//!
//! Sealing uses the highest compression, which takes a minute for Kubernetes, so the result is cached by content: of
//! the folder, the name, and `RECIPE`. A test compares the hash of a small extension, so that a change of the writer,
//! or of the compressor below it, cannot be made without raising the number.

use std::path::{Path, PathBuf};

use hearth_api::extension::{Admitted, ExtensionError, ExtensionName};
use hearth_build::cache::{Cache, CacheError};
use hearth_build::files::{self, FileError};
use hearth_build::interrupt::{Interrupted, check_interrupt};
use hearth_build::progress::{Length, Progress};
use hearth_image::erofs::{CHUNK, ErofsError, Tree};
use hearth_image::sealed::{SealError, Sealed, seal};
use hearth_image::{layout, recipe};
use ring::digest::{Context as Digest, SHA256};

/// Version of the sealed format and of the entries of the cache, part of their key: must be raised when the same folder
/// gives other bytes.
const RECIPE: u32 = 4;

/// The sealed file, in an entry of the cache.
const FILE: &str = "content";
/// The argument that admits it, in an entry of the cache.
const WORD: &str = "word";

/// Why an extension could not be sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealingError {
    /// The folder has content that a node's file system cannot hold.
    #[error("cannot make an extension of {}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The underlying error.
        source: ErofsError,
    },
    /// It could not be written.
    #[error("cannot seal extension {name}")]
    NotSealed {
        /// The extension.
        name: ExtensionName,
        /// The underlying error.
        source: SealError,
    },
    /// The argument in the cache is malformed.
    #[error(transparent)]
    Word(#[from] ExtensionError),
    /// A cache operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Interrupted while sealing.
    #[error("interrupted")]
    Interrupted(#[from] Interrupted),
}

/// A sealed extension.
#[derive(Debug, Clone)]
pub struct Extension {
    /// The argument for the kernel command line, if it is the first in its slot.
    pub admitted: Admitted,
    /// Its bytes.
    pub file: PathBuf,
    /// The folder it was made of.
    folder: PathBuf,
}

impl Extension {
    /// The extensions as parts of an image, which has them one after the other in a slot.
    pub fn parts(extensions: &[Extension]) -> Result<Vec<recipe::Extension>, SealingError> {
        let length = |extension: &Extension| files::length(&extension.file);
        let lengths = extensions
            .iter()
            .map(length)
            .collect::<Result<Vec<u64>, _>>()?;
        let part = |(extension, start): (&Extension, u64)| recipe::Extension {
            file: extension.file.clone(),
            word: Admitted {
                start,
                ..extension.admitted.clone()
            }
            .to_string(),
        };
        Ok(extensions
            .iter()
            .zip(layout::starts(lengths))
            .map(part)
            .collect())
    }

    /// The content of this folder under this name, sealed if it is not in the cache.
    pub fn ensure(
        progress: &dyn Progress,
        name: &ExtensionName,
        folder: &Path,
    ) -> Result<Extension, SealingError> {
        let cache = Cache::of_user("extension")?;
        let tree = tree(folder)?;
        let key = key(name, &tree).map_err(unusable(folder))?;
        let entry = cache.ensure(progress, &key, |_, scratch| {
            let entry = scratch.join("entry");
            files::create_dir(&entry)?;
            let admitted = write(progress, name, &tree, &entry.join(FILE))?;
            files::write(&entry.join(WORD), format!("{admitted}\n"))?;
            Ok::<_, SealingError>(entry)
        })?;
        let word = files::read_text(&entry.join(WORD))?;
        Ok(Extension {
            admitted: word.trim_end().parse()?,
            file: entry.join(FILE),
            folder: folder.to_owned(),
        })
    }

    /// Seals the folder again, bypassing the cache.
    pub fn again(&self, progress: &dyn Progress, into: &Path) -> Result<Extension, SealingError> {
        let name = &self.admitted.name;
        let admitted = write(progress, name, &tree(&self.folder)?, &into.join(FILE))?;
        Ok(Extension {
            admitted,
            file: into.join(FILE),
            folder: self.folder.clone(),
        })
    }
}

fn key(name: &ExtensionName, tree: &Tree) -> Result<String, ErofsError> {
    let digest = tree.digest()?;
    let mut key = Digest::new(&SHA256);
    key.update(&RECIPE.to_le_bytes());
    key.update(&digest);
    key.update(name.as_str().as_bytes());
    Ok(hex::encode(&key.finish().as_ref()[..16]))
}

fn tree(folder: &Path) -> Result<Tree, SealingError> {
    Tree::of_folder(folder).map_err(unusable(folder))
}

fn unusable(folder: &Path) -> impl FnOnce(ErofsError) -> SealingError {
    let folder = folder.to_owned();
    move |source| SealingError::Folder { folder, source }
}

fn write(
    progress: &dyn Progress,
    name: &ExtensionName,
    tree: &Tree,
    file: &Path,
) -> Result<Admitted, SealingError> {
    let task = progress.start(
        &format!("sealing extension {name}"),
        Length::Steps(tree.length() / CHUNK),
    );
    let sealed = seal(tree, name.as_str(), file, &|_, _| {
        task.step();
        check_interrupt().is_ok()
    });
    check_interrupt()?;
    let Sealed { root_hash, blocks } = sealed.map_err(|source| SealingError::NotSealed {
        name: name.clone(),
        source,
    })?;
    task.done();
    Ok(Admitted {
        name: name.clone(),
        root_hash,
        blocks,
        start: 0,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_build::progress::Silent;

    use super::*;

    /// If this fails because the writer or zstd has changed, [`RECIPE`] must be raised together with the hash.
    #[test]
    fn the_same_folder_gives_the_bytes_that_this_recipe_gives() {
        let folder = tempfile::tempdir().unwrap();
        let text: Vec<u8> = (0..200_000_u32)
            .flat_map(|n| (n / 7).to_le_bytes())
            .collect();
        fs::write(folder.path().join("text"), text).unwrap();
        std::os::unix::fs::symlink("text", folder.path().join("link")).unwrap();
        let name = "small".parse().unwrap();
        let file = folder.path().with_extension("sealed");
        let admitted = write(&Silent, &name, &tree(folder.path()).unwrap(), &file).unwrap();
        fs::remove_file(file).unwrap();
        assert_eq!(
            (RECIPE, hex::encode(admitted.root_hash), admitted.blocks),
            (
                4,
                "93f81eadf63710d7b83152821a8266d21236afa8c539101147bcd09ddee8c9cf".to_owned(),
                11
            )
        );
    }
}
