//! What a node that runs pods does to the machine, and how it is undone.
//!
//! | what | why |
//! |---|---|
//! | all controllers are passed down from the root of the control groups | the kubelet divides the machine among pods |
//! | mounts are shared | volumes that the kubelet mounts have to show up in containers that run |
//! | the kubelet's directory is a mount of its own, where programs may run | the data partition is not, and volumes of pods lie in that directory |
//! | links in `/var` | places that programs have built in |
//! | settings of the kernel | see [`SETTINGS`] |
//!
//! [`clear`] takes away everything that pods have left, and everything that
//! the kubelet keeps; images stay, for they are large and harm nobody. It is
//! done whenever the role is found not to be held, so that it does not matter
//! how the role ended. It never removes a file before it has seen that nothing
//! is mounted below: a volume is somebody's data. So that this holds until it
//! is done, there is a [`Turn`]: a role may come and go while files are removed,
//! and nothing is made or mounted again before they are.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearth_base::supervisor::{Failure, Outcome};
use hearth_host::layout::{self, Root};
use hearth_sys::mounts::MountFlags;
use hearth_sys::{cgroups, files, mount_table, sysctl, tree};
use tokio::sync::Mutex;
use tokio::task::JoinError;

use super::super::containerd;

/// The kubelet's control group, with all pods.
const PODS: &str = "kubepods";
/// How long what is killed may take to end.
const KILLED_WITHIN: Duration = Duration::from_secs(10);

/// What pods need of the kernel. What the kubelet sets by itself is not here.
const SETTINGS: [(&str, &str); 4] = [
    // Pods of this node reach each other's services only if what crosses the
    // bridge passes the rules of kube-proxy.
    ("net.bridge.bridge-nf-call-iptables", "1"),
    ("net.bridge.bridge-nf-call-ip6tables", "1"),
    // By user, and all containers are root's: the defaults are one desktop's.
    ("fs.inotify.max_user_instances", "8192"),
    ("fs.inotify.max_user_watches", "524288"),
];

/// Whose turn it is to change the machine: one at a time, to the end.
#[derive(Clone, Debug, Default)]
pub struct Turn(Arc<Mutex<()>>);

impl Turn {
    /// Does this on a thread that may block, once all is over that was begun
    /// there before. Nobody has to wait for the end: it comes all the same.
    pub async fn take<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let turn = self.0.clone().lock_owned().await;
        let work = move || {
            let _turn = turn;
            work()
        };
        tokio::task::spawn_blocking(work).await
    }
}

/// Makes the machine ready for containers. Once is enough, twice harms
/// nothing.
pub(super) async fn prepare(turn: &Turn, root: &Root) -> Outcome {
    let root = root.clone();
    turn.take(move || make(&root)).await?
}

fn make(root: &Root) -> Outcome {
    let kept = root.data.kubernetes();
    let worker = root.ephemeral.kubernetes().worker();
    for directory in [kept.path(), &kept.kubelet(), &kept.volume_plugins()] {
        files::create_dir_durably(directory, 0o700)?;
    }
    // Logs are read by pods that collect them, as whoever they run as.
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
    mount_table::bind_with_flags(&kept.kubelet(), flags)?;
    mount_table::share(Path::new("/"))?;
    for (name, value) in SETTINGS {
        if let Err(error) = sysctl::set(name, value) {
            // Less works then, but most does.
            tracing::warn!("{error}: {}", error.source);
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

/// Takes away what the role has left, so that it may begin anew.
pub(super) async fn clear(turn: &Turn, root: &Root) -> Outcome {
    for name in [PODS, containerd::GROUP] {
        let group = cgroups::Group::root().child(name);
        group.kill()?;
        if !group.empties_within(KILLED_WITHIN).await? {
            return Err(Failure::msg(format!(
                "processes of the control group {name} do not end"
            )));
        }
        group.remove()?;
    }
    let root = root.clone();
    turn.take(move || remove(&root)).await?
}

/// Unmounts, then removes.
fn remove(root: &Root) -> Outcome {
    let kept = root.data.kubernetes();
    let made = root.ephemeral.kubernetes().worker();
    let state = root.ephemeral.containerd();
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
        let turn = Turn::default();
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
        // Nobody waits for it any more.
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
