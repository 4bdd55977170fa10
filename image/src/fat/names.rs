//! Names in a FAT directory: which are valid, the 8.3 name that every entry has, and the long name before it.

use std::collections::{BTreeMap, BTreeSet};

use super::{ENTRY, FatError};

/// UTF-16 units in a long name, and in each of its entries.
const LONGEST: usize = 255;
const PER_ENTRY: usize = 13;
const LONG_NAME: u8 = 0x0f;
const LAST_LONG_ENTRY: u8 = 0x40;

/// A volume label: 1 to 11 of `A-Z0-9-_`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeLabel(String);

impl VolumeLabel {
    /// Checks `label`.
    pub fn parse(label: &str) -> Result<VolumeLabel, FatError> {
        let fits = |c| matches!(c, b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_');
        if !(1..=11).contains(&label.len()) || !label.bytes().all(fits) {
            return Err(FatError::Label {
                label: label.to_owned(),
            });
        }
        Ok(VolumeLabel(label.to_owned()))
    }

    pub(super) fn padded(&self) -> [u8; 11] {
        padded(&self.0, "", 11)
    }
}

/// Whether `name` is a valid long name on every system (Windows is the strictest).
pub(super) fn check(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("a part of it is empty");
    }
    if name.encode_utf16().count() > LONGEST {
        return Err("a part of it is longer than 255 UTF-16 units");
    }
    if name
        .chars()
        .any(|c| c.is_control() || "\"*/:<>?\\|".contains(c))
    {
        return Err("it has a control character or one of \"*/:<>?\\|");
    }
    if name.starts_with(' ') || name.ends_with([' ', '.']) {
        return Err("a part of it begins with a blank, or ends with a blank or a dot");
    }
    Ok(())
}

/// A name as stored in a directory.
#[derive(Debug)]
pub(super) struct Listing {
    /// 8.3, padded, without the dot.
    pub short: [u8; 11],
    /// UTF-16; empty if the short name is sufficient.
    long: Vec<u16>,
}

/// Assigns short names to the names of a directory, in the order given. Fails on names that differ in case only.
pub(super) fn list<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<Vec<Listing>, String> {
    let mut folded = BTreeSet::new();
    let mut taken = BTreeSet::new();
    let mut numbers = BTreeMap::new();
    // Names that are 8.3 except for case keep that form, so they come first.
    for name in names.clone() {
        if !folded.insert(name.to_uppercase()) {
            return Err(name.to_owned());
        }
        taken.extend(plain(&name.to_ascii_uppercase()));
    }
    let listing = |name: &'a str| {
        let short = plain(&name.to_ascii_uppercase()).unwrap_or_else(|| {
            let short = numbered(name, &taken, &mut numbers);
            taken.insert(short);
            short
        });
        let long = if plain(name).is_some() {
            Vec::new()
        } else {
            name.encode_utf16().collect()
        };
        Listing { short, long }
    };
    Ok(names.map(listing).collect())
}

fn fits_short(c: char) -> bool {
    matches!(c, 'A'..='Z' | '0'..='9') || "!#$%&'()-@^_`{}~".contains(c)
}

fn padded(base: &str, extension: &str, width: usize) -> [u8; 11] {
    let mut short = [b' '; 11];
    short[..base.len()].copy_from_slice(base.as_bytes());
    short[width..width + extension.len()].copy_from_slice(extension.as_bytes());
    short
}

/// `name` as an 8.3 name, if it is one.
fn plain(name: &str) -> Option<[u8; 11]> {
    let (base, extension) = match name.split_once('.') {
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (name, ""),
    };
    let all_fit = base.chars().chain(extension.chars()).all(fits_short);
    ((1..=8).contains(&base.len()) && extension.len() <= 3 && all_fit)
        .then(|| padded(base, extension, 8))
}

/// An unused short name with a number, `LONGNA~1.EXT`. `numbers` remembers the last number for each prefix, so that a
/// large directory is not searched from 1 for each name.
fn numbered(
    name: &str,
    taken: &BTreeSet<[u8; 11]>,
    numbers: &mut BTreeMap<(String, String), u32>,
) -> [u8; 11] {
    let (base, extension) = match name.rsplit_once('.') {
        Some((base, extension)) if !base.is_empty() => (base, extension),
        _ => (name, ""),
    };
    let reduce = |text: &str, length: usize| -> String {
        text.chars()
            .filter(|c| !matches!(c, ' ' | '.'))
            .map(|c| c.to_ascii_uppercase())
            .map(|c| if fits_short(c) { c } else { '_' })
            .take(length)
            .collect()
    };
    let (base, extension) = (reduce(base, 6), reduce(extension, 3));
    let number = numbers
        .entry((base.clone(), extension.clone()))
        .or_insert(0);
    loop {
        // A directory has at most 65,536 entries: five digits are enough, and one number is always free.
        *number += 1;
        let tail = format!("~{number}");
        let kept = base.len().min(8 - tail.len());
        let short = padded(&format!("{}{tail}", &base[..kept]), &extension, 8);
        if !taken.contains(&short) {
            return short;
        }
    }
}

impl Listing {
    /// Number of directory entries that the name takes.
    pub(super) fn entries(&self) -> usize {
        1 + self.long.len().div_ceil(PER_ENTRY)
    }

    /// Appends the entries of the long name, last part first; they precede the short one.
    pub(super) fn write_long(&self, bytes: &mut Vec<u8>) {
        let sum = self
            .short
            .iter()
            .fold(0u8, |sum, c| sum.rotate_right(1).wrapping_add(*c));
        let parts = self.long.chunks(PER_ENTRY);
        let count = parts.len();
        for (index, part) in parts.enumerate().rev() {
            let mut entry = [0; ENTRY];
            let last = if index + 1 == count {
                LAST_LONG_ENTRY
            } else {
                0
            };
            // At most 255 / 13 parts.
            entry[0] = (index + 1) as u8 | last;
            entry[11] = LONG_NAME;
            entry[13] = sum;
            // Terminated by a zero if there is space for one, then filled with ones.
            let units = part
                .iter()
                .copied()
                .chain([0])
                .chain(std::iter::repeat(0xffff));
            let places = (1..11).chain(14..26).chain(28..32).step_by(2);
            for (at, unit) in places.zip(units) {
                entry[at..at + 2].copy_from_slice(&unit.to_le_bytes());
            }
            bytes.extend(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shorts(names: &[&str]) -> Vec<String> {
        let listing = list(names.iter().copied()).unwrap();
        listing
            .iter()
            .map(|l| String::from_utf8(l.short.to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn short_names() {
        assert_eq!(
            shorts(&["BOOTX64.EFI", "EFI"]),
            ["BOOTX64 EFI", "EFI        "]
        );
        assert_eq!(
            shorts(&["hearth", "parameters.pb", "PARAME~1.PB", "parameters2.pb"]),
            ["HEARTH     ", "PARAME~2PB ", "PARAME~1PB ", "PARAME~3PB "]
        );
        assert_eq!(
            shorts(&[".hidden", "a.b.c", "é+é"]),
            ["HIDDEN~1   ", "AB~1    C  ", "___~1      "]
        );
        assert_eq!(shorts(&["日本語のとても長い名前.txt"]), ["______~1TXT"]);
    }

    #[test]
    fn many_alike() {
        let names: Vec<String> = (0..120).map(|n| format!("a long name {n}")).collect();
        let all = shorts(&names.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(all[8], "ALONGN~9   ");
        assert_eq!(all[9], "ALONG~10   ");
        assert_eq!(all[119], "ALON~120   ");
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 120);
    }

    #[test]
    fn only_what_is_not_plain_has_a_long_name() {
        let entries = |name: &str| list([name].into_iter()).unwrap()[0].entries();
        assert_eq!(entries("BOOTX64.EFI"), 1);
        assert_eq!(entries("hearth"), 2);
        assert_eq!(entries("thirteen_char"), 2);
        assert_eq!(entries("fourteen_chars"), 3);
    }

    #[test]
    fn refused() {
        for name in [
            "",
            ".",
            "..",
            "a.",
            "a ",
            " a",
            "a/b",
            "a:b",
            "a\u{7f}",
            &"x".repeat(256),
        ] {
            assert!(check(name).is_err(), "{name:?}");
        }
        assert!(check(&"x".repeat(255)).is_ok());
        assert_eq!(list(["Ab", "aB"].into_iter()).unwrap_err(), "aB");
        for label in ["", "lower", "TWELVE-CHARS", "A B"] {
            assert!(VolumeLabel::parse(label).is_err(), "{label:?}");
        }
    }
}
