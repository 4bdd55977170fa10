//! The mounts that every node has, and a typed wrapper around mounting.
//!
//! [`bring_up`] is idempotent: what is mounted already, with the right type,
//! stays. What the machine does not have (EFI variables, a persistent store)
//! is left out and told. Every mount has the flags that its content allows:
//! nothing but devtmpfs and devpts may hold devices, no set-user-id bit ever
//! works, and programs run from nowhere that holds data of others.

use std::{
    ffi::{CStr, CString},
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, StatxAttributes, StatxFlags},
    io::Errno,
    mount::UnmountFlags,
};

pub use rustix::mount::MountFlags;

/// Why something was not mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The place to mount on could not be made or looked at.
    #[error("cannot {step} {target}")]
    Target {
        /// The step, as a verb.
        step: &'static str,
        /// The place.
        target: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel refused to mount.
    #[error("cannot mount {source_name} ({kind}) on {target}")]
    Mount {
        /// What was to be mounted.
        source_name: PathBuf,
        /// The file system's type.
        kind: String,
        /// The place.
        target: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Something of another type is mounted there already.
    #[error("{target} is already a mount point of another file system (magic {found:#x})")]
    Occupied {
        /// The place.
        target: PathBuf,
        /// The type found there, as in statfs(2).
        found: u64,
    },
    /// The kernel refused to unmount.
    #[error("cannot unmount {target}")]
    Unmount {
        /// The place.
        target: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// What [`bring_up`] did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BroughtUp {
    /// Places now mounted that were not.
    pub mounted: Vec<PathBuf>,
    /// Places left out, each with the reason.
    pub left_out: Vec<(PathBuf, &'static str)>,
}

/// One entry of the table.
struct Entry {
    target: &'static str,
    kind: &'static CStr,
    /// The type as statfs(2) tells it.
    magic: u64,
    flags: MountFlags,
    data: &'static CStr,
    presence: Presence,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// A node does not start without it.
    Needed,
    /// Mounted only if the kernel shows its place.
    IfPresent,
}

const TMPFS: u64 = 0x0102_1994;

const fn entry(
    target: &'static str,
    kind: &'static CStr,
    magic: u64,
    flags: MountFlags,
    data: &'static CStr,
) -> Entry {
    Entry {
        target,
        kind,
        magic,
        flags,
        data,
        presence: Presence::Needed,
    }
}

const fn if_present(entry: Entry) -> Entry {
    Entry {
        presence: Presence::IfPresent,
        ..entry
    }
}

/// The mounts of every node, in order.
fn table() -> [Entry; 11] {
    let nosuid = MountFlags::NOSUID;
    let nodev = nosuid | MountFlags::NODEV;
    let noexec = nodev | MountFlags::NOEXEC;
    let devices = nosuid | MountFlags::NOEXEC;
    [
        entry("proc", c"proc", 0x9fa0, noexec, c""),
        entry("sys", c"sysfs", 0x6265_6572, noexec, c""),
        entry("dev", c"devtmpfs", TMPFS, devices, c"mode=0755"),
        entry(
            "dev/pts",
            c"devpts",
            0x1cd1,
            devices,
            c"mode=0620,ptmxmode=0666",
        ),
        entry("dev/shm", c"tmpfs", TMPFS, noexec, c"mode=1777"),
        entry(
            "sys/fs/cgroup",
            c"cgroup2",
            0x6367_7270,
            noexec,
            c"nsdelegate,memory_recursiveprot",
        ),
        if_present(entry(
            "sys/firmware/efi/efivars",
            c"efivarfs",
            0xde5e_81e4,
            noexec,
            c"",
        )),
        if_present(entry("sys/fs/pstore", c"pstore", 0x6165_676c, noexec, c"")),
        // Containers' root file systems live below it, so programs may run.
        entry("ephemeral", c"tmpfs", TMPFS, nodev, c"mode=0700"),
        entry("tmp", c"tmpfs", TMPFS, noexec, c"mode=1777"),
        entry("run", c"tmpfs", TMPFS, nodev, c"mode=0755"),
    ]
}

/// Mounts what every node needs, under `/`.
pub fn bring_up() -> Result<BroughtUp, MountError> {
    bring_up_under(Path::new("/"))
}

/// The same under another root, which must exist.
pub fn bring_up_under(root: &Path) -> Result<BroughtUp, MountError> {
    let mut done = BroughtUp::default();
    for entry in table() {
        let target = root.join(entry.target);
        match entry.bring_up(&target)? {
            Outcome::Mounted => done.mounted.push(target),
            Outcome::There => {}
            Outcome::LeftOut(why) => done.left_out.push((target, why)),
        }
    }
    Ok(done)
}

enum Outcome {
    Mounted,
    There,
    LeftOut(&'static str),
}

impl Entry {
    fn bring_up(&self, target: &Path) -> Result<Outcome, MountError> {
        if self.presence == Presence::IfPresent && !target.is_dir() {
            return Ok(Outcome::LeftOut("the machine has none"));
        }
        make_directory(target)?;
        if is_mount_point(target)? {
            let found = type_of(target)?;
            return if found == self.magic {
                Ok(Outcome::There)
            } else {
                Err(MountError::Occupied {
                    target: target.to_owned(),
                    found,
                })
            };
        }
        let result = rustix::mount::mount(self.kind, target, self.kind, self.flags, self.data);
        match result {
            Ok(()) => Ok(Outcome::Mounted),
            // The kernel shows the place and has not been built with the type.
            Err(Errno::NODEV) if self.presence == Presence::IfPresent => {
                Ok(Outcome::LeftOut("the kernel does not know this type"))
            }
            // The firmware offers no variables at run time.
            Err(Errno::OPNOTSUPP) if self.presence == Presence::IfPresent => {
                Ok(Outcome::LeftOut("the firmware does not support it"))
            }
            Err(errno) => Err(refused(self.kind, target, self.kind, errno)),
        }
    }
}

/// Mounts a file system of a device. `data` is for the file system's own
/// options, comma-separated. The place is made if it is missing.
pub fn mount(
    device: &Path,
    target: &Path,
    kind: &str,
    flags: MountFlags,
    data: &str,
) -> Result<(), MountError> {
    make_directory(target)?;
    let invalid = |_| MountError::Mount {
        source_name: device.to_owned(),
        kind: kind.to_owned(),
        target: target.to_owned(),
        source: io::ErrorKind::InvalidInput.into(),
    };
    let c_kind = CString::new(kind).map_err(invalid)?;
    let c_data = CString::new(data).map_err(invalid)?;
    rustix::mount::mount(device, target, c_kind.as_c_str(), flags, c_data.as_c_str()).map_err(
        |errno| MountError::Mount {
            source_name: device.to_owned(),
            kind: kind.to_owned(),
            target: target.to_owned(),
            source: errno.into(),
        },
    )
}

/// Unmounts what is mounted at a place. Nothing there is fine.
///
/// Fails while it is in use; everything written has then not been lost, and
/// the caller can try again.
pub fn unmount(target: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => Err(MountError::Unmount {
            target: target.to_owned(),
            source: errno.into(),
        }),
    }
}

/// Makes a mount read-only, which also writes out what it holds. For the way
/// down, when somebody still uses it.
pub fn remount_read_only(target: &Path) -> Result<(), MountError> {
    rustix::mount::mount_remount(target, MountFlags::RDONLY, c"").map_err(|errno| {
        MountError::Target {
            step: "make read-only",
            target: target.to_owned(),
            source: errno.into(),
        }
    })
}

/// Whether a file system is mounted exactly here.
pub fn is_mount_point(path: &Path) -> Result<bool, MountError> {
    let status = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS);
    let status = status.map_err(|errno| MountError::Target {
        step: "look at",
        target: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

fn type_of(path: &Path) -> Result<u64, MountError> {
    let status = rustix::fs::statfs(path).map_err(|errno| MountError::Target {
        step: "find the file system of",
        target: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(status.f_type as u64)
}

fn make_directory(target: &Path) -> Result<(), MountError> {
    fs::create_dir_all(target).map_err(|source| MountError::Target {
        step: "make the directory",
        target: target.to_owned(),
        source,
    })
}

fn refused(source_name: &CStr, target: &Path, kind: &CStr, errno: Errno) -> MountError {
    let text = kind.to_string_lossy().into_owned();
    MountError::Mount {
        source_name: source_name.to_string_lossy().into_owned().into(),
        kind: text,
        target: target.to_owned(),
        source: errno.into(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Runs in a thread with mounts of its own; false if that is not allowed.
    pub(crate) fn with_own_mounts(test: impl FnOnce() + Send) -> bool {
        let run = || {
            use nix::sched::{CloneFlags, unshare};
            if unshare(CloneFlags::CLONE_NEWNS).is_err() {
                return false;
            }
            rustix::mount::mount_change(
                "/",
                rustix::mount::MountPropagationFlags::PRIVATE
                    | rustix::mount::MountPropagationFlags::REC,
            )
            .unwrap();
            test();
            true
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    #[test]
    fn a_mount_is_made_seen_and_undone() {
        let done = with_own_mounts(|| {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("made/for/it");
            mount(
                Path::new("tmpfs"),
                &target,
                "tmpfs",
                MountFlags::NOEXEC,
                "size=1m",
            )
            .unwrap();
            assert!(is_mount_point(&target).unwrap());
            assert_eq!(type_of(&target).unwrap(), TMPFS);
            remount_read_only(&target).unwrap();
            assert!(fs::write(target.join("f"), b"x").is_err());
            unmount(&target).unwrap();
            unmount(&target).unwrap();
            assert!(!is_mount_point(&target).unwrap());
        });
        if !done {
            eprintln!("skipped: this needs the right to make mounts");
        }
    }

    #[test]
    fn an_entry_is_mounted_once_and_nothing_else_is_taken_for_it() {
        let done = with_own_mounts(|| {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("shm");
            let shm = entry("shm", c"tmpfs", TMPFS, MountFlags::NODEV, c"mode=1777");
            assert!(matches!(shm.bring_up(&target).unwrap(), Outcome::Mounted));
            assert!(matches!(shm.bring_up(&target).unwrap(), Outcome::There));
            let proc = entry("shm", c"proc", 0x9fa0, MountFlags::NODEV, c"");
            let error = proc.bring_up(&target).err().unwrap();
            assert!(matches!(error, MountError::Occupied { .. }), "{error}");
            unmount(&target).unwrap();
        });
        if !done {
            eprintln!("skipped: this needs the right to make mounts");
        }
    }

    #[test]
    fn what_the_machine_lacks_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let absent = if_present(entry("x", c"efivarfs", 1, MountFlags::NODEV, c""));
        let outcome = absent.bring_up(&dir.path().join("no/such")).unwrap();
        assert!(matches!(outcome, Outcome::LeftOut(_)));
    }

    #[test]
    fn a_refusal_names_everything() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("t");
        let error = mount(
            Path::new("/dev/no-such-device"),
            &target,
            "no-such-type",
            MountFlags::empty(),
            "",
        )
        .unwrap_err()
        .to_string();
        for word in ["no-such-device", "no-such-type", "/t"] {
            assert!(error.contains(word), "{error}");
        }
    }
}
