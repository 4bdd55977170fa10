//! Initramfs and library closure: archives read back entry by entry.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use cpio::newc::Reader;
use hearth_image::closure::{ClosureError, closure};
use hearth_image::initramfs::{self, InitramfsError, Tree};

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    inode: u32,
    mode: u32,
    device: (u32, u32),
    bytes: Vec<u8>,
}

fn read_back(mut archive: &[u8]) -> Vec<(String, Entry)> {
    let mut entries = Vec::new();
    loop {
        let mut reader = Reader::new(archive).unwrap();
        if reader.entry().is_trailer() {
            return entries;
        }
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        let header = reader.entry();
        assert_eq!((header.uid(), header.gid(), header.mtime()), (0, 0, 0));
        assert_eq!(header.nlink(), 1);
        let entry = Entry {
            inode: header.ino(),
            mode: header.mode(),
            device: (header.rdev_major(), header.rdev_minor()),
            bytes,
        };
        entries.push((header.name().to_owned(), entry));
        archive = reader.finish().unwrap();
    }
}

fn small_tree(reversed: bool) -> Tree {
    type Step = Box<dyn Fn(&mut Tree) -> Result<(), InitramfsError>>;
    let mut steps: Vec<Step> = vec![
        Box::new(|t| t.file("/etc/os-release", 0o644, b"ID=test\n".to_vec())),
        Box::new(|t| t.file("/init", 0o755, vec![1, 2, 3, 4, 5])),
        Box::new(|t| t.directory("/etc/empty/inner")),
        Box::new(|t| t.symlink("/bin", "usr/bin")),
    ];
    if reversed {
        steps.reverse();
    }
    let mut tree = Tree::new();
    for step in steps {
        step(&mut tree).unwrap();
    }
    tree
}

#[test]
fn archives_read_back_sorted_numbered_and_whole() {
    let entries = read_back(&small_tree(false).to_cpio());
    let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "bin",
            "dev",
            "dev/console",
            "dev/null",
            "etc",
            "etc/empty",
            "etc/empty/inner",
            "etc/os-release",
            "init"
        ]
    );
    let by_name: BTreeMap<_, _> = entries.iter().map(|(n, e)| (n.as_str(), e)).collect();
    assert_eq!(by_name["init"].bytes, [1, 2, 3, 4, 5]);
    assert_eq!(by_name["init"].mode, 0o100755);
    assert_eq!(by_name["etc/os-release"].mode, 0o100644);
    assert_eq!(by_name["etc"].mode, 0o040755);
    assert_eq!(
        (by_name["bin"].mode, by_name["bin"].bytes.as_slice()),
        (0o120777, &b"usr/bin"[..])
    );
    assert_eq!(
        (by_name["dev/console"].mode, by_name["dev/console"].device),
        (0o020600, (5, 1))
    );
    assert_eq!(
        (by_name["dev/null"].mode, by_name["dev/null"].device),
        (0o020666, (1, 3))
    );
    let inodes: Vec<u32> = entries.iter().map(|(_, e)| e.inode).collect();
    assert_eq!(inodes, (1..=entries.len() as u32).collect::<Vec<_>>());
}

#[test]
fn the_order_of_adding_changes_nothing_and_zstd_gives_it_back() {
    let (one, other) = (small_tree(false), small_tree(true));
    assert_eq!(one.to_zstd().unwrap(), other.to_zstd().unwrap());
    assert_eq!(
        zstd::decode_all(&one.to_zstd().unwrap()[..]).unwrap(),
        one.to_cpio()
    );
}

#[test]
fn conflicts_and_bad_paths_are_refused() {
    let mut tree = small_tree(false);
    tree.file("/init", 0o755, vec![1, 2, 3, 4, 5]).unwrap();
    assert!(
        matches!(tree.file("/init", 0o755, vec![1]), Err(InitramfsError::Conflict(p)) if p == "/init")
    );
    assert!(
        matches!(tree.file("/init/x", 0o755, vec![]), Err(InitramfsError::Conflict(p)) if p == "/init")
    );
    assert!(matches!(
        tree.file("/etc", 0o755, vec![]),
        Err(InitramfsError::Conflict(_))
    ));
    for path in [
        "",
        "/",
        "init",
        "/a//b",
        "/a/../b",
        "/./a",
        "/a/",
        "/a\0b",
        "/TRAILER!!!",
    ] {
        assert!(
            matches!(
                tree.file(path, 0o644, vec![]),
                Err(InitramfsError::Path { .. })
            ),
            "{path:?}"
        );
    }
}

/// The closure of a dynamic program runs where there is nothing else.
#[test]
fn a_program_runs_on_its_closure_alone() {
    // Debian's own; with libselinux and libpcre2.
    let objects = closure(Path::new("/bin/ls"), "/usr/bin/ls").unwrap();
    assert!(
        objects.contains_key("/lib64/ld-linux-x86-64.so.2"),
        "{:?}",
        objects.keys()
    );
    assert!(
        objects.keys().any(|path| path.ends_with("/libc.so.6")),
        "{:?}",
        objects.keys()
    );
    let root = tempfile::tempdir().unwrap();
    for (path, object) in &objects {
        let here = root.path().join(&path[1..]);
        std::fs::create_dir_all(here.parent().unwrap()).unwrap();
        std::fs::write(&here, &object.bytes).unwrap();
        std::os::unix::fs::chown(&here, None, None).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&here, mode).unwrap();
    }
    // The loader of the closure, told to look in the closure only, must succeed with it alone.
    let directories: Vec<String> = objects
        .keys()
        .filter(|path| path.contains("/lib"))
        .map(|path| {
            root.path()
                .join(&path[1..])
                .parent()
                .unwrap()
                .display()
                .to_string()
        })
        .collect();
    let output = Command::new(root.path().join("lib64/ld-linux-x86-64.so.2"))
        .args([
            "--inhibit-cache",
            "--library-path",
            &directories.join(":"),
            "--list",
        ])
        .arg(root.path().join("usr/bin/ls"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for line in text.lines().filter(|line| line.contains("=>")) {
        let path = line.split("=> ").nth(1).unwrap();
        assert!(
            path.starts_with(root.path().to_str().unwrap()),
            "found outside: {line}"
        );
    }
}

#[test]
fn what_is_no_program_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "#!/bin/sh\n").unwrap();
    assert!(matches!(
        closure(file.path(), "/init"),
        Err(ClosureError::NotElf { .. })
    ));
    assert!(matches!(
        closure(Path::new("/nonexistent"), "/init"),
        Err(ClosureError::Read { .. })
    ));
    // A 32-bit header.
    let mut elf = std::fs::read("/bin/ls").unwrap();
    elf[18..20].copy_from_slice(&3u16.to_le_bytes());
    std::fs::write(file.path(), &elf).unwrap();
    assert!(matches!(
        closure(file.path(), "/init"),
        Err(ClosureError::NotElf { .. })
    ));
}

#[test]
fn a_missing_library_is_named() {
    let mut elf = std::fs::read("/bin/ls").unwrap();
    let at = elf.windows(10).position(|w| w == b"libc.so.6\0").unwrap();
    elf[at..at + 9].copy_from_slice(b"libx.so.6");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &elf).unwrap();
    let error = closure(file.path(), "/init").unwrap_err();
    assert!(
        matches!(&error, ClosureError::NotFound { library, .. } if library == "libx.so.6"),
        "{error}"
    );
}

/// The kernel finds the path in the first bytes of the initramfs, and the compressed archive at the next block.
#[test]
fn microcode_is_in_front_and_uncompressed() {
    let path = "/kernel/x86/microcode/GenuineIntel.bin";
    let files = BTreeMap::from([(path.to_owned(), vec![7; 1000])]);
    let early = initramfs::early(&files).unwrap();
    assert_eq!(early.len() % 512, 0);
    let names: Vec<String> = read_back(&early)
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(
        names,
        [
            "kernel",
            "kernel/x86",
            "kernel/x86/microcode",
            "kernel/x86/microcode/GenuineIntel.bin"
        ]
    );
    assert!(initramfs::early(&BTreeMap::new()).unwrap().is_empty());
}
