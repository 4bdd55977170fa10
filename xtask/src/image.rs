//! `cargo xtask image`: builds the disk image from this checkout.
//!
//! The library `image/` does the work; this module decides on the content: which programs, and how the node is compiled
//! ([`node`]). Each flavour has a folder under `target/hearth/`, and every user of an image calls [`ensure`] each time.

mod extension;
mod format;
mod node;
mod release;
mod signing;

pub(crate) use extension::{Request, of_bundle, sample};

pub(crate) use hearth_image::recipe::Artifacts;
pub(crate) use node::{build_curator_host, build_hearthctl, build_tpm_bench};
pub(crate) use release::{VERSION, revision};

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hearth_build::cache;
use hearth_extension::Extension;
use hearth_firmware::Package;
use hearth_image::recipe;
use hearth_image::recipe::Release;
use hearth_image::sector::SectorSize;

use crate::command::{check_interrupt, find_program};
use crate::kernel::{self, Kernel};
use crate::programs;
use crate::setup::{self, Needs};
use crate::target::folder;
use crate::ui::Ui;
use format::Format;
use signing::Signing;

/// `cargo xtask image`: build the disk image.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Path of the image [default: under target/hearth/]
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Image format
    #[arg(long, value_enum, default_value_t = Format::Raw)]
    format: Format,
    /// Build an image around this program, which becomes /init, with its libraries and nothing else
    #[arg(long, value_name = "PROGRAM", conflicts_with = "debug")]
    init: Option<PathBuf>,
    /// Include the debug service, which gives unauthenticated access to the node's internals
    #[arg(long)]
    debug: bool,
    /// Make a medium that installs the image on a disk of the machine that boots from it: a stick (raw), or a disc (iso)
    #[arg(long, conflicts_with = "init")]
    installer: bool,
    /// Build twice in two folders and compare every byte
    #[arg(long, conflicts_with_all = ["output", "format", "installer"])]
    check: bool,
    /// Put these node parameters (a serialised NodeParameters) on the ESP, or with --installer on the medium
    #[arg(long, value_name = "FILE")]
    parameters: Option<PathBuf>,
    /// Size of the disk's logical sectors in bytes: 4096 for disks that do not emulate small ones
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = sector_size)]
    sector_size: SectorSize,
    /// Add the content of DIR, read-only, mounted at /ext/NAME; "kubernetes" needs no DIR (the bundle of `cargo xtask
    /// bundle`)
    #[arg(long = "extension", value_name = "NAME[=DIR]")]
    extensions: Vec<Request>,
    /// Include the firmware in this package of Debian's non-free-firmware, such as firmware-bnx2x; can be repeated
    #[arg(long = "firmware", value_name = "PACKAGE")]
    firmware: Vec<Package>,
    /// Include the microcode of Debian's packages for Intel's and AMD's processors
    #[arg(long)]
    microcode: bool,
    /// Sign the PCR policy with this private key: PKCS #8 in PEM, ECDSA P-256 or RSA with 2048 bits [default: a key of
    /// your own in the cache folder, made at its first use]
    #[arg(long, value_name = "KEY", conflicts_with = "unsigned")]
    sign: Option<PathBuf>,
    /// Without a signed PCR policy: the image that anyone can rebuild bit for bit
    #[arg(long)]
    unsigned: bool,
    /// Append to the kernel command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    cmdline_extra: String,
}

impl Args {
    /// Whether `run` and the tests boot such images.
    fn is_standard(&self) -> bool {
        self.init.is_none()
            && self.parameters.is_none()
            && self.firmware.is_empty()
            && !self.microcode
            && self.cmdline_extra.is_empty()
            && self.signing() == Signing::Own
            && self.sector_size == SectorSize::default()
    }

    /// Whether the format is one of what is asked for.
    fn check_format(&self) -> Result<()> {
        match (self.installer, self.format) {
            (true, Format::Qcow2 | Format::Vmdk | Format::Vhd) => {
                bail!(
                    "--installer: expected the format raw or iso, got {}",
                    self.format.extension()
                )
            }
            (false, Format::Iso) => {
                bail!(
                    "--format iso: expected --installer: a node does not run from a disc, but can be installed from one"
                )
            }
            _ => Ok(()),
        }
    }

    fn signing(&self) -> Signing {
        match (&self.sign, self.unsigned) {
            (Some(path), _) => Signing::Key(path.clone()),
            (None, true) => Signing::Unsigned,
            (None, false) => Signing::Own,
        }
    }
}

/// Build flavours of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Flavour {
    /// The standard image.
    Release,
    /// With the debug service.
    Debug,
    /// With the debug service and failpoints.
    Test,
}

impl Flavour {
    /// Name of its folder, and value of the os-release field VARIANT_ID unless it is the release.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Flavour::Release => "release",
            Flavour::Debug => "debug",
            Flavour::Test => "test",
        }
    }
}

/// The bootable parts of an image, as the libraries that boot them expect.
pub(crate) fn to_boot(artifacts: &Artifacts) -> hearth_qemu::artifacts::Image {
    hearth_qemu::artifacts::Image {
        disk: artifacts.image.clone(),
        uki: artifacts.uki.clone(),
        measurements: artifacts.measurements.clone(),
        kernel: artifacts.kernel.clone(),
        initramfs: artifacts.initramfs.clone(),
        cmdline: artifacts.cmdline.clone(),
    }
}

/// `cargo xtask assemble`: only the disk, from an existing UKI. For the benchmark.
#[derive(clap::Args, Debug)]
pub(crate) struct AssembleArgs {
    /// The unified kernel image
    uki: PathBuf,
    /// Node parameters
    parameters: PathBuf,
    /// Path of the disk image to write
    output: PathBuf,
}

/// Runs the hidden task.
pub(crate) fn assemble(args: &AssembleArgs) -> Result<()> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let parameters = read(&args.parameters)?;
    let none = std::iter::empty();
    let disk = recipe::disk_of(
        &args.uki,
        VERSION,
        Some(&parameters),
        none,
        SectorSize::B512,
    )?;
    Ok(disk.write(&args.output)?)
}

fn sector_size(text: &str) -> Result<SectorSize, String> {
    let sizes = [SectorSize::B512, SectorSize::B4096];
    let size = sizes
        .into_iter()
        .find(|size| size.bytes().to_string() == text);
    size.ok_or_else(|| "expected 512 or 4096".to_owned())
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    args.check_format()?;
    let flavour = if args.debug {
        Flavour::Debug
    } else {
        Flavour::Release
    };
    let mut recipe = match &args.init {
        Some(program) => ImageSpec::around(ui, program, &[])?,
        None => ImageSpec::of_node(ui, flavour)?,
    };
    let parameters = match &args.parameters {
        Some(path) => {
            Some(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?)
        }
        None => None,
    };
    // The installer copies them to the disk.
    let of_medium = match args.installer {
        true => parameters,
        false => {
            recipe.parts.parameters = parameters;
            None
        }
    };
    recipe.parts.sector_size = args.sector_size;
    recipe.add_firmware(ui, &args.firmware, args.microcode)?;
    recipe.extend(ui, &args.extensions, &args.cmdline_extra)?;
    recipe.sign(&args.signing())?;
    if args.check {
        return check(ui, &recipe);
    }
    if args.format.is_converted() && find_program("qemu-img").is_none() {
        setup::ensure(ui, Needs::RUN)?;
    }
    // Images with other content do not replace those that `run` and the tests boot.
    let folder = match args.is_standard() {
        true => folder(&folder_name(flavour, &args.extensions))?,
        false => folder("custom")?,
    };
    let task = ui.task("building the image");
    let artifacts = recipe.write(ui, &folder)?;
    let image = match (args.format, &args.output) {
        (format, path) if args.installer => {
            let default = || {
                folder
                    .join("hearth-installer")
                    .with_extension(format.extension())
            };
            let path = path.clone().unwrap_or_else(default);
            let medium = recipe.parts.installer(&artifacts, of_medium, &folder)?;
            match format {
                Format::Iso => medium.write_disc(&path)?,
                _ => medium.write_stick(&path)?,
            }
            path
        }
        (Format::Raw, None) => artifacts.image.clone(),
        (Format::Raw, Some(path)) => {
            recipe.parts.disk(&artifacts.uki)?.write(path)?;
            path.clone()
        }
        (format, path) => {
            let default = || folder.join("hearth").with_extension(format.extension());
            let path = path.clone().unwrap_or_else(default);
            let seed = recipe.parts.disk(&artifacts.uki)?.seed;
            format::convert(ui, format, &artifacts.image, seed, &path)?;
            path
        }
    };
    if args.output.is_some() {
        write_measurements(&artifacts, &image)?;
    }
    task.done();
    println!("{}", image.display());
    Ok(())
}

/// Writes what a boot of the image measures beside the file that was asked for.
fn write_measurements(artifacts: &Artifacts, image: &Path) -> Result<()> {
    let measurements = fs::read(&artifacts.measurements)
        .with_context(|| format!("cannot read {}", artifacts.measurements.display()))?;
    let beside = image.with_extension("measurements.json");
    Ok(hearth_image::output::write(&beside, &measurements)?)
}

/// The image of this flavour and its parts, built if they are not up to date.
pub(crate) fn ensure(ui: &Ui, flavour: Flavour) -> Result<Artifacts> {
    ensure_extended(ui, flavour, &[])
}

/// The same with extensions.
pub(crate) fn ensure_extended(
    ui: &Ui,
    flavour: Flavour,
    extensions: &[Request],
) -> Result<Artifacts> {
    let mut recipe = ImageSpec::of_node(ui, flavour)?;
    recipe.extend(ui, extensions, "")?;
    recipe.sign(&Signing::Own)?;
    recipe.write(ui, &folder(&folder_name(flavour, extensions))?)
}

/// The media that install the release image, a stick and a disc.
pub(crate) fn ensure_installer(ui: &Ui) -> Result<[PathBuf; 2]> {
    let mut recipe = ImageSpec::of_node(ui, Flavour::Release)?;
    recipe.extend(ui, &[], "")?;
    recipe.sign(&Signing::Own)?;
    let folder = folder(Flavour::Release.name())?;
    let artifacts = recipe.write(ui, &folder)?;
    let _lock = cache::lock_file(ui, &folder.join("lock"))?;
    let medium = recipe.parts.installer(&artifacts, None, &folder)?;
    let [stick, disc] =
        ["img", "iso"].map(|extension| folder.join("hearth-installer").with_extension(extension));
    medium.write_stick(&stick)?;
    medium.write_disc(&disc)?;
    Ok([stick, disc])
}

/// The folder of an image: each set of extensions has its own, so that they do not replace each other.
fn folder_name(flavour: Flavour, extensions: &[Request]) -> String {
    let mut name = flavour.name().to_owned();
    for extension in extensions {
        name = format!("{name}-{}", extension.name());
    }
    name
}

/// A program of hearth-sys that is an init of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Example {
    name: &'static str,
    what: &'static str,
    profile: node::Profile,
    riders: &'static [BundledProgram],
    /// Whether the sample extension is included.
    sample: bool,
}

/// Tests, as init, what cannot be tested on a host.
pub(crate) const MACHINE_CHECK: Example = Example {
    name: "machine_check",
    what: "the machine check",
    profile: node::Profile::Test,
    riders: &[BundledProgram::MkfsXfs],
    sample: true,
};
/// Does only what etcd needs to serve, for the benchmark.
pub(crate) const BARE_INIT: Example = Example {
    name: "bare_init",
    what: "the bare init",
    profile: node::Profile::Node,
    riders: &[BundledProgram::Etcd, BundledProgram::MkfsXfs],
    sample: false,
};

/// Only transfers bytes, for the benchmark.
pub(crate) const TRAFFIC_INIT: Example = Example {
    name: "traffic_init",
    what: "the traffic init",
    profile: node::Profile::Node,
    riders: &[],
    sample: false,
};

/// The image around an example.
pub(crate) fn ensure_example(ui: &Ui, example: Example) -> Result<Artifacts> {
    setup::ensure(ui, Needs::NODE)?;
    let name = example.name.replace('_', "-");
    let program = node::build_example(ui, example, &folder(&name)?.join("init"))?;
    let mut recipe = ImageSpec::around(ui, &program, example.riders)?;
    if example.sample {
        recipe.extend(ui, &[sample()?], "")?;
    }
    recipe.sign(&Signing::Own)?;
    recipe.write(ui, &folder(&name)?)
}

/// A program of others that is included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BundledProgram {
    /// The store of a cluster, compiled.
    Etcd,
    /// Formats the data partition; Debian's.
    MkfsXfs,
}

impl BundledProgram {
    /// Where it is on this machine, and its path in the image.
    fn find(self, ui: &Ui) -> Result<(PathBuf, String)> {
        match self {
            BundledProgram::Etcd => Ok((programs::etcd(ui)?, "/usr/bin/etcd".to_owned())),
            BundledProgram::MkfsXfs => {
                let program = find_program("mkfs.xfs");
                let program = program.context("mkfs.xfs is neither in PATH nor in /usr/sbin")?;
                Ok((program, "/sbin/mkfs.xfs".to_owned()))
            }
        }
    }
}

fn find_all(ui: &Ui, programs: &[BundledProgram]) -> Result<Vec<(PathBuf, String)>> {
    programs.iter().map(|program| program.find(ui)).collect()
}

/// The specification of an image.
struct ImageSpec {
    parts: recipe::ImageSpec,
    extensions: Vec<Extension>,
}

impl ImageSpec {
    /// The node, compiled from this checkout, with the included programs.
    fn of_node(ui: &Ui, flavour: Flavour) -> Result<ImageSpec> {
        setup::ensure(ui, Needs::NODE | Needs::KERNEL | Needs::IMAGE)?;
        let kernel = kernel::ensure(ui)?;
        let init = node::build(ui, flavour, &folder(flavour.name())?.join("init"))?;
        let programs = find_all(ui, &[BundledProgram::Etcd, BundledProgram::MkfsXfs])?;
        let release = release::of_node(ui, flavour, &kernel, &programs)?;
        ImageSpec::new(kernel, init, programs, release)
    }

    /// Any program as init.
    fn around(ui: &Ui, program: &Path, with: &[BundledProgram]) -> Result<ImageSpec> {
        setup::ensure(ui, Needs::KERNEL | Needs::IMAGE)?;
        let kernel = kernel::ensure(ui)?;
        let release = release::around(program, &kernel);
        ImageSpec::new(kernel, program.to_owned(), find_all(ui, with)?, release)
    }

    fn new(
        kernel: Kernel,
        init: PathBuf,
        programs: Vec<(PathBuf, String)>,
        release: Release,
    ) -> Result<ImageSpec> {
        Ok(ImageSpec {
            parts: recipe::ImageSpec::new(kernel.bzimage, init, programs, release)?,
            extensions: Vec::new(),
        })
    }

    /// Adds extensions, and appends to the command line.
    fn extend(&mut self, ui: &Ui, requests: &[Request], words: &str) -> Result<()> {
        for request in requests {
            let extension = request.ensure(ui)?;
            let name = &extension.admitted.name;
            if self.extensions.iter().any(|e| e.admitted.name == *name) {
                bail!("duplicate --extension {name}");
            }
            self.extensions.push(extension);
        }
        Ok(self
            .parts
            .extend(Extension::parts(&self.extensions)?, words)?)
    }

    /// Signs the PCR policy.
    fn sign(&mut self, signing: &Signing) -> Result<()> {
        if let Some(key) = signing.key()? {
            self.parts.sign(key);
        }
        Ok(())
    }

    /// Adds firmware and microcode, as asked for, and says which versions.
    fn add_firmware(&mut self, ui: &Ui, packages: &[Package], microcode: bool) -> Result<()> {
        let mut found = Vec::new();
        if !packages.is_empty() {
            let firmware = hearth_firmware::firmware(ui, packages)?;
            self.parts.add_firmware(firmware.files);
            found.extend(firmware.packages);
        }
        if microcode {
            let microcode = hearth_firmware::microcode(ui)?;
            self.parts.set_microcode(microcode.files);
            found.extend(microcode.packages);
        }
        if !found.is_empty() {
            ui.say(format_args!("with {}", found.join(", ")));
        }
        Ok(())
    }

    /// Writes all outputs that are not up to date into `folder`.
    fn write(&self, ui: &Ui, folder: &Path) -> Result<Artifacts> {
        let _lock = cache::lock_file(ui, &folder.join("lock"))?;
        let assembled = self.parts.assemble()?;
        check_interrupt()?;
        Ok(self.parts.write(assembled, folder)?)
    }
}

/// Builds everything except the node's binary twice, in two folders, and compares.
fn check(ui: &Ui, recipe: &ImageSpec) -> Result<()> {
    let parent = folder("check")?;
    let mut prints: Vec<BTreeMap<&str, String>> = Vec::new();
    let task = ui.task("building twice");
    for name in ["first", "another one, elsewhere"] {
        let scratch = tempfile::tempdir_in(&parent).context("cannot create a folder")?;
        let folder = scratch.path().join(name);
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let artifacts = recipe.write(ui, &folder)?;
        let parts = [
            ("initramfs", &artifacts.initramfs),
            ("UKI", &artifacts.uki),
            ("measurements", &artifacts.measurements),
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
        // Compares the cached build with a new one.
        let name = &extension.admitted.name;
        let scratch = tempfile::tempdir_in(&parent).context("cannot create a folder")?;
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
    ui.say("reproducible: two builds from the same programs, in two folders, are identical");
    Ok(())
}

fn sha256(path: &Path) -> Result<String> {
    let context = || format!("cannot read {}", path.display());
    let mut file = fs::File::open(path).with_context(context)?;
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    let mut block = vec![0; 1 << 20];
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
    use hearth_api::extension::ExtensionName;
    use hearth_api::names;
    use hearth_image::{installer, layout};

    /// The two crates do not depend on each other.
    #[test]
    fn the_image_and_the_node_agree_on_the_disk() {
        let types = [
            (layout::ESP_TYPE, names::ESP_TYPE),
            (layout::DATA_TYPE, names::DATA_TYPE),
            (layout::EXTENSION_TYPE, names::EXTENSION_TYPE),
        ];
        for (ours, nodes) in types {
            assert_eq!(ours.to_string(), nodes);
        }
        assert_eq!(layout::ESP_LABEL, names::ESP_LABEL);
        assert_eq!(layout::DATA_LABEL, names::DATA_LABEL);
        assert_eq!(layout::SLOT_LABELS, names::disk::SLOT_LABELS);
        assert_eq!(layout::SLOT_BLOCK, names::disk::SLOT_BLOCK);
        assert_eq!(layout::PARAMETERS, names::ESP_PARAMETERS);
        assert_eq!(layout::STATE_FILES, names::disk::ESP_STATE_FILES);
        assert_eq!(installer::LABEL, names::installer::LABEL);
        assert_eq!(installer::PAYLOAD, names::installer::PAYLOAD);
        assert_eq!(installer::KERNEL_WORD, names::installer::KERNEL_WORD);
        let name: ExtensionName = names::EXTENSION_KUBERNETES.parse().unwrap();
        let mounted = format!("{}/{}", names::EXTENSIONS, name.as_str());
        assert_eq!(hearth_bundle::MOUNTED_AT, mounted);
    }
}
