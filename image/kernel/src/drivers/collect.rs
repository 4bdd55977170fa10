//! Collects the drivers of a kernel from the folder in which it was built.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hearth_build::files;

use super::{Driver, DriversError, tables};

/// What built-in modules say about themselves, as the build extracts it: `NAME.KEY=VALUE`, each ended by a NUL.
const MODINFO: &str = "modules.builtin.modinfo";

/// The drivers of the kernel that was built in `source`, by path.
pub fn collect(source: &Path) -> Result<Vec<Driver>, DriversError> {
    let modinfo = Modinfo::parse(&files::read(&source.join(MODINFO))?);
    let mut aliases: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for object in objects(&source.join("drivers"))? {
        for (module, found) in tables_of(&object)? {
            aliases.entry(module).or_default().extend(found);
        }
    }
    let mut drivers = Vec::new();
    for (path, name) in &modinfo.names {
        let mut all = aliases.remove(path).unwrap_or_default();
        all.extend(
            modinfo
                .values(name, "alias")
                .filter(|alias| alias.starts_with("xen:")),
        );
        if all.is_empty() {
            continue;
        }
        drivers.push(Driver {
            name: name.clone(),
            path: path.clone(),
            option: option(source, path)?,
            description: modinfo
                .values(name, "description")
                .next()
                .unwrap_or_default(),
            aliases: all,
        });
    }
    Ok(drivers)
}

/// The content of [`MODINFO`].
struct Modinfo {
    /// The modules: where each is in the sources, and its name.
    names: BTreeMap<String, String>,
    /// Module, key and value.
    entries: Vec<(String, String, String)>,
}

impl Modinfo {
    fn parse(bytes: &[u8]) -> Modinfo {
        let entries: Vec<_> = bytes
            .split(|byte| *byte == 0)
            .filter_map(|entry| {
                let entry = String::from_utf8_lossy(entry);
                let (key, value) = entry.split_once('=')?;
                let (module, key) = key.split_once('.')?;
                // A description may have line breaks; here it has to fit on one line.
                let value = value.split_whitespace().collect::<Vec<_>>().join(" ");
                Some((module.to_owned(), key.to_owned(), value))
            })
            .collect();
        let files = entries.iter().filter(|(_, key, _)| key == "file");
        let names = files.map(|(module, _, path)| (path.clone(), module.clone()));
        Modinfo {
            names: names.collect(),
            entries,
        }
    }

    fn values(&self, module: &str, key: &str) -> impl Iterator<Item = String> {
        let of_module = self
            .entries
            .iter()
            .filter(move |(name, found, _)| name == module && found == key);
        of_module.map(|(_, _, value)| value.clone())
    }
}

/// The compiled objects in a folder and below, sorted.
fn objects(folder: &Path) -> Result<Vec<PathBuf>, DriversError> {
    let mut found = Vec::new();
    for entry in files::entries(folder)? {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(objects(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "o") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The aliases in the tables of one object, by the module that it belongs to.
fn tables_of(object: &Path) -> Result<Vec<(String, BTreeSet<String>)>, DriversError> {
    let source = object.with_extension("c");
    if !source.exists() {
        // A folder's objects together, or assembly.
        return Ok(Vec::new());
    }
    let exported = tables::exported(&String::from_utf8_lossy(&files::read(&source)?));
    if exported.is_empty() {
        return Ok(Vec::new());
    }
    let content = files::read(object)?;
    let modules = modules(object)?;
    let mut found = Vec::new();
    for (bus, table) in exported {
        let aliases = tables::aliases(&content, &bus, &table);
        let aliases = aliases.map_err(|reason| DriversError::Object {
            object: object.to_owned(),
            table,
            reason,
        })?;
        if let Some(aliases) = aliases {
            found.extend(
                modules
                    .iter()
                    .map(|module| (module.clone(), aliases.clone())),
            );
        }
    }
    Ok(found)
}

/// The modules that an object belongs to, by the definitions on its compiler's command line. There is one, except for
/// objects that several drivers share.
fn modules(object: &Path) -> Result<Vec<String>, DriversError> {
    let name = object.file_name().unwrap_or_default().to_string_lossy();
    let command = files::read_text(&object.with_file_name(format!(".{name}.cmd")))?;
    let (_, rest) = command
        .split_once("-DKBUILD_MODFILE='\"")
        .unwrap_or_default();
    let (paths, _) = rest.split_once('"').unwrap_or_default();
    Ok(paths.split_whitespace().map(str::to_owned).collect())
}

/// The option for which a makefile builds a module: `obj-$(CONFIG_E1000E) += e1000e.o`.
fn option(source: &Path, module: &str) -> Result<Option<String>, DriversError> {
    let path = source.join(module);
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(None);
    };
    let makefile = files::read_text(&folder.join("Makefile"))?.replace("\\\n", " ");
    let object = format!("{}.o", name.to_string_lossy());
    Ok(makefile.lines().find_map(|line| {
        let (option, rest) = line.trim().strip_prefix("obj-$(")?.split_once(')')?;
        let (_, objects) = rest.split_once('=')?;
        let listed = objects.split_whitespace().any(|word| word == object);
        listed.then(|| option.to_owned())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        folder
    }

    /// What is known without a table: a driver of Xen, whose alias its source states.
    #[test]
    fn a_driver_has_its_option_and_description() {
        let folder = built(&[
            (
                MODINFO,
                b"xen_blkfront.description=Xen virtual\n\tblock device\0xen_blkfront.alias=xen:vbd\0\
                  xen_blkfront.file=drivers/block/xen-blkfront\0loop.file=drivers/block/loop\0",
            ),
            (
                "drivers/block/Makefile",
                b"obj-$(CONFIG_BLK_DEV_LOOP)\t+= loop.o\n\
                  obj-$(CONFIG_XEN_BLKDEV_FRONTEND) += other.o \\\n\txen-blkfront.o\n",
            ),
        ]);
        let drivers = collect(folder.path()).unwrap();
        assert_eq!(drivers.len(), 1);
        assert_eq!(drivers[0].name, "xen_blkfront");
        assert_eq!(
            drivers[0].option.as_deref(),
            Some("CONFIG_XEN_BLKDEV_FRONTEND")
        );
        assert_eq!(drivers[0].description, "Xen virtual block device");
        assert!(drivers[0].aliases.contains("xen:vbd"));
    }

    #[test]
    fn an_object_belongs_to_the_modules_that_its_compiler_was_told() {
        let folder = built(&[
            (
                "a/.x.o.cmd",
                b"gcc -DKBUILD_MODFILE='\"drivers/a/one drivers/a/two\"' -c x.c",
            ),
            ("a/.y.o.cmd", b"as y.S"),
        ]);
        let modules = |name: &str| modules(&folder.path().join(name)).unwrap();
        assert_eq!(modules("a/x.o"), ["drivers/a/one", "drivers/a/two"]);
        assert!(modules("a/y.o").is_empty());
    }

    #[test]
    fn a_table_that_cannot_be_read_is_an_error_with_its_object() {
        let folder = built(&[
            (MODINFO, b""),
            ("drivers/x.c", b"MODULE_DEVICE_TABLE(pci, ids);"),
            ("drivers/x.o", b"not ELF"),
            ("drivers/.x.o.cmd", b"gcc"),
        ]);
        let error = collect(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("table ids in") && error.contains("drivers/x.o"),
            "{error}"
        );
    }
}
