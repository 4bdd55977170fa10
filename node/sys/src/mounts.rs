//! The mounts that every node has, and a typed wrapper for mounting.
//!
//! [`bring_up`] is idempotent: existing mounts of the right type are kept. File systems that the
//! machine does not support (EFI variables, pstore) are skipped and reported. Every mount has the
//! strictest flags that its content allows: only devtmpfs and devpts may contain devices,
//! set-user-ID bits have no effect anywhere, and programs cannot be executed from file systems with
//! data of others.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

pub use rustix::mount::MountFlags;

/// Why something cannot be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The mount point cannot be created or inspected.
    #[error("cannot {step} {target}")]
    Target {
        /// The operation, as a verb.
        step: &'static str,
        /// The mount point.
        target: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The kernel rejected the mount.
    #[error("cannot mount {source_name} ({kind}) on {target}")]
    Mount {
        /// The source of the mount.
        source_name: PathBuf,
        /// The file system type.
        kind: String,
        /// The mount point.
        target: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A file system of another type is already mounted there.
    #[error("another file system is already mounted on {target} (magic {found:#x})")]
    Occupied {
        /// The mount point.
        target: PathBuf,
        /// The type of the mounted file system, as in statfs(2).
        found: u64,
    },
    /// The kernel rejected the unmount.
    #[error("cannot unmount {target}")]
    Unmount {
        /// The mount point.
        target: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// The result of [`bring_up`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BroughtUp {
    /// The new mount points.
    pub mounted: Vec<PathBuf>,
    /// The skipped mount points, with the reasons.
    pub left_out: Vec<(PathBuf, &'static str)>,
}

/// An entry of the mount list.
struct Entry {
    target: &'static str,
    kind: &'static CStr,
    /// The type in statfs(2).
    magic: u64,
    flags: MountFlags,
    data: &'static CStr,
    presence: Presence,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// Required: a node does not start without it.
    Needed,
    /// Mounted only if the kernel exposes its mount point.
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
fn table() -> [Entry; 12] {
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
        // Has the firmware's event log.
        if_present(entry(
            "sys/kernel/security",
            c"securityfs",
            0x7363_6673,
            noexec,
            c"",
        )),
        // Contains the root file systems of containers, so execution is allowed.
        entry("ephemeral", c"tmpfs", TMPFS, nodev, c"mode=0700"),
        entry("tmp", c"tmpfs", TMPFS, noexec, c"mode=1777"),
        entry("run", c"tmpfs", TMPFS, nodev, c"mode=0755"),
    ]
}

/// Mounts everything that a node needs, under `/`.
pub fn bring_up() -> Result<BroughtUp, MountError> {
    bring_up_under(Path::new("/"))
}

/// The same under another root directory, which must exist.
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
            return Ok(Outcome::LeftOut("not available on this machine"));
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
            // The kernel exposes the mount point, but was built without the file system.
            Err(Errno::NODEV) if self.presence == Presence::IfPresent => {
                Ok(Outcome::LeftOut("not supported by the kernel"))
            }
            // The firmware offers no variables at run time.
            Err(Errno::OPNOTSUPP) if self.presence == Presence::IfPresent => {
                Ok(Outcome::LeftOut("not supported by the firmware"))
            }
            Err(errno) => Err(refused(self.kind, target, self.kind, errno)),
        }
    }
}

/// Mounts the file system of a device. `data` contains the file system's own options,
/// comma-separated. The mount point is created if it is missing.
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

/// Unmounts the file system at `target`. Succeeds if nothing is mounted there.
///
/// Fails while it is in use; no data is lost then, and the caller can try again.
pub fn unmount(target: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => Err(MountError::Unmount {
            target: target.to_owned(),
            source: errno.into(),
        }),
    }
}

/// Remounts a file system read-only, which also writes back its data. For the shutdown, if it is
/// still in use.
pub fn remount_read_only(target: &Path) -> Result<(), MountError> {
    rustix::mount::mount_remount(target, MountFlags::RDONLY, c"").map_err(|errno| {
        MountError::Target {
            step: "make read-only",
            target: target.to_owned(),
            source: errno.into(),
        }
    })
}

/// Whether `path` is a mount point.
pub fn is_mount_point(path: &Path) -> Result<bool, MountError> {
    let status = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS);
    let status = status.map_err(|errno| MountError::Target {
        step: "stat",
        target: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

fn type_of(path: &Path) -> Result<u64, MountError> {
    let status = rustix::fs::statfs(path).map_err(|errno| MountError::Target {
        step: "get the file system type of",
        target: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(status.f_type as u64)
}

fn make_directory(target: &Path) -> Result<(), MountError> {
    fs::create_dir_all(target).map_err(|source| MountError::Target {
        step: "create the directory",
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

    /// Runs the test in a thread with its own mount namespace; false if that is not permitted.
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
            eprintln!("skipped: mounting is not permitted");
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
            eprintln!("skipped: mounting is not permitted");
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
