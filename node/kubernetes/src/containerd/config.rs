//! containerd's configuration file.
//!
//! Settings that are not in it have containerd's defaults.

use std::path::{Path, PathBuf};

use crate::toml::{Toml, quoted};

/// The sandbox (pause) image. It is part of the extension and imported at start, so that a node
/// without a registry can run pods.
pub(crate) const PAUSE_IMAGE: &str = "hearth.local/pause:1";

/// The settings.
pub(crate) struct Config<'a> {
    /// Directory of images and snapshots, across boots.
    pub root: &'a Path,
    /// Directory of the state of this boot.
    pub state: &'a Path,
    /// Path of its socket.
    pub socket: &'a Path,
    /// Path of runc.
    pub runc: &'a Path,
    /// Directories of CNI plugins; where two have one of the same name, the first counts.
    pub network_plugins: &'a [PathBuf],
    /// Directory of the CNI configuration.
    pub network: &'a Path,
    /// Directories with a `hosts.toml` for each registry. The first that has one for a registry counts.
    pub registries: &'a [PathBuf],
    /// Its control group below the root; it contains everything that containerd starts except pods.
    pub group: &'a str,
}

/// The parts of containerd that serve the kubelet: images, containers, and the server of both.
const IMAGES: &str = r#"plugins."io.containerd.cri.v1.images""#;
const RUNTIME: &str = r#"plugins."io.containerd.cri.v1.runtime""#;
const SERVER: &str = r#"plugins."io.containerd.grpc.v1.cri""#;

/// Built-in plugins that a node does not need: other ways to keep images, installation of programs,
/// changes of containers by other programs (whose socket would be the same for all containerds of a
/// machine), tracing. Snapshotters of other file systems are not compiled in.
const DISABLED: [&str; 7] = [
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.native",
    "io.containerd.internal.v1.opt",
    "io.containerd.nri.v1.nri",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
];

impl Config<'_> {
    /// The file's content.
    pub(crate) fn to_toml(&self) -> String {
        let mut file = Toml::default();
        // The newest version that both supported minor versions of containerd read.
        file.number("version", 3)
            .path("root", self.root)
            .path("state", self.state)
            // The last process to be killed when memory is exhausted: without containerd, the pods
            // that use the memory cannot be ended.
            .number("oom_score", -999);
        let disabled = DISABLED.map(quoted).join(", ");
        file.line(&format!("disabled_plugins = [{disabled}]"));
        file.table("cgroup").text("path", self.group);
        file.table("grpc").path("address", self.socket);

        file.table(IMAGES).text("snapshotter", "overlayfs");
        // Pinned, so that the kubelet's garbage collection of images leaves it.
        file.table(&format!("{IMAGES}.pinned_images"))
            .text("sandbox", PAUSE_IMAGE);
        let registries = self.registries.iter();
        let registries: Vec<_> = registries.map(|path| path.to_string_lossy()).collect();
        file.table(&format!("{IMAGES}.registry"))
            .text("config_path", &registries.join(":"));
        file.table(RUNTIME)
            // The kernel supports neither.
            .flag("disable_apparmor", true)
            .flag("enable_selinux", false)
            // Below the state directory, not in /var/run/netns.
            .flag("netns_mounts_under_state_dir", true);
        file.table(&format!("{RUNTIME}.containerd"))
            .text("default_runtime_name", "runc");
        file.table(&format!("{RUNTIME}.containerd.runtimes.runc"))
            .text("runtime_type", "io.containerd.runc.v2");
        file.table(&format!("{RUNTIME}.containerd.runtimes.runc.options"))
            .path("BinaryName", self.runc)
            // There is no systemd: control groups are managed with cgroupfs.
            .flag("SystemdCgroup", false);
        let plugins = self.network_plugins.iter();
        let plugins: Vec<_> = plugins
            .map(|path| quoted(&path.to_string_lossy()))
            .collect();
        let plugins = plugins.join(", ");
        file.table(&format!("{RUNTIME}.cni"))
            .line(&format!("bin_dirs = [{plugins}]"))
            .path("conf_dir", self.network);
        // Streams go through the kubelet, so loopback is sufficient.
        file.table(SERVER)
            .text("stream_server_address", "127.0.0.1")
            .text("stream_server_port", "0");
        file.into_text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(registries: &[&str]) -> String {
        Config {
            root: Path::new("/d/containerd"),
            state: Path::new("/e/containerd"),
            socket: Path::new("/e/containerd/socket"),
            runc: Path::new("/x/bin/runc"),
            network_plugins: &["/x/cni", "/d/plugins"].map(PathBuf::from),
            network: Path::new("/e/cni"),
            registries: &registries.iter().map(PathBuf::from).collect::<Vec<_>>(),
            group: "/containerd",
        }
        .to_toml()
    }

    /// The lines of one table.
    fn table<'a>(file: &'a str, name: &str) -> Vec<&'a str> {
        let heading = format!("[{name}]");
        file.lines()
            .skip_while(|line| *line != heading)
            .skip(1)
            .take_while(|line| !line.is_empty())
            .collect()
    }

    #[test]
    fn every_place_is_told() {
        let file = config(&["/e/registries"]);
        assert!(file.starts_with("version = 3\nroot = \"/d/containerd\"\n"));
        assert_eq!(
            table(&file, "grpc"),
            [r#"address = "/e/containerd/socket""#]
        );
        let cni = table(&file, &format!("{RUNTIME}.cni"));
        let plugins = r#"bin_dirs = ["/x/cni", "/d/plugins"]"#;
        assert_eq!(cni, [plugins, r#"conf_dir = "/e/cni""#]);
        assert_eq!(
            table(&file, &format!("{IMAGES}.pinned_images")),
            [r#"sandbox = "hearth.local/pause:1""#]
        );
    }

    #[test]
    fn settings_for_registries_come_before_those_of_the_extension() {
        let file = config(&["/e/registries", "/x/registries"]);
        assert_eq!(
            table(&file, &format!("{IMAGES}.registry")),
            [r#"config_path = "/e/registries:/x/registries""#]
        );
    }
}
