//! Images on files and on block devices: `hearthctl image write` and `set-parameters`.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::process::Output;

use hearth_api::fixture;
use hearth_image::content::Content;
use hearth_image::disk::Seed;
use hearth_image::installer::Medium;
use hearth_image::layout::{self, Boot};
use hearth_image::sector::SectorSize;
use rustix::fs::{OFlags, SeekFrom, seek};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::*;

const MIB: u64 = 1 << 20;
const BOOTSTRAP: &[u8] = fixture!("parameters-bootstrap-recovery.pb");
const REGISTER: &[u8] = fixture!("parameters-register.pb");

impl Fixture {
    /// An image as the builder makes it, without the programs.
    fn image(&self, parameters: Option<&[u8]>, sector_size: SectorSize) -> PathBuf {
        let content = |byte| Content::Bytes(vec![byte; 3 << 20]);
        let boot = Boot {
            loader: content(1),
            uki: content(2),
            version: "1.2.3".to_owned(),
        };
        let extensions = vec![content(3)];
        let disk = layout::disk(Seed([7; 32]), boot, parameters, extensions, sector_size);
        let path = self.path("hearth.img");
        let disk = disk.expect("a disk");
        disk.write(&path).expect("an image");
        path
    }

    fn parameters(&self, content: &[u8]) -> PathBuf {
        let path = self.path("parameters.pb");
        fs::write(&path, content).expect("written");
        path
    }

    /// Runs a command that has to fail; its exit code and standard error.
    async fn refused(&self, args: &[&str]) -> (i32, String) {
        let Output { status, stderr, .. } = self.run(args).await;
        let text = String::from_utf8(stderr).expect("text");
        (status.code().expect("an exit code"), text)
    }

    /// Runs a command at a terminal at which this is typed; its exit code and standard error.
    async fn at_terminal(&self, args: &[&str], typed: &str) -> (i32, String) {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&terminal).expect("granted");
        unlockpt(&terminal).expect("unlocked");
        let name = ptsname(&terminal, Vec::new()).expect("a name");
        let path = Path::new(name.to_str().expect("text"));
        let input = File::options().read(true).write(true).open(path);
        let input = OwnedFd::from(input.expect("the other end"));
        let mut keyboard = File::from(terminal);
        keyboard.write_all(typed.as_bytes()).expect("typed");
        let mut command = self.command(args);
        command.stdin(Stdio::from(input));
        let Output { status, stderr, .. } = command.output().await.expect("it runs");
        let text = String::from_utf8(stderr).expect("text");
        (status.code().expect("an exit code"), text)
    }
}

/// Runs a program of the system; its output.
fn tool(program: &str, args: &[&str]) -> Vec<u8> {
    let output = std::process::Command::new(program)
        .args(args)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .unwrap_or_else(|error| panic!("this test needs {program} (`cargo xtask setup`): {error}"));
    let Output {
        status,
        stdout,
        stderr,
    } = output;
    let why = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{program} {args:?}: {why}");
    stdout
}

/// The parameters on a disk, as mtools read them.
fn on_disk(disk: &Path) -> Vec<u8> {
    let esp = format!("{}@@{MIB}", text(disk));
    tool("mtype", &["-i", &esp, "::hearth/parameters.pb"])
}

/// The EFI system partition has no faults.
fn fsck(disk: &Path) {
    let esp = tempfile::NamedTempFile::new().expect("a file");
    let (from, mut at) = (File::open(disk).expect("the disk"), 0);
    esp.as_file().set_len(layout::ESP_SIZE).expect("a size");
    let (mut block, zeros) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    while at < layout::ESP_SIZE {
        from.read_exact_at(&mut block, MIB + at).expect("read");
        if block != zeros {
            esp.as_file().write_all_at(&block, at).expect("written");
        }
        at += MIB;
    }
    let found = tool("fsck.vfat", &["-n", text(esp.path())]);
    let found = String::from_utf8_lossy(&found).into_owned();
    assert_eq!(found.lines().count(), 2, "fsck.vfat complains: {found}");
}

/// What differs between two files, up to the end of the first and but for `except`: where either has data,
/// for there is much that neither has.
fn assert_same(image: &Path, disk: &Path, except: Range<u64>) {
    let files = [image, disk].map(|path| File::open(path).expect("there"));
    let size = files[0].metadata().expect("there").len();
    let mut blocks = [vec![0; MIB as usize], vec![0; MIB as usize]];
    for file in &files {
        let mut at = 0;
        while let Ok(data) = seek(file, SeekFrom::Data(at)) {
            let start = data - data % MIB;
            at = start + MIB;
            if start >= size {
                break;
            }
            if except.contains(&start) {
                continue;
            }
            for (file, block) in files.iter().zip(&mut blocks) {
                file.read_exact_at(block, start).expect("read");
            }
            assert!(blocks[0] == blocks[1], "the MiB from {start} on differs");
        }
    }
}

/// A file, or nothing.
fn content_of(path: &Path) -> Option<Vec<u8>> {
    fs::read(path).ok()
}

#[tokio::test]
async fn an_image_with_parameters_goes_into_a_file() {
    let f = Fixture::new();
    for sector_size in [SectorSize::B512, SectorSize::B4096] {
        let image = f.image(None, sector_size);
        let parameters = f.parameters(BOOTSTRAP);
        let target = f.path("disk.img");
        let args = [
            "image",
            "write",
            text(&image),
            text(&target),
            "--parameters",
            text(&parameters),
            "-o",
            "json",
        ];
        let written = f.json(&args).await;
        assert_eq!(written["target"], json!(text(&target)));
        assert_eq!(written["device"], json!(null));
        assert_eq!(written["replaced_parameters"], json!(false));
        assert!(written["parameters"]["bootstrap"].is_object(), "{written}");
        assert_eq!(on_disk(&target), BOOTSTRAP);
        fsck(&target);

        let metadata = fs::metadata(&target).expect("there");
        assert_eq!(metadata.mode() & 0o777, 0o600, "it has secrets");
        let source = fs::metadata(&image).expect("there");
        assert_eq!(metadata.len(), source.len());
        let more = metadata.blocks().saturating_sub(source.blocks()) * 512;
        assert!(more < MIB, "{more} bytes more than the image");
        // The partition table and the extension.
        assert_same(&image, &target, MIB..MIB + layout::ESP_SIZE);
        fs::remove_file(&target).expect("removed");
    }
}

#[tokio::test]
async fn without_parameters_a_file_is_the_image() {
    let f = Fixture::new();
    let image = f.image(None, SectorSize::B512);
    let target = f.path("disk.img");
    let said = f.ok(&["image", "write", text(&image), text(&target)]).await;
    assert!(said.contains("no parameters"), "{said}");
    assert_same(&image, &target, 0..0);
    let mode = fs::metadata(&target).expect("there").mode();
    assert_ne!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn parameters_of_the_image_are_kept_or_replaced() {
    let f = Fixture::new();
    let image = f.image(Some(REGISTER), SectorSize::B512);
    let target = f.path("disk.img");
    let write = ["image", "write", text(&image), text(&target), "--yes"];
    let said = f.ok(&write).await;
    assert!(said.contains("node approve"), "{said}");
    assert_eq!(fs::metadata(&target).expect("there").mode() & 0o777, 0o600);
    assert_eq!(on_disk(&target), REGISTER);

    let parameters = f.parameters(BOOTSTRAP);
    let with = ["--parameters", text(&parameters)];
    let said = f.ok(&[&write[..], &with[..]].concat()).await;
    assert!(said.contains("they replace those"), "{said}");
    assert!(said.contains("take-ownership"), "{said}");
    assert_eq!(on_disk(&target), BOOTSTRAP);
    assert_eq!(on_disk(&image), REGISTER, "the image stays as it is");

    // The other way round, on the disk itself, and without a trace of the longer ones.
    let parameters = f.parameters(REGISTER);
    let set = ["image", "set-parameters", text(&parameters), text(&target)];
    let written = f.json(&[&set[..], &["-o", "json"]].concat()).await;
    assert_eq!(written["replaced_parameters"], json!(true));
    assert_eq!(written["copied_bytes"], json!(null));
    assert_eq!(on_disk(&target), REGISTER);
    fsck(&target);
}

#[tokio::test]
async fn nothing_is_replaced_without_an_answer() {
    let f = Fixture::new();
    let image = f.image(None, SectorSize::B512);
    let target = f.path("disk.img");
    fs::write(&target, "precious").expect("written");
    let write = ["image", "write", text(&image), text(&target)];
    let (code, why) = f.refused(&write).await;
    assert_eq!(code, 5);
    assert!(
        why.contains("exists (8 bytes)") && why.contains("--yes"),
        "{why}"
    );
    for answer in ["no\n", "y\n", "\n", "\x04"] {
        let (code, why) = f.at_terminal(&write, answer).await;
        assert_eq!(code, 5, "{answer:?}");
        assert!(why.contains("nothing was changed"), "{answer:?}: {why}");
        assert_eq!(content_of(&target).as_deref(), Some(&b"precious"[..]));
    }
    let (code, why) = f.at_terminal(&write, "yes\n").await;
    assert_eq!(code, 0, "{why}");
    assert_same(&image, &target, 0..0);
}

#[tokio::test]
async fn what_cannot_be_right_is_refused_before_anything_is_written() {
    let f = Fixture::new();
    let image = f.image(None, SectorSize::B512);
    let target = f.path("disk.img");
    let write = |image: &Path, target: &Path, more: &[&str]| {
        let args = [
            &["image", "write", text(image), text(target), "--yes"],
            more,
        ]
        .concat();
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let f = &f;
        async move {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            f.refused(&args).await
        }
    };
    // Parameters that a machine would refuse: in the words of `parameters check`.
    let parameters = f.parameters(b"?");
    let (code, why) = write(&image, &target, &["--parameters", text(&parameters)]).await;
    assert_eq!(code, 1);
    let (_, expected) = f.fails(&["parameters", "check", text(&parameters)]).await;
    assert_eq!(why, expected);

    // Those in the image are no better.
    let wrong = f.path("wrong.img");
    fs::rename(f.image(Some(b"?"), SectorSize::B512), &wrong).expect("renamed");
    let (code, why) = write(&wrong, &target, &[]).await;
    assert_eq!(code, 1);
    assert!(why.contains("cannot use the parameters in"), "{why}");
    let image = f.image(None, SectorSize::B512);

    let (code, why) = write(&image, &image, &[]).await;
    assert_eq!(code, 5);
    assert!(why.contains("it is the image itself"), "{why}");
    let (code, why) = write(&image, f.home.path(), &[]).await;
    assert_eq!(code, 5);
    assert!(why.contains("expected a disk or a file"), "{why}");
    let (code, why) = write(&image, Path::new("/dev/sdnone"), &[]).await;
    assert_eq!(code, 5);
    assert!(why.contains("there is no such device"), "{why}");
    let other = f.path("other");
    fs::write(&other, [0; 1 << 20]).expect("written");
    let (code, why) = write(&other, &target, &[]).await;
    assert_eq!(code, 5);
    assert!(why.contains("no GUID partition table"), "{why}");
    let (code, why) = write(&f.path("nothing"), &target, &[]).await;
    assert_eq!(code, 5);
    assert!(why.contains("No such file"), "{why}");
    assert!(!target.exists());
    let parameters = f.parameters(REGISTER);
    let (code, why) = f
        .refused(&["image", "set-parameters", text(&parameters), text(&target)])
        .await;
    assert_eq!(code, 5);
    assert!(why.contains("there is no such file"), "{why}");
}

/// A block device that is a file.
struct Loop {
    path: PathBuf,
    file: PathBuf,
}

impl Loop {
    /// Nothing where this is not permitted.
    fn new(f: &Fixture, size: u64, options: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            eprintln!("skipped: loop devices are not permitted");
            return None;
        }
        let file = f.path("device");
        File::create(&file)
            .and_then(|file| file.set_len(size))
            .expect("a file");
        let args = [options, &["--find", "--show", text(&file)]].concat();
        let path = String::from_utf8(tool("losetup", &args)).expect("text");
        Some(Self {
            path: PathBuf::from(path.trim()),
            file,
        })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        tool("losetup", &["--detach", text(&self.path)]);
    }
}

#[tokio::test]
async fn a_device_has_the_image_and_nothing_of_what_was_there() {
    let f = Fixture::new();
    let image = f.image(None, SectorSize::B512);
    let size = fs::metadata(&image).expect("there").len();
    let Some(device) = Loop::new(&f, size + 64 * MIB, &[]) else {
        return;
    };
    // In the table, in the second slot, at the beginning and in the middle of the data partition, and
    // at the end of the device; but also between the image and that end.
    let old = File::options()
        .write(true)
        .open(&device.file)
        .expect("open");
    let data = size - MIB - layout::DATA_SIZE;
    let slot = MIB + layout::ESP_SIZE + layout::SLOT_SIZE;
    let last = size + 64 * MIB - 4096;
    for at in [0, slot, data, data + 100 * MIB, size + MIB, last] {
        old.write_all_at(&[0xee; 4096], at).expect("written");
    }
    let parameters = f.parameters(REGISTER);
    let args = ["image", "write", text(&image), text(&device.path)];
    let (code, why) = f.at_terminal(&args, "no\n").await;
    assert_eq!(code, 5, "{why}");
    let model = format!("loop device of {}", device.file.display());
    assert!(why.contains(&model), "{why}");
    assert!(why.contains("Everything on it will be lost"), "{why}");
    let mut first = [0; 4096];
    let mut reader = File::open(&device.file).expect("open");
    reader.read_exact(&mut first).expect("read");
    assert_eq!(first, [0xee; 4096], "nothing was changed");

    let (code, why) = f.at_terminal(&args, "yes\n").await;
    assert_eq!(code, 0, "{why}");
    assert_same(&image, &device.file, 0..0);
    let mut end = vec![1; 4096];
    let reader = File::open(&device.path).expect("open");
    reader.read_exact_at(&mut end, last).expect("read");
    assert_eq!(end, [0; 4096]);
    reader.read_exact_at(&mut end, size + MIB).expect("read");
    assert_eq!(end, [0xee; 4096], "far more than is needed was written");

    let set = [
        "image",
        "set-parameters",
        text(&parameters),
        text(&device.path),
    ];
    let written = f.json(&[&set[..], &["--yes", "-o", "json"]].concat()).await;
    assert_eq!(written["device"]["size_bytes"], json!(size + 64 * MIB));
    assert_eq!(on_disk(&device.path), REGISTER);
}

#[tokio::test]
async fn devices_that_are_used_or_do_not_fit_are_refused() {
    let f = Fixture::new();
    let image = f.image(None, SectorSize::B512);
    let size = fs::metadata(&image).expect("there").len();
    for (device, wanted) in [
        ((size - MIB, &[][..]), "expected at least 3.8 GB"),
        ((size, &["--read-only"][..]), "it is read-only"),
        (
            (size, &["--sector-size", "4096"][..]),
            "build the image with --sector-size 4096",
        ),
        ((size, &[][..]), "it is in use: somebody has mounted it"),
    ] {
        let Some(device) = Loop::new(&f, device.0, device.1) else {
            return;
        };
        // As a mount does, wherever it is.
        let exclusive = File::options()
            .read(true)
            .custom_flags(OFlags::EXCL.bits() as i32)
            .open(&device.path);
        let args = ["image", "write", text(&image), text(&device.path), "--yes"];
        let (code, why) = f.refused(&args).await;
        assert_eq!(code, 5, "{why}");
        assert!(why.contains(wanted) && !why.contains("incomplete"), "{why}");
        drop(exclusive.expect("opened"));
        let blocks = fs::metadata(&device.file).expect("there").blocks();
        assert_eq!(blocks, 0, "something was written");
    }
}

#[tokio::test]
async fn an_installation_medium_takes_parameters_as_a_disk_does() {
    let f = Fixture::new();
    let stick = f.path("stick.img");
    let medium = Medium {
        seed: Seed([8; 32]),
        boot: Boot {
            loader: Content::Bytes(vec![1; 1000]),
            uki: Content::Bytes(vec![2; 1000]),
            version: "1.2.3".to_owned(),
        },
        payload: Content::Bytes(vec![3; 1000]),
        parameters: None,
    };
    medium.write_stick(&stick).expect("an image");
    let parameters = f.parameters(REGISTER);
    let args = [
        "image",
        "set-parameters",
        text(&parameters),
        text(&stick),
        "--yes",
    ];
    let said = f.ok(&args).await;
    assert!(
        said.contains("asks on which disk to install the node; it shows"),
        "{said}"
    );
    assert_eq!(on_disk(&stick), REGISTER);
    // On a larger stick.
    let written = f.path("written.img");
    let bootstrap = f.path("bootstrap.pb");
    fs::write(&bootstrap, BOOTSTRAP).expect("written");
    let args = [
        "image",
        "write",
        text(&stick),
        text(&written),
        "--parameters",
        text(&bootstrap),
        "--yes",
    ];
    f.ok(&args).await;
    assert_eq!(on_disk(&written), BOOTSTRAP);
}
