//! The event log of the firmware, from the kernel.

use hearth_tpm::attestation::QUOTED;
use hearth_tpm::boot_log::{BootEvent, MAX_EVENTS, events, replay};
use hearth_tpm::images::{TrustedImage, judge};
use hearth_tpm::testing::event_log;
use hearth_tpm::{Digest, Pcr};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "boot_log",
    allocates: 64 << 10,
    check,
    seeds,
};

/// A log that is read says the same when it is written again, and a boot is one of the image that it names.
fn check(input: &[u8]) {
    let Ok(found) = events(input, QUOTED) else {
        return;
    };
    assert!(found.len() <= MAX_EVENTS);
    assert!(replay(&found, QUOTED).is_some());
    let again = events(&event_log(&found), QUOTED);
    assert_eq!(again.as_ref(), Ok(&found));
    if let Some(image) = TrustedImage::booted(&found) {
        assert_eq!(judge([&image], &found), Ok(&image));
    }
}

fn seeds() -> Seeds {
    let event = |pcr, content: &[u8]| BootEvent {
        pcr,
        digest: Digest::of(&[content]),
    };
    let boot = [
        event(
            Pcr::BOOT_PROGRAMS,
            b"Calling EFI Application from Boot Option",
        ),
        event(Pcr::BOOT_PROGRAMS, &[0; 4]),
        event(Pcr::BOOT_PROGRAMS, b"loader"),
        event(Pcr::BOOT_PROGRAMS, b"image"),
        event(Pcr::BOOT_PROGRAMS, b"kernel"),
        event(Pcr::COMMAND_LINE, b"quiet"),
        event(Pcr::KERNEL_IMAGE, b"image"),
        event(Pcr::SECURE_BOOT, b"off"),
    ];
    vec![("boot", event_log(&boot)), ("nothing", event_log(&[]))]
}
