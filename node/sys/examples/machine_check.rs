//! Tests on a real kernel, as its first process, that ordinary tests cannot run: mounts, disks,
//! device-mapper, file systems, devices, the network.
//!
//! An end-to-end test packs this program as `/init` (statically linked, with `/sbin/mkfs.xfs` and
//! its libraries) and boots it on the node's kernel, with
//!
//! - a disk that contains an EFI system partition and, as its last partition, a small data
//!   partition, and is at least half a GiB larger than its partition table says;
//! - in an extension slot between these, the extension `sample`, with its entry on the kernel
//!   command line;
//! - a network with a DHCP server;
//! - the fw_cfg item `opt/dev.hearth/machine-check`, with the content `hello`.
//!
//! Each check prints one line, `machine-check: NAME ok …` or `machine-check: NAME FAILED why`; then
//! comes `machine-check: done, N failed`, and the machine is powered off. The content of the disk
//! is lost.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

use anyhow::{Context, Result, bail, ensure};
use hearth_sys::block::{self, Blocks, PartitionDevice};
use hearth_sys::console::{self, Console};
use hearth_sys::dhcp::{self, Lease};
use hearth_sys::dm::{DeviceMapper, Verity, Writes, XtsKey};
use hearth_sys::firmware::{self, Booted};
use hearth_sys::mounts::{self, MountFlags};
use hearth_sys::netlink::{self, Netlink};
use hearth_sys::power_button::PowerButton;
use hearth_sys::quota::{self, Amount, Usage};
use hearth_sys::slots::{Loaded, RegionSlot, SlotFormat, SlotPair};
use hearth_sys::watchdog::{self, Watchdog};
use hearth_sys::{clock, fw_cfg, gpt, hostname, kmsg, mkfs, xfs};
use uuid::{Uuid, uuid};
use zeroize::Zeroizing;

#[path = "machine_check/authenticated.rs"]
mod authenticated;
#[path = "machine_check/wireguard.rs"]
mod wireguard;

/// Emulated and loaded machines are slow; no check takes longer.
const BOUND: Duration = Duration::from_secs(120);

const TARGET: &str = "/ephemeral/check";
/// The type of the data partition.
const DATA_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-68656172746a");

fn main() -> Result<()> {
    let brought_up = bring_up();
    let checks = Checks {
        console: Console::open(Path::new(console::DEVICE)).context("open the console")?,
        failed: 0,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let checks = runtime.block_on(all(checks, brought_up));
    checks
        .console
        .line(&format!("machine-check: done, {} failed", checks.failed));
    rustix::fs::sync();
    rustix::system::reboot(rustix::system::RebootCommand::PowerOff).context("power off")?;
    Ok(())
}

struct Checks {
    console: Console,
    failed: u32,
}

impl Checks {
    /// Runs a check and returns its result; `None` if it failed.
    async fn check<T>(
        &mut self,
        name: &str,
        check: impl Future<Output = Result<(T, String)>>,
    ) -> Option<T> {
        let began = Instant::now();
        let result = match tokio::time::timeout(BOUND, check).await {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("timed out after {BOUND:?}")),
        };
        let took = began.elapsed().as_millis();
        match result {
            Ok((found, note)) => {
                let line = format!("machine-check: {name} ok {note} ({took} ms)");
                self.console.line(&line);
                Some(found)
            }
            Err(error) => {
                self.failed += 1;
                let line = format!("machine-check: {name} FAILED {error:#}");
                self.console.line(&line);
                None
            }
        }
    }
}

async fn all(mut checks: Checks, brought_up: Result<String>) -> Checks {
    let mounts = async { brought_up.map(|note| ((), note)) };
    checks.check("mounts", mounts).await;
    checks.check("fw_cfg", fw_cfg_item()).await;
    checks.check("dhcp", lease()).await;
    checks.check("power-button", power_button()).await;
    checks.check("watchdog", watchdog()).await;
    checks.check("kernel-log", kernel_log()).await;
    checks.check("clock", raise_clock()).await;
    checks.check("host-name", host_name()).await;
    checks.check("wireguard", wireguard::check()).await;
    let Some(data) = checks.check("partitions", partitions()).await else {
        return checks;
    };
    checks.check("extension", extension(&data)).await;
    let Some(data) = checks.check("grow", grow(data)).await else {
        return checks;
    };
    checks.check("slots", region_slots(&data)).await;
    checks.check("zero-range", zero_range(&data)).await;
    checks.check("encrypted", encrypted(&data)).await;
    checks.check("quotas", quotas(&data)).await;
    let authenticated = authenticated::check(&data);
    checks.check("authenticated", authenticated).await;
    checks.check("crash", authenticated::crash(&data)).await;
    checks
}

fn bring_up() -> Result<String> {
    let first = mounts::bring_up()?;
    let again = mounts::bring_up()?;
    ensure!(again.mounted.is_empty(), "mounted again: {again:?}");
    for path in [
        "/proc/self/mountinfo",
        "/sys/block",
        "/dev/null",
        "/dev/pts/ptmx",
    ] {
        ensure!(Path::new(path).exists(), "{path} is missing");
    }
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers")?;
    ensure!(
        controllers.contains("memory"),
        "controllers: {controllers:?}"
    );
    Ok(format!(
        "{} mounted, left out: {:?}",
        first.mounted.len(),
        first.left_out
    ))
}

async fn fw_cfg_item() -> Result<((), String)> {
    let item = fw_cfg::read("opt/dev.hearth/machine-check")?;
    ensure!(item.as_deref() == Some(b"hello"), "got {item:?}");
    let none = fw_cfg::read("opt/dev.hearth/no-such-item")?;
    ensure!(none.is_none(), "got an item that does not exist");
    Ok(((), String::new()))
}

async fn lease() -> Result<((), String)> {
    let began = Instant::now();
    let netlink = Netlink::open()?;
    netlink.set_loopback_up().await?;
    let link = netlink::first_ethernet(&netlink).await?;
    let mut client = dhcp::Client::open(&link.name, dhcp::Options::default()).await?;
    let (tell, leased) = tokio::sync::oneshot::channel();
    let mut tell = Some(tell);
    let on_lease = |lease: Option<&Lease>| {
        if let (Some(lease), Some(tell)) = (lease, tell.take()) {
            let _ = tell.send(lease.clone());
        }
    };
    let lease = tokio::select! {
        error = client.run(on_lease) => return Err(error.into()),
        lease = leased => lease?,
    };
    let took = began.elapsed();
    let addresses = netlink.addresses(link.index).await?;
    ensure!(
        addresses.contains(&lease.address),
        "addresses: {addresses:?}"
    );
    let gateway = lease.default_gateway().context("no default route")?;
    let routes = fs::read_to_string("/proc/net/route")?;
    let octets = gateway.octets();
    let hex = format!("{:08X}", u32::from_le_bytes(octets));
    ensure!(routes.contains(&hex), "routes: {routes}");
    Ok((
        (),
        format!("{} after {} ms", lease.address, took.as_millis()),
    ))
}

async fn power_button() -> Result<((), String)> {
    let button = PowerButton::open()?.context("no power button")?;
    let pressed = tokio::time::timeout(Duration::from_millis(50), button.pressed()).await;
    ensure!(pressed.is_err(), "unexpected button press: {pressed:?}");
    Ok(((), String::new()))
}

async fn watchdog() -> Result<((), String)> {
    let device = Path::new(watchdog::DEVICE);
    let Some(mut watchdog) = Watchdog::arm(device, Duration::from_secs(60))? else {
        return Ok(((), "(none on this machine)".into()));
    };
    let timeout = watchdog.timeout();
    watchdog.feed()?;
    watchdog.disarm()?;
    Ok(((), format!("with {timeout:?}")))
}

async fn kernel_log() -> Result<((), String)> {
    let mut kmsg = kmsg::Kmsg::open(Path::new(kmsg::DEVICE))?;
    match kmsg.next().await? {
        kmsg::Item::Record(record) => Ok(((), record.text)),
        kmsg::Item::Missed => bail!("records were dropped right after the start"),
    }
}

async fn raise_clock() -> Result<((), String)> {
    let ahead = SystemTime::now() + Duration::from_secs(3600);
    let raised = clock::raise_to(ahead)?;
    ensure!(raised.is_some(), "the clock was not set");
    ensure!(SystemTime::now() >= ahead, "the clock is behind the floor");
    ensure!(clock::raise_to(ahead)?.is_none(), "the clock was set twice");
    Ok(((), String::new()))
}

async fn host_name() -> Result<((), String)> {
    hostname::set("machine-check")?;
    let name = fs::read_to_string("/proc/sys/kernel/hostname")?;
    ensure!(name.trim() == "machine-check", "got {name:?}");
    Ok(((), String::new()))
}

async fn partitions() -> Result<(PartitionDevice, String)> {
    let blocks = Blocks::default();
    let booted = Booted::read(Path::new(firmware::EFIVARS))?;
    let esp = blocks.boot_partition(&booted, DATA_TYPE)?;
    let partitions = blocks.partitions(&esp.disk)?;
    let data = partitions.into_iter().max_by_key(|p| p.entry.first);
    let data = data.context("no partition")?;
    ensure!(data.entry.guid != esp.entry.guid, "only the ESP");
    let note = format!("{} and {}", esp.path.display(), data.path.display());
    Ok((data, note))
}

/// The extension on the kernel command line: root hash and number of blocks.
fn sample() -> Result<Verity> {
    let line = fs::read_to_string("/proc/cmdline")?;
    let words = line.split_whitespace();
    let mut parts = words
        .filter_map(|word| word.strip_prefix("hearth.extension=sample:"))
        .flat_map(|word| word.split(':'));
    let hash = parts
        .next()
        .context("no extension on the kernel command line")?;
    let mut root_hash = [0; 32];
    for (n, byte) in root_hash.iter_mut().enumerate() {
        let digits = hash.get(2 * n..2 * n + 2).context("truncated root hash")?;
        *byte = u8::from_str_radix(digits, 16)?;
    }
    let blocks = parts.next().context("no number of blocks")?.parse()?;
    Ok(Verity { blocks, root_hash })
}

/// Mounts the image builder's file system on this kernel, with dm-verity.
async fn extension(data: &PartitionDevice) -> Result<((), String)> {
    let partitions = Blocks::default().partitions(&data.disk)?;
    let found = partitions
        .into_iter()
        .find(|p| p.entry.name == "HEARTH-EXT-A");
    let device = found.context("no extension slot")?.path;
    let mapper = DeviceMapper::open()?;
    let (name, verity) = ("check-verity", sample()?);
    let place = Path::new(TARGET);
    let open = || -> Result<()> {
        let volume = mapper.open_verity(name, &device, &verity)?;
        let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID;
        Ok(mounts::mount(&volume, place, "erofs", flags, "")?)
    };
    let close = || -> Result<()> {
        mounts::unmount(place)?;
        Ok(mapper.remove(name)?)
    };
    open()?;
    let began = Instant::now();
    read_sample()?;
    let took = began.elapsed().as_millis();
    ensure!(
        fs::write(place.join("new"), b"x").is_err(),
        "a file was created"
    );
    ensure!(
        mapper.is_intact(name)?,
        "the volume was not intact at first"
    );
    close()?;

    // The last block belongs to the file `noise`. Its corruption is detected only when it is read.
    let last = (verity.blocks - 1) * 4096;
    let mut byte = block::read_region(&device, last, 1)?;
    byte[0] = !byte[0];
    block::write_region(&device, last, &byte)?;
    open()?;
    let version = fs::read(place.join("VERSION"));
    let noise = fs::read(place.join("data/noise"));
    let intact = mapper.is_intact(name);
    close()?;
    ensure!(version? == b"sample 1\n", "VERSION differs");
    let error = noise.err().context("a corrupt block was read")?;
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    ensure!(!intact?, "a corrupt block was not detected");
    byte[0] = !byte[0];
    block::write_region(&device, last, &byte)?;

    let mut other = verity.clone();
    other.root_hash[0] ^= 1;
    let volume = mapper.open_verity(name, &device, &other)?;
    let first = block::read_region(&volume, 0, 4096);
    mapper.remove(name)?;
    ensure!(first.is_err(), "a wrong root hash was accepted");
    Ok(((), format!("read in {took} ms")))
}

/// Reads every file of the sample and compares it with what the image builder wrote.
fn read_sample() -> Result<()> {
    let place = Path::new(TARGET);
    let mut names = Vec::new();
    for entry in fs::read_dir(place)? {
        names.push(entry?.file_name().into_string().unwrap_or_default());
    }
    names.sort();
    ensure!(names == ["VERSION", "bin", "data"], "got {names:?}");
    ensure!(fs::read(place.join("VERSION"))? == b"sample 1\n");
    // Through the symbolic link.
    let lines = fs::read_to_string(place.join("bin/lines"))?;
    ensure!(lines.len() == 1_600_000, "{} bytes of lines", lines.len());
    for (number, line) in lines.lines().enumerate() {
        ensure!(line.parse() == Ok(number), "line {number} is {line:?}");
    }
    let noise = fs::read(place.join("data/noise"))?;
    ensure!(noise.len() == 600_000, "{} bytes of noise", noise.len());
    let (first, second) = noise.split_at(300_000);
    ensure!(
        first.iter().zip(second).all(|(a, b)| *a == !*b),
        "the two halves of the noise do not match"
    );
    Ok(())
}

/// The partition, and an authenticated volume with a file system on it.
async fn grow(data: PartitionDevice) -> Result<(PartitionDevice, String)> {
    const KEY: u8 = 3;
    let blocks = Blocks::default();
    let before = data.size();
    let mapper = DeviceMapper::open()?;
    let open = |device: &Path| authenticated::open(&mapper, device, KEY, Writes::Journaled);
    mapper.format_integrity(authenticated::LOWER, &data.path)?;
    let volume = open(&data.path)?;
    mkfs::xfs(&volume).await?;
    keep_a_file(&volume)?;
    let small = block::size_of(&volume)?;
    authenticated::close(&mapper)?;
    let grown = blocks.grow(&data)?;
    let after = block::size_of(&grown.path)?;
    ensure!(
        after == grown.size(),
        "the kernel says {after} bytes, the table {}",
        grown.size()
    );
    ensure!(
        after > before,
        "the partition did not grow beyond {before} bytes"
    );
    ensure!(blocks.grow(&grown)? == grown, "the partition grew twice");
    let disk = fs::File::open(&grown.disk.path)?;
    let table = gpt::read(&disk, grown.disk.sector_size)?;
    ensure!(!table.from_backup, "the primary table is damaged");
    let volume = open(&grown.path)?;
    let large = block::size_of(&volume)?;
    ensure!(
        large > small,
        "the volume did not grow beyond {small} bytes"
    );
    let (from, to) = grow_file_system(&mapper, &volume, large)?;
    find_the_file(&volume)?;
    authenticated::close(&mapper)?;
    let mib = |bytes: u64| bytes >> 20;
    let note = format!(
        "partition {} to {} MiB, file system {} to {} MiB",
        mib(before),
        mib(after),
        mib(from),
        mib(to)
    );
    Ok((grown, note))
}

/// Grows the file system to the size of its volume, and fills more than it had; returns its sizes. The volume is opened a
/// second time, to write where the kernel reads before it grows the file system: the last block.
fn grow_file_system(mapper: &DeviceMapper, volume: &Path, size: u64) -> Result<(u64, u64)> {
    const AGAIN: &str = "check-aead-again";
    let place = Path::new(TARGET);
    mount(volume)?;
    let grow = || -> Result<(u64, u64)> {
        ensure!(
            xfs::grow(volume, place).is_err(),
            "it grew into what cannot be read"
        );
        let room = xfs::room(volume, place)?.context("no room to grow")?;
        ensure!(
            block::write_region(volume, room.end - 4096, &[0; 4096]).is_err(),
            "a mounted volume was written to"
        );
        let lower = mapper.find(authenticated::LOWER)?.context("not open")?;
        let again = mapper.open_authenticated(AGAIN, &lower, &authenticated::key(3))?;
        block::zero_range(&again, room.end - 4096, 4096)?;
        mapper.remove(AGAIN)?;
        let grown = xfs::grow(volume, place)?;
        let grown = grown.context("the file system did not grow")?;
        ensure!(size - grown.to < 1 << 20, "{grown:?} of {size} bytes");
        ensure!(xfs::grow(volume, place)?.is_none(), "it grew twice");
        ensure!(xfs::room(volume, place)?.is_none(), "it can still grow");
        ensure!(
            xfs::discard_unused(place)?.is_none(),
            "an authenticated volume passes on what is unused"
        );
        // Into the new part: the old one has less room.
        let file = fs::File::create(place.join("large"))?;
        let length = libc::off_t::try_from(grown.from)?;
        nix::fcntl::posix_fallocate(&file, 0, length).context("the new room cannot be used")?;
        drop(file);
        fs::remove_file(place.join("large"))?;
        Ok((grown.from, grown.to))
    };
    let grown = grow();
    mounts::unmount(place)?;
    grown
}

async fn region_slots(data: &PartitionDevice) -> Result<((), String)> {
    const FORMAT: SlotFormat = SlotFormat {
        magic: *b"HRTHCHCK",
        version: 1,
    };
    let slot = |at| RegionSlot::new(&data.path, at, 4096);
    let mut slots = SlotPair::new(&[FORMAT], slot(0), slot(4096));
    slots.erase()?;
    ensure!(matches!(slots.load()?, Loaded::Absent), "not absent");
    slots.save(b"first")?;
    slots.save(b"second")?;
    match slots.load()? {
        Loaded::Value {
            format: FORMAT,
            generation: 2,
            payload,
            repaired: false,
            whole: true,
        } if payload.as_slice() == b"second" => {}
        other => bail!("got {other:?}"),
    }
    Ok(((), String::new()))
}

async fn zero_range(data: &PartitionDevice) -> Result<((), String)> {
    const LENGTH: u64 = 64 << 20;
    block::write_region(&data.path, 4096, b"something")?;
    block::write_region(&data.path, LENGTH - 9, b"something")?;
    ensure!(!block::is_blank(&data.path, 0, LENGTH)?, "blank before");
    block::zero_range(&data.path, 0, LENGTH)?;
    ensure!(block::is_blank(&data.path, 0, LENGTH)?, "not blank");
    Ok(((), String::new()))
}

fn xts_key(byte: u8) -> XtsKey {
    let key = std::array::from_fn(|i| byte.wrapping_add(i as u8));
    XtsKey::new(Zeroizing::new(key))
}

async fn encrypted(data: &PartitionDevice) -> Result<((), String)> {
    let mapper = DeviceMapper::open()?;
    let version = mapper.version()?;
    let name = "check-crypt";
    let volume = mapper.open_encrypted(name, &data.path, &xts_key(1))?;
    ensure!(mapper.find(name)? == Some(volume.clone()), "not found");
    let table = mapper.table(name)?;
    ensure!(
        table.contains(" :64:logon:hearth:check-crypt 0 "),
        "the key is not in the keyring: {table}"
    );
    ensure!(
        mapper
            .open_encrypted(name, &data.path, &xts_key(1))
            .is_err(),
        "opened twice under one name"
    );
    mkfs::xfs(&volume).await?;
    keep_a_file(&volume)?;
    let message = in_use(&mapper, name, &volume)?;
    mapper.remove(name)?;
    mapper.remove(name)?;
    ensure!(mapper.find(name)?.is_none(), "still there");
    // The right key opens the file system again, a wrong one does not.
    let volume = mapper.open_encrypted(name, &data.path, &xts_key(1))?;
    find_the_file(&volume)?;
    mount(&volume)?;
    let discarded = xfs::discard_unused(Path::new(TARGET));
    mounts::unmount(Path::new(TARGET))?;
    let discarded = discarded?.context("the disk is not told what is unused")?;
    ensure!(discarded > 100 << 20, "{discarded} bytes were discarded");
    mapper.remove(name)?;
    let volume = mapper.open_encrypted(name, &data.path, &xts_key(2))?;
    ensure!(
        mount(&volume).is_err(),
        "a wrong key opened the file system"
    );
    mapper.remove(name)?;
    Ok(((), format!("by interface {version:?}; in use: {message}")))
}

/// A volume in use cannot be removed; returns the error.
fn in_use(mapper: &DeviceMapper, name: &str, volume: &Path) -> Result<String> {
    mount(volume)?;
    let refused = mapper.remove(name);
    mounts::unmount(Path::new(TARGET))?;
    let error = refused.err().context("removed while it was mounted")?;
    Ok(error.to_string())
}

/// Directories with quotas, on the layers of a node's data partition.
async fn quotas(data: &PartitionDevice) -> Result<((), String)> {
    const LIMIT: Amount = Amount {
        bytes: 2 << 20,
        inodes: 100,
    };
    let mapper = DeviceMapper::open()?;
    let name = "check-quota";
    let volume = mapper.open_encrypted(name, &data.path, &xts_key(3))?;
    mkfs::xfs(&volume).await?;
    mount(&volume)?;
    let without = quota::available(fs::File::open(TARGET)?);
    mounts::unmount(Path::new(TARGET))?;
    let without = without
        .err()
        .context("quotas are available without the mount option")?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    mounts::mount(&volume, Path::new(TARGET), "xfs", flags, "prjquota")?;
    let checked = limits(LIMIT);
    mounts::unmount(Path::new(TARGET))?;
    mapper.remove(name)?;
    let used = checked?;
    Ok((
        (),
        format!("{used:?} used of {LIMIT:?}; without: {without}"),
    ))
}

fn limits(limit: Amount) -> Result<Amount> {
    let limited = Path::new(TARGET).join("limited");
    fs::create_dir(&limited)?;
    let directory = fs::File::open(&limited)?;
    quota::available(&directory)?;
    ensure!(
        quota::project(&directory)? == 0,
        "the directory already has a project"
    );
    quota::set_project(&directory, 1000)?;
    ensure!(
        quota::project(&directory)? == 1000,
        "the project was not set"
    );
    quota::limit(&directory, 1000, limit)?;
    fs::create_dir(limited.join("below"))?;
    let more = vec![7; usize::try_from(limit.bytes)? + 1];
    let refused = fs::write(limited.join("below/large"), &more);
    is_full(refused).context("exceeded the size limit")?;
    // The directory itself, the one below and that file already count.
    fs::write(limited.join("below/large"), [])?;
    for number in 3..limit.inodes {
        fs::write(limited.join(format!("below/{number}")), [])?;
    }
    let refused = fs::write(limited.join("below/one-more"), []);
    is_full(refused).context("exceeded the inode limit")?;
    let Usage { limit: said, used } = quota::usage(&directory, 1000)?;
    ensure!(
        said == limit && used.bytes <= limit.bytes && used.inodes == limit.inodes,
        "{used:?} of {said:?} used"
    );
    // Other directories are not limited, and without quotas this one is not either.
    fs::write(Path::new(TARGET).join("beside"), &more)?;
    quota::limit(&directory, 1000, Amount::NONE)?;
    fs::write(limited.join("below/large"), &more)?;
    fs::write(limited.join("below/one-more"), [])?;
    Ok(used)
}

fn is_full(refused: io::Result<()>) -> Result<()> {
    let error = refused.err().context("the write succeeded")?;
    let full = error.kind() == io::ErrorKind::StorageFull;
    ensure!(full, "unexpected error: {error}");
    Ok(())
}

fn mount(volume: &Path) -> Result<()> {
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    Ok(mounts::mount(volume, Path::new(TARGET), "xfs", flags, "")?)
}

fn keep_a_file(volume: &Path) -> Result<()> {
    mount(volume)?;
    let file = Path::new(TARGET).join("kept");
    let written = hearth_sys::files::write_atomic(&file, b"content", 0o600);
    mounts::unmount(Path::new(TARGET))?;
    Ok(written?)
}

fn find_the_file(volume: &Path) -> Result<()> {
    mount(volume)?;
    let content = fs::read(Path::new(TARGET).join("kept"));
    mounts::unmount(Path::new(TARGET))?;
    ensure!(content? == b"content", "the file has changed");
    Ok(())
}
