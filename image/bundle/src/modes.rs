//! File modes that do not depend on this machine.

use std::path::Path;

use hearth_build::files::{self, FileError, failed, set_mode};

/// Sets modes: programs and libraries are executable, everything is readable.
pub(crate) fn settle_modes(path: &Path) -> Result<(), FileError> {
    let metadata = path.symlink_metadata().map_err(failed("settle", path))?;
    if metadata.is_dir() {
        for entry in files::entries(path)? {
            settle_modes(&entry.path())?;
        }
        set_mode(path, 0o755)
    } else if metadata.is_file() {
        let start = files::read(path)?;
        let runs = start.starts_with(b"\x7fELF") || start.starts_with(b"#!");
        set_mode(path, if runs { 0o755 } else { 0o644 })
    } else {
        Ok(())
    }
}

/// Copies the bytes of `from`, following links. Its mode is not copied: it could forbid a later change.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), FileError> {
    files::write(to, files::read(from)?)?;
    set_mode(to, 0o755)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn modes_are_by_content() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let metadata = fs::metadata(dir.path().join(name)).unwrap();
            metadata.permissions().mode() & 0o7777
        };
        for (name, content) in [
            ("elf", "\x7fELF…"),
            ("script", "#!/bin/sh"),
            ("text", "text"),
        ] {
            fs::write(dir.path().join(name), content).unwrap();
            set_mode(&dir.path().join(name), 0o600).unwrap();
        }
        settle_modes(dir.path()).unwrap();
        assert_eq!(
            [mode("elf"), mode("script"), mode("text")],
            [0o755, 0o755, 0o644]
        );
    }
}
