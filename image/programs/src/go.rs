//! The go command, at the pinned version and with an environment of its own.

use std::path::{Path, PathBuf};

use hearth_build::cache;
use hearth_build::command::Cmd;
use hearth_build::files::{self, FileError, failed};
use hearth_build::progress::{Length, Progress};

use crate::error::ProgramsError;
use crate::settings::{self, is_gos};

/// Go's two caches, below Hearth's.
pub(crate) struct Caches {
    /// What was compiled (`GOCACHE`): up to 5 GB.
    pub(crate) compiled: PathBuf,
    /// Modules, as archives and unpacked (`GOMODCACHE`).
    pub(crate) modules: PathBuf,
}

impl Caches {
    pub(crate) fn of_user() -> Result<Caches, cache::CacheError> {
        let dir = cache::dir()?.join("go");
        Ok(Caches {
            compiled: dir.join("compiled"),
            modules: dir.join("modules"),
        })
    }

    /// Caches for one build, with modules in common: nothing that was compiled before is used.
    pub(crate) fn compiled_in(self, folder: &Path) -> Caches {
        Caches {
            compiled: folder.join("compiled"),
            modules: self.modules,
        }
    }

    /// Removes everything but the archives of the modules, without which a build would need a network: what they
    /// unpack to, and what was compiled, is made again from them. Nobody else may be building.
    pub(crate) fn trim(&self, progress: &dyn Progress) -> Result<(), FileError> {
        let _task = progress.start("removing what Go compiled", Length::Moment);
        remove(&self.compiled)?;
        if !self.modules.exists() {
            return Ok(());
        }
        for entry in files::entries(&self.modules)? {
            if entry.file_name() != "cache" {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

fn remove(folder: &Path) -> Result<(), FileError> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(failed("remove", folder)(error))
        }
        _ => Ok(()),
    }
}

/// The go command.
pub(crate) struct Go<'a> {
    program: PathBuf,
    /// The toolchain that it becomes ("go1.26.8").
    toolchain: String,
    caches: &'a Caches,
    settings: Vec<(String, String)>,
}

impl<'a> Go<'a> {
    pub(crate) fn new(
        progress: &dyn Progress,
        program: PathBuf,
        toolchain: &str,
        caches: &'a Caches,
    ) -> Result<Go<'a>, ProgramsError> {
        Ok(Go {
            settings: settings::of_the_network(progress, &program)?,
            program,
            toolchain: toolchain.to_owned(),
            caches,
        })
    }

    /// The unpacked modules.
    pub(crate) fn modules(&self) -> &Path {
        &self.caches.modules
    }

    /// `go VERB`, to be run in the folder of a go.mod.
    pub(crate) fn cmd(&self, verb: &str) -> Cmd {
        let mut cmd = Cmd::new(&self.program).env_remove_if(is_gos);
        for (name, value) in &self.settings {
            cmd = cmd.env(name, value);
        }
        cmd.env("GOTOOLCHAIN", &self.toolchain)
            .env("GOCACHE", &self.caches.compiled)
            .env("GOMODCACHE", &self.caches.modules)
            // Without write permission on the folders of modules only root could remove them.
            .env("GOFLAGS", "-modcacherw")
            .env("GOENV", "off")
            .env("GOWORK", "off")
            // The compiler's own memory: without collection it needs a fifth less time, and no bytes differ. The limit,
            // from which on it collects, applies to each of the processes, of which there are two or three.
            .env("GOGC", "off")
            .env("GOMEMLIMIT", "1536MiB")
            .env("GOOS", "linux")
            .env("GOARCH", "amd64")
            .env("CGO_ENABLED", "0")
            .env("LC_ALL", "C")
            .arg(verb)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_build::progress::Silent;

    use super::*;

    #[test]
    fn archives_of_modules_stay() {
        let dir = tempfile::tempdir().unwrap();
        let caches = Caches {
            compiled: dir.path().join("compiled"),
            modules: dir.path().join("modules"),
        };
        for folder in [
            "compiled/00",
            "modules/cache/download/a",
            "modules/k8s.io/a@v1.0.0",
        ] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        caches.trim(&Silent).unwrap();
        assert!(!caches.compiled.exists());
        assert!(caches.modules.join("cache/download/a").exists());
        assert!(!caches.modules.join("k8s.io").exists());
        // Nothing was ever built.
        fs::remove_dir_all(&caches.modules).unwrap();
        caches.trim(&Silent).unwrap();
    }
}
