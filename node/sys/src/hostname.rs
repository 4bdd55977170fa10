//! The kernel's host name.

/// What the names of nodes begin with.
const NODE_PREFIX: &str = "hearth-";

/// Why the host name cannot be set.
#[derive(Debug, thiserror::Error)]
pub enum HostnameError {
    /// Not a valid host name according to RFC 1123, with a single label and in lower case.
    #[error("host name: expected up to 63 of a–z, 0–9 and inner hyphens, got {0:?}")]
    Invalid(String),
    /// The kernel rejected the name.
    #[error("cannot set the host name {name}")]
    Set {
        /// The name.
        name: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

/// Sets the host name of the kernel.
pub fn set(name: &str) -> Result<(), HostnameError> {
    check(name)?;
    rustix::system::sethostname(name.as_bytes()).map_err(|errno| HostnameError::Set {
        name: name.to_owned(),
        source: errno.into(),
    })
}

/// The host name, once it was [set]; `None` is that of a machine that is no node yet.
pub fn of_node() -> Option<String> {
    let name = rustix::system::uname();
    let name = name.nodename().to_str().ok()?;
    // The kernel's own name is none of a host.
    (check(name).is_ok() && name.starts_with(NODE_PREFIX)).then(|| name.to_owned())
}

/// Validates a host name.
pub fn check(name: &str) -> Result<(), HostnameError> {
    let character = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let good = (1..=63).contains(&name.len())
        && name.bytes().all(character)
        && !name.starts_with('-')
        && !name.ends_with('-');
    if good {
        Ok(())
    } else {
        Err(HostnameError::Invalid(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        check("hearth-0123456789abcdef0123456789abcdef").unwrap();
        for name in [
            "",
            "-a",
            "a-",
            "A",
            "a.b",
            "a b",
            "a\n",
            "ä",
            &"a".repeat(64),
        ] {
            assert!(
                matches!(check(name), Err(HostnameError::Invalid(_))),
                "{name:?}"
            );
        }
    }

    #[test]
    fn the_name_is_set() {
        let done = std::thread::spawn(|| {
            use nix::sched::{CloneFlags, unshare};
            if unshare(CloneFlags::CLONE_NEWUTS).is_err() {
                eprintln!("skipped: creating namespaces is not permitted");
                return;
            }
            set("hearth-test").unwrap();
            let name = rustix::system::uname();
            assert_eq!(name.nodename().to_str(), Ok("hearth-test"));
        });
        done.join().unwrap();
    }
}
