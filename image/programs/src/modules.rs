//! The table of modules: which programs each has, and how they are built.

/// An upstream project, with the programs of it that a node runs.
#[derive(Debug)]
pub struct Module {
    /// The name of its folder, and in messages.
    pub name: &'static str,
    /// The Go module whose version is the project's.
    pub(crate) upstream: &'static str,
    /// Modules of the same project that have no `go.mod` of a common version: raised together with it.
    pub(crate) siblings: Option<Siblings>,
    pub(crate) programs: &'static [Program],
    /// Files that one of the programs reads: the name in the result, and the path in the project's module.
    pub(crate) files: &'static [(&'static str, &'static str)],
    pub(crate) tags: &'static [&'static str],
    /// Variables that the linker sets: the Go package's variable, and its value.
    pub(crate) variables: &'static [(&'static str, Value)],
    /// Whether C code is part of it.
    pub(crate) cgo: bool,
    /// Files of modules that are compiled in another form.
    pub(crate) replaced: &'static [Replaced],
    /// Approximate number of compiled packages; only the progress bar depends on it.
    pub(crate) packages: u64,
}

/// The modules that have the versions of the project under another major number.
#[derive(Debug)]
pub(crate) struct Siblings {
    /// Prefix of their paths.
    pub(crate) prefix: &'static str,
    /// Start of the project's versions.
    pub(crate) of_project: &'static str,
    /// Start of theirs.
    pub(crate) theirs: &'static str,
}

/// A source file that the compiler reads from our folder instead of its module, because upstream's has a fault. Of each,
/// our file says which.
#[derive(Debug)]
pub(crate) struct Replaced {
    /// The Go module.
    pub(crate) module: &'static str,
    /// The path in the module, and in our folder.
    pub(crate) path: &'static str,
    /// SHA-256 of upstream's file, in hex: another one may no longer have the fault.
    pub(crate) upstream: &'static str,
}

/// One program.
#[derive(Debug)]
pub(crate) struct Program {
    /// The file's name in the result.
    pub(crate) name: &'static str,
    /// The main package, by its import path; "." for ours.
    pub(crate) package: &'static str,
    /// Whether it is the package's tests, as a program.
    pub(crate) tests: bool,
}

/// What a variable is set to.
#[derive(Debug)]
pub(crate) enum Value {
    /// The version with its "v".
    Version,
    /// The version without it.
    Number,
    /// The first number of the version.
    Major,
    /// The second number of the version.
    Minor,
    /// This word.
    Word(&'static str),
}

const fn program(name: &'static str, package: &'static str) -> Program {
    Program {
        name,
        package,
        tests: false,
    }
}

/// Kubernetes' go.mod requires these at v0.0.0 and replaces them by folders, which has no effect on other modules.
const OF_KUBERNETES: Siblings = Siblings {
    prefix: "k8s.io/",
    of_project: "v1.",
    theirs: "v0.",
};

/// Variables with the version of Kubernetes.
const VERSION_OF_KUBERNETES: &[(&str, Value)] = &[
    ("k8s.io/component-base/version.gitVersion", Value::Version),
    ("k8s.io/component-base/version.gitMajor", Value::Major),
    ("k8s.io/component-base/version.gitMinor", Value::Minor),
    (
        "k8s.io/component-base/version.gitTreeState",
        Value::Word("clean"),
    ),
];

/// The store of the cluster.
pub static ETCD: Module = Module {
    name: "etcd",
    upstream: "go.etcd.io/etcd/server/v3",
    siblings: None,
    programs: &[program("etcd", "go.etcd.io/etcd/server/v3")],
    files: &[],
    tags: &[],
    variables: &[],
    cgo: false,
    replaced: &[Replaced {
        module: "go.etcd.io/etcd/client/pkg/v3",
        path: "transport/timeout_transport.go",
        upstream: "e12e5fc68b272bf9c7f4e2b575e1fba0c6acc87202d1737ee975e4c92c2e8e81",
    }],
    packages: 480,
};

/// `kubernetes`: API server, controller-manager, scheduler, kubelet and kube-proxy in one file, because they consist of
/// nearly the same code: 145 MB instead of some 500. `kubectl` is for the developer's machine.
pub static KUBERNETES: Module = kubernetes("kubernetes");

/// The minor version before it, which the node supports as well: for the test of that.
pub static KUBERNETES_PREVIOUS: Module = kubernetes("kubernetes-previous");

const fn kubernetes(name: &'static str) -> Module {
    Module {
        name,
        upstream: "k8s.io/kubernetes",
        siblings: Some(OF_KUBERNETES),
        programs: PROGRAMS_OF_KUBERNETES,
        files: &[],
        tags: &[],
        variables: VERSION_OF_KUBERNETES,
        cgo: false,
        replaced: &[],
        packages: 2600,
    }
}

const PROGRAMS_OF_KUBERNETES: &[Program] = &[
    program("kubernetes", "."),
    program("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
];

/// Kubernetes' own tests, and the programs that their pods run.
pub static CONFORMANCE: Module = Module {
    name: "conformance",
    upstream: "k8s.io/kubernetes",
    siblings: Some(OF_KUBERNETES),
    programs: &[
        Program {
            name: "e2e.test",
            package: "k8s.io/kubernetes/test/e2e",
            tests: true,
        },
        program("agnhost", "k8s.io/kubernetes/test/images/agnhost"),
        program("nonewprivs", "k8s.io/kubernetes/test/images/nonewprivs"),
    ],
    files: &[
        ("localhost.crt", "test/images/agnhost/porter/localhost.crt"),
        ("localhost.key", "test/images/agnhost/porter/localhost.key"),
    ],
    tags: &[],
    variables: VERSION_OF_KUBERNETES,
    cgo: false,
    replaced: &[],
    packages: 2400,
};

/// The container runtime, and the process that it starts for each pod. `ctr` is for benchmarks.
pub static CONTAINERD: Module = Module {
    name: "containerd",
    upstream: "github.com/containerd/containerd/v2",
    siblings: None,
    programs: &[
        program(
            "containerd",
            "github.com/containerd/containerd/v2/cmd/containerd",
        ),
        program(
            "containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        ),
        program("ctr", "github.com/containerd/containerd/v2/cmd/ctr"),
    ],
    files: &[],
    // Snapshots are directories under overlayfs; the kernel has none of these.
    tags: &["no_aufs", "no_btrfs", "no_devmapper", "no_zfs"],
    variables: &[(
        "github.com/containerd/containerd/v2/version.Version",
        Value::Number,
    )],
    cgo: false,
    replaced: &[],
    packages: 1150,
};

/// Starts containers. It enters namespaces in C, before Go's runtime starts its threads.
pub static RUNC: Module = Module {
    name: "runc",
    upstream: "github.com/opencontainers/runc",
    siblings: None,
    programs: &[program("runc", "github.com/opencontainers/runc")],
    files: &[],
    // Names of users and hosts are found without the C library, whose functions for it cannot be linked statically.
    tags: &["seccomp", "netgo", "osusergo"],
    variables: &[],
    cgo: true,
    replaced: &[],
    packages: 330,
};

/// The plugins of the pod network.
pub static CNI: Module = Module {
    name: "cni",
    upstream: "github.com/containernetworking/plugins",
    siblings: None,
    programs: &[
        program(
            "bridge",
            "github.com/containernetworking/plugins/plugins/main/bridge",
        ),
        program(
            "host-local",
            "github.com/containernetworking/plugins/plugins/ipam/host-local",
        ),
        program(
            "loopback",
            "github.com/containernetworking/plugins/plugins/main/loopback",
        ),
        program(
            "portmap",
            "github.com/containernetworking/plugins/plugins/meta/portmap",
        ),
    ],
    files: &[],
    tags: &[],
    variables: &[(
        "github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion",
        Value::Version,
    )],
    cgo: false,
    replaced: &[],
    packages: 280,
};

/// A registry of images, for tests.
pub static REGISTRY: Module = Module {
    name: "registry",
    upstream: "github.com/distribution/distribution/v3",
    siblings: None,
    programs: &[program(
        "registry",
        "github.com/distribution/distribution/v3/cmd/registry",
    )],
    files: &[],
    tags: &[],
    variables: &[],
    cgo: false,
    replaced: &[],
    packages: 900,
};

/// Measures what nodes and pods use, for `kubectl top`: a part that most clusters add, to test that it works here. The
/// files are the manifests that its makers publish for it.
pub static METRICS_SERVER: Module = Module {
    name: "metrics-server",
    upstream: "sigs.k8s.io/metrics-server",
    siblings: None,
    programs: &[program(
        "metrics-server",
        "sigs.k8s.io/metrics-server/cmd/metrics-server",
    )],
    files: &[
        ("kustomization.yaml", "manifests/base/kustomization.yaml"),
        ("apiservice.yaml", "manifests/base/apiservice.yaml"),
        ("deployment.yaml", "manifests/base/deployment.yaml"),
        ("rbac.yaml", "manifests/base/rbac.yaml"),
        ("service.yaml", "manifests/base/service.yaml"),
    ],
    tags: &[],
    variables: &[],
    cgo: false,
    replaced: &[],
    packages: 1000,
};

/// A gateway controller, to test that it works here. The files are those of its makers' own tests in a cluster: the
/// definitions of the gateway's kinds, its permissions, and the controller.
pub static TRAEFIK: Module = Module {
    name: "traefik",
    upstream: "github.com/traefik/traefik/v3",
    siblings: None,
    programs: &[program(
        "traefik",
        "github.com/traefik/traefik/v3/cmd/traefik",
    )],
    files: &[
        (
            "kinds.yaml",
            "integration/fixtures/gateway-api-conformance/00-experimental-v1.4.0.yml",
        ),
        (
            "rbac.yaml",
            "integration/fixtures/gateway-api-conformance/01-rbac.yml",
        ),
        (
            "traefik.yaml",
            "integration/fixtures/gateway-api-conformance/02-traefik.yml",
        ),
    ],
    tags: &[],
    variables: &[],
    cgo: false,
    replaced: &[],
    packages: 2500,
};

/// A collector of the logs of pods, and a store that it sends them to, to test that they work here. The collector's
/// manifests are in its documentation.
pub static VICTORIA_LOGS: Module = Module {
    name: "victoria-logs",
    upstream: "github.com/VictoriaMetrics/VictoriaLogs",
    siblings: None,
    programs: &[
        program(
            "victoria-logs",
            "github.com/VictoriaMetrics/VictoriaLogs/app/victoria-logs",
        ),
        program(
            "vlagent",
            "github.com/VictoriaMetrics/VictoriaLogs/app/vlagent",
        ),
    ],
    files: &[("vlagent.md", "docs/victorialogs/vlagent.md")],
    tags: &[],
    variables: &[],
    cgo: false,
    replaced: &[],
    packages: 320,
};

/// All of them.
pub(crate) static ALL: [&Module; 11] = [
    &CNI,
    &CONFORMANCE,
    &CONTAINERD,
    &ETCD,
    &KUBERNETES,
    &KUBERNETES_PREVIOUS,
    &METRICS_SERVER,
    &REGISTRY,
    &RUNC,
    &TRAEFIK,
    &VICTORIA_LOGS,
];

impl Module {
    /// The linker's flags, for this version ("v1.37.2").
    pub(crate) fn linker_flags(&self, version: &str) -> String {
        let number = version.strip_prefix('v').unwrap_or(version);
        let mut numbers = number.split('.');
        let (major, minor) = (
            numbers.next().unwrap_or_default(),
            numbers.next().unwrap_or_default(),
        );
        // No symbol tables, and no ID by which go would recognise its own work.
        let mut flags = "-s -w -buildid=".to_owned();
        for (name, value) in self.variables {
            let value = match value {
                Value::Version => version,
                Value::Number => number,
                Value::Major => major,
                Value::Minor => minor,
                Value::Word(word) => word,
            };
            flags += &format!(" -X {name}={value}");
        }
        if self.cgo {
            flags += " -linkmode external -extldflags -static";
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_linker_sets_the_version() {
        let flags = KUBERNETES.linker_flags("v1.37.2");
        for set in [
            "gitVersion=v1.37.2 ",
            "gitMajor=1 ",
            "gitMinor=37 ",
            "gitTreeState=clean",
        ] {
            assert!(
                flags.contains(&format!("component-base/version.{set}")),
                "{set}"
            );
        }
        assert_eq!(ETCD.linker_flags("v3.7.3"), "-s -w -buildid=");
        assert!(RUNC.linker_flags("v1.5.2").ends_with("-static"));
    }

    /// A cluster is tested by the tests of its own version.
    #[test]
    fn tests_have_the_version_of_what_they_test() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        let [tests, programs] = [&CONFORMANCE, &KUBERNETES].map(|module| {
            let path = sources.join(module.name).join("go.mod");
            let go_mod = std::fs::read_to_string(path).unwrap();
            crate::compile::required(&go_mod, module.upstream).unwrap()
        });
        assert_eq!(tests, programs);
    }

    #[test]
    fn the_previous_kubernetes_is_one_minor_version_older() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        let [shipped, previous] = [&KUBERNETES, &KUBERNETES_PREVIOUS].map(|module| {
            let path = sources.join(module.name).join("go.mod");
            let go_mod = std::fs::read_to_string(path).unwrap();
            let version = crate::compile::required(&go_mod, module.upstream).unwrap();
            let minor = version.strip_prefix("v1.").unwrap().split('.').next();
            minor.unwrap().parse::<u32>().unwrap()
        });
        assert_eq!(previous + 1, shipped);
    }

    #[test]
    fn what_is_replaced_is_required_and_has_its_file() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        for module in ALL {
            let folder = sources.join(module.name);
            let go_mod = std::fs::read_to_string(folder.join("go.mod")).unwrap();
            for replaced in module.replaced {
                assert!(folder.join(replaced.path).is_file(), "{}", replaced.path);
                let version = crate::compile::required(&go_mod, replaced.module);
                assert!(version.is_some(), "{}", replaced.module);
            }
        }
    }

    #[test]
    fn every_program_of_upstream_is_a_tool_of_its_module() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        for module in ALL {
            let text = std::fs::read_to_string(sources.join(module.name).join("go.mod")).unwrap();
            let of_upstream = |program: &&Program| program.package != "." && !program.tests;
            for program in module.programs.iter().filter(of_upstream) {
                let is_it = |line: &str| {
                    let line = line.trim();
                    line.strip_prefix("tool ").unwrap_or(line) == program.package
                };
                assert!(
                    text.lines().any(is_it),
                    "{}: {}",
                    module.name,
                    program.package
                );
            }
        }
    }
}
