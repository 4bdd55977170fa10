//! How an entry of the cache is laid out and named.

use std::path::{Path, PathBuf};

use hearth_build::cache;
use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError};
use hearth_build::progress::Progress;

use crate::bundle::Bundle;
use crate::error::BuildError;
use crate::inputs::Inputs;
use crate::rootfs;
use crate::tree::Compiled;

/// Version of the build steps, part of the cache key: must be raised when a change of the steps changes the result.
const RECIPE: u32 = 3;

/// The part of an entry that becomes the extension.
pub(crate) const ROOT: &str = "root";

/// The bill of materials of that part.
pub(crate) const SBOM: &str = "sbom.cdx.json";

/// The bundle in a finished entry.
pub(crate) fn bundle(entry: &Path) -> Result<Bundle, BuildError> {
    Bundle::read(&entry.join(ROOT)).map_err(|source| BuildError::Damaged {
        entry: entry.to_owned(),
        source,
    })
}

/// Creates the folders for intermediate results and for the entry.
pub(crate) fn folders(scratch: &Path) -> Result<[PathBuf; 2], FileError> {
    let all = ["stage", "entry"].map(|name| scratch.join(name));
    for folder in &all {
        files::create_dir(folder)?;
    }
    Ok(all)
}

/// The versions of the C compiler and its linker, as they print them.
pub(crate) fn compiler(progress: &dyn Progress) -> Result<String, CommandError> {
    let mut tools = String::new();
    for tool in ["gcc", "ld"] {
        let version = Cmd::new(tool)
            .arg("--version")
            .env("LC_ALL", "C")
            .output(progress)?;
        tools += version.lines().next().unwrap_or_default();
        tools += "\n";
    }
    Ok(tools)
}

/// The key of an entry, which covers everything that goes into a bundle.
pub(crate) fn key(inputs: &Inputs, compiled: &Compiled, compiler: &str) -> String {
    let programs = compiled.all().map(|(_, built)| built.key());
    key_of(inputs, &programs.join(" "), compiler)
}

fn key_of(inputs: &Inputs, programs: &str, compiler: &str) -> String {
    let recipe = RECIPE.to_string();
    cache::key([
        recipe.as_str(),
        inputs.record(),
        programs,
        rootfs::PAUSE,
        compiler,
    ])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_key_covers_what_goes_in() {
        let dir = tempfile::tempdir().unwrap();
        let inputs = |name: &str| {
            fs::write(dir.path().join(name), name).unwrap();
            Inputs::of_folder(dir.path()).unwrap()
        };
        let one = inputs("a_1_amd64.deb");
        let key_of_one = key_of(&one, "k c", "gcc 12");
        assert_eq!(key_of(&one, "k c", "gcc 12"), key_of_one);
        assert_ne!(key_of(&one, "k c", "gcc 13"), key_of_one);
        assert_ne!(key_of(&one, "k d", "gcc 12"), key_of_one);
        let two = inputs("b_1_amd64.deb");
        assert_ne!(key_of(&two, "k c", "gcc 12"), key_of_one);
    }
}
