//! Kubernetes' own conformance tests, made of the same source as the bundle.
//!
//! The program (`e2e.test`) runs on the developer's machine and asks a cluster; what its pods run comes as images, from
//! registries that a test's machines have no way to. Three of them can be made here, and ride along in a bundle that is ours
//! but for that:
//!
//! | image | made of |
//! |---|---|
//! | `agnhost` | upstream's own program, compiled; around it Debian's busybox, where upstream has Alpine's with curl and dig |
//! | `busybox` | Debian's busybox, newer than upstream's |
//! | `pause` | the bundle's own |
//!
//! Cases that want another image, or what ours lack, cannot pass; `tests/conformance.txt` says which those are. The names are
//! upstream's, for that is what the program asks for. So such a bundle is for tests alone.
//!
//! An entry of the cache, as the bundle is; its key covers the bundle's.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use super::compile::{self, Tests};
use super::inputs::Inputs;
use super::tree::{self, Packages};
use super::{Bundle, ROOT, compiler, folders, key, new_log, oci, sync};
use crate::cache::{Builder, Cache};
use crate::command::Cmd;
use crate::ui::Ui;

/// Version of the steps here, part of the key.
const RECIPE: u32 = 1;

/// The program, in an entry.
const PROGRAM: &str = "host/e2e.test";

/// What upstream's images have in their environment.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The tests, and what they need on a node.
pub struct Conformance {
    /// Asks a cluster.
    pub program: PathBuf,
    /// The bundle with the tests' images.
    pub bundle: Bundle,
}

/// Both, built if they are not in the cache. The bundle must have been ensured before.
pub fn ensure(ui: &Ui, bundle: &Bundle) -> Result<Conformance> {
    let cache = Cache::of_user("kubernetes")?;
    let inputs = Inputs::kept()?.context("the packages of the bundle are gone")?;
    let key = format!("conformance-{RECIPE}-{}", key(&inputs, &compiler(ui)?));
    if let Some(entry) = cache.get(&key) {
        return of_entry(&entry, bundle);
    }
    let builder = cache.lock(ui)?;
    if let Some(entry) = cache.get(&key) {
        return of_entry(&entry, bundle);
    }
    ui.say(
        "Kubernetes' conformance tests are not in the cache: building them, which takes minutes",
    );
    let scratch = builder.scratch()?;
    let entry = build(ui, &inputs, bundle, &builder, scratch.path())?;
    sync(&entry)?;
    of_entry(&builder.publish(&entry, &key)?, bundle)
}

fn of_entry(entry: &Path, bundle: &Bundle) -> Result<Conformance> {
    let ours = Bundle::read(&entry.join(ROOT))
        .with_context(|| format!("the cache is damaged: remove {}", entry.display()))?;
    Ok(Conformance {
        program: entry.join(PROGRAM),
        bundle: Bundle {
            kubectl: bundle.kubectl.clone(),
            ..ours
        },
    })
}

fn build(
    ui: &Ui,
    inputs: &Inputs,
    bundle: &Bundle,
    builder: &Builder<'_>,
    scratch: &Path,
) -> Result<PathBuf> {
    inputs.verify()?;
    let (log_path, mut log) = new_log(builder)?;
    let task = ui.counted_task(
        "building Kubernetes' conformance tests",
        compile::EXPECTED_TEST_PACKAGES,
    );
    let [source, stage, entry] = folders(scratch)?;
    let built = compile::compile_tests(ui, inputs, &source, &mut log, &task)
        .with_context(|| format!("the whole log is {}", log_path.display()))?;
    log.flush().context("cannot write the log")?;
    task.now("making the images");
    let root = entry.join(ROOT);
    // Links and modes are part of a bundle.
    Cmd::new("cp")
        .arg("--archive")
        .arg(&bundle.root)
        .arg(&root)
        .run(ui)?;
    images(ui, inputs, &built, &stage, &root.join("images"))?;
    tree::copy(&built.program, &entry.join(PROGRAM))?;
    task.done();
    Ok(entry)
}

fn images(ui: &Ui, inputs: &Inputs, built: &Tests, stage: &Path, to: &Path) -> Result<()> {
    let packages = Packages::unpack(ui, inputs, stage)?;
    tree::pause_image(
        ui,
        "k8s.gcr.io/pause:3.2",
        &stage.join("pause"),
        &to.join("e2e-pause.tar"),
    )?;
    let busybox = stage.join("busybox");
    tree::busybox_rootfs(ui, &packages, &busybox.join("rootfs"))?;
    tree::settle(&busybox.join("rootfs"))?;
    oci::write(
        ui,
        "docker.io/library/busybox:1.29",
        &busybox.join("rootfs"),
        &json!({ "Cmd": ["sh"], "Env": [PATH] }),
        &busybox,
        &to.join("e2e-busybox.tar"),
    )?;
    let agnhost = stage.join("agnhost");
    let rootfs = agnhost.join("rootfs");
    tree::busybox_rootfs(ui, &packages, &rootfs)?;
    fs::create_dir(rootfs.join("uploads")).context("cannot create the folder for uploads")?;
    tree::copy(&built.agnhost, &rootfs.join("agnhost"))?;
    std::os::unix::fs::symlink("agnhost", rootfs.join("agnhost-2"))
        .context("cannot make the link agnhost-2")?;
    tree::settle(&rootfs)?;
    oci::write(
        ui,
        "k8s.gcr.io/e2e-test-images/agnhost:2.21",
        &rootfs,
        &json!({ "Entrypoint": ["/agnhost"], "Cmd": ["pause"], "Env": [PATH] }),
        &agnhost,
        &to.join("e2e-agnhost.tar"),
    )
}
