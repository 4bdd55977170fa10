//! The three KVM calls of the acceleration probe.
//!
//! The existence of the device node is not sufficient: it may be left over in a container, belong to another group, or
//! lead to a hypervisor that offers the interface but cannot run a stock kernel. So the probe reads the API version and
//! creates a virtual machine.

// Two ioctls without a safe wrapper.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `_IO(KVMIO, 0x00)`
const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
/// `_IO(KVMIO, 0x01)`
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
/// The only version since Linux 2.6.22. KVM's documentation requires that others are refused.
pub(crate) const API_VERSION: i32 = 12;

/// The API version of `device` (an open `/dev/kvm`).
pub(crate) fn api_version(device: &File) -> io::Result<i32> {
    // SAFETY: the call takes no pointer, and the descriptor is open while `device` is borrowed. On a file that is not
    // KVM it fails with ENOTTY.
    let version = unsafe { libc::ioctl(device.as_raw_fd(), KVM_GET_API_VERSION, 0) };
    if version < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(version)
}

/// Creates a virtual machine, and drops it.
pub(crate) fn create_vm(device: &File) -> io::Result<()> {
    // SAFETY: the argument is the machine type 0, not a pointer; the descriptor is open while `device` is borrowed.
    let vm = unsafe { libc::ioctl(device.as_raw_fd(), KVM_CREATE_VM, 0) };
    if vm < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a non-negative result is a new descriptor with no other owner, so it may be closed here.
    drop(unsafe { OwnedFd::from_raw_fd(vm) });
    Ok(())
}
