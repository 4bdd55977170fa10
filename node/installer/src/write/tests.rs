//! An image, as the builder makes it, on disks that lose power.

use std::cell::{Cell, RefCell};
use std::fs;

use hearth_host::disks::content::Content;
use hearth_image::disk::Seed;
use hearth_image::layout::{self, Boot};
use hearth_image::sector::SectorSize;
use proptest::prelude::*;

use super::*;

/// The image of a node, and its payload. The image has holes of gigabytes, so its bytes are not kept.
struct Made {
    folder: tempfile::TempDir,
    payload: Vec<u8>,
}

fn made() -> Made {
    let folder = tempfile::tempdir().unwrap();
    let boot = Boot {
        loader: vec![6; 10_000].into(),
        uki: vec![7; 100_000].into(),
        version: "1".into(),
    };
    let (seed, sectors) = (Seed::of(&[b"x"]), SectorSize::B512);
    let disk = layout::disk(seed, boot, None, Vec::new(), sectors).unwrap();
    let (image, payload) = (folder.path().join("image"), folder.path().join("payload"));
    disk.write(&image).unwrap();
    hearth_image::payload::write(&image, sectors, &payload).unwrap();
    Made {
        payload: fs::read(payload).unwrap(),
        folder,
    }
}

fn write_all<T: Target>(payload: &[u8], target: T) -> Result<T, WriteError> {
    let mut reader = payload;
    let header = Header::read(&mut reader)?;
    let mut writer = Writer::new(&header, target)?;
    writer.begin()?;
    writer.fill(&mut reader, &|_| {})?;
    writer.verify(&|_| {})?;
    writer.table()?;
    writer.finish()?;
    Ok(writer.target)
}

#[test]
fn a_disk_has_the_image_and_nothing_of_what_was_there() {
    let Made { folder, payload } = made();
    let image = File::open(folder.path().join("image")).unwrap();
    let size = Target::size(&image).unwrap();
    let path = folder.path().join("disk");
    let disk = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .unwrap();
    let whole = size + (8 << 20);
    disk.set_len(whole).unwrap();
    // Former partition tables, and what is left where the image has zeros.
    for at in [
        0,
        512,
        100_000,
        200 << 20,
        size - PIECE,
        size - 1,
        whole - 512,
    ] {
        disk.write_all_at(&[0xee; 512], at)
            .unwrap_or_else(|_| disk.write_all_at(&[0xee], at).unwrap());
    }
    let seen = RefCell::new(Vec::new());
    let mut reader = &payload[..];
    let header = Header::read(&mut reader).unwrap();
    let mut writer = Writer::new(&header, disk).unwrap();
    writer.begin().unwrap();
    assert_eq!(
        Content::of(writer.target(), whole, 512).unwrap(),
        Content::Unfinished
    );
    let progress = |step| seen.borrow_mut().push(step);
    writer.fill(&mut reader, &progress).unwrap();
    writer.verify(&progress).unwrap();
    let esp = writer.table().unwrap().partitions.remove(0);
    assert_eq!((esp.number, esp.first), (1, 2048));
    assert_eq!(
        Content::of(writer.target(), whole, 512).unwrap(),
        Content::Unfinished
    );
    writer.finish().unwrap();
    let disk = writer.target();
    assert_eq!(Content::of(disk, whole, 512).unwrap(), Content::Node);
    for step in [
        Progress::Cleared(100),
        Progress::Written(100),
        Progress::Verified(100),
    ] {
        assert!(seen.borrow().contains(&step), "{step:?}");
    }
    let (mut found, mut expected) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
    for at in (0..size).step_by(PIECE as usize) {
        disk.read_exact_at(&mut found, at).unwrap();
        image.read_exact_at(&mut expected, at).unwrap();
        assert!(found == expected, "at {at}");
    }
    disk.read_exact_at(&mut found, whole - PIECE).unwrap();
    assert!(is_zero(&found));
}

#[test]
fn what_the_disk_does_not_keep_is_noticed() {
    let Made { folder, payload } = made();
    let image = folder.path().join("image");
    let size = fs::metadata(image).unwrap().len();
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(size).unwrap();
    let mut reader = &payload[..];
    let header = Header::read(&mut reader).unwrap();
    let mut writer = Writer::new(&header, disk).unwrap();
    writer.begin().unwrap();
    writer.fill(&mut reader, &|_| {}).unwrap();
    let in_the_middle = |extent: &&crate::payload::Extent| extent.offset >= PIECE;
    let extent = header.extents.iter().find(in_the_middle).unwrap();
    writer
        .target()
        .write_all_at(&[0x55], extent.offset + 3)
        .unwrap();
    let error = writer.verify(&|_| {}).unwrap_err();
    assert!(matches!(error, WriteError::Differs { offset } if offset == extent.offset));
}

/// A small disk that keeps, of what was written since the last sync, only a part, and fails after some writes.
struct Failing {
    /// What is on it.
    durable: RefCell<Vec<u8>>,
    /// What is on it or in its memory.
    seen: RefCell<Vec<u8>>,
    /// Writes since the last sync.
    pending: RefCell<Vec<(u64, Vec<u8>)>>,
    /// How many writes and syncs it takes.
    left: Cell<usize>,
}

impl Failing {
    fn count(&self) -> io::Result<()> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.ok_or(io::ErrorKind::TimedOut)?);
        Ok(())
    }

    /// What is left after the cut, if this part of the pending writes has reached the disk.
    fn after(&self, reached: impl Fn(usize) -> bool) -> Vec<u8> {
        let mut bytes = self.durable.borrow().clone();
        for (number, (at, written)) in self.pending.borrow().iter().enumerate() {
            // Writes are torn between sectors.
            for (sector, part) in written.chunks(512).enumerate() {
                if reached(number * 7 + sector) {
                    put(&mut bytes, at + 512 * sector as u64, part);
                }
            }
        }
        bytes
    }
}

impl Target for &Failing {
    fn size(&self) -> io::Result<u64> {
        Ok(self.seen.borrow().len() as u64)
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        buffer.copy_from_slice(&self.seen.borrow()[at..at + buffer.len()]);
        Ok(())
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.count()?;
        put(&mut self.seen.borrow_mut(), offset, bytes);
        self.pending.borrow_mut().push((offset, bytes.to_vec()));
        Ok(())
    }
    fn clear(&self, part: Range<u64>) -> io::Result<()> {
        self.write_at(&vec![0; (part.end - part.start) as usize], part.start)
    }
    fn sync(&self) -> io::Result<()> {
        self.count()?;
        self.pending.borrow_mut().clear();
        self.durable.borrow_mut().clone_from(&self.seen.borrow());
        Ok(())
    }
    fn forget(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A payload of a disk of 8 MiB with a GPT.
fn small_payload() -> Vec<u8> {
    use hearth_image::disk::{Disk, Partition, PartitionContent};
    let partition = |label: &str, type_guid, content| Partition {
        label: label.to_owned(),
        type_guid,
        size: 3 << 20,
        content,
    };
    let content = PartitionContent::Bytes(vec![(8192, vec![9; 20_000].into())]);
    let disk = Disk {
        seed: Seed::of(&[b"small"]),
        sector_size: SectorSize::B512,
        partitions: vec![
            partition("A", layout::ESP_TYPE, content),
            partition("B", layout::DATA_TYPE, PartitionContent::Blank),
        ],
        is_secret: false,
    };
    let folder = tempfile::tempdir().unwrap();
    let (image, payload) = (folder.path().join("image"), folder.path().join("payload"));
    disk.write(&image).unwrap();
    hearth_image::payload::write(&image, SectorSize::B512, &payload).unwrap();
    fs::read(payload).unwrap()
}

fn content(bytes: &[u8]) -> Content {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    Content::of(&file, bytes.len() as u64, 512).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// After a cut at any moment the disk is as before, or marked, or complete.
    #[test]
    fn a_power_cut_leaves_what_was_there_or_an_unfinished_installation_or_a_node(
        left in 0_usize..60,
        seed: u64,
        spare in 0_usize..3,
    ) {
        let payload = small_payload();
        let before = vec![0xee; (8 + spare) << 20];
        let disk = Failing {
            durable: RefCell::new(before.clone()),
            seen: RefCell::new(before.clone()),
            pending: RefCell::default(),
            left: Cell::new(left),
        };
        let written = write_all(&payload, &disk);
        let reached = |number: usize| seed.rotate_left(number as u32) & 1 == 1;
        let after = disk.after(reached);
        match content(&after) {
            Content::Unfinished => prop_assert!(written.is_err()),
            Content::Node => {
                // All of the image, whatever the cut has lost.
                let mut reader = &payload[..];
                let header = Header::read(&mut reader).unwrap();
                for extent in &header.extents {
                    let range = extent.range();
                    let found = &after[range.start as usize..range.end as usize];
                    prop_assert!(extent.is(found), "at {}", extent.offset);
                }
                for hole in header.holes(0..header.size) {
                    prop_assert!(is_zero(&after[hole.start as usize..hole.end as usize]));
                }
            }
            Content::Other(_) => prop_assert!(after == before),
            Content::Empty | Content::Volume => prop_assert!(false, "there was something else"),
        }
    }
}
