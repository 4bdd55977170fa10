//! The PE section writer against `goblin` as reader.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

use goblin::pe::PE;
use hearth_image::pe::{PeError, Section, append_sections};
use proptest::prelude::*;

/// A small but complete PE32+ program with one section, and space for `rows` more in its headers.
fn stub(rows: usize, section_alignment: u32) -> Vec<u8> {
    let headers = (0x80 + 24 + 240 + 40 * (1 + rows)).next_multiple_of(512);
    // Exactly enough space for `rows`: the rest of the headers' last sector is not empty.
    let used = 0x80 + 24 + 240 + 40;
    let mut image = vec![0; headers];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"MZ");
    put(0x3c, &0x80u32.to_le_bytes());
    put(0x80, b"PE\0\0");
    put(0x84, &0x8664u16.to_le_bytes());
    put(0x86, &1u16.to_le_bytes());
    put(0x94, &240u16.to_le_bytes());
    put(0x96, &0x206u16.to_le_bytes());
    let optional = 0x98;
    put(optional, &0x20bu16.to_le_bytes());
    put(optional + 16, &0x1000u32.to_le_bytes());
    put(optional + 32, &section_alignment.to_le_bytes());
    put(optional + 36, &512u32.to_le_bytes());
    put(optional + 56, &0x2000u32.to_le_bytes());
    put(optional + 60, &(headers as u32).to_le_bytes());
    put(optional + 68, &10u16.to_le_bytes());
    put(optional + 108, &16u32.to_le_bytes());
    let row = optional + 240;
    put(row, b".text");
    put(row + 8, &300u32.to_le_bytes());
    put(row + 12, &0x1000u32.to_le_bytes());
    put(row + 16, &512u32.to_le_bytes());
    put(row + 20, &(headers as u32).to_le_bytes());
    put(row + 36, &0x6000_0020u32.to_le_bytes());
    if used + rows * 40 < headers {
        put(used + rows * 40, &[0xff]);
    }
    image.resize(headers + 512, 0xc3);
    image
}

fn section<'a>(name: &'a str, data: &'a [u8]) -> Section<'a> {
    Section { name, data }
}

/// Every section's content by name, after the checks a loader would make.
fn read_back(image: &[u8]) -> Vec<(String, Vec<u8>)> {
    let pe = PE::parse(image).unwrap();
    let windows = &pe.header.optional_header.unwrap().windows_fields;
    let mut end = u64::from(windows.size_of_headers);
    let mut sections = Vec::new();
    for section in &pe.sections {
        let address = u64::from(section.virtual_address);
        assert!(address >= end, "{section:?} begins before {end:#x}");
        end = address + u64::from(section.virtual_size);
        let at = section.pointer_to_raw_data as usize;
        assert!(at + section.size_of_raw_data as usize <= image.len());
        let data = &image[at..at + (section.virtual_size as usize)];
        sections.push((section.name().unwrap().to_owned(), data.to_vec()));
    }
    assert!(u64::from(windows.size_of_image) >= end);
    assert_eq!(windows.check_sum, checksum(image));
    sections
}

/// The checksum as the specification defines it: 16-bit words with end-around carry, the field as zero, plus length.
fn checksum(image: &[u8]) -> u32 {
    let field = u32::from_le_bytes(image[0x3c..0x40].try_into().unwrap()) as usize + 24 + 64;
    let mut sum = 0u32;
    for (index, word) in image.chunks(2).enumerate() {
        if index * 2 == field || index * 2 == field + 2 {
            continue;
        }
        sum += u32::from(word[0]) | u32::from(*word.get(1).unwrap_or(&0)) << 8;
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum + image.len() as u32
}

#[test]
fn sections_of_a_stub_stay_and_new_ones_follow() {
    let image = append_sections(
        &stub(4, 512),
        &[
            section(".osrel", b"ID=test\n"),
            section(".cmdline", b"quiet"),
            section(".initrd", &[1; 5000]),
            section(".linux", &[2; 70_000]),
        ],
    )
    .unwrap();
    let sections = read_back(&image);
    let names: Vec<&str> = sections.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, [".text", ".osrel", ".cmdline", ".initrd", ".linux"]);
    assert_eq!(sections[0].1, [0xc3; 300]);
    assert_eq!(sections[2].1, b"quiet");
    assert_eq!(sections[4].1, [2; 70_000]);
    let pe = PE::parse(&image).unwrap();
    for section in &pe.sections[1..] {
        assert_eq!(section.virtual_address % 4096, 0);
        assert_eq!(section.pointer_to_raw_data % 512, 0);
        assert_eq!(section.characteristics, 0x4000_0040);
    }
    assert_eq!(
        pe.header
            .optional_header
            .unwrap()
            .standard_fields
            .size_of_initialized_data,
        512 + 512 + 5120 + 70_144
    );
}

#[test]
fn debians_stub_takes_the_six() {
    let path = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";
    let stub = std::fs::read(path).unwrap_or_else(|e| {
        panic!("this test needs {path} (package systemd-boot-efi, `cargo xtask setup` installs it): {e}")
    });
    let before = PE::parse(&stub).unwrap().sections.len();
    let image = append_sections(
        &stub,
        &[
            section(".osrel", b"ID=test\n"),
            section(".cmdline", b"quiet"),
            section(".pcrpkey", b"a key"),
            section(".pcrsig", b"{}"),
            section(".initrd", &[1; 5000]),
            section(".linux", &[2; 70_000]),
        ],
    )
    .unwrap();
    assert_eq!(read_back(&image).len(), before + 6);
}

#[test]
fn what_cannot_be_is_refused() {
    let good = stub(2, 4096);
    let refused =
        |image: &[u8], sections: &[Section<'_>]| append_sections(image, sections).unwrap_err();
    let one = [section(".a", b"x")];
    let three = [one[0], section(".b", b"x"), section(".c", b"x")];
    assert_eq!(
        refused(&good, &three),
        PeError::NoRoom { room: 2, wanted: 3 }
    );
    // Enough space, but it is not empty.
    let four = [three[0], three[1], three[2], section(".d", b"x")];
    assert_eq!(refused(&stub(3, 512), &four), PeError::RoomInUse);
    assert_eq!(
        refused(&good, &[section(".text", b"x")]),
        PeError::Duplicate(".text".into())
    );
    assert_eq!(
        refused(&good, &[one[0], one[0]]),
        PeError::Duplicate(".a".into())
    );
    assert_eq!(
        refused(&good, &[section(".a", b"")]),
        PeError::Empty(".a".into())
    );
    for name in ["", ".ninechar", ".ä", "a b"] {
        assert_eq!(
            refused(&good, &[section(name, b"x")]),
            PeError::Name(name.into())
        );
    }
    let corrupt = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        refused(&image, &one)
    };
    let optional = 0x98;
    assert!(matches!(corrupt(0, b"ZM"), PeError::NotX64 { .. }));
    assert!(matches!(
        corrupt(0x84, &0x14cu16.to_le_bytes()),
        PeError::NotX64 {
            field: "Machine",
            ..
        }
    ));
    assert!(matches!(
        corrupt(optional, &0x10bu16.to_le_bytes()),
        PeError::NotX64 { .. }
    ));
    assert!(matches!(
        corrupt(optional + 32, &[0; 4]),
        PeError::Alignment {
            field: "SectionAlignment",
            ..
        }
    ));
    assert!(matches!(
        corrupt(optional + 36, &[1, 3, 0, 0]),
        PeError::Alignment {
            field: "FileAlignment",
            ..
        }
    ));
    assert_eq!(corrupt(optional + 112 + 36, &[8]), PeError::Signed);
    let row = optional + 240;
    assert!(matches!(
        corrupt(row + 20, &0xffff_fe00u32.to_le_bytes()),
        PeError::Truncated { .. }
    ));
    assert!(matches!(
        corrupt(row + 12, &0x10u32.to_le_bytes()),
        PeError::Overlap { .. }
    ));
    assert!(matches!(
        corrupt(row + 20, &0x10u32.to_le_bytes()),
        PeError::Overlap { .. }
    ));
    assert!(matches!(
        corrupt(row + 12, &0xffff_f000u32.to_le_bytes()),
        PeError::TooLarge(_)
    ));
    assert!(matches!(
        corrupt(0x3c, &0xffff_fff8u32.to_le_bytes()),
        PeError::Truncated { .. }
    ));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_sections_read_back(
        contents in proptest::collection::vec(
            (any::<u8>(), 1usize..20_000).prop_map(|(byte, length)| vec![byte; length]),
            0..12,
        ),
        alignment in prop::sample::select(vec![512u32, 1024, 4096]),
    ) {
        let stub = stub(contents.len(), alignment);
        let names: Vec<String> = (0..contents.len()).map(|n| format!(".s{n}")).collect();
        let sections: Vec<Section<'_>> =
            names.iter().zip(&contents).map(|(name, data)| section(name, data)).collect();
        let image = append_sections(&stub, &sections).unwrap();
        let back = read_back(&image);
        prop_assert_eq!(back.len(), 1 + contents.len());
        for (section, (name, data)) in sections.iter().zip(&back[1..]) {
            prop_assert_eq!(section.name, name);
            prop_assert_eq!(section.data, &data[..]);
        }
        prop_assert_eq!(image, append_sections(&stub, &sections).unwrap());
    }

    /// A stub with bytes changed or cut off gives an error or a result, never a panic.
    #[test]
    fn hostile_stubs(
        changes in proptest::collection::vec((0usize..0x300, any::<u8>()), 0..6),
        length in 0usize..2000,
    ) {
        let mut image = stub(4, 512);
        for (at, byte) in changes {
            image[at] = byte;
        }
        image.truncate(length.max(64));
        let _ = append_sections(&image, &[section(".a", b"x"), section(".b", &[0; 3000])]);
        image.truncate(length.min(64));
        prop_assert!(append_sections(&image, &[section(".a", b"x")]).is_err());
    }
}
