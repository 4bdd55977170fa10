//! Compiles Kubernetes from Debian's source package, with the Go toolchain that the package was made for.
//!
//! The source package holds upstream's whole tree with all its dependencies, so nothing is fetched while compiling. Its
//! own build makes kubectl only, through make rules that need more tools than this machine must have; all that they do
//! besides calling the compiler is to generate one file ([`Source::generate`]). The programs of the node are linked
//! into one ([`MULTICALL`]): five programs of nearly the same code would take three times the space.
//!
//! The same inputs give the same bytes: no paths (`-trimpath`), no build ID, no time, no cgo, and an environment
//! without the user's settings for Go.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError, Log, create_dir};
use hearth_build::progress::{Progress, Task};

use crate::amend::{self, AmendError};
use crate::inputs::{self, Inputs, InputsError};

/// Why Kubernetes was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The inputs are not available.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// The source does not match an amendment.
    #[error(transparent)]
    Amend(#[from] AmendError),
    /// No Go toolchain in Debian's packages.
    #[error("no Go toolchain in {}", .0.display())]
    NoGo(PathBuf),
    /// The name of the scratch folder has a colon.
    #[error("cannot add the toolchain to PATH")]
    Path(#[from] std::env::JoinPathsError),
    /// A described package is missing, or one too many was used.
    #[error("the OpenAPI description was not generated from the same packages as upstream's")]
    Description,
    /// The version in the source package's name is malformed.
    #[error("{0:?} is not a Kubernetes version")]
    Version(String),
}

/// The node's programs in one file.
pub(crate) const MULTICALL: &str = include_str!("multicall.go");

/// The names that the node's program is called by.
pub(crate) const PROGRAMS: [&str; 5] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubelet",
];

/// Approximate number of compiled packages; only the progress bar depends on it.
pub(crate) const EXPECTED_PACKAGES: u64 = 2150;

/// Approximate number of packages compiled for the tests.
pub(crate) const EXPECTED_TEST_PACKAGES: u64 = 1650;

/// What the tests read at run time, by upstream's own list (`hack/generate-bindata.sh`).
const TEST_DATA: [&str; 5] = [
    "test/conformance/testdata/...",
    "test/e2e/testing-manifests/...",
    "test/e2e_node/testing-manifests/...",
    "test/fixtures/...",
    "test/images/...",
];

/// Upstream's tree is one Go workspace of this name.
const WORKSPACE: &str = "k8s.io/kubernetes";

/// Marks a package whose types the API server describes to its clients.
const OPENAPI_TAG: &str = "+k8s:openapi-gen=";

/// Results of a build.
pub(crate) struct Built {
    /// The node's programs in one file.
    pub multicall: PathBuf,
    /// kubectl for the developer's machine.
    pub kubectl: PathBuf,
    /// Copyright and licences of the tree and everything in it.
    pub copyright: PathBuf,
}

/// Kubernetes' own tests.
pub(crate) struct Tests {
    /// The program that tests a cluster (`e2e.test`).
    pub program: PathBuf,
    /// Content for images of its pods: programs, and the files that one of them reads.
    pub for_images: Vec<PathBuf>,
}

/// Unpacks and compiles in `scratch`, an empty folder.
pub(crate) fn compile(
    progress: &dyn Progress,
    inputs: &Inputs,
    scratch: &Path,
    log: &mut Log,
    task: &dyn Task,
) -> Result<Built, CompileError> {
    let source = Source::unpack(progress, inputs, scratch, task)?;
    task.now("generating the API's description");
    source.generate(task, log)?;
    let multicall = source.tree.join("cmd/hearth");
    create_dir(&multicall)?;
    files::write(&multicall.join("main.go"), MULTICALL)?;
    // Without the drivers of cloud providers and without docker: a node has neither.
    let node = source
        .go("build")
        .args(["-tags", "providerless dockerless"]);
    Ok(Built {
        multicall: source.build(node, "./cmd/hearth", task, log)?,
        kubectl: source.build(source.go("build"), "./cmd/kubectl", task, log)?,
        copyright: source.tree.join("debian/copyright"),
    })
}

/// Unpacks and compiles the tests in `scratch`, an empty folder.
pub(crate) fn compile_tests(
    progress: &dyn Progress,
    inputs: &Inputs,
    scratch: &Path,
    log: &mut Log,
    task: &dyn Task,
) -> Result<Tests, CompileError> {
    let source = Source::unpack(progress, inputs, scratch, task)?;
    source.embed_test_data(task, log)?;
    // `go test` does not print what it compiles, and its vet would check all of it.
    source.follow(source.go("build").arg("./test/e2e/..."), task, log)?;
    let mut for_images = Vec::new();
    for package in ["./test/images/agnhost", "./test/images/nonewprivs"] {
        for_images.push(source.build(source.go("build"), package, task, log)?);
    }
    let keys = source.tree.join("test/images/agnhost/porter");
    for_images.extend(["localhost.crt", "localhost.key"].map(|file| keys.join(file)));
    Ok(Tests {
        for_images,
        program: source.build(
            source.go("test").args(["-c", "-vet=off"]),
            "./test/e2e",
            task,
            log,
        )?,
    })
}

/// The unpacked tree and its toolchain.
struct Source<'a> {
    progress: &'a dyn Progress,
    scratch: &'a Path,
    goroot: PathBuf,
    tree: PathBuf,
    version: String,
}

impl<'a> Source<'a> {
    fn unpack(
        progress: &'a dyn Progress,
        inputs: &Inputs,
        scratch: &'a Path,
        task: &dyn Task,
    ) -> Result<Source<'a>, CompileError> {
        let tree = scratch.join("gopath/src").join(WORKSPACE);
        create_dir(&tree)?;
        let (upstream, debian, version) = inputs.source()?;
        task.now("unpacking Kubernetes");
        let tar = || {
            Cmd::new("tar")
                .args(["--extract", "--no-same-owner", "--directory"])
                .arg(&tree)
        };
        tar()
            .args(["--strip-components=1", "--file"])
            .arg(upstream)
            .run(progress)?;
        tar().arg("--file").arg(debian).run(progress)?;
        let series = files::read_text(&tree.join("debian/patches/series"))?;
        for patch in series.lines().map(str::trim) {
            if !patch.is_empty() && !patch.starts_with('#') {
                let patch = tree.join("debian/patches").join(patch);
                Cmd::new("patch")
                    .dir(&tree)
                    .args(["--strip=1", "--silent", "--input"])
                    .arg(patch)
                    .run(progress)?;
            }
        }
        amend::amend(&tree)?;
        task.now("unpacking Go");
        let go = scratch.join("go");
        for package in inputs::TOOLS
            .iter()
            .filter(|name| name.starts_with("golang"))
        {
            Cmd::new("dpkg-deb")
                .arg("--extract")
                .arg(inputs.package(package)?)
                .arg(&go)
                .run(progress)?;
        }
        Ok(Source {
            progress,
            scratch,
            goroot: goroot(&go)?,
            tree,
            version,
        })
    }

    /// `go VERB`, with the flags that every use needs.
    fn go(&self, verb: &str) -> Cmd {
        Cmd::new(self.goroot.join("bin/go"))
            .dir(&self.tree)
            .env_remove_if(is_gos)
            .env("GOROOT", &self.goroot)
            .env("GOPATH", self.scratch.join("gopath"))
            .env("GOCACHE", self.scratch.join("gocache"))
            .env("GOTMPDIR", self.scratch)
            .env("GOENV", "off")
            .env("GO111MODULE", "off")
            .env("GOPROXY", "off")
            .env("CGO_ENABLED", "0")
            .args([verb, "-v", "-trimpath"])
    }

    /// Compiles a program of a package into the scratch folder, under the package's name.
    fn build(
        &self,
        go: Cmd,
        package: &str,
        task: &dyn Task,
        log: &mut Log,
    ) -> Result<PathBuf, CompileError> {
        let name = package.rsplit('/').next().unwrap_or(package);
        let built = self.scratch.join(name);
        let go = go
            .args(["-ldflags", &linker_flags(&self.version)?, "-o"])
            .arg(&built)
            .arg(package);
        self.follow(go, task, log)?;
        Ok(built)
    }

    /// Writes the file that embeds the tests' data, by the generator that is in the tree.
    fn embed_test_data(&self, task: &dyn Task, log: &mut Log) -> Result<(), CompileError> {
        task.now("embedding the tests' data");
        let package = "./vendor/github.com/go-bindata/go-bindata/go-bindata";
        let generator = self.build(self.go("build"), package, task, log)?;
        Cmd::new(generator)
            .dir(&self.tree)
            .args(["-nometadata", "-pkg", "generated"])
            .args(["-o", "test/e2e/generated/bindata.go"])
            .args(["-ignore", r"\.jpg", "-ignore", r"\.png", "-ignore", r"\.md"])
            .args(["-ignore", r"BUILD(\.bazel)?"])
            .args(TEST_DATA)
            .run(self.progress)?;
        Ok(())
    }

    /// Generates the one file that the source package lacks: the OpenAPI description that the API server serves, made
    /// from the comments in all packages that are marked for it. The tree's list of known violations must come out the
    /// same, so a package that is missing here is an error and not a smaller description.
    fn generate(&self, task: &dyn Task, log: &mut Log) -> Result<(), CompileError> {
        let generator = self.scratch.join("openapi-gen");
        let package = "./vendor/k8s.io/kube-openapi/cmd/openapi-gen";
        self.follow(
            self.go("build").arg("-o").arg(&generator).arg(package),
            task,
            log,
        )?;
        let report = self.scratch.join("violations");
        Cmd::new(&generator)
            .dir(&self.tree)
            .env("GOROOT", &self.goroot)
            .env("GOPATH", self.scratch.join("gopath"))
            .env("GO111MODULE", "off")
            .env("PATH", self.path_with_go()?)
            .args(["--logtostderr", "--input-dirs"])
            .arg(self.described_packages()?.join(","))
            .arg("--output-package")
            .arg(format!("{WORKSPACE}/pkg/generated/openapi"))
            .args([
                "--output-file-base",
                "zz_generated.openapi",
                "--go-header-file",
            ])
            .arg("vendor/k8s.io/code-generator/hack/boilerplate.go.txt")
            .arg("--report-filename")
            .arg(&report)
            .run(self.progress)?;
        let known = self.tree.join("api/api-rules/violation_exceptions.list");
        if files::read(&report)? != files::read(&known)? {
            return Err(CompileError::Description);
        }
        Ok(())
    }

    /// The packages that are marked for the description, by import path, sorted.
    fn described_packages(&self) -> Result<Vec<String>, FileError> {
        let mut packages = BTreeSet::new();
        for folder in ["cmd", "pkg", "plugin", "staging/src/k8s.io"] {
            tagged(&self.tree, Path::new(folder), &mut packages)?;
        }
        // Two adjacent trees have descriptions of their own.
        let foreign = ["k8s.io/code-generator", "k8s.io/sample-apiserver"];
        let packages = packages.into_iter().map(|package| {
            let package = package.replacen("staging/src/", "vendor/", 1);
            format!("{WORKSPACE}/{package}")
        });
        Ok(packages
            .filter(|package| !foreign.iter().any(|name| package.contains(name)))
            .collect())
    }

    fn path_with_go(&self) -> Result<OsString, std::env::JoinPathsError> {
        let mut path = vec![self.goroot.join("bin")];
        path.extend(std::env::split_paths(
            &std::env::var_os("PATH").unwrap_or_default(),
        ));
        std::env::join_paths(path)
    }

    /// Runs it; each output line is a compiled package.
    fn follow(&self, go: Cmd, task: &dyn Task, log: &mut Log) -> Result<(), CommandError> {
        go.stream(self.progress, |line| {
            log.line(line)?;
            task.step();
            let short = line.rsplit("/vendor/").next().unwrap_or(line);
            task.now(short);
            Ok(())
        })
    }
}

/// Whether the variable belongs to the Go toolchain.
fn is_gos(name: &str) -> bool {
    name.starts_with("GO") || name.starts_with("CGO_")
}

/// The root of the toolchain; Debian's packages put it below the name of its series.
fn goroot(unpacked: &Path) -> Result<PathBuf, CompileError> {
    let lib = unpacked.join("usr/lib");
    let folders = files::entries(&lib)?;
    folders
        .into_iter()
        .map(|folder| folder.path())
        .find(|folder| folder.join("bin/go").exists())
        .ok_or(CompileError::NoGo(lib))
}

/// Adds the folders below `folder`, by path from `tree`, that hold a Go file with the tag.
fn tagged(tree: &Path, folder: &Path, found: &mut BTreeSet<String>) -> Result<(), FileError> {
    let path = tree.join(folder);
    for entry in files::entries(&path)? {
        let kind = entry.file_type().map_err(files::failed("read", &path))?;
        let name = entry.file_name();
        if kind.is_dir() {
            tagged(tree, &folder.join(&name), found)?;
        } else if kind.is_file() && name.to_string_lossy().ends_with(".go") {
            let text = files::read(&entry.path())?;
            if String::from_utf8_lossy(&text).contains(OPENAPI_TAG) {
                found.insert(folder.to_string_lossy().into_owned());
            }
        }
    }
    Ok(())
}

/// The linker's flags, which set the version that the programs report. The commit is in the source already.
fn linker_flags(version: &str) -> Result<String, CompileError> {
    let mut numbers = version.split('.');
    let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
        return Err(CompileError::Version(version.to_owned()));
    };
    let mut flags = "-s -w -buildid=".to_owned();
    for package in ["component-base/version", "client-go/pkg/version"] {
        let package = format!("{WORKSPACE}/vendor/k8s.io/{package}");
        flags += &format!(
            " -X {package}.gitVersion=v{version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor} \
             -X {package}.gitTreeState=archive"
        );
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_multicall_program_knows_every_name() {
        for name in PROGRAMS {
            assert!(MULTICALL.contains(&format!("\"{name}\":")), "{name}");
        }
    }

    #[test]
    fn tagged_packages_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("pkg/a/doc.go", "// +k8s:openapi-gen=true\npackage a");
        file("pkg/a/b/types.go", "package b");
        file("pkg/c/notes.txt", "+k8s:openapi-gen=true");
        let mut found = BTreeSet::new();
        tagged(dir.path(), Path::new("pkg"), &mut found).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["pkg/a"]);
    }

    #[test]
    fn the_linker_tells_the_version() {
        let flags = linker_flags("1.20.2").unwrap();
        assert!(flags.starts_with("-s -w -buildid= -X "));
        for set in ["gitVersion=v1.20.2 ", "gitMajor=1 ", "gitMinor=20 "] {
            assert!(
                flags.contains(&format!("component-base/version.{set}")),
                "{set}"
            );
        }
        assert!(linker_flags("head").is_err());
    }

    #[test]
    fn settings_of_the_users_go_are_known() {
        assert!(is_gos("GOFLAGS") && is_gos("CGO_CFLAGS"));
        assert!(!is_gos("PATH") && !is_gos("EGO"));
    }
}
