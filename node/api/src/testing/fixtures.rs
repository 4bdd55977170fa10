//! Stored records as files in a crate's `fixtures/`, by which tests check that the stored form can
//! still be read, and is still what is written.
//!
//! An existing fixture is never overwritten: some disk contains those bytes. To make a new one,
//! create an empty file and run its test with [`WRITE`] in the environment.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::fs;

/// Environment variable: fill empty fixtures with what is written now.
pub const WRITE: &str = "HEARTH_WRITE_FIXTURES";

/// The bytes of a fixture of the calling crate.
#[macro_export]
macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/", $name)).as_slice()
    };
}

/// Checks that what is written equals a fixture of the calling crate, and returns the fixture, to
/// be read.
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

/// Implements [`stored_form`].
#[track_caller]
pub fn check(path: &str, fixture: &[u8], written: &[u8]) -> Vec<u8> {
    if fixture.is_empty() && !written.is_empty() && std::env::var_os(WRITE).is_some() {
        fs::write(path, written).expect("cannot write the fixture");
        return written.to_vec();
    }
    assert!(
        fixture == written,
        "{path}: the written form differs from the stored one\n stored: {}\nwritten: {}",
        hex::encode(fixture),
        hex::encode(written)
    );
    fixture.to_vec()
}
