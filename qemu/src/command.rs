//! Builds QEMU's command line from the configuration of a machine.
//!
//! [`Machine`] is plain data; [`Machine::command`] checks it and writes the arguments, with one helper for each concern
//! and a reason beside each flag that does not explain itself. Nothing here accesses the disk or starts anything.

mod devices;

use std::fmt;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use crate::command_line::CommandLine;
pub(crate) use devices::{disk_device_id, disk_node};

use crate::accel::Accel;
use crate::command_line::Options;
use crate::disk::{Disk, Medium};
use crate::firmware::Firmware;
use crate::fw_cfg::{Content, Item, Name};
use crate::hardware::{Card, DiskBus, MediumKind};
use crate::network::{Link, Nic};
use crate::program;
use crate::run_dir::RunDir;
use crate::smbios::{Smbios, System};
use crate::tsc::Rate;

/// Linux's limit for a command line on x86, including the final NUL.
const COMMAND_LINE_SIZE: usize = 2048;

/// Bounds of the buffer in which TCG keeps its translations, which is half as large as the machine's memory: more memory
/// is for more programs. A full buffer is flushed, and everything is translated again. Firmware and kernel make 43 MiB of
/// translations, the node with Kubernetes 900: with 256 MiB the buffer was flushed twelve times in three minutes, and the
/// test of pods took 285 s instead of 215 s. QEMU's own default is 1 GiB.
const TCG_BUFFER_MIB: std::ops::RangeInclusive<u32> = 256..=1024;

/// All features of TCG (without AES instructions a boot with an encrypted disk takes a second longer), except
/// `cmpxchg16b`. QEMU up to 7.2 emulates it with the flags of an earlier instruction: it computes them before it has
/// stored which instruction set them last, so it can leave whole operands in the flags register: single-step, direction
/// and nested-task bits. Linux uses it in the slab allocator and per processor if the processor has it, and then rarely
/// takes spurious faults; without it, Linux has another implementation.
///
/// And except `erms`, which promises that `rep movsb` and `rep stosb` are fast. Linux, glibc and Go clear and copy memory by
/// them then; TCG moves a byte at a time, and eight with what they use otherwise. With it, a node takes a tenth longer until
/// it is HOME.
const TCG_CPU: &str = "max,-cx16,-erms";

/// An emulated machine has room for a second processor at least. QEMU 7.2 leaves out the memory barriers of a machine that can
/// never have two, `mfence` and those of locked instructions: no other processor could see the order. But the threads of its
/// devices do. A virtio driver writes a request and then reads whether the device wants to be told of it; if the processor
/// reads first, driver and device miss each other, and the request is never answered.
const TCG_LEAST_MAXCPUS: u32 = 2;

/// Parameters of an emulated kernel that is booted directly: timers use the tick, and the tick does not stop. With
/// high-resolution timers, Linux programs the processor's timer at nearly each sleep and each idle moment, and for QEMU
/// that is an access to a device under its global lock and a change of its own timers: an eighth of the processor time
/// of a machine with Kubernetes. With the tick its kernel uses half as much. A timer is late by up to 4 ms instead.
const TCG_TICK: &str = "highres=off nohz=off";
/// Linux counts ten ticks while it waits for as much of its own time, and takes a timer that is late for a broken one
/// ("8254 timer not connected to IO-APIC"). On a busy host an emulated machine stood still there for good.
const TCG_TIMER: &str = "no_timer_check";

/// The configuration of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// 1 to 32 of a–z, 0–9 and '-'; the name of the window, the process, the folder.
    pub name: String,
    /// Its accelerator.
    pub accel: Accel,
    /// Virtual CPUs, 1 to 64.
    pub cpus: u32,
    /// Memory in MiB, at least 64.
    pub memory_mib: u32,
    /// How it boots.
    pub boot: Boot,
    /// How its disks are attached.
    pub disk_bus: DiskBus,
    /// Its disks. UEFI boots from the first.
    pub disks: Vec<Disk>,
    /// Media. UEFI boots from the first, before all disks.
    pub media: Vec<Medium>,
    /// The kind of its network cards.
    pub card: Card,
    /// Its network cards.
    pub nics: Vec<Nic>,
    /// UEFI boots from the first card before anything else, by HTTP or PXE. Of the cards it has a driver for virtio only.
    pub boots_from_network: bool,
    /// Further devices, as QEMU's `-device` takes them: those that a test wants to be there and not to be used.
    pub more_devices: Vec<String>,
    /// fw_cfg items of the guest.
    pub fw_cfg: Vec<Item>,
    /// What its SMBIOS table says beside what QEMU puts there.
    pub smbios: Smbios,
    /// Whether it has a virtio random number generator.
    pub rng: bool,
    /// A TPM 2.0, see [`crate::tpm`].
    pub tpm: Option<TpmInterface>,
    /// The action of its watchdog; the device always exists.
    pub watchdog: WatchdogAction,
    /// Its clock.
    pub rtc: Rtc,
    /// The rate of the time-stamp counter under TCG, passed to a kernel that is booted directly.
    pub tsc: Option<Rate>,
    /// The effect of a guest's reset.
    pub on_reset: OnReset,
}

/// How a machine boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boot {
    /// PC firmware (SeaBIOS) and its boot order.
    Bios,
    /// UEFI: like a real machine, and five seconds slower under TCG.
    Uefi(Firmware),
    /// QEMU loads the kernel itself.
    Direct {
        /// Path of a bzImage.
        kernel: PathBuf,
        /// Path of an initramfs.
        initrd: Option<PathBuf>,
        /// The kernel's command line.
        append: String,
    },
}

/// The action of the watchdog (an Intel 6300ESB) when the guest stops feeding it. It is inactive until the guest opens
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WatchdogAction {
    /// Resets the machine, as on real hardware.
    #[default]
    Reset,
    /// Ends QEMU.
    Poweroff,
    /// Pauses the machine, so that it can be inspected.
    Pause,
    /// Only sends an event on QMP.
    None,
}

/// The effect on QEMU when the guest resets the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReset {
    /// It boots again.
    #[default]
    Reboot,
    /// QEMU ends, with [`crate::vm::Cause::GuestReset`].
    Exit,
}

/// The machine's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rtc {
    /// The host's time.
    #[default]
    Host,
    /// Starts at this date in UTC, `2038-01-19T03:14:00`, and runs from there.
    From(String),
}

/// The text is not a date.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {WANTED_DATE}, got {found:?}")]
pub struct NotADate {
    found: String,
}

impl FromStr for Rtc {
    type Err = NotADate;

    fn from_str(text: &str) -> Result<Self, NotADate> {
        match is_date(text) {
            true => Ok(Self::From(text.to_owned())),
            false => Err(NotADate {
                found: text.to_owned(),
            }),
        }
    }
}

/// The TPM's interface to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpmInterface {
    /// FIFO; works with every firmware.
    Tis,
    /// Command response buffer.
    Crb,
}

/// The origin of QEMU's QMP sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sockets {
    /// Inherited listening sockets: one for the launcher, one for everyone else.
    Inherited {
        /// Descriptor of the launcher's socket.
        qmp: RawFd,
        /// Descriptor of the socket for everyone else.
        control: RawFd,
    },
    /// Created by QEMU, under the names in the machine's folder: for a command that is run by hand.
    Made,
}

/// An invalid field of a machine.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("machine {machine:?}: {field}: expected {wanted}, got {found}")]
pub struct MachineError {
    machine: String,
    field: &'static str,
    found: String,
    wanted: &'static str,
}

impl Machine {
    /// A machine with one CPU, 512 MiB, a random number generator and nothing else. The first machine under TCG
    /// measures this host's counter, which takes a moment.
    pub fn new(name: impl Into<String>, accel: Accel) -> Self {
        Self {
            name: name.into(),
            accel,
            cpus: 1,
            memory_mib: 512,
            boot: Boot::Bios,
            disk_bus: DiskBus::default(),
            disks: Vec::new(),
            media: Vec::new(),
            card: Card::default(),
            nics: Vec::new(),
            boots_from_network: false,
            more_devices: Vec::new(),
            fw_cfg: Vec::new(),
            smbios: Smbios::default(),
            rng: true,
            tpm: None,
            watchdog: WatchdogAction::default(),
            rtc: Rtc::default(),
            tsc: match accel {
                Accel::Tcg => Rate::of_host(),
                Accel::Kvm => None,
            },
            on_reset: OnReset::default(),
        }
    }

    /// The command that starts it, with its files in `run_dir`.
    ///
    /// # Errors
    /// Names the first field that QEMU or a guest would not accept.
    pub fn command(&self, run_dir: &RunDir, sockets: Sockets) -> Result<CommandLine, MachineError> {
        self.check()?;
        let mut line = CommandLine::new(program::program());
        self.machine(&mut line);
        self.cpu(&mut line);
        self.memory(&mut line);
        self.boot(&mut line, run_dir);
        self.disks(&mut line);
        self.media(&mut line);
        self.network(&mut line);
        for device in &self.more_devices {
            line.option("-device", device);
        }
        self.fw_cfg(&mut line, run_dir);
        self.smbios(&mut line, run_dir);
        self.console(&mut line, run_dir);
        monitor(&mut line, run_dir, sockets);
        self.rng(&mut line);
        self.tpm(&mut line);
        self.watchdog(&mut line);
        self.clock(&mut line);
        Ok(line)
    }

    pub(crate) fn check(&self) -> Result<(), MachineError> {
        let refuse = |field, found: &dyn fmt::Debug, wanted| {
            Err(MachineError {
                machine: self.name.clone(),
                field,
                found: format!("{found:?}"),
                wanted,
            })
        };
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !(1..=32).contains(&self.name.len()) || !self.name.bytes().all(plain) {
            return refuse("name", &self.name, "1 to 32 of a-z, 0-9 and '-'");
        }
        if !(1..=64).contains(&self.cpus) {
            return refuse("cpus", &self.cpus, "1 to 64");
        }
        if self.memory_mib < 64 {
            return refuse("memory_mib", &self.memory_mib, "at least 64");
        }
        if let Boot::Direct { append, .. } = &self.boot {
            let whole = self.append(append);
            if whole.len() >= COMMAND_LINE_SIZE || whole.contains('\0') {
                return refuse("boot.append", &whole, "at most 2047 bytes without NUL");
            }
        }
        if self.disk_bus == DiskBus::Sdhci && self.disks.len() > 1 {
            return refuse("disks", &self.disks.len(), "one, because it is an SD card");
        }
        let on_sata = match self.disk_bus {
            DiskBus::Ahci => self.disks.len(),
            _ => 0,
        };
        let discs = self.media.iter().filter(|one| one.kind == MediumKind::Disc);
        let on_sata = on_sata + discs.count();
        if on_sata > devices::SATA_PORTS {
            return refuse("disks", &on_sata, "at most six on SATA");
        }
        if matches!(self.boot, Boot::Uefi(_)) && !self.disk_bus.boots_by_firmware() {
            let wanted = "a controller that OVMF has a driver for, or a direct boot";
            return refuse("disk_bus", &self.disk_bus.word(), wanted);
        }
        if let Rtc::From(date) = &self.rtc
            && !is_date(date)
        {
            return refuse("rtc", date, WANTED_DATE);
        }
        let mut names: Vec<&Name> = self.fw_cfg.iter().map(|item| &item.name).collect();
        names.sort_unstable_by_key(|name| name.as_str());
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse("fw_cfg", &twice[0].as_str(), "unique names");
        }
        for item in &self.fw_cfg {
            // QEMU takes an empty string for a missing one; bytes may be empty.
            if let Content::Text(text) = &item.content
                && (text.is_empty() || text.contains('\0'))
            {
                return refuse("fw_cfg", &item.name.as_str(), "non-empty text without NUL");
            }
        }
        let mut strings = self.smbios.oem_strings.iter();
        if let Some(string) = strings.find(|string| string.0.is_empty() || string.0.contains('\0'))
        {
            return refuse("smbios.oem_strings", string, "non-empty text without NUL");
        }
        for nic in &self.nics {
            if let Link::User(user) = &nic.link
                && user.forwards.iter().any(|forward| forward.guest == 0)
            {
                return refuse("nics", &"forward of guest port 0", "a nonzero guest port");
            }
        }
        Ok(())
    }

    fn machine(&self, line: &mut CommandLine) {
        // Also names the threads, so that the CPU time of the virtual CPUs can be separated from the rest.
        line.option(
            "-name",
            Options::with("guest", &self.name).on("debug-threads", true),
        );
        // Neither the host's QEMU configuration nor devices that QEMU adds by default (VGA, floppy, CD-ROM, a network
        // card): they cost the firmware time and make machines differ between hosts.
        line.arg("-no-user-config").arg("-nodefaults");
        line.option("-display", "none");
        // Defaults otherwise: omitting the chipset's SMM, SATA, USB and sleep states was measured, and saves the
        // firmware no time.
        let mut machine = Options::of("q35");
        if let Boot::Uefi(_) = self.boot {
            machine = machine.set("pflash0", "code").set("pflash1", "vars");
        }
        line.option("-machine", machine);
        if self.on_reset == OnReset::Exit {
            line.arg("-no-reboot");
        }
    }

    fn cpu(&self, line: &mut CommandLine) {
        let mut cpus = Options::of(&self.cpus.to_string());
        match self.accel {
            Accel::Kvm => {
                line.option("-accel", "kvm").option("-cpu", "host");
            }
            Accel::Tcg => {
                let buffer_mib =
                    (self.memory_mib / 2).clamp(*TCG_BUFFER_MIB.start(), *TCG_BUFFER_MIB.end());
                let accel = Options::of("tcg")
                    .set("thread", "multi")
                    .set("tb-size", buffer_mib.to_string());
                line.option("-accel", accel).option("-cpu", TCG_CPU);
                cpus = cpus.set("maxcpus", self.cpus.max(TCG_LEAST_MAXCPUS).to_string());
            }
        }
        line.option("-smp", cpus);
    }

    fn memory(&self, line: &mut CommandLine) {
        line.option("-m", format!("{}M", self.memory_mib));
    }

    fn boot(&self, line: &mut CommandLine, run_dir: &RunDir) {
        match &self.boot {
            Boot::Bios => {}
            Boot::Uefi(firmware) => {
                // As block devices of the machine, not by `-drive if=pflash`, which takes a colon in a path for a
                // protocol.
                line.option(
                    "-blockdev",
                    file("code", &firmware.code).on("read-only", true),
                );
                line.option("-blockdev", file("vars", &run_dir.vars()));
            }
            Boot::Direct {
                kernel,
                initrd,
                append,
            } => {
                line.option("-kernel", absolute(kernel));
                if let Some(initrd) = initrd {
                    line.option("-initrd", absolute(initrd));
                }
                line.option("-append", self.append(append));
            }
        }
        // No menu and no waiting for a key. Only devices with a boot index: a disk that does not boot is an error at
        // once, rather than an attempt at every other device.
        line.option("-boot", Options::with("menu", "off").on("strict", true));
    }

    /// The kernel's command line, with parameters that the kernel cannot find out by itself.
    fn append(&self, append: &str) -> String {
        let mut told = vec![append.to_owned()];
        told.extend(self.tsc.map(|rate| rate.to_string()));
        if self.accel == Accel::Tcg {
            told.extend([TCG_TICK, TCG_TIMER].map(str::to_owned));
        }
        told.join(" ")
    }

    fn fw_cfg(&self, line: &mut CommandLine, run_dir: &RunDir) {
        for (number, item) in self.fw_cfg.iter().enumerate() {
            let options = Options::with("name", item.name.as_str());
            let options = match &item.content {
                Content::Bytes(_) => options.path("file", &run_dir.fw_cfg(number)),
                Content::File(path) => options.path("file", &absolute(path)),
                Content::Text(text) => options.set("string", text),
            };
            line.option("-fw_cfg", options);
        }
    }

    fn smbios(&self, line: &mut CommandLine, run_dir: &RunDir) {
        if let Some(System { vendor, product }) = &self.smbios.system {
            let system = Options::with("type", "1")
                .set("manufacturer", vendor)
                .set("product", product);
            line.option("-smbios", system);
        }
        for number in 0..self.smbios.oem_strings.len() {
            let path = run_dir.smbios(number);
            line.option("-smbios", Options::with("type", "11").path("path", &path));
        }
    }

    fn console(&self, line: &mut CommandLine, run_dir: &RunDir) {
        // Output is logged to a file, with or without a client at the socket: nothing is lost while there is no reader,
        // and a later reader still gets the beginning. The socket is for typing.
        let socket = made(&run_dir.console_socket())
            .set("id", "serial")
            .on("server", true)
            .on("wait", false)
            .path("logfile", &run_dir.serial_log())
            .on("logappend", true);
        line.option("-chardev", socket)
            .option("-serial", "chardev:serial");
    }

    fn tpm(&self, line: &mut CommandLine) {
        let Some(interface) = self.tpm else { return };
        // By its bare name, as all sockets in the machine's folder.
        let socket = Options::of("socket")
            .set("id", "tpm")
            .set("path", RunDir::TPM_SOCKET);
        line.option("-chardev", socket);
        line.option("-tpmdev", "emulator,id=tpm0,chardev=tpm");
        line.option(
            "-device",
            match interface {
                TpmInterface::Tis => "tpm-tis,tpmdev=tpm0",
                TpmInterface::Crb => "tpm-crb,tpmdev=tpm0",
            },
        );
    }

    fn watchdog(&self, line: &mut CommandLine) {
        line.option("-device", "i6300esb");
        let action = match self.watchdog {
            WatchdogAction::Reset => "reset",
            WatchdogAction::Poweroff => "poweroff",
            WatchdogAction::Pause => "pause",
            WatchdogAction::None => "none",
        };
        line.option("-action", Options::with("watchdog", action));
    }

    fn clock(&self, line: &mut CommandLine) {
        let base = match &self.rtc {
            Rtc::Host => "utc",
            Rtc::From(date) => date,
        };
        line.option("-rtc", Options::with("base", base));
    }
}

/// The two QMP sockets.
fn monitor(line: &mut CommandLine, run_dir: &RunDir, sockets: Sockets) {
    let ends = match sockets {
        Sockets::Inherited { qmp, control } => [
            ("qmp", Options::of("socket").set("fd", qmp.to_string())),
            (
                "control",
                Options::of("socket").set("fd", control.to_string()),
            ),
        ],
        Sockets::Made => [
            ("qmp", made(&run_dir.qmp_socket())),
            ("control", made(&run_dir.control_socket())),
        ],
    };
    for (id, end) in ends {
        // The machine starts whether or not a client is connected.
        line.option(
            "-chardev",
            end.set("id", id).on("server", true).on("wait", false),
        );
        line.option("-mon", Options::with("chardev", id).set("mode", "control"));
    }
}

/// A socket that QEMU creates itself: relative to its working directory, because socket addresses are short.
fn made(path: &Path) -> Options {
    Options::of("socket").path("path", Path::new(path.file_name().unwrap_or_default()))
}

/// A raw file as a block device.
fn file(node: &str, path: &Path) -> Options {
    Options::with("driver", "file")
        .set("node-name", node)
        .path("filename", &absolute(path))
}

/// QEMU's working directory is the machine's folder, so relative paths must be resolved before. Fails only for the
/// empty path or without a current folder; QEMU then names the missing file.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Checks the form `2038-01-19T03:14:00`; QEMU checks the rest.
const WANTED_DATE: &str = "a date such as 2038-01-19T03:14:00";

fn is_date(text: &str) -> bool {
    let form = b"dddd-dd-ddTdd:dd:dd";
    text.len() == form.len()
        && text.bytes().zip(form).all(|(byte, form)| match form {
            b'd' => byte.is_ascii_digit(),
            separator => byte == *separator,
        })
}

#[cfg(test)]
mod tests;
