//! The images that the tests' pods run, under upstream's names, for those are what the program asks for.
//!
//! | image | upstream's | ours |
//! |---|---|---|
//! | `agnhost` | a program of many parts, with curl, nc and dig on Alpine | the same program, compiled; Debian's curl, nc and dig beside Debian's busybox |
//! | `jessie-dnsutils` | Debian 8 with dig | the same image as `agnhost` |
//! | `httpd`, `nginx` | the servers | busybox' server; no case asks more than a page at port 80 of them, and Apache's place for it |
//! | `nautilus` | a page that tells its picture's name | the same image as those |
//! | `nonewprivs` | a program that tells its user and is root's by its mode | the same program, compiled |
//! | `busybox` | busybox 1.29 | Debian's, newer |
//! | `pause` | the process of a pod's own | the bundle's own |
//!
//! Where a case calls a program by its name that busybox has, too, the shell is Debian's `dash`: Debian's busybox calls its
//! own parts before it looks for others.
//!
//! `httpd` and `nginx` are asked for by two versions each, where a case exchanges one for the other: here one image under
//! four names, which a cluster cannot tell.

use std::path::{Path, PathBuf};

use hearth_build::files::{self, FileError, create_dir, failed, set_mode, write};
use hearth_build::progress::Progress;
use serde_json::{Value, json};

use crate::modes::copy;
use crate::oci;
use crate::packages::Packages;
use crate::rootfs::{self, ImageError, settle};

const AGNHOST: [&str; 2] = [
    "k8s.gcr.io/e2e-test-images/agnhost:2.21",
    "gcr.io/kubernetes-e2e-test-images/jessie-dnsutils:1.0",
];

const WEB_SERVER: [&str; 5] = [
    "docker.io/library/httpd:2.4.38-alpine",
    "docker.io/library/httpd:2.4.39-alpine",
    "docker.io/library/nginx:1.14-alpine",
    "docker.io/library/nginx:1.15-alpine",
    "gcr.io/kubernetes-e2e-test-images/nautilus:1.0",
];

/// What upstream's images have in their environment.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// First in [`PATH`], before busybox' own.
const FIRST: &str = "usr/local/bin";

/// Where upstream's `httpd` has its pages: a case moves one away by name.
const PAGES: &str = "usr/local/apache2/htdocs";

/// Busybox' mv tells nothing of what it moves, and takes no word to do so; a case says it.
const MV: &str = "#!/bin/sh\n[ \"$1\" = -v ] && shift\nexec busybox mv \"$@\"\n";

/// A program of a package: its path there, and in an image.
struct Tool(&'static str, &'static str, &'static str);

const SHELL: Tool = Tool("dash", "bin/dash", "bin/sh");

/// What agnhost has beside it.
const TOOLS: [Tool; 5] = [
    SHELL,
    Tool("bind9-dnsutils", "usr/bin/dig", "usr/local/bin/dig"),
    Tool("curl", "usr/bin/curl", "usr/local/bin/curl"),
    Tool("libc-bin", "usr/bin/getent", "usr/local/bin/getent"),
    Tool("netcat-openbsd", "bin/nc.openbsd", "usr/local/bin/nc"),
];

/// Makes all of them below `to`, of what was compiled for them and of packages.
pub(super) fn make(
    progress: &dyn Progress,
    packages: &Packages,
    compiled: &Path,
    stage: &Path,
    to: &Path,
) -> Result<(), ImageError> {
    let work = Work {
        progress,
        packages,
        compiled,
        stage,
        to,
    };
    rootfs::pause_image(
        progress,
        "k8s.gcr.io/pause:3.2",
        &stage.join("pause"),
        &to.join("e2e-pause.tar"),
    )?;
    work.image(
        "busybox",
        &["docker.io/library/busybox:1.29"],
        json!({ "Cmd": ["sh"] }),
        |_| Ok(()),
    )?;
    work.image(
        "agnhost",
        &AGNHOST,
        json!({ "Entrypoint": ["/agnhost"], "Cmd": ["pause"] }),
        |rootfs| work.agnhost(rootfs),
    )?;
    work.image(
        "web-server",
        &WEB_SERVER,
        json!({ "Cmd": ["/bin/serve"] }),
        |rootfs| {
            web_server(rootfs)?;
            work.tools(&[SHELL], rootfs)
        },
    )?;
    work.nonewprivs()
}

struct Work<'a> {
    progress: &'a dyn Progress,
    packages: &'a Packages,
    compiled: &'a Path,
    stage: &'a Path,
    to: &'a Path,
}

impl Work<'_> {
    /// Busybox, and what `fill` adds to it.
    fn image(
        &self,
        what: &str,
        names: &[&str],
        config: Value,
        fill: impl FnOnce(&Path) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let rootfs = self.rootfs(what)?;
        fill(&rootfs)?;
        settle(&rootfs)?;
        self.write(what, names, config)
    }

    /// One program, which is root's whoever starts it.
    fn nonewprivs(&self) -> Result<(), ImageError> {
        let rootfs = self.rootfs("nonewprivs")?;
        let program = rootfs.join(FIRST).join("nnp");
        self.compiled("nonewprivs", &program)?;
        settle(&rootfs)?;
        set_mode(&program, 0o4755)?;
        self.write(
            "nonewprivs",
            &["gcr.io/kubernetes-e2e-test-images/nonewprivs:1.0"],
            json!({ "Cmd": ["nnp"] }),
        )
    }

    fn rootfs(&self, what: &str) -> Result<PathBuf, ImageError> {
        let rootfs = self.stage.join(what).join("rootfs");
        rootfs::busybox_rootfs(self.progress, self.packages, &rootfs)?;
        create_dir(&rootfs.join(FIRST))?;
        Ok(rootfs)
    }

    fn write(&self, what: &str, names: &[&str], mut config: Value) -> Result<(), ImageError> {
        config["Env"] = json!([PATH]);
        let stage = self.stage.join(what);
        let archive = self.to.join(format!("e2e-{what}.tar"));
        oci::write(
            self.progress,
            names,
            &stage.join("rootfs"),
            &config,
            &stage,
            &archive,
        )?;
        Ok(())
    }

    fn agnhost(&self, rootfs: &Path) -> Result<(), ImageError> {
        create_dir(&rootfs.join("uploads"))?;
        for file in ["agnhost", "localhost.crt", "localhost.key"] {
            self.compiled(file, &rootfs.join(file))?;
        }
        files::link("agnhost", &rootfs.join("agnhost-2"))?;
        // A C library without this asks the names' server only.
        write(&rootfs.join("etc/nsswitch.conf"), b"hosts: files dns\n")?;
        self.tools(&TOOLS, rootfs)
    }

    /// Programs with their libraries; in place of busybox' where it has that name.
    fn tools(&self, tools: &[Tool], rootfs: &Path) -> Result<(), ImageError> {
        let mut programs = Vec::new();
        for Tool(package, path, to) in tools {
            let to = rootfs.join(to);
            if to.is_symlink() {
                std::fs::remove_file(&to).map_err(failed("remove", &to))?;
            }
            copy(&self.packages.file(package, path), &to)?;
            programs.push(to);
        }
        self.packages
            .add_libraries(self.progress, programs, rootfs)?;
        Ok(())
    }

    fn compiled(&self, file: &str, to: &Path) -> Result<(), FileError> {
        copy(&self.compiled.join(file), to)
    }
}

/// Pages at port 80, one of which tells a picture.
fn web_server(rootfs: &Path) -> Result<(), FileError> {
    let pages = rootfs.join(PAGES);
    create_dir(&pages)?;
    write(&pages.join("index.html"), b"It works.\n")?;
    write(&pages.join("data.json"), br#"{"image": "nautilus.jpg"}"#)?;
    write(&rootfs.join(FIRST).join("mv"), MV.as_bytes())?;
    let serve = rootfs::serve(80, &format!("/{PAGES}"));
    write(&rootfs.join("bin/serve"), serve.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::OF_THE_TESTS;

    #[test]
    fn every_tool_comes_from_a_package_that_is_fetched() {
        for Tool(package, ..) in TOOLS {
            assert!(
                OF_THE_TESTS.names().any(|name| name == package),
                "{package}"
            );
        }
    }

    #[test]
    fn the_page_that_tells_a_picture_is_json() {
        let rootfs = tempfile::tempdir().unwrap();
        for folder in ["bin", FIRST] {
            std::fs::create_dir_all(rootfs.path().join(folder)).unwrap();
        }
        web_server(rootfs.path()).unwrap();
        let page = std::fs::read(rootfs.path().join(PAGES).join("data.json")).unwrap();
        let page: Value = serde_json::from_slice(&page).unwrap();
        assert_eq!(page["image"], "nautilus.jpg");
    }
}
