//! Stored records as files in a crate's `fixtures/`, by which tests tell that what was once written is still read, and is
//! still written.
//!
//! A fixture that is there is never overwritten: a disk somewhere holds those bytes. A new one is made of an empty file,
//! by a run of its test with [`WRITE`] in the environment.

use std::fs;

/// In the environment: what is written now fills the fixtures that are empty.
pub const WRITE: &str = "HEARTH_WRITE_FIXTURES";

/// The bytes of a fixture of the calling crate.
#[macro_export]
macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/", $name)).as_slice()
    };
}

/// Checks that exactly the bytes of a fixture of the calling crate are written, and gives the fixture, to be read.
#[macro_export]
macro_rules! stored_form {
    ($name:literal, $written:expr) => {
        $crate::testing::fixtures::check(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/", $name),
            $crate::fixture!($name),
            $written.as_ref(),
        )
    };
}

/// See [`stored_form`](crate::stored_form).
#[track_caller]
pub fn check(path: &str, fixture: &[u8], written: &[u8]) -> Vec<u8> {
    if fixture.is_empty() && !written.is_empty() && std::env::var_os(WRITE).is_some() {
        fs::write(path, written).expect("a fixture can be written");
        return written.to_vec();
    }
    assert!(
        fixture == written,
        "{path}: another form is written than is stored\n stored: {}\nwritten: {}",
        hex::encode(fixture),
        hex::encode(written)
    );
    fixture.to_vec()
}
