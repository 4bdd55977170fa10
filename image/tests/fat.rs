//! The FAT32 writer, checked by `fatfs` as reader and by `fsck.vfat`.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

mod tools;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Cursor, Read};

use hearth_image::content::Content;
use hearth_image::fat::{FatError, FatSpec, VolumeLabel};
use hearth_image::sector::SectorSize;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn spec(size: u64, files: impl IntoIterator<Item = (String, Vec<u8>)>) -> FatSpec {
    FatSpec {
        size,
        sector_size: SectorSize::B512,
        hidden_sectors: 2048,
        label: VolumeLabel::parse("TEST").unwrap(),
        volume_id: 0x1234_abcd,
        reserve: 0,
        files: files
            .into_iter()
            .map(|(path, bytes)| (path, Content::Bytes(bytes)))
            .collect(),
    }
}

fn write(spec: &FatSpec) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(spec.size).unwrap();
    spec.plan()
        .unwrap()
        .write_to(file.as_file_mut(), 0)
        .unwrap();
    file
}

/// All files, as `fatfs` sees them.
fn read_back(file: &File) -> BTreeMap<String, Vec<u8>> {
    fn walk<IO: fatfs::ReadWriteSeek>(
        directory: fatfs::Dir<'_, IO>,
        path: &str,
        found: &mut BTreeMap<String, Vec<u8>>,
    ) {
        for entry in directory.iter() {
            let entry = entry.unwrap();
            let name = entry.file_name();
            if name == "." || name == ".." {
                continue;
            }
            let path = format!("{path}{name}");
            if entry.is_dir() {
                walk(entry.to_dir(), &format!("{path}/"), found);
            } else {
                let mut bytes = Vec::new();
                entry.to_file().read_to_end(&mut bytes).unwrap();
                assert_eq!(entry.len(), bytes.len() as u64, "{path}");
                found.insert(path, bytes);
            }
        }
    }
    let mut found = BTreeMap::new();
    // Read-only: `fatfs` would mark the volume dirty.
    let mut image = Vec::new();
    let mut file = file;
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut image).unwrap();
    let volume = fatfs::FileSystem::new(Cursor::new(image), fatfs::FsOptions::new()).unwrap();
    assert_eq!(volume.fat_type(), fatfs::FatType::Fat32);
    assert_eq!(volume.volume_id(), 0x1234_abcd);
    assert_eq!(volume.volume_label(), "TEST");
    assert_eq!(
        volume.read_volume_label_from_root_dir().unwrap().as_deref(),
        Some("TEST")
    );
    walk(volume.root_dir(), "", &mut found);
    found
}

fn expected(spec: &FatSpec) -> BTreeMap<String, Vec<u8>> {
    let bytes = |content: &Content| match content {
        Content::Bytes(bytes) => bytes.clone(),
        Content::File { .. } => panic!("only bytes here"),
    };
    spec.files
        .iter()
        .map(|(path, content)| (path.clone(), bytes(content)))
        .collect()
}

#[test]
fn an_esp_is_clean_and_reads_back() {
    let spec = spec(
        128 * MIB,
        [
            ("EFI/BOOT/BOOTX64.EFI".into(), vec![7; 3_000_001]),
            ("hearth/parameters.pb".into(), vec![1, 2, 3]),
            ("empty".into(), vec![]),
            ("cluster exactly.bin".into(), vec![9; 1024]),
        ],
    );
    let file = write(&spec);
    tools::fsck(file.path());
    assert_eq!(read_back(file.as_file()), expected(&spec));
    let allocated =
        std::os::unix::fs::MetadataExt::blocks(&file.as_file().metadata().unwrap()) * 512;
    assert!(allocated < 3_100_000, "{allocated} bytes allocated");
}

#[test]
fn nothing_at_all_is_a_file_system_too() {
    for size in [34, 40, 64, 65, 100, 256, 300, 512, 700, 2049] {
        let spec = spec(size * MIB, []);
        let file = write(&spec);
        tools::fsck(file.path());
    }
}

#[test]
fn a_directory_of_many_clusters() {
    let names = (0..700).map(|n| {
        (
            format!("deep/er/a file with a rather long name, number {n}.text"),
            vec![n as u8; n],
        )
    });
    let spec = spec(34 * MIB, names);
    let file = write(&spec);
    tools::fsck(file.path());
    assert_eq!(read_back(file.as_file()), expected(&spec));
}

#[test]
fn the_same_input_gives_the_same_bytes_and_the_free_count_is_true() {
    let spec = spec(
        40 * MIB,
        [("A/B".into(), vec![1; 5000]), ("C".into(), vec![2; 1])],
    );
    let read = |file: tempfile::NamedTempFile| std::fs::read(file.path()).unwrap();
    let first = read(write(&spec));
    assert_eq!(first, read(write(&spec)));
    let volume = fatfs::FileSystem::new(Cursor::new(first), fatfs::FsOptions::new()).unwrap();
    let stats = volume.stats().unwrap();
    assert_eq!(
        u64::from(stats.free_clusters()) * u64::from(stats.cluster_size()),
        spec.plan().unwrap().free()
    );
    // 2 directories, 10 clusters and 1.
    assert_eq!(stats.total_clusters() - stats.free_clusters(), 13);
}

#[test]
fn full_to_the_last_cluster_and_one_beyond() {
    let empty = spec(34 * MIB, [("X".into(), vec![])]);
    let free = empty.plan().unwrap().free();
    let full = spec(34 * MIB, [("X".into(), vec![3; free as usize])]);
    let file = write(&full);
    tools::fsck(file.path());
    assert_eq!(read_back(file.as_file()), expected(&full));
    let beyond = spec(34 * MIB, [("X".into(), vec![3; free as usize + 1])]);
    assert!(matches!(
        beyond.plan().err(),
        Some(FatError::NoSpace { .. })
    ));
    let mut reserved = spec(34 * MIB, [("X".into(), vec![])]);
    reserved.reserve = free;
    assert!(reserved.plan().is_ok());
    reserved.reserve = free + 1;
    assert!(matches!(
        reserved.plan().err(),
        Some(FatError::NoSpace { .. })
    ));
}

#[test]
fn impossible_trees_are_refused() {
    let refused = |paths: &[&str]| {
        spec(34 * MIB, paths.iter().map(|p| ((*p).to_owned(), vec![])))
            .plan()
            .err()
    };
    assert!(matches!(
        refused(&["a", "a/b"]),
        Some(FatError::Duplicate { .. })
    ));
    assert!(matches!(
        refused(&["a/b", "A/c"]),
        Some(FatError::Duplicate { .. })
    ));
    assert!(
        matches!(refused(&["x/readme", "x/README"]), Some(FatError::Duplicate { path }) if path == "x/readme")
    );
    for path in ["", "/a", "a/", "a//b", "../a", "a/./b", "a:b"] {
        assert!(
            matches!(refused(&[path]), Some(FatError::Path { .. })),
            "{path:?}"
        );
    }
    let crowd: Vec<String> = (0..33_000).map(|n| format!("lower{n}")).collect();
    let crowd: Vec<&str> = crowd.iter().map(String::as_str).collect();
    assert!(matches!(
        refused(&crowd),
        Some(FatError::DirectoryTooLarge { .. })
    ));
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[A-Z0-9]{1,8}(\\.[A-Z0-9]{1,3})?",
        "[a-zA-Z0-9 ._~+,;=\\[\\]-]{1,40}",
        "[a-zA-Zäöüßéñ日本語🔥.]{1,70}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A tree that can be planned is clean and reads back; any other is refused without a panic.
    #[test]
    fn arbitrary_trees(
        files in proptest::collection::btree_map(
            proptest::collection::vec(name(), 1..4).prop_map(|parts| parts.join("/")),
            (any::<u8>(), 0usize..6000).prop_map(|(byte, length)| vec![byte; length]),
            0..40,
        ),
        megabytes in 34u64..80,
    ) {
        let mut spec = spec(megabytes * MIB, []);
        for (path, bytes) in files {
            let mut more = spec.clone();
            more.files.insert(path, Content::Bytes(bytes));
            if more.plan().is_ok() {
                spec = more;
            }
        }
        let file = write(&spec);
        tools::fsck(file.path());
        prop_assert_eq!(read_back(file.as_file()), expected(&spec));
    }
}
