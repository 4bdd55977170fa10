//! Image assembly benchmark: ours compared with genimage, sgdisk with mtools, and a plain copy of the same bytes.
//!
//! All get the same UKI and parameters and make a disk of the same layout, each in one process tree whose wall and CPU
//! time are measured from outside; ours is run as a program, too (`cargo xtask assemble`), so that program start counts
//! for all.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hearth_image::layout::{self, Boot};
use hearth_image::recipe::LOADER;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use super::{Records, ratio};
use crate::command::Cmd;
use crate::image::{self, Artifacts};
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::Ui;

const MIB: u64 = 1 << 20;

/// About the length of real parameters.
const PARAMETERS: [u8; 300] = [0x5a; 300];

/// Wall and CPU seconds of each round of one method.
#[derive(Default)]
struct Samples {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

/// Measures `rounds` rounds; None: the default number.
pub(super) fn measure(
    ui: &Ui,
    node: &Artifacts,
    rounds: Option<u32>,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::BENCH)?;
    let rounds = rounds.unwrap_or(7);
    let bench = Bench::new(ui, node.uki.clone())?;
    let task = ui.counted_task("measuring image assembly", u64::from(rounds) + 1);
    let ways: [(&str, Way); 4] = [
        ("ours", Bench::ours),
        ("genimage", Bench::genimage),
        ("mtools", Bench::mtools),
        ("copy", Bench::copy),
    ];
    let mut samples: [Samples; 4] = Default::default();
    // The first round warms the caches and is not counted.
    for round in 0..=rounds {
        for ((name, way), samples) in ways.iter().zip(&mut samples) {
            task.now(*name);
            bench.clear()?;
            let (wall, cpu) = timed(|| way(&bench))?;
            bench.verify(name)?;
            if round > 0 {
                samples.wall.push(wall);
                samples.cpu.push(cpu);
            }
        }
        task.step();
    }
    task.done();
    let [ours, others @ ..] = &samples;
    records.add("image.wall", "s", &ours.wall);
    records.add("image.cpu", "s", &ours.cpu);
    for ((name, _), theirs) in ways[1..].iter().zip(others) {
        records.add(format!("image.wall_{name}"), "s", &theirs.wall);
        records.add(format!("image.cpu_{name}"), "s", &theirs.cpu);
        records.add(
            format!("image.wall_ratio_{name}"),
            "ratio",
            &ratio(&ours.wall, &theirs.wall),
        );
        records.add(
            format!("image.cpu_ratio_{name}"),
            "ratio",
            &ratio(&ours.cpu, &theirs.cpu),
        );
    }
    Ok(())
}

type Way = fn(&Bench) -> Result<()>;

/// Wall and CPU seconds of the processes that `work` runs. The CPU time is that of children that have ended; no others
/// are running.
fn timed(work: impl FnOnce() -> Result<()>) -> Result<(f64, f64)> {
    let cpu = || -> Result<f64> {
        let usage =
            getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot read the children's CPU time")?;
        let total = usage.user_time() + usage.system_time();
        Ok(total.num_microseconds() as f64 / 1e6)
    };
    let (before, started) = (cpu()?, Instant::now());
    work()?;
    Ok((started.elapsed().as_secs_f64(), cpu()? - before))
}

struct Bench {
    ui: Ui,
    uki: PathBuf,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(ui: &Ui, uki: PathBuf) -> Result<Bench> {
        let folder =
            tempfile::tempdir_in(target::folder("")?).context("cannot create a scratch folder")?;
        let bench = Bench {
            ui: ui.clone(),
            uki,
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
        fs::write(bench.path("genimage.cfg"), genimage_config())?;
        Ok(bench)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn clear(&self) -> Result<()> {
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

    /// A method must not win by failing fast: its output must have the UKI's bytes.
    fn verify(&self, name: &str) -> Result<()> {
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
                .arg(format!("::{}", Boot::uki_path(image::VERSION)))
                .arg(&inside)
                .run(&self.ui)?;
            ensure!(
                fs::read(&inside)? == fs::read(&self.uki)?,
                "{name} corrupted the UKI"
            );
        }
        Ok(())
    }

    fn ours(&self) -> Result<()> {
        let program = std::env::current_exe().context("cannot find this program")?;
        Cmd::new(program)
            .arg("assemble")
            .args([
                self.path("uki"),
                self.path("parameters"),
                self.path("disk.img"),
            ])
            .run(&self.ui)?;
        Ok(())
    }

    fn genimage(&self) -> Result<()> {
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
        command.run(&self.ui)?;
        Ok(())
    }

    /// Like a script: one program after the other.
    fn mtools(&self) -> Result<()> {
        let disk = self.path("disk.img");
        let volume = format!("{}@@1M", disk.display());
        let partitions = partitions();
        let mib: u64 = partitions.iter().map(|(_, _, size)| size / MIB).sum();
        Cmd::new("truncate")
            .args(["--size", &format!("{}M", mib + 2)])
            .arg(&disk)
            .run(&self.ui)?;
        let mut table = Cmd::new("/usr/sbin/sgdisk");
        for (number, (label, type_guid, size)) in (1..).zip(&partitions) {
            table = table
                .args(["--new", &format!("{number}:0:+{}M", size / MIB)])
                .args(["--typecode", &format!("{number}:{type_guid}")])
                .args(["--change-name", &format!("{number}:{label}")]);
        }
        table.arg(&disk).run(&self.ui)?;
        let sectors = (layout::ESP_SIZE / 512).to_string();
        let mtools = |program: &str, more: &[&Path]| {
            Cmd::new(program)
                .args(["-i", &volume])
                .args(more)
                .run(&self.ui)
        };
        Cmd::new("mformat")
            .args(["-i", &volume, "-F", "-c", CLUSTER, "-T", &sectors, "::"])
            .run(&self.ui)?;
        let folders = ["EFI"].into_iter().chain(FOLDERS);
        let folders: Vec<PathBuf> = folders.map(|path| format!("::{path}").into()).collect();
        let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
        mtools("mmd", &folders)?;
        for (from, to) in files() {
            mtools("mcopy", &[&self.path(from), Path::new(&format!("::{to}"))])?;
        }
        Ok(())
    }

    fn copy(&self) -> Result<()> {
        Cmd::new("cp")
            .args([self.path("uki"), self.path("disk.img")])
            .run(&self.ui)?;
        Ok(())
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

/// Files of the ESP: the name in the folder of the benchmark, and the path.
fn files() -> [(&'static str, String); 4] {
    [
        ("loader", layout::LOADER_PATH.to_owned()),
        ("loader.conf", layout::LOADER_CONFIGURATION_PATH.to_owned()),
        ("uki", Boot::uki_path(image::VERSION)),
        ("parameters", layout::PARAMETERS.to_owned()),
    ]
}

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

fn genimage_config() -> String {
    let files: String = files()
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
