use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn a_node_keeps_things_where_the_design_says() {
    let root = Root::system();
    let shown = |path: PathBuf| path.display().to_string();
    assert_eq!(shown(root.esp.parameters()), "/esp/hearth/parameters.pb");
    assert_eq!(
        root.esp.sealed_configuration().paths().map(shown),
        [
            "/esp/hearth/sealed_configuration.0",
            "/esp/hearth/sealed_configuration.1"
        ]
    );
    let esp = &root.esp;
    let states = [
        esp.boot_record(),
        esp.cluster_directory(),
        esp.network(),
        esp.sealed_configuration(),
    ];
    let states = states.iter().flat_map(StateFile::paths).map(shown);
    let expected = names::disk::ESP_STATE_FILES.map(|path| format!("/esp/{path}"));
    assert!(states.eq(expected), "an image has them");
    let credentials = root.data.node().credentials();
    assert_eq!(shown(credentials.ca()), "/data/node/credentials/ca");
    assert_eq!(
        shown(credentials.certificate()),
        "/data/node/credentials/cert"
    );
    assert_eq!(shown(credentials.key()), "/data/node/credentials/key");
    assert_eq!(shown(root.data.node().roles()), "/data/node/roles.pb");
    assert_eq!(root.data.etcd().path(), Path::new("/data/etcd"));
    assert_eq!(root.ephemeral.reboot_delay(), Path::new(REBOOT_DELAY));
}

#[test]
fn what_holds_secrets_is_made_for_root_alone() {
    let base = tempfile::tempdir().unwrap();
    let root = Root::under(base.path());
    std::fs::create_dir_all(root.data.path()).unwrap();
    std::fs::create_dir_all(root.esp.path()).unwrap();
    root.esp.make_directories().unwrap();
    root.data.make_directories().unwrap();
    root.ephemeral.make_directories().unwrap();
    for directory in [
        root.data.node().credentials().path().to_owned(),
        root.data.etcd().founding(),
        root.ephemeral.consensus(),
    ] {
        let mode = std::fs::metadata(&directory).unwrap().permissions().mode();
        assert_eq!(
            mode & 0o777,
            files::PRIVATE_DIRECTORY,
            "{}",
            directory.display()
        );
    }
}
