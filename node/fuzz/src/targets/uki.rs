//! EFI programs as the image builder reads them: stubs, kernels, and what firmware measures.

use hearth_image::pe::{Section, append_sections};
use hearth_image::{authenticode, kernel};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "uki",
    // Room for sections with the largest alignment, and a table of 65535 sections.
    allocates: 8 << 20,
    check,
    seeds,
};

const SECTIONS: [Section<'_>; 2] = [
    Section {
        name: ".cmdline",
        data: b"quiet",
    },
    Section {
        name: ".linux",
        data: &[0x90; 700],
    },
];

fn check(input: &[u8]) {
    let _ = kernel::check(input);
    let _ = authenticode::sha256(input);
    let Ok(program) = append_sections(input, &SECTIONS) else {
        return;
    };
    for Section { name, data } in SECTIONS {
        let stored = program.windows(data.len()).any(|stored| stored == data);
        assert!(stored, "{name} is not in the program");
    }
    // Its headers are as sound as those of the stub were.
    assert_eq!(
        authenticode::sha256(&program).is_ok(),
        authenticode::sha256(input).is_ok()
    );
}

/// The smallest PE32+ program for x86-64 with one section and room for others.
fn stub() -> Vec<u8> {
    const HEADERS: u32 = 1024;
    let mut image = vec![0; 1536];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"MZ");
    put(0x3c, &0x40_u32.to_le_bytes());
    put(0x40, b"PE\0\0");
    put(0x44, &0x8664_u16.to_le_bytes());
    put(0x46, &1_u16.to_le_bytes());
    put(0x54, &240_u16.to_le_bytes());
    let optional = 0x58;
    put(optional, &0x20b_u16.to_le_bytes());
    put(optional + 32, &4096_u32.to_le_bytes());
    put(optional + 36, &512_u32.to_le_bytes());
    put(optional + 56, &8192_u32.to_le_bytes());
    put(optional + 60, &HEADERS.to_le_bytes());
    put(optional + 108, &16_u32.to_le_bytes());
    let row = optional + 240;
    put(row, b".text");
    for (at, number) in [(8, 300), (12, 4096), (16, 512), (20, HEADERS)] {
        put(row + at, &u32::to_le_bytes(number));
    }
    image
}

fn seeds() -> Seeds {
    let mut kernel = vec![0; 0x260];
    let mut put = |at: usize, bytes: &[u8]| kernel[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"MZ");
    put(0x202, b"HdrS\x0f\x02");
    put(0x20e, &0x40_u16.to_le_bytes());
    put(0x236, &[9, 0]);
    put(0x240, b"6.12.0 (hearth)");
    vec![("stub", stub()), ("kernel", kernel)]
}
