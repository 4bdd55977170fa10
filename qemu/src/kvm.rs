//! The three KVM calls of the acceleration probe.
//!
//! A device node proves nothing: it may be left over in a container, belong
//! to another group, or lead to a hypervisor that offers the interface and
//! cannot run a stock kernel. So the probe asks for the API version and has
//! a virtual machine made.

// Two ioctls that no safe wrapper offers.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

/// `_IO(KVMIO, 0x00)`
const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
/// `_IO(KVMIO, 0x01)`
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
/// The only version there has been since Linux 2.6.22. Others are to be
/// refused, by KVM's own documentation.
pub(crate) const API_VERSION: i32 = 12;

/// Which version of the interface `device` (an open `/dev/kvm`) speaks.
pub(crate) fn api_version(device: &File) -> io::Result<i32> {
    // SAFETY: the call takes no pointer, and the descriptor is open for as
    // long as `device` is borrowed. On a file that is not KVM it fails with
    // ENOTTY.
    let version = unsafe { libc::ioctl(device.as_raw_fd(), KVM_GET_API_VERSION, 0) };
    if version < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(version)
}

/// Has a virtual machine made, and drops it.
pub(crate) fn create_vm(device: &File) -> io::Result<()> {
    // SAFETY: the argument is the machine type 0, no pointer; the descriptor
    // is open for as long as `device` is borrowed.
    let vm = unsafe { libc::ioctl(device.as_raw_fd(), KVM_CREATE_VM, 0) };
    if vm < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a non-negative result is a new descriptor that nobody else
    // knows, so it is ours to close.
    drop(unsafe { OwnedFd::from_raw_fd(vm) });
    Ok(())
}
