//! A raw disk while its machine is powered off.
//!
//! Read and modified by sgdisk and mtools: independent programs, so that an error of our own code cannot hide itself.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use hearth_api::names;
use hearth_lab::tool;
use hearth_qemu::command::CommandLine;
use ring::digest;

use crate::Outcome;

const SECTOR: u64 = 512;

/// Position of a partition, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// A disk with an ESP, extension slots, and a data partition.
#[derive(Clone, Debug)]
pub struct RawDisk {
    path: PathBuf,
    /// The EFI system partition.
    pub esp: Partition,
    /// The first extension slot, which has the extensions.
    pub extension: Partition,
    second_slot: Partition,
    /// The data partition.
    pub data: Partition,
}

impl RawDisk {
    /// Reads the partition table.
    ///
    /// # Errors
    /// If a partition is not where it belongs.
    pub async fn open(path: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            esp: partition(path, 1, names::ESP_TYPE).await?,
            extension: partition(path, 2, names::EXTENSION_TYPE).await?,
            second_slot: partition(path, 3, names::EXTENSION_TYPE).await?,
            data: partition(path, 4, names::DATA_TYPE).await?,
        })
    }

    /// Inverts all bits of one byte.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub fn flip(&self, at: u64) -> Outcome {
        let file = File::options().read(true).write(true).open(&self.path)?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[!byte[0]], at)?;
        Ok(())
    }

    /// Removes the extension slots from the table.
    ///
    /// # Errors
    /// If sgdisk fails.
    pub async fn delete_slots(&self) -> Outcome {
        let mut command = CommandLine::new("sgdisk");
        command.option("-d", "2").option("-d", "3").arg(&self.path);
        tool::run(&command).await?;
        Ok(())
    }

    /// Moves the content of the first extension slot to the second.
    ///
    /// # Errors
    /// If the disk cannot be read or written.
    pub fn move_to_second_slot(&self) -> Outcome {
        let file = File::options().read(true).write(true).open(&self.path)?;
        let mut block = vec![0; 1 << 20];
        for at in (0..self.extension.length).step_by(block.len()) {
            file.read_exact_at(&mut block, self.extension.start + at)?;
            // The slots are sparse.
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(&block, self.second_slot.start + at)?;
                block.fill(0);
                file.write_all_at(&block, self.extension.start + at)?;
            }
        }
        Ok(())
    }

    /// Checks that sgdisk reports no problem of the table.
    ///
    /// # Errors
    /// With sgdisk's output.
    pub async fn check_table(&self) -> Outcome {
        let mut command = CommandLine::new("sgdisk");
        command.arg("-v").arg(&self.path);
        let said = tool::run(&command).await?;
        ensure!(said.contains("No problems found"), "{command}:\n{said}");
        Ok(())
    }

    /// Reads a file of the ESP.
    ///
    /// # Errors
    /// If it does not exist.
    pub async fn read_esp(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        let scratch = self.scratch();
        let mut command = self.mtool("mcopy");
        command.arg("-n").arg(format!("::{path}")).arg(&scratch);
        tool::run(&command).await?;
        let content = std::fs::read(&scratch).with_context(|| format!("cannot read {path}"))?;
        std::fs::remove_file(&scratch)?;
        Ok(content)
    }

    /// Puts another unified kernel image in the place of the one that the boot loader starts.
    ///
    /// # Errors
    /// If there is not exactly one, or the ESP is full.
    pub async fn replace_image(&self, content: &[u8]) -> Outcome {
        let said = tool::run(self.mtool("mdir").arg("-b").arg("::/EFI/Linux")).await?;
        let images = said.lines().filter_map(|line| line.strip_prefix("::"));
        let images: Vec<&str> = images.filter(|path| path.ends_with(".efi")).collect();
        let &[image] = &images[..] else {
            bail!("expected one image, found {images:?}");
        };
        self.write_esp(image, content).await
    }

    /// Writes a file to the ESP, replacing an existing one.
    ///
    /// # Errors
    /// If the directory does not exist, or the ESP is full.
    pub async fn write_esp(&self, path: &str, content: &[u8]) -> Outcome {
        let scratch = self.scratch();
        std::fs::write(&scratch, content)?;
        let mut command = self.mtool("mcopy");
        command.arg("-o").arg(&scratch).arg(format!("::{path}"));
        tool::run(&command).await?;
        std::fs::remove_file(&scratch)?;
        Ok(())
    }

    /// Removes a file of the ESP.
    ///
    /// # Errors
    /// If it does not exist.
    pub async fn remove_esp(&self, path: &str) -> Outcome {
        let mut command = self.mtool("mdel");
        command.arg(format!("::{path}"));
        tool::run(&command).await?;
        Ok(())
    }

    /// Fills all free space of the ESP with one file.
    ///
    /// # Errors
    /// If there is no free space, or its size cannot be determined.
    pub async fn fill_esp(&self, path: &str) -> Outcome {
        // The last line: "  93 847 552 bytes free".
        let said = tool::run(self.mtool("mdir").arg("::/")).await?;
        let free = said
            .lines()
            .rev()
            .find_map(|line| line.strip_suffix("bytes free"));
        let free = free.with_context(|| format!("no free bytes in\n{said}"))?;
        let free: u64 = free.split_whitespace().collect::<String>().parse()?;
        let scratch = self.scratch();
        File::create(&scratch)?.set_len(free)?;
        let mut command = self.mtool("mcopy");
        command.arg(&scratch).arg(format!("::{path}"));
        tool::run(&command).await?;
        std::fs::remove_file(&scratch)?;
        Ok(())
    }

    /// The sectors of a file or a directory of the ESP, from the disk's beginning.
    ///
    /// # Errors
    /// If it does not exist, or mtools' output is not understood.
    pub async fn esp_sectors(&self, path: &str) -> anyhow::Result<Vec<u64>> {
        let said = tool::run(self.mtool("minfo").arg("::")).await?;
        let field = |name: &str| {
            let line = said.lines().find_map(|line| line.trim().strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            number.with_context(|| format!("no {name:?} in\n{said}"))
        };
        let per_cluster: u64 = field("cluster size: ")?;
        let first_cluster =
            field("reserved (boot) sectors: ")? + field("fats: ")? * field("Big fatlen=")?;
        // "::/hearth/boot_record.0 <12> <14-15>"
        let said = tool::run(self.mtool("mshowfat").arg(format!("::{path}"))).await?;
        let mut sectors = Vec::new();
        for range in said.split('<').skip(1) {
            let (range, _) = range.split_once('>').with_context(|| said.clone())?;
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let clusters = first.parse::<u64>()?..=last.parse::<u64>()?;
            sectors.extend(clusters.flat_map(|cluster| {
                // The first one is number 2.
                let begin = self.esp.start / SECTOR + first_cluster + (cluster - 2) * per_cluster;
                begin..begin + per_cluster
            }));
        }
        ensure!(!sectors.is_empty(), "{path} has no clusters: {said}");
        Ok(sectors)
    }

    /// SHA-256 of all bytes of the data partition.
    ///
    /// # Errors
    /// If the disk cannot be read.
    pub fn data_digest(&self) -> anyhow::Result<String> {
        let mut hash = digest::Context::new(&digest::SHA256);
        self.each_block(|_, block| hash.update(block))?;
        Ok(hex::encode(hash.finish()))
    }

    /// Overwrites the data partition with that of another disk, which must have the same size.
    ///
    /// # Errors
    /// If the sizes differ, or a disk cannot be read or written.
    pub fn take_data_of(&self, other: &RawDisk) -> Outcome {
        ensure!(self.data == other.data, "the disks have different layouts");
        let mut file = File::options().write(true).open(&self.path)?;
        let mut written: io::Result<()> = Ok(());
        other.each_block(|at, block| {
            if written.is_ok() {
                written = file
                    .seek(SeekFrom::Start(self.data.start + at))
                    .and_then(|_| file.write_all(block));
            }
        })?;
        written.context("cannot write the data partition")
    }

    /// The size in bytes of the XFS that begins at this offset of the data partition.
    ///
    /// # Errors
    /// If there is none.
    pub fn xfs_size(&self, offset: u64) -> anyhow::Result<u64> {
        let mut superblock = [0; 16];
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.data.start + offset))?;
        file.read_exact(&mut superblock)?;
        ensure!(&superblock[..4] == b"XFSB", "no XFS at {offset}");
        let number = |bytes: &[u8]| {
            let fold = |value, byte: &u8| value << 8 | u64::from(*byte);
            bytes.iter().fold(0, fold)
        };
        Ok(number(&superblock[4..8]) * number(&superblock[8..16]))
    }

    fn each_block(&self, mut take: impl FnMut(u64, &[u8])) -> Outcome {
        let context = || format!("cannot read {}", self.path.display());
        let mut file = File::open(&self.path).with_context(context)?;
        file.seek(SeekFrom::Start(self.data.start))?;
        let mut data = file.take(self.data.length);
        let (mut at, mut block) = (0, vec![0; 1 << 20]);
        loop {
            let count = data.read(&mut block).with_context(context)?;
            if count == 0 {
                ensure!(at == self.data.length, "the disk ends within a partition");
                return Ok(());
            }
            take(at, &block[..count]);
            at += count as u64;
        }
    }

    fn mtool(&self, program: &str) -> CommandLine {
        let mut image = self.path.clone().into_os_string();
        image.push(format!("@@{}", self.esp.start));
        let mut command = CommandLine::new(program);
        command.option("-i", image);
        command
    }

    fn scratch(&self) -> PathBuf {
        self.path.with_extension("scratch")
    }
}

async fn partition(disk: &Path, number: u32, type_guid: &str) -> anyhow::Result<Partition> {
    let mut command = CommandLine::new("sgdisk");
    command.arg("-i").arg(number.to_string()).arg(disk);
    let said = tool::run(&command).await?;
    // "First sector: 2048 (at 1024.0 KiB)"
    let field = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("{command}: no {name:?} in\n{said}"))
    };
    let found = field("Partition GUID code: ")?;
    ensure!(
        found.eq_ignore_ascii_case(type_guid),
        "{}: partition {number}: type: expected {type_guid}, got {found}",
        disk.display()
    );
    let first: u64 = field("First sector: ")?.parse()?;
    let last: u64 = field("Last sector: ")?.parse()?;
    Ok(Partition {
        start: first * SECTOR,
        length: (last + 1 - first) * SECTOR,
    })
}
