//! The command line of machines of all kinds. Tests with a real QEMU show that it accepts them (`tests/machine.rs`).

use proptest::prelude::*;

use super::*;
use crate::disk::{Cache, Format, Medium};
use crate::network::{Forward, Mac, UserNetwork};
use crate::smbios::OemString;

fn run_dir() -> (tempfile::TempDir, RunDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let run_dir = RunDir::create(folder.path().join("a,b")).expect("a run dir");
    (folder, run_dir)
}

fn command(machine: &Machine) -> CommandLine {
    let (_folder, run_dir) = run_dir();
    machine.command(&run_dir, Sockets::Made).expect("a machine")
}

fn refused(machine: &Machine) -> String {
    let (_folder, run_dir) = run_dir();
    let error = machine.command(&run_dir, Sockets::Made);
    error.expect_err("no machine").to_string()
}

/// The same on every host.
fn machine() -> Machine {
    Machine {
        tsc: None,
        ..Machine::new("node-0", Accel::Tcg)
    }
}

/// The first value of an option, as text.
fn value(line: &CommandLine, option: &str) -> String {
    line.values_of(option)[0].to_string_lossy().into_owned()
}

#[test]
fn each_accelerator_has_its_cpu() {
    let tcg = command(&machine());
    assert_eq!(value(&tcg, "-accel"), "tcg,thread=multi,tb-size=256");
    assert_eq!(value(&tcg, "-cpu"), "max,-cx16,-erms");
    for (memory_mib, buffer_mib) in [(256, 256), (1024, 512), (8192, 1024)] {
        let machine = Machine {
            memory_mib,
            ..machine()
        };
        let expected = format!("tcg,thread=multi,tb-size={buffer_mib}");
        assert_eq!(value(&command(&machine), "-accel"), expected);
    }
    let kvm = command(&Machine::new("a", Accel::Kvm));
    assert_eq!(value(&kvm, "-accel"), "kvm");
    assert_eq!(value(&kvm, "-cpu"), "host");
    assert_eq!(value(&kvm, "-smp"), "1");
}

#[test]
fn an_emulated_machine_has_room_for_a_second_processor() {
    for (cpus, expected) in [(1, "1,maxcpus=2"), (2, "2,maxcpus=2"), (4, "4,maxcpus=4")] {
        let machine = Machine { cpus, ..machine() };
        assert_eq!(value(&command(&machine), "-smp"), expected);
    }
}

#[test]
fn a_direct_boot_has_a_kernel_and_no_flash() {
    let line = command(&Machine {
        boot: Boot::Direct {
            kernel: "/k,1".into(),
            initrd: Some("i".into()),
            append: "console=ttyS0,115200 quiet".into(),
        },
        ..machine()
    });
    // Arguments of their own: nothing is escaped in them.
    assert_eq!(value(&line, "-kernel"), "/k,1");
    let append = value(&line, "-append");
    let told = format!("console=ttyS0,115200 quiet {TCG_TICK} {TCG_TIMER}");
    assert_eq!(append, told);
    // QEMU has another working directory.
    assert!(Path::new(line.values_of("-initrd")[0]).is_absolute());
    assert_eq!(value(&line, "-machine"), "q35");
}

#[test]
fn an_emulated_kernel_is_told_how_to_keep_time() {
    let machine = Machine {
        boot: Boot::Direct {
            kernel: "/k".into(),
            initrd: None,
            append: "clocksource=hpet quiet".into(),
        },
        tsc: Some(Rate::of_khz(2_445_404)),
        ..machine()
    };
    assert_eq!(
        value(&command(&machine), "-append"),
        "clocksource=hpet quiet tsc_early_khz=2445404 tsc=reliable clocksource=tsc \
         highres=off nohz=off no_timer_check"
    );
    // KVM's guests have a clock of their own, and cheap timers.
    assert_eq!(Machine::new("a", Accel::Kvm).tsc, None);
    let machine = Machine {
        accel: Accel::Kvm,
        tsc: None,
        ..machine
    };
    let append = value(&command(&machine), "-append");
    assert_eq!(append, "clocksource=hpet quiet");
}

#[test]
fn uefi_has_read_only_code_and_variables_of_its_own() {
    let (_folder, run_dir) = run_dir();
    let firmware = Firmware {
        code: "/fw/CODE.fd".into(),
        vars: "/fw/VARS.fd".into(),
    };
    let machine = Machine {
        boot: Boot::Uefi(firmware),
        ..machine()
    };
    let line = machine.command(&run_dir, Sockets::Made).expect("a machine");
    assert_eq!(value(&line, "-machine"), "q35,pflash0=code,pflash1=vars");
    let flash = line.values_of("-blockdev");
    assert_eq!(
        flash[0],
        "driver=file,node-name=code,filename=/fw/CODE.fd,read-only=on"
    );
    let vars = run_dir.vars().display().to_string().replace(',', ",,");
    assert_eq!(
        flash[1],
        format!("driver=file,node-name=vars,filename={vars}").as_str()
    );
}

#[test]
fn cache_modes_are_what_they_say() {
    for (cache, direct, no_flush, write_cache) in [
        (Cache::Writeback, "off", "off", "on"),
        (Cache::Unsafe, "off", "on", "on"),
        (Cache::Directsync, "on", "off", "off"),
    ] {
        let mut machine = machine();
        machine.disks.push(Disk {
            cache,
            ..Disk::new("/d,x.qcow2", Format::Qcow2)
        });
        let line = command(&machine);
        let file = value(&line, "-blockdev");
        assert!(file.contains("driver=qcow2"), "{file}");
        assert!(file.contains("file.filename=/d,,x.qcow2"), "{file}");
        assert!(
            file.contains(&format!(",cache.direct={direct},cache.no-flush={no_flush}")),
            "{file}"
        );
        let device = value(&line, "-device");
        assert!(
            device.contains(&format!("drive=disk0,write-cache={write_cache}")),
            "{device}"
        );
        assert!(device.contains("bootindex=0"), "{device}");
    }
}

#[test]
fn a_log_of_writes_is_between_the_guest_and_its_disk() {
    let mut machine = machine();
    machine.disks.push(Disk {
        log: Some("/l,1".into()),
        ..Disk::new("/d.qcow2", Format::Qcow2)
    });
    assert_eq!(
        value(&command(&machine), "-blockdev"),
        "driver=blklogwrites,cache.direct=off,cache.no-flush=off,discard=unmap,\
         file.driver=qcow2,file.file.driver=file,file.file.filename=/d.qcow2,\
         file.cache.direct=off,file.cache.no-flush=off,file.discard=unmap,\
         file.file.cache.direct=off,file.file.cache.no-flush=off,file.file.discard=unmap,\
         log.driver=file,log.filename=/l,,1,log.cache.no-flush=on,log-sector-size=512,\
         log-super-update-interval=1,node-name=disk0"
    );
}

#[test]
fn ports_are_forwarded_from_this_host_only() {
    let user = UserNetwork {
        restricted: true,
        forwards: vec![
            Forward::any(7835),
            Forward {
                guest: 7836,
                host: 17836,
            },
        ],
    };
    let mut machine = machine();
    machine.nics = vec![
        Nic {
            mac: Mac::of_machine(1),
            link: Link::User(user),
        },
        Nic {
            mac: Mac::of_machine(2),
            link: Link::Unplugged,
        },
    ];
    let line = command(&machine);
    assert_eq!(
        line.values_of("-netdev"),
        [
            "user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:0-:7835,hostfwd=tcp:127.0.0.1:17836-:7836"
        ]
    );
    let cards = line.values_of("-device");
    assert_eq!(
        cards[0],
        "virtio-net-pci,mac=52:54:00:48:00:01,romfile=,netdev=net0"
    );
    assert_eq!(cards[1], "virtio-net-pci,mac=52:54:00:48:00:02,romfile=");
}

#[test]
fn each_disk_bus_has_its_devices() {
    let devices = |bus| {
        let mut machine = Machine {
            disk_bus: bus,
            ..machine()
        };
        machine.disks.push(Disk::new("/d", Format::Raw));
        let line = command(&machine);
        let devices = line.values_of("-device");
        let devices = devices.iter().map(|device| device.to_string_lossy());
        devices
            .take_while(|device| device != "virtio-rng-pci")
            .map(std::borrow::Cow::into_owned)
            .collect::<Vec<_>>()
    };
    let disk = "id=disk0-device,drive=disk0,write-cache=on,bootindex=0";
    for (bus, wanted) in [
        (DiskBus::Nvme, vec![format!("nvme,serial=disk0,{disk}")]),
        (DiskBus::Ahci, vec![format!("ide-hd,bus=ide.0,{disk}")]),
        (
            DiskBus::Pvscsi,
            vec![
                "pvscsi,id=scsi".into(),
                format!("scsi-hd,bus=scsi.0,{disk}"),
            ],
        ),
        (
            DiskBus::Usb,
            vec![
                "qemu-xhci,id=usb".into(),
                format!("usb-storage,bus=usb.0,{disk}"),
            ],
        ),
        (
            DiskBus::Sdhci,
            vec![
                "sdhci-pci,id=sd".into(),
                "sd-card,bus=sd-bus,id=disk0-device,drive=disk0".into(),
            ],
        ),
    ] {
        assert_eq!(devices(bus), wanted);
    }
}

#[test]
fn media_are_booted_before_disks() {
    let mut machine = machine();
    machine.disks.push(Disk::new("/d", Format::Raw));
    machine.media = [(MediumKind::Stick, "/stick"), (MediumKind::Disc, "/disc")]
        .map(|(kind, path)| Medium {
            path: path.into(),
            kind,
        })
        .into();
    let line = command(&machine).to_string();
    for part in [
        "virtio-blk-pci,id=disk0-device,drive=disk0,write-cache=on,bootindex=2",
        "qemu-xhci,id=media0",
        "usb-storage,bus=media0.0,removable=on,drive=medium0,bootindex=0",
        "ide-cd,bus=ide.4,drive=medium1,bootindex=1",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(line.contains("node-name=medium1,read-only=on"), "{line}");
}

/// On a machine without virtio, nothing else is one either.
#[test]
fn a_machine_can_be_without_virtio() {
    let mut machine = Machine {
        disk_bus: DiskBus::Nvme,
        card: Card::E1000e,
        rng: false,
        ..machine()
    };
    machine.disks.push(Disk::new("/d", Format::Raw));
    machine.nics.push(Nic {
        mac: Mac::of_machine(1),
        link: Link::User(UserNetwork::default()),
    });
    let line = command(&machine).to_string();
    assert!(!line.contains("virtio"), "{line}");
    assert!(line.contains("e1000e,mac=52:54:00:48:00:01,romfile=,netdev=net0"));
}

#[test]
fn a_legacy_card_is_not_driven_as_a_modern_one() {
    let mut machine = Machine {
        card: Card::VirtioLegacy,
        ..machine()
    };
    machine.nics.push(Nic {
        mac: Mac::of_machine(1),
        link: Link::Unplugged,
    });
    let card = value(&command(&machine), "-device");
    assert!(
        card.starts_with("virtio-net-pci,disable-modern=on,disable-legacy=off,"),
        "{card}"
    );
}

#[test]
fn a_switch_is_reached_by_a_name_in_the_machines_folder() {
    let mut machine = machine();
    machine.nics = vec![
        Nic {
            mac: Mac::of_machine(1),
            link: Link::Unplugged,
        },
        Nic {
            mac: Mac::of_machine(2),
            link: Link::Switch {
                socket: format!("/{}/port,a.sock", "x".repeat(200)).into(),
            },
        },
    ];
    let line = command(&machine);
    assert_eq!(
        line.values_of("-netdev"),
        ["stream,id=net1,server=off,addr.type=unix,addr.path=net1.sock"]
    );
    assert_eq!(
        line.values_of("-device")[1],
        "virtio-net-pci,mac=52:54:00:48:00:02,romfile=,netdev=net1"
    );
}

#[test]
fn the_smbios_table_has_a_system_and_strings_that_nobody_reads() {
    let mut machine = machine();
    machine.smbios = Smbios {
        system: Some(System {
            vendor: "Amazon EC2".to_owned(),
            product: "m7i,large".to_owned(),
        }),
        oem_strings: ["first=secret", "second"]
            .map(|text| OemString(text.to_owned()))
            .into(),
    };
    let line = command(&machine);
    let items = line.values_of("-smbios");
    assert_eq!(
        items[0],
        "type=1,manufacturer=Amazon EC2,product=m7i,,large"
    );
    for (number, item) in items[1..].iter().enumerate() {
        let item = item.to_string_lossy();
        assert!(item.starts_with("type=11,path="), "{item}");
        assert!(
            item.ends_with(&format!("/a,,b/smbios-{number}.txt")),
            "{item}"
        );
    }
    assert!(!line.to_string().contains("secret"));
    assert!(!format!("{machine:?}").contains("secret"));
    machine.smbios.oem_strings.push(OemString(String::new()));
    let error = machine.check().expect_err("an empty string");
    assert!(error.to_string().contains("smbios.oem_strings"), "{error}");
}

#[test]
fn bytes_go_through_a_file_and_never_the_command_line() {
    let mut machine = machine();
    machine.fw_cfg = vec![
        Item::text("opt/a", "x,y").expect("a name"),
        Item::bytes("opt/b", *b"secret").expect("a name"),
        Item::file("opt/c", "/some/file").expect("a name"),
    ];
    let line = command(&machine);
    let items = line.values_of("-fw_cfg");
    assert_eq!(items[0], "name=opt/a,string=x,,y");
    assert!(
        items[1].to_string_lossy().ends_with("/a,,b/fw_cfg-1.bin"),
        "{items:?}"
    );
    assert_eq!(items[2], "name=opt/c,file=/some/file");
    assert!(!line.to_string().contains("secret"));
}

#[test]
fn sockets_are_inherited_or_made() {
    let (_folder, run_dir) = run_dir();
    let inherited = Sockets::Inherited {
        qmp: 11,
        control: 12,
    };
    let line = machine().command(&run_dir, inherited).expect("a machine");
    let ends = line.values_of("-chardev");
    assert!(
        ends.contains(&"socket,fd=11,id=qmp,server=on,wait=off".as_ref()),
        "{ends:?}"
    );
    assert!(
        ends.contains(&"socket,fd=12,id=control,server=on,wait=off".as_ref()),
        "{ends:?}"
    );
    let line = command(&machine());
    let ends = line.values_of("-chardev");
    assert!(
        ends.contains(&"socket,path=qmp.sock,id=qmp,server=on,wait=off".as_ref()),
        "{ends:?}"
    );
}

#[test]
fn the_rest_is_where_it_was_asked_for() {
    let line = command(&Machine {
        watchdog: WatchdogAction::Pause,
        rtc: Rtc::From("2038-01-19T03:14:00".into()),
        on_reset: OnReset::Exit,
        rng: false,
        tpm: Some(TpmInterface::Crb),
        ..machine()
    });
    assert_eq!(value(&line, "-action"), "watchdog=pause");
    assert_eq!(value(&line, "-rtc"), "base=2038-01-19T03:14:00");
    assert!(line.args().iter().any(|arg| arg == "-no-reboot"));
    let devices = line.values_of("-device");
    assert!(
        devices.contains(&"tpm-crb,tpmdev=tpm0".as_ref()),
        "{devices:?}"
    );
    assert!(!devices.contains(&"virtio-rng-pci".as_ref()), "{devices:?}");
    let ends = line.values_of("-chardev");
    assert!(
        ends.contains(&"socket,id=tpm,path=tpm.sock".as_ref()),
        "{ends:?}"
    );
    let line = command(&machine());
    assert!(!line.args().iter().any(|arg| arg == "-no-reboot"));
    assert!(
        line.values_of("-device")
            .contains(&"virtio-rng-pci".as_ref())
    );
}

#[test]
fn what_qemu_would_not_take_is_refused_by_field() {
    for (machine, words) in [
        (Machine::new("", Accel::Tcg), "'-', got \"\""),
        (Machine::new("a/b", Accel::Tcg), "expected 1 to 32 of a-z"),
        (
            Machine {
                cpus: 0,
                ..machine()
            },
            "cpus: expected 1 to 64, got 0",
        ),
        (
            Machine {
                memory_mib: 63,
                ..machine()
            },
            "memory_mib: expected at least 64, got 63",
        ),
        (
            Machine {
                rtc: Rtc::From("now".into()),
                ..machine()
            },
            "rtc: expected a date",
        ),
    ] {
        let error = refused(&machine);
        assert!(error.contains(words), "{error}");
    }
    let uefi = Boot::Uefi(Firmware {
        code: "/code".into(),
        vars: "/vars".into(),
    });
    let sd_card = Machine {
        disk_bus: DiskBus::Sdhci,
        disks: vec![Disk::new("/d", Format::Raw); 2],
        ..machine()
    };
    assert!(refused(&sd_card).contains("disks: expected one, because it is an SD card, got 2"));
    let by_firmware = Machine {
        boot: uefi,
        disk_bus: DiskBus::Megasas,
        ..machine()
    };
    assert!(refused(&by_firmware).contains("disk_bus: expected a controller that OVMF"));
    let append = "x".repeat(2048);
    let boot = Boot::Direct {
        kernel: "/k".into(),
        initrd: None,
        append,
    };
    assert!(refused(&Machine { boot, ..machine() }).contains("at most 2047 bytes"));

    let item = |text: &str| Item::text("opt/a", text).expect("a name");
    let twice = Machine {
        fw_cfg: vec![item("x"), item("y")],
        ..machine()
    };
    assert!(refused(&twice).contains("expected unique names, got \"opt/a\""));
    let empty = Machine {
        fw_cfg: vec![item("")],
        ..machine()
    };
    assert!(refused(&empty).contains("non-empty text"));

    let link = Link::User(UserNetwork {
        restricted: false,
        forwards: vec![Forward::any(0)],
    });
    let nics = vec![Nic {
        mac: Mac::of_machine(0),
        link,
    }];
    assert!(refused(&Machine { nics, ..machine() }).contains("forward of guest port 0"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any path remains one value of one option: parsing it by QEMU's rules (an undoubled comma ends a value) returns
    /// it.
    #[test]
    fn paths_of_any_kind_stay_whole(name in "[ -~]{1,20}") {
        // The letter prevents the names "." and "..", which are other paths.
        let path = Path::new("/x").join(format!("n{}", name.replace('/', "_")));
        let mut machine = machine();
        machine.disks.push(Disk::new(&path, Format::Raw));
        let line = command(&machine);
        let text = value(&line, "-blockdev").replace(",,", "\0");
        let read = text
            .split(',')
            .find_map(|option| option.strip_prefix("file.filename="))
            .map(|value| value.replace('\0', ","));
        prop_assert_eq!(read.as_deref(), path.to_str());
    }
}
