//! Builds an image's files from its parts: initramfs, unified kernel image, disk.
//!
//! The initramfs and the UKI are rebuilt on every call, which takes less time than deciding by hashes of all inputs
//! whether they have to be. An output whose content would be the same is not written, so that it keeps its modification
//! time. A stamp file beside the disk image has a hash of its content, its length and its modification time: an image
//! that was written to since is rebuilt.
//!
//! Outputs are replaced by rename, never written in place: a file that is open or linked elsewhere is not changed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_tpm::SigningKey;

use crate::disk::{Disk, DiskError, Seed};
use crate::installer::{KERNEL_WORD, Medium};
use crate::layout::{self, Boot, LayoutError};
use crate::measurements::{Booted, MeasurementError, Measurements};
use crate::output::{self, OutputError, write_if_changed};
use crate::payload::{self, PayloadError};
use crate::sector::SectorSize;
use crate::uki::{CommandLine, UkiError};
use crate::{Assembled, Error, System};

/// systemd's EFI stub, at Debian's path.
const STUB: &str = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";
/// systemd-boot, of the same package.
pub const LOADER: &str = "/usr/lib/systemd/boot/efi/systemd-bootx64.efi";

/// The kernel's command line:
/// - `console=tty0 console=ttyS0`: the kernel's messages go to the screen and to the serial line. The node's go to the last
///   of the two that exists: the serial line, or the screen of a machine that has none.
/// - `clocksource=hpet`: on an emulated or loaded host the TSC is miscalibrated, and clocks run at a wrong speed. A
///   direct boot of the kernel can append another value.
/// - `random.trust_cpu=on`: without it a machine that has no virtio-rng waits for entropy forever.
/// - `panic=-1`: a panic reboots at once.
/// - `gpt`: read the backup if the primary partition table is damaged.
/// - `quiet`: the serial line is slow, and boot waits for it.
const COMMAND_LINE: &str =
    "console=tty0 console=ttyS0 clocksource=hpet random.trust_cpu=on panic=-1 gpt quiet";

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum RecipeError {
    #[error(transparent)]
    Assemble(#[from] Error),
    #[error(transparent)]
    CommandLine(#[from] UkiError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error(transparent)]
    Measurement(#[from] MeasurementError),
    #[error("the new image has been removed")]
    Gone,
}

/// A sealed extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extension {
    /// Path of the file with its bytes.
    pub file: PathBuf,
    /// The kernel command line argument that admits it at its place.
    pub word: String,
}

/// The description of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The version in the name of the UKI, see [`Boot::version`].
    pub version: String,
    /// The text of os-release.
    pub os_release: String,
}

/// The specification of an image.
#[derive(Debug, Clone)]
pub struct ImageSpec {
    system: System,
    version: String,
    /// Parameters of the node, for the ESP.
    pub parameters: Option<Vec<u8>>,
    /// Of the disk that the image is for.
    pub sector_size: SectorSize,
    extensions: Vec<Extension>,
}

/// A built image and what it was built from.
#[derive(Debug, Clone)]
pub struct Artifacts {
    /// The disk, raw and sparse. Must not be written to: boot a copy, or an overlay on a hard link of it.
    pub image: PathBuf,
    /// The unified kernel image.
    pub uki: PathBuf,
    /// What a boot measures into a TPM, see [`Measurements::to_json`].
    pub measurements: PathBuf,
    /// The bare kernel, for direct boot.
    pub kernel: PathBuf,
    /// The initramfs, for direct boot.
    pub initramfs: PathBuf,
    /// The kernel's command line, for direct boot.
    pub cmdline: String,
    /// The program that is PID 1.
    pub init: PathBuf,
    /// Path and size of every file in the initramfs.
    pub contents: Vec<(String, u64)>,
    /// The content of each extension's partition.
    pub extensions: Vec<PathBuf>,
}

impl ImageSpec {
    /// An image of this kernel with this program as init, and further programs by their paths in it.
    pub fn new(
        kernel: PathBuf,
        init: PathBuf,
        programs: Vec<(PathBuf, String)>,
        release: Release,
    ) -> Result<ImageSpec, RecipeError> {
        Ok(ImageSpec {
            system: System {
                kernel,
                stub: STUB.into(),
                init,
                programs,
                files: BTreeMap::new(),
                microcode: BTreeMap::new(),
                command_line: CommandLine::parse(COMMAND_LINE)?,
                os_release: release.os_release,
                policy_key: None,
            },
            version: release.version,
            parameters: None,
            sector_size: SectorSize::default(),
            extensions: Vec::new(),
        })
    }

    /// Adds firmware, by its path in the initramfs.
    pub fn add_firmware(&mut self, files: BTreeMap<String, Vec<u8>>) {
        self.system.files.extend(files);
    }

    /// Sets the microcode that the kernel loads, by the paths where it looks for it.
    pub fn set_microcode(&mut self, files: BTreeMap<String, Vec<u8>>) {
        self.system.microcode = files;
    }

    /// Signs the PCR policy of the UKI with this key.
    pub fn sign(&mut self, key: Arc<SigningKey>) {
        self.system.policy_key = Some(key);
    }

    /// Sets the extensions, replacing previous ones, and appends words to the command line. The extensions are in the
    /// order of [`layout::starts`].
    pub fn extend(&mut self, extensions: Vec<Extension>, words: &str) -> Result<(), RecipeError> {
        let mut line = COMMAND_LINE.to_owned();
        for extension in &extensions {
            line = format!("{line} {}", extension.word);
        }
        self.system.command_line = CommandLine::parse(&format!("{line} {words}"))?;
        self.extensions = extensions;
        Ok(())
    }

    /// The disk around the UKI at `uki`.
    pub fn disk(&self, uki: &Path) -> Result<Disk, LayoutError> {
        let files = self
            .extensions
            .iter()
            .map(|extension| extension.file.as_path());
        disk_of(
            uki,
            &self.version,
            self.parameters.as_deref(),
            files,
            self.sector_size,
        )
    }

    /// A medium that installs the image in these artifacts, which were written to `folder`, with parameters for the
    /// machines that are booted from it. Its parts are in that folder, too.
    pub fn installer(
        &self,
        artifacts: &Artifacts,
        parameters: Option<Vec<u8>>,
        folder: &Path,
    ) -> Result<Medium, RecipeError> {
        let payload = folder.join("installer.payload");
        let identity = payload::write(&artifacts.image, self.sector_size, &payload)?;
        let mut system = self.system.clone();
        let line = format!("{} {KERNEL_WORD}", system.command_line.as_str());
        system.command_line = CommandLine::parse(&line)?;
        let uki = system.assemble()?.uki;
        let loader = loader()?;
        Ok(Medium {
            seed: Seed::of(&[
                &identity,
                &loader,
                &uki,
                parameters.as_deref().unwrap_or_default(),
            ]),
            boot: Boot {
                loader: loader.into(),
                uki: uki.into(),
                version: self.version.clone(),
            },
            payload: layout::content(&payload)?,
            parameters,
        })
    }

    /// Builds the bootable parts in memory. Most of the work is done here.
    pub fn assemble(&self) -> Result<Assembled, Error> {
        self.system.assemble()
    }

    /// Writes all outputs that are not up to date into `folder`. Must not run concurrently for the same folder.
    pub fn write(&self, assembled: Assembled, folder: &Path) -> Result<Artifacts, RecipeError> {
        let artifacts = Artifacts {
            image: folder.join("hearth.img"),
            uki: folder.join("hearth.efi"),
            measurements: folder.join("measurements.json"),
            kernel: self.system.kernel.clone(),
            initramfs: folder.join("initramfs.zst"),
            cmdline: self.system.command_line.as_str().to_owned(),
            init: self.system.init.clone(),
            contents: assembled.contents,
            extensions: self
                .extensions
                .iter()
                .map(|extension| extension.file.clone())
                .collect(),
        };
        write_if_changed(&artifacts.initramfs, &assembled.initramfs)?;
        write_if_changed(&artifacts.uki, &assembled.uki)?;
        let measured = Measurements::of(&Booted {
            loader: &loader()?,
            uki: &assembled.uki,
            pcr_11: assembled.pcr_11,
            kernel: &assembled.kernel,
            command_line: self.system.command_line.as_str(),
        })?;
        let json = measured.to_json(&assembled.uki);
        write_if_changed(&artifacts.measurements, json.as_bytes())?;
        let disk = self.disk(&artifacts.uki)?;
        let stamp = folder.join("hearth.img.stamp");
        let current = stamp_of(&disk, &artifacts.image);
        if current.is_none() || current != fs::read_to_string(&stamp).ok() {
            disk.write(&artifacts.image)?;
            let text = stamp_of(&disk, &artifacts.image).ok_or(RecipeError::Gone)?;
            output::write(&stamp, text.as_bytes())?;
        }
        Ok(artifacts)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, LayoutError> {
    fs::read(path).map_err(|source| LayoutError::Read {
        path: path.to_owned(),
        source,
    })
}

fn loader() -> Result<Vec<u8>, LayoutError> {
    read(Path::new(LOADER))
}

/// The disk with the UKI at `uki`, of this version, and with these extensions. Its seed is made of the content.
pub fn disk_of<'a>(
    uki: &Path,
    version: &str,
    parameters: Option<&[u8]>,
    extensions: impl Iterator<Item = &'a Path>,
    sector_size: SectorSize,
) -> Result<Disk, LayoutError> {
    let loader = loader()?;
    // Of the size of the sectors, too: the GUIDs of two disks must differ.
    let seed = Seed::of(&[
        &loader,
        version.as_bytes(),
        &read(uki)?,
        parameters.unwrap_or_default(),
        &sector_size.bytes().to_le_bytes(),
    ]);
    let boot = Boot {
        loader: loader.into(),
        uki: layout::content(uki)?,
        version: version.to_owned(),
    };
    let extensions = extensions.map(layout::content).collect::<Result<_, _>>()?;
    Ok(layout::disk(
        seed,
        boot,
        parameters,
        extensions,
        sector_size,
    )?)
}

/// Identifies an image: its content, by its seed; the file as the builder left it; and the builder, which may lay out
/// the same content differently after a change. None if there is no such file.
fn stamp_of(disk: &Disk, image: &Path) -> Option<String> {
    let file = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        Some(format!(
            "{} bytes, changed {}.{:09}",
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec()
        ))
    };
    // Valid even if the file that this process was started from has been replaced.
    let builder = file(Path::new("/proc/self/exe"))?;
    let image = file(image)?;
    Some(format!(
        "content {}\nimage {image}\nbuilder {builder}\n",
        hex::encode(disk.seed.0)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small_disk() -> Disk {
        let boot = Boot {
            loader: vec![6; 10_000].into(),
            uki: vec![7; 100_000].into(),
            version: "1".into(),
        };
        let (seed, sector_size) = (Seed::of(&[b"x"]), SectorSize::default());
        layout::disk(seed, boot, Some(b"parameters"), Vec::new(), sector_size).unwrap()
    }

    #[test]
    fn a_stamp_notices_content_and_writers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hearth.img");
        assert_eq!(stamp_of(&small_disk(), &path), None);
        small_disk().write(&path).unwrap();
        let stamp = stamp_of(&small_disk(), &path).unwrap();
        assert_eq!(stamp_of(&small_disk(), &path).as_ref(), Some(&stamp));
        let mut other = small_disk();
        other.seed = Seed::of(&[b"y"]);
        assert_ne!(stamp_of(&other, &path).as_ref(), Some(&stamp));
        let time = fs::metadata(&path).unwrap().modified().unwrap()
            + std::time::Duration::from_nanos(1000);
        fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(time)
            .unwrap();
        assert_ne!(stamp_of(&small_disk(), &path).as_ref(), Some(&stamp));
    }
}
