//! The disks of a machine beside the one that it has booted from: what is known of each ([`content`]), which of them is
//! meant by conditions ([`choice`]), and those that are volumes of the node ([`volumes`]).

pub mod choice;
pub mod content;
pub mod volumes;

use std::fs::File;

use hearth_sys::block::{BlockError, Blocks, Disk};

use choice::Candidate;
use content::Content;

/// A disk, and what is known of it.
#[derive(Clone, Debug)]
pub struct Known {
    /// As the kernel has it.
    pub disk: Disk,
    /// What decides whether it is meant.
    pub candidate: Candidate,
}

/// All disks but the one with this name.
///
/// # Errors
/// If they cannot be listed. One that cannot be read has this as its content.
pub fn all_but(blocks: &Blocks, name: &str) -> Result<Vec<Known>, BlockError> {
    let disks = blocks.disks()?.into_iter();
    let others = disks.filter(|disk| disk.name != name);
    Ok(others.map(|disk| known(blocks, disk)).collect())
}

fn known(blocks: &Blocks, disk: Disk) -> Known {
    let content = File::open(&disk.path)
        .and_then(|file| Content::of(&file, disk.size, disk.sector_size))
        .unwrap_or_else(|error| Content::Other(format!("it cannot be read: {error}")));
    let candidate = Candidate {
        name: disk.name.clone(),
        size: disk.size,
        sector_size: disk.sector_size,
        is_read_only: disk.read_only,
        identity: blocks.identity(&disk.name),
        content,
    };
    Known { disk, candidate }
}
