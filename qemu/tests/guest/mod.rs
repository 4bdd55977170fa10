//! The smallest guest: a boot sector. It counts its starts in the disk's second sector, prints the count on the serial
//! line with [`line`], and then does the one thing that a test needs. So everything that the library does with a
//! machine is tested with a real one in a second or two, without a kernel.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::path::Path;
use std::time::Duration;

use hearth_qemu::accel::Accel;
use hearth_qemu::command::{Machine, OnReset};
use hearth_qemu::disk::{Disk, Format};
use hearth_qemu::run_dir::RunDir;

/// For operations that take a second on a quiet machine.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

/// What the guest does after its message.
#[derive(Clone, Copy)]
pub(crate) enum Then {
    /// Nothing.
    Halt,
    /// Powers the machine off.
    Shutdown,
    /// Resets it.
    Reset,
    /// Powers it off when the power button is pressed.
    PowerButton,
}

/// The guest's message at the start with this number, without the control sequences around it.
pub(crate) fn line(start: u8) -> String {
    format!("hearth: state {start}")
}

/// Where the boot sector is loaded.
const LOADED: u16 = 0x7c00;
const TEXT: usize = 0x80;

/// Counts and prints. Assembled by hand from:
///
/// ```text
/// 00: cli; xor ax, ax; mov ds, ax; mov ss, ax; mov sp, 0x7c00; sti
/// 0b: mov ah, 0x42; mov si, packet; int 0x13      ; read sector 1 to 0x8000
/// 12: inc byte [0x8000]
/// 16: mov ah, 0x43; xor al, al; mov si, packet; int 0x13      ; write it
/// 1f: cli; mov al, [0x8000]; add al, '0'; mov [digit], al
/// 28: mov dx, 0x3f8; mov si, text
/// 2e: lodsb; test al, al; jz 36; out dx, al; jmp 2e           ; say it
/// 36: jmp 48
/// 38: packet: 16 bytes, 1 sector, to 0000:8000, from sector 1
/// 48: the end
/// ```
const HEAD: [u8; 0x48] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfb, //
    0xb4, 0x42, 0xbe, 0x38, 0x7c, 0xcd, 0x13, //
    0xfe, 0x06, 0x00, 0x80, //
    0xb4, 0x43, 0x30, 0xc0, 0xbe, 0x38, 0x7c, 0xcd, 0x13, //
    0xfa, 0xa0, 0x00, 0x80, 0x04, b'0', 0xa2, 0, 0, // digit: filled in
    0xba, 0xf8, 0x03, 0xbe, 0x80, 0x7c, //
    0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf8, //
    0xeb, 0x10, //
    16, 0, 1, 0, 0x00, 0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, //
];
const DIGIT_ADDRESS: usize = 0x26;

/// hlt; jmp -3
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];
/// mov dx, 0x604; mov ax, 0x2000; out dx, ax; hlt; jmp -3: ACPI's S5 on q35
const SHUTDOWN: &[u8] = &[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4, 0xeb, 0xfd];
/// mov dx, 0xcf9; mov al, 6; out dx, al; hlt; jmp -3: the chipset's reset
const RESET: &[u8] = &[0xba, 0xf9, 0x0c, 0xb0, 0x06, 0xee, 0xf4, 0xeb, 0xfd];
/// mov dx, 0x602; mov ax, 0x100; out dx, ax: enable the power button's event;
/// mov dx, 0x600; in ax, dx; test ah, 1; jz -6: wait for it
const WAIT_FOR_BUTTON: &[u8] = &[
    0xba, 0x02, 0x06, 0xb8, 0x00, 0x01, 0xef, 0xba, 0x00, 0x06, 0xed, 0xf6, 0xc4, 0x01, 0x74, 0xfa,
];

/// A raw disk image of 1 MiB with this guest.
pub(crate) fn image(then: Then) -> Vec<u8> {
    let end = match then {
        Then::Halt => HALT.to_vec(),
        Then::Shutdown => SHUTDOWN.to_vec(),
        Then::Reset => RESET.to_vec(),
        Then::PowerButton => [WAIT_FOR_BUTTON, SHUTDOWN].concat(),
    };
    let mut sector = HEAD.to_vec();
    sector.extend(end);
    assert!(sector.len() <= TEXT, "the code runs into the text");
    sector.resize(TEXT, 0);
    sector.extend(b"\x1b[2J\x1b[01;01Hhearth: reached kernel\r\n\x1b[1mhearth: state ");
    let digit = LOADED + u16::try_from(sector.len()).expect("a short text");
    sector[DIGIT_ADDRESS..DIGIT_ADDRESS + 2].copy_from_slice(&digit.to_le_bytes());
    sector.extend(b"0\x1b[0m\r\n\0");
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(1 << 20, 0);
    sector
}

/// A machine with this guest, its disk in its folder.
pub(crate) fn machine(folder: &Path, then: Then) -> (Machine, RunDir) {
    let run_dir = RunDir::create(folder.join("guest")).expect("a run dir");
    let disk = run_dir.file("disk.img");
    std::fs::write(&disk, image(then)).expect("a disk");
    let machine = Machine {
        memory_mib: 64,
        disks: vec![Disk::new(disk, Format::Raw)],
        on_reset: OnReset::Exit,
        ..Machine::new("guest", Accel::Tcg)
    };
    (machine, run_dir)
}

/// Whether a process of this number is running; a zombie is not.
pub(crate) fn runs(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

/// Waits for the end of a process that is not a child of this one.
pub(crate) async fn gone(pid: i32) {
    let ended = async {
        while runs(pid) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(BOUND, ended)
        .await
        .expect("the process ends");
}
