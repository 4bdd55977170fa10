//! Waiting for a descriptor to be readable.

// tokio requires the caller to guarantee that a descriptor stays the same while it is registered.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers `fd` with the runtime. A descriptor can be registered only once
/// at a time.
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor is open, its number never changes, and only the `AsyncFd`, which owns it from now on,
    // can close or replace it.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    registered.map_err(|error| error.into_parts().1)
}
