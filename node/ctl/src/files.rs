//! Writing private files atomically.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

/// Replaces a file atomically, with mode 0600: after an interruption there is either the old
/// content or the new one. Creates missing directories with mode 0700.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    create_private_folder(folder)?;
    // Created with mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(content)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder)?.sync_all()
}

fn create_private_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn what_is_written_is_whole_and_private() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("a/b/file");
        for content in ["first, and longer", "second"] {
            write_private(&path, content.as_bytes()).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("there"), content);
        }
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        let folder = path.parent().expect("a folder");
        assert_eq!(fs::metadata(folder).expect("there").mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(folder).expect("a folder").count(), 1);
    }
}
