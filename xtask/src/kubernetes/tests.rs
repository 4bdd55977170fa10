use std::os::unix::fs::symlink;

use super::*;

/// A folder with all that makes a bundle.
fn bundle() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in PROGRAMS.into_iter().chain(FILES) {
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, file).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::write(
        dir.path().join("VERSION"),
        "kubernetes 1.31.4\ncontainerd 1.7.2\n",
    )
    .unwrap();
    dir
}

#[test]
fn a_bundle_of_the_users_is_read() {
    let dir = bundle();
    let read = ensure(&Ui::new(false), Some(dir.path())).unwrap();
    assert_eq!(read.root, dir.path());
    assert_eq!(
        read.versions.to_string(),
        "containerd 1.7.2, kubernetes 1.31.4"
    );
    assert_eq!(read.kubectl, None);
}

#[test]
fn a_bundle_that_lacks_something_is_refused_by_name() {
    for file in PROGRAMS.into_iter().chain(FILES) {
        let dir = bundle();
        fs::remove_file(dir.path().join(file)).unwrap();
        assert_eq!(
            Bundle::read(dir.path()),
            Err(BundleError::Missing {
                bundle: dir.path().to_owned(),
                file
            })
        );
    }
    let dir = bundle();
    let kubelet = dir.path().join("bin/kubelet");
    fs::set_permissions(&kubelet, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(
        Bundle::read(dir.path()),
        Err(BundleError::NotExecutable {
            file: "bin/kubelet",
            ..
        })
    ));
}

#[test]
fn a_bundle_says_its_version() {
    let dir = bundle();
    for text in [
        "",
        "kubernetes",
        "kubernetes 1.31.4",
        "containerd 1.7.2",
        "kubernetes 1.31\ncontainerd 1.7.2",
        "kubernetes 1.31.x\ncontainerd 1.7.2",
        "kubernetes 1.31.4\ncontainerd 1.7.2\ncni",
    ] {
        fs::write(dir.path().join("VERSION"), text).unwrap();
        assert_eq!(
            Bundle::read(dir.path()),
            Err(BundleError::Version {
                bundle: dir.path().to_owned()
            }),
            "{text}"
        );
    }
    let text = "kubernetes v1.31.4-rc.1\n\ncontainerd 1.7.2~ds1\n";
    fs::write(dir.path().join("VERSION"), text).unwrap();
    Bundle::read(dir.path()).unwrap();
}

#[test]
fn trees_differ_by_kind_mode_link_and_content() {
    let trees = [bundle(), bundle()];
    let differences = || {
        let mut different = Vec::new();
        compare(
            trees[0].path(),
            trees[1].path(),
            Path::new(""),
            &mut different,
        )
        .unwrap();
        different
    };
    assert_eq!(differences(), Vec::<String>::new());
    let path = |file: &str| trees[1].path().join(file);
    fs::write(path("bin/du"), "other").unwrap();
    fs::write(path("bin/more"), "").unwrap();
    fs::remove_file(path("bin/find")).unwrap();
    fs::set_permissions(path("bin/nice"), fs::Permissions::from_mode(0o644)).unwrap();
    for (tree, target) in trees.iter().zip(["one", "two"]) {
        symlink(target, tree.path().join("link")).unwrap();
    }
    assert_eq!(
        differences(),
        ["bin/du", "bin/find", "bin/more", "bin/nice", "link"]
    );
}

#[test]
fn the_key_covers_what_goes_in() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = |name: &str| {
        fs::write(dir.path().join(name), name).unwrap();
        Inputs::of_folder(dir.path()).unwrap()
    };
    let one = inputs("a_1_amd64.deb");
    let key_of_one = key(&one, "gcc 12");
    assert_eq!(key(&one, "gcc 12"), key_of_one);
    assert_ne!(key(&one, "gcc 13"), key_of_one);
    assert_ne!(key(&inputs("b_1_amd64.deb"), "gcc 12"), key_of_one);
}
