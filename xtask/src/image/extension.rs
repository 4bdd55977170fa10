//! Extensions of an image: a folder's content as a sealed partition, and the word of the command line that admits it.
//!
//! Sealing compresses as hard as it can, which takes a minute for Kubernetes, so the result is cached by content: of the
//! folder, the name, and [`RECIPE`]. A test holds the hash of a small one, so that nobody changes the writer, or the
//! compressor under it, and forgets the number.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use hearth_api::extension::{Admitted, ExtensionError, ExtensionName};
use hearth_api::names;
use hearth_build::cache::Cache;
use hearth_image::erofs::{CHUNK, Tree};
use hearth_image::layout;
use hearth_image::output::{self, write_if_changed};
use hearth_image::sealed::{Sealed, seal};
use ring::digest::{Context as Digest, SHA256};

use crate::command::check_interrupt;
use crate::kubernetes;
use crate::target;
use crate::ui::Ui;

/// Version of what a sealed folder looks like, part of the cache's key: to be raised when the same folder gives other bytes.
const RECIPE: u32 = 2;

/// The sealed file, in an entry of the cache.
const FILE: &str = "partition";
/// The word that admits it.
const WORD: &str = "word";

/// An extension that is asked for: `NAME` or `NAME=DIR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    name: ExtensionName,
    folder: Option<PathBuf>,
}

impl FromStr for Request {
    type Err = ExtensionError;

    fn from_str(text: &str) -> Result<Request, ExtensionError> {
        let (name, folder) = match text.split_once('=') {
            Some((name, folder)) => (name, Some(folder.into())),
            None => (text, None),
        };
        Ok(Request {
            name: name.parse()?,
            folder,
        })
    }
}

impl Request {
    /// Its name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The extension, sealed where the cache does not have it.
    pub fn ensure(&self, ui: &Ui) -> Result<Extension> {
        match &self.folder {
            // One that lacks something is refused here, not by the node.
            folder if self.name() == names::EXTENSION_KUBERNETES => {
                let bundle = kubernetes::ensure(ui, folder.as_deref())?;
                cached(ui, &self.name, &bundle.root)
            }
            Some(folder) => cached(ui, &self.name, folder),
            None => bail!(
                "nothing is known of an extension {0}: give its folder, --extension {0}=DIR",
                self.name
            ),
        }
    }
}

/// An extension that is sealed.
#[derive(Debug, Clone)]
pub struct Extension {
    /// What the kernel's command line says of it.
    pub admitted: Admitted,
    /// The partition's bytes.
    pub file: PathBuf,
    /// Of what it was made.
    folder: PathBuf,
}

impl Extension {
    /// As a part of an image.
    pub fn part(&self) -> layout::Extension {
        layout::Extension {
            label: self.admitted.name.label(),
            file: self.file.clone(),
            word: self.admitted.to_string(),
        }
    }

    /// The same once more, past the cache.
    pub fn again(&self, ui: &Ui, into: &Path) -> Result<Extension> {
        let name = &self.admitted.name;
        let admitted = write(ui, name, &tree(&self.folder)?, &into.join(FILE))?;
        Ok(Extension {
            admitted,
            file: into.join(FILE),
            folder: self.folder.clone(),
        })
    }
}

/// The extension of the tests, `sample`: a few files of every kind, made to be recognised by whoever reads them.
pub fn sample() -> Result<Request> {
    let folder = target::folder("sample-extension")?;
    for inner in ["bin", "data"] {
        let inner = folder.join(inner);
        fs::create_dir_all(&inner).with_context(|| format!("cannot create {}", inner.display()))?;
    }
    write_if_changed(&folder.join("VERSION"), b"sample 1\n")?;
    let link = folder.join("bin/lines");
    if fs::read_link(&link).is_err() {
        std::os::unix::fs::symlink("../data/lines", &link)
            .with_context(|| format!("cannot create {}", link.display()))?;
    }
    // Lines that are their own numbers, many chunks of them.
    let lines: String = (0..100_000_u32).map(|n| format!("{n:015}\n")).collect();
    write_if_changed(&folder.join("data/lines"), lines.as_bytes())?;
    // Random bytes and then their complements, which nothing compresses.
    let mut state = 4_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_le_bytes()[7]
    };
    let mut noise: Vec<u8> = (0..300_000).map(|_| random()).collect();
    noise.extend_from_within(..);
    noise[300_000..].iter_mut().for_each(|byte| *byte = !*byte);
    write_if_changed(&folder.join("data/noise"), &noise)?;
    Ok(Request {
        name: "sample".parse()?,
        folder: Some(folder),
    })
}

fn cached(ui: &Ui, name: &ExtensionName, folder: &Path) -> Result<Extension> {
    let cache = Cache::of_user("extension")?;
    let tree = tree(folder)?;
    let digest = tree
        .digest()
        .with_context(|| format!("cannot use {}", folder.display()))?;
    let mut key = Digest::new(&SHA256);
    key.update(&RECIPE.to_le_bytes());
    key.update(&digest);
    key.update(name.as_str().as_bytes());
    let key = hex::encode(&key.finish().as_ref()[..16]);
    let entry = cache.ensure(ui, &key, |_, scratch| -> Result<PathBuf> {
        let entry = scratch.join("entry");
        fs::create_dir(&entry).with_context(|| format!("cannot create {}", entry.display()))?;
        let admitted = write(ui, name, &tree, &entry.join(FILE))?;
        output::write(&entry.join(WORD), format!("{admitted}\n").as_bytes())?;
        Ok(entry)
    })?;
    let word = entry.join(WORD);
    let text =
        fs::read_to_string(&word).with_context(|| format!("cannot read {}", word.display()))?;
    Ok(Extension {
        admitted: text.trim_end().parse()?,
        file: entry.join(FILE),
        folder: folder.to_owned(),
    })
}

fn tree(folder: &Path) -> Result<Tree> {
    Tree::of_folder(folder).with_context(|| format!("cannot use {}", folder.display()))
}

fn write(ui: &Ui, name: &ExtensionName, tree: &Tree, file: &Path) -> Result<Admitted> {
    let task = ui.counted_task(format!("sealing extension {name}"), tree.length() / CHUNK);
    let sealed = seal(tree, name.as_str(), file, &|_, _| {
        task.step();
        check_interrupt().is_ok()
    });
    check_interrupt()?;
    let Sealed { root_hash, blocks } =
        sealed.with_context(|| format!("cannot seal extension {name}"))?;
    task.done();
    Ok(Admitted {
        name: name.clone(),
        root_hash,
        blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_a_name_and_perhaps_a_folder() {
        let request = |text: &str| text.parse::<Request>();
        assert_eq!(request("kubernetes").unwrap().folder, None);
        let with = request("a-1=/some/folder=1").unwrap();
        assert_eq!(with.name(), "a-1");
        assert_eq!(with.folder, Some("/some/folder=1".into()));
        assert!(request("=x").is_err());
        assert!(request("A").is_err());
    }

    /// If this fails because the writer or zstd has changed, [`RECIPE`] must be raised with the hash.
    #[test]
    fn the_same_folder_gives_the_bytes_that_this_recipe_gives() {
        let folder = tempfile::tempdir().unwrap();
        let text: Vec<u8> = (0..200_000_u32)
            .flat_map(|n| (n / 7).to_le_bytes())
            .collect();
        fs::write(folder.path().join("text"), text).unwrap();
        std::os::unix::fs::symlink("text", folder.path().join("link")).unwrap();
        let ui = Ui::new(false);
        let name = "small".parse().unwrap();
        let file = folder.path().with_extension("sealed");
        let admitted = write(&ui, &name, &tree(folder.path()).unwrap(), &file).unwrap();
        fs::remove_file(file).unwrap();
        assert_eq!(
            (RECIPE, hex::encode(admitted.root_hash), admitted.blocks),
            (
                2,
                "c18077da0760ed64a9aa33356d53dc1c320a7e56a96880900bd47f894b7da312".to_owned(),
                11
            )
        );
    }
}
