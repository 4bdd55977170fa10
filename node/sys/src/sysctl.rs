//! Kernel settings that can be changed at run time (sysctl).

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Where the kernel has its settings.
pub const PROC_SYS: &str = "/proc/sys";
/// How many user namespaces may exist. In one of its own, an unprivileged process reaches parts of the
/// kernel that are root's alone otherwise, so only pods get any.
pub const MAX_USER_NAMESPACES: &str = "user.max_user_namespaces";

/// Why a setting cannot be read or changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub struct SysctlError {
    /// The operation, as a verb with its object.
    step: String,
    /// The error of the operating system.
    source: io::Error,
}

/// Changes a setting, e.g. `net.ipv4.ip_forward`.
pub fn set(name: &str, value: &str) -> Result<(), SysctlError> {
    set_under(Path::new(PROC_SYS), name, value)
}

/// Changes a setting of a network interface, e.g. `accept_ra` of `ipv6`. The name of the interface may contain
/// dots, as those of VLANs do.
pub fn set_of_link(family: &str, link: &str, name: &str, value: &str) -> Result<(), SysctlError> {
    let parts = ["net", family, "conf", link, name].iter().collect();
    write(
        Path::new(PROC_SYS),
        parts,
        &format!("net.{family}.conf.{link}.{name}"),
        value,
    )
}

/// Changes a setting below this directory, which is [`PROC_SYS`] on a machine.
pub fn set_under(root: &Path, name: &str, value: &str) -> Result<(), SysctlError> {
    write(root, name.split('.').collect(), name, value)
}

/// The value of a setting below this directory.
pub fn get_under(root: &Path, name: &str) -> Result<String, SysctlError> {
    let path = name.split('.').collect::<PathBuf>();
    let text = fs::read_to_string(root.join(path)).map_err(|source| SysctlError {
        step: format!("read {name}"),
        source,
    })?;
    Ok(text.trim_end().to_owned())
}

fn write(root: &Path, parts: PathBuf, name: &str, value: &str) -> Result<(), SysctlError> {
    let failed = |source| SysctlError {
        step: format!("set {name} to {value}"),
        source,
    };
    // The file is not created: a missing setting is not supported by the kernel.
    let file = fs::OpenOptions::new().write(true).open(root.join(parts));
    let written = file.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()));
    written.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_are_directories_and_what_is_missing_stays_so() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("net/ipv4")).unwrap();
        let file = root.path().join("net/ipv4/ip_forward");
        fs::write(&file, "0").unwrap();
        set_under(root.path(), "net.ipv4.ip_forward", "1").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"1");
        let error = set_under(root.path(), "net.ipv4.other", "1").unwrap_err();
        assert_eq!(error.to_string(), "cannot set net.ipv4.other to 1");
        assert!(!root.path().join("net/ipv4/other").exists());
        assert_eq!(get_under(root.path(), "net.ipv4.ip_forward").unwrap(), "1");
        let error = get_under(root.path(), "net.ipv4.other").unwrap_err();
        assert_eq!(error.to_string(), "cannot read net.ipv4.other");
    }
}
