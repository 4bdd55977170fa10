//! Parameters in the sources of a machine: any, several, or none. What is on a config drive is read by
//! booted machines, because it is mounted.

use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hearth_api::fixture;
use hearth_sys::block::Blocks;
use hearth_sys::smbios::testing::table;

use super::*;
use crate::layout::Root;

struct Machine {
    dir: tempfile::TempDir,
    root: Root,
}

/// A machine with these bytes in fw_cfg and on its ESP.
fn machine(in_fw_cfg: Option<&[u8]>, on_esp: Option<&[u8]>) -> Machine {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::under(&dir.path().join("root"));
    if let Some(bytes) = in_fw_cfg {
        let item = dir.path().join("by_name").join(names::fw_cfg::PARAMETERS);
        fs::create_dir_all(&item).unwrap();
        fs::write(item.join("raw"), bytes).unwrap();
    }
    if let Some(bytes) = on_esp {
        let path = root.esp.parameters();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    fs::create_dir_all(dir.path().join("sys/block")).unwrap();
    Machine { root, dir }
}

impl Machine {
    fn load(&self) -> Loaded {
        let sys = self.dir.path().join("sys");
        let sources = Sources {
            fw_cfg: FwCfg::at(self.dir.path()),
            esp: self.root.esp.clone(),
            smbios: Smbios::at(&sys),
            config_drive: ConfigDrive {
                blocks: Blocks::at(&sys, self.dir.path()),
                boot_disk: "vda".to_owned(),
                mount_point: self.root.ephemeral.config_drive(),
            },
        };
        sources.load()
    }

    /// The same machine with this SMBIOS table.
    fn with_table(self, table: &[u8]) -> Self {
        let path = self.dir.path().join("sys/firmware/dmi/tables/DMI");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, table).unwrap();
        self
    }

    fn with_strings(self, strings: &[&str]) -> Self {
        let strings: Vec<&[u8]> = strings.iter().map(|string| string.as_bytes()).collect();
        self.with_table(&table(&strings))
    }
}

#[test]
fn nothing_anywhere_is_nothing() {
    assert!(machine(None, None).load().unwrap().is_none());
}

#[test]
fn each_source_serves_and_fw_cfg_comes_first() {
    let right = fixture!("parameters-bootstrap-recovery.pb");
    let found = machine(None, Some(right)).load().unwrap().unwrap();
    assert_eq!((found.source, &found.ignored[..]), (Source::Esp, &[][..]));
    let found = machine(Some(right), None).load().unwrap().unwrap();
    assert_eq!((found.source, &found.ignored[..]), (Source::FwCfg, &[][..]));
    // The content on the ESP does not matter.
    let found = machine(Some(right), Some(b"?")).load().unwrap().unwrap();
    assert_eq!(
        (found.source, &found.ignored[..]),
        (Source::FwCfg, &[Source::Esp][..])
    );
}

#[test]
fn what_is_there_and_bad_never_falls_through() {
    let right = fixture!("parameters-bootstrap-recovery.pb");
    let large = vec![0; 1 << 20];
    for bad in [b"".as_slice(), b"?", &large] {
        let error = machine(Some(bad), Some(right)).load().unwrap_err();
        assert_eq!(error.from, Source::FwCfg);
        let from = "parameters from fw_cfg opt/dev.hearth/parameters.pb: ";
        assert!(error.to_string().starts_with(from), "{error}");
        let error = machine(None, Some(bad)).load().unwrap_err();
        assert_eq!(error.from, Source::Esp);
        let from = "parameters from ESP hearth/parameters.pb: ";
        assert!(error.to_string().starts_with(from), "{error}");
    }
    // An item without content, as the kernel exposes one that it cannot read.
    let broken = machine(Some(b""), Some(right));
    let item = broken
        .dir
        .path()
        .join("by_name")
        .join(names::fw_cfg::PARAMETERS);
    fs::remove_file(item.join("raw")).unwrap();
    assert_eq!(broken.load().unwrap_err().from, Source::FwCfg);
}

#[test]
fn strings_of_smbios_serve_whole_and_in_parts() {
    let right = STANDARD.encode(fixture!("parameters-bootstrap-recovery.pb"));
    let whole = format!("dev.hearth.parameters={right}");
    let (first, second) = right.split_at(51);
    let parts = [first, second].map(|part| format!("dev.hearth.parameters={part}"));
    for strings in [
        &[&whole[..]][..],
        &["other=1", &parts[0], "dev.hearth.parameters2=x", &parts[1]],
    ] {
        let found = machine(None, None).with_strings(strings).load();
        let found = found.unwrap().unwrap();
        assert_eq!(
            (found.source, &found.ignored[..]),
            (Source::Smbios, &[][..])
        );
    }
    let none = machine(None, None).with_strings(&["dev.hearth.parameters2=x", "other"]);
    assert!(none.load().unwrap().is_none());
    // After the ESP, whatever they say.
    let bytes = fixture!("parameters-bootstrap-recovery.pb");
    let both = machine(None, Some(bytes)).with_strings(&["dev.hearth.parameters=?"]);
    let found = both.load().unwrap().unwrap();
    assert_eq!(
        (found.source, &found.ignored[..]),
        (Source::Esp, &[Source::Smbios][..])
    );
}

#[test]
fn strings_and_tables_that_are_wrong_are_errors() {
    for (strings, wanted) in [
        (&["dev.hearth.parameters="][..], "empty"),
        (&["dev.hearth.parameters=eA=="], "unknown field 15"),
        (&["dev.hearth.parameters=e\u{20}A=="], "expected base64"),
        // Two sets of them are not one.
        (
            &["dev.hearth.parameters=eA==", "dev.hearth.parameters=eA=="],
            "expected base64",
        ),
    ] {
        let error = machine(None, None)
            .with_strings(strings)
            .load()
            .unwrap_err();
        assert_eq!(error.from, Source::Smbios);
        let text = error.to_string();
        let from = "parameters from SMBIOS dev.hearth.parameters: ";
        assert!(text.starts_with(from) && text.contains(wanted), "{text}");
    }
    let cut = &table(&[b"dev.hearth.parameters=eA=="])[..40];
    let error = machine(None, None).with_table(cut).load().unwrap_err();
    assert!(
        error.to_string().contains("does not end before the table"),
        "{error}"
    );
    // No obstacle where it is not needed.
    let bytes = fixture!("parameters-bootstrap-recovery.pb");
    let found = machine(None, Some(bytes)).with_table(cut).load();
    assert_eq!(found.unwrap().unwrap().ignored, [Source::Smbios]);
}
