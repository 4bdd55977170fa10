//! Compares two trees by what a node sees of them.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hearth_build::files::{self, FileError};
use hearth_build::interrupt::check_interrupt;

use crate::error::BuildError;

/// Adds the paths below `at` at which the two trees differ in kind, mode or content.
pub(crate) fn compare(
    one: &Path,
    two: &Path,
    at: &Path,
    different: &mut Vec<String>,
) -> Result<(), BuildError> {
    check_interrupt()?;
    let (first, second) = (one.join(at), two.join(at));
    let kind = |path: &Path| {
        let metadata = path.symlink_metadata().ok()?;
        Some((metadata.file_type(), metadata.permissions().mode()))
    };
    let (left, right) = (kind(&first), kind(&second));
    let name = || at.display().to_string();
    if left != right {
        different.push(name());
        return Ok(());
    }
    let Some((kind, _)) = left else {
        return Ok(());
    };
    if kind.is_dir() {
        let mut names = children(&first)?;
        names.extend(children(&second)?);
        names.sort();
        names.dedup();
        for child in names {
            compare(one, two, &at.join(child), different)?;
        }
    } else if kind.is_symlink() {
        if std::fs::read_link(&first).ok() != std::fs::read_link(&second).ok() {
            different.push(name());
        }
    } else if files::read(&first)? != files::read(&second)? {
        different.push(name());
    }
    Ok(())
}

fn children(folder: &Path) -> Result<Vec<OsString>, FileError> {
    let entries = files::entries(folder)?;
    Ok(entries.iter().map(|entry| entry.file_name()).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder with a few programs.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in ["bin/du", "bin/find", "bin/nice"] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, file).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        dir
    }

    #[test]
    fn trees_differ_by_kind_mode_link_and_content() {
        let trees = [tree(), tree()];
        let differences = || {
            let mut different = Vec::new();
            compare(
                trees[0].path(),
                trees[1].path(),
                Path::new(""),
                &mut different,
            )
            .unwrap();
            different
        };
        assert_eq!(differences(), Vec::<String>::new());
        let path = |file: &str| trees[1].path().join(file);
        fs::write(path("bin/du"), "other").unwrap();
        fs::write(path("bin/more"), "").unwrap();
        fs::remove_file(path("bin/find")).unwrap();
        fs::set_permissions(path("bin/nice"), fs::Permissions::from_mode(0o644)).unwrap();
        for (tree, target) in trees.iter().zip(["one", "two"]) {
            symlink(target, tree.path().join("link")).unwrap();
        }
        assert_eq!(
            differences(),
            ["bin/du", "bin/find", "bin/more", "bin/nice", "link"]
        );
    }
}
