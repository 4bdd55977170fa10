//! Fuzz targets: every decoder of a node that reads a disk, a network or a device before it knows who wrote what it
//! reads.
//!
//! A [`Target`] takes any bytes, gives them to the decoder that the node uses, and panics if a promise is broken: that it
//! does not panic, allocates little ([`Target::run`] counts), and, where there is an encoder, that what was decoded is
//! encoded to something that is decoded to the same. `cargo xtask fuzz` runs targets under libFuzzer, which sees which
//! code an input reaches; `tests/inputs.rs` runs the committed inputs, and mutations of them, with every `cargo test`.
//!
//! To add a target: a file in `targets/` beside the others, its two lines in `targets.rs`, and
//! `HEARTH_WRITE_SEEDS=1 cargo test -p hearth-fuzz`, which writes its seeds to `corpus/`.
//!
//! A format with a checksum rejects almost everything that a fuzzer makes of it. Such a target can be told by a bit of
//! its input to correct the checksums first: whoever writes to a disk can do the same.

mod parts;
mod targets;

use std::alloc::System;

use cap::Cap;
pub use targets::TARGETS;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// What a run may allocate for each byte of its input: many small messages, each with strings and lists, and the lists
/// that they are moved to as they grow.
const PER_BYTE: usize = 512;

/// Inputs from which fuzzing starts, with the names of their files.
pub type Seeds = Vec<(&'static str, Vec<u8>)>;

/// A decoder that is fuzzed.
pub struct Target {
    /// Its name for `cargo xtask fuzz`, and that of the folders with its inputs.
    pub name: &'static str,
    /// What a run may allocate, in bytes, in addition to what is in proportion to the input.
    allocates: usize,
    check: fn(&[u8]),
    seeds: fn() -> Seeds,
}

impl Target {
    /// The target with this name.
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Decodes an input.
    ///
    /// # Panics
    /// If a promise of the decoder is broken. What other threads allocate meanwhile counts as well.
    pub fn run(&self, input: &[u8]) {
        let before = ALLOCATOR.total_allocated();
        (self.check)(input);
        let allocated = ALLOCATOR.total_allocated().wrapping_sub(before);
        let most = self.allocates + PER_BYTE * input.len();
        assert!(
            allocated <= most,
            "{}: {} bytes of input: expected allocations of at most {most} bytes, got {allocated}",
            self.name,
            input.len(),
        );
    }

    /// The seeds of its corpus.
    pub fn seeds(&self) -> Seeds {
        (self.seeds)()
    }
}
