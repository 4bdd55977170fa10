//! Read-only file systems, read back by an independent implementation. Tests on machines show that Linux mounts them.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::sync::atomic::{AtomicU64, Ordering};

use erofs_rs::EroFS;
use erofs_rs::backend::SliceImage;
use hearth_image::content::Content;
use hearth_image::erofs::{CHUNK, ErofsError, Tree, Volume, write};
use proptest::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Directory,
    File { bytes: Vec<u8>, executable: bool },
    Symlink { target: String },
}

type Nodes = BTreeMap<String, Node>;

fn tree_of(nodes: &Nodes) -> Tree {
    let mut tree = Tree::default();
    // Any order will do.
    for (path, node) in nodes.iter().rev() {
        match node {
            Node::Directory => tree.directory(path),
            Node::File { bytes, executable } => {
                tree.file(path, Content::Bytes(bytes.clone()), *executable)
            }
            Node::Symlink { target } => tree.symlink(path, target),
        }
        .unwrap();
    }
    tree
}

fn image_of(tree: &Tree) -> Vec<u8> {
    let volume = Volume {
        name: "a volume's name, and a long one".into(),
        uuid: [7; 16],
    };
    let mut file = tempfile::tempfile().unwrap();
    let blocks = write(tree, &volume, &mut file, &|_, _| true).unwrap();
    let mut image = vec![0; blocks as usize * 4096];
    file.read_exact_at(&mut image, 0).unwrap();
    assert_eq!(file.metadata().unwrap().len(), image.len() as u64);
    image
}

fn read_back(image: &[u8]) -> Nodes {
    let volume = EroFS::new(SliceImage::new(image)).unwrap();
    assert_eq!(
        volume.super_block().block_count() * 4096,
        image.len() as u64
    );
    let mut nodes = Nodes::new();
    let mut directories: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    for entry in volume.walk_dir("/").unwrap() {
        let entry = entry.unwrap();
        let inode = entry.inode;
        assert_eq!((inode.uid(), inode.gid()), (0, 0));
        assert_eq!(inode.modified_unix(), (0, 0));
        let path = entry.dir_entry.path().to_str().unwrap().to_owned();
        let path = path.trim_start_matches('/').to_owned();
        let mode = inode.permissions().mode() & 0o7777;
        if let Some((parent, _)) = path.rsplit_once('/')
            && inode.is_dir()
        {
            directories.get_mut(parent).unwrap().1 += 1;
        }
        let node = if inode.is_dir() {
            assert_eq!(mode, 0o755);
            directories.insert(path.clone(), (inode.nlink(), 2));
            Node::Directory
        } else if inode.is_symlink() {
            assert_eq!((mode, inode.nlink()), (0o777, 1));
            let target = volume.read_link_inode(inode).unwrap();
            let target = target.to_str().unwrap().to_owned();
            Node::Symlink { target }
        } else {
            assert!(matches!(mode, 0o755 | 0o644));
            assert_eq!(inode.nlink(), 1);
            let mut bytes = Vec::new();
            let mut file = volume.open_inode_file(inode).unwrap();
            file.read_to_end(&mut bytes).unwrap();
            // And from an offset, as pages of a program are read.
            let mut part = [0];
            let middle = bytes.len() / 2;
            if file.read_at(&mut part, middle as u64).unwrap() == 1 {
                assert_eq!(part[0], bytes[middle]);
            }
            let executable = mode == 0o755;
            Node::File { bytes, executable }
        };
        // By name, too: entries must be in search order.
        if let Node::File { bytes, .. } = &node {
            assert_eq!(volume.open(&path).unwrap().size(), bytes.len() as u64);
        }
        assert_eq!(nodes.insert(path, node), None);
    }
    for (path, (links, counted)) in directories {
        assert_eq!(links, counted, "{path}");
    }
    nodes
}

/// Content whose pages alternate between one repeated byte, repeated words, and incompressible data.
fn content(length: u64, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = Vec::with_capacity(length as usize);
    while (bytes.len() as u64) < length {
        let stretch = random.usize(1..200_000);
        match random.u8(0..3) {
            0 => bytes.resize(bytes.len() + stretch, random.u8(..)),
            1 => {
                let words: Vec<u64> = (0..16).map(|_| random.u64(..)).collect();
                let pick = |_| random.choice(&words).unwrap().to_le_bytes();
                bytes.extend((0..stretch / 8 + 1).flat_map(pick));
            }
            _ => bytes.extend((0..stretch).map(|_| random.u8(..))),
        }
    }
    bytes.truncate(length as usize);
    bytes
}

fn file(length: u64, seed: u64) -> Node {
    Node::File {
        bytes: content(length, seed),
        executable: seed.is_multiple_of(2),
    }
}

#[test]
fn lengths_around_every_bound_read_back() {
    let mut nodes = Nodes::new();
    for bound in [0, 1, 2048, 4096, 8192, CHUNK, CHUNK + 4096, 3 * CHUNK] {
        for length in [bound.saturating_sub(1), bound, bound + 1] {
            nodes.insert(format!("{length:07}"), file(length, length));
            let one_byte = vec![7; length as usize];
            let executable = true;
            let bytes = one_byte;
            nodes.insert(
                format!("same-{length:07}"),
                Node::File { bytes, executable },
            );
        }
    }
    let image = image_of(&tree_of(&nodes));
    assert_eq!(read_back(&image), nodes);
}

/// Copies differ by name and mode only; what cannot be compressed is stored for each of them.
#[test]
fn files_with_the_same_content_share_its_blocks() {
    let bytes = vec![7; 3 * CHUNK as usize + 1];
    let file = |executable| Node::File {
        bytes: bytes.clone(),
        executable,
    };
    let all = [("a", false), ("b/c", true), ("d", false)];
    let image_of = |copies: usize| {
        let copies = all[..copies].iter();
        let mut nodes: Nodes = copies.map(|(path, x)| ((*path).into(), file(*x))).collect();
        nodes.insert("b".into(), Node::Directory);
        let shorter = vec![7; 2 * CHUNK as usize];
        let executable = false;
        nodes.insert(
            "e".into(),
            Node::File {
                bytes: shorter,
                executable,
            },
        );
        let image = image_of(&tree_of(&nodes));
        assert_eq!(read_back(&image), nodes);
        image.len()
    };
    // The index of each copy takes less than a block.
    assert!(image_of(3) <= image_of(1) + 2 * 4096);
}

#[test]
fn large_directories_and_odd_names_read_back() {
    let mut nodes = Nodes::new();
    for number in 0..2000 {
        let name = format!("many/{number}{}", "x".repeat(number % 250));
        nodes.insert(name, file(number as u64 % 7, 1));
    }
    nodes.insert("many".into(), Node::Directory);
    // Before the dots in byte order, and between them and letters.
    for name in ["!", "-", "+", ".hidden", "..more", "...", "ä", "a b", "~"] {
        nodes.insert(name.into(), Node::Directory);
        nodes.insert(format!("{name}/{name}"), file(3000, 5));
        let target = format!("../{name}/{}", "y".repeat(1000));
        nodes.insert(format!("{name}/link"), Node::Symlink { target });
    }
    let image = image_of(&tree_of(&nodes));
    assert_eq!(read_back(&image), nodes);
}

#[test]
fn a_folder_gives_what_is_in_it_whenever_it_was_made() {
    let images = [0o700, 0o555].map(|mode| {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("a/b");
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::write(inside.join("program"), content(600_000, 3)).unwrap();
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(inside.join("program"), permissions).unwrap();
        std::fs::write(folder.path().join("text"), "text").unwrap();
        symlink("b/program", folder.path().join("a/link")).unwrap();
        image_of(&Tree::of_folder(folder.path()).unwrap())
    });
    assert!(images[0] == images[1]);
    let nodes = read_back(&images[0]);
    assert_eq!(nodes.len(), 5);
    let program = Node::File {
        bytes: content(600_000, 3),
        executable: true,
    };
    assert_eq!(nodes["a/b/program"], program);
}

#[test]
fn what_no_file_system_can_hold_is_refused() {
    let mut tree = Tree::default();
    let empty = || Content::Bytes(Vec::new());
    tree.file("a/b", empty(), false).unwrap();
    let long = "x".repeat(256);
    for path in ["", "/a", "a/", "a//c", "a/../c", ".", long.as_str()] {
        let error = tree.file(path, empty(), false).unwrap_err();
        assert!(matches!(error, ErofsError::Path { .. }), "{path:?}");
    }
    for path in ["a", "a/b", "a/b/c"] {
        let error = tree.file(path, empty(), false).unwrap_err();
        assert!(matches!(error, ErofsError::Conflict(_)), "{path:?}");
    }
    assert!(tree.symlink("l", "").is_err());
    let folder = tempfile::tempdir().unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("s")).unwrap();
    let error = Tree::of_folder(folder.path()).unwrap_err();
    assert!(matches!(error, ErofsError::Special(_)), "{error}");
}

#[test]
fn work_stops_when_it_is_told_to_and_says_what_failed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("big");
    std::fs::write(&path, content(4 * CHUNK, 9)).unwrap();
    let tree = Tree::of_folder(folder.path()).unwrap();
    let write = |progress: &(dyn Fn(u64, u64) -> bool + Sync)| {
        let volume = Volume {
            name: String::new(),
            uuid: [0; 16],
        };
        let mut out: File = tempfile::tempfile().unwrap();
        write(&tree, &volume, &mut out, progress)
    };
    let most = AtomicU64::new(0);
    write(&|done, all| {
        assert_eq!(all, 4 * CHUNK);
        most.fetch_max(done, Ordering::Relaxed);
        true
    })
    .unwrap();
    assert_eq!(most.into_inner(), 4 * CHUNK);
    assert!(matches!(write(&|_, _| false), Err(ErofsError::Stopped)));
    std::fs::write(&path, "shorter").unwrap();
    let error = write(&|_, _| true).unwrap_err();
    assert!(matches!(error, ErofsError::Read { .. }), "{error}");
}

fn nodes() -> impl Strategy<Value = Nodes> {
    let name = "[a-c+. -]{1,3}".prop_filter("no dots", |name| name != "." && name != "..");
    let path = proptest::collection::vec(name, 1..4).prop_map(|parts| parts.join("/"));
    let node = prop_oneof![
        Just(Node::Directory),
        "[a-z/]{1,40}".prop_map(|target| Node::Symlink { target }),
        (0..700_000_u64, 0..4_u64).prop_map(|(length, seed)| file(length, seed)),
        (0..9000_u64, 0..4_u64).prop_map(|(length, seed)| file(length, seed)),
    ];
    proptest::collection::btree_map(path, node, 0..12).prop_map(|mut nodes| {
        // A path that contains others is a directory.
        let paths: Vec<String> = nodes.keys().cloned().collect();
        for path in paths {
            for (end, _) in path.match_indices('/') {
                nodes.insert(path[..end].to_owned(), Node::Directory);
            }
        }
        nodes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_reads_back_and_gives_the_same_bytes_again(nodes in nodes()) {
        let image = image_of(&tree_of(&nodes));
        prop_assert_eq!(read_back(&image), nodes.clone());
        prop_assert!(image == image_of(&tree_of(&nodes)));
    }
}
