//! Firmware and microcode for an image, from Debian's packages, fetched by apt and never installed.
//!
//! Hearth distributes none of it: most is not free, so it is put into an image only by the one who builds the image, and
//! only what was asked for. The packages are in a component of Debian that most machines do not have among their sources,
//! `non-free-firmware`; apt gets it from the machine's own mirrors ([`Apt::with_components`]).
//!
//! Each call asks the mirror for the newest version, because microcode mends security faults of processors; the content of
//! a package is cached by the hash that the mirror's signed index gives it.
//!
//! Firmware goes to `/lib/firmware`, where the kernel looks for it. Microcode has to be loaded before there is a file
//! system: it becomes one file for each vendor of processors, at the path that the kernel looks for in front of the
//! initramfs.

mod package;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearth_build::apt::{Apt, AptError, Available};
use hearth_build::cache::{self, Cache, CacheError};
use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError};
use hearth_build::progress::{Length, Progress};
pub use package::{NotAPackage, Package};

/// Version of the steps below, part of the cache key.
const RECIPE: &str = "1";

/// The Debian release of the packages.
const RELEASE: &str = "bookworm";

/// The component of Debian that has them.
const COMPONENT: &str = "non-free-firmware";

/// Where packages have firmware: below `/usr` since Debian merged the two.
const FOLDERS: [&str; 2] = ["lib/firmware", "usr/lib/firmware"];

/// The packages with microcode, the folder of each below [`FOLDERS`], and the file that the kernel looks for.
const MICROCODE: [(&str, &str, &str); 2] = [
    ("amd64-microcode", "amd-ucode", "AuthenticAMD.bin"),
    ("intel-microcode", "intel-ucode", "GenuineIntel.bin"),
];

/// Where the kernel looks for microcode, in the archive in front of the initramfs.
const EARLY: &str = "/kernel/x86/microcode";

/// Files by their absolute path in the image.
pub type Files = BTreeMap<String, Vec<u8>>;

/// Why there is no firmware.
#[derive(Debug, thiserror::Error)]
pub enum FirmwareError {
    /// apt did not find or fetch the packages.
    #[error(
        "cannot fetch firmware packages of Debian release {RELEASE}, component {COMPONENT}: check their names, and that \
         this machine's apt has a mirror of that release"
    )]
    NotFetched(#[source] CommandError),
    /// apt could not be prepared.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// A package could not be unpacked.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache is not available.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is no folder for apt's files.
    #[error("cannot create a temporary folder")]
    Scratch(#[source] std::io::Error),
    /// apt fetched something else.
    #[error("apt has fetched no {0}")]
    NoFile(String),
    /// A package has nothing to put into an image.
    #[error("package {package}: expected files in /{}, got none", FOLDERS.join(" or /"))]
    Empty {
        /// The package.
        package: String,
    },
}

/// What was found, and the versions of the packages that it is from.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Found {
    /// The files.
    pub files: Files,
    /// The packages' files, which have name and version ("firmware-bnx2_20230210-5_all.deb").
    pub packages: Vec<String>,
}

/// The firmware of these packages.
pub fn firmware(progress: &dyn Progress, packages: &[Package]) -> Result<Found, FirmwareError> {
    find(progress, packages, firmware_in)
}

/// The microcode for processors of all vendors.
pub fn microcode(progress: &dyn Progress) -> Result<Found, FirmwareError> {
    let packages = MICROCODE.map(|(package, _, _)| Package::known(package));
    find(progress, &packages, microcode_in)
}

/// What `files_in` finds in each of these packages, unpacked.
fn find(
    progress: &dyn Progress,
    packages: &[Package],
    files_in: impl Fn(&Path) -> Result<Files, FileError>,
) -> Result<Found, FirmwareError> {
    let mut found = Found::default();
    for unpacked in fetch(progress, packages)? {
        let files = files_in(&unpacked.folder)?;
        if files.is_empty() {
            let package = unpacked.file;
            return Err(FirmwareError::Empty { package });
        }
        found.files.extend(files);
        found.packages.push(unpacked.file);
    }
    Ok(found)
}

/// A package in the cache.
struct Unpacked {
    /// Name of its file, with its version.
    file: String,
    /// The folder of its content.
    folder: PathBuf,
}

fn fetch(progress: &dyn Progress, packages: &[Package]) -> Result<Vec<Unpacked>, FirmwareError> {
    if packages.is_empty() {
        return Ok(Vec::new());
    }
    // Not in the cache, which has one builder at a time.
    let scratch = tempfile::tempdir().map_err(FirmwareError::Scratch)?;
    let task = progress.start("looking for firmware packages", Length::Unknown);
    let apt = Apt::with_components(progress, scratch.path(), RELEASE, &[COMPONENT])?;
    apt.update(progress, &*task)
        .map_err(FirmwareError::NotFetched)?;
    let available = apt.available(progress, packages.iter().map(Package::as_str));
    let available = available.map_err(FirmwareError::NotFetched)?;
    task.done();
    let cache = Cache::of_user("firmware")?;
    let unpacked = available.into_iter().map(|available| {
        let key = cache::key([RECIPE, &available.file, &available.hash]);
        let folder = cache.ensure(progress, &key, |_, scratch| {
            unpack(progress, &apt, &available, scratch)
        })?;
        Ok(Unpacked {
            file: available.file,
            folder,
        })
    });
    unpacked.collect()
}

/// Fetches and unpacks a package; returns the folder of its content in `scratch`.
fn unpack(
    progress: &dyn Progress,
    apt: &Apt,
    available: &Available,
    scratch: &Path,
) -> Result<PathBuf, FirmwareError> {
    let task = progress.start(&format!("fetching {}", available.file), Length::Unknown);
    apt.download(progress, &*task, [available.package()])
        .map_err(FirmwareError::NotFetched)?;
    let file = apt.fetched().join(&available.file);
    if !file.exists() {
        return Err(FirmwareError::NoFile(available.file.clone()));
    }
    let entry = scratch.join("entry");
    files::create_dir(&entry)?;
    Cmd::new("dpkg-deb")
        .arg("--extract")
        .arg(&file)
        .arg(&entry)
        .run(progress)?;
    task.done();
    Ok(entry)
}

/// The firmware in an unpacked package.
fn firmware_in(package: &Path) -> Result<Files, FileError> {
    let mut found = Files::new();
    for folder in FOLDERS {
        let folder = package.join(folder);
        if folder.is_dir() {
            collect(&folder, "/lib/firmware", &mut found)?;
        }
    }
    Ok(found)
}

/// Adds the files in a folder and below. Links become copies of their targets: a name that a driver asks for is often a
/// link to another one. A link to a file of another package is left out.
fn collect(folder: &Path, path: &str, found: &mut Files) -> Result<(), FileError> {
    for entry in files::entries(folder)? {
        let (source, name) = (entry.path(), entry.file_name());
        let path = format!("{path}/{}", name.to_string_lossy());
        if source.is_dir() && !source.is_symlink() {
            collect(&source, &path, found)?;
        } else if source.is_file() {
            found.insert(path, files::read(&source)?);
        }
    }
    Ok(())
}

/// The microcode in an unpacked package: the files for single processors, one after the other, which is what the kernel
/// expects.
fn microcode_in(package: &Path) -> Result<Files, FileError> {
    let mut found = Files::new();
    for (_, vendor, name) in MICROCODE {
        let mut parts = Vec::new();
        for folder in FOLDERS {
            let folder = package.join(folder).join(vendor);
            if folder.is_dir() {
                parts.extend(files::entries(&folder)?.iter().map(|entry| entry.path()));
            }
        }
        parts.retain(|path| is_microcode(path));
        parts.sort();
        let mut whole = Vec::new();
        for part in &parts {
            whole.extend(files::read(part)?);
        }
        if !whole.is_empty() {
            found.insert(format!("{EARLY}/{name}"), whole);
        }
    }
    Ok(found)
}

/// AMD's files have signatures beside them; Debian marks some of Intel's that must not be loaded early by a suffix.
fn is_microcode(path: &Path) -> bool {
    match path.extension().and_then(|extension| extension.to_str()) {
        None | Some("bin") => path.is_file(),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn package(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        folder
    }

    #[test]
    fn firmware_is_where_the_kernel_looks() {
        let package = package(&[
            ("lib/firmware/bnx2/bnx2-mips-06.fw", "one"),
            ("usr/lib/firmware/tigon/tg3.bin", "two"),
            ("usr/share/doc/firmware-bnx2/copyright", "no firmware"),
        ]);
        let tigon = package.path().join("usr/lib/firmware/tigon");
        std::os::unix::fs::symlink("tg3.bin", tigon.join("tg3_new.bin")).unwrap();
        std::os::unix::fs::symlink("elsewhere.bin", tigon.join("dangling.bin")).unwrap();
        let found = firmware_in(package.path()).unwrap();
        let found: Vec<(&str, &[u8])> = found.iter().map(|(k, v)| (&k[..], &v[..])).collect();
        assert_eq!(
            found,
            [
                ("/lib/firmware/bnx2/bnx2-mips-06.fw", &b"one"[..]),
                ("/lib/firmware/tigon/tg3.bin", b"two"),
                ("/lib/firmware/tigon/tg3_new.bin", b"two"),
            ]
        );
    }

    #[test]
    fn microcode_is_one_file_for_each_vendor() {
        let package = package(&[
            ("lib/firmware/intel-ucode/06-55-04", "b"),
            ("lib/firmware/intel-ucode/06-4f-01", "a"),
            ("lib/firmware/intel-ucode/06-4f-02.initramfs", "x"),
            ("lib/firmware/amd-ucode/microcode_amd_fam19h.bin", "d"),
            ("lib/firmware/amd-ucode/microcode_amd.bin", "c"),
            ("lib/firmware/amd-ucode/microcode_amd.bin.asc", "signature"),
            ("lib/firmware/amd-ucode/README", ""),
        ]);
        let found = microcode_in(package.path()).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found["/kernel/x86/microcode/GenuineIntel.bin"], b"ab");
        assert_eq!(found["/kernel/x86/microcode/AuthenticAMD.bin"], b"cd");
    }

    #[test]
    fn a_package_without_either_has_nothing() {
        let package = package(&[("usr/share/doc/x", "")]);
        assert!(firmware_in(package.path()).unwrap().is_empty());
        assert!(microcode_in(package.path()).unwrap().is_empty());
    }
}
