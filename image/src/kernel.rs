//! Checks a Linux kernel before it is built into an image: otherwise a wrong file only shows when the firmware falls
//! back to its shell.

/// Why a file is not a kernel that this image can boot.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KernelError {
    /// There is no boot header at the offset of x86 kernels.
    #[error("not an x86 bzImage: {0}")]
    NotBzImage(&'static str),
    /// The kernel was configured without an option that UEFI needs.
    #[error("64-bit UEFI cannot start the kernel: it lacks {0}")]
    NoEfiStub(&'static str),
}

/// XLF_KERNEL_64 | XLF_EFI_HANDOVER_64, in the boot header's `xloadflags`.
const KERNEL_64: u16 = 1;
const EFI_HANDOVER_64: u16 = 1 << 3;

/// Checks that `image` is a 64-bit bzImage with the EFI stub, and returns its version string ("6.12.1 (…) #1 …").
pub fn check(image: &[u8]) -> Result<String, KernelError> {
    let word = |offset: usize| -> Option<u16> {
        Some(u16::from_le_bytes([
            *image.get(offset)?,
            *image.get(offset + 1)?,
        ]))
    };
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err(KernelError::NotBzImage(
            "no boot header (\"HdrS\") at offset 0x202",
        ));
    }
    // Protocol 2.12 introduced xloadflags.
    if word(0x206).is_none_or(|version| version < 0x20c) {
        return Err(KernelError::NotBzImage(
            "its boot protocol is older than 2.12",
        ));
    }
    let flags = word(0x236).ok_or(KernelError::NotBzImage("it ends inside the boot header"))?;
    if flags & KERNEL_64 == 0 {
        return Err(KernelError::NotBzImage("it is a 32-bit kernel"));
    }
    if image.get(..2) != Some(b"MZ") {
        return Err(KernelError::NoEfiStub("the PE header (CONFIG_EFI_STUB)"));
    }
    if flags & EFI_HANDOVER_64 == 0 {
        return Err(KernelError::NoEfiStub(
            "the 64-bit handover (CONFIG_EFI_HANDOVER_PROTOCOL)",
        ));
    }
    let version = word(0x20e)
        .filter(|&offset| offset != 0)
        .and_then(|offset| image.get(usize::from(offset) + 0x200..))
        .and_then(|text| text.split(|&b| b == 0).next())
        .map(|text| String::from_utf8_lossy(text).into_owned());
    version
        .filter(|text| !text.is_empty())
        .ok_or(KernelError::NotBzImage(
            "its version is not where its header says",
        ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage() -> Vec<u8> {
        let mut image = vec![0; 0x400];
        image[..2].copy_from_slice(b"MZ");
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        image[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        image[0x236..0x238].copy_from_slice(&(KERNEL_64 | EFI_HANDOVER_64).to_le_bytes());
        image[0x300..0x307].copy_from_slice(b"6.12.9 ");
        image
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(check(&bzimage()), Ok("6.12.9 ".into()));
        assert!(matches!(check(b"\x7fELF"), Err(KernelError::NotBzImage(_))));
        let corrupt = |offset: usize, value: u8| {
            let mut image = bzimage();
            image[offset] = value;
            check(&image)
        };
        assert!(matches!(corrupt(0, 0), Err(KernelError::NoEfiStub(m)) if m.contains("EFI_STUB")));
        assert!(
            matches!(corrupt(0x236, 1), Err(KernelError::NoEfiStub(m)) if m.contains("HANDOVER"))
        );
        assert!(
            matches!(corrupt(0x236, 8), Err(KernelError::NotBzImage(m)) if m.contains("32-bit"))
        );
        assert!(matches!(corrupt(0x207, 1), Err(KernelError::NotBzImage(m)) if m.contains("2.12")));
        assert!(
            matches!(corrupt(0x20f, 0xff), Err(KernelError::NotBzImage(m)) if m.contains("version"))
        );
    }

    #[test]
    fn truncation_is_no_panic() {
        let image = bzimage();
        for end in 0..=0x300 {
            assert!(check(&image[..end]).is_err(), "{end}");
        }
    }
}
