//! Lays out the tree that a node mounts at [`MOUNTED_AT`].
//!
//! The node's root holds no loader, no libraries and no tools for anybody but the node, and a bundle may be newer than the
//! node. So the tree is closed in itself: every dynamically linked program is rewritten to name the tree's own loader and
//! to look for libraries in the tree's `lib` only (patchelf), with all that they need found here, at build time. The other
//! ways were an LD_LIBRARY_PATH, which every child would inherit down into what runc prepares for a container, and linking
//! everything statically, which would mean to build Debian's C programs anew.
//!
//! Nothing of a file but its bytes, its mode and its name gets into the node; bytes are Debian's or the compiler's, so the
//! same inputs give the same tree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::compile::{Built, PROGRAMS};
use super::inputs::{FOR_THE_NODE, Inputs};
use super::oci;
use crate::command::Cmd;
use crate::ui::Ui;

/// Where the node has the tree, always; the programs say so themselves.
pub const MOUNTED_AT: &str = "/ext/kubernetes";

/// The loader's file name.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// Where iptables' library looks for its extensions, as Debian compiled it in. There is a variable that says otherwise, but
/// whoever calls iptables (kube-proxy, the kubelet, a network plugin, the node) would have to know it.
const XTABLES: &[u8] = b"/usr/lib/x86_64-linux-gnu/xtables\0";

/// The process of a pod's own.
pub const PAUSE: &str = include_str!("pause.c");

/// What the compiler is told for [`PAUSE`].
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

/// Tells which pod answered.
const PROBE_HOSTNAME: &str = r"#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
hostname
";

/// A program taken from a package.
struct Program {
    package: &'static str,
    /// In the package.
    path: &'static str,
    /// In the tree.
    to: &'static str,
}

const fn program(package: &'static str, path: &'static str, to: &'static str) -> Program {
    Program { package, path, to }
}

/// Every program but Kubernetes' own, and who calls it.
const FROM_PACKAGES: [Program; 14] = [
    program("containerd", "usr/bin/containerd", "bin/containerd"),
    // One per pod, started by containerd; it outlives it.
    program(
        "containerd",
        "usr/bin/containerd-shim-runc-v2",
        "bin/containerd-shim-runc-v2",
    ),
    program("runc", "usr/sbin/runc", "bin/runc"),
    // kube-proxy's services, the kubelet's and portmap's chains, the node's masquerading. The older form of it, because
    // the kernel has its tables and not nftables.
    program(
        "iptables",
        "usr/sbin/xtables-legacy-multi",
        "bin/xtables-legacy-multi",
    ),
    // kube-proxy forgets flows of UDP services whose endpoint went.
    program("conntrack", "usr/sbin/conntrack", "bin/conntrack"),
    // The kubelet mounts volumes by these two.
    program("mount", "bin/mount", "bin/mount"),
    program("mount", "bin/umount", "bin/umount"),
    // The kubelet measures emptyDir volumes by `nice -n 19 du -x -s -B 1` and `find -xdev -printf .`, options that are GNU's.
    program("coreutils", "usr/bin/nice", "bin/nice"),
    program("coreutils", "usr/bin/du", "bin/du"),
    program("findutils", "usr/bin/find", "bin/find"),
    // Network plugins: containerd calls loopback for every pod; the pods' network of the node is made of the others.
    program(
        "containernetworking-plugins",
        "usr/lib/cni/bridge",
        "cni/bridge",
    ),
    program(
        "containernetworking-plugins",
        "usr/lib/cni/host-local",
        "cni/host-local",
    ),
    program(
        "containernetworking-plugins",
        "usr/lib/cni/loopback",
        "cni/loopback",
    ),
    program(
        "containernetworking-plugins",
        "usr/lib/cni/portmap",
        "cni/portmap",
    ),
];

/// Names under which programs are called: (link, program), both in `bin`. No ip6tables: the kernel has no tables for it.
const LINKS: [(&str, &str); 3] = [
    ("iptables", "xtables-legacy-multi"),
    ("iptables-restore", "xtables-legacy-multi"),
    ("iptables-save", "xtables-legacy-multi"),
];

/// The file in `bin` that is all of Kubernetes' programs.
const KUBERNETES: &str = "kubernetes";

/// Lays the tree out in `root`, which must not exist; works in `scratch`, an empty folder.
pub fn lay_out(ui: &Ui, inputs: &Inputs, built: &Built, scratch: &Path, root: &Path) -> Result<()> {
    let packages = Packages::unpack(ui, inputs, scratch)?;
    for folder in ["bin", "cni", "lib/xtables", "images", "licences"] {
        create_dir(&root.join(folder))?;
    }
    copy(&built.multicall, &root.join("bin").join(KUBERNETES))?;
    for (link, target) in PROGRAMS
        .map(|name| (name, KUBERNETES))
        .into_iter()
        .chain(LINKS)
    {
        symlink(target, root.join("bin").join(link))
            .with_context(|| format!("cannot make the link {link}"))?;
    }
    let mut dynamic = Vec::new();
    for Program { package, path, to } in &FROM_PACKAGES {
        let to = root.join(to);
        copy(&packages.file(package, path), &to)?;
        dynamic.push(to);
    }
    let extensions = copy_extensions(&packages, root)?;
    packages.relocate(ui, root, dynamic, extensions)?;
    images(ui, &packages, scratch, root)?;
    licences(&packages, built, root)?;
    let (_, _, kubernetes) = inputs.source()?;
    let version = format!(
        "kubernetes {kubernetes}\ncontainerd {}\nrunc {}\ncni {}\n",
        inputs.upstream_version("containerd")?,
        inputs.upstream_version("runc")?,
        inputs.upstream_version("containernetworking-plugins")?,
    );
    write(&root.join("VERSION"), version.as_bytes())?;
    settle_modes(root)
}

/// The unpacked packages, and where each library lies in them.
pub struct Packages {
    dir: PathBuf,
    patchelf: PathBuf,
    libraries: BTreeMap<String, PathBuf>,
}

impl Packages {
    /// Unpacks them below `scratch`.
    pub fn unpack(ui: &Ui, inputs: &Inputs, scratch: &Path) -> Result<Packages> {
        let dir = scratch.join("packages");
        let mut packages = Packages {
            patchelf: dir.join("patchelf/usr/bin/patchelf"),
            dir,
            libraries: BTreeMap::new(),
        };
        for package in FOR_THE_NODE.into_iter().chain(["patchelf"]) {
            packages.add(ui, &inputs.package(package)?)?;
        }
        Ok(packages)
    }

    /// Unpacks another one.
    pub fn add(&mut self, ui: &Ui, package: &Path) -> Result<()> {
        let file = package.file_name().unwrap_or_default().to_string_lossy();
        let to = self.dir.join(file.split('_').next().unwrap_or_default());
        create_dir(&to)?;
        Cmd::new("dpkg-deb")
            .arg("--extract")
            .arg(package)
            .arg(&to)
            .run(ui)?;
        for folder in ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"] {
            let Ok(entries) = to.join(folder).read_dir() else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                self.libraries.insert(name, entry.path());
            }
        }
        Ok(())
    }

    /// A file, by its path in its package.
    pub fn file(&self, package: &str, path: &str) -> PathBuf {
        self.dir.join(package).join(path)
    }

    /// Makes programs and extensions find the tree's own loader and libraries, and puts those there.
    fn relocate(
        &self,
        ui: &Ui,
        root: &Path,
        programs: Vec<PathBuf>,
        extensions: Vec<PathBuf>,
    ) -> Result<()> {
        let lib = root.join("lib");
        copy(self.library(LOADER)?, &lib.join(LOADER))?;
        let interpreter = format!("{MOUNTED_AT}/lib/{LOADER}");
        let run_path = format!("{MOUNTED_AT}/lib");
        let patch = || Cmd::new(&self.patchelf).args(["--set-rpath", &run_path]);
        for program in &programs {
            patch()
                .args(["--set-interpreter", &interpreter])
                .arg(program)
                .run(ui)?;
        }
        for extension in &extensions {
            patch().arg(extension).run(ui)?;
        }
        let mut objects = programs;
        objects.extend(extensions);
        for library in self.copy_libraries(ui, objects, &lib)? {
            // The C library needs nothing but the loader, and is what the loader has been tried with as it is.
            if !library.ends_with("libc.so.6") {
                patch().arg(&library).run(ui)?;
            }
        }
        let iptables = lib.join("libxtables.so.12");
        let moved = with_extensions_at(&read(&iptables)?, &format!("{MOUNTED_AT}/lib/xtables"))
            .with_context(|| format!("cannot change {}", iptables.display()))?;
        write(&iptables, &moved)
    }

    /// Puts the loader and the libraries of these programs where they look for them in a system whose root is `rootfs`.
    pub fn add_libraries(&self, ui: &Ui, programs: Vec<PathBuf>, rootfs: &Path) -> Result<()> {
        let (loader, lib) = (rootfs.join("lib64"), rootfs.join("lib/x86_64-linux-gnu"));
        create_dir(&loader)?;
        create_dir(&lib)?;
        copy(self.library(LOADER)?, &loader.join(LOADER))?;
        self.copy_libraries(ui, programs, &lib)?;
        Ok(())
    }

    /// Copies all libraries that these objects need, and those that they need, but for the loader; returns the copies.
    fn copy_libraries(&self, ui: &Ui, objects: Vec<PathBuf>, lib: &Path) -> Result<Vec<PathBuf>> {
        let mut found = BTreeSet::from([LOADER.to_owned()]);
        let (mut open, mut copies) = (objects, Vec::new());
        while let Some(object) = open.pop() {
            let needed = Cmd::new(&self.patchelf).arg("--print-needed").arg(&object);
            for library in needed.output(ui)?.lines() {
                if found.insert(library.to_owned()) {
                    let to = lib.join(library);
                    copy(self.library(library)?, &to)?;
                    open.push(to.clone());
                    copies.push(to);
                }
            }
        }
        Ok(copies)
    }

    fn library(&self, name: &str) -> Result<&Path> {
        let path = self.libraries.get(name);
        Ok(path.with_context(|| format!("no package holds the library {name}"))?)
    }
}

/// iptables' matches and targets: those for IPv4. The others are for tables that the kernel has not.
fn copy_extensions(packages: &Packages, root: &Path) -> Result<Vec<PathBuf>> {
    let from = packages.file("iptables", "usr/lib/x86_64-linux-gnu/xtables");
    let context = || format!("cannot read {}", from.display());
    let mut extensions = Vec::new();
    for entry in from.read_dir().with_context(context)? {
        let entry = entry.with_context(context)?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text.starts_with("libxt_") || text.starts_with("libipt_") {
            let to = root.join("lib/xtables").join(&name);
            let link = fs::read_link(entry.path());
            match link {
                Ok(target) => symlink(&target, &to)
                    .with_context(|| format!("cannot make {}", to.display()))?,
                Err(_) => {
                    copy(&entry.path(), &to)?;
                    extensions.push(to);
                }
            }
        }
    }
    extensions.sort();
    Ok(extensions)
}

/// The library with another folder for its extensions; the name must fit where the old one was.
fn with_extensions_at(library: &[u8], folder: &str) -> Result<Vec<u8>> {
    let at = |from: usize| {
        let rest = &library[from..];
        rest.windows(XTABLES.len())
            .position(|bytes| bytes == XTABLES)
    };
    let Some(position) = at(0) else {
        bail!("it does not name the folder of its extensions");
    };
    if at(position + 1).is_some() || folder.len() >= XTABLES.len() {
        bail!("the folder of its extensions cannot be replaced");
    }
    let mut library = library.to_vec();
    let place = &mut library[position..position + XTABLES.len()];
    place.fill(0);
    place[..folder.len()].copy_from_slice(folder.as_bytes());
    Ok(library)
}

/// The images that a node has without a registry.
fn images(ui: &Ui, packages: &Packages, scratch: &Path, root: &Path) -> Result<()> {
    let pause = scratch.join("pause");
    pause_image(
        ui,
        "hearth.local/pause:1",
        &pause,
        &root.join("images/pause.tar"),
    )?;
    let probe = scratch.join("probe");
    probe_rootfs(ui, packages, &probe.join("rootfs"))?;
    oci::write(
        ui,
        &["hearth.local/probe:1"],
        &probe.join("rootfs"),
        &json!({
            "Cmd": ["/bin/serve"],
            "Env": ["PATH=/bin"],
            "WorkingDir": "/",
            "ExposedPorts": { "8080/tcp": {} },
        }),
        &probe,
        &root.join("images/probe.tar"),
    )
}

/// [`PAUSE`] as an image of this name.
pub fn pause_image(ui: &Ui, name: &str, scratch: &Path, archive: &Path) -> Result<()> {
    let rootfs = scratch.join("rootfs");
    create_dir(&rootfs)?;
    let source = scratch.join("pause.c");
    write(&source, PAUSE.as_bytes())?;
    Cmd::new("gcc")
        .args(PAUSE_FLAGS)
        .arg("-o")
        .arg(rootfs.join("pause"))
        .arg(&source)
        .run(ui)?;
    settle_modes(&rootfs)?;
    let config = json!({ "Entrypoint": ["/pause"], "User": "65535:65535" });
    oci::write(ui, &[name], &rootfs, &config, scratch, archive)
}

/// A small system to try a cluster with: a shell, a web server, clients for the web and for DNS.
fn probe_rootfs(ui: &Ui, packages: &Packages, rootfs: &Path) -> Result<()> {
    busybox_rootfs(ui, packages, rootfs)?;
    create_dir(&rootfs.join("www/cgi-bin"))?;
    for (file, content) in [
        ("bin/serve", &*serve(8080, "/www")),
        ("www/cgi-bin/hostname", PROBE_HOSTNAME),
        ("www/index.html", "hearth probe\n"),
    ] {
        write(&rootfs.join(file), content.as_bytes())?;
    }
    settle(rootfs)
}

/// A command for an image with busybox: serves the files of a folder, logs each request, and ends when told to, which a
/// server that is process 1 of its container would not do by itself.
pub fn serve(port: u16, folder: &str) -> String {
    format!("#!/bin/sh\ntrap 'exit 0' TERM INT\nhttpd -f -vv -p {port} -h {folder} &\nwait\n")
}

/// Busybox under all its names, and what a user's home takes; to be settled when all is there.
pub fn busybox_rootfs(ui: &Ui, packages: &Packages, rootfs: &Path) -> Result<()> {
    for folder in ["bin", "etc", "root", "tmp"] {
        create_dir(&rootfs.join(folder))?;
    }
    let busybox = rootfs.join("bin/busybox");
    copy(&packages.file("busybox-static", "bin/busybox"), &busybox)?;
    for applet in Cmd::new(&busybox).arg("--list").output(ui)?.lines() {
        if applet != "busybox" {
            symlink("busybox", rootfs.join("bin").join(applet))
                .with_context(|| format!("cannot make the link {applet}"))?;
        }
    }
    for (file, content) in [
        ("etc/group", "root:x:0:\nnobody:x:65534:\n"),
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
        ),
    ] {
        write(&rootfs.join(file), content.as_bytes())?;
    }
    Ok(())
}

/// The modes of a system's files, of which everybody may write to one folder.
pub fn settle(rootfs: &Path) -> Result<()> {
    settle_modes(rootfs)?;
    set_mode(&rootfs.join("tmp"), 0o1777)
}

/// Debian's statement of copyright for every package whose files are in the tree; Kubernetes' own covers what it contains.
fn licences(packages: &Packages, built: &Built, root: &Path) -> Result<()> {
    let to = root.join("licences");
    copy(&built.copyright, &to.join("kubernetes"))?;
    for package in FOR_THE_NODE {
        let path = format!("usr/share/doc/{package}/copyright");
        copy(&packages.file(package, &path), &to.join(package))?;
    }
    Ok(())
}

/// Modes that depend on nothing here: what is a program or a library may be run, all may be read.
fn settle_modes(path: &Path) -> Result<()> {
    let context = || format!("cannot settle {}", path.display());
    let metadata = path.symlink_metadata().with_context(context)?;
    if metadata.is_dir() {
        for entry in path.read_dir().with_context(context)? {
            settle_modes(&entry.with_context(context)?.path())?;
        }
        set_mode(path, 0o755)
    } else if metadata.is_file() {
        let start = read(path)?;
        let runs = start.starts_with(b"\x7fELF") || start.starts_with(b"#!");
        set_mode(path, if runs { 0o755 } else { 0o644 })
    } else {
        Ok(())
    }
}

/// Sets the mode of a file or folder.
pub fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the mode of {}", path.display()))
}

/// The bytes of the file that `from` leads to. Its mode stays behind, and must not forbid a later change.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    write(to, &read(from)?)?;
    set_mode(to, 0o755)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a file.
pub fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Makes a folder and those above it.
pub fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_extensions_is_replaced_once_and_in_place() {
        let library = [b"abc\0".as_slice(), XTABLES, b"XTABLES_LIBDIR\0"].concat();
        let folder = format!("{MOUNTED_AT}/lib/xtables");
        let moved = with_extensions_at(&library, &folder).unwrap();
        assert_eq!(moved.len(), library.len());
        assert!(moved.starts_with(format!("abc\0{folder}\0").as_bytes()));
        assert!(moved.ends_with(b"\0XTABLES_LIBDIR\0"));
        assert!(with_extensions_at(b"nothing", &folder).is_err());
        assert!(with_extensions_at(&[XTABLES, XTABLES].concat(), &folder).is_err());
        assert!(with_extensions_at(&library, &"x".repeat(XTABLES.len())).is_err());
    }

    #[test]
    fn modes_are_by_content() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let metadata = fs::metadata(dir.path().join(name)).unwrap();
            metadata.permissions().mode() & 0o7777
        };
        for (name, content) in [
            ("elf", "\x7fELF…"),
            ("script", "#!/bin/sh"),
            ("text", "text"),
        ] {
            fs::write(dir.path().join(name), content).unwrap();
            set_mode(&dir.path().join(name), 0o600).unwrap();
        }
        settle_modes(dir.path()).unwrap();
        assert_eq!(
            [mode("elf"), mode("script"), mode("text")],
            [0o755, 0o755, 0o644]
        );
    }

    #[test]
    fn everything_comes_from_a_package_that_is_fetched() {
        for program in &FROM_PACKAGES {
            assert!(
                FOR_THE_NODE.contains(&program.package),
                "{}",
                program.package
            );
        }
    }

    #[test]
    fn what_a_bundle_must_have_is_laid_out() {
        let files = FROM_PACKAGES.iter().map(|program| program.to.to_owned());
        let links = LINKS.iter().map(|(link, _)| format!("bin/{link}"));
        let laid_out: BTreeSet<String> = files
            .chain(links)
            .chain(PROGRAMS.map(|name| format!("bin/{name}")))
            .collect();
        for program in super::super::PROGRAMS {
            assert!(laid_out.contains(program), "{program}");
        }
    }

    /// It waits, and ends when it is told to.
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
            .run(&Ui::new(false))
            .unwrap();
        assert!(fs::metadata(&program).unwrap().len() < 2048);
        let mut pause = Pause(std::process::Command::new(&program).spawn().unwrap());
        // Once it waits for a signal (rt_sigtimedwait is 128): one that comes earlier would end it as well.
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

    /// Not left running by a test that failed.
    struct Pause(std::process::Child);

    impl Drop for Pause {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
