//! Parameters in fw_cfg and on the ESP: either, both, or neither.

use std::fs;

use hearth_api::fixture;

use super::*;
use crate::layout::Root;

struct Machine {
    _dir: tempfile::TempDir,
    fw_cfg: FwCfg,
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
    Machine {
        fw_cfg: FwCfg::at(dir.path()),
        root,
        _dir: dir,
    }
}

impl Machine {
    fn load(&self) -> Loaded {
        load(&self.fw_cfg, &self.root.esp)
    }
}

#[test]
fn nothing_anywhere_is_nothing() {
    assert!(machine(None, None).load().unwrap().is_none());
}

#[test]
fn either_source_serves_and_fw_cfg_comes_first() {
    let right = fixture!("parameters-bootstrap-recovery.pb");
    let found = machine(None, Some(right)).load().unwrap().unwrap();
    assert_eq!((found.source, found.ignored), (Source::Esp, None));
    let found = machine(Some(right), None).load().unwrap().unwrap();
    assert_eq!((found.source, found.ignored), (Source::FwCfg, None));
    // The content on the ESP does not matter.
    let found = machine(Some(right), Some(b"?")).load().unwrap().unwrap();
    assert_eq!(
        (found.source, found.ignored),
        (Source::FwCfg, Some(Source::Esp))
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
        ._dir
        .path()
        .join("by_name")
        .join(names::fw_cfg::PARAMETERS);
    fs::remove_file(item.join("raw")).unwrap();
    assert_eq!(broken.load().unwrap_err().from, Source::FwCfg);
}
