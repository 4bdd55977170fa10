//! What a child process cannot do, although the program that starts it is root.
//!
//! A program that serves others, and needs nothing of the machine but its own files and sockets, is
//! confined before it is executed:
//! - it is a user of its own, without capabilities, and cannot get any by executing a file;
//! - directories that it has no business with are empty for it, by mounts that nobody else sees;
//! - system calls that change the machine or other processes fail with `EPERM`.
//!
//! The user alone would keep it from files of root. The other two are for the day on which a file has
//! the wrong mode, or the kernel a fault: most of those that give a user more than it should have are
//! reached by new namespaces, and by system calls of this list.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use tokio::process::Command;

use super::raw;

/// The system calls that fail.
const REFUSED: [libc::c_long; 33] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// How a program is confined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confinement {
    /// The user, and the group of the same number, that it runs as.
    pub user: u32,
    /// Directories that are empty for it. Those that do not exist are left out.
    pub hidden: Vec<PathBuf>,
}

impl Confinement {
    /// Confines the command's process and all that it starts.
    pub fn apply(&self, command: &mut Command) {
        // A path with a NUL byte cannot exist.
        let hidden = self.hidden.iter().map(|path| path.as_os_str().as_bytes());
        let hidden = hidden.filter_map(|path| CString::new(path).ok()).collect();
        raw::confine(command, self.user, hidden, filter());
    }
}

/// Cannot fail: the list is constant, and a test builds it.
fn filter() -> BpfProgram {
    let refused: BTreeMap<i64, _> = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    let eperm = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(refused, SeccompAction::Allow, eperm, TargetArch::x86_64);
    filter.and_then(BpfProgram::try_from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::child::Child;

    /// The output of a shell script.
    async fn output(confinement: Option<&Confinement>, script: &str) -> Vec<String> {
        let (lines, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(script);
        if let Some(confinement) = confinement {
            confinement.apply(&mut command);
        }
        let child = Child::spawn(command, move |_, line| {
            let _ = lines.send(line.to_owned());
        });
        child.await.unwrap().wait().await.unwrap();
        let mut all = Vec::new();
        while let Some(line) = seen.recv().await {
            all.push(line);
        }
        all
    }

    #[test]
    fn the_filter_refuses_something() {
        assert!(filter().len() > REFUSED.len());
    }

    #[tokio::test]
    async fn a_confined_program_has_its_own_files_and_no_more() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can confine a program");
        }
        let directory = tempfile::tempdir().unwrap();
        let open = |path: &std::path::Path| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        open(directory.path());
        let hidden = directory.path().join("hidden");
        std::fs::create_dir(&hidden).unwrap();
        open(&hidden);
        // Any user could read it.
        std::fs::write(hidden.join("secret"), "secret\n").unwrap();
        let private = directory.path().join("private");
        std::fs::write(&private, "private\n").unwrap();
        std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o600)).unwrap();
        let script = format!(
            "id -u; id -g; grep -h -E '^(CapEff|CapPrm|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\t '; \
             cat {hidden}/secret; cat {private}; ls {hidden} | wc -l; \
             cat /proc/1/root/etc/hostname >/dev/null 2>&1 && echo escaped; \
             unshare -r true 2>/dev/null && echo namespace; true",
            hidden = hidden.display(),
            private = private.display(),
        );
        let free = output(None, &script).await;
        assert!(
            free.contains(&"secret".into()) && free.contains(&"private".into()),
            "{free:?}"
        );

        let confinement = Confinement {
            user: 64_123,
            hidden: vec![hidden.clone(), directory.path().join("missing")],
        };
        let confined = output(Some(&confinement), &script).await;
        for line in [
            "64123",
            "CapPrm:0000000000000000",
            "CapEff:0000000000000000",
            "NoNewPrivs:1",
            "Seccomp:2",
            "0",
        ] {
            assert!(confined.contains(&line.into()), "{line}: {confined:?}");
        }
        for line in ["secret", "private", "escaped", "namespace"] {
            assert!(!confined.contains(&line.into()), "{line}: {confined:?}");
        }
        // The mounts are those of the child alone.
        assert_eq!(
            std::fs::read_to_string(hidden.join("secret")).unwrap(),
            "secret\n"
        );
    }

    #[tokio::test]
    async fn it_ends_with_this_process_all_the_same() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can confine a program");
        }
        let confinement = Confinement {
            user: 64_123,
            hidden: Vec::new(),
        };
        let signal = output(Some(&confinement), "exec python3 -c 'import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)'").await;
        assert_eq!(signal, ["9"], "the parent-death signal");
    }
}
