//! Unpacked Debian packages, and how their programs find loader and libraries at the node's paths.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{FileError, create_dir};
use hearth_build::progress::Progress;

use crate::inputs::{FOR_THE_NODE, Inputs, InputsError, PATCHELF};
use crate::modes::copy;

/// The mount path of the tree on every node; the programs contain it.
pub const MOUNTED_AT: &str = "/ext/kubernetes";

/// The loader's file name.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// Why packages could not be used.
#[derive(Debug, thiserror::Error)]
pub enum PackagesError {
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A package is missing.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// A program needs a library that no package has.
    #[error("library {0} is in none of the packages")]
    NoLibrary(String),
}

/// The unpacked packages, and the path of each library in them.
pub(crate) struct Packages {
    dir: PathBuf,
    patchelf: PathBuf,
    libraries: BTreeMap<String, PathBuf>,
}

impl Packages {
    /// Unpacks the packages below `scratch`.
    pub(crate) fn unpack(
        progress: &dyn Progress,
        inputs: &Inputs,
        scratch: &Path,
    ) -> Result<Packages, PackagesError> {
        let dir = scratch.join("packages");
        let mut packages = Packages {
            patchelf: dir.join("patchelf/usr/bin/patchelf"),
            dir,
            libraries: BTreeMap::new(),
        };
        for package in FOR_THE_NODE.into_iter().chain([PATCHELF]) {
            packages.add(progress, &inputs.package(package)?)?;
        }
        Ok(packages)
    }

    /// Unpacks one more package.
    pub(crate) fn add(
        &mut self,
        progress: &dyn Progress,
        package: &Path,
    ) -> Result<(), PackagesError> {
        let file = package.file_name().unwrap_or_default().to_string_lossy();
        let to = self.dir.join(file.split('_').next().unwrap_or_default());
        create_dir(&to)?;
        Cmd::new("dpkg-deb")
            .arg("--extract")
            .arg(package)
            .arg(&to)
            .run(progress)?;
        for folder in ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"] {
            let Ok(entries) = to.join(folder).read_dir() else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                self.libraries.insert(name, entry.path());
            }
        }
        Ok(())
    }

    /// A file, by its path in its package.
    pub(crate) fn file(&self, package: &str, path: &str) -> PathBuf {
        self.dir.join(package).join(path)
    }

    /// Makes programs use the tree's own loader and libraries, and copies those into the tree.
    pub(crate) fn relocate(
        &self,
        progress: &dyn Progress,
        root: &Path,
        programs: Vec<PathBuf>,
    ) -> Result<(), PackagesError> {
        let lib = root.join("lib");
        copy(self.library(LOADER)?, &lib.join(LOADER))?;
        let interpreter = format!("{MOUNTED_AT}/lib/{LOADER}");
        let run_path = format!("{MOUNTED_AT}/lib");
        let patch = || Cmd::new(&self.patchelf).args(["--set-rpath", &run_path]);
        for program in &programs {
            patch()
                .args(["--set-interpreter", &interpreter])
                .arg(program)
                .run(progress)?;
        }
        for library in self.copy_libraries(progress, programs, &lib)? {
            // The C library needs nothing but the loader, and is tested with the loader unmodified.
            if !library.ends_with("libc.so.6") {
                patch().arg(&library).run(progress)?;
            }
        }
        Ok(())
    }

    /// Copies the loader and the libraries of these programs to where they are loaded from if `rootfs` is the root.
    pub(crate) fn add_libraries(
        &self,
        progress: &dyn Progress,
        programs: Vec<PathBuf>,
        rootfs: &Path,
    ) -> Result<(), PackagesError> {
        let (loader, lib) = (rootfs.join("lib64"), rootfs.join("lib/x86_64-linux-gnu"));
        create_dir(&loader)?;
        create_dir(&lib)?;
        copy(self.library(LOADER)?, &loader.join(LOADER))?;
        self.copy_libraries(progress, programs, &lib)?;
        Ok(())
    }

    /// Copies all libraries that these objects need, directly or indirectly, except the loader; returns the copies.
    fn copy_libraries(
        &self,
        progress: &dyn Progress,
        objects: Vec<PathBuf>,
        lib: &Path,
    ) -> Result<Vec<PathBuf>, PackagesError> {
        let mut found = BTreeSet::from([LOADER.to_owned()]);
        let (mut open, mut copies) = (objects, Vec::new());
        while let Some(object) = open.pop() {
            let needed = Cmd::new(&self.patchelf).arg("--print-needed").arg(&object);
            for library in needed.output(progress)?.lines() {
                if found.insert(library.to_owned()) {
                    let to = lib.join(library);
                    copy(self.library(library)?, &to)?;
                    open.push(to.clone());
                    copies.push(to);
                }
            }
        }
        Ok(copies)
    }

    fn library(&self, name: &str) -> Result<&Path, PackagesError> {
        let path = self.libraries.get(name).map(PathBuf::as_path);
        path.ok_or_else(|| PackagesError::NoLibrary(name.to_owned()))
    }
}
