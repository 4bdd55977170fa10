//! The table of SMBIOS, as firmware or a hypervisor has made it.

use hearth_sys::smbios::testing::{structure, table};
use hearth_sys::smbios::{SmbiosError, oem_strings};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "smbios",
    allocates: 256 << 10,
    check,
    seeds,
};

/// Strings are parts of the table, in their order; a flaw is inside it.
fn check(input: &[u8]) {
    match oem_strings(input) {
        Ok(strings) => {
            let mut rest = input;
            for string in &strings {
                assert!(!string.is_empty() && !string.contains(&0), "{string:?}");
                let found = rest.windows(string.len()).position(|part| part == string);
                rest = &rest[found.expect("a part of the table") + string.len()..];
            }
        }
        Err(SmbiosError::Structure { at, size, .. }) => assert!(at < size && size == input.len()),
        Err(error) => panic!("{error}"),
    }
}

fn seeds() -> Seeds {
    let usual = table(&[b"dev.hearth.parameters=eA==", b"other"]);
    let twice = [structure(11, &[1], &[b"first"]), usual.clone()].concat();
    vec![
        ("cut", usual[..40].to_vec()),
        ("none", table(&[])),
        ("twice", twice),
        ("usual", usual),
    ]
}
