//! The probe image as large as the image of a server, for measurements of pulls.
//!
//! It runs the same command as the image of the bundle, so that a pod of the one differs from a pod of the other in the
//! pull alone. Its size is content that does not compress: what is transferred is as large as what is unpacked, with
//! and without compression.

use std::path::{Path, PathBuf};

use hearth_build::cache::{self, Cache};
use hearth_build::progress::{Length, Progress};
use ring::digest::{SHA256, digest};

use crate::entry::folders;
use crate::error::BuildError;
use crate::inputs::{Inputs, KIND};
use crate::packages::Packages;
use crate::rootfs::probe_image;

/// Version of the image, part of the cache key.
const RECIPE: u32 = 1;
/// Bytes of the content; the system has two million.
const LENGTH: usize = 48_000_000;
/// The archive in an entry of the cache.
const ARCHIVE: &str = "large-probe.tar";

/// The archive, in OCI format, made if it is not in the cache. The bundle must have been ensured before.
pub fn large_probe(progress: &dyn Progress) -> Result<PathBuf, BuildError> {
    let inputs = Inputs::of_the_bundle()?;
    let key = cache::key([inputs.record(), &RECIPE.to_string(), &LENGTH.to_string()]);
    let key = format!("large-probe-{key}");
    let entry = Cache::of_user(KIND)?.ensure(progress, &key, |_, scratch| {
        make(progress, &inputs, scratch)
    })?;
    Ok(entry.join(ARCHIVE))
}

/// Makes an entry in `scratch`; returns its folder there.
fn make(progress: &dyn Progress, inputs: &Inputs, scratch: &Path) -> Result<PathBuf, BuildError> {
    inputs.verify()?;
    let task = progress.start("making an image of 50 MB", Length::Moment);
    let [stage, entry] = folders(scratch)?;
    let packages = Packages::unpack(progress, inputs, &stage)?;
    probe_image(
        progress,
        &packages,
        "hearth.local/large-probe:1",
        &incompressible(LENGTH),
        &stage.join("probe"),
        &entry.join(ARCHIVE),
    )?;
    task.done();
    Ok(entry)
}

/// This many bytes, the same every time: the hashes of 0, 1, 2 and so on.
fn incompressible(length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length + SHA256.output_len());
    let mut number = 0u64;
    while bytes.len() < length {
        bytes.extend_from_slice(digest(&SHA256, &number.to_le_bytes()).as_ref());
        number += 1;
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_as_long_as_asked_and_has_no_pattern() {
        let bytes = incompressible(100_001);
        assert_eq!(bytes.len(), 100_001);
        assert_eq!(incompressible(33), bytes[..33]);
        for byte in 0..=u8::MAX {
            let count = bytes.iter().filter(|found| **found == byte).count();
            assert!((300..480).contains(&count), "{byte}: {count}");
        }
    }
}
