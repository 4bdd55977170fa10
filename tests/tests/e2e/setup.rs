//! Each task of `cargo xtask` on a Debian that has nothing but its essential packages: it installs what it needs, says
//! so, and works. Only with `--long`, and only as root: a task's set-up is `apt-get install`.
//!
//! The Debian is a folder that mmdebstrap fills, with a file system in memory over it for each task. The checkout, its
//! target folder and the home folder are those of this machine, so that nothing is compiled twice and the kernel and
//! the bundle come from the cache.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, ensure};
use hearth_tests::{Outcome, TestCtx, here};
use rustix::process::geteuid;
use tokio::process::Command;

/// What each runs, and a part of what it prints. Two are in one row if the second needs the first.
const TASKS: &[(&[&str], &str)] = &[
    (&["kernel"], "bzImage"),
    (&["bundle"], "root"),
    (&["image --format qcow2"], "hearth.qcow2"),
    (&["sizes"], "init"),
    (
        &[
            "run --direct --offline --detach --storage insecure",
            "stop --force",
        ],
        "node-1 is HOME",
    ),
    (&["test unit hearth-base"], "passed"),
    (&["test e2e machine"], "1 passed"),
    (&["bench image --rounds 1"], "image."),
    (&["bench boot --rounds 1"], "boot.direct.home_seconds"),
    (&["bench cluster --rounds 1"], "cluster."),
    (&["bench curator --rounds 1"], "curator."),
    (&["bench kubernetes --rounds 1"], "kubernetes."),
];

/// A benchmark of Kubernetes on an emulated machine, five times what it takes.
const TASK: Duration = Duration::from_secs(3600);

/// Mounts and runs. `$1`: the Debian; `$2`: the folder of the task; then folders to share, `--`, and the command. The
/// mounts end with the name space.
const SCRIPT: &str = r#"
set -eu
debian=$1 work=$2; shift 2
mount -t tmpfs none "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=$debian,upperdir=$work/upper,workdir=$work/work" "$work/root"
while [ "$1" != -- ]; do
  mkdir -p "$work/root$1"
  mount --rbind "$1" "$work/root$1"
  shift
done
shift
# Of the new process name space: that of this machine knows its processes by other numbers.
mount -t proc proc "$work/root/proc"
cp /etc/resolv.conf "$work/root/etc/"
here=$PWD
exec chroot "$work/root" sh -c 'cd "$1" && shift && exec "$@"' sh "$here" "$@"
"#;

/// A Debian without anything that a developer installs.
struct Debian {
    folder: PathBuf,
    checkout: PathBuf,
    shared: Vec<OsString>,
    xtask: PathBuf,
}

impl Debian {
    async fn install(test: &TestCtx) -> anyhow::Result<Self> {
        ensure!(
            geteuid().is_root(),
            "this test installs packages: run it as root"
        );
        let folder = test.folder().join("debian");
        let output = Command::new("mmdebstrap")
            .args(["--quiet", "--variant=minbase", "--include=ca-certificates"])
            .arg("bookworm")
            .arg(&folder)
            .args(sources()?)
            .output()
            .await
            .context("mmdebstrap")?;
        ensure!(output.status.success(), "mmdebstrap: {output:?}");
        let xtask = test.artifacts().xtask.clone();
        // target/debug/xtask
        let target = xtask.ancestors().nth(2).context("no target folder")?;
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        let checkout = checkout.context("no checkout")?.to_owned();
        let home = env::var_os("HOME").context("HOME is not set")?;
        let apt = "/etc/apt/apt.conf.d".into();
        let system = ["/dev", "/sys"].map(Into::into);
        Ok(Self {
            shared: [home, apt, checkout.clone().into(), target.to_owned().into()]
                .into_iter()
                .chain(system)
                .filter(|path| Path::new(path).is_dir())
                .collect(),
            folder,
            checkout,
            xtask,
        })
    }

    /// Runs a line of tasks on a copy.
    async fn runs(&self, test: &TestCtx, tasks: &[&str]) -> anyhow::Result<Output> {
        let work = test.folder().join("task");
        tokio::fs::create_dir_all(&work).await?;
        let commands: Vec<String> = tasks
            .iter()
            .map(|task| format!("{} {task}", self.xtask.display()))
            .collect();
        let command = Command::new("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "--pid",
                "--fork",
                "--kill-child",
            ])
            .args(["sh", "-c", SCRIPT, "sh"])
            .arg(&self.folder)
            .arg(&work)
            .args(&self.shared)
            .args(["--", "sh", "-ec"])
            .arg(commands.join("; "))
            .current_dir(&self.checkout)
            .env("HEARTH_RUN_FOLDER", test.folder().join("run"))
            .env_remove("CARGO_MANIFEST_DIR")
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(TASK, command).await;
        output
            .with_context(|| format!("{tasks:?} does not end"))?
            .with_context(|| format!("{tasks:?}"))
    }
}

/// The sources of this machine's packages: a mirror that it can reach.
fn sources() -> anyhow::Result<Vec<PathBuf>> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    for entry in std::fs::read_dir("/etc/apt/sources.list.d")? {
        files.push(entry?.path());
    }
    let is_debian =
        |path: &PathBuf| std::fs::read_to_string(path).is_ok_and(|text| text.contains("bookworm"));
    files.retain(is_debian);
    ensure!(!files.is_empty(), "no sources of Debian 12 in /etc/apt");
    Ok(files)
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn every_task_installs_what_it_needs() -> Outcome {
    let test = TestCtx::begin(here!())?;
    test.place()?;
    let debian = Debian::install(&test).await?;
    let mut failed = Vec::new();
    for (tasks, expected) in TASKS {
        let output = debian.runs(&test, tasks).await?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let log = format!("{}\n{stdout}\n{stderr}", output.status);
        let name = tasks[0].replace(' ', "-");
        tokio::fs::write(test.folder().join(format!("{name}.log")), log).await?;
        let said = stdout.contains(expected) || stderr.contains(expected);
        let installed = stderr.contains("missing packages: ");
        if !(output.status.success() && said && installed) {
            failed.push(tasks);
        }
    }
    ensure!(failed.is_empty(), "failed: {failed:?}");
    test.passed()
}
