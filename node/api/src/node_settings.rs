//! Settings of one node, which operators set: kernel settings, taints, and what is kept from pods. One set of rules for
//! the curator, for tools that check before they call it, and for the node that follows them.
//!
//! A setting is a name and a text, so that a node can keep settings of a later release, which it does not know, without
//! losing any:
//!
//! | name | value |
//! |---|---|
//! | `sysctl.NAME` | of a kernel setting in [`SYSCTLS`] |
//! | `taint.KEY` | `[VALUE:]EFFECT`, as kubectl has it |
//! | `reserved.memory` | an amount of memory, such as `512Mi` |
//! | `reserved.cpu` | of a CPU, such as `500m` or `2` |
//! | `disk.NAME` | the conditions for a disk that becomes a volume, such as `serial:S3Z8NB0K` or `size:900G..1100G` |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use crate::disk_conditions::{DiskConditions, is_word_of_disk};
use crate::labels::{self, quoted};
use crate::v1::NodeSetting;

/// Maximum settings of one node.
pub const MAX_SETTINGS: usize = 64;
/// Maximum bytes of a kernel setting's value.
const MAX_SYSCTL_LENGTH: usize = 128;
/// Bytes.
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Maximum of what is reserved: more than a machine has.
const MOST_MEMORY: u64 = 1024 * GIB;
const MOST_MILLICPUS: u32 = 1_024_000;

/// The kernel settings that may be set: limits and sizes that programs ask for, and that neither isolation nor a part of the node
/// depends on. Pods have their own of those that the kernel keeps for each namespace: most that begin with `net.`, and those of
/// messages, semaphores and shared memory that begin with `kernel.`. Of these, what is set is that of the node, and of pods in
/// its namespaces.
pub const SYSCTLS: &[&str] = &[
    "fs.aio-max-nr",
    "fs.file-max",
    "fs.inotify.max_queued_events",
    "fs.inotify.max_user_instances",
    "fs.inotify.max_user_watches",
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.sem",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "net.core.netdev_max_backlog",
    "net.core.optmem_max",
    "net.core.rmem_default",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_default",
    "net.core.wmem_max",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.neigh.default.gc_thresh1",
    "net.ipv4.neigh.default.gc_thresh2",
    "net.ipv4.neigh.default.gc_thresh3",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_wmem",
    "net.ipv6.neigh.default.gc_thresh1",
    "net.ipv6.neigh.default.gc_thresh2",
    "net.ipv6.neigh.default.gc_thresh3",
    "net.netfilter.nf_conntrack_max",
    "vm.dirty_background_ratio",
    "vm.dirty_ratio",
    "vm.max_map_count",
    "vm.min_free_kbytes",
    "vm.swappiness",
    "vm.vfs_cache_pressure",
];

/// Maximum bytes of a volume's name: with what is put before it, the kernel's devices have room for it.
const MAX_VOLUME_NAME: usize = 32;
const DISK_CONDITIONS: &str = "serial:TEXT, wwn:DIGITS, size:FROM..TO or overwrite:SERIAL_OR_WWN, several separated by \",\", with sizes \
                               such as 900G or 2Ti";

/// The effects of taints.
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
/// Keys of taints that have a meaning for Kubernetes, or that Hearth sets itself.
const RESERVED_TAINTS: [&str; 2] = ["kubernetes.io/", "k8s.io/"];

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {found}")]
pub struct NodeSettingError {
    /// The field, by its name in the message.
    pub field: String,
    /// What it should contain.
    pub expected: String,
    /// What it contains.
    pub found: String,
}

/// A taint of a Kubernetes node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taint {
    /// As of a label.
    pub key: String,
    /// As of a label; may be empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: &'static str,
}

/// What is kept from pods, in addition to what a node keeps for itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// In bytes.
    pub memory: u64,
    /// In thousandths of a CPU.
    pub millicpus: u32,
}

/// The settings of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// The values of kernel settings, by name.
    pub sysctls: BTreeMap<String, String>,
    /// At most one of each key.
    pub taints: Vec<Taint>,
    /// What pods do not get.
    pub reserved: Reserved,
    /// The disks that are volumes, by the name of the volume.
    pub disks: BTreeMap<String, DiskConditions>,
}

/// One setting.
enum Parsed {
    Sysctl(String, String),
    Taint(Taint),
    Memory(u64),
    Millicpus(u32),
    Disk(String, DiskConditions),
}

impl NodeSettings {
    /// What a record says. Settings that this release does not know, or does not accept any more, are left out.
    pub fn of(settings: &[NodeSetting]) -> Self {
        let mut all = Self::default();
        for setting in settings {
            match parse(&setting.name, &setting.value) {
                Ok(Parsed::Sysctl(name, value)) => drop(all.sysctls.insert(name, value)),
                Ok(Parsed::Taint(taint)) => all.taints.push(taint),
                Ok(Parsed::Memory(bytes)) => all.reserved.memory = bytes,
                Ok(Parsed::Millicpus(millicpus)) => all.reserved.millicpus = millicpus,
                Ok(Parsed::Disk(name, conditions)) => drop(all.disks.insert(name, conditions)),
                Err(_) => {}
            }
        }
        all
    }
}

/// Checks a change of a node's settings: those to set, and the names of those to delete.
pub fn check_changes(upsert: &[NodeSetting], delete: &[String]) -> Result<(), NodeSettingError> {
    for (list, length) in [("upsert", upsert.len()), ("delete", delete.len())] {
        if length > MAX_SETTINGS {
            let expected = format!("at most {MAX_SETTINGS} settings");
            return Err(error(list, expected, length));
        }
    }
    let mut names = BTreeSet::new();
    for (index, setting) in upsert.iter().enumerate() {
        let wrong = |(part, expected): (&str, String)| {
            let found = match part {
                "name" => &setting.name,
                _ => &setting.value,
            };
            error(&format!("upsert[{index}].{part}"), expected, quoted(found))
        };
        parse(&setting.name, &setting.value).map_err(wrong)?;
        if !names.insert(&setting.name) {
            return Err(wrong(("name", "a name that no other setting has".into())));
        }
    }
    for (index, name) in delete.iter().enumerate() {
        // That of a setting which this release does not know can be deleted, too.
        if name.is_empty() || names.contains(name) {
            let expected = "the name of a setting that is not in upsert".to_owned();
            return Err(error(&format!("delete[{index}]"), expected, quoted(name)));
        }
    }
    Ok(())
}

fn error(field: &str, expected: String, found: impl ToString) -> NodeSettingError {
    NodeSettingError {
        field: field.to_owned(),
        expected,
        found: found.to_string(),
    }
}

/// On an error, the part that is wrong, "name" or "value", and what was expected.
fn parse(name: &str, value: &str) -> Result<Parsed, (&'static str, String)> {
    let expected = |what: &str| ("value", what.to_owned());
    match name.split_once('.') {
        Some(("sysctl", sysctl)) => {
            if !SYSCTLS.contains(&sysctl) {
                return Err((
                    "name",
                    format!("\"sysctl.\" and one of {}", SYSCTLS.join(", ")),
                ));
            }
            let is_digit = |byte: u8| byte.is_ascii_digit();
            let is_number = |word: &str| word.bytes().all(is_digit) && word.parse::<u64>().is_ok();
            let is_short = value.len() <= MAX_SYSCTL_LENGTH;
            match is_short && !value.is_empty() && value.split(' ').all(is_number) {
                true => Ok(Parsed::Sysctl(sysctl.to_owned(), value.to_owned())),
                false => Err(expected("numbers, separated by single blanks")),
            }
        }
        Some(("taint", key)) => {
            if !labels::is_key(key) || RESERVED_TAINTS.iter().any(|it| key.contains(it)) {
                let what = "\"taint.\" and a key like that of a label, outside of kubernetes.io and k8s.io";
                return Err(("name", what.to_owned()));
            }
            taint(key, value).map(Parsed::Taint).ok_or_else(|| {
                expected(
                    "[VALUE:]EFFECT, with the effect NoSchedule, PreferNoSchedule or NoExecute",
                )
            })
        }
        Some(("reserved", "memory")) => memory(value)
            .filter(|bytes| *bytes <= MOST_MEMORY)
            .map(Parsed::Memory)
            .ok_or_else(|| expected("an amount of memory up to 1024Gi, such as 512Mi or 2Gi")),
        Some(("reserved", "cpu")) => millicpus(value)
            .filter(|millicpus| *millicpus <= MOST_MILLICPUS)
            .map(Parsed::Millicpus)
            .ok_or_else(|| expected("a number of CPUs up to 1024, such as 2, or 500m for a half")),
        Some(("disk", name)) => {
            if !is_volume_name(name) {
                let what = format!(
                    "\"disk.\" and up to {MAX_VOLUME_NAME} small letters, digits and hyphens, a letter first"
                );
                return Err(("name", what));
            }
            let disk = disk(value).map(|disk| Parsed::Disk(name.to_owned(), disk));
            disk.ok_or_else(|| expected(DISK_CONDITIONS))
        }
        _ => Err((
            "name",
            "sysctl.NAME, taint.KEY, reserved.memory, reserved.cpu or disk.NAME".to_owned(),
        )),
    }
}

/// As a directory and as a device of the kernel.
fn is_volume_name(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_first = |byte: &u8| byte.is_ascii_lowercase();
    name.as_bytes().first().is_some_and(is_first)
        && name.len() <= MAX_VOLUME_NAME
        && name.bytes().all(is_part)
}

/// `None` also for no condition at all: a disk that is attached later would be taken unasked.
fn disk(text: &str) -> Option<DiskConditions> {
    let mut disk = DiskConditions::default();
    let mut given = BTreeSet::new();
    for condition in text.split(',') {
        let (kind, value) = condition.split_once(':')?;
        let word = || {
            let is_word = !value.is_empty() && is_word_of_disk(value);
            is_word.then(|| value.to_owned())
        };
        match kind {
            "serial" => disk.serial = Some(word()?),
            "wwn" => disk.wwn = Some(word()?),
            "overwrite" => disk.overwrite = Some(word()?),
            "size" => disk.sizes = sizes(value)?,
            _ => return None,
        }
        if !given.insert(kind) {
            return None;
        }
    }
    Some(disk)
}

/// `FROM..TO`, each of which may be missing.
fn sizes(text: &str) -> Option<RangeInclusive<u64>> {
    let (from, to) = text.split_once("..")?;
    let from = if from.is_empty() { 0 } else { bytes(from)? };
    let to = if to.is_empty() { u64::MAX } else { bytes(to)? };
    (from <= to).then_some(from..=to)
}

/// A size as disks are sold, or in powers of two.
fn bytes(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 6] = [
        ("Mi", MIB),
        ("Gi", GIB),
        ("Ti", 1024 * GIB),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
    ];
    let in_unit = |(unit, size): (&str, u64)| Some((text.strip_suffix(unit)?, size));
    let (number, unit) = UNITS.into_iter().find_map(in_unit)?;
    number.parse::<u64>().ok()?.checked_mul(unit)
}

fn taint(key: &str, text: &str) -> Option<Taint> {
    let (value, effect) = text.rsplit_once(':').unwrap_or(("", text));
    let effect = EFFECTS.into_iter().find(|known| *known == effect)?;
    (value.is_empty() || labels::is_word(value)).then(|| Taint {
        key: key.to_owned(),
        value: value.to_owned(),
        effect,
    })
}

fn memory(text: &str) -> Option<u64> {
    let (number, unit) = match (text.strip_suffix("Mi"), text.strip_suffix("Gi")) {
        (Some(number), _) => (number, MIB),
        (_, Some(number)) => (number, GIB),
        (None, None) => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

fn millicpus(text: &str) -> Option<u32> {
    match text.strip_suffix('m') {
        Some(number) => number.parse().ok(),
        None => text.parse::<u32>().ok()?.checked_mul(1000),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn setting(name: &str, value: &str) -> NodeSetting {
        NodeSetting {
            name: name.into(),
            value: value.into(),
        }
    }

    #[test]
    fn settings_have_a_meaning() {
        let all = [
            setting("sysctl.vm.max_map_count", "262144"),
            setting("sysctl.net.ipv4.tcp_rmem", "4096 131072 6291456"),
            setting("taint.dedicated", "db:NoSchedule"),
            setting("taint.example.org/spare", "NoExecute"),
            setting("reserved.memory", "512Mi"),
            setting("reserved.cpu", "2"),
            setting("disk.scratch", "serial:S3Z8 NB0K,size:900G..2Ti"),
            setting("disk.old", "overwrite:0x5000c500a1b2c3d4"),
            setting("of.a.later.release", "7"),
        ];
        assert_eq!(check_changes(&all[..8], &[]), Ok(()));
        let settings = NodeSettings::of(&all);
        assert_eq!(settings.sysctls["vm.max_map_count"], "262144");
        assert_eq!(settings.sysctls.len(), 2);
        let taint = |key: &str, value: &str, effect| Taint {
            key: key.into(),
            value: value.into(),
            effect,
        };
        let taints = [
            taint("dedicated", "db", "NoSchedule"),
            taint("example.org/spare", "", "NoExecute"),
        ];
        assert_eq!(settings.taints, taints);
        let reserved = Reserved {
            memory: 512 * MIB,
            millicpus: 2000,
        };
        assert_eq!(settings.reserved, reserved);
        let scratch = DiskConditions {
            serial: Some("S3Z8 NB0K".into()),
            sizes: 900_000_000_000..=2 << 40,
            ..DiskConditions::default()
        };
        assert_eq!(settings.disks["scratch"], scratch);
        let old = settings.disks["old"].overwrite.as_deref();
        assert_eq!(old, Some("0x5000c500a1b2c3d4"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (name, value, begins) in [
            (
                "sysctl.kernel.modprobe",
                "/bin/sh",
                "upsert[0].name: expected \"sysctl.\" and one of",
            ),
            (
                "sysctl.vm.swappiness",
                "",
                "upsert[0].value: expected numbers",
            ),
            (
                "sysctl.vm.swappiness",
                "1\n2",
                "upsert[0].value: expected numbers",
            ),
            (
                "sysctl.vm.swappiness",
                "1  2",
                "upsert[0].value: expected numbers",
            ),
            ("sysctl", "1", "upsert[0].name: expected sysctl.NAME"),
            (
                "taint.a b",
                "NoSchedule",
                "upsert[0].name: expected \"taint.\"",
            ),
            (
                "taint.node.kubernetes.io/x",
                "NoSchedule",
                "upsert[0].name: expected \"taint.\"",
            ),
            (
                "taint.a",
                "Never",
                "upsert[0].value: expected [VALUE:]EFFECT",
            ),
            (
                "taint.a",
                "b c:NoExecute",
                "upsert[0].value: expected [VALUE:]EFFECT",
            ),
            (
                "reserved.memory",
                "512",
                "upsert[0].value: expected an amount of memory",
            ),
            (
                "reserved.memory",
                "2000Gi",
                "upsert[0].value: expected an amount of memory",
            ),
            (
                "reserved.cpu",
                "half",
                "upsert[0].value: expected a number of CPUs",
            ),
            ("disk.A", "serial:1", "upsert[0].name: expected \"disk.\""),
            ("disk.", "serial:1", "upsert[0].name: expected \"disk.\""),
            ("disk.a", "", "upsert[0].value: expected serial:TEXT"),
            ("disk.a", "serial:", "upsert[0].value: expected serial:TEXT"),
            (
                "disk.a",
                "device:sda",
                "upsert[0].value: expected serial:TEXT",
            ),
            (
                "disk.a",
                "size:2T..1T",
                "upsert[0].value: expected serial:TEXT",
            ),
            (
                "disk.a",
                "size:1..2",
                "upsert[0].value: expected serial:TEXT",
            ),
            (
                "disk.a",
                "serial:1,serial:2",
                "upsert[0].value: expected serial:TEXT",
            ),
            (
                "reserved.disk",
                "1Gi",
                "upsert[0].name: expected sysctl.NAME",
            ),
        ] {
            let error = check_changes(&[setting(name, value)], &[]).unwrap_err();
            assert!(
                error.to_string().starts_with(begins),
                "{name}={value}: {error}"
            );
        }
        let twice = [setting("reserved.cpu", "1"), setting("reserved.cpu", "2")];
        let error = check_changes(&twice, &[]).unwrap_err();
        assert_eq!(error.field, "upsert[1].name");
        let error = check_changes(&twice[..1], &["reserved.cpu".into()]).unwrap_err();
        assert_eq!(error.field, "delete[0]");
        assert!(check_changes(&[], &["of.a.later.release".into()]).is_ok());
    }

    #[test]
    fn the_list_is_sorted() {
        assert!(SYSCTLS.is_sorted());
    }

    proptest! {
        /// What the kernel gets is a line of numbers, whatever was asked.
        #[test]
        fn values_of_kernel_settings_are_numbers(name in "[a-z.]{0,20}", value in ".{0,20}") {
            for name in [format!("sysctl.{name}"), "sysctl.vm.swappiness".to_owned()] {
                if check_changes(&[setting(&name, &value)], &[]).is_ok() {
                    let is_plain = |byte: u8| byte.is_ascii_digit() || byte == b' ';
                    prop_assert!(value.bytes().all(is_plain), "{value:?}");
                }
            }
        }
    }
}
