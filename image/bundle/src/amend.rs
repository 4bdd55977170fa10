//! What has to be changed in the source so that today's toolchain compiles what was meant.
//!
//! Kubernetes 1.20 reaches past the language into the runtime of Go in one place: the iteration over maps of the
//! vendored `reflect2`, by which all JSON is written. Go 1.18 gave that function a third parameter, where it writes the
//! state of the iteration. Called with two it writes to wherever the register points: answers in JSON break off, and the
//! API server dies now and then. The compiler cannot see it, for the declaration is believed.
//!
//! Each amendment names the text that it replaces, so a source in which that is not found as it was is an error.

use std::path::{Path, PathBuf};

use hearth_build::files::{self, FileError};

const REFLECT: &str = "vendor/github.com/modern-go/reflect2";

struct Amendment {
    /// Below [`REFLECT`].
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
    // As large as the runtime's own, with pointers where that has some: the collector looks at them.
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
    /// What was to be replaced is not there, or more than once.
    #[error(
        "{} is not as it was in Kubernetes 1.20: what stands there for maps has to be looked at anew",
        .0.display()
    )]
    Unknown(PathBuf),
    /// The file system refused.
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
    use super::*;
    use std::fs;

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
        // Twice is once too often.
        let error = amend(dir.path()).unwrap_err();
        assert!(error.to_string().contains("unsafe_link.go"), "{error}");
    }
}
