//! The shared libraries that a program needs, resolved as the program's loader resolves them.
//!
//! The image has no `ld.so.cache`, so what matters is the loader's search without one: the object's run path, then the
//! loader's built-in directories, which are Debian's. A library found in a directory here goes into the same directory
//! of the image, so build time and run time resolve alike. Running `ldd` instead would execute the program, and would
//! use the build host's cache.

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};

use goblin::elf::Elf;
use goblin::elf::header::{EM_X86_64, ET_DYN, ET_EXEC};

/// The built-in search path of Debian's loader for x86-64.
const BUILT_IN: [&str; 4] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib",
    "/usr/lib",
];

/// Why a program's libraries could not be collected.
#[derive(Debug, thiserror::Error)]
pub enum ClosureError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// A file is not a usable ELF object.
    #[error("{} is not a program or library for x86-64 Linux: {reason}", path.display())]
    NotElf {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
    /// A library is in none of the searched directories.
    #[error("{} needs {library}, which is in none of {}", needed_by.display(), searched.join(", "))]
    NotFound {
        /// Name of the library.
        library: String,
        /// Path of the object that needs it.
        needed_by: PathBuf,
        /// The directories that were searched.
        searched: Vec<String>,
    },
    /// Two different files would have the same path in the image.
    #[error("{} and {} would both be {target} in the image", first.display(), second.display())]
    Conflict {
        /// The path in the image.
        target: String,
        /// Source path of one file.
        first: PathBuf,
        /// Source path of the other.
        second: PathBuf,
    },
}

/// A file to be put into the image.
#[derive(Debug)]
pub struct Object {
    /// Its path on the build host.
    pub source: PathBuf,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// The program at `source`, which will be `target` (absolute) in the image, and everything that its loader will load:
/// interpreter and libraries, by path in the image. For a static program that is the program alone.
pub fn closure(source: &Path, target: &str) -> Result<BTreeMap<String, Object>, ClosureError> {
    let mut found: BTreeMap<String, Object> = BTreeMap::new();
    // The loader is already loaded when it searches, so it satisfies a library that needs it by name.
    let mut loader = String::new();
    let mut open = vec![(source.to_owned(), target.to_owned())];
    while let Some((source, target)) = open.pop() {
        if let Some(other) = found.get(&target) {
            if other.source != source {
                return Err(ClosureError::Conflict {
                    target,
                    first: other.source.clone(),
                    second: source,
                });
            }
            continue;
        }
        let bytes = std::fs::read(&source).map_err(|e| ClosureError::Read {
            path: source.clone(),
            source: e,
        })?;
        let object = parse(&source, &bytes)?;
        if let Some(interpreter) = object.interpreter {
            loader = file_name(interpreter);
        }
        open.extend(needs(&source, &target, &object, &loader)?);
        found.insert(target, Object { source, bytes });
    }
    Ok(found)
}

/// The files that one object needs: pairs of source path and path in the image.
fn needs(
    source: &Path,
    target: &str,
    elf: &Elf<'_>,
    loader: &str,
) -> Result<Vec<(PathBuf, String)>, ClosureError> {
    let mut paths = Vec::new();
    if let Some(interpreter) = elf.interpreter {
        paths.push((PathBuf::from(interpreter), normal(Path::new(interpreter))));
    }
    let here = directory(source);
    let there = directory(Path::new(target));
    let mut directories: Vec<(PathBuf, PathBuf)> = Vec::new();
    // The loader, too, ignores the old DT_RPATH if there is a DT_RUNPATH.
    let run_paths = if elf.runpaths.is_empty() {
        &elf.rpaths
    } else {
        &elf.runpaths
    };
    for path in run_paths
        .iter()
        .flat_map(|paths| paths.split(':'))
        .filter(|p| !p.is_empty())
    {
        let expand = |origin: &Path| {
            let origin = origin.to_string_lossy();
            PathBuf::from(
                path.replace("${ORIGIN}", &origin)
                    .replace("$ORIGIN", &origin),
            )
        };
        directories.push((expand(&here), expand(&there)));
    }
    directories.extend(BUILT_IN.map(|d| (d.into(), d.into())));

    for library in elf.libraries.iter().filter(|name| **name != loader) {
        if library.contains('/') {
            paths.push((PathBuf::from(library), normal(Path::new(library))));
            continue;
        }
        let hit = directories
            .iter()
            .find(|(here, _)| usable(&here.join(library)));
        let Some((here, there)) = hit else {
            return Err(ClosureError::NotFound {
                library: (*library).to_owned(),
                needed_by: source.to_owned(),
                searched: directories
                    .iter()
                    .map(|(d, _)| d.display().to_string())
                    .collect(),
            });
        };
        paths.push((here.join(library), normal(&there.join(library))));
    }
    Ok(paths)
}

fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Elf<'a>, ClosureError> {
    let wrong = |reason: String| ClosureError::NotElf {
        path: path.to_owned(),
        reason,
    };
    let elf = Elf::parse(bytes).map_err(|e| wrong(e.to_string()))?;
    if !elf.is_64 || elf.header.e_machine != EM_X86_64 {
        return Err(wrong(format!(
            "its machine type is {}",
            elf.header.e_machine
        )));
    }
    if !matches!(elf.header.e_type, ET_EXEC | ET_DYN) {
        return Err(wrong("it is neither a linked program nor a library".into()));
    }
    Ok(elf)
}

/// The loader skips files of another architecture, and so does this.
fn usable(path: &Path) -> bool {
    use std::io::Read;
    let mut header = [0; 20];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok()
        && header.starts_with(b"\x7fELF\x02\x01")
        && u16::from_le_bytes([header[18], header[19]]) == EM_X86_64
}

fn file_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

fn directory(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("/")).to_owned()
}

/// Makes a path absolute, without `.` and `..`, as paths in the image are.
fn normal(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
            Component::ParentDir => {
                parts.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    format!("/{}", parts.join("/"))
}
