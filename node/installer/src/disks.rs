//! Which disk of the machine this installation has written already.

use std::fs;

use hearth_api::chain;
use hearth_api::names::disk::ESP_TYPE;
use hearth_host::disks::Known;
use hearth_host::disks::content::Content;
use hearth_host::layout::Esp;
use hearth_sys::block::{Blocks, Disk};
use hearth_sys::mounts::{self, MountFlags};

/// The longest identity of an installation that is read, in bytes: twice what it has.
const LONGEST: usize = 128;

/// The flags with which the ESP of another disk is mounted.
pub(crate) const ESP_FLAGS: MountFlags = MountFlags::NOEXEC
    .union(MountFlags::NODEV)
    .union(MountFlags::NOSUID);

/// The disk that the installation with this identity has written completely, if there is one. `esp` is where the ESPs of
/// nodes are mounted meanwhile.
pub(crate) fn installed<'a>(
    blocks: &Blocks,
    disks: &'a [Known],
    identity: &str,
    esp: &Esp,
) -> Option<&'a Known> {
    let nodes = disks
        .iter()
        .filter(|known| known.candidate.content == Content::Node);
    nodes.into_iter().find(|known| {
        let found = installation(blocks, &known.disk, esp);
        found.is_some_and(|found| found.trim_ascii_end() == identity.as_bytes())
    })
}

/// The content of the file on the ESP of this disk.
fn installation(blocks: &Blocks, disk: &Disk, esp: &Esp) -> Option<Vec<u8>> {
    let warn =
        |what: String| tracing::warn!(disk = disk.name, "cannot look for an installation: {what}");
    let partition = blocks
        .only_partition(disk, ESP_TYPE)
        .inspect_err(|error| warn(chain(error)))
        .ok()?;
    let flags = ESP_FLAGS | MountFlags::RDONLY;
    mounts::mount(&partition.path, esp.path(), "vfat", flags, "umask=077")
        .inspect_err(|error| warn(chain(error)))
        .ok()?;
    let read = fs::read(esp.installation());
    if let Err(error) = mounts::unmount(esp.path()) {
        warn(chain(&error));
    }
    read.ok().filter(|bytes| bytes.len() <= LONGEST)
}
