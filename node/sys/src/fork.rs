//! A second process from the same program, without starting the program anew.
//!
//! A child of `fork` has the parent's memory as it was, until one of the two writes to it. It shares what the parent has
//! read and relocated, which a start of the same program would do again. Only a process with a single thread can be forked
//! in this way: in the child there would be no other threads, but the locks that they hold.

use std::io;

use nix::unistd::Pid;

use crate::raw;

/// The two processes after [`fork`].
#[derive(Debug)]
pub enum Forked {
    /// This is the process that called it; the child has this ID.
    Parent(Pid),
    /// This is the new process.
    Child,
}

/// Forks this process. Open files and blocked signals are inherited.
///
/// # Errors
/// EINVAL if it has more than one thread; otherwise those of fork(2).
pub fn fork() -> io::Result<Forked> {
    Ok(match raw::fork()? {
        Some(child) => Forked::Parent(Pid::from_raw(child)),
        None => Forked::Child,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests run in threads, so here it cannot succeed.
    #[test]
    fn a_process_with_threads_is_not_forked() {
        let error = fork().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::errno::Errno::EINVAL as i32));
    }
}
