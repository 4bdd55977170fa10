//! Changes to the machine for pods, and their cleanup.
//!
//! | change | reason |
//! |---|---|
//! | all cgroup controllers are enabled below the root group | the kubelet divides resources among pods |
//! | mount propagation is shared | volumes that the kubelet mounts have to appear in running containers |
//! | the kubelet's directory is a bind mount at `/var/lib/kubelet` without `noexec` | storage drivers expect it there; the data partition is mounted with `noexec`, and volumes of pods are in that directory |
//! | symbolic links in `/var` | paths that are built into programs |
//! | the same for CNI plugins, and links in `/etc` and `/opt` | another pod network than the built-in one installs itself there |
//! | sysctls | see [`SETTINGS`] |
//! | a limit of what pods use of the disk | see [`reserve`] |
//!
//! [`clear`] removes everything that pods have left, and the state of the kubelet; images are kept,
//! because they are large and cause no harm. It runs whenever the role is not assigned, so it does
//! not matter how the role ended. Before it deletes files, it makes sure that nothing is mounted
//! below them: volumes contain user data. [`MachineLock`] ensures that this stays true until it has
//! finished: the role may be assigned and removed while files are deleted, but nothing is created
//! or mounted again before that.

use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use hearth_api::chain;
use hearth_base::supervisor::{Failure, Outcome, spawn_blocking};
use hearth_host::handover::PodsPossible;
use hearth_host::layout::{self, Root};
use hearth_sys::mounts::MountFlags;
use hearth_sys::{cgroups, files, mount_table, sysctl, tree};
use tokio::sync::Mutex;
use tokio::task::JoinError;

use super::super::containerd;
use super::reserve;

/// The kubelet's control group of all pods.
const PODS: &str = "kubepods";
/// Timeout for killed processes to end.
const KILLED_WITHIN: Duration = Duration::from_secs(10);

/// Sysctls that pods need. Those that the kubelet sets are not here.
const SETTINGS: [(&str, &str); 5] = [
    // Services between pods of one node work only if packets on the bridge pass the rules of
    // kube-proxy.
    ("net.bridge.bridge-nf-call-iptables", "1"),
    ("net.bridge.bridge-nf-call-ip6tables", "1"),
    // These limits are per user, and all containers run as root: the defaults are too low.
    ("fs.inotify.max_user_instances", "8192"),
    ("fs.inotify.max_user_watches", "524288"),
    // A pod may ask for one of its own, and programs in it for a few more. Without the role there are
    // none.
    (sysctl::MAX_USER_NAMESPACES, "1024"),
];

/// A lock for changes of the machine: one change at a time, and each runs to its end.
#[derive(Clone, Debug, Default)]
pub struct MachineLock(Arc<Mutex<()>>);

impl MachineLock {
    /// Runs `work` on a blocking thread, after all earlier work has finished. It runs to its end
    /// even if the future is dropped.
    pub async fn take<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let turn = self.0.clone().lock_owned().await;
        let work = move || {
            let _turn = turn;
            work()
        };
        spawn_blocking(work).await
    }
}

/// Prepares the machine for containers of these pods. Idempotent.
pub(super) async fn prepare(turn: &MachineLock, root: &Root, pods: PodsPossible) -> Outcome {
    let root = root.clone();
    turn.take(move || {
        make(&root)?;
        match pods {
            PodsPossible::OtherNetwork(_) => make_for_other_network(&root),
            PodsPossible::None | PodsPossible::BuiltIn(_) => Ok(()),
        }
    })
    .await?
}

/// Gives another pod network the paths that it expects.
fn make_for_other_network(root: &Root) -> Outcome {
    let plugins = root.data.kubernetes().network_plugins();
    files::create_dir_durably(&plugins, 0o755)?;
    mount_table::bind_with_flags(&plugins, &plugins, MountFlags::NOSUID | MountFlags::NODEV)?;
    for (link, target) in layout::network_links(root) {
        make_link(Path::new(link), &target)?;
    }
    Ok(())
}

fn make(root: &Root) -> Outcome {
    let kept = root.data.kubernetes();
    let worker = root.ephemeral.kubernetes().worker();
    for directory in [kept.path(), &root.data.containerd()] {
        files::create_dir_durably(directory, 0o700)?;
    }
    // Before there is anything in them.
    reserve::keep_disk(root);
    for directory in [kept.kubelet(), kept.volume_plugins()] {
        files::create_dir_durably(&directory, 0o700)?;
    }
    // Pods that collect logs may run as any user.
    files::create_dir_durably(&kept.log(), 0o755)?;
    for directory in [worker.network(), worker.addresses(), worker.results()] {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
    }
    for (link, target) in layout::container_links(root) {
        make_link(Path::new(link), &target)?;
    }
    let all = cgroups::Group::root();
    all.pass_controllers_down()?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    fs::create_dir_all(&root.kubelet)?;
    mount_table::bind_with_flags(&kept.kubelet(), &root.kubelet, flags)?;
    mount_table::share(Path::new("/"))?;
    for (name, value) in SETTINGS {
        if let Err(error) = sysctl::set(name, value) {
            // Not fatal: most things work without.
            tracing::warn!("{}", chain(&error));
        }
    }
    Ok(())
}

fn make_link(link: &Path, target: &Path) -> io::Result<()> {
    if let Some(parent) = link.parent() {
        fs::create_dir_all(parent)?;
    }
    match symlink(target, link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Cleans up what the role has left.
pub(super) async fn clear(turn: &MachineLock, root: &Root) -> Outcome {
    for name in [PODS, containerd::GROUP] {
        let group = cgroups::Group::root().child(name);
        group.kill()?;
        if !group.empties_within(KILLED_WITHIN).await? {
            return Err(Failure::msg(format!(
                "killed processes in cgroup {name} have not ended within {KILLED_WITHIN:?}"
            )));
        }
        group.remove()?;
    }
    if let Err(error) = sysctl::set(sysctl::MAX_USER_NAMESPACES, "0") {
        tracing::warn!("{}", chain(&error));
    }
    let root = root.clone();
    turn.take(move || remove(&root)).await?
}

/// Unmounts everything below the directories, then deletes them.
fn remove(root: &Root) -> Outcome {
    let kept = root.data.kubernetes();
    let made = root.ephemeral.kubernetes().worker();
    let state = root.ephemeral.containerd();
    mount_table::unmount_below(&root.kubelet)?;
    for directory in [kept.path(), made.path(), &state] {
        mount_table::unmount_below(directory)?;
        tree::remove(directory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_made_once() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("var/lib/x");
        make_link(&link, Path::new("/data/x")).unwrap();
        make_link(&link, Path::new("/data/x")).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/data/x"));
    }

    #[tokio::test]
    async fn what_is_begun_is_over_before_more_is() {
        let turn = MachineLock::default();
        let (go_on, waits) = std::sync::mpsc::channel::<()>();
        let (begun_writer, begun) = tokio::sync::oneshot::channel();
        let done = Arc::new(std::sync::Mutex::new(Vec::new()));
        let first = {
            let done = done.clone();
            turn.take(move || {
                begun_writer.send(()).unwrap();
                waits.recv().unwrap();
                done.lock().unwrap().push("first");
            })
        };
        // The future is dropped.
        tokio::select! {
            _ = first => panic!("it waits"),
            begun = begun => begun.unwrap(),
        }
        let second = {
            let done = done.clone();
            turn.take(move || done.lock().unwrap().push("second"))
        };
        tokio::pin!(second);
        assert!(futures::poll!(&mut second).is_pending());
        go_on.send(()).unwrap();
        second.await.unwrap();
        assert_eq!(*done.lock().unwrap(), ["first", "second"]);
    }

    #[test]
    fn what_the_role_kept_goes_and_images_stay() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::under(directory.path());
        let kubelet = root.data.kubernetes().kubelet();
        fs::create_dir_all(kubelet.join("pods/x")).unwrap();
        fs::create_dir_all(root.data.containerd().join("content")).unwrap();
        fs::create_dir_all(root.ephemeral.containerd()).unwrap();
        remove(&root).unwrap();
        remove(&root).unwrap();
        assert!(!root.data.kubernetes().path().exists());
        assert!(!root.ephemeral.containerd().exists());
        assert!(root.data.containerd().join("content").exists());
    }
}
