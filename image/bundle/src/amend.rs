//! Patches of the source that today's toolchain needs to compile it correctly.
//!
//! Kubernetes 1.20 reaches into the runtime of Go in one place: the iteration over maps of the vendored `reflect2`,
//! which writes all JSON. Go 1.18 gave that function a third parameter, where it writes the state of the iteration.
//! Called with two, it writes to wherever the register points: JSON answers are truncated, and the API server crashes
//! now and then. The compiler cannot detect it, because it trusts the declaration.
//!
//! Each amendment names the text that it replaces; a source without exactly that text is an error.

use std::path::{Path, PathBuf};

use hearth_build::files::{self, FileError};

const REFLECT: &str = "vendor/github.com/modern-go/reflect2";

struct Amendment {
    /// Path below [`REFLECT`].
    file: &'static str,
    old: &'static str,
    new: &'static str,
}

const AMENDMENTS: [Amendment; 3] = [
    Amendment {
        file: "unsafe_link.go",
        old: "func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer) *hiter\n",
        new: "func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer, it *hiter)\n",
    },
    // As large as the runtime's own, with pointers at the same offsets: the garbage collector scans them.
    Amendment {
        file: "unsafe_link.go",
        old: "\t// rest fields are ignored\n}\n",
        new: "\tpointers [6]unsafe.Pointer\n\tnumbers  [4]uintptr\n}\n",
    },
    Amendment {
        file: "unsafe_map.go",
        old: "\treturn &UnsafeMapIterator{\n\t\thiter:      mapiterinit(type2.rtype, *(*unsafe.Pointer)(obj)),\n",
        new: "\tit := new(hiter)\n\tmapiterinit(type2.rtype, *(*unsafe.Pointer)(obj), it)\n\treturn &UnsafeMapIterator{\n\
              \t\thiter:      it,\n",
    },
];

/// Why the source was not amended.
#[derive(Debug, thiserror::Error)]
pub enum AmendError {
    /// The text to be replaced is absent, or occurs more than once.
    #[error(
        "{} differs from Kubernetes 1.20: review its amendment for map iteration",
        .0.display()
    )]
    Unknown(PathBuf),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Amends the unpacked tree.
pub(crate) fn amend(tree: &Path) -> Result<(), AmendError> {
    for amendment in &AMENDMENTS {
        let path = tree.join(REFLECT).join(amendment.file);
        let text = files::read_text(&path)?;
        if text.matches(amendment.old).count() != 1 {
            return Err(AmendError::Unknown(path));
        }
        files::write(&path, text.replace(amendment.old, amendment.new))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_not_as_it_was_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(REFLECT);
        fs::create_dir_all(&folder).unwrap();
        let text = |file: &str| {
            let of = |amendment: &&Amendment| amendment.file == file;
            let old: String = AMENDMENTS.iter().filter(of).map(|a| a.old).collect();
            fs::write(folder.join(file), old).unwrap();
        };
        text("unsafe_link.go");
        text("unsafe_map.go");
        amend(dir.path()).unwrap();
        let link = fs::read_to_string(folder.join("unsafe_link.go")).unwrap();
        assert!(link.contains(", it *hiter)"), "{link}");
        // Two occurrences are an error, too.
        let error = amend(dir.path()).unwrap_err();
        assert!(error.to_string().contains("unsafe_link.go"), "{error}");
    }
}
