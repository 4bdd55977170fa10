//! The comparison for the node: the same Kubernetes programs, started by a shell script as init.
//!
//! The machine is the node's, with the node's kernel, command line and disk; only the initramfs is different, and is
//! made here. Of the disk it uses the partition of the extension, without dm-verity, and the data partition in its
//! original size. `script/init.sh` documents what the script must do, and what it omits. It creates the pod itself, at
//! the first moment when the API server accepts it, and reports on the console when the API server has reported that
//! the pod runs. Then it does the same with a pod whose image is in a registry on the host. The node's pods are created
//! and watched in the same way, but by a user on the host, which is slower: any unfairness is to the node's disadvantage.

use std::path::PathBuf;

use anyhow::{Context, Result};
use hearth_image::initramfs::Tree;
use hearth_image::output;
use hearth_lab::measure::kubernetes::{preloaded, pulled};
use hearth_lab::registry::Registry;

use crate::command::find_program;
use crate::ui::Ui;
use crate::{bundle, programs, target};

/// The folder of what is made here.
const FOLDER: &str = "kubernetes-script";
const SCRIPT: &str = include_str!("script/init.sh");
const KUBECONFIG: &str = include_str!("script/kubeconfig.yaml");
/// The users of kubeconfigs, with the names of their tokens.
const USERS: [&str; 4] = ["controller-manager", "scheduler", "kubelet", "proxy"];
/// Configuration files of the programs, by their paths in the machine.
const FILES: [(&str, &str); 10] = [
    ("/etc/tokens.csv", include_str!("script/tokens.csv")),
    (
        "/etc/containerd.toml",
        include_str!("script/containerd.toml"),
    ),
    (
        "/etc/cni/pods.conflist",
        include_str!("script/pods.conflist"),
    ),
    ("/etc/kubelet.yaml", include_str!("script/kubelet.yaml")),
    ("/etc/proxy.yaml", include_str!("script/proxy.yaml")),
    ("/etc/group", "root:x:0:\n"),
    ("/etc/passwd", "root:x:0:0:root:/:/\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n"),
    ("/etc/resolv.conf", ""),
    // For every registry, as on a node.
    (
        "/etc/registries/_default/hosts.toml",
        "ca = \"/etc/registry.pem\"\n",
    ),
];

/// The initramfs without settings; a bundle must have been ensured before.
pub(super) fn tree(ui: &Ui) -> Result<Tree> {
    let folder = target::folder(FOLDER)?;
    let mut tree = Tree::new();
    for empty in ["/new", "/proc"] {
        tree.directory(empty)?;
    }
    tree.file("/init", 0o755, SCRIPT.into())?;
    // What a node does not need.
    let busybox = folder.join("busybox");
    bundle::take_from_package(ui, "busybox-static", "bin/busybox", &busybox)?;
    tree.program(&busybox, "/bin/busybox")?;
    tree.program(&programs::ctr(ui)?, "/bin/ctr")?;
    tree.program(&programs::etcd(ui)?, "/bin/etcd")?;
    let mkfs = find_program("mkfs.xfs").context("mkfs.xfs is not installed")?;
    tree.program(&mkfs, "/sbin/mkfs.xfs")?;
    let openssl = find_program("openssl").context("openssl is not installed")?;
    tree.program(&openssl, "/bin/openssl")?;
    Ok(tree)
}

/// Writes the initramfs, with settings for this registry.
pub(super) fn initramfs(mut tree: Tree, registry: &Registry) -> Result<PathBuf> {
    settings(&mut tree, registry)?;
    let path = target::folder(FOLDER)?.join("initramfs.zst");
    output::write(&path, &tree.to_zstd()?)?;
    Ok(path)
}

/// All files below `/etc`.
fn settings(tree: &mut Tree, registry: &Registry) -> Result<()> {
    let mut add = |path: &str, content: String| tree.file(path, 0o600, content.into_bytes());
    for (path, content) in FILES {
        add(path, content.to_owned())?;
    }
    for user in USERS {
        let path = format!("/etc/{user}.kubeconfig");
        add(&path, KUBECONFIG.replace("USER", user))?;
    }
    // ECDSA on P-256: the only kind of key that both a server and the signer of service account tokens accept.
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
    add("/etc/certificate.pem", own.cert.pem())?;
    add("/etc/key.pem", own.signing_key.serialize_pem())?;
    add("/etc/registry.pem", registry.authority()?)?;
    for pod in [preloaded(), pulled(registry)] {
        add(&format!("/etc/{}.json", pod.name), pod.object.to_string())?;
    }
    Ok(())
}
