//! Debian's packages, unpacked, and how their programs find loader and libraries where the node has them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError, create_dir};
use hearth_build::progress::Progress;

use crate::inputs::{FOR_THE_NODE, Inputs, InputsError};
use crate::modes::copy;

/// Where the node has the tree, always; the programs say so themselves.
pub const MOUNTED_AT: &str = "/ext/kubernetes";

/// The loader's file name.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// Where iptables' library looks for its extensions, as Debian compiled it in. There is a variable that says otherwise, but
/// whoever calls iptables (kube-proxy, the kubelet, a network plugin, the node) would have to know it.
const XTABLES: &[u8] = b"/usr/lib/x86_64-linux-gnu/xtables\0";

/// Why packages do not give what is wanted of them.
#[derive(Debug, thiserror::Error)]
pub enum PackagesError {
    /// A program was not to be run, or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The file system refused.
    #[error(transparent)]
    File(#[from] FileError),
    /// A package is not there.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// A program needs it.
    #[error("no package holds the library {0}")]
    NoLibrary(String),
    /// iptables' library is another than we know.
    #[error("cannot change {}", library.display())]
    Unchangeable {
        /// The library.
        library: PathBuf,
        /// Why.
        source: ExtensionsError,
    },
}

/// Why iptables' library cannot be made to look for its extensions elsewhere.
#[derive(Debug, thiserror::Error)]
pub enum ExtensionsError {
    /// Debian has compiled in another folder.
    #[error("it does not name the folder of its extensions")]
    NotNamed,
    /// It is named twice, or the new name is too long.
    #[error("the folder of its extensions cannot be replaced")]
    NoRoom,
}

/// The unpacked packages, and where each library lies in them.
pub(crate) struct Packages {
    dir: PathBuf,
    patchelf: PathBuf,
    libraries: BTreeMap<String, PathBuf>,
}

impl Packages {
    /// Unpacks them below `scratch`.
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
        for package in FOR_THE_NODE.into_iter().chain(["patchelf"]) {
            packages.add(progress, &inputs.package(package)?)?;
        }
        Ok(packages)
    }

    /// Unpacks another one.
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

    /// Makes programs and extensions find the tree's own loader and libraries, and puts those there.
    pub(crate) fn relocate(
        &self,
        progress: &dyn Progress,
        root: &Path,
        programs: Vec<PathBuf>,
        extensions: Vec<PathBuf>,
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
        for extension in &extensions {
            patch().arg(extension).run(progress)?;
        }
        let mut objects = programs;
        objects.extend(extensions);
        for library in self.copy_libraries(progress, objects, &lib)? {
            // The C library needs nothing but the loader, and is what the loader has been tried with as it is.
            if !library.ends_with("libc.so.6") {
                patch().arg(&library).run(progress)?;
            }
        }
        let iptables = lib.join("libxtables.so.12");
        let folder = format!("{MOUNTED_AT}/lib/xtables");
        let moved = with_extensions_at(&files::read(&iptables)?, &folder).map_err(|source| {
            PackagesError::Unchangeable {
                library: iptables.clone(),
                source,
            }
        })?;
        files::write(&iptables, moved)?;
        Ok(())
    }

    /// Puts the loader and the libraries of these programs where they look for them in a system whose root is `rootfs`.
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

    /// Copies all libraries that these objects need, and those that they need, but for the loader; returns the copies.
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

    /// Copies iptables' matches and targets: those for IPv4. The others are for tables that the kernel has not. Returns the
    /// copies that are files.
    pub(crate) fn copy_iptables_extensions(
        &self,
        root: &Path,
    ) -> Result<Vec<PathBuf>, PackagesError> {
        let from = self.file("iptables", "usr/lib/x86_64-linux-gnu/xtables");
        let mut extensions = Vec::new();
        for entry in files::entries(&from)? {
            let name = entry.file_name();
            let text = name.to_string_lossy();
            if !text.starts_with("libxt_") && !text.starts_with("libipt_") {
                continue;
            }
            let to = root.join("lib/xtables").join(&name);
            if let Ok(target) = entry.path().read_link() {
                files::link(target, &to)?;
            } else {
                copy(&entry.path(), &to)?;
                extensions.push(to);
            }
        }
        extensions.sort();
        Ok(extensions)
    }

    fn library(&self, name: &str) -> Result<&Path, PackagesError> {
        let path = self.libraries.get(name).map(PathBuf::as_path);
        path.ok_or_else(|| PackagesError::NoLibrary(name.to_owned()))
    }
}

/// The library with another folder for its extensions; the name must fit where the old one was.
fn with_extensions_at(library: &[u8], folder: &str) -> Result<Vec<u8>, ExtensionsError> {
    let at = |from: usize| {
        let rest = &library[from..];
        rest.windows(XTABLES.len())
            .position(|bytes| bytes == XTABLES)
    };
    let Some(position) = at(0) else {
        return Err(ExtensionsError::NotNamed);
    };
    if at(position + 1).is_some() || folder.len() >= XTABLES.len() {
        return Err(ExtensionsError::NoRoom);
    }
    let mut library = library.to_vec();
    let place = &mut library[position..position + XTABLES.len()];
    place.fill(0);
    place[..folder.len()].copy_from_slice(folder.as_bytes());
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_extensions_is_replaced_once_and_in_place() {
        let library = [b"abc\0".as_slice(), XTABLES, b"XTABLES_LIBDIR\0"].concat();
        let folder = format!("{MOUNTED_AT}/lib/xtables");
        let moved = with_extensions_at(&library, &folder).unwrap();
        assert_eq!(moved.len(), library.len());
        assert!(moved.starts_with(format!("abc\0{folder}\0").as_bytes()));
        assert!(moved.ends_with(b"\0XTABLES_LIBDIR\0"));
        assert!(with_extensions_at(b"nothing", &folder).is_err());
        assert!(with_extensions_at(&[XTABLES, XTABLES].concat(), &folder).is_err());
        assert!(with_extensions_at(&library, &"x".repeat(XTABLES.len())).is_err());
    }
}
