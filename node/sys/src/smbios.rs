//! Strings that firmware or a hypervisor passes to a machine in its SMBIOS table, and what the table
//! says the machine is.
//!
//! The kernel exposes the table as it is in memory. The strings of structures of type 11, *OEM strings*,
//! are for anybody: hypervisors let their users set them (QEMU: `-smbios type=11,value=…`), and so
//! can some management controllers.
//!
//! # Invariants
//! - A table that cannot be followed to its end is an error, not a table without the strings that are
//!   looked for: they may be after the flaw.
//! - Nothing is read outside the table, whatever its lengths say.
//!
//! # Why not the kernel's list of structures
//! `/sys/firmware/dmi/entries` has one file for each structure, but ends without an error where the
//! kernel cannot follow the table.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::files::{self, FileError};

/// Where the kernel exposes what firmware says of the machine.
pub const SYSFS: &str = "/sys";

/// The structure with strings for anybody.
const OEM_STRINGS: u8 = 11;
/// The last structure. What follows it is not part of the table.
const END: u8 = 127;
/// Type, length and handle.
const HEADER: usize = 4;
/// More than any table has: 64 KiB with an entry point of 32 bits, and little more with one of 64.
const MAX_SIZE: u64 = 1 << 20;

/// Why the table cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SmbiosError {
    /// The file of the kernel cannot be read.
    #[error("cannot read the SMBIOS table")]
    Read(#[source] FileError),
    /// A structure cannot be followed.
    #[error("SMBIOS structure at byte {at} of {size}: {flaw}")]
    Structure {
        /// Where it begins.
        at: usize,
        /// The size of the table.
        size: usize,
        /// What is wrong with it.
        flaw: Flaw,
    },
    /// An attribute of the machine cannot be read.
    #[error("cannot read {}", path.display())]
    Attribute {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// What is wrong with a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum Flaw {
    #[error("expected a length of at least {HEADER} bytes, got {0}")]
    Length(u8),
    #[error("it does not end before the table does")]
    Truncated,
    #[error("expected {expected} strings, got {found}")]
    Strings { expected: u8, found: usize },
}

/// What firmware says of this machine.
#[derive(Clone, Debug)]
pub struct Smbios {
    sys: PathBuf,
}

impl Default for Smbios {
    fn default() -> Self {
        Self::at(SYSFS)
    }
}

impl Smbios {
    /// What is in this directory, which is [`SYSFS`] except in tests.
    pub fn at(sys: impl Into<PathBuf>) -> Self {
        Self { sys: sys.into() }
    }

    /// The strings for anybody, in their order. A machine without SMBIOS has none.
    pub fn oem_strings(&self) -> Result<Vec<Vec<u8>>, SmbiosError> {
        let path = self.sys.join("firmware/dmi/tables/DMI");
        match files::read_limited(&path, MAX_SIZE).map_err(SmbiosError::Read)? {
            Some(table) => oem_strings(&table),
            None => Ok(Vec::new()),
        }
    }

    /// Who has made the machine, or the hypervisor.
    pub fn vendor(&self) -> Result<Option<String>, SmbiosError> {
        self.attribute("sys_vendor")
    }

    /// The product name of the machine.
    pub fn product(&self) -> Result<Option<String>, SmbiosError> {
        self.attribute("product_name")
    }

    fn attribute(&self, name: &str) -> Result<Option<String>, SmbiosError> {
        let path = self.sys.join("class/dmi/id").join(name);
        match read(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(SmbiosError::Attribute { path, source }),
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    let text = fs::read(path)?;
    Ok(String::from_utf8_lossy(&text).trim().to_owned())
}

/// The strings for anybody in a table, in their order.
pub fn oem_strings(table: &[u8]) -> Result<Vec<Vec<u8>>, SmbiosError> {
    let mut found = Vec::new();
    let mut rest = table;
    while !rest.is_empty() {
        let at = table.len() - rest.len();
        let structure = Structure::parse(rest).map_err(|flaw| SmbiosError::Structure {
            at,
            size: table.len(),
            flaw,
        })?;
        if structure.kind == END {
            break;
        }
        if structure.kind == OEM_STRINGS {
            let strings = structure.counted().map_err(|flaw| SmbiosError::Structure {
                at,
                size: table.len(),
                flaw,
            })?;
            found.extend(strings);
        }
        rest = structure.rest;
    }
    Ok(found)
}

struct Structure<'a> {
    kind: u8,
    /// After the header.
    fields: &'a [u8],
    strings: Vec<&'a [u8]>,
    /// What follows it in the table.
    rest: &'a [u8],
}

impl<'a> Structure<'a> {
    /// The structure with which these bytes begin.
    fn parse(bytes: &'a [u8]) -> Result<Self, Flaw> {
        let (&[kind, length, _, _], _) = bytes.split_first_chunk().ok_or(Flaw::Truncated)?;
        if usize::from(length) < HEADER {
            return Err(Flaw::Length(length));
        }
        let (formatted, mut rest) = bytes
            .split_at_checked(usize::from(length))
            .ok_or(Flaw::Truncated)?;
        let mut strings = Vec::new();
        loop {
            let end = rest.iter().position(|byte| *byte == 0);
            let (string, after) = rest.split_at(end.ok_or(Flaw::Truncated)?);
            rest = &after[1..];
            if string.is_empty() {
                break;
            }
            strings.push(string);
        }
        // Without strings there are two zeros all the same.
        if strings.is_empty() {
            rest = rest.strip_prefix(&[0]).ok_or(Flaw::Truncated)?;
        }
        Ok(Self {
            kind,
            fields: &formatted[HEADER..],
            strings,
            rest,
        })
    }

    /// The strings, if there are as many as the first field says.
    fn counted(&self) -> Result<impl Iterator<Item = Vec<u8>>, Flaw> {
        let expected = *self.fields.first().unwrap_or(&0);
        match usize::from(expected) == self.strings.len() {
            true => Ok(self.strings.iter().map(|string| string.to_vec())),
            false => Err(Flaw::Strings {
                expected,
                found: self.strings.len(),
            }),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod testing {
    //! Tables as firmware makes them.

    /// A structure with these fields and strings.
    pub fn structure(kind: u8, fields: &[u8], strings: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![kind, 4 + fields.len() as u8, 0, 1];
        bytes.extend(fields);
        for string in strings {
            bytes.extend(*string);
            bytes.push(0);
        }
        bytes.extend(if strings.is_empty() {
            &[0, 0][..]
        } else {
            &[0]
        });
        bytes
    }

    /// A table that has these strings for anybody, between other structures.
    pub fn table(strings: &[&[u8]]) -> Vec<u8> {
        let system = structure(1, &[1, 2, 0, 0], &[b"QEMU", b"Standard PC"]);
        let oem = structure(11, &[strings.len() as u8], strings);
        [
            system,
            oem,
            structure(32, &[0; 7], &[]),
            structure(127, &[], &[]),
        ]
        .concat()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::{structure, table};
    use super::*;

    fn flaw(table: &[u8]) -> Flaw {
        match oem_strings(table).unwrap_err() {
            SmbiosError::Structure { flaw, .. } => flaw,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_strings_of_all_structures_are_found_in_their_order() {
        assert_eq!(oem_strings(&[]).unwrap(), [b""; 0]);
        assert_eq!(oem_strings(&table(&[])).unwrap(), [b""; 0]);
        let one = table(&[b"first", b"second"]);
        assert_eq!(oem_strings(&one).unwrap(), [&b"first"[..], b"second"]);
        let again = structure(11, &[1], &[b"third"]);
        let both = [&again[..], &one].concat();
        assert_eq!(
            oem_strings(&both).unwrap(),
            [&b"third"[..], b"first", b"second"]
        );
        // What follows the end is not part of the table; a table may also end without one.
        let padded = [&one[..], &[0xff; 7]].concat();
        assert_eq!(oem_strings(&padded).unwrap().len(), 2);
        assert_eq!(oem_strings(&again).unwrap(), [b"third"]);
    }

    #[test]
    fn a_table_that_cannot_be_followed_is_an_error() {
        let whole = table(&[b"first"]);
        let end = structure(127, &[], &[]);
        let without_end = &whole[..whole.len() - end.len()];
        let boundaries: Vec<usize> = {
            let mut at = vec![0];
            let mut rest = without_end;
            while !rest.is_empty() {
                rest = Structure::parse(rest).unwrap().rest;
                at.push(without_end.len() - rest.len());
            }
            at
        };
        for length in 0..without_end.len() {
            let cut = oem_strings(&whole[..length]);
            assert_eq!(cut.is_ok(), boundaries.contains(&length), "{length}");
        }
        assert_eq!(flaw(&[1, 3, 0, 0, 0, 0]), Flaw::Length(3));
        assert_eq!(flaw(&[1, 255, 0, 0, 0, 0]), Flaw::Truncated);
        let wrong = structure(11, &[2], &[b"first"]);
        let expected = Flaw::Strings {
            expected: 2,
            found: 1,
        };
        assert_eq!(flaw(&wrong), expected);
        let error = oem_strings(&wrong).unwrap_err();
        assert_eq!(
            error.to_string(),
            "SMBIOS structure at byte 0 of 12: expected 2 strings, got 1"
        );
    }

    #[test]
    fn the_kernels_files_are_read() {
        let sys = tempfile::tempdir().unwrap();
        let smbios = Smbios::at(sys.path());
        assert_eq!(smbios.oem_strings().unwrap(), [b""; 0]);
        assert_eq!(smbios.vendor().unwrap(), None);
        for (path, content) in [
            ("firmware/dmi/tables/DMI", &table(&[b"text"])[..]),
            ("class/dmi/id/sys_vendor", b"Amazon EC2\n"),
            ("class/dmi/id/product_name", b"m7i.large\n"),
        ] {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        assert_eq!(smbios.oem_strings().unwrap(), [b"text"]);
        assert_eq!(smbios.vendor().unwrap().unwrap(), "Amazon EC2");
        assert_eq!(smbios.product().unwrap().unwrap(), "m7i.large");
    }

    proptest! {
        #[test]
        fn arbitrary_tables_never_panic(table: Vec<u8>) {
            drop(oem_strings(&table));
        }

        #[test]
        fn strings_are_read_back(strings in prop::collection::vec("[ -~]{1,20}", 0..8)) {
            let strings: Vec<&[u8]> = strings.iter().map(|string| string.as_bytes()).collect();
            prop_assert_eq!(oem_strings(&table(&strings)).unwrap(), strings);
        }
    }
}
