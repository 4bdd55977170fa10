//! `cargo xtask image`: the disk image, from this checkout.
//!
//! The work is done in the library `image/`; here stands what Hearth puts in: which programs, names, sizes and types, and
//! how the node is compiled ([`node`]). Each flavour has a folder under `target/hearth/`, and whoever needs an image asks
//! [`ensure`] for it each time. The initramfs and the UKI are made anew on every call, which takes less than finding
//! out by hashes of all inputs whether it is needed; an output whose content would be the same is left alone, so that it
//! keeps its time of change. The disk image carries a stamp of its content beside it, with its length and time of change:
//! one that something has written to since is not taken for ours.
//!
//! Outputs are replaced by rename, never written in place: a file that someone has open or has linked stays as it was.

mod extension;
mod node;
mod os_release;

pub use extension::{Request, sample};

use extension::Extension;
pub use node::build_curator_host;
pub use os_release::revision;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hearth_api::names;
use hearth_image::content::Content;
use hearth_image::disk::{Disk, Partition, PartitionContent, Seed};
use hearth_image::output::{self, Output};
use hearth_image::uki::CommandLine;
use hearth_image::{Assembled, System, Uuid, esp_partition};

use crate::cache;
use crate::command::{Cmd, check_interrupt, find_program};
use crate::kernel::{self, Kernel};
use crate::setup::{self, Needs};
use crate::target::folder;
use crate::ui::Ui;

const MIB: u64 = 1 << 20;
/// Two UKIs and room to grow. Small enough for 1-KiB clusters.
pub const ESP_SIZE: u64 = 128 * MIB;
/// What mkfs.xfs wants at least, and etcd's first files. The node grows it to the disk's end at the first boot.
pub const DATA_SIZE: u64 = 512 * MIB;
/// systemd's EFI stub, as Debian installs it.
const STUB: &str = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";

/// The kernel's command line:
/// - `console=ttyS0`: what a node has to say goes to the serial line; it has no screen.
/// - `clocksource=hpet`: on an emulated or loaded host the TSC is miscalibrated, and clocks run at a wrong speed. Who boots
///   the kernel directly may know better, and says so behind it.
/// - `random.trust_cpu=on`: without it a machine that has no virtio-rng waits for entropy for ever.
/// - `panic=-1`: a panic reboots at once.
/// - `gpt`: a damaged primary partition table is no reason not to read the backup.
/// - `quiet`: the serial line is slow, and boot waits for it.
const COMMAND_LINE: &str = "console=ttyS0 clocksource=hpet random.trust_cpu=on panic=-1 gpt quiet";

/// `cargo xtask image`: build the disk image.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Where to put the image [default: under target/hearth/]
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Form of the image
    #[arg(long, value_enum, default_value_t = Format::Raw)]
    format: Format,
    /// Build the image around this program: it becomes /init, with its libraries and nothing else
    #[arg(long, value_name = "PROGRAM", conflicts_with = "debug")]
    init: Option<PathBuf>,
    /// With the debug service, which lets anyone who reaches the node look into it
    #[arg(long)]
    debug: bool,
    /// Build twice in two folders and compare every byte
    #[arg(long, conflicts_with_all = ["output", "format"])]
    check: bool,
    /// Node parameters to put on the ESP (serialised NodeParameters)
    #[arg(long, value_name = "FILE")]
    parameters: Option<PathBuf>,
    /// A read-only partition that rides along, mounted at /ext/NAME: the content of DIR, or what NAME stands for
    /// ("kubernetes": the bundle of `cargo xtask kubernetes`)
    #[arg(long = "extension", value_name = "NAME[=DIR]")]
    extensions: Vec<Request>,
    /// More words for the kernel's command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    cmdline_extra: String,
}

/// Forms of an image.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes, in a sparse file
    Raw,
    /// QEMU's own
    Qcow2,
}

/// Builds of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flavour {
    /// For users.
    Release,
    /// With the debug service.
    Debug,
    /// With the debug service and failpoints.
    Test,
}

impl Flavour {
    /// Its folder's name, and the os-release field VARIANT_ID where it is not the release.
    pub fn name(self) -> &'static str {
        match self {
            Flavour::Release => "release",
            Flavour::Debug => "debug",
            Flavour::Test => "test",
        }
    }
}

/// A built image and what it was built from.
#[derive(Debug, Clone)]
pub struct Artifacts {
    /// The disk, raw and sparse. Not to be written to: boot a copy, or an overlay on a hard link of it.
    pub image: PathBuf,
    /// The unified kernel image.
    pub uki: PathBuf,
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

/// `cargo xtask assemble`: only the disk, of a UKI that is there. For the benchmark.
#[derive(clap::Args, Debug)]
pub struct AssembleArgs {
    /// The unified kernel image
    uki: PathBuf,
    /// Node parameters
    parameters: PathBuf,
    /// The disk image to write
    output: PathBuf,
}

/// Runs the hidden task.
pub fn assemble(args: &AssembleArgs) -> Result<()> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let parameters = read(&args.parameters)?;
    disk_of(&args.uki, Some(&parameters), &[])?.write(&args.output)?;
    Ok(())
}

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let flavour = if args.debug {
        Flavour::Debug
    } else {
        Flavour::Release
    };
    let mut recipe = match &args.init {
        Some(program) => Recipe::around(ui, program, &[])?,
        None => Recipe::of_node(ui, flavour)?,
    };
    if let Some(path) = &args.parameters {
        recipe.parameters =
            Some(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    recipe.extend(ui, &args.extensions, &args.cmdline_extra)?;
    if args.check {
        return check(ui, &recipe);
    }
    if args.format == Format::Qcow2 && find_program("qemu-img").is_none() {
        setup::ensure(ui, Needs::RUN)?;
    }
    // What `run` and the tests boot is left alone by an image of one's own.
    let standard =
        args.init.is_none() && args.parameters.is_none() && args.cmdline_extra.is_empty();
    let folder = match standard {
        true => folder(&folder_name(flavour, &args.extensions))?,
        false => folder("custom")?,
    };
    let task = ui.task("building the image");
    let artifacts = recipe.write(ui, &folder)?;
    let image = match (args.format, &args.output) {
        (Format::Raw, None) => artifacts.image,
        (Format::Raw, Some(path)) => {
            recipe.disk(&artifacts.uki)?.write(path)?;
            path.clone()
        }
        (Format::Qcow2, path) => {
            let path = path.clone().unwrap_or_else(|| folder.join("hearth.qcow2"));
            qcow2(ui, &artifacts.image, &path)?;
            path
        }
    };
    task.done();
    println!("{}", image.display());
    Ok(())
}

/// The image of this flavour and its parts, built where they are not up to date.
pub fn ensure(ui: &Ui, flavour: Flavour) -> Result<Artifacts> {
    ensure_extended(ui, flavour, &[])
}

/// The same with extensions.
pub fn ensure_extended(ui: &Ui, flavour: Flavour, extensions: &[Request]) -> Result<Artifacts> {
    let mut recipe = Recipe::of_node(ui, flavour)?;
    recipe.extend(ui, extensions, "")?;
    recipe.write(ui, &folder(&folder_name(flavour, extensions))?)
}

/// The folder of an image: each set of extensions has its own, so that none replaces another.
fn folder_name(flavour: Flavour, extensions: &[Request]) -> String {
    let mut name = flavour.name().to_owned();
    for extension in extensions {
        name = format!("{name}-{}", extension.name());
    }
    name
}

/// A program of hearth-sys's that is an init of its own.
#[derive(Clone, Copy, Debug)]
pub struct Example {
    name: &'static str,
    what: &'static str,
    profile: node::Profile,
    riders: &'static [Rider],
    /// Whether the sample extension rides along.
    sample: bool,
}

/// Tries, as init, what cannot be tried on a host.
pub const MACHINE_CHECK: Example = Example {
    name: "machine_check",
    what: "the machine check",
    profile: node::Profile::Test,
    riders: &[MKFS],
    sample: true,
};
/// Does no more than it must to have etcd serve, for the benchmark.
pub const BARE_INIT: Example = Example {
    name: "bare_init",
    what: "the bare init",
    profile: node::Profile::Node,
    riders: &[ETCD, MKFS],
    sample: false,
};

/// The image around an example.
pub fn ensure_example(ui: &Ui, example: Example) -> Result<Artifacts> {
    setup::ensure(ui, Needs::NODE)?;
    let name = example.name.replace('_', "-");
    let program = node::build_example(ui, example, &folder(&name)?.join("init"))?;
    let mut recipe = Recipe::around(ui, &program, example.riders)?;
    if example.sample {
        recipe.extend(ui, &[sample()?], "")?;
    }
    recipe.write(ui, &folder(&name)?)
}

/// A program of Debian's that rides along: its name, and its path in the image.
pub type Rider = (&'static str, &'static str);

/// The store of the consensus.
pub const ETCD: Rider = ("etcd", "/usr/bin/etcd");
/// Formats the data partition.
pub const MKFS: Rider = ("mkfs.xfs", "/sbin/mkfs.xfs");

fn find_riders(riders: &[Rider]) -> Result<Vec<(PathBuf, String)>> {
    let find = |(name, target): &Rider| {
        let source = find_program(name)
            .with_context(|| format!("{name} is neither in PATH nor in /usr/sbin"))?;
        Ok((source, (*target).to_owned()))
    };
    riders.iter().map(find).collect()
}

/// What goes into an image.
struct Recipe {
    system: System,
    parameters: Option<Vec<u8>>,
    extensions: Vec<Extension>,
}

impl Recipe {
    /// The node, compiled from this checkout, with what rides along.
    fn of_node(ui: &Ui, flavour: Flavour) -> Result<Recipe> {
        setup::ensure(ui, Needs::NODE | Needs::KERNEL | Needs::IMAGE)?;
        let kernel = kernel::ensure(ui)?;
        let init = node::build(ui, flavour, &folder(flavour.name())?.join("init"))?;
        let programs = find_riders(&[ETCD, MKFS])?;
        let os_release = os_release::of_node(ui, flavour, &kernel, &programs)?;
        Recipe::new(kernel, init, programs, os_release)
    }

    /// Any program as init.
    fn around(ui: &Ui, program: &Path, with: &[Rider]) -> Result<Recipe> {
        setup::ensure(ui, Needs::KERNEL | Needs::IMAGE)?;
        let kernel = kernel::ensure(ui)?;
        let os_release = os_release::around(program, &kernel);
        Recipe::new(kernel, program.to_owned(), find_riders(with)?, os_release)
    }

    fn new(
        kernel: Kernel,
        init: PathBuf,
        programs: Vec<(PathBuf, String)>,
        os_release: String,
    ) -> Result<Recipe> {
        Ok(Recipe {
            system: System {
                kernel: kernel.bzimage,
                stub: STUB.into(),
                init,
                programs,
                files: BTreeMap::new(),
                command_line: CommandLine::parse(COMMAND_LINE)?,
                os_release,
            },
            parameters: None,
            extensions: Vec::new(),
        })
    }

    /// Takes extensions along, and more words of the command line.
    fn extend(&mut self, ui: &Ui, extensions: &[Request], words: &str) -> Result<()> {
        let mut line = COMMAND_LINE.to_owned();
        for request in extensions {
            let extension = request.ensure(ui)?;
            let name = &extension.admitted.name;
            if self.extensions.iter().any(|e| e.admitted.name == *name) {
                bail!("--extension {name} is given twice");
            }
            line = format!("{line} {}", extension.admitted);
            self.extensions.push(extension);
        }
        self.system.command_line = CommandLine::parse(&format!("{line} {words}"))?;
        Ok(())
    }

    fn disk(&self, uki: &Path) -> Result<Disk> {
        disk_of(uki, self.parameters.as_deref(), &self.extensions)
    }

    /// Writes all outputs that are not up to date into `folder`.
    fn write(&self, ui: &Ui, folder: &Path) -> Result<Artifacts> {
        let _lock = cache::lock_file(ui, &folder.join("lock"))?;
        let Assembled {
            initramfs,
            uki,
            contents,
            ..
        } = self.system.assemble()?;
        check_interrupt()?;
        let artifacts = Artifacts {
            image: folder.join("hearth.img"),
            uki: folder.join("hearth.efi"),
            kernel: self.system.kernel.clone(),
            initramfs: folder.join("initramfs.zst"),
            cmdline: self.system.command_line.as_str().to_owned(),
            init: self.system.init.clone(),
            contents,
            extensions: self.extensions.iter().map(|e| e.file.clone()).collect(),
        };
        write_if_changed(&artifacts.initramfs, &initramfs)?;
        write_if_changed(&artifacts.uki, &uki)?;
        let disk = self.disk(&artifacts.uki)?;
        let stamp = folder.join("hearth.img.stamp");
        let current = stamp_of(&disk, &artifacts.image);
        if current.is_none() || current != fs::read_to_string(&stamp).ok() {
            disk.write(&artifacts.image)?;
            let text = stamp_of(&disk, &artifacts.image).context("the new image is gone")?;
            output::write(&stamp, text.as_bytes())?;
        }
        Ok(artifacts)
    }
}

/// The disk with the UKI at `uki`; its seed is made of the content, of which the extensions' hashes are in the UKI.
fn disk_of(uki: &Path, parameters: Option<&[u8]>, extensions: &[Extension]) -> Result<Disk> {
    let bytes = fs::read(uki).with_context(|| format!("cannot read {}", uki.display()))?;
    let content = Content::of_file(uki).with_context(|| format!("cannot use {}", uki.display()))?;
    disk(
        Seed::of(&[&bytes, parameters.unwrap_or_default()]),
        content,
        parameters,
        extensions,
    )
}

/// Hearth's disk. The data partition comes last, since the node lets it grow.
fn disk(
    seed: Seed,
    uki: Content,
    parameters: Option<&[u8]>,
    extensions: &[Extension],
) -> Result<Disk> {
    let files = parameters.map(|bytes| {
        (
            names::ESP_PARAMETERS.to_owned(),
            Content::Bytes(bytes.to_vec()),
        )
    });
    let esp = Uuid::parse_str(names::ESP_TYPE).context("the ESP's type")?;
    let data = Uuid::parse_str(names::DATA_TYPE).context("the data partition's type")?;
    let files = files.into_iter().collect();
    let mut partitions = vec![esp_partition(names::ESP_LABEL, esp, ESP_SIZE, uki, files)?];
    for extension in extensions {
        partitions.push(extension.partition()?);
    }
    partitions.push(Partition {
        label: names::DATA_LABEL.to_owned(),
        type_guid: data,
        size: DATA_SIZE,
        content: PartitionContent::Blank,
    });
    Ok(Disk { seed, partitions })
}

/// What identifies an image: its content, by the seed made of it; the file as the builder left it; and the builder,
/// which may lay out the same content in another way after a change. None where there is no such file.
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
    // Also when the file that this process was started from has been replaced since.
    let builder = file(Path::new("/proc/self/exe"))?;
    let image = file(image)?;
    Some(format!(
        "content {}\nimage {image}\nbuilder {builder}\n",
        hex::encode(disk.seed.0)
    ))
}

fn write_if_changed(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    Ok(output::write(path, bytes)?)
}

/// Converts a raw image; the new one appears when it is whole.
fn qcow2(ui: &Ui, raw: &Path, destination: &Path) -> Result<()> {
    let output = Output::create(destination)?;
    Cmd::new("qemu-img")
        // In the order of the disk, as it is without -W: anything else depends on the weather.
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(raw)
        .arg(output.reachable_path())
        .run(ui)?;
    Ok(output.publish()?)
}

/// Builds twice, in two folders, everything but the node's binary, and compares.
fn check(ui: &Ui, recipe: &Recipe) -> Result<()> {
    let parent = folder("check")?;
    let mut prints: Vec<BTreeMap<&str, String>> = Vec::new();
    let task = ui.task("building twice");
    for name in ["first", "another one, elsewhere"] {
        let scratch = tempfile::tempdir_in(&parent).context("cannot make a folder")?;
        let folder = scratch.path().join(name);
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let artifacts = recipe.write(ui, &folder)?;
        let parts = [
            ("initramfs", &artifacts.initramfs),
            ("UKI", &artifacts.uki),
            ("image", &artifacts.image),
        ];
        let mut sums = BTreeMap::new();
        for (part, path) in parts {
            sums.insert(part, sha256(path)?);
        }
        prints.push(sums);
    }
    task.done();
    for extension in &recipe.extensions {
        // What was built before, by the cache, beside what is built now.
        let name = &extension.admitted.name;
        let scratch = tempfile::tempdir_in(&parent).context("cannot make a folder")?;
        let again = extension.again(ui, scratch.path())?;
        if again.admitted != extension.admitted || sha256(&again.file)? != sha256(&extension.file)?
        {
            bail!(
                "the extension {name} is not reproducible: {} differs",
                extension.file.display()
            );
        }
        println!("{}  extension {name}", sha256(&extension.file)?);
    }
    for (part, sum) in &prints[0] {
        if prints[1].get(part) != Some(sum) {
            bail!(
                "the {part} is not reproducible: {sum}, then {}",
                prints[1][part]
            );
        }
        println!("{sum}  {part}");
    }
    ui.say("built twice from the same programs, in two folders: all bytes are the same");
    Ok(())
}

fn sha256(path: &Path) -> Result<String> {
    let context = || format!("cannot read {}", path.display());
    let mut file = fs::File::open(path).with_context(context)?;
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    let mut block = vec![0; MIB as usize];
    loop {
        check_interrupt()?;
        match std::io::Read::read(&mut file, &mut block).with_context(context)? {
            0 => return Ok(hex::encode(hash.finish())),
            length => hash.update(&block[..length]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small_disk() -> Disk {
        disk(
            Seed::of(&[b"x"]),
            Content::Bytes(vec![7; 100_000]),
            Some(b"parameters"),
            &[],
        )
        .unwrap()
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

    #[test]
    fn qcow2_holds_the_same_disk_each_time() {
        let ui = Ui::new(false);
        let folder = tempfile::tempdir().unwrap();
        let raw = folder.path().join("raw");
        small_disk().write(&raw).unwrap();
        let [first, second] = ["1.qcow2", "2.qcow2"].map(|name| folder.path().join(name));
        qcow2(&ui, &raw, &first).unwrap();
        qcow2(&ui, &raw, &second).unwrap();
        assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());
        Cmd::new("qemu-img")
            .args(["compare", "-f", "raw", "-F", "qcow2"])
            .arg(&raw)
            .arg(&first)
            .run(&ui)
            .unwrap();
        assert!(
            qcow2(
                &ui,
                &folder.path().join("absent"),
                &folder.path().join("3.qcow2")
            )
            .is_err()
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn an_unchanged_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_if_changed(&path, b"one").unwrap();
        let inode = |path| fs::metadata(path).unwrap().ino();
        let first = inode(&path);
        write_if_changed(&path, b"one").unwrap();
        assert_eq!(inode(&path), first);
        write_if_changed(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }
}
