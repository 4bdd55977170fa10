//! The generated reference: the page in `docs/` is what the program prints, and every command has a
//! man page.

use std::path::Path;

use super::Fixture;

/// With this in the environment the page is written instead of compared.
const WRITE: &str = "HEARTH_WRITE_DOCS";

#[tokio::test]
async fn the_reference_page_is_what_the_program_prints() {
    let printed = Fixture::new().ok(&["reference"]).await;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/hearthctl-reference.md");
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &printed).expect("write the page");
    }
    let page = std::fs::read_to_string(&path).expect("read the page");
    assert!(
        page == printed,
        "docs/hearthctl-reference.md is out of date: {WRITE}=1 cargo test -p hearth-ctl writes it"
    );
}

#[tokio::test]
async fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let pages = folder.path().join("man1");
    let f = Fixture::new();
    f.ok(&["man", pages.to_str().expect("UTF-8")]).await;
    for name in [
        "hearthctl",
        "hearthctl-node-role-add",
        "hearthctl-etcd-members",
    ] {
        let page = std::fs::read_to_string(pages.join(format!("{name}.1"))).expect(name);
        assert!(page.contains(".SH SYNOPSIS"), "{name}: {page}");
    }
}
