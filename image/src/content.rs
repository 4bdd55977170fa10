//! The content of a file that goes into an image: in memory, or in a file that is copied when the image is written.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// A file's content. Large content stays on disk and is copied by the kernel.
#[derive(Debug, Clone)]
pub enum Content {
    /// Held in memory.
    Bytes(Vec<u8>),
    /// To be copied from the file at `path`, which had `length` bytes when this was created.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Length in bytes; a different length at the time of copying is an error.
        length: u64,
    },
}

impl Content {
    /// Refers to the file at `path`, which must be a regular file.
    pub fn of_file(path: &Path) -> io::Result<Content> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        Ok(Content::File {
            path: path.to_owned(),
            length: metadata.len(),
        })
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        match self {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::File { length, .. } => *length,
        }
    }

    /// Writes all of it to `out`. A copy between two files is done by the kernel (`copy_file_range`).
    pub(crate) fn copy_to<W: Write>(&self, out: &mut W) -> io::Result<()> {
        match self {
            Content::Bytes(bytes) => out.write_all(bytes),
            Content::File { path, length } => {
                let changed = |found| {
                    io::Error::other(format!(
                        "{} changed while it was copied: expected {length} bytes, got {found}",
                        path.display()
                    ))
                };
                let mut source = File::open(path)?.take(*length);
                let copied = io::copy(&mut source, out)?;
                if copied != *length {
                    return Err(changed(format!("{copied}")));
                }
                if source.into_inner().read(&mut [0])? != 0 {
                    return Err(changed("more".into()));
                }
                Ok(())
            }
        }
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Content {
        Content::Bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_changed_is_noticed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"four").unwrap();
        let content = Content::of_file(file.path()).unwrap();
        let mut out = Vec::new();
        content.copy_to(&mut out).unwrap();
        assert_eq!(out, b"four");
        for other in [&b"fou"[..], b"fours"] {
            std::fs::write(file.path(), other).unwrap();
            assert!(content.copy_to(&mut Vec::new()).is_err(), "{other:?}");
        }
        assert!(Content::of_file(Path::new("/dev/null")).is_err());
    }
}
