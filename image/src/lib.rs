//! Builds bootable disk images without privileges: programs and files become an initramfs ([`initramfs`]), which with a
//! kernel becomes a unified kernel image ([`uki`]), which becomes a disk with an EFI system partition and a blank data
//! partition ([`disk`], [`fat`]). What a boot of it measures into a TPM is computed ([`measurements`]), and can be signed
//! ([`key_file`]). Larger content goes into partitions of its own, read-only and sealed by one hash
//! ([`sealed`], made of [`erofs`] and [`verity`]). A disk can also be the [`payload`] of a medium that installs it
//! ([`installer`]), a stick or an optical disc ([`iso`]).
//!
//! Four modules are specific to Hearth's images: the partitions ([`layout`]), the media of the installer, the description of an
//! image ([`os_release`]), and the build steps in their order ([`recipe`]). Everything below these four accepts any names,
//! types and sizes, and any static or dynamic x86-64 program as init. Invariants: the same input gives the same bytes,
//! on any machine, in any directory, in any environment; nothing is mounted, and no loop device or other program is
//! used; an output file is complete or absent ([`output`]). Converting the raw image to other formats is up to the
//! caller.

pub mod authenticode;
pub mod closure;
pub mod content;
pub mod disk;
pub mod erofs;
pub mod fat;
pub mod initramfs;
pub mod installer;
pub mod iso;
pub mod kernel;
pub mod key_file;
pub mod layout;
pub mod measurements;
pub mod os_release;
pub mod output;
pub mod payload;
pub mod pe;
pub mod recipe;
pub mod sealed;
pub mod sector;
pub mod uki;
pub mod verity;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_tpm::{Digest, SigningKey};
use initramfs::Tree;
use uki::{CommandLine, Uki};
pub use uuid::Uuid;

/// Why an image could not be built: the step, with its cause.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum Error {
    #[error("cannot read the {what} {}", path.display())]
    Read {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot make the initramfs")]
    Initramfs(#[from] initramfs::InitramfsError),
    #[error("cannot make the unified kernel image")]
    Uki(#[from] uki::UkiError),
    #[error("cannot make the disk image")]
    Disk(#[from] disk::DiskError),
}

/// The kernel and user space to boot.
#[derive(Debug, Clone)]
pub struct System {
    /// bzImage with an EFI stub.
    pub kernel: PathBuf,
    /// systemd's EFI stub (`linuxx64.efi.stub`).
    pub stub: PathBuf,
    /// The program that is PID 1; `/init` in the initramfs.
    pub init: PathBuf,
    /// Further programs: source path, path in the initramfs. Their libraries are added.
    pub programs: Vec<(PathBuf, String)>,
    /// Further files by their path in the initramfs, mode 0644.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Microcode, by the path where the kernel looks for it before it unpacks the initramfs.
    pub microcode: BTreeMap<String, Vec<u8>>,
    /// The kernel's command line.
    pub command_line: CommandLine,
    /// os-release, for the UKI and, as `/etc/os-release`, for the initramfs.
    pub os_release: String,
    /// The key that signs the PCR policy of the UKI; none for an unsigned image.
    pub policy_key: Option<Arc<SigningKey>>,
}

/// The parts assembled from a [`System`].
#[derive(Debug, Clone)]
pub struct Assembled {
    /// The kernel, unchanged.
    pub kernel: Vec<u8>,
    /// cpio archive under zstd; with microcode, behind an uncompressed one.
    pub initramfs: Vec<u8>,
    /// The unified kernel image.
    pub uki: Vec<u8>,
    /// PCR 11 when it has been started.
    pub pcr_11: Digest,
    /// Path and size of every file in the initramfs.
    pub contents: Vec<(String, u64)>,
}

impl System {
    /// Reads all parts and puts them together.
    pub fn assemble(&self) -> Result<Assembled, Error> {
        let read = |what, path: &Path| {
            std::fs::read(path).map_err(|source| Error::Read {
                what,
                path: path.to_owned(),
                source,
            })
        };
        let kernel = read("kernel", &self.kernel)?;
        let stub = read("EFI stub", &self.stub)?;
        let tree = self.tree()?;
        let mut initramfs = initramfs::early(&self.microcode)?;
        initramfs.extend(tree.to_zstd()?);
        let uki = Uki {
            stub: &stub,
            os_release: &self.os_release,
            command_line: &self.command_line,
            initramfs: &initramfs,
            kernel: &kernel,
            policy_key: self.policy_key.as_deref(),
        }
        .build()?;
        let contents = tree
            .files()
            .map(|(path, size)| (path.to_owned(), size))
            .collect();
        Ok(Assembled {
            kernel,
            initramfs,
            uki: uki.program,
            pcr_11: uki.pcr_11,
            contents,
        })
    }

    /// The files of the initramfs.
    pub fn tree(&self) -> Result<Tree, initramfs::InitramfsError> {
        let mut tree = Tree::new();
        tree.program(&self.init, "/init")?;
        for (source, target) in &self.programs {
            tree.program(source, target)?;
        }
        for (path, bytes) in &self.files {
            tree.file(path, 0o644, bytes.clone())?;
        }
        tree.file(
            "/etc/os-release",
            0o644,
            self.os_release.clone().into_bytes(),
        )?;
        Ok(tree)
    }
}
