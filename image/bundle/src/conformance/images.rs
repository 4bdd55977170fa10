//! The images that the tests' pods run, under upstream's names, which the program uses.
//!
//! | image | upstream's | ours |
//! |---|---|---|
//! | `agnhost` | a multi-purpose test program, with curl, nc and dig on Alpine | the same program, compiled; Debian's curl, nc and dig beside Debian's busybox |
//! | `glibc-dns-testing` | Debian with dig | the same image as `agnhost` |
//! | `nginx` | the server | busybox httpd; no case needs more of it than a page at port 80, and the path of it |
//! | `nautilus`, `kitten` | a page with the name of its picture | the same image as that |
//! | `nonewprivs` | a setuid root program that prints its user | the same program, compiled |
//! | `busybox` | busybox 1.37 | Debian's, older |
//! | `pause` | the sandbox process of a pod | the bundle's own |
//!
//! If a case calls a program by a name that busybox has, too, the shell is Debian's `dash`: Debian's busybox calls its
//! own applets before it searches PATH.
//!
//! Two versions of `nginx` and of `agnhost` are used, where a case updates one to the other. Here they are one image
//! under several names, which makes no difference to a cluster.

use std::path::{Path, PathBuf};

use hearth_build::files::{self, FileError, create_dir, failed, set_mode, write};
use hearth_build::progress::Progress;
use hearth_programs::Built;
use serde_json::{Value, json};

use crate::modes::copy;
use crate::oci;
use crate::packages::Packages;
use crate::rootfs::{self, ImageError, settle};

// The versions are those of `test/utils/image/manifest.go` in the module.
const AGNHOST: [&str; 3] = [
    "registry.k8s.io/e2e-test-images/agnhost:2.66.1",
    "registry.k8s.io/e2e-test-images/agnhost:2.55",
    "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.1.1",
];

const WEB_SERVER: [&str; 4] = [
    "registry.k8s.io/e2e-test-images/nginx:1.27.0-2",
    "registry.k8s.io/e2e-test-images/nginx:1.28.0-2",
    "registry.k8s.io/e2e-test-images/nautilus:1.8",
    "registry.k8s.io/e2e-test-images/kitten:1.8",
];

/// PATH in upstream's images.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// First in [`PATH`], before busybox's own programs.
const FIRST: &str = "usr/local/bin";

/// The folder of the web server's pages.
const PAGES: &str = "www";

/// Busybox's mv does not report what it moves and has no `-v`, which a case uses.
const MV: &str = "#!/bin/sh\n[ \"$1\" = -v ] && shift\nexec busybox mv \"$@\"\n";

/// A program of a package: its path there, and in an image.
struct Tool(&'static str, &'static str, &'static str);

const SHELL: Tool = Tool("dash", "bin/dash", "bin/sh");

/// The tools that the agnhost image has besides its program.
const TOOLS: [Tool; 5] = [
    SHELL,
    Tool("bind9-dnsutils", "usr/bin/dig", "usr/local/bin/dig"),
    Tool("curl", "usr/bin/curl", "usr/local/bin/curl"),
    Tool("libc-bin", "usr/bin/getent", "usr/local/bin/getent"),
    Tool("netcat-openbsd", "bin/nc.openbsd", "usr/local/bin/nc"),
];

/// Makes all images below `to`, from what was compiled for them and from packages.
pub(super) fn make(
    progress: &dyn Progress,
    packages: &Packages,
    compiled: &Built,
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
        "registry.k8s.io/pause:3.10.2",
        &stage.join("pause"),
        &to.join("e2e-pause.tar"),
    )?;
    work.image(
        "busybox",
        &["registry.k8s.io/e2e-test-images/busybox:1.37.0-2"],
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
    compiled: &'a Built,
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

    /// One setuid root program.
    fn nonewprivs(&self) -> Result<(), ImageError> {
        let rootfs = self.rootfs("nonewprivs")?;
        let program = rootfs.join(FIRST).join("nnp");
        self.compiled("nonewprivs", &program)?;
        settle(&rootfs)?;
        set_mode(&program, 0o4755)?;
        self.write(
            "nonewprivs",
            &["registry.k8s.io/e2e-test-images/nonewprivs:1.4"],
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
        write(&rootfs.join(FIRST).join("mv"), MV.as_bytes())?;
        // Without this file the C library asks the DNS server only.
        write(&rootfs.join("etc/nsswitch.conf"), b"hosts: files dns\n")?;
        self.tools(&TOOLS, rootfs)
    }

    /// Programs with their libraries; they replace busybox's of the same name.
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
        copy(&self.compiled.program(file), to)
    }
}

/// Pages at port 80, one of which names a picture.
fn web_server(rootfs: &Path) -> Result<(), FileError> {
    let pages = rootfs.join(PAGES);
    create_dir(&pages)?;
    write(&pages.join("index.html"), b"It works.\n")?;
    write(&pages.join("data.json"), br#"{"image": "nautilus.jpg"}"#)?;
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
