//! Kubernetes' own conformance tests, and those of network policies, as far as they run without a registry:
//! `tests/conformance.txt` and `tests/network-policies.txt` list them, with the reason for each that is not run.
//!
//! Each area has machines of its own, usually one. They take long: about twenty minutes each without hardware
//! virtualisation. `cargo xtask conformance` runs all cases that can run, with the test [`sweep`].

use std::collections::BTreeSet;

use hearth_api::v1::UpdateNodeRolesRequest;
use hearth_tests::kubernetes::Kubernetes;
use hearth_tests::kubernetes::conformance::{self, Sweep};
use hearth_tests::{Cluster, Outcome, TestCtx, here};

async fn conforms(test: TestCtx, area: &str, machines: u16) -> Outcome {
    let (cluster, kubernetes) = start(&test, machines).await?;
    kubernetes.conforms(&test, area, machines).await?;
    end(cluster, machines).await?;
    test.passed()
}

/// A part of all cases on two nodes, which upstream's conformance program asks for.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn sweep() -> Outcome {
    const MACHINES: u16 = 2;
    let test = TestCtx::begin(here!())?;
    let sweep = Sweep::of(&test)?;
    let (cluster, kubernetes) = start(&test, MACHINES).await?;
    kubernetes.sweep(&test, &sweep, MACHINES).await?;
    end(cluster, MACHINES).await?;
    test.passed()
}

/// The first machine has both roles, the others are workers.
async fn start(test: &TestCtx, machines: u16) -> anyhow::Result<(Cluster, Kubernetes)> {
    let mut cluster = Cluster::founded_as(test, machines, |_, plan| plan.kubernetes()).await?;
    let worker = UpdateNodeRolesRequest {
        kubernetes_worker: Some(true),
        ..UpdateNodeRolesRequest::default()
    };
    for number in 2..=machines {
        cluster.add_nodes(&[number]).await?;
        cluster.set_roles(number, worker.clone()).await?;
    }
    let nodes: Vec<_> = (1..=machines)
        .map(|number| cluster.node(number).id().to_owned())
        .collect();
    let nodes: Vec<_> = nodes.iter().map(String::as_str).collect();
    let kubernetes = cluster.kubernetes(test, 1).await?;
    kubernetes.ready(&nodes).await?;
    Ok((cluster, kubernetes))
}

async fn end(mut cluster: Cluster, machines: u16) -> Outcome {
    for number in (1..=machines).rev() {
        cluster.node(number).power_off().await?;
    }
    Ok(())
}

/// A test for each area, with the number of machines, and one that there is no other area.
macro_rules! areas {
    ($($(#[$about:meta])+ $area:ident on $machines:literal,)+) => {
        $(
            $(#[$about])+
            #[tokio::test]
            #[ignore = "long: --long runs it"]
            async fn $area() -> Outcome {
                conforms(TestCtx::begin(here!())?, stringify!($area), $machines).await
            }
        )+

        #[test]
        fn every_area_of_the_list_has_a_test() {
            let tests = BTreeSet::from([$(stringify!($area)),+]);
            assert_eq!(conformance::areas().unwrap(), tests);
        }
    };
}

areas! {
    /// The API server and the controllers, with few or no pods.
    objects on 1,
    /// Containers: how they start, end, are probed and get their environment.
    pods on 1,
    /// Files in pods that come from objects, and shared directories.
    volumes on 1,
    /// Pods that controllers create: deployments, daemon and stateful sets, and garbage collection.
    workloads on 1,
    /// Services, names and connectivity between pods.
    network on 1,
    /// Pods that the API server calls.
    webhooks on 1,
    /// What users do with kubectl.
    kubectl on 1,
    /// The placement of pods, and preemption.
    scheduling on 1,
    /// What one machine cannot show.
    nodes on 2,
    /// Which connections network policies permit, between pods of one node and of two.
    network_policies on 2,
}
