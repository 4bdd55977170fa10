//! The disk that becomes the node's: the image, its parameters, and the firmware's boot entry.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use hearth_api::names::disk::ESP_TYPE;
use hearth_host::layout::Esp;
use hearth_sys::block::{self, BlockError, Blocks, Disk, PartitionDevice};
use hearth_sys::firmware::EFIVARS;
use hearth_sys::firmware::boot_entry::{BootEntryError, Program};
use hearth_sys::gpt::{Partition, Table};
use hearth_sys::mounts::{self, MountError, MountFlags};
use rustix::fs::OFlags;

use crate::disks::ESP_FLAGS;
use crate::payload::{Header, PayloadError};
use crate::write::{Progress, WriteError, Writer};

/// What the firmware starts on a node's disk.
const LOADER: &str = "\\EFI\\BOOT\\BOOTX64.EFI";
/// How the firmware shows it.
const DESCRIPTION: &str = "Hearth";

/// Why an installation was not completed. Until the last step, the disk counts as unfinished.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub(crate) enum InstallError {
    #[error("{path}: cannot {step}")]
    Io {
        path: PathBuf,
        step: &'static str,
        source: io::Error,
    },
    #[error("the payload on the medium")]
    Payload(#[from] PayloadError),
    #[error("cannot write the image")]
    Write(#[from] WriteError),
    #[error("the payload on the medium: expected an EFI system partition, got none")]
    NoEsp,
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error("{path}: what was read back is not what was written")]
    Differs { path: PathBuf },
}

fn failed(path: &Path, step: &'static str) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError::Io { path, step, source }
}

/// What is written to the ESP besides the image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Additions<'a> {
    /// The identity of the installation.
    pub(crate) identity: &'a str,
    /// The parameters of the node, if they have to be on its disk.
    pub(crate) parameters: Option<&'a [u8]>,
}

/// A medium's payload, and how far its header was read.
pub(crate) struct Payload {
    reader: BufReader<File>,
    pub(crate) header: Header,
}

impl Payload {
    pub(crate) fn open(path: &Path) -> Result<Self, InstallError> {
        let file = File::open(path).map_err(failed(path, "open"))?;
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let header = Header::read(&mut reader)?;
        Ok(Self { reader, header })
    }
}

/// Writes everything to the disk. Blocks its thread.
pub(crate) fn install(
    mut payload: Payload,
    (blocks, disk): (&Blocks, &Disk),
    (esp, additions): (&Esp, Additions<'_>),
    progress: &dyn Fn(Progress),
) -> Result<Partition, InstallError> {
    let device = open(&disk.path)?;
    let mut writer = Writer::new(&payload.header, device)?;
    writer.begin()?;
    // The kernel forgets the former partitions; it refuses while one of them is in use.
    block::reread_partitions(writer.target()).map_err(failed(&disk.path, "use it alone"))?;
    writer.fill(&mut payload.reader, progress)?;
    writer.verify(progress)?;
    let entry = esp_of(&writer.table()?)?;
    let partition = blocks.show(disk, entry.clone())?;
    let added = add(&partition, esp, additions);
    blocks.hide(&partition)?;
    added?;
    writer.finish()?;
    Ok(entry)
}

/// Opens a disk that nobody uses.
fn open(path: &Path) -> Result<File, InstallError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let exclusive = OFlags::EXCL.bits() as i32;
    // Given up at once: a partition of the disk could not be mounted otherwise.
    options
        .clone()
        .custom_flags(exclusive)
        .open(path)
        .map_err(failed(path, "use it alone"))?;
    options.open(path).map_err(failed(path, "open"))
}

pub(crate) fn esp_of(table: &Table) -> Result<Partition, InstallError> {
    let mut partitions = table.partitions.iter();
    let esp = partitions.find(|partition| partition.type_guid == ESP_TYPE);
    esp.cloned().ok_or(InstallError::NoEsp)
}

/// Writes the additions to the ESP, and reads them back.
fn add(
    partition: &PartitionDevice,
    esp: &Esp,
    additions: Additions<'_>,
) -> Result<(), InstallError> {
    let installation = format!("{}\n", additions.identity);
    let mut files = vec![(esp.installation(), installation.as_bytes())];
    files.extend(additions.parameters.map(|bytes| (esp.parameters(), bytes)));
    let mount = |flags| mounts::mount(&partition.path, esp.path(), "vfat", flags, "umask=077");
    mount(ESP_FLAGS | MountFlags::SYNCHRONOUS)?;
    let written = files.iter().try_for_each(|(path, bytes)| {
        File::create(path)
            .and_then(|mut file| {
                file.write_all(bytes)?;
                file.sync_all()
            })
            .map_err(failed(path, "write"))
    });
    mounts::unmount(esp.path())?;
    written?;
    mount(ESP_FLAGS | MountFlags::RDONLY)?;
    let differs = files.iter().find(|(path, bytes)| {
        let found = fs::read(path);
        !found.is_ok_and(|found| found == *bytes)
    });
    let differs = differs.map(|(path, _)| path.clone());
    mounts::unmount(esp.path())?;
    match differs {
        None => Ok(()),
        Some(path) => Err(InstallError::Differs { path }),
    }
}

/// Makes the firmware boot from this ESP, next and later. `None` where it has no boot entries.
pub(crate) fn boot_first(esp: &Partition) -> Result<Option<u16>, BootEntryError> {
    let program = Program {
        description: DESCRIPTION,
        number: esp.number,
        first: esp.first,
        sectors: esp.sectors(),
        guid: esp.guid,
        path: LOADER,
    };
    program.boot_first(Path::new(EFIVARS))
}
