//! The kernel's host name.

/// Why the host name was not set.
#[derive(Debug, thiserror::Error)]
pub enum HostnameError {
    /// It is not a host name as of RFC 1123, in one label and lower case.
    #[error("{0:?} is not a host name: up to 63 of a–z, 0–9 and inner hyphens")]
    Invalid(String),
    /// The kernel refused.
    #[error("cannot set the host name {name}")]
    Set {
        /// The name.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// Sets the host name.
pub fn set(name: &str) -> Result<(), HostnameError> {
    check(name)?;
    rustix::system::sethostname(name.as_bytes()).map_err(|errno| HostnameError::Set {
        name: name.to_owned(),
        source: errno.into(),
    })
}

/// Whether this can be a host name.
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
                eprintln!("skipped: this needs the right to make namespaces");
                return;
            }
            set("hearth-test").unwrap();
            let name = rustix::system::uname();
            assert_eq!(name.nodename().to_str(), Ok("hearth-test"));
        });
        done.join().unwrap();
    }
}
