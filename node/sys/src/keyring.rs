//! Keys that the kernel holds for as long as one of its own parts needs them.
//!
//! A key in a device-mapper table can be read back by any process that may administer devices, such
//! as a privileged pod, for as long as the volume is open. So tables name a key of the type *logon*
//! instead: only the kernel reads its payload. It is in the keyring of the calling thread while the
//! table is loaded, which copies it, and unlinked afterwards; the kernel then wipes it.

use std::ffi::CString;
use std::io;

use super::raw;

/// A key in the keyring of this thread. Unlinked when dropped.
///
/// It has to be used by the same thread, so it cannot be sent to another one.
pub(crate) struct ThreadKey {
    serial: i32,
    length: usize,
    description: String,
    _of_this_thread: std::marker::PhantomData<*const ()>,
}

impl ThreadKey {
    /// Adds a key for the volume of this name.
    ///
    /// # Errors
    /// If the kernel has no keyrings, or its quota for keys is used up.
    pub(crate) fn add(volume: &str, key: &[u8]) -> io::Result<Self> {
        let description = format!("hearth:{volume}");
        let text = CString::new(description.clone())?;
        Ok(Self {
            serial: raw::add_logon_key(&text, key)?,
            length: key.len(),
            description,
            _of_this_thread: std::marker::PhantomData,
        })
    }

    /// The key as a table names it.
    pub(crate) fn name(&self) -> String {
        format!(":{}:logon:{}", self.length, self.description)
    }
}

impl Drop for ThreadKey {
    fn drop(&mut self) {
        // Only the last link is lost by it: the keyring ends with its thread anyway.
        let _ = raw::unlink_key(self.serial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The payload of a key cannot be read, so what is compared is what the kernel tells of it.
    #[test]
    fn a_key_is_named_in_tables_and_gone_afterwards() {
        let key = match ThreadKey::add("data", &[7; 64]) {
            Ok(key) => key,
            // Containers may forbid it; the machine check has it as well.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(key.name(), ":64:logon:hearth:data");
        let serial = key.serial;
        drop(key);
        raw::unlink_key(serial).expect_err("it is gone");
    }
}
