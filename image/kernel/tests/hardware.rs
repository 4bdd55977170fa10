//! The tables of `docs/hardware.md`: the drivers of the kernel, and which of them have been booted.
//!
//! The drivers are those of the kernel in the user's cache ([`hearth_kernel::cached`]), so what the page says was compiled;
//! which are booted follows from the machines that the suite `hardware` of the end-to-end tests boots. Without a kernel in
//! the cache there is nothing to compare, and the test says so. With [`WRITE`] in the environment it writes the tables.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use hearth_build::progress::Silent;
use hearth_kernel::drivers::Driver;
use hearth_qemu::hardware::{Card, DiskBus};

/// Environment variable: if set, the tables are written instead of compared.
const WRITE: &str = "HEARTH_WRITE_DOCS";

const BEGIN: &str = "<!-- drivers: made by image/kernel/tests/hardware.rs -->\n";
const END: &str = "<!-- drivers end -->\n";

/// The sections of the page, and where the drivers of each are in the sources. A driver is in the first that fits.
const SECTIONS: [(&str, &[&str]); 6] = [
    (
        "Disks",
        &[
            "drivers/ata/",
            "drivers/block/",
            "drivers/message/",
            "drivers/mmc/",
            "drivers/nvme/",
            "drivers/scsi/",
            "drivers/usb/storage/",
        ],
    ),
    ("Network cards", &["drivers/net/"]),
    (
        "USB controllers, keyboards and screens",
        &[
            "drivers/gpu/",
            "drivers/hid/",
            "drivers/input/",
            "drivers/usb/",
            "drivers/video/",
        ],
    ),
    (
        "Virtual machines",
        &[
            "drivers/firmware/",
            "drivers/hv/",
            "drivers/pci/",
            "drivers/virtio/",
            "drivers/xen/",
        ],
    ),
    (
        "TPMs, random numbers and watchdogs",
        &[
            "drivers/char/hw_random/",
            "drivers/char/tpm/",
            "drivers/watchdog/",
        ],
    ),
    ("The board", &["drivers/"]),
];

/// The drivers of devices that every machine of the tests has.
const ALWAYS_BOOTED: [&str; 4] = ["button", "i6300esb", "qemu_fw_cfg", "virtio_rng"];

fn booted() -> BTreeSet<&'static str> {
    let buses = DiskBus::ALL.into_iter().flat_map(DiskBus::drivers);
    let cards = Card::ALL.into_iter().flat_map(Card::drivers);
    buses.chain(cards).chain(&ALWAYS_BOOTED).copied().collect()
}

/// The tables, one for each section.
fn tables(drivers: &[Driver]) -> String {
    let booted = booted();
    let section = |driver: &Driver| {
        SECTIONS
            .iter()
            .position(|(_, paths)| paths.iter().any(|path| driver.path.starts_with(path)))
    };
    let mut text = String::new();
    for (index, (title, _)) in SECTIONS.iter().enumerate() {
        let mut rows: Vec<&Driver> = drivers
            .iter()
            .filter(|driver| section(driver) == Some(index))
            .collect();
        rows.sort_by_key(|driver| &driver.name);
        if rows.is_empty() {
            continue;
        }
        let _ = write!(
            text,
            "\n## {title}\n\n\
             | driver | what it says of itself | option | devices | booted under QEMU | built in, not tried |\n\
             |---|---|---|--:|:-:|:-:|\n"
        );
        for driver in rows {
            text += &row(driver, booted.contains(&driver.name[..]));
        }
    }
    text + "\n"
}

fn row(driver: &Driver, booted: bool) -> String {
    let option = driver.option.as_deref().unwrap_or_default();
    let option = option.strip_prefix("CONFIG_").unwrap_or(option);
    let description = driver.description.replace('|', "\\|").replace('<', "&lt;");
    let (yes, no) = if booted { ("✓", "") } else { ("", "✓") };
    let (name, devices) = (&driver.name, driver.aliases.len());
    format!("| `{name}` | {description} | `{option}` | {devices} | {yes} | {no} |\n")
}

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/hardware.md")
}

#[test]
fn the_page_lists_the_drivers_of_the_kernel() {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel-config");
    let kernel = match hearth_kernel::cached(&Silent, &config) {
        Ok(Some(kernel)) => kernel,
        Ok(None) => {
            eprintln!("skipped: this kernel is not in the cache; `cargo xtask kernel` builds it");
            return;
        }
        Err(error) => {
            eprintln!("skipped: a kernel could not be built here either: {error}");
            return;
        }
    };
    let drivers = kernel.drivers().unwrap();
    let names: BTreeSet<&str> = drivers.iter().map(|driver| &driver.name[..]).collect();
    for name in booted() {
        assert!(names.contains(name), "the kernel has no driver {name}");
    }
    let path = page();
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the begin of the tables");
    let (listed, after) = rest.split_once(END).expect("the end of the tables");
    let wanted = tables(&drivers);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{wanted}{END}{after}")).unwrap();
        return;
    }
    assert!(
        listed == wanted,
        "docs/hardware.md is out of date: {WRITE}=1 cargo test -p hearth-kernel --test hardware writes it"
    );
}

#[test]
fn a_driver_is_in_one_section_and_one_column() {
    let driver = |name: &str, path: &str| Driver {
        name: name.to_owned(),
        path: path.to_owned(),
        option: Some("CONFIG_X".to_owned()),
        description: "a | b".to_owned(),
        aliases: BTreeSet::from(["pci:a".to_owned(), "pci:b".to_owned()]),
    };
    let text = tables(&[
        driver("nvme", "drivers/nvme/host/nvme"),
        driver("tg3", "drivers/net/ethernet/broadcom/tg3"),
        driver("uas", "drivers/usb/storage/uas"),
        driver("ipmi_si", "drivers/char/ipmi/ipmi_si"),
    ]);
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines[0], "## Disks");
    assert_eq!(lines[3], "| `nvme` | a \\| b | `X` | 2 | ✓ |  |");
    assert!(lines[4].starts_with("| `uas`"));
    assert_eq!(lines[5], "## Network cards");
    assert!(lines[8].ends_with("|  | ✓ |"), "{}", lines[8]);
    assert_eq!(lines[9], "## The board");
}
