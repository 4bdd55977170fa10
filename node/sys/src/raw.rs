//! System calls without a safe wrapper: the only module with `unsafe`.
//!
//! Each function has safe argument and result types and states why its unsafe block is sound. There
//! is no logic here; numbers and layouts are those of the kernel.
#![allow(
    unsafe_code,
    reason = "ioctls, quotas, a packet socket, watched descriptors, fork and code between fork and exec have no safe wrapper"
)]

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{io, mem};

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::{Gid, Uid};
use rustix::thread::UnshareFlags;
use seccompiler::BpfProgram;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A non-blocking descriptor that is registered with the runtime.
#[derive(Debug)]
pub(super) struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    /// Registers a descriptor, which must be non-blocking. Must be called within a tokio runtime.
    pub(super) fn new(descriptor: impl Into<OwnedFd>) -> io::Result<Self> {
        let descriptor = descriptor.into();
        // SAFETY: the descriptor is owned, and so is open; this type offers no way to close or
        // replace it while it is registered.
        let watched = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
        Ok(Self(watched.map_err(io::Error::from)?))
    }

    /// Reads available data, or waits for it. From a socket it reads one datagram. Cancel safe.
    pub(super) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            let read = ready.try_io(|descriptor| Ok(rustix::io::read(descriptor, &mut *buffer)?));
            if let Ok(result) = read {
                return result;
            }
        }
    }

    /// Drops what can be read at once, a datagram of a socket; false if there is nothing.
    pub(super) fn discard(&self) -> bool {
        rustix::io::read(self.0.get_ref(), &mut [0_u8; 1]).is_ok()
    }

    /// Waits until there is something to read.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await.map(drop)
    }

    /// Writes at once or not at all.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0.get_ref(), bytes)?)
    }
}

/// Converts -1 into the error of the call.
fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// The length of the kernel's `struct dm_ioctl`, with which each buffer begins.
pub(super) const DM_HEADER: usize = 312;

/// Sends a device-mapper command, numbered as in the kernel's `dm-ioctl.h`. The answer replaces the
/// content of `buffer`.
pub(super) fn device_mapper(
    control: BorrowedFd<'_>,
    command: u8,
    buffer: &mut [u8],
) -> io::Result<()> {
    assert!(
        buffer.len() >= DM_HEADER,
        "the buffer is shorter than the header"
    );
    // The kernel reads and writes as many bytes as the buffer's header says, so that must not
    // exceed the buffer.
    let length = buffer.len() as u32;
    buffer[12..16].copy_from_slice(&length.to_ne_bytes());
    // _IOWR(0xfd, command, struct dm_ioctl)
    let request = 3 << 30 | (DM_HEADER as libc::c_ulong) << 16 | 0xfd << 8 | u64::from(command);
    // SAFETY: the buffer is valid for reads and writes of its length, which is the value of its
    // data_size field (set above), and the kernel accesses no more than that.
    checked(unsafe { libc::ioctl(control.as_raw_fd(), request, buffer.as_mut_ptr()) })?;
    Ok(())
}

/// A change of the kernel's view of a partition, numbered as in <linux/blkpg.h>.
#[derive(Clone, Copy, Debug)]
pub(super) enum PartitionChange {
    /// It appears.
    Add = 1,
    /// It disappears; it must not be in use.
    Remove = 2,
    /// It has another length; it may be in use.
    Resize = 3,
}

/// Changes the kernel's view of a partition, in bytes.
pub(super) fn change_partition(
    disk: impl AsFd,
    change: PartitionChange,
    number: u32,
    start: u64,
    length: u64,
) -> io::Result<()> {
    #[repr(C)]
    struct BlkpgPartition {
        start: i64,
        length: i64,
        number: libc::c_int,
        names: [u8; 128],
    }
    #[repr(C)]
    struct BlkpgArgument {
        operation: libc::c_int,
        flags: libc::c_int,
        length: libc::c_int,
        data: *mut BlkpgPartition,
    }
    const BLKPG: libc::c_ulong = 0x1269;
    let out_of_range = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let mut partition = BlkpgPartition {
        start: start.try_into().map_err(out_of_range)?,
        length: length.try_into().map_err(out_of_range)?,
        number: number.try_into().map_err(out_of_range)?,
        names: [0; 128],
    };
    let mut argument = BlkpgArgument {
        operation: change as libc::c_int,
        flags: 0,
        length: mem::size_of::<BlkpgPartition>() as libc::c_int,
        data: &mut partition,
    };
    // SAFETY: both structures have the layout of <linux/blkpg.h> and outlive
    // the call, which only reads them.
    checked(unsafe { libc::ioctl(disk.as_fd().as_raw_fd(), BLKPG, &mut argument) })?;
    Ok(())
}

/// Makes the kernel read the partition table of a disk again.
pub(super) fn reread_partitions(disk: impl AsFd) -> io::Result<()> {
    const BLKRRPART: libc::c_ulong = 0x125f;
    // SAFETY: this command has no argument.
    checked(unsafe { libc::ioctl(disk.as_fd().as_raw_fd(), BLKRRPART) })?;
    Ok(())
}

/// Sets the timeout of a watchdog in seconds; returns the one that the device uses.
pub(super) fn watchdog_timeout(watchdog: impl AsFd, seconds: u32) -> io::Result<u32> {
    // _IOWR('W', 6, int)
    const WDIOC_SETTIMEOUT: libc::c_ulong = 3 << 30 | 4 << 16 | (b'W' as libc::c_ulong) << 8 | 6;
    let mut value: libc::c_int = seconds
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the call reads and writes only the int, which outlives it.
    checked(unsafe { libc::ioctl(watchdog.as_fd().as_raw_fd(), WDIOC_SETTIMEOUT, &mut value) })?;
    Ok(value.max(0) as u32)
}

/// An instruction of a classic packet filter: code, jumps, operand.
pub(super) type FilterStep = (u16, u8, u8, u32);

/// Opens a non-blocking socket that sends and receives whole Ethernet frames of one protocol on one
/// interface, and receives only those that the filter accepts.
pub(super) fn packet_socket(
    interface: u32,
    protocol: u16,
    filter: &[FilterStep],
) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // Protocol 0: nothing is received before filter and interface are set.
    // SAFETY: takes no pointers.
    let fd = checked(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
    // SAFETY: the descriptor has just been opened and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    attach_filter(socket.as_fd(), filter)?;
    // SAFETY: sockaddr_ll consists of integers, for which zero is valid.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = interface
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the pointer is to a sockaddr_ll that outlives the call, and the length is its size.
    checked(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            mem::size_of_val(&address) as libc::socklen_t,
        )
    })?;
    Ok(socket)
}

fn attach_filter(socket: BorrowedFd<'_>, filter: &[FilterStep]) -> io::Result<()> {
    let mut steps: Vec<libc::sock_filter> = filter
        .iter()
        .map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k })
        .collect();
    let program = libc::sock_fprog {
        len: steps
            .len()
            .try_into()
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: the program points to as many instructions as it says; both outlive the call, which
    // copies them.
    checked(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            mem::size_of_val(&program) as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// Makes the command's process lead a session of its own, and be killed when the thread that
/// started it ends.
pub(super) fn own_session_and_die_with_parent(command: &mut tokio::process::Command) {
    let parent = rustix::process::getpid();
    let prepare = move || {
        // The setting is kept across exec. Both calls are async-signal-safe and do not allocate.
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The parent may have died before the call above.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        rustix::process::setsid()?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls; it takes no locks, does
    // not allocate, and accesses no memory except its own copy of the parent's ID.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Forks this process, which must have one thread; otherwise fails with EINVAL. Returns the child's ID in the parent, and
/// nothing in the child.
pub(super) fn fork() -> io::Result<Option<libc::pid_t>> {
    // SAFETY: this changes nothing. It fails if there are other threads.
    checked(unsafe { libc::unshare(libc::CLONE_THREAD) })?;
    // SAFETY: there is no other thread that could hold a lock or change memory, so the child continues from the same state.
    match checked(unsafe { libc::fork() })? {
        0 => Ok(None),
        child => Ok(Some(child)),
    }
}

/// Sets the nice value (-20 to 19) of the command's process, which its children inherit.
pub(super) fn nice(command: &mut tokio::process::Command, niceness: i8) {
    let prepare = move || Ok(rustix::process::setpriority_process(None, niceness.into())?);
    // SAFETY: between fork and exec the closure makes one system call; it takes no locks and does
    // not allocate.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Confines the command's process: see [`super::confine`]. Must be called before
/// [`own_session_and_die_with_parent`], whose setting is lost when the user changes.
pub(super) fn confine(
    command: &mut tokio::process::Command,
    user: u32,
    hidden: Vec<CString>,
    filter: BpfProgram,
) {
    let prepare = move || {
        let (nothing, none) = (c"none", None::<&CStr>);
        // SAFETY: no file descriptors are shared or changed by a namespace of mounts.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
        // What is unmounted elsewhere is unmounted here, too: a copy would keep it in use.
        rustix::mount::mount_change(
            c"/",
            MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM,
        )?;
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        for directory in &hidden {
            match rustix::mount::mount(nothing, directory.as_c_str(), c"tmpfs", flags, none) {
                Err(rustix::io::Errno::NOENT) => {}
                mounted => mounted?,
            }
        }
        // The process has one thread.
        let (group, user) = (Gid::from_raw(user), Uid::from_raw(user));
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(group, group, group)?;
        rustix::thread::set_thread_res_uid(user, user, user)?;
        // This sets `no_new_privs` as well.
        seccompiler::apply_filter(&filter).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
    };
    // SAFETY: between fork and exec the closure only makes system calls; it takes no locks and does
    // not allocate, and what it reads was made before.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// The kernel's `struct fsxattr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InodeAttributes {
    pub flags: u32,
    extent_size: u32,
    extents: u32,
    pub project: u32,
    copy_extent_size: u32,
    padding: [u8; 8],
}

const _: () = assert!(mem::size_of::<InodeAttributes>() == 28);

/// Reads the extended attributes of an inode (project, flags).
pub(super) fn inode_attributes(inode: BorrowedFd<'_>) -> io::Result<InodeAttributes> {
    // _IOR('X', 31, struct fsxattr)
    const FS_IOC_FSGETXATTR: libc::c_ulong = 2 << 30 | 28 << 16 | (b'X' as libc::c_ulong) << 8 | 31;
    let mut attributes = InodeAttributes::default();
    // SAFETY: the structure has the layout and, as encoded in the request number, the length of the
    // one in <linux/fs.h>, and outlives the call, which writes integers.
    checked(unsafe { libc::ioctl(inode.as_raw_fd(), FS_IOC_FSGETXATTR, &mut attributes) })?;
    Ok(attributes)
}

/// Sets the extended attributes; all of them, so they must be read first.
pub(super) fn set_inode_attributes(
    inode: BorrowedFd<'_>,
    attributes: &InodeAttributes,
) -> io::Result<()> {
    // _IOW('X', 32, struct fsxattr)
    const FS_IOC_FSSETXATTR: libc::c_ulong = 1 << 30 | 28 << 16 | (b'X' as libc::c_ulong) << 8 | 32;
    // SAFETY: as above; the call only reads.
    checked(unsafe { libc::ioctl(inode.as_raw_fd(), FS_IOC_FSSETXATTR, attributes) })?;
    Ok(())
}

/// The size of an XFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct XfsGeometry {
    /// Bytes in a block.
    pub block_size: u32,
    /// The share of its space that inodes may take, in percent; 0: no limit.
    pub largest_inode_share: u32,
    /// Its number of blocks.
    pub blocks: u64,
}

/// The size of the XFS of this file.
pub(super) fn xfs_geometry(file: BorrowedFd<'_>) -> io::Result<XfsGeometry> {
    // _IOR('X', 100, struct xfs_fsop_geom_v1)
    const XFS_IOC_FSGEOMETRY_V1: libc::c_ulong =
        2 << 30 | 112 << 16 | (b'X' as libc::c_ulong) << 8 | 100;
    let mut geometry = [0_u64; 14];
    // SAFETY: the structure consists of integers, has the length that is encoded in the request
    // number, that of the array, and its alignment; it outlives the call.
    checked(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            XFS_IOC_FSGEOMETRY_V1,
            geometry.as_mut_ptr(),
        )
    })?;
    // Eight integers of 32 bits, the first the block size and the last the share; then the blocks.
    Ok(XfsGeometry {
        block_size: geometry[0] as u32,
        largest_inode_share: (geometry[3] >> 32) as u32,
        blocks: geometry[4],
    })
}

/// Grows the XFS of this file to this number of blocks.
pub(super) fn grow_xfs(file: BorrowedFd<'_>, blocks: u64, inode_share: u32) -> io::Result<()> {
    // _IOW('X', 110, struct xfs_growfs_data)
    const XFS_IOC_FSGROWFSDATA: libc::c_ulong =
        1 << 30 | 16 << 16 | (b'X' as libc::c_ulong) << 8 | 110;
    let wanted = [blocks, u64::from(inode_share)];
    // SAFETY: as above; the structure is an integer of 64 bits and one of 32 bits, padded, and the
    // call only reads it.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), XFS_IOC_FSGROWFSDATA, wanted.as_ptr()) })?;
    Ok(())
}

/// Discards what the file system of this file does not use; returns the number of bytes.
pub(super) fn trim(file: BorrowedFd<'_>) -> io::Result<u64> {
    // _IOWR('X', 121, struct fstrim_range)
    const FITRIM: libc::c_ulong = 3 << 30 | 24 << 16 | (b'X' as libc::c_ulong) << 8 | 121;
    // From the beginning to the end, every extent of at least one byte.
    let mut range = [0, u64::MAX, 0];
    // SAFETY: as above; the structure is three integers of 64 bits, of which the call changes the second.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), FITRIM, range.as_mut_ptr()) })?;
    Ok(range[1])
}

/// Large enough for each of the kernel's quota structures, and aligned for them.
type QuotaBuffer = [u64; 32];
/// The commands of `dqblk_xfs.h`.
const Q_XGETQUOTA: u32 = 3;
const Q_XSETQLIM: u32 = 4;
const Q_XGETQSTAT: u32 = 5;

/// Runs a project quota command on the file system of this file.
fn project_quota(
    file: BorrowedFd<'_>,
    command: u32,
    project: u32,
    buffer: &mut QuotaBuffer,
) -> io::Result<()> {
    const PROJECTS: u32 = 2;
    let command = ((b'X' as u32) << 8 | command) << 8 | PROJECTS;
    // SAFETY: each of the commands above reads or writes one structure of integers, of at most 112
    // bytes and aligned to 8; the buffer is larger, has this alignment, and outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            file.as_raw_fd(),
            command,
            project,
            buffer.as_mut_ptr(),
        )
    };
    checked(result as libc::c_int)?;
    Ok(())
}

/// The keyring of the calling thread.
const THREAD_KEYRING: libc::c_long = -1;

/// Adds a key whose payload only the kernel can read to the keyring of this thread; returns its
/// serial number.
pub(super) fn add_logon_key(description: &CStr, payload: &[u8]) -> io::Result<i32> {
    // SAFETY: both texts are zero-terminated, and the payload is valid for reads of its length; the
    // kernel copies all of them during the call.
    let serial = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            c"logon".as_ptr(),
            description.as_ptr(),
            payload.as_ptr(),
            payload.len(),
            THREAD_KEYRING,
        )
    };
    checked(serial as libc::c_int)
}

/// Removes a key from the keyring of this thread.
pub(super) fn unlink_key(serial: i32) -> io::Result<()> {
    const UNLINK: libc::c_long = 9;
    // SAFETY: only integers are passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            UNLINK,
            libc::c_long::from(serial),
            THREAD_KEYRING,
        )
    };
    checked(result as libc::c_int).map(drop)
}

/// The flags of `struct fs_quota_stat`.
pub(super) fn quota_state(file: BorrowedFd<'_>) -> io::Result<u16> {
    let mut buffer = QuotaBuffer::default();
    project_quota(file, Q_XGETQSTAT, 0, &mut buffer)?;
    // The third and the fourth byte.
    Ok((buffer[0] >> 16) as u16)
}

/// The values of `struct fs_disk_quota`: units of 512 bytes, and inodes.
pub(super) struct QuotaAmount {
    pub(super) units: u64,
    pub(super) inodes: u64,
}

/// Sets both hard limits.
pub(super) fn limit_project(
    file: BorrowedFd<'_>,
    project: u32,
    limit: QuotaAmount,
) -> io::Result<()> {
    const VERSION: u64 = 1;
    const OF_PROJECT: u64 = 2;
    const SOFT_AND_HARD: u64 = 0b1111;
    let mut buffer = QuotaBuffer::default();
    // version: i8, flags: i8, fieldmask: u16, id: u32
    buffer[0] = VERSION | OF_PROJECT << 8 | SOFT_AND_HARD << 16 | u64::from(project) << 32;
    // blk_hardlimit, blk_softlimit, ino_hardlimit, ino_softlimit
    buffer[1..5].copy_from_slice(&[limit.units, 0, limit.inodes, 0]);
    project_quota(file, Q_XSETQLIM, project, &mut buffer)
}

/// The hard limits and the usage; zero for an unknown project.
pub(super) fn project_usage(
    file: BorrowedFd<'_>,
    project: u32,
) -> io::Result<(QuotaAmount, QuotaAmount)> {
    let mut buffer = QuotaBuffer::default();
    match project_quota(file, Q_XGETQUOTA, project, &mut buffer) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => buffer.fill(0),
        outcome => outcome?,
    }
    let amount = |units: usize, inodes: usize| QuotaAmount {
        units: buffer[units],
        inodes: buffer[inodes],
    };
    Ok((amount(1, 3), amount(5, 6)))
}

/// Moves the system clock by this many seconds and, on top of that, nanoseconds (below 10⁹), at once.
pub(super) fn shift_clock(seconds: i64, nanoseconds: u32) -> io::Result<()> {
    adjust(|timex| {
        timex.modes = libc::ADJ_SETOFFSET | libc::ADJ_NANO;
        timex.time.tv_sec = seconds;
        timex.time.tv_usec = nanoseconds.into();
    })
}

/// The settings of the kernel's clock discipline.
pub(super) struct Discipline {
    /// What remains to be corrected, in nanoseconds; the kernel takes at most half a second.
    pub(super) offset: i64,
    /// The time constant: the binary logarithm of the seconds between corrections, minus four.
    pub(super) constant: i64,
    /// Whether the clock is marked as unsynchronised.
    pub(super) is_unsynchronised: bool,
    /// The maximum and the estimated error in microseconds.
    pub(super) error: i64,
}

/// Lets the kernel correct the clock and its frequency gradually.
pub(super) fn discipline_clock(settings: &Discipline) -> io::Result<()> {
    adjust(|timex| {
        timex.modes = libc::ADJ_OFFSET
            | libc::ADJ_STATUS
            | libc::ADJ_TIMECONST
            | libc::ADJ_MAXERROR
            | libc::ADJ_ESTERROR
            | libc::ADJ_NANO;
        timex.offset = settings.offset;
        timex.constant = settings.constant;
        timex.maxerror = settings.error;
        timex.esterror = settings.error;
        timex.status = libc::STA_PLL;
        if settings.is_unsynchronised {
            timex.status |= libc::STA_UNSYNC;
        }
    })
}

/// Whether the clock is marked as unsynchronised.
pub(super) fn clock_is_unsynchronised() -> io::Result<bool> {
    let mut timex = no_adjustment();
    // SAFETY: the structure is valid for reads and writes during the call; modes of 0 only read.
    checked(unsafe { libc::adjtimex(&mut timex) })?;
    Ok(timex.status & libc::STA_UNSYNC != 0)
}

fn adjust(set: impl FnOnce(&mut libc::timex)) -> io::Result<()> {
    let mut timex = no_adjustment();
    set(&mut timex);
    // SAFETY: the structure is valid for reads and writes during the call.
    checked(unsafe { libc::adjtimex(&mut timex) }).map(drop)
}

fn no_adjustment() -> libc::timex {
    // SAFETY: the structure has only integers, for which zero is valid.
    unsafe { mem::zeroed() }
}

/// Sets a hardware clock. The fields are those of the kernel's `struct rtc_time`: second, minute,
/// hour, day of the month, month from 0, years since 1900; the others are not read.
pub(super) fn set_rtc(rtc: impl AsFd, fields: [libc::c_int; 6]) -> io::Result<()> {
    // _IOW('p', 0x0a, struct rtc_time)
    const RTC_SET_TIME: libc::c_ulong = 1 << 30 | 36 << 16 | (b'p' as libc::c_ulong) << 8 | 0x0a;
    let mut time = [0; 9];
    time[..6].copy_from_slice(&fields);
    // SAFETY: the call reads only the array of nine ints, which outlives it.
    checked(unsafe { libc::ioctl(rtc.as_fd().as_raw_fd(), RTC_SET_TIME, time.as_ptr()) })?;
    Ok(())
}
