//! Assembles a disk image in four ways: with ours, genimage, sgdisk with mtools, and as a plain copy of the same bytes.
//!
//! All get the same UKI and parameters and make a disk of the same layout, each in one process tree, so that wall and CPU
//! time can be measured from outside. Ours is run as a program, too (`cargo xtask assemble`): program start counts for
//! all.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use hearth_build::command::Cmd;
use hearth_build::progress::Progress;
use hearth_image::layout::{self, Boot};
use hearth_image::recipe::LOADER;

const MIB: u64 = 1 << 20;

/// About the length of real parameters.
const PARAMETERS: [u8; 300] = [0x5a; 300];

/// One way: assembles the disk.
pub type Way = fn(&Bench, &dyn Progress) -> Result<()>;

/// The ways by their names in records, ours first.
pub const WAYS: [(&str, Way); 4] = [
    ("ours", Bench::ours),
    ("genimage", Bench::genimage),
    ("mtools", Bench::mtools),
    ("copy", Bench::copy),
];

/// The inputs, and the folder of the outputs.
#[derive(Debug)]
pub struct Bench {
    uki: PathBuf,
    version: String,
    folder: tempfile::TempDir,
}

impl Bench {
    /// Prepares the inputs in a scratch folder below `parent`: the UKI of this version, the boot loader, parameters.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn new(parent: &Path, uki: PathBuf, version: &str) -> Result<Bench> {
        let folder = tempfile::tempdir_in(parent).context("cannot create a scratch folder")?;
        let bench = Bench {
            uki,
            version: version.to_owned(),
            folder,
        };
        // genimage puts a folder on the ESP.
        for name in FOLDERS {
            let path = bench.path("root").join(name);
            fs::create_dir_all(&path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        fs::write(bench.path("parameters"), PARAMETERS)?;
        fs::copy(&bench.uki, bench.path("uki"))?;
        fs::copy(LOADER, bench.path("loader")).context("cannot copy the boot loader")?;
        fs::write(bench.path("loader.conf"), layout::LOADER_CONFIGURATION)?;
        fs::write(bench.path("genimage.cfg"), bench.genimage_config())?;
        Ok(bench)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Removes the outputs of the last round.
    ///
    /// # Errors
    /// If that fails.
    pub fn clear(&self) -> Result<()> {
        for name in ["disk.img", "esp.img"] {
            match fs::remove_file(self.path(name)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).context("cannot remove the last round's output");
                }
                _ => {}
            }
        }
        let scratch = self.path("scratch");
        if scratch.exists() {
            fs::remove_dir_all(&scratch)
                .context("cannot remove the last round's scratch folder")?;
        }
        Ok(())
    }

    /// Checks the output of a way: none must win by failing fast, so it must have the UKI's bytes.
    ///
    /// # Errors
    /// If it has not.
    pub fn verify(&self, name: &str, progress: &dyn Progress) -> Result<()> {
        let disk = self.path("disk.img");
        let metadata =
            fs::metadata(&disk).with_context(|| format!("{name} did not write a disk"))?;
        let uki = fs::metadata(&self.uki)?.len();
        ensure!(
            metadata.blocks() * 512 + 4096 >= uki,
            "{name} wrote a disk that is smaller than its UKI"
        );
        if name != "copy" {
            let inside = self.path("inside");
            Cmd::new("mcopy")
                .args(["-n", "-o", "-i"])
                .arg(format!("{}@@1M", disk.display()))
                .arg(format!("::{}", Boot::uki_path(&self.version)))
                .arg(&inside)
                .run(progress)?;
            ensure!(
                fs::read(&inside)? == fs::read(&self.uki)?,
                "{name} corrupted the UKI"
            );
        }
        Ok(())
    }

    fn ours(&self, progress: &dyn Progress) -> Result<()> {
        let program = std::env::current_exe().context("cannot find this program")?;
        Cmd::new(program)
            .arg("assemble")
            .args([
                self.path("uki"),
                self.path("parameters"),
                self.path("disk.img"),
            ])
            .run(progress)?;
        Ok(())
    }

    fn genimage(&self, progress: &dyn Progress) -> Result<()> {
        let mut command = Cmd::new("genimage").env("PATH", path_with_sbin());
        for (option, name) in [
            ("--config", "genimage.cfg"),
            ("--rootpath", "root"),
            ("--tmppath", "scratch"),
            ("--inputpath", ""),
            ("--outputpath", ""),
        ] {
            command = command.arg(option).arg(self.path(name));
        }
        command.run(progress)?;
        Ok(())
    }

    /// Like a script: one program after the other.
    fn mtools(&self, progress: &dyn Progress) -> Result<()> {
        let disk = self.path("disk.img");
        let volume = format!("{}@@1M", disk.display());
        let partitions = partitions();
        let mib: u64 = partitions.iter().map(|(_, _, size)| size / MIB).sum();
        Cmd::new("truncate")
            .args(["--size", &format!("{}M", mib + 2)])
            .arg(&disk)
            .run(progress)?;
        let mut table = Cmd::new("/usr/sbin/sgdisk");
        for (number, (label, type_guid, size)) in (1..).zip(&partitions) {
            table = table
                .args(["--new", &format!("{number}:0:+{}M", size / MIB)])
                .args(["--typecode", &format!("{number}:{type_guid}")])
                .args(["--change-name", &format!("{number}:{label}")]);
        }
        table.arg(&disk).run(progress)?;
        let sectors = (layout::ESP_SIZE / 512).to_string();
        let mtools = |program: &str, more: &[&Path]| {
            Cmd::new(program)
                .args(["-i", &volume])
                .args(more)
                .run(progress)
        };
        Cmd::new("mformat")
            .args(["-i", &volume, "-F", "-c", CLUSTER, "-T", &sectors, "::"])
            .run(progress)?;
        let folders = ["EFI"].into_iter().chain(FOLDERS);
        let folders: Vec<PathBuf> = folders.map(|path| format!("::{path}").into()).collect();
        let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
        mtools("mmd", &folders)?;
        for (from, to) in self.files() {
            mtools("mcopy", &[&self.path(from), Path::new(&format!("::{to}"))])?;
        }
        Ok(())
    }

    fn copy(&self, progress: &dyn Progress) -> Result<()> {
        Cmd::new("cp")
            .args([self.path("uki"), self.path("disk.img")])
            .run(progress)?;
        Ok(())
    }

    /// Files of the ESP: the name in the folder of the benchmark, and the path.
    fn files(&self) -> [(&'static str, String); 4] {
        [
            ("loader", layout::LOADER_PATH.to_owned()),
            ("loader.conf", layout::LOADER_CONFIGURATION_PATH.to_owned()),
            ("uki", Boot::uki_path(&self.version)),
            ("parameters", layout::PARAMETERS.to_owned()),
        ]
    }

    fn genimage_config(&self) -> String {
        let files: String = self
            .files()
            .iter()
            .map(|(from, to)| format!("        file {to} {{ image = \"{from}\" }}\n"))
            .collect();
        let partition = |(label, type_guid, size): &(&str, String, u64)| match *label {
            layout::ESP_LABEL => format!(
                "    partition {label} {{
        image = \"esp.img\"
        offset = 1M
        partition-type-uuid = \"{type_guid}\"
    }}
"
            ),
            _ => format!(
                "    partition {label} {{
        size = {size}
        partition-type-uuid = \"{type_guid}\"
    }}
"
            ),
        };
        let table: String = partitions().iter().map(partition).collect();
        format!(
            "image esp.img {{
    vfat {{
        label = \"{label}\"
        extraargs = \"-F 32 -s {CLUSTER}\"
{files}    }}
    size = {esp}
}}
image disk.img {{
    hdimage {{ partition-table-type = \"gpt\" }}
{table}}}
",
            label = layout::ESP_LABEL,
            esp = layout::ESP_SIZE,
        )
    }
}

/// genimage calls mkdosfs, which an ordinary user's PATH lacks.
fn path_with_sbin() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Sectors in a cluster, as we choose them for this size.
const CLUSTER: &str = "16";
/// Folders on the ESP.
const FOLDERS: [&str; 4] = ["EFI/BOOT", "EFI/Linux", "loader", "hearth"];

/// Label, type and size in bytes of the partitions.
fn partitions() -> [(&'static str, String, u64); 4] {
    let [first, second] = layout::SLOT_LABELS;
    let slot = |label| (label, layout::EXTENSION_TYPE.to_string(), layout::SLOT_SIZE);
    [
        (
            layout::ESP_LABEL,
            layout::ESP_TYPE.to_string(),
            layout::ESP_SIZE,
        ),
        slot(first),
        slot(second),
        (
            layout::DATA_LABEL,
            layout::DATA_TYPE.to_string(),
            layout::DATA_SIZE,
        ),
    ]
}
