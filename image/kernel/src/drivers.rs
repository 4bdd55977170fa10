//! Which devices a kernel drives: the drivers that are built in, and the device tables of each.
//!
//! A kernel with modules has this in `modules.alias`, which `depmod` makes from what the modules say. One without modules
//! has no such file: Linux 6.12 compiles the tables of a built-in driver for the driver alone. [`mod@collect`] therefore
//! reads them where they are, in the compiled objects of the build, by the names that the sources export them under
//! (`MODULE_DEVICE_TABLE`). What the configuration leaves out of a table is thus not in the result, which could not be
//! said of the sources.
//!
//! The result is kept with the kernel as a text file ([`to_text`], [`parse`]), with the aliases in the form that
//! `modules.alias` has. Only drivers of devices are in it, that is those with an alias on one of the buses of [`tables`] or
//! for Xen.

mod collect;
mod tables;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

pub use collect::collect;
use hearth_build::files::FileError;

/// A driver that is built in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The name that its module would have ("e1000e").
    pub name: String,
    /// Where it is in the sources ("drivers/net/ethernet/intel/e1000e/e1000e").
    pub path: String,
    /// The option that it is built for ("CONFIG_E1000E"), unless its makefile has an unusual form.
    pub option: Option<String>,
    /// Its own description ("Intel(R) PRO/1000 Network Driver"), which may be empty.
    pub description: String,
    /// The devices that it claims, in the form of `modules.alias`.
    pub aliases: BTreeSet<String>,
}

/// Why the drivers could not be collected or read.
#[derive(Debug, thiserror::Error)]
pub enum DriversError {
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// An object of the build is not what a compiler writes.
    #[error("cannot read the device table {table} in {}: {reason}", object.display())]
    Object {
        /// Path of the object.
        object: PathBuf,
        /// Name of the table.
        table: String,
        /// What is wrong.
        reason: String,
    },
    /// A line of the stored list is malformed.
    #[error("list of drivers, line {line}: expected {wanted}, got {found:?}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The line.
        found: String,
        /// The expected form.
        wanted: &'static str,
    },
}

/// The stored form: a line for each driver, followed by one for each of its aliases.
pub fn to_text(drivers: &[Driver]) -> String {
    let mut text = String::new();
    for driver in drivers {
        let option = driver.option.as_deref().unwrap_or("-");
        let (name, path, description) = (&driver.name, &driver.path, &driver.description);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "driver\t{name}\t{option}\t{path}\t{description}");
        for alias in &driver.aliases {
            let _ = writeln!(text, "alias\t{alias}");
        }
    }
    text
}

/// Parses the stored form.
pub fn parse(text: &str) -> Result<Vec<Driver>, DriversError> {
    let mut drivers: Vec<Driver> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let wrong = |wanted| DriversError::Line {
            line: index + 1,
            found: line.to_owned(),
            wanted,
        };
        let fields: Vec<&str> = line.split('\t').collect();
        match fields[..] {
            ["driver", name, option, path, description] => drivers.push(Driver {
                name: name.to_owned(),
                path: path.to_owned(),
                option: (option != "-").then(|| option.to_owned()),
                description: description.to_owned(),
                aliases: BTreeSet::new(),
            }),
            ["alias", alias] => {
                let driver = drivers.last_mut();
                let driver = driver.ok_or_else(|| wrong("a driver before its aliases"))?;
                driver.aliases.insert(alias.to_owned());
            }
            _ => return Err(wrong("a driver or an alias")),
        }
    }
    Ok(drivers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let driver = |name: &str, option: Option<&str>, aliases: &[&str]| Driver {
            name: name.to_owned(),
            path: format!("drivers/x/{name}"),
            option: option.map(str::to_owned),
            description: format!("Driver of {name}"),
            aliases: aliases.iter().map(|&alias| alias.to_owned()).collect(),
        };
        let drivers = vec![
            driver("nvme", Some("CONFIG_BLK_DEV_NVME"), &["pci:a", "pci:b"]),
            driver("odd", None, &["usb:c"]),
        ];
        assert_eq!(parse(&to_text(&drivers)).unwrap(), drivers);
        let error = parse("alias\tpci:a\n").unwrap_err().to_string();
        assert!(
            error.contains("line 1: expected a driver before its aliases"),
            "{error}"
        );
        assert!(parse("driver\tonly-a-name\n").is_err());
    }
}
