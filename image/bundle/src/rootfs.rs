//! The images that a node has without a registry: the sandbox process of a pod, and small systems around Debian's
//! busybox.

use std::path::Path;

use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError, create_dir, failed, set_mode, write};
use hearth_build::progress::Progress;
use serde_json::json;

use crate::modes::{copy, settle_modes};
use crate::oci::{self, ArchiveError};
use crate::packages::{Packages, PackagesError};

/// The sandbox process of a pod.
pub(crate) const PAUSE: &str = include_str!("pause.c");

/// Compiler flags for [`PAUSE`].
const PAUSE_FLAGS: [&str; 9] = [
    "-Os",
    "-static",
    "-nostdlib",
    "-nostartfiles",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fcf-protection=none",
    "-Wl,--build-id=none,-z,noseparate-code",
    "-s",
];

/// A web page that names the pod that answered.
const PROBE_HOSTNAME: &str = r"#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
hostname
";

/// Why an image could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The libraries of a program are missing.
    #[error(transparent)]
    Packages(#[from] PackagesError),
    /// Its archive could not be written.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// [`PAUSE`] as an image of this name.
pub(crate) fn pause_image(
    progress: &dyn Progress,
    name: &str,
    scratch: &Path,
    archive: &Path,
) -> Result<(), ImageError> {
    let rootfs = scratch.join("rootfs");
    create_dir(&rootfs)?;
    let source = scratch.join("pause.c");
    write(&source, PAUSE)?;
    Cmd::new("gcc")
        .args(PAUSE_FLAGS)
        .arg("-o")
        .arg(rootfs.join("pause"))
        .arg(&source)
        .run(progress)?;
    settle_modes(&rootfs)?;
    let config = json!({ "Entrypoint": ["/pause"], "User": "65535:65535" });
    oci::write(progress, &[name], &rootfs, &config, scratch, archive)?;
    Ok(())
}

/// An image of this name with one program and nothing else, for tests.
pub fn program_image(
    progress: &dyn Progress,
    name: &str,
    program: &Path,
    archive: &Path,
) -> Result<(), ImageError> {
    const PROGRAM: &str = "program";
    let scratch = tempfile::tempdir().map_err(failed("make a folder in", &std::env::temp_dir()))?;
    let rootfs = scratch.path().join("rootfs");
    create_dir(&rootfs)?;
    copy(program, &rootfs.join(PROGRAM))?;
    settle_modes(&rootfs)?;
    let config = json!({ "Entrypoint": [format!("/{PROGRAM}")] });
    oci::write(progress, &[name], &rootfs, &config, scratch.path(), archive)?;
    Ok(())
}

/// A small system for testing a cluster, as an image of this name: a shell, a web server, clients for HTTP and DNS.
/// `ballast`, if there is any, is a file that nothing reads.
pub(crate) fn probe_image(
    progress: &dyn Progress,
    packages: &Packages,
    name: &str,
    ballast: &[u8],
    scratch: &Path,
    archive: &Path,
) -> Result<(), ImageError> {
    let rootfs = scratch.join("rootfs");
    probe_rootfs(progress, packages, ballast, &rootfs)?;
    let config = json!({
        "Cmd": ["/bin/serve"],
        "Env": ["PATH=/bin"],
        "WorkingDir": "/",
        "ExposedPorts": { "8080/tcp": {} },
    });
    oci::write(progress, &[name], &rootfs, &config, scratch, archive)?;
    Ok(())
}

fn probe_rootfs(
    progress: &dyn Progress,
    packages: &Packages,
    ballast: &[u8],
    rootfs: &Path,
) -> Result<(), ImageError> {
    busybox_rootfs(progress, packages, rootfs)?;
    if !ballast.is_empty() {
        write(&rootfs.join("ballast"), ballast)?;
    }
    create_dir(&rootfs.join("www/cgi-bin"))?;
    for (file, content) in [
        ("bin/serve", &*serve(8080, "/www")),
        ("www/cgi-bin/hostname", PROBE_HOSTNAME),
        ("www/index.html", "hearth probe\n"),
    ] {
        write(&rootfs.join(file), content)?;
    }
    settle(rootfs)?;
    Ok(())
}

/// A command for an image with busybox: serves the files of a folder, logs each request, and ends on SIGTERM, which a
/// server that is process 1 of its container would ignore.
pub(crate) fn serve(port: u16, folder: &str) -> String {
    format!("#!/bin/sh\ntrap 'exit 0' TERM INT\nhttpd -f -vv -p {port} -h {folder} &\nwait\n")
}

/// Busybox under all its names, and the files that describe users; [`settle`] must be called when the content is
/// complete.
pub(crate) fn busybox_rootfs(
    progress: &dyn Progress,
    packages: &Packages,
    rootfs: &Path,
) -> Result<(), ImageError> {
    for folder in ["bin", "etc", "root", "tmp"] {
        create_dir(&rootfs.join(folder))?;
    }
    let busybox = rootfs.join("bin/busybox");
    copy(&packages.file("busybox-static", "bin/busybox"), &busybox)?;
    for applet in Cmd::new(&busybox).arg("--list").output(progress)?.lines() {
        if applet != "busybox" {
            files::link("busybox", &rootfs.join("bin").join(applet))?;
        }
    }
    for (file, content) in [
        ("etc/group", "root:x:0:\nnobody:x:65534:\n"),
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
        ),
    ] {
        write(&rootfs.join(file), content)?;
    }
    Ok(())
}

/// Sets the modes of a system's files; one folder is writable by everybody.
pub(crate) fn settle(rootfs: &Path) -> Result<(), FileError> {
    settle_modes(rootfs)?;
    set_mode(&rootfs.join("tmp"), 0o1777)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_build::progress::Silent;

    use super::*;

    /// The program waits, and ends on SIGTERM.
    #[test]
    fn pause_pauses() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("pause.c");
        let program = dir.path().join("pause");
        fs::write(&source, PAUSE).unwrap();
        Cmd::new("gcc")
            .args(PAUSE_FLAGS)
            .args(["-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(&source)
            .run(&Silent)
            .unwrap();
        assert!(fs::metadata(&program).unwrap().len() < 2048);
        let mut pause = Pause(std::process::Command::new(&program).spawn().unwrap());
        // Wait until it waits for a signal (rt_sigtimedwait is 128): an earlier one would end it as well.
        let call = format!("/proc/{}/syscall", pause.0.id());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !fs::read_to_string(&call).unwrap().starts_with("128 ") {
            assert!(std::time::Instant::now() < deadline, "it does not wait");
            std::thread::yield_now();
        }
        assert!(pause.0.try_wait().unwrap().is_none());
        let pid = nix::unistd::Pid::from_raw(pause.0.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert_eq!(pause.0.wait().unwrap().code(), Some(0));
    }

    /// Kills the process when a test fails.
    struct Pause(std::process::Child);

    impl Drop for Pause {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
