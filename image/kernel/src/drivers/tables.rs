//! Device tables in compiled objects, and their entries as aliases.
//!
//! The entries are C structs of `include/linux/mod_devicetable.h`, as laid out for x86-64; a table ends with an entry of
//! zeros, or where its symbol does. The pointers in them are filled by relocations and are zero here; no alias depends on
//! them.

use std::collections::BTreeSet;

use goblin::elf::Elf;

/// A kind of table: its name in `MODULE_DEVICE_TABLE`, the size of an entry, and the alias of an entry.
struct Bus {
    name: &'static str,
    entry: usize,
    alias: fn(&[u8]) -> String,
}

/// The kinds that are read: what a machine can be made of.
const BUSES: [Bus; 6] = [
    Bus {
        name: "pci",
        entry: 40,
        alias: pci,
    },
    Bus {
        name: "usb",
        entry: 32,
        alias: usb,
    },
    Bus {
        name: "virtio",
        entry: 8,
        alias: virtio,
    },
    Bus {
        name: "vmbus",
        entry: 24,
        alias: vmbus,
    },
    Bus {
        name: "acpi",
        entry: 32,
        alias: acpi,
    },
    Bus {
        name: "pnp",
        entry: 16,
        alias: pnp,
    },
];

/// The tables that a source exports: the kind and the symbol of each.
pub(super) fn exported(source: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (at, word) in source.match_indices("MODULE_DEVICE_TABLE") {
        let rest = source[at + word.len()..].trim_start();
        let Some((arguments, _)) = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'))
        else {
            continue;
        };
        if let Some((bus, symbol)) = arguments.split_once(',')
            && BUSES.iter().any(|known| known.name == bus.trim())
        {
            found.push((bus.trim().to_owned(), symbol.trim().to_owned()));
        }
    }
    found
}

/// The aliases of a table in an object. None if the object does not have the table: the configuration leaves it out.
pub(super) fn aliases(
    object: &[u8],
    bus: &str,
    symbol: &str,
) -> Result<Option<BTreeSet<String>>, String> {
    let Some(bus) = BUSES.iter().find(|known| known.name == bus) else {
        return Ok(None);
    };
    let elf = Elf::parse(object).map_err(|error| error.to_string())?;
    let named = |sym: &goblin::elf::Sym| elf.strtab.get_at(sym.st_name) == Some(symbol);
    let Some(sym) = elf.syms.iter().find(named) else {
        return Ok(None);
    };
    // Defined elsewhere.
    let Some(section) = elf
        .section_headers
        .get(sym.st_shndx)
        .filter(|_| sym.st_shndx > 0)
    else {
        return Ok(None);
    };
    let begin = (section.sh_offset + sym.st_value) as usize;
    let table = object
        .get(begin..)
        .and_then(|rest| rest.get(..sym.st_size as usize))
        .ok_or("it is not inside the object")?;
    if table.len() % bus.entry != 0 {
        return Err(format!(
            "expected entries of {} bytes, got a table of {}",
            bus.entry,
            table.len()
        ));
    }
    Ok(Some(entries(table, bus)))
}

fn entries(table: &[u8], bus: &Bus) -> BTreeSet<String> {
    table
        .chunks_exact(bus.entry)
        .take_while(|entry| entry.iter().any(|byte| *byte != 0))
        .map(bus.alias)
        .collect()
}

fn u16_at(entry: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([entry[at], entry[at + 1]])
}

fn u32_at(entry: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
}

/// A field of an alias: its letters and a number, or `*` for any.
fn field(letters: &str, value: Option<u32>, digits: usize) -> String {
    match value {
        Some(value) => format!("{letters}{value:0digits$X}"),
        None => format!("{letters}*"),
    }
}

/// `vendor, device, subvendor, subdevice, class, class_mask`.
fn pci(entry: &[u8]) -> String {
    let id = |index: usize| Some(u32_at(entry, 4 * index)).filter(|id| *id != u32::MAX);
    let (class, mask) = (u32_at(entry, 16), u32_at(entry, 20));
    let byte = |shift: u32| {
        let whole = mask >> shift & 0xff == 0xff;
        whole.then_some(class >> shift & 0xff)
    };
    [
        field("pci:v", id(0), 8),
        field("d", id(1), 8),
        field("sv", id(2), 8),
        field("sd", id(3), 8),
        field("bc", byte(16), 2),
        field("sc", byte(8), 2),
        field("i", byte(0), 2),
    ]
    .concat()
}

/// `match_flags, idVendor, idProduct, bcdDevice_lo, bcdDevice_hi` of 16 bits, then classes of 8.
fn usb(entry: &[u8]) -> String {
    let flags = u16_at(entry, 0);
    let word = |bit: u32, at: usize| (flags >> bit & 1 == 1).then(|| u32::from(u16_at(entry, at)));
    let byte = |bit: u32, at: usize| (flags >> bit & 1 == 1).then(|| u32::from(entry[at]));
    [
        field("usb:v", word(0, 2), 4),
        field("p", word(1, 4), 4),
        // A range of device releases, of which an alias can only say that it is not all.
        match (word(2, 6), word(3, 8)) {
            (None, None) => "d*".to_owned(),
            (low, high) => format!("{}-{}", field("d", low, 4), field("", high, 4)),
        },
        field("dc", byte(4, 10), 2),
        field("dsc", byte(5, 11), 2),
        field("dp", byte(6, 12), 2),
        field("ic", byte(7, 13), 2),
        field("isc", byte(8, 14), 2),
        field("ip", byte(9, 15), 2),
    ]
    .concat()
}

/// `device, vendor`.
fn virtio(entry: &[u8]) -> String {
    let id = |at: usize| Some(u32_at(entry, at)).filter(|id| *id != u32::MAX);
    field("virtio:d", id(0), 8) + &field("v", id(4), 8)
}

/// A GUID.
fn vmbus(entry: &[u8]) -> String {
    let digits = entry[..16].iter().map(|byte| format!("{byte:02x}"));
    format!("vmbus:{}", digits.collect::<String>())
}

/// `id[16]`, driver data, `cls, cls_msk`.
fn acpi(entry: &[u8]) -> String {
    match text(&entry[..16]).as_str() {
        "" => format!("acpi*:{:06x}:*", u32_at(entry, 24)),
        id => format!("acpi*:{id}:*"),
    }
}

/// `id[8]`.
fn pnp(entry: &[u8]) -> String {
    format!("pnp:d{}*", text(&entry[..8]))
}

fn text(bytes: &[u8]) -> String {
    let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32], length: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(length, 0);
        bytes
    }

    #[test]
    fn exported_tables_are_found_in_whatever_layout() {
        let source = "MODULE_DEVICE_TABLE(pci, e1000_pci_tbl);\n\
                      MODULE_DEVICE_TABLE (usb,\n\tids);\nMODULE_DEVICE_TABLE(of, match);\n\
                      #define MODULE_DEVICE_TABLE";
        let found = exported(source);
        let found: Vec<_> = found.iter().map(|(a, b)| (&a[..], &b[..])).collect();
        assert_eq!(found, [("pci", "e1000_pci_tbl"), ("usb", "ids")]);
    }

    #[test]
    fn entries_are_written_as_modules_alias_has_them() {
        let any = u32::MAX;
        let by_id = words(&[0x8086, 0x105e, any, any, 0, 0], 40);
        let by_class = words(&[any, any, any, any, 0x01_08_02, 0xff_ff_ff], 40);
        let table = [by_id, by_class, vec![0; 40]].concat();
        let found: Vec<String> = entries(&table, &BUSES[0]).into_iter().collect();
        assert_eq!(
            found,
            [
                "pci:v*d*sv*sd*bc01sc08i02",
                "pci:v00008086d0000105Esv*sd*bc*sc*i*"
            ]
        );
        assert_eq!(virtio(&words(&[2, any], 8)), "virtio:d00000002v*");
        let mut storage = vec![0; 32];
        storage[0] = 0x80;
        storage[1] = 0x03;
        (storage[13], storage[14], storage[15]) = (8, 6, 0x50);
        assert_eq!(usb(&storage), "usb:v*p*d*dc*dsc*dp*ic08isc06ip50");
        let mut tpm = b"MSFT0101".to_vec();
        tpm.resize(32, 0);
        assert_eq!(acpi(&tpm), "acpi*:MSFT0101:*");
    }

    /// A symbol of this test program, which is an ELF file like an object.
    #[test]
    fn what_is_not_in_an_object_is_none() {
        let program = std::fs::read("/proc/self/exe").unwrap();
        assert_eq!(aliases(&program, "pci", "no_such_table"), Ok(None));
        assert_eq!(aliases(&program, "of", "no_such_table"), Ok(None));
        assert!(aliases(b"not ELF", "pci", "x").is_err());
    }
}
